"""Logits to distributions to tokens: the only place where that happens, for sampler, drafters and verifier alike.

Order, as in vLLM: logit bias; repetition, then frequency and presence penalties; temperature; min-p; top-k; top-p.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cpuspec.config import SamplingParams
from cpuspec.errors import BackendError, ConfigError

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


class Uniform(Protocol):
    """Where draws come from: numpy's Generator, or whatever a test puts in its place."""

    def random(self) -> Any:
        """A number drawn uniformly from [0, 1)."""
        ...


class TokenHistory:
    """Which tokens a sequence has seen, for the penalties: the prompt's ids, and how often each id was generated."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt_ids: I64 = np.unique(np.asarray(prompt, np.int64))
        self._output_counts: dict[int, int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Count generated tokens."""
        for token in tokens:
            self._output_counts[token] = self._output_counts.get(token, 0) + 1

    def retract(self, tokens: Iterable[int]) -> None:
        """Take back generated tokens that were counted."""
        for token in tokens:
            self._output_counts[token] -= 1
            if not self._output_counts[token]:
                del self._output_counts[token]

    def counts(self, ahead: Sequence[int]) -> tuple[I64, I64, I64]:
        """Ids seen anywhere, ids generated, and how often each of those; `ahead` counts as generated."""
        counts = self._output_counts
        if len(ahead):
            counts = dict(counts)
            for token in ahead:
                counts[int(token)] = counts.get(int(token), 0) + 1
        ids = np.fromiter(counts.keys(), np.int64, len(counts))
        return np.union1d(self._prompt_ids, ids), ids, np.fromiter(counts.values(), np.int64, len(counts))


def keeps_order(params: SamplingParams) -> bool:
    """Whether the processed logits are the raw logits, so that their argmax needs no history."""
    return (
        not params.logit_bias and params.repetition_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0
    )


def processed(logits: F32, params: SamplingParams, history: TokenHistory, ahead: Sequence[int] = ()) -> F64:
    """Logits [V] after bias and penalties, in float64.

    history: the sequence's tokens; ahead: drafted tokens between them and this row. Repetition divides positive and
    multiplies negative logits of every token seen (arXiv 1909.05858, section 4.1); frequency and presence subtract for
    generated tokens only. Raises BackendError for NaN or infinite logits and ConfigError where bias and penalties leave no token.
    """
    x = logits.astype(np.float64)
    if not np.isfinite(x.max()):
        raise _not_finite(logits)
    if keeps_order(params):
        return x
    bias = params.logit_bias
    x[np.fromiter(bias.keys(), np.int64, len(bias))] += np.fromiter(bias.values(), np.float64, len(bias))
    seen, generated, counts = history.counts(ahead)
    with np.errstate(over="ignore", invalid="ignore"):
        x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
        x[generated] -= params.frequency_penalty * counts + params.presence_penalty
    if not np.isfinite(x.max()):
        raise ConfigError("logit_bias and penalties leave no token with a finite logit; forbid fewer tokens or use smaller numbers")
    return x


def distribution(logits: F32, params: SamplingParams, history: TokenHistory, ahead: Sequence[int] = ()) -> F64:
    """Probabilities [V] of the next token; greedy is a point mass on the argmax. Arguments and errors as in `processed`.

    Ties at the edge of top-k and top-p go to the lower id. Top-p looks at the renormalised distribution that top-k leaves
    and keeps the fewest tokens that reach it.
    """
    x = processed(logits, params, history, ahead)
    probs = np.zeros(len(x))
    if params.greedy:
        probs[argmax(x)] = 1
        return probs
    x -= x.max()
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, which is what it asks for
        x /= params.temperature
    if not (params.top_k or params.min_p or params.top_p < 1):
        np.exp(x, out=probs)
        probs /= probs.sum()
        return probs
    kept = _largest(x, params.top_k) if 0 < params.top_k < len(x) else np.arange(len(x))
    weights = np.exp(x[kept])  # the best token's weight is 1
    if params.min_p:
        kept, weights = kept[weights >= params.min_p], weights[weights >= params.min_p]
    if params.top_p < 1:
        inside = _nucleus(weights, params.top_p)
        kept, weights = kept[inside], weights[inside]
    probs[kept] = weights / weights.sum()
    return probs


def argmax(logits: NDArray[Any], best: Sequence[int] | None = None) -> Any:
    """Id of the largest logit along the last axis, the lowest id on ties. Raises BackendError for NaN or infinite logits.

    best: the same ids, where whoever computed the logits has noted them already, with -1 for what is to raise.
    """
    if best is not None and min(best, default=0) >= 0:
        return best
    ids = logits.argmax(axis=-1)
    if not np.isfinite(np.take_along_axis(logits, np.expand_dims(ids, -1), -1)).all():
        raise _not_finite(logits)
    return ids


def confidence(logits: F32) -> float:
    """Probability of the most likely token under raw logits [V]."""
    return float(1 / np.exp(logits - logits.max()).sum())


def sample(probs: NDArray[Any], rng: Uniform) -> int:
    """One token by inverse CDF. `probs` need not be normalised; a token of probability 0 is never drawn."""
    cdf = np.cumsum(probs)
    index = int(np.searchsorted(cdf, rng.random() * cdf[-1], side="right"))
    if index == len(cdf):  # rounding took the product up to the total
        index = int(np.flatnonzero(probs)[-1])
    return index


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities under the raw logits: of the chosen token, and of the best alternatives by falling probability."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs(logits: F32, token: int, num_top: int) -> TokenLogprobs:
    """Log-softmax of raw logits [V] for `token` and the `num_top` most likely tokens (as many as there are)."""
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    best = _largest(x, min(num_top, len(x))) if num_top else np.arange(0)
    best = best[np.argsort(-x[best], kind="stable")]
    return TokenLogprobs(int(token), float(x[token]), tuple((int(i), float(x[i])) for i in best))


def _largest(x: F64, k: int) -> I64:
    """Ids of the k largest, rising; ties at the edge go to the lower id."""
    edge = np.partition(x, len(x) - k)[len(x) - k]
    above = np.flatnonzero(x > edge)
    return np.sort(np.concatenate([above, np.flatnonzero(x == edge)[: k - len(above)]]))


def _nucleus(weights: F64, top_p: float) -> I64:
    """Indices of the fewest largest weights whose share reaches `top_p`, rising."""
    total = weights.sum()
    # All weights under this bound together hold less than 1 - top_p, so the nucleus is among the others: no full sort.
    likely = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
    order = likely[np.argsort(-weights[likely], kind="stable")]
    size = int(np.searchsorted(np.cumsum(weights[order]), top_p * total, side="left")) + 1
    return np.sort(order[:size])


def _not_finite(logits: NDArray[Any]) -> BackendError:
    bad = int((~np.isfinite(logits)).sum())
    return BackendError(f"the model gave {bad} NaN or infinite logits of {logits.size}; its weights or its context are broken")

"""Logits to distributions to tokens: the only place where that happens, for drafters and verifier alike.

Order, as in vLLM: logit bias; repetition, then frequency and presence penalties; temperature; min-p; top-k; top-p. Tokens that a
grammar forbids go first: all that follows sees the legal ones only.
"""

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cpuspec.errors import BackendError, ConfigError
from cpuspec.settings import SamplingParams

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Legal = NDArray[np.bool_]  # [V] whether a token may come next

_GROUPS = 2048  # of a vocabulary, where the largest of each is found first
_NOTHING = 1e-9  # of the weight of the best token: what all tokens together may have that top-p does not look at
_SMALLEST = 5e-324  # above zero
_LOWEST = -3e38  # nearly: what float32 still has
_BLOCK = 64  # tokens of which the first one's time is drawn at once
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: the step of SplitMix64


@dataclass(frozen=True, eq=False)
class SparseRow:
    """Probabilities of the next token where most of the vocabulary has none: those of `ids`, which rise, 0 for all others."""

    ids: I64  # [n]
    probs: NDArray[Any]  # [n]
    vocab_size: int


@dataclass(frozen=True, eq=False)
class LogitRow:
    """Probabilities of the next token as `weights` of logits [V], of which few are computed where a token is drawn."""

    logits: NDArray[Any]
    best: Any  # the largest
    temperature: float

    def weights(self, logits: NDArray[Any], out: F64 | None = None) -> F64:
        """Probabilities of some logits, not normalised: the largest logit of the row has 1."""
        return _weights(logits, self.best, self.temperature, out)


Row = NDArray[Any] | SparseRow | LogitRow  # [V] probabilities


class Draws(Protocol):
    """The random numbers of a request: those of a position are the same whatever was drawn before, and how often."""

    def draw(self, row: Row, position: int) -> int:
        """A token, distributed as the row says. Probabilities need not be normalised; a token of probability 0 is never drawn.

        position: in the answer, 0 for its first token. Draws at different positions are independent.
        """
        ...


@dataclass(frozen=True)
class Noise:
    """The random numbers that a seed gives: one for each position of an answer and each token.

    A token is drawn by a race: each token arrives after an exponentially distributed time whose rate is its probability, and the
    first one wins (the Gumbel-max trick). Rows that differ little draw the same token at a position nearly as often as any rule
    allows that knows one row at a time: of rows with total variation d at least (1 - d) / (1 + d) (arXiv 2408.07978).
    """

    seed: int

    def draw(self, row: Row, position: int) -> int:
        """See `Draws`."""
        keys = _keys(self.seed, position)
        if isinstance(row, SparseRow):
            return int(row.ids[(row.probs / _times(row.ids, keys)).argmax()])
        values, weights = (row.logits, row.weights) if isinstance(row, LogitRow) else (row, np.asarray)
        # A token is no sooner than the first of its block, so a few blocks are left where one of the best could have won.
        starts = np.arange(0, len(values), _BLOCK)
        soonest, _ = _firsts(starts // _BLOCK, keys)
        bounds = weights(np.maximum.reduceat(values, starts)) / soonest
        ids = _tokens(np.array([bounds.argmax()]), len(values))
        ids = _tokens((bounds >= (weights(values[ids]) / _times(ids, keys)).max()).nonzero()[0], len(values))
        return int(ids[(weights(values[ids]) / _times(ids, keys)).argmax()])


class TokenHistory:
    """The tokens of a sequence, counted for the penalties: the prompt's ids, and how often each id was generated."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt_ids: I64 = np.unique(np.asarray(prompt, np.int64))
        self._places: dict[int, int] = {}  # in the arrays below, of every id that was ever counted
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.int64)

    def extend(self, tokens: Iterable[int]) -> None:
        """Count generated tokens."""
        for token in tokens:
            place = self._places.setdefault(int(token), len(self._places))
            if place == len(self._ids):
                self._ids, self._counts = (np.append(array, np.zeros_like(array)) for array in (self._ids, self._counts))
            self._ids[place] = token
            self._counts[place] += 1

    def copy(self) -> "TokenHistory":
        """The same counts, to be counted on apart from these."""
        other = copy(self)
        other._places, other._ids, other._counts = self._places.copy(), self._ids.copy(), self._counts.copy()
        return other

    def counts(self, drafted: Sequence[int]) -> tuple[I64, I64, I64]:
        """Ids seen anywhere, some of them twice, ids generated, and how often each of those; `drafted` counts as generated."""
        known = self
        if drafted:
            known = self.copy()
            known.extend(drafted)
        places = np.flatnonzero(known._counts)
        ids, counts = known._ids[places], known._counts[places]
        return np.concatenate([self._prompt_ids, ids]), ids, counts


@np.errstate(over="ignore", invalid="ignore")
def processed(
    logits: F32, params: SamplingParams, history: TokenHistory | None, drafted: Sequence[int] = (), legal: Legal | None = None
) -> NDArray[Any]:
    """Logits [V] after bias and penalties: in float64, or as they are where nothing changes them.

    history: the sequence's tokens; None where `params.keeps_order`. drafted: drafted tokens between them and this row. legal: the
    tokens to choose from, None for all; a draft model that knows none of them chooses from all. Repetition divides positive and
    multiplies negative logits of every token seen (arXiv 1909.05858, section 4.1); frequency and presence subtract for
    generated tokens only. Raises BackendError for NaN or infinite logits and ConfigError where bias and penalties leave no token.
    """
    return _processed(logits, params, history, drafted, legal)[0]


def _processed(
    logits: NDArray[Any], params: SamplingParams, history: TokenHistory | None, drafted: Sequence[int], legal: Legal | None
) -> tuple[NDArray[Any], Any]:
    """The same, and its largest."""
    best = logits.max()
    if not math.isfinite(best):
        raise _not_finite(logits)
    if legal is not None and math.isfinite(best_legal := logits.max(where=legal, initial=-np.inf)):
        logits, best = np.where(legal, logits, np.float64(-np.inf)), best_legal
    if params.keeps_order:
        return logits, best
    x, bias, penalty = logits.astype(np.float64), params.logit_bias, params.repetition_penalty
    if bias:
        x[np.fromiter(bias.keys(), np.int64, len(bias))] += np.fromiter(bias.values(), np.float64, len(bias))
    assert history, "penalties need the tokens that they are for"
    seen, generated, counts = history.counts(drafted)
    if penalty != 1:
        had = x[seen]
        x[seen] = np.where(had > 0, had / penalty, had * penalty)
    if params.frequency_penalty or params.presence_penalty:
        x[generated] -= params.frequency_penalty * counts + params.presence_penalty
    best = x.max()
    if not math.isfinite(best):
        raise ConfigError("logit_bias and penalties leave no token with a finite logit; forbid fewer tokens or use smaller numbers")
    return x, best


@np.errstate(over="ignore", invalid="ignore")
def distribution(
    logits: F32, params: SamplingParams, history: TokenHistory | None, drafted: Sequence[int] = (), legal: Legal | None = None
) -> Row:
    """Probabilities [V] of the next token; greedy is a point mass on the argmax. Arguments and errors as in `processed`."""
    row = row_to_draw(logits, params, history, drafted, legal)
    if not isinstance(row, LogitRow):
        return row
    weights = row.weights(row.logits, None if row.logits is logits else row.logits)
    weights /= weights.sum()
    return weights


@np.errstate(over="ignore", invalid="ignore")
def row_to_draw(
    logits: F32, params: SamplingParams, history: TokenHistory | None, drafted: Sequence[int] = (), legal: Legal | None = None
) -> Row:
    """The same, as a LogitRow where no token is cut off, and so all would have to be computed.

    Ties at the edge of top-k and top-p go to the lower id. Top-p looks at the renormalised distribution that top-k leaves
    and keeps the fewest tokens that reach it. Probabilities are float64, and computed for those tokens only that may be kept.
    """
    x, best = _processed(logits, params, history, drafted, legal)
    size = len(x)
    if params.greedy:
        return SparseRow(np.array([argmax(x)]), np.ones(1), size)
    if 0 < params.top_k < size:
        kept = _largest(x, params.top_k)
    elif params.min_p or params.top_p < 1:
        kept = (x >= _bound(best, params.temperature, params.min_p or _NOTHING / size)).nonzero()[0]
    else:
        return LogitRow(x, best, params.temperature)
    weights = _weights(x[kept], best, params.temperature)
    inside = (weights >= (params.min_p or _SMALLEST)).nonzero()[0]
    kept, weights = kept[inside], weights[inside]
    if params.top_p < 1:
        inside = _nucleus(weights, params.top_p)
        kept, weights = kept[inside], weights[inside]
    return SparseRow(kept, weights / weights.sum(), size)


def dense(row: Row) -> NDArray[Any]:
    """A row's probabilities [V], written out."""
    if isinstance(row, LogitRow):
        weights = row.weights(row.logits)
        return weights / weights.sum()
    if not isinstance(row, SparseRow):
        return row
    probs = np.zeros(row.vocab_size, row.probs.dtype)
    probs[row.ids] = row.probs
    return probs


def argmax(logits: NDArray[Any], best: Sequence[int] | None = None) -> Any:
    """Id of the largest logit along the last axis, the lowest id on ties. Raises BackendError for NaN or infinite logits.

    best: the same ids where the computation of the logits has noted them, with -1 for rows that are to raise.
    """
    if best is not None and -1 not in best:
        return best
    ids = logits.argmax(axis=-1)
    if not np.isfinite(np.take_along_axis(logits, np.expand_dims(ids, -1), -1)).all():
        raise _not_finite(logits)
    return ids


def confidence(logits: F32, legal: Legal | None = None) -> float:
    """Probability of the most likely token under raw logits [V], of those that are legal."""
    if legal is not None and math.isfinite(logits.max(where=legal, initial=-np.inf)):
        logits = logits[legal]
    return float(1 / np.exp(logits - logits.max()).sum())


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities under the raw logits: of the chosen token, and of the best alternatives by falling probability."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs(logits: F32, token: int, num_top: int) -> TokenLogprobs:
    """Log-softmax of raw logits [V] for `token` and the `num_top` most likely tokens (as many as there are).

    Raises BackendError for NaN or infinite logits.
    """
    best = logits.max()
    # f32, off by some 1e-7, takes a seventh of the time of f64 over the whole vocabulary.
    log_sum = float(best) + math.log(np.exp(logits - best).sum(dtype=np.float64))
    if math.isnan(log_sum):  # one such logit makes all of them NaN
        raise _not_finite(logits)
    top = likeliest(logits, num_top)
    values = logits[top].astype(np.float64) - log_sum
    return TokenLogprobs(int(token), float(logits[token]) - log_sum, tuple(zip(top.tolist(), values.tolist(), strict=True)))


def likeliest(x: NDArray[Any], num: int) -> I64:
    """Ids of the `num` largest of x [V], or of all, the largest first; of equal ones the lower id comes first."""
    best = _largest(x, min(num, len(x))) if num else np.arange(0)
    return best[np.argsort(-x[best], kind="stable")]


def log_softmax(logits: F32) -> F64:
    """Log probabilities of each row, in f64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl_divergence(reference: F64, other: F64, least: float = -math.inf) -> F64:
    """KL divergence in nats of each row of `other` from `reference`, both log probabilities [..., ids].

    least: ids whose log probability in the reference is not above it are left out.
    """
    terms = np.exp(reference) * (reference - other)
    divergence: F64 = (terms if least == -math.inf else np.where(reference > least, terms, 0)).sum(axis=-1)
    return divergence


def _weights(x: NDArray[Any], best: Any, temperature: float, out: F64 | None = None) -> F64:
    """exp((x - best) / temperature): the best token's weight is 1. out: where they may be written, x itself for one."""
    weights: F64 = np.subtract(x, best, out=out, dtype=np.float64)
    weights /= temperature  # a tiny temperature sends all but the best to -inf, which is what it asks for
    return np.exp(weights, out=weights)


def _bound(best: Any, temperature: float, weight: float) -> float:
    """A logit below which no token has this weight, and few above lack it: lower by more than what float32 rounds."""
    best, below = float(best), temperature * math.log(weight)
    return max(best + below - 1e-6 * (1 + abs(best) - below), _LOWEST)


def _largest(x: NDArray[Any], k: int) -> I64:
    """Ids of the k largest, rising; ties at the edge go to the lower id."""
    likely = None
    if len(x) >= 4 * _GROUPS and k <= _GROUPS // 2:
        # k groups have a value that reaches the k-th largest of their best, so the k largest of all reach it.
        groups = x[: len(x) // _GROUPS * _GROUPS].reshape(-1, _GROUPS).max(axis=0)
        likely = np.flatnonzero(x >= np.partition(groups, _GROUPS - k)[_GROUPS - k])
        x = x[likely]
    largest = _down_to(np.partition(x, len(x) - k)[len(x) - k], x, k)
    return largest if likely is None else likely[largest]


def _down_to(edge: Any, x: NDArray[Any], k: int) -> I64:
    """Ids of the k largest, the smallest of which is `edge`, rising; ties at the edge go to the lower id."""
    largest: I64 = (x >= edge).nonzero()[0]
    surplus = len(largest) - k
    if surplus:
        largest = np.delete(largest, (x[largest] == edge).nonzero()[0][-surplus:])
    return largest


def _nucleus(weights: F64, top_p: float) -> I64:
    """Indices of the fewest largest weights whose share reaches `top_p`, rising; ties at the edge go to the lower one."""
    total = weights.sum()
    # All weights under this bound together hold less than 1 - top_p, so the nucleus is among the others: no full sort.
    likely = (weights >= (1 - top_p) * total / len(weights)).nonzero()[0]
    weights = weights[likely]
    falling = np.sort(weights)[::-1]
    size = min(int(falling.cumsum().searchsorted(top_p * total)) + 1, len(likely))
    return likely[_down_to(falling[size - 1], weights, size)]


def _keys(seed: int, position: int) -> tuple[int, int]:
    """Where the numbers of a position's blocks and of its tokens begin."""
    digest = blake2b(f"{seed}/{position}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _tokens(blocks: I64, size: int) -> I64:
    """The tokens of some blocks."""
    ids = (_BLOCK * blocks[:, None] + np.arange(_BLOCK)).ravel()
    return ids[ids < size]


def _times(ids: I64, keys: tuple[int, int]) -> F64:
    """Exponentially distributed times of some tokens, above zero.

    The first of n such times is one of rate n, any of the n may have it, and to the others the rest of the time is again
    exponentially distributed. So a block's first time is known without the others.
    """
    soonest, winners = _firsts(ids // _BLOCK, keys)
    rest: F64 = -np.log(_uniform(_mixed(ids, keys[1])))
    return soonest + np.where(ids % _BLOCK == winners, 0, rest)


def _firsts(blocks: I64, keys: tuple[int, int]) -> tuple[F64, I64]:
    """The first time of each block, and the place of its token."""
    numbers = _mixed(blocks, keys[0])
    return -np.log(_uniform(numbers)) / _BLOCK, (numbers % np.uint64(_BLOCK)).astype(np.int64)


def _mixed(places: I64, key: int) -> U64:
    """Random numbers of 64 bits, one for each place: those of SplitMix64 (Steele, Lea and Flood, 2014) from `key` on."""
    z = places.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64((key + _GOLDEN) % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _uniform(numbers: U64) -> F64:
    """Their upper 52 bits as fractions, above 0 and below 1; the lower bits are free for other uses."""
    return ((numbers >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _not_finite(logits: NDArray[Any]) -> BackendError:
    bad = int((~np.isfinite(logits)).sum())
    return BackendError(
        f"the model gave {bad} NaN or infinite logits of {logits.size}; its weights or its context are broken, or its keys or "
        "values exceed 65504, which the KV formats f16, int8 and int4 do not bear: try kv_format bf16 or f32"
    )

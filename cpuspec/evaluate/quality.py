"""Perplexity, KL divergence and same-top share of one backend against another, as llama.cpp's --kl-divergence reports them.

Works on logits of the same tokens, chunk by chunk, so that no more than a chunk of rows is held at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpuspec.backends import Backend
from cpuspec.errors import ConfigError
from cpuspec.model.batch import F32, I32, ForwardBatch
from cpuspec.sampling import argmax

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Quality:
    """What a backend loses against a reference on one text. KL divergences are in nats, over all predicted rows."""

    num_tokens: int
    reference_perplexity: float
    perplexity: float
    perplexity_ratio: float
    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    same_top: float  # share of rows whose argmax is the same
    max_abs_logit_difference: float


def compare(
    reference: Backend, other: Backend, tokens: Sequence[int], on_rows: Callable[[int], None] = lambda rows: None
) -> Quality:
    """Feed `tokens` to both backends from an empty cache and compare every row.

    on_rows is told how many rows have been compared. Raises ConfigError for fewer than two tokens.
    """
    if len(tokens) < 2:
        raise ConfigError(f"a comparison needs at least two tokens, got {len(tokens)}")
    chunk = min(reference.max_rows, other.max_rows)
    targets = np.asarray(tokens[1:])
    kl, same, own_loss, reference_loss, difference = [], [], [], [], 0.0
    done = 0
    for wanted, got in zip(logits_of(reference, tokens, chunk), logits_of(other, tokens, chunk), strict=True):
        difference = max(difference, float(np.abs(wanted - got).max()))
        r, o = log_softmax(wanted), log_softmax(got)
        kl.append(kl_divergence(r, o))
        same.append(wanted.argmax(axis=1) == got.argmax(axis=1))
        next_tokens = targets[done : done + len(r)]  # the last row has none
        rows = np.arange(len(next_tokens))
        reference_loss.append(-r[rows, next_tokens])
        own_loss.append(-o[rows, next_tokens])
        done += len(r)
        on_rows(done)
    divergence = np.concatenate(kl)
    perplexities = [float(np.exp(np.concatenate(loss).mean())) for loss in (reference_loss, own_loss)]
    return Quality(
        num_tokens=done,
        reference_perplexity=perplexities[0],
        perplexity=perplexities[1],
        perplexity_ratio=perplexities[1] / perplexities[0],
        kl_mean=float(divergence.mean()),
        kl_median=float(np.median(divergence)),
        kl_p99=float(np.quantile(divergence, 0.99)),
        kl_max=float(divergence.max()),
        same_top=float(np.concatenate(same).mean()),
        max_abs_logit_difference=difference,
    )


def logits_of(backend: Backend, tokens: Sequence[int], chunk: int) -> Iterator[F32]:
    """Logits [rows, V] of a text fed to an empty cache, up to `chunk` rows at a time."""
    cache = backend.new_cache(1, len(tokens))
    for start in range(0, len(tokens), chunk):
        rows = np.asarray(tokens[start : start + chunk], np.int32)
        yield backend.forward(
            ForwardBatch(
                tokens=rows,
                positions=np.arange(start, start + len(rows), dtype=np.int32),
                slots=np.zeros(1, np.int32),
                q_start=np.array([0, len(rows)], np.int32),
            ),
            cache,
        ).logits


def top_tokens(backend: Backend, tokens: Sequence[int]) -> I32:
    """The most likely token after each of `tokens`, which are fed to an empty cache: what a greedy draft would propose there."""
    return np.concatenate([argmax(logits) for logits in logits_of(backend, tokens, backend.max_rows)])


def kl_divergence(reference: F64, other: F64) -> F64:
    """KL divergence in nats of each row of `other` from `reference`, both log probabilities [..., ids]."""
    return (np.exp(reference) * (reference - other)).sum(axis=-1)


def log_softmax(logits: F32) -> F64:
    """Log probabilities of each row, in f64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

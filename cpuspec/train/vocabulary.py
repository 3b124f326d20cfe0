"""What the target's own answers say of its tokens: which it uses most, which never, and which follow which.

Drafting only tokens that are used keeps the output matrix small (FR-Spec, arXiv 2502.14856; VocabTrim, 2506.22694, which counts the
target's own output). Which token follows which is DSpark's Markov head, counted instead of learnt.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cpuspec.errors import ConfigError
from cpuspec.train.loop import Samples
from cpuspec.train.samples import SampleSet

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]

# Of bigrams: as many tokens as the frequency of each is worth before one is counted after another.
# See benchmarks/DECISIONS.md#bigram-prior.
_PRIOR = 4.0


class Counts(NamedTuple):
    """tokens [V]: how often the target chose each token. pairs [n, 2], times [n]: which it chose after which, and how often."""

    tokens: I64
    pairs: I64
    times: I64


def count(samples: SampleSet, indices: Sequence[int]) -> Counts:
    """Counts over the answers of some samples. Raises ConfigError where there is no answer."""
    vocab_size = samples.about.vocab_size
    tokens, seen, numbers = np.zeros(vocab_size, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    waiting: list[I64] = []
    for i in indices:
        ids, answer = samples.tokens(i)
        chosen = np.flatnonzero(answer[1:]) + 1
        tokens += np.bincount(ids[answer], minlength=vocab_size)
        waiting.append(ids[chosen - 1].astype(np.int64) * vocab_size + ids[chosen])
        if sum(map(len, waiting)) > 1 << 20 or i == indices[-1]:
            found, times = np.unique(np.concatenate(waiting), return_counts=True)
            seen, where = np.unique(np.concatenate([seen, found]), return_inverse=True)
            numbers = np.bincount(where, np.concatenate([numbers, times])).astype(np.int64)
            waiting = []
    if not tokens.any():
        raise ConfigError(f"{samples.path}: no token of the samples is marked as an answer; extract answers of the target")
    return Counts(tokens, np.stack(np.divmod(seen, vocab_size), axis=1), numbers)


def drafted_ids(counts: Counts, size: int) -> I64 | None:
    """The `size` tokens used most, rising; None for the whole vocabulary. Of tokens never used those with low ids come first.

    Merges of a byte-pair vocabulary stand in the order of their frequency.
    """
    if size >= len(counts.tokens):
        return None
    return np.sort(np.argsort(-counts.tokens, kind="stable")[:size])


def tokens_of(samples: Samples, vocab_size: int) -> I64:
    """How often each token occurs in the samples, prompts included, [V]."""
    total = np.zeros(vocab_size, np.int64)
    for i in range(len(samples)):
        total += np.bincount(samples.tokens(i)[0], minlength=vocab_size)
    return total


def unused_id(tokens: I64) -> int:
    """The last token that never occurs, for a mask. Raises ConfigError if there is none. tokens [V]: how often each does."""
    unused = np.flatnonzero(tokens == 0)
    if not len(unused):
        raise ConfigError("every token of the vocabulary occurs in the samples; name one for the mask with --mask-id")
    return int(unused[-1])


def bigram_factors(counts: Counts, ids: I64 | None, rank: int, seed: int) -> tuple[F32, F32]:
    """w1 [V, r] and w2 [drafted, r] with w2 w1[a] near log p(b | a) - log p(b), up to a number that all b share.

    p(b | a) is smoothed by `_PRIOR` tokens of p(b), so that pairs that never came are exactly zero, and the matrix is sparse. Its
    factors are a truncated SVD, with rows weighed by how often their token comes.
    """
    vocab_size = len(counts.tokens)
    ids = np.arange(vocab_size) if ids is None else ids
    place = np.full(vocab_size, -1, np.int64)
    place[ids] = np.arange(len(ids))
    rank = min(rank, vocab_size, len(ids))
    kept = place[counts.pairs[:, 1]] >= 0
    before, after, times = counts.pairs[kept, 0], counts.pairs[kept, 1], counts.times[kept]
    share = np.maximum(counts.tokens, 1) / max(counts.tokens.sum(), 1)
    gain = np.log1p(times / (_PRIOR * share[after]))
    weight = np.sqrt(np.bincount(before, times, minlength=vocab_size))
    matrix = torch.sparse_coo_tensor(
        torch.from_numpy(np.stack([before, place[after]])),
        torch.from_numpy((gain * weight[before]).astype(np.float32)),
        (vocab_size, len(ids)),
        check_invariants=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        left, sizes, right = torch.svd_lowrank(matrix, q=rank, niter=4)
    root = sizes.sqrt()
    w1 = (left * root).numpy() / np.maximum(weight, 1)[:, None]
    return w1.astype(np.float32), (right * root).numpy().astype(np.float32)

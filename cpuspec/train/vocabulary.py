"""The tokens that the target's own answers use most: drafting only these keeps a head's output matrix small.

FR-Spec (arXiv 2502.14856) counts other texts; VocabTrim (arXiv 2506.22694) counts the target's own output.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cpuspec.errors import ConfigError
from cpuspec.train.samples import SampleSet

I64 = NDArray[np.int64]


def count(samples: SampleSet, indices: Sequence[int]) -> I64:
    """How often the target chose each token in the answers of some samples, [V]. Raises ConfigError where there is no answer."""
    counts = np.zeros(samples.about.vocab_size, np.int64)
    for i in indices:
        ids, answer = samples.tokens(i)
        counts += np.bincount(ids[answer], minlength=len(counts))
    if not counts.any():
        raise ConfigError(f"{samples.path}: no token of the samples is marked as an answer; extract answers of the target")
    return counts


def drafted_ids(counts: I64, size: int) -> I64 | None:
    """The `size` tokens used most, rising; None for the whole vocabulary. Of tokens never used those with low ids come first.

    Merges of a byte-pair vocabulary stand in the order of their frequency.
    """
    if size >= len(counts):
        return None
    return np.sort(np.argsort(-counts, kind="stable")[:size])

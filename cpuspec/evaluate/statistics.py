"""Statistics of samples: chi-square of counts against probabilities, geometric means with intervals. Standard library only."""

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from statistics import geometric_mean
from typing import NamedTuple, TypeVar

_T = TypeVar("_T", bound=Hashable)

_RESAMPLES = 4_000


class ChiSquare(NamedTuple):
    """Pearson's statistic, its degrees of freedom, and how likely one as large is if the probabilities are right."""

    statistic: float
    degrees: int
    p_value: float


def chi_square(counts: Mapping[_T, int], probs: Mapping[_T, float]) -> ChiSquare:
    """Pearson's test of counts against probabilities.

    Cells with fewer than five expected are pooled. An outcome of probability 0 makes the statistic infinite; where all that is
    expected is one cell there is nothing to test, and the p-value is 1.
    """
    total = sum(counts.values())
    large = [key for key, prob in probs.items() if prob * total >= 5]
    cells = [(counts.get(key, 0), probs[key] * total) for key in large]
    rest = 1 - sum(probs[key] for key in large)
    if rest * total >= 5:
        cells.append((total - sum(count for count, _ in cells), rest * total))
    degrees = max(len(cells) - 1, 0)
    if any(count and not probs.get(key) for key, count in counts.items()):
        return ChiSquare(math.inf, degrees, 0.0)
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells) if degrees else 0.0
    return ChiSquare(statistic, degrees, chi_square_tail(statistic, degrees))


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Probability that chi-square with `degrees` degrees of freedom exceeds `statistic`; 1 for no degree.

    The recurrence of the incomplete gamma function, which for half and whole numbers begins in closed form (DLMF 8.8.2, 8.4).
    """
    half = statistic / 2
    if half <= 0 or degrees < 1:
        return 1.0
    if math.isinf(half):
        return 0.0
    a, tail = (0.5, math.erfc(math.sqrt(half))) if degrees % 2 else (1.0, math.exp(-half))
    while a < degrees / 2:
        tail += math.exp(a * math.log(half) - half - math.lgamma(a + 1))
        a += 1
    return min(tail, 1.0)


def bootstrap_interval(values: Sequence[float], level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the geometric mean (Efron 1979): always the same for the same values."""
    logs = [math.log(value) for value in values]
    rng = random.Random(seed)
    means = sorted(math.fsum(rng.choices(logs, k=len(logs))) / len(logs) for _ in range(_RESAMPLES))
    tail = round((1 - level) / 2 * _RESAMPLES)
    return math.exp(means[tail]), math.exp(means[-tail - 1])


def mean_ratio(
    ones: Sequence[float | None], others: Sequence[float | None]
) -> tuple[float | None, tuple[float | None, float | None]]:
    """Geometric mean of one / other with its `bootstrap_interval`, over the pairs of which both are known; Nones if none is."""
    ratios = [one / other for one, other in zip(ones, others, strict=True) if one is not None and other is not None]
    return (geometric_mean(ratios), bootstrap_interval(ratios)) if ratios else (None, (None, None))

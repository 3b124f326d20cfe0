"""Perplexity, KL divergence, same-top share and top-k overlap of a model against another, as llama.cpp's --kl-divergence.

It compares logits of the same tokens in chunks of rows, so memory holds one chunk.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpuspec.backends import Backend
from cpuspec.engine.scoring import Scorer
from cpuspec.errors import ConfigError
from cpuspec.model.batch import F32, I32
from cpuspec.sampling import kl_divergence, log_softmax

F64 = NDArray[np.float64]

TOP_K = 10  # likeliest ids whose overlap is counted
_ROWS_AT_ONCE = 32  # whose log probabilities are held in f64: 39 MB with 152 thousand ids


@dataclass(frozen=True)
class Quality:
    """The loss of a model against a reference on one text. KL divergences are in nats, over all compared rows.

    Errors are standard errors of the mean, as llama.cpp prints them after ±: of perplexities to first order, and of the logarithm
    of their ratio with the covariance of both. probability_rms: root mean square of the difference that the text's own next token
    has in probability. top_overlap: share of the reference's TOP_K likeliest ids that are among the other's.
    """

    num_tokens: int
    reference_perplexity: float
    reference_perplexity_error: float
    perplexity: float
    perplexity_error: float
    perplexity_ratio: float
    log_ratio_error: float
    kl_mean: float
    kl_error: float
    kl_median: float
    kl_p90: float
    kl_p95: float
    kl_p99: float
    kl_p999: float
    kl_max: float
    same_top: float  # share of rows whose argmax is the same
    same_top_error: float
    top_overlap: float
    probability_rms: float
    max_abs_logit_difference: float | None  # None where the reference's logits are not known


class QualityMeter:
    """Collects rows of a reference and of another model over the same text."""

    def __init__(self) -> None:
        self._kl: list[F64] = []
        self._same: list[NDArray[np.bool_]] = []
        self._overlap: list[F64] = []
        self._losses: tuple[list[F64], list[F64]] = ([], [])  # of the reference and of the other, of the tokens that follow

    def add(self, reference: F64, other: F64, following: Sequence[int] | I32, least: float = -math.inf) -> None:
        """Take rows of log probabilities [rows, V], and the token after each row, as far as there is one.

        least: ids whose log probability in the reference is not above it do not count for the divergence.
        """
        self._kl.append(kl_divergence(reference, other, least))
        self._same.append(reference.argmax(axis=1) == other.argmax(axis=1))
        k = min(TOP_K, reference.shape[1])
        tops = [np.argpartition(-rows, k - 1, axis=1)[:, :k].tolist() for rows in (reference, other)]
        self._overlap.append(np.array([len({*some} & {*others}) / k for some, others in zip(*tops, strict=True)]))
        at = np.arange(len(following))
        for losses, rows in zip(self._losses, (reference, other), strict=True):
            losses.append(-rows[at, np.asarray(following, np.int64)])

    def quality(self, max_abs_logit_difference: float | None = None) -> Quality:
        """The figures of all rows so far; there must be some."""
        kl, same = np.concatenate(self._kl), np.concatenate(self._same)
        theirs, ours = (np.concatenate(losses) for losses in self._losses)
        (their_loss, their_error), (our_loss, our_error) = mean_and_error(theirs), mean_and_error(ours)
        return Quality(
            num_tokens=len(kl),
            reference_perplexity=math.exp(their_loss),
            reference_perplexity_error=math.exp(their_loss) * their_error,
            perplexity=math.exp(our_loss),
            perplexity_error=math.exp(our_loss) * our_error,
            perplexity_ratio=math.exp(our_loss - their_loss),
            log_ratio_error=mean_and_error(ours - theirs)[1],
            kl_mean=float(kl.mean()),
            kl_error=mean_and_error(kl)[1],
            kl_median=float(np.median(kl)),
            kl_p90=float(np.quantile(kl, 0.9)),
            kl_p95=float(np.quantile(kl, 0.95)),
            kl_p99=float(np.quantile(kl, 0.99)),
            kl_p999=float(np.quantile(kl, 0.999)),
            kl_max=float(kl.max()),
            same_top=float(same.mean()),
            same_top_error=mean_and_error(same)[1],
            top_overlap=float(np.concatenate(self._overlap).mean()),
            probability_rms=float(np.sqrt(np.mean((np.exp(-ours) - np.exp(-theirs)) ** 2))),
            max_abs_logit_difference=max_abs_logit_difference,
        )


def mean_and_error(values: NDArray[np.generic]) -> tuple[float, float]:
    """The mean and its standard error: the deviation over sqrt(n - 1), as llama.cpp has it; 0 for a single value."""
    return float(values.mean()), float(values.std() / math.sqrt(len(values) - 1)) if len(values) > 1 else 0.0


def compare_backends(
    reference: Backend, other: Backend, tokens: Sequence[int], on_rows: Callable[[int], None] = lambda rows: None
) -> Quality:
    """Feed `tokens` to both backends from an empty cache and compare every row.

    on_rows is told how many rows have been compared. Raises ConfigError for fewer than two tokens.
    """
    if len(tokens) < 2:
        raise ConfigError(f"a comparison needs at least two tokens, got {len(tokens)}")
    chunk = min(reference.max_rows, other.max_rows)
    pairs = zip(logits_of(reference, tokens, chunk), logits_of(other, tokens, chunk), strict=True)
    return _compare(pairs, tokens[1:], on_rows)  # the last row has no token after it


def last_rows(backend: Backend, tokens: Sequence[int], count: int, on_rows: Callable[[int], None] = lambda rows: None) -> F32:
    """Logits [count, V] of a text's last rows that have a token after them. on_rows is told how many tokens have been fed.

    Raises ConfigError for a text of fewer than two tokens more than rows.
    """
    if not 0 < count < len(tokens) - 1:
        raise ConfigError(f"the last {count} rows need a text of at least {count + 2} tokens, got {len(tokens)}")
    fed, first, rows = len(tokens) - 1, len(tokens) - 1 - count, []
    scorer = Scorer(backend, fed)
    for end in (*range(backend.max_rows, first, backend.max_rows), first):
        for _ in scorer.logits(tokens[:end], end):
            pass
        on_rows(end)
    for some in scorer.logits(tokens[:fed], first):
        rows.append(some)
        on_rows(first + sum(map(len, rows)))
    return np.concatenate(rows)


def compare_rows(reference: F32, other: F32, following: Sequence[int]) -> Quality:
    """Compare logits [rows, V] of the same rows. following: the token after each."""
    return _compare([(reference, other)], following)


def _compare(
    pairs: Iterable[tuple[F32, F32]], following: Sequence[int], on_rows: Callable[[int], None] = lambda rows: None
) -> Quality:
    """Compare logits of the same rows, which come in parts. following: the token after each row, as far as there is one."""
    meter, difference, done = QualityMeter(), 0.0, 0
    for reference, other in pairs:
        difference = max(difference, float(np.abs(reference - other).max()))
        for start in range(0, len(reference), _ROWS_AT_ONCE):
            rows, others = (log_softmax(one[start : start + _ROWS_AT_ONCE]) for one in (reference, other))
            meter.add(rows, others, following[done : done + len(rows)])
            done += len(rows)
        on_rows(done)
    return meter.quality(difference)


def logits_of(backend: Backend, tokens: Sequence[int], chunk: int, first: int = 0, num_prompt: int = 0) -> Iterator[F32]:
    """Logits [rows, V] of a text fed to an empty cache, up to `chunk` rows at a time, from the row `first` on.

    num_prompt: as in `Scorer`.
    """
    return Scorer(backend, len(tokens), num_prompt=num_prompt).logits(tokens, first, chunk)

"""The figures of a load in the names of `vllm bench serve`: latencies in milliseconds, rates per second."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cpuspec.errors import ConfigError


@dataclass
class RequestResult:
    """The times and counts of one request. Token counts are the server's own; None where it reports none."""

    start_s: float  # from the beginning of the load
    ttft_s: float = 0.0  # until the first text came, or until the end of an empty answer
    e2el_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)  # gaps between pieces of text; a piece may have several drafted tokens
    num_prompt_tokens: int | None = None
    num_new_tokens: int = 0
    num_cached_tokens: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    text: str = ""
    error: str = ""  # "" if the request was answered

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None for an answer of one token."""
        return (self.e2el_s - self.ttft_s) / (self.num_new_tokens - 1) if self.num_new_tokens > 1 else None


# The seconds of one answer under each name.
METRICS: Mapping[str, Callable[[RequestResult], Sequence[float]]] = {
    "ttft": lambda answer: [answer.ttft_s],
    "tpot": lambda answer: [] if answer.tpot_s is None else [answer.tpot_s],
    "itl": lambda answer: answer.itl_s,
    "e2el": lambda answer: [answer.e2el_s],
}
_TARGETS = ("ttft", "tpot", "e2el")  # those with one value an answer


def read_metrics(text: str) -> tuple[str, ...]:
    """Names of METRICS separated by commas. Raises ConfigError."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := next((name for name in names if name not in METRICS), None):
        raise ConfigError(f"there is no metric {unknown!r}; wanted some of {','.join(METRICS)}")
    return names


def read_percentiles(text: str) -> tuple[float, ...]:
    """Percentiles separated by commas. Raises ConfigError."""
    try:
        values = tuple(dict.fromkeys(float(part) for part in text.split(",") if part.strip()))
    except ValueError:
        values = (math.nan,)
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"percentiles are numbers from 0 to 100 separated by commas, as 50,95,99; got {text!r}")
    return values


def read_goodput(entries: Sequence[str]) -> dict[str, float]:
    """NAME:MS entries, several in one text or apart, as milliseconds by name. Raises ConfigError."""
    targets: dict[str, float] = {}
    for entry in " ".join(entries).replace(",", " ").split():
        name, _, value = entry.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = math.nan
        if name not in _TARGETS or not 0 < milliseconds < math.inf or name in targets:
            raise ConfigError(f"goodput takes {', '.join(f'{one}:MS' for one in _TARGETS)}, each at most once; got {entry!r}")
        targets[name] = milliseconds
    return targets


def summarize(
    answers: Sequence[RequestResult],
    duration_s: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """Counts, rates and latencies of the answers. Those that failed count as failed and nowhere else.

    A percentile between two values is interpolated linearly. A latency without a value is None. goodput: milliseconds that a good
    answer keeps; an answer of one token keeps any tpot.
    """
    done = [answer for answer in answers if not answer.error]
    num_input, num_output = sum(one.num_prompt_tokens or 0 for one in done), sum(one.num_new_tokens for one in done)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    num_good = sum(all(1e3 * value <= most for name, most in goodput.items() for value in METRICS[name](one)) for one in done)
    figures = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) * per_s,
        "request_goodput": num_good * per_s if goodput else None,
        "output_throughput": num_output * per_s,
        "total_token_throughput": (num_input + num_output) * per_s,
        "max_concurrent_requests": most_at_once(answers),
        "total_cached_tokens": _sum([one.num_cached_tokens for one in done]),
        "total_draft_tokens": _sum([one.num_draft_tokens for one in done]),
        "total_accepted_draft_tokens": _sum([one.num_accepted_tokens for one in done]),
    }
    for name in metrics:
        values = [1e3 * value for one in done for value in METRICS[name](one)]
        statistics: dict[str, Callable[[Any], Any]] = {"mean": np.mean, "median": np.median, "std": np.std}
        figures |= {f"{what}_{name}_ms": float(of(values)) if values else None for what, of in statistics.items()}
        figures |= {f"p{rank:g}_{name}_ms": percentile(values, rank) for rank in percentiles}
    return figures


def percentile(values: Sequence[float], rank: float) -> float | None:
    """The value below which `rank` percent of the values lie, interpolated linearly; None of no values."""
    return float(np.percentile(values, rank)) if len(values) else None


def most_at_once(answers: Sequence[RequestResult]) -> int:
    """The largest number of requests that were under way at one moment."""
    changes = sorted([(one.start_s + one.e2el_s, -1) for one in answers] + [(one.start_s, 1) for one in answers])
    return max(np.cumsum([change for _, change in changes]).tolist(), default=0)


def _sum(counts: Sequence[int | None]) -> int | None:
    """The sum of the counts that the server reported; None if it reported none."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None

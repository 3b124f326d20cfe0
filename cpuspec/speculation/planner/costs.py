"""Seconds of a forward over M rows, measured once for a model on a machine and kept: what a planner weighs drafts with."""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import numpy as np

from cpuspec.backends import Backend
from cpuspec.environment import cache_dir, processor_name, sources_digest
from cpuspec.files import write_file
from cpuspec.metrics import elapsed_s
from cpuspec.model.batch import ForwardBatch
from cpuspec.model.cache import KVCache

ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24)  # that are measured; between them cost grows evenly
_DEPTH = 32  # tokens of context under the measured forwards
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 10
_SETTLED = 0.03  # a round that finds nothing quicker by more than this share ends the measurement

# What is believed of the logarithms of the seconds, as standard deviations: that the machine is as slow now as when it was
# measured, that the numbers of rows compare as they did, and that a single round tells its own seconds.
_PACE, _SHAPE, _NOISE = 0.5, 0.2, 0.3
_DRIFT = 0.01  # share of the first doubts that returns with every round
_AGREES = 0.05  # a round that is off by less teaches nothing, and takes no time
_FAR_OFF = math.log(2)  # a round that is further off counts as this far: something came between
_BOUND = math.log(4)  # the most that rounds may correct what was measured
_WORTH_KEEPING = 0.1  # a correction of this share is written down


class Costs:
    """Seconds of a forward with all logits, by its number of rows. More rows never cost less.

    They begin as they were measured and follow what rounds take (`observe`): whoever measures while the machine is busy, or quiet
    and then works while it is busy, would else decide wrongly for ever.
    """

    def __init__(self, rows: list[int], seconds: Iterable[float], path: Path | None = None) -> None:
        """Seconds of forwards over those numbers of rows, which rise from 1. path: where they are kept."""
        self.rows = rows
        self._between = [_between(rows, number) for number in range(rows[-1] + 1)]
        self.seconds = list(accumulate(seconds, max))
        self._path = path
        self._measured = self._kept = self.seconds
        self._off = [0.0] * len(rows)  # logarithm of what rounds take over what was measured
        # Its covariance: neighbouring numbers of rows go together.
        self._doubt = [[_PACE**2 + _SHAPE**2 * math.exp(-abs(math.log2(one / other))) for other in rows] for one in rows]
        self._drift = [[_DRIFT * doubt for doubt in row] for row in self._doubt]

    def of(self, rows: int) -> float:
        """Seconds of a forward over `rows` rows; beyond the largest measured number each costs what the last ones did."""
        seconds = self.seconds
        if rows >= len(self._between):
            return seconds[-1] + self.per_row * (rows - self.rows[-1])
        below, above, share = self._between[rows]
        return seconds[below] + share * (seconds[above] - seconds[below])

    @property
    def per_row(self) -> float:
        """Seconds that one row more takes where there are many."""
        if len(self.rows) == 1:
            return self.seconds[0]
        return (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from what a round over `rows` rows took, if so many were measured.

        A Kalman filter over the logarithms. A slow round is first of all a slow machine, and slows all numbers of rows alike, which
        changes no choice; only many rounds over different numbers change how these compare. Each round counts for a factor of 2 at
        most, and all of them together for a factor of 4.
        """
        if rows >= len(self._between) or seconds <= 0:
            return
        off = math.log(seconds / self.of(rows))
        if abs(off) < _AGREES:
            return
        off = min(max(off, -_FAR_OFF), _FAR_OFF)
        # In lists: a matrix of ten by ten takes numpy longer, all the more where the round before put numpy out of the caches.
        doubt, drift, (below, above, share) = self._doubt, self._drift, self._between[rows]
        shared = [
            (1 - share) * (row[below] + more[below]) + share * (row[above] + more[above])
            for row, more in zip(doubt, drift, strict=True)
        ]
        expected = (1 - share) * shared[below] + share * shared[above] + _NOISE**2
        gains = [one / expected for one in shared]
        self._off = [min(max(had + gain * off, -_BOUND), _BOUND) for had, gain in zip(self._off, gains, strict=True)]
        self._doubt = [
            [had + more - gain * one for had, more, one in zip(row, drifts, shared, strict=True)]
            for row, drifts, gain in zip(doubt, drift, gains, strict=True)
        ]
        self.seconds = list(accumulate((one * math.exp(off) for one, off in zip(self._measured, self._off, strict=True)), max))

    def keep(self) -> None:
        """Write down what was learned, for the next process, if it is worth it."""
        changes = [abs(math.log(now / kept)) for now, kept in zip(self.seconds, self._kept, strict=True)]
        if self._path is None or max(changes) < _WORTH_KEEPING:
            return
        self._kept = self.seconds
        _write(self._path, self)


def _between(rows: list[int], number: int) -> tuple[int, int, float]:
    """The places in `rows`, which rise, of what is below and above a number, and how far it is from the first to the second."""
    below = max(bisect_right(rows, number) - 1, 0)
    if number <= rows[below]:
        return below, below, 0.0
    return below, below + 1, (number - rows[below]) / (rows[below + 1] - rows[below])


def find_costs(backend: Backend) -> Costs:
    """The costs of a loaded model: kept ones of this machine and model, else measured (seconds for 1 GB of weights) and kept."""
    path = _path(backend)
    costs = _read(path)
    if costs:
        return costs
    costs = measure_costs(backend)
    _write(path, costs)
    return Costs(costs.rows, costs.seconds, path)


def _write(path: Path, costs: Costs) -> None:
    """Keep the costs for later starts and for other processes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps({"rows": costs.rows, "seconds": costs.seconds}))
    except OSError:
        pass  # measured again at the next start


def _read(path: Path) -> Costs | None:
    """Kept costs, or None where there are none or somebody wrote nonsense."""
    try:
        kept = json.loads(path.read_text())
        rows, seconds = kept["rows"], kept["seconds"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    numbers = [rows, seconds]
    if not all(isinstance(one, list) and one and all(isinstance(n, int | float) and 0 < n < 1e6 for n in one) for one in numbers):
        return None
    if (
        len(rows) != len(seconds)
        or rows != sorted(set(rows))
        or rows[0] != 1
        or not all(isinstance(n, int) and n in ROWS for n in rows)
    ):
        return None
    return Costs(rows, seconds, path)


def measure_costs(backend: Backend) -> Costs:
    """Time forwards, the quickest of some rounds each, until a round finds none quicker: what disturbs one only ever adds to it."""
    rows = [n for n in ROWS if n <= min(backend.max_rows, backend.config.context_length - _DEPTH)] or [1]
    depth = min(_DEPTH, backend.max_rows, backend.config.context_length - rows[-1])
    cache = backend.new_cache(1, depth + rows[-1])
    backend.forward(_batch(backend, 0, depth), cache)
    seconds = np.full(len(rows), np.inf)
    for number in range(_MOST_ROUNDS):
        before = seconds.copy()
        for i, n in enumerate(rows):
            seconds[i] = min(seconds[i], _time(backend, cache, depth, n))
        if number + 1 >= _LEAST_ROUNDS and (seconds > (1 - _SETTLED) * before).all():
            break
    return Costs(rows, seconds.tolist())


def _time(backend: Backend, cache: KVCache, depth: int, rows: int) -> float:
    batch = _batch(backend, depth, rows)
    seconds = elapsed_s(lambda: backend.forward(batch, cache))
    cache.truncate(0, depth)
    return seconds


def _batch(backend: Backend, depth: int, rows: int) -> ForwardBatch:
    positions = np.arange(depth, depth + rows, dtype=np.int32)
    tokens = (positions * 31 + 7) % backend.config.vocab_size
    return ForwardBatch(tokens.astype(np.int32), positions, np.array([0], np.int32), np.array([0, rows], np.int32))


def _path(backend: Backend) -> Path:
    """Named after what the seconds depend on: of our own kernels also their sources."""
    kernels = sources_digest(Path(__file__).parents[2] / "kernels") if backend.name == "numba" else ""
    facts = (backend.name, backend.config, backend.weight_bytes, backend.threads, processor_name(), kernels)
    return cache_dir() / "costs" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"

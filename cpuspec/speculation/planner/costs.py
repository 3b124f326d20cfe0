"""Seconds of a forward over M rows: measured once for a model on a machine, kept on the disk, corrected by each round."""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import numpy as np

from cpuspec.backends import Backend
from cpuspec.environment import cache_dir, sources_digest
from cpuspec.files import write_file
from cpuspec.metrics import elapsed_s
from cpuspec.model.batch import ForwardBatch
from cpuspec.model.cache import KVCache
from cpuspec.platform import SYSTEM

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24)  # the numbers of rows that are measured; between them cost grows evenly
LEARNING = 0.1  # weight of the latest draft in the seconds that drafting takes
_DEPTH = 32  # tokens of context under the measured forwards
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 10
_SETTLED = 0.03  # a round that finds nothing quicker by more than this share ends the measurement

# A Kalman filter corrects what was measured, over logarithms of seconds. Its prior standard deviations: of the pace of the machine,
# of how the numbers of rows compare, and of a single round. A slow round is first of all a slow machine, which slows all numbers of
# rows alike and changes no choice; only many rounds over different numbers change how these compare.
_PACE, _SHAPE, _NOISE = 0.5, 0.2, 0.3
_DRIFT = 0.01  # share of the prior variance that returns with every round
_AGREES = 0.05  # a deviation (of logarithms) below this is noise
_FAR_OFF = math.log(2)  # a larger deviation counts as this one: something else took the time
_BOUND = math.log(4)  # the most that rounds may correct what was measured
_VERSION = 2  # costs of before had been corrected by forwards whose rows of prompts were not counted
_WORTH_KEEPING = 0.1  # a correction of this share is written to the disk
_MOST_ROWS = 384  # a round over more rows takes several forwards, and tells nothing of drafts
_STEP = 4  # from the largest known number of rows to the next, if a batch has more


class Costs:
    """Seconds of a forward with all logits, by its number of rows. More rows never cost less.

    They begin as measured and follow the time of rounds (`observe`): a machine that was busy during the measurement would mislead
    the planner for ever. A batch of more rows than were measured adds a larger number, whose seconds begin as the smaller ones
    suggest and are corrected likewise.
    """

    def __init__(self, rows: list[int], seconds: Iterable[float], path: Path | None = None) -> None:
        """Seconds of forwards over `rows` rows, which rise from 1. path: the file that keeps them."""
        self._path = path
        self._start(rows, list(accumulate(seconds, max)))
        self._kept = self.seconds

    def _start(self, rows: list[int], seconds: list[float]) -> None:
        """Believe these seconds as if they had been measured."""
        self.rows = rows
        self.seconds = self._measured = seconds
        self._between = [_between(rows, number) for number in range(rows[-1] + 1)]
        self._corrections = [0.0] * len(rows)  # logarithms of the seconds that rounds take over those that were measured
        # The covariance of the corrections: those of neighbouring numbers of rows go together.
        self._prior = [[_PACE**2 + _SHAPE**2 * math.exp(-abs(math.log2(one / other))) for other in rows] for one in rows]
        self._covariance = self._prior

    def forward_s(self, rows: int) -> float:
        """Seconds of a forward over `rows` rows. Beyond the largest known number each row costs what the last ones did."""
        seconds = self.seconds
        if rows >= len(self._between):
            return seconds[-1] + self.row_s * (rows - self.rows[-1])
        below, above, share = self._between[rows]
        return seconds[below] + share * (seconds[above] - seconds[below])

    @property
    def row_s(self) -> float:
        """Seconds that one row more takes where there are many."""
        if len(self.rows) == 1:
            return self.seconds[0]
        return (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from the seconds of a round over `rows` rows.

        One round counts for a factor of 2 at most, and all of them together for a factor of 4.
        """
        if rows > _MOST_ROWS or seconds <= 0:
            return
        while rows > self.rows[-1]:
            self._start([*self.rows, _STEP * self.rows[-1]], [*self.seconds, self.forward_s(_STEP * self.rows[-1])])
        deviation = math.log(seconds / self.forward_s(rows))
        if abs(deviation) < _AGREES:
            return
        deviation = min(max(deviation, -_FAR_OFF), _FAR_OFF)
        below, above, share = self._between[rows]
        # In lists: for a matrix of ten by ten numpy takes longer.
        covariance = [
            [c + _DRIFT * p for c, p in zip(row, prior, strict=True)]
            for row, prior in zip(self._covariance, self._prior, strict=True)
        ]
        shared = [(1 - share) * row[below] + share * row[above] for row in covariance]
        variance = (1 - share) * shared[below] + share * shared[above] + _NOISE**2
        gains = [one / variance for one in shared]
        self._corrections = [
            min(max(c + gain * deviation, -_BOUND), _BOUND) for c, gain in zip(self._corrections, gains, strict=True)
        ]
        self._covariance = [
            [c - gain * one for c, one in zip(row, shared, strict=True)] for row, gain in zip(covariance, gains, strict=True)
        ]
        self.seconds = list(accumulate((s * math.exp(c) for s, c in zip(self._measured, self._corrections, strict=True)), max))

    def keep(self) -> None:
        """Write the corrections to the disk for the next process, if they are worth it."""
        changes = [abs(math.log(now / kept)) for now, kept in zip(self.seconds, self._kept, strict=False)]
        if self._path is None or max(changes) < _WORTH_KEEPING:
            return
        self._kept = self.seconds
        _write(self._path, self)


def _between(rows: list[int], number: int) -> tuple[int, int, float]:
    """The indices in `rows` of the numbers below and above `number`, and its share of the way from the first to the second."""
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
    """Keep the costs for later starts and for other processes, without those of rows that were never measured."""
    known = [(n, s) for n, s in zip(costs.rows, costs.seconds, strict=True) if n in MEASURED_ROWS]
    rows, seconds = zip(*known, strict=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps({"rows": rows, "seconds": seconds}))
    except OSError:
        pass  # measured again at the next start


def _read(path: Path) -> Costs | None:
    """Kept costs, or None where the file is missing or holds nonsense."""
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
        or not all(isinstance(n, int) and n in MEASURED_ROWS for n in rows)
    ):
        return None
    return Costs(rows, seconds, path)


def measure_costs(backend: Backend) -> Costs:
    """Time forwards, each by its quickest round, until a round finds none quicker. Disturbances only ever add time."""
    rows = [n for n in MEASURED_ROWS if n <= min(backend.max_rows, backend.config.context_length - _DEPTH)] or [1]
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
    # Numbers of any size take the same time.
    hidden = np.ones((rows, backend.config.hidden_size), np.float32) if backend.config.takes_hidden else None
    slots, q_start = np.array([0], np.int32), np.array([0, rows], np.int32)
    return ForwardBatch(tokens.astype(np.int32), positions, slots, q_start, hidden=hidden)


def _path(backend: Backend) -> Path:
    """A file named after everything that the seconds depend on, the sources of our own kernels included."""
    kernels = sources_digest(Path(__file__).parents[2] / "kernels") if backend.name == "numba" else ""
    facts = (_VERSION, backend.name, backend.config, backend.weight_bytes, backend.threads, SYSTEM.processor_name(), kernels)
    return cache_dir() / "costs" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"

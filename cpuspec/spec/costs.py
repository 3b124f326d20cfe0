"""Seconds of a forward over M rows, measured once for a model on a machine and kept: what a planner weighs drafts with."""

import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from cpuspec.backends import Backend
from cpuspec.environment import cache_dir, processor_name
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

    def __init__(self, rows: list[int], seconds: list[float], path: Path | None = None) -> None:
        """Seconds of forwards over those numbers of rows, which rise from 1. path: where they are kept."""
        self.rows = rows
        # For every number of rows up to the last, how much each measured one counts: [last + 1, measured].
        self._shares = np.array([np.interp(range(rows[-1] + 1), rows, one) for one in np.eye(len(rows))]).T
        self._set(seconds)
        self._path = path
        self._measured, self._kept = np.array(self.seconds), np.array(self.seconds)
        self._off = np.zeros(len(rows))  # logarithm of what rounds take over what was measured
        distances = np.abs(np.subtract.outer(np.log2(rows), np.log2(rows)))
        self._doubt = _PACE**2 + _SHAPE**2 * np.exp(-distances)  # its covariance: neighbouring numbers of rows go together
        self._drift = _DRIFT * self._doubt

    def of(self, rows: int) -> float:
        """Seconds of a forward over `rows` rows; beyond the largest measured number each costs what the last ones did."""
        last = self.rows[-1]
        return self._of[rows] if rows <= last else float(self.seconds[-1] + self.per_row * (rows - last))

    @property
    def per_row(self) -> float:
        """Seconds that one row more takes where there are many."""
        if len(self.rows) == 1:
            return self.seconds[0]
        return float((self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2]))

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from what a round over `rows` rows took, if so many were measured.

        A Kalman filter over the logarithms. A slow round is first of all a slow machine, and slows all numbers of rows alike, which
        changes no choice; only many rounds over different numbers change how these compare. Each round counts for a factor of 2 at
        most, and all of them together for a factor of 4.
        """
        if rows > self.rows[-1] or seconds <= 0:
            return
        off = math.log(seconds / self.of(rows))
        if abs(off) < _AGREES:
            return
        off = min(max(off, -_FAR_OFF), _FAR_OFF)
        doubt = self._doubt + self._drift
        shares = self._shares[rows]
        shared = doubt @ shares
        gain = shared / (shares @ shared + _NOISE**2)
        self._off = np.clip(self._off + gain * off, -_BOUND, _BOUND)
        self._doubt = doubt - np.outer(gain, shared)
        self._set(self._measured * np.exp(self._off))

    def _set(self, seconds: ArrayLike) -> None:
        rising = np.maximum.accumulate(seconds)
        self.seconds: list[float] = rising.tolist()
        self._of: list[float] = (self._shares @ rising).tolist()

    def keep(self) -> None:
        """Write down what was learned, for the next process, if it is worth it."""
        if self._path is None or np.abs(np.log(self.seconds / self._kept)).max() < _WORTH_KEEPING:
            return
        self._kept = np.array(self.seconds)
        _write(self._path, self)


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
    """All at once: other processes read it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"rows": costs.rows, "seconds": costs.seconds}))
        part.replace(path)
    except OSError:
        pass  # measured again at the next start


def _read(path: Path) -> Costs | None:
    """Kept costs, or None where there are none or somebody wrote nonsense."""
    try:
        kept = json.loads(path.read_text())
        rows, seconds = kept["rows"], kept["seconds"]
    except (OSError, ValueError, KeyError, TypeError):
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
    """Named after what the seconds depend on."""
    facts = (backend.name, backend.config, backend.weight_bytes, backend.threads, processor_name())
    return cache_dir() / "costs" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"

"""Seconds of a forward over M rows, measured once for a model on a machine and kept: what a planner weighs drafts with."""

import hashlib
import json
from pathlib import Path

import numpy as np

from cpuspec.backends import Backend
from cpuspec.environment import cache_dir, processor_name
from cpuspec.metrics import elapsed_s
from cpuspec.model.batch import ForwardBatch
from cpuspec.model.cache import KVCache

ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24)  # that are measured; between them cost grows evenly
_DEPTH = 32  # tokens of context under the measured forwards
_ROUNDS = 3


class Costs:
    """Seconds of a forward with all logits, by its number of rows. More rows never cost less."""

    def __init__(self, rows: list[int], seconds: list[float]) -> None:
        """Seconds of forwards over those numbers of rows, which rise from 1."""
        self.rows = rows
        self.seconds = np.maximum.accumulate(seconds).tolist()
        self._of: list[float] = np.interp(range(rows[-1] + 1), rows, self.seconds).tolist()

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


def find_costs(backend: Backend) -> Costs:
    """The costs of a loaded model: kept ones of this machine and model, else measured (a second for 1 GB of weights) and kept."""
    path = _path(backend)
    costs = _read(path)
    if costs:
        return costs
    costs = measure_costs(backend)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rows": costs.rows, "seconds": costs.seconds}))
    except OSError:
        pass  # measured again at the next start
    return costs


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
    return Costs(rows, seconds) if len(rows) == len(seconds) and rows == sorted(set(rows)) and rows[0] == 1 else None


def measure_costs(backend: Backend) -> Costs:
    """Time forwards, the quickest of some rounds each: what disturbs a measurement only ever adds to it."""
    rows = [n for n in ROWS if n <= min(backend.max_rows, backend.config.context_length - _DEPTH)] or [1]
    depth = min(_DEPTH, backend.max_rows, backend.config.context_length - rows[-1])
    cache = backend.new_cache(1, depth + rows[-1])
    backend.forward(_batch(backend, 0, depth), cache)
    seconds = np.full(len(rows), np.inf)
    for _ in range(_ROUNDS):
        for i, n in enumerate(rows):
            seconds[i] = min(seconds[i], _time(backend, cache, depth, n))
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

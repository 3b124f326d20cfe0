"""Seconds of a forward over M rows: measured once for a model on a machine, kept on the disk, corrected by each round."""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from cpuspec.backends import Backend
from cpuspec.environment import cache_dir
from cpuspec.files import write_file
from cpuspec.metrics import elapsed_s
from cpuspec.model.batch import ForwardBatch, ForwardOutput
from cpuspec.model.cache import KVCache
from cpuspec.platform import SYSTEM

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24)  # numbers of rows that are measured; between two of them the cost is interpolated
LEARNING = 0.1  # weight of the latest draft in the seconds of drafting
_DEPTH = 32  # tokens of context under the measured forwards
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 10
_LOOKS, _UNDERCUT = 3, 0.5  # forwards timed at a start; the share of the kept seconds below which costs are measured again
_SETTLED = 0.03  # a round that finds nothing quicker by more than this share ends the measurement

# The deviation of a round is log(its seconds / the expected seconds). It corrects the costs of all numbers of rows by _PACE of
# itself: a slow round mostly means that the whole machine is slow, which changes no choice. It corrects the numbers nearest to the
# round's own by a further _SHAPE of itself.
_PACE, _SHAPE = 0.1, 0.2
_FAR_OFF = math.log(2)  # a larger deviation counts as this one: something else took the time
_BOUND = math.log(4)  # the most that rounds may correct a measurement
_VERSION = 3  # of the files
_WORTH_KEEPING = 0.1  # a correction of this share is written to the disk
_MOST_ROWS = 384  # a round over more rows takes several forwards
_STEP = 4  # factor from the largest measured number of rows to the next ones, those of batches
_FADING = 0.8  # weight that a round's bytes keep from one round to the next: they fade fast, as a text changes within a few drafts
_MOST_READ = 2.0  # the largest `read_share` that one round may claim


_DECAY = 0.98  # weight that a round keeps from one round to the next
_PRIOR_WEIGHT = 3.0  # of the prior, in units of what is spent


@dataclass
class Ratio:
    """What rounds gained over what they spent. Older rounds fade. prior: the ratio to expect before the first round."""

    prior: float
    gained: float = 0.0
    spent: float = 0.0

    def add(self, gained: float, spent: float, decay: float = _DECAY) -> None:
        """Count a round. decay: the weight that earlier rounds keep."""
        self.gained = decay * self.gained + gained
        self.spent = decay * self.spent + spent

    def expected(self, weight: float = _PRIOR_WEIGHT) -> float:
        """The ratio to expect of the next round. weight: of the prior, in units of what is spent."""
        return (self.gained + weight * self.prior) / (self.spent + weight)


class Costs:
    """Seconds of a forward with all logits, by its number of rows. More rows never cost less.

    They begin as measured and follow the time of rounds (`observe`): a machine that was busy during the measurement would mislead
    the planner for ever. Numbers of rows beyond the measured ones, as batches have, are extrapolated at first.

    In a mixture of experts, similar rows read the same experts. Rows of one text are similar, above all those of a right draft. So
    the seconds of further experts are multiplied by `read_share`, which is learned from the bytes that recent rounds read.
    """

    def __init__(
        self,
        rows: list[int],
        seconds: Iterable[float],
        path: Path | None = None,
        num_bytes: Sequence[float] = (),
        further_s: Sequence[float] = (),
    ) -> None:
        """Seconds of forwards over `rows` rows, which rise from 1. path: the file that keeps them.

        Of a mixture, for each number of rows: num_bytes: of weights that a forward over rows of unrelated tokens reads.
        further_s: its seconds for weights that a forward over one row does not read.
        """
        self.path, self.measured_rows, self.rows = path, rows, rows[:]
        self._further = list(further_s) or [0.0] * len(rows)
        alike = [all_s - of_further for all_s, of_further in zip(accumulate(seconds, max), self._further, strict=True)]
        self._alike, self._bytes = list(accumulate(alike, max)), list(accumulate(num_bytes, max)) or [0.0] * len(rows)
        while self.rows[-1] < _MOST_ROWS:
            more = min(_STEP * self.rows[-1], _MOST_ROWS)
            for values in (self._alike, self._further, self._bytes):
                values.append(self._beyond(values, more))
            self.rows.append(more)
        self._between = [_between(self.rows, number) for number in range(_MOST_ROWS + 1)]
        self._read = Ratio(1.0)  # as `read_share`, of recent rounds
        self._corrections = [0.0] * len(self.rows)  # logarithms of the seconds of rounds over the measured ones
        self.seconds = self._kept = self._with(1.0)

    @property
    def read_share(self) -> float:
        """Bytes that further rows read, as a share of what rows of unrelated tokens would read. 1 without experts."""
        return self._read.expected(weight=1.0)  # of one drafted row

    @property
    def reads_more(self) -> bool:
        """Whether more rows read more weights, as in a mixture of experts."""
        return self._bytes[-1] > self._bytes[0]

    def _with(self, share: float) -> list[float]:
        """Seconds by the number of rows, at a `read_share`."""
        parts = zip(self._alike, self._further, self._corrections, strict=True)
        return list(accumulate([(alike + share * further) * math.exp(c) for alike, further, c in parts], max))

    def forward_s(self, rows: int) -> float:
        """Seconds of a forward over `rows` rows, extrapolated beyond the largest known number."""
        return self._at(self.seconds, rows)

    def _at(self, values: list[float], rows: int) -> float:
        """The value at a number of rows, interpolated between those at the known numbers."""
        if rows > _MOST_ROWS:
            return self._beyond(values, rows)
        below, above, share = self._between[rows]
        return values[below] + share * (values[above] - values[below])

    def _beyond(self, values: list[float], rows: int) -> float:
        slope = (values[-1] - values[-2]) / (self.rows[-1] - self.rows[-2]) if len(self.rows) > 1 else values[0]
        return values[-1] + slope * (rows - self.rows[-1])

    @property
    def row_s(self) -> float:
        """Seconds of one row more in a forward over many."""
        last = len(self.measured_rows) - 1
        return self.forward_s(self.rows[last] + 1) - self.seconds[last]

    def observe(self, rows: int, seconds: float, num_bytes: int = 0) -> None:
        """Learn from a round over `rows` rows: its seconds, and the bytes of weights that it read, 0 for unknown.

        The seconds of one round count for a factor of 2 at most, and those of all together for a factor of 4.
        """
        if rows > _MOST_ROWS or seconds <= 0:
            return
        seconds_now, further_bytes = self.seconds, self._at(self._bytes, rows) - self._bytes[0]
        if num_bytes and further_bytes > 0:
            share = min(max((num_bytes - self._bytes[0]) / further_bytes, 0.0), _MOST_READ)
            self._read.add((rows - 1) * share, rows - 1, _FADING)
            seconds_now = self._with(share)
        deviation = min(max(math.log(seconds / self._at(seconds_now, rows)), -_FAR_OFF), _FAR_OFF)
        below, above, share = self._between[rows]
        for i, correction in enumerate(self._corrections):
            near = (i == below) * (1 - share) + (i == above) * share
            self._corrections[i] = min(max(correction + (_PACE + _SHAPE * near) * deviation, -_BOUND), _BOUND)
        self.seconds = self._with(self.read_share)

    def keep(self) -> None:
        """Write the corrected costs to the disk for the next process, if they changed enough. `read_share` is not written."""
        now = self._with(1.0)
        changes = [abs(math.log(one / kept)) for one, kept in zip(now, self._kept, strict=True)]
        if self.path is None or max(changes) < _WORTH_KEEPING:
            return
        self._kept = now
        _write(self.path, self)

    def as_dict(self) -> dict[str, Sequence[float]]:
        """The arguments of the constructor that give the costs as they are corrected now."""
        n, further = len(self.measured_rows), [s * math.exp(c) for s, c in zip(self._further, self._corrections, strict=True)]
        return {"rows": self.measured_rows, "seconds": self._with(1.0)[:n], "num_bytes": self._bytes[:n], "further_s": further[:n]}


def _between(rows: list[int], number: int) -> tuple[int, int, float]:
    """The indices in `rows` of the numbers below and above `number`, and its share of the way from the first to the second."""
    below = max(bisect_right(rows, number) - 1, 0)
    if number <= rows[below]:
        return below, below, 0.0
    return below, below + 1, (number - rows[below]) / (rows[below + 1] - rows[below])


def find_costs(backend: Backend) -> Costs:
    """The costs of a loaded model: those kept for this machine, else measured and kept (seconds for 1 GB of weights).

    Kept costs are measured again if forwards now take less than half of them.
    """
    path = _path(backend)
    costs = _read(path)
    if costs and not _is_undercut(costs, backend):
        return costs
    costs = measure_costs(backend)
    costs.path = path
    _write(path, costs)
    return costs


def _is_undercut(costs: Costs, backend: Backend) -> bool:
    """Whether forwards now take far less than the kept seconds: the machine was busy when those were measured.

    Rounds would not correct them: a model that seems slow is never asked.
    """
    cache = backend.new_cache(1, 1)
    return min(_time(backend, cache, 0, 1, False)[0] for _ in range(_LOOKS)) < _UNDERCUT * costs.forward_s(1)


def _write(path: Path, costs: Costs) -> None:
    """Keep the costs for later processes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(costs.as_dict()))
    except OSError:
        pass  # measured again at the next start


def _read(path: Path) -> Costs | None:
    """Kept costs, or None where the file is missing or holds nonsense."""
    try:
        kept = json.loads(path.read_text("utf-8"))
        rows, *others = numbers = [kept[name] for name in ("rows", "seconds", "num_bytes", "further_s")]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if not all(isinstance(one, list) and one and all(isinstance(n, int | float) and 0 <= n < 1e15 for n in one) for one in numbers):
        return None
    seconds, num_bytes, further_s = others
    if (
        not len(rows) == len(seconds) == len(num_bytes) == len(further_s)
        or rows != sorted(set(rows))
        or rows[0] != 1
        or not all(isinstance(n, int) and n in MEASURED_ROWS for n in rows)
        or not all(0 <= further < s < 1e6 for s, further in zip(seconds, further_s, strict=True))
    ):
        return None
    return Costs(rows, seconds, path, num_bytes, further_s)


def measure_costs(backend: Backend) -> Costs:
    """Time forwards over each number of rows, in rounds, until a round finds none quicker: disturbances only add time.

    In a mixture also over rows of the same token, which read fewer experts: the time that they save is that of reading experts.
    """
    rows = [n for n in MEASURED_ROWS if n <= min(backend.max_rows, backend.config.context_length - _DEPTH)] or [1]
    depth = min(_DEPTH, backend.max_rows, backend.config.context_length - rows[-1])
    cache = backend.new_cache(1, depth + rows[-1])
    backend.forward(_batch(backend, 0, depth), cache)
    seconds = np.full((2 if backend.config.experts else 1, len(rows)), np.inf)  # of unrelated tokens, and of one token
    num_bytes = np.zeros(seconds.shape)
    for number in range(_MOST_ROUNDS):
        before = seconds.copy()
        for kind, i in np.ndindex(seconds.shape):
            taken_s, num_bytes[kind, i] = _time(backend, cache, depth, rows[i], bool(kind))
            seconds[kind, i] = min(seconds[kind, i], taken_s)
        if number + 1 >= _LEAST_ROUNDS and (seconds > (1 - _SETTLED) * before).all():
            break
    saved_bytes, saved_s = num_bytes[0] - num_bytes[-1], seconds[0] - seconds[-1]
    byte_s = max(saved_s @ saved_bytes, 0.0) / max(saved_bytes @ saved_bytes, 1.0)
    more_bytes, more_s = num_bytes[0] - num_bytes[0, 0], np.maximum.accumulate(seconds[0]) - seconds[0, 0]
    return Costs(rows, seconds[0].tolist(), None, num_bytes[0].tolist(), np.clip(byte_s * more_bytes, 0.0, more_s).tolist())


def _time(backend: Backend, cache: KVCache, depth: int, rows: int, one_token: bool) -> tuple[float, int]:
    """Seconds of a forward, and the bytes of weights that it read."""
    batch, outputs = _batch(backend, depth, rows, one_token), list[ForwardOutput]()
    seconds = elapsed_s(lambda: outputs.append(backend.forward(batch, cache)))
    cache.truncate(0, depth)
    return seconds, outputs[0].weight_bytes


def _batch(backend: Backend, depth: int, rows: int, one_token: bool = False) -> ForwardBatch:
    positions = np.arange(depth, depth + rows, dtype=np.int32)
    tokens = ((depth if one_token else positions) * np.ones(rows, np.int32) * 31 + 7) % backend.config.vocab_size
    # Numbers of any size take the same time.
    hidden = np.ones((rows, backend.config.state_size), np.float32) if backend.config.takes_hidden else None
    slots, q_start = np.array([0], np.int32), np.array([0, rows], np.int32)
    return ForwardBatch(tokens.astype(np.int32), positions, slots, q_start, hidden=hidden)


def _path(backend: Backend) -> Path:
    """A file named after everything that the seconds depend on: of our own kernels their sources and instructions."""
    kernels = ""
    if backend.name == "numba":
        from cpuspec.kernels.machine_code import fingerprint

        kernels = fingerprint()
    facts = (_VERSION, backend.name, backend.config, backend.weight_bytes, backend.threads, SYSTEM.processor_name(), kernels)
    return cache_dir() / "costs" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"

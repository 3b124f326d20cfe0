"""Counters, latencies and rates, each defined once. With `evaluate.speed` and the benchmarks the only place that reads a clock."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from time import perf_counter, time
from typing import Any

import numpy as np

from cpuspec.backends.disk import DiskReads
from cpuspec.platform import SYSTEM

_log = logging.getLogger(__name__)


@dataclass
class LevelCounters:
    """How many tokens one draft level proposed, and how many its verifier accepted.

    A cycle is one verification of one sequence, with a draft or without. Evaluated tokens end at the first rejected one; the
    alternatives that a tree has for one position count as one.
    """

    num_cycles: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_evaluated_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def record(self, num_draft_tokens: int, num_accepted_tokens: int, num_positions: int) -> None:
        """Count one cycle. num_positions: length of the longest drafted path that begins with the accepted tokens."""
        self.num_cycles += 1
        if not num_draft_tokens:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_evaluated_tokens += min(num_accepted_tokens + 1, num_positions)
        self.num_accepted_tokens += num_accepted_tokens
        positions = self.num_accepted_tokens_per_pos
        positions.extend([0] * (num_positions - len(positions)))
        for position in range(num_accepted_tokens):
            positions[position] += 1

    def __add__(self, other: "LevelCounters") -> "LevelCounters":
        """The counts of both together."""
        per_pos = zip_longest(self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, fillvalue=0)
        return LevelCounters(
            self.num_cycles + other.num_cycles,
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_evaluated_tokens + other.num_evaluated_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            [mine + theirs for mine, theirs in per_pos],
        )

    @property
    def mu(self) -> float:
        """Accepted tokens per cycle."""
        return self.num_accepted_tokens / self.num_cycles if self.num_cycles else 0.0

    @property
    def tau(self) -> float:
        """Tokens per cycle: the accepted ones and the recovered or bonus token."""
        return self.mu + 1

    @property
    def accepted_per_proposed(self) -> float:
        """Share of the drafted tokens that were accepted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def accepted_per_evaluated(self) -> float:
        """Share of the drafted tokens up to the first rejection that were accepted."""
        return self.num_accepted_tokens / self.num_evaluated_tokens if self.num_evaluated_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Counts and shares under their names."""
        shares = ("mu", "tau", "accepted_per_proposed", "accepted_per_evaluated")
        return asdict(self) | {name: getattr(self, name) for name in shares}


def sum_levels(parts: Iterable[Mapping[str, LevelCounters]]) -> dict[str, LevelCounters]:
    """The counts of each level, of all requests together."""
    levels: dict[str, LevelCounters] = {}
    for part in parts:
        for name, counts in part.items():
            levels[name] = levels.get(name, LevelCounters()) + counts
    return levels


@dataclass(frozen=True)
class LevelMemory:
    """The memory of one model of a chain: its weights, and keys and values of running and of finished requests.

    shared_bytes of the weights are the target's own; they are in memory once.
    """

    name: str
    weight_bytes: int
    shared_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class LevelReads:
    """The forwards of one model so far, and the bytes of weights that they read, of a mixture the experts that rows needed."""

    name: str
    num_forwards: int
    weight_bytes: int
    disk: DiskReads | None = None  # of experts that stay on the disk; None where all weights are in memory


@dataclass(frozen=True)
class PrefixStats:
    """The prefix cache of one model so far: what requests came with, and what finished requests have left for later ones.

    limit_bytes: the most that kept_bytes may be; None for no limit. disk_bytes are those of the whole directory, which models and
    processes share; blocks were read from it, written to it, and refused because they were damaged.
    """

    name: str
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of these, the ones that were not computed again
    kept_bytes: int = 0
    limit_bytes: int | None = None
    num_evictions: int = 0  # blocks that left the memory to make room
    disk_bytes: int = 0
    num_blocks_read: int = 0
    num_blocks_written: int = 0
    num_blocks_refused: int = 0
    num_blocks_dropped: int = 0  # that were not written: the disk was too slow for them


@dataclass
class Spent:
    """Seconds so far by what took them, and how often. A forward goes by its number of rows."""

    counts: dict[str | int, int] = field(default_factory=dict)
    seconds: dict[str | int, float] = field(default_factory=dict)

    def add(self, what: str | int, seconds: float, times: int = 1) -> None:
        """Count one more, or so many that took this long together."""
        self.counts[what] = self.counts.get(what, 0) + times
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def of(self, what: str) -> float:
        """Seconds of one thing, 0 where it never was."""
        return self.seconds.get(what, 0.0)

    @property
    def forwards_s(self) -> float:
        """Seconds of all forwards."""
        return sum(seconds for what, seconds in self.seconds.items() if isinstance(what, int))


@dataclass(frozen=True)
class RoundPart:
    """A part of what rounds have taken so far: how often, in all, and what `auto` expected of it, where it expects anything."""

    name: str
    count: int
    seconds: float
    expected_s: float | None = None


@dataclass(frozen=True)
class RequestStats:
    """The cost of one request. Rates and latencies of decoding are None where a single step generated everything.

    ttft_s runs from the arrival to the first token; the rest describes the time from then to the last token.
    tokens_per_s: tokens after the first step / that time. gb_per_s: weights and this request's keys and values that its
    forwards read, drafts' included / that time. weight_bytes: weights only, the first step's included.
    itl_s: gaps between consecutive tokens (tokens of one step, and of steps that ran at once, arrive together); step_s: of steps.
    """

    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose keys and values were there already
    num_new_tokens: int
    num_forwards: int  # of the target from the request's admission to its end, chunks of other requests' prompts included
    num_forwards_saved: int  # of the target: tokens that needed no step of their own
    num_draft_tokens: int  # that the target verified; tokens that a grammar forced are not among them
    num_accepted_tokens: int  # of these
    ttft_s: float | None
    decode_s: float | None
    tpot_s: float | None
    tokens_per_s: float | None
    gb_per_s: float | None
    weight_bytes: int
    itl_s: dict[str, float]  # p50, p95, p99
    step_s: dict[str, float]
    levels: dict[str, LevelCounters]  # by drafter, the cheapest first; one that never drafted is absent

    def as_dict(self) -> dict[str, Any]:
        """Every figure under its name, levels with their shares."""
        return asdict(self) | {"levels": {name: level.as_dict() for name, level in self.levels.items()}}


_Cycles = Sequence[tuple[str, int, int, int]]
Reads = Sequence[tuple[int, int]]  # of each model its forwards, and the bytes of weights that they read


class RequestMeter:
    """Collects the counts and times of a request for `RequestStats` while it runs."""

    def __init__(self, num_prompt_tokens: int, kv_bytes: Sequence[int], state_bytes: Sequence[int] | int = 0) -> None:
        """kv_bytes: of one token's keys and values, of the target, then of each draft model. state_bytes: of recurrent states."""
        self.num_cached_tokens = 0
        self._num_prompt_tokens = num_prompt_tokens
        self._kv_bytes, self._state_bytes = kv_bytes, state_bytes
        self._first_reads: Reads = ()  # before the first step
        self.has_begun = False
        self._steps: list[tuple[float, int, Reads, _Cycles, int]] = []  # when each ended, and the arguments of `record_step`
        self.arrive()

    def arrive(self) -> None:
        """Start the clock, as making the meter does."""
        self._arrival_s = perf_counter()

    def begin(self, reads: Reads) -> None:
        """Note that the request was admitted. reads: of each model so far, in the order of `kv_bytes`."""
        self._first_reads, self.has_begun = reads, True

    def record_step(self, num_new_tokens: int, reads: Reads, cycles: _Cycles, times: int = 1) -> None:
        """Note a step that has just committed tokens; figures are computed when they are asked for.

        cycles: its verifications, the cheapest level's first: the level's name, then what `LevelCounters.record` takes.
        times: steps that ran at once, each of these for a token.
        """
        self._steps.append((perf_counter(), num_new_tokens, reads, cycles, times))

    @property
    def levels(self) -> dict[str, LevelCounters]:
        """The counts so far by drafter, the cheapest first."""
        levels: dict[str, LevelCounters] = {}
        for *_, cycles, times in self._steps:
            for source, num_drafted, num_accepted, num_positions in times * tuple(cycles):
                if source not in levels:
                    # A round without a draft, as a chain's first is, names the topmost level only: those below come before it.
                    levels = {name: levels.get(name, LevelCounters()) for name, *_ in cycles} | levels
                levels[source].record(num_drafted, num_accepted, num_positions)
        return levels

    def stats(self) -> RequestStats:
        """The figures so far."""
        steps, num_models = self._steps, len(self._kv_bytes)
        times, counts = np.array([time_s for time_s, *_ in steps]), np.array([num_new for _, num_new, *_ in steps], np.int64)
        so_far = [self._first_reads, *(reads for _, _, reads, *_ in steps)] if steps else []
        of_steps = np.diff(np.array(so_far, np.int64).reshape(-1, num_models, 2), axis=0)
        num_forwards, weight_bytes = of_steps[:, :, 0], of_steps[:, :, 1]  # [steps, models]
        lengths = self._num_prompt_tokens + np.cumsum(counts)  # after each step
        of_sequence = num_forwards * (np.outer(lengths, self._kv_bytes) + self._state_bytes)
        read_bytes = (weight_bytes + of_sequence)[1:].sum()  # the first step is the prompt's
        num_decoded = int(counts[1:].sum())
        decode_s = float(times[-1] - times[0]) if num_decoded else None
        gaps = np.diff(times)
        between_tokens = np.zeros(max(int(counts.sum()) - 1, 0))
        arrivals = np.cumsum(counts)[:-1] - 1  # the gap before a step's first token
        between_tokens[arrivals[counts[1:] > 0]] = gaps[counts[1:] > 0]
        verified = [cycles[-1] for *_, cycles, _ in steps if cycles]  # by the target
        num_steps = [num for *_, num in steps]
        return RequestStats(
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_new_tokens=int(counts.sum()),
            num_forwards=int(num_forwards[:, 0].sum()),
            num_forwards_saved=int(counts.sum()) - sum(num_steps),
            num_draft_tokens=sum(num_drafted for _, num_drafted, *_ in verified),
            num_accepted_tokens=sum(num_accepted for *_, num_accepted, _ in verified),
            ttft_s=float(times[0] - self._arrival_s) if len(times) else None,
            decode_s=decode_s,
            tpot_s=decode_s / num_decoded if decode_s else None,
            tokens_per_s=num_decoded / decode_s if decode_s else None,
            gb_per_s=float(read_bytes) / decode_s / 1e9 if decode_s else None,
            weight_bytes=int(weight_bytes.sum()),
            itl_s=percentiles(between_tokens),
            step_s=percentiles(np.repeat(gaps / num_steps[1:], num_steps[1:])),
            levels={name: level for name, level in self.levels.items() if level.num_drafts},
        )


def percentiles(values: Any) -> dict[str, float]:
    """p50, p95 and p99; an empty dict of no values."""
    return dict(zip(("p50", "p95", "p99"), np.percentile(values, (50, 95, 99)).tolist(), strict=True)) if len(values) else {}


def now_s() -> float:
    """Seconds since some moment, to tell how long something takes that is no single call."""
    return perf_counter()


def epoch_s() -> int:
    """Seconds since 1970, for time stamps."""
    return int(time())


def elapsed_s(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start_s = perf_counter()
    function()
    return perf_counter() - start_s


def read_bandwidth(threads: int, num_bytes: int = 512 << 20) -> float:
    """Bytes per second that `threads` threads read from memory together: an estimate, the best of some passes in about a second.

    Allocates `num_bytes`, or a quarter of the available memory if that is less; they must exceed the processor's caches by far, or
    it is those that are measured.
    """
    available = SYSTEM.memory().available
    if available is not None and available // 4 < num_bytes:
        num_bytes = max(available // 4, 1 << 20)
        _log.info(
            "little memory is available: its speed is measured over %d MB, and caches may answer some of that", num_bytes >> 20
        )
    values = np.ones(num_bytes // 4, np.float32)
    # Small pieces: numpy's maximum then keeps pace with memory, and threads end together.
    pieces = np.array_split(values, 16 * threads)
    best_s, end_s = float("inf"), perf_counter() + 1
    with ThreadPoolExecutor(threads) as pool:
        while (start_s := perf_counter()) < end_s:
            list(pool.map(np.max, pieces))
            best_s = min(best_s, perf_counter() - start_s)
    return values.nbytes / best_s

"""Measures the speed of a backend: prefill, decoding at a depth of context, and forwards over a few rows with all logits.

It calls the backend itself, with random tokens and without sampling, as llama.cpp's llama-bench does. Each round measures every
workload and the memory's speed, so that a slow phase of the machine affects all of them alike.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from cpuspec.backends import Backend, device_of, disk_reads
from cpuspec.backends.disk import DiskReads
from cpuspec.config import ModelConfig
from cpuspec.errors import ConfigError
from cpuspec.metrics import read_bandwidth
from cpuspec.model.batch import ForwardBatch

# A forward over a few rows takes milliseconds: one for each round would say little.
FORWARDS_PER_ROUND = 5

_WARM_UP_TOKENS = 8  # of decoding: enough to wake the threads and touch what is read


@dataclass(frozen=True)
class Workload:
    """`tokens` tokens fed to `sequences` sequences that hold `depth` each already, `rows` to a forward, the same number of each.

    all_logits: of every row; otherwise of the last token only, as a prompt wants them.
    """

    name: str
    tokens: int
    depth: int
    rows: int
    all_logits: bool
    sequences: int = 1

    @property
    def length(self) -> int:
        """Tokens that each sequence holds at the end."""
        return self.depth + self.tokens // self.sequences


@dataclass(frozen=True)
class Plan:
    """The workloads to measure. 0 tokens, or no rows, leave that part out.

    prompt_tokens and new_tokens are measured at each of `depths`, new_tokens for each number of `sequences` that decode together,
    forwards over each number of `rows` at `rows_depth`.
    """

    prompt_tokens: int = 512
    new_tokens: int = 128
    depths: tuple[int, ...] = (0,)
    sequences: tuple[int, ...] = (1,)
    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 8, 16)
    rows_depth: int = 64
    repetitions: int = 5

    def __post_init__(self) -> None:
        for name, values, least in (
            ("prompt_tokens", (self.prompt_tokens,), 0),
            ("new_tokens", (self.new_tokens,), 0),
            ("depths", self.depths, 0),
            ("sequences", self.sequences, 1),
            ("rows", self.rows, 1),
            ("rows_depth", (self.rows_depth,), 0),
            ("repetitions", (self.repetitions,), 1),
        ):
            if any(value < least for value in values):
                raise ConfigError(f"{name} must be at least {least}, got {min(values)}")
            if len(set(values)) != len(values):
                raise ConfigError(f"{name} must differ from each other, got {', '.join(map(str, values))}")
        for name, values, such in (("depths", self.depths, 0), ("sequences", self.sequences, 1)):
            if not values:
                raise ConfigError(f"{name} are empty; wanted at least one, such as {such}")
        if not (self.prompt_tokens or self.new_tokens or self.rows):
            raise ConfigError("there is nothing to measure; give prompt_tokens, new_tokens or rows")

    def check(self, config: ModelConfig, max_rows: int) -> None:
        """Raise ConfigError unless the model's context holds every workload and a forward takes that many rows."""
        for name, values in (("rows", self.rows), ("sequences", self.sequences)):
            if max(values, default=0) > max_rows:
                raise ConfigError(f"a forward takes at most {max_rows} rows, got {max(values)} in {name}")
        for work in (*self.prefill(max_rows), *self.decode(), *self.forwards()):
            if work.length > config.context_length:
                raise ConfigError(
                    f"{work.name} needs a context of {work.length} tokens, the model has {config.context_length}; "
                    "ask for a smaller depth or fewer tokens"
                )

    def prefill(self, max_rows: int) -> list[Workload]:
        """Prompts at each depth, in chunks of `max_rows`."""
        sizes = [self.prompt_tokens] if self.prompt_tokens else []
        return [Workload(_at_depth(f"pp{n}", depth), n, depth, max_rows, False) for n in sizes for depth in self.depths]

    def decode(self) -> list[Workload]:
        """Token after token of some sequences together, at each depth."""
        sizes = [self.new_tokens] if self.new_tokens else []
        return [
            Workload(_at_depth(f"tg{n}" + f" x {count}" * (count > 1), depth), n * count, depth, count, True, count)
            for n in sizes
            for depth in self.depths
            for count in self.sequences
        ]

    def forwards(self) -> list[Workload]:
        """One forward for each number of rows, with all logits."""
        return [Workload(_at_depth(f"{n} row{'s' * (n > 1)}", self.rows_depth), n, self.rows_depth, n, True) for n in self.rows]


@dataclass(frozen=True)
class Speed:
    """The time of one workload. Rates without a prefix are of the median time and of all sequences; sd is 0 for a single sample.

    weight_bytes: of weights that a forward read, as the backend counted, mean of all.
    gb_per_s: weights, keys and values that its forwards read / time, where each reads what it needs once (None for prompts, which
    arithmetic bounds). bandwidth_share: that over the read bandwidth measured in the same round, median of the rounds (None on a
    GPU, whose memory is not measured).
    """

    name: str
    tokens: int
    depth: int
    sequences: int
    num_samples: int
    median_s: float
    mean_s: float
    sd_s: float
    min_s: float
    tokens_per_s: float
    mean_tokens_per_s: float
    sd_tokens_per_s: float
    weight_bytes: int
    gb_per_s: float | None
    bandwidth_share: float | None
    disk_gb_per_s: float | None  # experts that were read from the disk / time; None where all weights are in memory
    disk_wait_share: float | None  # of the time, in which forwards waited for that


@dataclass(frozen=True)
class RowsSpeed:
    """The time of a forward over `rows` rows, and its ratio to one row, forward by forward (None if one row is not measured)."""

    rows: int
    over_one_row: float | None
    speed: Speed


@dataclass(frozen=True)
class SpeedReport:
    """The figures of one run. prefill and decode have one entry for each depth, decode for each number of sequences at it."""

    read_bytes_per_s: float | None  # of the processor's memory, median of the rounds; None if a GPU computes
    prefill: list[Speed]
    decode: list[Speed]
    rows: list[RowsSpeed]

    def as_dict(self) -> dict[str, Any]:
        """prefill and decode: the first figures of each (None if not measured), the others in `more`; rows: a list."""
        return {
            "read_bytes_per_s": self.read_bytes_per_s,
            "prefill": asdict(self.prefill[0]) if self.prefill else None,
            "decode": asdict(self.decode[0]) if self.decode else None,
            "more": [asdict(speed) for speed in (*self.prefill[1:], *self.decode[1:])],
            "rows": [{"rows": one.rows, "over_one_row": one.over_one_row, **asdict(one.speed)} for one in self.rows],
        }


def measure_speed(backend: Backend, plan: Plan, on_progress: Callable[[str], None] = lambda what: None) -> SpeedReport:
    """Run the plan on a loaded model. on_progress is told what begins; never while a clock runs.

    Uses the memory of a cache slot for each depth, and 512 MB to measure the read bandwidth.
    Raises ConfigError if the model cannot hold the plan.
    """
    plan.check(backend.config, backend.max_rows)
    prefill, decode, forwards = plan.prefill(backend.max_rows), plan.decode(), plan.forwards()
    stage = _Stage(backend, [*prefill, *decode, *forwards], on_progress)
    on_progress("warming up")
    for work in (*prefill, *decode, *forwards):
        decodes = work.rows == work.sequences
        stage.run(replace(work, tokens=min(work.tokens, _WARM_UP_TOKENS * work.sequences)) if decodes else work)
    bandwidths: list[float] = []
    samples: dict[Workload, list[_Sample]] = {work: [] for work in (*prefill, *decode, *forwards)}
    for number in range(1, plan.repetitions + 1):
        on_progress(f"round {number} of {plan.repetitions}")
        if device_of(backend) == "cpu":
            bandwidths.append(read_bandwidth(backend.threads))
        for work in (*prefill, *decode, *forwards * FORWARDS_PER_ROUND):
            samples[work].append(stage.run(work))
    speed = {work: _speed(work, ones, bandwidths, stage.kv_bytes(work)) for work, ones in samples.items()}
    seconds = {work: [one.seconds for one in ones] for work, ones in samples.items()}
    one_row_s = next((seconds[work] for work in forwards if work.rows == 1), None)
    return SpeedReport(
        read_bytes_per_s=statistics.median(bandwidths) if bandwidths else None,
        prefill=[speed[work] for work in prefill],
        decode=[speed[work] for work in decode],
        rows=[
            RowsSpeed(work.rows, _median_ratio(seconds[work], one_row_s) if one_row_s else None, speed[work]) for work in forwards
        ],
    )


class _Sample(NamedTuple):
    """One run of a workload: the seconds of its forwards, and the bytes of weights that they read."""

    seconds: float
    weight_bytes: int
    disk: DiskReads | None  # what they read from the disk


class _Stage:
    """A cache with slots for each depth, filled once. The rows that a workload appends are truncated after it was timed."""

    def __init__(self, backend: Backend, workloads: Sequence[Workload], on_progress: Callable[[str], None]) -> None:
        self._backend = backend
        self._rng = np.random.default_rng(0)
        self._slots: dict[int, list[int]] = {}
        num_slots = 0
        for depth in sorted({work.depth for work in workloads}):
            count = max(work.sequences for work in workloads if work.depth == depth)
            self._slots[depth] = list(range(num_slots, num_slots + count))
            num_slots += count
        self._cache = backend.new_cache(num_slots, max(work.length for work in workloads))
        for depth in filter(None, self._slots):
            on_progress(f"filling a cache with {depth} tokens")
            for slot in self._slots[depth]:
                for batch in self._batches(Workload("", depth, 0, backend.max_rows, False), [slot]):
                    backend.forward(batch, self._cache)

    def run(self, work: Workload) -> _Sample:
        """Run the workload's forwards, and truncate the rows that they appended."""
        slots = self._slots[work.depth][: work.sequences]
        batches = self._batches(work, slots)
        before, num_bytes, start_s = disk_reads(self._backend), 0, perf_counter()
        for batch in batches:
            num_bytes += self._backend.forward(batch, self._cache).weight_bytes
        elapsed_s = perf_counter() - start_s
        for slot in slots:
            self._cache.truncate(slot, work.depth)
        after = disk_reads(self._backend)
        return _Sample(elapsed_s, num_bytes, after.since(before) if after and before else None)

    def kv_bytes(self, work: Workload) -> int:
        """Keys and values up to and including its own last row's, and states, which each forward of the workload reads once."""
        tokens = sum(sum(held) + sum(fed) for held, fed in _steps(work))
        return tokens * self._cache.bytes_per_token + sum(len(held) for held, _ in _steps(work)) * self._cache.state_bytes

    def _batches(self, work: Workload, slots: list[int]) -> list[ForwardBatch]:
        batches = []
        for held, fed in _steps(work):
            last = [sum(fed) - 1] if held[0] + fed[0] == work.length else []
            batches.append(
                ForwardBatch(
                    tokens=self._rng.integers(0, self._backend.config.vocab_size, sum(fed), dtype=np.int32),
                    positions=np.concatenate([np.arange(at, at + n, dtype=np.int32) for at, n in zip(held, fed, strict=True)]),
                    slots=np.array(slots, np.int32),
                    q_start=np.cumsum([0, *fed], dtype=np.int32),
                    logit_rows=None if work.all_logits else np.array(last, np.int32),
                    of_prompts=not work.all_logits,
                )
            )
        return batches


def _steps(work: Workload) -> list[tuple[list[int], list[int]]]:
    """For each forward: the tokens that each sequence holds before it, and the tokens that it feeds."""
    step = work.rows // work.sequences
    return [
        ([held] * work.sequences, [min(step, work.length - held)] * work.sequences) for held in range(work.depth, work.length, step)
    ]


def _speed(work: Workload, samples: Sequence[_Sample], bandwidths: Sequence[float], kv_bytes: int) -> Speed:
    """The figures of samples that were taken in equal numbers in each round. bandwidths: bytes per second, one a round, or none."""
    samples_s, weight_bytes = [one.seconds for one in samples], statistics.mean([one.weight_bytes for one in samples])
    disk = [one.disk for one in samples if one.disk]
    rates = [work.tokens / sample_s for sample_s in samples_s]
    read_rates = [(one.weight_bytes + kv_bytes) / one.seconds for one in samples]
    median_s = statistics.median(samples_s)
    in_turn = [bandwidth for bandwidth in bandwidths for _ in range(len(samples_s) // len(bandwidths))]
    return Speed(
        name=work.name,
        tokens=work.tokens,
        depth=work.depth,
        sequences=work.sequences,
        num_samples=len(samples_s),
        median_s=median_s,
        mean_s=statistics.mean(samples_s),
        sd_s=_sd(samples_s),
        min_s=min(samples_s),
        tokens_per_s=work.tokens / median_s,
        mean_tokens_per_s=statistics.mean(rates),
        sd_tokens_per_s=_sd(rates),
        weight_bytes=round(weight_bytes / len(_steps(work))),
        gb_per_s=(weight_bytes + kv_bytes) / median_s / 1e9 if work.all_logits else None,
        bandwidth_share=_median_ratio(read_rates, in_turn) if work.all_logits and in_turn else None,
        disk_gb_per_s=sum(one.num_bytes for one in disk) / sum(samples_s) / 1e9 if disk else None,
        disk_wait_share=sum(one.wait_s for one in disk) / sum(samples_s) if disk else None,
    )


def _median_ratio(values: Sequence[float], to: Sequence[float]) -> float:
    return statistics.median(value / other for value, other in zip(values, to, strict=True))


def _sd(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _at_depth(name: str, depth: int) -> str:
    return f"{name} @ d{depth}" if depth else name

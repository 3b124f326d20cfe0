"""The loop of every training: AdamW, a rate that rises and falls, checkpoints, and what held-back samples say.

A directory OUT holds the head that was best on held-back samples, and OUT/training what a run goes on from: `state.pt`, and a line
in `log.jsonl` for every measurement. A run that was interrupted ends with the numbers that it would have ended with: what a step
draws depends on its number only.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.files import read_file, replacing, write_file
from cpuspec.metrics import now_s
from cpuspec.train.acceptance import Acceptance
from cpuspec.train.samples import Sample

OnStep = Callable[[str, int, int], None]  # what is done, how much of it, and of how much

_BETAS = (0.9, 0.95)
_SAVED_EVERY_S = 120.0
_MOST_LOG_BYTES = 1 << 28
_SHORTEST = 4  # tokens of a sample that can be trained on
_MAY_CHANGE = ("minutes", "measured_every")  # when a run goes on


class Samples(Protocol):
    """The training data: `SampleSet`, or another sequence of samples. lengths: tokens of each."""

    path: Path
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """One of them."""
        ...

    def tokens(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Its `token_ids` and `answer`."""
        ...


class TrainedWeights(Protocol):
    """The numbers of a head or model in training. trained: the tensors that gradients change, by name."""

    trained: dict[str, Tensor]
    device: torch.device

    def save(self, directory: Path, dtype: torch.dtype, sharpness: float) -> None:
        """Write a head or a model that the engine opens, its logits times `sharpness`. Raises OSError."""
        ...


class Training(Protocol):
    """A head or a model in training."""

    @property
    def weights(self) -> TrainedWeights:
        """Its numbers."""
        ...

    def loss(self, samples: Sequence[Sample], rng: np.random.Generator) -> Tensor | None:
        """The mean loss of a step; None where there is nothing to learn."""
        ...

    def measure(self, samples: Iterable[Sample]) -> Acceptance:
        """The acceptance of drafts."""
        ...


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    epochs: how often each sample is seen. minutes: of training after which it ends in any case, 0 for no limit; the rate falls with
    what comes first. tokens: of samples in a step. longest: tokens of a sample; longer ones are cut. rate: the highest rate,
    reached after `warm_up` of the run. clip: the largest norm of a step's gradients. held_back: share of the samples, the last
    ones, that are not trained on; measured: how many of them are measured, every `measured_every` steps.
    bf16: whether products are computed in bf16.
    """

    epochs: int = 5
    minutes: float = 0.0
    tokens: int = 2048
    longest: int = 1024
    rate: float = 6e-4
    warm_up: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    held_back: float = 0.05
    measured: int = 48
    measured_every: int = 100
    seed: int = 0
    bf16: bool = False


class Measured(NamedTuple):
    """A line of the log. tokens: trained on so far, repeated ones counted again. The last four: see `Acceptance`."""

    step: int
    epoch: float
    tokens: int
    seconds: float
    rate: float
    loss: float | None  # mean since the line before
    accepted: list[float]
    said: list[float]
    mean_length: float
    sharpness: float = 1.0


OnMeasured = Callable[[Measured], None]


@dataclass
class _State:
    """How far a run is."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    losses: float = 0.0  # since the last measurement
    num_losses: int = 0


def train(
    training: Training,
    samples: Samples,
    out: Path,
    schedule: Schedule,
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    on_step: OnStep,
    on_measured: OnMeasured,
) -> list[Measured]:
    """Train until the schedule ends, and write the best head to `out`; returns all measurements, those before a resume included.

    settings: everything else that the numbers depend on, as JSON holds it. A run in `out` with the same settings is continued.
    Raises ConfigError where there are too few samples, CheckpointError where the run in `out` has other settings or samples, and
    OSError where nothing can be written.
    """
    kept, held = train_and_held_back(samples, schedule)
    steps = step_samples(samples, kept, schedule)
    told = {"samples": len(samples), "tokens": int(samples.lengths.sum()), **settings, **asdict(schedule)}
    for name in _MAY_CHANGE:
        del told[name]
    run = _Run(training, samples, held, out, schedule, dtype, len(steps), json.dumps(told, sort_keys=True), on_measured)
    run.go(steps, on_step)
    return run.log


def train_and_held_back(samples: Samples, schedule: Schedule) -> tuple[list[int], list[int]]:
    """The samples that are trained on, and those that are measured: of the last ones."""
    usable = [i for i in range(len(samples)) if samples.lengths[i] >= _SHORTEST and samples.tokens(i)[1].sum() > 2]
    num_held = max(1, round(schedule.held_back * len(usable)))
    if len(usable) < 2 or num_held >= len(usable):
        raise ConfigError(f"{samples.path} has {len(usable)} samples with an answer; wanted at least 2, and more to train on")
    held = usable[-num_held:]
    spread = np.linspace(0, num_held - 1, min(num_held, schedule.measured)).astype(int)
    return usable[:-num_held], [held[i] for i in spread]


def step_samples(samples: Samples, kept: Sequence[int], schedule: Schedule) -> list[list[int]]:
    """The samples of every step of all epochs: each epoch in an order of its own."""
    steps: list[list[int]] = []
    for epoch in range(schedule.epochs):
        order = np.random.default_rng([schedule.seed, epoch]).permutation(np.array(kept))
        room = 0
        for i in order.tolist():
            length = min(int(samples.lengths[i]), schedule.longest)
            if length > room:
                steps.append([])
                room = max(schedule.tokens, length)
            steps[-1].append(i)
            room -= length
    return steps


def read_log(out: Path) -> list[Measured]:
    """The measurements of a run so far. Raises CheckpointError where there are none, or the log is not sound."""
    path = out / "training" / "log.jsonl"
    try:
        lines = read_file(path, _MOST_LOG_BYTES, CheckpointError).decode().splitlines()
        return [Measured(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


class _Run:
    """One training, from where the last run was."""

    def __init__(
        self,
        training: Training,
        samples: Samples,
        held: Sequence[int],
        out: Path,
        schedule: Schedule,
        dtype: torch.dtype,
        num_steps: int,
        settings: str,
        on_measured: OnMeasured,
    ) -> None:
        self._training, self._samples, self._held, self._out = training, samples, held, out
        self._schedule, self._dtype, self._num_steps = schedule, dtype, num_steps
        self._settings, self._on_measured = settings, on_measured
        self._path, self._log_path = out / "training" / "state.pt", out / "training" / "log.jsonl"
        self._trained = training.weights.trained
        self._optimizer = torch.optim.AdamW(
            self._trained.values(), lr=schedule.rate, betas=_BETAS, weight_decay=schedule.weight_decay, fused=True
        )
        self._state, self.log, self._is_whole = _State(), list[Measured](), True
        if self._path.exists():
            self._load()

    def go(self, steps: Sequence[Sequence[int]], on_step: OnStep) -> None:
        """Run the steps that are left. An interrupt between or in steps leaves a state to go on from."""
        schedule, state = self._schedule, self._state
        saved_s, before_s, longest_s = now_s(), now_s() - state.seconds, 60 * schedule.minutes or math.inf
        try:
            while True:
                ends = state.step == len(steps) or state.seconds >= longest_s
                is_due = ends or state.step % schedule.measured_every == 0
                if is_due and (not self.log or self.log[-1].step < state.step):
                    self._measure()
                if ends:
                    break
                rng = np.random.default_rng([schedule.seed, 1 << 30, state.step])
                some = [_cut(self._samples[i], schedule.longest, rng) for i in steps[state.step]]
                loss = self._loss(some, rng)
                self._is_whole = False
                self._advance(loss, sum(len(one.token_ids) for one in some))
                self._is_whole = True
                state.seconds = now_s() - before_s
                if now_s() - saved_s > _SAVED_EVERY_S:
                    self._save()
                    saved_s = now_s()
                on_step("training", state.step, len(steps))
        finally:
            if self._is_whole:
                self._save()

    def _measure(self) -> None:
        """Add a line to the log, and write the head if it is the best so far."""
        schedule, state = self._schedule, self._state
        acceptance = self._training.measure(_cut(self._samples[i], schedule.longest, None) for i in self._held)
        line = Measured(
            state.step,
            round(schedule.epochs * state.step / self._num_steps, 3),
            state.tokens,
            round(state.seconds, 1),
            round(self._rate(), 9),
            round(state.losses / state.num_losses, 5) if state.num_losses else None,
            acceptance.by_position,
            acceptance.said_by_position,
            acceptance.mean_length,
            round(acceptance.sharpness, 4),
        )
        if acceptance.mean_length > state.best:
            self._training.weights.save(self._out, self._dtype, line.sharpness)
            state.best = acceptance.mean_length  # not before it is written: an interrupted measurement is made again
        self.log.append(line)
        state.losses, state.num_losses = 0.0, 0
        self._on_measured(line)

    def _loss(self, samples: Sequence[Sample], rng: np.random.Generator) -> float | None:
        """The loss of a step, whose gradients are then there; None where there is nothing to learn, or a number is not finite."""
        self._optimizer.zero_grad()
        with torch.autocast(self._training.weights.device.type, torch.bfloat16, enabled=self._schedule.bf16):
            loss = self._training.loss(samples, rng)
        if loss is None:
            return None
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), self._schedule.clip)
        # One step with a NaN would be in every weight from then on, and in the state that a run goes on from.
        return loss.item() if torch.isfinite(loss + norm) else None

    def _advance(self, loss: float | None, num_tokens: int) -> None:
        """Change what is trained, and count the step."""
        if loss is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate()
            self._optimizer.step()
            self._state.losses += loss
            self._state.num_losses += 1
        self._state.step += 1
        self._state.tokens += num_tokens

    def _rate(self) -> float:
        """A cosine after a linear rise."""
        schedule, state = self._schedule, self._state
        done = (state.step + 1) / self._num_steps
        if schedule.minutes:
            done = max(done, state.seconds / (60 * schedule.minutes))
        if done < schedule.warm_up:
            return schedule.rate * done / schedule.warm_up
        return schedule.rate * 0.5 * (1 + math.cos(math.pi * min((done - schedule.warm_up) / (1 - schedule.warm_up), 1)))

    def _save(self) -> None:
        whole = {
            "settings": self._settings,
            "state": asdict(self._state),
            "trained": {name: one.detach() for name, one in self._trained.items()},
            "optimizer": self._optimizer.state_dict(),
        }
        # The log first: one without its state is cut, and a state without its log would be lost.
        write_file(self._log_path, "".join(json.dumps(line._asdict()) + "\n" for line in self.log))
        with replacing(self._path) as file:
            torch.save(whole, file)

    def _load(self) -> None:
        try:
            whole = torch.load(self._path, map_location=self._training.weights.device, weights_only=True)
        except Exception as error:  # torch has many errors for a damaged file
            why = str(error).partition("\n")[0][:200]
            raise CheckpointError(f"{self._path} is damaged: {why}; remove {self._path.parent} and start again") from error
        if whole["settings"] != self._settings:
            raise CheckpointError(
                f"{self._path.parent} is of a run with other settings or samples; use the same ones, or choose another output"
            )
        with torch.no_grad():
            for name, values in whole["trained"].items():
                self._trained[name].copy_(values)
        self._optimizer.load_state_dict(whole["optimizer"])
        self._state = _State(**whole["state"])
        self.log = [line for line in read_log(self._path.parent.parent) if line.step <= self._state.step]
        self._state.best = max((line.mean_length for line in self.log), default=0.0)


def _cut(sample: Sample, longest: int, rng: np.random.Generator | None) -> Sample:
    """A piece of a longer sample: at random, or its end without `rng`."""
    excess = len(sample.token_ids) - longest
    if excess <= 0:
        return sample
    start = int(rng.integers(excess + 1)) if rng else excess
    rows = slice(start, start + longest)
    found: dict[str, Any] = {name: None if array is None else array[rows] for name, array in vars(sample).items()}
    return replace(sample, **found)

"""One training from samples to files that the engine runs: begin a head, or take a head or a model, train it, write it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from cpuspec.backends.torch_backend import find_device
from cpuspec.checkpoints import Checkpoint
from cpuspec.environment import usable_cores
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.kernels.isa import has_bf16_dots
from cpuspec.platform import SYSTEM
from cpuspec.train.adapter import AdapterWeights, LoraShape
from cpuspec.train.chains import ChainLoss, ChainTraining
from cpuspec.train.distill import DistillTraining, Texts
from cpuspec.train.loop import Measured, OnMeasured, OnStep, Schedule, train, train_and_held_back
from cpuspec.train.model_files import ModelWeights
from cpuspec.train.samples import SampleSet
from cpuspec.train.start import HeadShape, start_eagle3, start_from, start_mtp
from cpuspec.train.vocabulary import count, drafted_ids

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16})

STARTS = {"eagle3": start_eagle3, "mtp": start_mtp}


class TrainingJob(NamedTuple):
    """What is trained and how.

    source: a head to go on with; None to begin one of `shape`. source_vocab_size: how many tokens it shall draft from now on, as
    `start_from` has it, or learn to draft. dtype: of the head's files. threads: None for every core.
    """

    loss: ChainLoss
    shape: HeadShape = HeadShape()
    schedule: Schedule = Schedule()
    source: Path | None = None
    source_vocab_size: int | None = None
    device: str = "auto"
    dtype: str = "bf16"
    threads: int | None = None


def train_head(
    target: Checkpoint, samples: SampleSet, out: Path, job: TrainingJob, on_step: OnStep, on_measured: OnMeasured
) -> list[Measured]:
    """Train a head for the target into `out`, or go on with the run that is there; returns its measurements.

    Raises ConfigError for a shape or samples that cannot be trained, and an output with other files; CheckpointError for samples of
    a target of another shape, a head that is not for it, or an output in use; OSError where nothing can be written.
    """
    about, config = samples.about, target.config
    for what, got, wanted in (
        ("vocabulary", about.vocab_size, config.vocab_size),
        ("hidden size", about.hidden_size, config.hidden_size),
        ("number of layers", about.num_layers, config.num_layers),
    ):
        if got != wanted:
            raise CheckpointError(
                f"{samples.path}: the {what} of the samples is {got}, and that of {target.name} is {wanted}; "
                f"they are samples of {about.model}"
            )
    _begin(job.threads)
    device, first = find_device(job.device), out / "training" / "start"
    method = job.loss.method
    counted = partial(count, samples, train_and_held_back(samples, job.schedule)[0])
    with _alone_in(out):
        # Until a state is saved, nothing says with which options the beginning was made.
        if not (out / "training" / "state.pt").exists() or not (first / "config.json").exists():
            if job.source is not None:
                start_from(first, job.source, target, counted(), job.source_vocab_size)
            else:
                STARTS[method](first, target, about, counted(), job.shape, job.schedule.seed)
        ids = drafted_ids(counted(), job.source_vocab_size or job.shape.vocab_size) if method == "mtp" else None
        training = ChainTraining(first, target, about, job.loss, device, ids)
        settings = {
            "method": method,
            "target": target.name,
            "loss": asdict(job.loss),
            "shape": asdict(job.shape),
            "source": str(job.source or ""),
            "source_vocab_size": job.source_vocab_size,
        }
        return train(training, samples, out, job.schedule, settings, DTYPES[job.dtype], on_step, on_measured)


class ModelJob(NamedTuple):
    """How a model is trained. num_tokens: of the drafts that are measured.

    lora: of an adapter that is trained beside the model as it is; None for training all that the model has.

    The other fields are those of `TrainingJob`.
    """

    num_tokens: int
    schedule: Schedule
    device: str = "auto"
    dtype: str = "bf16"
    threads: int | None = None
    lora: LoraShape | None = None


def train_model(
    model: Checkpoint, texts: Texts, out: Path, job: ModelJob, on_step: OnStep, on_measured: OnMeasured
) -> list[Measured]:
    """Train a model, or its adapter, on texts into `out`, or go on with the run that is there; returns its measurements.

    Raises as `train_head`.
    """
    _begin(job.threads)
    with _alone_in(out):
        settings = {"method": "distill", "model": model.name, "num_tokens": job.num_tokens}
        weights: ModelWeights | AdapterWeights
        if job.lora:
            weights = AdapterWeights(model, job.lora, job.schedule.seed, find_device(job.device))
            settings["lora"] = asdict(job.lora)
        else:
            weights = ModelWeights(model, find_device(job.device))
        training = DistillTraining(weights, job.num_tokens)
        return train(training, texts, out, job.schedule, settings, DTYPES[job.dtype], on_step, on_measured)


def multiplies_bf16(device: str) -> bool:
    """Whether training takes products in bf16 by default: on a GPU, and where the processor has instructions for them."""
    return find_device(device).type == "cuda" or has_bf16_dots()


def _begin(threads: int | None) -> None:
    """Set what torch and the C library have once for the whole process.

    glibc gives the memory of freed tensors back to the system, which clears every page that the next step asks for: a fifth of a
    step's time. Here it keeps them.
    """
    torch.set_num_threads(threads or usable_cores())
    SYSTEM.keep_freed_memory()


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Make `out/training`, where no other process trains meanwhile. Raises CheckpointError where one does.

    And ConfigError where `out` has files of something else, such as the model: training would replace them.
    """
    directory = out / "training"
    if out.is_dir() and not directory.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} has other files, which training would replace; name a directory of its own")
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("wb") as lock:
        if not SYSTEM.try_lock(lock):
            raise CheckpointError(f"{out} is in use by another process; wait for it, or choose another output")
        yield

"""One training from samples to a head that the engine runs: begin a head or take one, train it, write it."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from cpuspec.backends.torch_backend import find_device
from cpuspec.checkpoints import Checkpoint
from cpuspec.errors import CheckpointError
from cpuspec.files import try_lock
from cpuspec.train.block import BlockLoss, BlockTraining
from cpuspec.train.eagle3 import Eagle3Loss, Eagle3Training
from cpuspec.train.layout import copy_head
from cpuspec.train.loop import Measured, OnMeasured, OnStep, Schedule, split, train
from cpuspec.train.samples import SampleSet
from cpuspec.train.start import HeadShape, start_block, start_eagle3
from cpuspec.train.vocabulary import count

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16})


class Job(NamedTuple):
    """What is trained and how. source: a head to go on with; None to begin one of `shape`. dtype: of the head's files."""

    loss: BlockLoss | Eagle3Loss
    shape: HeadShape = HeadShape()
    schedule: Schedule = Schedule()
    source: Path | None = None
    device: str = "auto"
    dtype: str = "bf16"


def train_head(
    target: Checkpoint, samples: SampleSet, out: Path, job: Job, on_step: OnStep, on_measured: OnMeasured
) -> list[Measured]:
    """Train a head for the target into `out`, or go on with the run that is there; returns its measurements.

    Raises ConfigError for a shape or samples that cannot be trained, CheckpointError for samples of another target, a head that is
    not for it, or an output in use; OSError where nothing can be written.
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
    device, is_block, first = find_device(job.device), isinstance(job.loss, BlockLoss), out / "training" / "start"
    first.mkdir(parents=True, exist_ok=True)
    with (out / "training" / "lock").open("wb") as lock:
        if not try_lock(lock):
            raise CheckpointError(f"{out} is in use by another process; wait for it, or choose another output")
        if not (first / "config.json").exists():
            if job.source is not None:
                copy_head(job.source, first)
            else:
                counts = count(samples, split(samples, job.schedule)[0])
                start = start_block if is_block else start_eagle3
                start(first, target, about, counts, job.shape, job.schedule.seed)
        training: BlockTraining | Eagle3Training
        if isinstance(job.loss, BlockLoss):
            training = BlockTraining(first, target, about, job.loss, device)
        else:
            training = Eagle3Training(first, target, about, job.loss, device)
        settings = {
            "method": training.method,
            "target": target.name,
            "loss": asdict(job.loss),
            "shape": asdict(job.shape),
            "source": str(job.source or ""),
        }
        return train(training, samples, out, job.schedule, settings, DTYPES[job.dtype], on_step, on_measured)

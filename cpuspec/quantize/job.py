"""A whole quantization: which formats, by which methods, on what text, into which file."""

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.gguf_file import Value
from cpuspec.errors import ConfigError
from cpuspec.formats.tensor import F32
from cpuspec.model.batch import I32
from cpuspec.quantize import calibration, mixes
from cpuspec.quantize.gguf_output import gguf_name, write_model
from cpuspec.quantize.gptq import GptqSettings
from cpuspec.quantize.imatrix import Importance, collect, of_matrices
from cpuspec.quantize.run import gptq_all, keep_vectors, round_all
from cpuspec.quantize.store import TensorStore
from cpuspec.quantize.weights import Weights
from cpuspec.tokenizer import make_tokenizer

METHODS = ("gptq",)

OnStep = Callable[[str, int, int], None]  # (what is done, how much of it, of how much)


@dataclass(frozen=True)
class Job:
    """What to make of a model. methods: of METHODS; none is rounding. The others as in `mixes.choose`."""

    type_name: str
    methods: tuple[str, ...] = ()
    pure: bool = False
    output: str | None = None
    embed: str | None = None
    tensor_types: tuple[tuple[str, str], ...] = ()
    gptq: GptqSettings = field(default_factory=GptqSettings)

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise ConfigError(f"the method {method!r} is not known; wanted some of {', '.join(METHODS)}, or none for rounding")


@dataclass(frozen=True)
class Made:
    """What was made. bits_per_weight: of all matrices, scales included."""

    path: str
    num_bytes: int
    bits_per_weight: float
    formats: Mapping[str, int]  # matrices of each
    num_resumed: int  # tensors that an earlier run had finished


def read_chunks(checkpoint: Checkpoint, text: str, chunks: int, length: int) -> I32:
    """Calibration text as the first `chunks` pieces of `length` tokens, I32 [B, L]. Raises ConfigError if there is no whole one."""
    length = min(length, checkpoint.config.context_length)
    # Far more than what so many tokens spell: a whole book is not encoded for the first page.
    return calibration.split(make_tokenizer(checkpoint).encode(text[: chunks * length * 16]), chunks, length)


def measure_importance(checkpoint: Checkpoint, chunks: I32, on_step: OnStep) -> Importance:
    """An importance matrix of the model as it is."""
    return collect(
        Weights(checkpoint),
        chunks,
        lambda name: gguf_name(checkpoint.config, name),
        lambda done, total: on_step("measuring inputs", done, total),
    )


def quantize(
    checkpoint: Checkpoint,
    out: Path,
    job: Job,
    threads: int,
    chunks: I32 | None = None,
    importance: Importance | None = None,
    on_step: OnStep = lambda what, done, total: None,
) -> Made:
    """Write the quantized model to `out`, a GGUF file.

    chunks: calibration text, I32 [B, L]; GPTQ needs it, and without `importance` it gives the importance of inputs, too.
    A run that is interrupted leaves `out` as it was, and goes on when it is started again with the same arguments.
    Raises CpuspecError, and OSError where nothing can be written.
    """
    if out.suffix != ".gguf":
        raise ConfigError(f"the output {out} does not end in .gguf; name a GGUF file")
    if out.resolve() == checkpoint.path.resolve():
        raise ConfigError(f"{out} is the model itself; choose another output")
    if "gptq" in job.methods and chunks is None:
        raise ConfigError("gptq needs a calibration text; give --calibration FILE")
    weights = Weights(checkpoint)

    def name_of(name: str) -> str:
        return gguf_name(checkpoint.config, name)

    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    matrices = {name: shapes[name] for name in weights.matrices}
    measured = importance is not None or chunks is not None
    formats = mixes.choose(
        checkpoint.config,
        matrices,
        job.type_name,
        has_importance=measured,
        pure=job.pure,
        output=job.output,
        embed=job.embed,
        tensor_types=job.tensor_types,
    )
    vectors = {name: mixes.get_format("f32") for name in shapes if name not in matrices}
    store = TensorStore(
        out.with_name(out.name + ".unfinished"), _identity(checkpoint, job, chunks, importance), {**formats, **vectors}, shapes
    )
    finished = False
    try:
        of_inputs: dict[str, F32] = of_matrices(importance, weights, name_of) if importance else {}
        if "gptq" in job.methods:
            assert chunks is not None, "checked above"
            outside = gptq_all(weights, formats, chunks, job.gptq, store, lambda done, total: on_step("gptq", done, total))
            of_inputs = outside | of_inputs
        elif importance is None and chunks is not None:
            of_inputs = of_matrices(measure_importance(checkpoint, chunks, on_step), weights, name_of)
        if "output" in of_inputs and "output" not in formats:
            # A tied embedding is looked up as well, where every column counts the same: half of each.
            of_inputs["embed"] = of_inputs["output"] / of_inputs["output"].mean() + 1
        round_all(weights, formats, of_inputs, store, threads, lambda done, total: on_step("rounding", done, total))
        keep_vectors(weights, store)
        extra: dict[str, Value] = {}
        if importance is not None:
            extra = {"quantize.imatrix.entries_count": len(importance.means), "quantize.imatrix.chunks_count": importance.chunks}
        write_model(out, checkpoint, store, mixes.FILE_TYPES.get(job.type_name, 0), extra)
        finished = True
    finally:
        store.close(remove=finished)
    num_bits = sum(8 * formats[name].row_bytes(shape[1]) * shape[0] for name, shape in matrices.items())
    return Made(
        path=str(out),
        num_bytes=out.stat().st_size,
        bits_per_weight=num_bits / sum(shape[0] * shape[1] for shape in matrices.values()),
        formats=dict(Counter(format.name for format in formats.values())),
        num_resumed=store.num_resumed,
    )


def _identity(checkpoint: Checkpoint, job: Job, chunks: I32 | None, importance: Importance | None) -> dict[str, Any]:
    """All that the bytes depend on."""
    status = os.stat(checkpoint.path)
    digest = hashlib.sha256()
    if chunks is not None:
        digest.update(chunks.tobytes())
    for name, means in sorted(importance.means.items()) if importance else ():
        digest.update(name.encode() + means.tobytes())
    return {
        "source": [str(checkpoint.path.resolve()), status.st_size, status.st_mtime_ns],
        "job": asdict(job),
        "byteorder": sys.byteorder,
        "data": digest.hexdigest(),
    }

"""A whole quantization job: it chooses formats, applies the methods, and writes the output."""

import hashlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.adapters import Adapter
from cpuspec.checkpoints.checkpoint import GgufVocabulary
from cpuspec.checkpoints.gguf_file import Value
from cpuspec.checkpoints.gguf_parts import file_identity
from cpuspec.errors import ConfigError
from cpuspec.formats import Format
from cpuspec.formats.tensor import F32
from cpuspec.model.batch import I32
from cpuspec.quantize import budget, calibration, mixes, sensitivity
from cpuspec.quantize.compressed_output import SCHEMES, formats_of
from cpuspec.quantize.compressed_output import write_model as write_directory
from cpuspec.quantize.gguf_output import gguf_name, one_format_of_joined, source_entries, write_model
from cpuspec.quantize.gptq import GptqSettings
from cpuspec.quantize.imatrix import Importance, collect, of_matrices
from cpuspec.quantize.prediction import writable
from cpuspec.quantize.run import gptq_all, keep_vectors, round_all
from cpuspec.quantize.scaling import awq, balanced, smoothquant
from cpuspec.quantize.store import TensorStore, Workspace
from cpuspec.quantize.weights import Weights
from cpuspec.text import make_tokenizer

_NEEDY = frozenset({"iq3_xxs", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_m", "iq1_s"})

METHODS = ("awq", "smoothquant", "gptq")

OnStep = Callable[[str, int, int], None]  # (what is done, how much of it, of how much)


@dataclass(frozen=True)
class Job:
    """The options of one quantization."""

    # Of `mixes.TYPES` for a GGUF file, where "" is q4_k_m; of `compressed_output.SCHEMES` for a directory; "" with a budget.
    type_name: str = ""
    methods: tuple[str, ...] = ()  # of METHODS, in any order; none: rounding only
    pure: bool = False  # as in `mixes.choose`
    output: str | None = None  # this and the next two: as in `mixes.Named`
    embed: str | None = None
    tensor_types: tuple[tuple[str, str], ...] = ()
    gptq: GptqSettings = field(default_factory=GptqSettings)
    smoothing_strength: float = 0.5  # the share of what is hard to round that SmoothQuant moves from inputs to weights
    group_size: int = 128  # of a directory's matrices of 4 bits
    # A budget: all matrices together take at most this many bits a weight, each in the candidate that changes answers least.
    bits_per_weight: float | None = None
    candidates: tuple[str, ...] = ()  # names of formats; none: `mixes.BUDGET_FORMATS`
    predicts: bool = True  # whether a layer for multi-token prediction is written, too

    def __post_init__(self) -> None:
        if not self.type_name and self.bits_per_weight is None:
            object.__setattr__(self, "type_name", "q4_k_m")
        for method in self.methods:
            if method not in METHODS:
                raise ConfigError(f"the method {method!r} is not known; wanted some of {', '.join(METHODS)}, or none for rounding")
        if not 0 <= self.smoothing_strength <= 1:
            raise ConfigError(f"the smoothing strength is {self.smoothing_strength}; wanted 0 to 1")
        if self.bits_per_weight is not None and not 0 < self.bits_per_weight <= 32:
            raise ConfigError(f"the budget is {self.bits_per_weight} bits per weight; wanted a number above 0, 32 at most")
        if self.bits_per_weight is not None and (self.type_name or self.pure):
            raise ConfigError("a budget of bits per weight chooses the formats; give no type and no --pure with it")
        if self.candidates and self.bits_per_weight is None:
            raise ConfigError("candidates are chosen from within a budget; give --bits-per-weight, too")


@dataclass(frozen=True)
class Made:
    """The result of a job. bits_per_weight: of all matrices, scales included."""

    path: str
    num_bytes: int
    bits_per_weight: float
    formats: Mapping[str, int]  # matrices of each
    matrices: Mapping[str, str]  # the format of each, by canonical name
    num_resumed: int  # tensors that an earlier run had finished
    num_left_out: int = 0  # tensors of layers for multi-token prediction


def read_chunks(checkpoint: Checkpoint, text: str, chunks: int, length: int) -> I32:
    """Calibration text as the first `chunks` pieces of `length` tokens, I32 [B, L]. Raises ConfigError if there is no whole one."""
    length = min(length, checkpoint.config.context_length)
    # No token spells 16 characters on average: the rest of a long text need not be encoded.
    return calibration.split(make_tokenizer(checkpoint).encode(text[: chunks * length * 16]), chunks, length)


def measure_importance(weights: Weights, chunks: I32, on_step: OnStep) -> Importance:
    """An importance matrix of the model."""
    return collect(
        weights,
        chunks,
        lambda name: gguf_name(weights.checkpoint.config, name),
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
    adapters: Sequence[Adapter] = (),
) -> Made:
    """Write the quantized model to `out`: a GGUF file if the name ends in .gguf, else a directory of compressed-tensors.

    adapters: of the model, which are merged into its matrices.
    chunks: calibration text, I32 [B, L]; every method needs it, and without `importance` it gives the importance of inputs, too.
    A run that is interrupted leaves `out` as it was, and goes on when it is started again with the same arguments.
    Raises CpuspecError, and OSError where nothing can be written.
    """
    is_directory = out.suffix != ".gguf"
    _check(checkpoint, out, job, chunks is not None)
    weights = Weights(checkpoint, adapters=adapters)
    entries = None if is_directory else source_entries(checkpoint)

    name_of = partial(gguf_name, checkpoint.config)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    matrices = weights.shapes
    named = mixes.Named(job.output, job.embed, job.tensor_types)
    formats: Mapping[str, Format] = {}
    candidates: Mapping[str, tuple[Format, ...]] = {}
    if is_directory:
        formats = formats_of(checkpoint, job.type_name, job.group_size)
    elif job.bits_per_weight is None:
        measured = importance is not None or chunks is not None
        formats = mixes.choose(checkpoint.config, matrices, job.type_name, named, has_importance=measured, pure=job.pure)
        formats = one_format_of_joined(checkpoint.config, formats, max)
    else:
        candidates = mixes.candidates(matrices, job.candidates, named)
        sizes = {
            name: {format.name: matrices[name][0] * format.row_bytes(matrices[name][1]) for format in some}
            for name, some in candidates.items()
        }
        most = int(job.bits_per_weight * sum(math.prod(shape) for shape in matrices.values()) / 8)
        budget.check(sizes, most)
    of_inputs: dict[str, F32] = of_matrices(importance, weights, name_of) if importance else {}
    # Formats for which llama-quantize demands importance.
    needy = (_NEEDY | ({"q2_k"} if job.type_name == "q2_k_s" else set())) if importance else set()
    lacking = [name for name in formats if formats[name].name in needy and name not in {*of_inputs, "embed", "output"}]
    if lacking and chunks is None:
        raise ConfigError(
            f"the importance matrix has no entry for {len(lacking)} matrices, as {name_of(lacking[0])}, which would become "
            f"{formats[lacking[0]].name}: so few bits need one; give a whole matrix, or --calibration FILE"
        )

    def measured_inputs() -> dict[str, F32]:
        assert chunks is not None, "checked by `_check`, or by the caller"
        return of_matrices(measure_importance(weights, chunks, on_step), weights, name_of)

    workspace = Workspace(out.with_name(out.name + ".unfinished"), _identity(weights, job, chunks, importance))
    finished = False
    try:
        if lacking and chunks is not None:
            of_inputs = measured_inputs() | of_inputs
        if candidates:
            assert chunks is not None, "checked above"
            of_inputs = of_inputs or measured_inputs()
            step = partial(on_step, "measuring sensitivity")
            losses = sensitivity.estimate(weights, chunks, candidates, _with_tied_embedding(of_inputs, matrices), workspace, step)
            formats = {name: mixes.get_format(chosen) for name, chosen in budget.choose(sizes, losses, most).items()}
            formats = one_format_of_joined(checkpoint.config, formats, min)
        vectors = {name: mixes.get_format("f32") for name in shapes if name not in matrices}
        store = TensorStore(workspace, {**formats, **vectors}, shapes)
        if chunks is not None and "smoothquant" in job.methods:
            on_step("smoothquant", 0, 1)
            weights = smoothquant(weights, chunks, job.smoothing_strength)
        if chunks is not None and "awq" in job.methods:
            on_step("awq", 0, 1)
            weights = awq(weights, chunks, formats)
        if any(format.rotated for format in formats.values()) and not _is_rounded_only(checkpoint):
            if chunks is not None and not of_inputs:
                of_inputs = measured_inputs()
            if of_inputs:
                on_step("balancing", 0, 1)
                weights = balanced(weights, formats, of_inputs)
        of_inputs = {name: means / weights.inputs.get(name, np.float32(1)) ** 2 for name, means in of_inputs.items()}
        if chunks is not None and "gptq" in job.methods:
            outside = gptq_all(weights, formats, chunks, job.gptq, store, partial(on_step, "gptq"))
            of_inputs = outside | of_inputs
        elif chunks is not None and not of_inputs:
            of_inputs = measured_inputs()
        of_inputs = _with_tied_embedding(of_inputs, matrices)
        round_all(weights, formats, of_inputs, store, threads, partial(on_step, "rounding"))
        keep_vectors(weights, store)
        extra: dict[str, Value] = {}
        if importance is not None:
            extra = {"quantize.imatrix.entries_count": len(importance.means), "quantize.imatrix.chunks_count": importance.chunks}
        of_prediction = checkpoint.prediction_layers if job.predicts else {}
        if is_directory:
            write_directory(out, checkpoint, store, job.type_name, job.group_size, of_prediction)
        else:
            if job.bits_per_weight is not None:
                extra["quantize.bits_per_weight"] = job.bits_per_weight
            write_model(
                *(out, checkpoint, store, mixes.FILE_TYPES.get(job.type_name) or mixes.file_type(formats, shapes), extra, entries),
                predicts=job.predicts,
            )
        finished = True
    finally:
        workspace.close(remove=finished)
    return _made(checkpoint, out, job, formats, matrices, store.num_resumed)


def _check(checkpoint: Checkpoint, out: Path, job: Job, is_calibrated: bool) -> None:
    """Raise ConfigError for a job that cannot be done to this model, or not into this output."""
    is_directory = out.suffix != ".gguf"
    if out.resolve() == checkpoint.path.resolve():
        raise ConfigError(f"{out} is the model itself; choose another output")
    if not is_calibrated and (job.methods or job.bits_per_weight):
        needing = " and ".join(job.methods) or "a budget of bits per weight"
        raise ConfigError(f"{needing} needs a calibration text; give --calibration FILE")
    if job.bits_per_weight is not None and is_directory:
        raise ConfigError(f"a budget of bits per weight is spent in a GGUF file; name an output that ends in .gguf, got {out}")
    if job.bits_per_weight is None and is_directory != (job.type_name in SCHEMES):
        wanted = "a directory, which has no .gguf at its end" if not is_directory else "a file, whose name ends in .gguf"
        raise ConfigError(f"{job.type_name} is written to {wanted}, got {out}; or choose another --type")
    if _is_rounded_only(checkpoint) and (job.methods or job.bits_per_weight):
        kind = "a mixture of experts" if checkpoint.config.experts else "a model with latent attention"
        raise ConfigError(f"{kind} is rounded only; leave out --method and --bits-per-weight, --calibration may stay")


def _is_rounded_only(checkpoint: Checkpoint) -> bool:
    """Whether it has a tensor for several matrices, as of experts or heads: no method tells their inputs apart."""
    return bool(checkpoint.config.experts or checkpoint.config.latent)


def _made(
    checkpoint: Checkpoint,
    out: Path,
    job: Job,
    formats: Mapping[str, Format],
    matrices: Mapping[str, tuple[int, int]],
    num_resumed: int,
) -> Made:
    is_directory = out.suffix != ".gguf"
    is_kept = job.predicts and (is_directory or isinstance(checkpoint.vocabulary, GgufVocabulary) or writable(checkpoint))
    num_bits = sum(8 * formats[name].row_bytes(shape[1]) * shape[0] for name, shape in matrices.items())
    return Made(
        path=str(out),
        num_bytes=sum(file.stat().st_size for file in (out.glob("*.safetensors") if is_directory else (out,))),
        bits_per_weight=num_bits / sum(shape[0] * shape[1] for shape in matrices.values()),
        formats=dict(Counter(format.name for format in formats.values())),
        matrices={name: format.name for name, format in formats.items()},
        num_resumed=num_resumed,
        num_left_out=0 if is_kept else len(checkpoint.prediction_layers),
    )


def _with_tied_embedding(of_inputs: Mapping[str, F32], matrices: Mapping[str, tuple[int, ...]]) -> dict[str, F32]:
    """Mean squares of inputs, with those of a tied embedding. It is multiplied with inputs, and it is looked up, where every column
    counts the same: both uses count half.
    """
    if "output" not in of_inputs or "output" in matrices:
        return dict(of_inputs)
    return {**of_inputs, "embed": of_inputs["output"] / of_inputs["output"].mean() + 1}


def _sources_sha256() -> str:
    """The sha256 of this package's sources: what another version has encoded is not mixed with what this one encodes."""
    package = Path(__file__).parents[1]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))).hexdigest()


def _identity(weights: Weights, job: Job, chunks: I32 | None, importance: Importance | None) -> dict[str, Any]:
    """Everything that the output's bytes depend on."""
    checkpoint = weights.checkpoint
    digest = hashlib.sha256()
    for adapter in weights.adapters:
        for name, parts in sorted(adapter.pairs.items()):
            digest.update(name.encode() + b"".join(part.tobytes() for part in parts))
    if chunks is not None:
        digest.update(chunks.tobytes())
    for name, means in sorted(importance.means.items()) if importance else ():
        digest.update(name.encode() + means.tobytes())
    for name, counts in sorted(importance.counts.items()) if importance else ():
        digest.update(name.encode() + counts.tobytes())
    return {
        "source": file_identity(checkpoint.path),
        "made_by": _sources_sha256(),
        "job": asdict(job),
        "byteorder": sys.byteorder,
        "data": digest.hexdigest(),
    }

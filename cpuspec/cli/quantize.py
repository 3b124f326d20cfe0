"""The commands that write models and what is measured of them: `quantize`, `imatrix` and `export`."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from cpuspec.checkpoints.adapters import open_adapter, read_scaled
from cpuspec.cli import options
from cpuspec.cli.console import counted, emit, emit_json, exit_codes, interruptible, note, print_facts, print_table, size
from cpuspec.cli.opening import open_model
from cpuspec.cli.options import argument, flag, option
from cpuspec.cli.progress import busy, step_progress
from cpuspec.environment import usable_cores
from cpuspec.errors import ConfigError
from cpuspec.files import read_file
from cpuspec.formats import get_format
from cpuspec.formats.format import OWN_GGUF_TYPES
from cpuspec.quantize.gptq import GptqSettings
from cpuspec.quantize.imatrix import Importance, read_importance, write_importance
from cpuspec.quantize.job import Job, Made, measure_importance, read_chunks
from cpuspec.quantize.job import quantize as quantize_model
from cpuspec.quantize.weights import Weights

_MOST_TEXT_BYTES = 1 << 30

CalibrationOption = Annotated[
    Path | None, option("FILE", "A text of the kind that the model will meet; inputs are measured on it.", "--calibration")
]
ChunksOption = Annotated[int, option("N", "Pieces of the calibration text that are used.", "--chunks", min=1)]
ContextOption = Annotated[int, option("N", "Tokens of such a piece.", "--context-length", "--ctx-size", "-c", min=2)]
ThreadsOption = Annotated[int | None, option("N", "Threads; by default every core.", "--threads", "-t", min=1)]


JOB = {
    "type_name": (
        option(
            "TYPE",
            "Of a file: a type of llama-quantize, by default q4_k_m, or nl4_g32, nl4_xs or nl4_i. "
            "Of a directory: w4a16, w4a16_asym, w8a8, w8a16, fp8_dynamic.",
            "--type",
        ),
        str.lower,
    ),
    "methods": (
        option(
            "METHOD",
            "round, the default; or gptq, awq, smoothquant, or several with commas, as awq,gptq: they need a calibration text.",
            "--method",
        ),
        lambda text: () if text == "round" else options.split_list(text.lower()),
    ),
    "pure": flag("--pure", "Give every matrix the type's own format instead of a mix."),
    "output": option("FORMAT", "The format of the output matrix.", "--output-tensor-type"),
    "embed": option("FORMAT", "The format of the token embedding.", "--token-embedding-type"),
    "smoothing_strength": option("SHARE", "Of smoothquant: 0 moves nothing into weights.", min=0, max=1),
    "group_size": option("N", "Of w4a16: weights that share a scale, 32, 64 or 128."),
    "bits_per_weight": option(
        "BITS",
        "Instead of a type: give each matrix the format by which the model's answers change least within these bits, "
        "as measured on the calibration text.",
    ),
    "candidates": (
        option("FORMATS", "With --bits-per-weight, the formats to choose from, with commas.", "--candidates"),
        lambda text: options.split_list(text.lower()),
    ),
    "predicts": flag(
        "--mtp/--no-mtp", "Keep a layer for multi-token prediction, which drafts; its matrices as those of the last layer."
    ),
}
GPTQ = {
    "dampening_frac": option("SHARE", "Of gptq: what is added to the Hessian's diagonal.", min=0),
    "act_order": flag(
        "--act-order/--no-act-order", "Of gptq: round columns by the size of their inputs, the largest first, or as they stand."
    ),
}


@exit_codes()
@options.takes_fields("gptq", GptqSettings, GPTQ)
@options.takes_fields("job", Job, JOB)
def quantize(
    model: options.ModelArgument,
    out: Annotated[Path, argument("OUT", "The file to write, NAME.gguf; or a directory, for compressed-tensors.")],
    *,
    imatrix: Annotated[Path | None, option("FILE", "Weigh errors by this importance matrix, llama.cpp's .gguf or .dat.")] = None,
    calibration: CalibrationOption = None,
    chunks: ChunksOption = 32,
    ctx_size: ContextOption = 512,
    tensor_type: Annotated[
        list[str] | None, option("PATTERN=FORMAT", "The format of matrices whose name has the pattern. Repeatable.")
    ] = None,
    lora: Annotated[
        list[str] | None,
        option("FILE[=SCALE]", "Merge a LoRA adapter, a directory of PEFT or a GGUF file, times SCALE, by default 1. Repeatable."),
    ] = None,
    threads: ThreadsOption = None,
    as_json: options.JsonOption = False,
    job: Job,
    gptq: GptqSettings,
) -> None:
    """Write a model in fewer bits: a GGUF file that cpuspec and llama.cpp read, or compressed-tensors for transformers and vLLM.

    Memory holds one matrix at a time, and with a calibration text the inputs of one. A run that is interrupted goes on from there.
    """
    with options.usage_errors():
        job = replace(job, gptq=gptq, tensor_types=tuple(map(_read_tensor_type, tensor_type or ())))
    checkpoint = open_model(model, adapts=True)
    with options.usage_errors():
        scaled = [*((path, 1.0) for path in checkpoint.adapters), *map(read_scaled, lora or ())]
    adapters = [open_adapter(path, checkpoint.config, checkpoint.name, scale, merges=True) for path, scale in scaled]
    text = None if calibration is None else _read_text(calibration)
    with interruptible(), step_progress() as on_step:
        found = None if text is None else read_chunks(checkpoint, text, chunks, ctx_size)
        importance = None if imatrix is None else read_importance(imatrix)
        _note_unreached(importance)
        made = quantize_model(checkpoint, out, job, threads or usable_cores(), found, importance, on_step, adapters)
    if as_json:
        emit_json(asdict(made))
    else:
        _show_made(made, job)


def _show_made(made: Made, job: Job) -> None:
    if own := [name for name in made.formats if (get_format(name).gguf_type or 0) >= OWN_GGUF_TYPES]:
        note(f"only cpuspec has {' and '.join(own)}; llama.cpp does not read this file")
    if made.num_left_out and job.predicts:
        note(f"{counted(made.num_left_out, 'tensor')} of layers for multi-token prediction left out: the file drafts without them")
    if made.num_resumed:
        note(f"{counted(made.num_resumed, 'tensor')} taken from the run that was interrupted")
    print_facts(
        [
            ("file", made.path),
            ("size", size(made.num_bytes)),
            ("bits per weight", f"{made.bits_per_weight:.3f}"),
            ("matrices", ", ".join(f"{count} {name}" for name, count in sorted(made.formats.items()))),
        ]
    )
    if job.bits_per_weight is not None:
        emit("\n")
        _print_mix(made.matrices)


def _print_mix(matrices: Mapping[str, str]) -> None:
    """The format of each matrix: a line for each run of layers that are alike, a column for each kind of matrix."""
    layers: dict[str, dict[str, str]] = {}
    for name, format_name in matrices.items():
        *inside, part = name.split(".")
        layers.setdefault(inside[1] if inside else "", {})[part] = format_name
    outside = layers.pop("", {})
    runs: list[tuple[str, str, dict[str, str]]] = []
    for layer, formats in layers.items():
        if runs and runs[-1][2] == formats:
            runs[-1] = (runs[-1][0], layer, formats)
        else:
            runs.append((layer, layer, formats))
    columns = list(dict.fromkeys(part for _, _, formats in runs for part in formats))
    rows = [(first if first == last else f"{first} to {last}", *map(formats.get, columns)) for first, last, formats in runs]
    print_table(("layers", *columns), [[text or "" for text in row] for row in rows])
    print_facts(outside.items())


def _note_unreached(importance: Importance | None) -> None:
    if importance and importance.num_unreached:
        unreached = f"experts' matrices that saw no token of the text: {importance.num_unreached}"
        note(f"{unreached}; quantize gives them the mean of the other experts, and a longer text would reach more")


@exit_codes()
def imatrix(
    model: options.ModelArgument,
    out: Annotated[Path, argument("OUT", "The file to write: .dat for llama.cpp's legacy format, else GGUF.")],
    *,
    calibration: Annotated[Path, option("FILE", "A text of the kind that the model will meet.", "--calibration", "-f")],
    chunks: ChunksOption = 100,
    ctx_size: ContextOption = 512,
) -> None:
    """Measure how much each input of each matrix counts, for `quantize --imatrix` and for llama-quantize."""
    checkpoint, text = open_model(model), _read_text(calibration)
    with interruptible(), step_progress() as progress:
        found = measure_importance(Weights(checkpoint), read_chunks(checkpoint, text, chunks, ctx_size), progress)
    write_importance(out, replace(found, dataset=calibration.name))
    _note_unreached(found)
    emit(f"{out}\n")


@exit_codes()
@options.takes_running("activations", "kv_format", with_backend=False)
def export(
    model: options.ModelArgument,
    out: Annotated[Path, argument("OUT.onnx", "The file to write; weights go to OUT.onnx.data beside it.")],
    *,
    running: options.Running,
) -> None:
    """Write a model as ONNX for other programs, with its weights' own values and its cache as inputs and outputs."""
    from cpuspec.backends.onnx_graph import export_onnx

    checkpoint = open_model(model)
    with busy(f"writing {out}"):
        num_bytes = export_onnx(checkpoint, out, running.settings.activations, running.settings.kv_format)
    note(f"wrote {size(num_bytes)}")
    emit(f"{out}\n")


def _read_text(path: Path) -> str:
    try:
        return read_file(path, _MOST_TEXT_BYTES, ConfigError).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error


def _read_tensor_type(text: str) -> tuple[str, str]:
    pattern, equals, format_name = text.rpartition("=")
    if not equals or not pattern:
        raise ConfigError(f"--tensor-type {text!r} has no =; wanted PATTERN=FORMAT, as ffn_down=q6_k")
    return pattern, format_name.lower()

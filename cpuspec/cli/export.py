"""The command `export`."""

from pathlib import Path
from typing import Annotated

from cpuspec.cli import options
from cpuspec.cli.console import emit, exit_codes, note, size
from cpuspec.cli.opening import open_model
from cpuspec.cli.options import argument
from cpuspec.cli.progress import busy


@exit_codes()
@options.takes_running("activations", "kv_format", with_backend=False)
def export(
    model: options.ModelArgument,
    out: Annotated[Path, argument("OUT.onnx", "The file to write; weights go to OUT.onnx.data beside it.")],
    *,
    running: options.Running,
) -> None:
    """Write a model as ONNX for other programs, with its weights' own values and its cache as inputs and outputs."""
    from cpuspec.backends.onnx_export import export_onnx

    checkpoint = open_model(model)
    with busy(f"writing {out}"):
        num_bytes = export_onnx(checkpoint, out, running.settings.activations, running.settings.kv_format)
    note(f"wrote {size(num_bytes)}")
    emit(f"{out}\n")

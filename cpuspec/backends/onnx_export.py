"""A model as a pair of files that others can run: OUT.onnx, and OUT.onnx.data with the weights (no protobuf takes 2 GB)."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from cpuspec.backends.onnx_graph import build_graph, external_tensor
from cpuspec.backends.weights import weight_tensors
from cpuspec.checkpoints import Checkpoint
from cpuspec.errors import BackendError
from cpuspec.files import replacing
from cpuspec.formats import Format
from cpuspec.formats.kv import get_kv_format
from cpuspec.settings import EngineConfig

if TYPE_CHECKING:
    import onnx

_PAGE = 4096  # large tensors begin at one, so that runtimes can map them


def export_onnx(
    checkpoint: Checkpoint,
    path: Path,
    activations: str = EngineConfig.activations,
    kv_format: str = EngineConfig.kv_format,
    casts: Mapping[str, Format] = MappingProxyType({}),
) -> int:
    """Write the checkpoint to `path` and `path`.data; returns the bytes of both. `onnx_graph` says what the graph takes and gives.

    activations: what ONNX Runtime multiplies matrices in groups with: int8, which is fast and what auto is, or f32.
    casts: matrices that are cast to another format, by name.
    Raises BackendError where a file is there already or cannot be written, or `onnx` is not installed.
    """
    if find_spec("onnx") is None:
        raise BackendError("writing ONNX needs onnx, which is not installed; pip install 'cpuspec[onnx]'")
    if path.suffix != ".onnx":
        raise BackendError(f"an ONNX file's name ends with .onnx, got {path.name!r}")
    data_path = path.with_name(path.name + ".data")
    for taken in (path, data_path):
        if taken.exists():
            raise BackendError(f"{taken} exists; remove it or choose another name")
    try:
        with replacing(path) as graph_file, replacing(data_path) as file:

            def append(name: str, array: NDArray[Any], type: int) -> "onnx.TensorProto":
                file.write(b"\0" * (-file.tell() % _PAGE))
                offset = file.tell()
                file.write(array.data)
                return external_tensor(name, array.shape, type, data_path.name, offset=offset, length=array.nbytes)

            tensors = weight_tensors(checkpoint, casts)
            graph = build_graph(checkpoint.config, tensors, append, activations, get_kv_format(kv_format).name)
            graph_file.write(graph.SerializeToString())
            return graph_file.tell() + file.tell()
    except OSError as error:
        raise BackendError(f"{path} cannot be written: {error.strerror or error}") from None

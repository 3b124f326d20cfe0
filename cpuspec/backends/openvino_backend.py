"""OpenVINO as a backend: the graph of `onnx_graph`, with the checkpoint's own values, compiled for the processor.

What optimum-intel exports runs here too, read as a checkpoint (`checkpoints.openvino`): its own graph keeps the cache inside and
takes a mask of one dimension, so that it can neither score a tree nor forget tokens without copying all others.
The library computes f32 where a graph says f16, so keys and values are rounded when they are stored: the rows of a run see each
other's unrounded.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.backends.graph_backend import GraphBackend
from cpuspec.backends.onnx_export import export_onnx
from cpuspec.backends.onnx_graph import read_bytes
from cpuspec.checkpoints import Checkpoint
from cpuspec.environment import cache_dir
from cpuspec.formats import Format
from cpuspec.formats.kv import get_kv_format
from cpuspec.model.batch import F32
from cpuspec.settings import EngineConfig

# Inputs of a matrix under one scale where activations become int8, as OpenVINO chooses by itself; 0 leaves them f32.
_QUANTIZATION_GROUPS: Mapping[str, int] = MappingProxyType({"auto": 32, "int8": 32, "f32": 0})


class OpenvinoBackend(GraphBackend):
    """The transformer in OpenVINO. `EngineConfig.activations` are what 4-bit matrices are multiplied with.

    casts: matrices that are cast to another format at load, by name.
    """

    name = "openvino"

    def __init__(
        self,
        checkpoint: Checkpoint,
        engine: EngineConfig,
        casts: Mapping[str, Format] = MappingProxyType({}),
    ) -> None:
        import onnx
        import openvino

        super().__init__(checkpoint.config, engine, get_kv_format(engine.kv_format))
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": self.threads,
            "ENABLE_CPU_PINNING": False,
            "INFERENCE_PRECISION_HINT": "f32",  # where there is AMX, it would compute everything in bf16
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": _QUANTIZATION_GROUPS[engine.activations],
        }
        cache_dir().mkdir(parents=True, exist_ok=True)
        # OpenVINO reads more than 2 GB of weights from files only, and keeps none of them.
        with TemporaryDirectory(prefix="openvino-", dir=cache_dir(), ignore_cleanup_errors=True) as directory:
            path = Path(directory) / "model.onnx"
            export_onnx(checkpoint, path, engine.activations, engine.kv_format, casts)
            self.weight_bytes, self.inner_bytes = read_bytes(onnx.load(path, load_external_data=False))
            core = openvino.Core()
            request = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()
        self._run = partial(_run_request, request)


def _run_request(request: Any, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> list[F32]:
    request.infer({name: np.ascontiguousarray(array) for name, array in inputs.items()}, share_inputs=True)
    return [request.get_tensor(name).data for name in outputs]

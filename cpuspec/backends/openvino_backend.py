"""OpenVINO as a backend: the graph of `onnx_graph`, with the checkpoint's own values, compiled for the processor.

What optimum-intel exports runs here too, read as a checkpoint (`checkpoints.openvino`): its own graph keeps the cache inside and
takes a mask of one dimension, so that it can neither score a tree nor forget tokens without copying all others.
Not row-invariant: the library takes other kernels for one row than for several. It computes f32 where a graph says f16, so keys and
values are rounded when they are stored: the rows of a run see each other's unrounded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.backends.graph_runner import GraphRunner
from cpuspec.backends.onnx_export import export_onnx
from cpuspec.backends.onnx_graph import read_bytes
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import EngineConfig
from cpuspec.environment import cache_dir, usable_cores
from cpuspec.errors import BackendError
from cpuspec.formats import Format
from cpuspec.formats.kv import get_kv_format
from cpuspec.model.batch import F32, ForwardBatch, ForwardOutput
from cpuspec.model.cache import KVCache

# Inputs of a matrix under one scale where activations become int8, as OpenVINO chooses by itself; 0 leaves them f32.
_QUANTIZATION_GROUPS: Mapping[str, int] = MappingProxyType({"int8": 32, "f32": 0})


class OpenvinoBackend:
    """The transformer in OpenVINO. activations: what 4-bit matrices are multiplied with, int8 or f32.

    casts: matrices that are cast to another format at load, by name. Nothing is shared with another backend: the library
    rearranges weights for each compiled model.
    """

    name = "openvino"
    row_invariant = False
    shared_bytes = 0

    def __init__(
        self,
        checkpoint: Checkpoint,
        engine: EngineConfig,
        casts: Mapping[str, Format] = MappingProxyType({}),
        activations: str = "int8",
    ) -> None:
        import onnx
        import openvino

        self.config = checkpoint.config
        self.max_rows = engine.max_rows
        self.threads = engine.threads or usable_cores()
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": self.threads,
            "ENABLE_CPU_PINNING": False,
            "INFERENCE_PRECISION_HINT": "f32",  # where there is AMX, it would compute everything in bf16
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": _QUANTIZATION_GROUPS[activations],
        }
        cache_dir().mkdir(parents=True, exist_ok=True)
        # OpenVINO reads more than 2 GB of weights from files only, and keeps none of them.
        with TemporaryDirectory(prefix="openvino-", dir=cache_dir(), ignore_cleanup_errors=True) as directory:
            path = Path(directory) / "model.onnx"
            export_onnx(checkpoint, path, activations, engine.kv_format, casts)
            self.weight_bytes = read_bytes(onnx.load(path, load_external_data=False))
            core = openvino.Core()
            self._request: Any = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()
        self._runner = GraphRunner(self.config, self.max_rows, self._run, get_kv_format(engine.kv_format))

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """An empty cache for this model: f32 keys and values, rounded as the KV format rounds them."""
        return self._runner.new_cache(num_slots, capacity)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        """Run the rows, append their keys and values to the cache, and return logits and asked hidden states."""
        if self._request is None:
            raise BackendError("this backend is closed; make a new one")
        return self._runner.forward(batch, cache)

    def close(self) -> None:
        """Release the weights and the threads."""
        self._request = None

    def _run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> list[F32]:
        self._request.infer({name: np.ascontiguousarray(array) for name, array in inputs.items()}, share_inputs=True)
        return [self._request.get_tensor(name).data for name in outputs]

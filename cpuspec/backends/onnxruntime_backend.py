"""ONNX Runtime as a backend: the graph of `onnx_graph` in its CPU provider."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from cpuspec.backends.graph_backend import GraphBackend
from cpuspec.backends.onnx_graph import build_graph, external_tensor, read_bytes
from cpuspec.backends.weights import weight_tensors
from cpuspec.checkpoints import Checkpoint
from cpuspec.formats import Format
from cpuspec.formats.kv import get_kv_format
from cpuspec.model.batch import F32
from cpuspec.settings import EngineConfig


class OnnxruntimeBackend(GraphBackend):
    """The transformer in ONNX Runtime. `EngineConfig.activations` are what matrices in groups are multiplied with.

    casts: matrices that are cast to another format at load, by name.
    """

    name = "onnxruntime"

    def __init__(
        self,
        checkpoint: Checkpoint,
        engine: EngineConfig,
        casts: Mapping[str, Format] = MappingProxyType({}),
    ) -> None:
        import onnx
        import onnxruntime

        super().__init__(checkpoint.config, engine)
        held: dict[str, onnxruntime.OrtValue] = {}

        def hold(name: str, array: NDArray[Any], type: int) -> onnx.TensorProto:
            held[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, type)
            return external_tensor(name, array.shape, type, location="memory")

        weights = weight_tensors(checkpoint, casts)
        self._encoder = weights["encode"].dequantize() if "encode" in weights else None
        graph = build_graph(self.config, weights, hold, engine.activations, get_kv_format(engine.kv_format).name)
        self.weight_bytes, self.inner_bytes = read_bytes(graph)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 3  # warnings tell of optimizations, on a stream that is not ours
        # Threads that wait for the next run would take the cores from the other models of a chain.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_external_initializers(list(held), list(held.values()))
        session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._run = partial(_run_session, session, held)


def _run_session(session: Any, held: object, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> list[F32]:
    """held: arrays some of which the session reads where they are."""
    results: list[F32] = session.run(outputs, dict(inputs))
    return results

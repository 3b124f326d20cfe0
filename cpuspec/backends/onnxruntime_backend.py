"""ONNX Runtime as a backend: the graph of `onnx_graph` in its CPU provider.

Not row-invariant: the library takes other kernels for one row than for several.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from cpuspec.backends.graph_runner import GraphRunner
from cpuspec.backends.onnx_graph import build_graph, external_tensor, graph_tensors, read_bytes
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import EngineConfig
from cpuspec.environment import usable_cores
from cpuspec.errors import BackendError
from cpuspec.formats import Format
from cpuspec.formats.kv import get_kv_format
from cpuspec.model.batch import F32, ForwardBatch, ForwardOutput
from cpuspec.model.cache import KVCache


class OnnxruntimeBackend:
    """The transformer in ONNX Runtime. activations: what the linear layers of matrices in groups multiply with, int8 or f32.

    casts: matrices that are cast to another format at load, by name. Nothing is shared with another backend: the library
    rearranges weights for each session.
    """

    name = "onnxruntime"
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
        import onnxruntime

        self.config = c = checkpoint.config
        self.max_rows = engine.max_rows
        self.threads = engine.threads or usable_cores()
        held: dict[str, onnxruntime.OrtValue] = {}

        def hold(name: str, array: NDArray[Any], type: int) -> onnx.TensorProto:
            held[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, type)
            return external_tensor(name, array.shape, type, location="memory")

        weights = graph_tensors(checkpoint, casts)
        graph = build_graph(c, weights, hold, activations, get_kv_format(engine.kv_format).name)
        self._held = held  # the session reads some of these arrays where they are
        self.weight_bytes = read_bytes(graph)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 3  # warnings tell of optimizations, on a stream that is not ours
        # Threads that wait for the next run would take the cores from the other models of a chain.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_external_initializers(list(held), list(held.values()))
        self._session: Any = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._runner = GraphRunner(c, self.max_rows, self._run)

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """An empty cache for this model: f32 keys and values, rounded as the KV format rounds them."""
        return self._runner.new_cache(num_slots, capacity)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        """Run the rows, append their keys and values to the cache, and return logits and asked hidden states."""
        if self._session is None:
            raise BackendError("this backend is closed; make a new one")
        return self._runner.forward(batch, cache)

    def close(self) -> None:
        """Release the weights and the threads."""
        self._session = None
        self._held = {}

    def _run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> list[F32]:
        results: list[F32] = self._session.run(outputs, dict(inputs))
        return results

"""Engines that run the graph of `onnx_graph`: a cache beside it, and a batch as one run for each of its sequences.

The graph gives back the keys and values of the rows; the cache is kept here, so that truncating it is setting a length.

What optimum-intel exports runs in OpenVINO, too, read as a checkpoint (`checkpoints.openvino`): its own graph keeps the cache
inside and takes a mask of one dimension, so that it can neither score a tree nor forget tokens without copying all others.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.backends.onnx_graph import build_graph, export_onnx, external_tensor, read_bytes
from cpuspec.backends.weights import weight_tensors
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import ModelConfig
from cpuspec.environment import cache_dir, usable_cores
from cpuspec.errors import BackendError
from cpuspec.formats import Format
from cpuspec.formats.kv import get_kv_format, rounded
from cpuspec.model.batch import F32, I32, ForwardBatch, ForwardOutput, visible
from cpuspec.model.cache import KVCache
from cpuspec.settings import EngineConfig

if TYPE_CHECKING:
    import onnx

# From inputs and the names of outputs to these outputs, which may be overwritten by the next run.
Run = Callable[[Mapping[str, NDArray[Any]], Sequence[str]], Sequence[F32]]

_GROWTH = 128  # tokens by which a slot's arrays grow

# Inputs of a matrix under one scale where activations become int8, as OpenVINO chooses by itself; 0 leaves them f32.
_QUANTIZATION_GROUPS: Mapping[str, int] = MappingProxyType({"auto": 32, "int8": 32, "f32": 0})


class _Storage:
    """Keys and values of a slot, in arrays that a run reads as they are: a run's inputs are contiguous."""

    def __init__(self, layers: int, heads: int, dims: int) -> None:
        self.arrays = [np.zeros((heads, 0, dims), np.float32) for _ in range(2 * layers)]  # keys and values of each layer

    def provide(self, held: int, wanted: int) -> None:
        """Have arrays for `wanted` tokens; the first `held` stay. A run reads all of them, so much longer ones shrink."""
        if wanted <= self.arrays[0].shape[1] <= 2 * wanted + _GROWTH:
            return
        for i, old in enumerate(self.arrays):
            self.arrays[i] = np.zeros((old.shape[0], -(-wanted // _GROWTH) * _GROWTH, old.shape[2]), np.float32)
            self.arrays[i][:, :held] = old[:, :held]


class GraphBackend:
    """A backend but for its engine, which `_run` runs. `EngineConfig.activations` are what matrices in groups are multiplied with.

    Not row-invariant: the libraries take other kernels for one row than for several. Nothing is shared with another backend: they
    rearrange weights for each compiled graph.
    stored: what keys and values are rounded to on their way into the cache, for an engine that leaves that out of the graph.
    """

    name: str
    row_invariant = False
    survives_fork = False
    weight_bytes: int  # that a run reads
    inner_bytes: int  # of these, without the output matrix
    shared_bytes = 0

    def __init__(self, config: ModelConfig, engine: EngineConfig, stored: Format | None = None) -> None:
        if config.head and (config.head.injects or config.head.fuses == "alone"):
            raise BackendError(
                f"{self.name} cannot run this draft head: it has no layers, or its cache is filled between forwards; "
                "use numba, numpy or torch for it, as in numba:HEAD"
            )
        if not config.has_alike_heads:
            raise BackendError(f"{self.name} has heads of one size in all layers; use numba, numpy or torch for this model")
        if config.value_norm or config.layer_input_size or config.scales_layers or config.layer_owners or config.layer_values:
            raise BackendError(f"{self.name} does not compute layers of Gemma 4; use numba, numpy or torch for this model")
        self.config = config
        self.max_rows = engine.max_rows
        self.threads = engine.threads or usable_cores()
        self._run: Run | None = None
        self._stored = stored
        self._encoder: F32 | None = None  # a head's matrix, which is multiplied outside of the graph
        kinds = [(kind, i) for i in range(config.num_layers) for kind in ("keys", "values")]
        self._past = [f"past_{kind}.{i}" for kind, i in kinds]
        self._new = [f"{kind}.{i}" for kind, i in kinds]

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """An empty cache for this model: f32 keys and values, rounded as the KV format rounds them."""
        c = self.config
        per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 4
        shape = c.num_layers, c.num_kv_heads, c.head_dim
        return KVCache(num_slots, capacity, lambda: _Storage(*shape), _copy_rows, _copy_prefix, per_token)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        """Run the rows, append their keys and values to the cache, and return logits and asked hidden states."""
        run, c = self._run, self.config
        if run is None:
            raise BackendError("this backend is closed; make a new one")
        batch.check(c, cache, self.max_rows)
        if batch.adapters:
            raise BackendError(f"{self.name} applies no adapters; use numba, numpy or torch, or `cpuspec quantize --lora`")
        wanted = np.arange(len(batch.tokens), dtype=np.int32) if batch.logit_rows is None else batch.logit_rows
        logits = np.empty((len(wanted), c.num_logits), np.float32)
        num_bytes = 0
        hidden = {layer: np.empty((len(batch.tokens), c.hidden_size), np.float32) for layer in batch.hidden_layers}
        for sequence, slot in enumerate(batch.slots.tolist()):
            start, end = batch.q_start[sequence : sequence + 2].tolist()
            asked = (wanted >= start) & (wanted < end)
            outputs = self._run_sequence(run, batch, sequence, cache, slot, wanted[asked] - start, list(hidden))
            logits[asked] = outputs[0]
            num_bytes += self.weight_bytes if asked.any() else self.inner_bytes
            for rows, output in zip(hidden.values(), outputs[1:], strict=True):
                rows[start:end] = output
        # Only now, so that a run that failed has changed nothing.
        cache.advance(batch)
        return ForwardOutput(logits, tuple(hidden[layer] for layer in batch.hidden_layers), weight_bytes=num_bytes)

    def project(self, rows: F32, name: str) -> F32:
        """A head's hidden states of its target's layers."""
        assert name == "encode", "the only one outside of the graph"
        assert self._encoder is not None, "asked of heads that have the matrix"
        return rows @ self._encoder.T

    def inject(self, batch: ForwardBatch, cache: KVCache) -> None:
        """Never asked: heads that inject are refused."""
        raise BackendError(f"{self.name} injects no hidden states")

    def close(self) -> None:
        """Release the weights and the threads."""
        self._run = None

    def _run_sequence(
        self, run: Run, batch: ForwardBatch, sequence: int, cache: KVCache, slot: int, logit_rows: I32, hidden_layers: list[int]
    ) -> Sequence[F32]:
        """The rows of one sequence: their keys and values are appended to the slot's, and logits and hidden states come back."""
        start, end = batch.q_start[sequence : sequence + 2].tolist()
        held, rows = cache.lengths[slot], end - start
        storage: _Storage = cache.storage(slot)
        storage.provide(held, held + rows)
        past = storage.arrays[0].shape[1]
        sees = np.zeros((rows, past + rows), np.bool_)
        seen = visible(batch, sequence, held)
        sees[:, :held], sees[:, past:] = seen[:, :held], seen[:, held:]
        inputs = {
            "tokens": batch.tokens[start:end].astype(np.int64),
            "positions": batch.positions[start:end].astype(np.int64),
            "visible": sees,
            "logit_rows": logit_rows.astype(np.int64),
            **dict(zip(self._past, storage.arrays, strict=True)),
        }
        if batch.hidden is not None:
            inputs["hidden"] = batch.hidden[start:end]
        asked = ["logits", *(f"hidden.{layer}" for layer in hidden_layers)]
        outputs = run(inputs, [*asked, *self._new])
        for array, new in zip(storage.arrays, outputs[len(asked) :], strict=True):
            array[:, held : held + rows] = rounded(self._stored, new) if self._stored else new
        return outputs[: len(asked)]


def _copy_rows(storage: _Storage, rows: I32, first: int) -> None:
    for array in storage.arrays:
        array[:, first : first + len(rows)] = array[:, rows]


def _copy_prefix(source: _Storage, storage: _Storage, length: int) -> None:
    storage.provide(0, length)
    for array, other in zip(source.arrays, storage.arrays, strict=True):
        other[:, :length] = array[:, :length]


class OnnxruntimeBackend(GraphBackend):
    """The transformer in ONNX Runtime's CPU provider. casts: matrices that are cast to another format at load, by name."""

    name = "onnxruntime"

    def __init__(self, checkpoint: Checkpoint, engine: EngineConfig, casts: Mapping[str, Format] = MappingProxyType({})) -> None:
        import onnxruntime

        super().__init__(checkpoint.config, engine)
        held: dict[str, onnxruntime.OrtValue] = {}  # some of which the session reads where they are

        def hold(name: str, array: NDArray[Any], type: int) -> "onnx.TensorProto":
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

        def run(inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], held: object = held) -> list[F32]:
            results: list[F32] = session.run(outputs, dict(inputs))
            return results

        self._run = run


class OpenvinoBackend(GraphBackend):
    """The transformer in OpenVINO, compiled for the processor. casts: matrices that are cast to another format at load, by name.

    The library computes f32 where a graph says f16, so keys and values are rounded when they are stored: the rows of a run see each
    other's unrounded.
    """

    name = "openvino"

    def __init__(self, checkpoint: Checkpoint, engine: EngineConfig, casts: Mapping[str, Format] = MappingProxyType({})) -> None:
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

        def run(inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> list[F32]:
            request.infer({name: np.ascontiguousarray(array) for name, array in inputs.items()}, share_inputs=True)
            return [request.get_tensor(name).data for name in outputs]

        self._run = run

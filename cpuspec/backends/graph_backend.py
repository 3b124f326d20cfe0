"""What graph engines share: a cache beside the graph of `onnx_graph`, and a batch as one run for each of its sequences.

The graph gives back the keys and values of the rows; the cache is kept here, so that truncating it is setting a length.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.config import ModelConfig
from cpuspec.environment import usable_cores
from cpuspec.errors import BackendError
from cpuspec.formats import Format
from cpuspec.formats.kv import rounded
from cpuspec.model.batch import F32, I32, ForwardBatch, ForwardOutput, visible
from cpuspec.model.cache import KVCache
from cpuspec.settings import EngineConfig

# From inputs and the names of outputs to these outputs, which may be overwritten by the next run.
Run = Callable[[Mapping[str, NDArray[Any]], Sequence[str]], Sequence[F32]]

_GROWTH = 128  # tokens by which a slot's arrays grow


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
    """A backend but for how its engine is made and run, which is up to `_run`.

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

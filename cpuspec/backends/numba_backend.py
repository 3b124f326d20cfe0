"""The product: the transformer as a program of compiled kernels over packed weights, one compiled call per forward.

Writes the program once, when the model is loaded: this is the file that knows the order of a layer's operations. Everything a
kernel is told has been checked here or by `ForwardBatch.check`; the kernels themselves check nothing.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.packed import Matrix, packed_matrices
from cpuspec.config import EngineConfig
from cpuspec.environment import usable_cores
from cpuspec.errors import BackendError
from cpuspec.formats import Cast, Format, QuantTensor
from cpuspec.formats.packing import TILE, U8, PackedTensor, aligned_bytes
from cpuspec.kernels import attention, encode, isa, linear, pointwise, simd, step
from cpuspec.model.batch import F32, I32, ForwardBatch, ForwardOutput
from cpuspec.model.cache import KVCache
from cpuspec.model.rope import rope_table

_SMALL = 768  # hidden size under which a model is small


class NumbaBackend:
    """The transformer on packed int4 to int8 (or 16- and 32-bit) weights, with int8 activations, row-invariant to the bit.

    share: a backend whose threads this one uses, and whose packed weights, for every tensor object that both checkpoints hold.
    The two take turns: they must not run at the same time, and closing the one that was there first ends both.
    casts: matrices that are cast to another format at load, by name.
    """

    name = "numba"
    row_invariant = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        engine: EngineConfig,
        share: "NumbaBackend | None" = None,
        casts: Mapping[str, Format] = MappingProxyType({}),
    ) -> None:
        isa.check_processor()
        self.config = c = checkpoint.config
        self.max_rows = engine.max_rows
        self.threads: int = share.threads if share else engine.threads or usable_cores()
        self._embed = checkpoint.tensors["embed"]
        tensors = dict(checkpoint.tensors)
        if c.tied_embeddings:
            tensors["output"] = self._embed
        matrices: dict[str, Matrix] = {
            name: Cast(t, casts[name], encode.encode) if name in casts else t
            for name, t in tensors.items()
            if len(t.shape) == 2 and name != "embed"
        }
        shared = share._packed if share else {}
        new = {name: t for name, t in matrices.items() if t not in shared}
        packed = packed_matrices(checkpoint.name, new, self.threads, engine.keep_packed)
        self._matrices = {name: packed[name] if name in packed else shared[t] for name, t in matrices.items()}
        self._packed: WeakKeyDictionary[Matrix, PackedTensor] = WeakKeyDictionary()  # while somebody holds the tensor
        self._packed.update({t: self._matrices[name] for name, t in matrices.items()})
        self._vectors = {name: _padded(t) for name, t in tensors.items() if len(t.shape) == 1}
        self.weight_bytes = sum(m.data.nbytes for m in self._matrices.values())
        self.shared_bytes = self.weight_bytes - sum(self._matrices[name].data.nbytes for name in new)
        self._table = rope_table(c, np.arange(256))
        rows, heads, kv_heads = self.max_rows, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self._x = self._rows(c.hidden_size)
        self._q, self._k, self._v = self._rows(heads), self._rows(kv_heads), self._rows(kv_heads)
        self._attended, self._gate, self._up = self._rows(heads), self._rows(c.intermediate_size), self._rows(c.intermediate_size)
        widest = max(m.shape[1] for m in self._matrices.values())
        # Whole blocks of rows, and whole vectors of the last block.
        groups = _round_up(rows, linear.ROWS) * _round_up(widest, TILE) // 32 + 1
        self._inputs = {order: aligned_bytes((groups * size,)) for order, size in linear.ORDERS.items()}
        self._cosines, self._sines = (np.empty((rows, c.head_dim // 2), np.float32) for _ in range(2))
        self._scratch = aligned_bytes((0,))
        self._program = step.Program(self._write_program())
        self._team: step.Team = share._team if share else step.Team(self.threads)
        self._owns_team = share is None

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """An empty cache for this model: f32 keys and values, in the order that `kernels.attention` reads."""
        size = sum(self._head_bytes(capacity)) * self.config.num_layers * self.config.num_kv_heads

        def copy_rows(storage: U8, rows: I32, first: int) -> None:
            keys, values = self._cached(storage, capacity)
            to = np.arange(first, first + len(rows))
            keys[:, :, to // simd.LANES, :, to % simd.LANES] = keys[:, :, rows // simd.LANES, :, rows % simd.LANES]
            values[:, :, to] = values[:, :, rows]

        return KVCache(num_slots, capacity, lambda: aligned_bytes((size,)), copy_rows, size // capacity)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        """Run the rows, append their keys and values to the cache, and return logits and asked hidden states."""
        c = self.config
        batch.check(c, cache, self.max_rows)
        if self._team.closed:
            raise BackendError("this backend, or the one that it shares threads with, is closed; make a new one")
        rows = len(batch.tokens)
        self._x[:rows, : c.hidden_size] = self._embed.rows(batch.tokens)
        self._x[:rows, c.hidden_size :] = 0
        self._take_rotations(batch.positions)
        logit_rows = np.arange(rows) if batch.logit_rows is None else batch.logit_rows.astype(np.int64)
        logits = np.empty((len(logit_rows), _round_up(c.vocab_size, TILE)), np.float32)
        hidden = {layer: np.empty((rows, c.hidden_size), np.float32) for layer in batch.hidden_layers}
        kept = np.zeros(c.num_layers, np.int64)
        for layer, array in hidden.items():
            kept[layer] = array.ctypes.data
        places = _Places(batch, cache)

        state = self._program.state
        state[step.NUM_ROWS], state[step.NUM_LOGIT_ROWS] = rows, len(logit_rows)
        addressed: tuple[tuple[int, NDArray[Any]], ...] = (
            (step.LOGIT_ROWS, logit_rows),
            (step.LOGITS, logits),
            (step.COSINES, self._cosines),
            (step.SINES, self._sines),
            (step.STORAGE, places.storage),
            (step.CACHE_INDEX, places.cache_index),
            (step.LENGTH, places.length),
            (step.STRAIGHT, places.straight),
            (step.PATHS, places.paths),
            (step.KEPT, kept),
        )
        for index, values in addressed:
            state[index] = values.ctypes.data
        state[step.PATH_LENGTH] = places.paths.shape[1]
        state[step.KEY_BYTES], state[step.VALUE_BYTES] = self._head_bytes(cache.capacity)
        self._provide_scratch(cache.capacity)
        self._team.run(self._program)
        cache.lengths[batch.slots] += np.diff(batch.q_start)
        return ForwardOutput(logits[:, : c.vocab_size], tuple(hidden[layer] for layer in batch.hidden_layers))

    def close(self) -> None:
        """End the threads, if they are this backend's own."""
        if self._owns_team:
            self._team.close()

    def _rows(self, features: int) -> F32:
        """Room for `max_rows` rows, zeroed, each padded to whole vectors."""
        room = aligned_bytes((self.max_rows, 4 * _round_up(features, TILE))).view(np.float32)
        room[:] = 0
        return room

    def _head_bytes(self, capacity: int) -> tuple[int, int]:
        """Bytes of the keys and of the values of one head of one layer in a cache slot."""
        positions, dims = _round_up(capacity, simd.LANES), self.config.head_dim
        return 4 * positions * dims, 4 * positions * _round_up(dims, simd.LANES)

    def _cached(self, storage: U8, capacity: int) -> tuple[F32, F32]:
        """Views of a cache slot: keys [L, G, block, D, position in the block], values [L, G, position, D padded]."""
        layers, heads, (key_bytes, _) = self.config.num_layers, self.config.num_kv_heads, self._head_bytes(capacity)
        keys, values = np.split(storage.reshape(layers, -1), [heads * key_bytes], axis=1)
        blocks, dims = _round_up(capacity, simd.LANES) // simd.LANES, self.config.head_dim
        return (
            keys.view(np.float32).reshape(layers, heads, blocks, dims, simd.LANES),
            values.view(np.float32).reshape(layers, heads, blocks * simd.LANES, -1),
        )

    def _provide_scratch(self, capacity: int) -> None:
        size = attention.scratch_bytes(self.config.head_dim, capacity)
        if size * self.threads > len(self._scratch):
            self._scratch = aligned_bytes((size * self.threads,))
        state = self._program.state
        state[step.SCRATCH], state[step.SCRATCH_BYTES] = self._scratch.ctypes.data, size

    def _take_rotations(self, positions: I32) -> None:
        """Cosines and sines of the rows' positions, from a table that grows by doubling."""
        last = int(positions.max())
        if last >= len(self._table[0]):
            self._table = rope_table(self.config, np.arange(2 * last))
        for table, to in zip(self._table, (self._cosines, self._sines), strict=True):
            np.take(table, positions, axis=0, out=to[: len(positions)], mode="clip")

    def _write_program(self) -> NDArray[np.int64]:
        """The operations of one forward, in order."""
        c = self.config
        ops = []
        for i in range(c.num_layers):
            layer = f"layers.{i}."
            ops += [
                *self._linears(
                    [(layer + "q", self._q), (layer + "k", self._k), (layer + "v", self._v)], self._x, norm=layer + "attn_norm"
                ),
                self._rotate(i),
                self._attend(i),
                *self._linears([(layer + "o", self._x)], self._attended, residual=True),
                *self._linears([(layer + "gate", self._gate), (layer + "up", self._up)], self._x, norm=layer + "mlp_norm"),
                *self._linears([(layer + "down", self._x)], self._gate, silu_times=self._up, residual=True),
                _row(
                    step.KEEP,
                    {
                        step.K_ROWS: _at(self._x),
                        step.K_STRIDE: self._x.strides[0],
                        step.K_LAYER: i,
                        step.K_BYTES: 4 * c.hidden_size,
                    },
                ),
            ]
        ops += self._linears([("output", None)], self._x, norm="norm")
        return np.array(ops)

    def _linears(
        self,
        outputs: list[tuple[str, F32 | None]],
        source: F32,
        *,
        norm: str | None = None,
        silu_times: F32 | None = None,
        residual: bool = False,
    ) -> list[NDArray[np.int64]]:
        """Prepare the rows of `source` once, then multiply them with up to three matrices. No output: the logits."""
        matrices = [self._matrices[name] for name, _ in outputs]
        features = matrices[0].shape[1]
        logits = outputs[0][1] is None
        orders = [
            linear.activation_order(m.format.name, self._is_precise(name)) for m, (name, _) in zip(matrices, outputs, strict=True)
        ]
        prepare = {
            step.P_KIND: pointwise.NORM if norm else pointwise.SILU if silu_times is not None else pointwise.PLAIN,
            step.P_ROWS: _at(source),
            step.P_OTHER: _at(silu_times),
            step.P_STRIDE: source.strides[0],
            step.P_WEIGHT: _at(self._vectors[norm]) if norm else 0,
            step.P_EPS_BITS: _bits(self.config.norm_eps),
            step.P_FEATURES: features,
            step.P_INT8: _at(self._inputs["int8"]) if "int8" in orders else 0,
            step.P_INT16: _at(self._inputs["int16"]) if "int16" in orders else 0,
            step.P_F32: _at(self._inputs["f32"]) if "f32" in orders else 0,
            step.P_SELECT: logits,
        }
        product = {step.L_TENSORS: len(matrices), step.L_SELECT: logits, step.L_FEATURES: features}
        for n, ((name, out), matrix, order) in enumerate(zip(outputs, matrices, orders, strict=True)):
            tensor = {
                step.T_KERNEL: linear.linear_kernel(matrix.format.name, order),
                step.T_TILES: _at(matrix.data),
                step.T_TILE_BYTES: matrix.tile_bytes,
                step.T_NUM_TILES: len(matrix.data),
                step.T_INPUTS: _at(self._inputs[order]),
                step.T_ROW_BYTES: features * linear.ORDERS[order] // 32,
                step.T_BIAS: _at(self._vectors.get(name + "_bias")),
                step.T_RESIDUAL: _at(out) if residual else 0,
                step.T_OUT: _at(out),
                step.T_STRIDE: out.strides[0] if out is not None else 4 * _round_up(self.config.vocab_size, TILE),
            }
            product |= {step.L_FIRST + n * step.TENSOR_COLUMNS + column: value for column, value in tensor.items()}
        return [_row(step.PREPARE, prepare), _row(step.LINEAR, product)]

    def _is_precise(self, name: str) -> bool:
        """Whether a matrix reads 16-bit activations: the logits', and in small models the values' and the MLP's last, where
        8 bits cost most (SmolLM2-135M over 512 tokens: mean KL 0.95e-3 without, 0.52e-3 with them; a larger model needs neither).
        """
        return name == "output" or (self.config.hidden_size < _SMALL and name.endswith((".v", ".down")))

    def _rotate(self, i: int) -> NDArray[np.int64]:
        c = self.config
        return _row(
            step.ROTATE,
            {
                step.R_QUERIES: _at(self._q),
                step.R_KEYS: _at(self._k),
                step.R_VALUES: _at(self._v),
                step.R_Q_STRIDE: self._q.strides[0],
                step.R_K_STRIDE: self._k.strides[0],
                step.R_V_STRIDE: self._v.strides[0],
                step.R_Q_NORM: _at(self._vectors.get(f"layers.{i}.q_norm")),
                step.R_K_NORM: _at(self._vectors.get(f"layers.{i}.k_norm")),
                step.R_EPS_BITS: _bits(c.norm_eps),
                step.R_SCALE_BITS: _bits(1 / np.sqrt(c.head_dim)),
                step.R_HEADS: c.num_heads,
                step.R_KV_HEADS: c.num_kv_heads,
                step.R_DIMS: c.head_dim,
                step.R_PADDED_DIMS: _round_up(c.head_dim, simd.LANES),
                step.R_LAYER: i,
            },
        )

    def _attend(self, i: int) -> NDArray[np.int64]:
        c = self.config
        return _row(
            step.ATTEND,
            {
                step.A_QUERIES: _at(self._q),
                step.A_STRIDE: self._q.strides[0],
                step.A_OUT: _at(self._attended),
                step.A_OUT_STRIDE: self._attended.strides[0],
                step.A_HEADS: c.num_heads,
                step.A_KV_HEADS: c.num_kv_heads,
                step.A_DIMS: c.head_dim,
                step.A_PADDED_DIMS: _round_up(c.head_dim, simd.LANES),
                step.A_LAYER: i,
            },
        )


class _Places:
    """Where each row of a batch goes in the cache, and what it attends to. Arrays are int64 [T], paths [T, length]."""

    def __init__(self, batch: ForwardBatch, cache: KVCache) -> None:
        counts = np.diff(batch.q_start)
        prefix = np.repeat(cache.lengths[batch.slots].astype(np.int64), counts)
        inside = np.arange(len(batch.tokens)) - np.repeat(batch.q_start[:-1], counts)
        addresses = np.array([cache.storage(slot).ctypes.data for slot in batch.slots.tolist()], np.int64)
        self.storage = np.repeat(addresses, counts)
        self.cache_index = prefix + inside
        self.length = self.straight = self.cache_index + 1
        self.paths = np.zeros((len(batch.tokens), 0), np.int64)
        if batch.parents is not None:
            self._follow(batch.parents.tolist(), prefix)

    def _follow(self, parents: list[int], prefix: NDArray[np.int64]) -> None:
        """Tree rows: the prefix, then ancestors by depth. The last, partly filled block of the prefix is gathered with them."""
        depths: list[int] = []
        for parent in parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        self.length = prefix + depths
        # A row that sees all rows before it is a chain's, also in a tree.
        self.straight = np.where(self.length == self.cache_index + 1, self.length, prefix // simd.LANES * simd.LANES)
        self.paths = np.zeros((len(parents), int((self.length - self.straight).max())), np.int64)
        for row in np.flatnonzero(self.straight < self.length).tolist():
            path = self.paths[row, : self.length[row] - self.straight[row]]
            path[: -depths[row]] = np.arange(self.straight[row], prefix[row])
            at = row
            for place in range(1, depths[row] + 1):
                path[-place] = self.cache_index[at]
                at = parents[at]


def _row(operation: int, operands: dict[int, int]) -> NDArray[np.int64]:
    row = np.zeros(step.COLUMNS, np.int64)
    row[0] = operation
    for column, value in operands.items():
        row[column] = value
    return row


def _at(array: NDArray[np.generic] | None) -> int:
    return 0 if array is None else array.ctypes.data


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


def _padded(tensor: QuantTensor) -> F32:
    """A vector in f32, padded with zeros to whole tiles."""
    values = tensor.dequantize()
    return np.pad(values, (0, -len(values) % TILE)).astype(np.float32)

"""The product: the transformer as a program of compiled kernels over packed weights, one compiled call per forward.

Writes the program once, when the model is loaded: this is the file that knows the order of a layer's operations. Everything a
kernel is told has been checked here or by `ForwardBatch.check`; the kernels themselves check nothing.
"""

from collections.abc import Mapping
from ctypes import addressof, c_int32
from dataclasses import dataclass
from sys import getrefcount
from types import MappingProxyType
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.packed import Matrix, packed_matrices
from cpuspec.config import EngineConfig
from cpuspec.environment import usable_cores
from cpuspec.formats import Cast, Format, QuantTensor
from cpuspec.formats.kv import get_kv_format, stored_bytes
from cpuspec.formats.packing import GROUP, TILE, U8, PackedTensor, aligned_bytes
from cpuspec.kernels import attention, embed, encode, isa, linear, pointwise, products, simd, step
from cpuspec.model.batch import F32, I32, ForwardBatch, ForwardOutput
from cpuspec.model.cache import KVCache
from cpuspec.model.rope import rope_table

_SMALL = 768  # hidden size under which a model is small


@dataclass(frozen=True, slots=True)
class _Storage:
    """A cache slot's memory."""

    memory: U8  # [layers * kv heads, head_bytes]
    address: int
    head_bytes: int


class NumbaBackend:
    """The transformer on packed int4 to int8 (or 16- and 32-bit) weights, with int8 activations, row-invariant to the bit.

    share: a backend whose threads this one uses, and whose packed weights, for every tensor object that both checkpoints hold.
    The two take turns, and closing the one that was there first ends both.
    casts: matrices that are cast to another format at load, by name.
    """

    name = "numba"
    row_invariant = True
    survives_fork = True

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
        self._decoder = embed.row_decoder(self._embed.format.name)
        self._num_logits = _round_up(c.vocab_size, TILE)  # of a row, padded
        self._logit_stride = 4 * self._num_logits
        tensors = dict(checkpoint.tensors)
        if c.tied_embeddings:
            tensors["output"] = self._embed
        matrices: dict[str, Matrix] = {
            name: Cast(t, casts[name], encode.recode) if name in casts else t
            for name, t in tensors.items()
            if len(t.shape) == 2 and name != "embed"
        }
        shared = share._packed if share else {}
        new = {name: t for name, t in matrices.items() if t not in shared}
        packed = packed_matrices(checkpoint.name, new, self.threads, engine.keep_packed, engine.mmap)
        self._matrices = {name: packed[name] if name in packed else shared[t] for name, t in matrices.items()}
        self._packed: WeakKeyDictionary[Matrix, PackedTensor] = WeakKeyDictionary()  # while somebody holds the tensor
        self._packed.update({t: self._matrices[name] for name, t in matrices.items()})
        self._vectors = {name: _padded(t) for name, t in tensors.items() if len(t.shape) == 1}
        self.weight_bytes = sum(m.data.nbytes for m in self._matrices.values())
        self.shared_bytes = self.weight_bytes - sum(self._matrices[name].data.nbytes for name in new)
        rows, heads, kv_heads = self.max_rows, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self._x = self._rows(c.hidden_size)
        self._q, self._k, self._v = self._rows(heads), self._rows(kv_heads), self._rows(kv_heads)
        self._attended, self._gate, self._up = self._rows(heads), self._rows(c.intermediate_size), self._rows(c.intermediate_size)
        widest = max(m.shape[1] for m in self._matrices.values())
        # Whole blocks of rows, and whole vectors of the last block.
        groups = _round_up(rows, linear.ROWS) * _round_up(widest, GROUP) // GROUP + 1
        self._inputs = {order: aligned_bytes((groups * size,)) for order, size in linear.ORDERS.items()}
        self._placed = np.empty((4, rows), np.int64)
        self._logits = np.empty((1, self._num_logits), np.float32)
        self._unheld = getrefcount(self._logits)
        self._peaks = np.empty(linear.ROWS * step.CHUNKS * self.threads, np.float32)
        self._picked = (c_int32 * linear.ROWS)()  # of which a part is a list
        self._paths = np.empty(0, np.int64)
        self._kv_format = get_kv_format(engine.kv_format)
        self._record_bytes = attention.record_bytes(self._kv_format.name, c.head_dim)
        self._records_at = attention.records_offset(self._kv_format.name, c.head_dim)
        queries = attention.QUERIES + max(step.BLOCK_QUERIES, c.num_heads // c.num_kv_heads)
        self._scratch = aligned_bytes((self.threads, self._records_at + queries * self._record_bytes))
        self._records = aligned_bytes((0,))
        self._blocks = np.empty((rows, step.BLOCK_COLUMNS), np.int64)
        self._walked = np.zeros((rows, c.num_kv_heads), np.int64)
        self._program = step.Program(self._write_program(), self.threads)
        state = self._program.state
        state[[step.STORAGE, step.CACHE_INDEX, step.LENGTH, step.STRAIGHT]] = [_at(row) for row in self._placed]
        state[step.PEAKS], state[step.PICKED] = _at(self._peaks), addressof(self._picked)
        state[step.HEADS], state[step.KV_HEADS], state[step.THREADS] = c.num_heads, c.num_kv_heads, self.threads
        state[step.BLOCKS], state[step.WALKED] = _at(self._blocks), _at(self._walked)
        state[step.SCRATCH], state[step.SCRATCH_BYTES] = _at(self._scratch), self._scratch.strides[0]
        self._provide_rotations(255)
        self._team: step.Team = share._team if share else step.Team(self.threads)
        self._owns_team = share is None

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """An empty cache for this model, in the order that `kernels.attention` reads."""
        dims, heads = self.config.head_dim, self.config.num_layers * self.config.num_kv_heads
        size = attention.head_bytes(self._kv_format.name, dims, capacity)

        def new_storage() -> _Storage:
            memory = aligned_bytes((heads, size))
            return _Storage(memory, _at(memory), size)

        def copy_rows(storage: _Storage, rows: I32, first: int) -> None:
            attention.copy_rows(self._kv_format.name, dims, storage.memory, rows, first)

        def copy_prefix(source: _Storage, storage: _Storage, length: int) -> None:
            used = attention.head_bytes(self._kv_format.name, dims, length)
            storage.memory[:, :used] = source.memory[:, :used]

        per_token = heads * 2 * stored_bytes(self._kv_format, dims)
        return KVCache(num_slots, capacity, new_storage, copy_rows, copy_prefix, per_token)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        """Run the rows, append their keys and values to the cache, and return logits and asked hidden states.

        Threads that call at once take turns. Raises BackendError if the backend was closed.
        """
        with self._team.lock:
            return self._forward(batch, cache)

    def _forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        c = self.config
        batch.check(c, cache, self.max_rows)
        lists = batch.lists
        num_rows, logit_rows = len(lists.tokens), lists.logit_rows
        if lists.parents:
            self._provide_paths(num_rows)
        if (last := max(lists.positions)) >= len(self._rotations[0]):
            self._provide_rotations(last)
        if self._decoder is None:
            self._x[:num_rows, : c.hidden_size] = self._embed.rows(batch.tokens)
            self._x[:num_rows, c.hidden_size :] = 0
        num_logits = num_rows if logit_rows is None else len(logit_rows)
        logits = self._room_for_logits(num_logits)
        # Made before the run, behind which nothing that Python touches is in the processor's caches.
        output = ForwardOutput(logits if self._num_logits == c.vocab_size else logits[:, : c.vocab_size])
        kept = None
        if batch.hidden_layers:
            kept, output.hidden = self._room_for_hidden(batch.hidden_layers, num_rows)
        lengths, addresses, head_bytes = [], [], 0
        for slot in lists.slots:
            storage: _Storage = cache.storage(slot)
            lengths.append(cache.lengths[slot])
            addresses.append(storage.address)
            head_bytes = storage.head_bytes
        self._program.enter(
            lists.tokens,
            lists.positions,
            lists.parents or [],
            range(num_rows) if logit_rows is None else logit_rows,
            lists.q_start,
            lengths,
            addresses,
            head_bytes,
            kept,
            logits,
        )
        while num_records := self._team.run(self._program):
            self._provide_records(num_records)
        cache.advance(batch)
        if num_logits <= linear.ROWS:
            output.best = self._picked[:num_logits]
        return output

    def close(self) -> None:
        """End the threads, if they are this backend's own."""
        if self._owns_team:
            self._team.close()

    def _rows(self, features: int) -> F32:
        """Room for `max_rows` rows, zeroed, each padded to whole groups."""
        room = aligned_bytes((self.max_rows, 4 * _round_up(features, GROUP))).view(np.float32)
        room[:] = 0
        return room

    def _room_for_logits(self, num_rows: int) -> F32:
        """Rows of logits to write into: those of the last forward again, if nobody holds them, or a part of them, any more."""
        if num_rows > linear.ROWS:
            return np.empty((num_rows, self._num_logits), np.float32)
        if len(self._logits) != num_rows or getrefcount(self._logits) != self._unheld:
            self._logits = np.empty((num_rows, self._num_logits), np.float32)
        return self._logits

    def _room_for_hidden(self, layers: tuple[int, ...], num_rows: int) -> tuple[NDArray[np.int64], tuple[F32, ...]]:
        """Of each layer of the model the address to which its rows go, 0 for none; and rows for each that was asked for."""
        c = self.config
        rows = {layer: np.empty((num_rows, c.hidden_size), np.float32) for layer in layers}
        kept = np.zeros(c.num_layers, np.int64)
        kept[list(rows)] = [_at(one) for one in rows.values()]
        return kept, tuple(rows[layer] for layer in layers)

    def _provide_records(self, number: int) -> None:
        """Room for the records of attention that several threads make."""
        self._records = aligned_bytes((2 * number * self._record_bytes,))
        self._program.state[step.RECORDS], self._program.state[step.MOST_RECORDS] = _at(self._records), 2 * number

    def _provide_paths(self, rows: int) -> None:
        """Room for the paths of tree rows: what is left of the prefix after whole vectors, and up to all rows."""
        length = simd.LANES + rows
        if rows * length > len(self._paths):
            self._paths = np.empty(rows * length, np.int64)
        self._program.state[step.PATHS], self._program.state[step.PATH_LENGTH] = _at(self._paths), length

    def _provide_rotations(self, last: int) -> None:
        """Cosines and sines of positions up to `last`, in a table that grows by doubling."""
        cosines, sines = self._rotations = rope_table(self.config, np.arange(2 * last))
        self._program.state[step.COSINES], self._program.state[step.SINES] = _at(cosines), _at(sines)

    def _write_program(self) -> NDArray[np.int64]:
        """The operations of one forward, in order."""
        c = self.config
        ops = self._embedding()
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
        ops.append(_row(step.FINISH, {step.F_TILES: len(self._matrices["output"].data), step.F_STRIDE: self._logit_stride}))
        return np.array(ops)

    def _embedding(self) -> list[NDArray[np.int64]]:
        """The rows of tokens, if there is a compiled decoder for their format."""
        if self._decoder is None:
            return []
        format, features = self._embed.format, self.config.hidden_size
        return [
            _row(
                step.EMBED,
                {
                    step.E_DECODER: self._decoder,
                    step.E_DATA: _at(self._embed.data),
                    step.E_ROW_BYTES: format.row_bytes(features),
                    step.E_BLOCKS: features // format.block_size,
                    step.E_FEATURES: features,
                    step.E_OUT: _at(self._x),
                    step.E_STRIDE: self._x.strides[0],
                },
            )
        ]

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
            step.P_BF16: _at(self._inputs["bf16"]) if "bf16" in orders else 0,
            step.P_ROUNDED: _at(self._inputs["rounded"]) if "rounded" in orders else 0,
            step.P_SELECT: logits,
        }
        product = {step.L_TENSORS: len(matrices), step.L_VOCAB: self.config.vocab_size if logits else 0, step.L_FEATURES: features}
        for n, ((name, out), matrix, order) in enumerate(zip(outputs, matrices, orders, strict=True)):
            tensor = {
                step.T_KERNEL: linear.linear_kernel(matrix.format.name, order),
                step.T_TILES: _at(matrix.data),
                step.T_TILE_BYTES: matrix.tile_bytes,
                step.T_NUM_TILES: len(matrix.data),
                step.T_INPUTS: _at(self._inputs[order]),
                step.T_ROW_BYTES: products.row_bytes(order, features),
                step.T_BIAS: _at(self._vectors.get(name + "_bias")),
                step.T_RESIDUAL: _at(out) if residual else 0,
                step.T_OUT: _at(out),
                step.T_STRIDE: out.strides[0] if out is not None else self._logit_stride,
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
                step.R_LAYER: i,
                step.R_APPEND: attention.append_kernel(self._kv_format.name),
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
                step.A_LAYER: i,
                step.A_KERNEL: attention.attend_kernel(self._kv_format.name),
                step.A_RECORDS_AT: self._records_at,
                step.A_RECORD_BYTES: self._record_bytes,
            },
        )


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
    """A vector in f32, padded with zeros to whole groups."""
    values = tensor.dequantize()
    return np.pad(values, (0, -len(values) % GROUP)).astype(np.float32)

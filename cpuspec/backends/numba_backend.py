"""The product: the transformer as a program of compiled kernels over packed weights, one compiled call per forward.

The program is written once, when the model is loaded, from `model.transformer`. Everything a kernel is told has been checked here
or by `ForwardBatch.check`; the kernels themselves check nothing.
"""

import hashlib
import logging
import math
import sys
from collections.abc import Mapping
from ctypes import addressof, c_int32
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from weakref import WeakKeyDictionary, ref

import numpy as np
from numpy.typing import NDArray

from cpuspec import backends, layers, model
from cpuspec.backends import memory_limit
from cpuspec.backends.adapted import AdaptedRows, PackedAdapter
from cpuspec.backends.kv_memory import SLACK, KVPlaces, Memory, WindowRows
from cpuspec.backends.numa import copy_of_processor, new_pages_on, nodes_to_use, placed
from cpuspec.backends.numba_program import Plans, ProgramWriter, Routing, at
from cpuspec.backends.packed import content_hash, packed_matrices
from cpuspec.backends.recurrent_memory import RecurrentLayers, RecurrentMemory
from cpuspec.backends.stored import ExpertStore, StoredTensor, packed_bytes, stored_matrices
from cpuspec.backends.weights import LoadedWeights, WeightTensor, key_centres, weight_tensors
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.adapters import MAX_RANK, Adapter
from cpuspec.checkpoints.checkpoint import is_matrix
from cpuspec.checkpoints.mapped import place_in_file
from cpuspec.config import ModelConfig
from cpuspec.environment import sources_digest, usable_cores
from cpuspec.errors import BackendError, CacheError
from cpuspec.formats import Cast, Format
from cpuspec.formats.kv import get_kv_format
from cpuspec.formats.packing import GROUP, TILE, U8, PackedTensor, aligned_bytes, reserved_bytes, round_up
from cpuspec.kernels import (
    argmax,
    encode,
    isa,
    kv_rows,
    layout,
    machine_code,
    program,
    sharing,
    simd,
)  # fmt: skip
from cpuspec.kernels.team import Team, compile_ahead
from cpuspec.layers import attention_layers, keeping_layers
from cpuspec.model.batch import F32, I32, ForwardBatch, ForwardOutput, ForwardStoppedError
from cpuspec.model.cache import BlockAccess, KVCache, StateAccess
from cpuspec.model.rope import rope_table
from cpuspec.model.transformer import decode, inject
from cpuspec.platform import SYSTEM, Topology
from cpuspec.settings import EngineConfig

_log = logging.getLogger(__name__)

_MANY_ROWS = 1 << 30  # more than a forward has
_MORE_POSITIONS = 4096  # whose cosines and sines are computed at once, at most: some milliseconds


@dataclass(slots=True)
class _Storage:
    """A cache slot's memory."""

    memory: Memory
    address: int
    num_chunks: int
    recurrent: RecurrentMemory | None  # of a model with recurrent layers
    windows: WindowRows
    committed: int = 0  # chunks of each head that may be used
    least: int = 0  # fewest tokens that it can be truncated to, besides 0: layers with a window have dropped the rows before

    def grow(self, places: KVPlaces, num_chunks: int) -> None:
        """Let the first chunks of each head be used. Raises CacheError where there is no memory."""
        if num_chunks > self.committed:
            try:
                places.commit(self.memory, self.committed, num_chunks)
            except MemoryError:
                raise CacheError("no memory for more tokens of a sequence; run fewer sequences, or shorter ones") from None
            self.committed = num_chunks

    def clear(self) -> None:
        """Drop all rows of the layers that keep only their last ones."""
        self.windows.clear(self.memory, self.committed)
        self.committed = self.least = 0

    def forget(self, least: int) -> None:
        """Drop those that no row after `least` tokens sees."""
        if least > self.least:
            self.windows.give_back(self.memory, self.least, least)
            self.least = least


class NumbaBackend:
    """The transformer on packed weights of 1 to 32 bits, with activations in 8, 14 or 16 bits or floats, row-invariant to the bit.

    share: a backend whose threads this one uses, and whose packed weights of every tensor object that both checkpoints hold.
    The two run in turn, and closing `share` ends both.
    casts: matrices that are cast to another format at load, by name.
    """

    name = "numba"
    row_invariant = True
    survives_fork = True
    adapts = True
    matrices: LoadedWeights[PackedTensor | StoredTensor]

    def __init__(
        self,
        checkpoint: Checkpoint,
        engine: EngineConfig,
        share: "NumbaBackend | None" = None,
        casts: Mapping[str, Format] = MappingProxyType({}),
    ) -> None:
        isa.check_processor()
        compile_ahead()
        in_14_bits = _is_in_14_bits(engine)
        self.prompt_arithmetic = "codes" if in_14_bits else _prompt_arithmetic(engine.prompt_arithmetic, checkpoint.config)
        self.config = c = checkpoint.config
        self.max_rows = engine.max_rows
        self.threads: int = share.threads if share else engine.threads or usable_cores()
        self._embed = checkpoint.tensors["embed"]
        self._layer_embed = checkpoint.tensors.get("layer_embed")
        self._num_logits = round_up(c.num_logits, TILE)  # of a row, padded
        tensors = weight_tensors(checkpoint, casts, partial(Cast, recode=encode.recode, maker=machine_code.fingerprint()))
        matrices = {name: t for name, t in tensors.items() if is_matrix(name, t.shape) and name not in ("embed", "layer_embed")}

        limit_bytes = memory_limit(engine.memory)
        # Backends that share weights use one topology, so that they number the copies alike.
        self._topology: Topology = share._topology if share else SYSTEM.topology()
        self.store: ExpertStore | None = None  # of experts that stay on the disk, unless they are another backend's

        def load(matrices: Mapping[str, WeightTensor]) -> Mapping[str, PackedTensor | StoredTensor]:
            with new_pages_on(nodes_to_use(self._topology) if engine.numa != "off" else ()):
                if limit_bytes is not None and sum(map(packed_bytes, matrices.values())) > limit_bytes:
                    self.store, stored = stored_matrices(checkpoint.name, matrices, self.threads, limit_bytes)
                    return stored
                packed = packed_matrices(checkpoint.name, matrices, self.threads, engine.keep_packed, engine.mmap)
            return placed(packed, self._topology, engine.numa)

        self.matrices = LoadedWeights(matrices, load, share.matrices if share else None)
        self.weight_bytes, self.shared_bytes = self.matrices.num_bytes, self.matrices.shared_bytes
        self._identity = _identity(c, engine.kv_format, self.prompt_arithmetic, in_14_bits, tensors)
        self._vectors = {name: _padded(t, name.endswith("_conv")) for name, t in tensors.items() if not is_matrix(name, t.shape)}
        orders = {name: t.order for name, t in matrices.items() if t.order is not None}
        kv_format, layers = get_kv_format(engine.kv_format), attention_layers(c)
        self._kv_places = KVPlaces(keeping_layers(c), kv_format)
        self._plans = Plans(layers, self.max_rows, self.threads, kv_format.name)
        self._recurrent = RecurrentLayers(c, self.max_rows) if c.is_recurrent else None
        of_tiles = self._recurrent.tile_bytes if self._recurrent else 0
        has_copies = any(isinstance(one, PackedTensor) and one.copies_apart for one in self.matrices.values())
        self._copy_of = copy_of_processor(self._topology) if has_copies else None
        self.scratch = aligned_bytes(
            (self.threads, round_up(max(self._plans.scratch_bytes, of_tiles, 4 * MAX_RANK, sharing.APART_BYTES), 64))
        )
        self._places = np.empty(self.max_rows, layout.PLACE)
        self._logits = np.empty((1, self._num_logits), np.float32).data
        self._lent = ref(np.empty(0, np.float32))
        self._peaks = np.empty(argmax.MOST_ROWS * sharing.PIECES * self.threads, np.float32)
        self._picked = (c_int32 * argmax.MOST_ROWS)()  # ctypes, because its slices are lists
        self._paths = np.empty(0, np.int64)
        self._routing = Routing(c.experts, self.max_rows) if c.experts else None
        centres = key_centres(c, kv_format, tensors)
        self._writer = ProgramWriter(
            c, self.max_rows, self.matrices, self._vectors, orders, self._embed, kv_format, centres, self._kv_places,
            self._plans, self._routing, self._recurrent, self._layer_embed, in_14_bits,
        )  # fmt: skip
        decode(c, self._writer)
        self._first = dict(self._writer.first)  # buffers that are written before a forward
        # Whether a forward can follow another without Python in between.
        self._can_run_extra_steps = not (self._first or self._recurrent or self._writer.stored)
        self._num_positions = 0  # whose cosines and sines are known
        self._rotations: list[F32] = []
        self._programs: list[program.Program] = []
        self.program = self._prompt_program = self._new_program(0)
        if self.prompt_arithmetic == "bf16":
            written = len(self._writer.operations)
            self._writer.of_prompts = True
            decode(c, self._writer)
            self._writer.of_prompts = False
            self._prompt_program = self._new_program(written)
        self._projections: dict[str, program.Program] = {}  # by the name of the matrix
        self._adapted: dict[bool, tuple[program.Program, AdaptedRows]] = {}  # by whether its rows are of prompts
        self._packed_adapters: WeakKeyDictionary[Adapter, PackedAdapter] = WeakKeyDictionary()
        if c.head and c.head.injects:
            written = len(self._writer.operations)
            inject(c, self._writer)
            self._injector = self._new_program(written)
        self._provide_rotations(255)
        self.team: Team = share.team if share else Team(self.threads)
        self._owns_team = share is None

    def _new_program(self, first: int) -> program.Program:
        """A program in this backend's memory, of the operations that were written from number `first` on."""
        records, lists = layout.program(self._writer.operations[first:])
        cuts = [cut - first for cut in self._writer.cuts if cut >= first]
        new = program.Program(records, self.threads, lists, cuts)
        for field, value in {
            **(self._routing.addresses() if self._routing else {}),
            **(self._recurrent.addresses() if self._recurrent else {}),
            "places": at(self._places), "peaks": at(self._peaks), "picked": addressof(self._picked),
            "scratch": at(self.scratch), "scratch_bytes": self.scratch.strides[0], "threads": self.threads,
            "copy_of": at(self._copy_of), **self._plans.fields(),
        }.items():  # fmt: skip
            new.state[field] = value
        self._programs.append(new)
        return new

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """An empty cache for this model, in the order that `kernels.attention` reads."""
        places, recurrent, windows = self._kv_places, self._recurrent, WindowRows(self._kv_places, self.config, capacity)
        num_chunks = kv_rows.num_chunks(capacity)

        def new_storage() -> _Storage:
            whole = reserved_bytes((num_chunks * places.chunk_bytes,))
            memory = recurrent.new_memory() if recurrent else None
            return _Storage(places.memory(whole, num_chunks), at(whole), num_chunks, memory, windows)

        def copy_rows(storage: _Storage, rows: I32, first: int) -> None:
            places.copy_rows(storage.memory, rows, first)

        def copy_prefix(source: _Storage, storage: _Storage, length: int) -> None:
            storage.grow(places, kv_rows.num_chunks(length))
            places.copy_prefix(source.memory, storage.memory, length, windows.kinds)

        def views(storage: _Storage, number: int) -> tuple[U8, ...]:
            storage.grow(places, number + 1)
            return places.views(storage.memory, number, windows.kinds)

        return KVCache(
            num_slots,
            capacity,
            new_storage,
            copy_rows,
            copy_prefix,
            places.bytes_per_token,
            BlockAccess(kv_rows.CHUNK, simd.LANES, views),  # keys lie in blocks of LANES positions
            self._identity,
            _state_access(recurrent) if recurrent else _window_access(windows, places) if windows else None,
            sizes=windows.sizes(recurrent.num_bytes if recurrent else 0),
        )

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        """Run the rows, append their keys and values to the cache, and return logits and asked hidden states.

        Threads that call at once take turns. Raises BackendError if the backend was closed.
        """
        with self.team.lock:
            return self._forward(batch, cache)

    def _forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        c = self.config
        self._check_cache(cache)
        batch.check(c, cache, self.max_rows)
        lists = batch.lists
        num_rows, logit_rows = len(lists.tokens), lists.logit_rows
        extra_steps = (
            batch.extra_steps if self._can_run_extra_steps and not batch.hidden_layers and num_rows <= argmax.MOST_ROWS else 0
        )
        self._provide_rotations(max(lists.positions) + extra_steps)
        if self._first:
            self._write_first_rows(batch)
        num_logits = num_rows if logit_rows is None else len(logit_rows)
        logits = self._room_for_logits(num_logits)
        # Made before the run: after it, nothing that Python uses is in the processor's caches.
        output = ForwardOutput(logits if self._num_logits == c.num_logits else logits[:, : c.num_logits])
        kept = None
        if batch.hidden_layers:
            kept, output.hidden = self._room_for_hidden(batch.hidden_layers, num_rows)
        lengths, addresses, num_chunks = self._entered(lists.slots, lists.q_start, cache, extra_steps)
        entered, adapter_bytes = self._prompt_program if batch.of_prompts else self.program, 0
        if batch.adapters:
            entered, adapted = self._adapted_program(batch.of_prompts)
            adapter_bytes = adapted.enter(entered.state, batch.adapters, lists.q_start)
        if lists.parents:
            self._provide_paths(entered, num_rows)
        entered.enter(
            lists.tokens,
            lists.positions,
            lists.parents or [],
            range(num_rows) if logit_rows is None else logit_rows,
            lists.q_start,
            lengths,
            addresses,
            num_chunks,
            kept,
            logits,
            batch.both_ways,
            batch.stops_early,
            batch.sees_rows,
            extra_steps,
            batch.ends,
        )
        if self._recurrent:
            memories = [memory for slot in lists.slots if (memory := cache.storage(slot).recurrent)]
            self._recurrent.enter(entered.state, lists.q_start, lengths, memories)
        if self._writer.stored and self._routing:  # a child that was forked within `_go_on` has a part of them
            entered.state["segments"] = at(self._routing.segments)
        self.team.run(entered)
        if entered.state["stopped"]:
            raise ForwardStoppedError
        if self._writer.stored:
            self._go_on(entered)
        if self._recurrent:
            self._recurrent.commit()
        times = 1
        if extra_steps:
            output.extra_tokens = entered.extra_tokens
            times += len(output.extra_tokens[0])
        cache.advance(batch, times)
        for slot, length in zip(lists.slots, lengths, strict=True):
            storage: _Storage = cache.storage(slot)
            if storage.windows:
                storage.forget(length - SLACK)
        expert_bytes = int(entered.state["expert_bytes"])  # of all forwards
        output.weight_bytes = times * (adapter_bytes + self.matrices.read_bytes(num_logits)) + expert_bytes
        if num_logits <= argmax.MOST_ROWS:
            output.best = self._picked[:num_logits]
        return output

    def _go_on(self, entered: program.Program) -> None:
        """Run a program that stopped after its first router to the end: each layer's experts in rounds, as they come into memory.

        While a layer's experts are read, the next router is asked what it would choose for the rows as they are.
        """
        state, routing, num_rows = entered.state, self._routing, int(entered.state["num_rows"])
        assert routing, "the model has experts"
        layers = self._writer.stored
        for number, (layer, _) in enumerate(layers):
            segments = routing.segments[: state["num_segments"]]
            layer.need(segments["expert"].tolist())
            after, router = layers[number + 1] if number + 1 < len(layers) else (None, None)
            if after and router:
                after.guess(router.likeliest(num_rows))
            for first, end in layer.rounds():
                some = segments[first:end]
                state["segments"], state["num_segments"] = at(some), end - first
                state["first_pair"], state["num_pairs"] = some["first"][0], some["rows"].sum()
                self._resume(entered, 2 * number + 1)
            state["segments"] = at(segments)
            if after:
                after.settle()
            self._resume(entered, 2 * number + 2)

    def _resume(self, entered: program.Program, part: int) -> None:
        self.team.resume(entered.jobs[part])
        if entered.state["stopped"]:
            raise ForwardStoppedError

    def stop(self) -> None:
        """End the running forward after its running operation, some milliseconds later, if its batch `stops_early`."""
        for entered in self._programs:
            entered.state["stop"]["asked"] = 1

    def project(self, rows: F32, name: str) -> F32:
        """The product of rows with one of a head's matrices, in chunks that a forward takes."""
        num_outputs, num_inputs = self.matrices[name].shape
        if rows.ndim != 2 or rows.shape[1] != num_inputs:
            raise BackendError(f"{name} multiplies rows of {num_inputs} numbers, got an array of shape {rows.shape}")
        outputs = np.empty((len(rows), round_up(num_outputs, TILE)), np.float32)
        with self.team.lock:
            if name not in self._projections:
                written = len(self._writer.operations)
                self._writer.project(name)
                self._projections[name] = self._new_program(written)
            entered, buffer = self._projections[name], self._writer.buffers[f"given {num_inputs}"]
            for start in range(0, len(rows), self.max_rows):
                some = rows[start : start + self.max_rows]
                buffer[: len(some), :num_inputs] = some
                numbers = [0] * len(some)
                to = outputs[start : start + len(some)]
                entered.enter(numbers, numbers, [], range(len(some)), [0, len(some)], [0], [0], 0, None, to)
                self.team.run(entered)
        return outputs[:, :num_outputs]

    def inject(self, batch: ForwardBatch, cache: KVCache) -> None:
        """Append keys and values of hidden states."""
        with self.team.lock:
            self._check_cache(cache)
            batch.check(self.config, cache, self.max_rows, injects=True)
            lists = batch.lists
            self._provide_rotations(max(lists.positions))
            buffer = self._writer.buffers["hidden"]
            reads = self.config.head and self.config.head.reads
            rows = self._normed(batch.hidden, None if reads else "hidden_norm")
            buffer[: len(rows), : rows.shape[1]] = rows
            lengths, addresses, num_chunks = self._entered(lists.slots, lists.q_start, cache)
            self._injector.enter(
                lists.tokens,
                lists.positions,
                [],
                [0],
                lists.q_start,
                lengths,
                addresses,
                num_chunks,
                None,
                self._room_for_logits(1),
            )
            self.team.run(self._injector)
            cache.advance(batch)

    def close(self) -> None:
        """End the threads, if they are this backend's own."""
        if self._owns_team:
            self.team.close()
            if self.store:
                self.store.reader.close()

    def _check_cache(self, cache: KVCache) -> None:
        """Raise BackendError for a cache of another model or another KV format: kernels write where this backend's have rows."""
        if cache.identity != self._identity:
            raise BackendError("this cache was made for another model or other settings; take one of this backend's `new_cache`")

    def _entered(
        self, slots: list[int], starts: list[int], cache: KVCache, extra_steps: int = 0
    ) -> tuple[list[int], list[int], int]:
        """Make room in the slots for a forward's rows. Returns the tokens that each holds, its address, and the chunks of one.

        extra_steps: rows of each that follow.
        """
        storages: list[_Storage] = [cache.storage(slot) for slot in slots]
        lengths = [cache.lengths[slot] for slot in slots]
        for number, storage in enumerate(storages):
            if storage.least > lengths[number]:
                if lengths[number]:
                    raise CacheError(
                        f"layers with a window have rows of a slot from {storage.least} tokens on, and it holds {lengths[number]}; "
                        "truncate it to 0"
                    )
                storage.clear()
            chunks = kv_rows.num_chunks(lengths[number] + starts[number + 1] - starts[number] + extra_steps)
            storage.grow(self._kv_places, chunks)
        return lengths, [storage.address for storage in storages], storages[0].num_chunks

    def _write_first_rows(self, batch: ForwardBatch) -> None:
        """Write the rows that the program begins with: embedded tokens, and hidden states where the model takes them."""
        rows, given = self._embed.rows(batch.tokens) * np.float32(self.config.embedding_scale), batch.hidden
        layers: F32 | None = None
        if "layer_embed" in self._first and self._layer_embed:
            layers = self._layer_embed.rows(batch.tokens) * np.float32(math.sqrt(self.config.layer_input_size))
        for name, norms in self._first.items():
            parts = {"embed": (rows,), "hidden": (given,), "join": (rows, given), "layer_embed": (layers,)}[name]
            values = np.concatenate([self._normed(part, norm) for part, norm in zip(parts, norms, strict=True)], axis=1)
            buffer = self._writer.buffers[name]
            buffer[: len(rows), : values.shape[1]] = values
            buffer[: len(rows), values.shape[1] :] = 0

    def _normed(self, x: F32 | None, norm: str | None) -> F32:
        assert x is not None, "checked by `ForwardBatch.check`"
        if norm is None:
            return x
        squares = np.mean(x * x, axis=1, keepdims=True) + np.float32(self.config.norm_eps)
        return x / np.sqrt(squares) * self._vectors[norm][: x.shape[1]]

    def _room_for_logits(self, num_rows: int) -> F32:
        """Rows of logits to write into, in the last forward's memory once its array and all parts of it are gone."""
        if num_rows > argmax.MOST_ROWS:
            return np.empty((num_rows, self._num_logits), np.float32)
        if len(self._logits) != num_rows or self._lent() is not None:
            self._logits = np.empty((num_rows, self._num_logits), np.float32).data
        # A view refers to `logits`, and so keeps `_lent` alive, only because the base of `logits` is a memoryview. If the base were
        # an array, numpy would make the view refer to that array instead.
        logits: F32 = np.asarray(self._logits)
        self._lent = ref(logits)
        return logits

    def _room_for_hidden(self, layers: tuple[int, ...], num_rows: int) -> tuple[NDArray[np.int64], tuple[F32, ...]]:
        """Of each layer of the model the address to which its rows go, 0 for none; and rows for each that was asked for."""
        c = self.config
        rows = {layer: np.empty((num_rows, c.hidden_size), np.float32) for layer in layers}
        kept = np.zeros(c.num_layers, np.int64)
        kept[list(rows)] = [at(one) for one in rows.values()]
        return kept, tuple(rows[layer] for layer in layers)

    def _adapted_program(self, of_prompts: bool) -> tuple[program.Program, AdaptedRows]:
        """The program with adapters beside its products, which is written when a forward first has some."""
        if of_prompts not in self._adapted:
            writer, written = self._writer, len(self._writer.operations)
            writer.adapts, writer.of_prompts = True, of_prompts and self.prompt_arithmetic == "bf16"
            decode(self.config, writer)
            writer.adapts = writer.of_prompts = False
            entered = self._new_program(written)
            entered.state["rotations"] = self.program.state["rotations"]
            rows = AdaptedRows(writer.adapted, writer.input_orders, writer.num_partials, self._packed_adapters)
            self._adapted[of_prompts] = entered, rows
        return self._adapted[of_prompts]

    def _provide_paths(self, entered: program.Program, rows: int) -> None:
        """Room for the paths of tree rows: what is left of the prefix after whole vectors, and up to all rows."""
        length = simd.LANES + rows
        if rows * length > len(self._paths):
            self._paths = np.empty(rows * length, np.int64)
        entered.state["paths"], entered.state["path_length"] = at(self._paths), length

    def _provide_rotations(self, last: int) -> None:
        """Cosines and sines of positions up to `last` and some more, in tables whose room doubles: it is memory once it is used."""
        known, ropes = self._num_positions, self._writer.ropes
        if last < known:
            return
        count = max(round_up(last + 1, GROUP), min(2 * known, known + _MORE_POSITIONS))
        tables = self._rotations
        if ropes and (not tables or count > tables[0].shape[1]):
            tables = [np.empty((2, 2 * count, dims // 2), np.float32) for _, dims in ropes]
            for table, former in zip(tables, self._rotations, strict=False):
                table[:, :known] = former[:, :known]
        for table, (rope, dims) in zip(tables, ropes, strict=True):
            table[:, known:count] = rope_table(rope, dims, np.arange(known, count))
        self._num_positions = 0  # an interrupt would leave addresses of the former tables
        self._rotations = tables
        for n, table in enumerate(tables):
            for one in self._programs:
                one.state["rotations"][n] = at(table[0]), at(table[1])
        self._num_positions = count


def _state_access(recurrent: RecurrentLayers) -> StateAccess:
    """The states of recurrent layers in a `_Storage`."""

    def memory_of(storage: _Storage) -> RecurrentMemory:
        assert storage.recurrent, "the model has recurrent layers"
        return storage.recurrent

    return StateAccess(
        recurrent.snapshot_bytes,
        lambda storage, length: length if memory_of(storage).folded <= length else 0,
        lambda storage, length, states: recurrent.save(memory_of(storage), length, states),
        lambda storage, states, length: recurrent.restore(memory_of(storage), length, states),
    )


def _window_access(windows: WindowRows, places: KVPlaces) -> StateAccess:
    """The rows of layers that keep only their last ones."""

    def restore(storage: _Storage, states: U8, length: int) -> None:
        storage.clear()
        storage.grow(places, kv_rows.num_chunks(length))
        windows.restore(storage.memory, length, states)
        storage.forget(windows.least(length))

    return StateAccess(
        windows.most_bytes,
        lambda storage, length: length if storage.least <= length else 0,
        lambda storage, length, states: windows.save(storage.memory, length, states),
        restore,
        windows.bytes_at,
        windows.apart,
        passed=_MANY_ROWS,
        waits=SLACK,
    )


def _is_in_14_bits(engine: EngineConfig) -> bool:
    """Whether superblocks are multiplied with activations of 14 bits. Raises BackendError where they cannot be."""
    if engine.activations != "int14":
        return False
    if isa.has_sixteen_registers():
        raise BackendError(
            f"activations int14 needs a processor with AVX-512 VNNI, and this one has {isa.describe()}; leave it at auto"
        )
    if engine.prompt_arithmetic == "bf16":
        raise BackendError(
            "with activations int14 tokens of prompts are multiplied like all others, and prompt_arithmetic is bf16; leave one of "
            "them at auto"
        )
    return True


def _prompt_arithmetic(asked: str, config: ModelConfig) -> str:
    """In what tokens of prompts are computed. Heads read rows of their own, and no prompts. Raises BackendError."""
    if asked == "bf16" and not isa.has_bf16_dots():
        raise BackendError(
            f"prompt_arithmetic bf16 needs a processor with products of bf16 (AVX-512 BF16 or AMX), and this one has "
            f"{isa.describe()}; leave it at auto, or take codes"
        )
    wanted = asked == "bf16" or (asked == "auto" and isa.has_bf16_tiles())
    return "bf16" if wanted and config.head is None else "codes"


def _identity(
    config: ModelConfig, kv_format: str, prompt_arithmetic: str, in_14_bits: bool, tensors: Mapping[str, WeightTensor]
) -> str:
    """A hash of everything that the bits of keys and values depend on besides the tokens."""
    sources = sources_digest(backends, model, layers)
    weights = [(name, tensor.format.name, tensor.shape, _weights_of(tensor)) for name, tensor in tensors.items()]
    versions = machine_code.fingerprint(), sources, np.__version__, sys.byteorder
    facts = (*versions, repr(config), kv_format, prompt_arithmetic, in_14_bits, weights)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _weights_of(tensor: WeightTensor) -> tuple[object, ...]:
    """The place of a tensor in a file with such contents, or a hash of its bytes."""
    source = tensor.source if isinstance(tensor, Cast) else tensor
    if source.parts:
        return tuple(fact for part in source.parts for fact in _weights_of(part))
    data = source.data.reshape(-1)
    order = () if source.order is None else (content_hash(source.order.view(np.uint8)),)
    return source.format.name, *(place_in_file(data) or (content_hash(data),)), *order


def _padded(tensor: WeightTensor, by_tap: bool = False) -> F32:
    """A vector in f32, or one of each expert, padded with zeros to whole groups. by_tap: of a convolution's weights, one a tap."""
    values = np.ascontiguousarray(tensor.dequantize().T) if by_tap else tensor.dequantize()
    return np.pad(values, (*[(0, 0)] * (values.ndim - 1), (0, -values.shape[-1] % GROUP))).astype(np.float32)

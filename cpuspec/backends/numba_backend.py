"""The product: the transformer as a program of compiled kernels over packed weights, one compiled call per forward.

The program is written once, when the model is loaded, from `model.transformer`. Everything a kernel is told has been checked here
or by `ForwardBatch.check`; the kernels themselves check nothing.
"""

import hashlib
import logging
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from ctypes import addressof, c_int32
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from sys import getrefcount
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec import model
from cpuspec.backends import memory_limit
from cpuspec.backends.adapted import AdaptedRows
from cpuspec.backends.kv_memory import KVPlaces, Memory
from cpuspec.backends.numa import copy_of_processor, new_pages_on, nodes_to_use, placed
from cpuspec.backends.packed import content_hash, packed_matrices
from cpuspec.backends.recurrent_memory import RecurrentLayers, RecurrentMemory, inputs_kept
from cpuspec.backends.stored import ExpertStore, LayerExperts, Router, StoredTensor, packed_bytes, stored_matrices
from cpuspec.backends.weights import LoadedWeights, WeightTensor, key_centres, weight_tensors
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.adapters import MAX_RANK
from cpuspec.checkpoints.checkpoint import is_matrix
from cpuspec.checkpoints.mapped import place_in_file
from cpuspec.config import DeltaNet, EngineConfig, Experts, Mamba2, ModelConfig, Rope
from cpuspec.environment import sources_digest, usable_cores
from cpuspec.errors import BackendError, CacheError
from cpuspec.formats import Cast, Format, QuantTensor
from cpuspec.formats.kv import get_kv_format, hadamard_size
from cpuspec.formats.packing import GROUP, TILE, U8, PackedTensor, aligned_bytes, paged_bytes, reserved_bytes, unpack
from cpuspec.kernels import (
    adapters,
    argmax,
    attention,
    attention_bf16,
    attention_plan,
    embed,
    encode,
    isa,
    kv_rows,
    latent,
    layout,
    linear,
    machine_code,
    pointwise,
    products,
    program,
    sharing,
    simd,
)  # fmt: skip
from cpuspec.kernels.layout import MAX_QUERIES
from cpuspec.kernels.team import Team, compile_ahead
from cpuspec.layers import Layer, attention_layers, keeping_layers
from cpuspec.model.batch import F32, I32, ForwardBatch, ForwardOutput, ForwardStoppedError
from cpuspec.model.cache import BlockAccess, KVCache, StateAccess
from cpuspec.model.recurrence import LENGTH_EPS
from cpuspec.model.rope import rope_table
from cpuspec.model.transformer import decode, inject
from cpuspec.platform import SYSTEM, Topology

_log = logging.getLogger(__name__)

_SMALL = 768  # hidden size under which a model is small
_RESULTS = ("out", "stride", "num_tiles")  # fields of a matrix whose products adapters add to

# For each thread, of the partial results of attention that threads share. They become memory as they are written. Rows that have
# no room there are not split (`attention_plan`): 64 queries of a key head have it up to 131,072 tokens.
_PARTIALS_BYTES = 32 << 20


@dataclass(slots=True)
class _Storage:
    """A cache slot's memory."""

    memory: Memory
    address: int
    num_chunks: int
    recurrent: RecurrentMemory | None  # of a model with recurrent layers
    room: int = 0  # chunks of each head that may be used

    def grow(self, places: KVPlaces, num_chunks: int) -> None:
        """Let the first chunks of each head be used. Raises CacheError where there is no memory."""
        if num_chunks > self.room:
            try:
                places.commit(self.memory, self.room, num_chunks)
            except MemoryError:
                raise CacheError("no memory for more tokens of a sequence; run fewer sequences, or shorter ones") from None
            self.room = num_chunks


class NumbaBackend:
    """The transformer on packed int4 to int8 (or 16- and 32-bit) weights, with int8 activations, row-invariant to the bit.

    share: a backend whose threads this one uses, and whose packed weights, for every tensor object that both checkpoints hold.
    The two take turns, and closing the one that was there first ends both.
    casts: matrices that are cast to another format at load, by name.
    """

    name = "numba"
    row_invariant = True
    survives_fork = True
    adapts = True
    _matrices: LoadedWeights[PackedTensor | StoredTensor]

    def __init__(
        self,
        checkpoint: Checkpoint,
        engine: EngineConfig,
        share: "NumbaBackend | None" = None,
        casts: Mapping[str, Format] = MappingProxyType({}),
    ) -> None:
        isa.check_processor()
        compile_ahead()
        self.prompt_arithmetic = _prompt_arithmetic(engine.prompt_arithmetic, checkpoint.config)
        self.config = c = checkpoint.config
        self.max_rows = engine.max_rows
        self.threads: int = share.threads if share else engine.threads or usable_cores()
        self._embed = checkpoint.tensors["embed"]
        self._layer_embed = checkpoint.tensors.get("layer_embed")
        self._num_logits = _round_up(c.num_logits, TILE)  # of a row, padded
        tensors = weight_tensors(checkpoint, casts, partial(Cast, recode=encode.recode))
        matrices = {name: t for name, t in tensors.items() if is_matrix(name, t.shape) and name not in ("embed", "layer_embed")}

        limit_bytes = memory_limit(engine.memory)
        # One of all backends whose weights are shared, so that they number the copies alike.
        self._topology: Topology = share._topology if share else SYSTEM.topology()
        self.store: ExpertStore | None = None  # of experts that stay on the disk, unless they are another backend's

        def load(matrices: Mapping[str, WeightTensor]) -> Mapping[str, PackedTensor | StoredTensor]:
            with new_pages_on(nodes_to_use(self._topology) if engine.numa != "off" else ()):
                if limit_bytes is not None and sum(map(packed_bytes, matrices.values())) > limit_bytes:
                    self.store, stored = stored_matrices(checkpoint.name, matrices, self.threads, limit_bytes)
                    return stored
                packed = packed_matrices(checkpoint.name, matrices, self.threads, engine.keep_packed, engine.mmap)
            return placed(packed, self._topology, engine.numa)

        self._matrices = LoadedWeights(matrices, load, share._matrices if share else None)
        self.weight_bytes, self.shared_bytes = self._matrices.num_bytes, self._matrices.shared_bytes
        self._identity = _identity(c, engine.kv_format, self.prompt_arithmetic, tensors)
        self._vectors = {name: _padded(t, name.endswith("_conv")) for name, t in tensors.items() if not is_matrix(name, t.shape)}
        orders = {name: t.order for name, t in matrices.items() if t.order is not None}
        kv_format, layers = get_kv_format(engine.kv_format), attention_layers(c)
        self._kv_places = KVPlaces(keeping_layers(c), kv_format)
        self._plans = _Plans(layers, self.max_rows, self.threads, kv_format.name)
        self._recurrent = RecurrentLayers(c, self.max_rows) if c.is_recurrent else None
        of_tiles = self._recurrent.tile_bytes if self._recurrent else 0
        has_copies = any(isinstance(one, PackedTensor) and one.copies_apart for one in self._matrices.values())
        self._copy_of = copy_of_processor(self._topology) if has_copies else None
        self._scratch = aligned_bytes((self.threads, max(self._plans.scratch_bytes, of_tiles, 4 * MAX_RANK)))
        self._places = np.empty(self.max_rows, layout.PLACE)
        self._logits = np.empty((1, self._num_logits), np.float32)
        self._unheld = getrefcount(self._logits)
        self._peaks = np.empty(argmax.MOST_ROWS * sharing.PIECES * self.threads, np.float32)
        self._picked = (c_int32 * argmax.MOST_ROWS)()  # of which a part is a list
        self._paths = np.empty(0, np.int64)
        self._routing = _Routing(c.experts, self.max_rows) if c.experts else None
        centres = key_centres(c, kv_format, tensors)
        self._writer = _Writer(
            c, self.max_rows, self._matrices, self._vectors, orders, self._embed, kv_format, centres, self._kv_places,
            self._plans, self._routing, self._recurrent, self._layer_embed,
        )  # fmt: skip
        decode(c, self._writer)
        self._first = dict(self._writer.first)  # rooms that are written before a forward
        self._num_positions = 0  # whose cosines and sines are known
        self._rotations: list[tuple[F32, F32]] = []
        self._programs: list[program.Program] = []
        self._program = self._prompt_program = self._new_program(0)
        if self.prompt_arithmetic == "bf16":
            written = len(self._writer.operations)
            self._writer.of_prompts = True
            decode(c, self._writer)
            self._writer.of_prompts = False
            self._prompt_program = self._new_program(written)
        self._projections: dict[str, program.Program] = {}  # by the name of the matrix
        self._adapted: dict[bool, tuple[program.Program, AdaptedRows]] = {}  # by whether its rows are of prompts
        if c.head and c.head.injects:
            written = len(self._writer.operations)
            inject(c, self._writer)
            self._injector = self._new_program(written)
        self._provide_rotations(255)
        self._team: Team = share._team if share else Team(self.threads)
        self._owns_team = share is None

    def _new_program(self, first: int) -> program.Program:
        """A program in this backend's memory, of the operations that were written from number `first` on."""
        records, lists = layout.program(self._writer.operations[first:])
        cuts = [cut - first for cut in self._writer.cuts if cut >= first]
        new = program.Program(records, self.threads, lists, cuts)
        for field, value in {
            **(self._routing.addresses() if self._routing else {}),
            **(self._recurrent.addresses() if self._recurrent else {}),
            "places": _at(self._places), "peaks": _at(self._peaks), "picked": addressof(self._picked),
            "scratch": _at(self._scratch), "scratch_bytes": self._scratch.strides[0], "threads": self.threads,
            "copy_of": _at(self._copy_of), **self._plans.fields(),
        }.items():  # fmt: skip
            new.state[field] = value
        self._programs.append(new)
        return new

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """An empty cache for this model, in the order that `kernels.attention` reads."""
        places, recurrent = self._kv_places, self._recurrent
        num_chunks = kv_rows.num_chunks(capacity)

        def new_storage() -> _Storage:
            whole = reserved_bytes((num_chunks * places.chunk_bytes,))
            memory = recurrent.new_memory() if recurrent else None
            return _Storage(places.memory(whole, num_chunks), _at(whole), num_chunks, memory)

        def copy_rows(storage: _Storage, rows: I32, first: int) -> None:
            places.copy_rows(storage.memory, rows, first)

        def copy_prefix(source: _Storage, storage: _Storage, length: int) -> None:
            storage.grow(places, kv_rows.num_chunks(length))
            places.copy_prefix(source.memory, storage.memory, length)

        def views(storage: _Storage, number: int) -> tuple[U8, ...]:
            storage.grow(places, number + 1)
            return places.views(storage.memory, number)

        return KVCache(
            num_slots,
            capacity,
            new_storage,
            copy_rows,
            copy_prefix,
            places.bytes_per_token,
            BlockAccess(kv_rows.CHUNK, simd.LANES, views),  # keys lie in blocks of LANES positions
            self._identity,
            _state_access(recurrent) if recurrent else None,
            recurrent.num_bytes if recurrent else 0,
        )

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        """Run the rows, append their keys and values to the cache, and return logits and asked hidden states.

        Threads that call at once take turns. Raises BackendError if the backend was closed.
        """
        with self._team.lock:
            return self._forward(batch, cache)

    def _forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        c = self.config
        self._check_cache(cache)
        batch.check(c, cache, self.max_rows)
        lists = batch.lists
        num_rows, logit_rows = len(lists.tokens), lists.logit_rows
        self._provide_rotations(max(lists.positions))
        if self._first:
            self._write_first_rows(batch)
        num_logits = num_rows if logit_rows is None else len(logit_rows)
        logits = self._room_for_logits(num_logits)
        # Made before the run, behind which nothing that Python touches is in the processor's caches.
        output = ForwardOutput(logits if self._num_logits == c.num_logits else logits[:, : c.num_logits])
        kept = None
        if batch.hidden_layers:
            kept, output.hidden = self._room_for_hidden(batch.hidden_layers, num_rows)
        lengths, addresses, num_chunks = self._entered(lists.slots, lists.q_start, cache)
        entered, adapter_bytes = self._prompt_program if batch.of_prompts else self._program, 0
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
        )
        if self._recurrent:
            memories = [memory for slot in lists.slots if (memory := cache.storage(slot).recurrent)]
            self._recurrent.enter(entered.state, lists.q_start, lengths, memories)
        self._team.run(entered)
        if entered.state["stopped"]:
            raise ForwardStoppedError
        if self._writer.stored:
            self._go_on(entered)
        if self._recurrent:
            self._recurrent.commit()
        cache.advance(batch)
        output.weight_bytes = adapter_bytes + self._matrices.read_bytes(num_logits, int(entered.state["expert_bytes"]))
        if num_logits <= argmax.MOST_ROWS:
            output.best = self._picked[:num_logits]
        return output

    def _go_on(self, entered: program.Program) -> None:
        """Run a program that stands behind its first router to the end: each layer's experts in rounds, as they come into memory.

        While a layer's experts are read, the next router is asked what it would choose for the rows as they are.
        """
        state, routing, num_rows = entered.state, self._routing, int(entered.state["num_rows"])
        assert routing, "the model has experts"
        layers = self._writer.stored
        try:
            for number, (layer, _) in enumerate(layers):
                segments = routing.segments[: state["num_segments"]]
                layer.need(segments["expert"].tolist())
                after, router = layers[number + 1] if number + 1 < len(layers) else (None, None)
                if after and router:
                    after.guess(router.likeliest(num_rows))
                for first, end in layer.rounds():
                    some = segments[first:end]
                    state["segments"], state["num_segments"] = _at(some), end - first
                    state["first_pair"], state["num_pairs"] = some["first"][0], some["rows"].sum()
                    self._resume(entered, 2 * number + 1)
                state["segments"] = _at(segments)
                if after:
                    after.settle()
                self._resume(entered, 2 * number + 2)
        finally:
            state["segments"] = _at(routing.segments)

    def _resume(self, entered: program.Program, part: int) -> None:
        self._team.resume(entered.jobs[part])
        if entered.state["stopped"]:
            raise ForwardStoppedError

    def stop(self) -> None:
        """End the forward that runs behind its running operation, some milliseconds later, if its batch `stops_early`."""
        for entered in self._programs:
            entered.state["stop"]["asked"] = 1

    def project(self, rows: F32, name: str) -> F32:
        """The product of rows with one of a head's matrices, in chunks that a forward takes."""
        num_outputs, num_inputs = self._matrices[name].shape
        if rows.ndim != 2 or rows.shape[1] != num_inputs:
            raise BackendError(f"{name} multiplies rows of {num_inputs} numbers, got an array of shape {rows.shape}")
        outputs = np.empty((len(rows), _round_up(num_outputs, TILE)), np.float32)
        with self._team.lock:
            if name not in self._projections:
                written = len(self._writer.operations)
                self._writer.project(name)
                self._projections[name] = self._new_program(written)
            entered, room = self._projections[name], self._writer.rooms[f"given {num_inputs}"]
            for start in range(0, len(rows), self.max_rows):
                some = rows[start : start + self.max_rows]
                room[: len(some), :num_inputs] = some
                numbers = [0] * len(some)
                to = outputs[start : start + len(some)]
                entered.enter(numbers, numbers, [], range(len(some)), [0, len(some)], [0], [0], 0, None, to)
                self._team.run(entered)
        return outputs[:, :num_outputs]

    def inject(self, batch: ForwardBatch, cache: KVCache) -> None:
        """Append keys and values of hidden states."""
        with self._team.lock:
            self._check_cache(cache)
            batch.check(self.config, cache, self.max_rows, injects=True)
            lists = batch.lists
            self._provide_rotations(max(lists.positions))
            room = self._writer.rooms["hidden"]
            reads = self.config.head and self.config.head.reads
            rows = self._normed(batch.hidden, None if reads else "hidden_norm")
            room[: len(rows), : rows.shape[1]] = rows
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
            self._team.run(self._injector)
            cache.advance(batch)

    def close(self) -> None:
        """End the threads, if they are this backend's own."""
        if self._owns_team:
            self._team.close()
            if self.store:
                self.store.reader.close()

    def _check_cache(self, cache: KVCache) -> None:
        """Raise BackendError for a cache of another model or another KV format: kernels write where this backend's lie."""
        if cache.identity != self._identity:
            raise BackendError("this cache was made for another model or other settings; take one of this backend's `new_cache`")

    def _entered(self, slots: list[int], starts: list[int], cache: KVCache) -> tuple[list[int], list[int], int]:
        """Of each slot, with room for a forward's rows, the tokens that it holds and its address; and the chunks of one."""
        storages: list[_Storage] = [cache.storage(slot) for slot in slots]
        lengths = [cache.lengths[slot] for slot in slots]
        for number, storage in enumerate(storages):
            chunks = kv_rows.num_chunks(lengths[number] + starts[number + 1] - starts[number])
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
            room = self._writer.rooms[name]
            room[: len(rows), : values.shape[1]] = values
            room[: len(rows), values.shape[1] :] = 0

    def _normed(self, x: F32 | None, norm: str | None) -> F32:
        assert x is not None, "`ForwardBatch.check` has seen to it"
        if norm is None:
            return x
        squares = np.mean(x * x, axis=1, keepdims=True) + np.float32(self.config.norm_eps)
        return x / np.sqrt(squares) * self._vectors[norm][: x.shape[1]]

    def _room_for_logits(self, num_rows: int) -> F32:
        """Rows of logits to write into: those of the last forward again, once no caller holds them or a part of them."""
        if num_rows > argmax.MOST_ROWS:
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

    def _adapted_program(self, of_prompts: bool) -> tuple[program.Program, AdaptedRows]:
        """The program with adapters beside its products, which is written when a forward first has some."""
        if of_prompts not in self._adapted:
            writer, written = self._writer, len(self._writer.operations)
            writer.adapts, writer.of_prompts = True, of_prompts and self.prompt_arithmetic == "bf16"
            decode(self.config, writer)
            writer.adapts = writer.of_prompts = False
            entered = self._new_program(written)
            entered.state["rotations"] = self._program.state["rotations"]
            self._adapted[of_prompts] = entered, AdaptedRows(writer.adapted, writer.input_orders, writer.num_partials)
        return self._adapted[of_prompts]

    def _provide_paths(self, entered: program.Program, rows: int) -> None:
        """Room for the paths of tree rows: what is left of the prefix after whole vectors, and up to all rows."""
        length = simd.LANES + rows
        if rows * length > len(self._paths):
            self._paths = np.empty(rows * length, np.int64)
        entered.state["paths"], entered.state["path_length"] = _at(self._paths), length

    def _provide_rotations(self, last: int) -> None:
        """Cosines and sines of positions up to `last`, in tables that grow by doubling."""
        if last < self._num_positions:
            return
        longer = [rope_table(rope, dims, np.arange(2 * last)) for rope, dims in self._writer.ropes]
        self._rotations += longer  # the former stay, should an interrupt leave some of their addresses in use
        for n, (cosines, sines) in enumerate(longer):
            for one in self._programs:
                one.state["rotations"][n] = _at(cosines), _at(sines)
        self._rotations, self._num_positions = longer, 2 * last


class _Plans:
    """How the attention of layers is shared out: the memory of plans, one for all layers that are alike (`layout.PLAN`)."""

    def __init__(self, layers: Sequence[Layer], max_rows: int, threads: int, kv_format: str) -> None:
        self.scratch_bytes, sizes = 0, dict[tuple[int, int, int], int]()  # largest partials by plan
        for layer in layers:
            mixer = layer.attention
            size = attention.partial_bytes(kv_format, mixer.mixed_dims)
            queries = MAX_QUERIES + max(attention_plan.TASK_QUERIES, mixer.heads // mixer.kv_heads)
            at = attention.partials_offset(kv_format, mixer.dims, mixer.mixed_dims)
            self.scratch_bytes = max(self.scratch_bytes, at + queries * size)
            sizes[self._kind(layer)] = max(size, sizes.get(self._kind(layer), 0))
        if len(sizes) > layout.NUM_PLANS:
            raise BackendError(f"{len(sizes)} kinds of layers by heads and windows; wanted up to {layout.NUM_PLANS}")
        self._kinds = list(sizes)
        room = (threads > 1) * threads * _PARTIALS_BYTES
        self._partials, self._plans = paged_bytes((room,)), np.zeros(layout.NUM_PLANS, layout.PLAN)
        self._tasks = np.empty((max(1, len(sizes)), max_rows), layout.TASK)
        self._walked = np.zeros((max_rows, max((kind[1] for kind in sizes), default=1)), np.int64)
        for plan, tasks, ((heads, kv_heads, window), size) in zip(self._plans, self._tasks, sizes.items(), strict=False):
            plan["heads"], plan["kv_heads"], plan["window"] = heads, kv_heads, window
            plan["max_partials"], plan["tasks"] = room // size, _at(tasks)

    def fields(self) -> dict[str, Any]:
        """Fields of a program's state."""
        return {
            "plans": self._plans, "num_plans": len(self._kinds), "partials": _at(self._partials), "walked": _at(self._walked),
        }  # fmt: skip

    def number(self, layer: Layer) -> int:
        """The number of a layer's plan."""
        return self._kinds.index(self._kind(layer))

    @staticmethod
    def _kind(layer: Layer) -> tuple[int, int, int]:
        return layer.attention.heads, layer.attention.kv_heads, layer.attention.window or 0


class _Routing:
    """Buffers for a router's choice. Layers take turns in them."""

    def __init__(self, experts: Experts, max_rows: int) -> None:
        self.pairs = max_rows * experts.used
        self.factors = aligned_bytes((max_rows, 4 * _round_up(experts.used, TILE)))
        self.routed = np.zeros(1, np.int64)
        self.segments = np.zeros(experts.count, layout.SEGMENT)
        self._arrays = {
            "chosen": np.zeros(self.pairs, np.int64),
            "pair_of": np.zeros(self.pairs, np.int64),
            "pairs": np.zeros(self.pairs, layout.PAIR),
            "segments": self.segments,
            "of_expert": np.zeros(experts.count, np.int64),
        }

    def addresses(self) -> dict[str, int]:
        """Of the arrays, by their fields in a program's state."""
        return {field: _at(array) for field, array in self._arrays.items()}


@dataclass(frozen=True, slots=True)
class _Rows:
    """Room for rows of numbers, f32 [max_rows, features padded to whole groups]; of a gate with an activation,
    activation(numbers) * `up`."""

    numbers: F32
    up: F32 | None = None
    activation: str = ""


class _Writer:
    """Writes the operations of `model.transformer` down as those of a program, with the room that their results need.

    A gate is written with the matrix that reads it, and the rotation with the attention, which appends to the cache.
    """

    def __init__(
        self, config: ModelConfig, max_rows: int, matrices: Mapping[str, PackedTensor | StoredTensor], vectors: Mapping[str, F32],
        orders: Mapping[str, I32], embedding: QuantTensor, kv_format: Format, centres: Mapping[int, F32],
        kv_places: KVPlaces, plans: _Plans, routing: "_Routing | None" = None, recurrent: RecurrentLayers | None = None,
        layer_embedding: QuantTensor | None = None,
    ) -> None:  # fmt: skip
        """orders: of inputs, by the name of the matrix that has them so (`QuantTensor.order`)."""
        self.operations: list[tuple[str, dict[str, Any]]] = []
        self.cuts: list[int] = []  # before which operations a forward returns, for experts that stay on the disk
        self.stored: list[tuple[LayerExperts, Router]] = []  # those experts, layer by layer
        self.of_prompts = False  # whether operations are written for tokens of prompts in bf16
        self.adapts = False  # whether they are written with those of adapters
        self.adapted: dict[str, int] = {}  # the numbers of the matrices that adapters may change
        self.num_partials = 0  # the most chunks of matrices that one "shrink" makes
        self.ropes: list[tuple[Rope, int]] = []  # and the numbers of the heads that turn
        decoder = embed.row_decoder(embedding.format.name)
        self.embeds = (
            decoder is not None and embedding.order is None and not config.takes_hidden
        )  # otherwise `first` is written before a forward
        self._config, self._max_rows, self._kv_format, self._centres = config, max_rows, kv_format, centres
        self._kv_places, self._plans = kv_places, plans
        self._matrices, self._vectors, self._embedding, self._layer_embedding = matrices, vectors, embedding, layer_embedding
        self.input_orders = orders
        self._orders = {name: np.concatenate([order, _rest(len(order))]) for name, order in orders.items()}
        self.rooms: dict[str, F32] = {}  # by the part of a layer whose result it holds
        self._sizes: dict[str, int] = {}  # of a part where it is met first
        self.first: dict[str, tuple[str | None, ...]] = {}  # rooms that are written before a forward, with the norms of their parts
        self._routing, self._recurrent = routing, recurrent
        self._inputs_of_heads: dict[str, U8] = {}  # activations of latent attention's heads, by order
        self._value_places: I32 | None = None  # of its cached keys
        self._inputs = _room_for_inputs(max_rows, max(m.shape[-1] for m in matrices.values()))
        if routing:  # of experts, whose segments may begin at any row
            widest = max(m.shape[-1] for name, m in matrices.items() if ".expert_" in name)
            self._inputs_of_pairs = _room_for_inputs(routing.pairs + products.BLOCK_ROWS, widest)

    def embed(self) -> _Rows:
        out = self._rows("embed", self._config.hidden_size)
        if self.embeds:
            self._embed(self._embedding, out, self._config.embedding_scale)
        elif not self._config.takes_hidden:
            self.first["embed"] = (None,)
        return _Rows(out)

    def _embed(self, table: QuantTensor, out: F32, scale: float) -> None:
        """Write the tokens' rows of a table, whose format has a decoder."""
        format, features = table.format, table.shape[1]
        operands = {
            "decoder": embed.row_decoder(format.name), "data": _at(table.data), "row_bytes": format.row_bytes(features),
            "blocks": features // format.block_size, "features": features, "out": _at(out), "stride": out.strides[0],
            "scale": scale,
        }  # fmt: skip
        self.operations.append(("embed", operands))

    def layer_inputs(self, x: _Rows) -> _Rows:
        c, table = self._config, self._layer_embedding
        assert table is not None, "the model has it"
        size, features = c.layer_input_size, table.shape[1]
        out, made = self._rows("layer_embed", features), self._rows("layer_input", features)
        if embed.row_decoder(table.format.name) is None or table.order is not None:
            self.first["layer_embed"] = (None,)
        else:
            self._embed(table, out, math.sqrt(size))
        self._write_linears(x, {"layer_input": made})
        operands = {
            "rows": _at(out), "branch": _at(made), "stride": 4 * size, "weight": _at(self._vectors["layer_input_norm"]),
            "features": size, "parts": features // size, "scale": 1.0, "after": 1 / math.sqrt(2),
            "eps": c.norm_eps * c.hidden_size,  # the norm of what was not divided by the root of hidden_size
        }  # fmt: skip
        self.operations.append(("add", operands))
        return _Rows(out)

    def input_of(self, layer: Layer, inputs: _Rows) -> _Rows:
        return _Rows(inputs.numbers[:, layer.index * layer.input_size :][:, : layer.input_size])

    def hidden(self, norm: str | None) -> _Rows:
        self.first["hidden"] = (norm,)
        return _Rows(self._rows("hidden", self._config.injected_size))

    def join(self, x: _Rows, norms: tuple[str, str] | None) -> _Rows:
        self.first["join"] = norms or (None, None)
        return _Rows(self._rows("join", 2 * self._config.state_size))

    def project(self, name: str) -> None:
        """The product of rows that `NumbaBackend.project` writes, to where the logits of others go."""
        num_inputs = self._matrices[name].shape[1]
        self._write_linears(_Rows(self._rows(f"given {num_inputs}", num_inputs)), {name: None})

    def linears(self, x: _Rows, names: tuple[str, ...], norm: str | None) -> tuple[_Rows, ...]:
        outputs = {name: self._rows(name.rsplit(".", 1)[-1], self._matrices[name].shape[0]) for name in names}
        self._write_linears(x, outputs, norm)
        return tuple(map(_Rows, outputs.values()))

    def rotate(self, layer: Layer, q: _Rows, k: _Rows | None) -> tuple[_Rows, _Rows | None]:
        for rows, part in ((q, "q_norm"), (k, "k_norm")):
            if layer.attention.norm == "row" and rows:
                heads = layer.attention.heads if rows is q else layer.attention.kv_heads
                self._norm(rows.numbers, layer.weight(part), heads * layer.attention.dims)
        return q, k

    def _norm(self, rows: F32, name: str, features: int) -> None:
        """Write an RMS norm in place."""
        operands = {"rows": _at(rows), "stride": rows.strides[0], "weight": _at(self._vectors[name]), "features": features}
        self.operations.append(("norm", operands | {"eps": self._config.norm_eps}))

    def append(self, layer: Layer, k: _Rows, v: _Rows) -> None:
        self._rotate(layer, None, k, v)

    def _rotate(self, layer: Layer, q: _Rows | None, k: _Rows | None, v: _Rows | None) -> None:
        """Rotate queries, if there are any, and keys, and append keys and values, if the layer keeps some."""
        mixer = layer.attention
        norms = self._vectors if mixer.norm == "head" else {}  # `rotate` has written those of rows
        operands = {
            "heads": mixer.heads if q else 0, "key_dims": mixer.dims, "value_dims": mixer.value_dims,
            **self._kv_places.of(layer)._asdict(), "eps": self._config.norm_eps, "scale": mixer.scale,
            "rotation": self._rotation(mixer.rope, mixer.dims),
            "q_rotation": self._rotation(mixer.query_rope if q else None, mixer.dims),
            "norm_last": mixer.rotates_first,
            "append": kv_rows.append_kernel(self._kv_format.name), "hadamard": hadamard_size(self._kv_format, mixer.dims),
            "v_hadamard": hadamard_size(self._kv_format, mixer.value_dims),
            "centres": _at(self._centres.get(layer.index)),
        }  # fmt: skip
        if k:
            copies, values, ones = v is k, v.numbers if v else None, self._rows("ones", mixer.value_dims, 1)
            ones[:] = 1
            if copies:
                values = self._rows("v", mixer.kv_heads * mixer.value_dims)
            operands |= {
                "kv_heads": mixer.kv_heads, "keys": _at(k.numbers), "k_stride": k.numbers.strides[0],
                "k_norm": _at(norms.get(layer.weight("k_norm"))), "values": _at(values),
                "v_stride": 0 if values is None else values.strides[0],
                "v_norm": _at(ones) if mixer.value_norm else 0, "copies": copies,
            }  # fmt: skip
        if q:
            operands |= {"queries": _at(q.numbers), "q_stride": q.numbers.strides[0]}
            operands["q_norm"] = _at(norms.get(layer.weight("q_norm")))
        self.operations.append(("rotate", operands))

    def _rotation(self, rope: Rope | None, dims: int) -> int:
        """The number of a table of cosines and sines."""
        if rope is None:
            return layout.NO_ROTATION
        if (rope, dims) not in self.ropes:
            assert len(self.ropes) < layout.NUM_ROTATIONS, "keys of two kinds of layers, and their queries"
            self.ropes.append((rope, dims))
        return self.ropes.index((rope, dims))

    def absorb(self, layer: Layer, plain: _Rows, turned: _Rows, latent: _Rows, k_turned: _Rows) -> tuple[_Rows, _Rows]:
        mixer, facts = layer.attention, layer.attention.latent
        assert facts, "the layer has it"
        vectors = self._by_head(layer, "k_b", plain, 4 * facts.plain)
        queries, keys = self._rows("latent queries", mixer.heads * mixer.dims), self._rows("latent keys", mixer.dims)
        rows = {
            "vectors": vectors, "turned": turned.numbers, "latent": latent.numbers, "k_turned": k_turned.numbers,
            "queries": queries, "keys": keys,
        }  # fmt: skip
        strides = {"queries": "q_stride", "keys": "k_stride"}
        operands: dict[str, float] = {name: _at(room) for name, room in rows.items()}
        operands |= {strides.get(name, f"{name}_stride"): room.strides[0] for name, room in rows.items()}
        operands |= {"heads": mixer.heads, "rank": facts.rank, "turns": facts.turned, "eps": self._config.norm_eps}
        self.operations.append(("latent", operands | {"weight": _at(self._vectors[layer.weight("latent_norm")])}))
        return _Rows(queries), _Rows(keys)

    def expand(self, layer: Layer, mixed: _Rows) -> _Rows:
        facts = layer.attention.latent
        assert facts, "the layer has it"
        if self._value_places is None:
            self._value_places = np.array(facts.value_places, np.int32)
        return _Rows(self._by_head(layer, "v_b", mixed, 4 * facts.dims, self._value_places))

    def _by_head(self, layer: Layer, part: str, x: _Rows, apart: int, order: I32 | None = None) -> F32:
        """The product of each head's numbers, `apart` bytes from those of the next, with its matrix. order: of its inputs there."""
        name = layer.weight(part)
        heads, num_rows, features = self._matrices[name].shape
        out, kind = self._rows(part, heads * num_rows), self._order(name)
        if kind not in self._inputs_of_heads:
            latent = layer.attention.latent
            assert latent, "the layer has it"
            widest = max(latent.plain, latent.rank)
            self._inputs_of_heads |= _room_for_inputs(self._max_rows * heads + products.BLOCK_ROWS, widest, [kind])
        inputs = self._inputs_of_heads[kind]
        prepare = self._prepare(x, None, features, {kind: inputs}) | {"heads": heads, "apart": apart, "order": _at(order)}
        tensor = self._tensor(name, kind, inputs, out) | {"apart": 4 * num_rows}
        product = {"num_tensors": 1, "features": features, "heads": heads, "tensors": [tensor]}
        self.operations += [("prepare", prepare), ("linear", product)]
        return out

    def attention(self, layer: Layer, q: _Rows, k: _Rows | None, v: _Rows | None) -> _Rows:
        mixer = layer.attention
        self._rotate(layer, q, k, v)
        value_dims = mixer.mixed_dims
        out, kv_format = self._rows("attention", mixer.heads * value_dims), self._kv_format.name
        kernel, together = attention.attend_kernel, attention.QUERIES
        if self.of_prompts and mixer.dims % 2 == 0:
            kernel, together = attention_bf16.attend_kernel, MAX_QUERIES
        address = kernel(kv_format, mixer.window is not None, mixer.softcap > 0)
        if mixer.latent:
            address, together = latent.attend_kernel(kv_format, mixer.latent.turned), attention.QUERIES
        attend = {
            "heads": mixer.heads, "kv_heads": mixer.kv_heads, "key_dims": mixer.dims, "value_dims": value_dims,
            **self._kv_places.of(layer)._asdict(), "plan": self._plans.number(layer),
            "queries": _at(q.numbers), "stride": q.numbers.strides[0], "out": _at(out), "out_stride": out.strides[0],
            "kernel": address, "together": together,
            "partials_at": attention.partials_offset(kv_format, mixer.dims, value_dims),
            "partial_bytes": attention.partial_bytes(kv_format, value_dims),
            "window": mixer.window or 0, "cap": mixer.softcap, "hadamard": hadamard_size(self._kv_format, value_dims),
            "sinks": _at(self._vectors[layer.weight("sinks")]) if mixer.sinks else 0,
        }  # fmt: skip
        self.operations.append(("attend", attend))
        return _Rows(out)

    def convolve(self, layer: Layer, x: _Rows) -> _Rows:
        return self._convolve(layer, x)

    def short_conv(self, layer: Layer, b: _Rows, c: _Rows, x: _Rows) -> _Rows:
        return self._convolve(layer, x, b.numbers, c.numbers)

    def _convolve(self, layer: Layer, x: _Rows, factors: F32 | None = None, outer: F32 | None = None) -> _Rows:
        mixer, recurrent = layer.recurrent, self._recurrent
        assert mixer, "the layer has a state"
        assert recurrent, "and the model has memory for it"
        name, out = layer.weight(mixer.convolution), self._rows("convolved", mixer.channels)
        weights = self._vectors[name]
        operands = {
            "rows": _at(x.numbers), "stride": x.numbers.strides[0], "factors": _at(factors), "outer": _at(outer),
            "weights": _at(weights), "bias": _at(self._vectors.get(name + "_bias")), "out": _at(out), "out_stride": out.strides[0],
            "channels": weights.shape[1], "taps": mixer.taps, "inputs_at": recurrent.inputs_at(layer), "ring": inputs_kept(mixer),
        }  # fmt: skip
        self.operations.append(("convolve", operands))
        return _Rows(out)

    def mamba2(self, layer: Layer, xbc: _Rows, dt: _Rows, z: _Rows) -> _Rows:
        mixer, vectors = layer.recurrent, self._vectors
        assert isinstance(mixer, Mamba2), "the layer has one"
        decays, keys = self._rows("decays", mixer.value_heads), mixer.key_heads * mixer.key_dims
        rates, skip, norm = (vectors.get(layer.weight(f"ssm_{part}")) for part in ("a", "d", "norm"))
        starts = 0, mixer.inner, mixer.inner + keys
        out = self._recur(layer, mixer, xbc.numbers, starts, dt.numbers, decays, dt.numbers, rates, {"least": mixer.least_step})
        finish = {
            "rows": _at(out), "stride": out.strides[0], "values": _at(xbc.numbers), "values_stride": xbc.numbers.strides[0],
            "gate": _at(z.numbers), "gate_stride": z.numbers.strides[0], "skip": _at(skip), "weight": _at(norm),
            "weight_bytes": 4 * mixer.inner // mixer.key_heads, "features": mixer.inner, "groups": mixer.key_heads,
            "dims": mixer.value_dims, "eps": self._config.norm_eps,
        }  # fmt: skip
        self.operations.append(("finish", finish))
        return _Rows(out)

    def delta_net(self, layer: Layer, qkv: _Rows, beta: _Rows, alpha: _Rows) -> _Rows:
        mixer = layer.mixer
        assert isinstance(mixer, DeltaNet), "the layer is one"
        keys, values = mixer.key_heads * mixer.key_dims, mixer.value_heads * mixer.value_dims
        dt, rates, norm = (self._vectors[layer.weight(f"delta_{part}")] for part in ("dt", "decay", "norm"))
        others = {"dt": _at(dt), "corrects": 1, "tiled": mixer.tiled, "length_eps": LENGTH_EPS}
        starts = 2 * keys, keys, 0
        out = self._recur(layer, mixer, qkv.numbers, starts, alpha.numbers, alpha.numbers, beta.numbers, rates, others)
        finish = {
            "rows": _at(out), "stride": out.strides[0], "weight": _at(norm), "features": values, "groups": mixer.value_heads,
            "eps": self._config.norm_eps,
        }  # fmt: skip
        self.operations.append(("finish", finish))
        return _Rows(out)

    def _recur(
        self, layer: Layer, mixer: DeltaNet | Mamba2, rows: F32, starts: tuple[int, int, int], steps: F32, decays: F32,
        factors: F32, rates: F32 | None, others: dict[str, float],
    ) -> F32:  # fmt: skip
        """starts: of values, keys and queries in `rows`. The other arguments are those of `layout`."""
        assert self._recurrent, "the model has memory for the layer"
        out, (values, keys, queries) = self._rows("recurred", mixer.value_heads * mixer.value_dims), starts
        operands = {
            "values": _at(rows) + 4 * values, "keys": _at(rows) + 4 * keys, "queries": _at(rows) + 4 * queries,
            "stride": rows.strides[0], "steps": _at(steps), "steps_stride": steps.strides[0], "decays": _at(decays),
            "decays_stride": decays.strides[0], "factors": _at(factors), "factors_stride": factors.strides[0],
            "rates": _at(rates), "out": _at(out), "out_stride": out.strides[0], "key_heads": mixer.key_heads,
            "key_dims": mixer.key_dims, "value_heads": mixer.value_heads, "value_dims": mixer.value_dims,
            **self._recurrent.states_at(layer), **others,
        }  # fmt: skip
        self.operations += [("record", operands), ("recur", operands)]
        return out

    def gate(self, gate: _Rows, up: _Rows | None, activation: str) -> _Rows:
        return _Rows(gate.numbers, None if up is None else up.numbers, activation)

    def add(self, x: _Rows, branch: _Rows, name: str, norm: str | None, factor: str | None = None) -> _Rows:
        scale = self._config.residual_scale
        if norm is None and scale == 1 and factor is None:
            self._write_linears(branch, {name: x.numbers}, residual=True)
            return x
        out = self._rows("branch", self._config.hidden_size)
        self._write_linears(branch, {name: out})
        self._add(x.numbers, out, norm, scale, factor)
        return x

    def _add(self, rows: F32, branch: F32, norm: str | None, scale: float, factor: str | None) -> None:
        """Write rows = `factor` * (rows + scale * norm of branch), where each may be None for none."""
        operands = {
            "rows": _at(rows), "branch": _at(branch), "stride": branch.strides[0], "scale": scale,
            "weight": 0 if norm is None else _at(self._vectors[norm]), "parts": 1,
            "features": self._config.hidden_size, "eps": self._config.norm_eps,
            "after": 1.0 if factor is None else float(self._vectors[factor][0]),
        }  # fmt: skip
        self.operations.append(("add", operands))

    def experts(
        self,
        layer: Layer,
        x: _Rows,
        norm: str | None,
        shared: tuple[_Rows, _Rows | None] | None,
        norm_after: str | None,
        factor: str | None,
    ) -> _Rows:
        c, feed, weight, routing = self._config, layer.feed, layer.weight, self._routing
        assert feed, "the layer has it"
        assert feed.experts, "and experts in it"
        assert routing, "and the model"
        experts, inner = feed.experts, tuple(weight(f"expert_{part}") for part in (("gate", "up") if feed.gated else ("up",)))
        used, hidden, pairs = experts.used, c.hidden_size, routing.pairs
        router, names, down = weight("router"), inner, weight("expert_down")
        orders = {name: self._order(name) for name in (*names, down)}
        # Of each row the scores of experts, as much room for their ranks, and some for those of groups.
        scores = self._rows("router", 4 * _round_up(experts.count, GROUP))
        of_router, of_experts = {"f32": self._inputs["f32"]}, {orders[name]: self._inputs[orders[name]] for name in names}
        norm_of_router = weight("router_norm") if experts.normed_apart else norm
        prepared = of_router if experts.normed_apart else of_router | of_experts
        self.operations.append(("prepare", self._prepare(x, norm_of_router, hidden, prepared)))
        product = {"num_tensors": 1, "features": hidden}
        tensor = self._tensor(router, "f32", self._inputs["f32"], scores)
        self.operations.append(("linear", product | {"tensors": [tensor]}))
        num_bytes = sum(self._matrices[name].nbytes for name in orders) // experts.count
        shift = self._vectors.get(weight("router_shift"))
        route = {
            "logits": _at(scores), "stride": scores.strides[0], "factors": _at(routing.factors), "shift": _at(shift),
            "count": experts.count, "used": used, "score": ("softmax", "sigmoid", "chosen").index(experts.score),
            "normalised": experts.normalised, "groups": experts.groups, "groups_used": experts.groups_used, "bytes": num_bytes,
            "routed": _at(routing.routed), "scale": experts.scale, "least_sum": experts.least_sum,
            "weights": _at(self._vectors.get(weight("router_factors"))),
        }  # fmt: skip
        copies = [
            {
                "source": _at(self._inputs[order]), "to": _at(self._inputs_of_pairs[order]), "bytes": products.ORDERS[order],
                "apart": order in ("f32", "rounded"), "padded": order == "rounded",
            }
            for order in dict.fromkeys(orders[name] for name in names)
        ]  # fmt: skip
        gather = {"features": hidden, "used": used, "num_orders": len(copies), "orders": copies}
        self.operations.append(("route", route))
        if experts.normed_apart:
            self.operations.append(("prepare", self._prepare(x, norm, hidden, of_experts)))
        self.operations.append(("gather", gather))
        stored = self._matrices[down]
        if isinstance(stored, StoredTensor):
            route["table"] = _at(stored.table)
            self.cuts.append(len(self.operations))
            if not self.of_prompts and not self.adapts:
                self.stored.append((stored.layer, self._router(layer, x, norm_of_router)))
        outputs = {name: self._rows(name.rsplit(".", 1)[-1], experts.size, pairs) for name in names}
        tensors = [self._tensor(name, orders[name], self._inputs_of_pairs[orders[name]], out) for name, out in outputs.items()]
        for name, tensor in zip(names, tensors, strict=True):
            tensor["one_row"] = _at(self._inputs[orders[name]])
        self.operations.append(("linear", {"num_tensors": len(names), "features": hidden, "used": used, "tensors": tensors}))
        gate, *up = map(_Rows, outputs.values())
        inside = self.gate(gate, up[0] if up else None, feed.activation)
        of_down = self._inputs_of_pairs[orders[down]]
        self.operations.append(("prepare", self._prepare(inside, None, experts.size, {orders[down]: of_down}) | {"used": used}))
        out = self._rows("expert_down", hidden, pairs)
        tensors = [self._tensor(down, orders[down], of_down, out)]
        self.operations.append(("linear", {"num_tensors": 1, "features": experts.size, "used": used, "tensors": tensors}))
        if isinstance(stored, StoredTensor):
            self.cuts.append(len(self.operations))
        apart, scale = experts.normed_apart or norm_after is not None or factor is not None, c.residual_scale
        total = self._rows("branch", hidden) if apart else x.numbers
        combine = {
            "rows": _at(total), "stride": total.strides[0], "features": hidden, "factors": _at(routing.factors), "used": used,
            "outputs": _at(out), "outputs_stride": out.strides[0], "scale": 1.0 if apart else scale, "adds": not apart,
        }  # fmt: skip
        if shared:
            common = self._rows("shared_down", hidden)
            self._write_linears(shared[0], {weight("shared_down"): common})
            if not experts.normed_apart:
                combine |= {"shared": _at(common), "shared_stride": common.strides[0]}
            if shared[1]:
                combine |= {"weights": _at(shared[1].numbers), "weights_stride": shared[1].numbers.strides[0]}
        self.operations.append(("combine", combine))
        if experts.normed_apart:
            self._norm(common, weight("shared_post_norm"), hidden)
            self._add(common, total, weight("expert_post_norm"), 1.0, None)
            total = common
        if apart:
            self._add(x.numbers, total, norm_after, scale, factor)
        return x

    def _router(self, layer: Layer, x: _Rows, norm: str | None) -> Router:
        """What it takes to guess a layer's experts before its rows are there."""
        experts, matrix = layer.feed and layer.feed.experts, self._matrices[layer.weight("router")]
        assert experts, "the layer has them"
        assert isinstance(matrix, PackedTensor), "a router stays in memory"
        weights = None if norm is None else self._vectors[norm]
        bias, shift = (self._vectors.get(layer.weight(part)) for part in ("router_bias", "router_shift"))
        return Router(experts, x.numbers, weights, self._config.norm_eps, unpack(matrix).dequantize(), bias, shift)

    def keep(self, layer: Layer, x: _Rows) -> None:
        operands = {"rows": _at(x.numbers), "stride": x.numbers.strides[0], "layer": layer.index}
        self.operations.append(("keep", operands | {"row_bytes": 4 * self._config.hidden_size}))

    def logits(self, x: _Rows, name: str, norm: str | None) -> _Rows:
        self._write_linears(x, {name: None}, norm, cap=self._config.logit_softcap)
        tiles = self._matrices[name].num_tiles
        self.operations.append(("pick", {"tiles": tiles, "stride": 4 * TILE * tiles}))
        return x

    def _write_linears(
        self, x: _Rows, outputs: Mapping[str, F32 | None], norm: str | None = None, residual: bool = False, cap: float = 0.0
    ) -> None:
        """Prepare rows, once for all matrices that want them in the same order, and multiply them. No output: the logits.
        residual: add to the output. cap: of logits.
        """
        by_order: dict[bytes, dict[str, F32 | None]] = {}
        for name, out in outputs.items():
            order = self._orders.get(name)
            by_order.setdefault(b"" if order is None else order.tobytes(), {})[name] = out
        for some in by_order.values():
            self._write_linears_of_one_order(x, some, norm, residual, cap)

    def _write_linears_of_one_order(
        self, x: _Rows, outputs: Mapping[str, F32 | None], norm: str | None, residual: bool, cap: float
    ) -> None:
        shape, logits = self._matrices[next(iter(outputs))].shape, any(out is None for out in outputs.values())
        orders = {name: self._order(name, logits) for name in outputs}
        adapts = self.adapts and not logits
        wanted = {*orders.values(), "f32"} if adapts else orders.values()
        prepare = self._prepare(x, norm, shape[1], {order: self._inputs[order] for order in wanted})
        prepare |= {"order": _at(self._orders.get(next(iter(outputs)))), "select": logits}
        tensors = [
            self._tensor(name, orders[name], self._inputs[orders[name]], out) | {"residual": _at(out) if residual else 0}
            for name, out in outputs.items()
        ]
        product = {"num_tensors": len(tensors), "features": shape[1], "tensors": tensors}
        if logits:
            product |= {"vocab": shape[0], "cap": cap}
        self.operations += [("prepare", prepare), ("linear", product)]
        if adapts:
            changed = [
                {"number": self.adapted.setdefault(name, len(self.adapted)), **{key: tensor[key] for key in _RESULTS}}
                for name, tensor in zip(outputs, tensors, strict=True)
            ]
            of_adapters = {
                "features": shape[1], "inputs": _at(self._inputs["f32"]), "row_bytes": products.row_bytes("f32", shape[1]),
                "num_tensors": len(changed), "tensors": changed,
            }  # fmt: skip
            self.num_partials = max(self.num_partials, len(changed) * -(-shape[1] // adapters.CHUNK))
            self.operations += [("shrink", of_adapters), ("expand", of_adapters)]

    def _order(self, name: str, logits: bool = False) -> str:
        """The order in which a matrix wants its activations."""
        order_of = linear.prompt_order if self.of_prompts and not logits else linear.activation_order
        return order_of(self._matrices[name].format.name, _is_precise(self._config, name))

    def _prepare(self, x: _Rows, norm: str | None, features: int, to: Mapping[str, U8]) -> dict[str, Any]:
        """Rows to activations. to: where they go, by their order."""
        c, kind, other = self._config, pointwise.PLAIN if norm is None else pointwise.NORM, x.up
        if x.activation:
            kinds = {
                "silu": (pointwise.SILU, pointwise.SILU_ALONE), "gelu_tanh": (pointwise.GELU, pointwise.GELU_ALONE),
                "swiglu_oai": (pointwise.SWIGLU_OAI, pointwise.PLAIN), "sigmoid": (pointwise.SIGMOID, pointwise.PLAIN),
                "relu2": (pointwise.RELU2, pointwise.RELU2_ALONE),
            }  # fmt: skip
            kind = kinds[x.activation][x.up is None]
        elif norm is not None and c.norm_kind == "layer":
            kind = pointwise.LAYER_NORM
            other = self._vectors[norm + "_bias"] if c.norm_bias else self._rows("no bias", features, 1)
        return {
            "kind": kind, "rows": _at(x.numbers), "other": _at(other), "stride": x.numbers.strides[0], "eps": c.norm_eps,
            "other_stride": 0 if other is None or kind == pointwise.LAYER_NORM else other.strides[0],
            "weight": 0 if norm is None else _at(self._vectors[norm]), "features": features,
            **{order: _at(room) for order, room in to.items()},
        }  # fmt: skip

    def _tensor(self, name: str, order: str, inputs: U8, out: F32 | None) -> dict[str, Any]:
        """A matrix, or those of experts, of a "linear" operation. out: None for the logits."""
        matrix, bias = self._matrices[name], self._vectors.get(name + "_bias")
        if isinstance(matrix, StoredTensor):
            where = {"table": _at(matrix.table)}
        else:
            where = {"tiles": _at(matrix.data), "copies_apart": matrix.copies_apart}
        return where | {
            "kernel": linear.linear_kernel(matrix.format.name, order), "tile_bytes": matrix.tile_bytes,
            "num_tiles": matrix.num_tiles, "inputs": _at(inputs), "row_bytes": products.row_bytes(order, matrix.shape[-1]),
            "bias": _at(bias), "bias_bytes": 0 if bias is None else bias.strides[0], "out": _at(out),
            "stride": 4 * TILE * matrix.num_tiles if out is None else out.strides[0],
        }  # fmt: skip

    def _rows(self, part: str, features: int, num_rows: int = 0) -> F32:
        """Room for `max_rows` rows (or `num_rows`) of a part of a layer, zeroed, each padded to whole groups. Layers share it, if
        they have the part in one size.
        """
        if self._sizes.setdefault(part, features) != features:
            part = f"{part} of {features}"
        if part not in self.rooms:
            room = aligned_bytes((num_rows or self._max_rows, 4 * _round_up(features, GROUP))).view(np.float32)
            room[:] = 0
            self.rooms[part] = room
        return self.rooms[part]


def _state_access(recurrent: RecurrentLayers) -> StateAccess:
    """The states of recurrent layers in a `_Storage`."""

    def memory_of(storage: _Storage) -> RecurrentMemory:
        assert storage.recurrent, "the model has recurrent layers"
        return storage.recurrent

    return StateAccess(
        recurrent.snapshot_bytes,
        lambda storage, length: length if memory_of(storage).folded <= length else 0,
        lambda storage, length, states: recurrent.take(memory_of(storage), length, states),
        lambda storage, states, length: recurrent.put(memory_of(storage), length, states),
    )


def _prompt_arithmetic(asked: str, config: ModelConfig) -> str:
    """In what tokens of prompts are computed. Heads read rows of their own, and no prompts. Raises BackendError."""
    if asked == "bf16" and not isa.has_bf16_dots():
        raise BackendError(
            f"prompt_arithmetic bf16 needs a processor with products of bf16 (AVX-512 BF16 or AMX), and this one has "
            f"{isa.describe()}; leave it at auto, or take codes"
        )
    wanted = asked == "bf16" or (asked == "auto" and isa.has_bf16_tiles())
    return "bf16" if wanted and config.head is None else "codes"


def _identity(config: ModelConfig, kv_format: str, prompt_arithmetic: str, tensors: Mapping[str, WeightTensor]) -> str:
    """A hash of everything that the bits of keys and values depend on besides the tokens."""
    sources = [sources_digest(Path(file).parent) for file in (__file__, model.__file__)]
    weights = [(name, tensor.format.name, tensor.shape, _weights_of(tensor)) for name, tensor in tensors.items()]
    versions = machine_code.fingerprint(), sources, np.__version__, sys.byteorder
    facts = (*versions, repr(config), kv_format, prompt_arithmetic, weights)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _weights_of(tensor: WeightTensor) -> tuple[object, ...]:
    """The place of a tensor in a file with such contents, or a hash of its bytes."""
    source = tensor.source if isinstance(tensor, Cast) else tensor
    if source.parts:
        return tuple(fact for part in source.parts for fact in _weights_of(part))
    data = source.data.reshape(-1)
    order = () if source.order is None else (content_hash(source.order.view(np.uint8)),)
    return source.format.name, *(place_in_file(data) or (content_hash(data),)), *order


def _is_precise(config: ModelConfig, name: str) -> bool:
    """Whether a matrix reads 16-bit activations: the logits', those that read a target's raw outputs, all of a head without layers,
    those of a recurrent layer's decays and updates, whose errors stay in its state, and in small models the values' and the MLP's
    last, where 8 bits cost most (SmolLM2-135M over 512 tokens: mean KL 0.95e-3 without, 0.52e-3 with them; a larger model needs
    neither).
    """
    if config.head and config.head.fuses == "alone":
        return True
    return (
        name in ("output", "encode", "fuse", "back")
        or name.endswith((".delta_beta", ".delta_alpha"))
        or (config.hidden_size < _SMALL and name.endswith((".v", ".down", "_down")))
    )


def _room_for_inputs(rows: int, features: int, orders: Iterable[str] = products.ORDERS) -> dict[str, U8]:
    """Room for activations in each order: whole blocks of rows, and whole vectors of the last block."""
    groups = _round_up(rows, products.BLOCK_ROWS) * _round_up(features, GROUP) // GROUP + 1
    return {order: aligned_bytes((groups * products.ORDERS[order],)) for order in orders}


def _at(array: NDArray[np.generic] | None) -> int:
    return 0 if array is None else array.ctypes.data


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


def _rest(length: int) -> I32:
    """Indices from `length` on that fill up the last group."""
    return np.arange(length, _round_up(length, GROUP), dtype=np.int32)


def _padded(tensor: WeightTensor, by_tap: bool = False) -> F32:
    """A vector in f32, or one of each expert, padded with zeros to whole groups. by_tap: of a convolution's weights, one a tap."""
    values = np.ascontiguousarray(tensor.dequantize().T) if by_tap else tensor.dequantize()
    return np.pad(values, (*[(0, 0)] * (values.ndim - 1), (0, -values.shape[-1] % GROUP))).astype(np.float32)

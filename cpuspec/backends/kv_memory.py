"""Where a cache slot of the compiled backend keeps the keys and values of each layer, and how they are copied and lent as blocks.

A slot is [kind of head][head][chunk] (`kernels.kv_rows`): heads whose keys and values are as long as each other's, and whose
layers see as much, lie together.

In a cache that is much longer than its window, a layer keeps only its last rows. Chunks that no later row can see are given back to
the system; the others keep their addresses, so kernels and bits are the same. The prefix cache treats these rows as states
(`WindowRows`): a snapshot has the rows that the next row sees.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cpuspec.backends.recurrent_memory import RecurrentLayers
from cpuspec.config import ModelConfig
from cpuspec.formats import Format
from cpuspec.formats.packing import commit, decommit
from cpuspec.formats.tensor import U8
from cpuspec.kernels import kv_rows
from cpuspec.kernels.simd import LANES
from cpuspec.layers import Layer, keeping_layers
from cpuspec.model.batch import I32
from cpuspec.model.cache import SlotBytes
from cpuspec.platform import SYSTEM

SLACK = kv_rows.CHUNK  # tokens before a forward, to which a slot can be truncated after it: what draft models take back
_STEPS = kv_rows.CHUNK // LANES
_APART = 8  # windows between two snapshots of a long prompt

# A head's cache has small pages up to here, since each huge one is zeroed whole. Behind it huge pages save a long context 3 to 6 %
# of its time (benchmarks/DECISIONS.md#huge-pages). Layers with windows keep small pages, since they give back one chunk at a time.
_SMALL_PAGES_CHUNKS = 16

Memory = tuple[U8, ...]  # of a slot: [heads, bytes] for each kind


class Place(NamedTuple):
    """Of a layer: the bytes of a chunk of all heads before its own, and of a chunk of one of its heads."""

    cache_at: int
    chunk_bytes: int


@dataclass
class _Kind:
    key_dims: int
    value_dims: int
    chunk_bytes: int
    window: int  # 0 for none
    heads: int = 0

    def first_chunk(self, length: int) -> int:
        """The first chunk that the row after `length` tokens sees."""
        return max(0, length + 1 - self.window) // kv_rows.CHUNK if self.window else 0

    def first_step(self, length: Any) -> Any:
        """The first step of LANES rows of a snapshot of `length` tokens, a number or an array.

        It is one step before those that the next row sees: a prompt that is cached as a whole is fed its last token again.
        """
        return np.maximum(0, (length + 1 - self.window) // LANES - 1)


class KVPlaces:
    """The places of layers with attention. chunk_bytes: of a chunk of all heads; bytes_per_token: of all keys and values."""

    def __init__(self, layers: Sequence[Layer], format: Format) -> None:
        self.format = format.name
        kinds: dict[tuple[int, int, int], _Kind] = {}
        first: list[tuple[_Kind, int]] = []  # of each layer that keeps keys and values, in order: the heads before it
        for layer in layers:
            dims, window = (layer.attention.dims, layer.attention.value_dims), layer.attention.window or 0
            kind = kinds.setdefault((*dims, window), _Kind(*dims, kv_rows.chunk_bytes(format.name, *dims), window))
            first.append((kind, kind.heads))
            kind.heads += layer.attention.kv_heads
        self.kinds, starts = list(kinds.values()), dict[int, int]()
        self.chunk_bytes = 0
        for kind in self.kinds:
            starts[id(kind)] = self.chunk_bytes
            self.chunk_bytes += kind.heads * kind.chunk_bytes
        self._places = [Place(starts[id(kind)] + heads * kind.chunk_bytes, kind.chunk_bytes) for kind, heads in first]
        self.bytes_per_token = self.chunk_bytes // kv_rows.CHUNK

    def of(self, layer: Layer) -> Place:
        """The place of a layer's keys and values."""
        return self._places[layer.state_index]

    def memory(self, slot: U8, num_chunks: int) -> Memory:
        """The parts of a slot's memory."""
        parts, at = [], 0
        for kind in self.kinds:
            size = num_chunks * kind.chunk_bytes
            parts.append(slot[at : at + kind.heads * size].reshape(kind.heads, size))
            at += kind.heads * size
        return tuple(parts)

    def commit(self, memory: Memory, first: int, last: int) -> None:
        """Let chunks first..last of each head be used. Raises MemoryError."""
        for kind, heads in zip(self.kinds, memory, strict=True):
            for head in heads:
                if first <= _SMALL_PAGES_CHUNKS < last and not kind.window:
                    later = head[_SMALL_PAGES_CHUNKS * kind.chunk_bytes :]
                    SYSTEM.prefer_huge_pages(later.ctypes.data, later.nbytes)
                commit(head[first * kind.chunk_bytes : last * kind.chunk_bytes])

    def copy_rows(self, memory: Memory, rows: I32, first: int) -> None:
        """Copy keys and values from rising indices `rows` to `first` and following."""
        for kind, heads in zip(self.kinds, memory, strict=True):
            kv_rows.copy_rows(self.format, kind.key_dims, kind.value_dims, heads, rows, first)

    def copy_prefix(self, source: Memory, target: Memory, length: int, but: Collection[int] = ()) -> None:
        """Copy the chunks that hold the first `length` keys and values. but: numbers of kinds that are left out."""
        for number, (kind, ours, theirs) in enumerate(zip(self.kinds, target, source, strict=True)):
            if number in but:
                continue
            used = kv_rows.num_chunks(length) * kind.chunk_bytes
            ours[:, :used] = theirs[:, :used]

    def views(self, memory: Memory, number: int, but: Collection[int] = ()) -> tuple[U8, ...]:
        """Keys, then values, of a chunk of each kind, as `BlockAccess` has them. but: numbers of kinds that are left out."""
        found: list[U8] = []
        for n, (kind, heads) in enumerate(zip(self.kinds, memory, strict=True)):
            if n in but:
                continue
            chunk = heads[:, number * kind.chunk_bytes :][:, : kind.chunk_bytes]
            keys = kv_rows.chunk_bytes(self.format, kind.key_dims, 0)
            found += [chunk[:, :keys], *([chunk[:, keys:]] if kind.value_dims else [])]
        return tuple(found)


class WindowRows:
    """The layers of a cache that keep only their last rows, because their window is much shorter. False if there are none.

    A slot has all rows that the row after its first `least` tokens sees. kinds: the numbers of the layers' kinds in `KVPlaces`.
    apart, most_bytes: `apart` and `num_bytes` of `StateAccess`.
    """

    def __init__(self, places: KVPlaces, config: ModelConfig, capacity: int) -> None:
        """There are none in heads and in models with recurrent layers, whose states are truncated and saved in other ways."""
        self._places = places
        rows = {n: kind.window + SLACK + kv_rows.CHUNK for n, kind in enumerate(places.kinds) if kind.window}
        has_none = config.head is not None or config.is_recurrent
        self._rows = {} if has_none else {n: kept for n, kept in rows.items() if kept < capacity}
        self.kinds = list(self._rows)
        windows = [places.kinds[n].window for n in self.kinds]
        self.apart = _APART * max(windows, default=0)
        self.most_bytes = int(np.max(self.bytes_at(np.arange(max(windows, default=0) + 2 * kv_rows.CHUNK))))

    def __bool__(self) -> bool:
        return bool(self.kinds)

    def sizes(self, per_slot: int) -> SlotBytes:
        """The bytes of a slot. per_slot: of other states."""
        rows = {n: self._places.kinds[n].heads * self._places.kinds[n].chunk_bytes // kv_rows.CHUNK for n in self.kinds}
        windows = tuple((self._rows[n], size) for n, size in rows.items())
        return SlotBytes(self._places.bytes_per_token - sum(rows.values()), per_slot, windows)

    def give_back(self, memory: Memory, before: int, least: int) -> None:
        """Give back the rows that no row after `least` tokens sees. before: the `least` of the call before."""
        for kind, heads in self._of(memory):
            first, last = kind.first_chunk(before), kind.first_chunk(least)
            if first < last:
                # The first page may hold the end of the chunk before, which is given back already.
                first -= first > 0
                for head in heads:
                    decommit(head[first * kind.chunk_bytes : last * kind.chunk_bytes])

    def clear(self, memory: Memory, num_chunks: int) -> None:
        """Give back all rows of a slot of `num_chunks` chunks."""
        for kind, heads in self._of(memory):
            for head in heads:
                decommit(head[: num_chunks * kind.chunk_bytes])

    def bytes_at(self, length: Any) -> Any:
        """Bytes of a snapshot of `length` tokens, a number or an array."""
        found = 0 * length
        for n in self.kinds:
            kind = self._places.kinds[n]
            steps = -(-length // LANES) - kind.first_step(length)
            found = found + steps * (kind.heads * kind.chunk_bytes * LANES // kv_rows.CHUNK)
        return found

    def least(self, length: int) -> int:
        """The least length that a slot can be truncated to after `restore` of a snapshot of `length` tokens."""
        firsts = [(int(kind.first_step(length)), kind.window) for kind in (self._places.kinds[n] for n in self.kinds)]
        return max(first and first * LANES + window - 1 for first, window in firsts)

    def save(self, memory: Memory, length: int, snapshot: U8) -> None:
        """Copy the rows from `first_step` to `length` tokens, in whole steps of LANES, to U8 [bytes_at(length)]."""
        for part, rows in self._parts(memory, length, snapshot):
            part[:] = rows

    def restore(self, memory: Memory, length: int, snapshot: U8) -> None:
        """Copy them back."""
        for part, rows in self._parts(memory, length, snapshot):
            rows[:] = part

    def _of(self, memory: Memory) -> Iterator[tuple[_Kind, U8]]:
        return ((self._places.kinds[n], memory[n]) for n in self.kinds)

    def _parts(self, memory: Memory, length: int, snapshot: U8) -> Iterator[tuple[U8, U8]]:
        """Keys, then values, of each chunk, and their part of a snapshot, [heads, bytes]."""
        at = 0
        for kind, heads in self._of(memory):
            keys = kv_rows.chunk_bytes(self._places.format, kind.key_dims, 0)
            first, last = int(kind.first_step(length)), -(-length // LANES)
            for chunk in range(first // _STEPS, kv_rows.num_chunks(length)):
                start, end = max(first - chunk * _STEPS, 0), min(last - chunk * _STEPS, _STEPS)
                for of_chunk, size in ((0, keys // _STEPS), (keys, (kind.chunk_bytes - keys) // _STEPS)):
                    begin = chunk * kind.chunk_bytes + of_chunk
                    rows = heads[:, begin + start * size : begin + end * size]
                    yield snapshot[at : at + rows.size].reshape(rows.shape), rows
                    at += rows.size


def slot_bytes(config: ModelConfig, format: Format, capacity: int) -> SlotBytes:
    """The bytes of a slot for up to `capacity` tokens of a model."""
    return WindowRows(KVPlaces(keeping_layers(config), format), config, capacity).sizes(RecurrentLayers(config, 1).num_bytes)

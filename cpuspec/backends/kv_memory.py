"""Where a cache slot of the compiled backend keeps the keys and values of each layer, and how they are copied and lent as blocks.

A slot is [kind of head][head][chunk] (`kernels.kv_rows`): heads whose keys and values are as long as each other's lie together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cpuspec.formats import Format
from cpuspec.formats.packing import commit
from cpuspec.formats.tensor import U8
from cpuspec.kernels import kv_rows
from cpuspec.layers import Layer
from cpuspec.model.batch import I32

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
    heads: int = 0


class KVPlaces:
    """The places of layers with attention. chunk_bytes: of a chunk of all heads; bytes_per_token: of all keys and values."""

    def __init__(self, layers: Sequence[Layer], format: Format) -> None:
        self._format = format.name
        kinds: dict[tuple[int, int], _Kind] = {}
        first: list[tuple[_Kind, int]] = []  # of each layer that keeps keys and values, in order: the heads before it
        for layer in layers:
            dims = layer.attention.dims, layer.attention.value_dims
            kind = kinds.setdefault(dims, _Kind(*dims, kv_rows.chunk_bytes(format.name, *dims)))
            first.append((kind, kind.heads))
            kind.heads += layer.attention.kv_heads
        self._kinds, starts = list(kinds.values()), dict[int, int]()
        self.chunk_bytes = 0
        for kind in self._kinds:
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
        for kind in self._kinds:
            size = num_chunks * kind.chunk_bytes
            parts.append(slot[at : at + kind.heads * size].reshape(kind.heads, size))
            at += kind.heads * size
        return tuple(parts)

    def commit(self, memory: Memory, first: int, last: int) -> None:
        """Let chunks first..last of each head be used. Raises MemoryError."""
        for kind, heads in zip(self._kinds, memory, strict=True):
            for head in heads:
                commit(head[first * kind.chunk_bytes : last * kind.chunk_bytes])

    def copy_rows(self, memory: Memory, rows: I32, first: int) -> None:
        """Copy keys and values from rising indices `rows` to `first` and following."""
        for kind, heads in zip(self._kinds, memory, strict=True):
            kv_rows.copy_rows(self._format, kind.key_dims, kind.value_dims, heads, rows, first)

    def copy_prefix(self, source: Memory, target: Memory, length: int) -> None:
        """Copy the chunks that hold the first `length` keys and values."""
        for kind, ours, theirs in zip(self._kinds, target, source, strict=True):
            used = kv_rows.num_chunks(length) * kind.chunk_bytes
            ours[:, :used] = theirs[:, :used]

    def views(self, memory: Memory, number: int) -> tuple[U8, ...]:
        """Keys, then values, of a chunk of each kind, as `BlockAccess` has them."""
        found: list[U8] = []
        for kind, heads in zip(self._kinds, memory, strict=True):
            chunk = heads[:, number * kind.chunk_bytes :][:, : kind.chunk_bytes]
            keys = kv_rows.chunk_bytes(self._format, kind.key_dims, 0)
            found += [chunk[:, :keys], *([chunk[:, keys:]] if kind.value_dims else [])]
        return tuple(found)

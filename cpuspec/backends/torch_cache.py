"""Keys and values as torch tensors, in the KV formats of `formats.kv` and rounded to the same bits, on whatever device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from cpuspec.errors import CacheError
from cpuspec.formats.kv import GROUP, INT4_GROUP, LANES
from cpuspec.model.batch import I32
from cpuspec.model.recurrence import RecurrentState

_SMALLEST = 256  # tokens that the first allocation of a slot holds


@dataclass(frozen=True)
class KVLayout:
    """How rows of keys or values lie in tensors.

    widths: dimensions of a head -> (numbers, dtype) of each plane; encode: F32 [..., D] -> planes; decode: planes, D -> F32.
    """

    widths: Callable[[int], tuple[tuple[int, torch.dtype], ...]]
    encode: Callable[[Tensor], tuple[Tensor, ...]]
    decode: Callable[[tuple[Tensor, ...], int], Tensor]

    def row_bytes(self, dims: int) -> int:
        """Bytes of a key, or of a value, of a head of `dims` dimensions."""
        return sum(width * dtype.itemsize for width, dtype in self.widths(dims))


def _floats(dtype: torch.dtype) -> KVLayout:
    return KVLayout(lambda dims: ((dims, dtype),), lambda rows: (rows.to(dtype),), lambda planes, _: planes[0].to(torch.float32))


def _encode_int8(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `formats.kv.encode_int8`: codes -127..127 around the middle of each group's range, d and m rounded first."""
    groups = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    m = (groups.amin(-1) * 0.5 + groups.amax(-1) * 0.5).to(torch.float16)
    centred = groups - m.to(torch.float32)[..., None]
    d = (centred.abs().amax(-1) / 127).to(torch.float16)
    inverse = torch.where(d > 0, 1 / d.to(torch.float32), 0)[..., None]
    codes = torch.nan_to_num(torch.round(centred * inverse).clamp(-127, 127)).to(torch.int8)
    return codes.flatten(-2), d, m


def _encode_int4(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `formats.kv.encode_int4`: codes 0..15 from each group's minimum m to its maximum, d and m rounded first."""
    groups = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % INT4_GROUP)).unflatten(-1, (-1, INT4_GROUP))
    m = groups.amin(-1).to(torch.float16)
    above = groups - m.to(torch.float32)[..., None]
    d = (above.amax(-1) / 15).to(torch.float16)
    inverse = torch.where(d > 0, 1 / d.to(torch.float32), 0)[..., None]
    codes = torch.nan_to_num(torch.round(above * inverse).clamp(0, 15)).to(torch.uint8).unflatten(-1, (-1, 2, LANES))
    return (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(-3), d, m


def _decode_int4(planes: tuple[Tensor, ...], dims: int) -> Tensor:
    """d * code + m."""
    packed, d, m = planes
    packed = packed.unflatten(-1, (-1, 1, LANES))
    codes = torch.cat([packed & 0x0F, packed >> 4], dim=-2).flatten(-3).unflatten(-1, (-1, INT4_GROUP)).to(torch.float32)
    return (d.to(torch.float32)[..., None] * codes + m.to(torch.float32)[..., None]).flatten(-2)[..., :dims]


def _int4_widths(dims: int) -> tuple[tuple[int, torch.dtype], ...]:
    groups = -(-dims // INT4_GROUP)
    return (groups * INT4_GROUP // 2, torch.uint8), (groups, torch.float16), (groups, torch.float16)


def _decode_int8(planes: tuple[Tensor, ...], dims: int) -> Tensor:
    """d * code + m."""
    codes, d, m = (plane.to(torch.float32) for plane in planes)
    return (d[..., None] * codes.unflatten(-1, (-1, GROUP)) + m[..., None]).flatten(-2)[..., :dims]


def _int8_widths(dims: int) -> tuple[tuple[int, torch.dtype], ...]:
    groups = -(-dims // GROUP)
    return (groups * GROUP, torch.int8), (groups, torch.float16), (groups, torch.float16)


KV_LAYOUTS: Mapping[str, KVLayout] = MappingProxyType(
    {
        "f32": _floats(torch.float32),
        "f16": _floats(torch.float16),
        "bf16": _floats(torch.bfloat16),
        "int8": KVLayout(_int8_widths, _encode_int8, _decode_int8),
        "int4": KVLayout(_int4_widths, _encode_int4, _decode_int4),
    }
)


class Storage:
    """The keys and values of one cache slot, in planes [L, G, size, width] that grow by doubling as tokens come: for layers whose
    heads are alike, those of keys, and those of values.

    A device has no pages that are handed out when they are written, so a slot takes what it holds and not its whole capacity.
    """

    def __init__(self, layout: KVLayout, layers: Sequence[tuple[int, int, int]], capacity: int, device: torch.device) -> None:
        """layers: of each its heads, and the dimensions of a key and of a value."""
        self.layout, self.capacity, self.size = layout, capacity, 0
        self.states: list[RecurrentState] = []  # of layers without keys and values
        self._layers, kinds = list(layers), list(dict.fromkeys(layers))
        self._places = [(2 * kinds.index(one), layers[:i].count(one)) for i, one in enumerate(layers)]
        self._planes = [
            tuple(
                torch.zeros((layers.count(kind), kind[0], 0, width), dtype=dtype, device=device)
                for width, dtype in layout.widths(dims)
            )
            for kind in kinds
            for dims in kind[1:]
        ]

    def provide(self, length: int) -> bool:
        """Have room for `length` tokens; returns whether the tensors are new ones. Raises CacheError where there is no memory."""
        if length <= self.size:
            return False
        size = min(self.capacity, max(2 * self.size, _SMALLEST, length))
        try:
            # Zeros, and not what was there: nothing that is not finite may meet a weight of zero.
            grown = [tuple(p.new_zeros((*p.shape[:2], size, p.shape[3])) for p in planes) for planes in self._planes]
        except (RuntimeError, MemoryError):  # torch raises its own RuntimeErrors for memory, one kind for each device
            wanted = size * sum(heads * self.layout.row_bytes(dims) for heads, *both in self._layers for dims in both)
            raise CacheError(
                f"no memory for a cache slot of {size} tokens ({wanted} bytes); "
                "ask for a smaller context_length, fewer sequences or a KV format of fewer bits"
            ) from None
        for plane, old in zip(chain(*grown), chain(*self._planes), strict=True):
            plane[:, :, : self.size] = old
        self._planes, self.size = grown, size
        return True

    def append(self, layer: int, at: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """Put keys and values, if there are any, F32 [t, G, D] of a layer at the cache indices `at`, I64 [t]."""
        first, index = self._places[layer]
        for planes, rows in zip(self._planes[first : first + 2], (keys, values), strict=True):
            if rows is None:
                continue
            for plane, part in zip(planes, self.layout.encode(rows.transpose(0, 1)), strict=True):
                plane[index].index_copy_(1, at, part)

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """The first `span` keys and values of a layer, each F32 [G, span, D]; the keys as both where there are no values."""
        first, index = self._places[layer]
        keys, values = (
            self.layout.decode(tuple(plane[index, :, :span] for plane in planes), dims)
            for planes, dims in zip(self._planes[first : first + 2], self._layers[layer][1:], strict=True)
        )
        return keys, values if values.shape[-1] else keys

    @torch.inference_mode()
    def copy_rows(self, rows: I32, first: int) -> None:
        """Copy keys and values of the cache indices `rows`, bit for bit, to `first` and following."""
        for plane in chain(*self._planes):
            at = torch.from_numpy(rows.astype(np.int64)).to(plane.device)
            plane[:, :, first : first + len(rows)] = plane[:, :, at]  # indexing copies before anything is written

    @torch.inference_mode()
    def copy_prefix(self, storage: "Storage", length: int) -> None:
        """Copy the first `length` keys and values, bit for bit, to the beginning of a storage that has room for them."""
        for plane, other in zip(chain(*self._planes), chain(*storage._planes), strict=True):
            other[:, :, :length] = plane[:, :, :length]

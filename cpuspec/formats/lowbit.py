"""Two- and three-bit integers in groups of 32 or 64 under an f16 scale, for drafts cast from a model's own weights.

With so few codes it matters where they lie: a group's zero point has steps of a sixteenth of a code, and scale and zero point are
searched for. Whole zero points, such as GPTQ's 0 to 8 for three bits, are among them. The block is this project's:

  f16 scale, u8 zero point in sixteenths, group / 4 bytes of low bits: value i at bits 2 * (i % 4) of byte i / 4,
  and for three bits group / 8 bytes of top bits: value i at bit i % 8 of byte i / 8
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats import search
from cpuspec.formats.tensor import F32, U8, Format

ZERO_STEPS = 16  # of a zero point, to a code

_SHIFTS = [np.uint8(shift) for shift in (0, 2, 4, 6)]


def _layout(bits: int, group: int) -> np.dtype:
    high = [("high", "u1", group // 8)] if bits == 3 else []
    return np.dtype([("d", "<f2"), ("zero", "u1"), ("codes", "u1", group // 4), *high])


LAYOUTS: Mapping[str, np.dtype] = MappingProxyType(
    {f"int{bits}_g{group}_asym": _layout(bits, group) for bits in (3, 2) for group in (32, 64)}
)


def group_size(layout: np.dtype) -> int:
    """Values of a block."""
    return 4 * layout["codes"].itemsize


def code_bits(layout: np.dtype) -> int:
    """Bits of a code: 2 or 3."""
    return 3 if "high" in (layout.names or ()) else 2


def decode(layout: np.dtype, blocks: U8) -> F32:
    """d * (code - zero / 16)."""
    fields = blocks.view(layout)
    codes, _ = CODES[code_bits(layout)]
    zero = fields["zero"].astype(np.float32) * np.float32(1 / ZERO_STEPS)
    return fields["d"].astype(np.float32) * (codes(fields).astype(np.float32) - zero)


def encode(layout: np.dtype, values: F32) -> U8:
    """The scale, zero point and codes that leave the least squared error. Zero is among the values of every group."""
    x = np.ascontiguousarray(values.T)  # [group, n]
    bits = code_bits(layout)
    d, zero = search.fit(x, 2**bits - 1, search.FEW_CODES, _store)
    fields = np.empty(len(values), layout)
    fields["d"], fields["zero"] = d, zero * ZERO_STEPS
    for name, part in CODES[bits][1](search.nearest(x, d, zero, 2**bits - 1).T.astype(np.uint8)).items():
        fields[name] = part
    return fields.view(np.uint8).reshape(len(values), -1)


def codes_2_bits(fields: NDArray) -> NDArray:
    """Codes 0..3, U8 [n, group], of blocks [n] or [n, 1]."""
    packed = fields["codes"].reshape(fields.size, -1)
    return np.stack([packed >> shift & 3 for shift in _SHIFTS], axis=2).reshape(fields.size, -1)


def fields_2_bits(codes: NDArray) -> dict[str, NDArray]:
    """The fields that hold the low two bits of codes [n, group]."""
    return {"codes": np.bitwise_or.reduce([(codes[:, i::4] & 3) << shift for i, shift in enumerate(_SHIFTS)])}


def codes_3_bits(fields: NDArray) -> NDArray:
    """Codes 0..7, U8 [n, group], of blocks [n] or [n, 1]."""
    return codes_2_bits(fields) | np.unpackbits(fields["high"].reshape(fields.size, -1), axis=1, bitorder="little") << 2


def fields_3_bits(codes: NDArray) -> dict[str, NDArray]:
    """The fields that hold codes 0..7, [n, group]."""
    return {"high": np.packbits(codes >> 2, axis=1, bitorder="little"), **fields_2_bits(codes)}


# By bits, what reads codes from fields, and fields from codes.
CODES: Mapping[int, tuple[Callable[[NDArray], NDArray], Callable[[NDArray], dict[str, NDArray]]]] = MappingProxyType(
    {2: (codes_2_bits, fields_2_bits), 3: (codes_3_bits, fields_3_bits)}
)


def _store(d: F32, start: F32) -> tuple[F32, F32]:
    d = d.astype(np.float16).astype(np.float32)
    zero = search.rounded(start * np.float32(-ZERO_STEPS) * search.inverse(d), np.float32(255))
    return d, zero * np.float32(1 / ZERO_STEPS)


def _row(name: str, layout: np.dtype) -> Format:
    return Format(name, group_size(layout), layout.itemsize, partial(decode, layout), partial(encode, layout))


FORMATS = tuple(_row(name, layout) for name, layout in LAYOUTS.items())

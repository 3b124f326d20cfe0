"""Every block format as whole numbers in groups, scale * (code - zero) + offset: the one layout that graph engines multiply with.

Codes keep four or eight bits, whichever holds the file's; nothing is rounded anew. Where a group's offset is a multiple of its
scale it is in the codes or in a whole zero point, and values are the file's to the bit. Otherwise it is a number of its own, whose
f32 sum with a code's share is rounded once more than the file's decoding rounds it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats import int4, kquants, legacy, lowbit, mx
from cpuspec.formats.tensor import F32, U8, QuantTensor


@dataclass(frozen=True, eq=False)
class GroupedIntegers:
    """A matrix [N, K] in groups of `group` consecutive values of a row: scale * (code - zero) + offset.

    zeros None is the middle of the codes, 8 or 128; offsets None is 0.
    """

    bits: int  # of a code: 4 or 8
    group: int
    codes: U8  # [N, K], 0 to 2^bits - 1
    scales: F32  # [N, K / group]
    zeros: U8 | None = None  # [N, K / group], 0 to 2^bits - 1
    offsets: F32 | None = None  # [N, K / group]

    def values(self) -> F32:
        """What the numbers stand for, F32 [N, K]."""
        rows, groups = self.scales.shape
        zeros = np.uint8(1 << self.bits - 1) if self.zeros is None else self.zeros[:, :, None]
        # A lying file may hold scales of inf or nan; they decode to what they say.
        with np.errstate(invalid="ignore", over="ignore"):
            steps = self.codes.reshape(rows, groups, -1).astype(np.float32) - zeros.astype(np.float32)
            values = self.scales[:, :, None] * steps
            return (values if self.offsets is None else values + self.offsets[:, :, None]).reshape(rows, -1)


def group_integers(tensor: QuantTensor) -> GroupedIntegers | None:
    """The matrix `tensor` as integers in groups; None for f32, f16 and bf16, which have none."""
    if tensor.format.block_size == 1:
        return None
    return _SPLITS[tensor.format.name](tensor.data)


@dataclass(frozen=True)
class _Blocks:
    """What the blocks of some rows hold. middle: the code that stands for no multiple of the scale."""

    codes: NDArray  # [n, block], unsigned
    scales: F32  # [n, groups of a block]
    middle: int
    offsets: F32 | None = None  # [n, groups of a block]


def _split(bits: int, layout: np.dtype, read: Callable[[NDArray], _Blocks], data: U8) -> GroupedIntegers:
    rows = len(data)
    with np.errstate(invalid="ignore", over="ignore"):
        blocks = read(data.reshape(-1, layout.itemsize).view(layout)[:, 0])
    codes = blocks.codes.reshape(len(blocks.codes), -1)
    group = codes.shape[1] // blocks.scales.shape[1]
    return GroupedIntegers(
        bits,
        group,
        (codes + np.uint8((1 << bits - 1) - blocks.middle)).reshape(rows, -1),
        blocks.scales.reshape(rows, -1),
        offsets=None if blocks.offsets is None else blocks.offsets.reshape(rows, -1),
    )


def _split_int4(layout: np.dtype, data: U8) -> GroupedIntegers:
    """Zero points as they are, or as offsets where one of them does not fit into four bits."""
    fields = data.reshape(-1, layout.itemsize).view(layout)[:, 0]
    shape = len(data), -1
    codes, scales = int4.codes_in_order(fields).reshape(shape), fields["d"].astype(np.float32).reshape(shape)
    zeros = fields["zero"].reshape(shape) if "zero" in (layout.names or ()) else None
    group = int4.group_size(layout)
    if zeros is not None and zeros.max() > 15:
        with np.errstate(invalid="ignore"):
            offsets = scales * (np.float32(8) - zeros.astype(np.float32))
        return GroupedIntegers(4, group, codes, scales, offsets=offsets)
    return GroupedIntegers(4, group, codes, scales, zeros)


def _symmetric(codes: Callable[[NDArray], NDArray], middle: int, fields: NDArray) -> _Blocks:
    return _Blocks(codes(fields), _column(fields, "d"), middle)


def _with_minimum(codes: Callable[[NDArray], NDArray], middle: int, fields: NDArray) -> _Blocks:
    d = _column(fields, "d")
    return _Blocks(codes(fields), d, middle, d * np.float32(middle) + _column(fields, "m"))


def _q8_0(fields: NDArray) -> _Blocks:
    return _Blocks(fields["codes"].view(np.uint8) ^ 0x80, _column(fields, "d"), 128)


def _scales_and_minima(codes: Callable[[NDArray], NDArray], middle: int, fields: NDArray) -> _Blocks:
    packed = np.ascontiguousarray(fields["scales"])
    scales, minima = kquants.unpack_scales(packed) if packed.shape[1] == 12 else (packed & 0x0F, packed >> 4)
    d = _column(fields, "d") * scales.astype(np.float32)
    return _Blocks(codes(fields), d, middle, d * np.float32(middle) - _column(fields, "dmin") * minima.astype(np.float32))


def _q3_k(fields: NDArray) -> _Blocks:
    scales = kquants.unpack_signed_scales(np.ascontiguousarray(fields["scales"])).astype(np.float32)
    return _Blocks(kquants.codes_q3_k(fields), _column(fields, "d") * scales, 4)


def _q6_k(fields: NDArray) -> _Blocks:
    return _Blocks(kquants.codes_q6_k(fields), _column(fields, "d") * fields["scales"].astype(np.float32), 32)


def _mxfp4(fields: NDArray) -> _Blocks:
    """Eight bits: twice a value is a whole number, but up to 12 either way."""
    return _Blocks(_E2M1_CODES[legacy.codes_4_bits(fields)], mx.HALF_SCALES[fields["e"]].reshape(-1, 1), 128)


def _low_bits(layout: np.dtype, middle: int, fields: NDArray) -> _Blocks:
    codes, _ = lowbit.CODES[lowbit.code_bits(layout)]
    zero = _column(fields, "zero") * np.float32(1 / lowbit.ZERO_STEPS)
    d = _column(fields, "d")
    return _Blocks(codes(fields), d, middle, d * (np.float32(middle) - zero))


def _column(fields: NDArray, name: str) -> F32:
    return fields[name].astype(np.float32).reshape(-1, 1)


_E2M1_CODES = (np.array(mx.E2M1_DOUBLED) + 128).astype(np.uint8)

_SPLITS: Mapping[str, Callable[[U8], GroupedIntegers]] = MappingProxyType(
    {
        "q4_0": partial(_split, 4, legacy.Q4_0_LAYOUT, partial(_symmetric, legacy.codes_4_bits, 8)),
        "q4_1": partial(_split, 4, legacy.Q4_1_LAYOUT, partial(_with_minimum, legacy.codes_4_bits, 8)),
        "q5_0": partial(_split, 8, legacy.Q5_0_LAYOUT, partial(_symmetric, legacy.codes_5_bits, 16)),
        "q5_1": partial(_split, 8, legacy.Q5_1_LAYOUT, partial(_with_minimum, legacy.codes_5_bits, 16)),
        "q8_0": partial(_split, 8, legacy.Q8_0_LAYOUT, _q8_0),
        "q2_k": partial(_split, 4, kquants.Q2_K_LAYOUT, partial(_scales_and_minima, kquants.codes_q2_k, 2)),
        "q3_k": partial(_split, 4, kquants.Q3_K_LAYOUT, _q3_k),
        "q4_k": partial(_split, 4, kquants.Q4_K_LAYOUT, partial(_scales_and_minima, kquants.codes_q4_k, 8)),
        "q5_k": partial(_split, 8, kquants.Q5_K_LAYOUT, partial(_scales_and_minima, kquants.codes_q5_k, 16)),
        "q6_k": partial(_split, 8, kquants.Q6_K_LAYOUT, _q6_k),
        "mxfp4": partial(_split, 8, mx.MXFP4_LAYOUT, _mxfp4),
        **{name: partial(_split_int4, layout) for name, layout in int4.LAYOUTS.items()},
        **{
            name: partial(_split, 4, layout, partial(_low_bits, layout, 2 if lowbit.code_bits(layout) == 2 else 4))
            for name, layout in lowbit.LAYOUTS.items()
        },
    }
)

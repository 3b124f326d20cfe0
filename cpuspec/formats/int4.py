"""Four-bit integers in groups of 32, 64 or 128 under one f16 scale: what GPTQ, AWQ, compressed-tensors and MatMulNBits files hold.

Named as those files' configurations are read aloud: int4, group size, and `asym` where each group has a zero point of its own;
without it the zero point is 8. Each of those containers keeps codes, scales and zero points in tensors of their own, so the
block is this project's, with everything of a group together:

  f16 scale, u8 zero point (asym only), group / 2 bytes of codes: value 2i in the low half of byte i, value 2i + 1 in the high half

The codes are those of MatMulNBits and compressed-tensors byte for byte. The zero point has eight bits because GPTQ files, which
store it less one, reach 16.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats.tensor import F32, U8, Format

_MIDDLE = 8  # zero point of the symmetric formats
_LARGEST = 15


def _layout(group: int, asymmetric: bool) -> np.dtype:
    zero = [("zero", "u1")] if asymmetric else []
    return np.dtype([("d", "<f2"), *zero, ("codes", "u1", group // 2)])


LAYOUTS: Mapping[str, np.dtype] = MappingProxyType(
    {
        f"int4_g{group}{'_asym' if asymmetric else ''}": _layout(group, asymmetric)
        for asymmetric in (False, True)
        for group in (32, 64, 128)
    }
)


def group_size(layout: np.dtype) -> int:
    """Values of a block."""
    return 2 * layout["codes"].itemsize


def decode(layout: np.dtype, blocks: U8) -> F32:
    """d * (code - zero point)."""
    fields = blocks.view(layout)
    zero = fields["zero"].astype(np.float32) if "zero" in (layout.names or ()) else np.full(fields.shape, _MIDDLE, np.float32)
    return fields["d"].astype(np.float32) * (codes_in_order(fields).astype(np.float32) - zero)


def encode_symmetric(layout: np.dtype, values: F32) -> U8:
    """Round to nearest with 15 steps from minus to plus the largest magnitude, as GPTQ's and compressed-tensors' grids have."""
    fields = np.empty((len(values), 1), layout)
    fields["d"] = np.abs(values).max(axis=1, keepdims=True) / np.float32(_LARGEST / 2)
    return _fill(fields, values, np.float32(_MIDDLE))


def encode_asymmetric(layout: np.dtype, values: F32) -> U8:
    """Round to nearest with 15 steps from the minimum to the maximum, zero being among the values of every group."""
    low = np.minimum(values.min(axis=1, keepdims=True), 0)
    high = np.maximum(values.max(axis=1, keepdims=True), 0)
    fields = np.empty((len(values), 1), layout)
    fields["d"] = (high - low) / _LARGEST
    fields["zero"] = np.clip(_steps(-low, fields["d"]), 0, _LARGEST)
    return _fill(fields, values, fields["zero"].astype(np.float32))


def codes_in_order(fields: NDArray) -> NDArray:
    """Codes 0..15, U8 [n, group], of blocks [n] or [n, 1]."""
    packed = fields["codes"].reshape(fields.size, -1, 1)
    return np.concatenate([packed & 0x0F, packed >> 4], axis=2).reshape(fields.size, -1)


def fields_in_order(codes: NDArray) -> dict[str, NDArray]:
    """The fields that hold codes [n, group]."""
    return {"codes": codes[:, 0::2] | codes[:, 1::2] << 4}


def _steps(values: NDArray, d: NDArray) -> NDArray:
    """Whole steps of the scale as stored; 0 where it is so small that f16 has zero for it."""
    step = d.astype(np.float32)
    return np.where(step > 0, np.rint(values / step), np.float32(0))


def _fill(fields: NDArray, values: F32, zero: NDArray | np.float32) -> U8:
    """Blocks with the codes nearest to `values` under the scale and zero point that they store."""
    codes = np.clip(_steps(values, fields["d"]) + zero, 0, _LARGEST).astype(np.uint8)
    fields["codes"][:, 0] = fields_in_order(codes)["codes"]
    return fields.view(np.uint8).reshape(len(values), -1)


def _row(name: str, layout: np.dtype) -> Format:
    encode = encode_asymmetric if "zero" in (layout.names or ()) else encode_symmetric
    return Format(name, group_size(layout), layout.itemsize, partial(decode, layout), partial(encode, layout))


FORMATS = tuple(_row(name, layout) for name, layout in LAYOUTS.items())

"""Four-bit integers in groups of 32, 64 or 128 under one f16 scale, for files of GPTQ, AWQ, compressed-tensors and MatMulNBits.

A name says int4, the group size, and `asym` where each group has its own zero point; without `asym` the zero point is 8. Those
files keep codes, scales and zero points in separate tensors. The block layout is this project's, with everything of a group
together:

  d: f16 scale; z: u8 zero point (asym only); group / 2 bytes of codes: value 2i in the low half of byte i, 2i + 1 in the high half

The codes are those of MatMulNBits and compressed-tensors byte for byte. The zero point has eight bits because GPTQ files, which
store it less one, reach 16.
"""

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats.format import F32, Affine, CodeField, Format, Parts
from cpuspec.formats.packing import bits, lanes

_MIDDLE = 8  # zero point of the symmetric formats
_LARGEST = 15


def encode_symmetric(values: F32) -> Parts:
    """Round to nearest with 15 steps from minus to plus the largest magnitude, as GPTQ's and compressed-tensors' grids have."""
    d = (np.abs(values).max(axis=1, keepdims=True) / np.float32(_LARGEST / 2)).astype("<f2")
    return {"d": d, "codes": _nearest(values, d, np.float32(_MIDDLE))}


def encode_asymmetric(values: F32) -> Parts:
    """Round to nearest with 15 steps from the minimum to the maximum, zero being among the values of every group."""
    low = np.minimum(values.min(axis=1, keepdims=True), 0)
    high = np.maximum(values.max(axis=1, keepdims=True), 0)
    d = ((high - low) / _LARGEST).astype("<f2")
    z = np.clip(_steps(-low, d), 0, _LARGEST)
    return {"d": d, "z": z, "codes": _nearest(values, d, z)}


def _steps(values: NDArray, d: NDArray) -> NDArray:
    """Whole steps of the scale as stored; 0 where f16 stores it as zero."""
    step = d.astype(np.float32)
    return np.where(step > 0, np.rint(values / step), np.float32(0))


def _nearest(values: F32, d: NDArray, zero: NDArray | np.float32) -> NDArray:
    """The codes nearest to `values` under the scale and zero point as stored."""
    return np.clip(_steps(values, d) + zero, 0, _LARGEST).astype(np.uint8)


def _format(group: int, asymmetric: bool) -> Format:
    return Format(
        f"int4_g{group}{'_asym' if asymmetric else ''}",
        np.dtype([("d", "<f2"), *[("z", "u1")] * asymmetric, ("codes", "u1", group // 2)]),
        group,
        encode_asymmetric if asymmetric else encode_symmetric,
        Affine(1 if asymmetric else _MIDDLE),
        (CodeField("codes", 4),),
        planes=(bits(4), lanes("d", "<f2", group), *[lanes("z", "u1", group)] * asymmetric),
    )


FORMATS = tuple(_format(group, asymmetric) for asymmetric in (False, True) for group in (32, 64, 128))

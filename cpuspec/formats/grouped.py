"""Every block format as integers in groups, scale * (code - zero) + offset: the layout that graph engines multiply with.

Codes take four bits where these hold the file's codes, else eight, and keep their values. Where a group's offset is a multiple of
its scale, the offset goes into the codes or into a whole zero point, and values are the file's to the bit. Otherwise the offset is
a separate number, and adding it in f32 rounds once more than decoding the file's format does.
"""

from dataclasses import dataclass

import numpy as np

from cpuspec.formats.format import F32, U8, per_group, scales_of
from cpuspec.formats.tensor import QuantTensor


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


def group_integers(tensor: QuantTensor) -> GroupedIntegers | None:
    """The matrix `tensor` as integers in groups; None for f32, f16, bf16, codes of floats such as nf4's, and rotated formats."""
    affine, file_bits = tensor.format.affine, tensor.format.code_bits
    if affine is None or tensor.format.rotated or any(level not in range(-128, 128) for level in affine.levels or ()):
        return None
    parts = tensor.format.split(tensor.data)
    with np.errstate(invalid="ignore", over="ignore"):
        d, s, base, z = scales_of(parts)
        codes, scales = parts["codes"], per_group(d, s)
        group = codes.shape[1] // scales.shape[1]
        if affine.levels:
            levels = np.array(affine.levels, np.int16)[codes]
            if z is not None:
                assert affine.zero == 1, "levels move by whole numbers"
                levels -= z.astype(np.int16).repeat(group, axis=1)
            return GroupedIntegers(8, group, (levels + 128).astype(np.uint8), scales)
        # Codes move so that the middle of the file's is the middle of these.
        bits, middle = 4 if file_bits <= 4 else 8, 1 << file_bits - 1
        moved = codes + np.uint8((1 << bits - 1) - middle)
        if base is not None:
            return GroupedIntegers(
                bits, group, moved, scales, offsets=scales * np.float32(middle) - per_group(base, z) * np.float32(affine.zero)
            )
        if z is None:
            assert affine.zero == middle, "codes stand for multiples of their scale from the middle on"
            return GroupedIntegers(bits, group, moved, scales)
        if affine.zero == 1 and z.max() < 1 << file_bits:
            return GroupedIntegers(bits, group, codes, scales, z)
        return GroupedIntegers(bits, group, moved, scales, offsets=scales * (np.float32(middle) - z * np.float32(affine.zero)))

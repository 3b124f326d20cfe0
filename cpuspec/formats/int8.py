"""Signed bytes in groups of 32 or 128 under one f32 scale, for files of 8-bit integers with scales of any shape.

q8_0 has f16 scales and the groups of GGUF files. Where a file has one scale for a row, as LLM.int8() and W8A8 models do, each group
repeats it. Integers of fewer bits are stored here, too, where f16 cannot hold their scales. The block layout is this project's:

  d: f32 scale; bytes -128..127
"""

import numpy as np

from cpuspec.formats.format import F32, Affine, CodeField, Format, Parts
from cpuspec.formats.packing import bits, lanes


def encode(values: F32) -> Parts:
    """Round to nearest, 127 steps on either side of zero."""
    d = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    steps = np.divide(values, d, out=np.zeros_like(values), where=d > 0)
    return {"d": d, "codes": (np.clip(np.rint(steps), -127, 127) + 128).astype(np.uint8)}


def int8(group: int) -> Format:
    """The format with a scale for each `group` values."""
    return Format(
        f"int8_g{group}",
        np.dtype([("d", "<f4"), ("codes", "u1", group)]),
        group,
        encode,
        Affine(128),
        (CodeField("codes", 8, flipped=0x80),),
        planes=(bits(8), lanes("d", "<f4", group)),
    )


FORMATS = tuple(map(int8, (32, 128)))

"""Signed bytes in groups of 32 or 128 under one f32 scale: what files of 8-bit integers hold, whatever their scales.

q8_0 has f16 scales and the groups of GGUF files. The scale of a row, as of LLM.int8() and of W8A8 models, is here that of each
group. Integers of fewer bits whose scales f16 does not have come here, too. The block is this project's:

  d: f32 scale; bytes -128..127
"""

import numpy as np

from cpuspec.formats.format import F32, Affine, Format, Parts
from cpuspec.formats.legacy import codes_8_bits
from cpuspec.formats.packing import bits, lanes


def encode(values: F32) -> Parts:
    """Round to nearest, 127 steps on either side of zero."""
    d = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    steps = np.divide(values, d, out=np.zeros_like(values), where=d > 0)
    return {"d": d, "codes": (np.clip(np.rint(steps), -127, 127) + 128).astype(np.uint8)}


def _format(group: int) -> Format:
    return Format(
        f"int8_g{group}",
        np.dtype([("d", "<f4"), ("codes", "u1", group)]),
        group,
        encode,
        codes_8_bits,
        lambda parts: {"codes": parts["codes"] ^ 0x80},
        Affine(128),
        planes=(bits(8), lanes("d", "<f4", group)),
        reader="long_bytes",
    )


FORMATS = tuple(map(_format, (32, 128)))

"""Two- and three-bit integers in groups of 32 or 64 under an f16 scale, for drafts cast from a model's own weights.

With four or eight codes their place matters: a group's zero point has steps of a sixteenth of a code, and the encoder searches for
scale and zero point. Whole zero points, such as GPTQ's 0 to 8 for three bits, are among these. The block layout is this project's:

  d: f16 scale; z: u8 zero point in sixteenths; group / 4 bytes of low bits: value i at bits 2 * (i % 4) of byte i / 4;
  and for three bits `high`: group / 8 bytes of top bits: value i at bit i % 8 of byte i / 8
"""

from functools import partial

import numpy as np

from cpuspec.formats import search
from cpuspec.formats.format import F32, Affine, CodeField, Format, Parts
from cpuspec.formats.packing import bits, lanes

ZERO_STEPS = 16  # of a zero point, to a code


def encode(code_bits: int, values: F32) -> Parts:
    """The scale, zero point and codes that leave the least squared error. Zero is among the values of every group."""
    x = np.ascontiguousarray(values.T)  # [group, n]
    largest = 2**code_bits - 1
    d, zero = search.fit(x, largest, search.FEW_CODES, _store)
    return {"d": d[:, None], "z": zero[:, None] * ZERO_STEPS, "codes": search.nearest(x, d, zero, largest).T.astype(np.uint8)}


def _store(d: F32, start: F32) -> tuple[F32, F32]:
    d = d.astype(np.float16).astype(np.float32)
    zero = search.rounded(start * np.float32(-ZERO_STEPS) * search.inverse(d), np.float32(255))
    return d, zero * np.float32(1 / ZERO_STEPS)


def _format(code_bits: int, group: int) -> Format:
    three = code_bits == 3
    return Format(
        f"int{code_bits}_g{group}_asym",
        np.dtype([("d", "<f2"), ("z", "u1"), ("codes", "u1", group // 4), *[("high", "u1", group // 8)] * three]),
        group,
        partial(encode, code_bits),
        Affine(1 / ZERO_STEPS),
        (CodeField("codes", 2), *[CodeField("high", 1, at=2)] * three),
        planes=(bits(2), *[bits(1, at=2)] * three, lanes("d", "<f2", group), lanes("z", "u1", group)),
    )


FORMATS = tuple(_format(code_bits, group) for code_bits in (3, 2) for group in (32, 64))

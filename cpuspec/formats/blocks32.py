"""Blocks of 32 values under one f16 scale d, with or without a minimum: q4_0, q4_1, q5_0, q5_1, q8_0.

Layouts as GGUF files store them; `base` is their minimum m. Nibbles: value i of 0..15 in the low half of byte i, value 16 + i in
its high half; bit i of `high` is the fifth bit of value i. Encoding rounds as ggml's reference does, so that a tensor encoded here
has the bytes that other tools write.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats import search
from cpuspec.formats.format import F32, Affine, CodeField, Format, Parts
from cpuspec.formats.packing import bits, lanes

BLOCK = 32
NIBBLES = CodeField("codes", 4, stride=16)


def encode_symmetric(code_bits: int, values: F32) -> Parts:
    """The value of largest magnitude becomes code 0, so that the wider negative side of the codes is used."""
    half = 1 << code_bits - 1
    d = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1) / np.float32(-half)
    return {"d": d, "codes": _truncate(values * search.inverse(d) + np.float32(half + 0.5), 2 * half - 1)}


def encode_with_minimum(code_bits: int, values: F32) -> Parts:
    """Codes from 0 at the minimum of the block to the largest at its maximum."""
    largest = (1 << code_bits) - 1
    low = values.min(axis=1, keepdims=True)
    d = (values.max(axis=1, keepdims=True) - low) / largest
    return {"d": d, "base": low, "codes": _truncate((values - low) * search.inverse(d) + np.float32(0.5), largest)}


def encode_q8_0(values: F32) -> Parts:
    """Steps -127..127, halves rounded away from zero; a code is a step + 128."""
    d = np.abs(values).max(axis=1, keepdims=True) / 127
    scaled = values * search.inverse(d)
    magnitude = np.abs(scaled)
    whole = np.floor(magnitude)
    # Not floor(magnitude + 0.5): that sum rounds 0.49999997 up.
    rounded = whole + np.floor(2 * (magnitude - whole))
    return {"d": d, "codes": np.copysign(rounded, scaled).astype(np.int8).view(np.uint8) ^ 0x80}


def _truncate(scaled: NDArray, largest: int) -> NDArray:
    """Codes from values that already carry their rounding half, cut to 0..largest."""
    return np.clip(scaled, 0, largest).astype(np.uint8)


def _format(name: str, gguf_type: int, code_bits: int, minimum: bool) -> Format:
    """q4_0, q4_1, q5_0 or q5_1."""
    base, has_high = [("base", "<f2")] * minimum, code_bits == 5
    return Format(
        name,
        np.dtype([("d", "<f2"), *base, *[("high", "u1", 4)] * has_high, ("codes", "u1", 16)]),
        BLOCK,
        partial(encode_with_minimum if minimum else encode_symmetric, code_bits),
        Affine(-1 if minimum else 1 << code_bits - 1),
        (NIBBLES, *[CodeField("high", 1, at=4)] * has_high),
        planes=(bits(4), *[bits(1, at=4)] * has_high, *(lanes(part, "<f2", BLOCK) for part in ("d", "base")[: 1 + minimum])),
        gguf_type=gguf_type,
    )


FORMATS = (
    _format("q4_0", 2, 4, minimum=False),
    _format("q4_1", 3, 4, minimum=True),
    _format("q5_0", 6, 5, minimum=False),
    _format("q5_1", 7, 5, minimum=True),
    Format(
        "q8_0",
        np.dtype([("d", "<f2"), ("codes", "u1", BLOCK)]),
        BLOCK,
        encode_q8_0,
        Affine(128),
        (CodeField("codes", 8, flipped=0x80),),
        planes=(bits(8), lanes("d", "<f2", BLOCK)),
        gguf_type=8,
    ),
)

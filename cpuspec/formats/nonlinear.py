"""Four bits on a grid of sixteen steps that are denser near zero: iq4_nl (scale per 32 values), iq4_xs (superblocks of 256).

Layouts as GGUF files store them, and the levels: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml. iq4_xs has a
scale d of f16 for a superblock, and for each 32 values a whole number -32..31, whose low four bits are a nibble of `scales` and
whose top two are bits of `top`. Decoding equals ggml's bit for bit.
"""

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats.blocks32 import BLOCK, NIBBLES
from cpuspec.formats.format import Affine, Format, Parts
from cpuspec.formats.kquants import SUPERBLOCK
from cpuspec.formats.packing import bits, lanes, words

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_GROUPS = SUPERBLOCK // BLOCK
_LOW_SHIFTS = np.arange(0, 8, 4, dtype=np.uint8)
_TOP_SHIFTS = np.arange(0, 2 * _GROUPS, 2, dtype=np.uint16)


def parts_iq4_xs(fields: NDArray) -> Parts:
    """Eight scales -32..31."""
    low = (fields["scales"][:, :, None] >> _LOW_SHIFTS & 0x0F).reshape(-1, _GROUPS)
    top = (fields["top"][:, None] >> _TOP_SHIFTS & 3).astype(np.uint8)
    return {"s": (low | top << 4).view(np.int8) - np.int8(32)}


def fields_iq4_xs(parts: Parts) -> Parts:
    """The fields that hold scales, where these are among the parts; packed weights keep the fields themselves."""
    if "s" not in parts:
        return {}
    scales = (parts["s"] + np.int8(32)).view(np.uint8)
    low = (scales[:, 0::2] & 0x0F) | scales[:, 1::2] << 4
    return {"scales": low, "top": np.bitwise_or.reduce((scales >> 4).astype(np.uint16) << _TOP_SHIFTS, axis=1)}


IQ4_NL = Format(
    "iq4_nl",
    np.dtype([("d", "<f2"), ("codes", "u1", 16)]),
    BLOCK,
    None,
    Affine(levels=LEVELS),
    (NIBBLES,),
    planes=(bits(4), lanes("d", "<f2", BLOCK)),
    gguf_type=20,
)
IQ4_XS = Format(
    "iq4_xs",
    np.dtype([("d", "<f2"), ("top", "<u2"), ("scales", "u1", 4), ("codes", "u1", 128)]),
    SUPERBLOCK,
    None,
    Affine(levels=LEVELS),
    (NIBBLES,),
    parts_iq4_xs,
    fields_iq4_xs,
    planes=(
        bits(4),
        words("scales", 32 / SUPERBLOCK, "u1"),
        lanes("top", "<u2", SUPERBLOCK),
        lanes("d", "<f2", SUPERBLOCK),
    ),
    reader="iq4_xs",
    gguf_type=23,
    scale_range=(-32, 31),
)

FORMATS = (IQ4_NL, IQ4_XS)

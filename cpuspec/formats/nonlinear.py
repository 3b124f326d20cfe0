"""Four bits on a grid of sixteen steps that are denser near zero: iq4_nl (scale per 32 values), iq4_xs (superblocks of 256).

Layouts as GGUF files store them, and the levels: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml. iq4_xs has a
scale d of f16 for a superblock, and for each 32 values a whole number -32..31, whose low four bits are a nibble of `scales` and
whose top two are bits of `top`. Decoding equals ggml's bit for bit; encoding is a least-squares search of our own.
"""

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats import search
from cpuspec.formats.format import F32, Affine, Format, Parts
from cpuspec.formats.kquants import SUPERBLOCK
from cpuspec.formats.legacy import BLOCK, NIBBLES
from cpuspec.formats.packing import bits, lanes, words

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Where the value of largest magnitude goes in a search for the scale: around either end of the grid. Grids that cut it are worth
# little, and grids that leave a level unused pay often.
_PEAKS = (-139, -133, -127, -121, -115, -110, -104, 101, 107, 113, 119, 125)

_GROUPS = SUPERBLOCK // BLOCK
_LOW_SHIFTS = np.arange(0, 8, 4, dtype=np.uint8)
_TOP_SHIFTS = np.arange(0, 2 * _GROUPS, 2, dtype=np.uint16)

# By floor(2 x) + 256, the code whose level is nearest to x: midpoints of levels are whole numbers there.
_NEAREST = np.searchsorted(np.add(LEVELS[:-1], LEVELS[1:]), np.arange(-256, 256), side="right").astype(np.uint8)


def encode_iq4_nl(values: F32) -> Parts:
    """The scale that leaves the least squared error, then codes for the scale as stored."""
    groups = values[:, None]
    d = _fit(groups).astype("<f2")
    return {"d": d, "codes": _nearest(groups, d.astype(np.float32)).reshape(len(values), -1)}


def encode_iq4_xs(values: F32) -> Parts:
    """Scales as in iq4_nl for each 32 values, rounded to whole multiples of d, of which the scale of largest magnitude is -32 d."""
    groups = values.reshape(-1, _GROUPS, BLOCK)
    scales = _fit(groups)
    d = (np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1) / -32).astype("<f2")
    stored = d.astype(np.float32)
    s = np.clip(np.rint(scales * search.inverse(stored)), -32, 31).astype(np.int8)
    return {"d": d, "s": s, "codes": _nearest(groups, stored * s.astype(np.float32)).reshape(len(values), -1)}


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


def _fit(groups: NDArray) -> NDArray:
    """Scales [n, s] that bring scale * level(code) closest to `groups` [n, s, k] in squared error."""
    peak = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    choices = (np.array(LEVELS, np.float32)[_nearest(groups, peak / np.float32(place))] for place in _PEAKS)
    return search.scale_of_best(groups, None, (peak / LEVELS[0]).astype(np.float32), choices, signed=True)


def _nearest(groups: NDArray, scales: NDArray) -> NDArray:
    """The codes of `groups` [n, s, k] that are nearest under scales [n, s]."""
    doubled = np.floor(groups * (2 * search.inverse(scales))[:, :, None])
    return _NEAREST[np.clip(doubled, -256, 255).astype(np.int16) + 256]


IQ4_NL = Format(
    "iq4_nl",
    np.dtype([("d", "<f2"), ("codes", "u1", 16)]),
    BLOCK,
    encode_iq4_nl,
    Affine(levels=LEVELS),
    (NIBBLES,),
    planes=(bits(4), lanes("d", "<f2", BLOCK)),
    gguf_type=20,
)
IQ4_XS = Format(
    "iq4_xs",
    np.dtype([("d", "<f2"), ("top", "<u2"), ("scales", "u1", 4), ("codes", "u1", 128)]),
    SUPERBLOCK,
    encode_iq4_xs,
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
)

FORMATS = (IQ4_NL, IQ4_XS)

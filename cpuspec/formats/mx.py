"""The OCP Microscaling format mxfp4: blocks of 32 four-bit floats under a power of two.

Open Compute Project, Microscaling Formats (MX) v1.0. Layout as GGUF files store it: the E8M0 scale e (2^(e - 127), 255 is nan),
then nibbles in the order of q4_0. A nibble is E2M1: the sign, then one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. Encoding follows
ML-SpecQD (arXiv:2503.13565): the scale is 2^(floor(log2(largest magnitude)) - 2), values are rounded to nearest even and what
exceeds 6 becomes 6.
"""

import numpy as np

from cpuspec.formats.blocks32 import BLOCK, NIBBLES
from cpuspec.formats.format import F32, Affine, Format, Parts
from cpuspec.formats.packing import bits, lanes
from cpuspec.formats.search import Searches

# Twice the value of each code, which makes them integers. Code 8 means zero as code 0 does; ggml gives it no sign either.
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# By exponent byte, half the scale: 2^(e - 128).
HALF_SCALES = np.ldexp(np.float32(1), np.arange(256) - 128)
HALF_SCALES[255] = np.nan


def encode_mxfp4(values: F32) -> Parts:
    """The shared exponent of the largest magnitude less 2 (6 = 1.5 * 2^2 is the largest E2M1), cut to 2^-127 and up."""
    magnitudes = np.abs(values)
    # The exponent field of an f32 is floor(log2) + 127, without the rounding of a logarithm; 0 where that is below 2^-126.
    e = np.maximum((magnitudes.max(axis=1, keepdims=True).view(np.uint32) >> 23).astype(np.int32) - 2, 0)
    scaled = magnitudes * ((254 - e) << 23).view(np.float32)  # times 2^(127 - e), which moves no bit that counts
    # Neighbours are 0.5, 1 or 2 apart, and rint's halves to even are the codes'.
    coarse = np.where(scaled < 4, np.rint(scaled) + 2, np.rint(scaled * np.float32(0.5)) + 4)
    codes = np.minimum(np.where(scaled < 2, np.rint(scaled * 2), coarse), 7).astype(np.uint8)
    # Zeros have no sign: other tools write code 0 for them.
    codes |= np.where((values < 0) & (codes > 0), np.uint8(8), np.uint8(0))
    return {"e": e, "codes": codes}


def fitted(values: F32, weights: F32 | None, find: Searches) -> Parts:
    """The power of two that leaves the least weighted error: that of the largest value, or one beside it."""
    around = np.clip(encode_mxfp4(values)["e"] + np.arange(-1, 2), 0, 254)
    levels = sorted(set(E2M1_DOUBLED))
    errors = [find.moves_of_scales(values, weights, HALF_SCALES[e], levels, (0,))[0] for e in around.T]
    e = np.take_along_axis(around, np.argmin(errors, axis=0)[:, None], axis=1)
    codes = MXFP4.nearest(values, HALF_SCALES[e], np.zeros(e.shape, np.float32))
    return {"e": e, "codes": np.where(codes == 8, np.uint8(0), codes)}  # zeros have no sign


MXFP4 = Format(
    "mxfp4",
    np.dtype([("e", "u1"), ("codes", "u1", 16)]),
    BLOCK,
    encode_mxfp4,
    Affine(levels=E2M1_DOUBLED),
    (NIBBLES,),
    lambda fields: {"d": HALF_SCALES[fields["e"]]},
    planes=(bits(4), lanes("e", "u1", BLOCK)),
    reader="mxfp4",
    gguf_type=39,
    search=fitted,
)

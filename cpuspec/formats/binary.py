"""q1_0 and q2_0: signs in blocks of 128, and -d, 0, d and 2 d in blocks of 64, both under one f16 scale d.

Layouts as GGUF files store them (ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml since 2026): d, then bit i % 8
of byte i / 8, which is set where the value is d and not -d; or the two bits 2 * (i % 4) of byte i / 4. A code of q1_0 is 0 or 2,
so that kernels see whole numbers around 1. The first published files with type 42 have blocks of 128 instead; their tensors
overlap when they are read with 64, so they are refused.
"""

import numpy as np

from cpuspec.formats.format import F32, Affine, CodeField, Format, Parts
from cpuspec.formats.packing import bits, lanes
from cpuspec.formats.search import Searches
from cpuspec.formats.ternary import encode as encode_ternary


def encode_q1_0(values: F32, weights: F32 | None = None, find: Searches | None = None) -> Parts:
    """The mean magnitude is d, as in ggml: it leaves the least squared error. weights: of errors, [n, 128]."""
    d = np.average(np.abs(values), axis=1, weights=weights, keepdims=True).astype(np.float32)
    return {"d": d, "codes": np.where(values >= 0, np.uint8(2), np.uint8(0))}


FORMATS = (
    Format(
        "q1_0",
        np.dtype([("d", "<f2"), ("codes", "u1", 16)]),
        128,
        encode_q1_0,
        Affine(levels=(-1, 0, 1)),
        (CodeField("codes", 1, at=1),),
        planes=(bits(1, at=1), lanes("d", "<f2", 128)),
        gguf_type=41,
        search=encode_q1_0,
        free_codes=False,
    ),
    Format(
        "q2_0",
        np.dtype([("d", "<f2"), ("codes", "u1", 16)]),
        64,
        encode_ternary,
        Affine(levels=(-1, 0, 1, 2)),
        (CodeField("codes", 2),),
        planes=(bits(2), lanes("d", "<f2", 64)),
        gguf_type=42,
    ),
)

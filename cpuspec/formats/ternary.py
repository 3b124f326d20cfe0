"""Superblocks of 256 values -d, 0 and d: tq2_0 with two bits a value, which also has 2 d, and tq1_0 with five values in a byte.

Layouts as GGUF files store them (ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml). In tq1_0 a byte is a number
of five base-3 digits times 256 / 243, rounded up: multiplied by 3 it pushes the first digit out at the top. The first 32 bytes are
values 0..159, digit n of byte i being value 32 n + i; 16 bytes are values 160..239 likewise, and 4 bytes of four digits the rest.
Kernels read tq1_0 as two bits: 2.06 bits a weight, 1.69 in the file. Extracting the digits in a kernel takes longer than reading
more.
"""

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats import search
from cpuspec.formats.format import F32, Affine, Format, Parts
from cpuspec.formats.kquants import PAIRS, SUPERBLOCK
from cpuspec.formats.packing import bits, lanes

_PLACES = np.array([1, 3, 9, 27, 81], np.uint8)  # factors that push digits 0 to 4 to the top
_RUNS = ((0, 32, 5), (32, 16, 5), (48, 4, 4))  # of bytes: first, number, digits in each


def encode(values: F32) -> Parts:
    """The largest magnitude is d, as in ggml: right for weights that are ternary."""
    d = np.abs(values).max(axis=1, keepdims=True)
    scaled = values * search.inverse(d)
    # Halves away from zero, as C rounds. Not floor(magnitude + 0.5): that sum rounds 0.49999997 up.
    digits = np.minimum(np.floor(2 * np.abs(scaled)), 1)
    return {"d": d, "codes": (1 + np.copysign(digits, scaled)).astype(np.uint8)}


def digits_tq1_0(fields: NDArray) -> Parts:
    """Codes 0..2, U8 [n, 256]."""
    packed = np.concatenate([fields["low"], fields["high"]], axis=1)
    runs = [packed[:, None, first : first + size] * _PLACES[:digits, None] for first, size, digits in _RUNS]
    pushed = np.concatenate([run.reshape(len(fields), -1) for run in runs], axis=1)
    return {"codes": (pushed.astype(np.uint16) * 3 >> 8).astype(np.uint8)}


def fields_tq1_0(parts: Parts) -> Parts:
    """The fields that hold codes 0..2."""
    packed, at = [], 0
    for _, size, digits in _RUNS:
        own = parts["codes"][:, at : at + size * digits].reshape(-1, digits, size).astype(np.uint16)
        packed.append((own * _PLACES[4 - np.arange(digits)][:, None]).sum(axis=1))
        at += size * digits
    numbers = ((np.concatenate(packed, axis=1) * 256 + 242) // 243).astype(np.uint8)
    return {"low": numbers[:, :48], "high": numbers[:, 48:]}


TQ1_0 = Format(
    "tq1_0",
    np.dtype([("low", "u1", 48), ("high", "u1", 4), ("d", "<f2")]),
    SUPERBLOCK,
    encode,
    Affine(levels=(-1, 0, 1)),
    (),
    digits_tq1_0,
    fields_tq1_0,
    planes=(bits(2), lanes("d", "<f2", SUPERBLOCK)),
    gguf_type=34,
)
TQ2_0 = Format(
    "tq2_0",
    np.dtype([("codes", "u1", 64), ("d", "<f2")]),
    SUPERBLOCK,
    encode,
    Affine(levels=(-1, 0, 1, 2)),
    (PAIRS,),
    planes=(bits(2), lanes("d", "<f2", SUPERBLOCK)),
    gguf_type=35,
)

FORMATS = (TQ1_0, TQ2_0)

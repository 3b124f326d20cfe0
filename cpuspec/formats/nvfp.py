"""NVIDIA's nvfp4: four-bit floats, each 16 of them under an eight-bit float, and often one more scale for the whole tensor.

The codes are mxfp4's E2M1. A scale is E4M3 without its sign: four bits of exponent with bias 7, three of mantissa. nvfp4 is GGUF's
block of 64 values: four scales, then for each 16 values 8 bytes, values 0..7 in the low and 8..15 in the high halves (ggml-common.h
and ggml-impl.h of https://github.com/ggml-org/ggml: the byte 0x7F, which E4M3 has for nan, is zero, and a sign does not count).
nvfp4_global is this project's block for tensors that have a scale of their own: that scale in f32, then the same bytes. A copy of
the scale for each 64 values takes 11 % more bytes. Without it, every matrix would need one number that no other format has.
"""

import numpy as np

from cpuspec.errors import FormatError
from cpuspec.formats.format import F32, Affine, CodeField, Format, Parts
from cpuspec.formats.mx import E2M1_DOUBLED
from cpuspec.formats.packing import bits, lanes
from cpuspec.formats.search import Searches, inverse
from cpuspec.formats.tensor import QuantTensor

BLOCK = 64
_GROUPS, _GROUP = 4, 16
_CODES = (CodeField("codes", 4, stride=8),)

LARGEST = 6 * 448.0  # the largest E2M1 times the largest E4M3


def _half_scales() -> F32:
    """By byte, half the scale."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.where(byte == 0x7F, 0, values / 2).astype(np.float32)


HALF_SCALES = _half_scales()

_MAGNITUDES = np.array(E2M1_DOUBLED[:8], np.float32)
_MIDPOINTS = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2
_NUM_SCALES = 0x7F  # bytes 0 to 0x7E are scales in order


def encode_nvfp4(values: F32, weights: F32 | None, _: Searches) -> Parts:
    """The scale nearest to the largest magnitude over 6, or one of its two neighbours, whichever leaves the least squared error.

    weights: of errors, [n, 64]. Raises FormatError for magnitudes above 2688.
    """
    groups = values.reshape(-1, _GROUP)
    weights = np.ones_like(groups) if weights is None else weights.reshape(-1, _GROUP)
    peak = np.abs(groups).max(axis=1)
    if peak.max() > LARGEST:
        raise FormatError(f"nvfp4 cannot hold {peak.max():g}: it ends at {LARGEST:g}; use mxfp4, bf16 or f32")
    half = peak / np.float32(12)
    middle = np.searchsorted((HALF_SCALES[: _NUM_SCALES - 1] + HALF_SCALES[1:_NUM_SCALES]) / 2, half)
    best_error = np.full(len(groups), np.inf, np.float32)
    scales, codes = np.zeros(len(groups), np.uint8), np.zeros(groups.shape, np.uint8)
    for step in (0, -1, 1):
        tried = np.clip(middle + step, 0, _NUM_SCALES - 1).astype(np.uint8)
        d = HALF_SCALES[tried][:, None]
        magnitudes = np.searchsorted(_MIDPOINTS, np.abs(groups) * inverse(d)).astype(np.uint8)
        found = magnitudes | np.where((groups < 0) & (magnitudes > 0), np.uint8(8), np.uint8(0))
        error = (np.square(np.abs(groups) - _MAGNITUDES[magnitudes] * d) * weights).sum(axis=1)
        better = error < best_error
        scales, codes = np.where(better, tried, scales), np.where(better[:, None], found, codes)
        best_error = np.where(better, error, best_error)
    return {"scales": scales.reshape(-1, _GROUPS), "codes": codes.reshape(len(values), BLOCK)}


def encode_nvfp4_global(values: F32, weights: F32 | None, find: Searches) -> Parts:
    """`encode_nvfp4`, and 1 for the scale of the tensor."""
    return {"d": np.ones((len(values), 1), np.float32), **encode_nvfp4(values, weights, find)}


NVFP4 = Format(
    "nvfp4",
    np.dtype([("scales", "u1", _GROUPS), ("codes", "u1", 32)]),
    BLOCK,
    None,
    Affine(levels=E2M1_DOUBLED),
    _CODES,
    lambda fields: {"d": HALF_SCALES[fields["scales"]]},
    planes=(bits(4), lanes("scales", "u1", _GROUP)),
    reader="nvfp4",
    gguf_type=40,
    search=encode_nvfp4,
)
NVFP4_GLOBAL = Format(
    "nvfp4_global",
    np.dtype([("d", "<f4"), ("scales", "u1", _GROUPS), ("codes", "u1", 32)]),
    BLOCK,
    None,
    Affine(levels=E2M1_DOUBLED),
    _CODES,
    lambda fields: {"s": HALF_SCALES[fields["scales"]]},
    planes=(bits(4), lanes("scales", "u1", _GROUP), lanes("d", "<f4", BLOCK)),
    reader="nvfp4",
    search=encode_nvfp4_global,
)

FORMATS = (NVFP4, NVFP4_GLOBAL)


def with_scale(tensor: QuantTensor, scale: F32) -> QuantTensor:
    """A copy of an nvfp4 tensor, multiplied by one scale for the whole tensor, or one for each expert, as nvfp4_global."""
    blocks = tensor.data.view(NVFP4.layout)
    fields = np.empty(blocks.shape, NVFP4_GLOBAL.layout)
    fields["d"] = scale.reshape(-1, *[1] * (blocks.ndim - 1))
    for name in NVFP4.layout.names or ():
        fields[name] = blocks[name]
    return QuantTensor(NVFP4_GLOBAL, tensor.shape, fields.view(np.uint8))

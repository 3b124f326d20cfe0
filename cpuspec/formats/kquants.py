"""Superblocks of 256 values with quantized scales: q2_k (scale and minimum per 16 values), q3_k (scale per 16), q4_k and q5_k
(scale and minimum per 32), q6_k (scale per 16).

Layouts as GGUF files store them: d and base (their dmin) are f16 of a superblock, s and z the scales and minima of its groups.
Decoding equals ggml's bit for bit; encoding is a least-squares search of our own, so the bytes differ from other tools' while the
error stays in the same range.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats import search
from cpuspec.formats.format import F32, Affine, CodeField, Format, Parts
from cpuspec.formats.packing import bits, lanes, words

SUPERBLOCK = 256


def unpack_scales(packed: NDArray) -> tuple[NDArray, NDArray]:
    """Eight 6-bit scales and eight 6-bit minima, each U8 [n, 8], from the 12 bytes [n, 12] of a q4_k or q5_k superblock.

    Bytes 0-3 and 4-7: scales and minima 0-3 in their low six bits. Bytes 8-11: the low four bits of scales (low half) and
    minima (high half) 4-7, whose two top bits sit on bytes 0-3 and 4-7.
    """
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 0x3F, (rest & 0x0F) | (first >> 6) << 4], axis=1)
    minima = np.concatenate([second & 0x3F, rest >> 4 | (second >> 6) << 4], axis=1)
    return scales, minima


def pack_scales(scales: NDArray, minima: NDArray) -> NDArray:
    """The reverse of `unpack_scales`."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    rest = (scales[:, 4:] & 0x0F) | (minima[:, 4:] & 0x0F) << 4
    return np.concatenate([first, second, rest], axis=1)


def _unpacked_scales(fields: NDArray) -> Parts:
    return dict(zip("sz", unpack_scales(fields["scales"]), strict=True))


def _packed_scales(parts: Parts) -> Parts:
    return {"scales": pack_scales(parts["s"], parts["z"])}


def unpack_signed_scales(packed: NDArray) -> NDArray:
    """Sixteen scales -32..31, I8 [n, 16], from the 12 bytes [n, 12] of a q3_k superblock.

    Low four bits: of scales 0-7 in the low halves of bytes 0-7, of 8-15 in the high halves. Top two bits of scale j: on byte
    8 + j % 4 from bit 2 * (j // 4) on.
    """
    low = np.concatenate([packed[:, :8] & 0x0F, packed[:, :8] >> 4], axis=1)
    top = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    return (low | top << 4).astype(np.int8) - np.int8(32)


def pack_signed_scales(scales: NDArray) -> NDArray:
    """The reverse of `unpack_signed_scales`."""
    unsigned = (scales + 32).astype(np.uint8)
    tops = (unsigned >> 4).reshape(-1, 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    low = (unsigned[:, :8] & 0x0F) | (unsigned[:, 8:] & 0x0F) << 4
    return np.concatenate([low, np.bitwise_or.reduce(tops, axis=1)], axis=1)


def _encode_scales_and_minima(size: int, largest: int, steps: int, values: F32) -> Parts:
    """Scales and minima 0..steps by least squares for groups of `size` values, with d and base as f16 stores them; then the nearest
    codes 0..largest under the scales and minima as stored.
    """
    groups = values.reshape(len(values), -1, size)
    scale, minimum = _fit_asymmetric(groups, largest) if largest > 3 else _fit_few_codes(groups, largest)
    d = (scale.max(axis=1, keepdims=True) / steps).astype("<f2")
    base = (minimum.max(axis=1, keepdims=True) / steps).astype("<f2")
    stored_d, stored_base = d.astype(np.float32), base.astype(np.float32)
    scales = np.clip(np.rint(scale * search.inverse(stored_d)), 0, steps).astype(np.uint8)
    minima = np.clip(np.rint(minimum * search.inverse(stored_base)), 0, steps).astype(np.uint8)
    stored_scale = (stored_d * scales.astype(np.float32))[:, :, None]
    stored_minimum = (stored_base * minima.astype(np.float32))[:, :, None]
    codes = np.clip(np.rint((groups + stored_minimum) * search.inverse(stored_scale)), 0, largest).astype(np.uint8)
    return {"codes": codes.reshape(len(groups), -1), "s": scales, "z": minima, "d": d, "base": base}


def _encode_signed_scales(largest: int, steps: int, values: F32) -> Parts:
    """Scales -steps..steps - 1 by least squares for groups of 16 values, with d as f16 stores it; then the nearest codes
    0..2 largest - 1 under the scales as stored.
    """
    groups = values.reshape(len(values), -1, 16)
    scale = _fit_symmetric(groups, largest)
    # The scale of largest magnitude becomes -steps, the end of the signed range that reaches furthest.
    peak = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    d = (peak / -steps).astype("<f2")
    stored_d = d.astype(np.float32)
    scales = np.clip(np.rint(scale * search.inverse(stored_d)), -steps, steps - 1).astype(np.int8)
    stored = (stored_d * scales.astype(np.float32))[:, :, None]
    codes = (np.clip(np.rint(groups * search.inverse(stored)), -largest, largest - 1) + largest).astype(np.uint8)
    return {"codes": codes.reshape(len(groups), -1), "s": scales, "d": d}


def _fit_asymmetric(groups: NDArray, largest: int) -> tuple[NDArray, NDArray]:
    """Scale and minimum (both >= 0, [n, s]) that bring scale * code - minimum closest to `groups` [n, s, k] in squared error.

    Tries ranges a little narrower and wider than the block's own; for the codes of each, the best line through
    (code, value) has a closed form.
    """
    lowest = np.minimum(groups.min(axis=2), 0)
    span = groups.max(axis=2) - lowest
    best_scale, best_minimum = span / largest, -lowest
    best_error = np.full(span.shape, np.inf, np.float32)
    count = np.float32(groups.shape[2])
    value_sum = groups.sum(axis=2)
    for steps in np.linspace(largest - 1.5, largest + 1, 11, dtype=np.float32):
        codes = np.clip(np.rint((groups - lowest[:, :, None]) * search.inverse(span / steps)[:, :, None]), 0, largest)
        code_sum = codes.sum(axis=2)
        square_sum = (codes * codes).sum(axis=2)
        product_sum = (codes * groups).sum(axis=2)
        slope = (count * product_sum - code_sum * value_sum) * search.inverse(count * square_sum - code_sum * code_sum)
        intercept = (value_sum - slope * code_sum) / count
        # The stored minimum cannot be negative: then the line goes through zero.
        through_zero = intercept > 0
        slope = np.where(through_zero, product_sum * search.inverse(square_sum), slope)
        minimum = np.where(through_zero, np.float32(0), -intercept)
        error = np.square(slope[:, :, None] * codes - minimum[:, :, None] - groups).sum(axis=2)
        better = (error < best_error) & (slope > 0)
        best_scale = np.where(better, slope, best_scale)
        best_minimum = np.where(better, minimum, best_minimum)
        best_error = np.where(better, error, best_error)
    return best_scale, best_minimum


def _fit_few_codes(groups: NDArray, largest: int) -> tuple[NDArray, NDArray]:
    """`_fit_asymmetric` for formats of four codes."""
    x = np.ascontiguousarray(groups.reshape(-1, groups.shape[2]).T)
    d, zero = search.fit(x, largest, search.FEW_CODES, lambda d, start: (d, np.maximum(-start * search.inverse(d), 0)))
    return d.reshape(groups.shape[:2]), (d * zero).reshape(groups.shape[:2])


# By the number of codes below zero: the distances from zero, in codes, at which `_fit_symmetric` tries to put the largest value.
_PEAKS = {4: -4 / np.linspace(0.6, 1.15, 9), 32: np.linspace(-33, -29, 9)}


def _fit_symmetric(groups: NDArray, largest: int) -> NDArray:
    """Signed scale [n, s] that brings scale * code, codes -largest..largest - 1, closest to `groups` [n, s, k] in squared error."""
    peak = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    best_scale = peak / -largest
    best_error = np.full(peak.shape, np.inf, np.float32)
    for steps in _PEAKS[largest].astype(np.float32):
        codes = np.clip(np.rint(groups * search.inverse(peak / steps)[:, :, None]), -largest, largest - 1)
        scale = (codes * groups).sum(axis=2) * search.inverse((codes * codes).sum(axis=2))
        error = np.square(scale[:, :, None] * codes - groups).sum(axis=2)
        better = error < best_error
        best_scale = np.where(better, scale, best_scale)
        best_error = np.where(better, error, best_error)
    return best_scale


PAIRS, _NIBBLES = CodeField("codes", 2, stride=32), CodeField("codes", 4, stride=32)
_D, _BASE = lanes("d", "<f2", SUPERBLOCK), lanes("base", "<f2", SUPERBLOCK)

Q2_K = Format(
    "q2_k",
    np.dtype([("scales", "u1", 16), ("codes", "u1", 64), ("d", "<f2"), ("base", "<f2")]),
    SUPERBLOCK,
    partial(_encode_scales_and_minima, 16, 3, 15),
    Affine(1),
    (PAIRS,),
    lambda fields: {"s": fields["scales"] & 0x0F, "z": fields["scales"] >> 4},
    lambda parts: {"scales": parts["s"] | parts["z"] << 4} if "s" in parts else {},
    planes=(bits(2), lanes("scales", "u1", 16), _D, _BASE),
    reader="q2_k",
    gguf_type=10,
)
Q3_K = Format(
    "q3_k",
    np.dtype([("high", "u1", 32), ("codes", "u1", 64), ("scales", "u1", 12), ("d", "<f2")]),
    SUPERBLOCK,
    partial(_encode_signed_scales, 4, 32),
    Affine(4),
    (PAIRS, CodeField("high", 1, stride=32, at=2)),
    lambda fields: {"s": unpack_signed_scales(fields["scales"])},
    lambda parts: {"scales": pack_signed_scales(parts["s"])} if "s" in parts else {},
    planes=(bits(2), bits(1, at=2), words("scales", 96 / SUPERBLOCK, "u1"), _D),
    reader="q3_k",
    gguf_type=11,
)
Q4_K = Format(
    "q4_k",
    np.dtype([("d", "<f2"), ("base", "<f2"), ("scales", "u1", 12), ("codes", "u1", 128)]),
    SUPERBLOCK,
    partial(_encode_scales_and_minima, 32, 15, 63),
    Affine(1),
    (_NIBBLES,),
    _unpacked_scales,
    _packed_scales,
    planes=(bits(4), lanes("s", "u1", 32), lanes("z", "u1", 32), _D, _BASE),
    gguf_type=12,
)
Q5_K = Format(
    "q5_k",
    np.dtype([("d", "<f2"), ("base", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("codes", "u1", 128)]),
    SUPERBLOCK,
    partial(_encode_scales_and_minima, 32, 31, 63),
    Affine(1),
    (_NIBBLES, CodeField("high", 1, stride=32, at=4)),
    _unpacked_scales,
    _packed_scales,
    planes=(bits(4), bits(1, at=4), lanes("s", "u1", 32), lanes("z", "u1", 32), _D, _BASE),
    gguf_type=13,
)
Q6_K = Format(
    "q6_k",
    np.dtype([("low", "u1", 128), ("high", "u1", 64), ("s", "i1", 16), ("d", "<f2")]),
    SUPERBLOCK,
    partial(_encode_signed_scales, 32, 128),
    Affine(32),
    (CodeField("low", 4, stride=64), CodeField("high", 2, stride=32, at=4)),
    planes=(bits(4), bits(2, at=4), lanes("s", "i1", 16), _D),
    gguf_type=14,
)

FORMATS = (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)

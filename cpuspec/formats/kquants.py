"""Superblocks of 256 values with quantized scales: q2_k (scale and minimum per 16 values), q3_k (scale per 16), q4_k and q5_k
(scale and minimum per 32), q6_k (scale per 16).

Layouts as GGUF files store them. Decoding equals ggml's bit for bit; encoding is a least-squares search of our own, so the
bytes differ from other tools' while the error stays in the same range.
"""

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats import search
from cpuspec.formats.tensor import F32, U8, Format

SUPERBLOCK = 256

Q2_K_LAYOUT = np.dtype([("scales", "u1", 16), ("codes", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
Q3_K_LAYOUT = np.dtype([("high", "u1", 32), ("codes", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
Q4_K_LAYOUT = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("codes", "u1", 128)])
Q5_K_LAYOUT = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("codes", "u1", 128)])
Q6_K_LAYOUT = np.dtype([("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])


def decode_q2_k(blocks: U8) -> F32:
    """d * scale * code - dmin * minimum, with sixteen 4-bit scales (low halves) and minima (high halves)."""
    fields = blocks.view(Q2_K_LAYOUT)
    packed = fields["scales"].reshape(-1, 16)
    return _apply_scales_and_minima(fields, packed & 0x0F, packed >> 4, codes_q2_k(fields))


def encode_q2_k(values: F32) -> U8:
    """Scales and minima by least squares per 16 values, then codes for the scales as stored."""
    fields = np.empty(len(values), Q2_K_LAYOUT)
    scales, minima, codes = _encode_scales_and_minima(values.reshape(-1, 16, 16), 3, 15, fields)
    fields["scales"] = scales | minima << 4
    fields["codes"] = fields_q2_k(codes)["codes"]
    return fields.view(np.uint8).reshape(-1, Q2_K_LAYOUT.itemsize)


def decode_q3_k(blocks: U8) -> F32:
    """d * scale * (code - 4) with sixteen signed 6-bit scales; bit s of byte i of `high` is the third bit of value 32 s + i."""
    fields = blocks.view(Q3_K_LAYOUT)
    scales = fields["d"].astype(np.float32).reshape(-1, 1) * unpack_signed_scales(fields["scales"].reshape(-1, 12)).astype(
        np.float32
    )
    codes = codes_q3_k(fields).reshape(-1, 16, 16).astype(np.float32)
    return (scales[:, :, None] * (codes - np.float32(4))).reshape(-1, SUPERBLOCK)


def encode_q3_k(values: F32) -> U8:
    """As q6_k with 8 codes and 64 scales."""
    fields = np.empty(len(values), Q3_K_LAYOUT)
    scales, codes = _encode_signed_scales(values.reshape(-1, 16, 16), 4, 32, fields)
    fields["scales"] = pack_signed_scales(scales)
    for name, part in fields_q3_k(codes).items():
        fields[name] = part
    return fields.view(np.uint8).reshape(-1, Q3_K_LAYOUT.itemsize)


def decode_q4_k(blocks: U8) -> F32:
    """d * scale * code - dmin * minimum, with eight 6-bit scales and minima; each 32 bytes hold two sub-blocks' nibbles."""
    fields = blocks.view(Q4_K_LAYOUT)
    return _apply_scales_and_minima(fields, *unpack_scales(fields["scales"].reshape(-1, 12)), codes_q4_k(fields))


def encode_q4_k(values: F32) -> U8:
    """Scales and minima by least squares per 32 values, then codes for the scales as stored."""
    fields = np.empty(len(values), Q4_K_LAYOUT)
    scales, minima, codes = _encode_scales_and_minima(values.reshape(-1, 8, 32), 15, 63, fields)
    fields["scales"] = pack_scales(scales, minima)
    fields["codes"] = fields_q4_k(codes)["codes"]
    return fields.view(np.uint8).reshape(-1, Q4_K_LAYOUT.itemsize)


def decode_q5_k(blocks: U8) -> F32:
    """As q4_k with a fifth bit: bit s of byte i of `high` belongs to value i of sub-block s."""
    fields = blocks.view(Q5_K_LAYOUT)
    return _apply_scales_and_minima(fields, *unpack_scales(fields["scales"].reshape(-1, 12)), codes_q5_k(fields))


def encode_q5_k(values: F32) -> U8:
    """As q4_k with 32 codes."""
    fields = np.empty(len(values), Q5_K_LAYOUT)
    scales, minima, codes = _encode_scales_and_minima(values.reshape(-1, 8, 32), 31, 63, fields)
    fields["scales"] = pack_scales(scales, minima)
    for name, part in fields_q5_k(codes).items():
        fields[name] = part
    return fields.view(np.uint8).reshape(-1, Q5_K_LAYOUT.itemsize)


def decode_q6_k(blocks: U8) -> F32:
    """d * scale * (code - 32) with sixteen signed 8-bit scales.

    Each half of 128 values: 64 bytes of low nibbles (values 0..63 low, 64..127 high) and 32 bytes of four two-bit tops each.
    """
    fields = blocks.view(Q6_K_LAYOUT)
    return _apply_signed_scales(fields, fields["scales"].reshape(-1, 16), codes_q6_k(fields), 32)


def encode_q6_k(values: F32) -> U8:
    """Scales by least squares per 16 values, then codes for the scales as stored."""
    fields = np.empty(len(values), Q6_K_LAYOUT)
    fields["scales"], codes = _encode_signed_scales(values.reshape(-1, 16, 16), 32, 128, fields)
    for name, part in fields_q6_k(codes).items():
        fields[name] = part
    return fields.view(np.uint8).reshape(-1, Q6_K_LAYOUT.itemsize)


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


def codes_q2_k(fields: NDArray) -> NDArray:
    """Codes 0..3, U8 [n, 256]: byte i of each half of 32 bytes holds values i, 32 + i, 64 + i and 96 + i of its 128."""
    halves = fields["codes"].reshape(-1, 2, 1, 32)
    return (halves >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, SUPERBLOCK)


def fields_q2_k(codes: NDArray) -> dict[str, NDArray]:
    """The fields that hold the low two bits of codes of whole superblocks."""
    pairs = (codes & 3).reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    return {"codes": np.bitwise_or.reduce(pairs, axis=2).reshape(-1, 64)}


def codes_q3_k(fields: NDArray) -> NDArray:
    """Codes 0..7, U8 [n, 256], the third bit from `high`."""
    high = fields["high"].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return codes_q2_k(fields) | (high << 2).reshape(-1, SUPERBLOCK)


def fields_q3_k(codes: NDArray) -> dict[str, NDArray]:
    """The fields that hold codes 0..7 of whole superblocks."""
    high = (codes >> 2).reshape(-1, 8, 32)
    return {"high": np.packbits(high, axis=1, bitorder="little")[:, 0], **fields_q2_k(codes)}


def codes_q4_k(fields: NDArray) -> NDArray:
    """Codes [n, 8, 32]: run i of 32 bytes holds sub-block 2i in its low halves and 2i + 1 in its high halves."""
    runs = fields["codes"].reshape(-1, 4, 1, 32)
    return (runs >> np.array([0, 4], np.uint8)[:, None] & 0x0F).reshape(-1, 8, 32)


def fields_q4_k(codes: NDArray) -> dict[str, NDArray]:
    """The fields that hold codes [n, 8, 32]."""
    return {"codes": ((codes[:, 0::2] & 0x0F) | codes[:, 1::2] << 4).reshape(-1, 128)}


def codes_q5_k(fields: NDArray) -> NDArray:
    """Codes [n, 8, 32], the fifth bit from `high`."""
    high = fields["high"].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return codes_q4_k(fields) | high << 4


def fields_q5_k(codes: NDArray) -> dict[str, NDArray]:
    """The fields that hold codes [n, 8, 32]."""
    return {"high": np.packbits(codes >> 4, axis=1, bitorder="little")[:, 0], **fields_q4_k(codes)}


def codes_q6_k(fields: NDArray) -> NDArray:
    """Codes 0..63, U8 [n, 256]."""
    low = fields["low"].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 0x0F
    high = fields["high"].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 0x03
    return low.reshape(-1, SUPERBLOCK) | high.reshape(-1, SUPERBLOCK) << 4


def fields_q6_k(codes: NDArray) -> dict[str, NDArray]:
    """The fields that hold codes 0..63 of whole superblocks."""
    low = (codes & 0x0F).reshape(-1, 2, 2, 64)
    high = (codes >> 4).reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    return {"low": (low[:, :, 0] | low[:, :, 1] << 4).reshape(-1, 128), "high": np.bitwise_or.reduce(high, axis=2).reshape(-1, 64)}


def _apply_scales_and_minima(fields: NDArray, scales: NDArray, minima: NDArray, codes: NDArray) -> F32:
    d = fields["d"].astype(np.float32).reshape(-1, 1) * scales.astype(np.float32)
    m = fields["dmin"].astype(np.float32).reshape(-1, 1) * minima.astype(np.float32)
    parts = codes.reshape(*scales.shape, -1).astype(np.float32)
    return (d[:, :, None] * parts - m[:, :, None]).reshape(-1, SUPERBLOCK)


def _apply_signed_scales(fields: NDArray, scales: NDArray, codes: NDArray, zero: int) -> F32:
    d = fields["d"].astype(np.float32).reshape(-1, 1) * scales.astype(np.float32)
    parts = codes.reshape(*scales.shape, -1).astype(np.float32) - np.float32(zero)
    return (d[:, :, None] * parts).reshape(-1, SUPERBLOCK)


def _encode_scales_and_minima(parts: F32, largest: int, steps: int, fields: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Fill d and dmin of `fields`; return scales and minima 0..steps, U8 [n, s], and codes 0..largest, U8 [n, s, k]."""
    scale, minimum = _fit_asymmetric(parts, largest) if largest > 3 else _fit_few_codes(parts, largest)
    fields["d"] = scale.max(axis=1) / steps
    fields["dmin"] = minimum.max(axis=1) / steps
    d = fields["d"].astype(np.float32)[:, None]
    dmin = fields["dmin"].astype(np.float32)[:, None]
    scales = np.clip(np.rint(scale * search.inverse(d)), 0, steps).astype(np.uint8)
    minima = np.clip(np.rint(minimum * search.inverse(dmin)), 0, steps).astype(np.uint8)
    stored_scale = (d * scales.astype(np.float32))[:, :, None]
    stored_minimum = (dmin * minima.astype(np.float32))[:, :, None]
    return scales, minima, np.clip(np.rint((parts + stored_minimum) * search.inverse(stored_scale)), 0, largest).astype(np.uint8)


def _encode_signed_scales(parts: F32, largest: int, steps: int, fields: NDArray) -> tuple[NDArray, NDArray]:
    """Fill d of `fields`; return scales -steps..steps - 1, I8 [n, s], and codes 0..2 largest - 1, U8 [n, s, k]."""
    scale = _fit_symmetric(parts, largest)
    # The scale of largest magnitude becomes -steps, the end of the signed range that reaches furthest.
    peak = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    fields["d"] = (peak / -steps)[:, 0]
    d = fields["d"].astype(np.float32)[:, None]
    scales = np.clip(np.rint(scale * search.inverse(d)), -steps, steps - 1).astype(np.int8)
    stored = (d * scales.astype(np.float32))[:, :, None]
    return scales, (np.clip(np.rint(parts * search.inverse(stored)), -largest, largest - 1) + largest).astype(np.uint8)


def _fit_asymmetric(parts: NDArray, largest: int) -> tuple[NDArray, NDArray]:
    """Scale and minimum (both >= 0, [n, s]) that bring scale * code - minimum closest to `parts` [n, s, k] in squared error.

    Tries ranges a little narrower and wider than the block's own; for the codes of each, the best line through
    (code, value) has a closed form.
    """
    lowest = np.minimum(parts.min(axis=2), 0)
    span = parts.max(axis=2) - lowest
    best_scale, best_minimum = span / largest, -lowest
    best_error = np.full(span.shape, np.inf, np.float32)
    count = np.float32(parts.shape[2])
    value_sum = parts.sum(axis=2)
    for steps in np.linspace(largest - 1.5, largest + 1, 11, dtype=np.float32):
        codes = np.clip(np.rint((parts - lowest[:, :, None]) * search.inverse(span / steps)[:, :, None]), 0, largest)
        code_sum = codes.sum(axis=2)
        square_sum = (codes * codes).sum(axis=2)
        product_sum = (codes * parts).sum(axis=2)
        slope = (count * product_sum - code_sum * value_sum) * search.inverse(count * square_sum - code_sum * code_sum)
        intercept = (value_sum - slope * code_sum) / count
        # The stored minimum cannot be negative: then the line goes through zero.
        through_zero = intercept > 0
        slope = np.where(through_zero, product_sum * search.inverse(square_sum), slope)
        minimum = np.where(through_zero, np.float32(0), -intercept)
        error = np.square(slope[:, :, None] * codes - minimum[:, :, None] - parts).sum(axis=2)
        better = (error < best_error) & (slope > 0)
        best_scale = np.where(better, slope, best_scale)
        best_minimum = np.where(better, minimum, best_minimum)
        best_error = np.where(better, error, best_error)
    return best_scale, best_minimum


def _fit_few_codes(parts: NDArray, largest: int) -> tuple[NDArray, NDArray]:
    """As `_fit_asymmetric`."""
    groups = np.ascontiguousarray(parts.reshape(-1, parts.shape[2]).T)
    d, zero = search.fit(groups, largest, search.FEW_CODES, lambda d, start: (d, np.maximum(-start * search.inverse(d), 0)))
    return d.reshape(parts.shape[:2]), (d * zero).reshape(parts.shape[:2])


# How many codes the peak lies from zero in the searches of `_fit_symmetric`, by how many codes there are below zero.
_PEAKS = {4: -4 / np.linspace(0.6, 1.15, 9), 32: np.linspace(-33, -29, 9)}


def _fit_symmetric(parts: NDArray, largest: int) -> NDArray:
    """Signed scale [n, s] that brings scale * code, codes -largest..largest - 1, closest to `parts` [n, s, k] in squared error."""
    peak = np.take_along_axis(parts, np.abs(parts).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    best_scale = peak / -largest
    best_error = np.full(peak.shape, np.inf, np.float32)
    for steps in _PEAKS[largest].astype(np.float32):
        codes = np.clip(np.rint(parts * search.inverse(peak / steps)[:, :, None]), -largest, largest - 1)
        scale = (codes * parts).sum(axis=2) * search.inverse((codes * codes).sum(axis=2))
        error = np.square(scale[:, :, None] * codes - parts).sum(axis=2)
        better = error < best_error
        best_scale = np.where(better, scale, best_scale)
        best_error = np.where(better, error, best_error)
    return best_scale


Q2_K = Format("q2_k", SUPERBLOCK, Q2_K_LAYOUT.itemsize, decode_q2_k, encode_q2_k)
Q3_K = Format("q3_k", SUPERBLOCK, Q3_K_LAYOUT.itemsize, decode_q3_k, encode_q3_k)
Q4_K = Format("q4_k", SUPERBLOCK, Q4_K_LAYOUT.itemsize, decode_q4_k, encode_q4_k)
Q5_K = Format("q5_k", SUPERBLOCK, Q5_K_LAYOUT.itemsize, decode_q5_k, encode_q5_k)
Q6_K = Format("q6_k", SUPERBLOCK, Q6_K_LAYOUT.itemsize, decode_q6_k, encode_q6_k)

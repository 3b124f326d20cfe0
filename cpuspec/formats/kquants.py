"""Superblocks of 256 values with quantized scales: q4_k, q5_k (scale and minimum per 32 values), q6_k (scale per 16).

Layouts as GGUF files store them. Decoding equals ggml's bit for bit; encoding is a least-squares search of our own, so the
bytes differ from other tools' while the error stays in the same range.
"""

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats.tensor import F32, U8, Format

SUPERBLOCK = 256

Q4_K_LAYOUT = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("codes", "u1", 128)])
Q5_K_LAYOUT = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("codes", "u1", 128)])
Q6_K_LAYOUT = np.dtype([("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])


def decode_q4_k(blocks: U8) -> F32:
    """d * scale * code - dmin * minimum, with eight 6-bit scales and minima; each 32 bytes hold two sub-blocks' nibbles."""
    fields = blocks.view(Q4_K_LAYOUT)
    return _apply_scales_and_minima(fields, codes_q4_k(fields))


def encode_q4_k(values: F32) -> U8:
    """Scales and minima by least squares per 32 values, then codes for the scales as stored."""
    fields = np.empty(len(values), Q4_K_LAYOUT)
    codes = _encode_scales_and_minima(values, 15, fields)
    fields["codes"] = fields_q4_k(codes)["codes"]
    return fields.view(np.uint8).reshape(-1, Q4_K_LAYOUT.itemsize)


def decode_q5_k(blocks: U8) -> F32:
    """As q4_k with a fifth bit: bit s of byte i of `high` belongs to value i of sub-block s."""
    fields = blocks.view(Q5_K_LAYOUT)
    return _apply_scales_and_minima(fields, codes_q5_k(fields))


def encode_q5_k(values: F32) -> U8:
    """As q4_k with 32 codes."""
    fields = np.empty(len(values), Q5_K_LAYOUT)
    codes = _encode_scales_and_minima(values, 31, fields)
    for name, part in fields_q5_k(codes).items():
        fields[name] = part
    return fields.view(np.uint8).reshape(-1, Q5_K_LAYOUT.itemsize)


def decode_q6_k(blocks: U8) -> F32:
    """d * scale * (code - 32) with sixteen signed 8-bit scales.

    Each half of 128 values: 64 bytes of low nibbles (values 0..63 low, 64..127 high) and 32 bytes of four two-bit tops each.
    """
    fields = blocks.view(Q6_K_LAYOUT)
    codes = codes_q6_k(fields)
    scales = fields["d"].astype(np.float32).reshape(-1, 1) * fields["scales"].reshape(-1, 16).astype(np.float32)
    return (scales[:, :, None] * (codes.reshape(-1, 16, 16).astype(np.float32) - np.float32(32))).reshape(-1, SUPERBLOCK)


def encode_q6_k(values: F32) -> U8:
    """Scales by least squares per 16 values, then codes for the scales as stored."""
    parts = values.reshape(-1, 16, 16)
    scale = _fit_symmetric(parts)
    # The scale of largest magnitude becomes -128, the end of the signed range that reaches furthest.
    peak = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    fields = np.empty(len(values), Q6_K_LAYOUT)
    fields["d"] = (peak / -128)[:, 0]
    d = fields["d"].astype(np.float32)[:, None]
    fields["scales"] = np.clip(np.rint(scale * _inverse(d)), -128, 127)
    stored = d * fields["scales"].astype(np.float32)
    codes = (np.clip(np.rint(parts * _inverse(stored)[:, :, None]), -32, 31) + 32).astype(np.uint8)
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


def _apply_scales_and_minima(fields: NDArray, codes: NDArray) -> F32:
    scales, minima = unpack_scales(fields["scales"].reshape(-1, 12))
    d = fields["d"].astype(np.float32).reshape(-1, 1) * scales.astype(np.float32)
    m = fields["dmin"].astype(np.float32).reshape(-1, 1) * minima.astype(np.float32)
    return (d[:, :, None] * codes.astype(np.float32) - m[:, :, None]).reshape(-1, SUPERBLOCK)


def _encode_scales_and_minima(values: F32, largest: int, fields: NDArray) -> NDArray:
    """Fill d, dmin and scales of `fields`; return the codes 0..largest, U8 [n, 8, 32]."""
    parts = values.reshape(-1, 8, 32)
    scale, minimum = _fit_asymmetric(parts, largest)
    fields["d"] = scale.max(axis=1) / 63
    fields["dmin"] = minimum.max(axis=1) / 63
    d = fields["d"].astype(np.float32)[:, None]
    dmin = fields["dmin"].astype(np.float32)[:, None]
    scales = np.clip(np.rint(scale * _inverse(d)), 0, 63).astype(np.uint8)
    minima = np.clip(np.rint(minimum * _inverse(dmin)), 0, 63).astype(np.uint8)
    fields["scales"] = pack_scales(scales, minima)
    stored_scale = (d * scales.astype(np.float32))[:, :, None]
    stored_minimum = (dmin * minima.astype(np.float32))[:, :, None]
    return np.clip(np.rint((parts + stored_minimum) * _inverse(stored_scale)), 0, largest).astype(np.uint8)


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
        codes = np.clip(np.rint((parts - lowest[:, :, None]) * _inverse(span / steps)[:, :, None]), 0, largest)
        code_sum = codes.sum(axis=2)
        square_sum = (codes * codes).sum(axis=2)
        product_sum = (codes * parts).sum(axis=2)
        slope = (count * product_sum - code_sum * value_sum) * _inverse(count * square_sum - code_sum * code_sum)
        intercept = (value_sum - slope * code_sum) / count
        # The stored minimum cannot be negative: then the line goes through zero.
        through_zero = intercept > 0
        slope = np.where(through_zero, product_sum * _inverse(square_sum), slope)
        minimum = np.where(through_zero, np.float32(0), -intercept)
        error = np.square(slope[:, :, None] * codes - minimum[:, :, None] - parts).sum(axis=2)
        better = (error < best_error) & (slope > 0)
        best_scale = np.where(better, slope, best_scale)
        best_minimum = np.where(better, minimum, best_minimum)
        best_error = np.where(better, error, best_error)
    return best_scale, best_minimum


def _fit_symmetric(parts: NDArray) -> NDArray:
    """Signed scale [n, s] that brings scale * code, codes -32..31, closest to `parts` [n, s, k] in squared error."""
    peak = np.take_along_axis(parts, np.abs(parts).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    best_scale = peak / -32
    best_error = np.full(peak.shape, np.inf, np.float32)
    for steps in np.linspace(-33, -29, 9, dtype=np.float32):
        codes = np.clip(np.rint(parts * _inverse(peak / steps)[:, :, None]), -32, 31)
        scale = (codes * parts).sum(axis=2) * _inverse((codes * codes).sum(axis=2))
        error = np.square(scale[:, :, None] * codes - parts).sum(axis=2)
        better = error < best_error
        best_scale = np.where(better, scale, best_scale)
        best_error = np.where(better, error, best_error)
    return best_scale


def _inverse(values: NDArray) -> NDArray:
    """1 / values, and 0 where that is not finite."""
    inverse = np.float32(1) / values
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


Q4_K = Format("q4_k", SUPERBLOCK, Q4_K_LAYOUT.itemsize, decode_q4_k, encode_q4_k)
Q5_K = Format("q5_k", SUPERBLOCK, Q5_K_LAYOUT.itemsize, decode_q5_k, encode_q5_k)
Q6_K = Format("q6_k", SUPERBLOCK, Q6_K_LAYOUT.itemsize, decode_q6_k, encode_q6_k)

"""Blocks of 32 values under one f16 scale, with or without a minimum: q4_0, q4_1, q5_0, q5_1, q8_0.

Layouts as GGUF files store them. Nibbles: value i of 0..15 in the low half of byte i, value 16 + i in its high half.
Encoding rounds as ggml's reference does, so that a tensor encoded here has the bytes that other tools write.
"""

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats.tensor import F32, U8, Format

BLOCK = 32

Q4_0_LAYOUT = np.dtype([("d", "<f2"), ("codes", "u1", 16)])
Q4_1_LAYOUT = np.dtype([("d", "<f2"), ("m", "<f2"), ("codes", "u1", 16)])
Q5_0_LAYOUT = np.dtype([("d", "<f2"), ("high", "u1", 4), ("codes", "u1", 16)])
Q5_1_LAYOUT = np.dtype([("d", "<f2"), ("m", "<f2"), ("high", "u1", 4), ("codes", "u1", 16)])
Q8_0_LAYOUT = np.dtype([("d", "<f2"), ("codes", "i1", 32)])


def decode_q4_0(blocks: U8) -> F32:
    """d * (code - 8)."""
    fields = blocks.view(Q4_0_LAYOUT)
    return _column(fields, "d") * (codes_4_bits(fields).astype(np.float32) - np.float32(8))


def encode_q4_0(values: F32) -> U8:
    """The value of largest magnitude becomes code 0, so that the wider negative side of the codes is used."""
    d = _signed_peak(values) / -8
    codes = _truncate(values * _inverse(d) + np.float32(8.5), 15)
    return _pack(Q4_0_LAYOUT, d=d, **fields_4_bits(codes))


def decode_q4_1(blocks: U8) -> F32:
    """d * code + m."""
    fields = blocks.view(Q4_1_LAYOUT)
    return _column(fields, "d") * codes_4_bits(fields).astype(np.float32) + _column(fields, "m")


def encode_q4_1(values: F32) -> U8:
    """Codes 0..15 from the minimum to the maximum of the block."""
    low = values.min(axis=1, keepdims=True)
    d = (values.max(axis=1, keepdims=True) - low) / 15
    codes = _truncate((values - low) * _inverse(d) + np.float32(0.5), 15)
    return _pack(Q4_1_LAYOUT, d=d, m=low, **fields_4_bits(codes))


def decode_q5_0(blocks: U8) -> F32:
    """d * (code - 16); bit i of `high` is the fifth bit of code i."""
    fields = blocks.view(Q5_0_LAYOUT)
    return _column(fields, "d") * (codes_5_bits(fields).astype(np.float32) - np.float32(16))


def encode_q5_0(values: F32) -> U8:
    """As q4_0 with 32 codes."""
    d = _signed_peak(values) / -16
    codes = _truncate(values * _inverse(d) + np.float32(16.5), 31)
    return _pack(Q5_0_LAYOUT, d=d, **fields_5_bits(codes))


def decode_q5_1(blocks: U8) -> F32:
    """d * code + m; bit i of `high` is the fifth bit of code i."""
    fields = blocks.view(Q5_1_LAYOUT)
    return _column(fields, "d") * codes_5_bits(fields).astype(np.float32) + _column(fields, "m")


def encode_q5_1(values: F32) -> U8:
    """As q4_1 with 32 codes."""
    low = values.min(axis=1, keepdims=True)
    d = (values.max(axis=1, keepdims=True) - low) / 31
    codes = _truncate((values - low) * _inverse(d) + np.float32(0.5), 31)
    return _pack(Q5_1_LAYOUT, d=d, m=low, **fields_5_bits(codes))


def decode_q8_0(blocks: U8) -> F32:
    """d * code, codes signed."""
    fields = blocks.view(Q8_0_LAYOUT)
    return _column(fields, "d") * fields["codes"].reshape(-1, BLOCK).astype(np.float32)


def encode_q8_0(values: F32) -> U8:
    """Codes -127..127, halves rounded away from zero."""
    d = np.abs(values).max(axis=1, keepdims=True) / 127
    scaled = values * _inverse(d)
    magnitude = np.abs(scaled)
    whole = np.floor(magnitude)
    # Not floor(magnitude + 0.5): that sum rounds 0.49999997 up.
    rounded = whole + np.floor(2 * (magnitude - whole))
    return _pack(Q8_0_LAYOUT, d=d, codes=np.copysign(rounded, scaled).astype(np.int8))


def _column(fields: NDArray, name: str) -> F32:
    """A f16 field of the blocks as F32 [n, 1]."""
    return fields[name].astype(np.float32).reshape(-1, 1)


def codes_4_bits(fields: NDArray) -> NDArray:
    """Codes 0..15, U8 [n, 32]."""
    packed = fields["codes"].reshape(-1, 16)
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def fields_4_bits(codes: NDArray) -> dict[str, NDArray]:
    """The fields that hold the low four bits of codes [n, 32]."""
    return {"codes": (codes[:, :16] & 0x0F) | codes[:, 16:] << 4}


def codes_5_bits(fields: NDArray) -> NDArray:
    """Codes 0..31 from nibbles and the fifth bits, U8 [n, 32]."""
    high = np.unpackbits(fields["high"].reshape(-1, 4), axis=1, bitorder="little")
    return codes_4_bits(fields) | high << 4


def fields_5_bits(codes: NDArray) -> dict[str, NDArray]:
    """The fields that hold codes 0..31, [n, 32]."""
    return {"high": np.packbits(codes >> 4, axis=1, bitorder="little"), **fields_4_bits(codes)}


def _signed_peak(values: F32) -> NDArray:
    """The value of largest magnitude of each block, with its sign, [n, 1]; the first of equals."""
    return np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)


def _inverse(d: NDArray) -> NDArray:
    """1 / d, and 0 where d is zero or so small that the inverse overflows (f16 stores such a scale as zero)."""
    inverse = np.float32(1) / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _truncate(scaled: NDArray, largest: int) -> NDArray:
    """Codes from values that already carry their rounding half, cut to 0..largest."""
    return np.clip(scaled, 0, largest).astype(np.uint8)


def _pack(layout: np.dtype, *, d: NDArray, codes: NDArray, m: NDArray | None = None, high: NDArray | None = None) -> U8:
    """Blocks [n, block_bytes] from their fields."""
    fields = np.empty(len(codes), layout)
    fields["d"] = d[:, 0]
    fields["codes"] = codes
    if m is not None:
        fields["m"] = m[:, 0]
    if high is not None:
        fields["high"] = high
    return fields.view(np.uint8).reshape(-1, layout.itemsize)


Q4_0 = Format("q4_0", BLOCK, Q4_0_LAYOUT.itemsize, decode_q4_0, encode_q4_0)
Q4_1 = Format("q4_1", BLOCK, Q4_1_LAYOUT.itemsize, decode_q4_1, encode_q4_1)
Q5_0 = Format("q5_0", BLOCK, Q5_0_LAYOUT.itemsize, decode_q5_0, encode_q5_0)
Q5_1 = Format("q5_1", BLOCK, Q5_1_LAYOUT.itemsize, decode_q5_1, encode_q5_1)
Q8_0 = Format("q8_0", BLOCK, Q8_0_LAYOUT.itemsize, decode_q8_0, encode_q8_0)

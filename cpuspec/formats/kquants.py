"""Superblocks of 256 values with quantized scales: q2_k (scale and minimum per 16 values), q3_k (scale per 16), q4_k and q5_k
(scale and minimum per 32), q6_k (scale per 16).

Layouts as GGUF files store them: d and base (their dmin) are f16 of a superblock, s and z the scales and minima of its groups.
Decoding equals ggml's bit for bit. Encoding is `Format.searched`, so the bytes differ from other tools'.
"""

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats.format import Affine, CodeField, Format, Parts
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


PAIRS, _NIBBLES = CodeField("codes", 2, stride=32), CodeField("codes", 4, stride=32)
_D, _BASE = lanes("d", "<f2", SUPERBLOCK), lanes("base", "<f2", SUPERBLOCK)

Q2_K = Format(
    "q2_k",
    np.dtype([("scales", "u1", 16), ("codes", "u1", 64), ("d", "<f2"), ("base", "<f2")]),
    SUPERBLOCK,
    None,
    Affine(1),
    (PAIRS,),
    lambda fields: {"s": fields["scales"] & 0x0F, "z": fields["scales"] >> 4},
    lambda parts: {"scales": parts["s"] | parts["z"] << 4} if "s" in parts else {},
    planes=(bits(2), lanes("scales", "u1", 16), _D, _BASE),
    reader="q2_k",
    gguf_type=10,
    scale_range=(0, 15),
)
Q3_K = Format(
    "q3_k",
    np.dtype([("high", "u1", 32), ("codes", "u1", 64), ("scales", "u1", 12), ("d", "<f2")]),
    SUPERBLOCK,
    None,
    Affine(4),
    (PAIRS, CodeField("high", 1, stride=32, at=2)),
    lambda fields: {"s": unpack_signed_scales(fields["scales"])},
    lambda parts: {"scales": pack_signed_scales(parts["s"])} if "s" in parts else {},
    planes=(bits(2), bits(1, at=2), words("scales", 96 / SUPERBLOCK, "u1"), _D),
    reader="q3_k",
    gguf_type=11,
    scale_range=(-32, 31),
)
Q4_K = Format(
    "q4_k",
    np.dtype([("d", "<f2"), ("base", "<f2"), ("scales", "u1", 12), ("codes", "u1", 128)]),
    SUPERBLOCK,
    None,
    Affine(1),
    (_NIBBLES,),
    _unpacked_scales,
    _packed_scales,
    planes=(bits(4), lanes("s", "u1", 32), lanes("z", "u1", 32), _D, _BASE),
    gguf_type=12,
    scale_range=(0, 63),
)
Q5_K = Format(
    "q5_k",
    np.dtype([("d", "<f2"), ("base", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("codes", "u1", 128)]),
    SUPERBLOCK,
    None,
    Affine(1),
    (_NIBBLES, CodeField("high", 1, stride=32, at=4)),
    _unpacked_scales,
    _packed_scales,
    planes=(bits(4), bits(1, at=4), lanes("s", "u1", 32), lanes("z", "u1", 32), _D, _BASE),
    gguf_type=13,
    scale_range=(0, 63),
)
Q6_K = Format(
    "q6_k",
    np.dtype([("low", "u1", 128), ("high", "u1", 64), ("s", "i1", 16), ("d", "<f2")]),
    SUPERBLOCK,
    None,
    Affine(32),
    (CodeField("low", 4, stride=64), CodeField("high", 2, stride=32, at=4)),
    planes=(bits(4), bits(2, at=4), lanes("s", "i1", 16), _D),
    gguf_type=14,
    scale_range=(-128, 127),
)

FORMATS = (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)

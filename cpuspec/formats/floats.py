"""The formats whose blocks are single numbers: f32, f16, bf16."""

import numpy as np

from cpuspec.formats.tensor import F32, U8, Format


def decode_f32(blocks: U8) -> F32:
    """Four bytes, little end first."""
    return blocks.view("<f4")


def encode_f32(values: F32) -> U8:
    """The bytes as they are."""
    return values.astype("<f4", copy=False).view(np.uint8)


def decode_f16(blocks: U8) -> F32:
    """IEEE half precision."""
    return blocks.view("<f2").astype(np.float32)


def encode_f16(values: F32) -> U8:
    """Rounded to nearest even."""
    return values.astype("<f2").view(np.uint8)


def decode_bf16(blocks: U8) -> F32:
    """The upper half of an f32."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def encode_bf16(values: F32) -> U8:
    """Rounded to nearest even; a nan keeps its sign and becomes quiet, so that rounding cannot turn it into infinity."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | 0x0040
    return np.where(np.isnan(values), quiet, rounded).astype("<u2").view(np.uint8)


F32_FORMAT = Format("f32", 1, 4, decode_f32, encode_f32)
F16 = Format("f16", 1, 2, decode_f16, encode_f16)
BF16 = Format("bf16", 1, 2, decode_bf16, encode_bf16)

"""Rows of an embedding matrix from the bytes of the file's own format to f32, as `Format.decode` gives them, bit for bit.

A decoder is made from a format's row: where its blocks have codes and factors, and what codes mean. Packed factors have functions
here; formats with others are decoded by numpy, in front of a forward.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from cpuspec.formats import FORMATS, Format
from cpuspec.formats.nl4 import LEAST_MOVE
from cpuspec.kernels import machine_code, selfcheck, simd
from cpuspec.kernels.options import compiled

Decoder = Callable[[int, int, int], None]  # (address of the first block, blocks, address of the values) -> None


def _f32(row, blocks, out):
    for i in range(blocks):
        simd.poke_i32(out + 4 * i, simd.int32(simd.peek_i32(row + 4 * i)))


def _f16(row, blocks, out):
    for i in range(blocks):
        simd.poke_f32(out + 4 * i, simd.peek_f16(row + 2 * i))


def _bf16(row, blocks, out):
    for i in range(blocks):
        simd.poke_i32(out + 4 * i, simd.int32(simd.peek_u16(row + 2 * i) << 16))


@compiled
def _scale_of_k(scales, part):
    """Scale and minimum of sub-block 0..7, from the twelve bytes that `kquants.unpack_scales` describes."""
    first, second = simd.peek_u8(scales + part % 4), simd.peek_u8(scales + 4 + part % 4)
    if part < 4:
        return first & 63, second & 63
    rest = simd.peek_u8(scales + 4 + part)
    return (rest & 15) | first >> 6 << 4, rest >> 4 | second >> 6 << 4


# The factors of a group, by its block's address and its number in the block: scale, zero and minimum, all f32. A value is
# scale * (level of the code - zero) - minimum.


def _q4_k(at, group):
    scale, minimum = _scale_of_k(at + 4, group)
    d, base = simd.peek_f16(at) * simd.to_float(scale), simd.peek_f16(at + 2) * simd.to_float(minimum)
    return d, simd.to_float(0), base


def _iq4_xs(at, group):
    low, top = simd.peek_u8(at + 4 + group // 2) >> group % 2 * 4 & 15, simd.peek_u16(at + 2) >> group * 2 & 3
    return simd.peek_f16(at) * simd.to_float((low | top << 4) - 32), simd.to_float(0), simd.to_float(0)


def _mxfp4(at, group):
    """2^(e - 128), half of the format's scale, for values that are doubled."""
    e = simd.peek_u8(at)
    # Below 2^-126 there is no exponent to write; 255 is nan.
    bits = 0x7FC00000 if e == 255 else (e - 1) << 23 if e > 1 else 0x00200000 << e
    return simd.f32_bits(simd.int32(bits)), simd.to_float(0), simd.to_float(0)


def _nl4(at, group):
    head = simd.peek_u16(at)
    return simd.f16_number(head & 0xFFF0), simd.to_float(-LEAST_MOVE - (head & 15)), simd.to_float(0)


def _nl4_xs(at, group):
    own = simd.peek_u8(at + 4 + group // 2) >> group % 2 * 4 & 15
    scale = simd.f16_number((simd.peek_u8(at) - (own & 7) & 255) << 7 | own >> 3 << 15)
    return scale, simd.to_float(-LEAST_MOVE - 2 * (simd.peek_i32(at) >> 8 + 3 * group & 7)), simd.to_float(0)


_PACKED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"q4_k": _q4_k, "q5_k": _q4_k, "iq4_xs": _iq4_xs, "mxfp4": _mxfp4, "nl4_g32": _nl4, "nl4_xs": _nl4_xs}
)
_PEEK = {"<f2": simd.peek_f16, "<f4": simd.peek_f32, "|u1": simd.peek_u8, "|i1": simd.peek_i8}


def _plain_factors(row: Format) -> Callable[..., Any] | None:
    """The factors of a format whose fields have them as numbers: d, and what there is of s, base and z; None for another."""
    fields: Any = row.layout.fields
    if not row.affine or fields.keys() - {field.name for field in row.code_fields} - {"d", "s", "base", "z"}:
        return None
    step = np.float32(row.affine.zero)
    d_at, s_at, base_at, z_at = (fields[name][1] if name in fields else -1 for name in ("d", "s", "base", "z"))
    peek_d, peek_s, peek_z = (_PEEK[fields[name][0].base.str if name in fields else "|u1"] for name in ("d", "s", "z"))

    def factors(at, group):
        scale, zero, minimum = peek_d(at + d_at), step, simd.to_float(0)
        if s_at >= 0:
            scale *= simd.to_float(peek_s(at + s_at + group))
        if z_at >= 0:
            zero = simd.to_float(peek_z(at + z_at)) * step
        if base_at >= 0:
            zero, minimum = simd.to_float(0), simd.peek_f16(at + base_at) * step
        return scale, zero, minimum

    return factors


def _codes_decoder(row: Format) -> Decoder | None:
    """The decoder of a format of codes; None where its factors are packed in a way that is not known here."""
    factors_of = _PACKED.get(row.name) or _plain_factors(row)
    if row.affine is None or row.rotated or factors_of is None or not row.code_fields or row.code_bits > 8:
        return None
    factors, fields = compiled(factors_of), cast(Any, row.layout.fields)
    low = row.code_fields[0]
    high = row.code_fields[-1]  # the same where there is but one
    low_at, low_bits, low_stride, flipped = fields[low.name][1], low.bits, low.stride, low.flipped
    high_at, high_bits, high_stride, shift = fields[high.name][1], high.bits, high.stride, 0 if high is low else high.at
    low_shift = low.at
    block_bytes, block_size, group_size = row.block_bytes, row.block_size, row.group_size
    has_levels, has_minimum = row.affine.levels is not None, "base" in fields or row.name in ("q4_k", "q5_k")
    levels = tuple(map(np.float32, row.affine.levels or (0,)))

    def decode(address, blocks, out):
        for block in range(blocks):
            at, to = address + block_bytes * block, out + 4 * block_size * block
            for group in range(block_size // group_size):
                scale, zero, minimum = factors(at, group)
                for i in range(group * group_size, (group + 1) * group_size):
                    code = (_bits(at + low_at, i, low_bits, low_stride) ^ flipped) << low_shift
                    if shift > 0:
                        code |= _bits(at + high_at, i, high_bits, high_stride) << shift
                    value = scale * ((levels[code] if has_levels else simd.to_float(code)) - zero)
                    simd.poke_f32(to + 4 * i, value - minimum if has_minimum else value)

    return decode


@compiled
def _bits(field, i, bits, stride):
    """The bits of the code of value i of a block in a `CodeField`, whose address is `field`."""
    apart, inside = i // (stride * (8 // bits)), i % (stride * (8 // bits))
    return simd.peek_u8(field + apart * stride + inside % stride) >> inside // stride * bits & (1 << bits) - 1


_DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {"f32": _f32, "f16": _f16, "bf16": _bf16}
    | {name: decoder for name, row in FORMATS.items() if (decoder := _codes_decoder(row)) is not None}
)


@cache
def row_decoder(format_name: str) -> int | None:
    """Address of the compiled (address of blocks, number of blocks, address of f32 values), or None where there is none."""
    if format_name not in _DECODERS:
        return None
    check = partial(selfcheck.decoder, format_name)
    return machine_code.address(f"decode-{format_name}", 3, lambda: _DECODERS[format_name], check=check)

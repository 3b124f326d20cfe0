"""Rows of an embedding matrix from the bytes of the file's own format to f32, as `Format.decode` gives them, bit for bit."""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

from cpuspec.formats import int4, nl4
from cpuspec.formats.mx import E2M1_DOUBLED
from cpuspec.formats.nonlinear import LEVELS
from cpuspec.kernels import machine_code, simd
from cpuspec.kernels.options import compiled

_NL4_LEVELS = nl4.LEVELS

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


def _legacy(zero: int, minimum: bool, top_bit: bool) -> Decoder:
    """q4_0, q4_1, q5_0, q5_1: scale, (minimum), (fifth bits), nibbles."""
    high_at = 4 if minimum else 2
    codes_at = high_at + (4 if top_bit else 0)

    def decode(row, blocks, out):
        for block in range(blocks):
            at, to = row + block * (codes_at + 16), out + 128 * block
            d = simd.peek_f16(at)
            high = simd.peek_i32(at + high_at) if top_bit else 0
            for i in range(32):
                code = (simd.peek_u8(at + codes_at + i % 16) >> i // 16 * 4 & 15) | (high >> i & 1) << 4
                value = d * simd.to_float(code - zero)
                simd.poke_f32(to + 4 * i, value + simd.peek_f16(at + 2) if minimum else value)

    return decode


def _q8_0(row, blocks, out):
    for block in range(blocks):
        at, to = row + 34 * block, out + 128 * block
        d = simd.peek_f16(at)
        for i in range(32):
            simd.poke_f32(to + 4 * i, d * simd.to_float(simd.peek_i8(at + 2 + i)))


@compiled
def _scale_of_k(scales, part):
    """Scale and minimum of sub-block 0..7, from the twelve bytes that `kquants.unpack_scales` describes."""
    first, second = simd.peek_u8(scales + part % 4), simd.peek_u8(scales + 4 + part % 4)
    if part < 4:
        return first & 63, second & 63
    rest = simd.peek_u8(scales + 4 + part)
    return (rest & 15) | first >> 6 << 4, rest >> 4 | second >> 6 << 4


def _k(top_bit: bool) -> Decoder:
    """q4_k, q5_k: d, dmin, scales and minima, (fifth bits), nibbles."""
    codes_at = 48 if top_bit else 16

    def decode(row, blocks, out):
        for block in range(blocks):
            at, to = row + block * (codes_at + 128), out + 1024 * block
            for part in range(8):
                scale, minimum = _scale_of_k(at + 4, part)
                d, m = simd.peek_f16(at) * simd.to_float(scale), simd.peek_f16(at + 2) * simd.to_float(minimum)
                codes = at + codes_at + part // 2 * 32
                for i in range(32):
                    code = simd.peek_u8(codes + i) >> part % 2 * 4 & 15
                    if top_bit:
                        code |= (simd.peek_u8(at + 16 + i) >> part & 1) << 4
                    simd.poke_f32(to + 128 * part + 4 * i, d * simd.to_float(code) - m)

    return decode


def _q6_k(row, blocks, out):
    """Low nibbles, top bits, scales, d."""
    for block in range(blocks):
        at, to = row + 210 * block, out + 1024 * block
        for part in range(16):
            d = simd.peek_f16(at + 208) * simd.to_float(simd.peek_i8(at + 192 + part))
            for value in range(16 * part, 16 * part + 16):
                half, inside = value // 128, value % 128
                low = simd.peek_u8(at + 64 * half + inside % 64) >> inside // 64 * 4 & 15
                high = simd.peek_u8(at + 128 + 32 * half + inside % 32) >> inside // 32 * 2 & 3
                simd.poke_f32(to + 4 * value, d * simd.to_float((low | high << 4) - 32))


def _mxfp4(row, blocks, out):
    """The exponent, nibbles. The scale is 2^(e - 128), half of the format's, for values that are doubled."""
    for block in range(blocks):
        at, to = row + 17 * block, out + 128 * block
        e = simd.peek_u8(at)
        # Below 2^-126 there is no exponent to write; 255 is nan.
        bits = 0x7FC00000 if e == 255 else (e - 1) << 23 if e > 1 else 0x00200000 << e
        scale = simd.f32_bits(simd.int32(bits))
        for i in range(32):
            code = simd.peek_u8(at + 1 + i % 16) >> i // 16 * 4 & 15
            simd.poke_f32(to + 4 * i, scale * simd.to_float(E2M1_DOUBLED[code]))


def _nl4(row, blocks, out):
    """Scale and move, nibbles."""
    for block in range(blocks):
        at, to = row + 18 * block, out + 128 * block
        move = (simd.peek_u8(at) & 15) - 7
        simd.poke_i16(to, simd.peek_u16(at) & 0xFFF0)  # where values will be
        scale = simd.peek_f16(to)
        for i in range(32):
            code = simd.peek_u8(at + 2 + i % 16) >> i // 16 * 4 & 15
            simd.poke_f32(to + 4 * i, scale * simd.to_float(_NL4_LEVELS[code] + move))


def _nl4_xs(row, blocks, out):
    """Scale of the superblock and moves, steps and signs, nibbles."""
    for block in range(blocks):
        at, to = row + 136 * block, out + 1024 * block
        for part in range(8):
            own = simd.peek_u8(at + 4 + part // 2) >> part % 2 * 4 & 15
            move = 2 * (simd.peek_i32(at) >> 8 + 3 * part & 7) - 7
            scale_bits = (simd.peek_u8(at) - (own & 7) & 255) << 7 | own >> 3 << 15
            simd.poke_i16(to + 128 * part, scale_bits)  # where values will be
            scale = simd.peek_f16(to + 128 * part)
            for i in range(32):
                code = simd.peek_u8(at + 8 + 16 * part + i % 16) >> i // 16 * 4 & 15
                simd.poke_f32(to + 128 * part + 4 * i, scale * simd.to_float(_NL4_LEVELS[code] + move))


def _iq4_nl(row, blocks, out):
    """Scale, nibbles."""
    for block in range(blocks):
        at, to = row + 18 * block, out + 128 * block
        d = simd.peek_f16(at)
        for i in range(32):
            code = simd.peek_u8(at + 2 + i % 16) >> i // 16 * 4 & 15
            simd.poke_f32(to + 4 * i, d * simd.to_float(LEVELS[code]))


def _iq4_xs(row, blocks, out):
    """d, top bits of scales, their low bits, nibbles."""
    for block in range(blocks):
        at, to = row + 136 * block, out + 1024 * block
        for part in range(8):
            low, top = simd.peek_u8(at + 4 + part // 2) >> part % 2 * 4 & 15, simd.peek_u16(at + 2) >> part * 2 & 3
            scale = simd.peek_f16(at) * simd.to_float((low | top << 4) - 32)
            for i in range(32):
                code = simd.peek_u8(at + 8 + 16 * part + i % 16) >> i // 16 * 4 & 15
                simd.poke_f32(to + 128 * part + 4 * i, scale * simd.to_float(LEVELS[code]))


def _int4(group: int, asymmetric: bool) -> Decoder:
    """Scale, (zero point), nibbles in order."""
    codes_at = 3 if asymmetric else 2

    def decode(row, blocks, out):
        for block in range(blocks):
            at, to = row + block * (codes_at + group // 2), out + 4 * group * block
            d = simd.peek_f16(at)
            zero = simd.peek_u8(at + 2) if asymmetric else 8
            for i in range(group):
                code = simd.peek_u8(at + codes_at + i // 2) >> i % 2 * 4 & 15
                simd.poke_f32(to + 4 * i, d * simd.to_float(code - zero))

    return decode


# Formats that are not here are decoded by numpy, in front of a forward.
_DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {
        "f32": _f32,
        "f16": _f16,
        "bf16": _bf16,
        "q4_0": _legacy(8, minimum=False, top_bit=False),
        "q4_1": _legacy(0, minimum=True, top_bit=False),
        "q5_0": _legacy(16, minimum=False, top_bit=True),
        "q5_1": _legacy(0, minimum=True, top_bit=True),
        "q8_0": _q8_0,
        "q4_k": _k(top_bit=False),
        "q5_k": _k(top_bit=True),
        "q6_k": _q6_k,
        "mxfp4": _mxfp4,
        "nl4_g32": _nl4,
        "nl4_xs": _nl4_xs,
        "iq4_nl": _iq4_nl,
        "iq4_xs": _iq4_xs,
        **{row.name: _int4(row.block_size, "z" in (row.layout.names or ())) for row in int4.FORMATS},
    }
)


@cache
def row_decoder(format_name: str) -> int | None:
    """Address of the compiled (address of blocks, number of blocks, address of f32 values), or None where there is none."""
    if format_name not in _DECODERS:
        return None
    return machine_code.address(f"decode-{format_name}", 3, lambda: _DECODERS[format_name])

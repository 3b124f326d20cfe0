"""Packed weights into registers, format by format: the one place where kernels know what the bytes of `formats.packing` mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from cpuspec.formats import FORMATS, Format, lowbit, nl4, nonlinear
from cpuspec.formats.mx import E2M1_DOUBLED
from cpuspec.kernels import isa
from cpuspec.kernels.ops import F16, F32X16, I8, I16, I32, Value, lookup_bytes, lookup_f32, vector_of

# Bytes of weights to ask for in advance: with many rows the processor does not look so far ahead itself (benchmarks/LOG.md).
_, AHEAD, INTO_FIRST = isa.reading()


@dataclass(frozen=True)
class Group:
    """32 inputs of the 16 rows of a tile in registers."""

    bits: int  # of a code
    codes: list[Value]  # eight vectors of unsigned bytes, four inputs each
    scales: list[Value]  # one for the group, or one for each half of it
    zero: int = 0  # zero point of the codes
    minima: tuple[Value, ...] = ()  # added to every weight of the group, or of each half of it


# Scales that a group has, where it is not one.
NUM_SCALES: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("q2_k", "q3_k", "q6_k", "nvfp4", "nvfp4_global", "iq1_m", "iq2_xs", "iq2_s"), 2)
)

Reader = Callable[[Value, Value, Value], Group]  # (address of a panel, its groups, one of them) -> Group


def _nibbles(address: Value) -> list[Value]:
    """Eight vectors of four bits in bytes."""
    words = [(address + 64 * j).i32() for j in range(4)]
    return [part for w in words for part in (w & 0x0F0F0F0F, w >> 4 & 0x0F0F0F0F)]


def _bit(address: Value, at: int) -> list[Value]:
    """Eight vectors with a bit of each byte from a plane of one bit."""
    words = address.i32()
    return [words.shifted(at - v) & 0x01010101 << at for v in range(8)]


def _two_bits(address: Value, at: int) -> list[Value]:
    """Eight vectors with two bits of each byte from a plane of two bits."""
    words = [(address + 64 * h).i32() for h in range(2)]
    return [words[v // 4].shifted(at - 2 * (v % 4)) & 0x03030303 << at for v in range(8)]


def _both(some: list[Value], others: list[Value]) -> list[Value]:
    """The bits of both, vector by vector."""
    return [x | y for x, y in zip(some, others, strict=True)]


def _half_of_e8m0(address: Value) -> Value:
    """2^(e - 128) of sixteen bytes e, exactly; nan for 255."""
    e = address.u8_codes()
    bits = e - 1 << 23
    # Below 2^-126 there is no exponent to write; 255 is no exponent.
    for exponent, exception in ((0, 0x00200000), (1, 0x00400000), (255, 0x7FC00000)):
        bits = e.equals(exponent).select(e.like(exception), bits)
    return bits.bits(F32X16)


def _signed_6_bits(scales: Value, group: Value) -> list[Value]:
    """The two scales of a group of a q3_k superblock, whose twelve bytes are three words of each row."""
    pair = group >> 1
    low, top = (scales + (pair & 1) * 64).i32(), (scales + 128).i32()
    found = []
    for n in range(2):
        byte = (group & 1) * 16 + 8 * n  # of a word of four scales, the first or the last two
        low_code = low >> _in_lanes(byte + (group >> 2) * 4) & 15
        top_code = (top >> _in_lanes(byte + pair * 2) & 3) << 4
        found.append(((low_code | top_code) - 32).sitofp(F32X16))
    return found


def _half_of_ue4m3(address: Value) -> Value:
    """Half of sixteen numbers of E4M3 without sign, exactly; zero for 0x7F. As f16 they are the 2^-8th part."""
    byte = address.load(vector_of(I8)).zext(vector_of(I16))
    number = ((byte & 0x7F) << 7).bits(vector_of(F16)).fpext(F32X16) * 128.0
    return byte.equals(0x7F).select(number.like(0.0), number)


def _in_lanes(shift: Value) -> Value:
    return shift.trunc(I32).splat()


def _legacy(offset: int, zero: int, top_bit: bool = False) -> Reader:
    """q4_0, q4_1, q5_0, q5_1: planes codes, (top bits), scales, (minima)."""

    def read(at: Value, groups: Value, group: Value) -> Group:
        codes = _nibbles(at + group * 256)
        if top_bit:
            codes = _both(codes, _bit(at + groups * 256 + group * 64, 4))
        scale = (at + groups * offset + group * 32).f16()
        if zero:
            return Group(4 + top_bit, codes, [scale], zero)
        return Group(4 + top_bit, codes, [scale], 0, ((at + groups * (offset + 32) + group * 32).f16(),))

    return read


def _q8_0(at: Value, groups: Value, group: Value) -> Group:
    address = at + group * 512
    return Group(8, [(address + 64 * v).i32() for v in range(8)], [(at + groups * 512 + group * 32).f16()], 128)


def _int8(size: int) -> Reader:
    """int8_g32, int8_g128: planes codes, f32 scales, one for `size` inputs."""
    shift = size.bit_length() - 6  # from groups of 32 to groups of `size`

    def read(at: Value, groups: Value, group: Value) -> Group:
        address = at + group * 512
        return Group(8, [(address + 64 * v).i32() for v in range(8)], [(at + groups * 512 + (group >> shift) * 64).f32()], 128)

    return read


def _looked_up(levels: Sequence[float], codes: list[Value], scales: list[Value]) -> Group:
    """A group whose codes are places in a table of whole numbers, which get the least zero point that makes them unsigned."""
    zero = next(zero for zero in (16, 32, 64, 128)[len(scales) - 1 :] if -zero <= min(levels) and max(levels) < zero)
    table = [zero + int(level) for level in levels] + [0] * (16 - len(levels))
    return Group(zero.bit_length(), [lookup_bytes(table, c) for c in codes], scales, zero)


def _mxfp4(at: Value, groups: Value, group: Value) -> Group:
    """Planes codes, e. Twice the values of E2M1 are integers."""
    return _looked_up(E2M1_DOUBLED, _nibbles(at + group * 256), [_half_of_e8m0(at + groups * 256 + group * 16)])


def _iq4_nl(at: Value, groups: Value, group: Value) -> Group:
    """Planes codes, scales."""
    return _looked_up(nonlinear.LEVELS, _nibbles(at + group * 256), [(at + groups * 256 + group * 32).f16()])


def _iq4_xs(at: Value, groups: Value, group: Value) -> Group:
    """Planes codes, low four bits of scales, their top two bits, d: a panel is a superblock."""
    scales = at + groups * 256
    low = scales.i32() >> _in_lanes(group * 4) & 15
    top = ((scales + 64).u16_codes() >> _in_lanes(group * 2) & 3) << 4
    scale = (scales + 96).f16() * ((low | top) - 32).sitofp(F32X16)
    return _looked_up(nonlinear.LEVELS, _nibbles(at + group * 256), [scale])


def _nl4(at: Value, groups: Value, group: Value) -> Group:
    """Planes codes, heads of scale and move."""
    heads = at + groups * 256 + group * 32
    top = heads.load(vector_of(I16)) & (0xFFFF - nl4.MOVE_BITS)
    scale = top.bits(vector_of(F16)).fpext(F32X16)
    move = (heads.u16_codes() & nl4.MOVE_BITS) + nl4.LEAST_MOVE
    return replace(_looked_up(nl4.LEVELS, _nibbles(at + group * 256), [scale]), minima=(scale * move.sitofp(F32X16),))


def _nl4_xs(at: Value, groups: Value, group: Value) -> Group:
    """Planes codes, scale of the superblock and moves, steps and signs: a panel is a superblock."""
    heads = at + groups * 256
    head, own = heads.i32(), (heads + 64).i32() >> _in_lanes(group * 4)
    halves = ((head & 0xFF) - (own & 7) & 0xFF) << 7 | (own & 8) << 12
    scale = halves.trunc(vector_of(I16)).bits(vector_of(F16)).fpext(F32X16)
    move = (head >> _in_lanes(group * 3 + 8) & 7) * 2 + nl4.LEAST_MOVE
    return replace(_looked_up(nl4.LEVELS, _nibbles(at + group * 256), [scale]), minima=(scale * move.sitofp(F32X16),))


def _nvfp4(tensor_scale: bool) -> Reader:
    """nvfp4: planes codes, scales, (the tensor's scale), which is one for 64 inputs."""

    def read(at: Value, groups: Value, group: Value) -> Group:
        here = at + groups * 256 + group * 32
        scales = [_half_of_ue4m3(here + 16 * half) for half in range(2)]
        if tensor_scale:
            whole = (at + groups * 288 + (group >> 1) * 64).f32()
            scales = [whole * scale for scale in scales]
        return _looked_up(E2M1_DOUBLED, _nibbles(at + group * 256), scales)

    return read


def _grids(row: Format) -> Reader:
    """iq1, iq2 and iq3: planes codes (two bits and signs, or nibbles), scales of four bits, d. A panel is a superblock."""
    assert row.affine is not None, "a format of codes"
    assert row.affine.levels is not None, "codes with levels"
    levels, code_bytes = row.affine.levels, 64 * row.code_bits
    unit = float(row.to_parts(np.zeros(1, row.layout))["s"][0, 0])  # of a scale of zero, which is one of them
    halves = NUM_SCALES.get(row.name, 1)

    def read(at: Value, groups: Value, group: Value) -> Group:
        if row.code_bits == 3:
            codes = _both(_two_bits(at + group * 128, 0), _bit(at + groups * 128 + group * 64, 2))
        else:
            codes = _nibbles(at + group * 256)
        scales = at + groups * code_bytes
        number = group * halves  # of the first scale of the group
        word = (scales + (number >> 3) * 64).i32()
        d = (scales + halves * 64).f16() * unit
        found = [word >> _in_lanes(((number & 7) + half) * 4) & 15 for half in range(halves)]
        return _looked_up(levels, codes, [d * (four_bits * 2 + 1).sitofp(F32X16) for four_bits in found])

    return read


def _ternary(at: Value, groups: Value, group: Value) -> Group:
    """Planes codes, d. Eight times the codes have the zero point of q4_0."""
    return Group(5, _two_bits(at + group * 128, 3), [_superblock(at + groups * 128, group) * (1 / 8)], 8)


def _int4(size: int, asymmetric: bool) -> Reader:
    """int4_g32, int4_g64, int4_g128 and their asym: planes codes, scales, (zero points), one for `size` inputs."""
    shift = size.bit_length() - 6  # from groups of 32 to groups of `size`

    def read(at: Value, groups: Value, group: Value) -> Group:
        codes = _nibbles(at + group * 256)
        scales, here = at + groups * 256, group >> shift
        scale = (scales + here * 32).f16()
        if not asymmetric:
            return Group(4, codes, [scale], 8)
        return Group(4, codes, [scale], 0, (-(scale * (scales + (groups >> shift) * 32 + here * 16).u8()),))

    return read


def _lowbit(bits: int, size: int) -> Reader:
    """int2 and int3: planes low bits, (third bits), scales, zero points in sixteenths, one for `size` inputs."""
    shift = size.bit_length() - 6  # from groups of 32 to groups of `size`

    def read(at: Value, groups: Value, group: Value) -> Group:
        codes = _two_bits(at + group * 128, 0)
        if bits == 3:
            codes = _both(codes, _bit(at + groups * 128 + group * 64, 2))
        scales, here = at + groups * (64 * bits), group >> shift
        scale = (scales + here * 32).f16()
        zero = (scales + (groups >> shift) * 32 + here * 16).u8() * (1 / lowbit.ZERO_STEPS)
        return Group(bits, codes, [scale], 0, (-(scale * zero),))

    return read


def _superblock(address: Value, group: Value) -> Value:
    return (address + (group >> 3) * 32).f16()


def _k(offset: int, top_bit: bool) -> Reader:
    """q4_k, q5_k: planes codes, (top bits), scales, minima, d, dmin."""

    def read(at: Value, groups: Value, group: Value) -> Group:
        codes = _nibbles(at + group * 256)
        if top_bit:
            codes = _both(codes, _bit(at + groups * 256 + group * 64, 4))
        scales = at + groups * offset
        here, d = scales + group * 16, scales + groups * 32
        scale = _superblock(d, group) * here.u8()
        # d is 32 bytes a superblock, 4 a group
        minimum = _superblock(d + groups * 4, group) * (here + groups * 16).u8()
        return Group(4 + top_bit, codes, [scale], 0, (-minimum,))

    return read


def _q2_k(at: Value, groups: Value, group: Value) -> Group:
    """Planes codes, bytes of a scale (low half) and a minimum (high half) for 16 inputs, d, dmin."""
    scales = at + groups * 128
    d = scales + groups * 32
    scale, minimum = _superblock(d, group), -_superblock(d + groups * 4, group)
    packed = [(scales + group * 32 + 16 * half).u8_codes() for half in range(2)]
    halves = [scale * (two & 15).uitofp(F32X16) for two in packed]
    minima = tuple(minimum * (two >> 4).uitofp(F32X16) for two in packed)
    return Group(2, _two_bits(at + group * 128, 0), halves, 0, minima)


def _q3_k(at: Value, groups: Value, group: Value) -> Group:
    """Planes low bits, third bits, the twelve bytes of scales, d. Eight times the codes have the zero point of q6_k."""
    codes = _both(_two_bits(at + group * 128, 3), _bit(at + groups * 128 + group * 64, 5))
    scales = at + groups * 192
    d = _superblock(scales + groups * 24, group) * (1 / 8)
    return Group(6, codes, [d * scale for scale in _signed_6_bits(scales, group)], 32)


def _q6_k(at: Value, groups: Value, group: Value) -> Group:
    """Planes low halves of codes, top bits, scales, d."""
    codes = _both(_nibbles(at + group * 256), _two_bits(at + groups * 256 + group * 128, 4))
    scales = at + groups * 384
    d = _superblock(scales + groups * 32, group)
    return Group(6, codes, [d * (scales + group * 32 + 16 * half).i8() for half in range(2)], 32)


def _blocks_of(row: Format) -> Reader:
    zero = 0 if "base" in (row.layout.names or ()) else 1 << row.code_bits - 1
    return _legacy(64 * row.code_bits, zero, top_bit=row.code_bits == 5)


@dataclass(frozen=True)
class FloatCodes:
    """How codes become floats, input after input, under a scale for `size` inputs that follows the codes in a panel."""

    input_bytes: int  # of two inputs of 16 rows
    size: int
    pair: Callable[[Value], tuple[Value, Value]]  # address of two inputs -> their sixteen numbers each
    factor: float = 1.0  # of every number


def _e4m3(address: Value) -> Value:
    """Sixteen E4M3 bytes as f16, whose exponents have a bias of 15: 1/256 of their values, as numbers of f32."""
    wide = address.load(vector_of(I8)).sext(vector_of(I16)) << 7
    magnitude = wide & 0x3F80
    nan = magnitude.equals(0x3F80).select(wide.like(0x7FFF), wide.like(0))
    return ((wide & 0x8000) | magnitude | nan).bits(vector_of(F16)).fpext(F32X16)


def _e4m3_pair(address: Value) -> tuple[Value, Value]:
    return _e4m3(address), _e4m3(address + 16)


def _table(row: Format) -> Callable[[Value], tuple[Value, Value]]:
    assert row.affine is not None, "codes have levels"
    levels = row.affine.levels or ()

    def pair(address: Value) -> tuple[Value, Value]:
        packed = address.u8_codes()
        return lookup_f32(levels, packed & 15), lookup_f32(levels, packed >> 4)

    return pair


# By the `reader` of a format's row.
_KINDS: Mapping[str, Callable[[Format], Reader]] = MappingProxyType(
    {
        "blocks": _blocks_of,
        "bytes": lambda row: _q8_0,
        "long_bytes": lambda row: _int8(row.block_size),
        "levels": lambda row: _mxfp4,
        "iq4_nl": lambda row: _iq4_nl,
        "iq4_xs": lambda row: _iq4_xs,
        "nl4": lambda row: _nl4,
        "nl4_xs": lambda row: _nl4_xs,
        "nvfp4": lambda row: _nvfp4("d" in (row.layout.names or ())),
        "grids": _grids,
        "ternary": lambda row: _ternary,
        "groups": lambda row: _int4(row.block_size, asymmetric="z" in (row.layout.names or ())),
        "few_bits": lambda row: _lowbit(row.code_bits, row.block_size),
        "superblocks": lambda row: _k(64 * row.code_bits, top_bit=row.code_bits == 5),
        "q2_k": lambda row: _q2_k,
        "q3_k": lambda row: _q3_k,
        "q6_k": lambda row: _q6_k,
    }
)
_BYTES_OF_16_NUMBERS = {"f32": 64, "f16": 32}

READERS: Mapping[str, Reader] = MappingProxyType(
    {name: _KINDS[row.reader](row) for name, row in FORMATS.items() if row.reader in _KINDS}
)
NUMBERS: Mapping[str, tuple[int, str]] = MappingProxyType(
    {name: (_BYTES_OF_16_NUMBERS[row.reader], row.reader) for name, row in FORMATS.items() if row.reader in _BYTES_OF_16_NUMBERS}
)
(PAIRED,) = (name for name, row in FORMATS.items() if row.reader == "pairs")  # numbers in pairs of inputs
_FLOAT_CODES: Mapping[str, Callable[[Format], FloatCodes]] = MappingProxyType(
    {
        "e4m3": lambda row: FloatCodes(32, row.block_size, _e4m3_pair, 256.0),
        "table": lambda row: FloatCodes(16, row.block_size, _table(row)),
    }
)
FLOAT_CODES: Mapping[str, FloatCodes] = MappingProxyType(
    {name: _FLOAT_CODES[row.reader](row) for name, row in FORMATS.items() if row.reader in _FLOAT_CODES}
)


if unread := FORMATS.keys() - READERS.keys() - NUMBERS.keys() - FLOAT_CODES.keys() - {PAIRED}:
    raise AssertionError(
        f"formats {sorted(unread)} name readers that do not exist; wanted one of {', '.join([*_KINDS, *_FLOAT_CODES])}"
    )

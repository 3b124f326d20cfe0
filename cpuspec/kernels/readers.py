"""Packed weights into registers, format by format: the one place where kernels know what the bytes of `formats.packing` mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np

from cpuspec.formats import FORMATS, Format, integers, nl4
from cpuspec.formats.format import Plane
from cpuspec.formats.packing import GROUP, PANEL, TILE
from cpuspec.kernels import isa
from cpuspec.kernels.ops import F16, F32X16, I8, I16, I32, I32X16, Value, lookup_64, lookup_bytes, lookup_f32, vector_of

# Bytes of weights to ask for in advance: with many rows the processor does not look so far ahead itself.
# See benchmarks/DECISIONS.md#prefetch.
_, AHEAD, INTO_FIRST = isa.prefetch_plan()


@dataclass(frozen=True)
class Group:
    """32 inputs of the 16 rows of a tile in registers."""

    bits: int  # of a code
    codes: list[Value]  # eight vectors of unsigned bytes, four inputs each
    scales: list[Value]  # one for the group, or one for each half of it; none where a panel has one
    zero: int = 0  # zero point of the codes
    minima: tuple[Value, ...] = ()  # added to every weight of the group, or of each half of it


@dataclass(frozen=True)
class Panel:
    """A group of a panel, and where the planes of a format have the bytes of that group."""

    format: Format
    start: Value  # address
    groups: Value  # of the panel
    group: Value  # counted from the first of the panel

    def plane(self, part: str) -> Plane:
        """The first plane of a part."""
        return next(plane for plane in self.format.planes if plane.part == part)

    def start_of(self, plane: Plane) -> Value:
        """The address of a plane."""
        planes = self.format.planes
        return self.start + self.groups * sum(_group_bytes(one.bits) for one in planes[: planes.index(plane)])

    def address(self, plane: Plane) -> Value:
        """The address of what a plane has for the group, which several groups may share."""
        if plane.inputs <= GROUP:
            return self.start_of(plane) + self.group * _group_bytes(plane.bits)
        shared = plane.inputs // GROUP
        return self.start_of(plane) + (self.group >> shared.bit_length() - 1) * _group_bytes(plane.bits * shared)

    def __getitem__(self, part: str) -> Value:
        """The address of what the plane of a part has for the group."""
        return self.address(self.plane(part))

    def numbers(self, part: str) -> list[Value]:
        """Sixteen rows' numbers of a part: one vector for the group, or one for each half of it."""
        plane = self.plane(part)
        return [_LOAD[plane.dtype](address) for address in self._addresses(plane)]

    def integers(self, part: str) -> list[Value]:
        """As `numbers`, of bytes, in words of integers."""
        plane = self.plane(part)
        words = Value.u8_codes if plane.dtype == "u1" else Value.i8_codes
        return [words(address) for address in self._addresses(plane)]

    def _addresses(self, plane: Plane) -> list[Value]:
        size = TILE * np.dtype(plane.dtype).itemsize
        return [self.address(plane) + size * half for half in range(max(1, GROUP // plane.inputs))]

    def codes(self, lifted: int) -> list[Value]:
        """Eight vectors of codes, times 2^lifted."""
        found: list[Value] = []
        for plane in self.format.planes:
            if plane.part == "codes":
                bits = _CODES[int(plane.bits)](self.address(plane), plane.at + lifted)
                found = [x | y for x, y in zip(found, bits, strict=True)] if found else bits
        return found


_LOAD: Mapping[str, Callable[[Value], Value]] = MappingProxyType(
    {"<f2": Value.f16, "<f4": Value.f32, "u1": Value.u8, "i1": Value.i8}
)


def _group_bytes(bits: float) -> int:
    """Bytes that a group of a tile takes of a plane with so many bits for each weight."""
    return int(bits * TILE * GROUP) // 8


def _bytes(address: Value, at: int) -> list[Value]:
    return [(address + 64 * v).i32() for v in range(8)]


def _nibbles(address: Value, at: int) -> list[Value]:
    words = [(address + 64 * j).i32() for j in range(4)]
    return [part for w in words for part in (w & 0x0F0F0F0F, w >> 4 & 0x0F0F0F0F)]


def _two_bits(address: Value, at: int) -> list[Value]:
    words = [(address + 64 * h).i32() for h in range(2)]
    return [words[v // 4].shifted(at - 2 * (v % 4)) & 0x03030303 << at for v in range(8)]


def _one_bit(address: Value, at: int) -> list[Value]:
    words = address.i32()
    return [words.shifted(at - v) & 0x01010101 << at for v in range(8)]


# By the bits of a plane of codes: its bits of a group, eight vectors of bytes, as bits `at` and following of a code.
_CODES: Mapping[int, Callable[[Value, int], list[Value]]] = MappingProxyType({8: _bytes, 4: _nibbles, 2: _two_bits, 1: _one_bit})


def _half_of_e8m0(address: Value) -> Value:
    """2^(e - 128) of sixteen bytes e, exactly; nan for 255."""
    e = address.u8_codes()
    bits = e - 1 << 23
    # Below 2^-126 there is no exponent to write; 255 is no exponent.
    for exponent, exception in ((0, 0x00200000), (1, 0x00400000), (255, 0x7FC00000)):
        bits = e.equals(exponent).select(e.like(exception), bits)
    return bits.bits(F32X16)


def _half_of_ue4m3(address: Value) -> Value:
    """Half of sixteen numbers of E4M3 without sign, exactly; zero for 0x7F. As f16 they are the 2^-8th part."""
    byte = address.load(vector_of(I8)).zext(vector_of(I16))
    number = ((byte & 0x7F) << 7).bits(vector_of(F16)).fpext(F32X16) * 128.0
    return byte.equals(0x7F).select(number.like(0.0), number)


def _in_lanes(shift: Value) -> Value:
    return shift.trunc(I32).splat()


# What packed or unusual scales are: the scales of a group or of its halves, and the minima that are added.
_Scales = tuple[list[Value], tuple[Value, ...]]
# The whole numbers among them, of formats whose scales are d * s and whose minima are -base * z, d and base of a superblock.
_Whole = tuple[list[Value], list[Value]]


def _mxfp4(panel: Panel) -> _Scales:
    return [_half_of_e8m0(panel["e"])], ()


def _nvfp4(panel: Panel) -> _Scales:
    scales = [_half_of_ue4m3(panel["scales"] + TILE * half) for half in range(2)]
    if any(plane.part == "d" for plane in panel.format.planes):
        (of_tensor,) = panel.numbers("d")
        scales = [of_tensor * scale for scale in scales]
    return scales, ()


def _whole_iq4_xs(panel: Panel) -> _Whole:
    """A word has the low four bits of eight scales, and half a word their top two."""
    low = panel.start_of(panel.plane("scales"))
    four_bits = low.i32() >> _in_lanes(panel.group * 4) & 15
    top = (panel["top"].u16_codes() >> _in_lanes(panel.group * 2) & 3) << 4
    return [(four_bits | top) - 32], []


def _nl4(panel: Panel) -> _Scales:
    top = panel["head"].load(vector_of(I16)) & (0xFFFF - nl4.MOVE_BITS)
    move = (panel["head"].u16_codes() & nl4.MOVE_BITS) + nl4.LEAST_MOVE
    scale = top.bits(vector_of(F16)).fpext(F32X16)
    return [scale], (scale * move.sitofp(F32X16),)


def _nl4_xs(panel: Panel) -> _Scales:
    """A panel is a superblock."""
    head, own = panel["head"].i32(), panel["steps"].i32() >> _in_lanes(panel.group * 4)
    halves = ((head & 0xFF) - (own & 7) & 0xFF) << 7 | (own & 8) << 12
    move = (head >> _in_lanes(panel.group * 3 + 8) & 7) * 2 + nl4.LEAST_MOVE
    scale = halves.trunc(vector_of(I16)).bits(vector_of(F16)).fpext(F32X16)
    return [scale], (scale * move.sitofp(F32X16),)


def _grids(panel: Panel) -> _Scales:
    """A panel is a superblock. Scales are odd multiples of d, or of a part of it, in four bits: eight in a word of each row."""
    row = panel.format
    unit = float(row.split(np.zeros((1, row.block_bytes), np.uint8))["s"][0, 0])  # of a scale of zero, which is one of them
    halves = num_scales(row)
    number = panel.group * halves  # of the first scale of the group
    word = (panel.start_of(panel.plane("scales")) + (number >> 3) * 64).i32()
    d = panel.numbers("d")[0] * unit
    found = [word >> _in_lanes(((number & 7) + half) * 4) & 15 for half in range(halves)]
    return [d * (four_bits * 2 + 1).sitofp(F32X16) for four_bits in found], ()


def _whole_q2_k(panel: Panel) -> _Whole:
    """A byte has a scale in its low half, and a minimum in its high half."""
    packed = [(panel["scales"] + TILE * half).u8_codes() for half in range(2)]
    return [two & 15 for two in packed], [two >> 4 for two in packed]


def _whole_q3_k(panel: Panel) -> _Whole:
    """The twelve bytes of scales are three words of each row."""
    scales, pair = panel.start_of(panel.plane("scales")), panel.group >> 1
    low, top = (scales + (pair & 1) * 64).i32(), (scales + 128).i32()
    found = []
    for n in range(2):
        byte = (panel.group & 1) * 16 + 8 * n  # of a word of four scales, the first or the last two
        low_code = low >> _in_lanes(byte + (panel.group >> 2) * 4) & 15
        top_code = (top >> _in_lanes(byte + pair * 2) & 3) << 4
        found.append((low_code | top_code) - 32)
    return found, []


def _whole_bytes(panel: Panel) -> _Whole:
    return panel.integers("s"), panel.integers("z") if any(plane.part == "z" for plane in panel.format.planes) else []


# By the `reader` of a format's row.
_WHOLE: Mapping[str, Callable[[Panel], _Whole]] = MappingProxyType(
    {"affine": _whole_bytes, "iq4_xs": _whole_iq4_xs, "q2_k": _whole_q2_k, "q3_k": _whole_q3_k}
)


def _superblock(panel: Panel) -> _Scales:
    """The whole numbers times what the superblock, which is the panel, has for all of them."""
    (scales, minima), (d, *base) = _WHOLE[panel.format.reader](panel), _factors(panel)
    return [d * scale.sitofp(F32X16) for scale in scales], tuple(-(base[0] * minimum.sitofp(F32X16)) for minimum in minima)


def _factors(panel: Panel) -> list[Value]:
    there = [plane.part for plane in panel.format.planes]
    return [panel.numbers(part)[0] for part in ("d", "base") if part in there]


def _affine(panel: Panel) -> _Scales:
    """The factors of the formula, each a plane of numbers."""
    assert panel.format.affine, "a format of codes"
    zero, there = panel.format.affine.zero, [plane.part for plane in panel.format.planes]
    if "s" in there:
        return _superblock(panel)
    scales = panel.numbers("d")
    if "base" not in there and "z" not in there:
        return scales, ()
    minima = panel.numbers("base") if "base" in there else scales
    if "z" in there:
        minima = [minimum * (z if zero == 1 else z * zero) for minimum, z in zip(minima, panel.numbers("z"), strict=True)]
        return scales, tuple(-minimum for minimum in minima)
    return scales, tuple(minimum if zero == -1 else minimum * -zero for minimum in minima)


# By the `reader` of a format's row.
_SCALES: Mapping[str, Callable[[Panel], _Scales]] = MappingProxyType(
    {
        "affine": _affine,
        "mxfp4": _mxfp4,
        "nvfp4": _nvfp4,
        "iq4_xs": _superblock,
        "nl4": _nl4,
        "nl4_xs": _nl4_xs,
        "grids": _grids,
        "q2_k": _superblock,
        "q3_k": _superblock,
    }
)


def num_scales(row: Format) -> int:
    """Scales of a group: 2 where each half of it has one."""
    return 2 if row.affine and row.group_size < GROUP else 1


Reader = Callable[[Value, Value, Value], Group]  # (address of a panel, its groups, one of them) -> Group


def _reader(row: Format) -> Reader:
    """The reader of a format whose values are scale * (code - zero) + minimum, or levels in the place of codes.

    Zero points of records are 8, 16, 32, 64 or 128 (`products`), and 32 or more for halves of a group: codes around a smaller one
    are multiplied by a power of two, and their scales divided by it. Levels that are not consecutive whole numbers are looked up,
    with the least of those zero points that makes them unsigned.
    """
    assert row.affine, "a format of codes"
    zero, levels, least = row.affine.zero, row.affine.levels, 8 if num_scales(row) == 1 else 32
    if levels and levels == tuple(range(int(levels[0]), int(levels[0]) + len(levels))):
        zero, levels = -levels[0], None

    def read(at: Value, groups: Value, group: Value) -> Group:
        panel = Panel(row, at, groups, group)
        scales, minima = _SCALES[row.reader](panel)
        if levels:
            zero_point, codes = _looked_up(panel, levels, least)
            return Group(zero_point.bit_length(), codes, scales, zero_point, minima)
        zero_point = 0 if minima else int(zero)
        lifted = max(0, least.bit_length() - zero_point.bit_length()) if zero_point else 0
        scales = [scale * 2.0**-lifted for scale in scales] if lifted else scales
        return Group(row.code_bits + lifted, panel.codes(lifted), scales, zero_point << lifted, minima)

    return read


def _looked_up(panel: Panel, levels: Sequence[float], least: int) -> tuple[int, list[Value]]:
    """The zero point and the vectors of unsigned bytes that stand for levels."""
    zero_point = next(zero for zero in (16, 32, 64, 128) if zero >= least and -zero <= min(levels) and max(levels) < zero)
    table = [zero_point + int(level) for level in levels] + [0] * (16 - len(levels))
    return zero_point, [lookup_bytes(table, code) for code in panel.codes(0)]


# Formats whose scales and minima are whole numbers times numbers of a superblock.
SUPERBLOCKS = tuple(name for name, row in FORMATS.items() if row.scale_range)


def whole_group(name: str, at: Value, group: Value) -> Group:
    """A group of a superblock with whole scales and minima: a weight is d * scale * (code - zero) - base * minimum."""
    row, panel = FORMATS[name], Panel(FORMATS[name], at, at.like(PANEL // GROUP), group)
    assert row.affine, "a format of codes"
    scales, minima = _WHOLE[row.reader](panel)
    if row.affine.levels:
        zero, codes = _looked_up(panel, row.affine.levels, 8)
    else:
        zero, codes = 0 if minima else int(row.affine.zero), panel.codes(0)
    return Group(row.code_bits, codes, scales, zero, tuple(minima))


def superblock_factors(name: str, at: Value) -> list[Value]:
    """Of a superblock d and, where the format has minima, base."""
    return _factors(Panel(FORMATS[name], at, at.like(PANEL // GROUP), at.like(0)))


def integer_codes(name: str, panel: Value, group: Value, offset: int = 0) -> list[Value]:
    """Eight vectors of bytes plus an offset, of a group of a panel of `formats.integers`."""
    there = Panel(FORMATS[name], panel, panel.like(PANEL // GROUP), group)
    if name == integers.Q6_I.name:
        codes = there.codes(0)
        moves = codes[0].bits(vector_of(I8, 64)).like(offset - 32)
    else:
        codes, moves = _factors_times_levels(there, offset)
    return [(some.bits(vector_of(I8, 64)) + moves).bits(I32X16) for some in codes]


def _factors_times_levels(panel: Panel, offset: int) -> tuple[list[Value], Value]:
    """Of a group of nl4_i: factor * level as bytes, and the moves plus an offset."""
    own = panel["steps"].i32() >> _in_lanes(panel.group * 4)
    move = (panel["head"].i32() >> _in_lanes(panel.group * 2 + 16) & 3) << 2 | own >> 2 & 2
    moves = _in_bytes(move + (integers.MOVES[0] + offset & 0xFF) & 0xFF)
    if "avx512vbmi" in isa.features():
        table = [factor * level for factor in integers.FACTORS for level in integers.LEVELS]
        places, is_minus = _in_bytes((own & 3) << 4).bits(I32X16), own >> 2 & 1
        signs = is_minus.like(0) - is_minus  # all bits, which turn a number x into -x - 1
        return [lookup_64(table, code | places) ^ signs for code in panel.codes(0)], moves + _in_bytes(is_minus)
    factor = (own & 3) + integers.FACTORS[0]
    factor = (own & 4).equals(4).select(factor.like(0) - factor, factor) & 0xFFFF
    both = (factor | factor << 16).bits(vector_of(I16, 32))
    levels = [lookup_bytes([level & 0xFF for level in integers.LEVELS], code) for code in panel.codes(0)]
    return [_bytes_times(some.bits(vector_of(I16, 32)), both) for some in levels], moves


def integer_scale(name: str, panel: Value) -> Value:
    """The scales of a panel of `formats.integers`."""
    there = Panel(FORMATS[name], panel, panel.like(PANEL // GROUP), panel.like(0))
    if name == integers.Q6_I.name:
        return there.numbers("d")[0]
    return there["head"].i32().trunc(vector_of(I16)).bits(vector_of(F16)).fpext(F32X16)


def _bytes_times(pairs: Value, factors: Value) -> Value:
    """The low bytes of bytes times factors, in words of two bytes."""
    return ((pairs * factors & 0x00FF) | (pairs & 0xFF00) * factors).bits(I32X16)


def _in_bytes(words: Value) -> Value:
    """The low byte of each of sixteen words, in all four of its bytes."""
    return words.bits(vector_of(I8, 64)).shuffled([byte & ~3 for byte in range(64)])


def _integers(name: str, at: Value, groups: Value, group: Value) -> Group:
    """A group's whole numbers, without the scale, which all groups of the panel share."""
    return Group(8, integer_codes(name, at, group, 128), [], 128)


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


_FLOAT_CODES: Mapping[str, Callable[[Format], FloatCodes]] = MappingProxyType(
    {
        "e4m3": lambda row: FloatCodes(32, row.block_size, _e4m3_pair, 256.0),
        "table": lambda row: FloatCodes(16, row.block_size, _table(row)),
    }
)
_BYTES_OF_16_NUMBERS = {"f32": 64, "f16": 32}

READERS: Mapping[str, Reader] = MappingProxyType(
    {name: _reader(row) for name, row in FORMATS.items() if row.reader in _SCALES}
    | {row.name: partial(_integers, row.name) for row in integers.FORMATS}
)
NUMBERS: Mapping[str, tuple[int, str]] = MappingProxyType(
    {name: (_BYTES_OF_16_NUMBERS[row.reader], row.reader) for name, row in FORMATS.items() if row.reader in _BYTES_OF_16_NUMBERS}
)
FLOAT_CODES: Mapping[str, FloatCodes] = MappingProxyType(
    {name: _FLOAT_CODES[row.reader](row) for name, row in FORMATS.items() if row.reader in _FLOAT_CODES}
)
(PAIRED,) = (name for name, row in FORMATS.items() if row.reader == "pairs")  # numbers in pairs of inputs

if unread := FORMATS.keys() - READERS.keys() - NUMBERS.keys() - FLOAT_CODES.keys() - {PAIRED}:
    raise AssertionError(
        f"formats {sorted(unread)} name readers that do not exist; wanted one of {', '.join([*_SCALES, *_FLOAT_CODES])}"
    )

"""Packed weights into registers, format by format: the one place where kernels know what the bytes of `formats.packing` mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llvmlite import ir

from cpuspec.formats import FORMATS, Format, lowbit
from cpuspec.formats.mx import E2M1_DOUBLED
from cpuspec.kernels import simd
from cpuspec.kernels.simd import i32x16

# Bytes of weights to ask for in advance: with many rows the processor does not look so far ahead itself (benchmarks/LOG.md).
AHEAD = 4096


class Ops:
    """Instructions in the notation of arithmetic, appended to one LLVM builder. Offsets are in bytes."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def at(self, address: Any, offset: int) -> Any:
        return self.b.add(address, ir.Constant(simd.I64, offset)) if offset else address

    def base(self, address: Any) -> Any:
        """The same address, as what many offsets are added to: else LLVM may keep a pointer for each of them, on the stack."""
        return self.b.asm(ir.FunctionType(simd.I64, [simd.I64]), "", "=r,0", [address], False)

    def times(self, index: Any, size: int) -> Any:
        return self.b.mul(index, ir.Constant(simd.I64, size))

    def i32(self, address: Any) -> Any:
        return simd.load(self.b, address, simd.I32X16)

    def f32(self, address: Any) -> Any:
        return simd.load(self.b, address, simd.F32X16)

    def f16(self, address: Any) -> Any:
        return self.b.fpext(simd.load(self.b, address, simd.vector_of(simd.F16)), simd.F32X16)

    def bf16(self, address: Any) -> Any:
        wide = self.b.zext(simd.load(self.b, address, simd.vector_of(simd.I16)), simd.I32X16)
        return self.b.bitcast(self.b.shl(wide, simd.constant(self.b, 16, i32x16)), simd.F32X16)

    def u8_codes(self, address: Any) -> Any:
        return self.b.zext(simd.load(self.b, address, simd.vector_of(simd.I8)), simd.I32X16)

    def u8(self, address: Any) -> Any:
        return self.b.uitofp(self.u8_codes(address), simd.F32X16)

    def i8(self, address: Any) -> Any:
        return self.b.sitofp(self.b.sext(simd.load(self.b, address, simd.vector_of(simd.I8)), simd.I32X16), simd.F32X16)

    def every(self, address: Any, typ: Any) -> Any:
        return simd.splat(self.b, simd.load(self.b, address, typ))

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return simd.call(self.b, "llvm.fma.v16f32", simd.F32X16, x, y, z)

    def mask(self, words: Any, bits: int) -> Any:
        return self.b.and_(words, simd.constant(self.b, bits, i32x16))

    def left(self, words: Any, by: int) -> Any:
        if by < 0:
            return self.b.lshr(words, simd.constant(self.b, -by, i32x16))
        return self.b.shl(words, simd.constant(self.b, by, i32x16)) if by else words

    def codes(self, address: Any) -> list[Any]:
        """Eight vectors of four bits in bytes."""
        words = [self.i32(self.at(address, 64 * j)) for j in range(4)]
        return [part for w in words for part in (self.mask(w, 0x0F0F0F0F), self.mask(self.left(w, -4), 0x0F0F0F0F))]

    def looked_up(self, codes: list[Any], table: Sequence[int]) -> list[Any]:
        """The entry of a table of 16 bytes for every byte."""
        return [simd.lookup_bytes(self.b, table, c) for c in codes]

    def half_of_e8m0(self, address: Any) -> Any:
        """2^(e - 128) of sixteen bytes e, exactly; nan for 255."""
        e = self.b.zext(simd.load(self.b, address, simd.vector_of(simd.I8)), simd.I32X16)
        one = simd.constant(self.b, 1, i32x16)
        bits = self.left(self.b.sub(e, one), 23)
        # Below 2^-126 there is no exponent to write; 255 is no exponent.
        for exponent, exception in ((0, 0x00200000), (1, 0x00400000), (255, 0x7FC00000)):
            here = self.b.icmp_unsigned("==", e, simd.constant(self.b, exponent, i32x16))
            bits = self.b.select(here, simd.constant(self.b, exception, i32x16), bits)
        return self.b.bitcast(bits, simd.F32X16)

    def sum_of_bytes(self, vectors: list[Any]) -> Any:
        """Byte by byte, without care for overflow."""
        wide = ir.VectorType(simd.I8, 64)
        total = self.b.bitcast(vectors[0], wide)
        for vector in vectors[1:]:
            total = self.b.add(total, self.b.bitcast(vector, wide))
        return self.b.bitcast(total, simd.I32X16)

    def dot(self, total: Any, vectors: list[Any], address: Any) -> Any:
        """total + the products of the vectors' bytes with 4 bytes each from the address on."""
        for v, codes in enumerate(vectors):
            total = simd.dot_bytes(self.b, total, codes, self.every(self.at(address, 4 * v), simd.I32))
        return total

    def minus_bytes(self, codes: Any, zero: int) -> Any:
        """Each byte less a zero point, which makes it signed."""
        wide = ir.VectorType(simd.I8, 64)
        lessened = self.b.sub(self.b.bitcast(codes, wide), ir.Constant(wide, [(zero + 128) % 256 - 128] * 64))
        return self.b.bitcast(lessened, simd.I32X16)

    def room(self, size: int) -> Any:
        """Address of some bytes on the stack, at a multiple of 64."""
        with self.b.goto_entry_block():
            where = self.b.alloca(ir.ArrayType(simd.I8, size))
            where.align = 64
            return self.b.ptrtoint(where, simd.I64)

    def rounded_up(self, value: Any, unit: int) -> Any:
        return self.b.udiv(self.b.add(value, ir.Constant(simd.I64, unit - 1)), ir.Constant(simd.I64, unit))

    def smaller(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def fetch(self, address: Any, ahead: int, size: int, nearest: bool = True) -> None:
        """Ask for `size` bytes that will be read soon: with many rows the processor does not look that far ahead itself."""
        for line in range(0, size, 64):
            simd.prefetch(self.b, self.at(address, ahead + line), nearest)

    def bit(self, address: Any, at: int) -> list[Any]:
        """Eight vectors with a bit of each byte from a plane of one bit."""
        words = self.i32(address)
        return [self.mask(self.left(words, at - v), 0x01010101 << at) for v in range(8)]

    def two_bits(self, address: Any, at: int) -> list[Any]:
        """Eight vectors with two bits of each byte from a plane of two bits."""
        words = [self.i32(self.at(address, 64 * h)) for h in range(2)]
        return [self.mask(self.left(words[v // 4], at - 2 * (v % 4)), 0x03030303 << at) for v in range(8)]

    def signed_6_bits(self, scales: Any, group: Any) -> list[Any]:
        """The two scales of a group of a q3_k superblock, whose twelve bytes are three words of each row."""
        even = self.b.and_(group, ir.Constant(simd.I64, 1))  # of a word of four scales, the first or the last two
        word = self.b.and_(self.b.lshr(group, ir.Constant(simd.I64, 1)), ir.Constant(simd.I64, 1))
        half = self.b.lshr(group, ir.Constant(simd.I64, 2))
        low = self.i32(self.b.add(scales, self.times(word, 64)))
        top = self.i32(self.at(scales, 128))
        found = []
        for n in range(2):
            byte = self.b.add(self.times(even, 16), ir.Constant(simd.I64, 8 * n))
            low_code = self.mask(self.b.lshr(low, self.splat(self.b.add(byte, self.times(half, 4)))), 15)
            place = self.b.add(byte, self.times(self.b.lshr(group, ir.Constant(simd.I64, 1)), 2))
            top_code = self.left(self.mask(self.b.lshr(top, self.splat(place)), 3), 4)
            code = self.b.sub(self.b.or_(low_code, top_code), simd.constant(self.b, 32, i32x16))
            found.append(self.b.sitofp(code, simd.F32X16))
        return found

    def splat(self, shift: Any) -> Any:
        """A small integer in every lane."""
        return simd.splat(self.b, self.b.trunc(shift, simd.I32))

    def both(self, some: list[Any], others: list[Any]) -> list[Any]:
        """The bits of both, vector by vector."""
        return [self.b.or_(x, y) for x, y in zip(some, others, strict=True)]


@dataclass(frozen=True)
class Group:
    """32 inputs of the 16 rows of a tile in registers."""

    bits: int  # of a code
    codes: list[Any]  # eight vectors of unsigned bytes, four inputs each
    scales: list[Any]  # one for the group, or one for each half of it
    zero: int = 0  # zero point of the codes
    minima: tuple[Any, ...] = ()  # added to every weight of the group, or of each half of it


Reader = Callable[[Ops, Any, Any, Any], Group]  # (ops, address of a stretch, its groups, one of them) -> Group


def _scale_of_32(o: Ops, address: Any, group: Any) -> Any:
    return o.f16(o.b.add(address, o.times(group, 32)))


def _legacy(offset: int, zero: int, top_bit: bool = False) -> Reader:
    """q4_0, q4_1, q5_0, q5_1: planes codes, (top bits), scales, (minima)."""

    def read(o: Ops, at: Any, groups: Any, group: Any) -> Group:
        codes = o.codes(o.b.add(at, o.times(group, 256)))
        if top_bit:
            codes = o.both(codes, o.bit(o.b.add(o.b.add(at, o.times(groups, 256)), o.times(group, 64)), 4))
        scale = _scale_of_32(o, o.b.add(at, o.times(groups, offset)), group)
        if zero:
            return Group(4 + top_bit, codes, [scale], zero)
        return Group(4 + top_bit, codes, [scale], 0, (_scale_of_32(o, o.b.add(at, o.times(groups, offset + 32)), group),))

    return read


def _q8_0(o: Ops, at: Any, groups: Any, group: Any) -> Group:
    address = o.b.add(at, o.times(group, 512))
    codes = [o.i32(o.at(address, 64 * v)) for v in range(8)]
    return Group(8, codes, [_scale_of_32(o, o.b.add(at, o.times(groups, 512)), group)], 128)


def _mxfp4(o: Ops, at: Any, groups: Any, group: Any) -> Group:
    """Planes codes, e. Twice the values of E2M1 are integers, and 16 more makes them unsigned with a zero point of q5_0."""
    codes = o.looked_up(o.codes(o.b.add(at, o.times(group, 256))), [16 + value for value in E2M1_DOUBLED])
    return Group(5, codes, [o.half_of_e8m0(o.b.add(o.b.add(at, o.times(groups, 256)), o.times(group, 16)))], 16)


def _int4(size: int, asymmetric: bool) -> Reader:
    """int4_g32, int4_g64, int4_g128 and their asym: planes codes, scales, (zero points), one for `size` inputs."""
    shift = ir.Constant(simd.I64, size.bit_length() - 6)  # from groups of 32 to groups of `size`

    def read(o: Ops, at: Any, groups: Any, group: Any) -> Group:
        codes = o.codes(o.b.add(at, o.times(group, 256)))
        scales = o.b.add(at, o.times(groups, 256))
        here = o.b.lshr(group, shift)
        scale = o.f16(o.b.add(scales, o.times(here, 32)))
        if not asymmetric:
            return Group(4, codes, [scale], 8)
        zeros = o.b.add(scales, o.times(o.b.lshr(groups, shift), 32))
        return Group(4, codes, [scale], 0, (o.b.fneg(o.b.fmul(scale, o.u8(o.b.add(zeros, o.times(here, 16))))),))

    return read


def _lowbit(bits: int, size: int) -> Reader:
    """int2 and int3: planes low bits, (third bits), scales, zero points in sixteenths, one for `size` inputs."""
    shift = ir.Constant(simd.I64, size.bit_length() - 6)  # from groups of 32 to groups of `size`

    def read(o: Ops, at: Any, groups: Any, group: Any) -> Group:
        codes = o.two_bits(o.b.add(at, o.times(group, 128)), 0)
        if bits == 3:
            codes = o.both(codes, o.bit(o.b.add(o.b.add(at, o.times(groups, 128)), o.times(group, 64)), 2))
        scales, here = o.b.add(at, o.times(groups, 64 * bits)), o.b.lshr(group, shift)
        zeros = o.b.add(scales, o.times(o.b.lshr(groups, shift), 32))
        scale, zero = o.f16(o.b.add(scales, o.times(here, 32))), o.u8(o.b.add(zeros, o.times(here, 16)))
        zero = o.b.fmul(zero, simd.constant(o.b, 1 / lowbit.ZERO_STEPS, simd.f32x16))
        return Group(bits, codes, [scale], 0, (o.b.fneg(o.b.fmul(scale, zero)),))

    return read


def _superblock(o: Ops, address: Any, group: Any) -> Any:
    return o.f16(o.b.add(address, o.times(o.b.lshr(group, ir.Constant(simd.I64, 3)), 32)))


def _k(offset: int, top_bit: bool) -> Reader:
    """q4_k, q5_k: planes codes, (top bits), scales, minima, d, dmin."""

    def read(o: Ops, at: Any, groups: Any, group: Any) -> Group:
        codes = o.codes(o.b.add(at, o.times(group, 256)))
        if top_bit:
            codes = o.both(codes, o.bit(o.b.add(o.b.add(at, o.times(groups, 256)), o.times(group, 64)), 4))
        scales = o.b.add(at, o.times(groups, offset))
        here = o.b.add(scales, o.times(group, 16))
        d = o.b.add(scales, o.times(groups, 32))
        scale = o.b.fmul(_superblock(o, d, group), o.u8(here))
        # d is 32 bytes a superblock, 4 a group
        minimum = o.b.fmul(_superblock(o, o.b.add(d, o.times(groups, 4)), group), o.u8(o.b.add(here, o.times(groups, 16))))
        return Group(4 + top_bit, codes, [scale], 0, (o.b.fneg(minimum),))

    return read


def _q2_k(o: Ops, at: Any, groups: Any, group: Any) -> Group:
    """Planes codes, bytes of a scale (low half) and a minimum (high half) for 16 inputs, d, dmin."""
    scales = o.b.add(at, o.times(groups, 128))
    d = o.b.add(scales, o.times(groups, 32))
    scale, minimum = _superblock(o, d, group), o.b.fneg(_superblock(o, o.b.add(d, o.times(groups, 4)), group))
    packed = [o.u8_codes(o.at(o.b.add(scales, o.times(group, 32)), 16 * half)) for half in range(2)]
    halves = [o.b.fmul(scale, o.b.uitofp(o.mask(two, 15), simd.F32X16)) for two in packed]
    minima = tuple(o.b.fmul(minimum, o.b.uitofp(o.left(two, -4), simd.F32X16)) for two in packed)
    return Group(2, o.two_bits(o.b.add(at, o.times(group, 128)), 0), halves, 0, minima)


def _q3_k(o: Ops, at: Any, groups: Any, group: Any) -> Group:
    """Planes low bits, third bits, the twelve bytes of scales, d. Eight times the codes have the zero point of q6_k."""
    codes = o.both(
        o.two_bits(o.b.add(at, o.times(group, 128)), 3), o.bit(o.b.add(o.b.add(at, o.times(groups, 128)), o.times(group, 64)), 5)
    )
    scales = o.b.add(at, o.times(groups, 192))
    d = o.b.fmul(_superblock(o, o.b.add(scales, o.times(groups, 24)), group), simd.constant(o.b, 1 / 8, simd.f32x16))
    return Group(6, codes, [o.b.fmul(d, scale) for scale in o.signed_6_bits(scales, group)], 32)


def _q6_k(o: Ops, at: Any, groups: Any, group: Any) -> Group:
    codes = o.codes(o.b.add(at, o.times(group, 256)))
    codes = o.both(codes, o.two_bits(o.b.add(o.b.add(at, o.times(groups, 256)), o.times(group, 128)), 4))
    scales = o.b.add(at, o.times(groups, 384))
    here = o.b.add(scales, o.times(group, 32))
    d = _superblock(o, o.b.add(scales, o.times(groups, 32)), group)
    halves = [o.b.fmul(d, o.i8(o.at(here, 16 * half))) for half in range(2)]
    return Group(6, codes, halves, 32)


def _blocks_of(row: Format) -> Reader:
    zero = 0 if "base" in (row.layout.names or ()) else 1 << row.code_bits - 1
    return _legacy(64 * row.code_bits, zero, top_bit=row.code_bits == 5)


# By the `reader` of a format's row.
_KINDS: Mapping[str, Callable[[Format], Reader]] = MappingProxyType(
    {
        "blocks": _blocks_of,
        "bytes": lambda row: _q8_0,
        "levels": lambda row: _mxfp4,
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
# Scales that a group has, where it is not one.
NUM_SCALES: Mapping[str, int] = MappingProxyType({"q2_k": 2, "q3_k": 2, "q6_k": 2})

if unread := FORMATS.keys() - READERS.keys() - NUMBERS.keys() - {PAIRED}:
    raise AssertionError(f"formats {sorted(unread)} name readers that do not exist; wanted one of {', '.join(_KINDS)}")

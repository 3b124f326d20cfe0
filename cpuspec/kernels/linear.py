"""Linear layers: packed weights times rows of activations, one kernel for every format and number of rows.

A tile is 16 output rows in 16 lanes. For each group of 32 inputs its weights are unpacked into registers once, and every row of
the batch (up to ROWS at a time) is multiplied with them. Each output sums its groups in the order of the inputs, whatever the
number of rows, the thread or the tile: a row's result does not depend on its company, bit for bit.

Activations come in one of three orders, in blocks of up to ROWS rows:
  "int8"   [group][row] records of 64 bytes: x = scale * byte + shift for 32 inputs, shift the middle of their range. Against
           bytes around zero this halves the error, for one more multiply-add a group.
  "int16"  [group][row] records of 128 bytes: x = scale * (256 * byte + low byte), for matrices where errors count most.
  "f32"    [input][row] numbers, for weights that are floating point themselves.
A record holds 32 signed bytes, then at the offsets below the scale, the shift and what formats with a zero point or a minimum
need of the sums; then in "int16" order the 32 low bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from cpuspec.formats import FORMATS
from cpuspec.formats.int4 import LAYOUTS, group_size
from cpuspec.formats.mx import E2M1_DOUBLED
from cpuspec.formats.packing import GROUP, STRETCH, stretch_bytes
from cpuspec.kernels import kept_machine_code, simd
from cpuspec.kernels.simd import f32x16, i32x16

ROWS = 16  # rows of a block of activations
SCALE, SHIFT, VALUE_SUM, MINUS_8_SUMS, MINUS_16_SUMS, MINUS_128_SUMS, MINUS_32_LOW, MINUS_32_HIGH = range(32, 64, 4)
LOW_BYTES = 64

# Bytes of activations for each row and group of 32 inputs (of "f32", for each row and 32 inputs).
ORDERS: Mapping[str, int] = MappingProxyType({"int8": 64, "int16": 128, "f32": 128})

# Rows that one pass over a tile serves; other counts are made of these. Each is code to compile, once per format.
_PASSES = (16, 8, 4, 3, 2, 1)

_GROUPS = STRETCH // GROUP

# Bytes of weights to ask for in advance: with many rows the processor does not look so far ahead itself (benchmarks/LOG.md).
_AHEAD = 8192


class _Ops:
    """Instructions in the notation of arithmetic, appended to one LLVM builder. Offsets are in bytes."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def at(self, address: Any, offset: int) -> Any:
        return self.b.add(address, ir.Constant(simd.I64, offset)) if offset else address

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

    def u8(self, address: Any) -> Any:
        return self.b.uitofp(self.b.zext(simd.load(self.b, address, simd.vector_of(simd.I8)), simd.I32X16), simd.F32X16)

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

    def rounded_up(self, value: Any, unit: int) -> Any:
        return self.b.udiv(self.b.add(value, ir.Constant(simd.I64, unit - 1)), ir.Constant(simd.I64, unit))

    def smaller(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def fetch(self, address: Any, ahead: int, size: int) -> None:
        """Ask for `size` bytes that will be read soon: with many rows the processor does not look that far ahead itself."""
        for line in range(0, size, 64):
            simd.prefetch(self.b, self.at(address, ahead + line))

    def with_top_bit(self, codes: list[Any], address: Any) -> list[Any]:
        high = self.i32(address)
        return [self.b.or_(c, self.mask(self.left(high, 4 - v), 0x10101010)) for v, c in enumerate(codes)]

    def with_top_two_bits(self, codes: list[Any], address: Any) -> list[Any]:
        high = [self.i32(self.at(address, 64 * h)) for h in range(2)]
        return [self.b.or_(c, self.mask(self.left(high[v // 4], 4 - 2 * (v % 4)), 0x30303030)) for v, c in enumerate(codes)]


@dataclass(frozen=True)
class _Group:
    """32 inputs of 16 rows in registers."""

    bits: int  # of a code
    codes: list[Any]  # eight vectors of unsigned bytes, four inputs each
    scales: list[Any]  # one for the group, or one for each half of it
    zero: int = 0  # zero point of the codes
    minimum: Any = None  # added to every weight


Reader = Callable[[_Ops, Any, Any, Any], _Group]  # (ops, address of a stretch, its groups, one of them) -> _Group


def _scale_of_32(o: _Ops, address: Any, group: Any) -> Any:
    return o.f16(o.b.add(address, o.times(group, 32)))


def _legacy(offset: int, zero: int, top_bit: bool = False) -> Reader:
    """q4_0, q4_1, q5_0, q5_1: planes codes, (top bits), scales, (minima)."""

    def read(o: _Ops, at: Any, groups: Any, group: Any) -> _Group:
        codes = o.codes(o.b.add(at, o.times(group, 256)))
        if top_bit:
            codes = o.with_top_bit(codes, o.b.add(o.b.add(at, o.times(groups, 256)), o.times(group, 64)))
        scale = _scale_of_32(o, o.b.add(at, o.times(groups, offset)), group)
        if zero:
            return _Group(4 + top_bit, codes, [scale], zero)
        return _Group(4 + top_bit, codes, [scale], 0, _scale_of_32(o, o.b.add(at, o.times(groups, offset + 32)), group))

    return read


def _q8_0(o: _Ops, at: Any, groups: Any, group: Any) -> _Group:
    address = o.b.add(at, o.times(group, 512))
    codes = [o.i32(o.at(address, 64 * v)) for v in range(8)]
    return _Group(8, codes, [_scale_of_32(o, o.b.add(at, o.times(groups, 512)), group)], 128)


def _mxfp4(o: _Ops, at: Any, groups: Any, group: Any) -> _Group:
    """Planes codes, e. Twice the values of E2M1 are integers, and 16 more makes them unsigned with a zero point of q5_0."""
    codes = o.looked_up(o.codes(o.b.add(at, o.times(group, 256))), [16 + value for value in E2M1_DOUBLED])
    return _Group(5, codes, [o.half_of_e8m0(o.b.add(o.b.add(at, o.times(groups, 256)), o.times(group, 16)))], 16)


def _int4(size: int, asymmetric: bool) -> Reader:
    """int4_g32, int4_g64, int4_g128 and their asym: planes codes, scales, (zero points), one for `size` inputs."""
    shift = ir.Constant(simd.I64, size.bit_length() - 6)  # from groups of 32 to groups of `size`

    def read(o: _Ops, at: Any, groups: Any, group: Any) -> _Group:
        codes = o.codes(o.b.add(at, o.times(group, 256)))
        scales = o.b.add(at, o.times(groups, 256))
        here = o.b.lshr(group, shift)
        scale = o.f16(o.b.add(scales, o.times(here, 32)))
        if not asymmetric:
            return _Group(4, codes, [scale], 8)
        zeros = o.b.add(scales, o.times(o.b.lshr(groups, shift), 32))
        return _Group(4, codes, [scale], 0, o.b.fneg(o.b.fmul(scale, o.u8(o.b.add(zeros, o.times(here, 16))))))

    return read


def _superblock(o: _Ops, address: Any, group: Any) -> Any:
    return o.f16(o.b.add(address, o.times(o.b.lshr(group, ir.Constant(simd.I64, 3)), 32)))


def _k(offset: int, top_bit: bool) -> Reader:
    """q4_k, q5_k: planes codes, (top bits), scales, minima, d, dmin."""

    def read(o: _Ops, at: Any, groups: Any, group: Any) -> _Group:
        codes = o.codes(o.b.add(at, o.times(group, 256)))
        if top_bit:
            codes = o.with_top_bit(codes, o.b.add(o.b.add(at, o.times(groups, 256)), o.times(group, 64)))
        scales = o.b.add(at, o.times(groups, offset))
        here = o.b.add(scales, o.times(group, 16))
        d = o.b.add(scales, o.times(groups, 32))
        scale = o.b.fmul(_superblock(o, d, group), o.u8(here))
        # d is 32 bytes a superblock, 4 a group
        minimum = o.b.fmul(_superblock(o, o.b.add(d, o.times(groups, 4)), group), o.u8(o.b.add(here, o.times(groups, 16))))
        return _Group(4 + top_bit, codes, [scale], 0, o.b.fneg(minimum))

    return read


def _q6_k(o: _Ops, at: Any, groups: Any, group: Any) -> _Group:
    codes = o.codes(o.b.add(at, o.times(group, 256)))
    codes = o.with_top_two_bits(codes, o.b.add(o.b.add(at, o.times(groups, 256)), o.times(group, 128)))
    scales = o.b.add(at, o.times(groups, 384))
    here = o.b.add(scales, o.times(group, 32))
    d = _superblock(o, o.b.add(scales, o.times(groups, 32)), group)
    halves = [o.b.fmul(d, o.i8(o.at(here, 16 * half))) for half in range(2)]
    return _Group(6, codes, halves, 32)


_READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "q4_0": _legacy(256, 8),
        "q4_1": _legacy(256, 0),
        "q5_0": _legacy(320, 16, top_bit=True),
        "q5_1": _legacy(320, 0, top_bit=True),
        "q8_0": _q8_0,
        "q4_k": _k(256, top_bit=False),
        "q5_k": _k(320, top_bit=True),
        "q6_k": _q6_k,
        "mxfp4": _mxfp4,
        **{name: _int4(group_size(layout), asymmetric="zero" in (layout.names or ())) for name, layout in LAYOUTS.items()},
    }
)
_NUMBERS: Mapping[str, tuple[int, str]] = MappingProxyType({"f32": (64, "f32"), "f16": (32, "f16"), "bf16": (32, "bf16")})


# Field of a record that an integer sum starts from, by zero point and by half of the group.
_STARTS = {8: (MINUS_8_SUMS,), 16: (MINUS_16_SUMS,), 128: (MINUS_128_SUMS,), 32: (MINUS_32_LOW, MINUS_32_HIGH)}


def activation_order(format_name: str, precise: bool = False) -> str:
    """The order of activations that a format wants: of ORDERS, "int16" rather than "int8" where precise."""
    return "f32" if format_name in _NUMBERS else "int16" if precise else "int8"


def _quantized_pass(
    o: _Ops, name: str, order: str, rows: int, tile: Any, in_features: Any, acts: Any, block_rows: Any
) -> list[Any]:
    """The 16 outputs of each row, from activations in records."""
    stretch = stretch_bytes(FORMATS[name])
    groups = o.b.lshr(in_features, ir.Constant(simd.I64, 5))
    stride = o.times(block_rows, ORDERS[order])
    sums = [cgutils.alloca_once_value(o.b, simd.constant(o.b, 0.0, f32x16)) for _ in range(rows)]
    with cgutils.for_range(o.b, o.rounded_up(groups, _GROUPS)) as stretches:
        first = o.times(stretches.index, _GROUPS)
        inside = o.smaller(o.b.sub(groups, first), ir.Constant(simd.I64, _GROUPS))
        here = o.b.add(tile, o.times(stretches.index, stretch))
        with cgutils.for_range(o.b, inside) as loop:
            share = stretch // _GROUPS
            o.fetch(o.b.add(here, o.times(loop.index, share)), _AHEAD, share)
            group = _READERS[name](o, here, inside, loop.index)
            shifted = _sum_of_weights(o, group) if order == "int8" else None
            records = o.b.add(acts, o.b.mul(o.b.add(first, loop.index), stride))
            for row, total in enumerate(sums):
                record = o.at(records, row * ORDERS[order])
                o.b.store(_add_group(o, group, shifted, record, o.b.load(total)), total)
    return [o.b.load(total) for total in sums]


def _halves(group: _Group) -> list[tuple[Any, list[Any]]]:
    """Each scale with the vectors of codes that it is for."""
    share = 8 // len(group.scales)
    return [(scale, group.codes[n * share : (n + 1) * share]) for n, scale in enumerate(group.scales)]


def _sum_of_weights(o: _Ops, group: _Group) -> Any:
    """Sum over the group of scale * (code - zero), for each row of the tile: what a shift of the inputs is multiplied with."""
    ones = simd.constant(o.b, 0x01010101, i32x16)
    weights = None
    for scale, vectors in _halves(group):
        total = simd.constant(o.b, -group.zero * 4 * len(vectors), i32x16)
        fits = len(vectors) * (2**group.bits - 1) < 256  # as bytes, the sum of all vectors does not overflow
        for vector in [o.sum_of_bytes(vectors)] if fits else vectors:
            total = simd.dot_bytes(o.b, total, vector, ones)
        number = o.b.sitofp(total, simd.F32X16)
        weights = o.b.fmul(number, scale) if weights is None else o.fma(number, scale, weights)
    return weights


def _add_group(o: _Ops, group: _Group, shifted: Any, record: Any, total: Any) -> Any:
    """total + scale of the row * (sum over parts of scale * integer dot) + shift * sum of weights + minimum * sum of inputs.

    shifted: the sum of weights for "int8" records, None for "int16" records.
    """
    scaled = None
    for part, (scale, vectors) in enumerate(_halves(group)):
        first = 4 * part * len(vectors)
        start = simd.constant(o.b, 0, i32x16)
        if group.zero:
            start = o.every(o.at(record, _STARTS[group.zero][part]), simd.I32)
        if shifted is None:
            high = o.dot(simd.constant(o.b, 0, i32x16), vectors, o.at(record, first))
            dot = o.b.add(o.left(high, 8), o.dot(start, vectors, o.at(record, LOW_BYTES + first)))
        else:
            dot = o.dot(start, vectors, o.at(record, first))
        number = o.b.sitofp(dot, simd.F32X16)
        scaled = o.b.fmul(number, scale) if scaled is None else o.fma(number, scale, scaled)
    total = o.fma(scaled, o.every(o.at(record, SCALE), simd.F32), total)
    if shifted is not None:
        total = o.fma(shifted, o.every(o.at(record, SHIFT), simd.F32), total)
    if group.minimum is not None:
        total = o.fma(group.minimum, o.every(o.at(record, VALUE_SUM), simd.F32), total)
    return total


def _number_pass(o: _Ops, format_name: str, rows: int, tile: Any, in_features: Any, acts: Any, block_rows: Any) -> list[Any]:
    """The 16 outputs of each row, from f32 activations: even and odd inputs are summed apart, then together."""
    size, load = _NUMBERS[format_name]
    sums = [[cgutils.alloca_once_value(o.b, simd.constant(o.b, 0.0, f32x16)) for _ in range(2)] for _ in range(rows)]
    stride = o.times(block_rows, 4)
    one = ir.Constant(simd.I64, 1)

    def add_input(k: Any, parity: int) -> None:
        weights = getattr(o, load)(o.b.add(tile, o.times(k, size)))
        here = o.b.add(acts, o.b.mul(k, stride))
        for row in range(rows):
            total = sums[row][parity]
            o.b.store(o.fma(weights, o.every(o.at(here, 4 * row), simd.F32), o.b.load(total)), total)

    with cgutils.for_range(o.b, o.b.lshr(in_features, one)) as loop:
        even = o.b.shl(loop.index, one)
        add_input(even, 0)
        add_input(o.b.add(even, one), 1)
    with o.b.if_then(o.b.trunc(in_features, simd.I1)):
        add_input(o.b.sub(in_features, one), 0)
    return [o.b.fadd(o.b.load(even), o.b.load(odd)) for even, odd in sums]


@intrinsic(prefer_literal=True)
def _pass(typingctx, format_name, order, rows, tile, in_features, acts, block_rows, bias, residual, out, stride):
    """Outputs of one tile for `rows` rows, stored at out + row * stride: products + bias + residual (each where not 0)."""
    signature = types.void(format_name, order, rows, *[types.int64] * 8)
    name, count = format_name.literal_value, rows.literal_value

    def codegen(context, builder, sig, args):
        _, _, _, tile, in_features, acts, block_rows, bias, residual, out, stride = args
        o = _Ops(builder)
        if name in _READERS:
            results = _quantized_pass(o, name, order.literal_value, count, tile, in_features, acts, block_rows)
        else:
            results = _number_pass(o, name, count, tile, in_features, acts, block_rows)
        results = _plus(o, results, bias, lambda row: bias)
        results = _plus(o, results, residual, lambda row: o.b.add(residual, o.times(stride, row)))
        for row, value in enumerate(results):
            simd.store(builder, o.b.add(out, o.times(stride, row)), value)
        return context.get_dummy_value()

    return signature, codegen


def _plus(o: _Ops, values: list[Any], given: Any, address_of_row: Callable[[int], Any]) -> list[Any]:
    """Each value plus the vector at its row's address, where the base address `given` is not 0."""
    totals = [cgutils.alloca_once_value(o.b, value) for value in values]
    with o.b.if_then(o.b.icmp_unsigned("!=", given, ir.Constant(simd.I64, 0))):
        for row, total in enumerate(totals):
            o.b.store(o.b.fadd(o.b.load(total), o.f32(address_of_row(row))), total)
    return [o.b.load(total) for total in totals]


@cache
def linear_kernel(format_name: str, order: str) -> int:
    """Address of the compiled kernel of a format, for activations in an order of ORDERS:

    (tiles, tile_bytes, in_features, first tile, end tile, activations, bytes of a row of activations, rows, bias, residual,
    out, stride)

    all int64, addresses and byte counts. Writes out[row * stride + 64 * tile] for tiles first..end and all rows.
    """
    with kept_machine_code():
        return _linear(format_name, order, 4 if order == "f32" else ORDERS[order]).address


def _linear(name: str, order: str, step: int) -> Any:
    """The kernel of a format, compiled or from the disk. step: bytes from a row of activations to the next in a block."""
    p16, p8, p4, p3, p2, p1 = _PASSES

    @cfunc(types.void(*[types.int64] * 12), cache=True)
    def linear(tiles, tile_bytes, in_features, first, end, acts, row_bytes, rows, bias, residual, out, stride):
        for tile in range(first, end):
            weights = tiles + tile * tile_bytes
            tile_bias = bias + 64 * tile if bias != 0 else bias
            row = 0
            while row < rows:
                inside = row % ROWS
                block_rows = min(ROWS, rows - row + inside)
                left = block_rows - inside
                here = acts + (row - inside) * row_bytes + inside * step
                to = out + row * stride + 64 * tile
                add = residual + row * stride + 64 * tile if residual != 0 else residual
                if left >= p16:
                    _pass(name, order, p16, weights, in_features, here, block_rows, tile_bias, add, to, stride)
                    row += p16
                elif left >= p8:
                    _pass(name, order, p8, weights, in_features, here, block_rows, tile_bias, add, to, stride)
                    row += p8
                elif left >= p4:
                    _pass(name, order, p4, weights, in_features, here, block_rows, tile_bias, add, to, stride)
                    row += p4
                elif left >= p3:
                    _pass(name, order, p3, weights, in_features, here, block_rows, tile_bias, add, to, stride)
                    row += p3
                elif left >= p2:
                    _pass(name, order, p2, weights, in_features, here, block_rows, tile_bias, add, to, stride)
                    row += p2
                else:
                    _pass(name, order, p1, weights, in_features, here, block_rows, tile_bias, add, to, stride)
                    row += p1

    return linear

"""Linear layers: packed weights times rows of activations, one kernel for every format and number of rows.

A tile is 16 output rows in 16 lanes. For each group of 32 inputs its weights are unpacked into registers once (`readers`), and
every row of the batch, some at a time, is multiplied with them (`products`). Each output sums its groups in the order of the
inputs, whatever the number of rows, the thread or the tile: a row's result does not depend on its company, bit for bit.
Numbers (f32, f16) are multiplied with f32 activations, and bf16 with activations rounded to bf16, as tile registers do it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cpuspec.formats import FORMATS
from cpuspec.formats.packing import GROUP, PANEL, panel_bytes
from cpuspec.kernels import avx2, isa, machine_code, simd, tiles
from cpuspec.kernels.products import BLOCK_ROWS, ORDERS, add_group, sum_of_weights
from cpuspec.kernels.readers import AHEAD, NUMBERS, PAIRED, READERS, Ops
from cpuspec.kernels.simd import f32x16

# Rows that one pass over a tile serves at most; then eight, or what is left of them: a tile that is unpacked again for one row
# more costs as much as three rows more. Each is code to compile, once per format. Sixteen are not wanted of numbers, which need
# two registers for the sums of a row, of 32, nor where tile registers serve that many. With AVX2 alone a vector takes two of 16
# registers, and numbers of several rows are multiplied at even inputs and then at odd ones, with half of the sums at a time.
_SIXTEEN_REGISTERS = isa.dot_isa() == "avx2"
_MOST_ROWS, _MOST_OF_NUMBERS = 16, 6 if _SIXTEEN_REGISTERS else 8

# For fewer rows than a block, or one block in tile registers, a thread's tiles are as many strands, read in turns: from several
# places at once memory gives a core more (benchmarks/LOG.md). A pass of more rows than these keeps its sums in registers: one tile.
_STRANDS = 4
_STRANDED_ROWS = 8
_LONG = 128 << 10  # bytes of a strand from which on tile registers gain by it

_GROUPS = PANEL // GROUP

# Bytes of activations that are multiplied with some tiles before the next ones are: what stays near a core with the tiles.
_NEAR = 640 << 10


def activation_order(format_name: str, precise: bool = False) -> str:
    """The order of activations that a format wants: of ORDERS, "int16" rather than "int8" where precise."""
    if format_name == PAIRED:
        return "bf16" if isa.has_bf16_tiles() else "rounded"
    return "f32" if format_name in NUMBERS else "int16" if precise else "int8"


def _quantized_pass(
    o: Ops, name: str, order: str, rows: int, tile: Any, in_features: Any, acts: Any, block_rows: Any, strands: Any, apart: Any
) -> Callable[[Any, int], Any]:
    """The 16 outputs of a strand's tile for a row, by their numbers, from activations in records. apart: bytes between tiles."""
    stretch = panel_bytes(FORMATS[name])
    share = stretch // _GROUPS
    groups = o.b.lshr(in_features, ir.Constant(simd.I64, 5))
    stride = o.times(block_rows, ORDERS[order])
    if rows > _STRANDED_ROWS:  # of one tile, in registers
        sums = [cgutils.alloca_once(o.b, simd.F32X16) for _ in range(rows)]
    else:
        room = o.room(64 * rows * _STRANDS)

    def place(strand: Any, row: int) -> Any:
        if rows > _STRANDED_ROWS:
            return sums[row]
        return simd.pointer(o.b, o.at(o.b.add(room, o.times(strand, 64 * rows)), 64 * row))

    with cgutils.for_range(o.b, strands) as strand:
        for row in range(rows):
            o.b.store(simd.constant(o.b, 0.0, f32x16), place(strand.index, row))
    with cgutils.for_range(o.b, o.rounded_up(groups, _GROUPS)) as stretches:
        first = o.times(stretches.index, _GROUPS)
        inside = o.smaller(o.b.sub(groups, first), ir.Constant(simd.I64, _GROUPS))
        with cgutils.for_range(o.b, inside) as loop, cgutils.for_range(o.b, strands) as strand:
            here = o.b.add(o.b.add(tile, o.b.mul(strand.index, apart)), o.times(stretches.index, stretch))
            o.fetch(o.b.add(here, o.times(loop.index, share)), AHEAD, share)
            group = READERS[name](o, here, inside, loop.index)
            shifted = sum_of_weights(o, group) if order == "int8" else None
            records = o.b.add(acts, o.b.mul(o.b.add(first, loop.index), stride))
            if isa.dot_isa() == "avx2":
                avx2.add_rows(o, order, group, shifted, o.base(records), [place(strand.index, row) for row in range(rows)])
            else:
                for row in range(rows):
                    total, record = place(strand.index, row), o.at(records, row * ORDERS[order])
                    o.b.store(add_group(o, group, shifted, record, o.b.load(total, typ=simd.F32X16)), total)
    return lambda strand, row: o.b.load(place(strand, row), typ=simd.F32X16)


def _number_pass(
    o: Ops, format_name: str, rows: int, tile: Any, in_features: Any, acts: Any, block_rows: Any
) -> Callable[[Any, int], Any]:
    """As `_quantized_pass`, of one tile, from f32 activations: even and odd inputs are summed apart, then together."""
    size, load = NUMBERS[format_name]
    sums = [[cgutils.alloca_once_value(o.b, simd.constant(o.b, 0.0, f32x16)) for _ in range(2)] for _ in range(rows)]
    stride = o.times(block_rows, 4)
    one = ir.Constant(simd.I64, 1)

    def add_input(k: Any, parity: int) -> None:
        weights = getattr(o, load)(o.b.add(tile, o.times(k, size)))
        here = o.b.add(acts, o.b.mul(k, stride))
        for row in range(rows):
            total = sums[row][parity]
            o.b.store(o.fma(weights, o.every(o.at(here, 4 * row), simd.F32), o.b.load(total)), total)

    for parities in ((0,), (1,)) if _SIXTEEN_REGISTERS and rows > 3 else ((0, 1),):
        with cgutils.for_range(o.b, o.b.lshr(in_features, one)) as loop:
            even = o.b.shl(loop.index, one)
            if parities[0] == 0:
                o.fetch(o.b.add(tile, o.times(even, size)), AHEAD, 2 * size)
            for parity in parities:
                add_input(o.at(even, parity), parity)
    with o.b.if_then(o.b.trunc(in_features, simd.I1)):
        add_input(o.b.sub(in_features, one), 0)
    return lambda _, row: o.b.fadd(*[o.b.load(total) for total in sums[row]])


def _paired_pass(o: Ops, rows: int, tile: Any, in_features: Any, acts: Any, block_rows: Any) -> Callable[[Any, int], Any]:
    """As `_quantized_pass`, of one tile, from "rounded" activations, with the bits of `tiles.bf16_pass`: even and odd inputs of a
    group are summed apart from zero on, then together, then added to the groups before.
    """
    totals, evens, odds = ([cgutils.alloca_once_value(o.b, simd.constant(o.b, 0.0, f32x16)) for _ in range(rows)] for _ in range(3))
    restore = simd.flush_small_numbers(o.b)
    with cgutils.for_range(o.b, o.rounded_up(in_features, GROUP)) as groups:
        for total in (*evens, *odds):
            o.b.store(simd.constant(o.b, 0.0, f32x16), total)
        for parities in ((0,), (1,)) if _SIXTEEN_REGISTERS and rows > 2 else ((0, 1),):
            with cgutils.for_range(o.b, ir.Constant(simd.I64, GROUP // 2)) as loop:
                pair = o.b.add(o.times(groups.index, GROUP // 2), loop.index)
                here = o.b.add(tile, o.times(pair, 64))
                if parities[0] == 0:
                    o.fetch(here, AHEAD, 64)
                words = o.i32(here)
                halves = (o.left(words, 16), o.mask(words, 0xFFFF0000))
                for parity in parities:
                    numbers = o.b.bitcast(halves[parity], simd.F32X16)
                    at = o.b.add(o.times(pair, 2), ir.Constant(simd.I64, parity))
                    inputs = o.b.add(acts, o.b.mul(at, o.times(block_rows, 4)))
                    for row, total in enumerate((evens, odds)[parity]):
                        o.b.store(o.fma(numbers, o.every(o.at(inputs, 4 * row), simd.F32), o.b.load(total)), total)
        for even, odd, total in zip(evens, odds, totals, strict=True):
            o.b.store(o.b.fadd(o.b.load(total), o.b.fadd(o.b.load(even), o.b.load(odd))), total)
    restore()
    return lambda _, row: o.b.load(totals[row])


@intrinsic(prefer_literal=True)
def _pass(typingctx, format_name, order, rows, tile, apart, tile_bytes, in_features, acts, block_rows, bias, residual, out, stride):
    """Outputs of one tile for `rows` rows, stored at out + row * stride: products + bias + residual (each where not 0).

    apart: where not 0, also those of the tiles once, twice, ... so many further on: one of each strand, group by group in turns.
    """
    signature = types.void(format_name, order, rows, *[types.int64] * 10)
    name, count = format_name.literal_value, rows.literal_value

    def codegen(context, builder, sig, args):
        _, _, _, tile, apart, tile_bytes, in_features, acts, block_rows, bias, residual, out, stride = args
        o = Ops(builder)
        strands = ir.Constant(simd.I64, 1)
        if name in NUMBERS:
            sums = _number_pass(o, name, count, tile, in_features, acts, block_rows)
        elif name == PAIRED:
            sums = _paired_pass(o, count, tile, in_features, acts, block_rows)
        else:
            if count <= _STRANDED_ROWS:
                strands = _strands(o, apart)
            bytes_apart = o.b.mul(apart, tile_bytes)
            sums = _quantized_pass(o, name, order.literal_value, count, tile, in_features, acts, block_rows, strands, bytes_apart)
        with cgutils.for_range(o.b, strands) as strand:
            to = o.b.mul(strand.index, o.times(apart, 64))
            values = [sums(strand.index, row) for row in range(count)]
            values = _plus(o, values, bias, lambda row: o.b.add(bias, to))
            values = _plus(o, values, residual, lambda row: o.b.add(residual, o.b.add(to, o.times(stride, row))))
            for row, value in enumerate(values):
                simd.store(builder, o.b.add(out, o.b.add(to, o.times(stride, row))), value)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def _many_rows(
    typingctx, format_name, order, rows, tile, apart, tile_bytes, in_features, acts, row_bytes, bias, residual, out, stride
):
    """`_pass` in tile registers, or with AVX2 alone: up to MANY rows from the start of a block, or up to BLOCK_ROWS with strands."""
    signature = types.void(format_name, order, *[types.int64] * 11)
    name, order_name = format_name.literal_value, order.literal_value

    def codegen(context, builder, sig, args):
        _, _, rows, tile, apart, tile_bytes, in_features, acts, row_bytes, bias, residual, out, stride = args
        o = Ops(builder)

        def finish(strand, row, values):
            to = o.b.mul(strand, o.times(apart, 64))
            place = o.b.add(to, o.b.mul(stride, row))
            [values] = _plus(o, [values], bias, lambda _: o.b.add(bias, to))
            [values] = _plus(o, [values], residual, lambda _: o.b.add(residual, place))
            simd.store(builder, o.b.add(out, place), values)

        bytes_apart = o.b.mul(apart, tile_bytes)
        some_pass = avx2.rows_pass if isa.dot_isa() == "avx2" else tiles.many_rows_pass
        some_pass(o, name, order_name, rows, tile, _strands(o, apart), bytes_apart, in_features, acts, row_bytes, finish)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def _bf16_rows(typingctx, width, blocks, rows, tile, tile_bytes, in_features, acts, row_bytes, bias, residual, out, stride):
    """`_pass` of bf16 in tile registers, for `width` tiles and up to `blocks` blocks of rows from the start of one on."""
    signature = types.void(width, blocks, *[types.int64] * 10)

    def codegen(context, builder, sig, args):
        _, _, rows, tile, tile_bytes, in_features, acts, row_bytes, bias, residual, out, stride = args
        o = Ops(builder)

        def finish(number, row, values):
            [values] = _plus(o, [values], bias, lambda _: o.at(bias, 64 * number))
            [values] = _plus(o, [values], residual, lambda _: o.at(o.b.add(residual, o.b.mul(stride, row)), 64 * number))
            simd.store(builder, o.at(o.b.add(out, o.b.mul(stride, row)), 64 * number), values)

        size = width.literal_value, blocks.literal_value
        tiles.bf16_pass(o, *size, rows, tile, tile_bytes, in_features, acts, row_bytes, finish)
        return context.get_dummy_value()

    return signature, codegen


def _strands(o: Ops, apart: Any) -> Any:
    """How many strands a pass has whose tiles are so far apart."""
    none = o.b.icmp_unsigned("==", apart, ir.Constant(simd.I64, 0))
    return o.b.select(none, ir.Constant(simd.I64, 1), ir.Constant(simd.I64, _STRANDS))


def _plus(o: Ops, values: list[Any], given: Any, address_of_row: Callable[[int], Any]) -> list[Any]:
    """Each value plus the vector at its row's address, where the base address `given` is not 0."""
    totals = [cgutils.alloca_once_value(o.b, value) for value in values]
    with o.b.if_then(o.b.icmp_unsigned("!=", given, ir.Constant(simd.I64, 0))):
        for row, total in enumerate(totals):
            o.b.store(o.b.fadd(o.b.load(total), o.f32(address_of_row(row))), total)
    return [o.b.load(total) for total in totals]


@cache
def linear_kernel(format_name: str, order: str) -> int:
    """Address of the compiled kernel of a format, for activations in an order of ORDERS:

    (matrix, tile_bytes, in_features, first tile, end tile, activations, bytes of a row of activations, rows, bias, residual,
    out, stride)

    all int64, addresses and byte counts. Writes out[row * stride + 64 * tile] for tiles first..end and all rows.
    """
    if order == "bf16":
        return machine_code.address(f"linear-{format_name}-{order}", 12, _bf16_linear)
    step = 4 if order in ("f32", "rounded") else ORDERS[order]
    if isa.dot_isa() == "avx2" and format_name in READERS:
        return machine_code.address(f"linear-{format_name}-{order}", 12, lambda: _avx2_linear(format_name, order))
    return machine_code.address(f"linear-{format_name}-{order}", 12, lambda: _linear(format_name, order, step))


def _bf16_linear() -> Callable[..., None]:
    """The kernel of bf16 in tile registers, to be compiled: four tiles of up to 16 rows at a time, or two of up to 32."""
    near = _NEAR

    def linear(matrix, tile_bytes, in_features, first, end, acts, row_bytes, rows, bias, residual, out, stride):
        tiles.shape(PAIRED)
        span = max(2 * BLOCK_ROWS, near // row_bytes // (2 * BLOCK_ROWS) * (2 * BLOCK_ROWS))
        for top in range(0, rows, span):
            bottom = min(rows, top + span)
            tile = first
            while tile < end:
                weights = matrix + tile * tile_bytes
                tile_bias = bias + 64 * tile if bias != 0 else bias
                width = 4 if rows <= BLOCK_ROWS and end - tile >= 4 else 2 if end - tile >= 2 else 1
                for row in range(top, bottom, 2 * BLOCK_ROWS):
                    count = min(2 * BLOCK_ROWS, bottom - row)
                    here, to = acts + row * row_bytes, out + row * stride + 64 * tile
                    add = residual + row * stride + 64 * tile if residual != 0 else residual
                    if width == 4:
                        _bf16_rows(4, 1, count, weights, tile_bytes, in_features, here, row_bytes, tile_bias, add, to, stride)
                    elif width == 2 and count > BLOCK_ROWS:
                        _bf16_rows(2, 2, count, weights, tile_bytes, in_features, here, row_bytes, tile_bias, add, to, stride)
                    elif width == 2:
                        _bf16_rows(2, 1, count, weights, tile_bytes, in_features, here, row_bytes, tile_bias, add, to, stride)
                    elif count > BLOCK_ROWS:
                        _bf16_rows(1, 2, count, weights, tile_bytes, in_features, here, row_bytes, tile_bias, add, to, stride)
                    else:
                        _bf16_rows(1, 1, count, weights, tile_bytes, in_features, here, row_bytes, tile_bias, add, to, stride)
                tile += width
        tiles.release()

    return linear


def _avx2_linear(name: str, order: str) -> Callable[..., None]:
    """The kernel of a format of codes with AVX2 alone, to be compiled: one pass for any number of rows."""
    strands, many, near = _STRANDS, avx2.MANY, _NEAR

    def linear(matrix, tile_bytes, in_features, first, end, acts, row_bytes, rows, bias, residual, out, stride):
        span = max(BLOCK_ROWS, min(many, near // row_bytes // BLOCK_ROWS * BLOCK_ROWS))
        for top in range(0, rows, span):
            count = min(span, rows - top)
            here, to, add = acts + top * row_bytes, out + top * stride, residual + top * stride if residual != 0 else residual
            length = (end - first) // strands if count <= BLOCK_ROWS else 0
            for turn in range(end - first - (strands - 1) * length):
                tile, apart = (first + turn, length) if turn < length else (first + turn + (strands - 1) * length, 0)
                weights = matrix + tile * tile_bytes
                plus = bias + 64 * tile if bias != 0 else bias
                more = add + 64 * tile if add != 0 else add
                at = to + 64 * tile
                if count == 1:
                    _pass(name, order, 1, weights, apart, tile_bytes, in_features, here, count, plus, more, at, stride)
                elif count == 2:
                    _pass(name, order, 2, weights, apart, tile_bytes, in_features, here, count, plus, more, at, stride)
                elif count == 3:
                    _pass(name, order, 3, weights, apart, tile_bytes, in_features, here, count, plus, more, at, stride)
                elif count == 4:
                    _pass(name, order, 4, weights, apart, tile_bytes, in_features, here, count, plus, more, at, stride)
                else:
                    _many_rows(name, order, count, weights, apart, tile_bytes, in_features, here, row_bytes, plus, more, at, stride)

    return linear


def _linear(name: str, order: str, step: int) -> Callable[..., None]:
    """The kernel of a format, to be compiled. step: bytes from a row of activations to the next in a block."""
    in_tiles = isa.has_tiles() and name in READERS
    most = _MOST_ROWS if name in READERS and not in_tiles else _MOST_OF_NUMBERS
    few = BLOCK_ROWS if in_tiles else BLOCK_ROWS - 1  # whose passes have strands
    strands, stranded_rows = _STRANDS, few if name in READERS else 0
    least, many, near, long = tiles.least(name), tiles.MANY, _NEAR, _LONG
    shortest = -(-least // BLOCK_ROWS) * BLOCK_ROWS if in_tiles else BLOCK_ROWS

    def linear(matrix, tile_bytes, in_features, first, end, acts, row_bytes, rows, bias, residual, out, stride):
        if in_tiles and rows >= least:
            tiles.shape(name)
        span = max(shortest, min(many, near // row_bytes // BLOCK_ROWS * BLOCK_ROWS))
        for top in range(0, rows, span):
            bottom = min(rows, top + span)
            use_tiles = in_tiles and bottom - top >= least
            length = (end - first) // strands if bottom - top <= stranded_rows else 0
            if use_tiles and length * tile_bytes < long:
                length = 0
            for turn in range(end - first - (strands - 1) * length):
                tile, apart = (first + turn, length) if turn < length else (first + turn + (strands - 1) * length, 0)
                weights = matrix + tile * tile_bytes
                plus = bias + 64 * tile if bias != 0 else bias
                row = top
                while row < bottom:
                    inside = row % BLOCK_ROWS
                    block_rows = min(BLOCK_ROWS, rows - row + inside)
                    left = block_rows - inside
                    here = acts + (row - inside) * row_bytes + inside * step
                    to = out + row * stride + 64 * tile
                    add = residual + row * stride + 64 * tile if residual != 0 else residual
                    if use_tiles:
                        count = bottom - row
                        _many_rows(
                            name, order, count, weights, apart, tile_bytes, in_features, here, row_bytes, plus, add, to, stride
                        )
                        row += count
                    elif left >= most:
                        _pass(name, order, most, weights, apart, tile_bytes, in_features, here, block_rows, plus, add, to, stride)
                        row += most
                    elif left >= 8:
                        _pass(name, order, 8, weights, apart, tile_bytes, in_features, here, block_rows, plus, add, to, stride)
                        row += 8
                    elif left >= 7:
                        _pass(name, order, 7, weights, apart, tile_bytes, in_features, here, block_rows, plus, add, to, stride)
                        row += 7
                    elif left >= 6:
                        _pass(name, order, 6, weights, apart, tile_bytes, in_features, here, block_rows, plus, add, to, stride)
                        row += 6
                    elif left >= 5:
                        _pass(name, order, 5, weights, apart, tile_bytes, in_features, here, block_rows, plus, add, to, stride)
                        row += 5
                    elif left >= 4:
                        _pass(name, order, 4, weights, apart, tile_bytes, in_features, here, block_rows, plus, add, to, stride)
                        row += 4
                    elif left >= 3:
                        _pass(name, order, 3, weights, apart, tile_bytes, in_features, here, block_rows, plus, add, to, stride)
                        row += 3
                    elif left >= 2:
                        _pass(name, order, 2, weights, apart, tile_bytes, in_features, here, block_rows, plus, add, to, stride)
                        row += 2
                    else:
                        _pass(name, order, 1, weights, apart, tile_bytes, in_features, here, block_rows, plus, add, to, stride)
                        row += 1
        if in_tiles and rows >= least:
            tiles.release()

    return linear

"""Linear layers: packed weights times rows of activations, one kernel for every format and number of rows.

A tile is 16 output rows in 16 lanes. For each group of 32 inputs its weights are unpacked into registers once (`readers`), and
every row of the batch, some at a time, is multiplied with them (`products`). Each output sums its groups in the order of the
inputs, whatever the number of rows, the thread or the tile: a row's result does not depend on its company, bit for bit.
Numbers (f32, f16) and codes of floats (fp8, nf4) are multiplied with f32 activations, and bf16 with activations rounded to bf16, as
tile registers do it.
"""

from collections.abc import Callable
from functools import cache, partial

from numba import types
from numba.extending import intrinsic

from cpuspec.formats import FORMATS
from cpuspec.formats.packing import GROUP, PANEL, panel_bytes
from cpuspec.kernels import isa, machine_code, tiles, ymm
from cpuspec.kernels.ops import F32, F32X16, I1, Ops, Value, Variable, fma
from cpuspec.kernels.products import BLOCK_ROWS, ORDERS, add_group, sum_of_weights
from cpuspec.kernels.readers import AHEAD, FLOAT_CODES, INTO_FIRST, NUMBERS, PAIRED, READERS

# Rows that one pass over a tile serves at most; then eight, or what is left of them: a tile that is unpacked again for one row
# more costs as much as three rows more. Each is code to compile, once per format. Sixteen are not wanted of numbers, which need
# two registers for the sums of a row, of 32, nor where tile registers serve that many. Without AVX-512 a vector takes two of 16
# registers, and numbers of several rows are multiplied at even inputs and then at odd ones, with half of the sums at a time.
_MOST_ROWS, _MOST_OF_NUMBERS = 16, 6 if isa.has_sixteen_registers() else 8

# For fewer rows than a block, or one block in tile registers, a thread reads its tiles as several streams in turns: from several
# places at once memory gives a core of an Intel processor more, one of Zen 4 and 5 less (benchmarks/LOG.md). A pass of more rows
# than these keeps its sums in registers: one tile.
_STREAMS = isa.reading().streams
_STREAMED_ROWS = 8
# Bytes of a stream from which on it gains, and does so in tile registers: nobody asks for the first AHEAD bytes of a stream.
_LEAST_STREAM, _LONG = 16 << 10, 128 << 10

_GROUPS = PANEL // GROUP

# Bytes of activations that are multiplied with some tiles before the next ones are: what stays near a core with the tiles.
_NEAR = 640 << 10

_Sums = Callable[[Value, int], Value]  # (stream, row) -> the 16 outputs


def activation_order(format_name: str, precise: bool = False) -> str:
    """The order of activations that a format wants: of ORDERS, "int16" rather than "int8" where precise."""
    if format_name == PAIRED:
        return "bf16" if isa.has_bf16_tiles() else "rounded"
    if format_name in NUMBERS or format_name in FLOAT_CODES:
        return "f32"
    return "int16" if precise else "int8"


def prompt_order(format_name: str, precise: bool = False) -> str:
    """`activation_order` for tokens of prompts in bf16, for which codes are dequantized."""
    return activation_order(PAIRED if format_name in READERS else format_name, precise)


def _quantized_pass(
    o: Ops, name: str, order: str, rows: int, tile: Value, in_features: Value, acts: Value, block_rows: Value, streams: Value,
    distance: Value,
) -> _Sums:  # fmt: skip
    """The outputs of a tile of each stream, from activations in records. distance: bytes between the tiles."""
    panel = panel_bytes(FORMATS[name])
    share = panel // _GROUPS
    groups = in_features >> 5
    stride = block_rows * ORDERS[order]
    if rows > _STREAMED_ROWS:  # of one tile, in registers
        sums = [o.variable(o.number(0.0, F32X16)) for _ in range(rows)]
    else:
        room = o.room(64 * rows * _STREAMS)

    def total(stream: Value, row: int, align: int | None = None) -> Variable:
        if rows > _STREAMED_ROWS:
            return sums[row]
        return o.variable_at(room + stream * (64 * rows) + 64 * row, F32X16, align)

    with o.loop(streams) as stream:
        for row in range(rows):
            total(stream, row).set(o.number(0.0, F32X16))
    with o.loop(groups.rounded_up(_GROUPS)) as panels:
        first = panels * _GROUPS
        inside = (groups - first).smaller(_GROUPS)
        with o.loop(inside) as index, o.loop(streams) as stream:
            here = tile + stream * distance + panels * panel
            (here + index * share).fetch(AHEAD, share, INTO_FIRST)
            records = acts + (first + index) * stride
            if isa.has_sixteen_registers():
                own_totals = [total(stream, row, 32) for row in range(rows)]
                ymm.add_rows(order, lambda at: READERS[name](at, inside, index), here.base(), records.base(), own_totals)
            else:
                group = READERS[name](here, inside, index)
                shifted = sum_of_weights(group) if order == "int8" else None
                for row in range(rows):
                    own = total(stream, row)
                    own.set(add_group(group, shifted, records + row * ORDERS[order], own.get()))
    return lambda stream, row: total(stream, row).get()


def _number_pass(o: Ops, format_name: str, rows: int, tile: Value, in_features: Value, acts: Value, block_rows: Value) -> _Sums:
    """As `_quantized_pass`, of one tile, from f32 activations: even and odd inputs are summed apart, then together."""
    size, load = NUMBERS[format_name]
    sums = [o.variables(2) for _ in range(rows)]
    stride = block_rows * 4

    def add_input(k: Value, parity: int) -> None:
        address = tile + k * size
        weights = address.f32() if load == "f32" else address.f16()
        here = acts + k * stride
        for row in range(rows):
            total = sums[row][parity]
            total.set(fma(weights, (here + 4 * row).every(F32), total.get()))

    for parities in ((0,), (1,)) if isa.has_sixteen_registers() and rows > 3 else ((0, 1),):
        with o.loop(in_features >> 1) as pair:
            even = pair << 1
            if parities[0] == 0:
                (tile + even * size).fetch(AHEAD, 2 * size, INTO_FIRST)
            for parity in parities:
                add_input(even + parity, parity)
    with o.when(in_features.trunc(I1)):
        add_input(in_features - 1, 0)
    return lambda _, row: sums[row][0].get() + sums[row][1].get()


def _float_codes_pass(
    o: Ops, format_name: str, rows: int, tile: Value, in_features: Value, acts: Value, block_rows: Value
) -> _Sums:
    """As `_quantized_pass`, of one tile, from f32 activations: even and odd inputs of a group of 32 are summed apart from zero on,
    then together, then times the group's scale added to the groups before.
    """
    codes = FLOAT_CODES[format_name]
    panel, stride, shift = panel_bytes(FORMATS[format_name]), block_rows * 4, codes.size.bit_length() - 6
    totals, evens, odds = (o.variables(rows) for _ in range(3))
    groups = in_features >> 5
    with o.loop(groups.rounded_up(_GROUPS)) as panels:
        first = panels * _GROUPS
        inside = (groups - first).smaller(_GROUPS)
        here = tile + panels * panel
        scales = here + inside * (16 * codes.input_bytes)
        with o.loop(inside) as index:
            (here + index * (panel // _GROUPS)).fetch(AHEAD, panel // _GROUPS, INTO_FIRST)
            for total in (*evens, *odds):
                total.set(o.number(0.0, F32X16))
            at, inputs = here + index * (16 * codes.input_bytes), acts + (first + index) * (stride * GROUP)
            for parities in ((0,), (1,)) if isa.has_sixteen_registers() and rows > 2 else ((0, 1),):
                with o.loop(GROUP // 2) as pair:
                    numbers = codes.pair(at + pair * codes.input_bytes)
                    for parity in parities:
                        place = inputs + (pair * 2 + parity) * stride
                        for row, total in enumerate((evens, odds)[parity]):
                            total.set(fma(numbers[parity], (place + 4 * row).every(F32), total.get()))
            scale = (scales + (index >> shift) * 64).f32()
            for even, odd, total in zip(evens, odds, totals, strict=True):
                total.set(fma((even.get() + odd.get()) * codes.factor, scale, total.get()))
    return lambda _, row: totals[row].get()


def _paired_pass(o: Ops, rows: int, tile: Value, in_features: Value, acts: Value, block_rows: Value) -> _Sums:
    """As `_quantized_pass`, of one tile, from "rounded" activations, with the bits of `tiles.bf16_pass`: even and odd inputs of a
    group are summed apart from zero on, then together, then added to the groups before.
    """
    totals, evens, odds = (o.variables(rows) for _ in range(3))
    restore = o.flush_small_numbers()
    with o.loop(in_features.rounded_up(GROUP)) as group:
        for total in (*evens, *odds):
            total.set(o.number(0.0, F32X16))
        for parities in ((0,), (1,)) if isa.has_sixteen_registers() and rows > 2 else ((0, 1),):
            with o.loop(GROUP // 2) as index:
                pair = group * (GROUP // 2) + index
                here = tile + pair * 64
                if parities[0] == 0:
                    here.fetch(AHEAD, 64, INTO_FIRST)
                words = here.i32()
                halves = (words << 16, words & 0xFFFF0000)
                for parity in parities:
                    numbers = halves[parity].bits(F32X16)
                    inputs = acts + (pair * 2 + parity) * (block_rows * 4)
                    for row, total in enumerate((evens, odds)[parity]):
                        total.set(fma(numbers, (inputs + 4 * row).every(F32), total.get()))
        for even, odd, total in zip(evens, odds, totals, strict=True):
            total.set(total.get() + (even.get() + odd.get()))
    restore()
    return lambda _, row: totals[row].get()


@intrinsic(prefer_literal=True)
def _pass(
    typingctx,
    format_name,
    order,
    most,
    rows,
    tile,
    distance,
    tile_bytes,
    in_features,
    acts,
    block_rows,
    bias,
    residual,
    out,
    stride,
):
    """Outputs of one tile for `rows` rows (`most`, or up to 8), stored at out + row * stride: products + bias + residual (each
    where not 0).

    distance: where not 0, also the outputs of the tiles 1 to _STREAMS - 1 times `distance` tiles further on: one tile of each
    stream, group by group in turns.
    """
    signature = types.void(format_name, order, most, *[types.int64] * 11)
    name, order_name = format_name.literal_value, order.literal_value

    def codegen(context, builder, sig, args):
        o = Ops(builder)
        rows, tile, distance, tile_bytes, in_features, acts, block_rows, bias, residual, out, stride = map(o.value, args[3:])

        def of(count: int) -> None:
            streams = o.number(1)
            if name in NUMBERS:
                sums = _number_pass(o, name, count, tile, in_features, acts, block_rows)
            elif name in FLOAT_CODES:
                sums = _float_codes_pass(o, name, count, tile, in_features, acts, block_rows)
            elif name == PAIRED:
                sums = _paired_pass(o, count, tile, in_features, acts, block_rows)
            else:
                if count <= _STREAMED_ROWS:
                    streams = _num_streams(distance)
                between = distance * tile_bytes
                sums = _quantized_pass(o, name, order_name, count, tile, in_features, acts, block_rows, streams, between)
            with o.loop(streams) as stream:
                to = stream * (distance * 64)
                values = [(to + stride * row, sums(stream, row)) for row in range(count)]
                _finish(o, values, to, bias, residual, out)

        counts = {*range(1, min(most.literal_value, 8) + 1), most.literal_value}
        o.switch(rows, {count: partial(of, count) for count in sorted(counts)})
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def _many_rows(
    typingctx, format_name, order, rows, tile, distance, tile_bytes, in_features, acts, row_bytes, bias, residual, out, stride
):
    """`_pass` in tile registers or without AVX-512: up to MANY rows from the start of a block, or up to BLOCK_ROWS with streams."""
    signature = types.void(format_name, order, *[types.int64] * 11)
    name, order_name = format_name.literal_value, order.literal_value

    def codegen(context, builder, sig, args):
        o = Ops(builder)
        rows, tile, distance, tile_bytes, in_features, acts, row_bytes, bias, residual, out, stride = map(o.value, args[2:])

        def finish(stream: Value, row: Value, values: Value) -> None:
            to = stream * (distance * 64)
            _finish(o, [(to + stride * row, values)], to, bias, residual, out)

        some_pass = ymm.rows_pass if isa.has_sixteen_registers() else tiles.many_rows_pass
        some_pass(
            o, name, order_name, rows, tile, _num_streams(distance), distance * tile_bytes, in_features, acts, row_bytes, finish
        )
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _bf16_rows(typingctx, width, blocks, rows, tile, tile_bytes, in_features, acts, row_bytes, bias, residual, out, stride):
    """`_pass` of bf16 in tile registers, for `width` tiles and up to `blocks` blocks of rows from the start of one on."""

    def codegen(context, builder, sig, args):
        o = Ops(builder)
        width, blocks, rows, tile, tile_bytes, in_features, acts, row_bytes, bias, residual, out, stride = map(o.value, args)

        def finish(number: int, row: Value, values: Value) -> None:
            _finish(o, [(stride * row + 64 * number, values)], o.number(64 * number), bias, residual, out)

        def of(width: int, blocks: int) -> None:
            tiles.bf16_pass(o, width, blocks, rows, tile, tile_bytes, in_features, acts, row_bytes, finish)

        sizes = ((4, 1), (2, 2), (2, 1), (1, 2), (1, 1))
        o.switch(width * 4 + blocks, {4 * width + blocks: partial(of, width, blocks) for width, blocks in sizes})
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12), codegen


@intrinsic(prefer_literal=True)
def _dequantized_rows(
    typingctx, format_name, num_tiles, rows, tile, tile_bytes, in_features, acts, row_bytes, bias, residual, out, stride
):
    """`_pass` of up to MOST_TILES tiles in codes that are dequantized to bf16, in tile registers, for up to MOST_ROWS rows."""
    signature = types.void(format_name, *[types.int64] * 11)
    name = format_name.literal_value

    def codegen(context, builder, sig, args):
        o = Ops(builder)
        num_tiles, rows, tile, tile_bytes, in_features, acts, row_bytes, bias, residual, out, stride = map(o.value, args[1:])

        def finish(number: Value, row: Value, values: Value) -> None:
            to = number * 64
            _finish(o, [(to + stride * row, values)], to, bias, residual, out)

        tiles.dequantized_pass(o, name, num_tiles, rows, tile, tile_bytes, in_features, acts, row_bytes, finish)
        return context.get_dummy_value()

    return signature, codegen


def _num_streams(distance: Value) -> Value:
    """How many streams a pass has whose tiles are `distance` tiles from each other."""
    return distance.equals(0).select(distance.like(1), distance.like(_STREAMS))


def _finish(o: Ops, rows: list[tuple[Value, Value]], tile: Value, bias: Value, residual: Value, out: Value) -> None:
    """Store 16 outputs of each row: products + bias + residual, the last two where their addresses are not 0.

    rows: the offset of a row's outputs from `out` and `residual`, and the products. tile: the offset of the tile in every row.
    """
    totals = [(place, o.variable(value)) for place, value in rows]
    with o.when(bias.differs(0)):
        for _, total in totals:
            total.set(total.get() + (bias + tile).f32())
    with o.when(residual.differs(0)):
        for place, total in totals:
            total.set(total.get() + (residual + place).f32())
    for place, total in totals:
        (out + place).store(total.get())


@cache
def linear_kernel(format_name: str, order: str) -> int:
    """Address of the compiled kernel of a format, for activations in an order of ORDERS:

    (matrix, tile_bytes, in_features, first tile, end tile, activations, bytes of a row of activations, rows, bias, residual,
    out, stride)

    all int64, addresses and byte counts. Writes out[row * stride + 64 * tile] for tiles first..end and all rows.
    """

    def make() -> Callable[..., None]:
        if order == "bf16":
            return _bf16_linear() if format_name == PAIRED else _dequantized_linear(format_name)
        if isa.has_sixteen_registers() and format_name in READERS:
            return _ymm_linear(format_name, order)
        return _linear(format_name, order, 4 if order in ("f32", "rounded") else ORDERS[order])

    return machine_code.address(f"linear-{format_name}-{order}", 12, make)


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
                plus = bias + 64 * tile if bias != 0 else bias
                width = 4 if rows <= BLOCK_ROWS and end - tile >= 4 else 2 if end - tile >= 2 else 1
                for row in range(top, bottom, 2 * BLOCK_ROWS):
                    count = min(2 * BLOCK_ROWS, bottom - row)
                    blocks = 2 if count > BLOCK_ROWS else 1
                    here, to = acts + row * row_bytes, out + row * stride + 64 * tile
                    add = residual + row * stride + 64 * tile if residual != 0 else residual
                    _bf16_rows(width, blocks, count, weights, tile_bytes, in_features, here, row_bytes, plus, add, to, stride)
                tile += width
        tiles.release()

    return linear


def _dequantized_linear(name: str) -> Callable[..., None]:
    """The kernel of a format of codes that are dequantized to bf16, to be compiled."""
    most_rows, most_tiles = tiles.MOST_ROWS, tiles.MOST_TILES

    def linear(matrix, tile_bytes, in_features, first, end, acts, row_bytes, rows, bias, residual, out, stride):
        tiles.shape(PAIRED)
        for top in range(0, rows, most_rows):
            count = min(most_rows, rows - top)
            here, to, add = acts + top * row_bytes, out + top * stride, residual + top * stride if residual != 0 else residual
            for tile in range(first, end, most_tiles):
                weights = matrix + tile * tile_bytes
                plus = bias + 64 * tile if bias != 0 else bias
                more = add + 64 * tile if add != 0 else add
                number = min(most_tiles, end - tile)
                _dequantized_rows(
                    name, number, count, weights, tile_bytes, in_features, here, row_bytes, plus, more, to + 64 * tile, stride
                )
        tiles.release()

    return linear


def _ymm_linear(name: str, order: str) -> Callable[..., None]:
    """The kernel of a format of codes without AVX-512, to be compiled: one pass for any number of rows."""
    streams, few, many, near, short = _STREAMS, ymm.FEW[order], ymm.MANY, _NEAR, _LEAST_STREAM

    def linear(matrix, tile_bytes, in_features, first, end, acts, row_bytes, rows, bias, residual, out, stride):
        span = max(BLOCK_ROWS, min(many, near // row_bytes // BLOCK_ROWS * BLOCK_ROWS))
        for top in range(0, rows, span):
            count = min(span, rows - top)
            here, to, add = acts + top * row_bytes, out + top * stride, residual + top * stride if residual != 0 else residual
            length = (end - first) // streams if count <= BLOCK_ROWS else 0
            if length * tile_bytes < short:
                length = 0
            for turn in range(end - first - (streams - 1) * length):
                tile, distance = (first + turn, length) if turn < length else (first + turn + (streams - 1) * length, 0)
                weights = matrix + tile * tile_bytes
                plus = bias + 64 * tile if bias != 0 else bias
                more = add + 64 * tile if add != 0 else add
                at = to + 64 * tile
                if count <= few:
                    _pass(name, order, few, count, weights, distance, tile_bytes, in_features, here, count, plus, more, at, stride)
                else:
                    _many_rows(
                        name, order, count, weights, distance, tile_bytes, in_features, here, row_bytes, plus, more, at, stride
                    )

    return linear


def _linear(name: str, order: str, step: int) -> Callable[..., None]:
    """The kernel of a format, to be compiled. step: bytes from a row of activations to the next in a block."""
    in_tiles = isa.has_tiles() and name in READERS
    most = _MOST_ROWS if name in READERS and not in_tiles else _MOST_OF_NUMBERS
    few = BLOCK_ROWS if in_tiles else BLOCK_ROWS - 1  # whose passes have streams
    streams, streamed_rows = _STREAMS, few if name in READERS else 0
    least, many, near, short, long = tiles.least(name), tiles.MANY, _NEAR, _LEAST_STREAM, _LONG
    shortest = -(-least // BLOCK_ROWS) * BLOCK_ROWS if in_tiles else BLOCK_ROWS

    def linear(matrix, tile_bytes, in_features, first, end, acts, row_bytes, rows, bias, residual, out, stride):
        if in_tiles and rows >= least:
            tiles.shape(name)
        span = max(shortest, min(many, near // row_bytes // BLOCK_ROWS * BLOCK_ROWS))
        for top in range(0, rows, span):
            bottom = min(rows, top + span)
            use_tiles = in_tiles and bottom - top >= least
            length = (end - first) // streams if bottom - top <= streamed_rows else 0
            if length * tile_bytes < (long if use_tiles else short):
                length = 0
            for turn in range(end - first - (streams - 1) * length):
                tile, distance = (first + turn, length) if turn < length else (first + turn + (streams - 1) * length, 0)
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
                            name, order, count, weights, distance, tile_bytes, in_features, here, row_bytes, plus, add, to, stride
                        )
                    else:
                        count = most if left >= most else min(left, 8)
                        _pass(
                            name, order, most, count, weights, distance, tile_bytes, in_features, here, block_rows, plus, add, to,
                            stride,
                        )  # fmt: skip
                    row += count
        if in_tiles and rows >= least:
            tiles.release()

    return linear

"""Many rows at a time on processors with tile registers (AMX): one instruction makes the integer dots of 16 rows and 16 outputs.

The float sums are those of `linear`'s other passes in the same order, and integer dots are exact: the bits are the same. Numbers in
bf16 are summed by the instruction itself, in an order that is documented, and that `linear` keeps to elsewhere.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cpuspec.formats import FORMATS
from cpuspec.formats.packing import GROUP, PANEL, TILE, panel_bytes
from cpuspec.kernels import isa
from cpuspec.kernels.ops import F32X16, I8, I32X16, Ops, Value, Variable, vector_of
from cpuspec.kernels.passes import Pass
from cpuspec.kernels.products import (
    BLOCK_ROWS,
    ENCODINGS,
    LOW_BYTES,
    PANEL_LINE,
    PANEL_RECORD,
    add_dots,
    dequantized,
    end_panel,
    factors_of_panel,
    sum_of_weights,
)
from cpuspec.kernels.readers import AHEAD, PAIRED, READERS, Group, integer_codes, integer_scale, num_scales
from cpuspec.kernels.simd import emitted

MANY = 8 * BLOCK_ROWS  # rows that one pass serves at most
_LEAST, _LEAST_OF_HALVES = 13, 17  # fewer rows are quicker without; the latter where each half of a group has a scale
_TOGETHER = 8  # rows that are summed at once
_TURNS = 2 + BLOCK_ROWS // _TOGETHER  # through the groups of a batch: to unpack them, for their dots, for the sums of each 8 rows

_GROUPS = PANEL // GROUP

# Of weights that are dequantized: the rows and tiles that one pass serves at most, whose sums stay in the second cache; and the
# groups of a turn, 16 KiB of two tiles in bf16, which stay in the first one.
MOST_ROWS, MOST_TILES = 32 * BLOCK_ROWS, 8
_STEP = _GROUPS

# Tile registers: totals, rows of activations, codes.
_TOTALS, _ACTS, _CODES = (0, 1, 2, 3), 4, 5
OF_PANELS = "panels"  # a shape of registers, for 64 inputs of as many rows as a block has
PANEL_ACTS, PANEL_WEIGHTS = (4, 5), (6, 7)  # of bf16, and of panels


def least(format_name: str) -> int:
    """Rows from which on tile registers are quicker for a format."""
    return _LEAST if num_scales(FORMATS[format_name]) == 1 else _LEAST_OF_HALVES


class _Stack:
    """Some groups of a tile of weights, unpacked to the stack, and their integer dots with the rows of a block."""

    def __init__(self, o: Ops, name: str, encoding: str) -> None:
        self._o, self._encoding = o, encoding
        self._scales = num_scales(FORMATS[name])
        self._halves = (0,) if encoding == "int8" else (0, LOW_BYTES)
        self._dots = self._scales * len(self._halves)  # of a group and row
        self.groups = min(_GROUPS, 16 // self._dots)  # whose dots stay in the nearest cache
        self._code_bytes, self._factor_bytes, self._dot_bytes = GROUP * TILE, 64 * (self._scales + 3), 64 * BLOCK_ROWS * self._dots
        self._codes, self._factors, self._found = (
            o.stack(size * self.groups) for size in (self._code_bytes, self._factor_bytes, self._dot_bytes)
        )
        self._minima = 0

    def put(self, place: Value, group: Group) -> None:
        """Keep a group: its codes less their zero point, its scales, the factor of shifts, its minima."""
        to = self._codes + place * self._code_bytes
        for v, codes in enumerate(group.codes):
            (to + 64 * v).store(_minus_bytes(codes, group.zero) if group.zero else codes)
        to = self._factors + place * self._factor_bytes
        self._minima = len(group.minima)
        for n, value in enumerate([*group.scales, sum_of_weights(group) if self._encoding == "int8" else None, *group.minima]):
            if value is not None:
                (to + 64 * n).store(value)

    def multiply(self, place: Value, records: Value) -> None:
        """The dots of a group with the rows of a block."""
        o, codes, to = self._o, self._codes + place * self._code_bytes, self._found + place * self._dot_bytes
        for number, (part, half) in enumerate(itertools.product(range(self._scales), self._halves)):
            o.tile_zero(_TOTALS[number])
            o.tile_load(_CODES, codes + self._code_bytes // self._scales * part, 64)
            o.tile_load(_ACTS, records + (half + GROUP // self._scales * part), ENCODINGS[self._encoding])
            o.tile_dot_signed(_TOTALS[number], _ACTS, _CODES)
            o.tile_store(_TOTALS[number], to + 64 * BLOCK_ROWS * number, 64)

    def add(self, place: Value, records: Value, row: Value, totals: list[Variable]) -> None:
        """Add a group's products with as many rows as there are totals. records: of the first, which is the block's `row`th."""
        at = self._factors + place * self._factor_bytes
        factors = [(at + 64 * n).f32() for n in range(self._scales + 1 + self._minima)]
        scales, shifted, minima = factors[: self._scales], factors[self._scales], tuple(factors[self._scales + 1 :])
        found = self._found + place * self._dot_bytes + row * 64
        for n, total in enumerate(totals):
            dots = [(found + 64 * (BLOCK_ROWS * number + n)).i32() for number in range(self._dots)]
            if self._encoding == "int16":
                dots = [(high << 8) + low for high, low in zip(dots[::2], dots[1::2], strict=True)]
            record = records + n * ENCODINGS[self._encoding]
            total.set(add_dots(dots, scales, shifted if self._encoding == "int8" else None, minima, record, total.get()))


def _minus_bytes(codes: Value, zero: int) -> Value:
    """Each byte less a zero point, which makes it signed."""
    return (codes.bits(vector_of(I8, 64)) - ((zero + 128) % 256 - 128)).bits(I32X16)


def many_rows_pass(name: str, encoding: str, p: Pass) -> None:
    """The outputs of one tile of weights for up to MANY rows from the start of a block on, or for up to BLOCK_ROWS rows those of a
    tile of each stream.

    For some groups at a time: weights go to the stack; then for each block of rows their dots do; then these are scaled and
    summed, in the order of the groups. A block's missing rows get sums of what follows the block, which no code reads.
    """
    o, rows, streams, row_bytes, acts = p.o, p.rows, p.num_tiles, p.operands.row_bytes, p.acts
    panel_size, record_bytes = panel_bytes(FORMATS[name]), ENCODINGS[encoding]
    groups = p.operands.in_features >> 5
    stack, sums = _Stack(o, name, encoding), o.stack(64 * MANY)  # or of BLOCK_ROWS for each stream
    num_blocks = rows.rounded_up(BLOCK_ROWS)
    with o.loop(streams * (num_blocks * BLOCK_ROWS)) as index:
        (sums + index * 64).store(o.number(0.0, F32X16))
    with o.loop(groups.rounded_up(_GROUPS)) as panel, o.loop(streams) as stream:
        first = panel * _GROUPS
        inside = (groups - first).smaller(_GROUPS)
        here = p.weights + stream * p.bytes_apart + panel * panel_size
        own_sums = sums + stream * (64 * BLOCK_ROWS)
        with o.loop(inside.rounded_up(stack.groups)) as batches:
            begin = batches * stack.groups
            count = (inside - begin).smaller(stack.groups)
            with o.loop(count) as place:
                _prefetch(here, begin + place, panel_size, 0)
                stack.put(place, READERS[name](here, inside, begin + place))
            with o.loop(num_blocks) as blocks:
                block = blocks * BLOCK_ROWS
                block_rows = (rows - block).smaller(BLOCK_ROWS)
                stride = block_rows * record_bytes
                records = acts + block * row_bytes + (first + begin) * stride
                with o.loop(count) as place:
                    _prefetch(here, begin + place, panel_size, 1)
                    stack.multiply(place, records + place * stride)
                with o.loop(block_rows.rounded_up(_TOGETHER)) as some:
                    row = some * _TOGETHER
                    addresses = [own_sums + (block + row) * 64 + 64 * n for n in range(_TOGETHER)]
                    totals = [o.variable(address.f32()) for address in addresses]
                    own = records + row * record_bytes
                    with o.loop(count) as place:
                        _prefetch(here + some * 64, begin + place, panel_size, 2)
                        stack.add(place, (own + place * stride).base(), row, totals)
                    for address, total in zip(addresses, totals, strict=True):
                        address.store(total.get())
    with o.loop(streams) as stream, o.loop(rows) as row:
        p.finish(stream, row, (sums + (stream * BLOCK_ROWS + row) * 64).f32())


def _prefetch(panel: Value, group: Value, size: int, turn: int) -> None:
    """Prefetch some lines of the weights AHEAD of a group of a panel of `size` bytes, other lines in each turn: so memory is read
    during all turns. Into the second cache only: the first one is for the rows.
    """
    here = panel + group * (size // _GROUPS)
    for line in range(64 * turn, size // _GROUPS, 64 * _TURNS):
        here.fetch(AHEAD + line, 64, into_first=False)


def panels_pass(name: str, p: Pass) -> None:
    """The outputs of one or two neighbouring tiles of weights that are whole numbers under one scale for a panel, for up to
    MANY rows from the start of a block on; or for up to BLOCK_ROWS rows those of a tile of each stream.

    A panel is unpacked to the stack. Then registers take its dots with all rows, over all 256 inputs, and then these are scaled and
    added to the sums of the panels before. A block's missing rows get dots of what follows the block, which no code reads.
    """
    o, streams, is_few = p.o, p.num_tiles, p.rows <= BLOCK_ROWS

    def of_streams() -> None:
        sums = o.stack(64 * MANY)  # of BLOCK_ROWS for each stream
        with o.loop(streams * BLOCK_ROWS) as index:
            (sums + index * 64).store(o.number(0.0, F32X16))
        with o.loop(p.operands.in_features // PANEL) as panel, o.loop(streams) as stream:
            _add_panel(p, name, panel, [(p.weights + stream * p.bytes_apart, sums + stream * (64 * BLOCK_ROWS))])
        with o.loop(streams) as stream, o.loop(p.rows) as row:
            p.finish(stream, row, (sums + (stream * BLOCK_ROWS + row) * 64).f32())

    def of_neighbours(width: int) -> None:
        sums = o.stack(64 * MANY * width)
        tiles = [(p.weights + p.operands.tile_bytes * n, sums + 64 * MANY * n) for n in range(width)]
        with o.loop(p.rows) as row:
            for _, own_sums in tiles:
                (own_sums + row * 64).store(o.number(0.0, F32X16))
        with o.loop(p.operands.in_features // PANEL) as panel:
            _add_panel(p, name, panel, tiles)
        with o.loop(p.rows) as row:
            for n, (_, own_sums) in enumerate(tiles):
                p.finish(o.number(n), row, (own_sums + row * 64).f32())

    key = is_few.select(o.number(0), streams)
    o.switch(key, {0: of_streams, 1: partial(of_neighbours, 1), 2: partial(of_neighbours, 2)})


def _add_panel(p: Pass, name: str, panel: Value, tiles: Sequence[tuple[Value, Value]]) -> None:
    """Add the products of a panel of some tiles with all rows of a pass. tiles: where the weights and the sums of each are."""
    o, rows, size = p.o, p.rows, panel_bytes(FORMATS[name])
    group_bytes, block_bytes, code_bytes = size // _GROUPS, 64 * BLOCK_ROWS, PANEL * TILE
    codes, dots = o.stack(code_bytes * len(tiles)), o.stack(64 * MANY * len(tiles))
    scales = []
    for n, (start, _) in enumerate(tiles):
        here = start + panel * size
        with o.loop(_GROUPS) as group:
            (here + group * group_bytes).fetch(AHEAD, group_bytes, into_first=False)
            for v, numbers in enumerate(integer_codes(name, here, group)):
                (codes + (code_bytes * n + 64 * v) + group * (GROUP * TILE)).store(numbers)
        scales.append(integer_scale(name, here))

    def inputs_of(block: Value, block_rows: Value | int) -> Value:
        return p.acts + block * BLOCK_ROWS * p.operands.row_bytes + panel * (block_rows * PANEL_RECORD)

    def multiply(block: Value, count: int, block_rows: Value | int) -> None:
        """`count` blocks, 1 or 2."""
        inputs, totals = [inputs_of(block + n, block_rows) for n in range(count)], paired_totals(count, len(tiles))
        for total in totals.values():
            o.tile_zero(total)
        for step in range(PANEL // PANEL_LINE):
            for m in range(len(tiles)):
                o.tile_load(PANEL_WEIGHTS[m], codes + (code_bytes * m + step * (PANEL_LINE * TILE)), PANEL_LINE)
            for n, start in enumerate(inputs):
                o.tile_load(PANEL_ACTS[n], start + block_rows * (step * PANEL_LINE), PANEL_LINE)
                for m in range(len(tiles)):
                    o.tile_dot_signed(totals[n, m], PANEL_ACTS[n], PANEL_WEIGHTS[m])
        for (n, m), total in totals.items():
            o.tile_store(total, dots + 64 * MANY * m + (block + n) * block_bytes, PANEL_LINE)

    def add(block: Value, block_rows: Value | int, row: Value | int) -> None:
        scale_of_row, _ = factors_of_panel(inputs_of(block, block_rows), block_rows, row)
        for m, (_, sums) in enumerate(tiles):
            at = (block * BLOCK_ROWS + row) * 64
            dot, total = (dots + 64 * MANY * m + at).i32(), sums + at
            total.store(end_panel(dot, scales[m], scale_of_row, total.f32()))

    whole, last_rows = rows // BLOCK_ROWS, rows % BLOCK_ROWS
    with o.loop(whole // 2) as pair:
        multiply(pair * 2, 2, BLOCK_ROWS)
    with o.when((whole % 2).differs(0)):
        multiply(whole - 1, 1, BLOCK_ROWS)
    with o.when(last_rows.differs(0)):
        multiply(whole, 1, last_rows)
    with o.loop(whole) as block:
        for place in range(BLOCK_ROWS):
            add(block, BLOCK_ROWS, place)
    with o.loop(last_rows) as row:
        add(whole, last_rows, row)


def bf16_pass(p: Pass) -> None:
    """The outputs of up to four tiles of bf16 weights for up to 16 rows from the start of a block on, or of up to two for up to 32.

    Weights of 32 inputs are one register, and so are those inputs of a block. A block's missing rows get sums of what follows the
    block, which no code reads.
    """
    blocks = (p.rows > BLOCK_ROWS).select(p.rows.like(2), p.rows.like(1))
    sizes = ((4, 1), (3, 1), (2, 2), (2, 1), (1, 2), (1, 1))
    p.o.switch(p.num_tiles * 4 + blocks, {4 * width + blocks: partial(_bf16_pass, p, width, blocks) for width, blocks in sizes})


def _bf16_pass(p: Pass, width: int, blocks: int) -> None:
    """`bf16_pass` of `width` tiles and `blocks` blocks of rows, each of which has a row."""
    o, rows, acts = p.o, p.rows, p.acts
    group_bytes, line = ENCODINGS["bf16"] * TILE, ENCODINGS["bf16"]
    # Of each block: where it begins, and the bytes from a group to the next.
    parts = [
        (acts + p.operands.row_bytes * first, (rows - first).smaller(BLOCK_ROWS) * line)
        for first in range(0, BLOCK_ROWS * blocks, BLOCK_ROWS)
    ]
    places = [p.weights + p.operands.tile_bytes * number for number in range(width)]
    totals = paired_totals(width, blocks)
    for total in totals.values():
        o.tile_zero(total)
    with o.loop(p.operands.in_features.rounded_up(GROUP)) as group:
        for number, place in enumerate(places):
            here = place + group * group_bytes
            here.fetch(AHEAD // width, group_bytes, into_first=False)  # the first cache is for the rows
            weights = PANEL_WEIGHTS[number % 2]
            o.tile_load(weights, here, line)
            for block, (start, stride) in enumerate(parts):
                if not number:
                    o.tile_load(PANEL_ACTS[block], start + group * stride, line)
                o.tile_dot_bf16(totals[number, block], PANEL_ACTS[block], weights)
    sums = o.stack(64 * BLOCK_ROWS * len(_TOTALS))
    for (number, block), total in totals.items():
        o.tile_store(total, sums + 64 * BLOCK_ROWS * (number * blocks + block), line)
    with o.loop(rows) as row:
        for number in range(width):
            p.finish(o.number(number), row, (sums + 64 * BLOCK_ROWS * blocks * number + row * 64).f32())


def paired_totals(rows: int, columns: int) -> dict[tuple[int, int], int]:
    """The registers of sums of each pair of a row and a column, up to four pairs."""
    return {(n, m): _TOTALS[n * columns + m] for n in range(rows) for m in range(columns)}


def add_paired_products(
    o: Ops, steps: Value, rows: Sequence[tuple[Value, Value | int, Value | int]], columns: Sequence[Value],
    totals: Mapping[tuple[int, int], int],
) -> None:  # fmt: skip
    """Add the products of blocks of rows and of columns in bf16 to registers of sums, totals[block of rows, block of columns].

    rows: of each block where it begins, the bytes from what one register takes to what the next does, and those from a row to the
    next. columns: where each begins; what registers take of them lies together.
    """
    with o.loop(steps) as step:
        for m, start in enumerate(columns):
            o.tile_load(PANEL_WEIGHTS[m], start + step * (ENCODINGS["bf16"] * TILE), ENCODINGS["bf16"])
        for n, (start, step_bytes, row_bytes) in enumerate(rows):
            o.tile_load(PANEL_ACTS[n], start + step * step_bytes, row_bytes)
            for m in range(len(columns)):
                o.tile_dot_bf16(totals[n, m], PANEL_ACTS[n], PANEL_WEIGHTS[m])


def dequantized_pass(name: str, p: Pass) -> None:
    """The outputs of up to MOST_TILES tiles of weights in codes for up to MOST_ROWS rows from the start of a block on, in bf16.

    A turn multiplies some groups of two tiles with all rows, the next turn the same groups of the next two tiles; then come the
    next groups. The weights of a turn are dequantized to the stack between the products of the turn before, which tile registers
    make meanwhile. The sums of a tile wait on the stack. They are f32, as in tile registers, so each output sums its groups in
    their order, as `bf16_pass` does, with the same bits.
    """
    o, rows, num_tiles, acts, row_bytes = p.o, p.rows, p.num_tiles, p.acts, p.operands.row_bytes
    panel_size, line = panel_bytes(FORMATS[name]), ENCODINGS["bf16"]
    group_bytes, block_bytes = line * TILE, 64 * BLOCK_ROWS
    tile_sums = block_bytes * (MOST_ROWS // BLOCK_ROWS)
    groups = p.operands.in_features >> 5
    weights, sums = o.stack(4 * _STEP * group_bytes), o.stack(MOST_TILES * tile_sums)
    with o.loop(num_tiles) as number, o.loop(rows.rounded_up(BLOCK_ROWS) * BLOCK_ROWS) as row:
        (sums + number * tile_sums + row * 64).store(o.number(0.0, F32X16))

    num_blocks = rows.rounded_up(BLOCK_ROWS)
    pairs_of_tiles, pairs_of_blocks = num_tiles.rounded_up(2), num_blocks.rounded_up(2)
    turns = groups.rounded_up(_STEP) * pairs_of_tiles

    def of_turn(turn: Value) -> tuple[Value, Value, Value, Value, Value]:
        """The first tile and how many, the first group and how many, and where their weights are put."""
        first, number = turn // pairs_of_tiles * _STEP, turn % pairs_of_tiles * 2
        buffer = weights + (turn & 1) * (2 * _STEP * group_bytes)
        return number, (num_tiles - number).smaller(2), first, (groups - first).smaller(_STEP), buffer

    def dequantize(turn: Value, part: Value, parts: Value) -> None:
        """One of some equal parts of a turn's groups."""
        number, width, first, count, buffer = of_turn(turn)
        total = width * count
        start = total * part // parts
        with o.loop(total * (part + 1) // parts - start) as index:
            place = start + index
            own, group = place // count, first + place % count
            begin = group & -_GROUPS
            here = p.weights + (number + own) * p.operands.tile_bytes + (group >> 3) * panel_size
            (here + (group - begin) * (panel_size // _GROUPS)).fetch(AHEAD, panel_size // _GROUPS, into_first=False)
            pairs = dequantized(READERS[name](here, (groups - begin).smaller(_GROUPS), group - begin))
            to = buffer + own * (_STEP * group_bytes) + (group - first) * group_bytes
            for n, words in enumerate(pairs):
                (to + 64 * n).store(words)

    def multiply(width: int, blocks: int, buffer: Value, own_sums: Value, block: Value, first: Value, count: Value) -> None:
        """A pass over `count` groups for `width` tiles and `blocks` blocks of rows."""
        parts = []
        for n in range(blocks):
            stride = (rows - (block + n) * BLOCK_ROWS).smaller(BLOCK_ROWS) * line
            parts.append((acts + (block + n) * BLOCK_ROWS * row_bytes + first * stride, stride, line))
        totals = paired_totals(blocks, width)
        places = {(n, number): own_sums + number * tile_sums + (block + n) * block_bytes for n, number in totals}
        for key, total in totals.items():
            o.tile_load(total, places[key], 64)
        add_paired_products(o, count, parts, [buffer + number * (_STEP * group_bytes) for number in range(width)], totals)
        for key, total in totals.items():
            o.tile_store(total, places[key], 64)

    with o.loop(turns + 1) as turn, o.loop(pairs_of_blocks) as pair:
        with o.when(turn < turns):
            dequantize(turn, pair, pairs_of_blocks)
        with o.when(turn > 0):
            number, width, first, count, buffer = of_turn(turn - 1)
            block, own_sums = pair * 2, sums + number * tile_sums
            blocks = (num_blocks - block).smaller(2)
            passes: dict[int, Callable[[], None]] = {
                2 * w + b: partial(multiply, w, b, buffer, own_sums, block, first, count) for w in (1, 2) for b in (1, 2)
            }
            o.switch(width * 2 + blocks, passes)
    with o.loop(rows) as row, o.loop(num_tiles) as number:
        p.finish(number, row, (sums + number * tile_sums + row * 64).f32())


@emitted
def shape(o: Ops, kind: str, rows: Value) -> None:
    """Configure the tile registers (LDTILECFG) for a format, or OF_PANELS, and a number of rows, if the processor has them."""
    if kind == PAIRED:
        if isa.has_bf16_tiles():
            o.tile_shapes(dict.fromkeys(range(8), (BLOCK_ROWS, 64)))
    elif isa.has_tiles() and kind == OF_PANELS:
        weights = dict.fromkeys(PANEL_WEIGHTS, (BLOCK_ROWS, PANEL_LINE))
        o.tile_shapes(weights, (*_TOTALS, *PANEL_ACTS), rows.smaller(BLOCK_ROWS))
    elif isa.has_tiles():
        inputs = GROUP // num_scales(FORMATS[kind])
        o.tile_shapes(dict.fromkeys(_TOTALS, (BLOCK_ROWS, 64)) | {_ACTS: (BLOCK_ROWS, inputs), _CODES: (inputs // 4, 64)})


@emitted
def release(o: Ops) -> None:
    """Release the tile registers (TILERELEASE)."""
    if isa.has_tiles() or isa.has_bf16_tiles():
        o.tile_release()

"""Many rows at a time on processors with tile registers (AMX): one instruction makes the integer dots of 16 rows and 16 outputs.

The float sums are those of `linear`'s other passes in the same order, and integer dots are exact: the bits are the same. Numbers in
bf16 are summed by the instruction itself, in an order that is documented, and that `linear` keeps to elsewhere.
"""

import itertools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cpuspec.formats import FORMATS
from cpuspec.formats.packing import GROUP, PANEL, TILE, panel_bytes
from cpuspec.kernels import isa, simd
from cpuspec.kernels.products import BLOCK_ROWS, LOW_BYTES, ORDERS, add_dots, sum_of_weights
from cpuspec.kernels.readers import AHEAD, NUM_SCALES, PAIRED, READERS, Group, Ops

MANY = 8 * BLOCK_ROWS  # rows that one pass serves at most
_LEAST, _LEAST_OF_HALVES = 13, 17  # fewer rows are quicker without; the latter where each half of a group has a scale
_TOGETHER = 8  # rows that are summed at once
_TURNS = 2 + BLOCK_ROWS // _TOGETHER  # through the groups of a batch: to unpack them, for their dots, for the sums of each 8 rows

_GROUPS = PANEL // GROUP

# Tile registers: totals, rows of activations, codes.
_TOTALS, _ACTS, _CODES = (0, 1, 2, 3), 4, 5
_PAIRED_ACTS, _PAIRED_WEIGHTS = (4, 5), (6, 7)  # of bf16


def least(format_name: str) -> int:
    """Rows from which on tile registers are quicker for a format."""
    return _LEAST_OF_HALVES if format_name in NUM_SCALES else _LEAST


class _Stack:
    """Some groups of a tile of weights, unpacked to the stack, and their integer dots with the rows of a block."""

    def __init__(self, o: Ops, name: str, order: str) -> None:
        self._o, self._order = o, order
        self._scales = NUM_SCALES.get(name, 1)
        self._halves = (0,) if order == "int8" else (0, LOW_BYTES)
        self._dots = self._scales * len(self._halves)  # of a group and row
        self.groups = min(_GROUPS, 16 // self._dots)  # whose dots stay in the nearest cache
        self._code_bytes, self._factor_bytes, self._dot_bytes = GROUP * TILE, 64 * (self._scales + 3), 64 * BLOCK_ROWS * self._dots
        self._codes, self._factors, self._found = (
            o.room(size * self.groups) for size in (self._code_bytes, self._factor_bytes, self._dot_bytes)
        )
        self._minima = 0

    def put(self, place: Any, group: Group) -> None:
        """Keep a group: its codes less their zero point, its scales, what shifts are multiplied with, its minima."""
        o = self._o
        to = self._at(self._codes, place, self._code_bytes)
        for v, codes in enumerate(group.codes):
            simd.store(o.b, o.at(to, 64 * v), o.minus_bytes(codes, group.zero) if group.zero else codes)
        to = self._at(self._factors, place, self._factor_bytes)
        self._minima = len(group.minima)
        for n, value in enumerate([*group.scales, sum_of_weights(o, group) if self._order == "int8" else None, *group.minima]):
            if value is not None:
                simd.store(o.b, o.at(to, 64 * n), value)

    def multiply(self, place: Any, records: Any) -> None:
        """The dots of a group with the rows of a block."""
        o = self._o
        codes, to = self._at(self._codes, place, self._code_bytes), self._at(self._found, place, self._dot_bytes)
        line, record_bytes = ir.Constant(simd.I64, 64), ir.Constant(simd.I64, ORDERS[self._order])
        for number, (part, half) in enumerate(itertools.product(range(self._scales), self._halves)):
            simd.tile_zero(o.b, _TOTALS[number])
            simd.tile_load(o.b, _CODES, o.at(codes, self._code_bytes // self._scales * part), line)
            simd.tile_load(o.b, _ACTS, o.at(records, half + GROUP // self._scales * part), record_bytes)
            simd.tile_dot_signed(o.b, _TOTALS[number], _ACTS, _CODES)
            simd.tile_store(o.b, _TOTALS[number], o.at(to, 64 * BLOCK_ROWS * number), line)

    def add(self, place: Any, records: Any, row: Any, totals: list[Any]) -> None:
        """Add a group's products with as many rows as there are totals. records: of the first, which is the block's `row`th."""
        o = self._o
        at = self._at(self._factors, place, self._factor_bytes)
        factors = [o.f32(o.at(at, 64 * n)) for n in range(self._scales + 1 + self._minima)]
        scales, shifted, minima = factors[: self._scales], factors[self._scales], tuple(factors[self._scales + 1 :])
        found = o.b.add(self._at(self._found, place, self._dot_bytes), o.times(row, 64))
        for n, total in enumerate(totals):
            dots = [o.i32(o.at(found, 64 * (BLOCK_ROWS * number + n))) for number in range(self._dots)]
            if self._order == "int16":
                dots = [o.b.add(o.left(high, 8), low) for high, low in zip(dots[::2], dots[1::2], strict=True)]
            record = o.at(records, n * ORDERS[self._order])
            o.b.store(add_dots(o, dots, scales, shifted if self._order == "int8" else None, minima, record, o.b.load(total)), total)

    def _at(self, base: Any, place: Any, size: int) -> Any:
        return self._o.b.add(base, self._o.times(place, size))


def many_rows_pass(
    o: Ops, name: str, order: str, rows: Any, tile: Any, strands: Any, apart: Any, in_features: Any, acts: Any, row_bytes: Any,
    finish: Callable[..., None],
) -> None:  # fmt: skip
    """The outputs of one tile of weights for up to MANY rows from the start of a block on; or, for up to BLOCK_ROWS rows, those of a
    tile of each strand, `apart` bytes apart.

    For some groups at a time: weights go to the stack; then for each block of rows their dots do; then these are scaled and
    summed, in the order of the groups. Sums of rows that a block does not have are made of whatever follows it, and nobody
    reads them. finish(strand, row, values): what to do with a row's 16 outputs.
    """
    stretch, record_bytes = panel_bytes(FORMATS[name]), ORDERS[order]
    groups = o.b.lshr(in_features, ir.Constant(simd.I64, 5))
    stack, sums = _Stack(o, name, order), o.room(64 * MANY)  # or of BLOCK_ROWS for each strand
    num_blocks = o.rounded_up(rows, BLOCK_ROWS)
    with cgutils.for_range(o.b, o.b.mul(strands, o.times(num_blocks, BLOCK_ROWS))) as loop:
        simd.store(o.b, o.b.add(sums, o.times(loop.index, 64)), simd.constant(o.b, 0.0, simd.f32x16))
    with cgutils.for_range(o.b, o.rounded_up(groups, _GROUPS)) as stretches, cgutils.for_range(o.b, strands) as strand:
        first = o.times(stretches.index, _GROUPS)
        inside = o.smaller(o.b.sub(groups, first), ir.Constant(simd.I64, _GROUPS))
        here = o.b.add(o.b.add(tile, o.b.mul(strand.index, apart)), o.times(stretches.index, stretch))
        own_sums = o.b.add(sums, o.times(strand.index, 64 * BLOCK_ROWS))
        with cgutils.for_range(o.b, o.rounded_up(inside, stack.groups)) as batches:
            begin = o.times(batches.index, stack.groups)
            count = o.smaller(o.b.sub(inside, begin), ir.Constant(simd.I64, stack.groups))
            with cgutils.for_range(o.b, count) as loop:
                index = o.b.add(begin, loop.index)
                _ask(o, here, index, stretch, 0)
                stack.put(loop.index, READERS[name](o, here, inside, index))
            with cgutils.for_range(o.b, num_blocks) as blocks:
                block = o.times(blocks.index, BLOCK_ROWS)
                block_rows = o.smaller(o.b.sub(rows, block), ir.Constant(simd.I64, BLOCK_ROWS))
                stride = o.times(block_rows, record_bytes)
                records = o.b.add(o.b.add(acts, o.b.mul(block, row_bytes)), o.b.mul(o.b.add(first, begin), stride))
                with cgutils.for_range(o.b, count) as loop:
                    _ask(o, here, o.b.add(begin, loop.index), stretch, 1)
                    stack.multiply(loop.index, o.b.add(records, o.b.mul(loop.index, stride)))
                with cgutils.for_range(o.b, o.rounded_up(block_rows, _TOGETHER)) as some:
                    row = o.times(some.index, _TOGETHER)
                    places = [o.at(o.b.add(own_sums, o.times(o.b.add(block, row), 64)), 64 * n) for n in range(_TOGETHER)]
                    totals = [cgutils.alloca_once_value(o.b, o.f32(place)) for place in places]
                    own = o.b.add(records, o.times(row, record_bytes))
                    with cgutils.for_range(o.b, count) as loop:
                        _ask(o, o.b.add(here, o.times(some.index, 64)), o.b.add(begin, loop.index), stretch, 2)
                        stack.add(loop.index, o.base(o.b.add(own, o.b.mul(loop.index, stride))), row, totals)
                    for place, total in zip(places, totals, strict=True):
                        simd.store(o.b, place, o.b.load(total))
    with cgutils.for_range(o.b, strands) as strand, cgutils.for_range(o.b, rows) as loop:
        finish(strand.index, loop.index, o.f32(o.b.add(sums, o.times(o.b.add(o.times(strand.index, BLOCK_ROWS), loop.index), 64))))


def _ask(o: Ops, stretch: Any, group: Any, size: int, turn: int) -> None:
    """Ask for some lines of what is AHEAD of a group of a stretch of `size` bytes: in each turn others, for nothing would be read
    while the others work if one asked for all. Into the second cache only: the first is for the rows.
    """
    here = o.b.add(stretch, o.times(group, size // _GROUPS))
    for line in range(64 * turn, size // _GROUPS, 64 * _TURNS):
        o.fetch(here, AHEAD + line, 64, nearest=False)


def bf16_pass(
    o: Ops, width: int, blocks: int, rows: Any, tile: Any, tile_bytes: Any, in_features: Any, acts: Any, row_bytes: Any,
    finish: Callable[..., None],
) -> None:  # fmt: skip
    """The outputs of `width` tiles of bf16 weights for up to `blocks` blocks of rows, from the start of one on.

    Weights of 32 inputs are one register, and so are those inputs of a block. Sums of rows that a block does not have are made of
    whatever follows it, and nobody reads them; other blocks than the first must have a row. finish(number, row, values): what to
    do with a row's 16 outputs of a tile.
    """
    assert width * blocks <= len(_TOTALS), "each tile and block has a register for its sums"
    group_bytes, line = ORDERS["bf16"] * TILE, ir.Constant(simd.I64, ORDERS["bf16"])
    parts: list[tuple[Any, Any]] = []  # of each block: where it begins, and the bytes from a group to the next
    for block in range(blocks):
        first = ir.Constant(simd.I64, BLOCK_ROWS * block)
        left = o.smaller(o.b.sub(rows, first), ir.Constant(simd.I64, BLOCK_ROWS))
        parts.append((o.b.add(acts, o.b.mul(first, row_bytes)), o.times(left, ORDERS["bf16"])))
    places = [o.b.add(tile, o.times(tile_bytes, number)) for number in range(width)]
    totals = {(number, block): _TOTALS[number * blocks + block] for number in range(width) for block in range(blocks)}
    for total in totals.values():
        simd.tile_zero(o.b, total)
    with cgutils.for_range(o.b, o.rounded_up(in_features, GROUP)) as loop:
        for number, place in enumerate(places):
            here = o.b.add(place, o.times(loop.index, group_bytes))
            o.fetch(here, AHEAD // width, group_bytes, nearest=False)  # the first cache is for the rows
            weights = _PAIRED_WEIGHTS[number % 2]
            simd.tile_load(o.b, weights, here, line)
            for block, (start, stride) in enumerate(parts):
                if not number:
                    simd.tile_load(o.b, _PAIRED_ACTS[block], o.b.add(start, o.b.mul(loop.index, stride)), line)
                simd.tile_dot_bf16(o.b, totals[number, block], _PAIRED_ACTS[block], weights)
    sums = o.room(64 * BLOCK_ROWS * len(_TOTALS))
    for (number, block), total in totals.items():
        simd.tile_store(o.b, total, o.at(sums, 64 * BLOCK_ROWS * (number * blocks + block)), line)
    with cgutils.for_range(o.b, rows) as loop:
        for number in range(width):
            own = o.at(sums, 64 * BLOCK_ROWS * blocks * number)
            finish(number, loop.index, o.f32(o.b.add(own, o.times(loop.index, 64))))


@intrinsic(prefer_literal=True)
def shape(typingctx, format_name):
    """Shape the tile registers for a format, where there are some."""
    pairs = format_name.literal_value == PAIRED
    inputs = GROUP // NUM_SCALES.get(format_name.literal_value, 1)

    def codegen(context, builder, sig, args):
        if pairs:
            simd.tile_shapes(builder, dict.fromkeys(range(8), (BLOCK_ROWS, 64)))
        elif isa.has_tiles():
            shapes = dict.fromkeys(_TOTALS, (BLOCK_ROWS, 64)) | {_ACTS: (BLOCK_ROWS, inputs), _CODES: (inputs // 4, 64)}
            simd.tile_shapes(builder, shapes)
        return context.get_dummy_value()

    return types.void(format_name), codegen


@intrinsic
def release(typingctx):
    """Forget the shapes."""

    def codegen(context, builder, sig, args):
        if isa.has_tiles() or isa.has_bf16_tiles():
            simd.tile_release(builder)
        return context.get_dummy_value()

    return types.void(), codegen

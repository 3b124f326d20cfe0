"""Superblocks of K-quants times activations of 14 bits ("int14" of `products`): vectors and tile registers give the same bits.

A weight is d * s * (code - zero) - base * z: d and base are numbers of a superblock of 256 inputs, s and z whole numbers of 32 or
16 of them. The sums over a superblock of s * (code - zero) times the bytes of activations, and times their low bytes, are exact in
32 bits in either way. Floats are made of them once a superblock, by the same operations.
"""

from collections.abc import Callable, Sequence

from cpuspec.formats import FORMATS
from cpuspec.formats.packing import GROUP, PANEL, TILE, panel_bytes
from cpuspec.kernels import isa
from cpuspec.kernels.ops import F32, F32X16, I16, I32, I32X16, Ops, Value, Variable, fma, vector_of
from cpuspec.kernels.passes import Pass
from cpuspec.kernels.products import (
    BLOCK_ROWS,
    BYTES,
    GROUP_SUMS,
    HALF_SUMS,
    LAST_LINE,
    LOWER_BYTES,
    MINUS_LOWER_SUMS,
    MINUS_SUMS,
    NUM_LINES,
    PANEL_LINE,
    add_products,
    inputs_of_group,
    line_of_panel,
)
from cpuspec.kernels.readers import AHEAD, INTO_FIRST, Group, superblock_factors, whole_group
from cpuspec.kernels.tiles import MANY, PANEL_ACTS, PANEL_WEIGHTS, paired_totals

# The most rows of a pass in vectors, whose integers stay in registers, without tile registers and with them; and the rows from
# which on these are quicker.
MOST_ROWS, MOST_BESIDE_TILES, LEAST = 8, 4, 5

_GROUPS, _RECORD = PANEL // GROUP, NUM_LINES * PANEL_LINE
_TOGETHER = 8  # rows whose products are added at once


def few_rows_sums(
    p: Pass, name: str, encoding: str, rows: int, acts: Value, block_rows: Value, streams: Value
) -> Callable[[Value, int], Value]:
    """The sums of `rows` rows and one tile of each stream, in vectors."""
    o, panel_size = p.o, panel_bytes(FORMATS[name])
    place = o.stack(64 * rows * isa.prefetch_plan().streams)

    def total(stream: Value, row: int) -> Variable:
        return o.variable_at(place + stream * (64 * rows) + 64 * row, F32X16)

    with o.loop(streams) as stream:
        for row in range(rows):
            total(stream, row).set(o.number(0.0, F32X16))
    integers = [o.variables(2, 0, I32X16) for _ in range(rows)]
    with o.loop(p.operands.in_features // PANEL) as panel, o.loop(streams) as stream:
        here, inputs = p.weights + stream * p.bytes_apart + panel * panel_size, acts + panel * block_rows * _RECORD
        for pair in integers:
            for integer in pair:
                integer.set(o.number(0, I32X16))
        with o.loop(_GROUPS) as index:
            (here + index * (panel_size // _GROUPS)).fetch(AHEAD, panel_size // _GROUPS, INTO_FIRST)
            group = whole_group(name, here, index)
            for row, pair in enumerate(integers):
                for integer, first, minus in zip(pair, (BYTES, LOWER_BYTES), (MINUS_SUMS, MINUS_LOWER_SUMS), strict=True):
                    own = inputs_of_group(line_of_panel(inputs, first, block_rows, row), block_rows, index)
                    sums = line_of_panel(inputs, minus, block_rows, row) + index * 8
                    integer.set(_add_group(group, own, sums, integer.get()))

        def integers_of(row: int) -> tuple[Value, Value]:
            high, low = integers[row]
            return high.get(), low.get()

        _add_superblock(o, name, here, inputs, block_rows, range(rows), integers_of, [total(stream, row) for row in range(rows)])
    return lambda stream, row: total(stream, row).get()


def _add_group(group: Group, own: Value, sums: Value, total: Value) -> Value:
    """total + the sum over a group of s * (code - zero) * byte.

    own: the address of the bytes. sums: that of minus the sums of both halves of them.
    """
    size = len(group.codes) // len(group.scales)
    for part, scale in enumerate(group.scales):
        begin = total.like(0)
        if group.zero:
            begin = (sums + 4 * part).every(I32)
            begin = begin if len(group.scales) == 2 else begin + (sums + 4).every(I32)
            begin = begin.shifted(group.zero.bit_length() - 1)
        total = total + add_products(begin, group.codes[part * size :][:size], own + 4 * part * size) * scale
    return total


def many_rows_pass(name: str, p: Pass) -> None:
    """The outputs of one tile of weights for up to MANY rows from the start of a block on, or for up to BLOCK_ROWS rows those of a
    tile of each stream, in tile registers.

    A superblock is unpacked to the stack in two planes of bytes, as activations are. Then registers take the dots of both planes
    with those of each block of rows. A block's missing rows get sums of what follows the block, which no code reads.
    """
    o, rows, streams, panel_size = p.o, p.rows, p.num_tiles, panel_bytes(FORMATS[name])
    num_blocks, block_bytes = rows.rounded_up(BLOCK_ROWS), 64 * BLOCK_ROWS
    sums, planes = o.stack(64 * MANY), [o.stack(PANEL * TILE) for _ in range(2)]
    registers = paired_totals(2, 2)  # by the planes of activations and of weights
    dots = {pair: o.stack(block_bytes) for pair in registers}
    with o.loop(streams * (num_blocks * BLOCK_ROWS)) as index:
        (sums + index * 64).store(o.number(0.0, F32X16))
    with o.loop(p.operands.in_features // PANEL) as panel, o.loop(streams) as stream:
        here = p.weights + stream * p.bytes_apart + panel * panel_size
        with o.loop(_GROUPS) as index:
            (here + index * (panel_size // _GROUPS)).fetch(AHEAD, panel_size // _GROUPS, into_first=False)
            for v, parts in enumerate(_in_planes(whole_group(name, here, index))):
                for plane, numbers in zip(planes, parts, strict=True):
                    (plane + index * (GROUP * TILE) + 64 * v).store(numbers)
        with o.loop(num_blocks) as number:
            block = number * BLOCK_ROWS
            block_rows = (rows - block).smaller(BLOCK_ROWS)
            inputs = p.acts + block * p.operands.row_bytes + panel * (block_rows * _RECORD)
            for register in registers.values():
                o.tile_zero(register)
            for step in range(PANEL // PANEL_LINE):
                for weights, plane in zip(PANEL_WEIGHTS, planes, strict=True):
                    o.tile_load(weights, plane + step * (PANEL_LINE * TILE), PANEL_LINE)
                for n, first in enumerate((BYTES, LOWER_BYTES)):
                    o.tile_load(PANEL_ACTS[n], line_of_panel(inputs, first + step, block_rows, 0), PANEL_LINE)
                    for m, weights in enumerate(PANEL_WEIGHTS):
                        o.tile_dot_signed(registers[n, m], PANEL_ACTS[n], weights)
            for pair, register in registers.items():
                o.tile_store(register, dots[pair], PANEL_LINE)
            with o.loop(block_rows.rounded_up(_TOGETHER)) as some:
                row = some * _TOGETHER

                def integers_of(n: int, row: Value = row) -> tuple[Value, Value]:
                    of = {pair: (at + (row + n) * 64).i32() for pair, at in dots.items()}
                    return (of[0, 0] << 7) + of[0, 1], (of[1, 0] << 7) + of[1, 1]

                totals = [o.variable_at(sums + (stream * BLOCK_ROWS + block + row + n) * 64, F32X16) for n in range(_TOGETHER)]
                _add_superblock(o, name, here, inputs, block_rows, [row + n for n in range(_TOGETHER)], integers_of, totals)
    with o.loop(streams) as stream, o.loop(rows) as row:
        p.finish(stream, row, (sums + (stream * BLOCK_ROWS + row) * 64).f32())


def _in_planes(group: Group) -> list[tuple[Value, Value]]:
    """Of each vector of codes s * (code - zero) / 128 rounded down, and the rest, both in bytes."""
    planes, size = [], len(group.codes) // len(group.scales)
    for v, codes in enumerate(group.codes):
        scale, pairs = group.scales[v // size], codes.bits(vector_of(I16, 32))
        twice = (scale << 17 | (scale << 1) & 0xFFFF).bits(pairs.type)  # so that the first plane lies in the upper bytes
        even, odd = (((pairs & 0x00FF) - group.zero) * twice, ((pairs >> 8) - group.zero) * twice)
        parts = (even >> 8 | odd & 0xFF00, (even & 0x00FE | odd << 8 & 0xFE00) >> 1)
        planes.append((parts[0].bits(I32X16), parts[1].bits(I32X16)))
    return planes


def _add_superblock(
    o: Ops, name: str, here: Value, inputs: Value, block_rows: Value, rows: Sequence[Value | int],
    integers_of: Callable[[int], tuple[Value, Value]], totals: Sequence[Variable],
) -> None:  # fmt: skip
    """Add the products of a superblock and some rows to their totals. integers_of: the n-th row's sums of integers, with bytes and
    with low bytes. inputs: what the block of the rows has of the superblock.
    """
    d, *base = superblock_factors(name, here)
    minima = o.variables(len(rows) * len(base))  # of each row the sum of z times the sum of inputs, group after group
    if base:
        with o.loop(_GROUPS) as group:
            numbers = [number.sitofp(F32X16) for number in whole_group(name, here, group).minima]
            of_halves = len(numbers) == 2
            for part, number in enumerate(numbers):
                for row, total in zip(rows, minima, strict=True):
                    line = line_of_panel(inputs, HALF_SUMS if of_halves else LAST_LINE, block_rows, row)
                    at = line + (group * 8 + 4 * part if of_halves else group * 4 + GROUP_SUMS)
                    total.set(fma(number, at.every(F32), total.get()))
    for n, (row, total) in enumerate(zip(rows, totals, strict=True)):
        high, low = integers_of(n)
        scale = line_of_panel(inputs, LAST_LINE, block_rows, row).every(F32)
        dot = fma(high.sitofp(F32X16), d.like(128.0), low.sitofp(F32X16))
        added = fma(dot, d * scale, total.get())
        total.set(fma(minima[n].get(), -(base[0] * scale), added) if base else added)

"""Linear layers of codes on processors with sixteen vector registers, AVX2 with or without dot products of bytes (AVX-VNNI).

A register has half of a tile, and sixteen registers do not hold a group's codes beside sums. A few rows are multiplied while
weights are unpacked, more than four with one half of the tile after the other. For still more rows, a panel of a tile is unpacked
to the stack once, and up to six rows at a time are multiplied with it, by the instructions of `instructions`. The float sums are
those of `linear`'s other passes in the same order, and integer dots are exact: the bits are the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from cpuspec.formats import FORMATS
from cpuspec.formats.integers import NL4_I
from cpuspec.formats.packing import GROUP, PANEL, panel_bytes
from cpuspec.kernels import isa
from cpuspec.kernels.instructions import MOST_ROWS, SCRATCH_BYTES, MultiplyPlan
from cpuspec.kernels.ops import F32X16, I8, I16, I32, I32X16, I64, LANES, VOID, Ops, Value, Variable, call, vector_of
from cpuspec.kernels.passes import Pass
from cpuspec.kernels.products import (
    BLOCK_ROWS,
    PANEL_RECORD,
    add_dots,
    bytes_between_rows,
    end_panel,
    factors_of_panel,
    inputs_of_group,
    start,
    sum_of_weights,
    weigh,
)
from cpuspec.kernels.readers import AHEAD, INTO_FIRST, READERS, Group, integer_scale

# Rows that are multiplied while weights are unpacked, by the encoding of activations: up to _WHOLE with both halves of a tile, more
# with one after the other. Inputs of 16 bits take twice the products, beside which unpacking to the stack counts less.
_FEW, _WHOLE = {"int8": 8, "int16": 4, "rotated": 8}, 4
MANY = 8 * BLOCK_ROWS  # rows that one pass serves at most

_GROUPS = PANEL // GROUP
_HALVES = (0, 1)  # registers of a tile's 16 outputs

_BYTES, _WORDS, _INTEGERS = vector_of(I8, 32), vector_of(I16, 16), vector_of(I32, 8)

_Halves = list[list[Any]]  # by row and half: a Value, or None before the first


def few(name: str, encoding: str) -> int:
    """The rows up to which `add_rows` is quicker than `rows_pass`, for formats that both can multiply."""
    # A group of factors times levels would be made anew for each vector of codes: 1.6 to 1.8 times the time
    # (benchmarks/DECISIONS.md#avx2-instructions).
    return 0 if name == NL4_I.name else _FEW.get(encoding, 0)


def laid(products: MultiplyPlan, group: Group) -> list[Value]:
    """Vectors of codes as they are multiplied."""
    if products.in_words:  # inputs 4v and 4v + 2 of each row, then 4v + 1 and 4v + 3
        return [part for codes in group.codes for part in (codes & 0x00FF00FF, codes >> 8 & 0x00FF00FF)]
    if products.in_nibbles:
        return [codes.shifted(shift) & 0x0F0F0F0F for shift in (0, -4) for codes in group.codes]
    return group.codes


def add_rows(encoding: str, read: Callable[[Value], Group], address: Value, records: Value, totals: list[Variable]) -> None:
    """Add a group's products with up to `few` rows to their totals, from registers.

    read: returns the group of a tile at an address. It is called again for each vector of codes, right before the vector is
    multiplied; LLVM drops what is not used. records: the address of the first row's record. totals: of "rotated" records integers,
    without what the zero point of codes makes of them if `multiplies_signed`.
    """
    group = read(address)
    products, record_bytes = MultiplyPlan.of(encoding, group), bytes_between_rows(encoding)
    vectors_per_scale = 8 // products.num_scales
    signed = products.in_nibbles
    assert group.zero == 128 or not signed, "codes of eight bits are around 128"
    in_bytes = vectors_per_scale * (2**group.bits - 1) < 256  # whether the sums of codes fit
    dots: list[_Halves] = []
    weights: list[Value] = []
    for part in range(products.num_scales):
        dots.append([[None, None] for _ in totals])
        of_codes: list[Any] = [None, None]
        for halves in [_HALVES] if len(totals) <= _WHOLE else [(half,) for half in _HALVES]:
            for vectors, factor in products.sums_that_fit(part, signed):
                sums: _Halves = [[None for _ in halves] for _ in totals]
                for vector, at in vectors:
                    codes = (read(address).codes if signed else laid(products, read(address)))[vector]
                    parts = [codes.shuffled(range(8 * half, 8 * half + 8)) for half in halves]
                    if products.shifted and factor == 1:
                        for half, some in zip(halves, parts, strict=True):
                            of_codes[half] = _plus(of_codes[half], some.bits(_BYTES) if in_bytes else _pairs(some.bits(_BYTES)))
                    for row, row_sums in enumerate(sums):
                        inputs = (records + (record_bytes * row + at)).load(I32).splat(8)
                        row_sums[:] = [_times(products, *both, inputs) for both in zip(row_sums, parts, strict=True)]
                    records, address = _settled(sums, records, address)
                for row_sums, dot in zip(sums, dots[part], strict=True):
                    for half, total in zip(halves, row_sums, strict=True):
                        dot[half] = _plus(dot[half], _scaled(products, total, factor))
        if products.shifted:
            pairs = [_pairs(half) for half in of_codes] if in_bytes else of_codes
            weights.append(_whole([_widened(half) for half in pairs]) - group.zero * 4 * vectors_per_scale)
    shifted = weigh(weights, group) if products.shifted else None
    for row, total in enumerate(totals):
        record = records + record_bytes * row
        whole = [_whole(part[row]) for part in dots]
        if encoding == "rotated":
            total.set(total.get() + whole[0])
            continue
        if group.zero and not signed:
            whole = [dot + start(record, group, part) for part, dot in enumerate(whole)]
        total.set(add_dots(whole, group.scales, shifted, group.minima, record, total.get()))


def multiplies_signed(encoding: str) -> bool:
    """Whether `add_rows` multiplies codes of eight bits less their zero point."""
    return encoding != "int16" and isa.dot_isa() == "avx2"


def _times(products: MultiplyPlan, total: Any, codes: Value, inputs: Value) -> Value:
    """The sums so far (None for none) plus the products of codes with inputs, in lanes as wide as they are added in."""
    if products.vnni:
        return call("llvm.x86.avx512.vpdpbusd.256", _INTEGERS, codes.like(0) if total is None else total, codes, inputs)
    if products.in_words:
        return _plus(total, call("llvm.x86.avx2.pmadd.wd", _INTEGERS, codes.bits(_WORDS), inputs.bits(_WORDS)))
    codes, inputs = codes.bits(_BYTES), inputs.bits(_BYTES)
    if products.in_nibbles:  # the sizes of codes less their zero point, times inputs that have taken their signs
        signs = codes - codes.like(-128)
        codes, inputs = (call("llvm.x86.avx2.psign.b", _BYTES, some, signs) for some in (signs, inputs))
    return _plus(total, call("llvm.x86.avx2.pmadd.ub.sw", _WORDS, codes, inputs))


def _scaled(products: MultiplyPlan, total: Value, factor: int) -> Value:
    """A sum of `_times` in 32 bits, times a factor."""
    if products.vnni:
        return total.shifted(factor.bit_length() - 1)
    return total if products.in_words else _widened(total, factor)


def _plus(total: Any, value: Value) -> Value:
    return value if total is None else total + value


def _pairs(codes: Value) -> Value:
    """The sums of neighbouring unsigned bytes."""
    return call("llvm.x86.avx2.pmadd.ub.sw", _WORDS, codes, codes.like(1))


def _widened(pairs: Value, factor: int = 1) -> Value:
    """The sums of neighbouring numbers of 16 bits, times a factor."""
    return call("llvm.x86.avx2.pmadd.wd", _INTEGERS, pairs, pairs.like(factor))


def _whole(halves: list[Any]) -> Value:
    return halves[0].shuffled(range(LANES), halves[1])


def _settled(sums: _Halves, *addresses: Value) -> list[Value]:
    """The addresses, from an asm that also takes these sums: later loads cannot come before the sums are made.

    LLVM would load as early as it can, and then keep most of it on the stack.
    """
    values = [*(total for row_sums in sums for total in row_sums), *addresses]
    kinds = [value.type for value in values]
    outputs = ["=x"] * (len(values) - len(addresses)) + ["=r"] * len(addresses)
    constraints = ",".join([*outputs, *map(str, range(len(values)))])
    b = addresses[0].b
    settled = b.asm(ir.FunctionType(ir.LiteralStructType(kinds), kinds), "", constraints, [v.v for v in values], False)
    same = [Value(b, b.extract_value(settled, n)) for n in range(len(values))]
    for row, row_sums in enumerate(sums):
        row_sums[:] = same[len(row_sums) * row : len(row_sums) * (row + 1)]
    return same[-len(addresses) :]


class _Unpacked:
    """A panel of a tile of weights on the stack, its groups close together: what is spread takes longer to write."""

    def __init__(self, o: Ops, encoding: str, sample: Group) -> None:
        """sample: any group of the weights, for what all have in common."""
        self._products = MultiplyPlan.of(encoding, sample)
        self._code_bytes = 64 * len(laid(self._products, sample))
        self._factor_bytes = 64 * (len(sample.scales) + len(sample.minima) + self._products.shifted)
        self._codes, self._factors = o.stack(self._code_bytes * _GROUPS), o.stack(self._factor_bytes * _GROUPS)
        self._scratch = o.stack(SCRATCH_BYTES)

    def put(self, place: Value, group: Group) -> None:
        """Keep a group: its codes, its scales, its minima, the factor of shifts."""
        to = self._codes + place * self._code_bytes
        for n, codes in enumerate(laid(self._products, group)):
            (to + 64 * n).store(codes)
        to = self._factors + place * self._factor_bytes
        minima = [minimum * (-1 / 32) for minimum in group.minima] if len(group.minima) == 2 else list(group.minima)
        weights = [sum_of_weights(group)] if self._products.shifted else []
        for n, value in enumerate([*group.scales, *minima, *weights]):
            (to + 64 * n).store(value)

    def add(self, place: Value, records: Value, totals: Value, rows: int) -> None:
        """Add the products of a group that was put with `rows` rows. records, totals: the addresses of the first row's."""
        codes, factors = self._codes + place * self._code_bytes, self._factors + place * self._factor_bytes
        operands = [value.v for value in (codes, factors, records, totals, self._scratch)]
        constraints = ",".join(["r"] * len(operands) + [f"~{{ymm{n}}}" for n in range(16)] + ["~{memory}"])
        text = "\n".join(self._products.instructions(rows))
        records.b.asm(ir.FunctionType(VOID, [I64] * len(operands)), text, constraints, operands, True)


def _pieces(rows: Value) -> tuple[Value, Value]:
    """The number of turns, of up to MOST_ROWS rows each, through the rows of a block, and the rows of a turn."""
    pieces, step = rows.like(1), rows
    for number in range(2, -(-BLOCK_ROWS // MOST_ROWS) + 1):
        more = rows > (number - 1) * MOST_ROWS
        pieces, step = more.select(rows.like(number), pieces), more.select(rows.rounded_up(number), step)
    return pieces, step


def rows_pass(name: str, encoding: str, p: Pass) -> None:
    """The outputs of one tile of weights for up to MANY rows from the start of a block on, or for up to BLOCK_ROWS rows those of a
    tile of each stream, panel by panel in turns.
    """
    o, rows, streams = p.o, p.rows, p.num_tiles
    panel_size, record_bytes, rotated = panel_bytes(FORMATS[name]), bytes_between_rows(encoding), encoding == "rotated"
    group_bytes = panel_size // _GROUPS
    groups = p.operands.in_features >> 5
    sums = o.stack(64 * MANY)  # or of BLOCK_ROWS for each stream
    of_panel = o.stack(64 * MANY) if rotated else sums  # integers of one panel, where those of all are apart
    num_blocks = rows.rounded_up(BLOCK_ROWS)
    with o.loop(streams * (num_blocks * BLOCK_ROWS)) as index:
        (sums + index * 64).store(o.number(0.0, F32X16))
        (of_panel + index * 64).store(o.number(0.0, F32X16))
    with o.loop(groups.rounded_up(_GROUPS)) as panel, o.loop(streams) as stream:
        first = panel * _GROUPS
        inside = (groups - first).smaller(_GROUPS)
        here = p.weights + stream * p.bytes_apart + panel * panel_size
        with o.loop(inside) as place:
            group = READERS[name](here, inside, place)
            unpacked = _Unpacked(o, encoding, group)
            unpacked.put(place, group)
        with o.loop(num_blocks) as blocks:
            block = blocks * BLOCK_ROWS
            block_rows = (rows - block).smaller(BLOCK_ROWS)
            stride = block_rows * record_bytes
            records = p.acts + block * p.operands.row_bytes + (panel * block_rows * PANEL_RECORD if rotated else first * stride)
            at = (stream * BLOCK_ROWS + block) * 64
            totals = of_panel + at
            pieces, step = _pieces(block_rows)
            with o.loop(pieces) as piece:
                row = piece * step

                def add(number: int) -> None:
                    """The products of the panel with `number` rows."""
                    with o.loop(inside) as place:
                        with o.when((block + row).equals(0)):  # while memory would have nothing to do
                            (here + place * group_bytes).fetch(AHEAD, group_bytes, INTO_FIRST)
                        inputs = inputs_of_group(records, block_rows, place) if rotated else records + place * stride
                        unpacked.add(place, inputs + row * record_bytes, totals + row * 64, number)

                counts = range(1, MOST_ROWS + 1)
                o.switch((block_rows - row).smaller(step), {number: partial(add, number) for number in counts})
            if rotated:
                scale = integer_scale(name, here)
                with o.loop(block_rows) as row:
                    scale_of_row, minus_sum = factors_of_panel(records, block_rows, row)
                    row_total, total = totals + row * 64, sums + at + row * 64
                    total.store(end_panel(row_total.i32() + minus_sum.every(I32), scale, scale_of_row, total.f32()))
                    row_total.store(o.number(0, I32X16))
    with o.loop(streams) as stream, o.loop(rows) as row:
        p.finish(stream, row, (sums + (stream * BLOCK_ROWS + row) * 64).f32())

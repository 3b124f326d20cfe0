"""Integer products on processors without dot products of bytes: AVX2's multiplications of bytes and of 16 bits, added in pairs.

VPMADDUBSW multiplies unsigned bytes with signed ones and adds neighbours in 16 bits, which is exact while the sums fit: so results
of narrow codes are added in 16 bits, as many as fit, before VPMADDWD widens them. Codes of eight bits are two of four.
Activations of 16 bits are multiplied by VPMADDWD itself ("int16" records hold them in pairs here, see `products`).

A register has half of a tile, and sixteen registers do not hold a group's codes beside sums. So some groups of a tile are unpacked
to the stack once, for all rows of a span, and up to four rows at a time are multiplied with them. The float sums are those of
`linear`'s other passes in the same order, and integer dots are exact: the bits are the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from cpuspec.formats import FORMATS
from cpuspec.formats.packing import GROUP, PANEL, panel_bytes
from cpuspec.kernels.ops import F32X16, I8, I16, I32, LANES, Ops, Value, Variable, call, vector_of
from cpuspec.kernels.products import BLOCK_ROWS, LOW_BYTES, ORDERS, add_dots, start_field, sum_of_weights
from cpuspec.kernels.readers import AHEAD, READERS, Group

MANY = 8 * BLOCK_ROWS  # rows that one pass serves at most
TOGETHER = 4  # rows that are multiplied at once: eight registers of sums

_GROUPS = PANEL // GROUP
_HALVES = 2  # registers of a tile's 16 outputs

_BYTES, _WORDS, _SUMS = vector_of(I8, 32), vector_of(I16, 16), vector_of(I32, 8)
_CODE_BYTES = 2 * GROUP * 16  # of a group on the stack at most: as 16 bits, or as two of four bits
_MOST_FACTORS = 6  # vectors: scales, sum of weights, minima

_Sums = list[list[Any]]  # by row and half: a Value, or None before the first


class _Rows:
    """Some rows of activations and the codes of a group that they are multiplied with, where they lie or in registers."""

    def __init__(self, order: str, records: Value, count: int, codes: "list[Value] | Value") -> None:
        self._order, self._records, self.count = order, records, count  # records: the address of the first row's
        self._codes = codes  # vectors, or their address

    def record(self, row: int) -> Value:
        """The address of a row's record."""
        return self._records + ORDERS[self._order] * row

    def codes(self, number: int, typ: Any) -> list[Value]:
        """The halves of a vector of codes."""
        vector = self._codes[number] if isinstance(self._codes, list) else (self._codes + 64 * number).i32()
        return [vector.shuffled(range(8 * half, 8 * half + 8)).bits(typ) for half in range(_HALVES)]

    def every(self, row: int, offset: int, typ: Any) -> Value:
        """Four bytes of a row's record, again and again."""
        return (self.record(row) + offset).load(I32).splat(8).bits(typ)

    def settle(self, sums: _Sums) -> None:
        """Have these sums made before more is loaded: LLVM loads as early as it can, and then keeps most of it on the stack."""
        addresses = [self._records] if isinstance(self._codes, list) else [self._records, self._codes]
        values = [total for own in sums for total in own] + addresses
        kinds = [value.type for value in values]
        outputs = ["=x"] * (len(values) - len(addresses)) + ["=r"] * len(addresses)
        constraints = ",".join([*outputs, *map(str, range(len(values)))])
        b = self._records.b
        settled = b.asm(ir.FunctionType(ir.LiteralStructType(kinds), kinds), "", constraints, [v.v for v in values], False)
        same = [Value(b, b.extract_value(settled, n)) for n in range(len(values))]
        for row, own in enumerate(sums):
            own[:] = same[_HALVES * row : _HALVES * (row + 1)]
        self._records, *rest = same[-len(addresses) :]
        if rest:
            [self._codes] = rest


def add_rows(order: str, group: Group, shifted: Value | None, records: Value, totals: list[Variable]) -> None:
    """Add a group's products with some rows to their totals. records: the address of the first row's; shifted: see `add_group`."""
    _add(group, shifted, order, _Rows(order, records, len(totals), _laid(order, group)), totals)


def _laid(order: str, group: Group) -> list[Value]:
    """Codes as they are multiplied."""
    if order == "int16":  # inputs 4v and 4v + 2 of each row, then 4v + 1 and 4v + 3
        return [part for codes in group.codes for part in (codes & 0x00FF00FF, codes >> 8 & 0x00FF00FF)]
    if group.bits <= 6:
        return group.codes
    return [codes.shifted(shift) & 0x0F0F0F0F for shift in (0, -4) for codes in group.codes]


def _add(group: Group, shifted: Value | None, order: str, rows: _Rows, totals: list[Variable]) -> None:
    multiply = _words if order == "int16" else _bytes
    dots = [multiply(group, rows, part) for part in range(len(group.scales))]
    for row, total in enumerate(totals):
        own, record = [part[row] for part in dots], rows.record(row)
        if group.zero:
            own = [dot + (record + start_field(group.zero, part)).every(I32) for part, dot in enumerate(own)]
        total.set(add_dots(own, group.scales, shifted, group.minima, record, total.get()))


def _bytes(group: Group, rows: _Rows, part: int) -> list[Value]:
    """The dots of rows of signed bytes with the codes that one scale is for."""
    share = 8 // len(group.scales)
    # Of four bits eight sums of two products fit 16 bits, of five four, of six two.
    fit = min(share, {5: 4, 6: 2}.get(group.bits, 8))
    planes = ((0, 1), (8, 16)) if group.bits > 6 else ((0, 1),)
    dots: _Sums = [[None] * _HALVES for _ in range(rows.count)]
    for first_vector, factor in planes:
        for first in range(part * share, (part + 1) * share, fit):
            sums: _Sums = [[None] * _HALVES for _ in range(rows.count)]
            for v in range(first, first + fit):
                weights = rows.codes(first_vector + v, _BYTES)
                for row, own in enumerate(sums):
                    inputs = rows.every(row, 4 * v, _BYTES)
                    for half, some in enumerate(weights):
                        own[half] = _plus(own[half], call("llvm.x86.avx2.pmadd.ub.sw", _WORDS, some, inputs))
                rows.settle(sums)
            for row, own in enumerate(sums):
                for half, total in enumerate(own):
                    dots[row][half] = _plus(dots[row][half], call("llvm.x86.avx2.pmadd.wd", _SUMS, total, total.like(factor)))
    return [_whole(own) for own in dots]


def _words(group: Group, rows: _Rows, part: int) -> list[Value]:
    """The dots of rows of 16 bits with the codes that one scale is for."""
    share = 16 // len(group.scales)
    dots: _Sums = [[None] * _HALVES for _ in range(rows.count)]
    for n in range(part * share, (part + 1) * share):
        weights = rows.codes(n, _WORDS)
        for row, own in enumerate(dots):
            inputs = rows.every(row, 4 * (n % 8) + LOW_BYTES * (n // 8), _WORDS)
            for half, some in enumerate(weights):
                own[half] = _plus(own[half], call("llvm.x86.avx2.pmadd.wd", _SUMS, some, inputs))
        rows.settle(dots)
    return [_whole(own) for own in dots]


def _whole(halves: list[Value]) -> Value:
    return halves[0].shuffled(range(LANES), halves[1])


def _plus(total: Value | None, value: Value) -> Value:
    return value if total is None else total + value


class _Unpacked:
    """Some groups of a tile of weights on the stack."""

    def __init__(self, o: Ops, name: str, order: str) -> None:
        self._order, self._name = order, name
        self._codes, self._factors = o.room(_CODE_BYTES * _GROUPS), o.room(64 * _MOST_FACTORS * _GROUPS)
        self._group: Group | None = None

    def put(self, place: Value, group: Group) -> None:
        """Keep a group: its codes, its scales, its minima, the factor of shifts."""
        self._group = group
        to = self._codes + place * _CODE_BYTES
        for n, codes in enumerate(_laid(self._order, group)):
            (to + 64 * n).store(codes)
        to = self._factors + place * (64 * _MOST_FACTORS)
        weights = [sum_of_weights(group)] if self._order == "int8" else []
        for n, value in enumerate([*group.scales, *group.minima, *weights]):
            (to + 64 * n).store(value)

    def add(self, place: Value, records: Value, totals: list[Variable]) -> None:
        """`add_rows` of a group that was put."""
        group = self._group
        assert group is not None, "a group is put before it is multiplied"
        codes, at = (self._codes + place * _CODE_BYTES).base(), (self._factors + place * (64 * _MOST_FACTORS)).base()
        num_scales, num_minima = len(group.scales), len(group.minima)
        factors = [(at + 64 * n).f32() for n in range(num_scales + num_minima + (self._order == "int8"))]
        scales, minima, rest = factors[:num_scales], factors[num_scales:][:num_minima], factors[num_scales + num_minima :]
        known = Group(group.bits, [], scales, group.zero, tuple(minima))
        rows = _Rows(self._order, records, len(totals), codes)
        _add(known, rest[0] if rest else None, self._order, rows, totals)


def rows_pass(
    o: Ops, name: str, order: str, rows: Value, tile: Value, streams: Value, distance: Value, in_features: Value, acts: Value,
    row_bytes: Value, finish: Callable[[Value, Value, Value], None],
) -> None:  # fmt: skip
    """The outputs of one tile of weights for up to MANY rows from the start of a block on, or for up to BLOCK_ROWS rows those of a
    tile of each stream, `distance` bytes apart.

    Few rows take one group at a time, of each stream in turn; many a panel. finish(stream, row, values): what to do with a row's
    16 outputs.
    """
    panel, record_bytes = panel_bytes(FORMATS[name]), ORDERS[order]
    share = panel // _GROUPS
    groups = in_features >> 5
    unpacked, sums = _Unpacked(o, name, order), o.room(64 * MANY)  # or of BLOCK_ROWS for each stream
    num_blocks = rows.rounded_up(BLOCK_ROWS)
    few = Value(o.b, o.b.icmp_unsigned("<=", rows.v, rows.operand(BLOCK_ROWS)))
    most = few.select(o.number(1), o.number(_GROUPS))
    with o.loop(streams * (num_blocks * BLOCK_ROWS)) as index:
        (sums + index * 64).store(o.number(0.0, F32X16))
    with o.loop(groups.rounded_up(_GROUPS)) as panels:
        first = panels * _GROUPS
        inside = (groups - first).smaller(_GROUPS)
        with o.loop(few.select(inside, o.number(1))) as batch, o.loop(streams) as stream:
            count = inside.smaller(most)
            here = tile + stream * distance + panels * panel
            own_sums = sums + stream * (64 * BLOCK_ROWS)
            with o.loop(count) as place:
                index = batch + place
                (here + index * share).fetch(AHEAD, share)
                unpacked.put(place, READERS[name](here, inside, index))
            with o.loop(num_blocks) as blocks:
                block = blocks * BLOCK_ROWS
                block_rows = (rows - block).smaller(BLOCK_ROWS)
                stride = block_rows * record_bytes
                records = acts + block * row_bytes + (first + batch) * stride
                own = own_sums + block * 64

                def some(  # the defaults bind this turn's values
                    row: Value, number: int, count: Value = count, records: Value = records, own: Value = own,
                    stride: Value = stride,
                ) -> None:  # fmt: skip
                    """`number` rows from `row` on."""
                    begin, totals = records + row * record_bytes, own + row * 64
                    with o.loop(count) as place:
                        at, to = (begin + place * stride).base(), totals.base()
                        unpacked.add(place, at, [o.variable_at(to + 64 * n, F32X16, 32) for n in range(number)])

                with o.loop(block_rows // TOGETHER) as pieces:
                    some(pieces * TOGETHER, TOGETHER)
                left = block_rows % TOGETHER
                row = block_rows - left
                o.switch(left, {number: partial(some, row, number) for number in range(1, TOGETHER)})
    with o.loop(streams) as stream, o.loop(rows) as row:
        finish(stream, row, (sums + (stream * BLOCK_ROWS + row) * 64).f32())

"""Integer products on processors without dot products of bytes: AVX2's multiplications of bytes and of 16 bits, added in pairs.

VPMADDUBSW multiplies unsigned bytes with signed ones and adds neighbours in 16 bits, which is exact while the sums fit: so results
of narrow codes are added in 16 bits, as many as fit, before VPMADDWD widens them. Codes of eight bits are two of four.
Activations of 16 bits are multiplied by VPMADDWD itself ("int16" records hold them in pairs here, see `products`).

A register has half of a tile, and sixteen registers do not hold a group's codes beside sums. So some groups of a tile are unpacked
to the stack once, for all rows of a span, and up to four rows at a time are multiplied with them. The float sums are those of
`linear`'s other passes in the same order, and integer dots are exact: the bits are the same.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from cpuspec.formats import FORMATS
from cpuspec.formats.packing import GROUP, PANEL, panel_bytes
from cpuspec.kernels import simd
from cpuspec.kernels.products import BLOCK_ROWS, LOW_BYTES, ORDERS, add_dots, start_field, sum_of_weights
from cpuspec.kernels.readers import AHEAD, READERS, Group, Ops

MANY = 8 * BLOCK_ROWS  # rows that one pass serves at most

_TOGETHER = 4  # rows that are multiplied at once: eight registers of sums
_GROUPS = PANEL // GROUP
_HALVES = 2  # registers of a tile's 16 outputs

_BYTES, _WORDS, _SUMS = (ir.VectorType(simd.I8, 32), ir.VectorType(simd.I16, 16), ir.VectorType(simd.I32, 8))
_CODE_BYTES = 2 * GROUP * 16  # of a group on the stack at most: as 16 bits, or as two of four bits
_MOST_FACTORS = 6  # vectors: scales, sum of weights, minima


class _Rows:
    """Some rows of activations and the codes of a group that they are multiplied with, where they lie or in registers."""

    def __init__(self, o: Ops, order: str, records: Any, count: int, codes: Any) -> None:
        self._o, self._order = o, order
        self._records, self.count = records, count  # the address of the first row's record
        self._codes = codes  # vectors, or their address

    def record(self, row: int) -> Any:
        """The address of a row's record."""
        return self._o.at(self._records, ORDERS[self._order] * row)

    def codes(self, number: int, typ: Any) -> list[Any]:
        """The halves of a vector of codes."""
        o = self._o
        vector = self._codes[number] if isinstance(self._codes, list) else o.i32(o.at(self._codes, 64 * number))
        return _halves(o, vector, typ)

    def every(self, row: int, offset: int, typ: Any) -> Any:
        """Four bytes of a row's record, again and again."""
        o = self._o
        return o.b.bitcast(simd.splat(o.b, simd.load(o.b, o.at(self.record(row), offset), simd.I32), 8), typ)

    def settle(self, sums: list[list[Any]]) -> None:
        """Have these sums made before more is loaded: LLVM loads as early as it can, and then keeps most of it on the stack."""
        addresses = [self._records] if isinstance(self._codes, list) else [self._records, self._codes]
        values = [total for own in sums for total in own] + addresses
        kinds = [value.type for value in values]
        outputs = ["=x"] * (len(values) - len(addresses)) + ["=r"] * len(addresses)
        constraints = ",".join([*outputs, *map(str, range(len(values)))])
        settled = self._o.b.asm(ir.FunctionType(ir.LiteralStructType(kinds), kinds), "", constraints, values, False)
        same = [self._o.b.extract_value(settled, n) for n in range(len(values))]
        for row, own in enumerate(sums):
            own[:] = same[_HALVES * row : _HALVES * (row + 1)]
        self._records, *rest = same[-len(addresses) :]
        if rest:
            [self._codes] = rest


def add_rows(o: Ops, order: str, group: Group, shifted: Any, records: Any, totals: list[Any]) -> None:
    """Add a group's products with some rows to their totals, which are pointers. records: the address of the first row's; shifted:
    see `add_group`.
    """
    _add(o, group, shifted, order, _Rows(o, order, records, len(totals), _laid(o, order, group)), totals)


def _laid(o: Ops, order: str, group: Group) -> list[Any]:
    """Codes as they are multiplied."""
    if order == "int16":  # inputs 4v and 4v + 2 of each row, then 4v + 1 and 4v + 3
        return [part for codes in group.codes for part in (o.mask(codes, 0x00FF00FF), o.mask(o.left(codes, -8), 0x00FF00FF))]
    if group.bits <= 6:
        return group.codes
    return [o.mask(o.left(codes, shift), 0x0F0F0F0F) for shift in (0, -4) for codes in group.codes]


def _add(o: Ops, group: Group, shifted: Any, order: str, rows: _Rows, totals: list[Any]) -> None:
    multiply = _words if order == "int16" else _bytes
    dots = [multiply(o, group, rows, part) for part in range(len(group.scales))]
    for row, total in enumerate(totals):
        own, record = [part[row] for part in dots], rows.record(row)
        if group.zero:
            own = [o.b.add(dot, o.every(o.at(record, start_field(group.zero, part)), simd.I32)) for part, dot in enumerate(own)]
        before = o.b.load(total, typ=simd.F32X16, align=32)
        o.b.store(add_dots(o, own, group.scales, shifted, group.minima, record, before), total, align=32)


def _bytes(o: Ops, group: Group, rows: _Rows, part: int) -> list[Any]:
    """The dots of rows of signed bytes with the codes that one scale is for."""
    share = 8 // len(group.scales)
    # Of four bits eight sums of two products fit 16 bits, of five four, of six two.
    fit = min(share, {5: 4, 6: 2}.get(group.bits, 8))
    planes = ((0, 1), (8, 16)) if group.bits > 6 else ((0, 1),)
    dots: list[list[Any]] = [[None] * _HALVES for _ in range(rows.count)]
    for first_vector, factor in planes:
        for first in range(part * share, (part + 1) * share, fit):
            sums: list[list[Any]] = [[None] * _HALVES for _ in range(rows.count)]
            for v in range(first, first + fit):
                weights = rows.codes(first_vector + v, _BYTES)
                for row, own in enumerate(sums):
                    inputs = rows.every(row, 4 * v, _BYTES)
                    for half, some in enumerate(weights):
                        own[half] = _plus(o, own[half], simd.call(o.b, "llvm.x86.avx2.pmadd.ub.sw", _WORDS, some, inputs))
                rows.settle(sums)
            for row, own in enumerate(sums):
                for half, total in enumerate(own):
                    wide = simd.call(o.b, "llvm.x86.avx2.pmadd.wd", _SUMS, total, ir.Constant(_WORDS, [factor] * 16))
                    dots[row][half] = _plus(o, dots[row][half], wide)
    return [_whole(o, own) for own in dots]


def _words(o: Ops, group: Group, rows: _Rows, part: int) -> list[Any]:
    """The dots of rows of 16 bits with the codes that one scale is for."""
    share = 16 // len(group.scales)
    dots: list[list[Any]] = [[None] * _HALVES for _ in range(rows.count)]
    for n in range(part * share, (part + 1) * share):
        weights = rows.codes(n, _WORDS)
        for row, own in enumerate(dots):
            inputs = rows.every(row, 4 * (n % 8) + LOW_BYTES * (n // 8), _WORDS)
            for half, some in enumerate(weights):
                own[half] = _plus(o, own[half], simd.call(o.b, "llvm.x86.avx2.pmadd.wd", _SUMS, some, inputs))
        rows.settle(dots)
    return [_whole(o, own) for own in dots]


def _halves(o: Ops, vector: Any, typ: Any) -> list[Any]:
    lanes = [ir.Constant(_SUMS, list(range(8 * half, 8 * half + 8))) for half in range(_HALVES)]
    return [o.b.bitcast(o.b.shuffle_vector(vector, ir.Constant(simd.I32X16, ir.Undefined), some), typ) for some in lanes]


def _whole(o: Ops, halves: list[Any]) -> Any:
    return o.b.shuffle_vector(*halves, ir.Constant(simd.I32X16, list(range(simd.LANES))))


def _plus(o: Ops, total: Any, value: Any) -> Any:
    return value if total is None else o.b.add(total, value)


class _Unpacked:
    """Some groups of a tile of weights on the stack."""

    def __init__(self, o: Ops, name: str, order: str) -> None:
        self._o, self._order, self._name = o, order, name
        self._codes, self._factors = o.room(_CODE_BYTES * _GROUPS), o.room(64 * _MOST_FACTORS * _GROUPS)
        self._group: Group | None = None

    def put(self, place: Any, group: Group) -> None:
        """Keep a group: its codes, its scales, what shifts are multiplied with, its minima."""
        o, self._group = self._o, group
        to = o.b.add(self._codes, o.times(place, _CODE_BYTES))
        for n, codes in enumerate(_laid(o, self._order, group)):
            simd.store(o.b, o.at(to, 64 * n), codes)
        to = o.b.add(self._factors, o.times(place, 64 * _MOST_FACTORS))
        weights = [sum_of_weights(o, group)] if self._order == "int8" else []
        for n, value in enumerate([*group.scales, *group.minima, *weights]):
            simd.store(o.b, o.at(to, 64 * n), value)

    def add(self, place: Any, records: Any, totals: list[Any]) -> None:
        """`add_rows` of a group that was put."""
        o, group = self._o, self._group
        assert group is not None, "a group is put before it is multiplied"
        codes = o.base(o.b.add(self._codes, o.times(place, _CODE_BYTES)))
        at = o.base(o.b.add(self._factors, o.times(place, 64 * _MOST_FACTORS)))
        num_scales, num_minima = len(group.scales), len(group.minima)
        factors = [o.f32(o.at(at, 64 * n)) for n in range(num_scales + num_minima + (self._order == "int8"))]
        scales, minima, rest = factors[:num_scales], factors[num_scales:][:num_minima], factors[num_scales + num_minima :]
        known = Group(group.bits, [], scales, group.zero, tuple(minima))
        rows = _Rows(o, self._order, records, len(totals), codes)
        _add(o, known, rest[0] if rest else None, self._order, rows, totals)


def rows_pass(
    o: Ops, name: str, order: str, rows: Any, tile: Any, strands: Any, apart: Any, in_features: Any, acts: Any, row_bytes: Any,
    finish: Callable[..., None],
) -> None:  # fmt: skip
    """The outputs of one tile of weights for up to MANY rows from the start of a block on; or, for up to BLOCK_ROWS rows, those of a
    tile of each strand, `apart` bytes apart.

    Few rows take one group at a time, of each strand in turn; many a stretch. finish(strand, row, values): what to do with a row's
    16 outputs.
    """
    stretch, record_bytes = panel_bytes(FORMATS[name]), ORDERS[order]
    share = stretch // _GROUPS
    groups = o.b.lshr(in_features, ir.Constant(simd.I64, 5))
    unpacked, sums = _Unpacked(o, name, order), o.room(64 * MANY)  # or of BLOCK_ROWS for each strand
    num_blocks = o.rounded_up(rows, BLOCK_ROWS)
    few = o.b.icmp_unsigned("<=", rows, ir.Constant(simd.I64, BLOCK_ROWS))
    most = o.b.select(few, ir.Constant(simd.I64, 1), ir.Constant(simd.I64, _GROUPS))
    with cgutils.for_range(o.b, o.b.mul(strands, o.times(num_blocks, BLOCK_ROWS))) as loop:
        simd.store(o.b, o.b.add(sums, o.times(loop.index, 64)), simd.constant(o.b, 0.0, simd.f32x16))
    with cgutils.for_range(o.b, o.rounded_up(groups, _GROUPS)) as stretches:
        first = o.times(stretches.index, _GROUPS)
        inside = o.smaller(o.b.sub(groups, first), ir.Constant(simd.I64, _GROUPS))
        batches = o.b.select(few, inside, ir.Constant(simd.I64, 1))
        with cgutils.for_range(o.b, batches) as batch, cgutils.for_range(o.b, strands) as strand:
            count = o.smaller(inside, most)
            here = o.b.add(o.b.add(tile, o.b.mul(strand.index, apart)), o.times(stretches.index, stretch))
            own_sums = o.b.add(sums, o.times(strand.index, 64 * BLOCK_ROWS))
            with cgutils.for_range(o.b, count) as loop:
                index = o.b.add(batch.index, loop.index)
                o.fetch(o.b.add(here, o.times(index, share)), AHEAD, share)
                unpacked.put(loop.index, READERS[name](o, here, inside, index))
            with cgutils.for_range(o.b, num_blocks) as blocks:
                block = o.times(blocks.index, BLOCK_ROWS)
                block_rows = o.smaller(o.b.sub(rows, block), ir.Constant(simd.I64, BLOCK_ROWS))
                stride = o.times(block_rows, record_bytes)
                records = o.b.add(o.b.add(acts, o.b.mul(block, row_bytes)), o.b.mul(o.b.add(first, batch.index), stride))
                own = o.b.add(own_sums, o.times(block, 64))

                def some(row: Any, number: int, count: Any, records: Any, own: Any, stride: Any) -> None:
                    """`number` rows from `row` on."""
                    begin, totals = o.b.add(records, o.times(row, record_bytes)), o.b.add(own, o.times(row, 64))
                    with cgutils.for_range(o.b, count) as loop:
                        at = o.base(o.b.add(begin, o.b.mul(loop.index, stride)))
                        to = o.base(totals)
                        unpacked.add(loop.index, at, [simd.pointer(o.b, o.at(to, 64 * n)) for n in range(number)])

                together = ir.Constant(simd.I64, _TOGETHER)
                with cgutils.for_range(o.b, o.b.udiv(block_rows, together)) as chunks:
                    some(o.b.mul(chunks.index, together), _TOGETHER, count, records, own, stride)
                left = o.b.urem(block_rows, together)
                row = o.b.sub(block_rows, left)
                done = o.b.append_basic_block("done")
                switch = o.b.switch(left, done)
                for number in range(1, _TOGETHER):
                    case = o.b.append_basic_block(f"rows{number}")
                    switch.add_case(ir.Constant(simd.I64, number), case)
                    o.b.position_at_end(case)
                    some(row, number, count, records, own, stride)
                    o.b.branch(done)
                o.b.position_at_end(done)
    with cgutils.for_range(o.b, strands) as strand, cgutils.for_range(o.b, rows) as loop:
        finish(strand.index, loop.index, o.f32(o.b.add(sums, o.times(o.b.add(o.times(strand.index, BLOCK_ROWS), loop.index), 64))))

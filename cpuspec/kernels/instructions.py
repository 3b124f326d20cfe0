"""A group of weights times some rows, instruction by instruction, in the sixteen registers of processors without AVX-512.

Twelve registers hold the sums of six rows, which leaves four for weights and inputs. LLVM would load early and keep on the stack
what does not fit, and a row would take up to 1.7 times as long (benchmarks/DECISIONS.md#avx2-instructions). The syntax is AT&T's:
sources come first.

Without dot products of bytes, VPMADDUBSW multiplies unsigned bytes with signed ones and adds neighbours in 16 bits, which is exact
while the sums fit: results of narrow codes are added in 16 bits, as many as fit, before VPMADDWD widens them. An 8-bit code is
multiplied as two 4-bit halves. Activations of 16 bits are multiplied by VPMADDWD itself ("int16" records hold them in pairs, see
`products`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cpuspec.kernels import isa
from cpuspec.kernels.products import LOW_BYTES, MINIMUM_FIELDS, SCALE, SHIFT, VALUE_SUM, bytes_between_rows, start_of
from cpuspec.kernels.readers import Group

MOST_ROWS = 6

# Operands: the addresses of a group's codes and factors, of the first row's record and total, and of SCRATCH_BYTES of memory.
CODES, FACTORS, RECORDS, TOTALS, SCRATCH = (f"${n}" for n in range(5))
SCRATCH_BYTES = 2 * 64 * MOST_ROWS  # integers, and behind them numbers
_NUMBERS = 64 * MOST_ROWS

_HALVES = (0, 1)  # of a tile's 16 outputs: eight lanes each


@dataclass(frozen=True)
class MultiplyPlan:
    """How a group of weights is multiplied with a row of activations in one of ENCODINGS."""

    encoding: str
    bits: int  # of a code
    num_scales: int
    zero: int
    num_minima: int
    vnni: bool  # whether the processor has dot products of bytes (AVX-VNNI)

    @classmethod
    def of(cls, encoding: str, group: Group) -> "MultiplyPlan":
        """How this processor multiplies a group."""
        return cls(
            encoding,
            group.bits,
            max(1, len(group.scales)),
            group.zero,
            len(group.minima),
            isa.dot_isa() == "avx_vnni",
        )

    @property
    def in_words(self) -> bool:
        """Whether codes and inputs are multiplied as numbers of 16 bits."""
        return self.encoding == "int16" and not self.vnni

    @property
    def in_nibbles(self) -> bool:
        """Whether codes are multiplied four bits at a time."""
        return self.bits > 7 and not self.in_words and not self.vnni

    @property
    def shifted(self) -> bool:
        """Whether inputs have a shift, whose factor is the sum of a group's weights."""
        return self.encoding == "int8"

    def sums_that_fit(self, part: int, signed: bool = False) -> Iterator[tuple[list[tuple[int, int]], int]]:
        """The codes that share one scale, as sums that fit their integers: vectors of codes, each with the offset of its inputs in
        a record, and the factor of their sum.

        Vectors are numbered as in `ymm.laid`. signed: codes of eight bits are multiplied whole.
        """
        vectors_per_scale = 8 // self.num_scales
        vectors = range(part * vectors_per_scale, (part + 1) * vectors_per_scale)
        if self.in_words:
            yield [(n, 4 * (n % 8) + LOW_BYTES * (n // 8)) for v in vectors for n in (2 * v, 2 * v + 1)], 1
        elif self.vnni:
            yield [(v, 4 * v) for v in vectors], 256 if self.encoding == "int16" else 1
            if self.encoding == "int16":
                yield [(v, LOW_BYTES + 4 * v) for v in vectors], 1
        else:  # 16 bits hold eight sums of two products of codes of four bits, four of five bits, two of six, one of seven
            fit = 1 if signed else min(vectors_per_scale, {5: 4, 6: 2, 7: 1}.get(self.bits, 8))
            for first_vector, factor in ((0, 1), (8, 16)) if self.in_nibbles and not signed else ((0, 1),):
                for first in vectors[::fit]:
                    yield [(first_vector + v, 4 * v) for v in range(first, first + fit)], factor

    def instructions(self, rows: int) -> Iterator[str]:
        """Add a group's products with `rows` rows, 1 to MOST_ROWS, to their totals, in the order of `products.add_dots`.

        Codes lie as `ymm.laid` has them. Factors are scales, minima (two of them times -1/32), and the sum of weights if
        `shifted`. Of "rotated" records totals are sums of integers, which lack what the zero point makes of them.
        """
        place = _Places(self.encoding, rows)
        sums, weights, inputs = place.sums, place.weights, place.inputs
        for part in range(self.num_scales):
            yield from (self._vnni_dots if self.vnni else self._dots)(place, part)
            if self.encoding == "rotated":
                for row, half, total in place.each:
                    yield f"vpaddd {place.at(TOTALS, row, half)}, {total}, {total}"
                    yield f"vmovdqa {total}, {place.at(TOTALS, row, half)}"
                return
            if self.zero:
                field, shift = start_of(self.zero, self.num_scales, part)
                for row, row_sums in enumerate(sums):
                    yield f"vpbroadcastd {place.record(row, field)}, {inputs}"
                    if shift:
                        yield f"vpslld $${shift}, {inputs}, {inputs}"
                    yield from (f"vpaddd {inputs}, {total}, {total}" for total in row_sums)
            yield from (f"vcvtdq2ps {total}, {total}" for *_, total in place.each)
            yield from place.load_factor(part)
            for row, half, total in place.each:
                before = place.at(SCRATCH, row, half, _NUMBERS)
                yield f"vfmadd213ps {before}, {weights[half]}, {total}" if part else f"vmulps {weights[half]}, {total}, {total}"
            if part < self.num_scales - 1:
                yield from (f"vmovaps {total}, {place.at(SCRATCH, row, half, _NUMBERS)}" for row, half, total in place.each)
        if self.num_minima == 2:
            for number, field in enumerate(MINIMUM_FIELDS):
                yield from place.add_product(self.num_scales + number, field, integer=True)
        for row, row_sums in enumerate(sums):
            yield f"vbroadcastss {place.record(row, SCALE)}, {inputs}"
            yield from (f"vfmadd213ps {place.at(TOTALS, row, half)}, {inputs}, {row_sums[half]}" for half in _HALVES)
        if self.shifted:
            yield from place.add_product(self.num_scales + self.num_minima, SHIFT)
        if self.num_minima == 1:
            yield from place.add_product(self.num_scales, VALUE_SUM)
        yield from (f"vmovaps {total}, {place.at(TOTALS, row, half)}" for row, half, total in place.each)

    def _dots(self, place: "_Places", part: int) -> Iterator[str]:
        """Instructions that leave the integer dots of each row with the codes of one scale in the registers of sums."""
        multiply, add = ("vpmaddwd", "vpaddd") if self.in_words else ("vpmaddubsw", "vpaddw")
        inputs = place.inputs
        partial_sums = list(self.sums_that_fit(part))
        for number, (vectors, factor) in enumerate(partial_sums):
            for turn, (vector, at) in enumerate(vectors):
                yield from place.load_codes(vector)
                for row, (low, high) in enumerate(place.sums):
                    yield f"vpbroadcastd {place.record(row, at)}, {inputs}"
                    product = high if turn == 0 else place.products[row % len(place.products)]
                    yield f"{multiply} {inputs}, {place.weights[1]}, {product}"
                    yield f"{multiply} {inputs}, {place.weights[0]}, {low if turn == 0 else inputs}"
                    if turn > 0:
                        yield f"{add} {product}, {high}, {high}"
                        yield f"{add} {inputs}, {low}, {low}"
            if not self.in_words:
                yield f"vpcmpeqw {inputs}, {inputs}, {inputs}"
                yield f"vpsrlw $$15, {inputs}, {inputs}"
                if factor > 1:
                    yield f"vpsllw $${factor.bit_length() - 1}, {inputs}, {inputs}"
                yield from (f"vpmaddwd {inputs}, {total}, {total}" for *_, total in place.each)
            if number:
                yield from (f"vpaddd {place.at(SCRATCH, row, half)}, {total}, {total}" for row, half, total in place.each)
            if number < len(partial_sums) - 1:
                yield from (f"vmovdqa {total}, {place.at(SCRATCH, row, half)}" for row, half, total in place.each)

    def _vnni_dots(self, place: "_Places", part: int) -> Iterator[str]:
        """`_dots` by instructions that multiply and add four bytes."""
        yield from (f"vpxor {total}, {total}, {total}" for *_, total in place.each)
        for vectors, factor in self.sums_that_fit(part):
            for vector, at in vectors:
                yield from place.load_codes(vector)
                for row, row_sums in enumerate(place.sums):
                    yield f"vpbroadcastd {place.record(row, at)}, {place.inputs}"
                    yield from (f"{{vex}} vpdpbusd {place.inputs}, {place.weights[half]}, {row_sums[half]}" for half in _HALVES)
            if factor > 1:
                yield from (f"vpslld $${factor.bit_length() - 1}, {total}, {total}" for *_, total in place.each)


class _Places:
    """Registers and addresses for some rows."""

    def __init__(self, encoding: str, rows: int) -> None:
        self._record_bytes = bytes_between_rows(encoding)
        self.sums = [[f"%ymm{2 * row + half}" for half in _HALVES] for row in range(rows)]
        self.each = [(row, half, self.sums[row][half]) for row in range(rows) for half in _HALVES]
        first, *others = (f"%ymm{n}" for n in range(2 * rows, 16))
        self.weights, self.inputs, self.products = (first, others[0]), others[1], others[2:4]

    def record(self, row: int, offset: int) -> str:
        """The operand at an offset of a row's record."""
        return f"{self._record_bytes * row + offset}({RECORDS})"

    def at(self, address: str, row: int, half: int, offset: int = 0) -> str:
        """The operand for a half of a row of 16 lanes."""
        return f"{offset + 64 * row + 32 * half}({address})"

    def load_codes(self, vector: int) -> Iterator[str]:
        """A vector of codes into the registers of weights."""
        yield from (f"vmovdqa {self.at(CODES, vector, half)}, {self.weights[half]}" for half in _HALVES)

    def load_factor(self, number: int) -> Iterator[str]:
        """A factor into the registers of weights."""
        yield from (f"vmovaps {self.at(FACTORS, number, half)}, {self.weights[half]}" for half in _HALVES)

    def add_product(self, number: int, field: int, integer: bool = False) -> Iterator[str]:
        """Add a factor times a field of each row's record to the sums."""
        yield from self.load_factor(number)
        for row, row_sums in enumerate(self.sums):
            yield f"vbroadcastss {self.record(row, field)}, {self.inputs}"
            if integer:
                yield f"vcvtdq2ps {self.inputs}, {self.inputs}"
            yield from (f"vfmadd231ps {self.weights[half]}, {self.inputs}, {row_sums[half]}" for half in _HALVES)

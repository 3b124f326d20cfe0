"""A group of weights times the same inputs of a row, in vectors of 512 bits; `ymm.py` and `instructions.py` have those of 256.

Activations have one of these encodings, in blocks of up to BLOCK_ROWS rows:
  "int8"   [group][row] records of 64 bytes: x = scale * byte + shift for 32 inputs, shift the middle of their range. Against
           bytes around zero this halves the error, for one more multiply-add a group.
  "int16"  [group][row] records of 128 bytes: x = scale * (256 * byte + low byte), for matrices where errors count most.
  "f32"    [input][row] numbers, for weights that are floating point themselves.
  "bf16"   [group][row] records of 32 numbers rounded to bf16, for bf16 weights on processors that multiply them in tile registers;
           of prompts also for codes, which are dequantized to bf16.
  "rounded"  [input][row] the same numbers, in f32, for processors that do not.
  "rotated"  for formats whose weights are rotated: each 256 inputs times Hadamard's matrix, x = scale * byte with one scale for all
           256. Weights are whole numbers under one scale for the same inputs, so products are added as integers over a panel. Of a
           panel: [64 inputs][row] bytes, then the scale of each row, then of each row -128 times the sum of the bytes.
  "int14"  for superblocks of 256 (`readers.SUPERBLOCKS`): x = scale * (128 * byte + low byte), with one scale for all 256. The byte
           is -64..63 and the low one 0..127, so both fit signed bytes. A panel has lines of 64 bytes, each [row]: four of bytes and
           four of low bytes; one with the sum of each 16 inputs as f32; two with minus the sums of bytes and of low bytes of each
           16 inputs; one with the scale and, from GROUP_SUMS on, the sum of each 32 inputs as f32.
"bf16" and "rounded" are padded with zeros to whole groups. A record of integers holds 32 signed bytes, then at the offsets below
the scale, the shift and what formats with a zero point or a minimum need of the sums; then in "int16" the 32 low bytes. On
processors that multiply with AVX2 alone an "int16" record has numbers of 16 bits in the place of both, those of the first 16 inputs
and of the last, the second and third of each four swapped.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from cpuspec.formats.packing import GROUP, PANEL
from cpuspec.kernels.isa import dot_isa
from cpuspec.kernels.ops import F32, F32X16, I8, I32, I32X16, Value, bf16_pairs, dot_bytes, fma, vector_of
from cpuspec.kernels.readers import Group

BLOCK_ROWS = 16  # rows of a block of activations, which lie together
SCALE, SHIFT, VALUE_SUM, MINUS_8_SUMS, MINUS_16_SUMS, MINUS_128_SUMS, MINUS_32_LOW, MINUS_32_HIGH = range(32, 64, 4)
LOW_BYTES = 64
PANEL_LINE, PANEL_RECORD = 64, 320  # of "rotated": bytes that lie together; of a panel and row, rounded up to whole lines
# Lines of "int14" activations of a panel: the first of bytes and of low bytes, and those of sums and of the scale.
BYTES, LOWER_BYTES, HALF_SUMS, MINUS_SUMS, MINUS_LOWER_SUMS, LAST_LINE, NUM_LINES = 0, 4, 8, 9, 10, 11, 12
GROUP_SUMS = 32  # of the last line
MOST_OF_14_BITS = 8191  # codes

# Bytes of activations for each row and group of 32 inputs (where rows are side by side, for each row and 32 inputs).
ENCODINGS: Mapping[str, int] = MappingProxyType(
    {
        "int8": 64,
        "int16": 128,
        "f32": 128,
        "bf16": 64,
        "rounded": 128,
        "rotated": PANEL_RECORD // 8,
        "int14": NUM_LINES * PANEL_LINE // 8,
    }
)


class StepLayout(NamedTuple):
    """How a block has the activations of some inputs, a step: `pieces` pieces of `size` bytes, each of all rows before the next
    piece, and behind them `words` words likewise.
    """

    inputs: int
    size: int
    pieces: int
    words: int = 0


def step_layout(encoding: str) -> StepLayout:
    """The steps of an encoding."""
    if encoding in ("f32", "rounded"):
        return StepLayout(1, 4, 0, 1)
    if encoding == "rotated":
        return StepLayout(PANEL, PANEL_LINE, PANEL // PANEL_LINE, (PANEL_RECORD - PANEL) // 4)
    if encoding == "int14":
        return StepLayout(PANEL, PANEL_LINE, NUM_LINES)
    return StepLayout(GROUP, ENCODINGS[encoding], 1)


def bytes_between_rows(encoding: str) -> int:
    """Bytes from the first activations of a row to those of the next row of its block."""
    return step_layout(encoding).size


def factors_of_panel(codes: Value, rows: Value | int, row: Value | int) -> tuple[Value, Value]:
    """The addresses of the scale of a row, and of -128 times its sum, in "rotated" activations of a block of `rows` rows.

    codes: the address of what the block has of the panel.
    """
    scale = codes + (rows * PANEL + row * 4)
    return scale, scale + rows * 4


def inputs_of_group(codes: Value, rows: Value, group: Value) -> Value:
    """The address of a group's bytes of a row in "rotated" or "int14" activations of a block of `rows` rows. codes: those of group
    0.
    """
    return codes + (group >> 1) * rows * PANEL_LINE + (group & 1) * GROUP


def line_of_panel(panel: Value, number: int, rows: Value | int, row: Value | int) -> Value:
    """The address of a line of a row in "int14" activations of a block of `rows` rows. panel: where the block's panel begins."""
    return panel + (rows * number + row) * PANEL_LINE


def row_bytes(encoding: str, features: int) -> int:
    """Bytes of activations for each row of `features` inputs."""
    return -(-features // 32) * ENCODINGS[encoding]


# Fields of a record that have sums of inputs times -zero, by zero: of the whole group, or of each half.
_SUMS = {8: MINUS_8_SUMS, 16: MINUS_16_SUMS, 128: MINUS_128_SUMS}
MINIMUM_FIELDS = (MINUS_32_LOW, MINUS_32_HIGH)  # what the minima of two halves of a group are multiplied with, times -1/32


def _halves(group: Group) -> list[tuple[Value, list[Value]]]:
    """Each scale with the vectors of codes that it is for."""
    vectors_per_scale = 8 // len(group.scales)
    return [(scale, group.codes[n * vectors_per_scale : (n + 1) * vectors_per_scale]) for n, scale in enumerate(group.scales)]


def sum_of_weights(group: Group) -> Value:
    """Sum over the group of scale * (code - zero), and of minima of its halves, for each row of the tile: the factor of a shift of
    the inputs.
    """
    ones = group.codes[0].like(0x01010101)
    totals = []
    for _, vectors in _halves(group):
        total = ones.like(-group.zero * 4 * len(vectors))
        if group.bits == 8 and dot_isa() == "avx2":  # in halves, as they are multiplied (`instructions`)
            low, high = (_sum_of_bytes([codes.shifted(shift) & 0x0F0F0F0F for codes in vectors]) for shift in (0, -4))
            total = dot_bytes(total, low, ones) + (dot_bytes(ones.like(0), high, ones) << 4)
        else:
            fit = max(1, 255 // (2**group.bits - 1))  # as bytes, the sum of so many does not overflow
            for first in range(0, len(vectors), fit):
                total = dot_bytes(total, _sum_of_bytes(vectors[first : first + fit]), ones)
        totals.append(total)
    return weigh(totals, group)


def weigh(totals: list[Value], group: Group) -> Value:
    """`sum_of_weights` from the sums of codes less their zero point, for each scale."""
    weights: Value | None = None
    for scale, total in zip(group.scales, totals, strict=True):
        number = total.sitofp(F32X16)
        weights = number * scale if weights is None else fma(number, scale, weights)
    assert weights is not None, "a group has a scale"
    if len(group.minima) == 2:
        weights = fma(group.minima[0] + group.minima[1], weights.like(16.0), weights)
    return weights


def dequantized(group: Group) -> list[Value]:
    """scale * (code - zero) + minimum, rounded to f32 and then to bf16: sixteen vectors of pairs of inputs, as bf16 weights lie."""
    vectors_per_scale = 8 // len(group.scales)
    offsets = list(group.minima)
    if group.zero and not group.minima:  # a power of two, so that this is exact, and no subtraction from each code
        offsets = [scale * float(-group.zero) for scale in group.scales]
    pairs = []
    for v, codes in enumerate(group.codes):
        weights = []
        for byte in range(4):
            code = codes >> 24 if byte == 3 else codes.shifted(-8 * byte) & 0xFF
            if group.minima and group.zero:
                code = code - group.zero
            number, scale = code.sitofp(F32X16), group.scales[v // vectors_per_scale]
            weights.append(fma(number, scale, offsets[v // vectors_per_scale % len(offsets)]) if offsets else number * scale)
        pairs += [bf16_pairs(*weights[:2]), bf16_pairs(*weights[2:])]
    return pairs


def _sum_of_bytes(vectors: list[Value]) -> Value:
    """Byte by byte, without care for overflow."""
    total, *others = (vector.bits(vector_of(I8, 64)) for vector in vectors)
    for vector in others:
        total = total + vector
    return total.bits(I32X16)


def start_of(zero: int, num_scales: int, part: int) -> tuple[int, int]:
    """The start of the sum for one of the scales, inputs times -zero: the field of a record that has it, and how many bits it is
    shifted to the left.
    """
    known = {32: MINIMUM_FIELDS[part]} if num_scales == 2 else _SUMS
    nearest = max(factor for factor in known if zero % factor == 0)
    return known[nearest], (zero // nearest).bit_length() - 1


def start(record: Value, group: Group, part: int) -> Value:
    """`start_of` in every lane."""
    field, shift = start_of(group.zero, len(group.scales), part)
    return (record + field).every(I32).shifted(shift)


def add_group(group: Group, shifted: Value | None, record: Value, total: Value) -> Value:
    """total + scale of the row * (sum over parts of scale * integer dot) + shift * sum of weights + minimum * sum of inputs.

    shifted: the sum of weights for "int8" records, None for "int16" records.
    """
    dots = []
    for part, (_, vectors) in enumerate(_halves(group)):
        first = 4 * part * len(vectors)
        zero = vectors[0].like(0)
        begin = start(record, group, part) if group.zero else zero
        if shifted is None:
            high = add_products(zero, vectors, record + first)
            dots.append((high << 8) + add_products(begin, vectors, record + (LOW_BYTES + first)))
        else:
            dots.append(add_products(begin, vectors, record + first))
    return add_dots(dots, group.scales, shifted, group.minima, record, total)


def end_panel(dot: Value, scale: Value, scale_of_row: Value, total: Value) -> Value:
    """total + the integer dot of a panel * the scales of its weights and of the row. scale_of_row: its address."""
    return fma(dot.sitofp(F32X16), scale * scale_of_row.every(F32), total)


def add_products(total: Value, vectors: list[Value], address: Value) -> Value:
    """total + the products of the vectors' bytes with 4 bytes each from the address on."""
    for v, codes in enumerate(vectors):
        total = dot_bytes(total, codes, (address + 4 * v).every(I32))
    return total


def add_dots(
    dots: list[Value], scales: list[Value], shifted: Value | None, minima: tuple[Value, ...], record: Value, total: Value
) -> Value:
    """`add_group` where the integer dot for each scale is known, zero points taken off."""
    scaled: Value | None = None
    for scale, dot in zip(scales, dots, strict=True):
        number = dot.sitofp(F32X16)
        scaled = number * scale if scaled is None else fma(number, scale, scaled)
    assert scaled is not None, "a group has a scale"
    if len(minima) == 2:
        for minimum, field in zip(minima, MINIMUM_FIELDS, strict=True):
            scaled = fma((record + field).every(I32).sitofp(F32X16), minimum * (-1 / 32), scaled)
    total = fma(scaled, (record + SCALE).every(F32), total)
    if shifted is not None:
        total = fma(shifted, (record + SHIFT).every(F32), total)
    if len(minima) == 1:
        total = fma(minima[0], (record + VALUE_SUM).every(F32), total)
    return total

"""Linear layers: packed weights times rows of activations, one kernel for every format and number of rows.

A tile is 16 output rows in 16 lanes. For each group of 32 inputs its weights are unpacked into registers once (`readers`), and
every row of the batch, some at a time, is multiplied with them (`products`). Each output sums its groups in the order of the
inputs, whatever the number of rows, the thread or the tile: a row's result does not depend on its company, bit for bit.

Formats are of four kinds. Codes are integers under scales (q4_k). Numbers are f32 or f16. Codes of floats (fp8, nf4) become numbers
under scales. These two are multiplied with f32 activations. bf16 weights lie in pairs of inputs, and are multiplied with
activations rounded to bf16, as tile registers do it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from cpuspec.errors import BackendError
from cpuspec.formats import FORMATS, get_format
from cpuspec.formats.packing import GROUP, PANEL, panel_bytes
from cpuspec.kernels import isa, machine_code, selfcheck, superblocks, tiles, ymm
from cpuspec.kernels.ops import F32, F32X16, I1, I32, I32X16, Ops, Value, Variable, fma
from cpuspec.kernels.passes import Operands, Pass, block_of, pass_of
from cpuspec.kernels.products import (
    BLOCK_ROWS,
    PANEL_LINE,
    PANEL_RECORD,
    add_group,
    add_products,
    bytes_between_rows,
    end_panel,
    factors_of_panel,
    inputs_of_group,
    sum_of_weights,
)
from cpuspec.kernels.readers import AHEAD, FLOAT_CODES, INTO_FIRST, NUMBERS, PAIRED, READERS, SUPERBLOCKS, integer_scale

# The most rows that one pass over a tile serves. Fewer rows are served eight at a time, and then the rest: unpacking a tile once
# more costs as much as three rows. Each number of rows is code to compile, once per format. Numbers need two of 32 registers for a
# row's sums, so sixteen rows do not fit; and tile registers, where there are some, serve sixteen rows better. Without AVX-512 a
# vector takes two of 16 registers, so several rows of numbers are multiplied at even inputs, and then at odd ones.
_MOST_ROWS, _MOST_OF_NUMBERS = 16, 6 if isa.has_sixteen_registers() else 8

# For fewer rows than a block, or for one block in tile registers, a thread reads several streams of tiles in turns: a core of an
# Intel processor gets more from memory when it reads from several places at once, one of Zen 4 and 5 less
# (benchmarks/DECISIONS.md#streams). A pass of more rows than _STREAMED_ROWS keeps the sums of one tile in registers.
_STREAMS = isa.prefetch_plan().streams
_STREAMED_ROWS = 8
# The least bytes of a stream that make it worth while, without and with tile registers: its first AHEAD bytes are not prefetched.
_LEAST_STREAM, _LONG = 16 << 10, 128 << 10

_GROUPS = PANEL // GROUP

# Bytes of activations that are multiplied with some tiles before the next ones are: what stays near a core with the tiles.
_NEAR = 640 << 10
_ANY = 1 << 30  # more than all rows

_Sums = Callable[[Value, int], Value]  # (stream, row) -> 16 sums of products


def activation_encoding(format_name: str, precise: bool = False, in_14_bits: bool = False) -> str:
    """The one of ENCODINGS in which a format reads activations. precise: 16 bits instead of 8. Rotated activations stay in 8 bits,
    whose error is a fiftieth of that of the weights (benchmarks/DECISIONS.md#rotated-activations). in_14_bits: 14 bits in
    any case, where the format can read them.
    """
    if in_14_bits and "int14" in encodings(format_name):
        return "int14"
    if format_name == PAIRED:
        return "bf16" if isa.has_bf16_tiles() else "rounded"
    if format_name in NUMBERS or format_name in FLOAT_CODES:
        return "f32"
    if FORMATS[format_name].rotated:
        return "rotated"
    return "int16" if precise else "int8"


def encodings(format_name: str) -> tuple[str, ...]:
    """Every encoding in which a format can read activations; bf16 is for tile registers."""
    if format_name == PAIRED:
        return "rounded", "bf16"
    if format_name not in READERS:
        return ("f32",)
    if FORMATS[format_name].rotated:
        return ("rotated",)
    in_14_bits = format_name in SUPERBLOCKS and not isa.has_sixteen_registers()
    return "int8", "int16", "bf16", *(("int14",) * in_14_bits)


def prompt_encoding(format_name: str, precise: bool = False) -> str:
    """`activation_encoding` for tokens of prompts in bf16: where bf16 has tile registers, codes are dequantized, unless rotated."""
    dequantizes = format_name in READERS and not FORMATS[format_name].rotated and isa.has_bf16_tiles()
    return activation_encoding(PAIRED if dequantizes else format_name, precise)


def _few_rows(name: str, encoding: str, counts: Iterable[int]) -> Callable[[Pass], None]:
    """A pass for the numbers of rows in `counts`. Its sums stay in registers, or in the first cache."""
    step, by_panels = bytes_between_rows(encoding), {"rotated": _sums_of_panels, "int14": superblocks.few_rows_sums}
    sums_of = by_panels.get(encoding, _quantized_sums)

    def emit(p: Pass) -> None:
        o, (acts, block_rows) = p.o, block_of(p, step)

        def of(count: int) -> None:
            if name in READERS:
                streams = p.num_tiles if count <= _STREAMED_ROWS else o.number(1)
                sums = sums_of(p, name, encoding, count, acts, block_rows, streams)
                with o.loop(streams) as stream:
                    p.finish_rows(stream, [(row, sums(stream, row)) for row in range(count)])
                return
            stride = block_rows * 4
            if name in NUMBERS:
                found = number_sums(o, name, count, p.weights, p.operands.in_features, acts, stride)
            else:
                found = _paired_sums(p, count, acts, stride) if name == PAIRED else _float_codes_sums(p, name, count, acts, stride)
            p.finish_rows(o.number(0), list(enumerate(found)))

        o.switch(p.rows, {count: partial(of, count) for count in counts})

    return emit


def _counts(most: int) -> list[int]:
    """The numbers of rows that one pass serves: up to 8, and `most`."""
    return sorted({*range(1, min(most, 8) + 1), most})


def _quantized_sums(p: Pass, name: str, encoding: str, rows: int, acts: Value, block_rows: Value, streams: Value) -> _Sums:
    """The sums of `rows` rows and one tile of each stream, from activations in records."""
    o, record_bytes = p.o, bytes_between_rows(encoding)
    panel_size = panel_bytes(FORMATS[name])
    group_bytes = panel_size // _GROUPS
    groups = p.operands.in_features >> 5
    stride = block_rows * record_bytes
    if rows > _STREAMED_ROWS:  # of one tile, in registers
        sums = o.variables(rows)
    else:
        place = o.stack(64 * rows * _STREAMS)

    def total(stream: Value, row: int, align: int | None = None) -> Variable:
        if rows > _STREAMED_ROWS:
            return sums[row]
        return o.variable_at(place + stream * (64 * rows) + 64 * row, F32X16, align)

    with o.loop(streams) as stream:
        for row in range(rows):
            total(stream, row).set(o.number(0.0, F32X16))
    with o.loop(groups.rounded_up(_GROUPS)) as panel:
        first = panel * _GROUPS
        inside = (groups - first).smaller(_GROUPS)
        with o.loop(inside) as index, o.loop(streams) as stream:
            here = p.weights + stream * p.bytes_apart + panel * panel_size
            (here + index * group_bytes).fetch(AHEAD, group_bytes, INTO_FIRST or rows > _STREAMED_ROWS)
            records = acts + (first + index) * stride
            if isa.has_sixteen_registers():
                own_totals = [total(stream, row, 32) for row in range(rows)]
                ymm.add_rows(encoding, lambda at: READERS[name](at, inside, index), here.base(), records.base(), own_totals)
            else:
                group = READERS[name](here, inside, index)
                shifted = sum_of_weights(group) if encoding == "int8" else None
                for row in range(rows):
                    row_total = total(stream, row)
                    row_total.set(add_group(group, shifted, records + row * record_bytes, row_total.get()))
    return lambda stream, row: total(stream, row).get()


def _sums_of_panels(p: Pass, name: str, encoding: str, rows: int, acts: Value, block_rows: Value, streams: Value) -> _Sums:
    """`_quantized_sums` of weights that are whole numbers under one scale for a panel: sums of integers over each panel."""
    o, panel_size = p.o, panel_bytes(FORMATS[name])
    group_bytes = panel_size // _GROUPS
    place, dots_at = o.stack(64 * rows * _STREAMS), o.stack(64 * rows)

    def total(stream: Value, row: int) -> Variable:
        return o.variable_at(place + stream * (64 * rows) + 64 * row, F32X16)

    with o.loop(streams) as stream:
        for row in range(rows):
            total(stream, row).set(o.number(0.0, F32X16))
    in_memory = isa.has_sixteen_registers()
    dots = [o.variable_at(dots_at + 64 * row, I32X16, 32) for row in range(rows)] if in_memory else o.variables(rows, 0, I32X16)
    with o.loop(p.operands.in_features // PANEL) as panel, o.loop(streams) as stream:
        here, inputs = p.weights + stream * p.bytes_apart + panel * panel_size, acts + panel * block_rows * PANEL_RECORD
        inside = p.row & (BLOCK_ROWS - 1)
        factors = [factors_of_panel(inputs - inside * PANEL_LINE, block_rows, inside + row) for row in range(rows)]
        for dot, (_, minus_sum) in zip(dots, factors, strict=True):
            dot.set(o.number(0, I32X16) if in_memory and ymm.multiplies_signed(encoding) else minus_sum.every(I32))
        with o.loop(_GROUPS) as index:
            (here + index * group_bytes).fetch(AHEAD, group_bytes, INTO_FIRST or rows > _STREAMED_ROWS)
            group_inputs = inputs_of_group(inputs, block_rows, index)
            if in_memory:
                ymm.add_rows(
                    encoding, lambda at: READERS[name](at, o.number(_GROUPS), index), here.base(), group_inputs.base(), dots
                )
            else:
                codes = READERS[name](here, o.number(_GROUPS), index).codes
                for row, dot in enumerate(dots):
                    dot.set(add_products(dot.get(), codes, group_inputs + row * PANEL_LINE))
        scale = integer_scale(name, here)
        for row, (dot, (scale_of_row, _)) in enumerate(zip(dots, factors, strict=True)):
            sums = total(stream, row)
            sums.set(end_panel(dot.get(), scale, scale_of_row, sums.get()))
    return lambda stream, row: total(stream, row).get()


def number_sums(o: Ops, name: str, rows: int, matrix: Value, in_features: Value, acts: Value, stride: Value) -> list[Value]:
    """For each row the sums of one tile of numbers times f32 activations: even and odd inputs are summed apart, then together.

    matrix: the address of the tile. acts: of the first row; rows lie side by side, inputs `stride` bytes apart.
    """
    size, load = NUMBERS[name]
    sums = [o.variables(2) for _ in range(rows)]

    def add_input(k: Value, parity: int) -> None:
        address = matrix + k * size
        weights = address.f32() if load == "f32" else address.f16()
        here = acts + k * stride
        for row in range(rows):
            total = sums[row][parity]
            total.set(fma(weights, (here + 4 * row).every(F32), total.get()))

    for parities in _turns_of_parities(rows > 3):
        with o.loop(in_features >> 1) as pair:
            even = pair << 1
            if parities[0] == 0:
                (matrix + even * size).fetch(AHEAD, 2 * size, INTO_FIRST)
            for parity in parities:
                add_input(even + parity, parity)
    with o.when(in_features.trunc(I1)):
        add_input(in_features - 1, 0)
    return [even.get() + odd.get() for even, odd in sums]


def _turns_of_parities(many: bool) -> tuple[tuple[int, ...], ...]:
    """Even and odd inputs in one loop, or in two where sixteen registers do not hold the sums of both of many rows."""
    return ((0,), (1,)) if isa.has_sixteen_registers() and many else ((0, 1),)


def _add_pairs(
    o: Ops, rows: int, acts: Value, stride: Value, numbers: Callable[[Value], Sequence[Value]], fetch: Callable[[Value], None]
) -> list[Value]:
    """The sums of 32 inputs times `rows` rows of numbers [input][row]: even and odd inputs apart from zero on, then together.

    numbers: the weights of an even input and the next one, by the number of the pair.
    """
    evens, odds = o.variables(rows), o.variables(rows)
    for parities in _turns_of_parities(rows > 2):
        with o.loop(GROUP // 2) as pair:
            if parities[0] == 0:
                fetch(pair)
            weights = numbers(pair)
            for parity in parities:
                inputs = acts + (pair * 2 + parity) * stride
                for row, total in enumerate((evens, odds)[parity]):
                    total.set(fma(weights[parity], (inputs + 4 * row).every(F32), total.get()))
    return [even.get() + odd.get() for even, odd in zip(evens, odds, strict=True)]


def _float_codes_sums(p: Pass, name: str, rows: int, acts: Value, stride: Value) -> list[Value]:
    """For each row the sums of one tile, from f32 activations: the sums of a group of 32 (`_add_pairs`) times the group's scale are
    added to the groups before.
    """
    o, codes = p.o, FLOAT_CODES[name]
    panel_size, shift = panel_bytes(FORMATS[name]), codes.size.bit_length() - 6
    totals, groups = o.variables(rows), p.operands.in_features >> 5
    with o.loop(groups.rounded_up(_GROUPS)) as panel:
        first = panel * _GROUPS
        inside = (groups - first).smaller(_GROUPS)
        here = p.weights + panel * panel_size
        scales = here + inside * (16 * codes.input_bytes)
        with o.loop(inside) as index:
            (here + index * (panel_size // _GROUPS)).fetch(AHEAD, panel_size // _GROUPS, INTO_FIRST)
            at = here + index * (16 * codes.input_bytes)
            sums = _add_pairs(
                o, rows, acts + (first + index) * (stride * GROUP), stride, lambda pair: codes.pair(at + pair * codes.input_bytes),
                lambda pair: None,
            )  # fmt: skip
            scale = (scales + (index >> shift) * 64).f32()
            for group_sum, total in zip(sums, totals, strict=True):
                total.set(fma(group_sum * codes.factor, scale, total.get()))
    return [total.get() for total in totals]


def _paired_sums(p: Pass, rows: int, acts: Value, stride: Value) -> list[Value]:
    """For each row the sums of one tile, from "rounded" activations, with the bits of `tiles.bf16_pass`: the sums of a group of 32
    (`_add_pairs`) are added to the groups before.
    """
    o = p.o
    totals = o.variables(rows)
    restore = o.flush_small_numbers()
    with o.loop(p.operands.in_features.rounded_up(GROUP)) as group:
        here = p.weights + group * (GROUP // 2 * 64)

        def numbers(pair: Value) -> list[Value]:
            words = (here + pair * 64).i32()
            return [half.bits(F32X16) for half in (words << 16, words & 0xFFFF0000)]

        sums = _add_pairs(
            o, rows, acts + group * GROUP * stride, stride, numbers, lambda pair: (here + pair * 64).fetch(AHEAD, 64, INTO_FIRST)
        )
        for group_sum, total in zip(sums, totals, strict=True):
            total.set(total.get() + group_sum)
    restore()
    return [total.get() for total in totals]


@cache
def linear_kernel(format_name: str, encoding: str) -> int:
    """Address of the compiled kernel of a format, for activations in one of ENCODINGS:

    (matrix, tile_bytes, in_features, first tile, end tile, activations, bytes of a row of activations, rows, bias, residual,
    out, stride)

    all int64, addresses and byte counts. Writes out[row * stride + 64 * tile] for tiles first..end and all rows.
    Raises BackendError for an encoding in which the format does not read activations, KernelDiffersError if its check fails.
    """
    if encoding not in (known := encodings(format_name)):
        raise BackendError(f"{format_name} weights are multiplied with {' or '.join(known)} activations, got {encoding}")
    name, check = f"linear-{format_name}-{encoding}", partial(selfcheck.linear, format_name, encoding)

    def compiled(in_tiles: bool) -> int:
        return machine_code.address(name + "-tiles" * in_tiles, 12, lambda: made(format_name, encoding, in_tiles), check=check)

    has_two = isa.has_tiles() and format_name in READERS and encoding in ("int8", "int16", "rotated", "int14")
    return machine_code.first_sound([partial(compiled, in_tiles) for in_tiles in ((True, False) if has_two else (False,))])


@dataclass(frozen=True)
class _Loop:
    """How a kernel goes through its rows, some at a time (a span), and with each span through its tiles.

    few, many: the passes over a span of fewer than `least` rows and of more; a kernel may have only one of them.
    """

    few: Callable[[Pass], None] | None = None
    many: Callable[[Pass], None] | None = None
    least: int = 0
    few_at_once: int = 8  # rows of a pass over few; what is left of a block goes eight at a time
    many_at_once: int = tiles.MANY  # rows of a pass over many
    unit: int = BLOCK_ROWS  # rows of which a span has a multiple
    spans: tuple[int, int] = (BLOCK_ROWS, tiles.MANY)  # the rows of the shortest span and of the longest
    # Spans of up to so many rows are multiplied with a tile of each stream at a time, if for passes over many it has so many bytes.
    streams: tuple[int, int] = (0, _LEAST_STREAM)
    widths: tuple[int, int] = (1, 1)  # neighbouring tiles of other passes: over up to a block of rows, and over more
    shape: str = ""  # that `many` gives tile registers (`tiles.shape`), if it uses them


def made(format_name: str, encoding: str, in_tiles: bool = True) -> Callable[..., None]:
    """The Python function of `linear_kernel`. in_tiles: with tile registers for many rows, where the processor has them."""
    return _compilable(_loop(format_name, encoding, in_tiles and isa.has_tiles()))


def _loop(name: str, encoding: str, in_tiles: bool) -> _Loop:
    pair, has_codes = 2 * BLOCK_ROWS, name in READERS
    if encoding == "bf16" and name == PAIRED:
        return _Loop(many=tiles.bf16_pass, many_at_once=pair, unit=pair, spans=(pair, _ANY), widths=(4, 2), shape=PAIRED)
    if encoding == "bf16":
        most, widths = tiles.MOST_ROWS, (tiles.MOST_TILES, tiles.MOST_TILES)
        dequantized = partial(tiles.dequantized_pass, name)
        return _Loop(many=dequantized, many_at_once=most, spans=(most, most), widths=widths, shape=PAIRED)
    if encoding == "rotated" and in_tiles:
        panels, spans = partial(tiles.panels_pass, name), (pair, tiles.MANY)
        return _Loop(many=panels, unit=pair, spans=spans, streams=(BLOCK_ROWS, _LONG), widths=(1, 2), shape=tiles.OF_PANELS)
    if encoding == "int14":
        most = superblocks.MOST_BESIDE_TILES if in_tiles else superblocks.MOST_ROWS
        in_vectors = _few_rows(name, encoding, _counts(most))
        if in_tiles:
            many, spans = partial(superblocks.many_rows_pass, name), (BLOCK_ROWS, tiles.MANY)
            return _Loop(in_vectors, many, superblocks.LEAST, most, spans=spans, streams=(BLOCK_ROWS, _LONG), shape=tiles.OF_PANELS)
        return _Loop(in_vectors, few_at_once=most, streams=(BLOCK_ROWS - 1, _LEAST_STREAM))
    if isa.has_sixteen_registers() and has_codes:
        most, many = ymm.few(name, encoding), partial(ymm.rows_pass, name, encoding)
        few = _few_rows(name, encoding, _counts(most)) if most else None
        return _Loop(few, many, most + 1, most, streams=(BLOCK_ROWS, _LEAST_STREAM))
    most = _MOST_ROWS if has_codes and not in_tiles else _MOST_OF_NUMBERS
    few = _few_rows(name, encoding, _counts(most))
    if has_codes and in_tiles:
        least, many = tiles.least(name), partial(tiles.many_rows_pass, name, encoding)
        shortest = -(-least // BLOCK_ROWS) * BLOCK_ROWS
        return _Loop(few, many, least, most, spans=(shortest, tiles.MANY), streams=(BLOCK_ROWS, _LONG), shape=name)
    return _Loop(few, few_at_once=most, streams=(BLOCK_ROWS - 1 if has_codes else 0, _LEAST_STREAM))


def _compilable(loop: _Loop) -> Callable[..., None]:
    """The kernel that goes through rows and tiles so."""
    few_rows, many_rows = (pass_of(one) if one else None for one in (loop.few, loop.many))
    only_few, only_many, least = loop.many is None, loop.few is None, loop.least
    few_at_once, many_at_once, unit, (shortest, longest) = loop.few_at_once, loop.many_at_once, loop.unit, loop.spans
    (streamed_rows, stream_bytes), (narrow, wide) = loop.streams, loop.widths
    has_shape, shape = bool(loop.shape), loop.shape

    def linear(matrix, tile_bytes, in_features, first, end, acts, row_bytes, rows, bias, residual, out, stride):
        operands = Operands(matrix, tile_bytes, in_features, acts, row_bytes, rows, bias, residual, out, stride)
        if has_shape and rows >= least:
            tiles.shape(shape, rows)
        span = max(shortest, min(longest, _NEAR // row_bytes // unit * unit))
        for top in range(0, rows, span):
            bottom = min(rows, top + span)
            count = bottom - top
            length = (end - first) // _STREAMS if count <= streamed_rows else 0
            if length * tile_bytes < (stream_bytes if count >= least else _LEAST_STREAM):
                length = 0
            done, width = 0, narrow if count <= BLOCK_ROWS else wide
            while done < end - first:
                tile, num_tiles, apart = first + done, min(width, end - first - done), 1
                if done < _STREAMS * length:
                    tile, num_tiles, apart = first + done // _STREAMS, _STREAMS, length
                done += num_tiles
                row = top
                while row < bottom:
                    if only_few or (not only_many and count < least):
                        left = min(BLOCK_ROWS - row % BLOCK_ROWS, rows - row)  # of the block
                        number = few_at_once if left >= few_at_once else min(left, 8)
                        few_rows(operands, tile, num_tiles, apart, row, number)
                    else:
                        number = min(bottom - row, many_at_once)
                        many_rows(operands, tile, num_tiles, apart, row, number)
                    row += number
        if has_shape and rows >= least:
            tiles.release()

    return linear


def assembly(format_name: str, rows: int) -> str:
    """The instructions with which this processor multiplies one tile of a format with a few rows, 1 to BLOCK_ROWS, loop by loop.

    They are compiled for this. Raises FormatError for a format that is not known.
    """
    name, encoding = get_format(format_name).name, activation_encoding(format_name)
    many = _loop(name, encoding, in_tiles=False).many if isa.has_sixteen_registers() and not ymm.few(name, encoding) else None
    run = pass_of(many or _few_rows(name, encoding, [rows]))

    def one_pass(matrix, tile_bytes, in_features, tile, acts, row_bytes, bias, residual, out, stride):
        run(Operands(matrix, tile_bytes, in_features, acts, row_bytes, rows, bias, residual, out, stride), tile, 1, 0, 0, rows)

    return machine_code.assembly(one_pass, 10)

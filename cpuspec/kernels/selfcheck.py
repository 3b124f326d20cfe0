"""Kernels check themselves: what each computes from small random data is compared with a twin in numpy, once, when it was compiled.

A twin takes activations and weights as numbers in f64 and multiplies them. Sums of f32 differ from its results by rounding alone,
which `_ALLOWED` covers; a wrong constant, a wrong address or a wrong instruction differs by more. Besides, a row must have the same
bits whatever the number of rows, so each pass of a kernel is held to the others. A new kernel needs a row in `RECORDS`, if its
activations are written in a new way, and `check=` where it is compiled (`machine_code.first_sound`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats import FORMATS, Format, QuantTensor
from cpuspec.formats.format import F32, U8, hadamard
from cpuspec.formats.kv import get_kv_format, rounded, stored_dims
from cpuspec.formats.packing import GROUP, PANEL, TILE, aligned_bytes, pack
from cpuspec.kernels import isa, kv_rows, layout, machine_code, pointwise
from cpuspec.kernels.layout import WALK
from cpuspec.kernels.products import (
    BLOCK_ROWS,
    BYTES,
    ENCODINGS,
    GROUP_SUMS,
    HALF_SUMS,
    LAST_LINE,
    LOW_BYTES,
    LOWER_BYTES,
    MINUS_8_SUMS,
    MINUS_16_SUMS,
    MINUS_32_HIGH,
    MINUS_32_LOW,
    MINUS_128_SUMS,
    MINUS_LOWER_SUMS,
    MINUS_SUMS,
    MOST_OF_14_BITS,
    NUM_LINES,
    PANEL_LINE,
    PANEL_RECORD,
    SCALE,
    SHIFT,
    VALUE_SUM,
    row_bytes,
)

_KEY_DIMS, _VALUE_DIMS, _POSITIONS, _CAP = 80, 48, 203, 1.5  # of attention
_IN_CODES = ("int8", "int16", "rotated", "int14")  # encodings
_OF_PANELS = ("rotated", "int14")  # those with one scale for a panel
_SCRATCH_BYTES = 4 << 20  # more than a walk over such keys and values needs

# Numbers of rows: those of each pass for few rows, and more than one pass of any kernel serves. The first has all others' rows.
_ROWS = (130, *range(17, 0, -1))
_OUTPUTS = 99  # seven tiles, the last in part: passes over four, two and one of them
_APART_BYTES = 128 << 10  # from a tile to the next, so that kernels read several tiles in turns
# By the bytes that "rotated" and "int14" activations have of a panel, the pieces of them that lie together.
_PIECES = {
    PANEL_RECORD: (*[PANEL_LINE] * (PANEL // PANEL_LINE), 4, 4, PANEL_RECORD - PANEL - 8),
    NUM_LINES * PANEL_LINE: (PANEL_LINE,) * NUM_LINES,
}
_ALLOWED = 1e-6  # of the sum of the magnitudes of all products: more than twice what rounding does in any format
_TIE = 2.0**-18  # of a weight of attention: so near to the middle of two numbers in bf16, it may be rounded to either


class Inputs(NamedTuple):
    """Rows as groups of 32 codes: x = scale * code + shift."""

    codes: NDArray[np.int64]  # [T, groups, 32]
    scale: F32  # [T, groups]
    shift: F32  # [T, groups]
    value_sum: F32  # [T, groups]: of the group's x


def records(inputs: Inputs, encoding: str, in_words: bool) -> U8:
    """The bytes of records of "int8" or "int16" activations, [T, groups, bytes], or of what "rotated" and "int14" ones have of
    a panel, [T, panels, bytes]. in_words: whether "int16" numbers lie as words (see `products`).
    """
    codes = inputs.codes
    if encoding == "rotated":
        panels = codes.reshape(len(codes), -1, PANEL).astype(np.int8).view(np.uint8)
        scales = inputs.scale[:, :: PANEL // GROUP].copy().view(np.uint8).reshape(*panels.shape[:2], 4)
        sums = (-128 * codes.reshape(panels.shape).sum(2)).astype("<i4").view(np.uint8).reshape(scales.shape)
        return np.concatenate([panels, scales, sums, np.zeros((*panels.shape[:2], PANEL_RECORD - PANEL - 8), np.uint8)], axis=2)
    if encoding == "int14":
        return _in_lines(codes.reshape(len(codes), -1, PANEL), inputs.scale[:, :: PANEL // GROUP])
    out = np.zeros((*inputs.scale.shape, ENCODINGS[encoding]), np.uint8)

    def put(offset: int, values: NDArray[Any], kind: str) -> None:
        data = np.ascontiguousarray(values.astype(kind)).view(np.uint8).reshape(*out.shape[:2], -1)
        out[:, :, offset : offset + data.shape[2]] = data

    low_bytes = codes.astype(np.int8)
    if encoding == "int8":
        put(0, codes, "i1")
    elif in_words:
        swapped = codes.reshape(*out.shape[:2], -1, 4)[:, :, :, [0, 2, 1, 3]].reshape(codes.shape)
        put(0, swapped[:, :, : GROUP // 2], "<i2")
        put(LOW_BYTES, swapped[:, :, GROUP // 2 :], "<i2")
    else:
        put(0, (codes - low_bytes) >> 8, "i1")
        put(LOW_BYTES, low_bytes, "i1")
    for offset, numbers in ((SCALE, inputs.scale), (SHIFT, inputs.shift), (VALUE_SUM, inputs.value_sum)):
        put(offset, numbers, "<f4")
    low, high = codes[:, :, : GROUP // 2].sum(2), codes[:, :, GROUP // 2 :].sum(2)
    for offset, zero in ((MINUS_8_SUMS, 8), (MINUS_16_SUMS, 16), (MINUS_128_SUMS, 128)):
        put(offset, -zero * (low + high), "<i4")
    put(MINUS_32_LOW, -32 * low, "<i4")
    put(MINUS_32_HIGH, -32 * high, "<i4")
    return out


def _in_lines(codes: NDArray[np.int64], scale: F32) -> U8:
    """The bytes of "int14" activations: codes [T, panels, PANEL], scales [T, panels]."""
    lines = np.zeros((*scale.shape, NUM_LINES, PANEL_LINE), np.uint8)
    planes, shape = (codes >> 7, codes & 127), (*scale.shape, -1, PANEL_LINE)
    for first, plane in zip((BYTES, LOWER_BYTES), planes, strict=True):
        lines[:, :, first : first + PANEL // PANEL_LINE] = plane.astype(np.int8).view(np.uint8).reshape(shape)
    halves, high, low = (one.reshape(*scale.shape, -1, GROUP // 2).sum(3) for one in (codes, *planes))
    groups = halves.reshape(*scale.shape, -1, 2).sum(3)
    for line, first, numbers in (
        (HALF_SUMS, 0, halves.astype("<f4")), (MINUS_SUMS, 0, (-high).astype("<i4")), (MINUS_LOWER_SUMS, 0, (-low).astype("<i4")),
        (LAST_LINE, 0, scale[:, :, None].astype("<f4")), (LAST_LINE, GROUP_SUMS, groups.astype("<f4")),
    ):  # fmt: skip
        lines[:, :, line, first : first + 4 * numbers.shape[2]] = np.ascontiguousarray(numbers).view(np.uint8)
    return lines.reshape(*scale.shape, -1)


# (generator, rows, features) -> what a kernel reads of each row, step by step, [T, steps, bytes], and the numbers it stands for.
_Random = Callable[[np.random.Generator, int, int], tuple[U8, NDArray[Any]]]


def _integers(encoding: str) -> _Random:
    """Random codes. The first row has the largest ones."""

    def random(rng: np.random.Generator, rows: int, features: int) -> tuple[U8, NDArray[Any]]:
        most, shape = {"int16": 127 * 256, "int14": MOST_OF_14_BITS}.get(encoding, 127), (rows, features // GROUP)
        codes = rng.integers(-most, most + 1, (*shape, GROUP))
        codes[0], codes[0, :, 0] = most, -most
        scale, shift = (rng.uniform(0.5, 2, shape) / most).astype(np.float32), np.zeros(shape, np.float32)
        if encoding in _OF_PANELS:
            scale = np.repeat(scale[:, :: PANEL // GROUP], PANEL // GROUP, axis=1)
        if encoding == "int8":
            shift = rng.standard_normal(shape).astype(np.float32)
        x: Any = codes * scale[:, :, None].astype(np.float64) + shift[:, :, None]
        inputs = Inputs(codes, scale, shift, x.sum(2).astype(np.float32))
        found = records(inputs, encoding, in_words=isa.dot_isa() == "avx2")
        return found, hadamard(x.reshape(rows, -1), PANEL if encoding == "rotated" else 0)

    return random


def _numbers(encoding: str) -> _Random:
    """Random numbers, and zeros up to whole groups where the encoding has them."""

    def random(rng: np.random.Generator, rows: int, features: int) -> tuple[U8, NDArray[Any]]:
        tensor = QuantTensor.encode(FORMATS["f32" if encoding == "f32" else "bf16"], rng.standard_normal((rows, features)))
        x = tensor.dequantize()
        data = tensor.data if encoding == "bf16" else x.view(np.uint8)
        padded = np.pad(data, ((0, 0), (0, 0 if encoding == "f32" else -features % GROUP * (data.shape[1] // features))))
        return padded.reshape(rows, -1, ENCODINGS["bf16"] if encoding == "bf16" else 4), x.astype(np.float64)

    return random


RECORDS: Mapping[str, _Random] = MappingProxyType(
    {name: _integers(name) for name in _IN_CODES} | {name: _numbers(name) for name in ("f32", "bf16", "rounded")}
)


def random_tensor(format: Format, out_features: int) -> QuantTensor:
    """Random codes and factors, with a panel in part where the format's blocks allow it. The first row has the largest codes."""
    in_features = PANEL + 3 * format.block_size if format.block_size < PANEL else 2 * PANEL
    rng = np.random.default_rng(1)
    if format.affine is None:
        return QuantTensor.encode(format, rng.standard_normal((out_features, in_features)))
    levels = format.affine.levels
    parts = format.split(rng.integers(0, 256, (out_features, format.row_bytes(in_features)), np.uint8))
    if format.reader != "grids":
        parts["codes"][0] = ((1 << format.code_bits) if levels is None else len(levels)) - 1
    for part in {"d", "base"} & parts.keys():
        parts[part] = (0.01 * rng.standard_normal(parts[part].shape)).astype("<f2")
    if "e" in parts:
        parts["e"] = rng.integers(110, 140, parts["e"].shape, np.uint8)
    if format.name == "nl4_xs":  # scales of every size that a group's steps can be taken from
        parts["head"] = parts["head"] & ~np.uint32(0xFF) | rng.integers(7, 100, parts["head"].shape, np.uint32)
    if format.name == "nl4_i":
        parts["head"] = parts["head"] & ~np.uint32(0xFFFF) | parts["d"].view(np.uint16)
    if format.reader == "e4m3":
        parts["codes"] = np.where(parts["codes"] & 0x7F == 0x7F, 0x7E, parts["codes"])  # the others are nan
    return QuantTensor(format, (out_features, in_features), format.join(parts))


def linear(format_name: str, encoding: str, address: int) -> str:
    """How products of the `linear.linear_kernel` at an address differ from the twin's, or from each other; "" if they do not."""
    tensor, rng = random_tensor(FORMATS[format_name], _OUTPUTS), np.random.default_rng(2)
    x_records, x = RECORDS[encoding](rng, _ROWS[0], tensor.shape[1])
    weights = tensor.dequantize()
    if encoding in ("bf16", "rounded"):
        weights = QuantTensor.encode(FORMATS["bf16"], weights).dequantize()
    added, bias = (rng.standard_normal((rows, -(-_OUTPUTS // TILE) * TILE)).astype(np.float32) for rows in (_ROWS[0], 1))
    products, magnitudes = x @ weights.T.astype(np.float64), np.abs(x) @ np.abs(weights.T).astype(np.float64)
    packed, stride = pack(tensor), row_bytes(encoding, tensor.shape[1])
    kernel = machine_code.function(address, 12)
    for tile_bytes in (packed.tile_bytes, _APART_BYTES):
        tiles, sums = aligned_bytes((len(packed.data), tile_bytes)), tile_bytes == _APART_BYTES
        tiles[:, : packed.tile_bytes] = packed.data
        whole: Any = None
        for rows in _ROWS:
            acts, out = in_blocks(x_records[:rows], stride), np.full((rows, added.shape[1]), np.nan, np.float32)
            kernel(
                tiles.ctypes.data, tile_bytes, tensor.shape[1], 0, len(tiles), acts.ctypes.data, stride, rows,
                bias.ctypes.data if sums else 0, added.ctypes.data if sums else 0, out.ctypes.data, out.strides[0],
            )  # fmt: skip
            got = out[:, :_OUTPUTS]
            if whole is None:
                whole, more = got, (added + bias)[:, :_OUTPUTS] * sums
                error = np.max(np.abs(got - products - more) / (magnitudes + np.abs(more)))
                if not error <= _ALLOWED:
                    return f"{rows} rows are {error:.1e} from numpy's, where {_ALLOWED:.0e} is allowed"
            elif not np.array_equal(got.view(np.uint32), whole[:rows].view(np.uint32)):
                return f"{rows} rows have other bits than the same among {_ROWS[0]}"
    return ""


@dataclass(frozen=True)
class Attention:
    """What a kernel of attention computes over a chunk of keys and values."""

    format_name: str
    queries: int  # that walk over a chunk together at most
    windowed: bool = False
    capped: bool = False
    numbers: str = "f32"  # the KV format to which everything that is multiplied is rounded
    rope_dims: int | None = None  # of latent attention: numbers of a key that are no values

    def check(self, address: int) -> str:
        """How results of the kernel at an address differ from the twin's, or from each other; "" if they do not."""
        kv_format, to, rng = get_kv_format(self.format_name), get_kv_format(self.numbers), np.random.default_rng(3)
        dims, value_dims = (_KEY_DIMS, _VALUE_DIMS) if self.rope_dims is None else (_KEY_DIMS + self.rope_dims, 0)
        k, v = (rng.standard_normal((_POSITIONS, size)).astype(np.float32) for size in (dims, value_dims))
        queries = rng.standard_normal((self.queries, dims)).astype(np.float32) / np.float32(np.sqrt(dims))
        cache = aligned_bytes((kv_rows.chunk_bytes(self.format_name, dims, value_dims),))
        cache[:] = 0xFF  # whatever was in memory before must not show
        append = machine_code.function(kv_rows.append_kernel(self.format_name), 6)
        for index in range(_POSITIONS):
            append(cache.ctypes.data, dims, value_dims, index, k[index].ctypes.data, v[index].ctypes.data)
        lengths = _POSITIONS - np.arange(self.queries) * 5 % (_POSITIONS - 1)
        starts = lengths // 3 * self.windowed

        keys = rounded(kv_format, k)
        values = rounded(kv_format, v) if value_dims else keys
        multiplied = [rounded(to, rows).astype(np.float64) for rows in (queries, keys, values)]
        scores = multiplied[0] @ multiplied[1].T
        scores = _CAP * np.tanh(scores / _CAP) if self.capped else scores
        seen = (np.arange(_POSITIONS) < lengths[:, None]) & (np.arange(_POSITIONS) >= starts[:, None])
        weights = np.exp(scores - np.max(scores, axis=1, where=seen, initial=-np.inf, keepdims=True)) * seen
        wanted = rounded(to, weights.astype(np.float32)) @ multiplied[2] / weights.sum(1, keepdims=True)
        tie = 0.0 if self.numbers == "f32" else _TIE
        ends = [rounded(to, (factor * weights).astype(np.float32)) for factor in (1 - tie, 1 + tie)]
        either = (ends[1] - ends[0]) @ np.abs(multiplied[2]) / weights.sum(1, keepdims=True)
        valued = np.arange(values.shape[1]) % (dims // 2) >= (self.rope_dims or 0) // 2

        size = 4 * stored_dims(kv_format, values.shape[1])
        scratch, partials = aligned_bytes((_SCRATCH_BYTES,)), aligned_bytes((self.queries, size + 128))
        walk, results = scratch[: WALK.itemsize].view(WALK)[0], partials.view(np.float32)
        path, kernel = np.arange(_POSITIONS, dtype=np.int64), machine_code.function(address, 8)
        walk["caps"] = _CAP
        whole: Any = None
        for count in (self.queries, *range(min(self.queries, 17) - 1, 0, -1)):
            for number in range(count):
                walk["queries"][number], walk["partials"][number] = queries[number].ctypes.data, partials[number].ctypes.data
                walk["starts"][number], walk["lengths"][number] = starts[number], lengths[number]
            kernel(count, cache.ctypes.data, dims, value_dims or dims, 0, _POSITIONS, path.ctypes.data, scratch.ctypes.data)
            if whole is None:
                whole = results.copy()
                got = results[:, : values.shape[1]] / results[:, size // 4 : size // 4 + 1]
                error = np.max((np.abs(got - wanted) - either)[:, valued])
                if not error <= _ALLOWED:
                    return f"{count} queries are {error:.1e} from numpy's, where {_ALLOWED:.0e} is allowed"
            elif not np.array_equal(results[:count], whole[:count]):
                return f"{count} queries have other bits than the same among {self.queries}"
        return ""


def decoder(format_name: str, address: int) -> str:
    """How rows of the `embed.row_decoder` at an address differ from `Format.decode`; "" if they do not."""
    tensor, kernel = random_tensor(FORMATS[format_name], 3), machine_code.function(address, 3)
    out = np.empty(tensor.shape, np.float32)
    for row, to in zip(tensor.data, out, strict=True):
        kernel(row.ctypes.data, tensor.shape[1] // tensor.format.block_size, to.ctypes.data)
    return "" if np.array_equal(out, tensor.dequantize()) else "rows differ from numpy's"


def run(address: int) -> str:
    """How activations that the `operations.run` at an address norms and writes differ from the twin's; "" if they do not."""
    rows, features, rng, team = 11, 2 * PANEL, np.random.default_rng(4), np.zeros(1024, np.uint8)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, features), features))
    acts = {name: np.zeros((features // GROUP, rows, ENCODINGS[name]), np.uint8) for name in (*_IN_CODES, "bf16")}
    acts |= {name: np.zeros((features, rows, 4), np.uint8) for name in ("f32", "rounded")}
    acts |= {name: np.zeros((features // PANEL, rows, ENCODINGS[name] * PANEL // GROUP), np.uint8) for name in _OF_PANELS}
    places = {name: laid.ctypes.data for name, laid in acts.items()}
    operands = {"kind": pointwise.NORM, "rows": x.ctypes.data, "stride": x.strides[0], "weight": weight.ctypes.data, "eps": 1e-5}
    operations, _ = layout.program([("prepare", operands | places | {"features": features})])
    state, counters = np.zeros((), layout.STATE), np.zeros(2, np.int64)
    state["num_rows"] = rows
    job = team[: layout.TEAM.itemsize].view(layout.TEAM)[0]["job"]
    job["operations"], job["num_operations"] = operations.ctypes.data, 1
    job["state"], job["counters"] = state.ctypes.data, counters.ctypes.data
    machine_code.function(address, 3)(team.ctypes.data, 1, 0)

    normed = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True) + 1e-5) * weight
    for name, laid in acts.items():
        own = _together(laid) if name in _OF_PANELS else np.ascontiguousarray(laid.swapaxes(0, 1))  # [row, step, bytes]
        wanted, step = normed, 2.0**-7 * np.abs(normed)  # of numbers in bf16
        if name in ("f32", "rounded"):
            got, step = own.view(np.float32)[:, :, 0], step * (2.0**-14 if name == "f32" else 1)
        elif name == "bf16":
            got = (own.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(rows, -1)
        else:
            got, step = _read(own, name)
            wanted = hadamard(normed, PANEL) if name == "rotated" else normed
        if not np.all(np.abs(got - wanted) <= 0.5001 * step + 1e-6):
            return f"activations in {name} differ from numpy's"
    return ""


def _read(own: U8, encoding: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """What records [T, groups, bytes] stand for and the steps between neighbours, [T, inputs] both. Nan where a sum is not of the
    codes.
    """
    if encoding in _OF_PANELS:
        panels, scale = own[:, :, :PANEL].view(np.int8).astype(np.int64), own[:, :, PANEL : PANEL + 4].view(np.float32)
        if encoding == "int14":
            low, at = own[:, :, LOWER_BYTES * PANEL_LINE :][:, :, :PANEL], LAST_LINE * PANEL_LINE
            panels, scale = panels * 128 + low, own[:, :, at : at + 4].view(np.float32)
        inputs = Inputs(panels.reshape(len(own), -1, GROUP), np.repeat(scale[:, :, 0], PANEL // GROUP, axis=1), scale, scale)
        x = np.where(np.all(records(inputs, encoding, False) == own, axis=2)[:, :, None], panels * scale.astype(np.float64), np.nan)
        return x.reshape(len(own), -1), np.repeat(scale[:, :, 0], PANEL, axis=1)
    in_words = encoding == "int16" and isa.dot_isa() == "avx2"
    codes = own[:, :, :GROUP].view(np.int8).astype(np.int64)
    if in_words:
        words = np.concatenate([own[:, :, :GROUP], own[:, :, LOW_BYTES : LOW_BYTES + GROUP]], axis=2).view(np.int16)
        codes = words.reshape(*words.shape[:2], -1, 4)[:, :, :, [0, 2, 1, 3]].reshape(words.shape).astype(np.int64)
    elif encoding == "int16":
        codes = codes * 256 + own[:, :, LOW_BYTES : LOW_BYTES + GROUP].view(np.int8)
    scale, shift, value_sum = (own[:, :, at : at + 4].view(np.float32)[:, :, 0] for at in (SCALE, SHIFT, VALUE_SUM))
    x = codes * scale[:, :, None].astype(np.float64) + shift[:, :, None]
    sound = np.all(records(Inputs(codes, scale, shift, value_sum), encoding, in_words) == own, axis=2)
    sound &= np.abs(value_sum - x.sum(2)) <= 1e-5 * np.abs(x).sum(2)
    shape = len(x), -1
    return np.where(sound[:, :, None], x, np.nan).reshape(shape), np.repeat(scale, GROUP, axis=1)


def _together(laid: U8) -> U8:
    """Activations of _OF_PANELS [panels, T, bytes] of a block, of which pieces lie together, as records [T, panels, bytes]."""
    pieces = np.split(laid.reshape(len(laid), -1), np.cumsum(_PIECES[laid.shape[2]])[:-1] * laid.shape[1], axis=1)
    return np.concatenate([piece.reshape(*laid.shape[:2], -1) for piece in pieces], axis=2).swapaxes(0, 1).copy()


def in_blocks(steps: U8, stride: int) -> U8:
    """What each row has, [T, steps, bytes], as kernels read it: step by step in blocks of rows, and whole vectors behind them. Of
    _OF_PANELS pieces of a step lie together.
    """
    pieces = _PIECES.get(steps.shape[2], steps.shape[2:])
    out = np.zeros((len(steps) + 2 * BLOCK_ROWS) * stride, np.uint8)
    for first in range(0, len(steps), BLOCK_ROWS):
        block = steps[first : first + BLOCK_ROWS].swapaxes(0, 1)
        parts = np.split(block, np.cumsum(pieces)[:-1], axis=2)
        out[first * stride :][: block.size] = np.concatenate([part.reshape(len(block), -1) for part in parts], axis=1).ravel()
    return out

"""How the keys and values of one head lie in a cache slot, and how kernels read and write them.

A head's cache is a row of chunks: all keys of a chunk, then all its values. Keys lie in blocks of 16 positions, [group of
dimensions][16 scales, 16 shifts][dimension][16 positions], so that 16 scores are sixteen lanes and no sum crosses lanes. Values lie
as rows [group of dimensions][scale, shift][dimension]. int8 and int4 have groups with scales and shifts; other rows are plain
numbers. In int4 two dimensions share a byte: byte j of each 16 has dimension j of 32 in its low half and 16 + j in its high half.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from cpuspec.formats.kv import INT4, INT8, get_kv_format, stored_bytes
from cpuspec.formats.tensor import U8
from cpuspec.kernels import machine_code, simd
from cpuspec.kernels.ops import F16, F32X16, I1, I8, I16, I32, I32X16, I64, VOID, Ops, Value, bf16_bits, call, fma, vector_of
from cpuspec.kernels.options import compiled
from cpuspec.kernels.simd import LANES, emitted

CHUNK = 256  # positions of a chunk
WIDENED = "widened"  # keys or values that a kernel widened to f32 for itself


@dataclass(frozen=True)
class Coding:
    """How kernels read and write sixteen numbers of a KV format."""

    size: int  # bytes of an element
    group: int  # dimensions that have a scale and a shift (f16), 0 where there are none
    read: Callable[[Value, Value], Value]  # address, which half of bytes (i32 0 or 1; read where there are two) -> f32x16
    write: Callable[[Value], Value]  # f32x16 -> sixteen elements; the numbers of a group with a scale are codes already
    near: bool = False  # whether they lie in the nearest cache already
    halves: int = 1  # numbers of an element: 2 where a byte has two

    @property
    def header(self) -> int:
        """Bytes before the numbers of a group."""
        return 4 if self.group else 0

    @property
    def unit(self) -> int:
        """Dimensions are padded to a multiple of this."""
        return self.group or LANES

    @property
    def unit_bytes(self) -> int:
        """Bytes of so many dimensions, the group's header included."""
        return self.header + self.unit * self.size // self.halves


def _to_i8(values: Value) -> Value:
    return call("llvm.fptosi.sat.v16i32.v16f32", I32X16, values).trunc(vector_of(I8))


def _half_bytes(address: Value, half: Value) -> Value:
    return (address.u8_codes() >> (half * 4).splat() & 15).sitofp(F32X16)


CODINGS: Mapping[str, Coding] = MappingProxyType(
    {
        WIDENED: Coding(4, 0, lambda at, half: at.f32(), lambda values: values, near=True),
        "f32": Coding(4, 0, lambda at, half: at.f32(), lambda values: values),
        "f16": Coding(2, 0, lambda at, half: at.f16(), lambda values: values.fptrunc(vector_of(F16))),
        "bf16": Coding(2, 0, lambda at, half: at.bf16(), lambda values: (bf16_bits(values) >> 16).trunc(vector_of(I16))),
        "int8": Coding(1, INT8.block_size, lambda at, half: at.i8(), _to_i8),
        "int4": Coding(1, INT4.block_size, _half_bytes, _to_i8, halves=2),
    }
)


def num_chunks(capacity: int) -> int:
    """Chunks of a cache of `capacity` positions."""
    return -(-capacity // CHUNK)


def chunk_bytes(format_name: str, key_dims: int, value_dims: int) -> int:
    """Bytes of a chunk of one head: keys and values of so many numbers."""
    return CHUNK * sum(stored_bytes(get_kv_format(format_name), dims) for dims in (key_dims, value_dims))


def row_shape(format_name: str) -> tuple[int, int, int, int]:
    """Bytes of an element, of a unit's header, dimensions of a unit, and its bytes: what a row is made of."""
    coding = CODINGS[format_name]
    return coding.size, coding.header, coding.unit, coding.unit_bytes


@compiled
def num_units(unit, dims):
    return (dims + unit - 1) // unit


@cache
def append_kernel(format_name: str) -> int:
    """Address of (head's cache, key dims, value dims, index, key, value): put a key and a value, f32, at a cache index."""
    return machine_code.address(f"append-{format_name}", 6, lambda: _append(format_name, *row_shape(format_name)))


def _append(name: str, size: int, header: int, unit: int, unit_bytes: int) -> Callable[..., None]:
    halves = CODINGS[name].halves

    def append(head, key_dims, value_dims, index, key, value):
        key_bytes, value_bytes = num_units(unit, key_dims) * unit_bytes, num_units(unit, value_dims) * unit_bytes
        chunk, place = head + index // CHUNK * (CHUNK * (key_bytes + value_bytes)), index % CHUNK
        block = chunk + place // LANES * (LANES * key_bytes)
        lane, row = place % LANES, chunk + CHUNK * key_bytes + place * value_bytes
        for first in range(0, key_dims, unit):
            k, count, at = key + 4 * first, key_dims - first, first // unit * unit_bytes
            key_at, key_stride = block + LANES * (at + header) + lane * size, LANES * size
            if header > 0:
                _write_group(halves, unit, k, count, key_at, key_stride, block + LANES * at + 2 * lane, 2 * LANES)
            else:
                _write_numbers(name, load_part(k, count), key_at, key_stride)
        for first in range(0, value_dims, unit):
            v, count, at = value + 4 * first, value_dims - first, first // unit * unit_bytes
            if header > 0:
                _write_group(halves, unit, v, count, row + at + header, size, row + at, 2)
            else:
                _write_numbers(name, load_part(v, count), row + at, size)

    return append


@compiled
def _write_group(halves, group, source, count, to, stride, header, shift_after):
    """Write up to `group` numbers as `formats.kv` does, "int4" where halves is 2, else "int8": codes `stride` bytes apart, and the
    group's scale and shift at `header`.
    """
    largest = smallest = load_part(source, count)
    for at in range(LANES, group, LANES):
        values = load_part(source + 4 * at, count - at)
        largest, smallest = simd.max_f32(largest, values), simd.min_f32(smallest, values)
    high, low = simd.max_lanes(largest), simd.min_lanes(smallest)
    if halves == 2:
        shift = simd.as_f16(low)
        scale = simd.as_f16((high - shift) / simd.to_float(15))
    else:
        shift = simd.as_f16(low * simd.half() + high * simd.half())
        scale = simd.as_f16(max(high - shift, shift - low) / simd.to_float(127))
    simd.poke_f16(header + shift_after, shift)
    simd.poke_f16(header, scale)
    inverse, offset = simd.splat_f32(simd.inverse_or_zero(scale)), simd.splat_f32(shift)
    for at in range(0, group, halves * LANES):
        codes = (load_part(source + 4 * at, count - at) - offset) * inverse
        if halves == 2:
            later = (load_part(source + 4 * at + 64, count - at - LANES) - offset) * inverse
            codes = _nearest(codes, 0, 15) + _nearest(later, 0, 15) * simd.splat_f32(simd.to_float(16))
        else:
            codes = _nearest(codes, -127, 127)
        _write_numbers("int8", codes, to + at // halves * stride, stride)


@compiled
def _nearest(values, least, most):
    """The nearest whole numbers from `least` to `most`."""
    above = simd.max_f32(simd.round_f32(values), simd.splat_f32(simd.to_float(least)))
    return simd.min_f32(above, simd.splat_f32(simd.to_float(most)))


def _load_masked(o: Ops, address: Value, count: Value) -> Value:
    """The first `count` numbers at an address, then zeros; nothing beyond them is read."""
    mask = o.value(ir.Constant(vector_of(I64), list(range(LANES)))) < count.splat()
    operands = [o.value(address.pointer()), o.number(4, I32), mask, o.number(0.0, F32X16)]
    return o.call("llvm.masked.load.v16f32.p0", F32X16, *operands)


load_part = simd.operation((types.int64, types.int64), simd.f32x16, _load_masked)


@emitted
def _write_numbers(o: Ops, name: str, values: Value, to: Value, stride: Value) -> None:
    """Write sixteen numbers, encoded, `stride` bytes apart."""
    elements = CODINGS[name].write(values)
    for lane in range(LANES):
        (to + stride * lane).store(elements.lane(lane))


def copy_rows(format_name: str, key_dims: int, value_dims: int, heads: U8, rows: NDArray[np.int32], first: int) -> None:
    """In each head's cache, U8 [heads, bytes], copy keys and values from rising indices `rows` to `first` and following."""
    assert (rows >= np.arange(first, first + len(rows))).all(), "rows move towards the front"
    indices = rows.astype(np.int64)
    shape = *row_shape(format_name), key_dims, value_dims
    _copy_rows_function()(*shape, heads.ctypes.data, *heads.shape, indices.ctypes.data, len(indices), first)


@cache
def _copy_rows_function() -> Callable[..., None]:
    return machine_code.function(machine_code.address("copy_rows", 12, lambda: _copy_rows), 12)


def _copy_rows(size, header, unit, unit_bytes, key_dims, value_dims, heads, num_heads, head_size, rows, num_rows, first):
    key_bytes, value_bytes = num_units(unit, key_dims) * unit_bytes, num_units(unit, value_dims) * unit_bytes
    for head in range(heads, heads + num_heads * head_size, head_size):
        for i in range(num_rows):
            source = simd.peek_i64(rows + 8 * i)
            copy_position(size, header, unit_bytes, key_bytes, value_bytes, head, first + i, head, source)


@compiled
def copy_position(size, header, unit_bytes, key_bytes, value_bytes, to, index, source, source_index):
    """Copy a key and a value, bit for bit, from an index of one head's cache to an index of another's."""
    both_bytes, keys_bytes = CHUNK * (key_bytes + value_bytes), CHUNK * key_bytes
    chunk, place = to + index // CHUNK * both_bytes, index % CHUNK
    source_chunk, source_place = source + source_index // CHUNK * both_bytes, source_index % CHUNK
    _copy(chunk + keys_bytes + place * value_bytes, source_chunk + keys_bytes + source_place * value_bytes, value_bytes)
    block = chunk + place // LANES * (LANES * key_bytes)
    source_block = source_chunk + source_place // LANES * (LANES * key_bytes)
    lane, source_lane = place % LANES, source_place % LANES
    for at in range(0, LANES * key_bytes, LANES * unit_bytes):
        for part in range(at, at + LANES * header, 2 * LANES):
            _copy(block + part + 2 * lane, source_block + part + 2 * source_lane, 2)
        for part in range(at + LANES * header, at + LANES * unit_bytes, LANES * size):
            _copy(block + part + lane * size, source_block + part + source_lane * size, size)


def _memcpy(o: Ops, to: Value, source: Value, size: Value) -> None:
    o.call("llvm.memcpy.p0.p0.i64", VOID, o.value(to.pointer()), o.value(source.pointer()), size, o.number(0, I1))


_copy = simd.operation((types.int64, types.int64, types.int64), types.void, _memcpy)


_Factors = tuple[Value, ...]  # the scale and the shift of a group, or none


def key_parts(
    o: Ops, coding: Coding, blocks: list[Value], dims: Value
) -> Iterator[tuple[Value, Value, Value, int, list[_Factors]]]:
    """The dimensions of blocks of keys in order, part by part: the part's offset in a block, its first dimension, how many it has,
    which half of their bytes, and the factors of each block.

    A caller takes all parts: between them it appends to the body of a loop over the groups.
    """
    if not coding.group:
        yield o.number(0), o.number(0), dims, 0, [()] * len(blocks)
        return
    with o.loop(dims.rounded_up(coding.group)) as group:
        at = group * (LANES * coding.unit_bytes)
        factors: list[_Factors] = [((block + at).f16(), (block + at + 2 * LANES).f16()) for block in blocks]
        for part in parts_of_group(coding, at, group, dims):
            yield *part, factors


def parts_of_group(coding: Coding, at: Value, group: Value, dims: Value) -> Iterator[tuple[Value, Value, Value, int]]:
    """`key_parts` of the group whose header lies at offset `at`, without the factors."""
    together = LANES if coding.halves == 2 else coding.group
    for offset in range(0, coding.group, together):
        first_dim, element = group * coding.group + offset, offset // (coding.halves * together) * together
        where = at + LANES * (coding.header + element * coding.size)
        yield where, first_dim, (dims - first_dim).smaller(together), offset // together % coding.halves


def place_of_value(coding: Coding, rows: Value, first: Value) -> tuple[Value, Value, Value]:
    """The addresses of a value's scales and numbers from dimension `first`, a multiple of 16, on, and the half of their bytes."""
    unit, vector = rows + first // coding.unit * coding.unit_bytes, first % coding.unit // LANES
    element = vector // coding.halves * (LANES * coding.size)
    return unit, unit + coding.header + element, (vector % coding.halves).trunc(I32)


def sixteen_of_value(coding: Coding, numbers: Value, scales: Value, half: Value, vector: int) -> Value:
    """Sixteen dimensions of a value: the `vector`-th from where `place_of_value` says. More than one begin at a whole group, or at
    a half or a quarter of one, so that all of them are of it.
    """
    group, element = vector * LANES // coding.unit, vector // coding.halves * LANES * coding.size
    values = coding.read(numbers + (element + group * coding.header), half if vector == 0 else half.like(vector % coding.halves))
    if not coding.group:
        return values
    at = scales + group * coding.unit_bytes
    scale, shift = ((at + offset).every(F16).fpext(F32X16) for offset in (0, 2))
    return fma(values, scale, shift)

"""`Format.encode` for the formats that drafts are cast to, with the same bytes and many times as fast.

Sixteen blocks at a time, one in each lane. Sums go value by value, as in the numpy twins in `formats`. Values that the twins
refuse, and values so large that a sum might overflow, are passed on to them.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from cpuspec.errors import FormatError
from cpuspec.formats import Format, lowbit
from cpuspec.formats.blocks32 import BLOCK
from cpuspec.formats.tensor import F32, U8
from cpuspec.kernels import machine_code, simd
from cpuspec.kernels.blocks import inverted, larger, lay, rounded, smaller, splat
from cpuspec.kernels.embed import row_decoder
from cpuspec.kernels.fit import COMPILED
from cpuspec.kernels.options import compiled
from cpuspec.kernels.simd import LANES

_ZERO, _HALF, _ONE, _TWO, _FOUR, _SEVEN, _EIGHT = (np.float32(x) for x in (0, 0.5, 1, 2, 4, 7, 8))
_INFINITY, _LARGEST_BYTE = np.float32(np.inf), np.float32(255)

# Kernels have no allocator: the caller brings room.
Encoder = Callable[[int, int, int, int], int]  # (f32 values, blocks, their bytes, room for 17 blocks: addresses) -> blocks refused


@compiled
def _put(words, room, to, stride, count, size):
    """The low `size` bytes of the first `count` lanes, stride bytes apart."""
    simd.store_i32(room, words)
    for lane in range(count):
        word = simd.peek_i32(room + 4 * lane)
        if size == 4:
            simd.poke_i32(to + stride * lane, word)
        elif size == 2:
            simd.poke_i16(to + stride * lane, word)
        else:
            simd.poke_i8(to + stride * lane, word)


@compiled
def _shift(by):
    return simd.splat_i32(simd.int32(by))


@compiled
def _num_infinite(x):
    """Lanes that are infinite or nan."""
    return simd.sum_lanes(simd.where_less(simd.abs_f32(x), splat(_INFINITY), splat(_ZERO), splat(_ONE)))


def _lowbit(row: Format) -> Encoder:
    """The compiled `lowbit.encode`."""
    bits, size, stride = row.code_bits, row.block_size, row.block_bytes
    fields: Any = row.layout.fields
    zero_at, codes_at, high_at = (fields[name][1] if name in fields else 0 for name in ("z", "codes", "high"))
    count, largest_code = np.float32(size), np.float32(2**bits - 1)
    shares = tuple(np.float32(share / largest_code) for share, _ in lowbit.STARTS)
    moves = tuple(np.float32(move - largest_code / 2) for _, move in lowbit.STARTS)
    one_over_count, one_over_largest = 1 / count, 1 / largest_code
    steps, one_over_steps = np.float32(lowbit.ZERO_STEPS), np.float32(1 / lowbit.ZERO_STEPS)

    def encode(values, blocks, out, x):
        room = x + 64 * size
        refused = _ZERO
        largest = splat(largest_code)
        for first in range(0, blocks, LANES):
            lanes, to = min(LANES, blocks - first), out + stride * first
            lay(values, first, lanes, size, x)
            total = simd.load_f32(x)
            low, high = smaller(total, splat(_ZERO)), larger(total, splat(_ZERO))
            for i in range(1, size):
                value = simd.load_f32(x + 64 * i)
                low, high, total = smaller(value, low), larger(value, high), total + value
            span, middle = high - low, (low + high) * splat(_HALF)
            best_d = simd.rounded_to_f16(span * splat(one_over_largest))
            best_zero = rounded(low * splat(-steps) * inverted(best_d), splat(_LARGEST_BYTE)) * splat(one_over_steps)
            best_error = splat(_INFINITY)
            for n in range(len(shares)):
                step = span * splat(shares[n])
                start, inverse = middle + step * splat(moves[n]), inverted(step)
                codes_total = products = squares = splat(_ZERO)
                for i in range(size):
                    value = simd.load_f32(x + 64 * i)
                    code = rounded((value - start) * inverse, largest)
                    codes_total, products, squares = codes_total + code, products + code * value, squares + code * code
                slope = splat(count) * products - codes_total * total
                slope = slope * inverted(splat(count) * squares - codes_total * codes_total)
                start = simd.where_less(splat(_ZERO), slope, (total - slope * codes_total) * splat(one_over_count), start)
                d = simd.rounded_to_f16(simd.where_less(splat(_ZERO), slope, slope, step))
                inverse = inverted(d)
                zero = rounded(start * splat(-steps) * inverse, splat(_LARGEST_BYTE)) * splat(one_over_steps)
                error = splat(_ZERO)
                for i in range(size):
                    value = simd.load_f32(x + 64 * i)
                    miss = d * (rounded(value * inverse + zero, largest) - zero) - value
                    error = error + miss * miss
                best_d = simd.where_less(error, best_error, d, best_d)
                best_zero = simd.where_less(error, best_error, zero, best_zero)
                best_error = smaller(error, best_error)
            refused += _num_infinite(best_d + total)
            _put(simd.f16_bits(best_d), room, to, stride, lanes, 2)
            _put(simd.truncate_i32(best_zero * splat(steps)), room, to + zero_at, stride, lanes, 1)
            inverse, nothing = inverted(best_d), simd.truncate_i32(splat(_ZERO))
            pairs = tops = nothing
            for i in range(size):
                code = simd.truncate_i32(rounded(simd.load_f32(x + 64 * i) * inverse + best_zero, largest))
                pairs = pairs | (code & _shift(3)) << _shift(2 * (i % 16))
                tops = tops | code >> _shift(2) << _shift(i % 32)
                if i % 16 == 15:
                    _put(pairs, room, to + codes_at + i // 16 * 4, stride, lanes, 4)
                    pairs = nothing
                if bits == 3 and i % 32 == 31:
                    _put(tops, room, to + high_at + i // 32 * 4, stride, lanes, 4)
                    tops = nothing
        return np.int64(refused)

    return encode


def _mxfp4(values, blocks, out, x):
    """The compiled `mx.encode_mxfp4`."""
    room, stride, codes_at = x + 64 * BLOCK, BLOCK // 2 + 1, 1
    refused = _ZERO
    nothing = simd.truncate_i32(splat(_ZERO))
    for first in range(0, blocks, LANES):
        lanes, to = min(LANES, blocks - first), out + stride * first
        lay(values, first, lanes, BLOCK, x)
        peak = total = splat(_ZERO)
        for i in range(BLOCK):
            magnitude = simd.abs_f32(simd.load_f32(x + 64 * i))
            peak, total = larger(magnitude, peak), total + magnitude
        refused += _num_infinite(total)
        # The exponent of the largest magnitude less 2, at least 0: both are small numbers, so f32 is exact.
        e = larger(simd.to_f32(simd.as_i32(peak) >> _shift(23)) - splat(_TWO), splat(_ZERO))
        exponent = simd.truncate_i32(e)
        _put(exponent, room, to, stride, lanes, 1)
        inverse = simd.as_f32((_shift(254) - exponent) << _shift(23))
        words = nothing
        for n in range(BLOCK):
            i = n // 8 * 4 + n % 4 + n // 4 % 2 * 16  # the values of a word: four in low halves, four in high halves
            value = simd.load_f32(x + 64 * i)
            scaled = simd.abs_f32(value) * inverse
            fine, coarse = simd.round_f32(scaled * splat(_TWO)), simd.round_f32(scaled * splat(_HALF)) + splat(_FOUR)
            code = simd.where_less(scaled, splat(_FOUR), simd.round_f32(scaled) + splat(_TWO), coarse)
            code = smaller(simd.where_less(scaled, splat(_TWO), fine, code), splat(_SEVEN))
            code = simd.where_less(splat(_ZERO), code, simd.where_less(value, splat(_ZERO), code + splat(_EIGHT), code), code)
            words = words | simd.truncate_i32(code) << _shift(8 * (n % 4) + 4 * (n // 4 % 2))
            if n % 8 == 7:
                _put(words, room, to + codes_at + n // 8 * 4, stride, lanes, 4)
                words = nothing
    return np.int64(refused)


_ENCODERS: Mapping[str, Encoder] = MappingProxyType({"mxfp4": _mxfp4, **{row.name: _lowbit(row) for row in lowbit.FORMATS}})


@cache
def _compiled(format_name: str) -> Encoder:
    address = machine_code.address(f"encode-{format_name}", 4, lambda: _ENCODERS[format_name], returns=True)
    return machine_code.function(address, 4, returns=True)


def encode(format: Format, values: F32) -> U8:
    """`format.encode(values)`, by a compiled encoder or with compiled searches. Other Python threads run meanwhile."""
    if format.name not in _ENCODERS:
        return format.encode(values, COMPILED)
    source = np.ascontiguousarray(values, np.float32)
    data = np.empty((*source.shape[:-1], format.row_bytes(source.shape[-1])), np.uint8)
    room = np.empty((LANES + 1) * format.block_size, np.float32)
    refused = _compiled(format.name)(source.ctypes.data, source.size // format.block_size, data.ctypes.data, room.ctypes.data)
    return format.encode(values) if refused else data


def recode(data: U8, source: Format, to: Format) -> U8:
    """`to.encode(source.decode(data))`, compiled as far as there are decoders and encoders. data: U8 [rows, bytes of a row].

    Raises FormatError for other data.
    """
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] % source.block_bytes:
        raise FormatError(f"rows of {source.name} are uint8 [rows, n * {source.block_bytes}], got {data.dtype} {list(data.shape)}")
    decoder = _compiled_decoder(source.name)
    if decoder is None:
        return encode(to, source.decode(data))
    rows = np.ascontiguousarray(data)
    values = np.empty((len(rows), rows.shape[1] // source.block_bytes * source.block_size), np.float32)
    decoder(rows.ctypes.data, rows.size // source.block_bytes, values.ctypes.data)
    return encode(to, values)


@cache
def _compiled_decoder(format_name: str) -> Callable[[int, int, int], None] | None:
    address = row_decoder(format_name)
    return None if address is None else machine_code.function(address, 3)

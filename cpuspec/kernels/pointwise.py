"""Operations on rows between linear layers: norms, SiLU, quantization to int8 groups, rotary positions.

Everything works on one row (or one head) by addresses. Row buffers are padded with zeros to whole vectors of 16 numbers.
"""

from numba import types

from cpuspec.config import SWIGLU_ALPHA, SWIGLU_LIMIT
from cpuspec.formats.packing import PANEL
from cpuspec.kernels import isa, products, simd
from cpuspec.kernels.options import compiled, inlined

_INT8_RECORD, _INT16_RECORD, _BF16_RECORD = (products.ENCODINGS[encoding] for encoding in ("int8", "int16", "bf16"))

_INT14_RECORD = products.NUM_LINES * products.PANEL_LINE

_IN_PAIRS = isa.dot_isa() == "avx2"  # how "int16" records hold their numbers, see `products`

_stack_for_panel = simd.operation((), types.int64, lambda o: o.stack(4 * PANEL))

# Of exp(r), of (tanh(x) - x) / x^3 by x^2, and of artanh(z) / z by z^2.
_exp = simd.polynomial(1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
_tanh = simd.polynomial(-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_artanh = simd.polynomial(*(1 / n for n in range(17, 0, -2)))

# What `prepare_row` does before it writes activations.
PLAIN, NORM, SILU, GELU, LAYER_NORM, SILU_ALONE, GELU_ALONE, SWIGLU_OAI, SIGMOID, RELU2, RELU2_ALONE = range(11)


@compiled
def exp_f32(x):
    """exp of sixteen numbers to about one unit in the last place; below -87 it is 0, above 88 it saturates.

    x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r (Taylor to the seventh power), times 2^n through the exponent bits.
    """
    r, power = exp_parts(x)
    return exp_of_parts(r, power)


@compiled
def exp_parts(x):
    """r and 2^n of `exp_f32`, which is 0 where the result is."""
    kept = simd.clamp(x, simd.splat_f32(-87.0), simd.splat_f32(88.0))
    n = simd.round_f32(kept * simd.splat_f32(1.4426950408889634))
    r = simd.fma(n, simd.splat_f32(-0.693359375), kept)
    r = simd.fma(n, simd.splat_f32(2.12194440e-4), r)
    power = simd.as_f32((simd.nearest_i32(n) + simd.splat_i32(127)) << simd.splat_i32(23))
    return r, simd.keep_above(x, simd.splat_f32(-87.0), power)


@compiled
def exp_of_parts(r, power):
    """`exp_f32` of what `exp_parts` gives."""
    return _exp(r) * power


@compiled
def tanh_f32(x):
    """tanh of sixteen numbers: a polynomial below 0.625 (Cephes' tanhf), 1 - 2 / (exp(2x) + 1) above."""
    square = x * x
    one, two = simd.splat_f32(1.0), simd.splat_f32(2.0)
    far = one - two / (exp_f32(x * two) + one)
    return simd.where_less(simd.abs_f32(x), simd.splat_f32(0.625), simd.fma(_tanh(square) * square, x, x), far)


@compiled
def cap_numbers(numbers, count, cap):
    """In place: cap * tanh(x / cap) of `count` numbers, and of those that fill up the last whole vector."""
    limit = simd.splat_f32(cap)
    for at in range(numbers, numbers + 4 * count, 64):
        simd.store_f32(at, limit * tanh_f32(simd.load_f32(at) / limit))


@compiled
def scale_numbers(numbers, count, scale):
    """In place: x * scale of `count` numbers, and of those that fill up the last whole vector."""
    factor = simd.splat_f32(scale)
    for at in range(numbers, numbers + 4 * count, 64):
        simd.store_f32(at, simd.load_f32(at) * factor)


@compiled
def sum_of_squares(row, features):
    """Sum of x * x over a padded row, in one fixed order."""
    total = simd.splat_f32(0.0)
    for at in range(row, row + features * 4, 64):
        x = simd.load_f32(at)
        total = simd.fma(x, x, total)
    return simd.sum_lanes(total)


@compiled
def _norm_factor(row, features, eps):
    """1 / rms of a padded row, in every lane."""
    mean = sum_of_squares(row, features) / simd.to_float(features)
    return simd.splat_f32(simd.to_float(1) / simd.sqrt_f32(mean + eps))


@compiled
def _mean_and_factor(row, features, eps):
    """The mean of a padded row, and 1 / its standard deviation, each in every lane."""
    whole = features // simd.LANES * simd.LANES
    total = simd.splat_f32(0.0)
    for at in range(row, row + features * 4, 64):
        total = total + simd.load_f32(at)
    mean = simd.sum_lanes(total) / simd.to_float(features)
    squares = simd.splat_f32(0.0)
    for at in range(row, row + whole * 4, 64):
        x = simd.load_f32(at) - simd.splat_f32(mean)
        squares = simd.fma(x, x, squares)
    of_all = simd.sum_lanes(squares)
    for at in range(row + whole * 4, row + features * 4, 4):
        rest = simd.peek_f32(at) - mean
        of_all = simd.fma_f32(rest, rest, of_all)
    factor = simd.to_float(1) / simd.sqrt_f32(of_all / simd.to_float(features) + eps)
    return simd.splat_f32(mean), simd.splat_f32(factor)


@compiled
def add_normed(row, branch, weight, eps, features, factor, after):
    """In place: after * (row + factor * branch / rms(branch) * weight), or after * (row + factor * branch) where weight is 0. All
    are padded with zeros to whole vectors.
    """
    factors, afters = simd.splat_f32(factor), simd.splat_f32(after)
    if weight == 0:
        for at in range(0, features * 4, 64):
            simd.store_f32(row + at, simd.fma(factors, simd.load_f32(branch + at), simd.load_f32(row + at)) * afters)
        return
    scale = _norm_factor(branch, features, eps)
    for at in range(0, features * 4, 64):
        normed = simd.load_f32(branch + at) * scale * simd.load_f32(weight + at)
        simd.store_f32(row + at, (simd.load_f32(row + at) + normed * factors) * afters)


@compiled
def norm_row(row, weight, eps, features):
    """In place: row / rms(row) * weight. Both are padded with zeros to whole vectors."""
    scale = _norm_factor(row, features, eps)
    for at in range(0, features * 4, 64):
        simd.store_f32(row + at, simd.load_f32(row + at) * scale * simd.load_f32(weight + at))


@compiled
def silu_f32(x):
    """x * sigmoid(x)."""
    return x / (simd.splat_f32(1.0) + exp_f32(simd.splat_f32(0.0) - x))


@compiled
def softplus_f32(x):
    """log(1 + exp(x)): max(x, 0) + log1p(u), u = exp(-|x|), of which log1p(u) = 2 artanh(z), z = u / (2 + u) <= 1 / 3."""
    u = exp_f32(simd.splat_f32(0.0) - simd.abs_f32(x))
    z = u / (simd.splat_f32(2.0) + u)
    return simd.fma(simd.splat_f32(2.0) * z, _artanh(z * z), simd.max_f32(x, simd.splat_f32(0.0)))


@compiled
def _gelu(x):
    """The tanh form: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    inner = simd.fma(x * x * x, simd.splat_f32(0.044715), x) * simd.splat_f32(0.7978845608028654)
    return simd.splat_f32(0.5) * x * (simd.splat_f32(1.0) + tanh_f32(inner))


@compiled
def _swiglu_oai(gate, up):
    limit, one = simd.splat_f32(SWIGLU_LIMIT), simd.splat_f32(1.0)
    gate = simd.min_f32(gate, limit)
    kept = simd.clamp(up, simd.splat_f32(-SWIGLU_LIMIT), limit) + one
    return gate / (one + exp_f32(gate * simd.splat_f32(-SWIGLU_ALPHA))) * kept


@inlined
def _squared(x):
    active = simd.max_f32(x, simd.splat_f32(0.0))
    return active * active


@inlined
def _numbers(row, order, at):
    """Sixteen numbers of a row, those at byte offset `at` of it, or those that `order` names there."""
    if order != 0:
        return simd.gather_f32(row, order + at)
    return simd.load_f32(row + at)


@inlined
def _prepared(kind, row, other, weight, order, scale, mean, at):
    """Sixteen prepared numbers at byte offset `at` of the row's order."""
    x = _numbers(row, order, at)
    if kind == NORM:
        return x * scale * _numbers(weight, order, at)
    if kind == SILU:
        return silu_f32(x) * _numbers(other, order, at)
    if kind == GELU:
        return _gelu(x) * _numbers(other, order, at)
    if kind == LAYER_NORM:
        return simd.fma((x - mean) * scale, _numbers(weight, order, at), _numbers(other, order, at))
    if kind == SILU_ALONE:
        return silu_f32(x)
    if kind == GELU_ALONE:
        return _gelu(x)
    if kind == SWIGLU_OAI:
        return _swiglu_oai(x, _numbers(other, order, at))
    if kind == RELU2:
        return _squared(x) * _numbers(other, order, at)
    if kind == RELU2_ALONE:
        return _squared(x)
    if kind == SIGMOID:
        return _numbers(other, order, at) / (simd.splat_f32(1.0) + exp_f32(simd.splat_f32(0.0) - x))
    return x


@compiled
def prepare_row(
    kind, row, other, weight, order, eps, features, first, end, int8, int16, f32, bf16, rounded, rotated, int14, place, block_rows
):
    """Write activations of inputs first..end (multiples of 32, or of PANEL for `rotated` and `int14`, or the row's end) of one row.

    kind: PLAIN x; NORM x / rms(x) * weight; SILU silu(x) * other; GELU gelu(x) * other; LAYER_NORM (x - mean(x)) / deviation(x) *
    weight + other; SILU_ALONE silu(x); GELU_ALONE gelu(x); SWIGLU_OAI as `config.SWIGLU_ALPHA`, of x and other; SIGMOID
    sigmoid(x) * other; RELU2, RELU2_ALONE max(x, 0)^2, times other. int8 to int14: address of the
    row's block in that encoding, 0 where it is not wanted; place: the row's place in its block of block_rows.
    Rows, others and weights are padded with zeros to whole groups. order: address of int32 indices, padded likewise with their own,
    where a matrix has the inputs in another order; else 0.
    """
    scale, mean = simd.splat_f32(1.0), simd.splat_f32(0.0)
    if kind == NORM:
        scale = _norm_factor(row, features, eps)
    elif kind == LAYER_NORM:
        mean, scale = _mean_and_factor(row, features, eps)
    panel = _stack_for_panel() if rotated != 0 or int14 != 0 else 0
    for start in range(first, end, 32):
        low = _prepared(kind, row, other, weight, order, scale, mean, start * 4)
        high = _prepared(kind, row, other, weight, order, scale, mean, start * 4 + 64)
        record = start // 32 * block_rows + place
        if int8 != 0:
            quantize_to_int8(low, high, int8 + record * _INT8_RECORD)
        if int16 != 0:
            quantize_to_int16(low, high, int16 + record * _INT16_RECORD)
        if bf16 != 0:
            simd.store_bf16(bf16 + record * _BF16_RECORD, low)
            simd.store_bf16(bf16 + record * _BF16_RECORD + 32, high)
        if panel != 0:
            numbers = panel + start % PANEL * 4
            simd.store_f32(numbers, low)
            simd.store_f32(numbers + 64, high)
            if start % PANEL == PANEL - 32 and int14 != 0:  # before the other turns the numbers
                quantize_to_int14(panel, int14 + start // PANEL * block_rows * _INT14_RECORD, place, block_rows)
            if start % PANEL == PANEL - 32 and rotated != 0:
                quantize_rotated(panel, rotated + start // PANEL * block_rows * products.PANEL_RECORD, place, block_rows)
        at, stride = (start * block_rows + place) * 4, block_rows * 4
        if f32 != 0:
            simd.scatter_f32(f32 + at, stride, min(16, end - start), low)
            simd.scatter_f32(f32 + at + 16 * stride, stride, max(0, min(16, end - start - 16)), high)
        if rounded != 0:
            simd.scatter_f32(rounded + at, stride, 16, simd.rounded_to_bf16(low))
            simd.scatter_f32(rounded + at + 16 * stride, stride, 16, simd.rounded_to_bf16(high))


@compiled
def quantize_to_int8(low, high, record):
    """Write one "int8" record of 32 numbers: codes -127..127 across their range."""
    largest = simd.max_lanes(simd.max_f32(low, high))
    smallest = simd.min_lanes(simd.min_f32(low, high))
    shift = smallest * simd.half() + largest * simd.half()
    scale = (largest * simd.half() - smallest * simd.half()) / simd.to_float(127)
    inverse, middle = simd.splat_f32(simd.inverse_or_zero(scale)), simd.splat_f32(shift)
    low_codes = simd.nearest_i32((low - middle) * inverse)
    high_codes = simd.nearest_i32((high - middle) * inverse)
    simd.store_i8(record, low_codes)
    simd.store_i8(record + 16, high_codes)
    simd.poke_f32(record + products.SHIFT, shift)
    _write_sums(record, scale, shift, simd.sum_lanes_i32(low_codes), simd.sum_lanes_i32(high_codes))


@compiled
def quantize_to_int16(low, high, record):
    """Write one "int16" record of 32 numbers: codes -32512..32512 around zero, as 256 * byte + low byte, both signed, or whole."""
    largest = simd.max_lanes(simd.max_f32(simd.abs_f32(low), simd.abs_f32(high)))
    scale = largest / simd.to_float(127 * 256)
    inverse = simd.splat_f32(simd.inverse_or_zero(scale))
    low_codes = simd.nearest_i32(low * inverse)
    high_codes = simd.nearest_i32(high * inverse)
    if _IN_PAIRS:
        simd.store_i16(record, simd.swap_middles(low_codes))
        simd.store_i16(record + products.LOW_BYTES, simd.swap_middles(high_codes))
    else:
        _split_bytes(low_codes, record)
        _split_bytes(high_codes, record + 16)
    _write_sums(record, scale, simd.to_float(0), simd.sum_lanes_i32(low_codes), simd.sum_lanes_i32(high_codes))


@compiled
def quantize_rotated(numbers, to, row, rows):
    """Multiply PANEL numbers with Hadamard's matrix, in place, and write them as "rotated" activations of a row: codes -127..127.

    to: the address of the panel in the row's block. row: its place in the block, which has `rows` rows.
    """
    hadamard_head(numbers, PANEL, PANEL)
    scale = _largest(numbers) / simd.to_float(127)
    inverse = simd.splat_f32(simd.inverse_or_zero(scale))
    sums = simd.splat_i32(0)
    for n in range(0, PANEL, 16):
        codes = simd.nearest_i32(simd.load_f32(numbers + 4 * n) * inverse)
        simd.store_i8(to + (n // products.PANEL_LINE * rows + row) * products.PANEL_LINE + n % products.PANEL_LINE, codes)
        sums = sums + codes
    factors = to + rows * PANEL + row * 4  # as `products.factors_of_panel`
    simd.poke_f32(factors, scale)
    simd.poke_i32(factors + rows * 4, simd.int32(-128 * simd.sum_lanes_i32(sums)))


@compiled
def quantize_to_int14(numbers, to, row, rows):
    """Write PANEL numbers as "int14" activations of a row: codes -8191..8191, as 128 * byte + low byte.

    to, row, rows: as in `quantize_rotated`.
    """
    scale = _largest(numbers) / simd.to_float(products.MOST_OF_14_BITS)
    inverse = simd.splat_f32(simd.inverse_or_zero(scale))
    line = rows * products.PANEL_LINE
    to += row * products.PANEL_LINE
    last, before = to + products.LAST_LINE * line, simd.int32(0)
    simd.poke_f32(last, scale)
    for n in range(0, PANEL, 16):
        codes = simd.nearest_i32(simd.load_f32(numbers + 4 * n) * inverse)
        lower = codes & simd.splat_i32(127)
        at = to + n // products.PANEL_LINE * line + n % products.PANEL_LINE
        simd.store_i8(at + products.BYTES * line, codes >> simd.splat_i32(7))
        simd.store_i8(at + products.LOWER_BYTES * line, lower)
        total, of_lower = simd.sum_lanes_i32(codes), simd.sum_lanes_i32(lower)
        at = to + n // 4
        simd.poke_f32(at + products.HALF_SUMS * line, simd.to_float(total))
        simd.poke_i32(at + products.MINUS_SUMS * line, simd.int32((of_lower - total) >> 7))
        simd.poke_i32(at + products.MINUS_LOWER_SUMS * line, simd.int32(-of_lower))
        if n % 32 != 0:
            simd.poke_f32(last + products.GROUP_SUMS + n // 32 * 4, simd.to_float(before + total))
        before = total


@compiled
def _largest(numbers):
    """The largest magnitude of PANEL numbers."""
    largest = simd.splat_f32(0.0)
    for at in range(numbers, numbers + 4 * PANEL, 64):
        largest = simd.max_f32(largest, simd.abs_f32(simd.load_f32(at)))
    return simd.max_lanes(largest)


@compiled
def _split_bytes(codes, to):
    half = simd.splat_i32(128)
    simd.store_i8(to, (codes + half) >> simd.splat_i32(8))
    simd.store_i8(to + products.LOW_BYTES, codes)


@compiled
def _write_sums(record, scale, shift, low_sum, high_sum):
    total = simd.int32(low_sum + high_sum)
    simd.poke_f32(record + products.SCALE, scale)
    simd.poke_f32(record + products.VALUE_SUM, simd.fma_f32(scale, simd.to_float(total), simd.to_float(32) * shift))
    simd.poke_i32(record + products.MINUS_8_SUMS, simd.int32(-8 * total))
    simd.poke_i32(record + products.MINUS_16_SUMS, simd.int32(-16 * total))
    simd.poke_i32(record + products.MINUS_128_SUMS, simd.int32(-128 * total))
    simd.poke_i32(record + products.MINUS_32_LOW, simd.int32(-32 * low_sum))
    simd.poke_i32(record + products.MINUS_32_HIGH, simd.int32(-32 * high_sum))


@compiled
def rotate_head(head, dims, cosines, sines, weight, last, eps, scale):
    """In place: RMS norm of the head (where weight is not 0), then pairs (i, i + dims / 2) turned (where cosines is not 0), then
    times scale. last: where it is not 0, the norm follows the turn.
    """
    half, whole = dims // 2, dims // 2 // simd.LANES * simd.LANES
    factor = simd.to_float(1)
    if weight != 0:
        total = sum_of_squares(head, dims // simd.LANES * simd.LANES)
        for i in range(dims // simd.LANES * simd.LANES, dims):
            x = simd.peek_f32(head + 4 * i)
            total = simd.fma_f32(x, x, total)
        factor = simd.to_float(1) / simd.sqrt_f32(total / simd.to_float(dims) + eps)
    factors, scales = simd.splat_f32(factor), simd.splat_f32(scale)
    for i in range(0, whole, simd.LANES):
        first, second = head + 4 * i, head + 4 * (i + half)
        u, v = simd.load_f32(first) * factors, simd.load_f32(second) * factors
        if weight != 0 and last == 0:
            u, v = u * simd.load_f32(weight + 4 * i), v * simd.load_f32(weight + 4 * (i + half))
        if cosines != 0:
            cs, ss = simd.load_f32(cosines + 4 * i), simd.load_f32(sines + 4 * i)
            u, v = u * cs - v * ss, v * cs + u * ss
        if last != 0:
            u, v = u * simd.load_f32(weight + 4 * i), v * simd.load_f32(weight + 4 * (i + half))
        simd.store_f32(first, u * scales)
        simd.store_f32(second, v * scales)
    for i in range(whole, half):
        first, second = head + 4 * i, head + 4 * (i + half)
        x, y = simd.peek_f32(first) * factor, simd.peek_f32(second) * factor
        if weight != 0 and last == 0:
            x, y = x * simd.peek_f32(weight + 4 * i), y * simd.peek_f32(weight + 4 * (i + half))
        if cosines != 0:
            c, s = simd.peek_f32(cosines + 4 * i), simd.peek_f32(sines + 4 * i)
            x, y = x * c - y * s, y * c + x * s
        if last != 0:
            x, y = x * simd.peek_f32(weight + 4 * i), y * simd.peek_f32(weight + 4 * (i + half))
        simd.poke_f32(first, x * scale)
        simd.poke_f32(second, y * scale)


@compiled
def hadamard_head(head, dims, size):
    """In place, as `formats.kv.hadamard` to the bit: each `size` of the head's numbers times Hadamard's matrix."""
    factor = simd.splat_f32(simd.to_float(1) / simd.sqrt_f32(simd.to_float(size)))
    for first in range(head, head + 4 * dims, 4 * size):
        half = size // 2
        while half >= simd.LANES:
            for start in range(first, first + 4 * size, 8 * half):
                for at in range(start, start + 4 * half, 64):
                    low, high = simd.load_f32(at), simd.load_f32(at + 4 * half)
                    simd.store_f32(at, low + high)
                    simd.store_f32(at + 4 * half, low - high)
            half //= 2
        for at in range(first, first + 4 * size, 64):
            simd.store_f32(at, simd.hadamard_lanes(simd.load_f32(at)) * factor)


@compiled
def subtract(numbers, others, count):
    """numbers -= others, `count` of each."""
    for at in range(0, 4 * count, 4):
        simd.poke_f32(numbers + at, simd.peek_f32(numbers + at) - simd.peek_f32(others + at))


@compiled
def rows_of_block(row, rows):
    """The number of rows in the block of `row`, in a batch of `rows`."""
    return min(products.BLOCK_ROWS, rows - row // products.BLOCK_ROWS * products.BLOCK_ROWS)

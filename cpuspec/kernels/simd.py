"""Vector values for Numba: sixteen 32-bit lanes that live in LLVM registers, and the operations kernels are written in.

Kernels address memory by integer (int64 addresses), because one step walks weights of many shapes. No operation here allows
reassociation or contraction: what is written is what is computed, so results are the same bits on every processor.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

from cpuspec.kernels.isa import dot_isa, features, lookup_isa

LANES = 16

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
_POINTER = ir.PointerType()


class _Vector(types.Type):
    """Sixteen lanes of one 32-bit type."""


f32x16 = _Vector("f32x16")
i32x16 = _Vector("i32x16")
_VECTOR_OF = {f32x16: ir.VectorType(F32, LANES), i32x16: ir.VectorType(I32, LANES)}


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: _Vector) -> None:
        super().__init__(dmm, fe_type, _VECTOR_OF[fe_type])


Emit = Callable[..., Any]  # (builder, *values) -> value


def _operation(arguments: tuple[types.Type, ...], result: types.Type, emit: Emit) -> Any:
    """A Numba function of these types whose body is the instructions that `emit` appends."""

    def typed(typingctx: Any) -> Any:
        return result(*arguments), lambda context, builder, sig, args: emit(builder, *args)

    by_arity = (
        typed,
        lambda typingctx, a: typed(typingctx),
        lambda typingctx, a, b: typed(typingctx),
        lambda typingctx, a, b, c: typed(typingctx),
        lambda typingctx, a, b, c, d: typed(typingctx),
    )
    return intrinsic(by_arity[len(arguments)])


def _operator(symbol: Any, instructions: dict[_Vector, str]) -> None:
    """Let a Python operator work lane by lane on vector types, as the named LLVM instruction."""

    class Template(ConcreteTemplate):
        cases = [vector(vector, vector) for vector in instructions]  # noqa: RUF012 - as Numba wants it

    infer_global(symbol)(Template)
    for vector, instruction in instructions.items():

        def lower(context: Any, builder: Any, sig: Any, args: Any, instruction: str = instruction) -> Any:
            return getattr(builder, instruction)(*args)

        lower_builtin(symbol, vector, vector)(lower)


_operator(operator.add, {f32x16: "fadd", i32x16: "add"})
_operator(operator.sub, {f32x16: "fsub", i32x16: "sub"})
_operator(operator.mul, {f32x16: "fmul", i32x16: "mul"})
_operator(operator.truediv, {f32x16: "fdiv"})
_operator(operator.lshift, {i32x16: "shl"})
_operator(operator.rshift, {i32x16: "lshr"})
_operator(operator.or_, {i32x16: "or_"})
_operator(operator.and_, {i32x16: "and_"})


def pointer(builder: Any, address: Any) -> Any:
    """An integer address as an LLVM pointer."""
    return builder.inttoptr(address, _POINTER)


def load(builder: Any, address: Any, typ: Any) -> Any:
    """A value of `typ` at any address, aligned or not."""
    return builder.load(pointer(builder, address), typ=typ, align=1)


def store(builder: Any, address: Any, value: Any) -> Any:
    """Write a value at any address, aligned or not."""
    builder.store(value, pointer(builder, address), align=1)
    return ir.Constant(I8, 0)


def splat(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    """A scalar in every lane."""
    vector = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def constant(builder: Any, value: int | float, vector: _Vector) -> Any:
    """A known value in every lane."""
    return ir.Constant(_VECTOR_OF[vector], [value] * LANES)


def call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """Call an LLVM intrinsic or a C function by name."""
    function_type = ir.FunctionType(result, [v.type for v in values])
    function = builder.module.globals.get(name) or ir.Function(builder.module, function_type, name)
    return builder.call(function, values)


def prefetch(builder: Any, address: Any, nearest: bool = True) -> None:
    """Bring the cache line of an address close, for reading; any address is allowed. nearest: into the first cache, too."""
    flags = [ir.Constant(I32, value) for value in (0, 3 if nearest else 2, 1)]  # read, these levels, data
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer(builder, address), *flags)


def _extreme(builder: Any, which: str, x: Any, y: Any) -> Any:
    return call(builder, f"llvm.{which}.v{x.type.count}f32", x.type, x, y)


def _nearest(builder: Any, values: Any) -> Any:
    if "avx512f" in features():
        every, as_set = ir.Constant(I16, -1), ir.Constant(I32, 4)  # all lanes, in the rounding mode that is set: to nearest
        return call(builder, "llvm.x86.avx512.mask.cvtps2dq.512", I32X16, values, constant(builder, 0, i32x16), every, as_set)
    half, whole = ir.VectorType(I32, 8), ir.Constant(F32X16, ir.Undefined)
    parts = [builder.shuffle_vector(values, whole, ir.Constant(half, list(range(at, at + 8)))) for at in (0, 8)]
    parts = [call(builder, "llvm.x86.avx.cvt.ps2dq.256", half, part) for part in parts]
    return builder.shuffle_vector(*parts, ir.Constant(I32X16, list(range(LANES))))


def _bf16_bits(builder: Any, values: Any, mask: int = 0xFFFFFFFF) -> Any:
    """The bits of numbers rounded to bf16, to nearest even, in the upper halves; a nan stays one."""
    bits, sixteen = builder.bitcast(values, I32X16), constant(builder, 16, i32x16)
    odd = builder.and_(builder.lshr(bits, sixteen), constant(builder, 1, i32x16))
    rounded = builder.add(bits, builder.add(odd, constant(builder, 0x7FFF, i32x16)))
    quiet = builder.or_(bits, constant(builder, 0x400000, i32x16))
    chosen = builder.select(builder.fcmp_unordered("uno", values, values), quiet, rounded)
    return builder.and_(chosen, constant(builder, mask, i32x16))


def call_address(builder: Any, address: Any, values: Any) -> Any:
    """Call a C function that returns nothing, by its address."""
    function_type = ir.FunctionType(ir.VoidType(), [v.type for v in values])
    return builder.call(builder.inttoptr(address, function_type.as_pointer()), values)


def _call_address(builder: Any, address: Any, *values: Any) -> Any:
    call_address(builder, address, values)
    return ir.Constant(I8, 0)


def vector_of(element: Any) -> Any:
    """LLVM's type of sixteen such elements."""
    return ir.VectorType(element, LANES)


F32X16, I32X16 = _VECTOR_OF[f32x16], _VECTOR_OF[i32x16]
_a, _i, _f = types.int64, types.int32, types.float32

# Scalars at an address.
peek_i64 = _operation((_a,), types.int64, lambda b, at: load(b, at, I64))
peek_i8 = _operation((_a,), types.int64, lambda b, at: b.sext(load(b, at, I8), I64))
peek_u8 = _operation((_a,), types.int64, lambda b, at: b.zext(load(b, at, I8), I64))
peek_u16 = _operation((_a,), types.int64, lambda b, at: b.zext(load(b, at, I16), I64))
peek_f16 = _operation((_a,), types.float32, lambda b, at: b.fpext(load(b, at, F16), F32))
peek_f32 = _operation((_a,), types.float32, lambda b, at: load(b, at, F32))
poke_i64 = _operation((_a, types.int64), types.int8, store)
poke_i32 = _operation((_a, _i), types.int8, store)
poke_f32 = _operation((_a, _f), types.int8, store)
poke_i16 = _operation((_a, _i), types.int8, lambda b, at, v: store(b, at, b.trunc(v, I16)))
poke_i8 = _operation((_a, _i), types.int8, lambda b, at, v: store(b, at, b.trunc(v, I8)))
peek_i32 = _operation((_a,), _i, lambda b, at: load(b, at, I32))
words = _operation((_a,), types.CPointer(types.int64), pointer)  # what `numba.carray` makes an array of
f32_bits = _operation((_i,), types.float32, lambda b, v: b.bitcast(v, F32))
half = _operation((), types.float32, lambda b: ir.Constant(F32, 0.5))
to_float = _operation((types.int64,), types.float32, lambda b, v: b.sitofp(v, F32))  # int32 and int64, rounded once
int32 = _operation((types.int64,), types.int32, lambda b, v: b.trunc(v, I32))
inverse_or_zero = _operation(
    (_f,),
    types.float32,
    lambda b, x: b.select(b.fcmp_ordered(">", x, ir.Constant(F32, 0.0)), b.fdiv(ir.Constant(F32, 1.0), x), ir.Constant(F32, 0.0)),
)
is_nan = _operation((_f,), types.boolean, lambda b, x: b.fcmp_unordered("uno", x, x))
fma_f32 = _operation((_f, _f, _f), types.float32, lambda b, x, y, z: call(b, "llvm.fma.f32", F32, x, y, z))

call_3 = _operation((_a, _a, _a, _a), types.int8, _call_address)  # a C function of three int64s that returns nothing

# Vectors at an address.
load_f32 = _operation((_a,), f32x16, lambda b, at: load(b, at, F32X16))
store_f32 = _operation((_a, f32x16), types.int8, store)
store_i32 = _operation((_a, i32x16), types.int8, store)
store_i16 = _operation((_a, i32x16), types.int8, lambda b, at, v: store(b, at, b.trunc(v, vector_of(I16))))
store_i8 = _operation((_a, i32x16), types.int8, lambda b, at, v: store(b, at, b.trunc(v, vector_of(I8))))
broadcast_f32 = _operation((_a,), f32x16, lambda b, at: splat(b, load(b, at, F32)))

# Lane by lane.
splat_f32 = _operation((_f,), f32x16, splat)
splat_i32 = _operation((_i,), i32x16, splat)
fma = _operation((f32x16, f32x16, f32x16), f32x16, lambda b, x, y, z: call(b, "llvm.fma.v16f32", F32X16, x, y, z))
round_f32 = _operation((f32x16,), f32x16, lambda b, v: call(b, "llvm.rint.v16f32", F32X16, v))
truncate_i32 = _operation((f32x16,), i32x16, lambda b, v: call(b, "llvm.fptosi.sat.v16i32.v16f32", I32X16, v))
nearest_i32 = _operation((f32x16,), i32x16, _nearest)  # halves to even; what has no integer gives the least
to_f32 = _operation((i32x16,), f32x16, lambda b, v: b.sitofp(v, F32X16))
abs_f32 = _operation((f32x16,), f32x16, lambda b, v: call(b, "llvm.fabs.v16f32", F32X16, v))
sqrt_f32 = _operation((_f,), types.float32, lambda b, x: call(b, "llvm.sqrt.f32", F32, x))
# A nan stays a nan: a broken weight must show in the logits.
max_f32 = _operation((f32x16, f32x16), f32x16, lambda b, x, y: _extreme(b, "maximum", x, y))
min_f32 = _operation((f32x16, f32x16), f32x16, lambda b, x, y: _extreme(b, "minimum", x, y))
clamp = _operation(  # to low..high; a nan stays a nan
    (f32x16, f32x16, f32x16),
    f32x16,
    lambda b, x, low, high: _either(b, ">", _either(b, "<", x, high), low),
)
keep_above = _operation(  # values where x > limit or is nan, 0 elsewhere
    (f32x16, f32x16, f32x16), f32x16, lambda b, x, limit, v: b.select(b.fcmp_unordered(">", x, limit), v, constant(b, 0.0, f32x16))
)
as_f32 = _operation((i32x16,), f32x16, lambda b, v: b.bitcast(v, F32X16))
as_i32 = _operation((f32x16,), i32x16, lambda b, v: b.bitcast(v, I32X16))
where_less = _operation(  # x < limit: the third, else the fourth
    (f32x16, f32x16, f32x16, f32x16), f32x16, lambda b, x, limit, y, z: b.select(b.fcmp_ordered("<", x, limit), y, z)
)
f16_bits = _operation((f32x16,), i32x16, lambda b, v: b.zext(b.bitcast(b.fptrunc(v, vector_of(F16)), vector_of(I16)), I32X16))
rounded_to_bf16 = _operation((f32x16,), f32x16, lambda b, v: b.bitcast(_bf16_bits(b, v, 0xFFFF0000), F32X16))
store_bf16 = _operation(  # sixteen numbers in 32 bytes, rounded
    (_a, f32x16),
    types.int8,
    lambda b, at, v: store(b, at, b.trunc(b.lshr(_bf16_bits(b, v), constant(b, 16, i32x16)), vector_of(I16))),
)
rounded_to_f16 = _operation((f32x16,), f32x16, lambda b, v: b.fpext(b.fptrunc(v, vector_of(F16)), F32X16))


def _first_equal(builder: Any, x: Any, y: Any) -> Any:
    equal = builder.bitcast(builder.fcmp_ordered("==", x, y), I16)
    return builder.zext(call(builder, "llvm.cttz.i16", I16, equal, ir.Constant(I1, 0)), I64)


first_equal = _operation((f32x16, f32x16), types.int64, _first_equal)  # the first lane in which both are equal, 16 if none is


def _first_lanes(builder: Any, values: Any, count: Any, other: Any) -> Any:
    index = ir.Constant(I32X16, list(range(LANES)))
    return builder.select(builder.icmp_signed("<", index, splat(builder, count)), values, other)


swap_middles = _operation(  # of each four lanes
    (i32x16,),
    i32x16,
    lambda b, v: b.shuffle_vector(
        v, ir.Constant(I32X16, ir.Undefined), ir.Constant(I32X16, [4 * (n // 4) + (0, 2, 1, 3)[n % 4] for n in range(LANES)])
    ),
)
first_lanes = _operation((f32x16, _i, f32x16), f32x16, _first_lanes)  # lanes below `count` from the first, others from the last


def _scatter(builder: Any, address: Any, stride: Any, count: Any, values: Any) -> Any:
    for lane in range(LANES):
        index = ir.Constant(I64, lane)
        with builder.if_then(builder.icmp_signed("<", index, count)):
            store(
                builder, builder.add(address, builder.mul(stride, index)), builder.extract_element(values, ir.Constant(I32, lane))
            )
    return ir.Constant(I8, 0)


def _either(builder: Any, relation: str, x: Any, y: Any) -> Any:
    """y where `y relation x` holds, else x: with "<" or ">" one instruction, and a nan in x stays."""
    return builder.select(builder.fcmp_ordered(relation, y, x), y, x)


def _fold_extreme(relation: str) -> Emit:
    """The largest (">") or smallest ("<") lane, or a nan if there is one."""
    fold = _fold(lambda b, x, y: _either(b, relation, x, y))

    def emit(builder: Any, vector: Any) -> Any:
        is_nan = builder.fcmp_unordered("uno", vector, vector)
        any_nan = builder.icmp_unsigned("!=", builder.bitcast(is_nan, I16), ir.Constant(I16, 0))
        return builder.select(any_nan, ir.Constant(F32, float("nan")), fold(builder, vector))

    return emit


def _fold(instruction: Callable[[Any, Any, Any], Any]) -> Emit:
    """Reduce lanes in one fixed order: halves onto halves, 8, 4, 2, 1."""

    def emit(builder: Any, vector: Any) -> Any:
        width = LANES
        while width > 1:
            width //= 2
            undefined = ir.Constant(vector.type, ir.Undefined)
            low = ir.Constant(ir.VectorType(I32, width), list(range(width)))
            high = ir.Constant(ir.VectorType(I32, width), list(range(width, 2 * width)))
            vector = instruction(
                builder, builder.shuffle_vector(vector, undefined, low), builder.shuffle_vector(vector, undefined, high)
            )
        return builder.extract_element(vector, ir.Constant(I32, 0))

    return emit


scatter_f32 = _operation(
    (_a, types.int64, types.int64, f32x16), types.int8, _scatter
)  # the first `count` lanes, stride bytes apart
sum_lanes = _operation((f32x16,), types.float32, _fold(lambda b, x, y: b.fadd(x, y)))
max_lanes = _operation((f32x16,), types.float32, _fold_extreme(">"))
min_lanes = _operation((f32x16,), types.float32, _fold_extreme("<"))
sum_lanes_i32 = _operation((i32x16,), types.int32, _fold(lambda b, x, y: b.add(x, y)))


def dot_bytes(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Per lane: total + the four products of unsigned and signed bytes, in exact 32-bit arithmetic; with AVX2 alone, as long as two
    neighbouring products together fit 16 bits.
    """
    if dot_isa() == "avx512_vnni":
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", I32X16, total, unsigned, signed)
    return _dot_bytes_in_halves(builder, total, unsigned, signed)


def _dot_bytes_in_halves(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    half, words = ir.VectorType(I32, 8), ir.VectorType(I16, 16)
    parts = []
    for start in (0, 8):
        lanes = ir.Constant(half, list(range(start, start + 8)))
        operands = [builder.shuffle_vector(v, ir.Constant(I32X16, ir.Undefined), lanes) for v in (total, unsigned, signed)]
        if dot_isa() == "avx_vnni":
            parts.append(call(builder, "llvm.x86.avx512.vpdpbusd.256", half, *operands))
            continue
        both = [builder.bitcast(operand, ir.VectorType(I8, 32)) for operand in operands[1:]]
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", words, *both)
        parts.append(builder.add(operands[0], call(builder, "llvm.x86.avx2.pmadd.wd", half, pairs, ir.Constant(words, [1] * 16))))
    return builder.shuffle_vector(*parts, ir.Constant(I32X16, list(range(LANES))))


_LOOKUPS = {"avx512bw": ("llvm.x86.avx512.pshuf.b.512", 64), "avx2": ("llvm.x86.avx2.pshuf.b", 32)}


def lookup_bytes(builder: Any, table: Sequence[int], indices: Any, isa: str | None = None) -> Any:
    """Per byte 0..15 of an i32x16 vector: that entry of a table of 16 bytes. isa: of `lookup_isa`, by default the processor's."""
    wide = ir.VectorType(I8, 64)
    indices = builder.bitcast(indices, wide)
    isa = isa or lookup_isa()
    if isa not in _LOOKUPS:
        found = ir.Constant(wide, [table[0]] * 64)
        for index, entry in enumerate(table[1:], 1):
            here = builder.icmp_unsigned("==", indices, ir.Constant(wide, [index] * 64))
            found = builder.select(here, ir.Constant(wide, [entry] * 64), found)
        return builder.bitcast(found, I32X16)
    name, width = _LOOKUPS[isa]
    part = ir.VectorType(I8, width)
    # The instruction looks up within 16 bytes, so each 16 have the table.
    entries = ir.Constant(part, list(table) * (width // 16))
    looked_up = []
    for start in range(0, 64, width):
        lanes = ir.Constant(ir.VectorType(I32, width), list(range(start, start + width)))
        looked_up.append(
            call(builder, name, part, entries, builder.shuffle_vector(indices, ir.Constant(wide, ir.Undefined), lanes))
        )
    if len(looked_up) == 2:
        looked_up = [builder.shuffle_vector(*looked_up, ir.Constant(ir.VectorType(I32, 64), list(range(64))))]
    return builder.bitcast(looked_up[0], I32X16)


# Matrices of bytes in tile registers (AMX). A register holds 16 rows of 64 bytes.
_TILE_ROWS, _TILE_BYTES = 16, 64


def tile_shapes(builder: Any, shapes: dict[int, tuple[int, int]]) -> None:
    """Give tile registers their shapes: register -> (rows, bytes of a row). What they held is lost."""
    config = bytearray(64)
    config[0] = 1  # palette
    for register, (rows, row_bytes) in shapes.items():
        assert rows <= _TILE_ROWS, f"a tile has up to {_TILE_ROWS} rows, got {rows}"
        assert row_bytes <= _TILE_BYTES, f"a tile's row has up to {_TILE_BYTES} bytes, got {row_bytes}"
        config[16 + 2 * register] = row_bytes
        config[48 + register] = rows
    typ = ir.ArrayType(I8, len(config))
    where = cgutils.alloca_once_value(builder, ir.Constant(typ, config))
    call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), where)


def tile_release(builder: Any) -> None:
    """Forget all shapes, so that a switch of threads has less to save."""
    call(builder, "llvm.x86.tilerelease", ir.VoidType())


def tile_zero(builder: Any, register: int) -> None:
    """Fill a tile register with zeros."""
    call(builder, "llvm.x86.tilezero", ir.VoidType(), ir.Constant(I8, register))


def tile_load(builder: Any, register: int, address: Any, stride: Any) -> None:
    """Load the rows of a tile register, `stride` bytes apart."""
    call(builder, "llvm.x86.tileloadd64", ir.VoidType(), ir.Constant(I8, register), pointer(builder, address), stride)


def tile_store(builder: Any, register: int, address: Any, stride: Any) -> None:
    """Store the rows of a tile register, `stride` bytes apart."""
    call(builder, "llvm.x86.tilestored64", ir.VoidType(), ir.Constant(I8, register), pointer(builder, address), stride)


def tile_dot_signed(builder: Any, total: int, rows: int, columns: int) -> None:
    """total[r][c] += sum over k, b of rows[r][4k + b] * columns[k][4c + b], signed bytes into exact 32-bit sums."""
    registers = [ir.Constant(I8, register) for register in (total, rows, columns)]
    call(builder, "llvm.x86.tdpbssd", ir.VoidType(), *registers)


def tile_dot_bf16(builder: Any, total: int, rows: int, columns: int) -> None:
    """total[r][c] += the f32 sums of rows[r][k] * columns[k // 2][2c + k % 2] over even k and over odd k, both from 0 upwards and
    then added to each other. Numbers below the least normal one count as zeros.
    """
    registers = [ir.Constant(I8, register) for register in (total, rows, columns)]
    call(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), *registers)


def flush_small_numbers(builder: Any) -> Callable[[], None]:
    """From here on vector operations take numbers below the least normal one for zeros, until the result is called."""
    kept, changed = (cgutils.alloca_once(builder, I32) for _ in range(2))
    call(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), kept)
    builder.store(builder.or_(builder.load(kept), ir.Constant(I32, 0x8040)), changed)  # results, and operands
    call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), changed)
    return lambda: call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), kept)


# Threads.
fetch_add = _operation((_a, types.int64), types.int64, lambda b, at, v: b.atomic_rmw("add", pointer(b, at), v, "seq_cst"))
exchange = _operation((_a, types.int64), types.int64, lambda b, at, v: b.atomic_rmw("xchg", pointer(b, at), v, "seq_cst"))
acquire = _operation((_a,), types.int64, lambda b, at: b.load_atomic(pointer(b, at), "acquire", 8, typ=I64))


# The time stamp counter: some 1 to 4 cycles a nanosecond, whatever the clock.
cycles = _operation((), types.int64, lambda b: call(b, "llvm.readcyclecounter", I64))


def _pause(builder: Any) -> Any:
    call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    return ir.Constant(I8, 0)


pause = _operation((), types.int8, _pause)

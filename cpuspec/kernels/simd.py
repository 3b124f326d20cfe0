"""Vector values for Numba: sixteen 32-bit lanes that live in LLVM registers, and the operations compiled functions are written in.

Compiled code addresses memory by integer (int64 addresses), because one step walks weights of many shapes. Results are the same
bits on every processor (`ops`).
"""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

from cpuspec.kernels import ops
from cpuspec.kernels.ops import F16, F32, F32X16, I1, I8, I16, I32, I32X16, I64, LANES, Ops, Value, call, vector_of


class _Vector(types.Type):
    """Sixteen lanes of one 32-bit type."""


f32x16 = _Vector("f32x16")
i32x16 = _Vector("i32x16")
_VECTOR_OF = {f32x16: F32X16, i32x16: I32X16}


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: _Vector) -> None:
        super().__init__(dmm, fe_type, _VECTOR_OF[fe_type])


Emit = Callable[..., Value | None]  # (ops, *values) -> value


def operation(arguments: tuple[types.Type, ...], result: types.Type, emit: Emit) -> Any:
    """A Numba function of these types whose body is the instructions that `emit` appends. result: types.void for none."""

    def typed(typingctx: Any, *given: Any) -> Any:
        assert len(given) == len(arguments), f"an operation of {len(arguments)} arguments got {len(given)}"
        return result(types.StarArgTuple(arguments)), _body(emit, arguments)

    return intrinsic(typed)


def emitted(emit: Callable[..., None]) -> Any:
    """A Numba function without a result, whose body is the instructions that emit(ops, *arguments) appends.

    Strings have to be literals, and arrive as such; numbers arrive as values, and tuples of numbers as tuples of values.
    """

    def typed(typingctx: Any, *arguments: Any) -> Any:
        return types.void(types.StarArgTuple(arguments)), _body(emit, arguments)

    return intrinsic(prefer_literal=True)(typed)


def _body(emit: Emit, arguments: tuple[types.Type, ...]) -> Callable[..., Any]:
    """The function that Numba calls to append the instructions of an intrinsic."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        o = Ops(builder)
        given = cgutils.unpack_tuple(builder, args[0], len(arguments))
        value = emit(o, *[_argument(o, *both) for both in zip(arguments, given, strict=True)])
        return context.get_dummy_value() if value is None else value.v

    return codegen


def _argument(o: Ops, typ: Any, value: Any) -> Any:
    if isinstance(typ, types.StringLiteral):
        return typ.literal_value
    if isinstance(typ, types.BaseTuple):
        values = tuple(map(o.value, cgutils.unpack_tuple(o.b, value)))
        return typ.instance_class(*values) if isinstance(typ, types.NamedUniTuple) else values
    return o.value(value)


def _operator(symbol: Any, *vectors: _Vector) -> None:
    """Let a Python operator work lane by lane on vector types."""

    class Template(ConcreteTemplate):
        cases = [vector(vector, vector) for vector in vectors]  # noqa: RUF012 - as Numba wants it

    infer_global(symbol)(Template)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return symbol(*map(Ops(builder).value, args)).v

    for vector in vectors:
        lower_builtin(symbol, vector, vector)(lower)


for _symbol in (operator.add, operator.sub, operator.mul):
    _operator(_symbol, f32x16, i32x16)
_operator(operator.truediv, f32x16)
for _symbol in (operator.lshift, operator.rshift, operator.or_, operator.and_):
    _operator(_symbol, i32x16)


@emitted
def call_at(o: Ops, function: Value, operands: tuple[Value, ...]) -> None:
    """Call a C function that returns nothing, by its address, with a tuple of int64s."""
    o.call_address(function, operands)


def polynomial(*coefficients: float) -> Any:
    """A Numba function of a vector: a polynomial by Horner's rule, the coefficient of the highest power first."""

    def emit(o: Ops, x: Value) -> Value:
        return reduce(lambda total, coefficient: ops.fma(total, x, x.like(coefficient)), coefficients[1:], x.like(coefficients[0]))

    return operation((f32x16,), f32x16, emit)


def _either(relation: str, x: Value, y: Value) -> Value:
    """y where `y relation x` holds, else x: with "<" or ">" one instruction, and a nan in x stays."""
    return (y < x if relation == "<" else y > x).select(y, x)


def _fold(vector: Value, instruction: Callable[[Value, Value], Value]) -> Value:
    """Reduce lanes in one fixed order: halves onto halves, 8, 4, 2, 1."""
    width = LANES
    while width > 1:
        width //= 2
        vector = instruction(vector.shuffled(range(width)), vector.shuffled(range(width, 2 * width)))
    return vector.lane(0)


def _extreme_lane(o: Ops, vector: Value, relation: str) -> Value:
    """The largest (">") or smallest ("<") lane, or a nan if there is one."""
    any_nan = vector.unordered("uno", vector).bits(I16).differs(0)
    return any_nan.select(o.number(float("nan"), F32), _fold(vector, lambda x, y: _either(relation, x, y)))


def _first_equal(o: Ops, x: Value, y: Value) -> Value:
    return call("llvm.cttz.i16", I16, x.equals(y).bits(I16), o.number(0, I1)).zext(I64)


def _first_lanes(o: Ops, values: Value, count: Value, other: Value) -> Value:
    return (o.value(ir.Constant(I32X16, list(range(LANES)))) < count.splat()).select(values, other)


def _scatter(o: Ops, address: Value, stride: Value, count: Value, values: Value) -> None:
    for lane in range(LANES):
        with o.when(o.number(lane) < count):
            (address + stride * lane).store(values.lane(lane))


def _gather(o: Ops, address: Value, indices: Value) -> Value:
    found = o.number(0.0, F32X16)
    for lane in range(LANES):
        number = (address + (indices + 4 * lane).load(I32).sext(I64) * 4).load(F32)
        found = Value(o.b, o.b.insert_element(found.v, number.v, ir.Constant(I32, lane)))
    return found


def _hadamard_lanes(o: Ops, values: Value) -> Value:
    """Lanes times Hadamard's matrix of order 16, without its factor: sums and differences of lanes 8, 4, 2 and 1 apart."""
    for apart in (8, 4, 2, 1):
        signs = o.value(ir.Constant(F32X16, [-1.0 if lane & apart else 1.0 for lane in range(LANES)]))
        values = values * signs + values.shuffled([lane ^ apart for lane in range(LANES)])
    return values


_AHEAD = 8192
_a, _i, _f = types.int64, types.int32, types.float32

# Scalars at an address.
peek_i64 = operation((_a,), types.int64, lambda o, at: at.load(I64))
peek_i32 = operation((_a,), _i, lambda o, at: at.load(I32))
peek_i8 = operation((_a,), types.int64, lambda o, at: at.load(I8).sext(I64))
peek_u8 = operation((_a,), types.int64, lambda o, at: at.load(I8).zext(I64))
peek_u16 = operation((_a,), types.int64, lambda o, at: at.load(I16).zext(I64))
peek_f16 = operation((_a,), _f, lambda o, at: at.load(F16).fpext(F32))
peek_f32 = operation((_a,), _f, lambda o, at: at.load(F32))
poke_i64 = operation((_a, types.int64), types.void, lambda o, at, v: at.store(v))
poke_i32 = operation((_a, _i), types.void, lambda o, at, v: at.store(v))
poke_i16 = operation((_a, _i), types.void, lambda o, at, v: at.store(v.trunc(I16)))
poke_i8 = operation((_a, _i), types.void, lambda o, at, v: at.store(v.trunc(I8)))
poke_f32 = operation((_a, _f), types.void, lambda o, at, v: at.store(v))
poke_f16 = operation((_a, _f), types.void, lambda o, at, v: at.store(v.fptrunc(F16)))

fetch_line = operation((_a,), types.void, lambda o, at: at.fetch(_AHEAD, 64))  # the cache line _AHEAD bytes behind an address

# Scalars.
f32_bits = operation((_i,), _f, lambda o, v: v.bits(F32))
f16_number = operation((types.int64,), _f, lambda o, v: v.trunc(I16).bits(F16).fpext(F32))  # of its bits
half = operation((), _f, lambda o: o.number(0.5, F32))
to_float = operation((types.int64,), _f, lambda o, v: v.sitofp(F32))  # int32 and int64, rounded once
int32 = operation((types.int64,), _i, lambda o, v: v.trunc(I32))
as_f16 = operation((_f,), _f, lambda o, x: x.fptrunc(F16).fpext(F32))
inverse_or_zero = operation((_f,), _f, lambda o, x: (x > 0.0).select(1.0 / x, x.like(0.0)))
is_nan = operation((_f,), types.boolean, lambda o, x: x.unordered("uno", x))
sqrt_f32 = operation((_f,), _f, lambda o, x: call("llvm.sqrt.f32", F32, x))
fma_f32 = operation((_f, _f, _f), _f, lambda o, x, y, z: call("llvm.fma.f32", F32, x, y, z))

# Vectors at an address.
load_f32 = operation((_a,), f32x16, lambda o, at: at.f32())
gather_f32 = operation((_a, _a), f32x16, _gather)  # numbers of an address, by sixteen indices at another
store_f32 = operation((_a, f32x16), types.void, lambda o, at, v: at.store(v))
store_i32 = operation((_a, i32x16), types.void, lambda o, at, v: at.store(v))
store_i16 = operation((_a, i32x16), types.void, lambda o, at, v: at.store(v.trunc(vector_of(I16))))
store_i8 = operation((_a, i32x16), types.void, lambda o, at, v: at.store(v.trunc(vector_of(I8))))
store_bf16 = operation(  # sixteen numbers in 32 bytes, rounded
    (_a, f32x16), types.void, lambda o, at, v: at.store((ops.bf16_bits(v) >> 16).trunc(vector_of(I16)))
)
scatter_f32 = operation((_a, types.int64, types.int64, f32x16), types.void, _scatter)  # the first `count` lanes, stride bytes apart

# Lane by lane.
splat_f32 = operation((_f,), f32x16, lambda o, x: x.splat())
splat_i32 = operation((_i,), i32x16, lambda o, x: x.splat())
fma = operation((f32x16, f32x16, f32x16), f32x16, lambda o, x, y, z: ops.fma(x, y, z))
round_f32 = operation((f32x16,), f32x16, lambda o, v: call("llvm.rint.v16f32", F32X16, v))
truncate_i32 = operation((f32x16,), i32x16, lambda o, v: call("llvm.fptosi.sat.v16i32.v16f32", I32X16, v))
nearest_i32 = operation((f32x16,), i32x16, lambda o, v: ops.nearest_i32(v))
to_f32 = operation((i32x16,), f32x16, lambda o, v: v.sitofp(F32X16))
abs_f32 = operation((f32x16,), f32x16, lambda o, v: call("llvm.fabs.v16f32", F32X16, v))
# A nan stays a nan: a broken weight must show in the logits.
max_f32 = operation((f32x16, f32x16), f32x16, lambda o, x, y: call("llvm.maximum.v16f32", F32X16, x, y))
min_f32 = operation((f32x16, f32x16), f32x16, lambda o, x, y: call("llvm.minimum.v16f32", F32X16, x, y))
clamp = operation(  # to low..high; a nan stays a nan
    (f32x16, f32x16, f32x16), f32x16, lambda o, x, low, high: _either(">", _either("<", x, high), low)
)
keep_above = operation(  # values where x > limit or is nan, 0 elsewhere
    (f32x16, f32x16, f32x16), f32x16, lambda o, x, limit, v: x.unordered(">", limit).select(v, v.like(0.0))
)
as_f32 = operation((i32x16,), f32x16, lambda o, v: v.bits(F32X16))
as_i32 = operation((f32x16,), i32x16, lambda o, v: v.bits(I32X16))
where_less = operation(  # x < limit: the third, else the fourth
    (f32x16, f32x16, f32x16, f32x16), f32x16, lambda o, x, limit, y, z: (x < limit).select(y, z)
)
f16_bits = operation((f32x16,), i32x16, lambda o, v: v.fptrunc(vector_of(F16)).bits(vector_of(I16)).zext(I32X16))
rounded_to_bf16 = operation((f32x16,), f32x16, lambda o, v: ops.bf16_bits(v, 0xFFFF0000).bits(F32X16))
rounded_to_f16 = operation((f32x16,), f32x16, lambda o, v: v.fptrunc(vector_of(F16)).fpext(F32X16))
first_equal = operation((f32x16, f32x16), types.int64, _first_equal)  # the first lane in which both are equal, 16 if none is
first_lanes = operation((f32x16, _i, f32x16), f32x16, _first_lanes)  # lanes below `count` from the first, others from the last
hadamard_lanes = operation((f32x16,), f32x16, _hadamard_lanes)
lanes_at = operation((f32x16, i32x16), f32x16, lambda o, v, indices: ops.lanes_at(v, indices))
swap_middles = operation(  # of each four lanes
    (i32x16,), i32x16, lambda o, v: v.shuffled([4 * (n // 4) + (0, 2, 1, 3)[n % 4] for n in range(LANES)])
)

# All lanes.
sum_lanes = operation((f32x16,), _f, lambda o, v: _fold(v, operator.add))
max_lanes = operation((f32x16,), _f, lambda o, v: _extreme_lane(o, v, ">"))
min_lanes = operation((f32x16,), _f, lambda o, v: _extreme_lane(o, v, "<"))
sum_lanes_i32 = operation((i32x16,), _i, lambda o, v: _fold(v, operator.add))


# Threads.
def _changed(how: str) -> Emit:
    return lambda o, at, v: o.value(o.b.atomic_rmw(how, at.pointer(), v.v, "seq_cst"))


fetch_add = operation((_a, types.int64), types.int64, _changed("add"))
fetch_or = operation((_a, types.int64), types.int64, _changed("or"))
exchange = operation((_a, types.int64), types.int64, _changed("xchg"))
acquire = operation((_a,), types.int64, lambda o, at: o.value(o.b.load_atomic(at.pointer(), "acquire", 8, typ=I64)))
# The time stamp counter: some 1 to 4 cycles a nanosecond, whatever the clock.
cycles = operation((), types.int64, lambda o: o.call("llvm.readcyclecounter", I64))


def _pause(o: Ops) -> None:
    o.call("llvm.x86.sse2.pause", ops.VOID)


pause = operation((), types.void, _pause)

"""LLVM instructions in the notation of arithmetic: the one way in which kernels emit code that Numba does not.

A `Value` appends instructions to its builder. `Ops` makes what has no operands: loops, variables, memory on the stack.
No instruction here allows reassociation or contraction: what is written is what is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from cpuspec.kernels.isa import dot_isa, features, lookup_isa

LANES = 16

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VOID = ir.VoidType()
_POINTER = ir.PointerType()


def vector_of(element: Any, lanes: int = LANES) -> Any:
    """LLVM's type of a vector."""
    return ir.VectorType(element, lanes)


F32X16, I32X16 = vector_of(F32), vector_of(I32)


def _constant(typ: Any, number: float) -> Any:
    return ir.Constant(typ, [number] * typ.count if isinstance(typ, ir.VectorType) else number)


def _element(typ: Any) -> Any:
    return typ.element if isinstance(typ, ir.VectorType) else typ


def _instruction(name: str, floating: str = "", swapped: bool = False) -> Any:
    """An operator: the instruction `name` on integers, `floating` on floats."""

    def apply(self: "Value", other: "Value | float") -> "Value":
        if name == "add" and isinstance(other, int) and other == 0 and not self.is_float:
            return self
        operands = self.v, self.operand(other)
        return Value(self.b, getattr(self.b, floating if self.is_float else name)(*operands[:: -1 if swapped else 1]))

    return apply


def _comparison(relation: str) -> Any:
    """An operator: whether it holds; of floats only where neither is nan."""

    def apply(self: "Value", other: "Value | float") -> "Value":
        compare = self.b.fcmp_ordered if self.is_float else self.b.icmp_signed
        return Value(self.b, compare(relation, self.v, self.operand(other)))

    return apply


def _conversion(instruction: str) -> Any:
    def apply(self: "Value", typ: Any) -> "Value":
        return Value(self.b, getattr(self.b, instruction)(self.v, typ))

    return apply


class Value:
    """A number, an address (I64) or a vector in LLVM. A Python number as the other operand is that number in every lane.

    Quotients, remainders and right shifts are those of unsigned numbers.
    """

    __slots__ = ("b", "v")

    def __init__(self, builder: Any, value: Any) -> None:
        self.b, self.v = builder, value

    @property
    def type(self) -> Any:
        """Its LLVM type."""
        return self.v.type

    @property
    def is_float(self) -> bool:
        """Whether it is made of floating-point numbers."""
        return isinstance(_element(self.type), ir.FloatType | ir.HalfType)

    def operand(self, other: "Value | float") -> Any:
        """The LLVM value of an operand beside this one."""
        return other.v if isinstance(other, Value) else _constant(self.type, other)

    def like(self, number: float) -> "Value":
        """A known number of the same type."""
        return Value(self.b, _constant(self.type, number))

    __add__, __sub__, __mul__ = _instruction("add", "fadd"), _instruction("sub", "fsub"), _instruction("mul", "fmul")
    __radd__, __rsub__, __rmul__ = __add__, _instruction("sub", "fsub", swapped=True), __mul__
    __truediv__, __rtruediv__ = _instruction("", "fdiv"), _instruction("", "fdiv", swapped=True)
    __floordiv__, __mod__, __lshift__, __rshift__ = map(_instruction, ("udiv", "urem", "shl", "lshr"))
    __and__, __or__, __xor__ = map(_instruction, ("and_", "or_", "xor"))
    __lt__, __le__, __gt__, __ge__ = map(_comparison, ("<", "<=", ">", ">="))
    equals, differs = map(_comparison, ("==", "!="))
    zext, sext, trunc, fpext, fptrunc, bits, sitofp, uitofp = map(
        _conversion, ("zext", "sext", "trunc", "fpext", "fptrunc", "bitcast", "sitofp", "uitofp")
    )

    def __neg__(self) -> "Value":
        return Value(self.b, self.b.fneg(self.v))

    def unordered(self, relation: str, other: "Value") -> "Value":
        """A comparison of floats that also holds where one is nan."""
        return Value(self.b, self.b.fcmp_unordered(relation, self.v, other.v))

    def select(self, then: "Value", otherwise: "Value") -> "Value":
        """`then` where this holds, lane by lane, else `otherwise`."""
        return Value(self.b, self.b.select(self.v, then.v, otherwise.v))

    def smaller(self, other: "Value | float") -> "Value":
        """The smaller of two signed integers."""
        return (self < other).select(self, Value(self.b, self.operand(other)))

    def shifted(self, by: int) -> "Value":
        """Shifted left by `by` bits, right where `by` is negative."""
        return self << by if by > 0 else self >> -by if by else self

    def rounded_up(self, unit: int) -> "Value":
        """The number of units that cover this number."""
        return (self + (unit - 1)) // unit

    def splat(self, lanes: int = LANES) -> "Value":
        """A number in every lane."""
        vector, zeros = vector_of(self.type, lanes), ir.Constant(vector_of(I32, lanes), [0] * lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        return Value(self.b, self.b.shuffle_vector(self.b.insert_element(undefined, self.v, ir.Constant(I32, 0)), undefined, zeros))

    def shuffled(self, lanes: Sequence[int], *others: "Value") -> "Value":
        """These lanes, counted through this vector and another."""
        other = others[0].v if others else ir.Constant(self.type, ir.Undefined)
        return Value(self.b, self.b.shuffle_vector(self.v, other, ir.Constant(vector_of(I32, len(lanes)), list(lanes))))

    def lane(self, number: int) -> "Value":
        """One lane."""
        return Value(self.b, self.b.extract_element(self.v, ir.Constant(I32, number)))

    # Of an address.

    def pointer(self) -> Any:
        """As an LLVM pointer."""
        return self.b.inttoptr(self.v, _POINTER)

    def load(self, typ: Any, align: int = 1) -> "Value":
        """The value at this address, aligned or not."""
        return Value(self.b, self.b.load(self.pointer(), typ=typ, align=align))

    def store(self, value: "Value", align: int = 1) -> None:
        """Write a value there, aligned or not."""
        self.b.store(value.v, self.pointer(), align=align)

    def base(self) -> "Value":
        """The same address in a register that offsets are added to: else LLVM may keep a pointer for each one on the stack."""
        return Value(self.b, self.b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [self.v], False))

    def fetch(self, ahead: int, size: int, into_first: bool = True) -> None:
        """Ask for `size` bytes that will be read soon: with many rows the processor does not look that far ahead itself. Any
        address is allowed. into_first: into the first cache, too.
        """
        for line in range(0, size, 64):
            flags = [ir.Constant(I32, value) for value in (0, 3 if into_first else 2, 1)]  # read, these levels, data
            address = (self + (ahead + line)).pointer()
            _call(self.b, "llvm.prefetch.p0", VOID, [address, *flags])

    def every(self, typ: Any) -> "Value":
        """One number of memory in every lane."""
        return self.load(typ).splat()

    def i32(self) -> "Value":
        """Sixteen words."""
        return self.load(I32X16)

    def f32(self) -> "Value":
        """Sixteen numbers."""
        return self.load(F32X16)

    def f16(self) -> "Value":
        """Sixteen numbers of f16."""
        return self.load(vector_of(F16)).fpext(F32X16)

    def bf16(self) -> "Value":
        """Sixteen numbers of bf16."""
        return (self.load(vector_of(I16)).zext(I32X16) << 16).bits(F32X16)

    def u8_codes(self) -> "Value":
        """Sixteen bytes as words."""
        return self.load(vector_of(I8)).zext(I32X16)

    def i8_codes(self) -> "Value":
        """Sixteen signed bytes as words."""
        return self.load(vector_of(I8)).sext(I32X16)

    def u16_codes(self) -> "Value":
        """Sixteen numbers of 16 bits as words."""
        return self.load(vector_of(I16)).zext(I32X16)

    def u8(self) -> "Value":
        """Sixteen unsigned bytes as numbers."""
        return self.u8_codes().uitofp(F32X16)

    def i8(self) -> "Value":
        """Sixteen signed bytes as numbers."""
        return self.i8_codes().sitofp(F32X16)


class Variable:
    """A place for a value of one type, in a register if LLVM can keep it there, or at an address."""

    def __init__(self, builder: Any, pointer: Any, typ: Any, align: int | None = None) -> None:
        self._b, self._pointer, self._typ, self._align = builder, pointer, typ, align

    def get(self) -> Value:
        """Its value."""
        return Value(self._b, self._b.load(self._pointer, typ=self._typ, align=self._align))

    def set(self, value: Value) -> None:
        """Change it."""
        self._b.store(value.v, self._pointer, align=self._align)


class Ops:
    """Appends everything but the arithmetic of values to one LLVM builder."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def value(self, llvm: Any) -> Value:
        """An LLVM value in this notation."""
        return Value(self.b, llvm)

    def number(self, number: float, typ: Any = I64) -> Value:
        """A known number, in every lane of a vector."""
        return Value(self.b, _constant(typ, number))

    def variable(self, initial: Value) -> Variable:
        """A variable with a first value."""
        return Variable(self.b, cgutils.alloca_once_value(self.b, initial.v), initial.type)

    def variables(self, count: int, initial: float = 0.0, typ: Any = F32X16) -> list[Variable]:
        """Variables with the same first value."""
        return [self.variable(self.number(initial, typ)) for _ in range(count)]

    def variable_at(self, address: Value, typ: Any, align: int | None = None) -> Variable:
        """A variable in memory, aligned as its type wants it or to `align`."""
        return Variable(self.b, address.pointer(), typ, align)

    def stack(self, size: int) -> Value:
        """The address of `size` new bytes on the stack, a multiple of 64."""
        with self.b.goto_entry_block():
            where = self.b.alloca(ir.ArrayType(I8, size))
            where.align = 64
            return Value(self.b, self.b.ptrtoint(where, I64))

    @contextmanager
    def loop(self, count: Value | int) -> Iterator[Value]:
        """The body for each index below `count`."""
        with cgutils.for_range(self.b, self.number(count).v if isinstance(count, int) else count.v) as loop:
            yield Value(self.b, loop.index)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """The body if the condition holds."""
        with self.b.if_then(condition.v):
            yield

    def switch(self, key: Value, cases: dict[int, Callable[[], None]]) -> None:
        """The body of the case that `key` is; nothing if there is none."""
        done = self.b.append_basic_block("done")
        switch = self.b.switch(key.v, done)
        for number, body in cases.items():
            block = self.b.append_basic_block(f"case{number}")
            switch.add_case(ir.Constant(key.type, number), block)
            self.b.position_at_end(block)
            body()
            self.b.branch(done)
        self.b.position_at_end(done)

    def call(self, name: str, result: Any, *values: Value) -> Value:
        """Call an LLVM intrinsic or a C function by name."""
        return Value(self.b, _call(self.b, name, result, [v.v for v in values]))

    def call_address(self, address: Value, values: Sequence[Value]) -> None:
        """Call a C function that returns nothing, by its address."""
        function_type = ir.FunctionType(VOID, [v.type for v in values])
        self.b.call(self.b.inttoptr(address.v, function_type.as_pointer()), [v.v for v in values])

    def flush_small_numbers(self) -> Callable[[], None]:
        """Let vector operations take numbers below the least normal one for zeros, until the returned function is called."""
        kept, changed = (cgutils.alloca_once(self.b, I32) for _ in range(2))
        _call(self.b, "llvm.x86.sse.stmxcsr", VOID, [kept])
        self.b.store(self.b.or_(self.b.load(kept), ir.Constant(I32, 0x8040)), changed)  # results, and operands
        _call(self.b, "llvm.x86.sse.ldmxcsr", VOID, [changed])
        return lambda: _call(self.b, "llvm.x86.sse.ldmxcsr", VOID, [kept])

    # Matrices of bytes in tile registers (AMX). A register holds 16 rows of 64 bytes.

    def tile_shapes(self, shapes: dict[int, tuple[int, int]], others: Sequence[int] = (), rows: Value | None = None) -> None:
        """Give tile registers their shapes: register -> (rows, bytes of a row). What they held is lost.

        others: registers with `rows` rows of 64 bytes, 1 to 16.
        """
        config = bytearray(64)
        config[0] = 1  # palette
        for register, (count, row_bytes) in (shapes | dict.fromkeys(others, (1, 64))).items():
            assert count <= 16, f"a tile register has up to 16 rows, got {count}"
            assert row_bytes <= 64, f"a row of a tile register has up to 64 bytes, got {row_bytes}"
            config[16 + 2 * register] = row_bytes
            config[48 + register] = count
        where = cgutils.alloca_once(self.b, ir.ArrayType(I8, len(config)))
        self.b.store(ir.Constant(ir.ArrayType(I8, len(config)), config), where)
        if rows is not None:
            for register in others:
                place = Value(self.b, self.b.ptrtoint(where, I64)) + (48 + register)
                place.store(rows.trunc(I8))
        _call(self.b, "llvm.x86.ldtilecfg", VOID, [where])

    def tile_release(self) -> None:
        """Forget all shapes, so that a switch of threads has less to save."""
        _call(self.b, "llvm.x86.tilerelease", VOID, [])

    def tile_zero(self, register: int) -> None:
        """Fill a tile register with zeros."""
        _call(self.b, "llvm.x86.tilezero", VOID, [ir.Constant(I8, register)])

    def tile_load(self, register: int, address: Value, stride: Value | int) -> None:
        """Load the rows of a tile register, `stride` bytes apart."""
        operands = [ir.Constant(I8, register), address.pointer(), address.operand(stride)]
        _call(self.b, "llvm.x86.tileloadd64", VOID, operands)

    def tile_store(self, register: int, address: Value, stride: Value | int) -> None:
        """Store the rows of a tile register, `stride` bytes apart."""
        operands = [ir.Constant(I8, register), address.pointer(), address.operand(stride)]
        _call(self.b, "llvm.x86.tilestored64", VOID, operands)

    def tile_dot_signed(self, total: int, rows: int, columns: int) -> None:
        """total[r][c] += sum over k, b of rows[r][4k + b] * columns[k][4c + b], signed bytes into exact 32-bit sums."""
        _call(self.b, "llvm.x86.tdpbssd", VOID, [ir.Constant(I8, register) for register in (total, rows, columns)])

    def tile_dot_bf16(self, total: int, rows: int, columns: int) -> None:
        """total[r][c] += the f32 sums of rows[r][k] * columns[k // 2][2c + k % 2] over even k and over odd k, both from 0 upwards
        and then added to each other. Numbers below the least normal one count as zeros.
        """
        _call(self.b, "llvm.x86.tdpbf16ps", VOID, [ir.Constant(I8, register) for register in (total, rows, columns)])


def _call(builder: Any, name: str, result: Any, values: list[Any]) -> Any:
    function_type = ir.FunctionType(result, [v.type for v in values])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, function_type, name), values)


def call(name: str, result: Any, *values: Value) -> Value:
    """Call an LLVM intrinsic by name."""
    return Ops(values[0].b).call(name, result, *values)


def fma(x: Value, y: Value, z: Value) -> Value:
    """x * y + z of vectors, rounded once."""
    return call("llvm.fma.v16f32", F32X16, x, y, z)


def nearest_i32(values: Value) -> Value:
    """The nearest integers, halves to even; what has no integer gives the least."""
    if "avx512f" in features():
        every, as_set = ir.Constant(I16, -1), ir.Constant(I32, 4)  # all lanes, in the rounding mode that is set: to nearest
        operands = [values.v, _constant(I32X16, 0), every, as_set]
        return Value(values.b, _call(values.b, "llvm.x86.avx512.mask.cvtps2dq.512", I32X16, operands))
    half = vector_of(I32, 8)
    parts = [call("llvm.x86.avx.cvt.ps2dq.256", half, values.shuffled(range(at, at + 8))) for at in (0, 8)]
    return parts[0].shuffled(range(LANES), parts[1])


def bf16_bits(values: Value, mask: int = 0xFFFFFFFF) -> Value:
    """The bits of numbers rounded to bf16, to nearest even, in the upper halves; a nan stays one."""
    bits = values.bits(I32X16)
    odd = bits >> 16 & 1
    rounded, quiet = bits + (odd + 0x7FFF), bits | 0x400000
    return values.unordered("uno", values).select(quiet, rounded) & mask


def bf16_pairs(even: Value, odd: Value) -> Value:
    """Two vectors of f32 rounded to bf16, to nearest even: of each lane `even` in the lower half and `odd` in the upper one."""
    if "avx512bf16" not in features():
        return bf16_bits(even) >> 16 | bf16_bits(odd, 0xFFFF0000)
    rounded = ir.FunctionType(I32X16, [F32X16, F32X16])
    both = Value(even.b, even.b.asm(rounded, "vcvtne2ps2bf16 $2, $1, $0", "=v,v,v", [odd.v, even.v], False))
    lanes = [lane + LANES * half for lane in range(LANES) for half in range(2)]
    return both.bits(vector_of(I16, 2 * LANES)).shuffled(lanes).bits(I32X16)


def bf16_numbers(values: Value) -> Value:
    """Sixteen numbers of f32 as sixteen of bf16, to nearest even; those below the least normal one become zeros (AVX-512 BF16)."""
    rounded = ir.FunctionType(vector_of(I16), [F32X16])
    return Value(values.b, values.b.asm(rounded, "vcvtneps2bf16 $1, $0", "=v,v", [values.v], False))


def dot_pairs(total: Value, x: Value, y: Value) -> Value:
    """Per lane: total + the two products of pairs of bf16 numbers (AVX-512 BF16). Those below the least normal one are zeros."""
    product = ir.FunctionType(F32X16, [x.type, y.type, F32X16])
    return Value(total.b, total.b.asm(product, "vdpbf16ps $2, $1, $0", "=v,v,v,0", [x.v, y.v, total.v], False))


def dot_bytes(total: Value, unsigned: Value, signed: Value) -> Value:
    """Per lane: total + the four products of unsigned and signed bytes, in exact 32-bit arithmetic.

    With AVX2 alone it is exact only if every two neighbouring products together fit 16 bits.
    """
    if dot_isa() == "avx512_vnni":
        return call("llvm.x86.avx512.vpdpbusd.512", I32X16, total, unsigned, signed)
    half, words = vector_of(I32, 8), vector_of(I16)
    parts = []
    for start in (0, 8):
        operands = [v.shuffled(range(start, start + 8)) for v in (total, unsigned, signed)]
        if dot_isa() == "avx_vnni":
            parts.append(call("llvm.x86.avx512.vpdpbusd.256", half, *operands))
            continue
        pairs = call("llvm.x86.avx2.pmadd.ub.sw", words, *(operand.bits(vector_of(I8, 32)) for operand in operands[1:]))
        parts.append(operands[0] + call("llvm.x86.avx2.pmadd.wd", half, pairs, pairs.like(1)))
    return parts[0].shuffled(range(LANES), parts[1])


_LOOKUPS = {"avx512bw": ("llvm.x86.avx512.pshuf.b.512", 64), "avx2": ("llvm.x86.avx2.pshuf.b", 32)}


def lookup_bytes(table: Sequence[int], indices: Value, isa: str | None = None) -> Value:
    """Per byte 0..15 of an i32x16 vector: that entry of a table of 16 bytes. isa: of `lookup_isa`, by default the processor's."""
    indices = indices.bits(vector_of(I8, 64))
    name, width = _LOOKUPS[isa or lookup_isa()]
    part = vector_of(I8, width)
    # The instruction looks up within 16 bytes, so each 16 have the table.
    entries = Value(indices.b, ir.Constant(part, list(table) * (width // 16)))
    found_parts = [call(name, part, entries, indices.shuffled(range(at, at + width))) for at in range(0, 64, width)]
    if len(found_parts) == 2:
        return found_parts[0].shuffled(range(64), found_parts[1]).bits(I32X16)
    return found_parts[0].bits(I32X16)


def lookup_64(table: Sequence[int], indices: Value) -> Value:
    """Per byte 0..63 of an i32x16 vector: that entry of a table of 64 signed bytes (AVX-512 VBMI)."""
    part = vector_of(I8, 64)
    return call("llvm.x86.avx512.permvar.qi.512", part, Value(indices.b, ir.Constant(part, list(table))), indices.bits(part)).bits(
        I32X16
    )


def lookup_f32(table: Sequence[float], indices: Value) -> Value:
    """Per index 0..15 of an i32x16 vector: that entry of a table of 16 numbers."""
    return lanes_at(Value(indices.b, ir.Constant(F32X16, list(table))), indices)


def lanes_at(entries: Value, indices: Value) -> Value:
    """Per index 0..15 of an i32x16 vector: that lane of an f32x16 vector."""
    if "avx512f" in features():
        return call("llvm.x86.avx512.permvar.sf.512", F32X16, entries, indices)
    half = vector_of(F32, 8)
    low, high = (entries.shuffled(range(at, at + 8)) for at in (0, 8))
    parts = []
    for at in (0, 8):
        index = indices.shuffled(range(at, at + 8))  # of which the instruction takes three bits
        found = [call("llvm.x86.avx2.permps", half, of, index) for of in (low, high)]
        parts.append((index > 7).select(found[1], found[0]))
    return parts[0].shuffled(range(LANES), parts[1])

"""Tile registers (AMX) on processors without them: the same kernels, whose tile instructions are loops over memory.

    python -m pytest -p tests.kernels.emulated_tiles tests/kernels

runs what a processor with AMX would. It needs AVX-512 with bf16. Kernels are kept in a directory of the process alone, because
they call functions of the C library by their addresses.
"""

import ctypes
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

from cpuspec.kernels import isa
from cpuspec.kernels.ops import F32X16, I8, I16, I32, I32X16, I64, Ops, Value, fma

_REGISTERS, _ROWS, _LINE = 8, 16, 64
_BYTES = _LINE * (1 + _REGISTERS * _ROWS)  # of a thread: the configuration, and the registers
_LIBC = ctypes.CDLL(None)
_KEY = ctypes.c_uint()
assert not _LIBC.pthread_key_create(ctypes.byref(_KEY), None)


def _c(o: Ops, name: str, *values: Value) -> Value:
    """Call a function of the C library that returns a pointer."""
    kind = ir.FunctionType(I64, [one.type for one in values])
    address = ctypes.cast(getattr(_LIBC, name), ctypes.c_void_p).value
    return o.value(o.b.call(o.b.inttoptr(o.number(address or 0).v, kind.as_pointer()), [one.v for one in values]))


def _config(o: Ops) -> Value:
    """The memory of this thread, which is made when it is first asked for."""
    key = o.number(_KEY.value, I32)
    memory = o.variable(_c(o, "pthread_getspecific", key))
    with o.when(memory.get().equals(0)):
        memory.set(_c(o, "calloc", o.number(1), o.number(_BYTES)))
        _c(o, "pthread_setspecific", key, memory.get())
    return memory.get()


def _register(o: Ops, number: int) -> Value:
    return _config(o) + _LINE * (1 + _ROWS * number)


def _rows(o: Ops, number: int) -> Value:
    return (_config(o) + (48 + number)).load(I8).zext(I64)


def _words(o: Ops, number: int) -> Value:
    """Words of 32 bits in a row."""
    return (_config(o) + (16 + 2 * number)).load(I16).zext(I64) // 4


def _check(o: Ops, *same: tuple[Value, Value]) -> None:
    """End the process, as the processor does where shapes do not fit."""
    for got, wanted in same:
        with o.when(got.differs(wanted)):
            o.call("llvm.trap", ir.VoidType())


class EmulatedTiles(Ops):
    """`Ops` whose tile registers are memory."""

    def tile_shapes(self, shapes: dict[int, tuple[int, int]], others: Sequence[int] = (), rows: Value | None = None) -> None:
        """As `Ops` says; what registers held becomes zeros."""
        o = self
        with o.loop(_BYTES // _LINE) as line:
            (_config(o) + line * _LINE).store(o.number(0, I32X16))
        for register, (count, row_bytes) in (shapes | dict.fromkeys(others, (1, 64))).items():
            (_config(o) + (16 + 2 * register)).store(o.number(row_bytes, I16))
            (_config(o) + (48 + register)).store(o.number(count, I8))
        for register in others if rows is not None else ():
            assert rows is not None
            (_config(o) + (48 + register)).store(rows.trunc(I8))

    def tile_release(self) -> None:
        """Registers have no rows then."""
        _config(self).store(self.number(0, I32X16))

    def tile_zero(self, register: int) -> None:
        """As `Ops` says."""
        with self.loop(_ROWS) as row:
            (_register(self, register) + row * _LINE).store(self.number(0, I32X16))

    def tile_load(self, register: int, address: Value, stride: Value | int) -> None:
        """As `Ops` says; what the shape does not have becomes zeros."""
        self.tile_zero(register)
        self._copy(register, address, stride, is_load=True)

    def tile_store(self, register: int, address: Value, stride: Value | int) -> None:
        """As `Ops` says."""
        self._copy(register, address, stride, is_load=False)

    def _copy(self, register: int, address: Value, stride: Value | int, is_load: bool) -> None:
        with self.loop(_rows(self, register)) as row, self.loop(_words(self, register)) as word:
            inside, outside = _register(self, register) + row * _LINE + word * 4, address + row * stride + word * 4
            source, to = (outside, inside) if is_load else (inside, outside)
            to.store(source.load(I32))

    def tile_dot_signed(self, total: int, rows: int, columns: int) -> None:
        """As `Ops` says."""
        with self._products(total, rows, columns) as (sums, first, count), self.loop(count) as k:
            numbers, row = (first + k * 4).load(I32).splat(), (_register(self, columns) + k * _LINE).i32()
            products = [_signed(numbers, n) * _signed(row, n) for n in range(4)]
            sums.store(sums.i32() + (products[0] + products[1] + (products[2] + products[3])))

    def tile_dot_bf16(self, total: int, rows: int, columns: int) -> None:
        """As `Ops` says."""
        with self._products(total, rows, columns) as (sums, first, count):
            put_back = self.flush_small_numbers()
            parts = self.variables(2)
            with self.loop(count) as k:
                numbers, row = (first + k * 4).load(I32).splat(), (_register(self, columns) + k * _LINE).i32()
                for part, half in zip(parts, (_even, _odd), strict=True):
                    part.set(fma(half(numbers), half(row), part.get()))
            sums.store(sums.f32() + (parts[0].get() + parts[1].get()))
            put_back()

    @contextmanager
    def _products(self, total: int, rows: int, columns: int) -> Iterator[tuple[Value, Value, Value]]:
        """For each row of the sums where it is, where its numbers begin, and how many words these are."""
        count = _words(self, rows)
        _check(
            self,
            (_rows(self, total), _rows(self, rows)),
            (count, _rows(self, columns)),
            (_words(self, total), _words(self, columns)),
        )
        with self.loop(_rows(self, total)) as row:
            yield _register(self, total) + row * _LINE, _register(self, rows) + row * _LINE, count


def _signed(words: Value, byte: int) -> Value:
    """A byte of each word."""
    shifted = words.shifted(24 - 8 * byte)
    return Value(words.b, words.b.ashr(shifted.v, words.like(24).v))


def _even(pairs: Value) -> Value:
    return (pairs << 16).bits(F32X16)


def _odd(pairs: Value) -> Value:
    return (pairs & 0xFFFF0000).bits(F32X16)


def pytest_configure() -> None:
    """Replace the registers, before any kernel is compiled."""
    assert isa.has_bf16_dots(), "this processor has no AVX-512 with bf16"
    os.environ["CPUSPEC_CACHE"] = tempfile.mkdtemp(prefix="cpuspec-tiles-")
    for name, method in vars(EmulatedTiles).items():
        if name.startswith(("tile_", "_copy", "_products")):
            setattr(Ops, name, method)
    isa.has_tiles.cache_clear()
    isa.has_bf16_tiles.cache_clear()
    for name in ("has_tiles", "has_bf16_tiles"):
        setattr(isa, name, _yes)


def _yes() -> bool:
    return True


_yes.__wrapped__ = _yes  # type: ignore[attr-defined]

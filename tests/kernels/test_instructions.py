"""The products that are written instruction by instruction: interpreted here, so that those of processors that this one is not run,
too. What this processor runs is compared with the same numbers in `test_linear.py`.
"""

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from llvmlite import ir

from cpuspec.kernels.instructions import MOST_ROWS, SCRATCH_BYTES, Products
from cpuspec.kernels.ops import I64, VOID, Value
from cpuspec.kernels.products import (
    LOW_BYTES,
    MINUS_8_SUMS,
    MINUS_16_SUMS,
    MINUS_32_HIGH,
    MINUS_32_LOW,
    MINUS_128_SUMS,
    ORDERS,
    SCALE,
    SHIFT,
    VALUE_SUM,
)  # fmt: skip
from cpuspec.kernels.readers import READERS


def _products(name: str, order: str, vnni: bool) -> Products:
    function = ir.Function(ir.Module(), ir.FunctionType(VOID, [I64] * 3), name="read")
    builder = ir.IRBuilder(function.append_basic_block())
    group = READERS[name](*(Value(builder, argument) for argument in function.args))
    return replace(Products.of(order, group), vnni=vnni)


@dataclass
class _Processor:
    """Sixteen registers of 32 bytes, and memory by operand."""

    memory: list[bytearray]

    def __post_init__(self) -> None:
        self.registers = [bytes(32)] * 16

    def run(self, text: str) -> None:
        name, _, rest = text.removeprefix("{vex} ").partition(" ")
        *sources, to = re.findall(r"%ymm\d+|\$\$\d+|\d+\(\$\d\)", rest)
        values = [self._value(source, 4 if "broadcast" in name else 32) for source in sources]
        self._put(to, getattr(self, "_" + name)(*values, self._value(to, 32)))

    def _place(self, text: str) -> tuple[bytearray, int]:
        offset, operand = re.fullmatch(r"(\d+)\(\$(\d)\)", text).groups()  # type: ignore[union-attr]
        return self.memory[int(operand)], int(offset)

    def _value(self, text: str, size: int) -> bytes | int:
        if text.startswith("%ymm"):
            return self.registers[int(text[4:])]
        if text.startswith("$$"):
            return int(text[2:])
        memory, offset = self._place(text)
        assert offset + size <= len(memory), f"{text} is outside of {len(memory)} bytes"
        assert offset % size == 0, f"{text} is not aligned"
        return bytes(memory[offset : offset + size])

    def _put(self, text: str, value: bytes) -> None:
        assert len(value) == 32
        if text.startswith("%ymm"):
            self.registers[int(text[4:])] = value
        else:
            memory, offset = self._place(text)
            memory[offset : offset + 32] = value

    def _vmovdqa(self, value, _):
        return value

    _vmovaps = _vmovdqa

    def _vpbroadcastd(self, value, _):
        return value * 8

    _vbroadcastss = _vpbroadcastd

    def _vpxor(self, x, y, _):
        return bytes(a ^ b for a, b in zip(x, y, strict=True))

    def _vpcmpeqw(self, x, y, _):
        return (-(_as(x, "i2") == _as(y, "i2")).astype("i2")).tobytes()

    def _vpsrlw(self, by, x, _):
        return (_as(x, "u2") >> by).tobytes()

    def _vpsllw(self, by, x, _):
        return (_as(x, "u2") << by).tobytes()

    def _vpslld(self, by, x, _):
        return (_as(x, "u4") << by).tobytes()

    def _vpaddw(self, x, y, _):
        return (_as(x, "u2") + _as(y, "u2")).tobytes()

    def _vpaddd(self, x, y, _):
        return (_as(x, "u4") + _as(y, "u4")).tobytes()

    def _vpmaddubsw(self, signed, unsigned, _):
        pairs = (_as(signed, "i1").astype(int) * _as(unsigned, "u1")).reshape(-1, 2).sum(1)
        return pairs.clip(-(1 << 15), (1 << 15) - 1).astype("i2").tobytes()

    def _vpmaddwd(self, x, y, _):
        return (_as(x, "i2").astype(int) * _as(y, "i2")).reshape(-1, 2).sum(1).astype("i4").tobytes()

    def _vpdpbusd(self, signed, unsigned, total):
        return (
            (_as(total, "i4") + (_as(signed, "i1").astype(int) * _as(unsigned, "u1")).reshape(-1, 4).sum(1)).astype("i4").tobytes()
        )

    def _vcvtdq2ps(self, x, _):
        return _as(x, "i4").astype("f4").tobytes()

    def _vmulps(self, x, y, _):
        return (_as(x, "f4") * _as(y, "f4")).tobytes()

    def _vfmadd213ps(self, x, y, to):
        return _fma(to, y, x)

    def _vfmadd231ps(self, x, y, to):
        return _fma(y, x, to)


def _as(value: bytes, kind: str) -> np.ndarray:
    return np.frombuffer(value, "<" + kind)


def _fma(x: bytes, y: bytes, z: bytes) -> bytes:
    x_, y_, z_ = (_as(value, "f4").astype(np.longdouble) for value in (x, y, z))
    return (x_ * y_ + z_).astype("f4").tobytes()


def _memory(products: Products, rows: int) -> tuple[list[bytearray], np.ndarray]:
    """The operands of a random group, and what the totals must become."""
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 1 << products.bits, (16, 32))
    codes[0] = (1 << products.bits) - 1  # sums that are as large as they can be
    scales = rng.standard_normal((products.num_scales, 16)).astype("f4")
    minima = rng.standard_normal((products.num_minima, 16)).astype("f4")
    weights = np.repeat(scales, 32 // products.num_scales, 0).T * (codes.astype("f8") - products.zero)
    sum_of_weights = weights.sum(1)
    if products.num_minima:
        weights += np.repeat(minima, 32 // products.num_minima, 0).T
    wide = products.order == "int16"
    inputs = rng.integers(-32512 if wide else -127, 32512 if wide else 128, (rows, 32))
    inputs[0] = 32511 if wide else 127
    scale, shift = rng.random(rows).astype("f4") + 1, rng.standard_normal(rows).astype("f4") * products.shifted
    values = inputs * scale[:, None].astype("f8") + shift[:, None]

    records = bytearray(rows * ORDERS[products.order])
    for row in range(rows):
        record = memoryview(records)[row * ORDERS[products.order] :]
        low = inputs[row].astype("u2").astype("u1").view("i1")
        if products.in_words:
            words = inputs[row].reshape(8, 4)[:, [0, 2, 1, 3]].astype("<i2").tobytes()
            record[:32], record[LOW_BYTES : LOW_BYTES + 32] = words[:32], words[32:]
        elif wide:
            record[:32] = ((inputs[row] - low) >> 8).astype("i1").tobytes()
            record[LOW_BYTES : LOW_BYTES + 32] = low.tobytes()
        else:
            record[:32] = low.tobytes()
        for field, number in ((SCALE, scale[row]), (SHIFT, shift[row]), (VALUE_SUM, values[row].sum())):
            record[field : field + 4] = np.float32(number).tobytes()
        halves = -32 * inputs[row].reshape(2, 16).sum(1)
        sums = {MINUS_8_SUMS: -8, MINUS_16_SUMS: -16, MINUS_128_SUMS: -128}
        fields = {field: zero * inputs[row].sum() for field, zero in sums.items()}
        for field, number in (fields | {MINUS_32_LOW: halves[0], MINUS_32_HIGH: halves[1]}).items():
            if field != VALUE_SUM or products.num_minima != 1:
                record[field : field + 4] = np.int32(number).tobytes()

    vectors = codes.reshape(16, 8, 4).transpose(1, 0, 2).astype("u1").reshape(8, 64)
    if products.in_words:
        laid = np.stack([vectors[:, 0::2], vectors[:, 1::2]], 1).astype("<u2").reshape(16, 32)
    elif products.in_nibbles:
        laid = np.concatenate([vectors & 15, vectors >> 4])
    else:
        laid = vectors
    if products.num_minima == 2:  # one minimum is multiplied with the sum of the values
        sum_of_weights = weights.sum(1)
    factors = [*scales, *(minima * np.float32(-1 / 32) if products.num_minima == 2 else minima)]
    factors += [sum_of_weights.astype("f4")] if products.shifted else []
    totals = rng.standard_normal((rows, 16)).astype("f4")
    memory = [laid.tobytes(), np.array(factors, "f4").tobytes(), records, totals.tobytes(), bytes(SCRATCH_BYTES)]
    return [bytearray(part) for part in memory], totals + values @ weights.T


@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize("order", ["int8", "int16"])
@pytest.mark.parametrize("name", READERS)
def test_instructions_of_both_kinds_of_processors_give_the_same_bits_and_the_products(name: str, order: str, rows: int) -> None:
    found = []
    for vnni in (False, True):
        products = _products(name, order, vnni)
        memory, wanted = _memory(products, rows)
        processor = _Processor(memory)
        for instruction in products.instructions(rows):
            processor.run(instruction)
        totals = _as(bytes(memory[3]), "f4").reshape(rows, 16)
        assert np.abs(totals - wanted).max() < 1e-5 * np.abs(wanted).max()
        found.append(totals.tobytes())
    assert found[0] == found[1]


def test_a_wrong_instruction_changes_the_products() -> None:
    products = _products("q4_k", "int8", True)
    instructions = list(products.instructions(3))
    memory, wanted = _memory(products, 3)
    del instructions[next(n for n, text in enumerate(instructions) if "vpdpbusd" in text)]
    processor = _Processor(memory)
    for instruction in instructions:
        processor.run(instruction)
    assert np.abs(_as(bytes(memory[3]), "f4").reshape(3, 16) - wanted).max() > 1e-3 * np.abs(wanted).max()

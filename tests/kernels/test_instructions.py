"""The products that are written instruction by instruction: interpreted here, so that those of other processors than this one run,
too. `test_bits.py` compares what this processor runs with the same reference.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
from llvmlite import ir

from cpuspec.formats import FORMATS
from cpuspec.formats.packing import GROUP, TILE
from cpuspec.kernels import isa
from cpuspec.kernels.instructions import MOST_ROWS, SCRATCH_BYTES, MultiplyPlan
from cpuspec.kernels.ops import I64, VOID, Value
from cpuspec.kernels.products import PANEL_LINE
from cpuspec.kernels.readers import READERS
from cpuspec.kernels.selfcheck import Inputs, records
from tests.kernels import reference


def _products(name: str, order: str, vnni: bool) -> MultiplyPlan:
    function = ir.Function(ir.Module(), ir.FunctionType(VOID, [I64] * 3), name="read")
    builder = ir.IRBuilder(function.append_basic_block())
    with patch.object(isa, "dot_isa", lambda: "avx_vnni" if vnni else "avx2"):
        return MultiplyPlan.of(order, READERS[name](*(Value(builder, argument) for argument in function.args)))


@dataclass
class _Processor:
    """Sixteen registers of 32 bytes, and memory by operand."""

    memory: list[bytearray]

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.registers = [rng.bytes(32) for _ in range(16)]  # left from other code

    def run(self, text: str) -> None:
        name, _, rest = text.removeprefix("{vex} ").partition(" ")
        *sources, to = re.findall(r"%ymm\d+|\$\$\d+|\d+\(\$\d\)", rest)
        values = [self._value(source, 4 if "broadcast" in name else 32) for source in sources]
        self._put(to, _INSTRUCTIONS[name](*values, self._value(to, 32)))

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


def _as(value: bytes, kind: str) -> np.ndarray:
    return np.frombuffer(value, "<" + kind)


def _fma(x: bytes, y: bytes, z: bytes) -> bytes:
    return reference.fma(*(_as(value, "f4") for value in (x, y, z))).tobytes()


def _products_of_bytes(signed: bytes, unsigned: bytes, together: int) -> np.ndarray:
    return (_as(signed, "i1").astype(int) * _as(unsigned, "u1")).reshape(-1, together).sum(1)


# From the sources and what was in the target to what is in it afterwards.
_INSTRUCTIONS: dict[str, Callable[..., bytes]] = {
    "vmovdqa": lambda value, _: value,
    "vmovaps": lambda value, _: value,
    "vpbroadcastd": lambda value, _: value * 8,
    "vbroadcastss": lambda value, _: value * 8,
    "vpxor": lambda x, y, _: bytes(a ^ b for a, b in zip(x, y, strict=True)),
    "vpcmpeqw": lambda x, y, _: (-(_as(x, "i2") == _as(y, "i2")).astype("i2")).tobytes(),
    "vpsrlw": lambda by, x, _: (_as(x, "u2") >> by).tobytes(),
    "vpsllw": lambda by, x, _: (_as(x, "u2") << by).tobytes(),
    "vpslld": lambda by, x, _: (_as(x, "u4") << by).tobytes(),
    "vpaddw": lambda x, y, _: (_as(x, "u2") + _as(y, "u2")).tobytes(),
    "vpaddd": lambda x, y, _: (_as(x, "u4") + _as(y, "u4")).tobytes(),
    "vpmaddubsw": lambda x, y, _: _products_of_bytes(x, y, 2).clip(-(1 << 15), (1 << 15) - 1).astype("i2").tobytes(),
    "vpmaddwd": lambda x, y, _: (_as(x, "i2").astype(int) * _as(y, "i2")).reshape(-1, 2).sum(1).astype("i4").tobytes(),
    "vpdpbusd": lambda x, y, total: (_as(total, "i4") + _products_of_bytes(x, y, 4)).astype("i4").tobytes(),
    "vcvtdq2ps": lambda x, _: _as(x, "i4").astype("f4").tobytes(),
    "vmulps": lambda x, y, _: (_as(x, "f4") * _as(y, "f4")).tobytes(),
    "vfmadd213ps": lambda x, y, to: _fma(to, y, x),
    "vfmadd231ps": lambda x, y, to: _fma(y, x, to),
}


def _memory(products: MultiplyPlan, rows: int) -> tuple[list[bytearray], np.ndarray]:
    """The operands of a random group, and what the totals must become."""
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 1 << products.bits, (TILE, GROUP))
    codes[0] = (1 << products.bits) - 1  # sums that are as large as they can be
    scales, minima = (rng.standard_normal((TILE, count)).astype("f4") for count in (products.num_scales, products.num_minima))
    weights = reference.Weights(codes - products.zero, scales, minima)
    wide = products.encoding == "int16"
    largest = 32512 if wide else 127
    numbers = rng.integers(-largest, largest + 1, (rows, GROUP))
    numbers[0] = 127 * 256 - 128 if wide else 127
    scale, shift, value_sum = rng.random(rows).astype("f4") + 1, *rng.standard_normal((2, rows)).astype("f4")
    inputs = Inputs(numbers, scale, shift * products.shifted, value_sum)
    totals = rng.standard_normal((rows, TILE)).astype("f4")

    vectors = codes.reshape(TILE, 8, 4).swapaxes(0, 1).astype("u1").reshape(8, 64)
    if products.in_words:
        laid = np.stack([vectors[:, 0::2], vectors[:, 1::2]], 1).astype("<u2")
    elif products.in_nibbles:
        laid = np.concatenate([vectors & 15, vectors >> 4])
    else:
        laid = vectors
    factors = [*scales.T, *(minima.T * np.float32(-1 / 32) if products.num_minima == 2 else minima.T)]
    factors += [reference.sum_of_weights(weights)] if products.shifted else []
    order = "int8" if products.encoding == "rotated" else products.encoding
    rows_of_inputs = records(Inputs(*(part[:, None] for part in inputs)), order, products.in_words)
    memory = [laid.tobytes(), np.array(factors).tobytes(), rows_of_inputs.tobytes(), totals.tobytes(), bytes(SCRATCH_BYTES)]
    wanted = reference.add_group(totals, weights, inputs)
    if products.encoding == "rotated":  # sums of a panel, of which this group is one
        whole = np.arange(TILE * rows, dtype="<i4").reshape(rows, TILE) * 1000
        memory[2] = b"".join(row.tobytes().ljust(PANEL_LINE) for row in numbers.astype("i1"))
        memory[3], wanted = whole.tobytes(), (whole + numbers @ codes.T).astype("<i4")
    return [bytearray(part) for part in memory], wanted


def _totals(instructions: Iterable[str], memory: list[bytearray]) -> bytes:
    """What the instructions make of the totals."""
    processor = _Processor([bytearray(part) for part in memory])
    for instruction in instructions:
        processor.run(instruction)
    return bytes(processor.memory[3])


CODES = [(name, order) for name in READERS for order in (("rotated",) if FORMATS[name].rotated else ("int8", "int16"))]
both_processors = pytest.mark.parametrize("vnni", [False, True], ids=["avx2", "avx_vnni"])


@pytest.mark.parametrize(("name", "order"), CODES)
@both_processors
def test_the_instructions_for_every_processor_give_the_bits_of_the_reference(vnni: bool, name: str, order: str) -> None:
    products = _products(name, order, vnni)
    for rows in range(1, MOST_ROWS + 1):
        memory, wanted = _memory(products, rows)
        assert _totals(products.instructions(rows), memory) == wanted.tobytes(), f"{rows} rows"


@pytest.mark.parametrize("name", ["q2_k", "q8_0"])
@both_processors
def test_the_products_are_others_without_any_one_of_the_instructions(vnni: bool, name: str) -> None:
    products = _products(name, "int8", vnni)
    memory, wanted = _memory(products, 2)
    instructions = list(products.instructions(2))
    for number, instruction in enumerate(instructions):
        assert _totals(instructions[:number] + instructions[number + 1 :], memory) != wanted.tobytes(), instruction

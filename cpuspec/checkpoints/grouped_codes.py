"""Matrices of quantization tools as the engine's formats: the same values, in about as many bytes.

`GroupedCodes` is a matrix [N, K] of codes in groups of inputs, value = scale * (code - zero). Each package has tensors and
orders of its own for codes, scales and zero points. Its reader makes rows of bits of them, and this module makes
the blocks of a format.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.safetensors import StoredTensor
from cpuspec.errors import CheckpointError
from cpuspec.formats import Format, QuantTensor, get_format, lowbit
from cpuspec.formats.format import F32, I32, U8

_CHUNK_VALUES = 1 << 22  # made at a time: temporaries stay small beside the result

LayerTensors = Mapping[str, StoredTensor]  # the tensors of a layer by the ends of their names


@dataclass(frozen=True)
class Method:
    """How a package stores the matrices of linear layers, by the settings of one model.

    kind: for people. parts: the ends of the names of a layer's tensors. is_quantized: whether a layer with these tensors is.
    matrix: reads the matrix [N, K] of a layer, whose name for messages is the first argument; raises CheckpointError if its tensors
    do not belong together, or are of a kind that is not supported. separator: between a layer's name and such an end.
    unused: the ends of the names of tensors that no forward here needs, as scales of a cache.
    """

    kind: str
    parts: tuple[str, ...]
    is_quantized: Callable[[LayerTensors], bool]
    matrix: Callable[[str, LayerTensors], QuantTensor]
    separator: str = "."
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class GroupedCodes:
    """Integer codes in groups.

    rows: the codes of some rows in the order of inputs, as bits, U8 [n, K * bits / 8]; the first code has the lowest bits.
    group: inputs of a group; the last group may have fewer.
    order: the inputs group by group, where groups are not made of neighbours (`QuantTensor.order`).
    """

    shape: tuple[int, int]
    bits: int
    group: int
    rows: Callable[[slice], U8]
    scales: F32  # [N, groups]
    zeros: I32  # [N, groups], 0 to 2^bits - 1
    order: I32 | None = None

    def tensor(self, prefers_q8_0: bool = False) -> QuantTensor:
        """The matrix in the format of fewest bits that has its values: int4, int3, int2 and q8_0 have f16 scales, int8 has f32
        scales, and f32 has any value. A group longer than the format's is several under the same scale.

        prefers_q8_0: to int8 of larger groups.
        """
        symmetric = bool((self.zeros == 1 << self.bits - 1).all())
        with np.errstate(over="ignore"):
            in_halves = np.array_equal(self.scales.astype(np.float16).astype(np.float32), self.scales)
        choices = []
        if in_halves and self.bits == 4:
            choices += [f"int4_g{size}" + ("" if symmetric else "_asym") for size in (128, 64, 32)]
        if in_halves and self.bits in (2, 3):
            choices += [f"int{self.bits}_g{size}_asym" for size in (64, 32)]
        if symmetric or self.bits < 8:  # codes less their zero points are signed bytes
            order = ("q8_0", "int8_g128", "int8_g32") if prefers_q8_0 else ("int8_g128", "q8_0", "int8_g32")
            choices += [name for name in order if in_halves or name != "q8_0"]
        format = best_format(choices, self.shape[1], self.group)
        return assembled(format, self.shape, lambda some: self._blocks(format, some), self.order)

    def _blocks(self, format: Format, some: slice) -> U8:
        """Some rows in a format."""
        if format.name == "f32":
            values = per_input(self.scales[some], self.shape[1], self.group) * self._steps(some)
            return np.ascontiguousarray(values, np.float32).view(np.uint8)
        scales, zeros = (per_block(numbers[some], format, self.shape[1], self.group) for numbers in (self.scales, self.zeros))
        if format.name.startswith("int4") and self.order is None:  # whose codes are such bits
            fields = np.empty(scales.shape, format.layout)
            fields["d"], fields["codes"] = scales, self.rows(some).reshape(*scales.shape, -1)
            if "z" in (format.layout.names or ()):
                fields["z"] = zeros
            return fields.view(np.uint8).reshape(len(fields), -1)
        if format.code_bits == 8:
            return format.join({"d": scales, "codes": (self._steps(some) + 128).astype(np.uint8)})
        return format.join({"d": scales, "z": zeros * (1 if self.bits == 4 else lowbit.ZERO_STEPS), "codes": self._codes(some)})

    def _codes(self, some: slice) -> U8:
        codes = unpacked(self.rows(some), self.bits, self.shape[1])
        return codes if self.order is None else codes[:, self.order]

    def _steps(self, some: slice) -> I32:
        return self._codes(some) - per_input(self.zeros[some], self.shape[1], self.group)


def best_format(choices: list[str], columns: int, group: int) -> Format:
    """The first of these formats whose blocks fill rows and lie within one group each, else f32."""
    for name in choices:
        size = get_format(name).block_size
        if columns % size == 0 and (group % size == 0 or group >= columns):
            return get_format(name)
    return get_format("f32")


def per_block(numbers: NDArray[Any], format: Format, columns: int, group: int) -> NDArray[Any]:
    """Numbers of groups [n, groups] for each block of a format [n, blocks]."""
    return numbers[:, np.arange(0, columns, format.block_size) // group]


def per_input(numbers: NDArray[Any], columns: int, group: int) -> NDArray[Any]:
    """Numbers of groups [n, groups] for each input [n, K]."""
    return numbers[:, np.arange(columns) // group]


def assembled(format: Format, shape: tuple[int, int], blocks: Callable[[slice], U8], order: I32 | None = None) -> QuantTensor:
    """The tensor whose bytes `blocks` gives some rows at a time."""
    rows, columns = shape
    data = np.empty((rows, format.row_bytes(columns)), np.uint8)
    step = max(1, _CHUNK_VALUES // columns)
    for start in range(0, rows, step):
        some = slice(start, min(start + step, rows))
        data[some] = blocks(some)
    return QuantTensor(format, shape, data, order)


def unpacked(packed: U8, bits: int, count: int) -> U8:
    """The first `count` codes of rows of bits [n, bytes], U8 [n, count]."""
    if bits == 8:
        return packed[:, :count]
    if bits not in (2, 4):
        parts = np.unpackbits(packed, axis=1, count=bits * count, bitorder="little").reshape(len(packed), count, bits)
        return np.bitwise_or.reduce(parts << np.arange(bits, dtype=np.uint8), axis=2)
    mask = np.uint8((1 << bits) - 1)
    codes = np.stack([packed >> np.uint8(shift) & mask for shift in range(0, 8, bits)], axis=2)
    return codes.reshape(len(packed), -1)[:, :count]


def packed(codes: U8, bits: int) -> U8:
    """Rows of codes [n, count] as rows of bits [n, bytes], the first code in the lowest bits."""
    if bits == 8:
        return codes
    each = codes[:, :, None] >> np.arange(bits, dtype=np.uint8) & np.uint8(1)
    return np.packbits(each.reshape(len(codes), -1), axis=1, bitorder="little")


def make_groups(what: str, index: NDArray[np.integer] | None, inputs: int, size: int, count: int) -> tuple[int, I32 | None]:
    """Inputs of a group, and the order that makes neighbours of them, None where they are.

    index: the group of each input. size: inputs of a group by the configuration, -1 for all.
    Raises CheckpointError for groups of other sizes.
    """
    size = inputs if size == -1 else size
    if size > np.iinfo(np.int32).max:
        raise CheckpointError(f"{what}: its group_size is {size}, and a row has {inputs} inputs; the configuration is damaged")
    if index is None or np.array_equal(index, np.arange(inputs) // size):
        return size, None
    if index.min() < 0 or index.max() >= count:
        raise CheckpointError(f"{what}: g_idx names the groups {index.min()} to {index.max()} of {count}; the file is damaged")
    order = np.argsort(index, kind="stable").astype(np.int32)
    if not np.array_equal(index[order], np.arange(inputs) // size):
        raise CheckpointError(f"{what}: g_idx makes groups of different sizes, wanted {size} inputs in each")
    return size, order


def by_rows(what: str, scales: F32) -> F32:
    """Scales of groups, of rows or of the matrix as [N, groups], [N, 1] or [1, 1]."""
    if scales.size == 1:
        return scales.reshape(1, 1)
    if scales.ndim not in (1, 2):
        raise CheckpointError(f"{what}: scales are {list(scales.shape)}, wanted one or two dimensions")
    return scales.reshape(len(scales), -1)


def int8_matrix(what: str, stored: StoredTensor, scale: F32, zero: StoredTensor | None, narrow: bool = False) -> QuantTensor:
    """A matrix of codes I8 [N, K] with scales as in `by_rows`, and zero points I8 of that shape, of the matrix, or none.

    narrow: the codes may be those of fewer bits. Raises CheckpointError where the shapes do not fit.
    """
    codes, scales = stored.array("I8", 2), by_rows(what, scale)
    (outputs, inputs), groups = codes.shape, scales.shape[1]
    if len(scales) not in (1, outputs) or inputs % groups:
        raise CheckpointError(
            f"{what}: the scale is {list(scale.shape)} for {outputs} x {inputs} weights, wanted one for the matrix, for each row, "
            "or for each group of inputs"
        )
    zeros: I32 = np.zeros((1, 1), np.int32)
    if zero is not None:
        if zero.dtype != "I8" or zero.data.size not in (1, scales.size):
            raise CheckpointError(f"{what}: zero points are {zero.dtype} {list(zero.shape)}, wanted I8 {list(scale.shape)}")
        zeros = zero.data.view(np.int8).astype(np.int32).reshape(scales.shape if zero.data.size > 1 else (1, 1))
    bits = _bits(codes, zeros) if narrow else 8
    middle = 1 << bits - 1

    def rows(some: slice) -> U8:
        return packed((codes[some].astype(np.int16) + middle).astype(np.uint8), bits)

    of_groups = (outputs, groups)
    zeros = np.ascontiguousarray(np.broadcast_to(zeros + middle, of_groups))
    return GroupedCodes((outputs, inputs), bits, inputs // groups, rows, np.broadcast_to(scales, of_groups), zeros).tensor()


def _bits(codes: NDArray[np.int8], zeros: I32) -> int:
    """The bits that signed codes and zero points need."""
    low, high = (int(min(codes.min(), zeros.min())), int(max(codes.max(), zeros.max())))
    return next(bits for bits in (2, 3, 4, 8) if low >= -(1 << bits - 1) and high < 1 << bits - 1)


def mxfp4_matrix(what: str, codes: U8, e: U8) -> QuantTensor:
    """The matrix of E2M1 codes [N, K / 2], two a byte and the first low, under exponents [N, K / 32]."""
    if (e == 255).any():
        raise CheckpointError(f"{what} has scales that are not finite; the file is damaged")
    format, shape = get_format("mxfp4"), (len(codes), 2 * codes.shape[1])
    return assembled(format, shape, lambda some: format.join({"e": e[some], "codes": unpacked(codes[some], 4, shape[1])}))


def part_of(what: str, parts: LayerTensors, name: str) -> StoredTensor:
    """A tensor of a layer. Raises CheckpointError if there is none."""
    if name not in parts:
        raise CheckpointError(f"{what} has {', '.join(parts)} and no {name}; the file is incomplete")
    return parts[name]

"""A tensor that stays in the bytes of its own file format. Kernels repack these bytes and never redefine them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpuspec.errors import FormatError
from cpuspec.formats.format import CHUNK_VALUES, F32, I32, U8, Format


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """A weight matrix [N, K], one of each expert [E, N, K], or a vector [K], in the bytes of its format, often a read-only view of
    a mapped file.

    data: U8 [N, row_bytes], [E, N, row_bytes] or [row_bytes]; empty where the matrices of experts lie apart (`stack`).
    parts: those matrices.
    order: I32 [K] where the bytes of a row hold its values in another order, as those of GPTQ with act-order do: the j-th of the
    bytes' values is that of input order[j]. `dequantize` and `rows` give values in the order of inputs. Kernels that read the
    stored bytes must permute their activations by `order`.
    Raises FormatError when shape and bytes do not agree, or `order` does not name each input once.
    """

    format: Format
    shape: tuple[int, ...]
    data: U8
    order: I32 | None = None
    parts: tuple["QuantTensor", ...] = ()

    def __post_init__(self) -> None:
        if len(self.shape) not in (1, 2, 3) or any(n < 1 for n in self.shape):
            raise FormatError(f"a tensor has the shape [E, N, K], [N, K] or [K] with positive sizes, got {list(self.shape)}")
        wanted = (0,) if self.parts else (*self.shape[:-1], self.format.row_bytes(self.shape[-1]))
        if self.data.dtype != np.uint8 or self.data.shape != wanted:
            raise FormatError(
                f"{self.format.name} {list(self.shape)} is uint8 {list(wanted)}, got {self.data.dtype} {list(self.data.shape)}"
            )
        if not self.data.flags.c_contiguous:
            raise FormatError("the bytes of a tensor must be contiguous; copy them with numpy.ascontiguousarray")
        if self.order is not None and not _is_permutation(self.order, self.shape[-1]):
            raise FormatError(f"the order of inputs must name each of {self.shape[-1]} once, got {len(self.order)} indices")

    @staticmethod
    def encode(format: Format, values: ArrayLike) -> "QuantTensor":
        """`values` [N, K] or [K] in `format`. Raises FormatError as `Format.encode` does."""
        source = np.asarray(values, dtype=np.float32)
        return QuantTensor(format, source.shape, format.encode(source))

    @staticmethod
    def stack(parts: Sequence["QuantTensor"]) -> "QuantTensor":
        """Matrices of one shape and format as those of experts, [E, N, K]; their bytes stay where they are.

        Raises FormatError where they differ, or have inputs in an order of their own.
        """
        first = parts[0]
        for part in parts:
            if part.format is not first.format or part.shape != first.shape or len(part.shape) != 2 or part.order is not None:
                raise FormatError(
                    f"the matrices of experts have one shape, one format and their inputs in order, got {first.format.name} "
                    f"{list(first.shape)} and {part.format.name} {list(part.shape)}"
                )
        return QuantTensor(first.format, (len(parts), *first.shape), np.empty(0, np.uint8), None, tuple(parts))

    @property
    def matrices(self) -> tuple["QuantTensor", ...]:
        """The matrix of each expert; for a matrix or a vector, only itself."""
        if self.parts or len(self.shape) < 3:
            return self.parts or (self,)
        return tuple(QuantTensor(self.format, self.shape[1:], data, self.order) for data in self.data)

    @property
    def num_values(self) -> int:
        """Weights, not bytes."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file's own format, scales included."""
        return math.prod(self.shape[:-1]) * self.format.row_bytes(self.shape[-1])

    def rows_from(self, first: int, last: int) -> "QuantTensor":
        """Rows [first, last) of the matrix, or of each expert's, as views."""
        if len(self.shape) == 3:
            return QuantTensor.stack([matrix.rows_from(first, last) for matrix in self.matrices])
        return QuantTensor(self.format, (last - first, *self.shape[1:]), self.data[first:last], self.order)

    def dequantize(self) -> F32:
        """A new array of `shape` with every value; nothing else of that size is allocated."""
        if self.parts:
            values = np.empty(self.shape, np.float32)
            for part, out in zip(self.parts, values, strict=True):
                out[:] = part.dequantize()
            return values
        return self._in_order(self.format.decode(self.data))

    def rows(self, indices: ArrayLike) -> F32:
        """The values of some rows, F32 [len(indices), K]. Raises FormatError on an index outside 0..N-1."""
        return self._in_order(self.format.decode(self.data[self._checked(indices)]))

    def permute_rows(self, order: ArrayLike) -> "QuantTensor":
        """A copy whose row i is row `order[i]` of this one (a vector: its values). Rows move as bytes, so values are exact.

        Raises FormatError if `order` is not a permutation, or for a vector in a block format.
        """
        index = self._checked(order)
        if not _is_permutation(index, self.shape[0]):
            raise FormatError(f"row order must name each of {self.shape[0]} rows once, got {len(index)} indices")
        if len(self.shape) == 2:
            return QuantTensor(self.format, self.shape, self.data[index], self.order)
        if self.format.block_size != 1:
            raise FormatError(f"the values of a {self.format.name} vector share scales and cannot be permuted; decode it first")
        return QuantTensor(self.format, self.shape, self.data.reshape(-1, self.format.block_bytes)[index].reshape(-1))

    def _in_order(self, decoded: F32) -> F32:
        if self.order is None:
            return decoded
        values = np.empty_like(decoded)
        values[..., self.order] = decoded
        return values

    def _checked(self, indices: ArrayLike) -> NDArray[np.intp]:
        index = np.asarray(indices)
        if index.ndim != 1 or (index.size and not np.issubdtype(index.dtype, np.integer)):
            raise FormatError(f"row indices are a flat list of integers, got {index.dtype} {list(index.shape)}")
        if index.size and (index.min() < 0 or index.max() >= self.shape[0]):
            raise FormatError(f"row indices must be from 0 to {self.shape[0] - 1}, got {index.min()} to {index.max()}")
        return index.astype(np.intp)


def _is_permutation(order: NDArray[np.integer], length: int) -> bool:
    """Whether a flat array names each of 0 to length - 1 once."""
    if order.shape != (length,) or order.min() < 0 or order.max() >= length:
        return False
    return bool((np.bincount(order, minlength=length) == 1).all())


def _recode(data: U8, source: Format, to: Format) -> U8:
    return to.encode(source.decode(data))


@dataclass(frozen=True, eq=False)
class Cast:
    """A tensor in another format, made when it is asked for. recode: (bytes of rows, their format, the other) -> bytes in that.
    maker: a name of all that `recode` is made of besides this package, for those who keep what it makes.

    Always from the values, never from the source's own codes: 4-bit weights are cast as the same values in bf16 would be.
    Values keep the source's order of inputs.
    """

    source: QuantTensor
    format: Format
    recode: Callable[[U8, Format, Format], U8] = _recode
    maker: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the source."""
        return self.source.shape

    @property
    def order(self) -> I32 | None:
        """The order of the source's inputs."""
        return self.source.order

    @property
    def num_bytes(self) -> int:
        """Bytes in the format, once it is made."""
        return math.prod(self.shape[:-1]) * self.format.row_bytes(self.shape[-1])

    @property
    def matrices(self) -> tuple["Cast", ...]:
        """The casts of the source's matrices."""
        return tuple(Cast(matrix, self.format, self.recode, self.maker) for matrix in self.source.matrices)

    def made(self) -> QuantTensor:
        """The tensor, with nothing else of its size allocated. Raises FormatError as `Format.encode` does."""
        if self.source.parts:
            return QuantTensor.stack([matrix.made() for matrix in self.matrices])
        rows, columns = self.source.data.reshape(-1, self.source.data.shape[-1]), self.shape[-1]
        data = np.empty((len(rows), self.format.row_bytes(columns)), np.uint8)
        step = max(1, CHUNK_VALUES // columns)
        for start in range(0, len(rows), step):
            data[start : start + step] = self.recode(rows[start : start + step], self.source.format, self.format)
        return QuantTensor(self.format, self.shape, data.reshape(*self.shape[:-1], -1), self.order)

    def dequantize(self) -> F32:
        """The values that the format has for the source's. Raises FormatError as `made` does."""
        return self.made().dequantize()

"""A weight format as a table row, and a tensor that stays in the bytes of its own file format.

Numpy only. The meaning of each format lives in the modules beside this one; kernels repack these bytes, never redefine them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpuspec.errors import FormatError

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

# Values decoded or encoded at a time: temporaries of this size stay in a core's cache, which is several times faster than
# streaming them through memory, and they bound the memory that a large tensor needs besides its result.
_CHUNK_VALUES = 1 << 17


@dataclass(frozen=True)
class Format:
    """One weight format: blocks of `block_size` consecutive values of a row in `block_bytes` bytes.

    decode_blocks: U8 [n, block_bytes] -> F32 [n, block_size]; encode_blocks the reverse. Both are plain vectorised functions;
    `decode` and `encode` are what callers use.
    """

    name: str
    block_size: int
    block_bytes: int
    decode_blocks: Callable[[U8], F32]
    encode_blocks: Callable[[F32], U8]

    @property
    def bits(self) -> float:
        """Bits per weight, scales included."""
        return 8 * self.block_bytes / self.block_size

    def row_bytes(self, in_features: int) -> int:
        """Bytes of a row of `in_features` values. Raises FormatError if they do not fill whole blocks."""
        if in_features % self.block_size:
            raise FormatError(
                f"{self.name} needs in_features divisible by {self.block_size}, got {in_features}; "
                + ("use q4_0 or q8_0 for this tensor" if in_features % 32 == 0 else "use f16, bf16 or f32 for this tensor")
            )
        return in_features // self.block_size * self.block_bytes

    def decode(self, data: U8) -> F32:
        """The values of `data`, U8 [..., n_blocks * block_bytes], as F32 [..., n_blocks * block_size]."""
        if data.dtype != np.uint8 or data.ndim == 0 or data.shape[-1] % self.block_bytes:
            raise FormatError(f"{self.name} wants uint8 rows of {self.block_bytes}-byte blocks, got {data.dtype} {data.shape}")
        values = np.empty((*data.shape[:-1], data.shape[-1] // self.block_bytes * self.block_size), np.float32)
        blocks = np.ascontiguousarray(data).reshape(-1, self.block_bytes)
        out = values.reshape(-1, self.block_size)
        step = max(1, _CHUNK_VALUES // self.block_size)
        # A lying file may hold scales of inf or nan; they decode to what they say.
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, len(blocks), step):
                out[start : start + step] = self.decode_blocks(blocks[start : start + step])
        return values

    def encode(self, values: ArrayLike) -> U8:
        """The nearest representation found for `values` [..., K], as U8 [..., row_bytes(K)].

        Raises FormatError if K does not fill whole blocks, if a block format is given a value that is not finite,
        or if a finite value would become infinite.
        """
        source = np.asarray(values, dtype=np.float32, order="C")
        if source.ndim == 0:
            raise FormatError(f"{self.name} encodes rows, got a single number")
        data = np.empty((*source.shape[:-1], self.row_bytes(source.shape[-1])), np.uint8)
        blocks = source.reshape(-1, self.block_size)
        out = data.reshape(-1, self.block_bytes)
        step = max(1, _CHUNK_VALUES // self.block_size)
        for start in range(0, len(blocks), step):
            chunk = blocks[start : start + step]
            finite = np.isfinite(chunk)
            if self.block_size > 1 and not finite.all():
                raise FormatError(f"{self.name} cannot hold {chunk[~finite][0]}: every value must be finite")
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                encoded = self.encode_blocks(chunk)
                lost = finite & ~np.isfinite(self.decode_blocks(encoded))
            if lost.any():
                raise FormatError(f"{self.name} cannot hold {chunk[lost][0]}: f16 is exceeded; use bf16 or f32")
            out[start : start + step] = encoded
        return data


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """A weight matrix [N, K] or vector [K] in the bytes of its format, often a read-only view of a mapped file.

    data: U8 [N, row_bytes] or [row_bytes]. Raises FormatError when shape and bytes do not agree.
    """

    format: Format
    shape: tuple[int, ...]
    data: U8

    def __post_init__(self) -> None:
        if len(self.shape) not in (1, 2) or any(n < 1 for n in self.shape):
            raise FormatError(f"a tensor has the shape [N, K] or [K] with positive sizes, got {list(self.shape)}")
        wanted = (*self.shape[:-1], self.format.row_bytes(self.shape[-1]))
        if self.data.dtype != np.uint8 or self.data.shape != wanted:
            raise FormatError(
                f"{self.format.name} {list(self.shape)} is uint8 {list(wanted)}, got {self.data.dtype} {list(self.data.shape)}"
            )
        if not self.data.flags.c_contiguous:
            raise FormatError("the bytes of a tensor must be contiguous; copy them with numpy.ascontiguousarray")

    @staticmethod
    def encode(format: Format, values: ArrayLike) -> "QuantTensor":
        """`values` [N, K] or [K] in `format`. Raises FormatError as `Format.encode` does."""
        source = np.asarray(values, dtype=np.float32)
        return QuantTensor(format, source.shape, format.encode(source))

    @property
    def num_values(self) -> int:
        """Weights, not bytes."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file's own format, scales included."""
        return self.data.nbytes

    def dequantize(self) -> F32:
        """A new array of `shape` with every value; nothing else of that size is allocated."""
        return self.format.decode(self.data)

    def rows(self, indices: ArrayLike) -> F32:
        """The values of some rows, F32 [len(indices), K]. Raises FormatError on an index outside 0..N-1."""
        return self.format.decode(self.data[self._checked(indices)])

    def permute_rows(self, order: ArrayLike) -> "QuantTensor":
        """A copy whose row i is row `order[i]` of this one (a vector: its values). Rows move as bytes, so values are exact.

        Raises FormatError if `order` is not a permutation, or for a vector in a block format.
        """
        index = self._checked(order)
        if len(index) != self.shape[0] or (np.bincount(index, minlength=self.shape[0]) != 1).any():
            raise FormatError(f"row order must name each of {self.shape[0]} rows once, got {len(index)} indices")
        if len(self.shape) == 2:
            return QuantTensor(self.format, self.shape, self.data[index])
        if self.format.block_size != 1:
            raise FormatError(f"the values of a {self.format.name} vector share scales and cannot be permuted; decode it first")
        return QuantTensor(self.format, self.shape, self.data.reshape(-1, self.format.block_bytes)[index].reshape(-1))

    def _checked(self, indices: ArrayLike) -> NDArray[np.intp]:
        index = np.asarray(indices)
        if index.ndim != 1 or (index.size and not np.issubdtype(index.dtype, np.integer)):
            raise FormatError(f"row indices are a flat list of integers, got {index.dtype} {list(index.shape)}")
        if index.size and (index.min() < 0 or index.max() >= self.shape[0]):
            raise FormatError(f"row indices must be from 0 to {self.shape[0] - 1}, got {index.min()} to {index.max()}")
        return index.astype(np.intp)


def _recode(data: U8, source: Format, to: Format) -> U8:
    return to.encode(source.decode(data))


@dataclass(frozen=True, eq=False)
class Cast:
    """A tensor in another format, made when it is asked for. recode: (bytes of rows, their format, the other) -> bytes in that.

    Always from the values, never from the source's own codes: 4-bit weights are cast as the same values in bf16 would be.
    """

    source: QuantTensor
    format: Format
    recode: Callable[[U8, Format, Format], U8] = _recode

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the source."""
        return self.source.shape

    @property
    def num_bytes(self) -> int:
        """Bytes in the format, once it is made."""
        return math.prod(self.shape[:-1]) * self.format.row_bytes(self.shape[-1])

    def made(self) -> QuantTensor:
        """The tensor, with nothing else of its size allocated. Raises FormatError as `Format.encode` does."""
        rows, columns = self.source.data.reshape(-1, self.source.data.shape[-1]), self.shape[-1]
        data = np.empty((len(rows), self.format.row_bytes(columns)), np.uint8)
        step = max(1, _CHUNK_VALUES // columns)
        for start in range(0, len(rows), step):
            data[start : start + step] = self.recode(rows[start : start + step], self.source.format, self.format)
        return QuantTensor(self.format, self.shape, data.reshape(*self.shape[:-1], -1))

    def dequantize(self) -> F32:
        """The values that the format has for the source's. Raises FormatError as `made` does."""
        return self.made().dequantize()

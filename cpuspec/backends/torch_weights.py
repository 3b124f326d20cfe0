"""Weight matrices as torch tensors: dequantized, or as codes and scales that are unpacked on the device when they are needed.

Codes are unpacked by the formula of `formats.format`, so that in f32 a value is the file's, bit for bit.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cpuspec.formats import Cast, QuantTensor
from cpuspec.formats.format import Format, Scales, hadamard, scales_of

# Values unpacked at a time: a product of codes needs memory for them besides its result.
_CHUNK_VALUES = 1 << 22

FEW_ROWS = 32  # with more, unpacking the matrix once for a library's product is faster


class Matrix(Protocol):
    """A matrix [N, K] on a device."""

    nbytes: int  # bytes that a product reads

    def times(self, x: Tensor) -> Tensor:
        """F32 [T, K] -> F32 [T, N]: every row times the matrix's rows, in the matrix's dtype."""
        ...


class Values:
    """Dequantized weights in some dtype."""

    def __init__(self, tensor: QuantTensor | Cast, dtype: torch.dtype, device: torch.device) -> None:
        self._values = torch.from_numpy(tensor.dequantize()).to(device, dtype)
        self.nbytes = self._values.nbytes

    def times(self, x: Tensor) -> Tensor:
        """F32 [T, K] -> F32 [T, N]."""
        return functional.linear(x.to(self._values.dtype), self._values).to(torch.float32)


class OfExperts:
    """The matrices of a layer's experts. They are multiplied one by one."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self.matrices = matrices
        self.nbytes = sum(matrix.nbytes for matrix in matrices)

    def times(self, x: Tensor) -> Tensor:
        """Not for all at once."""
        raise AssertionError("rows go through the experts that a router chooses")


def _kept_bits(format: Format) -> int:
    """Bits that a code takes here: a byte holds whole codes, so three bits become four, and five and six become eight."""
    return next(bits for bits in (2, 4, 8) if bits >= format.code_bits)


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _scales(found: Scales) -> Scales:
    """The factors as tensors. Most of those in f32 have few bits, which bf16 holds exactly; others are kept in f32."""
    tensors = [None if each is None else _tensor(each) for each in found]
    return Scales(*(each if each is None or each.dtype != torch.float32 else _short(each) for each in tensors))


def _short(numbers: Tensor) -> Tensor:
    """In bf16 if that holds every number exactly."""
    rounded = numbers.to(torch.bfloat16)
    return rounded if torch.equal(rounded.to(torch.float32).nan_to_num(), numbers.nan_to_num()) else numbers


class Codes:
    """Weights in as few bits as their format has, or a few more, which become `dtype` when they are multiplied.

    The codes of a row lie side by side: the lowest bits of its bytes are the row's first part, and so on. They keep the tensor's
    order of inputs, and rotated formats stay rotated: inputs are rotated, too.
    """

    def __init__(self, tensor: QuantTensor, dtype: torch.dtype, device: torch.device) -> None:
        format, affine = tensor.format, tensor.format.affine
        assert affine is not None, "formats of plain numbers have no codes; they are loaded as Values"
        self.shape, self.dtype, self.bits, self.zero = tensor.shape, dtype, _kept_bits(format), affine.zero
        self._order = None if tensor.order is None else torch.from_numpy(tensor.order).to(device)
        self.levels = None if affine.levels is None else torch.tensor(affine.levels, dtype=torch.float32, device=device)
        matrix = hadamard(np.eye(format.block_size, dtype=np.float32), format.block_size) if format.rotated else None
        self._rotation = None if matrix is None else torch.from_numpy(matrix).to(device)
        pieces = []
        for rows in self._chunks():
            parts = format.split(tensor.data[rows])
            pieces.append((_side_by_side(_tensor(parts["codes"]), self.bits), _scales(scales_of(parts))))
        self.codes = torch.cat([codes for codes, _ in pieces]).to(device)
        factors = zip(*(scales for _, scales in pieces), strict=True)
        gathered = [None if each[0] is None else torch.cat(each).to(device) for each in factors]
        self.scales = Scales(*gathered)
        self._kernel = few_rows_kernel(device)
        self.nbytes = self.codes.nbytes + sum(each.nbytes for each in self.scales if each is not None)

    def times(self, x: Tensor) -> Tensor:
        """F32 [T, K] -> F32 [T, N]."""
        x = x if self._order is None else x[:, self._order]
        if self._rotation is not None:
            x = (x.unflatten(1, (-1, len(self._rotation))) @ self._rotation).flatten(1)
        if self._kernel and 0 < len(x) <= FEW_ROWS:
            return self._kernel(x.to(self.dtype).contiguous(), self.codes, self.scales, self.bits, self.zero, self.levels)
        x, y = x.to(self.dtype), x.new_empty((len(x), self.shape[0]))
        for rows in self._chunks():
            y[:, rows] = functional.linear(x, self.values(rows).to(self.dtype))
        return y

    def values(self, rows: slice) -> Tensor:
        """Some rows dequantized, F32 [rows, K], in the tensor's order, and rotated where its format is."""
        d, s, base, z = Scales(*(None if each is None else each[rows].to(torch.float32) for each in self.scales))
        mask = (1 << self.bits) - 1
        codes = torch.cat([self.codes[rows] >> shift & mask for shift in range(0, 8, self.bits)], dim=1)
        levels = codes.to(torch.float32) if self.levels is None else self.levels[codes.to(torch.int32)]
        scale = _in_groups(d, s)
        numbers = levels.unflatten(1, (scale.shape[1], -1))
        if self.zero and base is None and z is None:
            return ((numbers - self.zero) * scale[:, :, None]).flatten(1)  # exact before it is rounded, whatever the scale
        values = numbers * scale[:, :, None]
        if self.zero:
            values -= _in_groups(d if base is None else base, s if z is None else z)[:, :, None] * self.zero
        return values.flatten(1)

    def _chunks(self) -> list[slice]:
        size = max(1, _CHUNK_VALUES // self.shape[1])
        return [slice(start, start + size) for start in range(0, self.shape[0], size)]


def few_rows_kernel(device: torch.device) -> Callable[..., Tensor] | None:
    """A function that multiplies up to FEW_ROWS rows with packed codes; None without a CUDA device or Triton."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from cpuspec.backends.torch_triton import times

    return times


def _side_by_side(codes: Tensor, bits: int) -> Tensor:
    """Codes U8 [N, K] as U8 [N, K * bits / 8]."""
    parts = codes.chunk(8 // bits, dim=1)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        packed |= part << bits * i
    return packed


def _in_groups(blocks: Tensor, groups: Tensor | None) -> Tensor:
    """Factors of blocks [n, blocks] times those of the groups within them [n, groups], or as they are."""
    if groups is None:
        return blocks
    return (blocks[:, :, None] * groups.unflatten(1, (blocks.shape[1], -1))).flatten(1)

"""Weight matrices as torch tensors: dequantized, or as codes and scales that are unpacked on the device when they are needed.

Every block format of FORMATS is one formula, value = d * s * level(code) - base * z * zero: d and base are 16-bit floats of
each block, s and z bytes of each group within it, zero a number, and level(code) the code itself or an entry of a table.
In f32 every product of it is exact, so a value is the file's, bit for bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cpuspec.formats import FORMATS, Cast, QuantTensor, int4, kquants, lowbit, mx
from cpuspec.formats.packing import PACKINGS, Parts

# Values unpacked at a time: what a product of codes needs besides its result.
_CHUNK_VALUES = 1 << 22

FEW_ROWS = 32  # beyond, unpacking a matrix once and a library's product over it are faster


class Matrix(Protocol):
    """A matrix [N, K] on a device."""

    num_bytes: int  # that a product reads

    def times(self, x: Tensor) -> Tensor:
        """F32 [T, K] -> F32 [T, N]: every row times the matrix's rows, in the matrix's dtype."""
        ...


class Values:
    """Dequantized weights in some dtype."""

    def __init__(self, tensor: QuantTensor | Cast, dtype: torch.dtype, device: torch.device) -> None:
        self._values = torch.from_numpy(tensor.dequantize()).to(device, dtype)
        self.num_bytes = self._values.nbytes

    def times(self, x: Tensor) -> Tensor:
        """F32 [T, K] -> F32 [T, N]."""
        return functional.linear(x.to(self._values.dtype), self._values).to(torch.float32)


class Scales(NamedTuple):
    """The factors of the formula: d and base [N, blocks], s and z [N, groups]."""

    d: Tensor
    s: Tensor | None = None  # None: 1
    base: Tensor | None = None  # None: d
    z: Tensor | None = None  # None: s


@dataclass(frozen=True)
class Coding:
    """How a format's parts, as its Packing splits them, are codes of `bits` bits (2, 4 or 8) and scales."""

    bits: int
    scales: Callable[[Parts], Scales]
    zero: float = 0.0
    levels: tuple[float, ...] | None = None


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _block(parts: Parts) -> Scales:
    return Scales(_tensor(parts["d"]), z=_tensor(parts["zero"]) if "zero" in parts else None)


def _with_minimum(parts: Parts) -> Scales:
    return Scales(_tensor(parts["d"]), base=_tensor(parts["m"]))


def _powers(parts: Parts) -> Scales:
    return Scales(_tensor(mx.HALF_SCALES[parts["e"]]).to(torch.bfloat16))  # which has all powers of two that f32 has


def _q2_k(parts: Parts) -> Scales:
    s, z = _tensor(parts["scales"] & 0x0F), _tensor(parts["scales"] >> 4)
    return Scales(_tensor(parts["d"]), s, _tensor(parts["dmin"]), z)


def _q3_k(parts: Parts) -> Scales:
    packed = parts["scales"]
    return Scales(_tensor(parts["d"]), _tensor(kquants.unpack_signed_scales(packed.reshape(-1, 12)).reshape(len(packed), -1)))


def _q45_k(parts: Parts) -> Scales:
    return Scales(*(_tensor(parts[name]) for name in ("d", "scales", "dmin", "minima")))


def _q6_k(parts: Parts) -> Scales:
    return Scales(_tensor(parts["d"]), _tensor(parts["scales"]))


# Three-bit codes take four bits here, five- and six-bit ones eight: a byte holds whole codes.
CODINGS: Mapping[str, Coding] = MappingProxyType(
    {
        "q4_0": Coding(4, _block, 8),
        "q4_1": Coding(4, _with_minimum, -1),
        "q5_0": Coding(8, _block, 16),
        "q5_1": Coding(8, _with_minimum, -1),
        "q8_0": Coding(8, _block, 128),  # a Packing's codes are unsigned
        "q2_k": Coding(2, _q2_k, 1),
        "q3_k": Coding(4, _q3_k, 4),
        "q4_k": Coding(4, _q45_k, 1),
        "q5_k": Coding(8, _q45_k, 1),
        "q6_k": Coding(8, _q6_k, 32),
        "mxfp4": Coding(4, _powers, levels=tuple(map(float, mx.E2M1_DOUBLED))),
        **{name: Coding(4, _block, 1 if "zero" in (layout.names or ()) else 8) for name, layout in int4.LAYOUTS.items()},
        **{
            name: Coding(2 if lowbit.code_bits(layout) == 2 else 4, _block, 1 / lowbit.ZERO_STEPS)
            for name, layout in lowbit.LAYOUTS.items()
        },
    }
)

if CODINGS.keys() != {name for name, row in FORMATS.items() if row.block_size > 1}:
    raise AssertionError(f"block formats without a coding: {CODINGS.keys() ^ FORMATS.keys()}")


class Codes:
    """Weights in as few bits as their format has, or a few more, which become `dtype` when they are multiplied.

    The codes of a row lie side by side: the lowest bits of its bytes are the row's first part, and so on.
    """

    def __init__(self, tensor: QuantTensor, dtype: torch.dtype, device: torch.device) -> None:
        coding = CODINGS[tensor.format.name]
        self.shape, self.dtype, self.bits, self.zero = tensor.shape, dtype, coding.bits, coding.zero
        self.levels = None if coding.levels is None else torch.tensor(coding.levels, dtype=torch.float32, device=device)
        pieces = []
        for rows in self._chunks():
            parts = PACKINGS[tensor.format.name].split(np.ascontiguousarray(tensor.data[rows]))
            pieces.append((_side_by_side(_tensor(parts["codes"]), self.bits), coding.scales(parts)))
        self.codes = torch.cat([codes for codes, _ in pieces]).to(device)
        factors = zip(*(scales for _, scales in pieces), strict=True)
        gathered = [None if each[0] is None else torch.cat(each).to(device) for each in factors]
        self.scales = Scales(*gathered)  # type: ignore[arg-type]  # every format has a d
        self._kernel = few_rows_kernel(device)
        self.num_bytes = self.codes.nbytes + sum(each.nbytes for each in self.scales if each is not None)

    def times(self, x: Tensor) -> Tensor:
        """F32 [T, K] -> F32 [T, N]."""
        if self._kernel and 0 < len(x) <= FEW_ROWS:
            return self._kernel(x.to(self.dtype).contiguous(), self.codes, self.scales, self.bits, self.zero, self.levels)
        x, y = x.to(self.dtype), x.new_empty((len(x), self.shape[0]))
        for rows in self._chunks():
            y[:, rows] = functional.linear(x, self.values(rows).to(self.dtype))
        return y

    def values(self, rows: slice) -> Tensor:
        """Some rows dequantized, F32 [rows, K]."""
        d, s, base, z = (None if each is None else each[rows].to(torch.float32) for each in self.scales)
        assert d is not None, "every format has a scale"
        mask = (1 << self.bits) - 1
        codes = torch.cat([self.codes[rows] >> shift & mask for shift in range(0, 8, self.bits)], dim=1)
        levels = codes.to(torch.float32) if self.levels is None else self.levels[codes.to(torch.int32)]
        scale = _in_groups(d, s)
        values = levels.unflatten(1, (scale.shape[1], -1)) * scale[:, :, None]
        if self.zero:
            values -= _in_groups(d if base is None else base, s if z is None else z)[:, :, None] * self.zero
        return values.flatten(1)

    def _chunks(self) -> list[slice]:
        size = max(1, _CHUNK_VALUES // self.shape[1])
        return [slice(start, start + size) for start in range(0, self.shape[0], size)]


def few_rows_kernel(device: torch.device) -> Callable[..., Tensor] | None:
    """What multiplies up to FEW_ROWS rows with codes as they lie in memory: on a CUDA device, where Triton is installed."""
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

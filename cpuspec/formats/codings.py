"""Every block format as one formula, value = d * s * level(code) - base * z * zero: for whoever unpacks codes in a way of his own.

d and base are 16-bit floats of each block (mxfp4: powers of two in f32), s and z bytes of each group within it, zero a number, and
level(code) the code itself or an entry of a table. In f32 every product is exact, so a value is the file's, bit for bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from cpuspec.formats import FORMATS, int4, kquants, lowbit, mx
from cpuspec.formats.packing import PACKINGS, Parts


class Scales(NamedTuple):
    """The factors of the formula, of numpy or of another library: d and base [N, blocks], s and z [N, groups]."""

    d: Any
    s: Any = None  # None: 1
    base: Any = None  # None: d
    z: Any = None  # None: s


@dataclass(frozen=True)
class Coding:
    """How a format's parts, as its Packing splits them, are codes and scales."""

    scales: Callable[[Parts], Scales]
    zero: float = 0.0
    levels: tuple[int, ...] | None = None


def code_bits(format_name: str) -> int:
    """How many bits a code of a format has."""
    return int(sum(plane.bits for plane in PACKINGS[format_name].planes if plane.part == "codes"))


def _block(parts: Parts) -> Scales:
    return Scales(parts["d"], z=parts.get("zero"))


def _with_minimum(parts: Parts) -> Scales:
    return Scales(parts["d"], base=parts["m"])


def _powers(parts: Parts) -> Scales:
    return Scales(mx.HALF_SCALES[parts["e"]])


def _q2_k(parts: Parts) -> Scales:
    return Scales(parts["d"], parts["scales"] & 0x0F, parts["dmin"], parts["scales"] >> 4)


def _q3_k(parts: Parts) -> Scales:
    packed = parts["scales"]
    return Scales(parts["d"], kquants.unpack_signed_scales(packed.reshape(-1, 12)).reshape(len(packed), -1))


def _q45_k(parts: Parts) -> Scales:
    return Scales(parts["d"], parts["scales"], parts["dmin"], parts["minima"])


def _q6_k(parts: Parts) -> Scales:
    return Scales(parts["d"], parts["scales"])


CODINGS: Mapping[str, Coding] = MappingProxyType(
    {
        "q4_0": Coding(_block, 8),
        "q4_1": Coding(_with_minimum, -1),
        "q5_0": Coding(_block, 16),
        "q5_1": Coding(_with_minimum, -1),
        "q8_0": Coding(_block, 128),  # a Packing's codes are unsigned
        "q2_k": Coding(_q2_k, 1),
        "q3_k": Coding(_q3_k, 4),
        "q4_k": Coding(_q45_k, 1),
        "q5_k": Coding(_q45_k, 1),
        "q6_k": Coding(_q6_k, 32),
        "mxfp4": Coding(_powers, levels=mx.E2M1_DOUBLED),
        **{name: Coding(_block, 1 if "zero" in (layout.names or ()) else 8) for name, layout in int4.LAYOUTS.items()},
        **{name: Coding(_block, 1 / lowbit.ZERO_STEPS) for name in lowbit.LAYOUTS},
    }
)

if CODINGS.keys() != {name for name, row in FORMATS.items() if row.block_size > 1}:
    raise AssertionError(f"block formats without a coding: {CODINGS.keys() ^ FORMATS.keys()}")

"""Weight formats: the FORMATS table, and tensors in the bytes of a format. Numpy only; knows no file and no kernel."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from cpuspec.errors import FormatError
from cpuspec.formats import (
    binary,
    blocks32,
    float_codes,
    floats,
    grids,
    int4_groups,
    int8,
    integers,
    kquants,
    lowbit,
    mx,
    nl4,
    nonlinear,
    nvfp,
    ternary,
)
from cpuspec.formats.format import Format
from cpuspec.formats.tensor import Cast, QuantTensor


def table_of(rows: Sequence[Format]) -> Mapping[str, Format]:
    """The formats by name. Raises AssertionError, naming the row and the missing part, for a row that cannot be packed and
    multiplied.
    """
    for row in rows:
        held = sum(plane.bits for plane in row.planes)
        if held < row.bits:
            raise AssertionError(f"format {row.name}: its planes hold {held:g} of {row.bits:g} bits a weight; add what is missing")
        if not row.reader:
            raise AssertionError(f"format {row.name} names no reader; wanted the kind of kernels.readers that unpacks its planes")
    for what, values in (
        ("name", [row.name for row in rows]),
        ("gguf_type", [row.gguf_type for row in rows if row.gguf_type is not None]),
        ("safetensors_dtype", [row.safetensors_dtype for row in rows if row.safetensors_dtype is not None]),
    ):
        if len(set(values)) < len(values):
            raise AssertionError(f"two formats have the same {what}: {values}")
    return MappingProxyType({row.name: row for row in rows})


FORMATS = table_of(
    (
        floats.F32_FORMAT,
        floats.F16,
        floats.BF16,
        *blocks32.FORMATS,
        *kquants.FORMATS,
        mx.MXFP4,
        *nvfp.FORMATS,
        *nonlinear.FORMATS,
        *nl4.FORMATS,
        *integers.FORMATS,
        *grids.FORMATS,
        *ternary.FORMATS,
        *binary.FORMATS,
        *int4_groups.FORMATS,
        *lowbit.FORMATS,
        *int8.FORMATS,
        *float_codes.FORMATS,
    )
)


def get_format(name: str) -> Format:
    """The row of FORMATS. Raises FormatError naming the choices."""
    try:
        return FORMATS[name]
    except KeyError:
        raise FormatError(f"format {name!r} is not known; wanted one of {', '.join(FORMATS)}") from None


__all__ = ["FORMATS", "Cast", "Format", "QuantTensor", "get_format"]

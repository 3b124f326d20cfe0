"""What the bits of a weight mean: the FORMATS table and tensors in it. Numpy only; knows no file and no kernel."""

from collections.abc import Mapping
from types import MappingProxyType

from cpuspec.errors import FormatError
from cpuspec.formats import floats, int4, kquants, legacy, lowbit, mx
from cpuspec.formats.tensor import Cast, Format, QuantTensor

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        row.name: row
        for row in (
            floats.F32_FORMAT,
            floats.F16,
            floats.BF16,
            legacy.Q4_0,
            legacy.Q4_1,
            legacy.Q5_0,
            legacy.Q5_1,
            legacy.Q8_0,
            kquants.Q2_K,
            kquants.Q3_K,
            kquants.Q4_K,
            kquants.Q5_K,
            kquants.Q6_K,
            mx.MXFP4,
            *int4.FORMATS,
            *lowbit.FORMATS,
        )
    }
)


def get_format(name: str) -> Format:
    """The row of FORMATS. Raises FormatError naming the choices."""
    try:
        return FORMATS[name]
    except KeyError:
        raise FormatError(f"format {name!r} is not known; wanted one of {', '.join(FORMATS)}") from None


__all__ = ["FORMATS", "Cast", "Format", "QuantTensor", "get_format"]

"""The formats of keys and values in the cache. The row of a token and a head is encoded by itself.

Groups with a scale run along the dimensions and never across tokens, so forgetting a token leaves the others unchanged.
The result of attention stays the same if queries, keys and values are multiplied with an orthogonal matrix and the result is
multiplied back. With Hadamard's matrix no dimension is much larger than the others of its group (QuaRot, arXiv 2404.00456).
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from cpuspec.errors import FormatError
from cpuspec.formats.floats import BF16, F16, F32_FORMAT
from cpuspec.formats.format import F32, U8, Affine, CodeField, Format, Parts, hadamard

LANES = 16  # stored rows are padded with zeros to whole vectors, and to whole groups
GROUP, INT4_GROUP = 32, 64  # numbers with a scale


def encode_int8(values: F32) -> Parts:
    """Codes -127..127 around the middle of the group's range, which is `base`. This halves the loss of codes around zero.

    d and base are rounded first, so that the codes compensate for it. In a group with inf or nan, d or base is inf or nan.
    """
    half = np.float32(0.5)
    middle = values.min(axis=1, keepdims=True) * half + values.max(axis=1, keepdims=True) * half
    base = middle.astype(np.float16)
    centred = values - base.astype(np.float32)
    d = (np.abs(centred).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float16)
    inverse = np.where(d > 0, np.float32(1) / d.astype(np.float32), np.float32(0))
    return {"d": d, "base": base, "codes": np.nan_to_num(np.clip(np.rint(centred * inverse), -127, 127)).astype(np.int8)}


def encode_int4(values: F32) -> Parts:
    """Codes 0..15 from the group's minimum, which is `base`, to its maximum. d and base are rounded first, as in int8."""
    base = values.min(axis=1, keepdims=True).astype(np.float16)
    above = values - base.astype(np.float32)
    d = (above.max(axis=1, keepdims=True) / np.float32(15)).astype(np.float16)
    inverse = np.where(d > 0, np.float32(1) / d.astype(np.float32), np.float32(0))
    return {"d": d, "base": base, "codes": np.nan_to_num(np.clip(np.rint(above * inverse), 0, 15)).astype(np.uint8)}


INT8 = Format("int8", np.dtype([("d", "<f2"), ("base", "<f2"), ("codes", "i1", GROUP)]), GROUP, encode_int8, Affine(-1))

INT4 = Format(
    "int4",
    np.dtype([("d", "<f2"), ("base", "<f2"), ("codes", "u1", INT4_GROUP // 2)]),
    INT4_GROUP,
    encode_int4,
    Affine(-1),
    (CodeField("codes", 4, stride=LANES),),  # as kernels read them: a vector of the low halves, then one of the high halves
)

KV_FORMATS: Mapping[str, Format] = MappingProxyType({row.name: row for row in (F32_FORMAT, F16, BF16, INT8, INT4)})


def get_kv_format(name: str) -> Format:
    """The row of KV_FORMATS. Raises FormatError naming the choices."""
    try:
        return KV_FORMATS[name]
    except KeyError:
        raise FormatError(f"KV format {name!r} is not known; wanted one of {', '.join(KV_FORMATS)}") from None


def hadamard_size(format: Format, dims: int) -> int:
    """The dimensions of a head that are multiplied with Hadamard's matrix together before they are stored: the largest power of two
    that divides `dims`. 0: no rotation, because the format has enough bits, or that power is smaller than a vector.
    """
    size = dims & -dims
    return size if format is INT4 and size >= LANES else 0


def stored_dims(format: Format, dims: int) -> int:
    """Dimensions of a stored row of a head of `dims`, padding included."""
    unit = max(LANES, format.block_size)
    return -(-dims // unit) * unit


def stored_bytes(format: Format, dims: int) -> int:
    """Bytes of a stored key, or of a stored value, of a head of `dims` dimensions."""
    return format.row_bytes(stored_dims(format, dims))


def encode_rows(format: Format, rows: F32) -> U8:
    """Keys or values [..., D] as bytes [..., stored_bytes]. A number that is not finite, or too large, is stored as inf or nan."""
    padded = np.zeros((*rows.shape[:-1], stored_dims(format, rows.shape[-1])), np.float32)
    padded[..., : rows.shape[-1]] = rows
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return format.join(format.encoded(padded.reshape(-1, format.block_size))).reshape(*rows.shape[:-1], -1)


def rounded(format: Format, rows: F32) -> F32:
    """Keys or values [..., D] as they are decoded again."""
    return format.decode(encode_rows(format, rows))[..., : rows.shape[-1]]


def remembered(format: Format, rows: F32) -> F32:
    """Keys or values [..., D] as attention finds them in the cache."""
    size = hadamard_size(format, rows.shape[-1])
    return hadamard(rounded(format, hadamard(rows, size)), size)

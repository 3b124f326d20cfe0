"""The formats of keys and values in the cache. The row of a token and a head is encoded by itself.

Groups with a scale run along the dimensions and never across tokens: forgetting a token leaves the others as they are.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from cpuspec.errors import FormatError
from cpuspec.formats.floats import BF16, F16, F32_FORMAT
from cpuspec.formats.format import F32, U8, Affine, Format, Parts

LANES = 16  # stored rows are padded with zeros to whole vectors, and to whole groups
GROUP = 32


def encode_int8(values: F32) -> Parts:
    """Codes -127..127 around the middle of the group's range, which is `base`: against codes around zero that halves the loss.

    d and base are rounded first, so that codes make up for it. A group with a number that is not finite gets such a d or base.
    """
    half = np.float32(0.5)
    middle = values.min(axis=1, keepdims=True) * half + values.max(axis=1, keepdims=True) * half
    base = middle.astype(np.float16)
    centred = values - base.astype(np.float32)
    d = (np.abs(centred).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float16)
    inverse = np.where(d > 0, np.float32(1) / d.astype(np.float32), np.float32(0))
    return {"d": d, "base": base, "codes": np.nan_to_num(np.clip(np.rint(centred * inverse), -127, 127)).astype(np.int8)}


INT8 = Format("int8", np.dtype([("d", "<f2"), ("base", "<f2"), ("codes", "i1", GROUP)]), GROUP, encode_int8, affine=Affine(-1))

KV_FORMATS: Mapping[str, Format] = MappingProxyType({row.name: row for row in (F32_FORMAT, F16, BF16, INT8)})


def get_kv_format(name: str) -> Format:
    """The row of KV_FORMATS. Raises FormatError naming the choices."""
    try:
        return KV_FORMATS[name]
    except KeyError:
        raise FormatError(f"KV format {name!r} is not known; wanted one of {', '.join(KV_FORMATS)}") from None


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
        return format.join(format.encode_blocks(padded.reshape(-1, format.block_size))).reshape(*rows.shape[:-1], -1)


def rounded(format: Format, rows: F32) -> F32:
    """Keys or values [..., D] after a round trip through the cache."""
    return format.decode(encode_rows(format, rows))[..., : rows.shape[-1]]

"""The formats whose blocks are single numbers: f32, f16, bf16. A number's bits are its code."""

import numpy as np

from cpuspec.formats.format import F32, Format, Parts
from cpuspec.formats.packing import GROUP, lanes, words


def encode_bf16(values: F32) -> Parts:
    """Rounded to nearest even. A nan keeps its sign and becomes a quiet nan, because rounding could turn it into infinity."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | 0x0040
    return {"codes": np.where(np.isnan(values), quiet, rounded).astype("<u2")}


F32_FORMAT = Format(
    "f32",
    np.dtype([("codes", "<u4")]),
    1,
    lambda values: {"codes": values.view("<u4")},
    decode_numbers=lambda parts: parts["codes"].view("<f4"),
    planes=(lanes("codes", "<u4", 1),),
    reader="f32",
    gguf_type=0,
    safetensors_dtype="F32",
)
F16 = Format(
    "f16",
    np.dtype([("codes", "<u2")]),
    1,
    lambda values: {"codes": values.astype("<f2").view("<u2")},  # to nearest even
    decode_numbers=lambda parts: parts["codes"].view("<f2").astype(np.float32),
    planes=(lanes("codes", "<u2", 1),),
    reader="f16",
    gguf_type=1,
    safetensors_dtype="F16",
)
BF16 = Format(
    "bf16",
    np.dtype([("codes", "<u2")]),
    1,
    encode_bf16,
    decode_numbers=lambda parts: (parts["codes"].astype(np.uint32) << 16).view(np.float32),  # the upper half of an f32
    planes=(words("codes", 16, "<u2"),),  # kernels multiply pairs of inputs
    reader="pairs",
    padded_to=GROUP,
    gguf_type=30,
    safetensors_dtype="BF16",
)

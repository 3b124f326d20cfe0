"""Rotary positions: inverse frequencies of every scaling rule, and tables of cosines and sines.

Sources: RoFormer (arXiv 2104.09864); linear position interpolation (arXiv 2306.15595); YaRN (arXiv 2309.00071);
Llama 3.1's rule as published with its configuration (`rope_type: llama3`).
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cpuspec.config import Rope, RopeScaling
from cpuspec.model.batch import F32

F64 = NDArray[np.float64]

_MANY_POSITIONS = 4096
_LARGEST_F16 = float(np.finfo(np.float16).max)


def inverse_frequencies(rope: Rope, head_dim: int) -> F64:
    """Radians per position of each pair of dimensions, [D/2]. Pair i is dimensions (i, i + D/2); 0 where it does not turn."""
    if rope.dims:
        return np.pad(inverse_frequencies(replace(rope, dims=0), rope.dims), (0, (head_dim - rope.dims) // 2))
    half = head_dim // 2
    inverse = rope.base ** (-np.arange(half, dtype=np.float64) / half)
    scaling = rope.scaling
    if scaling is None:
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "factors":
        return inverse / np.array(scaling.factors)
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling)
    assert scaling.kind == "yarn", "a context has chosen the factors of LongRoPE (`RopeScaling.for_context`)"
    return _yarn(inverse, scaling, rope.base)


def _llama3(inverse: F64, scaling: RopeScaling) -> F64:
    """Long wavelengths are divided by `factor`, short ones kept, and the band between is blended linearly."""
    turns = scaling.original_context_length * inverse / (2 * math.pi)  # rotations within the trained context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * inverse + (1 - keep) * inverse / scaling.factor


def _yarn(inverse: F64, scaling: RopeScaling, base: float) -> F64:
    """NTK-by-parts: pairs that turn more than `beta_fast` times in the trained context are kept, under `beta_slow` divided."""

    def pair_of(turns: float) -> float:
        wavelength = scaling.original_context_length / (turns * 2 * math.pi)
        return half * math.log(wavelength) / math.log(base)

    half = len(inverse)
    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    divide = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return divide * inverse / scaling.factor + (1 - divide) * inverse


def attention_factor(scaling: RopeScaling | None) -> float:
    """The factor of cosines and sines: the scaling's own, or that of YaRN, which sharpens attention by 0.1 ln(factor) + 1, or 1."""
    if scaling is None:
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind != "yarn":
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def rotary_factors(rope: Rope, head_dim: int) -> F64:
    """The factor of the cosine and the sine of each pair, [D/2]: `attention_factor` where it turns, else 1."""
    factors = np.ones(head_dim // 2)
    factors[: (rope.dims or head_dim) // 2] = attention_factor(rope.scaling)
    return factors


def mean_over_positions(rope: Rope | None, heads: F32) -> F32:
    """The mean of heads [..., D] rotated to each of the first positions. Dimensions that turn quickly nearly vanish in it."""
    if rope is None:
        return heads
    cosines, sines = (t.mean(axis=0, dtype=np.float64) for t in rope_table(rope, heads.shape[-1], np.arange(_MANY_POSITIONS)))
    first, second = np.split(heads.astype(np.float64), 2, axis=-1)
    mean = np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    # Rounded, so that the order of sums does not show. The rest of a key beyond f16 is the KV format's to bear.
    return mean.clip(-_LARGEST_F16, _LARGEST_F16).astype(np.float16).astype(np.float32)


def growth(rope: Rope, positions: NDArray[np.integer]) -> F64:
    """The factor of the heads at these positions beside the rotation, [len(positions)]: Llama 4's temperature of queries."""
    if not rope.growth:
        return np.ones(len(positions))
    return 1 + rope.growth * np.log1p(positions // rope.growth_length)


def rope_table(rope: Rope, head_dim: int, positions: NDArray[np.integer]) -> tuple[F32, F32]:
    """Cosines and sines of `positions`, each [len(positions), D/2], computed in f64 and rounded once."""
    angles = positions.astype(np.float64)[:, None] * inverse_frequencies(rope, head_dim)
    factor = rotary_factors(rope, head_dim) * growth(rope, positions)[:, None]
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)

"""Rotary numbers of a file: those that make a table make a finite one, and all others are an error that names them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cpuspec.config import ModelConfig, Rope, RopeScaling
from cpuspec.errors import ConfigError
from cpuspec.model.rope import attention_factor, inverse_frequencies, rope_table
from tools.make_tiny_model import tiny_config

VALID = {
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192),
    "yarn": RopeScaling("yarn", 4.0, original_context_length=32768, attention_factor=1.2),
    "factors": RopeScaling("factors", factors=(1.0,) * 31 + (1e30,)),  # a pair that is not to turn at all
}
NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor"),
}
BAD = [0.0, -0.0, -1.0, 5e-324, 1e-300, 1e300, math.inf, -math.inf, math.nan, True, "4", 10**400]


CONTEXTS = [0, -1, 1 << 40, 2.5, math.nan, True, "8192"]
BASES = [1.0, 0.5, 0.0, -1e4, 1e300, math.inf, math.nan, "1e4", True, 10**400]
EPSILONS = [-1e-6, 1.0, math.nan, "1e-6", True]
LLAMA = tiny_config()
REFUSED = [
    *((VALID[kind], name, BAD, rf"{kind}: {name} is .*, wanted ") for kind, names in NUMBERS.items() for name in names),
    (VALID["factors"], "factors", [(1.0, value) for value in (*BAD, [1.0])], r"factors: factors\[1\] is .*, wanted "),
    *(
        (VALID[kind], "original_context_length", CONTEXTS, rf"{kind}: original_context_length is .*, wanted an integer")
        for kind in ("llama3", "yarn")
    ),
    (VALID["yarn"], "beta_slow", [32.0], r"yarn: beta_slow is 32.0, wanted less than beta_fast 32.0"),
    (VALID["llama3"], "low_freq_factor", [5.0], r"llama3: low_freq_factor is 5.0, wanted less than high_freq_factor 4.0"),
    (LLAMA, "rope_base", BASES, r"rope_base is .*, wanted a number above 1"),  # later pairs must turn slower
    (LLAMA, "norm_eps", EPSILONS, "norm_eps"),
]


@pytest.mark.parametrize(("valid", "name", "values", "said"), REFUSED, ids=lambda one: one if isinstance(one, str) else "")
def test_a_number_that_makes_no_sound_table_is_an_error_that_names_it(
    valid: ModelConfig | RopeScaling, name: str, values: list[object], said: str
) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=said):
            replace(valid, **{name: value})


def table(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(all="raise", under="ignore"):
        return rope_table(Rope(config.rope_base, config.rope_scaling), config.head_dim, np.array([0, 1, 17, 4096, (1 << 26) - 1]))


@pytest.mark.parametrize("kind", VALID)
@pytest.mark.parametrize("base", [1.0000001, 2.0, 1e4, 1e15])
def test_every_scaling_that_is_accepted_makes_finite_rotations(kind: str, base: float) -> None:
    extremes = {"linear": {}, "factors": {}}
    extremes["llama3"] = {"low_freq_factor": 1e-6, "high_freq_factor": 1e6, "original_context_length": 1}
    extremes["yarn"] = {"beta_slow": 1e-6, "beta_fast": 1e6, "original_context_length": 1, "attention_factor": 1e-3}
    for factor in (1e-6, 0.5, 1.0, 1e6):
        for scaling in (replace(VALID[kind], factor=factor), replace(VALID[kind], factor=factor, **extremes[kind])):
            for values in table(replace(tiny_config(), rope_base=base, rope_scaling=scaling)):
                assert np.isfinite(values).all()
                assert np.abs(values).max() <= 100


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_turns_as_transformers_does_with_and_without_whole_pairs(truncate: bool) -> None:
    """gpt-oss's settings: without rounding, the ramp goes from pair 8.09 to pair 17.40."""
    from transformers import GptOssConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": truncate}
    settings |= {"original_max_position_embeddings": 4096, "rope_theta": 150000.0}
    wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](GptOssConfig(rope_parameters=settings), "cpu")
    scaling = RopeScaling("yarn", 32.0, original_context_length=4096, truncate=truncate)
    assert np.allclose(inverse_frequencies(Rope(150000.0, scaling), 64), wanted.numpy(), rtol=1e-5, atol=0)
    other = inverse_frequencies(Rope(150000.0, replace(scaling, truncate=not truncate)), 64)
    assert np.abs(other / wanted.numpy() - 1).max() > 0.01
    assert math.isclose(attention_factor(scaling), factor)


def test_a_model_without_scaling_turns_as_before() -> None:
    cosines, sines = table(tiny_config())
    angles = np.array([0, 1, 17, 4096, (1 << 26) - 1])[:, None] * 1e4 ** (-np.arange(32) / 32)
    assert np.array_equal(cosines, np.cos(angles).astype(np.float32))
    assert np.array_equal(sines, np.sin(angles).astype(np.float32))

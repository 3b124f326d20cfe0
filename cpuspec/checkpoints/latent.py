"""Settings of latent attention (`config.Latent`) in files of both kinds: sizes, and the factors that YaRN gives to its scores."""

import math
from collections.abc import Mapping
from typing import Any

from cpuspec.checkpoints.fields import Fields
from cpuspec.config import Latent, ModelConfig, RopeScaling
from cpuspec.formats import QuantTensor


def _arguments(latent: Latent, scale: float) -> dict[str, Any]:
    """Arguments of `ModelConfig`. scale: the factor of scores beside 1 / sqrt(numbers of a query)."""
    sizes = {"num_kv_heads": 1, "head_dim": latent.dims, "rope_dims": latent.rope_dims}
    return {"latent": latent, **sizes, "query_scale": scale / math.sqrt(latent.plain + latent.rope_dims)}


def _growth(scaling: RopeScaling | None) -> float:
    """The number that YaRN's slopes multiply, 0 without YaRN (arXiv 2309.00071, section 3.4)."""
    return 0.1 * math.log(max(scaling.factor, 1.0)) if scaling and scaling.kind == "yarn" else 0.0


def read_hf(fields: Fields, rope: Fields, scaling: RopeScaling | None) -> dict[str, Any]:
    """The settings in a config.json as arguments of `ModelConfig`. rope, scaling: its rotary settings."""
    if fields.boolean("attention_bias", False):
        fields.fail("attention_bias", "false; latent attention with biases is not supported")
    if not fields.boolean("rope_interleave", True):
        fields.fail("rope_interleave", "true; latent attention whose rotary positions pair halves is not supported")
    for key in ("head_dim", "qk_head_dim", "num_key_value_heads"):  # which follow from others
        fields.value(key)
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    rank, rope_dims, plain, value_dims = (fields.integer(name) for name in names)
    latent = Latent(rank, rope_dims, plain, value_dims, fields.integer("q_lora_rank", 0))
    return _arguments(latent, (1 + rope.number("mscale_all_dim", 0.0) * _growth(scaling)) ** 2)


def read_gguf(fields: Fields, scaling: RopeScaling | None, tensors: Mapping[str, QuantTensor]) -> dict[str, Any]:
    """The settings in a GGUF file as arguments of `ModelConfig`. Files that cache no common vector have no lengths of `mla`."""
    rank, rope_dims = fields.integer("attention.kv_lora_rank"), fields.integer("rope.dimension_count")
    whole, values = fields.integer("attention.key_length"), fields.integer("attention.value_length")
    if "attention.key_length_mla" in fields:
        for key, length in (("key_length", rank + rope_dims), ("value_length", rank), ("head_count_kv", 1)):
            if fields.integer(f"attention.{key}") != length:
                fields.fail(f"attention.{key}", f"{length}, as kv_lora_rank and rope.dimension_count say")
        whole, values = fields.integer("attention.key_length_mla"), fields.integer("attention.value_length_mla")
    if not 0 < rope_dims < whole:
        fields.fail("rope.dimension_count", f"less than the {whole} numbers of a query")
    q_rank = fields.integer("attention.q_lora_rank", 0) if any(name.endswith(".q_a") for name in tensors) else 0
    # llama.cpp's loader multiplies the slope by 10, and a model of these gets the square of both factors (`deepseek2.cpp`).
    slope = 10 * fields.number("rope.scaling.yarn_log_multiplier", 0.0)
    grows = _growth(scaling)
    own = scaling.attention_factor if scaling else 1.0
    scale = ((1 + grows if own is None else own) * (1 + slope * grows)) ** 2
    return _arguments(Latent(rank, rope_dims, whole - rope_dims, values, q_rank), scale)


def gguf_entries(config: ModelConfig) -> dict[str, Any]:
    """The metadata of a model with latent attention, by keys without the architecture. None removes a key."""
    c, latent = config, config.latent
    if latent is None:
        return {}
    found: dict[str, Any] = {
        "attention.key_length": latent.dims, "attention.value_length": latent.rank, "attention.kv_lora_rank": latent.rank,
        "attention.key_length_mla": latent.plain + latent.rope_dims, "attention.value_length_mla": latent.value_dims,
        "rope.dimension_count": latent.rope_dims, "attention.q_lora_rank": latent.q_rank or None,
        "expert_shared_feed_forward_length": None,
    }  # fmt: skip
    if grows := _growth(c.rope_scaling):
        assert c.query_scale, "`_arguments` has made it"
        slope = (math.sqrt(c.query_scale * math.sqrt(latent.plain + latent.rope_dims)) - 1) / grows
        found |= {"rope.scaling.yarn_log_multiplier": 0.1 * slope, "rope.scaling.attn_factor": None}
    if c.query_growth:
        found |= {"attention.temperature_scale": c.query_growth, "attention.temperature_length": c.query_growth_length}
    return found

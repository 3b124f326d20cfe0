"""Random DFlash and DSpark heads as their makers publish them, and what they compute, from the papers' formulas in float64."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.config import ModelConfig
from tests.heads import F64, RandomHead, Reference, layer_arrays, llama_config, random_array, rms, write_head

MASK_ID, RANK = 300, 8


def make_block_head(
    path: Path,
    target: ModelConfig,
    layers: tuple[int, ...] = (0, 2),
    *,
    layout: str = "z-lab",
    markov: str = "",
    confidence: str = "",
    causal: bool = False,
    num_drafted: int = 0,
    block_size: int = 6,
    scales: Mapping[str, float] = MappingProxyType({}),
    seed: int = 3,
    **changes: Any,
) -> RandomHead:
    """layers: whose outputs are read. markov: "" for none, vanilla, gated or rnn. confidence: "" for none, state or markov.

    scales: further fields of z-lab's layout.
    """
    rng, hidden = np.random.default_rng(seed), target.hidden_size
    config = llama_config(target, model_type="qwen3", num_hidden_layers=2, head_dim=hidden // 4, attention_bias=False)
    arrays: dict[str, NDArray[Any]] = {
        "fc.weight": random_array(rng, (hidden, len(layers) * hidden)),
        "hidden_norm.weight": random_array(rng, (hidden,)),
        "norm.weight": random_array(rng, (hidden,)),
    }
    for i in range(2):
        arrays |= layer_arrays(rng, f"layers.{i}.", config, hidden)
        arrays[f"layers.{i}.input_layernorm.weight"] = random_array(rng, (hidden,))
        for norm in ("q_norm", "k_norm"):
            arrays[f"layers.{i}.self_attn.{norm}.weight"] = random_array(rng, (hidden // 4,))
    if num_drafted:
        ids = np.sort(rng.permutation(target.vocab_size)[:num_drafted])
        arrays["lm_head.weight"] = 3 * random_array(rng, (num_drafted, hidden))
        arrays["d2t"] = (ids - np.arange(num_drafted)).astype(np.int64)
    if markov:
        arrays["markov_head.markov_w1.weight"] = 2 * random_array(rng, (target.vocab_size, RANK))
        arrays["markov_head.markov_w2.weight"] = 8 * random_array(rng, (num_drafted or target.vocab_size, RANK))
    if markov == "gated":
        arrays["markov_head.gate_proj.weight"] = random_array(rng, (RANK, hidden + RANK))
        arrays["markov_head.gate_proj.bias"] = random_array(rng, (RANK,))
    if markov == "rnn":
        arrays["markov_head.joint_proj.weight"] = random_array(rng, (3 * RANK, 2 * RANK + hidden))
        arrays["markov_head.joint_proj.bias"] = random_array(rng, (3 * RANK,))
    if confidence:
        size = hidden + RANK if confidence == "markov" else hidden
        arrays["confidence_head.proj.weight"] = 2 * random_array(rng, (1, size))
        arrays["confidence_head.proj.bias"] = random_array(rng, (1,))
    name = "DSpark" if markov else "DFlash"
    if layout == "speculators":
        whole = {
            "architectures": [f"{name}Speculator"],
            "speculators_model_type": name.lower(),
            "transformer_layer_config": config,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
            "mask_token_id": MASK_ID,
            "block_size": block_size,
            "sample_from_anchor": bool(markov),
        }
    elif markov:
        whole = {**config, "architectures": ["Qwen3DSparkModel"], "target_layer_ids": list(layers), "mask_token_id": MASK_ID}
        whole |= {"block_size": block_size, "markov_rank": RANK, "markov_head_type": markov}
    else:
        nested = {"target_layer_ids": list(layers), "mask_token_id": MASK_ID, **scales}
        whole = {**config, "architectures": ["DFlashDraftModel"], "block_size": block_size, "dflash_config": nested}
    if causal:
        whole["causal"] = True
    return write_head(path, {**whole, **changes}, arrays)


def block_rows(head: RandomHead, features: F64, embedded: F64, output: NDArray[Any]) -> tuple[F64, F64]:
    """Logits and normed states of a block behind tokens with these features. output: the target's matrix."""
    one = Reference(head, head.config.get("transformer_layer_config", head.config))
    scales = head.config.get("dflash_config", {})
    context = rms(features @ one.arrays["fc.weight"].T, one.arrays["hidden_norm.weight"], one.eps)
    x = embedded * scales.get("input_embedding_scale", 1)
    for i in range(one.config["num_hidden_layers"]):
        prefix = f"layers.{i}."
        y = rms(x, one.arrays[f"{prefix}input_layernorm.weight"], one.eps)
        x = x + one.attention(prefix, y, context, bool(head.config.get("causal")))
        x = x + one.mlp(prefix, x)
    state = rms(x, one.arrays["norm.weight"], one.eps)
    logits = state @ one.arrays.get("lm_head.weight", np.asarray(output, np.float64)).T * scales.get("output_multiplier", 1)
    cap = scales.get("final_logit_softcapping")
    return cap * np.tanh(logits / cap) if cap else logits, state


def markov_bias(head: RandomHead, before: int, state: F64, memory: F64) -> tuple[F64, F64]:
    """The Markov head's bias of a row whose token follows `before`, and the memory of the next row; a block begins with zeros."""
    arrays = {name.removeprefix("markov_head."): array.astype(np.float64) for name, array in head.arrays.items()}
    w1 = arrays["markov_w1.weight"][before]
    if "gate_proj.weight" in arrays:
        w1 = w1 / (1 + np.exp(-(arrays["gate_proj.weight"] @ np.concatenate([state, w1]) + arrays["gate_proj.bias"])))
    if "joint_proj.weight" in arrays:
        joined = arrays["joint_proj.weight"] @ np.concatenate([memory, w1, state]) + arrays["joint_proj.bias"]
        kept, candidate, out = 1 / (1 + np.exp(-joined[:RANK])), np.tanh(joined[RANK : 2 * RANK]), np.tanh(joined[2 * RANK :])
        return arrays["markov_w2.weight"] @ out, kept * memory + (1 - kept) * candidate
    return arrays["markov_w2.weight"] @ w1, memory


def accepted_chance(head: RandomHead, before: int, state: F64) -> float:
    """What the confidence head says of a row."""
    weight, bias = (
        head.arrays["confidence_head.proj.weight"][0].astype(np.float64),
        float(head.arrays["confidence_head.proj.bias"][0]),
    )
    if len(weight) > len(state):
        state = np.concatenate([state, head.arrays["markov_head.markov_w1.weight"][before].astype(np.float64)])
    return 1 / (1 + float(np.exp(-(weight @ state) - bias)))

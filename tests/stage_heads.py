"""Random Medusa heads and MLP speculators as their makers publish them, and their rows, from the papers' formulas in float64."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.config import ModelConfig
from tests.heads import F64, RandomHead, random_array, write_head


def make_medusa(
    path: Path,
    target: ModelConfig,
    *,
    layout: str = "original",
    num_heads: int = 3,
    num_layers: int = 1,
    own_output: bool = True,
    num_drafted: int = 0,
    prefix: str = "",
    seed: int = 4,
    **changes: Any,
) -> RandomHead:
    """layout: original or vllm. num_drafted: tokens of a truncated vLLM head, 0 for all. prefix: of the tensors' names."""
    rng, hidden, vocab = np.random.default_rng(seed), target.hidden_size, target.vocab_size
    arrays: dict[str, NDArray[Any]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear" if layout == "original" else f"blocks.{head}.layers.{layer}"
            arrays[f"{prefix}{name}.weight"] = random_array(rng, (hidden, hidden))
            if layout == "original" or changes.get("medusa_fc_bias"):
                arrays[f"{prefix}{name}.bias"] = (0.2 * rng.standard_normal(hidden)).astype(np.float32)
        if own_output:
            name = f"{head}.{num_layers}" if layout == "original" else f"lm_heads.{head}"
            arrays[f"{prefix}{name}.weight"] = 3 * random_array(rng, (num_drafted or vocab, hidden))
    if layout == "original":
        config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "base_model_name_or_path": "target"}
    else:
        config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": num_heads, "vocab_size": vocab}
        config |= {"num_hidden_layers": num_layers, "hidden_size": hidden, "truncated_vocab_size": num_drafted or vocab}
    if num_drafted:
        arrays[f"{prefix}token_map"] = rng.permutation(vocab)[:num_drafted].astype(np.int64)
    return write_head(path, {**config, **changes}, arrays)


def medusa_rows(head: RandomHead, states: F64, output: NDArray[Any]) -> list[F64]:
    """Logits of each head. states: the target's, behind its final norm. output: the target's matrix, for a head without its own."""
    rows, config = [], head.config
    arrays = {name.removeprefix("medusa_head.").removeprefix("medusa_heads."): array for name, array in head.arrays.items()}
    for number in range(config.get("medusa_num_heads", config.get("num_heads"))):
        x, layers = states, config.get("medusa_num_layers", config.get("num_hidden_layers"))
        for layer in range(layers):
            name = f"{number}.{layer}.linear" if f"{number}.{layer}.linear.weight" in arrays else f"blocks.{number}.layers.{layer}"
            y = x @ arrays[f"{name}.weight"].astype(np.float64).T + arrays.get(f"{name}.bias", np.zeros(1)).astype(np.float64)
            x = x + y / (1 + np.exp(-y))
        own = arrays.get(f"{number}.{layers}.weight", arrays.get(f"lm_heads.{number}.weight", output))
        rows.append(x @ own.astype(np.float64).T)
    return rows


def make_mlp_speculator(
    path: Path,
    target: ModelConfig,
    *,
    num_stages: int = 3,
    inner_dim: int = 0,
    tied: bool = False,
    scale_input: bool = False,
    prefix: str = "speculator.",
    seed: int = 5,
    **changes: Any,
) -> RandomHead:
    """inner_dim: 0 for the target's. tied: all stages have the matrices of the first, but for their own states' one."""
    rng, hidden, vocab, size = np.random.default_rng(seed), target.hidden_size, target.vocab_size, inner_dim or target.hidden_size
    arrays: dict[str, NDArray[Any]] = {}
    for stage in range(num_stages):
        if stage < 2 or not tied:
            arrays[f"{prefix}proj.{stage}.weight"] = random_array(rng, (size, size if stage else hidden))
        if not stage or not tied:
            arrays |= {
                f"{prefix}emb.{stage}.weight": random_array(rng, (vocab, size)),
                f"{prefix}head.{stage}.weight": 3 * random_array(rng, (vocab, size)),
                f"{prefix}ln.{stage}.weight": random_array(rng, (size,)),
                f"{prefix}ln.{stage}.bias": (0.3 * rng.standard_normal(size)).astype(np.float32),
            }
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "n_predict": num_stages,
        "vocab_size": vocab,
        "emb_dim": hidden,
        "inner_dim": inner_dim,
        "tie_weights": tied,
        "scale_input": scale_input,
        "top_k_tokens_per_head": [4, 3, 2],
        "n_candidates": 5,
    }
    return write_head(path, {**config, **changes}, arrays)


def mlp_rows(head: RandomHead, states: F64, tokens: NDArray[Any]) -> list[F64]:
    """Logits of each stage. states [T, C]: the target's, behind its final norm. tokens [T, stages]: before the drafted ones."""
    arrays = {name.removeprefix("speculator."): array.astype(np.float64) for name, array in head.arrays.items()}
    config, rows = head.config, []
    number, size = config["n_predict"], config["inner_dim"] or config["emb_dim"]

    def normed(x: F64) -> F64:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    if config["scale_input"]:
        states = normed(states) / np.sqrt(2)
    state_weight = 0.5 ** (0.5 / number)
    embed_weight = np.sqrt(1 - state_weight**2) * np.sqrt(size / 2)
    for stage in range(number):
        own, after = (0, min(stage, 1)) if config["tie_weights"] else (stage, stage)
        x = state_weight * (states @ arrays[f"proj.{after}.weight"].T)
        x = x + embed_weight * arrays[f"emb.{own}.weight"][tokens[:, stage]]
        # The norm makes the same of the sum and of the sum over state_weight, all but eps; vLLM has the latter.
        x = normed(x / state_weight) * arrays[f"ln.{own}.weight"] + arrays[f"ln.{own}.bias"]
        states = x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))
        rows.append(states @ arrays[f"head.{own}.weight"].T)
    return rows

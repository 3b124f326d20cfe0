"""Random heads as their makers publish them, and what they compute, written from the papers' formulas in float64."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.heads import Head, find_reader
from cpuspec.checkpoints.heads.head import Block
from cpuspec.config import ModelConfig
from cpuspec.model.batch import ForwardBatch
from cpuspec.settings import EngineConfig

F64 = NDArray[np.float64]


@dataclass
class RandomHead:
    """A head's files, and the arrays in them by name."""

    path: Path
    config: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


def opened(head: RandomHead, target: Checkpoint) -> Head:
    """The head as its reader gives it beside a target."""
    found = find_reader(head.path)
    assert found, "a reader knows the layout"
    return found[0].read(found[1], target)


def check_same_tensors(one: Head, other: Head) -> None:
    """The same matrices and norms, by the same names."""
    assert one.model.tensors.keys() == other.model.tensors.keys()
    for name, tensor in other.model.tensors.items():
        assert np.array_equal(one.model.tensors[name].dequantize(), tensor.dequantize()), name


def check_same_head(one: Head, other: Head) -> None:
    """All but names of architectures, and an epsilon that may be rounded to f32."""
    check_same_tensors(one, other)
    no_matter = {"norm_eps": 1e-5, "architecture": ""}
    assert replace(one.model.config, **no_matter) == replace(other.model.config, **no_matter)  # type: ignore[arg-type]
    assert np.isclose(one.model.config.norm_eps, other.model.config.norm_eps)
    assert all(np.array_equal(a, b) for a, b in zip(_facts(one), _facts(other), strict=True))  # type: ignore[arg-type]


def _facts(head: Head) -> list[object]:
    """What a head says besides its model."""
    block = head.block or Block(0)
    norms = [norm and norm.weight for norm in (*head.feature_norms, head.state_norm)]
    markov = [block.markov.w1.dequantize(), block.markov.w2.dequantize()] if block.markov else []
    how = [head.method, head.layers, head.num_tokens, head.mask_id, head.token_ids, block.size, block.num_skipped, block.both_ways]
    return [*how, block.confidence, block.confidence_bias, *norms, *markov]


def output_of(target: Checkpoint) -> NDArray[np.float32]:
    """The target's output matrix."""
    return target.tensors["embed" if target.config.tied_embeddings else "output"].dequantize()


def states_of(target: Checkpoint, tokens: list[int], layers: tuple[int, ...]) -> F64:
    """The target's outputs of these layers, side by side, of all tokens, from scratch."""
    backend = make_backend("numpy", target, EngineConfig(threads=1, max_rows=64, kv_format="f32", keep_packed=False))
    batch = ForwardBatch(tokens, list(range(len(tokens))), [0], [0, len(tokens)], None, [0], layers)
    return np.concatenate(backend.forward(batch, backend.new_cache(1, 64)).hidden, axis=1).astype(np.float64)


def write_head(path: Path, config: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> RandomHead:
    """A directory of config.json and model.safetensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(dict(arrays), path / "model.safetensors")
    return RandomHead(path, dict(config), dict(arrays))


def llama_config(target: ModelConfig, **changes: Any) -> dict[str, Any]:
    """The fields of a draft layer's configuration."""
    return {
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        **changes,
    }


def layer_arrays(rng: np.random.Generator, prefix: str, config: Mapping[str, Any], reads: int) -> dict[str, NDArray[Any]]:
    """Matrices and norms of a Llama layer whose queries, keys and values read `reads` numbers."""
    hidden, ff = config["hidden_size"], config["intermediate_size"]
    dims = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * dims
    shapes = {
        "self_attn.q_proj": (hidden, reads),
        "self_attn.k_proj": (kv, reads),
        "self_attn.v_proj": (kv, reads),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ff, hidden),
        "mlp.up_proj": (ff, hidden),
        "mlp.down_proj": (hidden, ff),
        "post_attention_layernorm": (hidden,),
    }
    return {f"{prefix}{name}.weight": random_array(rng, shape) for name, shape in shapes.items()}


def random_array(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Of a size that keeps rows near one; vectors are norms, near one."""
    values = 1 + 0.2 * rng.standard_normal(shape) if len(shape) == 1 else rng.standard_normal(shape) / np.sqrt(shape[-1])
    return values.astype(np.float32)


def make_eagle3(
    path: Path,
    target: ModelConfig,
    layers: tuple[int, ...] = (1, 2, 3),
    *,
    layout: str = "original",
    num_drafted: int = 96,
    num_layers: int = 1,
    own_embedding: bool = False,
    own_output: bool = True,
    mask_id: int | None = None,
    mask_name: str = "mask_token_id",
    counts_outputs: bool = False,
    seed: int = 1,
    **flags: bool,
) -> RandomHead:
    """An EAGLE-3 head, or a P-EAGLE one if it has a mask. layers: their inputs are read.

    counts_outputs: whether the original layout's file counts outputs, as DeepSpec's. flags: norm_before_residual, norm_before_fc,
    fc_norm, norm_output.
    """
    rng, hidden, size = np.random.default_rng(seed), target.hidden_size, len(layers) * target.hidden_size
    config = llama_config(target, num_hidden_layers=num_layers)
    first = "midlayer." if layout == "original" else "layers.0."
    arrays: dict[str, NDArray[Any]] = {
        "fc.weight": random_array(rng, (hidden, size)),
        f"{first}input_layernorm.weight": random_array(rng, (hidden,)),
        f"{first}hidden_norm.weight": random_array(rng, (hidden,)),
        "norm.weight": random_array(rng, (hidden,)),
        **layer_arrays(rng, first, config, 2 * hidden),
    }
    for i in range(1, num_layers):
        arrays |= layer_arrays(rng, f"layers.{i}.", config, hidden)
        arrays[f"layers.{i}.input_layernorm.weight"] = random_array(rng, (hidden,))
    if own_embedding:
        arrays["embed_tokens.weight"] = random_array(rng, (target.vocab_size, hidden)) * np.float32(8)
    if own_output:
        ids = np.sort(rng.permutation(target.vocab_size)[:num_drafted])
        arrays["lm_head.weight"] = 3 * random_array(rng, (num_drafted, hidden))
        arrays["d2t"] = (ids - np.arange(num_drafted)).astype(np.int64)
        arrays["t2d"] = np.isin(np.arange(target.vocab_size), ids)
    if flags.get("norm_before_fc"):
        arrays["input_norm.weight"] = random_array(rng, (size,))
    if flags.get("fc_norm"):
        arrays |= {f"fc_norm.{i}.weight": random_array(rng, (hidden,)) for i in range(len(layers))}
    if mask_id is not None:
        arrays["mask_hidden"] = rng.standard_normal((1, 1, size)).astype(np.float32)
    whole: dict[str, Any] = {"draft_vocab_size": num_drafted, **({} if mask_id is None else {mask_name: mask_id})}
    if layout == "original":
        nested = {key: flags.pop(key) for key in ("norm_before_fc", "fc_norm") if key in flags}
        whole |= {**config, **flags, "architectures": ["LlamaForCausalLMEagle3"]}
        if counts_outputs:
            return write_head(path, {**whole, "target_layer_ids": [layer - 1 for layer in layers]}, arrays)
        return write_head(path, {**whole, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), **nested}}, arrays)
    kind = "eagle3" if mask_id is None else "peagle"
    whole |= {
        "architectures": ["Eagle3Speculator" if mask_id is None else "PEagleSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "target"}},
        "transformer_layer_config": config,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False),
    }
    return write_head(path, whole | flags, arrays)


def add_mtp(directory: Path, seed: int = 3) -> dict[str, NDArray[Any]]:
    """Make MiMo's checkpoint of a tiny Qwen2 in a directory; returns the arrays of its layer for multi-token prediction."""
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1, "attention_bias": True}
    rng, hidden = np.random.default_rng(seed), config["hidden_size"]
    arrays = layer_arrays(rng, "", config, hidden)
    dims = hidden // config["num_attention_heads"]
    for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
        arrays[f"self_attn.{part}_proj.bias"] = (0.2 * rng.standard_normal(config[heads] * dims)).astype(np.float32)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm"):
        arrays[f"{name}.weight"] = random_array(rng, (hidden,))
    arrays["input_proj.weight"] = random_array(rng, (hidden, 2 * hidden))
    whole = load_file(directory / "model.safetensors")
    write_head(directory, config, {**whole, **{f"model.mtp_layers.0.{name}": array for name, array in arrays.items()}})
    return arrays


# llama.cpp's names of the parts of a layer, and of other tensors.
_PARTS = {
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    **{"self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    **{"input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm"},
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
}
_OTHERS = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_SCALES = {
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
}


def as_gguf(head: RandomHead, path: Path, **facts: Any) -> Path:
    """A head of EAGLE-3's original layout, z-lab's or DeepSpec's as llama.cpp's converter writes it, and further keys."""
    import gguf

    c, is_eagle, arrays = head.config, "eagle_config" in head.config, dict[str, NDArray[Any]]()
    if is_eagle:
        known = {"eagle3.target_layers": c["eagle_config"]["eagle_aux_hidden_state_layer_ids"]}
    else:
        nested = c.get("dflash_config", c)
        known = {
            "dflash.attention.key_length": c["head_dim"],
            "dflash.target_layers": [layer + 1 for layer in nested["target_layer_ids"]],
            "dflash.block_size": c["block_size"],
            "dflash.attention.causal": bool(c.get("causal")),
            "tokenizer.ggml.mask_token_id": nested["mask_token_id"],
            **{f"dflash.{ours}": nested[theirs] for theirs, ours in _SCALES.items() if theirs in nested},
        }
    for name, array in head.arrays.items():
        layer = re.fullmatch(r"(?:midlayer|layers\.(\d))\.(.+)\.weight", name)
        ours = _OTHERS.get(name, name.removeprefix("markov_head.").replace("confidence_head.", "conf_"))
        ours = f"blk.{layer[1] or 0}.{_PARTS[layer[2]]}.weight" if layer else ours
        if name == "d2t":
            array = array + np.arange(len(array))  # noqa: PLW2901
        elif is_eagle and ours.endswith(("attn_q.weight", "attn_k.weight")):
            heads = c["num_attention_heads" if "attn_q" in ours else "num_key_value_heads"]
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)  # noqa: PLW2901
        if name != "t2d":
            arrays[ours] = array
    writer = gguf.GGUFWriter(path, "eagle3" if is_eagle else "dflash")
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in {**known, **facts}.items():
        add[type(value)](key, value)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_eagle1(path: Path, target: ModelConfig, *, bias: bool = True, seed: int = 2) -> RandomHead:
    """An EAGLE-1 head."""
    rng, hidden = np.random.default_rng(seed), target.hidden_size
    config = llama_config(target, architectures=["LlamaForCausalLM"], bias=bias)
    arrays = {
        "embed_tokens.weight": random_array(rng, (target.vocab_size, hidden)) * np.float32(8),
        "fc.weight": random_array(rng, (hidden, 2 * hidden)),
        **layer_arrays(rng, "layers.0.", config, hidden),
    }
    if bias:
        arrays["fc.bias"] = (0.1 * rng.standard_normal(hidden)).astype(np.float32)
    return write_head(path, config, arrays)


# --------------------------------------------------------------------------------------------------------------- what they compute


def rms(x: F64, weight: NDArray[Any], eps: float) -> F64:
    """The RMS norm."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


class Reference:
    """Layers of a Llama."""

    def __init__(self, head: RandomHead, config: Mapping[str, Any]) -> None:
        self.arrays = {name: array.astype(np.float64) for name, array in head.arrays.items()}
        self.config, self.eps = config, config["rms_norm_eps"]

    def linear(self, name: str, x: F64) -> F64:
        """A matrix and its bias."""
        return x @ self.arrays[f"{name}.weight"].T + self.arrays.get(f"{name}.bias", 0)

    def attention(self, prefix: str, x: F64, context: F64 | None = None, causal: bool = True) -> F64:
        """Attention with rotary positions to the rows of the context, and then to those of x."""
        c, both = self.config, x if context is None else np.concatenate([context, x])
        dims = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
        angles = np.arange(len(both))[:, None] * c["rope_theta"] ** (-np.arange(0, dims, 2) / dims)

        def heads(part: str, y: F64) -> F64:
            rows = self.linear(f"{prefix}self_attn.{part}_proj", y).reshape(len(y), -1, dims)
            if part == "v":
                return rows
            norm = self.arrays.get(f"{prefix}self_attn.{part}_norm.weight")
            a, b = np.split(rows if norm is None else rms(rows, norm, self.eps), 2, axis=-1)
            cos, sin = (turn(angles[len(both) - len(y) :])[:, None] for turn in (np.cos, np.sin))
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        share = c["num_attention_heads"] // c["num_key_value_heads"]
        q, k, v = heads("q", x), heads("k", both).repeat(share, axis=1), heads("v", both).repeat(share, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(dims)
        if causal:
            scores[:, ~np.tri(len(x), len(both), len(both) - len(x), dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self.linear(f"{prefix}self_attn.o_proj", np.einsum("hts,shd->thd", weights, v).reshape(len(x), -1))

    def mlp(self, prefix: str, x: F64) -> F64:
        """SwiGLU behind its norm."""
        x = rms(x, self.arrays[f"{prefix}post_attention_layernorm.weight"], self.eps)
        gate, up, down = (self.arrays[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        gated = x @ gate.T
        return (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T


def eagle3_encoded(head: RandomHead, features: F64) -> F64:
    """g of the rows' outputs of the target's layers, side by side."""
    one = Reference(head, head.config.get("transformer_layer_config", head.config))
    if "input_norm.weight" in one.arrays:
        features = rms(features, one.arrays["input_norm.weight"], one.eps)
    count = sum(name.startswith("fc_norm.") for name in one.arrays)
    if count:
        parts = np.split(features, count, axis=-1)
        features = np.concatenate([rms(part, one.arrays[f"fc_norm.{i}.weight"], one.eps) for i, part in enumerate(parts)], axis=-1)
    return features @ one.arrays["fc.weight"].T


def eagle3_rows(head: RandomHead, embedded: F64, g: F64, output: NDArray[Any]) -> tuple[F64, F64]:
    """Logits and hidden states of rows of an EAGLE-3 head. output: the target's matrix, for a head that has none."""
    one = Reference(head, head.config.get("transformer_layer_config", head.config))
    first = "midlayer." if "midlayer.hidden_norm.weight" in one.arrays else "layers.0."
    normed = rms(g, one.arrays[f"{first}hidden_norm.weight"], one.eps)
    x = np.concatenate([rms(embedded, one.arrays[f"{first}input_layernorm.weight"], one.eps), normed], axis=-1)
    h = (normed if head.config.get("norm_before_residual") else g) + one.attention(first, x)
    h = h + one.mlp(first, h)
    for i in range(1, one.config["num_hidden_layers"]):
        prefix = f"layers.{i}."
        h = h + one.attention(prefix, rms(h, one.arrays[f"{prefix}input_layernorm.weight"], one.eps))
        h = h + one.mlp(prefix, h)
    final = rms(h, one.arrays["norm.weight"], one.eps)
    logits = final @ one.arrays.get("lm_head.weight", np.asarray(output, np.float64)).T
    return logits, final if head.config.get("norm_output") else h


def eagle1_rows(head: RandomHead, embedded: F64, h: F64, output: NDArray[Any]) -> tuple[F64, F64]:
    """Logits and hidden states of rows of an EAGLE-1 head. h: the target's, behind its final norm. output: the target's matrix."""
    one = Reference(head, head.config)
    x = np.concatenate([embedded, h], axis=-1) @ one.arrays["fc.weight"].T + one.arrays.get("fc.bias", 0)
    x = x + one.attention("layers.0.", x)
    x = x + one.mlp("layers.0.", x)
    return x @ np.asarray(output, np.float64).T, x


def mtp_rows(head: RandomHead, embedded: F64, h: F64, output: NDArray[Any]) -> tuple[F64, F64]:
    """Logits and normed hidden states of rows of MiMo's layer for multi-token prediction, whose arrays have no prefix."""
    one = Reference(head, head.config)
    a, eps = one.arrays, one.eps
    joined = [rms(h, a["hidden_layernorm.weight"], eps), rms(embedded, a["token_layernorm.weight"], eps)]
    x = np.concatenate(joined, axis=-1) @ a["input_proj.weight"].T
    x = x + one.attention("", rms(x, a["input_layernorm.weight"], eps))
    x = x + one.mlp("", x)
    final = rms(x, a["final_layernorm.weight"], eps)
    return final @ np.asarray(output, np.float64).T, final

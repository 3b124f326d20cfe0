"""Heads before their training: parts of the target where they fit, so that few samples go far, and small random numbers elsewhere.

Embedding and output matrix are the target's own and stay so. The layer begins as the one after the last that the head reads,
without biases of queries, keys and values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.heads.mtp import last_attending, prediction_config
from cpuspec.errors import ConfigError
from cpuspec.train.layout import copy_head, layer_config, read_head, replace_output, speculators_config, write_new_head
from cpuspec.train.rows import not_computed
from cpuspec.train.samples import Extraction
from cpuspec.train.vocabulary import I64, drafted_ids

F32 = NDArray[np.float32]

_SMALL = 0.02  # the standard deviation of random matrices, as transformers has it
_LARGE = 4.0  # the largest weight of the norm of hidden states
_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class HeadShape:
    """What a new head looks like.

    layers: of the target, from 0, whose outputs it reads; None for those that the samples have, without the last one.
    intermediate_size: numbers inside its MLP, 0 for the target's; fewer keep the largest ones. vocab_size: tokens that it drafts,
    or that a layer for multi-token prediction learns to draft. copied: whether its layer begins as the target's.
    """

    layers: tuple[int, ...] | None = None
    intermediate_size: int = 0
    vocab_size: int = 16384
    copied: bool = True


def start_eagle3(directory: Path, target: Checkpoint, about: Extraction, counts: I64, shape: HeadShape, seed: int) -> None:
    """Write an untrained EAGLE-3 head. Raises ConfigError for a shape that the target or the samples forbid."""
    layers, rng = _layers(target, about, shape), np.random.default_rng(seed)
    if len(layers) != 3:
        raise ConfigError(f"an EAGLE-3 head reads three layers of its target, got {list(layers)}; name three with --layers")
    arrays, hidden = _arrays(target, shape, layers, rng), target.config.hidden_size
    for part in "qkv":
        of_hidden = arrays[f"layers.0.{part}"]
        of_token = _SMALL * rng.standard_normal(of_hidden.shape, np.float32)
        arrays[f"layers.0.{part}"] = np.concatenate([of_token, of_hidden], axis=1)
    arrays["hidden_norm"] = arrays.pop("layers.0.attn_norm")
    arrays["embed_norm"] = np.ones(hidden, np.float32)
    ids = drafted_ids(counts, shape.vocab_size)
    arrays |= _output(target, ids)
    layer = layer_config(target, shape.intermediate_size or target.config.intermediate_size)
    config = _eagle3_config(target, layer, layers, target.config.vocab_size if ids is None else len(ids))
    write_new_head(directory, config, "eagle3", arrays, target)


def _eagle3_config(
    target: Checkpoint, layer: Mapping[str, Any], layers: Sequence[int], num_drafted: int, normed_residual: bool = False
) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": speculators_config(target, "eagle3", 4),
        "transformer_layer_config": layer,
        "draft_vocab_size": num_drafted,
        "eagle_aux_hidden_state_layer_ids": [one + 1 for one in layers],
        "norm_before_residual": normed_residual,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
    }


def start_mtp(directory: Path, target: Checkpoint, about: Extraction, counts: I64, shape: HeadShape, seed: int) -> None:
    """Write an untrained layer for multi-token prediction: the target's last one with attention, after its hidden state.

    Raises ConfigError for a shape that is not the target's own, and for a target with operations that are not trained.
    """
    if (shape.layers, shape.intermediate_size) != (None, 0):
        raise ConfigError("a layer for multi-token prediction is one layer of its target's shape, which reads its final state")
    config, last, rng = prediction_config(target.config, False), last_attending(target.config), np.random.default_rng(seed)
    if unknown := not_computed(config) + [name for name in target.tensors if name == f"layers.{last}.router"]:
        raise ConfigError(f"{target.name} has {', '.join(unknown)} in its last layer with attention, which is not trained here")
    hidden, prefix, norm = config.hidden_size, f"layers.{last}.", target.tensors["norm"].dequantize()
    arrays = {"layers.0." + n.removeprefix(prefix): t.dequantize() for n, t in target.tensors.items() if n.startswith(prefix)}
    if not shape.copied:
        for name, array in arrays.items():
            random = _SMALL * rng.standard_normal(array.shape, np.float32)
            arrays[name] = random if array.ndim == 2 else np.full_like(array, not name.endswith("_bias"))
    # Without the final norm's weights the hidden state is that which the layer would have read after the target's last.
    plain = np.sqrt(np.mean(norm * norm)) / np.where(norm == 0, 1, norm)
    arrays |= {"norm": norm, "embed_norm": np.ones(hidden, np.float32), "hidden_norm": np.clip(plain, -_LARGE, _LARGE)}
    of_token = _SMALL * rng.standard_normal((hidden, hidden), np.float32)
    arrays["fuse"] = np.concatenate([of_token, np.eye(hidden, dtype=np.float32)], axis=1)
    write_new_head(directory, _mtp_config(target, config.intermediate_size), "mtp", arrays, target)


def _mtp_config(target: Checkpoint, intermediate_size: int) -> dict[str, Any]:
    family = FAMILIES[target.config.architecture]
    return {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_config": speculators_config(target, "mtp", 3),
        "transformer_layer_config": layer_config(target, intermediate_size)
        | {"model_type": family.hf_types[0] or family.architecture},
        "num_nextn_predict_layers": 1,
    }


def start_from(directory: Path, source: Path, target: Checkpoint, counts: I64, vocab_size: int | None) -> None:
    """Write a head that exists as the beginning of another training.

    vocab_size: how many tokens it shall draft, those that the answers use most now; None for those that it drafts.
    Raises CheckpointError for files that are no head, ConfigError for one of a kind that is not trained.
    """
    if (method := read_head(source, target).method) not in ("eagle3", "mtp"):
        raise ConfigError(f"{source} drafts by {method}, which is not trained here; wanted EAGLE-3 or multi-token prediction")
    if source.suffix == ".gguf":
        _unpack(directory, source, target)
        source = directory
    if vocab_size is None or method == "mtp":  # which drafts all tokens anyway
        copy_head(source, directory)
        return
    ids = drafted_ids(counts, vocab_size)
    replace_output(source, directory, _output(target, ids) or _output(target, np.arange(target.config.vocab_size)), target)


def _unpack(directory: Path, source: Path, target: Checkpoint) -> None:
    """Write a head's GGUF file as the directory that training begins with, in f32."""
    head = read_head(source, target)
    own, config, theirs = head.model, head.model.config, {id(tensor) for tensor in target.tensors.values()}
    if head.method == "eagle3" and head.feature_norms:
        raise ConfigError(
            f"{source} has norms of features, with which it is trained from its directory only; name that with --from"
        )
    arrays: dict[str, Any] = {name: tensor.dequantize() for name, tensor in own.tensors.items() if id(tensor) not in theirs}
    if head.token_ids is not None:
        arrays["token_ids"] = head.token_ids
    settings = _mtp_config(target, config.intermediate_size)
    if head.method == "eagle3":
        num = target.config.vocab_size if head.token_ids is None else len(head.token_ids)
        layer = layer_config(own, config.intermediate_size)
        settings = _eagle3_config(target, layer, head.layers, num, bool(config.head and config.head.normed_residual))
    write_new_head(directory, settings, head.method, arrays, target)


def _layers(target: Checkpoint, about: Extraction, shape: HeadShape) -> tuple[int, ...]:
    """The target's layers that the head reads.

    The last one's output is left out: others count the inputs of layers, and to many of them that one is already normed.
    """
    have = tuple(layer for layer in about.layers if type(layer) is int and layer < target.config.num_layers - 1)
    layers = have[-3:] if shape.layers is None else shape.layers
    if not layers or not set(layers) <= set(have) or len(set(layers)) != len(layers):
        raise ConfigError(
            f"the head is to read layers {list(layers)}, and the samples have {list(have)}, the target's last one left out"
        )
    return layers


def _arrays(target: Checkpoint, shape: HeadShape, layers: tuple[int, ...], rng: np.random.Generator) -> dict[str, F32]:
    """An EAGLE-3 head as if it read no embedding, and without its output matrix."""
    c, inside = target.config, shape.intermediate_size or target.config.intermediate_size
    if c.latent:
        raise ConfigError(
            f"{target.name} has latent attention, whose shape no head that is trained here has; wanted another target"
        )
    if not 1 <= inside <= c.intermediate_size:
        raise ConfigError(f"the head is to have {inside} numbers inside; wanted at most {c.intermediate_size}")
    if shape.copied and (c.norms, c.norm_kind, c.activation, c.gated, c.parallel) != ("before", "rms", "silu", True, False):
        raise ConfigError(f"layers of {target.name} have norms or an activation that its head has not; begin without them (--cold)")
    hidden, first = c.hidden_size, max(layers) + 1
    encode = np.float32(_SMALL) * rng.standard_normal((hidden, len(layers) * hidden), np.float32)
    arrays: dict[str, F32] = {"norm": target.tensors["norm"].dequantize(), "hidden_norm": np.ones(hidden, np.float32)}
    if shape.copied:
        at = layers.index(first - 1)  # the input of the copied layer
        encode[:] = 0
        encode[:, at * hidden : (at + 1) * hidden] = np.eye(hidden, dtype=np.float32)
        arrays["hidden_norm"] = target.tensors[f"layers.{first}.attn_norm"].dequantize()
    arrays["encode"] = encode
    layer = _copied(target, first, inside) if shape.copied else _random(target, inside, rng)
    return arrays | {f"layers.0.{part}": array for part, array in layer.items()}


def _copied(target: Checkpoint, layer: int, inside: int) -> dict[str, F32]:
    """The target's layer, with as many of its MLP's numbers: those with the largest matrices."""
    parts = {part: target.tensors[f"layers.{layer}.{part}"].dequantize() for part in (*_MATRICES, "attn_norm", "mlp_norm")}
    if inside < len(parts["up"]):
        size = np.linalg.norm(parts["up"], axis=1) * np.linalg.norm(parts["down"], axis=0)
        kept = np.sort(np.argsort(-size, kind="stable")[:inside])
        parts |= {"gate": parts["gate"][kept], "up": parts["up"][kept], "down": parts["down"][:, kept]}
    return {part: np.ascontiguousarray(array) for part, array in parts.items()}


def _random(target: Checkpoint, inside: int, rng: np.random.Generator) -> dict[str, F32]:
    c = target.config
    q, kv, hidden = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size
    shapes = {
        **{"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)},
        **{"gate": (inside, hidden), "up": (inside, hidden), "down": (hidden, inside)},
    }
    ones = {part: np.ones(hidden, np.float32) for part in ("attn_norm", "mlp_norm")}
    return {part: _SMALL * rng.standard_normal(shape, np.float32) for part, shape in shapes.items()} | ones


def _output(target: Checkpoint, ids: I64 | None) -> dict[str, np.ndarray]:
    """The rows of the target's output matrix that the head shares; none for all of them."""
    if ids is None:
        return {}
    output = target.tensors["embed" if target.config.tied_embeddings else "output"]
    return {"output": output.rows(ids), "token_ids": ids}

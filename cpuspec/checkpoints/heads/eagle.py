"""EAGLE heads: a decoder layer or more over a token and the hidden state before it, the target's or, while it drafts, its own.

EAGLE-1 and -2 (arXiv 2401.15077, 2406.16858) have the same weights; EAGLE-3 (2503.01840) reads three layers of the target and
drafts the tokens that it needs most; P-EAGLE (2602.01469) is EAGLE-3 with rows of a mask token, for a draft in one pass. Names are
those of the original code (`midlayer`) or of speculators (`layers.0`).
"""

import re

import numpy as np

from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.heads.head import Head, HeadFiles, HeadNorm, eagle3_config, final_norm, inputs_of, mask_token
from cpuspec.checkpoints.heads.model import DERIVED, canonical_name, head_model
from cpuspec.config import HeadConfig
from cpuspec.formats import QuantTensor

_NAMES_OF_1 = {"fc.weight": "fuse", "fc.bias": "fuse_bias"}
NAMES_OF_3 = {"fc.weight": "encode", "layers.0.input_layernorm.weight": "embed_norm", "layers.0.hidden_norm.weight": "hidden_norm"}
_MASK = "mask_hidden"


def is_eagle1(files: HeadFiles) -> bool:
    """Whether a directory has the layout of EAGLE-1: a Llama or Qwen2 of one layer, and a matrix `fc`."""
    others = "speculators_model_type" in files.fields or "block_size" in files.fields or "hidden_norm.weight" in files.names
    return not files.is_gguf and "fc.weight" in files.names and not others and not is_eagle3(files)


def is_eagle3(files: HeadFiles) -> bool:
    """Whether a directory has a layout of EAGLE-3 or P-EAGLE."""
    if files.is_gguf:
        return False
    kind, name = files.fields.value("speculators_model_type"), re.compile(r"(.*\.)?(midlayer|layers\.0)\.hidden_norm\.weight")
    return kind in ("eagle3", "peagle") or (kind is None and any(map(name.fullmatch, files.names)))


def read_eagle1(files: HeadFiles, target: Checkpoint) -> Head:
    """A head of EAGLE-1: token and final-normed hidden state go through `fc`; the layer has no first norm, the logits none."""
    tensors = {canonical_name(name, _NAMES_OF_1): tensor for name, tensor in files.tensors.items() if not DERIVED.fullmatch(name)}
    has_norm = "layers.0.attn_norm" in tensors
    head = HeadConfig(input_norms=False, fuse_bias="fuse_bias" in tensors, first_norm=has_norm, final_norm="norm" in tensors)
    model = head_model(files, files.fields, tensors, head, target)
    files.check("hidden size", model.config.hidden_size, target.config.hidden_size, target)
    return Head("eagle", files.name, model, (target.config.num_layers - 1,), (final_norm(target),), tokenizer=files.tokenizer)


def read_eagle3(files: HeadFiles, target: Checkpoint) -> Head:
    """A head of EAGLE-3 or P-EAGLE, in the original layout or that of speculators."""
    fields = files.fields
    is_parallel = _MASK in files.names
    nested = fields.object("eagle_config")
    ids = fields.items("eagle_aux_hidden_state_layer_ids") or nested.items("eagle_aux_hidden_state_layer_ids")
    ids = ids or inputs_of(fields.items("target_layer_ids"))
    count = target.config.num_layers
    layers = files.layers(ids or [2, count // 2, count - 3], target)
    tensors: dict[str, QuantTensor] = {}
    norms: dict[str, str] = {}  # of features: canonical name to tensor
    for file_name, tensor in files.tensors.items():
        name = re.sub(r"^midlayer\.", "layers.0.", file_name.removeprefix("model."))
        if name == "input_norm.weight" or re.fullmatch(r"fc_norm\.\d{1,4}\.weight", name):
            norms[name] = file_name
        elif name != _MASK and not DERIVED.fullmatch(name):
            tensors[canonical_name(name, NAMES_OF_3)] = tensor
    config = fields.object("transformer_layer_config") if "transformer_layer_config" in fields else fields
    size, num_logits, token_ids = files.sizes(tensors, layers, target)
    head = eagle3_config(fields, size, num_logits)
    model = head_model(files, config, tensors, head, target)
    eps, mask = model.config.norm_eps, None
    feature_norms = _feature_norms(files, nested, norms, size, len(layers), eps)
    state_norm = final_norm(model) if fields.boolean("norm_output", False) else None
    if is_parallel:
        mask = _mask(files, size)
        mask_id = mask_token(fields, nested, model.config.vocab_size)
    return Head(
        "p-eagle" if is_parallel else "eagle3",
        files.name,
        model,
        layers,
        feature_norms,
        state_norm,
        token_ids,
        files.num_tokens,
        mask_id=mask_id if is_parallel else -1,
        mask_features=mask,
        tokenizer=files.tokenizer,
    )


def _feature_norms(
    files: HeadFiles, nested: Fields, norms: dict[str, str], size: int, count: int, eps: float
) -> tuple[HeadNorm, ...]:
    """The norms of features. `norm_before_fc`: one over all numbers; `fc_norm`: one for each layer's. nested: also has them."""
    flags = {"norm_before_fc": {"input_norm.weight"}, "fc_norm": {f"fc_norm.{i}.weight" for i in range(count)}}
    asked = [flag for flag in flags if (files.fields if flag in files.fields else nested).boolean(flag, False)]
    wanted = {name for flag in asked for name in flags[flag]}
    if wanted != norms.keys():
        odd = min(wanted ^ norms.keys())
        files.refuse(f"tensor {odd} is {'there' if odd in norms else 'missing'}, and its configuration says otherwise")
    found = [files.norm(norms[name], size, eps) for name in norms if name == "input_norm.weight"]
    part = size // count
    found += [files.norm(norms[name], part, eps, int(name.split(".")[1]) * part) for name in norms if name.startswith("fc_norm")]
    return tuple(found)


def _mask(files: HeadFiles, size: int) -> np.ndarray:
    values = files.arrays[_MASK] if _MASK in files.arrays else files.tensors[_MASK].dequantize()
    if values.size != size or not np.isfinite(values).all():
        files.refuse(f"tensor {_MASK} has the shape {list(values.shape)}, wanted {size} finite numbers")
    return values.astype(np.float32).reshape(1, size)

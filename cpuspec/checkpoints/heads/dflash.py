"""DFlash and DSpark heads (arXiv 2602.06036, 2607.05147): layers that fill a block of masks, over injected states of the target.

Layouts: z-lab's (`dflash_config`), DeepSpec's (its keys at the top), speculators' (`transformer_layer_config`).
"""

import re
from dataclasses import replace

from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.heads.head import (
    Block,
    Head,
    HeadFiles,
    Markov,
    factor_of,
    final_norm,
    inputs_of,
    mask_token,
    with_logit_scale,
)
from cpuspec.checkpoints.heads.model import DERIVED, canonical_name, head_model
from cpuspec.config import HeadConfig
from cpuspec.formats import QuantTensor
from cpuspec.formats.tensor import F32

_NAMES = {"fc.weight": "encode", "hidden_norm.weight": "hidden_norm"}
_MOST_ROWS = 256  # of a block
_KINDS = ("dflash", "dspark")
_CLASSES = re.compile(r"[A-Za-z0-9]*(DFlash|DSpark)(Model|DraftModel|Speculator)")
# What changes the computation and is not computed here, with the value at which it changes nothing.
_UNSUPPORTED = {
    "use_swa": False,
    "attention_value_scale": 1,
    "sliding_window_non_causal": False,
    "rope_is_neox_style": True,
    "is_neox_style": True,
}
_MASK_EMBEDDING = "mask_embedding.pt"


def is_block_head(files: HeadFiles) -> bool:
    """Whether a directory has a layout of DFlash or DSpark."""
    if files.is_gguf:
        return False
    kind, classes = files.fields.value("speculators_model_type"), files.fields.value("architectures")
    named = isinstance(classes, list) and any(isinstance(one, str) and _CLASSES.fullmatch(one) for one in classes)
    return kind in _KINDS or (kind is None and named)


def read_block_head(files: HeadFiles, target: Checkpoint) -> Head:
    """A head of DFlash or DSpark. Raises CheckpointError for one that does not fit, or has parts that are not computed here."""
    fields = files.fields
    nested = fields.object("dflash_config")
    if any("conv" in name or "candidate_selector" in name for name in files.names):
        files.refuse("it is a head of DFlash 2, whose convolutions are not supported; use one of DFlash or DSpark")
    for place in (fields, nested):
        for key, neutral in _UNSUPPORTED.items():
            if place.value(key) not in (None, neutral):
                files.refuse(f"its {key} is {str(place.value(key))[:40]}, which is not supported")
    if (files.path / _MASK_EMBEDDING).exists():
        files.refuse(f"its {_MASK_EMBEDDING} is a pickle, which can run code and is never read")
    tensors, others = _sorted(files)
    layers = _layers(files, nested, target)
    size, num_logits, token_ids = files.sizes(tensors, layers, target)
    config = fields.object("transformer_layer_config") if "transformer_layer_config" in fields else fields
    head = HeadConfig("none", feature_size=size, num_logits=num_logits, injects=True)
    model = head_model(files, config, tensors, head, target)
    mask_id = mask_token(fields, nested, model.config.vocab_size)
    block = _block(files, nested, others, model, num_logits)
    return Head(
        "block",
        files.name,
        _scaled(model, fields, nested),
        layers,
        state_norm=final_norm(model),
        token_ids=token_ids,
        num_tokens=block.size - block.num_skipped,
        mask_id=mask_id,
        block=block,
        tokenizer=files.tokenizer,
    )


def _sorted(files: HeadFiles) -> tuple[dict[str, QuantTensor], dict[str, QuantTensor]]:
    """The tensors of the model by canonical name, and those of the Markov and confidence heads by llama.cpp's."""
    tensors: dict[str, QuantTensor] = {}
    others: dict[str, QuantTensor] = {}
    for file_name, tensor in files.tensors.items():
        name = file_name.removeprefix("model.")
        if name.startswith(("markov_head.", "confidence_head.")):
            others[name.removeprefix("markov_head.").replace("confidence_head.", "conf_")] = tensor
        elif not DERIVED.fullmatch(name):
            tensors[canonical_name(name, _NAMES)] = tensor
    return tensors, others


def _scaled(model: Checkpoint, fields: Fields, nested: Fields) -> Checkpoint:
    """The model with the factors of embeddings and logits, and the cap, of its configuration."""

    def factor(key: str, neutral: float = 1.0) -> float:
        return factor_of(nested if key in nested else fields, key, neutral)

    embedding, softcap = factor("input_embedding_scale"), factor("final_logit_softcapping", 0.0)
    model = replace(model, config=replace(model.config, embedding_scale=embedding, logit_softcap=softcap))
    # The multiplier is DFlash 2's name, the scale the one of others.
    return with_logit_scale(model, factor("output_multiplier") * factor("logit_scale"))


def _layers(files: HeadFiles, nested: Fields, target: Checkpoint) -> tuple[int, ...]:
    """The target's layers whose outputs are read. speculators counts inputs, the others outputs."""
    if "aux_hidden_state_layer_ids" in files.fields:
        return files.layers(files.fields.items("aux_hidden_state_layer_ids"), target)
    ids = files.fields.items("target_layer_ids") or nested.items("target_layer_ids")
    return files.layers(inputs_of(ids), target)


def _block(files: HeadFiles, nested: Fields, others: dict[str, QuantTensor], model: Checkpoint, num_logits: int) -> Block:
    fields = files.fields
    causal = any(place.boolean(key, False) for place in (fields, nested) for key in ("causal", "is_causal"))
    is_dspark = (
        fields.value("speculators_model_type") == "dspark"
        or "markov_rank" in fields
        or "DSpark" in str(fields.value("architectures"))
    )
    size = block_size(fields if "block_size" in fields else nested)
    markov, confidence, bias = side_heads(files, others, model, num_logits)
    return Block(size, 0 if fields.boolean("sample_from_anchor", is_dspark) else 1, not causal, markov, confidence, bias)


def block_size(fields: Fields) -> int:
    """The rows of a block. Raises CheckpointError."""
    size = fields.integer("block_size")
    if not 2 <= size <= _MOST_ROWS:
        fields.fail("block_size", f"a number from 2 to {_MOST_ROWS}")
    return size


def side_heads(
    files: HeadFiles, others: dict[str, QuantTensor], model: Checkpoint, num_logits: int
) -> tuple[Markov | None, F32 | None, float]:
    """The Markov head, and the weights and the bias of the confidence head, None for none. others: by llama.cpp's names."""
    vocab_size, hidden, left = model.config.vocab_size, model.config.hidden_size, dict(others)

    def numbers(name: str, *shape: int) -> F32:
        return files.numbers(name, left.pop(name), *shape)

    markov, rank = None, 0
    if {"markov_w1.weight", "markov_w2.weight"} <= left.keys():
        w1, w2 = left.pop("markov_w1.weight"), left.pop("markov_w2.weight")
        rank = w1.shape[-1]
        for name, tensor, wanted in (("markov_w1", w1, (vocab_size, rank)), ("markov_w2", w2, (num_logits, rank))):
            if tensor.shape != wanted:
                files.refuse(f"tensor {name} has the shape {list(tensor.shape)}, wanted {list(wanted)}")
        markov = Markov(w1, w2)
        if {"gate_proj.weight", "gate_proj.bias"} <= left.keys():
            markov = Markov(w1, w2, numbers("gate_proj.weight", rank, hidden + rank), numbers("gate_proj.bias", rank))
        elif {"joint_proj.weight", "joint_proj.bias"} <= left.keys():
            joint = numbers("joint_proj.weight", 3 * rank, 2 * rank + hidden), numbers("joint_proj.bias", 3 * rank)
            markov = Markov(w1, w2, None, None, *joint)
    confidence, bias = None, 0.0
    if (found := left.get("conf_proj.weight")) is not None:
        confidence = numbers("conf_proj.weight", 1, hidden + rank if found.shape[-1] == hidden + rank else hidden)[0]
        if "conf_proj.bias" in left:
            bias = float(numbers("conf_proj.bias", 1)[0])
    if left:
        files.refuse(f"tensor {min(left)} belongs to a part that is not supported")
    return markov, confidence, bias

"""Medusa heads (arXiv 2401.10774), as the original code (`medusa_lm_head`) and as vLLM (`medusa.py`) name their tensors.

Head i, from 0, reads the target's hidden state of a token, after its final norm, and drafts the token i + 2 after that one.
"""

import re

import numpy as np

from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.checkpoints.heads.head import I64, Head, HeadFiles, final_norm, shared
from cpuspec.checkpoints.heads.stages import ResidualStage, output_name, stages_model
from cpuspec.formats import QuantTensor

_MOST_HEADS = 32
_COUNTS, _LAYERS = ("medusa_num_heads", "num_heads"), ("medusa_num_layers", "num_hidden_layers")  # in config.json
_BLOCK = re.compile(r"(?:(\d{1,3})\.(\d{1,3})\.linear|blocks\.(\d{1,3})\.layers\.(\d{1,3}))\.(weight|bias)")
_OUTPUT = re.compile(r"(?:(\d{1,3})\.\d{1,3}|lm_heads\.(\d{1,3}))\.weight")


def is_medusa(files: HeadFiles) -> bool:
    """Whether a directory has a layout of Medusa."""
    return not files.is_gguf and ("medusa_num_heads" in files.fields or files.fields.value("model_type") == "medusa")


def read_medusa(files: HeadFiles, target: Checkpoint) -> Head:
    """A Medusa head; one without output matrices has the target's. Raises CheckpointError where it does not fit."""
    fields, hidden = files.fields, target.config.hidden_size
    if fields.number("logit_scale", 1.0) != 1:
        fields.fail("logit_scale", "1: others are not supported")
    is_shared, tensors = fields.boolean("original_lm_head", False), dict[str, QuantTensor]()
    for file_name, tensor in files.tensors.items():
        name = _canonical_name(file_name)
        if name in tensors:
            files.refuse(f"tensor {file_name} is there twice, under another name")
        if not (is_shared and name.startswith("outputs.")):
            tensors[name] = tensor
    found = {int(name.split(".")[1]) for name in tensors if re.fullmatch(r"blocks\..*", name)}
    num_heads = next((fields.integer(key) for key in _COUNTS if key in fields), len(found))
    if not 1 <= num_heads <= _MOST_HEADS or found - set(range(num_heads)):
        files.refuse(f"its config.json says {num_heads} heads, wanted 1 to {_MOST_HEADS}; its tensors are of {sorted(found)[:9]}")
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2:
            files.check(f"hidden size, as {name} has it,", tensor.shape[1], hidden, target)
    num_blocks = 1 + max(
        (int(name.split(".")[2].removesuffix("_bias")) for name in tensors if name.startswith("blocks.")), default=-1
    )
    declared = next((fields.integer(key) for key in _LAYERS if key in fields), num_blocks)
    if declared != num_blocks:
        files.refuse(f"its config.json says {declared} blocks a head, and its tensors are of {num_blocks}")
    is_shared = is_shared or "output" not in tensors
    if is_shared:
        tensors = {"output": shared(target, {})["output"], **tensors}
    outputs = ["output"] if is_shared else [output_name(head) for head in range(num_heads)]
    ids = _token_map(files, target)
    num_logits = target.config.vocab_size if ids is None else len(ids)
    for name in outputs:
        rows = tensors.get(name)
        if ids is not None and rows and rows.shape[0] == target.config.vocab_size:
            tensors[name] = QuantTensor(rows.format, (num_logits, hidden), np.ascontiguousarray(rows.data[ids]), rows.order)
    files.check("number of drafted tokens", tensors["output"].shape[0], num_logits, target)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(outputs, (num_logits, hidden))
    blocks = [tuple(f"blocks.{head}.{block}" for block in range(num_blocks)) for head in range(num_heads)]
    for name in (name for some in blocks for name in some):
        shapes[name] = hidden, hidden
        if f"{name}_bias" in tensors:
            shapes[f"{name}_bias"] = (hidden,)
    tensors["embed"] = target.tensors["embed"]
    model = stages_model(files.path, target, hidden, num_logits, tensors, shapes)
    stages = tuple(ResidualStage(some, outputs[0 if is_shared else head]) for head, some in enumerate(blocks))
    return Head(
        "medusa",
        files.name,
        model,
        (target.config.num_layers - 1,),
        (final_norm(target),),
        token_ids=ids,
        num_tokens=num_heads,
        stages=stages,
        tokenizer=files.tokenizer,
    )


def _canonical_name(file_name: str) -> str:
    """One that nothing knows keeps its name, so that the model refuses it."""
    name = re.sub(r"^medusa_heads?\.", "", file_name)
    if block := _BLOCK.fullmatch(name):
        head, number = block[1] or block[3], block[2] or block[4]
        return f"blocks.{int(head)}.{int(number)}{'_bias' if block[5] == 'bias' else ''}"
    if output := _OUTPUT.fullmatch(name):
        return output_name(int(output[1] or output[2]))
    return "output" if name == "lm_head.weight" else file_name


def _token_map(files: HeadFiles, target: Checkpoint) -> I64 | None:
    """The target's id of each token that a truncated head drafts, as vLLM has it; None for all of them."""
    vocab_size = target.config.vocab_size
    if files.fields.integer("truncated_vocab_size", vocab_size) >= vocab_size or "token_map" not in files.arrays:
        return None
    return files.checked_ids("token_map", files.arrays["token_map"].astype(np.int64), target)

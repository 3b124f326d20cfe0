"""A trained head as a GGUF file in the layouts of llama.cpp's converter, which its server drafts with.

The keys and tensors of `eagle3` and `dflash` are those that `checkpoints/heads/gguf.py` reads. A layer for multi-token prediction
is a file of the target's architecture without the blocks before that layer. The tokenizer is the target's.
"""

from pathlib import Path

import numpy as np

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.canonical import GGUF, file_names, in_file_order
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.gguf_file import Value
from cpuspec.checkpoints.gguf_writer import IdsInfo, TensorInfo, entry, write_gguf
from cpuspec.checkpoints.heads import Head
from cpuspec.checkpoints.heads.gguf import FEATURE_NORM, LAYER_NAMES, NAMES_OF_BLOCK, NAMES_OF_EAGLE3
from cpuspec.errors import ConfigError
from cpuspec.files import replacing
from cpuspec.formats import Format, QuantTensor, get_format
from cpuspec.formats.tensor import U8
from cpuspec.quantize import prediction
from cpuspec.quantize.gguf_output import rope_factors, shape_entries, tokenizer_entries
from cpuspec.quantize.weights import layer_parts

_LAYER = {ours: theirs for theirs, ours in LAYER_NAMES.items()}
_OUTSIDE = {
    "eagle3": {ours: theirs for theirs, ours in NAMES_OF_EAGLE3.items()},
    "dflash": {ours: theirs for theirs, ours in NAMES_OF_BLOCK.items()},
}
_NUM_FEATURES = 3  # layers of the target that llama.cpp's EAGLE-3 reads


def write_head(path: Path, head: Head, target: Checkpoint, format: Format | None = None, has_tokenizer: bool = True) -> None:
    """Write a head as one file, which takes the place of `path` when it is whole.

    format: of matrices, None for those that they have; vectors are f32. has_tokenizer: llama.cpp needs the target's tokenizer in
    the file, cpuspec does not.
    What the head shares with its target is left out, as llama.cpp takes it from there, too.
    Raises ConfigError for a head that llama.cpp has no layout or no computation for, or a tokenizer that has no place in such a
    file; FormatError for rows that do not fill the format's blocks; OSError where it cannot be written.
    """
    if head.method == "mtp":
        _write_mtp(path, head, target, format, has_tokenizer)
        return
    if head.method not in ("eagle3", "block"):
        raise ConfigError(
            f"{head.name} is a head of the kind {head.method}; GGUF files hold EAGLE-3, DFlash, DSpark and layers for multi-token "
            "prediction only"
        )
    architecture = "eagle3" if head.method == "eagle3" else "dflash"
    own, facts = _eagle3(head, target) if architecture == "eagle3" else _block(head)
    config = head.model.config
    entries = {key: entry(key, value) for key, value in shape_entries(head.model.config, head.model.name, architecture).items()}
    if has_tokenizer:
        entries |= tokenizer_entries(target)
    facts[f"{architecture}.target_layers"] = np.array(head.layers, np.int32) + 1  # it names layers by their inputs
    if config.embedding_scale != 1:
        facts[f"{architecture}.embedding_scale"] = config.embedding_scale
    if config.query_scale is not None:
        facts[f"{architecture}.attention.scale"] = config.query_scale
    entries |= {key: entry(key, value) for key, value in facts.items()}
    shared = {id(tensor) for tensor in target.tensors.values()}
    for name, tensor in head.model.tensors.items():
        if id(tensor) not in shared:
            paired = in_file_order(config, FAMILIES["llama"], GGUF, name, tensor) if architecture == "eagle3" else tensor
            own[_file_name(name, architecture)] = paired
    own |= rope_factors(config)
    numbers = get_format("f32")
    formats = {
        name: format or tensor.format if min(tensor.shape) > 1 and len(tensor.shape) == 2 else numbers
        for name, tensor in own.items()
    }
    infos: dict[str, TensorInfo | IdsInfo] = {name: TensorInfo(formats[name], own[name].shape) for name in own}
    ids = head.token_ids
    if ids is not None:
        infos["d2t"] = IdsInfo(len(ids))

    def data_of(name: str) -> U8:
        if name == "d2t" and ids is not None:
            return ids.astype("<i8").view(np.uint8)
        tensor = own[name]
        as_it_is = tensor.format == formats[name] and tensor.order is None
        return tensor.data if as_it_is else formats[name].encode(tensor.dequantize())

    with replacing(path) as file:
        write_gguf(file, entries, infos, data_of)


def _write_mtp(path: Path, head: Head, target: Checkpoint, format: Format | None, has_tokenizer: bool) -> None:
    """The same of a layer for multi-token prediction. With the tokenizer come the target's embedding, last norm and output matrix,
    which llama.cpp takes from this file.
    """
    if not head.feature_norms:
        raise ConfigError(f"{head.name} reads hidden states before the target's last norm, and llama.cpp takes those after it")
    family = FAMILIES[target.config.architecture]
    architecture = family.gguf_name
    made = shape_entries(target.config, target.name, architecture)
    entries = {key: entry(key, value) for key, value in (made | prediction.entries_with(made, architecture)).items()}
    layer = prediction.tensors_of(target, head, {})
    layer = {name: (one if format is None or one.name == "f32" else format, tensor) for name, (one, tensor) in layer.items()}
    repeated: dict[str, QuantTensor] = {}
    if has_tokenizer:
        entries |= tokenizer_entries(target)
        names = [name for name in ("embed", "norm", "output") if name in target.tensors]
        repeated = {theirs: target.tensors[ours[0]] for theirs, ours in file_names(family, GGUF, names).items()}
        repeated |= rope_factors(target.config)
    for name, tensor in repeated.items():
        plain = get_format("f32" if len(tensor.shape) == 1 else "f16")
        layer[name] = (plain if tensor.format.gguf_type is None or len(tensor.shape) == 1 else tensor.format, tensor)
    infos: dict[str, TensorInfo | IdsInfo] = {name: TensorInfo(one, tensor.shape) for name, (one, tensor) in layer.items()}
    with replacing(path) as file:
        write_gguf(file, entries, infos, lambda name: prediction.encoded(*layer[name]))


def _file_name(name: str, architecture: str) -> str:
    if name in _OUTSIDE[architecture]:
        return _OUTSIDE[architecture][name]
    layer, part = layer_parts(name)
    return f"blk.{layer}.{_LAYER[part]}"


def _eagle3(head: Head, target: Checkpoint) -> tuple[dict[str, QuantTensor], dict[str, Value]]:
    """The tensors that are not of the head's model, and its metadata. Raises ConfigError."""
    config, norms = head.model.config, head.feature_norms
    size = config.head.feature_size if config.head else 0
    reasons = {
        f"it has {config.num_layers} layers, and llama.cpp computes one": config.num_layers != 1,
        f"it reads {len(head.layers)} layers, and llama.cpp reads {_NUM_FEATURES}": len(head.layers) != _NUM_FEATURES,
        "its queries and keys have norms or biases": config.qk_norm or config.qkv_bias or config.o_bias,
        "each layer that it reads has a norm of its own": bool(norms) and (len(norms) > 1 or len(norms[0].weight) != size),
        "its own state has a norm before the next row": head.state_norm is not None,
    }
    _refuse(head, reasons)
    own = {FEATURE_NORM: QuantTensor.encode(get_format("f32"), norms[0].weight)} if norms else {}
    facts: dict[str, Value] = {
        "eagle3.target_hidden_size": target.config.hidden_size,
        "eagle3.norm_before_residual": bool(config.head and config.head.normed_residual),
        "eagle3.norm_before_fc": bool(norms),
    }
    return own, facts


def _block(head: Head) -> tuple[dict[str, QuantTensor], dict[str, Value]]:
    """The same of a DFlash or DSpark head."""
    block, numbers = head.block, get_format("f32")
    if block is None or head.state_norm is None:
        raise ConfigError(f"{head.name} is not a head that drafts blocks")
    markov, confidence = block.markov, block.confidence
    reasons = {
        "its Markov head has a gate or a memory": markov is not None and (markov.gate is not None or markov.joint is not None),
        "the first row of its block drafts, and it has no Markov head": markov is None and block.num_skipped == 0,
        "its logits have a factor": not np.array_equal(head.model.tensors["norm"].dequantize(), head.state_norm.weight),
    }
    _refuse(head, reasons)
    own: dict[str, QuantTensor] = {}
    if markov is not None:
        own |= {"markov_w1.weight": markov.w1, "markov_w2.weight": markov.w2}
    if confidence is not None:
        own["conf_proj.weight"] = QuantTensor.encode(numbers, confidence[None])
        own["conf_proj.bias"] = QuantTensor.encode(numbers, [block.confidence_bias])
    facts: dict[str, Value] = {
        "dflash.block_size": block.size,
        "dflash.sample_from_anchor": block.num_skipped == 0,
        "dflash.has_confidence_head": confidence is not None,
        "dflash.attention.causal": not block.both_ways,
        "tokenizer.ggml.mask_token_id": head.mask_id,
    }
    return own, facts


def _refuse(head: Head, reasons: dict[str, bool]) -> None:
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"{head.name} cannot be written as GGUF: {reason}; use the head's directory with cpuspec or vLLM")

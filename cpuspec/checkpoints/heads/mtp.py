"""Layers for multi-token prediction (arXiv 2412.19437, section 2.2): in a target's own checkpoint, or in a file beside it.

Such a layer is one decoder layer. Its input is a matrix times two normed vectors: a token's embedding, and the hidden state of the
token before. It drafts a second token from its own output after the last norm, and so on. Files differ in the names, in the order
of the two vectors, and in whether the target's hidden state is taken before or after its final norm.

Sources: vLLM's `mimo_mtp.py` and `mimo.py`, llama.cpp's graphs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import numpy as np

from cpuspec.checkpoints.canonical import GGUF, HF, Names, arranged
from cpuspec.checkpoints.checkpoint import Checkpoint, tensor_shapes
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.heads.assistant import is_assistant, read_assistant
from cpuspec.checkpoints.heads.head import Head, HeadFiles, HeadNorm, final_norm, shared
from cpuspec.config import HeadConfig, ModelConfig
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import QuantTensor


@dataclass(frozen=True)
class _Layout:
    """The names of such a layer's tensors in one kind of file. If there are several layers, only the first is read.

    layer: prefix of the decoder layer's names. names: those of the other tensors. hidden_first: the matrix's first inputs are the
    hidden state, not the embedding. normed: the target's hidden state is taken after its final norm.
    """

    layer: str
    names: Mapping[str, str]
    kind: int = HF
    hidden_first: bool = False
    normed: bool = True


MIMO = {
    "token_layernorm.weight": "embed_norm",
    "hidden_layernorm.weight": "hidden_norm",
    "input_proj.weight": "fuse",
    "final_layernorm.weight": "norm",
}
_DEEPSEEK = {
    "enorm.weight": "embed_norm",
    "hnorm.weight": "hidden_norm",
    "eh_proj.weight": "fuse",
    "embed_tokens.weight": "embed",
    "shared_head.norm.weight": "norm",
    "shared_head.head.weight": "output",
    "final_layernorm.weight": "norm",  # of BailingMoeV2
}
_QWEN = {
    "pre_fc_norm_embedding.weight": "embed_norm",
    "pre_fc_norm_hidden.weight": "hidden_norm",
    "fc.weight": "fuse",
    "norm.weight": "norm",
}
# Of GGUF files, after the block's number.
NEXTN = {
    "nextn.enorm.weight": "embed_norm",
    "nextn.hnorm.weight": "hidden_norm",
    "nextn.eh_proj.weight": "fuse",
    "nextn.embed_tokens.weight": "embed",
    "nextn.shared_head_norm.weight": "norm",
    "nextn.shared_head_head.weight": "output",
    "layer_output_norm.weight": "norm",  # of BailingMoeV2
}
_COMPARED_ROWS = 64


def _under(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {prefix + name: ours for name, ours in names.items()}


def _layouts(num_layers: int) -> tuple[_Layout, ...]:
    """The known layouts. num_layers: those of the target; some files number the layers for prediction after them."""
    mimo, deepseek, gguf = "model.mtp_layers.0.", f"model.layers.{num_layers}.", f"blk.{num_layers}."
    return (
        _Layout(mimo, _under(mimo, MIMO), hidden_first=True, normed=False),
        _Layout("mtp_layers.0.", _under("mtp_layers.0.", MIMO)),
        _Layout("mtp.layers.0.", _under("mtp.", _QWEN)),
        _Layout("model.mtp.layers.0.", _under("model.mtp.", _QWEN)),
        _Layout(deepseek, _under(deepseek, _DEEPSEEK)),
        _Layout(gguf, _under(gguf, NEXTN), GGUF),
    )


def is_mtp(files: HeadFiles) -> bool:
    """Whether a directory is such a layer without its target, as the library speculators writes it."""
    return not files.is_gguf and files.fields.value("speculators_model_type") == "mtp"


def read_mtp(files: HeadFiles, target: Checkpoint) -> Head:
    """Read a file that `is_mtp` knows."""
    return replace(_head(files.tensors, target, files.name), tokenizer=files.tokenizer)


def is_gguf_mtp(files: HeadFiles) -> bool:
    """Whether a GGUF file holds only a model's blocks for prediction, without the blocks before them."""
    return files.is_gguf and _counts(files)[1] > 0 and not any(name.startswith("blk.0.") for name in files.names)


def read_gguf_mtp(files: HeadFiles, target: Checkpoint) -> Head:
    """Read a file that `is_gguf_mtp` knows.

    The file repeats the target's embedding, last norm and output matrix. Of these only the output matrix is used, and only if it
    has fewer bits than the target's.
    """
    family = FAMILIES[target.config.architecture]
    num_layers, number = _counts(files)
    wanted = family.gguf_name
    files.check("architecture", str(files.fields.value("general.architecture"))[:40], wanted, target)
    files.check("number of layers before its own", num_layers - number, target.config.num_layers, target)
    tensors = {name: tensor for name, tensor in files.tensors.items() if name.startswith("blk.")}
    head = _head(tensors, target, files.name)
    output, theirs = files.tensors.get("output.weight"), head.model.tensors["output"]
    is_own = any(name.endswith("nextn.shared_head_head.weight") for name in tensors)
    if is_own or output is None or output.shape != theirs.shape or output.format.bits >= theirs.format.bits:
        return head
    return replace(head, model=replace(head.model, tensors={**head.model.tensors, "output": output}))


def _counts(files: HeadFiles) -> tuple[int, int]:
    """A GGUF file's number of blocks, and how many of them are for prediction; 0 for a number that it does not have."""
    architecture = files.fields.value("general.architecture")
    found = [files.fields.value(f"{architecture}.{key}") for key in ("block_count", "nextn_predict_layers")]
    return tuple(one if type(one) is int else 0 for one in found)  # type: ignore[return-value]


def own_mtp(target: Checkpoint, mmap: bool = True) -> Head:
    """The layer in the target's own checkpoint, or else in a file beside it that is named `mtp-*.gguf`, as llama.cpp does; or an
    assistant of Gemma 4 in such a file.

    Raises CheckpointError if there is none, or one that is not supported.
    """
    if target.prediction_layers:
        return _head(target.prediction_layers, target, "mtp")
    for path in _beside(target.path):
        try:
            files = HeadFiles.read(path, mmap)
            if files and is_assistant(files):
                return replace(read_assistant(files, target), name="mtp")
            if files and is_gguf_mtp(files):
                return replace(read_gguf_mtp(files, target), name="mtp")
        except CheckpointError:  # a damaged file, or one of another model, is passed over
            continue
    raise CheckpointError(f"{target.path} cannot draft for itself: it has no layers for multi-token prediction; name a drafter")


def _beside(target: Path) -> list[Path]:
    """Files `mtp-*.gguf` beside a GGUF model. Those whose names begin most like the model's come first."""
    if target.suffix != ".gguf":
        return []

    def alike(path: Path) -> int:
        pairs = zip(path.name.removeprefix("mtp-").lower(), target.name.lower(), strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    return sorted(target.parent.glob("mtp-*.gguf"), key=lambda path: (-alike(path), path.name))


def _head(files: Mapping[str, QuantTensor], target: Checkpoint, name: str) -> Head:
    layouts = [
        one for one in _layouts(target.config.num_layers) if any(files.get(key) for key, to in one.names.items() if to == "fuse")
    ]
    if not layouts:
        raise CheckpointError(
            f"{target.path}: the layout of its layers for multi-token prediction is not known; they begin with {min(files)!r}"
        )
    layout, family = layouts[0], FAMILIES[target.config.architecture]
    names, first = Names(family, layout.kind), ("blk.0.", f"{family.hf_root}.layers.0.")[layout.kind]
    named: dict[str, QuantTensor] = {}
    for file_name, tensor in files.items():
        later = re.match(r"((?:model\.)?mtp(?:_layers|\.layers)|model\.layers|blk)\.(\d{1,9})\.", file_name)
        if file_name in layout.names:
            named[layout.names[file_name]] = tensor
        elif file_name.startswith(layout.layer):
            named[names.ours(first + file_name.removeprefix(layout.layer)) or file_name] = tensor
        elif not (later and int(later[2]) > 0):  # later layers, which predict tokens further ahead, are not used
            named[file_name] = tensor
    try:
        config = prediction_config(target.config, "layers.0.router" in named)
    except ConfigError as error:
        raise CheckpointError(f"{target.path}: its layer for multi-token prediction: {error}") from error
    tensors = arranged(str(target.path), config, family, layout.kind, named, tensor_shapes(config))
    if "norm" not in tensors:
        tensors["norm"] = target.tensors["norm"]
    if layout.hidden_first:
        fuse = tensors["fuse"]
        half = fuse.format.row_bytes(fuse.shape[1] // 2)  # of its inputs: a whole number of blocks
        swapped = np.concatenate([fuse.data[:, half:], fuse.data[:, :half]], axis=1)
        tensors["fuse"] = QuantTensor(fuse.format, fuse.shape, swapped)
    tensors = shared(target, {name: tensor for name, tensor in tensors.items() if not _is_copy(tensor, name, target)})
    model = Checkpoint(target.path, f"{target.name}-mtp", config, tensors, target.vocabulary)
    norms = (final_norm(target),) if layout.normed else ()
    state_norm = HeadNorm(tensors["norm"].dequantize(), config.norm_eps)
    return Head("mtp", name, model, (target.config.num_layers - 1,), norms, state_norm, num_tokens=3)


def last_attending(target: ModelConfig) -> int:
    """The target's last layer with attention, whose shape a layer for multi-token prediction has."""
    recurs = target.layer_recurrent or (False,) * target.num_layers
    return max(i for i, recurrent in enumerate(recurs) if not recurrent)


def prediction_config(target: ModelConfig, has_experts: bool) -> ModelConfig:
    """The config of a target's layer for multi-token prediction. Raises ConfigError for a target whose layers no head has."""
    config = replace(target.with_layers([last_attending(target)]), head=HeadConfig(), tied_embeddings=False)
    if has_experts:
        return replace(config, layer_experts=())
    return replace(config, experts=None, layer_experts=(), shared_size=0, weighs_shared=False)


def _is_copy(tensor: QuantTensor, name: str, target: Checkpoint) -> bool:
    """Whether a layer's embedding or output matrix repeats the target's, judged by some rows: only drafts depend on it."""
    if name not in ("embed", "output"):
        return False
    theirs = target.tensors["embed" if target.config.tied_embeddings else name]
    if (tensor.format, tensor.shape) != (theirs.format, theirs.shape):
        return False
    rows = np.linspace(0, tensor.shape[0] - 1, min(_COMPARED_ROWS, tensor.shape[0])).astype(np.int64)
    return np.array_equal(tensor.rows(rows), theirs.rows(rows))

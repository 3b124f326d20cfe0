"""What every reader of a head gives back, and what it reads: the files of a head, whose layout only its reader knows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.checkpoints.fields import Fields, read_json_object
from cpuspec.checkpoints.gguf_parts import read_parts
from cpuspec.checkpoints.heads.stages import Stage
from cpuspec.checkpoints.huggingface import read_stored
from cpuspec.checkpoints.safetensors import StoredTensor, read_safetensors
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor
from cpuspec.formats.tensor import F32

I64 = NDArray[np.int64]

_MAX_CONFIG_BYTES = 1 << 20
_MEDUSA = "medusa_lm_head"
_MOST_TOKENS = 32  # that a draft has by default, whatever a file says


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """An RMS norm (arXiv 1910.07467) of `len(weight)` numbers of a row, from number `start` on."""

    weight: F32
    eps: float
    start: int = 0

    def applied(self, rows: F32) -> F32:
        """Rows [T, n] with these numbers normed."""
        end = self.start + len(self.weight)
        part = rows[:, self.start : end]
        normed = part / np.sqrt(np.mean(part * part, axis=1, keepdims=True) + np.float32(self.eps)) * self.weight
        return (
            normed if len(self.weight) == rows.shape[1] else np.concatenate([rows[:, : self.start], normed, rows[:, end:]], axis=1)
        )


@dataclass(frozen=True, eq=False)
class Markov:
    """A bias of each token's logits by the token before it, of low rank: w2 w1[before] (DSpark, arXiv 2607.05147).

    w1 [V, r]: of the target's tokens. w2 [num_logits, r]: of those that the head drafts.
    gate [r, C + r], gate_bias [r]: of a factor of w1[before], sigmoid(gate [state; w1[before]] + gate_bias); None for no factor.
    """

    w1: QuantTensor
    w2: QuantTensor
    gate: F32 | None = None
    gate_bias: F32 | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """How a head drafts a block of rows in one forward, each row a token: the last committed one, and then the mask.

    size: rows that it was trained for. num_skipped: of these, first ones that draft nothing. both_ways: whether each row sees all.
    confidence [C], or [C + r] where the Markov head's w1[before] belongs to it, and confidence_bias: of the logit of the chance
    that a row's token is accepted, from its normed state; None for none.
    """

    size: int
    num_skipped: int = 0
    both_ways: bool = True
    markov: Markov | None = None
    confidence: F32 | None = None
    confidence_bias: float = 0.0


@dataclass(frozen=True, eq=False)
class Head:
    """A trained head that fits its target: a model that reads the target's hidden states, and how it is to be run.

    method: how it drafts, a row of `speculation.drafters.heads.DRAFTERS`. name: for reports.
    model: its tensors; those that it shares with the target are the target's own objects.
    layers: the target's layers, from 0, whose outputs it reads side by side, in this order.
    feature_norms: of these numbers, one after the other, before anything is computed of them.
    state_norm: of the head's own hidden state, before the next row is made of it; None for none.
    token_ids: [num_logits] the target's id of each token that the head drafts; None where the ids are the same.
    num_tokens: that it drafts in a round where the spec names no number.
    mask_id, mask_features: token and features [1, feature_size] of rows whose own are not known yet, in a head that drafts in one
    pass; -1 and None in others. block: how it drafts a block, None for others. stages: of a head without layers, one a token.
    tokenizer: the tokenizer's file that lies beside the head; None for none.
    """

    method: str
    name: str
    model: Checkpoint
    layers: tuple[int, ...]
    feature_norms: tuple[HeadNorm, ...] = ()
    state_norm: HeadNorm | None = None
    token_ids: I64 | None = None
    num_tokens: int = 4
    mask_id: int = -1
    mask_features: F32 | None = None
    block: Block | None = None
    stages: tuple[Stage, ...] = ()
    tokenizer: Path | None = None


@dataclass(frozen=True, eq=False)
class HeadFiles:
    """The files of a head, read and not yet understood.

    fields: config.json, or a GGUF file's metadata. tensors: matrices and vectors of numbers; arrays: everything else, such as ids.
    """

    path: Path
    fields: Fields
    tensors: Mapping[str, QuantTensor]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    is_gguf: bool = False

    @staticmethod
    def read(path: Path, mmap: bool = True) -> "HeadFiles":
        """A directory of config.json and safetensors, or a GGUF file. Raises CheckpointError for what is damaged or missing."""
        if path.is_dir():
            config = path / "config.json"
            stored = _read_stored(path, mmap)
            arrays = {name: tensor.numbers_or_integers() for name, tensor in stored.items() if tensor.is_array}
            tensors = {name: tensor.floats() for name, tensor in stored.items() if name not in arrays}
            return HeadFiles(path, Fields(str(config), read_json_object(config, _MAX_CONFIG_BYTES)), tensors, arrays)
        file = read_parts(path, mmap)
        return HeadFiles(path, Fields(str(path), file.metadata), file.tensors, file.arrays, True)

    @property
    def name(self) -> str:
        """For reports."""
        return self.path.stem if self.is_gguf else self.path.name

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer that lies beside the head."""
        found = self.path / "tokenizer.json"
        return found if not self.is_gguf and found.exists() else None

    @property
    def num_tokens(self) -> int:
        """How many tokens the head was made to draft, as speculators says; else Head's default."""
        methods = self.fields.object("speculators_config").items("proposal_methods") if not self.is_gguf else []
        number = methods[0].get("speculative_tokens") if methods and isinstance(methods[0], dict) else None
        return number if type(number) is int and 1 <= number <= _MOST_TOKENS else Head.num_tokens

    def check(self, what: str, got: object, wanted: object, target: Checkpoint) -> None:
        """Raise CheckpointError unless a fact of the head agrees with its target's."""
        if got != wanted:
            self.refuse(f"its {what} is {got}, and that of {target.name} is {wanted}; use a head that was trained for this model")

    def refuse(self, problem: str) -> NoReturn:
        """Raise CheckpointError."""
        raise CheckpointError(f"{self.path} cannot draft: {problem}")

    def norm(self, name: str, length: int, eps: float, start: int = 0) -> HeadNorm:
        """A norm whose weights are a tensor of the files."""
        tensor = self.tensors[name]
        if tensor.shape != (length,) or tensor.format.block_size != 1:
            self.refuse(f"tensor {name} is {tensor.format.name} {list(tensor.shape)}, wanted a vector of {length} numbers")
        return HeadNorm(tensor.dequantize(), eps, start)

    def layers(self, inputs: list[object], target: Checkpoint) -> tuple[int, ...]:
        """Layers whose outputs are the inputs of layers `inputs`, as vLLM, speculators and GGUF count them."""
        count = target.config.num_layers
        found = tuple(one - 1 for one in inputs if type(one) is int and 1 <= one <= count)
        if not found or len(found) != len(inputs):
            self.refuse(
                f"it reads the inputs of layers {str(inputs)[:80]}, and {target.name} has layers 1 to {count} that can be read"
            )
        return found

    def token_ids(self, ids: I64 | None, num_drafted: int, target: Checkpoint) -> I64 | None:
        """The target's id of each drafted token, checked; None where the head drafts the whole vocabulary."""
        vocab_size = target.config.vocab_size
        if ids is None:
            self.check("number of drafted tokens, without a list of their ids,", num_drafted, vocab_size, target)
            return None
        if ids.shape != (num_drafted,):
            self.refuse(f"d2t has the shape {list(ids.shape)}, and its output matrix {num_drafted} rows")
        return self.checked_ids("d2t", ids, target)

    def checked_ids(self, name: str, ids: I64, target: Checkpoint) -> I64:
        """A list of some of the target's tokens, as tensor `name` has it."""
        vocab_size = target.config.vocab_size
        if ids.ndim != 1 or not len(ids):
            self.refuse(f"{name} has the shape {list(ids.shape)}, wanted a list of ids")
        if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) < len(ids):
            self.refuse(
                f"{name} gives ids from {ids.min()} to {ids.max()}, {len(np.unique(ids))} of {len(ids)} different, "
                f"wanted different ones below the target's {vocab_size}"
            )
        return ids


def _read_stored(path: Path, mmap: bool) -> Mapping[str, StoredTensor]:
    """The tensors of a directory. Medusa's are in a file of their own name, mostly a pickle."""
    alone = path / f"{_MEDUSA}.safetensors"
    if alone.exists():
        return read_safetensors(alone, mmap)
    if (path / f"{_MEDUSA}.pt").exists():
        raise CheckpointError(
            f"{path} has its weights only as {_MEDUSA}.pt, a pickle, which can run code and is never read; convert it there, with "
            f"torch installed: python -c \"import torch, safetensors.torch as s; w = torch.load('{_MEDUSA}.pt', 'cpu', "
            f"weights_only=True); s.save_file({{k: v.clone() for k, v in w.items()}}, '{_MEDUSA}.safetensors')\""
        )
    return read_stored(path, mmap)


def absolute_ids(offsets: NDArray[Any]) -> I64:
    """Ids of tokens of the target, of how far they are from the draft's (`d2t` in safetensors)."""
    return offsets.astype(np.int64).reshape(-1) + np.arange(offsets.size)


def target_norm(target: Checkpoint) -> HeadNorm:
    """The target's norm before its logits: some heads were trained on hidden states behind it."""
    return HeadNorm(target.tensors["norm"].dequantize(), target.config.norm_eps)


def shared(target: Checkpoint, own: Mapping[str, QuantTensor]) -> dict[str, QuantTensor]:
    """A head's own tensors, and the target's embedding and output matrix where it has none."""
    output = target.tensors["embed" if target.config.tied_embeddings else "output"]
    return {"embed": target.tensors["embed"], "output": output, **own}

"""Draft heads: the result of every reader, and the files that it reads, whose layout only the reader knows."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints import openvino
from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.gguf import scaled
from cpuspec.checkpoints.gguf_file import GgufFile
from cpuspec.checkpoints.gguf_parts import read_parts
from cpuspec.checkpoints.heads.stages import Stage
from cpuspec.checkpoints.huggingface import read_stored
from cpuspec.checkpoints.local_models import read_manifest
from cpuspec.checkpoints.quantized import Method, read_method, read_quantized
from cpuspec.checkpoints.safetensors import StoredTensor, read_safetensors
from cpuspec.config import HeadConfig
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.formats.tensor import F32

I64 = NDArray[np.int64]

_MEDUSA = "medusa_lm_head"
_MASKS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_MOST_TOKENS = 32  # of a draft by default; a larger number in a file is ignored


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
    joint [3 r, 2 r + C], joint_bias [3 r]: of a recurrent head, with a memory m [r] that is zero before a block's first row. Thirds
    a, b, c of joint [m; w1[before]; state] + joint_bias make m' = sigmoid(a) m + (1 - sigmoid(a)) tanh(b), and tanh(c), which
    stands for w1[before]; None for no memory.
    """

    w1: QuantTensor
    w2: QuantTensor
    gate: F32 | None = None
    gate_bias: F32 | None = None
    joint: F32 | None = None
    joint_bias: F32 | None = None

    def vector(self, w1: F32, state: F32, memory: F32) -> tuple[F32, F32]:
        """What w2 makes a row's bias of, from w1 of the token before it and its state [C]; and the memory of the next row."""
        if self.gate is not None and self.gate_bias is not None:
            return w1 / (1 + np.exp(-(self.gate @ np.concatenate([state, w1]) + self.gate_bias))), memory
        if self.joint is not None and self.joint_bias is not None:
            a, b, c = np.split(self.joint @ np.concatenate([memory, w1, state]) + self.joint_bias, 3)
            kept = 1 / (1 + np.exp(-a))
            return np.tanh(c), kept * memory + (1 - kept) * np.tanh(b)
        return w1, memory


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

    method: how it drafts, a row of `speculation.drafters.heads.RULES`. name: for reports.
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
    """Files that may be a draft head. Readers recognize their own by fields and names; tensors are read when asked for.

    fields: config.json, or a GGUF file's metadata. files: tensors as safetensors have them, or the parsed GGUF file.
    """

    path: Path
    fields: Fields
    files: Mapping[str, StoredTensor] | GgufFile

    @staticmethod
    def read(path: Path, mmap: bool = True) -> "HeadFiles | None":
        """A directory of config.json and safetensors, or a GGUF file; None for others, which are no heads.

        Raises CheckpointError for what is damaged or missing.
        """
        if path.is_dir():
            config = path / "config.json"
            if not config.exists() or (path / openvino.MODEL).exists():
                return None
            return HeadFiles(path, Fields.of_file(config), _read_stored(path, mmap))
        if path.suffix == ".safetensors" or read_manifest(path):
            return None
        file = read_parts(path, mmap)
        return HeadFiles(path, Fields(str(path), file.metadata), file)

    @property
    def is_gguf(self) -> bool:
        """Whether they are a GGUF file."""
        return isinstance(self.files, GgufFile)

    @cached_property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self.files.tensors.keys() | self.files.arrays.keys() if isinstance(self.files, GgufFile) else self.files.keys()

    @cached_property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Tensors that are not matrices or vectors of floats, such as ids."""
        if isinstance(self.files, GgufFile):
            return self.files.arrays
        parts = tuple(f".{part}" for part in self._method.parts) if self._method else ()
        return {
            name: tensor.numbers_or_integers()
            for name, tensor in self.files.items()
            if tensor.is_array and not name.endswith(parts)
        }

    @cached_property
    def tensors(self) -> Mapping[str, QuantTensor]:
        """Matrices and vectors, quantized ones by the names of plain weights. Raises CheckpointError for kinds not supported."""
        if isinstance(self.files, GgufFile):
            return scaled(self.files)
        stored = {name: tensor for name, tensor in self.files.items() if name not in self.arrays}
        if self._method:
            return read_quantized(self.path, self._method, stored)
        return {name: tensor.floats() for name, tensor in stored.items()}

    @cached_property
    def _method(self) -> Method | None:
        return read_method(self.path, self.fields)

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
        """The number of tokens that the head was trained to draft, if its speculators configuration has it; else Head's default."""
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
        return HeadNorm(self.numbers(name, self.tensors[name], length), eps, start)

    def numbers(self, name: str, tensor: QuantTensor, *shape: int) -> F32:
        """The numbers of a tensor that is not quantized and has a shape; CheckpointError for others."""
        if tensor.shape != shape or tensor.format.block_size != 1:
            self.refuse(f"tensor {name} is {tensor.format.name} {list(tensor.shape)}, wanted numbers {list(shape)}")
        return tensor.dequantize()

    def layers(self, inputs: list[object], target: Checkpoint) -> tuple[int, ...]:
        """Layers whose outputs are the inputs of layers `inputs`, as vLLM, speculators and GGUF count them."""
        count = target.config.num_layers
        found = tuple(one - 1 for one in inputs if type(one) is int and 1 <= one <= count)
        if not found or len(found) != len(inputs):
            self.refuse(
                f"it reads the inputs of layers {str(inputs)[:80]}, and {target.name} has layers 1 to {count} that can be read"
            )
        return found

    def sizes(self, tensors: Mapping[str, QuantTensor], layers: tuple[int, ...], target: Checkpoint) -> tuple[int, int, I64 | None]:
        """Of a head whose matrix `fc` (`encode`) reads `layers` of its target: the size of its input, which is the layers' outputs
        side by side; the number of tokens that it drafts; and the target's id of each, None where it drafts the whole vocabulary.

        A head without an output matrix of its own has the target's. `d2t` has the ids in GGUF files, and in safetensors their
        distances from the draft's own.
        """
        if "encode" not in tensors:
            self.refuse("tensor fc.weight is missing")
        size, vocab_size = len(layers) * target.config.hidden_size, target.config.vocab_size
        self.check(f"input, as numbers of {len(layers)} layers,", tensors["encode"].shape[-1], size, target)
        num_drafted = tensors["output"].shape[0] if "output" in tensors else vocab_size
        if "d2t" not in self.arrays:
            self.check("number of drafted tokens, without a list of their ids,", num_drafted, vocab_size, target)
            return size, num_drafted, None
        ids = self.arrays["d2t"].astype(np.int64)
        if not self.is_gguf:
            ids = ids.reshape(-1) + np.arange(ids.size)
        if ids.shape != (num_drafted,):
            self.refuse(f"d2t has the shape {list(ids.shape)}, and its output matrix {num_drafted} rows")
        return size, num_drafted, self.checked_ids("d2t", ids, target)

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


def eagle3_config(fields: Fields, size: int, num_logits: int) -> HeadConfig:
    """An EAGLE-3 head. fields: its settings; the numbers are those of `HeadFiles.sizes`."""
    residual = fields.boolean("norm_before_residual", False)
    return HeadConfig("attention", normed_residual=residual, feature_size=size, num_logits=num_logits)


def inputs_of(outputs: list[object]) -> list[object]:
    """Layers whose inputs are the outputs of layers `outputs`, as z-lab and DeepSpec count them."""
    return [one + 1 if type(one) is int else one for one in outputs]


def mask_token(fields: Fields, nested: Fields, vocab_size: int) -> int:
    """The mask token, by the names that vLLM looks for. Raises CheckpointError where there is none."""
    found = ((place, name) for name in _MASKS for place in (fields, nested) if place.value(name) is not None)
    place, name = next(found, (fields, _MASKS[0]))
    return place.token_id(name, vocab_size)


def _read_stored(path: Path, mmap: bool) -> Mapping[str, StoredTensor]:
    """The tensors of a directory. Medusa's are in a file of their own name, mostly a pickle."""
    own = path / f"{_MEDUSA}.safetensors"
    if own.exists():
        return read_safetensors(own, mmap)
    if (path / f"{_MEDUSA}.pt").exists() and not any(path.glob("model.safetensors*")):
        raise CheckpointError(
            f"{path} has its weights only as {_MEDUSA}.pt, a pickle, which can run code and is never read; convert it there, with "
            f"torch installed: python -c \"import torch, safetensors.torch as s; w = torch.load('{_MEDUSA}.pt', 'cpu', "
            f"weights_only=True); s.save_file({{k: v.clone() for k, v in w.items()}}, '{_MEDUSA}.safetensors')\""
        )
    return read_stored(path, mmap)


def final_norm(model: Checkpoint) -> HeadNorm:
    """A model's norm before its logits. Some heads were trained on a target's hidden states after it."""
    return HeadNorm(model.tensors["norm"].dequantize(), model.config.norm_eps)


def factor_of(fields: Fields, key: str, neutral: float = 1.0) -> float:
    """A factor above 0; or 0, by which files mean that there is no factor or cap, where that is neutral."""
    value = fields.number(key, neutral)
    if not (1e-6 <= value <= 1e6 or value == neutral):
        fields.fail(key, f"a number from 1e-6 to 1e6{'' if neutral else ', or 0 for none'}")
    return value


def with_logit_scale(model: Checkpoint, factor: float) -> Checkpoint:
    """The model with logits times `factor`, which is one of the norm before them. A cap of logits is applied later."""
    if factor == 1:
        return model
    norm = QuantTensor.encode(get_format("f32"), model.tensors["norm"].dequantize() * np.float32(factor))
    return replace(model, tensors={**model.tensors, "norm": norm})


def shared(target: Checkpoint, own: Mapping[str, QuantTensor]) -> dict[str, QuantTensor]:
    """A head's own tensors, and the target's embedding and output matrix where it has none."""
    output = target.tensors["embed" if target.config.tied_embeddings else "output"]
    return {"embed": target.tensors["embed"], "output": output, **own}

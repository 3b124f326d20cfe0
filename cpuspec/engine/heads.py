"""Checks that a head fits its target; chooses which tokens heads and draft models draft, and the formats of their matrices."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice

import numpy as np

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.checkpoint import HfTokenizerFiles, is_linear, norm_sha256
from cpuspec.checkpoints.heads import Head, HeadFiles, HeadReader
from cpuspec.checkpoints.heads.head import I64
from cpuspec.checkpoints.recipes import HeadOf
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import Format, QuantTensor, get_format
from cpuspec.speculation.drafters.vocab import same_tokens
from cpuspec.text import Tokenizer, make_tokenizer

# `EngineConfig.draft_format`: what matrices are cast to that have more than so many bits.
_FORMATS = {"int8": ("q8_0", 8.5), "int4": ("nl4_g32", 5.0)}
# `EngineConfig.draft_vocab` by default, for vocabularies of at least twice as many tokens. FR-Spec (arXiv 2502.14856) has as many.
_FREQUENT = 1 << 15


def open_head(
    reader: HeadReader, files: HeadFiles, target: Checkpoint | None, tokenizer: Tokenizer, made_for: HeadOf | None = None
) -> Head:
    """Read a head for its target. tokenizer: the target's. made_for: the model that it was trained for, by its recipe.

    Raises ConfigError if the target is no checkpoint, and CheckpointError for a head that is damaged or does not fit.
    """
    if target is None:
        raise ConfigError(
            f"{files.path} shares weights with the model that it was trained for, and this target is not a checkpoint"
        )
    if made_for and made_for.norm_sha256 and (got := norm_sha256(target)) != made_for.norm_sha256:
        raise CheckpointError(
            f"{files.path} cannot draft: its recipe is for {made_for.target}, whose last norm has the sha256 "
            f"{made_for.norm_sha256}, and that of {target.name} has {got}; use a head that was trained for this model"
        )
    head = reader.read(files, target)
    if head.tokenizer:
        own = make_tokenizer(replace(head.model, vocabulary=HfTokenizerFiles(files.path, head.tokenizer)))
        if not same_tokens(tokenizer, own):
            raise CheckpointError(
                f"{files.path} cannot draft: its tokenizer gives other tokens than that of {target.name}; "
                "use a head that was trained for this model"
            )
    return head


def of_frequent_tokens(head: Head, number: int | None, tokenizer: Tokenizer) -> Head:
    """The head with an output matrix for only the `number` first tokens, as in `EngineConfig.draft_vocab`. tokenizer: the target's.

    A head with a list of tokens, or with biases or matrices of its own for all tokens, stays as it is.
    """
    if head.stages or head.token_ids is not None or (head.block and head.block.markov) or "output" not in head.model.tensors:
        return head
    if number is None and not (head.method in ("mtp", "assistant") and _is_mostly_output(head.model)):
        return head
    model, ids = _with_tokens(head.model, _frequent(head.model, number, tokenizer, []))
    return head if ids is None else replace(head, model=model, token_ids=ids)


def model_of_frequent_tokens(
    model: Checkpoint, number: int | None, tokenizer: Tokenizer, counted: list[int], known: I64 | None
) -> tuple[Checkpoint, I64 | None]:
    """A draft model with an output matrix for only `number` tokens, as in `EngineConfig.draft_vocab`, and their ids; None for all.

    counted: the most frequent ones. known: those that the target has, rising; None for all.
    """
    if number is None and not (_is_large(model) if counted else _is_mostly_output(model)):
        number = 0
    ids = _frequent(model, number, tokenizer, counted)
    return _with_tokens(model, ids if known is None or ids is None else np.intersect1d(ids, known))


def _frequent(model: Checkpoint, number: int | None, tokenizer: Tokenizer, counted: list[int]) -> I64 | None:
    """The `number` most frequent tokens, and those that end a text, rising; None for all."""
    vocab_size, number = model.config.vocab_size, _FREQUENT if number is None else number
    if not 0 < number < vocab_size:
        return None
    chosen = set(counted[:number])
    lowest = (token for token in range(vocab_size) if token not in chosen)
    ends = (end for end in tokenizer.eos_ids if end < vocab_size)
    return np.array(sorted({*chosen, *islice(lowest, number - len(chosen)), *ends}), np.int64)


def _with_tokens(model: Checkpoint, ids: I64 | None) -> tuple[Checkpoint, I64 | None]:
    if ids is None or not len(ids):
        return model, None
    output, config = model.tensors["embed" if model.config.tied_embeddings else "output"], model.config
    rows = QuantTensor(output.format, (len(ids), output.shape[1]), output.data[ids], output.order)
    few = {"head": replace(config.head, num_logits=len(ids))} if config.head else {"few_logits": len(ids)}
    config = replace(config, tied_embeddings=False, **few)
    return replace(model, config=config, tensors={**model.tensors, "output": rows}), ids


def _is_large(model: Checkpoint) -> bool:
    return model.config.vocab_size >= 2 * _FREQUENT


def _is_mostly_output(model: Checkpoint) -> bool:
    """Whether a large output matrix has more bytes than a row reads of all others."""
    of_mixture, others = model.config.experts, 0.0
    for name, tensor in model.tensors.items():
        if name not in ("embed", "output") and len(tensor.shape) > 1:
            share = of_mixture.used / of_mixture.count if of_mixture and ".expert_" in name else 1
            others += share * tensor.num_bytes
    return _is_large(model) and model.tensors["embed" if model.config.tied_embeddings else "output"].num_bytes > others


def draft_casts(model: Checkpoint, format_name: str, theirs: Iterable[QuantTensor] = ()) -> Mapping[str, Format]:
    """The formats of the matrices of a head or a draft model that are cast at load, by name: those that fit the format.

    theirs: tensors that it shares with its target and leaves as they are.
    """
    if format_name not in _FORMATS:
        return {}
    name_of_format, most_bits = _FORMATS[format_name]
    format, shared = get_format(name_of_format), set(map(id, theirs))
    tied = {"output": model.tensors["embed"]} if model.config.tied_embeddings else {}
    return {
        name: format
        for name, tensor in {**model.tensors, **tied}.items()
        if is_linear(name, tensor.shape)
        and name not in ("embed", "layer_embed")
        and id(tensor) not in shared
        and tensor.format.bits > most_bits
        and not tensor.shape[-1] % format.block_size
    }

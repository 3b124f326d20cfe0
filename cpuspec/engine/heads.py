"""Checks that a head fits its target, and chooses the formats of its matrices."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.checkpoint import HfTokenizerFiles, is_linear, norm_sha256
from cpuspec.checkpoints.heads import Head, HeadFiles, HeadReader
from cpuspec.checkpoints.recipes import HeadOf
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import Format, QuantTensor, get_format
from cpuspec.speculation.drafters.vocab import same_tokens
from cpuspec.text import Tokenizer, make_tokenizer

# `EngineConfig.head_format`: what matrices of 16 bits or more are cast to.
_FORMATS = {"int8": "q8_0", "int4": "int4_g32"}
_MOST_BITS = 16
# `EngineConfig.head_vocab` by default, for vocabularies of at least twice as many tokens. FR-Spec (arXiv 2502.14856) has as many.
_FREQUENT = 1 << 15


def open_head(
    reader: HeadReader, files: HeadFiles, target: Checkpoint | None, tokenizer: Tokenizer, made_for: HeadOf | None = None
) -> Head:
    """Read a head for its target. tokenizer: the target's. made_for: the model that it was trained for, by its recipe.

    Raises ConfigError if the target is no checkpoint, and CheckpointError for a head that is damaged or does not fit.
    """
    if target is None:
        raise ConfigError(f"{files.path} shares weights with the model that it was trained for, and this target is no checkpoint")
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
    """The head with an output matrix for only the `number` first tokens, as in `EngineConfig.head_vocab`. tokenizer: the target's.

    A head with a list of tokens, or with biases or matrices of its own for all tokens, stays as it is.
    """
    output, vocab_size = head.model.tensors.get("output"), head.model.config.vocab_size
    if head.stages or head.token_ids is not None or (head.block and head.block.markov) or output is None:
        return head
    if number is None:
        of_mixture, others = head.model.config.experts, 0.0  # bytes that a row reads without the output matrix
        for name, tensor in head.model.tensors.items():
            if name not in ("embed", "output") and len(tensor.shape) > 1:
                share = of_mixture.used / of_mixture.count if of_mixture and ".expert_" in name else 1
                others += share * tensor.num_bytes
        is_large = vocab_size >= 2 * _FREQUENT and output.num_bytes > others
        number = _FREQUENT if head.method in ("mtp", "assistant") and is_large else 0
    if not 0 < number < vocab_size:
        return head
    ids = np.array(sorted({*range(number), *(end for end in tokenizer.eos_ids if end < vocab_size)}), np.int64)
    rows = QuantTensor(output.format, (len(ids), output.shape[1]), output.data[ids], output.order)
    config = head.model.config
    assert config.head is not None, "a head's model says how it begins and ends"
    config = replace(config, head=replace(config.head, num_logits=len(ids)))
    model = replace(head.model, config=config, tensors={**head.model.tensors, "output": rows})
    return replace(head, model=model, token_ids=ids)


def casts_of_head(head: Head, format_name: str, target: Checkpoint | None) -> Mapping[str, Format]:
    """The formats of the matrices that are cast at load, by name: the head's own ones of 16 bits or more that fit the format, and
    that are worth quantizing (`is_linear`), those of experts included.
    """
    if format_name not in _FORMATS:
        return {}
    format, theirs = get_format(_FORMATS[format_name]), set(map(id, target.tensors.values())) if target else set()
    return {
        name: format
        for name, tensor in head.model.tensors.items()
        if is_linear(name, tensor.shape)
        and name != "embed"
        and id(tensor) not in theirs
        and tensor.format.bits >= _MOST_BITS
        and not tensor.shape[-1] % format.block_size
    }

"""A small model, or an adapter of one, learns a target's answers.

It learns the tokens themselves (sequence-level distillation, arXiv 1606.07947), as its own tokenizer splits them, so that it drafts
for any target.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cpuspec.errors import CheckpointError
from cpuspec.model.transformer import decode
from cpuspec.speculation.drafters.vocab import SharedTokens, same_tokens
from cpuspec.text import Tokenizer
from cpuspec.train.acceptance import Acceptance, chances
from cpuspec.train.adapter import AdapterWeights
from cpuspec.train.answers import AnswerFiles, check_answer
from cpuspec.train.chains import ChainAttention
from cpuspec.train.model_files import ModelWeights
from cpuspec.train.rows import Rows
from cpuspec.train.samples import Sample

_MEASURED_STARTS = 32  # of a held-back sample, evenly spread


class Texts:
    """Answers with their prompts as samples (`loop.Samples`), in the tokens of the model that learns them."""

    def __init__(self, path: Path, texts: Sequence[tuple[list[int], int]]) -> None:
        self.path = path
        self._tokens = [np.array(ids, np.int32) for ids, _ in texts]
        self._prompts = [num_prompt for _, num_prompt in texts]
        self.lengths = np.array([len(ids) for ids in self._tokens], np.int64)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Sample:
        ids, answer = self.tokens(index)
        return Sample(ids, answer, np.empty((len(ids), 0, 0), np.float32))

    def tokens(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Ids, and which of them the target generated."""
        ids = self._tokens[index]
        return ids, np.arange(len(ids)) >= self._prompts[index]


def read_answers(paths: Sequence[Path], files: AnswerFiles, model: Tokenizer, num_rows: int) -> Texts:
    """The answers of files of `cpuspec train answers`, at least one, in the tokens of a model.

    They are split as the engine splits a target's text for a drafter. files: reads the target's answers. num_rows: of the target's
    logits. Raises CheckpointError and ConfigError for a file that is none, or vocabularies with nothing in common.
    """
    target = files.tokenizer
    shared = None if same_tokens(target, model) else SharedTokens.find(target, num_rows, model, "the model")
    texts = []
    for where, answer in chain.from_iterable(map(files.lines, paths)):
        check_answer(answer, target, where)
        prompt, ids = answer["prompt_ids"], answer["answer_ids"]
        if shared:
            prompt, ids = shared.prompt_for_draft(prompt), shared.text_for_draft(ids)
        texts.append((prompt + ids, len(prompt)))
    if not texts:
        raise CheckpointError(f"{paths[0]} has no answers; wanted a file of `cpuspec train answers`")
    return Texts(paths[0], texts)


class DistillTraining:
    """A model, or an adapter of one, in training. num_tokens: of the drafts that are measured."""

    def __init__(self, weights: ModelWeights | AdapterWeights, num_tokens: int) -> None:
        self.weights, self._num_tokens = weights, num_tokens

    def loss(self, samples: Sequence[Sample], rng: np.random.Generator) -> Tensor | None:
        """The mean cross-entropy of the answers' tokens; None where there are none. Draws nothing."""
        labels = np.concatenate([np.append(one.token_ids[1:], 0) for one in samples]).astype(np.int64)
        known = np.concatenate([np.append(one.answer[1:], False) for one in samples])
        if not known.any():
            return None
        logits = self.logits(samples, self.weights.served(), known)
        return functional.cross_entropy(logits, self._on_device(labels[known]))

    @torch.no_grad()
    def measure(self, samples: Iterable[Sample]) -> Acceptance:
        """The acceptance of drafts after tokens of the answers. Where all tokens before were right, true ones are the drafted."""
        served = self.weights.served()
        return Acceptance.sum(self._measured(sample, served) for sample in samples)

    def _measured(self, sample: Sample, served: Mapping[str, Tensor]) -> Acceptance:
        count = len(sample.token_ids)
        behind = np.flatnonzero(sample.answer[1:-1] & sample.answer[2:]) + 1
        starts = behind[np.linspace(0, len(behind) - 1, min(len(behind), _MEASURED_STARTS)).astype(int)]
        logits = self.logits([sample], served)
        best, said = logits.argmax(-1).cpu().numpy(), chances(logits)
        at = starts[:, None] + np.arange(self._num_tokens)
        rows, following = np.minimum(at, count - 1), np.minimum(at + 1, count - 1)
        known = (at + 1 < count) & sample.answer[following]
        return Acceptance.of(best[rows] == sample.token_ids[following], known, said[:, rows])

    def logits(self, samples: Sequence[Sample], served: Mapping[str, Tensor], asked: NDArray[np.bool_] | None = None) -> Tensor:
        """Of all tokens of all samples, [T, V], or of those that are asked for. served: what `ModelWeights.served` gives."""
        weights, counts = self.weights, [len(one.token_ids) for one in samples]
        tokens = np.concatenate([one.token_ids for one in samples]).astype(np.int64)
        embedded = functional.embedding(self._on_device(tokens), served["embed"])
        places = np.concatenate([np.arange(count) for count in counts])
        wanted = None if asked is None else self._on_device(asked)
        attention, config = ChainAttention([0, *accumulate(counts)], weights.device), weights.model.config
        return decode(config, Rows(config, served, places, attention, embedded, asked=wanted))

    def _on_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.weights.device)

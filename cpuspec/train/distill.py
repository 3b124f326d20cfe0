"""A small model learns a target's answers, and to draft several tokens in one pass.

Of the answers it learns the tokens themselves (sequence-level distillation, arXiv 1606.07947), as its own tokenizer splits them,
so that it drafts for any target. With masks it also learns PARD's rows (arXiv 2504.18583): after a token stand k - 1 masks, each
a row for one token more. Most of the deeper rows are left out of a step, as PARD does: of depth k a share kept^k, each after a
kept one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.model.transformer import decode
from cpuspec.speculation.drafters.vocab import SharedTokens, same_tokens
from cpuspec.text import Tokenizer
from cpuspec.train.acceptance import Acceptance, chances
from cpuspec.train.adapter import AdapterWeights
from cpuspec.train.answers import AnswerFiles, check_answer
from cpuspec.train.model_files import ModelWeights
from cpuspec.train.rows import Rows, attended
from cpuspec.train.samples import Sample

I64 = NDArray[np.int64]

_MEASURED_STARTS = 32  # of a held-back sample, evenly spread


@dataclass(frozen=True)
class DistillLoss:
    """tokens: that are drafted in one pass, and measured. masks: whether it learns to; without, it drafts them one by one.

    kept: share of each depth's rows that the next one keeps; least: of all rows, that every depth keeps.
    """

    tokens: int = 4
    masks: bool = False
    kept: float = 0.7
    least: float = 0.2


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


class Layout(NamedTuple):
    """Rows of a text of T tokens: its own, and masks after some of them.

    start, depth [R]: the token that a row stands after, and how far: 0 for the token's own row.
    """

    start: I64
    depth: I64


class DistillTraining:
    """A model, or an adapter of one, in training."""

    def __init__(self, weights: ModelWeights | AdapterWeights, loss: DistillLoss) -> None:
        if loss.masks and weights.mask_id is None:
            raise ConfigError("rows of masks need a token that stands for them; name one with --mask-id")
        self.weights, self._loss = weights, loss

    def loss(self, samples: Sequence[Sample], rng: np.random.Generator) -> Tensor | None:
        """The mean cross-entropy of the answers' tokens; None where there are none."""
        layouts = [self.layout(len(one.token_ids), rng) for one in samples]
        labels, known = self._labels(samples, layouts)
        if not known.any():
            return None
        logits = self.logits(samples, layouts, self.weights.served(), known)
        return functional.cross_entropy(logits, self._on_device(labels[known]))

    @torch.no_grad()
    def measure(self, samples: Iterable[Sample]) -> Acceptance:
        """The acceptance of drafts after tokens of the answers. Where all tokens before were right, true ones are the drafted."""
        served = self.weights.served()
        return Acceptance.sum(self._measured(sample, served) for sample in samples)

    def _measured(self, sample: Sample, served: Mapping[str, Tensor]) -> Acceptance:
        count, steps = len(sample.token_ids), np.arange(self._loss.tokens)
        behind = np.flatnonzero(sample.answer[1:-1] & sample.answer[2:]) + 1
        starts = behind[np.linspace(0, len(behind) - 1, min(len(behind), _MEASURED_STARTS)).astype(int)]
        own = np.arange(count)
        deep = steps[1:] if self._loss.masks else steps[:0]
        layout = Layout(np.concatenate([own, np.tile(starts, len(deep))]), np.concatenate([0 * own, np.repeat(deep, len(starts))]))
        logits = self.logits([sample], [layout], served)
        best, said = logits.argmax(-1).cpu().numpy(), chances(logits)
        at = starts[:, None] + steps
        labels = sample.token_ids[np.minimum(at + 1, count - 1)]
        known = (at + 1 < count) & sample.answer[np.minimum(at + 1, count - 1)]
        if self._loss.masks:
            rows = np.concatenate([starts[None], count + np.arange(len(deep) * len(starts)).reshape(len(deep), -1)]).T
        else:
            rows = np.minimum(at, count - 1)
        return Acceptance.of(best[rows] == labels, known, said[:, rows])

    def layout(self, count: int, rng: np.random.Generator) -> Layout:
        """The rows of a text of `count` tokens in a step."""
        starts, depths, kept = [np.arange(count)], [np.zeros(count, np.int64)], np.arange(count)
        for depth in range(1, self._loss.tokens if self._loss.masks else 1):
            number = round(max(self._loss.kept**depth, self._loss.least) * count)
            kept = np.sort(rng.permutation(kept)[:number])
            kept = kept[kept + depth < count]
            starts.append(kept)
            depths.append(np.full(len(kept), depth))
        return Layout(np.concatenate(starts), np.concatenate(depths))

    def logits(
        self,
        samples: Sequence[Sample],
        layouts: Sequence[Layout],
        served: Mapping[str, Tensor],
        asked: NDArray[np.bool_] | None = None,
    ) -> Tensor:
        """Of all rows of all samples, [R, V], or of those that are asked for. served: what `ModelWeights.served` gives."""
        weights = self.weights
        tokens = [
            np.where(layout.depth == 0, one.token_ids[layout.start], weights.mask_id or 0)
            for one, layout in zip(samples, layouts, strict=True)
        ]
        embedded = functional.embedding(self._on_device(np.concatenate(tokens).astype(np.int64)), served["embed"])
        places = np.concatenate([layout.start + layout.depth for layout in layouts])
        wanted = None if asked is None else self._on_device(asked)
        attention, config = _Attention(layouts, weights.device), weights.model.config
        return decode(config, Rows(config, served, places, attention, embedded, asked=wanted))

    def _labels(self, samples: Sequence[Sample], layouts: Sequence[Layout]) -> tuple[I64, NDArray[np.bool_]]:
        """The token after each row, and whether it is one of an answer."""
        labels, known = [], []
        for one, layout in zip(samples, layouts, strict=True):
            at = layout.start + layout.depth + 1
            inside = np.minimum(at, len(one.token_ids) - 1)
            labels.append(one.token_ids[inside].astype(np.int64))
            known.append((at < len(one.token_ids)) & one.answer[inside])
        return np.concatenate(labels), np.concatenate(known)

    def _on_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.weights.device)


class _Attention:
    """A row sees the tokens up to the one that it stands after, and the masks between."""

    def __init__(self, layouts: Sequence[Layout], device: torch.device) -> None:
        ends = np.cumsum([0, *(len(layout.start) for layout in layouts)]).tolist()
        self._parts = []
        for layout, (start, end) in zip(layouts, pairwise(ends), strict=True):
            of_text = (layout.depth == 0) & (layout.start <= layout.start[:, None])
            between = (layout.depth > 0) & (layout.start == layout.start[:, None]) & (layout.depth <= layout.depth[:, None])
            self._parts.append((slice(start, end), torch.from_numpy(of_text | between).to(device)))

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise AssertionError("a model injects nothing")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return torch.cat([attended(q[rows], k[rows], v[rows], mask, scale) for rows, mask in self._parts])

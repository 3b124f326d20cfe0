"""Training of block heads: DFlash and DSpark (arXiv 2602.06036, 2607.05147).

A block begins at an anchor, a token of an answer, and sees the features of the tokens before it and its own rows. Its first row
holds the anchor, the others the mask; row i drafts the i-th token after the anchor. A step trains blocks of many anchors at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cpuspec.checkpoints import Checkpoint
from cpuspec.errors import CheckpointError
from cpuspec.model.transformer import decode, inject
from cpuspec.train.acceptance import Acceptance
from cpuspec.train.rows import Rows, attended
from cpuspec.train.samples import Extraction, Sample
from cpuspec.train.weights import HeadWeights, target_rows

I64 = NDArray[np.int64]

_MEASURED_ANCHORS = 64  # of a held-back sample, evenly spread


@dataclass(frozen=True)
class BlockLoss:
    """What is made small: ce times the cross-entropy of the target's token, plus l1 times the distance sum |p - q| to its
    distribution, plus the cross-entropy of the confidence head. Row i weighs exp(-i / decay). Numbers are DSpark's.

    anchors: of a sample in a step.
    """

    anchors: int = 32
    ce: float = 0.1
    l1: float = 0.9
    decay: float = 4.0


class Blocks(NamedTuple):
    """Blocks of A anchors that draft n tokens each.

    logits [A, n, drafted]: with the Markov head's bias. said [A, n]: the confidence head's logits, None without one. labels I64
    [A, n]: the head's numbers of the tokens that came, -1 for those that it does not draft. known [A, n]: whether there was one.
    likeliest: of the target, as `target_rows` gives it, [A * n, K].
    """

    logits: Tensor
    said: Tensor | None
    labels: Tensor
    known: Tensor
    likeliest: tuple[Tensor, Tensor] | None


class BlockTraining:
    """A block head in training. Raises CheckpointError for a head that is none, or has parts that are not trained here."""

    method = "block"

    def __init__(self, directory: Path, target: Checkpoint, about: Extraction, loss: BlockLoss, device: torch.device) -> None:
        self.weights = weights = HeadWeights(directory, target, about, self.method, device)
        block = weights.head.block
        assert block, "the reader of such a head has seen to it"
        if block.markov and (block.markov.gate is not None or block.markov.joint is not None):
            raise CheckpointError(f"{directory} has a gated or recurrent Markov head; wanted a vanilla one")
        norm, of_state = weights.head.model.tensors["norm"].dequantize(), weights.head.state_norm
        if of_state is not None and not np.array_equal(norm, of_state.weight):
            raise CheckpointError(f"{directory} scales its logits, which is not trained here; take another head")
        self._block, self._loss = block, loss
        self._w1 = self._w2 = self._confidence = self._confidence_bias = None
        if block.markov:
            self._w1 = weights.add("markov_w1", block.markov.w1.dequantize())
            self._w2 = weights.add("markov_w2", block.markov.w2.dequantize())
        if block.confidence is not None:
            self._confidence = weights.add("confidence", block.confidence[None])
            self._confidence_bias = weights.add("confidence_bias", np.array([block.confidence_bias], np.float32))
        self.num_tokens = block.size - block.num_skipped

    def loss(self, samples: Sequence[Sample], rng: np.random.Generator) -> Tensor | None:
        """The mean loss of blocks at random anchors; None where the samples have no anchor."""
        anchors = [rng.permutation(anchors_of(one))[: self._loss.anchors] for one in samples]
        blocks = self.blocks(samples, [np.sort(one) for one in anchors])
        if blocks is None:
            return None
        labels, drafted = blocks.labels.clamp(min=0), blocks.labels >= 0
        log_sum = blocks.logits.logsumexp(-1)
        chosen = blocks.logits.gather(-1, labels[..., None])[..., 0] - log_sum
        if blocks.likeliest:
            ids, shares = (one.view(*labels.shape, -1) for one in blocks.likeliest)
            same = torch.minimum((blocks.logits.gather(-1, ids) - log_sum[..., None]).exp(), shares).sum(-1)
        else:
            same = chosen.exp() * drafted
        places = torch.arange(labels.shape[1], device=labels.device)
        weight = blocks.known * torch.exp(-places / self._loss.decay)
        # The distance is 2 - 2 sum min(p, q), where tokens outside of the likeliest ones count as missed.
        total = self._loss.l1 * 2 * (1 - same) - self._loss.ce * chosen * drafted
        if blocks.said is not None:
            right = (blocks.logits.argmax(-1) == blocks.labels).float()
            total = total + functional.binary_cross_entropy_with_logits(blocks.said, right, reduction="none")
        return (total * weight).sum() / weight.sum()

    @torch.no_grad()
    def measure(self, samples: Iterable[Sample]) -> Acceptance:
        """The acceptance of drafts at anchors spread over the samples.

        Where all tokens before were right, a row's bias comes from the true token, as here: what is counted is what serving does.
        """
        parts = []
        for sample in samples:
            anchors = anchors_of(sample)
            spread = np.linspace(0, len(anchors) - 1, min(len(anchors), _MEASURED_ANCHORS)).astype(int)
            blocks = self.blocks([sample], [anchors[spread]])
            if blocks:
                right = blocks.logits.argmax(-1) == blocks.labels
                said = blocks.logits.softmax(-1).amax(-1) if blocks.said is None else blocks.said.sigmoid()
                parts.append(Acceptance.of(right.cpu().numpy(), blocks.known.cpu().numpy(), said.cpu().numpy()[None]))
        return Acceptance.sum(parts)

    def blocks(self, samples: Sequence[Sample], anchors: Sequence[I64]) -> Blocks | None:
        """The blocks at these tokens of each sample, which have tokens before them; None where there are none."""
        pairs = [(sample, at) for sample, at in zip(samples, anchors, strict=True) if len(at)]
        if not pairs:
            return None
        samples, anchors = [sample for sample, _ in pairs], [at for _, at in pairs]
        weights, config, block = self.weights, self.weights.config, self._block
        lengths = [int(at[-1]) for at in anchors]  # features before the last anchor
        attention = _BlockAttention(anchors, lengths, block.size, block.both_ways, weights.device)
        before = np.concatenate([np.arange(length) for length in lengths])
        inject(config, Rows(config, weights.all, before, attention, given=weights.encoded(samples, lengths)))
        own = np.arange(block.size)
        places = np.concatenate([at[:, None] + own for at in anchors])
        tokens = np.full(places.shape, weights.head.mask_id, np.int64)
        tokens[:, 0] = np.concatenate([one.token_ids[at] for one, at in pairs])
        rows = Rows(config, weights.all, places.reshape(-1), attention, weights.embedded(tokens.reshape(-1)))
        logits = decode(config, rows).view(*places.shape, -1)[:, block.num_skipped :]
        states = rows.state.view(*places.shape, -1)[:, block.num_skipped :]
        behind = [at[:, None] + np.arange(self.num_tokens) for at in anchors]  # the tokens before the drafted ones
        last = [np.minimum(at, len(one.token_ids) - 1) for one, at in zip(samples, behind, strict=True)]
        if self._w1 is not None and self._w2 is not None:
            w1 = self._w1[weights.on_device(np.concatenate([one.token_ids[at] for one, at in zip(samples, last, strict=True)]))]
            logits = logits + functional.linear(w1, self._w2).float()
            states = torch.cat([states, w1], dim=-1)
        said = None
        if self._confidence is not None:
            # The confidence head looks on: what it learns does not change the rows that it judges.
            seen = states[..., : self._confidence.shape[1]].detach()
            said = functional.linear(seen, self._confidence, self._confidence_bias)[..., 0].float()
        known, labels = [], []
        for one, at in zip(samples, behind, strict=True):
            inside = at + 1 < len(one.token_ids)
            label = np.minimum(at + 1, len(one.token_ids) - 1)
            known.append(np.cumprod(inside & one.answer[label], axis=1).astype(bool))
            labels.append(weights.drafted(one.token_ids[label]))
        likeliest = target_rows(weights, samples, [at.reshape(-1) for at in last])
        whole = weights.on_device(np.concatenate(labels)), weights.on_device(np.concatenate(known))
        return Blocks(logits, said, *whole, likeliest)


def anchors_of(sample: Sample) -> I64:
    """Tokens that a block may begin at: those of the answer which another one of it follows."""
    return np.flatnonzero(sample.answer[1:-1] & sample.answer[2:]) + 1


class _BlockAttention:
    """Rows of a block see the context before its anchor and the block, or of the block the rows before them if it is causal."""

    def __init__(self, anchors: Sequence[I64], lengths: Sequence[int], size: int, both_ways: bool, device: torch.device) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        contexts, rows = ([0, *accumulate(numbers)] for numbers in (lengths, [len(at) * size for at in anchors]))
        self._parts = []
        for i, (at, length) in enumerate(zip(anchors, lengths, strict=True)):
            context = np.arange(length) < at.repeat(size)[:, None]
            own = np.kron(np.eye(len(at)), np.ones((size, size)) if both_ways else np.tri(size)).astype(bool)
            mask = torch.from_numpy(np.concatenate([context, own], axis=1)).to(device)
            self._parts.append((slice(contexts[i], contexts[i + 1]), slice(rows[i], rows[i + 1]), mask))

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._kept[layer] = k, v

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        old_k, old_v = self._kept[layer]
        return torch.cat(
            [
                attended(q[rows], torch.cat([old_k[context], k[rows]]), torch.cat([old_v[context], v[rows]]), mask, scale)
                for context, rows, mask in self._parts
            ]
        )

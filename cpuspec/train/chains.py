"""Training of heads that draft token by token: on the target's features first, and then on their own outputs.

EAGLE-3 (arXiv 2503.01840, section 3.2), and layers for multi-token prediction (FastMTP, arXiv 2509.18362), which are trained alike.

Row P is made of token P + 1 and of the feature of token P, and drafts token P + 2. At step 0 all features are the target's. At step
k the last k rows of each chain are the head's own: row P takes the output of row P - 1 at step k - 1, and sees the rows of step 0
up to P - k and one row of each later step. That is what the engine computes for the k-th token after row P - k.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cpuspec.checkpoints import Checkpoint
from cpuspec.model.transformer import decode
from cpuspec.train.acceptance import Acceptance, chances
from cpuspec.train.rows import Rows, attended
from cpuspec.train.samples import Extraction, Sample
from cpuspec.train.weights import HeadWeights, target_rows

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class ChainLoss:
    """method: of the head, "eagle3" or "mtp". steps: how many tokens a chain has in training. decay: step k weighs decay^k.

    Numbers are EAGLE-3's, with fewer steps. FastMTP has 3 steps and 0.6.
    """

    method: str = "eagle3"
    steps: int = 5
    decay: float = 0.8


class Chains(NamedTuple):
    """The rows of all samples, one after the other, N in all.

    logits: for each step [N, drafted]. labels I64 [N]: the head's numbers of the tokens that came, -1 for those that it does not
    draft. known [steps, N]: whether there was one, and the chain has begun. likeliest: of the target, as `target_rows` gives it.
    """

    logits: list[Tensor]
    labels: Tensor
    known: Tensor
    likeliest: tuple[Tensor, Tensor] | None


class ChainTraining:
    """A head in training that feeds on its own outputs.

    token_ids: the target's tokens that a layer for multi-token prediction is trained to draft; None for those that the head drafts.
    Raises CheckpointError for a head that is none, or has parts that are not trained here.
    """

    def __init__(
        self,
        directory: Path,
        target: Checkpoint,
        about: Extraction,
        loss: ChainLoss,
        device: torch.device,
        token_ids: I64 | None = None,
    ) -> None:
        self.weights = HeadWeights(directory, target, about, loss.method, device, token_ids)
        self.method = loss.method
        self._loss = loss
        self.num_tokens = loss.steps

    def loss(self, samples: Sequence[Sample], rng: np.random.Generator) -> Tensor | None:
        """The mean loss of all rows and steps; None where the samples have no row whose token is of an answer. Draws nothing."""
        chains = self.chains(samples)
        if chains is None or not chains.known.any():
            return None
        total, weights = chains.logits[0].new_zeros(()), chains.logits[0].new_zeros(())
        labels, drafted = chains.labels.clamp(min=0), chains.labels >= 0
        for step, logits in enumerate(chains.logits):
            log_sum, weight = logits.logsumexp(-1), chains.known[step] * self._loss.decay**step
            if chains.likeliest:  # the target's distribution over what the head drafts
                ids, shares = chains.likeliest
                whole = shares.sum(-1)
                row = log_sum - (logits.gather(-1, ids) * shares).sum(-1) / whole.clamp(min=1e-9)
                weight = weight * (whole > 0.5)  # the rest of the row is not known, or not drafted
            else:
                row = log_sum - logits.gather(-1, labels[:, None])[:, 0]
                weight = weight * drafted
            total, weights = total + (row * weight).sum(), weights + weight.sum()
        return total / weights.clamp(min=1)

    @torch.no_grad()
    def measure(self, samples: Iterable[Sample]) -> Acceptance:
        """The acceptance of chains from every row. Where all tokens before were right, true tokens are the drafted ones."""
        parts = []
        for sample in samples:
            chains = self.chains([sample])
            if chains is None:
                continue
            labels, steps, count = chains.labels, len(chains.logits), len(chains.labels)
            right = torch.stack([logits.argmax(-1) == labels for logits in chains.logits]).cpu().numpy()
            known = chains.known.cpu().numpy()
            # Row i of the table is the chain that begins at row i: its token k is drafted by row i + k at step k.
            at = np.minimum(np.arange(count)[:, None] + np.arange(steps), count - 1)
            inside = np.arange(count)[:, None] + np.arange(steps) < count
            step = np.arange(steps)[None]
            said = np.stack([chances(logits) for logits in chains.logits], axis=1)
            parts.append(Acceptance.of(right[step, at] & inside, known[step, at] & inside, said[:, step, at]))
        return Acceptance.sum(parts)

    def chains(self, samples: Sequence[Sample]) -> Chains | None:
        """The rows of the samples at each step; None where no sample has three tokens."""
        samples = [one for one in samples if len(one.token_ids) > 2]
        if not samples:
            return None
        weights, config, state_norm = self.weights, self.weights.config, self.weights.head.state_norm
        counts = [len(one.token_ids) - 2 for one in samples]
        starts = np.cumsum([0, *counts])
        places = np.concatenate([np.arange(count) for count in counts])
        attention = ChainAttention(starts.tolist(), weights.device)
        embedded = weights.embedded(np.concatenate([one.token_ids[1:-1] for one in samples]).astype(np.int64))
        given = weights.encoded(samples, counts)
        previous = weights.on_device(np.maximum(np.arange(len(places)) - 1, 0))
        logits = []
        for step in range(self._loss.steps):
            attention.step = step
            rows = Rows(config, weights.all, places, attention, embedded, given)
            logits.append(decode(config, rows))
            output = rows.state if state_norm else rows.output
            given = output[previous]
        answer = np.concatenate([one.answer[2:] for one in samples])
        known = np.stack([answer & (places >= step) for step in range(self._loss.steps)])
        labels = weights.drafted(np.concatenate([one.token_ids[2:] for one in samples]))
        likeliest = target_rows(weights, samples, [np.arange(count) + 1 for count in counts])
        return Chains(logits, weights.on_device(labels), weights.on_device(known), likeliest)


class ChainAttention:
    """Row P of a step sees the rows of step 0 up to P minus the step, and of each later step the one row between.

    starts: the first row of each text, and the end of the last. At step 0 it is the attention of a model that is no head.
    """

    def __init__(self, starts: Sequence[int], device: torch.device) -> None:
        self.step = 0
        self._parts = [slice(start, end) for start, end in pairwise(starts)]
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._device = device

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self._kept[layer, self.step] = k, v
        kept = [self._kept[layer, step] for step in range(self.step + 1)]
        mixed = []
        for part in self._parts:
            keys, values = (torch.cat([one[i][part] for one in kept]) for i in (0, 1))
            mixed.append(attended(q[part], keys, values, self._mask(part.stop - part.start), scale))
        return torch.cat(mixed)

    def _mask(self, count: int) -> Tensor:
        behind = torch.arange(count, device=self._device)
        behind = behind[:, None] - behind  # how far a row is behind another
        later = [behind == self.step - step for step in range(1, self.step + 1)]
        return torch.cat([behind >= self.step, *later], dim=1)

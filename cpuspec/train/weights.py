"""The numbers of a head while it is trained, and what training looks up beside them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cpuspec.checkpoints import Checkpoint
from cpuspec.errors import CheckpointError
from cpuspec.train.layout import read_head, rewrite_head
from cpuspec.train.samples import FINAL, Extraction, Sample

I64 = NDArray[np.int64]

_FROZEN = ("embed", "output")  # the target's


class HeadWeights:
    """A head's tensors in f32 on a device.

    trained: those that gradients change, by canonical name. all: and the output matrix.
    token_ids: the tokens of a head for the whole vocabulary that it is trained to draft; None for all that it drafts.
    Raises CheckpointError for a head that is not trained by `method`, or reads layers that the samples do not have.
    """

    def __init__(
        self,
        directory: Path,
        target: Checkpoint,
        about: Extraction,
        method: str,
        device: torch.device,
        token_ids: I64 | None = None,
    ) -> None:
        self.head = head = read_head(directory, target)
        is_mtp = method == "mtp"
        if head.method != method or bool(head.feature_norms) != is_mtp:
            raise CheckpointError(
                f"{directory} drafts by {head.method}{' with norms of features' * bool(head.feature_norms)}; wanted {method}, plain"
            )
        layers: tuple[int | str, ...] = (FINAL,) if is_mtp else head.layers
        missing = [layer for layer in layers if layer not in about.layers]
        if missing:
            raise CheckpointError(f"{directory} reads layers {list(layers)}, and the samples lack {missing}; extract them, too")
        self.config, self.device = head.model.config, device
        self.embed = head.model.tensors["embed"]
        self._source, self._target = directory, target
        self._columns = [about.layers.index(layer) for layer in layers]
        self._place = np.full(self.config.vocab_size, -1, np.int64)
        ids = np.arange(self.config.vocab_size) if head.token_ids is None else head.token_ids
        rows = head.model.tensors["output"]
        output = self.on_device(rows.dequantize() if token_ids is None else rows.rows(token_ids))
        ids = ids if token_ids is None else token_ids
        self._place[ids] = np.arange(len(ids))
        self.trained: dict[str, Tensor] = {}
        for name, tensor in head.model.tensors.items():
            if name not in _FROZEN:
                self.trained[name] = self.on_device(tensor.dequantize()).requires_grad_()
        self.all = {**self.trained, "output": output}

    def on_device(self, values: NDArray[np.generic]) -> Tensor:
        """A copy as a tensor."""
        return torch.tensor(np.ascontiguousarray(values), device=self.device)

    def encoded(self, samples: Sequence[Sample], counts: Sequence[int]) -> Tensor:
        """The head's hidden states [T, C] of what it reads: of each sample the first `counts` tokens."""
        features = [one.hidden[:count, self._columns].reshape(count, -1) for one, count in zip(samples, counts, strict=True)]
        given = self.on_device(np.concatenate(features))
        return functional.linear(given, self.all["encode"]) if "encode" in self.all else given

    def embedded(self, tokens: I64) -> Tensor:
        """Rows of the target's embedding, [T, C]."""
        different, where = np.unique(tokens, return_inverse=True)
        return self.on_device(self.embed.rows(different))[self.on_device(where)]

    def drafted(self, tokens: NDArray[np.integer]) -> I64:
        """The head's numbers of the target's tokens, -1 for those that it does not draft."""
        return self._place[tokens]

    def save(self, directory: Path, dtype: torch.dtype, sharpness: float = 1.0) -> None:
        """Write the head, its logits times `sharpness`. Raises OSError."""
        trained = {**self.trained, "norm": sharpness * self.trained["norm"]}
        rewrite_head(self._source, directory, self.head.method, trained, dtype, self._target)


def target_rows(weights: HeadWeights, samples: Sequence[Sample], rows: Sequence[I64]) -> tuple[Tensor, Tensor] | None:
    """The target's likeliest next tokens after tokens `rows` of each sample, one sample after the other.

    ids I64 [T, K]: the head's numbers, 0 for tokens that it does not draft; probabilities F32 [T, K]: 0 for these. None where the
    samples have none.
    """
    ids, shares = [], []
    for sample, at in zip(samples, rows, strict=True):
        if sample.top_ids is None or sample.top_logits is None or sample.log_sum is None:
            return None
        found = weights.drafted(sample.top_ids[at])
        ids.append(np.maximum(found, 0))
        shares.append(np.exp(sample.top_logits[at] - sample.log_sum[at, None]) * (found >= 0))
    return weights.on_device(np.concatenate(ids)), weights.on_device(np.concatenate(shares).astype(np.float32))

"""Embeddings: a model's final states of a text, pooled to one vector of length one.

The poolings have the names of llama.cpp and sentence-transformers. Qwen3-Embedding (arXiv 2506.05176) takes its last token's state.
"""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cpuspec.backends import Backend
from cpuspec.checkpoints.adapters import AdapterSet
from cpuspec.checkpoints.heads.head import HeadNorm
from cpuspec.errors import BackendError, ConfigError
from cpuspec.model.batch import F32, ForwardBatch
from cpuspec.sampling import F64
from cpuspec.settings import POOLINGS


class EmbeddingJob:
    """Embeds texts, one forward a `step`. One thread at a time calls it, and no other one uses the backend meanwhile.

    Rows are invariant, so neither the other texts nor the number of rows of a step change an embedding.
    """

    def __init__(
        self,
        backend: Backend,
        norm: HeadNorm,
        prompts: Sequence[list[int]],
        pooling: str,
        dimensions: int | None = None,
        num_slots: int = 1,
        adapters: AdapterSet = (),
    ) -> None:
        """norm: the model's final one. prompts: token ids, none empty. pooling: one of `POOLINGS`.

        dimensions: how many leading numbers of a vector are kept (arXiv 2205.13147); None for all. num_slots: the most texts in
        one forward. Raises ConfigError.
        """
        size = backend.config.hidden_size
        if pooling not in POOLINGS:
            raise ConfigError(f"pooling must be one of {', '.join(POOLINGS)}; got {pooling!r}")
        if dimensions is not None and not 1 <= dimensions <= size:
            raise ConfigError(f"dimensions must be from 1 to {size}, the model's hidden size; got {dimensions}")
        self._backend, self._norm, self._prompts, self._pooling = backend, norm, prompts, pooling
        self._dimensions, self._adapters = dimensions or size, adapters
        self._num_slots = min(num_slots, max(len(prompts), 1))
        self._cache = backend.new_cache(self._num_slots, max(map(len, prompts), default=1))
        self._pooled = np.zeros((len(prompts), size))  # so far, in f64
        self._unread = deque(range(len(prompts)))
        self._reading: list[tuple[int, int, int]] = []  # prompt, its slot, tokens that were read

    @property
    def is_done(self) -> bool:
        """Whether every text has been read."""
        return not self._unread and not self._reading

    def step(self, max_rows: int | None = None) -> None:
        """Run one forward of at most `max_rows` tokens; None for as many as the backend takes."""
        rows_left = min(max_rows or self._backend.max_rows, self._backend.max_rows)
        pieces: list[tuple[int, int, int, int]] = []
        taken = {slot for _, slot, _ in self._reading}
        free = [slot for slot in range(self._num_slots) if slot not in taken]
        while rows_left and (self._reading or (self._unread and free)):
            if self._reading:
                prompt, slot, start = self._reading.pop(0)
            else:
                prompt, slot, start = self._unread.popleft(), free.pop(), 0
                self._cache.truncate(slot, 0)
            end = min(start + rows_left, len(self._prompts[prompt]))
            rows_left -= end - start
            pieces.append((prompt, slot, start, end))
        if not pieces:
            return
        starts = [0]
        tokens: list[int] = []
        positions: list[int] = []
        for prompt, _, start, end in pieces:
            tokens += self._prompts[prompt][start:end]
            positions += range(start, end)
            starts.append(len(tokens))
        layers = (self._backend.config.num_layers - 1,)
        slots = [piece[1] for piece in pieces]
        batch = ForwardBatch(tokens, positions, slots, starts, None, [], layers, adapters=[self._adapters] * len(slots))
        hidden = self._norm.applied(self._backend.forward(batch, self._cache).hidden[0])
        left = []
        for (prompt, slot, start, end), rows in zip(pieces, pairwise(starts), strict=True):
            self._pool(prompt, start, hidden[slice(*rows)])
            if end < len(self._prompts[prompt]):
                left.append((prompt, slot, end))
        self._reading = left + self._reading

    def pooled(self) -> F64:
        """The pooled hidden states [n, dimensions] of a finished job. Raises BackendError if they are not finite."""
        assert self.is_done, "hidden states are complete when every text has been read"
        pooled: F64 = self._pooled[:, : self._dimensions]
        if bad := int((~np.isfinite(pooled)).any(axis=1).sum()):
            raise BackendError(
                f"the states of {bad} of {len(pooled)} texts are NaN or infinite; the model's weights are broken, or its keys or "
                "values exceed what the KV formats f16, int8 and int4 bear: try kv_format bf16 or f32"
            )
        return pooled

    def embeddings(self) -> F32:
        """The pooled states scaled to length one; zeros stay zeros. Raises as `pooled` does."""
        pooled = self.pooled()
        lengths = np.linalg.norm(pooled, axis=1, keepdims=True)
        return (pooled / np.where(lengths > 0, lengths, 1)).astype(np.float32)

    def _pool(self, prompt: int, start: int, hidden: F32) -> None:
        """Add the hidden states of a text's tokens from number `start` on. A mean is a sum here: its length becomes one anyway."""
        if self._pooling == "last":
            self._pooled[prompt] = hidden[-1]
        elif self._pooling == "cls" and start == 0:
            self._pooled[prompt] = hidden[0]
        elif self._pooling == "mean":
            for row in hidden:  # one by one: the bits must not depend on how many came together
                self._pooled[prompt] += row

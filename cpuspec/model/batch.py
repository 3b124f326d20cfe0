"""What goes into a forward and what comes out. Prefill, decode and verify are the same ragged batch of rows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cpuspec.config import ModelConfig
from cpuspec.errors import BackendError, CacheError

if TYPE_CHECKING:
    from cpuspec.model.cache import KVCache

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

_INT32 = np.dtype(np.int32)


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of B sequences, in order. Row `t` of sequence `b` is appended at cache index `lengths[slot] + t - q_start[b]`."""

    tokens: I32  # [T]
    positions: I32  # [T] rotary position; depth for tree nodes
    slots: I32  # [B] cache slot of each sequence
    q_start: I32  # [B+1] rows of sequence b are q_start[b]:q_start[b+1]
    parents: I32 | None = None  # [T] row (of this batch) of the parent, -1 = the cached prefix; None = causal chain
    logit_rows: I32 | None = None  # rows to project to logits; None = all
    hidden_layers: tuple[int, ...] = ()  # layers whose outputs a proposer asked for

    def check(self, config: ModelConfig, cache: "KVCache", max_rows: int) -> None:
        """Raise BackendError or CacheError unless every index is in range: compiled code reads what it is told to."""
        arrays = {"tokens": self.tokens, "positions": self.positions, "slots": self.slots, "q_start": self.q_start}
        if self.parents is not None:
            arrays["parents"] = self.parents
        if self.logit_rows is not None:
            arrays["logit_rows"] = self.logit_rows
        for name, array in arrays.items():
            if array.dtype != _INT32 or array.ndim != 1 or not array.flags.c_contiguous:
                raise BackendError(f"{name} must be a contiguous int32 vector, got {array.dtype} of shape {array.shape}")
        num_rows, num_seqs = len(self.tokens), len(self.slots)
        if not 1 <= num_rows <= max_rows:
            raise BackendError(f"a forward takes 1 to {max_rows} rows, got {num_rows}; feed longer prefills in chunks")
        if len(self.positions) != num_rows or (self.parents is not None and len(self.parents) != num_rows):
            raise BackendError(f"positions and parents must have one entry for each of the {num_rows} rows")
        if self.logit_rows is not None and len(self.logit_rows) > max_rows:
            raise BackendError(f"a forward projects at most {max_rows} rows to logits, got {len(self.logit_rows)}")
        slots, starts = self.slots.tolist(), self.q_start.tolist()
        if len(starts) != num_seqs + 1 or starts[0] != 0 or starts[-1] != num_rows or len(set(slots)) != num_seqs:
            raise BackendError(f"q_start {starts} does not split {num_rows} rows over {num_seqs} distinct slots {slots}")
        for slot, start, end in zip(slots, starts, starts[1:], strict=False):
            if not 0 <= slot < cache.num_slots:
                raise CacheError(f"slot {slot} does not exist; the cache has {cache.num_slots}")
            if end <= start:
                raise BackendError(f"every sequence of a batch needs at least one row, q_start is {starts}")
            if cache.lengths[slot] + end - start > cache.capacity:
                held = f"slot {slot} holds {cache.lengths[slot]} of {cache.capacity} tokens"
                raise CacheError(f"{held}; {end - start} more do not fit")
            if self.parents is not None:
                parents, rows = self.parents[start:end], np.arange(start, end)
                if not ((parents == -1) | ((parents >= start) & (parents < rows))).all():
                    raise BackendError("a parent must be -1 or an earlier row of the same sequence")
        for name, limit in (("tokens", config.vocab_size), ("positions", 1 << 26), ("logit_rows", num_rows)):
            # Of a few numbers, Python finds the extremes in a tenth of the time.
            values = arrays[name].tolist() if name in arrays else []
            if values and (min(values) < 0 or max(values) >= limit):
                raise BackendError(f"{name} must be in [0, {limit}), got {min(values)} to {max(values)}")
        if self.hidden_layers and not 0 <= min(self.hidden_layers) <= max(self.hidden_layers) < config.num_layers:
            raise BackendError(f"hidden_layers must be in [0, {config.num_layers}), got {self.hidden_layers}")


@dataclass(frozen=True)
class ForwardOutput:
    """Logits of the asked rows and outputs of the asked layers. The arrays belong to the caller."""

    logits: F32  # [len(logit_rows), V]
    hidden: tuple[F32, ...] = ()  # [T, C] for each requested layer
    best: list[int] | None = None  # [len(logit_rows)] `sampling.argmax`, -1 for what it refuses; None: the backend did not look


def visible(batch: ForwardBatch, sequence: int, prefix: int) -> NDArray[np.bool_]:
    """Which cache indices each row of a sequence attends to: the prefix, its ancestors and itself, [rows, prefix + rows]."""
    start, end = batch.q_start[sequence], batch.q_start[sequence + 1]
    mask = np.zeros((end - start, prefix + end - start), np.bool_)
    mask[:, :prefix] = True
    for row in range(end - start):
        parent = row - 1 if batch.parents is None else batch.parents[start + row] - start
        if parent >= 0:
            mask[row, prefix:] = mask[parent, prefix:]
        mask[row, prefix + row] = True
    return mask

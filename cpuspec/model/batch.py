"""What goes into a forward and what comes out. Prefill, decode and verify are the same ragged batch of rows."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


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


@dataclass(frozen=True)
class ForwardOutput:
    """Logits of the asked rows and outputs of the asked layers. The arrays belong to the caller."""

    logits: F32  # [len(logit_rows), V]
    hidden: tuple[F32, ...]  # [T, C] for each requested layer

"""The input and the output of a forward. Prefill, decoding and verification are the same ragged batch of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.adapters import AdapterSet
from cpuspec.config import ModelConfig
from cpuspec.errors import BackendError, CacheError

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

MAX_POSITIONS = 1 << 26


class ForwardStoppedError(Exception):
    """The forward ended before its end, as `backends.stop_forward` asked. The cache is as it was before."""


class Slots(Protocol):
    """The facts of a cache that a batch is checked against (`model.cache.KVCache`)."""

    num_slots: int
    capacity: int
    lengths: list[int]


@dataclass(slots=True)
class Lists:
    """The numbers of a batch, as `ForwardBatch` has them, in lists."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    q_start: list[int]
    parents: list[int] | None
    logit_rows: list[int] | None


_LISTED = frozenset({list, type(None)})


class ForwardBatch:
    """Rows of B sequences, in order. Row `t` of sequence `b` is appended at cache index `lengths[slot] + t - q_start[b]`.

    Made of lists of ints or int32 vectors, and read as either: as `lists`, or as int32 arrays, which are made when first asked
    for. Of a few numbers numpy makes an array in the time in which Python checks them all.
    """

    def __init__(
        self,
        tokens: list[int] | I32,
        positions: list[int] | I32,
        slots: list[int] | I32,
        q_start: list[int] | I32,
        parents: list[int] | I32 | None = None,
        logit_rows: list[int] | I32 | None = None,
        hidden_layers: tuple[int, ...] = (),
        hidden: F32 | None = None,
        both_ways: bool = False,
        of_prompts: bool = False,
        stops_early: bool = False,
        adapters: Sequence[AdapterSet] = (),
        sees_rows: bool = True,
        extra_steps: int = 0,
        ends: Sequence[int] = (),
    ) -> None:
        """As the properties below. Raises BackendError for other arrays.

        hidden_layers: layers whose outputs a proposer asked for. hidden: [T, C] hidden states that the rows begin with, where the
        model takes them (`ModelConfig.takes_hidden`). both_ways: whether a row sees the rows behind it in its sequence, too.
        of_prompts: whether the rows are tokens of prompts, which a backend may compute in an arithmetic of their own.
        stops_early: whether `backends.stop_forward` ends it. adapters: of each sequence; none at all where no sequence has some.
        sees_rows: whether a row sees itself and those before it, and not only what its slot held before.
        extra_steps: where each sequence has one row: how many forwards may follow at once, each over the rows' likeliest tokens, if
        the backend can (`ForwardOutput.extra_tokens`); none behind one of the tokens `ends`, and none once `stop_forward` was
        called.
        """
        fields: Any = (tokens, positions, slots, q_start, parents, logit_rows)
        if not _LISTED.issuperset(map(type, fields)):
            fields = tuple(map(_listed, fields))
        self.lists = Lists(*fields)
        self.hidden_layers = hidden_layers
        self.hidden = hidden
        self.both_ways = both_ways
        self.of_prompts = of_prompts
        self.stops_early = stops_early
        self.adapters = adapters if any(adapters) else ()
        self.sees_rows = sees_rows
        self.extra_steps = extra_steps
        self.ends = ends

    @cached_property
    def tokens(self) -> I32:
        """[T]"""
        return np.array(self.lists.tokens, np.int32)

    @cached_property
    def positions(self) -> I32:
        """[T] rotary position; depth for tree nodes."""
        return np.array(self.lists.positions, np.int32)

    @cached_property
    def slots(self) -> I32:
        """[B] cache slot of each sequence."""
        return np.array(self.lists.slots, np.int32)

    @cached_property
    def q_start(self) -> I32:
        """[B+1] rows of sequence b are q_start[b]:q_start[b+1]."""
        return np.array(self.lists.q_start, np.int32)

    @cached_property
    def parents(self) -> I32 | None:
        """[T] row (of this batch) of the parent, -1 = the cached prefix; None = causal chain."""
        return None if self.lists.parents is None else np.array(self.lists.parents, np.int32)

    @cached_property
    def logit_rows(self) -> I32 | None:
        """Rows to project to logits; None = all."""
        return None if self.lists.logit_rows is None else np.array(self.lists.logit_rows, np.int32)

    def check(self, config: ModelConfig, cache: Slots, max_rows: int, injects: bool = False) -> None:
        """Raise BackendError or CacheError unless every index is in range: compiled code reads what it is told to.

        injects: whether hidden states are to be injected (`model.transformer.inject`).
        """
        lists = self.lists
        tokens, positions, slots, starts = lists.tokens, lists.positions, lists.slots, lists.q_start
        parents, logit_rows = lists.parents, lists.logit_rows
        num_rows, num_seqs = len(tokens), len(slots)
        if not 1 <= num_rows <= max_rows:
            raise BackendError(f"a forward takes 1 to {max_rows} rows, got {num_rows}; feed longer prefills in chunks")
        if len(positions) != num_rows or (parents is not None and len(parents) != num_rows):
            raise BackendError(f"positions and parents must have one entry for each of the {num_rows} rows")
        if logit_rows is not None and len(logit_rows) > max_rows:
            raise BackendError(f"a forward projects at most {max_rows} rows to logits, got {len(logit_rows)}")
        if len(starts) != num_seqs + 1 or starts[0] != 0 or starts[-1] != num_rows or len(set(slots)) != num_seqs:
            raise BackendError(f"q_start {starts} does not split {num_rows} rows over {num_seqs} distinct slots {slots}")
        for b, slot in enumerate(slots):
            start, end = starts[b], starts[b + 1]
            if not 0 <= slot < cache.num_slots:
                raise CacheError(f"slot {slot} does not exist; the cache has {cache.num_slots}")
            if end <= start:
                raise BackendError(f"every sequence of a batch needs at least one row, q_start is {starts}")
            held = cache.lengths[slot]
            if not held and not self.sees_rows:
                raise BackendError(f"rows that see only what their slot held before need some there, and slot {slot} is empty")
            if held + (more := end - start + self.extra_steps) > cache.capacity:
                raise CacheError(f"slot {slot} holds {held} of {cache.capacity} tokens; {more} more do not fit")
            if parents is not None and not _hangs_together(parents, start, end):
                raise BackendError("a parent must be -1 or an earlier row of the same sequence")
        if min(tokens) < 0 or max(tokens) >= config.vocab_size:
            raise _out_of_range("tokens", tokens, config.vocab_size)
        if min(positions) < 0 or max(positions) >= MAX_POSITIONS:
            raise _out_of_range("positions", positions, MAX_POSITIONS)
        if logit_rows and (min(logit_rows) < 0 or max(logit_rows) >= num_rows):
            raise _out_of_range("logit_rows", logit_rows, num_rows)
        takes_hidden = injects or config.takes_hidden
        if self.hidden is not None and not takes_hidden:
            raise BackendError("this model takes no hidden states")
        if (self.both_ways or not self.sees_rows) and parents is not None:
            raise BackendError("rows of a tree see their ancestors; rows that see each other, or none, have no parents")
        if config.is_recurrent and (self.both_ways or parents is not None):
            raise BackendError(
                "a recurrent layer reads rows one after another; a tree, or rows that see each other, are not possible"
            )
        if self.extra_steps and not (num_rows == num_seqs and parents is None and logit_rows in (None, list(range(num_rows)))):
            raise BackendError("forwards follow at once where every sequence has one row, and its logits")
        if self.of_prompts and parents is not None:
            raise BackendError("rows of a tree are drafts, and no tokens of prompts")
        if takes_hidden:
            wanted, given = (num_rows, config.injected_size if injects else config.state_size), self.hidden
            if given is None or given.dtype != np.float32 or given.shape != wanted:
                got = None if given is None else f"{given.dtype} {given.shape}"
                raise BackendError(f"this model takes hidden states float32 {wanted}, got {got}")
        if self.adapters and len(self.adapters) != num_seqs:
            raise BackendError(f"adapters are given for each of {num_seqs} sequences or for none, got {len(self.adapters)}")
        if self.hidden_layers and not 0 <= min(self.hidden_layers) <= max(self.hidden_layers) < config.num_layers:
            raise BackendError(f"hidden_layers must be in [0, {config.num_layers}), got {self.hidden_layers}")


def _hangs_together(parents: list[int], start: int, end: int) -> bool:
    """Apart: an expression that sees a local variable makes a function, in every step."""
    return all(p == -1 or start <= p < row for row, p in enumerate(parents[start:end], start))


def _out_of_range(name: str, numbers: list[int], limit: int) -> BackendError:
    return BackendError(f"{name} must be in [0, {limit}), got {min(numbers)} to {max(numbers)}")


def _listed(numbers: list[int] | I32 | None) -> list[int] | None:
    if numbers is None or isinstance(numbers, list):
        return numbers
    if numbers.dtype != np.int32 or numbers.ndim != 1:
        raise BackendError(f"a batch is made of lists or int32 vectors, got {numbers.dtype} of shape {numbers.shape}")
    listed: list[int] = numbers.tolist()
    return listed


@dataclass(slots=True)
class ForwardOutput:
    """Logits of the asked rows and outputs of the asked layers.

    A backend may write into these arrays again once nobody holds them or a view of them.
    """

    logits: F32  # [len(logit_rows), V]
    hidden: tuple[F32, ...] = ()  # [T, C] for each requested layer
    best: list[int] | None = None  # [len(logit_rows)] `sampling.argmax`, -1 for what it refuses; None: the backend did not look
    weight_bytes: int = 0  # of weights that the forwards read, each once; the embedding counts where it is the output matrix
    extra_tokens: list[list[int]] | None = None  # [B] where forwards followed at once: the tokens that all but the last have chosen


def visible(batch: ForwardBatch, sequence: int, prefix: int, window: int | None = None) -> NDArray[np.bool_]:
    """Which cache indices each row of a sequence attends to, [rows, prefix + rows].

    The path of a row is the prefix, its ancestors and the row itself, or all rows where rows see those behind them, or the prefix
    alone. A row sees the last `window` tokens of its path; None means all.
    """
    start, end = batch.q_start[sequence], batch.q_start[sequence + 1]
    own = np.ones((end - start, end - start), np.bool_) if batch.both_ways else np.tri(end - start, dtype=np.bool_)
    own &= batch.sees_rows
    if batch.parents is not None:
        own = np.eye(end - start, dtype=np.bool_)
        for row, parent in enumerate(batch.parents[start:end] - start):
            if parent >= 0:
                own[row] |= own[parent]
    mask = np.concatenate([np.ones((end - start, prefix), np.bool_), own], axis=1)
    if window is not None:
        places = np.concatenate([np.arange(1 - prefix, 1), own.sum(axis=1)])  # along any path; the prefix ends at 0
        mask &= places[prefix:, None] - places < window
    return mask

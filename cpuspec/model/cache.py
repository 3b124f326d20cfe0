"""The KV cache as the engine sees it: slots, one length per slot for all layers. Rollback is setting a length.

The backend owns the storage of a slot; this file owns lengths and limits. Keys and values can be truncated anywhere. A recurrent
layer's state covers some first tokens of the slot, and the inputs of later ones are kept as rows: it can be truncated among these.
Likewise a layer with a window may keep only its last rows, which are then its state. A slot that is truncated further goes back to
a length at which a snapshot of the states was taken, or to 0. `truncate`, `keep_path` and `copy` therefore return the length that
the slot really holds, and the caller feeds the rest again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cpuspec.errors import CacheError
from cpuspec.formats.tensor import U8
from cpuspec.model.batch import I32, ForwardBatch

# Of a recurrent layer, how many of the last rows before a forward can be truncated afterwards, besides the forward's own: what a
# draft model that drafts token by token takes back. Each costs every later forward a replay of its row (`model.recurrence`).
KEPT_ROWS = 8

_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class BlockAccess:
    """How blocks of `size` cache indices leave a storage and come back, bit for bit, for a backend whose rows are invariant.

    step: a part of a block is its first n indices; it is copied with those that fill its last `step`, which divides `size`.
    views(storage, number): block `number`, a writable U8 [parts, size * k] for each array; its indices 0..n-1 are the first n * k
    bytes of each part, with one k for an array. Storages have room for whole blocks.
    """

    size: int
    step: int
    views: Callable[[Any, int], tuple[U8, ...]]


@dataclass(frozen=True)
class SlotBytes:
    """Bytes of a slot that holds tokens. per_token: of what is kept of every token; per_slot: of states, for any number of tokens.

    windows: for layers that keep only their last rows, the most rows, and the bytes of a row.
    """

    per_token: int
    per_slot: int = 0
    windows: tuple[tuple[int, int], ...] = ()

    def of(self, length: int) -> int:
        """Bytes for `length` tokens."""
        rows = sum(min(length, most) * size for most, size in self.windows)
        return length * self.per_token + rows + (self.per_slot if length else 0)


@dataclass(frozen=True)
class StateAccess:
    """How the states of layers that do not keep rows of all tokens leave a storage and come back, bit for bit.

    reach(storage, length): the longest length, up to `length`, whose states the storage has. A forward forgets the states of
    lengths beyond its slot's.
    save(storage, length, states): write the states after `length` tokens, which the storage reaches, to U8 [num_bytes]. They
    depend only on the tokens. restore(storage, states, length): replace the storage's states by these.
    num_bytes: of states after many tokens. bytes_at: of states after a number of tokens, or an array of numbers; None if they are
    always num_bytes. apart: tokens between snapshots of a long prompt. passed: rows after a length that a forward may have, and
    still reach it. waits: tokens that may follow before the next forward forgets a state.
    """

    num_bytes: int
    reach: Callable[[Any, int], int]
    save: Callable[[Any, int, U8], None]
    restore: Callable[[Any, U8, int], None]
    bytes_at: Callable[[Any], Any] | None = None
    apart: int = 1024
    passed: int = KEPT_ROWS
    waits: int = 0

    def size(self, length: int) -> int:
        """Bytes of the states after `length` tokens."""
        return int(self.bytes_at(length)) if self.bytes_at else self.num_bytes

    def sizes(self, capacity: int) -> list[int]:
        """The sizes that occur after 1 to `capacity` tokens."""
        every = self.bytes_at(np.arange(1, capacity + 1)) if self.bytes_at else self.num_bytes
        return [int(size) for size in np.unique(every)]


class KVCache:
    """Keys and values of up to `num_slots` sequences of at most `capacity` tokens each.

    A slot's storage is made at its first use. Operating systems hand out its pages when they are written, so a long capacity costs
    memory only where it is filled. The backend gives the functions that touch storages:

    copy_rows(storage, rows, first): copy what the rising cache indices `rows` hold, bit for bit, to `first` and following.
    copy_prefix(source, storage, length): copy the keys and values of the first `length` indices of another storage, bit for bit.
    states: None where nothing but keys and values is stored, which cover any length.
    blocks: for a cache whose contents may be kept outside of its slots; None where they may not.
    identity: of weights, arithmetic and layout: where it is the same, in whatever process, the same tokens give the same bytes.
    sizes: of slots; by default bytes_per_token for each token, and bytes_per_slot. Blocks have what is kept of every token.
    """

    def __init__(
        self,
        num_slots: int,
        capacity: int,
        new_storage: Callable[[], Any],
        copy_rows: Callable[[Any, I32, int], None],
        copy_prefix: Callable[[Any, Any, int], None],
        bytes_per_token: int,
        blocks: BlockAccess | None = None,
        identity: str = "",
        states: StateAccess | None = None,
        bytes_per_slot: int = 0,
        sizes: SlotBytes | None = None,
    ) -> None:
        if num_slots < 1 or capacity < 1:
            raise CacheError(f"a cache needs at least one slot and one token, got {num_slots} slots of {capacity} tokens")
        self.num_slots = num_slots
        self.capacity = capacity
        self.sizes = sizes or SlotBytes(bytes_per_token, bytes_per_slot)
        self.bytes_per_token = self.sizes.per_token
        self.lengths = [0] * num_slots  # tokens that each slot holds
        self._longest = [0] * num_slots  # the most tokens that each slot held when it was shortened
        self._snapshots: list[dict[int, U8]] = [{} for _ in range(num_slots)]  # of each slot, by length, rising
        self.blocks = blocks
        self.identity = identity
        self.bytes_per_slot = self.sizes.per_slot
        self._new_storage = new_storage
        self._copy_rows = copy_rows
        self._copy_prefix = copy_prefix
        self.states = states
        self._storage: list[Any] = [None] * num_slots

    def storage(self, slot: int) -> Any:
        """The backend's storage of `slot`, made when it is first asked for. Raises CacheError where there is no memory for it."""
        if self._storage[slot] is None:
            try:
                self._storage[slot] = self._new_storage()
            except MemoryError:
                raise CacheError(
                    f"no memory for a cache slot of {self.capacity} tokens ({self.bytes_of(self.capacity)} bytes); "
                    "ask for a smaller context_length or fewer sequences"
                ) from None
        return self._storage[slot]

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot's recurrent states, which a forward reads."""
        return self.states.num_bytes if self.states else 0

    @property
    def used_bytes(self) -> int:
        """Bytes of keys, values and states that were written so far; forgotten ones count as well."""
        return sum(map(self.slot_bytes, range(self.num_slots)))

    def slot_bytes(self, slot: int) -> int:
        """Bytes of keys, values and states that were written to a slot; forgotten ones count as well."""
        return self.bytes_of(max(self.lengths[slot], self._longest[slot]))

    def bytes_of(self, length: int) -> int:
        """Bytes of a slot that holds `length` tokens."""
        return self.sizes.of(length)

    def reachable(self, slot: int, length: int) -> int:
        """The longest length, up to `length`, that the slot can be truncated or copied to."""
        storage = self._storage[slot]
        if self.states is None or storage is None:
            return length
        reached = self.states.reach(storage, length)
        return max([reached, *(taken for taken in self._snapshots[slot] if taken <= length)])

    def snapshots(self, slot: int) -> dict[int, U8]:
        """The snapshots of a slot's first tokens, by their number, rising. Nobody writes to them."""
        return self._snapshots[slot]

    def take_snapshot(self, slot: int, length: int, beside: U8 = _NOTHING) -> bool:
        """Keep the states after the first `length` tokens, if the slot can still be truncated to them; returns whether it is there.

        beside: bytes to keep after them. The snapshot stays until the slot is truncated below or dropped, or something forgets it.
        """
        assert self.states, "asked of caches with states only"
        if length in self._snapshots[slot]:
            return True
        if not 0 < length <= self.lengths[slot] or self.states.reach(self.storage(slot), length) < length:
            return False
        size = self.states.size(length)
        taken = np.empty(size + len(beside), np.uint8)
        self.states.save(self.storage(slot), length, taken[:size])
        taken[size:] = beside
        self._snapshots[slot] = dict(sorted([*self._snapshots[slot].items(), (length, taken)]))
        return True

    def forget_snapshot(self, slot: int, length: int) -> None:
        """Forget a snapshot of a slot."""
        del self._snapshots[slot][length]

    def restore_snapshot(self, slot: int, length: int, taken: U8) -> None:
        """Put a snapshot of `length` tokens into a slot that holds their keys and values. Raises CacheError if it does not fit."""
        assert self.states, "asked of caches with states only"
        size = self.states.size(length)
        if taken.dtype != np.uint8 or taken.ndim != 1 or len(taken) < size or length != self.lengths[slot]:
            raise CacheError(
                f"slot {slot} holds {self.lengths[slot]} tokens and takes uint8 [{size}] or more, "
                f"got {taken.dtype} {taken.shape} of {length} tokens"
            )
        self.states.restore(self.storage(slot), taken[:size], length)
        self._snapshots[slot] = {length: taken}

    def truncate(self, slot: int, length: int) -> int:
        """Forget every token of `slot` from `length` on. O(1): rows stay and are overwritten later.

        Returns the length that the slot now holds, as `reachable` tells.
        Raises CacheError if `length` exceeds the slot's length or is negative.
        """
        self._check_slot(slot)
        held = self.lengths[slot]
        if not 0 <= length <= held:
            raise CacheError(f"cannot truncate slot {slot} to {length} tokens: it holds {held}")
        return self._shorten(slot, length)

    def advance(self, batch: ForwardBatch, times: int = 1) -> None:
        """Add a batch's rows to the lengths of its slots: the backend has appended them. times: forwards of as many rows."""
        starts = batch.lists.q_start
        for b, slot in enumerate(batch.lists.slots):
            self.lengths[slot] += times * (starts[b + 1] - starts[b])

    def keep_path(self, slot: int, length: int, path: I32) -> int:
        """Of the tree whose nodes follow the first `length` tokens of `slot`, keep those on `path` (rising), one after the other.

        Returns the length that the slot now holds, as `truncate` does.
        Raises CacheError if the path does not rise or leaves the slot.
        """
        self._check_slot(slot)
        num_nodes = self.lengths[slot] - length
        if length < 0 or any(a >= b for a, b in pairwise([-1, *path.tolist(), num_nodes])):
            raise CacheError(f"path {path.tolist()} does not rise within the {num_nodes} tokens after {length} in slot {slot}")
        moved = path[path != np.arange(len(path))]
        if len(moved):
            self._copy_rows(self.storage(slot), length + moved, length + len(path) - len(moved))
        return self._shorten(slot, length + len(path))

    def copy(self, source: int, slot: int, length: int) -> int:
        """Replace what `slot` holds by the first `length` tokens of the slot `source`.

        Returns the length that the slot now holds, as `truncate` does. Raises CacheError if `source` holds fewer tokens.
        """
        self._check_slot(source)
        self._check_slot(slot)
        if source == slot or not 0 <= length <= self.lengths[source]:
            raise CacheError(f"cannot copy {length} tokens from slot {source}, which holds {self.lengths[source]}, to slot {slot}")
        self._shorten(slot, 0)
        length = self.reachable(source, length)
        if length:
            self._copy_prefix(self.storage(source), self.storage(slot), length)
        self.lengths[slot] = length
        if length and self.states:
            self.take_snapshot(source, length)
            self._snapshots[slot] = {taken: one for taken, one in self._snapshots[source].items() if taken <= length}
            self.states.restore(self.storage(slot), self._snapshots[slot][length][: self.states.size(length)], length)
        return length

    def block_shape(self, length: int) -> tuple[int, int]:
        """The shape of the first `length` indices of a block, U8 [steps, bytes of a step]."""
        assert self.blocks, "asked of caches that have blocks only"
        return -(-length // self.blocks.step), self.blocks.step * self.bytes_per_token

    def read_block(self, slot: int, number: int, length: int) -> U8:
        """A copy of the first `length` indices of a block, in `block_shape`."""
        assert self.blocks, "asked of caches that have blocks only"
        if number * self.blocks.size + length > self.lengths[slot]:
            raise CacheError(f"cannot read {length} tokens of block {number} of slot {slot}: it holds {self.lengths[slot]} tokens")
        block, at = np.empty(self.block_shape(length), np.uint8), 0
        for view in self._steps(slot, number, len(block)):
            end = at + view.shape[1] * view.shape[2]
            block[:, at:end].reshape(view.shape)[:] = view
            at = end
        return block

    def append_block(self, slot: int, block: U8, length: int) -> None:
        """Append the first `length` indices of what `read_block` returned to a slot that holds whole blocks so far."""
        assert self.blocks, "asked of caches that have blocks only"
        number, begun = divmod(self.lengths[slot], self.blocks.size)
        assert not begun, "blocks follow whole blocks"
        wanted = self.block_shape(length)
        if block.dtype != np.uint8 or block.ndim != 2 or block.shape[1] != wanted[1] or len(block) < wanted[0]:
            raise CacheError(f"{length} tokens of a block are uint8 {wanted} or more, got {block.dtype} {block.shape}")
        if self.lengths[slot] + length > self.capacity:
            raise CacheError(f"slot {slot} holds {self.lengths[slot]} of {self.capacity} tokens; {length} more do not fit")
        at = 0
        for view in self._steps(slot, number, wanted[0]):
            end = at + view.shape[1] * view.shape[2]
            view[:] = block[: wanted[0], at:end].reshape(view.shape)
            at = end
        self.lengths[slot] += length

    def append_from(self, source: int, slot: int, length: int) -> None:
        """Append what the slot `source` has after the whole blocks that `slot` holds, up to `length` tokens in all, bit for bit."""
        assert self.blocks, "asked of caches that have blocks only"
        begin = self.lengths[slot]
        assert not begin % self.blocks.size, "blocks follow whole blocks"
        assert begin < length <= self.lengths[source], "the source has more"
        for start in range(begin, length, self.blocks.size):
            steps, _ = self.block_shape(min(length - start, self.blocks.size))
            views = zip(*(self._steps(one, start // self.blocks.size, steps) for one in (slot, source)), strict=True)
            for ours, theirs in views:
                ours[:] = theirs
        self.lengths[slot] = length

    def _steps(self, slot: int, number: int, steps: int) -> list[U8]:
        """The first steps of a block where they lie, [steps, parts, bytes] of each array."""
        assert self.blocks, "asked of caches that have blocks only"
        views = self.blocks.views(self.storage(slot), number)
        num_steps = self.blocks.size // self.blocks.step
        return [view.reshape(len(view), num_steps, -1)[:, :steps].swapaxes(0, 1) for view in views]

    def drop(self, slot: int) -> None:
        """Forget everything that a slot holds, and give its memory back."""
        self._check_slot(slot)
        self.lengths[slot] = self._longest[slot] = 0
        self._storage[slot], self._snapshots[slot] = None, {}

    def _shorten(self, slot: int, length: int) -> int:
        self._longest[slot] = max(self._longest[slot], self.lengths[slot])
        self.lengths[slot] = length = self.reachable(slot, length)
        if self.states and self._snapshots[slot]:
            held = self._snapshots[slot]
            if length in held and self.states.reach(self.storage(slot), length) < length:
                self.states.restore(self.storage(slot), held[length][: self.states.size(length)], length)
            self._snapshots[slot] = {taken: one for taken, one in held.items() if taken <= length}
        return length

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise CacheError(f"slot {slot} does not exist; the cache has {self.num_slots}")

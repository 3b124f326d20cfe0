"""The KV cache as the engine sees it: slots, one length per slot for all layers. Rollback is setting a length.

What a slot's storage looks like is the backend's business; this file owns lengths and limits.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from cpuspec.errors import CacheError
from cpuspec.model.batch import I32, ForwardBatch


class KVCache:
    """Keys and values of up to `num_slots` sequences of at most `capacity` tokens each.

    Storage is made at the first use of a slot. Operating systems hand out its pages when they are written, so a long
    capacity costs memory only where it is filled. The backend says how to make a slot's storage, and how to copy in it:
    `copy_rows(storage, rows, first)` puts keys and values of the cache indices `rows`, bit for bit, at `first` and following.
    """

    def __init__(
        self,
        num_slots: int,
        capacity: int,
        new_storage: Callable[[], Any],
        copy_rows: Callable[[Any, I32, int], None],
        bytes_per_token: int,
    ) -> None:
        if num_slots < 1 or capacity < 1:
            raise CacheError(f"a cache needs at least one slot and one token, got {num_slots} slots of {capacity} tokens")
        self.num_slots = num_slots
        self.capacity = capacity
        self.bytes_per_token = bytes_per_token
        self.lengths = [0] * num_slots  # tokens that each slot holds
        self._longest = [0] * num_slots  # the most that each slot held when it was shortened
        self._new_storage = new_storage
        self._copy_rows = copy_rows
        self._storage: list[Any] = [None] * num_slots

    def storage(self, slot: int) -> Any:
        """The backend's storage of `slot`, made when first asked for."""
        if self._storage[slot] is None:
            try:
                self._storage[slot] = self._new_storage()
            except MemoryError:
                raise CacheError(
                    f"no memory for a cache slot of {self.capacity} tokens ({self.capacity * self.bytes_per_token} bytes); "
                    "ask for a smaller context_length or fewer sequences"
                ) from None
        return self._storage[slot]

    @property
    def used_bytes(self) -> int:
        """Bytes of keys and values that were written so far, those that are forgotten included."""
        return sum(map(max, self.lengths, self._longest)) * self.bytes_per_token

    def truncate(self, slot: int, length: int) -> None:
        """Forget every token of `slot` from `length` on. O(1): rows stay and are overwritten later.

        Raises CacheError if `length` exceeds the slot's length or is negative.
        """
        self._check_slot(slot)
        held = self.lengths[slot]
        if not 0 <= length <= held:
            raise CacheError(f"cannot truncate slot {slot} to {length} tokens: it holds {held}")
        self._shorten(slot, length)

    def advance(self, batch: ForwardBatch) -> None:
        """Count a batch's rows to what the slots hold: they were appended."""
        starts = batch.lists.q_start
        for b, slot in enumerate(batch.lists.slots):
            self.lengths[slot] += starts[b + 1] - starts[b]

    def keep_path(self, slot: int, length: int, path: I32) -> None:
        """Of the tree whose nodes follow the first `length` tokens of `slot`, keep those on `path` (rising), one after the other.

        Raises CacheError if the path does not rise or leaves the slot.
        """
        self._check_slot(slot)
        num_nodes = self.lengths[slot] - length
        if length < 0 or any(a >= b for a, b in pairwise([-1, *path.tolist(), num_nodes])):
            raise CacheError(f"path {path.tolist()} does not rise within the {num_nodes} tokens after {length} in slot {slot}")
        moved = path[path != np.arange(len(path))]
        if len(moved):
            self._copy_rows(self.storage(slot), length + moved, length + len(path) - len(moved))
        self._shorten(slot, length + len(path))

    def _shorten(self, slot: int, length: int) -> None:
        self._longest[slot] = max(self._longest[slot], self.lengths[slot])
        self.lengths[slot] = length

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise CacheError(f"slot {slot} does not exist; the cache has {self.num_slots}")

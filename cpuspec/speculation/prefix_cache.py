"""The prefix cache of one model: what finished sequences leave for later ones that begin alike, within a limit of memory.

A finished sequence leaves its tokens in its slot. When the slot is needed or the limit is reached, they move to a `PrefixStore`,
and from there to the disk. The context knows which tokens a slot holds; the prefix cache tells it to save or to forget them.
"""

import weakref
from typing import Protocol

from cpuspec.metrics import PrefixStats
from cpuspec.model.cache import KVCache
from cpuspec.speculation.prefix_queue import PrefixQueue
from cpuspec.speculation.prefix_store import PrefixStore

_MANY = 32  # from so many tokens on, copying or storing them, or waiting a step for them, is quicker than computing them


class SlotOwner(Protocol):
    """A context, as its prefix cache sees it."""

    def new_store(self, queue: PrefixQueue | None) -> PrefixStore:
        """An empty store for the tokens of its slots."""
        ...

    def save_slot(self, slot: int) -> None:
        """Copy what a free slot holds to the store, if it is worth that."""
        ...

    def clear_slot(self, slot: int) -> None:
        """Know no tokens of a free slot any more."""
        ...


class PrefixCache:
    """Decides which tokens of finished sequences leave the memory first.

    free: slots without a sequence, the least recently used first. shares: whether sequences may use what was computed for others.
    many: from so many tokens on a copy is worth it. store: for tokens outside of slots; None where they stay in slots. max_bytes:
    that finished sequences may leave in memory; None for no limit. num_prompt_tokens: that sequences came with;
    num_cached_tokens: those of them that a slot or the store supplied.
    """

    def __init__(self, owner: SlotOwner | None, cache: KVCache, row_invariant: bool) -> None:
        """owner: None for a cache that never holds tokens."""
        self.free = list(range(cache.num_slots))
        self.shares, self.many = True, _MANY
        self.store: PrefixStore | None = None
        self.max_bytes: int | None = None
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.used = [0] * cache.num_slots  # when each slot was released, by `tick`
        # A weak reference: a cycle would hold the memory of a model that nobody uses any more until the garbage collector runs.
        self._owner = weakref.ref(owner) if owner else lambda: None
        self._cache, self._row_invariant = cache, row_invariant
        self._allowed_bytes: int | None = None  # as `keep` said
        self._clock = 0

    def keep(self, max_bytes: int | None, queue: PrefixQueue | None = None) -> None:
        """Set `max_bytes`. Call it before the first sequence.

        queue: writes what does not fit into memory, and what `spill` sends, to a directory; None without one.
        A backend that promises no row invariance shares nothing between sequences if `max_bytes` is 0.
        """
        self.shares = self._row_invariant or max_bytes != 0
        self.max_bytes = self._allowed_bytes = max_bytes
        if (owner := self._owner()) and self._cache.blocks and max_bytes is not None and (max_bytes or queue):
            self.store = owner.new_store(queue)

    def limit(self, max_bytes: int) -> None:
        """Have finished sequences leave no more than this from now on, and no more than `keep` said."""
        if self._allowed_bytes is not None:
            self.max_bytes = min(self._allowed_bytes, max_bytes)
            self.tidy()

    def tick(self) -> int:
        """The next time of use; times rise."""
        self._clock += 1
        return self._clock

    def release(self, slot: int) -> None:
        """Note that a slot's sequence has finished."""
        self.used[slot] = self.tick()
        self.free.append(slot)

    def give_up(self, slot: int) -> None:
        """Move what a free slot holds to the store, and give its memory back."""
        if owner := self._owner():
            owner.save_slot(slot)
        self._drop(slot)

    def tidy(self) -> None:
        """Bring what finished sequences have left under its limit: what was used longest ago leaves first."""
        while self.max_bytes is not None and self.shares and self.kept_bytes > self.max_bytes:
            slot = next((slot for slot in self.free if self._cache.slot_bytes(slot)), None)
            oldest = self.store.oldest if self.store else None
            if slot is not None and (oldest is None or self.used[slot] <= oldest):
                self.give_up(slot)
            elif self.store and oldest is not None:
                self.store.evict()
            elif snapshots := [(length, slot) for slot in range(self._cache.num_slots) for length in self._cache.snapshots(slot)]:
                length, slot = min(snapshots)
                self._cache.forget_snapshot(slot, length)
            else:
                return

    def forget(self) -> None:
        """Forget what finished sequences have left, on the disk, too, as soon as the directory's queue is empty."""
        for slot in self.free:
            self._drop(slot)
        if self.store:
            self.store.clear()

    def spill(self) -> None:
        """Have what finished sequences have left written, where there is a directory for it. For the end of the process."""
        if self.store and self.store.queue:
            for slot in self.free:
                self.give_up(slot)
            self.store.spill()

    def stats(self, name: str) -> PrefixStats:
        """The figures; `name` says which model it is."""
        stats = PrefixStats(name, self.num_prompt_tokens, self.num_cached_tokens, self.kept_bytes, self.max_bytes)
        return self.store.completed(stats) if self.store else stats

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys, values and states in memory: of running sequences, and of finished ones."""
        return self._cache.used_bytes + self._store_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of keys, values and states in memory that finished sequences have left, and of every snapshot."""
        return sum(map(self._cache.slot_bytes, self.free)) + self._store_bytes

    @property
    def _store_bytes(self) -> int:
        """Bytes in the store and of snapshots of slots, which may be the same arrays."""
        snapshots = [taken for slot in range(self._cache.num_slots) for taken in self._cache.snapshots(slot).values()]
        return sum({id(array): array.nbytes for array in [*(self.store.arrays if self.store else ()), *snapshots]}.values())

    def _drop(self, slot: int) -> None:
        if owner := self._owner():
            owner.clear_slot(slot)
        self._cache.drop(slot)

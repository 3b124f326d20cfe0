"""The slots of one model's cache: which tokens each holds, which sequence has it, and what finished sequences leave in it.

A slot is brought to any tokens by one rule: truncate to the shared prefix, and let the caller feed the rest. A new sequence may use
tokens of earlier ones: it takes over a free slot that begins alike, if little else is lost with it, or gets a copy of the shared
tokens. When a slot is needed or the limit of memory is reached, its tokens move to a `PrefixStore`, and from there to the disk.

Some backends compute tokens of prompts in another arithmetic than generated ones (`has_prompt_arithmetic`). Only tokens of prompts
are then kept for other sequences, as tokens of those sequences' prompts.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import numpy as np

from cpuspec.backends import Backend, has_prompt_arithmetic
from cpuspec.errors import CacheError
from cpuspec.formats.tensor import U8
from cpuspec.metrics import PrefixStats
from cpuspec.model.batch import F32
from cpuspec.model.cache import KVCache, StateAccess
from cpuspec.sequence import Sequence, shared_prefix
from cpuspec.speculation.prefix_files import ROOT, PrefixPart
from cpuspec.speculation.prefix_queue import PrefixQueue
from cpuspec.speculation.prefix_store import PrefixStore

_MIN_COPIED = 32  # from so many tokens on, copying or storing them, or waiting a step for them, is quicker than computing them

# A prefix is copied if it supplies this share of the new sequence's tokens, or `Slots.min_copied` of them.
MIN_SHARED_PREFIX = 0.1

# Beside running sequences so much is copied in a step, in some 20 ms: keys and values of a long prompt take up to 0.4 s.
_COPIED_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class Slot:
    """A slot, and the sequence that has it.

    tokens: those that its rows are known by (`Slots`). positions: of its rows, rising, for a head that may lack some; None: each
    token has a row. The cache may have more rows: those of a tree, of a head's own hidden states, or of an interrupted forward.
    """

    number: int
    tokens: list[int] = field(default_factory=list)
    positions: list[int] | None = None
    salt: str = ""  # of the sequences that the rows were computed for
    used: int = 0  # when it was released, by `Slots.tick`
    seq: Sequence | None = None  # that has it, in its latest state
    agreed: int = 0  # how many leading tokens are known to be committed ones of the sequence: not compared again
    # Hidden states of the chunks that were fed since the last score. That of a cached prefix's last token comes first, if kept.
    hidden: list[tuple[F32, ...]] = field(default_factory=list)
    num_hidden_kept: int = 0  # 1 if `hidden` begins with that of a cached token
    latest: tuple[int, list[F32]] = (0, [])  # of the last forward: first row, hidden states
    # Lengths at which snapshots of states are still to be taken, rising; of a free slot when its tokens go to the store.
    snapshots: list[int] = field(default_factory=list)

    def num_rows(self, num_tokens: int) -> int:
        """How many rows its first tokens have."""
        return num_tokens if self.positions is None else bisect_left(self.positions, num_tokens)

    def hidden_at(self, length: int) -> U8:
        """Hidden states of the last of the first `length` tokens, if the last forward computed them; else empty."""
        first, layers = self.latest
        rows = [layer[length - 1 - first] for layer in layers if 0 <= length - 1 - first < len(layer)]
        return np.concatenate(rows).view(np.uint8) if rows else np.empty(0, np.uint8)


class Slots:
    """The slots of one cache. Not thread-safe: one caller at a time.

    taken: the slots of sequences, by the sequence's id. free: the numbers of the others, the least recently used first.
    shares: whether sequences may use what was computed for others. min_copied: from so many tokens on a copy is worth it.
    store: for tokens outside of slots; None where they stay in slots. max_bytes: that finished sequences may leave in memory; None
    for no limit. num_prompt_tokens: that sequences came with; num_cached_tokens: those of them that a slot or the store supplied.
    num_running: sequences of the engine, with or without a slot here; the engine sets it. hidden_layers: whose outputs are kept
    beside snapshots of states; the engine sets it before any sequence.
    """

    def __init__(self, backend: Backend, cache: KVCache, offset: int = 0) -> None:
        """offset: a row is known by the token so many places after its own: 0 of a model, 1 of a head, which is made of two."""
        self.backend, self.cache = backend, cache
        self.shares, self.min_copied = True, _MIN_COPIED
        self.store: PrefixStore | None = None
        self.max_bytes: int | None = None
        self.num_prompt_tokens = self.num_cached_tokens = self.num_running = 0
        self.hidden_layers: tuple[int, ...] = ()
        self.taken: dict[int, Slot] = {}
        self.free = list(range(cache.num_slots))
        self._all = [Slot(number, positions=[] if offset else None) for number in self.free]
        self._offset = offset
        self._separates = not offset and has_prompt_arithmetic(backend)  # tokens of prompts from generated ones
        self._moves: dict[int, tuple[int, int]] = {}  # by sequence id: the slot of `moves`, and how many calls it has left
        self._allowed_bytes: int | None = None  # as `keep` said
        self._clock = 0

    @property
    def is_alone(self) -> bool:
        """Whether no other sequence would wait for a long forward."""
        return max(self.num_running, len(self.taken)) <= 1

    def acquire(self, seq: Sequence) -> int:
        """Give the sequence a slot; returns how many of its rows the slot already supplies, at most all but the last.

        The sequence takes over the free slot with the longest prefix, if fewer than 32 other tokens (`min_copied`) are overwritten
        there. Otherwise it gets an empty slot, or the least recently used one, whose tokens go to the store. The longest prefix in
        any slot or in the store's memory is copied into it. Blocks on the disk count if `poll` has read them. Raises CacheError
        when no slot is free.
        """
        if not self.free:
            raise CacheError(f"all {self.cache.num_slots} cache slots are taken; finish or abort a sequence first")
        assert seq.id not in self.taken, "a sequence acquires one slot"
        self._moves.pop(seq.id, None)
        store, used, useful, shared = self.store, self.tick(), self._useful(seq), self._shared(seq)
        reusable, salt = self._reusable(seq)
        stored = store.loadable(reusable, salt, seq.id) if store else 0
        branch = self._num_known(seq) if self.cache.states else 0
        source = self._all[max(range(len(shared)), key=shared.__getitem__)]
        longest = max(shared[source.number], stored)
        slot = self._assign(seq, shared, max(longest, useful))
        if longest > shared[slot.number] and longest >= useful:
            self._clear(slot)
            if shared[source.number] == longest:
                length = self.cache.copy(source.number, slot.number, longest)
                self._fill(slot, reusable, length, source.positions)
            else:
                assert store, "only a store supplies more than the slots"
                self.cache.truncate(slot.number, 0)
                self._fill(slot, reusable, store.load(slot.number, reusable, used, salt, seq.id))
        if store:
            store.forget(seq.id)
        self.align(seq)
        num_cached = slot.num_rows(len(slot.tokens))
        if self.hidden_layers and num_cached:
            num_cached = self._begin_hidden(slot, num_cached)
        if self.cache.states:
            self._plan_snapshots(slot, seq, self.cache.states, branch)
        self.tidy()
        self.num_prompt_tokens += len(seq.tokens) - self._offset
        self.num_cached_tokens += num_cached
        return num_cached

    def _assign(self, seq: Sequence, shared: list[int], least: float) -> Slot:
        """Choose a free slot for the sequence, save the tokens that the slot loses, and return it.

        shared: of `_shared`. The slot with the longest prefix is chosen if that has `least` tokens and little else is lost.
        """
        slot, salt = self._chosen(shared, least), self._reusable(seq)[1]
        if self._num_lost(slot, shared) >= self.min_copied:
            self._save(slot, slot.used)
        if slot.salt != salt:
            self._clear(slot, salt)
        slot.seq, slot.agreed, slot.hidden, slot.num_hidden_kept = seq, min(shared[slot.number], seq.num_committed), [], 0
        # Before the slot leaves the free list: an interrupt between the two loses no slot.
        self.taken[seq.id] = slot
        self.free.remove(slot.number)
        return slot

    def _chosen(self, shared: list[int], least: float) -> Slot:
        """The free slot that `_assign` takes."""
        free = [self._all[number] for number in self.free]
        slot = max(free, key=lambda slot: (shared[slot.number], -len(slot.tokens)))
        if shared[slot.number] < least or self._num_lost(slot, shared) >= self.min_copied:
            return next((slot for slot in free if not slot.tokens), free[0])
        return slot

    def _num_lost(self, slot: Slot, shared: list[int]) -> int:
        """How many rows a slot loses to a sequence that shares so many with each."""
        return slot.num_rows(len(slot.tokens)) - shared[slot.number]

    def moves(self, seq: Sequence) -> bool:
        """Copy a part of what `acquire` would copy at once; returns whether more is left. For a caller whose other sequences wait.

        A free slot is made ready: tokens that it would lose go to the store, and then it gets the sequence's prefix block by block.
        Between two calls it holds what it says, so nothing depends on there being a next one. Caches with states copy at once.
        """
        blocks, store = self.cache.blocks, self.store
        if not blocks or self.cache.states or not self.free:
            return False
        most = max(_COPIED_BYTES // (blocks.size * self.cache.bytes_per_token), 1) * blocks.size
        useful, shared, (reusable, salt) = self._useful(seq), self._shared(seq), self._reusable(seq)
        source = max(range(len(shared)), key=shared.__getitem__)
        longest = max(shared[source], store.loadable(reusable, salt, seq.id) if store else 0)
        number, calls_left = self._moves.get(seq.id, (-1, -1))
        slot = self._all[number] if number in self.free else self._chosen(shared, max(longest, useful))
        saved = unsaved = 0
        if store and self._num_lost(slot, shared) >= self.min_copied:
            savable = slot.tokens[: self._num_savable(slot)]
            saved = store.length(savable, slot.salt)
            unsaved = len(savable) - saved
        missing = max(longest - shared[slot.number], 0) if longest >= useful else 0
        if calls_left < 0:  # then it is not begun; a few more calls than it needs
            calls_left = unsaved // most + missing // most + 4 if unsaved + missing > most else 0
        if not calls_left or not unsaved + missing:
            self._moves.pop(seq.id, None)
            return False
        self._moves[seq.id] = slot.number, calls_left - 1
        if unsaved:
            self._save(slot, slot.used, saved + min(unsaved, most))
            self.tidy()
            return True
        self.free.remove(slot.number)
        self._free(slot)  # now it is the last that others take
        begin = shared[slot.number] // blocks.size * blocks.size
        del slot.tokens[begin:]
        slot.salt = salt
        self.cache.truncate(slot.number, begin)
        if store and shared[source] < longest:
            length = store.load(slot.number, reusable, self.tick(), salt, seq.id, begin + most)
        else:
            self.cache.append_from(source, slot.number, length := min(begin + most, longest))
        self._fill(slot, reusable, length)
        self.tidy()
        return length < longest

    def awaits(self, seq: Sequence) -> bool:
        """Whether a running sequence is about to compute a useful prefix of this one, which should then be acquired later."""
        if len(seq.tokens) < self.min_copied or not self.shares:
            return False
        (reusable, salt), coming = self._reusable(seq), 0
        for slot in self.taken.values():
            if slot.salt == salt and slot.seq:
                shared = shared_prefix(self._kept(slot.seq, slot.seq.tokens), reusable)
                if self.cache.states:
                    shared = max((length for length in slot.snapshots if length <= shared), default=0)
                coming = max(coming, shared)
        if coming < self.min_copied:
            return False
        stored = self.store.length(reusable, salt) if self.store else 0
        return coming - max(*self._shared(seq), stored) >= self.min_copied

    def poll(self, seq: Sequence) -> bool:
        """Begin or continue to read a useful prefix from the disk for a sequence without a slot; returns whether it comes."""
        if not self.store or not self.shares:
            return False
        more_than = max(*self._shared(seq), ceil(self._useful(seq)) - 1)
        return self.store.poll(*self._reusable(seq), seq.id, more_than)

    def wait(self, seconds: float) -> None:
        """Wait until a read of `poll` has progressed, at most `seconds`. For a caller that has nothing else to do."""
        if self.store and self.store.queue:
            self.store.queue.wait(seconds)

    def align(self, seq: Sequence, most: int | None = None) -> Slot:
        """Truncate a sequence's slot to the rows that both share; returns it.

        most: how many tokens may stay; None for all but the last. That is always fed again before a score: its row is needed even
        if the slot holds it.
        """
        slot, offset = self.taken[seq.id], self._offset
        slot.seq, held = seq, slot.tokens
        most = len(seq.tokens) - 1 - offset if most is None else most
        # Only tokens that are new since the last score are compared: comparing a long context takes longer than all else here.
        agreed = min(slot.agreed, len(held), most)
        if slot.num_rows(agreed) < self.cache.lengths[slot.number]:
            agreed += shared_prefix(held[agreed:], seq.tokens[agreed + offset : most + offset])
            self.truncate(slot, agreed)
        slot.agreed = min(len(held), seq.num_committed - offset)
        return slot

    def truncate(self, slot: Slot, num_tokens: int) -> None:
        """Forget all after a slot's first tokens, or after fewer where the cache cannot go back to these."""
        length = self.cache.truncate(slot.number, slot.num_rows(num_tokens))
        if slot.positions is None:
            del slot.tokens[length:]
        else:
            del slot.tokens[num_tokens:], slot.positions[length:]

    def release(self, seq: Sequence) -> None:
        """Free the sequence's slot. Its tokens stay, for later sequences that begin alike. Unknown sequences are ignored."""
        self._moves.pop(seq.id, None)
        if self.store:
            self.store.forget(seq.id)
        slot = self.taken.get(seq.id)
        if slot is not None and slot.number not in self.free:
            self.align(seq, len(seq.tokens) - self._offset)  # without rejected drafts
            self.truncate(slot, len(self._kept(seq, slot.tokens)))
            if not self.shares:
                self._clear(slot)
            slot.snapshots = [length for length in slot.snapshots if length <= len(slot.tokens)]
            slot.seq, slot.hidden = None, []
            self._free(slot)
        # After the slot is free again: an interrupt between the two loses no slot.
        self.taken.pop(seq.id, None)
        self.tidy()

    def prefix_writer(self, tokens: list[int], path: Path, salt: str = "") -> Callable[[], int]:
        """A call that writes the longest prefix of `tokens` in a slot or the store to a file; it returns the prefix's length.

        salt: of the sequences that computed it. The call may run beside steps. It raises OSError, and CacheError if there is no
        prefix. Raises CacheError if the backend's cache cannot be saved.
        """
        store = self._required_store()
        tokens = tokens[:-1] if self.cache.states else tokens  # the last token is always fed, so states after it are of no use
        shared = self._alike(tokens, salt)
        number = max(range(len(shared)), key=shared.__getitem__)
        if shared[number] > store.length(tokens, salt):
            self._save(self._all[number], self.tick(), shared[number])
        write = store.file_writer(path, tokens, salt)
        self.tidy()
        return write

    def read_prefix(self, path: Path) -> PrefixPart:
        """The prefix in a file of `prefix_writer`. May run beside steps. Raises CacheError."""
        return self._required_store().read_file(path)

    def insert_prefix(self, part: PrefixPart, salt: str = "") -> int:
        """Keep a prefix for later sequences of a salt; returns its length."""
        length = self._required_store().insert(part, self.tick(), salt)
        self.tidy()
        return length

    def insert_rows(self, cache: KVCache, tokens: list[int], salt: str = "") -> None:
        """Keep tokens that another cache of this backend has in its first slot, for later sequences of a salt.

        They are tokens of prompts. Does nothing if no prefixes are kept, and for recurrent states.
        """
        if not self.store or not self.cache.blocks or self.cache.states:
            return
        size = self.cache.blocks.size
        blocks = [cache.read_block(0, at // size, min(size, len(tokens) - at)) for at in range(0, len(tokens), size)]
        self.insert_prefix(PrefixPart(ROOT, tokens, blocks), salt)

    def take_snapshots(self, slot: Slot) -> None:
        """Take the planned snapshots that cannot wait: the slot has their tokens, and the next forward may overwrite the states."""
        assert self.cache.states, "asked of caches with states only"
        waits = 0 if self.hidden_layers else self.cache.states.waits  # the hidden state is the last forward's
        while slot.snapshots and slot.snapshots[0] <= self.cache.lengths[slot.number] - waits:
            length = slot.snapshots.pop(0)
            with suppress(MemoryError):
                self.cache.take_snapshot(slot.number, length, slot.hidden_at(length))
            self.tidy()

    def keep(self, max_bytes: int | None, queue: PrefixQueue | None = None) -> None:
        """Set `max_bytes`. Call it before the first sequence.

        queue: writes what does not fit into memory, and what `spill` sends, to a directory; None without one.
        A backend that promises no row invariance shares nothing between sequences if `max_bytes` is 0.
        """
        self.shares = self.backend.row_invariant or max_bytes != 0
        self.max_bytes = self._allowed_bytes = max_bytes
        if self.cache.blocks and max_bytes is not None and (max_bytes or queue):
            config = self.backend.config
            self.store = PrefixStore(self.cache, config.vocab_size, queue, self.hidden_layers, config.hidden_size)

    def limit(self, max_bytes: int) -> None:
        """Have finished sequences leave no more than this from now on, and no more than `keep` said."""
        if self._allowed_bytes is not None:
            self.max_bytes = min(self._allowed_bytes, max_bytes)
            self.tidy()

    def tick(self) -> int:
        """The next time of use; times rise."""
        self._clock += 1
        return self._clock

    def move_to_store(self, number: int) -> None:
        """Move what a free slot holds to the store, and give its memory back."""
        slot = self._all[number]
        if slot.num_rows(len(slot.tokens)) >= self.min_copied:
            self._save(slot, slot.used)
        self._drop(slot)

    def tidy(self) -> None:
        """Bring what finished sequences have left under its limit: what was used longest ago leaves first."""
        while self.max_bytes is not None and self.shares and self.kept_bytes > self.max_bytes:
            slot = next((slot for slot in self.free if self.cache.slot_bytes(slot)), None)
            oldest = self.store.oldest if self.store else None
            if slot is not None and (oldest is None or self._all[slot].used <= oldest):
                self.move_to_store(slot)
            elif self.store and oldest is not None:
                self.store.evict()
            elif snapshots := [(length, slot) for slot in range(self.cache.num_slots) for length in self.cache.snapshots(slot)]:
                length, slot = min(snapshots)
                self.cache.forget_snapshot(slot, length)
            else:
                return

    def forget(self) -> None:
        """Forget what finished sequences have left, on the disk, too, as soon as the directory's queue is empty."""
        for slot in self.free:
            self._drop(self._all[slot])
        if self.store:
            self.store.clear()

    def spill(self) -> None:
        """Have what finished sequences have left written, where there is a directory for it. For the end of the process."""
        if self.store and self.store.queue:
            for slot in self.free:
                self.move_to_store(slot)
            self.store.spill()

    def stats(self, name: str) -> PrefixStats:
        """The figures of the prefix cache; `name` says which model it is."""
        stats = PrefixStats(name, self.num_prompt_tokens, self.num_cached_tokens, self.kept_bytes, self.max_bytes)
        return self.store.completed(stats) if self.store else stats

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys, values and states in memory: of running sequences, and of finished ones."""
        return self.cache.used_bytes + self._store_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of keys, values and states in memory that finished sequences have left, and of every snapshot."""
        return sum(map(self.cache.slot_bytes, self.free)) + self._store_bytes

    @property
    def _store_bytes(self) -> int:
        """Bytes in the store and of snapshots of slots, which may be the same arrays."""
        snapshots = [taken for slot in range(self.cache.num_slots) for taken in self.cache.snapshots(slot).values()]
        return sum({id(array): array.nbytes for array in [*(self.store.arrays if self.store else ()), *snapshots]}.values())

    def _shared(self, seq: Sequence) -> list[int]:
        """For each slot how many of the sequence's leading rows it holds, and the sequence may use."""
        shared = self._alike(*self._reusable(seq)) if self.shares else [0] * self.cache.num_slots
        return list(map(self.cache.reachable, range(len(shared)), shared))

    def _alike(self, tokens: list[int], salt: str) -> list[int]:
        """For each slot how many rows of leading `tokens` it holds for sequences of a salt, with or without states after them."""
        held = [(slot, self._kept(slot.seq, slot.tokens) if slot.seq else slot.tokens) for slot in self._all]
        return [slot.num_rows(shared_prefix(its, tokens)) if slot.salt == salt else 0 for slot, its in held]

    def _num_known(self, seq: Sequence) -> int:
        """How many of the sequence's leading tokens are in a slot or the store, with or without states after them."""
        reusable, store = self._reusable(seq), self.store
        return max(*self._alike(*reusable), store.num_known(*reusable) if store else 0)

    def _reusable(self, seq: Sequence) -> tuple[list[int], str]:
        """The tokens and the salt by which slots and store know the rows that another sequence may supply: all but the last."""
        tokens, salt = seq.tokens, seq.salt
        if self._offset:
            return tokens[1:], f"{tokens[0]} {salt}"
        return self._kept(seq, tokens[:-1]), salt

    def _kept(self, seq: Sequence, tokens: list[int]) -> list[int]:
        """The part of `tokens` that other sequences may use: only the prompt's, if prompts have an arithmetic of their own."""
        return tokens[: seq.num_prompt_tokens] if self._separates else tokens

    def _required_store(self) -> PrefixStore:
        if self.store is None:
            raise CacheError(
                f"the {self.backend.name} backend keeps no keys and values outside of running requests here; "
                "use numba, and a prefix_cache_gb above 0"
            )
        return self.store

    def _useful(self, seq: Sequence) -> float:
        """How many rows a prefix must supply to be worth a copy."""
        return max(min(MIN_SHARED_PREFIX * len(seq.tokens), self.min_copied) - self._offset, 1)

    def _num_savable(self, slot: Slot) -> int:
        """How many of a slot's tokens are worth a copy: those beyond the limit of memory only if they can go to the disk."""
        store, held = self.store, len(slot.tokens)
        if slot.positions is not None:  # rows after the first position without one are not saved
            held = next((row for row, position in enumerate(slot.positions) if row != position), len(slot.positions))
        if not store or store.queue or self.max_bytes is None or not self.cache.bytes_per_token:
            return held
        return min(held, self.max_bytes // self.cache.bytes_per_token)

    def _save(self, slot: Slot, used: int, length: int | None = None) -> None:
        """Copy a slot's tokens, or its first `length`, to the store. They are lost if there is no memory for the copy."""
        if store := self.store:
            number, tokens = slot.number, slot.tokens[: self._num_savable(slot) if length is None else length]
            with suppress(MemoryError):
                for position in (*slot.snapshots, len(tokens)) if self.cache.states else ():
                    hidden = slot.hidden_at(position)
                    # One with the hidden state that a head reads is worth more than a few tokens.
                    better = self.hidden_layers and not len(hidden) and self.cache.snapshots(number)
                    if position <= len(tokens) and not any(0 <= position - taken < self.min_copied for taken in better or ()):
                        self.cache.take_snapshot(number, position, hidden)
                store.copy_from_slot(number, tokens, used, slot.salt)

    def _fill(self, slot: Slot, tokens: list[int], length: int, positions: list[int] | None = None) -> None:
        """Note that a slot has `length` leading rows of `tokens`. positions: theirs, if some are missing."""
        if slot.positions is not None:
            slot.positions = list(range(length)) if positions is None else positions[:length]
        slot.tokens = tokens if positions else tokens[:length]

    def _begin_hidden(self, slot: Slot, num_cached: int) -> int:
        """Provide the hidden state of the last cached token, which a head reads: from a snapshot, or by feeding the token again.

        Returns how many tokens the slot supplies now, without one that is fed again. If neither is possible, the head drafts
        without that hidden state.
        """
        if self.cache.states:
            taken = self.cache.snapshots(slot.number).get(num_cached)
            if taken is not None and len(taken) > (size := self.cache.states.size(num_cached)):
                rows = taken[size:].view(np.float32).reshape(len(self.hidden_layers), 1, -1)
                slot.hidden, slot.num_hidden_kept = [tuple(rows)], 1
                return num_cached
        if self.cache.reachable(slot.number, num_cached - 1) == num_cached - 1:
            self.truncate(slot, num_cached - 1)
            slot.agreed = min(slot.agreed, num_cached - 1)
            return num_cached - 1
        return num_cached

    def _plan_snapshots(self, slot: Slot, seq: Sequence, states: StateAccess, branch: int) -> None:
        """Decide at which lengths of a prompt snapshots of its states are taken. branch: where it leaves the known prefixes.

        In this order, each unless another one is near: where turns of the conversation begin, the prompt's end, the branch, and
        every `states.apart` tokens.
        """
        last, held = seq.num_prompt_tokens - 1, len(slot.tokens)  # the last token of a prompt is always fed
        slot.snapshots = [length for length in slot.snapshots if length <= held]
        fits = self.max_bytes is None or self.max_bytes >= states.size(seq.num_prompt_tokens)
        if not self.shares or not (fits or (states.waits and self.store and self.store.queue)):
            return
        for length in (*reversed(seq.turns), last, branch, *range(states.apart, last, states.apart)):
            others = (*self.cache.snapshots(slot.number), *slot.snapshots)
            if held < length <= last and all(abs(length - other) >= self.min_copied for other in others):
                slot.snapshots.append(length)
        slot.snapshots.sort()

    def _free(self, slot: Slot) -> None:
        """Note that a slot's sequence has finished."""
        slot.used = self.tick()
        self.free.append(slot.number)

    def _clear(self, slot: Slot, salt: str | None = None) -> None:
        """Know no tokens of a slot any more. salt: of the next ones, if it is another."""
        slot.tokens, slot.positions = [], None if slot.positions is None else []
        slot.latest, slot.snapshots, slot.salt = (0, []), [], slot.salt if salt is None else salt

    def _drop(self, slot: Slot) -> None:
        self._clear(slot)
        self.cache.drop(slot.number)

"""One model with its cache for all running sequences. The target is a Context, and so is every draft model.

It knows which tokens each slot's cache holds, and brings a slot to any tokens by one rule: truncate to the shared prefix, feed the
rest. It knows nothing about sampling or about why the tokens changed.

A new sequence may use tokens of earlier ones (`PrefixCache`): it takes over a free slot that begins alike, if little else is lost
with it, or gets a copy of the shared tokens.

Some backends compute tokens of prompts in another arithmetic than generated ones (`has_prompt_arithmetic`). A token's position in
its sequence decides which one. Tokens of prompts have forwards of their own, and only they are kept for other sequences, as tokens
of those sequences' prompts.
"""

from collections import abc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpuspec.backends import Backend, has_prompt_arithmetic, num_of_prompt
from cpuspec.checkpoints.adapters import AdapterSet
from cpuspec.errors import CacheError, ConfigError
from cpuspec.formats.tensor import U8
from cpuspec.metrics import Spent, now_s
from cpuspec.model.batch import F32, I32, ForwardBatch, ForwardOutput, ForwardStoppedError
from cpuspec.model.cache import KVCache, StateAccess
from cpuspec.sequence import Sequence, shared_prefix
from cpuspec.settings import EngineConfig
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.prefix_cache import PrefixCache
from cpuspec.speculation.prefix_files import ROOT, PrefixPart
from cpuspec.speculation.prefix_queue import PrefixQueue
from cpuspec.speculation.prefix_store import PrefixStore

# A prefix is copied if it supplies this share of the new sequence's tokens, or `PrefixCache.many` of them.
MIN_SHARED_PREFIX = 0.1

# Beside running sequences so much is copied in a step, in some 20 ms: keys and values of a long prompt take up to 0.4 s.
_COPIED_BYTES = 64 << 20

# One row of 32 goes to the prompt that has waited longest. So few rows delay a short prompt by no step.
_OLDEST_PART = 32

# Several forwards run in one call while they take no longer than this together. No reader notices such a delay, and Python runs
# once after all of them instead of after each.
_AT_ONCE_S = 0.04
_MOST_AHEAD = 31  # fewer than the tokens that the engine keeps memory for


class PromptChunk(NamedTuple):
    """The next `num_tokens` tokens of a sequence, fed beside the rows of other sequences. Their logits are not computed."""

    seq: Sequence
    num_tokens: int


@dataclass(slots=True)
class _Assignment:
    """The slot of a sequence."""

    seq: Sequence  # in its latest state
    slot: int
    agreed: int  # how many of the slot's leading tokens are known to be committed tokens of the sequence: not compared again
    # Hidden states of the chunks that were fed since the last score. That of a cached prefix's last token comes first, if kept.
    hidden: list[tuple[F32, ...]] = field(default_factory=list)
    num_hidden_kept: int = 0  # 1 if `hidden` begins with that of a cached token
    snapshots: list[int] = field(default_factory=list)  # lengths at which snapshots of states are still to be taken, rising


@dataclass(slots=True)
class _Feed:
    """The rows of one sequence that a score still has to run, and the outputs of those that ran."""

    slot: int
    tokens: list[int]  # committed and drafted ones that the slot does not hold yet
    num_unscored: int  # how many of them come before the first one whose logits are wanted
    num_prompt: int  # how many are tokens of the prompt; 0 if these have no arithmetic of their own
    num_straight: int  # how many follow one another: all, or those before a tree
    tree: Draft | None  # the draft, if it is a tree
    snapshots: list[int]  # as in `_Assignment`
    adapters: AdapterSet = ()  # the sequence's, if the context applies them
    outputs: list[ForwardOutput] = field(default_factory=list)


class Context:
    """One model and its cache. Not thread-safe: one caller at a time.

    vocab_size: length of the rows of logits, None for the model's own. Vocabularies of one family may be padded to different
    lengths, as Qwen2.5's are. A draft model's rows then get the target's length: further ids are cut off, missing ones are
    impossible.
    token_ids: the tokens that its rows give a probability, rising: all others have none. The model's rows have these tokens alone,
    or the whole vocabulary. None for all tokens.
    prompt_rows: rows of prompts that one score feeds beside sequences that generate (`EngineConfig.prompt_rows`).
    """

    waiting_bytes = 0

    def __init__(
        self,
        backend: Backend,
        num_slots: int,
        capacity: int,
        vocab_size: int | None = None,
        token_ids: NDArray[np.int64] | None = None,
        prompt_rows: int = EngineConfig.prompt_rows,
    ) -> None:
        self.backend = backend
        self.cache = backend.new_cache(num_slots, capacity)
        self.capacity = capacity
        self.vocab_size = backend.config.vocab_size if vocab_size is None else vocab_size
        self.token_ids = token_ids
        self.prompt_rows = min(prompt_rows, backend.max_rows)
        self.hidden_layers: tuple[int, ...] = ()  # whose outputs scores return; the engine sets it before any sequence
        self.applies_adapters = False  # the engine sets it for the target; draft models draft without
        self.num_forwards = self.num_rows = self.weight_bytes = 0  # of all forwards; bytes of weights that they read
        self.spent = Spent()
        self.num_running = 0  # sequences of the engine, with or without a slot here; the engine sets it
        self.num_stopped = 0  # forwards that ended early
        self._last_forward = 0, 0.0  # its rows and seconds
        self.prefixes = PrefixCache(self, self.cache, backend.row_invariant)
        self._separates = has_prompt_arithmetic(backend)  # tokens of prompts from generated ones
        self._fits = self.vocab_size == backend.config.vocab_size and token_ids is None
        self._held: list[list[int]] = [[] for _ in range(num_slots)]  # tokens whose keys and values each slot holds
        self._salts = [""] * num_slots  # of the sequences that they were computed for
        self._latest: list[tuple[int, list[F32]]] = [(0, [])] * num_slots  # of each slot's last forward: first row, hidden states
        # Lengths at which snapshots of free slots are taken if their tokens go to the store.
        self._untaken: list[list[int]] = [[] for _ in range(num_slots)]
        self._assignments: dict[int, _Assignment] = {}  # by sequence id
        self._moves: dict[int, tuple[int, int]] = {}  # by sequence id: the slot of `moves_prefix`, and how many calls it has left

    @property
    def num_free_slots(self) -> int:
        """How many more sequences can be acquired."""
        return len(self.prefixes.free)

    @property
    def num_sequences(self) -> int:
        """How many sequences have a slot."""
        return len(self._assignments)

    @property
    def is_alone(self) -> bool:
        """Whether no other sequence would wait for a long forward."""
        return max(self.num_running, self.num_sequences) <= 1

    def acquire(self, seq: Sequence) -> int:
        """Give the sequence a slot; returns how many of its tokens the slot already supplies, at most all but the last.

        The sequence takes over the free slot with the longest prefix, if fewer than 32 other tokens (`PrefixCache.many`) are
        overwritten there. Otherwise it gets an empty slot, or the least recently used one, whose tokens go to the store. The
        longest prefix in any slot or in the store's memory is copied into it. Blocks on the disk count if `poll_prefix` has read
        them. Raises CacheError when no slot is free.
        """
        if not self.prefixes.free:
            raise CacheError(f"all {self.cache.num_slots} cache slots are taken; finish or abort a sequence first")
        assert seq.id not in self._assignments, "a sequence acquires one slot"
        self._moves.pop(seq.id, None)
        store, used, reusable, useful = self.prefixes.store, self.prefixes.tick(), self._reusable(seq), self._useful(seq)
        shared, stored = self._shared(seq), store.loadable(reusable, seq.salt, seq.id) if store else 0
        branch = self._num_known(seq) if self.cache.states else 0
        source = max(range(len(shared)), key=shared.__getitem__)
        longest = max(shared[source], stored)
        slot = self._assign(seq, shared, max(longest, useful))
        if longest > shared[slot] and longest >= useful:
            self._held[slot] = []
            if shared[source] == longest:
                length = self.cache.copy(source, slot, longest)
            else:
                assert store, "only a store supplies more than the slots"
                self.cache.truncate(slot, 0)
                length = store.load(slot, reusable, used, seq.salt, seq.id)
            self._held[slot] = seq.tokens[:length]
        if store:
            store.forget(seq.id)
        num_cached = len(self._align(seq))
        if self.hidden_layers and num_cached:
            num_cached = self._begin_hidden(seq, num_cached)
        if self.cache.states:
            self._plan_snapshots(self._assignments[seq.id], self.cache.states, branch)
        self.prefixes.tidy()
        self.prefixes.num_prompt_tokens += len(seq.tokens)
        self.prefixes.num_cached_tokens += num_cached
        return num_cached

    def _assign(self, seq: Sequence, shared: list[int], wanted: float) -> int:
        """Choose a free slot for the sequence, save the tokens that the slot loses, and return it.

        shared: of `_shared`. The slot with the longest prefix is chosen if that has `wanted` tokens and little else is lost.
        """
        slot = self._chosen(shared, wanted)
        if len(self._held[slot]) - shared[slot] >= self.prefixes.many:
            self._save(slot, self.prefixes.used[slot])
        if self._salts[slot] != seq.salt:
            self._held[slot], self._salts[slot] = [], seq.salt
        # Before the slot leaves the free list: an interrupt between the two loses no slot.
        self._assignments[seq.id] = _Assignment(seq, slot, min(shared[slot], seq.num_committed))
        self.prefixes.free.remove(slot)
        return slot

    def _chosen(self, shared: list[int], wanted: float) -> int:
        """The free slot that `_assign` takes."""
        free = self.prefixes.free
        slot = max(free, key=lambda slot: (shared[slot], -len(self._held[slot])))
        if shared[slot] < wanted or len(self._held[slot]) - shared[slot] >= self.prefixes.many:
            return next((slot for slot in free if not self._held[slot]), free[0])
        return slot

    def moves_prefix(self, seq: Sequence) -> bool:
        """Copy a part of what `acquire` would copy at once; returns whether more is left. For a caller whose other sequences wait.

        A free slot is made ready: tokens that it would lose go to the store, and then it gets the sequence's prefix block by block.
        Between two calls it holds what it says, so nothing depends on there being a next one. Caches with states copy at once.
        """
        blocks, store = self.cache.blocks, self.prefixes.store
        if not blocks or self.cache.states or not self.prefixes.free:
            return False
        most = max(_COPIED_BYTES // (blocks.size * self.cache.bytes_per_token), 1) * blocks.size
        reusable, useful, shared = self._reusable(seq), self._useful(seq), self._shared(seq)
        source = max(range(len(shared)), key=shared.__getitem__)
        longest = max(shared[source], store.loadable(reusable, seq.salt, seq.id) if store else 0)
        slot, calls_left = self._moves.get(seq.id, (-1, -1))
        if slot not in self.prefixes.free:
            slot = self._chosen(shared, max(longest, useful))
        saved = unsaved = 0
        if store and len(self._held[slot]) - shared[slot] >= self.prefixes.many:
            savable = self._held[slot][: self._num_savable(slot)]
            saved = store.length(savable, self._salts[slot])
            unsaved = len(savable) - saved
        missing = max(longest - shared[slot], 0) if longest >= useful else 0
        if calls_left < 0:  # then it is not begun; a few more calls than it needs
            calls_left = unsaved // most + missing // most + 4 if unsaved + missing > most else 0
        if not calls_left or not unsaved + missing:
            self._moves.pop(seq.id, None)
            return False
        self._moves[seq.id] = slot, calls_left - 1
        if unsaved:
            self._save(slot, self.prefixes.used[slot], saved + min(unsaved, most))
            self.prefixes.tidy()
            return True
        self.prefixes.free.remove(slot)
        self.prefixes.release(slot)  # now it is the last that others take
        begin = shared[slot] // blocks.size * blocks.size
        self._held[slot], self._salts[slot] = self._held[slot][:begin], seq.salt
        self.cache.truncate(slot, begin)
        if store and shared[source] < longest:
            length = store.load(slot, reusable, self.prefixes.tick(), seq.salt, seq.id, begin + most)
        else:
            self.cache.append_from(source, slot, length := min(begin + most, longest))
        self._held[slot] = seq.tokens[:length]
        self.prefixes.tidy()
        return length < longest

    def num_hidden_kept(self, seq: Sequence) -> int:
        """1 if the next score also returns the hidden state of the last token that `acquire` supplied, else 0."""
        return self._assignments[seq.id].num_hidden_kept

    def awaits_prefix(self, seq: Sequence) -> bool:
        """Whether a running sequence is about to compute a useful prefix of this one, which should then be acquired later."""
        if len(seq.tokens) < self.prefixes.many or not self.prefixes.shares:
            return False
        wanted, coming = self._reusable(seq), 0
        for one in self._assignments.values():
            if one.seq.salt == seq.salt:
                shared = shared_prefix(self._kept(one.seq, one.seq.tokens), wanted)
                if self.cache.states:
                    shared = max((length for length in one.snapshots if length <= shared), default=0)
                coming = max(coming, shared)
        if coming < self.prefixes.many:
            return False
        stored = self.prefixes.store.length(wanted, seq.salt) if self.prefixes.store else 0
        return coming - max(*self._shared(seq), stored) >= self.prefixes.many

    def poll_prefix(self, seq: Sequence) -> bool:
        """Begin or continue to read a useful prefix from the disk for a sequence without a slot; returns whether it comes."""
        if not self.prefixes.store or not self.prefixes.shares:
            return False
        more_than = max(*self._shared(seq), ceil(self._useful(seq)) - 1)
        return self.prefixes.store.poll(self._reusable(seq), seq.salt, seq.id, more_than)

    def wait_for_prefix(self, seconds: float) -> None:
        """Wait until a read of `poll_prefix` has progressed, at most `seconds`. For a caller that has nothing else to do."""
        if self.prefixes.store and self.prefixes.store.queue:
            self.prefixes.store.queue.wait(seconds)

    def release(self, seq: Sequence) -> None:
        """Free the sequence's slot. Its tokens stay, for later sequences that begin alike. Unknown sequences are ignored."""
        self._moves.pop(seq.id, None)
        if self.prefixes.store:
            self.prefixes.store.forget(seq.id)
        assigned = self._assignments.get(seq.id)
        if assigned is not None and assigned.slot not in self.prefixes.free:
            held = self._align(seq, num_refed=0)  # without rejected drafts
            del held[self.cache.truncate(assigned.slot, len(self._kept(seq, held))) :]
            if not self.prefixes.shares:
                self._held[assigned.slot] = []
            self._untaken[assigned.slot] = [length for length in assigned.snapshots if length <= len(self._held[assigned.slot])]
            self.prefixes.release(assigned.slot)
        # After the slot is free again: an interrupt between the two loses no slot.
        self._assignments.pop(seq.id, None)
        self.prefixes.tidy()

    def prefix_writer(self, tokens: list[int], path: Path, salt: str = "") -> Callable[[], int]:
        """A call that writes the longest prefix of `tokens` in a slot or the store to a file; it returns the prefix's length.

        salt: of the sequences that computed it. The call may run beside steps. It raises OSError, and CacheError if there is no
        prefix. Raises CacheError if the backend's cache cannot be saved.
        """
        store = self._wanted_store()
        tokens = tokens[:-1] if self.cache.states else tokens  # the last token is always fed, so states after it are of no use
        shared = self._alike(tokens, salt)
        slot = max(range(len(shared)), key=shared.__getitem__)
        if shared[slot] > store.length(tokens, salt):
            self._save(slot, self.prefixes.tick(), shared[slot])
        write = store.file_writer(path, tokens, salt)
        self.prefixes.tidy()
        return write

    def read_prefix(self, path: Path) -> PrefixPart:
        """The prefix in a file of `prefix_writer`. May run beside steps. Raises CacheError."""
        return self._wanted_store().read_file(path)

    def insert_prefix(self, part: PrefixPart, salt: str = "") -> int:
        """Keep a prefix for later sequences of a salt; returns its length."""
        length = self._wanted_store().insert(part, self.prefixes.tick(), salt)
        self.prefixes.tidy()
        return length

    def insert_rows(self, cache: KVCache, tokens: list[int], salt: str = "") -> None:
        """Keep tokens that another cache of this backend has in its first slot, for later sequences of a salt.

        They are tokens of prompts. Does nothing if no prefixes are kept, and for recurrent states.
        """
        if not self.prefixes.store or not self.cache.blocks or self.cache.states:
            return
        size = self.cache.blocks.size
        blocks = [cache.read_block(0, at // size, min(size, len(tokens) - at)) for at in range(0, len(tokens), size)]
        self.insert_prefix(PrefixPart(ROOT, tokens, blocks), salt)

    def new_store(self, queue: PrefixQueue | None) -> PrefixStore:
        """As `SlotOwner`."""
        config = self.backend.config
        return PrefixStore(self.cache, config.vocab_size, queue, self.hidden_layers, config.hidden_size)

    def save_slot(self, slot: int) -> None:
        """As `SlotOwner`."""
        if len(self._held[slot]) >= self.prefixes.many:
            self._save(slot, self.prefixes.used[slot])

    def clear_slot(self, slot: int) -> None:
        """As `SlotOwner`."""
        self._held[slot] = []

    def num_unfed(self, seq: Sequence) -> int:
        """How many tokens a score would feed before the sequence's last one."""
        return len(seq.tokens) - 1 - len(self._align(seq))

    def score(
        self,
        seqs: list[Sequence],
        drafts: list[Draft],
        hidden_layers: tuple[int, ...] = (),
        chunks: list[PromptChunk] | None = None,
        most_hidden: int | None = None,
        num_ahead: int = 0,
        ends: abc.Sequence[int] = (),
    ) -> list[ForwardOutput]:
        """For each sequence the rows after its last committed token and after each drafted one. `chunks` are fed beside them.

        Returns logits [n+1, V], and hidden states [rows fed, C] of each of `hidden_layers`; their last n+1 rows belong to the
        logits. Hidden states of chunks come first in the sequence's next score, at least the last `most_hidden` of them; until then
        they take 4 C bytes a token and layer. If there are only chunks, `stop_forward` ends the call early, and the rows of
        complete forwards stay. Afterwards the slot holds committed and drafted tokens; of a tree only those that `keep_path` keeps.
        Raises CacheError for more tokens than the capacity, and ConfigError for a tree of more rows than a forward takes.
        num_ahead: how many forwards may follow at once, if there are no drafts and each sequence lacks only its last token. `ends`:
        as in `ForwardBatch`.
        """
        assert len(seqs) == len(drafts), "every sequence has a draft, empty or not"
        feeds, read = list(map(self._feed, seqs, drafts)), list(map(self._read, chunks or ()))
        waiting = feeds + read
        if not self._fits or len(waiting) > self.backend.max_rows or any(len(feed.tokens) > 1 for feed in waiting):
            num_ahead = 0
        try:
            while waiting:
                waiting = self._forward(waiting, hidden_layers, not seqs, num_ahead, ends)
        except ForwardStoppedError:
            self.num_stopped += 1
        if hidden_layers:
            for chunk, feed in zip(chunks or (), read, strict=True):
                waiting_rows = self._assignments[chunk.seq.id].hidden
                waiting_rows += [output.hidden for output in feed.outputs]
                while most_hidden is not None and sum(len(rows[0]) for rows in waiting_rows[1:]) >= most_hidden:
                    del waiting_rows[0]
        outputs = []
        for seq, feed in zip(seqs, feeds, strict=True):
            output = feed.outputs[0] if len(feed.outputs) == 1 else _join(feed.outputs)
            assigned = self._assignments[seq.id]
            if assigned.hidden:
                layers = zip(*assigned.hidden, output.hidden, strict=True)
                output = replace(output, hidden=tuple(map(np.concatenate, layers)))
                assigned.hidden = []
            outputs.append(output if self._fits else self._fit(output, seq.is_plain_greedy))
        return outputs

    def keep_path(self, seq: Sequence, draft: Draft, path: list[int]) -> None:
        """Keep the nodes on `path` of a tree that was just scored, so that they need not be fed again."""
        slot = self._assignments[seq.id].slot
        held = self._held[slot]
        assert len(held) == len(seq.tokens), "a path is kept before its tokens are committed"
        length = self.cache.keep_path(slot, len(seq.tokens), np.array(path, np.int32))
        held += draft.tokens[path].tolist()
        del held[length:]

    def _shared(self, seq: Sequence) -> list[int]:
        """For each slot how many of the sequence's leading tokens it holds, and the sequence may use."""
        shared = self._alike(self._kept(seq, seq.tokens), seq.salt) if self.prefixes.shares else [0] * self.cache.num_slots
        return list(map(self.cache.reachable, range(len(shared)), shared))

    def _alike(self, tokens: list[int], salt: str) -> list[int]:
        """For each slot how many leading `tokens` it holds for sequences of a salt, with or without states after them."""
        held = zip(self._all_kept(), self._salts, strict=True)
        return [shared_prefix(one, tokens) if its == salt else 0 for one, its in held]

    def _num_known(self, seq: Sequence) -> int:
        """How many of the sequence's leading tokens are in a slot or the store, with or without states after them."""
        wanted, store = self._reusable(seq), self.prefixes.store
        return max(*self._alike(wanted, seq.salt), store.num_known(wanted, seq.salt) if store else 0)

    def _reusable(self, seq: Sequence) -> list[int]:
        """The sequence's leading tokens that another sequence may supply; the last token is always fed."""
        return self._kept(seq, seq.tokens[:-1])

    def _kept(self, seq: Sequence, tokens: list[int]) -> list[int]:
        """The part of `tokens` that other sequences may use: only the prompt's, if prompts have an arithmetic of their own."""
        return tokens[: seq.num_prompt_tokens] if self._separates else tokens

    def _all_kept(self) -> list[list[int]]:
        """For each slot its tokens that other sequences may use. Free slots hold no others."""
        kept = self._held.copy()
        for assigned in self._assignments.values() if self._separates else ():
            kept[assigned.slot] = self._kept(assigned.seq, kept[assigned.slot])
        return kept

    def _wanted_store(self) -> PrefixStore:
        if self.prefixes.store is None:
            raise CacheError(
                f"the {self.backend.name} backend keeps no keys and values outside of running requests here; "
                "use numba, and a prefix_cache_gb above 0"
            )
        return self.prefixes.store

    def _useful(self, seq: Sequence) -> float:
        """How many tokens a prefix must supply to be worth a copy."""
        return max(min(MIN_SHARED_PREFIX * len(seq.tokens), self.prefixes.many), 1)

    def _num_savable(self, slot: int) -> int:
        """How many of a slot's tokens are worth a copy: those beyond the limit of memory only if they can go to the disk."""
        store, max_bytes, held = self.prefixes.store, self.prefixes.max_bytes, len(self._held[slot])
        if not store or store.queue or max_bytes is None or not self.cache.bytes_per_token:
            return held
        return min(held, max_bytes // self.cache.bytes_per_token)

    def _save(self, slot: int, used: int, length: int | None = None) -> None:
        """Copy a slot's tokens, or its first `length`, to the store. They are lost if there is no memory for the copy."""
        if store := self.prefixes.store:
            tokens = self._held[slot][: self._num_savable(slot) if length is None else length]
            with suppress(MemoryError):
                for wanted in (*self._untaken[slot], len(tokens)) if self.cache.states else ():
                    hidden = self._hidden_at(slot, wanted)
                    # One with the hidden state that a head reads is worth more than a few tokens.
                    better = self.hidden_layers and not len(hidden) and self.cache.snapshots(slot)
                    if wanted <= len(tokens) and not any(0 <= wanted - taken < self.prefixes.many for taken in better or ()):
                        self.cache.take_snapshot(slot, wanted, hidden)
                store.copy_from_slot(slot, tokens, used, self._salts[slot])

    def _begin_hidden(self, seq: Sequence, num_cached: int) -> int:
        """Provide the hidden state of the last cached token, which a head reads: from a snapshot, or by feeding the token again.

        Returns how many tokens the slot supplies now, without one that is fed again. If neither is possible, the head drafts
        without that hidden state.
        """
        assigned = self._assignments[seq.id]
        slot = assigned.slot
        if self.cache.states:
            taken = self.cache.snapshots(slot).get(num_cached)
            if taken is not None and len(taken) > (size := self.cache.states.size(num_cached)):
                rows = taken[size:].view(np.float32).reshape(len(self.hidden_layers), 1, -1)
                assigned.hidden, assigned.num_hidden_kept = [tuple(rows)], 1
                return num_cached
        if self.cache.reachable(slot, num_cached - 1) == num_cached - 1:
            del self._held[slot][self.cache.truncate(slot, num_cached - 1) :]
            assigned.agreed = min(assigned.agreed, num_cached - 1)
            return num_cached - 1
        return num_cached

    def _plan_snapshots(self, assigned: _Assignment, states: StateAccess, branch: int) -> None:
        """Decide at which lengths of a prompt snapshots of its states are taken. branch: where it leaves the known prefixes.

        In this order, each unless another one is near: where turns of the conversation begin, the prompt's end, the branch, and
        every `states.apart` tokens.
        """
        seq = assigned.seq
        last, held = seq.num_prompt_tokens - 1, len(self._held[assigned.slot])  # the last token of a prompt is always fed
        assigned.snapshots += [length for length in self._untaken[assigned.slot] if length <= held]
        self._untaken[assigned.slot] = []
        store, max_bytes = self.prefixes.store, self.prefixes.max_bytes
        fits = max_bytes is None or max_bytes >= states.size(seq.num_prompt_tokens)
        if not self.prefixes.shares or not (fits or (states.waits and store and store.queue)):
            return
        for length in (*reversed(seq.turns), last, branch, *range(states.apart, last, states.apart)):
            others = (*self.cache.snapshots(assigned.slot), *assigned.snapshots)
            if held < length <= last and all(abs(length - other) >= self.prefixes.many for other in others):
                assigned.snapshots.append(length)
        assigned.snapshots.sort()

    def _hidden_at(self, slot: int, length: int) -> U8:
        """Hidden states of the last of the first `length` tokens, if the slot's last forward computed them; else empty."""
        first, layers = self._latest[slot]
        rows = [layer[length - 1 - first] for layer in layers if 0 <= length - 1 - first < len(layer)]
        return np.concatenate(rows).view(np.uint8) if rows else np.empty(0, np.uint8)

    def _take_snapshots(self, feed: _Feed) -> None:
        """Take the planned snapshots that cannot wait: the slot has their tokens, and the next forward may overwrite the states."""
        assert self.cache.states, "asked of caches with states only"
        waits = 0 if self.hidden_layers else self.cache.states.waits  # the hidden state is the last forward's
        while feed.snapshots and feed.snapshots[0] <= self.cache.lengths[feed.slot] - waits:
            length = feed.snapshots.pop(0)
            with suppress(MemoryError):
                self.cache.take_snapshot(feed.slot, length, self._hidden_at(feed.slot, length))
            self.prefixes.tidy()

    def _align(self, seq: Sequence, num_refed: int = 1) -> list[int]:
        """Truncate a sequence's slot to the tokens that both share, without the last `num_refed`; returns the slot's tokens.

        The last token is always fed again before a score: its row is wanted even if the slot holds it.
        """
        assigned = self._assignments[seq.id]
        slot, assigned.seq = assigned.slot, seq
        held, most = self._held[slot], len(seq.tokens) - num_refed
        # Only tokens that are new since the last score are compared: comparing a long context takes longer than all else here.
        agreed = min(assigned.agreed, len(held), most)
        # The cache may have more rows than `_held` says: those of a tree, or of a forward that was interrupted.
        if agreed < self.cache.lengths[slot]:
            agreed += shared_prefix(held[agreed:], seq.tokens[agreed:most])
            del held[self.cache.truncate(slot, agreed) :]
        assigned.agreed = min(len(held), seq.num_committed)
        return held

    def _feed(self, seq: Sequence, draft: Draft) -> _Feed:
        """The rows of a sequence and its draft that its slot lacks."""
        assigned, num_drafted, num_committed = self._assignments[seq.id], len(draft), len(seq.tokens)
        tree = None if draft.is_chain else draft
        if tree and self.backend.config.is_recurrent:
            raise ConfigError(f"{tree.source} drafted a tree, and recurrent layers read one path alone; take a drafter of chains")
        if tree and num_drafted > self.backend.max_rows:
            raise ConfigError(
                f"a forward takes {self.backend.max_rows} rows, and {tree.source} drafted a tree of {num_drafted} tokens"
            )
        if num_committed + num_drafted > self.capacity:
            raise CacheError(
                f"{num_committed + num_drafted} tokens do not fit a context of {self.capacity}; raise context_length or send fewer"
            )
        num_held = len(self._align(seq))
        tokens = seq.tokens[num_held:] + draft.tokens.tolist()
        num_straight = len(tokens) - num_drafted if tree else len(tokens)
        num_prompt = self._num_prompt(seq, num_held)
        num_unscored, adapters = num_committed - 1 - num_held, self._adapters(seq)
        return _Feed(assigned.slot, tokens, num_unscored, num_prompt, num_straight, tree, assigned.snapshots, adapters)

    def _read(self, chunk: PromptChunk) -> _Feed:
        """The rows of a chunk that come before the sequence's last token."""
        assigned = self._assignments[chunk.seq.id]
        num_held = len(self._align(chunk.seq))
        tokens = chunk.seq.tokens[num_held:-1][: chunk.num_tokens]
        assert tokens, "a chunk has tokens"
        num_prompt = self._num_prompt(chunk.seq, num_held)
        adapters = self._adapters(chunk.seq)
        return _Feed(assigned.slot, tokens, len(tokens), num_prompt, len(tokens), None, assigned.snapshots, adapters)

    def _adapters(self, seq: Sequence) -> AdapterSet:
        """`_Feed.adapters` of a sequence."""
        return seq.adapters if self.applies_adapters else ()

    def _num_prompt(self, seq: Sequence, num_held: int) -> int:
        """`_Feed.num_prompt` of a sequence whose slot holds that many tokens."""
        return num_of_prompt(self.backend, seq.num_prompt_tokens, num_held)

    def _fit(self, output: ForwardOutput, is_plain_greedy: bool) -> ForwardOutput:
        """Make the rows `vocab_size` long, with no probability for tokens that the model does not have or `token_ids` leaves out.

        is_plain_greedy: whether the ids of the largest logits are all that is wanted. Rows of few tokens stay short then.
        """
        logits, ids = output.logits, self.token_ids
        if ids is None:
            missing = self.vocab_size - logits.shape[1]
            if missing > 0:
                return replace(output, logits=np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf))
            return replace(output, logits=logits[:, : self.vocab_size], best=None)
        if logits.shape[1] > len(ids):
            logits, output = logits[:, ids], replace(output, best=None)
        if not is_plain_greedy:
            rows = np.full((len(logits), self.vocab_size), -np.inf, np.float32)
            rows[:, ids] = logits
            return replace(output, logits=rows, best=None)
        best = output.best
        if best is None:
            best = [int(row.argmax()) if np.isfinite(row.max()) else -1 for row in logits]
        return replace(output, logits=logits, best=[int(ids[number]) if number >= 0 else -1 for number in best])

    def most_ahead(self, num_seqs: int) -> int:
        """How many forwards may follow one over a row of each sequence, so that all together take no time that is noticed."""
        rows, seconds = self._last_forward
        return min(int(_AT_ONCE_S / seconds) - 1, _MOST_AHEAD) if rows == num_seqs and seconds < _AT_ONCE_S else 0

    def _forward(
        self, feeds: list[_Feed], hidden_layers: tuple[int, ...], stops_early: bool, num_ahead: int, ends: abc.Sequence[int]
    ) -> list[_Feed]:
        """Run as many rows as one forward takes; returns the feeds with rows left. Tokens of prompts may go first, separately."""
        of_prompts = any(feed.num_prompt for feed in feeds)
        others = [feed for feed in feeds if of_prompts and not feed.num_prompt]
        feeds = [feed for feed in feeds if not of_prompts or feed.num_prompt]
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        q_start, num_scored = [0], [0]
        for feed in feeds:
            first, start, size = len(tokens), len(self._held[feed.slot]), len(feed.tokens)
            if of_prompts:
                size = min(size, feed.num_prompt)
            if feed.snapshots and self.cache.states and size > (until := feed.snapshots[0] - start) + self.cache.states.passed:
                size = max(until, 1)
            if first + size > self.backend.max_rows:
                size = min(self.backend.max_rows - first, size, feed.num_straight)  # a tree goes as a whole
                if not size:
                    break
            tokens += feed.tokens[:size]
            positions += range(start, start + size)
            slots.append(feed.slot)
            logit_rows += range(first + feed.num_unscored, first + size)
            q_start.append(first + size)
            num_scored.append(len(logit_rows))
        parents = _tree_parents(feeds, q_start, positions) if not of_prompts and any(feed.tree for feed in feeds) else None
        batch = ForwardBatch(
            tokens, positions, slots, q_start, parents, logit_rows, hidden_layers, of_prompts=of_prompts, stops_early=stops_early,
            adapters=[feed.adapters for feed in feeds[: len(slots)]], num_ahead=0 if of_prompts else num_ahead, ends=ends,
        )  # fmt: skip
        begin_s = now_s()
        output = self.backend.forward(batch, self.cache)
        seconds, times = now_s() - begin_s, 1 if output.ahead is None else 1 + len(output.ahead[0])
        self._last_forward = len(tokens), seconds / times
        self.spent.add(len(tokens), seconds, times)
        self.num_forwards += times
        self.num_rows += times * len(tokens)
        self.weight_bytes += output.weight_bytes
        left = []
        for i, feed in enumerate(feeds[: len(slots)]):
            start, end = q_start[i], q_start[i + 1]
            size, num_before = end - start, len(self._held[feed.slot])
            self._held[feed.slot] += feed.tokens[: min(size, feed.num_straight)]
            if output.ahead:
                self._held[feed.slot] += output.ahead[i]
            if self.cache.states:
                self._latest[feed.slot] = num_before, [layer[start:end] for layer in output.hidden]
                self._take_snapshots(feed)
            if len(slots) > 1:
                feed.outputs.append(_part(output, i, slice(start, end), slice(num_scored[i], num_scored[i + 1])))
            else:
                feed.outputs.append(output)
            if size < len(feed.tokens):
                del feed.tokens[:size]
                feed.num_prompt = max(feed.num_prompt - size, 0)
                feed.num_straight -= size
                feed.num_unscored = max(feed.num_unscored - size, 0)
                left.append(feed)
        return left + feeds[len(slots) :] + others


def shortest_first(wanted: list[int], num_rows: int) -> list[int]:
    """Divide `num_rows` rows: returns how many each of `wanted` gets. Those that want fewest come first.

    The first one in the list that wants rows, the oldest, always gets a part, so that it ends however many short ones come.
    """
    granted = [0] * len(wanted)
    oldest = [i for i, number in enumerate(wanted) if number][:1]
    shares = [(i, -(-num_rows // _OLDEST_PART)) for i in oldest]
    shares += [(i, num_rows) for i in sorted(range(len(wanted)), key=wanted.__getitem__)]
    for i, most in shares:
        rows = min(wanted[i] - granted[i], most, num_rows)
        granted[i] += rows
        num_rows -= rows
    return granted


def _tree_parents(feeds: list[_Feed], q_start: list[int], positions: list[int]) -> I32:
    """The parents of a batch's rows; sets the positions of tree rows to their depths."""
    parents = np.arange(q_start[-1], dtype=np.int32) - 1
    parents[q_start[:-1]] = -1
    for feed, start, end in zip(feeds, q_start, q_start[1:], strict=False):
        if feed.tree and end - start == len(feed.tokens):
            first = end - len(feed.tree)
            positions[first:end] = (positions[first] - 1 + feed.tree.depths).tolist()
            # A node without a parent follows the last committed token: the row before, or cached.
            parents[first:end] = np.where(feed.tree.parents < 0, parents[first], first + feed.tree.parents)
    return parents


def _part(output: ForwardOutput, number: int, rows: slice, scored: slice) -> ForwardOutput:
    """The part of an output that belongs to one sequence."""
    best, ahead = None if output.best is None else output.best[scored], output.ahead and [output.ahead[number]]
    return ForwardOutput(output.logits[scored], tuple(layer[rows] for layer in output.hidden), best, ahead=ahead)


def _join(parts: list[ForwardOutput]) -> ForwardOutput:
    """The output of one sequence whose rows took several forwards."""
    layers = zip(*(part.hidden for part in parts), strict=True)
    return ForwardOutput(
        np.concatenate([part.logits for part in parts]),
        tuple(np.concatenate(layer) for layer in layers),
        None if any(part.best is None for part in parts) else [id for part in parts for id in part.best or ()],
    )

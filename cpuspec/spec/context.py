"""One model with its cache for all running sequences. The target is a Context, and so is every draft model.

It knows which tokens each slot's cache holds, and brings a slot to any token string by one rule: truncate to the
shared prefix, feed the rest. It knows nothing about sampling or about why a string changed.
"""

from dataclasses import dataclass

import numpy as np

from cpuspec.backends import Backend
from cpuspec.errors import CacheError, ConfigError
from cpuspec.model.batch import ForwardBatch, ForwardOutput
from cpuspec.sequence import Sequence, shared_prefix
from cpuspec.spec.draft import Draft

# A slot is worth reusing when it supplies this share of the new tokens, as llama.cpp's server decides; a shorter
# overlap, such as a system prompt's first words, would cost another conversation its cache.
MIN_SHARED_PREFIX = 0.1


@dataclass
class _Feed:
    """Rows of one sequence that a score still has to run."""

    slot: int
    tokens: list[int]  # committed and drafted
    first_scored: int  # index of the first token whose row is asked for
    logits: list[np.ndarray]
    hidden: list[tuple[np.ndarray, ...]]


class Context:
    """One model and its cache. Not thread-safe: one caller at a time."""

    def __init__(self, backend: Backend, num_slots: int, capacity: int) -> None:
        self.backend = backend
        self.cache = backend.new_cache(num_slots, capacity)
        self.capacity = capacity
        self.num_forwards = 0
        self._held: list[list[int]] = [[] for _ in range(num_slots)]  # tokens whose keys and values each slot holds
        self._free = list(range(num_slots))  # least recently used first
        self._slots: dict[int, int] = {}  # sequence id -> slot

    @property
    def num_free_slots(self) -> int:
        """How many sequences could be acquired now."""
        return len(self._free)

    def acquire(self, seq: Sequence) -> int:
        """Give the sequence a slot; returns how many of its tokens the slot already supplies.

        Picks the free slot with the longest useful shared prefix, else an empty one, else the least recently used.
        Raises CacheError when no slot is free.
        """
        if not self._free:
            raise CacheError(f"all {self.cache.num_slots} cache slots are taken; finish or abort a sequence first")
        assert seq.id not in self._slots, "a sequence acquires one slot"
        shared = {slot: shared_prefix(self._held[slot], seq.tokens) for slot in self._free}
        best = max(self._free, key=lambda slot: shared[slot])
        if shared[best] < MIN_SHARED_PREFIX * len(seq.tokens) or not shared[best]:
            best = next((slot for slot in self._free if not self._held[slot]), self._free[0])
        self._slots[seq.id] = best  # before it leaves the free list: an interrupt between the two loses no slot
        self._free.remove(best)
        return min(shared[best], len(seq.tokens) - 1)

    def release(self, seq: Sequence) -> None:
        """Take the slot back. Its tokens stay, for a later sequence that begins alike. Unknown sequences are ignored."""
        slot = self._slots.pop(seq.id, None)
        if slot is not None and slot not in self._free:
            self._free.append(slot)

    def score(self, seqs: list[Sequence], drafts: list[Draft], hidden_layers: tuple[int, ...] = ()) -> list[ForwardOutput]:
        """For each sequence the rows after its last committed token and after each drafted one.

        Returns logits [n+1, V], and hidden [rows fed, C] for each asked layer, whose last n+1 rows belong to the logits.
        Afterwards the slot holds committed and drafted tokens. Raises CacheError when they exceed the capacity.
        """
        feeds = [self._feed(seq, draft) for seq, draft in zip(seqs, drafts, strict=True)]
        waiting = list(feeds)
        while waiting:
            waiting = self._forward(waiting, hidden_layers)
        return [
            ForwardOutput(_join(feed.logits), tuple(_join(list(layer)) for layer in zip(*feed.hidden, strict=True)))
            for feed in feeds
        ]

    def read_bytes(self, seq: Sequence) -> int:
        """Bytes of weights, and of keys and values for all the sequence's tokens, that one forward reads."""
        return self.backend.weight_bytes + len(seq.tokens) * self.cache.bytes_per_token

    def _feed(self, seq: Sequence, draft: Draft) -> _Feed:
        """Truncate the sequence's slot to what it shares with the wanted tokens."""
        slot, tokens = self._slots[seq.id], seq.tokens + draft.tokens.tolist()
        if (draft.parents != np.arange(len(draft)) - 1).any():
            raise ConfigError(f"{draft.source} drafted a tree; this version scores chains, so draft one")
        if len(tokens) > self.capacity:
            raise CacheError(f"{len(tokens)} tokens do not fit a context of {self.capacity}; raise context_length or send fewer")
        # The last committed token is always fed: its row is asked for even where a slot already holds it.
        keep = min(shared_prefix(self._held[slot], tokens), len(seq.tokens) - 1)
        del self._held[slot][keep:]
        self.cache.truncate(slot, keep)
        return _Feed(slot, tokens, len(seq.tokens) - 1, [], [])

    def _forward(self, feeds: list[_Feed], hidden_layers: tuple[int, ...]) -> list[_Feed]:
        """Run as many rows as one forward takes; returns the feeds that have rows left."""
        room = self.backend.max_rows
        tokens: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        q_start = [0]
        parts: list[tuple[_Feed, int]] = []  # with how many rows are scored
        for feed in feeds:
            start = len(self._held[feed.slot])
            end = min(start + room, len(feed.tokens))
            if end == start:
                break
            scored = range(max(start, feed.first_scored), end)
            logit_rows += [len(tokens) + index - start for index in scored]
            tokens += feed.tokens[start:end]
            positions += range(start, end)
            q_start.append(len(tokens))
            parts.append((feed, len(scored)))
            room -= end - start
        output = self.backend.forward(
            ForwardBatch(
                tokens=np.array(tokens, np.int32),
                positions=np.array(positions, np.int32),
                slots=np.array([feed.slot for feed, _ in parts], np.int32),
                q_start=np.array(q_start, np.int32),
                logit_rows=np.array(logit_rows, np.int32),
                hidden_layers=hidden_layers,
            ),
            self.cache,
        )
        self.num_forwards += 1
        first = 0
        for (feed, num_scored), begin, end in zip(parts, q_start[:-1], q_start[1:], strict=True):
            self._held[feed.slot] += tokens[begin:end]
            feed.logits.append(output.logits[first : first + num_scored])
            feed.hidden.append(tuple(layer[begin:end] for layer in output.hidden))
            first += num_scored
        return [feed for feed in feeds if len(self._held[feed.slot]) < len(feed.tokens)]


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

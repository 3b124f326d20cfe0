"""One model with its cache for all running sequences. The target is a Context, and so is every draft model.

It knows which tokens each slot's cache holds, and brings a slot to any token string by one rule: truncate to the
shared prefix, feed the rest. It knows nothing about sampling or about why a string changed.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cpuspec.backends import Backend
from cpuspec.errors import CacheError, ConfigError
from cpuspec.model.batch import I32, ForwardBatch, ForwardOutput
from cpuspec.sequence import Mark, Sequence, shared_prefix
from cpuspec.speculation.draft import Draft

# A slot is worth reusing when it supplies this share of the new tokens, as llama.cpp's server decides; a shorter
# overlap, such as a system prompt's first words, would cost another conversation its cache.
MIN_SHARED_PREFIX = 0.1


@dataclass(slots=True)
class _Seat:
    """A sequence's place in the cache."""

    slot: int
    agreed: Mark  # a state of the sequence all of whose tokens the slot was about to hold


@dataclass(slots=True)
class _Feed:
    """What a score still has to run of one sequence, and what it has."""

    slot: int
    held: list[int]  # tokens that the slot holds
    tokens: list[int]  # committed and drafted ones that the slot does not hold yet
    num_unscored: int  # how many of them come before the first whose row is asked for
    num_straight: int  # how many of them follow one another: all, or all before a tree
    tree: Draft | None  # the draft, unless its tokens follow one another
    outputs: list[ForwardOutput]


class Context:
    """One model and its cache. Not thread-safe: one caller at a time.

    vocab_size: length of the rows it returns, None for the model's own. A draft model whose vocabulary was padded to another
    length than the target's, as Qwen2.5's were, then speaks the target's ids: tokens beyond are cut off, or impossible.
    possible: [vocab_size] the only tokens that its rows leave possible; None for all.
    """

    def __init__(
        self,
        backend: Backend,
        num_slots: int,
        capacity: int,
        vocab_size: int | None = None,
        possible: NDArray[np.bool_] | None = None,
    ) -> None:
        self.backend = backend
        self.cache = backend.new_cache(num_slots, capacity)
        self.capacity = capacity
        self.vocab_size = backend.config.vocab_size if vocab_size is None else vocab_size
        self.possible = possible
        self.num_forwards = 0
        self._fits = self.vocab_size == backend.config.vocab_size and possible is None
        self._held: list[list[int]] = [[] for _ in range(num_slots)]  # tokens whose keys and values each slot holds
        self._free = list(range(num_slots))  # least recently used first
        self._seats: dict[int, _Seat] = {}  # by sequence id

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
        assert seq.id not in self._seats, "a sequence acquires one slot"
        shared = {slot: shared_prefix(self._held[slot], seq.tokens) for slot in self._free}
        best = max(self._free, key=lambda slot: shared[slot])
        if shared[best] < MIN_SHARED_PREFIX * len(seq.tokens) or not shared[best]:
            best = next((slot for slot in self._free if not self._held[slot]), self._free[0])
        # Before the slot leaves the free list: an interrupt between the two loses no slot.
        self._seats[seq.id] = _Seat(best, Mark(shared[best], len(seq.rewinds)))
        self._free.remove(best)
        return min(shared[best], len(seq.tokens) - 1)

    def release(self, seq: Sequence) -> None:
        """Take the slot back. Its tokens stay, for a later sequence that begins alike. Unknown sequences are ignored."""
        seat = self._seats.pop(seq.id, None)
        if seat is not None and seat.slot not in self._free:
            self._free.append(seat.slot)

    def score(self, seqs: list[Sequence], drafts: list[Draft], hidden_layers: tuple[int, ...] = ()) -> list[ForwardOutput]:
        """For each sequence the rows after its last committed token and after each drafted one.

        Returns logits [n+1, V], and hidden [rows fed, C] for each asked layer, whose last n+1 rows belong to the logits.
        Afterwards the slot holds committed and drafted tokens, of a tree only what `keep_path` keeps. Raises CacheError when they
        exceed the capacity, and ConfigError for a tree of more rows than a forward takes.
        """
        assert len(seqs) == len(drafts), "every sequence has a draft, be it empty"
        feeds = list(map(self._feed, seqs, drafts))
        waiting = feeds
        while waiting:
            waiting = self._forward(waiting, hidden_layers)
        outputs = []
        for feed in feeds:
            output = feed.outputs[0] if len(feed.outputs) == 1 else _join(feed.outputs)
            outputs.append(output if self._fits else self._fit(output))
        return outputs

    def keep_path(self, seq: Sequence, draft: Draft, path: list[int]) -> None:
        """Hold the nodes on `path` of a tree that was just scored, so that they need not be fed again."""
        seat = self._seats[seq.id]
        assert len(self._held[seat.slot]) == len(seq.tokens), "a path is kept before its tokens are committed"
        self.cache.keep_path(seat.slot, len(seq.tokens), np.array(path, np.int32))
        self._held[seat.slot] += (draft.tokens.item(node) for node in path)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the cache has taken up so far."""
        return self.cache.used_bytes

    def _fit(self, output: ForwardOutput) -> ForwardOutput:
        """Rows of `vocab_size` logits. Fitted before they become probabilities: a draft declares what it draws from."""
        logits, missing = output.logits, self.vocab_size - output.logits.shape[1]
        if missing > 0:
            output = replace(output, logits=np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf))
        elif missing:
            output = replace(output, logits=logits[:, : self.vocab_size], best=None)
        if self.possible is not None:
            output = replace(output, logits=np.where(self.possible, output.logits, np.float32(-np.inf)), best=None)
        return output

    def _feed(self, seq: Sequence, draft: Draft) -> _Feed:
        """Truncate the sequence's slot to what it shares with the wanted tokens."""
        seat, drafted, num_committed = self._seats[seq.id], draft.num_tokens, len(seq.tokens)
        tree = None if draft.is_chain else draft
        if tree and drafted > self.backend.max_rows:
            raise ConfigError(f"a forward takes {self.backend.max_rows} rows, and {tree.source} drafted a tree of {drafted} tokens")
        if num_committed + drafted > self.capacity:
            raise CacheError(
                f"{num_committed + drafted} tokens do not fit a context of {self.capacity}; raise context_length or send fewer"
            )
        held = self._held[seat.slot]
        # Only what is new since the last score is compared: in a long context, comparing it all takes longer than the rest.
        # The last committed token is always fed: its row is asked for even where a slot already holds it.
        agreed = min(seq.unchanged(seat.agreed), len(held), num_committed - 1)
        wanted = seq.tokens[agreed:]
        if drafted:
            wanted += draft.tokens.tolist()
        # The cache may have more rows than are held: of a tree, or of a forward that was interrupted.
        if agreed < self.cache.lengths[seat.slot]:
            shared = min(shared_prefix(held[agreed:], wanted), num_committed - 1 - agreed)
            agreed += shared
            del held[agreed:], wanted[:shared]
            self.cache.truncate(seat.slot, agreed)
        seat.agreed = seq.mark()
        num_straight = len(wanted) - drafted if tree else len(wanted)
        return _Feed(seat.slot, held, wanted, num_committed - 1 - agreed, num_straight, tree, [])

    def _forward(self, feeds: list[_Feed], hidden_layers: tuple[int, ...]) -> list[_Feed]:
        """Run as many rows as one forward takes; returns the feeds that have rows left."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        q_start, num_scored = [0], [0]
        hangs = False
        for feed in feeds:
            first, start, size = len(tokens), len(feed.held), len(feed.tokens)
            if first + size > self.backend.max_rows:
                size = min(self.backend.max_rows - first, feed.num_straight)  # a tree goes as a whole
                if not size:
                    break
            hangs = hangs or feed.tree is not None
            tokens += feed.tokens[:size]
            positions += range(start, start + size)
            slots.append(feed.slot)
            logit_rows += range(first + feed.num_unscored, first + size)
            q_start.append(first + size)
            num_scored.append(len(logit_rows))
        parents = _hang(feeds, q_start, positions) if hangs else None
        batch = ForwardBatch(tokens, positions, slots, q_start, parents, logit_rows, hidden_layers)
        output = self.backend.forward(batch, self.cache)
        self.num_forwards += 1
        left = []
        for i, feed in enumerate(feeds[: len(slots)]):
            start, end = q_start[i], q_start[i + 1]
            size = end - start
            feed.held += feed.tokens[: min(size, feed.num_straight)]
            if len(slots) > 1:
                feed.outputs.append(_part(output, slice(start, end), slice(num_scored[i], num_scored[i + 1])))
            else:
                feed.outputs.append(output)
            if size < len(feed.tokens):
                del feed.tokens[:size]
                feed.num_straight -= size
                feed.num_unscored = max(feed.num_unscored - size, 0)
                left.append(feed)
        return left + feeds[len(slots) :]


def _hang(feeds: list[_Feed], q_start: list[int], positions: list[int]) -> I32:
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


def _part(output: ForwardOutput, rows: slice, scored: slice) -> ForwardOutput:
    best = None if output.best is None else output.best[scored]
    return ForwardOutput(output.logits[scored], tuple(layer[rows] for layer in output.hidden), best)


def _join(parts: list[ForwardOutput]) -> ForwardOutput:
    layers = zip(*(part.hidden for part in parts), strict=True)
    return ForwardOutput(
        np.concatenate([part.logits for part in parts]),
        tuple(np.concatenate(layer) for layer in layers),
        None if any(part.best is None for part in parts) else [id for part in parts for id in part.best or ()],
    )

"""One model with its cache for all running sequences. The target is a Context, and so is every draft model.

It knows which tokens each slot's cache holds, and brings a slot to any token string by one rule: truncate to the shared prefix,
feed the rest. It knows nothing about sampling or about why a string changed.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpuspec.backends import Backend
from cpuspec.config import EngineConfig
from cpuspec.errors import CacheError, ConfigError
from cpuspec.model.batch import F32, I32, ForwardBatch, ForwardOutput
from cpuspec.sequence import Mark, Sequence, shared_prefix
from cpuspec.speculation.draft import Draft

# A slot is worth reusing when it supplies this share of the new tokens, as llama.cpp's server decides; a shorter
# overlap, such as a system prompt's first words, would cost another conversation its cache.
MIN_SHARED_PREFIX = 0.1
_WORTH_WAITING = 32  # tokens that another prompt is about to supply: computing fewer takes less time than one more step


class PromptChunk(NamedTuple):
    """The next `num_tokens` tokens of a sequence, to be fed beside the rows of other sequences. Nobody asks for their logits."""

    seq: Sequence
    num_tokens: int


@dataclass(slots=True)
class _Assignment:
    """The slot that a sequence has.

    agreed: a state of the sequence; every token that the slot holds was a token of it then.
    hidden: the asked layers of the chunks that were fed since the last score.
    """

    seq: Sequence
    slot: int
    agreed: Mark
    hidden: list[tuple[F32, ...]] = field(default_factory=list)


@dataclass(slots=True)
class _Feed:
    """The rows of one sequence that a score still has to run, and the outputs of those that ran.

    tokens: committed and drafted ones that the slot does not hold yet. num_unscored: how many of them come before the first whose
    logits are asked for. num_straight: how many follow one another: all, or those before a tree. tree: the draft if it is one.
    """

    slot: int
    tokens: list[int]
    num_unscored: int
    num_straight: int
    tree: Draft | None
    outputs: list[ForwardOutput]


class Context:
    """One model and its cache. Not thread-safe: one caller at a time.

    vocab_size: length of the rows it returns, None for the model's own. A draft model whose vocabulary was padded to another
    length than the target's, as Qwen2.5's were, then speaks the target's ids: tokens beyond are cut off, or impossible.
    possible: [vocab_size] the only tokens that its rows leave possible; None for all.
    prompt_rows: rows of prompts that are fed in one score beside sequences that generate (`EngineConfig.prompt_rows`).
    """

    def __init__(
        self,
        backend: Backend,
        num_slots: int,
        capacity: int,
        vocab_size: int | None = None,
        possible: NDArray[np.bool_] | None = None,
        prompt_rows: int = EngineConfig.prompt_rows,
    ) -> None:
        self.backend = backend
        self.cache = backend.new_cache(num_slots, capacity)
        self.capacity = capacity
        self.vocab_size = backend.config.vocab_size if vocab_size is None else vocab_size
        self.possible = possible
        self.prompt_rows = min(prompt_rows, backend.max_rows)
        self.num_forwards = 0
        self._fits = self.vocab_size == backend.config.vocab_size and possible is None
        self._held: list[list[int]] = [[] for _ in range(num_slots)]  # tokens whose keys and values each slot holds
        self._free = list(range(num_slots))  # least recently used first
        self._assignments: dict[int, _Assignment] = {}  # by sequence id

    @property
    def num_free_slots(self) -> int:
        """How many sequences could be acquired now."""
        return len(self._free)

    @property
    def num_sequences(self) -> int:
        """How many sequences have a slot."""
        return len(self._assignments)

    def acquire(self, seq: Sequence) -> int:
        """Give the sequence a slot; returns how many of its tokens the slot already supplies, at most all but the last.

        Picks the free slot with the longest useful shared prefix, else an empty one, else the least recently used. Where the slot
        of a running sequence shares more, that prefix is copied. Raises CacheError when no slot is free.
        """
        if not self._free:
            raise CacheError(f"all {self.cache.num_slots} cache slots are taken; finish or abort a sequence first")
        assert seq.id not in self._assignments, "a sequence acquires one slot"
        shared = self._shared(seq)
        slot, source = max(self._free, key=shared.__getitem__), max(range(len(shared)), key=shared.__getitem__)
        useful = max(MIN_SHARED_PREFIX * len(seq.tokens), 1)
        if shared[slot] < useful:
            slot = next((slot for slot in self._free if not self._held[slot]), self._free[0])
        # Before the slot leaves the free list: an interrupt between the two loses no slot.
        self._assignments[seq.id] = assigned = _Assignment(seq, slot, Mark(shared[slot], len(seq.rewinds)))
        self._free.remove(slot)
        if shared[source] > shared[slot] and shared[source] >= useful:
            self._held[slot] = []
            length = self.cache.copy(source, slot, shared[source])
            self._held[slot], assigned.agreed = self._held[source][:length], seq.mark()
        return len(self._align(assigned))

    def awaits_prefix(self, seq: Sequence) -> bool:
        """Whether a running sequence will soon hold a useful prefix of this one that no slot holds yet: acquire it then."""
        useful = max(MIN_SHARED_PREFIX * len(seq.tokens), _WORTH_WAITING)
        if len(seq.tokens) < useful:
            return False
        coming = max((shared_prefix(other.seq.tokens, seq.tokens) for other in self._assignments.values()), default=0)
        return coming >= useful and coming - max(self._shared(seq)) >= useful

    def release(self, seq: Sequence) -> None:
        """Take the slot back. Its tokens stay, for a later sequence that begins alike. Unknown sequences are ignored."""
        assigned = self._assignments.pop(seq.id, None)
        if assigned is not None and assigned.slot not in self._free:
            self._free.append(assigned.slot)

    def num_unfed(self, seq: Sequence) -> int:
        """How many tokens a score would feed before the sequence's last one."""
        return len(seq.tokens) - 1 - len(self._align(self._assignments[seq.id]))

    def score(
        self,
        seqs: list[Sequence],
        drafts: list[Draft],
        hidden_layers: tuple[int, ...] = (),
        chunks: list[PromptChunk] | None = None,
    ) -> list[ForwardOutput]:
        """For each sequence the rows after its last committed token and after each drafted one; `chunks` are fed beside them.

        Returns logits [n+1, V], and hidden [rows fed, C] for each asked layer, whose last n+1 rows belong to the logits. Rows of
        chunks are added to those of the sequence's next score; until then they take 4 C bytes a token and layer.
        Afterwards the slot holds committed and drafted tokens, of a tree only those that `keep_path` keeps. Raises CacheError when
        they exceed the capacity, and ConfigError for a tree of more rows than a forward takes.
        """
        assert len(seqs) == len(drafts), "every sequence has a draft, be it empty"
        feeds, read = list(map(self._feed, seqs, drafts)), list(map(self._read, chunks or ()))
        waiting = feeds + read
        while waiting:
            waiting = self._forward(waiting, hidden_layers)
        if hidden_layers:
            for chunk, feed in zip(chunks or (), read, strict=True):
                self._assignments[chunk.seq.id].hidden += [output.hidden for output in feed.outputs]
        outputs = []
        for seq, feed in zip(seqs, feeds, strict=True):
            output = feed.outputs[0] if len(feed.outputs) == 1 else _join(feed.outputs)
            assigned = self._assignments[seq.id]
            if assigned.hidden:
                layers = zip(*assigned.hidden, output.hidden, strict=True)
                output = replace(output, hidden=tuple(map(np.concatenate, layers)))
                assigned.hidden = []
            outputs.append(output if self._fits else self._fit(output))
        return outputs

    def keep_path(self, seq: Sequence, draft: Draft, path: list[int]) -> None:
        """Hold the nodes on `path` of a tree that was just scored, so that they need not be fed again."""
        slot = self._assignments[seq.id].slot
        held = self._held[slot]
        assert len(held) == len(seq.tokens), "a path is kept before its tokens are committed"
        length = self.cache.keep_path(slot, len(seq.tokens), np.array(path, np.int32))
        held += draft.tokens[path].tolist()
        del held[length:]

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the cache has taken up so far."""
        return self.cache.used_bytes

    def _shared(self, seq: Sequence) -> list[int]:
        """For each slot the number of the sequence's leading tokens that it holds."""
        return [shared_prefix(held, seq.tokens) for held in self._held]

    def _align(self, assigned: _Assignment) -> list[int]:
        """Truncate the slot to the tokens that it shares with its sequence, all but the last at most; returns those it then holds.

        The last committed token is always fed: its row is asked for even where a slot already holds it.
        """
        seq, slot = assigned.seq, assigned.slot
        held = self._held[slot]
        # Only tokens that are new since the last score are compared: comparing all of a long context takes longer than the rest.
        agreed = min(seq.unchanged(assigned.agreed), len(held), len(seq.tokens) - 1)
        # The cache may have more rows than are held: those of a tree, or of a forward that was interrupted.
        if agreed < self.cache.lengths[slot]:
            agreed += shared_prefix(held[agreed:], seq.tokens[agreed:-1])
            del held[self.cache.truncate(slot, agreed) :]
        assigned.agreed = seq.mark()
        return held

    def _feed(self, seq: Sequence, draft: Draft) -> _Feed:
        """The rows of a sequence and its draft that its slot lacks."""
        assigned, num_drafted, num_committed = self._assignments[seq.id], len(draft), len(seq.tokens)
        tree = None if draft.is_chain else draft
        if tree and num_drafted > self.backend.max_rows:
            raise ConfigError(
                f"a forward takes {self.backend.max_rows} rows, and {tree.source} drafted a tree of {num_drafted} tokens"
            )
        if num_committed + num_drafted > self.capacity:
            raise CacheError(
                f"{num_committed + num_drafted} tokens do not fit a context of {self.capacity}; raise context_length or send fewer"
            )
        num_held = len(self._align(assigned))
        tokens = seq.tokens[num_held:] + draft.tokens.tolist()
        num_straight = len(tokens) - num_drafted if tree else len(tokens)
        return _Feed(assigned.slot, tokens, num_committed - 1 - num_held, num_straight, tree, [])

    def _read(self, chunk: PromptChunk) -> _Feed:
        """The rows of a chunk, as far as they come before the sequence's last token."""
        assigned = self._assignments[chunk.seq.id]
        num_held = len(self._align(assigned))
        tokens = chunk.seq.tokens[num_held:-1][: chunk.num_tokens]
        assert tokens, "a chunk has tokens"
        return _Feed(assigned.slot, tokens, len(tokens), len(tokens), None, [])

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

    def _forward(self, feeds: list[_Feed], hidden_layers: tuple[int, ...]) -> list[_Feed]:
        """Run as many rows as one forward takes; returns the feeds that have rows left."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        q_start, num_scored = [0], [0]
        for feed in feeds:
            first, start, size = len(tokens), len(self._held[feed.slot]), len(feed.tokens)
            if first + size > self.backend.max_rows:
                size = min(self.backend.max_rows - first, feed.num_straight)  # a tree goes as a whole
                if not size:
                    break
            tokens += feed.tokens[:size]
            positions += range(start, start + size)
            slots.append(feed.slot)
            logit_rows += range(first + feed.num_unscored, first + size)
            q_start.append(first + size)
            num_scored.append(len(logit_rows))
        parents = _tree_parents(feeds, q_start, positions) if any(feed.tree for feed in feeds) else None
        batch = ForwardBatch(tokens, positions, slots, q_start, parents, logit_rows, hidden_layers)
        output = self.backend.forward(batch, self.cache)
        self.num_forwards += 1
        left = []
        for i, feed in enumerate(feeds[: len(slots)]):
            start, end = q_start[i], q_start[i + 1]
            size = end - start
            self._held[feed.slot] += feed.tokens[: min(size, feed.num_straight)]
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


def first_come(wanted: list[int], num_rows: int) -> list[int]:
    """How many rows each of those that want rows gets of `num_rows`, first come, first served."""
    granted = []
    for number in wanted:
        granted.append(min(number, num_rows))
        num_rows -= granted[-1]
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


def _part(output: ForwardOutput, rows: slice, scored: slice) -> ForwardOutput:
    """The part of an output that belongs to one sequence."""
    best = None if output.best is None else output.best[scored]
    return ForwardOutput(output.logits[scored], tuple(layer[rows] for layer in output.hidden), best)


def _join(parts: list[ForwardOutput]) -> ForwardOutput:
    """The output of one sequence whose rows went in several forwards."""
    layers = zip(*(part.hidden for part in parts), strict=True)
    return ForwardOutput(
        np.concatenate([part.logits for part in parts]),
        tuple(np.concatenate(layer) for layer in layers),
        None if any(part.best is None for part in parts) else [id for part in parts for id in part.best or ()],
    )

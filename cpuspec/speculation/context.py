"""One model with its cache for all running sequences. The target is a Context, and so is every draft model.

It feeds what a sequence's slot lacks (`Slots`), and returns the rows. It knows nothing about sampling or about why tokens changed.

Some backends compute tokens of prompts in another arithmetic than generated ones (`has_prompt_arithmetic`). A token's position in
its sequence decides which one. Tokens of prompts have forwards of their own.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpuspec.backends import Backend, num_of_prompt
from cpuspec.checkpoints.adapters import AdapterSet
from cpuspec.errors import CacheError, ConfigError
from cpuspec.metrics import Spent, now_s
from cpuspec.model.batch import I32, ForwardBatch, ForwardOutput, ForwardStoppedError
from cpuspec.sequence import Sequence
from cpuspec.settings import EngineConfig
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.slots import Slot, Slots

# One row of 32 goes to the prompt that has waited longest. So few rows delay a short prompt by no step.
_OLDEST_PART = 32

# Several forwards run in one call while they take no longer than this together. No reader notices such a delay, and Python runs
# once after all of them instead of after each.
_AT_ONCE_S = 0.04
_MOST_AHEAD = 31  # fewer than the tokens that the engine keeps memory for

_NOT_YET = 1 << 62  # stands for the unfed tokens of a sequence without a slot: its prefix is on its way from the disk
_FED_WITH_A_DRAFT = 16  # the most tokens that are fed together with a draft; more are read before it, as a prompt is


class PromptChunk(NamedTuple):
    """The next `num_tokens` tokens of a sequence, fed beside the rows of other sequences. Their logits are not computed."""

    seq: Sequence
    num_tokens: int


@dataclass(slots=True)
class _Feed:
    """The rows of one sequence that a score still has to run, and the outputs of those that ran."""

    slot: Slot
    tokens: list[int]  # committed and drafted ones that the slot does not hold yet
    num_unscored: int  # how many of them come before the first one whose logits are wanted
    num_prompt: int  # how many are tokens of the prompt; 0 if these have no arithmetic of their own
    num_straight: int  # how many follow one another: all, or those before a tree
    tree: Draft | None  # the draft, if it is a tree
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

    hidden_bytes = 0

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
        self.applies_adapters = False  # the engine sets it for the target; draft models draft without
        self.num_forwards = self.num_rows = self.weight_bytes = 0  # of all forwards; bytes of weights that they read
        self.spent = Spent()
        self.num_stopped = 0  # forwards that ended early
        self.slots = Slots(backend, self.cache)
        self._last_forward = 0, 0.0  # its rows and seconds
        self._fits = self.vocab_size == backend.config.vocab_size and token_ids is None

    def num_unfed(self, seq: Sequence) -> int:
        """How many tokens a score would feed before the sequence's last one."""
        return len(seq.tokens) - 1 - len(self.slots.align(seq).tokens)

    def num_draftable(self, seq: Sequence) -> int:
        """How many tokens can be drafted: none after the grammar's end, and none after a token that the model does not have."""
        if seq.constraint and seq.legal() is None:
            return 0
        num_known = self.backend.config.vocab_size
        if num_known < self.vocab_size and max(seq.tokens) >= num_known:
            return 0
        return self.capacity - len(seq.tokens) + 1  # the last token drafted is never fed

    def admit(
        self, seqs: list[Sequence], on_begin: Callable[[Sequence, int], None] | None = None
    ) -> tuple[list[bool], list[PromptChunk]]:
        """Give each sequence that a draft model drafts for a slot; returns what `share_rows` does.

        A model begins to read a prompt when it is first asked for a draft: by then another sequence may have read the same
        beginning. Drafts are empty until the prompt is read, in chunks beside sequences that generate.
        on_begin: called with each sequence that gets its slot, and with how many of its tokens the slot held already.
        """
        slots = self.slots
        for seq in seqs:
            if seq.id in slots.taken or slots.poll(seq) or (not slots.is_alone and slots.moves(seq)):
                continue
            num_cached = slots.acquire(seq)
            if on_begin:
                on_begin(seq, num_cached)
        unfed = [self.num_unfed(seq) if seq.id in slots.taken else _NOT_YET for seq in seqs]
        return share_rows(seqs, unfed, self.backend.max_rows if slots.is_alone else self.prompt_rows)

    def score(
        self,
        seqs: list[Sequence],
        drafts: list[Draft],
        hidden_layers: tuple[int, ...] = (),
        chunks: list[PromptChunk] | None = None,
        most_hidden: int | None = None,
        extra_steps: int = 0,
        ends: abc.Sequence[int] = (),
    ) -> list[ForwardOutput]:
        """For each sequence the rows after its last committed token and after each drafted one. `chunks` are fed beside them.

        Returns logits [n+1, V], and hidden states [rows fed, C] of each of `hidden_layers`; their last n+1 rows belong to the
        logits. Hidden states of chunks come first in the sequence's next score, at least the last `most_hidden` of them; until then
        they take 4 C bytes a token and layer. If there are only chunks, `stop_forward` ends the call early, and the rows of
        complete forwards stay. Afterwards the slot holds committed and drafted tokens; of a tree only those that `keep_path` keeps.
        Raises CacheError for more tokens than the capacity, and ConfigError for a tree of more rows than a forward takes.
        extra_steps: how many forwards may follow at once, if there are no drafts and each sequence lacks only its last token.
        ends: as in `ForwardBatch`.
        """
        assert len(seqs) == len(drafts), "every sequence has a draft, empty or not"
        feeds, read = list(map(self._feed, seqs, drafts)), list(map(self._read, chunks or ()))
        waiting = feeds + read
        if not self._fits or len(waiting) > self.backend.max_rows or any(len(feed.tokens) > 1 for feed in waiting):
            extra_steps = 0
        try:
            while waiting:
                waiting = self._forward(waiting, hidden_layers, not seqs, extra_steps, ends)
        except ForwardStoppedError:
            self.num_stopped += 1
        if hidden_layers:
            for feed in read:
                waiting_rows = feed.slot.hidden
                waiting_rows += [output.hidden for output in feed.outputs]
                while most_hidden is not None and sum(len(rows[0]) for rows in waiting_rows[1:]) >= most_hidden:
                    del waiting_rows[0]
        outputs = []
        for seq, feed in zip(seqs, feeds, strict=True):
            output = feed.outputs[0] if len(feed.outputs) == 1 else _join(feed.outputs)
            if feed.slot.hidden:
                layers = zip(*feed.slot.hidden, output.hidden, strict=True)
                output = replace(output, hidden=tuple(map(np.concatenate, layers)))
                feed.slot.hidden = []
            outputs.append(output if self._fits else self._fit(output, seq.is_plain_greedy))
        return outputs

    def keep_path(self, seq: Sequence, draft: Draft, path: list[int]) -> None:
        """Keep the nodes on `path` of a tree that was just scored, so that they need not be fed again."""
        slot = self.slots.taken[seq.id]
        assert len(slot.tokens) == len(seq.tokens), "a path is kept before its tokens are committed"
        length = self.cache.keep_path(slot.number, len(seq.tokens), np.array(path, np.int32))
        slot.tokens += draft.tokens[path].tolist()
        del slot.tokens[length:]

    def _feed(self, seq: Sequence, draft: Draft) -> _Feed:
        """The rows of a sequence and its draft that its slot lacks."""
        num_drafted, num_committed = len(draft), len(seq.tokens)
        tree = None if draft.is_chain else draft
        if tree and num_drafted > self.backend.max_rows:
            raise ConfigError(
                f"a forward takes {self.backend.max_rows} rows, and {tree.source} drafted a tree of {num_drafted} tokens"
            )
        if num_committed + num_drafted > self.capacity:
            raise CacheError(
                f"{num_committed + num_drafted} tokens do not fit a context of {self.capacity}; raise context_length or send fewer"
            )
        slot = self.slots.align(seq)
        num_held = len(slot.tokens)
        tokens = seq.tokens[num_held:] + draft.tokens.tolist()
        return self._new_feed(slot, seq, tokens, num_committed - 1 - num_held, tree)

    def _read(self, chunk: PromptChunk) -> _Feed:
        """The rows of a chunk that come before the sequence's last token."""
        slot = self.slots.align(chunk.seq)
        tokens = chunk.seq.tokens[len(slot.tokens) : -1][: chunk.num_tokens]
        assert tokens, "a chunk has tokens"
        return self._new_feed(slot, chunk.seq, tokens, len(tokens), None)

    def _new_feed(self, slot: Slot, seq: Sequence, tokens: list[int], num_unscored: int, tree: Draft | None) -> _Feed:
        num_prompt = num_of_prompt(self.backend, seq.num_prompt_tokens, len(slot.tokens))
        num_straight, adapters = len(tokens) - (len(tree) if tree else 0), seq.adapters if self.applies_adapters else ()
        return _Feed(slot, tokens, num_unscored, num_prompt, num_straight, tree, adapters)

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

    def most_extra_steps(self, num_seqs: int) -> int:
        """How many forwards may follow one over a row of each sequence, so that all together take no time that is noticed."""
        rows, seconds = self._last_forward
        return min(int(_AT_ONCE_S / seconds) - 1, _MOST_AHEAD) if rows == num_seqs and seconds < _AT_ONCE_S else 0

    def _forward(
        self, feeds: list[_Feed], hidden_layers: tuple[int, ...], stops_early: bool, extra_steps: int, ends: abc.Sequence[int]
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
            first, start, size = len(tokens), len(feed.slot.tokens), len(feed.tokens)
            if of_prompts:
                size = min(size, feed.num_prompt)
            planned, states = feed.slot.snapshots, self.cache.states
            if planned and states and size > (until := planned[0] - start) + states.passed:
                size = max(until, 1)
            if first + size > self.backend.max_rows:
                size = min(self.backend.max_rows - first, size, feed.num_straight)  # a tree goes as a whole
                if not size:
                    break
            tokens += feed.tokens[:size]
            positions += range(start, start + size)
            slots.append(feed.slot.number)
            logit_rows += range(first + feed.num_unscored, first + size)
            q_start.append(first + size)
            num_scored.append(len(logit_rows))
        parents = _tree_parents(feeds, q_start, positions) if not of_prompts and any(feed.tree for feed in feeds) else None
        batch = ForwardBatch(
            tokens, positions, slots, q_start, parents, logit_rows, hidden_layers, of_prompts=of_prompts, stops_early=stops_early,
            adapters=[feed.adapters for feed in feeds[: len(slots)]], extra_steps=0 if of_prompts else extra_steps, ends=ends,
        )  # fmt: skip
        begin_s = now_s()
        output = self.backend.forward(batch, self.cache)
        seconds, times = now_s() - begin_s, 1 if output.extra_tokens is None else 1 + len(output.extra_tokens[0])
        self._last_forward = len(tokens), seconds / times
        self.spent.add(len(tokens), seconds, times)
        self.num_forwards += times
        self.num_rows += times * len(tokens)
        self.weight_bytes += output.weight_bytes
        left = []
        for i, feed in enumerate(feeds[: len(slots)]):
            start, end = q_start[i], q_start[i + 1]
            size, slot, num_before = end - start, feed.slot, len(feed.slot.tokens)
            slot.tokens += feed.tokens[: min(size, feed.num_straight)]
            if output.extra_tokens:
                slot.tokens += output.extra_tokens[i]
            if self.cache.states:
                slot.latest = num_before, [layer[start:end] for layer in output.hidden]
                self.slots.take_snapshots(slot)
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


def share_rows(seqs: list[Sequence], num_unfed: list[int], num_rows: int) -> tuple[list[bool], list[PromptChunk]]:
    """Whether each sequence can be drafted for now, and the parts of prompts that are read beside them, of `num_rows` rows.

    num_unfed: how many tokens of each sequence its slot lacks.
    """
    granted = shortest_first([number if _FED_WITH_A_DRAFT < number < _NOT_YET else 0 for number in num_unfed], num_rows)
    ready = [number <= max(rows, _FED_WITH_A_DRAFT) for number, rows in zip(num_unfed, granted, strict=True)]
    chunks = [PromptChunk(seq, rows) for seq, rows, is_ready in zip(seqs, granted, ready, strict=True) if rows and not is_ready]
    return ready, chunks


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
    best, extra = None if output.best is None else output.best[scored], output.extra_tokens and [output.extra_tokens[number]]
    return ForwardOutput(output.logits[scored], tuple(layer[rows] for layer in output.hidden), best, extra_tokens=extra)


def _join(parts: list[ForwardOutput]) -> ForwardOutput:
    """The output of one sequence whose rows took several forwards."""
    layers = zip(*(part.hidden for part in parts), strict=True)
    return ForwardOutput(
        np.concatenate([part.logits for part in parts]),
        tuple(np.concatenate(layer) for layer in layers),
        None if any(part.best is None for part in parts) else [id for part in parts for id in part.best or ()],
    )

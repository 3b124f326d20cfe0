"""Slots and prompts of a draft model, which reads prompts in chunks beside sequences that generate.

A model begins to read a prompt when it is first asked for a draft: by then another sequence may have read the same beginning. A
round reads `Context.prompt_rows` rows beside other sequences of the engine, or as many as a forward takes for a single sequence.
Drafts are empty until the prompt is read.
"""

from collections.abc import Callable

from cpuspec.sequence import Sequence
from cpuspec.speculation.context import Context, PromptChunk, shortest_first

_NOT_YET = 1 << 62  # stands for the unfed tokens of a sequence without a slot: its prefix is on its way from the disk
_FED_WITH_A_DRAFT = 16  # the most tokens that are fed together with a draft; more are read before it, as a prompt is


def share_rows(seqs: list[Sequence], num_unfed: list[int], num_rows: int) -> tuple[list[bool], list[PromptChunk]]:
    """Whether each sequence can be drafted for now, and the parts of prompts that are read beside them, of `num_rows` rows.

    num_unfed: how many tokens of each sequence its slot lacks.
    """
    granted = shortest_first([number if _FED_WITH_A_DRAFT < number < _NOT_YET else 0 for number in num_unfed], num_rows)
    ready = [number <= max(rows, _FED_WITH_A_DRAFT) for number, rows in zip(num_unfed, granted, strict=True)]
    chunks = [PromptChunk(seq, rows) for seq, rows, is_ready in zip(seqs, granted, ready, strict=True) if rows and not is_ready]
    return ready, chunks


class PromptReader:
    """The sequences that a context drafts for."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def read(
        self, seqs: list[Sequence], begin: Callable[[Sequence, int], None] | None = None
    ) -> tuple[list[bool], list[PromptChunk]]:
        """Give each sequence a slot; returns what `share_rows` does.

        begin: called with each sequence that gets its slot, and with how many of its tokens the slot held already.
        """
        context, slots = self._context, self._context.slots
        for seq in seqs:
            if seq.id in slots.taken or slots.poll(seq) or (not slots.is_alone and slots.moves(seq)):
                continue
            num_cached = slots.acquire(seq)
            if begin:
                begin(seq, num_cached)
        unfed = [context.num_unfed(seq) if seq.id in slots.taken else _NOT_YET for seq in seqs]
        return share_rows(seqs, unfed, context.backend.max_rows if slots.is_alone else context.prompt_rows)

    def num_draftable(self, seq: Sequence) -> int:
        """How many tokens can be drafted: none after the grammar's end, and none after a token that the model does not have."""
        context = self._context
        if seq.constraint and seq.legal() is None:
            return 0
        num_known = context.backend.config.vocab_size
        if num_known < context.vocab_size and max(seq.tokens) >= num_known:
            return 0
        return context.capacity - len(seq.tokens) + 1  # the last token drafted is never fed

"""Slots and prompts of a draft model: it reads prompts in chunks beside sequences that generate.

A model reads a prompt from the first draft on: by then another sequence may have read what both begin with. It reads
`Context.prompt_rows` rows a round beside other sequences of the engine, as many as a forward takes where a sequence is alone. Until
the prompt is read, drafts are empty.
"""

from collections.abc import Callable

from cpuspec.sequence import Sequence
from cpuspec.speculation.context import Context, PromptChunk, shortest_first

_NOT_YET = 1 << 62  # stands for the unfed tokens of a sequence without a slot: its prefix is on its way from the disk
_FED_WITH_A_DRAFT = 16  # at most so many tokens are fed together with a draft; more are read like a prompt, first


class PromptReader:
    """The sequences that a context drafts for."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._begun: set[int] = set()  # sequences that have a slot

    def share_rows(
        self, seqs: list[Sequence], begin: Callable[[Sequence, int], None] | None = None
    ) -> tuple[list[bool], list[PromptChunk]]:
        """Whether each sequence can be drafted for now, and the parts of prompts that are read beside them.

        begin: called with each sequence that gets its slot, and with how many of its tokens the slot held already.
        """
        context = self._context
        for seq in seqs:
            if seq.id not in self._begun and not context.poll_prefix(seq):
                self._begun.add(seq.id)
                num_cached = context.acquire(seq)
                if begin:
                    begin(seq, num_cached)
        unfed = [context.num_unfed(seq) if seq.id in self._begun else _NOT_YET for seq in seqs]
        num_rows = context.backend.max_rows if context.is_alone else context.prompt_rows
        granted = shortest_first([number if _FED_WITH_A_DRAFT < number < _NOT_YET else 0 for number in unfed], num_rows)
        ready, chunks = [], []
        for seq, number, rows in zip(seqs, unfed, granted, strict=True):
            ready.append(rows == number or number <= _FED_WITH_A_DRAFT)
            if rows and not ready[-1]:
                chunks.append(PromptChunk(seq, rows))
        return ready, chunks

    def room(self, seq: Sequence) -> int:
        """How many tokens can be drafted: none behind the grammar's end, or a token that the model has no row for."""
        context = self._context
        if seq.constraint and seq.legal() is None:
            return 0
        num_known = context.backend.config.vocab_size
        if num_known < context.vocab_size and max(seq.tokens) >= num_known:
            return 0
        return context.capacity - len(seq.tokens) + 1  # the last token drafted is never fed

    def end(self, seq: Sequence) -> None:
        """Free the slot."""
        self._context.release(seq)
        self._begun.discard(seq.id)

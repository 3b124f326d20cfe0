"""Decides which sequences run in the next step, and how many rows of prompts it reads. It never touches arrays."""

from collections.abc import Callable
from itertools import accumulate

from cpuspec.sequence import Sequence
from cpuspec.speculation.context import PromptChunk, shortest_first


class Scheduler:
    """Continuous batching under a row budget. The engine admits sequences, and the shortest prompt is read first.

    Every sequence whose prompt has been read gains tokens in each step. Beside them a step reads at most `prompt_rows` rows of
    prompts, or `max_rows`, a whole forward, if all sequences are reading.
    """

    def __init__(self, prompt_rows: int, max_rows: int) -> None:
        self.waiting: dict[int, Sequence] = {}  # by id, in the order of their arrival
        self.running: list[Sequence] = []  # in the order of their admission
        self._preempted: set[int] = set()  # ids of sequences whose tokens are read again
        self._prompt_rows = prompt_rows
        self._max_rows = max_rows

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self.waiting[seq.id] = seq

    def admit(self, seq: Sequence) -> None:
        """Move a waiting sequence to the running ones."""
        self.running.append(self.waiting.pop(seq.id))

    def preempt(self, seq: Sequence) -> None:
        """Move a running sequence before all waiting ones. Its answer so far will be read again, as a prompt is."""
        self.remove(seq)
        self.waiting = {seq.id: seq, **self.waiting}
        self._preempted.add(seq.id)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, waiting or running."""
        self._preempted.discard(seq.id)
        if self.waiting.pop(seq.id, None) is None:
            self.running = [other for other in self.running if other is not seq]

    def is_reading(self, seq: Sequence) -> bool:
        """Whether tokens of a sequence are still to be read, as a prompt is."""
        return not seq.num_output_tokens or seq.id in self._preempted

    def schedule(
        self, num_unfed: Callable[[Sequence], int], finishes_prompts: bool = False
    ) -> tuple[list[Sequence], list[PromptChunk]]:
        """The sequences that gain tokens in the next step, and the parts of prompts that are read beside them.

        num_unfed: how many tokens before its last one a sequence still has to be fed. finishes_prompts: whether the step reads only
        the prompts that it can finish, if there are such.
        """
        reading = [seq for seq in self.running if self.is_reading(seq)]
        if not reading:
            return self.running.copy(), []
        needed = [num_unfed(seq) + 1 for seq in reading]  # the last token's row gives the first logits
        most = self._prompt_rows if len(reading) < len(self.running) else self._max_rows
        ending = [number for number in accumulate(sorted(needed)) if number <= most]
        if finishes_prompts and ending:
            longest = sorted(needed)[len(ending) - 1]
            granted = shortest_first([number if number <= longest else 0 for number in needed], ending[-1])
        else:
            # If prompts end in this step, many rows of others would delay their first tokens.
            granted = shortest_first(needed, min(ending[-1] + self._prompt_rows // 4, most) if ending else most)
        unread = [PromptChunk(seq, rows) for seq, number, rows in zip(reading, needed, granted, strict=True) if rows < number]
        later = {chunk.seq.id for chunk in unread}
        self._preempted -= {seq.id for seq in reading} - later
        return [seq for seq in self.running if seq.id not in later], [chunk for chunk in unread if chunk.num_tokens]

"""Who runs in the next step. Decides, and never touches arrays: sequences in, sequences out."""

from collections import deque

from cpuspec.sequence import Sequence


class Scheduler:
    """Continuous batching: first come, first served, into whatever slots are free; everything that runs, runs each step."""

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(seq)

    def admit(self, num_free_slots: int) -> list[Sequence]:
        """Move waiting sequences to the running ones, as many as there are free slots; returns those moved."""
        admitted = [self.waiting.popleft() for _ in range(min(num_free_slots, len(self.waiting)))]
        self.running += admitted
        return admitted

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, waiting or running."""
        self.running = [other for other in self.running if other is not seq]
        self.waiting = deque(other for other in self.waiting if other is not seq)


def draft_limit(seq: Sequence, capacity: int, by_models: bool) -> int:
    """How many tokens may be drafted, so that with the bonus token they exceed neither the context nor what the request allows.

    by_models: whether models draft. They would read the prompt while the first token waits, so that one comes without a draft.
    """
    if by_models and not seq.num_output_tokens:
        return 0
    params = seq.params
    room = min(capacity - len(seq.tokens), params.max_tokens - seq.num_output_tokens) - 1
    return max(0, room if params.max_draft_tokens is None else min(room, params.max_draft_tokens))

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

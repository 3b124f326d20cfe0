"""The queue of answers: a bounded number runs, the others wait, and clients take turns.

Everything here runs in the event loop; there are no locks.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cpuspec.server.errors import BusyError


@dataclass(eq=False, slots=True)
class Ticket:
    """The place of one answer in the queue. `start` is called when the answer may begin to run."""

    client: str
    start: Callable[[], None]
    state: str = "waiting"  # then "running", then "done"


class Admission:
    """Hands out `max_running` places: to clients in rotation, one each. The answers of one client keep their order."""

    def __init__(self, max_running: int, max_waiting: int, name: str = "answers") -> None:
        """name: the word for the answers in error messages."""
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._name = name
        self.num_running = 0
        self._waiting: dict[str, deque[Ticket]] = {}  # by client; the client that gets the next place comes first

    @property
    def num_waiting(self) -> int:
        """How many answers wait."""
        return sum(map(len, self._waiting.values()))

    def check(self, number: int) -> None:
        """Raise BusyError if `number` more answers would make the queue longer than `max_waiting`."""
        free = self.max_running - self.num_running
        if self.num_waiting + number - free > self.max_waiting:
            raise BusyError(
                f"{self.num_running} {self._name} are running and {self.num_waiting} wait, and at most {self.max_waiting} may; "
                "try again later"
            )

    def enter(self, client: str, starts: Sequence[Callable[[], None]]) -> list[Ticket]:
        """Return a ticket for each answer. Answers that find a free place start at once. Raises BusyError, as `check` does."""
        self.check(len(starts))
        tickets = [Ticket(client, start) for start in starts]
        self._waiting.setdefault(client, deque()).extend(tickets)
        self._grant()
        return tickets

    def leave(self, ticket: Ticket) -> None:
        """Give a place back, or stop waiting for it. Doing it again changes nothing."""
        if ticket.state == "waiting":
            queue = self._waiting[ticket.client]
            queue.remove(ticket)
            if not queue:
                del self._waiting[ticket.client]
        elif ticket.state == "running":
            self.num_running -= 1
        ticket.state = "done"
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.num_running < self.max_running:
            client, queue = next(iter(self._waiting.items()))
            ticket = queue.popleft()
            del self._waiting[client]
            if queue:
                self._waiting[client] = queue  # after the others
            ticket.state = "running"
            self.num_running += 1
            ticket.start()

"""The queue of answers: a bounded number runs, the others wait, and clients take turns. Work in threads has such queues, too.

Everything here runs in the event loop; there are no locks.
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from cpuspec.metrics import now_s
from cpuspec.server.errors import BusyError, contained

_T = TypeVar("_T")
_ALL = 4  # times what one client may have waiting, for all of them together
_MOST_WORK = 256  # pieces of work of one client that may wait for a thread


@dataclass(eq=False, slots=True)
class Ticket:
    """The place of one answer in the queue. `start` is called when the answer may begin to run."""

    client: str
    start: Callable[[], None]
    state: str = "waiting"  # then "running", then "done"


class Admission:
    """Hands out `max_running` places: to clients in rotation, one each. The answers of one client keep their order.

    One client may have `max_waiting` answers waiting, so that it cannot fill the queue for others.
    """

    def __init__(self, max_running: int, max_waiting: int, name: str = "answers", most_each: int | None = None) -> None:
        """name: the word for the answers in error messages. most_each: places that one client may have at once; None for all."""
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._name = name
        self._most_each = most_each or max_running
        self._running = Counter[str]()  # by client
        self._waiting: dict[str, deque[Ticket]] = {}  # by client; the client that gets the next place comes first

    @property
    def num_running(self) -> int:
        """How many answers run."""
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        """How many answers wait."""
        return sum(map(len, self._waiting.values()))

    def check(self, client: str, number: int) -> None:
        """Raise BusyError if `number` more answers of a client would make its part of the queue, or the whole, too long."""
        own, free = len(self._waiting.get(client, ())), self.max_running - self.num_running
        if own + number - free > self.max_waiting or self.num_waiting + number - free > _ALL * self.max_waiting:
            raise BusyError(
                f"{self.num_running} {self._name} are running and {self.num_waiting} wait, {own} of them yours, and at most "
                f"{self.max_waiting} of a client may; try again later"
            )

    def enter(self, client: str, starts: Sequence[Callable[[], None]]) -> list[Ticket]:
        """Return a ticket for each answer. Answers that find a free place start at once. Raises BusyError, as `check` does."""
        self.check(client, len(starts))
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
            self._running -= Counter([ticket.client])
        ticket.state = "done"
        self._grant()

    def _grant(self) -> None:
        while self.num_running < self.max_running:
            client = next((one for one in self._waiting if self._running[one] < self._most_each), None)
            if client is None:
                return
            queue = self._waiting.pop(client)
            ticket = queue.popleft()
            if queue:
                self._waiting[client] = queue  # after the others
            ticket.state = "running"
            self._running[client] += 1
            ticket.start()


class AnswerMeter:
    """When one answer entered the queue, where this is made, began to run, and brought its tokens; for `Metrics`."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_new_tokens = 0
        self.arrival_s = now_s()
        self.start_s: float | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None

    @property
    def running_s(self) -> float:
        """Seconds since the answer began to run."""
        return 0.0 if self.start_s is None else now_s() - self.start_s


class Workers:
    """Threads for work that would hold up the event loop. Clients take turns, and none has all threads for itself.

    Few threads: they share the interpreter with the event loop and the engine.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, name)
        all_begun = threading.Barrier(num_threads)
        for _ in range(num_threads):  # now: to start a thread holds up the event loop
            self._pool.submit(all_begun.wait)
        self._admission = Admission(num_threads, _MOST_WORK, "pieces of work", max(num_threads - 1, 1))

    async def run(self, client: str, work: Callable[[], _T]) -> _T:
        """Call the function in a thread, and return what it returns. Raises BusyError."""
        admitted = asyncio.Event()
        (ticket,) = self._admission.enter(client, [admitted.set])
        try:
            await admitted.wait()
        except BaseException:
            self._admission.leave(ticket)
            raise
        done = asyncio.get_running_loop().run_in_executor(self._pool, partial(contained, work))
        done.add_done_callback(lambda _: self._admission.leave(ticket))
        return await asyncio.shield(done)  # the place is taken until the thread has ended the work, whoever waits for it

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

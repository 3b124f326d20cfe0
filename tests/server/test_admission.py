"""Places, queues and turns."""

import asyncio
import threading
from functools import partial

import pytest

from cpuspec.server.admission import Admission, Ticket, Workers
from cpuspec.server.errors import BusyError


class Desk:
    """An admission, and the names of those that it let in, in order."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.admission = Admission(max_running, max_waiting)
        self.started: list[str] = []

    def enter(self, client: str, *names: str) -> list[Ticket]:
        return self.admission.enter(client, [partial(self.started.append, name) for name in names])


def test_clients_take_turns_and_a_clients_own_answers_keep_their_order() -> None:
    desk = Desk(1, 10)
    running = desk.enter("a", "a1", "a2", "a3", "a4")
    running += desk.enter("b", "b1", "b2") + desk.enter("c", "c1")
    while len(desk.started) < 7:
        current = next(ticket for ticket in running if ticket.state == "running")
        desk.admission.leave(current)
    # a's second answer waited before the others came, so that it is first; then each has one in turn.
    assert desk.started == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


def test_no_more_run_than_there_are_places() -> None:
    desk = Desk(2, 5)
    tickets = desk.enter("a", "1", "2", "3")
    assert (desk.started, desk.admission.num_running, desk.admission.num_waiting) == (["1", "2"], 2, 1)
    desk.admission.leave(tickets[0])
    desk.admission.leave(tickets[0])
    assert (desk.started, desk.admission.num_running, desk.admission.num_waiting) == (["1", "2", "3"], 2, 0)


def test_a_client_fills_its_own_part_of_the_queue_with_all_of_a_request_or_nothing() -> None:
    desk = Desk(2, 8)
    desk.enter("a", *map(str, range(9)))
    with pytest.raises(BusyError, match="2 answers are running and 7 wait, 7 of them yours"):
        desk.enter("a", "9", "10")
    assert desk.admission.num_waiting == 7
    desk.enter("a", "9")
    for client in "bcd":
        desk.enter(client, *map(str, range(8)))
    with pytest.raises(BusyError):  # of all together, four times as many wait
        desk.enter("e", "more")


def test_who_leaves_the_queue_is_never_started() -> None:
    desk = Desk(1, 5)
    first, second, third = desk.enter("a", "1", "2", "3")
    desk.admission.leave(second)
    desk.admission.leave(first)
    assert desk.started == ["1", "3"]
    desk.admission.leave(third)
    assert (desk.admission.num_running, desk.admission.num_waiting) == (0, 0)


def test_one_client_never_has_all_threads() -> None:
    async def work() -> None:
        workers, may_end = Workers(2, "work"), threading.Event()
        long = [asyncio.create_task(workers.run("a", may_end.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await workers.run("b", lambda: 5) == 5
        long[0].cancel()  # its thread works on, so that its place stays taken
        await asyncio.sleep(0)
        assert await workers.run("b", lambda: 6) == 6
        assert not long[1].done()
        may_end.set()
        assert await asyncio.gather(*long[1:]) == [True, True]
        workers.close()

    asyncio.run(work())


def test_work_that_fails_gives_its_thread_back() -> None:
    async def work() -> None:
        workers = Workers(1, "work")
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await workers.run("a", lambda: 1 // 0)
        assert await workers.run("a", lambda: 7) == 7
        workers.close()

    asyncio.run(work())

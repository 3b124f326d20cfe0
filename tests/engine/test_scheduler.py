"""Who gets the rows of a step: every sequence that generates, then the shortest prompts, with a part for the oldest."""

from collections import defaultdict

import numpy as np
import pytest

from cpuspec.engine.engine import Engine, RequestedAnswer
from cpuspec.engine.scheduler import Scheduler
from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams
from cpuspec.speculation import Context, NullProposer
from tests.toys import ToyBackend, ToyTokenizer


def sequence(id: int, num_tokens: int, generates: bool = False) -> Sequence:
    seq = Sequence.new(id, [0] * num_tokens, SamplingParams())
    if generates:
        seq.extend([1])
    return seq


def schedule(scheduler: Scheduler, unfed: dict[int, int]) -> tuple[list[int], list[tuple[int, int]]]:
    seqs, chunks = scheduler.schedule(lambda seq: unfed[seq.id])
    return [seq.id for seq in seqs], [(chunk.seq.id, chunk.num_tokens) for chunk in chunks]


def running(*seqs: Sequence, prompt_rows: int = 8, max_rows: int = 32) -> Scheduler:
    scheduler = Scheduler(prompt_rows, max_rows)
    for seq in seqs:
        scheduler.add(seq)
        scheduler.admit(seq)
    return scheduler


@pytest.mark.parametrize(
    ("unfed", "scored", "chunks"),
    [
        ({1: 20, 2: 3}, [0, 2, 3], [(1, 2)]),  # the second is shorter; beside its end, few rows of another are read
        ({1: 20, 2: 9}, [0, 3], [(1, 1), (2, 7)]),  # the oldest has a part in any case
        ({1: 5, 2: 5}, [0, 1, 3], [(2, 2)]),  # with the last token's row six are read, and two are left
        ({1: 20, 2: 20}, [0, 3], [(1, 8)]),  # of equal ones, the one that came first
        ({1: 5, 2: 1}, [0, 1, 2, 3], []),
    ],
)
def test_beside_streams_the_shortest_prompt_is_read_first_and_every_stream_runs(
    unfed: dict[int, int], scored: list[int], chunks: list[tuple[int, int]]
) -> None:
    seqs = [sequence(0, 4, generates=True), sequence(1, 30), sequence(2, 4), sequence(3, 9, generates=True)]
    assert schedule(running(*seqs), unfed) == (scored, chunks)


@pytest.mark.parametrize(
    ("unfed", "scored", "chunks"),
    [
        ({0: 40, 1: 60, 2: 60}, [], [(0, 32)]),  # a whole forward while no prompt ends
        ({0: 90, 1: 4, 2: 50}, [1], [(0, 1), (2, 1)]),  # few rows of others beside one that ends
        ({0: 90, 1: 4, 2: 6}, [1, 2], [(0, 2)]),
        ({0: 20, 1: 20, 2: 20}, [0], [(1, 2)]),
    ],
)
def test_while_nothing_generates_prompts_that_end_go_almost_alone(
    unfed: dict[int, int], scored: list[int], chunks: list[tuple[int, int]]
) -> None:
    assert schedule(running(*(sequence(id, 91) for id in range(3))), unfed) == (scored, chunks)


def test_sequences_run_in_the_order_of_their_admission_and_are_forgotten_wherever_they_are() -> None:
    scheduler, seqs = Scheduler(8, 32), [sequence(id, 3) for id in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    scheduler.admit(seqs[2])
    scheduler.remove(seqs[1])
    scheduler.admit(seqs[0])
    assert (scheduler.running, list(scheduler.waiting)) == ([seqs[2], seqs[0]], [])
    scheduler.remove(seqs[0])
    assert scheduler.running == [seqs[2]]
    assert schedule(scheduler, {2: 2}) == ([2], [])


class Watched(Sequence):
    """Counts how often anything looks at a sequence."""

    num_looks = 0

    def __getattribute__(self, name: str) -> object:
        Watched.num_looks += 1
        return super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        Watched.num_looks += 1
        return self is other

    __hash__ = None  # type: ignore[assignment]


def watched(seq: Sequence) -> Sequence:
    seq.__class__ = Watched
    return seq


def test_a_step_looks_at_no_more_waiting_requests_than_it_has_free_slots_for() -> None:
    looks = []
    for number in (10, 100):
        engine = Engine(Context(ToyBackend(1, memory=0.2), 2, 64), NullProposer(), ToyTokenizer(8))  # type: ignore[arg-type]
        for _ in range(number):
            engine.add_request([0, 4, 5], SamplingParams(max_tokens=9, ignore_eos=True))
        for seq in engine._scheduler.waiting.values():
            watched(seq)
        before = Watched.num_looks
        for _ in range(5):
            engine.step()
        looks.append(Watched.num_looks - before)
    assert looks[0] == looks[1] > 0


# Of a prompt, with AVX2 (benchmarks/DECISIONS.md#prompt-rows): the more, the more others' rows delay a short prompt.
PLAIN_STEPS_PER_ROW = 0.2
LONG, ROWS = 4000, 32


class Clock:
    """An engine over a toy model. Time is in steps of plain decoding, by the rows of each step."""

    def __init__(self) -> None:
        self.backend = ToyBackend(1, max_rows=256, context_length=LONG + 500)
        self.context = Context(self.backend, 4, LONG + 500, prompt_rows=ROWS)
        self.engine = Engine(self.context, NullProposer(), ToyTokenizer(8))  # type: ignore[arg-type]
        self.time, self._first = 0.0, dict[int, float]()

    def add(self, num_tokens: int, max_tokens: int = 60) -> int:
        prompt = np.random.default_rng(num_tokens).integers(4, 8, num_tokens).tolist()
        return self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))

    def step(self) -> None:
        before = self.backend.num_rows
        outputs = self.engine.step()
        self.time += 1 + PLAIN_STEPS_PER_ROW * (self.backend.num_rows - before)
        for output in outputs:
            self._first.setdefault(output.request_id, self.time)

    def has_begun(self, request: int) -> bool:
        return request in self._first

    def first_token(self, request: int) -> float:
        while not self.has_begun(request):
            self.step()
        return self._first[request]


@pytest.mark.parametrize("num_steps", [0, 5], ids=["at once", "in its middle"])
@pytest.mark.parametrize("num_tokens", [1, 20, 32, 200])
@pytest.mark.parametrize("has_stream", [False, True])
def test_a_short_prompt_waits_for_no_long_one_and_delays_it_little(num_steps: int, num_tokens: int, has_stream: bool) -> None:
    def times(*sizes: int) -> list[float]:
        clock = Clock()
        if has_stream:
            clock.first_token(clock.add(1, LONG))
        ids, began = [], []
        for size in sizes:
            for _ in range(num_steps):
                clock.step()
            began.append(clock.time)
            ids.append(clock.add(size))
        return [clock.first_token(request) - start for request, start in zip(ids, began, strict=True)]

    (long_alone,), (short_alone,), (long, short) = times(LONG), times(num_tokens), times(LONG, num_tokens)
    assert short <= short_alone + 4
    assert long <= 1.2 * long_alone


def test_a_long_prompt_ends_however_many_short_ones_come() -> None:
    clock = Clock()
    long, short = clock.add(600), [clock.add(200, max_tokens=1) for _ in range(3)]
    while not clock.has_begun(long):
        clock.step()
        short = [clock.add(200, max_tokens=1) if clock.has_begun(request) else request for request in short]
    assert clock.backend.num_rows <= 33 * 600


@pytest.mark.parametrize("num_tokens", [1, 20, 254])
def test_a_forward_that_only_reads_ends_for_a_shorter_prompt_and_answers_stay(num_tokens: int) -> None:
    def answers(arriving: bool) -> tuple[list[list[int]], int]:
        clock, tokens = Clock(), defaultdict[int, list[int]](list)
        prompts = [np.random.default_rng(size).integers(4, 8, size).tolist() for size in (600, num_tokens)]
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        requests = [clock.engine.prepare(RequestedAnswer(prompt, params)) for prompt in prompts]
        arrivals = [requests[1]] if arriving else []

        def hasten() -> None:
            if arrivals:
                clock.engine.hasten(arrivals[0])

        clock.backend.while_running = hasten
        clock.engine.add(requests[0])
        for _ in range(2):
            clock.engine.step()
        num_rows = clock.backend.num_rows
        clock.engine.add(requests[1])
        arrivals.clear()
        while clock.engine.has_work:
            for output in clock.engine.step():
                tokens[output.request_id] += output.token_ids
        return [tokens[request.seq.id] for request in requests], num_rows

    (alone, alone_rows), (stopped, stopped_rows) = answers(False), answers(True)
    assert alone == stopped
    assert stopped_rows == alone_rows == 512, "the second forward, behind one that was stopped, runs to its end"


@pytest.mark.parametrize(("num_tokens", "streams", "num_stopped"), [(20, 0, 1), (20, 1, 0), (300, 0, 0)])
def test_only_a_forward_of_longer_prompts_beside_no_stream_is_stopped(num_tokens: int, streams: int, num_stopped: int) -> None:
    clock = Clock()
    for _ in range(streams):
        clock.first_token(clock.add(1))
    clock.add(600)
    request = clock.engine.prepare(RequestedAnswer([4] * num_tokens, SamplingParams()))
    clock.backend.while_running = lambda: clock.engine.hasten(request)
    clock.engine.step()
    assert clock.context.num_stopped == num_stopped

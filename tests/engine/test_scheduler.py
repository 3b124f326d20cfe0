"""Who gets the rows of a step: every sequence that generates, then prompts in the order of their arrival."""

import pytest

from cpuspec.config import SamplingParams
from cpuspec.engine.scheduler import Scheduler
from cpuspec.sequence import Sequence


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
        ({1: 20, 2: 3}, [0, 3], [(1, 8)]),  # the first prompt takes all
        ({1: 5, 2: 3}, [0, 1, 3], [(2, 2)]),  # with the last token's row six, and two are left
        ({1: 7, 2: 3}, [0, 1, 3], []),  # none are left: the second waits
        ({1: 5, 2: 1}, [0, 1, 2, 3], []),
    ],
)
def test_prompts_share_the_budget_first_come_first_served_and_every_stream_runs(
    unfed: dict[int, int], scored: list[int], chunks: list[tuple[int, int]]
) -> None:
    seqs = [sequence(0, 4, generates=True), sequence(1, 30), sequence(2, 4), sequence(3, 9, generates=True)]
    assert schedule(running(*seqs), unfed) == (scored, chunks)


def test_prompts_share_a_whole_forward_while_nothing_generates() -> None:
    scheduler = running(sequence(0, 21), sequence(1, 21), sequence(2, 21))
    assert schedule(scheduler, {0: 20, 1: 20, 2: 20}) == ([0], [(1, 11)])
    assert schedule(scheduler, {0: 40, 1: 20, 2: 20}) == ([], [(0, 32)])


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

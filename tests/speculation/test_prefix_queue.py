"""A slow, full or dead disk under the prefix cache: no step waits for it, and no answer depends on it."""

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cpuspec.engine.engine import Engine, Output
from cpuspec.formats.tensor import U8
from cpuspec.settings import SamplingParams
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.context import Context
from cpuspec.speculation.prefix_files import PrefixDirectory, PrefixFiles, PrefixPart
from cpuspec.speculation.prefix_queue import PrefixQueue
from cpuspec.speculation.proposer import NullProposer, Proposer
from tests.speculation.test_prefixes import Requests, counting, spill, written
from tests.toys import ToyBackend, ToyTokenizer

A, B, C = counting(0, 20), counting(3, 20), counting(5, 20)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
PATIENCE_S = 30.0  # of these tests


class Slow(PrefixDirectory):
    """A directory on a disk that answers while `answers` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 10**6)
        self.answers = threading.Event()
        self.answers.set()

    def read(self, files: PrefixFiles, key: bytes) -> U8 | None:
        assert self.answers.wait(PATIENCE_S)
        return super().read(files, key)

    def write(self, files: PrefixFiles, part: PrefixPart, used_ns: int) -> bool:
        assert self.answers.wait(PATIENCE_S)
        return super().write(files, part, used_ns)


def keeping(queue: PrefixQueue, num_tokens: int = 0, num_slots: int = 2) -> Context:
    context = Context(ToyBackend(1, memory=2.0, max_rows=64, block_size=4), num_slots, 64)
    context.slots.min_copied = 2
    context.slots.keep(num_tokens * context.cache.bytes_per_token, queue)
    return context


@pytest.fixture
def disk(tmp_path: Path) -> Slow:
    """One that holds the prefixes A and B."""
    context = keeping(PrefixQueue(PrefixDirectory(tmp_path, 10**6)))
    for tokens in (A, B):
        Requests(context).run(*tokens)
    written(context)
    return Slow(tmp_path)


def step(engine: Engine, outputs: dict[int, list[Output]]) -> None:
    for output in engine.step():
        outputs.setdefault(output.request_id, []).append(output)


def run(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    ids, outputs = [engine.add_request(prompt, PARAMS) for prompt in prompts], dict[int, list[Output]]()
    while engine.has_work:
        step(engine, outputs)
    return [[token for output in outputs[one] for token in output.token_ids] for one in ids]


def engine_over(context: Context, proposer: Proposer | None = None) -> Engine:
    return Engine(context, proposer or NullProposer(), ToyTokenizer(8))  # type: ignore[arg-type]


def expected(prompts: list[list[int]]) -> list[list[int]]:
    return run(engine_over(Context(ToyBackend(1, memory=2.0, max_rows=64), 2, 64)), prompts)


def test_a_request_waits_for_its_prefix_on_the_disk_while_others_go_on(disk: Slow) -> None:
    context = keeping(PrefixQueue(disk))
    engine, outputs = engine_over(context), dict[int, list[Output]]()
    disk.answers.clear()
    waits, other = engine.add_request([*A, 1], PARAMS), engine.add_request(C, PARAMS)
    for _ in range(4):
        step(engine, outputs)
    assert (list(outputs), len(outputs[other])) == ([other], 4)
    assert len(context.slots.free) == 1
    while engine.has_work and outputs[other][-1].finish_reason is None:
        step(engine, outputs)
    step(engine, outputs)  # nothing runs, and the step ends nevertheless
    assert waits not in outputs
    disk.answers.set()
    while engine.has_work:
        step(engine, outputs)
    found = [[token for output in outputs[one] for token in output.token_ids] for one in (waits, other)]
    assert found == expected([[*A, 1], C])
    assert {output.num_cached_tokens for output in outputs[waits]} == {20}


def test_a_request_that_is_aborted_while_its_prefix_is_read_leaves_nothing(disk: Slow) -> None:
    context = keeping(PrefixQueue(disk))
    engine = engine_over(context)
    disk.answers.clear()
    waits = engine.add_request([*A, 1], PARAMS)
    assert engine.step() == []
    aborted = engine.abort(waits)
    assert aborted is not None
    assert aborted.finish_reason == "aborted"
    disk.answers.set()
    assert not engine.has_work
    assert context.slots.store is not None
    assert not context.slots.store._readings
    assert run(engine, [[*A, 1], C]) == expected([[*A, 1], C])


def test_a_draft_model_whose_prefix_is_on_a_slow_disk_holds_up_no_answer(disk: Slow) -> None:
    """Both prompts are answered before the disk does; then the model drafts, from what it has read."""
    draft = keeping(PrefixQueue(disk))
    engine = engine_over(Context(ToyBackend(1, memory=2.0, max_rows=64), 2, 64), ChainProposer(NullProposer(), draft))
    disk.answers.clear()
    assert run(engine, [[*A, 1], C]) == expected([[*A, 1], C])
    assert draft.slots.num_cached_tokens == 0
    disk.answers.set()
    outputs = dict[int, list[Output]]()
    engine.add_request([*A, 1], SamplingParams(max_tokens=30, ignore_eos=True))
    while engine.has_work:
        draft.slots.wait(0.01)
        step(engine, outputs)
    assert draft.slots.num_cached_tokens >= 20
    assert len(draft.slots.free) == 2


def test_a_disk_that_does_not_answer_is_given_up(disk: Slow, caplog: pytest.LogCaptureFixture) -> None:
    disk.answers.clear()
    engine = engine_over(keeping(PrefixQueue(disk, patience_s=0.05)))
    assert run(engine, [[*A, 1], [*B, 1], [*A, 2]]) == expected([[*A, 1], [*B, 1], [*A, 2]])
    assert "does not answer; what it holds is computed again" in caplog.text
    disk.answers.set()


@pytest.mark.parametrize("bound", ["bytes", "blocks"])
def test_blocks_that_wait_for_a_slow_disk_are_bounded_and_counted_where_they_are_given_up(tmp_path: Path, bound: str) -> None:
    disk = Slow(tmp_path)
    disk.answers.clear()
    queue = PrefixQueue(disk, max_bytes=3 * 64) if bound == "bytes" else PrefixQueue(disk, max_blocks=3)
    context = keeping(queue)
    requests = Requests(context)
    for first in range(8):
        requests.run(*counting(first, 20))
        assert queue.waiting_bytes <= 3 * 64
    assert context.slots.stats("").num_blocks_dropped == queue.num_dropped >= 8 * 5 - 3
    disk.answers.set()
    assert queue.flush()
    assert 1 <= len(list(tmp_path.iterdir())) <= 4
    for first in range(8):
        requests.run(*counting(first, 20))  # checks its rows


def test_closing_writes_what_is_in_memory_the_latest_first_and_only_for_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Slow(tmp_path)
    queue = PrefixQueue(disk, max_blocks=2)
    context = keeping(queue, 100)
    for tokens in (A, B, C):
        Requests(context).run(*tokens)
    disk.answers.clear()
    context.slots.spill()
    disk.answers.set()
    queue.close()
    assert (len(list(tmp_path.iterdir())), queue.num_dropped) == (15, 0)
    again = keeping(PrefixQueue(PrefixDirectory(tmp_path, 3000)), 100)
    Requests(again).run(*counting(6, 20))
    spill(again)
    fresh = Requests(keeping(PrefixQueue(PrefixDirectory(tmp_path, 10**6)), 100))
    assert fresh.run(*counting(6, 20), 1) == 1
    assert fresh.run(*C, 1) < 21
    assert fresh.run(*A, 1) == 21

    slow = Slow(tmp_path / "other")
    queue = PrefixQueue(slow)
    context = keeping(queue, 100)
    Requests(context).run(*A)
    slow.answers.clear()
    context.slots.spill()
    queue.close(0.05)
    assert "is slow: 4 blocks were not written within 0.05 s" in caplog.text  # one is being written
    assert queue.num_dropped == 4
    slow.answers.set()


def test_a_disk_that_raises_whatever_ends_no_request_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(PrefixDirectory):
        def write(self, files: PrefixFiles, part: PrefixPart, used_ns: int) -> bool:
            raise ValueError("of a file system")

    queue = PrefixQueue(Broken(tmp_path, 10**6))
    requests = Requests(keeping(queue))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert requests.run(*A) == 20
            assert queue.flush()
    assert caplog.text.count("ValueError('of a file system')") == 1


KILLED = """
import resource, signal, sys
from pathlib import Path
from cpuspec.speculation.prefix_files import PrefixDirectory
from cpuspec.speculation.prefix_queue import PrefixQueue
from tests.speculation.test_prefix_queue import A, Requests, keeping
queue = PrefixQueue(PrefixDirectory(Path(sys.argv[1]), 10**6))
context = keeping(queue)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
Requests(context).run(*A, *A)
queue.flush()
"""


@pytest.mark.posix
def test_a_process_that_dies_in_the_middle_of_a_write_leaves_no_file_that_is_read(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, timeout=PATIENCE_S * 4, check=False)
    assert done.returncode < 0, done.stderr.decode()
    assert [path.suffix != ".prefix" for path in tmp_path.iterdir()] == [True]
    assert Requests(keeping(PrefixQueue(PrefixDirectory(tmp_path, 10**6)))).run(*A, *A) == 40

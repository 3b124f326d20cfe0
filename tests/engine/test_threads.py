"""Several threads, a fork, the garbage collector and the end of the process: one LLM, and the same answers."""

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpuspec.engine.engine import Output, RequestedAnswer
from cpuspec.engine.llm import LLM
from cpuspec.errors import BackendError, ConfigError, CpuspecError
from cpuspec.settings import EngineConfig, SamplingParams
from tests.backends.models import tiny
from tests.toys import ToyBackend, ToyTokenizer, plain_greedy

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[0, 4, 5], [0, 7], [0, 5, 6, 4, 4], [0, 6]]


def toy_llm(spec: str | None = None, max_sequences: int = 3, backend: ToyBackend | None = None) -> LLM:
    settings = EngineConfig(max_sequences=max_sequences)
    return LLM.from_backend(backend or ToyBackend(2, memory=0.3), ToyTokenizer(8), spec, settings)  # type: ignore[arg-type]


def expected(prompt: list[int]) -> list[int]:
    tokens: list[int] = plain_greedy(ToyBackend(2, memory=0.3), ToyTokenizer(8), prompt, PARAMS)["token_ids"]
    return tokens


def in_threads(*works: Callable[[], None]) -> None:
    """Run all at once, to their ends; the first error is the test's, and so is a thread that does not end."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]


def run_steps(llm: LLM, received: dict[int, list[Output]]) -> None:
    """Step until there is nothing to do; a receiver has its outputs by then."""
    while llm.step():
        pass
    assert all(outputs[-1].finish_reason for outputs in received.values() if outputs)


def test_receivers_get_the_answers_that_generate_gives() -> None:
    llm = toy_llm("ngram", max_sequences=2)
    received: dict[int, list[Output]] = {}
    for number, prompt in enumerate(PROMPTS):
        llm.submit(RequestedAnswer(prompt, PARAMS), received.setdefault(number, []).append)
    run_steps(llm, received)
    assert not llm._shared._receivers
    tokens = [[token for output in received[number] for token in output.token_ids] for number in range(len(PROMPTS))]
    assert tokens == [expected(prompt) for prompt in PROMPTS]
    assert sum(level.num_draft_tokens for level in llm.levels.values()) > 0
    assert llm.generate([PROMPTS[0]], PARAMS)[0].token_ids == expected(PROMPTS[0])


@pytest.fixture(autouse=True)
def frequent_switches() -> Any:
    """Threads take turns a thousand times as often as usual, so that they meet everywhere."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.parametrize("spec", ["none", "ngram", "suffix:tree"])
def test_threads_that_generate_at_once_get_the_answers_that_each_gets_alone(spec: str) -> None:
    llm = toy_llm(spec)
    wanted = [expected(prompt) for prompt in PROMPTS]

    def ask(first: int) -> None:
        for turn in range(6):
            i = (first + turn) % len(PROMPTS)
            assert llm.generate(PROMPTS[i], PARAMS)[0].token_ids == wanted[i]
            assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == wanted

    in_threads(*[lambda first=first: ask(first) for first in range(4)])  # type: ignore[misc]
    assert len(llm.context.slots.free) == 3
    assert not llm._shared._inboxes


def test_requests_of_threads_share_forwards() -> None:
    """Joined into one batch, not one after the other: all have begun before any has ended."""
    model = ToyBackend(2, memory=0.3)
    llm, widest = toy_llm("none", 3, model), [0]
    plain, everybody = model.forward, threading.Barrier(3)

    def forward(batch: Any, cache: Any) -> Any:
        widest[0] = max(widest[0], len(batch.slots))
        return plain(batch, cache)

    model.forward = forward  # type: ignore[method-assign]

    def ask(prompt: list[int]) -> None:
        stream = llm.stream(prompt, PARAMS)
        tokens = list(next(stream).token_ids)
        everybody.wait(60)
        tokens += [token for output in stream for token in output.token_ids]
        assert tokens == expected(prompt)

    in_threads(*[lambda prompt=prompt: ask(prompt) for prompt in PROMPTS[:3]])  # type: ignore[misc]
    assert widest[0] > 1


def test_streams_that_close_early_leave_the_other_threads_answers_alone() -> None:
    llm = toy_llm("ngram")

    def leave(prompt: list[int]) -> None:
        for number in range(12):
            with contextlib.closing(llm.stream(prompt, PARAMS)) as stream:  # type: ignore[type-var]
                tokens = [token for _, output in zip(range(number % 4), stream, strict=False) for token in output.token_ids]
            assert tokens == expected(prompt)[: len(tokens)]

    def stay(prompt: list[int]) -> None:
        for _ in range(8):
            assert [token for output in llm.stream(prompt, PARAMS) for token in output.token_ids] == expected(prompt)

    works = [lambda: leave(PROMPTS[0]), lambda: stay(PROMPTS[1]), lambda: leave(PROMPTS[2]), lambda: stay(PROMPTS[3])]
    in_threads(*works, lambda: [llm.memory() for _ in range(50)] and None)
    assert len(llm.context.slots.free) == 3
    assert not llm.engine.has_work


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_ends_the_requests_of_all_threads_and_the_next_ones_are_right(error: type[BaseException]) -> None:
    model = ToyBackend(2, memory=0.3)
    llm, plain = toy_llm("ngram", backend=model), model.forward
    left = [7]

    def forward(batch: Any, cache: Any) -> Any:
        left[0] -= 1
        if left[0] % 9 == 0:
            raise error
        return plain(batch, cache)

    model.forward = forward  # type: ignore[method-assign]
    ends: list[str] = []

    def ask(prompt: list[int]) -> None:
        for _ in range(10):
            try:
                assert llm.generate(prompt, PARAMS)[0].token_ids == expected(prompt)
                ends.append("answered")
            except error:
                ends.append("interrupted")
            except CpuspecError as failure:
                ends.append("broken off" if "another" in str(failure) else str(failure))

    in_threads(*[lambda prompt=prompt: ask(prompt) for prompt in PROMPTS])  # type: ignore[misc]
    assert len(ends) == 40
    assert "interrupted" in ends
    assert set(ends) <= {"answered", "interrupted", "broken off"}
    model.forward = plain  # type: ignore[method-assign]
    assert len(llm.context.slots.free) == 3
    for prompt in PROMPTS:
        assert llm.generate(prompt, PARAMS)[0].token_ids == expected(prompt)


def test_closing_ends_the_calls_of_other_threads() -> None:
    model = ToyBackend(2, memory=0.3)
    llm, plain, running = toy_llm("none", backend=model), model.forward, threading.Event()

    def forward(batch: Any, cache: Any) -> Any:
        assert not model.closed, "a model is released while it runs"
        running.set()
        return plain(batch, cache)

    model.forward = forward  # type: ignore[method-assign]

    def ask() -> None:
        with pytest.raises(ConfigError, match="this LLM is closed"):
            any(llm.generate(PROMPTS, PARAMS) is None for _ in itertools.count())

    def close() -> None:
        assert running.wait(60)
        llm.close()

    in_threads(ask, ask, close)
    assert model.closed


def test_a_stream_that_the_garbage_collector_closes_within_a_step_frees_its_slot_afterwards() -> None:
    model = ToyBackend(2, memory=0.3)
    llm, plain = toy_llm("none", backend=model), model.forward
    streams = [llm.stream(PROMPTS[1], PARAMS)]
    next(streams[0])

    def forward(batch: Any, cache: Any) -> Any:
        streams.clear()  # its last reference
        return plain(batch, cache)

    model.forward = forward  # type: ignore[method-assign]
    assert llm.generate(PROMPTS[0], PARAMS)[0].token_ids == expected(PROMPTS[0])
    llm.generate(PROMPTS[0], PARAMS)
    assert len(llm.context.slots.free) == 3


@pytest.mark.parametrize("spec", ["none", "ngram,self:q4_0@3", "auto"])
def test_compiled_kernels_serve_several_threads(spec: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = tiny(tmp_path_factory, weight_format="f16")
    prompts = [[1, 2, 3, 1, 2], [7, 8], [9, 9, 9, 9], [5, 6, 7, 8]]
    with LLM(checkpoint, "none", threads=2) as llm:
        wanted = [answer.token_ids for answer in llm.generate(prompts, PARAMS)]
    with LLM(checkpoint, spec, threads=2) as llm:

        def ask(i: int) -> None:
            for _ in range(5):
                assert llm.generate(prompts[i], PARAMS)[0].token_ids == wanted[i]

        in_threads(*[lambda i=i: ask(i) for i in range(4)])  # type: ignore[misc]


def test_a_backend_that_several_threads_call_runs_one_forward_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    from cpuspec.backends import make_backend
    from tests.backends.models import forward

    backend = make_backend("numba", tiny(tmp_path_factory), EngineConfig(threads=2, max_rows=16))
    wanted = forward(backend, backend.new_cache(1, 32), {0: [3, 1, 4, 1, 5]}).logits.copy()

    def run() -> None:
        for _ in range(20):
            assert (forward(backend, backend.new_cache(1, 32), {0: [3, 1, 4, 1, 5]}).logits == wanted).all()

    in_threads(run, run, run)
    backend.close()
    with pytest.raises(BackendError, match="is closed"):
        run()


@pytest.mark.parametrize("close", [True, False])
def test_a_model_that_nobody_holds_leaves_no_threads(close: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = set(threading.enumerate())
    llm = LLM(tiny(tmp_path_factory), "none", threads=3)
    llm.generate([[1, 2]], PARAMS)
    assert len(set(threading.enumerate()) - before) == 2
    gone = weakref.ref(llm)
    if close:
        llm.close()
    del llm
    gc.collect()
    assert gone() is None
    assert set(threading.enumerate()) <= before


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A process of its own: what forks and what exits with threads."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=root, env=environment, check=False)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory).path


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_forked_child_answers_as_its_parent_does_while_the_parent_goes_on(model_file: Path) -> None:
    done = run_script(
        """
        import os, sys, threading
        from cpuspec import LLM, CpuspecError, SamplingParams

        params = SamplingParams(max_tokens=200, ignore_eos=True)
        llm = LLM(sys.argv[1], "ngram", threads=2)
        wanted = llm.generate([[1, 2, 3], [4, 5]], params)
        stream = llm.stream([1, 2, 3], params)
        tokens = list(next(stream).token_ids)
        busy = threading.Thread(target=lambda: llm.generate([[7, 8, 9]] * 4, params))
        busy.start()
        children = []
        for _ in range(3):
            if child := os.fork():
                children.append(child)
                continue
            try:
                list(stream)
                os._exit(1)
            except CpuspecError as error:
                assert "before the process was forked" in str(error), error
            answers = [llm.generate([[1, 2, 3], [4, 5]], params) for _ in range(2)]
            same = all([one.token_ids for one in two] == [one.token_ids for one in wanted] for two in answers)
            llm.close()
            os._exit(0 if same else 2)
        tokens += [token for output in stream for token in output.token_ids]
        assert tokens == wanted[0].token_ids
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        busy.join()
        assert codes == [0, 0, 0], codes
        """,
        model_file,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_forked_child_with_a_backend_that_cannot_fork_says_so() -> None:
    model = ToyBackend(2, memory=0.3)
    model.survives_fork = False
    llm = toy_llm(backend=model)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            llm.generate([0, 4])
        except BackendError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert "load it in the child" in said.read()
    assert llm.generate([0, 4], PARAMS)[0].token_ids == expected([0, 4])


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_a_daemon_thread_that_generates_as_the_process_exits_does_not_crash_it(backend: str, model_file: Path) -> None:
    done = run_script(
        """
        import sys, threading
        from cpuspec import LLM, CpuspecError, SamplingParams

        llm = LLM(sys.argv[1], "none", sys.argv[2], 2)
        begun = threading.Event()

        def work():
            while True:
                begun.set()
                try:
                    llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=50, ignore_eos=True))
                except CpuspecError as error:
                    assert "closed" in str(error), error
                    break

        threading.Thread(target=work, daemon=True).start()
        begun.wait()
        """,
        model_file,
        backend,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_generates_leaves_its_turn_to_one_that_asks_for_it() -> None:
    llm, begun, asked, outputs = toy_llm(backend=ToyBackend(2, context_length=50_000)), threading.Event(), threading.Event(), [0]
    waited: list[int] = []  # outputs that came meanwhile: many where the thread that asks lost its core before it asked

    def generate() -> None:
        for _ in llm.stream(PROMPTS[0], SamplingParams(max_tokens=40_000, ignore_eos=True)):
            outputs[0] += 1
            begun.set()
            if asked.is_set():
                return

    def ask() -> None:
        assert begun.wait(300)
        try:
            for _ in range(20):
                before = outputs[0]
                llm.prefix_stats()
                waited.append(outputs[0] - before)
        finally:
            asked.set()

    in_threads(generate, ask)
    assert sorted(waited)[len(waited) // 2] <= 3

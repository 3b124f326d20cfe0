"""Mixtures larger than the memory they may use: the same bits, whatever fits, and clear errors."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cpuspec.backends import disk_reads, make_backend
from cpuspec.backends.disk import PAGE, DiskFile, Reader, Reading
from cpuspec.backends.numba_backend import NumbaBackend
from cpuspec.backends.numba_program import at
from cpuspec.backends.packed import packed_directory, verify_packed
from cpuspec.backends.stored import packed_bytes, slot_bytes
from cpuspec.backends.weights import weight_tensors
from cpuspec.checkpoints import Checkpoint
from cpuspec.cli.bench import describe_bench, show_markdown
from cpuspec.errors import BackendError, ConfigError
from cpuspec.evaluate.speed import Plan, measure_speed
from cpuspec.formats.packing import paged_bytes
from cpuspec.model.batch import ForwardStoppedError
from cpuspec.settings import EngineConfig
from tests.backends.models import TOKENS, asked_to_stop, check_rows, in_chunks, read_until_stopped, tiny

SIZES = {"num_layers": 3, "num_experts": 12, "num_used": 3, "expert_size": 256}


pytestmark = pytest.mark.usefixtures("own_cache")


# Of each order of activations, and where router and experts read different norms.
ALL: list[tuple[str, str, dict[str, int]]] = [
    *(("qwen3moe", name, {}) for name in ("q4_0", "q4_k", "q6_k", "mxfp4", "f16", "bf16")),
    ("gemma4-moe", "q4_0", {}),
    ("qwen2moe", "q4_k", {"shared_size": 256}),  # all rows go through a part of it
    ("gpt-oss", "mxfp4", {}),  # whose experts and router have biases
]


@pytest.fixture(scope="module", params=ALL, ids=lambda of: " ".join(of[:2]))
def of_format(request, tmp_path_factory) -> Checkpoint:
    architecture, weight_format, sizes = request.param
    return tiny(tmp_path_factory, architecture=architecture, weight_format=weight_format, **SIZES, **sizes)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Checkpoint:
    return tiny(tmp_path_factory, architecture="qwen3moe", weight_format="q4_k", **SIZES)


def limit_for(checkpoint: Checkpoint, slots: float) -> str:
    """The limit that leaves memory for so many experts of each layer."""
    tensors = {n: t for n, t in weight_tensors(checkpoint, {}).items() if len(t.shape) > 1 and n != "embed"}
    always = sum(packed_bytes(t) for t in tensors.values() if len(t.shape) == 2)
    layers = [
        [tensors[f"layers.{i}.expert_{part}"] for part in ("gate", "up", "down")] for i in range(checkpoint.config.num_layers)
    ]
    return f"{(always + slots * sum(map(slot_bytes, layers)) + 10) / 1000:.6f}KB"


def stored(checkpoint: Checkpoint, slots: float, **settings: int) -> NumbaBackend:
    engine = EngineConfig(**{"threads": 2, "max_rows": 64, "memory": limit_for(checkpoint, slots), **settings})
    backend = make_backend("numba", checkpoint, engine)
    assert isinstance(backend, NumbaBackend)
    return backend


def logits(backend: NumbaBackend, size: int = 45) -> np.ndarray:
    return in_chunks(backend, TOKENS, size)


def test_bits_are_those_of_weights_in_memory_whatever_fits(of_format: Checkpoint) -> None:
    backend = make_backend("numba", of_format, EngineConfig(threads=2, max_rows=64, keep_packed=False))
    assert isinstance(backend, NumbaBackend)
    assert disk_reads(backend) is None
    wanted = logits(backend)
    backend.close()
    for slots, threads in ((1, 1), (2, 3), (5, 2)):
        backend = stored(of_format, slots, threads=threads)
        for size in (45, 7, 1):
            assert np.array_equal(logits(backend, size), wanted), (slots, size)
        reads = disk_reads(backend)
        assert reads
        assert reads.num_bytes > 0
        assert 0 <= reads.num_found < reads.num_experts
        backend.close()


def test_a_row_depends_on_its_past_alone(mixture: Checkpoint) -> None:
    """Several sequences, rejected rows and trees, through slots for two of the twelve experts of a layer."""
    check_rows(mixture, threads=(2,), memory=limit_for(mixture, 2), keep_packed=True)


def test_experts_that_fit_are_read_once(mixture: Checkpoint) -> None:
    backend = stored(mixture, 10)  # of 12
    before = None
    for _ in range(3):
        logits(backend, 1)
        reads = disk_reads(backend)
        assert reads
        if before:
            assert reads.num_found - before.num_found > 0.6 * (reads.num_experts - before.num_experts)
        before = reads
    backend.close()


def test_a_model_that_fits_is_in_memory(mixture: Checkpoint) -> None:
    backend = stored(mixture, 13)
    assert disk_reads(backend) is None
    backend.close()


@pytest.mark.parametrize("harm", ["shortened", "changed", "removed"])
def test_a_file_that_is_harmed_while_it_is_in_use_is_an_error_and_no_crash(mixture: Checkpoint, harm: str) -> None:
    backend = stored(mixture, 2)
    wanted = logits(backend)
    (path,) = packed_directory().glob("*.packed")
    if harm == "shortened":
        os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)
    elif harm == "changed":
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"other bytes")
    else:
        path.unlink()  # what is open stays
        assert np.array_equal(logits(backend), wanted)
        backend.close()
        return
    for _ in range(2):
        with pytest.raises(BackendError, match="was changed or shortened while it was in use; load the model again"):
            logits(backend)
    backend.close()
    if harm == "changed":  # which a start does not see
        assert list(verify_packed(2).values()) == [False]
    again = stored(mixture, 2)
    assert np.array_equal(logits(again), wanted)
    again.close()


def test_a_limit_below_what_can_work_says_what_is_needed(mixture: Checkpoint) -> None:
    with pytest.raises(
        BackendError, match=r"memory is limited to 0\.\d+ GB, but .* and one expert of each layer .* allow 0\.\d+ GB"
    ):
        stored(mixture, 0.9)


def test_a_dense_model_larger_than_its_limit_is_refused(tmp_path_factory) -> None:
    with pytest.raises(
        BackendError, match=r"weights, of which every token reads all, take 0.001 GB; allow .* or leave memory at auto"
    ):
        make_backend("numba", tiny(tmp_path_factory), EngineConfig(memory="100KB"))


def test_a_disk_that_may_keep_nothing_is_a_clear_error(mixture: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUSPEC_PACKED_GB", "0")
    with pytest.raises(BackendError, match="raise CPUSPEC_PACKED_GB"):
        stored(mixture, 2)


@pytest.mark.parametrize("text", ["", "8", "0GB", "-1GB", "101%", "many", "8 PB", 8, None, "1e3GB"])
def test_a_limit_that_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="memory must be a size such as 8GB, a share of the memory such as 60%, or auto"):
        EngineConfig(memory=text)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_reads_for_itself(mixture: Checkpoint) -> None:
    backend = stored(mixture, 2)
    wanted = logits(backend)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(logits(backend), wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(logits(backend), wanted)
    backend.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_is_forked_within_a_forward_begins_anew(mixture: Checkpoint) -> None:
    """It has a part of the parent's segments, and readings on their way that never arrive in it."""
    backend = stored(mixture, 2)
    wanted = logits(backend)
    assert backend._routing
    layer, may_read = backend._writer.stored[1][0], threading.Event()
    file = layer.store.reader.file

    class Slow:
        def read(self, start: int, into: np.ndarray) -> None:
            may_read.wait()
            file.read(start, into)

    layer.store.reader.file = Slow()  # type: ignore[assignment]
    guessed = next(expert for expert in range(SIZES["num_experts"]) if expert not in layer._held)
    layer.guess([guessed])
    while not layer._coming[guessed][1].has_begun:
        time.sleep(0.001)
    backend.program.state["segments"] = at(backend._routing.segments[2:])
    child = os.fork()
    if child == 0:
        layer.store.reader.file = file
        signal.alarm(60)
        os._exit(0 if np.array_equal(logits(backend), wanted) else 1)
    may_read.set()
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(logits(backend), wanted)
    backend.close()


def test_a_bench_tells_what_came_from_the_disk(mixture: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    for slots in (3, 13):
        backend = stored(mixture, slots)
        plan = Plan(prompt_tokens=8, new_tokens=4, rows=(1,), rows_depth=0, repetitions=1)
        report = measure_speed(backend, plan)
        for one in (*report.prefill, *report.decode, *(one.speed for one in report.rows)):
            assert (one.disk_gb_per_s is None) == (one.disk_wait_share is None) == (slots == 13)
            assert slots == 13 or (one.disk_gb_per_s or 0) > 0
        show_markdown(describe_bench("model", backend, EngineConfig(), plan), report)
        assert capsys.readouterr().out.count("from disk | waiting") == (0 if slots == 13 else 2)
        backend.close()


def test_a_forward_that_was_stopped_leaves_all_as_it_was(mixture: Checkpoint) -> None:
    backend = stored(mixture, 2)
    wanted, cache = logits(backend), backend.new_cache(1, 64)
    with asked_to_stop(backend):
        for _ in range(5):
            with pytest.raises(ForwardStoppedError):
                read_until_stopped(backend, cache)
            assert cache.lengths == [0]
            assert np.array_equal(logits(backend), wanted)
    backend.close()


def test_a_reading_that_is_forgotten_never_writes_though_it_was_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped forward leaves readings that its layer gives up, and their slots go to other experts."""
    (tmp_path / "file").write_bytes(bytes([1]) * PAGE + bytes([2]) * PAGE + bytes([3]) * PAGE)
    may_read, read = threading.Event(), DiskFile.read

    def slow(self: DiskFile, start: int, into: np.ndarray) -> None:
        may_read.wait()
        read(self, start, into)

    monkeypatch.setattr(DiskFile, "read", slow)
    for is_waited_for in (True, False):
        may_read.clear()
        reader, slots = Reader(DiskFile(tmp_path / "file"), threads=1), paged_bytes((2, PAGE))
        first, dropped, last = Reading([(0, slots[0])]), Reading([(PAGE, slots[1])]), Reading([(2 * PAGE, slots[1])])
        reader.start(first, True)
        while not first.has_begun:  # the only thread reads this one, and the next one waits
            time.sleep(0.001)
        reader.start(dropped, is_waited_for)
        if not is_waited_for:
            reader.hurry(dropped)
        assert reader.cancel(dropped)
        reader.start(last, True)
        may_read.set()
        reader.wait([last])
        assert (first.is_done, dropped.is_done) == (True, False)
        assert (slots == [[1], [3]]).all()
        reader.close()

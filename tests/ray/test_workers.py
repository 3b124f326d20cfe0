"""A batch over a cluster: every line is answered once, in order, as one process answers it, whatever dies meanwhile."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM
from cpuspec.batch.answer import answer_lines
from cpuspec.batch.run import BatchSummary, run_batch
from cpuspec.errors import ConfigError, CpuspecError
from cpuspec.settings import EngineConfig
from tests import command
from tests.ray.conftest import WHY

pytest.importorskip("ray", reason=WHY)
from cpuspec.ray.workers import Work, answer_on_cluster
from cpuspec.ray.workers import cluster as connected

SETTINGS = EngineConfig(threads=1, max_sequences=4, keep_packed=False)
GIVEN = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


def work(path: Path, draft: str = "ngram") -> Work:
    return Work(str(path), draft, "numba", SETTINGS, GIVEN)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = [{"prompt": f"{number} bottles", "max_tokens": 1 + 17 * number % 60} for number in range(60)]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "nonsense\n")
    return tmp_path / "in.jsonl"


def told(out: Path) -> list[Any]:
    """Each answer without what depends on when it was given."""
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    choices = [answer["response"] and answer["response"]["body"]["choices"] for answer in answers]
    return [(answer["id"], answer["custom_id"], answer["error"], choice) for answer, choice in zip(answers, choices, strict=True)]


@pytest.fixture
def wanted(llm: LLM, source: Path, tmp_path: Path) -> list[Any]:
    run_batch(source, tmp_path / "wanted.jsonl", lambda lines: answer_lines(llm, lines, GIVEN), lambda *_: None)
    return told(tmp_path / "wanted.jsonl")


def test_a_machine_that_dies_loses_and_doubles_no_line(
    cluster: Any, second: Any, path: Path, source: Path, wanted: list[Any], tmp_path: Path
) -> None:
    """Killed with lines in the works; then the driver is interrupted, and another run goes on."""
    out, progress = tmp_path / "out.jsonl", []

    def on_progress(done: int, total: int) -> None:
        progress.append(done / total)
        if len(progress) == 3:
            cluster.remove_node(second, allow_graceful=False)
        if len(progress) == 40:
            raise KeyboardInterrupt

    with connected(cluster.address):
        answer = partial(answer_on_cluster, work=work(path), num_workers=2)
        first = run_batch(source, out, answer, on_progress)
        assert (first.num_answered, first.interrupted) == (40, True)
        again: BatchSummary = run_batch(source, out, partial(answer_on_cluster, work=work(path), num_workers=1), on_progress)
    assert (again.num_kept, again.num_answered, again.num_errors) == (40, 21, 1)
    assert told(out) == wanted
    assert progress == sorted(progress)
    assert progress[-1] == 1


def test_what_a_worker_cannot_load_is_told(cluster: Any, tmp_path: Path) -> None:
    with connected(cluster.address), pytest.raises(ConfigError, match="missing"):
        next(answer_on_cluster(iter(()), work(tmp_path / "missing.gguf"), 1))


def test_workers_that_die_again_and_again_end_the_run(cluster: Any, path: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "exits.py"
    drafter.write_text("import os\n\nos._exit(3)\n")
    with connected(cluster.address), pytest.raises(CpuspecError, match="die again and again"):
        list(answer_on_cluster(iter(()), work(path, f"{drafter}:Drafter"), 1))


def test_a_cluster_without_room_ends_the_run(cluster: Any, path: Path) -> None:
    wide = Work(str(path), "ngram", "numba", EngineConfig(threads=64), GIVEN)
    with connected(cluster.address), pytest.raises(CpuspecError, match="no worker with 64 processors"):
        list(answer_on_cluster(iter(()), wide, 1, patience_s=1.0))


def test_the_command_answers_over_a_cluster(cluster: Any, path: Path, source: Path, wanted: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    how = ("--threads=1", "--max-sequences=4", "--temperature=0", "--ignore-eos", "--draft=ngram")
    options = ("--ray", f"--address={cluster.address}", *how)
    done = command.run("batch", str(source), str(out), "-m", str(path), *options, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["num_answered"] == 61
    assert told(out) == wanted
    nowhere = ("--ray", "--address=127.0.0.1:9", "-m", str(path))
    command.refused("batch", str(source), str(out), *nowhere, code=1, message="no Ray cluster")

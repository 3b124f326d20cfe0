"""`cpuspec train answers` and `cpuspec extract`: from prompts to samples, and what wrong usage says."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cpuspec.cli.app import app
from cpuspec.train.samples import open_samples
from tests.processes import interrupt, started
from tests.train.models import tiny

QUICK = ("--threads", "1")
ASKED = ("--temperatures", "0.9,1", "--max-answer-tokens", "16", *QUICK)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny(tmp_path_factory.mktemp("model")).path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    texts = [f"the {number} of the {7 * number} things that they have" for number in range(9)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUSPEC_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)), prog_name="cpuspec")


def test_prompts_become_samples(model: str, prompts: str, tmp_path: Path) -> None:
    out, tasks, samples = (tmp_path / name for name in ("answers.jsonl", "tasks.jsonl", "samples"))
    tasks.write_text(json.dumps({"prompt": "the 3 of the 21 things that they have"}) + "\n")
    asked = ("train", "answers", model, prompts, out, "--self-made", "4", "--exclude", tasks, *ASKED)
    result = run(*asked)
    assert result.exit_code == 0, result.output
    assert "compared with tasks.jsonl (1 texts, 1 runs of words): 1 refused" in result.stderr
    assert "refused prompts.jsonl:4 (prompt): tasks.jsonl has 'the 3 of the 21 things that they have'" in result.stderr
    content = out.read_bytes()
    report = json.loads(run(*asked, "--json").stdout)
    assert out.read_bytes() == content
    assert report["num_kept"] > 0
    assert [one["id"] for one in report["refused"]] == ["prompts.jsonl:4"]
    assert report["num_answer_tokens"] == sum(len(json.loads(line)["answer_ids"]) for line in content.splitlines())

    asked = ("extract", model, out, samples, "--layers", "0,last,final", "--top", "3", *QUICK)
    result = run(*asked)
    assert result.exit_code == 0, result.output
    found = open_samples(samples)
    assert (found.about.layers, found.about.top, found.about.dtype) == ((0, 2, "final"), 3, "bf16")
    assert len(found) == len(content.splitlines())
    assert found.num_answer_tokens == report["num_answer_tokens"]
    again = json.loads(run(*asked, "--json").stdout)
    assert (again["num_kept"], again["num_samples"], again["num_new_tokens"]) == (len(found), len(found), 0)


def test_ctrl_c_ends_a_run_with_whole_lines(model: str, tmp_path: Path) -> None:
    prompts, out, waited = tmp_path / "many.jsonl", tmp_path / "answers.jsonl", threading.Event()
    prompts.write_text("".join(json.dumps({"ids": [5 + number % 300, 7, number // 300 + 5]}) + "\n" for number in range(50_000)))
    with started("train", "answers", model, str(prompts), str(out), *ASKED) as process:
        while process.poll() is None and not (out.exists() and out.stat().st_size):
            waited.wait(0.05)
        interrupt(process)
        told = process.communicate()[1].decode()
    assert (process.returncode, "interrupted: the same command continues from here" in told) == (130, True), told
    content = out.read_bytes()
    assert content.endswith(b"\n")
    assert all(json.loads(line)["answer_ids"] for line in content.splitlines())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("train", "answers", "MODEL", "OUT"), 2, "nothing to answer"),
        (("train", "answers", "MODEL", "nowhere.jsonl", "OUT"), 2, "nowhere.jsonl is not a file"),
        (("train", "answers", "MODEL", "PROMPTS", "OUT", "--exclude", "nowhere.jsonl"), 2, "nowhere.jsonl is not a file"),
        (("train", "answers", "MODEL", "PROMPTS", "OUT", "--temperatures", "hot"), 2, "numbers with commas"),
        (("train", "answers", "MODEL", "PROMPTS", "OUT", "--part", "2"), 2, "--part takes I/N"),
        (("train", "answers", "MODEL", "PROMPTS", "OUT", "--part", "3/2"), 2, "no part 3 of 2"),
        (("train", "auto", "MODEL", "OUT", "--answers", "nowhere.jsonl"), 2, "nowhere.jsonl is not a file"),
        (("train", "auto", "MODEL", "OUT", "--answers", "PROMPTS", "--prompts", "PROMPTS"), 2, "--answers are there already"),
        (("train", "answers", "MODEL", "PROMPTS", "OUT", "--temperatures", "1,1"), 2, "different numbers"),
        (("train", "answers", "MODEL", "PROMPTS", "OUT", "--max-prompt-tokens", "100000"), 1, "at most 1024"),
        (("train", "answers", "MODEL", "OUT", "--functions", "no_such_package"), 1, "no installed package"),
        (("train", "answers", "no-such-model", "PROMPTS", "OUT"), 1, "no-such-model"),
        (("extract", "MODEL", "PROMPTS", "OUT", "--layers", "3"), 2, "there is no layer '3'"),
        (("extract", "MODEL", "PROMPTS", "OUT", "--dtype", "f64"), 2, "bf16, f32, int8"),
        (("extract", "MODEL", "nowhere.txt", "OUT"), 2, "nowhere.txt is not a file"),
        (("extract", "MODEL", "PROMPTS", "OUT", "--max-length", "100000"), 1, "1024 tokens, the model's context"),
        (("extract", "MODEL", "PROMPTS", "OUT", "--top", "1000000"), 1, "got 1000000"),
        (("extract", "no-such-model", "PROMPTS", "OUT"), 1, "no-such-model"),
        (("extract", "MODEL", "OUT"), 2, "Missing argument"),
    ],
)
def test_wrong_usage_says_what_is_wanted(
    model: str, prompts: str, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    stand_for = {"MODEL": model, "PROMPTS": prompts, "OUT": str(tmp_path / "out")}
    result = run(*(stand_for.get(one, one) for one in arguments))
    assert (result.exit_code, said in " ".join(result.output.split())) == (code, True), result.output
    assert "Traceback" not in result.output

"""`cpuspec eval`: what it prints, writes and exits with. What its figures mean is tested with the package that makes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cpuspec.cli.app import app
from tools.make_tiny_model import make_tiny_gguf

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
NUMPY = ("--backend", "numpy")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", **SMALL))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_gguf(tmp_path_factory.mktemp("model") / "other.gguf", seed=1, **SMALL))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat and the dog ran to the door. " * 6 + "\n", "utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUSPEC_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments], prog_name="cpuspec")


def shown(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_perplexity_is_printed_with_its_error_and_its_convention(model: str, text: str) -> None:
    report = shown("perplexity", model, text, "-c", "16", *NUMPY)
    assert (report["benchmark"], report["convention"], report["text"]) == ("perplexity", "llama.cpp", "text.txt")
    assert report["num_counted"] == 7 * report["num_windows"] > 7
    assert report["perplexity"] == report["running"][-1] > 1
    assert 4 < report["bits_per_weight"] < 16
    assert shown("perplexity", model, text, "-c", "16", "--chunks", "2", *NUMPY)["running"] == report["running"][:2]
    slid = shown("perplexity", model, text, "-c", "16", "--stride", "8", *NUMPY)
    assert slid["convention"] == "Hugging Face"
    assert slid["num_counted"] > report["num_counted"]
    for_people = run("perplexity", model, text, "-c", "16", *NUMPY).stdout
    assert f"{report['perplexity']:.4f} ± {report['error']:.4f}" in for_people


def test_a_model_is_compared_with_the_logits_that_another_left(model: str, other_model: str, text: str, tmp_path: Path) -> None:
    logits = str(tmp_path / "reference.kld")
    kept = shown("perplexity", model, text, "-c", "16", "--save-logits", logits, *NUMPY)
    itself, other = (shown("kl", one, logits, *NUMPY) for one in (model, other_model))
    assert itself["num_tokens"] == kept["num_counted"]
    assert itself["kl_max"] < 1e-4
    assert itself["same_top"] == 1
    assert itself["reference_perplexity"] == pytest.approx(kept["perplexity"], rel=1e-3)
    assert other["kl_mean"] > 0.1
    assert "KL divergence" in run("kl", other_model, logits, *NUMPY).stdout


def test_what_cannot_be_measured_is_said_in_a_line(model: str, text: str, tmp_path: Path) -> None:
    for arguments, code, message in (
        (("perplexity", model, f"{text}.gone"), 1, "cannot be read"),
        (("perplexity", model, text, "-c", "512", *NUMPY), 1, "at least 1024 tokens"),
        (("perplexity", model, text, "--stride", "8", "--save-logits", "x"), 2, "leave out --stride"),
        (("kl", model, text), 1, "no file of logits"),
    ):
        result = run(*arguments)
        assert (result.exit_code, message in result.output) == (code, True), result.output


def test_a_task_is_answered_judged_and_priced(model: str, tmp_path: Path) -> None:
    data, out = tmp_path / "gsm8k.jsonl", tmp_path / "out.jsonl"
    lines = [{"question": f"What is {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(1, 5)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    options = ("-m", model, "--max-tokens", "8", "--limit", "3", "--draft", "none", *NUMPY)
    report = shown("task", "gsm8k", str(data), *options, "--shots", "1", "--out", str(out), "--price-per-hour", "0.1")
    assert (report["num_problems"], report["num_passed"], report["pass@1"]) == (3, 0, 0.0)
    assert report["cost"]["num_answers"] == 3
    assert report["price"]["per_million_tokens"] > 0
    assert report["price"]["per_accepted_answer"] is None
    written = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [one["passed"] for one in written] == [False] * 3
    assert "exact match: 0.0%" in run("task", "gsm8k", str(data), *options, "--chat").stdout


def test_programs_are_run_only_where_that_was_said(model: str, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "def f():\n", "entry_point": "f", "test": "def check(f): f()"}) + "\n", "utf-8")
    refused = run("task", "humaneval", str(data), "-m", model, *NUMPY)
    assert refused.exit_code == 2
    assert "--allow-code-execution" in refused.output
    for arguments, message in (
        (("mmlu", str(data), "-m", model), "wanted one of"),
        (("gsm8k", str(data), "-m", model, "--samples", "2"), "--temperature"),
        (("gsm8k", str(data), "-m", model), "'question'"),
    ):
        result = run("task", *arguments, *NUMPY)
        assert result.exit_code in (1, 2)
        assert message in result.output

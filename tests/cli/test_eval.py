"""`cpuspec eval`: what it prints, writes and exits with. What its figures mean is tested with the package that makes them."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests import command
from tests.command import NUMPY, small_model


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model(tmp_path_factory.mktemp("model") / "other.gguf", seed=1)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat and the dog ran to the door. " * 6 + "\n", "utf-8")
    return str(path)


run, shown = partial(command.run, "eval"), partial(command.report_of, "eval")


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


def test_keys_and_values_in_fewer_bits_are_compared_with_f32_at_each_depth(model: str, text: str) -> None:
    how = ("kv", model, text, "--depth", "24,40", "--rows", "8", "--formats", "f16,int8,int4")
    report = shown(*how, *NUMPY)
    assert [(one["depth"], one["kv_format"]) for one in report["formats"]] == [
        (depth, name) for depth in (24, 40) for name in ("f16", "int8", "int4")
    ]
    for depth in (24, 40):
        f16, int8, int4 = (one["kl_mean"] for one in report["formats"] if one["depth"] == depth)
        assert 0 <= f16 < int8 < int4
    assert all(one["num_tokens"] == 8 for one in report["formats"])
    assert "same likeliest" in run(*how, *NUMPY).stdout


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


REFUSED: list[tuple[tuple[str, ...], int | tuple[int, ...], str]] = [
    (("perplexity", "MODEL", "TEXT.gone"), 1, "cannot be read"),
    (("perplexity", "MODEL", "TEXT", "-c", "512"), 1, "at least 1024 tokens"),
    (("perplexity", "MODEL", "TEXT", "--stride", "8", "--save-logits", "x"), 2, "leave out --stride"),
    (("kl", "MODEL", "TEXT"), 1, "not a file of logits"),
    (("kv", "MODEL", "TEXT", "--rows", "8", "--depth", "9"), 2, "at least 10 tokens"),
    (("kv", "MODEL", "TEXT", "--rows", "8", "--depth", "100000"), 2, "is more than the model's context"),
    (("kv", "MODEL", "TEXT", "--rows", "8", "--formats", "q4_0"), 2, "'q4_0' is not known"),
    (("task", "humaneval", "DATA", "-m", "MODEL"), 2, "--allow-code-execution"),
    (("task", "mmlu", "DATA", "-m", "MODEL"), 2, "wanted one of"),
    (("task", "gsm8k", "DATA", "-m", "MODEL", "--samples", "2"), 2, "--temperature"),
    (("task", "gsm8k", "DATA", "-m", "MODEL"), 1, "'question'"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSED)
def test_what_cannot_be_measured_is_said_in_a_line(
    model: str, text: str, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "def f():\n", "entry_point": "f", "test": "def check(f): f()"}) + "\n", "utf-8")
    places = {"MODEL": model, "TEXT": text, "TEXT.gone": f"{text}.gone", "DATA": str(data)}
    command.refused("eval", *(places.get(one, one) for one in arguments), *NUMPY, code=code, message=message)


def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "one two one two"}\n{"text": "three"}\n', "utf-8")
    return f"{path}:text:2"


def test_drift_tells_where_two_models_part(model: str, other_model: str, tmp_path: Path) -> None:
    options = ("--prompts", prompts(tmp_path), "--max-tokens", "6", "--draft", "none", *NUMPY)
    same, other = (shown("drift", model, one, *options) for one in (model, other_model))
    assert (same["num_identical"], same["edit_distance_mean"], same["first_difference_median"]) == (2, 0, None)
    assert (other["num_prompts"], other["unit"]) == (2, "tokens")
    assert other["edit_distance_mean"] > 0
    assert "same answers" in run("drift", model, other_model, *options).stdout


def test_forms_are_counted(model: str, tmp_path: Path) -> None:
    data = tmp_path / "forms.jsonl"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    data.write_text(json.dumps({"prompt": "call f", "tools": [tool]}) + '\n{"prompt": "say {}"}\n', "utf-8")
    options = ("-m", model, "--max-tokens", "6", "--draft", "none", *NUMPY)
    report = shown("forms", str(data), *options)
    assert [(one["kind"], one["num_lines"], one["fits"]) for one in report["kinds"]] == [("tool calls", 1, 0), ("JSON", 1, 0)]
    assert "tool calls" in run("forms", str(data), *options).stdout


def test_the_four_arms_are_compared_and_set_beside_others(model: str, tmp_path: Path) -> None:
    data = tmp_path / "gsm8k.jsonl"
    data.write_text('{"question": "one two one two one", "answer": "#### 3"}\n' * 2, "utf-8")
    report = shown("arms", model, f"gsm8k:{data}", "--max-tokens", "6", "--draft", "ngram", "--price-per-hour", "1", *NUMPY)
    assert [arm["arm"] for arm in report["arms"]] == ["baseline", "quantized", "speculative", "both"]
    assert [arm["draft"] for arm in report["arms"]] == ["none", "none", "ngram", "ngram"]
    wide, narrow = report["arms"][0], report["arms"][1]
    assert wide["bits_per_weight"] > 15.9 > narrow["bits_per_weight"]
    for arm in report["arms"]:
        (task,) = arm["tasks"]
        assert task["cost"]["num_answers"] == task["num_problems"] == 2
        assert task["cost"]["ttft_s"].keys() == {"p50", "p95", "p99"}
        assert task["price"]["per_million_tokens"] > 0
    assert {"date", "command", "model"} <= report.keys()
    path, other = tmp_path / "arms.json", tmp_path / "other.json"
    path.write_text(json.dumps(report), "utf-8")
    other.write_text('{"engine": "transformers", "model": "m", "decode_tokens_per_s": 3}', "utf-8")
    runs = shown("beside", str(path), str(other), "--price-per-hour", "1", "--price-per-hour", "2")["runs"]
    assert [one["price_per_hour"] for one in runs] == [1, 1, 1, 1, 2]
    assert runs[4]["price_per_million"] == pytest.approx(2 / 3600 / 3 * 1e6)
    assert "transformers" in run("beside", str(path), str(other)).stdout
    assert run("beside", str(path), "--price-per-hour", "1", "--price-per-hour", "2").exit_code == 2

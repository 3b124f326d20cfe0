"""`cpuspec bench-serve` against a server of ours: what it prints, writes and exits with."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import command
from tests.processes import interrupt, started, wait_for
from tests.server.running import Running, load, serving, tiny_model

pytestmark = pytest.mark.usefixtures("offline")
KEY = "a-secret"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tiny_model(tmp_path_factory.mktemp("model"))
    with serving(lambda: load(path), keys=(KEY,)) as running:
        yield running


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUSPEC_API_KEY", KEY)


def run(*arguments: str) -> Any:
    return command.run("bench-serve", *arguments)


def report(server: Running, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = command.report_of("bench-serve", "--base-url", server.url, *arguments)
    return found


def test_random_prompts_have_the_lengths_asked_for(server: Running) -> None:
    lengths = ("--random-input-len", "20", "--random-prefix-len", "12", "--random-output-len", "5", "--ignore-eos")
    found = report(server, "--num-prompts", "6", "--request-rate", "50", *lengths, "--goodput", "ttft:1e6", "tpot:1e6")
    assert (found["completed"], found["failed"], found["stopped"]) == (6, 0, "")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (6 * 32, 6 * 5)
    assert found["request_goodput"] == found["request_throughput"] > 0
    assert found["model_id"] == "tiny"
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{what}_{name}_ms" for what in ("mean", "median", "std", "p50", "p95", "p99")} <= found.keys()
    for name in ("ttft", "tpot", "e2el"):  # an answer whose text came in one piece has no gaps
        assert 0 <= found[f"p50_{name}_ms"] <= found[f"p99_{name}_ms"] <= found["p99_e2el_ms"]


def test_a_measured_prompt_is_not_warmed_up_with(server: Running) -> None:
    lengths = ("--random-input-len", "40", "--random-output-len", "2", "--seed", "9")
    assert report(server, "--num-prompts", "1", "--num-warmups", "1", *lengths)["total_cached_tokens"] < 20
    again = report(server, "--num-prompts", "1", "--num-warmups", "0", *lengths)
    assert again["total_cached_tokens"] > 20  # the negative control: that prompt was there before


def test_a_data_set_goes_to_the_endpoints_that_it_is_made_for(server: Running, tmp_path: Path) -> None:
    lines = [{"prompt": "one two", "max_tokens": 3}, {"messages": [{"role": "user", "content": "hello"}], "output_tokens": 4}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ("--dataset-path", str(tmp_path / "data.jsonl"), "--num-prompts", "4", "--max-concurrency", "2", "--ignore-eos")
    saved = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "found.json")
    found = report(server, *options, *saved, "--percentile-metrics", "tpot", "--metric-percentiles", "90")
    assert (found["completed"], found["total_output_tokens"], found["backend"]) == (4, 14, "openai+openai-chat")
    assert found["max_concurrent_requests"] <= 2
    assert {"p90_tpot_ms", "mean_tpot_ms"} <= found.keys()
    assert not {"mean_ttft_ms", "p99_tpot_ms"} & found.keys()
    kept = json.loads((tmp_path / "found.json").read_text())
    assert kept["output_lens"] == [3, 4, 3, 4]
    assert kept["generated_texts"][0] == kept["generated_texts"][2]
    assert kept["completed"] == found["completed"]


def test_people_get_tables_and_failures_are_told(server: Running) -> None:
    result = run("--base-url", server.url, "--num-prompts", "2", "--random-output-len", "3", "--extra-body", '{"top_p": 0.5}')
    assert result.exit_code == 0, result.output
    assert "2 answered, 0 failed" in result.stdout
    assert "time to first token" in result.stdout
    failed = run("--base-url", server.url, "--num-prompts", "3", "--num-warmups", "0", "--extra-body", '{"top_p": 5}')
    assert failed.exit_code == 1  # nothing was answered
    assert "3 requests failed: status 400: top_p" in failed.stderr
    refused = run("--base-url", server.url, "--num-prompts", "3", "--extra-body", '{"top_p": 5}')
    assert refused.exit_code == 1
    assert "does not answer the first request: status 400" in refused.stderr


def test_other_machines_get_no_load() -> None:
    for options in (("--host", "192.0.2.1"), ("--base-url", "http://192.0.2.1:8000/v1"), ("--base-url", "https://127.0.0.1")):
        command.refused("bench-serve", *options, code=1, message="this machine")


@pytest.mark.parametrize(
    "options",
    [
        ("--backend", "vllm"),
        ("--request-rate", "0"),
        ("--request-rate", "nan"),
        ("--burstiness", "0"),
        ("--goodput", "x:1"),
        ("--percentile-metrics", "x"),
        ("--metric-percentiles", "x"),
        ("--extra-body", "[]"),
        ("--num-prompts", "0"),
        ("ttft:500",),
    ],
    ids=" ".join,
)
def test_wrong_options_are_told(options: tuple[str, ...]) -> None:
    assert run(*options).exit_code == 2


def test_nobody_listens() -> None:
    command.refused("bench-serve", "--port", "1", code=1, message="no connection to 127.0.0.1:1")


def test_ctrl_c_shows_what_came_until_then(server: Running) -> None:
    endless = ("--num-prompts", "1000", "--request-rate", "2", "--random-input-len", "4", "--random-output-len", "2")
    with started("bench-serve", "--base-url", server.url, "--json", *endless) as process:
        wait_for(process.stderr, b"requests: 0 %")
        interrupt(process)
        out, _ = process.communicate()
    assert process.returncode == 130
    found = json.loads(out)
    assert found["stopped"] == "interrupted"
    assert 0 < found["completed"] + found["failed"] < 1000

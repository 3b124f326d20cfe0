"""Each benchmark measures what it is asked for, in figures that belong together, and saves what was run on what."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import certificates
import kernels
import overhead
import prefixes
import pytest
import record
import serving
import structured

from cpuspec.evaluate.certify import certify
from tests.backends.models import SMALL
from tools.make_tiny_model import make_tiny_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context_length=4096, **SMALL)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["/home/me/benchmarks/peers.py", "m.gguf", "--json", "/home/me/x.json"], "python benchmarks/peers.py m.gguf"),
        (["peers.py", "--llama-cpp", "/opt/llama.cpp/bin"], "python benchmarks/peers.py --llama-cpp bin"),
        (["peers.py", "--python", "openvino=/home/me/bin/python"], "python benchmarks/peers.py --python openvino=python"),
        (["identity.py", "../data/humaneval.jsonl:prompt:20"], "python benchmarks/identity.py humaneval.jsonl:prompt:20"),
        (["x.py", "--json=/home/me/x.json", "-r", "3"], "python benchmarks/x.py -r 3"),
        (["x.py", "models/a file.gguf"], "python benchmarks/x.py 'models/a file.gguf'"),
    ],
)
def test_a_results_file_has_the_command_and_the_machine_without_its_paths(arguments, wanted, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", arguments)
    rounds = record.Rounds(2, 1)
    list(rounds)
    kept = {"unit": "GB/s, 1 / 2, https://example.org/a/b", "list": [1.5, None, True]}
    record.save(record.record("x", "m", rounds) | {"failed": {"one": "File\n/opt/bin/python: no"}, **kept}, tmp_path / "x.json")
    result = json.loads((tmp_path / "x.json").read_text("utf-8"))
    assert result.items() >= {"benchmark": "x", "model": "m", "command": wanted, "threads": 1, "rounds": 2, **kept}.items()
    assert result["failed"] == {"one": "File\npython: no"}
    assert {"processor", "cores", "isa"} <= result["machine"].keys()
    assert {"cpuspec", "numba"} <= result["versions"].keys()
    assert result["read_bytes_per_s"]["median"] == 1e9


def test_every_draft_has_its_certificate_and_the_worst_of_them_ends_the_run(run, model, monkeypatch):
    def certified(*rest, **more):
        found = certify(*rest, backend="numpy", **more)
        return replace(found, sampled=found.control) if found.spec == "ngram" else found

    monkeypatch.setattr(certificates, "certify", certified)
    options = ("--draft", "suffix", "--draft", "ngram", "--tokens", "6", "--samples", "60", "--threads", "1")
    result, saved = run(certificates.main, model, *options)
    assert result.exit_code == 1
    assert "ngram: NOT CERTIFIED" in result.output
    assert [(one["spec"], one["passed"]) for one in saved["certificates"]] == [("suffix", True), ("ngram", False)]
    assert saved["files"][0]["name"] == "tiny.gguf"


def test_every_turn_of_a_session_from_the_second_on_has_its_figures(measured, model):
    saved, _ = measured(prefixes.main, model, "--turns", "4", "--system-tokens", "300", "--fresh-every", "2", "--threads", "1")
    rounds = {(name, kind): len(one["rounds"]) for name, of in saved["figures"].items() for kind, one in of.items()}
    kinds = (prefixes.CACHED, prefixes.FRESH, prefixes.RESTARTED)
    usual = {(name, kind): 2 for name in (prefixes.TTFT, prefixes.OVER) for kind in kinds}
    assert rounds == usual | {(prefixes.TTFT, prefixes.CACHED): 3}
    assert set(saved["figures"][prefixes.OVER][prefixes.FRESH]["rounds"]) == {1.0}


def test_overhead_is_the_step_less_what_is_inside_of_the_forward():
    clock = SimpleNamespace(now_s=0.0)

    def work(seconds):
        clock.now_s += seconds

    watch = overhead.Stopwatch(lambda: clock.now_s)
    forward = watch.inside(work)

    def steps():
        for number in range(3):
            work(1)
            forward(10)
            work(2)
            for _ in range(number):  # a draft model's forwards
                forward(100)
                work(0.5)
            yield SimpleNamespace(cycles=[number])
        work(4)
        yield SimpleNamespace(cycles=[3, 4])  # two steps at once

    assert watch.outside_s(steps()) == [3, 3.5, 4, 2, 2]


def test_overhead_is_told_of_every_number_of_threads_and_draft(model, measured):
    options = ("--threads", "1", "--threads", "2", "--draft", "none", "--draft", "ngram", "--steps", "5", "--rounds", "3")
    figures = measured(overhead.main, model, *options)[0]["us_per_step"]
    assert list(figures) == ["none, 1 threads", "ngram, 1 threads", "none, 2 threads", "ngram, 2 threads"]
    assert all(len(one["rounds"]) == 3 and one["min"] > 0 for of in figures.values() for one in of.values())
    assert all(list(of) == list(overhead.CLOCKS) for of in figures.values())


def test_every_format_number_of_rows_and_threads_of_a_kernel_is_measured(measured, monkeypatch):
    monkeypatch.setattr(kernels, "read_bandwidth", lambda threads: 1e9 * threads)
    monkeypatch.setattr(kernels, "OUT_FEATURES", 64)
    options = ("--rows", "1,3", "--threads", "1,2", "--rounds", "2", "--in-features", "256", "--megabytes", "1")
    saved, result = measured(kernels.main, "--formats", "q4_0,f16", *options)
    cases = [(one["format"], one["activations"], one["threads"], one["rows"]) for one in saved["kernels"]]
    orders = {"q4_0": "int8", "f16": "f32"}
    assert cases == [(name, order, team, rows) for name, order in orders.items() for team in (1, 2) for rows in (1, 3)]
    for one in saved["kernels"]:
        weights_per_byte = 1 / 2 if one["format"] == "f16" else 32 / 18
        rate, read = one["multiply_adds_per_s"]["median"], one["bytes_per_s"]["median"]
        assert rate / read == pytest.approx(one["rows"] * weights_per_byte, rel=1e-3)
        assert one["over_bare_read"]["median"] == pytest.approx(read / 1e9 / one["threads"], rel=1e-3)
        assert (one["over_one_row"]["rounds"] == [1, 1]) == (one["rows"] == 1)
    assert "| 2 | 3 |" in result.output


def test_our_servers_give_the_same_answers_under_load(tmp_path, measured, model):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"once {number}"}) + "\n" for number in range(8)))
    options = ("--clients", "1,2", "--per-client", "2", "--rounds", "1", "--threads", "1", "--max-tokens", "6", "--context", "128")
    found, _ = measured(serving.main, model, f"{prompts}:text:8", *options, "--draft", "ngram")
    assert list(found["instructions"]) == ["cpuspec none", "cpuspec ngram"]
    for count in (1, 2):
        assert all(one["median"] > 0 for one in found["figures"][f"{count} clients, output tokens/s"].values())
        for counted in found["counts"][f"{count} clients"].values():
            assert (counted["completed"], counted["failed"], counted["differing"]) == ([2 * count], [0], [0])


def test_ratios_of_servers_are_of_one_round():
    def figures(throughput, ttft_ms):
        return dict.fromkeys(serving.LATENCIES, ttft_ms) | {"output_throughput": throughput, "request_throughput": 1.0}

    samples = {
        (8, "cpuspec none"): [figures(30.0, 5.0), figures(10.0, 4.0)],
        (8, "llama.cpp none"): [figures(10.0, 10.0), figures(5.0, 2.0)],
    }
    found = serving.report([8], ["cpuspec none", "llama.cpp none"], samples)["ratios"]
    assert found["8 clients, output tokens/s: cpuspec none over llama.cpp none"]["rounds"] == [3.0, 2.0]
    assert found["8 clients, p95 ttft, ms: cpuspec none over llama.cpp none"]["rounds"] == [0.5, 2.0]


def test_structured_answers_are_the_same_in_every_arm_and_what_ends_is_valid(measured, model):
    found, _ = measured(structured.main, model, "--requests", "5", "--clients", "2", "--rounds", "1", "--threads", "1")
    counts = found["counts"]
    assert counts["answers"] == counts["valid"] + counts["cut off"] == 15
    assert counts["valid"]
    assert set(found["figures"][f"2 clients, {structured.OVER}"]) == {"forced", "auto"}


@pytest.mark.parametrize(
    ("content", "reason", "wanted"),
    [
        ('{"a": 3}', "stop", "valid"),
        ('{"a": 9}', "stop", "invalid"),
        ('{"a": 3', "stop", "invalid"),
        ('{"a": 3', "length", "cut off"),
    ],
)
def test_a_structured_answer_is_judged_by_its_schema(content, reason, wanted):
    schema = structured.record_of(a=structured.whole(1, 5))
    answer = {"choices": [{"finish_reason": reason, "message": {"content": content}}]}
    assert structured.judge(schema, answer) == wanted

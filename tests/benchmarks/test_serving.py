"""The benchmark of servers sends each of them the same requests, and takes ratios within a round."""

import json

import serving

from tests.backends.models import SMALL
from tools.make_tiny_model import make_tiny_gguf


def prompt_file(directory, count):
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": f"once {number}"}) + "\n" for number in range(count)))
    return f"{path}:text:{count}"


def test_our_servers_give_the_same_answers_under_load(tmp_path, measured):
    model = make_tiny_gguf(tmp_path / "tiny.gguf", context_length=256, **SMALL)
    options = ("--clients", "1,2", "--per-client", "2", "--rounds", "1", "--threads", "1", "--max-tokens", "6", "--context", "128")
    found, _ = measured(serving.main, model, prompt_file(tmp_path, 8), *options, "--draft", "ngram")
    assert list(found["instructions"]) == ["cpuspec none", "cpuspec ngram"]
    for count in (1, 2):
        assert all(one["median"] > 0 for one in found["figures"][f"{count} clients, output tokens/s"].values())
        for counted in found["counts"][f"{count} clients"].values():
            assert (counted["completed"], counted["failed"], counted["differing"]) == ([2 * count], [0], [0])


def test_ratios_are_of_one_round():
    def figures(throughput, ttft_ms):
        return dict.fromkeys(serving.LATENCIES, ttft_ms) | {"output_throughput": throughput, "request_throughput": 1.0}

    samples = {
        (8, "cpuspec none"): [figures(30.0, 5.0), figures(10.0, 4.0)],
        (8, "llama.cpp none"): [figures(10.0, 10.0), figures(5.0, 2.0)],
    }
    found = serving.report([8], ["cpuspec none", "llama.cpp none"], samples)["ratios"]
    assert found["8 clients, output tokens/s: cpuspec none over llama.cpp none"]["rounds"] == [3.0, 2.0]
    assert found["8 clients, p95 ttft, ms: cpuspec none over llama.cpp none"]["rounds"] == [0.5, 2.0]

"""A results file says what was run on what, and nothing about whose machine it was."""

import json
import sys

import pytest
import record
from record import Rounds, save


def test_a_results_file_has_the_command_the_machine_and_the_versions(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["/home/somebody/cpuspec/benchmarks/peers.py", "m.gguf", "--json", str(path)])
    rounds = Rounds(2, 1)
    list(rounds)
    save(record.record("peers", "m.gguf", rounds) | {"figure": 1}, path)
    result = json.loads(path.read_text("utf-8"))
    assert (result["benchmark"], result["model"], result["figure"]) == ("peers", "m.gguf", 1)
    assert result["command"] == "python benchmarks/peers.py m.gguf"
    assert {"processor", "cores", "isa"} <= result["machine"].keys()
    assert {"cpuspec", "numba"} <= result["versions"].keys()
    assert (result["threads"], result["rounds"], result["read_bytes_per_s"]["median"]) == (1, 2, 1e9)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["peers.py", "--llama-cpp", "/opt/llama.cpp/bin"], "python benchmarks/peers.py --llama-cpp bin"),
        (["peers.py", "--python", "torch=/home/me/venv/bin/python"], "python benchmarks/peers.py --python torch=python"),
        (["identity.py", "../data/humaneval.jsonl:prompt:20"], "python benchmarks/identity.py humaneval.jsonl:prompt:20"),
        (["x.py", "--json=/home/me/x.json", "-r", "3"], "python benchmarks/x.py -r 3"),
        (["x.py", "models/a file.gguf"], "python benchmarks/x.py 'models/a file.gguf'"),
    ],
)
def test_a_command_is_kept_without_the_paths_of_its_machine(arguments, wanted, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", arguments)
    rounds = Rounds(1, 1)
    list(rounds)
    save(record.record("x", "m", rounds), tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text("utf-8"))["command"] == wanted


def test_texts_at_any_depth_lose_paths_and_nothing_else(tmp_path):
    kept = {"unit": "GB/s, 1 / 2, https://example.org/a/b", "list": [1.5, None, True]}
    save({"failed": {"torch": "File\n/opt/venv/bin/python: no"}, **kept}, tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text("utf-8")) == {"failed": {"torch": "File\npython: no"}, **kept}

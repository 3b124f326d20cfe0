"""`cpuspec quantize`: what it prints. What is in its files is tested with the package that makes them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cpuspec.cli.app import app
from tools.make_tiny_model import make_tiny_gguf

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
CANDIDATES = "mxfp4,q5_0,q8_0"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUSPEC_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")


def test_a_budget_prints_its_mix_as_a_table_and_as_json(tmp_path: Path) -> None:
    model = str(make_tiny_gguf(tmp_path / "tiny.gguf", weight_format="f16", **SMALL))
    text, out = tmp_path / "text.txt", str(tmp_path / "out.gguf")
    text.write_text("the cat sat on the mat and the dog ran to the door. " * 30, "utf-8")
    arguments = ["quantize", model, out, "--bits-per-weight", "5.5", "--candidates", CANDIDATES, "--calibration", str(text)]
    arguments += ["--ctx-size", "32", "--chunks", "4"]
    result = CliRunner().invoke(app, [*arguments, "--json"], prog_name="cpuspec")
    assert result.exit_code == 0, result.output
    mix = json.loads(result.stdout)["matrices"]
    assert set(mix.values()) <= set(CANDIDATES.split(","))
    table = CliRunner().invoke(app, arguments, prog_name="cpuspec").stdout
    lines = [line.split() for line in table.splitlines()]
    parts = ["q", "k", "v", "o", "gate", "up", "down"]
    assert ["layers", *parts] in lines
    rows = [[mix[f"layers.{layer}.{part}"] for part in parts] for layer in (0, 1)]
    if rows[0] == rows[1]:
        assert ["0", "to", "1", *rows[0]] in lines
    else:
        assert ["0", *rows[0]] in lines
        assert ["1", *rows[1]] in lines
    assert ["embed", mix["embed"]] in lines


def test_a_type_and_a_budget_exclude_each_other(tmp_path: Path) -> None:
    model = str(make_tiny_gguf(tmp_path / "tiny.gguf", weight_format="f16", **SMALL))
    arguments = ["quantize", model, str(tmp_path / "out.gguf"), "--type", "q4_0", "--bits-per-weight", "4.5"]
    result = CliRunner().invoke(app, arguments, prog_name="cpuspec")
    assert result.exit_code == 2
    assert "give no type" in result.output


def test_a_format_that_only_cpuspec_reads_is_told(tmp_path: Path) -> None:
    model = str(make_tiny_gguf(tmp_path / "tiny.gguf", weight_format="f16", **SMALL))
    result = CliRunner().invoke(app, ["quantize", model, str(tmp_path / "out.gguf"), "--type", "nl4_g32"], prog_name="cpuspec")
    assert result.exit_code == 0, result.output
    assert "llama.cpp does not read this file" in result.output

"""`cpuspec quantize`: what it prints. What is in its files is tested with the package that makes them."""

from pathlib import Path

import pytest

from tests.command import ok, refused, report_of, run, small_model

pytestmark = pytest.mark.usefixtures("offline")
CANDIDATES = "mxfp4,q5_0,q8_0"


@pytest.fixture
def model(tmp_path: Path) -> str:
    return small_model(tmp_path / "tiny.gguf", weight_format="f16", num_layers=2)


def test_a_budget_prints_its_mix_as_a_table_and_as_json(model: str, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", str(tmp_path / "out.gguf")
    text.write_text("the cat sat on the mat and the dog ran to the door. " * 30, "utf-8")
    arguments = ["quantize", model, out, "--bits-per-weight", "5.5", "--candidates", CANDIDATES, "--calibration", str(text)]
    arguments += ["--ctx-size", "32", "--chunks", "4"]
    mix = report_of(*arguments)["matrices"]
    assert set(mix.values()) <= set(CANDIDATES.split(","))
    lines = [line.split() for line in ok(*arguments).splitlines()]
    parts = ["q", "k", "v", "o", "gate", "up", "down"]
    assert ["layers", *parts] in lines
    rows = [[mix[f"layers.{layer}.{part}"] for part in parts] for layer in (0, 1)]
    if rows[0] == rows[1]:
        assert ["0", "to", "1", *rows[0]] in lines
    else:
        assert ["0", *rows[0]] in lines
        assert ["1", *rows[1]] in lines
    assert ["embed", mix["embed"]] in lines


def test_a_type_and_a_budget_exclude_each_other(model: str, tmp_path: Path) -> None:
    arguments = ("quantize", model, str(tmp_path / "out.gguf"), "--type", "q4_0", "--bits-per-weight", "4.5")
    refused(*arguments, code=2, message="give no type")


def test_a_format_that_only_cpuspec_reads_is_told(model: str, tmp_path: Path) -> None:
    result = run("quantize", model, str(tmp_path / "out.gguf"), "--type", "nl4_g32")
    assert result.exit_code == 0, result.output
    assert "llama.cpp does not read this file" in result.output

"""The benchmark of drafts: agreement and costs of every draft, in figures that can be told from each other."""

import json

import drafts
import pytest
import record
from typer import Typer
from typer.testing import CliRunner

from tools.make_tiny_model import make_tiny_gguf


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Measures a tiny model's drafts on prompts of its own; returns the result and what was saved."""
    monkeypatch.setattr(record, "read_bandwidth", lambda threads: 1e9 * threads)
    monkeypatch.setattr(drafts, "DEPTH", 8)
    model = make_tiny_gguf(tmp_path / "tiny.gguf", weight_format="q8_0", num_layers=3)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"turns": [f"the cat {n}", "no"]}) + "\n" for n in range(9)), "utf-8")
    app = Typer()
    app.command()(drafts.main)

    def run(*names, more=()):
        path = tmp_path / "drafts.json"
        options = [part for name in names for part in ("--draft", name)]
        arguments = [
            str(model),
            f"{texts}:turns:3",
            f"{texts}:turns:2:chat",
            *more,
            *options,
            "--max-tokens",
            "12",
            "--rounds",
            "3",
        ]
        result = CliRunner().invoke(app, [*arguments, "--json", str(path)])
        return result, json.loads(path.read_text("utf-8")) if path.exists() else None

    return run


def test_every_draft_is_measured(run):
    result, saved = run("self:f16", "self:int2_g64_asym", "skip:2")
    assert result.exit_code == 0, result.output
    assert list(saved["tokens"].values()) == [36, 24]
    same, coarse, shallow = saved["drafts"]
    assert [one["draft"] for one in saved["drafts"]] == ["self:f16", "self:int2_g64_asym", "skip:2"]
    assert min(same["agreement"].values()) > 0.9
    assert max(coarse["agreement"].values()) < 0.9
    assert shallow["read_over_target"] < 1 < same["read_over_target"]
    assert all(len(one["forward_over_target"]["rounds"]) == 3 for one in saved["drafts"])


def test_a_draft_that_is_none_is_refused(run):
    result, _ = run("ngram")
    assert result.exit_code == 2
    assert "self, skip" in result.output


@pytest.mark.parametrize("text", ["nothing.jsonl:turns:3", "turns", "{}:prompt:3", "{}:turns:many"])
def test_texts_that_are_none_are_refused(run, tmp_path, text):
    result, _ = run("self:f16", more=[text.format(tmp_path / "texts.jsonl")])
    assert result.exit_code == 2
    assert "wanted FILE:FIELD:COUNT" in " ".join(result.output.split())

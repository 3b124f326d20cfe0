"""The benchmark of drafts: agreement and costs of every draft, in figures that can be told from each other."""

import json

import drafts
import pytest

from tools.make_tiny_model import make_tiny_gguf


@pytest.fixture
def compared(run, tmp_path, monkeypatch):
    """Measures a tiny model's drafts on prompts of its own; returns the result and what was saved."""
    monkeypatch.setattr(drafts, "DEPTH", 8)
    model = make_tiny_gguf(tmp_path / "tiny.gguf", weight_format="q8_0", num_layers=3)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"turns": [f"the cat {n}", "no"]}) + "\n" for n in range(9)), "utf-8")

    def compared(*names, more=()):
        options = [part for name in names for part in ("--draft", name)]
        prompts = (f"{texts}:turns:3", f"{texts}:turns:2:chat", *more)
        return run(drafts.main, model, *prompts, *options, "--max-tokens", "12", "--rounds", "3")

    return compared


def test_every_draft_is_measured(compared):
    result, saved = compared("self:f16", "self:int2_g64_asym", "skip:2")
    assert result.exit_code == 0, result.output
    assert list(saved["tokens"].values()) == [36, 24]
    same, coarse, shallow = saved["drafts"]
    assert [one["draft"] for one in saved["drafts"]] == ["self:f16", "self:int2_g64_asym", "skip:2"]
    assert min(same["agreement"].values()) > 0.9
    assert max(coarse["agreement"].values()) < 0.9
    assert shallow["read_over_target"] < 1 < same["read_over_target"]
    assert all(len(one["forward_over_target"]["rounds"]) == 3 for one in saved["drafts"])


def test_a_draft_that_is_none_is_refused(compared):
    result, _ = compared("ngram")
    assert result.exit_code == 2
    assert "self, skip" in result.output


@pytest.mark.parametrize("text", ["nothing.jsonl:turns:3", "turns", "{}:prompt:3", "{}:turns:many"])
def test_texts_that_are_none_are_refused(compared, tmp_path, text):
    result, _ = compared("self:f16", more=[text.format(tmp_path / "texts.jsonl")])
    assert result.exit_code == 2
    assert "wanted FILE:FIELD:COUNT" in " ".join(result.output.split())

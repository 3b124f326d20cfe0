"""The benchmark of certificates keeps one for each draft, and ends as the worst of them."""

import json
from dataclasses import replace

import certificates
import pytest
import record
from typer import Typer
from typer.testing import CliRunner

from cpuspec.evaluate.certify import certify
from tools.make_tiny_model import make_tiny_gguf

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Certifies drafts for a tiny model; returns the result and what was saved. change: of a certificate."""
    monkeypatch.setattr(record, "read_bandwidth", lambda threads: 1e9 * threads)
    model, path = make_tiny_gguf(tmp_path / "tiny.gguf", **SMALL), tmp_path / "certificates.json"
    app = Typer()
    app.command()(certificates.main)

    def run(*drafts, change=lambda found: found):
        def certified(*arguments, **settings):
            return change(certify(*arguments, backend="numpy", **settings))

        monkeypatch.setattr(certificates, "certify", certified)
        options = [part for draft in drafts for part in ("--draft", draft)]
        sizes = ["--tokens", "6", "--samples", "60", "--threads", "1", "--json", str(path)]
        result = CliRunner().invoke(app, [str(model), *options, *sizes])
        return result, json.loads(path.read_text("utf-8")) if path.exists() else None

    return run


def test_every_draft_has_its_certificate(run):
    result, saved = run("ngram", "suffix:tree")
    assert result.exit_code == 0, result.output
    assert [(one["spec"], one["passed"], one["control_rejected"]) for one in saved["certificates"]] == [
        ("ngram", True, True),
        ("suffix:tree", True, True),
    ]
    assert saved["files"][0]["name"] == "tiny.gguf"


def test_a_certificate_that_is_refused_is_told_and_kept(run):
    def refuse_ngram(found):
        return replace(found, sampled=found.control) if found.spec == "ngram" else found

    result, saved = run("ngram", "suffix", change=refuse_ngram)
    assert result.exit_code == 1
    assert "ngram: NOT CERTIFIED" in result.output
    assert [one["passed"] for one in saved["certificates"]] == [False, True]


def test_a_draft_that_is_none_is_refused_before_any_is_certified(run):
    result, saved = run("ngram", "psychic")
    assert result.exit_code == 2
    assert saved is None

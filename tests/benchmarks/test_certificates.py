"""The benchmark of certificates keeps one for each draft, and ends as the worst of them."""

from dataclasses import replace

import certificates
import pytest

from cpuspec.evaluate.certify import certify
from tests.backends.models import SMALL
from tools.make_tiny_model import make_tiny_gguf


@pytest.fixture
def certified(run, tmp_path, monkeypatch):
    """Certifies drafts for a tiny model; returns the result and what was saved. change: of a certificate."""
    model = make_tiny_gguf(tmp_path / "tiny.gguf", **SMALL)

    def certified(*drafts, change=lambda found: found):
        monkeypatch.setattr(certificates, "certify", lambda *rest, **more: change(certify(*rest, backend="numpy", **more)))
        options = [part for draft in drafts for part in ("--draft", draft)]
        return run(certificates.main, model, *options, "--tokens", "6", "--samples", "60", "--threads", "1")

    return certified


def test_every_draft_has_its_certificate(certified):
    result, saved = certified("ngram", "suffix:tree")
    assert result.exit_code == 0, result.output
    assert [(one["spec"], one["passed"], one["control_rejected"]) for one in saved["certificates"]] == [
        ("ngram", True, True),
        ("suffix:tree", True, True),
    ]
    assert saved["files"][0]["name"] == "tiny.gguf"


def test_a_certificate_that_is_refused_is_told_and_kept(certified):
    def refuse_ngram(found):
        return replace(found, sampled=found.control) if found.spec == "ngram" else found

    result, saved = certified("ngram", "suffix", change=refuse_ngram)
    assert result.exit_code == 1
    assert "ngram: NOT CERTIFIED" in result.output
    assert [one["passed"] for one in saved["certificates"]] == [False, True]

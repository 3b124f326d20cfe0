"""The benchmark of two prompts at once measures both, alone and together."""

import json

import beside
import record
from typer import Typer
from typer.testing import CliRunner

from tools.make_tiny_model import make_tiny_gguf


def test_every_round_but_the_first_has_its_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "read_bandwidth", lambda threads: 1e9 * threads)
    app = Typer()
    app.command()(beside.main)
    model, path = make_tiny_gguf(tmp_path / "tiny.gguf", context_length=1024, vocab_size=300), tmp_path / "beside.json"
    options = ("--rounds", "2", "--long-tokens", "500", "--threads", "1")
    result = CliRunner().invoke(app, [str(model), *options, "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text("utf-8"))["figures"]
    assert {name: len(one["rounds"]) for name, one in figures.items()} == {beside.DELAY: 2, beside.LONG_OVER: 2}

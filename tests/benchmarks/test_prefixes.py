"""The benchmark of the prefix cache measures each turn of a session, warm, fresh and after a restart."""

import json

import prefixes
import record
from typer import Typer
from typer.testing import CliRunner

from tools.make_tiny_model import make_tiny_gguf


def test_every_turn_from_the_second_on_has_its_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "read_bandwidth", lambda threads: 1e9 * threads)
    app = Typer()
    app.command()(prefixes.main)
    model, path = make_tiny_gguf(tmp_path / "tiny.gguf", context_length=4096, vocab_size=300), tmp_path / "prefixes.json"
    options = ("--turns", "4", "--system-tokens", "300", "--fresh-every", "2", "--threads", "1")
    result = CliRunner().invoke(app, [str(model), *options, "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text("utf-8"))["figures"]
    rounds = {(name, engine): len(one["rounds"]) for name, of in figures.items() for engine, one in of.items()}
    kinds = (prefixes.CACHED, prefixes.FRESH, prefixes.RESTARTED)
    assert rounds == {
        (name, kind): 3 if (name, kind) == (prefixes.TTFT, prefixes.CACHED) else 2 for name in figures for kind in kinds
    }
    assert set(figures[prefixes.OVER][prefixes.FRESH]["rounds"]) == {1.0}

"""The benchmark of interleaving measures a prompt beside streams, for each number of rows."""

import json

import interleaving
import record
from typer import Typer
from typer.testing import CliRunner

from tools.make_tiny_model import make_tiny_gguf


def test_every_number_of_rows_has_its_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "read_bandwidth", lambda threads: 1e9 * threads)
    seen = []
    monkeypatch.setattr(interleaving, "first_token_s", lambda *of: seen.append(original(*of)) or seen[-1])
    app = Typer()
    app.command()(interleaving.main)
    model, path = make_tiny_gguf(tmp_path / "tiny.gguf", context_length=256), tmp_path / "interleaving.json"
    options = ("--prompt-rows", "8", "--prompt-rows", "16", "--prompt-tokens", "100", "--rounds", "2", "--threads", "1")
    result = CliRunner().invoke(app, [str(model), *options, "--json", str(path)])
    assert result.exit_code == 0, result.output
    result = json.loads(path.read_text("utf-8"))
    assert (result["prompt_tokens"], list(result["by_rows"])) == (100, ["8 rows", "16 rows"])
    assert all(len(one["rounds"]) == 2 and one["min"] > 0 for of in result["by_rows"].values() for one in of.values())
    # Alone the prompt takes one step; beside streams 100 / 8 and 100 / 16 of them, rows in turns from round to round.
    assert [len(steps) for _, steps in seen] == [1, 13, 1, 7, 1, 7, 1, 13]


original = interleaving.first_token_s

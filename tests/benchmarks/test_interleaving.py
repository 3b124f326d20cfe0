"""The benchmark of interleaving measures a prompt beside streams, for each number of rows."""

import interleaving

from tools.make_tiny_model import make_tiny_gguf


def test_every_number_of_rows_has_its_figures(measured, tmp_path, monkeypatch):
    seen, original = [], interleaving.first_token_s
    monkeypatch.setattr(interleaving, "first_token_s", lambda *of: seen.append(original(*of)) or seen[-1])
    model = make_tiny_gguf(tmp_path / "tiny.gguf", context_length=256)
    options = ("--prompt-rows", "8", "--prompt-rows", "16", "--prompt-tokens", "100", "--rounds", "2", "--threads", "1")
    saved, _ = measured(interleaving.main, model, *options)
    assert (saved["prompt_tokens"], list(saved["by_rows"])) == (100, ["8 rows", "16 rows"])
    assert all(len(one["rounds"]) == 2 and one["min"] > 0 for of in saved["by_rows"].values() for one in of.values())
    # Alone the prompt takes one step; beside streams 100 / 8 and 100 / 16 of them, rows in turns from round to round.
    assert [len(steps) for _, steps in seen] == [1, 13, 1, 7, 1, 7, 1, 13]

"""The benchmark of the prefix cache measures each turn of a session, warm, fresh and after a restart."""

import prefixes

from tools.make_tiny_model import make_tiny_gguf


def test_every_turn_from_the_second_on_has_its_figures(measured, tmp_path):
    model = make_tiny_gguf(tmp_path / "tiny.gguf", context_length=4096, vocab_size=300)
    saved, _ = measured(prefixes.main, model, "--turns", "4", "--system-tokens", "300", "--fresh-every", "2", "--threads", "1")
    figures, kinds = saved["figures"], (prefixes.CACHED, prefixes.FRESH, prefixes.RESTARTED)
    rounds = {(name, engine): len(one["rounds"]) for name, of in figures.items() for engine, one in of.items()}
    assert rounds == {
        (name, kind): 3 if (name, kind) == (prefixes.TTFT, prefixes.CACHED) else 2 for name in figures for kind in kinds
    }
    assert set(figures[prefixes.OVER][prefixes.FRESH]["rounds"]) == {1.0}

"""The benchmark of two prompts at once measures both, alone and together."""

import beside

from tools.make_tiny_model import make_tiny_gguf


def test_every_round_but_the_first_has_its_figures(measured, tmp_path):
    model = make_tiny_gguf(tmp_path / "tiny.gguf", context_length=1024, vocab_size=300)
    saved, _ = measured(beside.main, model, "--rounds", "2", "--long-tokens", "500", "--threads", "1")
    rounds = {name: len(one["rounds"]) for name, one in saved["figures"].items()}
    assert rounds == {beside.DELAY: 2, beside.LONG_OVER: 2}

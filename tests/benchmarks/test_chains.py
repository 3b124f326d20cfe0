"""The benchmark of drafts compares every arm with plain decoding on every prompt, and says when an id differs."""

import chains
import numpy as np
import pytest
from chains_peers import Answer, peer_table, summarize_peers

from cpuspec import LLM
from cpuspec.checkpoints import open_checkpoint
from cpuspec.formats import FORMATS, get_format
from cpuspec.metrics import LevelCounters
from tests.backends.models import SMALL
from tools.make_tiny_model import make_tiny_gguf

BRIEF = ("--max-tokens", "12", "--threads", "1")


@pytest.fixture(autouse=True)
def use(monkeypatch):
    """Makes the benchmark use a class of engines, on the backend that needs no compiling; at first LLM."""

    def use(engine):
        monkeypatch.setattr(chains, "LLM", lambda checkpoint, spec, **settings: engine(checkpoint, spec, "numpy", **settings))

    use(LLM)
    return use


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", tied=False, **SMALL)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"text": "one two one two"}\n{"text": "three four"}\n', "utf-8")
    return path


def test_every_arm_answers_every_prompt_as_plain_decoding_does(measured, model, prompts):
    options = ("--arm", "ngram", "--arm", "ngram,self:q4_0", "--no-auto", "--random-words", "1")
    saved, result = measured(chains.main, model, f"{prompts}:text:2", f"{prompts}:text:1:chat", *options, *BRIEF)
    specs = ["none", "ngram", "ngram,self:q4_0"]
    assert {name: list(arms) for name, arms in saved["sets"].items()} == dict.fromkeys(
        ["tasks", "tasks:chat", "random words"], specs
    )
    assert [(one["set"], one["prompt"], list(one["arms"])) for one in saved["prompts"]] == [
        ("tasks", 0, specs),
        ("tasks", 1, specs),
        ("tasks:chat", 0, specs),
        ("random words", 0, specs),
    ]
    for arms in saved["sets"].values():
        assert all(one["num_identical"] == one["num_prompts"] for one in arms.values())
        assert (arms["none"]["over_plain"], arms["none"]["tokens_per_forward"], arms["none"]["levels"]) == (1, 1, {})
        level = arms["ngram,self:q4_0"]["levels"]["self:q4_0"]
        assert level["num_accepted_tokens"] == sum(level["num_accepted_tokens_per_pos"]) > 0
        assert arms["ngram,self:q4_0"]["tokens_per_forward"] > 1
        low, high = arms["ngram"]["over_plain_interval"]
        assert low <= arms["ngram"]["over_plain"] * 1.000001
        assert high >= arms["ngram"]["over_plain"] * 0.999999
    assert "| ngram,self:q4_0 |" in result.output


def test_an_arm_with_another_id_fails(run, model, prompts, use):
    class Wrong(LLM):
        def generate(self, prompts, params=None):
            answers = super().generate(prompts, params)
            if self.spec.levels:
                answers[0].token_ids[-1] += 1
            return answers

    use(Wrong)
    result, _ = run(chains.main, model, f"{prompts}:text:1", "--arm", "ngram", "--no-auto", *BRIEF)
    assert result.exit_code == 1
    assert "0 of 1" in result.output


def test_a_target_in_bf16_has_every_matrix_in_bf16_with_the_values_of_the_file(model):
    checkpoint = open_checkpoint(model)
    cast = chains.dequantized(checkpoint, get_format("bf16"))
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) == 2:
            assert cast.tensors[name].format is FORMATS["bf16"]
            np.testing.assert_allclose(cast.tensors[name].dequantize(), tensor.dequantize(), rtol=2**-8)
        else:
            assert cast.tensors[name] is tensor
    assert {"embed", "output"} <= cast.tensors.keys()


def drafts(num_drafts, num_draft_tokens, *per_pos):
    counts = {"num_drafts": num_drafts, "num_draft_tokens": num_draft_tokens, "num_accepted_tokens": sum(per_pos)}
    return LevelCounters(**counts, num_accepted_tokens_per_pos=list(per_pos))


def test_ratios_are_of_each_prompt_and_against_the_same_engine():
    answers = {
        "llama.cpp: none": [Answer([1, 2], 10, 1.0), Answer([3, 4], 10, 2.0)],
        "llama.cpp: ngram-mod": [Answer([1, 2], 10, 0.5, drafts(3, 9, 2, 1)), Answer([3, 5], 10, 1.0, drafts(5, 5, 2))],
        "transformers: none": [Answer([9], 10, 10.0), Answer([9], 10, 10.0)],
        "transformers: lookup 10": [Answer([9], 10, 5.0), Answer([9], 10, 20.0)],
    }
    summary = summarize_peers(answers, [20.0, 40.0])
    mod, lookup = summary["llama.cpp: ngram-mod"], summary["transformers: lookup 10"]
    assert summary["llama.cpp: none"]["over_plain"] == pytest.approx(1)
    assert (mod["over_plain"], mod["over_plain_interval"]) == (pytest.approx(2), pytest.approx([2, 2]))
    assert mod["tokens_per_s"] == pytest.approx((20 * 10) ** 0.5)
    assert (mod["num_identical"], mod["num_prompts"], mod["num_tokens"]) == (1, 2, 4)
    assert mod["cpuspec_over"] == pytest.approx(2)  # 20 / 20 and 40 / 10
    assert mod["cpuspec_over_interval"] == pytest.approx([1, 4])
    assert mod["drafts"].items() >= {"num_drafts": 8, "num_draft_tokens": 14, "num_accepted_tokens_per_pos": [4, 1]}.items()
    assert lookup["over_plain"] == pytest.approx(1)
    assert lookup["over_plain_interval"] == pytest.approx([0.5, 2])
    assert lookup["num_identical"] == 2
    shown = peer_table(summary, "auto")
    assert "| llama.cpp: ngram-mod | 14.1 | 2.00x | 2.00 to 2.00 | 1 of 2 | 2.00x | 1.00 to 4.00 | 0.500 0.125 |" in shown
    assert "cpuspec auto over the peer" in shown

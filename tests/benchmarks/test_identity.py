"""The benchmark of identity: it runs every kind of drafter in every way, and a token that differs is seen."""

import json

import identity
import pytest

from cpuspec.engine.draft_spec import BY_TEXT, LOOKUPS, OWN_WEIGHTS, check_spec
from cpuspec.engine.llm import LLM
from cpuspec.settings import SpecConfig
from tools.make_tiny_model import make_tiny_gguf


@pytest.fixture
def compared(run, tmp_path, monkeypatch):
    """Compares answers of a tiny model, with few drafts; returns the result and what was saved."""
    monkeypatch.setattr(identity, "DRAFTS", ("ngram", "OTHER@2,self:q8_0@3", "text:OTHER"))
    models = [make_tiny_gguf(tmp_path / f"{size}.gguf", vocab_size=size) for size in (384, 300)]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"the cat {n} the cat"}) + "\n" for n in range(3)), "utf-8")

    def compared(*more, draft_model=models[1]):
        arguments = (f"{texts}:text:3", "--draft-model", draft_model, "--max-tokens", "6", *more)
        return run(identity.main, models[0], *arguments)

    return compared


def test_every_kind_of_drafter_has_its_turn_with_one_thread_and_with_two():
    arms = identity.make_arms("smollm2-135m-instruct", in_turn=False)
    for arm in arms:
        check_spec(SpecConfig.parse(arm.draft))
    parts = {part for arm in arms for level in SpecConfig.parse(arm.draft).levels for part in (level, *level.then)}
    assert {part.name for part in parts} == {*LOOKUPS, *OWN_WEIGHTS, BY_TEXT, "auto", "smollm2-135m-instruct"}
    assert {len(SpecConfig.parse(arm.draft).levels) for arm in arms} >= {0, 1, 2, 3, 4}
    drafts = {arm.draft for arm in arms}
    assert {(arm.draft, arm.threads) for arm in arms} == {(draft, threads) for draft in drafts for threads in (1, 2)}
    in_turn = identity.make_arms("smollm2-135m-instruct", in_turn=True)
    assert {arm.draft for arm in in_turn} == drafts
    assert set(in_turn) < set(arms)
    assert {arm.threads for arm in in_turn if arm.draft != "none"} == {1, 2}
    alone = identity.make_arms(None, in_turn=False)
    assert set(alone) == {arm for arm in arms if "smollm2" not in arm.draft}


def test_every_arm_is_compared_and_saved(compared):
    result, saved = compared()
    assert result.exit_code == 0, result.output
    assert len({arm["arm"] for arm in saved["arms"]}) == len(saved["arms"]) == 3 + 3 * 2
    assert all(arm["identical_prompts"] == saved["prompts"] == 3 for arm in saved["arms"])
    assert all(arm["num_draft_tokens"] for arm in saved["arms"][-4:])
    assert saved["tokens"] == 18


def test_a_token_that_differs_is_seen(compared, monkeypatch):
    class Wrong(LLM):
        def generate(self, prompts, params=None):
            answers = super().generate(prompts, params)
            if "text:" in str(self.spec):
                answers[-1].token_ids[3] += 1
            return answers

    monkeypatch.setattr(identity, "LLM", Wrong)
    result, saved = compared("--in-turn")
    assert result.exit_code == 1
    assert [arm["identical_prompts"] for arm in saved["arms"]] == [3, 3, 3, 3, 3, 2]

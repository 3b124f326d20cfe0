"""Prefixes of models with layers of every kind: recurrent ones, and windows whose last rows alone are kept.

No answer depends on which snapshots of their states were there, and from where.

The faults that were reported of other engines' caches of such states, beside draft heads or without, are tests by name.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec.engine.llm import LLM, Completion
from cpuspec.errors import ConfigError
from cpuspec.settings import SamplingParams, SpecConfig
from cpuspec.speculation.draft import Draft
from tests.backends.models import RECURRENT, every_backend
from tests.conformance.harness import shown
from tools.make_tiny_model import make_tiny_gguf

_DELTA = {"num_layers": 5, "rope_dims": 8, "shared_size": 32, "expert_size": 64, "predicts": True}
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    **RECURRENT,
    **{family: {"architecture": family, **_SMALL, **_DELTA} for family in ("qwen35", "qwen35moe", "qwen3next")},
    "windows": {"architecture": "gemma3", **_SMALL, "num_layers": 3, "window": 40},  # whose last rows are their states
}
PREDICTING = [name for name, options in FAMILIES.items() if options.get("predicts")]
DENSE = {
    "qwen2": {"architecture": "qwen2", **_SMALL, "num_layers": 3, "predicts": True},
    "draft": {**_SMALL, "num_layers": 1, "seed": 1},
}
HOW = {
    "greedy": SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0),
    "sampled": SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0, temperature=1.0, seed=7),
}

Open = Callable[..., LLM]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def model(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp("model") / "tiny.gguf"
            made[family] = make_tiny_gguf(path, weight_format="q8_0", context_length=640, **(FAMILIES | DENSE)[family])
        return made[family]

    return model


@pytest.fixture
def opened(models: Callable[[str], Path]) -> Iterator[Open]:
    llms = []

    def load(family: str, spec: str | SpecConfig = "none", **settings: Any) -> LLM:
        spec = spec.replace("DRAFT", str(models("draft"))) if isinstance(spec, str) else spec
        llms.append(
            LLM(models(family), spec, **{"threads": 1, "max_sequences": 3, "max_rows": 64, "keep_packed": False, **settings})
        )
        return llms[-1]

    yield load
    for llm in llms:
        llm.close()


def text(size: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, size).tolist()  # type: ignore[no-any-return]


SYSTEM, QUESTION = text(150, 1), text(60, 2)
FIRST = [*SYSTEM, *QUESTION]
# The second turn of a chat that dropped the first answer's thinking, another question, the first again, and a third turn.
PROMPTS = [FIRST, [*FIRST, *text(40, 3)], [*SYSTEM[:140], *text(50, 4)], FIRST, [*FIRST, *text(40, 3), *text(45, 5)]]


def cached(answers: list[Completion]) -> list[int]:
    return [answer.stats.num_cached_tokens for answer in answers]


def one_by_one(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
    return [llm.generate([prompt], params)[0] for prompt in prompts]


def test_a_tree_that_one_request_asks_for_ends_no_other(opened: Open) -> None:
    """Neither one of look-ups nor one of a user's class."""

    class Trees:
        name = "trees"

        def propose(self, seqs: list[Any], limits: list[int]) -> list[Draft]:
            """Two tokens of which either may come next, for the prompt that asks for it."""
            asked = [seq.tokens[0] == 5 and limit > 1 for seq, limit in zip(seqs, limits, strict=True)]
            tree = Draft(np.array([5, 6], np.int32), np.array([-1, -1], np.int32), self.name)
            return [tree if one else Draft.chain([], self.name) for one in asked]

    prompt = [5, 6, 7, 5, 6, 8, 5, 6]
    for how, drafts, message in (
        ({"spec": "ngram"}, {"draft": "ngram:tree"}, "this target has, read one path alone; leave out tree"),
        ({"spec": SpecConfig(proposer=Trees())}, {}, "trees drafted a tree, and recurrent layers read one path alone"),
    ):
        llm = opened("lfm2", **how)
        other = llm.stream(text(20, 1), HOW["greedy"])
        next(other)
        with pytest.raises(ConfigError, match=message):
            llm.generate([prompt], max_tokens=4, **drafts)
        assert list(other)[-1].finish_reason == "length"


def test_a_draft_model_with_recurrent_layers_verifies_no_trees(opened: Open, models: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"suffix:tree drafts trees, and recurrent layers, as .*tiny.gguf has, read one path"):
        opened("qwen2", f"suffix:tree,{models('lfm2')}@3")
    prompt = [*text(30, 1), *text(30, 1), *text(25, 1)]
    plain = one_by_one(opened("qwen2"), [prompt], HOW["greedy"])
    for spec in (f"auto,{models('lfm2')}", f"suffix,{models('lfm2')}@3", f"suffix:tree,DRAFT+{models('lfm2')}"):
        assert shown(one_by_one(opened("qwen2", spec, plain_on_draft_error=False), [prompt], HOW["greedy"])) == shown(plain)


CASES = [("lfm2", "none"), ("qwen35", "none")]
CASES += [(family, "ngram") for family in FAMILIES] + [(family, "mtp@3") for family in (*PREDICTING, "qwen2")]
CASES += [("qwen2", spec) for spec in ("none", "auto", "self:mxfp4", "suffix,DRAFT@3")] + [("windows", "self:mxfp4")]


@pytest.mark.parametrize(("family", "spec"), CASES)
def test_an_answer_is_that_of_a_model_without_a_prefix_store(opened: Open, tmp_path: Path, family: str, spec: str) -> None:
    plain = opened(family, prefix_cache_gb=0)
    expected = {how: one_by_one(plain, PROMPTS, params) for how, params in HOW.items()}
    assert not any(cached(expected["greedy"]))
    room = plain.context.cache.bytes_of(2 * len(FIRST)) / 1e9
    for name, gb in {"memory": 1.0, "a tight memory": 4 * room, "the disk": 0.0}.items():
        directory = str(tmp_path / name)
        for start in ("first", "after a restart"):
            llm = opened(family, spec, prefix_cache_gb=gb, prefix_cache_dir=directory)
            for how, params in HOW.items():
                alone, together = one_by_one(llm, PROMPTS, params), llm.generate(PROMPTS[::-1], params)[::-1]
                assert shown(alone) == shown(expected[how]), f"one after the other, {name}, {start}, {how}"
                assert shown(together) == shown(expected[how]), f"together, {name}, {start}, {how}"
                if name == "memory":
                    wanted = (
                        [0, len(FIRST), 0, len(FIRST), len(PROMPTS[1])]
                        if start == "first" and how == "greedy"
                        else [len(FIRST)] * 2
                    )
                    assert all(got >= most - 2 for got, most in zip(cached(alone), wanted, strict=False))
            for stats in llm.prefix_stats():
                assert stats.limit_bytes is not None
                assert stats.kept_bytes <= stats.limit_bytes
                assert stats.num_blocks_refused == 0
            llm.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_one_prompt_read_it_once(opened: Open, family: str) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=0, temperature=1.0, seed=5, n=4)
    expected = opened(family, prefix_cache_gb=0).generate([FIRST], params)[0].outputs
    answers = opened(family, prefix_cache_gb=1.0).generate([FIRST], params)[0].outputs
    assert shown(answers) == shown(expected)
    assert cached(answers)[0] == 0
    assert min(cached(answers)[1:]) > len(FIRST) - 32  # fewer tokens are not waited for


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_was_given_up_in_its_midst_is_gone_on_with(opened: Open, family: str) -> None:
    params = HOW["greedy"]
    expected = opened(family, prefix_cache_gb=0).generate([FIRST], params)
    llm = opened(family, prefix_cache_gb=1.0)
    number = llm.engine.add_request(FIRST, params)
    llm.engine.step()
    output = llm.engine.abort(number)
    assert output
    assert output.finish_reason == "aborted"
    (answer,) = llm.generate([FIRST], params)
    assert shown([answer]) == shown(expected)
    assert answer.stats.num_cached_tokens == 64  # a forward's rows


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_is_saved_and_restored_with_its_states(opened: Open, tmp_path: Path, family: str) -> None:
    params, llm, other = HOW["greedy"], opened(family, prefix_cache_gb=1.0), opened(family, prefix_cache_gb=1.0)
    expected = one_by_one(llm, PROMPTS[:2], params)
    length = llm.save_prefix(FIRST, tmp_path / "saved")
    assert len(FIRST) - 1 <= length <= len(FIRST)
    assert other.restore_prefix(tmp_path / "saved") == length
    answers = one_by_one(other, PROMPTS[:2], params)
    assert shown(answers) == shown(expected)
    assert cached(answers) == [len(FIRST) - 1, len(FIRST)]


@every_backend(["numpy", "torch"])
def test_other_backends_go_on_from_snapshots_where_a_memory_is_given(opened: Open, name: str) -> None:
    params = HOW["greedy"]
    plain, llm = (opened("qwen35", backend=name, prefix_cache_gb=gb) for gb in (0, 1.0))
    answers = one_by_one(llm, PROMPTS[:2], params)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in one_by_one(plain, PROMPTS[:2], params)]
    assert cached(answers) == [0, len(FIRST)]
    (again,) = llm.generate([[*SYSTEM, *QUESTION, *text(40, 8)]], params)
    assert again.stats.num_cached_tokens == len(FIRST) - 1


def test_prompts_that_begin_alike_go_on_from_where_they_part(opened: Open) -> None:
    """Nothing tells where a system prompt ends but that a second prompt leaves the first one there."""
    llm = opened("granitehybrid", prefix_cache_gb=1.0, max_sequences=1)
    prompts = [[*SYSTEM, *text(70, seed)] for seed in range(10, 13)]
    assert cached(one_by_one(llm, prompts, HOW["greedy"])) == [0, 0, len(SYSTEM)]


@pytest.mark.parametrize("family", ["lfm2", "mamba2", "qwen35"])
def test_a_chat_that_drops_thinking_reads_only_the_new_part(opened: Open, family: str) -> None:
    def said(role: str, words: str) -> dict[str, str]:
        return {"role": role, "content": words}

    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0)
    messages = [said("system", "the cat sat on the mat " * 20), said("user", "write a poem about memory")]
    llm, plain = opened(family, prefix_cache_gb=1.0), opened(family, prefix_cache_gb=0)
    begins, known = llm.tokenizer.token_id("<|im_start|>"), 0
    for _ in range(3):
        answer, prompt = llm.chat(messages, params), llm.tokenizer.encode_chat(messages)
        assert shown([answer]) == shown([plain.chat(messages, params)])
        assert answer.stats.num_cached_tokens == known, "all up to where the last answer began"
        known = max(at for at, token_id in enumerate(prompt) if token_id == begins)
        messages += [said("assistant", "a list of words"), said("user", "and the answer in one line " * 3)]
    edited = [*messages[:-3], said("user", "def main return import " * 5)]
    users = [at for at, token_id in enumerate(llm.tokenizer.encode_chat(messages[:-2])) if token_id == begins]
    answer = llm.chat(edited, params)
    assert shown([answer]) == shown([plain.chat(edited, params)])
    assert users[-2] - 32 < answer.stats.num_cached_tokens <= users[-2], "about all up to the message that was edited"


# ---------------------------------------------------------------------------------------------- faults of others, by their reports


def test_vllm_51250_prompts_of_any_length_are_found_again_not_those_alone_that_fill_blocks(opened: Open) -> None:
    llm = opened("qwen35", prefix_cache_gb=1.0)
    for size in (40, 101, 255, 256, 257, 300, 511, 512):
        prompt = text(size, size)
        found = cached(one_by_one(llm, [prompt, [*prompt, 5], [*prompt, *text(40, 1)], [*prompt, 6]], SamplingParams(max_tokens=1)))
        assert found[0] == 0
        assert min(found[1:]) >= size - 1


def test_llama_cpp_22746_drafts_that_are_rejected_at_the_end_do_not_force_a_prompt_to_be_read_again(
    opened: Open, prompt_arithmetic: str
) -> None:
    llm = opened("qwen35", "ngram@8", prefix_cache_gb=1.0)
    prompt = [*text(20, 1) * 6]  # of which drafts are made
    (answer,) = llm.generate([prompt], max_tokens=30, ignore_eos=True)
    assert answer.stats.num_draft_tokens > answer.stats.num_accepted_tokens
    (later,) = llm.generate([[*prompt, *answer.token_ids, 7, 8]], max_tokens=1)
    kept = len(prompt) + (len(answer.token_ids) if prompt_arithmetic == "codes" else 0)  # the answer is read again as a prompt's
    assert later.stats.num_cached_tokens >= kept - 1


@pytest.mark.parametrize("damage", ["the states of other tokens", "a length off by one"])
# Where "windows" begins anew, its slot still has all rows.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "windows"])
def test_vllm_43559_a_state_that_is_not_that_of_its_key_would_be_seen(opened: Open, family: str, damage: str) -> None:
    """The negative control of every comparison above."""
    params, plain, llm = HOW["greedy"], opened(family, prefix_cache_gb=0), opened(family, prefix_cache_gb=1.0)
    llm.generate([FIRST, text(len(FIRST), 9)], max_tokens=60, ignore_eos=True)
    cache, later = llm.context.cache, [*FIRST, *text(20, 5)]
    right, wrong = sorted(filter(cache.snapshots, range(3)), key=lambda slot: llm.context.slots._all[slot].tokens[:5] != FIRST[:5])
    length = len(FIRST) - 1
    taken = cache.snapshots(right).pop(length)
    if damage == "a length off by one":
        cache.snapshots(right)[length - 1] = taken
        later = [*FIRST[: length - 1], *text(20, 5)]
    else:
        cache.snapshots(right)[length] = cache.snapshots(wrong)[length]
        if cache.lengths[right] == length:  # where only prompts are kept, the slot's memory has these states, too
            cache.restore_snapshot(right, length, cache.snapshots(wrong)[length])
        later = [*FIRST[:length], *text(20, 5)]
    (answer,) = llm.generate([later], params)
    assert answer.stats.num_cached_tokens >= length - 1
    assert shown([answer]) != shown(plain.generate([later], params))


# --------------------------------------------------------------------------------------------------------------- heads after a hit


@pytest.mark.parametrize("family", [*PREDICTING, "qwen2"])
def test_a_head_has_the_same_rows_after_a_hit_as_after_reading(opened: Open, tmp_path: Path, family: str) -> None:
    later = PROMPTS[1]

    def rows(llm: LLM) -> tuple[int, np.ndarray]:
        """How many tokens a later turn has from the cache, and the head's keys and values of it."""
        head: Any = llm.drafts[0].context
        stream, is_there = llm.stream(later, SamplingParams(max_tokens=300, ignore_eos=True)), False
        while not is_there:  # a head drafts when its rows are there, and nobody waits for its disk
            output = next(stream)
            time.sleep(0.01)
            is_there = any(slot.positions for slot in head.slots.taken.values())
        (slot,) = head.slots.taken.values()
        assert slot.positions[: len(later) - 1] == list(range(len(later) - 1))
        stream.close()
        return output.num_cached_tokens, head.cache.read_block(slot.number, 0, (len(later) - 1) // 16 * 16)

    num_cached, expected = rows(opened(family, "mtp@3", prefix_cache_gb=1.0))
    assert not num_cached
    for gb in (1.0, 0.001):
        directory = str(tmp_path / str(gb))
        llm = opened(family, "mtp@3", prefix_cache_gb=gb, prefix_cache_dir=directory)
        llm.generate([FIRST], SamplingParams(max_tokens=4, ignore_eos=True))
        llm.close()
        llm = opened(family, "mtp@3", prefix_cache_gb=gb, prefix_cache_dir=directory)
        for _ in range(2):
            num_cached, got = rows(llm)
            assert num_cached >= len(FIRST) - 2
            assert np.array_equal(got, expected)

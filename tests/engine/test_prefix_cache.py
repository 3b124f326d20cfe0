"""The prefix cache over the real kernels: no answer depends on what was there already, wherever that came from."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cpuspec.engine.llm import LLM
from cpuspec.errors import CacheError, ConfigError
from cpuspec.settings import SamplingParams
from cpuspec.speculation import slots as slots_module
from tests.backends.models import every_backend
from tests.conformance.harness import shown

PARAMS = {
    "greedy": SamplingParams(max_tokens=10, ignore_eos=True, logprobs=0),
    "sampled": SamplingParams(max_tokens=10, ignore_eos=True, logprobs=0, temperature=1.0, seed=7),
}


def conversations() -> list[list[int]]:
    """Prompts that begin alike: turns of two conversations over one system prompt, and another."""
    rng = np.random.default_rng(5)

    def text(size: int) -> list[int]:
        return rng.integers(3, 300, size).tolist()  # type: ignore[no-any-return]

    system, other = text(300), text(90)
    first = [*system, *text(40)]
    second = [*first, *text(25)]
    return [first, [*system[:270], *text(60)], second, [*other, *text(50)], [*second, *text(30)], [*other, *other, 5]]


def test_a_running_answer_goes_on_while_a_long_prefix_is_copied(
    opened: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = np.random.default_rng(6).integers(3, 300, 900).tolist()
    with opened() as fresh:
        (expected,) = fresh.generate([[*prompt, 5]], PARAMS["greedy"])
    monkeypatch.setattr(slots_module, "_COPIED_BYTES", 0)  # a block in a step
    with opened() as llm:
        first = llm.engine.add_request(prompt, SamplingParams(max_tokens=100, ignore_eos=True, logprobs=0))
        while not llm.engine.step():
            pass
        second, told, tokens = llm.engine.add_request([*prompt, 5], PARAMS["greedy"]), list[bool](), list[int]()
        while len(tokens) < 10:
            outputs = {output.request_id: output for output in llm.engine.step()}
            told.append(first in outputs)
            tokens += outputs[second].token_ids if second in outputs else []
            if second in outputs and len(tokens) == 1:
                assert outputs[second].num_cached_tokens == len(prompt)
        assert len(told) == 10 + 900 // 256
        assert all(told)
        assert tokens == expected.token_ids


def test_outputs_and_totals_say_how_much_was_cached(opened: Callable[..., LLM]) -> None:
    llm, (first, _, second, *_) = opened(prefix_cache_gb=0.01), conversations()
    assert [output.num_cached_tokens for output in llm.stream(first, max_tokens=3, ignore_eos=True)] == [0, 0, 0]
    assert {output.num_cached_tokens for output in llm.stream(second, max_tokens=3, ignore_eos=True)} == {len(first)}
    (stats,) = llm.prefix_stats()
    assert (stats.name, stats.num_prompt_tokens, stats.num_cached_tokens) == ("target", len(first) + len(second), len(first))
    assert stats.kept_bytes > 0
    llm.forget_prefixes()
    assert llm.prefix_stats()[0].kept_bytes == 0
    assert llm.generate([second], max_tokens=1)[0].stats.num_cached_tokens == 0


def test_models_of_a_chain_share_the_memory(opened: Callable[..., LLM]) -> None:
    draft, target = opened("DRAFT", prefix_cache_gb=0.003).prefix_stats()
    assert (draft.limit_bytes, target.limit_bytes) == (1_000_000, 2_000_000)  # of one layer, and of two


@pytest.mark.parametrize("kv_format", ["f16", "int4"])
def test_a_prefix_is_saved_and_restored(opened: Callable[..., LLM], models: Path, tmp_path: Path, kv_format: str) -> None:
    first, *_, last = conversations()
    llm = opened(kv_format=kv_format)
    expected = llm.generate([first], PARAMS["greedy"])
    assert llm.save_prefix(first, tmp_path / "saved") == 340
    with pytest.raises(CacheError, match="nothing to save; run the prompt first"):
        llm.save_prefix(last, tmp_path / "other")
    with pytest.raises(CacheError, match=r"gone.* cannot be written: No such file or directory"):
        llm.save_prefix(first, tmp_path / "gone" / "saved")
    other = opened(kv_format=kv_format)
    assert other.restore_prefix(tmp_path / "saved") == 340
    answers = other.generate([first], PARAMS["greedy"])
    assert shown(answers) == shown(expected)
    assert answers[0].stats.num_cached_tokens == 339  # the last one is fed
    for wrong in ({"kv_format": "int8"}, {"model": "windows"}, {"spec": "none", "context_length": 300}):
        with pytest.raises(CacheError, match=r"another model, KV format, processor or version|raise context_length"):
            opened(**wrong).restore_prefix(tmp_path / "saved")


@every_backend(["numpy", "torch"])
def test_a_backend_that_promises_no_row_invariance_reuses_nothing_unless_told_to(
    opened: Callable[..., LLM], name: str, tmp_path: Path
) -> None:
    first, *_ = conversations()
    for settings, cached in (({}, 0), ({"prefix_cache_gb": 1}, len(first))):
        llm = opened(backend=name, **settings)
        answers = [llm.generate([prompt], max_tokens=2)[0] for prompt in (first, [*first, 5])]
        assert [answer.stats.num_cached_tokens for answer in answers] == [0, cached]
    with pytest.raises(CacheError, match=f"the {name} backend keeps no keys and values outside of running requests"):
        llm.save_prefix(first, tmp_path / "saved")


@pytest.mark.parametrize("word", ["none", ""])
def test_no_directory_keeps_prompts_where_the_setting_says_none(
    opened: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    first, *_ = conversations()
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with opened(prefix_cache_dir=word, prefix_cache_gb=1e-5) as llm:
            assert llm.generate([first], max_tokens=2)[0].stats.num_cached_tokens == 0
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_fails_the_start(opened: Callable[..., LLM], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the prefix cache .*file/below cannot be used: Not a directory"):
        opened(prefix_cache_dir=str(tmp_path / "file" / "below"))

"""Tokens of prompts in bf16: their place in a sequence decides, and no answer depends on anything else."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cpuspec.backends import Backend, has_prompt_arithmetic, make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.engine.llm import LLM
from cpuspec.errors import BackendError, CacheError
from cpuspec.kernels import isa
from cpuspec.model.batch import ForwardBatch
from cpuspec.settings import EngineConfig, SamplingParams
from tests.conformance.harness import check_ways, shown
from tests.engine.conftest import SMALL
from tools.make_tiny_model import make_tiny_gguf

needs_bf16 = pytest.mark.skipif(not isa.has_bf16_dots(), reason="this processor does not multiply bf16")

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0)


@pytest.fixture
def opened(opened: Callable[..., LLM]) -> Callable[..., LLM]:
    """Opens LLMs whose prompts are computed in bf16, and closes them."""
    return partial(opened, max_sequences=4, prompt_arithmetic="bf16")


def prompts() -> list[list[int]]:
    """Prompts of 1 to 200 tokens; the last repeats itself, so that lookups draft."""
    rng = np.random.default_rng(5)
    return [*(rng.integers(3, 300, size).tolist() for size in (1, 2, 17, 90, 200)), rng.integers(3, 300, 12).tolist() * 6]


def fed(backend: Backend, tokens: list[int], of_prompts: bool) -> np.ndarray:
    """All logits of a text in one forward."""
    cache, places = backend.new_cache(1, len(tokens)), list(range(len(tokens)))
    return backend.forward(ForwardBatch(tokens, places, [0], [0, len(tokens)], of_prompts=of_prompts), cache).logits


@needs_bf16
@pytest.mark.parametrize("model", ["plain", "windows"])
def test_an_answer_is_the_same_whatever_chunks_threads_batch_mates_and_drafts(models: Path, model: str) -> None:
    specs = ("ngram", "suffix:tree", "auto", "self:mxfp4@3", f"suffix,{models / 'draft.gguf'}@3")
    ways = [("none", {"max_rows": 7, "prompt_rows": 3}), ("none", {"threads": 3}), ("none", {"prefix_cache_gb": 0})]
    ways += [(spec, {"max_rows": 20} if number % 2 else {}) for number, spec in enumerate(specs)]
    usual = EngineConfig(threads=1, max_sequences=4, prompt_arithmetic="bf16", keep_packed=False)
    check_ways(open_checkpoint(models / f"{model}.gguf"), ways, prompts(), [GREEDY] * len(prompts()), usual)


@needs_bf16
@pytest.mark.parametrize("spec", ["none", "suffix", "self:mxfp4@3"])
@pytest.mark.parametrize("model", ["plain", "windows"])
def test_the_next_turn_has_the_bits_of_a_fresh_run(opened: Callable[..., LLM], tmp_path: Path, spec: str, model: str) -> None:
    text, more = prompts()[-2:]
    first = opened(spec, model).generate([text], GREEDY)[0]
    turn = [*text, *first.token_ids, *more]
    expected = shown(opened(spec, model).generate([turn], GREEDY))
    for settings in ({}, {"prefix_cache_gb": 1e-5, "prefix_cache_dir": str(tmp_path / "prefixes")}):
        llm = opened(spec, model, **settings)
        llm.generate([text], GREEDY)
        answers = llm.generate([turn], GREEDY)
        assert shown(answers) == expected
        assert len(text) - 16 <= answers[0].stats.num_cached_tokens <= len(text), "the prompt is reused, and no answer"
    llm.close()
    assert shown(opened(spec, model, **settings).generate([turn], GREEDY)) == expected, "from the disk"


@needs_bf16
def test_a_prompt_that_runs_into_a_running_answer_takes_its_prompt_alone(opened: Callable[..., LLM]) -> None:
    llm, text = opened(), prompts()[-2]
    running = llm.stream(text, max_tokens=100, ignore_eos=True)
    tokens: list[int] = []
    while len(tokens) < 60:
        tokens += next(running).token_ids
    answer = llm.generate([[*text, *tokens]], GREEDY)[0]
    assert shown([answer]) == shown(opened().generate([[*text, *tokens]], GREEDY))
    assert answer.stats.num_cached_tokens == len(text)
    running.close()


@needs_bf16
def test_keys_and_values_of_another_arithmetic_are_refused(opened: Callable[..., LLM], tmp_path: Path) -> None:
    llm, text = opened(), prompts()[-2]
    answers = llm.generate([text], GREEDY)
    length = llm.save_prefix([*text, *answers[0].token_ids], tmp_path / "saved")
    assert length == len(text)
    assert opened().restore_prefix(tmp_path / "saved") == length
    with pytest.raises(CacheError, match="another model, KV format, processor or version"):
        opened(prompt_arithmetic="codes").restore_prefix(tmp_path / "saved")


@needs_bf16
@pytest.mark.parametrize("weight_format", ["q4_0", "q4_k", "q6_k", "q8_0"])
def test_prompts_in_bf16_are_as_near_to_the_weights_of_the_file_as_codes(tmp_path: Path, weight_format: str) -> None:
    size = {**SMALL, "hidden_size": 256, "intermediate_size": 512}
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", weight_format=weight_format, num_layers=2, **size))
    text = prompts()[-2][:64]
    made = {name: make_backend(name, checkpoint, EngineConfig(threads=1)) for name in ("numba", "numpy")}
    wanted = fed(made["numpy"], text, False)
    errors = {of_prompts: np.abs(fed(made["numba"], text, of_prompts) - wanted).mean() for of_prompts in (False, True)}
    assert 0 < errors[True] < 1.5 * errors[False]
    assert errors[True] < 0.1 * np.abs(np.roll(wanted, 1, axis=0) - wanted).mean()


@needs_bf16
@pytest.mark.parametrize("weight_format", ["f16", "bf16"])
def test_weights_that_are_numbers_keep_their_arithmetic(tmp_path: Path, weight_format: str) -> None:
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", weight_format=weight_format, num_layers=2, **SMALL))
    backend = make_backend("numba", checkpoint, EngineConfig(threads=1, prompt_arithmetic="bf16", kv_format="bf16"))
    for token in prompts()[-2][:10]:  # alone: attention gives its value
        assert np.array_equal(fed(backend, [token], True), fed(backend, [token], False))


def test_codes_compute_prompts_as_other_tokens(models: Path) -> None:
    checkpoint = open_checkpoint(models / "plain.gguf")
    backend, text = make_backend("numba", checkpoint, EngineConfig(threads=1, prompt_arithmetic="codes")), prompts()[-2][:40]
    assert not has_prompt_arithmetic(backend)
    assert np.array_equal(fed(backend, text, True), fed(backend, text, False))
    auto = make_backend("numba", checkpoint, EngineConfig(threads=1))
    assert has_prompt_arithmetic(auto) == isa.has_bf16_tiles()
    assert np.array_equal(fed(auto, text, True), fed(auto, text, False)) != isa.has_bf16_tiles()


def test_bf16_is_refused_without_products_of_bf16(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "has_bf16_dots", lambda: False)
    with pytest.raises(BackendError, match=r"prompt_arithmetic bf16 needs a processor with products of bf16 .* leave it at auto"):
        make_backend("numba", open_checkpoint(models / "plain.gguf"), EngineConfig(threads=1, prompt_arithmetic="bf16"))


@needs_bf16
@pytest.mark.parametrize(  # each kind of layer, and caches of numbers and of codes; each pair would compile a kernel of its own
    ("architecture", "kv_format"), [("gemma2", "f16"), ("gemma3", "int4"), ("qwen2", "f16"), ("qwen3", "int4")]
)
def test_attention_over_prompts_has_windows_caps_and_biases(tmp_path: Path, architecture: str, kv_format: str) -> None:
    size = {**SMALL, "num_layers": 2} | ({"window": 24} if architecture.startswith("gemma") else {})
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", architecture, weight_format="f32", **size))
    text, engine = prompts()[-2], EngineConfig(threads=1, kv_format=kv_format)
    numba = make_backend("numba", checkpoint, replace(engine, prompt_arithmetic="bf16"))
    wanted = fed(make_backend("numpy", checkpoint, engine), text, False)
    errors = np.abs(fed(numba, text, True) - wanted).mean(axis=1)
    assert 0 < errors.mean() < 0.02 * np.abs(np.roll(wanted, 1, axis=0) - wanted).mean()
    assert errors.max() < 0.1 * np.abs(wanted).mean()

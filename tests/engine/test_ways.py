"""Models of unusual layers answer the same however they are run: drafts, threads, batches, chunks of prompts, joins, kept prefixes.

`python -m tests.engine.test_ways 100` asks so many prompts, instead of a few, and prints what it compared; models may be named.
"""

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from cpuspec.backends.numba_backend import NumbaBackend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.engine.llm import LLM
from cpuspec.errors import ConfigError
from cpuspec.model.batch import ForwardBatch, ForwardOutput
from cpuspec.model.cache import KVCache
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.speculation.context import Context
from tests.backends.models import GEMMA4, LATENT, MIXTURES, RECURRENT, SMALL, in_gguf
from tests.conformance.harness import check_ways
from tests.conformance.knowing import Knowing
from tests.engine.test_mixtures import FAMILIES
from tools.make_tiny_model import make_tiny_gguf

SETTINGS = EngineConfig(context_length=128, max_rows=64, keep_packed=False, prefix_cache_gb=0)
PREDICTS = ("qwen35", "qwen35moe", "qwen3next", "deepseek2")
MODELS = {**RECURRENT, **GEMMA4, "gemma4-moe": {**MIXTURES["gemma4-moe"], "num_layers": 4}}
MODELS |= {name: {**LATENT[name], "num_layers": 3} for name in ("deepseek2", "deepseek_v2", "mistral4")}
MODELS |= FAMILIES | {name: in_gguf(name) | {"num_layers": 3} for name in MIXTURES if name not in (*MODELS, "qwen3moe")}
# Of long contexts windows keep their last rows alone. Prompts of these models begin with one of two texts of so many tokens.
LONG = {"windows": 600, "gpt-oss": 640}
MODELS["windows"] = {"architecture": "gemma3", **SMALL, "num_layers": 3, "window": 40}
MODELS["gpt-oss"] = {"architecture": "gpt-oss", **SMALL, "num_layers": 3, "window": 100}

# Who drafts, threads, sequences at once, and other settings.
WAYS = [
    ("none", 2, 9, {"prompt_rows": 7}), ("none", 3, 4, {}), ("ngram", 1, 1, {}), ("ngram@7", 2, 9, {}), ("suffix", 3, 2, {}),
    ("suffix@12", 2, 5, {"prompt_rows": 1}), ("auto", 2, 6, {}), ("self:mxfp4", 1, 1, {}), ("self:mxfp4@6", 2, 9, {}),
    ("self:mxfp4@3+ngram@4", 2, 4, {}), ("ngram,self:mxfp4@12", 3, 3, {}), ("skip:1@4", 2, 8, {}), ("suffix,skip:1@3", 1, 7, {}),
    ("ngram", 2, 9, {"prefix_cache_gb": 1}),
]  # fmt: skip
OWN_WAYS = [(f"mtp@{number}", number % 3 + 1, 10 - number, {}) for number in range(1, 7)] + [("ngram@2+mtp@2", 2, 4, {})]
TREE_WAYS = [("suffix:tree", 2, 5, {"prompt_rows": 3}), ("ngram:tree@7", 1, 3, {})]  # of targets that read more than one path


def _prompts(count: int) -> list[list[int]]:
    """Some repeat what they began with, and some begin alike."""
    rng, found = np.random.default_rng(0), list[list[int]]()
    for number in range(count):
        words = rng.integers(0, 300, rng.integers(1, 30)).tolist()
        found.append((words[:5] * 7, words, (found or [words])[-1][:12] + words[:4])[number % 3])
    return found


def check_model(checkpoint: Checkpoint, num_prompts: int, predicts: bool, part: slice = slice(None), num_before: int = 0) -> int:
    """Half of the answers are greedy and half have a seed; they have different lengths. Returns how many were compared.

    part: of the ways. num_before: tokens before those of each prompt.
    """
    before = np.random.default_rng(1).integers(0, 300, (2, num_before)).tolist()
    prompts = [[*before[number % 2], *prompt] for number, prompt in enumerate(_prompts(num_prompts))]
    # A draft model reads long prompts in a few rounds.
    usual = replace(SETTINGS, context_length=128 + 2 * num_before, **{"prompt_rows": 256, "max_rows": 256} if num_before else {})
    params = [SamplingParams(max_tokens=8 + number % 9, ignore_eos=True, logprobs=0) for number in range(num_prompts)]
    params[1::2] = [replace(one, temperature=0.8, seed=number) for number, one in enumerate(params[1::2])]
    recurs, owned = checkpoint.config.is_recurrent, checkpoint.config.layer_owners
    named = [*WAYS, *(OWN_WAYS if predicts else []), *([] if recurs else TREE_WAYS)][part]
    named = [way for way in named if not (owned and "skip" in way[0])]  # layers that would be left out are read by others
    ways = [(spec, {"threads": threads, "max_sequences": most, **others}) for spec, threads, most, others in named]
    kept = {"threads": 2, "max_sequences": 4, "prefix_cache_dir": str(checkpoint.path.parent / "prefixes")}
    ways += 2 * [("ngram@3", {**kept, "prefix_cache_gb": gigabytes}) for gigabytes in (0, 1)]  # on the disk alone, and in memory
    assert not num_before or any(checkpoint.config.layer_windows)
    compared = check_ways(checkpoint, ways, prompts, params, usual)
    if recurs:
        with pytest.raises(ConfigError, match="tree"):
            LLM(checkpoint, "suffix:tree", settings=SETTINGS)
    return compared


def _checkpoint(directory: Path, model: str) -> Checkpoint:
    options = MODELS[model] | {"predicts": True, "num_layers": 5} if model in PREDICTS else MODELS[model]
    options = options | {"context_length": 2048} if model in LONG else options
    return open_checkpoint(make_tiny_gguf(directory / "tiny.gguf", **{"weight_format": "q8_0", **options}))


@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("model", [name for name in MODELS if name != "gpt-oss"])  # which is like the other one with windows
def test_answers_are_those_of_plain_decoding_in_every_way(tmp_path: Path, model: str, part: int) -> None:
    """A sixth of the ways."""
    before = LONG.get(model, 0)
    check_model(_checkpoint(tmp_path, model), 4 if before else 8, model in PREDICTS, slice(part, None, 6), before)


@pytest.mark.parametrize("model", ["windows", "gemma4-moe", "deepseek2"])
def test_steps_that_run_at_once_change_no_answer_and_no_figure(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[7], *_prompts(2)]  # the only token of the first may have a prompt's arithmetic, and what follows has not
    params = [SamplingParams(max_tokens=20 + number, ignore_eos=True) for number in range(3)]
    num_calls: list[int] = []
    forward = NumbaBackend.forward

    def counted(self: NumbaBackend, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        num_calls[-1] += 1
        return forward(self, batch, cache)

    def answers(llm: LLM, most: int) -> list[tuple[Any, ...]]:
        monkeypatch.setattr(Context, "most_extra_steps", lambda *_: most)
        num_calls.append(0)
        found = [answer for one in (prompts[:1], prompts) for answer in llm.generate(one, params[: len(one)])]
        told = [answer.stats for answer in found]
        facts = [(one.num_forwards, one.num_forwards_saved, one.num_new_tokens, one.weight_bytes) for one in told]
        return [(one.token_ids, one.text, one.finish_reason, one.stop_reason, *of) for one, of in zip(found, facts, strict=True)]

    monkeypatch.setattr(NumbaBackend, "forward", counted)
    with LLM(_checkpoint(tmp_path, model), "none", settings=replace(SETTINGS, threads=2, max_sequences=3)) as llm:
        answers(llm, 0)  # later prompts find what this one left
        wanted = answers(llm, 0)
        assert [answers(llm, most) for most in (3, 31)] == [wanted] * 2
        alone, few, many = num_calls[1:]
        assert many < few < alone / 2
        params = [
            replace(one, stop_token_ids=(max(ids, key=ids.index),)) for one, (ids, *_) in zip(params, wanted[1:], strict=True)
        ]
        ended = answers(llm, 0)
        assert any(one[2] == "stop" for one in ended)
        assert [answers(llm, most) for most in (3, 31)] == [ended] * 2


@pytest.fixture(scope="module", params=PREDICTS)
def predicting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return _checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_omlx_3370_exact_drafted_tokens_are_never_refused_at_a_temperature(
    predicting: Checkpoint, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Its negative control: tokens one beside them are refused, all of them."""
    prompts = [[*prompt, number] for number, prompt in enumerate(_prompts(9))]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=temperature, seed=seed) for seed in range(9)]
    with LLM(predicting, "none", settings=SETTINGS) as llm:
        answers = [answer.token_ids for answer in llm.generate(prompts, params)]
    monkeypatch.setattr(Knowing, "answers", dict(zip(map(tuple, prompts), answers, strict=True)))
    for added in (0, 1):
        monkeypatch.setattr(Knowing, "added", added)
        with LLM(predicting, "tests.conformance.knowing:Knowing@5", settings=SETTINGS) as llm:
            assert [answer.token_ids for answer in llm.generate(prompts, params)] == answers
            (level,) = llm.levels.values()
            assert level.num_draft_tokens > 9
            assert level.num_accepted_tokens == (0 if added else level.num_draft_tokens)


def test_ollama_18541_a_layer_that_is_never_right_soon_drafts_no_more(predicting: Checkpoint) -> None:
    """Where it is right, `auto` chooses it: `test_heads.test_auto_weighs_the_layer_of_the_file`."""
    params = SamplingParams(max_tokens=96, ignore_eos=True, temperature=1.5, seed=1)
    with LLM(predicting, "auto", settings=replace(SETTINGS, max_sequences=1)) as llm:
        llm.generate([[5, 6, 7]], params)
        assert sum(level.num_draft_tokens for level in llm.levels.values()) < 32


if __name__ == "__main__":
    for name in sys.argv[2:] or MODELS:
        with TemporaryDirectory() as place:
            count = check_model(_checkpoint(Path(place), name), int(sys.argv[1]), name in PREDICTS, num_before=LONG.get(name, 0))
            print(name, count, "answers are the same")

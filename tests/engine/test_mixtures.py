"""Families with operations of their own in the engine: drafts, threads and company change no answer."""

from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.config import RopeScaling
from tests.backends.models import MIXTURES, in_gguf
from tools.make_tiny_model import make_tiny_gguf

SPECS = ("ngram@4", "suffix:tree@8", "self:mxfp4@4", "skip:1@3", "ngram,self:q4_0@4", "auto", "auto,self:mxfp4@4")
PROMPTS = ("the cat sat on the mat and the", "a list of words", "return return the", "x")


MODELS: dict[str, dict[str, Any]] = {
    "a mixture": {"architecture": "qwen3moe", "num_experts": 12, "num_used": 3},
    "sinks, windows, biases of experts": {"architecture": "gpt-oss", "weight_format": "mxfp4", "num_experts": 12},
    "layer norms, no gate": {"architecture": "starcoder2"},
    "parallel branches, windows": {"architecture": "cohere2", "num_layers": 3},
    "norms behind a rotation": {"architecture": "hunyuan_v1_dense"},
    "queries that grow": {"architecture": "ministral3", "context_length": 512},
    "LongRoPE of a part of a head": {
        "architecture": "phi3",
        "rope_dims": 48,
        "rope_scaling": RopeScaling(
            "longrope", original_context_length=64, attention_factor=1.2, factors=(3.0,) * 24, short_factors=(1.5,) * 24
        ),
    },
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(make_tiny_gguf(path, **{"weight_format": "q8_0", "num_layers": 2, **MODELS[request.param]}))


def answers(model: str, spec: str, params: SamplingParams, together: bool, **settings: int) -> list[list[int]]:
    with LLM(model, spec=spec, **settings) as llm:
        if together:
            return [one.token_ids for one in llm.generate(list(PROMPTS), params)]
        return [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_threads_and_batches_change_no_answer(model: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=5)
    wanted = answers(model, "none", params, together=False, threads=1)
    assert len({tuple(ids) for ids in wanted}) == len(PROMPTS)
    for number, spec in enumerate(SPECS):
        assert answers(model, spec, params, together=number % 2 == 0, threads=1 + number % 2) == wanted, spec


@pytest.mark.parametrize("family", [name for name in MIXTURES if name != "qwen3moe"])
def test_drafts_change_no_answer_of_any_family(tmp_path: Path, family: str) -> None:
    path = str(make_tiny_gguf(tmp_path / "tiny.gguf", weight_format="q8_0", **in_gguf(family)))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    wanted = answers(path, "none", params, together=False, threads=1)
    assert len({tuple(ids) for ids in wanted}) > 1
    for spec in ("ngram@4", "self:mxfp4@4"):
        assert answers(path, spec, params, together=True, threads=2) == wanted, spec

"""The promises, on the real checkpoints: run with `python -m pytest -m real_model` (fetches 1.2 GB once, needs 10 GB of memory)."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.download import fetch
from cpuspec.checkpoints.recipes import Recipe, load_recipes
from cpuspec.engine.llm import LLM
from cpuspec.evaluate.quality import compare_backends
from cpuspec.formats.packing import pack, unpack
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.text import make_tokenizer

pytestmark = pytest.mark.real_model

TEXT = (
    "The Roman bridge at Chaves was built at the turn of the second century, and twelve of its arches are still visible. "
    "It carried the road from Bracara Augusta to Asturica Augusta across the river, and two columns at its middle give the names "
    "of the emperors under whom it was made and of the ten peoples who paid for it. Floods have taken the parapets more than once. "
) * 4
REQUESTS = [
    "Write a function that returns the n-th Fibonacci number.",
    "Repeat this sentence twice: the quick brown fox jumps over the lazy dog.",
    "Which city is the capital of France, and what is it known for?",
]


@pytest.fixture(scope="module", params=sorted(name for name, recipe in load_recipes().items() if recipe.golden))
def recipe(request) -> Recipe:  # type: ignore[no-untyped-def]
    return load_recipes()[request.param]


@pytest.fixture(scope="module")
def checkpoint(recipe: Recipe) -> Checkpoint:
    return open_checkpoint(fetch(recipe))


@pytest.fixture(scope="module")
def plain_and_ngram(checkpoint: Checkpoint) -> Iterator[tuple[LLM, LLM]]:
    with LLM(checkpoint, "none", threads=2) as plain, LLM(checkpoint, "ngram", threads=1) as ngram:
        yield plain, ngram


@pytest.fixture(scope="module")
def chain(checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(checkpoint, "ngram,skip:4@2,self:mxfp4@6", threads=2) as llm:
        yield llm


def test_the_file_opens_with_the_recipes_architecture(recipe: Recipe, checkpoint: Checkpoint) -> None:
    assert checkpoint.config.architecture == recipe.architecture


def test_packed_weights_give_back_the_files_bytes(checkpoint: Checkpoint) -> None:
    seen = set()
    for tensor in checkpoint.tensors.values():
        if len(tensor.shape) == 2 and tensor.format.name not in seen:
            seen.add(tensor.format.name)
            assert np.array_equal(unpack(pack(tensor)).data, tensor.data)
    assert seen


def test_greedy_continuations_are_the_recorded_ones(recipe: Recipe, plain_and_ngram: tuple[LLM, LLM]) -> None:
    assert recipe.golden
    for golden in recipe.golden:
        [answer] = plain_and_ngram[0].generate(golden.prompt, SamplingParams(max_tokens=len(golden.token_ids), ignore_eos=True))
        assert tuple(answer.token_ids) == tuple(golden.token_ids)


def _prompt(checkpoint: Checkpoint, request: str) -> str | list[int]:
    """A chat's prompt; of a base model, the text to go on with."""
    tokenizer = make_tokenizer(checkpoint)
    return tokenizer.encode_chat([{"role": "user", "content": request}]) if tokenizer.has_chat_template else request


def test_drafts_and_threads_never_change_a_greedy_answer(
    checkpoint: Checkpoint, plain_and_ngram: tuple[LLM, LLM], chain: LLM
) -> None:
    plain, ngram = plain_and_ngram
    params = SamplingParams(max_tokens=64)
    accepted: Counter[str] = Counter()
    for request in REQUESTS:
        prompt = _prompt(checkpoint, request)
        [wanted] = plain.generate(prompt, params)
        for drafting in (ngram, chain):
            [got] = drafting.generate(prompt, params)
            assert got.token_ids == wanted.token_ids
            accepted.update({name: level.num_accepted_tokens for name, level in got.stats.levels.items()})
    assert set(+accepted) == {"ngram", "skip:4", "self:mxfp4"}


def test_seeded_samples_do_not_depend_on_company(plain_and_ngram: tuple[LLM, LLM]) -> None:
    plain, _ = plain_and_ngram
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(3)]
    together = plain.generate(REQUESTS, params)
    for request, one, answer in zip(REQUESTS, params, together, strict=True):
        assert plain.generate(request, one)[0].token_ids == answer.token_ids
    assert len({tuple(answer.token_ids) for answer in together}) == 3


GRAMMARS: list[dict[str, Any]] = [
    {
        "json_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}, "size": {"type": "integer", "minimum": 0, "maximum": 9999}},
            "required": ["city", "size"],
            "additionalProperties": False,
        }
    },
    {"regex": r"(The|A) [a-z ]{10,40}, [0-9]{4}\."},
    {"choices": ["definitely not", "definitely", "perhaps"]},
]


@pytest.mark.parametrize("settings", GRAMMARS, ids=lambda settings: next(iter(settings)))
def test_answers_keep_to_a_grammar_whatever_is_drafted(
    settings: dict[str, Any], checkpoint: Checkpoint, plain_and_ngram: tuple[LLM, LLM], chain: LLM
) -> None:
    plain, ngram = plain_and_ngram
    params = SamplingParams(max_tokens=80, **settings)
    for request in REQUESTS:
        prompt = _prompt(checkpoint, request)
        [answer] = plain.generate(prompt, replace(params, max_draft_tokens=0))
        for llm in (plain, ngram, chain):
            assert llm.generate(prompt, params)[0].token_ids == answer.token_ids
        assert answer.finish_reason == "stop"
        if "json_schema" in settings:
            found = json.loads(answer.text)
            assert (type(found["city"]), type(found["size"])) == (str, int)
        elif "regex" in settings:
            assert re.fullmatch(settings["regex"], answer.text)
        else:
            assert answer.text in settings["choices"]


def test_compiled_kernels_stay_close_to_the_dequantized_model(checkpoint: Checkpoint) -> None:
    ids = make_tokenizer(checkpoint).encode(TEXT)[:256]
    fast, reference = make_backend("numba", checkpoint, EngineConfig()), NumpyBackend(checkpoint, EngineConfig(kv_format="f32"))
    quality = compare_backends(reference, fast, ids)
    fast.close()
    assert quality.kl_mean < 2e-3
    assert abs(quality.perplexity_ratio - 1) < 5e-3
    assert quality.same_top > 0.97

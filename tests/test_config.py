"""Settings as Python programs make, keep, send and compare them."""

import copy
import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest

from cpuspec.errors import ConfigError
from cpuspec.settings import EngineConfig, LevelSpec, SamplingParams

FULL = SamplingParams(temperature=0.5, logit_bias={3: -1.5, 7: float("-inf")}, stop=("a", "b"), stop_token_ids=(4,), seed=9)


@pytest.mark.parametrize("params", [SamplingParams(), FULL])
def test_sampling_params_can_be_copied_pickled_hashed_and_shown(params: SamplingParams) -> None:
    assert params.keeps_order in (True, False)  # what is cached does not come in the way
    for other in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert other == params
        assert hash(other) == hash(params)
        assert other.keeps_order == params.keeps_order
    assert {params: 1}[copy.deepcopy(params)] == 1
    assert SamplingParams(**dataclasses.asdict(params)) == params
    assert json.dumps(dataclasses.asdict(params))
    assert eval(repr(params), {"SamplingParams": SamplingParams, "inf": float("inf")}) == params


def test_different_params_are_different() -> None:
    assert dataclasses.replace(FULL, logit_bias={3: -1.5}) != FULL
    assert len({FULL, SamplingParams(), dataclasses.replace(FULL, seed=8)}) == 3


def test_a_bias_does_not_change_with_the_dict_that_it_was_made_from() -> None:
    biases = {3: 1.0}
    params = SamplingParams(logit_bias=biases)
    biases[4] = 2.0
    assert params.logit_bias == {3: 1.0}
    with pytest.raises(TypeError, match="do not change"):
        params.logit_bias[4] = 2.0
    with pytest.raises(TypeError, match="do not change"):
        params.logit_bias.update({4: 2.0})


def test_none_is_nothing_where_there_can_be_several() -> None:
    assert SamplingParams(stop=None, logit_bias=None, stop_token_ids=None) == SamplingParams()


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        seed=np.uint8(3),
        max_tokens=np.int32(8),
        stop_token_ids=np.array([1, 2]),
        logit_bias={np.int64(3): np.float32(1.5)},
    )
    assert params == SamplingParams(0.5, 5, seed=3, max_tokens=8, stop_token_ids=(1, 2), logit_bias={3: 1.5})
    assert {type(params.top_k), type(params.seed), type(params.max_tokens)} == {int}
    assert type(params.temperature) is float
    assert EngineConfig(threads=np.int64(2)).threads == 2
    assert LevelSpec("ngram", np.int64(2), np.float32(0.5)) == LevelSpec("ngram", 2, 0.5)


_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_COUNTS = ("top_k", "seed", "max_tokens", "n", "logprobs", "max_draft_tokens")
_NONSENSE = (object(), b"", [None], [[1]], {"a": 1}, {1: "a"}, {1: None}, float("nan"), float("inf"), 3 + 4j)


def _impossible(field: str) -> list[Any]:
    """Values that this field of SamplingParams cannot have."""
    own = {
        "stop": ["", ["a", ""], 5],
        "stop_token_ids": ["12", 5, [2.5], {1: 2}],
        "logit_bias": [{-1: 1.0}, {2.5: 1.0}, {1: float("nan")}, {1: float("inf")}, [1]],
        "ignore_eos": [1, "yes", None],
    }
    nonsense = [value for value in _NONSENSE if (field, value) != ("json_schema", {"a": 1})]
    numbers = ["1", True, -(10**400)] if field in (*_NUMBERS, *_COUNTS) else []
    return [*nonsense, *numbers, *([2.5, -5] if field in _COUNTS else []), *own.get(field, [])]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SamplingParams)])
def test_a_value_that_cannot_be_is_a_clear_error_that_names_its_field(field: str) -> None:
    for value in _impossible(field):
        with pytest.raises(ConfigError, match=f"^{field} must be ") as caught:
            SamplingParams(**{field: value})
        assert len(str(caught.value)) < 250


# Values of fields of EngineConfig that can be: names that are looked up where they are known, gigabytes, and a directory.
_POSSIBLE = {"draft_vocab": [0], "kv_format": ["?" * 9], "device": ["?" * 9], "prefix_cache_dir": ["?" * 9]}
_POSSIBLE |= {"lora": ["?" * 9], "lora_modules": ["?" * 9], "quantization": ["?" * 9]}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(EngineConfig)])
def test_a_setting_of_the_engine_that_cannot_be_is_a_clear_error(field: str) -> None:
    possible = _POSSIBLE.get(field, [0, 2.5] if field.startswith("prefix_") else [])
    for value in (object(), [1], float("nan"), -1, 0, 2.5, "?" * 9):
        if value not in possible:
            with pytest.raises(ConfigError, match=f"{field} must be "):
                EngineConfig(**{field: value})

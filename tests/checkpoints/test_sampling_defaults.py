"""How a model's files and its recipe say that it should be sampled: read by the field, and never a reason to refuse a model."""

import json
import math
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.recipes import find_named
from cpuspec.errors import ConfigError
from cpuspec.settings import SAMPLING_FIELDS, SamplingDefaults
from tests.checkpoints.conftest import TINIEST
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

T = gguf.GGUFValueType


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("hf") / "model", **TINIEST)


def sampling(directory: Path, generation: object) -> SamplingDefaults:
    """The defaults of a Hugging Face directory with this generation_config.json."""
    text = generation if isinstance(generation, str) else json.dumps(generation)
    (directory / "generation_config.json").write_text(text, "utf-8")
    return open_checkpoint(directory).sampling


# -------------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [
        ({}, {}),
        ({"eos_token_id": 7}, {}),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
        ({"do_sample": True, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"temperature": None, "top_k": -1}, {"top_k": 0}),
    ],
)
def test_generation_config_json_is_read_as_transformers_and_vllm_do(directory: Path, generation: object, wanted: object) -> None:
    found = sampling(directory, generation)
    assert (found.fields(), found.ignored) == (wanted, ())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", [0.5]),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 2),
        ("top_k", 20.5),
        ("top_k", -2),
        ("min_p", {}),
        ("repetition_penalty", 0),
        ("do_sample", "yes"),
    ],
)
def test_a_value_of_no_use_is_ignored_and_told(directory: Path, field: str, value: object) -> None:
    found = sampling(directory, {"temperature": 0.5, "top_p": 0.9} | {field: value})
    assert found.fields() == {name: one for name, one in (("temperature", 0.5), ("top_p", 0.9)) if name != field}
    (told,) = found.ignored
    assert field in told
    assert "ignored" in told
    assert len(told) < 500


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"temperature": NaN}', "\xff"])
def test_a_generation_config_that_cannot_be_read_is_ignored_and_told(directory: Path, text: str) -> None:
    found = sampling(directory, text)
    assert found.fields() == {}
    assert len(found.ignored) == 1


def test_gguf_keys_are_those_of_gguf_py(tmp_path: Path, edited_gguf, small_gguf) -> None:
    keys = gguf.Keys.General
    values = {
        keys.SAMPLING_TEMP: (0.7, T.FLOAT32),
        keys.SAMPLING_TOP_K: (20, T.INT32),
        keys.SAMPLING_TOP_P: (0.8, T.FLOAT32),
        keys.SAMPLING_MIN_P: (0.05, T.FLOAT32),
        keys.SAMPLING_PENALTY_REPEAT: (1.1, T.FLOAT32),
    }
    found = open_checkpoint(edited_gguf(small_gguf(), set=values)).sampling
    wanted = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1}
    assert (found.fields(), found.ignored) == (wanted, ())
    assert set(wanted) == set(SAMPLING_FIELDS)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("temp", math.nan, T.FLOAT32),
        ("temp", "hot", T.STRING),
        ("top_k", [1, 2], T.ARRAY),
        ("top_p", True, T.BOOL),
        ("mirostat", 2, T.INT32),
    ],
)
def test_a_gguf_value_of_no_use_is_ignored_and_told(edited_gguf, small_gguf, key: str, value: object, kind: T) -> None:
    changed = {f"general.sampling.{key}": (np.array(value, np.int32).tolist() if kind == T.ARRAY else value, kind)}
    found = open_checkpoint(edited_gguf(small_gguf(), set=changed)).sampling
    assert found.fields() == {}
    assert len(found.ignored) == 1


# ------------------------------------------------------------------------------------------------------------------- recipes


RECIPE = """
name = "tiny"
description = "a test"
architecture = "qwen2"
parameters = 10
file = "tiny.gguf"
bytes = {size}
sha256 = "{sha256}"
licence = "MIT"
sources = [{{ kind = "huggingface", name = "hf:a/b/tiny.gguf" }}]
"""


def recipe_text(sampling: str, size: int = 1) -> str:
    return RECIPE.format(size=size, sha256="ab" * 32) + sampling


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        ("sampling = 3", "wanted a table"),
        ("[sampling]\nwarmth = 1", "wanted a table with some of temperature"),
        ("[sampling]\ntemperature = -1", "sampling: temperature must be"),
        ("[sampling]\ntop_p = nan", "sampling: top_p must be"),
        ('[sampling]\nignored = ["x"]', "wanted a table with some of temperature"),
    ],
)
def test_a_recipe_with_a_wrong_sampling_table_is_refused(tmp_path: Path, table: str, wanted: str) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(recipe_text(table))
    with pytest.raises(ConfigError, match=wanted):
        find_named(str(path))


def test_shipped_models_have_the_defaults_of_their_makers() -> None:
    wanted = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
    assert find_named("qwen2.5-coder-1.5b-instruct").sampling.fields() == wanted
    assert find_named("smollm2-135m-instruct").sampling.temperature


def test_the_file_goes_before_its_recipe_field_by_field_and_nothing_applies_it_by_itself(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    edited_gguf,
) -> None:
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    (tmp_path / "recipes").mkdir()
    source = make_tiny_gguf(tmp_path / "plain.gguf", **TINIEST)
    path = edited_gguf(source, set={"general.sampling.temp": (0.4, T.FLOAT32), "general.sampling.top_k": (-2, T.INT32)})
    os.replace(path, tmp_path / "tiny.gguf")
    table = "[sampling]\ntemperature = 0.9\ntop_p = 0.5\ntop_k = 30"
    (tmp_path / "recipes" / "tiny.toml").write_text(recipe_text(table, (tmp_path / "tiny.gguf").stat().st_size))
    with LLM(tmp_path / "tiny.gguf", backend="numpy") as llm:
        assert llm.default_sampling_params == SamplingParams(temperature=0.4, top_p=0.5, top_k=30)
        assert len(llm.sampling_defaults.ignored) == 1
        (unasked,), (greedy,) = llm.generate("hello"), llm.generate("hello", SamplingParams())
        assert unasked.token_ids == greedy.token_ids


# -------------------------------------------------------------------------------------------------------------------- settings


def test_what_is_given_goes_before_defaults_field_by_field() -> None:
    defaults = SamplingDefaults(temperature=0.7, top_k=20, repetition_penalty=1.1)
    assert defaults.under({}) == SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.1)
    assert defaults.under({"top_k": 0, "max_tokens": 3}) == SamplingParams(temperature=0.7, repetition_penalty=1.1, max_tokens=3)
    assert SamplingDefaults().under({"top_k": 5}) == SamplingParams(top_k=5)


def test_a_given_temperature_of_0_is_plain_greedy_decoding() -> None:
    defaults = SamplingDefaults(temperature=0.7, top_k=20, repetition_penalty=1.1)
    assert defaults.under({"temperature": 0}) == SamplingParams()
    assert defaults.under({"temperature": 0.0, "repetition_penalty": 1.2}) == SamplingParams(repetition_penalty=1.2)


def test_a_number_that_no_float_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match="temperature must be"):
        SamplingParams(temperature=10**400)
    with pytest.raises(ConfigError, match="logit_bias must be"):
        SamplingParams(logit_bias={1: 10**400})

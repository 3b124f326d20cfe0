"""Which tokens a draft model of frequent tokens drafts, and in how many bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.recipes import find_named, read_frequent_tokens
from cpuspec.engine.heads import draft_casts, model_of_frequent_tokens
from cpuspec.errors import ConfigError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.speculation.drafters.translate import TranslatedProposer
from cpuspec.text import make_tokenizer
from tests.conformance.harness import SMALL, check_ways, llm_over
from tools.make_tiny_model import make_tiny_gguf


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_gguf(tmp_path_factory.mktemp("target") / "target.gguf", **SMALL))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its embedding is its output matrix, too. It drafts much as the target does: it has the same weights."""
    return make_tiny_gguf(tmp_path_factory.mktemp("draft") / "draft.gguf", weight_format="q8_0", tied=True, **SMALL)


def test_rows_of_few_tokens_are_those_of_all_without_the_others(target: Checkpoint, smaller: Path) -> None:
    model = open_checkpoint(smaller)
    tokenizer = make_tokenizer(model)
    cut, ids = model_of_frequent_tokens(model, 20, tokenizer, [300, 5, 299], None)
    assert ids is not None
    assert ids.tolist() == sorted({300, 5, 299, *range(18), *tokenizer.eos_ids})
    assert cut.config.num_logits == len(ids)
    whole = model.tensors["embed"].dequantize()
    np.testing.assert_array_equal(cut.tensors["output"].dequantize(), whole[ids])
    _, known = model_of_frequent_tokens(model, 20, tokenizer, [], np.arange(7))
    assert known is not None
    assert known.tolist() == list(range(7))
    assert model_of_frequent_tokens(model, 0, tokenizer, [300], None) == (model, None)
    assert model_of_frequent_tokens(model, None, tokenizer, [300], None) == (model, None)  # a small vocabulary stays whole


@pytest.mark.parametrize("counted", [[], [69_999]])
def test_few_tokens_are_drafted_where_a_recipe_counts_them_or_the_output_is_most_of_the_model(
    smaller: Path, counted: list[int]
) -> None:
    model = open_checkpoint(smaller)
    few = QuantTensor.encode(get_format("f32"), np.zeros((70_000, model.config.hidden_size)))
    large = replace(model, config=replace(model.config, vocab_size=70_000), tensors={**model.tensors, "embed": few})
    _, ids = model_of_frequent_tokens(large, None, make_tokenizer(model), counted, None)
    assert ids is not None
    assert (69_999 in ids) == bool(counted)
    wide = QuantTensor.encode(get_format("f32"), np.zeros((80_000, 64)))
    deep = replace(
        large,
        config=replace(large.config, intermediate_size=80_000),
        tensors={**large.tensors, **{f"layers.{n}.{part}": wide for n in range(4) for part in ("gate", "up")}}
        | {f"layers.{n}.down": QuantTensor.encode(get_format("f32"), np.zeros((64, 80_000))) for n in range(4)},
    )
    _, ids = model_of_frequent_tokens(deep, None, make_tokenizer(model), counted, None)
    assert (ids is not None) == bool(counted)


def test_matrices_of_many_bits_are_cast_and_others_stay(smaller: Path) -> None:
    model = open_checkpoint(smaller)
    casts = draft_casts(model, "int4")
    assert "output" in casts  # the tied one
    assert "embed" not in casts
    assert {format.name for format in casts.values()} == {"nl4_g32"}
    assert not [name for name in casts if "norm" in name]
    assert draft_casts(model, "int8") == draft_casts(model, "file") == {}
    few = {name: QuantTensor.encode(get_format("q4_1"), one.dequantize()) for name, one in model.tensors.items() if name in casts}
    assert "layers.0.q" not in draft_casts(replace(model, tensors={**model.tensors, **few}), "int4")


def test_translated_drafts_of_few_tokens_have_shared_tokens_alone(target: Checkpoint, tmp_path: Path) -> None:
    other = make_tiny_gguf(tmp_path / "other.gguf", "llama", **{**SMALL, "vocab_size": 300})
    check_ways(target, [(f"{other}@3", {"draft_vocab": 200})])
    with llm_over(target, f"{other}@3", draft_vocab=200) as llm:
        guarded: Any = llm.engine._proposer
        drafter = guarded._inner.default
        assert isinstance(drafter, TranslatedProposer)
        ids = llm.drafts[0].context.token_ids  # type: ignore[attr-defined]
        assert set(ids) < set(drafter._shared.draft_ids)
        assert len(ids) < 210


RECIPE = """
name = "tiny"
description = "a test"
architecture = "qwen2"
parameters = 10
licence = "MIT"
frequent_tokens = "tiny.ids"

[[sources]]
kind = "huggingface"
name = "someone/tiny-GGUF:Q4_K_M"
"""


def test_a_recipe_counts_tokens_in_a_file_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    recipe = find_named(str(path))
    (tmp_path / "tiny.ids").write_text("5 300\n7\n")
    assert read_frequent_tokens(recipe, 301) == [5, 300, 7]
    assert read_frequent_tokens(None, 301) == []
    for text in ("", "5 301", "5 -1", "5 x", "9" * 5000):
        (tmp_path / "tiny.ids").write_text(text)
        with pytest.raises(ConfigError, match=r"frequent_tokens .*tiny\.ids: got .*wanted token ids from 0 to 300"):
            read_frequent_tokens(recipe, 301)
    (tmp_path / "tiny.ids").unlink()
    with pytest.raises(ConfigError, match=r"tiny\.ids"):
        read_frequent_tokens(recipe, 301)
    path.write_text(RECIPE.replace("tiny.ids", "../tiny.ids"))
    with pytest.raises(ConfigError, match="frequent_tokens is"):
        find_named(str(path))

"""Drafts made of the target's own weights are the models they say they are, and cost what they must."""

from dataclasses import replace

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.engine.own_weights import read_skipped, skip_layers, spread
from cpuspec.errors import ConfigError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.quantize.cast import cast, casts
from cpuspec.settings import EngineConfig
from tests.backends.models import GEMMA4, every_backend, forward, tiny
from tests.backends.test_sharing import SHARING

ENGINE = EngineConfig(threads=1, max_rows=16)
TOKENS = np.random.default_rng(1).integers(0, 300, 14).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Checkpoint:  # type: ignore[no-untyped-def]
    return tiny(tmp_path_factory, num_layers=5, o_bias=True, architecture="llama")


def _logits(backend):  # type: ignore[no-untyped-def]
    return forward(backend, backend.new_cache(1, 32), {0: TOKENS}).logits


def _silenced(checkpoint: Checkpoint, layers: tuple[int, ...]) -> Checkpoint:
    """With layers that add nothing to what passes through them."""
    tensors = dict(checkpoint.tensors)
    for name in [f"layers.{i}.{part}" for i in layers for part in ("o", "o_bias", "down")]:
        tensors[name] = QuantTensor(tensors[name].format, tensors[name].shape, np.zeros_like(tensors[name].data))
    return replace(checkpoint, tensors=tensors)


@every_backend()
@pytest.mark.parametrize("skipped", [(2,), (0, 3), (1, 2, 4)])
def test_a_skipped_layer_is_one_that_adds_nothing(model: Checkpoint, name: str, skipped: tuple[int, ...]) -> None:
    target = make_backend(name, model, ENGINE)
    draft = make_backend(name, skip_layers(model, skipped), ENGINE, target)
    wanted = _logits(make_backend(name, _silenced(model, skipped), ENGINE))
    assert np.array_equal(_logits(draft), wanted)
    assert not np.allclose(_logits(target), wanted, atol=1e-3)
    target.close()


@every_backend(SHARING)
def test_a_layer_skip_draft_has_a_smaller_cache_and_no_weights_of_its_own(model: Checkpoint, name: str) -> None:
    target = make_backend(name, model, ENGINE)
    draft = make_backend(name, skip_layers(model, (1, 3)), ENGINE, target)
    assert draft.shared_bytes == draft.weight_bytes
    assert draft.config.num_layers == 3
    assert draft.new_cache(1, 16).bytes_per_token * 5 == target.new_cache(1, 16).bytes_per_token * 3
    assert draft.weight_bytes < target.weight_bytes
    target.close()


@every_backend()
def test_a_self_cast_draft_is_the_model_with_cast_linear_layers(model: Checkpoint, name: str) -> None:
    target = make_backend(name, model, ENGINE)
    draft = make_backend(name, model, ENGINE, target, casts(model, get_format("mxfp4")))
    linears = {n: cast(t, get_format("mxfp4")) for n, t in model.tensors.items() if len(t.shape) == 2 and n != "embed"}
    wanted = _logits(make_backend(name, replace(model, tensors={**model.tensors, **linears}), ENGINE))
    assert np.array_equal(_logits(draft), wanted)
    assert not np.array_equal(_logits(target), wanted)
    target.close()


@pytest.mark.parametrize("num_layers", [2, 5, 28, 30])
def test_layers_to_skip_are_spread_and_leave_the_first(num_layers: int) -> None:
    for count in range(1, num_layers):
        skipped = spread(count, num_layers)
        assert len(set(skipped)) == count
        assert 0 < min(skipped) <= max(skipped) < num_layers
    assert spread(4, 28) == (5, 11, 16, 22)


def test_layers_are_read_by_number_or_by_name(model: Checkpoint) -> None:
    assert read_skipped("2", model) == spread(2, 5)
    assert read_skipped("4/0/2", model) == (0, 2, 4)


def test_so_many_layers_are_those_that_the_recipe_names(model: Checkpoint, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    recipe = f"""
name = "tiny"
description = "a test"
architecture = "llama"
parameters = 10
file = "{model.path.name}"
bytes = {model.path.stat().st_size}
sha256 = "{"ab" * 32}"
licence = "MIT"

[[sources]]
kind = "huggingface"
name = "hf:someone/tiny/{model.path.name}"

[layer_skip]
2 = [3, 1]
3 = [1, 2, 9]
"""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.toml").write_text(recipe)
    assert read_skipped("2", model) == (1, 3)
    assert read_skipped("1", model) == spread(1, 5)
    with pytest.raises(ConfigError, match="cannot skip layers 1/2/9 of 5"):
        read_skipped("3", model)


@pytest.mark.parametrize("text", ["", "0", "5", "-1", "1/1", "1/5", "0/1/2/3/4", "1/", "a", "1,2", "1/b", "²", "9" * 5000])
def test_what_names_no_layers_is_refused(model: Checkpoint, text: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot skip .* of 5"):
        read_skipped(text, model)


@pytest.mark.parametrize("skipped", [(5,), (-1,), (1, 1), range(5)])
def test_layers_that_are_not_there_cannot_be_skipped(model: Checkpoint, skipped) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="wanted different numbers from 0 to 4"):
        skip_layers(model, skipped)


def test_layers_that_remain_keep_their_windows_and_positions(tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    model = tiny(tmp_path_factory, architecture="gemma3", num_layers=5)
    config = skip_layers(model, (0, 3)).config
    assert (config.num_layers, config.layer_windows, config.layer_ropes) == (3, (0, 8, 8), ("global", "local", "local"))


def test_no_layer_is_skipped_where_layers_have_inputs_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigError, match="no layer can be skipped in a model whose layers have inputs of their own"):
        skip_layers(tiny(tmp_path_factory, **GEMMA4["gemma4, E"]), (1,))

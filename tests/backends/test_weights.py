"""A checkpoint's weights are loaded once for each tensor object, and a tied output or a cast is named in one place."""

from collections.abc import Mapping

import numpy as np
import pytest

from cpuspec.backends.weights import LoadedWeights, WeightTensor, weight_tensors
from cpuspec.checkpoints import Checkpoint
from cpuspec.formats import Cast, QuantTensor, get_format
from tests.backends.models import tiny


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    return tiny(tmp_path_factory, weight_format="q8_0", tied=request.param)


def dequantized(tensors: Mapping[str, WeightTensor]) -> dict[str, np.ndarray]:
    return {name: tensor.dequantize() for name, tensor in tensors.items()}


def tensor(seed: int) -> QuantTensor:
    return QuantTensor.encode(get_format("q8_0"), np.random.default_rng(seed).standard_normal((4, 32)))


def test_an_output_matrix_is_always_there_and_a_tied_one_is_the_embeddings_own_tensor(checkpoint: Checkpoint) -> None:
    tensors = weight_tensors(checkpoint, {})
    assert tensors == {"output": checkpoint.tensors["embed"], **checkpoint.tensors}
    assert (tensors["output"] is tensors["embed"]) == checkpoint.config.tied_embeddings


def test_only_named_tensors_are_cast_and_a_cast_output_leaves_the_embedding(checkpoint: Checkpoint) -> None:
    to = get_format("q4_0")
    tensors = weight_tensors(checkpoint, {"layers.0.q": to, "output": to})
    cast = {name: one.format for name, one in tensors.items() if isinstance(one, Cast)}
    assert cast == {"layers.0.q": to, "output": to}
    assert tensors["embed"] is checkpoint.tensors["embed"]


def test_only_tensor_objects_that_the_other_has_not_loaded_are_loaded() -> None:
    shared, ours = tensor(1), tensor(2)
    first = LoadedWeights({"a": shared, "b": tensor(3)}, dequantized)
    asked: list[str] = []

    def load(tensors: Mapping[str, WeightTensor]) -> dict[str, np.ndarray]:
        asked.extend(tensors)
        return dequantized(tensors)

    equal_copy = QuantTensor(shared.format, shared.shape, shared.data)
    second = LoadedWeights({"c": shared, "d": ours, "e": equal_copy}, load, first)
    assert asked == ["d", "e"]
    assert second["c"] is first["a"]
    assert list(second) == ["c", "d", "e"]
    assert (second.num_bytes, second.shared_bytes) == (3 * first["a"].nbytes, first["a"].nbytes)
    assert first.shared_bytes == 0


def test_a_model_made_beside_one_that_shares_hands_its_weights_on() -> None:
    one = tensor(4)
    first = LoadedWeights({"a": one}, dequantized)
    second = LoadedWeights({"b": one}, dequantized, first)
    assert LoadedWeights({"c": one}, dequantized, second)["c"] is first["a"]

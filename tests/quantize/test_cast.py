"""A cast is what the format makes of the values; what is not cast is shared."""

import numpy as np
import pytest

from cpuspec.checkpoints import Checkpoint
from cpuspec.errors import FormatError
from cpuspec.formats import FORMATS, QuantTensor, get_format
from cpuspec.kernels.encode import encode
from cpuspec.quantize.cast import cast, casts
from tests.backends.models import cast_checkpoint, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Checkpoint:  # type: ignore[no-untyped-def]
    return tiny(tmp_path_factory, weight_format="q4_k", output_format="q6_k", tied=False)


def _values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", ["bf16", "q4_0", "q6_k"])
def test_a_cast_is_the_encoding_of_the_values_and_of_nothing_else(source: str, to: str) -> None:
    tensor = QuantTensor.encode(get_format(source), _values(1, 300, 512))  # more than one chunk
    got = cast(tensor, get_format(to))
    assert got.shape == tensor.shape
    assert got.format is get_format(to)
    assert np.array_equal(got.data, encode(get_format(to), tensor.dequantize()))


def test_a_vector_can_be_cast() -> None:
    tensor = QuantTensor.encode(get_format("f32"), _values(2, 64))
    assert np.array_equal(cast(tensor, get_format("bf16")).data, get_format("bf16").encode(tensor.dequantize()))


def test_linear_layers_are_cast_and_everything_else_is_the_same_object(model: Checkpoint) -> None:
    draft = cast_checkpoint(model, get_format("mxfp4"))
    assert draft.tensors.keys() == model.tensors.keys()
    assert (draft.config, draft.vocabulary, draft.path) == (model.config, model.vocabulary, model.path)
    for name, tensor in model.tensors.items():
        if name.rpartition(".")[2] in ("q", "k", "v", "o", "gate", "up", "down"):
            assert np.array_equal(draft.tensors[name].data, cast(tensor, get_format("mxfp4")).data)
        else:
            assert draft.tensors[name] is tensor


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("output", "to", "wanted"),
    [
        ("f16", "mxfp4", "mxfp4"),
        ("bf16", "q5_0", "q5_0"),
        ("bf16", "int2_g32_asym", "mxfp4"),
        ("bf16", "bf16", None),
        ("q8_0", "mxfp4", None),
        ("q6_k", "mxfp4", None),
    ],
)
def test_only_an_output_matrix_of_many_bits_is_cast(  # type: ignore[no-untyped-def]
    tmp_path_factory, tied: bool, output: str, to: str, wanted: str | None
) -> None:
    formats = {"embed_format": output} if tied else {"embed_format": "f16", "output_format": output}
    source = tiny(tmp_path_factory, weight_format="q4_0", tied=tied, **formats)
    found = casts(source, get_format(to)).get("output")
    assert (found and found.name) == wanted
    draft = cast_checkpoint(source, get_format(to))
    assert draft.tensors["embed"] is source.tensors["embed"]
    matrix = "embed" if tied else "output"
    if wanted:
        assert np.array_equal(draft.tensors["output"].data, cast(source.tensors[matrix], get_format(wanted)).data)
    else:
        assert draft.config == source.config
        assert draft.tensors[matrix] is source.tensors[matrix]


def test_a_format_that_does_not_fit_is_refused_by_the_tensors_name(tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    narrow = tiny(tmp_path_factory, hidden_size=96, num_heads=2, num_kv_heads=2, head_dim=32)
    with pytest.raises(FormatError, match=r"layers\.0\.q: q4_k needs in_features divisible by 256, got 96"):
        casts(narrow, get_format("q4_k"))

"""A cast is what the format makes of the values; what is not cast is shared."""

import numpy as np
import pytest

from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.engine.llm import load_target
from cpuspec.errors import ConfigError, FormatError
from cpuspec.formats import FORMATS, QuantTensor, get_format
from cpuspec.kernels.encode import encode
from cpuspec.quantize.cast import cast, casts, quantized
from cpuspec.quantize.job import Job, quantize
from cpuspec.settings import EngineConfig
from tests.backends.models import TOKENS, cast_checkpoint, computed, in_chunks, tiny


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


@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("type_name", ["q8_0", "nl4_i"])
def test_a_model_quantized_at_load_computes_what_the_file_of_that_type_does(  # type: ignore[no-untyped-def]
    tmp_path_factory, tmp_path, type_name: str, backend: str
) -> None:
    model = tiny(tmp_path_factory, weight_format="q4_k", embed_format="f16", output_format="q6_k", tied=False)
    quantize(model, tmp_path / "out.gguf", Job(type_name, embed="f16"), threads=1)
    wanted = computed(backend, open_checkpoint(tmp_path / "out.gguf"))
    loaded = load_target(backend, model, EngineConfig(threads=1, kv_format="f32", quantization=type_name))
    got, other = in_chunks(loaded, TOKENS), computed(backend, model)
    assert np.array_equal(got, wanted)
    assert not np.array_equal(other, wanted)


def test_a_tied_output_matrix_is_quantized_at_load_and_the_embedding_is_not(tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    tied = tiny(tmp_path_factory, weight_format="f16", embed_format="f16", tied=True)
    chosen = quantized(tied, "nl4_i")
    assert chosen["output"].name == "q6_i"
    assert "embed" not in chosen
    assert quantized(tied, "f16") == {}


def test_a_type_that_is_not_known_is_refused_before_weights_are_loaded(model: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="the type 'q9' is not known; wanted one of"):
        load_target("numpy", model, EngineConfig(quantization="q9"))

"""Every KV format: the compiled backend means what the reference means, and a row's bits depend on nothing but its own past.

Sequences are longer than a chunk of attention, so that records are folded, and chunks go to several threads.
"""

from dataclasses import replace

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.backends.weights import key_centres
from cpuspec.checkpoints import Checkpoint
from cpuspec.errors import BackendError, FormatError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.formats.kv import KV_FORMATS
from cpuspec.kernels.kv_rows import CHUNK
from cpuspec.sampling import processed
from cpuspec.settings import EngineConfig, SamplingParams
from tests.backends.models import check_rows, computed, every_backend, forward, reference, tiny

TOKENS = np.random.default_rng(0).integers(0, 300, CHUNK + 44).tolist()
SHAPES = {
    "heads of 64": {},
    "heads of 80": {"head_dim": 80, "num_heads": 3, "num_kv_heads": 1},
    "heads of 128": {"head_dim": 128, "num_heads": 6, "num_kv_heads": 2},
    "heads of 18": {"head_dim": 18, "num_heads": 18, "num_kv_heads": 1},  # more queries of a row than go together
}


@pytest.fixture(scope="module", params=SHAPES)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    return tiny(tmp_path_factory, architecture="llama", weight_format="f32", num_layers=2, **SHAPES[request.param])


@pytest.fixture(scope="module")
def unrounded(checkpoint: Checkpoint) -> np.ndarray:
    """Logits of TOKENS by the reference, of exact keys and values."""
    return reference(checkpoint, TOKENS)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@every_backend(("numba", "torch"))
def test_logits_agree_with_the_reference_to_what_rounding_the_other_way_makes(
    checkpoint: Checkpoint, unrounded: np.ndarray, name: str, kv_format: str
) -> None:
    wanted, got = reference(checkpoint, TOKENS, kv_format), computed(name, checkpoint, TOKENS, kv_format=kv_format)
    assert np.abs(got - wanted).max() < {"f32": 1e-4, "f16": 3e-3, "bf16": 2e-2, "int8": 3e-2, "int4": 0.3}[kv_format]
    # The format shows: without rounding the reference is much further away than with it.
    apart = np.square(got - wanted).mean() / np.square(got - unrounded).mean()
    assert apart < 0.2 or kv_format == "f32"


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_row_depends_on_its_past_alone(checkpoint: Checkpoint, kv_format: str) -> None:
    check_rows(checkpoint, TOKENS, kv_format=kv_format, threads=(1, 3), prefixes=(5, CHUNK - 16, CHUNK - 2, CHUNK, CHUNK + 20))


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_bytes_per_token_are_what_a_slot_holds(checkpoint: Checkpoint, kv_format: str) -> None:
    backend, config = (
        make_backend("numba", checkpoint, EngineConfig(threads=1, max_rows=64, kv_format=kv_format)),
        checkpoint.config,
    )
    bits, unit = {"f32": (32, 16), "f16": (16, 16), "bf16": (16, 16), "int8": (9, 32), "int4": (4.5, 64)}[kv_format]
    padded = -(-config.head_dim // unit) * unit
    cache = backend.new_cache(1, 4 * CHUNK)
    assert cache.bytes_per_token == 2 * config.num_layers * config.num_kv_heads * padded * bits / 8
    assert cache.storage(0).memory[0].nbytes == 4 * CHUNK * cache.bytes_per_token
    backend.close()


@pytest.fixture(scope="module")
def unbiased(tmp_path_factory) -> Checkpoint:
    return tiny(tmp_path_factory, architecture="qwen2", weight_format="f32", num_layers=2, head_dim=64, rope_base=1e6)


@pytest.fixture(scope="module")
def biased(unbiased: Checkpoint) -> Checkpoint:
    """A model whose key bias is 200 in a dimension that hardly turns, as in Qwen2.5's first layer."""
    tensors = dict(unbiased.tensors)
    for name in ("layers.0.k_bias", "layers.1.k_bias"):
        bias = tensors[name].dequantize()
        bias[31::64] = 200
        tensors[name] = QuantTensor.encode(tensors[name].format, bias)
    return replace(unbiased, tensors=tensors)


@pytest.mark.parametrize("kv_format", ["f16", "bf16", "int8", "int4"])
@every_backend(["numba", "numpy", "torch"])
def test_what_all_keys_of_a_head_have_in_common_costs_nothing(
    biased: Checkpoint, unbiased: Checkpoint, name: str, kv_format: str
) -> None:
    """Softmax does not see it, so a cache leaves it out; with it, the steps of codes would be several units long."""

    def lost(name: str, checkpoint: Checkpoint) -> float:
        found = computed(name, checkpoint, TOKENS[:64], kv_format=kv_format)
        return float(np.square(found - reference(checkpoint, TOKENS[:64])).mean())

    assert lost(name, biased) < 3 * lost("numpy", unbiased)


def test_keys_have_a_centre_only_where_scores_do_not_show_it(biased: Checkpoint) -> None:
    centres = key_centres(biased.config, KV_FORMATS["int8"], biased.tensors)
    assert [centre.shape for centre in centres.values()] == [(biased.config.num_kv_heads, 64)] * 2
    assert all(199 < centre[0, 31] < 201 for centre in centres.values())
    for kv_format, changes in (("f32", {}), ("int4", {"attention_softcap": 50.0}), ("int4", {"qk_norm": True})):
        assert not key_centres(replace(biased.config, **changes), KV_FORMATS[kv_format], biased.tensors)


@pytest.mark.parametrize("name", ["numba", "numpy"])
def test_an_unknown_format_is_a_clear_error(checkpoint: Checkpoint, name: str) -> None:
    with pytest.raises(FormatError, match="'fp8' is not known; wanted one of f32, f16, bf16, int8, int4"):
        make_backend(name, checkpoint, EngineConfig(threads=1, kv_format="fp8"))


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_keys_beyond_the_range_of_f16_are_an_error_that_names_the_formats_that_bear_them(tmp_path_factory, kv_format: str) -> None:
    """Some models have keys of 1e5 (Qwen's biases have come near)."""
    source = tiny(tmp_path_factory, architecture="qwen2", weight_format="f32", num_layers=1)
    bias = source.tensors["layers.0.k_bias"].dequantize()
    bias[: source.config.head_dim] = 1e6
    checkpoint = replace(source, tensors={**source.tensors, "layers.0.k_bias": QuantTensor.encode(get_format("f32"), bias)})
    backend = make_backend("numba", checkpoint, EngineConfig(threads=1, kv_format=kv_format))
    logits = forward(backend, backend.new_cache(1, 64), {0: TOKENS[:20]}).logits[-1]
    if kv_format in ("f32", "bf16"):
        processed(logits, SamplingParams(), None)
    else:
        with pytest.raises(
            BackendError, match="exceed 65504, which the KV formats f16, int8 and int4 do not bear: try kv_format bf16"
        ):
            processed(logits, SamplingParams(), None)

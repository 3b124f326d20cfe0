"""What differs by architecture and by layer means in every backend what it means in the reference; compiled rows stay invariant."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.checkpoints.checkpoint import tensor_shapes
from cpuspec.config import ModelConfig, RopeScaling
from cpuspec.errors import BackendError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.settings import EngineConfig
from tests.backends.models import check_rows, computed, every_backend, forward, in_chunks, reference
from tools.make_tiny_model import random_weights, tiny_config

LONGROPE = RopeScaling(
    "longrope",
    original_context_length=256,
    attention_factor=1.2,
    factors=(3.0,) * 16,
    short_factors=tuple(1 + i / 8 for i in range(16)),
)
FAMILIES = {
    "windows": {"num_layers": 3, "layer_windows": (5, 0, 20)},
    "no rotation in a layer": {"layer_ropes": ("global", "none")},
    "two rotary bases": {"num_layers": 3, "layer_ropes": ("local", "global", "local"), "local_rope_base": 100.0},
    "norms before and after": {"norms": "both"},
    "norms after": {"norms": "after"},
    "norms of rows": {"qk_norm": True, "norm_spans": "row"},
    "gelu": {"activation": "gelu_tanh", "embedding_scale": 3.5},
    "query scale and softcaps": {"query_scale": 0.4, "attention_softcap": 2.0, "logit_softcap": 1.5, "layer_windows": (9, 0)},
    "gemma 3": {
        "num_layers": 3, "norms": "both", "activation": "gelu_tanh", "embedding_scale": 16.0, "query_scale": 0.1, "qk_norm": True,
        "layer_windows": (7, 7, 0), "layer_ropes": ("local", "local", "global"), "local_rope_base": 1000.0,
    },
    "layer norms": {"norm_kind": "layer", "hidden_size": 200},
    "layer norms with biases": {"norm_kind": "layer", "norm_bias": True, "logit_scale": 0.5},
    "no gate": {"gated": False, "activation": "gelu_tanh", "mlp_bias": True},
    "no gate, silu": {"gated": False},
    "biases in the MLP": {"mlp_bias": True},
    "parallel branches": {"parallel": True},
    "parallel branches of a layer norm": {"parallel": True, "norm_kind": "layer", "gated": False, "activation": "gelu_tanh"},
    "norms behind the rotation": {"qk_norm": True, "rotates_first": True},
    "a part of a head turns": {"rope_dims": 24},
    "queries that grow": {"query_growth": 0.3, "query_growth_length": 5, "rope_dims": 16, "layer_ropes": ("local", "global")},
    "a clamped gate": {"activation": "swiglu_oai"},
    "a squared ReLU": {"activation": "relu2"},
    "short factors": {"rope_scaling": replace(LONGROPE, original_context_length=512)},
    "long factors": {"rope_scaling": LONGROPE},
    "heads of layers": {"num_layers": 3, "layer_head_dims": (32, 64, 32), "layer_kv_heads": (2, 1, 3), "layer_windows": (9, 0, 9)},
    "short values": {"value_dim": 24, "layer_windows": (30, 0)},
    "long values": {"value_dim": 48, "qk_norm": True},
    "wide heads": {"head_dim": 512, "num_heads": 2, "num_kv_heads": 1},
}  # fmt: skip
GRAPHS = ("onnxruntime", "openvino")  # refuse these
SINKS = {
    "sinks": {"sinks": True},
    "sinks beside windows": {"num_layers": 3, "sinks": True, "layer_windows": (9, 0, 3)},
    "sinks and softcaps": {"sinks": True, "attention_softcap": 2.0},
}
TOKENS = np.random.default_rng(0).integers(0, 300, 560).tolist()
# 0 -> 1 -> 3 -> 4 -> 5, 0 -> 2, all after a prefix
TREE, PARENTS, DEPTHS = [9, 8, 7, 6, 5, 4], [-1, 0, 0, 1, 3, 4], [0, 1, 1, 2, 3, 4]


@dataclass(frozen=True)
class _Model:
    """The part of a Checkpoint that a backend reads."""

    config: ModelConfig
    tensors: dict[str, QuantTensor]
    name: str = "random"


def _model(weight_format: str = "f32", *, num_layers: int = 2, **flags: object) -> _Model:
    config = replace(tiny_config("llama", num_layers=num_layers, head_dim=32, num_heads=6, num_kv_heads=2), **flags)
    weights, rng = random_weights(config), np.random.default_rng(5)
    for name in [f"layers.{i}.{part}_post_norm" for i in range(num_layers) for part in ("attn", "mlp")]:
        weights.setdefault(name, (1 + 0.2 * rng.standard_normal(config.hidden_size)).astype(np.float32))
    formats = {1: "f32", 2: weight_format}
    return _Model(config, {name: QuantTensor.encode(get_format(formats[w.ndim]), w) for name, w in weights.items()})


def _settings(threads: int = 1) -> EngineConfig:
    return EngineConfig(threads=threads, max_rows=700, kv_format="f32", keep_packed=False)


@pytest.fixture(scope="module", params=FAMILIES | SINKS)
def model(request: pytest.FixtureRequest) -> _Model:
    return _model(**(FAMILIES | SINKS)[request.param])


@pytest.fixture(scope="module")
def wanted(model: _Model) -> np.ndarray:
    return reference(model, TOKENS[:60])


@every_backend()
def test_each_difference_means_what_the_reference_means(model: _Model, wanted: np.ndarray, name: str) -> None:
    if not model.config.has_alike_heads and name in GRAPHS:
        with pytest.raises(BackendError, match="heads of one size in all layers"):
            make_backend(name, model, _settings())
        return
    if model.config.sinks and name in GRAPHS:
        with pytest.raises(BackendError, match="layer 0 has attention sinks, which this graph cannot compute"):
            computed(name, model, TOKENS, 1)
        return
    for size in (60, 13):
        got = computed(name, model, TOKENS[:60], size)
        assert np.abs(got - wanted).max() < 1e-4 * max(1, np.abs(wanted).max())


@pytest.mark.parametrize("name", FAMILIES | SINKS)
def test_each_difference_makes_one(name: str) -> None:
    """The flags reach the forward: without them, logits are others."""
    model = _model(**(FAMILIES | SINKS)[name])
    plain = _model(num_layers=model.config.num_layers, hidden_size=model.config.hidden_size)
    config = replace(plain.config, qk_norm=model.config.qk_norm)
    plain = _Model(config, {name: (plain.tensors | model.tensors)[name] for name in tensor_shapes(config)})
    assert not np.allclose(computed("numba", model, TOKENS[:30])[-1], computed("numba", plain, TOKENS[:30])[-1], atol=1e-2)


def test_a_row_depends_on_its_past_alone(model: _Model) -> None:
    check_rows(model, TOKENS[:30], threads=(2,))


@cache
def _meant(tokens: tuple[int, ...], **flags: object) -> np.ndarray:
    """What tokens mean to a model with these flags."""
    return reference(_model(**flags), tokens)


@pytest.mark.parametrize(("windows", "softcap"), [((300, 70), 0.0), ((256, 1), 3.0), ((16, 257), 3.0), ((0, 511), 0.0)])
@every_backend()
def test_windows_over_several_chunks_of_the_cache(windows: tuple[int, int], softcap: float, name: str) -> None:
    flags = {"layer_windows": windows, "attention_softcap": softcap}
    model, wanted = _model(**flags), _meant(tuple(TOKENS), **flags)
    together, in_parts = computed(name, model, TOKENS, len(TOKENS)), computed(name, model, TOKENS, 200, threads=2)
    assert np.abs(together - wanted).max() < 1e-4 * np.abs(wanted).max()
    assert np.abs(in_parts - wanted).max() < 1e-4 * np.abs(wanted).max()
    assert name != "numba" or np.array_equal(in_parts, together)


@pytest.mark.parametrize(("kv_format", "most"), [("f32", 1e-4), ("f16", 1e-3), ("int8", 0.05)])
@every_backend(("numba", "torch"))
def test_sinks_over_several_chunks_of_each_cache(kv_format: str, most: float, name: str) -> None:
    """Biases of keys shift all scores of a query, but not its sink."""
    model, tokens = _model(sinks=True, layer_windows=(300, 0), qkv_bias=True, o_bias=True), TOKENS[:330]
    wanted = reference(model, tokens, kv_format)
    together = computed(name, model, tokens, 330, kv_format=kv_format)
    assert np.abs(together - wanted).max() < most * np.abs(wanted).max()
    without = _Model(replace(model.config, sinks=False), {n: t for n, t in model.tensors.items() if not n.endswith("sinks")})
    assert np.abs(reference(without, tokens, kv_format) - wanted).max() > 4 * most * np.abs(wanted).max()
    for size, threads in ((200, 2), (7, 3)):
        again = computed(name, model, tokens, size, threads=threads, kv_format=kv_format)
        assert np.abs(again - together).max() <= (0 if name == "numba" else 2 * most * np.abs(wanted).max())


@pytest.mark.parametrize("windows", [(4, 0), (2, 20), (300, 33)])
@every_backend()
def test_a_tree_row_means_its_path_in_a_window(windows: tuple[int, int], name: str) -> None:
    flags = {"layer_windows": windows, "attention_softcap": 2.0, "sinks": name not in GRAPHS}
    backend = make_backend(name, _model(**flags), _settings())
    for prefix in (0, 3, 21, 300):
        cache = backend.new_cache(1, 700)
        if prefix:
            forward(backend, cache, {0: TOKENS[:prefix]})
        got = forward(backend, cache, {0: TREE}, parents=PARENTS, positions=[prefix + depth for depth in DEPTHS]).logits
        for path in ([0, 1, 3, 4, 5], [0, 2]):
            alone = _meant((*TOKENS[:prefix], *(TREE[node] for node in path)), **flags)
            assert np.abs(got[path] - alone[prefix:]).max() < 1e-4 * np.abs(alone).max()
        cache.keep_path(0, prefix, np.array([0, 1, 3, 4, 5], np.int32))
        after = forward(backend, cache, {0: [1, 2]}).logits
        alone = _meant((*TOKENS[:prefix], *(TREE[node] for node in (0, 1, 3, 4, 5)), 1, 2), **flags)
        assert np.abs(after - alone[-2:]).max() < 1e-4 * np.abs(alone).max()
    backend.close()


@pytest.mark.parametrize("windows", [(4, 0), (2, 20), (300, 33)])
def test_a_row_in_a_window_depends_on_its_past_alone(windows: tuple[int, int]) -> None:
    check_rows(_model(layer_windows=windows, sinks=True), TOKENS[:310], threads=(1, 2), prefixes=(0, 3, 16, 21, 255, 258, 300))


IN_CODES = (
    "heads of layers",
    *("gemma 3", "layer norms with biases", "parallel branches of a layer norm", "norms behind the rotation"),
    "queries that grow",
)


@pytest.mark.parametrize("weight_format", ["q4_0", "bf16"])
@pytest.mark.parametrize("name", IN_CODES)
def test_weights_in_codes_are_row_invariant(name: str, weight_format: str) -> None:
    model = _model(weight_format, **FAMILIES[name])
    alone = check_rows(model, TOKENS[:80], threads=(1, 2))
    wanted = reference(model, TOKENS[:80])
    assert np.corrcoef(alone.ravel(), wanted.ravel())[0, 1] > 0.99


@every_backend()
def test_the_context_that_is_asked_for_chooses_the_factors_of_longrope(name: str) -> None:
    """Not the tokens that are there: keys in the cache would have been turned by other factors than new queries."""
    model, settings = _model(rope_scaling=LONGROPE), _settings()
    for length, factors in ((None, LONGROPE.factors), (257, LONGROPE.factors), (256, LONGROPE.short_factors)):
        plain = RopeScaling("factors", attention_factor=LONGROPE.attention_factor, factors=factors)
        wanted = reference(_Model(replace(model.config, rope_scaling=plain), model.tensors), TOKENS[:20])
        backend = make_backend(name, model, replace(settings, context_length=length))
        assert np.abs(in_chunks(backend, TOKENS[:20], 20) - wanted).max() < 1e-4 * np.abs(wanted).max()
        backend.close()

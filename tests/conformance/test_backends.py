"""Every backend has what all must have: it means what the reference means, a row depends on its past alone, outputs are those that
were asked for, and what would be read out of bounds is refused. `tests/backends` has what one backend or one layer alone has.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from cpuspec.backends import BACKENDS, OWN_SETTINGS, check_backend, make_backend, owners_of, settings_on
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import HeadConfig, Latent, ModelConfig, RopeScaling
from cpuspec.errors import BackendError, CacheError
from cpuspec.evaluate.quality import compare_rows
from cpuspec.formats import FORMATS, QuantTensor
from cpuspec.kernels import isa
from cpuspec.kernels.kv_rows import CHUNK
from cpuspec.model.batch import ForwardBatch, Lists
from cpuspec.sampling import argmax
from cpuspec.settings import EngineConfig
from tests.backends.models import (
    CLASSES,
    DEPTHS,
    GEMMA4,
    LATENT,
    MIXTURES,
    PARENTS,
    RECURRENT,
    SMALLEST,
    TOKENS,
    TREE,
    check_rows,
    computed,
    every_backend,
    flagged,
    forward,
    in_gguf,
    missing,
    reference,
    tiny,
)

GRAPHS = ("onnxruntime", "openvino")
ENGINE = EngineConfig(threads=1, max_rows=64, kv_format="f32", keep_packed=False)
LONG = np.random.default_rng(0).integers(0, 300, 560).tolist()  # over several chunks of a cache
LONGROPE = RopeScaling(
    *("longrope", 1.0), original_context_length=256, attention_factor=1.2, factors=(3.0,) * 16,
    short_factors=tuple(1 + i / 8 for i in range(16)),
)  # fmt: skip

# Arguments of `tiny`.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2 untied": {"tied": False, "output_format": "q6_k"},
    "qwen3": {"architecture": "qwen3", "num_heads": 6, "num_kv_heads": 3, "head_dim": 32},
    "llama with o bias": {"architecture": "llama", "qkv_bias": True, "o_bias": True, "num_kv_heads": 4},
    "odd sizes": {
        "architecture": "llama", "weight_format": "f32", "hidden_size": 50, "intermediate_size": 70, "num_heads": 3,
        "num_kv_heads": 1, "head_dim": 18, "vocab_size": 301,
    },
    "gemma3": {"architecture": "gemma3", "head_dim": 32},
    "gemma4, values of keys": {**GEMMA4["gemma4, values of keys"], "head_dim": 32},
    "gemma4, E": {**GEMMA4["gemma4, E"], "head_dim": 32},
    "yarn": {"rope_scaling": RopeScaling("yarn", factor=4.0, original_context_length=64)},
}  # fmt: skip
# Arguments of `flagged`: what differs by architecture and by layer.
FLAGS: dict[str, dict[str, Any]] = {
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
    "sinks": {"sinks": True},
    "sinks beside windows": {"num_layers": 3, "sinks": True, "layer_windows": (9, 0, 3)},
    "sinks and softcaps": {"sinks": True, "attention_softcap": 2.0},
}  # fmt: skip
WINDOWS = {
    f"windows of {first} and {second}, softcap {softcap}": {"layer_windows": (first, second), "attention_softcap": softcap}
    for first, second, softcap in ((300, 70, 0.0), (256, 1, 3.0), (16, 257, 3.0), (0, 511, 0.0))
}

Maker = Callable[[pytest.TempPathFactory], Any]
MODELS: dict[str, Maker] = {
    **{name: partial(tiny, **options) for name, options in FAMILIES.items()},
    **{name: lambda _, flags=flags: flagged(**flags) for name, flags in (FLAGS | WINDOWS).items()},
    **{name: partial(tiny, weight_format="f32", **in_gguf(name)) for name in MIXTURES},
    **{name: partial(tiny, weight_format="f32", **options) for name, options in RECURRENT.items()},
}


def _text(model: str) -> list[int]:
    """Tokens for a model: longer than its windows, and for states and latent vectors over several forwards."""
    return LONG if model in WINDOWS else LONG[:300] if model in LATENT else LONG[:150] if model in RECURRENT else TOKENS


def _is_refused(name: str, c: ModelConfig) -> bool:
    """Whether a graph cannot compute the model."""
    own = c.experts or c.latent or c.is_recurrent or c.sinks or c.value_norm or not c.has_alike_heads
    return name in GRAPHS and bool(own)


# Settings of a backend that change its arithmetic, and whether inputs of products are rounded to int8 with them.
ARITHMETICS: dict[str, list[tuple[dict[str, str], bool]]] = {
    "numba": [({}, True)],
    "numpy": [({"activations": "f32"}, False)],
    "torch": [({"weights": "values"}, False), ({"weights": "codes"}, False)],
    "onnxruntime": [({"activations": "f32"}, False), ({}, True)],
    "openvino": [({"activations": "f32"}, False), ({}, True)],
}
assert list(ARITHMETICS) == list(BACKENDS)


def _means_the_same(name: str, checkpoint: Checkpoint, tokens: list[int] = TOKENS) -> None:
    """With f32 inputs to what the order of f32 sums makes of logits, with int8 ones to what rounding costs."""
    if _is_refused(name, checkpoint.config):
        with pytest.raises(BackendError, match=r"which this graph cannot|heads of one size in all layers|layers of Gemma 4"):
            computed(name, checkpoint)
        return
    wanted, following = reference(checkpoint, tokens), np.array(tokens[1:])
    in_f32 = all(tensor.format.name == "f32" for tensor in checkpoint.tensors.values())
    for settings, rounds in ARITHMETICS[name]:
        for size in (len(tokens), 13):
            got = computed(name, checkpoint, tokens, size, **settings)
            assert got.shape == wanted.shape == (len(tokens), checkpoint.config.vocab_size)
            if in_f32 or not rounds:
                assert np.abs(got - wanted).max() < 1e-4 * max(1, np.abs(wanted).max())
            else:
                assert compare_rows(wanted[:-1], got[:-1], following).kl_mean < 2e-3
                assert compare_rows(wanted[:-1], np.roll(got, 1, axis=0)[:-1], following).kl_mean > 0.1


@pytest.mark.parametrize("model", MODELS)
@every_backend()
def test_a_model_means_what_the_reference_means(tmp_path_factory, name: str, model: str) -> None:
    _means_the_same(name, MODELS[model](tmp_path_factory), _text(model))


# `tests/kernels` has the bits of each format's rows.
@pytest.mark.parametrize(
    "weight_format", [each if each in CLASSES else pytest.param(each, marks=pytest.mark.slow) for each in FORMATS]
)
@every_backend()
def test_a_format_means_what_the_reference_means(tmp_path_factory, name: str, weight_format: str) -> None:
    _means_the_same(name, tiny(tmp_path_factory, weight_format=weight_format, **SMALLEST))


# Models whose rows are looked at on every backend; on numba those of all others, too.
ALIKE = ("qwen2", "gemma3", "query scale and softcaps", "sinks beside windows", "qwen3moe", "glm4_moe_lite", "lfm2", "qwen35")


@pytest.mark.parametrize("model", ALIKE)
@every_backend([name for name in BACKENDS if name != "numba"])
def test_a_row_depends_on_its_past_alone(tmp_path_factory, name: str, model: str) -> None:
    checkpoint = MODELS[model](tmp_path_factory)
    if not _is_refused(name, checkpoint.config):
        exact, wanted = {"activations": "f32"} if name in owners_of("activations", "f32") else {}, reference(checkpoint)
        assert np.abs(check_rows(checkpoint, name=name, threads=(1,), **exact) - wanted).max() < 1e-4 * max(1, np.abs(wanted).max())


NEAR_CHUNKS = {"prefixes": (0, 3, 16, 21, CHUNK - 1, CHUNK + 2)}
EXPERTS = {"architecture": "qwen3moe", "num_layers": 1, "num_experts": 4, "num_used": 2, "expert_size": 256}
IN_CODES = ("heads of layers", "gemma 3", "layer norms with biases", "parallel branches of a layer norm", "queries that grow")
# What is compiled has kernels of its own for formats, too. The arguments of `check_rows` beside each model.
SUPERBLOCKS = {"experts": EXPERTS, "latent vectors": LATENT["glm4_moe_lite"] | {"latent": Latent(256, 32, 256, 64, q_rank=256)}}
ROWS: dict[str, tuple[Maker, dict[str, Any]]] = {
    **{name: (make, NEAR_CHUNKS if name in WINDOWS else {"threads": (2,)}) for name, make in MODELS.items()},
    **{f"{each} weights": (partial(tiny, weight_format=each, **SMALLEST), {}) for each in CLASSES},
    **{
        f"{case} in {each}, activations of 14 bits": (partial(tiny, weight_format=each, **options), {"activations": "int14"})
        for each in ("q4_k", "q6_k")
        for case, options in SUPERBLOCKS.items()
        if not isa.has_sixteen_registers()
    },
    # Of each order of activations.
    **{
        f"experts in {each}": (partial(tiny, weight_format=each, **EXPERTS), {}) for each in ("q4_0", "q4_k", "q6_k", "f16", "bf16")
    },
    **{
        f"latent vectors in {each}": (
            partial(tiny, weight_format=of, **LATENT["glm4_moe_lite"]),
            {"kv_format": each, **NEAR_CHUNKS},
        )
        for of, each in (("q4_0", "f16"), ("q8_0", "int8"), ("f32", "int4"))
    },
    **{
        f"{name} in {each}": (lambda _, each=each, name=name: flagged(each, **FLAGS[name]), {"threads": (1, 2)})
        for each in ("q4_0", "bf16")
        for name in (*IN_CODES, "norms behind the rotation")
    },
}


@pytest.mark.parametrize("case", ROWS)
def test_a_compiled_row_has_the_bits_that_it_has_alone(tmp_path_factory, case: str) -> None:
    make, how = ROWS[case]
    check_rows(make(tmp_path_factory), LONG[:330] if "prefixes" in how else TOKENS, **how)


@pytest.mark.parametrize("features", [2049, 3073, 3105])
def test_a_row_whose_inputs_no_number_of_threads_divides_has_the_same_bits_on_each(tmp_path_factory, features: int) -> None:
    checkpoint = tiny(tmp_path_factory, weight_format="f32", num_layers=1, intermediate_size=features)
    logits = [computed("numba", checkpoint, TOKENS[:3], 1, threads=threads) for threads in (1, 2, 3)]
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])


@every_backend()
def test_a_path_that_is_none_is_refused(small, name: str) -> None:
    cache = small[name].new_cache(1, 64)
    forward(small[name], cache, {0: TOKENS[:3]})
    forward(small[name], cache, {0: TREE}, parents=PARENTS, positions=3 + DEPTHS)
    for slot, length, path in ((0, 3, [7]), (0, 3, [0, 0]), (0, 3, [2, 1]), (0, 3, [-1]), (0, 11, []), (0, -1, [0]), (1, 3, [0])):
        with pytest.raises(CacheError):
            cache.keep_path(slot, length, np.array(path, np.int32))
        assert cache.lengths[0] == 10


@every_backend()
def test_logits_and_hidden_states_are_those_asked_for(tmp_path_factory, name: str) -> None:
    checkpoint = tiny(tmp_path_factory, num_layers=3)
    backend = make_backend(name, checkpoint, ENGINE)
    everything = forward(backend, backend.new_cache(1, 64), {0: TOKENS}, hidden_layers=(0, 1, 2))
    some = forward(backend, backend.new_cache(1, 64), {0: TOKENS}, logit_rows=[44, 3], hidden_layers=(2, 0))
    assert np.allclose(some.logits, everything.logits[[44, 3]], atol=1e-4)
    assert np.array_equal(some.hidden[0], everything.hidden[2])
    assert np.array_equal(some.hidden[1], everything.hidden[0])
    assert not np.allclose(everything.hidden[0], everything.hidden[2], atol=1e-2)
    assert forward(backend, backend.new_cache(1, 64), {0: TOKENS}, logit_rows=[]).logits.shape == (0, checkpoint.config.vocab_size)
    # Outputs belong to the caller: the next forward leaves them alone.
    kept = everything.logits.copy()
    forward(backend, backend.new_cache(1, 64), {0: TOKENS[::-1]})
    assert np.array_equal(everything.logits, kept)
    backend.close()


HELD = {"the array": lambda logits: logits, "a row": lambda logits: logits[-1], "a part": lambda logits: logits[:, 3:7].T}


@pytest.mark.parametrize("vocab_size", [320, 301])  # padded to whole tiles, what is returned is a part already
@every_backend()
def test_logits_that_somebody_holds_stay_as_they_are(tmp_path_factory, name: str, vocab_size: int) -> None:
    """A backend may use an array again that nobody holds; the caller of the engine may hold what it was given, or any part."""
    backend = make_backend(name, tiny(tmp_path_factory, num_layers=1, vocab_size=vocab_size), ENGINE)
    for part in HELD.values():
        cache, kept = backend.new_cache(1, 64), []
        for size in (1, 1, 2, 2, 1, 1):  # as many rows as before, and another number
            first = cache.lengths[0]
            mine = part(forward(backend, cache, {0: TOKENS[first : first + size]}).logits)
            kept.append((mine, mine.copy()))
        assert all(np.array_equal(mine, before) for mine, before in kept)
        assert len({before.tobytes() for _, before in kept}) == len(kept)
    backend.close()


@every_backend()
def test_best_ids_are_those_of_the_asked_rows_or_none(small, name: str) -> None:
    backend = small[name]
    for rows in ([44, 3, 3], list(range(16)), list(range(45)), []):
        output = forward(backend, backend.new_cache(1, 64), {0: TOKENS}, logit_rows=rows)
        assert output.best is None or output.best == argmax(output.logits).tolist()
        assert name != "numba" or output.best is not None


BAD: dict[type[Exception], list[dict]] = {
    BackendError: [
        {"tokens": [384, 1]},
        {"tokens": [-1, 1]},
        {"tokens": [1] * 65, "q_start": [0, 65], "positions": [0] * 65},
        {"tokens": [], "q_start": [0, 0], "positions": []},
        {"positions": [0]},
        {"positions": [-1, 0]},
        {"positions": [1 << 26, 0]},
        {"slots": [0, 0], "q_start": [0, 1, 2]},
        {"q_start": [0, 3]},
        {"q_start": [1, 2]},
        {"slots": [0, 1], "q_start": [0, 2, 2]},
        {"parents": [0, 0]},
        {"parents": [-1, -2]},
        {"parents": [-1]},
        {"logit_rows": [2]},
        {"logit_rows": [-1]},
        {"logit_rows": [1] * 65},
        {"hidden_layers": (2,)},
    ],
    CacheError: [
        {"slots": [2]},
        {"slots": [-1]},
        {"tokens": [1] * 30, "q_start": [0, 30], "positions": [0] * 30},
    ],
}


@every_backend()
@pytest.mark.parametrize(("error", "changes"), BAD.items(), ids=["batch", "cache"])
def test_a_batch_that_would_read_out_of_bounds_is_refused(small, name: str, error: type[Exception], changes: list[dict]) -> None:
    cache = small[name].new_cache(2, 24)
    for change in changes:
        fields = {"tokens": [1, 2], "positions": [0, 1], "slots": [0], "q_start": [0, 2], **change}
        hidden = fields.pop("hidden_layers", ())
        arrays = {key: np.array(value, np.int32) for key, value in fields.items()}
        with pytest.raises(error):
            small[name].forward(ForwardBatch(**arrays, hidden_layers=hidden), cache)
        assert not any(cache.lengths), change


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    checkpoint = tiny(tmp_path_factory)
    # With activations in int8, ONNX Runtime rounds one row otherwise than several where the processor has no VNNI.
    exact = {name: {"activations": "f32"} for name in owners_of("activations", "f32")}
    settings = {name: EngineConfig(threads=1, max_rows=64, **exact.get(name, {})) for name in BACKENDS if not missing(name)}
    backends = {name: make_backend(name, checkpoint, one) for name, one in settings.items()}
    yield backends
    for backend in backends.values():
        backend.close()


@pytest.mark.parametrize("array", [np.array([1]), np.array([1.0], np.float32), np.array([[1]], np.int32)], ids=str)
@every_backend()
def test_arrays_of_another_type_are_refused(small, name: str, array) -> None:
    backend = small[name]
    good = np.array([0], np.int32)
    with pytest.raises(BackendError, match="int32"):
        backend.forward(ForwardBatch(array, good, good, np.array([0, 1], np.int32)), backend.new_cache(1, 8))


@every_backend()
def test_a_batch_of_lists_is_a_batch_of_arrays(small, name: str) -> None:
    """Also a tree, several sequences, chosen rows and hidden states: everything that a batch has."""
    fields = ([5, 6, 7, 8, 9], [0, 1, 1, 0, 1], [1, 0], [0, 3, 5], [-1, 0, 0, -1, 3], [4, 1, 2])
    outputs = []
    for batch in (ForwardBatch(*fields, (1,)), ForwardBatch(*(np.array(field, np.int32) for field in fields), (1,))):
        cache = small[name].new_cache(2, 24)
        outputs.append(small[name].forward(batch, cache))
        assert cache.lengths == [2, 3]
        assert batch.lists == Lists(*fields)
        arrays = (batch.tokens, batch.positions, batch.slots, batch.q_start, batch.parents, batch.logit_rows)
        for array, field in zip(arrays, fields, strict=True):
            assert array.dtype == np.int32
            assert array.tolist() == field
    assert np.array_equal(outputs[0].logits, outputs[1].logits)
    assert np.array_equal(outputs[0].hidden, outputs[1].hidden)
    assert len(np.unique(outputs[0].logits, axis=0)) == 3


def test_an_unknown_backend_is_a_clear_error(tmp_path_factory) -> None:
    with pytest.raises(BackendError, match="numba"):
        make_backend("cuda", tiny(tmp_path_factory), EngineConfig())


@every_backend()
def test_hidden_states_that_do_not_fit_are_an_error(tmp_path_factory, name: str) -> None:
    """A head: the target's first layer behind a random matrix that reads embeddings and hidden states."""
    target, rng = tiny(tmp_path_factory), np.random.default_rng(3)
    size = target.config.hidden_size
    fuse = QuantTensor.encode(FORMATS["f32"], 0.05 * rng.standard_normal((size, 2 * size)))
    config = replace(target.config, num_layers=1, head=HeadConfig(input_norms=False))
    tensors = {one: tensor for one, tensor in target.tensors.items() if not one.startswith("layers.1.")}
    hidden, fields = rng.standard_normal((21, size)).astype(np.float32), (TOKENS[:21], list(range(21)), [0], [0, 21])
    backend = make_backend(name, replace(target, config=config, tensors=tensors | {"fuse": fuse}), ENGINE)
    for wrong in (hidden[:, :-1], hidden.astype(np.float64), hidden[0], None):
        with pytest.raises(BackendError, match=r"takes hidden states float32 .*got"):
            backend.forward(ForwardBatch(*fields, hidden=wrong), backend.new_cache(1, 64))
    assert np.isfinite(backend.forward(ForwardBatch(*fields, hidden=hidden), backend.new_cache(1, 64)).logits).all()
    plain = make_backend(name, target, ENGINE)
    with pytest.raises(BackendError, match="takes no hidden states"):
        plain.forward(ForwardBatch(*fields, hidden=hidden), plain.new_cache(1, 64))


OTHERWISE = {"device": "cuda", "dtype": "bf16", "weights": "codes", "activations": "f32", "prompt_arithmetic": "bf16"}
OTHERWISE["memory"] = "8GB"


@pytest.mark.parametrize("activations", ["f32", "int14"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_setting_is_refused_by_backends_that_do_not_have_it(monkeypatch: pytest.MonkeyPatch, name: str, activations: str) -> None:
    """And drafts there do without it."""
    monkeypatch.setitem(OTHERWISE, "activations", activations)
    monkeypatch.setattr("cpuspec.backends.find_spec", lambda module: module)  # whatever is installed here
    assert OTHERWISE.keys() == OWN_SETTINGS.keys()
    everything = EngineConfig(threads=3, kv_format="f32", **OTHERWISE)
    there = settings_on(name, everything)
    check_backend(name, there)
    assert replace(there, **OTHERWISE) == everything
    for setting in OWN_SETTINGS:
        owners = owners_of(setting, OTHERWISE[setting])
        assert getattr(there, setting) == (OTHERWISE[setting] if name in owners else "auto")
        engine = EngineConfig(**{setting: OTHERWISE[setting]})
        if name in owners:
            check_backend(name, engine)
            continue
        wanted = f"{setting} {OTHERWISE[setting]} is a setting of the {owners[0]}.* and this is {name}; .* --backend {owners[0]}"
        with pytest.raises(BackendError, match=wanted):
            check_backend(name, engine)

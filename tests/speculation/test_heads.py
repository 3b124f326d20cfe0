"""Trained heads: read as published, equal to their formulas on every backend, and drafts of theirs change no answer."""

import json
import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec import LLM
from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.checkpoint import norm_sha256
from cpuspec.checkpoints.heads import Head, own_mtp
from cpuspec.engine.heads import of_frequent_tokens
from cpuspec.errors import CheckpointError, ConfigError, DownloadError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.model.batch import ForwardBatch
from cpuspec.quantize.head_output import write_head as export_head
from cpuspec.sequence import Sequence
from cpuspec.text import make_tokenizer
from tests.backends.models import MIXTURES, every_backend, tiny
from tests.block_heads import as_gguf as block_as_gguf
from tests.block_heads import make_block_head
from tests.checkpoints.quantizers import compressed, save
from tests.heads import (
    RandomHead,
    add_mtp,
    as_gguf,
    check_same_head,
    check_same_tensors,
    eagle1_rows,
    eagle3_encoded,
    eagle3_rows,
    make_eagle1,
    make_eagle3,
    mtp_rows,
    opened,
    output_of,
    states_of,
    write_head,
)
from tests.speculation.head_runs import (
    PARAMS,
    PROMPTS,
    SETTINGS,
    SMALL,
    check_answers,
    check_company,
    llm_over,
    recorded,
)
from tests.stage_heads import make_medusa, make_mlp_speculator
from tools.make_tiny_model import (
    make_tiny_gguf,
    make_tiny_hf,
    prediction_weights,
    random_weights,
    tiny_config,
    with_prediction,
    write_gguf,
    write_huggingface,
)

EAGLE3 = {
    "original": {},
    "speculators": {"layout": "speculators"},
    "five layers read": {"layers": (1, 2, 3, 4, 1)},
    "own embedding": {"own_embedding": True},
    "the target's output": {"own_output": False},
    "normed residual": {"layout": "speculators", "norm_before_residual": True},
    "norm before fc": {"layout": "speculators", "norm_before_fc": True},
    "norm before fc, said below": {"norm_before_fc": True},
    "layers counted by outputs": {"counts_outputs": True},
    "norms of layers and of the output": {"layout": "speculators", "fc_norm": True, "norm_output": True},
    "two layers": {"layout": "speculators", "num_layers": 2},
    "P-EAGLE": {"layout": "speculators", "num_layers": 2, "mask_id": 300},
    "P-EAGLE, named as for vLLM": {"num_layers": 2, "mask_id": 300, "mask_name": "ptd_token_id"},
}


def rows_of(backend, head: Head, tokens: list[int], hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[no-untyped-def]
    last = head.model.config.num_layers - 1
    positions = list(range(len(tokens)))
    batch = ForwardBatch(tokens, positions, [0], [0, len(tokens)], None, None, (last,), hidden.astype(np.float32))
    output = backend.forward(batch, backend.new_cache(1, 64))
    states = output.hidden[0]
    return output.logits, head.state_norm.applied(states) if head.state_norm else states


def near(found: Several[np.ndarray], wanted: Several[np.ndarray]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert np.abs(one - other).max() < 1e-4 * np.abs(other).max()


@every_backend(("numba", "numpy", "torch", "onnxruntime"))
@pytest.mark.parametrize("kind", EAGLE3)
def test_an_eagle3_head_computes_its_formulas(target: Checkpoint, tmp_path: Path, kind: str, name: str) -> None:
    made = make_eagle3(tmp_path / "head", target.config, **EAGLE3[kind])
    head = opened(made, target)
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, target.config.vocab_size, 11)
    features = rng.standard_normal((11, len(head.layers) * target.config.hidden_size))
    backend = make_backend(name, head.model, SETTINGS)
    given = features.astype(np.float32)
    for norm in head.feature_norms:
        given = norm.applied(given)
    encoded = backend.project(given, "encode")
    wanted = eagle3_encoded(made, features)
    near([encoded], [wanted])
    embedded = head.model.tensors["embed"].rows(tokens).astype(np.float64)
    near(rows_of(backend, head, tokens.tolist(), encoded), eagle3_rows(made, embedded, wanted, np.arange(11), output_of(target)))


@every_backend(("numba", "numpy", "torch", "onnxruntime"))
@pytest.mark.parametrize("bias", [False, True])
def test_an_eagle1_head_computes_its_formulas(target: Checkpoint, tmp_path: Path, bias: bool, name: str) -> None:
    made = make_eagle1(tmp_path / "head", target.config, bias=bias)
    head = opened(made, target)
    rng = np.random.default_rng(4)
    tokens, hidden = rng.integers(0, target.config.vocab_size, 11), rng.standard_normal((11, target.config.hidden_size))
    embedded = made.arrays["embed_tokens.weight"][tokens].astype(np.float64)
    rows = rows_of(make_backend(name, head.model, SETTINGS), head, tokens.tolist(), hidden)
    near(rows, eagle1_rows(made, embedded, hidden, np.arange(11), output_of(target)))


@every_backend(("numba", "numpy", "torch"))
def test_a_layer_for_multi_token_prediction_computes_its_formulas(tmp_path: Path, name: str) -> None:
    directory = make_tiny_hf(tmp_path / "mimo", context_length=128, tied=False, **SMALL)
    arrays = add_mtp(directory)
    target = open_checkpoint(directory)
    head, c = own_mtp(target), target.config
    assert (head.layers, head.feature_norms) == ((3,), ())
    rng = np.random.default_rng(4)
    tokens, hidden = rng.integers(0, c.vocab_size, 11), rng.standard_normal((11, c.hidden_size))
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta")
    config = dict(zip(names, (c.hidden_size, c.num_heads, c.num_kv_heads, c.norm_eps, c.rope_base), strict=True))
    embedded = target.tensors["embed"].rows(tokens).astype(np.float64)
    rows = rows_of(make_backend(name, head.model, SETTINGS), head, tokens.tolist(), hidden)
    near(rows, mtp_rows(arrays, config, embedded, hidden, np.arange(11), output_of(target)))


# --------------------------------------------------------------------------------- layers for prediction in the target's own files

OWN: dict[str, dict[str, Any]] = {
    "qwen2": {"tied": False},
    "llama": {},  # whose GGUF files pair neighbouring rows of q and k
    "gemma3": {"num_layers": 3},
    "qwen3moe": {"num_experts": 4, "num_used": 2, "expert_size": 64},
    "glm4moe": {**MIXTURES["glm4moe"], "rope_dims": 8, "expert_size": 64},
    "bailingmoe2": {**MIXTURES["bailingmoe2"], "rope_dims": 8, "expert_size": 64},
    "deepseek2": {**MIXTURES["deepseek2"], "expert_size": 64, "num_layers": 3},
    "glm4_moe_lite": {**MIXTURES["glm4_moe_lite"], "expert_size": 64, "num_layers": 3},
}
OWN |= {
    family: {"num_layers": 5, "rope_dims": 8, "shared_size": 32, "expert_size": 64}
    for family in ("qwen35", "qwen35moe", "qwen3next")
}
FILES = {"gguf": partial(make_tiny_gguf, weight_format="f32"), "hf": make_tiny_hf}


def shape_of_own(family: str) -> dict[str, Any]:
    return {"architecture": family, "context_length": 128, **SMALL, "num_layers": 3, **OWN[family]}


def with_own_layer(path: Path, family: str, kind: str) -> Path:
    """A model whose last layer is one for multi-token prediction, as `path`, or `path`.gguf."""
    return FILES[kind](path.with_suffix(".gguf" if kind == "gguf" else ""), predicts=True, **shape_of_own(family))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A mixture with such a layer."""
    return open_checkpoint(with_own_layer(tmp_path_factory.mktemp("own") / "glm", "glm4moe", "gguf"))


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("family", OWN)
def test_a_targets_own_layer_is_read_as_a_layer_of_its_family(tmp_path: Path, family: str, kind: str) -> None:
    target = open_checkpoint(with_own_layer(tmp_path / "model", family, kind))
    config = with_prediction(tiny_config(**shape_of_own(family)))
    weights, others, last = random_weights(config), prediction_weights(config), f"layers.{config.num_layers - 1}."
    head = own_mtp(target)
    assert (target.config.num_layers, head.layers) == (config.num_layers - 1, (config.num_layers - 2,))
    wanted = {name.replace(last, "layers.0."): values for name, values in weights.items() if name.startswith(last)}
    names = {"enorm": "embed_norm", "hnorm": "hidden_norm", "eh_proj": "fuse", "shared_head_norm": "norm"}
    wanted |= {names[name]: values for name, values in others.items()}
    assert head.model.tensors.keys() - wanted.keys() == {"embed", "output"}
    for name, values in wanted.items():
        assert np.allclose(head.model.tensors[name].dequantize(), values, rtol=1e-6, atol=1e-6), name
    assert head.model.tensors["embed"] is target.tensors["embed"]
    (norm,) = head.feature_norms
    assert norm.weight.tolist() == target.tensors["norm"].dequantize().tolist()
    if kind == "gguf":
        check_answers(target, "numpy" if target.config.recurrent else "numba", ["mtp@3"])


def test_recurrent_layers_verify_chains(tmp_path: Path) -> None:
    path = with_own_layer(tmp_path / "model", "qwen35", "gguf")
    for spec in ("tree:mtp", "suffix:tree", "auto,ngram:tree", "ngram@2+tree:mtp@4"):
        with pytest.raises(ConfigError, match="drafts trees, and recurrent layers, as this target has, read one path alone"):
            LLM(path, spec, "numpy", settings=SETTINGS)
    check_answers(open_checkpoint(path), "numpy", ["auto"])


OWN_SPECS = (*(f"mtp@{number}" for number in range(1, 7)), "tree:mtp@6", "draw:mtp", "ngram@2+mtp@2", "numpy:mtp", "auto")


@every_backend(("numba", "numpy", "torch"))
def test_a_targets_own_layer_changes_no_answer(own: Checkpoint, name: str) -> None:
    check_answers(own, name, OWN_SPECS if name == "numba" else ("mtp@3",))


def test_a_targets_own_layer_of_mimo_changes_no_answer(tmp_path: Path) -> None:
    directory = make_tiny_hf(tmp_path / "mimo", context_length=128, **SMALL)
    with pytest.raises(CheckpointError, match="has no layers for multi-token prediction"):
        LLM(directory, "mtp", settings=SETTINGS)
    add_mtp(directory)
    check_answers(open_checkpoint(directory), "numba", ["mtp"])


def oracle_of(directory: Path, kind: str, part: str = "") -> Path:
    """A mixture whose next token depends on the last alone, and whose own layer knows it.

    part: "main" without that layer, "mtp" the layer and what it shares in a file of its own, "" for all in one.
    """
    config = tiny_config(**shape_of_own("glm4moe"))
    weights = random_weights(config)
    for name in weights:
        if name.endswith((".o", "down")):
            weights[name][:] = 0
    hidden, others = config.hidden_size, prediction_weights(config)
    others["eh_proj"] = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], axis=1).astype(np.float32)
    others |= {"enorm": np.ones(hidden, np.float32), "shared_head_norm": weights["norm"]}
    if kind == "hf":
        return write_huggingface(directory / "model", config, weights, predicting=others)
    last = config.num_layers - 1
    if part == "main":
        config = config.with_layers(range(last))
        weights = {name: values for name, values in weights.items() if not name.startswith(f"layers.{last}.")}
        return write_gguf(directory / "model.gguf", config, weights, weight_format="f32")
    if part == "mtp":
        weights = {name: values for name, values in weights.items() if not re.match(rf"layers\.[^{last}]\.", name)}
    return write_gguf(directory / f"{part or 'model'}-model.gguf", config, weights, weight_format="f32", predicting=others)


@pytest.mark.parametrize("kind", FILES)
def test_auto_weighs_the_layer_of_the_file(tmp_path: Path, kind: str) -> None:
    path = oracle_of(tmp_path, kind)
    with LLM(path, settings=SETTINGS) as llm:
        llm.generate(PROMPTS, PARAMS)
        drafters = {one.name: one for one in llm.explain()}
        assert drafters["mtp"].cost_of_drafting > 0
        assert drafters["mtp"].acceptance is not None
    with LLM(path, "mtp@3", "numpy", settings=SETTINGS) as llm:
        llm.generate(PROMPTS, PARAMS)
        (level,) = llm.levels.values()
        assert level.num_accepted_tokens == level.num_draft_tokens > 30


def test_a_head_drafts_after_the_hidden_states_that_may_wait(tmp_path: Path) -> None:
    """A planner's head may be asked late, and so many rows of a long text do not wait for it."""
    with LLM(oracle_of(tmp_path, "gguf"), "mtp@3", settings=SETTINGS) as llm:
        (level,) = llm.drafts
        level.context.most_waiting, waiting = 4, list[int]()
        learn = level.context.learn

        def noted(seq: Sequence, layers: tuple[np.ndarray, ...]) -> None:
            learn(seq, layers)
            waiting.append(level.context.hidden_bytes // (4 * level.context.backend.config.hidden_size))

        level.context.learn = noted  # type: ignore[method-assign]
        llm.generate(PROMPTS[1], PARAMS)
        (counts,) = llm.levels.values()
        assert counts.num_accepted_tokens == counts.num_draft_tokens > 10
        assert 4 <= max(waiting) <= 8
    with LLM(oracle_of(tmp_path, "gguf"), "auto", settings=SETTINGS) as llm:
        assert llm.drafts[0].context.most_waiting


def test_a_named_head_takes_its_weights_of_the_memory_limit(tmp_path: Path) -> None:
    path = oracle_of(tmp_path, "gguf")
    with LLM(path, "mtp@2", settings=SETTINGS) as llm:
        head, target = llm.memory()
    settings = replace(
        SETTINGS, keep_packed=True, memory=f"{(target.weight_bytes + (head.weight_bytes - head.shared_bytes) / 2) / 1e3:.3f}KB"
    )
    for spec, on_disk in (("none", False), ("mtp@2", True)):
        with LLM(path, spec, settings=settings) as llm:
            assert (llm.reads()[-1].disk is not None) == on_disk
    with pytest.raises(ConfigError, match=r"memory is limited to 0\.000 GB, and mtp alone takes 0\.\d* GB"):
        LLM(path, "mtp@2", settings=replace(settings, memory="0.001MB"))


def test_a_layer_in_a_file_of_its_own_is_that_of_the_whole_file(tmp_path: Path) -> None:
    main, alone = oracle_of(tmp_path, "gguf", "main"), oracle_of(tmp_path, "gguf", "mtp")
    whole, target = own_mtp(open_checkpoint(oracle_of(tmp_path / "..", "gguf"))), open_checkpoint(main)
    for head in (own_mtp(target), opened(RandomHead(alone, {}, {}), target)):  # found beside its target, and named
        assert head.model.config == whole.model.config
        check_same_tensors(head, whole)
        assert head.model.tensors["output"] is target.tensors["output"]
    for spec in (f"{alone}@2", "mtp@2"):
        with LLM(main, spec, settings=SETTINGS) as llm:
            llm.generate(PROMPTS, PARAMS)
            assert sum(level.num_accepted_tokens for level in llm.levels.values()) > 30
    with LLM(main, settings=SETTINGS) as llm:
        assert "mtp" in {one.name for one in llm.explain()}
    other = tiny_config(**{**shape_of_own("glm4moe"), "num_layers": 4})
    write_gguf(main, other, random_weights(other), weight_format="f32")
    with pytest.raises(CheckpointError, match=r"number of layers before its own is 2, and that of .* is 4"):
        opened(RandomHead(alone, {}, {}), open_checkpoint(main))
    with LLM(main, settings=SETTINGS) as llm:  # the file beside it is another model's
        assert "mtp" not in {one.name for one in llm.explain()}


# With the writer of a file as llama.cpp's converter makes it, which knows no norm before fc and no DSpark of few tokens.
IN_GGUF: dict[str, tuple[Callable[..., RandomHead], Callable[..., Path] | None]] = {
    "EAGLE-3": (make_eagle3, as_gguf),
    "EAGLE-3 with a norm before fc": (partial(make_eagle3, norm_before_fc=True), None),
    "DFlash": (make_block_head, block_as_gguf),
    "causal DFlash": (partial(make_block_head, causal=True), block_as_gguf),
    "DSpark": (partial(make_block_head, markov="vanilla"), block_as_gguf),
    "DSpark of few tokens": (
        partial(make_block_head, layout="DeepSpec", markov="vanilla", confidence="markov", num_drafted=64),
        None,
    ),
    "DSpark with confidence": (partial(make_block_head, markov="vanilla", confidence="markov"), block_as_gguf),
    "DSpark with confidence of the state": (partial(make_block_head, markov="vanilla", confidence="state"), block_as_gguf),
}


@pytest.mark.parametrize("kind", IN_GGUF)
def test_a_head_in_a_gguf_file_is_the_head_that_it_was_made_of(target: Checkpoint, tmp_path: Path, kind: str) -> None:
    """As llama.cpp writes it, and as `quantize` does."""
    make, convert = IN_GGUF[kind]
    made = make(tmp_path / "head", target.config)
    ours, exported = opened(made, target), tmp_path / "exported.gguf"
    export_head(exported, ours, target, get_format("f32"))
    for path in (exported, *([convert(made, tmp_path / "head.gguf")] if convert else [])):
        check_same_head(opened(RandomHead(path, {}, {}), target), ours)


@pytest.mark.parametrize("kind", ["EAGLE", "gated DSpark"])
def test_a_head_that_llama_cpp_has_no_layout_for_is_not_exported(target: Checkpoint, tmp_path: Path, kind: str) -> None:
    if kind == "EAGLE":
        made = make_eagle1(tmp_path / "head", target.config)
    else:
        made = make_block_head(tmp_path / "head", target.config, layout="DeepSpec", markov="gated")
    with pytest.raises(ConfigError, match="GGUF"):
        export_head(tmp_path / "out.gguf", opened(made, target), target, get_format("f32"))
    assert not (tmp_path / "out.gguf").exists()


def test_a_quantized_head_is_the_head_that_was_quantized(target: Checkpoint, tmp_path: Path) -> None:
    made, rng, values = make_eagle3(tmp_path / "head", target.config), np.random.default_rng(5), {}
    arrays: dict[str, Any] = {name: array for name, array in made.arrays.items() if name != "t2d"}
    for name in [name for name in arrays if name.endswith("_proj.weight")]:
        parts, values[name] = compressed(group=32)(rng, arrays.pop(name).shape)
        arrays |= {f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()}
    save(made.path / "model.safetensors", arrays)
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    (made.path / "config.json").write_text(json.dumps({**made.config, "quantization_config": quantization}))
    head = opened(made, target)
    for ours, theirs in (("q", "self_attn.q_proj"), ("o", "self_attn.o_proj"), ("down", "mlp.down_proj")):
        tensor = head.model.tensors[f"layers.0.{ours}"]
        assert tensor.format.name == "int4_g32"
        assert np.allclose(tensor.dequantize(), values[f"midlayer.{theirs}.weight"], rtol=1e-6, atol=0)
    assert head.token_ids is not None


def test_what_a_gguf_head_asks_for_is_computed_or_refused(target: Checkpoint, tmp_path: Path) -> None:
    made = make_eagle3(tmp_path / "head", target.config)
    plain = opened(RandomHead(as_gguf(made, tmp_path / "plain.gguf"), {}, {}), target)
    path = as_gguf(made, tmp_path / "scaled.gguf", **{"eagle3.logit_scale": 0.5, "eagle3.final_logit_softcapping": 20.0})
    scaled = opened(RandomHead(path, {}, {}), target)
    assert np.array_equal(scaled.model.tensors["norm"].dequantize(), plain.model.tensors["norm"].dequantize() * np.float32(0.5))
    assert scaled.model.config.logit_softcap == 20
    for key, value in {"attention.value_scale": 0.5, "attention.sliding_window": 8, "rope.dimension_count": 8}.items():
        path = as_gguf(made, tmp_path / "refused.gguf", **{f"eagle3.{key}": value})
        with pytest.raises(CheckpointError, match=key):
            opened(RandomHead(path, {}, {}), target)


# ------------------------------------------------------------------------------------------------------------------------- drafts

SPECS = ("EAGLE3", "tree:EAGLE3@8", "draw:EAGLE3", "EAGLE1", "tree:EAGLE1@5", "PEAGLE", "ngram@2+EAGLE3@2", "EAGLE3@2+ngram@3")
SPECS_OF_A_BACKEND = ("EAGLE3", "tree:EAGLE3@8", "EAGLE1", "PEAGLE")  # what asks a backend for something of its own


@pytest.fixture(scope="module")
def heads(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RandomHead]:
    directory, config = tmp_path_factory.mktemp("heads"), target.config
    return {
        "EAGLE3": make_eagle3(directory / "eagle3", config),
        "EAGLE1": make_eagle1(directory / "eagle1", config),
        "PEAGLE": make_eagle3(directory / "peagle", config, layout="speculators", num_layers=2, mask_id=300),
    }


def with_paths(spec: str, heads: dict[str, RandomHead]) -> str:
    for name, head in heads.items():
        spec = spec.replace(name, str(head.path))
    return spec


@every_backend(("numba", "numpy", "torch"))
def test_a_head_changes_no_answer(target: Checkpoint, heads: dict[str, RandomHead], name: str) -> None:
    check_answers(target, name, [with_paths(spec, heads) for spec in (SPECS if name == "numba" else SPECS_OF_A_BACKEND)])


@pytest.mark.parametrize("kind", ["EAGLE3", "EAGLE1", "PEAGLE", "mtp"])
def test_a_head_keeps_rows_for_their_salt_alone(
    target: Checkpoint, own: Checkpoint, heads: dict[str, RandomHead], kind: str
) -> None:
    with llm_over(own if kind == "mtp" else target, with_paths(kind, heads), prefix_cache_gb=1) as llm:

        def num_shared(*salts: str) -> int:
            """Rows that the head had already for prompts of these salts, at once."""
            before = llm.prefix_stats()[0].num_cached_tokens
            llm.generate([PROMPTS[1]] * len(salts), [replace(PARAMS, cache_salt=salt) for salt in salts])
            return llm.prefix_stats()[0].num_cached_tokens - before

        assert num_shared("mine", "yours") == 0  # which run side by side
        assert num_shared("other") == 0
        assert all(num_shared(salt) >= len(PROMPTS[1]) - 2 for salt in ("mine", "yours", "other"))


@pytest.mark.parametrize("kind", ["EAGLE3", "PEAGLE", "DSpark", "Medusa", "MLP"])
def test_a_head_whose_rows_are_not_finite_changes_no_answer(target: Checkpoint, tmp_path: Path, kind: str) -> None:
    makers: dict[str, Callable[..., RandomHead]] = {
        "EAGLE3": make_eagle3,
        "PEAGLE": partial(make_eagle3, layout="speculators", num_layers=2, mask_id=300),
        "DSpark": partial(make_block_head, layout="speculators", markov="vanilla", confidence="markov"),
        "Medusa": make_medusa,
        "MLP": make_mlp_speculator,
    }
    made = makers[kind](tmp_path / "head", target.config)
    broken = {name: np.full_like(array, np.nan) if array.ndim == 2 else array for name, array in made.arrays.items()}
    write_head(made.path, made.config, broken)
    prefixes = ("", "draw:", "auto,", "ngram@2+", *(("tree:",) if kind not in ("PEAGLE", "DSpark") else ()))
    check_answers(target, "numba", [f"{prefix}{made.path}" for prefix in prefixes], drafts=False, draft_format="file")


@pytest.mark.parametrize("spec", ["mtp", "draw:mtp", "auto", "ngram@2+mtp", "tree:mtp"])
def test_a_layer_of_the_target_whose_rows_are_not_finite_changes_no_answer(own: Checkpoint, spec: str) -> None:
    broken = {name: QuantTensor.encode(get_format("f32"), np.full(t.shape, np.nan)) for name, t in own.prediction_layers.items()}
    check_answers(replace(own, prediction_layers=broken), "numba", [spec], drafts=False, draft_format="file")


def naive_draft(target: Checkpoint, made: RandomHead, head: Head, tokens: list[int], number: int) -> list[int]:
    """A chain by the formulas alone: every row is computed again for each token."""
    features, positions = states_of(target, tokens[:-1], head.layers), np.arange(len(tokens) + number)
    for norm in head.feature_norms if head.method == "eagle" else ():
        features = norm.applied(features.astype(np.float32)).astype(np.float64)
    state = features if head.method == "eagle" else eagle3_encoded(made, features)
    embed, drafted = head.model.tensors["embed"], list[int]()
    rows = eagle1_rows if head.method == "eagle" else eagle3_rows
    ids = head.token_ids if head.token_ids is not None else np.arange(target.config.vocab_size)
    if head.method == "p-eagle":
        assert head.mask_features is not None
        masks = eagle3_encoded(made, head.mask_features.astype(np.float64)).repeat(number - 1, axis=0)
        string = [*tokens[1:], *[head.mask_id] * (number - 1)]
        embedded, states = embed.rows(string).astype(np.float64), np.concatenate([state, masks])
        logits, _ = rows(made, embedded, states, positions[: len(string)], output_of(target))
        return ids[logits[len(tokens) - 2 :].argmax(-1)].tolist()
    while len(drafted) < number:
        embedded = embed.rows([*tokens[1:], *drafted]).astype(np.float64)
        logits, hidden = rows(made, embedded, state, positions[: len(embedded)], output_of(target))
        drafted.append(int(ids[logits[-1].argmax()]))
        state = np.concatenate([state, hidden[-1:]])
    return drafted


@pytest.mark.parametrize("kind", ["EAGLE3", "EAGLE1", "PEAGLE"])
def test_a_draft_is_what_the_formulas_say(target: Checkpoint, heads: dict[str, RandomHead], kind: str) -> None:
    made = heads[kind]
    with llm_over(target, f"{made.path}@3", "numpy", draft_format="file") as llm:
        notes = recorded(llm)
        llm.generate(PROMPTS, PARAMS)
        llm.generate([[12, 5, 6]], PARAMS)
        drafts = [(tokens, draft.tokens.tolist()) for tokens, draft in notes.drafts if len(draft) == 3]
    assert len(drafts) > 40
    for tokens, drafted in drafts[::5]:
        assert drafted == naive_draft(target, made, opened(made, target), tokens, 3)


def test_a_draft_of_the_targets_own_layer_is_what_rows_computed_anew_say(own: Checkpoint) -> None:
    head = own_mtp(own)
    backend, norm = make_backend("numpy", head.model, SETTINGS), head.feature_norms[0]
    with llm_over(own, "mtp@3", "numpy", draft_format="file") as llm:
        notes = recorded(llm)
        llm.generate(PROMPTS, PARAMS)
        drafts = [(tokens, draft.tokens.tolist()) for tokens, draft in notes.drafts if len(draft) == 3]
    assert len(drafts) > 20
    for tokens, drafted in drafts[::7]:
        string, hidden = tokens[1:], norm.applied(states_of(own, tokens[:-1], head.layers).astype(np.float32))
        for token in drafted:
            logits, states = rows_of(backend, head, string, hidden)
            assert int(logits[-1].argmax()) == token
            string, hidden = [*string, token], np.concatenate([hidden, states[-1:]])


@pytest.mark.parametrize("spec", ["mtp@4", "EAGLE1@4", "draw:mtp"])
def test_a_head_of_frequent_tokens_drafts_these_and_changes_no_answer(
    target: Checkpoint, own: Checkpoint, heads: dict[str, RandomHead], spec: str
) -> None:
    target, ends = (own if "mtp" in spec else target), make_tokenizer(own).eos_ids
    with llm_over(target, "none") as plain:
        wanted = [answer.token_ids for answer in plain.generate(PROMPTS, PARAMS)]
    with llm_over(target, with_paths(spec, heads), draft_vocab=40) as llm:
        notes = recorded(llm)
        assert [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)] == wanted
    drafted = {token for _, draft in notes.drafts for token in draft.tokens.tolist()}
    assert len(drafted) > 5
    assert drafted <= {*range(40), *ends}


def test_few_tokens_are_drafted_where_the_output_matrix_is_most_of_a_layer(own: Checkpoint) -> None:
    tokenizer, head = make_tokenizer(own), own_mtp(own)
    assert of_frequent_tokens(head, None, tokenizer) is head

    def with_vocabulary(size: int) -> Head:
        few = QuantTensor.encode(get_format("f32"), np.zeros((size, own.config.hidden_size)))
        config, tensors = replace(head.model.config, vocab_size=size), {**head.model.tensors, "embed": few, "output": few}
        return replace(head, model=replace(head.model, config=config, tensors=tensors))

    large = with_vocabulary(70_000)
    cut = of_frequent_tokens(large, None, tokenizer)
    assert cut.token_ids is not None
    assert cut.model.tensors["output"].shape[0] == len(cut.token_ids) == (1 << 15)
    assert of_frequent_tokens(large, 0, tokenizer) is large
    assert of_frequent_tokens(with_vocabulary(60_000), None, tokenizer).token_ids is None
    assert of_frequent_tokens(replace(large, method="eagle"), None, tokenizer).token_ids is None


def test_the_likeliest_chain_of_a_tree_is_in_it(target: Checkpoint, heads: dict[str, RandomHead]) -> None:
    made = heads["EAGLE3"]
    with llm_over(target, f"tree:{made.path}@12", "numpy") as llm:
        notes = recorded(llm)
        llm.generate(PROMPTS, PARAMS)
    drafts = [(tokens, draft) for tokens, draft in notes.drafts if len(draft) == 12]
    assert any(not draft.is_chain for _, draft in drafts)
    for tokens, draft in drafts[::7]:
        chain, node = [], -1
        while children := [i for i, parent in enumerate(draft.parents.tolist()) if parent == node]:
            node = children[0]
            chain.append(int(draft.tokens[node]))
            assert draft.confidence is not None
            assert draft.confidence[node] == max(draft.confidence[children])
        assert chain == naive_draft(target, made, opened(made, target), tokens, len(chain))


@pytest.mark.parametrize("spec", ["EAGLE3", "tree:EAGLE3@8", "EAGLE1", "PEAGLE", "mtp", "tree:mtp@8"])
def test_a_draft_does_not_depend_on_its_batch(target: Checkpoint, own: Checkpoint, heads: dict[str, RandomHead], spec: str) -> None:
    check_company(own if "mtp" in spec else target, with_paths(spec, heads))


# --------------------------------------------------------------------------------------------------------------- what does not fit


def test_a_head_of_another_model_is_refused_with_what_was_got_and_wanted(
    target: Checkpoint, heads: dict[str, RandomHead], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def refused(config: Mapping[str, Any], arrays: Mapping[str, np.ndarray], message: str, to: Checkpoint = target) -> None:
        made = write_head(tmp_path / "damaged", config, arrays)
        with pytest.raises(CheckpointError, match=message):
            opened(made, to)

    three, one = heads["EAGLE3"], heads["EAGLE1"]
    a, c = three.arrays, three.config
    other = tiny(tmp_path_factory, weight_format="f32", **{**SMALL, "hidden_size": 96})
    refused(c, a, r"numbers of 3 layers, is 192, and that of .* is 288", other)
    refused(one.config, one.arrays, r"hidden size.*, is 64, and that of .* is 96", other)
    smaller = tiny(tmp_path_factory, weight_format="f32", **{**SMALL, "vocab_size": 310})
    refused(c, a, r"wanted different ones below the target's 310|vocabulary is 320, and that of .* is 310", smaller)
    shallow = tiny(tmp_path_factory, weight_format="f32", **{**SMALL, "num_layers": 2})
    refused(c, a, r"inputs of layers \[1, 2, 3\], and .* has layers 1 to 2", shallow)
    refused(c, {**a, "d2t": np.full_like(a["d2t"], 1 << 40)}, "d2t gives ids from")
    refused(c, {**a, "d2t": a["d2t"][:-1]}, r"d2t has the shape \[95\], and its output matrix 96 rows")
    refused(c, {name: array for name, array in a.items() if name != "d2t"}, "without a list of their ids")
    refused(c, {name: array for name, array in a.items() if name != "fc.weight"}, r"fc\.weight is missing")
    refused(c, {**a, "norm.weight": a["norm.weight"][:-1]}, r"norm has the shape \[63\], wanted \[64\]")
    refused(c, {**a, "midlayer.experts": a["fc.weight"]}, "has no place")
    refused({**c, "norm_before_fc": True}, a, "input_norm.weight is missing")
    refused({**c, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, "a"]}}, a, "inputs of layers")
    refused({**c, "rope_theta": -1.0}, a, "rope_base")
    parallel = heads["PEAGLE"]
    refused({**parallel.config, "mask_token_id": 320}, parallel.arrays, "mask_token_id is 320, wanted an id below 320")
    refused(parallel.config, {**parallel.arrays, "mask_hidden": np.zeros((1, 1, 5), np.float32)}, "mask_hidden has the shape")


def test_a_recipe_ties_a_head_to_its_target(target: Checkpoint, heads: dict[str, RandomHead], tmp_path: Path) -> None:
    made, path = make_eagle3(tmp_path / "heads" / "one", target.config), tmp_path / "one.toml"

    def write(head: str, directory: str = "heads/one") -> None:
        path.write_text(
            f'name = "one"\ndescription = "a test"\narchitecture = "eagle3"\nlicence = "MIT"\n[head]\n{head}\n'
            f'[[sources]]\nkind = "beside"\npath = "{directory}"\n'
        )

    named = f'target = "{target.path}"\nnorm_sha256 = "{norm_sha256(target)}"'
    write(named)
    with LLM(path, "none", settings=SETTINGS) as plain, LLM(path, settings=SETTINGS) as both, llm_over(target, f"{path}@3") as llm:
        assert [level.name for level in both.explain()][-1] == "one.toml"
        wanted = [answer.token_ids for answer in plain.generate(PROMPTS, PARAMS)]
        for one in (both, llm):
            assert [answer.token_ids for answer in one.generate(PROMPTS, PARAMS)] == wanted
        assert sum(level.num_draft_tokens for level in llm.levels.values()) > 20
    other = replace(target, tensors={**target.tensors, "norm": QuantTensor.encode(get_format("f32"), np.ones(64))})
    with pytest.raises(CheckpointError, match=rf"sha256 {norm_sha256(target)}, and that of .* has {norm_sha256(other)}"):
        llm_over(other, str(path))
    llm_over(other, str(made.path)).close()  # without a recipe, nothing says what it was trained for
    write(named, "heads/none")
    with pytest.raises(DownloadError, match="is not in this installation"):
        llm_over(target, str(path))
    make_tiny_hf(tmp_path / "heads" / "model", **SMALL)
    write(named, "heads/model")
    with pytest.raises(CheckpointError, match="is not a head of a known kind"):
        llm_over(target, str(path))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ngram,EAGLE3", r"verifies no drafts of others; join them with \+"),
        ("EAGLE3,self:q4_0", "drafts for the target alone"),
        ("tree:TARGET", "drafts with a head that was trained for the target"),
        ("tree:PEAGLE", "drafts in one pass, and makes no trees"),
    ],
)
def test_specs_that_a_head_cannot_do_are_refused(target: Checkpoint, heads: dict[str, RandomHead], spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm_over(target, with_paths(spec, heads).replace("TARGET", str(target.path)))


def test_matrices_are_cast_at_load(target: Checkpoint, heads: dict[str, RandomHead]) -> None:
    sizes = {}
    for format in ("int8", "int4", "file"):
        settings = replace(SETTINGS, draft_format=format)
        with LLM(target, str(heads["EAGLE3"].path), settings=settings) as llm:
            memory = llm.memory()[0]
            sizes[format] = memory.weight_bytes - memory.shared_bytes
            llm.generate(PROMPTS, PARAMS)
    assert sizes["int4"] < 0.7 * sizes["int8"] < 0.4 * sizes["file"]

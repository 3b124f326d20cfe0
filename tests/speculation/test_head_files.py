"""Files of trained heads: read as published, in GGUF files as llama.cpp writes them, and refused where they do not fit."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuspec import LLM
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.checkpoint import norm_sha256
from cpuspec.checkpoints.heads import Head, own_mtp
from cpuspec.engine.heads import of_frequent_tokens
from cpuspec.errors import BackendError, CheckpointError, ConfigError, DownloadError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.quantize.head_output import write_head as export_head
from cpuspec.sequence import Sequence
from cpuspec.text import make_tokenizer
from tests.backends.models import MIXTURES, tiny
from tests.block_heads import make_block_head
from tests.checkpoints.quantizers import compressed, save
from tests.conformance.harness import PARAMS, PROMPTS, SETTINGS, SMALL, check_ways, llm_over, num_drafted
from tests.heads import (
    RandomHead,
    add_mtp,
    as_gguf,
    check_same_head,
    check_same_tensors,
    make_eagle1,
    make_eagle3,
    opened,
    write_head,
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
        check_ways(target, [("mtp@3", {})], backend="numpy" if target.config.recurrent else "numba", least=20)


def test_recurrent_layers_verify_chains(tmp_path: Path) -> None:
    path = with_own_layer(tmp_path / "model", "qwen35", "gguf")
    for spec in ("tree:mtp", "suffix:tree", "auto,ngram:tree", "ngram@2+tree:mtp@4"):
        with pytest.raises(ConfigError, match="drafts trees, and recurrent layers, as this target has, read one path alone"):
            LLM(path, spec, "numpy", settings=SETTINGS)
    check_ways(open_checkpoint(path), [("auto", {})], backend="numpy")


def test_a_targets_own_layer_of_mimo_changes_no_answer(tmp_path: Path) -> None:
    directory = make_tiny_hf(tmp_path / "mimo", context_length=128, **SMALL)
    with pytest.raises(CheckpointError, match="has no layers for multi-token prediction"):
        LLM(directory, "mtp", settings=SETTINGS)
    add_mtp(directory)
    check_ways(open_checkpoint(directory), [("mtp", {})], least=20)


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


# Heads, and whether llama.cpp's converter writes them: it knows no norm before fc and no DSpark of few tokens.
IN_GGUF: dict[str, tuple[Callable[..., RandomHead], bool]] = {
    "EAGLE-3": (make_eagle3, True),
    "EAGLE-3 with a norm before fc": (partial(make_eagle3, norm_before_fc=True), False),
    "DFlash": (make_block_head, True),
    "causal DFlash": (partial(make_block_head, causal=True), True),
    "DSpark": (partial(make_block_head, markov="vanilla"), True),
    "DSpark of few tokens": (partial(make_block_head, markov="vanilla", confidence="markov", num_drafted=64), False),
    "DSpark with confidence": (partial(make_block_head, markov="vanilla", confidence="markov"), True),
    "DSpark with confidence of the state": (partial(make_block_head, markov="vanilla", confidence="state"), True),
}


def opened_file(path: Path, target: Checkpoint) -> Head:
    return opened(RandomHead(path, {}, {}), target)


@pytest.mark.parametrize("kind", IN_GGUF)
def test_a_head_in_a_gguf_file_is_the_head_that_it_was_made_of(target: Checkpoint, tmp_path: Path, kind: str) -> None:
    """As llama.cpp writes it, and as `quantize` does."""
    make, is_converted = IN_GGUF[kind]
    made = make(tmp_path / "head", target.config)
    ours, exported = opened(made, target), tmp_path / "exported.gguf"
    export_head(exported, ours, target, get_format("f32"))
    for path in (exported, *([as_gguf(made, tmp_path / "head.gguf")] if is_converted else [])):
        check_same_head(opened_file(path, target), ours)


@pytest.mark.parametrize("make", [make_eagle1, partial(make_block_head, markov="gated")], ids=["EAGLE", "gated DSpark"])
def test_a_head_that_llama_cpp_has_no_layout_for_is_not_exported(
    target: Checkpoint, tmp_path: Path, make: Callable[..., RandomHead]
) -> None:
    with pytest.raises(ConfigError, match="GGUF"):
        export_head(tmp_path / "out.gguf", opened(make(tmp_path / "head", target.config), target), target, get_format("f32"))
    assert not (tmp_path / "out.gguf").exists()


def test_what_a_gguf_head_asks_for_is_computed_or_refused(target: Checkpoint, tmp_path: Path) -> None:
    heads = {"eagle3": make_eagle3(tmp_path / "a", target.config), "dflash": make_block_head(tmp_path / "b", target.config)}

    def asking(kind: str, **facts: object) -> Head:
        path = tmp_path / f"asking-{len(list(tmp_path.iterdir()))}.gguf"
        return opened_file(as_gguf(heads[kind], path, **{f"{kind}.{key}": value for key, value in facts.items()}), target)

    plain, scaled = asking("eagle3"), asking("eagle3", logit_scale=0.5, final_logit_softcapping=20.0)
    assert np.array_equal(scaled.model.tensors["norm"].dequantize(), plain.model.tensors["norm"].dequantize() * np.float32(0.5))
    assert scaled.model.config.logit_softcap == 20
    neutral = {"attention.value_scale": 0.0, "logit_scale": 0.0, "embedding_scale": 1.0, "rope.dimension_count": 16}
    assert asking("dflash", **neutral).model.config.embedding_scale == 1
    assert asking("dflash", **{"attention.scale": 0.5}).model.config.query_scale == 0.5
    wrong = {"attention.value_scale": 0.5, "attention.sliding_window": 8, "rope.dimension_count": 8}
    for kind, key, value in (
        *((kind, *one) for kind in heads for one in wrong.items()),
        *(("dflash", "attention.scale", -1.0), ("dflash", "logit_scale", [1.0, 2.0])),
    ):
        with pytest.raises(CheckpointError, match=key):
            asking(kind, **{key: value})


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


# --------------------------------------------------------------------------------------------------------------- what does not fit

MAKERS: dict[str, Callable[..., RandomHead]] = {
    "EAGLE-1": make_eagle1,
    "EAGLE-3": make_eagle3,
    "P-EAGLE": partial(make_eagle3, layout="speculators", num_layers=2, mask_id=300),
    "DFlash": make_block_head,
    "DSpark": partial(make_block_head, markov="vanilla", confidence="markov"),
    "gated DSpark": partial(make_block_head, markov="gated"),
    "recurrent DSpark": partial(make_block_head, markov="rnn"),
    "Medusa": make_medusa,
    "truncated Medusa": partial(make_medusa, layout="vllm", num_drafted=96),
    "MLP": make_mlp_speculator,
}
ONE = np.zeros((1, 1), np.float32)
BLOCK = {"target_layer_ids": [0, 2], "mask_token_id": 3}


def shorter(array: np.ndarray) -> np.ndarray:
    return array[:-1]


# For each kind changes of its configuration and of its arrays (None removes one, a text copies another), and what is said.
REFUSED: dict[str, list[tuple[dict[str, Any], dict[str, Any], str]]] = {
    "EAGLE-3": [
        ({}, {"d2t": lambda array: np.full_like(array, 1 << 40)}, "d2t gives ids from"),
        ({}, {"d2t": shorter}, r"d2t has the shape \[95\], and its output matrix 96 rows"),
        ({}, {"d2t": None}, "without a list of their ids"),
        ({}, {"fc.weight": None}, r"fc\.weight is missing"),
        ({}, {"norm.weight": shorter}, r"norm has the shape \[63\], wanted \[64\]"),
        ({}, {"midlayer.experts": "fc.weight"}, "has no place"),
        ({"norm_before_fc": True}, {}, "input_norm.weight is missing"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, "a"]}}, {}, "inputs of layers"),
        ({"rope_theta": -1.0}, {}, "rope_base"),
    ],
    "P-EAGLE": [
        ({"mask_token_id": 320}, {}, "mask_token_id is 320, wanted an id below 320"),
        ({}, {"mask_hidden": np.zeros((1, 1, 5), np.float32)}, "mask_hidden has the shape"),
    ],
    "DFlash": [
        ({}, {"layers.0.mlp_conv.base_kernel": ONE}, "DFlash 2"),
        *(
            ({"dflash_config": {key: value, **BLOCK}}, {}, key)
            for key, value in {"use_swa": True, "attention_value_scale": 0.5, "output_multiplier": 0}.items()
        ),
        ({"dflash_config": {"final_logit_softcapping": -1, **BLOCK}}, {}, "final_logit_softcapping"),
        ({"input_embedding_scale": "a"}, {}, "input_embedding_scale"),
        ({"rope_is_neox_style": False}, {}, "rope_is_neox_style"),
        ({"block_size": 1}, {}, "block_size"),
        ({"dflash_config": {**BLOCK, "target_layer_ids": [0, 9]}}, {}, "inputs of layers"),
        ({"dflash_config": {**BLOCK, "mask_token_id": 320}}, {}, "mask_token_id"),
        ({"dflash_config": {**BLOCK, "target_layer_ids": [0]}}, {}, "numbers of 1 layers"),
    ],
    "DSpark": [
        ({}, {"markov_head.other.weight": ONE}, "a part that is not supported"),
        ({}, {"markov_head.markov_w1.weight": ONE}, "markov_w1 has the shape"),
        ({}, {"confidence_head.proj.weight": ONE}, "conf_proj.weight is"),
    ],
    "gated DSpark": [({}, {"markov_head.gate_proj.weight": ONE}, "gate_proj.weight is")],
    "recurrent DSpark": [({}, {"markov_head.joint_proj.weight": ONE}, "joint_proj.weight is")],
    "Medusa": [
        ({"medusa_num_heads": 4}, {}, r"tensor outputs\.3 \[320, 64\] is missing"),
        ({"medusa_num_heads": 2}, {}, r"says 2 heads, .* its tensors are of \[0, 1, 2\]"),
        ({"medusa_num_heads": 1 << 40}, {}, "wanted 1 to 32"),
        ({"medusa_num_layers": 2}, {}, "says 2 blocks a head, and its tensors are of 1"),
        ({}, {"0.2.weight": "0.1.weight"}, "is there twice, under another name"),
        ({}, {"0.0.linear.scale": "0.0.linear.bias"}, "has no place"),
        ({}, {"1.0.linear.bias": shorter}, r"blocks\.1\.0_bias has the shape \[63\], wanted \[64\]"),
        ({}, {"1.1.weight": None}, r"outputs\.1 \[320, 64\] is missing"),
        ({"logit_scale": 0.5}, {}, "logit_scale is 0.5, wanted 1"),
    ],
    "truncated Medusa": [
        ({}, {"token_map": lambda array: array + 300}, "token_map gives ids from"),
        ({}, {"token_map": lambda array: array[:50]}, "number of drafted tokens is 96, and that of .* is 50"),
    ],
    "MLP": [
        ({"n_predict": 4}, {}, r"tensor emb\.3\.weight is missing"),
        ({"n_predict": -1}, {}, "n_predict is -1, wanted a number from 1 to 32"),
        ({"inner_dim": -5}, {}, "inner_dim is -5, wanted"),
        ({"inner_dim": 1 << 30}, {}, "has the shape"),
        ({"method": "sum_lstm"}, {}, "method is 'sum_lstm', wanted sum_rnn"),
        ({}, {"speculator.gate.0.weight": "speculator.proj.0.weight"}, "has no place in an MLP speculator"),
        ({}, {"speculator.ln.1.bias": lambda array: array[:3]}, r"ln\.1\.bias is .* \[3\], wanted numbers \[64\]"),
        ({}, {"speculator.head.2.weight": lambda array: array[:9]}, r"outputs\.2 has the shape \[9, 64\]"),
    ],
}


def changed(array: object, change: Any, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    if isinstance(change, str):
        return arrays[change]
    return change(array) if callable(change) else change


@pytest.mark.parametrize("kind", REFUSED)
def test_a_head_that_is_damaged_is_refused_with_what_was_got_and_wanted(target: Checkpoint, tmp_path: Path, kind: str) -> None:
    made = MAKERS[kind](tmp_path / "head", target.config)
    for config, changes, message in REFUSED[kind]:
        arrays = made.arrays | {name: changed(made.arrays.get(name), one, made.arrays) for name, one in changes.items()}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        damaged = write_head(tmp_path / "damaged", made.config | config, arrays)
        with pytest.raises(CheckpointError, match=message):
            opened(damaged, target)
    if kind == "DFlash":
        (made.path / "mask_embedding.pt").write_bytes(b"")
        with pytest.raises(CheckpointError, match="is a pickle"):
            opened(made, target)


@pytest.mark.parametrize(
    ("shape", "messages"),
    [
        (
            {"hidden_size": 96},
            {
                "EAGLE-3": r"numbers of 3 layers, is 192, and that of .* is 288",
                "EAGLE-1": r"hidden size.*, is 64, and that of .* is 96",
                "Medusa": r"hidden size.* is 64, and that of .* is 96",
                "MLP": "hidden size is 64, and that of .* is 96",
            },
        ),
        (
            {"vocab_size": 310},
            {
                "EAGLE-3": r"wanted different ones below the target's 310|vocabulary is 320, and that of .* is 310",
                "Medusa": "number of drafted tokens is 320, and that of .* is 310",
                "MLP": "vocabulary is 320, and that of .* is 310",
            },
        ),
        ({"num_layers": 2}, {"EAGLE-3": r"inputs of layers \[1, 2, 3\], and .* has layers 1 to 2"}),
    ],
    ids=str,
)
def test_a_head_of_another_model_is_refused_with_what_was_got_and_wanted(
    target: Checkpoint,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    shape: dict[str, int],
    messages: dict[str, str],
) -> None:
    other = tiny(tmp_path_factory, weight_format="f32", **{**SMALL, **shape})
    for kind, message in messages.items():
        with pytest.raises(CheckpointError, match=message):
            opened(MAKERS[kind](tmp_path / kind, target.config), other)


@pytest.mark.parametrize(
    ("spec", "kind", "message"),
    [
        ("ngram,{}", "EAGLE-3", r"verifies no drafts of others; join them with \+"),
        ("{},self:q4_0", "EAGLE-3", "drafts for the target alone"),
        ("tree:{}", "", "drafts with a head that was trained for the target"),
        ("tree:{}", "P-EAGLE", "drafts in one pass, and makes no trees"),
        ("tree:{}", "DFlash", "makes no trees"),
        ("onnxruntime:{}", "DFlash", "use numba, numpy or torch"),
        ("onnxruntime:{}", "MLP", "use numba, numpy or torch"),
    ],
)
def test_specs_that_a_head_cannot_do_are_refused(target: Checkpoint, tmp_path: Path, spec: str, kind: str, message: str) -> None:
    if spec.startswith("onnxruntime"):
        pytest.importorskip("onnxruntime")
    path = MAKERS[kind](tmp_path / "head", target.config).path if kind else target.path
    with pytest.raises((ConfigError, BackendError), match=message):
        llm_over(target, spec.format(path))


def test_a_recipe_ties_a_head_to_its_target(target: Checkpoint, tmp_path: Path) -> None:
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
        assert num_drafted(llm) > 20
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


def test_heads_of_medusa_may_lie_in_a_file_of_their_own_and_pickles_are_never_read(target: Checkpoint, tmp_path: Path) -> None:
    made = make_medusa(tmp_path / "head", target.config)
    (tmp_path / "config.json").write_text(json.dumps(made.config))
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(CheckpointError, match="a pickle, which can run code and is never read; convert it"):
        opened(replace(made, path=tmp_path), target)
    save_file(load_file(made.path / "model.safetensors"), tmp_path / "medusa_lm_head.safetensors")
    assert len(opened(replace(made, path=tmp_path), target).stages) == 3


def test_the_line_that_converts_a_pickle_does(target: Checkpoint, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    made = make_medusa(tmp_path / "head", target.config, num_layers=2, prefix="medusa_head.")
    (tmp_path / "config.json").write_text(json.dumps(made.config))
    torch.save({name: torch.from_numpy(array) for name, array in made.arrays.items()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError) as refused:
        opened(replace(made, path=tmp_path), target)
    line = re.search(r'python -c "(.+)"', str(refused.value))
    assert line
    subprocess.run([sys.executable, "-c", line[1]], cwd=tmp_path, check=True)
    ours, theirs = opened(replace(made, path=tmp_path), target), opened(made, target)
    check_same_tensors(ours, theirs)

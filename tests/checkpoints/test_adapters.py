"""LoRA adapters, merged: the model is the one whose matrices were changed by hand in its own files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.adapters import MAX_RANK, adapter_facts, open_adapter, read_scaled
from cpuspec.errors import CheckpointError
from cpuspec.quantize.job import Job, quantize
from tests.command import refused, report_of
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

F32 = np.ndarray
RANK = 3
_RNG = np.random.default_rng(5)


def write_peft(
    directory: Path, model: Path, changes: Mapping[str, Any] | None = None, rank: int = RANK, seed: int | None = None
) -> dict[str, F32]:
    """An adapter of every matrix in the layers of a model; returns the product that belongs to each."""
    rng = _RNG if seed is None else np.random.default_rng(seed)
    directory.mkdir()
    stored, products = {}, {}
    for name, matrix in load_file(model / "model.safetensors").items():
        if ".layers." in name and matrix.ndim == 2:
            module = name.removesuffix(".weight")
            down, up = (
                rng.standard_normal(shape).astype(np.float32) / 8 for shape in ((rank, matrix.shape[1]), (matrix.shape[0], rank))
            )
            stored |= {f"base_model.model.{module}.lora_A.weight": down, f"base_model.model.{module}.lora_B.weight": up}
            products[name] = up @ down
    save_file(stored, directory / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in stored})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none", "use_rslora": False, "alpha_pattern": {}}
    config |= {"target_modules": targets, "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model)}
    (directory / "adapter_config.json").write_text(json.dumps(config | dict(changes or {})))
    return products


def tensors_of(path: Path) -> dict[str, F32]:
    return {name: tensor.dequantize() for name, tensor in open_checkpoint(path).tensors.items()}


def merge(model: Path, out: Path, *adapters: tuple[Path, float]) -> dict[str, F32]:
    checkpoint = open_checkpoint(model)
    opened = [open_adapter(path, checkpoint.config, "tiny", scale, merges=True) for path, scale in adapters]
    quantize(checkpoint, out, Job("f32"), 1, adapters=opened)
    return tensors_of(out)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3", "gemma3", "glm4", "starcoder2"])
@pytest.mark.parametrize(
    ("changes", "factor"),
    [({}, 2.0), ({"use_rslora": True}, 6 / RANK**0.5), ({"alpha_pattern": {"down_proj": 3, "c_proj": 3, "o_proj": 3}}, None)],
)
def test_a_merged_adapter_is_its_product_added_in_the_models_own_files(
    tmp_path: Path, architecture: str, changes: dict[str, Any], factor: float | None
) -> None:
    model = make_tiny_hf(tmp_path / "model", architecture)
    products = write_peft(tmp_path / "lora", model, changes)
    weights = load_file(model / "model.safetensors")
    by_hand = make_tiny_hf(tmp_path / "by hand", architecture)
    for name, product in products.items():
        own = factor or (1.0 if name.split(".")[-2] in ("down_proj", "c_proj", "o_proj") else 2.0)
        weights[name] = weights[name] + np.float32(0.5 * own) * product
    save_file(weights, by_hand / "model.safetensors")
    found, wanted = merge(model, tmp_path / "merged.gguf", (tmp_path / "lora", 0.5)), tensors_of(by_hand)
    plain = tensors_of(model)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor, rtol=1e-5, atol=1e-5)
    assert any(np.abs(found[name] - plain[name]).max() > 0.01 for name in plain), "else the adapter changed nothing"


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_gguf_adapter_changes_what_its_own_names_say(tmp_path: Path, architecture: str) -> None:
    """Queries and keys of a Llama file pair neighbours: the adapter's rows are in the file's order, as the matrix's."""
    model = make_tiny_gguf(tmp_path / "model.gguf", architecture, weight_format="f32")
    writer = gguf.GGUFWriter(tmp_path / "lora.gguf", architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 6.0)
    changed = {one.name: np.array(one.data) for one in gguf.GGUFReader(model).tensors}
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.1.ffn_down.weight"):
        down, up = (_RNG.standard_normal((RANK, changed[name].shape[1])), _RNG.standard_normal((changed[name].shape[0], RANK)))
        writer.add_tensor(f"{name}.lora_a", down.astype(np.float32))
        writer.add_tensor(f"{name}.lora_b", up.astype(np.float32))
        changed[name] = changed[name] + np.float32(2) * (up.astype(np.float32) @ down.astype(np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    merge(model, tmp_path / "merged.gguf", (tmp_path / "lora.gguf", 1.0))
    for one in gguf.GGUFReader(tmp_path / "merged.gguf").tensors:
        np.testing.assert_allclose(one.data, changed[one.name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("pattern", "changed"),
    [
        ("layers\\.0\\..*q_proj", {"layers.0.self_attn.q_proj"}),
        (".*layers.(0|1).self_attn.k_proj", {"layers.0.self_attn.k_proj", "layers.1.self_attn.k_proj"}),
        ("q_proj", {"layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"}),
        ("_proj", set()),
        ("q_pro", set()),
    ],
)
def test_patterns_of_alphas_are_regular_expressions_as_in_peft(tmp_path: Path, pattern: str, changed: set[str]) -> None:
    model = make_tiny_hf(tmp_path / "model")
    products = write_peft(tmp_path / "lora", model, {"alpha_pattern": {pattern: 12}, "init_lora_weights": "gaussian"})
    config = open_checkpoint(model).config
    found = open_adapter(tmp_path / "lora", config, "tiny", merges=True).pairs
    (tmp_path / "lora" / "adapter_config.json").write_text(
        json.dumps(json.loads((tmp_path / "lora" / "adapter_config.json").read_text()) | {"alpha_pattern": {}})
    )
    plain = open_adapter(tmp_path / "lora", config, "tiny", merges=True).pairs
    twice = {
        name
        for name in found
        if np.allclose(found[name][1], 2 * plain[name][1]) and not np.array_equal(*(pairs[name][1] for pairs in (found, plain)))
    }
    parts = {name.replace("self_attn.", "").replace("_proj", "") for name in changed}
    assert twice == parts
    assert products


def test_several_adapters_add_up(tmp_path: Path) -> None:
    model = make_tiny_hf(tmp_path / "model")
    for number in (1, 2):
        write_peft(tmp_path / f"lora{number}", model)
    plain, one, two, both = (
        merge(model, tmp_path / f"{number}.gguf", *adapters)
        for number, adapters in enumerate(
            ((), ((tmp_path / "lora1", 1.0),), ((tmp_path / "lora2", 1.0),), ((tmp_path / "lora1", 1.0), (tmp_path / "lora2", 1.0)))
        )
    )
    for name, tensor in both.items():
        np.testing.assert_allclose(tensor, one[name] + two[name] - plain[name], atol=1e-4)


def _drop(name: str) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        tensors = load_file(directory / "adapter_model.safetensors")
        save_file({key: value for key, value in tensors.items() if name not in key}, directory / "adapter_model.safetensors")

    return change


def _set(**values: Any) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        file = directory / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def _put(name: str, tensor: F32) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        file = directory / "adapter_model.safetensors"
        save_file(load_file(file) | {name: tensor.astype(np.float32)}, file)

    return change


def _put_both(module: str) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        for part, shape in (("A", (RANK, 64)), ("B", (64, RANK))):
            _put(f"{module}.lora_{part}.weight", np.zeros(shape))(directory)

    return change


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_drop("layers.0.self_attn.q_proj.lora_A"), "one of the two parts"),
        (_drop("lora"), "no matrices"),
        (_set(use_dora=True), "use_dora.*merge_and_unload"),
        (_set(peft_type="IA3"), "peft_type"),
        (_set(modules_to_save=["lm_head"]), "modules_to_save"),
        (_set(bias="all"), "bias"),
        (_set(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens"),
        *[(_set(init_lora_weights=kind), "init_lora_weights") for kind in ("pissa", "pissa_niter_16", "olora", "corda", "loftq")],
        (_set(alpha_pattern={"(": 3}), "alpha_pattern"),
        (_set(alpha_pattern={"(a+)+": 3}), "alpha_pattern.*two repetitions at most"),
        (_set(alpha_pattern={"q_proj": "3"}), "alpha_pattern"),
        (_set(rank_pattern={".*q_proj": RANK + 1}), "rank_pattern"),
        (_put(f"{Q}.lora_A.weight", np.zeros((RANK, 7))), "is for a matrix"),
        (_put(f"{Q}.lora_A.weight", np.zeros((2, 64))), "wanted one rank"),
        (_put(f"{Q}.lora_A.weight", np.zeros((0, 64))), "wanted one rank|is empty|shape"),
        (_put("base_model.model.model.layers.0.self_attn.nothing.lora_A.weight", np.zeros((3, 64))), "one of the two parts"),
        (_put_both("base_model.model.model.layers.0.self_attn.nothing"), "is not a matrix of tiny"),
        (_put_both("base_model.model.model.layers.7.self_attn.q_proj"), "is not a matrix of tiny"),
        (_put_both("base_model.model.lm_head"), "quantize --lora"),
        (_put(f"{Q}.lora_B.weight", np.full((64, RANK), np.nan)), "not finite"),
        (_put("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", np.zeros((3, 3))), "one of the two parts"),
        (_put("base_model.model.model.embed_tokens.lora_embedding_A", np.zeros((3, 3))), "not a part of a LoRA adapter"),
        (lambda directory: (directory / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda directory: (directory / "adapter_model.safetensors").write_bytes(b"x"), "bytes"),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused(tmp_path: Path, change: Callable[[Path], object], why: str) -> None:
    model = make_tiny_hf(tmp_path / "model", hidden_size=64, num_heads=2, head_dim=32)
    write_peft(tmp_path / "lora", model)
    open_adapter(tmp_path / "lora", open_checkpoint(model).config, "tiny")
    change(tmp_path / "lora")
    with pytest.raises(CheckpointError, match=why):
        open_adapter(tmp_path / "lora", open_checkpoint(model).config, "tiny")


def test_an_adapter_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    model = make_tiny_hf(tmp_path / "model", "qwen3moe")
    write_peft(tmp_path / "lora", model)
    with pytest.raises(CheckpointError, match=r"experts\.\d+\.\w+_proj.* is not a matrix of tiny that an adapter can change here"):
        open_adapter(tmp_path / "lora", open_checkpoint(model).config, "tiny")


def test_another_models_adapter_is_refused_by_the_command(tmp_path: Path) -> None:
    model, other = make_tiny_hf(tmp_path / "model"), make_tiny_hf(tmp_path / "other", hidden_size=128)
    write_peft(tmp_path / "lora", other)
    refused(
        "quantize", str(model), str(tmp_path / "out.gguf"), "--lora", f"{tmp_path / 'lora'}=2", code=1, message="is for a matrix"
    )
    refused("quantize", str(model), str(tmp_path / "out.gguf"), "--lora", str(model), code=1, message="adapter_config.json")


def test_a_rank_that_only_merging_takes_is_refused_for_answers(tmp_path: Path) -> None:
    model = make_tiny_hf(tmp_path / "model", hidden_size=64, num_heads=2, head_dim=32)
    write_peft(tmp_path / "lora", model, rank=MAX_RANK + 1)
    config = open_checkpoint(model).config
    assert open_adapter(tmp_path / "lora", config, "tiny", merges=True).rank == MAX_RANK + 1
    with pytest.raises(CheckpointError, match="ranks up to 1024; `cpuspec quantize --lora` merges it"):
        open_adapter(tmp_path / "lora", config, "tiny")


def test_inspect_says_base_rank_and_targets_of_an_adapter(tmp_path: Path) -> None:
    model = make_tiny_hf(tmp_path / "model")
    write_peft(tmp_path / "lora", model, {"use_rslora": True})
    told = report_of("inspect", str(tmp_path / "lora"))
    assert (told["base"], told["ranks"], told["scales"]) == (str(model), [RANK], [round(6 / RANK**0.5, 6)])
    assert {"q_proj", "down_proj"} <= set(told["targets"])
    assert adapter_facts(model) is None


@pytest.mark.parametrize(
    ("text", "path", "scale"), [("a", "a", 1.0), ("a=2", "a", 2.0), ("a=b", "a=b", 1.0), ("a=b=-.5", "a=b", -0.5), ("=", "=", 1.0)]
)
def test_a_scale_stands_behind_the_last_equals_sign(text: str, path: str, scale: float) -> None:
    assert read_scaled(text) == (Path(path), scale)

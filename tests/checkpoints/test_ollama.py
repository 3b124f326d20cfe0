"""Files as Ollama's own converter writes them are the models that llama.cpp's files are (names and keys: Ollama's convert/)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.config import RopeScaling
from cpuspec.errors import CheckpointError
from tests.model_files import copy_gguf, typed
from tools.make_tiny_model import make_tiny_gguf


def rewritten(
    source: Path,
    path: Path,
    named: Callable[[str], str],
    architecture: str,
    keys: dict[str, Any],
    drop: tuple[str, ...] = (),
    **tensors: Any,
) -> Path:
    """The file under another architecture's name, with other names of tensors. keys: of the architecture, None to leave one out.

    drop: tensors that `tensors`, by part, replace in every layer.
    """
    reader = gguf.GGUFReader(source)
    ours = reader.fields["general.architecture"].contents()
    fields = {key: field for key, field in reader.fields.items() if key.startswith(f"{ours}.")}
    settings = {key.partition(".")[2]: (field.contents(), field.types[0]) for key, field in fields.items()}
    settings |= {key: typed(value) for key, value in keys.items() if value is not None}
    header = {f"{architecture}.{key}": value for key, value in settings.items() if keys.get(key, 0) is not None}
    renamed = {
        named(tensor.name): (np.array(tensor.data), tensor.tensor_type)
        for tensor in reader.tensors
        if not tensor.name.endswith(drop or "?")
    }
    header["general.architecture"] = typed(architecture)
    return copy_gguf(
        source, path, drop=[key for key in fields if key not in header], set=header,
        drop_tensors=[tensor.name for tensor in reader.tensors], tensors={**renamed, **tensors},
    )  # fmt: skip


def same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.config == other.config
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert np.array_equal(tensor.dequantize(), other.tensors[name].dequantize()), name


def replaced(**parts: str) -> Callable[[str], str]:
    def named(name: str) -> str:
        for ours, theirs in parts.items():
            name = name.replace(f".{ours}.", f".{theirs}.") if "blk." in name else name.replace(ours, theirs)
        return name

    return named


def patched_type(path: Path, name: str, number: int) -> None:
    """Gives a tensor [E, N, K] another number for its type."""
    content = bytearray(path.read_bytes())
    at = content.index(name.encode()) + len(name) + 4 + 8 * 3
    content[at : at + 4] = number.to_bytes(4, "little")
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("is_mxfp4", [False, True])
def test_gpt_oss(tmp_path: Path, is_mxfp4: bool) -> None:
    scaling = RopeScaling("yarn", 32.0, original_context_length=64)
    weights = "mxfp4" if is_mxfp4 else "f32"
    shape = {"tied": False, "rope_scaling": scaling, "num_layers": 1}
    source = make_tiny_gguf(tmp_path / "source.gguf", "gpt-oss", weight_format=weights, **shape)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    joined: dict[str, Any] = {}
    for end in ("weight", "bias"):
        gate, up = (np.array(tensors[f"blk.0.ffn_{part}_exps.{end}"].data) for part in ("gate", "up"))
        rows = np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])  # in turns
        joined[f"blk.0.ffn_gate_up_exps.{end}"] = (rows, tensors[f"blk.0.ffn_gate_exps.{end}"].tensor_type)
    parts = {"attn_output": "attn_out", "post_attention_norm": "ffn_norm"}
    blocked = ["blk.0.ffn_gate_up_exps.weight", "blk.0.ffn_down_exps.weight"] if is_mxfp4 else []

    def named(name: str) -> str:
        return replaced(**parts)(name).replace("attn_sinks.weight", "attn_sinks")

    drop = tuple(f"ffn_{part}_exps.{end}" for part in ("gate", "up") for end in ("weight", "bias"))
    if is_mxfp4:
        data = np.array(tensors["blk.0.ffn_down_exps.weight"].data)
        joined["blk.0.ffn_down_exps.weight"] = (data, gguf.GGMLQuantizationType.MXFP4)
        drop += ("ffn_down_exps.weight",)
        for name in blocked:  # a byte holds two neighbours in Ollama's
            blocks = joined[name][0].reshape(-1, 17)
            codes = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)
            neighbours = np.concatenate([blocks[:, :1], codes[:, 0::2] | codes[:, 1::2] << 4], axis=1)
            joined[name] = (neighbours.reshape(joined[name][0].shape), joined[name][1])
    experts = ("expert_feed_forward_length", "expert_gating_func", "expert_weights_norm")
    left_out = dict.fromkeys((*experts, "rope.scaling.type", "attention.sliding_window_pattern"))
    path = rewritten(source, tmp_path / "m.gguf", named, "gptoss", left_out, drop, **joined)
    for name in blocked:
        patched_type(path, name, 4)
    same(open_checkpoint(path), open_checkpoint(source))


def test_ministral_3(tmp_path: Path) -> None:
    scaling = RopeScaling("yarn", 16.0, original_context_length=64, attention_factor=1.0)
    source = make_tiny_gguf(tmp_path / "source.gguf", "ministral3", weight_format="f32", query_growth=0.1, rope_scaling=scaling)
    keys = {
        "attention.temperature_scale": None, "rope.scaling.yarn_log_multiplier": None, "rope.scaling.attn_factor": None,
        "rope.scaling.yarn_beta_fast": None, "rope.scaling.yarn_beta_slow": None, "rope.scaling.beta_fast": 32.0,
        "rope.scaling.beta_slow": 1.0, "rope.scaling.mscale": 1.0, "rope.scaling.mscale_all_dim": 1.0, "rope.scaling_beta": 0.1,
    }  # fmt: skip
    found, wanted = (open_checkpoint(path) for path in (rewritten(source, tmp_path / "m.gguf", str, "mistral3", keys), source))
    assert found.config.rope_scaling
    assert found.config.rope_scaling.attention_factor == pytest.approx(1.0)
    assert found.config.query_growth == pytest.approx(0.1)
    assert found.config.query_growth_length == wanted.config.query_growth_length == 64
    assert found.remarks == ()


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_qwen3_5(tmp_path: Path, architecture: str) -> None:
    shared = {"shared_size": 96} if architecture == "qwen35moe" else {}
    source = make_tiny_gguf(tmp_path / "source.gguf", architecture, weight_format="f32", num_layers=4, **shared)
    keys = {"mrope_sections": [3, 3, 2], "rope.mrope_section": [3, 3, 2], "rope.mrope_interleaved": True}
    keys["ssm.v_head_reordered"] = True
    found = open_checkpoint(rewritten(source, tmp_path / "m.gguf", str, architecture, keys))
    same(found, open_checkpoint(source))
    assert found.remarks == ()
    for drop in ({"ssm.v_head_reordered": False}, {"ssm.v_head_reordered": None}):
        with pytest.raises(CheckpointError, match=r"v_head_reordered .* wanted true: this file has its value heads in an order"):
            open_checkpoint(rewritten(source, tmp_path / "x.gguf", str, architecture, keys | drop))


@pytest.mark.parametrize("architecture", ["lfm2", "lfm2moe"])
def test_lfm2(tmp_path: Path, architecture: str) -> None:
    source = make_tiny_gguf(tmp_path / "source.gguf", architecture, weight_format="f32", num_layers=3)
    same(
        open_checkpoint(rewritten(source, tmp_path / "m.gguf", replaced(token_embd_norm="output_norm"), architecture, {})),
        open_checkpoint(source),
    )


def test_glm_4_7_flash_under_its_first_name(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "source.gguf", "deepseek2", weight_format="f32", num_layers=1, shared_size=128)
    same(open_checkpoint(rewritten(source, tmp_path / "m.gguf", str, "glm4moelite", {})), open_checkpoint(source))

"""Latent attention: formats of its cache, its blocks and copies, and older files, which mean the same."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.gguf_file import read_gguf
from cpuspec.checkpoints.gguf_writer import TensorInfo, entry, write_gguf
from cpuspec.config import Latent
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.settings import EngineConfig
from tests.backends.models import LATENT, computed, forward, reference, tiny
from tools.make_tiny_model import make_tiny_gguf

TOKENS = np.random.default_rng(1).integers(0, 384, 300).tolist()


@pytest.mark.parametrize("kv_format", ["f16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["numba", "torch"])
def test_a_format_of_the_cache_rounds_as_in_the_reference(tmp_path_factory, name: str, kv_format: str) -> None:  # type: ignore[no-untyped-def]
    checkpoint = tiny(tmp_path_factory, weight_format="f32", **LATENT["glm4_moe_lite"])
    wanted, exact = reference(checkpoint, kv_format=kv_format), reference(checkpoint)
    away = np.abs(computed(name, checkpoint, kv_format=kv_format) - wanted).mean()
    assert away < 0.1 * np.abs(wanted - exact).mean()


@pytest.mark.parametrize("kv_format", ["f16", "int8", "int4"])
def test_blocks_and_copies_of_a_slot_go_on_alike(tmp_path_factory, kv_format: str) -> None:  # type: ignore[no-untyped-def]
    checkpoint = tiny(tmp_path_factory, **LATENT["glm4_moe_lite"])
    backend = make_backend("numba", checkpoint, EngineConfig(kv_format=kv_format, threads=2, max_rows=512, keep_packed=False))
    cache = backend.new_cache(3, 320)
    alone = forward(backend, cache, {0: TOKENS}).logits
    cache.append_block(1, cache.read_block(0, 0, 256), 256)
    assert np.array_equal(forward(backend, cache, {1: TOKENS[256:]}).logits, alone[256:])
    cache.copy(1, 2, 280)
    assert np.array_equal(forward(backend, cache, {2: TOKENS[280:]}).logits, alone[280:])
    backend.close()


def _older(path: Path, heads: int, latent: Latent, weight_format: str) -> Path:
    """A file as converters wrote it before the vector was cached: one matrix of keys and values, and their lengths."""
    file, before = read_gguf(path), "deepseek2.attention."
    entries = {key: data.tobytes() for key, data in file.entries.items() if not key.endswith("_mla")}
    lengths = {"key_length": latent.plain + latent.rope_dims, "value_length": latent.value_dims, "head_count_kv": heads}
    entries |= {before + key: entry(before + key, value) for key, value in lengths.items()}
    tensors = dict(file.tensors)
    for name in [name for name in tensors if name.endswith("attn_k_b.weight")]:
        k, v = (tensors.pop(one).dequantize() for one in (name, name.replace("k_b", "v_b")))
        rows = np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape(-1, latent.rank)
        tensors[name.replace("k_b", "kv_b")] = QuantTensor.encode(get_format(weight_format), rows)
    with (older := path.with_name("older.gguf")).open("wb") as to:
        infos = {name: TensorInfo(tensor.format, tensor.shape) for name, tensor in tensors.items()}
        write_gguf(to, entries, infos, lambda name: tensors[name].data)
    return older


@pytest.mark.parametrize("weight_format", ["f32", "bf16", "q8_0"])
def test_older_files_have_the_same_numbers(tmp_path: Path, weight_format: str) -> None:
    path = make_tiny_gguf(tmp_path / "new.gguf", weight_format=weight_format, **LATENT["deepseek_v2"])
    new = open_checkpoint(path)
    assert new.config.latent
    older = open_checkpoint(
        _older(path, new.config.num_heads, new.config.latent, "f32" if weight_format == "q8_0" else weight_format)
    )
    assert older.config == new.config
    for name, tensor in new.tensors.items():
        assert np.array_equal(older.tensors[name].dequantize(), tensor.dequantize()), name
    in_blocks = open_checkpoint(_older(path, new.config.num_heads, new.config.latent, "q8_0"))
    assert [in_blocks.tensors[f"layers.1.{part}_b"].format.name for part in "kv"] == ["f32", "q8_0"]
    assert np.allclose(in_blocks.tensors["layers.1.k_b"].dequantize(), new.tensors["layers.1.k_b"].dequantize(), atol=0.02)


@pytest.mark.parametrize("facts", [{"attention_softcap": 1.0}, {"layer_windows": (5, 5)}], ids=str)
def test_windows_and_soft_caps_are_refused(tmp_path_factory, facts: dict[str, object]) -> None:  # type: ignore[no-untyped-def]
    config = tiny(tmp_path_factory, architecture="deepseek2", num_layers=2).config
    with pytest.raises(ConfigError, match="latent attention is supported over all positions"):
        replace(config, **facts)


def test_sizes_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "new.gguf", weight_format="f32", **LATENT["deepseek_v2"])
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"attn_k_b.weight", b"attn_k_c.weight"))
    with pytest.raises(CheckpointError, match=r"attn_k_c\.weight' belongs to a feature this version does not compute"):
        open_checkpoint(path)
    with pytest.raises(ConfigError, match="latent attention: rank is 40, wanted a multiple of 32"):
        Latent(40, 32, 64, 48)

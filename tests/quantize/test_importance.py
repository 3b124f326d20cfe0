"""Importance matrices of mixtures: each expert has a row and a count of its own, as llama.cpp's files have."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.gguf_file import read_gguf
from cpuspec.errors import ConfigError
from cpuspec.formats import get_format
from cpuspec.quantize.imatrix import Importance, of_matrices, read_importance, write_importance
from cpuspec.quantize.job import Job, measure_importance, quantize
from cpuspec.quantize.rounding import encode
from cpuspec.quantize.weights import Weights
from tools.make_tiny_model import make_tiny_gguf

DOWN, DOWN_IN_FILES = "layers.0.expert_down", "blk.0.ffn_down_exps.weight"
EXPERTS = 4


def name_of(name: str) -> str:
    return DOWN_IN_FILES if name == DOWN else name


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("mixture") / "source.gguf"
    return open_checkpoint(make_tiny_gguf(path, "qwen3moe", weight_format="f16", num_experts=EXPERTS, num_used=1))


@pytest.fixture(scope="module")
def measured(mixture: Checkpoint) -> Importance:
    """Of so few tokens that experts of some layer get none."""
    chunks = (np.arange(6, dtype=np.int32) * 7).reshape(1, 6)
    return measure_importance(Weights(mixture), chunks, lambda what, done, total: None)


def rows(*counts: int) -> Importance:
    """An importance of the experts that had so many rows each: means between 1e-4 and 1e-2, as of real models."""
    size = 128
    means = np.random.default_rng(1).uniform(1e-4, 1e-2, (len(counts), size)).astype(np.float32)
    return Importance({DOWN_IN_FILES: means}, {DOWN_IN_FILES: np.array(counts, np.float32)})


def test_every_expert_has_the_means_and_the_count_of_its_own_tokens(mixture: Checkpoint, measured: Importance) -> None:
    config, tokens = mixture.config, 6
    for name, shape in ((DOWN_IN_FILES, (EXPERTS, 128)), ("blk.0.ffn_gate_exps.weight", (EXPERTS, config.hidden_size))):
        assert measured.means[name].shape == shape
        assert measured.counts[name].sum() == tokens * config.experts.used
        assert ((measured.means[name] > 0).any(axis=1) == (measured.counts[name] > 0)).all()
    assert measured.means["blk.0.attn_q.weight"].shape == (1, config.hidden_size)
    assert measured.counts["blk.0.attn_q.weight"].tolist() == [tokens]
    assert any((measured.counts[f"blk.{i}.ffn_down_exps.weight"] == 0).any() for i in range(config.num_layers)), "tests below"


def test_the_experts_rows_make_the_mean_over_all_tokens(mixture: Checkpoint) -> None:
    """With all experts used by every token, each has the count of a dense matrix, and inputs of gates are alike."""
    config = replace(mixture.config, experts=replace(mixture.config.experts, used=EXPERTS))
    chunks = np.arange(12, dtype=np.int32).reshape(2, 6)
    found = measure_importance(Weights(replace(mixture, config=config)), chunks, lambda what, done, total: None)
    gate = found.means["blk.0.ffn_gate_exps.weight"]
    np.testing.assert_allclose(gate, np.broadcast_to(gate[:1], gate.shape), rtol=1e-5)
    assert found.counts["blk.0.ffn_gate_exps.weight"].tolist() == [12] * EXPERTS


def test_an_expert_without_tokens_gets_the_mean_of_the_others(mixture: Checkpoint) -> None:
    found = of_matrices(rows(300, 0, 100, 100), Weights(mixture), name_of)[DOWN]
    own = rows(300, 0, 100, 100).means[DOWN_IN_FILES]
    np.testing.assert_array_equal(found[[0, 2, 3]], own[[0, 2, 3]])
    np.testing.assert_allclose(found[1], np.average(own[[0, 2, 3]], axis=0, weights=[3, 1, 1]), rtol=1e-6)
    assert found.max() / found.min() > 10, "no row is nearly uniform"
    assert (of_matrices(rows(0, 0, 0, 0), Weights(mixture), name_of)[DOWN] == 1).all()


def test_each_expert_is_rounded_by_its_own_row(mixture: Checkpoint, tmp_path: Path) -> None:
    importance = rows(9, 0, 9, 9)
    quantize(mixture, tmp_path / "out.gguf", Job("q4_0", pure=True), threads=1, importance=importance)
    written = read_gguf(tmp_path / "out.gguf").tensors[DOWN_IN_FILES]
    weights = of_matrices(importance, Weights(mixture), name_of)[DOWN]
    matrices = mixture.tensors[DOWN].dequantize()
    format = get_format("q4_0")
    for expert in range(EXPERTS):
        assert np.array_equal(written.data[expert], encode(format, matrices[expert], weights[expert])), expert
    assert not np.array_equal(written.data[0], encode(format, matrices[0], weights[2])), "rows differ enough to show"


@pytest.mark.parametrize("name", ["matrix.gguf", "matrix.dat"])
def test_rows_of_experts_survive_both_files(mixture: Checkpoint, measured: Importance, tmp_path: Path, name: str) -> None:
    write_importance(tmp_path / name, measured)
    wanted_names = {f"layers.{i}.expert_{part}": f"blk.{i}.ffn_{part}_exps.weight" for i in range(2) for part in ("gate", "down")}
    wanted_names |= {name: name for name in mixture.tensors if name not in wanted_names}
    again = of_matrices(read_importance(tmp_path / name), Weights(mixture), wanted_names.__getitem__)
    wanted = of_matrices(measured, Weights(mixture), wanted_names.__getitem__)
    for part in ("layers.0.expert_gate", "layers.0.expert_down", "layers.1.expert_down"):
        reached = measured.counts[wanted_names[part]] > 0
        np.testing.assert_allclose(again[part][reached], wanted[part][reached], rtol=1e-6)
        # The older file keeps no counts of experts, so there each that was reached counts the same.
        assert (np.ptp(again[part][~reached], axis=1) > 0).all()


def test_older_files_of_llama_cpp_hold_the_rows_of_all_experts_under_one_name(mixture: Checkpoint, tmp_path: Path) -> None:
    """E x K values, those of an expert without tokens 1 each (llama.cpp, tools/imatrix, `save_imatrix_legacy`)."""
    calls, own = 5, rows(1, 1, 1, 1).means[DOWN_IN_FILES].copy()
    own[2] = 1
    text = DOWN_IN_FILES.encode()
    content = struct.pack("<ii", 1, len(text)) + text + struct.pack("<ii", calls, own.size) + (own * np.float32(calls)).tobytes()
    (tmp_path / "old.dat").write_bytes(content + struct.pack("<ii", calls, 0))
    found = of_matrices(read_importance(tmp_path / "old.dat"), Weights(mixture), name_of)[DOWN]
    np.testing.assert_allclose(found[[0, 1, 3]], own[[0, 1, 3]], rtol=1e-6)
    np.testing.assert_allclose(found[2], own[[0, 1, 3]].mean(axis=0), rtol=1e-6)


def test_one_row_for_all_experts_and_one_count_for_all_heads_are_read(mixture: Checkpoint) -> None:
    """The first is how cpuspec wrote mixtures, the second how llama.cpp writes tensors of several matrices without a choice."""
    one = np.arange(1, 129, dtype=np.float32)[None]
    found = of_matrices(Importance({DOWN_IN_FILES: one}, {DOWN_IN_FILES: np.ones(1, np.float32)}), Weights(mixture), name_of)
    np.testing.assert_array_equal(np.broadcast_to(found[DOWN], (EXPERTS, 128)), np.broadcast_to(one, (EXPERTS, 128)))
    flat = rows(1, 1, 1, 1).means[DOWN_IN_FILES].reshape(1, -1)
    found = of_matrices(Importance({DOWN_IN_FILES: flat}, {DOWN_IN_FILES: np.full(1, 7, np.float32)}), Weights(mixture), name_of)
    np.testing.assert_array_equal(found[DOWN], flat.reshape(EXPERTS, 128))


def test_another_number_of_experts_is_refused(mixture: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"has 384 values for blk\.0\.ffn_down_exps\.weight, wanted 128 for each of 4 matrices"):
        of_matrices(rows(1, 1, 1), Weights(mixture), name_of)


def test_the_gguf_file_has_a_count_for_each_expert(mixture: Checkpoint, measured: Importance, tmp_path: Path) -> None:
    """llama-quantize wants as many values as the tensor has inputs times matrices."""
    gguf = pytest.importorskip("gguf")
    write_importance(tmp_path / "matrix.gguf", measured)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "matrix.gguf").tensors}
    assert list(tensors[f"{DOWN_IN_FILES}.in_sum2"].shape) == [128, EXPERTS]
    assert list(tensors[f"{DOWN_IN_FILES}.counts"].shape) == [1, EXPERTS]
    assert measured.num_unreached > 0
    assert read_importance(tmp_path / "matrix.gguf").num_unreached == measured.num_unreached


def test_entries_have_the_names_of_the_files_tensors(tmp_path: Path) -> None:
    """Also where a name depends on other tensors: queries of DeepSeek's are attn_q_b only beside attn_q_a."""
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "latent.gguf", "deepseek2", weight_format="f16", shared_size=256))
    found = measure_importance(Weights(checkpoint), np.arange(6, dtype=np.int32).reshape(1, 6), lambda what, done, total: None)
    assert found.means.keys() - {"output.weight"} <= read_gguf(checkpoint.path).tensors.keys()
    assert "blk.0.attn_q_b.weight" in found.means

"""Embeddings: pooled states of a model, the same whatever runs beside them."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec import LLM, EngineConfig, SamplingParams
from cpuspec.backends import make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.heads.head import HeadNorm
from cpuspec.checkpoints.safetensors import read_safetensors
from cpuspec.engine.embedding import EmbeddingJob
from cpuspec.errors import BackendError, CheckpointError, ConfigError
from cpuspec.settings import POOLINGS
from cpuspec.text import make_tokenizer
from tests.backends.models import every_backend
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf, write_safetensors

TEXTS = [np.random.default_rng(length).integers(0, 384, length).tolist() for length in (1, 70, 5, 300, 33)]
_KEYS = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def embedding_model(directory: Path, pooling: str, **shape: Any) -> Path:
    """A directory as Qwen3-Embedding's: what writes is left out, and so is the prefix of names."""
    path = make_tiny_hf(directory, "qwen3", context_length=512, **shape)
    stored = read_safetensors((path / "model.safetensors").rename(path / "whole"))  # it stays mapped
    tensors = {name.removeprefix("model."): one.floats() for name, one in stored.items() if name != "lm_head.weight"}
    write_safetensors(path / "model.safetensors", tensors)
    (path / "1_Pooling").mkdir()
    modes = {key: name == pooling for name, key in _KEYS.items()}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    return path


def exact(path: Path, backend: str = "numpy", **settings: Any) -> LLM:
    """The model with as little rounding as the backend can."""
    activations = "auto" if backend in ("numba", "torch") else "f32"
    return LLM(
        path, backend=backend, settings=EngineConfig(kv_format="f32", activations=activations, keep_packed=False, **settings)
    )


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_those_of_transformers(tmp_path: Path, pooling: str, tied: bool) -> None:
    import torch
    from transformers import AutoModel

    path = embedding_model(tmp_path / "model", pooling, tied=tied)
    reference = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with exact(path) as llm, torch.no_grad():
        got = llm.embed(TEXTS)
        assert llm.pooling == pooling
        for text, vector in zip(TEXTS, got, strict=True):
            states = reference(torch.tensor([text])).last_hidden_state[0].numpy()
            state = {"last": states[-1], "mean": states.mean(axis=0), "cls": states[0]}[pooling]
            np.testing.assert_allclose(vector, state / np.linalg.norm(state), atol=1e-5)


@every_backend()
def test_every_backend_embeds(tmp_path: Path, name: str) -> None:
    path = embedding_model(tmp_path / "model", "last")
    with exact(path) as wanted, exact(path, name) as llm:
        np.testing.assert_allclose(llm.embed(TEXTS), wanted.embed(TEXTS), atol=2e-3)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_neither_company_nor_chunks_change_a_bit(tmp_path: Path, pooling: str) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", context_length=512)
    with LLM(path, settings=EngineConfig(max_sequences=3, keep_packed=False, threads=1)) as llm:
        alone = np.concatenate([llm.embed([text], pooling) for text in TEXTS])
        np.testing.assert_array_equal(llm.embed(TEXTS, pooling), alone)
        for rows in (1, 7, 64):
            job = llm.embedding_job(TEXTS, pooling)
            while not job.is_done:
                job.step(rows)
            np.testing.assert_array_equal(job.embeddings(), alone)
        assert len(np.unique(alone, axis=0)) == len(TEXTS)


def test_dimensions_are_the_first_numbers_at_length_one(tmp_path: Path) -> None:
    with exact(embedding_model(tmp_path / "model", "last")) as llm:
        whole, short = llm.embed(TEXTS), llm.embed(TEXTS, dimensions=16)
    np.testing.assert_allclose(short, whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, atol=1e-6)


def test_answers_that_run_beside_embeddings_stay_the_same(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", context_length=512)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with LLM(path, settings=EngineConfig(keep_packed=False, threads=1)) as llm:
        answer, vectors = llm.generate("the cat", params)[0].token_ids, llm.embed(TEXTS, "mean")
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(llm.embed(TEXTS, "mean")))
        thread.start()
        answers = [llm.generate("the cat", params)[0].token_ids for _ in range(3)]
        thread.join()
    assert answers == [answer] * 3
    np.testing.assert_array_equal(found[0], vectors)


def test_states_that_are_not_finite_are_no_embeddings(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", context_length=64))
    norm = HeadNorm(np.full(checkpoint.config.hidden_size, np.nan, np.float32), 1e-6)
    job = EmbeddingJob(make_backend("numpy", checkpoint, EngineConfig(8, 64)), norm, [[1, 2, 3]], "last")
    job.step()
    with pytest.raises(BackendError, match="NaN or infinite"):
        job.embeddings()


def test_what_cannot_be_embedded_is_refused(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", context_length=64)
    checkpoint = open_checkpoint(path)
    size = checkpoint.config.hidden_size
    with LLM(path, settings=EngineConfig(keep_packed=False, threads=1)) as llm:
        for arguments, error in (
            ((["the"],), "was trained to write.*choose a pooling: last, mean, cls"),
            ((["the"], "max"), "pooling must be one of last, mean, cls; got 'max'"),
            ((["the"], "mean", size + 1), f"dimensions must be from 1 to {size}"),
            ((["the"], "mean", 0), f"dimensions must be from 1 to {size}"),
            (([[1] * 64], "mean"), "the prompt has 64 tokens"),
            (([[384]], "mean"), r"must be in \[0, 384\)"),
            ((7, "mean"), "prompts are texts"),
        ):
            with pytest.raises(ConfigError, match=error):
                llm.embed(*arguments)  # type: ignore[arg-type]
        assert llm.embed([], "mean").shape == (0, size)
    with pytest.raises(ConfigError, match="closed"):
        llm.embed("the", "mean")
    backend = make_backend("numpy", checkpoint, EngineConfig())
    with (
        LLM.from_backend(backend, make_tokenizer(checkpoint)) as bare,
        pytest.raises(ConfigError, match="give it to from_backend"),
    ):
        bare.embed("the", "mean")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{}", "asks for 0 of"),
        ('{"pooling_mode_lasttoken": true, "pooling_mode_cls_token": true}', "asks for 2 of"),
        ('{"pooling_mode_lasttoken": 1}', "pooling_mode_lasttoken is 1"),
        ("[", "not sound JSON"),
    ],
)
def test_a_pooling_file_that_lies_is_refused(tmp_path: Path, text: str, error: str) -> None:
    path = embedding_model(tmp_path / "model", "last")
    (path / "1_Pooling" / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=error):
        open_checkpoint(path)

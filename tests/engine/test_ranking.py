"""How well documents answer a query: models that were trained to rank, and embeddings that are compared."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpuspec import LLM, EngineConfig
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.checkpoint import RANKING_PROMPT, Ranker
from cpuspec.checkpoints.gguf import RANK, RANKS
from cpuspec.checkpoints.gguf_file import read_gguf
from cpuspec.checkpoints.gguf_writer import TensorInfo, entry, write_gguf
from cpuspec.checkpoints.safetensors import read_safetensors
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.quantize.job import Job, quantize
from tests.engine.test_embedding import embedding_model, exact
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf, write_safetensors

QUERY, DOCUMENTS = "what does the cat do?", ["the cat sat on the mat", "a dog", "<|im_end|> and {query}", "the cat " * 40]
WEIGHT = np.random.default_rng(1).standard_normal((2, 256)).astype(np.float32) / 8


def by_token(directory: Path) -> Path:
    return make_tiny_hf(directory / "Tiny-Reranker", "qwen3", context_length=1024)


def by_matrix(directory: Path, rows: int = 1) -> Path:
    """As tomaarsen/Qwen3-Reranker-0.6B-seq-cls: no output matrix, and a small one for the score."""
    path = make_tiny_hf(directory / "tiny", "qwen3", context_length=1024)
    stored = read_safetensors((path / "model.safetensors").rename(path / "whole"))
    tensors = {name: one.floats() for name, one in stored.items() if name != "lm_head.weight"}
    write_safetensors(path / "model.safetensors", tensors | {"score.weight": QuantTensor.encode(get_format("f32"), WEIGHT[:rows])})
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": rows, "pad_token_id": 0}
    (path / "config.json").write_text(json.dumps(config))
    return path


def gguf_with(source: Path, path: Path, entries: dict[str, int | str], weight: np.ndarray | None) -> Path:
    """A copy of a GGUF file with other entries, and the matrix of a model that ranks."""
    file = read_gguf(source)
    tensors = dict(file.tensors) | ({} if weight is None else {RANKS: QuantTensor.encode(get_format("f32"), weight)})
    told = {key: data.tobytes() for key, data in file.entries.items()} | {key: entry(key, one) for key, one in entries.items()}
    with path.open("wb") as stream:
        write_gguf(
            stream,
            told,
            {name: TensorInfo(one.format, one.shape) for name, one in tensors.items()},
            lambda name: tensors[name].data,
        )
    return path


def filled(document: str) -> str:
    before, between, behind = RANKING_PROMPT.replace("{document}", "{query}").split("{query}")
    return f"{before}{QUERY}{between}{document}{behind}"


@pytest.mark.parametrize("make", [by_token, by_matrix])
def test_scores_are_those_of_transformers(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    path = make(tmp_path)
    is_by_token = make is by_token
    kind = AutoModelForCausalLM if is_by_token else AutoModelForSequenceClassification
    reference, tokenizer = kind.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.ranker
    if is_by_token:  # the tiny vocabulary has no token "yes"
        checkpoint = replace(checkpoint, ranker=replace(checkpoint.ranker, labels=("y", "n")))
    plain = [one for one in DOCUMENTS if "<|" not in one]
    with LLM(checkpoint, backend="numpy", settings=EngineConfig(kv_format="f32", activations="f32")) as llm, torch.no_grad():
        got = llm.rank(QUERY, plain)
        for document, score in zip(plain, got, strict=True):
            logits = reference(tokenizer(filled(document), return_tensors="pt").input_ids).logits.double()
            if is_by_token:
                labels = logits[0, -1, tokenizer.convert_tokens_to_ids(["n", "y"])]
                assert abs(score - labels.softmax(-1)[1]) < 1e-4
            else:
                assert abs(score - logits[0, 0].sigmoid()) < 1e-4
    assert len({round(score, 3) for score in got}) > 1


def test_a_text_of_a_document_is_no_control_token_and_no_place(tmp_path: Path) -> None:
    with LLM(make_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", context_length=1024), settings=EngineConfig(threads=1)) as llm:
        ids = llm.tokenizer.encode_filled(RANKING_PROMPT, {"query": QUERY, "document": DOCUMENTS[2]})
        assert llm.tokenizer.decode(ids, skip_special=False) == filled(DOCUMENTS[2])
        end = llm.tokenizer.token_id("<|im_end|>")
        assert ids.count(end) == RANKING_PROMPT.count("<|im_end|>")
        plain = llm.tokenizer.encode_filled(RANKING_PROMPT, {"query": QUERY, "document": DOCUMENTS[0]})
        assert plain == llm.tokenizer.encode(filled(DOCUMENTS[0]), parse_special=True)


def test_a_gguf_file_ranks_by_its_matrix_and_its_prompt(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", weight_format="f32", context_length=1024)
    prompt = "{query} or <|im_start|>{document}"
    entries: dict[str, int | str] = {"qwen3.pooling_type": RANK, "tokenizer.chat_template.rerank": prompt}
    path = gguf_with(source, tmp_path / "ranks.gguf", entries, WEIGHT)
    with exact(path) as llm, exact(source) as plain:
        assert llm.ranker
        assert llm.ranker.prompt == prompt
        ids = [plain.tokenizer.encode(f"{QUERY} or <|im_start|>{one}", parse_special=True) for one in DOCUMENTS[:2]]
        job = plain.embedding_job(ids, "last")
        while not job.is_done:
            job.step()
        logits = job.pooled() @ WEIGHT.T
        wanted = np.exp(logits[:, 0]) / np.exp(logits).sum(axis=1)
        np.testing.assert_allclose(llm.rank(QUERY, DOCUMENTS[:2]), wanted, atol=1e-6)
        assert llm.rank(QUERY, []) == []


def test_a_ranking_model_that_was_quantized_ranks(tmp_path: Path) -> None:
    path = by_matrix(tmp_path)
    out = tmp_path / "out.gguf"
    quantize(open_checkpoint(path), out, Job("q8_0"), threads=1)
    with exact(path) as wanted, exact(out) as llm:
        np.testing.assert_allclose(llm.rank(QUERY, DOCUMENTS), wanted.rank(QUERY, DOCUMENTS), atol=0.02)


def test_neither_company_nor_chunks_change_a_score(tmp_path: Path) -> None:
    with LLM(by_matrix(tmp_path), settings=EngineConfig(max_sequences=3, keep_packed=False, threads=1)) as llm:
        alone = [llm.rank(QUERY, [one])[0] for one in DOCUMENTS]
        assert llm.rank(QUERY, DOCUMENTS) == alone
        job = llm.ranking_job([(QUERY, one) for one in DOCUMENTS])
        while not job.is_done:
            job.step(7)
        assert job.scores() == alone


def test_embeddings_rank_by_their_angle(tmp_path: Path) -> None:
    with exact(embedding_model(tmp_path / "model", "last")) as llm:
        query, *documents = llm.embed([QUERY, *DOCUMENTS[:2]]).astype(np.float64)
        np.testing.assert_allclose(llm.rank(QUERY, DOCUMENTS[:2]), [query @ one for one in documents], atol=1e-6)


def test_what_ranks_no_texts_is_refused(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", context_length=1024)
    settings = EngineConfig(keep_packed=False, threads=1)
    with (
        LLM(source, settings=settings) as llm,
        pytest.raises(ConfigError, match="was trained to write"),
    ):
        llm.rank(QUERY, DOCUMENTS)
    for entries, weight in (
        ({"qwen3.pooling_type": RANK}, None),
        ({"qwen3.pooling_type": RANK}, np.zeros((3, 256), np.float32)),
        ({"qwen3.pooling_type": RANK}, np.zeros((1, 32), np.float32)),
    ):
        with pytest.raises(CheckpointError, match=r"rank|scores are made"):
            open_checkpoint(gguf_with(source, tmp_path / "wrong.gguf", dict(entries), weight))
    checkpoint = open_checkpoint(source)
    with (
        LLM(replace(checkpoint, ranker=Ranker()), settings=settings) as llm,
        pytest.raises(ConfigError, match="no such tokens"),
    ):
        llm.rank(QUERY, DOCUMENTS[:2])

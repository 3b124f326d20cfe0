"""Extracted states are those that the model computes, whatever the shards and however often a run was broken off."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpuspec.backends import Backend, make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.model.batch import ForwardBatch
from cpuspec.platform import SYSTEM
from cpuspec.settings import EngineConfig
from cpuspec.text import Tokenizer, make_tokenizer
from cpuspec.train import extract as extracting
from cpuspec.train.answers import AnswerFiles, header_path, tokenizer_identity
from cpuspec.train.extract import Extractor, ExtractSummary, ReadText, extract, likeliest_ids, read_layers, read_texts, usual_layers
from cpuspec.train.samples import FINAL, Extraction, open_samples
from tests.train.models import tiny
from tools.make_tiny_model import make_tiny_gguf

LAYERS = (1, 2, FINAL, 0)
TOP, LENGTH = 5, 300


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return make_tokenizer(checkpoint)


@pytest.fixture(scope="module", params=["numba", "numpy"])
def backend(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = make_backend(request.param, checkpoint, EngineConfig(threads=1, keep_packed=False, max_rows=64))
    yield made
    made.close()


def about(checkpoint: Checkpoint, dtype: str = "f32", top: int = TOP, layers: tuple[int | str, ...] = LAYERS) -> Extraction:
    config = checkpoint.config
    files = ({"name": "tiny.gguf", "bytes": 1, "sha256": "0" * 64},)
    return Extraction("tiny", files, config.vocab_size, config.hidden_size, config.num_layers, layers, dtype, top)


def random_texts(checkpoint: Checkpoint, number: int = 9) -> list[ReadText]:
    rng = np.random.default_rng(0)
    lengths = [1, 150, 64, *rng.integers(1, 80, number - 3).tolist()]
    texts = [ReadText(rng.integers(0, checkpoint.config.vocab_size, length).tolist(), length // 3) for length in lengths]
    return [*texts[:-1], texts[-1]._replace(num_prompt=lengths[-1])]  # no token of the last one counts


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_states_and_logits_are_those_of_one_forward(checkpoint: Checkpoint, backend: Backend, tmp_path: Path) -> None:
    texts, said = random_texts(checkpoint), about(checkpoint)
    summary = extract(Extractor(backend, checkpoint, LAYERS, TOP, LENGTH), said, iter(texts), tmp_path / "out")
    samples = open_samples(tmp_path / "out")
    assert samples.about == said
    assert (len(samples), samples.num_tokens) == (summary.num_samples, summary.num_tokens) == (9, sum(len(one[0]) for one in texts))
    output = checkpoint.tensors["embed"].dequantize()
    whole = make_backend("numpy", checkpoint, EngineConfig())
    for sample, text in zip(samples, texts, strict=True):
        ids = text.token_ids
        assert sample.token_ids.tolist() == ids
        assert sample.answer.tolist() == [i >= text.num_prompt for i in range(len(ids))]
        rows = list(range(len(ids)))
        # The reference multiplies in f32, the compiled kernels with inputs in 8 bits.
        batch = ForwardBatch(ids, rows, [0], [0, len(ids)], None, rows, (0, 1, 2))
        reference = whole.forward(batch, whole.new_cache(1, LENGTH))
        for place, layer in ((0, 1), (1, 2), (3, 0)):
            wanted, got = reference.hidden[layer], sample.hidden[:, place]
            assert np.abs(got - wanted).max() < (1e-4 if backend.name == "numpy" else 0.1) * np.abs(wanted).max()
        assert sample.top_ids is not None
        assert sample.top_logits is not None
        assert sample.log_sum is not None
        logits = sample.hidden[:, 2] @ output.T  # the final state is what the output matrix multiplies
        scale = np.abs(logits).max()
        tolerance = (1e-4 if backend.name == "numpy" else 0.05) * scale
        judged, theirs = judged_rows(text), np.take_along_axis(logits, sample.top_ids, 1)
        np.testing.assert_allclose(theirs[judged], sample.top_logits[judged], atol=tolerance)
        np.testing.assert_allclose(np.log(np.exp(logits).sum(axis=1))[judged], sample.log_sum[judged], atol=tolerance)
        assert (np.diff(sample.top_logits, axis=1) <= 0).all()
        assert not np.exp(sample.top_logits - sample.log_sum[:, None])[~judged].any()
    whole.close()


def judged_rows(text: ReadText) -> NDArray[np.bool_]:
    """Rows whose likeliest tokens are kept: those that count for the loss, and the one before them; all where none counts."""
    return np.arange(len(text.token_ids)) >= (text.num_prompt - 1) * (text.num_prompt < len(text.token_ids))


def test_compiled_states_are_the_bits_of_a_forward_of_another_size(checkpoint: Checkpoint, tmp_path: Path) -> None:
    texts, engine = random_texts(checkpoint), EngineConfig(threads=1, keep_packed=False)
    backend = make_backend("numba", checkpoint, engine)
    extract(Extractor(backend, checkpoint, LAYERS, TOP, LENGTH), about(checkpoint), iter(texts), tmp_path / "out")
    for sample, text in zip(open_samples(tmp_path / "out"), texts, strict=True):
        rows = list(range(len(text.token_ids)))
        batch = ForwardBatch(text.token_ids, rows, [0], [0, len(rows)], None, rows, (0, 1, 2), of_prompts=True)
        output = backend.forward(batch, backend.new_cache(1, LENGTH))
        for place, layer in ((0, 1), (1, 2), (3, 0)):
            np.testing.assert_array_equal(sample.hidden[:, place], output.hidden[layer])
        judged = judged_rows(text)
        assert sample.top_logits is not None
        np.testing.assert_array_equal(sample.top_logits[judged], -np.sort(-output.logits[judged], axis=1)[:, :TOP])
    backend.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_the_final_state_is_what_the_output_matrix_multiplies(tmp_path: Path, architecture: str) -> None:
    model = open_checkpoint(make_tiny_gguf(tmp_path / "other.gguf", architecture, embed_format="f32", weight_format="q8_0"))
    backend = make_backend("numpy", model, EngineConfig())
    said, text = about(model, top=model.config.vocab_size, layers=(FINAL,)), ReadText(list(range(5, 25)), 0)
    extract(Extractor(backend, model, (FINAL,), said.top, LENGTH), said, iter([text]), tmp_path / "out")
    (sample,) = open_samples(tmp_path / "out")
    assert sample.top_ids is not None
    logits = sample.hidden[:, 0] @ model.tensors["embed"].dequantize().T
    np.testing.assert_allclose(np.take_along_axis(logits, sample.top_ids, 1), sample.top_logits, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "int8"])
@pytest.mark.parametrize("num_done", [0, 2, 5, 8])
def test_a_run_that_was_broken_off_goes_on_to_the_same_bytes(
    checkpoint: Checkpoint, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, num_done: int
) -> None:
    texts, said = random_texts(checkpoint), about(checkpoint, dtype)
    monkeypatch.setattr(extracting, "_SHARD_BYTES", 4 * len(LAYERS) * said.hidden_size * 100)  # of a hundred tokens
    extractor = Extractor(backend, checkpoint, LAYERS, TOP, LENGTH)
    extract(extractor, said, iter(texts), tmp_path / "whole")

    def broken_off() -> Iterator[ReadText]:
        yield from texts[:num_done]
        raise KeyboardInterrupt

    first = extract(extractor, said, broken_off(), tmp_path / "parts")
    assert first.interrupted
    second = extract(extractor, said, iter(texts), tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert len(contents(tmp_path / "whole")) > 3
    assert second.num_kept == first.num_samples
    assert extract(extractor, said, iter(texts), tmp_path / "parts").num_new_tokens == 0


def test_more_texts_are_added_and_a_limit_of_tokens_ends_a_run(checkpoint: Checkpoint, backend: Backend, tmp_path: Path) -> None:
    texts, said = random_texts(checkpoint), about(checkpoint)
    extractor = Extractor(backend, checkpoint, LAYERS, TOP, LENGTH)
    assert extract(extractor, said, iter(texts), tmp_path / "out", max_tokens=100).num_samples == 2
    assert extract(extractor, said, iter(texts[:4]), tmp_path / "out").num_samples == 4
    assert extract(extractor, said, iter(texts), tmp_path / "out").num_samples == 9
    assert [one.token_ids.tolist() for one in open_samples(tmp_path / "out")] == [one.token_ids for one in texts]


def test_memory_holds_one_shard_and_one_text(
    checkpoint: Checkpoint, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, full = about(checkpoint), 100
    monkeypatch.setattr(extracting, "_SHARD_BYTES", 4 * len(LAYERS) * said.hidden_size * full)
    texts = [ReadText([1] * 30, 0)] * 40
    given = most = 0

    def counted() -> Iterator[ReadText]:
        nonlocal given, most
        for text in texts:
            most = max(most, given - 120 * len([*(tmp_path / "out").glob("shard-*")]))
            given += len(text.token_ids)
            yield text

    extract(Extractor(backend, checkpoint, LAYERS, TOP, LENGTH), said, counted(), tmp_path / "out")
    assert 0 < most < full
    assert open_samples(tmp_path / "out").num_shards == 10


@pytest.mark.parametrize(("rows", "size", "num"), [(3, 384, 5), (2, 100, 100), (1, 1, 1), (4, 1000, 70), (3, 65, 64), (2, 200, 1)])
def test_the_likeliest_are_those_of_a_whole_sort(rows: int, size: int, num: int) -> None:
    logits = np.random.default_rng(size).integers(-500, 500, (rows, size)).astype(np.float32) / 8
    ids, values, log_sum = likeliest_ids(logits, num)
    np.testing.assert_array_equal(values, -np.sort(-logits, axis=1)[:, :num])
    np.testing.assert_array_equal(np.take_along_axis(logits, ids, axis=1), values)
    assert all(len(set(row)) == num for row in ids.tolist())
    exact = logits.astype(np.float64)
    np.testing.assert_allclose(log_sum, np.log(np.exp(exact).sum(axis=1)), rtol=1e-6)
    for row_ids, row in zip(ids.tolist(), values.tolist(), strict=True):
        assert all(a < b for (a, x), (b, y) in pairwise(zip(row_ids, row, strict=True)) if x == y)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "bf16"}, "dtype"),
        ({"top": 4}, "top"),
        ({"layers": (0,)}, "layers"),
        ({"files": ({"name": "a", "sha256": "1" * 64},)}, "files"),
    ],
)
def test_samples_of_other_settings_are_not_gone_on_with(
    checkpoint: Checkpoint, backend: Backend, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    texts, said = random_texts(checkpoint), about(checkpoint)
    extractor = Extractor(backend, checkpoint, LAYERS, TOP, LENGTH)
    extract(extractor, said, iter(texts[:3]), tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(ConfigError, match=named):
        extract(extractor, Extraction(**vars(said) | change), iter(texts), tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_samples_of_other_texts_are_not_gone_on_with(checkpoint: Checkpoint, backend: Backend, tmp_path: Path) -> None:
    texts, said = random_texts(checkpoint), about(checkpoint)
    extractor = Extractor(backend, checkpoint, LAYERS, TOP, LENGTH)
    extract(extractor, said, iter(texts[:3]), tmp_path / "out")
    for other in ([texts[0], texts[2]], texts[:2], [*texts[:2], ReadText(texts[2].token_ids, 0)]):
        with pytest.raises(ConfigError, match="other texts"):
            extract(extractor, said, iter(other), tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(ConfigError, match="other files"):
        extract(extractor, said, iter(texts), tmp_path / "full")
    with (tmp_path / "out" / "extract.json").open("rb") as file:
        assert SYSTEM.try_lock(file)
        with pytest.raises(ConfigError, match="another run"):
            extract(extractor, said, iter(texts), tmp_path / "out")
    (tmp_path / "out" / "shard-00000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="shard-00000"):
        extract(extractor, said, iter(texts), tmp_path / "out")


def test_layers_are_named_as_heads_name_them() -> None:
    assert read_layers("0, 3,last,final", 8) == (0, 3, 7, FINAL)
    for wrong in ("8", "-1", "", "a", "1,,2", "7,last", "final,final", "1.0", "²"):
        with pytest.raises(ConfigError):
            read_layers(wrong, 8)


@pytest.mark.parametrize(("num_layers", "inputs"), [(30, (2, 15, 27)), (28, (2, 14, 25)), (3, (2, 1)), (1, (1,))])
def test_the_usual_layers_are_those_of_eagle_3(num_layers: int, inputs: tuple[int, ...]) -> None:
    assert usual_layers(num_layers) == (*(one - 1 for one in inputs), FINAL)


def test_files_are_read_as_what_they_are(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answers, others, plain = (tmp_path / name for name in ("answers.jsonl", "others.jsonl", "plain.txt"))
    line = {"id": "a@0", "source": "x", "temperature": 0.0, "prompt_ids": [1, 2, 3], "answer_ids": [4, 5, 6, 7]}
    answers.write_text(json.dumps(line) + "\n")
    others.write_text('{"ids": [1, 2, 3, 4, 5, 6]}\n{"text": "hello there"}\n')
    plain.write_text("hello there\n" * 3)
    assert list(read_texts([answers], AnswerFiles(tokenizer), 5)) == [ReadText([1, 2, 3, 4, 5], 3), ReadText([6, 7], 0)]
    hello, texts = tokenizer.encode("hello there"), list(read_texts([others], AnswerFiles(tokenizer), 100))
    assert texts == [ReadText([1, 2, 3, 4, 5, 6], 6), ReadText(hello, len(hello))]
    assert [one.num_prompt for one in read_texts([others, plain], AnswerFiles(tokenizer), 100, all_count=True)] == [0, 0, 0]
    ids = [token for text in read_texts([plain], AnswerFiles(tokenizer), 4) for token in text.token_ids]
    assert ids == tokenizer.encode("hello there\n" * 3, add_special=False)


def test_a_long_plain_text_is_read_in_pieces(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plain.txt"
    path.write_text("".join(f"the {number} line\n" for number in range(50)))
    whole = list(read_texts([path], AnswerFiles(tokenizer), 16))
    monkeypatch.setattr(extracting, "_PIECE_CHARACTERS", 30)
    assert list(read_texts([path], AnswerFiles(tokenizer), 16)) == whole
    assert {len(text.token_ids) for text in whole[:-1]} == {16}


def test_answers_of_another_vocabulary_and_broken_files_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answers, plain = tmp_path / "answers.jsonl", tmp_path / "plain.txt"
    line = {"id": "a@0", "source": "x", "temperature": 0.0, "prompt_ids": [1], "answer_ids": [4]}
    answers.write_text(json.dumps(line) + "\n")
    facts = {"format": "cpuspec-answers", "version": 1, "model": "other", "tokenizer_sha256": tokenizer_identity(tokenizer)}
    header_path(answers).write_text(json.dumps(facts))
    assert len(list(read_texts([answers], AnswerFiles(tokenizer), 5))) == 1
    header_path(answers).write_text(json.dumps(facts | {"tokenizer_sha256": "0" * 64}))
    with pytest.raises(ConfigError, match="answers of other"):
        list(read_texts([answers], AnswerFiles(tokenizer), 5))
    plain.write_bytes(b"hello \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        list(read_texts([plain], AnswerFiles(tokenizer), 5))
    answers.write_text('{"answer_ids": [1]}\n')
    header_path(answers).unlink()
    with pytest.raises(ConfigError, match=r"answers\.jsonl, line 1"):
        list(read_texts([answers], AnswerFiles(tokenizer), 5))


@pytest.mark.parametrize(("top", "max_length"), [(-1, 10), (1 << 20, 10), (0, 0), (0, 1 << 20)])
def test_what_the_model_cannot_give_is_refused(checkpoint: Checkpoint, backend: Backend, top: int, max_length: int) -> None:
    with pytest.raises(ConfigError):
        Extractor(backend, checkpoint, LAYERS, top, max_length)


def test_progress_counts_tokens(checkpoint: Checkpoint, backend: Backend, tmp_path: Path) -> None:
    seen: list[int] = []
    texts = random_texts(checkpoint)

    def note(summary: ExtractSummary) -> None:
        seen.append(summary.num_new_tokens)

    extract(
        Extractor(backend, checkpoint, LAYERS, 0, LENGTH), about(checkpoint, top=0), iter(texts), tmp_path / "out", on_progress=note
    )
    assert seen == np.cumsum([len(one.token_ids) for one in texts]).tolist()

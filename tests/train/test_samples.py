"""Samples on disk: what is written is read back, and nothing of a damaged directory is believed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from cpuspec.errors import CheckpointError
from cpuspec.train.samples import DTYPES, FINAL, METADATA, Extraction, Sample, open_samples, shard_path, write_shard

ABOUT = Extraction("tiny", ({"name": "tiny.gguf", "bytes": 1, "sha256": "0" * 64},), 100, 16, 4, (1, 3, FINAL), "bf16", 4)
LENGTHS = (3, 5, 1, 7)


def random_sample(rng: np.random.Generator, length: int, about: Extraction) -> Sample:
    return Sample(
        rng.integers(0, about.vocab_size, length).astype(np.int32),
        rng.integers(0, 2, length).astype(bool),
        rng.standard_normal((length, len(about.layers), about.hidden_size)).astype(np.float32),
        rng.integers(0, about.vocab_size, (length, about.top)).astype(np.int32) if about.top else None,
        rng.standard_normal((length, about.top)).astype(np.float32) if about.top else None,
        rng.standard_normal(length).astype(np.float32) if about.top else None,
    )


def written(directory: Path, about: Extraction = ABOUT) -> list[Sample]:
    """Four samples in two shards."""
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, length, about) for length in LENGTHS]
    about.write(directory)
    write_shard(shard_path(directory, 0), about, samples[:2])
    write_shard(shard_path(directory, 1), about, samples[2:])
    return samples


@pytest.mark.parametrize("top", [0, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 0.0), ("bf16", 2**-8), ("int8", 0.02)])
def test_samples_are_read_as_they_were_written(tmp_path: Path, dtype: str, tolerance: float, top: int) -> None:
    about = replace(ABOUT, dtype=dtype, top=top)
    samples = written(tmp_path, about)
    found = open_samples(tmp_path)
    assert found.about == about
    assert (len(found), found.lengths.tolist(), found.num_tokens) == (len(LENGTHS), list(LENGTHS), sum(LENGTHS))
    assert found.num_answer_tokens == sum(int(one.answer.sum()) for one in samples)
    for index, (got, wanted) in enumerate(zip(found, samples, strict=True)):
        np.testing.assert_allclose(got.hidden, wanted.hidden, rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(found.tokens(index)[0], wanted.token_ids)
        for name in ("token_ids", "answer", "top_ids", "top_logits", "log_sum"):
            np.testing.assert_array_equal(vars(got)[name], vars(wanted)[name])
    assert set(DTYPES) == {"f32", "bf16", "int8"}


@pytest.mark.parametrize("index", [-1, 4])
def test_a_sample_that_is_not_there_is_an_index_error(tmp_path: Path, index: int) -> None:
    written(tmp_path)
    with pytest.raises(IndexError):
        open_samples(tmp_path)[index]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("format", "other", "format"),
        ("version", 2, "version"),
        ("vocab_size", 0, "vocab_size"),
        ("hidden_size", "16", "hidden_size"),
        ("num_layers", 1 << 40, "num_layers"),
        ("layers", [], "layers"),
        ("layers", [4], "layers"),
        ("layers", [1, 1], "layers"),
        ("layers", [{}], "layers"),
        ("layers", [True], "layers"),
        ("dtype", "f64", "dtype"),
        ("top", 101, "top"),
        ("top", -1, "top"),
        ("files", [], "files"),
        ("files", [{"name": "a"}], "files"),
        ("layers", [1, 3], "hidden_states"),
        ("hidden_size", 8, "hidden_states"),
        ("dtype", "f32", "hidden_states"),
        ("top", 0, "log_sum"),
        ("vocab_size", 50, "token_ids"),
    ],
)
def test_metadata_that_lie_are_refused(tmp_path: Path, field: str, value: object, named: str) -> None:
    written(tmp_path)
    metadata = json.loads((tmp_path / METADATA).read_text())
    (tmp_path / METADATA).write_text(json.dumps(metadata | {field: value}))
    with pytest.raises(CheckpointError, match=named):
        open_samples(tmp_path)


Arrays = dict[str, NDArray[Any]]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda arrays: {name: array for name, array in arrays.items() if name != "answer"}, "answer is missing"),
        (lambda arrays: {name: array for name, array in arrays.items() if name != "starts"}, "starts is missing"),
        (lambda arrays: arrays | {"other": arrays["answer"]}, "other is not expected"),
        (lambda arrays: arrays | {"starts": np.array([0, 3, 3, 8])}, "starts"),
        (lambda arrays: arrays | {"starts": np.array([0, 8, 3, 8])}, "starts"),
        (lambda arrays: arrays | {"starts": np.array([0, 3, 9])}, "starts"),
        (lambda arrays: arrays | {"starts": np.array([0])}, "starts"),
        (lambda arrays: arrays | {"token_ids": arrays["token_ids"] - 100}, "token_ids"),
        (lambda arrays: arrays | {"token_ids": arrays["token_ids"][:-1]}, "answer"),
        (lambda arrays: arrays | {"token_ids": arrays["token_ids"].astype(np.int64)}, "token_ids"),
        (lambda arrays: arrays | {"answer": arrays["answer"] + np.uint8(1)}, "answer"),
        (lambda arrays: arrays | {"top_ids": arrays["top_ids"] + np.int32(100)}, "top_ids"),
        (lambda arrays: arrays | {"log_sum": arrays["log_sum"] * np.float32("nan")}, "log_sum"),
    ],
)
def test_a_shard_that_lies_is_refused(tmp_path: Path, change: Callable[[Arrays], Arrays], named: str) -> None:
    written(tmp_path, about := replace(ABOUT, dtype="f32"))
    path = shard_path(tmp_path, 0)
    save_file(change(load_file(path)), path)
    with pytest.raises(CheckpointError, match=named):
        [*open_samples(tmp_path)]
    assert about.top, "top_ids are there to be damaged"


def test_a_shard_that_is_missing_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    shard_path(tmp_path, 0).unlink()
    with pytest.raises(CheckpointError, match=r"shard-00000.safetensors is missing"):
        open_samples(tmp_path)


def test_a_directory_without_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"extract\.json does not exist"):
        open_samples(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        open_samples(tmp_path / "nowhere")

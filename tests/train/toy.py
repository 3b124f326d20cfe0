"""Samples of a toy language for a tiny target: which word follows a word, the text's first token decides."""

from pathlib import Path

import numpy as np

from cpuspec.backends import Backend, make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.heads.head import final_norm
from cpuspec.model.batch import ForwardBatch
from cpuspec.settings import EngineConfig
from cpuspec.train.samples import FINAL, Extraction, Sample, SampleSet, open_samples, shard_path, write_shard

SETTINGS = EngineConfig(threads=1, max_rows=128, kv_format="f32", keep_packed=False)
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_layers": 4, "vocab_size": 320}
LAYERS = (0, 1, 2)
FIRST, WORDS, MODES = 30, 16, 2  # the language's tokens: words from FIRST on, and behind them modes


def text(rng: np.random.Generator, length: int) -> np.ndarray:
    """Tokens of the language: one of two modes, a random word, and what follows."""
    follows = np.stack([np.random.default_rng([7, mode]).permutation(WORDS) for mode in range(MODES)])
    mode, words = int(rng.integers(MODES)), [int(rng.integers(WORDS))]
    while len(words) < length - 1:
        words.append(int(follows[mode, words[-1]]))
    return np.array([WORDS + mode, *words], np.int32) + FIRST


def hidden_of(backend: Backend, tokens: np.ndarray, layers: tuple[int, ...]) -> np.ndarray:
    """Outputs of the target's layers, [T, L, C]."""
    count = len(tokens)
    batch = ForwardBatch(tokens, list(range(count)), [0], [0, count], hidden_layers=layers)
    return np.stack(backend.forward(batch, backend.new_cache(1, count)).hidden, axis=1)


def make_samples(directory: Path, target: Checkpoint, number: int, *, top: int = 0, length: int = 28, seed: int = 0) -> SampleSet:
    """A directory of texts whose first three tokens are the prompt. top: as in `Extraction`; the first of them is nearly sure."""
    directory.mkdir(parents=True, exist_ok=True)
    rng, config = np.random.default_rng(seed), target.config
    about = Extraction(
        target.name,
        ({"name": "tiny", "bytes": 1, "sha256": "0"},),
        config.vocab_size,
        config.hidden_size,
        config.num_layers,
        (*LAYERS, FINAL),
        "f32",
        top,
    )
    samples, backend = [], make_backend("numpy", target, SETTINGS)
    for _ in range(number):
        tokens = text(rng, length + int(rng.integers(8)))
        hidden = hidden_of(backend, tokens, (*LAYERS, config.num_layers - 1))
        hidden[:, -1] = final_norm(target).applied(hidden[:, -1])
        rows: tuple[np.ndarray | None, ...] = (None, None, None)
        if top:
            ids = np.tile(np.arange(top, dtype=np.int32), (len(tokens), 1))
            ids[:-1, 0] = tokens[1:]
            logits = np.tile(np.array([8.0] + [0.0] * (top - 1), np.float32), (len(tokens), 1))
            rows = ids, logits, np.full(len(tokens), np.log(np.exp(8.0) + top), np.float32)
        answer = np.arange(len(tokens)) >= 3
        samples.append(Sample(tokens, answer, hidden, *rows))
    about.write(directory)
    write_shard(shard_path(directory, 0), about, samples)
    return open_samples(directory)

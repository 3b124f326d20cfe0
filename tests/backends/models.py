"""Tiny checkpoints and forwards for the backend tests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from cpuspec.backends import BACKENDS, Backend, check_backend, make_backend, stop_forward
from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.gguf_file import GGUF_FORMATS
from cpuspec.config import DeltaNet, Latent, Mamba2, ModelConfig, RopeScaling
from cpuspec.errors import BackendError
from cpuspec.formats import FORMATS, Format, QuantTensor, get_format
from cpuspec.model.batch import ForwardBatch
from cpuspec.model.cache import KVCache
from cpuspec.quantize.cast import cast, casts
from cpuspec.settings import EngineConfig
from tools.make_tiny_model import make_tiny_gguf, random_weights, tiny_config

TOKENS = np.random.default_rng(0).integers(0, 300, 45).tolist()

#            0
#          / | \
#         1  2  5
#         |  |\   .
#         3  4 6
TREE, PARENTS, DEPTHS = [11, 22, 33, 44, 55, 66, 77], [-1, 0, 0, 1, 2, 0, 2], np.array([0, 1, 1, 2, 2, 1, 2])
PATHS = ([0, 1, 3], [0, 2, 4], [0, 5], [0, 2, 6])

# The shape of most tests' models.
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}

# A format of each reader of the kernels, and some with other bits and scales.
CLASSES = tuple({row.reader: name for name, row in reversed(FORMATS.items())}.values())
CLASSES = tuple(dict.fromkeys((*CLASSES, "q4_k", "q6_k", "q8_0", "int3_g64_asym")))

# Of a model in each format: some take microseconds a value to encode.
SMALLEST = {"num_layers": 1, "intermediate_size": 256}

# Mixtures of experts, each of a family or of a form of its own: arguments of `make_tiny_model.tiny_config`.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3moe": {"architecture": "qwen3moe", "num_layers": 3, "dense_layers": (1,), "tied": False},
    "qwen2moe": {"architecture": "qwen2moe", "num_layers": 3, "dense_layers": (1,), "shared_size": 96},
    "olmoe": {"architecture": "olmoe", "tied": False},
    "mixtral": {"architecture": "mixtral", "tied": False},
    "granitemoe": {"architecture": "granitemoe"},
    "granitemoeshared": {"architecture": "granitemoe", "shared_size": 128, "tied": False},
    "ernie4_5_moe": {"architecture": "ernie4_5_moe", "num_layers": 3, "dense_layers": (0,), "shared_size": 256, "head_dim": 32},
    "glm4moe": {
        **{"architecture": "glm4moe", "num_layers": 3, "dense_layers": (0,), "shared_size": 128, "tied": False, "qkv_bias": True},
        **{"qk_norm": True, "rope_dims": 32, "router": {"normalised": True, "scale": 2.5, "groups": 2, "groups_used": 1}},
    },
    "glm4moe, not normalised": {
        "architecture": "glm4moe",
        "rope_dims": 32,
        "shared_size": 256,
        "router": {"normalised": False, "scale": 0.5},
    },
    "bailingmoe2": {
        **{"architecture": "bailingmoe2", "num_layers": 3, "dense_layers": (0,), "shared_size": 128, "tied": False},
        **{"rope_dims": 32, "router": {"normalised": True, "scale": 2.5, "groups": 4, "groups_used": 2}},
    },
    "hunyuan-moe": {"architecture": "hunyuan-moe", "shared_size": 128, "num_used": 2},
}


# A model of each family with a convolution or a state: arguments of `make_tiny_model.tiny_config`.
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {"architecture": "lfm2", "num_layers": 3},
    "lfm2moe": {"architecture": "lfm2moe", "num_layers": 3, "dense_layers": (0,)},
    "granitehybrid": {"architecture": "granitehybrid"},
    "granitehybrid-moe": {"architecture": "granitehybrid-moe", "shared_size": 128, "tied": False},
    "mamba2": {"architecture": "mamba2", "tied": False, "mamba2": Mamba2(1, 48, 16, 32, taps=3)},
    "nemotron_h": {"architecture": "nemotron_h", "num_layers": 4, "tied": False, "mamba2": Mamba2(4, 16, 8, 64, least_step=0.6)},
    "nemotron_h_moe": {"architecture": "nemotron_h_moe", "num_layers": 4, "shared_size": 96, "tied": False},
    "falcon-h1": {"architecture": "falcon-h1", "tied": False},
    "falcon-h1 with norms": {"architecture": "falcon-h1", "tied": False, "mamba2": Mamba2(2, 32, 16, 16, bias=False)},
    "qwen35": {"architecture": "qwen35", "num_layers": 4},
    "qwen35 with many taps": {"architecture": "qwen35", "tied": False, "delta": DeltaNet(1, 32, 2, 64, taps=16, tiled=True)},
    "qwen35moe": {"architecture": "qwen35moe", "num_layers": 4, "shared_size": 96, "tied": False},
    "qwen3next": {"architecture": "qwen3next", "num_layers": 5, "shared_size": 96, "tied": False},
}


# Of families whose keys and values are made of one vector.
YARN = RopeScaling("yarn", factor=40.0, original_context_length=64, attention_factor=1.0)
_SPARSE = {"num_layers": 2, "dense_layers": (0,), "tied": False}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek2": {
        **{"architecture": "deepseek2", **_SPARSE, "shared_size": 128, "rope_scaling": YARN, "mscale": 1.0},
        "router": {"normalised": True, "scale": 2.5, "groups": 4, "groups_used": 2},
    },
    "deepseek2 without a rank of queries": {
        **{"architecture": "deepseek2", "num_layers": 1, "shared_size": 128, "num_heads": 3},
        **{"latent": Latent(32, 16, 32, 96), "router": {"normalised": True, "scale": 1.5}},
    },
    "deepseek_v2": {
        **{"architecture": "deepseek_v2", **_SPARSE, "shared_size": 256, "rope_scaling": YARN, "mscale": 0.707},
        "latent": Latent(64, 32, 64, 48),
    },
    "glm4_moe_lite": {
        **{"architecture": "glm4_moe_lite", **_SPARSE, "shared_size": 128, "num_heads": 5},
        **{"latent": Latent(64, 32, 64, 64, q_rank=96), "router": {"normalised": True, "scale": 1.8}},
    },
    "mistral4": {"architecture": "mistral4", "shared_size": 128, "tied": False, "router": {"normalised": True}},
}


MIXTURES |= LATENT
MIXTURES["gemma4-moe"] = {"architecture": "gemma4-moe", "same_values": True}
# Gemma 4: dense, with values made of keys, and an E model.
GEMMA4: dict[str, dict[str, Any]] = {
    "gemma4": {"architecture": "gemma4", "num_layers": 4},
    "gemma4, values of keys": {"architecture": "gemma4", "num_layers": 4, "same_values": True, "tied": False},
    "gemma4, E": {"architecture": "gemma4", "num_layers": 6, "shared_layers": 2, "layer_input_size": 32},
    "gemma4_unified": {"architecture": "gemma4_unified", "num_layers": 4, "same_values": True},
}


def in_gguf(mixture: str) -> dict[str, Any]:
    """One of MIXTURES with two layers, the first of which may be dense: GGUF files name no others."""
    options = MIXTURES[mixture]
    return {**options, "num_layers": 2, "dense_layers": (0,) * (options.get("dense_layers") == (0,))}


def missing(name: str) -> str:
    """Why the backend cannot be made here; "" where it can."""
    try:
        check_backend(name)
    except BackendError as error:
        return str(error)
    return ""


def every_backend(names: Sequence[str] = BACKENDS) -> pytest.MarkDecorator:
    """The test with each of these as `name`; what is not installed is skipped, and says so."""
    skipped = {name: pytest.mark.skip(reason=why) for name in names if (why := missing(name))}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=skipped.get(name, ())) for name in names])


def tiny(tmp_path_factory, *, weight_format: str = "q4_0", **options) -> Checkpoint:
    """A small random model, opened from a file of its own; where the file cannot hold the format, its f32 matrices are encoded."""
    in_file = weight_format if weight_format in GGUF_FORMATS else "f32"
    path = make_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", weight_format=in_file, **options)
    checkpoint = open_checkpoint(path)
    if in_file == weight_format:
        return checkpoint
    format = get_format(weight_format)
    matrices = {n: t for n, t in checkpoint.tensors.items() if len(t.shape) == 2 and t.format.name == in_file}
    encoded = {n: QuantTensor.encode(format, t.dequantize()) for n, t in matrices.items()}
    return replace(checkpoint, tensors={**checkpoint.tensors, **encoded})


@dataclass(frozen=True)
class Flagged:
    """The part of a Checkpoint that a backend reads."""

    config: ModelConfig
    tensors: dict[str, QuantTensor]
    name: str = "random"


def flagged(weight_format: str = "f32", *, num_layers: int = 2, **flags: object) -> Flagged:
    """A small random model with any fields of the configuration, whether a family has them so or not."""
    config = replace(tiny_config("llama", num_layers=num_layers, head_dim=32, num_heads=6, num_kv_heads=2), **flags)
    weights, rng = random_weights(config), np.random.default_rng(5)
    for name in [f"layers.{i}.{part}_post_norm" for i in range(num_layers) for part in ("attn", "mlp")]:
        weights.setdefault(name, (1 + 0.2 * rng.standard_normal(config.hidden_size)).astype(np.float32))
    formats = {1: "f32", 2: weight_format}
    return Flagged(config, {name: QuantTensor.encode(get_format(formats[w.ndim]), w) for name, w in weights.items()})


def cast_checkpoint(checkpoint: Checkpoint, format: Format) -> Checkpoint:
    """The checkpoint with `casts` made, as backends make them when they load it; every other tensor is the very same object."""
    wanted, tensors = casts(checkpoint, format), dict(checkpoint.tensors)
    tied = checkpoint.config.tied_embeddings and "output" not in wanted
    if not tied:
        tensors.setdefault("output", tensors["embed"])
    tensors |= {name: cast(tensors[name], to) for name, to in wanted.items()}
    return replace(checkpoint, config=replace(checkpoint.config, tied_embeddings=tied), tensors=tensors)


def forward(
    backend: Backend,
    cache: KVCache,
    rows: dict[int, Sequence[int]],
    *,
    parents: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    logit_rows: Sequence[int] | None = None,
    hidden_layers: tuple[int, ...] = (),
):
    """Append `rows` (slot -> tokens) and return the output."""
    starts = np.cumsum([0, *(len(tokens) for tokens in rows.values())]).astype(np.int32)
    if positions is None:
        positions = np.concatenate([cache.lengths[slot] + np.arange(len(tokens)) for slot, tokens in rows.items()])
    batch = ForwardBatch(
        tokens=np.array([t for tokens in rows.values() for t in tokens], np.int32),
        positions=np.asarray(positions, np.int32),
        slots=np.array(list(rows), np.int32),
        q_start=starts,
        parents=None if parents is None else np.asarray(parents, np.int32),
        logit_rows=None if logit_rows is None else np.asarray(logit_rows, np.int32),
        hidden_layers=hidden_layers,
    )
    return backend.forward(batch, cache)


def in_chunks(backend: Backend, tokens: Sequence[int], size: int = 64, capacity: int = 0) -> np.ndarray:
    """Logits of `tokens`, fed `size` at a time to a new cache."""
    cache = backend.new_cache(1, capacity or max(64, len(tokens)))
    return np.concatenate([forward(backend, cache, {0: tokens[i : i + size]}).logits for i in range(0, len(tokens), size)])


@contextmanager
def asked_to_stop(backend: Backend) -> Iterator[None]:
    """Another thread asks all the time for the end of the forward that runs."""
    over = Event()

    def ask() -> None:
        while not over.is_set():
            stop_forward(backend)

    thread = Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def read_until_stopped(backend: Backend, cache: KVCache) -> None:
    """Run forwards until one is stopped: another thread may not come to run within one, which takes a millisecond."""
    while True:
        backend.forward(ForwardBatch(TOKENS, list(range(len(TOKENS))), [0], [0, len(TOKENS)], stops_early=True), cache)
        cache.truncate(0, 0)


def reference(checkpoint: Checkpoint, tokens: Sequence[int] = TOKENS, kv_format: str = "f32") -> np.ndarray:
    """Logits of `tokens` in f64."""
    engine = EngineConfig(max_rows=len(tokens), kv_format=kv_format)
    return in_chunks(NumpyBackend(checkpoint, engine, np.float64), tokens, len(tokens))


def computed(name: str, checkpoint: Checkpoint, tokens: Sequence[int] = TOKENS, size: int = 64, **settings) -> np.ndarray:
    """Logits of `tokens`, fed `size` at a time, by a backend made for this; its KV format is f32 unless `settings` say another."""
    engine = {"threads": 1, "max_rows": max(size, 64), "kv_format": "f32", "keep_packed": False} | settings
    backend = make_backend(name, checkpoint, EngineConfig(**engine))
    try:
        return in_chunks(backend, tokens, size)
    finally:
        backend.close()


def check_rows(
    checkpoint: Checkpoint | Flagged,
    tokens: Sequence[int] = TOKENS,
    *,
    name: str = "numba",
    threads: Sequence[int] = (1, 2, 3),
    prefixes: Sequence[int] = (0, 3, 16, 21),
    **settings,
) -> np.ndarray:
    """Each row has the logits that it has alone: in chunks, between other sequences, behind what was rolled back, in trees, behind
    what is kept of them, and in a copy of the slot, on so many threads. Returns the logits of `tokens`.

    The same bits where the backend promises that; elsewhere the order of sums may show. prefixes: lengths of what trees follow.
    """
    engine = EngineConfig(**{"threads": 1, "max_rows": 64, "kv_format": "f32", "keep_packed": False, **settings})
    rng, tokens, alone = np.random.default_rng(1), list(tokens), computed(name, checkpoint, tokens, 1, **settings)

    def check(got: np.ndarray, wanted: np.ndarray, *where: object) -> None:
        most = 0.0 if backend.row_invariant else 1e-4 * max(1, np.abs(alone).max())
        assert np.abs(got - wanted).max() <= most, where

    for number in threads:
        backend = make_backend(name, checkpoint, replace(engine, threads=number))
        for size in (7, 64):
            check(in_chunks(backend, tokens, size), alone, number, size)
        cache = backend.new_cache(4, len(tokens) + 64)
        while (held := cache.lengths[1]) < len(tokens):
            some, others = tokens[held:][: rng.integers(1, 20)], rng.integers(0, 300, rng.integers(1, 9)).tolist()
            rejected = rng.integers(0, 300, rng.integers(0, 9)).tolist()
            got = forward(backend, cache, {2: others, 1: some + rejected, 0: tokens[:3]}).logits[len(others) :]
            check(got[: len(some)], alone[held:][: len(some)], number, held)
            cache.truncate(1, held + len(some))
            for slot in (0, 2):
                cache.truncate(slot, min(20, cache.lengths[slot]))
        copied = cache.copy(1, 3, len(tokens) - 2)
        check(forward(backend, cache, {3: tokens[copied:]}).logits, alone[copied:], number, "copied")
        for prefix in () if checkpoint.config.is_recurrent else sorted(prefixes, reverse=True):  # what is behind it is forgotten
            for path in PATHS:
                cache.truncate(0, 0)
                cache.truncate(1, prefix)
                parents = [-1, 0, 1, *(parent + 3 if parent >= 0 else -1 for parent in PARENTS)]
                positions = np.concatenate([np.arange(3), prefix + DEPTHS])
                got = forward(backend, cache, {0: tokens[:3], 1: TREE}, parents=parents, positions=positions).logits
                check(got[:3], alone[:3], number, prefix)
                fed = in_chunks(backend, [*tokens[:prefix], *(TREE[node] for node in path), 7, 8])[prefix:]
                check(got[3:][path], fed[:-2], number, prefix, path)
                cache.keep_path(1, prefix, np.array(path, np.int32))
                check(forward(backend, cache, {1: [7, 8]}).logits, fed[-2:], number, prefix, path)
        backend.close()
    return alone

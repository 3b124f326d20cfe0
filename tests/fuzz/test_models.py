"""Damaged model files are refused or run: GGUF, Hugging Face directories, OpenVINO exports. See `drive`."""

import json
import random
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.gguf_file import GGUF_FORMATS
from cpuspec.checkpoints.openvino import MODEL, WEIGHTS
from cpuspec.settings import EngineConfig
from tests.backends.models import SMALL, forward
from tests.checkpoints.quantizers import write
from tests.checkpoints.test_openvino import KINDS, _write
from tests.checkpoints.test_quantized import KINDS as QUANTIZED
from tests.fuzz.drive import check, mutate_bytes, mutate_json, mutate_text
from tests.fuzz.gguf_fields import structural_fields
from tests.model_files import join_safetensors, read_tensors, split_safetensors, write_tensors
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

NUM_TOKENS = 4
# Most numbers of a header are lengths of a vocabulary's tokens, one like the other.
OFTEN = ("version", "count", "type of", "item type", "dimension", "offset", "end")


def write_files(directory: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).write_bytes(content)


def made_files(make: Callable[[Path], object]) -> dict[str, bytes]:
    """The files that a function writes into a directory."""
    with tempfile.TemporaryDirectory() as directory:
        make(Path(directory))
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def damage(files: dict[str, bytes], kind: str, rng: random.Random, shard: str = "model.safetensors") -> None:
    """Damage the settings of a directory, the header of a file of tensors, or any of its bytes."""
    if kind == "config":
        files["config.json"] = mutate_json(json.loads(files["config.json"]), rng)
    elif kind == "header":
        header, payload = split_safetensors(files[shard])
        files[shard] = join_safetensors(mutate_json(header, rng), payload)
    else:
        files[shard] = mutate_bytes(files[shard], rng, [(0, 8)])


def generate(checkpoint: Checkpoint, backend: str = "numpy") -> list[int]:
    """Greedy tokens from a model that could be opened: whatever they are, they must be tokens."""
    engine = EngineConfig(threads=1, max_rows=8, keep_packed=False)
    with closing(make_backend(backend, checkpoint, engine)) as loaded, np.errstate(all="ignore"):
        capacity = min(8, checkpoint.config.context_length)
        slots, tokens = loaded.new_cache(1, capacity), [1 % checkpoint.config.vocab_size]
        while len(tokens) < min(NUM_TOKENS, capacity):
            logits = forward(loaded, slots, {0: tokens[-1:]}).logits
            assert logits.shape == (1, checkpoint.config.vocab_size)
            tokens.append(int(logits[-1].argmax()))
    return tokens


@cache
def gguf_sample(architecture: str, weight_format: str = "q4_0") -> tuple[bytes, list[tuple[int, int]]]:
    wide = {} if weight_format == "q4_0" else {"hidden_size": 256, "intermediate_size": 256}  # of whole superblocks
    with tempfile.TemporaryDirectory() as directory:
        path = make_tiny_gguf(
            Path(directory) / "m.gguf",
            architecture,
            weight_format=weight_format,
            embed_format="q4_0",
            vocab_size=260,
            **(SMALL | wide),
        )
        content = path.read_bytes()
    named = structural_fields(content)
    fields = [(position, size) for name, position, size in named if size and name.startswith(OFTEN)]
    return content, fields + [(position, size) for _, position, size in named[:: len(named) // 40] if size]


def damaged_gguf(rng: random.Random, directory: Path) -> Path:
    architectures, names = ("qwen2", "qwen3", "llama"), sorted(set(GGUF_FORMATS) - {"q4_0"})
    architecture, name = rng.choice(architectures), "q4_0"
    if rng.random() < 0.6:
        name = rng.choice(names)
        architecture = architectures[names.index(name) % len(architectures)]
    content, fields = gguf_sample(architecture, name)
    if rng.random() < 0.5:  # of the header, which is a small part of the file
        end = fields[-1][0]
        content = mutate_bytes(content[:end], rng, fields) + content[end:]
    else:
        content = mutate_bytes(content, rng, fields)
    path = directory / "m.gguf"
    path.write_bytes(content)
    return path


def gguf(rng: random.Random, directory: Path) -> None:
    checkpoint = open_checkpoint(damaged_gguf(rng, directory), mmap=rng.random() < 0.5)
    generate(checkpoint)


def gguf_on_numba(rng: random.Random, directory: Path) -> None:
    """Weights of any bytes: what cannot be opened is a question for `gguf`."""
    content, _ = gguf_sample("qwen2")
    data = open_checkpoint_start(content)
    path = directory / "m.gguf"
    path.write_bytes(content[:data] + mutate_bytes(content[data:], rng)[: len(content) - data].ljust(len(content) - data, b"\xff"))
    generate(open_checkpoint(path), "numba")


def open_checkpoint_start(content: bytes) -> int:
    """Where the tensors of a GGUF file begin."""
    end = next(position for name, position, _ in structural_fields(content) if name == "end of the header")
    return -(-end // 32) * 32


@cache
def huggingface_sample(num_shards: int) -> dict[str, bytes]:
    options = {"dtype": "bf16", "num_shards": num_shards, "vocab_size": 260, **SMALL}
    return made_files(lambda directory: make_tiny_hf(directory, "llama", **options))


SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.1},
]


def huggingface(rng: random.Random, directory: Path) -> None:
    files = dict(huggingface_sample(rng.choice((1, 2))))
    config = json.loads(files["config.json"])
    config["rope_parameters"] = rng.choice(SCALINGS)
    files["config.json"] = json.dumps(config).encode()
    kind, index = rng.choice(("config", "config", "header", "header", "bytes", "index")), "model.safetensors.index.json"
    shard = rng.choice([name for name in files if name.endswith(".safetensors")])
    if kind == "index" and index in files:
        files[index] = mutate_json(json.loads(files[index]), rng)
    else:
        damage(files, kind, rng, shard)
    write_files(directory, files)
    generate(open_checkpoint(directory))


@cache
def openvino_sample(kind: str) -> dict[str, bytes]:
    return made_files(lambda directory: _write(directory, kind, **SMALL))


def openvino(rng: random.Random, directory: Path) -> None:
    files = dict(openvino_sample(rng.choice([kind for kind in KINDS if "128" not in kind and kind != "i4 of whole rows"])))
    if rng.random() < 0.8:
        files[MODEL] = mutate_text(files[MODEL].decode(), rng)
    else:
        files[WEIGHTS] = mutate_bytes(files[WEIGHTS], rng)
    write_files(directory, files)
    generate(open_checkpoint(directory))


@cache
def quantized_sample(kind: str) -> dict[str, bytes]:
    (config, quantize), _ = QUANTIZED[kind]
    options = {"vocab_size": 260, **SMALL, "hidden_size": 128, "head_dim": 64}
    return made_files(lambda directory: write(directory, config, quantize, **options))


def quantized(rng: random.Random, directory: Path) -> None:
    """Of every package: its settings, the types and shapes of tensors, their bytes, and tensors that are not there."""
    files = dict(quantized_sample(rng.choice(list(QUANTIZED))))
    kind = rng.choice(("config", "settings", "header", "tensor", "tensor", "bytes"))
    if kind == "settings":
        config = json.loads(files["config.json"])
        text = mutate_json(config.pop("quantization_config"), rng)
        rest = json.dumps(config)
        files["config.json"] = rest[:-1].encode() + b', "quantization_config": ' + text + b"}"
    elif kind != "tensor":
        damage(files, kind, rng)
    write_files(directory, files)
    if kind == "tensor":
        path = directory / "model.safetensors"
        tensors = read_tensors(path)
        layers = [name for name in tensors if "_proj." in name]
        for _ in range(rng.choice((1, 1, 2, 3))):
            name, other = rng.choice(layers), rng.choice(layers)
            dtype, shape, data = tensors.get(name) or tensors[rng.choice(list(tensors))]
            what = rng.choice(("drop", "swap", "rename", "type", "bytes", "bytes", "shape"))
            if what == "drop":
                tensors.pop(name, None)
            elif what == "swap":
                tensors[name] = tensors.get(other, (dtype, shape, data))
            elif what == "rename":
                tensors[rng.choice((other, name + "x", name.replace("_proj", "_norm")))] = tensors.pop(name, (dtype, shape, data))
            elif what == "type":
                tensors[name] = (rng.choice(("I8", "U8", "F8_E4M3", "F8_E8M0", "BOOL")), [len(data)], data)
            elif what == "bytes":
                tensors[name] = (dtype, shape, mutate_bytes(data, rng)[: len(data)].ljust(len(data), b"\xff"))
            else:
                tensors[name] = (dtype, shape[::-1] if rng.random() < 0.5 else [1, *shape], data)
        write_tensors(path, tensors)
    generate(open_checkpoint(directory))


def both(outcomes: dict[str, int]) -> bool:
    """Whether some cases were read and some refused: damage that did nothing, or everything, would test nothing."""
    return outcomes["answered"] > 0 < outcomes["refused"]


def test_a_damaged_gguf_file_is_refused_or_answers() -> None:
    assert both(check(gguf, 30))


def test_weights_of_any_bytes_do_not_end_compiled_kernels() -> None:
    assert check(gguf_on_numba, 6)["answered"]


def test_a_damaged_hugging_face_directory_is_refused_or_answers() -> None:
    assert both(check(huggingface, 30))


def test_a_damaged_quantized_directory_is_refused_or_answers() -> None:
    assert both(check(quantized, 30))


def test_a_damaged_openvino_export_is_refused_or_answers() -> None:
    assert both(check(openvino, 25))

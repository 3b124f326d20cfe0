"""Damaged files that this package or its users write: packed weights, kernels, parity records, recipes, costs. See `drive`."""

import json
import math
import os
import random
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from cpuspec.backends import packed
from cpuspec.checkpoints.download import fetch
from cpuspec.checkpoints.recipes import find_named, load_all
from cpuspec.cli.parity import describe_parity
from cpuspec.engine.draft_spec import check_spec, model_and_spec
from cpuspec.evaluate.parity import GreedyAnswer, LogitRow, ModelIdentity, Question, RecordedPrompt, Recording, compare_sides
from cpuspec.evaluate.parity_file import read_recording, write_recording
from cpuspec.formats import FORMATS, QuantTensor
from cpuspec.formats.packing import pack
from cpuspec.metrics import LevelCounters
from cpuspec.platform import SYSTEM
from cpuspec.speculation.planner import costs
from cpuspec.speculation.prefix_files import PrefixFiles, PrefixPart
from tests.fuzz.drive import check, mutate_bytes, mutate_json, mutate_text
from tests.fuzz.test_models import both
from tests.oracles import RecurrentBackend, ToyBackend

# ---------------------------------------------------------------------------------------------------------------- packed weights


@cache
def tensors() -> dict[str, QuantTensor]:
    values = np.random.default_rng(1).standard_normal((40, 256)).astype(np.float32)
    return {name: QuantTensor.encode(FORMATS[name], values) for name in ("q4_0", "q6_k", "f16")}


@cache
def packed_sample() -> tuple[str, bytes]:
    with tempfile.TemporaryDirectory() as directory:
        os.environ["CPUSPEC_CACHE"] = directory
        packed._SMALLEST_BYTES = 0
        packed.packed_matrices("model", tensors(), 1)
        [(path, _)] = packed.packed_files()
        return path.name, path.read_bytes()


def packed_weights(rng: random.Random, directory: Path) -> None:
    name, content = packed_sample()
    os.environ["CPUSPEC_CACHE"] = str(directory)
    path = directory / "packed" / name
    path.parent.mkdir()
    head = content.index(b"\n")
    kind = rng.choice(("anywhere", "head", "checksums"))
    if kind == "head":
        content = mutate_json(json.loads(content[:head]), rng).ljust(4096, b"\n") + content[4096:]
    elif kind == "checksums":
        content = content[:4096] + mutate_bytes(content[4096:4200], rng) + content[4200:]
    else:
        content = mutate_bytes(content, rng)
    path.write_bytes(content)
    seen = {"boot": SYSTEM.boot_id(), "device": 0, "inode": 0, "bytes": len(content), "mtime_ns": path.stat().st_mtime_ns}
    path.with_suffix(".verified").write_bytes(mutate_json(seen, rng))
    if rng.random() < 0.5:
        packed.verify_packed("model", 1)
    matrices = packed.packed_matrices("model", tensors(), 1, mmap=rng.random() < 0.5)
    assert all(np.array_equal(matrices[key].data, pack(tensor).data) for key, tensor in tensors().items())


def test_damaged_packed_weights_are_never_computed_with() -> None:
    assert check(packed_weights, 60)["answered"]


# ---------------------------------------------------------------------------------------------------------------- kept prefixes


@cache
def prefix_sample(has_states: bool) -> tuple[PrefixFiles, PrefixPart, bytes]:
    model = RecurrentBackend(0, lambda start, end: (end,), block_size=4) if has_states else ToyBackend(0, block_size=4)
    cache, rng = model.new_cache(1, 64), np.random.default_rng(3)
    blocks = [rng.integers(0, 256, cache.block_shape(size), np.uint8) for size in (4, 4, 2)]
    states = rng.integers(0, 256, cache.states.num_bytes, np.uint8) if cache.states else None
    files, part = PrefixFiles(cache, 8), PrefixPart(b"", rng.integers(0, 8, 10).tolist(), blocks, states)
    with tempfile.TemporaryDirectory() as directory:
        files.write(Path(directory) / "sample", part)
        return files, part, (Path(directory) / "sample").read_bytes()


def kept_prefix(rng: random.Random, directory: Path) -> None:
    files, part, content = prefix_sample(rng.random() < 0.5)
    line, _, rest = content.partition(b"\n")
    damaged = mutate_json(json.loads(line), rng) + b"\n" + rest if rng.random() < 0.5 else mutate_bytes(content, rng)
    (directory / "damaged").write_bytes(damaged)
    found = files.read(directory / "damaged")
    assert (found.parent, found.tokens) == (part.parent, part.tokens)
    assert all(np.array_equal(got, wanted) for got, wanted in zip(found.arrays, part.arrays, strict=True))


def test_damaged_prefixes_are_refused() -> None:
    assert check(kept_prefix, 80)["refused"]


# ----------------------------------------------------------------------------------------------------------------------- kernels


def doubled(number):
    return 2 * number


@cache
def kernel_sample() -> bytes:
    from cpuspec.kernels import machine_code  # imports numba

    with tempfile.TemporaryDirectory() as directory:
        os.environ["CPUSPEC_CACHE"] = directory
        machine_code.address("doubled", 1, lambda: doubled, returns=True)
        return (machine_code.kernel_directory() / "doubled.o").read_bytes()


def kernel(rng: random.Random, directory: Path) -> None:
    from cpuspec.kernels import machine_code

    content = kernel_sample()
    path = directory / "doubled.o"
    path.write_bytes(mutate_bytes(content, rng))
    found = machine_code._load(path)
    assert (found is not None) == (path.read_bytes() == content)
    assert found is None or machine_code.function(found, 1, returns=True)(21) == 42


def test_damaged_machine_code_is_never_run() -> None:
    assert check(kernel, 60)["answered"]


# ---------------------------------------------------------------------------------------------------------------- parity records


def run_of(seed: int) -> Recording:
    rng, vocab = np.random.default_rng(seed), 40
    ids = [5, 6, 7, 8]
    rows = [LogitRow.whole(rng.standard_normal(vocab).astype(np.float32)) for _ in range(8)]
    top = [row.likeliest(6) for row in rows]
    levels = {"ngram": LevelCounters(num_drafts=2, num_draft_tokens=4, num_accepted_tokens=1, num_accepted_tokens_per_pos=[1, 0])}
    answer, drafted = GreedyAnswer([1, 2, 3, 4], 3, 0.5), GreedyAnswer([1, 2, 3, 4], 3, 0.25, levels)
    about = {"name": "numpy", "backend": "numpy", "threads": 1, "row_invariant": True, "versions": {"numpy": "2"}}
    return Recording(
        about,
        ModelIdentity("m.gguf", "llama", vocab, ({"name": "m.gguf", "bytes": 9, "sha256": "0" * 64},)),
        (RecordedPrompt(Question(ids, 4), answer, drafted, [*ids, *answer.ids]),),
        np.array([row.ids for row in top]),
        np.array([row.logits for row in top]),
        np.array([row.logsumexp for row in top]),
        np.array([2]),
        rows[2].logits[None],
    )


@cache
def record_sample() -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as directory:
        write_recording(run_of(1), Path(directory) / "run.safetensors")
        return load_file(Path(directory) / "run.safetensors")


def parity_record(rng: random.Random, directory: Path) -> None:
    path, arrays = directory / "run.safetensors", record_sample()
    if rng.random() < 0.5:
        changed = mutate_json(json.loads(arrays["record"].tobytes()), rng)
        save_file({**arrays, "record": np.frombuffer(changed, np.uint8)}, path)
    else:
        save_file(arrays, path)
        path.write_bytes(mutate_bytes(path.read_bytes(), rng))
    run = read_recording(path)
    other = run_of(2)
    found = compare_sides(run, other, run.questions) if run.questions == other.questions else compare_sides(run, run, run.questions)
    json.dumps(describe_parity(run.model, found, []))


def test_a_damaged_parity_record_is_refused_or_compared() -> None:
    assert both(check(parity_record, 60))


# ------------------------------------------------------------------------------------------------------------ recipes and chains

CONTENT = b"the bytes of a model"
RECIPE = """
name = "fuzzed"
description = "a model"
architecture = "qwen2"
parameters = 1000
file = "m.gguf"
bytes = 20
sha256 = "SHA256"
licence = "Apache-2.0"

[[sources]]
kind = "huggingface"
name = "hf:some/one/m.gguf"

[[golden]]
prompt = "a"
token_ids = [1, 2, 3]

[layer_skip]
2 = [3, 4]
"""
CHAIN = """
name = "fuzzed-fast"
description = "a chain"
target = "fuzzed"
levels = ["ngram@8", { drafter = "self:mxfp4", num_tokens = 4, min_confidence = 0.5, then = ["suffix"] }]
"""


def recipe_or_chain(rng: random.Random, directory: Path) -> None:
    os.environ["CPUSPEC_CACHE"] = str(directory)
    is_recipe = rng.random() < 0.5
    path = directory / "recipes" / ("fuzzed.toml" if is_recipe else "fuzzed-fast.toml")
    path.parent.mkdir()
    path.write_bytes(mutate_text((RECIPE.replace("SHA256", "0" * 64) if is_recipe else CHAIN), rng))
    _, spec = model_and_spec(str(path), None)
    check_spec(spec)
    if is_recipe:
        find_named(str(path))
    load_all()


def test_a_damaged_recipe_or_chain_is_refused_or_read() -> None:
    assert both(check(recipe_or_chain, 60))


# -------------------------------------------------------------------------------------------------------------------- side files


def marker(rng: random.Random, directory: Path) -> None:
    """What says that a downloaded file was verified: damaged, the file is hashed again."""
    import hashlib

    os.environ["CPUSPEC_CACHE"] = str(directory)
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    (directory / "recipes").mkdir()
    (directory / "recipes" / "fuzzed.toml").write_text(RECIPE.replace("SHA256", sha256))
    path = directory / "models" / "fuzzed" / "m.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    seen = {"bytes": len(CONTENT), "mtime_ns": path.stat().st_mtime_ns, "sha256": sha256}
    path.with_name("m.gguf.verified").write_bytes(mutate_json(seen, rng))
    assert fetch(find_named("fuzzed")) == path


def kept_costs(rng: random.Random, directory: Path) -> None:
    """What forwards cost, as an earlier process measured it: damaged, it is measured again."""
    path = directory / "costs.json"
    kept = {"rows": [1, 2, 4], "seconds": [0.01, 0.011, 0.012], "num_bytes": [10, 12, 15], "further_s": [0, 0.0005, 0.001]}
    path.write_bytes(mutate_json(kept, rng))
    found = costs._read(path)
    if found is not None:
        found.observe(2, 0.02, 11)
        assert all(math.isfinite(found.forward_s(rows)) and found.forward_s(rows) > 0 for rows in (1, 3, 8, 100))


def side_file(rng: random.Random, directory: Path) -> None:
    rng.choice((marker, kept_costs))(rng, directory)


def test_a_damaged_side_file_costs_hashing_or_measuring() -> None:
    assert check(side_file, 80)["answered"]


def test_side_files_deeper_than_python_reads_are_no_fault(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tests.fuzz.test_files.mutate_json", lambda value, rng: b"[" * 100_000)
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    for case in (marker, kept_costs):
        (tmp_path / case.__name__).mkdir()
        case(random.Random(0), tmp_path / case.__name__)

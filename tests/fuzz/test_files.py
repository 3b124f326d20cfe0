"""Damaged notes beside other files: of downloads that were verified, and of what forwards cost. See `drive`."""

import math
import os
import random
from pathlib import Path

from cpuspec.checkpoints.download import fetch
from cpuspec.checkpoints.recipes import find_named
from cpuspec.speculation.planner import costs
from tests.fuzz.drive import check, mutate_json

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
    assert check(side_file, 40)["answered"]


def test_side_files_deeper_than_python_reads_are_no_fault(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tests.fuzz.test_files.mutate_json", lambda value, rng: b"[" * 100_000)
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    for case in (marker, kept_costs):
        (tmp_path / case.__name__).mkdir()
        case(random.Random(0), tmp_path / case.__name__)

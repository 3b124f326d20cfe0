"""A guard on speed without a clock: instructions of a pass, forwards and bytes of a token, calls of Python in a step.

Ceilings are what was counted on 2026-11-29, and a little room. Lower one where it is beaten; raise one only beside a measured gain.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.kernels.linear import assembly
from cpuspec.settings import EngineConfig
from tests.kernels.test_isa import FEATURES, in_child
from tools.make_tiny_model import make_tiny_gguf

# By instruction set: instructions of a pass over one tile, for 1 and for 8 rows.
INSTRUCTIONS = {
    "avx2": {"q4_k": (254, 861), "q6_k": (356, 1074), "q8_0": (276, 1119), "nl4_i": (751, 1713), "q6_i": (307, 1178)},
    "avx512_vnni": {"q4_k": (187, 366), "q6_k": (244, 432), "q8_0": (122, 310), "nl4_i": (219, 362), "q6_i": (140, 297)},
}
ROOM = 1.05  # versions of LLVM differ


def num_instructions(format_name: str, rows: int) -> int:
    """How many instructions `cpuspec info --kernel` prints."""
    return len(re.findall(r"^\t[a-z]", assembly(format_name, rows), re.MULTILINE))


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_a_pass_has_no_more_instructions_than_it_had(name: str) -> None:
    ceilings = INSTRUCTIONS[name]
    counts = f"{{f: [num_instructions(f, r) for r in (1, 8)] for f in {[*ceilings]}}}"
    code = f"import json; from tests.test_costs import num_instructions; print(json.dumps({counts}))"
    done = in_child(code, FEATURES[name])
    counted = json.loads(done.stdout or "{}")
    assert counted.keys() == ceilings.keys(), done.stderr
    for format_name, most in ceilings.items():
        for got, ceiling in zip(counted[format_name], most, strict=True):
            assert ceiling / 1.25 < got <= ceiling * ROOM, (format_name, counted[format_name], most)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_gguf(tmp_path_factory.mktemp("costs") / "tiny.gguf", context_length=4096)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), "none", settings=EngineConfig(threads=1, keep_packed=False, prompt_arithmetic="codes")) as found:
        yield found


def num_calls(llm: LLM, num_tokens: int, **params: object) -> int:
    """How many Python functions an answer of so many tokens calls in this thread."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        llm.generate("the cat", SamplingParams(max_tokens=num_tokens, ignore_eos=True, **params))
    finally:
        sys.setprofile(None)
    return calls


def test_a_plain_token_is_one_forward_that_reads_every_matrix_once(llm: LLM, path: Path) -> None:
    before = llm.reads()[-1]
    llm.generate("the cat", SamplingParams(max_tokens=24, ignore_eos=True))
    after = llm.reads()[-1]
    assert after.num_forwards - before.num_forwards == 24
    num_bytes = (after.weight_bytes - before.weight_bytes) / 24
    assert 0.9 * path.stat().st_size < num_bytes <= path.stat().st_size


@pytest.mark.parametrize(
    ("params", "most"),
    [({}, 60), ({"temperature": 0.8, "seed": 1}, 235), ({"logprobs": 1}, 215)],
    ids=["steps that run at once", "sampled", "log-probabilities"],
)
def test_a_step_calls_no_more_of_python_than_it_did(llm: LLM, params: dict[str, object], most: int) -> None:
    num_calls(llm, 8, **params)  # what is made once
    per_token = (num_calls(llm, 48, **params) - num_calls(llm, 16, **params)) / 32
    assert 1 < per_token <= most

"""Fixtures and marks that all tests share."""

import os
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cpuspec.backends import numba_backend
from cpuspec.config import ModelConfig
from cpuspec.environment import cache_dir
from cpuspec.kernels import isa, linear

# A machine may be busy: no example has to end within a time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# By mark, the directories and modules whose tests have it.
MARKS: Mapping[str, tuple[str, ...]] = {
    "server": ("server", "loadtest", "ray", "conformance/test_protocols.py"),
    "fuzz": ("fuzz",),
    "oracle": (
        *("backends/test_transformers.py", "checkpoints/test_quantized_oracles.py", "checkpoints/test_published_tokenizers.py"),
        *("speculation/test_head_oracles.py", "evaluate/test_harness.py"),
    ),
}
# Of a test in these modules that has several parameters, the default run has as few combinations as have each value of each
# parameter once: every family, every way, every drafter. The other combinations are slow.
COMBINED = {  # by directory
    "backends": "adapters experts kv_formats latent layer_differences recurrent sharing",
    "checkpoints": "adapters quantized safetensors",
    "conformance": "backends",
    "engine": "adapters draft_spec engine faults grammar mixtures prefix_cache prompt_arithmetic recurrent_prefixes scoring ways",
    "evaluate": "certify parity replays",
    "kernels": "attention attention_plan",
    "model": "cache",
    "quantize": "cast methods",
    "server": "continuing nonce schema",
    "speculation": "assistants constrained context guarded head_files head_oracles heads masks planner prefixes",
    "train": "extract heads",
}
# Tests of these modules run in each arithmetic that prompts may have (`prompt_arithmetic`). In COMBINED it is one more parameter;
# elsewhere the default run has every second test in bf16, and the others in codes.
BOTH_ARITHMETICS = {
    "conformance": "drafters protocols",
    "engine": "adapters engine llm mixtures prefix_cache recurrent_prefixes scoring ways",
    "evaluate": "certify parity replays",
    "server": "continuing nonce openai prefix_cache",
    "speculation": "assistants constrained context head_files prefixes",
}
PREFERRED = "numba"  # this backend has each value of the other parameters
ROOT = Path(__file__).parent
# Packages of the extra [dev] that tests compare with. Where one is missing, what imports it is skipped.
LARGE = ("torch", "transformers", "onnx", "onnxruntime", "compressed_tensors", "schemathesis", "jsonschema_rs")
ABSENT = tuple(name for name in LARGE if find_spec(name) is None)
# Error codes of Windows.
_REFUSED = {
    1314: "this user may make no symbolic links",
    32: "Windows replaces no file that is in use",
    1224: "Windows shortens no file that is mapped",
}


def _modules(names: Mapping[str, str]) -> list[Path]:
    return [ROOT / directory / f"test_{name}.py" for directory, some in names.items() for name in some.split()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of BOTH_ARITHMETICS in each."""
    if metafunc.definition.path in _modules(BOTH_ARITHMETICS):
        metafunc.parametrize("prompt_arithmetic", ["codes", "bf16"], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def prompt_arithmetic(request: pytest.FixtureRequest) -> Iterator[str]:
    """The arithmetic in which numba computes tokens of prompts by default: the processor's own, or the test's parameter.

    On a processor without tile registers (AMX) another one stands for bf16: activations of prompts have 16 bits. Fixtures that keep
    an LLM for a module ask for this one, so that they are made anew.
    """
    wanted = getattr(request, "param", "")
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            own = numba_backend._prompt_arithmetic

            def chosen(asked: str, config: ModelConfig) -> str:
                return own(asked, config) if asked != "auto" or config.head else wanted

            patch.setattr(numba_backend, "_prompt_arithmetic", chosen)
        if wanted == "bf16" and not isa.has_bf16_tiles():
            patch.setattr(linear, "prompt_encoding", lambda name, precise=False: linear.activation_encoding(name, precise=True))
        yield wanted


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the marks of its place."""
    marks: dict[Path, list[str]] = {path: [] for path in dict.fromkeys(item.path for item in items)}
    for mark, places in {**MARKS, "combined": _modules(COMBINED)}.items():
        paths = [ROOT / place for place in places]
        missing = [path for path in paths if not path.exists()]
        assert not missing, f"tests/conftest.py has the mark {mark} for files that do not exist: {missing}"
        for file, found in marks.items():
            if any(file.is_relative_to(path) for path in paths):
                found.append(mark)
    tests: dict[tuple[Path, str], list[pytest.Item]] = {}
    in_turn: dict[Path, dict[tuple[str, str], int]] = {}  # the number of each test without its arithmetic
    for item in items:
        for mark in marks[item.path]:
            item.add_marker(mark)
        given = {mark.name for mark in item.iter_markers()}
        if given & {"slow", "skip"} or not hasattr(item, "callspec"):
            continue
        if "combined" in given:
            tests.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
        elif arithmetic := item.callspec.params.get("prompt_arithmetic"):
            others = repr([value for name, value in item.callspec.params.items() if name != "prompt_arithmetic"])
            turns = in_turn.setdefault(item.path, {})
            if turns.setdefault((item.originalname, others), len(turns)) % 2 != (arithmetic == "bf16"):
                item.add_marker("slow")
    for combinations in tests.values():
        for item in _spare(combinations):
            item.add_marker("slow")
    if os.name != "posix":
        for item in items:
            if item.get_closest_marker("posix"):
                item.add_marker(pytest.mark.skip(reason="Windows has no such files, modes, forks, limits or signals"))


def _spare(combinations: list[pytest.Item]) -> list[pytest.Item]:
    """The combinations of one test that are not needed to have each value of each parameter, and no value much more often."""
    left = [(item, {(name, repr(value)) for name, value in item.callspec.params.items()}) for item in combinations]
    times: Counter[tuple[str, str]] = Counter()

    def gain(one: tuple[pytest.Item, set[tuple[str, str]]]) -> tuple[bool, int, int]:
        new = sum(not times[value] for value in one[1])
        return new > 0 and any(PREFERRED in text for _, text in one[1]), new, -sum(times[value] for value in one[1])

    while left and gain(best := max(left, key=gain))[1]:
        left.remove(best)
        times.update(best[1])
    return [item for item, _ in left]


def _absent_package(*texts: str) -> str:
    """The absent package that the text of an error names; "" if it names none."""
    for name in ABSENT:
        if re.search(rf"No module named '{name}|needs {name}, which is not installed", " ".join(texts)):
            return f"{name} is not installed; pip install -e '.[dev]' has it"
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Skip a module of tests that cannot be imported without an absent package."""
    report = yield
    if report.failed and (why := _absent_package(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {why}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that needs an absent package, or whose own code asks for more than Windows gives: links, or another content of a
    file that is mapped.
    """
    try:
        return (yield)
    except Exception as error:
        if why := _absent_package(*traceback.format_exception(error)):
            pytest.skip(why)
        if not isinstance(error, OSError):
            raise
        in_package = any(
            Path(frame.filename).is_relative_to(ROOT.parent / "cpuspec") for frame in traceback.extract_tb(error.__traceback__)
        )
        if in_package or getattr(error, "winerror", None) not in _REFUSED:
            raise
        pytest.skip(_REFUSED[error.winerror])


pytest_runtest_setup = pytest_runtest_call  # fixtures make them as well


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, with the kernels that this machine has compiled: compiling them takes half a minute."""
    kernels, cache = cache_dir() / "kernels", tmp_path / "cache"
    cache.mkdir()
    kernels.mkdir(parents=True, exist_ok=True)
    (cache / "kernels").symlink_to(kernels)
    monkeypatch.setenv("CPUSPEC_CACHE", str(cache))
    return cache


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and wide tables."""
    monkeypatch.setenv("CPUSPEC_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")

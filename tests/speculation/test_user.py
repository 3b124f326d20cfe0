"""A user's own proposer: found by where it is, trusted with nothing, and as exact as any other."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cpuspec
from cpuspec.engine.llm import LLM
from cpuspec.errors import ConfigError, CpuspecError
from cpuspec.settings import LevelSpec, SamplingParams, SpecConfig
from cpuspec.speculation.drafters.user import UserProposer, imported, is_import_path
from tests.toys import ToyBackend, ToyTokenizer, plain_greedy

README = (Path(cpuspec.__file__).parent / "speculation" / "README.md").read_text("utf-8")
(EXAMPLE,) = (code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class Echo" in code)
GOOD = f"""{EXAMPLE}
    def begin(self, seq, num_cached): ...
    def accept(self, seq, verdict, hidden): ...
    def end(self, seq): ...
"""
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def toy_llm(spec: str | SpecConfig) -> LLM:
    return LLM.from_backend(ToyBackend(2, memory=0.3), ToyTokenizer(8), spec)  # type: ignore[arg-type]


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("module:Class", True),
        ("some.module:Class_2", True),
        ("path/to/file.py:Class", True),
        ("/a b/c,d.py:C", True),
        ("module", False),
        ("module:", False),
        ("path/to/model:Class", False),
        ("mod-ule:Class", False),
        ("a:b:c", False),
    ],
)
def test_an_import_path_is_a_module_or_a_file_and_a_class(text: str, wanted: bool) -> None:
    assert is_import_path(text) == wanted


@pytest.mark.parametrize(
    "text", [EXAMPLE, GOOD, GOOD.replace("begin(self, seq, num_cached)", "begin(self, seq)")], ids=["bare", "", "short begin"]
)
def test_a_class_of_a_file_or_of_a_module_drafts_and_changes_no_answer(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    expected = plain_greedy(ToyBackend(2, memory=0.3), ToyTokenizer(8), [0, 4, 5, 6, 7, 4], PARAMS)["token_ids"]
    for spec in (f"{path}:Echo", "mine:Echo@2", f"{path}:Echo+ngram@1,ngram"):
        (answer,) = toy_llm(spec).generate([[0, 4, 5, 6, 7, 4]], PARAMS)
        assert answer.token_ids == expected
        assert any("echo" in name for name in answer.stats.levels)
    assert max(len(level.num_accepted_tokens_per_pos) for level in toy_stats("mine:Echo@2").values()) == 2


def test_an_object_drafts_too(tmp_path: Path) -> None:
    mine = imported(f"{write(tmp_path, GOOD)}:Echo")()
    llm = toy_llm(SpecConfig(proposer=mine))
    (answer,) = llm.generate([[0, 4, 5, 6, 7, 4]], PARAMS)
    assert answer.token_ids == toy_llm("none").generate([[0, 4, 5, 6, 7, 4]], PARAMS)[0].token_ids
    assert (str(llm.spec), list(answer.stats.levels)) == ("echo", ["echo"])
    with pytest.raises(ConfigError, match="int has no method propose"):
        toy_llm(SpecConfig(proposer=5))
    with pytest.raises(ConfigError, match="a proposer drafts instead of levels, and the spec has ngram beside it"):
        toy_llm(replace(SpecConfig.parse("ngram"), proposer=mine))


def toy_stats(spec: str) -> dict[str, Any]:
    return toy_llm(spec).generate([[0, 4, 5, 6, 7, 4]], PARAMS)[0].stats.levels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has no class or function Echo"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("class Echo", "cannot be imported: SyntaxError"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        (GOOD.replace("def propose", "def __init__(self, n): ...\n    def propose"), "making it of .*Echo failed with TypeError"),
        (GOOD.replace("def propose", "def draft"), "has no method propose"),
        (GOOD.replace("begin(self, seq, num_cached)", "begin(self)"), "begin of .*Echo must take a sequence and the number of its"),
        (GOOD.replace('"echo", ()', "None, ()"), "must be a text that is not empty, got None"),
        (GOOD.replace('"echo", ()', '"echo", 3'), "must be a tuple of layer numbers, as .., got 3"),
    ],
)
def test_what_is_no_proposer_is_a_clear_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UserProposer(LevelSpec(f"{write(tmp_path, text)}:Echo"))


def test_a_missing_file_or_module_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"there is no file 'nowhere\.py' to take Echo from"):
        UserProposer(LevelSpec("nowhere.py:Echo"))
    with pytest.raises(ConfigError, match="no_such_module cannot be imported: ModuleNotFoundError"):
        UserProposer(LevelSpec("no_such_module:Echo"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_cached): ...", "num_cached): 1 / 0", "begin of echo failed with ZeroDivisionError: division by zero"),
        ("return drafts", "1 / 0", "propose of echo failed with ZeroDivisionError"),
        ("return drafts", "import sys; sys.exit(3)", "propose of echo failed with SystemExit: 3"),
        ("return drafts", "raise type('Panic', (BaseException,), {})(3)", "propose of echo failed with Panic: 3"),
        ("hidden): ...", "hidden): 1 / 0", "accept of echo failed with ZeroDivisionError"),
        ("return drafts", "return None", "must return a list of Draft, got None"),
        ("return drafts", "return [7]", r"must return a list of Draft, got \[7\]"),
        ("return drafts", "return []", r"returned 0 drafts for \d sequences"),
        ("return drafts", "return [Draft([4], [-1], 'x')] * len(seqs)", r"tokens .* must be a vector of int32, got \[4\]"),
        ("after[:limit]", "after[:limit] + [4] * limit", "where at most"),
        ("after[:limit]", "[99][:limit]", r"ids must be in \[0, 8\)"),
    ],
)
def test_what_goes_wrong_in_a_users_proposer_names_it_and_leaves_the_model_usable(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in GOOD
    llm = toy_llm(f"{write(tmp_path, GOOD.replace(old, new, 1))}:Echo")
    for _ in range(2):
        with pytest.raises(CpuspecError, match=message):
            llm.generate([[0, 4, 5, 6, 7, 4]] * 3, PARAMS)
        assert len(llm.context.slots.free) == 16
        assert not llm.engine._requests

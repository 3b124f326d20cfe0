"""Prompts come from where they are said to, in the same order each time."""

import json
from itertools import islice
from pathlib import Path

import pytest

from cpuspec.errors import ConfigError
from cpuspec.text import Tokenizer, make_tokenizer
from cpuspec.train.prompts import function_prompts, in_turn, read_line_prompts, self_made, users_turn
from tests.train.models import tiny

MODULE = '''
import math


def documented(a, b=(1,
                     2)):
    """Return the sum of a and b, in the way that is usual for sums."""
    c = a + b
    return c


class Thing:
    @property
    def method(self, name: str) -> str:
        """
        Say a name aloud, and give it back to whoever wanted to hear it.

            indented
        """
        print(name)
        return name

    async def waiting(self):
        """Wait for something that will never come, whatever one does."""
        await None
        return 2


def short(a):
    """Too little."""
    b = a
    return b


def alone(a):
    """This function has a fair docstring, and a body of one statement."""
    return a


def silent(a):
    b = a
    return b
'''


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tiny(tmp_path_factory.mktemp("model")))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package that must not be imported."""
    root = tmp_path / "surely_unknown"
    (root / "tests").mkdir(parents=True)
    (root / "__init__.py").write_text("raise AssertionError('this package must not be imported')")
    (root / "module.py").write_text(MODULE)
    (root / "tests" / "test_module.py").write_text(MODULE)
    (root / "broken.py").write_text("def f(:\n")
    (root / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.syspath_prepend(tmp_path)
    return root.name


def test_functions_are_cut_out_of_sources_with_their_docstrings(package: str, tokenizer: Tokenizer) -> None:
    found = {prompt.id: prompt for prompt in function_prompts([package], tokenizer)}
    assert sorted(found) == [f"{package}/module.py:{line}" for line in (14, 23, 5)]
    assert found[f"{package}/module.py:5"].text == MODULE[MODULE.index("def documented") : MODULE.index("    c = a + b") - 1]
    method = found[f"{package}/module.py:14"].text
    assert method.startswith('def method(self, name: str) -> str:\n    """\n    Say a name')
    assert method.endswith('\n        indented\n    """')
    assert {prompt.source for prompt in found.values()} == {f"functions of {package}"}


def test_every_second_function_is_asked_for_in_a_chat(package: str, tokenizer: Tokenizer) -> None:
    first, second, third = function_prompts([package], tokenizer)
    assert [tokenizer.decode(list(one.ids or ())) == one.text + "\n" for one in (first, second, third)] == [False, True, False]
    asked = [
        {"role": "user", "content": f"Complete this function. Answer with the whole function.\n\n```python\n{first.text}\n```"}
    ]
    assert list(first.ids or ()) == tokenizer.encode_chat(asked)
    assert list(function_prompts([package], tokenizer)) == [first, second, third]


@pytest.mark.parametrize("name", ["no_such_package_at_all", "json.decoder", "", "sys"])
def test_a_package_that_is_not_installed_is_refused(name: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="no installed package"):
        list(function_prompts([name], tokenizer))


def test_lines_have_texts_messages_or_ids(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "prompts.jsonl"
    talk = [{"role": "user", "content": "hello"}]
    values = [{"text": "hello"}, {"prompt": "hello"}, {"messages": talk}, {"ids": [1, 2, 3]}]
    path.write_text("\n\n".join(map(json.dumps, values)))
    found = list(read_line_prompts(path, tokenizer))
    hello = tuple(tokenizer.encode("hello"))
    assert [one.ids for one in found] == [hello, hello, tuple(tokenizer.encode_chat(talk)), (1, 2, 3)]
    assert [one.id for one in found] == [f"prompts.jsonl:{number}" for number in range(1, 5)]


def test_what_users_wrote_is_told_from_the_templates_words(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "prompts.jsonl"
    system, hello = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}
    talk = [system, hello, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and you"}]
    values = [{"messages": talk}, {"ids": tokenizer.encode_chat([hello])}, {"text": "hello there"}, {"messages": [system]}]
    path.write_text("\n".join(map(json.dumps, values)))
    said = [one.said for one in read_line_prompts(path, tokenizer)]
    assert said[0] == "hello there\nand you"
    assert said[1].split()[:2] == ["hello", "there"]
    assert said[2] == "hello there"
    assert "be brief" in said[3], "a prompt without a user's words is compared whole"


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", "{}", '{"text": "a", "prompt": "b"}', '{"text": ""}', '{"text": 3}', '{"messages": "hello"}'),
        *('{"messages": []}', '{"messages": [{"content": 3}]}', '{"ids": []}', '{"ids": [1.5]}', '{"ids": [100000]}'),
        '{"ids": [true]}',
    ],
)
def test_other_lines_are_refused_by_name_and_number(tmp_path: Path, tokenizer: Tokenizer, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl, line 2"):
        list(read_line_prompts(path, tokenizer))


def test_the_users_turn_is_the_template_up_to_the_user(tokenizer: Tokenizer) -> None:
    turn, hello = users_turn(tokenizer), tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert hello[: len(turn)] == turn
    assert tokenizer.decode(hello[len(turn) :]).startswith("hello")


def test_sources_take_turns_until_each_is_at_its_end() -> None:
    prompts = in_turn([lambda: self_made(3), lambda: islice(self_made(9), 7, 9), lambda: self_made(0)])
    assert [one.id.partition(":")[2] for one in prompts] == ["0", "7", "1", "8", "2"]

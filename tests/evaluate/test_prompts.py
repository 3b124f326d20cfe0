"""Prompts are the file's, in the form that was asked for, and what cannot be read is said."""

import json

import pytest

from cpuspec.errors import ConfigError
from cpuspec.evaluate.prompts import PromptSet, read_prompts, read_text_ids


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tasks.jsonl"
    lines = [{"prompt": "one {}"}, {"prompt": ["two", "three"]}, {"prompt": ""}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", "utf-8")
    return path


def test_prompts_are_raw_or_what_a_user_says(file):
    assert read_prompts(f"{file}:prompt:2") == PromptSet("tasks", ("one {}", "two"))
    chat = read_prompts(f"{file}:prompt:1:chat")
    assert chat == PromptSet("tasks:chat", ([{"role": "user", "content": "one {}"}],))
    ((message,),) = read_prompts(f"{file}:prompt:1:complete").prompts
    assert message["content"].startswith("Complete this function")
    assert "one {}" in message["content"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{}:prompt", "FILE:FIELD:COUNT"),
        ("{}:prompt:0", "FILE:FIELD:COUNT"),
        ("{}:prompt:many", "FILE:FIELD:COUNT"),
        ("{}:prompt:2:sing", "FILE:FIELD:COUNT"),
        ("{}:prompt:9", "has 3 lines"),
        ("{}:prompt:3", "line 3"),
        ("{}:answer:1", "'answer'"),
        ("{}.gone:prompt:1", "cannot be read"),
        ("", "FILE:FIELD:COUNT"),
    ],
)
def test_what_cannot_be_read_is_said(file, text, wanted):
    with pytest.raises(ConfigError, match=wanted):
        read_prompts(text.format(file))


def test_a_file_that_is_not_json_is_said(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("{", "utf-8")
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        read_prompts(f"{path}:a:1")


def test_a_text_gives_its_first_ids_and_no_fewer_than_asked(tmp_path):
    class Letters:
        def encode(self, text):
            return list(text.encode())

    path = tmp_path / "text.txt"
    path.write_text("abcdef", "utf-8")
    assert read_text_ids(f"{path}:4", Letters()) == list(b"abcd")
    for text, wanted in ((f"{path}:7", "has 6 tokens"), (str(path), "FILE:TOKENS"), (f"{path}.gone:1", "cannot be read")):
        with pytest.raises(ConfigError, match=wanted):
            read_text_ids(text, Letters())

"""Where answers of two models part and how far, and how often answers have the form that was asked for."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cpuspec.errors import ConfigError
from cpuspec.evaluate.drift import drift, edit_distance
from cpuspec.evaluate.validity import fits, judge_form, read_forms, validity_by_kind

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
HERMES = "{% if tools %}<tool_call>{% endif %}"


def test_edit_distance_is_levenshteins() -> None:
    @cache
    def slow(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    rng = random.Random(0)
    for _ in range(60):
        a, b = (tuple(rng.choices(range(3), k=rng.randint(0, 7))) for _ in range(2))
        assert edit_distance(a, b) == slow(a, b)


def test_drift_says_where_answers_part_and_how_much() -> None:
    found = drift([[1, 2, 3], [1, 2, 3, 4], [5], []], [[1, 2, 3], [1, 9, 3, 4], [5, 6, 7, 8], []])
    assert (found.num_prompts, found.num_identical, found.share_identical) == (4, 2, 0.5)
    assert [one.first_difference for one in found.prompts] == [None, 1, 1, None]
    assert [one.edit_distance for one in found.prompts] == [0, 0.25, 0.75, 0]
    assert (found.first_difference_median, found.first_difference_least) == (1.0, 1)
    assert found.edit_distance_mean == 0.25
    same = drift([[1]], [[1]])
    assert (same.first_difference_median, same.first_difference_least) == (None, None)


def forms(tmp_path: Path, *lines: Any) -> Any:
    path = tmp_path / "forms.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return read_forms(path)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', (True, True, True, True)),
        ('{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}', (True, True, True, True)),
        ('<tool_call>{"name": "weather", "arguments": {"town": "Oslo"}}</tool_call>', (True, True, True, False)),
        ('<tool_call>{"name": "weather", "arguments": {"city": 3}}</tool_call>', (True, True, True, False)),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Os', (True, False, False, False)),
        ('<tool_call>{"name": "train", "arguments": {}}</tool_call>', (True, False, False, False)),
        ("It rains.", (False, False, False, False)),
        ("", (False, False, False, False)),
    ],
)
def test_a_tool_call_is_judged_step_by_step(text: str, verdict: tuple[bool, ...], tmp_path: Path) -> None:
    (line,) = forms(tmp_path, {"prompt": "Weather in Oslo?", "tools": [WEATHER]})
    found = judge_form(line, text, HERMES)
    assert (found.answered, found.known, found.parses, found.fits) == verdict


@pytest.mark.parametrize(
    ("text", "parses", "fit"),
    [
        ('{"a": 1}', True, True),
        ('Here:\n```json\n{"a": 1}\n```\nDone.', True, True),
        ('<think>{"a": 2}</think>{"a": 1}', True, True),
        ('{"a": "x"}', True, False),
        ("null", True, False),
        ('{"a": 1', False, False),
        ("a", False, False),
    ],
)
def test_json_is_judged_by_its_schema(text: str, parses: bool, fit: bool, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    (line,) = forms(tmp_path, {"messages": [{"role": "user", "content": "JSON"}], "schema": schema})
    found = judge_form(line, text, None)
    assert (found.parses, found.fits) == (parses, fit)


@pytest.mark.parametrize(
    ("value", "schema", "wanted"),
    [
        (1, {"type": "integer"}, True),
        (True, {"type": "integer"}, False),
        (1.5, {"type": ["integer", "null"]}, False),
        (None, {"type": ["integer", "null"]}, True),
        ("b", {"enum": ["a"]}, False),
        ([1, "a"], {"type": "array", "items": {"type": "integer"}}, False),
        ({"a": {"b": 1}}, {"properties": {"a": {"required": ["c"]}}}, False),
        ({"x": 1}, {"additionalProperties": {"type": "string"}}, False),
        (1, True, True),
        (1, False, False),
        (1, None, True),
    ],
)
def test_a_value_fits_its_schema_or_not(value: Any, schema: Any, wanted: bool) -> None:
    assert fits(value, schema) is wanted


def test_shares_are_told_of_tool_calls_and_of_json_apart(tmp_path: Path) -> None:
    lines = forms(tmp_path, {"prompt": "a", "tools": [WEATHER]}, {"prompt": "b"}, {"prompt": "c"})
    verdicts = [judge_form(line, text, HERMES) for line, text in zip(lines, ("no", "{}", "no"), strict=True)]
    calls, plain = validity_by_kind(lines, verdicts)
    assert (calls.kind, calls.num_lines, calls.fits) == ("tool calls", 1, 0)
    assert (plain.kind, plain.num_lines, plain.fits) == ("JSON", 2, 0.5)


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt": "a", "tools": [{}]}', '{"prompt": "a", "tools": 3}', '{"messages": [1]}']
)
def test_lines_that_ask_nothing_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "forms.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n", "utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        read_forms(path)

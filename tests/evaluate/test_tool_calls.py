"""`cpuspec eval tools`: its cases hold together, and each count counts what it says."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuspec.evaluate.tool_calls import KINDS, ToolCase, judge_calls, spread, tool_cases, tool_scores
from cpuspec.evaluate.validity import fits
from tests.command import refused, report_of
from tests.processes import interrupt, started
from tests.server.running import Running, load, script_answers, serving, templated_model
from tests.server.test_tools import TEMPLATE

CASES = tool_cases()
ONE = next(case for case in CASES if case.kind == "simple")
NONE = next(case for case in CASES if case.kind == "irrelevance")


def called(*calls: tuple[str, Any]) -> dict[str, Any]:
    """A message with these calls; arguments that are no text become JSON."""
    made = [
        {"function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}} for name, given in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def plain(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def answer(case: ToolCase) -> dict[str, Any]:
    """The right answer to a case."""
    given = [
        (name, {key: plain(value) for key, value in wanted.items() if plain(value) is not None}) for name, wanted in case.calls
    ]
    return called(*given)


def test_there_are_200_cases_and_each_wants_what_its_tools_take() -> None:
    assert Counter(case.kind for case in CASES) == {"simple": 50, "multiple": 50, "parallel": 30, "irrelevance": 30, "long": 40}
    assert len({case.question for case in CASES}) == len(CASES)
    for case in CASES:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in case.tools}
        assert bool(case.calls) == (case.kind != "irrelevance")
        assert (len(case.calls) > 1) == (case.kind == "parallel")
        for call in answer(case)["tool_calls"]:
            function = call["function"]
            assert fits(json.loads(function["arguments"]), schemas[function["name"]]), case.question


def test_the_right_answer_is_right_and_counts_as_such() -> None:
    verdicts = [judge_calls(case, answer(case), "tool_calls" if case.calls else "stop") for case in CASES]
    for score, kind in zip(tool_scores(CASES, verdicts), KINDS, strict=True):
        assert (score.kind, score.num_right, score.num_broken) == (kind, score.num_cases, 0)
        assert score.num_called == score.num_parses == score.num_named == (0 if kind == "irrelevance" else score.num_cases)


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ({"content": "Lisbon is warm."}, (False, False, False, False, 0)),
        (called(("get_weather", '{"city": "Lisbon"')), (True, False, False, False, 1)),
        (called(("get_weather", "[1]")), (True, False, False, False, 1)),
        (called(("get_weather", '{"city": NaN}')), (True, False, False, False, 1)),
        (called(("other", {"city": "Lisbon", "unit": "celsius"})), (True, True, False, False, 0)),
        (called(("get_weather", {"city": "Porto", "unit": "celsius"})), (True, True, True, False, 0)),
        (called(("get_weather", {"city": "Lisbon"})), (True, True, True, False, 0)),
        (called(("get_weather", {"city": "Lisbon", "unit": "celsius", "day": 1})), (True, True, True, False, 0)),
        (called(("get_weather", {"city": " lisbon", "unit": "celsius"})), (True, True, True, True, 0)),
        (called(*[("get_weather", {"city": "Lisbon", "unit": "celsius"})] * 2), (True, True, False, False, 0)),
    ],
)
def test_an_answer_is_worth_what_it_holds(message: dict[str, Any], wanted: tuple[bool, bool, bool, bool, int]) -> None:
    found = judge_calls(ONE, message, "tool_calls")
    assert (found.called, found.parses, found.named, found.right, found.num_broken) == wanted
    assert judge_calls(ONE, message, "length").num_broken == 0, "it was cut off, and says so"


def test_a_call_where_none_is_wanted_is_wrong() -> None:
    assert judge_calls(NONE, {"content": "Because."}, "stop").right
    assert not judge_calls(NONE, called(("create_note", {"text": "x"})), "tool_calls").right
    assert not judge_calls(NONE, called(("create_note", "{")), "tool_calls").right


def test_numbers_are_told_from_booleans_and_texts_keep_their_white_space() -> None:
    lock = next(case for case in CASES if case.calls and case.calls[0][0] == "lock_door")
    assert not judge_calls(lock, called(("lock_door", {"door": "front", "locked": 1})), "stop").right
    long = next(case for case in CASES if case.kind == "long")
    path, text = (long.calls[0][1][name] for name in ("path", "content"))
    assert judge_calls(long, called(("write_file", {"path": path, "content": text + "\n"})), "stop").right
    assert not judge_calls(long, called(("write_file", {"path": path, "content": text.replace("    ", " ")})), "stop").right


def test_a_limit_takes_its_share_of_each_kind() -> None:
    assert Counter(case.kind for case in spread(CASES, 20)) == {
        **{"simple": 5, "multiple": 5, "parallel": 3, "irrelevance": 3, "long": 4},
    }
    assert spread(CASES, None) == spread(CASES, 500) == CASES


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return templated_model(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="module")
def running(path: Path) -> Iterator[Running]:
    with serving(lambda: load(path)) as found:
        yield found


@pytest.mark.usefixtures("offline")
def test_a_model_and_a_server_of_it_have_one_score(path: Path, running: Running) -> None:
    how = ("--limit", "5", "--max-sequences", "2")
    here, there = report_of("eval", "tools", str(path), *how), report_of("eval", "tools", "tiny", "--url", running.url, *how)
    assert here["kinds"] == there["kinds"]
    assert (here["num_cases"], here["strict"], len(here["kinds"])) == (5, False, len(KINDS))


def test_answers_of_a_server_are_counted(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    (name, wanted), *_ = next(case for case in spread(CASES, 5) if case.kind == "simple").calls
    script_answers(monkeypatch, f"<tool_call>\n{json.dumps({'name': name, 'arguments': wanted})}\n</tool_call>")
    report = report_of("eval", "tools", "tiny", "--url", running.url, "--limit", "5", "--strict")
    simple = report["kinds"][0]
    assert (simple["num_cases"], simple["num_right"], report["num_right"]) == (1, 1, 2)
    unwanted = report["kinds"][KINDS.index("irrelevance")]  # whose request does not have the tool, so its call is content
    assert (unwanted["num_called"], unwanted["num_right"]) == (0, 1)


def test_only_servers_of_this_machine_are_asked(running: Running) -> None:
    refused("eval", "tools", "tiny", "--url", "http://example.com", code=(1, 2), message="this machine")
    refused("eval", "tools", "tiny", "--url", "http://127.0.0.1:9", "--limit", "1", code=1, message="connect")


def test_ctrl_c_ends_it_without_a_traceback(path: Path) -> None:
    with started("eval", "tools", str(path), "--max-sequences", "1") as process:
        assert process.stderr is not None
        while b"answers" not in (line := process.stderr.readline()):
            assert line, "it ended by itself"
        interrupt(process)
        rest = process.stderr.read()
        assert process.wait() == 130
    assert b"Traceback" not in rest

"""`cpuspec chat`: lines and commands in, a conversation and its answers out, in a script and at a terminal."""

import io
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.cli.chat import _COMMANDS, Chat, converse
from cpuspec.engine.engine import Output
from cpuspec.errors import ConfigError
from cpuspec.settings import SamplingDefaults
from tests.command import refused, run

pytestmark = pytest.mark.usefixtures("cache")


def chat(model: str, lines: str, *options: str) -> tuple[str, str]:
    """What a chat of these lines writes to stdout and to stderr. The model's end tokens are forbidden: it always answers."""
    forbidden = ("--logit-bias", "376=-inf", "--logit-bias", "377=-inf", "--logit-bias", "378=-inf")
    result = run("chat", "-m", model, "--backend", "numpy", "--max-tokens", "4", *forbidden, *options, stdin=lines)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def saved_messages(model: str, tmp_path: Path, lines: str, *options: str) -> list[dict[str, str]]:
    path = tmp_path / "saved.json"
    path.unlink(missing_ok=True)
    chat(model, f"{lines}\n/save {path}\n", *options)
    return json.loads(path.read_text("utf-8"))["messages"]


def test_answers_go_to_stdout_and_stay_in_the_conversation(model: str, tmp_path: Path) -> None:
    messages = saved_messages(model, tmp_path, "hello\nand now?", "--system", "be brief")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    shown, _ = chat(model, "hello\nand now?\n", "--system", "be brief")
    assert shown == "".join(message["content"] + "\n" for message in messages if message["role"] == "assistant")


@pytest.mark.parametrize(
    ("lines", "contents"),
    [
        ("one \\\ntwo", ["one \ntwo"]),
        ('"""\none\n\ntwo\n"""', ["one\n\ntwo"]),
        ('"""one\ntwo"""', ["one\ntwo"]),
        ('"""one"""', ["one"]),
        ("\n   \nhello", ["hello"]),
        ("//help", ["/help"]),
        ("one\n/undo\ntwo", ["two"]),
        ("one\ntwo\n/drop", ["two"]),
        ("one\ntwo\nthree\n/drop 2", ["three"]),
        ("one\n/reset\ntwo", ["two"]),
        ("one\n/clear", []),
        ("one\ntwo\n/undo\n/undo\n/undo", []),
        ("one\n/retry", ["one"]),
        ("one\n/exit\ntwo\n", None),
        ("/system be brief\none", ["be brief", "one"]),
        ("/system be brief\n/system none\none", ["one"]),
        ("/nonsense\none", ["one"]),
        ("ünï 你好", ["ünï 你好"]),
    ],
)
def test_lines_and_commands_make_the_conversation(model: str, tmp_path: Path, lines: str, contents: list[str] | None) -> None:
    if contents is None:
        assert chat(model, lines)[0].count("\n") == chat(model, "one\n")[0].count("\n")
        return
    messages = saved_messages(model, tmp_path, lines)
    assert [message["content"] for message in messages if message["role"] != "assistant"] == contents


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ("/help", "/retry"),
        ("/hlep", "did you mean /help?"),
        ("/undo", "nothing to undo"),
        ("/retry", "nothing to answer"),
        ("/stats", "no answer yet"),
        ("one\n/stats", "4 new tokens"),
        ("/set temperature 0.7", "temperature is 0.7"),
        ("/set top-k=3", "top_k is 3"),
        ("/set seed 3\n/set seed none", "seed is None"),
        ('/set stop END "the end"', "stop is 'END' 'the end'"),
        ("/set stop END\n/set stop none", "stop is none"),
        ("/set stop END\n/set stop default", "stop is none"),
        ("/set logit_bias 42=-1.5 7=-inf", "logit_bias is 42=-1.5 7=-inf"),
        ("/set logit_bias 42=1\n/set logit_bias none", "logit_bias is none"),
        ("/set max_tokens default", "max_tokens is 1024"),
        ("/set", "repetition_penalty 1.0"),
        ("/system", "own"),
        ("one", "cut off by max tokens 4"),
    ],
)
def test_commands_say_what_they_did(model: str, lines: str, wanted: str) -> None:
    assert wanted in chat(model, lines + "\n")[1]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("/set warmth 1", "no setting 'warmth'"),
        ("/set temperature hot", "takes a number"),
        ("/set temperature -1", "temperature must be"),
        ("/set stop", "stop takes texts"),
        ('/set stop "a', "No closing quotation"),
        ("/set logit_bias 42", "not ID=BIAS"),
        ("/set logit_bias 1=1 1=2", "twice"),
        ("/save", "file name"),
        ("/drop", "there are 0 exchanges"),
        ("one\n/drop many", "takes a number"),
        ("/save no/such/directory/x", "cannot be written"),
        ("hello " * 30, "context"),
    ],
)
def test_a_failed_line_of_a_script_ends_the_chat_with_an_error(model: str, line: str, wanted: str) -> None:
    result = run("chat", "-m", model, "--backend=numpy", "--context-length=40", stdin=line + "\n")
    assert (result.exit_code, wanted in result.stderr) == (1, True), result.stderr


def test_save_overwrites_only_what_this_chat_wrote(model: str, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    other.write_text("precious")
    chat(model, f"one\n/save {mine}\ntwo\n/save {mine}\n")
    assert len(json.loads(mine.read_text())["messages"]) == 4
    result = run("chat", "-m", model, "--backend", "numpy", stdin=f"/save {other}\n")
    assert result.exit_code == 1
    assert other.read_text() == "precious"


class Terminal(io.StringIO):
    """A stdin at which somebody types lines and presses Ctrl-C."""

    def __init__(self, *events: str | type[BaseException]) -> None:
        super().__init__()
        self.events = list(events)

    def isatty(self) -> bool:
        return True

    def readline(self, *_: Any) -> str:
        event = self.events.pop(0) if self.events else ""
        if isinstance(event, str):
            return event
        raise event


class Scripted:
    """Stands for an LLM that answers each request with the next of its answers, or fails."""

    aborted_stats = None
    sampling_defaults = SamplingDefaults()
    context_length = 100
    tokenizer = SimpleNamespace(
        encode_chat=lambda messages, variables: [0],
        token_id=lambda text: None,
        decode=lambda ids, skip_special: "",
        chat_template=None,
        chat_template_for=lambda variables: Scripted.tokenizer.chat_template,
    )

    def __init__(self, *answers: str | type[BaseException]) -> None:
        self.answers = list(answers)

    def stream(self, prompt: object, params: SamplingParams, **settings: object) -> Iterator[Output]:
        answer = self.answers.pop(0)
        if not isinstance(answer, str):
            raise answer("no")
        yield Output(0, answer, [1], [], "stop", None)


def at_terminal(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[str | type[BaseException], ...], *events: str | type[BaseException]
) -> tuple[list[str], int]:
    """What a conversation holds after these events, and how many of them it left unread."""
    terminal = Terminal(*events)
    monkeypatch.setattr(sys, "stdin", terminal)
    talk = Chat(Scripted(*answers), "scripted")  # type: ignore[arg-type]
    converse(talk)
    return [turn["content"] for turn in talk.turns], len(terminal.events)


CTRL_C = KeyboardInterrupt


@pytest.mark.parametrize(
    ("answers", "events", "turns", "unread"),
    [
        ((ConfigError, "yes"), ("one\n", "/set temperature hot\n", "two\n"), ["two", "yes"], 0),
        ((CTRL_C, "yes"), ("one\n", "two\n"), ["two", "yes"], 0),
        (("yes", ConfigError), ("one\n", "/retry\n"), ["one", "yes"], 0),
        (("yes", CTRL_C), ("one\n", "/retry\n"), ["one", "yes"], 0),
        (("yes", "no"), ("one\n", "/retry\n"), ["one", "no"], 0),
        (("yes",), (CTRL_C, "one\n", CTRL_C, CTRL_C, "two\n"), ["one", "yes"], 1),
    ],
)
def test_at_a_terminal_what_fails_leaves_no_trace_and_ctrl_c_twice_leaves_the_chat(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[Any, ...], events: tuple[Any, ...], turns: list[str], unread: int
) -> None:
    assert at_terminal(monkeypatch, answers, *events) == (turns, unread)


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (
            {"chat_template": "<|channel|>analysis"},
            "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes.",
        ),
        ({"chat_template": "<think>"}, "<think>\nHm.\n</think>\n\nYes."),
        ({"chat_template": "<think>", "decode": lambda ids, skip_special: "assistant\n<think>\n"}, "Hm.\n</think>\n\nYes."),
    ],
)
def test_reasoning_is_shown_apart_and_not_told_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], template: dict[str, Any], answer: str
) -> None:
    """Harmony's templates refuse messages with marks of channels, and templates leave out the reasoning of earlier turns."""
    for name, value in template.items():
        monkeypatch.setattr(Scripted.tokenizer, name, value)
    assert at_terminal(monkeypatch, (answer,), "one\n") == (["one", "Yes."], 0)
    shown = capsys.readouterr()
    assert (shown.out, "Hm.\n" in shown.err) == ("Yes.\n", True)


TOOLS = '''
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

def odd(*numbers): ...
'''
CALL = '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'


def test_a_model_calls_a_function_that_the_user_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "tools.py"
    file.write_text(TOOLS)
    given: list[Any] = []
    monkeypatch.setattr(Scripted.tokenizer, "chat_template", "{% for tool in tools %}<tool_call>{% endfor %}")
    monkeypatch.setattr(Scripted.tokenizer, "encode_chat", lambda messages, variables: given.append(variables) or [0])
    monkeypatch.setattr(
        sys, "stdin", Terminal(f"/tools {file}:odd\n", f"/tools {file}:add\n", "one\n", "/undo\n", "two\n", "/tools none\n")
    )
    scripted = Scripted(CALL % '{"a": 2, "b": 3}', CALL % '{"c": 2}', "Five.", CALL % "{}", "No.")
    talk = Chat(scripted, "scripted")  # type: ignore[arg-type]
    events: list[list[Any]] = []

    def undo(one: Chat, _: str) -> None:
        events.append(one.turns.copy())
        one.turns.clear()

    monkeypatch.setitem(_COMMANDS, "undo", replace(_COMMANDS["undo"], run=undo))  # type: ignore[misc]
    converse(talk)
    assert [turn["role"] for turn in events[0]] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert events[0][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert (events[0][2]["content"], events[0][5]["content"]) == ("5", "Five.")
    assert events[0][4]["content"].startswith("error: TypeError")
    (tool,) = given[0]["tools"]
    assert tool["function"]["parameters"]["required"] == ["a"]
    assert tool["function"]["description"] == "Add two numbers."
    assert [turn["role"] for turn in talk.turns] == ["user", "assistant", "tool", "assistant"]
    assert not talk.tools
    assert "takes numbers, which no call can name" in capsys.readouterr().err


def test_a_history_is_kept_and_goes_on(model: str, tmp_path: Path) -> None:
    kept = tmp_path / "talk.json"
    options = ("chat", "-m", model, "--backend", "numpy", "--max-tokens", "2", "--history", str(kept))
    assert run(*options, "--system", "Be short.", stdin="one\n").exit_code == 0
    first = json.loads(kept.read_text())["messages"]
    assert [one["role"] for one in first] == ["system", "user", "assistant"]
    again = run(*options, stdin="two\n")
    assert "has 1 exchanges, which go on" in again.stderr
    both = json.loads(kept.read_text())["messages"]
    assert both[:3] == first
    assert [one["role"] for one in both[3:]] == ["user", "assistant"]
    assert run(*options, stdin="/reset\n").exit_code == 0
    assert [one["role"] for one in json.loads(kept.read_text())["messages"]] == ["system"]
    for wrong in ("[", '{"messages": [{"role": "assistant", "content": "a"}]}', '{"messages": [{"role": "user", "content": 3}]}'):
        kept.write_text(wrong)
        refused(*options, stdin="two\n", code=2, message="holds no conversation")
        assert kept.read_text() == wrong


LONG = "hello " * 12


def full_context(model: str, monkeypatch: pytest.MonkeyPatch, *events: str) -> Chat:
    """A conversation at a terminal, in a context that has no room for two long messages, after these events."""
    monkeypatch.setattr(sys, "stdin", Terminal(*events))
    with LLM(model, "none", "numpy", context_length=120) as llm:
        talk = Chat(llm, "tiny", {"max_tokens": 2, "logit_bias": dict.fromkeys((376, 377, 378), -math.inf)})
        converse(talk)
    return talk


@pytest.mark.parametrize("agreed", ["y\n", "n\n", ""])
def test_at_a_terminal_a_full_context_asks_whether_the_oldest_may_go(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], agreed: str
) -> None:
    talk = full_context(model, monkeypatch, f"one {LONG}\n", f"two {LONG}\n", agreed)
    assert [turn["content"][:3] for turn in talk.turns[::2]] == (["two"] if agreed == "y\n" else ["one"])
    assert len(talk.turns) == 2
    said = capsys.readouterr().err
    assert "the context holds 120" in said
    assert "Forget the oldest exchange to make room?" in said
    assert ("forgot the oldest exchange; 0 remain" in said) == (agreed == "y\n")
    assert ("/drop 1 forgets" in said) == (agreed != "y\n")


def test_a_retry_may_make_room_too(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = full_context(model, monkeypatch, f"one {LONG}\n", f"two {LONG}\n", "n\n", "/drop\n", f"two {LONG}\n", "/retry\n")
    assert [turn["content"][:3] for turn in talk.turns[::2]] == ["two"]


def test_in_a_script_a_full_context_is_an_error_that_names_what_helps(model: str) -> None:
    limits = ("--context-length=120", "--max-tokens=2", "--logit-bias=377=-inf")
    options = ("chat", "-m", model, "--backend=numpy", *limits)
    result = run(*options, stdin=f"one {LONG}\ntwo {LONG}\n")
    assert result.exit_code == 1
    assert all(wanted in result.stderr for wanted in ("the context holds 120", "/drop 1", "/undo", "/reset", "--context-length"))
    assert run(*options, stdin=f"one {LONG}\n/drop\ntwo {LONG}\n").exit_code == 0
    result = run(*options, stdin=f"one {LONG * 9}\n")
    assert (result.exit_code, "this message is too long" in result.stderr) == (1, True)

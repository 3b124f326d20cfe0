"""The conversation loop: lines in, streamed answers out, and the commands that begin with a slash."""

import contextlib
import dataclasses
import difflib
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from cpuspec.cli.answer import Answer, collect, cut_off_by, figures, memory
from cpuspec.cli.console import emit, note
from cpuspec.config import SamplingParams
from cpuspec.engine.llm import LLM, Message
from cpuspec.errors import ConfigError, CpuspecError

_PROMPT, _MORE = "> ", ". "
_BLOCK = '"""'
_NUMBERS: Mapping[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "max_tokens": int,
    "max_draft_tokens": int,
}


@dataclass
class Chat:
    """A conversation so far: `turns` alternate between user and assistant."""

    llm: LLM
    model: str
    params: SamplingParams
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    last: Answer | None = None
    saved: Path | None = None
    ended: bool = False

    @property
    def messages(self) -> list[Message]:
        """What the chat template gets."""
        return ([{"role": "system", "content": self.system}] if self.system is not None else []) + self.turns


def converse(chat: Chat) -> None:
    """Read messages and commands from stdin until it ends or /exit.

    At a terminal, errors are reported and the conversation goes on; elsewhere the first one ends it.
    """
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    if at_terminal:
        _enable_editing()
        note(f"{chat.model}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    interrupted = False
    while not chat.ended:
        try:
            message = _read_message(at_terminal)
            interrupted = False
            if message is None:
                break
            _act(chat, message)
        except KeyboardInterrupt:
            if interrupted:
                break
            note("\n(Ctrl-C again, or Ctrl-D, leaves)")
            interrupted = True
        except CpuspecError as error:
            if not at_terminal:
                raise
            note(f"error: {error}")


def _enable_editing() -> None:
    """Line editing and history where Python has them."""
    with contextlib.suppress(ImportError):
        import_module("readline")  # input() uses it from then on


def _read_message(at_terminal: bool) -> str | None:
    '''The next message: a line, lines joined by a backslash at their end, or a block between """. None at the end of input.'''
    line = _read_line(at_terminal, _PROMPT)
    if line is None or not line.strip():
        return line
    if line.lstrip().startswith(_BLOCK):
        return _read_block(line.lstrip().removeprefix(_BLOCK), at_terminal)
    lines = [line]
    while lines[-1].endswith("\\") and (more := _read_line(at_terminal, _MORE)) is not None:
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(more)
    return "\n".join(lines)


def _read_block(line: str | None, at_terminal: bool) -> str:
    lines = []
    while line is not None and not line.rstrip().endswith(_BLOCK):
        lines.append(line)
        line = _read_line(at_terminal, _MORE)
    if line is not None:
        lines.append(line.rstrip().removesuffix(_BLOCK))
    return "\n".join(lines).strip("\n")


def _read_line(at_terminal: bool, prompt: str) -> str | None:
    """A line without its end, or None at the end of input. Raises ConfigError for bytes that are not UTF-8."""
    try:
        if not at_terminal:
            line = sys.stdin.readline() if sys.stdin is not None else ""
            if not line:
                return None
        elif sys.stdout.isatty():
            line = input(prompt)
        else:  # input() would write the prompt into the output
            print(prompt, end="", file=sys.stderr, flush=True)
            line = input()
        line.encode()
    except EOFError:
        note("")
        return None
    except UnicodeError:
        raise ConfigError("this line is not valid UTF-8; check the terminal's encoding") from None
    return line.rstrip("\r\n")


def _act(chat: Chat, message: str) -> None:
    if not message.strip():
        return
    if not message.startswith("/") or message.startswith("//"):
        _answer(chat, message.removeprefix("/") if message.startswith("//") else message)
        return
    name, _, argument = message[1:].partition(" ")
    if (command := _COMMANDS.get(name)) is None:
        near = difflib.get_close_matches(name, _COMMANDS, n=1)
        hint = f"; did you mean /{near[0]}?" if near else ""
        note(f"there is no command /{name}{hint} (/help lists them; begin a message with // where it begins with a slash)")
    else:
        command.run(chat, argument.strip())


def _answer(chat: Chat, text: str) -> None:
    """Let the model answer `text`. A message that cannot be answered, or was interrupted before a word, leaves no trace."""
    chat.turns.append({"role": "user", "content": text})
    try:
        answer = collect(chat.llm, chat.messages, chat.params, emit)
    except BaseException:
        chat.turns.pop()
        raise
    emit("" if answer.text.endswith("\n") else "\n")
    chat.last = answer
    if answer.finish_reason == "aborted" and not answer.text:
        chat.turns.pop()
        note("(stopped before the first word; the message is forgotten)")
        return
    chat.turns.append({"role": "assistant", "content": answer.text})
    if answer.finish_reason == "aborted":
        note("(stopped; what was said stays in the conversation)")
    elif reason := cut_off_by(answer, chat.params):
        note(f"(cut off by {reason})")


def _help(chat: Chat, argument: str) -> None:
    usages = [f"/{name} {command.argument}".rstrip() for name, command in _COMMANDS.items()]
    width = max(map(len, usages))
    for usage, command in zip(usages, _COMMANDS.values(), strict=True):
        note(f"  {usage:<{width}}  {command.help}")
    note(f"A backslash at the end of a line continues the message; {_BLOCK} begins and ends one of several lines.")


def _reset(chat: Chat, argument: str) -> None:
    chat.turns.clear()
    note("(the conversation is empty)")


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.system = None if argument == "none" else argument
    note("(no system message but the model's own)" if chat.system is None else f"(system message: {chat.system})")


def _undo(chat: Chat, argument: str) -> None:
    if not chat.turns:
        note("(there is nothing to undo)")
        return
    del chat.turns[-2:]
    note(f"(the last exchange is forgotten; {len(chat.turns) // 2} remain)")


def _retry(chat: Chat, argument: str) -> None:
    if not chat.turns:
        note("(there is nothing to answer again)")
        return
    exchange = chat.turns[-2:]
    del chat.turns[-2:]
    length = len(chat.turns)
    try:
        _answer(chat, exchange[0]["content"])
    finally:
        if len(chat.turns) == length:  # no answer came: keep the old one
            chat.turns += exchange


def _stats(chat: Chat, argument: str) -> None:
    note("(there is no answer yet)" if chat.last is None else figures(chat.last, chat.params))
    if held := memory(chat.llm):
        note(held)


def _set(chat: Chat, argument: str) -> None:
    name, _, text = argument.replace("=", " ").partition(" ")
    name = name.removeprefix("--").replace("-", "_")
    if not name:
        note("\n".join(f"  {known} {getattr(chat.params, known)}" for known in _NUMBERS))
        return
    if name not in _NUMBERS:
        raise ConfigError(f"there is no setting {name!r}; wanted one of {', '.join(_NUMBERS)}")
    try:
        unset = name in ("seed", "max_draft_tokens") and text.strip() == "none"
        value: Any = None if unset else _NUMBERS[name](text)
    except ValueError:
        raise ConfigError(f"{name} takes a number, got {text.strip()!r}") from None
    chat.params = dataclasses.replace(chat.params, **{name: value})
    note(f"({name} is {value})")


def _save(chat: Chat, argument: str) -> None:
    try:
        names = shlex.split(argument)
    except ValueError:
        names = [argument]
    if len(names) != 1:
        raise ConfigError("give one file name, as /save talk.json")
    path = Path(names[0]).expanduser().absolute()
    document = json.dumps({"model": chat.model, "messages": chat.messages}, indent=2, ensure_ascii=False) + "\n"
    try:
        with path.open("w" if path == chat.saved else "x", encoding="utf-8") as stream:
            stream.write(document)
    except FileExistsError:
        raise ConfigError(f"{path} exists and is not overwritten; choose another name") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    chat.saved = path
    note(f"(saved {len(chat.messages)} messages to {path})")


def _exit(chat: Chat, argument: str) -> None:
    chat.ended = True


@dataclass(frozen=True)
class _Command:
    run: Callable[[Chat, str], None]
    argument: str
    help: str


_COMMANDS: Mapping[str, _Command] = {
    "help": _Command(_help, "", "this list"),
    "reset": _Command(_reset, "", "forget the conversation, keep system message and settings"),
    "clear": _Command(_reset, "", "the same as /reset"),
    "system": _Command(_system, "TEXT", "set the system message; none removes it, no text shows it"),
    "undo": _Command(_undo, "", "forget the last message and its answer"),
    "retry": _Command(_retry, "", "answer the last message again"),
    "stats": _Command(_stats, "", "figures of the last answer"),
    "set": _Command(_set, "NAME VALUE", "change a setting, as /set temperature 0.7; without a name, show them"),
    "save": _Command(_save, "FILE", "write the conversation as JSON"),
    "exit": _Command(_exit, "", "leave; so does Ctrl-D"),
    "quit": _Command(_exit, "", "the same as /exit"),
}

"""The conversation loop: lines in, streamed answers out, and the commands that begin with a slash."""

import contextlib
import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from cpuspec.checkpoints.recipes import DEFAULT_RECIPE
from cpuspec.cli import options
from cpuspec.cli.answer import StreamedAnswer, cut_off_by, describe_sampling, figures, memory_line, stream_answer, with_seed
from cpuspec.cli.console import emit, emit_apart, emit_generated, exit_codes, note
from cpuspec.cli.opening import load_llm, sampling_defaults, thinking_variables
from cpuspec.cli.options import read_logit_bias
from cpuspec.cli.tools import Tool, open_tool
from cpuspec.engine.llm import LLM, Message
from cpuspec.errors import ConfigError, CpuspecError
from cpuspec.files import read_file, write_file
from cpuspec.settings import SAMPLING_FIELDS, SamplingParams

_PROMPT, _MORE = "> ", ". "
_BLOCK = '"""'
_MOST_CALLS = 8  # of tools, one after the other, before the model must answer


@exit_codes()
@options.takes_running("context_length", "mmap", "draft_format", "draft_vocab", *options.HOW, *options.ADAPTED)
@options.takes_sampling(without=("ignore_eos", "logprobs", "parse_special"))
def chat(
    model: options.ModelArgument = DEFAULT_RECIPE,
    *,
    draft: options.DraftOption = None,
    system: options.SystemOption = None,
    thinking: options.ThinkingOption = None,
    tool: Annotated[list[str] | None, options.option("FILE.py:FUNCTION", "A function that the model may call. Repeatable.")] = None,
    history: Annotated[
        Path | None, options.option("FILE", "Keep the conversation in this file, and go on with the one that it holds.")
    ] = None,
    sampling: dict[str, Any],
    running: options.Running,
) -> None:
    """Talk with a model. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."""
    if system is not None:
        options.checked_text(system, "--system")
    with options.usage_errors():
        tools = {one.name: one for one in map(open_tool, tool or ())}
        before, said = read_history(history) if history else (None, [])

    with load_llm(model, draft, running) as llm:
        if not llm.tokenizer.has_chat_template:
            raise ConfigError(f"{model} has no chat template; `cpuspec generate --raw` continues plain text with it")
        sampling_defaults(llm)
        talk = Chat(llm, model, sampling, before if system is None else system, thinking_variables(llm, thinking), said)
        talk.tools, talk.history = tools, history
        if said:
            note(f"({history} has {_num_exchanges(talk)} exchanges, which go on; /reset forgets them)")
        converse(talk)


@dataclass
class Chat:
    """A conversation so far. `turns`: exchanges of a user's message, calls of tools with their results, and an answer.

    given: the settings that the user chose, fields of SamplingParams; the model's own apply to all others. variables: of the chat
    template. tools: by name. history: the file that each exchange is written to.
    """

    llm: LLM
    model: str
    given: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    variables: dict[str, bool] = field(default_factory=dict)
    turns: list[Message] = field(default_factory=list)
    tools: dict[str, Tool] = field(default_factory=dict)
    history: Path | None = None
    last: StreamedAnswer | None = None
    saved: Path | None = None
    at_terminal: bool = False
    ended: bool = False

    @property
    def params(self) -> SamplingParams:
        """The sampling params of the next answer."""
        return self.params_with(self.given)

    def params_with(self, given: Mapping[str, Any]) -> SamplingParams:
        """The sampling params under other settings of the user's. Raises ConfigError."""
        return self.llm.sampling_defaults.under(given)

    def messages(self, num_dropped: int = 0) -> list[Message]:
        """The messages for the chat template, without the `num_dropped` oldest exchanges."""
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        return first + self.turns[self.start_of(num_dropped) :]

    def start_of(self, exchange: int) -> int:
        """The number of the turn with which an exchange begins; negative ones count from the last."""
        starts = [number for number, turn in enumerate(self.turns) if turn["role"] == "user"]
        return [*starts, len(self.turns)][exchange] if exchange >= 0 else starts[exchange]

    @property
    def given_to_template(self) -> dict[str, Any]:
        """The variables of the chat template, tools among them."""
        return {**self.variables, **({"tools": [one.declaration for one in self.tools.values()]} if self.tools else {})}


def converse(chat: Chat) -> None:
    """Read messages and commands from stdin until it ends or /exit.

    At a terminal, errors are reported and the conversation goes on; elsewhere the first one ends it.
    """
    at_terminal = chat.at_terminal = sys.stdin is not None and sys.stdin.isatty()
    if at_terminal:
        with contextlib.suppress(ImportError):
            import_module("readline")  # line editing and history, where Python has them: input() uses it from then on
        chosen = describe_sampling(chat.params, chat.llm.sampling_defaults)
        note(f"{chat.model}: {chosen}; /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
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


def _answer(chat: Chat, text: str) -> bool:
    """Let the model answer `text`, and return whether it did.

    A message that cannot be answered, or is interrupted before the first word, is removed from the conversation.
    """
    chat.turns.append({"role": "user", "content": text})
    try:
        answer = _streamed(chat)
        for _ in range(_MOST_CALLS):
            if not answer.calls or answer.finish_reason != "stop":
                break
            _call_tools(chat, answer)
            answer = _streamed(chat)
    except BaseException:
        del chat.turns[chat.start_of(-1) :]
        raise
    emit("" if answer.content.endswith("\n") else "\n")
    chat.last = answer
    if answer.finish_reason == "aborted" and not answer.text:
        del chat.turns[chat.start_of(-1) :]
        note("(stopped before the first word; the message is forgotten)")
        return False
    chat.turns.append({"role": "assistant", "content": answer.content})
    _keep_history(chat)
    if answer.finish_reason == "aborted":
        note("(stopped; what was said stays in the conversation)")
    elif reason := cut_off_by(answer):
        full = "" if len(answer.token_ids) == answer.params.max_tokens else "; /drop forgets the oldest exchange and makes room"
        note(f"(cut off by {reason}{full})")
    return True


def _streamed(chat: Chat) -> StreamedAnswer:
    """Show what the model says next."""
    params, variables = with_seed(chat.params), chat.given_to_template
    try:
        return stream_answer(chat.llm, chat.messages(), params, emit_generated, emit_apart, variables)
    except ConfigError:
        if not _make_room(chat):
            raise
        return stream_answer(chat.llm, chat.messages(), params, emit_generated, emit_apart, variables)


def _call_tools(chat: Chat, answer: StreamedAnswer) -> None:
    """Run what the model calls, and add its message and the results to the conversation."""
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for number, (name, arguments) in enumerate(answer.calls):
        tool, call_id = chat.tools.get(name), f"call{len(chat.turns)}_{number}"
        result = tool.call(arguments) if tool else f"error: there is no tool {name}"
        note(f"\n({name} -> {result[:200]})")
        try:
            given = json.loads(arguments or "{}")
        except ValueError:
            given = {}
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": given}})
        results.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": result})
    chat.turns += [{"role": "assistant", "content": answer.content, "tool_calls": calls}, *results]


def read_history(path: Path) -> tuple[str | None, list[Message]]:
    """The system message and the turns that a file of --history or /save holds; none where there is no file. Raises ConfigError."""
    if not path.exists():
        return None, []
    try:
        messages = json.loads(read_file(path, options.MAX_PROMPT_BYTES, ConfigError))["messages"]
        roles = [one["role"] for one in messages]
        sound = all(isinstance(one["content"], str) for one in messages) and not {*roles} - {"system", "user", "assistant", "tool"}
        begins = "system" in roles[:1]
        sound = sound and "system" not in roles[begins:] and roles[begins : begins + 1] in ([], ["user"])
    except (ValueError, TypeError, KeyError, RecursionError):
        sound = False
    if not sound:
        raise ConfigError(f"{path} holds no conversation; wanted what /save writes, or the name of a new file")
    return (messages[0]["content"] if begins else None), messages[begins:]


def _keep_history(chat: Chat) -> None:
    if chat.history:
        try:
            write_file(chat.history, _document(chat))
        except OSError as error:
            raise ConfigError(f"{chat.history} cannot be written: {error.strerror or error}") from None


def _document(chat: Chat) -> str:
    return json.dumps({"model": chat.model, "messages": chat.messages()}, indent=2, ensure_ascii=False) + "\n"


def _num_exchanges(chat: Chat) -> int:
    """The number of user's turns that have been answered."""
    return sum(turn["role"] == "user" for turn in chat.turns) - (bool(chat.turns) and chat.turns[-1]["role"] != "assistant")


def _make_room(chat: Chat) -> bool:
    """If the messages exceed the context, ask the user at the terminal, and forget the oldest. False if they fit.

    Raises ConfigError with a remedy if they do not fit and the user disagrees, or nobody can be asked.
    """
    room, num_tokens = chat.llm.context_length, _num_tokens(chat, 0)
    if num_tokens < room:
        return False
    full = f"the conversation has {num_tokens} tokens and the context holds {room}, at least one of them generated"
    num_old = _num_exchanges(chat)
    num_dropped = next((count for count in range(1, num_old + 1) if _num_tokens(chat, count) < room), None)
    if num_dropped is None:
        raise ConfigError(f"{full}; this message is too long for it: shorten it, or start with a larger --context-length")
    question = f"{full}. Forget the {_exchanges(num_dropped)} to make room? [y/N] "
    if not chat.at_terminal or (_read_line(True, question) or "").strip().lower() not in ("y", "yes"):
        raise ConfigError(
            f"{full}; /drop {num_dropped} forgets the {_exchanges(num_dropped)} and makes room, /undo the last one, /reset all "
            "(/save FILE keeps them); or start with a larger --context-length"
        )
    _forget(chat, num_dropped)
    return True


def _num_tokens(chat: Chat, num_dropped: int) -> int:
    """The tokens of the prompt that the messages make without the `num_dropped` oldest exchanges."""
    return len(chat.llm.tokenizer.encode_chat(chat.messages(num_dropped), variables=chat.given_to_template))


def _exchanges(count: int) -> str:
    return "oldest exchange" if count == 1 else f"{count} oldest exchanges"


def _forget(chat: Chat, count: int) -> None:
    del chat.turns[: chat.start_of(count)]
    _keep_history(chat)
    note(f"(forgot the {_exchanges(count)}; {_num_exchanges(chat)} remain)")


def _help(chat: Chat, argument: str) -> None:
    usages = [f"/{name} {command.argument}".rstrip() for name, command in _COMMANDS.items()]
    width = max(map(len, usages))
    for usage, command in zip(usages, _COMMANDS.values(), strict=True):
        note(f"  {usage:<{width}}  {command.help}")
    note(f"A backslash at the end of a line continues the message; {_BLOCK} begins and ends one of several lines.")


def _reset(chat: Chat, argument: str) -> None:
    chat.turns.clear()
    _keep_history(chat)
    note("(the conversation is empty)")


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.system = None if argument == "none" else argument
    note("(no system message but the model's own)" if chat.system is None else f"(system message: {chat.system})")


def _thinking(chat: Chat, argument: str) -> None:
    if argument not in ("", "on", "off", "default"):
        raise ConfigError(f"/thinking takes on, off or default, got {argument!r}")
    if argument:
        chat.variables = thinking_variables(chat.llm, {"on": True, "off": False}.get(argument))
    note(
        f"(reasoning: {'on' if on else 'off'})"
        if (on := chat.variables.get("enable_thinking")) is not None
        else "(reasoning: as the model's chat template has it)"
    )


def _tools(chat: Chat, argument: str) -> None:
    if argument == "none":
        chat.tools.clear()
    elif argument:
        tool = open_tool(argument)
        if "tools" not in (chat.llm.tokenizer.chat_template_for({"tools": True}) or ""):
            raise ConfigError("this model's chat template takes no tools; use a model that calls some, as Qwen3 or Llama 3")
        chat.tools[tool.name] = tool
    note(f"(tools: {', '.join(chat.tools) or 'none'})")


def _undo(chat: Chat, argument: str) -> None:
    if not chat.turns:
        note("(there is nothing to undo)")
        return
    del chat.turns[chat.start_of(-1) :]
    _keep_history(chat)
    note(f"(the last exchange is forgotten; {_num_exchanges(chat)} remain)")


def _drop(chat: Chat, argument: str) -> None:
    count = _number(int)("drop", argument or "1")
    if not 1 <= count <= _num_exchanges(chat):
        raise ConfigError(f"there are {_num_exchanges(chat)} exchanges; /drop takes how many of the oldest to forget, got {count}")
    _forget(chat, count)


def _retry(chat: Chat, argument: str) -> None:
    if not chat.turns:
        note("(there is nothing to answer again)")
        return
    exchange, answered = chat.turns[chat.start_of(-1) :], False
    del chat.turns[chat.start_of(-1) :]
    try:
        answered = _answer(chat, exchange[0]["content"])
    finally:
        if not answered:
            chat.turns += exchange


def _stats(chat: Chat, argument: str) -> None:
    note("(there is no answer yet)" if chat.last is None else figures(chat.last, chat.llm.sampling_defaults))
    if held := memory_line(chat.llm):
        note(held)


def _set(chat: Chat, argument: str) -> None:
    name, *rest = re.split(r"[\s=]+", argument, maxsplit=1)
    name, text = name.removeprefix("--").replace("-", "_"), "".join(rest).strip()
    if not name:
        note("\n".join(f"  {known} {_shown(chat, known)}" for known in _SETTINGS))
        return
    if name not in _SETTINGS:
        raise ConfigError(f"there is no setting {name!r}; wanted one of {', '.join(_SETTINGS)}")
    given = dict(chat.given)
    if text == "default":
        given.pop(name, None)
    else:
        given[name] = _SETTINGS[name](name, text)
    chat.params_with(given)
    chat.given = given
    note(f"({name} is {_shown(chat, name)})")


def _shown(chat: Chat, name: str) -> str:
    """The value of a setting, and where it is from if it is the model's."""
    value = getattr(chat.params, name)
    if name == "logit_bias":
        value = " ".join(f"{token}={bias:g}" for token, bias in value.items()) or "none"
    elif name == "stop":
        value = " ".join(map(repr, value)) or "none"
    own = name in SAMPLING_FIELDS and name not in chat.given and getattr(chat.llm.sampling_defaults, name) is not None
    return f"{value} (model's own)" if own else str(value)


def _number(kind: type, unset: bool = False) -> Callable[[str, str], Any]:
    """A reader of numbers; with `unset`, of none as well."""

    def read(name: str, text: str) -> Any:
        if unset and text == "none":
            return None
        try:
            return kind(text)
        except ValueError:
            raise ConfigError(f"{name} takes a number{' or none' if unset else ''}, got {text!r}") from None

    return read


def _words(name: str, text: str) -> list[str]:
    """The words between spaces, outside quotes; no words for none."""
    try:
        return [] if text == "none" else shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}: {text!r}") from None


def _stops(name: str, text: str) -> tuple[str, ...]:
    if not (stops := tuple(_words(name, text))) and text != "none":
        raise ConfigError('stop takes texts, as /set stop "the end" END, or none')
    return stops


def _biases(name: str, text: str) -> dict[int, float]:
    if not (entries := _words(name, text)) and text != "none":
        raise ConfigError("logit_bias takes ID=BIAS, as /set logit_bias 42=-1.5 7=-inf, or none")
    return read_logit_bias(entries)


_SETTINGS: Mapping[str, Callable[[str, str], Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), _number(float)),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _number(float)),
    **dict.fromkeys(("top_k", "max_tokens"), _number(int)),
    **dict.fromkeys(("seed", "max_draft_tokens"), _number(int, unset=True)),
    "logit_bias": _biases,
    "stop": _stops,
}


def _save(chat: Chat, argument: str) -> None:
    try:
        words = shlex.shlex(argument, posix=True)
        words.whitespace_split, words.commenters = True, ""
        words.escape = words.escape.replace(os.sep, "")  # which separates names of a path on Windows
        names = list(words)
    except ValueError:
        names = [argument]
    if len(names) != 1:
        raise ConfigError("give one file name, as /save talk.json")
    path = Path(names[0]).expanduser().absolute()
    document = _document(chat)
    try:
        with path.open("w" if path == chat.saved else "x", encoding="utf-8") as stream:
            stream.write(document)
    except FileExistsError:
        raise ConfigError(f"{path} exists and is not overwritten; choose another name") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    chat.saved = path
    note(f"(saved {len(chat.messages())} messages to {path})")


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
    "thinking": _Command(_thinking, "on|off", "let the model reason before it answers, or not; default for its template's way"),
    "think": _Command(_thinking, "on|off", "the same as /thinking"),
    "tools": _Command(_tools, "FILE.py:FUNCTION", "let the model call a function; none takes all away, without a name list them"),
    "undo": _Command(_undo, "", "forget the last message and its answer"),
    "drop": _Command(_drop, "N", "forget the N oldest exchanges, by default one, to make room in the context"),
    "retry": _Command(_retry, "", "answer the last message again"),
    "stats": _Command(_stats, "", "figures of the last answer"),
    "set": _Command(
        _set,
        "NAME VALUE",
        "change a setting, as /set temperature 0.7, or back, as /set temperature default; without a name, show them",
    ),
    "save": _Command(_save, "FILE", "write the conversation as JSON"),
    "exit": _Command(_exit, "", "leave; so does Ctrl-D"),
    "quit": _Command(_exit, "", "the same as /exit"),
}

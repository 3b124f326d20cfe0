"""Prompts for the target to answer: lines of files, functions cut out of installed packages, and turns of its own making.

Each source yields the same prompts in the same order again, so that a run can go on where another ended.
"""

import ast
import hashlib
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cpuspec.batch.lines import read_lines
from cpuspec.errors import ConfigError, CpuspecError, in_one_line
from cpuspec.evaluate.prompts import CHAT_FORMS, parse_line, prompt_ids
from cpuspec.text import Tokenizer

_NOT_SOURCE = {"tests", "test", "testing", "_vendor", "vendored", "node_modules"}
_MAX_SOURCE_BYTES = 1 << 20
_MOST_OF_A_FILE = 8  # functions: more of one file are too much alike
_FEWEST_CHARACTERS = 40  # of a docstring that says what to write
_FEWEST_STATEMENTS = 2  # of the body that was left out
_USERS_TURN = "THE-USER-SAYS"  # what a chat template is cut at


@dataclass(frozen=True)
class Prompt:
    """One prompt. id: unlike any other of its run. source: where it is from, for reports.

    text: all of it, for comparison with evaluation sets. said: what the user wrote, for comparison with other prompts; the chat
    template's words and system messages are the same in many. ids: None where the target makes up what a user says.
    """

    id: str
    source: str
    text: str = ""
    said: str = ""
    ids: tuple[int, ...] | None = None


def read_line_prompts(path: Path, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """A prompt of each line of a JSON-lines file: `messages`, `text` or `prompt`, or `ids`. Raises ConfigError for other lines."""
    begin: list[int] = []  # of a rendered conversation, which ids may be
    with suppress(ConfigError):
        begin = users_turn(tokenizer)
    for line in read_lines(path):
        where = f"{path}, line {line.number}"
        value = parse_line(line.content, where)
        ids = line_ids(value, tokenizer, where)
        said = "\n".join(one.get("content") or "" for one in value.get("messages", ()) if one["role"] == "user")
        if not said:
            said = tokenizer.decode(ids[len(begin) :] if ids[: len(begin)] == begin else ids)
        yield Prompt(f"{path.name}:{line.number}", path.name, tokenizer.decode(ids), said, tuple(ids))


def line_ids(value: dict[str, Any], tokenizer: Tokenizer, where: str) -> list[int]:
    """Token ids of a line's one field of messages, text, prompt and ids. Raises ConfigError, naming `where`."""
    given = [name for name in ("messages", "text", "prompt", "ids") if name in value]
    if len(given) != 1:
        raise ConfigError(f"{where} has {' and '.join(given) or 'none of the fields'}; wanted one of messages, text, prompt, ids")
    content = value[given[0]]
    try:
        if given[0] == "ids":
            return checked_ids(content, tokenizer, f"{where}: ids")
        if isinstance(content, list if given[0] == "messages" else str) and (ids := prompt_ids(tokenizer, content)):
            return ids
    except CpuspecError as error:
        raise ConfigError(f"{where}: {error}") from None
    wanted = "a list of messages" if given[0] == "messages" else "a text that is not empty"
    raise ConfigError(f"{where}: {given[0]} is {in_one_line(repr(content), 60)}, wanted {wanted}")


def checked_ids(value: object, tokenizer: Tokenizer, what: str) -> list[int]:
    """Token ids of the model's vocabulary, at least one. Raises ConfigError."""
    if not isinstance(value, list) or not value or not all(type(one) is int and 0 <= one < tokenizer.vocab_size for one in value):
        got = in_one_line(repr(value), 60)
        raise ConfigError(f"{what} is {got}, wanted a list of ids below {tokenizer.vocab_size}, the tokens of this model")
    return value


def function_prompts(packages: Sequence[str], tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Functions of installed packages, head and docstring, for the model to write the body.

    Every second one is what a user asks for, where the model has a chat template; the others are raw. Files come in an order of
    no meaning, and of each file a few functions. Nothing is imported. Raises ConfigError for a package that is not installed.
    """
    files = sorted((file for name in packages for file in _source_files(name)), key=lambda file: _digest(f"{file[0]}/{file[1]}"))
    is_chat = False
    for package, place, path in files:
        functions = sorted(_functions(path), key=lambda function: _digest(function[1]))
        for line, text in functions[:_MOST_OF_A_FILE]:
            is_chat = tokenizer.has_chat_template and not is_chat
            said = [{"role": "user", "content": CHAT_FORMS["complete"].replace("{}", text)}] if is_chat else text + "\n"
            yield Prompt(f"{package}/{place}:{line}", f"functions of {package}", text, text, tuple(prompt_ids(tokenizer, said)))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def _source_files(package: str) -> list[tuple[str, str, Path]]:
    """(package, path within it, path) of each Python file of a package, without its tests."""
    found = find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"there is no installed package {package!r}; wanted names that can be imported, as numpy,scipy")
    roots = [Path(root) for root in found.submodule_search_locations]
    places = [(root, path.relative_to(root)) for root in roots for path in sorted(root.rglob("*.py"))]
    return [(package, place.as_posix(), root / place) for root, place in places if _NOT_SOURCE.isdisjoint(place.parts)]


def _functions(path: Path) -> list[tuple[int, str]]:
    """Line and text of each documented function of a file: its head and docstring. None of what is no Python."""
    try:
        if path.stat().st_size > _MAX_SOURCE_BYTES:
            return []
        source = path.read_text("utf-8")
        with warnings.catch_warnings(action="ignore"):  # of escapes that are out of use
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    lines, found = source.split("\n"), []  # as `ast` counts them
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) <= _FEWEST_STATEMENTS:
            continue
        documented = ast.get_docstring(node, clean=False)
        if documented is None or len(documented) < _FEWEST_CHARACTERS or node.body[0].end_lineno is None:
            continue
        text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
        if text.startswith(("def ", "async def ")) and text.endswith(('"', "'")):
            found.append((node.lineno, text))
    return found


def users_turn(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the model's chat template up to where the user speaks. Raises ConfigError where that cannot be found."""
    if not tokenizer.has_chat_template:
        raise ConfigError("the model has no chat template, so it cannot make prompts of its own; give files or --functions")
    text = tokenizer.apply_chat_template([{"role": "user", "content": _USERS_TURN}], add_generation_prompt=False)
    before, found, _ = text.partition(_USERS_TURN)
    if not found:
        raise ConfigError("the model's chat template does not show what the user says; give files or --functions instead")
    return tokenizer.encode(before, add_special=False, parse_special=True)


def self_made(number: int) -> Iterator[Prompt]:
    """Prompts that the target is to make up."""
    return (Prompt(f"self-made:{index}", "self-made") for index in range(number))


def in_turn(sources: Sequence[Callable[[], Iterator[Prompt]]]) -> Iterator[Prompt]:
    """A prompt of each source in turn, until all are at their end."""
    left = [source() for source in sources]
    while left:
        for source in list(left):
            if prompt := next(source, None):
                yield prompt
            else:
                left.remove(source)

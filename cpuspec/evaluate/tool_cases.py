"""200 conversations with tools, and the calls that they ask for: written for this project, none copied from a published set.

Beside this file, `tool_cases.jsonl` has the tools, sets of them, and all cases but the long ones, which are made here. Cases of a
kind share their tools: a server that keeps prefixes reads these once.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

KINDS = ("simple", "multiple", "parallel", "irrelevance", "long")
Tools = tuple[dict[str, Any], ...]
Call = tuple[str, Mapping[str, Any]]  # a function and its arguments; any value of a tuple is right, and None stands for absence


@dataclass(frozen=True)
class ToolCase:
    """A question, the tools beside it, and the calls that answer it, in any order."""

    kind: str
    question: str
    tools: Tools
    calls: tuple[Call, ...]


_WORDS = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "lambda", "theta", "zeta")


def _file(number: int) -> tuple[str, str]:
    """A path and a text of ten to thirty lines with what JSON must escape: quotes, backslashes, tabs, other alphabets."""
    word, other = _WORDS[number % 10], _WORDS[(number + 3) % 10]
    match number % 5:
        case 0:
            body = "\n\n".join(
                f'def {name}(value: int) -> str:\n    """Say {name} with a number."""\n    if value < {number}:\n'
                f"        raise ValueError(f\"too small: {{value!r}}\")\n    return '{name}:\\t' + str(value)"
                for name in (word, other)
            )
            return f"src/{word}.py", f'import sys\n\n\n{body}\n\n\nif __name__ == "__main__":\n    print({word}(int(sys.argv[1])))'
        case 1:
            rows = ",\n".join(f'    {{"id": {one}, "name": "{word} \\"{one}\\"", "ok": true, "rate": {one}.5}}' for one in range(6))
            return f"data/{word}.json", f'{{\n  "version": {number},\n  "items": [\n{rows}\n  ]\n}}'
        case 2:
            steps = "\n".join(f'echo "step {one}: {word}"\ncp -- "$SRC/{one}.txt" "$DST/" || exit {one}' for one in range(1, 6))
            return f"bin/{word}.sh", f"#!/bin/sh\nset -eu\nSRC=${{1:-.}}\nDST=$HOME/{other}-{number}\n{steps}\nprintf '%s\\n' done"
        case 3:
            items = "\n".join(f"    <li class=\"{word}\" data-n='{one}'>{other} &amp; {one} – naïve</li>" for one in range(8))
            return (
                f"web/{word}.html",
                f"<!doctype html>\n<html>\n<body>\n  <h1>{word} {number}</h1>\n  <ul>\n{items}\n  </ul>\n</body>\n</html>",
            )
        case _:
            parts = "\n".join(f"  {other}_{one}:\n    path: C:\\\\{word}\\\\{one}\n    tags: [a, 'b c', \"d\"]" for one in range(5))
            return f"conf/{word}.yaml", f"# {word} {number}\nname: {word}\nservices:\n{parts}"


def _long(tools: Tools) -> Iterator[ToolCase]:
    """Cases with texts of ten to thirty lines: files to write, to edit and to patch."""
    for number in range(20):
        path, text = _file(number)
        question = f"Write this text to the file {path}, exactly as it stands here:\n\n```\n{text}\n```"
        yield ToolCase("long", question, tools, (("write_file", {"path": path, "content": text}),))
    for number in range(10):
        path, text = _file(5 * number)
        name = _WORDS[5 * number % 10]
        body = text.splitlines()
        old = "\n".join(body[body.index(f"def {name}(value: int) -> str:") + 2 :][:3])
        new = f'    checked = max(value, {number})\n    return "{name}" + "\\n" * checked'
        question = f"In {path}, replace\n\n```\n{old}\n```\n\nby\n\n```\n{new}\n```\n\nwith edit_file."
        yield ToolCase("long", question, tools, (("edit_file", {"path": path, "old_text": old, "new_text": new}),))
    for number in range(10):
        path, text = _file(number)
        lines = text.splitlines()
        context, removed = lines[0], lines[1] or lines[2]
        kept = [] if lines[1] else [" "]
        hunk = [f" {context}", *kept, f"-{removed}", f'+{removed}  # {_WORDS[number]} "{number}"', f" {lines[3]}"]
        patch = "\n".join([f"--- a/{path}", f"+++ b/{path}", f"@@ -1,{3 + len(kept)} +1,{3 + len(kept)} @@", *hunk])
        yield ToolCase(
            "long", f"Apply this patch with apply_patch:\n\n```diff\n{patch}\n```", tools, (("apply_patch", {"patch": patch}),)
        )


def tool_cases() -> list[ToolCase]:
    """All cases, kind by kind."""
    sets: dict[str, Tools] = {}
    found = []
    for line in files(__package__).joinpath("tool_cases.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        if "tool" in row:
            sets[row["tool"]["name"]] = ({"type": "function", "function": row["tool"]},)
        elif "set" in row:
            sets[row["set"]] = tuple(tool for name in row["tools"] for tool in sets[name])
        else:
            calls = tuple((name, {key: _either(value) for key, value in given.items()}) for name, given in row["calls"])
            found.append(ToolCase(row["kind"], row["question"], sets[row["tools"]], calls))
    return [*found, *_long(sets["editor"])]


def _either(value: Any) -> Any:
    return tuple(value["any"]) if isinstance(value, dict) else value

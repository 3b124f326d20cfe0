"""The part of a JSON schema that a grammar can enforce: keywords that llguidance cannot keep to are dropped, and named.

Whatever the whole schema allows, the rest of it allows, too. Source: llguidance's docs/json_schema.md (1.9).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cpuspec.server.parsing.converted import referred_schema

_FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"))
# Keywords that cannot be kept, and the values with which they restrict nothing.
_LOST: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("uniqueItems",), (False,)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "propertyNames"), (True, {})),
    **dict.fromkeys(("contains", "not", "if", "dependentRequired", "dependentSchemas", "dependencies"), ()),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), ()),
}
_PARTS_OF_LOST = ("then", "else", "minContains", "maxContains", "$dynamicAnchor", "$recursiveAnchor")
_VALUES = ("const", "enum", "required", "type")  # keywords whose values are no schemas
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")  # keywords whose values map names to schemas
# Keywords that restrict nothing: agents' tools have kilobytes of them. `$schema` stays, because it says how others are meant.
REMARKS = ("$comment", "default", "description", "examples", "title")
_DEEPEST, _MOST_BRANCHES = 64, 64
_MOST_CHARS = 1 << 20  # of a schema; no grammar of this size is compiled
_ASSERTION = re.compile(r"\(\?<?[=!]")
_LOST_ESCAPES = re.compile(r"\\[0-9kcGAzZ]")
_QUANTIFIER = re.compile(r"[*+?]|\{\d")


def loosened(schema: Any) -> tuple[Any, set[str]]:
    """The part of a schema that can be kept, without remarks, and the keywords that are kept in part or not at all.

    A schema that is far too long to be compiled, or is no JSON, is returned unchanged.
    """
    lost: set[str] = set()
    try:
        if len(json.dumps(schema)) > _MOST_CHARS:
            return schema, lost
    except (ValueError, RecursionError):  # the grammar's compiler reports it
        return schema, lost
    return _loosened(schema, schema, lost, _DEEPEST), lost


def _loosened(schema: Any, root: Any, lost: set[str], depth: int) -> Any:
    if depth and isinstance(schema, list):
        return [_loosened(one, root, lost, depth - 1) for one in schema]
    if not depth or not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _LOST:
            lost |= set() if value in _LOST[key] else {key}
        elif key == "format" and isinstance(value, str) and _says_strings(schema) and value not in _FORMATS:
            lost.add(key)
        elif key == "pattern" and isinstance(value, str):
            plain = plain_pattern(value)
            lost |= set() if plain == value else {key}
            found |= {} if plain is None else {key: plain}
        elif key in _BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _loosened(one, root, lost, depth - 1) for name, one in value.items()}
        elif key not in _PARTS_OF_LOST and key not in REMARKS:
            found[key] = value if key in _VALUES else _loosened(value, root, lost, depth - 1)
    patterns = found.get("patternProperties")
    if isinstance(patterns, Mapping) and any(plain_pattern(one) != one for one in patterns):
        # A name of these patterns would fall under the keyword for all other names.
        found["patternProperties"] = {one: value for one, value in patterns.items() if plain_pattern(one) == one}
        lost |= {"patternProperties", *(["additionalProperties"] if found.pop("additionalProperties", True) is not True else [])}
    branches = found.get("oneOf")
    if isinstance(branches, Sequence) and not isinstance(branches, str) and not _exclude_each_other(branches, root):
        lost.add("oneOf")
        others = found.get("allOf")
        found["allOf"] = [*(others if isinstance(others, list) else ()), {"anyOf": found.pop("oneOf")}]
    return found


def plain_pattern(pattern: str) -> str | None:
    """The pattern without its assertions (look-around, word boundaries, anchors within); None where that is not enough."""
    found: list[str] = []
    closes = _closes(pattern)
    at, depth, begins = 0, 0, True  # begins: nothing that takes a character stands before this in its branch
    while at < len(pattern):
        char, end, keeps = pattern[at], at + 1, True
        if char == "\\":
            if _LOST_ESCAPES.match(pattern, at):
                return None
            end, keeps = at + 2, pattern[at + 1 : at + 2] not in ("b", "B")
        elif char == "[":
            end = _class_end(pattern, at)
        elif _ASSERTION.match(pattern, at):
            end, keeps = _group_end(pattern, at), False
        elif pattern.startswith("(?:", at):
            end = at + 3
        elif char in "^$":
            keeps = begins if char == "^" else closes[end]
        if keeps:
            found.append(pattern[at:end])
            depth += {"(": 1, ")": -1}.get(char, 0)
            begins = not depth if char == "|" else begins and char in "(^"
        elif _QUANTIFIER.match(pattern, end):
            return None
        at = end
    return "".join(found)


def _closes(pattern: str) -> list[bool]:
    """For each position of the pattern: whether only `)` and `$` stand between it and the end of its branch."""
    found = [True] * (len(pattern) + 1)
    for at in range(len(pattern) - 1, -1, -1):
        found[at] = pattern[at] == "|" or (pattern[at] in "$)" and found[at + 1])
    return found


def _class_end(pattern: str, at: int) -> int:
    at += 2 if pattern.startswith("[^", at) else 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


def _group_end(pattern: str, at: int) -> int:
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            at = _class_end(pattern, at) - 1
        depth += {"(": 1, ")": -1}.get(pattern[at : at + 1], 0)
        at += 1
        if not depth:
            break
    return at


def _says_strings(schema: Mapping[str, Any]) -> bool:
    """Whether a schema allows texts; formats restrict nothing else."""
    kind = schema.get("type", "string")
    return "string" in kind if isinstance(kind, list) else kind == "string"


def _exclude_each_other(branches: Sequence[Any], root: Any) -> bool:
    """Whether no value can satisfy two of the schemas, as far as their types and constants tell."""
    if len(branches) > _MOST_BRANCHES:
        return False
    found = [referred_schema(one, root) for one in branches]
    if not all(isinstance(one, Mapping) for one in found):
        return False
    names = sorted(set.intersection(*(_required(one) for one in found)) if found else ())[:_MOST_BRANCHES]
    tagged = [[_values(one["properties"][name]) for one in found] for name in names]
    return any(map(_are_disjoint, [[_types(one) for one in found], [_values(one) for one in found], *tagged]))


def _are_disjoint(sets: Sequence[set[str]]) -> bool:
    return all(sets) and sum(map(len, sets)) == len(set[str]().union(*sets))


def _types(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    return {"number" if one == "integer" else one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str)}


def _values(schema: Any) -> set[str]:
    """The values that a schema lists, as JSON."""
    if not isinstance(schema, Mapping):
        return set()
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(one, sort_keys=True) for one in listed} if isinstance(listed, list) else set()


def _required(schema: Mapping[str, Any]) -> set[str]:
    names, properties = schema.get("required"), schema.get("properties")
    if not isinstance(names, list) or not isinstance(properties, Mapping):
        return set()
    return {name for name in names if isinstance(name, str) and name in properties}

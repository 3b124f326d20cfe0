"""Bounds how far a file's regular expression may backtrack, from the pattern alone, before it meets a text.

The `tokenizers` library splits text with Oniguruma, which backtracks without a limit: `(a+)+b` takes 2**n steps on n letters, and
`.*b` takes n**2 on a text without a b. Patterns of real tokenizers do neither. This module refuses patterns that may, and patterns
that it cannot read. A list of known patterns would not do: tokenizer.json files spell the same rule in many ways, and each new
model may bring its own. The syntax is that of Oniguruma's doc/RE.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from cpuspec.errors import TokenizerError

_MOST_STEPS = 1 << 13  # from one place in the text; real patterns take some hundreds
_RUN = 32  # characters that an unlimited repetition is assumed to match: those of a long word
_LONGEST_PATTERN = 1 << 14
_DEEPEST = 32
_MOST_COUNTED = 1 << 10  # the most characters that counted repetitions such as \d{3} may require

_TOKEN = re.compile(
    r"(?P<look>\(\?<?[=!])"
    r"|(?P<open>\((?:(?!\?)|\?[im]*:|\?>|\?<[A-Za-z_]\w*>))"
    r"|(?P<close>\))"
    r"|(?P<bar>\|)"
    r"|(?P<count>\{(?!,\})(?:(?P<exact>\d{1,9})|(?P<least>\d{0,9}),(?P<most>\d{0,9}))\})"
    r"|(?P<repeat>[*+?])"
    r"|(?P<anchor>[$^]|\\[AbBzZ])"
    r"|(?P<char>\\(?:[pP]\{\^?\w+\}|x\{[0-9A-Fa-f]{1,6}\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[dDsSwWhHntrfvaeR]|[^\w])|\{(?![\d,])|[^\\()|*+?^$\[{])",
    re.DOTALL,
)
_WHOLE_FLAGS = re.compile(r"\(\?[im]+\)")
_CLASS_PART = re.compile(r"\\.|[^\\\[\]]", re.DOTALL)
# Characters of ordinary texts: a class of characters is tried on them.
_SPACES = " \t\n\r\u00a0\u2028\u3000"
_OTHERS = "".join(char for char in map(chr, range(0x21, 0x3100)) if not char.isspace()) + "㐀中文漢가힣ﷺ，😀"


@dataclass(frozen=True)
class _Char:
    source: str


@dataclass(frozen=True)
class _Anchor:
    pass


@dataclass(frozen=True)
class _Group:
    branches: "list[list[_Item]]" = field(default_factory=lambda: [[]])
    looks: bool = False
    behind: bool = False


@dataclass(frozen=True)
class _Repeat:
    item: "_Char | _Anchor | _Group | _Repeat"
    least: int
    most: int | None


_Item = _Char | _Anchor | _Group | _Repeat


@dataclass(frozen=True)
class PatternCost:
    """steps: that a search may take from one place of an ordinary text. min_length: of a match, in characters."""

    steps: int
    min_length: int


def pattern_cost(pattern: str) -> PatternCost:
    """The bounds of a pattern's cost. Raises TokenizerError if it may be high, or for syntax that this module does not read.

    If the pattern can still fail behind a repetition, the repetition is tried at every length, so the costs of such repetitions
    multiply. One that matches white space as well as other characters could run to the end of the text from every place.
    """
    if len(pattern) > _LONGEST_PATTERN:
        raise TokenizerError(f"the pattern has {len(pattern)} characters; at most {_LONGEST_PATTERN} are read")
    top = _parse(pattern)
    steps = _steps_of(top, fails_behind=False)
    if steps > _MOST_STEPS:
        raise TokenizerError(f"the pattern may take over {_MOST_STEPS} steps at each place of a text; repetitions in it multiply")
    return PatternCost(steps, _min_length(top))


def _parse(pattern: str) -> _Group:
    top = _Group()
    open_groups = [top]
    counted = 0
    flags = _WHOLE_FLAGS.match(pattern)
    at = flags.end() if flags else 0
    while at < len(pattern):
        branch = open_groups[-1].branches[-1]
        if pattern[at] == "[":
            end = _class_end(pattern, at)
            branch.append(_Char(pattern[at:end]))
            at = end
            continue
        token = _TOKEN.match(pattern, at)
        if not token:
            _refuse(pattern, at)
        at = token.end()
        if token["look"] or token["open"]:
            group = _Group(looks=bool(token["look"]), behind="<" in (token["look"] or ""))
            branch.append(group)
            open_groups.append(group)
            if len(open_groups) > _DEEPEST:
                _refuse(pattern, at - 1)
        elif token["close"]:
            if len(open_groups) == 1:
                _refuse(pattern, at - 1)
            open_groups.pop()
        elif token["bar"]:
            open_groups[-1].branches.append([])
        elif token["anchor"]:
            branch.append(_Anchor())
        elif token["char"]:
            branch.append(_Char(token["char"]))
        else:
            least, most = _bounds(token)
            stacked = branch and isinstance(branch[-1], _Repeat) and isinstance(branch[-1].item, _Repeat)
            # In a look-behind, a repetition is tried from every earlier place.
            behind = most is None and any(group.behind for group in open_groups)
            if not branch or stacked or behind or (most is not None and most < least):
                _refuse(pattern, token.start())
            branch.append(_Repeat(branch.pop(), least, most))
            counted += (most or least) if token["count"] else 0
            if counted > _MOST_COUNTED or _min_length(branch[-1]) > _MOST_COUNTED:
                raise TokenizerError(f"the pattern counts beyond {_MOST_COUNTED} characters")
            # Reluctant and possessive repetitions match no more than the greedy one tries; a + behind a count repeats once more.
            at += pattern[at : at + 1] in (("?",) if token["count"] else ("?", "+"))
    if len(open_groups) > 1:
        _refuse(pattern, at)
    return top


def _bounds(token: re.Match[str]) -> tuple[int, int | None]:
    """How often a repetition matches at least and at most; None for no limit."""
    if token["repeat"]:
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[token["repeat"]]
    if token["exact"]:
        return int(token["exact"]), int(token["exact"])
    return int(token["least"] or 0), int(token["most"]) if token["most"] else None


def _class_end(pattern: str, start: int) -> int:
    """Where the class of characters that begins at `start` ends; classes may hold classes."""
    at, depth = start, 0
    while at < len(pattern):
        if pattern[at] == "[":
            depth += 1
            at += 1 + pattern.startswith("^", at + 1)
            if depth > _DEEPEST or pattern.startswith("]", at):
                break
        elif pattern[at] == "]":
            depth -= 1
            at += 1
            if not depth:
                return at
        elif part := _CLASS_PART.match(pattern, at):
            at = part.end()
        else:
            break
    _refuse(pattern, start)


def _refuse(pattern: str, at: int) -> NoReturn:
    raise TokenizerError(f"the pattern has {pattern[at : at + 20]!a} at {at}, which is not read there")


def _steps_of(item: _Item, fails_behind: bool) -> int:
    """Ways to match `item` from one place. fails_behind: what follows may fail, so that every way is tried."""
    match item:
        case _Group(branches, looks, _):
            steps = 0
            for branch in branches:
                steps_of_branch, fails = 1, fails_behind or looks
                for part in reversed(branch):
                    steps_of_branch = min(steps_of_branch * _steps_of(part, fails), 1 << 64)
                    fails = fails or _can_fail(part)
                steps += steps_of_branch
            return steps
        case _Repeat(inner, least, most):
            again = fails_behind or least > 1
            steps = _steps_of(inner, again)
            if again:
                steps **= min(most or 16, 16)
            if not fails_behind:
                return steps
            if most is None and _mixes_spaces(inner):
                raise TokenizerError("a repetition in the pattern may run through a whole text and then fail")
            return steps * (_RUN if most is None else most - least + 1)
        case _:
            return 1


def _can_fail(item: _Item) -> bool:
    match item:
        case _Group(branches, False, _):
            return all(any(map(_can_fail, branch)) for branch in branches)
        case _Repeat(inner, least, _):
            return least > 0 and _can_fail(inner)
        case _:
            return True


def _min_length(item: _Item) -> int:
    match item:
        case _Char():
            return 1
        case _Group(branches, False, _):
            return min(sum(map(_min_length, branch)) for branch in branches)
        case _Repeat(inner, least, _):
            return least * _min_length(inner)
        case _:
            return 0


def _mixes_spaces(item: _Item) -> bool:
    """Whether `item` matches white space as well as other characters: its repetition does not stop at the end of a word."""
    from tokenizers import Regex, normalizers

    sources = _sources(item)
    try:
        remove = normalizers.Replace(Regex("|".join(sources)), "")
    except Exception as error:
        raise TokenizerError(f"the pattern does not compile: {str(error)[:80]!a}") from error
    return bool(sources) and remove.normalize_str(_SPACES) != _SPACES and remove.normalize_str(_OTHERS) != _OTHERS


def _sources(item: _Item) -> Sequence[str]:
    match item:
        case _Char(source):
            return [source]
        case _Group(branches, _, _):
            return [source for branch in branches for part in branch for source in _sources(part)]
        case _Repeat(inner, _, _):
            return _sources(inner)
        case _:
            return []

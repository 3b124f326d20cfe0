"""The filters and tests of a template: what stands behind `|` and `is`. Their results for plain data are jinja's own."""

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jinja2.exceptions import FilterArgumentError, TemplateRuntimeError
from jinja2.runtime import Undefined
from markupsafe import Markup

from cpuspec.chat_template.budget import PER_ENTRY, PER_ITEM, PER_VALUE
from cpuspec.chat_template.operations import MAX_DEPTH, UPPERCASED, Operations
from cpuspec.chat_template.values import COMPARED, NOTHING, NUMBERS, SIZED, Function, Loop, Stream, checked_number
from cpuspec.errors import TokenizerError

_MAX_DIGITS = 30
_MAX_JSON_INDENT = 16
_WORD_BEGIN = re.compile(r"([-\s({\[<]+)")  # as in jinja's `title`


def apply_filter(do: Operations, name: Any, value: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The value of `value | name(args, kwargs)`."""
    do.budget.spend(1 + len(args) + len(kwargs))
    if not isinstance(name, str) or name not in FILTERS:
        raise TemplateRuntimeError(f"No filter named {do.text(name)[:100]!r}.")
    if do.num_filters > MAX_DEPTH:  # `map` of `map` of ...
        raise TokenizerError(f"the chat template nests filters deeper than {MAX_DEPTH}")
    do.num_filters += 1
    try:
        return FILTERS[name](do, value, *args, **kwargs)
    finally:
        do.num_filters -= 1


def _abs(do: Operations, number: Any) -> Any:
    if not isinstance(number, NUMBERS):
        raise TypeError(f"bad operand type for abs(): {type(number).__name__!r}")
    return checked_number(abs(number))


def _attr(do: Operations, value: Any, name: Any) -> Any:
    found = do.method(value, name) if isinstance(name, str) else NOTHING
    return do.undefined(value, name) if found is NOTHING else found


def _default(do: Operations, value: Any, default_value: Any = "", boolean: bool = False) -> Any:
    return default_value if isinstance(value, Undefined) or (boolean and not value) else value


def _dictsort(do: Operations, value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False) -> list[Any]:
    if by not in ("key", "value"):
        raise FilterArgumentError('You can only sort by either "key" or "value"')
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__!r} object has no items to sort")
    do.budget.make(len(value) * PER_VALUE)
    part = 0 if by == "key" else 1
    return _sorted(do, value.items(), lambda pair: _fold(do, pair[part], case_sensitive), reverse)


def _first(do: Operations, seq: Any) -> Any:
    return next(do.iterate(seq), Undefined("No first item, sequence was empty."))


def _float(do: Operations, value: Any, default: Any = 0.0) -> Any:
    return _number(do, value, lambda: float(value), default)


def _indent(do: Operations, s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    text = do.calculate("+", s, "\n")
    lines = do.call_str(text, "splitlines")
    if not isinstance(width, str | int):
        raise TypeError(f"wanted a width to indent by, got {type(width).__name__}")
    margin_length = len(width) if isinstance(width, str) else max(width, 0)
    do.budget.make(PER_VALUE + len(text) + (margin_length + 1) * (len(lines) + 1))
    kind = type(text)  # markup stays markup
    margin = kind(width if isinstance(width, str) else " " * width)
    rest = [margin + line if line or blank else line for line in lines[1:]]
    return (margin if first else kind()) + kind("\n").join([lines[0], *rest])


def _int(do: Operations, value: Any, default: Any = 0, base: Any = 10) -> Any:
    number = _number(do, value, lambda: int(value, base) if isinstance(value, str) else int(value), None)
    return _number(do, value, lambda: int(float(value)), default) if number is None else number


def _number(do: Operations, value: Any, convert: Callable[[], Any], default: Any) -> Any:
    if isinstance(value, str):
        do.budget.make(len(value))
    try:
        number = convert()
    except (TypeError, ValueError, OverflowError):
        return default
    return checked_number(number)


def _items(do: Operations, value: Any) -> Stream:
    if isinstance(value, Undefined):
        return Stream(())
    if not isinstance(value, dict):
        raise TypeError("Can only get item pairs from a mapping.")
    return Stream(value.items())


def _join(do: Operations, value: Any, d: Any = "", attribute: Any = None) -> str:
    get = _getter(do, attribute)
    return do.join([do.text(get(item)) for item in do.make_list(do.iterate(value))], do.text(d))


def _last(do: Operations, seq: Any) -> Any:
    if isinstance(seq, str | list | tuple | range):
        return seq[-1] if seq else Undefined("No last item, sequence was empty.")
    if not isinstance(seq, SIZED):
        raise TypeError(f"{type(seq).__name__!r} object is not reversible")
    return next(reversed(do.make_list(seq)), Undefined("No last item, sequence was empty."))


def _length(do: Operations, value: Any) -> int:
    if not isinstance(value, SIZED):
        raise TypeError(f"object of type {type(value).__name__!r} has no len()")
    return len(value)


def _list(do: Operations, value: Any) -> list[Any]:
    return do.make_list(do.iterate(value))


def _map(do: Operations, value: Any, *args: Any, **kwargs: Any) -> Stream:
    if not value:
        return Stream(())
    if not args and "attribute" in kwargs:
        change = _getter(do, kwargs.pop("attribute"), default=kwargs.pop("default", None))
        if kwargs:
            raise FilterArgumentError(f"Unexpected keyword argument {next(iter(kwargs))[:100]!r}")
    elif args:
        name, *rest = args
        change = lambda item: apply_filter(do, name, item, rest, kwargs)  # noqa: E731
    else:
        raise FilterArgumentError("map requires a filter argument")
    return Stream(do.make_list(change(item) for item in do.iterate(value)))


def _extreme(do: Operations, value: Any, sign: str, case_sensitive: bool = False, attribute: Any = None) -> Any:
    get = _getter(do, attribute)
    items = do.iterate(value)
    best = next(items, NOTHING)
    if best is NOTHING:
        return Undefined("No aggregated item, sequence was empty.")
    key = _fold(do, get(best), case_sensitive)
    for item in items:
        other = _fold(do, get(item), case_sensitive)
        if do.compare(sign, other, key):
            best, key = item, other
    return best


def _replace(do: Operations, s: Any, old: Any, new: Any, count: Any = None) -> str:
    limit = -1 if count is None else count
    return do.call_str(str(do.text(s)), "replace", do.text(old), do.text(new), limit)


def _reverse(do: Operations, value: Any) -> Any:
    if isinstance(value, str):
        return do.slice(value, None, None, -1)
    if isinstance(value, Stream):
        return do.make_list(value.values)[::-1]
    return Stream(reversed(do.make_list(do.iterate(value))))


def _round(do: Operations, value: Any, precision: Any = 0, method: str = "common") -> Any:
    if method not in ("common", "ceil", "floor"):
        raise FilterArgumentError("method must be common, ceil or floor")
    if not isinstance(value, NUMBERS) or not isinstance(precision, int):
        raise TypeError(f"type {type(value).__name__} doesn't define __round__ method")
    if abs(precision) > _MAX_DIGITS:
        raise TokenizerError(f"the chat template rounds to {precision} digits; at most {_MAX_DIGITS} are offered")
    if method == "common":
        return checked_number(round(value, precision))
    return checked_number(getattr(math, method)(value * 10**precision) / 10**precision)


def _safe(do: Operations, value: Any) -> Markup:
    text = do.text(value)
    do.budget.make(PER_VALUE + len(text))
    return Markup(text)


def _choose_by_attribute(do: Operations, value: Any, args: Any, kwargs: Any, wanted: bool) -> Stream:
    """The items of which an attribute passes the test."""
    if value and not args:
        raise FilterArgumentError("Missing parameter for attribute name")
    return _choose(do, value, args[1:], kwargs, wanted, args[0] if args else None)


def _choose(do: Operations, value: Any, args: Any, kwargs: Any, wanted: bool, attribute: Any = None) -> Stream:
    """The items whose test, or else whose truth, is as wanted."""
    if not value:
        return Stream(())
    get = _getter(do, attribute)
    if args:
        name, *rest = args
        test = lambda item: apply_test(do, name, get(item), rest, kwargs)  # noqa: E731
    else:
        test = lambda item: bool(get(item))  # noqa: E731
    return Stream(do.make_list(item for item in do.iterate(value) if test(item) is wanted))


def _sort(do: Operations, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: Any = None) -> list[Any]:
    attributes = do.call_str(attribute, "split", ",") if isinstance(attribute, str) else [attribute]
    getters = [_getter(do, one) for one in attributes]
    return _sorted(do, do.iterate(value), lambda item: [_fold(do, get(item), case_sensitive) for get in getters], reverse)


def _sorted(do: Operations, values: Iterable[Any], key: Callable[[Any], Any], reverse: bool) -> list[Any]:
    keyed = [(key(value), value) for value in do.make_list(values)]
    do.budget.make(len(keyed) * 3 * PER_VALUE)
    in_order: Callable[[Any], Any] = functools.cmp_to_key(lambda one, other: -1 if do.less(one, other) else 0)
    return [value for _, value in sorted(keyed, key=lambda pair: in_order(pair[0]), reverse=bool(reverse))]


def _string(do: Operations, value: Any) -> str:
    return value if isinstance(value, str) else do.text(value)


def _title(do: Operations, s: Any) -> str:
    text = _string(do, s)
    do.budget.make(len(text) * (PER_VALUE + PER_ITEM + UPPERCASED))
    return "".join(word[0].upper() + word[1:].lower() for word in _WORD_BEGIN.split(text) if word)


def _tojson(
    do: Operations, value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    if not (indent is None or (isinstance(indent, int) and 0 <= indent <= _MAX_JSON_INDENT)):
        raise TokenizerError(f"the chat template wants JSON indented; at most {_MAX_JSON_INDENT} spaces are given")
    between = None if separators is None else do.pair(separators)
    if between is not None and not all(isinstance(text, str) for text in between):
        raise TypeError("the separators of JSON must be two texts")
    room, values, depth = do.look_into(value)
    do.budget.make(room + values * (sum(map(len, between or ())) + (indent or 0) * depth))
    do.budget.spend(values * depth if indent is not None else values)
    return json.dumps(value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=between, sort_keys=bool(sort_keys))


def _trim(do: Operations, value: Any, chars: Any = None) -> str:
    return do.call_str(_string(do, value), "strip", chars)


def _unique(do: Operations, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Stream:
    get = _getter(do, attribute)
    seen: set[Any] = set()
    unique = []
    for item in do.make_list(do.iterate(value)):
        key = _fold(do, get(item), case_sensitive)
        if isinstance(key, list | tuple | dict):
            raise TypeError(f"unhashable type: {type(key).__name__!r}")
        # Numbers can be chosen such that they all collide.
        do.budget.spend(1 if isinstance(key, str) else len(seen))
        do.budget.make(PER_ENTRY)
        if key not in seen:
            seen.add(key)
            unique.append(item)
    return Stream(unique)


def _fold(do: Operations, key: Any, case_sensitive: bool) -> Any:
    """A key to compare by."""
    return do.call_str(key, "lower") if isinstance(key, str) and not case_sensitive else key


def _getter(do: Operations, attribute: Any, default: Any = None) -> Callable[[Any], Any]:
    """A function to an attribute of an attribute, as in `a.b.0`; to the value itself if `attribute` is None."""
    parts = [] if attribute is None else [attribute]
    if isinstance(attribute, str):
        parts = [int(part) if part.isdigit() else part for part in do.call_str(attribute, "split", ".")]

    def get(value: Any) -> Any:
        for part in parts:
            do.budget.spend(1)
            value = do.item(value, part)
            if default is not None and isinstance(value, Undefined):
                value = default
        return value

    return get


def apply_test(do: Operations, name: Any, value: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether `value is name(args, kwargs)`."""
    do.budget.spend(1 + len(args) + len(kwargs))
    if not isinstance(name, str) or name not in TESTS:
        raise TemplateRuntimeError(f"No test named {do.text(name)[:100]!r}.")
    return bool(TESTS[name](do, value, *args, **kwargs))


def _remainder(do: Operations, value: Any, num: Any) -> Any:
    if not isinstance(value, COMPARED) or not isinstance(num, COMPARED):
        raise TypeError("only numbers have a remainder")
    return do.calculate("%", value, num)


def _str_filter(name: str) -> Callable[[Operations, Any], Any]:
    return lambda do, value: do.call_str(_string(do, value), name)


FILTERS: dict[str, Callable[..., Any]] = {
    "abs": _abs,
    "attr": _attr,
    "capitalize": _str_filter("capitalize"),
    "count": _length,
    "d": _default,
    "default": _default,
    "dictsort": _dictsort,
    "e": Operations.escape,
    "escape": Operations.escape,
    "first": _first,
    "float": _float,
    "indent": _indent,
    "int": _int,
    "items": _items,
    "join": _join,
    "last": _last,
    "length": _length,
    "list": _list,
    "lower": _str_filter("lower"),
    "map": _map,
    "max": lambda do, value, case_sensitive=False, attribute=None: _extreme(do, value, "gt", case_sensitive, attribute),
    "min": lambda do, value, case_sensitive=False, attribute=None: _extreme(do, value, "lt", case_sensitive, attribute),
    "reject": lambda do, value, *args, **kwargs: _choose(do, value, args, kwargs, False),
    "rejectattr": lambda do, value, *args, **kwargs: _choose_by_attribute(do, value, args, kwargs, False),
    "replace": _replace,
    "reverse": _reverse,
    "round": _round,
    "safe": _safe,
    "select": lambda do, value, *args, **kwargs: _choose(do, value, args, kwargs, True),
    "selectattr": lambda do, value, *args, **kwargs: _choose_by_attribute(do, value, args, kwargs, True),
    "sort": _sort,
    "string": _string,
    "title": _title,
    "tojson": _tojson,
    "trim": _trim,
    "unique": _unique,
    "upper": _str_filter("upper"),
}


def _comparison(name: str) -> Callable[[Operations, Any, Any], bool]:
    return lambda do, value, other: do.compare(name, value, other)


TESTS: dict[str, Callable[..., Any]] = {
    "boolean": lambda do, value: isinstance(value, bool),
    "callable": lambda do, value: isinstance(value, Function | Loop | Undefined),
    "defined": lambda do, value: not isinstance(value, Undefined),
    "divisibleby": lambda do, value, num: _remainder(do, value, num) == 0,
    "escaped": lambda do, value: isinstance(value, Markup),
    "even": lambda do, value: _remainder(do, value, 2) == 0,
    "false": lambda do, value: value is False,
    "filter": lambda do, value: isinstance(value, str) and value in FILTERS,
    "float": lambda do, value: isinstance(value, float),
    "in": _comparison("in"),
    "integer": lambda do, value: isinstance(value, int) and not isinstance(value, bool),
    "iterable": lambda do, value: isinstance(value, (*SIZED, Stream)),
    "lower": lambda do, value: do.call_str(do.text(value), "islower"),
    "mapping": lambda do, value: isinstance(value, dict),
    "none": lambda do, value: value is None,
    "number": lambda do, value: isinstance(value, NUMBERS),
    "odd": lambda do, value: _remainder(do, value, 2) == 1,
    "sameas": lambda do, value, other: value is other,
    "sequence": lambda do, value: isinstance(value, str | list | tuple | dict | range | Undefined),
    "string": lambda do, value: isinstance(value, str),
    "test": lambda do, value: isinstance(value, str) and value in TESTS,
    "true": lambda do, value: value is True,
    "undefined": lambda do, value: isinstance(value, Undefined),
    "upper": lambda do, value: do.call_str(do.text(value), "isupper"),
}
_SPELLINGS = {
    "eq": ("==", "eq", "equalto"),
    "ne": ("!=", "ne"),
    "gt": (">", "gt", "greaterthan"),
    "gteq": (">=", "ge"),
    "lt": ("<", "lt", "lessthan"),
    "lteq": ("<=", "le"),
}
TESTS |= {spelling: _comparison(name) for name, spellings in _SPELLINGS.items() for spelling in spellings}

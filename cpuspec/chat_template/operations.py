"""Everything that a template can do to values, and nothing else; each operation pays the budget before it works.

Values are None, booleans, integers of 64 bits, floats, texts (of markupsafe too, for `safe` and `escape`), lists, tuples,
dicts and their views, ranges, jinja's Undefined, and the four classes here. None can be changed but a Namespace.
What an operation gives for plain data is what jinja's own gives.
"""

import functools
import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import FilterArgumentError, TemplateRuntimeError
from jinja2.runtime import Undefined
from markupsafe import Markup, escape

from cpuspec.chat_template.budget import PER_ENTRY, PER_ITEM, PER_VALUE, Budget
from cpuspec.errors import TokenizerError

MAX_DEPTH = 100  # of values in values, where something looks into all of them
MAX_INTEGER = (1 << 63) - 1
MAX_KEY = 1 << 20  # larger integers can be chosen such that a dict of them takes quadratic time
_MAX_RANGE = 10_000
_MAX_DIGITS = 30
_MAX_JSON_INDENT = 16
_MAX_STRFTIME = 200
_ESCAPED = 12  # characters that one can become in JSON, or inside a list that is printed
_UPPERCASED = 3  # characters that one can become in capitals
_MARKED_UP = 5  # characters that one can become when it meets markup
_FORMATTED = 1400  # characters that one %-conversion of three digits can add
_TIMED = 50  # characters that one can become in a time
_LONG_NEEDLE = 100  # searching for longer texts takes linear time in CPython

_KEYS: type[Any] = type({}.keys())
_CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, _KEYS, type({}.values()), type({}.items()))
_SIZED: tuple[type[Any], ...] = (str, range, Undefined, *_CONTAINERS)
_NUMBERS = (int, float)
_COMPARED = (*_NUMBERS, Undefined)  # jinja's Undefined raises its own error

# Methods of texts, by what they give. They are those of Python.
_SEARCHING = ("count", "endswith", "find", "index", "rfind", "rindex", "startswith")
_ASKING = ("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable")
_ASKING_CASE = ("isspace", "istitle", "isupper")
_CASING = ("capitalize", "casefold", "lower", "swapcase", "title", "upper")
_STRIPPING = ("lstrip", "removeprefix", "removesuffix", "rstrip", "strip")
_SPLITTING = ("partition", "rpartition", "rsplit", "split", "splitlines")
STR_METHODS = frozenset((*_SEARCHING, *_ASKING, *_ASKING_CASE, *_CASING, *_STRIPPING, *_SPLITTING, "format", "join", "replace"))
_QUADRATIC = frozenset(("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"))
SEQUENCE_METHODS = frozenset(("count", "index"))
DICT_METHODS = frozenset(("get", "items", "keys", "values"))

_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_CONVERSION = re.compile(r"%[-+ #0]{0,5}\d{0,3}(?:\.\d{0,3})?[diouxXeEfFgGcrsa%]")
_FIELD = re.compile(r"\{\{|\}\}|\{(\w*)\}|[{}]")
_WORD_BEGIN = re.compile(r"([-\s({\[<]+)")  # as in jinja's `title`
_WIDE_TIME = re.compile(r"%[^A-Za-z%]*\d")


class Function:
    """What a template can call. Prints without its name, which may be long."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __repr__(self) -> str:
        return "<function>"


class Namespace:
    """The one kind of value that `set` changes. Prints without its contents, which may be itself."""

    def __init__(self, attributes: dict[Any, Any]) -> None:
        self.attributes = attributes

    def __repr__(self) -> str:
        return "<namespace>"


class Stream:
    """What jinja's lazy filters give: true, without a length, and empty once it was walked through."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = iter(values)

    def __repr__(self) -> str:
        return "<generator>"


_NOTHING: Any = object()


class Loop:
    """The variable `loop`: walks through the values as jinja's does, which looks ahead only if asked to."""

    def __init__(self, values: Iterator[Any], length: int | None, depth0: int, recurse: Callable[[Any], str] | None) -> None:
        self.depth0 = depth0
        self.index0 = -1
        self.recurse = recurse
        self.changed_from: Any = _NOTHING
        self._values = values
        self._length = length
        self._before = self._current = self._after = _NOTHING

    def __repr__(self) -> str:
        return "<loop>"

    def __iter__(self) -> Iterator[Any]:
        while (item := self.peek()) is not _NOTHING:
            self._before, self._current, self._after = self._current, item, _NOTHING
            self.index0 += 1
            yield item

    def peek(self) -> Any:
        if self._after is _NOTHING:
            self._after = next(self._values, _NOTHING)
        return self._after

    @property
    def length(self) -> int:
        if self._length is None:
            ahead = [item for item in (self.peek(), *self._values) if item is not _NOTHING]
            self._length = self.index0 + 1 + len(ahead)
            self._values, self._after = iter(ahead), _NOTHING
        return self._length

    @property
    def previtem(self) -> Any:
        return Undefined("there is no previous item") if self._before is _NOTHING else self._before

    @property
    def nextitem(self) -> Any:
        return Undefined("there is no next item") if self.peek() is _NOTHING else self._after

    @property
    def last(self) -> bool:
        return self.peek() is _NOTHING


_LOOP: dict[str, Callable[[Loop], Any]] = {
    "depth": lambda loop: loop.depth0 + 1,
    "depth0": lambda loop: loop.depth0,
    "first": lambda loop: loop.index0 == 0,
    "index": lambda loop: loop.index0 + 1,
    "index0": lambda loop: loop.index0,
    "last": lambda loop: loop.last,
    "length": lambda loop: loop.length,
    "nextitem": lambda loop: loop.nextitem,
    "previtem": lambda loop: loop.previtem,
    "revindex": lambda loop: loop.length - loop.index0,
    "revindex0": lambda loop: loop.length - loop.index0 - 1,
}
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_ORDER = {"lt": operator.lt, "lteq": operator.le, "gt": operator.gt, "gteq": operator.ge}


class Operations:
    """The operations, at the cost of one budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._filters = 0  # that are at work
        self.globals = {
            "range": Function(self._range),
            "dict": Function(self._dict),
            "namespace": Function(lambda *args, **kwargs: Namespace(self._dict(*args, **kwargs))),
            "raise_exception": Function(self._raise_exception),
            "strftime_now": Function(self._strftime_now),
        }

    # Making values

    def make_list(self, values: Iterable[Any]) -> list[Any]:
        self._budget.make(PER_VALUE)
        made = []
        for value in values:
            self._budget.make(PER_ITEM + PER_VALUE)  # iterating over a text, a range or a dict makes values
            made.append(value)
        return made

    def make_dict(self, entries: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        self._budget.make(2 * PER_ENTRY)
        made = {}
        for key, value in entries:
            self._budget.make(PER_ENTRY)
            if isinstance(key, str):
                self._budget.scan(len(key))
            elif not (key is None or (isinstance(key, int) and abs(key) <= MAX_KEY)):
                raise TokenizerError(f"the chat template makes a dict with a key of {type(key).__name__}; only texts are offered")
            made[key] = value
        return made

    def text(self, value: Any) -> str:
        """`value` as it is printed."""
        if type(value) is str:
            return value
        self._budget.make(PER_VALUE + len(value) if isinstance(value, str) else self._look_into(value)[0])
        return str(value)

    def join(self, texts: list[str], glue: str = "") -> str:
        self._budget.make(PER_VALUE + sum(map(len, texts)) + len(glue) * len(texts))
        return "".join(texts) if not glue else str(glue).join(texts)

    def _look_into(self, value: Any) -> tuple[int, int, int]:
        """(room, values, depth): the room that `value` takes printed or as JSON at most; what is shared counts each time."""
        room = values = deepest = 0
        pending = [(value, 1)]
        while pending:
            item, depth = pending.pop()
            values += 1
            room += _ESCAPED * PER_VALUE
            deepest = max(deepest, depth)
            if depth > MAX_DEPTH:
                raise TokenizerError(f"the chat template nests values deeper than {MAX_DEPTH}")
            if isinstance(item, str):
                self._budget.scan(len(item))
                room += _ESCAPED * len(item)
            elif isinstance(item, _CONTAINERS):
                self._budget.spend(2 * len(item) + 1)
                pending.extend((part, depth + 1) for part in item)
                if isinstance(item, dict):
                    pending.extend((part, depth + 1) for part in item.values())
        self._budget.spend(values)
        return room, values, deepest

    # Comparing

    def equal(self, left: Any, right: Any) -> bool:
        pending = [(left, right)]
        while pending:
            left, right = pending.pop()
            self._budget.spend(1)
            if isinstance(left, str) and isinstance(right, str):
                if len(left) == len(right):
                    self._budget.scan(len(left))
                if left != right:
                    return False
            elif _both(left, right, list) or _both(left, right, tuple) or _both(left, right, dict):
                if len(left) != len(right):
                    return False
                self._budget.spend(len(left))
                if isinstance(left, dict) and not left.keys() <= right.keys():
                    return False
                pairs = ((left[key], right[key]) for key in (left if isinstance(left, dict) else range(len(left))))
                pending.extend(pair for pair in pairs if pair[0] is not pair[1])  # as Python does inside of containers
            elif isinstance(left, _COMPARED) or isinstance(right, Undefined):
                if left != right:
                    return False
            elif left is not right:
                return False
        return True

    def _less(self, left: Any, right: Any) -> bool:
        while _both(left, right, list) or _both(left, right, tuple):
            different = next((pair for pair in zip(left, right, strict=False) if not self._same(*pair)), None)
            if different is None:
                return len(left) < len(right)
            left, right = different
        if _both(left, right, str):
            self._budget.scan(min(len(left), len(right)))
        elif not (isinstance(left, _COMPARED) and isinstance(right, _COMPARED)):
            raise TypeError(f"'<' not supported between instances of {type(left).__name__!r} and {type(right).__name__!r}")
        return bool(left < right)

    def _same(self, one: Any, other: Any) -> bool:
        """Whether an item is a value: Python looks whether they are one first."""
        self._budget.spend(1)
        return one is other or self.equal(one, other)

    def compare(self, name: str, left: Any, right: Any) -> bool:
        """name: as jinja calls its operators, as `lteq`."""
        if name in ("eq", "ne"):
            return self.equal(left, right) is (name == "eq")
        if name in ("in", "notin"):
            return self._contains(right, left) is (name == "in")
        if isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
            return bool(_ORDER[name](left, right))
        less = self._less(left, right) if name in ("lt", "gteq") else self._less(right, left)
        return less is (name in ("lt", "gt"))

    def _contains(self, values: Any, value: Any) -> bool:
        if isinstance(values, str):
            if not isinstance(value, str):
                raise TypeError(f"'in <string>' requires string as left operand, not {type(value).__name__}")
            self._search(values, value)
            return value in values
        if isinstance(values, dict | _KEYS):
            return self._has_key(values, value)
        return any(self._same(item, value) for item in self.iterate(values))

    def _has_key(self, values: Any, key: Any) -> bool:
        if isinstance(key, list | dict):
            raise TypeError(f"unhashable type: {type(key).__name__!r}")
        if isinstance(key, str):
            self._budget.scan(len(key))
        return not isinstance(key, tuple) and key in values  # a tuple is no key here, and hashing a deep one overflows the stack

    def _search(self, text: str, needle: str) -> None:
        self._budget.scan(len(text) * (1 + min(len(needle), _LONG_NEEDLE) // 8) + len(needle))

    # Calculating

    def calculate(self, sign: str, left: Any, right: Any) -> Any:
        if isinstance(left, Undefined) or isinstance(right, Undefined):
            return _ARITHMETIC[sign](left, right)  # raises jinja's error
        if isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
            if sign == "**" and isinstance(left, int) and isinstance(right, int) and abs(left) > 1 and right > 64:
                raise TokenizerError("the chat template computes numbers beyond 64 bits")
            return _checked_number(_ARITHMETIC[sign](left, right))
        if sign == "+":
            if _both(left, right, str):
                wider = _MARKED_UP if isinstance(left, Markup) or isinstance(right, Markup) else 1
                self._budget.make(PER_VALUE + wider * (len(left) + len(right)))
                return left + right
            if _both(left, right, list) or _both(left, right, tuple):
                self._budget.make(PER_VALUE + PER_ITEM * (len(left) + len(right)))
                return _ARITHMETIC[sign](left, right)
        if sign == "*":
            many, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(many, str | list | tuple) and isinstance(times, int):
                self._budget.make(PER_VALUE + (1 if isinstance(many, str) else PER_ITEM) * len(many) * max(times, 0))
                return many * times
        if sign == "%" and isinstance(left, str):
            return self._format(left, right)
        raise TypeError(f"unsupported operand type(s) for {sign}: {type(left).__name__!r} and {type(right).__name__!r}")

    def _format(self, form: str, values: Any) -> str:
        conversions = form.count("%")
        self._budget.make(PER_VALUE + len(form) + _FORMATTED * conversions + self._look_into(values)[0])
        if "%" in _CONVERSION.sub("", form):
            raise TokenizerError("the chat template formats with names, or with a width beyond 999")
        return form % values

    def negate(self, value: Any) -> Any:
        return _checked_number(-value) if isinstance(value, _COMPARED) else self._no_number("-", value)

    def affirm(self, value: Any) -> Any:
        return _checked_number(+value) if isinstance(value, _COMPARED) else self._no_number("+", value)

    def _no_number(self, sign: str, value: Any) -> Any:
        raise TypeError(f"bad operand type for unary {sign}: {type(value).__name__!r}")

    # Looking up

    def iterate(self, values: Any) -> Iterator[Any]:
        """Pays nothing for the values: each caller does."""
        if isinstance(values, Stream):
            return values.values
        if isinstance(values, _SIZED):
            return iter(values)
        raise TypeError(f"{type(values).__name__!r} object is not iterable")

    def attribute(self, value: Any, name: str) -> Any:
        """`value.name`: a method, or else an entry of a dict."""
        found = self._method(value, name)
        if found is _NOTHING and isinstance(value, dict) and self._has_key(value, name):
            return value[name]
        return self._undefined(value, name) if found is _NOTHING else found

    def item(self, value: Any, key: Any) -> Any:
        """`value[key]`: an item, or else a method."""
        if isinstance(value, Undefined):
            return value[key]  # raises jinja's error
        if isinstance(value, dict) and not isinstance(key, list | dict) and self._has_key(value, key):
            return value[key]
        if isinstance(value, str | list | tuple | range) and isinstance(key, int) and -len(value) <= key < len(value):
            return value[key]
        found = self._method(value, key) if isinstance(key, str) else _NOTHING
        return self._undefined(value, key) if found is _NOTHING else found

    def slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        if isinstance(value, Undefined):
            return value[start:stop:step]  # raises jinja's error
        if not isinstance(value, str | list | tuple | range):
            raise TypeError(f"{type(value).__name__!r} object is not subscriptable")
        for limit in (start, stop, step):
            if not isinstance(limit, int | None):
                raise TypeError("slice indices must be integers or None or have an __index__ method")
        length = len(range(*slice(start, stop, step).indices(len(value))))
        self._budget.make(PER_VALUE + length * (1 if isinstance(value, str) else PER_ITEM))
        return value[start:stop:step]

    def _undefined(self, value: Any, name: Any) -> Undefined:
        # Its message prints the name.
        name = (
            name[:100] if isinstance(name, str) else name if (name is None or isinstance(name, _NUMBERS)) else type(name).__name__
        )
        if isinstance(value, str | list | tuple | dict | int | float) and isinstance(name, str) and hasattr(type(value), name):
            return Undefined(f"{type(value).__name__}.{name} is not offered to templates", value, name)
        return Undefined(obj=value, name=name)

    def _method(self, value: Any, name: str) -> Any:
        if isinstance(value, Undefined):
            return value[name]  # raises jinja's error
        if isinstance(value, Namespace):
            return value.attributes.get(name, _NOTHING)
        if isinstance(value, str) and name in STR_METHODS:
            return Function(functools.partial(self._call_str, value, name))
        if isinstance(value, list | tuple) and name in SEQUENCE_METHODS:
            return Function(functools.partial(self._count if name == "count" else self._index, value))
        if isinstance(value, dict) and name in DICT_METHODS:
            return Function(functools.partial(self._get, value) if name == "get" else getattr(value, name))
        if isinstance(value, Loop):
            if name == "cycle":
                return Function(functools.partial(_cycle, value))
            if name == "changed":
                return Function(functools.partial(self._changed, value))
            return _LOOP[name](value) if name in _LOOP else _NOTHING
        return _NOTHING

    # Calling

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self._budget.spend(len(args) + len(kwargs))
        if isinstance(function, Function):
            return function.call(*args, **kwargs)
        if isinstance(function, Loop):
            if function.recurse is None:
                raise TypeError("The loop must have the 'recursive' marker to be called recursively.")
            return function.recurse(*args, **kwargs)
        if isinstance(function, Undefined):
            return function()  # raises jinja's error
        raise TypeError(f"{type(function).__name__!r} object is not callable")

    def _call_str(self, text: str, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if name in ("format", "join"):
            return (self._str_format if name == "format" else self._str_join)(text, *args, **kwargs)
        length = len(text)
        needles = [part for arg in (*args, *kwargs.values()) for part in (arg if isinstance(arg, tuple) else (arg,))]
        self._budget.spend(len(needles))
        needle = sum(len(part) for part in needles if isinstance(part, str))
        if name in _QUADRATIC:
            self._budget.scan(length * max(needle, 1) + needle)
        else:
            self._budget.scan(length * (1 + min(needle, _LONG_NEEDLE) // 8) + needle)
        if name in _CASING:
            self._budget.make(PER_VALUE + _UPPERCASED * length)
        elif name in _STRIPPING:
            self._budget.make(PER_VALUE + length)
        elif name == "replace":
            wider = _MARKED_UP if isinstance(text, Markup) else 1
            self._budget.make(PER_VALUE + length + text.count(args[0]) * len(args[1]) * wider)
        elif name == "splitlines":
            self._budget.make(length + (sum(map(text.count, _LINE_ENDS)) + 2) * (PER_VALUE + PER_ITEM))
        elif name in _SPLITTING:
            sep = args[0] if args else kwargs.get("sep")
            pieces = length // 2 + 1 if sep is None else text.count(sep) + 3
            self._budget.make(length + (pieces + 1) * (PER_VALUE + PER_ITEM))
        return getattr(text, name)(*args, **kwargs)

    def _str_format(self, form: str, /, *args: Any, **kwargs: Any) -> str:
        self._budget.make(PER_VALUE + len(form) + 2 * PER_VALUE * (form.count("{") + form.count("}")))
        show = self._escape if isinstance(form, Markup) else self.text
        numbers = itertools.count()
        pieces = []
        at = 0
        for match in _FIELD.finditer(form):
            pieces.append(str(form[at : match.start()]))
            at = match.end()
            name = match[1]
            if name is not None:
                index = next(numbers) if name == "" else int(name) if name.isdecimal() else None
                pieces.append(show(kwargs[name] if index is None else args[index]))
            elif match[0] in ("{{", "}}"):
                pieces.append(match[0][0])
            else:
                raise TokenizerError("the chat template formats with more than a name or a number in braces")
        return type(form)(self.join([*pieces, str(form[at:])]))

    def _str_join(self, glue: str, values: Any, /) -> str:
        texts = self.make_list(self.iterate(values))
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("sequence items of str.join must be str")
        if isinstance(glue, Markup):
            texts = [self._escape(text) for text in texts]
        return type(glue)(self.join(texts, glue))

    def _count(self, values: Sequence[Any], value: Any) -> int:
        return sum(self._same(item, value) for item in values)

    def _index(self, values: Sequence[Any], value: Any) -> int:
        for index, item in enumerate(values):
            if self._same(item, value):
                return index
        raise ValueError("the value is not in the list")

    def _get(self, values: dict[Any, Any], key: Any, default: Any = None) -> Any:
        return values[key] if self._has_key(values, key) else default

    def _changed(self, loop: Loop, *value: Any) -> bool:
        changed = loop.changed_from is _NOTHING or not self.equal(loop.changed_from, value)
        loop.changed_from = value
        return changed

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        if len(numbers) > _MAX_RANGE:
            raise TokenizerError(f"the chat template wants a range of {len(numbers)} numbers; at most {_MAX_RANGE} are given")
        return numbers

    def _dict(self, values: Any = (), /, **more: Any) -> dict[Any, Any]:
        entries = values.items() if isinstance(values, dict) else map(self._pair, self.iterate(values))
        return self.make_dict(itertools.chain(entries, more.items()))

    def _pair(self, values: Any) -> tuple[Any, Any]:
        key, value = itertools.islice(self.iterate(values), 3)
        return key, value

    def _raise_exception(self, message: Any) -> None:
        raise jinja2.TemplateError(self.text(message)[:1000])

    def _strftime_now(self, form: str) -> str:
        if _WIDE_TIME.search(form[:_MAX_STRFTIME]) or len(form) > _MAX_STRFTIME:
            raise TokenizerError("the chat template prints a time with a width, or with too long a format")
        self._budget.make(PER_VALUE + _TIMED * len(form))
        return datetime.now().strftime(form)

    # Filters

    def filter(self, name: Any, value: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._budget.spend(1 + len(args) + len(kwargs))
        if not isinstance(name, str) or name not in FILTERS:
            raise TemplateRuntimeError(f"No filter named {self.text(name)[:100]!r}.")
        if self._filters > MAX_DEPTH:  # `map` of `map` of ...
            raise TokenizerError(f"the chat template nests filters deeper than {MAX_DEPTH}")
        self._filters += 1
        try:
            return FILTERS[name](self, value, *args, **kwargs)
        finally:
            self._filters -= 1

    def _abs(self, number: Any) -> Any:
        if not isinstance(number, _NUMBERS):
            raise TypeError(f"bad operand type for abs(): {type(number).__name__!r}")
        return _checked_number(abs(number))

    def _attr(self, value: Any, name: Any) -> Any:
        found = self._method(value, name) if isinstance(name, str) else _NOTHING
        return self._undefined(value, name) if found is _NOTHING else found

    def _default(self, value: Any, default_value: Any = "", boolean: bool = False) -> Any:
        return default_value if isinstance(value, Undefined) or (boolean and not value) else value

    def _dictsort(self, value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False) -> list[Any]:
        if by not in ("key", "value"):
            raise FilterArgumentError('You can only sort by either "key" or "value"')
        if not isinstance(value, dict):
            raise TypeError(f"{type(value).__name__!r} object has no items to sort")
        self._budget.make(len(value) * PER_VALUE)
        part = 0 if by == "key" else 1
        return self._sorted(value.items(), lambda pair: self._fold(pair[part], case_sensitive), reverse)

    def _escape(self, value: Any) -> Markup:
        text = value if isinstance(value, str) else self.text(value)
        self._budget.make(PER_VALUE + _MARKED_UP * len(text))
        return escape(text)

    def _first(self, seq: Any) -> Any:
        return next(self.iterate(seq), Undefined("No first item, sequence was empty."))

    def _float(self, value: Any, default: Any = 0.0) -> Any:
        return self._number(value, lambda: float(value), default)

    def _indent(self, s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
        text = self.calculate("+", s, "\n")
        lines = self._call_str(text, "splitlines")
        if not isinstance(width, str | int):
            raise TypeError(f"wanted a width to indent by, got {type(width).__name__}")
        margin_length = len(width) if isinstance(width, str) else max(width, 0)
        self._budget.make(PER_VALUE + len(text) + (margin_length + 1) * (len(lines) + 1))
        kind = type(text)  # markup stays markup
        margin = kind(width if isinstance(width, str) else " " * width)
        rest = [margin + line if line or blank else line for line in lines[1:]]
        return (margin if first else kind()) + kind("\n").join([lines[0], *rest])

    def _int(self, value: Any, default: Any = 0, base: Any = 10) -> Any:
        number = self._number(value, lambda: int(value, base) if isinstance(value, str) else int(value), None)
        return self._number(value, lambda: int(float(value)), default) if number is None else number

    def _number(self, value: Any, convert: Callable[[], Any], default: Any) -> Any:
        if isinstance(value, str):
            self._budget.make(len(value))
        try:
            number = convert()
        except (TypeError, ValueError, OverflowError):
            return default
        return _checked_number(number)

    def _items(self, value: Any) -> Stream:
        if isinstance(value, Undefined):
            return Stream(())
        if not isinstance(value, dict):
            raise TypeError("Can only get item pairs from a mapping.")
        return Stream(value.items())

    def _join(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        get = self._getter(attribute)
        return self.join([self.text(get(item)) for item in self.make_list(self.iterate(value))], self.text(d))

    def _last(self, seq: Any) -> Any:
        if isinstance(seq, str | list | tuple | range):
            return seq[-1] if seq else Undefined("No last item, sequence was empty.")
        if not isinstance(seq, _SIZED):
            raise TypeError(f"{type(seq).__name__!r} object is not reversible")
        return next(reversed(self.make_list(seq)), Undefined("No last item, sequence was empty."))

    def _length(self, value: Any) -> int:
        if not isinstance(value, _SIZED):
            raise TypeError(f"object of type {type(value).__name__!r} has no len()")
        return len(value)

    def _list(self, value: Any) -> list[Any]:
        return self.make_list(self.iterate(value))

    def _map(self, value: Any, *args: Any, **kwargs: Any) -> Stream:
        if not value:
            return Stream(())
        if not args and "attribute" in kwargs:
            change = self._getter(kwargs.pop("attribute"), default=kwargs.pop("default", None))
            if kwargs:
                raise FilterArgumentError(f"Unexpected keyword argument {next(iter(kwargs))[:100]!r}")
        elif args:
            name, *rest = args
            change = lambda item: self.filter(name, item, rest, kwargs)  # noqa: E731
        else:
            raise FilterArgumentError("map requires a filter argument")
        return Stream(self.make_list(change(item) for item in self.iterate(value)))

    def _extreme(self, value: Any, sign: str, case_sensitive: bool = False, attribute: Any = None) -> Any:
        get = self._getter(attribute)
        items = self.iterate(value)
        best = next(items, _NOTHING)
        if best is _NOTHING:
            return Undefined("No aggregated item, sequence was empty.")
        key = self._fold(get(best), case_sensitive)
        for item in items:
            other = self._fold(get(item), case_sensitive)
            if self.compare(sign, other, key):
                best, key = item, other
        return best

    def _max(self, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
        return self._extreme(value, "gt", case_sensitive, attribute)

    def _min(self, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
        return self._extreme(value, "lt", case_sensitive, attribute)

    def _replace(self, s: Any, old: Any, new: Any, count: Any = None) -> str:
        limit = -1 if count is None else count
        return self._call_str(str(self.text(s)), "replace", self.text(old), self.text(new), limit)

    def _reverse(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.slice(value, None, None, -1)
        if isinstance(value, Stream):
            return self.make_list(value.values)[::-1]
        return Stream(reversed(self.make_list(self.iterate(value))))

    def _round(self, value: Any, precision: Any = 0, method: str = "common") -> Any:
        if method not in ("common", "ceil", "floor"):
            raise FilterArgumentError("method must be common, ceil or floor")
        if not isinstance(value, _NUMBERS) or not isinstance(precision, int):
            raise TypeError(f"type {type(value).__name__} doesn't define __round__ method")
        if abs(precision) > _MAX_DIGITS:
            raise TokenizerError(f"the chat template rounds to {precision} digits; at most {_MAX_DIGITS} are offered")
        if method == "common":
            return _checked_number(round(value, precision))
        return _checked_number(getattr(math, method)(value * 10**precision) / 10**precision)

    def _safe(self, value: Any) -> Markup:
        text = self.text(value)
        self._budget.make(PER_VALUE + len(text))
        return Markup(text)

    def _select(self, value: Any, *args: Any, **kwargs: Any) -> Stream:
        return self._choose(value, args, kwargs, True)

    def _reject(self, value: Any, *args: Any, **kwargs: Any) -> Stream:
        return self._choose(value, args, kwargs, False)

    def _selectattr(self, value: Any, *args: Any, **kwargs: Any) -> Stream:
        return self._choose_by_attribute(value, args, kwargs, True)

    def _rejectattr(self, value: Any, *args: Any, **kwargs: Any) -> Stream:
        return self._choose_by_attribute(value, args, kwargs, False)

    def _choose_by_attribute(self, value: Any, args: Any, kwargs: Any, wanted: bool) -> Stream:
        if value and not args:
            raise FilterArgumentError("Missing parameter for attribute name")
        return self._choose(value, args[1:], kwargs, wanted, args[0] if args else None)

    def _choose(self, value: Any, args: Any, kwargs: Any, wanted: bool, attribute: Any = None) -> Stream:
        """The items whose test, or else whose truth, is as wanted."""
        if not value:
            return Stream(())
        get = self._getter(attribute)
        if args:
            name, *rest = args
            test = lambda item: self.test(name, get(item), rest, kwargs)  # noqa: E731
        else:
            test = lambda item: bool(get(item))  # noqa: E731
        return Stream(self.make_list(item for item in self.iterate(value) if test(item) is wanted))

    def _sort(self, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: Any = None) -> list[Any]:
        attributes = self._call_str(attribute, "split", ",") if isinstance(attribute, str) else [attribute]
        getters = [self._getter(one) for one in attributes]
        return self._sorted(self.iterate(value), lambda item: [self._fold(get(item), case_sensitive) for get in getters], reverse)

    def _sorted(self, values: Iterable[Any], key: Callable[[Any], Any], reverse: bool) -> list[Any]:
        keyed = [(key(value), value) for value in self.make_list(values)]
        self._budget.make(len(keyed) * 3 * PER_VALUE)
        in_order: Callable[[Any], Any] = functools.cmp_to_key(lambda one, other: -1 if self._less(one, other) else 0)
        return [value for _, value in sorted(keyed, key=lambda pair: in_order(pair[0]), reverse=bool(reverse))]

    def _string(self, value: Any) -> str:
        return value if isinstance(value, str) else self.text(value)

    def _title(self, s: Any) -> str:
        text = self._string(s)
        self._budget.make(len(text) * (PER_VALUE + PER_ITEM + _UPPERCASED))
        return "".join(word[0].upper() + word[1:].lower() for word in _WORD_BEGIN.split(text) if word)

    def _tojson(
        self, value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
    ) -> str:
        if not (indent is None or (isinstance(indent, int) and 0 <= indent <= _MAX_JSON_INDENT)):
            raise TokenizerError(f"the chat template wants JSON indented; at most {_MAX_JSON_INDENT} spaces are given")
        between = None if separators is None else self._pair(separators)
        if between is not None and not all(isinstance(text, str) for text in between):
            raise TypeError("the separators of JSON must be two texts")
        room, values, depth = self._look_into(value)
        self._budget.make(room + values * (sum(map(len, between or ())) + (indent or 0) * depth))
        self._budget.spend(values * depth if indent is not None else values)
        return json.dumps(value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=between, sort_keys=bool(sort_keys))

    def _trim(self, value: Any, chars: Any = None) -> str:
        return self._call_str(self._string(value), "strip", chars)

    def _unique(self, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Stream:
        get = self._getter(attribute)
        seen: set[Any] = set()
        unique = []
        for item in self.make_list(self.iterate(value)):
            key = self._fold(get(item), case_sensitive)
            if isinstance(key, list | tuple | dict):
                raise TypeError(f"unhashable type: {type(key).__name__!r}")
            # Numbers can be chosen such that they all collide.
            self._budget.spend(1 if isinstance(key, str) else len(seen))
            self._budget.make(PER_ENTRY)
            if key not in seen:
                seen.add(key)
                unique.append(item)
        return Stream(unique)

    def _fold(self, key: Any, case_sensitive: bool) -> Any:
        """A key to compare by."""
        return self._call_str(key, "lower") if isinstance(key, str) and not case_sensitive else key

    def _getter(self, attribute: Any, default: Any = None) -> Callable[[Any], Any]:
        """A function to an attribute of an attribute, as in `a.b.0`; to the value itself if `attribute` is None."""
        parts = [] if attribute is None else [attribute]
        if isinstance(attribute, str):
            parts = [int(part) if part.isdigit() else part for part in self._call_str(attribute, "split", ".")]

        def get(value: Any) -> Any:
            for part in parts:
                self._budget.spend(1)
                value = self.item(value, part)
                if default is not None and isinstance(value, Undefined):
                    value = default
            return value

        return get

    # Tests

    def test(self, name: Any, value: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        self._budget.spend(1 + len(args) + len(kwargs))
        if not isinstance(name, str) or name not in TESTS:
            raise TemplateRuntimeError(f"No test named {self.text(name)[:100]!r}.")
        return bool(TESTS[name](self, value, *args, **kwargs))

    def _remainder(self, value: Any, num: Any) -> Any:
        if not isinstance(value, _COMPARED) or not isinstance(num, _COMPARED):
            raise TypeError("only numbers have a remainder")
        return self.calculate("%", value, num)


def _checked_number(number: Any) -> Any:
    """`number`, or what Undefined answers, if a template may have it."""
    if isinstance(number, int) and abs(number) > MAX_INTEGER:
        raise TokenizerError("the chat template computes numbers beyond 64 bits")
    if isinstance(number, complex):
        raise TokenizerError("the chat template computes a complex number")
    return number


def _both(left: Any, right: Any, kind: type) -> bool:
    return isinstance(left, kind) and isinstance(right, kind)


def _cycle(loop: Loop, *values: Any) -> Any:
    if not values:
        raise TypeError("no items for cycling given")
    return values[loop.index0 % len(values)]


def _str_filter(name: str) -> Callable[[Operations, Any], Any]:
    return lambda do, value: do._call_str(do._string(value), name)


FILTERS: dict[str, Callable[..., Any]] = {
    "abs": Operations._abs,
    "attr": Operations._attr,
    "capitalize": _str_filter("capitalize"),
    "count": Operations._length,
    "d": Operations._default,
    "default": Operations._default,
    "dictsort": Operations._dictsort,
    "e": Operations._escape,
    "escape": Operations._escape,
    "first": Operations._first,
    "float": Operations._float,
    "indent": Operations._indent,
    "int": Operations._int,
    "items": Operations._items,
    "join": Operations._join,
    "last": Operations._last,
    "length": Operations._length,
    "list": Operations._list,
    "lower": _str_filter("lower"),
    "map": Operations._map,
    "max": Operations._max,
    "min": Operations._min,
    "reject": Operations._reject,
    "rejectattr": Operations._rejectattr,
    "replace": Operations._replace,
    "reverse": Operations._reverse,
    "round": Operations._round,
    "safe": Operations._safe,
    "select": Operations._select,
    "selectattr": Operations._selectattr,
    "sort": Operations._sort,
    "string": Operations._string,
    "title": Operations._title,
    "tojson": Operations._tojson,
    "trim": Operations._trim,
    "unique": Operations._unique,
    "upper": _str_filter("upper"),
}


def _comparison(name: str) -> Callable[[Operations, Any, Any], bool]:
    return lambda do, value, other: do.compare(name, value, other)


TESTS: dict[str, Callable[..., Any]] = {
    "boolean": lambda do, value: isinstance(value, bool),
    "callable": lambda do, value: isinstance(value, Function | Loop | Undefined),
    "defined": lambda do, value: not isinstance(value, Undefined),
    "divisibleby": lambda do, value, num: do._remainder(value, num) == 0,
    "escaped": lambda do, value: isinstance(value, Markup),
    "even": lambda do, value: do._remainder(value, 2) == 0,
    "false": lambda do, value: value is False,
    "filter": lambda do, value: isinstance(value, str) and value in FILTERS,
    "float": lambda do, value: isinstance(value, float),
    "in": _comparison("in"),
    "integer": lambda do, value: isinstance(value, int) and not isinstance(value, bool),
    "iterable": lambda do, value: isinstance(value, (*_SIZED, Stream)),
    "lower": lambda do, value: do._call_str(do.text(value), "islower"),
    "mapping": lambda do, value: isinstance(value, dict),
    "none": lambda do, value: value is None,
    "number": lambda do, value: isinstance(value, _NUMBERS),
    "odd": lambda do, value: do._remainder(value, 2) == 1,
    "sameas": lambda do, value, other: value is other,
    "sequence": lambda do, value: isinstance(value, str | list | tuple | dict | range | Undefined),
    "string": lambda do, value: isinstance(value, str),
    "test": lambda do, value: isinstance(value, str) and value in TESTS,
    "true": lambda do, value: value is True,
    "undefined": lambda do, value: isinstance(value, Undefined),
    "upper": lambda do, value: do._call_str(do.text(value), "isupper"),
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

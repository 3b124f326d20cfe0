"""Everything that a template can do to values but filters and tests; each operation pays the budget before it works.

The result for plain data is jinja's own. What an operation can cost depends on its operands, so each one computes its price first.
"""

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.runtime import Undefined
from markupsafe import Markup, escape

from cpuspec.chat_template.budget import PER_ENTRY, PER_ITEM, PER_VALUE, Budget
from cpuspec.chat_template.values import (
    COMPARED,
    CONTAINERS,
    KEYS,
    LOOP,
    NOTHING,
    NUMBERS,
    SIZED,
    Function,
    Loop,
    Namespace,
    Stream,
    both,
    checked_number,
    cycle,
)
from cpuspec.errors import TokenizerError

MAX_DEPTH = 100  # of values in values, where something looks into all of them
MAX_KEY = 1 << 20  # larger integers can be chosen such that a dict of them takes quadratic time
_MAX_RANGE = 10_000
_MAX_STRFTIME = 200
_ESCAPED = 12  # characters that one can become in JSON, or inside a list that is printed
UPPERCASED = 3  # characters that one can become in capitals
MARKED_UP = 5  # characters that one can become when it meets markup
_FORMATTED = 1400  # characters that one %-conversion of three digits can add
_TIMED = 50  # characters that one can become in a time
_LONG_NEEDLE = 100  # searching for longer texts takes linear time in CPython

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
_WIDE_TIME = re.compile(r"%[^A-Za-z%]*\d")


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
        self.budget = budget
        self.num_filters = 0  # that are at work
        self.globals = {
            "range": Function(self._range),
            "dict": Function(self._dict),
            "namespace": Function(lambda *args, **kwargs: Namespace(self._dict(*args, **kwargs))),
            "raise_exception": Function(self._raise_exception),
            "strftime_now": Function(self._strftime_now),
        }

    # Making values

    def make_list(self, values: Iterable[Any]) -> list[Any]:
        """A list of the values."""
        self.budget.make(PER_VALUE)
        made = []
        for value in values:
            self.budget.make(PER_ITEM + PER_VALUE)  # iterating over a text, a range or a dict makes values
            made.append(value)
        return made

    def make_dict(self, entries: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        """A dict of the entries. Its keys are texts, small integers or None."""
        self.budget.make(2 * PER_ENTRY)
        made = {}
        for key, value in entries:
            self.budget.make(PER_ENTRY)
            if isinstance(key, str):
                self.budget.scan(len(key))
            elif not (key is None or (isinstance(key, int) and abs(key) <= MAX_KEY)):
                raise TokenizerError(f"the chat template makes a dict with a key of {type(key).__name__}; only texts are offered")
            made[key] = value
        return made

    def text(self, value: Any) -> str:
        """`value` as it is printed."""
        if type(value) is str:
            return value
        self.budget.make(PER_VALUE + len(value) if isinstance(value, str) else self.look_into(value)[0])
        return str(value)

    def join(self, texts: list[str], glue: str = "") -> str:
        """The texts, with glue between them."""
        self.budget.make(PER_VALUE + sum(map(len, texts)) + len(glue) * len(texts))
        return "".join(texts) if not glue else str(glue).join(texts)

    def escape(self, value: Any) -> Markup:
        """The value as markup, in which no character of it stands for anything but itself."""
        text = value if isinstance(value, str) else self.text(value)
        self.budget.make(PER_VALUE + MARKED_UP * len(text))
        return escape(text)

    def look_into(self, value: Any) -> tuple[int, int, int]:
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
                self.budget.scan(len(item))
                room += _ESCAPED * len(item)
            elif isinstance(item, CONTAINERS):
                self.budget.spend(2 * len(item) + 1)
                pending.extend((part, depth + 1) for part in item)
                if isinstance(item, dict):
                    pending.extend((part, depth + 1) for part in item.values())
        self.budget.spend(values)
        return room, values, deepest

    # Comparing

    def equal(self, left: Any, right: Any) -> bool:
        """Whether two values are equal, without Python's recursion."""
        pending = [(left, right)]
        while pending:
            left, right = pending.pop()
            self.budget.spend(1)
            if isinstance(left, str) and isinstance(right, str):
                if len(left) == len(right):
                    self.budget.scan(len(left))
                if left != right:
                    return False
            elif both(left, right, list) or both(left, right, tuple) or both(left, right, dict):
                if len(left) != len(right):
                    return False
                self.budget.spend(len(left))
                if isinstance(left, dict) and not left.keys() <= right.keys():
                    return False
                pairs = ((left[key], right[key]) for key in (left if isinstance(left, dict) else range(len(left))))
                pending.extend(pair for pair in pairs if pair[0] is not pair[1])  # as Python does inside of containers
            elif isinstance(left, COMPARED) or isinstance(right, Undefined):
                if left != right:
                    return False
            elif left is not right:
                return False
        return True

    def less(self, left: Any, right: Any) -> bool:
        """Whether one value comes before another; TypeError for those that have no order."""
        while both(left, right, list) or both(left, right, tuple):
            different = next((pair for pair in zip(left, right, strict=False) if not self._same(*pair)), None)
            if different is None:
                return len(left) < len(right)
            left, right = different
        if both(left, right, str):
            self.budget.scan(min(len(left), len(right)))
        elif not (isinstance(left, COMPARED) and isinstance(right, COMPARED)):
            raise TypeError(f"'<' not supported between instances of {type(left).__name__!r} and {type(right).__name__!r}")
        return bool(left < right)

    def _same(self, one: Any, other: Any) -> bool:
        """Whether an item is a value: Python looks whether they are one first."""
        self.budget.spend(1)
        return one is other or self.equal(one, other)

    def compare(self, name: str, left: Any, right: Any) -> bool:
        """name: as jinja calls its operators, as `lteq`."""
        if name in ("eq", "ne"):
            return self.equal(left, right) is (name == "eq")
        if name in ("in", "notin"):
            return self._contains(right, left) is (name == "in")
        if isinstance(left, NUMBERS) and isinstance(right, NUMBERS):
            return bool(_ORDER[name](left, right))
        less = self.less(left, right) if name in ("lt", "gteq") else self.less(right, left)
        return less is (name in ("lt", "gt"))

    def _contains(self, values: Any, value: Any) -> bool:
        if isinstance(values, str):
            if not isinstance(value, str):
                raise TypeError(f"'in <string>' requires string as left operand, not {type(value).__name__}")
            self._search(values, value)
            return value in values
        if isinstance(values, dict | KEYS):
            return self._has_key(values, value)
        return any(self._same(item, value) for item in self.iterate(values))

    def _has_key(self, values: Any, key: Any) -> bool:
        if isinstance(key, list | dict):
            raise TypeError(f"unhashable type: {type(key).__name__!r}")
        if isinstance(key, str):
            self.budget.scan(len(key))
        return not isinstance(key, tuple) and key in values  # a tuple is no key here, and hashing a deep one overflows the stack

    def _search(self, text: str, needle: str) -> None:
        self.budget.scan(len(text) * (1 + min(len(needle), _LONG_NEEDLE) // 8) + len(needle))

    # Calculating

    def calculate(self, sign: str, left: Any, right: Any) -> Any:
        """The value of `left sign right`: numbers within 64 bits, joined and repeated texts and lists, `%` formatting."""
        if isinstance(left, Undefined) or isinstance(right, Undefined):
            return _ARITHMETIC[sign](left, right)  # raises jinja's error
        if isinstance(left, NUMBERS) and isinstance(right, NUMBERS):
            if sign == "**" and isinstance(left, int) and isinstance(right, int) and abs(left) > 1 and right > 64:
                raise TokenizerError("the chat template computes numbers beyond 64 bits")
            return checked_number(_ARITHMETIC[sign](left, right))
        if sign == "+":
            if both(left, right, str):
                wider = MARKED_UP if isinstance(left, Markup) or isinstance(right, Markup) else 1
                self.budget.make(PER_VALUE + wider * (len(left) + len(right)))
                return left + right
            if both(left, right, list) or both(left, right, tuple):
                self.budget.make(PER_VALUE + PER_ITEM * (len(left) + len(right)))
                return _ARITHMETIC[sign](left, right)
        if sign == "*":
            many, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(many, str | list | tuple) and isinstance(times, int):
                self.budget.make(PER_VALUE + (1 if isinstance(many, str) else PER_ITEM) * len(many) * max(times, 0))
                return many * times
        if sign == "%" and isinstance(left, str):
            return self._format(left, right)
        raise TypeError(f"unsupported operand type(s) for {sign}: {type(left).__name__!r} and {type(right).__name__!r}")

    def _format(self, form: str, values: Any) -> str:
        conversions = form.count("%")
        self.budget.make(PER_VALUE + len(form) + _FORMATTED * conversions + self.look_into(values)[0])
        if "%" in _CONVERSION.sub("", form):
            raise TokenizerError("the chat template formats with names, or with a width beyond 999")
        return form % values

    def negate(self, value: Any) -> Any:
        """`-value`."""
        return checked_number(-value) if isinstance(value, COMPARED) else self._no_number("-", value)

    def affirm(self, value: Any) -> Any:
        """`+value`."""
        return checked_number(+value) if isinstance(value, COMPARED) else self._no_number("+", value)

    def _no_number(self, sign: str, value: Any) -> Any:
        raise TypeError(f"bad operand type for unary {sign}: {type(value).__name__!r}")

    # Looking up

    def iterate(self, values: Any) -> Iterator[Any]:
        """Pays nothing for the values: each caller does."""
        if isinstance(values, Stream):
            return values.values
        if isinstance(values, SIZED):
            return iter(values)
        raise TypeError(f"{type(values).__name__!r} object is not iterable")

    def attribute(self, value: Any, name: str) -> Any:
        """`value.name`: a method, or else an entry of a dict."""
        found = self.method(value, name)
        if found is NOTHING and isinstance(value, dict) and self._has_key(value, name):
            return value[name]
        return self.undefined(value, name) if found is NOTHING else found

    def item(self, value: Any, key: Any) -> Any:
        """`value[key]`: an item, or else a method."""
        if isinstance(value, Undefined):
            return value[key]  # raises jinja's error
        if isinstance(value, dict) and not isinstance(key, list | dict) and self._has_key(value, key):
            return value[key]
        if isinstance(value, str | list | tuple | range) and isinstance(key, int) and -len(value) <= key < len(value):
            return value[key]
        found = self.method(value, key) if isinstance(key, str) else NOTHING
        return self.undefined(value, key) if found is NOTHING else found

    def slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """`value[start:stop:step]`."""
        if isinstance(value, Undefined):
            return value[start:stop:step]  # raises jinja's error
        if not isinstance(value, str | list | tuple | range):
            raise TypeError(f"{type(value).__name__!r} object is not subscriptable")
        for limit in (start, stop, step):
            if not isinstance(limit, int | None):
                raise TypeError("slice indices must be integers or None or have an __index__ method")
        length = len(range(*slice(start, stop, step).indices(len(value))))
        self.budget.make(PER_VALUE + length * (1 if isinstance(value, str) else PER_ITEM))
        return value[start:stop:step]

    def undefined(self, value: Any, name: Any) -> Undefined:
        """Jinja's answer where `value` has no such item."""
        # The message prints the name.
        name = name[:100] if isinstance(name, str) else name if (name is None or isinstance(name, NUMBERS)) else type(name).__name__
        if isinstance(value, str | list | tuple | dict | int | float) and isinstance(name, str) and hasattr(type(value), name):
            return Undefined(f"{type(value).__name__}.{name} is not offered to templates", value, name)
        return Undefined(obj=value, name=name)

    def method(self, value: Any, name: str) -> Any:
        """The method or attribute that a value offers under a name, or NOTHING."""
        if isinstance(value, Undefined):
            return value[name]  # raises jinja's error
        if isinstance(value, Namespace):
            return value.attributes.get(name, NOTHING)
        if isinstance(value, str) and name in STR_METHODS:
            return Function(functools.partial(self.call_str, value, name))
        if isinstance(value, list | tuple) and name in SEQUENCE_METHODS:
            return Function(functools.partial(self._count if name == "count" else self._index, value))
        if isinstance(value, dict) and name in DICT_METHODS:
            return Function(functools.partial(self._get, value) if name == "get" else getattr(value, name))
        if isinstance(value, Loop):
            if name == "cycle":
                return Function(functools.partial(cycle, value))
            if name == "changed":
                return Function(functools.partial(self._changed, value))
            return LOOP[name](value) if name in LOOP else NOTHING
        return NOTHING

    # Calling

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function, a recursive loop, or Undefined, which raises jinja's error."""
        self.budget.spend(len(args) + len(kwargs))
        if isinstance(function, Function):
            return function.call(*args, **kwargs)
        if isinstance(function, Loop):
            if function.recurse is None:
                raise TypeError("The loop must have the 'recursive' marker to be called recursively.")
            return function.recurse(*args, **kwargs)
        if isinstance(function, Undefined):
            return function()  # raises jinja's error
        raise TypeError(f"{type(function).__name__!r} object is not callable")

    def call_str(self, text: str, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call Python's method of a text, which pays by its name and arguments."""
        if name in ("format", "join"):
            return (self._str_format if name == "format" else self._str_join)(text, *args, **kwargs)
        length = len(text)
        needles = [part for arg in (*args, *kwargs.values()) for part in (arg if isinstance(arg, tuple) else (arg,))]
        self.budget.spend(len(needles))
        needle = sum(len(part) for part in needles if isinstance(part, str))
        if name in _QUADRATIC:
            self.budget.scan(length * max(needle, 1) + needle)
        else:
            self.budget.scan(length * (1 + min(needle, _LONG_NEEDLE) // 8) + needle)
        if name in _CASING:
            self.budget.make(PER_VALUE + UPPERCASED * length)
        elif name in _STRIPPING:
            self.budget.make(PER_VALUE + length)
        elif name == "replace":
            wider = MARKED_UP if isinstance(text, Markup) else 1
            self.budget.make(PER_VALUE + length + text.count(args[0]) * len(args[1]) * wider)
        elif name == "splitlines":
            self.budget.make(length + (sum(map(text.count, _LINE_ENDS)) + 2) * (PER_VALUE + PER_ITEM))
        elif name in _SPLITTING:
            sep = args[0] if args else kwargs.get("sep")
            pieces = length // 2 + 1 if sep is None else text.count(sep) + 3
            self.budget.make(length + (pieces + 1) * (PER_VALUE + PER_ITEM))
        return getattr(text, name)(*args, **kwargs)

    def _str_format(self, form: str, /, *args: Any, **kwargs: Any) -> str:
        self.budget.make(PER_VALUE + len(form) + 2 * PER_VALUE * (form.count("{") + form.count("}")))
        show = self.escape if isinstance(form, Markup) else self.text
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
            texts = [self.escape(text) for text in texts]
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
        changed = loop.changed_from is NOTHING or not self.equal(loop.changed_from, value)
        loop.changed_from = value
        return changed

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        if len(numbers) > _MAX_RANGE:
            raise TokenizerError(f"the chat template wants a range of {len(numbers)} numbers; at most {_MAX_RANGE} are given")
        return numbers

    def _dict(self, values: Any = (), /, **more: Any) -> dict[Any, Any]:
        entries = values.items() if isinstance(values, dict) else map(self.pair, self.iterate(values))
        return self.make_dict(itertools.chain(entries, more.items()))

    def pair(self, values: Any) -> tuple[Any, Any]:
        """The two values that there must be."""
        key, value = itertools.islice(self.iterate(values), 3)
        return key, value

    def _raise_exception(self, message: Any) -> None:
        raise jinja2.TemplateError(self.text(message)[:1000])

    def _strftime_now(self, form: str) -> str:
        if _WIDE_TIME.search(form[:_MAX_STRFTIME]) or len(form) > _MAX_STRFTIME:
            raise TokenizerError("the chat template prints a time with a width, or with too long a format")
        self.budget.make(PER_VALUE + _TIMED * len(form))
        return datetime.now().strftime(form)

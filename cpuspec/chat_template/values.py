"""The values of a template. Plain data are None, booleans, integers of 64 bits, floats, texts (of markupsafe too, for `safe` and
`escape`), lists, tuples, dicts and their views, ranges and jinja's Undefined; the four classes here come beside them.

No value can be changed but a Namespace.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2.runtime import Undefined

from cpuspec.errors import TokenizerError

MAX_INTEGER = (1 << 63) - 1

KEYS: type[Any] = type({}.keys())
CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, KEYS, type({}.values()), type({}.items()))
SIZED: tuple[type[Any], ...] = (str, range, Undefined, *CONTAINERS)
NUMBERS = (int, float)
COMPARED = (*NUMBERS, Undefined)  # jinja's Undefined raises its own error
NOTHING: Any = object()  # stands for no value where None is one


class Function:
    """A value that a template can call. It prints without its name, which may be long."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __repr__(self) -> str:
        return "<function>"


class Namespace:
    """The one kind of value that `set` changes. It prints without its contents, which may hold itself."""

    def __init__(self, attributes: dict[Any, Any]) -> None:
        self.attributes = attributes

    def __repr__(self) -> str:
        return "<namespace>"


class Stream:
    """The value of jinja's lazy filters: true, without a length, and empty after one walk through it."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = iter(values)

    def __repr__(self) -> str:
        return "<generator>"


class Loop:
    """The variable `loop`: walks through the values as jinja's does, which looks ahead only if asked to."""

    def __init__(self, values: Iterator[Any], length: int | None, depth0: int, recurse: Callable[[Any], str] | None) -> None:
        self.depth0 = depth0
        self.index0 = -1
        self.recurse = recurse
        self.changed_from: Any = NOTHING
        self._values = values
        self._length = length
        self._before = self._current = self._after = NOTHING

    def __repr__(self) -> str:
        return "<loop>"

    def __iter__(self) -> Iterator[Any]:
        while (item := self.peek()) is not NOTHING:
            self._before, self._current, self._after = self._current, item, NOTHING
            self.index0 += 1
            yield item

    def peek(self) -> Any:
        """The next value, or NOTHING."""
        if self._after is NOTHING:
            self._after = next(self._values, NOTHING)
        return self._after

    @property
    def length(self) -> int:
        """The number of values. Asking for it reads all of them."""
        if self._length is None:
            ahead = [item for item in (self.peek(), *self._values) if item is not NOTHING]
            self._length = self.index0 + 1 + len(ahead)
            self._values, self._after = iter(ahead), NOTHING
        return self._length

    @property
    def previtem(self) -> Any:
        """The value before this one, or Undefined."""
        return Undefined("there is no previous item") if self._before is NOTHING else self._before

    @property
    def nextitem(self) -> Any:
        """The value after this one, or Undefined."""
        return Undefined("there is no next item") if self.peek() is NOTHING else self._after

    @property
    def last(self) -> bool:
        """Whether no value follows."""
        return self.peek() is NOTHING


LOOP: dict[str, Callable[[Loop], Any]] = {
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


def checked_number(number: Any) -> Any:
    """The number, or Undefined, unless a template may not have it: then TokenizerError."""
    if isinstance(number, int) and abs(number) > MAX_INTEGER:
        raise TokenizerError("the chat template computes numbers beyond 64 bits")
    if isinstance(number, complex):
        raise TokenizerError("the chat template computes a complex number")
    return number


def both(left: Any, right: Any, kind: type) -> bool:
    """Whether two values are of one kind."""
    return isinstance(left, kind) and isinstance(right, kind)


def cycle(loop: Loop, *values: Any) -> Any:
    """The value whose turn it is in this round of the loop."""
    if not values:
        raise TypeError("no items for cycling given")
    return values[loop.index0 % len(values)]

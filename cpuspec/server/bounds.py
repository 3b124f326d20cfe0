"""How much a field of a request may hold. A bound stands beside its field; what exceeds it is refused before anything reads it."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

BEYOND = "beyond_its_bound"  # the type of the error
# JSON values of a body, as the token ids of long prompts; and lists and objects among them, each of which the collector looks at.
MOST_VALUES, MOST_HOLDERS = 1 << 19, 1 << 17
_MOST_ITEMS = 1 << 18
_HOLD = (str, list, dict)  # something that is counted beside the item itself


def size_of(value: Any, most: float = float("inf")) -> int:
    """Characters of all texts in a JSON value, keys included, and one for each item; the count stops beyond `most`.

    It is not recursive: the value may be deeply nested.
    """
    if isinstance(value, str):
        return len(value)
    total, left = 0, [value]
    while left and total <= most:
        one = left.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, dict):
            total += len(one)
            left += [*one, *one.values()]
        elif isinstance(one, list):
            total += len(one)
            left += [part for part in one if isinstance(part, _HOLD)]
    return total


@dataclass(frozen=True)
class Most:
    """The bound of texts, lists and objects. items: of a list or an object; size: as `size_of` counts it."""

    size: int
    items: int = _MOST_ITEMS

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """See pydantic. The bound is checked before the value's type."""
        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > self.items:
            raise _beyond(f"takes at most {self.items} items", str(len(value)))
        if (size := size_of(value, self.size)) > self.size:
            raise _beyond(f"takes at most {self.size} characters", str(size) if isinstance(value, str) else "more")
        return value


@dataclass(frozen=True)
class Range:
    """The bound of a number."""

    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """See pydantic."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        if not self.low <= value <= self.high:
            raise _beyond(f"must be from {self.low} to {self.high}", str(value)[:40] if abs(value) < 1 << 128 else "more")
        return value


@dataclass(frozen=True)
class Quick:
    """Of a list that fails with its first wrong item: all others would have an error, too. As pydantic's FailFast, with a hash."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """See pydantic."""
        return {**handler(source), "fail_fast": True}


class Unused:
    """Of a field that changes nothing."""


class Unread(Unused):
    """Of a field that may hold anything and changes nothing: its value is dropped."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """See pydantic."""
        return core_schema.no_info_after_validator_function(lambda _: None, core_schema.any_schema())


def _beyond(bound: str, got: str) -> PydanticCustomError:
    return PydanticCustomError(BEYOND, "{bound}, got {got}", {"bound": bound, "got": got})


# Kinds of fields. A text has 16 characters for each token of the longest contexts; what fits this model is checked later.
Ignored = Annotated[Any, Unread()]
Refused = Annotated[Any, Most(1 << 16)]  # where it asks for something
Name = Annotated[str, Most(1 << 10)]
Text = Annotated[str, Most(1 << 23)]
Object = Annotated[dict[str, Any], Most(1 << 16, 1 << 12)]  # settings of a request
Schema = Annotated[dict[str, Any], Most(1 << 17)]  # half of it, as JSON, is what a grammar may have
Dicts = Annotated[list[dict[str, Any]], Quick()]
Listed = Annotated[Dicts, Most(1 << 23, 1 << 14)]  # of a conversation: messages, parts, tools
Content = Annotated[str | Dicts, Most(1 << 23, 1 << 14)]
Integers = Annotated[list[int], Quick()]
Ids = Annotated[Integers, Most(_MOST_ITEMS)]
Strings = Annotated[list[str], Quick()]
Prompts = str | Strings | Integers | Annotated[list[Integers], Quick()]
Count = Annotated[int, Range(0, (1 << 63) - 1)]

"""JSON from strangers: parsed without surprises and read by type, so that a wrong field is a CheckpointError naming it."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import NoReturn

from cpuspec.errors import CheckpointError


def parse_json_object(text: bytes, what: str) -> dict[str, object]:
    """The object that `text` holds. Raises CheckpointError, naming `what`, if it is not exactly one sound JSON object.

    Refused besides bad syntax: repeated keys, NaN and infinity, nesting too deep to parse, numbers too long to read.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"the key {repeated[:80]!r} is repeated")
        return fields

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not sound JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is a JSON {type(value).__name__}, wanted an object")
    return value


def read_json_object(path: Path, max_bytes: int) -> dict[str, object]:
    """The object in a file of at most `max_bytes`. Raises CheckpointError if it is missing, too large or not sound."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file")
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size} bytes, wanted at most {max_bytes}")
        text = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return parse_json_object(text, str(path))


class JsonFields:
    """Fields of an object, read by type. A field that is null counts as absent. Raises CheckpointError naming file and field."""

    def __init__(self, what: str, fields: dict[str, object]) -> None:
        self.what = what
        self._fields = fields

    def fail(self, key: str, wanted: str) -> NoReturn:
        """Raise CheckpointError: `key` is what it is, wanted `wanted`."""
        value = self._fields.get(key)
        shown = "absent" if value is None else repr(value)
        raise CheckpointError(f"{self.what}: {key} is {shown if len(shown) <= 80 else shown[:80] + '...'}, wanted {wanted}")

    def __contains__(self, key: str) -> bool:
        return self._fields.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; without a default it must be there."""
        value = self._fields.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int:
            self.fail(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; without a default it must be there."""
        value = self._fields.get(key)
        if value is None and default is not None:
            return default
        # An integer of thousands of digits is no float.
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or not math.isfinite(value):
            self.fail(key, "a finite number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._fields.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._fields.get(key)
        if value is None:
            return default
        if type(value) is not str:
            self.fail(key, "text")
        return value

    def items(self, key: str) -> list[object]:
        """An array; absent is empty."""
        value = self._fields.get(key)
        if value is None:
            return []
        if type(value) is not list:
            self.fail(key, "an array")
        return value

    def object(self, key: str) -> "JsonFields":
        """A nested object; absent is empty."""
        value = self._fields.get(key)
        if value is None:
            return JsonFields(f"{self.what}: {key}", {})
        if type(value) is not dict:
            self.fail(key, "an object")
        return JsonFields(f"{self.what}: {key}", value)

    def names(self) -> list[str]:
        """Names of the fields, absent ones excluded."""
        return [key for key, value in self._fields.items() if value is not None]

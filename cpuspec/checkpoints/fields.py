"""JSON objects from untrusted files, and their fields or those of GGUF metadata, read by type. Errors name the wrong field."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from cpuspec.errors import CheckpointError
from cpuspec.files import read_file

_MOST_SHOWN = 80
MOST_LAYERS = 1 << 13  # that lists are made for: ModelConfig refuses a larger number of layers later

_T = TypeVar("_T")


def parse_json_object(text: bytes, what: str) -> dict[str, object]:
    """The object that `text` holds. Raises CheckpointError, naming `what`, if it is not exactly one sound JSON object.

    Bad syntax is refused, and so are repeated keys, NaN and infinity, nesting too deep to parse, and numbers too long to read.
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


def read_json_object(path: Path, max_bytes: int = 1 << 20) -> dict[str, object]:
    """The object in a file of at most `max_bytes`. Raises CheckpointError if it is missing, too large or not sound."""
    return parse_json_object(read_file(path, max_bytes, CheckpointError), str(path))


class Fields:
    """Fields of `what`, under the names that begin with `prefix`. Readers treat a field that is null as absent.

    defaults: values of fields that the file lacks. A field that is null in the file gets none of these. A reader that is given
    no default requires the field.
    Raises CheckpointError naming file and field, got and wanted.
    """

    def __init__(
        self,
        what: str,
        values: Mapping[str, object],
        prefix: str = "",
        defaults: Mapping[str, object] = MappingProxyType({}),
        read: set[str] | None = None,
        remarks: list[str] | None = None,
    ) -> None:
        self.what = what
        self._values = values
        self._prefix = prefix
        self._defaults = defaults
        self._read = set() if read is None else read  # names that a reader has asked for
        self.remarks = [] if remarks is None else remarks  # sentences of readers, for people

    @staticmethod
    def of_file(path: Path) -> "Fields":
        """The fields of a JSON file of at most 1 MB. Raises CheckpointError if it is missing, too large or not sound."""
        return Fields(str(path), read_json_object(path))

    def fail(self, key: str, wanted: str) -> NoReturn:
        """Raise CheckpointError with the value of `key` and `wanted`."""
        value = self.value(key)
        shown = "absent" if value is None else f"an array of {len(value)}" if isinstance(value, np.ndarray) else repr(value)
        shown = shown if len(shown) <= _MOST_SHOWN else shown[:_MOST_SHOWN] + "..."
        raise CheckpointError(f"{self.what}: {self._prefix}{key} is {shown}, wanted {wanted}")

    def __contains__(self, key: str) -> bool:
        return self.value(key) is not None

    def first(self, keys: Iterable[str], default: str = "") -> str:
        """The first of these names for one fact that the file has; else the first with a default; else `default`."""
        known, given = [key for key in keys if key in self], self.over({})
        return next((key for key in known if key in given), next(iter(known), default))

    def value(self, key: str) -> object:
        """The field as it is; None if it is absent."""
        self._read.add(self._prefix + key)
        return self._values.get(self._prefix + key, self._defaults.get(key))

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer."""
        return self._typed(key, default, int, "an integer")

    def per_layer(self, key: str, count: int, default: int | None = None) -> list[int]:
        """An integer for each of `count` layers: an array of them, or one for all."""
        value = self.value(key)
        if isinstance(value, list):
            if len(value) != count or any(type(number) is not int for number in value):
                self.fail(key, f"an array of {count} integers")
            return value
        if isinstance(value, np.ndarray):
            return self.numbers(key, np.integer, count)
        return [self.integer(key, default)] * max(1, min(count, MOST_LAYERS))

    def of_layers(self, key: str, count: int, default: int | None = None, some: bool = False) -> int:
        """An integer that every layer has: one, or an array of `count` equal ones. some: layers that have 0 are passed over."""
        numbers = self.per_layer(key, count, default)
        if some:
            numbers = [number for number in numbers if number] or [0]
        if len(set(numbers)) != 1:
            shown = ", ".join(str(number) for number in numbers[:8]) + (", ..." if count > 8 else "")
            self.fail(key, f"the same number for every layer; it says {shown}")
        return numbers[0]

    def token_id(self, key: str, vocab_size: int) -> int:
        """A token of a vocabulary."""
        found = self.integer(key)
        if not 0 <= found < vocab_size:
            self.fail(key, f"an id below {vocab_size}")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.value(key)
        if value is None and default is not None:
            return default
        # An integer of thousands of digits is no float.
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or not math.isfinite(value):
            self.fail(key, "a finite number")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        return self._typed(key, default, bool, "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return self._typed(key, default, str, "text")

    def items(self, key: str, wanted: str = "an array") -> list[Any]:
        """An array; absent is empty."""
        return self._typed(key, [], list, wanted)

    def strings(self, key: str) -> list[str]:
        """An array of strings; absent is empty."""
        value = self.items(key, "an array of strings")
        if not all(type(item) is str for item in value):
            self.fail(key, "an array of strings")
        return value

    def numbers(self, key: str, kind: type, length: int) -> list:
        """GGUF's array of `length` numbers, as Python numbers; absent is empty."""
        value = self.value(key)
        if value is None:
            return []
        if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, kind) or len(value) != length:
            self.fail(key, f"an array of {length} numbers ({kind.__name__})")
        return value.tolist()

    def over(self, defaults: Mapping[str, object]) -> "Fields":
        """The same fields, with other defaults."""
        return Fields(self.what, self._values, self._prefix, defaults, self._read, self.remarks)

    def unread(self) -> list[str]:
        """Names of the fields that are not absent, and that nobody has asked these `Fields` for."""
        names = [key for key, value in self._values.items() if value is not None and key not in self._read]
        return [key.removeprefix(self._prefix) for key in names if key.startswith(self._prefix)]

    def under(self, prefix: str) -> "Fields":
        """The fields whose names begin with `prefix`, by the rest of their names."""
        return Fields(self.what, self._values, prefix)

    def object(self, key: str) -> "Fields":
        """A nested object; absent is empty."""
        return Fields(f"{self.what}: {key}", self._typed(key, {}, dict, "an object"))

    def _typed(self, key: str, default: _T | None, kind: type[_T], wanted: str) -> _T:
        value = self.value(key)
        if value is None and default is not None:
            return default
        if type(value) is not kind:
            self.fail(key, wanted)
        return cast(_T, value)

    def names(self) -> list[str]:
        """Names of the fields that are not absent."""
        return [key for key, value in self._values.items() if value is not None]

"""The fields of a JSON object or of GGUF metadata, read by type, so that a wrong field is a CheckpointError naming it."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

import numpy as np

from cpuspec.errors import CheckpointError

_MOST_SHOWN = 80


class Fields:
    """Fields of `what`, under the names that begin with `prefix`. A field that is null counts as absent.

    defaults: values of fields that are not there; a null is there. A reader without a default wants the field to be there.
    Raises CheckpointError naming file and field, got and wanted.
    """

    def __init__(
        self, what: str, values: Mapping[str, object], prefix: str = "", defaults: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        self.what = what
        self._values = values
        self._prefix = prefix
        self._defaults = defaults

    def fail(self, key: str, wanted: str) -> NoReturn:
        """Raise CheckpointError with the value of `key` and `wanted`."""
        value = self.value(key)
        shown = "absent" if value is None else f"an array of {len(value)}" if isinstance(value, np.ndarray) else repr(value)
        shown = shown if len(shown) <= _MOST_SHOWN else shown[:_MOST_SHOWN] + "..."
        raise CheckpointError(f"{self.what}: {self._prefix}{key} is {shown}, wanted {wanted}")

    def __contains__(self, key: str) -> bool:
        return self.value(key) is not None

    def value(self, key: str) -> object:
        """The field as it is; None if it is absent."""
        return self._values.get(self._prefix + key, self._defaults.get(key))

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer."""
        value = self.value(key)
        if value is None and default is not None:
            return default
        if type(value) is not int:
            self.fail(key, "an integer")
        return value

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
        value = self.value(key)
        if value is None and default is not None:
            return default
        if type(value) is not bool:
            self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.value(key)
        if value is None and default is not None:
            return default
        if type(value) is not str:
            self.fail(key, "text")
        return value

    def items(self, key: str) -> list[object]:
        """An array; absent is empty."""
        value = self.value(key)
        if value is None:
            return []
        if type(value) is not list:
            self.fail(key, "an array")
        return value

    def strings(self, key: str) -> list[str]:
        """An array of strings; absent is empty."""
        value = self.value(key)
        if value is None:
            return []
        if type(value) is not list or not all(type(item) is str for item in value):
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
        return Fields(self.what, self._values, self._prefix, defaults)

    def object(self, key: str) -> "Fields":
        """A nested object; absent is empty."""
        value = self.value(key)
        if value is not None and type(value) is not dict:
            self.fail(key, "an object")
        return Fields(f"{self.what}: {key}", value or {})

    def names(self) -> list[str]:
        """Names of the fields that are not absent."""
        return [key for key, value in self._values.items() if value is not None]

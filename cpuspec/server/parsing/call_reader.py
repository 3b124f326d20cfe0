"""One tool call as JSON, read character by character: its name, and its arguments as they come."""

import json
from collections.abc import Collection

from cpuspec.server.parsing.pieces import SPACE

_ARGUMENTS = ("arguments", "parameters")  # Hermes, Qwen and Mistral say the first, Llama 3 and Gemma the second


class ValueEnd:
    """Finds where a JSON value ends. It does not check the value."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._started = self._in_string = self._escaped = False

    def includes(self, char: str) -> bool:
        """Read the next character; returns whether it belongs to the value.

        `done` is set by the last character of an object, a list or a text, and by the first character after another value.
        """
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                self.done = self._depth == 0
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 0:
                self.done = True
                return False
            self._depth -= 1
            self.done = self._depth == 0
        elif char == '"':
            self._in_string = True
        elif self._depth == 0 and (char == "," or (char in SPACE and self._started)):
            self.done = True
            return False
        self._started = self._started or char not in SPACE
        return True


class CallReader:
    """Reads `{"name": ..., "arguments": {...}}`.

    names: of the functions, None for any; an object with another name is no call. Once the name and the beginning of the arguments
    are known, `begun` is true and the arguments are returned as they come. raw: all that was read, in case it is no call.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.name = ""
        self.raw = ""
        self.begun = self.done = self.failed = False
        self._names = names
        self._state = "open"
        self._key = ""
        self._value = ""
        self._end = ValueEnd()
        self._found: dict[str, str] = {}  # values by key, as JSON
        self._streams = False  # the value that is read now goes out as it comes

    def push(self, text: str) -> tuple[int, str]:
        """Read on; returns how many characters were taken, fewer where the call ends or fails, and new text of its arguments."""
        shown = ""
        for taken, char in enumerate(text):
            if self.done or self.failed:
                return taken, shown
            shown += self._read(char)
            self.raw += char
        return len(text), shown

    def _read(self, char: str) -> str:
        match self._state:
            case "open":
                self._go("first key" if char == "{" else "open", char in SPACE or char == "{")
            case "first key" | "key" | "next":
                return self._between(char)
            case "in key":
                self._key += char
                if self._end.includes(char) and self._end.done:
                    self._state = "colon"
            case "colon":
                self._go("value" if char == ":" else "colon", char in SPACE or char == ":")
                self._value, self._end, self._streams = "", ValueEnd(), False
            case "value":
                return self._read_value(char)
        return ""

    def _go(self, state: str, sound: bool) -> None:
        self._state = state
        if not sound:
            self._give_up()

    def _between(self, char: str) -> str:
        if char in SPACE:
            return ""
        if char == '"' and self._state != "next":
            self._key, self._state, self._end = char, "in key", ValueEnd()
            self._end.includes(char)
        elif char == "," and self._state == "next":
            self._state = "key"
        elif char == "}" and self._state != "key":
            return self._finish()
        else:
            self._give_up()
        return ""

    def _read_value(self, char: str) -> str:
        if not self._value and char in SPACE:
            return ""
        belongs = self._end.includes(char)
        if belongs:
            self._value += char
            if self._value == "{" and _text(self._key) in _ARGUMENTS and self._knows_name():
                self.begun = self._streams = True
        if not self._end.done:
            return char if self._streams else ""
        self._found[_text(self._key)] = self._value
        self._state = "next"
        if not belongs:
            return self._between(char)
        return char if self._streams else ""

    def _knows_name(self) -> bool:
        self.name = _text(self._found.get("name", ""))
        return bool(self.name) and not self.begun and (self._names is None or self.name in self._names)

    def _finish(self) -> str:
        self.done = True
        if self.begun:
            return ""
        if not self._knows_name():
            self.failed = True
            return ""
        self.begun = True
        value = next((self._found[key] for key in _ARGUMENTS if key in self._found), "{}")
        return _text(value) or value  # some models write the arguments as a text that holds JSON

    def _give_up(self) -> None:
        # A call whose arguments have begun stays a call, whatever follows.
        self.done, self.failed = self.begun, not self.begun


def _text(value: str) -> str:
    """The text that a JSON value is; "" for other values."""
    try:
        found = json.loads(value)
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""

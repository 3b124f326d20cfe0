"""Stop strings: where they count, and that the pieces of a text change nothing."""

from collections.abc import Sequence
from typing import Any

import pytest

from cpuspec.engine.text import StopText

THINK, CALL = ("<think>", "</think>"), ("<call>", "</call>")
# text, stop strings, whether the answer begins in reasoning, what is shown, and the stop string that ended it
CASES: list[tuple[str, tuple[str, ...], bool, str, str | None]] = [
    ("abc", ("b",), False, "a", "b"),
    ("<think>b</think>abc", ("b",), False, "<think>b</think>a", "b"),
    ("b</think>abc", ("b",), True, "b</think>a", "b"),
    ("b never ends", ("b",), True, "b never ends", None),
    ("x<call>b</call>y<call>b</call>b", ("b",), False, "x<call>b</call>y<call>b</call>", "b"),
    ("x<call>y", ("<",), False, "x<call>y", None),
    ("x<cal", ("<",), False, "x", "<"),
    ("x < y", ("<",), False, "x ", "<"),
    ("x</think>y", ("k>y",), True, "x</think>y", None),
    ("xy<call>", ("y<call",), False, "x", "y<call"),
]


class Pieces:
    """A decoder whose tokens are numbers of pieces."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def push(self, token: int) -> str:
        return self._pieces[token]

    def finish(self) -> str:
        return ""


def shown(pieces: list[str], stop: tuple[str, ...], within: bool) -> tuple[str, str | None]:
    decoder: Any = Pieces(pieces)
    text, found = StopText(decoder, stop, apart=(THINK, CALL), within="</think>" if within else ""), ""
    for number in range(len(pieces)):
        found += text.push(number)
        if text.found:
            return found, text.found
    found += text.finish()
    return found, text.found


@pytest.mark.parametrize(("text", "stop", "within", "wanted", "ended"), CASES)
def test_stop_strings_count_neither_in_reasoning_nor_in_calls(
    text: str, stop: tuple[str, ...], within: bool, wanted: str, ended: str | None
) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
        assert shown(pieces, stop, within) == (wanted, ended), pieces

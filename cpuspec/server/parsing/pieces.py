"""The pieces into which parsers cut an answer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from cpuspec.engine.text import overlap

SPACE = " \t\r\n"  # the white space that parsers drop around reasoning and calls


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer.

    kind: "reasoning" or "content", more text of it; "call", a tool call begins and `text` is the function's name; "arguments",
    more of the JSON text of its arguments. call: which tool call it belongs to, counted from 0.
    """

    kind: str
    text: str
    call: int = 0


class Parser(Protocol):
    """Splits a text into pieces as it arrives. The text is a whole answer, or its content with tool calls."""

    @property
    def num_calls(self) -> int:
        """How many tool calls have begun."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Read on; returns the pieces that no later text can change."""
        ...

    def finish(self) -> list[Piece]:
        """The remaining pieces, at the answer's end."""
        ...


def settled(text: str, *marks: str) -> str:
    """The beginning of a text that cannot belong to a mark, nor to white space before one, whatever comes next."""
    return text[: len(text) - max(overlap(text, mark) for mark in marks if mark)].rstrip(SPACE)


def decided(step: Callable[[list[Piece]], bool]) -> list[Piece]:
    """All pieces that a parser can decide on now. step: adds pieces to a list, and returns whether more may be decided."""
    pieces: list[Piece] = []
    while step(pieces):
        pass
    return pieces


def joined_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces that are not empty, with neighbours of one kind joined. Two calls are never joined."""
    found: list[Piece] = []
    for piece in pieces:
        if not piece.text:
            continue
        if found and piece.kind != "call" and (found[-1].kind, found[-1].call) == (piece.kind, piece.call):
            found[-1] = replace(piece, text=found[-1].text + piece.text)
        else:
            found.append(piece)
    return found

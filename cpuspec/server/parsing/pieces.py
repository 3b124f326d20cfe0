"""The pieces into which an answer is cut."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer.

    kind: "reasoning" or "content", more text of it; "call", a tool call whose function has the name `text`; "arguments", which
    follows it, the call's arguments as one JSON object. call: which tool call it belongs to, counted from 0.
    """

    kind: str
    text: str
    call: int = 0


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

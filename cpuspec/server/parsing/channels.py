"""Answers in channels, as gpt-oss writes them (OpenAI's "harmony" format).

An answer is messages, each with a header, a mark and a text: `<|channel|>analysis<|message|>...<|end|>` is reasoning,
`<|start|>assistant<|channel|>final<|message|>...` content. A header with `to=functions.NAME` before or after the channel makes the
message a call of that function. Source: OpenAI's harmony guide.
"""

import re

from cpuspec.engine.text import overlap
from cpuspec.server.parsing.pieces import Piece, decided, joined_pieces

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_BEGINNINGS = ("<|start|>", "<|channel|>", "<|message|>", "to=", "assistant")  # of an answer that has a header
_MOST_HEADER_CHARS = 1000
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class ChannelParser:
    """Splits an answer in channels into pieces. A text without any header is content."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._pending = ""
        self._kind: str | None = None  # of the message that is read; None in a header
        self._seen: set[str] = set()  # kinds of the messages that had a text

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        self._pending += text
        return joined_pieces(decided(self._step))

    def finish(self) -> list[Piece]:
        """The rest, at the end of the answer. An unfinished header is dropped."""
        pieces = joined_pieces(decided(self._step))
        rest, self._pending = self._pending, ""
        return joined_pieces([*pieces, *self._text(rest)]) if self._kind is not None else pieces

    def _step(self, pieces: list[Piece]) -> bool:
        return self._header(pieces) if self._kind is None else self._body(pieces)

    def _header(self, pieces: list[Piece]) -> bool:
        text = self._pending.lstrip()
        at = text.find(_MESSAGE, 0, _MOST_HEADER_CHARS)
        if not any(text.startswith(one) or one.startswith(text) for one in _BEGINNINGS) or (
            at < 0 and len(text) >= _MOST_HEADER_CHARS
        ):
            self._kind = "content"  # the model forgot its format
            return True
        if at < 0:
            return False
        header, rest = text[:at], text[at + len(_MESSAGE) :]
        self._pending = rest
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        if name and name != "assistant":
            self._kind = "arguments"
            pieces.append(Piece("call", name, self.num_calls))
            self.num_calls += 1
        else:
            self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"
            if self._kind in self._seen:  # another message of the kind is a paragraph of its own
                pieces.append(Piece(self._kind, "\n\n"))
        return True

    def _body(self, pieces: list[Piece]) -> bool:
        text = self._pending
        ends = [(at, mark) for mark in _ENDS if (at := text.find(mark)) >= 0]
        if ends:
            at, mark = min(ends)
            pieces += self._text(text[:at])
            self._pending, self._kind = text[at + len(mark) * (mark != "<|start|>") :], None
            return True
        sure = text[: len(text) - max(overlap(text, mark) for mark in _ENDS)]
        pieces += self._text(sure)
        self._pending = text[len(sure) :]
        return False

    def _text(self, text: str) -> list[Piece]:
        assert self._kind is not None
        if not text:
            return []
        self._seen.add(self._kind)
        return [Piece(self._kind, text, self.num_calls - 1 if self._kind == "arguments" else 0)]

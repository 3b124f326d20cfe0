"""A whole answer: reasoning first, if there is any, then content with tool calls."""

from cpuspec.engine.text import overlap
from cpuspec.server.parsing.calls import CallParser
from cpuspec.server.parsing.pieces import Piece, decided, joined

_SPACE = " \t\r\n"
_OPENS, _CLOSES = "<think>", "</think>"


class AnswerParser:
    """Takes an answer apart.

    reasons: whether `<think>` at the answer's beginning opens reasoning; thinking: the prompt has opened it already. calls: what
    parses tool calls, None where there are no tools. White space around reasoning is nobody's.
    """

    def __init__(self, reasons: bool = True, thinking: bool = False, calls: CallParser | None = None) -> None:
        self._calls = calls
        self._state = "before reasoning" if thinking else "start" if reasons else "content"
        self._pending = ""

    @property
    def num_calls(self) -> int:
        """How many tool calls have begun."""
        return self._calls.num_calls if self._calls else 0

    def push(self, text: str) -> list[Piece]:
        """What is certain with this text."""
        self._pending += text
        return joined(decided(self._step))

    def finish(self) -> list[Piece]:
        """The rest, at the end of the answer."""
        rest, self._pending = self._pending, ""
        pieces = [Piece("reasoning", rest)] if "reasoning" in self._state else self._content(rest)
        if self._calls:
            pieces += self._calls.finish()
        return joined(pieces)

    def _step(self, pieces: list[Piece]) -> bool:
        text = self._pending
        match self._state:
            case "start":
                begun = text.lstrip(_SPACE)
                if _OPENS.startswith(begun) and begun != _OPENS:
                    return False
                if begun.startswith(_OPENS):
                    self._pending, self._state = begun[len(_OPENS) :], "before reasoning"
                else:
                    self._state = "content"
                return True
            case "before reasoning" | "before content":
                self._pending = text.lstrip(_SPACE)
                if not self._pending:
                    return False
                self._state = self._state.removeprefix("before ")
                return True
            case "reasoning":
                reasoning, mark, rest = text.partition(_CLOSES)
                if mark:
                    pieces.append(Piece("reasoning", reasoning.rstrip(_SPACE)))
                    self._pending, self._state = rest, "before content"
                    return True
                sure = text[: len(text) - overlap(text, _CLOSES)].rstrip(_SPACE)
                pieces.append(Piece("reasoning", sure))
                self._pending = text[len(sure) :]
                return False
        self._pending = ""
        pieces += self._content(text)
        return False

    def _content(self, text: str) -> list[Piece]:
        return self._calls.push(text) if self._calls else [Piece("content", text)]

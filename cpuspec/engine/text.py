"""Tokens to text that may be shown: without parts of stop strings, and without half characters."""

from collections.abc import Sequence

from cpuspec.text import StreamDecoder


class StopText:
    """The text of one request. Holds back text that may begin a stop string, and cuts before a whole one.

    min_tokens: how many first tokens may not end the text by a stop string. shows_stop: the text includes the stop string that ends
    it. apart: pairs of texts between which stop strings do not count, as around reasoning; within: the text that ends such a part,
    if the answer begins in one.
    """

    def __init__(
        self,
        decoder: StreamDecoder,
        stop: tuple[str, ...],
        min_tokens: int = 0,
        shows_stop: bool = False,
        apart: Sequence[tuple[str, str]] = (),
        within: str = "",
    ) -> None:
        self.found: str | None = None  # the stop string that ended the text
        self._shows_stop = shows_stop
        self._num_free = min_tokens
        self._decoder = decoder
        self._stop = stop
        self._apart, self._within = apart, within
        self._pending = ""

    def push(self, token: int) -> str:
        """Text that may be shown after this token. Sets `found` if a stop string is complete."""
        piece = self._decoder.push(token)
        self._num_free -= 1
        return self._release(piece, self._stop if self._num_free < 0 else ()) if self._stop else piece

    def finish(self) -> str:
        """The rest of the text, for a sequence that no stop string ended."""
        shown = self._release(self._decoder.finish(), self._stop, final=True)
        shown, self._pending = shown + self._pending, ""
        return shown

    def _release(self, piece: str, stops: tuple[str, ...], final: bool = False) -> str:
        text, shown, self._pending = self._pending + piece, "", ""
        while True:
            if self._within:
                before, mark, rest = text.partition(self._within)
                if not mark:
                    return shown + self._hold(text, overlap(text, self._within))
                shown, text, self._within = shown + before + mark, rest, ""
            first, closes, opens = min(
                ((at, closes, opens) for opens, closes in self._apart if (at := text.find(opens)) >= 0), default=(len(text), "", "")
            )
            found = [(index, stop) for stop in stops if 0 <= (index := text.find(stop)) < first]
            if found:
                index, stop = min(found)
                if not final and any(opens.startswith(text[index:]) for opens, _ in self._apart):
                    return shown + self._hold(text, len(text) - index)
                self.found = stop
                return shown + text[: index + len(stop) * self._shows_stop]
            if not closes:
                held = [*stops, *(opens for opens, _ in self._apart)]
                return shown + self._hold(text, max((overlap(text, one) for one in held), default=0))
            shown, text, self._within = shown + text[: first + len(opens)], text[first + len(opens) :], closes

    def _hold(self, text: str, size: int) -> str:
        """Keep the end of a text of this size; returns the text before it."""
        self._pending = text[len(text) - size :]
        return text[: len(text) - size]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, shorter than `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)

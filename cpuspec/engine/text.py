"""Tokens to text that may be shown: without parts of stop strings, and without half characters."""

from cpuspec.text import StreamDecoder


class StopText:
    """The text of one request. Holds back text that may begin a stop string, and cuts before a whole one.

    min_tokens: how many first tokens may not end the text by a stop string. shows_stop: the text includes the stop string that ends
    it.
    """

    def __init__(self, decoder: StreamDecoder, stop: tuple[str, ...], min_tokens: int = 0, shows_stop: bool = False) -> None:
        self.found: str | None = None  # the stop string that ended the text
        self._shows_stop = shows_stop
        self._num_free = min_tokens
        self._decoder = decoder
        self._stop = stop
        self._pending = ""

    def push(self, token: int) -> str:
        """Text that may be shown after this token. Sets `found` if a stop string is complete."""
        piece = self._decoder.push(token)
        self._num_free -= 1
        return self._release(piece) if self._stop and self._num_free < 0 else piece

    def finish(self) -> str:
        """The rest of the text, for a sequence that no stop string ended."""
        shown = self._release(self._decoder.finish())
        shown, self._pending = shown + self._pending, ""
        return shown

    def _release(self, piece: str) -> str:
        text = self._pending + piece
        found = [(index, stop) for stop in self._stop if (index := text.find(stop)) >= 0]
        if found:
            self._pending = ""
            index, self.found = min(found)
            return text[: index + len(self.found) * self._shows_stop]
        held = max((overlap(text, stop) for stop in self._stop), default=0)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, shorter than `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)

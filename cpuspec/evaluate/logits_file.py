"""Files of llama.cpp's `--kl-divergence-base`: a text's windows, and the log probabilities of the rows that count, in 16 bits each.

Layout (llama.cpp, tools/perplexity/perplexity.cpp), little-endian: `_logits_`; int32 tokens of a window, ids of the vocabulary,
windows; int32 ids of all windows, without the token that takes the place of each first one; then for every row from the middle of
a window to its last but one: float32 scale, float32 least log probability, uint16 codes, one an id and one more where their number
is odd. A log probability is scale * code + least. The least one lies 16 below the largest at most: whatever is less likely is it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cpuspec.errors import ConfigError
from cpuspec.evaluate.quality import F64
from cpuspec.files import replacing
from cpuspec.model.batch import F32

LEAST = -16.0  # log probabilities that are not above it do not count for a divergence
_MAGIC = b"_logits_"
_RANGE = np.float32(16)  # of log probabilities that a row tells apart
_MOST_CODE = 65535
_MOST_CONTEXT, _MOST_VOCABULARY = 1 << 24, 1 << 24


class LogitsWriter:
    """Writes the rows of windows in their order. Made by `writing`."""

    def __init__(self, file: BinaryIO, vocab_size: int) -> None:
        self._file, self._vocab_size = file, vocab_size
        self.num_rows = 0

    def write(self, logits: F32) -> None:
        """Append rows of logits [rows, V]."""
        most = logits.max(axis=1, keepdims=True)
        least = np.maximum(logits.min(axis=1, keepdims=True), most - _RANGE)
        log_sum = np.log(np.exp(logits - most).sum(axis=1, dtype=np.float64, keepdims=True)).astype(np.float32)
        scale = (most - least) / np.float32(_MOST_CODE)
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = np.where(logits > least, np.rint((1 / scale) * (logits - least)), 0)
        row = np.zeros((len(logits), _row_codes(self._vocab_size)), "<u2")
        row[:, :4] = np.hstack([scale, least - most - log_sum]).astype("<f4").view("<u2")
        row[:, 4 : 4 + self._vocab_size] = np.clip(codes, 0, _MOST_CODE)
        self._file.write(row.tobytes())
        self.num_rows += len(logits)


@contextmanager
def writing(path: Path, windows: list[list[int]], vocab_size: int) -> Iterator[LogitsWriter]:
    """A file for the rows of windows of one length. All of it or nothing is written. Raises OSError."""
    context = len(windows[0])
    assert all(len(window) == context for window in windows), "windows of llama.cpp have one length"
    with replacing(path) as file:
        file.write(_MAGIC + np.array([context, vocab_size, len(windows)], "<i4").tobytes())
        file.write(np.array(windows, "<i4").tobytes())
        writer = LogitsWriter(file, vocab_size)
        yield writer
        assert writer.num_rows == len(windows) * _num_rows(context), "every row that counts was written"


class LogitsFile:
    """A file that is read. Rows stay on the disk until they are asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that is none, is cut off, or holds ids outside of its vocabulary."""
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(20)
                if len(head) < 20 or head[:8] != _MAGIC:
                    raise ConfigError(f"{path} is not a file of logits; wanted one that --save-logits or llama.cpp wrote")
                context, self.vocab_size, num_windows = np.frombuffer(head, "<i4", 3, 8).tolist()
                if not (4 <= context <= _MOST_CONTEXT and 1 <= self.vocab_size <= _MOST_VOCABULARY and num_windows >= 1):
                    raise ConfigError(
                        f"{path} says that it has {num_windows} windows of {context} tokens of {self.vocab_size} ids; it is damaged"
                    )
                self._row_bytes = 2 * _row_codes(self.vocab_size)
                self._first = 20 + 4 * context * num_windows
                wanted = self._first + num_windows * _num_rows(context) * self._row_bytes
                if size != wanted:
                    raise ConfigError(f"{path} has {size} bytes; wanted {wanted} for what its beginning says; write it again")
                ids = np.frombuffer(file.read(4 * context * num_windows), "<i4").reshape(num_windows, context)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ConfigError(f"{path} has token ids outside of its {self.vocab_size}; it is damaged")
        self.context, self.windows = context, ids.tolist()

    def log_probs(self, window: int, first: int, count: int) -> F64:
        """Log probabilities [count, V] of the rows of a window that count, from the first-th of them on, in f32 as llama.cpp's.

        Raises ConfigError where their scales are no numbers.
        """
        at = self._first + (window * _num_rows(self.context) + first) * self._row_bytes
        data = np.fromfile(self.path, "<u2", count * self._row_bytes // 2, offset=at).reshape(count, -1)
        scale, least = data[:, :4].copy().view("<f4").T
        if not (np.isfinite(scale).all() and np.isfinite(least).all() and (scale >= 0).all()):
            raise ConfigError(f"{self.path} has a row whose scale is not a number, in window {window + 1}; it is damaged")
        codes = data[:, 4 : 4 + self.vocab_size].astype(np.float32)
        return (scale[:, None] * codes + least[:, None]).astype(np.float64)


def _row_codes(vocab_size: int) -> int:
    """Codes of 16 bits that a row takes, its two numbers included."""
    return 2 * math.ceil(vocab_size / 2) + 4


def _num_rows(context: int) -> int:
    """Rows of a window that count."""
    return context - 1 - context // 2

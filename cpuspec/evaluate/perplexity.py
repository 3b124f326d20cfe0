"""Perplexity of a text by the conventions of the field, and the divergence from logits that a file keeps.

llama.cpp (`llama-perplexity`): windows of `context` tokens side by side, each from an empty cache and with the token for the
beginning of a text in the place of its first; the second half of each is counted. Hugging Face ("Perplexity of fixed-length
models" in the documentation of transformers): windows that begin `stride` tokens after one another, so that they overlap, and each
token is counted once, in the first window that has it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cpuspec.backends import Backend
from cpuspec.errors import ConfigError
from cpuspec.evaluate.logits_file import LEAST, LogitsFile, LogitsWriter
from cpuspec.evaluate.quality import F64, Quality, QualityMeter, logits_of, mean_and_error
from cpuspec.model.batch import F32
from cpuspec.sampling import log_softmax

CONTEXT = 512  # tokens of a window, llama.cpp's default
_ROWS_AT_ONCE = 32

OnWindow = Callable[[int, float], None]  # windows that are done, and the perplexity so far


@dataclass(frozen=True)
class Window:
    """Token ids that are fed to an empty cache. The rows from `first` on count; they predict tokens[first + 1:]."""

    tokens: list[int]
    first: int

    @property
    def counted(self) -> list[int]:
        """The tokens that are predicted and counted."""
        return self.tokens[self.first + 1 :]


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log likelihood of the counted tokens. error: the standard error, to first order, as llama.cpp's."""

    perplexity: float
    error: float
    num_counted: int
    num_windows: int
    running: tuple[float, ...]  # the perplexity after each window


def side_by_side(tokens: Sequence[int], context: int, bos_id: int | None, most: int | None = None) -> list[Window]:
    """llama.cpp's windows, `most` at most. bos_id: what takes the place of the first token of each, None where models want none.

    Raises ConfigError for a text of less than two windows, which llama.cpp refuses, too.
    """
    if context < 4:
        raise ConfigError(f"a window needs at least 4 tokens, got {context}")
    if len(tokens) < 2 * context:
        raise ConfigError(
            f"windows of {context} tokens need a text of at least {2 * context} tokens, got {len(tokens)}; take a smaller --context"
        )
    starts = range(0, len(tokens) - context + 1, context)[:most]
    return [_from_beginning(tokens[start : start + context], bos_id) for start in starts]


def sliding(tokens: Sequence[int], context: int, stride: int, most: int | None = None) -> list[Window]:
    """Hugging Face's windows, `most` at most: the first counts all its tokens but one, each later one those that are new in it.

    Raises ConfigError for a text of fewer than two tokens, and for a stride beyond the window.
    """
    if not 1 <= stride <= context - 1:
        raise ConfigError(f"the stride must be from 1 to {context - 1}, one less than the window, got {stride}")
    if len(tokens) < 2:
        raise ConfigError(f"perplexity needs a text of at least two tokens, got {len(tokens)}")
    windows, counted = [], 1  # nothing predicts the first token
    for start in range(0, len(tokens), stride):
        part = list(tokens[start : start + context])
        windows.append(Window(part, counted - start - 1))
        counted = start + len(part)
        if counted == len(tokens):
            break
    return windows[:most]


def measure_perplexity(
    backend: Backend,
    windows: Sequence[Window],
    on_window: OnWindow = lambda done, perplexity: None,
    writer: LogitsWriter | None = None,
) -> Perplexity:
    """Feed each window to an empty cache. writer: gets the logits of the rows that count."""
    losses: list[F64] = []
    running = []
    for number, window in enumerate(windows, 1):
        for rows, following in _rows(backend, window):
            losses.append(-log_softmax(rows)[np.arange(len(rows)), following])
            if writer is not None:
                writer.write(rows)
        running.append(math.exp(np.concatenate(losses).mean()))
        on_window(number, running[-1])
    loss, error = mean_and_error(np.concatenate(losses))
    return Perplexity(math.exp(loss), math.exp(loss) * error, sum(map(len, losses)), len(windows), tuple(running))


def compare_with_file(
    backend: Backend, file: LogitsFile, bos_id: int | None, most: int | None = None, on_window: OnWindow = lambda done, kl: None
) -> Quality:
    """Feed a file's windows, `most` at most, and compare each row that counts with what the file keeps of the reference's.

    on_window is told the mean divergence so far. Raises ConfigError for a file of another vocabulary.
    """
    if file.vocab_size != backend.config.vocab_size:
        raise ConfigError(
            f"{file.path} has logits of {file.vocab_size} ids, and this model has {backend.config.vocab_size}; "
            "compare with a reference that has the same vocabulary"
        )
    meter = QualityMeter()
    for number, tokens in enumerate(file.windows[:most]):
        at = 0
        for rows, following in _rows(backend, _from_beginning(tokens, bos_id)):
            meter.add(file.log_probs(number, at, len(rows)), log_softmax(rows), following, LEAST)
            at += len(rows)
        on_window(number + 1, meter.quality().kl_mean)
    return meter.quality()


def _from_beginning(tokens: Sequence[int], bos_id: int | None) -> Window:
    return Window([*tokens] if bos_id is None else [bos_id, *tokens[1:]], len(tokens) // 2)


def _rows(backend: Backend, window: Window) -> Iterator[tuple[F32, list[int]]]:
    """The logits of a window's counted rows, a few rows at a time, with the tokens that follow them."""
    at = 0
    for logits in logits_of(backend, window.tokens[:-1], backend.max_rows, window.first):
        for start in range(0, len(logits), _ROWS_AT_ONCE):
            rows = logits[start : start + _ROWS_AT_ONCE]
            yield rows, window.counted[at : at + len(rows)]
            at += len(rows)

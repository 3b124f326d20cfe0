"""Writes hidden states of a model over texts as samples (`train.samples`), in bounded memory; an interrupted run continues.

Texts are files of answers, JSON lines of text, messages or ids, or plain text in windows. Each sample is one sequence. A shard is
written when it is full, so a run that is interrupted loses what the unfinished one would have held, and the next run, which has
compared the tokens of the finished ones with its texts, writes the same bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cpuspec.backends import Backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.heads.head import final_norm
from cpuspec.errors import ConfigError
from cpuspec.metrics import now_s
from cpuspec.model.batch import F32, I32, ForwardBatch
from cpuspec.platform import SYSTEM
from cpuspec.sampling import argmax, likeliest
from cpuspec.text import Tokenizer
from cpuspec.train.answers import AnswerFiles
from cpuspec.train.prompts import line_ids
from cpuspec.train.samples import FINAL, METADATA, MOST, Extraction, Sample, open_samples, shard_path, write_shard

LAST = "last"  # in a list of layers: the output of the last one, which no norm has changed

_SHARD_BYTES = 128 << 20  # of a shard's hidden states in memory
_LOGIT_BYTES = 256 << 20  # of a forward
ABSENT = np.float32(1e9)  # log_sum of a row whose likeliest tokens are not asked for: they get no probability
_PIECE_CHARACTERS = 1 << 16  # of plain text that is read at once


class ReadText(NamedTuple):
    """One sequence. num_prompt: of its tokens, how many the target did not generate, from the first on."""

    token_ids: list[int]
    num_prompt: int


@dataclass
class ExtractSummary:
    """The counts of a run. num_kept: samples of earlier runs. num_new_tokens: of this run; others of the directory."""

    path: str
    num_kept: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_answer_tokens: int = 0
    num_new_tokens: int = 0
    duration_s: float = 0.0
    interrupted: bool = False

    @property
    def tokens_per_s(self) -> float:
        """Of this run."""
        return self.num_new_tokens / self.duration_s if self.duration_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything under its name."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s}


def read_layers(text: str, num_layers: int) -> tuple[int | str, ...]:
    """Layers separated by commas: numbers from 0, `last`, and `final`. Raises ConfigError."""
    found: list[int | str] = []
    for one in text.split(","):
        name = str(num_layers - 1) if one.strip() == LAST else one.strip()
        is_layer = name.isascii() and name.isdigit() and len(name) < 6 and int(name) < num_layers
        if name != FINAL and not is_layer:
            raise ConfigError(
                f"there is no layer {one!r}; wanted 0 to {num_layers - 1}, {LAST} or {FINAL}, with commas between them"
            )
        found.append(FINAL if name == FINAL else int(name))
    if len(set(found)) < len(found):
        raise ConfigError(f"layers {text!r} name one twice")
    return tuple(found)


def usual_layers(num_layers: int) -> tuple[int | str, ...]:
    """The layers that EAGLE-3 reads, the inputs of layers 2, n/2 and n - 3; and the final state, which only `mtp` reads."""
    inputs = dict.fromkeys(min(max(one, 1), num_layers) for one in (2, num_layers // 2, num_layers - 3))
    return (*(one - 1 for one in inputs), FINAL)


def read_texts(paths: Sequence[Path], files: AnswerFiles, max_length: int, all_count: bool = False) -> Iterator[ReadText]:
    """The sequences of files, one after the other, in windows of at most `max_length` tokens.

    A `.jsonl` file has a text, messages, ids, or an answer in each line; any other is plain text. Tokens count for the loss that
    the target generated, and with `all_count` all of a text that is no answer. files: reads answers. Raises ConfigError for what
    is neither, and for answers of another vocabulary.
    """
    for path in paths:
        is_lines = path.suffix == ".jsonl"
        whole = _lines(path, files, all_count) if is_lines else _plain(path, files.tokenizer, max_length, all_count)
        for text in whole:
            for begin in range(0, len(text.token_ids), max_length):
                window = text.token_ids[begin : begin + max_length]
                yield ReadText(window, min(max(text.num_prompt - begin, 0), len(window)))


def _lines(path: Path, files: AnswerFiles, all_count: bool) -> Iterator[ReadText]:
    for where, line in files.lines(path):
        if "answer_ids" in line:
            yield ReadText(line["prompt_ids"] + line["answer_ids"], len(line["prompt_ids"]))
        else:
            ids = line_ids(line, files.tokenizer, where)
            yield ReadText(ids, 0 if all_count else len(ids))


def _plain(path: Path, tokenizer: Tokenizer, max_length: int, all_count: bool) -> Iterator[ReadText]:
    """Windows of a plain text, which is read in pieces that end with a line where they can."""
    ids: list[int] = []
    rest = ""
    try:
        with path.open(encoding="utf-8") as file:
            while piece := file.read(_PIECE_CHARACTERS):
                rest += piece
                end = rest.rfind("\n") + 1 or len(rest)
                ids += tokenizer.encode(rest[:end], add_special=False)
                rest = rest[end:]
                while len(ids) >= max_length:
                    yield ReadText(ids[:max_length], 0 if all_count else max_length)
                    del ids[:max_length]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}") from None
    ids += tokenizer.encode(rest, add_special=False)
    if ids:
        yield ReadText(ids, 0 if all_count else len(ids))


class LayerStates:
    """Makes the hidden states of a sample from what a forward hands out. asked: the layers that it must hand out, rising."""

    def __init__(self, checkpoint: Checkpoint, layers: Sequence[int | str]) -> None:
        """layers: as in `Extraction`."""
        last = checkpoint.config.num_layers - 1
        self._norm, self._layers = final_norm(checkpoint), layers
        self.asked = tuple(sorted({last if one == FINAL else int(one) for one in layers}))
        self._places = [self.asked.index(last if one == FINAL else int(one)) for one in layers]

    def of(self, hidden: Sequence[F32]) -> F32:
        """[T, L, H] of the layers' outputs [T, H], in the order of `asked`."""
        return np.stack(
            [
                self._norm.applied(hidden[place]) if layer == FINAL else hidden[place]
                for place, layer in zip(self._places, self._layers, strict=True)
            ],
            axis=1,
        )


class Extractor:
    """One loaded model, which gives samples of sequences of at most `max_length` tokens."""

    def __init__(self, backend: Backend, checkpoint: Checkpoint, layers: Sequence[int | str], top: int, max_length: int) -> None:
        """layers, top: as in `Extraction`. Raises ConfigError where the model is too small for them."""
        config = backend.config
        most = min(config.vocab_size, MOST["top"])
        if not 0 <= top <= most:
            raise ConfigError(f"at most the likeliest {most} tokens can be kept; got {top}")
        if not 1 <= max_length <= config.context_length:
            raise ConfigError(f"a sample may have 1 to {config.context_length} tokens, the model's context; got {max_length}")
        self._backend, self._top, self._states = backend, top, LayerStates(checkpoint, layers)
        self._cache = backend.new_cache(1, max_length)
        self._max_rows = min(backend.max_rows, max(_LOGIT_BYTES // (4 * config.vocab_size), 1)) if top else backend.max_rows

    def sample(self, text: ReadText) -> Sample:
        """Hidden states of every token, and the likeliest tokens after those that count or come before one that counts.

        Where none counts, after all: nothing else says which are wanted.
        """
        self._cache.truncate(0, 0)
        num = len(text.token_ids)
        answer = np.arange(num) >= text.num_prompt
        judged = (answer | np.append(answer[1:], False) | (not answer.any())) & bool(self._top)
        hidden: list[F32] = []
        tops = (np.zeros((num, self._top), np.int32), np.zeros((num, self._top), np.float32), np.full(num, ABSENT))
        for begin in range(0, num, self._max_rows):
            tokens = text.token_ids[begin : begin + self._max_rows]
            end = begin + len(tokens)
            rows = np.flatnonzero(judged[begin:end])
            batch = ForwardBatch(
                tokens, list(range(begin, end)), [0], [0, len(tokens)], None, rows.tolist(), self._states.asked, of_prompts=True
            )
            output = self._backend.forward(batch, self._cache)
            hidden.append(self._states.of(output.hidden))
            if len(rows):
                for array, found in zip(tops, likeliest_ids(output.logits, self._top), strict=True):
                    array[begin + rows] = found
        return Sample(np.array(text.token_ids, np.int32), answer, np.concatenate(hidden), *(tops if self._top else ()))


def likeliest_ids(logits: F32, num: int) -> tuple[I32, F32, F32]:
    """Of rows [T, V] the ids [T, num] of the largest logits, as `sampling.likeliest` has them, these logits, and log_sum [T].

    Each row is taken while the processor's caches hold it. Raises BackendError for rows that are not finite.
    """
    ids, values = np.empty((len(logits), num), np.int32), np.empty((len(logits), num), np.float32)
    log_sum = np.empty(len(logits), np.float32)
    for i, row in enumerate(logits):
        best = row[argmax(row)]
        ids[i] = likeliest(row, num)
        values[i] = row[ids[i]]
        log_sum[i] = best + np.log(np.exp(row - best).sum())
    return ids, values, log_sum


class SampleWriter:
    """Writes samples into a directory in shards, after those that are there. Until `close` no other run may write there.

    summary: the counts, which whoever writes completes with what it computed. num_passed: samples so far, those that were there
    included. Raises ConfigError for a directory of another model, of other settings, or that another run is writing;
    CheckpointError for a damaged one; OSError.
    """

    def __init__(self, about: Extraction, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / METADATA).exists():
            if any(out.iterdir()):
                raise ConfigError(f"{out} has other files than samples; name a directory of its own")
            about.write(out)
        self._lock = (out / METADATA).open("rb")
        try:
            if not SYSTEM.try_lock(self._lock):
                raise ConfigError(f"{out} is being written by another run; wait for it, or name another directory")
            self._there = there = open_samples(out)
            _check_same(there.about, about, out)
        except BaseException:
            self._lock.close()
            raise
        self.summary = ExtractSummary(str(out), len(there), len(there), there.num_tokens, there.num_answer_tokens)
        self.num_passed = 0
        self._about, self._out, self._number = about, out, there.num_shards
        self._full = max(_SHARD_BYTES // (4 * len(about.layers) * about.hidden_size), 1)  # tokens
        self._held: list[Sample] = []

    @property
    def num_tokens(self) -> int:
        """Of all samples, those that are not on the disk yet included."""
        return self.summary.num_tokens + _num_tokens(self._held)

    def has(self, text: ReadText) -> bool:
        """Pass the next text's sample if it is there. Raises ConfigError where the sample there is of another text."""
        if self.num_passed >= len(self._there):
            return False
        token_ids, answer = self._there.tokens(self.num_passed)
        if text.token_ids != token_ids.tolist() or len(answer) - int(answer.sum()) != text.num_prompt:
            raise self._other_texts(f"sample {self.num_passed} is of another text")
        self.num_passed += 1
        return True

    def check_complete(self) -> None:
        """Raise ConfigError if there are samples that no text has passed."""
        if self.num_passed < len(self._there):
            raise self._other_texts("there are fewer texts now")

    def add(self, sample: Sample) -> None:
        """Append a sample; a full shard is written."""
        self._held.append(sample)
        self.num_passed += 1
        if _num_tokens(self._held) >= self._full:
            self.flush()

    def flush(self) -> None:
        """Write the samples that are held, as a shard that may not be full."""
        if not self._held:
            return
        write_shard(shard_path(self._out, self._number), self._about, self._held)
        self.summary.num_samples += len(self._held)
        self.summary.num_tokens += _num_tokens(self._held)
        self.summary.num_answer_tokens += sum(int(one.answer.sum()) for one in self._held)
        self._number, self._held = self._number + 1, []

    def close(self) -> None:
        """Let others write. What is held and not flushed is lost."""
        self._lock.close()

    def _other_texts(self, what: str) -> ConfigError:
        return ConfigError(f"{self._out} has samples of other texts: {what}; name the same texts, or another directory")


def extract(
    extractor: Extractor,
    about: Extraction,
    texts: Iterator[ReadText],
    out: Path,
    max_tokens: int | None = None,
    on_progress: Callable[[ExtractSummary], None] = lambda summary: None,
) -> ExtractSummary:
    """Write the samples of `texts` into the directory `out`, after those that are there.

    max_tokens: of all samples, after which it ends. Ctrl-C ends it with the shards that are written. Raises what `SampleWriter`
    raises, and ConfigError where the samples there are of other texts.
    """
    begin_s = now_s()
    with closing(SampleWriter(about, out)) as writer:
        summary = writer.summary
        try:
            while max_tokens is None or writer.num_passed < summary.num_kept or writer.num_tokens < max_tokens:
                text = next(texts, None)
                if text is None:
                    writer.check_complete()
                    break
                if not writer.has(text):
                    writer.add(extractor.sample(text))
                    summary.num_new_tokens += len(text.token_ids)
                    summary.duration_s = now_s() - begin_s
                    on_progress(summary)
            writer.flush()
        except KeyboardInterrupt:
            summary.interrupted = True
    summary.duration_s = now_s() - begin_s
    return summary


def _num_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(one.token_ids) for one in samples)


def _check_same(there: Extraction, wanted: Extraction, out: Path) -> None:
    """Raise ConfigError unless a directory's samples are of the same model and settings."""
    mine, theirs = (asdict(one) | {"files": sorted(file["sha256"] for file in one.files)} for one in (wanted, there))
    for name in mine.keys() - {"model"}:
        if mine[name] != theirs[name]:
            raise ConfigError(
                f"{out} has samples with {name} {theirs[name]}, and this run has {mine[name]}; name another directory"
            )

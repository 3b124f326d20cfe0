"""Records of `parity` as portable JSON: written on one machine, checked and read on another.

One object: format, version, model (with the sha256 of its files), run (what ran it), top (ids kept of a row), a list of prompts.
Token ids are lists of numbers; rows are arrays of little-endian numbers, deflated (RFC 1950) and in base64 (RFC 4648):
`top_ids` int32 [rows, top], the likeliest first, `top_logits` float32 [rows, top], `logsumexp` float64 [rows], and `whole_logits`
float32 [len(whole_positions), vocabulary].
"""

import base64
import json
import re
import zlib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.fields import Fields, read_json_object
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.evaluate.parity import GreedyAnswer, LogitRow, ModelIdentity, Question, Recording
from cpuspec.files import write_file
from cpuspec.metrics import LevelCounters

FORMAT, VERSION = "cpuspec parity run", 1
MAX_FILE_BYTES = 128 << 20  # as Python objects JSON takes up to 25 times its bytes
MAX_ROW_BYTES = 1 << 30  # of all rows of a file
MAX_INFLATED = 64  # times the file's bytes: a few deflated bytes may stand for gigabytes, but logits hardly deflate
SMALL_BYTES = 32 << 20  # that any file may ask for
MAX_COUNT = 1 << 53
MAX_TEXT = 200

_TEXTS = ("name", "backend", "kv_format", "dtype", "weights", "activations", "draft", "processor", "device", "date")
_COUNTS = ("threads", "weight_bytes")
_SHA256 = re.compile("[0-9a-f]{64}")
_ROW_OVERHEAD_BYTES = 512  # of a LogitRow with its arrays
_ROWS_AT_ONCE = 4096
_ROUNDING = 1e-3  # that sums of probabilities may be off by


def write_recording(run: Recording, path: Path) -> None:
    """Write a run, completely or not at all. Raises ConfigError if the file cannot be written."""
    top = max((len(row.logits) for rows in run.kept for row in rows), default=0)
    value = {
        "format": FORMAT,
        "version": VERSION,
        "model": asdict(run.model),
        "run": {name: one for name, one in run.about.items() if name != "recorded"},
        "top": top,
        "prompts": [_prompt(run, number) for number in range(len(run.questions))],
    }
    try:
        write_file(path, json.dumps(value) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def read_recording(path: Path) -> Recording:
    """The run that a file holds. Raises ConfigError, with the field, its value and what was wanted, for a damaged file."""
    try:
        record = Fields(str(path), read_json_object(path, MAX_FILE_BYTES))
        if record.text("format", "") != FORMAT:
            record.fail("format", f"{FORMAT!r}, as `cpuspec parity --record` writes it")
        if record.integer("version") != VERSION:
            record.fail("version", f"{VERSION}; record it again with this version of cpuspec")
        return _read(record, path)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def _prompt(run: Recording, number: int) -> dict[str, Any]:
    rows, drafted = run.kept[number], run.drafts[number]
    positions = [position for question, position in run.whole if question == number]
    return {
        "ids": run.questions[number].ids,
        "num_tokens": run.questions[number].num_tokens,
        "answer": _answer(run.answers[number]),
        "drafted": _answer(drafted) if drafted else None,
        "fed": run.texts[number],
        "top_ids": _packed(np.array([row.ids for row in rows]), "<i4"),
        "top_logits": _packed(np.array([row.logits for row in rows]), "<f4"),
        "logsumexp": _packed(np.array([row.logsumexp for row in rows]), "<f8"),
        "whole_positions": positions,
        "whole_logits": _packed(np.array([run.whole[number, position].logits for position in positions]), "<f4"),
    }


def _answer(answer: GreedyAnswer) -> dict[str, Any]:
    levels = None if answer.levels is None else {name: asdict(counts) for name, counts in answer.levels.items()}
    return {"ids": answer.ids, "num_decoded": answer.num_decoded, "decode_s": answer.decode_s, "levels": levels}


def _packed(array: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(zlib.compress(array.astype(dtype).tobytes(), 9)).decode("ascii")


def _read(record: Fields, path: Path) -> Recording:
    model = _read_model(record.object("model"))
    top = record.integer("top")
    if not 1 <= top <= model.vocab_size:
        record.fail("top", f"a number of ids from 1 to {model.vocab_size}")
    prompts = [_object(record, "prompts", number) for number in range(len(record.items("prompts")))]
    if not prompts:
        record.fail("prompts", "at least one")
    fed = [_ids(one, "fed", model.vocab_size) for one in prompts]
    positions = [_positions(one, len(text)) for one, text in zip(prompts, fed, strict=True)]
    row_bytes = 8 * top + 8 + _ROW_OVERHEAD_BYTES
    num_bytes = sum(len(text) * row_bytes + len(some) * 4 * model.vocab_size for text, some in zip(fed, positions, strict=True))
    most = min(MAX_ROW_BYTES, max(SMALL_BYTES, MAX_INFLATED * path.stat().st_size))
    if num_bytes > most:
        raise CheckpointError(f"{path}: its rows would take {num_bytes} bytes, wanted at most {most} for a file of its size")
    questions, answers, drafts, kept, whole = [], [], [], [], {}
    for number, (one, text, some) in enumerate(zip(prompts, fed, positions, strict=True)):
        question = Question(_ids(one, "ids", model.vocab_size), one.integer("num_tokens"))
        if not question.ids or text[: len(question.ids)] != question.ids:
            one.fail("fed", "token ids that begin with those of the prompt, at least one")
        questions.append(question)
        answers.append(_read_answer(one, "answer", question, model.vocab_size))
        drafts.append(_read_answer(one, "drafted", question, model.vocab_size) if "drafted" in one else None)
        rows = _read_rows(one, len(text), top, model.vocab_size)
        logits = _array(one, "whole_logits", (len(some), model.vocab_size), "<f4")
        for position, values in zip(some, logits, strict=True):
            whole[number, position] = LogitRow.whole(values)
            if whole[number, position].best != rows[position].best or not _near(whole[number, position], rows[position]):
                one.fail("whole_logits", "the row that top_logits has the beginning of")
        kept.append(rows)
    about = _read_about(record.object("run")) | {"recorded": path.name}
    return Recording(about, model, tuple(questions), tuple(answers), tuple(drafts), tuple(fed), tuple(kept), whole)


def _read_model(fields: Fields) -> ModelIdentity:
    vocab_size = fields.integer("vocab_size")
    if not 1 <= vocab_size <= 1 << 24:
        fields.fail("vocab_size", f"a number from 1 to {1 << 24}")
    files = []
    for number in range(len(fields.items("files"))):
        file = _object(fields, "files", number)
        if not _SHA256.fullmatch(file.text("sha256", "")):
            file.fail("sha256", "64 lower-case hexadecimal digits")
        files.append({"name": _text(file, "name"), "bytes": _count(file, "bytes"), "sha256": file.text("sha256", "")})
    if not files:
        fields.fail("files", "the name, bytes and sha256 of at least one file")
    return ModelIdentity(_text(fields, "name"), _text(fields, "architecture"), vocab_size, tuple(files))


def _read_about(fields: Fields) -> dict[str, Any]:
    """The facts about the run: figures for reports, and texts that a terminal may show."""
    about: dict[str, Any] = {"row_invariant": fields.boolean("row_invariant", False)}
    about |= {name: _text(fields, name) for name in _TEXTS if name in fields or name == "name"}
    about |= {name: _count(fields, name) for name in _COUNTS if name in fields}
    versions = fields.object("versions")
    return about | {"versions": {_shown(versions, name, name): _text(versions, name) for name in versions.names()}}


def _read_answer(record: Fields, key: str, question: Question, vocab_size: int) -> GreedyAnswer:
    if key not in record:
        record.fail(key, "an answer")
    fields = record.object(key)
    ids = _ids(fields, "ids", vocab_size)
    if len(ids) != question.num_tokens:
        fields.fail("ids", f"{question.num_tokens} token ids, as num_tokens says")
    num_decoded, decode_s = fields.integer("num_decoded"), fields.number("decode_s")
    if not 0 <= num_decoded <= len(ids):
        fields.fail("num_decoded", f"a number from 0 to {len(ids)}")
    if decode_s < 0:
        fields.fail("decode_s", "seconds")
    levels = None
    if "levels" in fields:
        found = fields.object("levels")
        levels = {_shown(found, name, name): _read_counters(found.object(name)) for name in found.names()}
    return GreedyAnswer(ids, num_decoded, decode_s, levels)


def _read_counters(counters: Fields) -> LevelCounters:
    numbers = {one.name: _count(counters, one.name) for one in fields(LevelCounters) if one.name != "num_accepted_tokens_per_pos"}
    return LevelCounters(**numbers, num_accepted_tokens_per_pos=_numbers(counters, "num_accepted_tokens_per_pos", 1 << 40))


def _read_rows(record: Fields, num_rows: int, top: int, vocab_size: int) -> tuple[LogitRow, ...]:
    all_ids = _array(record, "top_ids", (num_rows, top), "<i4").astype(np.int32, copy=False)
    all_logits = _array(record, "top_logits", (num_rows, top), "<f4").astype(np.float32, copy=False)
    all_sums = _array(record, "logsumexp", (num_rows,), "<f8").astype(np.float64, copy=False)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        ids, logits, sums = (array[start : start + _ROWS_AT_ONCE] for array in (all_ids, all_logits, all_sums))
        if ids.min() < 0 or ids.max() >= vocab_size or (np.diff(np.sort(ids, axis=1), axis=1) == 0).any():
            record.fail("top_ids", f"ids from 0 to {vocab_size - 1}, each once in a row")
        if not np.isfinite(logits).all() or (np.diff(logits, axis=1) > 0).any():
            record.fail("top_logits", "finite numbers, the largest of a row first")
        with np.errstate(over="ignore"):  # the sum of a wrong row may be anything
            known = np.exp(logits.astype(np.float64) - sums[:, None]).sum(axis=1)
        if not (known <= 1 + _ROUNDING).all():
            record.fail("logsumexp", "of every logit of a row, those in top_logits among them")
    return tuple(LogitRow(*row) for row in zip(all_logits, all_ids, all_sums.tolist(), strict=True))


def _near(whole: LogitRow, short: LogitRow) -> bool:
    assert short.ids is not None, "a record's rows name their ids"
    return bool((whole.logits[short.ids] == short.logits).all()) and abs(whole.logsumexp - short.logsumexp) < _ROUNDING


def _positions(record: Fields, num_rows: int) -> list[int]:
    positions = _numbers(record, "whole_positions", num_rows - 1)
    if len(set(positions)) != len(positions):
        record.fail("whole_positions", "different positions")
    return positions


def _count(fields: Fields, key: str) -> int:
    """A count that a float holds exactly."""
    number = fields.integer(key)
    if not 0 <= number <= MAX_COUNT:
        fields.fail(key, f"a count up to {MAX_COUNT}")
    return number


def _ids(fields: Fields, key: str, vocab_size: int) -> list[int]:
    return _numbers(fields, key, vocab_size - 1)


def _numbers(fields: Fields, key: str, most: int) -> list[int]:
    numbers: list[Any] = fields.items(key)
    if not all(type(one) is int and 0 <= one <= most for one in numbers):
        fields.fail(key, f"whole numbers from 0 to {most}")
    return numbers


def _object(fields: Fields, key: str, number: int) -> Fields:
    value = fields.items(key)[number]
    if not isinstance(value, dict):
        fields.fail(key, "objects")
    return Fields(f"{fields.what}: {key} {number + 1}", value)


def _text(fields: Fields, key: str) -> str:
    return _shown(fields, key, fields.text(key, ""))


def _shown(fields: Fields, key: str, text: str) -> str:
    """A text that is safe to show on a terminal."""
    if not text or len(text) > MAX_TEXT or not text.isprintable():
        fields.fail(key, f"1 to {MAX_TEXT} printable characters")
    return text


def _array(fields: Fields, key: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    wanted = int(np.prod(shape)) * np.dtype(dtype).itemsize
    try:
        packed = base64.b64decode(fields.text(key, ""), validate=True)
        stream = zlib.decompressobj()
        data = stream.decompress(packed, wanted + 1)  # never more than is wanted, whatever the stream would become
    except (ValueError, zlib.error):
        fields.fail(key, "a deflated array in base64; the file is damaged")
    if len(data) != wanted or not stream.eof:
        fields.fail(key, f"an array of shape {list(shape)}, {wanted} bytes; the file is damaged")
    return np.frombuffer(data, dtype).reshape(shape)

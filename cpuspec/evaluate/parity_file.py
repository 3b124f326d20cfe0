"""Records of `parity`: written on one machine, checked and read on another. One safetensors file.

`record`: U8, a JSON object of `_Head`: the model with the sha256 of its files, what ran it, and the prompts with their answers. The
other tensors have a row for each token that was fed, prompt after prompt: `top_ids` I32 [rows, top], the likeliest first,
`top_logits` F32 [rows, top], `logsumexp` F64 [rows]. `whole_rows` I64 [w] are numbers of rows, `whole_logits` F32 [w, V] theirs.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from cpuspec.checkpoints.fields import parse_json_object
from cpuspec.checkpoints.safetensors import StoredTensor, read_safetensors, write_arrays
from cpuspec.errors import CheckpointError, ConfigError, in_one_line
from cpuspec.evaluate.parity import ModelIdentity, RecordedPrompt, Recording

MAX_COUNT, MAX_TEXT = 1 << 53, 200  # of any number, and characters of any text
_ROUNDING = 1e-3  # that sums of probabilities may be off by
_DTYPES = {"record": "U8", "top_ids": "I32", "top_logits": "F32", "logsumexp": "F64", "whole_rows": "I64", "whole_logits": "F32"}


@dataclass(frozen=True)
class _Head:
    format: Literal["cpuspec parity run"]
    version: Literal[2]
    model: ModelIdentity
    about: dict[str, Any]
    prompts: tuple[RecordedPrompt, ...]


def write_recording(run: Recording, path: Path) -> None:
    """Write a run, completely or not at all. Raises ConfigError if the file cannot be written."""
    about = {name: one for name, one in run.about.items() if name != "recorded"}
    head = asdict(_Head("cpuspec parity run", 2, run.model, about, run.prompts))
    arrays = {name: getattr(run, name) for name in _DTYPES if name != "record"}
    arrays["record"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    try:
        write_arrays(path, {name: (dtype, arrays[name]) for name, dtype in _DTYPES.items()})
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def is_recording(path: Path) -> bool:
    """Whether a file begins as a safetensors file does, and not as a text."""
    with path.open("rb") as file:
        return len(begin := file.read(8)) == 8 and int.from_bytes(begin, "little") < 1 << 40


def read_recording(path: Path) -> Recording:
    """The run that a file holds. Raises ConfigError, with what is wrong, for a damaged file."""
    try:
        stored = read_safetensors(path, mmap=False)
        if "record" not in stored:
            raise CheckpointError(f"{path} has no tensor `record`; wanted a file that `cpuspec parity --record` wrote")
        head = _read_head(stored["record"].array("U8", 1).tobytes(), path)
        return _read_rows(path, head, stored)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def _read_head(text: bytes, path: Path) -> _Head:
    """Raises CheckpointError."""
    for place, leaf in _leaves(parse_json_object(text, str(path))):
        if isinstance(leaf, str) and not (len(leaf) <= MAX_TEXT and leaf.isprintable()):
            raise CheckpointError(f"{path}: {place} is {in_one_line(repr(leaf))}, wanted {MAX_TEXT} printable characters at most")
        if isinstance(leaf, int | float) and not 0 <= leaf <= MAX_COUNT:
            raise CheckpointError(f"{path}: {place} is {in_one_line(str(leaf))}, wanted a number from 0 to {MAX_COUNT}")
    try:
        return TypeAdapter(_Head).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path}: {place} is {in_one_line(repr(first['input']))[:200]}: {first['msg']}") from None


def _leaves(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    """The numbers and texts of a JSON value, keys included, each with its place."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield f"a key of {place or 'it'}", key
            yield from _leaves(one, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _leaves(one, f"{place}.{number}")
    else:
        yield place, value


def _read_rows(path: Path, head: _Head, stored: dict[str, StoredTensor]) -> Recording:
    """Raises CheckpointError unless the arrays are those of the prompts, and agree with one another."""

    def check(holds: bool, what: str, wanted: str) -> None:
        if not holds:
            raise CheckpointError(f"{path}: {what} is wrong, wanted {wanted}; the file is damaged")

    vocab_size, prompts, about = head.model.vocab_size, head.prompts, head.about
    check(1 <= vocab_size <= 1 << 24, "vocab_size", f"a number from 1 to {1 << 24}")
    check(bool(head.model.files) and all("sha256" in one for one in head.model.files), "files", "the sha256 of at least one file")
    check(isinstance(about.get("name"), str) and isinstance(about.get("threads", 0), int), "about", "a name, and threads")
    check(bool(prompts), "prompts", "at least one")
    for number, one in enumerate(prompts):
        asked, texts = one.question, [one.question.ids, one.fed]
        for answer in (one.answer, *([one.drafted] if one.drafted else [])):
            texts.append(answer.ids)
            check(len(answer.ids) == asked.num_tokens, f"an answer of prompt {number}", f"{asked.num_tokens} token ids")
            check(answer.num_decoded <= len(answer.ids), f"num_decoded of prompt {number}", f"at most {len(answer.ids)}")
        check(max(map(max, filter(None, texts)), default=0) < vocab_size, f"an id of prompt {number}", f"ids below {vocab_size}")
        begins = bool(asked.ids) and one.fed[: len(asked.ids)] == asked.ids
        check(begins, f"fed of prompt {number}", "token ids that begin with those of the prompt, at least one")
    num_rows = sum(len(one.fed) for one in prompts)
    top, num_whole = (stored[name].shape[-1] if name in stored and stored[name].shape else 0 for name in ("top_ids", "whole_rows"))
    check(1 <= top <= vocab_size, "top_ids", f"from 1 to {vocab_size} ids of a row")
    shapes = {"top_ids": (num_rows, top), "top_logits": (num_rows, top), "logsumexp": (num_rows,), "whole_rows": (num_whole,)}
    arrays: dict[str, NDArray[Any]] = {}
    for name, shape in {**shapes, "whole_logits": (num_whole, vocab_size)}.items():
        dtype = _DTYPES[name]
        fits = name in stored and (stored[name].dtype, stored[name].shape) == (dtype, shape)
        check(fits, name, f"{dtype} {list(shape)}")
        arrays[name] = stored[name].data.view(f"<{dtype[0].lower()}{int(dtype[1:]) // 8}").reshape(shape)
    run = Recording({"row_invariant": False} | about | {"recorded": path.name}, head.model, prompts, **arrays)
    ids, logits, sums, whole = run.top_ids, run.top_logits, run.logsumexp, run.whole_rows
    once = ids.min() >= 0 and ids.max() < vocab_size and (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()
    check(bool(once), "top_ids", f"ids from 0 to {vocab_size - 1}, each once in a row")
    check(bool(np.isfinite(logits).all() and (np.diff(logits, axis=1) <= 0).all()), "top_logits", "the largest of a row first")
    with np.errstate(over="ignore", invalid="ignore"):  # the sum of a wrong row may be anything
        known = np.exp(logits.astype(np.float64) - sums[:, None]).sum(axis=1)
    check(bool((known <= 1 + _ROUNDING).all()), "logsumexp", "that of every logit of a row, those in top_logits among them")
    rising = not num_whole or (whole[0] >= 0 and whole[-1] < num_rows and (np.diff(whole) > 0).all())
    check(bool(rising), "whole_rows", f"rising numbers below {num_rows}")
    for at, row in zip(whole.tolist(), map(run.row, whole.tolist()), strict=True):
        same = row.best == ids[at, 0] and (row.logits[ids[at]] == logits[at]).all() and abs(row.logsumexp - sums[at]) < _ROUNDING
        check(bool(same), "whole_logits", "the rows that top_logits has the beginnings of")
    return run

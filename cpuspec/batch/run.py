"""Reads a file of requests and writes a file of answers. A run that was interrupted is resumed from its file of answers.

The function that answers the lines is a parameter: `answer.answer_lines` in one process, or a cluster's.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cpuspec.batch.lines import ANSWER_BEGINS, MAX_LINE_BYTES, Line, read_lines
from cpuspec.errors import ConfigError
from cpuspec.metrics import now_s
from cpuspec.platform import SYSTEM

AnswerLines = Callable[[Iterator[Line]], Generator[dict[str, Any]]]  # the answers in the order of the lines
_MAX_ANSWER_BYTES = 8 * MAX_LINE_BYTES


@dataclass
class BatchSummary:
    """The counts of a run. num_kept: lines that an earlier run answered. The other counts are of this run only."""

    num_kept: int = 0
    num_answered: int = 0
    num_errors: int = 0  # of these
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_new_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    duration_s: float = 0.0
    interrupted: bool = False

    def count(self, answer: dict[str, Any]) -> None:
        """Count an answer."""
        self.num_answered += 1
        response = answer["response"]
        if response is None or response["status_code"] != 200:
            self.num_errors += 1
            return
        usage = response["body"]["usage"]
        fate = usage["completion_tokens_details"]
        self.num_prompt_tokens += usage["prompt_tokens"]
        self.num_cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self.num_new_tokens += usage["completion_tokens"]
        self.num_draft_tokens += fate["accepted_prediction_tokens"] + fate["rejected_prediction_tokens"]
        self.num_accepted_tokens += fate["accepted_prediction_tokens"]

    def as_dict(self) -> dict[str, Any]:
        """Every count under its name, and the answers' tokens per second."""
        return asdict(self) | {"tokens_per_s": self.num_new_tokens / self.duration_s if self.duration_s else 0.0}


def run_batch(source: Path, out: Path, answer: AnswerLines, on_progress: Callable[[int, int], None]) -> BatchSummary:
    """Answer every line of `source` that has no answer in `out` yet, and append the answers in order, each as soon as it is due.

    on_progress gets bytes of `source`: done, and in all. Ctrl-C ends it with what is written. Raises ConfigError for an `out` that
    is no output of this source or is being written by another run, OSError, and what `answer` raises; another run can then go on.
    """
    summary, begin_s = BatchSummary(), now_s()
    lines, num_bytes = read_lines(source), source.stat().st_size
    with open(out, "ab+") as file:
        if os.path.samestat(os.fstat(file.fileno()), source.stat()):
            raise ConfigError(f"{out} is the file of requests itself; name another for the answers")
        if not SYSTEM.try_lock(file):
            raise ConfigError(f"{out} is being written by another run; wait for it, or name another file")
        summary.num_kept = _keep_answers(file, lines, out)
        ends: deque[int] = deque()  # of the lines that are being answered

        def noted() -> Iterator[Line]:
            for line in lines:
                ends.append(line.end)
                yield line

        try:
            with closing(answer(noted())) as answers:
                for one in answers:
                    file.write(json.dumps(one).encode() + b"\n")
                    file.flush()
                    summary.count(one)
                    on_progress(ends.popleft(), num_bytes)
            os.fsync(file.fileno())
        except KeyboardInterrupt:
            summary.interrupted = True
    summary.duration_s = now_s() - begin_s
    return summary


def _keep_answers(file: BinaryIO, lines: Iterator[Line], name: Path) -> int:
    """Skip the lines that have answers, cut an unfinished answer off the end of the file, and return the number of answers kept."""
    num_kept = end = 0
    file.seek(0)
    while (answer := file.readline(_MAX_ANSWER_BYTES)).endswith(b"\n"):
        line = next(lines, None)
        if line is None or _id_of(answer) != line.custom_id:
            which = f"answers {line.custom_id!r} in its line {num_kept + 1}" if line else f"has no more than {num_kept} lines"
            raise ConfigError(f"{name} is the output of another batch: this one {which}; name another file, or remove that one")
        num_kept, end = num_kept + 1, file.tell()
    if len(answer) == _MAX_ANSWER_BYTES or not answer.startswith(ANSWER_BEGINS[: len(answer)]):
        raise ConfigError(f"{name} exists and is not an output of a batch; name another file, or remove that one")
    file.truncate(end)
    return num_kept


def _id_of(answer: bytes) -> str | None:
    try:
        found = json.loads(answer)
        return str(found["custom_id"]) if answer.startswith(ANSWER_BEGINS) else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None

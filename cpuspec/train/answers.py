"""Training data by the target itself: its answers to prompts, many at once, in a file that an interrupted run continues.

Prompts come in one order, and what is kept is decided in that order. Each answer has a seed of its own, made of its prompt's id
and its temperature. So a resumed run writes the bytes that one run would have written, if the backend is row-invariant.
"""

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from cpuspec.batch.lines import MAX_LINE_BYTES, read_lines
from cpuspec.checkpoints.fields import Fields, read_json_object
from cpuspec.engine.engine import Output, RequestedAnswer
from cpuspec.engine.llm import LLM
from cpuspec.errors import CheckpointError, ConfigError, CpuspecError
from cpuspec.evaluate.prompts import parse_line, prompt_ids
from cpuspec.files import read_file, write_file
from cpuspec.metrics import now_s
from cpuspec.model.batch import F32, I32
from cpuspec.platform import SYSTEM
from cpuspec.sampling import TokenLogprobs
from cpuspec.settings import SamplingParams
from cpuspec.text import Tokenizer
from cpuspec.train.overlap import Exclusion, Known, words_of
from cpuspec.train.prompts import Prompt, checked_ids, function_prompts, in_turn, read_line_prompts, self_made, users_turn

_FORMAT, _VERSION = "cpuspec-answers", 1
_MAX_HEADER_BYTES = _MAX_PROMPTS_BYTES = 1 << 30
_TURN = {"temperature": 1.0, "top_p": 0.99}  # of prompts that the target makes up
_MOST_OF_A_TURN = 192  # tokens
_FEWEST_WORDS_OF_A_TURN = 3
_PROMPTS_AHEAD = 4  # for each sequence that runs: prompts that may wait for one before them


@dataclass(frozen=True)
class AnswerPlan:
    """The prompts of a run, and the settings of its answers.

    prompts: JSON-lines files. functions: installed packages. num_self_made: prompts that the target makes up. temperatures: of the
    answers to each prompt, 0 is greedy. max_answer_tokens: of one answer. max_prompt_tokens: longer prompts are left out.
    exclude: evaluation sets. part: (I, N) answers one of N shares of the prompts, from 1; a prompt's id says in which it is.
    """

    prompts: tuple[Path, ...] = ()
    functions: tuple[str, ...] = ()
    num_self_made: int = 0
    temperatures: tuple[float, ...] = (0.0, 0.7)
    max_answer_tokens: int = 256
    max_prompt_tokens: int = 512
    seed: int = 0
    exclude: tuple[Path, ...] = ()
    part: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if not self.prompts and not self.functions and not self.num_self_made:
            raise ConfigError("there is nothing to answer; give files of prompts, --functions or --self-made")
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures) or min(self.temperatures) < 0:
            raise ConfigError(f"temperatures must be different numbers from 0 on, at least one; got {list(self.temperatures)}")
        if min(self.max_answer_tokens, self.max_prompt_tokens) < 1:
            raise ConfigError("prompts and answers must be allowed at least one token each")
        if not 1 <= self.part[0] <= self.part[1]:
            raise ConfigError(f"there is no part {self.part[0]} of {self.part[1]}; wanted I/N with I from 1 to N")

    @property
    def context_length(self) -> int:
        """Tokens that a sequence may have: a prompt with its answer, or a turn that the target makes up."""
        return self.max_prompt_tokens + max(self.max_answer_tokens, _MOST_OF_A_TURN if self.num_self_made else 0)

    def has(self, prompt: Prompt) -> bool:
        """Whether the part that this run answers has a prompt."""
        number, count = self.part
        return int.from_bytes(hashlib.sha256(prompt.id.encode()).digest()[:8]) % count == number - 1


Likeliest = tuple[I32, F32]  # of one place [top]: token ids, and their log-probabilities


def _likeliest(one: TokenLogprobs) -> Likeliest:
    """As arrays, because millions of objects would be held."""
    ids, values = zip(*one.top, strict=True) if one.top else ((), ())
    return np.array(ids, np.int32), np.array(values, np.float32)


class StateWriter(Protocol):
    """Writes the hidden states of answers. top: likeliest tokens of each place that it wants, 0 for none."""

    top: int

    def catch_up(self, llm: LLM, answers: Path) -> None:
        """Write those of all answers in a file that it has none of."""
        ...

    def add(self, request: int, prompt_ids: list[int], answer_ids: list[int], likeliest: list[Likeliest]) -> None:
        """Write those of the next answer in the file. likeliest: in the place of each of its tokens; none where `top` is 0."""
        ...

    def forget(self, request: int) -> None:
        """Drop those of a request, if there are any."""
        ...


@dataclass(frozen=True)
class Refused:
    """A prompt with words of an evaluation set. where: "prompt", or "answer" of that temperature."""

    id: str
    where: str
    file: str
    words: str


@dataclass
class AnswersSummary:
    """The counts of a run. num_kept: answers of earlier runs. Counts are of this run only; refused are of all runs of the file.

    num_new_tokens: all that were generated, those of answers that are not done included; num_answer_tokens: those of answers in the
    file, earlier runs' included.
    """

    num_kept: int = 0
    num_prompts: int = 0
    num_answers: int = 0
    num_answer_tokens: int = 0
    num_new_tokens: int = 0
    num_duplicate_prompts: int = 0
    num_duplicate_answers: int = 0
    num_long_prompts: int = 0
    num_useless_turns: int = 0
    refused: list[Refused] = field(default_factory=list)
    excluded: list[dict[str, Any]] = field(default_factory=list)
    duration_s: float = 0.0
    interrupted: bool = False

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens."""
        return self.num_new_tokens / self.duration_s if self.duration_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything under its name."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s}


def tokenizer_identity(tokenizer: Tokenizer) -> str:
    """The sha256 of what each id of a vocabulary means: models with the same one understand the same ids."""
    digest = hashlib.sha256()
    for token_id in range(tokenizer.vocab_size):
        digest.update(repr(tokenizer.meaning(token_id)).encode() + b"\n")
    return digest.hexdigest()


def header_path(out: Path) -> Path:
    """Where the facts about a file of answers are."""
    return out.with_name(f"{out.name}.json")


def make_answers(
    llm: LLM,
    files: list[dict[str, Any]],
    plan: AnswerPlan,
    out: Path,
    max_tokens: int | None = None,
    on_progress: Callable[[AnswersSummary], None] = lambda summary: None,
    max_seconds: float = math.inf,
    states: StateWriter | None = None,
) -> AnswersSummary:
    """Append the answers to the plan's prompts to `out`, from where an earlier run ended, and the facts to `header_path(out)`.

    files: name, bytes and sha256 of the model's files. max_tokens: of all answers, after which it ends; max_seconds: of this run.
    states: writes hidden states, too (`states.AnswerStates`); `llm` then drafts with its recorder.
    Ctrl-C ends it with what is written. Raises ConfigError for prompts that cannot be read, and for an `out` of another model or
    plan, or that another run is writing; and OSError.
    """
    exclusion = Exclusion(plan.exclude)
    sources: list[Callable[[], Iterator[Prompt]]] = [partial(read_line_prompts, path, llm.tokenizer) for path in plan.prompts]
    if plan.functions:
        sources.append(partial(function_prompts, plan.functions, llm.tokenizer))
    if plan.num_self_made:
        sources.append(partial(self_made, plan.num_self_made))
    with open(out, "ab+") as file:
        if not SYSTEM.try_lock(file):
            raise ConfigError(f"{out} is being written by another run; wait for it, or name another file")
        header = _Header(out, _facts(llm, files, plan, exclusion), is_new=file.tell() == 0)
        run = _Run(llm, plan, exclusion, header, states)
        begin_s = now_s()
        try:
            prompts = in_turn(sources)
            is_full = run.resume(file, prompts, out, max_tokens)
            if states:
                states.catch_up(llm, out)
            for answers in () if is_full else run.answers(prompts):
                run.count(lines := [line for line, _ in answers])
                file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
                file.flush()
                for line, text in answers if states else ():
                    states.add(text.request, line["prompt_ids"], text.ids, text.likeliest)  # type: ignore[union-attr]
                run.summary.duration_s = now_s() - begin_s
                on_progress(run.summary)
                is_full = max_tokens is not None and run.summary.num_answer_tokens >= max_tokens
                if is_full or run.summary.duration_s >= max_seconds:
                    break
        except KeyboardInterrupt:
            run.summary.interrupted = True
        finally:
            run.close()
        os.fsync(file.fileno())
        header.write()
    run.summary.duration_s = now_s() - begin_s
    return run.summary


def _facts(llm: LLM, files: list[dict[str, Any]], plan: AnswerPlan, exclusion: Exclusion) -> dict[str, Any]:
    """The facts that must be the same in each run of a file."""
    digests = [hashlib.sha256(read_file(path, _MAX_PROMPTS_BYTES, ConfigError)).hexdigest() for path in plan.prompts]
    return {
        "model": llm.name,
        "files": files,
        "tokenizer_sha256": tokenizer_identity(llm.tokenizer),
        "prompts": [{"name": path.name, "sha256": digest} for path, digest in zip(plan.prompts, digests, strict=True)],
        "functions": list(plan.functions),
        "self_made": plan.num_self_made,
        "temperatures": list(plan.temperatures),
        "max_answer_tokens": plan.max_answer_tokens,
        "max_prompt_tokens": plan.max_prompt_tokens,
        "seed": plan.seed,
        "excluded": [asdict(one) for one in exclusion.files],
        "part": list(plan.part),
    }


class _Header:
    """The facts about a file of answers, and the prompts that were refused, by id and place."""

    def __init__(self, out: Path, facts: Mapping[str, Any], is_new: bool) -> None:
        """Raises ConfigError where the facts of a file that has answers are others."""
        self._path, self._facts = header_path(out), facts
        self.refused: dict[tuple[str, str], Refused] = {}
        if is_new:
            self.write()
            return
        try:
            fields = read_header(out)
        except CheckpointError as error:
            raise ConfigError(f"{out} has no facts beside it, so nothing can be added to it: {error}") from None
        for name, wanted in facts.items():
            if name != "model" and (got := fields.value(name)) != wanted and (name, got) != ("part", None):
                shown = tuple(str(one)[:120] for one in (got, wanted))
                raise ConfigError(f"{out} was made with {name} {shown[0]}, and this run has {shown[1]}; name another file")
        for one in fields.items("refused"):
            if (
                isinstance(one, dict)
                and one.keys() == Refused.__dataclass_fields__.keys()
                and {str} == set(map(type, one.values()))
            ):
                self.refused[one["id"], one["where"]] = Refused(**one)
        self._num_written = len(self.refused)

    def refuse(self, one: Refused) -> None:
        """Note a refusal, on the disk, too: of many, whenever an eighth more are known, because the file is written whole."""
        self.refused.setdefault((one.id, one.where), one)
        if 8 * (len(self.refused) - self._num_written) > self._num_written:
            self.write()

    def write(self) -> None:
        """Put everything on the disk."""
        self._num_written = len(self.refused)
        refused = [asdict(one) for one in self.refused.values()]
        head = {"format": _FORMAT, "version": _VERSION}
        write_file(self._path, json.dumps(head | dict(self._facts) | {"refused": refused}, indent=1) + "\n")


def read_header(out: Path) -> Fields:
    """The facts about a file of answers. Raises CheckpointError where there are none."""
    path = header_path(out)
    fields = Fields(str(path), read_json_object(path, _MAX_HEADER_BYTES))
    if fields.value("format") != _FORMAT or fields.value("version") != _VERSION:
        fields.fail("format", f"{_FORMAT}, version {_VERSION}")
    return fields


@dataclass(eq=False)
class _Text:
    """The tokens that a request has generated. reason: why it ended; "" while it runs."""

    summary: AnswersSummary  # which counts them
    request: int = -1
    ids: list[int] = field(default_factory=list)
    likeliest: list[Likeliest] = field(default_factory=list)  # where states are kept
    reason: str = ""

    def receive(self, output: Output) -> None:
        self.ids += output.token_ids
        self.likeliest += map(_likeliest, output.logprobs)
        self.summary.num_new_tokens += len(output.token_ids)
        self.reason = output.finish_reason or ""


@dataclass(eq=False)
class _Job:
    """A prompt on its way. turn: what the target makes up for it, None where it is known. answers: one for each temperature."""

    prompt: Prompt
    turn: _Text | None = None
    answers: list[_Text] = field(default_factory=list)
    is_settled: bool = False  # whether its answers, if any, are asked for

    @property
    def texts(self) -> list[_Text]:
        return [*([self.turn] if self.turn else []), *self.answers]

    @property
    def done(self) -> bool:
        return self.is_settled and all(one.reason for one in self.answers)

    @property
    def num_running(self) -> int:
        return sum(not one.reason for one in self.texts)


class _Run:
    def __init__(
        self, llm: LLM, plan: AnswerPlan, exclusion: Exclusion, header: _Header, states: StateWriter | None = None
    ) -> None:
        self._states = states
        self.summary = AnswersSummary(excluded=[asdict(one) for one in exclusion.files])
        self._llm, self._plan, self._exclusion, self._header = llm, plan, exclusion, header
        self._users_turn = users_turn(llm.tokenizer) if plan.num_self_made else []
        self._jobs: deque[_Job] = deque()
        # Known prompts are compared as they come, turns and answers as they are written: each in an order that is always the same.
        self._known_prompts, self._known_turns, self._known_answers = Known(), Known(), Known()

    def resume(self, file: BinaryIO, prompts: Iterator[Prompt], out: Path, max_tokens: int | None) -> bool:
        """Go past the prompts that have answers, and cut those of the last one off: it is answered again.

        Returns whether the other answers have `max_tokens` tokens already; then nothing is cut.
        """
        held: list[tuple[str, dict[str, Any]]] = []  # lines of the last prompt, with its id
        file.seek(0)
        begin = end = 0
        while (content := file.readline(MAX_LINE_BYTES + 1)).endswith(b"\n"):
            line = parse_line(content, where := f"{out} at byte {end}")
            check_answer(line, self._llm.tokenizer, where)
            prompt_id = str(line["id"]).rpartition("@")[0]
            if held and held[0][0] != prompt_id:
                self._keep([one for _, one in held])
                held, begin = [], end
            held.append((prompt_id, line))
            end += len(content)
        if len(content) > MAX_LINE_BYTES:
            raise ConfigError(f"{out} at byte {end} has a line of more than {MAX_LINE_BYTES} bytes, and is not a file of answers")
        if max_tokens is not None and self.summary.num_answer_tokens >= max_tokens:
            self._keep([one for _, one in held])
            file.truncate(end)
            return True
        if not held:
            file.truncate(0)
            return False
        for prompt in prompts:
            if prompt.id == held[0][0]:
                file.truncate(begin)
                self._begin(prompt)
                return False
            if prompt.ids is not None:
                self._admits(prompt, counts=False)
        raise ConfigError(
            f"{out} answers {held[0][0]!r} last, which is none of the prompts; name the same sources, or another file"
        )

    def answers(self, prompts: Iterator[Prompt]) -> Iterator[list[tuple[dict[str, Any], _Text]]]:
        """Yield the lines of each prompt, in order, with their texts; none for one that is left out, and after each step."""
        more = True
        while self._jobs or more:
            while more and self._has_room():
                prompt = next(prompts, None)
                more = prompt is not None
                if prompt is not None:
                    self._begin(prompt)
            for job in self._jobs:
                if not job.is_settled and job.turn and job.turn.reason:
                    self._ask_turn(job)
            while self._jobs and self._jobs[0].done:
                yield self._lines(job := self._jobs.popleft())
                self._drop(job)
            if any(job.num_running for job in self._jobs):
                self._llm.step()
                yield []

    def count(self, lines: list[dict[str, Any]]) -> None:
        """Count the answers of one prompt that go to the file."""
        self.summary.num_prompts += bool(lines)
        self.summary.num_answers += len(lines)
        self.summary.num_answer_tokens += sum(len(line["answer_ids"]) for line in lines)
        self.summary.refused = list(self._header.refused.values())

    def close(self) -> None:
        """Drop what still runs."""
        self.summary.refused = list(self._header.refused.values())
        for job in self._jobs:
            self._drop(job)

    def _keep(self, lines: list[dict[str, Any]]) -> None:
        """Know the answers of an earlier run."""
        self.summary.num_kept += len(lines)
        self.summary.num_answer_tokens += sum(len(line["answer_ids"]) for line in lines)
        if lines[0]["source"] == "self-made":
            self._known_turns.add(self._turn_text(lines[0]["prompt_ids"]))
        for line in lines:
            self._known_answers.add(self._llm.tokenizer.decode(line["answer_ids"]))

    def _has_room(self) -> bool:
        running = sum(job.num_running for job in self._jobs)
        return running < 2 * self._llm.max_sequences and len(self._jobs) < _PROMPTS_AHEAD * self._llm.max_sequences

    def _begin(self, prompt: Prompt) -> None:
        """Ask for a prompt's answers. Those of other parts are only known from then on."""
        if not self._plan.has(prompt):
            if prompt.ids is not None:
                self._admits(prompt, counts=False)
            return
        job = _Job(prompt)
        self._jobs.append(job)
        if prompt.ids is None:
            job.turn = self._submit(self._users_turn, prompt.id, _MOST_OF_A_TURN, **_TURN)
        else:
            job.is_settled = True
            if self._admits(prompt):
                self._ask(job, list(prompt.ids))

    def _admits(self, prompt: Prompt, counts: bool = True) -> bool:
        """Whether a known prompt is answered: it is neither long, nor of an evaluation set, nor much like one before."""
        assert prompt.ids is not None, "a prompt that is to be made up is looked at when it is there"
        if len(prompt.ids) > self._plan.max_prompt_tokens:
            self.summary.num_long_prompts += counts
        elif not self._refused(prompt.id, "prompt", prompt.text):
            if self._known_prompts.is_new(prompt.said):
                self._known_prompts.add(prompt.said)
                return True
            self.summary.num_duplicate_prompts += counts
        return False

    def _refused(self, prompt_id: str, where: str, text: str) -> bool:
        shared = self._exclusion.find(text)
        if shared:
            self._header.refuse(Refused(prompt_id, where, shared.file, shared.words))
        return shared is not None

    def _ask_turn(self, job: _Job) -> None:
        """Have a prompt that the target made up answered, if it is one."""
        assert job.turn is not None, "the target has made it up"
        job.is_settled = True
        text = self._llm.tokenizer.decode(job.turn.ids).strip()
        try:
            ids = prompt_ids(self._llm.tokenizer, [{"role": "user", "content": text}])
        except CpuspecError:  # of a text that the chat template cannot hold
            ids = []
        if job.turn.reason != "stop" or len(words_of(text)) < _FEWEST_WORDS_OF_A_TURN or not ids:
            self.summary.num_useless_turns += 1
        elif len(ids) > self._plan.max_prompt_tokens:
            self.summary.num_long_prompts += 1
        elif not self._refused(job.prompt.id, "prompt", text):
            self._ask(job, ids)

    def _ask(self, job: _Job, ids: list[int]) -> None:
        job.prompt = replace(job.prompt, ids=tuple(ids))
        most = self._plan.max_answer_tokens
        job.answers = [self._submit(ids, job.prompt.id, most, temperature=one) for one in self._plan.temperatures]

    def _submit(self, ids: list[int], prompt_id: str, max_tokens: int, **sampling: float) -> _Text:
        digest = hashlib.sha256(f"{self._plan.seed}/{prompt_id}/{sampling['temperature']:g}".encode()).digest()
        params = SamplingParams(max_tokens=max_tokens, seed=int.from_bytes(digest[:4], "little") >> 1, **sampling)  # type: ignore[arg-type]
        if self._states:  # of all its tokens, so it shares no prefix
            params = replace(params, logprobs=self._states.top or None, cache_salt=digest.hex())
        self._llm.check(ids, params)
        text = _Text(self.summary)
        text.request = self._llm.submit(RequestedAnswer(ids, params), text.receive)
        return text

    def _drop(self, job: _Job) -> None:
        for one in job.texts:
            self._llm.abort(one.request)
            if self._states:
                self._states.forget(one.request)

    def _lines(self, job: _Job) -> list[tuple[dict[str, Any], _Text]]:
        """The answers of a prompt that are worth keeping."""
        if any(one.reason == "aborted" for one in job.texts):
            raise CpuspecError("an answer was aborted, because another caller of this LLM was interrupted; run it again")
        if any(one.reason == "error" for one in job.texts):
            return []
        prompt, ids = job.prompt, list(job.prompt.ids or ())
        if job.turn and job.answers and not self._known_turns.is_new(self._turn_text(ids)):
            self.summary.num_duplicate_prompts += 1
            return []
        lines = []
        for temperature, answer in zip(self._plan.temperatures, job.answers, strict=False):
            text = self._llm.tokenizer.decode(answer.ids)
            if self._refused(prompt.id, f"answer at {temperature:g}", text):
                continue
            if not self._known_answers.is_new(text):
                self.summary.num_duplicate_answers += 1
                continue
            self._known_answers.add(text)
            name = f"{prompt.id}@{temperature:g}"
            own = {"id": name, "prompt_ids": ids, "answer_ids": answer.ids, "temperature": temperature}
            lines.append(({**own, "source": prompt.source, "finish_reason": answer.reason}, answer))
        if job.turn and lines:
            self._known_turns.add(self._turn_text(ids))
        return lines

    def _turn_text(self, ids: list[int]) -> str:
        """The user's message in a prompt that the target made up."""
        return self._llm.tokenizer.decode(ids[len(self._users_turn) :])


def check_answer(line: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> None:
    """Raise ConfigError, naming `where`, unless an object is a line of a file of answers."""
    for name, kind in (("id", str), ("source", str), ("temperature", float)):
        if not isinstance(line.get(name), kind):
            raise ConfigError(f"{where}: {name} is {str(line.get(name))[:60]!r}, and is wanted in a file of answers")
    for name in ("prompt_ids", "answer_ids"):
        checked_ids(line.get(name), tokenizer, f"{where}: {name}")


class AnswerFiles:
    """Reads files of a target's answers as one. num_duplicates: answers so far that are nearly those of an earlier file."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_duplicates = 0
        self._known = Known()

    def lines(self, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """Where a line is and its object, of each line of the next file but duplicates. An object with answer_ids is an answer.

        Raises ConfigError for a line that is no object or no sound answer, and where the facts beside the file tell of other
        tokens; OSError.
        """
        if header_path(path).exists():
            facts = read_header(path)
            if facts.text("tokenizer_sha256") != tokenizer_identity(self.tokenizer):
                raise ConfigError(
                    f"{path} has answers of {facts.text('model')}, whose tokens are others; name the model that gave them"
                )
        texts = []
        for line in read_lines(path):
            where = f"{path}, line {line.number}"
            value = parse_line(line.content, where)
            if "answer_ids" in value:
                check_answer(value, self.tokenizer, where)
                texts.append(self.tokenizer.decode(value["answer_ids"]))
                if self._known.has(texts[-1]):
                    self.num_duplicates += 1
                    continue
            yield where, value
        for text in texts:
            self._known.add(text)

"""Parity: one model on two backends over the same prompts. A side may be a recording that was made on another machine.

Each side answers every prompt greedily. Then both are fed the same tokens, a prompt and the answer to it, and their logits are
compared row by row. A recording's rows hold the likeliest ids and the sum over all: figures from fewer than all logits are lower
bounds, and the report says so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.backends import device_of, settings_of
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.gguf_parts import file_identity
from cpuspec.engine.llm import LLM
from cpuspec.errors import BackendError, ConfigError
from cpuspec.evaluate.answers import opened
from cpuspec.evaluate.quality import F64, logits_of
from cpuspec.metrics import LevelCounters, sum_levels
from cpuspec.model.batch import F32, I32
from cpuspec.sampling import kl_divergence
from cpuspec.sequence import shared_prefix
from cpuspec.settings import EngineConfig, SamplingParams, SpecConfig

NUM_TOKENS = 64  # of each answer
TOP = 64  # ids that a record keeps of each row
WHOLE_ROWS = 2  # rows of which a record keeps every logit

_LEAST_REST = 1e-12  # probabilities of what is left of a row are differences of sums: below this they are rounding
_WARM_UP_TOKENS = 4

OnStep = Callable[[str, int, int], None]  # what begins, the number of its kind that are done, and the number of all


@dataclass(frozen=True)
class Question:
    """Token ids that both sides are fed, and the number of tokens that they are asked for; 0 for a text that is only read."""

    ids: list[int]
    num_tokens: int


@dataclass(frozen=True)
class ModelIdentity:
    """Which model ran. files: name, bytes and sha256 of each, as `file_identity` has them."""

    name: str
    architecture: str
    vocab_size: int
    files: tuple[Mapping[str, Any], ...]

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint) -> "ModelIdentity":
        """That of an opened checkpoint. Reads its files."""
        config = checkpoint.config
        return ModelIdentity(checkpoint.path.name, config.architecture, config.vocab_size, tuple(file_identity(checkpoint.path)))

    def check_same(self, other: "ModelIdentity", where: str) -> None:
        """Raise ConfigError unless both are made of the same bytes, whatever their files are called."""
        mine, theirs = ({file["sha256"] for file in one.files} for one in (self, other))
        if mine == theirs and self.vocab_size == other.vocab_size:
            return
        raise ConfigError(
            f"{where} is of another model: {_files(other)}, {other.vocab_size} ids, wanted {_files(self)}, {self.vocab_size} ids; "
            "name the model that it was made with, byte for byte, with -m"
        )


@dataclass(frozen=True)
class LogitRow:
    """Logits [k] of one position. ids: [k] they belong to, the likeliest first; None: of every id, in order.

    logsumexp: over every id, so that probabilities of those known are right whatever is not known.
    """

    logits: F32
    ids: I32 | None
    logsumexp: float

    @staticmethod
    def whole(logits: F32) -> "LogitRow":
        """A row with every logit."""
        x = logits.astype(np.float64)
        most = x.max()
        return LogitRow(logits, None, float(most + np.log(np.exp(x - most).sum())))

    @property
    def best(self) -> int:
        """The likeliest id, the lower one of two that are equally likely, as `sampling.argmax` has it."""
        return int(self.logits.argmax()) if self.ids is None else int(self.ids[0])

    def likeliest(self, k: int) -> "LogitRow":
        """The row with its k likeliest ids only."""
        assert self.ids is None, "a row is shortened once"
        k = min(k, len(self.logits))
        ids = np.sort(np.argpartition(-self.logits, k - 1)[:k])
        ids = ids[np.argsort(-self.logits[ids], kind="stable")]
        return LogitRow(self.logits[ids], ids.astype(np.int32), self.logsumexp)

    def logits_for(self, ids: I32) -> F64:
        """Logits of some ids, NaN of those that are not known."""
        if self.ids is None:
            return self.logits[ids].astype(np.float64)
        known = dict(zip(self.ids.tolist(), self.logits.tolist(), strict=True))
        return np.array([known.get(token, np.nan) for token in ids.tolist()], np.float64)


@dataclass(frozen=True)
class RowDifference:
    """The differences of two rows of one position.

    kl: divergence of the second from the first in nats, of the ids that both rows have and of all others as one: never more than
    that of the whole rows (data processing inequality), and equal to it where `whole`. max_abs: over the ids that both have.
    covered: what the first gives those ids of its probability.
    """

    kl: float
    max_abs: float
    covered: float
    same_top: bool
    whole: bool


@dataclass(frozen=True)
class GreedyAnswer:
    """A greedy answer, and the seconds from its first step to its last token, in which `num_decoded` tokens came."""

    ids: list[int]
    num_decoded: int = 0
    decode_s: float = 0.0
    levels: Mapping[str, LevelCounters] | None = None  # of drafts; None: none were asked for


class LiveSide:
    """A backend that is loaded. Answers are made once, and one at a time."""

    def __init__(self, about: Mapping[str, Any], llm: LLM, backend: Any, questions: Sequence[Question], has_drafts: bool) -> None:
        self.about = about
        self._llm, self._backend, self._questions, self._has_drafts = llm, backend, questions, has_drafts
        self._answers: dict[tuple[int, bool], GreedyAnswer] = {}

    def warm_up(self) -> None:
        """Answer something, so that what is compiled or captured at first use takes no measured time."""
        first = next((one for one in self._questions if one.num_tokens), None)
        if first is not None:
            for max_draft_tokens in (0, None):
                params = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True, max_draft_tokens=max_draft_tokens)
                self._llm.generate(first.ids, replace(params, max_tokens=min(_WARM_UP_TOKENS, first.num_tokens)))

    def answer(self, number: int) -> GreedyAnswer:
        """The plain answer to a question."""
        return self._answer(number, drafts=False)

    def drafted(self, number: int) -> GreedyAnswer | None:
        """The answer with the drafts that this side was opened with."""
        return self._answer(number, drafts=True) if self._has_drafts else None

    def text(self, number: int) -> list[int] | None:
        """The tokens that its rows belong to: it can be fed any."""
        return None

    def rows(self, number: int, text: list[int]) -> Iterator[LogitRow]:
        """Feed the text to an empty cache, in chunks as long as the backend takes. Raises BackendError for NaN and infinity."""
        position = 0
        for chunk in logits_of(self._backend, text, self._backend.max_rows, num_prompt=len(self._questions[number].ids)):
            finite = np.isfinite(chunk).all(axis=1)
            if not finite.all():
                where = f"after token {position + int(finite.argmin())} of prompt {number + 1}"
                raise BackendError(
                    f"{self.about['name']} has logits that are not finite {where}; nothing can be compared with them"
                )
            yield from map(LogitRow.whole, chunk)
            position += len(chunk)

    def _answer(self, number: int, drafts: bool) -> GreedyAnswer:
        question, key = self._questions[number], (number, drafts)
        if not question.num_tokens:
            return GreedyAnswer([])
        if key not in self._answers:
            params = SamplingParams(max_tokens=question.num_tokens, ignore_eos=True, max_draft_tokens=None if drafts else 0)
            [found] = self._llm.generate(question.ids, params)
            stats = found.stats
            decode_s, levels = stats.decode_s or 0.0, stats.levels if drafts else None
            self._answers[key] = GreedyAnswer(found.token_ids, round(decode_s * (stats.tokens_per_s or 0)), decode_s, levels)
        return self._answers[key]


@contextmanager
def open_side(
    backend: str,
    checkpoint: Checkpoint,
    questions: Sequence[Question],
    spec: SpecConfig | None = None,
    settings: EngineConfig | None = None,
    about: Mapping[str, Any] | None = None,
) -> Iterator[LiveSide]:
    """Load a model on a backend, and close it in the end. about: facts that are added to the side's own, or replace them.

    The settings are replaced by one sequence that holds the longest question. Raises ConfigError for questions that the
    model's context cannot hold, and what loading raises.
    """
    room = max(len(one.ids) + one.num_tokens for one in questions)
    if room > checkpoint.config.context_length:
        raise ConfigError(
            f"a prompt and its answer take {room} tokens, the model holds {checkpoint.config.context_length}; ask for fewer"
        )
    spec = spec or SpecConfig()
    settings = replace(settings or EngineConfig(), max_sequences=1, context_length=room)
    with opened(backend, checkpoint, spec, settings) as (llm, loaded):
        own = {
            "name": backend,
            "backend": backend,
            "recorded": None,
            "device": device_of(loaded),
            "threads": loaded.threads,
            "row_invariant": loaded.row_invariant,
            "weight_bytes": loaded.weight_bytes,
            **settings_of(backend, settings),
            "draft": str(spec),
        }
        side = LiveSide(own | dict(about or {}), llm, loaded, questions, bool(spec.levels))
        side.warm_up()
        yield side


@dataclass(frozen=True)
class RecordedPrompt:
    """A question and what one side said. fed: the tokens that its rows belong to."""

    question: Question
    answer: GreedyAnswer
    drafted: GreedyAnswer | None
    fed: list[int]


@dataclass(frozen=True, eq=False)
class Recording:
    """The answers and rows of one side, recorded for a comparison on another day or machine.

    top_ids, top_logits [rows, top], logsumexp [rows]: a row for each token that was fed, prompt after prompt, as `LogitRow` has
    them. whole_rows [w]: numbers of the rows of which every logit is known, whole_logits [w, V].
    """

    about: Mapping[str, Any]
    model: ModelIdentity
    prompts: tuple[RecordedPrompt, ...]
    top_ids: I32
    top_logits: F32
    logsumexp: F64
    whole_rows: NDArray[np.int64]
    whole_logits: F32

    @property
    def questions(self) -> list[Question]:
        """What was asked."""
        return [one.question for one in self.prompts]

    def answer(self, number: int) -> GreedyAnswer:
        """The plain answer to a question."""
        return self.prompts[number].answer

    def drafted(self, number: int) -> GreedyAnswer | None:
        """The answer with drafts, if there were any."""
        return self.prompts[number].drafted

    def text(self, number: int) -> list[int]:
        """The tokens that were fed."""
        return self.prompts[number].fed

    def row(self, at: int) -> LogitRow:
        """The row of that number, with every logit where that was kept."""
        where = int(np.searchsorted(self.whole_rows, at))
        if where < len(self.whole_rows) and self.whole_rows[where] == at:
            return LogitRow.whole(self.whole_logits[where])
        return LogitRow(self.top_logits[at], self.top_ids[at], float(self.logsumexp[at]))

    def rows(self, number: int, text: list[int]) -> Iterator[LogitRow]:
        """The rows that were kept."""
        assert shared_prefix(self.text(number), text) == len(text), "a record has rows of its own text only"
        first = sum(len(one.fed) for one in self.prompts[:number])
        return map(self.row, range(first, first + len(text)))


Side = LiveSide | Recording  # one of the two sides of a comparison


def record(
    side: Side,
    model: ModelIdentity,
    questions: Sequence[Question],
    beside: Side | None = None,
    top: int = TOP,
    whole_rows: int = WHOLE_ROWS,
    on_progress: OnStep = lambda what, done, total: None,
) -> Recording:
    """Ask a side everything, and keep `top` logits of each row and every logit of `whole_rows` rows, spread evenly.

    beside: the side that it will be compared with. If that is a recording, its tokens are fed.
    """
    starts = np.cumsum([0, *(len(one.ids) + one.num_tokens for one in questions)])
    chosen = set(np.linspace(0, starts[-1] - 1, whole_rows).round().astype(int).tolist())
    prompts, kept, whole = [], list[LogitRow](), dict[int, F32]()
    for number, question in enumerate(questions):
        on_progress(f"recording {side.about['name']}", number, len(questions))
        fed = _text((side, *([beside] if beside else [])), number, question)
        prompts.append(RecordedPrompt(question, side.answer(number), side.drafted(number), fed))
        for position, row in enumerate(side.rows(number, fed)):
            if int(starts[number]) + position in chosen:
                whole[len(kept)] = row.logits.copy()
            kept.append(row.likeliest(top))
    on_progress(f"recording {side.about['name']}", len(questions), len(questions))
    return Recording(
        side.about,
        model,
        tuple(prompts),
        np.array([row.ids for row in kept], np.int32),
        np.array([row.logits for row in kept], np.float32),
        np.array([row.logsumexp for row in kept]),
        np.array(list(whole), np.int64),
        np.array(list(whole.values()), np.float32).reshape(len(whole), model.vocab_size),
    )


@dataclass(frozen=True)
class FirstDifference:
    """The first position where two greedy answers differ, and the token of each side there.

    margins: how far each side's token leads the other's in the side's own logits; None where a recording lacks one of the two.
    """

    position: int
    tokens: tuple[int, int]
    margins: tuple[float | None, float | None]


@dataclass(frozen=True)
class PromptParity:
    """The comparison for one question. num_rows: rows that were compared."""

    num_prompt_tokens: int
    num_tokens: int
    num_rows: int
    kl_mean: float
    same_top: float
    max_abs_logit_difference: float
    greedy_identical: bool
    first_difference: FirstDifference | None


@dataclass(frozen=True)
class ParityLimits:
    """The limits of a comparison; None is no limit."""

    min_same_top: float | None = None
    max_kl: float | None = None  # of the mean
    max_difference: float | None = None
    identical: bool = False  # greedy answers


@dataclass(frozen=True)
class Parity:
    """The agreement of two sides, the first of which is the reference. Divergences are in nats.

    whole_rows: rows of which both sides know every logit. Unless they are all, the divergences and the largest difference are lower
    bounds, from ids that have `covered_mean` of the reference's probability (`covered_min` in the worst row); in the whole rows the
    largest difference is `whole_rows_max_abs_logit_difference`. same_top is exact always.
    """

    sides: tuple[Mapping[str, Any], Mapping[str, Any]]
    num_rows: int
    whole_rows: int
    covered_mean: float
    covered_min: float
    max_abs_logit_difference: float
    whole_rows_max_abs_logit_difference: float | None
    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    same_top: float
    prompts: tuple[PromptParity, ...]

    @property
    def exact(self) -> bool:
        """Whether both sides had every logit of every row."""
        return self.whole_rows == self.num_rows

    @property
    def greedy_identical(self) -> bool:
        """Whether all greedy answers are the same."""
        return all(one.greedy_identical for one in self.prompts)

    def failures(self, limits: ParityLimits) -> list[str]:
        """The limits that were exceeded, and the sides whose drafts changed an answer although they promise that none does."""
        checks = (
            ("same_top", self.same_top, limits.min_same_top, "at least"),
            ("kl_mean", self.kl_mean, limits.max_kl, "at most"),
            ("max_abs_logit_difference", self.max_abs_logit_difference, limits.max_difference, "at most"),
        )
        failed = [
            f"{name} is {value:.6g}, wanted {how} {limit:g}"
            for name, value, limit, how in checks
            if limit is not None and (value < limit if how == "at least" else value > limit)
        ]
        differ = sum(not one.greedy_identical for one in self.prompts)
        if limits.identical and differ:
            failed.append(f"greedy answers to {differ} of {len(self.prompts)} prompts differ")
        for side in self.sides:
            drafted = side["drafted"]
            if drafted and side["row_invariant"] and drafted["num_identical"] < drafted["num_answers"]:
                changed = drafted["num_answers"] - drafted["num_identical"]
                failed.append(f"{side['name']} is row-invariant, and drafts changed {changed} of its answers")
        return failed

    def as_dict(self) -> dict[str, Any]:
        """Every figure under its name, with the data that it was computed from."""
        figures, asked = asdict(self), [one for one in self.prompts if one.num_tokens]
        a, b = figures.pop("sides")
        bound = "every logit" if self.exact else "the ids that both sides know of each row, and the rest as one; a lower bound"
        return {
            "a": a,
            "b": b,
            **figures,
            "exact": self.exact,
            "computed_from": {
                "max_abs_logit_difference": bound if self.exact else "the ids that both sides know of each row; a lower bound",
                "kl": bound,
                "same_top": "the likeliest id of every row",
                "tokens_per_s": "greedy answers one at a time, after the first step of each",
            },
            "greedy_identical": self.greedy_identical,
            "num_prompts": len(asked),
            "num_identical": sum(one.greedy_identical for one in asked),
        }


def compare_sides(a: Side, b: Side, questions: Sequence[Question], on_progress: OnStep = lambda what, done, total: None) -> Parity:
    """Ask both sides each question, and compare their answers and logits.

    Both are fed the prompt and the first side's answer. A recording is compared over the tokens that it was fed, two recordings
    over those that both were fed.
    """
    found: list[list[RowDifference]] = []
    prompts = []
    for number, question in enumerate(questions):
        on_progress("comparing", number, len(questions))
        ours, theirs = a.answer(number), b.answer(number)
        _ = a.drafted(number), b.drafted(number)
        text = _text((a, b), number, question)
        position = shared_prefix(ours.ids, theirs.ids)
        parts = position < question.num_tokens
        tokens = (ours.ids[position], theirs.ids[position]) if parts else (0, 0)
        margins: tuple[float | None, float | None] = (None, None)
        differences = []
        for at, (row, other) in enumerate(zip(a.rows(number, text), b.rows(number, text), strict=True)):
            differences.append(row_difference(row, other))
            if parts and at == len(question.ids) + position - 1:
                margins = (_margin(row, *tokens), _margin(other, *tokens[::-1]))
        found.append(differences)
        prompts.append(
            PromptParity(
                len(question.ids),
                question.num_tokens,
                len(differences),
                float(np.mean([one.kl for one in differences])),
                float(np.mean([one.same_top for one in differences])),
                max(one.max_abs for one in differences),
                not parts,
                FirstDifference(position, tokens, margins) if parts else None,
            )
        )
    on_progress("comparing", len(questions), len(questions))
    rows = [one for differences in found for one in differences]
    kl, covered = (np.array([getattr(one, name) for one in rows]) for name in ("kl", "covered"))
    whole = [one.max_abs for one in rows if one.whole]
    return Parity(
        (_summary(a, len(questions)), _summary(b, len(questions))),
        len(rows),
        len(whole),
        float(covered.mean()),
        float(covered.min()),
        max(one.max_abs for one in rows),
        max(whole) if whole else None,
        float(kl.mean()),
        float(np.median(kl)),
        float(np.quantile(kl, 0.99)),
        float(kl.max()),
        float(np.mean([one.same_top for one in rows])),
        tuple(prompts),
    )


def row_difference(row: LogitRow, other: LogitRow) -> RowDifference:
    """Compare two rows of one position, the first the reference."""
    whole = row.ids is None and other.ids is None
    if whole:
        x, y = row.logits.astype(np.float64), other.logits.astype(np.float64)
    else:
        ids = row.ids if row.ids is not None else other.ids
        assert ids is not None, "one of the rows is not whole"
        x, y = row.logits_for(ids), other.logits_for(ids)
        known = ~np.isnan(x) & ~np.isnan(y)
        x, y = x[known], y[known]
    p, q = x - row.logsumexp, y - other.logsumexp
    kl, (covered, other_covered) = float(kl_divergence(p, q)), (float(np.exp(log_probs).sum()) for log_probs in (p, q))
    if not whole:
        rest, other_rest = max(1 - covered, _LEAST_REST), max(1 - other_covered, _LEAST_REST)
        kl += rest * float(np.log(rest / other_rest))
    return RowDifference(
        max(kl, 0.0), float(np.abs(x - y).max(initial=0.0)), min(covered, 1.0), row.best == other.best, whole
    )  # sums in floating point may pass 0 and 1 by a rounding


def _text(sides: Sequence[Side], number: int, question: Question) -> list[int]:
    """The tokens that the sides are fed: the common ones of the records among them, else the prompt and the first side's answer."""
    fed = [text for side in sides if (text := side.text(number)) is not None]
    if not fed:
        return question.ids + sides[0].answer(number).ids
    return fed[0][: shared_prefix(fed[0], fed[-1])]


def _margin(row: LogitRow, token: int, other: int) -> float | None:
    ours, theirs = row.logits_for(np.array([token, other], np.int32))
    return None if np.isnan(ours - theirs) else float(ours - theirs)


def _summary(side: Side, num_questions: int) -> dict[str, Any]:
    """A side, the speed of its answers, and the fate of its drafts."""
    numbers = [number for number in range(num_questions) if side.answer(number).ids]
    plain = [side.answer(number) for number in numbers]
    drafted = [(side.answer(number), one) for number in numbers if (one := side.drafted(number)) is not None]
    levels = sum_levels(one.levels or {} for _, one in drafted)
    with_drafts = {
        "num_answers": len(drafted),
        "num_identical": sum(answer.ids == one.ids for answer, one in drafted),
        "tokens_per_s": _rate([one for _, one in drafted]),
        "levels": {name: counts.as_dict() for name, counts in levels.items()},
    }
    return {**side.about, "tokens_per_s": _rate(plain), "drafted": with_drafts if drafted else None}


def _rate(answers: Sequence[GreedyAnswer]) -> float | None:
    seconds = sum(one.decode_s for one in answers)
    return sum(one.num_decoded for one in answers) / seconds if seconds else None


def _files(model: ModelIdentity) -> str:
    return ", ".join(f"{file['name']} with sha256 {file['sha256'][:12]}" for file in model.files)

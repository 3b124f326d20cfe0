"""Certificates: drafts leave a model's greedy token ids as they are, and its sampled tokens as likely as they are.

The greedy part compares ids with plain decoding. The sampled part compares frequencies of the first tokens of many answers with the
probabilities that the plain model's own rows give to every such beginning. Its negative control is the same test on answers of a
verifier that accepts every draft: it must reject them.

A wrong state of a recurrent layer may change no token of these answers, so `replays.py` looks for it separately.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cpuspec.backends import Backend
from cpuspec.backends.packed import verify_packed
from cpuspec.checkpoints import Checkpoint
from cpuspec.engine.llm import LLM, load_target
from cpuspec.environment import usable_cores
from cpuspec.errors import ConfigError
from cpuspec.evaluate.prompts import Prompt, prompt_ids
from cpuspec.evaluate.quality import logits_of
from cpuspec.evaluate.replays import Replays, check_replays
from cpuspec.evaluate.statistics import chi_square
from cpuspec.metrics import RequestStats
from cpuspec.model.batch import F32
from cpuspec.sampling import Noise, TokenHistory, dense, distribution
from cpuspec.sequence import shared_prefix
from cpuspec.settings import EngineConfig, SamplingParams, SpecConfig
from cpuspec.text import make_tokenizer

PROMPTS: tuple[Prompt, ...] = (
    "The cat sat on the mat. The dog sat on the rug. The bird sat on the",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
    "Monday: rain, Tuesday: sun, Wednesday: rain, Thursday: sun, Friday:",
    "The history of the lighthouse begins in",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born": 1912}\n{"name": "Grace", "born":',
    "Question: What is the capital of France?\nAnswer:",
)

# Its beginning comes back, so that there is something to look up, and goes on in several ways.
_SAMPLED_PROMPT = "red blue red green red blue green red blue red green blue red green red blue"
TEMPERATURES = (0.6, 1.0, 1.5)
_TOP_K = 4  # with _LENGTH, few enough beginnings for each to be seen often
_LENGTH = 3
_TOKENS_AFTER = 4  # so that drafts are not shorter than usual
_AT_ONCE = 8

# How often a true certificate may be refused by chance; all tests of the sampled part share it.
FALSE_ALARM = 1e-4

NUM_SAMPLES, MIN_SAMPLES = 300, 50  # at each temperature

_COUNTED = {f"tokens 1 to {_LENGTH}": slice(_LENGTH), **{f"token {i + 1}": slice(i, i + 1) for i in range(_LENGTH)}}

OnProgress = Callable[[str], None]
Beginning = tuple[int, ...]  # the first tokens of an answer


@dataclass(frozen=True)
class Arm:
    """One way of generating the greedy answers, and its result. first_differences: position in the answer, by prompt."""

    spec: str
    threads: int
    at_once: int
    num_identical: int
    first_differences: Mapping[int, int]
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True)
class Greedy:
    """Greedy ids with drafts beside those of plain decoding."""

    num_prompts: int
    num_tokens: int
    arms: tuple[Arm, ...]

    @property
    def passed(self) -> bool:
        """Whether every answer of every arm is the plain one."""
        return all(arm.num_identical == self.num_prompts for arm in self.arms)


@dataclass(frozen=True)
class Comparison:
    """The chi-square test of one count. what: "token 2", or "tokens 1 to 3" for the first tokens together."""

    temperature: float
    what: str
    statistic: float
    degrees: int
    p_value: float


@dataclass(frozen=True)
class Sampled:
    """Frequencies of sampled tokens beside the target's probabilities. level: p-values below it reject (Bonferroni)."""

    num_samples: int  # at each temperature
    level: float
    comparisons: tuple[Comparison, ...]
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def passed(self) -> bool:
        """Whether no test rejects."""
        return not self.rejected_at()

    def rejected_at(self) -> set[float]:
        """The temperatures at which a test rejects."""
        return {one.temperature for one in self.comparisons if one.p_value < self.level}


@dataclass(frozen=True)
class Certificate:
    """The result of all tests. control: the sampled part for a verifier that accepts every draft.

    states: those of the target's recurrent layers; None for a model without.
    """

    spec: str
    threads: int
    greedy: Greedy
    sampled: Sampled
    control: Sampled
    states: Replays | None = None

    @property
    def control_rejected(self) -> bool:
        """Whether the mistake was found at every temperature."""
        return self.control.rejected_at() == set(TEMPERATURES)

    @property
    def passed(self) -> bool:
        """Whether the tests found no change by drafts, and did find the mistake."""
        states = self.states is None or self.states.passed
        return self.greedy.passed and self.sampled.passed and self.control_rejected and states

    def as_dict(self) -> dict[str, Any]:
        """Every figure and every verdict under its name."""
        verdicts = {"passed": self.passed, "control_rejected": self.control_rejected}
        parts = {
            name: {"passed": part.passed} | asdict(part) for name, part in (("greedy", self.greedy), ("sampled", self.sampled))
        }
        if self.states:
            parts["states"] = {"passed": self.states.passed} | asdict(self.states)
        return verdicts | {"spec": self.spec, "threads": self.threads} | parts | {"control": asdict(self.control)}


SampledAnswer = tuple[list[int], RequestStats | None]
Answering = Callable[[list[SamplingParams]], list[SampledAnswer]]  # one answer to the same prompt for each


def certify(
    checkpoint: Checkpoint,
    spec: SpecConfig,
    prompts: Sequence[Prompt] = PROMPTS,
    max_tokens: int = 128,
    num_samples: int = NUM_SAMPLES,
    *,
    backend: str = "numba",
    settings: EngineConfig | None = None,
    on_progress: OnProgress = lambda text: None,
) -> Certificate:
    """Test that drafting with `spec` changes nothing: greedy answers to `prompts`, `num_samples` sampled ones a temperature.

    Packed weights on the disk are compared with their checksums before they are loaded.
    The settings' `max_sequences` and `context_length` are replaced.
    Raises ConfigError for numbers that prove nothing, and what making an LLM raises.
    """
    if num_samples < MIN_SAMPLES:
        raise ConfigError(f"frequencies of {num_samples} samples prove nothing; wanted at least {MIN_SAMPLES}")
    settings = settings or EngineConfig()
    threads = settings.threads or usable_cores()
    verify_packed(threads)
    settings = replace(settings, threads=threads)
    greedy = check_greedy(checkpoint, spec, prompts, max_tokens, backend, settings, on_progress)
    tokenizer = make_tokenizer(checkpoint)
    prompt = prompt_ids(tokenizer, _SAMPLED_PROMPT)
    room = _room(checkpoint, len(prompt) + _LENGTH + _TOKENS_AFTER)
    settings = replace(settings, max_sequences=_AT_ONCE, context_length=room)
    plain = load_target(backend, checkpoint, settings)
    try:
        rows = plain_rows(plain, prompt)
        control = check_sampled(partial(believed, rows), rows, num_samples)
        states = check_states(plain, [prompt_ids(tokenizer, one) for one in prompts], on_progress)
    finally:
        plain.close()
    verdict = "is seen" if control.rejected_at() == set(TEMPERATURES) else "IS NOT SEEN: the test is too weak"
    on_progress(f"a verifier that believes its drafts {verdict}")
    with LLM(checkpoint, spec, backend, settings=settings) as llm:

        def answering(each: list[SamplingParams]) -> list[SampledAnswer]:
            return [(one.token_ids, one.stats) for one in llm.generate([prompt] * len(each), each)]

        sampled = check_sampled(answering, rows, num_samples, on_progress)
    return Certificate(str(spec), threads, greedy, sampled, control, states)


def check_greedy(
    checkpoint: Checkpoint,
    spec: SpecConfig,
    prompts: Iterable[Prompt],
    max_tokens: int,
    backend: str,
    settings: EngineConfig,
    on_progress: OnProgress = lambda text: None,
) -> Greedy:
    """Greedy answers with drafts beside plain ones: by one thread and by the settings', one at a time and several at once.

    Every answer has `max_tokens` tokens: end tokens do not end it.
    """
    tokenizer, params = make_tokenizer(checkpoint), SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    questions = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    room = _room(checkpoint, max(map(len, questions)) + max_tokens)
    settings = replace(settings, context_length=room)
    with LLM(checkpoint, SpecConfig(), backend, settings=replace(settings, max_sequences=1)) as llm:
        plain = [answer.token_ids for answer in llm.generate(questions, params)]
    num_tokens = sum(map(len, plain))
    on_progress(f"greedy, plain: {num_tokens} tokens of {len(plain)} prompts")
    arms = []
    for num_threads in sorted({1, settings.threads or usable_cores()}):
        one = replace(settings, threads=num_threads, max_sequences=_AT_ONCE)
        with LLM(checkpoint, spec, backend, settings=one) as llm:
            for at_once in (1, _AT_ONCE):
                answers = [
                    answer
                    for start in range(0, len(questions), at_once)
                    for answer in llm.generate(questions[start : start + at_once], params)
                ]
                differ = {
                    i: shared_prefix(ids, answer.token_ids)
                    for i, (ids, answer) in enumerate(zip(plain, answers, strict=True))
                    if ids != answer.token_ids
                }
                drafted, accepted = _drafts(answer.stats for answer in answers)
                arms.append(Arm(str(spec), num_threads, at_once, len(plain) - len(differ), differ, drafted, accepted))
                how = f"{num_threads} thread{'s' * (num_threads > 1)}, {'one' if at_once == 1 else at_once} at a time"
                on_progress(f"greedy, {spec}, {how}: {arms[-1].num_identical} of {len(plain)} prompts identical")
    return Greedy(len(plain), num_tokens, tuple(arms))


def check_states(backend: Backend, prompts: list[list[int]], on_progress: OnProgress = lambda text: None) -> Replays | None:
    """Replays of the prompts, one after another, forwards and backwards; None for a model without recurrent layers."""
    if not backend.config.is_recurrent:
        return None
    joined = [token for prompt in prompts for token in prompt][: backend.config.context_length]
    found = check_replays(backend, [joined, joined[::-1]])
    on_progress(f"states of recurrent layers: {'right' if found.passed else 'NOT RIGHT'} in {len(found.ways)} ways of reading")
    return found


def plain_rows(backend: Backend, prompt: list[int]) -> dict[Beginning, F32]:
    """The model's logits [V] after the prompt and after each beginning of an answer that can be sampled, from scratch, in the
    arithmetic that answers have.
    """
    rows: dict[Beginning, F32] = {}
    beginnings: list[Beginning] = [()]
    for _ in range(_LENGTH):
        for path in beginnings:
            *_, last = logits_of(backend, [*prompt, *path], backend.max_rows, num_prompt=len(prompt))
            rows[path] = last[-1].copy()
        beginnings = [(*path, token) for path in beginnings for token in _likeliest(rows[path])]
    return rows


def check_sampled(
    answering: Answering, rows: Mapping[Beginning, F32], num_samples: int, on_progress: OnProgress = lambda text: None
) -> Sampled:
    """Compare answers at each temperature with what `rows` (of `plain_rows`) says of them."""
    level = FALSE_ALARM / (len(TEMPERATURES) * (_LENGTH + 1))
    comparisons, stats = [], []
    for temperature in TEMPERATURES:
        settings = {"temperature": temperature, "top_k": _TOP_K, "max_tokens": _LENGTH + _TOKENS_AFTER, "ignore_eos": True}
        answers = answering([SamplingParams(**settings, seed=seed) for seed in range(num_samples)])  # type: ignore[arg-type]
        stats += [one for _, one in answers]
        counts = Counter(tuple(ids[:_LENGTH]) for ids, _ in answers)
        probs = _beginnings(rows, SamplingParams(**settings))  # type: ignore[arg-type]
        for what, part in _COUNTED.items():
            seen: Counter[Beginning] = Counter()
            expected: dict[Beginning, float] = defaultdict(float)
            for path, count in counts.items():
                seen[path[part]] += count
            for path, prob in probs.items():
                expected[path[part]] += prob
            comparisons.append(Comparison(temperature, what, *chi_square(seen, expected)))
        p_value = min(one.p_value for one in comparisons[-len(_COUNTED) :])
        on_progress(f"sampled at temperature {temperature:g}: {num_samples} answers, smallest p-value {p_value:.3g}")
    return Sampled(num_samples, level, tuple(comparisons), *_drafts(stats))


def believed(rows: Mapping[Beginning, F32], each: list[SamplingParams]) -> list[SampledAnswer]:
    """Answers of a faulty verifier: it accepts every drafted token, and drafts come from the less likely half of `rows`."""
    answers = list[SampledAnswer]()
    for params in each:
        path: Beginning = ()
        for position in range(_LENGTH):
            tokens, draws = _likeliest(rows[path])[_TOP_K // 2 :], Noise(params.seed or 0)
            path = (*path, tokens[draws.draw(np.ones(len(tokens)), position)])
        answers.append((list(path), None))
    return answers


def _beginnings(rows: Mapping[Beginning, F32], params: SamplingParams) -> dict[Beginning, float]:
    """The probability of every beginning of _LENGTH tokens."""
    probs: dict[Beginning, float] = {(): 1.0}
    for _ in range(_LENGTH):
        longer: dict[Beginning, float] = {}
        for path, prob in probs.items():
            row = dense(distribution(rows[path], params, TokenHistory([])))
            longer |= {(*path, int(token)): prob * float(row[token]) for token in np.flatnonzero(row)}
        probs = longer
    return probs


def _likeliest(row: F32) -> list[int]:
    """The tokens that top-k leaves, ties to the lower id as there."""
    return np.argsort(-row, kind="stable")[:_TOP_K].tolist()


def _drafts(stats: Iterable[RequestStats | None]) -> tuple[int, int]:
    """Tokens drafted and accepted, of all levels."""
    levels = [level for one in stats if one for level in one.levels.values()]
    return sum(level.num_draft_tokens for level in levels), sum(level.num_accepted_tokens for level in levels)


def _room(checkpoint: Checkpoint, num_tokens: int) -> int:
    """A context for `num_tokens` tokens, or the longest that the model has."""
    return min(num_tokens, checkpoint.config.context_length)

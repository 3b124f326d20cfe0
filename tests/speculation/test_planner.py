"""Lengths and drafters are chosen as the cost model says, and what does not help is left alone."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.kernels import machine_code
from cpuspec.sequence import Sequence
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.planner import costs as costs_module
from cpuspec.speculation.planner.costs import Costs, find_costs
from cpuspec.speculation.planner.planner import Planner
from cpuspec.speculation.proposer import Floors, NullProposer, goes_on
from cpuspec.speculation.verify import Verdict
from tools.make_tiny_model import make_tiny_gguf

FLAT = Costs([1, 16, 17], [1.0, 1.0, 2.0])  # sixteen rows for the price of one
STEEP = Costs([1, 2], [1.0, 2.0])  # each row costs a forward


class Clock:
    """Stands still unless a test moves it: nothing here depends on how long something took.

    num_rows: that were fed to the verifier, and weight_bytes that it read, as its context counts them.
    """

    now_s = 0.0
    num_rows = weight_bytes = num_forwards = 0


NOW = Clock()


@pytest.fixture(autouse=True)
def clock() -> Clock:
    NOW.now_s, NOW.num_rows, NOW.weight_bytes, NOW.num_forwards = 0.0, 0, 0, 0
    return NOW


def planner_of(costs: Costs, lookups: list[Any], models: list[Any] | None = None, context: Any = None) -> Planner:
    return Planner(costs, lookups, models or [], context=context, clock=lambda: NOW.now_s)


class Text(NullProposer):
    """Drafts as long as it may, and is sure of itself."""

    name = "text"

    def __init__(self, confidence: float = 0.9) -> None:
        self.confidence = confidence

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        drafts = []
        for limit in limits:
            drafts.append(Draft.chain([1] * limit, self.name, confidence=[self.confidence] * limit))
        return drafts


class TimedText(Text):
    """Takes time for each proposal, which is empty unless it finds something."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.finds = False
        self.num_asked = 0
        self._clock, self._seconds = clock, seconds

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        self.num_asked += len(seqs)
        self._clock.now_s += self._seconds * len(seqs)
        return super().propose(seqs, [limit if self.finds else 0 for limit in limits])


class Model(NullProposer):
    """Stands for a chain, all of whose rows are equally sure. asked: tokens that it drafted."""

    name = "model"
    num_tokens = 16
    in_one_pass = False
    context = None

    def __init__(self, confidence: float = 0.9) -> None:
        self.confidence = confidence
        self.asked: list[int] = []

    def propose(self, seqs: list[Sequence], limits: list[int], floors: list[Floors] | None = None) -> list[Draft]:
        drafts = []
        for number, limit in enumerate(limits):
            length = min(limit, 1)
            while length < limit and (floors is None or goes_on(floors[number], length, self.confidence**length)):
                length += 1
            self.asked.append(length)
            drafts.append(Draft.chain([1] * length, self.name, confidence=[self.confidence] * length))
        return drafts


class TimedModel(Model):
    """Takes time for each token that it drafts, and for each that it was not fed yet."""

    def __init__(self, clock: Clock, drafted_s: float, fed_s: float, confidence: float = 0.9) -> None:
        super().__init__(confidence)
        self.costs = Costs([1, 2], [drafted_s, drafted_s + fed_s])
        self._clock = clock
        self._fed: dict[int, int] = {}

    def propose(self, seqs: list[Sequence], limits: list[int], floors: list[Floors] | None = None) -> list[Draft]:
        drafts = super().propose(seqs, limits, floors)
        for seq, draft in zip(seqs, drafts, strict=True):
            num_missed = len(seq.tokens) - 1 - self._fed.get(seq.id, 0)
            self._clock.now_s += max(num_missed, 0) * self.costs.row_s + len(draft) * self.costs.forward_s(1)
            self._fed[seq.id] = len(seq.tokens)
        return drafts


ROWS = [1, 2, 3, 4, 6, 8, 9, 12, 16, 24]


def rising(slope: float) -> Costs:
    """Each row more takes that share of the first."""
    return Costs(ROWS, [1 + slope * (n - 1) for n in ROWS])


def _answers(
    planner: Planner, clock: Clock, truth: Costs, accept: Callable[[int], float], count: int, first: int = 0, tokens: int = 200
) -> list[float]:
    """Seconds of answers one after the other, over those of plain decoding. accept: the share of drafts accepted of an answer."""
    ratios = []
    for number in range(first, first + count):
        seq = Sequence.new(number, [0] * 300, SamplingParams(max_tokens=tokens))
        planner.begin(seq, 0)
        begin_s = clock.now_s
        while seq.num_wanted:
            [draft] = planner.propose([seq], [min(24, seq.num_wanted - 1)])
            clock.now_s += truth.forward_s(len(draft) + 1)
            clock.num_rows += len(draft) + 1
            clock.num_forwards += 1
            num_accepted = round(accept(number) * len(draft))
            came = [*[1] * num_accepted, 1 if accept(number) == 1 else 2]
            seq.extend(came)
            planner.accept(seq, Verdict(came, list(range(num_accepted))), ())
        planner.end(seq)
        ratios.append((clock.now_s - begin_s) / (tokens * truth.forward_s(1)))
    return ratios


def _sequence(number: int = 0, prompt: int = 4) -> Sequence:
    return Sequence.new(number, [0] * prompt, SamplingParams(max_tokens=100_000))


def _together(
    planner: Planner, seqs: list[Sequence], count: int, accept: float, clock: Clock | None = None, truth: Costs | None = None
) -> list[int]:
    """Drafted tokens of some rounds, of each of whose drafts that share is accepted. truth: what the clock's forwards take."""
    numbers = []
    for _ in range(count):
        drafts = planner.propose(seqs, [24] * len(seqs))
        numbers.append(sum(map(len, drafts)))
        if clock:
            clock.num_rows += len(seqs) + numbers[-1]
            clock.num_forwards += 1
            clock.now_s += truth.forward_s(len(seqs) + numbers[-1]) if truth else 0.0
        for seq, draft in zip(seqs, drafts, strict=True):
            num_accepted = int(accept * len(draft))
            tokens = [*[1] * num_accepted, 1 if accept == 1 else 2]
            seq.extend(tokens)
            planner.accept(seq, Verdict(tokens, list(range(num_accepted))), ())
    return numbers


def _rounds(planner: Planner, seq: Sequence, count: int, accept: float, clock: Clock | None = None) -> list[int]:
    """Lengths of the drafts of some rounds, of each of which that share is accepted."""
    return _together(planner, [seq], count, accept, clock)


def test_costs_grow_between_what_was_measured_and_beyond() -> None:
    costs = Costs([1, 2, 4, 8], [1.0, 0.5, 2.0, 4.0])
    assert [costs.forward_s(n) for n in (1, 2, 3, 4, 6, 8, 10)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    assert costs.row_s == 0.5


@pytest.mark.parametrize(
    "nonsense",
    [
        "",
        "[]",
        '{"rows": [1, 2], "seconds": [1, 2]}',
        '{"rows": [1, 2], "seconds": [1], "num_bytes": [1, 1], "further_s": [0, 0]}',
        '{"rows": [2, 1], "seconds": [1, 2], "num_bytes": [1, 1], "further_s": [0, 0]}',
        '{"rows": [1], "seconds": ["x"], "num_bytes": [1], "further_s": [0]}',
        '{"rows": [1.0, 2.0], "seconds": [1, 2], "num_bytes": [1, 1], "further_s": [0, 0]}',
        '{"rows": [1, 999999], "seconds": [1, 2], "num_bytes": [1, 1], "further_s": [0, 0]}',
        '{"rows": [1, 2], "seconds": [1, 2], "num_bytes": [1], "further_s": [0, 0]}',
        '{"rows": [1, 2], "seconds": [1, 2], "num_bytes": [1, 2], "further_s": [0, 2]}',
    ],
)
def test_costs_are_measured_once_and_nonsense_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nonsense: str
) -> None:
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(costs_module, "_time", lambda backend, cache, depth, rows, one_token: (0.01 + 0.001 * rows, 0))
    backend = make_backend("numpy", open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", "qwen2")), EngineConfig(max_rows=16))
    first = find_costs(backend)
    assert first.measured_rows == [1, 2, 3, 4, 6, 8, 9, 12, 16]
    assert all(s > 0 for s in first.seconds)
    assert find_costs(backend).seconds == first.seconds
    [kept] = tmp_path.glob("costs/*.json")
    kept.write_text(nonsense)
    calls = []
    monkeypatch.setattr(costs_module, "measure_costs", lambda backend: calls.append(backend) or FLAT)
    assert find_costs(backend).seconds == FLAT.seconds
    assert calls == [backend]
    for slower, num_measured in ((1, 1), (20, 2)):  # as of a busy machine
        kept.write_text(json.dumps(first.as_dict() | {"seconds": [slower * s for s in first.as_dict()["seconds"]]}))
        find_costs(backend)
        assert len(calls) == num_measured


def test_costs_of_other_instructions_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    backend: Any = SimpleNamespace(name="numba", config=None, weight_bytes=1, threads=1)
    measured: list[str] = []
    monkeypatch.setattr(
        costs_module, "measure_costs", lambda backend: measured.append(machine_code.fingerprint()) or Costs([1], [1.0])
    )
    monkeypatch.setattr(costs_module, "_is_undercut", lambda costs, backend: False)
    for instructions in ("avx512", "avx2", "avx512"):
        monkeypatch.setattr(machine_code, "fingerprint", lambda name=instructions: name)
        find_costs(backend)
    assert measured == ["avx512", "avx2"]


@pytest.mark.parametrize("confidence", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.4])
def test_a_draft_from_text_is_cut_where_it_promises_most(confidence: float, slope: float) -> None:
    costs = Costs([1, 2], [1.0, 1.0 + slope])
    planner, seq = planner_of(costs, [Text(confidence)], []), _sequence()
    planner.begin(seq, 0)
    [draft] = planner.propose([seq], [24])
    rates = [sum(confidence**k for k in range(n + 1)) / costs.forward_s(n + 1) for n in range(25)]
    assert len(draft) == int(np.argmax(rates))


def test_plain_decoding_is_timed_where_many_tokens_come_at_once(clock: Clock) -> None:
    """A machine has become slower. Else drafts would seem not to pay for as long as nobody drafts."""
    planner, seq = planner_of(rising(0.5), [], context=clock), _sequence()
    for _ in range(12):
        planner.propose([seq], [24])
        clock.now_s, clock.num_rows, clock.num_forwards = clock.now_s + 50 * 2.0, clock.num_rows + 50, clock.num_forwards + 50
        seq.extend([2] * 50)
        planner.accept(seq, Verdict([2] * 50, []), ())
    one, two = planner.costs.forward_s(1), planner.costs.forward_s(2)
    assert 1.9 < one <= 2.0
    assert two < 1.3 * one, "nothing was learned of two rows but that the machine is slower"


def test_nothing_is_drafted_where_each_row_costs_a_forward() -> None:
    planner, seq = planner_of(STEEP, [Text(0.99)], []), _sequence()
    assert _rounds(planner, seq, 20, 1.0) == [0] * 20
    assert planner.num_plain_rounds == 20


def test_a_request_that_begins_expects_what_others_saw() -> None:
    planner = planner_of(Costs([1, 2], [1.0, 1.1]), [Text(0.8)], [])
    lengths = []
    for number in range(4):
        seq = _sequence(number)
        lengths.append(_rounds(planner, seq, 30, 0.0))
        planner.end(seq)
    assert lengths[0][0] > lengths[-1][0]


def test_what_failed_once_is_tried_again() -> None:
    planner, seq = planner_of(Costs([1, 2], [1.0, 1.1]), [Text(0.9)], []), _sequence()
    _rounds(planner, seq, 40, 0.0)
    assert _rounds(planner, seq, 100, 1.0)[-1] > 4


def test_sequences_that_share_a_forward_share_its_price() -> None:
    costs = Costs([1, 16, 17], [1.0, 1.0, 2.0])
    alone, together = planner_of(costs, [Text(0.9)], []), planner_of(costs, [Text(0.9)], [])
    [draft] = alone.propose([_sequence()], [24])
    drafts = together.propose([_sequence(n) for n in range(8)], [24] * 8)
    assert len(draft) == 15
    assert {len(one) for one in drafts} == {1}


@pytest.mark.parametrize(("seconds", "asked"), [(0.05, True), (0.9, False)])
def test_a_model_drafts_where_its_tokens_are_cheaper_than_what_they_save(seconds: float, asked: bool) -> None:
    model = Model()
    planner, seq = planner_of(FLAT, [], [(model, Costs([1], [seconds]))]), _sequence()
    lengths = _rounds(planner, seq, 50, 1.0)
    assert (sum(lengths) > 100) == asked
    assert asked or sum(lengths) <= 2


def test_a_text_that_repeats_goes_before_a_model() -> None:
    model = Model()
    planner, seq = planner_of(FLAT, [Text(0.99)], [(model, Costs([1], [0.3]))]), _sequence()
    _rounds(planner, seq, 20, 1.0)
    assert not model.asked


class Named(TimedModel):
    """A model that is right with so many of its tokens, whatever it says of them."""

    def __init__(self, name: str, right: float) -> None:
        super().__init__(NOW, 0.1, 0.001, 0.8)
        self.name, self.right = name, right


def _of_two(planner: Planner, models: list[Named], seq: Sequence, count: int) -> list[str]:
    """Who drafted in each of some rounds."""
    rng, by_name, names = np.random.default_rng(2), {one.name: one for one in models}, []
    for _ in range(count):
        [draft] = planner.propose([seq], [24])
        names.append(draft.source if len(draft) else "")
        num_accepted = 0
        while num_accepted < len(draft) and rng.random() < by_name[draft.source].right:
            num_accepted += 1
        seq.extend([1] * (num_accepted + 1))
        planner.accept(seq, Verdict([1] * (num_accepted + 1), list(range(num_accepted))), ())
    return names


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_models_the_better_one_drafts_though_the_other_began(first: int) -> None:
    models = [Named("worse", 0.6), Named("better", 0.9)][:: 1 if not first else -1]
    planner, seq = planner_of(rising(0.05), [], [(one, one.costs) for one in models]), _sequence()
    names = _of_two(planner, models, seq, 1500)
    assert names[-300:].count("better") > 0.9 * 300
    assert names.count("worse") > 0


def test_the_better_model_is_told_by_each_request() -> None:
    models = [Named("a", 0.9), Named("b", 0.6)]
    planner = planner_of(rising(0.05), [], [(one, one.costs) for one in models])
    first, second = _sequence(0), _sequence(1)
    _of_two(planner, models, first, 300)
    models[0].right, models[1].right = 0.4, 0.9  # of the second request
    assert _of_two(planner, models, second, 600)[-100:].count("b") > 90
    known = planner.models[0]
    assert known.chance(first) > known.chance(second) + 0.1


def test_a_model_that_does_not_help_leaves_rounds_to_run_at_once(clock: Clock) -> None:
    model = TimedModel(clock, 0.9, 0.001)
    planner, seq = planner_of(rising(0.5), [], [(model, model.costs)]), _sequence()
    _rounds(planner, seq, 60, 0.0)
    assert planner.num_idle([seq]) > 0
    helping = Model()
    planner = planner_of(rising(0.05), [], [(helping, Costs([1, 2], [0.1, 0.11]))])
    _rounds(planner, seq := _sequence(1), 30, 1.0)
    assert planner.num_idle([seq]) == 0


def test_a_model_is_not_asked_for_an_answer_too_short_to_pay_for_its_prompt() -> None:
    lengths = []
    for max_tokens in (5, 10_000):
        model = Model()
        planner = planner_of(FLAT, [], [(model, Costs([1, 2], [0.1, 0.2]))])
        seq = Sequence.new(0, [0] * 500, SamplingParams(max_tokens=max_tokens))
        [draft] = planner.propose([seq], [min(24, max_tokens - 1)])
        lengths.append(len(draft))
    assert lengths[0] == 0
    assert lengths[1] > 0


MODEL_SECONDS = [(0.1, 0.005), (0.3, 0.02), (0.5, 0.08), (0.9, 0.3)]  # of a drafted and of a fed token, over a plain forward


# Each two of confidence, slope and seconds meet.
@pytest.mark.parametrize(
    ("confidence", "slope", "drafted_s", "fed_s"),
    [
        (confidence, slope, *seconds)
        for c, confidence in enumerate((None, 0.3, 0.9))
        for s, slope in enumerate((0.02, 0.4))
        for seconds in MODEL_SECONDS[(c + s) % 2 :: 2]
    ],
)
def test_where_nothing_helps_it_costs_at_most_three_percent(
    clock: Clock, confidence: float | None, slope: float, drafted_s: float, fed_s: float
) -> None:
    """The simulation of benchmarks/DECISIONS.md#where-nothing-helps: at most 2.8 % over 25 answers."""
    model = TimedModel(clock, drafted_s, fed_s)
    texts = [] if confidence is None else [Text(confidence)]
    planner = planner_of(rising(slope), texts, [(model, model.costs)])
    ratios = _answers(planner, clock, rising(slope), lambda answer: 0.0, 25)
    assert 1 <= np.mean(ratios) <= 1.028


@pytest.mark.parametrize("seconds", [0.02, 0.03, 0.1, 1.0])
@pytest.mark.parametrize("finds", [True, False])
def test_asking_a_text_that_never_helps_costs_three_hundredths_at_most(clock: Clock, finds: bool, seconds: float) -> None:
    text = TimedText(clock, seconds)
    text.finds = finds
    num_tokens = 20 * 200
    ratios = _answers(planner_of(rising(0.05), [text], []), clock, rising(0.05), lambda answer: 0.0, 20)
    assert 1 <= np.mean(ratios[1:]) <= 1.03
    assert 0.005 * num_tokens <= text.num_asked * seconds <= 0.02 * num_tokens  # one percent, and what it took to learn


def test_rounds_run_at_once_only_until_a_text_is_tried(clock: Clock) -> None:
    def asked(at_once: bool) -> int:
        text = TimedText(clock, 0.1)
        planner, seq, num_rounds = planner_of(rising(0.05), [text]), _sequence(), 0
        while num_rounds < 2000:
            [draft] = planner.propose([seq], [24])
            assert not len(draft)
            tokens = [2] * (1 + (planner.num_idle([seq]) if at_once else 0))
            seq.extend(tokens)
            planner.accept(seq, Verdict(tokens, []), ())
            num_rounds += len(tokens)
        assert planner.num_plain_rounds == num_rounds
        return text.num_asked

    alone = asked(at_once=False)
    assert alone - 2 <= asked(at_once=True) <= alone
    helping = planner_of(rising(0.05), [text := TimedText(clock, 0.1)])
    text.finds = True
    _rounds(helping, seq := _sequence(), 50, 1.0, clock)
    assert helping.num_idle([seq]) == 0
    assert planner_of(rising(0.05), [], [(Model(), STEEP)]).num_idle([seq]) == 0


def test_a_text_that_takes_next_to_nothing_is_asked_every_time(clock: Clock) -> None:
    text = TimedText(clock, 0.003)
    _answers(planner_of(rising(0.05), [text], []), clock, rising(0.05), lambda answer: 0.0, 5)
    assert text.num_asked == 5 * 199  # all but for the last token, which leaves no room for a draft


def test_a_request_without_drafts_says_nothing_about_texts(clock: Clock) -> None:
    text = TimedText(clock, 0.1)
    text.finds = True
    planner = planner_of(rising(0.05), [text], [])
    without = _sequence()
    planner.begin(without, 0)
    for _ in range(500):
        planner.propose([without], [0])
        without.extend([1])
        planner.accept(without, Verdict([1], np.arange(0, dtype=np.int32)), ())
    planner.end(without)
    assert text.num_asked == 0
    seq = _sequence(1)
    planner.begin(seq, 0)
    assert len(planner.propose([seq], [24])[0]) > 4


def test_of_two_texts_that_find_the_same_the_first_one_drafts() -> None:
    """A trial is for where nothing else is drafted: it must not shorten a draft that pays."""
    planner, seq = planner_of(rising(0.05), [Text(0.9), Text(0.9)], []), _sequence()
    lengths = _rounds(planner, seq, 50, 0.9)
    assert min(lengths) > 4
    assert [one.drafted.num_rounds for one in planner.lookups] == [50, 0]


@pytest.mark.parametrize("seconds", [0.003, 0.03, 0.1])
def test_a_text_that_helps_is_asked_every_time_and_one_that_begins_to_soon(clock: Clock, seconds: float) -> None:
    text = TimedText(clock, seconds)
    planner = planner_of(rising(0.05), [text], [])
    _answers(planner, clock, rising(0.05), lambda answer: 0.0, 12)
    text.finds = True
    asked, answers = text.num_asked, _answers(planner, clock, rising(0.05), lambda answer: 1.0, 1, first=12)
    assert answers[0] < 0.35  # drafts of 15 and more for 1.75 forwards, and a few rounds until it is asked
    [draft] = planner.propose([_sequence(13)], [24])
    assert len(draft) > 4
    assert text.num_asked - asked < 60


@pytest.mark.parametrize(("drafted_s", "fed_s", "within"), [(0.1, 0.005, 4), (0.3, 0.02, 8), (0.3, 0.08, 25), (0.5, 0.08, 25)])
@pytest.mark.parametrize("texts", [[], [Text(0.3)]], ids=["alone", "beside a text"])
def test_a_model_that_was_given_up_is_used_again_once_it_helps(
    clock: Clock, texts: list[Text], drafted_s: float, fed_s: float, within: int
) -> None:
    model = TimedModel(clock, drafted_s, fed_s, confidence=0.99)
    planner = planner_of(rising(0.05), list(texts), [(model, model.costs)])
    before = _answers(planner, clock, rising(0.05), lambda answer: 0.0, 12)
    assert min(before) > 0.99
    after = _answers(planner, clock, rising(0.05), lambda answer: 1.0 if model.asked else 0.0, within + 5, first=12)
    assert max(after[within:]) < 0.85


def test_a_trial_feeds_no_more_than_the_allowance_has() -> None:
    """A model that must be fed as dearly as the target itself is not tried for ever."""
    model = TimedModel(NOW, 0.9, 0.5)
    planner = planner_of(rising(0.05), [], [(model, model.costs)])
    assert _answers(planner, NOW, rising(0.05), lambda answer: 0.0, 10) == pytest.approx([1.0] * 10)


@pytest.mark.parametrize("helps", [True, False])
def test_costs_that_were_measured_wrong_are_found_out(clock: Clock, helps: bool) -> None:
    """Rows that seem dear although they are cheap, and rows that seem cheap although they are dear."""
    truth = rising(0.05 if helps else 0.3)
    wrong = Costs(ROWS, [1.0, *(1.6 * truth.forward_s(n) for n in ROWS[1:])] if helps else rising(0.1).seconds[: len(ROWS)])
    planner = planner_of(wrong, [Text(0.6)], [], context=clock)
    _answers(planner, clock, truth, lambda answer: 0.5, 30)
    right = [truth.forward_s(n) / truth.forward_s(1) for n in (2, 3)]
    first = [1.6 * one for one in right] if helps else [1.1, 1.2]
    found = [wrong.forward_s(n) / wrong.forward_s(1) for n in (2, 3)]
    assert all(abs(f - r) < 0.5 * abs(w - r) for f, r, w in zip(found, right, first, strict=True))


def test_a_slow_machine_makes_all_forwards_slow_and_no_row_cheaper() -> None:
    costs = rising(0.05)
    for _ in range(300):
        costs.observe(1, 3.0)
    assert costs.forward_s(1) == pytest.approx(3.0, rel=0.1)
    assert costs.forward_s(4) / costs.forward_s(1) == pytest.approx(1.15, rel=0.15)


def test_rounds_correct_what_was_measured_within_bounds() -> None:
    costs, once = rising(0.1), rising(0.1)
    once.observe(4, 1e6)
    assert once.forward_s(4) < 2 * 1.3
    for _ in range(1000):
        costs.observe(4, 1e6)
        costs.observe(1, 1e-6)
    assert costs.forward_s(4) <= 4 * 1.3 + 1e-9
    assert costs.forward_s(1) >= 1 / 4 - 1e-9
    assert costs.seconds == sorted(costs.seconds)
    costs.observe(2, 0.0)  # a clock that stood still
    costs.observe(9999, 5.0)  # more rows than one forward has
    assert costs.measured_rows == ROWS


@pytest.mark.parametrize("num_seqs", [1, 2, 4, 32])
def test_rounds_without_a_draft_teach_what_their_rows_take(clock: Clock, num_seqs: int) -> None:
    planner, seqs = planner_of(rising(0.05), [], [], context=clock), [_sequence(n) for n in range(num_seqs)]
    _together(planner, seqs, 200, 0.0, clock, Costs([1], [2.0 / num_seqs]))
    assert planner.costs.forward_s(num_seqs) == pytest.approx(2.0, rel=0.1)


LOADS = [2, 8, 32]


@pytest.mark.parametrize("accept", [0.0, 0.5, 0.8])
def test_under_load_drafts_shrink_to_nothing_and_they_are_back_when_it_falls(accept: float) -> None:
    """With 32 sequences a row takes nine tenths of a plain token; alone it takes a fifth."""
    planner, crowd, alone = planner_of(rising(0.2), [Text(0.9)], []), [_sequence(n) for n in range(32)], _sequence(32)
    assert min(_rounds(planner, alone, 20, 0.8)) > 2
    _together(planner, crowd, 20, accept)  # learns what little can be learned under load
    assert sum(_together(planner, crowd, 100, accept)) < 0.03 * 100 * 32
    lengths = _rounds(planner, crowd[0], 30, 0.8)
    assert min(lengths[10:]) > 2


@pytest.mark.parametrize("confidence", [0.3, 0.95])
@pytest.mark.parametrize("accept", [0.0, 0.5])
@pytest.mark.parametrize("slope", [0.05, 0.5])
@pytest.mark.parametrize("num_seqs", LOADS)
def test_drafts_cost_no_load_more_than_three_hundredths(
    clock: Clock, num_seqs: int, slope: float, accept: float, confidence: float
) -> None:
    truth = rising(slope)
    planner, seqs = planner_of(rising(slope), [Text(confidence)], [], context=clock), [_sequence(n) for n in range(num_seqs)]
    _together(planner, seqs, 30, accept, clock, truth)
    num_before, begin_s = sum(len(seq.tokens) for seq in seqs), clock.now_s
    _together(planner, seqs, 60, accept, clock, truth)
    num_tokens = sum(len(seq.tokens) for seq in seqs) - num_before
    assert clock.now_s - begin_s <= 1.03 * num_tokens * truth.forward_s(num_seqs) / num_seqs


def test_what_was_learned_is_kept_for_the_next_process_where_it_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(costs_module, "_time", lambda backend, cache, depth, rows, one_token: (0.01 + 0.001 * rows, 0))
    backend = make_backend("numpy", open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", "qwen2")), EngineConfig(max_rows=16))
    costs = find_costs(backend)
    [kept] = tmp_path.glob("costs/*")
    before = kept.read_text()
    costs.observe(1, 1.06 * costs.forward_s(1))
    costs.keep()
    assert kept.read_text() == before
    for _ in range(5):
        costs.observe(4, 2 * costs.forward_s(4))
    costs.keep()
    assert find_costs(backend).seconds[:9] == costs.seconds[:9]
    assert [path.name for path in tmp_path.glob("costs/*")] == [kept.name]

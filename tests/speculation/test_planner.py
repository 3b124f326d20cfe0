"""Lengths and drafters are chosen as the cost model says, and what does not help is left alone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.config import EngineConfig, SamplingParams
from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.planner import costs as costs_module
from cpuspec.speculation.planner import planner as planner_module
from cpuspec.speculation.planner.costs import Costs, find_costs
from cpuspec.speculation.planner.planner import Planner
from cpuspec.speculation.proposer import NullProposer
from cpuspec.speculation.verify import Verdict
from tools.make_tiny_model import make_tiny_gguf

FLAT = Costs([1, 16, 17], [1.0, 1.0, 2.0])  # sixteen rows for the price of one
STEEP = Costs([1, 2], [1.0, 2.0])  # each row costs a forward


class Clock:
    """Stands still unless a test moves it: nothing here depends on how long something took."""

    now_s = 0.0

    def elapsed_s(self, function: Callable[[], object]) -> float:
        begin_s = self.now_s
        function()
        return self.now_s - begin_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(planner_module, "now_s", lambda: clock.now_s)
    monkeypatch.setattr(planner_module, "elapsed_s", clock.elapsed_s)
    return clock


class Text(NullProposer):
    """Drafts as long as it may, and is sure of itself."""

    name = "text"

    def __init__(self, confidence: float = 0.9, *, drawn: bool = False) -> None:
        self.confidence = confidence
        self.drawn = drawn

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        drafts = []
        for limit in limits:
            probs = tuple(np.full(8, 1 / 8) for _ in range(limit)) if self.drawn else None
            chain = Draft.chain([1] * limit, self.name, probs)
            drafts.append(
                Draft(chain.tokens, chain.parents, probs, self.name, confidence=np.full(limit, self.confidence, np.float32))
            )
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
    """Stands for a chain."""

    name = "model"
    num_tokens = 16

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        self.asked += limits
        return [Draft.chain([1] * limit, self.name) for limit in limits]


class TimedModel(Model):
    """Takes time for each token that it drafts, and for each that it was not fed yet."""

    def __init__(self, clock: Clock, drafted_s: float, fed_s: float) -> None:
        super().__init__()
        self.costs = Costs([1, 2], [drafted_s, drafted_s + fed_s])
        self._clock = clock
        self._fed: dict[int, int] = {}

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        for seq, limit in zip(seqs, limits, strict=True):
            num_missed = len(seq.tokens) - 1 - self._fed.get(seq.id, 0)
            self._clock.now_s += max(num_missed, 0) * self.costs.row_s + limit * self.costs.forward_s(1)
            self._fed[seq.id] = len(seq.tokens)
        return super().propose(seqs, limits)


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
            num_accepted = round(accept(number) * len(draft))
            seq.extend([1] * (num_accepted + 1))
            planner.accept(seq, Verdict([1] * (num_accepted + 1), np.arange(num_accepted, dtype=np.int32)), ())
        planner.end(seq)
        ratios.append((clock.now_s - begin_s) / (tokens * truth.forward_s(1)))
    return ratios


def _sequence(number: int = 0, prompt: int = 4) -> Sequence:
    return Sequence.new(number, [0] * prompt, SamplingParams(max_tokens=100_000))


def _rounds(planner: Planner, seq: Sequence, count: int, accept: float) -> list[int]:
    """Lengths of the drafts of some rounds, of each of which that share is accepted."""
    lengths = []
    for _ in range(count):
        [draft] = planner.propose([seq], [24])
        lengths.append(len(draft))
        num_accepted = int(accept * len(draft))
        tokens = [1] * (num_accepted + 1)
        seq.extend(tokens)
        planner.accept(seq, Verdict(tokens, list(range(num_accepted))), ())
    return lengths


def test_costs_grow_between_what_was_measured_and_beyond() -> None:
    costs = Costs([1, 2, 4, 8], [1.0, 0.5, 2.0, 4.0])
    assert [costs.forward_s(n) for n in (1, 2, 3, 4, 6, 8, 10)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    assert costs.row_s == 0.5


@pytest.mark.parametrize(
    "nonsense",
    [
        "",
        "[]",
        '{"rows": [1, 2], "seconds": [1]}',
        '{"rows": [2, 1], "seconds": [1, 2]}',
        '{"rows": [1], "seconds": ["x"]}',
        '{"rows": [1.0, 2.0], "seconds": [1, 2]}',
        '{"rows": [1, 999999], "seconds": [1, 2]}',
    ],
)
def test_costs_are_measured_once_and_nonsense_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nonsense: str
) -> None:
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    backend = make_backend("numpy", open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", "qwen2")), EngineConfig(max_rows=16))
    first = find_costs(backend)
    assert first.rows == [1, 2, 3, 4, 6, 8, 9, 12, 16]
    assert all(s > 0 for s in first.seconds)
    assert find_costs(backend).seconds == first.seconds
    [kept] = tmp_path.glob("costs/*.json")
    kept.write_text(nonsense)
    calls = []
    monkeypatch.setattr(costs_module, "measure_costs", lambda backend: calls.append(backend) or FLAT)
    assert find_costs(backend).seconds == FLAT.seconds
    assert calls == [backend]


@pytest.mark.parametrize("confidence", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.4])
def test_a_draft_from_text_is_cut_where_it_promises_most(confidence: float, slope: float) -> None:
    costs = Costs([1, 2], [1.0, 1.0 + slope])
    planner, seq = Planner(costs, [Text(confidence)], []), _sequence()
    planner.begin(seq, 0)
    [draft] = planner.propose([seq], [24])
    rates = [sum(confidence**k for k in range(n + 1)) / costs.forward_s(n + 1) for n in range(25)]
    assert len(draft) == int(np.argmax(rates))


def test_drawn_tokens_are_not_cut() -> None:
    planner, seq = Planner(FLAT, [Text(0.01, drawn=True)], []), _sequence()
    [draft] = planner.propose([seq], [10])
    assert len(draft) in (0, 10)


def test_nothing_is_drafted_where_each_row_costs_a_forward() -> None:
    planner, seq = Planner(STEEP, [Text(0.99)], []), _sequence()
    assert _rounds(planner, seq, 20, 1.0) == [0] * 20
    assert planner.num_plain_rounds == 20


def test_drafts_that_are_never_accepted_come_to_an_end() -> None:
    planner, seq = Planner(Costs([1, 2], [1.0, 1.1]), [Text(0.9)], []), _sequence()
    lengths = _rounds(planner, seq, 100, 0.0)
    assert lengths[0] > 0
    assert sum(lengths[20:]) < sum(lengths[:20])
    assert sum(lengths[20:]) * 0.1 < 0.03 * 80  # rows that cost 3 % of those forwards
    assert _rounds(Planner(Costs([1, 2], [1.0, 1.1]), [Text(0.9)], []), _sequence(), 100, 1.0)[-1] > 0


def test_a_request_that_begins_expects_what_others_saw() -> None:
    planner = Planner(Costs([1, 2], [1.0, 1.1]), [Text(0.8)], [])
    lengths = []
    for number in range(4):
        seq = _sequence(number)
        lengths.append(_rounds(planner, seq, 30, 0.0))
        planner.end(seq)
    assert lengths[0][0] > lengths[-1][0]


def test_what_failed_once_is_tried_again() -> None:
    planner, seq = Planner(Costs([1, 2], [1.0, 1.1]), [Text(0.9)], []), _sequence()
    _rounds(planner, seq, 40, 0.0)
    assert _rounds(planner, seq, 100, 1.0)[-1] > 4


def test_sequences_that_share_a_forward_share_its_price() -> None:
    costs = Costs([1, 16, 17], [1.0, 1.0, 2.0])
    alone, together = Planner(costs, [Text(0.9)], []), Planner(costs, [Text(0.9)], [])
    [draft] = alone.propose([_sequence()], [24])
    drafts = together.propose([_sequence(n) for n in range(8)], [24] * 8)
    assert len(draft) == 15
    assert {len(one) for one in drafts} == {1}


@pytest.mark.parametrize(("seconds", "asked"), [(0.05, True), (0.9, False)])
def test_a_model_drafts_where_its_tokens_are_cheaper_than_what_they_save(seconds: float, asked: bool) -> None:
    model = Model()
    planner, seq = Planner(FLAT, [], [(model, Costs([1], [seconds]))]), _sequence()  # type: ignore[list-item]
    lengths = _rounds(planner, seq, 50, 1.0)
    assert (sum(lengths) > 100) == asked
    assert asked or sum(lengths) <= 2


def test_a_text_that_repeats_goes_before_a_model() -> None:
    model = Model()
    planner, seq = Planner(FLAT, [Text(0.99)], [(model, Costs([1], [0.3]))]), _sequence()  # type: ignore[list-item]
    _rounds(planner, seq, 20, 1.0)
    assert not model.asked


def test_trying_what_the_estimates_speak_against_takes_two_hundredths_of_the_time(clock: Clock) -> None:
    model = TimedModel(clock, 0.4, 0.001)
    planner, seq = Planner(FLAT, [], [(model, model.costs)]), _sequence()  # type: ignore[list-item]
    _rounds(planner, seq, 20, 0.0)  # learns that it is no good
    before = len(model.asked)
    _rounds(planner, seq, 600, 0.0)
    assert 0 < sum(model.asked[before:]) * 0.4 < 0.02 * 620


def test_a_model_is_not_asked_for_an_answer_too_short_to_pay_for_its_prompt() -> None:
    lengths = []
    for max_tokens in (5, 10_000):
        model = Model()
        planner = Planner(FLAT, [], [(model, Costs([1, 2], [0.1, 0.2]))])  # type: ignore[list-item]
        seq = Sequence.new(0, [0] * 500, SamplingParams(max_tokens=max_tokens))
        [draft] = planner.propose([seq], [min(24, max_tokens - 1)])
        lengths.append(len(draft))
    assert lengths[0] == 0
    assert lengths[1] > 0


class LateText(Text):
    """Finds drafts once an answer has some tokens."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.begins = begins

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        late = [seq.num_output_tokens >= self.begins for seq in seqs]
        return super().propose(seqs, [limit if one else 0 for one, limit in zip(late, limits, strict=True)])


def test_a_model_is_fed_no_prompt_where_texts_are_about_to_draft(clock: Clock) -> None:
    text, model = LateText(6), TimedModel(clock, 0.1, 0.02)
    planner = Planner(rising(0.05), [text], [(model, model.costs)])  # type: ignore[list-item]
    _answers(planner, clock, rising(0.05), lambda answer: 1.0, 3)  # learns that it is so
    asked = len(model.asked)
    _answers(planner, clock, rising(0.05), lambda answer: 1.0, 10, first=3)
    assert len(model.asked) == asked
    text.begins = 10_000
    ratios = _answers(planner, clock, rising(0.05), lambda answer: 1.0, 10, first=13)
    assert ratios[0] < 0.4  # the prompt takes 6 forwards of 200, and as many were waited for
    assert ratios[-1] < ratios[0]
    lengths = _rounds(planner, _sequence(23, 300), 10, 1.0)
    assert lengths[:6] == [0] * 6
    assert lengths[-1] > 4


MODEL_SECONDS = [(0.1, 0.005), (0.3, 0.02), (0.5, 0.08), (0.9, 0.3)]  # of a drafted and of a fed token, over a plain forward


@pytest.mark.parametrize(("drafted_s", "fed_s"), MODEL_SECONDS)
@pytest.mark.parametrize("slope", [0.02, 0.2])
@pytest.mark.parametrize("confidence", [None, 0.9])
def test_where_nothing_helps_it_costs_three_hundredths_at_most(
    clock: Clock, confidence: float | None, slope: float, drafted_s: float, fed_s: float
) -> None:
    model = TimedModel(clock, drafted_s, fed_s)
    texts = [] if confidence is None else [Text(confidence)]
    planner = Planner(rising(slope), texts, [(model, model.costs)])  # type: ignore[list-item]
    ratios = _answers(planner, clock, rising(slope), lambda answer: 0.0, 20)
    assert 1 <= np.mean(ratios) <= 1.03


@pytest.mark.parametrize("seconds", [0.02, 0.03, 0.1, 1.0])
@pytest.mark.parametrize("finds", [True, False])
def test_asking_a_text_that_never_helps_costs_three_hundredths_at_most(clock: Clock, finds: bool, seconds: float) -> None:
    text = TimedText(clock, seconds)
    text.finds = finds
    num_tokens = 20 * 200
    ratios = _answers(Planner(rising(0.05), [text], []), clock, rising(0.05), lambda answer: 0.0, 20)
    assert 1 <= np.mean(ratios[1:]) <= 1.03
    assert 0.005 * num_tokens <= text.num_asked * seconds <= 0.02 * num_tokens  # one percent, and what it took to learn


def test_plain_rounds_are_all_counted_and_one_of_four_is_timed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    text, costs, timed = TimedText(clock, 0.1), rising(0.05), list[int]()
    planner, seq = Planner(costs, [text], []), _sequence()
    _rounds(planner, seq, 100, 0.0)  # learns that asking does not pay
    monkeypatch.setattr(costs, "observe", lambda rows, seconds: timed.append(rows))
    asked = text.num_asked
    _rounds(planner, seq, 400, 0.0)
    assert planner.num_plain_rounds == 500
    assert timed == [1] * 100
    assert 0 < text.num_asked - asked < 100


def test_a_text_that_takes_next_to_nothing_is_asked_every_time(clock: Clock) -> None:
    text = TimedText(clock, 0.003)
    _answers(Planner(rising(0.05), [text], []), clock, rising(0.05), lambda answer: 0.0, 5)
    assert text.num_asked == 5 * 199  # all but for the last token, which leaves no room for a draft


def test_a_request_without_drafts_says_nothing_about_texts(clock: Clock) -> None:
    text = TimedText(clock, 0.1)
    text.finds = True
    planner = Planner(rising(0.05), [text], [])
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
    planner, seq = Planner(rising(0.05), [Text(0.9), Text(0.9)], []), _sequence()
    lengths = _rounds(planner, seq, 50, 0.9)
    assert min(lengths) > 4
    assert [one.drafted.num_rounds for one in planner.lookups] == [50, 0]


@pytest.mark.parametrize("seconds", [0.003, 0.03, 0.1])
def test_a_text_that_helps_is_asked_every_time_and_one_that_begins_to_soon(clock: Clock, seconds: float) -> None:
    text = TimedText(clock, seconds)
    planner = Planner(rising(0.05), [text], [])
    _answers(planner, clock, rising(0.05), lambda answer: 0.0, 12)
    text.finds = True
    asked, answers = text.num_asked, _answers(planner, clock, rising(0.05), lambda answer: 1.0, 1, first=12)
    assert answers[0] < 0.35  # drafts of 15 and more for 1.75 forwards, and a few rounds until it is asked
    [draft] = planner.propose([_sequence(13)], [24])
    assert len(draft) > 4
    assert text.num_asked - asked < 60


def test_what_came_between_is_not_held_against_a_text(clock: Clock) -> None:
    text = TimedText(clock, 0.001)
    text.finds = True
    planner = Planner(rising(0.05), [text], [])
    seq = _sequence()
    text._seconds = 1e3
    _rounds(planner, seq, 1, 1.0)
    text._seconds = 0.001
    assert min(_rounds(planner, seq, 30, 1.0)) > 0


@pytest.mark.parametrize(("drafted_s", "fed_s", "within"), [(0.1, 0.005, 4), (0.3, 0.02, 8), (0.3, 0.08, 25), (0.5, 0.08, 25)])
@pytest.mark.parametrize("texts", [[], [Text(0.3)]], ids=["alone", "beside a text"])
def test_a_model_that_was_given_up_is_used_again_once_it_helps(
    clock: Clock, texts: list[Text], drafted_s: float, fed_s: float, within: int
) -> None:
    model = TimedModel(clock, drafted_s, fed_s)
    planner = Planner(rising(0.05), list(texts), [(model, model.costs)])  # type: ignore[list-item]
    before = _answers(planner, clock, rising(0.05), lambda answer: 0.0, 12)
    assert min(before) > 0.99
    after = _answers(planner, clock, rising(0.05), lambda answer: 1.0 if model.asked else 0.0, within + 5, first=12)
    assert max(after[within:]) < 0.85


def test_a_trial_feeds_no_more_than_the_allowance_has() -> None:
    """A model that must be fed as dearly as the target itself is not tried for ever."""
    clock = Clock()
    model = TimedModel(clock, 0.9, 0.5)
    planner = Planner(rising(0.05), [], [(model, model.costs)])  # type: ignore[list-item]
    assert _answers(planner, clock, rising(0.05), lambda answer: 0.0, 10) == pytest.approx([1.0] * 10)


@pytest.mark.parametrize("helps", [True, False])
def test_costs_that_were_measured_wrong_are_found_out(clock: Clock, helps: bool) -> None:
    """Rows that seem dear although they are cheap, and rows that seem cheap although they are dear."""
    truth = rising(0.05 if helps else 0.3)
    wrong = Costs(ROWS, [1.0, *(1.6 * truth.forward_s(n) for n in ROWS[1:])] if helps else rising(0.1).seconds)
    planner = Planner(wrong, [Text(0.6)], [])
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
    costs.observe(99, 5.0)  # more rows than were measured


def test_what_agrees_teaches_nothing() -> None:
    costs = rising(0.1)
    for n in ROWS:
        costs.observe(n, 1.04 * costs.forward_s(n))
    assert costs.seconds == rising(0.1).seconds


def test_only_a_round_whose_rows_are_known_is_learned_from(clock: Clock) -> None:
    """A first round feeds the prompt, and so does one after tokens were taken back that the verifier had not seen go."""
    planner, seq = Planner(rising(0.05), [Text(0.9)], []), _sequence()
    for rewinds in (False, True):
        seconds = planner.costs.seconds
        if rewinds:
            seq.rewind(len(seq.tokens) - 1)
        assert planner.propose([seq], [1])[0].tokens.tolist() == [1]
        clock.now_s += 1.5
        seq.extend([1])
        planner.accept(seq, Verdict([1], np.arange(0, dtype=np.int32)), ())
        assert planner.costs.seconds == seconds
    assert planner.propose([seq], [1])[0].tokens.tolist() == [1]
    clock.now_s += 1.5
    planner.accept(seq, Verdict([1], np.arange(0, dtype=np.int32)), ())
    assert planner.costs.seconds > seconds


@pytest.mark.parametrize("num_seqs", [1, 2, 4])
def test_rounds_without_a_draft_teach_what_their_rows_take(clock: Clock, num_seqs: int) -> None:
    planner, seqs = Planner(rising(0.05), [], []), [_sequence(n) for n in range(num_seqs)]
    alone = _sequence(num_seqs)
    for together in [[alone]] + [seqs] * 200:
        planner.propose(together, [0] * len(together))
        clock.now_s += 2.0
        for seq in together:
            seq.extend([1])
            planner.accept(seq, Verdict([1], np.arange(0, dtype=np.int32)), ())
    assert planner.costs.forward_s(num_seqs) == pytest.approx(2.0, rel=0.1)


def test_what_was_learned_is_kept_for_the_next_process_where_it_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
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
    assert find_costs(backend).seconds == costs.seconds
    assert [path.name for path in tmp_path.glob("costs/*")] == [kept.name]


def test_forwards_are_measured_until_a_round_finds_none_quicker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend("numpy", open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", "qwen2")), EngineConfig(max_rows=2))
    for busy_rounds, wanted_rounds in ((0, 3), (4, 6), (99, 10)):
        calls: list[int] = []

        def time(*_: object, calls: list[int] = calls, busy: int = busy_rounds) -> float:
            calls.append(1)
            return max(1.0, 2.0 - 0.1 * ((len(calls) - 1) // 2)) if (len(calls) - 1) // 2 < busy else 1.0

        monkeypatch.setattr(costs_module, "_time", time)
        assert costs_module.measure_costs(backend).seconds == [1.0 if busy_rounds < 99 else pytest.approx(1.1)] * 2
        assert len(calls) == 2 * wanted_rounds

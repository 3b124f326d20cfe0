"""`auto` drafts of a head as much as is likely enough at the measured costs, alternatives among it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams
from cpuspec.speculation.drafters.eagle import draft_chains, draft_trees
from cpuspec.speculation.drafters.head_path import CHILDREN
from cpuspec.speculation.drafters.heads import HeadProposer
from cpuspec.speculation.head_context import DraftedRows, HeadRows
from cpuspec.speculation.planner.costs import Costs
from cpuspec.speculation.planner.planner import Planner
from cpuspec.speculation.verify import verify_tokens

ROWS = [1, 2, 3, 4, 6, 8, 9, 12, 16, 24]
TARGET = Costs(ROWS, [1 + 0.05 * (rows - 1) for rows in ROWS])
VOCAB = 200


class Clock:
    """Stands still unless a head's forward moves it."""

    now_s = 0.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


class HeadOfFewWords:
    """Stands for a head with its context: in every row tokens 0, 1, 2 and so on are as likely as it says. A forward takes time."""

    capacity = 1 << 20
    begin = learn = end = lambda *_: None

    def can_draft(self, seq: Sequence) -> bool:
        return True

    def read(self, seqs: list[Sequence]) -> list[bool]:
        return [True] * len(seqs)

    def __init__(self, clock: Clock, forward_s: float, sure: tuple[float, ...]) -> None:
        others = (1 - sum(sure)) / (VOCAB - len(sure))
        self._logits = np.log(np.array([*sure, *[others] * (VOCAB - len(sure))], np.float32))
        self.head = SimpleNamespace(token_ids=None, layers=(), stages=())
        self.backend = SimpleNamespace(max_rows=64)
        self.costs = Costs(ROWS, [forward_s * (1 + 0.02 * (rows - 1)) for rows in ROWS])
        self._clock = clock

    def score(self, seqs: list[Sequence], drafted: list[DraftedRows | None], chunks: object = None) -> list[HeadRows]:
        numbers = [len(rows.tokens) + (rows.parents is not None) if rows else 1 for rows in drafted]
        self._clock.now_s += self.costs.forward_s(sum(numbers))
        return [HeadRows(np.tile(self._logits, (number, 1)), np.zeros((number, 1), np.float32)) for number in numbers]


def seconds_a_token(planner: Planner, clock: Clock, chances: tuple[float, ...], rounds: int = 300) -> tuple[float, list[bool]]:
    """Over the second half of the rounds, and which of their drafts branch.

    chances: of the token that is the head's likeliest, its second, and so on; else it is one that the head never offers.
    """
    rng, seq = np.random.default_rng(3), Sequence.new(0, [0] * 4, SamplingParams(max_tokens=100_000))
    weights = [*chances, *[0.0] * (CHILDREN - len(chances)), 1 - sum(chances)]
    planner.begin(seq, 0)
    branched = []
    for number in range(rounds):
        if number == rounds // 2:
            begin_s, first, branched = clock.now_s, len(seq.tokens), []
        [draft] = planner.propose([seq], [16])
        come = rng.choice(len(weights), 20, p=weights).tolist()
        depths = [0, *draft.depths.tolist()]
        verdict = verify_tokens(draft, lambda row, come=come, depths=depths: come[depths[row]])
        clock.now_s += TARGET.forward_s(len(draft) + 1)
        branched.append(not draft.is_chain)
        seq.extend(verdict.tokens)
        planner.accept(seq, verdict, ())
    return (clock.now_s - begin_s) / (len(seq.tokens) - first), branched


def planner_of(clock: Clock, forward_s: float, sure: tuple[float, ...], rule: Any = draft_chains, branches: bool = True) -> Planner:
    context: Any = HeadOfFewWords(clock, forward_s, sure)
    models = [(HeadProposer(context, rule, VOCAB, "head", 16, branches=branches), context.costs)]
    return Planner(TARGET, [], models, clock=lambda: clock.now_s)


@pytest.mark.parametrize(
    ("chances", "forward_s", "branches"),
    [((0.95, 0.02), 0.02, False), ((0.4, 0.35, 0.15), 0.02, True), ((0.45, 0.4, 0.1), 0.15, True), ((0.7, 0.02), 0.1, False)],
)
def test_a_tree_is_drafted_where_alternatives_are_worth_their_rows(
    clock: Clock, chances: tuple[float, ...], forward_s: float, branches: bool
) -> None:
    _, branched = seconds_a_token(planner_of(clock, forward_s, chances), clock, chances)
    assert (np.mean(branched) > 0.8) == branches
    assert (np.mean(branched) < 0.2) == (not branches)


@pytest.mark.parametrize("chances", [(0.9, 0.05), (0.45, 0.35, 0.1), (0.4, 0.3, 0.1)])
def test_trees_are_no_worse_than_chains(clock: Clock, chances: tuple[float, ...]) -> None:
    trees, _ = seconds_a_token(planner_of(clock, 0.05, chances), clock, chances)
    chains, branched = seconds_a_token(planner_of(clock, 0.05, chances, branches=False), clock, chances)
    assert not any(branched)
    assert trees < (1.01 if chances[0] > 0.5 else 0.9) * chains


@pytest.mark.parametrize("rule", [draft_chains, draft_trees])
def test_a_head_that_is_never_right_is_left_alone(clock: Clock, rule: Any) -> None:
    seconds, _ = seconds_a_token(planner_of(clock, 0.1, (0.9, 0.05), rule), clock, (0.0, 0.0))
    assert 1 <= seconds < 1.05


def test_a_head_that_is_wrong_about_itself_is_left_alone(clock: Clock) -> None:
    """It believes in its likeliest token and is never right with it: below the wrong one its tree is of no use."""
    seconds, _ = seconds_a_token(planner_of(clock, 0.1, (0.6, 0.3)), clock, (0.0, 0.0, 1.0))
    assert seconds < 1.05


@pytest.mark.parametrize("rule", [draft_chains, draft_trees])
@pytest.mark.parametrize("least", [0.3, 0.5, 0.8])
def test_a_head_drafts_on_while_the_path_is_likely_enough(clock: Clock, rule: Any, least: float) -> None:
    sure = (0.81, 0.1)
    context: Any = HeadOfFewWords(clock, 0.1, sure)
    seq = Sequence.new(0, [0] * 4, SamplingParams())
    [draft] = HeadProposer(context, rule, VOCAB, "head", 16).propose([seq], [16], [[least] * 20])
    deepest = next(n for n in range(1, 20) if sure[0] ** n < least)
    assert max(draft.depths) == deepest
    assert draft.confidence is not None
    first = [likely for likely, parent in zip(draft.likely, draft.parents.tolist(), strict=True) if parent < 0]
    assert first[:2] == pytest.approx(sure, rel=0.05)
    assert draft.likely == sorted(draft.likely, reverse=True)

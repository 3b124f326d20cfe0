"""`auto` drafts a chain or a tree of a head, whichever promises more at the measured costs and the counted ranks."""

from collections.abc import Callable, Iterator
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpuspec.config import SamplingParams
from cpuspec.sequence import Sequence
from cpuspec.speculation.drafters.eagle import draft_chains, draft_trees
from cpuspec.speculation.drafters.head_path import CHILDREN
from cpuspec.speculation.drafters.heads import HeadProposer
from cpuspec.speculation.drafters.ranks import Ranks
from cpuspec.speculation.head_context import DraftedRows, HeadRows
from cpuspec.speculation.planner import planner as planner_module
from cpuspec.speculation.planner.choose import best_length, best_tree
from cpuspec.speculation.planner.costs import Costs
from cpuspec.speculation.planner.planner import Planner
from cpuspec.speculation.verify import verify_greedy

ROWS = [1, 2, 3, 4, 6, 8, 9, 12, 16, 24]
TARGET = Costs(ROWS, [1 + 0.05 * (rows - 1) for rows in ROWS])
VOCAB = 12


class Clock:
    """Stands still unless a head's forward moves it."""

    now_s = 0.0

    def elapsed_s(self, function: Callable[[], object]) -> float:
        begin_s = self.now_s
        function()
        return self.now_s - begin_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(planner_module, "now_s", lambda: clock.now_s)
    monkeypatch.setattr(planner_module, "elapsed_s", clock.elapsed_s)
    return clock


class HeadOfFewWords:
    """Stands for a head with its context: in every row the likeliest tokens are 0, 1, 2 and so on. A forward takes time."""

    capacity = prompt_rows = 1 << 20
    num_sequences = 1

    def __init__(self, clock: Clock, forward_s: float) -> None:
        self.head = SimpleNamespace(token_ids=None, layers=(), stages=())
        self.backend = SimpleNamespace(max_rows=64)
        self.costs = Costs(ROWS, [forward_s * (1 + 0.02 * (rows - 1)) for rows in ROWS])
        self._clock = clock

    def begin(self, seq: Sequence, num_cached: int) -> None: ...

    def learn(self, seq: Sequence, hidden: object) -> None: ...

    def end(self, seq: Sequence) -> None: ...

    def can_draft(self, seq: Sequence) -> bool:
        return True

    def num_unfed(self, seq: Sequence) -> int:
        return 0

    def score(self, seqs: list[Sequence], drafted: list[DraftedRows | None], chunks: object = None) -> list[HeadRows]:
        numbers = [len(rows.tokens) + (rows.parents is not None) if rows else 1 for rows in drafted]
        self._clock.now_s += self.costs.forward_s(sum(numbers))
        logits = -np.arange(VOCAB, dtype=np.float32)
        return [HeadRows(np.tile(logits, (number, 1)), np.zeros((number, 1), np.float32)) for number in numbers]


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
        verdict = verify_greedy(draft, lambda row, come=come, depths=depths: come[depths[row]])
        clock.now_s += TARGET.forward_s(len(draft) + 1)
        branched.append(not draft.is_chain)
        seq.extend(verdict.tokens)
        planner.accept(seq, verdict, ())
    return (clock.now_s - begin_s) / (len(seq.tokens) - first), branched


def planner_of(clock: Clock, forward_s: float, rule: Any = draft_chains) -> Planner:
    context: Any = HeadOfFewWords(clock, forward_s)
    return Planner(TARGET, [], [(HeadProposer(context, rule, VOCAB, "head", 16), context.costs)])


@pytest.mark.parametrize(
    ("chances", "forward_s", "branches"),
    [((0.95, 0.02), 0.02, False), ((0.4, 0.35, 0.15), 0.02, True), ((0.45, 0.4, 0.1), 0.15, True), ((0.7, 0.02), 0.1, False)],
)
def test_a_tree_is_drafted_where_alternatives_are_worth_their_rows(
    clock: Clock, chances: tuple[float, ...], forward_s: float, branches: bool
) -> None:
    _, branched = seconds_a_token(planner_of(clock, forward_s), clock, chances)
    assert (np.mean(branched) > 0.8) == branches
    assert (np.mean(branched) < 0.2) == (not branches)


@pytest.mark.parametrize("chances", [(0.9, 0.05), (0.45, 0.35, 0.1), (0.4, 0.3, 0.1)])
def test_the_choice_is_no_worse_than_either_shape_alone(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, chances: tuple[float, ...]
) -> None:
    either, _ = seconds_a_token(planner_of(clock, 0.05), clock, chances)
    trees, _ = seconds_a_token(planner_of(clock, 0.05, draft_trees), clock, chances)
    monkeypatch.setattr(HeadProposer, "counted_ranks", lambda proposer: None)
    chains, branched = seconds_a_token(planner_of(clock, 0.05), clock, chances)
    assert not any(branched)
    assert either < 1.02 * min(chains, trees)
    assert either < 0.97 * max(chains, trees)


def test_a_head_that_is_never_right_is_left_alone(clock: Clock) -> None:
    seconds, _ = seconds_a_token(planner_of(clock, 0.1), clock, (0.0, 0.0))
    assert 1 <= seconds < 1.05


def test_trees_that_bring_less_than_their_ranks_say_come_to_an_end(clock: Clock) -> None:
    """The head believes in its likeliest token and is never right with it: below the wrong one its tree is of no use."""
    seconds, _ = seconds_a_token(planner_of(clock, 0.1), clock, (0.0, 0.0, 1.0))
    assert seconds < 1.05


def test_ranks_are_those_of_the_tokens_that_came() -> None:
    ranks, rng = Ranks(3), np.random.default_rng(1)
    offers = {path: [5, 6, 7, 8] for depth in range(3) for path in product((5, 6, 7, 8), repeat=depth)}
    for _ in range(500):
        ranks.record(offers, rng.choice([5, 6, 7, 8, 1], 3, p=[0.5, 0.3, 0.1, 0.05, 0.05]).tolist())
    for row in ranks.chances(0.5):
        assert np.abs(np.array(row) - [0.5, 0.3, 0.1, 0.05]).max() < 0.1
    (first, *others), (_, *usual) = ranks.chances(0.75)[0], ranks.chances(0.5)[0]
    assert first == pytest.approx(0.75, abs=0.1)
    assert sum(others) == pytest.approx(sum(usual) / 2, rel=0.2)  # half as often another one comes


def test_ranks_end_where_nothing_was_offered() -> None:
    assert Ranks(3).record({(): [5, 6, 7, 8], (5,): [6, 5, 7, 8]}, [5, 6, 1]) == (2, 2)
    assert Ranks(3).record({(): [5, 6, 7, 8]}, [7, 6]) == (0, 1)
    assert Ranks(1).record({(): [5], (5,): [5]}, [5, 5]) == (1, 1)


def trees(chances: list[list[float]], size: int) -> Iterator[list[tuple[int, ...]]]:
    """All trees of so many nodes, each the ranks on the way to it."""
    paths = [path for depth in range(1, len(chances) + 1) for path in product(range(len(chances[0])), repeat=depth)]
    return (list(some) for some in combinations(paths, size) if all(path[:-1] in some for path in some if len(path) > 1))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_of_all_trees_of_a_size_the_likeliest_is_chosen(size: int) -> None:
    chances = [[0.6, 0.25], [0.5, 0.3], [0.7, 0.1]]
    best = max(sum(np.prod([chances[d][r] for d, r in enumerate(path)]) for path in some) for some in trees(chances, size))
    flat = Costs([1, size + 1, size + 2], [1.0, 1.0, 100.0])
    option = best_tree(None, flat, chances, 16, lambda depth: 0.0)
    assert (option.num_tokens, option.tokens) == (size, pytest.approx(1 + best))


def test_a_tree_of_one_rank_is_a_chain() -> None:
    for rate in (0.3, 0.8):
        chain = best_length(None, TARGET, rate, 9, 0.07)
        tree = best_tree(None, TARGET, [[rate]] * 9, 9, lambda depth: 0.07 * depth)
        assert tree[1:3] == chain[1:3]
        assert tree.seconds == pytest.approx(chain.seconds)
        assert tree.depth == chain.num_tokens


def test_children_are_counted_as_trees_have_them() -> None:
    assert len(Ranks(2).chances(0.7)[0]) == CHILDREN

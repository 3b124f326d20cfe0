"""The round that engine and chains share, and what a user's own proposer may hand it."""

from typing import Any

import numpy as np
import pytest

from cpuspec.errors import ConfigError
from cpuspec.sampling import argmax
from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Cycle, Draft
from cpuspec.speculation.proposer import NullProposer
from cpuspec.speculation.round import speculate
from tests.toys import ToyBackend


class Fixed(NullProposer):
    """Hands out given drafts and remembers what it was told."""

    name = "fixed"

    def __init__(self, drafts: list[Draft], hidden_layers: tuple[int, ...] = ()) -> None:
        self.hidden_layers = hidden_layers
        self.told: list[tuple[list[int], list[int], tuple[int, ...]]] = []
        self.hidden: Any = None
        self._drafts = drafts

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        return self._drafts

    def accept(self, seq: Sequence, verdict: Any, hidden: Any) -> None:
        self.hidden = hidden
        self.told.append((list(seq.tokens), verdict.tokens, tuple(len(layer) for layer in hidden)))


def tree(tokens: list[int], parents: list[int]) -> Draft:
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), "fixed")


def one_sequence(context: Context, params: SamplingParams | None = None) -> Sequence:
    seq = Sequence.new(0, [0, 4, 5], params or SamplingParams())
    context.slots.acquire(seq)
    return seq


def test_a_round_commits_its_verdict_and_then_tells_the_proposer() -> None:
    model = ToyBackend(1, max_rows=64)
    right: list[int] = []
    for _ in range(2):
        right.append(int(argmax(model.row([0, 4, 5, *right]))))
    wrong = (right[1] + 1) % 8
    context, proposer = Context(model, 1, 64), Fixed([Draft.chain([right[0], wrong, 4], "fixed")], (0, 1))
    seq = one_sequence(context)
    (done,) = speculate(context, proposer, [seq], [3])
    assert done.verdict.tokens == right
    assert seq.tokens == [0, 4, 5, *right]
    assert proposer.told == [(seq.tokens, right, (4, 4))]  # rows up to the accepted token's, for each of two layers


def test_a_tree_hands_on_the_rows_of_its_accepted_path() -> None:
    """Logits that chose the verdict's tokens, hidden states of what stands: as if the path had been drafted alone."""
    model = ToyBackend(1, max_rows=64)
    right: list[int] = []
    for _ in range(3):
        right.append(int(argmax(model.row([0, 4, 5, *right]))))
    wrong = [(token + 1) % 8 for token in right]
    rounds, hidden = [], []
    for draft in (tree([wrong[0], right[0], wrong[1], right[1], right[1]], [-1, -1, 1, 0, 1]), Draft.chain(right[:2], "")):
        context, proposer = Context(model, 1, 64), Fixed([draft], (0, 1))
        seq = one_sequence(context)
        rounds += speculate(context, proposer, [seq], [5])
        assert proposer.told == [([0, 4, 5, *right], right, (5, 5))]
        hidden.append(proposer.hidden)
    np.testing.assert_array_equal(rounds[0].verdict.path, [1, 4])
    for number in range(3):
        np.testing.assert_array_equal(rounds[0].logits(number), rounds[1].logits(number))
    np.testing.assert_array_equal(hidden[0], hidden[1])


@pytest.mark.parametrize(("path", "num_positions"), [([], 3), ([0], 3), ([1], 2), ([0, 2], 3), ([0, 2, 3], 3), ([1, 4], 2)])
def test_a_cycle_counts_positions_on_the_longest_path_that_was_still_open(path: list[int], num_positions: int) -> None:
    draft = tree([4, 5, 6, 7, 4], [-1, -1, 0, 2, 1])
    (cycle,) = draft.verified(path)
    assert cycle == Cycle("fixed", 5, len(path), num_positions)


def test_a_draft_is_kept_to_what_one_forward_takes() -> None:
    limits: list[int] = []

    class Curious(NullProposer):
        def propose(self, seqs: list[Sequence], given: list[int]) -> list[Draft]:
            limits.extend(given)
            return super().propose(seqs, given)

    context = Context(ToyBackend(1, max_rows=4), 1, 64)
    seq = one_sequence(context)
    for limit in (9, 2):
        speculate(context, Curious(), [seq], [limit])
    assert limits == [3, 2]


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ([], "returned 0 drafts for 1 sequences"),
        ([Draft.chain([4, 4, 4], "fixed")], "drafted 3 tokens where at most 2 fit"),
        ([Draft.chain([8], "fixed")], r"ids must be in \[0, 8\)"),
        ([Draft.chain([-1], "fixed")], r"ids must be in \[0, 8\)"),
        ([tree([4, 4], [0, -1])], r"parents \[0, -1\]"),
        ([tree([4, 4], [-2, -1])], r"parents \[-2, -1\]"),
        ([tree([4, 4], [-1])], r"parents \[-1\]"),
    ],
)
def test_a_proposer_that_breaks_the_contract_is_a_clear_error(drafts: list[Draft], message: str) -> None:
    context = Context(ToyBackend(1), 1, 64)
    with pytest.raises(ConfigError, match=message):
        speculate(context, Fixed(drafts), [one_sequence(context)], [2])

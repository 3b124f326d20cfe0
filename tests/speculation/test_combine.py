"""Drafters that share a verification: who is asked, with what room, and the joint draft."""

from typing import Any

import numpy as np

from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams
from cpuspec.speculation.combine import Combined, first_hit, one_after_another
from cpuspec.speculation.draft import Cycle, Draft
from cpuspec.speculation.proposer import NullProposer
from cpuspec.speculation.verify import Verdict


class Scripted(NullProposer):
    """Drafts the given tokens as far as it may, and remembers what it was asked and told."""

    def __init__(self, name: str, tokens: dict[int, list[int]], layers: tuple[int, ...] = ()) -> None:
        self.name, self.hidden_layers = name, layers
        self.asked: list[tuple[int, list[int], int]] = []
        self.told: list[Any] = []
        self._tokens = tokens

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            self.asked.append((seq.id, list(seq.tokens), limit))
            tokens = self._tokens.get(seq.id, [])[:limit]
            drafts.append(Draft.chain(tokens, self.name, (Cycle(self.name, 1, 1, 1),)))
        return drafts

    def accept(self, seq: Sequence, verdict: Verdict, hidden: Any) -> None:
        self.told.append((verdict.tokens, [layer.tolist() for layer in hidden]))


def sequences() -> list[Sequence]:
    seqs = [Sequence.new(id, [id, 7], SamplingParams(temperature=1.0, seed=id)) for id in range(3)]
    for seq in seqs:
        seq.extend([5])
    return seqs


def test_the_first_that_finds_something_is_taken_and_only_the_rest_ask_further() -> None:
    first, second, third = Scripted("a", {0: [1, 2]}), Scripted("b", {0: [3], 1: [4, 4]}), Scripted("c", {2: [6]})
    combined = Combined((first, second, third), first_hit, "a,b,c")
    drafts = combined.propose(sequences(), [4, 1, 4])
    assert [(draft.source, draft.tokens.tolist()) for draft in drafts] == [("a", [1, 2]), ("b", [4]), ("c", [6])]
    assert [id for id, _, _ in second.asked] == [1, 2]
    assert [id for id, _, _ in third.asked] == [2]
    combined.propose(sequences(), [4, 0, 0])  # what may not draft asks nobody further
    assert [id for id, _, _ in second.asked] == [1, 2]


def test_each_continues_what_those_before_it_drafted_within_the_limit() -> None:
    first, second, third = Scripted("a", {0: [1, 2], 1: [3, 3]}), Scripted("b", {0: [4], 2: [8]}), Scripted("c", {0: [6] * 9})
    seqs = sequences()
    before = [list(seq.tokens) for seq in seqs]
    drafts = Combined((first, second, third), one_after_another, "a+b+c").propose(seqs, [5, 2, 3])
    assert [draft.tokens.tolist() for draft in drafts] == [[1, 2, 4, 6, 6], [3, 3], [8]]
    assert [draft.parents.tolist() for draft in drafts] == [[-1, 0, 1, 2, 3], [-1, 0], [-1]]
    assert [draft.source for draft in drafts] == ["a+b+c", "a", "b"]
    assert second.asked == [(0, [0, 7, 5, 1, 2], 3), (2, [2, 7, 5], 3)]
    assert third.asked == [(0, [0, 7, 5, 1, 2, 4], 2), (2, [2, 7, 5, 8], 2)]
    assert [list(seq.tokens) for seq in seqs] == before
    assert [[cycle.source for cycle in draft.cycles] for draft in drafts] == [["a", "b", "c"], ["a"], ["a", "b", "c"]]


def test_a_tree_is_continued_by_a_tree_but_nothing_continues_it() -> None:
    class Tree(NullProposer):
        def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
            return [Draft(np.array([4, 5, 6], np.int32), np.array([-1, -1, 1], np.int32), "tree") for _ in seqs]

    seqs = sequences()[:1]
    (draft,) = Combined((Scripted("a", {0: [1, 2]}), Tree()), one_after_another, "a+tree").propose(seqs, [5])
    assert (draft.tokens.tolist(), draft.parents.tolist()) == ([1, 2, 4, 5, 6], [-1, 0, 1, 1, 3])
    (draft,) = Combined((Tree(), Scripted("a", {0: [1, 2]})), one_after_another, "tree+a").propose(seqs, [5])
    assert draft.tokens.tolist() == [4, 5, 6]


def test_all_learn_each_from_the_layers_it_asked_for() -> None:
    first, second = Scripted("a", {}, layers=(3, 1)), Scripted("b", {}, layers=(2, 1))
    combined = Combined((first, second), first_hit, "a,b")
    assert combined.hidden_layers == (1, 2, 3)
    hidden = tuple(np.full((1, 2), layer, np.float32) for layer in combined.hidden_layers)
    combined.accept(sequences()[0], Verdict([4], []), hidden)
    assert first.told == [([4], [[[3, 3]], [[1, 1]]])]
    assert second.told == [([4], [[[2, 2]], [[1, 1]]])]

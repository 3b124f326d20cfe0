"""Truncate-and-feed: whatever happened before, a score is what a run from scratch would give."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuspec.errors import CacheError, ConfigError
from cpuspec.model.batch import ForwardBatch, ForwardOutput
from cpuspec.model.cache import KVCache
from cpuspec.sampling import argmax
from cpuspec.sequence import Sequence, shared_prefix
from cpuspec.settings import SamplingParams
from cpuspec.speculation.context import Context, PromptChunk
from cpuspec.speculation.draft import Draft
from tests.toys import ToyBackend

TOKENS = st.lists(st.integers(0, 3), max_size=6)  # few values, so that prefixes and repetitions are common


def sequence(id: int, tokens: list[int]) -> Sequence:
    return Sequence.new(id, tokens, SamplingParams())


def expected_rows(model: ToyBackend, tokens: list[int], draft: Draft) -> np.ndarray:
    return np.stack([model.row([*tokens, *draft.tokens_to(node)]) for node in range(-1, len(draft))])


@st.composite
def drafts(draw: st.DrawFn, max_tree: int) -> Draft:
    """A chain, or a tree that one forward takes."""
    tokens = draw(TOKENS)
    if len(tokens) > max_tree or draw(st.booleans()):
        return Draft.chain(tokens, "test")
    parents = [draw(st.integers(-1, node - 1)) for node in range(len(tokens))]
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), "test")


def path_to(draft: Draft, node: int) -> list[int]:
    """The nodes that lead to one, itself included."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(draft.parents[node])
    return path


@settings(max_examples=60)
@given(st.data())
def test_a_score_equals_a_run_from_scratch_after_any_history(data: st.DataObject) -> None:
    """Arrivals, chains and trees, rejections, rewritten sequences, departures and reused slots, in any order."""
    model = ToyBackend(3, memory=2.0, max_rows=data.draw(st.integers(1, 9)))
    num_slots = data.draw(st.integers(1, 3))
    context = Context(model, num_slots, capacity=64)
    alive: dict[int, Sequence] = {}
    for id in range(data.draw(st.integers(1, 15))):
        action = data.draw(st.sampled_from(["arrive", "score", "score", "depart", "run extended"]))
        if action == "arrive" and len(alive) < num_slots:
            alive[id] = sequence(id, [0, *data.draw(TOKENS)])
            context.slots.acquire(alive[id])
        elif action == "depart" and alive:
            context.slots.release(alive.pop(data.draw(st.sampled_from(sorted(alive)))))
        elif action == "run extended" and alive:  # as a chain does, whose tokens the target may reject
            seq = alive[data.draw(st.sampled_from(sorted(alive)))].with_drafted()
            seq.extend(data.draw(TOKENS))
            context.score([seq], [Draft.chain([], "test")])
        elif action == "score" and alive:
            seqs = list(alive.values())
            drafted = [data.draw(drafts(model.max_rows)) for _ in seqs]
            outputs = context.score(seqs, drafted, (0, 1))
            for seq, draft, output in zip(seqs, drafted, outputs, strict=True):
                np.testing.assert_array_equal(output.logits, expected_rows(model, seq.tokens, draft))
                tokens = [*seq.tokens, *draft.tokens.tolist()]
                positions = [*range(len(seq.tokens)), *(len(seq.tokens) - 1 + draft.depths).tolist()]
                for layer, hidden in enumerate(output.hidden):
                    assert len(hidden) > len(draft)
                    assert hidden[:, 0].tolist() == [token + layer for token in tokens[-len(hidden) :]]
                    assert hidden[:, 1].tolist() == [position + layer for position in positions[-len(hidden) :]]
                last = data.draw(st.integers(-1, len(draft) - 1))
                if not draft.is_chain and data.draw(st.booleans()):  # what is not kept is fed again
                    context.keep_path(seq, draft, path_to(draft, last))
                if len(seq.tokens) < 40:
                    seq.extend([*draft.tokens_to(last), data.draw(st.integers(0, 3))])


def test_only_what_the_slot_does_not_hold_is_fed() -> None:
    model = ToyBackend(1, max_rows=64)
    context = Context(model, 1, 64)
    seq = sequence(0, [0, 4, 5, 6])
    context.slots.acquire(seq)
    rows = []
    for draft, committed in (([4, 5], [4, 5, 7]), ([6], [5]), ([], [4])):
        before = model.num_rows
        context.score([seq], [Draft.chain(draft, "test")])
        rows.append(model.num_rows - before)
        seq.extend(committed)
    assert rows == [6, 2, 1]


def test_of_a_prompt_in_chunks_the_last_hidden_states_wait() -> None:
    for most, number in ((None, 30), (8, 10), (3, 6)):  # whole chunks, of 4 and the last one of 1, and the last token's row
        context = Context(ToyBackend(1, max_rows=64), 1, 64)
        seq = sequence(0, [0] * 30)
        context.slots.acquire(seq)
        while num_unfed := context.num_unfed(seq):
            context.score([], [], (0,), [PromptChunk(seq, min(num_unfed, 4))], most)
        (output,) = context.score([seq], [Draft.chain([], "test")], (0,), None, most)
        (hidden,) = output.hidden
        assert len(hidden) == number
        assert hidden[:, 1].tolist() == list(range(30 - number, 30))


def test_a_slot_with_the_longest_shared_prefix_is_reused_and_others_are_left_alone() -> None:
    context = Context(ToyBackend(1, max_rows=64), 3, 64)
    first, second = sequence(0, [0, 4, 5, 6, 7, 4]), sequence(1, [0, 4, 5, 5])
    assert context.slots.acquire(first) == context.slots.acquire(second) == 0
    slots = [context.slots.taken[seq.id].number for seq in (first, second)]
    context.score([first, second], [Draft.chain([], "test")] * 2)
    context.slots.release(first)
    context.slots.release(second)
    third = sequence(2, [0, 4, 5, 6, 7, 7, 7])
    assert context.slots.acquire(third) == 5
    assert context.slots.taken[2].number == slots[0]
    again = sequence(3, [0, 4, 5, 5])
    assert context.slots.acquire(again) == 3  # the last token's row is computed again
    stranger = sequence(4, [6, 6])
    assert context.slots.acquire(stranger) == 0
    assert context.slots.taken[4].number not in slots


def test_a_short_overlap_does_not_cost_another_conversation_its_slot() -> None:
    context = Context(ToyBackend(1, max_rows=64), 2, 64)
    first, second = sequence(0, [0, 4, 5, 6, 7]), sequence(1, [0, *[7] * 20])
    context.slots.acquire(first)
    context.score([first], [Draft.chain([], "test")])
    context.slots.release(first)
    assert context.slots.acquire(second) == 0  # one token of 21 in common
    context.slots.release(second)
    assert context.slots.acquire(sequence(2, first.tokens)) == 4


def test_a_full_context_and_a_tree_are_clear_errors() -> None:
    context = Context(ToyBackend(1), 1, 8)
    seq = sequence(0, [0] * 7)
    context.slots.acquire(seq)
    with pytest.raises(CacheError, match="all 1 cache slots are taken"):
        context.slots.acquire(sequence(1, [0]))
    with pytest.raises(CacheError, match="9 tokens do not fit a context of 8"):
        context.score([seq], [Draft.chain([4, 5], "test")])


def test_a_tree_of_more_rows_than_a_forward_takes_is_a_clear_error() -> None:
    context, seq = Context(ToyBackend(1, max_rows=2), 1, 64), sequence(0, [0] * 7)
    context.slots.acquire(seq)
    tree = Draft(np.array([4, 5, 6], np.int32), np.array([-1, -1, 0], np.int32), "test")
    with pytest.raises(ConfigError, match="a forward takes 2 rows, and test drafted a tree of 3 tokens"):
        context.score([seq], [tree])


def test_what_was_accepted_of_a_tree_is_not_fed_again() -> None:
    model = ToyBackend(1, max_rows=64)
    context, seq = Context(model, 1, 64), sequence(0, [0, 4, 5])
    context.slots.acquire(seq)
    tree = Draft(np.array([4, 5, 6, 7, 7], np.int32), np.array([-1, -1, 1, 1, 3], np.int32), "test")
    context.score([seq], [tree])
    context.keep_path(seq, tree, np.array([1, 3, 4], np.int32))
    seq.extend([5, 7, 7, 4])
    rows = model.num_rows
    (output,) = context.score([seq], [tree])
    assert model.num_rows - rows == 1 + 5
    np.testing.assert_array_equal(output.logits, expected_rows(model, seq.tokens, tree))


def test_noted_best_ids_are_those_of_the_rows_as_they_are_cut_or_padded() -> None:
    model, tokens = ToyBackend(1, max_rows=3), [0, 4, 5, 6, 7, 4, 5, 6]
    whole = model.forward

    def noting(batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        output = whole(batch, cache)
        return replace(output, best=argmax(output.logits).tolist())

    model.forward = noting  # type: ignore[method-assign]
    noted = {}
    for vocab_size in (8, 5, 11):
        context, seq = Context(model, 1, 64, vocab_size), sequence(0, tokens[:1])
        context.slots.acquire(seq)
        (output,) = context.score([seq], [Draft.chain(tokens[1:], "test")])
        noted[vocab_size] = output.best
        assert output.best in (None, argmax(output.logits).tolist())
    assert max(noted[8] or ()) >= 5
    assert noted[11] == noted[8]


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_the_shared_prefix_is_the_longest_one(first: list[int], second: list[int]) -> None:
    size = shared_prefix(first, second)
    assert first[:size] == second[:size]
    assert size == min(len(first), len(second)) or first[size] != second[size]

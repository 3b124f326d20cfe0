"""Matches, frequencies and drafts against definitions written out: every occurrence compared, every order of context counted."""

from fractions import Fraction
from functools import partial
from itertools import cycle, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.lookup import (
    END,
    INDEXED_AT_ONCE,
    MAX_MATCH,
    MAX_OCCURRENCES,
    RUNS,
    Evidence,
    IndexedText,
    Match,
    draft_likely,
    next_probs,
)
from cpuspec.speculation.drafters.lookups import LookupProposer

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=60)
NUM_AHEAD = 5


def text_of(tokens: list[int]) -> IndexedText:
    text = IndexedText()
    text.extend(tokens)
    return text


def agreement(first: list[int], second: list[int]) -> int:
    """How many last tokens two lists share, of those that a match looks at."""
    length = 0
    while length < min(len(first), len(second), MAX_MATCH) and first[-1 - length] == second[-1 - length]:
        length += 1
    return length


def all_matches(text: list[int], latest: list[int], num_following: int) -> list[Match]:
    """Every occurrence, the longest first, then the most recent; what follows reads on in itself or ends with END."""
    found = []
    for position in range(1, len(text)):
        path = list(text)
        while len(path) < position + num_following:
            path.append(path[position + len(path) - len(text)])
        following = path[position : position + num_following]
        following = following[: following.index(END)] if END in following else following
        found.append((agreement(text[:position], latest), position, following))
    return [Match(length, following) for length, _, following in sorted(found, reverse=True) if length]


def exact_probs(sources: list[Evidence], depth: int) -> dict[int, Fraction]:
    """`next_probs` by its definition, one order of context after the other, from the last source's shortest up."""
    probs: dict[int, Fraction] = {}
    for matches, strength in reversed(sources):
        live = [(match.length + depth, match.following[depth]) for match in matches if depth < len(match.following)]
        for order in range(1, max((length for length, _ in live), default=0) + 1):
            followers = [token for length, token in live if length >= order]
            total = len(followers) + Fraction(strength)
            probs = {
                token: (followers.count(token) + Fraction(strength) * probs.get(token, 0)) / total for token in {*probs, *followers}
            }
    return probs


def narrowed(sources: list[Evidence], path: list[int]) -> list[Evidence]:
    return [([match for match in matches if match.following[: len(path)] == path], strength) for matches, strength in sources]


def path_to(draft: Draft, node: int) -> list[int]:
    return [] if node < 0 else [*path_to(draft, int(draft.parents[node])), int(draft.tokens[node])]


@st.composite
def some_sources(draw: st.DrawFn) -> list[Evidence]:
    own, past = draw(TOKENS), draw(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=5))
    num_matches = draw(st.integers(1, 9))
    remembered = text_of([token for answer in past for token in [*answer, END]])
    text = text_of(own)
    return [(t.matches(text.latest, num_matches, NUM_AHEAD), strength) for t, strength in ((text, 4.0), (remembered, 8.0))]


@settings(max_examples=200)
@given(TOKENS, st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=4), st.integers(1, 9), st.integers(0, 40))
def test_matches_are_the_longest_and_latest_of_all_occurrences(
    own: list[int], past: list[list[int]], num_matches: int, num_forgotten: int
) -> None:
    text = text_of(own)
    assert text.matches(text.latest, num_matches, 4) == all_matches(own, own, 4)[:num_matches]
    answers = [token for answer in past for token in [*answer, END]]
    remembered = text_of(answers)
    remembered.forget(min(num_forgotten, len(answers)))
    assert remembered.matches(text.latest, num_matches, 4) == all_matches(answers[num_forgotten:], own, 4)[:num_matches]


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 9))
def test_a_match_before_a_change_goes_on_behind_what_was_changed(own: list[int], num_matches: int) -> None:
    before = own[-MAX_MATCH:-1]
    lengths = {end: agreement(own[:end], before) for end in range(1, len(own) - 1)}
    best = sorted((end for end in lengths if lengths[end] >= RUNS[0]), key=lambda end: (lengths[end], end), reverse=True)
    expected = [Match(RUNS[0], list(islice(cycle(own[end + 1 :]), NUM_AHEAD))) for end in best[:num_matches]]
    assert text_of(own).matches_before_a_change(num_matches, NUM_AHEAD) == expected


@pytest.mark.parametrize("size", RUNS)
def test_of_a_run_only_the_most_recent_occurrences_are_looked_at(size: int) -> None:
    run = list(range(1, size + 1))
    start = [0, *run]  # the longest match of all, and the oldest
    # The last occurrence is the one that is looked for. A run of one token more is found by itself where that is looked up, too.
    for num_others, length in ((MAX_OCCURRENCES - 2, size + 1), (MAX_OCCURRENCES, size if size + 1 not in RUNS else size + 1)):
        text = text_of([*start, *[9, *run] * num_others, *start])
        assert text.matches(text.latest, 1, 1)[0].length == length


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 9), TOKENS), max_size=12))
def test_what_is_forgotten_bit_by_bit_is_forgotten(changes: list[tuple[int, list[int]]]) -> None:
    text, tokens = text_of([]), list[int]()
    for num_forgotten, new in changes:
        text.extend(new)
        tokens += new
        text.forget(min(num_forgotten, len(tokens)))
        del tokens[:num_forgotten]
        assert len(text) == len(tokens)
        for latest in (new[-MAX_MATCH:], tokens[-MAX_MATCH:]):
            if latest:
                assert text.matches(latest, 4, 3) == all_matches(tokens, latest, 3)[:4]


@settings(max_examples=300)
@given(some_sources(), st.integers(0, NUM_AHEAD))
def test_probabilities_are_frequencies_smoothed_order_by_order(sources: list[Evidence], depth: int) -> None:
    probs = next_probs(sources, depth)
    assert probs == pytest.approx({token: float(prob) for token, prob in exact_probs(sources, depth).items()}, abs=1e-12)
    assert sum(probs.values()) < 1


@settings(max_examples=300)
@given(some_sources(), st.integers(0, NUM_AHEAD), st.sampled_from([0.0, 0.0517, 0.2113, 0.5031]))
def test_a_chain_takes_the_likeliest_tokens_while_they_are_likely(
    sources: list[Evidence], num_tokens: int, min_prob: float
) -> None:
    draft = draft_likely(sources, num_tokens, min_prob, "test")
    assert draft.is_chain
    assert draft.confidence is not None
    path: list[int] = []
    path_prob = 1.0
    for token, confidence in zip(draft.tokens.tolist(), draft.confidence.tolist(), strict=True):
        probs = exact_probs(narrowed(sources, path), len(path))
        assert float(probs[token]) == pytest.approx(float(max(probs.values())))
        assert confidence == pytest.approx(float(probs[token]), rel=1e-6)
        path_prob *= confidence
        assert path_prob >= min_prob
        path.append(token)
    if len(path) < num_tokens:
        rest = exact_probs(narrowed(sources, path), len(path))
        assert not rest or path_prob * float(max(rest.values())) < min_prob


@settings(max_examples=200)
@given(some_sources(), st.integers(1, 12), st.sampled_from([0.0217, 0.1013, 0.3071]))
def test_a_tree_is_made_of_the_likeliest_paths(sources: list[Evidence], num_tokens: int, min_prob: float) -> None:
    def paths(path: list[int], path_prob: float) -> dict[tuple[int, ...], float]:
        found: dict[tuple[int, ...], float] = {}
        if len(path) < NUM_AHEAD:
            for token, prob in exact_probs(narrowed(sources, path), len(path)).items():
                if path_prob * float(prob) >= min_prob:
                    found[(*path, token)] = path_prob * float(prob)
                    found |= paths([*path, token], path_prob * float(prob))
        return found

    draft = draft_likely(sources, num_tokens, min_prob, "test", tree=True)
    expected, drafted = paths([], 1.0), [tuple(path_to(draft, node)) for node in range(len(draft))]
    assert (draft.parents < np.arange(len(draft))).all()
    assert len(set(drafted)) == len(drafted)
    # Ties may go either way, so probabilities are compared, the likeliest first.
    assert [expected[path] for path in drafted] == pytest.approx(sorted(expected.values(), reverse=True)[:num_tokens])


@pytest.mark.parametrize("proposer", [LookupProposer("ngram", 8), LookupProposer("suffix", 8)], ids=["ngram", "suffix"])
def test_a_prediction_is_drafted_from_the_first_token_on_and_again_after_a_change(proposer: LookupProposer) -> None:
    prediction = list(range(100, 130))
    seq = Sequence.new(3, [1, 2, 3, 4], SamplingParams(), prediction=prediction)
    proposer.begin(seq, 0)

    def drafted() -> list[int]:
        (draft,) = proposer.propose([seq], [8])
        return draft.tokens.tolist()

    assert drafted() == prediction[:8]
    seq = seq.with_drafted()
    seq.extend([*prediction[:8], 55])
    before = drafted()
    assert before in ([], prediction[9:17])  # suffix decoding goes on behind a change at once
    seq.extend(prediction[9:12])
    found = drafted()  # shorter after a short match
    assert len(found) >= 3
    assert found == prediction[12 : 12 + len(found)]
    seq = Sequence.new(3, [1, 2, 3, 4], SamplingParams(), prediction=prediction)
    assert drafted() == prediction[:8]
    plain = Sequence.new(4, [1, 2, 3, 4], SamplingParams())
    proposer.begin(plain, 0)
    assert not len(proposer.propose([plain], [8])[0])


@pytest.mark.parametrize("grows", [False, True])
def test_a_long_text_is_indexed_in_parts_and_then_matches_as_a_short_one_does(grows: bool) -> None:
    size = INDEXED_AT_ONCE
    tokens = [*range(10, 20), *np.random.default_rng(0).integers(20, 10**6, 3 * size).tolist(), *range(10, 15)]
    text, before = IndexedText([] if grows else tokens), 0
    if grows:
        text.extend(tokens)
    found = []
    while (num_indexed := len(text._runs[0].before)) < len(tokens):
        assert num_indexed <= before + size
        before = num_indexed
        found.append(text.matches(text.latest, 1, 5))
    assert [match.following for match in found[-1]] == [[15, 16, 17, 18, 19]]
    assert len(found) >= 3
    text.forget(size)
    assert len(text.tokens) - len(text._runs[0].before) >= size
    assert text.matches([15, 16], 1, 2) == []  # forgotten


LOOKUPS = {
    f"{name}{':tree' if tree else ''}": lambda kind=kind, tree=tree: kind(8, 0.0, tree=tree)
    for name, kind in (("ngram", partial(LookupProposer, "ngram")), ("suffix", partial(LookupProposer, "suffix")))
    for tree in (False, True)
}


@pytest.mark.parametrize("kind", LOOKUPS)
@settings(max_examples=60)
@given(TOKENS, st.lists(st.tuples(TOKENS, TOKENS), max_size=6))
def test_a_sequence_with_drafted_tokens_between_is_drafted_for_like_a_fresh_one(
    kind: str, prompt: list[int], rounds: list[tuple[list[int], list[int]]]
) -> None:
    proposer, seq = LOOKUPS[kind](), Sequence.new(7, prompt, SamplingParams())
    proposer.begin(seq, 0)
    for drafted, new in rounds:
        proposer.propose([seq.with_drafted(drafted)], [6])
        seq.extend(new)
        fresh, alone = LOOKUPS[kind](), Sequence.new(7, seq.tokens, SamplingParams())
        fresh.begin(alone, 0)
        (got,), (expected,) = proposer.propose([seq], [6]), fresh.propose([alone], [6])
        assert (got.tokens.tolist(), got.parents.tolist()) == (expected.tokens.tolist(), expected.parents.tolist())
        np.testing.assert_array_equal(np.array(got.confidence), np.array(expected.confidence))


@pytest.mark.parametrize("kind", LOOKUPS)
def test_sequences_do_not_see_each_other_and_ended_ones_are_forgotten(kind: str) -> None:
    proposer = LOOKUPS[kind]()
    seqs = [Sequence.new(0, [4, 5, 4], SamplingParams()), Sequence.new(1, [5, 4], SamplingParams())]
    for seq in seqs:
        proposer.begin(seq, 0)
    assert [draft.tokens.tolist()[:1] for draft in proposer.propose(seqs, [2, 2])] == [[5], []]
    for seq in (*seqs, Sequence.new(2, [4], SamplingParams())):  # the last one was aborted before it began
        proposer.end(seq)
    assert not proposer._texts

"""A sequence that was rewound is the sequence that never went further, and it knows which of its tokens stand since when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuspec.config import SamplingParams
from cpuspec.sequence import Sequence, shared_prefix

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=8)
CHANGES = st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), max_size=5)), max_size=5)  # taken back, committed


@given(TOKENS, TOKENS, TOKENS)
def test_a_rewound_sequence_has_the_tokens_and_the_history_of_one_that_never_went_further(
    prompt: list[int], kept: list[int], retracted: list[int]
) -> None:
    seq, fresh = (Sequence.new(0, prompt, SamplingParams()) for _ in range(2))
    seq.extend(kept)
    seq.extend(retracted)
    seq.rewind(len(prompt) + len(kept))
    fresh.extend(kept)
    assert seq.tokens == fresh.tokens
    for ahead in ([], [0, 1]):
        seen, generated, counts = seq.history.counts(ahead)
        seen_fresh, generated_fresh, counts_fresh = fresh.history.counts(ahead)
        assert set(seen) == set(seen_fresh)
        assert dict(zip(generated, counts, strict=True)) == dict(zip(generated_fresh, counts_fresh, strict=True))


def test_a_rewind_never_reaches_the_prompt_or_beyond_the_end() -> None:
    seq = Sequence.new(0, [4, 5], SamplingParams())
    for length in (1, 3):
        with pytest.raises(AssertionError, match="generated tokens only"):
            seq.rewind(length)


@given(CHANGES, CHANGES)
def test_unchanged_tokens_are_those_that_a_comparison_finds(
    before: list[tuple[int, list[int]]], since: list[tuple[int, list[int]]]
) -> None:
    seq = Sequence.new(0, [0], SamplingParams())

    def change(num_back: int, new: list[int], offset: int) -> None:
        if num_back:
            seq.rewind(max(1, len(seq.tokens) - num_back))
        seq.extend([token + offset for token in new])

    for num_back, new in before:
        change(num_back, new, 0)
    mark, then = seq.mark(), list(seq.tokens)
    assert seq.unchanged(mark) == len(then)
    for num_back, new in since:
        change(num_back, new, 10)  # other tokens than before
    assert seq.unchanged(mark) == shared_prefix(then, seq.tokens)

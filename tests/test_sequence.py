"""What a sequence says about its own changes is what comparing tokens would find."""

from hypothesis import given
from hypothesis import strategies as st

from cpuspec.config import SamplingParams
from cpuspec.sequence import Sequence, shared_prefix

CHANGES = st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), max_size=5)), max_size=5)  # taken back, committed


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

"""Drafted tokens stand behind a sequence in another one, and change nothing of it."""

from hypothesis import given
from hypothesis import strategies as st

from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=8)
PENALISED = SamplingParams(frequency_penalty=0.5)


def counted(seq: Sequence, extended: list[int]) -> tuple[set[int], dict[int, int]]:
    assert seq.history
    seen, generated, counts = seq.history.counts(extended)
    return set(seen.tolist()), dict(zip(generated.tolist(), counts.tolist(), strict=True))


@given(TOKENS, TOKENS, TOKENS, TOKENS)
def test_a_sequence_with_tokens_ahead_is_like_one_that_committed_them_and_leaves_the_first_as_it_was(
    prompt: list[int], committed: list[int], drafted: list[int], more: list[int]
) -> None:
    seq, alone, whole = (Sequence.new(0, prompt, PENALISED) for _ in range(3))
    seq.extend(committed)
    alone.extend(committed)
    whole.extend([*committed, *drafted, *more])
    extended = seq.with_drafted(drafted).with_drafted()
    extended.extend(more)
    for one, other in ((extended, whole), (seq, alone)):
        assert one.tokens == other.tokens
        assert counted(one, []) == counted(other, [])
        assert counted(one, [0, 1]) == counted(other, [0, 1])
    assert (extended.num_committed, seq.num_committed) == (len(seq.tokens), len(seq.tokens))

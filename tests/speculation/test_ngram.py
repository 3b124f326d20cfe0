"""Prompt lookup against a search that rescans everything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams
from cpuspec.speculation.drafters.lookup import MAX_MATCH, STRENGTH
from cpuspec.speculation.drafters.lookups import LookupProposer
from cpuspec.speculation.verify import Verdict

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def rescanned(tokens: list[int], num_tokens: int) -> list[int]:
    """The longest suffix's latest earlier occurrence by brute force; the draft may read on in itself."""
    for size in range(MAX_MATCH, 0, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                path = list(tokens)
                while len(path) < len(tokens) + num_tokens:
                    path.append(path[start + size + len(path) - len(tokens)])
                return path[len(tokens) :]
    return []


@settings(max_examples=150)
@given(TOKENS, st.lists(TOKENS, max_size=6))
def test_drafts_equal_a_full_rescan_after_every_round(prompt: list[int], rounds: list[list[int]]) -> None:
    proposer, seq = LookupProposer("ngram", 4, min_prob=0.0), Sequence.new(7, prompt, SamplingParams())
    proposer.begin(seq, 0)
    for new in rounds:
        (draft,) = proposer.propose([seq], [3])
        assert draft.tokens.tolist() == rescanned(seq.tokens, 3)
        seq.extend(new)
        proposer.accept(seq, Verdict(new, list(range(len(new) - 1))), ())
    assert proposer.propose([seq], [9])[0].tokens.tolist() == rescanned(seq.tokens, 4)


def test_a_repetition_is_carried_on_beyond_its_end() -> None:
    proposer, seq = LookupProposer("ngram"), Sequence.new(0, [5, 6, 7] * 3, SamplingParams())
    proposer.begin(seq, 0)
    assert proposer.propose([seq], [9])[0].tokens.tolist() == [5, 6, 7, 5, 6, 7, 5]


def test_each_token_that_agrees_makes_the_next_one_likelier_and_an_unlikely_draft_ends() -> None:
    for prompt, min_prob, length, num_tokens in (([4, 9, 9, 9, 4], 0.0, 1, 7), ([3, 4, 9, 9, 9, 3, 4], 0.15, 2, 2)):
        proposer, seq = LookupProposer("ngram", min_prob=min_prob), Sequence.new(0, prompt, SamplingParams())
        proposer.begin(seq, 0)
        (draft,) = proposer.propose([seq], [9])
        confidence = [1 - (STRENGTH / (STRENGTH + 1)) ** (length + i) for i in range(num_tokens)]
        assert draft.confidence is not None
        assert draft.confidence.tolist() == pytest.approx(confidence, rel=1e-6)


def test_a_tree_has_the_latest_occurrence_and_the_other_ones_beside_it() -> None:
    prompt = [4, 5, 6, 9, 4, 5, 6, 8, 4, 5, 7, 4, 5]
    tree, chain = LookupProposer("ngram", 6, min_prob=0.0, tree=True), LookupProposer("ngram", 2, min_prob=0.0)
    seq = Sequence.new(0, prompt, SamplingParams())
    drafts = []
    for proposer in (tree, chain):
        proposer.begin(seq, 0)
        drafts += proposer.propose([seq], [6])
    paths = [drafts[0].tokens_to(node) for node in range(6)]
    assert drafts[1].tokens.tolist() == [7, 4]
    assert all(path in paths for path in ([6], [6, 8], [6, 9], [7], [7, 4]))
    # Twice 6, once 7: the more frequent one is tried first.
    assert paths.index([6]) < paths.index([7])

"""Chains against the target's own distribution, enumerated exactly, and what a chain does with limits, batches and retractions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from cpuspec.sampling import TokenHistory, argmax, confidence, distribution
from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.combine import Combined, Rule, first_hit, one_after_another
from cpuspec.speculation.context import Context
from cpuspec.speculation.drafters.lookups import LookupProposer
from cpuspec.speculation.proposer import NullProposer, Proposer
from tests.conformance.harness import let_drafts_through
from tests.speculation.exact import ExactContext, ExactSource, check_draws
from tests.toys import ToyBackend


def exact_chain(depth: int, vocab: int, with_source: bool = True, min_confidence: float = 0) -> Proposer:
    """`depth` models, each verified by the next, the lowest over a source or alone; limits decide how long drafts are."""
    proposer: Proposer = ExactSource(vocab) if with_source else NullProposer()
    for level in range(depth):
        proposer = ChainProposer(proposer, ExactContext(level, vocab), f"level{level}", 9, min_confidence)  # type: ignore[arg-type]
    return proposer


# models, vocabulary, limit, length: each level has a token less to draft than the one above, and all of these draft at every level
CASES = ((1, 3, 2, 3), (2, 2, 3, 4), (3, 2, 3, 4))
every_case = pytest.mark.parametrize(("depth", "vocab", "limit", "length"), CASES)


@pytest.mark.usefixtures("exact_rows")
@every_case
@pytest.mark.parametrize("min_confidence", [0, 0.6])
@pytest.mark.parametrize("with_source", [True, False])
def test_a_chain_of_any_depth_yields_exactly_the_targets_distribution(
    with_source: bool, min_confidence: float, depth: int, vocab: int, limit: int, length: int
) -> None:
    chain = exact_chain(depth, vocab, with_source and depth < 3, min_confidence=min_confidence)
    check_draws(chain, vocab, limit, length)


@pytest.mark.usefixtures("exact_rows")
def test_the_enumeration_catches_a_round_that_lets_a_drafted_token_through(monkeypatch: pytest.MonkeyPatch) -> None:
    let_drafts_through(monkeypatch)
    with pytest.raises(AssertionError):
        check_draws(exact_chain(1, 3), 3, 2, 3)


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize("rule", [first_hit, one_after_another])
def test_drafters_that_share_a_verification_yield_exactly_the_targets_distribution(rule: Rule) -> None:
    """A source whose drafts end by themselves, sometimes at once, and a model: alone, and verified by another model."""
    drafters = (ExactSource(2, stops=True), exact_chain(1, 2, with_source=False))
    combined = Combined(drafters, rule, "both")
    check_draws(combined, 2, 2, 4)
    check_draws(ChainProposer(combined, ExactContext(1, 2), "level1", 9), 2, 3, 4)  # type: ignore[arg-type]


def drafting(
    inner: Proposer,
    params: list[SamplingParams],
    draft_vocab: int = 8,
    vocab: int = 8,
    capacity: int = 64,
    **settings: Any,
) -> tuple[ChainProposer, list[Sequence], ToyBackend]:
    """A draft model over `inner` that has begun with one sequence for each of `params`, and has seen some of their output."""
    model = ToyBackend(3, draft_vocab, memory=0.4, max_rows=64)
    chain = ChainProposer(inner, Context(model, len(params), capacity, vocab), "toy", **settings)
    seqs = [Sequence.new(id, [0, 4, 5, 4, 5][: 3 + id], one) for id, one in enumerate(params)]
    for seq in seqs:
        chain.begin(seq, 0)
        seq.extend([4, 5])
    return chain, seqs, model


INNER = {"none": NullProposer, "ngram": partial(LookupProposer, "ngram")}
every_inner = pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
PENALISED = SamplingParams(temperature=0.9, top_k=6, frequency_penalty=0.6, repetition_penalty=1.2, logit_bias={3: 1.5}, seed=5)


@every_inner
def test_a_greedy_draft_is_the_models_own_greedy_continuation(inner: Callable[[], Proposer]) -> None:
    chain, (seq,), model = drafting(inner(), [SamplingParams()], num_tokens=6)
    expected = list(seq.tokens)
    for limit in (6, 0, 1, 3, 99):
        (draft,) = chain.propose([seq], [limit])
        while len(expected) < len(seq.tokens) + 6:
            expected.append(int(argmax(model.row(expected))))
        assert draft.tokens.tolist() == expected[len(seq.tokens) :][:limit]


@every_inner
def test_a_sampled_draft_is_what_the_model_alone_draws_at_its_places(inner: Callable[[], Proposer]) -> None:
    chain, (seq,), model = drafting(inner(), [PENALISED], num_tokens=5)
    drawn = [*seq.tokens]
    while len(drawn) < len(seq.tokens) + 9:
        drawn.append(own_draw(model, seq, drawn))
    for limit in (5, 2):
        (draft,) = chain.propose([seq], [limit])
        assert draft.tokens.tolist() == drawn[len(seq.tokens) :][:limit]
        seq.extend(draft.tokens.tolist()[:2])


def own_draw(model: ToyBackend, seq: Sequence, path: list[int]) -> int:
    """The token that the model draws behind the path, with the sequence's random numbers of that place."""
    history = TokenHistory(path[: seq.num_prompt_tokens])
    history.extend(path[seq.num_prompt_tokens :])
    return seq.draws.draw(distribution(model.row(path)[:8], seq.params, history), len(path) - seq.num_prompt_tokens)


def test_inner_drafts_save_forwards_and_their_verifications_are_handed_up_for_metrics() -> None:
    plain, (seq,), model = drafting(NullProposer(), [SamplingParams()], num_tokens=20)
    (expected,) = plain.propose([seq], [20])
    chain, (seq,), fewer = drafting(LookupProposer("ngram"), [SamplingParams()], num_tokens=20)
    (draft,) = chain.propose([seq], [20])
    assert draft.tokens.tolist() == expected.tokens.tolist()
    assert len(draft.cycles) == fewer.num_forwards < model.num_forwards == 20
    assert {cycle.source for cycle in draft.cycles} == {"ngram"}
    assert sum(cycle.num_accepted_tokens + 1 for cycle in draft.cycles) == 20


@pytest.mark.parametrize("params", [SamplingParams(), PENALISED], ids=["greedy", "sampled"])
@every_inner
def test_an_unsure_draft_ends_with_the_token_drawn_from_the_first_unsure_row(
    inner: Callable[[], Proposer], params: SamplingParams
) -> None:
    lengths = set()
    for tail in range(8):
        chain, (seq,), model = drafting(inner(), [params], num_tokens=9, min_confidence=0.3)
        seq.extend([tail])
        (draft,) = chain.propose([seq], [9])
        path = [*seq.tokens, *draft.tokens.tolist()]
        unsure = [confidence(model.row(path[:i])) < 0.3 for i in range(len(seq.tokens), len(path))]
        assert unsure == [False] * (len(draft) - 1) + [len(draft) < 9 or unsure[-1]]
        lengths.add(len(draft))
    assert len(lengths) > 2


@pytest.mark.parametrize("params", [SamplingParams(), PENALISED], ids=["greedy", "sampled"])
@every_inner
def test_with_floors_a_draft_says_how_sure_its_rows_are_and_ends_where_the_path_is_unlikely(
    inner: Callable[[], Proposer], params: SamplingParams
) -> None:
    lengths = set()
    for tail in range(8):
        chain, (seq,), model = drafting(inner(), [params], num_tokens=9)
        seq.extend([tail])
        (draft,) = chain.propose([seq], [9], [[0.0] + [0.1] * 9])
        path = [*seq.tokens, *draft.tokens.tolist()]
        sure = [confidence(model.row(path[:i])) for i in range(len(seq.tokens), len(path))]
        assert draft.confidence is not None
        assert draft.confidence.tolist() == pytest.approx(sure, rel=1e-5)
        likely = np.cumprod(sure)
        assert (likely[:-1] >= 0.1).all()
        assert likely[-1] < 0.1 or len(draft) == 9
        lengths.add(len(draft))
    assert len(lengths) > 1


@pytest.mark.parametrize("draft_vocab", [6, 11])
def test_a_padded_vocabulary_is_cut_or_padded_before_anything_is_drawn(draft_vocab: int) -> None:
    chain, (seq,), model = drafting(NullProposer(), [PENALISED], draft_vocab, num_tokens=6)
    (draft,) = chain.propose([seq], [6])
    path = [*seq.tokens, *draft.tokens.tolist()]
    assert path[5:] == [own_draw(model, seq, path[:i]) for i in range(5, len(path))]
    assert max(path) < min(draft_vocab, 8)


def test_a_token_that_the_draft_model_does_not_know_ends_drafting_for_its_sequence_alone() -> None:
    chain, seqs, _ = drafting(NullProposer(), [SamplingParams()] * 2, draft_vocab=6)
    seqs[0].extend([7])
    assert [len(draft) for draft in chain.propose(seqs, [3, 3])] == [0, 3]


def test_drafts_end_where_the_draft_models_context_does() -> None:
    chain, (seq,), _ = drafting(NullProposer(), [SamplingParams()], capacity=9, num_tokens=9)
    lengths = []
    while len(seq.tokens) < 14:
        (draft,) = chain.propose([seq], [6])
        lengths.append(len(draft))
        seq.extend([4])
    assert lengths == [5, 4, 3, 2, 1, 0, 0, 0, 0]

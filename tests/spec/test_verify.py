"""Exact rational enumeration: the verifiers' outputs are distributed as the target, with no tolerance."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from cpuspec.sampling import sample
from cpuspec.spec.draft import Draft
from cpuspec.spec.verify import Verdict, verify_greedy, verify_sampled
from tests.oracles import enumerate_exactly, total_variation

VOCAB = 3
Rows = Callable[[tuple[int, ...]], np.ndarray]


def rational_rows(seed: int, allow_zeros: bool = False) -> Rows:
    """For every path of tokens a distribution of small fractions."""
    rows: dict[tuple[int, ...], np.ndarray] = {}
    rng = np.random.default_rng(seed)
    for length in range(4):
        for path in product(range(VOCAB), repeat=length):
            weights = rng.integers(0 if allow_zeros else 1, 8, VOCAB)
            weights[rng.integers(VOCAB)] += 1
            rows[path] = np.array([Fraction(int(w), int(weights.sum())) for w in weights], object)
    return rows.__getitem__


def draw(rows: Rows, num_tokens: int, rng: Any) -> Draft:
    """Autoregressive drafting with its own rows."""
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(sample(rows(tuple(tokens)), rng))
    return Draft.chain(tokens, "test", tuple(rows(tuple(tokens[:i])) for i in range(num_tokens)))


def greedy_draft(rows: Rows, num_tokens: int, rng: Any) -> Draft:
    """The likeliest tokens, declared as what they are: chosen without a draw."""
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(max(range(VOCAB), key=lambda t: rows(tuple(tokens))[t]))
    return Draft.chain(tokens, "test")


def cut(draft: Draft, length: int) -> Draft:
    return Draft.chain(draft.tokens[:length].tolist(), draft.source, None if draft.probs is None else draft.probs[:length])


def stop_before_an_unsure_draw(rows: Rows, num_tokens: int, rng: Any) -> Draft:
    draft = draw(rows, num_tokens, rng)
    assert draft.probs is not None
    unsure = [i for i, row in enumerate(draft.probs) if max(row) < Fraction(1, 2)]
    return cut(draft, unsure[0] if unsure else num_tokens)


def keep_the_unsure_token_then_stop(rows: Rows, num_tokens: int, rng: Any) -> Draft:
    draft = draw(rows, num_tokens, rng)
    assert draft.probs is not None
    unsure = [i for i, row in enumerate(draft.probs) if row[draft.tokens[i]] < max(row)]
    return cut(draft, unsure[0] + 1 if unsure else num_tokens)


def drop_the_unsure_token(rows: Rows, num_tokens: int, rng: Any) -> Draft:
    draft = draw(rows, num_tokens, rng)
    assert draft.probs is not None
    unsure = [i for i, row in enumerate(draft.probs) if row[draft.tokens[i]] < max(row)]
    return cut(draft, unsure[0] if unsure else num_tokens)


def declare_other_rows(rows: Rows, num_tokens: int, rng: Any) -> Draft:
    draft, other = draw(rows, num_tokens, rng), rational_rows(99)
    return Draft.chain(draft.tokens.tolist(), "test", tuple(other(tuple(draft.tokens[:i].tolist())) for i in range(num_tokens)))


def declare_a_drawn_token_chosen(rows: Rows, num_tokens: int, rng: Any) -> Draft:
    """Not a mistake: given the tokens, a point mass describes how they came to be verified."""
    return Draft.chain(draw(rows, num_tokens, rng).tokens.tolist(), "test")


def verify_from_the_target_row(draft: Draft, target_probs: Callable[[int], np.ndarray], rng: Any) -> Verdict:
    """The mistake of resampling from the target after a rejection."""
    assert draft.probs is not None
    for i, token in enumerate(draft.tokens.tolist()):
        if not rng.random() * draft.probs[i][token] < target_probs(i)[token]:
            return Verdict([*draft.tokens[:i].tolist(), sample(target_probs(i), rng)], np.arange(i, dtype=np.int32))
    return Verdict([*draft.tokens.tolist(), sample(target_probs(len(draft)), rng)], np.arange(len(draft), dtype=np.int32))


def distance(
    drafting: Callable[..., Draft], num_tokens: int, seed: int, verifier: Callable[..., Verdict] = verify_sampled
) -> Fraction:
    """Total variation between n + 1 tokens of one round, completed by the target where it ended early, and the target."""
    target, draft_rows = rational_rows(seed, allow_zeros=True), rational_rows(seed + 1000)

    def one_round(rng: Any) -> tuple[int, ...]:
        draft = drafting(draft_rows, num_tokens, rng)
        path = tuple(draft.tokens.tolist())
        return tuple(verifier(draft, lambda i: target(path[:i]), rng).tokens)

    def continuations(path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Fraction]]:
        if len(path) == num_tokens + 1:
            yield path, Fraction(1)
        else:
            for token in range(VOCAB):
                yield from ((string, target(path)[token] * prob) for string, prob in continuations((*path, token)))

    speculative: dict[tuple[int, ...], Fraction] = {}
    for tokens, prob in enumerate_exactly(one_round).items():
        for string, rest in continuations(tokens):
            speculative[string] = speculative.get(string, Fraction(0)) + prob * rest
    return total_variation(speculative, dict(continuations(())))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "drafting",
    [draw, greedy_draft, declare_a_drawn_token_chosen, stop_before_an_unsure_draw, keep_the_unsure_token_then_stop],
)
def test_sampled_verification_yields_exactly_the_target_distribution(drafting: Callable[..., Draft], num_tokens: int) -> None:
    for seed in range(3):
        assert distance(drafting, num_tokens, seed) == 0


@pytest.mark.parametrize("drafting", [drop_the_unsure_token, declare_other_rows])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_the_enumeration_catches_a_draft_that_lies_about_its_rows(drafting: Callable[..., Draft], num_tokens: int) -> None:
    assert all(distance(drafting, num_tokens, seed) > Fraction(1, 1000) for seed in range(3))


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_the_enumeration_catches_resampling_from_the_target_row(num_tokens: int) -> None:
    assert all(distance(draw, num_tokens, seed, verify_from_the_target_row) > Fraction(1, 1000) for seed in range(3))


@pytest.mark.parametrize("tokens", [[], [0], [2, 1, 0], [1, 1, 1]])
def test_a_seed_gives_the_same_tokens_whatever_point_masses_were_drafted(tokens: list[int]) -> None:
    """And takes as many draws, so that the next round goes on alike. Drafts with rows use draws of their own."""
    target = rational_rows(5)
    for seed in range(20):
        rng, plain_rng = np.random.default_rng(seed), np.random.default_rng(seed)
        verdict = verify_sampled(Draft.chain(tokens, "test"), lambda i: target(tuple(tokens[:i])).astype(float), rng)
        plain: list[int] = []
        while len(plain) < len(verdict.tokens):
            plain.append(sample(target(tuple(plain)).astype(float), plain_rng))
        assert verdict.tokens == plain
        assert rng.random() == plain_rng.random()


def test_a_token_is_accepted_with_the_overlap_of_both_distributions() -> None:
    target, draft_rows = rational_rows(1), rational_rows(2)
    accepted = enumerate_exactly(lambda rng: len(verify_sampled(draw(draft_rows, 1, rng), lambda i: target((0,) * i), rng).path))
    assert accepted[1] == sum(np.minimum(target(()), draft_rows(())))


def test_sampled_verification_asks_for_no_row_after_a_rejection() -> None:
    asked: list[int] = []

    def target(i: int) -> np.ndarray:
        asked.append(i)
        return np.array([0.0, 1.0, 0.0])

    verdict = verify_sampled(Draft.chain([0, 1, 1], "test"), target, np.random.default_rng(0))
    assert (verdict.tokens, asked) == ([1], [0])


def test_rows_equal_up_to_rounding_still_yield_a_token() -> None:
    row = np.array([0.3, 0.7])

    class AlmostOne:
        def random(self) -> float:
            return 1 - 2.0**-53

    draft = Draft.chain([1], "test", (np.array([0.3, np.nextafter(0.7, 1)]),))
    larger = np.array([np.nextafter(0.3, 0), 0.7])
    for target in (row, larger):
        assert len(verify_sampled(draft, lambda i, target=target: target, AlmostOne()).tokens) >= 1


@pytest.mark.parametrize("num_right", range(5))
def test_greedy_verification_keeps_the_agreeing_prefix_and_adds_the_targets_choice(num_right: int) -> None:
    choices = [4, 2, 7, 1, 5]
    tokens = [choice if i < num_right else choice + 1 for i, choice in enumerate(choices[:4])]
    verdict = verify_greedy(Draft.chain(tokens, "test"), choices.__getitem__)
    assert verdict.tokens == choices[: num_right + 1]
    assert verdict.path.tolist() == list(range(num_right))

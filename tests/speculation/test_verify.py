"""Exact rational enumeration: the verifiers' outputs are distributed as the target, with no tolerance."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from cpuspec.sampling import Row, SparseRow, sample
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.verify import Verdict, verify_block, verify_greedy, verify_sampled
from tests.oracles import enumerate_exactly, total_variation

VOCAB = 3
Rows = Callable[[tuple[int, ...]], np.ndarray]


def rational_rows(seed: int, allow_zeros: bool = False) -> Rows:
    """For every path of tokens a distribution of small fractions."""
    rows: dict[tuple[int, ...], np.ndarray] = {}
    rng = np.random.default_rng(seed)
    for length in range(6):
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


def draw_tree(parents: list[int], replacement: bool = False, declare_without: bool = True) -> Callable[..., Draft]:
    """Drafting a tree: the alternatives after each node drawn one after another, each from what the earlier ones left."""

    def drafting(rows: Rows, num_tokens: int, rng: Any) -> Draft:
        tokens: list[int] = []
        probs: list[np.ndarray] = []
        tree = Draft(np.array([], np.int32), np.array(parents, np.int32), None, "test")
        for node, parent in enumerate(parents):
            whole = row = rows(tuple(tree.tokens_to(parent)))
            if not replacement:
                row = whole.copy()
                row[[tokens[other] for other in range(node) if parents[other] == parent]] = 0
                row = row / row.sum()
            tokens.append(sample(row, rng))
            probs.append(row if declare_without else whole)
            tree = Draft(np.array(tokens, np.int32), np.array(parents, np.int32), tuple(probs), "test")
        return tree

    return drafting


def point_mass_tree(parents: list[int]) -> Callable[..., Draft]:
    """A tree whose tokens look at the rows and at no draw."""

    def drafting(rows: Rows, num_tokens: int, rng: Any) -> Draft:
        tokens: list[int] = []
        for node, parent in enumerate(parents):
            tree = Draft(np.array(tokens, np.int32), np.array(parents, np.int32), None, "test")
            row, nth = rows(tuple(tree.tokens_to(parent))), parents[:node].count(parent)
            tokens.append(sorted(range(VOCAB), key=lambda t: -row[t])[nth])
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), None, "test")

    return drafting


def verify_from_the_target_row(draft: Draft, target_probs: Callable[[int], np.ndarray], rng: Any) -> Verdict:
    """The mistake of resampling from the target after a rejection."""
    assert draft.probs is not None
    for i, token in enumerate(draft.tokens.tolist()):
        if not rng.random() * draft.probs[i][token] < target_probs(i)[token]:
            return Verdict([*draft.tokens[:i].tolist(), sample(target_probs(i), rng)], list(range(i)))
    return Verdict([*draft.tokens.tolist(), sample(target_probs(len(draft)), rng)], list(range(len(draft))))


def verify_each_alternative_against_the_target(draft: Draft, target_probs: Callable[[int], np.ndarray], rng: Any) -> Verdict:
    """The mistake of forgetting, at the next alternative, what the rejected ones took."""
    path: list[int] = []
    last = -1
    for node, parent in enumerate(draft.parents.tolist()):
        draft_prob = 1 if draft.probs is None else draft.probs[node][draft.tokens[node]]
        if parent == last and rng.random() * draft_prob < target_probs(last + 1)[draft.tokens[node]]:
            path.append(node)
            last = node
    return Verdict([*draft.tokens[path].tolist(), sample(target_probs(last + 1), rng)], path)


def verify_as_a_chain(draft: Draft, target_probs: Callable[[int], np.ndarray], rng: Any) -> Verdict:
    """The mistake of taking each node for a child of the one before."""
    return verify_sampled(Draft.chain(draft.tokens.tolist(), "test", draft.probs), target_probs, rng)


def verify_block_by_its_joint_probability(draft: Draft, target_probs: Callable[[int], np.ndarray], rng: Any) -> Verdict:
    """The mistake of keeping a beginning with the joint probability that belongs to the whole block."""
    assert draft.probs is not None
    tokens, kept = draft.tokens.tolist(), [Fraction(1)]
    for i, token in enumerate(tokens):
        kept.append(min(Fraction(1), kept[i] * target_probs(i)[token] / draft.probs[i][token]))
    length = max(i for i in range(len(kept)) if i == 0 or rng.random() < kept[i])
    row = target_probs(length)
    if length < len(tokens):
        residual = np.maximum(kept[length] * row - draft.probs[length], 0)
        row = residual if residual.sum() else row
    return Verdict([*tokens[:length], sample(row, rng)], list(range(length)))


def verify_block_with_a_residual_of_one_token(draft: Draft, target_probs: Callable[[int], np.ndarray], rng: Any) -> Verdict:
    """The mistake of drawing the recovered token as if the tokens before it had been accepted one by one."""
    assert draft.probs is not None
    verdict = verify_block(draft, target_probs, rng)
    length = len(verdict.path)
    if length == len(draft):
        return verdict
    residual = np.maximum(target_probs(length) - draft.probs[length], 0)
    return Verdict([*verdict.tokens[:-1], sample(residual if residual.sum() else target_probs(length), rng)], verdict.path)


def sparse(row: np.ndarray) -> SparseRow:
    ids = np.flatnonzero(row)
    return SparseRow(ids, row[ids], len(row))


def without_its_last_token(row: np.ndarray) -> SparseRow:
    """The mistake of cutting a token off on one side alone."""
    ids = np.flatnonzero(row)
    ids = ids[:-1] if len(ids) > 1 else ids
    return SparseRow(ids, row[ids] / row[ids].sum(), len(row))


Writing = Callable[[np.ndarray], Row]


def verdicts(
    drafting: Callable[..., Draft],
    num_tokens: int,
    seed: int,
    verifier: Callable[..., Verdict],
    write_target: Writing = np.asarray,
    write_draft: Writing = np.asarray,
) -> dict[tuple[int, ...], Fraction]:
    """The exact distribution of one round's tokens."""
    target, draft_rows = rational_rows(seed, allow_zeros=True), rational_rows(seed + 1000)

    def one_round(rng: Any) -> tuple[int, ...]:
        draft = drafting(draft_rows, num_tokens, rng)
        written = replace(draft, probs=draft.probs and tuple(map(write_draft, draft.probs)))
        return tuple(verifier(written, lambda row: write_target(target(tuple(draft.tokens_to(row - 1)))), rng).tokens)

    return enumerate_exactly(one_round)


def distance(
    drafting: Callable[..., Draft],
    num_tokens: int,
    seed: int,
    verifier: Callable[..., Verdict] = verify_sampled,
    write_target: Writing = np.asarray,
    write_draft: Writing = np.asarray,
) -> Fraction:
    """Total variation between n + 1 tokens of one round, completed by the target where it ended early, and the target.

    num_tokens: n, the most tokens that a verdict can accept.
    """
    target = rational_rows(seed, allow_zeros=True)

    def continuations(path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Fraction]]:
        if len(path) == num_tokens + 1:
            yield path, Fraction(1)
        else:
            for token in range(VOCAB):
                yield from ((string, target(path)[token] * prob) for string, prob in continuations((*path, token)))

    speculative: dict[tuple[int, ...], Fraction] = {}
    for tokens, prob in verdicts(drafting, num_tokens, seed, verifier, write_target, write_draft).items():
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


CHAIN_DRAFTING = [draw, stop_before_an_unsure_draw, keep_the_unsure_token_then_stop]


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("drafting", CHAIN_DRAFTING)
def test_block_verification_yields_exactly_the_target_distribution(drafting: Callable[..., Draft], num_tokens: int) -> None:
    for seed in range(3):
        assert distance(drafting, num_tokens, seed, verify_block) == 0


@pytest.mark.parametrize("wrong", [verify_block_by_its_joint_probability, verify_block_with_a_residual_of_one_token])
def test_the_enumeration_catches_a_wrong_block(wrong: Callable[..., Verdict]) -> None:
    assert max(distance(draw, 2, seed, wrong) for seed in range(3)) > Fraction(1, 1000)


@pytest.mark.parametrize("drafting", [drop_the_unsure_token, declare_other_rows])
def test_the_enumeration_catches_a_lie_about_rows_in_a_block(drafting: Callable[..., Draft]) -> None:
    assert all(distance(drafting, 2, seed, verify_block) > Fraction(1, 1000) for seed in range(3))


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.parametrize("drafting", CHAIN_DRAFTING)
def test_a_block_accepts_at_least_as_many_tokens_on_average_as_its_tokens_one_by_one(
    drafting: Callable[..., Draft], num_tokens: int
) -> None:
    gains = []
    for seed in range(4):
        block, one_by_one = (
            sum(prob * (len(tokens) - 1) for tokens, prob in verdicts(drafting, num_tokens, seed, verifier).items())
            for verifier in (verify_block, verify_sampled)
        )
        gains.append(block - one_by_one)
    assert min(gains) >= 0
    assert drafting is not draw or (max(gains) > Fraction(1, 1000)) == (num_tokens > 1)


def draw_among_the_best_two(rows: Rows, num_tokens: int, rng: Any) -> Draft:
    def best_two(path: tuple[int, ...]) -> np.ndarray:
        row = rows(path).copy()
        row[int(row.argmin())] = 0
        return row / row.sum()

    return draw(best_two, num_tokens, rng)


VERIFICATIONS = {
    "one by one": (draw_among_the_best_two, 2, verify_sampled),
    "chosen": (greedy_draft, 2, verify_sampled),
    "block": (draw_among_the_best_two, 2, verify_block),
    "tree": (draw_tree([-1, -1, 0, 0, 1]), 2, verify_sampled),
}
every_verification = pytest.mark.parametrize(("drafting", "num_tokens", "verifier"), VERIFICATIONS.values(), ids=VERIFICATIONS)


@every_verification
@pytest.mark.parametrize("writings", [(sparse, np.asarray), (np.asarray, sparse), (sparse, sparse)])
def test_rows_without_what_was_cut_off_yield_exactly_the_target_distribution(
    drafting: Callable[..., Draft], num_tokens: int, verifier: Callable[..., Verdict], writings: tuple[Writing, Writing]
) -> None:
    for seed in range(3):
        assert distance(drafting, num_tokens, seed, verifier, *writings) == 0


@every_verification
def test_the_enumeration_catches_a_row_that_lost_a_token(
    drafting: Callable[..., Draft], num_tokens: int, verifier: Callable[..., Verdict]
) -> None:
    distances = [distance(drafting, num_tokens, seed, verifier, without_its_last_token) for seed in range(3)]
    assert max(distances) > Fraction(1, 1000)


def test_a_block_accepts_what_the_paper_computes() -> None:
    """The example of arXiv 2403.10444: 11/9 tokens of two, and one by one 10/9."""
    target, rows = (np.array([Fraction(a, 3), Fraction(3 - a, 3)], object) for a in (1, 2))
    for verifier, wanted in ((verify_block, Fraction(11, 9)), (verify_sampled, Fraction(10, 9))):
        lengths = enumerate_exactly(lambda rng, v=verifier: len(v(draw(lambda path: rows, 2, rng), lambda row: target, rng).path))
        assert sum(prob * length for length, prob in lengths.items()) == wanted


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_a_block_of_point_masses_gains_nothing(num_tokens: int) -> None:
    """Which is why they are compared one by one: the same verdicts with the same probabilities, from fewer rows."""

    def declared(rows: Rows, num_tokens: int, rng: Any) -> Draft:
        tokens = greedy_draft(rows, num_tokens, rng).tokens.tolist()
        one_hot = tuple(np.array([Fraction(int(t == token)) for t in range(VOCAB)], object) for token in tokens)
        return Draft.chain(tokens, "test", one_hot)

    for seed in range(3):
        assert verdicts(declared, num_tokens, seed, verify_block) == verdicts(greedy_draft, num_tokens, seed, verify_sampled)


TREES = {
    "alternatives": [-1, -1, -1],
    "two levels": [-1, -1, 0, 0, 1],
    "a branch behind": [-1, 0, -1, 0],
    "depth first": [-1, 0, 1, -1],
}
trees = pytest.mark.parametrize("parents", TREES.values(), ids=TREES)


def depth(parents: list[int]) -> int:
    return int(Draft(np.zeros(len(parents), np.int32), np.array(parents, np.int32), None, "test").depths.max())


@trees
@pytest.mark.parametrize("drafting", [draw_tree, lambda parents: draw_tree(parents, replacement=True), point_mass_tree])
def test_tree_verification_yields_exactly_the_target_distribution(drafting: Callable[..., Any], parents: list[int]) -> None:
    for seed in range(2):
        assert distance(drafting(parents), depth(parents), seed) == 0


@trees
@pytest.mark.parametrize("drafting", [draw_tree, point_mass_tree])
@pytest.mark.parametrize("wrong", [verify_each_alternative_against_the_target, verify_as_a_chain])
def test_the_enumeration_catches_a_wrong_tree_verification(
    wrong: Callable[..., Verdict], drafting: Callable[..., Any], parents: list[int]
) -> None:
    assert max(distance(drafting(parents), len(parents), seed, wrong) for seed in (0, 1)) > Fraction(1, 1000)


@trees
def test_the_enumeration_catches_alternatives_that_declare_a_row_with_the_earlier_ones(parents: list[int]) -> None:
    assert max(distance(draw_tree(parents, declare_without=False), depth(parents), seed) for seed in (0, 1)) > Fraction(1, 1000)


@trees
def test_a_tree_accepts_more_than_its_first_branch(parents: list[int]) -> None:
    first_branch = [-1, 0, 1][: depth(parents)]
    for seed in range(2):
        tree, chain = (
            sum(prob * (len(tokens) - 1) for tokens, prob in verdicts(draw_tree(shape), 0, seed, verify_sampled).items())
            for shape in (parents, first_branch)
        )
        assert tree > chain


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


@pytest.mark.parametrize(("choices", "path"), [("bdh", [1, 3]), ("acd", [0, 2]), ("befa", [1, 4, 5]), ("bc", [1]), ("h", [])])
def test_greedy_verification_goes_down_the_branch_that_agrees(choices: str, path: list[int]) -> None:
    tree = Draft(np.frombuffer(b"abcdef", np.uint8).astype(np.int32), np.array([-1, -1, 0, 1, 1, 4], np.int32), None, "test")
    asked: list[int] = []

    def target_token(row: int) -> int:
        asked.append(row)
        return ord(choices[len(asked) - 1])

    verdict = verify_greedy(tree, target_token)
    assert verdict.path == path
    assert bytes(verdict.tokens).decode() == choices[: len(path) + 1]
    assert asked == [0, *(node + 1 for node in path)]


@pytest.mark.parametrize("num_right", range(5))
def test_greedy_verification_keeps_the_agreeing_prefix_and_adds_the_targets_choice(num_right: int) -> None:
    choices = [4, 2, 7, 1, 5]
    tokens = [choice if i < num_right else choice + 1 for i, choice in enumerate(choices[:4])]
    verdict = verify_greedy(Draft.chain(tokens, "test"), choices.__getitem__)
    assert verdict.tokens == choices[: num_right + 1]
    assert verdict.path == list(range(num_right))

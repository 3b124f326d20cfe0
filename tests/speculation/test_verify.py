"""Exact rational enumeration: whatever is drafted, the verifier's tokens are the target's own draws, with no tolerance."""

from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from cpuspec.sampling import Noise
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.verify import Verdict, verify_tokens
from tests.oracles.exact import ExactRng, enumerate_exactly
from tests.toys import ExactDraws

VOCAB = 3
Rows = Callable[[tuple[int, ...]], np.ndarray]
Drafting = Callable[[ExactRng, ExactDraws], Draft]


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


TARGET, OWN = rational_rows(0, allow_zeros=True), rational_rows(1000)


def drawn(rows: Rows, num_tokens: int, draws: ExactDraws) -> list[int]:
    """Tokens drawn one after another, as plain decoding does."""
    tokens: list[int] = []
    for position in range(num_tokens):
        tokens.append(draws.draw(rows(tuple(tokens)), position))
    return tokens


def likeliest_first(rng: ExactRng, draws: ExactDraws) -> Draft:
    tokens: list[int] = []
    for _ in range(2):
        tokens.append(int(np.argmax(OWN(tuple(tokens)))))
    return Draft.chain(tokens, "test")


def without_the_unlikely(rng: ExactRng, draws: ExactDraws) -> Draft:
    """Drawn tokens up to the first that is not the likeliest of its row: the length depends on the draws."""
    tokens = drawn(OWN, 3, draws)
    unsure = [i for i, token in enumerate(tokens) if token != np.argmax(OWN(tuple(tokens[:i])))]
    return Draft.chain(tokens[: min(unsure, default=3)], "test")


def tree(parents: list[int]) -> Drafting:
    """Alternatives drawn one after another, each from what the earlier ones left, with numbers of their place."""

    def drafting(rng: ExactRng, draws: ExactDraws) -> Draft:
        tokens: list[int] = []
        for node, parent in enumerate(parents):
            path = Draft(np.array(tokens, np.int32), np.array(parents[:node], np.int32), "test").tokens_to(parent)
            row = OWN(tuple(path)).copy()
            row[[tokens[other] for other in range(node) if parents[other] == parent]] = 0
            tokens.append(draws.draw(row, len(path)))
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), "test")

    return drafting


DRAFTING: dict[str, Drafting] = {
    "nothing": lambda rng, draws: Draft.chain([], "test"),
    "likeliest": likeliest_first,
    "drawn": lambda rng, draws: Draft.chain(drawn(OWN, 3, draws), "test"),
    "drawn with other numbers": lambda rng, draws: Draft.chain(drawn(OWN, 2, ExactDraws(rng)), "test"),
    "what the target draws": lambda rng, draws: Draft.chain(drawn(TARGET, 3, draws), "test"),
    "cut by its draws": without_the_unlikely,
    "alternatives": tree([-1, -1, -1]),
    "a tree": tree([-1, -1, 0, 0, 1]),
    "a branch behind": tree([-1, 0, -1, 0]),
}


def right(draft: Draft, draws: ExactDraws, rng: ExactRng) -> Verdict:
    def target_token(row: int) -> int:
        path = draft.tokens_to(row - 1)
        return draws.draw(TARGET(tuple(path)), len(path))

    return verify_tokens(draft, target_token)


def believing(draft: Draft, draws: ExactDraws, rng: ExactRng) -> Verdict:
    """The mistake of accepting what the target could have drawn."""
    return _walk(draft, lambda path, token: TARGET(tuple(path))[token] > 0, draws)


def drawing_anew(draft: Draft, draws: ExactDraws, rng: ExactRng) -> Verdict:
    """The mistake of drawing again after a rejection."""
    verdict = right(draft, draws, rng)
    if len(verdict.path) == len(draft):
        return verdict
    accepted = verdict.tokens[:-1]
    return Verdict([*accepted, ExactDraws(rng).draw(TARGET(tuple(accepted)), 0)], verdict.path)


def with_the_number_before(draft: Draft, draws: ExactDraws, rng: ExactRng) -> Verdict:
    """The mistake of drawing two tokens with one position's number."""
    return verify_tokens(
        draft, lambda row: draws.draw(TARGET(tuple(draft.tokens_to(row - 1))), max(0, len(draft.tokens_to(row - 1)) - 1))
    )


def as_a_chain(draft: Draft, draws: ExactDraws, rng: ExactRng) -> Verdict:
    """The mistake of taking each node for a child of the one before: rows of the tree, tokens of a chain."""
    chain = Draft.chain(draft.tokens.tolist(), "test")
    return verify_tokens(chain, lambda row: draws.draw(TARGET(tuple(draft.tokens_to(row - 1))), len(chain.tokens_to(row - 1))))


def _walk(draft: Draft, accepts: Callable[[list[int], int], bool], draws: ExactDraws) -> Verdict:
    path: list[int] = []
    tokens: list[int] = []
    for node, parent in enumerate(draft.parents.tolist()):
        if parent == (path[-1] if path else -1) and accepts(tokens, int(draft.tokens[node])):
            path.append(node)
            tokens.append(int(draft.tokens[node]))
    return Verdict([*tokens, draws.draw(TARGET(tuple(tokens)), len(tokens))], path)


def differing(drafting: Drafting, verifier: Callable[..., Verdict] = right) -> Fraction:
    """The share of runs in which a verdict has other tokens than plain decoding draws."""

    def differs(rng: ExactRng) -> bool:
        draws = ExactDraws(rng)
        verdict = verifier(drafting(rng, draws), draws, rng)
        return verdict.tokens != drawn(TARGET, len(verdict.tokens), draws)

    return enumerate_exactly(differs).get(True, Fraction(0))


@pytest.mark.parametrize("name", DRAFTING)
def test_a_verdict_has_the_tokens_that_plain_decoding_draws_in_every_run(name: str) -> None:
    assert differing(DRAFTING[name]) == 0


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (believing, "drawn"),
        (believing, "a tree"),
        (drawing_anew, "drawn"),
        (drawing_anew, "a tree"),
        (with_the_number_before, "drawn"),
        (as_a_chain, "a tree"),
        (as_a_chain, "a branch behind"),
    ],
)
def test_the_enumeration_catches_a_wrong_verification(wrong: Callable[..., Verdict], name: str) -> None:
    assert differing(DRAFTING[name], wrong) > Fraction(1, 1000)


@pytest.mark.parametrize("seed", range(30))
def test_a_seed_gives_the_same_tokens_whatever_is_drafted(seed: int) -> None:
    """Every chain and every tree of this shape, with the numbers of a real request."""
    draws, parents = Noise(seed), np.array([-1, -1, 0, 0], np.int32)
    plain = drawn(lambda path: TARGET(path).astype(float), 4, draws)  # type: ignore[arg-type]
    for tokens in product(range(VOCAB), repeat=4):
        for draft in (Draft.chain(tokens[:3], "test"), Draft(np.array(tokens, np.int32), parents, "test")):
            verdict = right(draft, draws, None)  # type: ignore[arg-type]
            assert verdict.tokens == plain[: len(verdict.tokens)]


def test_draws_of_one_position_agree_nearly_as_often_as_any_rule_allows() -> None:
    """At least with (1 - d) / (1 + d), d the total variation of the rows; independent draws agree less often."""
    rng, num_seeds = np.random.default_rng(2), 2000
    for spread in (0.1, 0.5, 2.0):
        target = rng.dirichlet(np.ones(8))
        other = target * np.exp(spread * rng.normal(size=8))
        other /= other.sum()
        d = np.abs(target - other).sum() / 2
        pairs = [(Noise(seed).draw(target, 0), Noise(seed).draw(other, 0), Noise(seed).draw(other, 1)) for seed in range(num_seeds)]
        agreed, apart = (sum(one[0] == one[i] for one in pairs) / num_seeds for i in (1, 2))
        assert (1 - d) / (1 + d) - 0.04 < agreed < 1 - d + 0.04
        assert apart < agreed - 0.1


@pytest.mark.parametrize(("choices", "path"), [("bdh", [1, 3]), ("acd", [0, 2]), ("befa", [1, 4, 5]), ("bc", [1]), ("h", [])])
def test_verification_goes_down_the_branch_that_agrees_and_asks_for_no_other_row(choices: str, path: list[int]) -> None:
    tree = Draft(np.frombuffer(b"abcdef", np.uint8).astype(np.int32), np.array([-1, -1, 0, 1, 1, 4], np.int32), "test")
    asked: list[int] = []

    def target_token(row: int) -> int:
        asked.append(row)
        return ord(choices[len(asked) - 1])

    verdict = verify_tokens(tree, target_token)
    assert verdict.path == path
    assert bytes(verdict.tokens).decode() == choices[: len(path) + 1]
    assert asked == [0, *(node + 1 for node in path)]

"""Answers that keep to a grammar are those that the constrained target draws, in every run, enumerated exactly."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cpuspec.sampling import Legal
from cpuspec.sequence import Constraint, Sequence
from cpuspec.settings import SamplingParams
from cpuspec.speculation import round as round_module
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.combine import Combined, first_hit, one_after_another
from cpuspec.speculation.constrained import SOURCE, legal_part, own_verdict
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.proposer import NullProposer, Proposer
from cpuspec.speculation.round import speculate
from cpuspec.speculation.verify import Verdict
from cpuspec.text import Grammars
from tests.oracles.exact import enumerate_exactly
from tests.speculation.exact import SOURCE as DRAWS
from tests.speculation.exact import TARGET, ExactContext, ExactSource, rational_row
from tests.toys import ExactDraws, PieceTokenizer

A, B, AB, END = range(4)
VOCAB = 4


class Strings:
    """A grammar that is a list of token strings: the slow, obvious constraint."""

    def __init__(self, *strings: tuple[int, ...]) -> None:
        self._strings = strings

    def legal(self, path: Any) -> Legal | None:
        path, legal = tuple(path), np.zeros(VOCAB, np.bool_)
        for string in self._strings:
            if string[: len(path)] == path and len(string) > len(path):
                legal[string[len(path)]] = True
        if not legal.any():
            return None
        legal[END] = self.accepts(path)
        return legal

    def accepts(self, path: Any) -> bool:
        return tuple(path) in self._strings

    def forced(self, path: Any) -> list[int]:
        forced: list[int] = []
        while (legal := self.legal([*path, *forced])) is not None and legal.sum() == 1:
            forced.append(int(legal.argmax()))
        return forced


def regex(text: str) -> Callable[[], Constraint]:
    """The real thing, over a vocabulary of three texts and an end."""

    def make() -> Constraint:
        constraint = Grammars(PieceTokenizer([b"a", b"b", b"ab", "<end>"], [END])).constraint(SamplingParams(regex=text))  # type: ignore[arg-type]
        assert constraint is not None
        return constraint

    return make


GRAMMARS: dict[str, Callable[[], Constraint]] = {
    "choices": lambda: Strings((A, B), (A, A), (B,)),
    "a forced beginning": lambda: Strings((AB, AB, A), (AB, AB, B, A)),
    "forced in the middle": lambda: Strings((A, B, B, B, A), (B, A, A, B)),
    "a regular expression": regex("(a|bb?)(ab)?"),
    "a regular expression with a forced middle": regex("(a|b)abab(a|b)"),
}


class Tree(NullProposer):
    """Every token, and every token behind each: point masses, most of them illegal."""

    name = "tree"

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        tokens, parents = (
            [*range(VOCAB), *list(range(VOCAB)) * VOCAB],
            [-1] * VOCAB + [i for i in range(VOCAB) for _ in range(VOCAB)],
        )
        return [Draft(np.array(tokens[:limit], np.int32), np.array(parents[:limit], np.int32), self.name) for limit in limits]


class Likeliest(NullProposer):
    """A chain of what its own rows like best, whatever is legal."""

    name = "likeliest"

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            path = seq.output
            for _ in range(min(limit, 2)):
                path.append(int(rational_row(DRAWS, VOCAB, tuple(path)).argmax()))
            drafts.append(Draft.chain(path[seq.num_output_tokens :], self.name))
        return drafts


def model(level: int) -> Any:
    return ExactContext(level, VOCAB)


PROPOSERS: dict[str, tuple[Callable[[], Proposer], int]] = {  # with the most tokens of a draft
    "none": (NullProposer, 3),
    "draws that may be illegal": (lambda: ExactSource(VOCAB), 2),
    "likeliest": (Likeliest, 4),
    "tree": (Tree, VOCAB + VOCAB * VOCAB),
    "model": (lambda: ChainProposer(NullProposer(), model(0), "model", 3), 3),
    "unsure model": (lambda: ChainProposer(NullProposer(), model(0), "model", 3, 0.6), 3),
    "chain": (lambda: ChainProposer(ChainProposer(Likeliest(), model(0), "small", 2), model(1), "model", 3), 2),
    "first hit": (lambda: Combined((Likeliest(), ChainProposer(NullProposer(), model(0), "model", 2)), first_hit, "both"), 3),
    "one after another": (
        lambda: Combined((Likeliest(), ChainProposer(NullProposer(), model(0), "model", 2)), one_after_another, "both"),
        4,
    ),
}


@pytest.fixture
def exact_legal_rows(monkeypatch: pytest.MonkeyPatch, exact_rows: None) -> None:
    """Rows are distributions already, of which the legal part is renormalised."""

    def distribution(row: Any, params: Any, history: Any, drafted: Any = (), legal: Legal | None = None) -> Any:
        return row if legal is None else legal_row(row, legal)

    monkeypatch.setattr(round_module, "row_to_draw", distribution)


def legal_row(row: np.ndarray, legal: Legal) -> np.ndarray:
    kept = np.array([prob if one else Fraction(0) for prob, one in zip(row, legal, strict=True)], object)
    return kept / kept.sum()


def cut(output: list[int], constraint: Constraint) -> tuple[int, ...] | None:
    """An answer up to its end; None where it has not ended."""
    for i, token in enumerate(output):
        if token == END or constraint.legal(output[: i + 1]) is None:
            return tuple(output[: i + 1])
    return None


def differing(make: Callable[[], Constraint], proposer: Proposer, limit: int) -> Fraction:
    """The share of runs in which rounds yield another answer than the constrained target draws, each mask from scratch."""
    constraint = make()

    def differs(rng: Any) -> bool:
        seq = Sequence.new(0, [0], SamplingParams(temperature=1.0), constraint)
        seq.draws = ExactDraws(rng)
        proposer.begin(seq, 0)
        while (answer := cut(seq.output, constraint)) is None:
            speculate(model(TARGET), proposer, [seq], [limit])
        proposer.end(seq)
        plain: list[int] = []
        while cut(plain, make()) is None:
            legal = make().legal(plain)
            assert legal is not None
            plain.append(seq.draws.draw(legal_row(rational_row(TARGET, VOCAB, tuple(plain)), legal), len(plain)))
        return answer != cut(plain, make())

    return enumerate_exactly(differs).get(True, Fraction(0))


@pytest.mark.usefixtures("exact_legal_rows")
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_answers_are_those_that_the_constrained_target_draws_in_every_run(proposer: str, grammar: str) -> None:
    make, limit = PROPOSERS[proposer]
    assert differing(GRAMMARS[grammar], make(), limit) == 0


@pytest.mark.usefixtures("exact_legal_rows")
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_answers_own_constraint_is_asked_along_the_answer_alone_and_once_for_each_place(proposer: str, grammar: str) -> None:
    """Whatever is drafted, so that a grammar's limits are reached where they are without drafts."""
    make, limit = PROPOSERS[proposer]
    for number in range(8):
        asked = Asked(GRAMMARS[grammar]())
        seq = Sequence.new(0, [0], SamplingParams(temperature=1.0), GRAMMARS[grammar](), answer_constraint=asked)
        seq.draws = Fixed(number)
        drafter = make()
        drafter.begin(seq, 0)
        while (answer := cut(seq.output, GRAMMARS[grammar]())) is None:
            speculate(model(TARGET), drafter, [seq], [limit], is_answer=True)
        assert [path for path in asked.paths if len(path) < len(answer)] == [answer[:i] for i in range(len(answer))]


class Asked:
    """A constraint that notes the paths whose legal tokens are wanted."""

    def __init__(self, inner: Constraint) -> None:
        self.paths: list[tuple[int, ...]] = []
        self._inner = inner

    def legal(self, path: Any) -> Legal | None:
        self.paths.append(tuple(path))
        return self._inner.legal(path)

    def accepts(self, path: Any) -> bool:
        return self._inner.accepts(path)

    def forced(self, path: Any) -> list[int]:
        raise AssertionError("forced tokens are drafted")


class Fixed:
    """Random numbers of one run, whose rows are fractions."""

    def __init__(self, seed: int) -> None:
        self._numbers = np.random.default_rng(seed).random(50)

    def draw(self, row: Any, position: int) -> int:
        return int(np.searchsorted(np.cumsum(row.astype(float)), self._numbers[position], side="right"))


def wrong_legal(change: Callable[[Sequence, list[int]], Legal | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give verifiers other masks, and drafters the right ones."""
    right_verify, right_legal = round_module.verify, Sequence.legal

    def verify(*arguments: Any) -> Verdict:
        with monkeypatch.context() as inside:
            inside.setattr(
                Sequence,
                "legal",
                lambda seq, drafted=(), is_answer=False: change(seq, list(drafted)) if drafted else right_legal(seq),
            )
            return right_verify(*arguments)

    monkeypatch.setattr(round_module, "verify", verify)


@pytest.mark.usefixtures("exact_legal_rows")
@pytest.mark.parametrize("proposer", ["draws that may be illegal", "tree", "model"])
def test_the_enumeration_catches_a_row_whose_mask_is_forgotten(proposer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, limit = PROPOSERS[proposer]
    wrong_legal(lambda seq, drafted: None, monkeypatch)
    assert differing(GRAMMARS["choices"], make(), limit) > Fraction(1, 100)


@pytest.mark.usefixtures("exact_legal_rows")
@pytest.mark.parametrize("proposer", ["tree", "model"])
def test_the_enumeration_catches_a_row_with_the_mask_of_the_row_before(proposer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, limit = PROPOSERS[proposer]
    wrong_legal(lambda seq, drafted: seq.constraint and seq.constraint.legal([*seq.output, *drafted[:-1]]), monkeypatch)
    assert differing(GRAMMARS["forced in the middle"], make(), limit) > Fraction(1, 100)


@pytest.mark.usefixtures("exact_legal_rows")
@pytest.mark.parametrize("proposer", ["none", "likeliest", "tree", "model", "chain", "one after another"])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_no_illegal_token_is_proposed_and_forced_ones_are_always_accepted(
    proposer: str, grammar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, limit = PROPOSERS[proposer]
    right, drafter, slow = round_module.verify, make(), GRAMMARS[grammar]()

    def verify(seq: Sequence, draft: Draft, *rows: Any) -> Verdict:
        for node, token in enumerate(draft.tokens.tolist()):
            legal = slow.legal([*seq.output, *draft.tokens_to(int(draft.parents[node]))])
            assert legal is not None
            assert legal[token]
        return right(seq, draft, *rows)

    monkeypatch.setattr(round_module, "verify", verify)
    num_forced = 0
    for seed in range(5):
        seq = Sequence.new(0, [0], SamplingParams(temperature=1.0, seed=seed), slow)
        while cut(seq.output, slow) is None:
            (done,) = speculate(model(TARGET), drafter, [seq], [limit])
            forced = [cycle for cycle in done.cycles if cycle.source == SOURCE]
            assert all(cycle.num_accepted_tokens <= cycle.num_draft_tokens for cycle in forced)
            if proposer == "none":
                assert [cycle.num_accepted_tokens for cycle in forced] == [cycle.num_draft_tokens for cycle in forced]
            num_forced += sum(cycle.num_draft_tokens for cycle in forced)
    assert num_forced or proposer != "none" or "forced" not in grammar


def test_an_illegal_token_leaves_a_tree_with_all_that_hangs_on_it() -> None:
    seq = Sequence.new(0, [0], SamplingParams(), Strings((A, B, A), (A, A)))
    draft = Draft(
        np.array([B, A, A, A, B, A], np.int32),
        np.array([-1, -1, 0, 1, 1, 4], np.int32),
        None,
        "t",
        confidence=np.arange(6, dtype=np.float32),
    )
    part = legal_part(seq, draft)
    assert part.tokens.tolist() == [A, A, B, A]
    assert part.parents.tolist() == [-1, 0, 0, 2]
    assert part.confidence is not None
    assert part.confidence.tolist() == [1, 3, 4, 5]
    assert legal_part(Sequence.new(0, [0], SamplingParams()), draft) is draft


@pytest.mark.parametrize(
    ("accepted", "tokens", "path"),
    [(0, [5], []), (1, [6], []), (2, [7], []), (3, [7, 8], [0]), (4, [7, 8, 9], [0, 1]), (5, [7, 8, 9], [0, 1])],
)
def test_a_proposer_sees_the_verdict_on_its_own_tokens(accepted: int, tokens: list[int], path: list[int]) -> None:
    """Two forced tokens, two of the proposer's, one forced."""
    verdict = own_verdict(Verdict([5, 6, 7, 8, 9, 10][: accepted + 1], list(range(accepted))), 2, 2)
    assert (verdict.tokens, verdict.path) == (tokens, path)

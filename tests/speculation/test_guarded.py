"""A drafter that fails costs a request its drafts and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from cpuspec.engine.llm import LLM, Completion
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.chosen import ChosenDrafts
from cpuspec.speculation.combine import Combined, first_hit, one_after_another
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.lookups import LookupProposer
from cpuspec.speculation.drafters.user import UserProposer
from cpuspec.speculation.guarded import GuardedProposer
from cpuspec.speculation.proposer import NullProposer, Proposer
from tests.toys import ToyBackend, ToyTokenizer

PROMPTS = [[0, 4, 5, 6, 7, 4], [1, 2, 3, 1, 2], [5, 5, 5]]
PARAMS = {
    "greedy": SamplingParams(max_tokens=20, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=3),
}


class Panic(BaseException):
    """As pyo3's PanicException, it is no Exception."""


class Failing:
    """Drafts what came `len(seq.tokens) // 2` tokens ago, and fails when the answer of one prompt has some tokens."""

    hidden_layers: tuple[int, ...] = ()
    most_hidden: int | None = None
    levels: tuple[Any, ...] = ()
    name = "failing"

    def __init__(self, where: str, poison: int, num_tokens: int = 6, error: type[BaseException] = RuntimeError) -> None:
        self.where, self.poison, self.num_tokens, self.error = where, poison, num_tokens, error
        self.known: set[int] = set()

    def _fail(self, where: str, seq: Any) -> None:
        if where == self.where and seq.tokens[0] == self.poison and (where == "begin" or seq.num_output_tokens >= self.num_tokens):
            raise self.error(f"{where} of this drafter is broken")

    def begin(self, seq: Any, num_cached: int) -> None:
        self._fail("begin", seq)
        self.known.add(seq.id)

    def propose(self, seqs: Any, limits: Any) -> list[Draft]:
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            assert seq.id in self.known
            before = seq.tokens[len(seq.tokens) // 2 :][: min(limit, 3)]
            if self.where == "leaves tokens" and seq.tokens[0] == self.poison and seq.num_output_tokens >= self.num_tokens:
                seq.extend(before)
                raise RuntimeError("in the middle")
            self._fail("propose", seq)
            bad = self.where == "bad draft" and seq.tokens[0] == self.poison and seq.num_output_tokens >= self.num_tokens
            drafts.append(Draft.chain([99] * limit if bad else before, self.name))
        return drafts

    def accept(self, seq: Any, verdict: Any, hidden: Any) -> None:
        assert seq.id in self.known
        self._fail("accept", seq)

    def end(self, seq: Any) -> None:
        self.known.discard(seq.id)
        self._fail("end", seq)


WAYS = ("begin", "propose", "leaves tokens", "bad draft", "accept", "end")


def shapes(failing: Any) -> dict[str, Proposer]:
    """The drafter alone, beside others, and below a draft model, whose cache has two slots."""
    context = Context(ToyBackend(2, memory=0.2), 2, 64)
    return {
        "alone": failing,
        "first": Combined((failing, LookupProposer("ngram")), first_hit, "first"),
        "then": Combined((LookupProposer("ngram"), failing), one_after_another, "then"),
        "chain": ChainProposer(failing, context),
    }


def completions(proposer: Proposer, params: SamplingParams, rounds: int = 1) -> list[Completion]:
    settings = EngineConfig(max_sequences=2)
    llm = LLM.from_backend(ToyBackend(2, memory=0.3), ToyTokenizer(8), "none", settings)  # type: ignore[arg-type]
    llm.engine._proposer = proposer
    llm.engine._contexts += [level.context for level in proposer.levels]
    found = []
    for _ in range(rounds):
        found = llm.generate(PROMPTS, params)
        assert len(llm.context.slots.free) == 2
        for level in proposer.levels:
            assert len(level.context.slots.free) == 2
    return found


def answers(proposer: Proposer, params: SamplingParams, rounds: int = 1) -> list[list[int]]:
    return [answer.token_ids for answer in completions(proposer, params, rounds)]


@pytest.mark.parametrize("how", PARAMS)
@pytest.mark.parametrize("where", WAYS)
@pytest.mark.parametrize("shape", ["alone", "first", "then", "chain"])
def test_answers_are_those_without_drafts_wherever_a_drafter_fails(shape: str, where: str, how: str) -> None:
    failing = Failing(where, poison=0)
    context = Context(ToyBackend(2, memory=0.3), 2, 64)
    guarded = GuardedProposer(shapes(failing)[shape], context)
    found = answers(guarded, PARAMS[how], rounds=3)
    assert found == answers(NullProposer(), PARAMS[how])
    assert not failing.known
    assert not guarded._plain
    if where != "end":
        assert guarded.num_failures == 3  # of the poisoned prompt, once in each round


@pytest.mark.parametrize("where", ["begin", "propose", "leaves tokens", "accept"])
def test_a_drafter_that_fails_for_one_sequence_ends_that_one_unless_it_goes_on_without(where: str) -> None:
    params, context = PARAMS["sampled"], Context(ToyBackend(2, memory=0.3), 2, 64)
    guarded = GuardedProposer(Failing(where, poison=0), context, plain_on_error=False)
    (failed, *others), (plain, *wanted) = completions(guarded, params), answers(NullProposer(), params)
    assert [one.token_ids for one in others] == wanted
    assert (failed.finish_reason, failed.token_ids) == ("error", plain[: len(failed.token_ids)])
    assert failed.error
    assert ("in the middle" if where == "leaves tokens" else f"{where} of this drafter is broken") in failed.error


@pytest.mark.parametrize("where", [where for where in WAYS if where not in ("bad draft", "leaves tokens")])
def test_a_panic_of_a_rust_library_is_a_fault_like_others_and_an_interrupt_is_none(where: str) -> None:
    guarded = GuardedProposer(Failing(where, poison=0, error=Panic), Context(ToyBackend(2, memory=0.3), 2, 64))
    assert answers(guarded, PARAMS["greedy"]) == answers(NullProposer(), PARAMS["greedy"])
    for wish in (KeyboardInterrupt, SystemExit):
        guarded = GuardedProposer(Failing(where, poison=0, error=wish), Context(ToyBackend(2, memory=0.3), 2, 64))
        with pytest.raises(wish):
            answers(guarded, PARAMS["greedy"])


def test_a_users_drafter_that_fails_ends_no_request_where_that_is_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from cpuspec import Draft\nclass Mine:\n    name, hidden_layers = 'mine', ()\n    def begin(self, seq): ...\n"
        "    def propose(self, seqs, limits):\n        if seqs[0].num_output_tokens > 5: 1 / 0\n"
        "        return [Draft.chain(seq.tokens[:min(2, limit)], 'mine') for seq, limit in zip(seqs, limits)]\n"
        "    def accept(self, seq, verdict, hidden): ...\n    def end(self, seq): ...\n"
    )
    backend = ToyBackend(2, memory=0.3)
    settings = EngineConfig(plain_on_draft_error=True)
    llm = LLM.from_backend(backend, ToyTokenizer(8), f"{path}:Mine", settings)  # type: ignore[arg-type]
    found = [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS["greedy"])]
    assert found == answers(NullProposer(), PARAMS["greedy"])
    assert llm.num_draft_failures == 3
    assert "propose of mine failed with ZeroDivisionError" in caplog.text
    assert isinstance(llm.engine._proposer, GuardedProposer)
    assert isinstance(llm.engine._proposer._inner, ChosenDrafts)
    assert isinstance(llm.engine._proposer._inner.default, UserProposer)

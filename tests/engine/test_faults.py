"""A fault of one sequence ends that sequence with its error; the others' answers are what they are without it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpuspec.engine.engine import Engine, Output
from cpuspec.engine.llm import LLM
from cpuspec.errors import ConfigError, CpuspecError
from cpuspec.model.batch import ForwardBatch, ForwardOutput
from cpuspec.model.cache import KVCache
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.context import Context
from cpuspec.speculation.guarded import GuardedProposer
from cpuspec.speculation.proposer import NullProposer, Proposer
from tests.engine.test_engine import PROPOSER_FACTORIES, every_proposer
from tests.toys import ToyBackend, ToyTokenizer

VOCAB = 8
POISON = 7  # a token behind which a broken model has no finite logits
PROMPTS = [[0, 4, 5, 4], [0, 6, 6], [0, 4, 4, 5, 5]]
PARAMS = {
    "greedy": SamplingParams(max_tokens=15, ignore_eos=True),
    "penalised": SamplingParams(max_tokens=15, ignore_eos=True, frequency_penalty=0.3),
    "sampled": SamplingParams(max_tokens=15, ignore_eos=True, temperature=1.0, seed=3),
}


class Broken(ToyBackend):
    """A model whose logits are not finite behind one token."""

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        output = super().forward(batch, cache)
        rows = np.arange(len(batch.tokens)) if batch.logit_rows is None else np.asarray(batch.logit_rows)
        output.logits[np.asarray(batch.tokens)[rows] == POISON] = np.nan
        return output


def run(model: ToyBackend, proposer: Proposer, params: list[SamplingParams], prompts: list[list[int]]) -> list[list[Output]]:
    engine = Engine(Context(model, 3, 64), proposer, ToyTokenizer(VOCAB))  # type: ignore[arg-type]
    outputs: dict[int, list[Output]] = {engine.add_request(*one): [] for one in zip(prompts, params, strict=True)}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    assert len(engine._context.slots.free) == 3
    return list(outputs.values())


def ids(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@every_proposer
@pytest.mark.parametrize("how", PARAMS)
def test_rows_that_are_not_finite_end_their_sequence_alone_where_plain_decoding_meets_them(proposer: str, how: str) -> None:
    ends = set()
    for seed in range(3):
        one, prompts = PARAMS[how], [*PROMPTS[:2], [0, POISON]]
        params = [replace(one, logit_bias={POISON: -np.inf}), one, one]  # the first never meets the fault, the last at once
        plain, got = (
            run(Broken(seed, memory=0.2), made, params, prompts) for made in (NullProposer(), PROPOSER_FACTORIES[proposer]())
        )
        assert [ids(one) for one in got] == [ids(one) for one in plain]
        assert [one[-1].finish_reason for one in got] == [one[-1].finish_reason for one in plain]
        assert ids(got[0]) == ids(run(ToyBackend(seed, memory=0.2), NullProposer(), params[:1], prompts[:1])[0])
        assert got[0][-1].finish_reason == "length"
        assert (got[2][-1].finish_reason, ids(got[2])) == ("error", [])
        assert "NaN or infinite" in str(got[2][-1].error)
        ends.add(got[1][-1].finish_reason)
    assert "error" in ends or how != "sampled"


@pytest.mark.parametrize("how", PARAMS)
def test_a_draft_model_whose_rows_are_not_finite_changes_no_answer(how: str) -> None:
    model, params = ToyBackend(1, memory=0.2), [PARAMS[how]] * 3
    drafted = ChainProposer(NullProposer(), Context(Broken(1, memory=0.2), 3, 64), "broken")
    plain, got = (run(model, one, params, [*PROMPTS[:2], [0, POISON]]) for one in (NullProposer(), drafted))
    assert [ids(one) for one in got] == [ids(one) for one in plain]
    assert {one[-1].finish_reason for one in got} == {"length"}


@pytest.fixture
def llm() -> Iterator[LLM]:
    settings = EngineConfig(max_sequences=3)
    with LLM.from_backend(Broken(1, memory=0.2), ToyTokenizer(VOCAB), "ngram", settings) as made:  # type: ignore[arg-type]
        yield made


def test_generate_tells_of_the_answer_that_failed_beside_those_that_did_not(llm: LLM) -> None:
    safe = replace(PARAMS["sampled"], logit_bias={POISON: -np.inf})
    good, bad = llm.generate([PROMPTS[0], [0, POISON]], safe)
    assert (good.finish_reason, good.error, len(good.token_ids)) == ("length", None, 15)
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert "NaN or infinite" in str(bad.error)
    for call in (lambda: llm.generate([0, POISON], safe), lambda: list(llm.stream([0, POISON], safe))):
        with pytest.raises(CpuspecError, match="NaN or infinite"):
            call()


@pytest.mark.parametrize("number", [1e9, 1e300, -1e300])
@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"])
def test_settings_that_overflow_are_refused(name: str, number: float) -> None:
    with pytest.raises(ConfigError, match=r"a (mapping from token id to a )?number from"):
        SamplingParams(**{name: {3: number} if name == "logit_bias" else number})  # type: ignore[arg-type]


def test_the_largest_settings_overflow_nothing() -> None:
    for sign in (1, -1):
        for factor in (1e-3, 1e3):
            shifts = {"presence_penalty": sign * 1e6, "frequency_penalty": sign * 1e6, "logit_bias": {3: sign * 1e6}}
            params = SamplingParams(1.0, repetition_penalty=factor, seed=1, max_tokens=40, **shifts)  # type: ignore[arg-type]
            (outputs,) = run(ToyBackend(1), NullProposer(), [params], PROMPTS[:1])
            assert outputs[-1].finish_reason in ("length", "stop")


def test_a_penalty_that_divides_by_next_to_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a number from 0\.001 to 1000"):
        SamplingParams(repetition_penalty=1e-308)


class Panic(BaseException):
    """As a Rust library raises it: no Exception."""


def _fails(*arguments: Any, **options: Any) -> Any:
    raise Panic("of one")


class _FailsAfter:
    """A constraint that allows everything, and fails for paths of four tokens."""

    def legal(self, path: Any) -> Any:
        return _fails() if len(path) >= 4 else np.ones(VOCAB, np.bool_)

    def accepts(self, path: Any) -> bool:
        return False

    def forced(self, path: Any) -> list[int]:
        return []


class _FailsToForce(_FailsAfter):
    def legal(self, path: Any) -> Any:
        return np.ones(VOCAB, np.bool_)

    def forced(self, path: Any) -> list[int]:
        return _fails() if len(path) >= 4 else []


def _break_slots(name: str) -> Any:
    def change(engine: Engine, request_id: int) -> None:
        whole = getattr(engine._context.slots, name)
        broken = lambda seq, *rest: _fails() if seq.id == request_id else whole(seq, *rest)  # noqa: E731
        setattr(engine._context.slots, name, broken)

    return change


def _of_request(change: Any) -> Any:
    return lambda engine, request_id: change(engine._requests[request_id])


# How one request may fail, whatever the reason: each entry breaks one part of a step for it.
BREAKS: dict[str, Any] = {
    "draw": _of_request(lambda one: setattr(one.seq, "draws", type("Draws", (), {"draw": _fails})())),
    "grammar": _of_request(lambda one: setattr(one.seq, "answer_constraint", _FailsAfter())),
    "grammar of drafts": _of_request(lambda one: setattr(one.seq, "constraint", _FailsAfter())),
    "forced tokens": _of_request(lambda one: setattr(one.seq, "constraint", _FailsToForce())),
    "text": _of_request(lambda one: setattr(one.text, "push", _fails)),
    "figures": _of_request(lambda one: setattr(one.meter, "record_step", _fails)),
    **{name: _break_slots(name) for name in ("awaits", "poll", "acquire")},
}


@every_proposer
@pytest.mark.parametrize("where", BREAKS)
def test_whatever_one_sequence_raises_ends_that_one(where: str, proposer: str) -> None:
    prompts, params = [[4, 5], *PROMPTS[:2]], [PARAMS["sampled"]] * 3
    plain = run(ToyBackend(1, memory=0.2), NullProposer(), params, prompts)
    context = Context(ToyBackend(1, memory=0.2), 3, 64)
    guarded = GuardedProposer(PROPOSER_FACTORIES[proposer](), context, plain_on_error=False)
    engine = Engine(context, guarded, ToyTokenizer(VOCAB))  # type: ignore[arg-type]
    got: dict[int, list[Output]] = {engine.add_request(*one): [] for one in zip(prompts, params, strict=True)}
    BREAKS[where](engine, 0)
    while engine.has_work:
        for output in engine.step():
            got[output.request_id].append(output)
    assert [ids(got[number]) for number in (1, 2)] == [ids(one) for one in plain[1:]]
    assert {got[number][-1].finish_reason for number in (1, 2)} == {"length"}
    assert (got[0][-1].finish_reason, "of one" in str(got[0][-1].error)) == ("error", True)
    assert len(engine._context.slots.free) == 3


def test_a_seed_of_any_size_is_one_of_64_bits() -> None:
    assert SamplingParams(seed=2**64 + 5).seed == 5
    with pytest.raises(ConfigError, match=r"seed must be .*, got an integer of 14\d{3} bits"):
        SamplingParams(seed=10**4300)

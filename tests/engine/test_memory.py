"""Requests run together while their keys, values and states fit the memory, and their answers do not depend on it."""

from dataclasses import replace
from typing import Any

import pytest

from cpuspec.engine import engine as engine_module
from cpuspec.engine.engine import Engine
from cpuspec.errors import ConfigError
from cpuspec.settings import SamplingParams
from cpuspec.speculation.context import Context
from cpuspec.speculation.proposer import NullProposer, Proposer
from tests.engine.test_engine import PROPOSER_FACTORIES, VOCAB, every_proposer
from tests.toys import RecurrentBackend, ToyBackend, ToyTokenizer, plain_greedy

PROMPTS = [[0, *range(2, 2 + number % 6)] * (1 + number % 3) for number in range(9)]
PARAMS = SamplingParams(max_tokens=25, ignore_eos=True)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of 64 tokens are no longer than what a sequence has memory for otherwise."""
    monkeypatch.setattr(engine_module, "_TO_BEGIN", 8)
    monkeypatch.setattr(engine_module, "_TO_STAY", 6)


class Watched:
    """An engine, and what it had at most: bytes of running sequences and of what others left, and sequences at once."""

    def __init__(self, model: Any, max_bytes: int | None, proposer: Proposer | None = None, kept_bytes: int | None = 0) -> None:
        self.context = Context(model, 6, 64)
        self.engine = Engine(self.context, proposer or NullProposer(), ToyTokenizer(VOCAB), max_bytes)  # type: ignore[arg-type]
        for context in self.engine._contexts:
            context.slots.keep(kept_bytes)
        self.most_bytes = self.most_running = self.num_preempted = 0
        preempt = self.engine._scheduler.preempt
        self.engine._scheduler.preempt = lambda seq: (preempt(seq), setattr(self, "num_preempted", self.num_preempted + 1))

    def run(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """The answers, and the requests in the order in which they began."""
        ids, began = [self.engine.add_request(prompt, PARAMS) for prompt in prompts], []
        answers: dict[int, list[int]] = {id: [] for id in ids}
        while self.engine.has_work:
            for output in self.engine.step():
                answers[output.request_id] += output.token_ids
            began += [seq.id for seq in self.engine._scheduler.running if seq.id not in began]
            caches = [one.cache for one in self.engine._contexts]
            self.most_bytes = max(self.most_bytes, sum(cache.bytes_of(length) for cache in caches for length in cache.lengths))
            self.most_running = max(self.most_running, len(self.engine._scheduler.running))
        return [answers[id] for id in ids], [ids.index(id) for id in began]


def kept(held: int, length: int) -> range:
    return range(max(0, held - 4), length + 1)


MODELS = {"keys": lambda: ToyBackend(3, VOCAB, memory=0.3), "states": lambda: RecurrentBackend(3, kept)}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("num_full", [1.0, 1.6, 2.4])
@pytest.mark.parametrize("kept_bytes", [0, 10**6])
def test_what_runs_and_what_is_kept_fits_the_memory_and_answers_stay(model: Any, num_full: float, kept_bytes: int) -> None:
    one = model().new_cache(1, 64).bytes_of(64)
    limit = int(num_full * one)
    watched, free = Watched(model(), limit, kept_bytes=kept_bytes), Watched(model(), None, kept_bytes=kept_bytes)
    answers, began = watched.run(PROMPTS)
    assert answers == [plain_greedy(model(), ToyTokenizer(VOCAB), prompt, PARAMS)["token_ids"] for prompt in PROMPTS]
    assert free.run(PROMPTS)[0] == answers
    assert watched.most_bytes <= limit < free.most_bytes
    assert began == sorted(began)
    assert 1 < watched.most_running <= free.most_running == 6 or num_full == 1
    assert watched.num_preempted
    assert not free.num_preempted


@every_proposer
def test_a_sequence_that_is_preempted_goes_on_as_in_plain_decoding(proposer: str) -> None:
    model = ToyBackend(4, VOCAB, memory=0.3)
    drafts = PROPOSER_FACTORIES[proposer]()
    probe = Engine(Context(model, 6, 64), drafts, ToyTokenizer(VOCAB))  # type: ignore[arg-type]
    watched = Watched(model, int(1.8 * probe.bytes_of(64, is_read=True)), PROPOSER_FACTORIES[proposer]())
    answers, _ = watched.run(PROMPTS)
    assert answers == [plain_greedy(model, ToyTokenizer(VOCAB), prompt, PARAMS)["token_ids"] for prompt in PROMPTS]
    assert watched.num_preempted


def test_a_prompt_that_never_fits_is_refused_and_an_answer_ends_where_the_memory_does() -> None:
    model = ToyBackend(3, VOCAB, memory=0.3)
    engine = Watched(model, 40 * model.bytes_per_token).engine
    assert engine.most_tokens == 40
    with pytest.raises(ConfigError, match=r"the prompt has 40 tokens.*for 40 tokens; shorten the prompt, allow"):
        engine.add_request([4] * 40, PARAMS)
    engine.add_request([4] * 39, PARAMS)
    engine.add_request([4] * 30, replace(PARAMS, max_tokens=60))
    ended = {}
    while engine.has_work:
        ended |= {one.request_id: (one.finish_reason, one.stats) for one in engine.step() if one.finish_reason}
    assert [(reason, stats.num_new_tokens) for reason, stats in ended.values() if stats] == [("length", 1), ("length", 10)]
    assert Watched(model, None).engine.most_tokens == 64


@pytest.mark.parametrize("most_hidden", [None, 10])
def test_hidden_states_that_wait_for_a_head_count_until_their_prompt_is_read(most_hidden: int | None) -> None:
    model, head = ToyBackend(3, VOCAB, memory=0.3), NullProposer()
    head.hidden_layers, head.most_hidden = (0,), most_hidden
    hidden_bytes = 4 * model.config.hidden_size
    assert Watched(model, 40 * model.bytes_per_token + (most_hidden or 40) * hidden_bytes, head).engine.most_tokens == 40
    engine = Watched(model, 80 * model.bytes_per_token + (most_hidden or 40) * hidden_bytes, head).engine
    for _ in range(2):
        engine.add_request([4] * 30, PARAMS)
    running = []
    while engine.has_work:
        engine.step()
        running.append(len(engine._scheduler.running))
    assert (running[0], max(running)) == (1, 2)


def test_prefixes_leave_the_memory_to_what_runs_and_may_have_it_again() -> None:
    model = ToyBackend(3, VOCAB, memory=0.3, block_size=8)
    one = model.new_cache(1, 64).bytes_of(64)
    watched = Watched(model, 2 * one, kept_bytes=2 * one)
    context = watched.context
    watched.run([[0, *([number] * 36)] for number in range(2, 8)])
    assert context.slots.kept_bytes > one // 2
    ids = [watched.engine.add_request([0, 4, number] * 9, replace(PARAMS, max_tokens=36)) for number in (6, 7)]
    most = 0
    while watched.engine.has_work:
        watched.engine.step()
        most = max(most, watched.engine._taken(0) + context.slots.kept_bytes)
    assert len(ids) == 2
    assert most <= 2 * one
    watched.run([[0, *([number] * 36)] for number in range(2, 8)])
    assert context.slots.kept_bytes > one // 2

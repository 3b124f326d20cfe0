"""The engine gives plain decoding's output under every proposer, in any batch, up to the exact stop."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from cpuspec.engine.draft_spec import LOOKUPS
from cpuspec.engine.engine import Engine, Output, RequestedAnswer
from cpuspec.errors import ConfigError
from cpuspec.evaluate.statistics import chi_square
from cpuspec.sampling import argmax
from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams, SpecConfig
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.combine import Combined, first_hit, one_after_another
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.lookups import LookupProposer
from cpuspec.speculation.planner.costs import Costs
from cpuspec.speculation.planner.planner import Planner
from cpuspec.speculation.proposer import NullProposer, Proposer
from tests.toys import SampledProposer, ToyBackend, ToyTokenizer, plain_greedy, string_probs

VOCAB = 8
TREE = (-1, -1, 0, 1, 1, -1)


def source(text: str) -> Proposer:
    (level,) = SpecConfig.parse(text).levels
    return LOOKUPS[level.name](level)


def chain_over(inner: Proposer, seed: int, vocab_size: int = VOCAB, num_tokens: int = 4, min_confidence: float = 0.0) -> Proposer:
    """`inner` verified by another toy model, which knows `vocab_size` of the target's tokens."""
    model = ToyBackend(seed, vocab_size, memory=0.2, max_rows=5)
    return ChainProposer(inner, Context(model, 50, 60, VOCAB), f"toy{seed}", num_tokens, min_confidence)


def planned(costs: Costs, *chains: Proposer, clock: Callable[[], float] | None = None) -> Planner:
    """What `auto` makes, with seconds that are given."""
    texts, models = [source("ngram"), source("suffix:tree")], list[tuple[ChainProposer, Costs]]()
    costs = Costs(costs.rows, costs.seconds)  # they learn
    for chain in cast(tuple[ChainProposer, ...], chains):
        chain.inner = Planner(costs, texts, list(models), is_outermost=False)
        models.append((chain, Costs([1, 2], [0.1, 0.11])))
    return Planner(costs, texts, models, clock=clock)


LONG_PROMPT = [0, *np.random.default_rng(5).integers(2, VOCAB, 40).tolist()]
CHEAP_ROWS = Costs([1, 2], [1.0, 1.05])

PROPOSER_FACTORIES: dict[str, Callable[[], Proposer]] = {
    "none": NullProposer,
    "sampled": lambda: SampledProposer(VOCAB, hidden_layers=(1,)),
    "sampled tree": lambda: SampledProposer(VOCAB, TREE, hidden_layers=(1,)),
    "tree with numbers of its own": lambda: SampledProposer(VOCAB, TREE, independent=True),
    **{name: lambda name=name: source(name) for name in (*LOOKUPS, "ngram:tree@6", "suffix:tree@6")},  # type: ignore[misc]
    "planned": lambda: planned(CHEAP_ROWS),
    "planned over models": lambda: planned(CHEAP_ROWS, chain_over(NullProposer(), 1), chain_over(NullProposer(), 0)),
    "draft model": lambda: chain_over(NullProposer(), 0),
    "unsure draft model of fewer tokens": lambda: chain_over(NullProposer(), 0, VOCAB - 1, 6, 0.3),
    "chain of two": lambda: chain_over(LookupProposer("ngram"), 4),
    "chain over suffix": lambda: chain_over(source("suffix"), 4),
    "unsure chain over suffix": lambda: chain_over(source("suffix"), 4, num_tokens=6, min_confidence=0.3),
    "chain over a tree": lambda: chain_over(SampledProposer(VOCAB, TREE, hidden_layers=(0,)), 4),
    "first hit": lambda: Combined((LookupProposer("ngram", 2), SampledProposer(VOCAB, hidden_layers=(1,))), first_hit, "first hit"),
    "one after another": lambda: Combined(
        (SampledProposer(VOCAB), LookupProposer("ngram", 2)), one_after_another, "one after another"
    ),
    "chain over one after another": lambda: chain_over(
        Combined((LookupProposer("ngram", 1), chain_over(NullProposer(), 2, num_tokens=2)), one_after_another, "both"),
        4,
        num_tokens=7,
    ),
    "chain of three, of more tokens": lambda: chain_over(chain_over(SampledProposer(VOCAB), 2, VOCAB + 2, 3), 4, VOCAB + 1, 7, 0.3),
}
every_proposer = pytest.mark.parametrize("proposer", PROPOSER_FACTORIES)


def engine_over(model: ToyBackend, proposer: Proposer, num_slots: int = 3, prompt_rows: int = 64) -> Engine:
    context = Context(model, num_slots, model.config.context_length, prompt_rows=prompt_rows)
    return Engine(context, proposer, ToyTokenizer(VOCAB))  # type: ignore[arg-type]


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[Output]]:
    """Every request's outputs, all requests at once."""
    ids = [engine.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    outputs: dict[int, list[Output]] = {id: [] for id in ids}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return [outputs[id] for id in ids]


def joined(outputs: list[Output]) -> dict[str, object]:
    return {
        "token_ids": [token for output in outputs for token in output.token_ids],
        "text": "".join(output.text for output in outputs),
        "finish_reason": outputs[-1].finish_reason,
        "logprobs": [one for output in outputs for one in output.logprobs],
    }


def random_requests(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(seed)
    prompts = [[0, *rng.integers(2, VOCAB, rng.integers(1, 20)).tolist()] for _ in range(5)]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(1, 40)),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            presence_penalty=float(rng.choice([0.0, 0.4])),
            frequency_penalty=float(rng.choice([0.0, 0.1])),
            logit_bias={1: -3.0} if rng.random() < 0.5 else {},
            stop=tuple(np.array(["ab", "bca", "cc", "dé", "a"])[rng.random(5) < 0.2].tolist()),
            stop_token_ids=(int(rng.integers(2, VOCAB)),) if rng.random() < 0.2 else (),
            ignore_eos=bool(rng.random() < 0.7),
            logprobs=2,
        )
        for _ in prompts
    ]
    return prompts, params


SEEDED: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.9},
    "penalised": {"temperature": 1.1, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {3: 1.5}},
    "truncated": {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
}


def answers_of_seeds(model: ToyBackend, engine: Engine, settings: dict[str, Any]) -> list[dict[str, object]]:
    """Answers to prompts of which one is long and two begin alike, all at once."""
    params = [SamplingParams(**settings, seed=seed, max_tokens=20, ignore_eos=True, logprobs=1) for seed in (11, 2, 3, 11)]
    return [joined(outputs) for outputs in run(engine, [[0, 4, 5, 4, 5], [0, 6, 6], LONG_PROMPT, [0, 4, 5, 4]], params)]


@every_proposer
@pytest.mark.parametrize("settings", SEEDED.values(), ids=SEEDED)
def test_a_seeds_answer_is_that_of_plain_decoding_for_every_proposer(proposer: str, settings: dict[str, Any]) -> None:
    """In any company, however prompts are read, and whatever earlier requests have left."""
    model = ToyBackend(4, VOCAB, memory=0.3)
    plain = answers_of_seeds(model, engine_over(model, NullProposer(), num_slots=1), settings)
    for num_slots, prompt_rows in ((4, 64), (3, 2)):
        engine = engine_over(model, PROPOSER_FACTORIES[proposer](), num_slots, prompt_rows)
        for _ in range(2):
            assert answers_of_seeds(model, engine, settings) == plain


@pytest.mark.parametrize("seed", range(8))
def test_a_seeds_answer_does_not_depend_on_a_planners_clock(seed: int) -> None:
    """The clock decides who drafts, and how much."""
    rng, model = np.random.default_rng(seed), ToyBackend(4, VOCAB, memory=0.3)
    times = np.cumsum(rng.exponential(rng.choice([0.01, 1.0, 30.0]), 100_000)).tolist()[::-1]
    chains = [chain_over(NullProposer(), number) for number in (0, 4)]
    planner = planned(CHEAP_ROWS, *chains, clock=times.pop)
    engine, sources = engine_over(model, planner), set[str]()
    for settings in SEEDED.values():
        plain = answers_of_seeds(model, engine_over(model, NullProposer(), num_slots=1), settings)
        assert answers_of_seeds(model, engine, settings) == plain
    sources |= {one.name for one in planner.explain() if one.num_rounds}
    assert sources - {"none"}


@every_proposer
@pytest.mark.parametrize("seed", range(6))
def test_greedy_output_is_identical_to_plain_decoding_for_every_proposer(proposer: str, seed: int) -> None:
    """Token ids, text, finish reason and log-probabilities, with more requests than slots."""
    model = ToyBackend(seed, VOCAB, memory=[0.0, 0.3, 1.0][seed % 3])
    prompts, params = random_requests(seed)
    answers = run(engine_over(model, PROPOSER_FACTORIES[proposer]()), prompts, params)
    for prompt, one, outputs in zip(prompts, params, answers, strict=True):
        got, expected = joined(outputs), plain_greedy(model, ToyTokenizer(VOCAB), prompt, one)
        assert [got[key] for key in ("token_ids", "text", "finish_reason")] == [
            expected[key] for key in ("token_ids", "text", "finish_reason")
        ]
        logprobs = got["logprobs"]
        assert isinstance(logprobs, list)
        assert [one.logprob for one in logprobs] == pytest.approx(expected["logprobs"], abs=1e-6)
        assert [one.token_id for one in logprobs] == expected["token_ids"]


@every_proposer
def test_outputs_say_which_level_drafted_each_token(proposer: str) -> None:
    prompts, params = random_requests(0)
    engine = engine_over(ToyBackend(0, VOCAB), PROPOSER_FACTORIES[proposer]())
    for outputs in run(engine, prompts, params):
        for output in outputs:
            assert "".join(output.token_texts) == output.text
            assert len(output.token_texts) == len(output.token_sources) == len(output.token_ids)
            (cycles,) = output.cycles
            drafted = [name for name in output.token_sources if name]
            assert output.token_sources == [*drafted, ""][: len(output.token_ids)], "a round's last token is the target's own"
            accepted = cycles[-1].num_accepted_tokens
            assert len(drafted) == accepted if output.finish_reason is None else len(drafted) <= accepted


def test_a_chains_tokens_carry_the_level_that_drafted_them_first() -> None:
    prompts, params = [[0, 2, 3, 2, 3, 2]] * 8, [SamplingParams(max_tokens=40, seed=seed, ignore_eos=True) for seed in range(8)]
    engine = engine_over(ToyBackend(0, VOCAB), PROPOSER_FACTORIES["chain over one after another"]())
    answers = run(engine, prompts, params)
    found = {name for outputs in answers for output in outputs for name in output.token_sources}
    assert found == {"ngram", "toy2", "toy4", ""}


@pytest.mark.parametrize(("shows_progress", "expected"), [(True, [8, 16, 24]), (False, [])])
def test_a_step_that_reads_a_prompt_tells_its_progress_if_asked(shows_progress: bool, expected: list[int]) -> None:
    engine = engine_over(ToyBackend(0, VOCAB, max_rows=8), NullProposer())
    wanted = RequestedAnswer([0, *[2, 3, 4, 5] * 6], SamplingParams(max_tokens=1), shows_progress=shows_progress)
    engine.add(engine.prepare(wanted))
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    assert [one.num_read_tokens for one in outputs] == [*expected, None]
    assert [one.finish_reason for one in outputs] == [None] * len(expected) + ["length"]


WITH_MODELS = [name for name, make in PROPOSER_FACTORIES.items() if make().levels and name != "planned over models"]


@pytest.mark.parametrize("proposer", [*WITH_MODELS, "planned over a model"])
def test_no_draft_model_runs_before_a_requests_first_token(proposer: str) -> None:
    """Nor, where another request has it drafting, over the new one's prompt."""
    if proposer == "planned over a model":
        model = cast(ChainProposer, chain_over(NullProposer(), 0))
        drafter: Proposer = Planner(Costs(CHEAP_ROWS.rows, CHEAP_ROWS.seconds), [], [(model, Costs([1, 2], [0.1, 0.11]))])
    else:
        drafter = PROPOSER_FACTORIES[proposer]()
    models = [cast(ToyBackend, level.context.backend) for level in drafter.levels]
    engine = engine_over(ToyBackend(0, VOCAB, memory=0.0), drafter)
    params = SamplingParams(max_tokens=30, ignore_eos=True, logit_bias={VOCAB - 1: -np.inf})  # which one of them does not know
    engine.add_request([0, 4, 5, 4, 5, 4], params)
    (first,) = engine.step()
    assert len(first.token_ids) == 1
    assert [model.num_forwards for model in models] == [0] * len(models)
    for _ in range(3):
        engine.step()
    assert sum(model.num_forwards for model in models) > 0
    fed = [model.num_rows for model in models]
    prompt = [0, *range(2, VOCAB - 1)] * 5
    second = engine.add_request(prompt, params)
    outputs = engine.step()
    while second not in [output.request_id for output in outputs]:
        assert all(len(level.context.slots.taken) <= 1 for level in drafter.levels)
        outputs = engine.step()
    assert len(outputs[-1].token_ids) == 1
    while engine.has_work:
        engine.step()
    assert any(model.num_rows - before > len(prompt) for model, before in zip(models, fed, strict=True))


def test_the_greedy_requests_above_exercise_acceptance_rejection_and_every_ending() -> None:
    reasons, accepted, evaluated = Counter[str](), 0, 0
    for seed in range(6):
        model = ToyBackend(seed, VOCAB, memory=[0.0, 0.3, 1.0][seed % 3])
        engine = engine_over(model, LookupProposer("ngram"))
        reasons.update(outputs[-1].finish_reason or "" for outputs in run(engine, *random_requests(seed)))
        accepted += engine.levels["ngram"].num_accepted_tokens
        evaluated += engine.levels["ngram"].num_evaluated_tokens
    assert reasons["stop"] > 5
    assert reasons["length"] > 5
    assert evaluated > accepted + 20 > 40


STREAMS = [[0, 4, 5, 4], [0, 6, 4]]


@every_proposer
@pytest.mark.parametrize("prompt_rows", [1, 3, 64])
def test_every_step_yields_a_token_for_each_stream_while_a_long_prompt_is_read(proposer: str, prompt_rows: int) -> None:
    """Also while draft models read it. Each answer is the one that it is alone."""
    model = ToyBackend(3, VOCAB, memory=0.3)
    params = SamplingParams(max_tokens=55, ignore_eos=True)
    engine = engine_over(model, PROPOSER_FACTORIES[proposer](), prompt_rows=prompt_rows)
    tokens: dict[int, list[int]] = {engine.add_request(prompt, params): [] for prompt in STREAMS}
    streams = list(tokens)

    def step() -> set[int]:
        outputs = engine.step()
        for output in outputs:
            tokens[output.request_id] += output.token_ids
        return {output.request_id for output in outputs}

    step()
    late = engine.add_request(LONG_PROMPT, SamplingParams(max_tokens=15, ignore_eos=True))
    tokens[late] = []
    num_waiting = 0
    while engine.has_work:
        running = [id for id in streams if len(tokens[id]) < 55]
        assert step() >= set(running)
        num_waiting += not tokens[late] and len(running) == 2
    assert num_waiting >= min(len(LONG_PROMPT) // min(prompt_rows, model.max_rows), 8)
    for prompt, answer in zip([*STREAMS, LONG_PROMPT], tokens.values(), strict=True):
        one = SamplingParams(max_tokens=len(answer), ignore_eos=True)
        assert answer == plain_greedy(model, ToyTokenizer(VOCAB), prompt, one)["token_ids"]


@pytest.mark.parametrize("proposer", [name for name in WITH_MODELS if "fewer" not in name])
def test_a_draft_model_reads_a_long_prompt_in_chunks_also_beside_streams_that_it_does_not_draft_for(proposer: str) -> None:
    drafter = PROPOSER_FACTORIES[proposer]()
    contexts = [cast(Context, level.context) for level in drafter.levels]
    for context in contexts:
        context.prompt_rows = 2
    engine = engine_over(ToyBackend(3, VOCAB, memory=0.3), drafter)
    engine.add_request(STREAMS[0], SamplingParams(max_tokens=50, ignore_eos=True, max_draft_tokens=0))
    engine.step()
    late = engine._requests[engine.add_request(LONG_PROMPT, SamplingParams(max_tokens=18, ignore_eos=True))].seq
    held, chunks = [0] * len(contexts), list[int]()
    while late.finish_reason is None:
        engine.step()
        for i, context in enumerate(contexts):
            if late.finish_reason is None and late.id in context.slots.taken:
                before, held[i] = held[i], len(late.tokens) - 1 - context.num_unfed(late)
                if held[i] < len(LONG_PROMPT) - 16:  # the rest is fed with a draft
                    chunks.append(held[i] - before)
    assert set(chunks) == {2}
    assert len(chunks) >= 10


def test_a_prompt_that_several_requests_share_is_read_once() -> None:
    """By requests that arrive together, and from one that generates."""
    model = ToyBackend(3, VOCAB, memory=0.3, max_rows=64)
    engine, params = engine_over(model, NullProposer(), num_slots=4), SamplingParams(max_tokens=5, ignore_eos=True)
    prompts = [LONG_PROMPT, LONG_PROMPT, [*LONG_PROMPT[:35], 4, 5]]
    answers = run(engine, prompts, [params] * 3)
    stats = [outputs[-1].stats for outputs in answers]
    assert [one.num_cached_tokens for one in stats if one] == [0, 40, 35]
    assert model.num_rows == 41 + 1 + 2 + 3 * 4
    other = LONG_PROMPT[20::-1]
    engine.add_request(other, SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    late = engine.add_request([*other, 6], params)
    outputs = [output for _ in range(5) for output in engine.step() if output.request_id == late]
    assert outputs[-1].stats is not None
    assert outputs[-1].stats.num_cached_tokens == 21
    for prompt, answer in zip([*prompts, [*other, 6]], [*answers, outputs], strict=True):
        assert joined(answer)["token_ids"] == plain_greedy(model, ToyTokenizer(VOCAB), prompt, params)["token_ids"]


def test_who_waits_for_a_prefix_holds_up_nobody_and_keeps_a_slot() -> None:
    model = ToyBackend(3, VOCAB, memory=0.3, max_rows=10)
    engine, params = engine_over(model, NullProposer(), num_slots=3, prompt_rows=10), SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [LONG_PROMPT, [*LONG_PROMPT, 4], [0, 5], [0, 6], [0, 7]]
    ids, running = [engine.add_request(prompt, params) for prompt in prompts], list[list[int]]()
    outputs: dict[int, list[Output]] = {id: [] for id in ids}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        running.append([seq.id for seq in engine._scheduler.running])
    assert running[0] == [ids[0], ids[2]]  # the third slot is for the second request
    assert outputs[ids[1]][-1].num_cached_tokens == 12  # fewer than 32 are missing then: they are not worth another step
    for id, prompt in zip(ids, prompts, strict=True):
        assert joined(outputs[id])["token_ids"] == plain_greedy(model, ToyTokenizer(VOCAB), prompt, params)["token_ids"]


@pytest.mark.parametrize("prompt_rows", [2, 64])
def test_a_proposer_gets_the_hidden_states_of_every_token_that_no_cache_held(prompt_rows: int) -> None:
    """In however many chunks a prompt was read; `begin` told which tokens were cached, and the last of a prefix is fed again."""
    cached: dict[int, int] = {}
    seen: dict[int, list[list[int]]] = {}

    class Watching(NullProposer):
        name, hidden_layers = "watching", (0, 1)

        def begin(self, seq: Sequence, num_cached: int) -> None:
            cached[seq.id], seen[seq.id] = num_cached, []

        def accept(self, seq: Sequence, verdict: object, hidden: tuple[np.ndarray, ...]) -> None:
            first, second = hidden
            assert (second == first + 1).all()
            seen[seq.id] += first[:, :2].astype(int).tolist()

        def end(self, seq: Sequence) -> None:
            rows = [[token, position] for position, token in enumerate(seq.tokens[:-1])]
            assert seen[seq.id] == rows[cached[seq.id] :]

    engine = engine_over(ToyBackend(3, VOCAB), Watching(), 3, prompt_rows)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    run(engine, [[0, 4, 5], LONG_PROMPT, LONG_PROMPT[::-1]], [params] * 3)
    run(engine, [[*LONG_PROMPT[:30], 4], [0, 5]], [params] * 2)
    assert list(cached.values()) == [0, 0, 0, 29, 0]


def test_an_answer_given_before_takes_fewer_forwards_the_next_time() -> None:
    engine = engine_over(ToyBackend(4, VOCAB, memory=1.0), source("suffix"))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    first, second = (len(run(engine, [[0, 4, 5]], [params])[0]) for _ in range(2))
    assert second < first / 2


SAMPLED_PARAMS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.9},
    "truncated and penalised": {"temperature": 1.3, "top_k": 6, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
}
NUM_SAMPLES = 900


@pytest.mark.parametrize("settings", SAMPLED_PARAMS.values(), ids=SAMPLED_PARAMS)
def test_sampled_output_follows_the_targets_distribution(settings: dict[str, Any]) -> None:
    """Chi-square of whole strings against the product of the target's rows. With drafts a seed's answer is the same one."""
    model, prompt = ToyBackend(8, VOCAB, memory=0.2, max_rows=256), [0, 4, 5, 6, 4, 5, 6, 4]
    exact, p_values = string_probs(model, prompt, SamplingParams(**settings), 3), []
    for temperature in (settings["temperature"], 1.5 * settings["temperature"]):  # the second is the control
        one = SamplingParams(**{**settings, "temperature": temperature}, max_tokens=3, ignore_eos=True)
        params = [replace(one, seed=seed) for seed in range(NUM_SAMPLES)]
        answers = run(engine_over(model, NullProposer(), num_slots=50), [prompt] * NUM_SAMPLES, params)
        counts = Counter(tuple(token for output in outputs for token in output.token_ids) for outputs in answers)
        p_values.append(chi_square(counts, exact).p_value)
    assert p_values[0] > 1e-6 > p_values[1]


@pytest.mark.parametrize("stop", [("ab",), ("ba", "abc"), ("é",), ("aé", "bcab")])
def test_streamed_text_never_shows_what_a_stop_string_then_takes_back(stop: tuple[str, ...]) -> None:
    """At every moment the shown text is a beginning of the final text, and holds no stop string."""
    num_stopped = 0
    for seed in range(20):
        model = ToyBackend(seed, VOCAB, memory=0.6)
        params = SamplingParams(temperature=1.5, seed=seed, stop=stop, max_tokens=40, ignore_eos=True)
        (outputs,) = run(engine_over(model, NullProposer()), [[0, 4]], [params])
        shown = ""
        for output in outputs:
            shown += output.text
            assert not any(one in shown for one in stop)
        ids = [token for output in outputs for token in output.token_ids]
        whole = ToyTokenizer(VOCAB).decode(ids)
        cuts = [whole.index(one) for one in stop if one in whole]
        num_stopped += bool(cuts)
        assert shown == (whole[: min(cuts)] if cuts else whole)
    assert num_stopped


def test_a_proposer_learns_what_was_answered_and_nothing_beyond() -> None:
    """A round may commit more than the request wanted; at its end the sequence holds the answer."""
    ended: dict[int, list[int]] = {}
    model = ToyBackend(0, VOCAB, memory=1.0)

    class Clairvoyant(NullProposer):
        name = "clairvoyant"

        def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
            drafts = []
            for seq, limit in zip(seqs, limits, strict=True):
                path = list(seq.tokens)
                while len(path) < len(seq.tokens) + min(limit, 6):
                    path.append(int(argmax(model.row(path))))
                drafts.append(Draft.chain(path[len(seq.tokens) :], self.name))
            return drafts

        def end(self, seq: Sequence) -> None:
            ended[seq.id] = seq.output

    engine = engine_over(model, Clairvoyant())
    answers = run(engine, random_requests(3)[0], [SamplingParams(stop=("a", "c"), max_tokens=30)] * 5)
    assert {outputs[0].request_id: joined(outputs)["token_ids"] for outputs in answers} == ended
    level = engine.levels["clairvoyant"]
    assert level.num_accepted_tokens + level.num_cycles > sum(map(len, ended.values()))


@every_proposer
def test_no_more_tokens_than_the_context_holds(proposer: str) -> None:
    model = ToyBackend(0, VOCAB, memory=0.0, context_length=16)
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    (outputs,) = run(engine_over(model, PROPOSER_FACTORIES[proposer]()), [[0, 4, 5, 4, 5]], [params])
    assert joined(outputs)["finish_reason"] == "length"
    assert len(joined(outputs)["token_ids"]) == 11  # type: ignore[arg-type]
    (outputs,) = run(engine_over(model, PROPOSER_FACTORIES[proposer]()), [[0] * 15], [params])
    assert len(joined(outputs)["token_ids"]) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "prompt is empty"),
        ([0, 8], SamplingParams(), r"must be in \[0, 8\), got 0 to 8"),
        ([-1], SamplingParams(), r"must be in \[0, 8\), got -1 to -1"),
        ([0] * 64, SamplingParams(), "prompt has 64 tokens and the context holds 64"),
        ([0], SamplingParams(logit_bias={8: 1.0}), r"logit_bias ids must be in \[0, 8\)"),
        ([0], SamplingParams(stop_token_ids=(99,)), r"stop_token_ids ids must be in \[0, 8\)"),
        ([0], SamplingParams(logit_bias=dict.fromkeys(range(8), -np.inf)), "forbids every token"),
    ],
)
def test_requests_that_cannot_run_are_clear_errors(prompt: list[int], params: SamplingParams, message: str) -> None:
    engine = engine_over(ToyBackend(1, VOCAB), NullProposer())
    with pytest.raises(ConfigError, match=message):
        engine.add_request(prompt, params)
    assert not engine.has_work


@every_proposer
def test_an_aborted_request_frees_its_slot_and_leaves_the_others_alone(proposer: str) -> None:
    model = ToyBackend(5, VOCAB, memory=0.3)
    engine = engine_over(model, PROPOSER_FACTORIES[proposer](), num_slots=1)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    running, waiting, last = (engine.add_request([0, 4, 5], params) for _ in range(3))
    engine.step()
    for id in (running, waiting):
        output = engine.abort(id)
        assert output is not None
        assert output.finish_reason == "aborted"
        assert engine.abort(id) is None
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step() if output.request_id == last for token in output.token_ids]
    assert tokens == plain_greedy(model, ToyTokenizer(VOCAB), [0, 4, 5], params)["token_ids"]


@every_proposer
@pytest.mark.parametrize("after", [True, False])
def test_an_interrupt_in_a_forward_aborts_what_ran_and_leaves_the_engine_usable(proposer: str, after: bool) -> None:
    model = ToyBackend(5, VOCAB, memory=0.3)
    engine = engine_over(model, PROPOSER_FACTORIES[proposer](), num_slots=2)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    ids = [engine.add_request([0, 4, 5], params) for _ in range(3)]
    engine.step()
    whole = model.forward

    def interrupted(batch: object, cache: object) -> object:
        if after:
            whole(batch, cache)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    model.forward = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    model.forward = whole  # type: ignore[method-assign]
    assert [(output.request_id, output.finish_reason) for output in engine.step()] == [(id, "aborted") for id in ids]
    assert not engine.has_work
    answers = run(engine, [[0, 4, 5]] * 3, [params] * 3)
    expected = plain_greedy(model, ToyTokenizer(VOCAB), [0, 4, 5], params)["token_ids"]
    assert [joined(outputs)["token_ids"] for outputs in answers] == [expected] * 3


def test_a_prompt_that_continues_an_earlier_conversation_feeds_only_what_is_new() -> None:
    model = ToyBackend(6, VOCAB, memory=0.3)
    engine = engine_over(model, NullProposer())
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    (first,) = run(engine, [[0, 4, 5, 6]], [params])
    prompt = [0, 4, 5, 6, *joined(first)["token_ids"], 7]  # type: ignore[misc]
    rows = model.num_rows
    (second,) = run(engine, [prompt], [params])
    assert model.num_rows - rows == 2 + 4  # the last answer token, the new token, and four decoded ones
    assert second[-1].stats is not None
    assert second[-1].stats.num_cached_tokens == 8
    fresh = plain_greedy(model, ToyTokenizer(VOCAB), prompt, params)
    assert joined(second)["token_ids"] == fresh["token_ids"]


def test_figures_count_what_happened() -> None:
    model = ToyBackend(0, VOCAB, memory=0.0, max_rows=256)
    engine = engine_over(model, LookupProposer("ngram", 3))
    (outputs,) = run(engine, [[0, 4, 5, 4, 5]], [SamplingParams(max_tokens=40, ignore_eos=True)])
    stats = outputs[-1].stats
    assert stats is not None
    level = stats.levels["ngram"]
    assert (stats.num_prompt_tokens, stats.num_new_tokens) == (5, 40)
    assert stats.num_forwards == level.num_cycles == len(outputs) < 40
    assert stats.num_new_tokens == level.num_accepted_tokens + level.num_cycles
    assert sum(level.num_accepted_tokens_per_pos) == level.num_accepted_tokens
    assert level.num_accepted_tokens <= level.num_evaluated_tokens <= level.num_draft_tokens
    assert level.tau == pytest.approx(40 / level.num_cycles)
    for figure in (stats.ttft_s, stats.tpot_s, stats.tokens_per_s, stats.gb_per_s, stats.itl_s["p95"]):
        assert figure is not None
        assert figure >= 0
    assert json.loads(json.dumps(stats.as_dict()))["levels"]["ngram"]["tau"] == pytest.approx(level.tau)


def test_every_level_of_a_chain_has_figures_of_its_own_cheapest_first() -> None:
    model = ToyBackend(0, VOCAB, memory=0.8, max_rows=256)
    chain = chain_over(chain_over(LookupProposer("ngram"), 4, num_tokens=3), 0, num_tokens=6)
    engine = engine_over(model, chain)
    prompts, params = [[0, 4, 5, 4, 5], [0, 6, 6]], [SamplingParams(max_tokens=20, ignore_eos=True)] * 2
    stats = [outputs[-1].stats for outputs in run(engine, prompts, params)]
    for one in stats:
        assert one is not None
        assert list(one.levels) == ["ngram", "toy4", "toy0"]
        ngram, lower, upper = one.levels.values()
        assert upper.num_cycles == one.num_forwards
        # A round of a level above yields what it accepted and one token more; drafts may be cut after that.
        assert lower.num_accepted_tokens + lower.num_cycles == upper.num_draft_tokens
        assert ngram.num_accepted_tokens + ngram.num_cycles == lower.num_draft_tokens
        assert sum(upper.num_accepted_tokens_per_pos) == upper.num_accepted_tokens
    for name, total in engine.levels.items():
        assert total.num_draft_tokens == sum(one.levels[name].num_draft_tokens for one in stats if one is not None)


def test_speculation_that_drafts_nothing_runs_the_same_forwards_as_none() -> None:
    counts = []
    for proposer in (NullProposer(), LookupProposer("ngram")):
        model = ToyBackend(1, 100, memory=3.0)  # over so many tokens nothing repeats soon
        engine = Engine(Context(model, 1, 64), proposer, ToyTokenizer(100))  # type: ignore[arg-type]
        run(engine, [[0, 4, 5]], [SamplingParams(max_tokens=4, ignore_eos=True)])
        assert engine.levels[proposer.name].num_drafts == 0
        counts.append((model.num_forwards, model.num_rows))
    assert counts[0] == counts[1] == (4, 6)

"""A layer whose state cannot be truncated: whatever states its storage keeps, the tokens are those of plain decoding."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from cpuspec.engine.engine import Engine
from cpuspec.model.batch import ForwardBatch
from cpuspec.settings import SamplingParams
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.context import Context
from cpuspec.speculation.drafters.lookups import LookupProposer
from cpuspec.speculation.proposer import NullProposer, Proposer
from tests.oracles import RecurrentBackend, SampledProposer, ToyTokenizer, plain_greedy

KEPT: dict[str, Callable[[int, int], Iterable[int]]] = {
    "every row of a forward": lambda before, after: range(before, after + 1),
    "before and after a forward": lambda before, after: (before, after),
    "checkpoints": lambda before, after: (*range(0, after, 5), after),
    "the last alone": lambda before, after: (after,),
}
TREE = (-1, -1, 0, 1, 1, -1)
PROMPTS = [[0, *np.random.default_rng(5).integers(2, 8, size).tolist()] for size in (3, 30, 12)]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)

every_storage = pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)


def chain_over(inner: Proposer, kept: Callable[[int, int], Iterable[int]]) -> Proposer:
    """A draft model that resembles the target: the same weights, but for nine tokens."""
    return ChainProposer(inner, Context(RecurrentBackend(3, kept, 9), 3, 60, 8))


PROPOSERS: dict[str, Callable[[Callable[[int, int], Iterable[int]]], Proposer]] = {
    "none": lambda kept: NullProposer(),
    "ngram": lambda kept: LookupProposer("ngram"),
    "tree": lambda kept: SampledProposer(8, TREE, independent=True),
    "chain": lambda kept: chain_over(LookupProposer("ngram"), kept),
    "chain over a tree": lambda kept: chain_over(SampledProposer(8, TREE), kept),
}


@every_storage
@pytest.mark.parametrize("proposer", PROPOSERS.values(), ids=PROPOSERS)
@pytest.mark.parametrize("prompt_rows", [2, 64])
def test_greedy_output_is_that_of_plain_decoding(
    proposer: Callable[[Callable[[int, int], Iterable[int]]], Proposer],
    kept: Callable[[int, int], Iterable[int]],
    prompt_rows: int,
) -> None:
    """Of prompts in chunks, of one that continues an earlier answer, and of one that shares the prefix of a running one."""
    model = RecurrentBackend(3, kept)
    engine = Engine(Context(model, 3, 64, prompt_rows=prompt_rows), proposer(kept), ToyTokenizer(8))  # type: ignore[arg-type]
    prompts, answers = list(PROMPTS), dict[int, list[int]]()
    for number in range(2):
        ids = [engine.add_request(prompt, PARAMS) for prompt in prompts[len(answers) :]]
        answers |= {id: [] for id in ids}
        while engine.has_work:
            for output in engine.step():
                answers[output.request_id] += output.token_ids
                if not number and len(prompts) == 3 and len(answers[1]) > 3:
                    prompts.append([*PROMPTS[1], *answers[1][:3], 4])
                    answers[engine.add_request(prompts[-1], PARAMS)] = []
        prompts.append([*PROMPTS[0], *answers[0], 5, 6])
    for prompt, answer in zip(prompts, answers.values(), strict=False):
        assert answer == plain_greedy(model, ToyTokenizer(8), prompt, PARAMS)["token_ids"]


def test_a_truncation_returns_the_longest_length_of_which_a_state_is_kept() -> None:
    model = RecurrentBackend(3, KEPT["before and after a forward"])
    cache = model.new_cache(2, 32)
    for size in (4, 6):
        held = cache.lengths[0]
        model.forward(ForwardBatch([4] * size, list(range(held, held + size)), [0], [0, size]), cache)
    assert (cache.copy(0, 1, 9), cache.copy(0, 1, 10)) == (4, 10)
    assert (cache.truncate(0, 10), cache.truncate(0, 9), cache.lengths) == (10, 4, [4, 10])
    assert cache.truncate(0, 3) == 0


def test_a_path_of_a_tree_is_kept_with_its_states_or_fed_again() -> None:
    for name, length in (("every row of a forward", 4), ("before and after a forward", 3)):
        model = RecurrentBackend(3, KEPT[name])
        cache = model.new_cache(1, 32)
        model.forward(ForwardBatch([0, 4, 5], [0, 1, 2], [0], [0, 3]), cache)
        model.forward(ForwardBatch([4, 6, 7], [3, 3, 4], [0], [0, 3], [-1, -1, 1]), cache)
        assert cache.keep_path(0, 3, np.array([1], np.int32)) == length
        tokens = [6, 4][length - 3 :]
        output = model.forward(ForwardBatch(tokens, list(range(length, 5)), [0], [0, len(tokens)]), cache)
        np.testing.assert_array_equal(output.logits[-1], model.row([0, 4, 5, 6, 4]))

"""What rows of a mixture cost: learned from the bytes that rounds read. The clock here is the bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cpuspec.backends import Backend, make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.model.batch import ForwardBatch
from cpuspec.sequence import Sequence
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.planner.costs import Costs, find_costs
from cpuspec.speculation.planner.planner import Planner
from cpuspec.speculation.proposer import NullProposer, Proposer
from cpuspec.speculation.round import speculate
from tools.make_tiny_model import make_tiny_gguf

ROWS = [1, 2, 3, 4, 6, 8, 9, 12, 16, 24]
PROMPT = [5, 9, 7, 3, 5, 9, 7]
NUM_TOKENS = 400


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    sizes = {"num_layers": 2, "num_experts": 48, "num_used": 3, "expert_size": 128, "context_length": 1024}
    path = make_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", "qwen3moe", weight_format="q8_0", **sizes)
    return make_backend("numba", open_checkpoint(path), EngineConfig(threads=1, max_rows=32, keep_packed=False))


class Source(NullProposer):
    """Drafts tokens that follow in `answer`, or those that do not; it is sure of either."""

    name = "source"

    def __init__(self, answer: list[int], right: bool) -> None:
        self._answer, self._right = answer, right

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            tokens = self._answer[seq.num_output_tokens :][: min(limit, 8)]
            tokens = tokens if self._right else [(token + 1) % 250 for token in tokens]
            drafts.append(Draft.chain(tokens, self.name, confidence=[0.9] * len(tokens)))
        return drafts


def costs_in_bytes(backend: Backend) -> Costs:
    """Costs as if a megabyte took a second, whoever reads it."""
    num_bytes = []
    for n in ROWS:
        tokens = [(31 * i + 7) % 250 for i in range(n)]
        batch = ForwardBatch(tokens, list(range(n)), [0], [0, n])
        num_bytes.append(backend.forward(batch, backend.new_cache(1, n)).weight_bytes)
    seconds = [number / 1e6 for number in num_bytes]
    return Costs(ROWS, seconds, None, num_bytes, [one - seconds[0] for one in seconds])


def answer(
    backend: Backend, proposer: Callable[[Context], Proposer], params: SamplingParams, number: int = 0
) -> tuple[list[int], int, int]:
    """The tokens of one sequence, the forwards behind its prompt's, and the bytes that these read."""
    context = Context(backend, 1, 512)
    drafter, seq = proposer(context), Sequence.new(number, PROMPT, params)
    context.slots.acquire(seq)
    drafter.begin(seq, 0)
    speculate(context, NullProposer(), [seq], [0])
    first = context.num_forwards, context.weight_bytes
    while seq.num_wanted:
        speculate(context, drafter, [seq], [min(8, seq.num_wanted - 1)])
    drafter.end(seq)
    return seq.output, context.num_forwards - first[0], context.weight_bytes - first[1]


def planned(costs: Costs, source: Source) -> Callable[[Context], Planner]:
    return lambda context: Planner(costs, [source], [], context=context, clock=lambda: context.weight_bytes / 1e6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_that_help_save_bytes_and_those_that_do_not_cost_no_more_than_three_hundredths(
    backend: Backend, temperature: float
) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=3, ignore_eos=True)
    plain, forwards, num_bytes = answer(backend, lambda context: NullProposer(), params)
    costs = costs_in_bytes(backend)
    assert costs.forward_s(8) > 2 * costs.forward_s(1), "rows are dear, as those of a mixture are"
    for right in (True, False):
        ids, drafted_forwards, drafted_bytes = answer(backend, planned(costs_in_bytes(backend), Source(plain, right)), params)
        assert ids == plain
        assert (drafted_forwards / forwards < 0.2, drafted_bytes / num_bytes < 0.25) == (right, right)
        assert right or (drafted_forwards == forwards and drafted_bytes <= 1.03 * num_bytes)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0, 1.3])
def test_rows_cost_what_those_of_this_text_read(share: float) -> None:
    """After some drafts of any length those of every length are known, and a text that reads otherwise is found out as soon."""
    alike, further, num_bytes = ([1 + a * (n - 1) for n in ROWS] for a in (0.02, 0.3, 40.0))
    further = [one - 1 for one in further]
    costs = Costs(ROWS, [a + f for a, f in zip(alike, further, strict=True)], None, num_bytes, further)
    assert costs.read_share == 1
    for reads in (share, 1.0):
        for _ in range(8):
            for n in (5, 9):
                costs.observe(n, 1 + (0.02 + reads * 0.3) * (n - 1), round(1 + reads * 40 * (n - 1)))
        assert costs.read_share == pytest.approx(reads, abs=0.1)
        for n in (1, 2, 8, 24, 40):
            assert costs.forward_s(n) == pytest.approx(1 + (0.02 + reads * 0.3) * (n - 1), abs=0.02 * n)


def test_a_slow_round_over_many_bytes_is_no_slow_machine() -> None:
    costs = Costs([1, 2, 4], [1.0, 1.5, 2.5], None, [10, 15, 25], [0.0, 0.5, 1.5])
    for _ in range(50):
        costs.observe(4, 1.0, 10)
        costs.observe(1, 1.0, 10)
    assert costs.forward_s(4) < 1.3
    costs.observe(4, 2.5, 25)
    assert costs.forward_s(1) == 1.0


def test_costs_of_a_mixture_are_measured_with_what_they_read_and_kept_without_what_a_text_does(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    costs = find_costs(backend)
    kept = costs.as_dict()
    assert costs.reads_more
    assert kept["num_bytes"][0] < kept["num_bytes"][3] < kept["num_bytes"][-1] <= backend.weight_bytes
    assert kept["further_s"][0] == 0
    assert kept["further_s"] == sorted(kept["further_s"])
    for n in (2, 3, 8) * 20:
        costs.observe(n, costs.forward_s(n), round(kept["num_bytes"][0]))
    costs.keep()
    assert costs.read_share < 0.5
    again = find_costs(backend)
    assert again.read_share == 1
    assert again.as_dict().keys() == kept.keys()
    assert again.as_dict()["num_bytes"] == kept["num_bytes"]

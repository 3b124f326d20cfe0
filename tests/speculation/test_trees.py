"""Trees end to end on both backends: whatever a tree holds and wherever, the tokens are those of plain decoding."""

from typing import Any

import numpy as np
import pytest

from cpuspec.backends import BACKENDS, make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.sequence import Sequence
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.proposer import NullProposer, Proposer
from cpuspec.speculation.round import speculate
from cpuspec.speculation.verify import Verdict
from tests.backends.models import every_backend, tiny

NUM_TOKENS = 20
PROMPTS = [np.random.default_rng(seed).integers(0, 300, size).tolist() for seed, size in ((0, 5), (1, 16), (2, 33))]
PARAMS = {
    "greedy": [SamplingParams()] * 3,
    "greedy with penalties": [SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)] * 3,
    "one of each": [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=1),
        SamplingParams(temperature=1.2, top_p=0.9, frequency_penalty=0.5, seed=2),
    ],
}


class Knowing(NullProposer):
    """Hides the answer among wrong tokens in trees, chains and empty drafts of every shape."""

    name = "knowing"

    def __init__(self, answers: list[list[int]]) -> None:
        self.num_accepted = self.num_moved = 0
        self._answers = answers
        self._rng = np.random.default_rng(3)

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            answer, tokens, parents, last = self._answers[seq.id][seq.num_output_tokens :], [], [], -1
            is_chain = self._rng.random() < 0.2
            for node in range(min(self._rng.integers(0, 12), limit)):
                parents.append(last if is_chain or self._rng.random() < 0.5 else int(self._rng.integers(-1, node)))
                tokens.append(int(self._rng.integers(0, 300)))
                if parents[-1] == last and self._rng.random() < 0.8:
                    tokens[-1], last = answer[depth_of(parents, node) - 1], node
            drafts.append(Draft(np.array(tokens, np.int32), np.array(parents, np.int32), self.name))
        return drafts

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[Any, ...]) -> None:
        self.num_accepted += len(verdict.path)
        self.num_moved += sum(node != place for place, node in enumerate(verdict.path))


def depth_of(parents: list[int], node: int) -> int:
    return 1 + (depth_of(parents, parents[node]) if parents[node] >= 0 else 0)


def generate(checkpoint: Checkpoint, name: str, settings: EngineConfig, proposer: Proposer, params: list[SamplingParams]) -> Any:
    backend = make_backend(name, checkpoint, settings)
    context = Context(backend, len(PROMPTS), 80)
    seqs = [Sequence.new(i, prompt, one) for i, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True))]
    for seq in seqs:
        context.slots.acquire(seq)
    while running := [seq for seq in seqs if seq.num_output_tokens < NUM_TOKENS]:
        speculate(context, proposer, running, [NUM_TOKENS - seq.num_output_tokens - 1 for seq in running])
    backend.close()
    return [seq.output for seq in seqs]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:  # type: ignore[no-untyped-def]
    return tiny(tmp_path_factory)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
# Graph engines round activations to int8: last bits that depend on the batch become steps of 1/127.
@every_backend([name for name in BACKENDS if name not in ("onnxruntime", "openvino")])
def test_trees_give_the_tokens_of_plain_decoding(checkpoint: Checkpoint, name: str, params: list[SamplingParams]) -> None:
    """Greedy and sampled, with penalties, 1 and 2 threads, in forwards of few rows, chains and trees in one batch."""
    plain = generate(checkpoint, name, EngineConfig(threads=1, max_rows=64), NullProposer(), params)
    for threads, max_rows in ((1, 64), (2, 7)):
        proposer = Knowing(plain)
        assert generate(checkpoint, name, EngineConfig(threads=threads, max_rows=max_rows), proposer, params) == plain
        assert proposer.num_accepted > 15
        assert proposer.num_moved > 5

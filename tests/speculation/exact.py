"""Models and sources whose rows are fractions: what rounds over them yield is what the target draws, in every run."""

from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from cpuspec.metrics import Spent
from cpuspec.model.batch import ForwardOutput
from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.proposer import NullProposer, Proposer
from cpuspec.speculation.round import speculate
from cpuspec.speculation.slots import Slots
from tests.oracles.exact import enumerate_exactly
from tests.toys import ExactDraws, ToyBackend

TARGET, SOURCE = 77, 78  # seeds; a chain's models are 0, 1, 2


@cache
def rational_row(seed: int, vocab: int, path: tuple[int, ...]) -> np.ndarray:
    weights = np.random.default_rng([seed, vocab, len(path), *path]).integers(1, 8, vocab)
    return np.array([Fraction(int(w), int(weights.sum())) for w in weights], object)


class ExactContext:
    """A model whose rows are fractions, which stand for the logits and for the distributions that are made of them."""

    capacity = prompt_rows = 99

    def __init__(self, seed: int, vocab: int, possible: np.ndarray | None = None) -> None:
        """possible: [vocab] the only tokens that its rows give a probability."""
        self.seed, self.vocab_size, self.spent = seed, vocab, Spent()
        self.possible = np.ones(vocab, np.bool_) if possible is None else possible
        self.backend = SimpleNamespace(config=SimpleNamespace(vocab_size=vocab, is_recurrent=False), max_rows=99)
        self.slots = Slots(ToyBackend(0), ToyBackend(0).new_cache(99, 99))  # type: ignore[arg-type]

    num_draftable, admit, num_unfed = Context.num_draftable, Context.admit, lambda *_: 0

    def keep_path(self, seq: Sequence, draft: Draft, path: list[int]) -> None:
        pass

    def score(self, seqs: list[Sequence], drafts: list[Draft], *of_models: object) -> list[ForwardOutput]:
        outputs = []
        for seq, draft in zip(seqs, drafts, strict=True):
            paths = [(*seq.output, *draft.tokens_to(node)) for node in range(-1, len(draft))]
            rows = [rational_row(self.seed, self.vocab_size, path) * self.possible for path in paths]
            outputs.append(ForwardOutput(np.stack([row / row.sum() for row in rows])))
        return outputs


class ExactSource(NullProposer):
    """Draws from rational rows of its own."""

    name = "source"

    def __init__(self, vocab: int, stops: bool = False) -> None:
        self.vocab, self.stops = vocab, stops

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            path = seq.output
            for _ in range(limit):
                if self.stops and sum(path) % 2:  # by what was drawn before, never by what it would draw
                    break
                path.append(seq.draw(rational_row(SOURCE, self.vocab, tuple(path)), len(path) - seq.num_output_tokens))
            drafts.append(Draft.chain(path[seq.num_output_tokens :], self.name))
        return drafts


def check_draws(proposer: Proposer, vocab: int, limit: int, length: int) -> None:
    """Rounds over the target yield the `length` tokens that plain decoding draws, whatever the random numbers are."""
    target = ExactContext(TARGET, vocab)

    def differs(rng: Any) -> bool:
        seq = Sequence.new(0, [0], SamplingParams(temperature=1.0))
        seq.draws = ExactDraws(rng)
        proposer.begin(seq, 0)
        while seq.num_output_tokens < length:
            limits = [min(limit, length - seq.num_output_tokens - 1)]
            speculate(target, proposer, [seq], limits)  # type: ignore[arg-type]
        proposer.end(seq)
        plain: list[int] = []
        while len(plain) < length:
            plain.append(seq.draws.draw(rational_row(TARGET, vocab, tuple(plain)), len(plain)))
        return seq.output != plain

    assert enumerate_exactly(differs) == {False: 1}

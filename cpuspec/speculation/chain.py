"""A verified pair is a proposer: an inner proposer drafts, and the context's model verifies. The tokens are those of that model.

Pairs nest to chains of any depth, after ML-SpecQD (arXiv 2503.13565). With `NullProposer` inside, a pair is a plain draft model. It
runs the same `speculate()` as the engine, on copies of the verifier's sequences that run ahead of them.
"""

from math import prod

from cpuspec.sampling import confidence
from cpuspec.sequence import Sequence
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Cycle, Draft
from cpuspec.speculation.proposer import Floors, Proposer, goes_on
from cpuspec.speculation.round import Round, speculate

DEFAULT_NUM_TOKENS = 4


class ChainProposer(Proposer):
    """Drafts up to `num_tokens` tokens of the context's model, sped up by `inner`.

    Tokens are drawn with the request's random numbers of their positions, as the verifier draws, so both often draw the same token.
    min_confidence: a draft ends with the first token whose row gives no token this probability (at temperature 1), after DISCO
    (arXiv 2405.04304).
    """

    def __init__(
        self,
        inner: Proposer,
        context: Context,
        name: str = "draft",
        num_tokens: int = DEFAULT_NUM_TOKENS,
        min_confidence: float = 0.0,
    ) -> None:
        self.name = name
        self.inner = inner
        self.context = context
        self.levels = (*inner.levels, self)
        self.num_tokens = num_tokens
        self.in_one_pass = False
        self.min_confidence = min_confidence

    def propose(self, seqs: list[Sequence], limits: list[int], floors: list[Floors] | None = None) -> list[Draft]:
        """The tokens that the pair generates for each sequence. All run together; those with enough tokens drop out."""
        context = self.context
        paths = [
            _Path(
                seq,
                min(limit, self.num_tokens, context.num_draftable(seq)),
                self.min_confidence,
                floors[i] if floors else None,
            )
            for i, (seq, limit) in enumerate(zip(seqs, limits, strict=True))
        ]
        wanted = [path for path in paths if path.num_missing > 0]
        ready, chunks = context.admit([path.seq for path in wanted], self.inner.begin)
        drafting = []
        for path, is_ready in zip(wanted, ready, strict=True):
            if is_ready:
                drafting.append(path)
            else:
                path.stop()
        while drafting or chunks:
            # A round yields up to one token more than inner drafted.
            limits = [path.num_missing - 1 for path in drafting]
            rounds = speculate(context, self.inner, [path.seq for path in drafting], limits, chunks)
            for path, done in zip(drafting, rounds, strict=True):
                path.cycles += done.cycles
                path.sources += [source or self.name for source in done.token_sources]
                if done.error is None:
                    path.cut(done)
                else:  # the model gives no token here: the draft ends, and the answer goes on
                    path.stop()
            drafting, chunks = [path for path in drafting if path.num_missing > 0], []
        return [path.draft(self.name) for path in paths]

    def end(self, seq: Sequence) -> None:
        """Free the slot, also where `inner` raises."""
        self.context.slots.release(seq)
        self.inner.end(seq)


class _Path:
    """A sequence that runs ahead of the verifier's, and the rounds that it took."""

    def __init__(self, seq: Sequence, limit: int, min_confidence: float, floors: Floors | None) -> None:
        self.seq = seq.with_drafted()
        self._min_confidence, self._floors = min_confidence, floors
        self._confidence: list[float] = []
        self.cycles: list[Cycle] = []
        self.sources: list[str] = []
        self._start = len(seq.tokens)
        self._end = self._start + max(limit, 0)

    @property
    def num_missing(self) -> int:
        """Tokens that are still to be drafted."""
        return self._end - len(self.seq.tokens)

    def stop(self) -> None:
        """Draft no further tokens."""
        self._end = len(self.seq.tokens)

    def cut(self, done: Round) -> None:
        """End the draft with the first new token that has an unsure row or an unlikely path, or that ends the answer."""
        constraint, wants_confidence = self.seq.constraint, self._min_confidence or self._floors is not None
        if not wants_confidence and constraint is None:
            return
        num_new = len(done.verdict.tokens)
        first, output = len(self.seq.tokens) - num_new, self.seq.output
        for i in range(num_new):
            path = output[: len(output) - num_new + i]
            sure = confidence(done.logits(i), constraint.legal(path) if constraint else None) if wants_confidence else 1.0
            self._confidence.append(sure)
            likely, number = prod(self._confidence), len(self._confidence)
            ends = sure < self._min_confidence or (self._floors is not None and not goes_on(self._floors, number, likely))
            if ends or (constraint and constraint.legal([*path, done.verdict.tokens[i]]) is None):
                self._end = first + i + 1
                return

    def draft(self, name: str) -> Draft:
        """The tokens that it ran ahead, as a draft."""
        tokens = self.seq.tokens[self._start : self._end]
        sure = None if self._floors is None else self._confidence[: len(tokens)]
        return Draft.chain(tokens, name, tuple(self.cycles), tuple(self.sources[: len(tokens)]), sure)

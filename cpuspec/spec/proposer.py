"""The one signature of every drafting method, and the table of methods by name."""

from collections.abc import Callable, Mapping
from typing import Protocol

from cpuspec.config import SpecConfig
from cpuspec.errors import ConfigError
from cpuspec.model.batch import F32
from cpuspec.sequence import Sequence
from cpuspec.spec.context import Context
from cpuspec.spec.draft import Draft
from cpuspec.spec.ngram import make_ngram
from cpuspec.spec.suffix import make_suffix
from cpuspec.spec.verify import Verdict


class Proposer(Protocol):
    """Drafts continuations. Verifier and engine never learn how.

    A user's own object with these members works wherever one of ours does. Draw with `seq.rng` and nothing else, and
    declare in `Draft.probs` the very rows that were drawn from; then any proposal leaves the output distribution as it is.

    Inside a chain a sequence is a shadow that runs ahead of its request. Between two calls its last tokens may have been
    taken back (`Sequence.rewind`, never into the prompt) and others committed that no `accept` told of. So whatever a
    proposer keeps about a sequence follows `seq.tokens`: undo what has changed (`Sequence.unchanged`), then add the
    rest. Learning that cannot be undone belongs into `end`, when `seq` holds its prompt and its whole answer.
    """

    name: str
    hidden_layers: tuple[int, ...]  # target layers whose outputs `accept` wants

    def begin(self, seq: Sequence) -> None:
        """Prepare for a sequence that holds its prompt."""
        ...

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """One draft for each sequence, of at most `limits[i]` tokens; it may be empty."""
        ...

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Learn from a round whose tokens `seq` already holds; called once for each round of the level it drafts for.

        hidden: [rows fed, C] for each layer asked for.
        """
        ...

    def end(self, seq: Sequence) -> None:
        """Forget a sequence; one that was aborted in the queue never began."""
        ...


def contexts_of(proposer: Proposer) -> tuple[Context, ...]:
    """The contexts that a proposer runs, cheapest first: its attribute `contexts`, which those without a model lack."""
    return getattr(proposer, "contexts", ())


class NullProposer:
    """Proposes nothing: plain decoding is speculation with empty drafts."""

    name = "none"
    hidden_layers: tuple[int, ...] = ()

    def begin(self, seq: Sequence) -> None:
        """Nothing to prepare."""

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """An empty draft for each sequence."""
        return [Draft.chain([], self.name) for _ in seqs]

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Nothing to learn."""

    def end(self, seq: Sequence) -> None:
        """Nothing to forget."""


PROPOSERS: Mapping[str, Callable[[str], Proposer]] = {
    "ngram": make_ngram,
    "suffix": make_suffix,
}  # name -> factory from the level's argument


def make_proposer(spec: SpecConfig) -> Proposer:
    """The proposer that a draft spec names. Raises ConfigError for unknown names, bad arguments and chains of levels."""
    if not spec.levels:
        return NullProposer()
    if len(spec.levels) > 1:
        raise ConfigError(
            f"draft spec {str(spec)!r} has {len(spec.levels)} levels; chains are not available in this version, name one proposer"
        )
    level = spec.levels[0]
    if level.proposer not in PROPOSERS:
        raise ConfigError(f"proposer {level.proposer!r} does not exist; wanted none or one of {', '.join(PROPOSERS)}")
    return PROPOSERS[level.proposer](level.argument)

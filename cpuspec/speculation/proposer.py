"""The one signature of every drafting method."""

from typing import TYPE_CHECKING, Protocol

from cpuspec.model.batch import F32
from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.verify import Verdict

if TYPE_CHECKING:
    from cpuspec.speculation.chain import ChainProposer


class Proposer(Protocol):
    """Drafts continuations. Verifier and engine never learn how.

    A user's own object with these members works wherever one of ours does. Draw with `seq.rng` and nothing else, and
    declare in `Draft.probs` the very rows that were drawn from; then any proposal leaves the output distribution as it is.

    Inside a chain sequences run ahead and are taken back. Between two calls the last tokens of one may have been
    retracted (`Sequence.rewind`, never into the prompt) and others committed that no `accept` told of. So whatever a
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


def levels_of(proposer: Proposer) -> "tuple[ChainProposer, ...]":
    """The models that draft in a proposer, cheapest first: its attribute `levels`, which those without a model lack."""
    return getattr(proposer, "levels", ())


class NullProposer:
    """Proposes nothing: plain decoding is speculation with empty drafts."""

    name = "none"
    hidden_layers: tuple[int, ...] = ()

    def begin(self, seq: Sequence) -> None:
        """Nothing to prepare."""

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """An empty draft for each sequence."""
        return [_NOTHING] * len(seqs)

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Nothing to learn."""

    def end(self, seq: Sequence) -> None:
        """Nothing to forget."""


_NOTHING = Draft.chain([], NullProposer.name)

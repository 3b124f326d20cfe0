"""The interface of every drafter."""

from typing import Protocol

from cpuspec.backends import Backend
from cpuspec.metrics import Spent
from cpuspec.model.batch import F32
from cpuspec.model.cache import KVCache
from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.slots import Slots
from cpuspec.speculation.verify import Verdict


class LevelContext(Protocol):
    """A drafting model with its cache: a `Context`, a `HeadContext` or a `StageContext`.

    spent: the time of its forwards and, if it verifies drafts, of the parts of its rounds. weight_bytes: bytes of weights that its
    forwards have read. hidden_bytes: bytes of hidden states that it keeps for later drafts.
    """

    cache: KVCache
    slots: Slots
    num_forwards: int
    weight_bytes: int
    spent: Spent

    @property
    def hidden_bytes(self) -> int: ...

    @property
    def backend(self) -> Backend:
        """The model."""
        ...


class Proposer(Protocol):
    """Drafts continuations. Verifier and engine never learn how. No draft changes the answer.

    A subclass needs a name and `propose`; the other methods are optional. A proposer that has rows of probabilities draws with
    `Sequence.draw`: the more its rows resemble the verifier's, the more often both draw the same token.

    `seq.id` names a request. Two calls for one request may get different `Sequence` objects. Within a chain the last tokens of a
    sequence are drafted ones, such as [1, 2, 7, 8] in one call and [1, 2, 9] in the next; the first `seq.num_committed` tokens,
    here [1, 2], never change. So a proposer's data about a sequence must follow `seq.tokens`. Learning that cannot be undone
    belongs into `end`, when `seq` has its whole answer.
    """

    name: str
    hidden_layers: tuple[int, ...] = ()  # layers of the verifying model whose outputs `accept` gets
    most_hidden: int | None = None  # how many of a prompt's last rows of these it needs; None for all
    # The models that draft in it, the cheapest first. A proposer with weights of its own is among its levels.
    levels: "tuple[DraftModel, ...]" = ()

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Prepare for a sequence that has its prompt, and generated tokens if a level above began to draft later.

        num_cached: the number of leading tokens for which `accept` gets no hidden states: the verifier's cache held them already.
        """
        return

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """One draft for each sequence, of at most `limits[i]` tokens, or empty."""
        ...

    def num_idle(self, seqs: list[Sequence]) -> int:
        """How many rounds after the next one it would leave without drafts, if the next one has none.

        So many rounds may run at once, without a call of `propose` between them. Then one call of `accept` gets all their tokens.
        """
        return 0

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Learn from a round, whose tokens `seq` already has. Called once for each round of the level that it drafts for.

        hidden: [rows, C] for each of `hidden_layers`, of consecutive positions up to the last accepted token's. The first call has
        a row for each token of the prompt after the cached ones, or for the last `most_hidden` of them.
        """
        return

    def end(self, seq: Sequence) -> None:
        """Forget a sequence. One that was aborted early may never have begun."""
        return


# floors[n]: the least probability of a path of n drafted tokens at which drafting one more pays. Beyond the list it is 0.
Floors = list[float]


class DraftModel(Proposer, Protocol):
    """A drafter with a model. A planner asks it for drafts that end where a further token does not pay.

    num_tokens: the most tokens of a draft. in_one_pass: whether a longer draft takes no more forwards. context: the model with its
    cache.
    """

    num_tokens: int
    in_one_pass: bool

    @property
    def context(self) -> LevelContext: ...

    def propose(self, seqs: list[Sequence], limits: list[int], floors: list[Floors] | None = None) -> list[Draft]:
        """With floors a draft has confidences. It goes on after n tokens while the product of theirs is at least `floors[i][n]`.

        A tree goes on after the nodes of depth n for which that holds.
        """
        ...


def goes_on(floors: Floors, num_tokens: int, likely: float) -> bool:
    """Whether a draft goes on after `num_tokens` tokens. likely: the product of their confidences."""
    return num_tokens >= len(floors) or likely >= floors[num_tokens]


class NullProposer(Proposer):
    """Drafts nothing: plain decoding is speculation with empty drafts."""

    name = "none"

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """An empty draft for each sequence."""
        return [_NOTHING] * len(seqs)

    def num_idle(self, seqs: list[Sequence]) -> int:
        """All."""
        return _ALL


_ALL = 1 << 30
_NOTHING = Draft.chain([], NullProposer.name)

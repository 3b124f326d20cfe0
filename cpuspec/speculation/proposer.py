"""The one signature of every drafting method."""

from typing import Protocol

from cpuspec.backends import Backend
from cpuspec.metrics import Spent
from cpuspec.model.batch import F32
from cpuspec.model.cache import KVCache
from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.prefix_cache import PrefixCache
from cpuspec.speculation.verify import Verdict


class LevelContext(Protocol):
    """A drafting model with its cache: a `Context`, a `HeadContext` or a `StageContext`.

    num_running: sequences that the engine runs, told before each round: beside others, prompts are read in small parts.
    spent: the time of its forwards, and of a verifier's rounds. weight_bytes: of weights that its forwards read.
    """

    cache: KVCache
    prefixes: PrefixCache
    num_running: int
    num_forwards: int
    weight_bytes: int
    spent: Spent

    @property
    def backend(self) -> Backend:
        """The model."""
        ...


class Level(Protocol):
    """A model that drafts: weights and a cache of its own, which reports and `LLM.close` need to know."""

    @property
    def name(self) -> str:
        """Its name in reports."""
        ...

    @property
    def context(self) -> LevelContext:
        """The model with its cache."""
        ...


class Proposer(Protocol):
    """Drafts continuations. Verifier and engine never learn how. No draft changes the answer.

    A subclass has a name and `propose`, and of the other methods those that it needs. A proposer that has rows of probabilities
    draws with `Sequence.draw`: the more they resemble the verifier's rows, the more often that draws the same token.

    `seq.id` names a request. Two calls about one may see different `Sequence` objects: within a chain their last tokens are
    drafted, and the next call may see others. The first `seq.num_committed` tokens stay. So whatever a proposer keeps about a
    sequence must follow `seq.tokens`. Learning that cannot be undone belongs into `end`, when `seq` holds its whole answer.
    """

    name: str
    hidden_layers: tuple[int, ...] = ()  # layers of the verifying model whose outputs `accept` wants
    most_hidden: int | None = None  # of a prompt, the last rows of these that it wants; None for all
    # The models that draft in it, the cheapest first; a proposer with weights of its own is one of its levels.
    levels: "tuple[Level, ...]" = ()

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Prepare for a sequence that holds its prompt, and the tokens generated so far if a level above did not draft at once.

        num_cached: of how many of its first tokens `accept` never has hidden states: the verifying model's cache held them already.
        """
        return

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """One draft for each sequence, of at most `limits[i]` tokens; it may be empty."""
        ...

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Learn from a round whose tokens `seq` already holds; called once for each round of the level it drafts for.

        hidden: [rows, C] for each layer asked for, of consecutive positions up to the last accepted token's. The first call has one
        row for each token of the prompt behind the cached ones, or `most_hidden` of these, in however many chunks it was read.
        """
        return

    def end(self, seq: Sequence) -> None:
        """Forget a sequence; one that was aborted early may never have begun."""
        return


Floors = list[float]  # for each number of drafted tokens, from 0 on; behind the last one 0


class DraftModel(Proposer, Protocol):
    """A drafter with a model, which a planner asks for drafts that are as long as they are likely."""

    @property
    def num_tokens(self) -> int:
        """The most tokens of a draft."""
        ...

    @property
    def in_one_pass(self) -> bool:
        """Whether a longer draft takes no more forwards."""
        ...

    @property
    def context(self) -> LevelContext:
        """The model with its cache."""
        ...

    def propose(self, seqs: list[Sequence], limits: list[int], floors: list[Floors] | None = None) -> list[Draft]:
        """With floors a draft has confidences. Behind n tokens it goes on while the product of theirs is `floors[i][n]` or more.

        A tree goes on behind such nodes of depth n.
        """
        ...


def goes_on(floors: Floors, num_tokens: int, likely: float) -> bool:
    """Whether a draft goes on behind `num_tokens` tokens. likely: the product of their confidences."""
    return num_tokens >= len(floors) or likely >= floors[num_tokens]


class NullProposer(Proposer):
    """Proposes nothing: plain decoding is speculation with empty drafts."""

    name = "none"

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """An empty draft for each sequence."""
        return [_NOTHING] * len(seqs)


_NOTHING = Draft.chain([], NullProposer.name)

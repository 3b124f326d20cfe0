"""Expected ratios, as of accepted tokens over drafted ones: learned from a request's rounds, and from others'."""

from dataclasses import dataclass

from cpuspec.sequence import Sequence

_DECAY = 0.98  # weight that a round keeps from one round to the next
_DECAY_OF_ENDED = 0.9  # weight that an ended request keeps from one to the next
FIRST_ACCEPTANCE = 1.0  # of what confidences claim
_PRIOR = 3.0  # weight, in units of what is spent, of other requests against the present one


@dataclass
class Ratio:
    """What rounds gained over what they spent. Older rounds fade."""

    gained: float = 0.0
    spent: float = 0.0

    def record(self, gained: float, spent: float, decay: float = _DECAY) -> None:
        """Count a round. decay: the weight that those before it keep."""
        self.gained = decay * self.gained + gained
        self.spent = decay * self.spent + spent

    def add(self, other: "Ratio", times: int = 1) -> None:
        """Count what another one holds, or with -1 no longer."""
        self.gained += times * other.gained
        self.spent += times * other.spent

    def expected(self, prior: float, weight: float = _PRIOR) -> float:
        """The ratio, pulled towards `prior` with this weight, in units of what is spent."""
        return (self.gained + weight * prior) / (self.spent + weight)


_NOTHING = Ratio()


class Estimate:
    """The ratio to expect of each running request.

    Its own rounds count; those of earlier requests, and of others that run, pull it towards what is usual, which begins at `first`.
    """

    def __init__(self, first: float) -> None:
        self.first = first
        self._ended = Ratio()
        self._running: dict[int, Ratio] = {}  # by sequence id
        self._sum = Ratio()  # of those that run

    def usual(self, but: Sequence | None = None) -> float:
        """The ratio to expect of a request of which nothing is known: that of all requests, without `but`'s own rounds."""
        own = self._running.get(but.id, _NOTHING) if but else _NOTHING
        gained, spent = self._ended.gained + self._sum.gained - own.gained, self._ended.spent + self._sum.spent - own.spent
        return Ratio(gained, spent).expected(self.first)

    def expected(self, seq: Sequence) -> float:
        """The ratio to expect of the sequence's next round."""
        return self._running.get(seq.id, _NOTHING).expected(self.usual(seq))

    def record(self, seq: Sequence, gained: float, spent: float) -> None:
        """Count a round of the sequence."""
        own = self._running.setdefault(seq.id, Ratio())
        self._sum.add(own, -1)
        own.record(gained, spent)
        self._sum.add(own)

    def add(self, seq: Sequence, gained: float) -> None:
        """Count what the latest round gained after all."""
        self._running[seq.id].gained += gained
        self._sum.gained += gained

    def restart(self, seq: Sequence) -> None:
        """Forget the sequence's own rounds."""
        if own := self._running.pop(seq.id, None):
            self._sum.add(own, -1)

    def end(self, seq: Sequence) -> None:
        """Count an ended sequence among the earlier ones."""
        own = self._running.get(seq.id)
        self.restart(seq)
        if own:
            self._ended.record(own.gained, own.spent, _DECAY_OF_ENDED)


@dataclass
class Drafted:
    """The drafts of a drafter over all requests, counted."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count a round."""
        self.num_rounds += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens

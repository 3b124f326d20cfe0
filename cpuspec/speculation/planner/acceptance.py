"""Expected ratios, as of accepted tokens over drafted ones: learned from a request's rounds, and from earlier requests."""

from dataclasses import dataclass

from cpuspec.sequence import Sequence

_DECAY = 0.98  # weight that a round keeps from one round to the next
_PRIOR = 3.0  # weight, in units of what is spent, of earlier requests against the present one


@dataclass
class Ratio:
    """What rounds gained over what they spent. Older rounds fade."""

    gained: float = 0.0
    spent: float = 0.0

    def record(self, gained: float, spent: float) -> None:
        """Count a round."""
        self.gained = _DECAY * self.gained + gained
        self.spent = _DECAY * self.spent + spent

    def expected(self, prior: float, weight: float = _PRIOR) -> float:
        """The ratio, pulled towards `prior` with this weight, in units of what is spent."""
        return (self.gained + weight * prior) / (self.spent + weight)


class Estimate:
    """The ratio to expect of each running request.

    Its own rounds count; earlier requests pull it towards `usual`, which begins at `first`.
    """

    def __init__(self, first: float) -> None:
        self.first = first
        self.usual = first  # of a request of which nothing is known yet
        self._ended = Ratio()
        self._running: dict[int, Ratio] = {}  # by sequence id

    def expected(self, seq: Sequence) -> float:
        """The ratio to expect of the sequence's next round."""
        own = self._running.get(seq.id)
        return own.expected(self.usual) if own else self.usual

    def record(self, seq: Sequence, gained: float, spent: float) -> None:
        """Count a round of the sequence."""
        self._running.setdefault(seq.id, Ratio()).record(gained, spent)

    def add(self, seq: Sequence, gained: float) -> None:
        """Count what the latest round gained after all."""
        self._running[seq.id].gained += gained

    def restart(self, seq: Sequence) -> None:
        """Forget the sequence's own rounds."""
        self._running.pop(seq.id, None)

    def end(self, seq: Sequence) -> None:
        """Count an ended sequence among the earlier ones."""
        own = self._running.pop(seq.id, None)
        if own:
            self._ended.record(own.gained, own.spent)
            self.usual = self._ended.expected(self.first)

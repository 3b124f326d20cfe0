"""Expected ratios, as of accepted tokens over drafted ones, and counts: learned from the rounds of all requests."""

from dataclasses import dataclass

_DECAY = 0.98  # weight that a round keeps from one round to the next
_PRIOR = 3.0  # weight of the first guess, in units of what is spent


@dataclass
class Ratio:
    """The gain of rounds over their cost. Older rounds fade. first: the ratio to expect before the first round."""

    first: float
    gained: float = 0.0
    spent: float = 0.0

    def record(self, gained: float, spent: float, decay: float = _DECAY) -> None:
        """Count a round. decay: the weight that those before it keep."""
        self.gained = decay * self.gained + gained
        self.spent = decay * self.spent + spent

    def restart(self) -> None:
        """Forget all rounds."""
        self.gained = self.spent = 0.0

    def expected(self, weight: float = _PRIOR) -> float:
        """The ratio to expect of the next round, pulled towards `first` with this weight, in units of what is spent."""
        return (self.gained + weight * self.first) / (self.spent + weight)


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

"""Expected ratios, such as of accepted tokens over drafted ones, and counts: learned from the rounds of all requests."""

from dataclasses import dataclass

_DECAY = 0.98  # weight that a round keeps from one round to the next
_PRIOR_WEIGHT = 3.0  # of the prior, in units of what is spent


@dataclass
class Ratio:
    """What rounds gained over what they spent. Older rounds fade. prior: the ratio to expect before the first round."""

    prior: float
    gained: float = 0.0
    spent: float = 0.0

    def add(self, gained: float, spent: float, decay: float = _DECAY) -> None:
        """Count a round. decay: the weight that earlier rounds keep."""
        self.gained = decay * self.gained + gained
        self.spent = decay * self.spent + spent

    def restart(self) -> None:
        """Forget all rounds."""
        self.gained = self.spent = 0.0

    def expected(self, weight: float = _PRIOR_WEIGHT) -> float:
        """The ratio to expect of the next round. weight: of the prior, in units of what is spent."""
        return (self.gained + weight * self.prior) / (self.spent + weight)


@dataclass
class Drafted:
    """Counts of a drafter's drafts, over all requests."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count a round."""
        self.num_rounds += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens

"""A planner's knowledge of a lookup drafter. A look-up is made first, and its draft is judged afterwards."""

from cpuspec.metrics import Spent
from cpuspec.speculation.planner.acceptance import Drafted, Ratio
from cpuspec.speculation.planner.choose import Option
from cpuspec.speculation.planner.costs import LEARNING
from cpuspec.speculation.proposer import Proposer

_FAR_OFF = 10.0  # a lookup that takes longer by this factor counts as this: something else took the time
_FIRST_GAIN = 0.25  # tokens that asking a lookup gains, before anything is known
_FIRST_LOOKUP_S = 1e-4


class LookupDrafter:
    """A drafter without a model.

    acceptance: accepted tokens over those that its confidences claim. gain: tokens that a look-up brings beyond the cost of their
    rows. seconds: of a look-up for one sequence.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.drafted = Drafted()
        self.acceptance = Ratio(1.0)
        self.gain = Ratio(_FIRST_GAIN)
        self.seconds = _FIRST_LOOKUP_S
        self.spent = Spent()

    def learn(self, option: Option, num_accepted: int, rows_cost: float) -> None:
        """Count a verified draft. rows_cost: what its rows took, in tokens of plain decoding."""
        self.acceptance.record(num_accepted, option.claimed)
        self.gain.gained += num_accepted - rows_cost

    def asked(self, num_seqs: int, seconds: float) -> None:
        """Count a look-up for some sequences."""
        self.spent.add("draft", seconds)
        self.seconds += LEARNING * (min(seconds / num_seqs, _FAR_OFF * self.seconds) - self.seconds)
        for _ in range(num_seqs):
            self.gain.record(0.0, 1.0)

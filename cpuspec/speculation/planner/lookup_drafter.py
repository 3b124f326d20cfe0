"""A planner's figures of a lookup drafter, which drafts first; the draft is judged afterwards."""

from cpuspec.metrics import Spent
from cpuspec.speculation.planner.acceptance import Drafted, Ratio
from cpuspec.speculation.planner.choose import Option
from cpuspec.speculation.planner.costs import LEARNING
from cpuspec.speculation.proposer import Proposer

_FAR_OFF = 10.0  # a look-up that takes longer by more than this factor counts as this factor: something else took the time
_FIRST_GAIN = 0.25  # tokens that a look-up is expected to gain at first
_FIRST_LOOKUP_S = 1e-4


class LookupDrafter:
    """A drafter without a model.

    acceptance: accepted tokens over those that its confidences claim. seconds: of a look-up for one sequence.
    gain: tokens that a look-up gains, after the cost of verifying them. `asked` counts the look-up, `learn` what it gained.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.drafted = Drafted()
        self.acceptance = Ratio(1.0)
        self.gain = Ratio(_FIRST_GAIN)
        self.seconds = _FIRST_LOOKUP_S
        self.spent = Spent()

    def learn(self, option: Option, num_accepted: int, rows_cost: float) -> None:
        """Count a verified draft. rows_cost: the time of its rows, in tokens of plain decoding."""
        self.acceptance.add(num_accepted, option.claimed)
        self.gain.gained += num_accepted - rows_cost

    def asked(self, num_seqs: int, seconds: float) -> None:
        """Count look-ups for `num_seqs` sequences that took `seconds` together."""
        self.spent.add("draft", seconds)
        self.seconds += LEARNING * (min(seconds / num_seqs, _FAR_OFF * self.seconds) - self.seconds)
        for _ in range(num_seqs):
            self.gain.add(0.0, 1.0)

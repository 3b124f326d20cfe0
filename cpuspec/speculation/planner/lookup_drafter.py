"""What a planner knows of a lookup drafter: it looks up first, and judges what was found."""

from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.planner.acceptance import FIRST_ACCEPTANCE, Drafted, Estimate
from cpuspec.speculation.planner.choose import WORTH, Option, best_prefix
from cpuspec.speculation.planner.costs import LEARNING, Costs
from cpuspec.speculation.planner.exploration import LOOKUP_PART, TRIAL_PRICE, TRIAL_TOKENS
from cpuspec.speculation.proposer import Proposer

_FAR_OFF = 10.0  # a lookup that takes longer by this factor counts as this: something else took the time
_FIRST_GAIN = 0.25  # tokens that asking a lookup gains, before anything is known
_FIRST_LOOKUP_S = 1e-4


class LookupDrafter:
    """A drafter without a model: a look-up is quick, so it is made first and its draft judged afterwards.

    acceptance: accepted tokens over those that its confidences claim. gain: tokens that a look-up brings beyond the cost of their
    rows. seconds: of a look-up for one sequence.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.drafted = Drafted()
        self.acceptance = Estimate(FIRST_ACCEPTANCE)
        self.gain = Estimate(_FIRST_GAIN)
        self.seconds = _FIRST_LOOKUP_S

    def option(self, seq: Sequence, draft: Draft, costs: Costs, num_seqs: int) -> Option:
        """The best prefix of a draft; a short one as a trial, should the estimates speak against it."""
        plain_s = costs.forward_s(num_seqs) / num_seqs
        option = best_prefix(self, draft, costs, self.acceptance.expected(seq), num_seqs)
        if option.tokens * plain_s > WORTH * option.seconds:
            return option._replace(draft=draft)
        trial = best_prefix(self, draft.first(TRIAL_TOKENS), costs, self.acceptance.first, num_seqs, TRIAL_PRICE)
        risk_s = costs.forward_s(num_seqs * (trial.num_tokens + 1)) / num_seqs - plain_s
        return trial._replace(draft=draft, trial=True, risk_s=risk_s, part=LOOKUP_PART, pays_back=True)

    def learn(self, seq: Sequence, option: Option, num_accepted: int, rows_cost: float) -> None:
        """Count a verified draft. rows_cost: what its rows took, in tokens of plain decoding."""
        self.acceptance.record(seq, num_accepted, option.claimed)
        self.gain.add(seq, num_accepted - rows_cost)

    def asked(self, seqs: list[Sequence], seconds: float) -> None:
        """Count a look-up for some sequences."""
        self.seconds += LEARNING * (min(seconds / len(seqs), _FAR_OFF * self.seconds) - self.seconds)
        for seq in seqs:
            self.gain.record(seq, 0.0, 1.0)

    def end(self, seq: Sequence) -> None:
        """Forget the sequence."""
        self.acceptance.end(seq)
        self.gain.end(seq)

"""What a planner knows of its drafters: what they take, how their drafts have fared, and what may still be lost by trying them."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from cpuspec.sequence import Sequence
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.drafters.translate import TranslatedProposer
from cpuspec.speculation.planner.costs import Costs
from cpuspec.speculation.proposer import Proposer

Model = ChainProposer | TranslatedProposer

_DECAY = 0.98  # of what a round is worth to the estimates, from one round to the next
_PRIOR = 3.0  # tokens' worth of belief in what held for earlier requests
_LEAST_USUAL = 0.2  # of what texts say: earlier requests do not pull those that begin below this share
_FIRST_ACCEPTANCE = 0.7  # of a model's token before anything is known
_FIRST_GAIN = 0.25  # tokens that asking a text gains, likewise
_FIRST_ASKING_S = 1e-4  # that asking takes, likewise
_LEARNING = 0.1  # weight of the latest draft in the seconds that drafting takes
_FAR_OFF = 10.0  # a text that seems so many times slower than it was counts for no more: something came between


@dataclass
class Ratio:
    """What came of rounds over what went into them; older ones fade."""

    gained: float = 0.0
    spent: float = 0.0

    def record(self, gained: float, spent: float) -> None:
        """Count a round."""
        self.gained = _DECAY * self.gained + gained
        self.spent = _DECAY * self.spent + spent

    def expected(self, prior: float) -> float:
        """The ratio, pulled to `prior` while little is known."""
        return (self.gained + _PRIOR * prior) / (self.spent + _PRIOR)


@dataclass
class Estimate:
    """A ratio to expect of a request: what it showed so far, pulled to what ended ones did, and these to `first`.

    least: ended ones pull it no lower.
    """

    first: float
    least: float = -math.inf
    ended: Ratio = field(default_factory=Ratio)
    running: dict[int, Ratio] = field(default_factory=dict)  # by sequence

    def of(self, seq: Sequence | None = None) -> float:
        """For a sequence, or for a new one."""
        usual = max(self.ended.expected(self.first), self.least)
        return self.running[seq.id].expected(usual) if seq and seq.id in self.running else usual

    def record(self, seq: Sequence, gained: float, spent: float) -> None:
        """Count a round."""
        self.running.setdefault(seq.id, Ratio()).record(gained, spent)

    def restart(self, seq: Sequence) -> None:
        """What the sequence was like before does not count."""
        self.running[seq.id] = Ratio()

    def end(self, seq: Sequence) -> None:
        """The sequence has ended."""
        own = self.running.pop(seq.id, None)
        if own:
            self.ended.record(own.gained, own.spent)


@dataclass
class Allowance:
    """Seconds that may be lost: a share of all time so far."""

    share: float
    lost_s: float = 0.0

    def take(self, seconds: float, all_s: float) -> bool:
        """Take what may be lost, if it is there."""
        if self.lost_s + seconds > self.share * all_s:
            return False
        self.lost_s += seconds
        return True


class Drafted(NamedTuple):
    """A draft that is out.

    earns_s: seconds that each accepted token earns back where it is a trial. Of one from text also expected: tokens that its
    drafter expects to be accepted; cost: what its rows take, in tokens of plain decoding.
    """

    candidate: "Candidate"
    num_tokens: int
    earns_s: float
    expected: float = 0.0
    cost: float = 0.0


class Candidate:
    """A drafter.

    acceptance: of its tokens, over those evaluated. trials: what may be lost by trying it, which each has for itself: texts are
    tried cheaply and often, and would leave nothing for models.
    """

    def __init__(self, proposer: Proposer, acceptance: Estimate, trials_share: float) -> None:
        self.proposer = proposer
        self.acceptance = acceptance
        self.trials = Allowance(trials_share)
        self.num_rounds = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def learn(self, seq: Sequence, draft: Drafted, num_accepted: int) -> None:
        """Count how a draft fared."""
        self.trials.lost_s -= num_accepted * draft.earns_s
        self.num_rounds += 1
        self.num_draft_tokens += draft.num_tokens
        self.num_accepted_tokens += num_accepted
        self.acceptance.record(seq, num_accepted, self._spent(draft, num_accepted))

    def _spent(self, draft: Drafted, num_accepted: int) -> float:
        """What acceptance is measured by: the tokens that were evaluated, up to the first that was not accepted."""
        return min(num_accepted + 1, draft.num_tokens)

    def end(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self.acceptance.end(seq)


class TextCandidate(Candidate):
    """A drafter without a model. Its acceptance is over the sum of its confidences.

    asking_s: what a proposal takes, for one sequence. gain: tokens that it brings beyond what its rows cost. idle: what asking may
    take while it is believed to gain less.
    """

    def __init__(self, proposer: Proposer, share: float) -> None:
        """share: of the time that may be lost, half by trying its drafts and half by asking for them."""
        super().__init__(proposer, Estimate(1.0, _LEAST_USUAL), share / 2)
        self.asking_s = _FIRST_ASKING_S
        self.gain = Estimate(_FIRST_GAIN)
        self.idle = Allowance(share / 2)

    def may_ask(self, seq: Sequence, plain_s: float, all_s: float) -> bool:
        """Whether asking is believed to gain more than it takes, else whether the allowance has that, from which it is then taken.

        plain_s: of a token without drafts. all_s: of all rounds so far.
        """
        return self.gain.of(seq) * plain_s > self.asking_s or self.idle.take(self.asking_s, all_s)

    def has_proposed(self, seqs: list[Sequence], seconds: float) -> None:
        """Learn what a proposal took."""
        took_s = min(seconds / len(seqs), _FAR_OFF * self.asking_s)
        self.asking_s += _LEARNING * (took_s - self.asking_s)
        for seq in seqs:
            self.gain.record(seq, 0.0, 1.0)

    def learn(self, seq: Sequence, draft: Drafted, num_accepted: int) -> None:
        """Count how a draft fared."""
        super().learn(seq, draft, num_accepted)
        self.gain.running[seq.id].gained += num_accepted - draft.cost

    def _spent(self, draft: Drafted, num_accepted: int) -> float:
        return draft.expected

    def end(self, seq: Sequence) -> None:
        """The sequence has ended."""
        super().end(seq)
        self.gain.end(seq)


class ModelCandidate(Candidate):
    """A drafter with a model.

    costs: of its forwards. seconds_per_token: of drafting, for one sequence. trial_rounds: that a running trial of a sequence has
    left.
    """

    proposer: Model

    def __init__(self, model: Model, costs: Costs, share: float) -> None:
        """share: of the time that may be lost by trying it."""
        super().__init__(model, Estimate(_FIRST_ACCEPTANCE), share)
        self.costs = costs
        self.seconds_per_token = costs.of(1)
        self.trial_rounds: dict[int, int] = {}
        self._fed: dict[int, int] = {}  # how long each sequence was when it last drafted
        self._missed_s: dict[int, float] = {}  # what its drafts would have saved each sequence since

    def num_unfed(self, seq: Sequence) -> int:
        """Tokens of the sequence that its context has not seen."""
        return len(seq.tokens) - self._fed.get(seq.id, 0)

    def catch_up_s(self, seq: Sequence) -> float:
        """Seconds of feeding those."""
        return self.num_unfed(seq) * self.costs.per_row

    def has_missed(self, seq: Sequence, seconds: float) -> float:
        """Add what a draft of it would save now; returns all that would have been saved since it last drafted."""
        self._missed_s[seq.id] = missed_s = self._missed_s.get(seq.id, 0.0) + seconds
        return missed_s

    def has_proposed(self, seqs: list[Sequence], num_tokens: int, seconds: float | None) -> None:
        """Learn what drafts of so many tokens took; no seconds where much was to be fed first."""
        if num_tokens and seconds is not None:
            self.seconds_per_token += _LEARNING * (seconds / num_tokens - self.seconds_per_token)
        for seq in seqs:
            self._fed[seq.id] = len(seq.tokens)
            self._missed_s.pop(seq.id, None)

    def end(self, seq: Sequence) -> None:
        """The sequence has ended."""
        super().end(seq)
        self._fed.pop(seq.id, None)
        self._missed_s.pop(seq.id, None)
        self.trial_rounds.pop(seq.id, None)

"""What a planner knows of its drafters: what their drafts came to, what they take, and what trials of them may still take."""

from dataclasses import dataclass

from cpuspec.metrics import Spent
from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.planner.costs import LEARNING, Costs, Ratio
from cpuspec.speculation.proposer import DraftModel, Proposer
from cpuspec.speculation.stage_context import StageContext

MAX_TOKENS = 16  # that a model drafts for one round
_USUALLY_UNFED = 3 * MAX_TOKENS  # the time of a draft counts if the model read no more than this before it
_FIRST_CHANCE = 0.7  # that a model's token is right, at first
_OF_ALL = 16.0  # weight of what all requests say of a model, in tokens of one request
_TOKENS_DECAY = 0.99  # weight that a model's tokens keep from one round to the next, in a request and over all
_FAR_OFF = 10.0  # a look-up that takes longer by more than this factor counts as this factor: something else took the time
_FIRST_GAIN = 0.25  # tokens that a look-up is expected to gain at first
_FIRST_LOOKUP_S = 1e-4
_SHARE = 0.015  # of all time is for trials, divided among a planner's drafters
_MOST_TRIALS = 3  # that are saved up


@dataclass
class Drafted:
    """Counts of a drafter's drafts, over all requests."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Trials:
    """Seconds that trials of a drafter may take: a share of all time, of which no more is saved up than a few trials take."""

    def __init__(self, num_drafters: int) -> None:
        self._share = _SHARE / max(num_drafters, 1)
        self._saved_s = self._largest_s = 0.0

    def earn(self, seconds: float) -> None:
        """Add the drafter's share of some time."""
        self._saved_s = min(self._saved_s + self._share * seconds, max(_MOST_TRIALS * self._largest_s, self._saved_s))

    def lacks(self, seconds: float) -> float:
        """How much time must pass before a trial of so many seconds."""
        self._largest_s = max(self._largest_s, seconds)
        return (seconds - self._saved_s) / self._share

    def spend(self, seconds: float) -> bool:
        """Take the seconds of a trial, if they are saved up; returns whether they were."""
        if self.lacks(seconds) > 0:
            return False
        self._saved_s -= seconds
        return True


class KnownDrafter:
    """acceptance: accepted tokens over those that confidences claim. seconds: that a look-up, or a model's forward, takes."""

    def __init__(self, proposer: Proposer, seconds: float, num_drafters: int) -> None:
        self.proposer, self.seconds = proposer, seconds
        self.acceptance, self.drafted, self.spent, self.trials = Ratio(1.0), Drafted(), Spent(), Trials(num_drafters)

    def learn(self, seq: Sequence, draft: Draft, claimed: float, num_accepted: int, rows_cost: float) -> None:
        """Count a verified draft. rows_cost: the time of its rows, in rounds without drafts."""
        self.acceptance.add(num_accepted, claimed)
        self.drafted.num_rounds += 1
        self.drafted.num_draft_tokens += len(draft)
        self.drafted.num_accepted_tokens += num_accepted


class LookupDrafter(KnownDrafter):
    """A drafter without a model. gain: tokens that a look-up gains, after the cost of verifying them."""

    def __init__(self, proposer: Proposer, num_drafters: int) -> None:
        super().__init__(proposer, _FIRST_LOOKUP_S, num_drafters)
        self.gain = Ratio(_FIRST_GAIN)

    def learn(self, seq: Sequence, draft: Draft, claimed: float, num_accepted: int, rows_cost: float) -> None:
        """Count what the look-up gained, too."""
        super().learn(seq, draft, claimed, num_accepted, rows_cost)
        self.gain.gained += num_accepted - rows_cost

    def asked(self, num_seqs: int, seconds: float) -> None:
        """Count look-ups for `num_seqs` sequences that took `seconds` together."""
        self.spent.add("draft", seconds)
        self.seconds += LEARNING * (min(seconds / num_seqs, _FAR_OFF * self.seconds) - self.seconds)
        for _ in range(num_seqs):
            self.gain.add(0.0, 1.0)


class ModelDrafter(KnownDrafter):
    """A drafter with a model. rounds: that a sequence's trial has left, by its id."""

    proposer: DraftModel

    def __init__(self, proposer: DraftModel, costs: Costs, num_drafters: int) -> None:
        """costs: of its forwards."""
        super().__init__(proposer, costs.forward_s(1), num_drafters)
        self.costs, self.rounds = costs, dict[int, int]()
        self._right = Ratio(_FIRST_CHANCE)  # tokens that were right, over those whose paths were, of all requests
        self._own: dict[int, Ratio] = {}  # the same, of each
        self._fed: dict[int, int] = {}  # by sequence id: the length that the model has read
        self._reads_prompts = not isinstance(proposer.context, StageContext)

    def chance(self, seq: Sequence) -> float:
        """The chance that a token is right for a sequence, if those before it are."""
        own, prior = self._own.get(seq.id), self._right.expected()
        if own is None:
            return prior
        own.prior = prior
        return own.expected(_OF_ALL)

    def reading_s(self, seq: Sequence) -> float:
        """Seconds of reading the tokens that the model missed."""
        return (len(seq.tokens) - self._fed.get(seq.id, 0)) * self.costs.row_s if self._reads_prompts else 0.0

    def asked(self, seqs: list[Sequence], drafts: list[Draft], seconds: float) -> list[int]:
        """Count drafts that took `seconds` together; returns the forwards of each. Learns what one takes, unless much was read."""
        self.spent.add("draft", seconds)
        one_pass = self.proposer.in_one_pass
        numbers = [int(draft.depths.max()) if len(draft) and not one_pass else min(len(draft), 1) for draft in drafts]
        unfed = [len(seq.tokens) - self._fed.get(seq.id, 0) if self._reads_prompts else 0 for seq in seqs]
        if any(numbers) and max(unfed) <= _USUALLY_UNFED:
            self.seconds += LEARNING * (seconds / sum(numbers) - self.seconds)
        # Count the prompt as read now. The model reads it over the next rounds anyway, though it may not draft until then.
        self._fed.update((seq.id, len(seq.tokens)) for seq in seqs)
        return numbers

    def learn(self, seq: Sequence, draft: Draft, claimed: float, num_accepted: int, rows_cost: float) -> None:
        """Count the tokens that were right, too."""
        super().learn(seq, draft, claimed, num_accepted, rows_cost)
        told = num_accepted, min(num_accepted + 1, int(draft.depths.max()))
        self._right.add(*told, _TOKENS_DECAY)
        self._own.setdefault(seq.id, Ratio(_FIRST_CHANCE)).add(*told, _TOKENS_DECAY)

    def end(self, seq: Sequence) -> None:
        """Forget the sequence."""
        for known in (self._fed, self._own, self.rounds):
            known.pop(seq.id, None)

    def usual(self, verifier: Costs) -> tuple[int, float]:
        """The best length of its drafts, 0 for none, and tokens per second of rounds with them (arXiv 2211.17192, section 3.3)."""
        chance, tokens, best = self._right.expected(), 1.0, (0, 1 / verifier.forward_s(1))
        for n in range(1, min(self.proposer.num_tokens, MAX_TOKENS) + 1):
            tokens += chance**n
            seconds = verifier.forward_s(n + 1) + (1 if self.proposer.in_one_pass else n) * self.seconds
            best = max(best, (n, tokens / seconds), key=lambda one: one[1])
        return best

"""What a planner knows of a drafter with a model: what its drafts promise before they are made, and how long they should be."""

from collections.abc import Callable
from itertools import pairwise

from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.planner.acceptance import FIRST_ACCEPTANCE, Drafted, Estimate
from cpuspec.speculation.planner.choose import MAX_TOKENS, Option, best_length, best_prefix
from cpuspec.speculation.planner.costs import LEARNING, Costs
from cpuspec.speculation.planner.exploration import TRIAL_FORWARDS, TRIAL_ROUNDS, TrialBudget
from cpuspec.speculation.proposer import DraftModel, Floors
from cpuspec.speculation.stage_context import StageContext

_USUALLY_UNFED = 3 * MAX_TOKENS  # a draft's time tells the time of a token where no more than this was fed first
_FIRST_NEXT = 0.7  # of a model's tokens


class ModelDrafter:
    """A drafter with a model. Its drafts end where going on does not pay, and are judged by their confidences once they are there.

    acceptance: accepted tokens over those that its confidences claim. seconds: of drafting for one sequence a token, or a whole
    draft where one pass makes it. What it promises before it has drafted is what its latest drafts promised.
    """

    def __init__(self, proposer: DraftModel, costs: Costs, verifier: Costs, clock: Callable[[], float]) -> None:
        """costs: of its forwards. verifier: of those of the model that it drafts for. clock: tells seconds."""
        self._now_s = clock
        self.proposer = proposer
        self.drafted = Drafted()
        self.seconds = costs.forward_s(1)
        self.acceptance = Estimate(FIRST_ACCEPTANCE)
        self._next = Estimate(_FIRST_NEXT)  # the chance of a further token, once those before it are accepted
        first = self._fixed(verifier, _FIRST_NEXT, proposer.num_tokens, 1)
        # Of a draft: the tokens that it claims to have accepted, the rows of these, and the forwards that made it.
        self._claimed, self._rows = Estimate(first.tokens - 1), Estimate(max(first.num_tokens, 1))
        self._forwards = Estimate(1 if proposer.in_one_pass else max(first.num_tokens, 1))
        self._reads = not isinstance(proposer.context, StageContext)
        self._trial_rounds: dict[int, int] = {}  # by sequence id: rounds that its trial has left
        self._costs = costs
        self._fed: dict[int, int] = {}  # by sequence id: its length when it was last drafted for
        self._missed_s: dict[int, float] = {}  # by sequence id: what drafts would have saved since

    def promise(self, costs: Costs, num_seqs: int, seq: Sequence | None = None) -> Option:
        """Of the sequence's next draft, or of one for a sequence of which nothing is known. costs: the verifier's."""
        accepted, claimed, rows, forwards = [
            one.expected(seq) if seq else one.usual() for one in (self.acceptance, self._claimed, self._rows, self._forwards)
        ]
        tokens = 1 + min(accepted, 1.0) * claimed
        below = int(rows)
        least, more = (costs.forward_s(num_seqs * (1 + n)) / num_seqs for n in (below, below + 1))
        return Option(self, round(rows), tokens, least + (rows - below) * (more - least) + forwards * self.seconds)

    def is_worth_its_price(self, seq: Sequence, option: Option, instead: Option, left: float, wait: float) -> bool:
        """Whether to feed it what it missed and to let it draft, as `option` promises more than `instead`.

        left: share of the tokens to come that lookups leave to it. wait: share of the price that must have been missed before.
        """
        if option.tokens_per_s <= instead.tokens_per_s or not self._saves(seq, option, instead, left):
            return False
        saved_s = instead.tokens * (1 / instead.tokens_per_s - 1 / option.tokens_per_s)
        self._missed_s[seq.id] = missed_s = self._missed_s.get(seq.id, 0.0) + saved_s
        return missed_s >= wait * self._price_s(seq)

    def is_tried(self, seq: Sequence, costs: Costs, limit: int, num_seqs: int, instead: Option, budget: TrialBudget) -> bool:
        """Whether to let it draft although it promises less, where a draft that is accepted whole would gain: now and then."""
        if self._trial_rounds.get(seq.id):
            return True
        hope = self._fixed(costs, 1.0, min(limit, self.proposer.num_tokens), num_seqs)
        if hope.tokens_per_s <= instead.tokens_per_s or not self._saves(seq, hope, instead, 1.0):
            return False
        if not budget.take(self, self._price_s(seq) + TRIAL_ROUNDS * TRIAL_FORWARDS * self.seconds):
            return False
        self._trial_rounds[seq.id] = TRIAL_ROUNDS
        for known in self._estimates:
            known.restart(seq)
        return True

    def propose(self, seqs: list[Sequence], limits: list[int], costs: Costs, num_seqs: int, rates: list[float]) -> list[Option]:
        """Its drafts, each as long as promises most. Learns what a token takes, unless much was to be fed first.

        rates: tokens per second that each sequence has without it.
        """
        tried = {seq.id for seq in seqs if self._trial_rounds.get(seq.id)}
        limits = [min(limit, TRIAL_FORWARDS if seq.id in tried else MAX_TOKENS) for seq, limit in zip(seqs, limits, strict=True)]
        floors = [
            self._floors(limit, costs, num_seqs, rate, 1.0 if seq.id in tried else self._chance(seq))
            for seq, limit, rate in zip(seqs, limits, rates, strict=True)
        ]
        usual = all(self._num_unfed(seq) <= _USUALLY_UNFED for seq in seqs)
        begin_s = self._now_s()
        drafts = self.proposer.propose(seqs, limits, floors)
        seconds = self._now_s() - begin_s
        num_forwards = [self._num_forwards(draft) for draft in drafts]
        if usual and any(num_forwards):
            self.seconds += LEARNING * (seconds / sum(num_forwards) - self.seconds)
        options = []
        for seq, draft, number in zip(seqs, drafts, num_forwards, strict=True):
            # Beside other sequences its context reads the prompt over several rounds without drafts. This decision covers them all.
            self._fed[seq.id] = len(seq.tokens)
            self._missed_s.pop(seq.id, None)
            option = best_prefix(self, draft, costs, self.acceptance.expected(seq), num_seqs)
            options.append(option._replace(draft=draft, pays_back=seq.id in tried))
            if number:
                self._claimed.record(seq, option.claimed, 1)
                self._rows.record(seq, option.num_tokens, 1)
                self._forwards.record(seq, number, 1)
        for number in tried:
            self._trial_rounds[number] -= 1
        return options

    def learn(self, seq: Sequence, draft: Draft, num_known: int, num_accepted: int) -> None:
        """Count a draft, of which the tokens of the first `num_known` places are known, and how many of its own are right."""
        depths = draft.depths.tolist()
        self.acceptance.record(
            seq, num_accepted, sum([one for one, depth in zip(draft.likely, depths, strict=True) if depth <= num_known])
        )
        self._next.record(seq, num_accepted, min(num_accepted + 1, num_known, max(depths)))

    def end(self, seq: Sequence) -> None:
        """Forget the sequence."""
        for estimate in self._estimates:
            estimate.end(seq)
        for known in (self._fed, self._missed_s, self._trial_rounds):
            known.pop(seq.id, None)

    @property
    def _estimates(self) -> tuple[Estimate, ...]:
        return self.acceptance, self._next, self._claimed, self._rows, self._forwards

    def _fixed(self, costs: Costs, rate: float, limit: int, num_seqs: int) -> Option:
        """Its best draft of a length that is chosen beforehand, whose tokens are accepted at that rate."""
        per_token, per_draft = (0.0, self.seconds) if self.proposer.in_one_pass else (self.seconds, 0.0)
        return best_length(self, costs, rate, limit, per_token, num_seqs, per_draft)

    def _chance(self, seq: Sequence) -> float:
        """Of one token more behind a path that is as likely as it claims."""
        return self._next.expected(seq) * min(self.acceptance.expected(seq), 1.0)

    def _floors(self, limit: int, costs: Costs, num_seqs: int, rate: float, chance: float) -> Floors:
        """How likely a path must claim to be for one token more, which has this chance, to bring tokens at this rate."""
        per_token_s = 0.0 if self.proposer.in_one_pass else self.seconds
        rows_s = [costs.forward_s(num_seqs * n) / num_seqs for n in range(1, limit + 2)]
        return [rate * (more - less + per_token_s) / chance for less, more in pairwise(rows_s)]

    def _num_forwards(self, draft: Draft) -> int:
        """Forwards of one row that take as long as the draft."""
        return int(draft.depths.max()) if len(draft) and not self.proposer.in_one_pass else min(len(draft), 1)

    def _num_unfed(self, seq: Sequence) -> int:
        return len(seq.tokens) - self._fed.get(seq.id, 0) if self._reads else 0

    def _price_s(self, seq: Sequence) -> float:
        """Seconds of feeding the tokens that it missed."""
        return self._num_unfed(seq) * self._costs.row_s

    def _saves(self, seq: Sequence, option: Option, instead: Option, share: float) -> bool:
        """Whether drafts for that share of the tokens to come save more than feeding what it missed, and will miss."""
        missed_s = (1 - share) * self._costs.row_s if self._reads else 0.0
        saved_s = share * (1 / instead.tokens_per_s - 1 / option.tokens_per_s) - missed_s
        return seq.num_wanted * saved_s > self._price_s(seq)

"""A planner's knowledge of a drafter with a model: the promise of a draft before it is made, and how long it should be."""

from collections.abc import Callable
from itertools import pairwise

from cpuspec.metrics import Spent
from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.planner.acceptance import Drafted, Ratio
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
    draft where one pass makes it. Before a draft is made, it promises as much as the latest ones did.
    """

    def __init__(self, proposer: DraftModel, costs: Costs, verifier: Costs, clock: Callable[[], float]) -> None:
        """costs: of its forwards. verifier: of those of the model that it drafts for. clock: tells seconds."""
        self._now_s = clock
        self.proposer = proposer
        self.drafted = Drafted()
        self.spent = Spent()
        self.seconds = costs.forward_s(1)
        self.acceptance = Ratio(1.0)
        self._next = Ratio(_FIRST_NEXT)  # the chance of a further token, once those before it are accepted
        first = self._fixed(verifier, _FIRST_NEXT, proposer.num_tokens, 1)
        # Of a draft: the tokens that it claims to have accepted, the rows of these, and the forwards that made it.
        self._claimed, self._rows = Ratio(first.tokens - 1), Ratio(max(first.num_tokens, 1))
        self._forwards = Ratio(1 if proposer.in_one_pass else max(first.num_tokens, 1))
        self._reads = not isinstance(proposer.context, StageContext)
        self._trial_rounds: dict[int, int] = {}  # by sequence id: rounds that its trial has left
        self.costs = costs
        self._fed: dict[int, int] = {}  # by sequence id: its length when it was last drafted for

    def promise(self, costs: Costs, num_seqs: int) -> Option:
        """Of its next draft. costs: the verifier's."""
        rows, below = self._rows.expected(), int(self._rows.expected())
        tokens = 1 + min(self.acceptance.expected(), 1.0) * self._claimed.expected()
        least, more = (costs.forward_s(num_seqs * (1 + n)) / num_seqs for n in (below, below + 1))
        seconds = least + (rows - below) * (more - least) + self._forwards.expected() * self.seconds
        return Option(self, round(rows), tokens, seconds)

    def is_worth_its_price(self, seq: Sequence, option: Option, instead: Option) -> bool:
        """Whether drafts as `option` promises them save more, over the tokens to come, than feeding the model what it missed."""
        saved_s = 1 / instead.tokens_per_s - 1 / option.tokens_per_s
        return saved_s > 0 and seq.num_wanted * saved_s > self._price_s(seq)

    def is_tried(self, seq: Sequence, costs: Costs, limit: int, num_seqs: int, instead: Option, budget: TrialBudget) -> bool:
        """Whether to let it draft although it promises less, where a draft that is accepted whole would gain: now and then."""
        if self._trial_rounds.get(seq.id):
            return True
        hope = self._fixed(costs, 1.0, min(limit, self.proposer.num_tokens), num_seqs)
        if not self.is_worth_its_price(seq, hope, instead):
            return False
        if not budget.take(self, self._price_s(seq) + TRIAL_ROUNDS * TRIAL_FORWARDS * self.seconds):
            return False
        self._trial_rounds[seq.id] = TRIAL_ROUNDS
        for known in (self.acceptance, self._next, self._claimed, self._rows, self._forwards):
            known.restart()
        return True

    def propose(self, seqs: list[Sequence], limits: list[int], costs: Costs, num_seqs: int, rates: list[float]) -> list[Option]:
        """Its drafts, each as long as promises most. Learns what a token takes, unless much was to be fed first.

        rates: tokens per second that each sequence has without it.
        """
        tried = {seq.id for seq in seqs if self._trial_rounds.get(seq.id)}
        limits = [min(limit, TRIAL_FORWARDS if seq.id in tried else MAX_TOKENS) for seq, limit in zip(seqs, limits, strict=True)]
        chance = self._next.expected() * min(self.acceptance.expected(), 1.0)
        floors = [self._floors(limit, costs, num_seqs, rate, chance) for limit, rate in zip(limits, rates, strict=True)]
        usual = all(self._num_unfed(seq) <= _USUALLY_UNFED for seq in seqs)
        begin_s = self._now_s()
        drafts = self.proposer.propose(seqs, limits, floors)
        seconds = self._now_s() - begin_s
        self.spent.add("draft", seconds)
        num_forwards = list(map(self._num_forwards, drafts))
        if usual and any(num_forwards):
            self.seconds += LEARNING * (seconds / sum(num_forwards) - self.seconds)
        options = []
        for seq, draft, number in zip(seqs, drafts, num_forwards, strict=True):
            # Beside other sequences its context reads the prompt over several rounds without drafts. This decision covers them all.
            self._fed[seq.id] = len(seq.tokens)
            option = best_prefix(self, draft, costs, self.acceptance.expected(), num_seqs)
            options.append(option)
            if number:
                self._claimed.record(option.claimed, 1)
                self._rows.record(option.num_tokens, 1)
                self._forwards.record(number, 1)
        for number in tried:
            self._trial_rounds[number] -= 1
        return options

    def learn(self, option: Option, num_accepted: int) -> None:
        """Count a verified draft."""
        assert option.draft, "a model's options have drafts"
        self.acceptance.record(num_accepted, option.claimed)
        depth = int(option.draft.first(option.num_tokens).depths.max())
        self._next.record(num_accepted, min(num_accepted + 1, depth))

    def end(self, seq: Sequence) -> None:
        """Forget the sequence."""
        for known in (self._fed, self._trial_rounds):
            known.pop(seq.id, None)

    def _fixed(self, costs: Costs, rate: float, limit: int, num_seqs: int) -> Option:
        """Its best draft of a length that is chosen beforehand, whose tokens are accepted at that rate."""
        per_token, per_draft = (0.0, self.seconds) if self.proposer.in_one_pass else (self.seconds, 0.0)
        return best_length(self, costs, rate, limit, per_token, num_seqs, per_draft)

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
        return self._num_unfed(seq) * self.costs.row_s

"""A planner's figures of a drafter with a model: what its next draft promises before it is made, and how long it should be."""

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

_USUALLY_UNFED = 3 * MAX_TOKENS  # the time of a draft counts if the model read no more than this before it
_FIRST_NEXT = 0.7  # the chance of a further token, at first


class ModelDrafter:
    """A drafter with a model. Its drafts end where a further token does not pay.

    acceptance: accepted tokens over those that its confidences claim. seconds: what drafting one token takes for one sequence, or a
    whole draft if one pass makes it. Before a draft exists, it is expected to be like the latest ones. Afterwards its confidences
    say what it promises.
    """

    def __init__(self, proposer: DraftModel, costs: Costs, verifier: Costs, clock: Callable[[], float]) -> None:
        """costs: of its forwards. verifier: costs of the model that it drafts for. clock: tells seconds."""
        self._now_s = clock
        self.proposer = proposer
        self.drafted = Drafted()
        self.spent = Spent()
        self.seconds = costs.forward_s(1)
        self.acceptance = Ratio(1.0)
        self._next = Ratio(_FIRST_NEXT)  # the chance of a further token, if those before it are accepted
        first = self._fixed(verifier, _FIRST_NEXT, proposer.num_tokens, 1)
        # Of a draft: the tokens that its confidences claim, the rows that verify it, and the forwards that made it.
        self._claimed, self._rows = Ratio(first.tokens - 1), Ratio(max(first.num_tokens, 1))
        self._forwards = Ratio(1 if proposer.in_one_pass else max(first.num_tokens, 1))
        self._reads_prompts = not isinstance(proposer.context, StageContext)
        self._trial_rounds: dict[int, int] = {}  # by sequence id: rounds that its trial has left
        self.costs = costs
        self._fed: dict[int, int] = {}  # by sequence id: the length that the model has read

    def promise(self, costs: Costs, num_seqs: int) -> Option:
        """What its next draft promises. costs: the verifier's."""
        rows, below = self._rows.expected(), int(self._rows.expected())
        tokens = 1 + min(self.acceptance.expected(), 1.0) * self._claimed.expected()
        least, more = (costs.forward_s(num_seqs * (1 + n)) / num_seqs for n in (below, below + 1))
        seconds = least + (rows - below) * (more - least) + self._forwards.expected() * self.seconds
        return Option(self, round(rows), tokens, seconds)

    def is_worth_reading(self, seq: Sequence, option: Option, instead: Option) -> bool:
        """Whether such drafts, over the tokens to come, save more time than reading the tokens that the model missed."""
        saved_s = 1 / instead.tokens_per_s - 1 / option.tokens_per_s
        return saved_s > 0 and seq.num_wanted * saved_s > self._reading_s(seq)

    def is_tried(self, seq: Sequence, costs: Costs, limit: int, num_seqs: int, instead: Option, budget: TrialBudget) -> bool:
        """Whether to let it draft on trial although it promises less than `instead`: if a draft accepted whole would gain."""
        if self._trial_rounds.get(seq.id):
            return True
        all_accepted = self._fixed(costs, 1.0, min(limit, self.proposer.num_tokens), num_seqs)
        if not self.is_worth_reading(seq, all_accepted, instead):
            return False
        if not budget.spend(self, self._reading_s(seq) + TRIAL_ROUNDS * TRIAL_FORWARDS * self.seconds):
            return False
        self._trial_rounds[seq.id] = TRIAL_ROUNDS
        for known in (self.acceptance, self._next, self._claimed, self._rows, self._forwards):
            known.restart()
        return True

    def propose(self, seqs: list[Sequence], limits: list[int], costs: Costs, num_seqs: int, others: list[float]) -> list[Option]:
        """Its drafts, each as long as pays. Learns the seconds of a token, unless the model had much to read first.

        others: the tokens per second that each sequence has without it.
        """
        tried = {seq.id for seq in seqs if self._trial_rounds.get(seq.id)}
        limits = [min(limit, TRIAL_FORWARDS if seq.id in tried else MAX_TOKENS) for seq, limit in zip(seqs, limits, strict=True)]
        chance = self._next.expected() * min(self.acceptance.expected(), 1.0)
        floors = [self._floors(limit, costs, num_seqs, other, chance) for limit, other in zip(limits, others, strict=True)]
        is_read = all(self._num_unfed(seq) <= _USUALLY_UNFED for seq in seqs)
        begin_s = self._now_s()
        drafts = self.proposer.propose(seqs, limits, floors)
        seconds = self._now_s() - begin_s
        self.spent.add("draft", seconds)
        num_forwards = list(map(self._num_forwards, drafts))
        if is_read and any(num_forwards):
            self.seconds += LEARNING * (seconds / sum(num_forwards) - self.seconds)
        options = []
        for seq, draft, number in zip(seqs, drafts, num_forwards, strict=True):
            # Count the prompt as read now. The model reads it over the next rounds anyway, though it may not draft until then.
            self._fed[seq.id] = len(seq.tokens)
            option = best_prefix(self, draft, costs, self.acceptance.expected(), num_seqs)
            options.append(option)
            if number:
                self._claimed.add(option.claimed, 1)
                self._rows.add(option.num_tokens, 1)
                self._forwards.add(number, 1)
        for number in tried:
            self._trial_rounds[number] -= 1
        return options

    def learn(self, option: Option, num_accepted: int) -> None:
        """Count a verified draft."""
        assert option.draft, "a model's options have drafts"
        self.acceptance.add(num_accepted, option.claimed)
        depth = int(option.draft.first(option.num_tokens).depths.max())
        self._next.add(num_accepted, min(num_accepted + 1, depth))

    def end(self, seq: Sequence) -> None:
        """Forget the sequence."""
        for known in (self._fed, self._trial_rounds):
            known.pop(seq.id, None)

    def _fixed(self, costs: Costs, acceptance: float, limit: int, num_seqs: int) -> Option:
        """The best draft of a length that is chosen beforehand."""
        per_token, per_draft = (0.0, self.seconds) if self.proposer.in_one_pass else (self.seconds, 0.0)
        return best_length(self, costs, acceptance, limit, per_token, num_seqs, per_draft)

    def _floors(self, limit: int, costs: Costs, num_seqs: int, other: float, chance: float) -> Floors:
        """floors[n] = other * (seconds of row n + 2 in a forward + seconds of drafting one token) / chance.

        After a path of n tokens, one more adds its probability * chance tokens to the answer. It pays if the same seconds yield
        fewer without it. other: tokens per second without it. chance: that it is accepted if the path is.
        """
        per_token_s = 0.0 if self.proposer.in_one_pass else self.seconds
        rows_s = [costs.forward_s(num_seqs * n) / num_seqs for n in range(1, limit + 2)]
        return [other * (more - less + per_token_s) / chance for less, more in pairwise(rows_s)]

    def _num_forwards(self, draft: Draft) -> int:
        """How many forwards of the model made the draft."""
        return int(draft.depths.max()) if len(draft) and not self.proposer.in_one_pass else min(len(draft), 1)

    def _num_unfed(self, seq: Sequence) -> int:
        return len(seq.tokens) - self._fed.get(seq.id, 0) if self._reads_prompts else 0

    def _reading_s(self, seq: Sequence) -> float:
        """Seconds of reading the tokens that the model missed."""
        return self._num_unfed(seq) * self.costs.row_s

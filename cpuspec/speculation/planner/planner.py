"""`auto`: drafts go on while the next token is likely enough to repay its time at the rate that the sequence has.

That rate is R, in tokens for the time of a round without drafts. A choice is worth the tokens that it adds to the answer less R
times the time that it adds to the round. A node of a draft adds its path's probability; every row costs time, and so does a forward
of a draft model. So drafting nothing is worth 0, and each sequence gets what is worth most:

Of a finished draft those first tokens are verified that make most tokens per second of the round.

* A lookup's draft exists before it is judged, by its confidences. Lookups are asked while they gain more than they take.
* A model's draft is judged before it exists, by the share of its tokens that were right, in this request and before it. At most one
  model drafts for a sequence in a round.

What is worth nothing by these figures is tried again, for a small share of the time.

The more sequences share a forward, the larger is the part of its time that the rows take. Fewer drafts pay then, and in the end
none. A model that drafts has drafters of its own, among which a planner of its own chooses (arXiv 2510.19705).
"""

import math
from collections import abc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from cpuspec.metrics import now_s
from cpuspec.model.batch import F32
from cpuspec.sequence import Sequence
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.constrained import legal_part
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.heads import HeadProposer
from cpuspec.speculation.head_context import HeadContext
from cpuspec.speculation.planner.costs import Costs, find_costs
from cpuspec.speculation.planner.known import MAX_TOKENS, KnownDrafter, LookupDrafter, ModelDrafter, Ratio
from cpuspec.speculation.proposer import DraftModel, Proposer
from cpuspec.speculation.verify import Verdict

_TIMED_PLAIN = 4  # one of this many single forwards without a draft teaches costs: learning takes 1 % of a short token
# Hidden states of a sequence that are kept for a head which may never be asked: at 10 KB a token, as of a 4B model, 40 to 80 MB.
_MOST_HIDDEN = 4096
_MOST_IDLE = 1000  # rounds
_MOST_FED = 2  # a round that feeds more rows for each verified one teaches no costs: most are a prompt's, which take less time
# The weight that a sequence's rounds keep for its rate from one round to the next, and that of the rounds of all sequences.
_OWN_DECAY, _ALL_DECAY = 0.9, 0.99
_RATE_WEIGHT = 4.0  # of the rate of all sequences, in rounds of the sequence
_LEAST_WORTH = 0.05  # of a lookup's draft: smaller promises lose as often as they gain
_TRIAL_TOKENS = 2  # of a lookup's draft in a trial
_TRIAL_ROUNDS = 6  # of a model's trial: the model first reads the tokens that it missed, which one draft does not repay
_TRIAL_FORWARDS = 4  # of the model in such a round, at most


@dataclass(frozen=True)
class PlannedDrafter:
    """A planner's figures of one drafter, or of drafting nothing, over all requests so far.

    verifies: the model that verifies its drafts. Costs are in plain forwards of that model. cost_of_drafting: of a model's token,
    or of a whole look-up. cost_of_rows: of a forward, by its number of rows. acceptance: accepted tokens over those that
    confidences claim, as expected now. num_tokens, speedup: of a model's usual draft; None for lookups. read_share:
    `Costs.read_share` of a mixture, else None.
    """

    name: str
    verifies: str
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance: float | None
    cost_of_drafting: float
    cost_of_rows: dict[int, float]
    num_tokens: int | None
    speedup: float | None
    read_share: float | None = None


class _Choice(NamedTuple):
    """What a sequence does in a round. worth: as above. claimed: tokens that are accepted by the draft's confidences."""

    drafter: KnownDrafter | None
    draft: Draft
    num_tokens: int = 0
    worth: float = 0.0
    claimed: float = 0.0
    drafting: float = 0.0  # its time, in rounds without drafts


class _Timing(NamedTuple):
    """A round that is timed: its verified rows, whether none was drafted, and the context's counts and the time before it."""

    num_verified: int
    is_plain: bool
    num_forwards: int
    num_rows: int
    weight_bytes: int
    begin_s: float


class Planner(Proposer):
    """A proposer that asks others, and gives each sequence the draft that is worth most.

    costs: of the verifier's forwards, corrected by the time from a draft to its verdict. is_outermost: whether it calls `begin` and
    `end` of its drafters. Planners below the outermost one share its drafters, so it alone calls these. context: the verifier's,
    which counts forwards and rows; without it nothing corrects the costs.
    """

    name = "auto"

    def __init__(
        self,
        costs: Costs,
        lookups: list[Proposer],
        models: abc.Sequence[tuple[DraftModel, Costs]],
        is_outermost: bool = True,
        context: Context | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """models: each with the costs of its forwards. clock: tells seconds; `now_s` by default."""
        self._now_s = clock or now_s
        self.costs = costs
        proposers = [*lookups, *(model for model, _ in models)]
        self.hidden_layers = tuple(sorted({layer for proposer in proposers for layer in proposer.hidden_layers}))
        self.most_hidden = _MOST_HIDDEN
        for model, _ in models:
            if isinstance(model.context, HeadContext):
                model.context.most_waiting = _MOST_HIDDEN
        self.levels = tuple(level for model, _ in models for level in model.levels) if is_outermost else ()
        self.lookups = [LookupDrafter(proposer, len(proposers)) for proposer in lookups]
        self.models = [ModelDrafter(model, costs_of_model, len(proposers)) for model, costs_of_model in models]
        self._drafters: list[KnownDrafter] = [*self.lookups, *self.models]
        self.num_plain_rounds = 0  # without a draft, each sequence's counted
        self._is_outermost = is_outermost
        self._context = context
        self._nothing = _Choice(None, Draft.chain([], self.name))
        self._chosen: dict[int, _Choice] = {}  # by sequence id: drafts without a verdict yet
        self._rate = Ratio(1.0)  # R of all sequences
        self._rates: dict[int, Ratio] = {}  # R of each
        self._plain_s = 0.0  # seconds that this round would take a sequence without any draft
        self._num_seqs, self._row_costs = 1, list[float]()  # as in `_costs_to`
        self._num_plain_forwards = 0
        self._timing: _Timing | None = None

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Tell the drafters."""
        for drafter in self._drafters if self._is_outermost else ():
            drafter.proposer.begin(seq, num_cached)

    def rate(self, seq: Sequence) -> float:
        """R: tokens for the time of a round without drafts."""
        own = self._rates.get(seq.id)
        if own is None:
            own = self._rates[seq.id] = Ratio(1.0)
        own.prior = max(self._rate.expected(), 1.0)
        return max(own.expected(_RATE_WEIGHT), 1.0)

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """The draft that is worth most for each sequence."""
        num_seqs = len(seqs)
        self._plain_s = plain_s = self.costs.forward_s(num_seqs) / num_seqs
        self._num_seqs, self._row_costs = num_seqs, []
        for drafter in self._drafters:
            drafter.trials.earn(plain_s * num_seqs)
        rates = list(map(self.rate, seqs))
        best = [self._nothing] * num_seqs
        for lookup in self.lookups:
            self._look_up(lookup, seqs, limits, rates, best)
        asked: dict[ModelDrafter, list[int]] = {}
        for i, (seq, limit, rate, instead) in enumerate(zip(seqs, limits, rates, best, strict=True)):
            if limit and (model := self._model(seq, limit, rate, instead.worth)):
                asked.setdefault(model, []).append(i)
        for model, numbers in asked.items():
            self._ask(model, numbers, seqs, limits, rates, best)
        self._chosen |= zip([seq.id for seq in seqs], best, strict=True)
        drafts = [choice.draft.first(choice.num_tokens) for choice in best]
        self.num_plain_rounds += sum(not choice.num_tokens for choice in best)
        self._begin_timing(num_seqs, num_seqs + sum(map(len, drafts)))
        return drafts

    def num_idle(self, seqs: list[Sequence]) -> int:
        """Until a drafter is tried, where none pays."""
        if not self._plain_s or any(self._pays(lookup) for lookup in self.lookups):
            return 0
        if any(
            model.rounds.get(seq.id) or self._worth(model, seq, MAX_TOKENS, self.rate(seq)) > 0
            for model in self.models
            for seq in seqs
        ):
            return 0
        lacking = [lookup.trials.lacks(lookup.seconds) for lookup in self.lookups]
        lacking += [model.trials.lacks(self._trial_s(model, seq)) for model in self.models for seq in seqs]
        return int(min(max(min(lacking, default=math.inf) / (self._plain_s * len(seqs)), 0), _MOST_IDLE))

    def _costs_to(self, num_tokens: int) -> list[float]:
        """By the number of drafted tokens, from none to at least so many: the time of their rows, in rounds without drafts."""
        costs, share = self._row_costs, 1 / (self._num_seqs * self._plain_s)
        for n in range(len(costs), num_tokens + 1):
            costs.append(self.costs.forward_s(self._num_seqs * (n + 1)) * share - 1)
        return costs

    def _pays(self, lookup: LookupDrafter) -> bool:
        """Whether a look-up has gained more than it took."""
        return lookup.gain.expected() * self._plain_s > lookup.seconds

    def _judged(self, drafter: KnownDrafter, draft: Draft, rate: float, trust: float) -> _Choice:
        """The prefix of a draft that makes most tokens per second of the round. trust: accepted tokens over claimed ones.

        In replays this made up to 6 % more than the prefix that is worth most at `rate` (benchmarks/DECISIONS.md#one-rule).
        """
        likely, costs, best, most_per_s, claimed = draft.likely, self._costs_to(len(draft)), self._nothing, 1.0, 0.0
        if draft.confidence is None:  # no shorter draft is known to be better
            claimed = sum(likely)
            return _Choice(drafter, draft, len(draft), trust * claimed - rate * costs[len(draft)], claimed)
        for n, path in enumerate(likely, 1):
            claimed += path
            per_s = (1 + trust * claimed) / (1 + costs[n])
            if per_s > most_per_s:
                best, most_per_s = _Choice(drafter, draft, n, trust * claimed - rate * costs[n], claimed), per_s
        return best

    def _look_up(
        self, lookup: LookupDrafter, seqs: list[Sequence], limits: list[int], rates: list[float], best: list[_Choice]
    ) -> None:
        """Ask a lookup, unless look-ups gain less than they take; replace choices that are worth less, also on trial."""
        pays = self._pays(lookup)
        asked = [i for i, limit in enumerate(limits) if limit and (pays or lookup.trials.spend(lookup.seconds))]
        if not asked:
            return
        asked_seqs, begin_s = [seqs[i] for i in asked], self._now_s()
        drafts = lookup.proposer.propose(asked_seqs, [limits[i] for i in asked])
        lookup.asked(len(asked), self._now_s() - begin_s)
        trust = min(lookup.acceptance.expected(), 1.0)
        for i, draft in zip(asked, map(legal_part, asked_seqs, drafts), strict=True):
            choice = self._judged(lookup, draft, rates[i], trust)
            if choice.worth > best[i].worth + _LEAST_WORTH:
                best[i] = choice
            elif len(draft) and not best[i].num_tokens:
                trial = self._judged(lookup, draft.first(_TRIAL_TOKENS), 1.0, 1.0)
                if trial.num_tokens and lookup.trials.spend(self._costs_to(trial.num_tokens)[trial.num_tokens] * self._plain_s):
                    best[i] = trial

    def _worth(self, model: ModelDrafter, seq: Sequence, limit: int, rate: float, chance: float | None = None) -> float:
        """What a model's next draft is worth at its best length; it must also repay reading the tokens that the model missed.

        chance: that a token is right, if those before it are; by default as known.
        """
        chance, drafting, costs = (
            model.chance(seq) if chance is None else chance,
            model.seconds / self._plain_s,
            self._costs_to(MAX_TOKENS),
        )
        likely, tokens, best, drafted = 1.0, 0.0, 0.0, 0.0
        for n in range(1, min(limit, model.proposer.num_tokens, MAX_TOKENS) + 1):
            likely *= chance
            tokens += likely
            drafted = drafting if model.proposer.in_one_pass else n * drafting
            worth = tokens - rate * (drafted + costs[n])
            if worth < best and likely < rate * drafting:
                break
            best = max(best, worth)
        num_rounds = seq.num_wanted / (rate + best)
        return best if best * num_rounds > rate * model.reading_s(seq) / self._plain_s else 0.0

    def _trial_s(self, model: ModelDrafter, seq: Sequence) -> float:
        return model.reading_s(seq) + _TRIAL_ROUNDS * _TRIAL_FORWARDS * model.seconds

    def _model(self, seq: Sequence, limit: int, rate: float, instead: float) -> ModelDrafter | None:
        """The model that drafts for a sequence: one on trial, else the one whose draft is worth most, and more than `instead`."""
        best, found = instead, None
        for model in self.models:
            if left := model.rounds.pop(seq.id, 0):
                if left > 1:
                    model.rounds[seq.id] = left - 1
                return model
            worth = self._worth(model, seq, limit, rate)
            if worth > best:
                best, found = worth, model
        for model in self.models:
            would_help = model is not found and self._worth(model, seq, limit, 1.0, 1.0) > best
            if would_help and model.trials.spend(self._trial_s(model, seq)):
                model.rounds[seq.id] = _TRIAL_ROUNDS - 1
                return model
        return found

    def _ask(
        self,
        model: ModelDrafter,
        asked: list[int],
        seqs: list[Sequence],
        limits: list[int],
        rates: list[float],
        best: list[_Choice],
    ) -> None:
        """Let a model draft for sequences, as long as a token repays its forward; replace choices that are worth less."""
        asked_seqs, costs = [seqs[i] for i in asked], self._costs_to(MAX_TOKENS)
        most = [
            min(limits[i], _TRIAL_FORWARDS if seq.id in model.rounds else MAX_TOKENS)
            for i, seq in zip(asked, asked_seqs, strict=True)
        ]
        drafting = 0.0 if model.proposer.in_one_pass else model.seconds / self._plain_s
        floors = []
        for i, seq, limit in zip(asked, asked_seqs, most, strict=True):
            factor = rates[i] / max(model.chance(seq), 1e-3)
            floors.append([factor * (costs[n + 1] - costs[n] + drafting) for n in range(limit)])
        begin_s = self._now_s()
        drafts = model.proposer.propose(asked_seqs, most, floors)
        numbers = model.asked(asked_seqs, drafts, self._now_s() - begin_s)
        trust = min(model.acceptance.expected(), 1.0)
        for i, draft, number in zip(asked, drafts, numbers, strict=True):
            choice = self._judged(model, draft, rates[i], trust)
            if (
                len(draft) and not choice.num_tokens and not best[i].num_tokens
            ):  # drafted anyway: its first token tells of the model
                choice = _Choice(model, draft, 1, 0.0, draft.likely[0])
            if choice.worth >= best[i].worth:
                best[i] = choice
            best[i] = best[i]._replace(drafting=number * model.seconds / self._plain_s)

    def _begin_timing(self, num_seqs: int, num_verified: int) -> None:
        """Time the next round, which verifies `num_verified` rows."""
        if context := self._context:
            counts = context.num_forwards, context.num_rows, context.weight_bytes
            self._timing = _Timing(num_verified, num_verified == num_seqs, *counts, self._now_s())

    def _end_timing(self) -> None:
        """Learn costs from the round's seconds and bytes, unless most of its rows were prompts'.

        Forwards that ran at once teach their mean, so that plain decoding is known however long nobody drafts. Of single ones
        without a draft one of `_TIMED_PLAIN` does.
        """
        context, timing = self._context, self._timing
        self._timing = None
        if timing and context:
            num_rows, num_forwards = context.num_rows - timing.num_rows, context.num_forwards - timing.num_forwards
            ran_at_once = timing.is_plain and num_forwards > 1 and num_rows == num_forwards * timing.num_verified
            times = num_forwards if ran_at_once else 1
            is_single = timing.is_plain and not ran_at_once
            self._num_plain_forwards += is_single
            if is_single and self._num_plain_forwards % _TIMED_PLAIN:
                return
            if num_rows <= _MOST_FED * timing.num_verified * times:
                num_bytes = context.weight_bytes - timing.weight_bytes
                self.costs.observe(num_rows // times, (self._now_s() - timing.begin_s) / times, num_bytes // times)

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Learn from the verdict, and tell the drafters."""
        self._end_timing()
        layers = dict(zip(self.hidden_layers, hidden, strict=True))
        for drafter in self._drafters if self._is_outermost else self.lookups:
            drafter.proposer.accept(seq, verdict, tuple([layers[layer] for layer in drafter.proposer.hidden_layers]))
        choice, num_accepted = self._chosen.pop(seq.id, None), len(verdict.tokens) - 1
        if choice is None:
            return
        if choice.drafter and choice.num_tokens:
            rows = self._costs_to(choice.num_tokens)[choice.num_tokens]
            time = 1 + choice.drafting + rows
            choice.drafter.learn(seq, choice.draft.first(choice.num_tokens), choice.claimed, num_accepted, rows)
        else:  # a token of each round that ran at once
            self.num_plain_rounds += num_accepted
            for drafter in self._drafters:
                drafter.trials.earn(self._plain_s * num_accepted)
            time = 1 + choice.drafting + num_accepted
        self._rate.add(num_accepted + 1, time, _ALL_DECAY)
        if seq.id in self._rates:
            self._rates[seq.id].add(num_accepted + 1, time, _OWN_DECAY)

    def end(self, seq: Sequence) -> None:
        """Forget the sequence, and keep the costs that were learned."""
        self._chosen.pop(seq.id, None)
        self._rates.pop(seq.id, None)
        self._timing = None
        self.costs.keep()
        for model in self.models:
            model.end(seq)
        with ExitStack() as calls:  # every drafter is told, also if one raises
            for drafter in reversed(self._drafters if self._is_outermost else ()):
                calls.callback(drafter.proposer.end, seq)

    def explain(self, verifies: str = "target") -> list[PlannedDrafter]:
        """The figures that it decides from, and those of the planners below it."""
        plain_s = self.costs.forward_s(1)
        cost_of_rows = {n: self.costs.forward_s(n) / plain_s for n in self.costs.measured_rows}
        read_share = self.costs.read_share if self.costs.reads_more else None
        table = [PlannedDrafter("none", verifies, self.num_plain_rounds, 0, 0, None, 0.0, cost_of_rows, 0, 1.0, read_share)]
        for drafter in self._drafters:
            proposer, drafted = drafter.proposer, drafter.drafted
            costs = (drafter.acceptance.expected(), drafter.seconds / plain_s, cost_of_rows)
            usual = drafter.usual(self.costs) if isinstance(drafter, ModelDrafter) else None
            planned = (usual[0], usual[1] * plain_s) if usual else (None, None)
            counts = (drafted.num_rounds, drafted.num_draft_tokens, drafted.num_accepted_tokens)
            table.append(PlannedDrafter(proposer.name, verifies, *counts, *costs, *planned))
            if isinstance(proposer, ChainProposer) and isinstance(proposer.inner, Planner):
                table += proposer.inner.explain(proposer.name)
        return table


def plan(target: Context, lookups: list[Proposer], chains: list[DraftModel]) -> Planner:
    """A planner for a target, and one for each of its draft models, the cheapest first: each may draft with those before it.

    All drafts are the target's tokens. So a model with another vocabulary has no drafters of its own, and neither has a head.
    """
    models: list[tuple[DraftModel, Costs]] = []
    for chain in chains:
        costs = find_costs(chain.context.backend)
        if isinstance(chain, ChainProposer):
            below: list[tuple[DraftModel, Costs]] = [
                (model, costs) for model, costs in models if not isinstance(model, HeadProposer)
            ]
            chain.inner = Planner(costs, lookups, below, False, chain.context)
        models.append((chain, costs))
    return Planner(find_costs(target.backend), lookups, models, context=target)

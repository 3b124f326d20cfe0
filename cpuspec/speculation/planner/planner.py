"""`auto`: in every round each sequence gets the option that promises most tokens per second. Drafting nothing is an option.

A model that drafts has drafters of its own, among which a planner of its own chooses (arXiv 2510.19705). A look-up takes time, so a
lookup is asked only while it gains more than it takes. A model must first read the tokens that it missed, so it is asked only where
its drafts save more time than that over the tokens to come.

The more sequences share a forward, the larger is the part of its time that the rows take. Fewer drafts pay then, and in the end
none.
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
from cpuspec.speculation.planner.choose import Option, best_prefix
from cpuspec.speculation.planner.costs import Costs, find_costs
from cpuspec.speculation.planner.exploration import TRIAL_TOKENS, TrialBudget
from cpuspec.speculation.planner.lookup_drafter import LookupDrafter
from cpuspec.speculation.planner.model_drafter import ModelDrafter
from cpuspec.speculation.proposer import DraftModel, Proposer
from cpuspec.speculation.verify import Verdict

_TIMED_PLAIN = 4  # one of this many forwards without a draft is timed: timing takes 1 % of a short token
_WORTH = 1.05  # a lookup's draft must beat the best option so far by this factor: smaller promises lose as often as they gain
# Hidden states of a sequence that are kept for a head which may never be asked: at 10 KB a token, as of a 4B model, 40 to 80 MB.
_MOST_HIDDEN = 4096
_MOST_IDLE = 1000  # rounds
_MOST_FED = 2  # a round that feeds more rows for each verified one teaches no costs: most are a prompt's, which take less time


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


class _Timing(NamedTuple):
    """A forward that is timed: its verified rows, and the context's counts and the time before it."""

    num_verified: int
    num_rows: int
    weight_bytes: int
    begin_s: float


class Planner(Proposer):
    """A proposer that asks others, and drafts for each sequence by the best option of the round.

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
        self.lookups = [LookupDrafter(proposer) for proposer in lookups]
        self.models = [ModelDrafter(model, costs_of_model, costs, self._now_s) for model, costs_of_model in models]
        self._drafters: list[LookupDrafter | ModelDrafter] = [*self.lookups, *self.models]
        self.num_plain_rounds = 0  # without a draft, each sequence's counted
        self._budget = TrialBudget(len(lookups) + len(models))
        self._is_outermost = is_outermost
        self._context = context
        self._nothing = Draft.chain([], self.name)
        self._chosen: dict[int, Option] = {}  # by sequence id: options of drafts without a verdict yet
        self._plain_s = 0.0  # seconds that this round would take a sequence without any draft
        self._num_plain_forwards = 0
        self._timing: _Timing | None = None

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Tell the drafters."""
        for drafter in self._drafters if self._is_outermost else ():
            drafter.proposer.begin(seq, num_cached)

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """The draft of the best option for each sequence."""
        self._plain_s = self.costs.forward_s(len(seqs)) / len(seqs)
        best = [Option(None, 0, 1.0, self._plain_s, 0.0, self._nothing)] * len(seqs)
        for lookup in self.lookups:
            self._look_up(lookup, seqs, limits, best)
        for model in sorted(self.models, key=lambda model: -model.promise(self.costs, len(seqs)).tokens_per_s):
            self._ask(model, seqs, limits, best)
        drafts = [option.draft.first(option.num_tokens) if option.draft else self._nothing for option in best]
        self._chosen |= zip([seq.id for seq in seqs], best, strict=True)
        self.num_plain_rounds += sum(not option.num_tokens for option in best)
        self._budget.earn(self._plain_s * len(seqs))
        self._begin_timing(len(seqs), len(seqs) + sum(map(len, drafts)))
        return drafts

    def num_idle(self, seqs: list[Sequence]) -> int:
        """Until a lookup is tried, where none is asked in every round. Models are asked each time, and timed rounds are single."""
        if self.models or self._timing or any(map(self._pays, self.lookups)):
            return 0
        lacking_s = min((self._budget.lacks(lookup, lookup.seconds) for lookup in self.lookups), default=math.inf)
        return int(min(max(lacking_s / (self._plain_s * len(seqs)), 0), _MOST_IDLE))

    def _pays(self, lookup: LookupDrafter) -> bool:
        """Whether a look-up has gained more than it took."""
        return lookup.gain.expected() * self._plain_s > lookup.seconds

    def _look_up(self, lookup: LookupDrafter, seqs: list[Sequence], limits: list[int], best: list[Option]) -> None:
        """Ask a lookup; replace the best options where its own are better, or are tried.

        It is asked while look-ups gain more than they take, and on trial if the budget covers the look-up.
        """
        pays = self._pays(lookup)
        asked = [i for i, limit in enumerate(limits) if limit and (pays or self._budget.spend(lookup, lookup.seconds))]
        if not asked:
            return
        asked_seqs, begin_s = [seqs[i] for i in asked], self._now_s()
        drafts = lookup.proposer.propose(asked_seqs, [limits[i] for i in asked])
        lookup.asked(len(asked), self._now_s() - begin_s)
        for i, draft in zip(asked, map(legal_part, asked_seqs, drafts), strict=True):
            option = best_prefix(lookup, draft, self.costs, lookup.acceptance.expected(), len(seqs))
            if option.tokens_per_s > _WORTH * best[i].tokens_per_s:
                best[i] = option
            elif len(draft) and not best[i].num_tokens:
                trial = best_prefix(lookup, draft.first(TRIAL_TOKENS), self.costs, 1.0, len(seqs))
                if trial.num_tokens and self._budget.spend(lookup, trial.seconds - self._plain_s):
                    best[i] = trial

    def _ask(self, model: ModelDrafter, seqs: list[Sequence], limits: list[int], best: list[Option]) -> None:
        """Ask a model for sequences to which it promises more, or on trial; replace the best options where its own are better.

        A sequence for which another model's draft is the best option is left out. Both models are unsure at the same tokens, and
        asking a second one costs 1 to 3 % (benchmarks/DECISIONS.md#confidences).
        """
        num_seqs, promise = len(seqs), model.promise(self.costs, len(seqs))
        asked = [
            i
            for i, (seq, limit, instead) in enumerate(zip(seqs, limits, best, strict=True))
            if limit
            and not isinstance(instead.drafter, ModelDrafter)
            and (
                model.is_worth_reading(seq, promise, instead)
                or model.is_tried(seq, self.costs, limit, num_seqs, instead, self._budget)
            )
        ]
        if not asked:
            return
        others = [best[i].tokens_per_s for i in asked]
        options = model.propose([seqs[i] for i in asked], [limits[i] for i in asked], self.costs, num_seqs, others)
        for i, option in zip(asked, options, strict=True):
            best[i] = max(best[i], option, key=lambda option: option.tokens_per_s)

    def _begin_timing(self, num_seqs: int, num_verified: int) -> None:
        """Time the next forward, which verifies `num_verified` rows; of those without drafts only one of `_TIMED_PLAIN`."""
        self._num_plain_forwards += num_verified == num_seqs
        is_timed = num_verified > num_seqs or self._num_plain_forwards % _TIMED_PLAIN == 0
        self._timing = None
        if is_timed and (context := self._context):
            self._timing = _Timing(num_verified, context.num_rows, context.weight_bytes, self._now_s())

    def _end_timing(self) -> None:
        """Learn costs from the forward's seconds and bytes, unless most of its rows were prompts'."""
        context, timing = self._context, self._timing
        if timing and context:
            num_fed = context.num_rows - timing.num_rows
            if num_fed <= _MOST_FED * timing.num_verified:
                self.costs.observe(num_fed, self._now_s() - timing.begin_s, context.weight_bytes - timing.weight_bytes)
        self._timing = None

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Learn from the verdict, and tell the drafters."""
        self._end_timing()
        layers = dict(zip(self.hidden_layers, hidden, strict=True))
        for drafter in self._drafters if self._is_outermost else self.lookups:
            drafter.proposer.accept(seq, verdict, tuple([layers[layer] for layer in drafter.proposer.hidden_layers]))
        option, num_accepted = self._chosen.pop(seq.id, None), len(verdict.tokens) - 1
        if option and option.num_tokens:
            option.drafter.drafted.add(option.num_tokens, num_accepted)
            if isinstance(option.drafter, ModelDrafter):
                option.drafter.learn(option, num_accepted)
            else:
                option.drafter.learn(option, num_accepted, option.seconds / self._plain_s - 1)
        elif option:  # a token of each round that ran at once
            self.num_plain_rounds += num_accepted
            self._budget.earn(self._plain_s * num_accepted)

    def end(self, seq: Sequence) -> None:
        """Forget the sequence."""
        self._chosen.pop(seq.id, None)
        self._timing = None
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
            usual = drafter.promise(self.costs, 1) if isinstance(drafter, ModelDrafter) else None
            planned = (usual.num_tokens, usual.tokens_per_s * plain_s) if usual else (None, None)
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

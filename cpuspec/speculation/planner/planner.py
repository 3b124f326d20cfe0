"""`auto`: in every round each sequence gets the option that promises most tokens per second, drafting nothing among them.

A model's seconds for a token are those with its own drafters, so levels are settled from the bottom up (arXiv 2510.19705), each by
a planner of its own. Looking up a draft takes time, too: a lookup is asked where it has gained more than it took. A model must
first be fed the tokens that it missed: it is asked where drafts save more than that over the tokens to come.

The more sequences share a forward, the more of its seconds are its rows', so fewer drafts pay, and in the end none.
"""

from collections import abc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

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

_PLAIN_LOOKS = 4  # one of this many forwards without a draft is timed: timing takes 1 % of a short token
_WORTH = 1.05  # a lookup's draft must beat the best option so far by this factor: smaller promises lose as often as they gain
# Hidden states that wait for a head which may never be asked. At 10 KB a token, as of a 4B, 40 to 80 MB of a sequence.
_MOST_HIDDEN = 4096
_MOST_FED = 2  # fed rows for each verified row at most, else the forward's time says little about verified rows


@dataclass(frozen=True)
class PlannedDrafter:
    """A planner's figures of one drafter, or of drafting nothing, over all requests so far.

    verifies: the model that its drafts are for. cost_of_drafting: of a model's token, or of a whole lookup, in plain forwards of
    that model; cost_of_rows: of forwards over the rows measured, likewise. acceptance: expected now, of what confidences claim.
    num_tokens, speedup: of a model's usual draft, None for lookups. read_share: `Costs.read_share` of a mixture, else None.
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


class Planner(Proposer):
    """A proposer that asks others, and drafts for each sequence by the best option of the round.

    costs: of the verifier's forwards, corrected by the time from a draft to its verdict. serves: whether this planner begins and
    ends sequences for its drafters; otherwise a planner above does. context: the verifier's, which counts the rows that it was fed;
    without it the costs stay as they are.
    """

    name = "auto"

    def __init__(
        self,
        costs: Costs,
        lookups: list[Proposer],
        models: abc.Sequence[tuple[DraftModel, Costs]],
        serves: bool = True,
        context: Context | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """models: each with the costs of its forwards. clock: tells seconds; `now_s` by default."""
        self._now_s = clock or now_s
        self.costs = costs
        proposers = [*lookups, *(model for model, _ in models)]
        self.hidden_layers = tuple(sorted({layer for one in proposers for layer in one.hidden_layers}))
        self.most_hidden = _MOST_HIDDEN
        for of_model in (model.context for model, _ in models):
            if isinstance(of_model, HeadContext):
                of_model.most_waiting = _MOST_HIDDEN
        self.levels = tuple(level for model, _ in models for level in model.levels) if serves else ()
        self.lookups = [LookupDrafter(proposer) for proposer in lookups]
        self.models = [ModelDrafter(proposer, its, costs, self._now_s) for proposer, its in models]
        self._drafters: list[LookupDrafter | ModelDrafter] = [*self.lookups, *self.models]
        self.num_plain_rounds = 0  # of each sequence
        self._budget = TrialBudget(len(lookups) + len(models))
        self._serves = serves
        self._context = context
        self._nothing = Draft.chain([], self.name)
        self._chosen: dict[int, Option] = {}  # by sequence id: options of drafts that are out
        self._plain_s = 0.0  # seconds of the round that is out for each sequence, had nothing been drafted
        self._num_plain_forwards = 0
        # Rows that will be judged; rows fed, and bytes of weights read, before; and when that was.
        self._begun: tuple[int, int, int, float] | None = None

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Tell the drafters."""
        for drafter in self._drafters if self._serves else ():
            drafter.proposer.begin(seq, num_cached)

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """The draft of the best option for each sequence."""
        self._plain_s = self.costs.forward_s(len(seqs)) / len(seqs)
        best = [Option(None, 0, 1.0, self._plain_s, 0.0, self._nothing)] * len(seqs)
        for lookup in self.lookups:
            self._look_up(lookup, seqs, limits, best)
        for model in sorted(self.models, key=lambda one: -one.promise(self.costs, len(seqs)).tokens_per_s):
            self._ask(model, seqs, limits, best)
        drafts = [one.draft.first(one.num_tokens) if one.draft else self._nothing for one in best]
        self._chosen |= zip([seq.id for seq in seqs], best, strict=True)
        self.num_plain_rounds += sum(not one.num_tokens for one in best)
        self._budget.earn(self._plain_s * len(seqs))
        self._begin_timing(len(seqs), len(seqs) + sum(map(len, drafts)))
        return drafts

    def _look_up(self, lookup: LookupDrafter, seqs: list[Sequence], limits: list[int], best: list[Option]) -> None:
        """Put the lookup's options where they are better, or are tried.

        It is asked where that has gained more than it takes, or the budget has its time.
        """
        pays = lookup.gain.expected() * self._plain_s > lookup.seconds
        asked = [i for i, limit in enumerate(limits) if limit and (pays or self._budget.take(lookup, lookup.seconds))]
        if not asked:
            return
        some, begin_s = [seqs[i] for i in asked], self._now_s()
        drafts = lookup.proposer.propose(some, [limits[i] for i in asked])
        lookup.asked(len(asked), self._now_s() - begin_s)
        for i, draft in zip(asked, map(legal_part, some, drafts), strict=True):
            option = best_prefix(lookup, draft, self.costs, lookup.acceptance.expected(), len(seqs))
            if option.tokens_per_s > _WORTH * best[i].tokens_per_s:
                best[i] = option
            elif len(draft) and not best[i].num_tokens:
                trial = best_prefix(lookup, draft.first(TRIAL_TOKENS), self.costs, 1.0, len(seqs))
                if trial.num_tokens and self._budget.take(lookup, trial.seconds - self._plain_s):
                    best[i] = trial

    def _ask(self, model: ModelDrafter, seqs: list[Sequence], limits: list[int], best: list[Option]) -> None:
        """Put the model's options where they are better, asked for sequences to which it promises more, or in which it is tried.

        Not asked where another model's draft pays: both are unsure at the same tokens; asking costs 1 to 3 % (benchmarks/LOG.md).
        """
        num_seqs, promise = len(seqs), model.promise(self.costs, len(seqs))
        asked = [
            i
            for i, (seq, limit, instead) in enumerate(zip(seqs, limits, best, strict=True))
            if limit
            and not isinstance(instead.drafter, ModelDrafter)
            and (
                model.is_worth_its_price(seq, promise, instead)
                or model.is_tried(seq, self.costs, limit, num_seqs, instead, self._budget)
            )
        ]
        if not asked:
            return
        rates = [best[i].tokens_per_s for i in asked]
        found = model.propose([seqs[i] for i in asked], [limits[i] for i in asked], self.costs, num_seqs, rates)
        for i, option in zip(asked, found, strict=True):
            best[i] = max(best[i], option, key=lambda one: one.tokens_per_s)

    def _begin_timing(self, num_seqs: int, rows: int) -> None:
        """Time the forward, of which `rows` rows will be judged. Of plain ones time one of four."""
        self._num_plain_forwards += rows == num_seqs
        timed = rows > num_seqs or self._num_plain_forwards % _PLAIN_LOOKS == 0
        context = self._context
        self._begun = (rows, context.num_rows, context.weight_bytes, self._now_s()) if context and timed else None

    def _end_timing(self) -> None:
        """Learn from the forward's seconds and bytes, unless most of its rows were prompts', which take less than judged ones."""
        if self._begun and self._context:
            rows, num_before, bytes_before, begin_s = self._begun
            num_fed = self._context.num_rows - num_before
            if num_fed <= _MOST_FED * rows:
                self.costs.observe(num_fed, self._now_s() - begin_s, self._context.weight_bytes - bytes_before)
        self._begun = None

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Learn from the verdict, and tell the drafters."""
        self._end_timing()
        layers = dict(zip(self.hidden_layers, hidden, strict=True))
        for drafter in self._drafters if self._serves else self.lookups:
            drafter.proposer.accept(seq, verdict, tuple([layers[layer] for layer in drafter.proposer.hidden_layers]))
        option, num_accepted = self._chosen.pop(seq.id, None), len(verdict.tokens) - 1
        if option and option.num_tokens:
            option.drafter.drafted.record(option.num_tokens, num_accepted)
            if isinstance(option.drafter, ModelDrafter):
                option.drafter.learn(option, num_accepted)
            else:
                option.drafter.learn(option, num_accepted, option.seconds / self._plain_s - 1)

    def end(self, seq: Sequence) -> None:
        """Forget the sequence, and keep what was learned of the costs."""
        self._chosen.pop(seq.id, None)
        self._begun = None
        self.costs.keep()
        for model in self.models:
            model.end(seq)
        with ExitStack() as calls:  # every drafter is told, also where one raises
            for drafter in reversed(self._drafters if self._serves else ()):
                calls.callback(drafter.proposer.end, seq)

    def explain(self, verifies: str = "target") -> list[PlannedDrafter]:
        """The figures that it decides from, and those of the planners below."""
        plain_s = self.costs.forward_s(1)
        cost_of_rows = {n: self.costs.forward_s(n) / plain_s for n in self.costs.measured_rows}
        read_share = self.costs.read_share if self.costs.reads_more else None
        table = [PlannedDrafter("none", verifies, self.num_plain_rounds, 0, 0, None, 0.0, cost_of_rows, 0, 1.0, read_share)]
        for one in self._drafters:
            costs = (one.acceptance.expected(), one.seconds / plain_s, cost_of_rows)
            best = one.promise(self.costs, 1) if isinstance(one, ModelDrafter) else None
            planned = (best.num_tokens, best.tokens_per_s * plain_s) if best else (None, None)
            counts = (one.drafted.num_rounds, one.drafted.num_draft_tokens, one.drafted.num_accepted_tokens)
            table.append(PlannedDrafter(one.proposer.name, verifies, *counts, *costs, *planned))
            if isinstance(one.proposer, ChainProposer) and isinstance(one.proposer.inner, Planner):
                table += one.proposer.inner.explain(one.proposer.name)
        return table


def plan(target: Context, lookups: list[Proposer], chains: list[DraftModel]) -> Planner:
    """Planners for a target and for each of its draft models, cheapest first: each may draft with those before it.

    All draft in the target's tokens, so a model with another vocabulary drafts alone, and so does a head.
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

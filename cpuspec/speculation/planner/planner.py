"""Who drafts, and how much: chosen in every round from measured seconds and from how drafts have fared in this request.

One level, in closed form (arXiv 2211.17192, section 3.3): n drafted tokens of which each is accepted with probability a yield
1 + a + ... + a^n tokens for the seconds of n drafted tokens and of a forward over n + 1 rows. A model's seconds for a token are
those with its own drafters, so levels are settled from the bottom up (arXiv 2510.19705), each by a planner of its own. Drafting
nothing is always among the choices. So is asking nobody: where a token takes little, even looking for a draft in the text takes a
share of it, so a text is asked where that has gained more than it took. And a model that was not asked must be fed what it missed:
it is asked where that is less than what it saves over the tokens to come that texts leave to it, and, as whoever rents skis
decides to buy them, once not asking it has cost as much; at once where earlier requests left it almost all.

Estimates decide; what they speak against is tried on an allowance, a share of all time so far. A trial begins once the allowance
covers the most that it can lose: feeding the tokens that a model has missed, then enough drafts in a row to learn from, as if none
were accepted. What is accepted after all goes back to the allowance, and where the trial went well the estimates take over. So text
that nothing helps loses no more than the share, however often it changes; and a model to which missed tokens cost more than the
allowance gains in the meantime is tried where few are missed, early in a later request.
"""

from dataclasses import dataclass
from typing import NamedTuple

from cpuspec.backends import Backend
from cpuspec.metrics import elapsed_s, now_s
from cpuspec.model.batch import F32
from cpuspec.sequence import Mark, Sequence
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.planner.candidates import Candidate, Drafted, Estimate, Model, ModelCandidate, TextCandidate
from cpuspec.speculation.planner.costs import Costs, find_costs
from cpuspec.speculation.proposer import Proposer
from cpuspec.speculation.verify import Verdict

MAX_TOKENS = 16  # drafted by a model at once
_USUALLY_UNFED = 3 * MAX_TOKENS  # a draft's seconds say what a token takes where no more than this was fed first
_CURIOSITY = 0.02  # share of the time that may be lost by trying what the estimates speak against
_WORTH = 1.05  # what a draft from text must promise over none: what seems to gain less than this loses as often
_PLAIN_LOOKS = 4  # of so many forwards without a draft one is timed, or planned where nobody is asked: 1 % of a short token each
_DOUBT = 3.0  # share of a model's price that is waited for, over the share that texts did of earlier requests; never more than all
_TRIAL_ROUNDS = 6  # drafts of a model in a row, short ones, that a trial takes to learn from
_TRIAL_TOKENS = 2
_TRIAL_ROW = 0.25  # share of a row's believed cost that a trial of a text counts


@dataclass(frozen=True)
class PlannedDrafter:
    """What a planner knows of one drafter, or of drafting nothing, over all requests so far.

    verifies: the model that its drafts are for. cost_of_drafting: a model's token, or a whole draft from text, in plain forwards of
    that model; cost_of_rows: of forwards over the rows measured, likewise. acceptance: expected now, of a model's token, or of
    what a text drafter says. num_tokens, speedup: of the best draft at that acceptance, None where each draft is judged by its
    confidences.
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


class Choice(NamedTuple):
    """A draft length with what it is expected to yield."""

    num_tokens: int
    tokens: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """What is maximised."""
        return self.tokens / self.seconds


class Planner:
    """Drafts with whichever drafter, and as far as, promises most tokens per second from its verifier, in each round anew.

    costs: of the verifier's forwards. texts: drafters without a model, asked while that pays; their drafts carry confidences and
    are cut where a row costs more than it promises. models: chains, asked only where they promise more, and where that is more than
    feeding them takes over the tokens that texts leave to them. serves: whether this planner begins and ends sequences for its
    drafters, or one above does. The time from a draft to its verdict corrects the costs.
    """

    name = "auto"

    def __init__(self, costs: Costs, texts: list[Proposer], models: list[tuple[Model, Costs]], serves: bool = True) -> None:
        """models: each with the costs of its forwards."""
        self.costs = costs
        self.hidden_layers = tuple(sorted({layer for text in texts for layer in text.hidden_layers}))
        self.levels = tuple(level for model, _ in models for level in model.levels) if serves else ()
        share = _CURIOSITY / max(len(texts) + len(models), 1)
        self.texts = [TextCandidate(text, share) for text in texts]
        self.models = [ModelCandidate(model, cost, share) for model, cost in models]
        self._left = Estimate(1.0)  # share of the tokens that come of rounds in which texts find nothing, or less than a model
        self.num_plain_rounds = 0  # of each sequence
        self._num_plain_forwards = 0
        self._num_rests = 0  # rounds of the one sequence that remain until one is planned again
        self._serves = serves
        self._nothing = Draft.chain([], self.name)
        self._drafted: dict[int, Drafted] = {}  # by sequence
        self._left_to_models: set[int] = set()  # sequences in whose round a model promises more than texts
        self._planned_s = 0.0  # of all rounds, as they were planned
        self._scored: dict[int, Mark] = {}  # each sequence as its verifier last left it
        self._begun: tuple[int, float] | None = None  # rows of the forward that is out, and when it began

    @property
    def candidates(self) -> list[Candidate]:
        """All drafters."""
        return [*self.texts, *self.models]

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Nothing is known of the sequence yet."""
        self._num_rests = 0
        if self._serves:
            for candidate in self.candidates:
                candidate.proposer.begin(seq, num_cached)

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """The most promising draft for each sequence."""
        if self._num_rests and len(seqs) == 1:
            return self._rest()
        # A verifier that has scored all but a sequence's last token feeds this one and the draft, and nothing else.
        known = [self._scored.get(seq.id) for seq in seqs] == [seq.mark() for seq in seqs]
        drafts, choices, was_asked = self._best_of_texts(seqs, limits)
        for candidate in self.models:
            self._ask(candidate, seqs, limits, drafts, choices)
        rows = 0
        for seq, draft, choice in zip(seqs, drafts, choices, strict=True):
            self._planned_s += choice.seconds
            num_tokens = len(draft)
            rows += num_tokens + 1
            if not num_tokens:
                self.num_plain_rounds += 1
                self._drafted.pop(seq.id, None)
        self._num_plain_forwards += rows == len(seqs)
        timed = known and (rows > len(seqs) or self._num_plain_forwards % _PLAIN_LOOKS == 0)
        self._begun = (rows, now_s()) if timed else None
        if not was_asked and not self.models:
            self._num_rests = _PLAIN_LOOKS - 1 - self._num_plain_forwards % _PLAIN_LOOKS  # until one is timed
        return drafts

    def _rest(self) -> list[Draft]:
        """A round in which nobody is asked: an allowance that had nothing for a text a moment ago has hardly more now."""
        self._num_rests -= 1
        self.num_plain_rounds += 1
        self._num_plain_forwards += 1
        self._planned_s += self.costs.of(1)
        self._begun = None
        return [self._nothing]

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Learn how the draft fared, and tell the drafters from text."""
        if self._begun:
            rows, begin_s = self._begun
            self.costs.observe(rows, now_s() - begin_s)
            self._begun = None
        self._scored[seq.id] = seq.mark()
        layers = dict(zip(self.hidden_layers, hidden, strict=True))
        for text in self.texts:
            wanted = text.proposer.hidden_layers
            text.proposer.accept(seq, verdict, tuple([layers[layer] for layer in wanted]) if wanted else ())
        draft = self._drafted.pop(seq.id, None)
        if self.models:
            num_tokens = len(verdict.tokens)
            by_text = seq.id not in self._left_to_models and draft is not None and isinstance(draft.candidate, TextCandidate)
            self._left.record(seq, 0 if by_text else num_tokens, num_tokens)
            self._left_to_models.discard(seq.id)
        if draft:
            draft.candidate.learn(seq, draft, len(verdict.tokens) - 1)

    def end(self, seq: Sequence) -> None:
        """Forget the sequence, and keep what was learned of the costs."""
        self._drafted.pop(seq.id, None)
        self._scored.pop(seq.id, None)
        self._left_to_models.discard(seq.id)
        self._begun = None
        self._left.end(seq)
        self.costs.keep()
        for candidate in self.candidates:
            candidate.end(seq)
            if self._serves:
                candidate.proposer.end(seq)

    def explain(self, verifies: str = "target") -> list[PlannedDrafter]:
        """The table that it decides from, and those of the planners below."""
        table = [PlannedDrafter("none", verifies, self.num_plain_rounds, 0, 0, None, 0.0, self._cost_of_rows(), 0, 1.0)]
        table += [self._told(one, verifies, one.asking_s, None) for one in self.texts]
        for one in self.models:
            best = self.best_of_model(one, one.acceptance.of(), MAX_TOKENS, 1)
            table.append(self._told(one, verifies, one.seconds_per_token, best))
            below = one.proposer.inner if isinstance(one.proposer, ChainProposer) else None
            if isinstance(below, Planner):
                table += below.explain(one.proposer.name)
        return table

    def _told(self, one: Candidate, verifies: str, drafting_s: float, best: Choice | None) -> PlannedDrafter:
        plain_s = self.costs.of(1)
        return PlannedDrafter(
            one.proposer.name,
            verifies,
            one.num_rounds,
            one.num_draft_tokens,
            one.num_accepted_tokens,
            one.acceptance.of(),
            drafting_s / plain_s,
            self._cost_of_rows(),
            best.num_tokens if best else None,
            best.tokens_per_s * plain_s if best else None,
        )

    def _cost_of_rows(self) -> dict[int, float]:
        return {n: self.costs.of(n) / self.costs.of(1) for n in self.costs.rows}

    def plain(self, num_seqs: int) -> Choice:
        """Drafting nothing, for one of so many sequences that share a forward."""
        return Choice(0, 1.0, self.costs.of(num_seqs) / num_seqs)

    def best_of_model(self, candidate: ModelCandidate, rate: float, limit: int, num_seqs: int) -> Choice:
        """The best length of a model's draft whose tokens are accepted at that rate."""
        return best_length(self.costs, rate, min(limit, candidate.proposer.num_tokens), candidate.seconds_per_token, num_seqs)

    def _best_of_texts(self, seqs: list[Sequence], limits: list[int]) -> tuple[list[Draft], list[Choice], bool]:
        """For each sequence a draft, which may be empty, and what it promises; and whether any text was asked."""
        was_asked = False
        plain = self.plain(len(seqs))
        drafts, choices = [self._nothing] * len(seqs), [plain] * len(seqs)
        for candidate in self.texts:
            asked = [i for i, seq in enumerate(seqs) if limits[i] and candidate.may_ask(seq, plain.seconds, self._planned_s)]
            if not asked:
                continue
            was_asked = True
            begin_s = now_s()
            found = candidate.proposer.propose([seqs[i] for i in asked], [limits[i] for i in asked])
            for i, draft in zip(asked, found, strict=True):
                if len(draft):
                    self._weigh(candidate, seqs[i], draft, i, drafts, choices)
            candidate.has_proposed([seqs[i] for i in asked], now_s() - begin_s)
        return drafts, choices, was_asked

    def _weigh(
        self, candidate: TextCandidate, seq: Sequence, draft: Draft, place: int, drafts: list[Draft], choices: list[Choice]
    ) -> None:
        """Take a draft from text as far as it promises more than what there is, or where trying it is affordable."""
        num_seqs, instead = len(drafts), choices[place]
        choice, expected = self._cut(draft, candidate.acceptance.of(seq), num_seqs)
        earns_s = 0.0
        pays = choice.tokens_per_s > instead.tokens_per_s * (1.0 if instead.num_tokens else _WORTH)
        if not pays and not instead.num_tokens:
            # Rows that are believed to be dear would never be seen again: a trial takes them for cheap.
            choice, expected = self._cut(draft.first(_TRIAL_TOKENS), candidate.acceptance.first, num_seqs, _TRIAL_ROW)
            earns_s, lost_s = 1 / instead.tokens_per_s, self._seconds(choice.num_tokens, num_seqs)
            pays = choice.tokens_per_s > instead.tokens_per_s and candidate.trials.take(lost_s - earns_s, self._planned_s)
        if pays:
            drafts[place], choices[place] = draft.first(choice.num_tokens), choice
            cost = self._seconds(choice.num_tokens, num_seqs) / self._seconds(0, num_seqs) - 1
            self._drafted[seq.id] = Drafted(candidate, choice.num_tokens, earns_s, expected, cost)

    def _cut(self, draft: Draft, rate: float, num_seqs: int, row: float = 1.0) -> tuple[Choice, float]:
        """Where a draft from text promises most, and the tokens it says will be accepted up to there.

        row: share of what a further row is believed to cost that is counted.
        Only a choice made without a draw may be cut by looking at it: drawn tokens stay.
        """
        if draft.confidence is None or draft.probs is not None:
            return Choice(len(draft), 1 + rate * len(draft), self._seconds(len(draft), num_seqs, row)), float(len(draft))
        rate, said, said_of_best = min(rate, 1.0), 0.0, 0.0
        likely: list[float] = []
        of, plain_s = self.costs.of, self.costs.of(num_seqs)
        num_tokens, tokens, seconds = 0, 1.0, plain_s / num_seqs
        for n, (parent, confidence) in enumerate(zip(draft.parents.tolist(), draft.confidence.tolist(), strict=True), 1):
            likely.append(confidence * (likely[parent] if parent >= 0 else 1.0))
            said += likely[-1]
            its_tokens = 1 + rate * said
            its_seconds = (plain_s + row * (of(num_seqs * (n + 1)) - plain_s)) / num_seqs
            if its_tokens / its_seconds > tokens / seconds:
                num_tokens, tokens, seconds, said_of_best = n, its_tokens, its_seconds, said
        return Choice(num_tokens, tokens, seconds), said_of_best

    def _ask(
        self, candidate: ModelCandidate, seqs: list[Sequence], limits: list[int], drafts: list[Draft], choices: list[Choice]
    ) -> None:
        """Let a model draft for the sequences where it promises more than what there is, or where trying it is affordable."""
        places, wanted, earns_s = [], [], []
        for i, seq in enumerate(seqs):
            choice, earns = self.best_of_model(candidate, candidate.acceptance.of(seq), limits[i], len(seqs)), 0.0
            if not self._pays(candidate, seq, choice, choices[i]):
                choice, earns = self._try(candidate, seq, limits[i], len(seqs), choices[i]), 1 / choices[i].tokens_per_s
            if choice.num_tokens:
                places.append(i)
                wanted.append(choice.num_tokens)
                earns_s.append(earns)
                choices[i] = choice
        if not places:
            return
        found: list[Draft] = []
        asked = [seqs[i] for i in places]
        caught_up = all(candidate.num_unfed(seq) <= _USUALLY_UNFED for seq in asked)
        seconds = elapsed_s(lambda: found.extend(candidate.proposer.propose(asked, wanted)))
        candidate.has_proposed(asked, sum(map(len, found)), seconds if caught_up else None)
        for i, draft, earns in zip(places, found, earns_s, strict=True):
            drafts[i] = draft
            self._drafted[seqs[i].id] = Drafted(candidate, len(draft), earns)

    def _pays(self, candidate: ModelCandidate, seq: Sequence, choice: Choice, instead: Choice) -> bool:
        """Whether a model's draft promises more, the model enough over the tokens to come, and the wait for it was long enough."""
        missed_s = instead.tokens * (1 / instead.tokens_per_s - 1 / choice.tokens_per_s)
        if missed_s <= 0:
            return False
        self._left_to_models.add(seq.id)
        if not self._saves(candidate, seq, choice, instead, self._left.of(seq)):
            return False
        doubt = min(1.0, _DOUBT * (1 - self._left.of()))
        return candidate.has_missed(seq, missed_s) >= doubt * candidate.catch_up_s(seq)

    def _saves(self, candidate: ModelCandidate, seq: Sequence, choice: Choice, instead: Choice, share: float) -> bool:
        """Whether such drafts for that share of the tokens to come save more than feeding what a model missed, and will miss."""
        saved_s = share * (1 / instead.tokens_per_s - 1 / choice.tokens_per_s) - (1 - share) * candidate.costs.per_row
        return seq.num_wanted * saved_s > candidate.catch_up_s(seq)

    def _try(self, candidate: ModelCandidate, seq: Sequence, limit: int, num_seqs: int, instead: Choice) -> Choice:
        """A short draft of a model that the estimates speak against: one of a trial that runs, or that can be afforded now."""
        nothing = Choice(0, 0.0, 1.0)
        choice = self.best_of_model(candidate, 1.0, min(limit, _TRIAL_TOKENS), num_seqs)
        if choice.tokens_per_s <= instead.tokens_per_s:
            return nothing
        rounds = candidate.trial_rounds.get(seq.id, 0)
        if not rounds:
            rounds = _TRIAL_ROUNDS
            at_best = self.best_of_model(candidate, 1.0, limit, num_seqs)
            lost_s = candidate.catch_up_s(seq) + rounds * (choice.seconds - 1 / instead.tokens_per_s)
            if not self._saves(candidate, seq, at_best, instead, 1.0) or not candidate.trials.take(lost_s, self._planned_s):
                return nothing
            candidate.acceptance.restart(seq)
        candidate.trial_rounds[seq.id] = rounds - 1
        return choice

    def _seconds(self, num_tokens: int, num_seqs: int, row: float = 1.0) -> float:
        """A sequence's share of verifying so many tokens for each. row: as in `_cut`."""
        plain_s = self.costs.of(num_seqs)
        return (plain_s + row * (self.costs.of(num_seqs * (num_tokens + 1)) - plain_s)) / num_seqs


def best_length(costs: Costs, rate: float, limit: int, seconds_per_token: float, num_seqs: int = 1) -> Choice:
    """The best length of a draft whose tokens take so long each and are accepted at that rate, none included.

    costs: of who verifies it, for so many sequences at once.
    """
    best, tokens, likely = Choice(0, 1.0, costs.of(num_seqs) / num_seqs), 1.0, 1.0
    for n in range(1, limit + 1):
        likely *= rate
        tokens += likely
        choice = Choice(n, tokens, n * seconds_per_token + costs.of(num_seqs * (n + 1)) / num_seqs)
        if choice.tokens_per_s > best.tokens_per_s:
            best = choice
    return best


def best_chain(costs: list[Costs], rate: float) -> list[Choice]:
    """The best lengths of a target's drafts, of their drafts, and so on, all accepted at one rate. costs: the target's first."""
    choices: list[Choice] = []
    seconds_per_token = costs[-1].of(1)
    for verifier in reversed(costs[:-1]):
        choices.insert(0, best_length(verifier, rate, MAX_TOKENS, seconds_per_token))
        seconds_per_token = 1 / choices[0].tokens_per_s
    return choices


def plan(target: Backend, texts: list[Proposer], chains: list[Model]) -> Planner:
    """Planners for a target and for each of its draft models, cheapest first: each may draft with those before it.

    All draft in the target's tokens, so a model with others drafts alone.
    """
    models: list[tuple[Model, Costs]] = []
    for chain in chains:
        costs = find_costs(chain.context.backend)
        if isinstance(chain, ChainProposer):
            chain.inner = Planner(costs, texts, list(models), serves=False)
        models.append((chain, costs))
    return Planner(find_costs(target), texts, models)

"""The choice of a round: of all options the one that promises most tokens per second.

A draft that is there is judged by its confidences. Before there is one, a promise has a closed form (arXiv 2211.17192, section
3.3): n drafted tokens, of which each is accepted with probability a, yield 1 + a + ... + a^n tokens for the seconds of drafting n
tokens and of a forward over n + 1 rows.
"""

from typing import Any, NamedTuple

from cpuspec.speculation.draft import Draft
from cpuspec.speculation.planner.costs import Costs
from cpuspec.speculation.planner.exploration import TrialBudget

MAX_TOKENS = 16  # drafted by a model at once
WORTH = 1.05  # a looked-up draft must promise this over none: what seems to gain less loses as often
_LENGTHS = (1, 3, 7, 15)  # of drafts that are tried for the least acceptance that pays


class Option(NamedTuple):
    """A number of tokens by a drafter, or no tokens by none. Figures are for one of the sequences that share a forward.

    trial: whether its figures are hopes that the estimates contradict. risk_s: seconds that it loses if nothing is accepted.
    part: as in `TrialBudget.take`. pays_back: whether what is accepted returns to the budget.
    """

    drafter: Any  # an object of the planner, or None
    num_tokens: int
    tokens: float  # that the round yields, the verifier's own included
    seconds: float  # of verifying, and of drafting what is not drafted yet
    claimed: float = 0.0  # tokens that the drafter expects to be accepted, from its confidences
    trial: bool = False
    risk_s: float = 0.0
    part: float = 1.0
    pays_back: bool = False
    draft: Draft | None = None

    @property
    def tokens_per_s(self) -> float:
        """The quantity that a choice maximises."""
        return self.tokens / self.seconds


def choose(options: list[Option], budget: TrialBudget) -> Option:
    """The option with most tokens per second; before it a trial that hopes for more, where the budget covers its risk."""
    best = best_estimated(options)
    for one in options:
        hopes = one.trial and one.tokens_per_s > best.tokens_per_s
        if hopes and budget.take(one.drafter, one.risk_s, one.part):
            return one
    return best


def best_estimated(options: list[Option]) -> Option:
    """The option with most tokens per second by the estimates."""
    return max([one for one in options if not one.trial], key=lambda one: one.tokens_per_s)


def best_length(
    drafter: object,
    costs: Costs,
    rate: float,
    limit: int,
    seconds_per_token: float,
    num_seqs: int = 1,
    seconds_per_draft: float = 0.0,
) -> Option:
    """The best length, at most `limit` and perhaps 0, of a model's draft whose tokens are accepted at that rate.

    costs: the verifier's. num_seqs: sequences that share its forward. seconds_per_draft: that a draft takes whatever its length.
    """
    best, tokens, likely = Option(drafter, 0, 1.0, costs.forward_s(num_seqs) / num_seqs), 1.0, 1.0
    for n in range(1, limit + 1):
        likely *= rate
        tokens += likely
        drafting_s = seconds_per_draft + n * seconds_per_token
        one = Option(drafter, n, tokens, drafting_s + costs.forward_s(num_seqs * (n + 1)) / num_seqs)
        if one.tokens_per_s > best.tokens_per_s:
            best = one
    return best


def best_prefix(drafter: object, draft: Draft, costs: Costs, rate: float, num_seqs: int, price: float = 1.0) -> Option:
    """The best prefix of a draft that is there already, whose tokens are accepted with `rate` times their confidences.

    price: the share of what a further row costs that is counted.
    """
    plain_s, forward_s = costs.forward_s(num_seqs), costs.forward_s
    if draft.confidence is None:
        rows_s, claimed = price * (forward_s(num_seqs * (len(draft) + 1)) - plain_s), sum(draft.likely)
        return Option(drafter, len(draft), 1 + rate * claimed, (plain_s + rows_s) / num_seqs, claimed)
    rate, claimed = min(rate, 1.0), 0.0
    best, best_rate = (0, 1.0, plain_s / num_seqs, 0.0), num_seqs / plain_s
    for n, likely in enumerate(draft.likely, 1):
        claimed += likely
        tokens, seconds = 1 + rate * claimed, (plain_s + price * (forward_s(num_seqs * (n + 1)) - plain_s)) / num_seqs
        if tokens / seconds > best_rate:
            best, best_rate = (n, tokens, seconds, claimed), tokens / seconds
    return Option(drafter, *best)


def break_even(costs: Costs, num_seqs: int) -> float:
    """The least share of accepted tokens at which a draft of any length is worth its rows; where that is over 1, none ever is.

    num_seqs: sequences that share a forward. The more there are, the more of its seconds are its rows', up to all of them.
    """
    plain_s = costs.forward_s(num_seqs)
    return min([(WORTH * costs.forward_s(num_seqs * (n + 1)) / plain_s - 1) / n for n in _LENGTHS])

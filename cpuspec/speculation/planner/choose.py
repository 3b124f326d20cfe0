"""The tokens per second that a draft of some length promises.

A draft that is there is judged by its confidences. Before there is one, a promise has a closed form (arXiv 2211.17192, section
3.3): n drafted tokens, of which each is accepted with probability a, yield 1 + a + ... + a^n tokens for the seconds of drafting n
tokens and of a forward over n + 1 rows.
"""

from typing import Any, NamedTuple

from cpuspec.speculation.draft import Draft
from cpuspec.speculation.planner.costs import Costs

MAX_TOKENS = 16  # drafted by a model at once


class Option(NamedTuple):
    """A number of tokens by a drafter, or no tokens by none. Figures are for one of the sequences that share a forward."""

    drafter: Any  # an object of the planner, or None
    num_tokens: int
    tokens: float  # that the round yields, the verifier's own included
    seconds: float  # of verifying, and of drafting what is not drafted yet
    claimed: float = 0.0  # tokens that the drafter expects to be accepted, from its confidences
    draft: Draft | None = None

    @property
    def tokens_per_s(self) -> float:
        """The quantity that a choice maximises."""
        return self.tokens / self.seconds


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


def best_prefix(drafter: object, draft: Draft, costs: Costs, rate: float, num_seqs: int) -> Option:
    """The best prefix of a draft that is there already, whose tokens are accepted with `rate` times their confidences."""
    plain_s, forward_s = costs.forward_s(num_seqs), costs.forward_s
    if draft.confidence is None:
        claimed = sum(draft.likely)
        return Option(drafter, len(draft), 1 + rate * claimed, forward_s(num_seqs * (len(draft) + 1)) / num_seqs, claimed, draft)
    rate, claimed = min(rate, 1.0), 0.0
    best, best_rate = (0, 1.0, plain_s / num_seqs, 0.0), num_seqs / plain_s
    for n, likely in enumerate(draft.likely, 1):
        claimed += likely
        tokens, seconds = 1 + rate * claimed, forward_s(num_seqs * (n + 1)) / num_seqs
        if tokens / seconds > best_rate:
            best, best_rate = (n, tokens, seconds, claimed), tokens / seconds
    return Option(drafter, *best, draft)

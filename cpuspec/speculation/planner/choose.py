"""The tokens per second that a draft of some length promises.

A draft that exists is judged by its confidences. Before it exists, its promise has a closed form (arXiv 2211.17192, section 3.3):
if each of n drafted tokens is accepted with probability a, the round yields 1 + a + ... + a^n tokens. It takes the seconds of
drafting n tokens and of a forward over n + 1 rows.
"""

from typing import Any, NamedTuple

from cpuspec.speculation.draft import Draft
from cpuspec.speculation.planner.costs import Costs

MAX_TOKENS = 16  # that a model drafts for one round


class Option(NamedTuple):
    """A way to use a round: a drafter and how many of its tokens are verified. Figures are for one sequence of a forward."""

    drafter: Any  # a LookupDrafter or a ModelDrafter; None for a round without a draft
    num_tokens: int
    tokens: float  # that the round yields, the verifier's own included
    seconds: float  # of verifying, and of drafting where there is no draft yet
    claimed: float = 0.0  # tokens that the confidences say are accepted
    draft: Draft | None = None

    @property
    def tokens_per_s(self) -> float:
        """The quantity that the planner maximises."""
        return self.tokens / self.seconds


def best_length(
    drafter: object,
    costs: Costs,
    acceptance: float,
    limit: int,
    seconds_per_token: float,
    num_seqs: int = 1,
    seconds_per_draft: float = 0.0,
) -> Option:
    """The best length, from 0 to `limit`, of a model's draft whose tokens are each accepted with probability `acceptance`.

    costs: the verifier's. num_seqs: sequences that share its forward. seconds_per_draft: that a draft of any length takes.
    """
    best, tokens, likely = Option(drafter, 0, 1.0, costs.forward_s(num_seqs) / num_seqs), 1.0, 1.0
    for n in range(1, limit + 1):
        likely *= acceptance
        tokens += likely
        drafting_s = seconds_per_draft + n * seconds_per_token
        one = Option(drafter, n, tokens, drafting_s + costs.forward_s(num_seqs * (n + 1)) / num_seqs)
        if one.tokens_per_s > best.tokens_per_s:
            best = one
    return best


def best_prefix(drafter: object, draft: Draft, costs: Costs, acceptance: float, num_seqs: int) -> Option:
    """The best prefix of an existing draft. Its tokens are accepted with `acceptance` times their confidences."""
    plain_s, forward_s = costs.forward_s(num_seqs), costs.forward_s
    if draft.confidence is None:
        claimed = sum(draft.likely)
        tokens, seconds = 1 + acceptance * claimed, forward_s(num_seqs * (len(draft) + 1)) / num_seqs
        return Option(drafter, len(draft), tokens, seconds, claimed, draft)
    acceptance, claimed = min(acceptance, 1.0), 0.0
    best, best_per_s = (0, 1.0, plain_s / num_seqs, 0.0), num_seqs / plain_s
    for n, likely in enumerate(draft.likely, 1):
        claimed += likely
        tokens, seconds = 1 + acceptance * claimed, forward_s(num_seqs * (n + 1)) / num_seqs
        if tokens / seconds > best_per_s:
            best, best_per_s = (n, tokens, seconds, claimed), tokens / seconds
    return Option(drafter, *best, draft)

"""Which drafted tokens stand, and which one follows. Whatever was drafted, a verdict's tokens are distributed as the target's.

Rows are numbered as in a score: row 0 is the target's after the last committed token, row i + 1 the one after draft node i.
They are asked for one by one, so that a rejected draft costs no more than the rows that decide.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cpuspec.sampling import Row, Uniform, excess, sample
from cpuspec.speculation.draft import Draft, Probs


@dataclass(slots=True)
class Verdict:
    """The tokens that a round commits, the draft nodes that were accepted, and the target's rows behind the tokens."""

    tokens: list[int]  # accepted tokens, then exactly one recovered or bonus token
    path: list[int]  # accepted draft nodes
    probs: Probs | None = None  # the target's distribution [V] of each token, where the caller adds them; None where greedy


def verify_greedy(draft: Draft, target_token: Callable[[int], int]) -> Verdict:
    """Go down the draft, a chain or a tree, while it has what the target chooses; then the target's own choice.

    target_token(row): the target's choice.
    """
    path: list[int] = []
    last, choice = -1, int(target_token(0))
    for node, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        if parent == last and token == choice:
            path.append(node)
            last, choice = node, int(target_token(node + 1))
    return _verdict(draft, path, choice)


def verify_sampled(draft: Draft, target_probs: Callable[[int], Row], rng: Uniform) -> Verdict:
    """Accept a token with probability min(1, target / draft); after a rejection the residual max(0, target - draft) takes the
    target's place for the next alternative, or is drawn from where there is none.

    A chain: arXiv 2211.17192 (algorithm 1), 2302.01318 (algorithm 2). A tree, its alternatives drawn with replacement: SpecInfer,
    arXiv 2305.09781; without: Sequoia, arXiv 2402.12374.
    Where the draft is point masses that is drawing the target's own token and comparing, one draw for each token of the
    verdict: a seed then gives the same tokens whatever was drafted, or nothing.
    target_probs(row): the target's distribution [V].
    """
    if draft.probs is None:
        return verify_greedy(draft, lambda row: sample(target_probs(row), rng))
    path: list[int] = []
    last, target = -1, target_probs(0)
    for node, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        if parent != last:
            continue
        if rng.random() * _draft_prob(draft, node) < target[token]:
            path.append(node)
            last, target = node, target_probs(node + 1)
        else:
            target = _residual(target, draft.probs[node])
    return _verdict(draft, path, sample(target, rng))


def verify_block(draft: Draft, target_probs: Callable[[int], Row], rng: Uniform) -> Verdict:
    """Accept the longest beginning of a chain that the draws allow: arXiv 2403.10444, algorithm 2.

    A token that the target likes more than the draft makes up for an earlier one that it likes less, so that no rule accepts
    more on average; `verify_sampled` ends with the first rejection. For point masses both are the same, and that one asks for
    fewer rows. target_probs(row): the target's distribution [V].
    """
    assert draft.probs is not None, "a point mass gains nothing from its block"
    tokens, n = draft.tokens.tolist(), len(draft)
    kept = [1]  # for each length, with what probability at least this many tokens are kept, given them
    targets: list[Row] = []
    while len(targets) < n and kept[-1] > 0:
        node = len(targets)
        targets.append(target_probs(node))
        wanted, drafted = kept[node] * targets[node][tokens[node]], _draft_prob(draft, node)
        kept.append(wanted / drafted if wanted < drafted else 1)
    if len(targets) == n and rng.random() < kept[n]:
        return _verdict(draft, list(range(n)), sample(target_probs(n), rng))
    for length in range(len(targets) - 1, 0, -1):
        residual = excess(targets[length], draft.probs[length], kept[length])
        share = residual.sum()
        if rng.random() * (share + 1 - kept[length]) < share:
            return _verdict(draft, list(range(length)), sample(residual, rng))
    return _verdict(draft, [], sample(_residual(targets[0], draft.probs[0]), rng))


def _draft_prob(draft: Draft, node: int) -> Any:
    """The probability with which a node's token was drawn."""
    assert draft.probs is not None, "a point mass is compared, not weighed"
    prob = draft.probs[node][draft.tokens[node]]
    assert prob > 0, f"{draft.source} declared probability 0 for the token {draft.tokens[node]} it drafted"
    return prob


def _residual(target: Row, draft_probs: Row) -> Row:
    """What the target has beyond the draft, as a distribution."""
    residual = excess(target, draft_probs)
    total = residual.sum()
    # Rows that differ by rounding alone may be rejected, once in 1e16 draws, and leave nothing.
    return residual / total if total > 0 else target


def _verdict(draft: Draft, path: list[int], last: int) -> Verdict:
    tokens = draft.tokens.tolist()
    return Verdict([*(tokens[node] for node in path), last], path)

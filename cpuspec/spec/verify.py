"""Which drafted tokens stand, and which one follows: arXiv 2211.17192 (algorithm 1) and 2302.01318 (algorithm 2).

Whatever was drafted, the tokens of a verdict are distributed as the target alone would draw them. Rows are asked for
one by one, so that a rejected draft costs no more than the rows up to its rejection.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.model.batch import I32
from cpuspec.sampling import Uniform, sample
from cpuspec.spec.draft import Draft


@dataclass(frozen=True)
class Verdict:
    """The tokens that a round commits and the draft nodes that were accepted."""

    tokens: list[int]  # accepted tokens, then exactly one recovered or bonus token
    path: I32  # accepted draft nodes


def verify_greedy(draft: Draft, target_token: Callable[[int], int]) -> Verdict:
    """Accept while the draft is what the target would choose; then the target's own choice.

    target_token(i): the target's choice after i drafted tokens, 0 <= i <= n.
    """
    accepted: list[int] = []
    for token in draft.tokens.tolist():
        choice = int(target_token(len(accepted)))
        if token != choice:
            return _verdict(accepted, choice)
        accepted.append(token)
    return _verdict(accepted, int(target_token(len(accepted))))


def verify_sampled(draft: Draft, target_probs: Callable[[int], NDArray[Any]], rng: Uniform) -> Verdict:
    """Accept each token with probability min(1, target / draft); after a rejection draw from the residual
    max(0, target - draft), after none from the target's next row.

    Where the draft is point masses that is drawing the target's own token and comparing, one draw for each token of the
    verdict: a seed then gives the same tokens whatever was drafted, or nothing.
    target_probs(i): the target's distribution [V] after i drafted tokens, 0 <= i <= n.
    """
    if draft.probs is None:
        return verify_greedy(draft, lambda i: sample(target_probs(i), rng))
    accepted: list[int] = []
    for i, token in enumerate(draft.tokens.tolist()):
        target = target_probs(i)
        draft_prob = draft.probs[i][token]
        assert draft_prob > 0, f"{draft.source} declared probability 0 for the token {token} it drafted"
        if not rng.random() * draft_prob < target[token]:
            return _verdict(accepted, sample(_residual(target, draft.probs[i]), rng))
        accepted.append(token)
    return _verdict(accepted, sample(target_probs(len(accepted)), rng))


def _residual(target: NDArray[Any], draft_probs: NDArray[Any]) -> NDArray[Any]:
    """What the target has beyond the draft, not normalised."""
    residual = np.maximum(target - draft_probs, 0)
    # Rows that differ by rounding alone may be rejected, once in 1e16 draws, and leave nothing.
    return residual if residual.sum() > 0 else target


def _verdict(accepted: list[int], last: int) -> Verdict:
    return Verdict([*accepted, last], np.arange(len(accepted), dtype=np.int32))

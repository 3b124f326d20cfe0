"""The budget for trials: a planner that only drafted with what its estimates favour would never learn that they are wrong.

A trial begins once its drafter's budget covers the most that it can lose. So text that nothing helps loses no more than the share,
and a drafter whose trials cost more than the budget earns is tried rarely.
"""

TRIAL_TOKENS = 2  # of a lookup's draft that is tried
TRIAL_ROUNDS = 6  # that a draft model's trial takes: single drafts teach nothing once the model was fed what it missed
TRIAL_FORWARDS = 4  # of the model in such a round, or fewer, until it is known again for what it is
_SHARE = 0.015  # of all time, divided among a planner's drafters


class TrialBudget:
    """Seconds that trials may lose, an account for each drafter: lookups are tried often, and would use up that of a model."""

    def __init__(self, num_drafters: int) -> None:
        self._share = _SHARE / max(num_drafters, 1)
        self._all_s = 0.0
        self._lost_s: dict[object, float] = {}  # by account

    def earn(self, seconds: float) -> None:
        """Add to the time of which each drafter has its share."""
        self._all_s += seconds

    def take(self, account: object, seconds: float) -> bool:
        """Take seconds that may be lost, if the account has them."""
        lost_s = self._lost_s.get(account, 0.0) + seconds
        if lost_s > self._share * self._all_s:
            return False
        self._lost_s[account] = lost_s
        return True

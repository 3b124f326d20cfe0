"""The budget for trials: a planner that only drafted with what its estimates favour would never learn that they are wrong.

A trial begins once its drafter's account covers the most that the trial can lose. So where no draft helps, trials take no more than
their share of the time, and a drafter with costly trials is tried rarely.
"""

TRIAL_TOKENS = 2  # of a lookup's draft in a trial
TRIAL_ROUNDS = 6  # of a draft model's trial: the model first reads the tokens that it missed, which one draft does not repay
TRIAL_FORWARDS = 4  # of the model in such a round, at most
_SHARE = 0.015  # of all time, divided among a planner's drafters


class TrialBudget:
    """Seconds that trials may lose. Each drafter has an account: lookups are tried often, and would spend a model's share."""

    def __init__(self, num_drafters: int) -> None:
        self._share = _SHARE / max(num_drafters, 1)
        self._all_s = 0.0
        self._lost_s: dict[object, float] = {}  # by account

    def earn(self, seconds: float) -> None:
        """Add to the time of which each account has its share."""
        self._all_s += seconds

    def lacks(self, account: object, seconds: float) -> float:
        """How much is to be earned before the account has these seconds."""
        return (self._lost_s.get(account, 0.0) + seconds) / self._share - self._all_s

    def spend(self, account: object, seconds: float) -> bool:
        """Spend seconds that a trial may lose; returns whether the account had them."""
        lost_s = self._lost_s.get(account, 0.0) + seconds
        if lost_s > self._share * self._all_s:
            return False
        self._lost_s[account] = lost_s
        return True

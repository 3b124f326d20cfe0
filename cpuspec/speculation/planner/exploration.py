"""The budget for trials: a planner that only drafted with what its estimates favour would never learn that they are wrong.

A trial begins once its drafter's budget covers the most that it can lose, and accepted tokens pay it back. So text that nothing
helps loses no more than the share, and a drafter whose trials cost more than the budget earns is tried rarely.
"""

TRIAL_TOKENS = 2  # of a lookup's draft that is tried
TRIAL_ROUNDS = 6  # that a draft model's trial takes: single drafts teach nothing once the model was fed what it missed
TRIAL_FORWARDS = 4  # of the model in such a round, or fewer, until it is known again for what it is
TRIAL_PRICE = 0.25  # share of a row's believed cost that a lookup's trial counts: rows believed dear would never be seen again
LOOKUP_PART = 0.5  # of a lookup's share for trials of its drafts; the other half is for asking it at all
_SHARE = 0.02  # of all time, divided among a planner's drafters


class TrialBudget:
    """Seconds that trials may lose, in accounts. Lookups are tried often, and would use up an account that models shared."""

    def __init__(self, num_drafters: int) -> None:
        self._share = _SHARE / max(num_drafters, 1)
        self._all_s = 0.0
        self._lost_s: dict[object, float] = {}  # by account

    def earn(self, seconds: float) -> None:
        """Add to the time of which each drafter has its share."""
        self._all_s += seconds

    def take(self, account: object, seconds: float, part: float = 1.0) -> bool:
        """Take seconds that may be lost, if the account has them. part: of its drafter's share that the account has."""
        lost_s = self._lost_s.get(account, 0.0) + seconds
        if lost_s > part * self._share * self._all_s:
            return False
        self._lost_s[account] = lost_s
        return True

    def give_back(self, account: object, seconds: float) -> None:
        """Return seconds that were taken and not lost."""
        self._lost_s[account] = self._lost_s.get(account, 0.0) - seconds

"""How good a head's alternatives are: how often the token that came was its likeliest one, its second, and so on, by depth.

A tree is worth its rows where the likeliest token often is not the one that comes, and one of the next ones is.
"""

from collections.abc import Mapping

from cpuspec.speculation.drafters.head_path import CHILDREN

_FIRST = (0.7, 0.12, 0.06, 0.03)  # shares of the ranks, before anything is known
_PRIOR = 3.0  # weight of these against what was counted, in tokens
_SAME = 6.0  # weight of all depths against what was counted at one
_DECAY = 0.995  # weight that a token keeps from one to the next at its depth
_MOST = 0.98  # the most that a chance is believed to be

# The likeliest tokens behind each path of drafted ones, the likeliest first.
Offers = Mapping[tuple[int, ...], list[int]]


class Ranks:
    """Counted ranks, for depths from 0 to `num_depths` - 1. Older ones fade."""

    def __init__(self, num_depths: int) -> None:
        self._counts = [[0.0] * (CHILDREN + 1) for _ in range(num_depths)]  # the last of a row: none of them

    def record(self, offers: Offers, tokens: list[int]) -> tuple[int, int]:
        """Count the tokens that came, as far as the head had offers for them; returns how many were its likeliest, and how many
        there were.
        """
        hits = number = 0
        for depth, token in enumerate(tokens[: len(self._counts)]):
            offered = offers.get(tuple(tokens[:depth]))
            if offered is None:
                break
            rank = offered.index(token) if token in offered else CHILDREN
            self._counts[depth] = [_DECAY * count for count in self._counts[depth]]
            self._counts[depth][rank] += 1
            hits, number = hits + (rank == 0), number + 1
        return hits, number

    def chances(self, rate: float) -> list[list[float]]:
        """For each depth the chances of the ranks, once the token before is right, of a request whose drafts fare so that the
        likeliest token comes with `rate` on average.
        """
        counts = [sum(row[rank] for row in self._counts) for rank in range(CHILDREN + 1)]
        known = _PRIOR + sum(counts)
        usual = [(_PRIOR * first + count) / known for first, count in zip(_FIRST, counts, strict=False)]
        table = []
        for row in self._counts:
            known = _SAME + sum(row)
            shares = [(_SAME * share + count) / known for share, count in zip(usual, row, strict=False)]
            first = min(shares[0] * rate / usual[0], _MOST)
            others = (1 - first) / (1 - shares[0])
            table.append([first, *(share * others for share in shares[1:])])
        return table

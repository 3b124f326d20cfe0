"""Byte-pair encoding of words (Sennrich et al. 2016, arXiv:1508.07909, section 3.2), ready to use as soon as it is made.

A model has hundreds of thousands of merges and a prompt needs few of them, so nothing is prepared in advance.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

_MOST_WORDS, _LONGEST_WORD = 1 << 16, 64  # of those that are remembered

Rank = Callable[[str, str], float | None]  # when the merge of two neighbours comes; None if there is none


def merge_order(merges: Sequence[str], tokens: Container[str]) -> Rank:
    """A function that ranks pairs by their place in a list of "left right" merges. Merges whose result is no token have no rank."""
    ranks = dict(zip(merges, count()))

    def rank(left: str, right: str) -> int | None:
        found = ranks.get(f"{left} {right}")
        return found if found is not None and left + right in tokens else None

    return rank


class BytePairs:
    """Splits words into tokens. It joins the neighbours with the lowest rank, the leftmost of equals, until no merge is left, in
    n log n steps for a word of n characters.

    ids: of every token that may come out. whole_words: a word that is a token stays whole, whatever the merges say.
    """

    def __init__(self, ids: Mapping[str, int], rank: Rank, whole_words: bool) -> None:
        self._ids = ids
        self._rank = rank
        self._whole_words = whole_words
        self._seen: dict[str, list[int]] = {}

    def encode(self, word: str) -> list[int]:
        """Ids of the word's tokens. Characters that are no tokens are left out, as by the `tokenizers` library."""
        if (ids := self._seen.get(word)) is None:
            ids = [self._ids[piece] for piece in self._split(word)]
            if len(word) <= _LONGEST_WORD:
                if len(self._seen) >= _MOST_WORDS:
                    self._seen = {}
                self._seen[word] = ids
        return ids

    def _split(self, word: str) -> list[str]:
        if self._whole_words and word in self._ids:
            return [word]
        pieces = [char for char in word if char in self._ids]
        # Neighbours of each piece that is left; a piece that was joined to the one before it is empty.
        before, after = list(range(-1, len(pieces) - 1)), list(range(1, len(pieces) + 1))
        queue = [(rank, at) for at in range(len(pieces) - 1) if (rank := self._rank(pieces[at], pieces[at + 1])) is not None]
        heapify(queue)
        while queue:
            rank, at = heappop(queue)
            right = after[at]
            if right == len(pieces) or self._rank(pieces[at], pieces[right]) != rank:
                continue  # the pair was joined with another neighbour meanwhile
            pieces[at], pieces[right] = pieces[at] + pieces[right], ""
            after[at] = following = after[right]
            if following < len(pieces):
                before[following] = at
                if (rank := self._rank(pieces[at], pieces[following])) is not None:
                    heappush(queue, (rank, at))
            if before[at] >= 0 and (rank := self._rank(pieces[before[at]], pieces[at])) is not None:
                heappush(queue, (rank, before[at]))
        return [piece for piece in pieces if piece]

"""Exact rational enumeration of everything that a program does with uniform draws."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from fractions import Fraction
from typing import Any


class ExactUniform:
    """A uniform number of which only the interval is known. A comparison that the interval leaves open goes both
    ways, one per run, each with its exact probability.
    """

    def __init__(self, rng: "ExactRng", scale: Fraction = Fraction(1)) -> None:
        self._rng, self._bounds, self._scale = rng, [Fraction(0), Fraction(1)], scale

    def __mul__(self, scale: Any) -> "ExactUniform":
        scaled = ExactUniform(self._rng, self._scale * scale)
        scaled._bounds = self._bounds  # the same number: what one learns, the other knows
        return scaled

    def __lt__(self, other: Any) -> bool:
        if other is self:  # searchsorted compares its key with itself first
            return False
        low, high = self._bounds
        cut = Fraction(other) / self._scale
        if not low < cut < high:
            return high <= cut
        below = self._rng.choose((cut - low) / (high - low))
        self._bounds[:] = (low, cut) if below else (cut, high)
        return below

    def __gt__(self, other: Any) -> bool:
        return not self < other


class ExactRng:
    """Stands in for a generator in one run of an enumeration: `script` says how its open comparisons go."""

    def __init__(self, script: tuple[bool, ...]) -> None:
        self._script = script
        self._taken: tuple[bool, ...] = ()
        self.unexplored: list[tuple[bool, ...]] = []
        self.probability = Fraction(1)

    def random(self) -> ExactUniform:
        return ExactUniform(self)

    def choose(self, probability: Fraction) -> bool:
        if len(self._taken) < len(self._script):
            taken = self._script[len(self._taken)]
        else:
            taken = True
            self.unexplored.append((*self._taken, False))
        self._taken += (taken,)
        self.probability *= probability if taken else 1 - probability
        return taken


def enumerate_exactly(program: Callable[[ExactRng], Hashable]) -> dict[Any, Fraction]:
    """The exact distribution of what `program(rng)` returns, by running it once for every way its draws can fall."""
    probs: dict[Any, Fraction] = defaultdict(Fraction)
    scripts: list[tuple[bool, ...]] = [()]
    while scripts:
        rng = ExactRng(scripts.pop())
        probs[program(rng)] += rng.probability
        scripts += rng.unexplored
    assert sum(probs.values()) == 1, "an enumeration that misses branches proves nothing"
    return probs

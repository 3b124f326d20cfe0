"""The formats that lose least among those that fit a number of bytes."""

from collections.abc import Mapping
from itertools import pairwise

from cpuspec.errors import ConfigError

Sizes = Mapping[str, Mapping[str, int]]  # bytes by matrix, by format
Losses = Mapping[str, Mapping[str, float]]


def check(num_bytes: Sizes, budget: int) -> None:
    """Raise ConfigError if not even the smallest formats fit."""
    least = sum(min(sizes.values()) for sizes in num_bytes.values())
    if least > budget:
        raise ConfigError(
            f"the budget is {budget} bytes, and the smallest formats that rows of this model fill take {least}, "
            f"{least / budget:.3g} times as many bits per weight; give as many, or other candidates"
        )


def choose(num_bytes: Sizes, losses: Losses, budget: int) -> dict[str, str]:
    """The format of each matrix, so that all take at most `budget` bytes and the sum of losses is small.

    Every matrix starts with its smallest format and takes steps up along the lower convex hull of its losses over bytes. Steps are
    taken in the order of what a byte gains. A step that does not fit ends the steps of its matrix. Up to the first
    such step, no choice of at most the same bytes loses less; steps taken after it may change this. The smallest formats must fit
    (`check`).
    """
    hulls = {name: _hull(num_bytes[name], losses[name]) for name in losses}
    left = budget - sum(num_bytes[name][hull[0]] for name, hull in hulls.items())
    steps: list[tuple[float, int, str, str, int]] = []
    for name, hull in hulls.items():
        for small, large in pairwise(hull):
            more, gained = num_bytes[name][large] - num_bytes[name][small], losses[name][small] - losses[name][large]
            steps.append((-gained / more, len(steps), name, large, more))
    chosen = {name: hull[0] for name, hull in hulls.items()}
    stopped = set()
    for _, _, name, large, more in sorted(steps):
        if name in stopped or more > left:
            stopped.add(name)
            continue
        chosen[name] = large
        left -= more
    return chosen


def _hull(num_bytes: Mapping[str, int], losses: Mapping[str, float]) -> list[str]:
    """The formats on the lower convex hull, smallest first: each loses less than the last, and steps gain less and less a byte."""
    found: list[str] = []
    for name in sorted(losses, key=lambda name: (num_bytes[name], losses[name])):
        if found and losses[name] >= losses[found[-1]]:
            continue
        while len(found) > 1 and _gain(num_bytes, losses, found[-2], found[-1]) <= _gain(num_bytes, losses, found[-1], name):
            found.pop()
        found.append(name)
    return found


def _gain(num_bytes: Mapping[str, int], losses: Mapping[str, float], small: str, large: str) -> float:
    return (losses[small] - losses[large]) / (num_bytes[large] - num_bytes[small])

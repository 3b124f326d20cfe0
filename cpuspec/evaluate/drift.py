"""Output drift: the answers of two models to the same prompts, where they part, and how far."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpuspec.sequence import shared_prefix


@dataclass(frozen=True)
class PromptDrift:
    """Two answers to one prompt. first_difference: number of tokens that both begin with, None where they are the same.

    edit_distance: tokens to insert, delete or replace (Levenshtein), over the length of the longer answer.
    """

    first_difference: int | None
    edit_distance: float
    num_tokens: tuple[int, int]


@dataclass(frozen=True)
class Drift:
    """The drift over all prompts. first_difference_median is of the prompts whose answers differ; None where none does."""

    num_prompts: int
    num_identical: int
    share_identical: float
    first_difference_median: float | None
    first_difference_least: int | None
    edit_distance_mean: float
    prompts: tuple[PromptDrift, ...]


def drift(ones: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Drift:
    """Compare answers, as token ids of one vocabulary or as bytes, prompt by prompt. There must be at least one."""
    prompts = tuple(
        PromptDrift(
            None if one == other else shared_prefix(one, other),
            edit_distance(one, other) / max(len(one), len(other), 1),
            (len(one), len(other)),
        )
        for one, other in zip(map(list, ones), map(list, others), strict=True)
    )
    parts = [one.first_difference for one in prompts if one.first_difference is not None]
    identical = len(prompts) - len(parts)
    return Drift(
        num_prompts=len(prompts),
        num_identical=identical,
        share_identical=identical / len(prompts),
        first_difference_median=float(np.median(parts)) if parts else None,
        first_difference_least=min(parts) if parts else None,
        edit_distance_mean=float(np.mean([one.edit_distance for one in prompts])),
        prompts=prompts,
    )


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Levenshtein distance: a row of the table for each element of `one`."""
    row = np.arange(len(other) + 1)
    columns, targets = np.arange(len(other) + 1), np.asarray(other, np.int64)
    for number, element in enumerate(one, 1):
        below = np.minimum(row[1:] + 1, row[:-1] + (targets != element))
        # An insertion costs one more than the cell to the left: a running minimum after the columns are subtracted.
        row = np.minimum.accumulate(np.concatenate([[number], below]) - columns) + columns
    return int(row[-1])

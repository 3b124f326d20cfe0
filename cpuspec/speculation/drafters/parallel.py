"""Drafts of P-EAGLE (arXiv 2602.01469): rows of a mask token stand for unknown tokens, so one forward makes a whole draft."""

import numpy as np

from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.head_path import HeadPath
from cpuspec.speculation.head_context import DraftedRows, HeadContext


def draft_at_once(context: HeadContext, paths: list[HeadPath], name: str) -> list[Draft]:
    """A chain for every path: its first token from the last committed token's row, the others from rows of the mask token."""
    head = context.head
    assert head.mask_features is not None, "a head with this method has a mask"
    state = context.encoded(head.mask_features)
    masks = [
        DraftedRows([head.mask_id] * (path.limit - 1), np.repeat(state, path.limit - 1, axis=0)) if path.limit > 1 else None
        for path in paths
    ]
    for path, rows in zip(paths, context.score([path.seq for path in paths], masks), strict=True):
        for logits in rows.logits:
            if not path.is_done:
                path.choose(logits)
    return [path.draft(name) for path in paths]

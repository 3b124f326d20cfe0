"""Drafts of DFlash (arXiv 2602.06036) and DSpark (2607.05147): a block of mask tokens, filled in one forward.

DSpark's Markov head corrects each row by the token chosen before it, and its confidence head says where to stop.
"""

import numpy as np

from cpuspec.checkpoints.heads.head import Block, Markov
from cpuspec.model.batch import F32
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.head_path import HeadPath
from cpuspec.speculation.head_context import DraftedRows, HeadContext, HeadRows

# Tokens of a row that its Markov head corrects, the likeliest without it: the others are not drafted. All tokens of a large
# vocabulary would be a second output matrix for each of them.
_CANDIDATES = 64

# A draft ends before a token with a smaller chance of being reached and accepted, where the spec says nothing: one row more of a
# forward costs about as much.
_MIN_CHANCE = 0.25


def draft_blocks(context: HeadContext, paths: list[HeadPath], name: str) -> list[Draft]:
    """A chain for every path, as long as the block that the head was trained for at most."""
    head, empty = context.head, np.empty((0, context.backend.config.hidden_size), np.float32)
    block = head.block
    assert block, "the reader of such a head has seen to it"
    drafted: list[DraftedRows | None] = []
    firsts = []
    for path in paths:
        path.limit = min(path.limit, block.size - block.num_skipped)
        unknown = context.unknown(path.seq)
        firsts.append(len(unknown) - 1 + block.num_skipped)
        drafted.append(DraftedRows(unknown + [head.mask_id] * (path.limit - 1 + block.num_skipped), empty))
    for path, first, rows in zip(paths, firsts, context.score([path.seq for path in paths], drafted), strict=True):
        _fill(path, block, rows, first)
    return [path.draft(name) for path in paths]


def _fill(path: HeadPath, block: Block, rows: HeadRows, first: int) -> None:
    """Choose a path's tokens from the rows from number `first` on."""
    chance, least = 1.0, path.min_confidence or _MIN_CHANCE
    if block.confidence is not None:
        path.min_confidence = 0.0  # the head's own confidence stands for that of the row
    for logits, state in zip(rows.logits[first:], rows.hidden[first:], strict=True):
        if path.is_done:
            return
        before = path.tokens[-1] if path.tokens else path.seq.tokens[-1]
        bias_of = block.markov.w1.rows(np.array([before]))[0] if block.markov else np.empty(0, np.float32)
        if block.confidence is not None:
            said = np.concatenate([state, bias_of])[: len(block.confidence)]
            chance /= 1 + np.exp(-float(said @ block.confidence) - block.confidence_bias)
            if chance < least:
                return
        path.choose(_corrected(logits, state, bias_of, block.markov) if block.markov else logits)


def _corrected(logits: F32, state: F32, w1: F32, markov: Markov) -> F32:
    """The row [num_logits] with its Markov head's bias, of the likeliest tokens; the others have no chance."""
    if markov.gate is not None and markov.gate_bias is not None:
        w1 = w1 / (1 + np.exp(-(markov.gate @ np.concatenate([state, w1]) + markov.gate_bias)))
    number = min(_CANDIDATES, len(logits))
    best = np.argpartition(logits, -number)[-number:]
    best.sort()  # of equal ones the lowest id is taken
    row = np.full(len(logits), -np.inf, np.float32)
    row[best] = logits[best] + markov.w2.rows(best) @ w1
    return row

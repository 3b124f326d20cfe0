"""Drafts of DFlash (arXiv 2602.06036) and DSpark (2607.05147): one forward fills a block of mask tokens.

DSpark's Markov head corrects each row by the token chosen before it. Its confidence head says where to stop.
"""

import numpy as np

from cpuspec.checkpoints.heads.head import Block, Markov
from cpuspec.model.batch import F32
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.head_path import HeadPath
from cpuspec.speculation.head_context import DraftedRows, HeadContext, HeadRows

# The Markov head corrects only these tokens of a row: the ones that are likeliest without it. The others are not drafted: for a
# whole vocabulary the correction costs as much as a second output matrix.
_CANDIDATES = 64

# If the spec gives no confidence, a draft ends before a token whose path has a smaller chance: one more row of a forward costs
# about as much as it gains.
_MIN_CHANCE = 0.25


def draft_blocks(context: HeadContext, paths: list[HeadPath], name: str) -> list[Draft]:
    """A chain for every path, at most as long as the block that the head was trained for."""
    head, empty = context.head, np.empty((0, context.backend.config.hidden_size), np.float32)
    block = head.block
    assert block, "a head with this method has a block"
    drafted: list[DraftedRows | None] = []
    firsts = []
    for path in paths:
        path.limit = min(path.limit, block.size - block.num_skipped)
        unknown = context.unknown(path.seq)
        firsts.append(len(unknown) - 1 + block.num_skipped)
        drafted.append(DraftedRows(unknown + [head.mask_id] * (path.limit - 1 + block.num_skipped), empty))
    for path, first, rows in zip(paths, firsts, context.score([path.seq for path in paths], drafted), strict=True):
        _fill(path, block, HeadRows(rows.logits[first - block.num_skipped :], rows.hidden[first - block.num_skipped :]))
    return [path.draft(name) for path in paths]


def _fill(path: HeadPath, block: Block, rows: HeadRows) -> None:
    """Choose a path's tokens from the rows of a block."""
    chance, least = 1.0, path.min_confidence or (_MIN_CHANCE if path.floors is None else 0.0)
    markov, memory = block.markov, np.zeros(block.markov.w1.shape[1] if block.markov else 0, np.float32)
    if block.confidence is not None:
        path.min_confidence = 0.0  # the head's own confidence replaces that of the row
    for number, (logits, state) in enumerate(zip(rows.logits, rows.hidden, strict=True)):
        if path.is_done:
            return
        before = path.tokens[-1] if path.tokens else path.seq.tokens[-1]
        w1 = vector = np.empty(0, np.float32)
        if markov:
            w1 = markov.w1.rows(np.array([before]))[0]
            vector, memory = markov.vector(w1, state, memory)
        if number < block.num_skipped:
            continue
        sure = None
        if block.confidence is not None:
            said = np.concatenate([state, w1])[: len(block.confidence)]
            sure = 1 / (1 + np.exp(-float(said @ block.confidence) - block.confidence_bias))
            chance *= sure
            if chance < least:
                return
        path.choose(_corrected(logits, vector, markov) if markov else logits, sure)


def _corrected(logits: F32, vector: F32, markov: Markov) -> F32:
    """The row [num_logits] with the Markov head's bias for the likeliest tokens. The others become impossible."""
    number = min(_CANDIDATES, len(logits))
    best = np.argpartition(logits, -number)[-number:]
    best.sort()  # of equal logits the lowest id is chosen
    row = np.full(len(logits), -np.inf, np.float32)
    row[best] = logits[best] + markov.w2.rows(best) @ vector
    return row

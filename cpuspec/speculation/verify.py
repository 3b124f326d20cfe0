"""Accepts the drafted tokens that the target would choose or draw itself, and adds the target's next token.

Rows are numbered as in a score: row 0 is the target's after the last committed token, row i + 1 the one after draft node i.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cpuspec.speculation.draft import Draft


@dataclass(slots=True)
class Verdict:
    """The tokens that a round commits, and the draft nodes that were accepted."""

    tokens: list[int]  # accepted tokens, then exactly one recovered or bonus token
    path: list[int]  # accepted draft nodes


def verify_tokens(draft: Draft, target_token: Callable[[int], int]) -> Verdict:
    """Follow the draft, a chain or a tree, while it has the target's own tokens. The target's next token comes last.

    target_token(row): the target's token, greedy or drawn. It is called once for each row of the accepted path and for no others.
    So the verdict's tokens are those of plain decoding, however the draft was made.
    """
    path: list[int] = []
    last, choice = -1, int(target_token(0))
    tokens = [choice]
    for node, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        if parent == last and token == choice:
            path.append(node)
            last, choice = node, int(target_token(node + 1))
            tokens.append(choice)
    return Verdict(tokens, path)

"""Drafts for requests with a grammar: illegal tokens are removed, and tokens that the grammar forces are added.

No verdict depends on this module: a verifier checks the legal tokens of each row itself.
"""

from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.verify import Verdict

SOURCE = "grammar"  # of forced tokens, for metrics


def legal_part(seq: Sequence, draft: Draft) -> Draft:
    """The draft without the tokens that the request's grammar forbids, and without the nodes below them."""
    if seq.constraint is None:
        return draft
    kept: list[int] = []
    for node, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        if parent < 0 or parent in kept:
            legal = seq.legal(draft.tokens_to(parent))
            if legal is not None and (not 0 <= token < len(legal) or legal[token]):  # a wrong id is for `speculate` to refuse
                kept.append(node)
    return draft if len(kept) == len(draft) else draft.only(kept)


def forced_tokens(seq: Sequence, limit: int, drafted: list[int] | None = None) -> list[int]:
    """At most `limit` tokens that the grammar forces after the sequence and the tokens `drafted`."""
    if seq.constraint is None or limit <= 0:
        return []
    return seq.constraint.forced([*seq.output, *(drafted or [])])[:limit]


def own_verdict(verdict: Verdict, num_forced: int, num_own: int) -> Verdict:
    """The part of a verdict about a proposer's own `num_own` tokens, which were verified after `num_forced` forced ones."""
    path = [node - num_forced for node in verdict.path if num_forced <= node < num_forced + num_own]
    first = min(num_forced, len(verdict.path))
    part = slice(first, first + len(path) + 1)
    return Verdict(verdict.tokens[part], path)

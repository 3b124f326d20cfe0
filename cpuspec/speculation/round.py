"""One speculative round: propose, score, verify, accept. The engine's step and a chain's inner step are this call."""

from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np

from cpuspec.errors import ConfigError
from cpuspec.model.batch import F32, ForwardOutput
from cpuspec.sampling import Row, argmax, distribution, is_row, processed
from cpuspec.sequence import Sequence
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Cycle, Draft
from cpuspec.speculation.proposer import Proposer
from cpuspec.speculation.verify import Verdict, verify_block, verify_greedy, verify_sampled


@dataclass(slots=True)
class Round:
    """What a round did for one sequence."""

    draft: Draft
    verdict: Verdict
    output: ForwardOutput
    cycles: tuple[Cycle, ...]  # the verifications that it took, those of lower levels first

    def logits(self, number: int) -> F32:
        """The row [V] that chose token `number` of the verdict."""
        row: F32 = self.output.logits[self.verdict.path[number - 1] + 1 if number else 0]
        return row


def speculate(context: Context, proposer: Proposer, seqs: list[Sequence], limits: list[int]) -> list[Round]:
    """Draft up to `limits[i]` tokens for each sequence, verify them in one score, and commit each verdict to its sequence.

    Each sequence gains one to limit + 1 tokens, distributed as the context's model alone would draw them.
    """
    most = context.backend.max_rows - 1  # a draft that takes two forwards gains nothing
    if max(limits) > most:
        limits = list(map(min, limits, repeat(most)))
    drafts = proposer.propose(seqs, limits)
    _check(proposer, drafts, limits, context)
    rounds = []
    for i, scored in enumerate(context.score(seqs, drafts, proposer.hidden_layers)):
        seq, draft, hidden = seqs[i], drafts[i], scored.hidden
        verdict = verify(seq, draft, scored.logits, scored.best)
        if not draft.is_chain:
            context.keep_path(seq, draft, verdict.path)
            hidden = tuple(_along(verdict.path, layer, len(draft)) for layer in hidden)
        seq.extend(verdict.tokens)
        proposer.accept(seq, verdict, hidden)
        rounds.append(Round(draft, verdict, scored, draft.verified(verdict.path)))
    return rounds


def verify(seq: Sequence, draft: Draft, logits: F32, best: list[int] | None = None) -> Verdict:
    """Verify a draft against the target's rows [n+1, V], processed as the request asks with the path's own history.

    A block of drawn tokens is verified as one; greedy requests, point masses and trees go token by token.
    best: the rows' argmax, as `ForwardOutput` has it.
    """
    if seq.takes_best:
        return verify_greedy(draft, argmax(logits, best).__getitem__)
    return _verify_processed(seq, draft, logits)


def _verify_processed(seq: Sequence, draft: Draft, logits: F32) -> Verdict:
    """Of a request that draws, or whose penalties or bias change the logits. Apart: its functions are not made in every step."""
    params, history = seq.params, seq.history
    if not params.greedy:
        rows: dict[int, Row] = {}

        def target_probs(row: int) -> Row:
            if row not in rows:
                rows[row] = distribution(logits[row], params, history, draft.tokens_to(row - 1))
            return rows[row]

        rule = verify_block if draft.probs and draft.is_chain else verify_sampled
        verdict = rule(draft, target_probs, seq.rng)
        return replace(verdict, probs=(rows[0], *(rows[node + 1] for node in verdict.path)))
    return verify_greedy(draft, lambda row: int(argmax(processed(logits[row], params, history, draft.tokens_to(row - 1)))))


def _along(path: list[int], rows: F32, num_nodes: int) -> F32:
    """The rows up to the last committed token's, then those of the accepted nodes."""
    first = len(rows) - num_nodes
    return np.concatenate([rows[:first], rows[first:][path]])


def _check(proposer: Proposer, drafts: list[Draft], limits: list[int], context: Context) -> None:
    """A user's proposer is bad input like any other."""
    if len(drafts) != len(limits):
        raise ConfigError(f"{proposer.name} returned {len(drafts)} drafts for {len(limits)} sequences; wanted one each")
    vocab_size = context.vocab_size
    num_known = min(vocab_size, context.backend.config.vocab_size)
    for i, draft in enumerate(drafts):
        if not draft.num_tokens and draft.is_chain and not draft.probs:
            continue
        if len(draft) > limits[i]:
            raise ConfigError(f"{proposer.name} drafted {len(draft)} tokens where at most {limits[i]} fit")
        tokens = draft.tokens.tolist()
        if tokens and not 0 <= min(tokens) <= max(tokens) < num_known:
            raise ConfigError(f"{proposer.name} drafted tokens {tokens}; ids must be in [0, {num_known})")
        if not draft.is_chain:
            parents, nodes = draft.parents, np.arange(len(draft))
            if parents.shape != nodes.shape or (parents < -1).any() or (parents >= nodes).any():
                raise ConfigError(
                    f"{proposer.name} drafted a tree with parents {parents.tolist()}; each must be -1 or an earlier token"
                )
        if draft.probs is not None and [is_row(row, vocab_size) for row in draft.probs] != [True] * len(draft):
            raise ConfigError(
                f"{proposer.name} must declare a row of {vocab_size} probabilities for each of its {len(draft)} tokens, "
                "an array or a SparseRow with rising ids"
            )

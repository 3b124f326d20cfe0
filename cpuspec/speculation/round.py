"""One speculative round: propose, score, verify, accept. The engine's step and a level of a chain both call it."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from cpuspec.errors import ConfigError, CpuspecError, fault_of_one
from cpuspec.metrics import now_s
from cpuspec.model.batch import F32, ForwardOutput
from cpuspec.sampling import argmax, processed, row_to_draw
from cpuspec.sequence import Sequence
from cpuspec.speculation.combine import joined_drafts
from cpuspec.speculation.constrained import SOURCE, forced_tokens, legal_part, own_verdict
from cpuspec.speculation.context import Context, PromptChunk
from cpuspec.speculation.draft import Cycle, Draft
from cpuspec.speculation.proposer import Proposer
from cpuspec.speculation.verify import Verdict, verify_tokens

_NO_TOKEN = -1  # of a row that gives no token
_NO_DRAFT = Draft.chain([], "")
_T = TypeVar("_T")


@dataclass(slots=True)
class Round:
    """The outcome of a round for one sequence. error: why it gained no token, if its rows or its settings give none."""

    draft: Draft
    verdict: Verdict
    output: ForwardOutput
    cycles: tuple[Cycle, ...]  # the verifications of the round, those of lower levels first
    error: CpuspecError | None = None
    times: int = 1  # rounds without a draft that ran at once, each of which gives a token

    @property
    def token_sources(self) -> list[str]:
        """For each token of the verdict the level that drafted it; "" for those that are the verifying model's own."""
        sources, path = self.draft.token_sources, self.verdict.path
        return [*(sources[node] for node in path), *[""] * (len(self.verdict.tokens) - len(path))]

    def logits(self, number: int) -> F32:
        """The row [V] of logits from which token `number` of the verdict was chosen."""
        row: F32 = self.output.logits[self.verdict.path[number - 1] + 1 if number else 0]
        return row


def speculate(
    context: Context,
    proposer: Proposer,
    seqs: list[Sequence],
    limits: list[int],
    chunks: list[PromptChunk] | None = None,
    is_answer: bool = False,
    extra_steps: int = 0,
    ends: abc.Sequence[int] = (),
) -> list[Round]:
    """Draft up to `limits[i]` tokens for each sequence, verify them in one score, and commit each verdict to its sequence.

    Each sequence gains one to limit + 1 tokens, which are those that the context's model would draw without drafts. `chunks` are
    parts of other sequences' prompts that the same forward reads. Tokens that a sequence's grammar forces are drafted here, before
    and after the proposer's tokens. A sequence whose rows are not finite, or for which anything else fails, gains no token, and its
    round says why; the others go on. is_answer: whether the gained tokens are the request's answer, rather than a chain's draft.
    extra_steps: how many rounds may follow at once if this one has no draft and all sequences are plainly greedy, up to a token of
    `ends`.
    """
    most = context.backend.max_rows - 1  # a draft that needs two forwards gains nothing
    limits = [min(limit, most) for limit in limits]
    nothing: list[int] = []
    forced = [_of_one(seq, nothing, forced_tokens, seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
    extended = [seq.with_drafted(tokens) if tokens else seq for seq, tokens in zip(seqs, forced, strict=True)]
    left = [limit - len(tokens) for limit, tokens in zip(limits, forced, strict=True)]
    begin_s = now_s()
    drafts = proposer.propose(extended, left) if seqs else []
    drafted_s = now_s()
    check_drafts(proposer, drafts, left, context)
    each = list(zip(seqs, extended, drafts, strict=True))
    parts = [_of_one(seq, _NO_DRAFT, legal_part, after, draft) for seq, after, draft in each]
    asked = zip(seqs, extended, forced, parts, left, strict=True)
    drafts = [_of_one(seq, _NO_DRAFT, _with_forced, *arguments) for seq, *arguments in asked]
    rounds = []
    if extra_steps:
        extra_steps = 0 if any(map(len, drafts)) else min(extra_steps, proposer.num_idle(seqs))
    outputs = context.score(seqs, drafts, proposer.hidden_layers, chunks, proposer.most_hidden, extra_steps, ends)
    scored_s = now_s()
    for seq, draft, scored, before, part in zip(seqs, drafts, outputs, forced, parts, strict=True):
        failed = Round(draft, Verdict([], []), scored, ())
        done = _of_one(seq, failed, _finish_round, context, proposer, seq, draft, scored, before, part, is_answer)
        done.error = done.error or seq.error
        rounds.append(done)
    for what, seconds in (("draft", drafted_s - begin_s), ("score", scored_s - drafted_s), ("verify", now_s() - scored_s)):
        context.spent.add(what, seconds)
    return rounds


def _of_one(seq: Sequence, otherwise: _T, call: Callable[..., _T], *arguments: Any) -> _T:
    """What a call for one sequence returns. If it raises, the result is `otherwise`, and the sequence has the error."""
    try:
        return call(*arguments)
    except BaseException as error:
        seq.error = seq.error or fault_of_one(error)
        return otherwise


def _finish_round(
    context: Context,
    proposer: Proposer,
    seq: Sequence,
    draft: Draft,
    scored: ForwardOutput,
    before: list[int],
    part: Draft,
    is_answer: bool,
) -> Round:
    """Verify one sequence's draft, commit the verdict, and tell the proposer.

    before: the forced tokens at the draft's beginning. part: the proposer's own part of the draft.
    """
    hidden, extra_tokens = scored.hidden, scored.extra_tokens[0] if scored.extra_tokens else []
    fault: CpuspecError | None = None
    try:
        verdict = verify(seq, draft, scored.logits, scored.best, is_answer)
        verdict.tokens = extra_tokens + verdict.tokens if extra_tokens else verdict.tokens
    except CpuspecError as error:
        verdict, fault = Verdict(extra_tokens, []), None if extra_tokens else error
    if not draft.is_chain:
        context.keep_path(seq, draft, verdict.path)
    if fault is not None:
        return Round(draft, verdict, scored, (), fault)
    if len(verdict.path) < len(draft) or not draft.is_chain:
        hidden = tuple(_along(verdict.path, layer, len(draft)) for layer in hidden)
    seq.extend(verdict.tokens)
    own = verdict if draft is part else own_verdict(verdict, len(before), len(part))
    proposer.accept(seq, own, hidden)
    cycles, num_forced = part.verified(own.path), len(draft) - len(part)
    if num_forced:
        forced_cycle = Cycle(SOURCE, num_forced, len(verdict.path) - len(own.path), num_forced)
        cycles = (*cycles[:-1], forced_cycle, cycles[-1])
    return Round(draft, verdict, scored, cycles, times=1 + len(extra_tokens))


def verify(seq: Sequence, draft: Draft, logits: F32, best: list[int] | None = None, is_answer: bool = False) -> Verdict:
    """Verify a draft against the target's rows [n+1, V]. The request's settings, history and grammar apply to each row's own path.

    best: the rows' argmax, as in `ForwardOutput`. The verdict ends before a row that gives no token, as where its logits are not
    finite. If that is the first row, CpuspecError is raised. is_answer: as in `speculate`.
    """
    params, history = seq.params, seq.history

    def target_token(row: int) -> int:
        if seq.is_plain_greedy:
            # One by one: rows off the accepted path may hold anything.
            return int(argmax(logits[row : row + 1], best and best[row : row + 1])[0])
        drafted = draft.tokens_to(row - 1)
        legal = seq.legal(drafted, is_answer)
        if params.greedy:
            return int(argmax(processed(logits[row], params, history, drafted, legal)))
        return seq.draw(row_to_draw(logits[row], params, history, drafted, legal), len(drafted))

    def token_or_none(row: int) -> int:
        try:
            return target_token(row)
        except BaseException as error:
            fault = fault_of_one(error)
            if row == 0:
                raise fault from None
            return _NO_TOKEN

    verdict = verify_tokens(draft, token_or_none)
    return verdict if verdict.tokens[-1] != _NO_TOKEN else Verdict(verdict.tokens[:-1], verdict.path[:-1])


def _with_forced(seq: Sequence, forced: list[int], draft: Draft, limit: int) -> Draft:
    """The tokens `forced`, which end the sequence already, then a draft, then the tokens that the grammar forces after it."""
    after = forced_tokens(seq, limit - len(draft), draft.tokens.tolist()) if len(draft) and draft.is_chain else []
    draft = joined_drafts(Draft.chain(forced, SOURCE), draft) if forced else draft
    return joined_drafts(draft, Draft.chain(after, SOURCE)) if after else draft


def _along(path: list[int], rows: F32, num_nodes: int) -> F32:
    """The rows up to the last committed token's, then those of the accepted nodes `path`."""
    first = len(rows) - num_nodes
    return np.concatenate([rows[:first], rows[first:][path]])


def check_drafts(proposer: Proposer, drafts: list[Draft], limits: list[int], context: Context) -> None:
    """Raise ConfigError for drafts that break the contract. A user's proposer is untrusted input."""
    if len(drafts) != len(limits):
        raise ConfigError(f"{proposer.name} returned {len(drafts)} drafts for {len(limits)} sequences; wanted one each")
    vocab_size = context.vocab_size
    num_known = min(vocab_size, context.backend.config.vocab_size)
    for draft, limit in zip(drafts, limits, strict=True):
        if not len(draft) and draft.is_chain:
            continue
        if len(draft) > limit:
            raise ConfigError(f"{proposer.name} drafted {len(draft)} tokens where at most {limit} fit")
        tokens = draft.tokens.tolist()
        if tokens and not 0 <= min(tokens) <= max(tokens) < num_known:
            raise ConfigError(f"{proposer.name} drafted tokens {tokens}; ids must be in [0, {num_known})")
        if not draft.is_chain:
            if context.backend.config.is_recurrent:
                raise ConfigError(
                    f"{proposer.name} drafted a tree, and recurrent layers read one path alone; take a drafter of chains"
                )
            parents, nodes = draft.parents, np.arange(len(draft))
            if parents.shape != nodes.shape or (parents < -1).any() or (parents >= nodes).any():
                raise ConfigError(
                    f"{proposer.name} drafted a tree with parents {parents.tolist()}; each must be -1 or an earlier token"
                )
        if len(draft.sources) not in (0, len(draft)):
            raise ConfigError(f"{proposer.name} gave {len(draft.sources)} sources for {len(draft)} tokens; wanted one each or none")

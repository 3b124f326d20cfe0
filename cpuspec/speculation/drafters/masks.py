"""Drafts of PARD (arXiv 2504.18583): a causal model that was trained to fill rows of a mask token, all in one forward."""

from cpuspec.sequence import Sequence
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.head_path import HeadPath
from cpuspec.speculation.proposer import Floors, Proposer

DEFAULT_NUM_TOKENS = 7


class MaskProposer(Proposer):
    """Drafts up to `num_tokens` tokens: the first from the row of the last committed token, the others from rows of `mask_id`.

    A row does not depend on the tokens chosen before it, so tokens may be drawn from it (`draws`); else each is the likeliest.
    min_confidence: as in `HeadPath`. The cache forgets the mask's rows at the next draft.
    """

    def __init__(
        self,
        context: Context,
        mask_id: int,
        name: str,
        num_tokens: int = DEFAULT_NUM_TOKENS,
        min_confidence: float = 0.0,
        draws: bool = False,
    ) -> None:
        self.name = name
        self.context = context
        self.levels = (self,)
        self.num_tokens = min(num_tokens, context.backend.max_rows)
        self.in_one_pass = True
        self._mask_id, self._min_confidence, self._draws = mask_id, min_confidence, draws

    def propose(self, seqs: list[Sequence], limits: list[int], floors: list[Floors] | None = None) -> list[Draft]:
        """The drafts, made in one forward; empty ones for sequences whose prompt has not been read yet."""
        drafts = [Draft.chain([], self.name)] * len(seqs)
        limits = [min(limit, self.num_tokens, self.context.num_draftable(seq)) for seq, limit in zip(seqs, limits, strict=True)]
        able = [i for i, limit in enumerate(limits) if limit > 0]
        ready, chunks = self.context.admit([seqs[i] for i in able])
        drafting = [i for i, is_ready in zip(able, ready, strict=True) if is_ready]
        if not drafting and not chunks:
            return drafts
        masks = [Draft.chain([self._mask_id] * (limits[i] - 1), self.name) for i in drafting]
        outputs = self.context.score([seqs[i] for i in drafting], masks, (), chunks)
        for i, output in zip(drafting, outputs, strict=True):
            path = HeadPath(
                *(None, seqs[i], limits[i], self.context.vocab_size, self._min_confidence, self._draws),
                floors=floors[i] if floors else None,
            )
            for row in output.logits:
                if not path.is_done:
                    path.choose(row)
            drafts[i] = path.draft(self.name)
        return drafts

    def end(self, seq: Sequence) -> None:
        """Free the slot."""
        self.context.slots.release(seq)

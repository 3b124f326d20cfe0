"""The tokens that two vocabularies share, and the translation of text from one to the other.

Vocabularies that only differ in padding need none of this: their ids are the same (`Context.vocab_size`).
"""

import codecs
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

import numpy as np

from cpuspec.errors import ConfigError
from cpuspec.sampling import I64, LogitRow, Row, SparseRow
from cpuspec.text import Tokenizer


@dataclass(frozen=True)
class SharedTokens:
    """Pairs of tokens that mean the same to a verifier and to the model that drafts for it: the same bytes, or the same role.

    A token is in one pair at most. So a distribution over the draft model's tokens in pairs is one over the verifier's.
    verifier, draft: the tokenizers of the two models.
    """

    verifier: Tokenizer
    draft: Tokenizer
    num_rows: int  # of the verifier's logits
    verifier_ids: I64  # [n], rising
    draft_ids: I64  # [n]
    control: Mapping[int, int]  # the verifier's control tokens to the draft's; each token that ends a text maps to one that does

    @staticmethod
    def find(verifier: Tokenizer, num_rows: int, draft: Tokenizer, drafter: str) -> "SharedTokens":
        """Pair the tokens. num_rows: length of the verifier's rows of logits. Raises ConfigError if no text token has a partner."""
        ours, theirs = _by_meaning(verifier, num_rows), _by_meaning(draft, draft.vocab_size)
        common = ours.keys() & theirs.keys()
        if not any(isinstance(meaning, bytes) for meaning in common):
            raise ConfigError(
                f"{drafter} has none of the {len(ours)} tokens of the model that it is to draft for; "
                "draft with a model of that one's family, or with ngram"
            )
        pairs = {ours[meaning]: theirs[meaning] for meaning in common}
        # Families name control tokens differently: a token that ends a text of one is paired with one that ends a text of the
        # other.
        ends, their_ends = _left(verifier.eos_ids, pairs), _left(draft.eos_ids, pairs.values())
        pairs.update(zip(ends, their_ends, strict=False))
        pairs.update(zip(_left({verifier.bos_id}, pairs), _left({draft.bos_id}, pairs.values()), strict=False))
        pairs = {mine: other for mine, other in pairs.items() if mine < num_rows}
        control = {mine: other for mine, other in pairs.items() if verifier.is_special(mine)}
        if draft.eos_ids:
            control |= dict.fromkeys(ends[len(their_ends) :], min(draft.eos_ids))
        columns = np.array(sorted(pairs.items()), np.int64).T
        return SharedTokens(verifier, draft, num_rows, columns[0], columns[1], control)

    def __len__(self) -> int:
        return len(self.draft_ids)

    @cached_property
    def partner(self) -> I64:
        """For each of the draft's tokens the verifier's partner, [draft vocabulary]; -1 if there is none."""
        partner = np.full(self.draft.vocab_size, -1, np.int64)
        partner[self.draft_ids] = self.verifier_ids
        return partner

    def row_for_verifier(self, row: Row) -> SparseRow:
        """A distribution over the draft's tokens in pairs as one over the verifier's tokens [num_rows]."""
        if isinstance(row, LogitRow):
            return SparseRow(self.verifier_ids, row.weights(row.logits[self.draft_ids]), self.num_rows)
        if not isinstance(row, SparseRow):
            return SparseRow(self.verifier_ids, row[self.draft_ids], self.num_rows)
        ids = self.partner[row.ids]
        order = ids.argsort()
        return SparseRow(ids[order], row.probs[order], self.num_rows)

    def bias_for_draft(self, bias: Mapping[int, float]) -> dict[int, float]:
        """A request's logit biases by the draft's ids, for the tokens that have a partner."""
        partner = dict(zip(self.verifier_ids.tolist(), self.draft_ids.tolist(), strict=True)) if bias else {}
        return {partner[token]: added for token, added in bias.items() if token in partner}

    def prompt_for_draft(self, ids: list[int]) -> list[int]:
        """The text of a prompt in the draft's tokens, after the tokens that the draft's file puts before every text."""
        prefix, encoded = list(self.draft.prefix), self.text_for_draft(ids, continues=False)
        return encoded if encoded[: len(prefix)] == prefix else prefix + encoded

    def text_for_draft(self, ids: list[int], continues: bool = True) -> list[int]:
        """The text of the verifier's tokens in the draft's. Control tokens without a partner are left out.

        continues: whether other text comes before.
        """
        parts = self.verifier.parts(ids, continues)
        known = [self.control.get(part) if isinstance(part, int) else part for part in parts]
        return self.draft.encode_parts([part for part in known if part is not None], continues)

    def text_for_verifier(self, ids: list[int]) -> list[int]:
        """The text of drafted tokens in the verifier's tokens. Other text comes before it.

        It ends with the first control token, and before an incomplete character at its end.
        """
        text = list(takewhile(lambda token: not self.draft.is_special(token), ids))
        data = b"".join(map(self.draft.token_bytes, text))
        if len(text) == len(ids):
            return self.verifier.encode_parts([_whole_characters(data)], continues=True)
        end = int(self.partner[ids[len(text)]])
        return self.verifier.encode_parts([data, end] if end >= 0 else [data], continues=True)


def same_tokens(verifier: Tokenizer, draft: Tokenizer) -> bool:
    """Whether every id that both have means the same bytes, or the same control token."""
    return verifier is draft or verifier.first_difference(draft) is None


def _by_meaning(tokenizer: Tokenizer, num_rows: int) -> dict[bytes | str, int]:
    """Ids by bytes, or by a control token's text. Of two tokens with one text the later counts: single bytes come first."""
    meanings = map(tokenizer.meaning, range(min(tokenizer.vocab_size, num_rows)))
    return {meaning: token for token, meaning in enumerate(meanings) if meaning}


def _left(ids: Iterable[int | None], known: Iterable[int]) -> list[int]:
    """The ids that are not among the known ones, rising."""
    return sorted({token for token in ids if token is not None}.difference(known))


def _whole_characters(data: bytes) -> bytes:
    """The data without an incomplete character at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    decoder.decode(data)
    return data[: len(data) - len(decoder.getstate()[0])]

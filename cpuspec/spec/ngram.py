"""Prompt lookup: what followed the last occurrence of the latest tokens (github.com/apoorvumang/prompt-lookup-decoding)."""

from dataclasses import dataclass, field

from cpuspec.errors import ConfigError
from cpuspec.model.batch import F32
from cpuspec.sequence import Sequence
from cpuspec.spec.draft import Draft
from cpuspec.spec.verify import Verdict

MAX_NGRAM = 5
DEFAULT_NUM_TOKENS = 6
MAX_NUM_TOKENS = 64


@dataclass
class _Index:
    """Where each n-gram of a sequence was last followed by something."""

    positions: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> index of the token after it
    num_indexed: int = 0  # tokens whose preceding n-grams are in `positions`


class NgramProposer:
    """Looks up the longest suffix (`MAX_NGRAM` tokens down to one) of prompt and output that occurred before.

    Chooses without a draw, so its drafts are point masses.
    """

    name = "ngram"
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, num_tokens: int = DEFAULT_NUM_TOKENS) -> None:
        self.num_tokens = num_tokens
        self._indices: dict[int, _Index] = {}

    def begin(self, seq: Sequence) -> None:
        """Index the prompt."""
        self._indices[seq.id] = _Index()
        self._update(seq)

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """The tokens that followed the most recent occurrence of the longest known suffix."""
        return [
            Draft.chain(self._continuation(seq.tokens, self._indices[seq.id].positions, min(self.num_tokens, limit)), self.name)
            for seq, limit in zip(seqs, limits, strict=True)
        ]

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Index the tokens of the round."""
        self._update(seq)

    def end(self, seq: Sequence) -> None:
        """Drop the index."""
        self._indices.pop(seq.id, None)

    def _update(self, seq: Sequence) -> None:
        index, tokens = self._indices[seq.id], seq.tokens
        for position in range(max(index.num_indexed, 1), len(tokens)):
            for size in range(1, min(MAX_NGRAM, position) + 1):
                index.positions[tuple(tokens[position - size : position])] = position
        index.num_indexed = len(tokens)

    @staticmethod
    def _continuation(tokens: list[int], positions: dict[tuple[int, ...], int], num_tokens: int) -> list[int]:
        for size in range(min(MAX_NGRAM, len(tokens)), 0, -1):
            position = positions.get(tuple(tokens[-size:]))
            if position is not None:
                draft: list[int] = []
                # Past the last token the lookup reads its own draft, which carries a repetition on.
                for source in range(position, position + num_tokens):
                    draft.append(tokens[source] if source < len(tokens) else draft[source - len(tokens)])
                return draft
        return []


def make_ngram(argument: str) -> NgramProposer:
    """An n-gram proposer from the spec's argument: tokens to draft, or nothing for the default."""
    if not argument:
        return NgramProposer()
    if not (argument.isascii() and argument.isdigit() and 1 <= int(argument[:9]) <= MAX_NUM_TOKENS):
        raise ConfigError(f"ngram takes the number of tokens to draft, 1 to {MAX_NUM_TOKENS}, as in ngram:8; got {argument!r}")
    return NgramProposer(int(argument))

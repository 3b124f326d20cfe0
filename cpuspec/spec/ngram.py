"""Prompt lookup: what followed the last occurrence of the latest tokens (github.com/apoorvumang/prompt-lookup-decoding)."""

from cpuspec.errors import ConfigError
from cpuspec.model.batch import F32
from cpuspec.sequence import Mark, Sequence
from cpuspec.spec.draft import Draft
from cpuspec.spec.verify import Verdict

MAX_NGRAM = 5
DEFAULT_NUM_TOKENS = 6
MAX_NUM_TOKENS = 64


class _Index:
    """Where each n-gram of a sequence was last followed by something."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.positions: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it
        self._tokens: list[int] = []  # whose preceding n-grams are in `positions`
        self._mark = Mark()  # the sequence's state when it held these
        self._num_prompt_tokens = num_prompt_tokens
        self._replaced: list[list[int | None]] = []  # for each generated token: what its n-grams' positions were before, by size

    def follow(self, seq: Sequence) -> None:
        """Index exactly the sequence's tokens: undo those that were taken back, add the new ones."""
        for position in range(len(self._tokens) - 1, seq.unchanged(self._mark) - 1, -1):
            for gram, before in zip(self._grams(position), self._replaced.pop(), strict=True):
                if before is None:
                    del self.positions[gram]
                else:
                    self.positions[gram] = before
            del self._tokens[position]
        for position in range(len(self._tokens), len(seq.tokens)):
            self._tokens.append(seq.tokens[position])
            grams = self._grams(position)
            if position >= self._num_prompt_tokens:  # the prompt is never taken back
                self._replaced.append([self.positions.get(gram) for gram in grams])
            for gram in grams:
                self.positions[gram] = position
        self._mark = seq.mark()

    def _grams(self, position: int) -> list[tuple[int, ...]]:
        """The n-grams before `position`, the shortest first."""
        return [tuple(self._tokens[position - size : position]) for size in range(1, min(MAX_NGRAM, position) + 1)]


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
        self._indices[seq.id] = _Index(seq.num_prompt_tokens)
        self._indices[seq.id].follow(seq)

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """The tokens that followed the most recent occurrence of the longest known suffix."""
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            index = self._indices[seq.id]
            index.follow(seq)
            drafts.append(Draft.chain(self._continuation(seq.tokens, index.positions, min(self.num_tokens, limit)), self.name))
        return drafts

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Nothing to do: `propose` indexes what is new."""

    def end(self, seq: Sequence) -> None:
        """Drop the index."""
        self._indices.pop(seq.id, None)

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

"""One request's tokens, its sampling settings and its random numbers. Plain data: it knows no models, text or slots."""

import secrets
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

from cpuspec.checkpoints.adapters import AdapterSet, set_identity
from cpuspec.errors import CpuspecError
from cpuspec.sampling import Draws, Legal, Noise, Row, TokenHistory
from cpuspec.settings import SamplingParams


class Constraint(Protocol):
    """A grammar that a request's answer keeps to. Every method depends only on the path: output tokens, then drafted ones."""

    def legal(self, path: Seq[int]) -> Legal | None:
        """Whether each token may follow the path, [V], the end token included; None where only the end or nothing may follow."""
        ...

    def accepts(self, path: Seq[int]) -> bool:
        """Whether the answer may end after the path."""
        ...

    def forced(self, path: Seq[int]) -> list[int]:
        """Tokens that must follow the path, one after the other."""
        ...


@dataclass
class Sequence:
    """Prompt and output tokens of one request, with its own random numbers, so that no draw depends on the batch or on drafts.

    `seed` is the request's, or fresh entropy where it names none. Committed tokens are never taken back, except by `finish`.
    constraint: asked for drafts, too. answer_constraint: the same, asked only along the answer, step by step: a grammar has
    limits, and questions about paths that the answer does not take must not bring them nearer.
    """

    id: int
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    draws: Draws
    constraint: Constraint | None = None
    answer_constraint: Constraint | None = None
    prediction: Seq[int] = ()  # tokens that the answer may repeat, which lookups draft from
    turns: Seq[int] = ()  # lengths at which conversation turns begin; later prompts may differ from there on (`Tokenizer.turns`)
    adapters: AdapterSet = ()
    finish_reason: str | None = None  # "stop", "length", "error", "aborted"
    error: CpuspecError | None = None  # why it cannot go on
    _num_committed: int | None = None  # of the tokens, where others follow them; see `with_drafted`
    _history: TokenHistory | None = None
    _num_counted: int = 0  # of the tokens, in the history

    @staticmethod
    def new(
        id: int,
        prompt: Iterable[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
        prediction: Seq[int] = (),
        answer_constraint: Constraint | None = None,
        adapters: AdapterSet = (),
    ) -> "Sequence":
        """A sequence that holds the prompt and has generated nothing. answer_constraint: by default `constraint`."""
        tokens = [int(t) for t in prompt]
        seed = secrets.randbits(64) if params.seed is None else params.seed
        of_answer, draws = answer_constraint or constraint, Noise(seed)
        return Sequence(id, tokens, len(tokens), params, seed, draws, constraint, of_answer, prediction, adapters=adapters)

    @property
    def salt(self) -> str:
        """Only sequences of the same one may use what was computed for each other, or see it in their figures."""
        return salt_of(self.params.cache_salt, self.adapters)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether each token is the argmax of the raw logits."""
        return self.params.greedy and self.params.keeps_order and self.constraint is None

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def history(self) -> TokenHistory | None:
        """The tokens that penalties and biases count, brought up to date; None where nothing changes the order of logits."""
        if self.params.keeps_order:
            return None
        if self._history is None:
            self._history, self._num_counted = TokenHistory(self.tokens[: self.num_prompt_tokens]), self.num_prompt_tokens
        self._history.extend(self.tokens[self._num_counted :])
        self._num_counted = len(self.tokens)
        return self._history

    def draw(self, row: Row, num_drafted: int = 0) -> int:
        """A token from the probabilities of the next one, or of the one after `num_drafted` drafted tokens.

        Every draw for one place in the answer uses the same random numbers: the target draws the token that it draws without any
        draft, and a draft model's rows, the more they resemble the target's, the more often draw that one, too.
        """
        return self.draws.draw(row, self.num_output_tokens + num_drafted)

    def legal(self, drafted: Seq[int] = (), is_answer: bool = False) -> Legal | None:
        """The tokens that may follow the output and the tokens `drafted`, [V]. None: any may, or the answer has ended.

        is_answer: whether they are the answer's next tokens for sure.
        """
        constraint = self.answer_constraint if is_answer else self.constraint
        return constraint.legal([*self.output, *drafted]) if constraint else None

    @property
    def num_wanted(self) -> int:
        """How many tokens the request may still generate."""
        return self.params.max_tokens - self.num_output_tokens

    @property
    def num_committed(self) -> int:
        """How many leading tokens stay as they are; those after them are drafted, and another call may see others."""
        return len(self.tokens) if self._num_committed is None else self._num_committed

    def extend(self, tokens: Iterable[int]) -> None:
        """Add generated tokens."""
        self.tokens.extend(tokens)

    def with_drafted(self, tokens: Iterable[int] = ()) -> "Sequence":
        """A sequence of its own that has drafted tokens after this one's, and may be extended; this one stays as it is."""
        history = self.history.copy() if self.history else None
        return replace(self, tokens=[*self.tokens, *tokens], _num_committed=self.num_committed, _history=history)

    def finish(self, num_output_tokens: int, reason: str) -> None:
        """End the sequence after that many output tokens; a round may have committed more."""
        del self.tokens[self.num_prompt_tokens + num_output_tokens :]
        self.finish_reason = reason


def salt_of(cache_salt: str, adapters: AdapterSet) -> str:
    """The salt of sequences with these adapters, which change keys and values, whose request has this `cache_salt`."""
    # A client's salt may be any text: neither form can be taken for the other.
    identity = set_identity(adapters)
    return f"\0{identity}\0{cache_salt}" if identity else cache_salt.replace("\0", "\0\0")


def shared_prefix(first: list[int], second: list[int]) -> int:
    """How many leading tokens two lists have in common."""
    low, high = 0, min(len(first), len(second))
    # Comparing slices runs in C; halving them costs no more than two comparisons of the whole.
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

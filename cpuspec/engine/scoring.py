"""How likely texts are: the logits of their tokens, and log-probabilities of a request's prompt."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cpuspec.backends import Backend, num_of_prompt
from cpuspec.checkpoints.adapters import AdapterSet
from cpuspec.model.batch import F32, ForwardBatch
from cpuspec.model.cache import KVCache
from cpuspec.sampling import TokenLogprobs, logprobs
from cpuspec.sequence import shared_prefix

_ROWS = 64  # of a step: their logits are held, 39 MB with 152 thousand ids, and answers wait for it


class Scorer:
    """Logits of texts, one after the other. The beginning that a text shares with the one before is not computed again."""

    def __init__(self, backend: Backend, capacity: int, adapters: AdapterSet = (), num_prompt: int = 0) -> None:
        """capacity: tokens of the longest text. num_prompt: how many of a text's tokens are its prompt's (`num_of_prompt`)."""
        self._backend, self._adapters, self._num_prompt = backend, adapters, num_prompt
        self.cache = backend.new_cache(1, capacity)  # of the last text, or of its first tokens
        self._held: list[int] = []  # tokens whose keys and values the cache holds

    def logits(self, tokens: Sequence[int], first: int = 0, max_rows: int | None = None) -> Iterator[F32]:
        """Logits [rows, V] of a text from its row `first` on, up to `max_rows` rows at a time."""
        max_rows = max_rows or self._backend.max_rows
        shared = min(shared_prefix(self._held, list(tokens)), first)
        begin = self.cache.truncate(0, shared)
        self._held = list(tokens[:begin])
        while (start := len(self._held)) < len(tokens):
            of_prompt = num_of_prompt(self._backend, self._num_prompt, start)
            rows = np.asarray(tokens[start : start + min(max_rows, of_prompt or max_rows)], np.int32)
            logits = self._backend.forward(
                ForwardBatch(
                    tokens=rows,
                    positions=np.arange(start, start + len(rows), dtype=np.int32),
                    slots=np.zeros(1, np.int32),
                    q_start=np.array([0, len(rows)], np.int32),
                    logit_rows=None if start >= first else np.arange(first - start, len(rows), dtype=np.int32),
                    adapters=(self._adapters,),
                    of_prompts=of_prompt > 0,
                ),
                self.cache,
            ).logits
            self._held += rows.tolist()
            if len(logits):
                yield logits


class ScoringJob:
    """Scores the tokens of texts, some rows a `step`. One thread at a time calls it, and no other one uses the backend meanwhile.

    Texts that begin alike share their rows. Rows are invariant, so no text changes another's scores.
    """

    def __init__(
        self,
        backend: Backend,
        prompts: Sequence[list[int]],
        num_top: int = 0,
        adapters: AdapterSet = (),
        keep: Callable[[KVCache, list[int]], object] | None = None,
    ) -> None:
        """prompts: token ids, none empty. num_top: how many likeliest tokens to report in each place.

        keep: called for each text that was read, with the cache whose only slot holds it and its tokens without the last.
        """
        self._prompts, self._num_top, self._keep = prompts, num_top, keep
        self._scores: list[list[TokenLogprobs]] = [[] for _ in prompts]
        longest = max(map(len, prompts), default=1)
        self._scorer = Scorer(backend, longest, adapters, num_prompt=longest)
        self._max_rows = min(_ROWS, backend.max_rows)
        self._unread = deque(sorted(range(len(prompts)), key=prompts.__getitem__))  # the first one has unread tokens
        self._skip_scored()

    @property
    def is_done(self) -> bool:
        """Whether every text has been read."""
        return not self._unread

    def step(self, max_rows: int | None = None) -> None:
        """Run one forward of at most `max_rows` tokens; None for as many as a step takes."""
        number = self._unread[0]
        tokens, found = self._prompts[number], self._scores[number]
        end = min(len(tokens) - 1, len(found) + min(max_rows or _ROWS, self._max_rows))
        for rows in self._scorer.logits(tokens[:end], len(found)):
            found += [logprobs(row, tokens[len(found) + 1 + at], self._num_top) for at, row in enumerate(rows)]
        if self._keep and end == len(tokens) - 1:
            self._keep(self._scorer.cache, tokens[:end])
        self._skip_scored()

    def scores(self) -> list[list[TokenLogprobs]]:
        """For each text of a finished job the scores of its tokens, without the first one, which no token stands before."""
        assert self.is_done, "scores are complete when every text has been read"
        return self._scores

    def _skip_scored(self) -> None:
        """Go on to the first text without all its scores. It takes those of the tokens that it shares with the text before."""
        while self._unread and len(self._scores[self._unread[0]]) == len(self._prompts[self._unread[0]]) - 1:
            last = self._unread.popleft()
            if self._unread:
                following = self._unread[0]
                shared = shared_prefix(self._prompts[last], self._prompts[following])
                self._scores[following] += self._scores[last][: max(0, shared - 1)]

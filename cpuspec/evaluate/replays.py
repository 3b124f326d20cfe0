"""Replays: whether what a cache keeps of a text gives each row the bits that it has in one forward of the whole text.

A recurrent layer folds rows into a state and forgets them. An error in the state fades with every later row, so later answers may
not show it. Replays therefore feed the same text in forwards of other sizes, truncate it as far as the cache can (the next row then
depends on nothing but the state), feed it again, and compare the rows of every forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import numpy as np

from cpuspec.backends import Backend, has_prompt_arithmetic
from cpuspec.model.batch import F32, ForwardBatch
from cpuspec.model.cache import KVCache

# Of backends without row invariance: as much of the largest logit may two ways of computing a row differ by.
TOLERANCE = 1e-3

_LENGTH = 96  # tokens of a text: rows with all logits are held of all texts
_SIZES = (1, 1, 2, 5, 9, 40)  # rows of a forward: few fold in place, and many into another memory
_MOST_WRONG = 7  # drafted tokens that are taken back


@dataclass(frozen=True)
class Replay:
    """One way of feeding the texts. differs: text and position of the first row that is not the one of the whole forward."""

    way: str
    num_rows: int
    differs: tuple[int, int] | None


@dataclass(frozen=True)
class Replays:
    """All ways. control_seen: whether a text with a wrong token in the cache was told from the right one by its next row."""

    num_texts: int
    ways: tuple[Replay, ...]
    control_seen: bool

    @property
    def passed(self) -> bool:
        """Whether every row is the one of the whole forward, and a wrong one would have shown."""
        return self.control_seen and all(one.differs is None for one in self.ways)


def check_replays(backend: Backend, texts: Sequence[Sequence[int]]) -> Replays:
    """Feed the beginning of each text in several ways, and compare the logits of all rows with those of one forward.

    Bits where the backend's rows are invariant, and else within TOLERANCE. The same texts are always fed alike: as tokens of
    answers, and once more as those of prompts where these have an arithmetic of their own.
    """
    cut = [list(text[: min(_LENGTH, backend.max_rows)]) for text in texts]
    runs, control_seen = list[Replay](), True
    for of_prompts in (False, True) if has_prompt_arithmetic(backend) else (False,):
        feed = partial(_fed, backend, of_prompts)
        whole = [feed(backend.new_cache(1, len(text)), [0], [text]) for text in cut]
        where = ", as a prompt" if of_prompts else ""
        runs += [Replay(name + where, *_compared(backend, feed, cut, whole, *way)) for name, way in _WAYS.items()]
        control_seen &= _control(backend, feed, cut[0], whole[0])
    return Replays(len(cut), tuple(runs), control_seen)


_Feeding = Callable[[KVCache, list[int], list[list[int]]], F32]  # slots, their next tokens -> logits of all of them
# Where a forward on a slot begins, where it ends, and how many wrong tokens come after these.
_Way = Callable[[KVCache, int, np.random.Generator], tuple[int, int, int]]


def _one_by_one(cache: KVCache, slot: int, rng: np.random.Generator) -> tuple[int, int, int]:
    return cache.lengths[slot], cache.lengths[slot] + 1, 0


def _drafted(cache: KVCache, slot: int, rng: np.random.Generator) -> tuple[int, int, int]:
    return cache.lengths[slot], cache.lengths[slot] + int(rng.choice(_SIZES)), int(rng.integers(0, _MOST_WRONG + 1))


def _taken_back(cache: KVCache, slot: int, rng: np.random.Generator) -> tuple[int, int, int]:
    """Every second time from the least length that the cache can be truncated to: no row lies between it and the state."""
    length = cache.lengths[slot]
    if not rng.integers(0, 2):
        return _drafted(cache, slot, rng)
    kept = len(list(takewhile(lambda back: cache.reachable(slot, length - back) == length - back > 0, range(1, length))))
    return length - kept, length + int(rng.choice(_SIZES)), 0


# And whether each forward goes on in a copy of the slot that the last one left.
_WAYS: dict[str, tuple[_Way, bool]] = {
    "token by token": (_one_by_one, False),
    "in forwards of several sizes, with drafts taken back": (_drafted, False),
    "again from the least length that can be kept": (_taken_back, False),
    "in copies of the slot": (_drafted, True),
}


def _compared(
    backend: Backend, feed: _Feeding, texts: list[list[int]], whole: list[F32], way: _Way, copies: bool
) -> tuple[int, tuple[int, int] | None]:
    """The rows that were compared, and the first that differs. Two texts share each forward."""
    rng, num_rows = np.random.default_rng(0), 0  # the same in every run
    for first in range(0, len(texts), 2):
        numbers = [first, first + 1] if first + 1 < len(texts) else [first]
        cache = backend.new_cache(2 * len(numbers), max(len(texts[number]) for number in numbers) + _MOST_WRONG)
        slots = dict(zip(numbers, range(0, 2 * len(numbers), 2), strict=True))
        while running := [number for number in numbers if cache.lengths[slots[number]] < len(texts[number])]:
            rows, spans = [], []
            for number in running:
                begin, end, num_wrong = way(cache, slots[number], rng)
                wrong = rng.integers(0, backend.config.vocab_size, num_wrong).tolist()
                end = min(end, len(texts[number]))
                assert cache.truncate(slots[number], begin) == begin, "it was reachable"
                rows.append((texts[number][begin:end] + wrong)[: backend.max_rows])
                spans.append((begin, end))
            got = feed(cache, [slots[number] for number in running], rows)
            at = 0
            for number, fed, (begin, end) in zip(running, rows, spans, strict=True):
                differing = _first_difference(backend, got[at : at + end - begin], whole[number][begin:end])
                num_rows, at = num_rows + end - begin, at + len(fed)
                if differing is not None:
                    return num_rows, (number, begin + differing)
                if cache.truncate(slots[number], end) != end:
                    return num_rows, (number, end)
                if copies:
                    source, slots[number] = slots[number], slots[number] ^ 1
                    if cache.copy(source, slots[number], end) != end:
                        return num_rows, (number, end)
    return num_rows, None


def _control(backend: Backend, feed: _Feeding, text: list[int], whole: F32) -> bool:
    """Whether a rejected draft that stays in the place of the last of some tokens shows in the row after it."""
    length = len(text) // 2
    cache = backend.new_cache(1, len(text))
    feed(cache, [0], [[*text[: length - 1], (text[length - 1] + 1) % backend.config.vocab_size]])
    got = feed(cache, [0], [text[length : length + 1]])
    return _first_difference(backend, got, whole[length : length + 1]) is not None


def _first_difference(backend: Backend, got: F32, wanted: F32) -> int | None:
    if backend.row_invariant:
        same = (got == wanted).all(axis=1)
    else:
        same = np.abs(got - wanted).max(axis=1) <= TOLERANCE * np.abs(wanted).max()
    return None if same.all() else int(same.argmin())


def _fed(backend: Backend, of_prompts: bool, cache: KVCache, slots: list[int], rows: list[list[int]]) -> F32:
    """Append tokens to slots in one forward, or in one for each where they do not fit; the logits of all of them."""
    if len(slots) > 1 and sum(map(len, rows)) > backend.max_rows:
        return np.concatenate([_fed(backend, of_prompts, cache, [slot], [some]) for slot, some in zip(slots, rows, strict=True)])
    positions = [cache.lengths[slot] + i for slot, some in zip(slots, rows, strict=True) for i in range(len(some))]
    starts = np.cumsum([0, *map(len, rows)]).tolist()
    batch = ForwardBatch([token for some in rows for token in some], positions, slots, starts, of_prompts=of_prompts)
    return backend.forward(batch, cache).logits.copy()

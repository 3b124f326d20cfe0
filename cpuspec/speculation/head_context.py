"""A head with its cache: what `Context` is for a model. A head reads hidden states of the model that it drafts for.

Row P of a slot is made of two inputs, and predicts one token:

    the verifier's hidden state of token P, the embedding of token P + 1  ->  logits of token P + 2

The hidden states come with the verdicts (`learn`). For tokens without one, a row gets the head's own output of the row before, and
is fed again in the next round. A prefix that the verifier took from its cache has no hidden states. Its rows are those that a
finished sequence left in a slot or in a `PrefixStore`; without these the head drafts without them.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from cpuspec.backends import HeadBackend
from cpuspec.checkpoints.heads import Head
from cpuspec.errors import CacheError, ConfigError
from cpuspec.metrics import Spent, now_s
from cpuspec.model.batch import F32, ForwardBatch, ForwardOutput
from cpuspec.sequence import Sequence
from cpuspec.settings import EngineConfig
from cpuspec.speculation.context import PromptChunk, share_rows, shortest_first
from cpuspec.speculation.slots import Slot, Slots

# Rows of a prompt are encoded as they come: the outputs of several layers would take more memory to keep until the first draft.
_ENCODED_AT_ONCE = 64
_ROWS_FOR_ONE = 8  # rows of a head take no more time than one of its target


class DraftedRows(NamedTuple):
    """Rows that follow those of the committed tokens.

    tokens, hidden [n, C]: the inputs of each row. parents: for each row the drafted row that it follows, -1 for the last row before
    them; None for a chain. num_kept: how many rows of a chain that the last score drafted stay before these.
    """

    tokens: list[int]
    hidden: F32
    parents: list[int] | None = None
    num_kept: int = 0


class HeadRows(NamedTuple):
    """Outputs of rows: logits [n, num_logits], and hidden states [n, C], which may be inputs of following rows."""

    logits: F32
    hidden: F32


@dataclass(slots=True)
class _Followed:
    """A sequence that the head drafts for.

    known: hidden states [*, C] of the tokens from `first` on. raw: those of the tokens after these, as the verifier gave them,
    [*, feature_size]; `_encode` makes them known. num_rows: of the slot, made of the verifier's hidden states (`Slot.positions`),
    and following ones made of the head's own. The cache may hold more: drafted rows.
    """

    first: int
    known: F32
    raw: list[F32] = field(default_factory=list)
    num_rows: int = 0

    @property
    def end(self) -> int:
        """The first token without a hidden state."""
        return self.first + len(self.known) + sum(map(len, self.raw))


@dataclass(slots=True)
class _Feed:
    """Rows of a sequence that a score still has to run, and outputs of those that ran.

    positions: of rows of committed tokens. hidden: the verifier's hidden states for the first of these; the others get the head's
    own. asked: whether the output of the last committed row is wanted.
    """

    followed: _Followed
    slot: Slot
    positions: list[int]
    hidden: F32
    drafted: DraftedRows | None
    asked: bool
    last_hidden: F32 | None = None  # [1, C] the output of the last row that ran
    rows: list[HeadRows] = field(default_factory=list)


class _ForwardPart(NamedTuple):
    """Rows of a feed in one forward. parents: as in `DraftedRows`, for all rows."""

    tokens: list[int]
    positions: list[int]
    hidden: F32
    parents: list[int]
    num_asked: int  # how many rows, the last ones, have outputs that are wanted


class HeadContext:
    """One head and its cache. Not thread-safe: one caller at a time.

    prompt_rows: rows of prompts that one score reads beside sequences that generate.
    """

    def __init__(
        self, head: Head, backend: HeadBackend, num_slots: int, capacity: int, prompt_rows: int = EngineConfig.prompt_rows
    ) -> None:
        self.head = head
        self.backend = backend
        self.cache = backend.new_cache(num_slots, capacity)
        self.capacity = capacity
        self.prompt_rows = min(prompt_rows, backend.max_rows)
        self.num_forwards = self.weight_bytes = 0  # as in `Context`
        self.spent = Spent()
        self.slots = Slots(backend, self.cache, 1)
        self._layers = (backend.config.num_layers - 1,)  # whose output is a row's hidden state
        self._injects = bool(backend.config.head and backend.config.head.injects)
        self._both_ways = bool(head.block and head.block.both_ways)
        self._sees_rows = not (backend.config.head and backend.config.head.reads)
        self._back = "back" if "back" in head.model.tensors else ""
        self._followed: dict[int, _Followed] = {}  # by sequence id
        self.most_waiting: int | None = None  # hidden states of a sequence: up to twice as many are kept; None: all

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the verifier's hidden states that are in memory for drafts to come."""
        return sum(rows.nbytes for followed in self._followed.values() for rows in (followed.known, *followed.raw))

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Follow a sequence. num_cached: as in `Proposer.begin`."""
        config = self.backend.config
        width = config.hidden_size if self._sees_rows else config.injected_size + config.state_size
        self._followed[seq.id] = _Followed(num_cached, np.empty((0, width), np.float32))
        self.slots.poll(seq)

    def learn(self, seq: Sequence, layers: tuple[F32, ...]) -> None:
        """Keep the verifier's hidden states up to the last accepted token's. layers: as `Proposer.accept` has them."""
        one, rows = self._followed[seq.id], np.concatenate(layers, axis=1)
        start = len(seq.tokens) - 1 - len(rows)
        if start != one.end:  # the verifier computed some again
            self._encode([one])
            num_kept = start - one.first
            if not 0 <= num_kept <= len(one.known):
                num_kept, one.first = 0, start
            one.known = one.known[:num_kept]
        one.raw.append(rows)
        if len(rows) >= _ENCODED_AT_ONCE:
            self._encode([one])
        if self.most_waiting is not None and one.end - one.first > 2 * self.most_waiting:
            self._encode([one])
            one.first, one.known = one.end - self.most_waiting, one.known[-self.most_waiting :].copy()

    def end(self, seq: Sequence) -> None:
        """Forget a sequence. Its rows stay for later ones that begin alike. A sequence that never began is ignored."""
        self._followed.pop(seq.id, None)
        self.slots.release(seq)

    def can_draft(self, seq: Sequence) -> bool:
        """Whether the last committed token's row can be made.

        It cannot before the verifier's first verdict, nor while rows of its prefix are on their way from the disk.
        """
        one = self._followed.get(seq.id)
        if one is None or not one.first < one.end or not one.first < len(seq.tokens) - 1:
            return False
        return seq.id in self.slots.taken or not self.slots.poll(seq)

    def unknown(self, seq: Sequence) -> list[int]:
        """The tokens without a hidden state: the last committed one, then those that an earlier drafter chose."""
        return seq.tokens[self._followed[seq.id].end :]

    def last_hidden(self, seqs: list[Sequence]) -> list[F32]:
        """For each sequence the verifier's last hidden state [1, state_size], for heads that read the target's keys and values."""
        ones = [self._followed[seq.id] for seq in seqs]
        self._encode(ones)
        return [one.known[-1:, self.backend.config.injected_size :] for one in ones]

    def num_unfed(self, seq: Sequence) -> int:
        """How many rows a score would feed before the last committed token's. Gives the sequence a slot, or raises CacheError."""
        if seq.id not in self.slots.taken:
            self.slots.acquire(seq)
        return len(self._unfed(seq)[1]) - 1

    def read(self, seqs: list[Sequence]) -> list[bool]:
        """Feed parts of the sequences' prompts; returns whether each can be drafted for now. Raises CacheError without a slot."""
        num_rows = _ROWS_FOR_ONE * (self.backend.max_rows if self.slots.is_alone else self.prompt_rows)
        ready, chunks = share_rows(seqs, list(map(self.num_unfed, seqs)), num_rows)
        if chunks:
            self.score([], [], chunks)
        return ready

    def score(
        self, seqs: list[Sequence], drafted: list[DraftedRows | None], chunks: list[PromptChunk] | None = None
    ) -> list[HeadRows]:
        """For each sequence the row of its last committed token, unless `num_kept` rows stay after it, and the drafted rows.

        `chunks` are rows of prompts that are fed beside them. Raises CacheError for rows beyond the capacity, and ConfigError for
        more drafted rows than a forward takes.
        """
        self._encode([self._followed[seq.id] for seq in [*seqs, *(chunk.seq for chunk in chunks or ())]])
        feeds = list(map(self._feed, seqs, drafted))
        waiting = [feed for feed in feeds + [self._read(chunk) for chunk in chunks or ()] if feed.positions or feed.drafted]
        if self._injects:
            self._inject(waiting)
            waiting = [feed for feed in waiting if feed.drafted]
        while waiting:
            waiting = self._forward(waiting)
        return [feed.rows[0] if len(feed.rows) == 1 else _joined(feed.rows) for feed in feeds]

    def _encode(self, ones: list[_Followed]) -> None:
        """Encode the verifier's outputs that are still raw, of all sequences together."""
        ones = [one for one in ones if one.raw]
        if not ones:
            return
        sizes = [sum(map(len, one.raw)) for one in ones]
        hidden, start = self.encoded(np.concatenate([rows for one in ones for rows in one.raw])), 0
        for one, size in zip(ones, sizes, strict=True):
            one.known, one.raw = np.concatenate([one.known, hidden[start : start + size]]), []
            start += size

    def encoded(self, features: F32) -> F32:
        """The hidden states [T, C] that the head reads. features [T, feature_size]: outputs of layers, side by side."""
        for norm in self.head.feature_norms:
            features = norm.applied(features)
        config = self.head.model.config.head
        return self.backend.project(features, "encode") if config and config.feature_size else features

    def _unfed(self, seq: Sequence) -> tuple[Slot, range]:
        """Truncate the slot to rows that the sequence shares; returns it, and the positions of rows that it lacks.

        The last row that has a hidden state of the verifier is always fed: the next row needs its output.
        """
        one = self._followed[seq.id]
        slot = self.slots.align(seq, min(len(seq.tokens) - 2, one.end - 1))
        slot.tokens, positions = seq.tokens[1:], slot.positions
        one.num_rows = len(positions or ())
        return slot, range(max(positions[-1] + 1 if positions else 0, one.first), len(seq.tokens) - 1)

    def _feed(self, seq: Sequence, drafted: DraftedRows | None) -> _Feed:
        one = self._followed[seq.id]
        num_drafted = len(drafted.tokens) if drafted else 0
        if num_drafted > self.backend.max_rows:
            raise ConfigError(f"a forward takes {self.backend.max_rows} rows, and {num_drafted} were drafted at once")
        if drafted and drafted.num_kept:
            slot = self.slots.taken[seq.id]
            self.cache.truncate(slot.number, one.num_rows + drafted.num_kept)
            return _Feed(one, slot, [], one.known[:0], drafted, False)
        slot, unfed = self._unfed(seq)
        if unfed.stop + num_drafted > self.capacity:
            raise CacheError(f"{unfed.stop + num_drafted} rows do not fit a context of {self.capacity}")
        return _Feed(one, slot, list(unfed), one.known[unfed.start - one.first : unfed.stop - one.first], drafted, True)

    def _read(self, chunk: PromptChunk) -> _Feed:
        one, (slot, unfed) = self._followed[chunk.seq.id], self._unfed(chunk.seq)
        unfed = range(unfed.start, min(unfed.start + chunk.num_tokens, one.end))
        return _Feed(one, slot, list(unfed), one.known[unfed.start - one.first : unfed.stop - one.first], None, False)

    def _inject(self, feeds: list[_Feed]) -> None:
        """Put the verifier's hidden states into the cache, as many at a time as a forward takes."""
        for feed in feeds:
            del feed.positions[len(feed.hidden) :]
        waiting = [feed for feed in feeds if feed.positions]
        while waiting:
            sizes = shortest_first([len(feed.positions) for feed in waiting], self.backend.max_rows)
            now = [(feed, size) for feed, size in zip(waiting, sizes, strict=True) if size]
            positions = [position for feed, size in now for position in feed.positions[:size]]
            starts = list(accumulate((size for _, size in now), initial=0))
            hidden = np.concatenate([feed.hidden[:size, : self.backend.config.injected_size] for feed, size in now])
            slots = [feed.slot.number for feed, _ in now]
            self.backend.inject(ForwardBatch([0] * len(positions), positions, slots, starts, hidden=hidden), self.cache)
            for feed, size in now:
                self._note(feed, size, size)
            waiting = [feed for feed in waiting if feed.positions]

    def _forward(self, feeds: list[_Feed]) -> list[_Feed]:
        """Run as many rows as one forward takes; returns the feeds that have rows left."""
        parts: list[_ForwardPart] = []
        starts = [0]
        for feed in feeds:
            part = self._next_part(feed, self.backend.max_rows - starts[-1])
            if part is None:
                break
            parts.append(part)
            starts.append(starts[-1] + len(part.tokens))
        is_tree = any(part.parents != list(range(-1, len(part.tokens) - 1)) for part in parts)
        parents = [p if p < 0 else p + start for part, start in zip(parts, starts, strict=False) for p in part.parents]
        asked = [row for part, end in zip(parts, starts[1:], strict=True) for row in range(end - part.num_asked, end)]
        batch = ForwardBatch(
            [token for part in parts for token in part.tokens],
            [position for part in parts for position in part.positions],
            [feed.slot.number for feed in feeds[: len(parts)]],
            starts,
            parents if is_tree else None,
            asked,
            self._layers,
            np.concatenate([part.hidden for part in parts]) if self.backend.config.takes_hidden else None,
            self._both_ways,
            sees_rows=self._sees_rows,
        )
        begin_s = now_s()
        output = self.backend.forward(batch, self.cache)
        self.spent.add(starts[-1], now_s() - begin_s)
        self.num_forwards += 1
        self.weight_bytes += output.weight_bytes
        first = 0
        for feed, part, end in zip(feeds, parts, starts[1:], strict=False):
            self._keep_output(feed, part, output, first, end)
            first += part.num_asked
        return [feed for feed in feeds if feed.positions or feed.drafted]

    def _next_part(self, feed: _Feed, max_rows: int) -> _ForwardPart | None:
        """The next rows of a feed that can go in one forward, at most `max_rows`; None if there are none."""
        known = len(feed.hidden)
        positions, hidden = feed.positions[: min(known or 1, max_rows)], feed.hidden[:max_rows]
        if positions and not known:
            assert feed.last_hidden is not None, "a row of own hidden states follows another"
            hidden = feed.last_hidden
        tokens = [feed.slot.tokens[position] for position in positions]
        parents = list(range(-1, len(positions) - 1))
        is_last = len(positions) == len(feed.positions)
        num_asked = int(is_last and feed.asked and bool(positions))
        drafted = feed.drafted
        if is_last and drafted and len(positions) + len(drafted.tokens) <= max_rows:
            last = len(positions) - 1
            start = feed.followed.end if self._injects else len(feed.slot.tokens) + drafted.num_kept
            links = drafted.parents or range(-1, len(drafted.tokens) - 1)
            depths: list[int] = []
            for link in links:
                depths.append(depths[link] + 1 if link >= 0 else 0)
            tokens += drafted.tokens
            positions = positions + [start + depth for depth in depths]
            parents += [link + last + 1 if link >= 0 else last for link in links]
            hidden = np.concatenate([hidden[:, : drafted.hidden.shape[1]], drafted.hidden])
            num_asked += len(drafted.tokens)
        return _ForwardPart(tokens, positions, hidden, parents, num_asked) if tokens else None

    def _keep_output(self, feed: _Feed, part: _ForwardPart, output: ForwardOutput, first: int, end: int) -> None:
        """Keep the output of a feed's rows in a forward. first: the first of its rows of logits; end: the end of its rows."""
        num_fed, num_true = min(len(part.tokens), len(feed.positions)), min(len(part.tokens), len(feed.hidden))
        if num_fed < len(part.tokens):
            feed.drafted = None
        self._note(feed, num_fed, num_true)
        hidden = output.hidden[0]
        if self.head.state_norm:
            hidden = self.head.state_norm.applied(hidden)
        if self._back:
            hidden = self.backend.project(hidden, self._back)
        feed.last_hidden = hidden[end - 1 : end]
        if part.num_asked:
            feed.rows.append(HeadRows(output.logits[first : first + part.num_asked], hidden[end - part.num_asked : end]))

    def _note(self, feed: _Feed, num_fed: int, num_true: int) -> None:
        """Note that the cache has rows of a feed. The first `num_true` of them were made of the verifier's hidden states."""
        one, positions = feed.followed, feed.slot.positions
        assert positions is not None, "a head's slot has positions"
        positions += feed.positions[:num_true]
        one.num_rows += num_fed
        if num_true:  # the last of these may be fed again
            last = feed.positions[num_true - 1]
            one.known, one.first = one.known[last - one.first :], last
        feed.hidden, feed.positions = feed.hidden[num_true:], feed.positions[num_fed:]


def _joined(parts: list[HeadRows]) -> HeadRows:
    return HeadRows(np.concatenate([part.logits for part in parts]), np.concatenate([part.hidden for part in parts]))

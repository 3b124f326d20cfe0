"""A head with its cache: what `Context` is for a model. A head reads hidden states of the model that it drafts for.

Row P of a slot is made of two inputs, and predicts one token:

    the verifier's hidden state of token P, the embedding of token P + 1  ->  logits of token P + 2

The hidden states come with the verdicts (`learn`). For tokens without one, a row gets the head's own output of the row before, and
is fed again in the next round. A prefix that the verifier took from its cache has no hidden states. Its rows are those that a
finished sequence left in a slot or in a `PrefixStore`; without these the head drafts without them.
"""

from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from cpuspec.backends import HeadBackend
from cpuspec.checkpoints.heads import Head
from cpuspec.errors import CacheError, ConfigError
from cpuspec.metrics import Spent, now_s
from cpuspec.model.batch import F32, ForwardBatch, ForwardOutput
from cpuspec.sequence import Sequence, shared_prefix
from cpuspec.settings import EngineConfig
from cpuspec.speculation.context import PromptChunk, shortest_first
from cpuspec.speculation.prefix_cache import PrefixCache
from cpuspec.speculation.prefix_queue import PrefixQueue
from cpuspec.speculation.prefix_store import PrefixStore
from cpuspec.speculation.reading import share_rows

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
class _Slot:
    """The rows of a sequence's tokens that a slot holds.

    positions: of rows made of the verifier's hidden states, rising. num_rows: those, and the following ones made of the head's own
    hidden states. The cache may hold more: drafted rows.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    num_rows: int = 0
    salt: str = ""  # of the sequence that they were computed for


@dataclass(slots=True)
class _Followed:
    """A sequence that the head drafts for.

    known: hidden states [*, C] of the tokens from `first` on. raw: those of the tokens after these, as the verifier gave them,
    [*, feature_size]; `_encode` makes them known. agreed: how many tokens of its slot are the sequence's for good.
    """

    seq: Sequence
    first: int
    known: F32
    raw: list[F32] = field(default_factory=list)
    slot: int = -1
    agreed: int = 0

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
        self.num_forwards = self.num_running = self.weight_bytes = 0  # as in `Context`
        self.spent = Spent()
        self._layers = (backend.config.num_layers - 1,)  # whose output is a row's hidden state
        self._injects = bool(backend.config.head and backend.config.head.injects)
        self._both_ways = bool(head.block and head.block.both_ways)
        self._sees_rows = not (backend.config.head and backend.config.head.reads)
        self._back = "back" if "back" in head.model.tensors else ""
        self._slots = [_Slot() for _ in range(num_slots)]
        self.prefixes = PrefixCache(self, self.cache, backend.row_invariant)
        self._followed: dict[int, _Followed] = {}  # by sequence id
        self.most_waiting: int | None = None  # hidden states of a sequence: up to twice as many are kept; None: all

    @property
    def is_alone(self) -> bool:
        """As in `Context`."""
        return max(self.num_running, len(self._slots) - len(self.prefixes.free)) <= 1

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the verifier's hidden states that are in memory for drafts to come."""
        return sum(rows.nbytes for followed in self._followed.values() for rows in (followed.known, *followed.raw))

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Follow a sequence. num_cached: as in `Proposer.begin`."""
        config = self.backend.config
        width = config.hidden_size if self._sees_rows else config.injected_size + config.state_size
        self._followed[seq.id] = _Followed(seq, num_cached, np.empty((0, width), np.float32))
        self._poll(seq)

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
        one = self._followed.pop(seq.id, None)
        if self.prefixes.store:
            self.prefixes.store.forget(seq.id)
        if one and one.slot >= 0:
            if not self.prefixes.shares:
                self._slots[one.slot] = _Slot()
            self.prefixes.release(one.slot)
            self.prefixes.tidy()

    def can_draft(self, seq: Sequence) -> bool:
        """Whether the last committed token's row can be made.

        It cannot before the verifier's first verdict, nor while rows of its prefix are on their way from the disk.
        """
        one = self._followed.get(seq.id)
        if one is None or not one.first < one.end or not one.first < len(seq.tokens) - 1:
            return False
        return one.slot >= 0 or not self._poll(seq)

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
        one = self._at(seq)
        if one.slot < 0:
            self._acquire(one)
        return len(self._unfed(one)) - 1

    def read(self, seqs: list[Sequence]) -> list[bool]:
        """Feed parts of the sequences' prompts; returns whether each can be drafted for now. Raises CacheError without a slot."""
        num_rows = _ROWS_FOR_ONE * (self.backend.max_rows if self.is_alone else self.prompt_rows)
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

    def new_store(self, queue: PrefixQueue | None) -> PrefixStore:
        """As `SlotOwner`."""
        return PrefixStore(self.cache, self.backend.config.vocab_size, queue)

    def save_slot(self, slot: int) -> None:
        """As `SlotOwner`. Rows after the first position without one are not saved."""
        held, store = self._slots[slot], self.prefixes.store
        num_rows = next((row for row, position in enumerate(held.positions) if row != position), len(held.positions))
        if store and num_rows >= self.prefixes.many:
            tokens, salt = _stored_as(held.tokens, held.salt)
            with suppress(MemoryError):
                store.copy_from_slot(slot, tokens[:num_rows], self.prefixes.used[slot], salt)

    def clear_slot(self, slot: int) -> None:
        """As `SlotOwner`."""
        self._slots[slot] = _Slot()

    def _at(self, seq: Sequence) -> _Followed:
        """The sequence's record, with its present tokens."""
        one = self._followed[seq.id]
        one.seq = seq
        return one

    def _acquire(self, one: _Followed) -> None:
        """Give a sequence the free slot that shares most rows with it. If another slot or the store has more, they are copied."""
        free, store = self.prefixes.free, self.prefixes.store
        if not free:
            raise CacheError(f"all {self.cache.num_slots} cache slots are taken; finish or abort a sequence first")
        tokens, salt, shared = one.seq.tokens, one.seq.salt, self._shared(one.seq)
        slot, source = max(free, key=shared.__getitem__), max(range(len(shared)), key=shared.__getitem__)
        following, root = _stored_as(tokens, salt)
        stored = store.loadable(following, root, one.seq.id) if store else 0
        if not shared[slot]:
            slot = free[0]
        free.remove(slot)
        one.slot = slot
        longest = max(shared[source], stored)
        if len(self._slots[slot].positions) >= shared[slot] + self.prefixes.many or longest > shared[slot]:
            self.save_slot(slot)
        if longest > shared[slot] and longest == shared[source]:
            self._slots[slot] = _Slot(self._slots[source].tokens[:], self._slots[source].positions[: shared[source]], salt=salt)
            self.cache.copy(source, slot, shared[source])
        elif longest > shared[slot] and store:
            self.cache.truncate(slot, 0)
            self._slots[slot] = _Slot(salt=salt)
            num_rows = store.load(slot, following, self.prefixes.tick(), root, one.seq.id)
            self._slots[slot] = _Slot(tokens[: num_rows + 1], list(range(num_rows)), num_rows, salt)
        elif self._slots[slot].salt != salt:
            self._slots[slot] = _Slot(salt=salt)
        if store:
            store.forget(one.seq.id)
        one.agreed = min(shared_prefix(self._slots[slot].tokens, tokens), one.seq.num_committed)
        self.prefixes.num_prompt_tokens += len(tokens) - 1
        self.prefixes.num_cached_tokens += longest
        self.prefixes.tidy()

    def _shared(self, seq: Sequence) -> list[int]:
        """For each slot how many of its rows the sequence may use."""
        return [
            bisect_right(slot.positions, shared_prefix(slot.tokens, seq.tokens) - 2)
            if self.prefixes.shares and slot.salt == seq.salt
            else 0
            for slot in self._slots
        ]

    def _poll(self, seq: Sequence) -> bool:
        """Begin or continue to read rows from the disk for a sequence without a slot; returns whether some are to come."""
        store, many = self.prefixes.store, self.prefixes.many
        if store is None or len(seq.tokens) < many:
            return False
        return store.poll(*_stored_as(seq.tokens, seq.salt), seq.id, max(self._shared(seq)) + many)

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

    def _unfed(self, one: _Followed) -> range:
        """Truncate the slot to rows that the sequence shares; returns the positions of rows that it lacks.

        The last row that has a hidden state of the verifier is always fed: the next row needs its output.
        """
        seq, slot = one.seq, self._slots[one.slot]
        agreed = min(one.agreed, len(slot.tokens), len(seq.tokens))
        agreed += shared_prefix(slot.tokens[agreed:], seq.tokens[agreed:])
        one.agreed = seq.num_committed
        kept = bisect_right(slot.positions, min(agreed, len(seq.tokens) - 1, one.end) - 2)
        slot.tokens = seq.tokens[:]
        del slot.positions[kept:]
        slot.num_rows = kept
        self.cache.truncate(one.slot, kept)
        return range(max(slot.positions[-1] + 1 if kept else 0, one.first), len(seq.tokens) - 1)

    def _feed(self, seq: Sequence, drafted: DraftedRows | None) -> _Feed:
        one = self._at(seq)
        num_drafted = len(drafted.tokens) if drafted else 0
        if num_drafted > self.backend.max_rows:
            raise ConfigError(f"a forward takes {self.backend.max_rows} rows, and {num_drafted} were drafted at once")
        if drafted and drafted.num_kept:
            self.cache.truncate(one.slot, self._slots[one.slot].num_rows + drafted.num_kept)
            return _Feed(one, [], one.known[:0], drafted, False)
        unfed = self._unfed(one)
        if unfed.stop + num_drafted > self.capacity:
            raise CacheError(f"{unfed.stop + num_drafted} rows do not fit a context of {self.capacity}")
        return _Feed(one, list(unfed), one.known[unfed.start - one.first : unfed.stop - one.first], drafted, True)

    def _read(self, chunk: PromptChunk) -> _Feed:
        one = self._at(chunk.seq)
        unfed = self._unfed(one)
        unfed = range(unfed.start, min(unfed.start + chunk.num_tokens, one.end))
        return _Feed(one, list(unfed), one.known[unfed.start - one.first : unfed.stop - one.first], None, False)

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
            slots = [feed.followed.slot for feed, _ in now]
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
            [feed.followed.slot for feed in feeds[: len(parts)]],
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
        seq_tokens, known = feed.followed.seq.tokens, len(feed.hidden)
        positions, hidden = feed.positions[: min(known or 1, max_rows)], feed.hidden[:max_rows]
        if positions and not known:
            assert feed.last_hidden is not None, "a row of own hidden states follows another"
            hidden = feed.last_hidden
        tokens = [seq_tokens[position + 1] for position in positions]
        parents = list(range(-1, len(positions) - 1))
        is_last = len(positions) == len(feed.positions)
        num_asked = int(is_last and feed.asked and bool(positions))
        drafted = feed.drafted
        if is_last and drafted and len(positions) + len(drafted.tokens) <= max_rows:
            last = len(positions) - 1
            start = feed.followed.end if self._injects else len(seq_tokens) - 1 + drafted.num_kept
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
        one, slot = feed.followed, self._slots[feed.followed.slot]
        slot.positions += feed.positions[:num_true]
        slot.num_rows += num_fed
        if num_true:  # the last of these may be fed again
            last = feed.positions[num_true - 1]
            one.known, one.first = one.known[last - one.first :], last
        feed.hidden, feed.positions = feed.hidden[num_true:], feed.positions[num_fed:]


def _stored_as(tokens: list[int], salt: str) -> tuple[list[int], str]:
    """The tokens and the salt by which a `PrefixStore` knows rows. A row depends on its position's token and on the next one."""
    return tokens[1:], f"{tokens[0]} {salt}" if tokens else salt


def _joined(parts: list[HeadRows]) -> HeadRows:
    return HeadRows(np.concatenate([part.logits for part in parts]), np.concatenate([part.hidden for part in parts]))

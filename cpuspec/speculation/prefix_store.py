"""Prefixes of finished requests outside of the cache's slots: blocks of keys and values, shared by all that begin alike.

Blocks form a tree: a block's tokens follow its parent's, and its key is a hash of all tokens up to its end. So a beginning that
several prompts share is stored once. A block with fewer tokens than `BlockAccess.size` ends its prefix. Each salt
(`SamplingParams.cache_salt`) has a tree of its own; the root's key is a hash of the salt.

For a model with recurrent layers the tree also has snapshots of their states. A snapshot stands beside the block in which its
tokens end. A prefix can then be used up to a snapshot of exactly its tokens.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cpuspec.errors import CacheError
from cpuspec.formats.tensor import U8
from cpuspec.metrics import PrefixStats
from cpuspec.model.cache import KVCache
from cpuspec.sequence import shared_prefix
from cpuspec.speculation.prefix_files import ROOT, PrefixDirectory, PrefixFiles, PrefixPart, prefix_key
from cpuspec.speculation.prefix_queue import PrefixQueue, PrefixRead


@dataclass(slots=True, eq=False)
class _Block:
    """Keys and values of consecutive tokens, or a snapshot of states, which is a block without children."""

    key: bytes
    parent: "_Block | None"
    tokens: list[int]
    depth: int = 0  # how many blocks come before it
    data: U8 | None = None  # None while it is not in memory
    pending: U8 | None = None  # its data while they wait to be written
    is_filed: bool = False  # whether it is on the disk
    used: int = 0  # the time of the last use, never later than the parent's
    used_ns: int = 0  # the time of use that its file gets
    children: "dict[bytes, _Block]" = field(default_factory=dict)
    snapshots: "dict[bytes, _Block]" = field(default_factory=dict)  # those whose tokens end in a child's place
    is_snapshot: bool = False


@dataclass(slots=True)
class _Reading:
    """Blocks that are read for a sequence. found: those that were read, by key. absent: those that the present read wants."""

    found: dict[bytes, U8] = field(default_factory=dict)
    absent: list[_Block] = field(default_factory=list)
    read: PrefixRead | None = None


class PrefixStore:
    """The prefixes of one cache that has blocks. queue: of the directory for blocks that leave the memory; None: they are dropped.

    hidden_layers, hidden_size: as in `PrefixFiles`. The caller gives times of use as rising numbers. No call waits for the disk,
    except the constructor, `read_file` and the calls that `file_writer` returns.
    """

    def __init__(
        self, cache: KVCache, vocab_size: int, queue: PrefixQueue | None, hidden_layers: tuple[int, ...] = (), hidden_size: int = 0
    ) -> None:
        assert cache.blocks, "asked of caches that have blocks only"
        self.num_evictions = 0  # blocks that left the memory to make room
        self.queue = queue
        self._readings: dict[int, _Reading] = {}  # by sequence
        self._unwritten: deque[_Block] = deque()  # blocks whose files could not be written
        self._cache, self._size = cache, cache.blocks.size
        self._files = PrefixFiles(cache, vocab_size, hidden_layers, hidden_size)
        self._roots: dict[bytes, _Block] = {}  # of the trees that have blocks, by key
        if queue:
            self._find_files(queue.directory)

    @property
    def arrays(self) -> list[U8]:
        """The blocks and snapshots in memory."""
        return [block.data for block in self._blocks() if block.data is not None]

    @property
    def oldest(self) -> int | None:
        """When the block that `evict` would drop was used; None if no block is in memory."""
        return min((block.used for block in self._blocks() if block.data is not None), default=None)

    def completed(self, stats: PrefixStats) -> PrefixStats:
        """The figures of a model's prefix cache, completed by those of the store."""
        stats = replace(stats, num_evictions=self.num_evictions)
        if self.queue is None:
            return stats
        disk = self.queue.directory
        return replace(
            stats,
            disk_bytes=disk.num_bytes,
            num_blocks_read=disk.num_read,
            num_blocks_written=disk.num_written,
            num_blocks_refused=disk.num_refused,
            num_blocks_dropped=self.queue.num_dropped,
        )

    def length(self, tokens: list[int], salt: str = "") -> int:
        """How many leading tokens are stored, in memory or on the disk."""
        return sum(number for _, number in self._match(tokens, salt))

    def num_known(self, tokens: list[int], salt: str = "") -> int:
        """How many leading tokens have keys and values stored, with or without states after them."""
        return sum(number for _, number in self._blocks_of(tokens, salt, bool)[0])

    def loadable(self, tokens: list[int], salt: str, reader: int) -> int:
        """How many leading tokens `load` would put into a slot."""
        return sum(number for _, number, _ in self._loaded(tokens, salt, reader))

    def load(self, slot: int, tokens: list[int], used: int, salt: str, reader: int, until: int | None = None) -> int:
        """Put the leading tokens that are in memory or were read for `reader` into a slot; returns how many it holds then.

        The slot is empty, or holds some blocks of these tokens. until: how many tokens are enough for now.
        """
        start = 0
        for block, number, data in self._loaded(tokens, salt, reader):
            if until is not None and self._cache.lengths[slot] >= until:
                return self._cache.lengths[slot]
            block.data, block.used = data, used
            if block.is_snapshot:
                self._cache.restore_snapshot(slot, self._cache.lengths[slot], data)
            elif start >= self._cache.lengths[slot]:
                self._cache.append_block(slot, data, number)
            start += number
        self.forget(reader)
        return self._cache.lengths[slot]

    def poll(self, tokens: list[int], salt: str, reader: int, more_than: int) -> bool:
        """Begin or continue to read a prefix of more than `more_than` tokens from the disk; returns whether some is still to come.

        reader: the id of the sequence for which `load` or `forget` will be called.
        """
        if self.queue is None:
            return False
        reading = self._readings.get(reader, _Reading())
        if reading.read:
            if self.queue.poll(reading.read):
                return True
            read, reading.read = reading.read, None
            reading.found |= zip([block.key for block in reading.absent], read.found, strict=False)
            if read.is_missing and len(reading.absent) > len(read.found):
                self._remove(reading.absent[len(read.found)])
        elif reader in self._readings:
            return False
        found = self._match(tokens, salt)
        if sum(number for _, number in found) <= more_than:
            return False
        for block, _ in found:
            if block.data is None:
                block.data = block.pending  # None if it was written
        reading.absent = [block for block, _ in found if block.data is None and block.key not in reading.found]
        if not reading.absent:
            return False
        reading.read = self.queue.read(self._files, [block.key for block in reading.absent])
        self._readings[reader] = reading
        return reading.read is not None

    def forget(self, reader: int) -> None:
        """End a sequence's read, and forget the blocks that were read for it."""
        if (reading := self._readings.pop(reader, None)) and reading.read:
            reading.read.is_done = True

    def copy_from_slot(self, slot: int, tokens: list[int], used: int, salt: str = "") -> None:
        """Store `tokens`, which the slot begins with, and its snapshots of them. A block that is stored is not copied again."""
        parent, snapshots = self._root(salt), self._cache.snapshots(slot)
        for start in range(0, len(tokens), self._size):
            part = tokens[start : start + self._size]
            for length, data in snapshots.items():
                if start < length <= start + len(part):
                    self._add_snapshot(parent, tokens[start:length], data, used)
            child = parent.children.get(prefix_key(parent.key, part))
            if child is None:
                if len(part) < self._size and any(one.tokens[: len(part)] == part for one in parent.children.values()):
                    return
                child = self._add(parent, part, self._cache.read_block(slot, start // self._size, len(part)))
            child.used = max(child.used, used)
            parent = child

    def evict(self) -> None:
        """Drop the least recently used block from memory, the last of its prefix first. `oldest` must not be None."""
        block = min((one for one in self._blocks() if one.data is not None), key=lambda one: (one.used, -one.depth))
        self.num_evictions += 1
        self._write(block, time.time_ns())
        block.data = None
        if self.queue is None:
            self._remove(block)
        while self._unwritten:
            lost = self._unwritten.popleft()
            if lost.data is None and lost.pending is None and not lost.is_filed:
                self._remove(lost)

    def spill(self) -> None:
        """Have all blocks in memory written, the most recently used first. These also stay longest on the disk."""
        now_ns = time.time_ns()
        for number, block in enumerate(sorted(self._blocks(), key=lambda one: (-one.used, one.depth))):
            self._write(block, now_ns - 1000 * number, is_bounded=False)

    def clear(self) -> None:
        """Forget everything, on the disk, too."""
        for block in list(self._blocks()):
            self._remove(block)

    def file_writer(self, path: Path, tokens: list[int], salt: str = "") -> Callable[[], int]:
        """A call that writes the leading tokens that are stored to a file, and returns how many these are.

        Any thread may make the call at any time. It raises CacheError and OSError.
        """
        directory = self.queue.directory if self.queue else None
        states = self._cache.states
        held = [(one, number, one.pending if one.data is None else one.data) for one, number in self._match(tokens, salt)]

        def save() -> int:
            part = PrefixPart(ROOT, [], [])
            for one, number, data in held:
                block = directory.read(self._files, one.key) if data is None and directory else data
                if block is None:
                    break
                if one.is_snapshot and states:
                    part = part._replace(states=block[: states.size(len(part.tokens))])
                else:
                    part.tokens.extend(one.tokens[:number])
                    part.blocks.append(block[: self._cache.block_shape(number)[0]].copy())
            if not part.tokens or (states and part.states is None):
                raise CacheError("no prefix of this prompt is in the cache, so there is nothing to save; run the prompt first")
            self._files.write(path, part)
            return len(part.tokens)

        return save

    def read_file(self, path: Path) -> PrefixPart:
        """The prefix that a `file_writer` wrote. Any thread may call this at any time. Raises CacheError."""
        part = self._files.read(path)
        if part.parent != ROOT or not part.blocks or (part.states is None) != (self._cache.states is None):
            raise CacheError(f"{path} holds the middle of a prefix; wanted a file that save_prefix wrote")
        return part

    def insert(self, part: PrefixPart, used: int, salt: str = "") -> int:
        """Store the tokens of a prefix that was read; returns how many."""
        parent = self._root(salt)
        for number, data in enumerate(part.blocks):
            tokens = part.tokens[number * self._size : (number + 1) * self._size]
            if part.states is not None and number == len(part.blocks) - 1:
                self._add_snapshot(parent, tokens, part.states, used)
            child = parent.children.get(prefix_key(parent.key, tokens)) or self._add(parent, tokens, data)
            if child.data is None:
                child.data = data
            child.used, parent = used, child
        return len(part.tokens)

    def _blocks(self) -> Iterator[_Block]:
        """Every block and snapshot, parents first."""
        waiting = list(self._roots.values())
        while waiting:
            parent = waiting.pop()
            waiting.extend(parent.children.values())
            yield from (*parent.children.values(), *parent.snapshots.values())

    def _root(self, salt: str) -> _Block:
        """The root of a salt's tree, made if need be."""
        key = _salt_key(salt)
        return self._roots.setdefault(key, _Block(key, None, []))

    def _blocks_of(
        self, tokens: list[int], salt: str, is_there: Callable[[_Block], bool]
    ) -> tuple[list[tuple[_Block, int]], list[tuple[int, _Block]]]:
        """The stored blocks that the tokens begin with, each with its number of tokens; and their snapshots, each with its length.

        is_there: whether a block counts.
        """
        found: list[tuple[_Block, int]] = []
        snapshots: list[tuple[int, _Block]] = []
        parent, length = self._roots.get(_salt_key(salt)), 0
        while parent and length < len(tokens):
            part = tokens[length : length + self._size]
            for one in parent.snapshots.values():
                if one.tokens == part[: len(one.tokens)] and is_there(one):
                    snapshots.append((length + len(one.tokens), one))
            child, number = parent.children.get(prefix_key(parent.key, part)), len(part)
            if child is None:
                alike = [(shared_prefix(one.tokens, part), one) for one in parent.children.values()]
                number, child = max(alike, key=lambda one: one[0], default=(0, None))
            if child is None or not number or not is_there(child):
                break
            found.append((child, number))
            length += number
            parent = child if number == self._size else None
        return found, [one for one in snapshots if one[0] <= length]

    def _match(self, tokens: list[int], salt: str, is_there: Callable[[_Block], bool] = bool) -> list[tuple[_Block, int]]:
        """The stored blocks that the tokens begin with, each with its number of tokens. All but the last one are whole.

        For a cache with states they end at the longest snapshot, which follows them with no tokens of its own.
        """
        found, snapshots = self._blocks_of(tokens, salt, is_there)
        if self._cache.states is None or not snapshots:
            return [] if self._cache.states else found
        length, snapshot = max(snapshots, key=lambda one: one[0])
        starts = range(0, length, self._size)
        return [
            *((block, min(number, length - start)) for (block, number), start in zip(found, starts, strict=False)),
            (snapshot, 0),
        ]

    def _add_snapshot(self, parent: _Block, tokens: list[int], data: U8, used: int) -> None:
        """Store a snapshot of states after these tokens, which follow the parent's."""
        key = self._files.state_key(parent.key, tokens)
        one = parent.snapshots.setdefault(key, _Block(key, parent, tokens, parent.depth + 1, is_snapshot=True))
        one.data = data if one.data is None else one.data
        one.used = max(one.used, used)

    def _add(self, parent: _Block, tokens: list[int], data: U8) -> _Block:
        """Store a new block. Shorter blocks that it begins with are removed."""
        block = _Block(prefix_key(parent.key, tokens), parent, tokens, parent.depth + 1, data)
        shorter = [one for one in parent.children.values() if tokens[: len(one.tokens)] == one.tokens]
        parent.children[block.key] = block
        for one in shorter:
            block.used = max(block.used, one.used)
            self._remove(one)
        return block

    def _remove(self, block: _Block) -> None:
        """Forget a block and all blocks that follow it."""
        assert block.parent, "the root stays"
        if self.queue and (block.is_filed or block.pending is not None):
            self.queue.remove(self._files, block.key)
        siblings = block.parent.snapshots if block.is_snapshot else block.parent.children
        if siblings.get(block.key) is block:
            del siblings[block.key]
        if block.parent.parent is None and not block.parent.children and not block.parent.snapshots:
            self._roots.pop(block.parent.key, None)

    def _loaded(self, tokens: list[int], salt: str, reader: int) -> list[tuple[_Block, int, U8]]:
        """The blocks of `_match` that are in memory, or were read for the sequence `reader`, with their data."""
        found = self._readings[reader].found if reader in self._readings else {}

        def data(block: _Block) -> U8 | None:
            return next((one for one in (block.data, block.pending, found.get(block.key)) if one is not None), None)

        matched = self._match(tokens, salt, lambda block: data(block) is not None)
        return [(block, number, there) for block, number in matched if (there := data(block)) is not None]

    def _write(self, block: _Block, used_ns: int, is_bounded: bool = True) -> None:
        """Have a block in memory written. If its file exists already, the queue only notes the time of use."""
        block.used_ns = used_ns
        if self.queue and block.data is not None and block.pending is None and block.parent:
            block.pending = block.data
            blocks, states = ([], block.data) if block.is_snapshot else ([block.data], None)
            part = PrefixPart(block.parent.key, block.tokens, blocks, states)
            report = partial(_written, block, self._unwritten)
            self.queue.write(self._files, part, lambda: block.used_ns, report, is_bounded)

    def _find_files(self, directory: PrefixDirectory) -> None:
        """Add the blocks on the disk to the trees. A parent without a file is a salt's root, or was lost with all that follows."""
        parts = directory.parts(self._files)
        children: dict[bytes, list[tuple[bytes, PrefixPart]]] = {}
        for key, part in parts.items():
            children.setdefault(part.parent, []).append((key, part))
        self._roots |= {key: _Block(key, None, []) for key in children if key not in parts}
        waiting = list(self._roots.values())
        while waiting:
            parent = waiting.pop()
            if parent.parent and len(parent.tokens) < self._size:
                continue
            for key, part in children.pop(parent.key, []):
                if len(part.tokens) > self._size:
                    continue
                block = _Block(key, parent, part.tokens, parent.depth + 1, is_filed=True, is_snapshot=not part.blocks)
                if block.is_snapshot:
                    parent.snapshots[key] = block
                else:
                    parent.children[key] = block
                    waiting.append(block)


def _written(block: _Block, unwritten: deque[_Block], is_there: bool) -> None:
    """Note that a write has ended. Any thread may call it: readers look at `pending` before `is_filed`."""
    block.is_filed = is_there
    block.pending = None
    if not is_there:
        unwritten.append(block)


def _salt_key(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16).digest() if salt else ROOT

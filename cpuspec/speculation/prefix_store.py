"""Prefixes of finished requests outside of the cache's slots: blocks of keys and values, shared by all that begin alike.

Blocks form a tree: a block's tokens follow its parent's, and its key is a hash of all tokens up to its end. So a beginning that
several prompts share is stored once. A block with fewer tokens than `BlockAccess.size` ends its prefix. Each salt
(`SamplingParams.cache_salt`) has a tree of its own; the root's key is a hash of the salt.

Of a model with recurrent layers the tree has snapshots of their states, too, beside the blocks of keys and values that they end
in. A prefix is of use up to a snapshot of its very tokens.
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
    """depth: how many blocks come before it. data: None while it is not in memory. waiting: its data while they wait to be written.
    used: the time of the last use, never later than the parent's. used_ns: the time that its file is to have.
    snapshots: of states, each after the tokens of this block and some more, as a block without children.
    """

    key: bytes
    parent: "_Block | None"
    tokens: list[int]
    depth: int = 0
    data: U8 | None = None
    waiting: U8 | None = None
    is_filed: bool = False
    used: int = 0
    used_ns: int = 0
    children: "dict[bytes, _Block]" = field(default_factory=dict)
    snapshots: "dict[bytes, _Block]" = field(default_factory=dict)
    is_snapshot: bool = False


@dataclass(slots=True)
class _Reading:
    """What is read for a sequence. found: what was read so far, by key. absent: what the present read asks for, if there is one."""

    found: dict[bytes, U8] = field(default_factory=dict)
    absent: list[_Block] = field(default_factory=list)
    read: PrefixRead | None = None


class PrefixStore:
    """The prefixes of one cache that has blocks. queue: of the directory for blocks that leave the memory; None: they are dropped.

    hidden_layers, hidden_size: as in `PrefixFiles`.
    The caller gives times of use as rising numbers. No call waits for the disk, except the constructor and calls of `PrefixFiles`.
    """

    def __init__(
        self,
        cache: KVCache,
        vocab_size: int,
        queue: PrefixQueue | None,
        hidden_layers: tuple[int, ...] = (),
        hidden_size: int = 0,
    ) -> None:
        assert cache.blocks, "asked of caches that have blocks only"
        self.num_evictions = 0  # blocks that left the memory to make room
        self.queue = queue
        self._reads: dict[int, _Reading] = {}  # by sequence
        self._unwritten: deque[_Block] = deque()  # blocks whose files could not be written
        self._cache, self._size = cache, cache.blocks.size
        self._files = PrefixFiles(cache, vocab_size, hidden_layers, hidden_size)
        self._roots: dict[bytes, _Block] = {}  # of the trees that have blocks, by key
        if queue:
            self._find_files(queue.directory)

    @property
    def arrays(self) -> list[U8]:
        """What is in memory."""
        return [block.data for block in self._blocks() if block.data is not None]

    @property
    def oldest(self) -> int | None:
        """The time of use of the block in memory that `evict` would take; None if there is none."""
        return min((block.used for block in self._blocks() if block.data is not None), default=None)

    def told(self, stats: PrefixStats) -> PrefixStats:
        """The figures of a model's prefix cache, with those that the store knows."""
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
        """How many leading tokens it holds, in memory or on the disk."""
        return sum(number for _, number in self._match(tokens, salt))

    def num_known(self, tokens: list[int], salt: str = "") -> int:
        """How many leading tokens it has keys and values of, with or without states behind them."""
        return sum(number for _, number in self._blocks_of(tokens, salt, bool)[0])

    def loadable(self, tokens: list[int], salt: str, reader: int) -> int:
        """How many leading tokens `load` would put into a slot."""
        return sum(number for _, number, _ in self._at_hand(tokens, salt, reader))

    def load(self, slot: int, tokens: list[int], used: int, salt: str, reader: int) -> int:
        """Put the leading tokens that are in memory, or were read for a sequence, into an empty slot; returns how many."""
        for block, number, data in self._at_hand(tokens, salt, reader):
            block.data, block.used = data, used
            if block.is_snapshot:
                self._cache.restore_snapshot(slot, self._cache.lengths[slot], data)
            else:
                self._cache.append_block(slot, data, number)
        self.forget(reader)
        return self._cache.lengths[slot]

    def poll(self, tokens: list[int], salt: str, reader: int, more_than: int) -> bool:
        """Begin to read a prefix of more than `more_than` tokens from the disk, or go on; returns whether it is still on its way.

        reader: the id of the sequence that `load` will be called for, unless `forget` is.
        """
        if self.queue is None:
            return False
        reading = self._reads.get(reader, _Reading())
        if reading.read:
            if self.queue.poll(reading.read):
                return True
            read, reading.read = reading.read, None
            reading.found |= zip([block.key for block in reading.absent], read.found, strict=False)
            if read.is_missing and len(reading.absent) > len(read.found):
                self._remove(reading.absent[len(read.found)])
        elif reader in self._reads:
            return False
        found = self._match(tokens, salt)
        if sum(number for _, number in found) <= more_than:
            return False
        for block, _ in found:
            if block.data is None:
                block.data = block.waiting  # which is gone as soon as it is written
        reading.absent = [block for block, _ in found if block.data is None and block.key not in reading.found]
        if not reading.absent:
            return False
        reading.read = self.queue.read(self._files, [block.key for block in reading.absent])
        self._reads[reader] = reading
        return reading.read is not None

    def forget(self, reader: int) -> None:
        """End a read, and forget what was read for a sequence."""
        if (reading := self._reads.pop(reader, None)) and reading.read:
            reading.read.is_done = True

    def save(self, slot: int, tokens: list[int], used: int, salt: str = "") -> None:
        """Hold `tokens`, which the slot begins with, and its snapshots of them. A block that is there is not copied again."""
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
        """Let the longest unused block leave the memory, the last of its prefix first. Call it where `oldest` is not None."""
        block = min((one for one in self._blocks() if one.data is not None), key=lambda one: (one.used, -one.depth))
        self.num_evictions += 1
        self._write(block, time.time_ns())
        block.data = None
        if self.queue is None:
            self._remove(block)
        while self._unwritten:
            lost = self._unwritten.popleft()
            if lost.data is None and lost.waiting is None and not lost.is_filed:
                self._remove(lost)

    def spill(self) -> None:
        """Have everything written that is in memory: what was used last goes first, and is the last to leave the disk, too."""
        now_ns = time.time_ns()
        for number, block in enumerate(sorted(self._blocks(), key=lambda one: (-one.used, one.depth))):
            self._write(block, now_ns - 1000 * number, is_bounded=False)

    def clear(self) -> None:
        """Forget everything, on the disk, too."""
        for block in list(self._blocks()):
            self._remove(block)

    def saving(self, path: Path, tokens: list[int], salt: str = "") -> Callable[[], int]:
        """A call that saves the leading tokens that it holds, and returns how many these are.

        It may run beside everything else. Raises CacheError and OSError.
        """
        directory = self.queue.directory if self.queue else None
        states = self._cache.states
        held = [(one, number, one.waiting if one.data is None else one.data) for one, number in self._match(tokens, salt)]

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

    def saved(self, path: Path) -> PrefixPart:
        """What `saving` wrote to a file. May be called beside everything else. Raises CacheError."""
        part = self._files.read(path)
        if part.parent != ROOT or not part.blocks or (part.states is None) != (self._cache.states is None):
            raise CacheError(f"{path} holds the middle of a prefix; wanted a file that save_prefix wrote")
        return part

    def hold(self, part: PrefixPart, used: int, salt: str = "") -> int:
        """Hold the tokens of a saved prefix; returns how many."""
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
        """The root of a salt's tree, which has blocks or is about to get some."""
        key = _salt_key(salt)
        return self._roots.setdefault(key, _Block(key, None, []))

    def _blocks_of(
        self, tokens: list[int], salt: str, is_there: Callable[[_Block], bool]
    ) -> tuple[list[tuple[_Block, int]], list[tuple[int, _Block]]]:
        """The blocks that the tokens begin with, and how many tokens of each; and the snapshots of them, by their length."""
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
        """The blocks that the tokens begin with, and how many tokens of each; all but the last are whole.

        Of a cache with states these are the ones up to a snapshot, the longest of those that are there, and that follows them.
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
        """Hold a snapshot of states after these tokens, which follow the parent's."""
        key = self._files.state_key(parent.key, tokens)
        one = parent.snapshots.setdefault(key, _Block(key, parent, tokens, parent.depth + 1, is_snapshot=True))
        one.data = data if one.data is None else one.data
        one.used = max(one.used, used)

    def _add(self, parent: _Block, tokens: list[int], data: U8) -> _Block:
        """A new block. Ends of prefixes that it continues are there no more."""
        block = _Block(prefix_key(parent.key, tokens), parent, tokens, parent.depth + 1, data)
        shorter = [one for one in parent.children.values() if tokens[: len(one.tokens)] == one.tokens]
        parent.children[block.key] = block
        for one in shorter:
            block.used = max(block.used, one.used)
            self._remove(one)
        return block

    def _remove(self, block: _Block) -> None:
        """Forget a block and all that follow it."""
        assert block.parent, "the root stays"
        if self.queue and (block.is_filed or block.waiting is not None):
            self.queue.remove(self._files, block.key)
        siblings = block.parent.snapshots if block.is_snapshot else block.parent.children
        if siblings.get(block.key) is block:
            del siblings[block.key]
        if block.parent.parent is None and not block.parent.children and not block.parent.snapshots:
            self._roots.pop(block.parent.key, None)

    def _at_hand(self, tokens: list[int], salt: str, reader: int) -> list[tuple[_Block, int, U8]]:
        """What `_match` finds of what is in memory, or was read for a sequence, with its data."""
        found = self._reads[reader].found if reader in self._reads else {}

        def data(block: _Block) -> U8 | None:
            return next((one for one in (block.data, block.waiting, found.get(block.key)) if one is not None), None)

        matched = self._match(tokens, salt, lambda block: data(block) is not None)
        return [(block, number, there) for block, number in matched if (there := data(block)) is not None]

    def _write(self, block: _Block, used_ns: int, is_bounded: bool = True) -> None:
        """Have a block written that is in memory; where it is on the disk already, have it noted that it is used."""
        block.used_ns = used_ns
        if self.queue and block.data is not None and block.waiting is None and block.parent:
            block.waiting = block.data
            blocks, states = ([], block.data) if block.is_snapshot else ([block.data], None)
            part = PrefixPart(block.parent.key, block.tokens, blocks, states)
            report = partial(_written, block, self._unwritten)
            self.queue.write(self._files, part, lambda: block.used_ns, report, is_bounded)

    def _find_files(self, directory: PrefixDirectory) -> None:
        """Know the blocks on the disk. A parent without a file is the root of a salt's tree, or its blocks are found by nobody."""
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
    """Take note of a write that has ended. Any thread may call it: what it changes is read in the reverse order."""
    block.is_filed = is_there
    block.waiting = None
    if not is_there:
        unwritten.append(block)


def _salt_key(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16).digest() if salt else ROOT

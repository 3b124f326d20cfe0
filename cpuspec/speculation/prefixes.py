"""Prefixes of finished requests outside of the cache's slots: blocks of keys and values, shared by all that begin alike.

Blocks hang together as a tree: a block follows its parent's tokens, and its key is a hash of all tokens up to its end. So tokens
that several prompts begin with are there once. A block with fewer tokens than `BlockAccess.size` ends its prefix. Each salt
(`SamplingParams.cache_salt`) has a tree of its own, whose root's key is a hash of the salt.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cpuspec.errors import CacheError
from cpuspec.formats.tensor import U8
from cpuspec.model.cache import KVCache
from cpuspec.sequence import shared_prefix
from cpuspec.speculation.prefix_files import ROOT, PrefixDirectory, PrefixFiles, PrefixPart, prefix_key


@dataclass(slots=True, eq=False)
class _Block:
    """depth: how many blocks come before it. data: None while it is on the disk only. used: the time of the last use, never later
    than the parent's.
    """

    key: bytes
    parent: "_Block | None"
    tokens: list[int]
    depth: int = 0
    data: U8 | None = None
    is_filed: bool = False
    used: int = 0
    children: "dict[bytes, _Block]" = field(default_factory=dict)


class PrefixStore:
    """The prefixes of one cache that has blocks. directory: where blocks go that leave the memory; None for nowhere.

    Times of use are numbers that rise, given by the caller.
    """

    def __init__(self, cache: KVCache, vocab_size: int, directory: PrefixDirectory | None) -> None:
        assert cache.blocks, "asked of caches that have blocks only"
        self.num_evictions = 0  # blocks that left the memory to make room
        self.directory = directory
        self._cache, self._size, self._step = cache, cache.blocks.size, cache.blocks.step
        self._files = PrefixFiles(cache, vocab_size)
        self._roots: dict[bytes, _Block] = {}  # of the trees that have blocks, by key
        if directory:
            self._find_files(directory)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return sum(block.data.nbytes for block in self._blocks() if block.data is not None)

    @property
    def oldest(self) -> int | None:
        """The time of use of the block in memory that `evict` would take; None if there is none."""
        return min((block.used for block in self._blocks() if block.data is not None), default=None)

    def length(self, tokens: list[int], salt: str = "") -> int:
        """How many leading tokens it holds, in memory or on the disk."""
        return sum(number for _, number in self._match(tokens, salt))

    def load(self, slot: int, tokens: list[int], used: int, salt: str = "") -> int:
        """Put the leading tokens that it holds into an empty slot; returns how many these are."""
        for block, number in self._match(tokens, salt):
            data = self._data(block)
            if data is None:
                break
            block.used = used
            self._cache.append_block(slot, data, number)
        return self._cache.lengths[slot]

    def save(self, slot: int, tokens: list[int], used: int, salt: str = "") -> None:
        """Hold `tokens`, which the slot begins with, up to the last whole step. What is there already is not copied again."""
        if len(tokens) < self._step:
            return
        parent = self._root(salt)
        for start in range(0, len(tokens), self._size):
            part = tokens[start : start + self._size]
            part = part[: len(part) // self._step * self._step]
            if not part:
                return
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
        self._file(block)
        self.num_evictions += 1
        if block.is_filed:
            block.data = None
        else:
            self._remove(block)

    def spill(self) -> None:
        """Write everything that is in memory to the disk; what was used last is the last to leave there, too."""
        for block in sorted(self._blocks(), key=lambda one: (one.used, -one.depth)):
            self._file(block)

    def clear(self) -> None:
        """Forget everything, on the disk, too."""
        for block in list(self._blocks()):
            self._remove(block)

    def write_file(self, path: Path, tokens: list[int], salt: str = "") -> int:
        """Save the leading tokens that it holds, up to the last whole step; returns how many. Raises CacheError and OSError."""
        part = PrefixPart(ROOT, [], [])
        for block, shared in self._match(tokens, salt):
            number, data = shared // self._step * self._step, self._data(block)
            if not number or data is None:
                break
            part.tokens.extend(block.tokens[:number])
            part.blocks.append(data[:, :, : self._cache.block_shape(number)[2]].copy())
        if not part.tokens:
            raise CacheError("no prefix of this prompt is in the cache, so there is nothing to save; run the prompt first")
        self._files.write(path, part)
        return len(part.tokens)

    def read_file(self, path: Path, used: int, salt: str = "") -> int:
        """Hold the tokens of a file that `write_file` wrote; returns how many. Raises CacheError."""
        part = self._files.read(path)
        if part.parent != ROOT:
            raise CacheError(f"{path} holds the middle of a prefix; wanted a file that save_prefix wrote")
        parent = self._root(salt)
        for number, data in enumerate(part.blocks):
            tokens = part.tokens[number * self._size : (number + 1) * self._size]
            child = parent.children.get(prefix_key(parent.key, tokens)) or self._add(parent, tokens, data)
            if child.data is None:
                child.data = data
            child.used, parent = used, child
        return len(part.tokens)

    def _blocks(self) -> Iterator[_Block]:
        """Every block, parents first."""
        waiting = [block for root in self._roots.values() for block in root.children.values()]
        while waiting:
            block = waiting.pop()
            waiting.extend(block.children.values())
            yield block

    def _root(self, salt: str) -> _Block:
        """The root of a salt's tree, which has blocks or is about to get some."""
        key = _salt_key(salt)
        return self._roots.setdefault(key, _Block(key, None, []))

    def _match(self, tokens: list[int], salt: str) -> list[tuple[_Block, int]]:
        """The blocks that the tokens begin with, and how many tokens of each; all but the last are whole."""
        found: list[tuple[_Block, int]] = []
        parent = self._roots.get(_salt_key(salt))
        if parent is None:
            return found
        for start in range(0, len(tokens), self._size):
            part = tokens[start : start + self._size]
            child = parent.children.get(prefix_key(parent.key, part))
            if child is None:
                alike = [(shared_prefix(one.tokens, part), one) for one in parent.children.values()]
                number, child = max(alike, key=lambda one: one[0], default=(0, parent))
                return [*found, (child, number)] if number else found
            found.append((child, len(part)))
            parent = child
        return found

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
        if block.is_filed and self.directory:
            self.directory.remove(self._files, block.key)
        block.parent.children.pop(block.key, None)
        if block.parent.parent is None and not block.parent.children:
            self._roots.pop(block.parent.key, None)

    def _data(self, block: _Block) -> U8 | None:
        """The bytes of a block, from the disk if need be. A block whose file is gone is forgotten."""
        if block.data is None and self.directory:
            block.data = self.directory.read(self._files, block.key)
        if block.data is None:
            self._remove(block)
        return block.data

    def _file(self, block: _Block) -> None:
        """Write a block that is in memory to the disk; where it is there already, note that it is used."""
        if self.directory and block.data is not None and block.parent:
            block.is_filed = self.directory.touch(self._files, block.key) or self.directory.write(
                self._files, PrefixPart(block.parent.key, block.tokens, [block.data])
            )

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
                if len(part.tokens) <= self._size:
                    parent.children[key] = _Block(key, parent, part.tokens, parent.depth + 1, is_filed=True)
                    waiting.append(parent.children[key])


def _salt_key(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16).digest() if salt else ROOT

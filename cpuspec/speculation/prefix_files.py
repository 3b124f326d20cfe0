"""Prefixes in files: one line of JSON, then keys and values in blocks, then states of recurrent layers. Files are untrusted input.

The line names the model, its arithmetic and the layout (`KVCache.identity`), the tokens, and a checksum. A file that does not fit
is refused: keys, values and states that differ from those that the model would compute give wrong answers.
"""

import hashlib
import json
import logging
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from cpuspec.checkpoints.fields import Fields, parse_json_object
from cpuspec.environment import who_else_writes
from cpuspec.errors import CacheError, CheckpointError, ConfigError
from cpuspec.files import replacing
from cpuspec.formats.tensor import U8
from cpuspec.model.cache import KVCache

ROOT = b""  # the key of no tokens

_FORMAT = 2  # version of the files
_SUFFIX = ".prefix"
_MAX_TOKEN_BYTES = 12  # of the text of an id and its separator
_MAX_OTHER_BYTES = 1000  # of the rest of the line
_ABANDONED_S = 3600.0  # the writer of an unfinished file that is older than this is gone

_log = logging.getLogger(__name__)


class PrefixPart(NamedTuple):
    """Consecutive tokens with their keys and values. parent: the key of the tokens before them.

    states: of recurrent layers after the tokens, or None. A file of a directory has either blocks or states.
    """

    parent: bytes
    tokens: list[int]
    blocks: list[U8]
    states: U8 | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states."""
        return sum(block.nbytes for block in self.arrays)

    @property
    def arrays(self) -> list[U8]:
        """Blocks and states, in the order of a file."""
        return self.blocks if self.states is None else [*self.blocks, self.states]


def prefix_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the tokens of `parent` followed by `tokens`: a hash of all of them."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class PrefixFiles:
    """Writes and reads parts of prefixes of one cache. vocab_size: token ids are below it.

    hidden_layers: whose outputs follow the states in a file of states; hidden_size: numbers of each.
    """

    def __init__(self, cache: KVCache, vocab_size: int, hidden_layers: tuple[int, ...] = (), hidden_size: int = 0) -> None:
        assert cache.blocks, "asked of caches that have blocks only"
        self._cache, self._blocks, self._vocab_size = cache, cache.blocks, vocab_size
        self._identity = hashlib.sha256(repr((cache.identity, cache.blocks.size, cache.sizes)).encode()).hexdigest()[:32]
        self._of_states = repr(hidden_layers).encode()
        sizes = cache.states.sizes(cache.capacity) if cache.states else ()
        self._state_bytes = {size + beside for size in sizes for beside in (0, 4 * hidden_size * len(hidden_layers))}

    def key(self, part: PrefixPart) -> bytes:
        """The key of a part: a hash of all tokens up to its end. Blocks and states have different keys."""
        return self.state_key(part.parent, part.tokens) if not part.blocks else prefix_key(part.parent, part.tokens)

    def state_key(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The key of the states after these tokens."""
        return prefix_key(parent + self._of_states, tokens)

    def name(self, key: bytes) -> str:
        """The name of the file of a block: files of other models and layouts have other names."""
        return f"{self._identity}-{key.hex()}{_SUFFIX}"

    def key_of(self, name: str) -> bytes | None:
        """The key in a file name that `name` made for this cache; None for other names."""
        identity, _, key = name.removesuffix(_SUFFIX).partition("-")
        with suppress(ValueError):
            if name.endswith(_SUFFIX) and identity == self._identity:
                return bytes.fromhex(key)
        return None

    def write(self, path: Path, part: PrefixPart) -> None:
        """Write a part to `path`, or replace what is there. Raises OSError."""
        checksum = hashlib.blake2b(self.key(part), digest_size=16)
        for block in part.arrays:
            checksum.update(block.data)
        head = {
            "cpuspec": "prefix",
            "format": _FORMAT,
            "identity": self._identity,
            "parent": part.parent.hex(),
            "tokens": part.tokens,
            "blocks": len(part.blocks),
            "states": 0 if part.states is None else part.states.nbytes,
            "bytes": part.nbytes,
            "blake2b": checksum.hexdigest(),
        }
        with replacing(path, mode=0o600) as file:  # it holds a prompt
            file.write(json.dumps(head).encode() + b"\n")
            for block in part.arrays:
                file.write(block.data)

    def read(self, path: Path) -> PrefixPart:
        """The part in a file. Raises CacheError for a file that is missing, damaged, or not of this model and layout."""
        return self._open(path, with_blocks=True)

    def read_tokens(self, path: Path) -> PrefixPart:
        """The part in a file, with empty blocks and states. Raises CacheError as `read` does."""
        return self._open(path, with_blocks=False)

    def _open(self, path: Path, with_blocks: bool) -> PrefixPart:
        try:
            if not path.is_file():  # opening a named pipe would wait for a writer for ever
                raise CacheError(f"{path} is not a file; wanted keys and values that were saved before")
            with path.open("rb") as file:
                return self._read(file, path, with_blocks)
        except OSError as error:
            raise CacheError(f"{path} cannot be read: {error.strerror or error}") from error
        except CheckpointError as error:
            raise CacheError(f"{error}; it is not a file of saved keys and values, or it is damaged") from error
        except ValueError as error:
            raise CacheError(f"{str(path)!r} cannot be read: {error}") from error

    def _read(self, file: BinaryIO, path: Path, with_blocks: bool) -> PrefixPart:
        capacity, size = self._cache.capacity, self._blocks.size
        line = file.readline(_line_bytes(capacity))
        head = Fields(str(path), parse_json_object(line, str(path)))
        if head.text("cpuspec", "") != "prefix" or head.integer("format", 0) != _FORMAT:
            raise CacheError(f"{path} holds no keys and values in format {_FORMAT}; save them again with this version")
        if head.text("identity") != self._identity:
            raise CacheError(
                f"{path} holds keys and values of another model, KV format, processor or version of cpuspec; "
                "prefill the prompt again and save it"
            )
        tokens, parent = head.items("tokens"), head.text("parent")
        if not 1 <= len(tokens) <= capacity:
            raise CacheError(
                f"{path} has {len(tokens)} tokens; wanted 1 to {capacity}: raise context_length, or the file is damaged"
            )
        ids = [token for token in tokens if type(token) is int and 0 <= token < self._vocab_size]
        if len(ids) != len(tokens):
            raise CacheError(f"{path} has tokens that are no ids in [0, {self._vocab_size}); it is damaged")
        num_blocks, of_states = head.integer("blocks"), head.integer("states")
        if num_blocks not in (0, -(-len(ids) // size)) or of_states not in (0, *self._state_bytes) or not num_blocks + of_states:
            raise CacheError(f"{path} has {num_blocks} blocks and {of_states} bytes of states, which {len(ids)} tokens do not have")
        starts = range(0, len(ids), size) if num_blocks else ()
        shapes: list[tuple[int, ...]] = [self._cache.block_shape(min(size, len(ids) - start)) for start in starts]
        shapes += [(of_states,)] if of_states else []
        wanted_bytes, got_bytes = sum(map(prod, shapes)), os.fstat(file.fileno()).st_size - len(line)
        if not head.integer("bytes") == wanted_bytes == got_bytes:
            raise CacheError(f"{path} has {got_bytes} bytes of keys and values; wanted {wanted_bytes} for {len(ids)} tokens")
        arrays = [np.empty(shape if with_blocks else 0, np.uint8) for shape in shapes]
        part = PrefixPart(bytes.fromhex(parent), ids, arrays[:num_blocks], arrays[-1] if of_states else None)
        if with_blocks:
            checksum = hashlib.blake2b(self.key(part), digest_size=16)
            for block in part.arrays:
                if file.readinto(block.data) != block.nbytes:  # type: ignore[attr-defined]
                    raise CacheError(f"{path} became shorter while it was read")
                checksum.update(block.data)
            if checksum.hexdigest() != head.text("blake2b"):
                raise CacheError(f"{path} is damaged: its tokens, keys and values do not agree with their checksum")
        return part


class PrefixDirectory:
    """A directory of blocks that several models and processes may share. The least recently used files are removed first.

    A block that cannot be written or read is no error: its tokens are computed again. Each call waits for the disk, so the thread
    of `PrefixQueue` makes them.

    num_bytes: of all files in it, as last counted, those of other models and processes included.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Make the directory if need be, for this user alone: its files hold prompts. Raises ConfigError."""
        self.num_read = self.num_written = self.num_refused = 0
        self.path = path
        self._max_bytes, self._free_bytes = max_bytes, 0
        self._logged: set[str] = set()  # faults
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if others := who_else_writes(path.stat()):
                _log.warning("the prefix cache %s %s; if you trust nobody, choose a directory of yours", path, others)
        except OSError as error:
            raise ConfigError(f"the prefix cache {path} cannot be used: {error.strerror or error}") from error
        self.num_bytes = sum(size for _, _, size in self._files())

    def parts(self, files: PrefixFiles) -> dict[bytes, PrefixPart]:
        """The parts in files of this cache, by key, with empty blocks. Others, as of a process with other heads, are left alone."""
        keys = [key for _, path, _ in self._files() if (key := files.key_of(path.name))]
        parts = {key: self._part(files, key) for key in keys}
        return {key: part for key, part in parts.items() if part}

    def refresh(self, files: PrefixFiles, part: PrefixPart, used_ns: int) -> bool:
        """Note when a block was used that is to be written; returns whether a file has it, which is not damaged at first sight."""
        key = files.key(part)
        return self._part(files, key) is not None and self.touch(files.name(key), used_ns)

    def _part(self, files: PrefixFiles, key: bytes) -> PrefixPart | None:
        with suppress(CacheError):
            part = files.read_tokens(self.path / files.name(key))
            if files.key(part) == key and len(part.arrays) == 1:
                return part
        return None

    def read(self, files: PrefixFiles, key: bytes) -> U8 | None:
        """The block of a key; None if its file is gone or damaged. A damaged file is removed."""
        path = self.path / files.name(key)
        try:
            part = files.read(path)
            if files.key(part) != key or len(part.arrays) != 1:
                raise CacheError(f"{path} holds other tokens than its name says")
        except CacheError as error:
            if path.exists():
                self.num_refused += 1
                _log.warning("%s; it is removed, and its tokens are computed again", error)
                self.remove(files, key)
            return None
        self.num_read += 1
        self.touch(path.name)
        return part.arrays[0]

    def write(self, files: PrefixFiles, part: PrefixPart, used_ns: int) -> bool:
        """Write a block, which was used at the time `used_ns`; returns whether its file exists then.

        If the directory would be too large, files that were used earlier are removed first.
        """
        name = files.name(files.key(part))
        num_bytes = part.nbytes + _line_bytes(len(part.tokens))
        try:
            if self._free_bytes < num_bytes:
                self._free_up(num_bytes, used_ns)
            if self._free_bytes < num_bytes:
                return False
            self._free_bytes -= num_bytes
            files.write(self.path / name, part)
            self.num_bytes += (self.path / name).stat().st_size
        except OSError as error:
            self.warn(error)
            return False
        self.num_written += 1
        return self.touch(name, used_ns)

    def touch(self, name: str, used_ns: int | None = None) -> bool:
        """Note when a block was used, None for now; returns whether its file exists."""
        try:
            now_ns = time.time_ns() if used_ns is None else used_ns
            os.utime(self.path / name, ns=(now_ns, now_ns))
        except OSError:
            return False
        return True

    def remove(self, files: PrefixFiles, key: bytes) -> None:
        """Remove a block's file."""
        path = self.path / files.name(key)
        with suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self.num_bytes -= size

    def warn(self, error: Exception) -> None:
        """Log a fault of the directory, once for each kind of fault."""
        problem = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        if problem not in self._logged:
            self._logged.add(problem)
            _log.warning("the prefix cache %s cannot be written: %s", self.path, problem)

    def _files(self) -> Iterator[tuple[int, Path, int]]:
        """For each file, unfinished ones included: when it was last used, in ns, its path, and its bytes."""
        with suppress(OSError):
            for path in self.path.glob(f"*{_SUFFIX}*"):
                with suppress(OSError):  # another process may have removed it
                    status = path.stat()
                    yield status.st_mtime_ns, path, status.st_size

    def _free_up(self, num_bytes: int, before_ns: int) -> None:
        """Remove the least recently used files until `num_bytes` more fit, but only files that were used before `before_ns`."""
        files = sorted(self._files())
        kept = sum(size for _, _, size in files)
        for used_ns, path, size in files:
            too_large = used_ns < before_ns and kept + num_bytes > self._max_bytes
            unfinished = path.suffix != _SUFFIX
            if time.time() - used_ns / 1e9 > _ABANDONED_S if unfinished else too_large:
                path.unlink(missing_ok=True)
                kept -= size
        self.num_bytes, self._free_bytes = kept, self._max_bytes - kept


def _line_bytes(num_tokens: int) -> int:
    """The most bytes of the line of a file."""
    return num_tokens * _MAX_TOKEN_BYTES + _MAX_OTHER_BYTES

"""Packed weights on the disk: matrices in the order kernels read, made at a model's first start and mapped at later ones.

A file holds the matrices of one model: an index, checksums, then each matrix at a multiple of 64 bytes. Its name, size and index
are computed from the tensors; a file that has another size or index is written anew. All processes that run the model share the
pages of the mapped file.

`verify_packed` compares files with their checksums. Where a directory cannot be written or a disk is full, every start packs in
memory.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from cpuspec import formats
from cpuspec.backends.disk import DiskFile
from cpuspec.backends.weights import WeightTensor, check_room
from cpuspec.checkpoints.fields import Fields, parse_json_object
from cpuspec.checkpoints.mapped import give_back_pages, map_all_pages, place_in_file
from cpuspec.environment import cache_dir, packed_limit_bytes, sources_digest, who_else_writes
from cpuspec.errors import BackendError, CheckpointError, FormatError
from cpuspec.files import replacing
from cpuspec.formats import Cast
from cpuspec.formats.packing import PackedTensor, aligned_bytes, num_tiles, pack, round_up, tile_bytes
from cpuspec.formats.tensor import U8

# Packing fewer bytes takes no longer than looking for them on the disk.
_SMALLEST_BYTES = 8 << 20

_LAYOUT = 2  # version of the file's layout: files of another version keep names of their own
_PAGE = 4096
_CHECKED_BYTES = 4 << 20  # that one checksum covers
_CHECKSUM_BYTES = 8
_MAX_HEAD_BYTES = 1 << 24
_ABANDONED_S = 3600.0  # an unfinished file that was not written to for this long counts as abandoned

# Odd numbers have inverses modulo 2^64, so that no change of one word leaves a sum of products as it was.
_ODD = np.arange(1, _PAGE // 4, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

_log = logging.getLogger(__name__)

_Way = TypeVar("_Way")

# Taken once: sources that are edited while a process runs did not make its weights.
_FINGERPRINT = sources_digest(formats)


def packed_matrices(
    name: str, tensors: Mapping[str, WeightTensor], threads: int, keep: bool = True, mmap: bool = True
) -> dict[str, PackedTensor]:
    """Every tensor, all of them matrices, in kernel order: mapped from the disk if an earlier start left them there.

    name: the model's, for people who look into the cache. keep: use the disk; without it everything is packed in memory.
    mmap: map the file; without it the file is read into memory.
    """
    why = ""
    with ThreadPoolExecutor(threads) as pool:
        if keep and sum(tensor.num_bytes for tensor in tensors.values()) >= _SMALLEST_BYTES and packed_limit_bytes():
            file = _PackedFile(name, tensors, pool, mmap)
            check_room(file.num_bytes, from_disk=mmap)
            try:
                return file.found_or_made(file.read)
            except (OSError, ValueError) as error:
                why = str(error)
        check_room(sum(map(packed_bytes, tensors.values())), why_not_on_disk=why)
        return dict(zip(tensors, pool.map(_pack, tensors, tensors.values()), strict=True))


def packed_bytes(tensor: WeightTensor) -> int:
    """Bytes of a tensor in kernel order."""
    return num_tiles(tensor.shape) * tile_bytes(tensor.format, tensor.shape[-1])


def packed_file(name: str, tensors: Mapping[str, WeightTensor], threads: int) -> tuple[DiskFile, dict[str, int]]:
    """The file of every tensor in kernel order, to be read piece by piece, and where in it each begins. It is made if need be.

    name: as for `packed_matrices`. Raises BackendError where the file cannot be kept.
    """
    with ThreadPoolExecutor(threads) as pool:
        file = _PackedFile(name, tensors, pool, mmap=False)
        try:
            return file.found_or_made(file.open), file.places
        except (OSError, ValueError) as error:
            raise BackendError(
                f"experts that stay on the disk need {file.num_bytes / 1e9:.1f} GB of packed weights in {packed_directory()}, and "
                f"there are none: {error}; raise CPUSPEC_PACKED_GB, or set CPUSPEC_CACHE to a directory with room"
            ) from error


def verify_packed(threads: int, name: str = "") -> dict[Path, bool]:
    """Compare every file of packed weights with its checksums, and remove those that are damaged.

    name: of a model, as `packed_matrices` was given it; "" for all. Returns for each file whether it was sound.
    """
    found: dict[Path, bool] = {}
    names = re.escape(_readable(name)) if name else ".*"
    with ThreadPoolExecutor(threads) as pool:
        for path, _ in packed_files():
            if re.fullmatch(rf"{names}-[0-9a-f]{{32}}\.packed", path.name):
                with suppress(OSError):  # another process has removed it, or has it mapped
                    found[path] = _is_sound(path, pool)
                    if not found[path]:
                        _log.warning("packed weights %s are damaged and removed; the model is packed anew", path)
                        path.unlink()
    return found


def packed_directory() -> Path:
    """The directory of packed weights."""
    return cache_dir() / "packed"


def packed_files() -> list[tuple[Path, int]]:
    """Every kept file and its bytes, the longest unused first. Files that other processes are writing are among them."""
    found = []
    for path in packed_directory().glob("*.packed*"):
        with suppress(OSError):  # another process may have removed it
            status = path.stat()
            # The time of the last access, which every start sets; that of the last change belongs to the bytes.
            found.append((status.st_atime_ns, path, status.st_size))
    return [(path, size) for _, path, size in sorted(found)]


class _PackedFile:
    """The one file that can hold these tensors."""

    def __init__(self, name: str, tensors: Mapping[str, WeightTensor], pool: Executor, mmap: bool) -> None:
        self._tensors, self._pool, self._mmap = tensors, pool, mmap
        self._offsets: dict[str, int] = {}  # from the first matrix
        index = []
        at = 0
        for tensor_name, tensor in tensors.items():
            num_bytes = packed_bytes(tensor)
            self._offsets[tensor_name] = at
            index.append((tensor_name, tensor.format.name, tensor.shape, at, num_bytes))
            at += round_up(num_bytes, 64)
        identity = (_LAYOUT, _FINGERPRINT, sys.byteorder, index, list(pool.map(_identity, tensors.values())))
        key = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()
        num_bytes = round_up(at, _PAGE)
        head = json.dumps({"cpuspec": "packed weights", "key": key, "bytes": num_bytes, "tensors": index}).encode()
        self._head = head + b"\n" * (round_up(len(head) + 1, _PAGE) - len(head))
        self._start = len(self._head) + _checksum_bytes(num_bytes)
        self.num_bytes = self._start + num_bytes
        self.places = {tensor_name: self._start + offset for tensor_name, offset in self._offsets.items()}
        self._path = packed_directory() / f"{_readable(name)}-{key}.packed"

    def found_or_made(self, look: Callable[[], _Way | None]) -> _Way:
        """The result of `look`, before which everything is packed into the file if need be.

        Raises OSError where the file cannot be written, or not read again.
        """
        found = look()
        if found is None:
            self._write()
            found = look()
        if found is None:
            raise OSError("packed weights that were written cannot be read")
        return found

    def read(self) -> dict[str, PackedTensor] | None:
        """The matrices in the file. None where the file is missing, or has another size or index."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size != self.num_bytes or file.read(len(self._head)) != self._head:
                    return None
                data = self._bytes_of(file)
        except OSError:
            return None
        self._note_use(status)
        return self._matrices(data[self._start :])

    def open(self) -> DiskFile | None:
        """The file to be read piece by piece; None as `read` says."""
        try:
            file = DiskFile(self._path)
            if file.status.st_size != self.num_bytes or file.bytes_at(0, len(self._head)).tobytes() != self._head:
                return None
        except OSError:
            return None
        self._note_use(file.status)
        return file

    def _note_use(self, status: os.stat_result) -> None:
        """Make the file the one that was used last, and warn of others who may write it."""
        if others := who_else_writes(status):
            _log.warning(
                "packed weights are read from %s, which %s; if you trust nobody, set CPUSPEC_CACHE to a directory of yours",
                self._path,
                others,
            )
        with suppress(OSError):
            os.utime(self._path, ns=(time.time_ns(), status.st_mtime_ns))

    def _write(self) -> None:
        """Pack everything into the file. Raises OSError where that cannot be done, leaving nothing behind."""
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _make_room(self._path.parent, self.num_bytes)
        try:
            with replacing(self._path) as file:
                self._fill(file)
        except OSError:
            # Windows replaces no file that another process, which was first, has mapped: then that one is read.
            if not self._path.exists():
                raise

    def _fill(self, file: BinaryIO) -> None:
        file.write(self._head)
        writing = threading.Lock()

        def pack_into_file(name: str) -> None:
            packed = _pack(name, self._tensors[name])
            with writing:
                file.seek(self._start + self._offsets[name])
                file.write(packed.data.data)

        for _ in self._pool.map(pack_into_file, self._tensors):
            pass
        file.truncate(self.num_bytes)
        file.flush()
        checksums = _checksums(map_all_pages(file.fileno(), self.num_bytes)[self._start :], self._pool)
        file.seek(len(self._head))
        file.write(checksums)
        file.flush()
        # A name must not survive a crash that the bytes do not.
        os.fsync(file.fileno())

    def _bytes_of(self, file: BinaryIO) -> U8:
        if self._mmap:
            return map_all_pages(file.fileno(), self.num_bytes)
        data = aligned_bytes((self.num_bytes,))
        file.seek(0)
        if file.readinto(data.data) != self.num_bytes:  # type: ignore[attr-defined]
            raise OSError("the file has become shorter")
        return data

    def _matrices(self, data: U8) -> dict[str, PackedTensor]:
        matrices = {}
        for name, tensor in self._tensors.items():
            tiles = data[self._offsets[name] :][: packed_bytes(tensor)].reshape(num_tiles(tensor.shape), -1)
            matrices[name] = PackedTensor(tensor.format, tensor.shape, tiles)
        return matrices


def _readable(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())[:60].strip("-.") or "model"


def _checksum_bytes(num_bytes: int) -> int:
    """Room for the checksums of `num_bytes`, in whole pages."""
    return round_up(round_up(num_bytes, _CHECKED_BYTES) // _CHECKED_BYTES * _CHECKSUM_BYTES, _PAGE)


def _checksums(data: U8, pool: Executor) -> bytes:
    """The checksums of `data`, which is whole pages, padded with zeros to whole pages."""
    found = pool.map(lambda at: _checksum(data[at : at + _CHECKED_BYTES]), range(0, len(data), _CHECKED_BYTES))
    return b"".join(found).ljust(_checksum_bytes(len(data)), b"\0")


def _checksum(data: U8) -> bytes:
    """A hash of one sum of products for each page: only chance can hide a changed word, a changed page or a changed order.

    It is as fast as memory is read; CRC-32 took seven times as long. It does not protect from weights changed on purpose.
    """
    pages = data.view("<u8").reshape(-1, _PAGE // 8)
    return hashlib.blake2b(np.einsum("ij,j->i", pages, _ODD).tobytes(), digest_size=_CHECKSUM_BYTES).digest()


def content_hash(data: U8) -> str:
    """A hash of bytes, made as a checksum of packed weights is: as fast as memory is read, and no protection from intent."""
    whole = len(data) // _PAGE * _PAGE
    return _checksum(np.ascontiguousarray(data[:whole])).hex() + hashlib.blake2b(data[whole:].tobytes(), digest_size=16).hexdigest()


def _is_sound(path: Path, pool: Executor) -> bool:
    """Whether a file agrees with its own head and checksums. Raises FileNotFoundError if there is none."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            line = file.readline(_MAX_HEAD_BYTES)
            head = Fields(path.name, parse_json_object(line, path.name))
            num_bytes = head.integer("bytes")
            start = round_up(len(line), _PAGE) + _checksum_bytes(num_bytes)
            if num_bytes < _PAGE or num_bytes % _PAGE or size != start + num_bytes or path.stem[-32:] != head.text("key", ""):
                return False
            data = map_all_pages(file.fileno(), size)
        return data[round_up(len(line), _PAGE) : start].tobytes() == _checksums(data[start:], pool)
    except FileNotFoundError:
        raise
    except (CheckpointError, OSError, ValueError):
        return False


def _pack(name: str, tensor: WeightTensor) -> PackedTensor:
    if isinstance(tensor, Cast):
        try:
            source, tensor = tensor.source, tensor.made()
        except FormatError as error:
            raise FormatError(f"{name}: {error}") from error
    else:
        source = tensor
    packed = pack(tensor)
    for matrix in source.parts or (source,):
        give_back_pages(matrix.data)
    return packed


def _identity(tensor: WeightTensor) -> tuple[object, ...]:
    """Facts that change whenever the bytes of a tensor do: a hash of its file and its place there, or a hash of its own.

    Of a cast: those of its source, and of what makes it.
    """
    if isinstance(tensor, Cast):
        return ("cast", tensor.maker, tensor.source.format.name, *_identity(tensor.source))
    if tensor.parts:
        return ("stack", *map(_identity, tensor.parts))
    data = tensor.data.reshape(-1)
    return place_in_file(data) or (content_hash(data),)


def _make_room(directory: Path, num_bytes: int) -> None:
    """Remove the longest unused files until a new one fits into the limit. Raises OSError if the new one must not be written."""
    limit = packed_limit_bytes()
    if num_bytes > limit:
        raise OSError(f"CPUSPEC_PACKED_GB keeps {limit / 1e9:g} GB of packed weights, and these take {num_bytes / 1e9:.2f} GB")
    files = packed_files()
    kept = sum(size for _, size in files)
    for path, size in files:
        with suppress(OSError):
            unfinished = path.suffix != ".packed"
            if time.time() - path.stat().st_mtime > _ABANDONED_S if unfinished else kept + num_bytes > limit:
                path.unlink()
                kept -= size
    if shutil.disk_usage(directory).free < 2 * num_bytes:
        raise OSError(f"packed weights of {num_bytes / 1e9:.2f} GB would fill the disk of {directory}")

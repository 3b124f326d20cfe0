"""Packed weights on the disk: matrices in the order kernels read, made at a model's first start and mapped at later ones.

A file holds the matrices of one model: an index, then each matrix at a multiple of 64 bytes. What a file ought to be is computed
from the tensors, never read from it: its name, its size and its index must be exactly that, or it is written anew. Pages of a
mapped file are shared by all processes that run the model, and none of its weights is in memory twice.

A directory that cannot be written, or a full disk, costs packing at every start and nothing else.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from cpuspec import formats
from cpuspec.checkpoints.mapped import give_back_pages, map_all_pages, place_in_file
from cpuspec.environment import cache_dir, packed_limit_bytes, sources_digest
from cpuspec.formats import Cast, QuantTensor
from cpuspec.formats.packing import TILE, PackedTensor, pack, tile_bytes

# Packing fewer bytes takes no longer than looking for them on the disk.
_SMALLEST_BYTES = 8 << 20

_PAGE = 4096
_SAMPLE_BYTES = 256
_ABANDONED_S = 3600.0  # an unfinished file that nobody has written to for so long is nobody's

# Taken once: sources edited under a running process did not make its weights.
_FINGERPRINT = sources_digest(Path(formats.__file__).parent)


Matrix = QuantTensor | Cast


def packed_matrices(name: str, tensors: Mapping[str, Matrix], threads: int, keep: bool = True) -> dict[str, PackedTensor]:
    """Every tensor, all of them matrices, in kernel order: mapped from the disk if an earlier start left them there.

    name: of the model, for people who look into the cache. keep: whether to use the disk; if not, all is packed in memory.
    """
    with ThreadPoolExecutor(threads) as pool:
        if keep and sum(tensor.num_bytes for tensor in tensors.values()) >= _SMALLEST_BYTES and packed_limit_bytes():
            file = _PackedFile(name, tensors, pool)
            with suppress(OSError, ValueError):
                return file.read() or file.write(pool)
        return dict(zip(tensors, pool.map(_pack, tensors.values()), strict=True))


def packed_directory() -> Path:
    """Where packed weights are kept."""
    return cache_dir() / "packed"


def packed_files() -> list[tuple[Path, int]]:
    """What is kept and its bytes, the longest unused first; files that other processes are writing are among them."""
    found = []
    for path in packed_directory().glob("*.packed*"):
        with suppress(OSError):  # another process may have removed it
            status = path.stat()
            found.append((status.st_mtime_ns, path, status.st_size))
    return [(path, size) for _, path, size in sorted(found)]


class _PackedFile:
    """The one file that these tensors may come from."""

    def __init__(self, name: str, tensors: Mapping[str, Matrix], pool: Executor) -> None:
        self._tensors = tensors
        self._offsets: dict[str, int] = {}  # behind the head
        index = []
        at = 0
        for tensor_name, tensor in tensors.items():
            num_bytes = _tiles(tensor) * tile_bytes(tensor.format, tensor.shape[1])
            self._offsets[tensor_name] = at
            index.append((tensor_name, tensor.format.name, tensor.shape, at, num_bytes))
            at += -(-num_bytes // 64) * 64
        identity = (_FINGERPRINT, sys.byteorder, index, list(pool.map(_identity, tensors.values())))
        key = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()
        self._head = json.dumps({"cpuspec": "packed weights", "key": key, "tensors": index}).encode()
        self._head += b"\n" * (-len(self._head) % _PAGE)
        self._num_bytes = len(self._head) + at
        readable = re.sub(r"[^a-z0-9.]+", "-", name.lower())[:60].strip("-.") or "model"
        self._path = packed_directory() / f"{readable}-{key}.packed"

    def read(self) -> dict[str, PackedTensor] | None:
        """The matrices of the file; None if there is no such file, or it is not what it ought to be."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != self._num_bytes or file.read(len(self._head)) != self._head:
                    return None
                matrices = self._map(file)
        except OSError:
            return None
        with suppress(OSError):
            os.utime(self._path)  # used just now
        return matrices

    def write(self, pool: Executor) -> dict[str, PackedTensor]:
        """Pack everything into the file and map it. Raises OSError where that cannot be done, leaving nothing behind."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _make_room(self._path.parent, self._num_bytes)
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            with unfinished.open("xb+") as file:
                file.write(self._head)
                writing = threading.Lock()

                def pack_into_file(name: str) -> None:
                    packed = _pack(self._tensors[name])
                    with writing:
                        file.seek(len(self._head) + self._offsets[name])
                        file.write(packed.data.data)

                for _ in pool.map(pack_into_file, self._tensors):
                    pass
                file.truncate(self._num_bytes)
                file.flush()
                # A name must not survive a crash that the bytes do not.
                os.fsync(file.fileno())
                os.replace(unfinished, self._path)
                return self._map(file)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def _map(self, file: BinaryIO) -> dict[str, PackedTensor]:
        data = map_all_pages(file.fileno(), self._num_bytes)[len(self._head) :]
        matrices = {}
        for name, tensor in self._tensors.items():
            rows, in_features = tensor.shape
            shape = _tiles(tensor), tile_bytes(tensor.format, in_features)
            start = self._offsets[name]
            tiles = data[start : start + shape[0] * shape[1]].reshape(shape)
            matrices[name] = PackedTensor(tensor.format, (rows, in_features), tiles)
        return matrices


def _tiles(tensor: Matrix) -> int:
    return -(-tensor.shape[0] // TILE)


def _pack(tensor: Matrix) -> PackedTensor:
    if isinstance(tensor, Cast):
        source, tensor = tensor.source, tensor.made()
    else:
        source = tensor
    packed = pack(tensor)
    give_back_pages(source.data)
    return packed


def _identity(tensor: Matrix) -> tuple[object, ...]:
    """What changes whenever the bytes of a tensor do: for those in a file its size and time of change, their place, and samples
    of them; for others a hash of them all. A cast is known by its source."""
    if isinstance(tensor, Cast):
        return ("cast", tensor.source.format.name, *_identity(tensor.source))
    data = tensor.data.reshape(-1)
    place = place_in_file(data)
    if place is None:
        return (hashlib.blake2b(data.data, digest_size=16).hexdigest(),)
    middle = len(data) // 2
    samples = b"".join(data[at : at + _SAMPLE_BYTES].tobytes() for at in (0, middle, max(0, len(data) - _SAMPLE_BYTES)))
    give_back_pages(data)
    return (*place, hashlib.blake2b(samples, digest_size=16).hexdigest())


def _make_room(directory: Path, num_bytes: int) -> None:
    """Remove what was not used for longest until a new file fits into the limit. Raises OSError if it is not to be written."""
    limit = packed_limit_bytes()
    if num_bytes > limit:
        raise OSError("packed weights of this size are not kept")
    files = packed_files()
    kept = sum(size for _, size in files)
    for path, size in files:
        with suppress(OSError):
            unfinished = path.suffix != ".packed"
            if time.time() - path.stat().st_mtime > _ABANDONED_S if unfinished else kept + num_bytes > limit:
                path.unlink()
                kept -= size
    if shutil.disk_usage(directory).free < 2 * num_bytes:
        raise OSError("packed weights would fill the disk")

"""Finished tensors and measured numbers in a directory beside the output, from which an interrupted run goes on."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from cpuspec.checkpoints.mapped import map_file
from cpuspec.errors import CheckpointError
from cpuspec.files import write_file
from cpuspec.formats import Format, QuantTensor
from cpuspec.formats.tensor import U8
from cpuspec.platform import SYSTEM


class Workspace:
    """A directory that one run at a time works in.

    directory: it is created if need be. settings: everything that its files depend on, as JSON; files of a run with other settings
    are removed. Raises CheckpointError if another process works in the directory, OSError if nothing can be written there.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self._lock = (directory / "lock").open("wb")
        if not SYSTEM.try_lock(self._lock) or not _is_there(self._lock, directory / "lock"):
            raise CheckpointError(f"{directory} is in use by another process; wait for it, or choose another output")
        text = json.dumps(settings, sort_keys=True, indent=1)
        marker = directory / "settings.json"
        if not marker.exists() or marker.read_text("utf-8") != text:
            self._empty()
            write_file(marker, text)
        self._measured = directory / "measured.json"
        self._numbers: dict[str, list[float]] = json.loads(self._measured.read_text("utf-8")) if self._measured.exists() else {}

    def measured(self, name: str, measure: Callable[[], list[float]]) -> list[float]:
        """The numbers of this name that an earlier run has measured, or else those that `measure` returns, which are kept."""
        if name not in self._numbers:
            self._numbers[name] = measure()
            write_file(self._measured, json.dumps(self._numbers))
        return self._numbers[name]

    def close(self, remove: bool) -> None:
        """Release the directory to other processes. remove: delete it and its files."""
        if remove:
            self._empty()
            self._remove()  # while it is locked, where the system lets an open file go
        self._lock.close()
        if remove:
            self._remove()

    def _remove(self) -> None:
        with suppress(OSError):  # another process may wait for it, or have begun it anew
            (self.directory / "lock").unlink(missing_ok=True)
            self.directory.rmdir()

    def _empty(self) -> None:
        for path in self.directory.iterdir():
            if path.name != "lock":
                path.unlink()


def _is_there(file: BinaryIO, path: Path) -> bool:
    """Whether an open file has its name still: the process that had it before may have removed it."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


class TensorStore(Mapping[str, QuantTensor]):
    """The tensors that are finished, by canonical name, as views of mapped files in a workspace.

    formats, shapes: of every tensor that will be.
    """

    def __init__(self, workspace: Workspace, formats: Mapping[str, Format], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._directory, self._formats, self._shapes = workspace.directory, formats, shapes
        self._done = {name for name in formats if self._path(name).exists()}
        self.num_resumed = len(self._done)

    def put(self, name: str, data: U8) -> None:
        """Keep the bytes of a tensor, U8 [N, row_bytes] or [row_bytes]; of experts' matrices all rows, one after another."""
        write_file(self._path(name), data.tobytes())
        self._done.add(name)

    def __getitem__(self, name: str) -> QuantTensor:
        if name not in self._done:
            raise KeyError(name)
        shape, format = self._shapes[name], self._formats[name]
        row_bytes = format.row_bytes(shape[-1])
        data = map_file(self._path(name))
        if data.size != row_bytes * math.prod(shape[:-1]):
            raise CheckpointError(f"{self._path(name)} is damaged; remove {self._directory} and start again")
        return QuantTensor(format, shape, data.reshape(*shape[:-1], row_bytes))

    def __iter__(self) -> Iterator[str]:
        return iter(self._done)

    def __len__(self) -> int:
        return len(self._done)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.{self._formats[name].name}"

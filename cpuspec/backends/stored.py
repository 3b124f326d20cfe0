"""Experts that stay on the disk: slots in memory for some experts of each layer, and reading the others when a forward needs them.

A slot has room for one expert. A table for each tensor has the addresses of the experts that are in memory. Only the thread that
runs a forward changes slots and tables; reading threads fill slots that no table names. A forward goes through its experts in
rounds: first those in memory, then the others as they arrive. So one slot is enough for a layer.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from cpuspec.backends.disk import PAGE, DiskReads, Reader, Reading, pages_around, resident_bytes
from cpuspec.backends.packed import packed_bytes, packed_file
from cpuspec.backends.weights import WeightTensor
from cpuspec.config import Experts
from cpuspec.errors import BackendError
from cpuspec.formats import Format
from cpuspec.formats.packing import PackedTensor, num_tiles, round_up, tile_bytes
from cpuspec.model.batch import F32

_THREADS = 4  # that read


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """Matrices of experts [E, N, K] in kernel order on the disk. table: int64 [E], the address of each that is in memory, or 0."""

    format: Format
    shape: tuple[int, ...]
    table: NDArray[np.int64]
    layer: "LayerExperts"

    @property
    def num_matrices(self) -> int:
        """Experts."""
        return self.shape[0]

    @property
    def num_tiles(self) -> int:
        """Tiles of one matrix."""
        return num_tiles(self.shape) // self.num_matrices

    @property
    def tile_bytes(self) -> int:
        """Bytes from one tile to the next."""
        return tile_bytes(self.format, self.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles, padding included."""
        return num_tiles(self.shape) * self.tile_bytes


class ExpertStore:
    """The experts of a model on the disk, and what reading them has cost."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        finalize(self, reader.close).atexit = False  # then threads end with the process, also in a forked child
        self.wait_s, self.num_experts, self.num_found = 0.0, 0, 0

    def reads(self) -> DiskReads:
        """The figures so far."""
        return DiskReads(self.reader.num_bytes, self.wait_s, self.num_experts, self.num_found)

    def wait(self, readings: Sequence[Reading]) -> None:
        """Return when one of the readings is done."""
        start_s = perf_counter()
        try:
            self.reader.wait(readings)
        finally:
            self.wait_s += perf_counter() - start_s


class LayerExperts:
    """The experts of one layer: which are in memory, and which are being read."""

    def __init__(self, store: ExpertStore, tensors: Mapping[str, WeightTensor], offsets: Mapping[str, int], num_slots: int) -> None:
        """offsets: of the tensors in the file."""
        self.store = store
        self.tensors = {
            name: StoredTensor(tensor.format, tensor.shape, np.zeros(tensor.shape[0], np.int64), self)
            for name, tensor in tensors.items()
        }
        self._offsets = [offsets[name] for name in tensors]
        self._matrix_bytes = [tensor.nbytes // tensor.num_matrices for tensor in self.tensors.values()]
        self.num_slots = num_slots
        self._memory = resident_bytes(num_slots * slot_bytes(tensors.values())).reshape(num_slots, -1)
        self._empty = list(range(num_slots))
        self._held: dict[int, int] = {}  # slots by expert, the longest unused first
        self._coming: dict[int, tuple[int, Reading]] = {}  # slots and readings, by expert
        self._process = os.getpid()  # in which readings arrive
        self._needed: list[int] = []
        self._num_asked = 0  # of the needed ones

    def need(self, experts: list[int]) -> None:
        """Ask for the experts of a forward, in the order in which `rounds` goes through them."""
        self._notice_fork()
        self.settle()
        for expert in [one for one in self._coming if one not in set(experts)]:
            slot, reading = self._coming[expert]
            if self.store.reader.cancel(reading):
                del self._coming[expert]
                self._empty.append(slot)
        self._needed, self._num_asked = experts, 0
        self.store.num_experts += len(experts)
        self.store.num_found += sum(expert in self._held for expert in experts)
        self._ask_from(0)

    def guess(self, experts: Sequence[int]) -> None:
        """Ask for experts that may be needed soon, the likeliest first, until one of them would have to give up its slot."""
        self._notice_fork()
        kept = set(experts)
        for expert in experts:
            if expert not in self._held and expert not in self._coming:
                slot = self._free_slot(kept)
                if slot is None:
                    return
                self._fetch(expert, slot, is_waited_for=False)

    def settle(self) -> None:
        """Enter the experts that have arrived into the tables."""
        for expert in list(self._coming):
            slot, reading = self._coming[expert]
            if reading.is_done:
                del self._coming[expert]
                if reading.error:  # of a guess, or of a forward that ended: a forward that needs the expert asks again
                    self._empty.append(slot)
                else:
                    self._hold(expert, slot)

    def rounds(self) -> Iterator[tuple[int, int]]:
        """Go through the needed experts, some at a time: those from `first` to `end` are in memory, and the caller uses them now.

        Raises BackendError if one cannot be read.
        """
        needed, first = self._needed, 0
        while first < len(needed):
            self._ask_from(first)
            end = first
            while end < len(needed) and self._is_there(needed[end]):
                end += 1
            if end == first:
                self._await(needed[first])
                continue
            if self._num_asked < len(needed):  # others wait for their slots: use a part at a time, so that reading goes on
                end = min(end, first + max(1, self.num_slots // 4))
            yield first, end
            for expert in needed[first:end]:
                self._held[expert] = self._held.pop(expert)  # used last
            first = end

    def _ask_from(self, first: int) -> None:
        """Ask for the needed experts that were not asked for yet while there are slots. first: those before it are done with."""
        needed, kept = self._needed, set(self._needed[first:])
        while self._num_asked < len(needed):
            expert = needed[self._num_asked]
            if expert in self._coming:
                self.store.reader.hurry(self._coming[expert][1])
            elif expert not in self._held:
                slot = self._free_slot(kept)
                if slot is None:
                    return
                self._fetch(expert, slot, is_waited_for=True)
            self._num_asked += 1

    def _is_there(self, expert: int) -> bool:
        """Whether an expert is in memory. Raises BackendError if it could not be read."""
        if expert in self._coming and self._coming[expert][1].is_done:
            slot, reading = self._coming.pop(expert)
            if reading.error:
                self._empty.append(slot)
                raise reading.error
            self._hold(expert, slot)
        return expert in self._held

    def _await(self, expert: int) -> None:
        """Wait until an expert has arrived, or there may be a slot for it."""
        if expert in self._coming:
            self.store.wait([self._coming[expert][1]])
        elif self._coming:  # guesses have the slots
            self.store.wait([reading for _, reading in self._coming.values()])
            self.settle()
        else:  # later ones have the slots, as they were guessed
            self._empty.append(self._displace(next(one for one in reversed(self._needed) if one in self._held)))

    def _free_slot(self, kept: set[int]) -> int | None:
        """A slot for another expert; None if all hold some that are kept, or are being filled."""
        if self._empty:
            return self._empty.pop()
        expert = next((one for one in self._held if one not in kept), None)
        return None if expert is None else self._displace(expert)

    def _displace(self, expert: int) -> int:
        """Take an expert's slot from it."""
        for tensor in self.tensors.values():
            tensor.table[expert] = 0
        return self._held.pop(expert)

    def _hold(self, expert: int, slot: int) -> None:
        for tensor, (start, _, at) in zip(self.tensors.values(), self._places(expert), strict=True):
            tensor.table[expert] = self._memory[slot].ctypes.data + at + start % PAGE
        self._held[expert] = slot

    def _fetch(self, expert: int, slot: int, is_waited_for: bool) -> None:
        pieces = []
        for start, size, at in self._places(expert):
            first, num_bytes = pages_around(start, size)
            pieces.append((first, self._memory[slot, at : at + num_bytes]))
        reading = Reading(pieces)
        self._coming[expert] = slot, reading
        self.store.reader.start(reading, is_waited_for)

    def _places(self, expert: int) -> Iterator[tuple[int, int, int]]:
        """For each matrix of an expert: its offset in the file, its bytes, and the offset of its pages in a slot."""
        at = 0
        for offset, size in zip(self._offsets, self._matrix_bytes, strict=True):
            yield offset + expert * size, size, at
            at += _bytes_of_pages(size)

    def _notice_fork(self) -> None:
        """In a forked child forget the parent's readings, none of which arrives."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self.store.reader.notice_fork()
            self._empty += [slot for slot, _ in self._coming.values()]
            self._coming.clear()


@dataclass(frozen=True)
class Router:
    """The operands of a guess of a layer's experts: rows, weights of their norm, the router's matrix [E, C], bias and shift.

    norm, bias, shift: None where there is none.
    """

    experts: Experts
    rows: F32
    norm: F32 | None
    eps: float
    matrix: F32
    bias: F32 | None
    shift: F32 | None

    def likeliest(self, num_rows: int) -> list[int]:
        """The better half of the experts that the router would choose for the rows as they are now; those of most rows first.

        In a mixture with random weights the layer then chooses 98 % of the first four of eight, and 69 % of the last four: reading
        the last four early costs more than it gains (benchmarks/DECISIONS.md#mixture-on-disk).
        """
        rows = self.rows[:num_rows, : self.matrix.shape[1]]
        if self.norm is not None:
            rows = rows / np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + np.float32(self.eps)) * self.norm[: rows.shape[1]]
        scores = rows @ self.matrix.T
        if self.bias is not None:
            scores += self.bias[: len(self.matrix)]
        if self.shift is not None:
            scores = (1 / (1 + np.exp(-scores)) if self.experts.score == "sigmoid" else scores) + self.shift[: len(self.matrix)]
        order = np.argsort(-scores, axis=1)[:, : (self.experts.used + 1) // 2]
        wanted = np.zeros(len(self.matrix))
        np.add.at(wanted, order, 1 - 1e-3 * np.arange(order.shape[1]))
        return [int(expert) for expert in np.argsort(-wanted)[: np.count_nonzero(wanted)]]


def _bytes_of_pages(matrix_bytes: int) -> int:
    """Bytes of a slot for the pages that a matrix lies in, wherever it begins."""
    return round_up(matrix_bytes, PAGE) + PAGE


def slot_bytes(tensors: Iterable[WeightTensor]) -> int:
    """Bytes of a slot for one expert of these tensors."""
    return sum(_bytes_of_pages(packed_bytes(tensor) // tensor.shape[0]) for tensor in tensors)


def stored_matrices(
    name: str, tensors: Mapping[str, WeightTensor], threads: int, limit_bytes: int
) -> tuple[ExpertStore, dict[str, PackedTensor | StoredTensor]]:
    """Every tensor in kernel order: matrices in memory, and experts on the disk with memory for as many as the limit leaves.

    name: the model's. Raises BackendError where the limit is too small, or the packed weights cannot be kept on the disk.
    """
    layers: dict[str, dict[str, WeightTensor]] = {}
    for one, tensor in tensors.items():
        if ".expert_" in one:
            layers.setdefault(one.rpartition(".")[0], {})[one] = tensor
    in_memory = {one: tensor for one, tensor in tensors.items() if ".expert_" not in one}
    always = sum(map(packed_bytes, in_memory.values()))
    of_slots = {layer: slot_bytes(some.values()) for layer, some in layers.items()}
    if limit_bytes < (least := always + sum(of_slots.values())):
        what = "weights that every token reads" if layers else "weights, of which every token reads all,"
        more = f", and one expert of each layer {(least - always) / 1e9:.3f} GB" if layers else ""
        raise BackendError(
            f"memory is limited to {limit_bytes / 1e9:.3f} GB, but {what} take {always / 1e9:.3f} GB{more}; allow "
            f"{least / 1e9:.3f} GB or more, or leave memory at auto: then the system drops parts of them and reads these again"
        )
    num_experts = {layer: next(iter(some.values())).shape[0] for layer, some in layers.items()}
    counts = _num_slots(limit_bytes - always, of_slots, num_experts)
    file, offsets = packed_file(name, tensors, threads)
    found: dict[str, PackedTensor | StoredTensor] = {}
    for one, tensor in in_memory.items():
        first, num_bytes = pages_around(offsets[one], packed_bytes(tensor))
        data = resident_bytes(num_bytes)
        file.read(first, data)
        tiles = data[offsets[one] - first :][: packed_bytes(tensor)].reshape(num_tiles(tensor.shape), -1)
        found[one] = PackedTensor(tensor.format, tensor.shape, tiles)
    store = ExpertStore(Reader(file, _THREADS))
    for layer, some in layers.items():
        found |= LayerExperts(store, some, offsets, counts[layer]).tensors
    return store, found


def _num_slots(num_bytes: int, of_slots: Mapping[str, int], most: Mapping[str, int]) -> dict[str, int]:
    """The number of slots of each layer: the same share of its experts for all, and at least one."""
    share = num_bytes / sum(size * most[layer] for layer, size in of_slots.items())
    counts = {layer: max(1, min(most[layer], int(share * most[layer]))) for layer in of_slots}
    left = num_bytes - sum(size * counts[layer] for layer, size in of_slots.items())
    for layer, size in of_slots.items():  # what rounding left
        if size <= left and counts[layer] < most[layer]:
            counts[layer] += 1
            left -= size
    return counts

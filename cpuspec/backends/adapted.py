"""Adapters in the numba backend's memory: matrices as `kernels.adapters` reads them, and which rows of a forward have which."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.adapters import MAX_RANK, Adapter, AdapterSet
from cpuspec.errors import BackendError
from cpuspec.formats.packing import TILE, aligned_bytes
from cpuspec.formats.tensor import F32, I32, U8
from cpuspec.kernels import layout

_SPAN_ROWS = 64  # of a prompt that threads take together; whole blocks of activations


class PackedAdapter:
    """pairs: `layout.ADAPTER_PAIR` of each matrix, by its number. rank_bytes: of the f32 numbers `down x` of a row."""

    def __init__(self, adapter: Adapter, numbers: Mapping[str, int], orders: Mapping[str, I32]) -> None:
        if unknown := next((name for name in adapter.pairs if name not in numbers), ""):
            raise BackendError(
                f"{adapter.path} changes {unknown}, which this backend does not; `cpuspec quantize --lora` merges it"
            )
        assert adapter.rank <= MAX_RANK, "`open_adapter` has checked it"
        self.pairs = np.zeros(len(numbers), layout.ADAPTER_PAIR)
        self.rank_bytes = -(-adapter.rank // TILE) * TILE * 4
        # One array: numpy asks for huge pages for it. In small ones of small pages 74 MB were read at 12 GB/s.
        # See benchmarks/DECISIONS.md#adapters.
        self._data = aligned_bytes((sum(_laid_bytes(part) for pair in adapter.pairs.values() for part in pair),))
        self.num_bytes, at = self._data.nbytes, 0
        for name, (down, up) in sorted(adapter.pairs.items(), key=lambda one: numbers[one[0]]):
            places = []
            for part in (down[:, orders[name]] if name in orders else down, up):
                places.append(self._data.ctypes.data + at)
                at += _lay(part, self._data[at:])
            self.pairs[numbers[name]] = *places, len(down)


def _laid_bytes(matrix: F32) -> int:
    return -(-len(matrix) // TILE) * TILE * matrix.shape[1] * 4


def _lay(matrix: F32, to: U8) -> int:
    """Write [N, K] as [N / 16, K, 16], with zeros after the last row; returns its bytes."""
    tiles, inputs = -(-len(matrix) // TILE), matrix.shape[1]
    laid = to[: _laid_bytes(matrix)].view(np.float32).reshape(tiles, inputs, TILE)
    laid[:] = np.pad(matrix, ((0, tiles * TILE - len(matrix)), (0, 0))).reshape(tiles, TILE, inputs).transpose(0, 2, 1)
    return laid.nbytes


class AdaptedRows:
    """The adapters of one forward's rows. numbers: of the matrices that adapters may change, by name. orders: of their inputs.

    num_partials: the most numbers, in ranks, that one operation makes for a row. packed: adapters that were met before.
    """

    def __init__(
        self,
        numbers: Mapping[str, int],
        orders: Mapping[str, I32],
        num_partials: int,
        packed: "WeakKeyDictionary[Adapter, PackedAdapter]",
    ) -> None:
        self._numbers, self._num_partials = numbers, num_partials
        self._orders = {name: orders[name] for name in numbers if name in orders}
        self._packed = packed
        self._partials = aligned_bytes((0,))
        self._held: tuple[NDArray[Any], ...] = ()

    def enter(self, state: NDArray[Any], adapters: Sequence[AdapterSet], starts: Sequence[int]) -> int:
        """Note what each sequence's rows add; returns the bytes of adapters that the forward reads.

        The adapters must stay until the run is over. Raises BackendError for one that no answer can use.
        """
        entries: list[tuple[Any, ...]] = []
        spans: list[tuple[int, int]] = []
        used: dict[int, int] = {}
        at = 0
        for one, start, end in zip(adapters, starts, starts[1:], strict=False):
            first = start
            while one and first < end:
                stop = min(end, (first // _SPAN_ROWS + 1) * _SPAN_ROWS)
                spans.append((len(entries), len(entries) + len(one)))
                for adapter, scale in one:
                    packed = self._packed.get(adapter)
                    if packed is None:
                        packed = self._packed[adapter] = PackedAdapter(adapter, self._numbers, self._orders)
                    used[id(packed)] = packed.num_bytes
                    entries.append((first, stop, packed.pairs.ctypes.data, at, packed.rank_bytes, scale))
                    at += (stop - first) * packed.rank_bytes * self._num_partials
                first = stop
        if at > self._partials.nbytes:
            self._partials = aligned_bytes((at,))
        adapted, ranges = np.array(entries, layout.ADAPTED), np.array(spans, layout.ADAPTED_SPAN)
        adapted["partials"] += self._partials.ctypes.data
        state["adapted"], state["num_adapted"] = adapted.ctypes.data, len(adapted)
        state["spans"], state["num_spans"] = ranges.ctypes.data, len(ranges)
        self._held = adapted, ranges
        return sum(used.values())

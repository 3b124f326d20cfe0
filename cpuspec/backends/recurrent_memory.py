"""The memory that recurrent layers have in the numba backend's slots, and what the kernels are told of it for each forward.

`kernels.recurrent` says what lies there. This file knows where: one block of bytes a slot, layer after layer. A forward of many
rows writes to a spare block, which takes the place of the slot's when it has ended: one that ends early has changed nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpuspec.config import DeltaNet, ModelConfig
from cpuspec.errors import CacheError
from cpuspec.formats.packing import U8, paged_bytes
from cpuspec.kernels import layout
from cpuspec.kernels.recurrent import RING
from cpuspec.layers import Layer, layers_of
from cpuspec.model.cache import KEPT_ROWS

_SHORT = 8  # rows of a forward that folds in place, those that it found
_STEP = 8  # tokens between two folds of such forwards
_LONG_KEPT = 24  # rows that a longer forward leaves to be truncated
assert 2 * _SHORT + KEPT_ROWS + _STEP - 1 <= RING, "a ring holds the rows since the fold of a short forward, and another's"
assert _LONG_KEPT + _SHORT <= RING, "and those of a long one"


@dataclass(slots=True, eq=False)
class RecurrentMemory:
    """Of one slot. folded: how many tokens every state covers at most."""

    block: U8
    folded: int = 0


class RecurrentLayers:
    """The recurrent layers of a model. Forwards take turns: `enter` before each, and `commit` when it has ended.

    num_bytes: of a slot's block.
    """

    def __init__(self, config: ModelConfig, max_rows: int) -> None:
        self._offsets: list[dict[str, int]] = []
        self.num_bytes = self.tile_bytes = 0
        for mixer in (layer.mixer for layer in layers_of(config)):
            if isinstance(mixer, DeltaNet):
                self._offsets.append(self._placed(mixer))
                self.tile_bytes = 64 * mixer.key_dims
        self._spares: list[U8] = []
        self._taken: dict[RecurrentMemory, tuple[U8, int]] = {}  # the spare block of each slot, and where its states are folded
        self._sequences = np.zeros(max_rows, layout.SEQUENCE)
        self._sequence_of = np.zeros(max_rows, np.int64)

    def _placed(self, mixer: DeltaNet) -> dict[str, int]:
        """Where the parts of a layer's memory begin, each on a cache line."""
        values, heads = mixer.value_heads * mixer.value_dims, -(-mixer.value_heads // 16) * 16
        sizes = {
            "state_at": 4 * values * mixer.key_dims, "folded_at": values // 2, "inputs_at": 4 * RING * mixer.channels,
            "decays_at": 4 * RING * heads, "keys_at": 4 * RING * mixer.key_heads * mixer.key_dims, "updates_at": 4 * RING * values,
        }  # fmt: skip
        found = {}
        for name, size in sizes.items():
            found[name] = self.num_bytes
            self.num_bytes += -(-size // 64) * 64
        return found

    def offsets(self, layer: Layer, *names: str) -> dict[str, int]:
        """Where parts of a layer's memory begin in a block."""
        return {name: self._offsets[layer.state_index][name] for name in names}

    def new_memory(self) -> RecurrentMemory:
        """An empty slot's."""
        return RecurrentMemory(paged_bytes((self.num_bytes,)))

    def addresses(self) -> dict[str, int]:
        """Of the arrays that `enter` writes, by their fields in a program's state."""
        return {"sequences": self._sequences.ctypes.data, "sequence_of": self._sequence_of.ctypes.data}

    def enter(self, state: Any, starts: list[int], lengths: list[int], memories: Sequence[RecurrentMemory]) -> None:
        """Tell a program's state of the sequences of a forward, as in `ForwardBatch`, and of their slots' lengths and memories."""
        self._spares += [block for block, _ in self._taken.values()]  # of a forward that did not end
        self._taken.clear()
        for b, (memory, length) in enumerate(zip(memories, lengths, strict=True)):
            row, end = starts[b], starts[b + 1]
            if length == 0:
                memory.folded = 0
            if memory.folded > length:
                raise CacheError(f"recurrent layers cover {memory.folded} tokens of a slot that holds {length}; truncate it to 0")
            moves = end - row > _SHORT
            recorded = max(length, length + end - row - _LONG_KEPT) if moves else length
            fold = recorded if moves else max((length - KEPT_ROWS) // _STEP * _STEP, memory.folded)
            target = memory.block
            if moves:
                target = self._spares.pop() if self._spares else paged_bytes((self.num_bytes,))
                self._taken[memory] = target, fold
            else:
                memory.folded = fold
            self._sequences[b] = memory.block.ctypes.data, target.ctypes.data, length, row, end, fold, recorded
            self._sequence_of[row:end] = b
        state["num_sequences"] = len(memories)

    def commit(self) -> None:
        """The forward has ended: what it wrote is the slots' now."""
        for memory, (block, fold) in self._taken.items():
            self._spares.append(memory.block)
            memory.block, memory.folded = block, fold
        self._taken.clear()

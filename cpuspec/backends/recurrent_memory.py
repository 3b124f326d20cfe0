"""The memory that recurrent layers have in the numba backend's slots, and what the kernels are told of it for each forward.

`kernels.recurrent` says what lies there. This file knows where: one buffer for each slot, layer after layer. A forward of many
rows writes to a spare buffer, which takes the place of the slot's when it has ended: one that ends early has changed nothing. An
empty slot has nothing to lose, and needs no spare. A snapshot has for each layer the inputs that the next row's convolution reads,
and the states with all rows folded: the same bytes for the same tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpuspec.config import ModelConfig, Recurrent, ShortConv
from cpuspec.errors import CacheError
from cpuspec.formats.packing import GROUP, U8, paged_bytes, round_up
from cpuspec.kernels import layout
from cpuspec.kernels.recurrent import RING, write_states
from cpuspec.layers import Layer
from cpuspec.model.batch import F32
from cpuspec.model.cache import KEPT_ROWS
from cpuspec.model.recurrence import recurrent_mixers, state_numbers

_SHORT = 8  # the most rows of a forward that folds in place; it folds rows of forwards before it
_STEP = 8  # tokens between two folds of such forwards
_LONG_KEPT = 24  # rows that a longer forward leaves to be truncated
assert 2 * _SHORT + KEPT_ROWS + _STEP - 1 <= RING, "a ring holds the rows since the fold of a short forward, and another's"
assert _LONG_KEPT + _SHORT <= RING, "and those of a long one"
assert KEPT_ROWS + _STEP - 1 + _SHORT <= _LONG_KEPT, "as `inputs_kept` takes for granted"


def inputs_kept(mixer: Recurrent) -> int:
    """Rows in the ring of a convolution's inputs: _LONG_KEPT that may be truncated, and taps - 1 before them for the next token."""
    return mixer.taps - 1 + _LONG_KEPT


@dataclass(slots=True, eq=False)
class RecurrentMemory:
    """Of one slot. folded: how many tokens every state covers at most."""

    buffer: U8
    folded: int = 0


class RecurrentLayers:
    """The recurrent layers of a model. Forwards take turns: `enter` before each, and `commit` when it has ended.

    num_bytes: of a slot's buffer. snapshot_bytes: of a snapshot. tile_bytes: of a thread's room for a tile of a state.
    """

    def __init__(self, config: ModelConfig, max_rows: int) -> None:
        self.num_bytes = self.tile_bytes = 0
        self._mixers = recurrent_mixers(config)
        self._offsets = [self._placed(mixer) for mixer in self._mixers]
        self.snapshot_bytes = 4 * state_numbers(config, 0)
        self._spare: U8 | None = None
        self._pending: dict[RecurrentMemory, tuple[U8, int]] = {}  # the spare buffer of each slot, and where its states are folded
        self._sequences = np.zeros(max_rows, layout.SEQUENCE)
        self._sequence_of = np.zeros(max_rows, np.int64)

    def _placed(self, mixer: Recurrent) -> dict[str, int]:
        """Where the parts of a layer's memory begin, each on a cache line."""
        sizes = {"inputs_at": 4 * inputs_kept(mixer) * round_up(mixer.channels, GROUP)}
        if not isinstance(mixer, ShortConv):
            values, keys = mixer.value_heads * mixer.value_dims, mixer.key_heads * mixer.key_dims
            sizes |= {
                "state_at": 4 * values * mixer.key_dims, "folded_at": values // 2, "keys_at": 4 * RING * keys,
                "decays_at": 4 * RING * round_up(mixer.value_heads, 16), "updates_at": 4 * RING * values,
            }  # fmt: skip
            self.tile_bytes = 64 * mixer.key_dims
        found = {}
        for name, size in sizes.items():
            found[name] = self.num_bytes
            self.num_bytes += round_up(size, 64)
        return found

    def inputs_at(self, layer: Layer) -> int:
        """Where the ring of a layer's inputs begins in a buffer."""
        return self._offsets[layer.state_index]["inputs_at"]

    def states_at(self, layer: Layer) -> dict[str, int]:
        """Where the other parts of a layer's memory begin in a buffer."""
        return {name: at for name, at in self._offsets[layer.state_index].items() if name != "inputs_at"}

    def new_memory(self) -> RecurrentMemory:
        """An empty slot's."""
        return RecurrentMemory(paged_bytes((self.num_bytes,)))

    def save(self, memory: RecurrentMemory, length: int, snapshot: U8) -> None:
        """Write a snapshot of the first `length` tokens, `memory.folded` or more, to U8 [snapshot_bytes]."""
        at = memory.buffer.ctypes.data
        for mixer, offsets, inputs, states in self._parts_of(snapshot):
            ring, positions = self._ring(memory, mixer, offsets), np.arange(length - len(inputs), length)
            inputs[:] = ring[positions % len(ring), : mixer.channels] * (positions >= 0)[:, None]
            if not isinstance(mixer, ShortConv):
                shape = mixer.value_dims, mixer.key_heads, mixer.key_dims
                places = {name: at + offset for name, offset in offsets.items()}
                write_states(places, mixer.key_head_of_values, *shape, length, states.ctypes.data)

    def restore(self, memory: RecurrentMemory, length: int, snapshot: U8) -> None:
        """Replace everything in a slot's memory by what `save` wrote."""
        for mixer, offsets, inputs, states in self._parts_of(snapshot):
            ring, positions = self._ring(memory, mixer, offsets), np.arange(length - len(inputs), length)
            ring[positions % len(ring), : mixer.channels] = inputs
            if not isinstance(mixer, ShortConv):
                memory.buffer[offsets["state_at"] :][: states.nbytes] = states.view(np.uint8)
                num_tiles = mixer.value_heads * mixer.value_dims // 16
                memory.buffer[offsets["folded_at"] :][: 8 * num_tiles].view(np.int64)[:] = length
        memory.folded = length

    def _parts_of(self, snapshot: U8) -> Iterator[tuple[Recurrent, dict[str, int], F32, F32]]:
        """Of each layer its mixer, the places of its memory, and its inputs [taps - 1, channels] and states in a snapshot."""
        numbers, at = snapshot.view(np.float32), 0
        for mixer, offsets in zip(self._mixers, self._offsets, strict=True):
            num_inputs = (mixer.taps - 1) * mixer.channels
            of_states = 0 if isinstance(mixer, ShortConv) else mixer.value_heads * mixer.value_dims * mixer.key_dims
            inputs, states = np.split(numbers[at : at + num_inputs + of_states], [num_inputs])
            at += num_inputs + of_states
            yield mixer, offsets, inputs.reshape(mixer.taps - 1, -1), states

    def _ring(self, memory: RecurrentMemory, mixer: Recurrent, offsets: dict[str, int]) -> F32:
        """A layer's inputs, [positions modulo `inputs_kept`, channels]."""
        rows, channels = inputs_kept(mixer), round_up(mixer.channels, GROUP)
        return memory.buffer[offsets["inputs_at"] :][: 4 * rows * channels].view(np.float32).reshape(rows, channels)

    def addresses(self) -> dict[str, int]:
        """Of the arrays that `enter` writes, by their fields in a program's state."""
        return {"sequences": self._sequences.ctypes.data, "sequence_of": self._sequence_of.ctypes.data}

    def enter(self, state: Any, starts: list[int], lengths: list[int], memories: Sequence[RecurrentMemory]) -> None:
        """Tell a program's state of the sequences of a forward, as in `ForwardBatch`, and of their slots' lengths and memories."""
        if self._pending:  # of a forward that did not end
            _, (self._spare, _) = self._pending.popitem()
            self._pending.clear()
        for b, (memory, length) in enumerate(zip(memories, lengths, strict=True)):
            row, end = starts[b], starts[b + 1]
            if length == 0:
                memory.folded = 0
            if memory.folded > length:
                raise CacheError(f"recurrent layers cover {memory.folded} tokens of a slot that holds {length}; truncate it to 0")
            fold, recorded, target = max((length - KEPT_ROWS) // _STEP * _STEP, memory.folded), length, memory.buffer
            if end - row > _SHORT:
                fold = recorded = max(length, length + end - row - _LONG_KEPT)
            if end - row > _SHORT and length:
                target, self._spare = paged_bytes((self.num_bytes,)) if self._spare is None else self._spare, None
                self._pending[memory] = target, fold
            else:
                memory.folded = fold
            self._sequences[b] = memory.buffer.ctypes.data, target.ctypes.data, length, row, end, fold, recorded
            self._sequence_of[row:end] = b
        state["num_sequences"] = len(memories)

    def commit(self) -> None:
        """The forward has ended: give the slots what it wrote. One of the buffers that they had is kept as a spare."""
        for memory, (buffer, fold) in self._pending.items():
            self._spare, memory.buffer, memory.folded = memory.buffer, buffer, fold
        self._pending.clear()

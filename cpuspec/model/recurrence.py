"""What a recurrent layer remembers of a sequence, so that truncating it sets a length: the numpy and torch backends' form.

A state covers the sequence's first tokens; it is folded there. Of each later token a record is kept: what its step changed the
state by. Truncating among these forgets records. The state of any token is the folded one with the records' steps done again: the
very operations of decoding, in their order. So no bit depends on where the state was folded, nor on what was drafted in between.
`kernels/recurrent.py` does the same in compiled code.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cpuspec.config import ModelConfig, Recurrent, ShortConv
from cpuspec.formats.tensor import U8
from cpuspec.layers import layers_of
from cpuspec.model.cache import KEPT_ROWS, StateAccess

Record = tuple[Any, ...]

# Added to the squared length of queries and keys of a delta net before they are divided by it.
LENGTH_EPS = 1e-6


@dataclass
class RecurrentState:
    """One layer's memory of one sequence. Arrays are the backend's.

    taps: rows that the layer's convolution reads. zeros: makes an array of zeros of a shape. step: makes the state after a record.
    state: after the first `folded` tokens. records: of the following ones. inputs: [n, channels] of the convolution, from token
    folded - taps + 1 on, zeros before token 0.
    """

    taps: int
    channels: int
    state_shape: tuple[int, ...]
    zeros: Callable[[tuple[int, ...]], Any]
    step: Callable[[Any, Record], Any]
    folded: int = 0
    state: Any = None
    inputs: Any = None
    records: list[Record] = field(default_factory=list)

    def begin(self, length: int) -> None:
        """Forget everything from token `length` on, and fold rows that no truncation needs. Call it before a forward's rows."""
        if length == 0:
            self.folded, self.records = 0, []
            self.state, self.inputs = self.zeros(self.state_shape), self.zeros((self.taps - 1, self.channels))
        assert length >= self.folded, "`KVCache.reachable` has checked it"
        del self.records[length - self.folded :]
        self.inputs = self.inputs[: length - self.folded + self.taps - 1]
        while self.folded < length - KEPT_ROWS:
            self.state, self.inputs = self.step(self.state, self.records.pop(0)), self.inputs[1:]
            self.folded += 1

    def last(self, length: int | None = None) -> Any:
        """The state after the last record, or after the first `length` tokens."""
        state = self.state
        for record in self.records if length is None else self.records[: length - self.folded]:
            state = self.step(state, record)
        return state

    def taken(self, length: int) -> tuple[Any, Any]:
        """The state after `length` tokens, and the inputs that the next one's convolution reads."""
        start = length - self.folded
        return self.last(length), self.inputs[start : start + self.taps - 1]

    def put(self, length: int, state: Any, inputs: Any) -> None:
        """Replace everything by what `taken` returned."""
        self.folded, self.records, self.state, self.inputs = length, [], state, inputs


def recurrent_mixers(config: ModelConfig) -> list[Recurrent]:
    """The mixers of layers that keep a state, first to last."""
    return [mixer for layer in layers_of(config) if (mixer := layer.recurrent)]


def new_state(mixer: Recurrent, zeros: Callable[[tuple[int, ...]], Any]) -> RecurrentState:
    """An empty memory of a layer with this mixer."""
    if isinstance(mixer, ShortConv):
        return RecurrentState(mixer.taps, mixer.channels, (0,), zeros, lambda state, record: state)
    return RecurrentState(mixer.taps, mixer.channels, (mixer.value_heads, mixer.key_dims, mixer.value_dims), zeros, delta_step)


def state_numbers(config: ModelConfig, rows: int) -> int:
    """Numbers that the recurrent layers of a slot keep: their states, and records and inputs of `rows` rows."""
    found = 0
    for mixer in recurrent_mixers(config):
        found += (rows + mixer.taps - 1) * mixer.channels
        if not isinstance(mixer, ShortConv):
            values = mixer.value_heads * mixer.value_dims
            record = mixer.value_heads + mixer.key_heads * mixer.key_dims + values
            found += values * mixer.key_dims + rows * record
    return found


def recurrent_slots(
    config: ModelConfig,
    dtype: DTypeLike,
    to_numpy: Callable[[Any], NDArray[Any]] = np.asarray,
    from_numpy: Callable[[NDArray[Any]], Any] = np.asarray,
) -> dict[str, Any]:
    """Arguments of `KVCache` for storages with a list `states` of RecurrentState; none for a model without recurrent layers.

    dtype: of the backend's numbers. to_numpy, from_numpy: turn its arrays into NumPy's and back.
    """
    if not config.is_recurrent:
        return {}
    size = np.dtype(dtype).itemsize

    def reach(storage: Any, length: int) -> int:
        return length if all(state.folded <= length for state in storage.states) else 0

    def take(storage: Any, length: int, states: U8) -> None:
        arrays = [to_numpy(array).reshape(-1) for state in storage.states for array in state.taken(length)]
        np.concatenate(arrays, out=states.view(dtype))

    def put(storage: Any, states: U8, length: int) -> None:
        numbers, at = states.view(dtype), 0
        for state in storage.states:
            arrays = []
            for shape in (state.state_shape, (state.taps - 1, state.channels)):
                arrays.append(from_numpy(numbers[at : at + prod(shape)].reshape(shape).copy()))
                at += prod(shape)
            state.put(length, *arrays)

    access = StateAccess(size * state_numbers(config, 0), reach, take, put)
    return {"bytes_per_slot": size * state_numbers(config, KEPT_ROWS), "states": access}


def delta_step(state: Any, record: Record) -> Any:
    """The state [value heads, key dims, value dims] of a gated delta net or of Mamba-2 after a record (decay, key, update)."""
    decay, key, update = record
    return state * decay[:, None, None] + key[:, :, None] * update[:, None]

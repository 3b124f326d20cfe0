"""A forward as a program: records of operations, written once per model, and the state that they read, entered for each forward."""

from collections.abc import Sequence
from ctypes import addressof, c_int64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats.packing import aligned_bytes
from cpuspec.kernels import layout, simd
from cpuspec.kernels.argmax import MOST_ROWS
from cpuspec.kernels.attention_plan import place_rows, plan_attention
from cpuspec.kernels.layout import call_at, int64s_at
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointers import address

_Array = NDArray[Any]

_CALL_BYTES = layout.CALL.itemsize
_DONE_AT = _CALL_BYTES // 8 - 1  # the index of "num_done", the last word of a CALL

_NUMBERS = np.zeros(1)  # any array

# The offset of the data pointer in a numpy array object. Compiled code reads the pointer there, because asking for it in Python
# takes longer than all else about an array.
_DATA_AT = next(at for at in range(0, 128, 8) if c_int64.from_address(id(_NUMBERS) + at).value == _NUMBERS.ctypes.data)


@compiled
def _data(array):
    """The address of a numpy array's numbers, from the address of the array object."""
    return simd.peek_i64(array + _DATA_AT)


@compiled
def enter(state, numbers):
    """Write into the state what `Program.enter` noted at address `numbers`, and plan its attention."""
    call = call_at(numbers)
    state.num_rows, state.num_logit_rows, state.num_sequences = call.num_rows, call.num_logit_rows, call.num_sequences
    state.num_picked = call.num_logit_rows if call.num_logit_rows <= MOST_ROWS else 0
    if call.num_done == 0:
        state.stops_early, state.stop.asked, state.stopped, state.expert_bytes = call.stops_early, 0, 0, 0
    state.routed.rows = 0  # also in a child that was forked within a forward
    state.num_chunks, state.logits = call.num_chunks, _data(call.logits)
    state.kept = int64s_at(_data(call.kept) if call.kept != 0 else 0)
    tokens = numbers + _CALL_BYTES
    positions = tokens + 8 * call.num_rows
    logit_rows = positions + 8 * call.num_rows
    lengths = logit_rows + 8 * call.num_logit_rows
    storages = lengths + 8 * call.num_sequences
    starts = storages + 8 * call.num_sequences
    parents = starts + 8 * (call.num_sequences + 1)
    state.tokens, state.positions, state.logit_rows = int64s_at(tokens), int64s_at(positions), int64s_at(logit_rows)
    state.starts = int64s_at(starts)
    place_rows(
        state, int64s_at(starts), int64s_at(lengths), int64s_at(storages), int64s_at(parents), call.num_sequences,
        call.num_parents, call.both_ways, call.sees_rows,
    )  # fmt: skip
    plan_attention(state)


@compiled
def go_on(state, numbers):
    """Make the tokens that a forward has chosen, one for each sequence, the rows of the next forward, and note them for
    `Program.extra_tokens`. Returns whether there is a next forward.

    There is none after `extra_steps` of them, an end token, or a row without a finite logit, and if the backend was asked to stop.
    """
    call = call_at(numbers)
    rows = call.num_rows
    if call.num_done == call.extra_steps or simd.acquire(address(state.stop)) != 0:
        return False
    lengths, ends = int64s_at(numbers + _CALL_BYTES + 24 * rows), int64s_at(numbers + _CALL_BYTES + 8 * (6 * rows + 1))
    for row in range(rows):
        if state.picked[row] < 0:
            return False
        for number in range(call.num_ends):
            if state.picked[row] == ends[number]:
                return False
    chosen = int64s_at(address(ends) + 8 * (call.num_ends + call.num_done * rows))
    for row in range(rows):
        chosen[row] = state.tokens[row] = state.picked[row]
        state.positions[row] += 1
        lengths[row] += 1
    call.num_done += 1
    return True


class Program:
    """The operations of a forward, records of `layout.OPERATION`, and their state, for a number of threads.

    held: arrays that the records have addresses of. cuts: numbers of operations before which a run stops, until `Team.resume` runs
    the next part. jobs: the addresses of the parts, of which `job` is the first.
    """

    def __init__(self, operations: _Array, threads: int, held: Sequence[_Array] = (), cuts: Sequence[int] = ()) -> None:
        self._held = held
        assert operations.dtype == layout.OPERATION, "an operation is a record of layout.OPERATION"
        self.operations = np.ascontiguousarray(operations)
        self.state = np.zeros((), layout.STATE)
        self.counters = aligned_bytes((8 * (threads + 1) * len(operations),))
        self._jobs = np.zeros(len(cuts) + 1, layout.JOB)
        for job, first, end in zip(self._jobs, (0, *cuts), (*cuts, len(operations)), strict=True):
            job["operations"], job["num_operations"] = self.operations.ctypes.data + first * operations.itemsize, end - first
            job["state"], job["counters"] = self.state.ctypes.data, self.counters.ctypes.data + 8 * (threads + 1) * first
        self.jobs = [self._jobs.ctypes.data + number * layout.JOB.itemsize for number in range(len(self._jobs))]
        self.job: int = self.jobs[0]
        self._numbers = (c_int64 * 0)()
        self._num_noted = self._num_rows = 0
        self.numbers = 0  # the address of what `enter` notes

    def enter(
        self, tokens: list[int], positions: list[int], parents: list[int], logit_rows: Sequence[int], q_start: list[int],
        lengths: list[int], storages: list[int], num_chunks: int, kept: _Array | None, logits: _Array, both_ways: bool = False,
        stops_early: bool = False, sees_rows: bool = True, extra_steps: int = 0, ends: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Note the rows of the next run, where they go in the cache and what they attend to.

        As in `ForwardBatch`; parents is empty where every sequence is a chain. lengths: tokens that each sequence's slot holds;
        storages: addresses of the slots; num_chunks: that each has room for; kept: for each layer, int64 address of where its rows
        are kept, None for no layer; logits f32 [logit rows, stride]. stops_early: as in `layout.STATE`. extra_steps, ends: as
        in `ForwardBatch`. The arrays must stay until the run is over.
        """
        numbers: list[int | c_int64] = [  # first layout.CALL; a slice of ctypes takes both types
            len(tokens), len(logit_rows), len(parents), len(lengths), both_ways, sees_rows, stops_early, num_chunks,
            id(logits), 0 if kept is None else id(kept), extra_steps, len(ends), 0,
            *tokens, *positions, *logit_rows, *lengths, *storages, *q_start, *parents, *ends,
        ]  # fmt: skip
        self._num_noted, self._num_rows = len(numbers), len(tokens)
        if (wanted := len(numbers) + extra_steps * len(tokens)) > len(self._numbers):
            room = (c_int64 * (2 * wanted))()
            # Both at once: an interrupt in between would leave the address of memory that is freed.
            self._numbers, self.numbers = room, addressof(room)
        self._numbers[: len(numbers)] = numbers

    @property
    def extra_tokens(self) -> list[list[int]]:
        """The tokens that forwards of the last run chose and the next forwards took as input, one list a row."""
        rows, first = self._num_rows, self._num_noted
        end = first + rows * self._numbers[_DONE_AT]
        return [self._numbers[first + row : end : rows] for row in range(rows)]

"""How attention is shared out: every chunk of every row once, in bounded memory, and the same bits whatever the bound."""

from itertools import product

import numpy as np
import pytest
from numba import njit

from cpuspec.backends import make_backend
from cpuspec.kernels import layout
from cpuspec.kernels.attention_plan import plan_attention
from cpuspec.kernels.kv_rows import CHUNK
from cpuspec.kernels.pointers import pointer_to
from cpuspec.settings import EngineConfig
from tests.backends.models import forward, tiny

_state_at = pointer_to(layout.STATE)


@njit
def _plan(at):
    plan_attention(_state_at(at))


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (32, 8), (8, 1), (9, 3)])
@pytest.mark.parametrize("lengths", [[131_072], range(131_000, 131_512), [*range(130_000, 130_016), 5, *range(300, 330)]], ids=len)
@pytest.mark.parametrize("window", [0, 700])
def test_partials_keep_to_their_room(lengths, heads: int, kv_heads: int, window: int) -> None:
    """And no span begins before what a row of its task sees, and none of a task counts as walked."""
    for threads, most in product((1, 2, 16, 64), (0, 40_000, 400_000, 1 << 40)):
        state, rows = np.zeros((), layout.STATE), len(lengths)
        places, tasks = np.zeros(rows, layout.PLACE), np.zeros(rows, layout.TASK)
        places["length"], places["storage"] = lengths, np.cumsum(np.diff(lengths, prepend=lengths[0]) != 1)
        walked = np.full((rows, kv_heads), 7, np.int64)  # as a fork may copy them
        for name, value in {
            "num_rows": rows, "threads": threads, "places": places.ctypes.data, "num_plans": 1, "walked": walked.ctypes.data,
        }.items():  # fmt: skip
            state[name] = value
        plan = state["plans"][0]
        for name, value in {
            "heads": heads, "kv_heads": kv_heads, "max_partials": most, "tasks": tasks.ctypes.data, "window": window,
        }.items():  # fmt: skip
            plan[name] = value
        _plan(state.ctypes.data)
        planned = tasks[: int(plan["num_tasks"])]
        assert [row for task in planned for row in range(task["row"], task["end_row"])] == list(range(rows))
        items = used = 0
        for number, task in enumerate(planned):
            of_rows = [lengths[row] for row in range(task["row"], task["end_row"])]
            chunks = task["chunks"] - task["first"]
            spans = -(-chunks // task["span"])
            assert (task["chunks"], task["item"]) == (-(-max(of_rows) // CHUNK), items)
            assert task["first"] == (max(0, min(of_rows) - window) // CHUNK if window else 0)
            items += spans * kv_heads
            if spans > 1:
                assert task["partial"] == used
                assert not walked[number].any()
                used += chunks * (task["end_row"] - task["row"]) * heads
        assert items == plan["num_items"]
        assert used <= most
        if most > 1 << 39 and not window:
            assert items >= min(threads, 64)  # room for all: every thread has something to do


@pytest.mark.parametrize("kv_format", ["f16", "int4"])
def test_a_row_does_not_depend_on_the_room_for_partials(tmp_path_factory, kv_format: str) -> None:
    checkpoint = tiny(tmp_path_factory, context_length=2048)
    backend = make_backend("numba", checkpoint, EngineConfig(threads=3, max_rows=1200, kv_format=kv_format))
    tokens, logits, items = np.random.default_rng(0).integers(0, 300, 1110).tolist(), [], set()
    plan = backend.program.state["plans"][0]
    for room in (int(plan["max_partials"]), 0, 50, 400):
        plan["max_partials"] = room
        cache = backend.new_cache(2, 1200)
        forward(backend, cache, {0: tokens[:1000]})
        outputs = [forward(backend, cache, rows).logits for rows in ({0: tokens[:3]}, {0: tokens[:100], 1: tokens[:40]})]
        items.add(int(plan["num_items"]))
        logits.append(np.concatenate(outputs))
    assert len(items) > 1  # the room was of consequence
    for other in logits[1:]:
        assert np.array_equal(logits[0], other)
    backend.close()

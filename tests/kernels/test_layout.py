"""Records that compiled code and Python share: operations by name, and cache lines."""

import pytest
from numba import njit

from cpuspec.kernels import layout
from cpuspec.kernels.pointers import pointer_to

operation_at = pointer_to(layout.OPERATION)


@njit
def _is_linear(at):  # type: ignore[no-untyped-def]
    return layout.is_operation(operation_at(at), "linear")


def test_a_program_holds_operations_by_name_and_refuses_an_operand_that_there_is_not() -> None:
    operations = [("keep", {"layer": 3}), ("linear", {"num_tensors": 2, "cap": 30.0, "tensors": [{"out": 5}, {"stride": 6}]})]
    records, [tensors] = layout.program(operations)
    assert [list(layout.OPERANDS)[records[0]["number"]], records[0]["keep"]["layer"]] == ["keep", 3]
    assert [_is_linear(record.ctypes.data) for record in records.reshape(-1, 1)] == [False, True]
    linear = records[1]["linear"]
    assert [linear["num_tensors"], linear["cap"], tensors[0]["out"], tensors[1]["stride"]] == [2, 30, 5, 6]
    assert linear["tensors"] == tensors.ctypes.data
    with pytest.raises(ValueError, match="layers"):
        layout.program([("keep", {"layers": 3})])


def test_what_threads_wait_on_lies_on_cache_lines_of_its_own() -> None:
    offsets = [layout.TEAM.fields[name][1] for name in ("step", "quit", "job", "workers")]  # type: ignore[index]
    assert all(offset % 64 == 0 for offset in offsets)
    assert layout.SLEEPING == layout.WATCHED.fields["sleeping"][1] == 64  # type: ignore[index]
    assert layout.WORKER.itemsize == 64
    assert layout.JOB.itemsize <= 64

"""Records that compiled code and Python share: both find the same values under the same names."""

import numpy as np
import pytest
from numba import njit

from cpuspec.kernels import layout
from cpuspec.kernels.pointers import address, pointer_to, to

INNER = np.dtype([("code", np.int32), ("ratio", np.float32)], align=True)
OUTER = np.dtype(
    [("number", np.int64), ("one", INNER), ("many", INNER, 3), ("elsewhere", to(INNER)), ("words", np.int64, 2)], align=True
)

outer_at, operation_at = pointer_to(OUTER), pointer_to(layout.OPERATION)


@njit
def _read(at):  # type: ignore[no-untyped-def]
    record = outer_at(at)
    many, elsewhere = record.many[2], record.elsewhere[1]
    return record.number, record.one.code, record.one.ratio, many.code, many.ratio, elsewhere.code, record.words[1]


@njit
def _write(at):  # type: ignore[no-untyped-def]
    records = outer_at(at)
    records[1].number = 7
    records[1].many[1].ratio = 0.5
    records[1].elsewhere = records[0].elsewhere
    records[1].words[1] = address(records[1].one) - at


@njit
def _is_linear(at):  # type: ignore[no-untyped-def]
    return layout.is_operation(operation_at(at), "linear")


def test_compiled_code_reads_the_fields_that_python_wrote() -> None:
    there = np.array([(1, 1.5), (2, 2.5)], INNER)
    record = np.zeros((), OUTER)
    record["number"], record["one"], record["elsewhere"], record["words"] = -5, (3, 0.25), there.ctypes.data, (8, 9)
    record["many"][2] = (11, 4.0)
    assert _read(record.ctypes.data) == (-5, 3, 0.25, 11, 4.0, 2, 9)


def test_python_reads_the_fields_that_compiled_code_wrote() -> None:
    records = np.zeros(2, OUTER)
    records[0]["elsewhere"] = 123
    _write(records.ctypes.data)
    wanted = np.zeros((), OUTER)
    wanted["number"], wanted["elsewhere"] = 7, 123
    wanted["many"]["ratio"][1] = 0.5
    wanted["words"][1] = OUTER.itemsize + OUTER.fields["one"][1]  # type: ignore[index]
    assert records[1] == wanted
    assert records[0]["number"] == 0


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

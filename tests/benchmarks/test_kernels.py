"""The benchmark of kernels measures every case it is asked for, in figures that belong together."""

import kernels
import pytest


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Small matrices, short peaks."""
    monkeypatch.setattr(kernels, "read_bandwidth", lambda threads: 1e9 * threads)
    monkeypatch.setattr(kernels, "OUT_FEATURES", 64)
    monkeypatch.setattr(kernels, "_PEAK_WORK", 10**6)


def test_every_format_number_of_rows_and_threads_is_measured(measured):
    options = ("--rows", "1,3", "--threads", "1,2", "--rounds", "2", "--in-features", "256", "--megabytes", "1")
    saved, result = measured(kernels.main, "--formats", "q4_0,f16", *options)
    cases = [(one["format"], one["activations"], one["threads"], one["rows"]) for one in saved["kernels"]]
    orders = {"q4_0": "int8", "f16": "f32"}
    assert cases == [(name, order, team, rows) for name, order in orders.items() for team in (1, 2) for rows in (1, 3)]
    for one in saved["kernels"]:
        weights_per_byte = 1 / 2 if one["format"] == "f16" else 32 / 18
        rate, read = one["multiply_adds_per_s"]["median"], one["bytes_per_s"]["median"]
        assert rate / read == pytest.approx(one["rows"] * weights_per_byte, rel=1e-3)
        assert one["over_bare_read"]["median"] == pytest.approx(read / 1e9 / one["threads"], rel=1e-3)
        assert (one["over_one_row"]["rounds"] == [1, 1]) == (one["rows"] == 1)
    assert all(rate > 0 for by_team in saved["peak_multiply_adds_per_s"].values() for rate in by_team.values())
    assert "| 2 | 3 |" in result.output

"""Memory that weights do not fit is told before they are loaded, and scratch memory is no more than there is."""

import logging
from dataclasses import replace

import pytest

from cpuspec import metrics
from cpuspec.backends import make_backend, weights
from cpuspec.backends.weights import check_room
from cpuspec.errors import BackendError
from cpuspec.metrics import read_bandwidth
from cpuspec.platform import SYSTEM, Memory
from cpuspec.settings import EngineConfig
from tests.backends.models import tiny


def has(monkeypatch: pytest.MonkeyPatch, module: object, memory: Memory) -> None:
    monkeypatch.setattr(module, "SYSTEM", replace(SYSTEM, memory=lambda: memory))


@pytest.mark.parametrize("backend", ["numba", "numpy", "torch"])
def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(tmp_path_factory, monkeypatch, backend: str) -> None:
    checkpoint = tiny(tmp_path_factory)
    has(monkeypatch, weights, Memory(1 << 34, 1 << 34, 1000))
    with pytest.raises(BackendError, match=r"this group of processes may use .* GB; use a model of fewer bytes, or allow more"):
        make_backend(backend, checkpoint, EngineConfig(threads=1, max_rows=8))


def test_a_refusal_says_what_kept_the_weights_from_the_disk(tmp_path_factory, monkeypatch) -> None:
    checkpoint = tiny(tmp_path_factory)
    has(monkeypatch, weights, Memory(1 << 34, 1 << 34, 1000))
    monkeypatch.setattr("cpuspec.backends.packed._SMALLEST_BYTES", 0)
    monkeypatch.setenv("CPUSPEC_PACKED_GB", "0.000001")
    with pytest.raises(BackendError, match=r"cannot be read from the disk: CPUSPEC_PACKED_GB keeps 1e-06 GB .*; use a model of"):
        make_backend("numba", checkpoint, EngineConfig(threads=1, max_rows=8))


@pytest.mark.parametrize(
    ("memory", "told", "refused"),
    [
        (Memory(), "", False),
        (Memory(8 * 10**9, 7 * 10**9), "", False),
        (Memory(8 * 10**9, 10**9), "1.00 GB are available", False),
        (Memory(10**9, 5 * 10**8), "this machine has 1.00 GB", True),
        (Memory(8 * 10**9, 10**9, 15 * 10**8), "this group of processes may use 1.50 GB", True),
    ],
)
def test_weights_in_a_mapped_file_may_stay_there_with_a_warning(
    monkeypatch, caplog: pytest.LogCaptureFixture, memory: Memory, told: str, refused: bool
) -> None:
    has(monkeypatch, weights, memory)
    caplog.set_level(logging.WARNING)
    check_room(2 * 10**9, from_disk=True)
    assert ("each token reads the rest from the disk" in caplog.text) == bool(told)
    assert told in caplog.text
    if refused:
        with pytest.raises(BackendError, match=told):
            check_room(2 * 10**9)
    else:
        check_room(2 * 10**9)
        assert ("some may be swapped" in caplog.text) == bool(told)


def test_the_bandwidth_is_measured_within_the_memory_that_there_is(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    has(monkeypatch, metrics, Memory(1 << 30, 32 << 20))
    assert read_bandwidth(1) > 0
    assert "measured over 8 MB" in caplog.text
    caplog.clear()
    assert read_bandwidth(1, num_bytes=4096) > 0
    assert not caplog.text

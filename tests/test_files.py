"""Files of others are read within bounds, and nobody sees half of a file of ours."""

import os
from pathlib import Path

import pytest

from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.files import read_file, replacing, write_file
from tests.processes import make_pipe


def test_a_regular_file_within_the_bound_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_file(path, 5, ConfigError) == b"12345"
    with pytest.raises(ConfigError, match=r"the list has 5 bytes; wanted at most 4"):
        read_file(path, 4, ConfigError, "the list")


@pytest.mark.parametrize("error", [ConfigError, CheckpointError])
def test_no_other_file_is_opened_or_believed(tmp_path: Path, error: type[Exception]) -> None:
    make_pipe(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "directory").mkdir()
    for name in ("pipe", "zero", "directory"):
        with pytest.raises(error, match=f"{name} is not a regular file"):
            read_file(tmp_path / name, 100, error)
    with pytest.raises(error, match="gone does not exist"):
        read_file(tmp_path / "gone", 100, error)
    with pytest.raises(error, match="null byte"):
        read_file(tmp_path / "a\0b", 100, error)
    with pytest.raises(error, match="cannot be read"):
        read_file(tmp_path / ("x" * 5000), 100, error)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_file(path, "before ä")
    with replacing(path) as file:
        file.write(b"half")
        file.flush()
        assert path.read_text("utf-8") == "before ä"
        file.write(b" and half")
    assert path.read_bytes() == b"half and half"

    class Stop(BaseException):
        pass

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"more")
            raise Stop

    with pytest.raises(Stop):
        fail()
    assert path.read_bytes() == b"half and half"
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


@pytest.mark.posix
def test_a_file_of_ours_can_be_written_by_nobody_else(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_file(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_where_nothing_can_be_written_that_is_said_and_nothing_left(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "gone" / "a", "x")
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError):
        write_file(tmp_path / "directory", "x")
    assert [one.name for one in tmp_path.iterdir()] == ["directory"]

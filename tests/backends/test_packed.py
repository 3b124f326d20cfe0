"""Packed weights come from the disk at the second start, and only if they are what packing would give."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpuspec.backends import make_backend, packed
from cpuspec.backends.packed import packed_directory, packed_files, packed_matrices
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.mapped import give_back_pages, map_file, place_in_file
from cpuspec.errors import ConfigError, FormatError
from cpuspec.formats import FORMATS, Cast, Format, QuantTensor
from cpuspec.formats.packing import pack
from cpuspec.kernels import machine_code
from cpuspec.settings import EngineConfig
from tools.make_tiny_model import make_tiny_gguf

SHAPE = (40, 256)


@pytest.fixture(autouse=True)
def _cache(own_cache: Path, monkeypatch) -> None:
    monkeypatch.delenv("CPUSPEC_PACKED_GB", raising=False)
    monkeypatch.setattr(packed, "_SMALLEST_BYTES", 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file with the bytes of one matrix in each format."""
    path = tmp_path / "model.bin"
    size = sum(SHAPE[0] * row.row_bytes(SHAPE[1]) for row in FORMATS.values())
    path.write_bytes(np.random.default_rng(1).bytes(size))
    return path


def tensors_of(path: Path) -> dict[str, QuantTensor]:
    data, at, tensors = map_file(path), 0, {}
    for name, row in FORMATS.items():
        shape = (SHAPE[0], row.row_bytes(SHAPE[1]))
        tensors[name] = QuantTensor(row, SHAPE, data[at : at + shape[0] * shape[1]].reshape(shape))
        at += shape[0] * shape[1]
    return tensors


def check(tensors: dict[str, QuantTensor], **options) -> dict:
    """Packed matrices, after seeing that they are what `pack` gives."""
    matrices = packed_matrices("A model", tensors, 2, **options)
    assert list(matrices) == list(tensors)
    for name, tensor in tensors.items():
        wanted = pack(tensor)
        assert np.array_equal(matrices[name].data, wanted.data)
        assert (matrices[name].format, matrices[name].shape) == (wanted.format, wanted.shape)
        assert matrices[name].data.ctypes.data % 64 == 0
    return matrices


@pytest.fixture
def packs(monkeypatch) -> list[str]:
    """The formats that were packed since this list was last cleared."""
    done: list[str] = []

    def watched(tensor: QuantTensor) -> object:
        done.append(tensor.format.name)
        return pack(tensor)

    monkeypatch.setattr(packed, "pack", watched)
    return done


def only_file() -> Path:
    [(path, _)] = packed_files()
    return path


def test_a_second_start_packs_nothing(model: Path, packs: list[str]) -> None:
    check(tensors_of(model))
    assert sorted(packs) == sorted(FORMATS)
    packs.clear()
    matrices = check(tensors_of(model))
    assert packs == []
    assert not any(matrix.data.flags.writeable for matrix in matrices.values())
    assert only_file().name.startswith("a-model-")


def test_a_model_that_has_moved_is_known_again(model: Path, packs: list[str]) -> None:
    check(tensors_of(model))
    packs.clear()
    moved = model.parent / "elsewhere" / "other.bin"
    moved.parent.mkdir()
    model.rename(moved)
    check(tensors_of(moved))
    assert packs == []


def test_a_cast_is_made_once_and_kept_apart_from_casts_of_other_tensors(packs: list[str]) -> None:
    def recode(data: np.ndarray, source: Format, to: Format) -> np.ndarray:
        made.append(to.name)
        return to.encode(source.decode(data))

    made: list[str] = []
    values = np.random.default_rng(2).standard_normal(SHAPE).astype(np.float32)
    for source in ("q8_0", "q4_0", "q8_0", "q4_0"):
        tensor = QuantTensor.encode(FORMATS[source], values)
        matrices = packed_matrices("A model", {name: Cast(tensor, FORMATS[name], recode) for name in ("mxfp4", "q4_0")}, 2)
        for name in ("mxfp4", "q4_0"):
            assert np.array_equal(matrices[name].data, pack(QuantTensor.encode(FORMATS[name], tensor.dequantize())).data)
    assert sorted(made) == sorted(packs) == sorted(["mxfp4", "q4_0"] * 2)
    assert len(packed_files()) == 2


def rewrite(path: Path, change: Callable[[bytearray], None]) -> None:
    """Change a file's bytes and keep its times."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip(at: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at] ^= 1

    return change


@pytest.mark.parametrize("at", [0, 1000, -1])
def test_changed_weights_are_packed_again_though_their_file_has_kept_its_time(model: Path, packs: list[str], at: int) -> None:
    check(tensors_of(model))
    packs.clear()
    rewrite(model, flip(at))
    check(tensors_of(model))
    assert packs


def test_of_tensors_in_memory_every_byte_counts(packs: list[str]) -> None:
    data = np.zeros((16, 1 << 10), np.uint8)
    check({"a": QuantTensor(FORMATS["f32"], (16, 256), data)})
    packs.clear()
    check({"a": QuantTensor(FORMATS["f32"], (16, 256), data.copy())})
    assert packs == []
    data[7, 777] = 1
    check({"a": QuantTensor(FORMATS["f32"], (16, 256), data)})
    assert packs == ["f32"]


def tensor(format_name: str, rows: int) -> QuantTensor:
    data, row = np.arange(16 << 10, dtype=np.uint16).view(np.uint8), FORMATS[format_name]
    return QuantTensor(row, (rows, len(data) // rows // row.block_bytes), data.reshape(rows, -1))


@pytest.mark.parametrize(
    "other",
    [
        {"a": tensor("f16", 16), "c": tensor("f16", 16)},
        {"a": tensor("f16", 16), "b": tensor("bf16", 16)},
        {"a": tensor("f16", 16), "b": tensor("f16", 32)},
        {"a": tensor("f16", 16)},
    ],
    ids=["name", "format", "shape", "fewer"],
)
def test_a_set_of_tensors_has_a_file_of_its_own(packs: list[str], other: dict[str, QuantTensor]) -> None:
    first = {"a": tensor("f16", 16), "b": tensor("f16", 16)}
    for tensors, is_new in ((first, True), (other, True), (first, False), (other, False)):
        packs.clear()
        check(tensors)
        assert bool(packs) == is_new


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(packed, "_FINGERPRINT", "other sources"), (packed, "_LAYOUT", 1), (packed.sys, "byteorder", "big")],
)
def test_another_way_of_packing_does_not_read_what_this_one_wrote(
    model: Path, packs: list[str], monkeypatch, owner, name: str, value: str
) -> None:
    check(tensors_of(model))
    packs.clear()
    monkeypatch.setattr(owner, name, value)
    check(tensors_of(model))
    assert packs


def write_bytes(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": write_bytes(b""),
    "nonsense": write_bytes(b"nonsense"),
    "cut by a byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "longer by a byte": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "first byte": lambda path: rewrite(path, flip(0)),
    "an offset": lambda path: path.write_bytes(path.read_bytes().replace(b'"q4_0", [40, 256], ', b'"q4_0", [40, 256],9', 1)),
    "gone": lambda path: path.unlink(),
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


def test_a_file_whose_head_lies_is_written_again(model: Path, packs: list[str]) -> None:
    """What else may happen to a file: `tests/faults`."""
    check(tensors_of(model))
    path = only_file()
    good = path.read_bytes()
    DAMAGE["an offset"](path)
    assert path.read_bytes() != good
    packs.clear()
    check(tensors_of(model))
    assert packs
    assert path.read_bytes() == good


def fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def with_a_directory_in_its_place(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tensors_of(model))
    path = only_file()
    path.unlink()
    path.mkdir()


def with_a_cache_that_is_a_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model.parent / "file").touch()
    monkeypatch.setenv("CPUSPEC_CACHE", str(model.parent / "file"))


def on_a_disk_without_twice_the_room(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(model.parent)._replace(free=model.stat().st_size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)


@pytest.mark.parametrize(
    ("harm", "left"),
    [
        (with_a_directory_in_its_place, 1),
        (with_a_cache_that_is_a_file, 0),
        (on_a_disk_without_twice_the_room, 0),
        (lambda model, monkeypatch: monkeypatch.setattr(os, "fsync", fail), 0),  # the disk fills up
        (lambda model, monkeypatch: monkeypatch.setenv("CPUSPEC_PACKED_GB", "0.0"), 0),
        (lambda model, monkeypatch: monkeypatch.setattr(packed, "_SMALLEST_BYTES", 1 << 20), 0),  # it is a small model
    ],
)
def test_what_cannot_be_kept_is_packed_in_memory_and_leaves_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path, pytest.MonkeyPatch], None], left: int
) -> None:
    harm(model, monkeypatch)
    for _ in range(2):
        check(tensors_of(model))
    assert len(packed_files()) == left
    assert not packed_directory().is_dir() or len(list(packed_directory().iterdir())) == left


def test_an_interrupted_start_leaves_nothing_behind(model: Path, monkeypatch) -> None:
    def interrupted(tensor: QuantTensor) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(packed, "pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        packed_matrices("model", tensors_of(model), 2)
    assert list(packed_directory().iterdir()) == []


def test_starts_at_the_same_time_all_get_their_weights(model: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for start in [pool.submit(check, tensors_of(model)) for _ in range(8)]:
            start.result()
    only_file()


def test_nothing_is_kept_where_the_caller_does_not_want_it(model: Path) -> None:
    check(tensors_of(model), keep=False)
    assert not packed_directory().exists()


@pytest.mark.parametrize("limit", ["much", "-1", "nan", "inf", "1e30"])
def test_a_limit_that_is_no_number_is_a_clear_error(model: Path, monkeypatch, limit: str) -> None:
    monkeypatch.setenv("CPUSPEC_PACKED_GB", limit)
    with pytest.raises(ConfigError, match="CPUSPEC_PACKED_GB"):
        check(tensors_of(model))


def one_matrix(seed: int) -> dict[str, QuantTensor]:
    values = np.random.default_rng(seed).standard_normal((64, 256)).astype(np.float32)
    return {"a": QuantTensor.encode(FORMATS["f32"], values)}


def test_the_longest_unused_goes_when_the_limit_is_reached(monkeypatch, packs: list[str]) -> None:
    check(one_matrix(1))
    size = only_file().stat().st_size
    monkeypatch.setenv("CPUSPEC_PACKED_GB", str(2.5 * size / 1e9))
    check(one_matrix(2))
    for age, (path, _) in zip((20, 10), packed_files(), strict=True):
        os.utime(path, (time.time() - age,) * 2)
    check(one_matrix(1))  # now the second is the longest unused
    packs.clear()
    check(one_matrix(3))
    check(one_matrix(1))
    assert packs == ["f32"]
    check(one_matrix(2))
    assert packs == ["f32", "f32"]
    assert len(packed_files()) == 2


def test_a_model_larger_than_the_limit_runs_and_costs_others_nothing(model: Path, monkeypatch) -> None:
    check(one_matrix(1))
    before = packed_files()
    monkeypatch.setenv("CPUSPEC_PACKED_GB", str(1.5 * before[0][1] / 1e9))
    check(tensors_of(model))
    assert packed_files() == before


def test_what_a_killed_start_left_is_removed_and_what_a_running_one_writes_is_not() -> None:
    packed_directory().mkdir(parents=True)
    abandoned, running = (packed_directory() / f"model-0.packed.{n}-1" for n in range(2))
    for path in (abandoned, running):
        path.write_bytes(b"unfinished")
    os.utime(abandoned, (time.time() - 7200,) * 2)
    check(one_matrix(1))
    assert not abandoned.exists()
    assert running.exists()


def test_pages_that_were_given_back_come_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = np.random.default_rng(1).bytes(3 * 4096 + 17)
    path.write_bytes(content)
    data = map_file(path)
    for view in (data, data[4097:], data[5:6], data[:4096].reshape(64, 64), np.frombuffer(content, np.uint8)):
        before = view.tobytes()
        give_back_pages(view)
        assert view.tobytes() == before


def test_a_view_knows_its_place_in_its_file_by_what_is_in_it(tmp_path: Path) -> None:
    path, same, other = tmp_path / "file", tmp_path / "same", tmp_path / "other"
    for one, content in ((path, bytes(1000)), (same, bytes(1000)), (other, bytes(999) + b"1")):
        one.write_bytes(content)
        os.utime(one, ns=(1, 1))
    data = map_file(path)
    place = place_in_file(data[100:200].reshape(10, 10)[3:])
    assert place is not None
    assert place[1] == 130
    assert place_in_file(map_file(same)[130:140]) == place_in_file(map_file(path, mmap=False)[130:140]) == place
    found = place_in_file(map_file(other)[130:140])
    assert found is not None
    assert (found[0] != place[0], found[1]) == (True, 130), "of one size and date, with the same bytes in this place"
    assert place_in_file(data[100:200].copy()) is None
    assert place_in_file(np.zeros(5, np.uint8)) is None


@pytest.mark.parametrize("settled", [True, False])
def test_a_file_is_read_for_its_contents_once_unless_it_was_changed_just_now(
    tmp_path: Path, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    now = time.time_ns() + (10_000_000_000 if settled else 0)
    monkeypatch.setattr(time, "time_ns", lambda: now)
    first = place_in_file(map_file(path))
    kept = list((Path(os.environ["CPUSPEC_CACHE"]) / "contents").glob("*"))
    path.write_bytes(bytes(999) + b"1")
    os.utime(path, ns=(5, 5))  # the clock of files may stand still for some milliseconds
    second = place_in_file(map_file(path))
    assert first is not None
    assert second is not None
    assert first[0] != second[0]
    assert any(one.read_text() == first[0] for one in kept) == settled


def test_checksums_see_every_bit_and_the_order_of_words_pages_and_blocks() -> None:
    data = np.random.default_rng(3).integers(0, 256, 2 * packed._CHECKED_BYTES + 4096, dtype=np.uint8)

    def sums(changed: np.ndarray) -> bytes:
        with ThreadPoolExecutor(2) as pool:
            return packed._checksums(changed, pool)

    wanted, page = sums(data), data[:4096].copy()
    assert len(wanted) % 4096 == 0
    for at in (0, 1, 4095, 4096, packed._CHECKED_BYTES, len(data) - 1):
        for bit in range(8):
            changed = data.copy()
            changed[at] ^= 1 << bit
            assert sums(changed) != wanted
    for size in (8, 4096, packed._CHECKED_BYTES):
        changed = data.copy()
        changed[:size], changed[size : 2 * size] = data[size : 2 * size], data[:size]
        assert sums(changed) != wanted
    for changed_page in (np.zeros(4096, np.uint8), page[::-1], np.roll(page, 8)):
        changed = data.copy()
        changed[:4096] = changed_page
        assert sums(changed) != wanted
    assert sums(data.copy()) == wanted


def test_verifying_reads_every_file_of_a_model_and_removes_damaged_ones(model: Path, packs: list[str]) -> None:
    check(tensors_of(model))
    sound = only_file()
    check(one_matrix(1))
    [damaged] = {path for path, _ in packed_files()} - {sound}
    rewrite(damaged, flip(-1))
    assert packed.verify_packed(2, "A mode") == {}
    assert packed.verify_packed(2, "A model") == {sound: True, damaged: False}
    assert packed.verify_packed(2) == {sound: True}
    assert [path for path, _ in packed_files()] == [sound]
    packs.clear()
    check(tensors_of(model))
    assert packs == []
    check(one_matrix(1))
    assert packs == ["f32"]


@pytest.mark.parametrize("damage", [*DAMAGE, "head of numbers"])
def test_verifying_trusts_no_head(model: Path, damage: str) -> None:
    check(tensors_of(model))
    path = only_file()
    if damage == "head of numbers":
        path.write_bytes(path.read_bytes().replace(b'"bytes": ', b'"bytes": -9999999', 1))
    else:
        DAMAGE[damage](path)
    expected = {} if damage in ("gone", "a dangling link") else {path: damage == "an offset"}
    assert packed.verify_packed(1, "A model") == expected


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no mode here")
def test_weights_that_others_can_write_are_warned_of(model: Path, packs: list[str], caplog: pytest.LogCaptureFixture) -> None:
    old = os.umask(0)
    try:
        check(tensors_of(model))
        check(tensors_of(model))
    finally:
        os.umask(old)
    assert caplog.records == []
    only_file().chmod(0o666)
    packs.clear()
    check(tensors_of(model))
    assert f"read from {only_file()}, which can be written by others (mode 0666)" in caplog.text
    assert packs == []


def test_where_no_open_file_can_be_renamed_or_removed_a_second_start_packs_nothing(
    model: Path, packs: list[str], monkeypatch
) -> None:
    """As on Windows."""

    def is_open(path: Path | str) -> bool:
        name = str(path)
        return any(os.path.realpath(f"/proc/self/fd/{fd}") == name for fd in os.listdir("/proc/self/fd")) or (
            name in Path("/proc/self/maps").read_text()
        )

    def guarded(real: Callable) -> Callable:
        def change(*paths, **options):
            if any(is_open(path) for path in paths):
                raise PermissionError(errno.EACCES, "The process cannot access the file because it is being used")
            return real(*paths, **options)

        return change

    monkeypatch.setattr(os, "replace", guarded(os.replace))
    monkeypatch.setattr(Path, "unlink", guarded(Path.unlink))
    with pytest.raises(PermissionError), model.open() as file:
        os.replace(file.name, "elsewhere")
    held = check(tensors_of(model))
    assert [path.suffix for path, _ in packed_files()] == [".packed"]
    packs.clear()
    check(tensors_of(model))
    assert packs == []
    # A second process that packs at the same time cannot replace what the first has mapped, and takes that.
    monkeypatch.setattr(packed._PackedFile, "read", lambda self, read=packed._PackedFile.read: read(self) if packs else None)
    check(tensors_of(model))
    assert [path.suffix for path, _ in packed_files()] == [".packed"]
    assert packs
    del held


def test_without_mmap_no_file_is_mapped(model: Path, packs: list[str], monkeypatch) -> None:
    def tensors() -> dict[str, QuantTensor]:
        data = map_file(model, mmap=False)
        assert not data.flags.writeable
        return {name: replace(one, data=_view_like(one.data, mapped_data, data)) for name, one in mapped_tensors.items()}

    mapped_tensors = tensors_of(model)
    mapped_data = map_file(model)
    check(mapped_tensors)
    packs.clear()
    matrices = check(tensors(), mmap=False)
    assert packs == []  # the same file's: known by its place in it
    before = {name: matrix.data.tobytes() for name, matrix in matrices.items()}
    for path in (model, only_file()):
        os.truncate(path, 0)
    assert {name: matrix.data.tobytes() for name, matrix in matrices.items()} == before


def _view_like(view: np.ndarray, whole: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The same place of another copy of a file."""
    place = place_in_file(view)
    assert place is not None
    start = place[1]
    return other[start : start + view.nbytes].reshape(view.shape)


def test_the_compiled_backend_names_its_casts_after_all_that_makes_its_machine_code(
    tmp_path: Path, packs: list[str], monkeypatch
) -> None:
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", weight_format="f16"))
    for fingerprint in (machine_code.fingerprint(), "other sources"):
        monkeypatch.setattr(machine_code, "fingerprint", lambda name=fingerprint: name)
        make_backend("numba", checkpoint, EngineConfig(threads=1, max_rows=32), casts={"layers.0.down": FORMATS["q8_0"]}).close()
    assert packs.count("q8_0") == 2


@pytest.mark.parametrize("keep", [True, False])
def test_a_cast_that_its_format_cannot_hold_is_named(keep: bool) -> None:
    cast = Cast(QuantTensor.encode(FORMATS["f16"], np.full(SHAPE, np.nan)), FORMATS["q8_0"])
    with pytest.raises(FormatError, match=r"layers\.0\.down: q8_0 cannot hold nan"):
        packed_matrices("A model", {"layers.0.down": cast}, 2, keep)

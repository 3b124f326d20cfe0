import os
import struct

import numpy as np
import pytest

from cpuspec.checkpoints import open_checkpoint
from cpuspec.errors import CheckpointError
from tests.fuzz.gguf_fields import structural_fields
from tests.model_files import copy_gguf, few_bytes, write_anew
from tools.make_tiny_model import make_tiny_gguf


@pytest.fixture(scope="module")
def sample(small_gguf, tmp_path_factory):
    """A whole small file, the fields of its header, and a path to write a damaged copy to."""
    content = small_gguf("qwen2").read_bytes()
    return content, structural_fields(content), tmp_path_factory.mktemp("hostile") / "m.gguf"


def patched(content: bytes, position: int, size: int, value: int) -> bytes:
    return content[:position] + (value % (1 << 8 * size)).to_bytes(size, "little") + content[position + size :]


def open_bytes(path, content: bytes):
    """Open and use every byte that the header points at, so that a bad view would be noticed."""
    checkpoint = open_checkpoint(write_anew(path, content))
    for tensor in checkpoint.tensors.values():
        tensor.dequantize()
    return checkpoint


def refused(path, content: bytes) -> bool:
    try:
        open_bytes(path, content)
    except CheckpointError as error:
        return str(path) in str(error)
    return False


def test_the_undamaged_file_opens(sample):
    content, fields, path = sample
    assert not refused(path, content)
    assert len(fields) > 300


def test_every_count_length_type_dimension_and_offset_is_checked(sample):
    content, fields, path = sample
    strings = [field for field in fields if field[0].startswith("length of a string of")]
    assert len(strings) > 200
    # One of the vocabulary's strings is like the other.
    for name, position, size in [field for field in fields if field not in strings[5:] and field[2]]:
        for value in ((1 << 8 * size) - 1, 1 << (8 * size - 2)):
            assert refused(path, patched(content, position, size, value)), (name, value)


@pytest.mark.parametrize("position", [8, 16], ids=["tensors", "metadata"])
@pytest.mark.parametrize("count", [1 << 16, 1 << 32, 1 << 60, (1 << 64) - 1])
def test_a_lying_count_allocates_nothing(sample, position, count):
    content, _, path = sample
    write_anew(path, patched(content, position, 8, count))
    with few_bytes(1 << 20), pytest.raises(CheckpointError, match=f"count is {count} .*wanted at most"):
        open_checkpoint(path)


@pytest.mark.parametrize("item", [0, 4, 8, 12])
@pytest.mark.parametrize("count", [1 << 20, 1 << 40, 1 << 61, (1 << 64) - 1])
def test_a_lying_array_length_allocates_nothing(tmp_path, item, count):
    path = tmp_path / "m.gguf"
    path.write_bytes(header(0, 1) + key("a") + struct.pack("<IIQ", 9, item, count) + b"\0" * 64)
    with few_bytes(1 << 20), pytest.raises(CheckpointError, match="length of a"):
        open_checkpoint(path)


def header(num_tensors: int, num_entries: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)


def key(name: str | bytes) -> bytes:
    name = name.encode() if isinstance(name, str) else name
    return struct.pack("<Q", len(name)) + name


def entry(name: str, kind: int, value: bytes) -> bytes:
    return key(name) + struct.pack("<I", kind) + value


def info(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return key(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


U8_ENTRY = entry("k", 0, b"\1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"GG", "it starts with b'GG'"),
        (b"PK\3\4" + b"\0" * 60, "not a GGUF file"),
        (b"GGUF", "version needs 4 bytes"),
        (header(0, 0, version=1), "version 1; versions 2 and 3"),
        (header(0, 0, version=4), "version 4; versions 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(0, 0), "general.architecture is absent"),
        (header(0, 2) + U8_ENTRY + U8_ENTRY, "'k', wanted printable text that is not empty and used once"),
        (header(0, 1) + entry("", 0, b"\1") + b"\0", "not empty"),
        (header(0, 1) + entry("a\x1b[2J", 0, b"\1"), "printable"),
        (header(0, 1) + key(b"\xff\xfe") + struct.pack("<IB", 0, 1), "not UTF-8"),
        (header(0, 1) + key("k" * 70000) + b"\0" * 70000, "70000 bytes long, wanted at most 65535"),
        (header(0, 1) + entry("k", 13, b"\0" * 8), "value type 13"),
        (header(0, 1) + entry("k", 7, b"\2"), "boolean with the byte 2"),
        (header(0, 1) + entry("k", 9, struct.pack("<IQIQ", 9, 1, 9, 1)), "array of arrays"),
        (header(0, 1) + entry("k", 9, struct.pack("<IQ", 77, 1)), "value type 77"),
        (header(0, 1) + entry("k", 9, struct.pack("<IQQ", 8, 1, 1 << 63)), "string 0 of k ends at"),
        (header(0, 1) + entry("general.alignment", 4, struct.pack("<I", 0)), "alignment is 0"),
        (header(0, 1) + entry("general.alignment", 4, struct.pack("<I", 24)), "alignment is 24, wanted a power of two"),
        (header(0, 1) + entry("general.alignment", 4, struct.pack("<I", 1 << 30)), "alignment"),
        (header(0, 1) + entry("general.alignment", 8, key("32")), "alignment is '32'"),
        (header(1, 0) + info("t", ()) + b"\0" * 64, "0 dimensions"),
        (header(1, 0) + info("t", (1,) * 5), "5 dimensions"),
        (header(1, 0) + info("t", (4, 0)) + b"\0" * 64, "sizes above zero"),
        (header(1, 0) + info("", (4, 1)), "'', wanted printable"),
        (header(1, 0) + info("t" * 65, (4, 1)), "65 bytes long, wanted at most 64"),
        (header(1, 0) + info("t", (4, 1), offset=16), "offset 16, wanted a multiple of the file's alignment 32"),
        (header(1, 0) + info("t", (4, 1), kind=15), "type Q8_K; supported are"),
        (header(1, 0) + info("t", (4, 1), kind=5), "type number 5; supported are"),
        (header(1, 0) + info("t", (33, 1), kind=2), "rows of 33, wanted a multiple of 32"),
        (header(1, 0) + info("t", (1 << 32, 1 << 32)), "needs bytes"),
        (header(1, 0) + info("t", (1 << 63, 2)), "needs bytes"),
        (header(1, 0) + info("t", (4, 4), offset=(1 << 64) - 32), "needs bytes"),
        (header(1, 0) + info("t", (2, 2, 2, 1)) + b"\0" * 96, "wanted a vector, a matrix, or one of each expert"),
        (header(2, 0) + info("t", (4,)) + info("t", (4,), offset=32) + b"\0" * 96, "used once"),
        (header(2, 0) + info("t", (12,)) + info("u", (4,), offset=32) + b"\0" * 96, "tensors t and u overlap"),
        (header(2, 0) + info("t", (4,)) + info("u", (4,)) + b"\0" * 96, "overlap"),
    ],
)
def test_a_hostile_file_is_a_clear_error(tmp_path, content, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_version_2_files_are_read(sample):
    content, _, path = sample
    assert not refused(path, patched(content, 4, 4, 2))


def test_any_power_of_two_is_an_alignment(tmp_path):
    source = make_tiny_gguf(tmp_path / "a.gguf")
    copy_gguf(source, tmp_path / "b.gguf", alignment=128)
    ours, theirs = open_checkpoint(tmp_path / "b.gguf"), open_checkpoint(source)
    assert all(np.array_equal(ours.tensors[name].data, tensor.data) for name, tensor in theirs.tensors.items())


def test_what_is_not_a_file_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "missing.gguf")
    with pytest.raises(CheckpointError, match="not a path"):
        open_checkpoint("a\0b")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(CheckpointError, match="give the directory"):
        open_checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not exist" if os.name == "nt" else "cannot be read"):
        open_checkpoint("x" * 5000)

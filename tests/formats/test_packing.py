"""Kernel order keeps every bit of the file's format."""

import numpy as np
import pytest

from cpuspec.formats import FORMATS, QuantTensor
from cpuspec.formats.packing import TILE, pack, tile_bytes, unpack

# Formats that are packed in more bits than files have, because their codes take longer to find than the difference to read: times
# the bytes of the file.
EXPANDED = {
    **{"iq1_s": 2.09, "iq1_m": 1.94, "iq2_xxs": 1.58, "iq2_xs": 1.46, "iq2_s": 1.32, "iq3_xxs": 1.39, "iq3_s": 1.24},
    "tq1_0": 1.26,
}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 549])
def test_unpacking_gives_back_the_bytes_of_the_file(format_name: str, rows: int) -> None:
    row = FORMATS[format_name]
    data = np.random.default_rng(rows).integers(0, 256, (rows, row.row_bytes(768)), np.uint8)
    if format_name == "tq1_0":  # what no encoder writes is not kept
        data = row.join(row.split(data))
    tensor = QuantTensor(row, (rows, 768), data)
    packed = pack(tensor)
    assert np.array_equal(unpack(packed).data, data)
    changed = packed.data.copy()
    changed[0, 0] ^= 1
    assert not np.array_equal(unpack(type(packed)(row, packed.shape, changed)).data, data)


@pytest.mark.parametrize("format_name", [name for name in FORMATS if FORMATS[name].block_size == 1])
@pytest.mark.parametrize("in_features", [1, 31, 50, 300])
def test_any_number_of_inputs_can_be_packed(format_name: str, in_features: int) -> None:
    values = np.random.default_rng(in_features).standard_normal((20, in_features)).astype(np.float32)
    tensor = QuantTensor.encode(FORMATS[format_name], values)
    assert np.array_equal(unpack(pack(tensor)).data, tensor.data)


@pytest.mark.parametrize("format_name", FORMATS)
def test_packing_reads_at_most_three_percent_more_than_the_file_unless_it_says_so(format_name: str) -> None:
    row = FORMATS[format_name]
    assert tile_bytes(row, 4096) <= EXPANDED.get(format_name, 1.031) * TILE * row.row_bytes(4096)


@pytest.mark.parametrize("format_name", FORMATS)
def test_tiles_start_at_cache_lines(format_name: str) -> None:
    packed = pack(QuantTensor.encode(FORMATS[format_name], np.ones((20, 256), np.float32)))
    assert packed.tile_bytes % 64 == 0
    assert packed.data.ctypes.data % 64 == 0

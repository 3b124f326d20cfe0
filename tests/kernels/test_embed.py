"""Rows of the embedding: compiled decoders against the formats' own, and the way of formats that have none."""

import ctypes

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.formats import FORMATS, Format
from cpuspec.kernels import embed
from cpuspec.settings import EngineConfig
from tests.backends.models import forward, tiny

HALVES = np.array([0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00], np.uint16)  # f16, to nan


def _any_blocks(format: Format, num_blocks: int) -> np.ndarray:
    """Bytes of every kind: random ones, each value of the first byte, and the edges of f16 wherever a block may have a scale."""
    data = np.random.default_rng(0).integers(0, 256, (num_blocks, format.block_bytes), np.uint8)
    data[:256, 0] = np.arange(256)
    edges = HALVES.view(np.uint8).reshape(-1, 2)
    for first in (0, 2, format.block_bytes - 2):
        if first + 2 <= format.block_bytes:
            data[256 : 256 + len(edges) ** 2, first : first + 2] = np.repeat(edges, len(edges), axis=0)
            edges = np.roll(edges, 1, axis=0)
    return data


def _compiled(name: str, data: np.ndarray) -> np.ndarray:
    """The values of rows of blocks."""
    address = embed.row_decoder(name)
    assert address is not None
    decode = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(address)
    num_blocks = data.shape[1] // FORMATS[name].block_bytes
    values = np.empty((len(data), num_blocks * FORMATS[name].block_size), np.float32)
    for row, out in zip(data, values, strict=True):
        decode(row.ctypes.data, num_blocks, out.ctypes.data)
    return values


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """NaN is NaN: hardware and numpy keep different bits of it."""
    return bool((np.isnan(a) == np.isnan(b)).all() and (a.view(np.uint32) == b.view(np.uint32))[~np.isnan(a)].all())


@pytest.mark.parametrize("name", [name for name in FORMATS if embed.row_decoder(name)])
@pytest.mark.parametrize("blocks_per_row", [1, 7])
def test_a_row_is_what_its_format_decodes_to(name: str, blocks_per_row: int) -> None:
    data = _any_blocks(FORMATS[name], 7 * 80).reshape(-1, blocks_per_row * FORMATS[name].block_bytes)
    wanted = FORMATS[name].decode(data)
    assert _same_bits(_compiled(name, data), wanted)
    assert np.isfinite(wanted).any()
    assert np.isnan(wanted).any()
    data[np.isfinite(wanted[:, -1]).argmax(), -1] ^= 0x11  # a number can change; nan times any code is nan
    assert not _same_bits(_compiled(name, data), wanted)


def test_the_formats_that_models_come_in_have_decoders() -> None:
    assert {"f16", "bf16", "q4_0", "q4_k", "q6_k", "q8_0"} <= {name for name in FORMATS if embed.row_decoder(name)}


@pytest.mark.parametrize(
    "options", [{}, {"weight_format": "f32", "architecture": "llama", "hidden_size": 50, "intermediate_size": 70}]
)
def test_a_format_without_a_decoder_gives_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    checkpoint, outputs = tiny(tmp_path_factory, **options), []
    for decoders in (embed._DECODERS, {}):
        monkeypatch.setattr(embed, "_DECODERS", decoders)
        embed.row_decoder.cache_clear()
        backend = make_backend("numba", checkpoint, EngineConfig(threads=1, max_rows=32))
        outputs.append(forward(backend, backend.new_cache(1, 32), {0: range(20, 40)}).logits)
        backend.close()
    embed.row_decoder.cache_clear()
    assert np.array_equal(*outputs)

"""Machines that are not here: how well threads of unequal cores, or very many threads, share out real models' forwards."""

import predict_threads
import pytest

from cpuspec.config import ModelConfig
from cpuspec.formats import get_format
from cpuspec.kernels import sharing
from tools.make_tiny_model import make_tiny_gguf

QWEN = ModelConfig("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 32768, 1e-6, 1e6, qkv_bias=True, tied_embeddings=True)
SMOLLM2 = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 1e5, tied_embeddings=True)
RATE = 1e10  # bytes/s that a core reads


def efficiency(config: ModelConfig, cores: str, *, matrices_only: bool = False) -> float:
    speeds = predict_threads.read_cores(cores)
    works = predict_threads.works_of(config, lambda name: get_format("q4_k" if config is QWEN else "q4_1"), RATE, len(speeds))
    simulated = [one for one in works if one.tiles or not matrices_only]
    return predict_threads.ideal_s(works, speeds) / predict_threads.forward_s(simulated, speeds)


# The least efficiency of matrices alone, and of forwards, in which short operations are prepared by few threads.
@pytest.mark.parametrize(
    ("config", "cores", "matrices", "forward"),
    [
        (QWEN, "2", 0.99, 0.97),
        (QWEN, "1+1x0.3", 0.98, 0.96),
        (QWEN, "1x0.3+1", 0.98, 0.96),
        (QWEN, "6+8x0.45", 0.9, 0.86),
        (QWEN, "8x0.45+6", 0.9, 0.85),
        (QWEN, "4+4x0.6", 0.95, 0.93),
        (QWEN, "8", 0.97, 0.94),
        (QWEN, "16", 0.93, 0.89),
        (QWEN, "32", 0.83, 0.76),
        (QWEN, "64", 0.6, 0.53),
        (SMOLLM2, "2", 0.95, 0.9),
        (SMOLLM2, "1+1x0.3", 0.93, 0.9),
        (SMOLLM2, "8", 0.82, 0.7),
    ],
)
def test_threads_end_together(config: ModelConfig, cores: str, matrices: float, forward: float) -> None:
    assert matrices <= efficiency(config, cores, matrices_only=True) < 1
    assert forward <= efficiency(config, cores) < 1


def test_halves_of_what_is_left_would_make_quick_cores_wait(monkeypatch) -> None:
    class Halves:
        py_func = staticmethod(lambda tiles, number: tiles - (tiles >> number) if number < sharing.PIECES else tiles)

    monkeypatch.setattr(sharing, "piece", Halves)
    assert efficiency(QWEN, "6+8x0.45", matrices_only=True) < 0.85


@pytest.mark.parametrize("tiles", [0, 1, 2, 17, 36, 9496, 100_000])
@pytest.mark.parametrize("threads", [1, 2, 3, 14, 64])
def test_pieces_of_shares_are_all_tiles_once(tiles: int, threads: int) -> None:
    found = []
    for thread in range(threads):
        start, size = sharing.share(tiles, thread, threads)
        bounds = [sharing.piece(size, number) for number in range(sharing.PIECES + 1)]
        assert bounds[0] == 0
        assert bounds == sorted(bounds)
        assert bounds[-1] == size
        found += range(start, start + size)
    assert found == list(range(tiles))


def test_it_prints_a_line_for_each_machine(tmp_path, measured) -> None:
    model = make_tiny_gguf(tmp_path / "tiny.gguf")
    saved, result = measured(predict_threads.main, model, "--cores", "2", "--cores", "1+1x0.5", "--bandwidth", "5")
    assert "| 1+1x0.5 | " in result.output
    first, second = saved["predictions"]
    assert first["cores"] == "2"
    assert 0 < second["efficiency"] < 1

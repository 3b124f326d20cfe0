"""Mixes within a budget of bits: what is chosen, from measurements of what."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.adapters import Adapter
from cpuspec.checkpoints.gguf_file import read_gguf
from cpuspec.errors import ConfigError
from cpuspec.evaluate.quality import compare_backends
from cpuspec.formats import FORMATS, QuantTensor, get_format
from cpuspec.quantize import budget, calibration, sensitivity
from cpuspec.quantize.job import Job, quantize
from cpuspec.quantize.store import Workspace
from cpuspec.quantize.weights import Weights
from cpuspec.settings import EngineConfig

ENGINE = EngineConfig(kv_format="f32")
CANDIDATES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")


def kl(source: Checkpoint, path: Path) -> float:
    tokens = (np.random.default_rng(9).zipf(1.3, 64) % source.config.vocab_size).tolist()
    return compare_backends(
        make_backend("numpy", source, ENGINE), make_backend("numpy", open_checkpoint(path), ENGINE), tokens
    ).kl_mean


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_of_the_bytes_less_the_largest_step_loses_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names, formats = "abcd", "uvwx"
    sizes = {name: dict(zip(formats, map(int, rng.integers(1, 50, 4)), strict=True)) for name in names}
    losses = {name: dict(zip(formats, rng.exponential(1, 4).tolist(), strict=True)) for name in names}
    least = sum(min(one.values()) for one in sizes.values())
    limit = least + int(rng.integers(0, 80))
    budget.check(sizes, limit)
    chosen = budget.choose(sizes, losses, limit)

    def cost(choice: dict[str, str]) -> tuple[int, float]:
        return sum(sizes[name][choice[name]] for name in names), sum(losses[name][choice[name]] for name in names)

    taken, lost = cost(chosen)
    assert taken <= limit
    every = [cost(dict(zip(names, choice, strict=True))) for choice in itertools.product(formats, repeat=4)]
    assert lost <= min(loss for size, loss in every if size <= max(limit - 49, least)) + 1e-9 or limit - 49 < least
    assert lost >= min(loss for size, loss in every if size <= limit)
    generous = budget.choose(sizes, losses, 1000)
    assert cost(generous)[1] == pytest.approx(min(loss for _, loss in every))
    with pytest.raises(ConfigError, match="smallest formats"):
        budget.check(sizes, least - 1)


@pytest.mark.parametrize("bits", [3.2, 4.5, 6.0])
def test_the_file_has_at_most_the_bits_that_were_asked_for(
    source: Checkpoint, chunks: np.ndarray, tmp_path: Path, bits: float
) -> None:
    made = quantize(source, tmp_path / "out.gguf", Job("", bits_per_weight=bits), threads=1, chunks=chunks)
    assert bits - 0.15 < made.bits_per_weight <= bits
    again = open_checkpoint(tmp_path / "out.gguf")
    assert {name: again.tensors[name].format.name for name in made.matrices} == made.matrices
    assert len(made.formats) > 1
    assert read_gguf(tmp_path / "out.gguf").metadata["quantize.bits_per_weight"] == pytest.approx(bits)
    assert json.loads(json.dumps(dict(made.matrices))) == made.matrices
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_a_measured_mix_loses_less_than_those_of_llama_cpp_at_equal_bytes(
    source: Checkpoint, chunks: np.ndarray, tmp_path: Path
) -> None:
    for type_name in ("q2_k", "q3_k_m"):
        theirs = quantize(source, tmp_path / f"{type_name}.gguf", Job(type_name), threads=1, chunks=chunks)
        job = Job("", bits_per_weight=theirs.bits_per_weight)
        ours = quantize(source, tmp_path / f"{type_name}-ours.gguf", job, threads=1, chunks=chunks)
        assert ours.num_bytes <= theirs.num_bytes + 1024  # of metadata
        assert kl(source, Path(ours.path)) < kl(source, Path(theirs.path))


def test_a_layer_that_changes_nothing_gets_the_fewest_bits(source: Checkpoint, chunks: np.ndarray, tmp_path: Path) -> None:
    f32 = get_format("f32")
    silent = {
        name: QuantTensor.encode(f32, np.zeros(source.tensors[name].shape, np.float32)) for name in ("layers.1.o", "layers.1.down")
    }
    idle = replace(source, tensors={**source.tensors, **silent})
    matrices = [name for name, tensor in source.tensors.items() if len(tensor.shape) == 2]
    workspace = Workspace(tmp_path / "work", {})
    options = dict.fromkeys(matrices, tuple(FORMATS[name] for name in CANDIDATES))
    losses = sensitivity.estimate(Weights(idle), chunks, options, {}, workspace)
    workspace.close(remove=True)
    for part in ("q", "k", "v", "gate", "up"):
        assert losses[f"layers.1.{part}"]["q2_k"] < 1e-3 * losses[f"layers.0.{part}"]["q2_k"]
    for name in ("layers.0.q", "embed"):
        assert losses[name]["q2_k"] > losses[name]["q3_k"] > losses[name]["q5_k"] > losses[name]["q8_0"] > 0


def test_losses_add_up_to_the_divergence_of_the_whole_model(source: Checkpoint, chunks: np.ndarray, tmp_path: Path) -> None:
    """Within a factor: the estimate takes divergences to be quadratic in the misses, and misses of matrices to be independent."""
    matrices = [name for name, tensor in source.tensors.items() if len(tensor.shape) == 2]
    workspace = Workspace(tmp_path / "work", {})
    losses = sensitivity.estimate(Weights(source), chunks, dict.fromkeys(matrices, (FORMATS["q5_k"],)), {}, workspace)
    workspace.close(remove=True)
    quantize(source, tmp_path / "out.gguf", Job("q5_k", pure=True), threads=1)
    expected, measured = sum(one["q5_k"] for one in losses.values()), kl(source, tmp_path / "out.gguf")
    assert 0.3 < expected / measured < 3


def test_an_interrupted_run_measures_nothing_twice(
    source: Checkpoint, chunks: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("", bits_per_weight=4.5, candidates=CANDIDATES)
    quantize(source, tmp_path / "whole.gguf", job, threads=1, chunks=chunks)
    forwards: list[int] = []
    run = calibration.run

    def counted(*arguments, **named):  # type: ignore[no-untyped-def]
        forwards.append(1)
        return run(*arguments, **named)

    monkeypatch.setattr(calibration, "run", counted)

    def stop(what: str, done: int, total: int) -> None:
        if what == "rounding" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "out.gguf", job, threads=1, chunks=chunks, on_step=stop)
    assert forwards
    forwards.clear()
    made = quantize(source, tmp_path / "out.gguf", job, threads=1, chunks=chunks)
    assert not forwards
    assert made.num_resumed > 3
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_formats_named_one_by_one_are_within_the_budget(source: Checkpoint, chunks: np.ndarray, tmp_path: Path) -> None:
    job = Job("", ("gptq",), bits_per_weight=4.5, candidates=("q3_k", "q4_k", "q6_k"), output="q8_0")
    made = quantize(source, tmp_path / "out.gguf", job, threads=1, chunks=chunks)
    assert made.matrices["embed"] == "q8_0"  # the model is tied
    assert set(made.formats) <= {"q3_k", "q4_k", "q6_k", "q8_0"}
    assert made.bits_per_weight <= 4.5


@pytest.mark.parametrize(
    ("job", "out", "wanted"),
    [
        (Job("", bits_per_weight=1.5), "out.gguf", "times as many bits per weight"),
        (Job("", bits_per_weight=4.5), "out", r"ends in \.gguf"),
        (Job("", bits_per_weight=4.5, candidates=("q9",)), "out.gguf", "'q9' is not a format of GGUF files"),
        (Job("", bits_per_weight=4.5, candidates=("int4_g32",)), "out.gguf", "'int4_g32' is not a format of GGUF files"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(
    source: Checkpoint, chunks: np.ndarray, tmp_path: Path, job: Job, out: str, wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        quantize(source, tmp_path / out, job, threads=1, chunks=chunks)
    assert not list(tmp_path.iterdir())


def test_a_budget_needs_a_text_and_no_type(source: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="calibration text"):
        quantize(source, tmp_path / "out.gguf", Job("", bits_per_weight=4.5), threads=1)
    for wrong in (
        lambda: Job("q4_0", bits_per_weight=4.5),
        lambda: Job("", bits_per_weight=-1),
        lambda: Job("", bits_per_weight=4.5, pure=True),
        lambda: Job("q4_0", candidates=("q4_0",)),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_errors_are_those_of_the_model_with_its_adapters(source: Checkpoint, tmp_path: Path) -> None:
    """With --lora the merged matrix is what gets rounded."""
    name = "layers.0.q"
    rng, (rows, columns) = np.random.default_rng(3), source.tensors[name].shape
    pair = (rng.standard_normal((2, columns)).astype(np.float32), rng.standard_normal((rows, 2)).astype(np.float32))
    weights = Weights(source, adapters=(Adapter(tmp_path, {name: pair}),))
    by_hand = replace(source, tensors={**source.tensors, name: QuantTensor.encode(get_format("f32"), weights.matrix(name))})
    formats = [get_format("q4_0"), get_format("q8_0")]
    found = sensitivity._misses(weights, name, formats, None)
    assert found == pytest.approx(sensitivity._misses(Weights(by_hand), name, formats, None))
    assert found[0] > 2 * sensitivity._misses(Weights(source), name, formats, None)[0]

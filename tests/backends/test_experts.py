"""Mixtures of experts: the router's choice, the segments that it makes, and the bytes that a forward reads."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cpuspec.backends import Backend, make_backend
from cpuspec.backends.numpy_backend import Forward, NumpyBackend
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.checkpoint import tensor_shapes
from cpuspec.config import Experts
from cpuspec.formats import QuantTensor, get_format
from cpuspec.kernels import isa
from cpuspec.model.batch import ForwardBatch
from cpuspec.model.transformer import decode
from cpuspec.settings import EngineConfig
from tests.backends.models import (
    TOKENS,
    computed,
    every_backend,
    forward,
    reference,
    tiny,
)

ROUTERS: dict[str, dict[str, object]] = {
    "softmax": {},
    "not normalised": {"normalised": False},
    "sigmoid, normalised and scaled": {"score": "sigmoid", "scale": 2.5},
    "a softmax over the chosen": {"score": "chosen", "normalised": False},
    "a shift for the choice alone": {"score": "sigmoid", "shifted": True},
    "groups": {"score": "sigmoid", "shifted": True, "groups": 4, "groups_used": 2},
    "a part that all rows go through": {"shared": 96},
    "biases": {"bias": True},
    "biases, a softmax over the chosen": {"bias": True, "score": "chosen", "normalised": False},
    "as many experts as no vector has": {"count": 19, "used": 5},
    "more chosen than a vector has": {"count": 24, "used": 20, "score": "chosen"},
}


def _mixture(tmp_path_factory: pytest.TempPathFactory, shared: int = 0, weight_format: str = "f32", **facts: object) -> Checkpoint:
    """A small random model with such a router, made of one with experts of the usual kind."""
    counts = {"num_experts": facts.get("count", 8), "num_used": facts.get("used", 3)}
    base = tiny(tmp_path_factory, architecture="qwen3moe", weight_format=weight_format, num_layers=2, **counts)
    assert base.config.experts
    experts: Experts = replace(base.config.experts, **facts)
    config = replace(base.config, experts=experts, shared_size=shared, weighs_shared=bool(shared))
    rng, tensors, f32 = np.random.default_rng(1), dict(base.tensors), get_format("f32")
    for name, shape in tensor_shapes(config).items() if experts.bias else ():
        if "_bias" in name:
            tensors[name] = QuantTensor.encode(f32, 0.5 * rng.standard_normal(shape))
    for i in range(2 if shared or experts.shifted else 0):
        if experts.shifted:
            tensors[f"layers.{i}.router_shift"] = QuantTensor.encode(f32, 0.3 * rng.standard_normal(experts.count))
        for part, shape in {"gate": (shared, 256), "up": (shared, 256), "down": (256, shared), "weight": (1, 256)}.items():
            if shared:
                values = rng.standard_normal(shape) / np.sqrt(shape[-1])
                tensors[f"layers.{i}.shared_{part}"] = QuantTensor.encode(f32, values)
    return replace(base, config=config, tensors=tensors)


@pytest.mark.parametrize("router", ROUTERS)
@every_backend(("numba", "torch"))
def test_every_router_chooses_as_the_reference_does(tmp_path_factory, name: str, router: str) -> None:
    checkpoint = _mixture(tmp_path_factory, **ROUTERS[router])
    assert np.abs(computed(name, checkpoint, threads=2) - reference(checkpoint)).max() < 1e-4


@pytest.mark.parametrize("facts", [{"used": 2}, {"scale": 1.01}, {"normalised": False}, {"score": "chosen"}], ids=str)
def test_the_comparison_would_see_another_choice(tmp_path_factory, facts: dict[str, object]) -> None:
    checkpoint = _mixture(tmp_path_factory, score="sigmoid")
    experts = replace(checkpoint.config.experts, **facts)
    other = replace(checkpoint, config=replace(checkpoint.config, experts=experts))
    assert np.abs(reference(checkpoint) - reference(other)).max() > 1e-3


@pytest.mark.parametrize(
    ("format_name", "activations", "allowed"),
    [
        *(("q8_0", "auto", 0.1), ("f16", "auto", 1e-2), ("bf16", "auto", 0.1), ("nl4_i", "auto", 0.2)),
        *[("q4_k", "int14", 1e-2)] * (not isa.has_sixteen_registers()),
    ],
)
def test_rows_of_every_encoding_reach_their_experts(tmp_path_factory, format_name: str, activations: str, allowed: float) -> None:
    """Each encoding of activations lies otherwise in a block of rows, from which rows go to the blocks of their experts."""
    base = tiny(
        tmp_path_factory, architecture="qwen3moe", weight_format="f32", num_layers=2, num_experts=8, num_used=3, expert_size=256
    )
    in_format = partial(QuantTensor.encode, get_format(format_name))
    tensors = {name: in_format(tensor.dequantize()) if ".expert_" in name else tensor for name, tensor in base.tensors.items()}
    checkpoint = replace(base, tensors=tensors)
    assert len(TOKENS) > 2 * 16, "some blocks, the last in part"
    settings = {"activations": activations, "prompt_arithmetic": "codes"}
    alone = computed("numba", checkpoint, size=1, **settings)
    assert np.abs(alone - reference(checkpoint)).max() < allowed
    for rows in (2, 5, 64):
        assert np.array_equal(computed("numba", checkpoint, size=rows, threads=2, **settings), alone)


def test_rows_of_any_length_get_all_of_their_experts_outputs(tmp_path_factory) -> None:
    """3,074 numbers make no whole parts for three threads."""
    sizes = {"num_layers": 1, "hidden_size": 3074, "num_experts": 4, "num_used": 2, "expert_size": 64}
    checkpoint = tiny(tmp_path_factory, architecture="qwen3moe", weight_format="f32", **sizes)
    alone, together = (computed("numba", checkpoint, TOKENS[:20], size, threads=3) for size in (1, 64))
    assert np.array_equal(alone, together)
    assert np.abs(alone - reference(checkpoint, TOKENS[:20])).max() < 1e-3


def _union_bytes(checkpoint: Checkpoint, backend: Backend, tokens: list[int], itemsize: int) -> int:
    """Bytes of the matrices that a forward over `tokens` needs: all but experts, and the experts that numpy's routers choose."""
    seen: set[tuple[str, int]] = set()

    def see(rows: object, names: tuple[str, ...], expert: int) -> None:
        seen.update((name, expert) for name in names)

    numpy = NumpyBackend(checkpoint, EngineConfig(max_rows=64, kv_format="f32"), np.float64)
    batch = ForwardBatch(tokens, list(range(len(tokens))), [0], [0, len(tokens)])
    watched = Forward(numpy._model, batch, numpy.new_cache(1, 64))
    watched.experts = partial(watched.experts, on_inputs=see)
    decode(checkpoint.config, watched)
    size = {name: np.prod(t.shape[1:]) * itemsize for name, t in checkpoint.tensors.items() if len(t.shape) == 3}
    every = sum(np.prod(t.shape) * itemsize for t in checkpoint.tensors.values() if len(t.shape) == 3)
    return backend.weight_bytes - int(every) + int(sum(size[name] for name, _ in seen))


@every_backend(("numba", "numpy", "torch"))
def test_the_counter_is_the_bytes_of_the_union_of_the_chosen_experts(tmp_path_factory, name: str) -> None:
    sizes = {"num_layers": 3, "num_experts": 16, "num_used": 3, "expert_size": 64}  # whole tiles: nothing is padded
    checkpoint = tiny(tmp_path_factory, architecture="qwen3moe", weight_format="f32", **sizes)
    backend = make_backend(name, checkpoint, EngineConfig(threads=2, max_rows=64, kv_format="f32", keep_packed=False))
    numbers = []
    for rows in (1, 2, 4, 8, 45):
        output = forward(backend, backend.new_cache(1, 64), {0: TOKENS[:rows]})
        assert output.weight_bytes == _union_bytes(checkpoint, backend, TOKENS[:rows], 4)
        numbers.append(output.weight_bytes)
    assert numbers == sorted(numbers)
    assert numbers[0] < numbers[2] < backend.weight_bytes, "the comparison sees experts"
    without = forward(backend, backend.new_cache(1, 64), {0: TOKENS[:4]}, logit_rows=[]).weight_bytes
    output = checkpoint.tensors["output" if "output" in checkpoint.tensors else "embed"]
    assert numbers[2] - without == 4 * np.prod(output.shape)
    backend.close()


@every_backend()
def test_a_model_without_experts_reads_all_its_weights_and_graphs_do_for_each_sequence(tmp_path_factory, name: str) -> None:
    checkpoint = tiny(tmp_path_factory, weight_format="f32", num_layers=1)
    backend = make_backend(name, checkpoint, EngineConfig(threads=1, max_rows=16, kv_format="f32", keep_packed=False))
    runs = 2 if name in ("onnxruntime", "openvino") else 1
    cache = backend.new_cache(2, 16)
    assert forward(backend, cache, {0: TOKENS[:3]}).weight_bytes == backend.weight_bytes
    assert forward(backend, cache, {0: TOKENS[:3], 1: TOKENS[3:5]}).weight_bytes == runs * backend.weight_bytes
    output = checkpoint.tensors["output" if "output" in checkpoint.tensors else "embed"]
    read = forward(backend, cache, {0: TOKENS[:3]}, logit_rows=[]).weight_bytes
    assert backend.weight_bytes - read == 4 * np.prod(output.shape)
    backend.close()


def test_experts_that_lie_apart_are_those_that_lie_together(tmp_path_factory) -> None:
    together = tiny(tmp_path_factory, architecture="qwen3moe", weight_format="q4_k", num_layers=1, expert_size=256)
    tensors = {name: QuantTensor.stack(t.matrices) if len(t.shape) == 3 else t for name, t in together.tensors.items()}
    apart = replace(together, tensors=tensors)
    assert np.array_equal(*(computed("numba", checkpoint) for checkpoint in (together, apart)))

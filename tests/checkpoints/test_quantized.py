"""Quantized Hugging Face directories mean what they say on every backend, and what is damaged or unknown is a clear error."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import EngineConfig
from cpuspec.formats import QuantTensor, get_format
from tests.backends.models import every_backend, forward
from tests.checkpoints import quantizers
from tests.checkpoints.quantizers import Quantize, opened, write

TOKENS = np.random.default_rng(0).integers(0, 300, 21).tolist()


def _gptq(**settings: Any) -> tuple[dict[str, Any], Quantize]:
    config = {"quant_method": "gptq", "bits": settings.get("bits", 4), "group_size": settings.get("group", 128)}
    config |= {"desc_act": settings.get("act_order", False), "sym": settings.get("symmetric", False)}
    if settings.get("version") == 2:
        config["checkpoint_format"] = "gptq_v2"
    return config, quantizers.gptq(**settings)


def _awq(**settings: Any) -> tuple[dict[str, Any], Quantize]:
    config = {"quant_method": "awq", "bits": 4, "group_size": settings.get("group", 128), "zero_point": True, "version": "gemm"}
    return config, quantizers.awq(**settings)


def _compressed(format: str, quantize: Quantize, **weights: Any) -> tuple[dict[str, Any], Quantize]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, **weights}}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}, quantize


def _packed(**settings: Any) -> tuple[dict[str, Any], Quantize]:
    return _compressed("pack-quantized", quantizers.compressed(**settings), num_bits=settings.get("bits", 4))


def _fp8(scales_of: str, name: str) -> tuple[dict[str, Any], Quantize]:
    blocks = {"weight_block_size": [128, 128]} if scales_of == "block" else {}
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **blocks}, quantizers.fp8(scales_of, name)


def _bitsandbytes(**settings: Any) -> tuple[dict[str, Any], Quantize]:
    return {"quant_method": "bitsandbytes", "load_in_8bit": settings.get("kind") == "int8"}, quantizers.bitsandbytes(**settings)


# How a model is written, and the format that its matrices become.
KINDS: dict[str, tuple[tuple[dict[str, Any], Quantize], str]] = {
    "gptq": (_gptq(), "int4_g128_asym"),
    "gptq symmetric": (_gptq(symmetric=True), "int4_g128"),
    "gptq version 2": (_gptq(version=2), "int4_g128_asym"),
    "gptq g32": (_gptq(group=32), "int4_g32_asym"),
    "gptq g64": (_gptq(group=64), "int4_g64_asym"),
    "gptq of whole rows": (_gptq(group=-1), "int4_g128_asym"),
    "gptq act-order": (_gptq(act_order=True), "int4_g128_asym"),
    "gptq act-order symmetric": (_gptq(act_order=True, symmetric=True, group=32), "int4_g32"),
    "gptq g16": (_gptq(group=16, act_order=True), "f32"),
    "gptq 2 bits": (_gptq(bits=2, group=64), "int2_g64_asym"),
    "gptq 3 bits": (_gptq(bits=3, group=32), "int3_g32_asym"),
    "gptq 3 bits version 2 act-order": (_gptq(bits=3, version=2, act_order=True), "int3_g64_asym"),
    "gptq 8 bits": (_gptq(bits=8, symmetric=True, group=32), "q8_0"),
    "gptq 8 bits asymmetric": (_gptq(bits=8), "f32"),
    "awq": (_awq(), "int4_g128_asym"),
    "awq g64": (_awq(group=64), "int4_g64_asym"),
    "awq of whole rows": (_awq(group=-1), "int4_g128_asym"),
    "awq without zero points": (_awq(with_zeros=False), "int4_g128"),
    "compressed-tensors int4": (_packed(), "int4_g128"),
    "compressed-tensors int4 asymmetric": (_packed(symmetric=False, group=32), "int4_g32_asym"),
    "compressed-tensors int4 of whole rows": (_packed(group=-1), "int4_g128"),
    "compressed-tensors int4 act-order": (_packed(act_order=True, group=64), "int4_g64"),
    "compressed-tensors int4 under scales below f16": (_packed(tiny=True), "int8_g128"),
    "compressed-tensors int3": (_packed(bits=3, group=64), "int3_g64_asym"),
    "compressed-tensors 6 bits": (_packed(bits=6, symmetric=False), "int8_g128"),
    "compressed-tensors 8 bits packed": (_packed(bits=8), "int8_g128"),
    "compressed-tensors int8": (_compressed("int-quantized", quantizers.int8(), num_bits=8), "int8_g128"),
    "compressed-tensors int8 in groups": (_compressed("int-quantized", quantizers.int8(8), num_bits=8), "int8_g32"),
    "compressed-tensors fp8 of matrices": (_compressed("float-quantized", quantizers.fp8("matrix")), "fp8_g128"),
    "compressed-tensors fp8 of rows": (_compressed("float-quantized", quantizers.fp8("row")), "fp8_g128"),
    "compressed-tensors mxfp4": (_compressed("mxfp4-pack-quantized", quantizers.fp4(nv=False)), "mxfp4"),
    "compressed-tensors nvfp4": (_compressed("nvfp4-pack-quantized", quantizers.fp4(nv=True)), "f32"),
    "fp8 of blocks": (_fp8("block", "weight_scale_inv"), "fp8_g128"),
    "fp8 of rows": (_fp8("row", "weight_scale"), "fp8_g128"),
    "bitsandbytes nf4": (_bitsandbytes(), "nf4_g64"),
    "bitsandbytes nf4 nested": (_bitsandbytes(nested=True), "nf4_g64"),
    "bitsandbytes fp4": (_bitsandbytes(kind="fp4", block=128), "fp4_g64"),
    "bitsandbytes nf4 of odd blocks": (_bitsandbytes(block=32), "f32"),
    "bitsandbytes int8": (_bitsandbytes(kind="int8"), "int8_g128"),
}  # fmt: skip


def _logits(checkpoint: Checkpoint, name: str = "numpy", **settings: Any) -> np.ndarray:
    engine = EngineConfig(threads=1, max_rows=64, kv_format="f32", **settings)
    backend = NumpyBackend(checkpoint, engine, np.float64) if name == "numpy" else make_backend(name, checkpoint, engine)
    logits = forward(backend, backend.new_cache(1, 64), {0: TOKENS}).logits
    backend.close()
    return logits


def _plain(checkpoint: Checkpoint) -> Checkpoint:
    """The same model with every tensor in f32."""
    f32 = get_format("f32")
    return replace(checkpoint, tensors={name: QuantTensor.encode(f32, t.dequantize()) for name, t in checkpoint.tensors.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_its_values_in_its_format(tmp_path: Path, kind: str) -> None:
    (config, quantize), format = KINDS[kind]
    checkpoint = opened(write(tmp_path / "model", config, quantize))
    assert {t.format.name for name, t in checkpoint.tensors.items() if name.startswith("layers") and t.data.ndim == 2} == {format}
    assert {checkpoint.tensors[name].format.name for name in ("embed", "output", "norm")} == {"f16"}
    assert checkpoint.quantization.partition(",")[0].lower() == config["quant_method"]
    assert (checkpoint.tensors["layers.0.q"].order is not None) == ("act-order" in kind or kind == "gptq g16")


ON_BACKENDS = ["gptq", "gptq act-order", "gptq 3 bits version 2 act-order", "gptq g16", "awq", "compressed-tensors int8"]
ON_BACKENDS += ["fp8 of blocks", "bitsandbytes nf4 nested", "bitsandbytes fp4"]


# Backends whose products are of the file's codes, with settings under which only sums are rounded.
@every_backend(["numba", "torch", "onnxruntime", "openvino"])
@pytest.mark.parametrize("kind", ON_BACKENDS)
def test_every_backend_computes_what_the_values_mean(tmp_path: Path, kind: str, name: str) -> None:
    (config, quantize), _ = KINDS[kind]
    checkpoint = opened(write(tmp_path / "model", config, quantize))
    wanted = _logits(_plain(checkpoint))
    settings = {"numba": {}, "torch": {"weights": "codes"}}.get(name, {"activations": "f32"})
    budget = 2e-2 if name == "numba" else 1e-4  # numba rounds activations to 8 bits
    error = np.abs(_logits(checkpoint, name, **settings) - wanted).max() / np.abs(wanted).max()
    assert error < budget
    assert np.abs(np.roll(wanted, 1, axis=0) - wanted).max() > 10 * budget * np.abs(wanted).max()


def test_matrices_that_share_inputs_may_want_them_in_different_orders(tmp_path: Path) -> None:
    """q, k, v of one layer have each an order of their own here; AutoGPTQ gives all three the same."""
    (config, quantize), _ = KINDS["gptq act-order"]
    checkpoint = opened(write(tmp_path / "model", config, quantize))
    orders = [checkpoint.tensors[f"layers.0.{part}"].order for part in "qkv"]
    assert all(order is not None for order in orders)
    assert not np.array_equal(orders[0], orders[1])
    same = {f"layers.0.{part}": orders[0] for part in "qkv"}
    alike = {name: replace(checkpoint.tensors[name], order=order) for name, order in same.items()}
    for one in (checkpoint, replace(checkpoint, tensors={**checkpoint.tensors, **alike})):
        wanted = _logits(_plain(one))
        assert np.abs(_logits(one, "numba") - wanted).max() < 2e-2 * np.abs(wanted).max()


def test_a_row_does_not_depend_on_its_batch_after_act_order(tmp_path: Path) -> None:
    (config, quantize), _ = KINDS["gptq act-order"]
    checkpoint = opened(write(tmp_path / "model", config, quantize))
    backend = make_backend("numba", checkpoint, EngineConfig(threads=2, max_rows=64))
    together, cache = forward(backend, backend.new_cache(1, 64), {0: TOKENS}).logits, backend.new_cache(1, 64)
    alone = np.concatenate([forward(backend, cache, {0: [token]}).logits for token in TOKENS])
    assert np.array_equal(together, alone)
    backend.close()

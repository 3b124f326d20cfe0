"""Quantized Hugging Face directories mean what they say on every backend, and what is damaged or unknown is a clear error."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.backends import make_backend
from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.settings import EngineConfig
from tests.backends.models import check_rows, every_backend, forward
from tests.checkpoints import quantizers
from tests.checkpoints.quantizers import Quantize, Written, opened, write
from tests.model_files import read_tensors, write_tensors
from tools.make_tiny_model import make_tiny_hf

TOKENS = np.random.default_rng(0).integers(0, 300, 21).tolist()


def _gptq(**settings: Any) -> tuple[dict[str, Any], Quantize]:
    config = {"quant_method": "gptq", "bits": settings.get("bits", 4), "group_size": settings.get("group", 128)}
    config |= {"desc_act": settings.get("act_order", False), "sym": settings.get("symmetric", False)}
    if settings.get("version") == 2:
        config["checkpoint_format"] = "gptq_v2"
    return config, quantizers.gptq(**settings)


def _auto_round(packing: dict[str, str], quantize: Quantize, **settings: Any) -> tuple[dict[str, Any], Quantize]:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": False, "data_type": "int", "iters": 200}
    return {**config, **packing, **settings}, quantize


def _modelopt(algorithm: str, kind: str) -> tuple[dict[str, Any], Quantize]:
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    return config, quantizers.modelopt(kind)


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


def _torchao(*settings: Any) -> tuple[dict[str, Any], Quantize]:
    quant_type = {"default": {"_type": "IntxWeightOnlyConfig", "_data": {}}}
    return {"quant_method": "torchao", "quant_type": quant_type}, quantizers.torchao(*settings)


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
    "auto-round": (_auto_round({"packing_format": "auto_round:auto_gptq"}, quantizers.gptq()), "int4_g128_asym"),
    "auto-round symmetric": (_auto_round({}, quantizers.gptq(symmetric=True), sym=True), "int4_g128"),
    "auto-round of its own": (
        _auto_round({"packing_format": "auto_round:gptqmodel"}, quantizers.gptq(version=2)), "int4_g128_asym"
    ),
    "auto-round of 2024": (
        _auto_round({"backend": "auto_round:exllamav2", "quant_method": "intel/auto-round"}, quantizers.gptq(version=2)),
        "int4_g128_asym",
    ),
    "auto-round of 2024 as gptq": (_auto_round({"backend": "autoround:gptq:exllamav2"}, quantizers.gptq()), "int4_g128_asym"),
    "auto-round as awq": (_auto_round({"packing_format": "auto_round:auto_awq"}, quantizers.awq()), "int4_g128_asym"),
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
    "compressed-tensors int3 of older versions": (_packed(bits=3, group=64, is_padded=True), "int3_g64_asym"),
    "compressed-tensors 5 bits of older versions": (_packed(bits=5, symmetric=False, is_padded=True), "int8_g128"),
    "compressed-tensors 6 bits of older versions": (_packed(bits=6, is_padded=True), "int8_g128"),
    "compressed-tensors 7 bits of older versions": (_packed(bits=7, symmetric=False, is_padded=True), "int8_g128"),
    "compressed-tensors 8 bits packed": (_packed(bits=8), "int8_g128"),
    "compressed-tensors int8": (_compressed("int-quantized", quantizers.int8(), num_bits=8), "int8_g128"),
    "compressed-tensors int8 in groups": (_compressed("int-quantized", quantizers.int8(8), num_bits=8), "int8_g32"),
    "compressed-tensors fp8 of matrices": (_compressed("float-quantized", quantizers.fp8("matrix")), "fp8_g128"),
    "compressed-tensors fp8 of rows": (_compressed("float-quantized", quantizers.fp8("row")), "fp8_g128"),
    "compressed-tensors mxfp4": (_compressed("mxfp4-pack-quantized", quantizers.fp4(nv=False)), "mxfp4"),
    "compressed-tensors nvfp4": (_compressed("nvfp4-pack-quantized", quantizers.fp4(nv=True)), "nvfp4_global"),
    "modelopt fp8": (_modelopt("FP8", "matrix"), "fp8_g128"),
    "modelopt fp8 of rows": (_modelopt("FP8_PER_CHANNEL_PER_TOKEN", "row"), "fp8_g128"),
    "modelopt fp8 of blocks": (_modelopt("fp8_pb_wo", "block"), "fp8_g128"),
    "modelopt nvfp4": (_modelopt("NVFP4", "nvfp4"), "nvfp4_global"),
    "fp8 of blocks": (_fp8("block", "weight_scale_inv"), "fp8_g128"),
    "fp8 of rows": (_fp8("row", "weight_scale"), "fp8_g128"),
    "bitsandbytes nf4": (_bitsandbytes(), "nf4_g64"),
    "bitsandbytes nf4 nested": (_bitsandbytes(nested=True), "nf4_g64"),
    "bitsandbytes fp4": (_bitsandbytes(kind="fp4", block=128), "fp4_g64"),
    "bitsandbytes nf4 of odd blocks": (_bitsandbytes(block=32), "f32"),
    "bitsandbytes int8": (_bitsandbytes(kind="int8"), "int8_g128"),
    "torchao int4": (_torchao("int4"), "q4_1"),
    "torchao int4 symmetric": (_torchao("int4 symmetric"), "int4_g128"),
    "torchao int4 g32 symmetric": (_torchao("int4 symmetric", 32), "int4_g32"),
    "torchao intx of 2 bits": (_torchao("intx 2", 64), "int2_g64_asym"),
    "torchao intx of 3 bits": (_torchao("intx 3", 32), "int3_g32_asym"),
    "torchao intx of 4 bits": (_torchao("intx 4"), "int4_g128"),
    "torchao int8": (_torchao("int8"), "int8_g128"),
    "torchao int8 asymmetric": (_torchao("int8 asymmetric"), "f32"),
    "torchao fp8": (_torchao("fp8"), "fp8_g128"),
    "torchao fp8 of groups": (_torchao("fp8 of groups"), "fp8_g128"),
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


def _written(tmp_path: Path, kind: str, **options: Any) -> Written:
    (config, quantize), _ = KINDS[kind]
    return write(tmp_path / kind.replace(" ", "-"), config, quantize, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_its_values_in_its_format(tmp_path: Path, kind: str) -> None:
    (config, _), format = KINDS[kind]
    checkpoint = opened(_written(tmp_path, kind))
    assert {t.format.name for name, t in checkpoint.tensors.items() if name.startswith("layers") and t.data.ndim == 2} == {format}
    assert {checkpoint.tensors[name].format.name for name in ("embed", "output", "norm")} == {"f16"}
    assert checkpoint.quantization.partition(",")[0].lower() == config["quant_method"].rpartition("/")[2]
    assert (checkpoint.tensors["layers.0.q"].order is not None) == ("act-order" in kind or kind == "gptq g16")


ON_BACKENDS = ["gptq", "gptq act-order", "gptq 3 bits version 2 act-order", "gptq g16", "awq", "compressed-tensors int8"]
ON_BACKENDS += ["fp8 of blocks", "bitsandbytes nf4 nested", "bitsandbytes fp4"]


# Backends whose products are of the file's codes, with settings under which only sums are rounded.
@every_backend(["numba", "torch", "onnxruntime", "openvino"])
@pytest.mark.parametrize("kind", ON_BACKENDS)
def test_every_backend_computes_what_the_values_mean(tmp_path: Path, kind: str, name: str) -> None:
    checkpoint = opened(_written(tmp_path, kind))
    wanted = _logits(_plain(checkpoint))
    settings = {"numba": {}, "torch": {"weights": "codes"}}.get(name, {"activations": "f32"})
    budget = 2e-2 if name == "numba" else 1e-4  # numba rounds activations to 8 bits
    error = np.abs(_logits(checkpoint, name, **settings) - wanted).max() / np.abs(wanted).max()
    assert error < budget
    assert np.abs(np.roll(wanted, 1, axis=0) - wanted).max() > 10 * budget * np.abs(wanted).max()


def test_matrices_that_share_inputs_may_want_them_in_different_orders(tmp_path: Path) -> None:
    """q, k, v of one layer have each an order of their own here; AutoGPTQ gives all three the same."""
    checkpoint = opened(_written(tmp_path, "gptq act-order"))
    orders = [checkpoint.tensors[f"layers.0.{part}"].order for part in "qkv"]
    assert all(order is not None for order in orders)
    assert not np.array_equal(orders[0], orders[1])
    same = {f"layers.0.{part}": orders[0] for part in "qkv"}
    alike = {name: replace(checkpoint.tensors[name], order=order) for name, order in same.items()}
    for one in (checkpoint, replace(checkpoint, tensors={**checkpoint.tensors, **alike})):
        wanted = _logits(_plain(one))
        assert np.abs(_logits(one, "numba") - wanted).max() < 2e-2 * np.abs(wanted).max()


def test_a_row_depends_on_its_past_alone_after_act_order(tmp_path: Path) -> None:
    check_rows(opened(_written(tmp_path, "gptq act-order")), TOKENS)


@pytest.mark.parametrize("kind", ["fp8 of blocks", "gptq", "bitsandbytes nf4 nested"])
def test_a_model_whose_tensors_have_other_types_than_plain_weights_may_draft(tmp_path: Path, kind: str) -> None:
    target = make_tiny_hf(tmp_path / "target", dtype="f16", tied=False, num_layers=1)
    with LLM(target, f"{_written(tmp_path, kind).directory}@3", "numpy") as llm:
        llm.generate([TOKENS], SamplingParams(max_tokens=8, ignore_eos=True))
        assert sum(level.num_draft_tokens for level in llm.levels.values()) > 0


@pytest.mark.parametrize(("of_scale", "format"), [(1.0, "q4_1"), (1e-7, "f32")])
def test_minima_of_torchao_are_rounded_by_less_than_a_64th_of_a_step(tmp_path: Path, of_scale: float, format: str) -> None:
    steps = []

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Any], np.ndarray]:
        codes, groups = rng.integers(0, 256, (shape[0], shape[1] // 2)).astype(np.uint8), shape[1] // 64
        scales = of_scale * rng.uniform(0.001, 0.01, (groups, shape[0])).astype(np.float32)
        zeros = of_scale * rng.uniform(-0.01, 0.01, (groups, shape[0])).astype(np.float32)
        scales = scales.astype(np.float16).astype(np.float32) if format == "q4_1" else scales
        signed = np.stack([codes & 15, codes >> 4], axis=2).reshape(shape).astype(np.float32)
        signed -= 16 * (signed > 7)
        d, z = (np.repeat(numbers.T, 64, axis=1) for numbers in (scales, zeros))
        steps.append(np.abs(d))
        return {"_weight_qdata": codes, "_weight_scale": scales, "_weight_zero_point": zeros}, d * signed + z

    written = write(tmp_path / "model", {"quant_method": "torchao"}, quantize)
    checkpoint = open_checkpoint(written.directory)
    for step, (name, values) in zip(steps, written.values.items(), strict=True):
        assert checkpoint.tensors[name].format.name == format
        assert (np.abs(checkpoint.tensors[name].dequantize() - values) <= step / 32).all(), "minima and sums are rounded"


def test_layers_that_were_left_out_stay_as_they_are(tmp_path: Path) -> None:
    for kind in ("gptq", "compressed-tensors fp8 of rows", "fp8 of blocks"):
        checkpoint, format = opened(_written(tmp_path, kind, skip=("o", "down"))), KINDS[kind][1]
        formats = {part: checkpoint.tensors[f"layers.0.{part}"].format.name for part in ("q", "o", "gate", "down")}
        assert formats == {"q": format, "o": "f16", "gate": format, "down": "f16"}


def test_layers_of_one_file_may_have_different_bits(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: the bits of a layer are seen from its tensors."""
    kinds = iter([2, 3, 4, 8, 4, 2, 3])

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Any], np.ndarray]:
        return quantizers.gptq(bits=next(kinds), group=64, version=2)(rng, shape)

    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2", "dynamic": {"+:.*": {"bits": 8}}}
    checkpoint = opened(write(tmp_path / "model", config, quantize))
    names = {t.format.name for name, t in checkpoint.tensors.items() if name.startswith("layers.0") and t.data.ndim == 2}
    assert names == {"int2_g64_asym", "int3_g64_asym", "int4_g64_asym", "f32"}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_symmetric_gptq_has_its_zero_in_the_middle_as_either_version_stores_it(tmp_path: Path, bits: int, version: int) -> None:
    """Files that were stored as version `version` and claim the other one."""
    config, quantize = _gptq(bits=bits, group=64, symmetric=True, version=version)
    claimed = {"checkpoint_format": "gptq_v2" if version == 1 else "gptq"}
    opened(write(tmp_path / "model", {**config, **claimed}, quantize))


def test_layers_of_auto_round_may_have_bits_and_groups_of_their_own(tmp_path: Path) -> None:
    kinds = iter([(4, 128), (4, 32), (8, 128), (2, 64), (4, 128), (4, 128), (4, 64)])

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Any], np.ndarray]:
        bits, group = next(kinds)
        return quantizers.gptq(bits=bits, group=group)(rng, shape)

    extra = {"model.layers.0.self_attn.k_proj": {"group_size": 32}, "model.layers.0.self_attn.v_proj": {"bits": 8}}
    opened(write(tmp_path / "model", *_auto_round({}, quantize, extra_config=extra)))


@pytest.mark.parametrize(
    ("file_name", "kind"),
    [("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt fp8")],
)
def test_settings_of_older_files_are_read_where_their_packages_wrote_them(tmp_path: Path, file_name: str, kind: str) -> None:
    written = _written(tmp_path, kind)
    settings = json.loads((written.directory / "config.json").read_text())
    own = settings.pop("quantization_config")
    del own["quant_method"]
    if kind.startswith("modelopt"):
        own = {"producer": {"name": "modelopt"}, "quantization": own}
    (written.directory / "config.json").write_text(json.dumps(settings))
    (written.directory / file_name).write_text(json.dumps(own))
    assert opened(written).tensors["layers.0.q"].format.name == KINDS[kind][1]


def test_scales_of_the_cache_and_of_activations_are_not_needed(tmp_path: Path) -> None:
    for kind, name in (("compressed-tensors fp8 of rows", "self_attn.k_scale"), ("modelopt fp8", "self_attn.k_proj.k_scale")):
        written = _written(tmp_path, kind)
        path = written.directory / "model.safetensors"
        header = read_tensors(path)
        header[f"model.layers.0.{name}"] = ("F32", [1], np.ones(1, np.float32).tobytes())
        write_tensors(path, header)
        opened(written)


Q, UP_BIAS = "model.layers.0.self_attn.q_proj.", "model.layers.0.mlp.up_proj.bias"  # 256 x 256, and 512
NAN = np.array([np.nan], np.float32).tobytes()


def _with(tensors: dict[str, Any], name: str, dtype: str, shape: list[int], data: bytes) -> None:
    tensors[Q + name] = (dtype, shape, data)


def _changed_index(tensors: dict[str, Any], value: int) -> None:
    dtype, shape, data = tensors[Q + "g_idx"]
    _with(tensors, "g_idx", dtype, shape, np.array([value], np.int32).tobytes() + data[4:])


def _with_nan(tensors: dict[str, Any], name: str) -> None:
    dtype, shape, data = tensors[Q + name]
    nan = NAN if dtype == "F32" else NAN[2:] if dtype == "BF16" else np.array([np.nan], np.float16).tobytes()
    _with(tensors, name, dtype, shape, nan + data[len(nan) :])


def _state(tensors: dict[str, Any], **changes: object) -> None:
    name = "weight.quant_state.bitsandbytes__nf4"
    data = json.dumps(json.loads(tensors[Q + name][2]) | changes).encode()
    _with(tensors, name, "U8", [len(data)], data)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gptq", lambda t: t.pop(Q + "qzeros"), r"q_proj has .*qweight, .* and no qzeros"),
        ("gptq", lambda t: t.pop(Q + "scales"), r"and no scales"),
        ("gptq", lambda t: t.pop(Q + "qweight"), r"I32 weights are not supported|F16 .* are not supported|belongs to a feature"),
        ("gptq", lambda t: _changed_index(t, 2), r"g_idx names the groups 0 to 2 of 2"),
        ("gptq", lambda t: _changed_index(t, -1), r"g_idx names the groups -1 to 1 of 2"),
        ("gptq", lambda t: _changed_index(t, 1), r"g_idx makes groups of different sizes, wanted 128"),
        ("gptq", lambda t: _with(t, "g_idx", "I32", [255], bytes(1020)), r"of 4 bits and g_idx of 255 are no whole matrix"),
        ("gptq", lambda t: _with(t, "scales", "F16", [3, 256], bytes(1536)), r"scales are \[3, 256\], wanted \[2, 256\]"),
        ("gptq", lambda t: _with(t, "qzeros", "I32", [2, 31], bytes(248)), r"qzeros are \[2, 31\], wanted \[2, 32\]"),
        ("gptq", lambda t: _with(t, "qweight", "F32", [32, 256], bytes(32768)), r"is F32 \[32, 256\], wanted I32 of 2 dimensions"),
        ("gptq", lambda t: _with(t, "weight", "F16", [256, 256], bytes(131072)), r"is there twice, plain and quantized"),
        ("gptq", lambda t: _with_nan(t, "scales"), r"q_proj.scales has numbers that are not finite"),
        ("gptq", lambda t: t.update({UP_BIAS: ("F16", [512], b"\1" * 1024)}), r"has no place"),
        ("awq", lambda t: _with(t, "qzeros", "I32", [1, 32], bytes(128)), r"qzeros are \[1, 32\], wanted \[2, 32\]"),
        ("awq", lambda t: _with(t, "scales", "F16", [2, 128], bytes(512)), r"scales are \[2, 128\], wanted \[2, 256\]"),
        ("compressed-tensors int4", lambda t: t.pop(Q + "weight_scale"), r"and no weight_scale"),
        ("compressed-tensors int4", lambda t: _with(t, "weight_shape", "I64", [2], bytes(16)), r"is not a matrix \[0, 0\]"),
        ("compressed-tensors int4", lambda t: _with_nan(t, "weight_scale"), r"not finite"),
        *[
            ("compressed-tensors int3 of older versions", lambda t, dims=dims: _with(t, "weight_shape", "I64", [len(dims)],
            np.array(dims, np.int64).tobytes()), r"is not a matrix \[")
            for dims in ([256], [256, 255 * 10**9], [256, -256], [1 << 62, 256], [256, 26 * 10 + 1], [255, 256], [256, 1, 256])
        ],
        ("compressed-tensors int3 of older versions", lambda t: _with(t, "weight_packed", "I32", [1, 1, 1], bytes(4)), r"of 2 "),
        ("compressed-tensors int3 of older versions", lambda t: _with(t, "weight_packed", "I32", [256, 0], b""), r"not empty"),
        ("compressed-tensors nvfp4", lambda t: _with(t, "weight_packed", "U8", [256], bytes(256)), r"of 2 dimensions"),
        ("modelopt nvfp4", lambda t: t.pop(Q + "weight_scale_2"), r"and no weight_scale_2"),
        ("modelopt nvfp4", lambda t: _with(t, "weight_scale_2", "F32", [1], NAN), r"not finite"),
        ("modelopt nvfp4", lambda t: _with(t, "weight_scale_2", "F32", [2], bytes(8)), r"fit no nvfp4 matrix"),
        ("modelopt nvfp4", lambda t: _with(t, "weight", "U8", [256, 64], bytes(16384)), r"fit no nvfp4 matrix"),
        ("modelopt nvfp4", lambda t: _with(t, "pre_quant_scale", "F32", [256], bytes(1024)), r"has a pre_quant_scale"),
        ("modelopt fp8", lambda t: _with(t, "weight_scale", "F32", [3, 1, 2, 1], bytes(24)), r"or for each block of 128 x 128"),
        ("compressed-tensors int4", lambda t: _with(t, "weight_scale", "F32", [256, 3], bytes(3072)), r"wanted \[256, groups"),
        ("compressed-tensors int4 asymmetric", lambda t: _with(t, "weight_zero_point", "I32", [1, 1], bytes(4)), r"it packed"),
        ("compressed-tensors mxfp4", lambda t: _with(t, "weight_scale", "U8", [256, 8], b"\xff" * 2048), r"not finite"),
        ("compressed-tensors mxfp4", lambda t: _with(t, "weight_scale", "U8", [256, 7], bytes(1792)), r"wanted one for 32 inputs"),
        ("compressed-tensors nvfp4", lambda t: _with(t, "weight_global_scale", "F32", [1], bytes(4)), r"a divisor, is 0"),
        ("fp8 of blocks", lambda t: _with(t, "weight_scale_inv", "F32", [3, 2], bytes(24)), r"or for each block of 128 x 128"),
        ("fp8 of blocks", lambda t: _with(t, "weight", "F8_E4M3", [256, 256], b"\x7f" * 65536), r"weights that are not finite"),
        ("fp8 of blocks", lambda t: t.pop(Q + "weight_scale_inv"), r"and no weight_scale"),
        ("bitsandbytes nf4", lambda t: t.pop(Q + "weight.quant_state.bitsandbytes__nf4"), r"save the model again"),
        ("bitsandbytes nf4", lambda t: _state(t, shape=[256, 255]), r"shape is \[256, 255\], wanted the 65536 weights"),
        ("bitsandbytes nf4", lambda t: _state(t, blocksize=0), r"blocksize is 0"),
        ("bitsandbytes nf4", lambda t: _state(t, blocksize=32), r"1024 blocks have scales, wanted 2048"),
        ("bitsandbytes nf4", lambda t: _with(t, "weight.quant_map", "F32", [16], bytes(64)), r"quant_map is not that of nf4"),
        ("bitsandbytes nf4", lambda t: _with_nan(t, "weight.absmax"), r"not finite"),
        ("bitsandbytes int8", lambda t: _with(t, "SCB", "F32", [255], bytes(1020)), r"SCB has 255 numbers for 256 rows"),
        ("bitsandbytes int8", lambda t: _with(t, "weight_format", "U8", [1], b"\1"), r"not that of rows"),
        ("torchao int4", lambda t: t.pop(Q + "_weight_scale"), r"and no _weight_scale"),
        ("torchao int4", lambda t: _with_nan(t, "_weight_zero_point"), r"not finite"),
        ("torchao int4", lambda t: _with(t, "_weight_scale", "F32", [3, 256], bytes(3072)), r"wanted both \[groups of inputs, 256"),
        ("torchao int4", lambda t: _with(t, "_weight_act_pre_scale", "F32", [1], bytes(4)), r"act_pre_scale.*not supported"),
        ("torchao int4", lambda t: _with(t, "_weight_qdata", "I32", [4, 2, 32, 4], bytes(4096)), r"one processor's instructions"),
        ("torchao int8", lambda t: _with(t, "_weight_scale", "F32", [255, 1], bytes(1020)), r"\[255, 1\] for 256 x 256 weights"),
        ("torchao int8 asymmetric", lambda t: _with(t, "_weight_zero_point", "I8", [9], bytes(9)), r"wanted I8 \[256, 1\]"),
        ("torchao fp8", lambda t: _with(t, "_weight_scale", "F32", [256, 3], bytes(3072)), r"wanted a number for the matrix"),
        ("torchao fp8", lambda t: _with(t, "weight", "F16", [256, 256], bytes(131072)), r"is there twice, plain and quantized"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_belong_together_are_a_clear_error(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    written = _written(tmp_path, kind)
    path = written.directory / "model.safetensors"
    tensors = read_tensors(path)
    change(tensors)
    write_tensors(path, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(written.directory)
    assert str(written.directory) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gptq", {"quant_method": "exl2"}, r"'exl2' are not supported by this version, which reads gptq, auto-round"),
        (
            "gptq",
            {"quant_method": "quanto"},
            r"'quanto' are not supported .*; use a GGUF file of the model, or its plain weights",
        ),
        ("gptq", {"quant_method": None}, r"'an unnamed method' are not supported"),
        ("gptq", {"bits": 5}, r"bits is 5, wanted 2, 3, 4 or 8"),
        ("gptq", {"bits": 2}, r"of 2 bits and g_idx of 512 are no whole matrix"),
        ("gptq", {"group_size": 0}, r"group_size is 0"),
        ("gptq", {"group_size": 10**40}, r"group_size is 1000.*the configuration is damaged"),
        ("gptq", {"group_size": 64}, r"scales are \[2, 256\], wanted \[4, 256\]|g_idx makes groups"),
        ("gptq", {"checkpoint_format": "marlin"}, r"'marlin', wanted gptq or gptq_v2; save the model again"),
        ("auto-round", {"packing_format": "auto_round:llm_compressor"}, r"wanted auto_round, auto_round:gptqmodel"),
        ("auto-round", {"data_type": "mx_fp"}, r"data_type is 'mx_fp', wanted int"),
        ("modelopt fp8", {"quant_algo": "W4A8_AWQ"}, r"quant_algo is 'W4A8_AWQ', wanted FP8 or"),
        ("modelopt fp8", {"quant_algo": None}, r"quant_algo is absent"),
        ("gptq", {"rotation": "hadamard"}, r"rotation is 'hadamard', wanted it absent: rotated inputs"),
        ("compressed-tensors int4", {"transform_config": {"config_groups": {}}}, r"transform_config is .*rotated inputs are not"),
        ("awq", {"bits": 8}, r"bits is 8, wanted 4"),
        ("awq", {"version": "gemv"}, r"'gemv', wanted gemm; quantize the model again"),
        ("awq", {"group_size": 64}, r"scales are \[4, 256\], wanted \[8, 256\]"),
        ("compressed-tensors int4", {"format": "marlin-24"}, r"format is 'marlin-24', wanted one of dense"),
        ("compressed-tensors int4", {"config_groups": {}}, r"is not a matrix \[256, 512\] of \[\] bits"),
        ("compressed-tensors int4", {"config_groups": {"g": 1}}, r"wanted an object"),
        ("fp8 of blocks", {"weight_block_size": [128]}, r"two numbers, rows and inputs of a block"),
        ("fp8 of blocks", {"weight_block_size": [64, 64]}, r"or for each block of 64 x 64"),
        ("fp8 of blocks", {"fmt": "e5m2"}, r"'e5m2', wanted e4m3"),
    ],
)
def test_settings_that_are_wrong_or_not_supported_are_a_clear_error(
    tmp_path: Path, kind: str, changes: dict[str, object], message: str
) -> None:
    (config, quantize), _ = KINDS[kind]
    written = write(tmp_path / "model", config | changes, quantize)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(written.directory)
    assert str(written.directory) in str(caught.value)

"""What compressed-tensors and torchao write means here what they say; bitsandbytes' tables and dequantization are ours."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec.checkpoints import open_checkpoint
from tests.checkpoints.quantizers import PARTS, Raw, write
from tools.make_tiny_model import make_tiny_hf

SCHEMES: dict[str, dict[str, Any]] = {
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
    "pack-quantized asymmetric": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    "pack-quantized 3 bits": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True},
    "pack-quantized channel": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "float-quantized block": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
        "symmetric": True,
    },
}


def _stored(tensor: Any) -> Any:
    """A torch tensor as a writer of files takes it."""
    import torch

    if tensor.dtype == torch.float8_e4m3fn:
        return Raw("F8_E4M3", tensor.view(torch.uint8).numpy())
    if tensor.dtype == torch.bfloat16:
        return Raw("BF16", tensor.view(torch.uint16).numpy())
    return tensor.contiguous().numpy()


@pytest.mark.parametrize("kind", SCHEMES)
def test_layers_that_compressed_tensors_writes_mean_what_it_says(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("compressed_tensors")
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**SCHEMES[kind]))
    args, format = scheme.weights, kind.split(" ", maxsplit=1)[0]
    compressor = BaseCompressor.get_value_from_registry(format)

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Any], np.ndarray]:
        weight = torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * 0.02)
        high, wide = args.block_structure or (1, args.group_size or shape[1])
        blocks = weight.unflatten(0, (-1, high)).unflatten(2, (-1, wide))
        low, top = blocks.amin((1, 3)), blocks.amax((1, 3))
        scale, zero = calculate_qparams(low, top, args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        if args.type == "float":
            del state["weight_zero_point"]
        made = compressor.compress(dict(state), scheme)
        meant = compressor.decompress(dict(made), scheme)["weight"]
        parts = {name: _stored(tensor) for name, tensor in made.items() if name != "weight_zero_point" or not args.symmetric}
        return parts, meant.to(torch.float32).numpy()

    groups = {"group_0": {"targets": ["Linear"], "weights": SCHEMES[kind]}}
    config = {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}
    written = write(tmp_path / "model", config, quantize)
    checkpoint = open_checkpoint(written.directory)
    for name, values in written.values.items():
        assert np.allclose(checkpoint.tensors[name].dequantize(), values, rtol=1e-6, atol=0), name


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_layers_that_bitsandbytes_writes_mean_what_it_says(tmp_path: Path, kind: str, nested: bool) -> None:
    pytest.importorskip("bitsandbytes")
    import torch
    from bitsandbytes import functional

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Any], np.ndarray]:
        weight = torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * 0.02)
        packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=64)
        values = functional.dequantize_4bit(packed, state).numpy()
        parts = {"weight": packed.numpy()}
        parts |= {f"weight.{name}": tensor.numpy() for name, tensor in state.as_dict(packed=True).items()}
        return parts, values

    written = write(tmp_path / "model", {"quant_method": "bitsandbytes", "load_in_4bit": True}, quantize)
    checkpoint = open_checkpoint(written.directory)
    for name, values in written.values.items():
        tensor = checkpoint.tensors[name]
        assert tensor.format.name == f"{kind}_g64"
        assert np.allclose(tensor.dequantize(), values, rtol=1e-5, atol=1e-8), name


@pytest.mark.parametrize("kind", ["int8", "int4 in groups", "int4 in groups asymmetric", "int2 in groups", "fp8"])
def test_models_that_transformers_saves_with_torchao_mean_what_it_says(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torchao")
    import torch
    from torchao import quantization
    from transformers import AutoModelForCausalLM, TorchAoConfig

    name, _, how = kind.partition(" ")
    if how:
        mapping = quantization.MappingType.ASYMMETRIC if "asymmetric" in how else quantization.MappingType.SYMMETRIC
        groups = quantization.PerGroup(64)
        config = quantization.IntxWeightOnlyConfig(weight_dtype=getattr(torch, name), granularity=groups, mapping_type=mapping)
    else:
        config = quantization.Int8WeightOnlyConfig() if name == "int8" else quantization.Float8WeightOnlyConfig()
    make_tiny_hf(tmp_path / "plain", dtype="f32", tied=False, num_layers=1)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.bfloat16, quantization_config=TorchAoConfig(config)
    )
    model.save_pretrained(tmp_path / "model")
    for file in (tmp_path / "plain").glob("tokenizer*"):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.quantization == f"torchao, {type(config).__name__}"
    for part, module in PARTS.items():
        found, meant = checkpoint.tensors[f"layers.0.{part}"], model.get_submodule(f"model.layers.0.{module}").weight.dequantize()
        assert found.format.name.startswith(name), part
        assert np.allclose(found.dequantize(), meant.float().numpy(), rtol=2**-8, atol=0), f"{part}: torchao's values are bf16"

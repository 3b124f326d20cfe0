"""Weights of Hugging Face directories: plain, or quantized by one of several packages. Knows no model.

`quantization_config` names the method and its settings. Which layers are quantized is seen from their tensors, so that layers that
were left out are read as they are. Each method has a file beside this one.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from cpuspec.checkpoints import bitsandbytes, compressed, gptq, torchao
from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.grouped_codes import Method
from cpuspec.checkpoints.safetensors import StoredTensor
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor

# By `quant_method`. A method raises CheckpointError for settings that are not supported.
METHODS: Mapping[str, Callable[[Fields], Method]] = MappingProxyType(
    {
        "gptq": gptq.gptq,
        "auto-round": gptq.auto_round,
        "intel/auto-round": gptq.auto_round,
        "awq": gptq.awq,
        "compressed-tensors": compressed.compressed_tensors,
        "modelopt": compressed.modelopt,
        "mxfp4": compressed.mxfp4,
        "fp8": compressed.fp8,
        "fbgemm_fp8": compressed.fp8,
        "bitsandbytes": bitsandbytes.bitsandbytes,
        "torchao": torchao.torchao,
    }
)

# Where older versions of the packages wrote their settings instead of config.json.
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def read_method(directory: Path, config: Fields) -> Method | None:
    """The method by config.json or a package's own file; None if the weights are plain.

    Raises CheckpointError for a method or a setting that is not supported.
    """
    key = config.first(("quantization_config", "compression_config"))
    quantization, name = config.object(key), ""
    if not key:
        files = [directory / file_name for file_name in _OWN_FILES if (directory / file_name).exists()]
        if not files:
            return None
        quantization, name = Fields.of_file(files[0]), _OWN_FILES[files[0].name]
    name = quantization.text("quant_method", name or "an unnamed method")
    if name not in METHODS:
        raise CheckpointError(
            f"{quantization.what}: weights quantized with {name[:40]!r} are not supported by this version, which reads "
            f"{', '.join(METHODS)}; use a GGUF file of the model, or its plain weights"
        )
    return METHODS[name](quantization)


def read_quantized(directory: Path, method: Method, stored: Mapping[str, StoredTensor]) -> dict[str, QuantTensor]:
    """The tensors by the names that plain weights have. Raises CheckpointError for what is damaged or not supported."""
    tensors: dict[str, QuantTensor] = {}
    layers: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        if name.endswith(tuple(f".{part}" for part in method.unused)):
            continue
        part = next((part for part in method.parts if name.endswith(method.separator + part)), None)
        if part is None:
            tensors[name] = tensor.floats()
        else:
            layers.setdefault(name.removesuffix(method.separator + part), {})[part] = tensor
    for layer, parts in layers.items():
        if method.is_quantized(parts):
            found = {f"{layer}.weight": method.matrix(f"{directory}: {layer}", parts)}
        else:
            found = {f"{layer}{method.separator}{part}": tensor.floats() for part, tensor in parts.items()}
        if twice := found.keys() & tensors.keys():
            raise CheckpointError(f"{directory}: {min(twice)} is there twice, plain and quantized")
        tensors |= found
    return tensors

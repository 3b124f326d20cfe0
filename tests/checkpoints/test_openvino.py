"""What an OpenVINO model's files say is what is read, and nothing that they do not hold."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.openvino import MODEL, WEIGHTS
from cpuspec.errors import CheckpointError
from cpuspec.settings import EngineConfig
from tests.backends.models import forward
from tests.model_files import few_bytes
from tools.make_tiny_model import make_tiny_hf

TOKENS = np.random.default_rng(0).integers(0, 300, 45).tolist()
ENGINE = EngineConfig(threads=1, max_rows=64, kv_format="f32")


class Ir:
    """An OpenVINO model in the making, written as the documentation of the format has it."""

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.edges: list[str] = []
        self.blob = b"\0" * 5  # constants are not aligned

    def layer(self, type: str, *inputs: int, name: str = "", data: str = "") -> int:
        number = len(self.layers)
        self.layers.append(
            f'<layer id="{number}" name="{name or f"{type}_{number}"}" type="{type}" version="opset1">{data}</layer>'
        )
        self.edges += [
            f'<edge from-layer="{source}" from-port="2" to-layer="{number}" to-port="{port}" />'
            for port, source in enumerate(inputs)
        ]
        return number

    def const(self, type: str, shape: tuple[int, ...], data: bytes) -> int:
        place = f'element_type="{type}" shape="{", ".join(map(str, shape))}" offset="{len(self.blob)}" size="{len(data)}"'
        self.blob += data
        return self.layer("Const", data=f"<data {place} />")

    def write(self, directory: Path) -> None:
        text = f'<?xml version="1.0"?><net name="Model0" version="11"><layers>{"".join(self.layers)}</layers>'
        (directory / MODEL).write_text(f"{text}<edges>{''.join(self.edges)}</edges><rt_info /></net>")
        (directory / WEIGHTS).write_bytes(self.blob)


def _packed(codes: np.ndarray) -> bytes:
    """4-bit codes, the first of two in the low half."""
    pairs = codes.astype(np.uint8).reshape(-1, 2) & 15
    return (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8).tobytes()


def _grouped(
    ir: Ir, type: str, group: int, shape: tuple[int, ...], *, middle: int | None = None, spread: int = 3
) -> tuple[int, np.ndarray]:
    """A random matrix in groups: its layer, and its values. middle: where zero points lie; None is none."""
    rng = np.random.default_rng(len(ir.layers))
    rows, groups = shape[0], shape[1] // group
    low, high = {"u4": (0, 16), "i4": (-8, 8), "u8": (0, 256), "i8": (-128, 128)}[type]
    codes = rng.integers(low, high, (rows, groups, group))
    scale = (rng.random((rows, groups, 1)) * 0.02).astype(np.float16)
    grouped_shape = shape if groups == 1 else (rows, groups, group)
    pack: Callable[[np.ndarray], bytes] = _packed if type.endswith("4") else lambda numbers: numbers.astype(np.uint8).tobytes()
    node = ir.layer("Convert", ir.const(type, grouped_shape, pack(codes)))
    scale_shape = (rows, 1) if groups == 1 else (rows, groups, 1)
    zero = np.zeros((rows, groups, 1), np.int64)
    if middle is not None:
        zero = middle + rng.integers(-spread, spread + 1, zero.shape)
        node = ir.layer("Subtract", node, ir.layer("Convert", ir.const(type, scale_shape, pack(zero))))
    node = ir.layer("Multiply", node, ir.const("f16", scale_shape, scale.tobytes()))
    values = (scale.astype(np.float32) * (codes - zero).astype(np.float32)).reshape(shape)
    return ir.layer("Convert", ir.layer("Reshape", node, ir.const("i64", (2,), np.array(shape).tobytes()))), values


def _micro(ir: Ir, type: str, shape: tuple[int, ...]) -> tuple[int, np.ndarray]:
    """mxfp4 or mxfp8: groups of 32 under a power of two."""
    rng = np.random.default_rng(len(ir.layers))
    exponents = rng.integers(110, 120, (shape[0], shape[1] // 32, 1)).astype(np.uint8)
    codes = rng.integers(0, 16 if type == "f4e2m1" else 0x70, (*exponents.shape[:2], 32))
    if type == "f4e2m1":
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes < 8, 1, -1)
    else:
        values = np.where(codes < 8, codes / 8 * 2.0**-6, (1 + codes % 8 / 8) * 2.0 ** (codes // 8 - 7))
    pack = _packed if type == "f4e2m1" else lambda numbers: numbers.astype(np.uint8).tobytes()
    node = ir.layer("Convert", ir.const(type, codes.shape, pack(codes)))
    node = ir.layer("Multiply", node, ir.layer("Convert", ir.const("f8e8m0", exponents.shape, exponents.tobytes())))
    return ir.layer("Reshape", node), (values * 2.0 ** (exponents.astype(np.float64) - 127)).astype(np.float32).reshape(shape)


# Kind of matrix -> how it is written, and the format that it becomes.
KINDS = {
    "u4 g64": (lambda ir, shape: _grouped(ir, "u4", 64, shape, middle=8), "int4_g64_asym"),
    "u4 g128": (lambda ir, shape: _grouped(ir, "u4", 128, shape, middle=8, spread=0), "int4_g128"),
    "u4 without zero points": (lambda ir, shape: _grouped(ir, "u4", 32, shape), "int4_g32_asym"),
    "i4 g32": (lambda ir, shape: _grouped(ir, "i4", 32, shape), "int4_g32"),
    "i4 of whole rows": (lambda ir, shape: _grouped(ir, "i4", shape[1], shape), "int4_g128"),
    "i4 g16": (lambda ir, shape: _grouped(ir, "i4", 16, shape), "f32"),
    "i8 of whole rows": (lambda ir, shape: _grouped(ir, "i8", shape[1], shape), "q8_0"),
    "u8 around 128": (lambda ir, shape: _grouped(ir, "u8", shape[1], shape, middle=128, spread=0), "q8_0"),
    "u8 around elsewhere": (lambda ir, shape: _grouped(ir, "u8", shape[1], shape, middle=128), "f32"),
    "mxfp4": (lambda ir, shape: _micro(ir, "f4e2m1", shape), "mxfp4"),
    "mxfp8": (lambda ir, shape: _micro(ir, "f8e4m3", shape), "bf16"),
}


def _write(directory: Path, kind: str, tied: bool = False, **sizes: int) -> tuple[Ir, dict[str, np.ndarray]]:
    """A model's directory with an OpenVINO graph in the place of its safetensors; returns what its matrices hold."""
    make_tiny_hf(directory, tied=tied, dtype="f16", **sizes)
    source = open_checkpoint(directory)
    ir, values = Ir(), {}
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    names |= {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    names |= {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    names |= {"embed": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    rows = ir.layer("Parameter", name="input_ids")
    for name, tensor in source.tensors.items():
        layer, _, part = name.rpartition(".")
        module = f"__module.{f'model.{layer}.' if layer else ''}{names[part.removesuffix('_bias')]}"
        if len(tensor.shape) == 2:
            weight, values[name] = KINDS[kind][0](ir, tensor.shape)
            inputs, type = ((weight, rows), "Gather") if name == "embed" else ((rows, weight), "MatMul")
            ir.layer(type, *inputs, name=f"{module}/aten::linear/{type}")
            if name == "embed" and tied:
                ir.layer("MatMul", rows, weight, name="__module.lm_head/aten::linear/MatMul")
        else:
            values[name] = tensor.dequantize()
            weight = ir.layer("Convert", ir.const("f16", (1, 1, *tensor.shape), tensor.data.tobytes()))
            ir.layer("Add" if part.endswith("_bias") else "Multiply", rows, weight, name=f"{module}/aten::mul/Multiply_1")
    del source, tensor  # Windows removes no file that is mapped
    (directory / "model.safetensors").unlink()
    ir.write(directory)
    return ir, values


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_matrix_keeps_its_values(tmp_path: Path, kind: str) -> None:
    _, values = _write(tmp_path / "model", kind)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.tensors.keys() == values.keys()
    for name, wanted in values.items():
        tensor = checkpoint.tensors[name]
        assert np.array_equal(tensor.dequantize(), wanted)
        assert tensor.format.name == ("f16" if len(tensor.shape) == 1 else KINDS[kind][1])


def test_a_tied_output_matrix_is_the_embedding(tmp_path: Path) -> None:
    _write(tmp_path / "model", "i4 g32", tied=True)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.config.tied_embeddings
    assert "output" not in checkpoint.tensors


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda ir: setattr(ir, "blob", ir.blob[: len(ir.blob) // 2]), "in a file of"),
        (lambda ir: setattr(ir, "layers", [one.replace('"i4"', '"nf4"') for one in ir.layers]), "of type 'nf4'"),
        (lambda ir: setattr(ir, "layers", [one.replace('"i4"', '"u2"') for one in ir.layers]), "of type 'u2'"),
        (lambda ir: setattr(ir, "layers", [one.replace('offset="', 'offset="-') for one in ir.layers]), "whole numbers"),
        (lambda ir: setattr(ir, "layers", [one.replace('shape="384,', 'shape="383,') for one in ir.layers]), "are no"),
        (lambda ir: setattr(ir, "layers", ir.layers[:-1]), "joins no two layers"),
        (lambda ir: ir.edges.append('<edge from-layer="0" to-layer="1" to-port="-1" />'), "joins no two layers"),
        (lambda ir: setattr(ir, "layers", [one.replace("q_proj", "x_proj") for one in ir.layers]), "missing"),
        (
            lambda ir: setattr(ir, "layers", [one.replace('shape="', f'shape="{"1," * 100_000}') for one in ir.layers]),
            "no offset, size and shape",
        ),
        (lambda ir: ir.layers.append("<layer"), "is not XML"),
        (lambda ir: ir.edges.append("<!DOCTYPE a>"), "declares entities"),
    ],
)
def test_a_damaged_model_is_an_error(tmp_path: Path, change: Callable[[Ir], None], wanted: str) -> None:
    ir, _ = _write(tmp_path / "model", "i4 g32")
    change(ir)
    ir.write(tmp_path / "model")
    with pytest.raises(CheckpointError, match=wanted) as caught:
        open_checkpoint(tmp_path / "model")
    assert len(str(caught.value)) < 600


def test_a_graph_that_goes_in_circles_ends(tmp_path: Path) -> None:
    ir, _ = _write(tmp_path / "model", "i4 g32")
    for number, layer in enumerate(ir.layers):
        if 'type="Convert"' in layer:
            edge = f'<edge from-layer="{number}" from-port="2" to-layer="{number}" to-port="0" />'
            ir.edges = [edge if f'to-layer="{number}"' in one else one for one in ir.edges]
    ir.write(tmp_path / "model")
    with pytest.raises(CheckpointError, match="missing"):
        open_checkpoint(tmp_path / "model")


def test_a_constant_that_is_used_again_and_again_is_an_error(tmp_path: Path) -> None:
    ir, _ = _write(tmp_path / "model", "i4 g16")  # becomes f32
    [first] = [number for number, layer in enumerate(ir.layers) if "layers.0.mlp.up_proj" in layer]
    [source] = [edge for edge in ir.edges if f'to-layer="{first}" to-port="1"' in edge]
    weight = int(source.partition('from-layer="')[2].partition('"')[0])
    for number in range(2, 500):
        ir.layer("MatMul", 0, weight, name=f"__module.model.layers.{number}.mlp.up_proj/aten::linear/MatMul")
    ir.write(tmp_path / "model")
    most = 40 * (tmp_path / "model" / WEIGHTS).stat().st_size
    with few_bytes(most), pytest.raises(CheckpointError, match=r"more weights than openvino_model.bin has"):
        open_checkpoint(tmp_path / "model")


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    _write(tmp_path / "model", "i4 g32")
    (tmp_path / "model" / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "model")


# -------------------------------------------------------------------------------- what optimum-intel itself writes and computes


OPTIMUM = {
    "int4 asym": {"bits": 4, "sym": False, "group_size": 64, "ratio": 1.0},
    "int4 sym": {"bits": 4, "sym": True, "group_size": 32, "ratio": 1.0, "backup_precision": "int8_sym"},
    "int8": {"bits": 8, "sym": True},
    "mxfp4": {"bits": 4, "dtype": "mxfp4", "group_size": 32, "ratio": 1.0},
}
# Of a linear layer, and of the embedding, which takes the backup precision.
WANTED = {
    "int4 asym": ("int4_g64_asym", "f32"),
    "int4 sym": ("int4_g32", "q8_0"),
    "int8": ("q8_0", "q8_0"),
    "mxfp4": ("mxfp4", "bf16"),
}


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("quantization", OPTIMUM)
def test_an_exported_model_means_what_optimum_intel_computes(tmp_path: Path, architecture: str, quantization: str) -> None:
    pytest.importorskip("openvino", reason="OpenVINO has its own environment, see cpuspec/backends/README.md")
    intel = pytest.importorskip("optimum.intel", reason="optimum-intel has its own environment, see cpuspec/backends/README.md")
    import torch

    source = make_tiny_hf(tmp_path / "source", architecture=architecture, dtype="f16", tied=architecture == "llama", num_layers=1)
    settings = intel.OVWeightQuantizationConfig(**OPTIMUM[quantization])
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "KV_CACHE_PRECISION": "f32"}
    model = intel.OVModelForCausalLM.from_pretrained(source, export=True, quantization_config=settings, ov_config=exact)
    model.save_pretrained(tmp_path / "exported")
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS]), attention_mask=torch.ones(1, len(TOKENS), dtype=torch.int64)).logits[0].numpy()
    checkpoint = open_checkpoint(tmp_path / "exported")
    assert tuple(checkpoint.tensors[name].format.name for name in ("layers.0.q", "embed")) == WANTED[quantization]
    reference = NumpyBackend(checkpoint, ENGINE, np.float64)
    assert np.abs(forward(reference, reference.new_cache(1, 64), {0: TOKENS}).logits - wanted).max() < 1e-4
    plain = NumpyBackend(open_checkpoint(source), ENGINE, np.float64)
    assert np.abs(forward(plain, plain.new_cache(1, 64), {0: TOKENS}).logits - wanted).max() > 1e-3

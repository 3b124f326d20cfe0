"""LoRA adapters: for some matrices of a model a product of two thin ones, which is added to each (arXiv 2106.09685).

Read from directories of PEFT (adapter_config.json, adapter_model.safetensors) and from GGUF files that llama.cpp's
convert_lora_to_gguf writes. Names, joined matrices and orders of rows are those of the model's own files.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cpuspec.checkpoints.canonical import GGUF, HF, Names, arranged
from cpuspec.checkpoints.checkpoint import is_linear, tensor_shapes
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.fields import Fields, read_json_object
from cpuspec.checkpoints.gguf_file import read_gguf
from cpuspec.checkpoints.safetensors import read_safetensors
from cpuspec.config import ModelConfig
from cpuspec.errors import CheckpointError, ConfigError, in_one_line
from cpuspec.formats import QuantTensor
from cpuspec.formats.tensor import F32

MAX_RANK = 1024  # the largest rank of an adapter that is applied to answers
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's file names

_OF_PEFT = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
_OF_GGUF = re.compile(r"(.+\.weight)\.lora_([ab])")
# Settings of PEFT at which an adapter is nothing but the product.
_KEEPING_STARTS = (True, False, "gaussian", "eva", "orthogonal")  # values of init_lora_weights that leave the model as it is
_MOST_OF_A_PATTERN = 500  # characters
_PLAIN = {
    "use_dora": False, "fan_in_fan_out": False, "lora_bias": False, "bias": "none", "layer_replication": None,
    "alora_invocation_tokens": None,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter adds `up @ down` to each of its matrices; `up` includes the adapter's own scale and the caller's.

    pairs: by canonical name, down F32 [rank, K] and up F32 [N, rank].
    """

    path: Path
    pairs: Mapping[str, tuple[F32, F32]]

    @property
    def rank(self) -> int:
        """The largest of its matrices' ranks."""
        return max(len(down) for down, _ in self.pairs.values())

    @cached_property
    def identity(self) -> str:
        """A hash of everything that answers depend on."""
        found = hashlib.sha256()
        for name, pair in sorted(self.pairs.items()):
            found.update(repr((name, *(part.shape for part in pair))).encode())
            for part in pair:
                found.update(np.ascontiguousarray(part).data)
        return found.hexdigest()


AdapterSet = tuple[tuple[Adapter, float], ...]  # the adapters of one answer, each with a scale


def set_identity(adapters: AdapterSet) -> str:
    """A hash of the adapters and their scales; "" for none. Sets with one hash give the same answers."""
    facts = [(adapter.identity, float(scale)) for adapter, scale in adapters]
    return hashlib.sha256(repr(facts).encode()).hexdigest() if facts else ""


def read_scaled(text: str) -> tuple[Path, float]:
    """The path and the scale of FILE[=SCALE]. A path may have an equals sign. Raises ConfigError for a scale without an end."""
    path, equals, scale = text.rpartition("=")
    number: float | None = None
    with suppress(ValueError):
        number = float(scale)
    return (Path(path), checked_scale(number)) if equals and number is not None else (Path(text), 1.0)


def checked_scale(scale: float) -> float:
    """The scale. Raises ConfigError for one that is no finite number."""
    if not math.isfinite(scale):
        raise ConfigError(f"the scale of an adapter is a finite number, got {scale}")
    return scale


def open_adapter(path: Path, config: ModelConfig, model: str, scale: float = 1.0, merges: bool = False) -> Adapter:
    """Read an adapter for a model of that name; `scale` multiplies it.

    merges: whether it will be added to the matrices: then it may be of any rank, and change the output matrix.
    Raises CheckpointError for one that is damaged or of another model.
    """
    kind, stored, own_scale = _read_gguf(path) if path.is_file() else _read_peft(path)
    family = FAMILIES[config.architecture]
    if family.folds_multipliers:
        raise CheckpointError(f"{path}: adapters of {config.architecture} are not read: factors are in its matrices")
    names = Names(family, kind)
    wanted = tensor_shapes(config)
    pairs: dict[str, tuple[F32, F32]] = {}
    for theirs, (down, up) in stored.items():
        ours, rank = names.ours(theirs), down.shape[0]
        if not ours or "@" in ours or ours == "embed" or ours.endswith(("delta_o", ".k_b|v_b", ".k_b", ".v_b")):
            raise CheckpointError(f"{path}: {theirs} is not a matrix of {model} that an adapter can change here")
        if not merges and (ours == "output" or rank > MAX_RANK):
            raise CheckpointError(
                f"{path}: {theirs}, of rank {rank}, is not applied to answers: wanted matrices of layers and ranks up to "
                f"{MAX_RANK}; `cpuspec quantize --lora` merges it"
            )
        if up.shape[1] != rank or rank == 0:
            raise CheckpointError(f"{path}: {theirs} has products of {list(up.shape)} and {list(down.shape)}, wanted one rank")
        thin = {name: (*shape[:-1], rank) for name, shape in wanted.items()}
        factor, narrow = np.float32(scale * own_scale(theirs, rank)), np.ascontiguousarray(down.dequantize())
        for name, rows in arranged(str(path), config, family, kind, {ours: up}, thin).items():
            shape = wanted.get(name, ())
            if len(shape) != 2 or not is_linear(name, shape):
                raise CheckpointError(f"{path}: {theirs} is not a matrix of {model} that an adapter can change here")
            if got := [rows.shape[0], down.shape[1]] if (rows.shape[0], down.shape[1]) != shape else []:
                raise CheckpointError(f"{path}: {theirs} is for a matrix {got}, and that of {model} is {list(shape)}")
            pairs[name] = narrow, rows.dequantize() * factor
    if not pairs:
        raise CheckpointError(f"{path} has no matrices; wanted a LoRA adapter")
    if bad := next((name for name, pair in pairs.items() if not all(np.isfinite(part).all() for part in pair)), ""):
        raise CheckpointError(f"{path}: the adapter of {bad} has numbers that are not finite; it is damaged")
    return Adapter(path, pairs)


class AdapterFacts(NamedTuple):
    """The facts in an adapter's files. base: the name of its model, "" if they name none. targets: the modules that it changes.

    scales: what its products are multiplied with, without the caller's; several where ranks or patterns differ.
    """

    base: str
    ranks: list[int]
    scales: list[float]
    targets: list[str]
    num_matrices: int
    num_bytes: int


def adapter_facts(path: Path) -> AdapterFacts | None:
    """Read the facts of an adapter; None if `path` is no adapter. Raises CheckpointError for a damaged one."""
    if (path / CONFIG).is_file():
        base = read_json_object(path / CONFIG).get("base_model_name_or_path")
        _, stored, scale = _read_peft(path)
    elif path.suffix == ".gguf" and path.is_file() and (metadata := read_gguf(path).metadata).get("general.type") == "adapter":
        base = metadata.get("general.base_model.0.name") or metadata.get("general.architecture")
        _, stored, scale = _read_gguf(path)
    else:
        return None
    named = {
        name.removesuffix(".weight"): (down.shape[0], scale(name, max(down.shape[0], 1))) for name, (down, _) in stored.items()
    }
    return AdapterFacts(
        base if isinstance(base, str) else "",
        sorted({rank for rank, _ in named.values()}),
        sorted({round(own, 6) for _, own in named.values()}),
        sorted({name.rsplit(".", 1)[-1] for name in named}),
        len(stored),
        sum(part.num_bytes for pair in stored.values() for part in pair),
    )


_Pairs = dict[str, tuple[QuantTensor, QuantTensor]]
_Scale = Callable[[str, int], float]  # (a matrix's name in the file, its rank) -> its scale


def _read_gguf(path: Path) -> tuple[int, _Pairs, _Scale]:
    file = read_gguf(path)
    if file.metadata.get("general.type") != "adapter" or file.metadata.get("adapter.type") != "lora":
        raise CheckpointError(f"{path} is not a LoRA adapter: its general.type is {file.metadata.get('general.type')!r}")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float):
        raise CheckpointError(f"{path}: adapter.lora.alpha is {alpha!r}, wanted a number")
    return GGUF, _paired(path, file.tensors, _OF_GGUF), lambda _, rank: alpha / rank if alpha else 1.0


def _read_peft(directory: Path) -> tuple[int, _Pairs, _Scale]:
    if not (directory / CONFIG).exists():
        raise CheckpointError(f"{directory} has no {CONFIG}; wanted a directory of PEFT, or a GGUF file")
    fields = Fields.of_file(directory / CONFIG)
    if fields.text("peft_type", "") != "LORA":
        fields.fail("peft_type", "LORA")
    for key, plain in _PLAIN.items():
        if fields.value(key) not in (None, plain):
            fields.fail(key, f"{plain}: others are not supported; merge such an adapter with PEFT's merge_and_unload")
    if fields.value("modules_to_save"):
        fields.fail("modules_to_save", "none: matrices that were trained whole are not supported")
    alpha, roots = fields.number("lora_alpha", 8.0), fields.boolean("use_rslora", False)
    begin = fields.value("init_lora_weights")
    if begin not in _KEEPING_STARTS and begin is not None:
        wanted = ", ".join(map(str, _KEEPING_STARTS))
        fields.fail(
            "init_lora_weights",
            f"one of {wanted}: with others PEFT changes the model's own matrices, too; convert the adapter by PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...), or merge it by merge_and_unload",
        )
    alphas, ranks = _patterns(fields, "alpha_pattern"), _patterns(fields, "rank_pattern")

    def scale(name: str, rank: int) -> float:
        module = name.removesuffix(".weight")
        own = next((value for key, value in alphas.items() if key.fullmatch(module)), alpha)
        told = next((value for key, value in ranks.items() if key.fullmatch(module)), rank)
        if told != rank:
            fields.fail("rank_pattern", f"the rank of {name}, which is {rank}")
        return float(own) / (math.sqrt(rank) if roots else rank)

    stored = {name: tensor.floats() for name, tensor in read_safetensors(directory / WEIGHTS).items()}
    return HF, _paired(directory, stored, _OF_PEFT), scale


def _patterns(fields: Fields, key: str) -> dict[re.Pattern[str], float]:
    """PEFT's numbers by patterns of modules' names: regular expressions for the name, or for its end after a dot; the first that
    matches counts (peft/utils/other.py, get_pattern_key)."""
    given = fields.value(key) or {}
    if not isinstance(given, dict) or not all(type(one) in (int, float) for one in given.values()):
        fields.fail(key, "numbers by name")
    found = {}
    for pattern, number in given.items():
        # What is repeated inside of a repetition, or too often, takes time that grows with a power of the name's length.
        if len(pattern) > _MOST_OF_A_PATTERN or len(re.findall(r"[*+{]", pattern)) > 2 or re.search(r"\)[*+{]", pattern):
            fields.fail(key, f"simpler patterns than {in_one_line(pattern, 80)!r}: two repetitions at most, and none of a group")
        try:
            found[re.compile(rf"(.*\.)?({pattern})")] = number
        except (re.error, RecursionError, OverflowError) as error:
            fields.fail(key, f"regular expressions, and {in_one_line(pattern, 80)!r} is none: {error}")
    return found


def _paired(path: Path, stored: Mapping[str, QuantTensor], pattern: re.Pattern[str]) -> _Pairs:
    """Both parts of each matrix by its name in the model's files."""
    found: dict[str, dict[str, QuantTensor]] = {}
    for name, tensor in stored.items():
        match = pattern.fullmatch(name)
        if match is None or len(tensor.shape) != 2:
            raise CheckpointError(f"{path}: tensor {name!r} {list(tensor.shape)} is not a part of a LoRA adapter that is read here")
        matrix = match[1] if match[1].endswith(".weight") else f"{match[1]}.weight"
        found.setdefault(matrix, {})[match[2].lower()] = tensor
    if lone := next((name for name, parts in found.items() if len(parts) < 2), ""):
        raise CheckpointError(f"{path}: {lone} has one of the two parts of its product; the adapter is not whole")
    return {name: (parts["a"], parts["b"]) for name, parts in found.items()}

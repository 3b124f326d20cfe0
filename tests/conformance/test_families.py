"""Every registered family: it comes back as it was written in either container, and in GGUF files under the gguf package's names.

The package's tables are a witness that is not the code under test; `backends/test_transformers.py` has the values of each family.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.canonical import GGUF, HF, file_names
from cpuspec.checkpoints.checkpoint import tensor_shapes
from cpuspec.checkpoints.families import FAMILIES, LEAST_SUM
from cpuspec.config import RopeScaling
from cpuspec.quantize.gguf_output import shape_entries
from tests.backends.models import GEMMA4, MIXTURES, RECURRENT
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf, random_weights, tiny_config

SPECIAL = {**MIXTURES, **RECURRENT, **GEMMA4}
PLAIN = FAMILIES.keys() - {options["architecture"] for options in SPECIAL.values()}
MODELS: dict[str, dict[str, Any]] = {
    **SPECIAL,
    **{architecture: {"architecture": architecture} for architecture in sorted(PLAIN)},
    **{f"{name} untied": {"architecture": name, "tied": False} for name in sorted(PLAIN)},
}
ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}

# (name in the file, families or "" for all): the reason why the package's table lacks the tensor in that architecture.
NOT_LISTED = {
    (
        "output",
        "cohere cohere2 gemma gemma2 lfm2moe",
    ): "published models of it are tied; llama.cpp reads an output of its own where there is one",
    ("ffn_gate_inp.scale", "gemma4-moe"): "llama.cpp's converter gives the norm of the router this ending",
    ("ffn_down_exps.scale", "gemma4-moe"): "llama.cpp's converter gives the factors of experts this ending",
    ("ffn_gate_exps", "gemma4-moe"): "the converter joins them with ffn_up_exps; llama.cpp's loader and we read both",
    ("ffn_up_exps", "gemma4-moe"): "as ffn_gate_exps",
    **{
        (
            f"ffn_{part}",
            "qwen2moe qwen3moe",
        ): "transformers has dense layers between the mixtures (mlp_only_layers), llama.cpp has none"
        for part in ("gate", "up", "down")
    },
}
# Parts whose name the converter gives in code, not by the table.
IN_CODE = {
    "router_shift": "e_score_correction_bias and expert_bias become exp_probs_b.bias",
    "ssm_dt_bias": "dt_bias becomes dt_proj.bias first",
    "delta_dt": "dt_bias becomes dt_proj.bias first",
    "router_norm": "router.scale becomes ffn_gate_inp.scale",
    "router_factors": "router.per_expert_scale becomes ffn_down_exps.scale",
    "output_scale": "layer_scalar gets the ending weight",
    "sinks": "it gets the ending weight",
    "expert_gate": "tensors of single experts are joined, with names made for it",
    "expert_up": "as expert_gate",
    "expert_down": "as expert_gate; tensors of all experts get the ending weight",
}
RENAMED_IN_CODE = {("down", "granitehybrid"): "in models without experts shared_mlp is the dense part"}
# Keys that are this project's, or that llama.cpp reads and the package has no name for.
OWN_KEYS = {
    "rope.scaling.yarn_truncate": "ours: whether the ends of YaRN's range are whole pairs",
    "attention.recurrent_layers": "llama.cpp b11434's loaders of Qwen3.5 and Qwen3-Next read it; the package is older",
}
KNOWN_KEYS = {
    value.removeprefix("{arch}.")
    for group in vars(gguf.Keys).values()
    if isinstance(group, type)
    for value in vars(group).values()
    if isinstance(value, str) and value.startswith("{arch}.")
}


def _base(name: str) -> str:
    return re.sub(r"^blk\.[0-9]+\.", "", re.sub(r"\.(weight|bias)$", "", name))


def _is_excused(base: str, architecture: str) -> bool:
    return any(base == name and architecture in families.split() for name, families in NOT_LISTED)


@pytest.mark.parametrize("model", MODELS)
def test_tensors_have_the_names_of_the_gguf_package(model: str) -> None:
    config = tiny_config(**MODELS[model])
    family = FAMILIES[config.architecture]
    number = ARCHITECTURES[family.gguf_name]
    listed = {gguf.TENSOR_NAMES[tensor].replace("blk.{bid}.", "") for tensor in gguf.MODEL_TENSORS[number]}
    names = list(tensor_shapes(config))
    in_gguf = file_names(family, GGUF, names)
    assert not {name for name in in_gguf if _base(name) not in listed and not _is_excused(_base(name), config.architecture)}
    # llama.cpp's converter finds the same name for the tensor of a Hugging Face file.
    if config.architecture == "gpt-oss":  # whose experts lie there in an order of their own (`Family.other_names`)
        return
    in_hf = file_names(family, HF, names)
    table = gguf.get_tensor_name_map(number, config.num_layers)
    by_parts = {parts: name for name, parts in in_gguf.items()}
    compared = 0
    for name, parts in in_hf.items():
        part = parts[0].rpartition(".")[2]
        if (
            parts not in by_parts
            or part in IN_CODE
            or (part, config.architecture) in RENAMED_IN_CODE
            or _is_excused(_base(by_parts[parts]), config.architecture)
        ):
            continue
        wanted = table.get_name(re.sub(r"\.experts\.\*\.", ".experts.", name), try_suffixes=(".weight", ".bias"))
        assert wanted == by_parts[parts], name
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize("model", MODELS)
def test_keys_have_the_names_of_the_gguf_package(model: str) -> None:
    config = tiny_config(**MODELS[model])
    family = FAMILIES[config.architecture]
    prefix = f"{family.gguf_name}."
    written = {key.removeprefix(prefix) for key in shape_entries(config, "m") if key.startswith(prefix)}
    read = {*family.gguf_defaults, *([family.gguf_mark] if family.gguf_mark else ())}
    assert written > {"block_count", "context_length", "embedding_length"}
    assert not (written | read) - KNOWN_KEYS - OWN_KEYS.keys()


def test_every_family_is_held_to_the_package() -> None:
    assert {options["architecture"] for options in MODELS.values()} == FAMILIES.keys()


def test_exceptions_are_needed() -> None:
    assert not OWN_KEYS.keys() & KNOWN_KEYS
    for name, families in NOT_LISTED:
        for architecture in families.split():
            listed = gguf.MODEL_TENSORS[ARCHITECTURES[FAMILIES[architecture].gguf_name]]
            assert name not in {gguf.TENSOR_NAMES[tensor].replace("blk.{bid}.", "") for tensor in listed}, (name, architecture)


YARN = RopeScaling("yarn", 4.0, original_context_length=128, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_configuration_and_values_come_back_as_written_in_either_container(tmp_path: Path, architecture: str, tied: bool) -> None:
    shape = {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "num_layers": 4, "tied": tied}
    family = FAMILIES[architecture]
    if not family.latent:  # which has scalings of its own
        shape |= {"rope_scaling": None if family.single_branch else YARN if tied else RopeScaling("linear", 2.0)}
    if architecture == "llama":
        shape |= {"qkv_bias": not tied, "o_bias": not tied}
    config = tiny_config(architecture, **shape)
    weights = random_weights(config, 5)
    experts = config.experts
    if experts and experts.score == "sigmoid":
        experts = replace(experts, least_sum=LEAST_SUM)  # llama.cpp's, which no key says
    directory = make_tiny_hf(tmp_path / "hf", architecture, num_shards=1 if tied else 3, seed=5, **shape)
    if shape.get("rope_scaling"):
        shape["rope_scaling"] = replace(shape["rope_scaling"], attention_factor=None)  # which llama.cpp computes
    file = make_tiny_gguf(tmp_path / "m.gguf", architecture, weight_format="f32", seed=5, **shape)
    scaling = config.rope_scaling if family.by_window or family.latent else shape["rope_scaling"]
    alike = family.latent or architecture == "gemma4_unified"  # GGUF files do not tell these families apart
    name = family.gguf_architecture if alike and family.gguf_architecture else architecture
    in_file = replace(config, architecture=name, experts=experts, rope_scaling=scaling, norm_eps=float(np.float32(config.norm_eps)))
    for path, wanted in ((directory, config), (file, in_file)):
        checkpoint = open_checkpoint(path)
        assert (checkpoint.config.query_scale or 0) == pytest.approx(
            wanted.query_scale or 0, rel=1e-6
        )  # files have its parts in f32
        assert replace(checkpoint.config, query_scale=wanted.query_scale) == wanted
        assert checkpoint.tensors.keys() == weights.keys()
        for name, values in weights.items():
            # Directories have the logarithms of these, and Falcon-H1's matrices without their factors.
            rtol = 1e-6 * (name.endswith(("delta_decay", "ssm_a")) or config.beside)
            np.testing.assert_allclose(checkpoint.tensors[name].dequantize(), values, rtol=rtol, atol=0, err_msg=name)

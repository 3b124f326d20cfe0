"""Files of Ollama's own converter, as those of llama.cpp's: other names of keys and tensors, and settings built into its program.

Facts are those of Ollama's convert/ and model/models/ (https://github.com/ollama/ollama). Files that llama.cpp's converter made,
which Ollama has, too, are left as they are.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.gguf_file import GgufFile
from cpuspec.formats import QuantTensor

Settings = dict[str, Any]  # metadata of the architecture, by keys without its prefix

# Architectures that llama.cpp calls by another name.
_RENAMED: Mapping[str, str] = MappingProxyType({"gptoss": "gpt-oss", "glm4moelite": "deepseek2"})

_GPT_OSS_TENSORS = {
    "attn_out": "attn_output", "attn_sinks": "attn_sinks.weight", "ffn_norm": "post_attention_norm",
    # Gate and up in turns. These are the names of such tensors in Hugging Face directories.
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj.weight", "ffn_gate_up_exps.bias": "mlp.experts.gate_up_proj_bias",
}  # fmt: skip


def as_llama_cpp_has_it(file: GgufFile) -> GgufFile:
    """The file with llama.cpp's names and settings. Raises CheckpointError for a setting that cannot be read."""
    theirs = file.metadata.get("general.architecture")
    change, renamed = _CHANGES.get(str(theirs)), _RENAMED.get(str(theirs))
    if change is None and renamed is None:
        return file
    ours, prefix = renamed or str(theirs), f"{theirs}."
    settings = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    # By name: of parts of a layer, or of whole tensors, with or without what follows the last dot.
    tensors = change(Fields(str(file.path), dict(settings)), settings) if change else {}
    metadata = {key: value for key, value in file.metadata.items() if not key.startswith(prefix)}
    metadata |= {"general.architecture": ours, **{f"{ours}.{key}": value for key, value in settings.items()}}
    found: dict[str, QuantTensor] = {}
    for name, tensor in file.tensors.items():
        layer = re.match(r"blk\.[0-9]+\.", name)
        start = layer[0] if layer else ""
        part = name.removeprefix(start)
        stem, dot, end = part.rpartition(".")
        new = start + (tensors.get(part) or (f"{tensors[stem]}{dot}{end}" if stem in tensors else part))
        found[name if new in file.tensors else new] = tensor
    return replace(file, metadata=metadata, tensors=found)


def _gemma3(fields: Fields, settings: Settings) -> Mapping[str, str]:
    """Files of 4B, 12B and 27B lack the rotary scaling, and the 1B has a soft cap that the model does not have."""
    if not any(key in fields for key in ("rope.global.freq_base", "rope.local.freq_base", "mm.tokens_per_image")):
        return {}
    known: dict[str, Any] = {
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": fields.number("rope.global.freq_base", 1e6),
        "rope.freq_base_swa": fields.number("rope.local.freq_base", 1e4),
    }
    layers = fields.integer("block_count")
    has_windows = fields.integer("attention.sliding_window", 0) < fields.integer("context_length")
    if has_windows and layers in (34, 48, 62):
        known |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    if has_windows and layers == 26 and fields.value("final_logit_softcapping") == 30.0:
        del settings["final_logit_softcapping"]
    for key, value in known.items():
        settings.setdefault(key, value)
    _drop(settings, "rope.global.freq_base", "rope.local.freq_base")
    return {}


def _gpt_oss(fields: Fields, settings: Settings) -> Mapping[str, str]:
    settings.setdefault("rope.scaling.type", "yarn")
    return _GPT_OSS_TENSORS


def _mistral3(fields: Fields, settings: Settings) -> Mapping[str, str]:
    """Ministral 3 in the words of its config.json."""
    if "rope.scaling_beta" in fields:
        settings.setdefault("attention.temperature_scale", fields.number("rope.scaling_beta"))
    if fields.value("rope.scaling.type") == "":  # a model without
        _drop(settings, *(key for key in settings if key.startswith("rope.scaling.")))
    scale, of_all = fields.number("rope.scaling.mscale", 0.0), fields.number("rope.scaling.mscale_all_dim", 0.0)
    if scale and of_all and settings.get("rope.scaling.type") == "yarn":
        grows = 0.1 * math.log(max(fields.number("rope.scaling.factor"), 1.0))
        settings.setdefault("rope.scaling.yarn_log_multiplier", of_all)
        if scale != 1:  # which llama.cpp takes it to be
            settings.setdefault("rope.scaling.attn_factor", (scale * grows + 1) / (grows + 1))
    _drop(settings, "rope.scaling_beta", "rope.scaling.mscale", "rope.scaling.mscale_all_dim")
    return {}


def _qwen35(fields: Fields, settings: Settings) -> Mapping[str, str]:
    """Value heads lie in llama.cpp's order where the file says so. Sections of positions, which texts do not have, come thrice."""
    is_theirs = "mrope_sections" in fields or "rope.mrope_section" in fields
    several = fields.integer("ssm.time_step_rank", 1) != fields.integer("ssm.group_count", 1)
    if is_theirs and several and not fields.boolean("ssm.v_head_reordered", False):
        fields.fail("ssm.v_head_reordered", "true: this file has its value heads in an order that nobody else reads; pull it again")
    _drop(settings, "mrope_sections", "rope.mrope_section", "rope.mrope_interleaved", "ssm.v_head_reordered")
    if "norm_top_k_prob" in fields:
        settings.setdefault("expert_weights_norm", fields.boolean("norm_top_k_prob"))
        _drop(settings, "norm_top_k_prob")
    return {}


def _lfm2(fields: Fields, settings: Settings) -> Mapping[str, str]:
    return {"output_norm": "token_embd_norm"}


def _drop(settings: Settings, *keys: str) -> None:
    for key in keys:
        settings.pop(key, None)


_CHANGES: Mapping[str, Callable[[Fields, Settings], Mapping[str, str]]] = MappingProxyType(
    {
        **{"gemma3": _gemma3, "gptoss": _gpt_oss, "mistral3": _mistral3},
        **{"qwen35": _qwen35, "qwen35moe": _qwen35, "lfm2": _lfm2, "lfm2moe": _lfm2},
    }
)

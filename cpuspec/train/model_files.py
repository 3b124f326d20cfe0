"""A whole model in training: its numbers, and the files that it ends as, a Hugging Face directory or a GGUF file as it came."""

import json
import shutil
from dataclasses import MISSING, fields, replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.canonical import HF, file_names, joined
from cpuspec.checkpoints.checkpoint import HfTokenizerFiles
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.huggingface import config_to_write
from cpuspec.errors import ConfigError
from cpuspec.files import write_file
from cpuspec.formats import QuantTensor, get_format
from cpuspec.quantize.gguf_output import write_model

GGUF_NAME = "model.gguf"

# Fields of a model's configuration that `Rows` computes whatever they are. All others must be as they are in most models.
_COMPUTED = frozenset(
    {
        *("norm_eps", "rope_base", "rope_scaling", "qkv_bias", "o_bias", "qk_norm", "tied_embeddings", "norms", "norm_spans"),
        *("activation", "embedding_scale", "query_scale", "logit_softcap", "head", "layer_ropes", "local_rope_base"),
        *("residual_scale", "mlp_bias"),
    }
)

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
_MADE = ("config.json", "model.safetensors.index.json")
_FORMATS = {torch.float32: ("f32", 0), torch.float16: ("f16", 1), torch.bfloat16: ("bf16", 32)}  # and llama.cpp's file types


class ModelWeights:
    """The tensors of a model in f32 on a device, by canonical name; all are trained, the embedding too.

    mask_id: the token that stands for tokens to come, None for none. Raises ConfigError for a model that cannot be trained, and for
    a mask in a GGUF file, which has no field for it.
    """

    def __init__(self, model: Checkpoint, mask_id: int | None, device: torch.device) -> None:
        config = model.config if any(model.config.layer_windows) else replace(model.config, layer_windows=())
        others = [one for one in fields(config) if one.default is not MISSING and one.name not in _COMPUTED]
        if unknown := [one.name for one in others if getattr(config, one.name) != one.default]:
            raise ConfigError(f"{model.name} sets {', '.join(unknown)}, which are not trained here; take another model")
        if model.mask_id is None and mask_id is not None and not isinstance(model.vocabulary, HfTokenizerFiles):
            raise ConfigError(f"{model.path} is a GGUF file, which cannot name a mask; start from the model's directory")
        self.model, self.mask_id, self.device = model, mask_id, device
        self.trained: dict[str, Tensor] = {
            name: torch.from_numpy(tensor.dequantize()).to(device).requires_grad_() for name, tensor in model.tensors.items()
        }
        self.all = {**self.trained, "output": self.trained["embed" if model.config.tied_embeddings else "output"]}

    def save(self, directory: Path, dtype: torch.dtype) -> None:
        """Write the model: the directory, or a GGUF file in it, whose vectors are in f32. Raises OSError."""
        model = self.model
        directory.mkdir(parents=True, exist_ok=True)
        if isinstance(model.vocabulary, HfTokenizerFiles):
            self._save_directory(directory, dtype)
            return
        name, file_type = _FORMATS[dtype]
        tensors = {
            ours: QuantTensor.encode(get_format(name if values.dim() == 2 else "f32"), values.detach().cpu().numpy())
            for ours, values in self.trained.items()
        }
        write_model(directory / GGUF_NAME, model, tensors, file_type, {})

    def _save_directory(self, directory: Path, dtype: torch.dtype) -> None:
        model = self.model
        for path in {path for pattern in _COPIED for path in model.path.glob(pattern)}:
            if path.name not in _MADE:
                shutil.copyfile(path, directory / path.name)
        config = config_to_write(model)
        if self.mask_id is not None:
            config["pard_token"] = self.mask_id
        family, written, f32 = FAMILIES[model.config.architecture], {}, get_format("f32")
        tensors = {name: QuantTensor.encode(f32, values.detach().cpu().numpy()) for name, values in self.trained.items()}
        for theirs, ours in file_names(family, HF, tensors).items():
            offset = family.norm_offset if ours[0].endswith("norm") else 0.0
            whole = joined(model.config, family, HF, {name: tensors[name] for name in ours}).dequantize()
            written[theirs] = (torch.from_numpy(whole) - offset).to(dtype).contiguous()
        write_file(directory / "model.safetensors", save(written, {"format": "pt"}))
        write_file(directory / "config.json", json.dumps(config, indent=2) + "\n")

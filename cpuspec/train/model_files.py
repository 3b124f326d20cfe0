"""A whole model in training: its numbers, and the files that it ends as, a Hugging Face directory or a GGUF file as it came."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.checkpoint import HfTokenizerFiles
from cpuspec.checkpoints.huggingface import config_to_write
from cpuspec.errors import ConfigError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.quantize.gguf_output import write_model
from cpuspec.quantize.mixes import file_type
from cpuspec.train.layout import hf_tensors, write_directory
from cpuspec.train.rows import not_computed

GGUF_NAME = "model.gguf"

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "additional_chat_templates/*.jinja", "1_Pooling/config.json")
_MADE = ("config.json", "model.safetensors.index.json")


class ModelWeights:
    """The tensors of a model in f32 on a device, by canonical name; all are trained, the embedding too.

    formats: of the matrices of a GGUF file, which keeps them: a draft is as fast as its bytes are few. None for a directory.
    Raises ConfigError for a model that cannot be trained.
    """

    def __init__(self, model: Checkpoint, device: torch.device) -> None:
        if unknown := not_computed(model.config):
            raise ConfigError(f"{model.name} sets {', '.join(unknown)}, which are not trained here; take another model")
        self.model, self.device = model, device
        self.trained: dict[str, Tensor] = {
            name: torch.from_numpy(tensor.dequantize()).to(device).requires_grad_() for name, tensor in model.tensors.items()
        }
        is_file = not isinstance(model.vocabulary, HfTokenizerFiles)
        self.formats = {name: one.format for name, one in model.tensors.items() if is_file and len(one.shape) == 2}

    def served(self) -> dict[str, Tensor]:
        """The numbers that the engine will compute with, and the output matrix: matrices rounded to their formats.

        Gradients pass through rounding as if it were not there (arXiv 1308.3432). Without it, most of what training changes would
        be less than half of a format's step, and would be lost when the file is written.
        """
        served = dict(self.trained)
        for name, format in self.formats.items():
            values = self.trained[name]
            rounded = torch.from_numpy(QuantTensor.encode(format, values.detach().cpu().numpy()).dequantize()).to(self.device)
            served[name] = values + (rounded - values).detach()
        return {**served, "output": served["embed" if self.model.config.tied_embeddings else "output"]}

    def save(self, directory: Path, dtype: torch.dtype, sharpness: float = 1.0) -> None:
        """Write the model: the directory, in `dtype`, or a GGUF file in it, in its own formats; its logits times `sharpness`.

        Raises OSError.
        """
        model, trained = self.model, {**self.trained, "norm": sharpness * self.trained["norm"]}
        directory.mkdir(parents=True, exist_ok=True)
        if isinstance(model.vocabulary, HfTokenizerFiles):
            self._save_directory(directory, trained, dtype)
            return
        tensors = {
            name: QuantTensor.encode(self.formats.get(name, get_format("f32")), values.detach().cpu().numpy())
            for name, values in trained.items()
        }
        shapes = {name: one.shape for name, one in model.tensors.items()}
        write_model(directory / GGUF_NAME, model, tensors, file_type(self.formats, shapes), {})

    def _save_directory(self, directory: Path, trained: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        model = self.model
        for path in {path for pattern in _COPIED for path in model.path.glob(pattern)}:
            if (name := path.relative_to(model.path)).as_posix() not in _MADE:
                target = directory / name
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
        arrays = {name: values.detach().cpu().numpy() for name, values in trained.items()}
        write_directory(directory, config_to_write(model), hf_tensors(model.config, arrays), dtype)

"""A LoRA adapter in training beside a model that stays as it is; it ends as a directory of PEFT (arXiv 2106.09685)."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.adapters import CONFIG, MAX_RANK, WEIGHTS
from cpuspec.checkpoints.canonical import HF, file_names
from cpuspec.checkpoints.checkpoint import HfTokenizerFiles, is_linear
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.errors import ConfigError
from cpuspec.train.layout import hf_tensors, write_directory
from cpuspec.train.rows import not_computed


@dataclass(frozen=True)
class LoraShape:
    """alpha: the products are multiplied with alpha / rank; 0 for twice the rank. targets: modules by their last name, as q_proj;
    () for all matrices of the layers.

    Raises ConfigError for a rank that answers cannot use, and an alpha below 0.
    """

    rank: int
    alpha: float = 0.0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MAX_RANK or self.alpha < 0:
            raise ConfigError(f"an adapter has a rank of 1 to {MAX_RANK} and an alpha above 0, got {self.rank} and {self.alpha}")


class AdapterWeights:
    """The products of an adapter in f32 on a device, and the model that they are added to, whose numbers are not trained.

    A matrix that its family's files join of several has one `down`, as PEFT has it. `up` begins as zeros, `down` as PEFT's:
    uniform within 1 / sqrt(inputs). Raises ConfigError for a model that cannot be trained, and targets that it does not have.
    """

    def __init__(self, model: Checkpoint, shape: LoraShape, seed: int, device: torch.device) -> None:
        if unknown := not_computed(model.config):
            raise ConfigError(f"{model.name} sets {', '.join(unknown)}, which are not trained here; take another model")
        self.model, self.device, self._shape = model, device, shape
        matrices = [name for name, one in model.tensors.items() if name.startswith("layers.") and is_linear(name, one.shape)]
        found = file_names(FAMILIES[model.config.architecture], HF, matrices)
        modules = {_last(name) for name in found}
        if unknown := sorted(set(shape.targets) - modules):
            raise ConfigError(f"{model.name} has no module {unknown[0]}; wanted some of {', '.join(sorted(modules))}")
        self._targets = sorted(set(shape.targets) or modules)
        self._parts = {name: parts for name, parts in sorted(found.items()) if _last(name) in self._targets}
        self._scale = (shape.alpha or 2 * shape.rank) / shape.rank
        self._base = {name: torch.from_numpy(one.dequantize()).to(device) for name, one in model.tensors.items()}
        self.trained: dict[str, Tensor] = {}
        rng = torch.Generator().manual_seed(seed)
        for name, parts in self._parts.items():
            inputs = model.tensors[parts[0]].shape[1]
            self._add(name, (2 * torch.rand(shape.rank, inputs, generator=rng) - 1) / inputs**0.5)
            for part in parts:
                self._add(part, torch.zeros(model.tensors[part].shape[0], shape.rank))

    def _add(self, name: str, values: Tensor) -> None:
        self.trained[name] = values.to(self.device).requires_grad_()

    def served(self) -> dict[str, Tensor]:
        """The numbers that the engine will compute with, and the output matrix."""
        served = dict(self._base)
        for name, parts in self._parts.items():
            for part in parts:
                served[part] = torch.addmm(served[part], self.trained[part], self.trained[name], alpha=self._scale)
        return {**served, "output": served["embed" if self.model.config.tied_embeddings else "output"]}

    def save(self, directory: Path, dtype: torch.dtype, sharpness: float = 1.0) -> None:
        """Write what PEFT writes, `adapter_config.json` and `adapter_model.safetensors`; an adapter has no norm to make sharper.

        Raises OSError.
        """
        arrays = {name: values.detach().cpu().numpy() for name, values in self.trained.items()}
        up = hf_tensors(self.model.config, {part: arrays[part] for parts in self._parts.values() for part in parts})
        tensors: dict[str, Tensor] = {}
        for name in self._parts:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{module}.lora_A.weight": self.trained[name].detach().cpu(), f"{module}.lora_B.weight": up[name]}
        model = self.model
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(model.path) if isinstance(model.vocabulary, HfTokenizerFiles) else model.name,
            "r": self._shape.rank,
            "lora_alpha": self._scale * self._shape.rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": self._targets,
            "inference_mode": True,
        }
        write_directory(directory, config, tensors, dtype, (CONFIG, WEIGHTS))


def _last(name: str) -> str:
    """The module's name: of model.layers.0.mlp.up_proj.weight, up_proj."""
    return name.removesuffix(".weight").rpartition(".")[2]

"""The part of loading a checkpoint that all backends share: the tied output matrix, casts, weights that two models share in memory,
and the mean of a head's keys.

It knows names and tensor objects. The backend decides how it keeps a weight: packed for kernels, dequantized, as a torch tensor.

    tensors = weight_tensors(checkpoint, casts)
    weights = LoadedWeights(tensors, load, share._weights if share else None)
    weights["layers.0.q"], weights.num_bytes, weights.shared_bytes, weights.read_bytes(num_logits)
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from cpuspec.checkpoints import Checkpoint
from cpuspec.config import ModelConfig
from cpuspec.errors import BackendError
from cpuspec.formats import Cast, Format, QuantTensor, get_format
from cpuspec.layers import attention_layers
from cpuspec.model.batch import F32
from cpuspec.model.rope import mean_over_positions
from cpuspec.platform import SYSTEM

_log = logging.getLogger(__name__)

WeightTensor = QuantTensor | Cast


class Weight(Protocol):
    """A weight as a backend keeps it: a numpy or torch array, a PackedTensor."""

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        ...


W = TypeVar("W", bound=Weight)


def weight_tensors(
    checkpoint: Checkpoint, casts: Mapping[str, Format], cast: Callable[[QuantTensor, Format], Cast] = Cast
) -> dict[str, WeightTensor]:
    """The checkpoint's tensors by name, with an `output` matrix, routers in f32, their own norms divided by the root of the hidden
    size (Gemma 4), the last norm times `logit_scale`, and cast to another format where `casts` names one.

    A tied output is the very tensor object of `embed`. cast: makes a cast; a backend may have a faster way to the same bytes.
    """
    tensors, config, f32 = dict(checkpoint.tensors), checkpoint.config, get_format("f32")
    if config.tied_embeddings:
        tensors["output"] = tensors["embed"]
    if config.logit_scale != 1:  # the norm before the logits is the one thing that nothing else reads
        for name in ("norm", "norm_bias"):
            if name in tensors:
                tensors[name] = QuantTensor.encode(f32, tensors[name].dequantize() * np.float32(config.logit_scale))
    for name, tensor in tensors.items():
        # Rounded inputs or weights may change a router's choice of experts, so it is multiplied in f32.
        if name.endswith(".router") and tensor.format is not f32:
            tensors[name] = QuantTensor.encode(f32, tensor.dequantize())
        if name.endswith(".router_norm"):
            tensors[name] = QuantTensor.encode(f32, tensor.dequantize() * np.float32(config.hidden_size**-0.5))
    return {name: cast(tensor, casts[name]) if name in casts else tensor for name, tensor in tensors.items()}


def drop_embeddings(tensors: dict[str, WeightTensor]) -> None:
    """Leave embeddings out of the weights to load: they stay in the file, of which a forward reads a few rows."""
    for name in ("embed", "layer_embed"):
        tensors.pop(name, None)


def key_centres(config: ModelConfig, kv_format: Format, tensors: Mapping[str, WeightTensor]) -> dict[int, F32]:
    """The vectors that are subtracted from a layer's keys before they are cached, F32 [G, D] by the layer's index: the mean of the
    key bias over positions.

    Subtracting it shifts all scores of a query alike, which softmax does not see. A bias may be many times larger than the
    differences between keys (Qwen2.5: 354 in one dimension), and the largest number of a group determines the step of its codes;
    likewise in bf16, in which keys of prompts are multiplied. There is none for f32, where scores are soft-capped or have sinks,
    which a shift would change, and where a norm follows the bias.
    """
    if kv_format.name == "f32":
        return {}
    return {
        layer.index: mean_over_positions(layer.attention.rope, bias.dequantize().reshape(layer.attention.kv_heads, -1))
        for layer in attention_layers(config)
        if (bias := tensors.get(layer.weight("k_bias"))) is not None
        and not (layer.attention.softcap or layer.attention.norm or layer.attention.sinks)
    }


def check_room(num_bytes: int, from_disk: bool = False, why_not_on_disk: str = "") -> None:
    """Warn of weights that take more memory than is available, before they are loaded.

    from_disk: whether they are a mapped file, whose pages can stay on the disk. why_not_on_disk: why they are none, for the error.
    Raises BackendError if they do not fit the memory that this process may use, unless they are a mapped file.
    """
    memory = SYSTEM.memory()
    usable, available = memory.usable, memory.available
    if usable is None or num_bytes <= min(usable, usable if available is None else available):
        return
    if available is not None and num_bytes <= usable:
        there = f"{available / 1e9:.2f} GB are available"
    else:
        there = f"{'this group of processes may use' if memory.limit == usable else 'this machine has'} {usable / 1e9:.2f} GB"
    said = f"the weights take {num_bytes / 1e9:.2f} GB of memory, and {there}"
    remedy = "use a model of fewer bytes, or allow more memory; of a mixture of experts --memory leaves some on the disk"
    if why_not_on_disk:
        said += f"; they cannot be read from the disk: {why_not_on_disk}"
    if num_bytes > usable and not from_disk:
        raise BackendError(f"{said}; {remedy}")
    _log.warning(
        "%s: %s, which is slow; %s", said, "each token reads the rest from the disk" if from_disk else "some may be swapped", remedy
    )


class LoadedWeights(Mapping[str, W]):
    """Weights by tensor name, as a backend keeps them.

    load: makes the weights of tensors, by name. It is called once, with every tensor that `share` has not loaded.
    share: weights of the same kind, of a model that takes turns with this one. Weights of a tensor object that is loaded there are
    used here. Tensors are referenced weakly, so that a checkpoint can be freed while its weights stay.
    """

    def __init__(
        self,
        tensors: Mapping[str, WeightTensor],
        load: Callable[[Mapping[str, WeightTensor]], Mapping[str, W]],
        share: "LoadedWeights[W] | None" = None,
    ) -> None:
        loaded: Mapping[WeightTensor, W] = share._by_tensor if share else {}
        new = load({name: tensor for name, tensor in tensors.items() if tensor not in loaded})
        self._by_name = {name: new[name] if name in new else loaded[tensor] for name, tensor in tensors.items()}
        self._by_tensor: WeakKeyDictionary[WeightTensor, W] = WeakKeyDictionary()
        self._by_tensor.update({tensor: self._by_name[name] for name, tensor in tensors.items()})
        self.num_bytes = sum(weight.nbytes for weight in self._by_name.values())
        self.shared_bytes = self.num_bytes - sum(weight.nbytes for weight in new.values())
        of_experts = sum(self._by_name[name].nbytes for name in tensors if ".expert_" in name)
        self._dense_bytes = self.num_bytes - of_experts
        self._output_bytes = self._by_name["output"].nbytes if "output" in self._by_name else 0

    def read_bytes(self, num_logits: int, expert_bytes: int = 0) -> int:
        """Bytes of weights that a forward read. expert_bytes: those of experts. num_logits: 0 if the output matrix was not read."""
        return self._dense_bytes + expert_bytes - (0 if num_logits else self._output_bytes)

    def __getitem__(self, name: str) -> W:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

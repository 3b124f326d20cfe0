"""The weights that are quantized: a checkpoint's own, or the same model with factors moved from matrices to the norms and matrices
before them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.adapters import Adapter
from cpuspec.checkpoints.checkpoint import is_linear
from cpuspec.formats import QuantTensor, get_format
from cpuspec.formats.tensor import F32


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors of a checkpoint in f32.

    inputs: by matrix, the factors [K] that its columns are multiplied with. outputs: by matrix or vector, the divisors [N] of its
    rows. Together they leave what the model computes as it is. adapters: what is added to matrices before.
    """

    checkpoint: Checkpoint
    inputs: Mapping[str, F32] = field(default_factory=lambda: MappingProxyType({}))
    outputs: Mapping[str, F32] = field(default_factory=lambda: MappingProxyType({}))
    adapters: Sequence[Adapter] = ()

    @property
    def matrices(self) -> list[str]:
        """The names of all matrices, in the order of a forward: the embedding first, an output matrix of its own last.

        Those of a layer's experts are one, [E * N, K].
        """
        return [name for name, tensor in self.checkpoint.tensors.items() if is_linear(name, tensor.shape)]

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of all matrices."""
        return {name: (self.num_rows(name), self.checkpoint.tensors[name].shape[-1]) for name in self.matrices}

    def num_rows(self, name: str) -> int:
        """Rows of a matrix."""
        return math.prod(self.checkpoint.tensors[name].shape[:-1])

    def rows(self, name: str, first: int, last: int) -> F32:
        """Rows [first, last) of a matrix, F32 [last - first, K]."""
        tensor = self.checkpoint.tensors[name]
        size, matrices = tensor.shape[-2], tensor.matrices  # of each expert, or the one that there is
        parts = [
            matrices[i].rows_from(max(first - i * size, 0), min(last - i * size, size)).dequantize()
            for i in range(first // size, -(-last // size))
        ]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        for adapter in self.adapters:
            if name in adapter.pairs:
                down, up = adapter.pairs[name]
                values = values + up[first:last] @ down
        if name in self.inputs:
            values *= self.inputs[name]
        if name in self.outputs:
            values /= self.outputs[name][first:last, None]
        return values

    def matrix(self, name: str) -> F32:
        """A whole matrix, F32 [N, K]."""
        return self.rows(name, 0, self.num_rows(name))

    def vector(self, name: str) -> QuantTensor:
        """A norm or a bias, in f32."""
        values = self.checkpoint.tensors[name].dequantize()
        return QuantTensor.encode(get_format("f32"), values / self.outputs[name] if name in self.outputs else values)


def layer_parts(name: str) -> tuple[int, str]:
    """The layer and the part of a canonical name; (-1, name) outside of the layers."""
    if not name.startswith("layers."):
        return -1, name
    _, layer, part = name.split(".")
    return int(layer), part

"""Heads without layers: each token ahead has a stage, matrices of its own over one state, which at first is the target's.

A stage names matrices of the head's model, which a backend multiplies with (`HeadBackend.project`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.config import HeadConfig
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import QuantTensor
from cpuspec.formats.tensor import F32


@dataclass(frozen=True, eq=False)
class ResidualStage:
    """A head of Medusa (arXiv 2401.10774, section 2.1.1): blocks x := x + silu(B x + b), then logits = W x.

    Every stage reads the target's state, so none knows what the stages before it chose.
    """

    blocks: tuple[str, ...]
    output: str


@dataclass(frozen=True, eq=False)
class RecurrentStage:
    """A stage of an MLP speculator (arXiv 2404.19124): s := gelu(norm(P s + c E[token])), logits = W s.

    norm(x) = x / sqrt(mean(x^2) + eps) * norm_weight + norm_bias. embed: E [V, C]; embed_weight: c. token: the one before that
    which the stage drafts.
    """

    matrix: str
    embed: QuantTensor
    embed_weight: float
    norm_weight: F32
    norm_bias: F32
    eps: float
    output: str


Stage = ResidualStage | RecurrentStage


def output_name(stage: int) -> str:
    """The name of a stage's own output matrix: the first one's is that of the model."""
    return f"outputs.{stage}" if stage else "output"


def stages_model(
    path: Path,
    target: Checkpoint,
    hidden_size: int,
    num_logits: int,
    tensors: Mapping[str, QuantTensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> Checkpoint:
    """The matrices of stages as a model beside their target. tensors: these and `embed`; shapes: that these must have.

    hidden_size: of the rows that the matrix called `output` reads. Raises CheckpointError where a tensor is not as it should be.
    """
    try:
        head = HeadConfig("alone", input_norms=False, final_norm=False, num_logits=num_logits, tensors=tuple(shapes.items()))
        config = replace(
            target.config.with_layers([target.config.num_layers - 1]),
            hidden_size=hidden_size,
            tied_embeddings=False,
            logit_softcap=0.0,
            experts=None,
            layer_experts=(),
            shared_size=0,
            weighs_shared=False,
            gated=True,
            parallel=False,
            head=head,
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return Checkpoint(path, path.name, config, tensors, target.vocabulary)

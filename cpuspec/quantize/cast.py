"""Direct casts: a checkpoint's linear layers in fewer bits, for drafts of the model's own weights (ML-SpecQD, arXiv:2503.13565)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.checkpoint import is_linear
from cpuspec.errors import FormatError
from cpuspec.formats import FORMATS, Cast, Format, QuantTensor
from cpuspec.kernels.encode import recode
from cpuspec.quantize.mixes import choose
from cpuspec.quantize.weights import Weights

# A draft shares an output matrix of at most this many bits: one of 16 bits would be 40 % of the bytes that a 4-bit draft reads.
_OUTPUT_BITS = 8.5
_OUTPUT = FORMATS["mxfp4"]  # the least that a cast output matrix has, because it chooses the tokens


def cast(tensor: QuantTensor, format: Format) -> QuantTensor:
    """The tensor's values in another format. Raises FormatError as `Format.encode` does."""
    return Cast(tensor, format, recode).made()


def dequantized(checkpoint: Checkpoint, format: Format) -> Checkpoint:
    """The checkpoint with every matrix, embedding and head included, as its values in another format. Raises FormatError."""
    tensors = {name: cast(one, format) if is_linear(name, one.shape) else one for name, one in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


def casts(checkpoint: Checkpoint, format: Format) -> dict[str, Format]:
    """The format of each matrix that a draft in `format` has cast, by name.

    All linear layers become `format`. An output matrix of more than 8.5 bits becomes `format` or mxfp4, whichever has more bits.
    The draft shares everything else with its target: embedding, norms, biases, and an output matrix of fewer bits.

    Raises FormatError, naming the tensor, where the format does not fit.
    """
    found = {}
    for name, tensor in checkpoint.tensors.items():
        if is_linear(name, tensor.shape) and name not in ("embed", "layer_embed", "output"):
            with naming(name):
                format.row_bytes(tensor.shape[-1])
            found[name] = format
    output = checkpoint.tensors["embed" if checkpoint.config.tied_embeddings else "output"]
    wanted = max(format, _OUTPUT, key=lambda one: one.bits)
    if output.format.bits > max(_OUTPUT_BITS, wanted.bits):  # it fits: other matrices have as many inputs
        found["output"] = wanted
    return found


def quantized(checkpoint: Checkpoint, type_name: str) -> dict[str, Format]:
    """The formats of the matrices that a type of `cpuspec quantize` changes, by name; embeddings stay as they are.

    Raises ConfigError for a type that is not known, FormatError where it does not fit.
    """
    matrices, source = Weights(checkpoint).shapes, dict(checkpoint.tensors)
    if checkpoint.config.tied_embeddings:
        source["output"], matrices["output"] = source["embed"], matrices["embed"]
    chosen, kept = choose(checkpoint.config, matrices, type_name), ("embed", "layer_embed")
    return {name: format for name, format in chosen.items() if name not in kept and source[name].format is not format}


@contextmanager
def naming(tensor: str) -> Iterator[None]:
    """Name the tensor in a FormatError."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{tensor}: {error}") from error

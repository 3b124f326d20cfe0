"""Direct casts: a checkpoint's linear layers in fewer bits, for drafts of the model's own weights (ML-SpecQD, arXiv:2503.13565)."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.checkpoint import is_linear
from cpuspec.environment import usable_cores
from cpuspec.errors import FormatError
from cpuspec.formats import FORMATS, Cast, Format, QuantTensor
from cpuspec.kernels.encode import recode

OnProgress = Callable[[int, int], None]  # (weights cast, weights to cast)

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
        if is_linear(name, tensor.shape) and name not in ("embed", "output"):
            with naming(name):
                format.row_bytes(tensor.shape[-1])
            found[name] = format
    output = checkpoint.tensors["embed" if checkpoint.config.tied_embeddings else "output"]
    wanted = max(format, _OUTPUT, key=lambda one: one.bits)
    if output.format.bits > max(_OUTPUT_BITS, wanted.bits):  # it fits: other matrices have as many inputs
        found["output"] = wanted
    return found


def cast_checkpoint(
    checkpoint: Checkpoint, format: Format, threads: int | None = None, on_progress: OnProgress = lambda done, total: None
) -> Checkpoint:
    """The checkpoint with `casts` made; every other tensor is the very same object.

    threads: None uses all cores. Raises FormatError, naming the tensor, where the format cannot hold it.
    """
    wanted = casts(checkpoint, format)
    tensors = dict(checkpoint.tensors)
    tied = checkpoint.config.tied_embeddings and "output" not in wanted
    if not tied:
        tensors.setdefault("output", tensors["embed"])
    done, total = 0, sum(tensors[name].num_values for name in wanted)
    with ThreadPoolExecutor(threads or usable_cores()) as pool:
        jobs = {name: pool.submit(cast, tensors[name], to) for name, to in wanted.items()}
        for name, job in jobs.items():
            with naming(name):
                tensors[name] = job.result()
            done += tensors[name].num_values
            on_progress(done, total)
    return replace(checkpoint, config=replace(checkpoint.config, tied_embeddings=tied), tensors=tensors)


@contextmanager
def naming(tensor: str) -> Iterator[None]:
    """Name the tensor in a FormatError."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{tensor}: {error}") from error

"""Drafts made of the target's own weights: the same model in fewer bits, or with fewer layers.

Self-casts: ML-SpecQD, arXiv:2503.13565. Layer skipping: Draft & Verify, arXiv:2309.08168; LayerSkip, arXiv:2404.16710.
Whatever a draft has in common with its target is there once: threads, embedding, output matrix, norms, and all layers kept.
"""

from collections.abc import Sequence
from dataclasses import replace

from cpuspec.backends import Backend, make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.recipes import recipe_of
from cpuspec.config import EngineConfig
from cpuspec.errors import ConfigError
from cpuspec.formats import get_format
from cpuspec.quantize.cast import casts


def make_self_draft(
    target: Backend, checkpoint: Checkpoint, format_name: str, engine: EngineConfig, backend: str | None = None
) -> Backend:
    """The target's model with its linear layers cast to a format, beside a target that was made from `checkpoint`.

    backend: the draft's, None for the target's; another one shares nothing with it.

    Casting takes seconds, at the first start: packed weights are kept on the disk. Raises FormatError for an unknown format, or
    one that does not fit the model.
    """
    return make_backend(backend or target.name, checkpoint, engine, target, casts(checkpoint, get_format(format_name)))


def make_skip_draft(
    target: Backend, checkpoint: Checkpoint, skipped: str, engine: EngineConfig, backend: str | None = None
) -> Backend:
    """The target's model without some layers, beside a target that was made from `checkpoint`: a cache and no weights of its own.

    skipped: as `read_skipped` takes it. backend: as `make_self_draft` takes it. Raises ConfigError.
    """
    draft = skip_layers(checkpoint, read_skipped(skipped, checkpoint))
    return make_backend(backend or target.name, draft, engine, target)


def read_skipped(text: str, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The layers that `text` leaves out: how many ("4"), or which ("3/7/11"), counted from 0. So many layers are those that the
    model's recipe names, or else chosen evenly.

    Raises ConfigError for anything else, and unless at least one layer remains.
    """
    num_layers = checkpoint.config.num_layers
    numbers = [int(part) if part.isascii() and part.isdigit() and len(part) < 6 else -1 for part in text.split("/")]
    if len(numbers) == 1 and 0 < numbers[0] < num_layers:
        recipe = recipe_of(checkpoint.path)
        named = recipe.layer_skip.get(numbers[0]) if recipe else None
        return _checked(named, num_layers) if named else spread(numbers[0], num_layers)
    if len(numbers) > 1:
        return _checked(numbers, num_layers)
    raise ConfigError(
        f"cannot skip {text!r} of {num_layers} layers; wanted how many, as in skip:4, or which, counted from 0, as in skip:3/7/11"
    )


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of the layers, evenly, away from both ends: the first and the last layers are missed most."""
    return tuple((i + 1) * num_layers // (count + 1) for i in range(count))


def skip_layers(checkpoint: Checkpoint, skipped: Sequence[int]) -> Checkpoint:
    """The checkpoint without some layers; every other tensor is the very same object. Raises ConfigError."""
    num_layers = checkpoint.config.num_layers
    left_out = _checked(skipped, num_layers)
    kept = [i for i in range(num_layers) if i not in left_out]
    tensors = {name: t for name, t in checkpoint.tensors.items() if not name.startswith("layers.")}
    for new, old in enumerate(kept):
        prefix = f"layers.{old}."
        tensors |= {f"layers.{new}.{name[len(prefix) :]}": t for name, t in checkpoint.tensors.items() if name.startswith(prefix)}
    return replace(checkpoint, config=replace(checkpoint.config, num_layers=len(kept)), tensors=tensors)


def _checked(skipped: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """In order. Raises ConfigError unless these are different layers and one remains."""
    if len(set(skipped)) < len(skipped) or not all(0 <= i < num_layers for i in skipped) or len(skipped) >= num_layers:
        raise ConfigError(
            f"cannot skip layers {'/'.join(map(str, skipped))} of {num_layers}; "
            f"wanted different numbers from 0 to {num_layers - 1}, and not all of them"
        )
    return tuple(sorted(skipped))

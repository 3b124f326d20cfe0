"""A draft model made of some of the target's layers (Draft & Verify, arXiv:2309.08168; LayerSkip, arXiv:2404.16710).

The draft has the target's own tensor objects, so a backend that loads it beside the target loads no weights twice.
"""

from collections.abc import Sequence
from dataclasses import replace

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.recipes import recipe_of
from cpuspec.errors import ConfigError


def read_skipped(text: str, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The layers to skip: `text` says how many ("4"), or which ("3/7/11"), counted from 0.

    "4" stands for the four layers that the model's recipe lists as least important, or for four spread evenly.
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
    """`count` layers, spread evenly between the first and the last ones, which a model needs most."""
    return tuple((i + 1) * num_layers // (count + 1) for i in range(count))


def skip_layers(checkpoint: Checkpoint, skipped: Sequence[int]) -> Checkpoint:
    """The checkpoint without some layers. Every other tensor stays the same object. Raises ConfigError."""
    num_layers = checkpoint.config.num_layers
    left_out = _checked(skipped, num_layers)
    if checkpoint.config.layer_input_size:
        raise ConfigError(
            "no layer can be skipped in a model whose layers have inputs of their own, as Gemma 4 E; name another draft"
        )
    kept = [i for i in range(num_layers) if i not in left_out]
    tensors = {name: t for name, t in checkpoint.tensors.items() if not name.startswith("layers.")}
    for new, old in enumerate(kept):
        prefix = f"layers.{old}."
        tensors |= {f"layers.{new}.{name[len(prefix) :]}": t for name, t in checkpoint.tensors.items() if name.startswith(prefix)}
    return replace(checkpoint, config=checkpoint.config.with_layers(kept), tensors=tensors)


def _checked(skipped: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers in order. Raises ConfigError unless they differ from each other and one layer remains."""
    if len(set(skipped)) < len(skipped) or not all(0 <= i < num_layers for i in skipped) or len(skipped) >= num_layers:
        raise ConfigError(
            f"cannot skip layers {'/'.join(map(str, skipped))} of {num_layers}; "
            f"wanted different numbers from 0 to {num_layers - 1}, and not all of them"
        )
    return tuple(sorted(skipped))

"""Which layers a layer-skip draft can best do without: a beam search by agreement with the model on texts.

    python tools/search_layer_skip.py qwen2.5-coder-1.5b-instruct CODE.txt PROSE.txt --skip 4

Prints a `[layer_skip]` table for the model's recipe, from which `skip:4` takes its layers. Only the layers that change their input
least are tried (arXiv:2403.03853), for their cosine with it is known after one forward. Every set of n layers costs a draft
the same, so agreement alone decides: how often draft and model, shown the same text, find the same token most likely.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from cpuspec.backends import Backend, make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.engine.own_weights import skip_layers
from cpuspec.evaluate.quality import logits_of
from cpuspec.model.batch import I32, ForwardBatch
from cpuspec.settings import EngineConfig
from cpuspec.text import make_tokenizer

Layers = tuple[int, ...]


def top_tokens(backend: Backend, tokens: Sequence[int]) -> I32:
    """The most likely token after each of `tokens`, which are fed to an empty cache: a greedy draft would propose it there."""
    return np.concatenate([logits.argmax(axis=1) for logits in logits_of(backend, tokens, backend.max_rows)])


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    texts: Annotated[list[Path], typer.Argument(help="Texts of the kinds that the model is to write.", exists=True)],
    skip: Annotated[int, typer.Option(help="Layers to skip; fewer are found on the way.", min=1)] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of each text to compare on.", min=2)] = 256,
    candidates: Annotated[int, typer.Option(help="How many layers to choose from.", min=1)] = 10,
    beam: Annotated[int, typer.Option(help="Sets to go on with.", min=1)] = 2,
) -> None:
    """Print the best sets of layers, and what they agree on."""
    checkpoint = open_checkpoint(resolve_model(model))
    if skip >= checkpoint.config.num_layers:
        raise typer.BadParameter(f"--skip {skip}: the model has {checkpoint.config.num_layers} layers, and one must remain")
    tokenizer = make_tokenizer(checkpoint)
    ids = [tokenizer.encode(text.read_text(encoding="utf-8")[: tokens * 32])[:tokens] for text in texts]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("searching", total=None)
        found = search(checkpoint, ids, skip, candidates, beam, lambda tried: progress.update(task, completed=tried))
    print("[layer_skip]")
    for layers, agreement in found:
        print(f"{len(layers)} = {list(layers)}  # agrees on {agreement:.3f}")


def search(
    checkpoint: Checkpoint, texts: list[list[int]], count: int, candidates: int, beam: int, on_progress: Callable[[int], None]
) -> list[tuple[Layers, float]]:
    """For 1 to `count` layers the best set found, and the share of tokens on which the model without them agrees with it."""
    engine = EngineConfig(max_sequences=1)
    target = make_backend("numba", checkpoint, engine)
    try:
        wanted = [top_tokens(target, tokens) for tokens in texts]
        choice = least_influential(target, texts)[: max(candidates, count)]
        tried: dict[Layers, float] = {(): 1.0}

        def agreement(layers: Layers) -> float:
            if layers not in tried:
                draft = make_backend("numba", skip_layers(checkpoint, layers), engine, target)
                same = [top_tokens(draft, tokens) == best for tokens, best in zip(texts, wanted, strict=True)]
                tried[layers] = float(np.concatenate(same).mean())
                on_progress(len(tried) - 1)
            return tried[layers]

        best: list[Layers] = [()]
        found = []
        for _ in range(count):
            longer = {tuple(sorted((*layers, layer))) for layers in best for layer in choice if layer not in layers}
            best = sorted(sorted(longer), key=agreement, reverse=True)[:beam]
            found.append((best[0], tried[best[0]]))
        return found
    finally:
        target.close()


def least_influential(backend: Backend, texts: list[list[int]]) -> Layers:
    """All layers but the first, by the mean cosine of a layer's output with its input, the highest first."""
    likeness = np.sum([_likeness(backend, tokens[: backend.max_rows]) for tokens in texts], axis=0)
    return tuple(int(i) + 1 for i in np.argsort(likeness)[::-1])


def _likeness(backend: Backend, tokens: list[int]) -> list[float]:
    """Of each layer but the first, summed over the tokens."""
    layers = tuple(range(backend.config.num_layers))
    positions, slots = np.arange(len(tokens), dtype=np.int32), np.zeros(1, np.int32)
    starts, no_logits = np.array([0, len(tokens)], np.int32), np.zeros(0, np.int32)
    batch = ForwardBatch(np.array(tokens, np.int32), positions, slots, starts, logit_rows=no_logits, hidden_layers=layers)
    hidden = backend.forward(batch, backend.new_cache(1, len(tokens))).hidden
    units = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in hidden]
    return [float((before * after).sum()) for before, after in pairwise(units)]


if __name__ == "__main__":
    typer.run(main)

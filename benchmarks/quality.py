"""What int8 activations and rounded keys and values cost: a backend against numpy on the dequantized weights, over a text.

    python benchmarks/quality.py smollm2-135m-instruct TEXT_FILE --tokens 512 --json benchmarks/results/quality-smollm2.json

The reference holds every weight as f32: the 1.5B model takes 7 GB.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from record import Rounds, record, save
from rich.console import Console
from rich.progress import Progress

from cpuspec.backends import make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.evaluate.quality import compare_backends
from cpuspec.settings import EngineConfig
from cpuspec.text import make_tokenizer


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    text: Annotated[Path, typer.Argument(help="A text, such as WikiText-2's test split.", exists=True)],
    tokens: Annotated[int, typer.Option(help="Tokens from the start of the text.", min=2)] = 512,
    backend: Annotated[str, typer.Option(help="What is compared with the numpy reference.")] = "numba",
    kv_format: Annotated[str, typer.Option(help="Of its keys and values; the reference has f32.")] = EngineConfig.kv_format,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print perplexity ratio, KL divergence and same-top share."""
    checkpoint = open_checkpoint(resolve_model(model))
    ids = make_tokenizer(checkpoint).encode(text.read_text(encoding="utf-8")[: tokens * 32])[:tokens]
    own = make_backend(backend, checkpoint, EngineConfig(kv_format=kv_format))
    reference = make_backend("numpy", checkpoint, EngineConfig(kv_format="f32"))
    rounds = Rounds(1, own.threads)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("comparing", total=len(ids))
        for _ in rounds:
            quality = compare_backends(reference, own, ids, lambda rows: progress.update(task, completed=rows))
    own.close()
    figures = {"text": text.name, "backend": backend, "kv_format": kv_format, **asdict(quality)}
    print(json.dumps(figures, indent=2))
    save(record("quality", checkpoint.path.name, rounds) | figures, json_file)


if __name__ == "__main__":
    typer.run(main)

"""How trainings of draft heads went: tokens, time and acceptance by position on held-back answers, for the report to draw.

    python benchmarks/training.py smollm2-135m-instruct my-head my-second-head --json benchmarks/results/training-NAME.json

Each HEAD is a directory of `cpuspec train block`, `eagle3` or `distill`, whose `training/log.jsonl` is read. Nothing is timed here:
what the log says is of the machine that trained.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from record import Rounds, save, say

from cpuspec.errors import CheckpointError, CpuspecError
from cpuspec.train.loop import read_log


def main(
    model: Annotated[str, typer.Argument(help="The recipe or file name of the model that the heads draft for.")],
    heads: Annotated[list[Path], typer.Argument(help="Directories of trained heads.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print a line for each head."""
    passed = Rounds(0, 1)
    try:
        trainings = {head.resolve().name: figures(head) for head in heads}
    except CpuspecError as error:
        say(f"error: {error}")
        raise typer.Exit(1) from None
    for name, one in trainings.items():
        print(f"{name}: {one['log'][-1]['accepted']} after {one['tokens']} tokens, {one['minutes']} minutes", flush=True)
    save({"benchmark": "training", "model": model, **passed.head, "trainings": trainings}, json_file)


def figures(head: Path) -> dict[str, Any]:
    """A head's measurements, and what it was trained on altogether: tokens, repeated ones counted again, and minutes."""
    log = read_log(head)
    if not log:
        raise CheckpointError(f"{head} was broken off before it was measured; run its `cpuspec train` again")
    last = log[-1]
    return {
        "tokens": last.tokens,
        "epochs": last.epoch,
        "minutes": round(last.seconds / 60, 1),
        "log": [one._asdict() for one in log],
    }


if __name__ == "__main__":
    typer.run(main)

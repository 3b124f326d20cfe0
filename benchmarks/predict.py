"""What the planner's cost model promises of drafts by models, for acceptances that nobody has measured yet.

    python benchmarks/predict.py TARGET.gguf DRAFT.gguf [CHEAPER_DRAFT.gguf ...] --acceptance 0.6 --acceptance 0.75

What depends on the machine is measured: the seconds of a forward by its rows, of every model. What depends on the texts is given:
how often a drafted token is accepted, at every level alike. So weights may be random ones of the right shape. Lengths and speed-ups
over plain decoding are the best of the closed form in `cpuspec/speculation/planner/choose.py`, level by level from the cheapest.
"""

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from record import Rounds, record, save

from cpuspec.backends import make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.environment import usable_cores
from cpuspec.errors import CpuspecError
from cpuspec.settings import EngineConfig
from cpuspec.speculation.planner.costs import Costs, measure_costs
from cpuspec.speculation.planner.known import MAX_TOKENS, Promise, best_length

ACCEPTANCES = [0.6, 0.7, 0.75, 0.8, 0.9]


class Timed(NamedTuple):
    """A model and the seconds of its forwards."""

    name: str
    costs: Costs


def main(
    target: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    drafts: Annotated[list[str], typer.Argument(help="Draft models; each drafts for the one before it, the first for the target.")],
    acceptance: Annotated[list[float] | None, typer.Option(help="Of a drafted token, between 0 and 1. Repeatable.")] = None,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print the costs of the models, and for each acceptance what drafts with one, two, ... of them promise."""
    wanted = acceptance or ACCEPTANCES
    if not all(0 < one < 1 for one in wanted):
        raise typer.BadParameter(f"acceptances lie between 0 and 1, got {', '.join(map(str, wanted))}")
    threads, models = threads or usable_cores(), []
    rounds = Rounds(1 + len(drafts), threads)
    for number in rounds:
        models.append(_timed([target, *drafts][number], threads))
    predictions = [
        {"acceptance": one, "levels": count} | _predicted(models[: count + 1], one)
        for one in wanted
        for count in range(1, len(models))
    ]
    for name, costs in models:
        by_rows = ", ".join(f"{n}: {costs.forward_s(n) / costs.forward_s(1):.2f}" for n in costs.measured_rows)
        print(f"{name}: {1e3 * costs.forward_s(1):.1f} ms; by rows {by_rows}")
    print("\n| acceptance | drafts | lengths | tokens a round | over plain |\n|---|---|---|---|---|")
    for one in predictions:
        lengths = ", ".join(map(str, one["lengths"]))
        print(f"| {one['acceptance']} | {one['levels']} | {lengths} | {one['tokens']:.2f} | {one['over_plain']:.2f}x |")
    measured = [
        {"model": name, "rows": costs.measured_rows, "seconds": costs.seconds[: len(costs.measured_rows)]} for name, costs in models
    ]
    save(record("predict", models[0].name, rounds) | {"costs": measured, "predictions": predictions}, json_file)


def _timed(name: str, threads: int) -> Timed:
    try:
        checkpoint = open_checkpoint(resolve_model(name))
        with closing(make_backend("numba", checkpoint, EngineConfig(threads=threads))) as backend:
            return Timed(checkpoint.path.name, measure_costs(backend))
    except CpuspecError as error:
        raise typer.BadParameter(str(error)) from None


def _predicted(models: list[Timed], acceptance: float) -> dict[str, Any]:
    """Target first."""
    choices = best_chain([model.costs for model in models], acceptance)
    best, plain_s = choices[0], models[0].costs.forward_s(1)
    return {"lengths": [one.num_tokens for one in choices], "tokens": best.tokens, "over_plain": best.tokens_per_s * plain_s}


def best_chain(costs: list[Costs], rate: float) -> list[Promise]:
    """The best lengths of a target's drafts, of their drafts, and so on, all accepted at one rate. costs: the target's first."""
    options: list[Promise] = []
    seconds_per_token = costs[-1].forward_s(1)
    for verifier in reversed(costs[:-1]):
        options.insert(0, best_length(verifier, rate, seconds_per_token, MAX_TOKENS))
        seconds_per_token = 1 / options[0].tokens_per_s
    return options


if __name__ == "__main__":
    typer.run(main)

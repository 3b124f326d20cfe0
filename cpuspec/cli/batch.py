"""The command `batch`: it answers a file of requests on this machine or on a cluster, and prints a summary."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cpuspec.batch.run import run_batch
from cpuspec.checkpoints.recipes import DEFAULT_RECIPE
from cpuspec.cli import INTERRUPTED, options
from cpuspec.cli.console import accepted, counted, emit_json, exit_codes, note
from cpuspec.cli.opening import open_with_drafts, sampling_defaults
from cpuspec.cli.options import argument, flag, option
from cpuspec.cli.progress import busy, step_progress
from cpuspec.environment import usable_cores
from cpuspec.errors import needing


@exit_codes()
@options.takes_running(*options.ANSWERING)
@options.takes_sampling(without=("logprobs",))
def batch(
    *,
    model: options.ModelArgument = DEFAULT_RECIPE,
    source: Annotated[
        Path,
        argument("IN.jsonl", "Requests, one a line: OpenAI's batch format, or objects with prompt or messages.", dir_okay=False),
    ],
    out: Annotated[Path, argument("OUT.jsonl", "Answers in the same order; an existing file is continued.", dir_okay=False)],
    draft: options.DraftOption = None,
    over_ray: Annotated[bool, flag("--ray", "Answer with workers on the machines of a Ray cluster (extra cpuspec[ray]).")] = False,
    address: Annotated[
        str | None,
        option(
            "ADDRESS", "The cluster of --ray, as auto or HOST:6379; by default RAY_ADDRESS, else a cluster of this machine alone."
        ),
    ] = None,
    workers: Annotated[
        int | None, option("N", "Of --ray, with --threads each; by default as many as the cluster has room for.", min=1)
    ] = None,
    as_json: options.JsonOption = False,
    sampling: dict[str, Any],
    running: options.Running,
) -> None:
    """Answer a file of prompts, many at once. An interrupted run continues where it ended.

    What a line asks for goes before the options. A line that cannot be answered gets its error as the answer, and the others go on.
    """
    if not source.is_file():
        raise typer.BadParameter(f"{source} is not a file; give one with a request in each line")
    if not over_ray and (address or workers):
        raise typer.BadParameter("--address and --workers go with --ray")
    with step_progress() as show:
        on_progress = partial(show, "batch")
        if over_ray:
            with needing("`cpuspec batch --ray`", "'cpuspec[ray]'"):
                from cpuspec.ray.workers import Work, answer_on_cluster, cluster, most_workers
            name = str(Path(model).resolve()) if Path(model).exists() else model
            settings = replace(running.settings, threads=running.settings.threads or usable_cores())
            work = Work(name, draft, running.backend, settings, sampling)
            with cluster(address):
                number = workers or most_workers(work.num_cpus)
                note(f"{counted(number, 'worker')} with {counted(work.num_cpus, 'processor')} each")
                summary = run_batch(source, out, partial(answer_on_cluster, work=work, num_workers=number), on_progress)
        else:
            from cpuspec.batch.answer import answer_lines
            from cpuspec.engine.llm import LLM

            checkpoint, spec = open_with_drafts(model, draft, running.settings.mmap, adapts=True)
            with busy(f"loading {model}"):
                llm = LLM(checkpoint, spec, running.backend, settings=running.settings)
            with llm:
                sampling_defaults(llm)
                summary = run_batch(source, out, lambda lines: answer_lines(llm, lines, sampling), on_progress)
    if as_json:
        emit_json(summary.as_dict())
    parts = [
        *([f"{counted(summary.num_kept, 'line')} answered before"] if summary.num_kept else []),
        f"{counted(summary.num_answered, 'line')} answered in {summary.duration_s:.1f} s",
        *([f"{summary.num_errors} of them with an error"] if summary.num_errors else []),
        f"{counted(summary.num_new_tokens, 'token')}, {summary.as_dict()['tokens_per_s']:.1f} tokens/s",
        *([accepted(summary.num_accepted_tokens, summary.num_draft_tokens)] if summary.num_draft_tokens else []),
        *(["interrupted: the same command continues from here"] if summary.interrupted else []),
    ]
    note("; ".join(parts))
    if summary.interrupted:
        raise typer.Exit(INTERRUPTED)

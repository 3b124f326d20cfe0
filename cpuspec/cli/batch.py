"""What `cpuspec batch` tells of a run, and a run over a cluster."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cpuspec.batch.run import Summary, run_batch
from cpuspec.cli.console import accepted, counted, note
from cpuspec.cli.options import Running
from cpuspec.environment import usable_cores
from cpuspec.errors import BackendError


def describe_batch(summary: Summary) -> str:
    """A summary in a line."""
    parts = [
        *([f"{counted(summary.num_kept, 'line')} answered before"] if summary.num_kept else []),
        f"{counted(summary.num_answered, 'line')} answered in {summary.duration_s:.1f} s",
        *([f"{summary.num_errors} of them with an error"] if summary.num_errors else []),
        f"{counted(summary.num_new_tokens, 'token')}, {summary.as_dict()['tokens_per_s']:.1f} tokens/s",
        *([accepted(summary.num_accepted_tokens, summary.num_draft_tokens)] if summary.num_draft_tokens else []),
        *(["interrupted: the same command goes on from here"] if summary.interrupted else []),
    ]
    return "; ".join(parts)


def run_on_cluster(
    source: Path,
    out: Path,
    model: str,
    draft: str | None,
    running: Running,
    sampling: Mapping[str, Any],
    address: str | None,
    num_workers: int | None,
    on_progress: Callable[[int, int], None],
) -> Summary:
    """Answer a file with workers on a Ray cluster. Raises BackendError without Ray, and what `run_batch` raises."""
    try:
        from cpuspec.ray.workers import Work, answer_on_cluster, cluster, most_workers
    except ModuleNotFoundError as error:
        raise BackendError(f"`cpuspec batch --ray` needs {error.name}; install it with: pip install 'cpuspec[ray]'") from None
    name = str(Path(model).resolve()) if Path(model).exists() else model
    settings = replace(running.settings, threads=running.settings.threads or usable_cores())
    work = Work(name, draft, running.backend, settings, sampling)
    with cluster(address):
        number = num_workers or most_workers(work.num_cpus)
        note(f"{counted(number, 'worker')} with {counted(work.num_cpus, 'processor')} each")
        return run_batch(source, out, partial(answer_on_cluster, work=work, num_workers=number), on_progress)

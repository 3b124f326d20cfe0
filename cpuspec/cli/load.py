"""The command `bench-serve`: its options as a load, and the figures of one in the names of `vllm bench serve`."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cpuspec.cli.console import StepProgress, accepted, counted, emit, note, print_facts, print_table
from cpuspec.environment import api_key
from cpuspec.errors import BackendError
from cpuspec.load.figures import Answer, summarize
from cpuspec.metrics import epoch_s

try:
    from cpuspec.load.address import local_address
    from cpuspec.load.client import Client
    from cpuspec.load.requests import CHAT, COMPLETIONS, LoadRequest, random_requests, read_requests
    from cpuspec.load.run import INTERRUPTED as STOPPED_BY_USER
    from cpuspec.load.run import LoadPlan, LoadResult, first_model, run_load, warm_up
except ModuleNotFoundError as error:
    raise BackendError(f"`cpuspec bench-serve` needs {error.name}; install it with: pip install 'cpuspec[server]'") from None

_TITLES: Mapping[str, str] = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between pieces",
    "e2el": "whole answer",
}


@dataclass(frozen=True)
class Wanted:
    """The requests to send, and the figures to compute of their answers. dataset: None for random words."""

    num_prompts: int
    dataset: Path | None
    num_random_tokens: int
    num_prefix_tokens: int
    num_warmups: int
    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    goodput: Mapping[str, float]

    @property
    def num_requests(self) -> int:
        """Those to measure, and then those to warm up with."""
        return self.num_prompts + self.num_warmups


def measure_load(url: str, plan: LoadPlan, wanted: Wanted) -> tuple[dict[str, Any], LoadResult]:
    """Run a load against a server of this machine; returns the report and the answers. plan.model: "" for the server's first.

    Raises ConfigError for other machines and for requests that cannot be sent, CpuspecError where the server does not answer.
    """
    client = Client(local_address(url), api_key())
    requests = read_requests(wanted.dataset, wanted.num_requests) if wanted.dataset else []
    plan, requests, result = asyncio.run(_run(client, requests, plan, wanted))
    report = {
        "date": datetime.fromtimestamp(epoch_s()).strftime("%Y%m%d-%H%M%S"),
        "backend": plan.backend or "+".join(dict.fromkeys(one.protocol(None) for one in requests)),
        "base_url": url,
        "model_id": plan.model,
        "num_prompts": len(requests),
        "request_rate": "inf" if math.isinf(plan.request_rate) else plan.request_rate,
        "burstiness": plan.burstiness,
        "max_concurrency": plan.max_concurrency,
        "seed": plan.seed,
        "goodput": dict(wanted.goodput),
        "stopped": result.stopped,
        **summarize(result.answers, result.duration_s, wanted.metrics, wanted.percentiles, wanted.goodput),
    }
    return report, result


async def _run(
    client: Client, requests: list[LoadRequest], plan: LoadPlan, wanted: Wanted
) -> tuple[LoadPlan, list[LoadRequest], LoadResult]:
    plan = replace(plan, model=plan.model or await first_model(client))
    if wanted.dataset is None:
        lengths = wanted.num_random_tokens, wanted.num_prefix_tokens
        requests = await random_requests(client, wanted.num_requests, *lengths, plan.seed, plan.backend)
    requests, others = requests[: wanted.num_prompts], requests[wanted.num_prompts :]
    await warm_up(client, others, plan)  # so that no measured prompt is in the server's cache already
    with StepProgress(tenths=True) as progress:
        return plan, requests, await run_load(client, requests, plan, lambda done, total: progress("requests", done, total))


def details(answers: Sequence[Answer]) -> dict[str, Any]:
    """Every answer's own figures, in seconds, in the names of `vllm bench serve`."""
    return {
        "input_lens": [one.num_prompt_tokens for one in answers],
        "output_lens": [one.num_new_tokens for one in answers],
        "start_times": [one.start_s for one in answers],
        "ttfts": [one.ttft_s for one in answers],
        "itls": [one.itl_s for one in answers],
        "e2els": [one.e2el_s for one in answers],
        "generated_texts": [one.text for one in answers],
        "errors": [one.error for one in answers],
    }


def result_path(report: Mapping[str, Any], directory: Path, name: str | None) -> Path:
    """Where a result is saved: under this name, or under one of what was run."""
    at_once = f"-concurrency{report['max_concurrency']}" if report["max_concurrency"] else ""
    model = report["model_id"].replace("/", "-").replace("\0", "")[:100]
    return directory / (name or f"{report['backend']}-{report['request_rate']}qps{at_once}-{model}-{report['date']}.json")


def note_errors(answers: Sequence[Answer]) -> None:
    """Tell on stderr which errors came, and how often."""
    errors = [answer.error for answer in answers if answer.error]
    for error in list(dict.fromkeys(errors))[:5]:
        note(f"{counted(errors.count(error), 'request')} failed: {error}")


def show_load(report: Mapping[str, Any]) -> None:
    """Print a report as tables."""
    drafted, taken, cached = (report[f"total_{name}"] for name in ("draft_tokens", "accepted_draft_tokens", "cached_tokens"))
    good = report["request_goodput"]
    facts = [
        ("requests", f"{report['completed']} answered, {report['failed']} failed, {report['max_concurrent_requests']} at once"),
        ("duration", f"{report['duration']:.2f} s{', ' + report['stopped'] if report['stopped'] else ''}"),
        ("tokens", f"{report['total_input_tokens']} of prompts, {report['total_output_tokens']} of answers"),
        *([("cached", f"{cached} tokens of prompts")] if cached is not None else []),
        *([("drafts", accepted(taken, drafted))] if drafted is not None and taken is not None else []),
        ("throughput", f"{report['request_throughput']:.3g} requests/s, {report['output_throughput']:.1f} tokens/s of answers"),
        ("with prompts", f"{report['total_token_throughput']:.1f} tokens/s"),
        *([("goodput", f"{good:.3g} requests/s within {_targets(report['goodput'])}")] if good is not None else []),
    ]
    print_facts(facts)
    names = [name for name in _TITLES if f"mean_{name}_ms" in report]
    if names:
        emit("\n")
        columns = [key.removesuffix(f"_{names[0]}_ms") for key in report if key.endswith(f"_{names[0]}_ms")]
        rows = [(_TITLES[name], *(_milliseconds(report[f"{column}_{name}_ms"]) for column in columns)) for name in names]
        print_table(("milliseconds", *(f"{column}>" for column in columns)), rows)


def _targets(goodput: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {most:g} ms" for name, most in goodput.items())


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


__all__ = [
    "CHAT",
    "COMPLETIONS",
    "STOPPED_BY_USER",
    "LoadPlan",
    "Wanted",
    "details",
    "measure_load",
    "note_errors",
    "result_path",
    "show_load",
]

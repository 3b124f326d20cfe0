"""The command `bench-serve`: its options, and its figures in the names of `vllm bench serve`."""

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from cpuspec.cli import INTERRUPTED, options
from cpuspec.cli.console import ERROR, accepted, counted, emit, exit_codes, note, print_facts, print_report, print_table
from cpuspec.cli.options import argument, flag, option
from cpuspec.cli.progress import counting
from cpuspec.environment import api_key
from cpuspec.errors import needing
from cpuspec.files import write_file
from cpuspec.loadtest.figures import read_goodput, read_metrics, read_percentiles, summarize
from cpuspec.metrics import epoch_s

with needing("`cpuspec bench-serve`", "'cpuspec[server]'"):
    from cpuspec.loadtest.address import local_address
    from cpuspec.loadtest.client import Client
    from cpuspec.loadtest.requests import CHAT, COMPLETIONS, LoadRequest, random_requests, read_requests
    from cpuspec.loadtest.run import INTERRUPTED as STOPPED_BY_USER
    from cpuspec.loadtest.run import LoadPlan, LoadResult, first_model, run_load, warm_up

_TITLES: Mapping[str, str] = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between pieces",
    "e2el": "whole answer",
}
# Every answer's own figures, in seconds, in the names of `vllm bench serve`.
_DETAILS: Mapping[str, str] = {
    **{"input_lens": "num_prompt_tokens", "output_lens": "num_new_tokens", "start_times": "start_s", "ttfts": "ttft_s"},
    **{"itls": "itl_s", "e2els": "e2el_s", "generated_texts": "text", "errors": "error"},
}


@dataclass(frozen=True)
class Measurement:
    """The requests to send, and the figures to compute from the answers. dataset None sends random words."""

    num_prompts: int = 100
    dataset: Path | None = None
    num_random_tokens: int = 256
    num_prefix_tokens: int = 0
    num_warmups: int = 1
    metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (50, 95, 99)

    @property
    def num_requests(self) -> int:
        """The number of requests: those that are measured, and those of the warm-up."""
        return self.num_prompts + self.num_warmups


PLAN = {
    "model": option("NAME", "As the server calls it; by default the first of its list.", "--model", "-m"),
    "request_rate": option("X", "Requests a second, at random moments; inf sends all at once."),
    "burstiness": option("X", "1 is a Poisson process; less comes in bursts, more comes evenly."),
    "max_concurrency": option("N", "Requests at once; those beyond wait unsent.", min=1, max=10_000),
    "seed": option("S", "Of the arrivals and of random prompts.", min=0),
    "max_tokens": option("N", "Tokens that an answer may have.", "--random-output-len", "--output-len", min=1),
    "max_seconds": option("S", "Requests that still run then are stopped.", min=0.001, max=1e6),
    "backend": option(
        "B",
        "openai sends prompts to /v1/completions, openai-chat conversations to /v1/chat/completions; by default what the data are.",
    ),
    "endpoint": option("PATH", "Another path than the backend's."),
}
MEASUREMENT = {
    "num_prompts": option("N", "Requests to send.", min=1, max=100_000),
    "dataset": option(
        "FILE",
        "JSON lines with prompt or messages, perhaps with output_tokens; too few are repeated. By default random words.",
        "--dataset-path",
    ),
    "num_random_tokens": option("N", "Tokens of a random prompt.", "--random-input-len", min=1, max=1_000_000),
    "num_prefix_tokens": option("N", "Tokens before it that all prompts share.", "--random-prefix-len", min=0, max=1_000_000),
    "num_warmups": option("N", "Requests that are sent before, unmeasured.", min=0, max=1000),
    "metrics": (option("LIST", "The latencies to show, of ttft, tpot, itl and e2el.", "--percentile-metrics"), read_metrics),
    "percentiles": (option("LIST", "Percentiles of each.", "--metric-percentiles"), read_percentiles),
}


@exit_codes()
@options.takes_fields("plan", LoadPlan, PLAN)
@options.takes_fields("wanted", Measurement, MEASUREMENT)
def bench_serve(
    more_goodput: Annotated[list[str] | None, argument("NAME:MS", "More targets of --goodput.", hidden=True)] = None,
    *,
    host: Annotated[str, option("ADDRESS", "Of the server, on this machine.")] = "127.0.0.1",
    port: Annotated[int, option("N", "Of the server.", min=1, max=65535)] = 8000,
    base_url: Annotated[str | None, option("URL", "Instead of both, as http://127.0.0.1:8000.")] = None,
    ignore_eos: Annotated[bool, flag("--ignore-eos", "Answers go on to that length, on servers that know ignore_eos.")] = False,
    temperature: Annotated[float, option("T", "0 is greedy.", min=0)] = 0.0,
    extra_body: Annotated[str | None, option("JSON", 'Fields of every request, as \'{"speculation": {"draft": "none"}}\'.')] = None,
    goodput: Annotated[
        list[str] | None, option("NAME:MS...", "Count answers that keep these, too, as ttft:500 tpot:50; of ttft, tpot and e2el.")
    ] = None,
    save_result: Annotated[bool, flag("--save-result", "Write the report as JSON to a file.")] = False,
    save_detailed: Annotated[bool, flag("--save-detailed", "And every answer's own figures and text.")] = False,
    result_dir: Annotated[Path, option("DIR", "Where the file goes.")] = Path(),
    result_filename: Annotated[str | None, option("NAME", "By default one of what was run, and when.")] = None,
    as_json: options.JsonOption = False,
    plan: LoadPlan,
    wanted: Measurement,
) -> None:
    """Send a load of requests to a server of this machine, and show latencies and throughput. In the manner of `vllm bench serve`.

    Any server of OpenAI's protocol will do; CPUSPEC_API_KEY is the key, if it wants one. Ctrl-C shows what came until then.
    """
    if more_goodput and not goodput:
        raise typer.BadParameter(f"bench-serve takes options only, got {more_goodput[0]!r}")
    if plan.backend not in (None, COMPLETIONS, CHAT):
        raise typer.BadParameter(f"there is no --backend {plan.backend!r}; wanted {COMPLETIONS} or {CHAT}")
    rate, burstiness = plan.request_rate, plan.burstiness
    if not (rate > 0 and 0 < burstiness < math.inf):
        raise typer.BadParameter(f"--request-rate and --burstiness must be above 0; got {rate:g} and {burstiness:g}")
    with options.usage_errors():
        targets = read_goodput([*(goodput or []), *(more_goodput or [])])
    body = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {}), **options.read_object(extra_body)}
    url = base_url or f"http://{f'[{host}]' if ':' in host else host}:{port}"
    client, plan = Client(local_address(url), api_key()), replace(plan, body=body, keep_texts=save_detailed)
    requests = read_requests(wanted.dataset, wanted.num_requests) if wanted.dataset else []
    plan, requests, result = asyncio.run(_run(client, requests, plan, wanted))
    report = {
        "date": datetime.fromtimestamp(epoch_s()).strftime("%Y%m%d-%H%M%S"),
        "backend": plan.backend or "+".join(dict.fromkeys(one.protocol(None) for one in requests)),
        "base_url": url,
        "model_id": plan.model,
        "num_prompts": len(requests),
        "request_rate": "inf" if math.isinf(rate) else rate,
        **{name: getattr(plan, name) for name in ("burstiness", "max_concurrency", "seed")},
        "goodput": dict(targets),
        "stopped": result.stopped,
        **summarize(result.answers, result.duration_s, wanted.metrics, wanted.percentiles, targets),
    }
    if save_result or save_detailed:
        at_once = f"-concurrency{plan.max_concurrency}" if plan.max_concurrency else ""
        name = plan.model.replace("/", "-").replace("\0", "")[:100]
        of_run = f"{report['backend']}-{report['request_rate']}qps{at_once}-{name}-{report['date']}.json"
        path = result_dir / (result_filename or of_run)
        details = {name: [getattr(one, of) for one in result.answers] for name, of in _DETAILS.items()}
        write_file(path, json.dumps(report | (details if save_detailed else {})) + "\n")
        note(f"wrote {path}")
    print_report(report, as_json, show_load)
    errors = [answer.error for answer in result.answers if answer.error]
    for error in list(dict.fromkeys(errors))[:5]:
        note(f"{counted(errors.count(error), 'request')} failed: {error}")
    if result.stopped:
        note(f"{result.stopped}: these figures are of a part of the load")
    if result.stopped == STOPPED_BY_USER:
        raise typer.Exit(INTERRUPTED)
    if result.stopped or not report["completed"]:
        raise typer.Exit(ERROR)


async def _run(
    client: Client, requests: list[LoadRequest], plan: LoadPlan, wanted: Measurement
) -> tuple[LoadPlan, list[LoadRequest], LoadResult]:
    plan = replace(plan, model=plan.model or await first_model(client))
    if wanted.dataset is None:
        lengths = wanted.num_random_tokens, wanted.num_prefix_tokens
        requests = await random_requests(client, wanted.num_requests, *lengths, plan.seed, plan.backend)
    requests, others = requests[: wanted.num_prompts], requests[wanted.num_prompts :]
    await warm_up(client, others, plan)  # so that no measured prompt is in the server's cache already
    with counting("requests", len(requests)) as on_done:
        return plan, requests, await run_load(client, requests, plan, on_done)


def show_load(report: Mapping[str, Any]) -> None:
    """Print a report as tables."""
    drafted, taken, cached = (report[f"total_{name}"] for name in ("draft_tokens", "accepted_draft_tokens", "cached_tokens"))
    good, within = report["request_goodput"], ", ".join(f"{name} {most:g} ms" for name, most in (report["goodput"] or {}).items())
    facts = [
        ("requests", f"{report['completed']} answered, {report['failed']} failed, {report['max_concurrent_requests']} at once"),
        ("duration", f"{report['duration']:.2f} s{', ' + report['stopped'] if report['stopped'] else ''}"),
        ("tokens", f"{report['total_input_tokens']} of prompts, {report['total_output_tokens']} of answers"),
        ("cached", None if cached is None else f"{cached} tokens of prompts"),
        ("drafts", None if drafted is None or taken is None else accepted(taken, drafted)),
        ("throughput", f"{report['request_throughput']:.3g} requests/s, {report['output_throughput']:.1f} tokens/s of answers"),
        ("with prompts", f"{report['total_token_throughput']:.1f} tokens/s"),
        ("goodput", None if good is None else f"{good:.3g} requests/s within {within}"),
    ]
    print_facts(facts)
    names = [name for name in _TITLES if f"mean_{name}_ms" in report]
    if names:
        emit("\n")
        columns = [key.removesuffix(f"_{names[0]}_ms") for key in report if key.endswith(f"_{names[0]}_ms")]
        values = {name: [report[f"{column}_{name}_ms"] for column in columns] for name in names}
        rows = [(_TITLES[name], *("" if one is None else f"{one:.2f}" for one in values[name])) for name in names]
        print_table(("milliseconds", *(f"{column}>" for column in columns)), rows)

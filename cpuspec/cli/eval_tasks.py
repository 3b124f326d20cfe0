"""`cpuspec eval task` and `harness`: answers to problems, generated and judged, here or by lm-eval."""

import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from cpuspec.cli import options
from cpuspec.cli.console import Report, accepted, emit, exit_codes, note, print_facts, print_report, print_table, size
from cpuspec.cli.machine import describe_run
from cpuspec.cli.models import totals
from cpuspec.cli.opening import load_llm, open_target, open_with_drafts
from cpuspec.cli.options import argument, flag, option
from cpuspec.cli.progress import counting
from cpuspec.environment import usable_cores
from cpuspec.errors import CpuspecError, needing
from cpuspec.evaluate.prompts import Prompt
from cpuspec.evaluate.sandbox import Limits, run_program
from cpuspec.evaluate.tasks import TASKS, Grade, Problem, Task, find_task, judge, read_problems, score
from cpuspec.files import write_file
from cpuspec.settings import SamplingParams

AllowOption = Annotated[
    bool, flag("--allow-code-execution", "Run programs that the model wrote, in a sandbox. Nothing is run without it.")
]
IsolationOption = Annotated[
    bool,
    flag("--no-isolation", "Run them with limits but without namespaces where the kernel has none, as in a disposable container."),
]
ProcessorOption = Annotated[int, option("S", "Processor time of a program.", "--cpu-seconds", min=1)]
MemoryOption = Annotated[int, option("MB", "Memory of a program.", "--memory-mb", min=64)]
PriceOption = Annotated[
    float | None, option("X", "Of the machine: then a million tokens and a right answer have one.", "--price-per-hour", min=0)
]
LimitOption = Annotated[int | None, option("N", "Problems at most; by default all.", "--limit", min=1)]


@exit_codes()
@options.takes_running("max_sequences", "context_length", *options.HOW, *options.ADAPTED)
@options.takes_sampling(options.EVAL_TOKENS, without=("logprobs",))
def task(
    model: options.ModelArgument,
    name: Annotated[str, argument("TASK", f"One of {', '.join(TASKS)}.")],
    data: Annotated[Path, argument("DATA.jsonl", "The problems, one a line, in the data set's own fields.")],
    *,
    draft: options.DraftOption = None,
    base_url: Annotated[
        str | None, option("URL", "Ask a server of this machine instead; --model is its name for the model.")
    ] = None,
    chat: Annotated[bool, flag("--chat", "Ask in a conversation; by default the model continues raw text.")] = False,
    skip: Annotated[int, option("N", "Leave out the first N problems.", min=0)] = 0,
    limit: LimitOption = None,
    shots: Annotated[int, option("N", "The file's first N lines are solved examples.", min=0)] = 0,
    samples: Annotated[int, option("N", "Answers to each problem.", min=1)] = 1,
    pass_at: Annotated[str, option("LIST", "The k of pass@k, as 1,10.")] = "1",
    allow_code_execution: AllowOption = False,
    no_isolation: IsolationOption = False,
    cpu_seconds: ProcessorOption = Limits.cpu_s,
    memory_mb: MemoryOption = Limits.memory_bytes >> 20,
    price_per_hour: PriceOption = None,
    out: Annotated[Path | None, option("FILE", "Write answers and verdicts as JSON lines.")] = None,
    as_json: options.JsonOption = False,
    sampling: dict[str, Any],
    running: options.Running,
) -> None:
    """Let a model solve problems, and judge its answers: HumanEval and MBPP by their tests, GSM8K by the number.

    Greedy unless --temperature says otherwise. Programs run only with --allow-code-execution.
    """
    with options.usage_errors():
        row = find_task(name)
    ks = options.read_numbers(pass_at, "--pass-at")
    if samples > 1 and not sampling.get("temperature"):
        raise typer.BadParameter("--samples needs --temperature above 0: greedy answers are all the same")
    limits = Limits(cpu_s=cpu_seconds, wall_s=6.0 * cpu_seconds, memory_bytes=memory_mb << 20)
    check_execution(row, allow_code_execution, not no_isolation)
    problems = read_problems(row, data, chat, skip, limit, shots)
    score([Grade(False)] * samples, samples, ks)  # a k that cannot be is told before minutes of answers
    asked = [one for one in problems for _ in range(samples)]
    each = [params_of(row, chat, sampling, number % samples) for number in range(len(asked))]
    if base_url is None:
        about, texts, cost = _ask_model(model, draft, running, asked, each)
    else:
        about, texts, cost = _ask_server(base_url, model, running.settings.max_sequences, asked, each)
    with counting("judging", len(asked)) as on_verdict:
        verdicts = judge(row, asked, texts, chat, limits, not no_isolation, usable_cores(), on_verdict)
    found = score(verdicts, samples, ks)
    if out is not None:
        lines = [
            {"task_id": one.name, "completion": text, "passed": verdict.passed, "reason": verdict.reason}
            for one, text, verdict in zip(asked, texts, verdicts, strict=True)
        ]
        write_file(out, "".join(json.dumps(line) + "\n" for line in lines))
    report = {
        "benchmark": "task",
        "task": name,
        "data": data.name,
        "form": "chat" if chat else "raw",
        "shots": shots,
        **about,
        **{name: getattr(found, name) for name in ("num_problems", "num_samples", "num_passed")},
        **{f"pass@{k}": share for k, share in found.pass_at.items()},
        **{f"pass@{k}_error": error for k, error in found.errors.items()},
        "cost": asdict(cost),
        "price_per_hour": price_per_hour,
        "price": None if price_per_hour is None else cost.price(price_per_hour, found.num_passed),
        "failed": [one.name for one, verdict in zip(asked, verdicts, strict=True) if not verdict.passed],
    }
    print_report(report, as_json, _show_task)


@exit_codes()
@options.takes_running("max_sequences", "context_length", *options.HOW, *options.ADAPTED)
def harness(
    model: options.ModelArgument,
    tasks: Annotated[list[str], argument("TASK...", "Tasks of lm-eval, or of --include-path; patterns, as 'mmlu_*'.")],
    *,
    draft: options.DraftOption = None,
    include_path: Annotated[Path | None, option("DIR", "A directory with tasks of your own, as YAML.")] = None,
    shots: Annotated[int | None, option("N", "Solved examples before each; by default the task's.", min=0)] = None,
    limit: LimitOption = None,
    chat: Annotated[bool, flag("--chat", "Ask through the model's chat template.")] = False,
    cache: Annotated[
        Path | None, option("FILE", "Keep answers in FILE_rank0.db; the next run of the same model, draft and settings goes on.")
    ] = None,
    as_json: options.JsonOption = False,
    running: options.Running,
) -> None:
    """Run tasks of EleutherAI's lm-evaluation-harness on a model, with its data sets and its figures.

    It needs the extra `cpuspec[eval]`. Most of its data sets are fetched from the Hugging Face hub.
    """
    from cpuspec.evaluate.harness import harness_table, open_harness, run_harness

    checkpoint, spec = open_with_drafts(model, draft, adapts=True)
    with open_harness(checkpoint, spec, running.backend, running.settings) as lm:
        found = run_harness(lm, tasks, include_path, shots, limit, chat, cache)
    report = {"benchmark": "harness", **describe_eval(model, running), "draft": str(spec), **found}
    print_report(report, as_json, lambda _: emit(harness_table(found) + "\n"))


@exit_codes()
@options.takes_running("max_sequences", "context_length", *options.HOW, *options.ADAPTED)
def tools(
    model: options.ModelArgument,
    *,
    draft: options.DraftOption = None,
    url: Annotated[
        str | None, option("URL", "Ask any OpenAI server of this machine instead; MODEL is its name for the model.", "--url")
    ] = None,
    strict: Annotated[bool, flag("--strict", "Declare the tools strict: arguments shall keep to their schemas.")] = False,
    limit: LimitOption = None,
    as_json: options.JsonOption = False,
    running: options.Running,
) -> None:
    """Count how well a model calls tools, over chat completions: 200 cases that come with cpuspec, greedy.

    Of the simple, multiple, parallel and long ones it counts the answers that call, parse, name the right tools and have the right
    arguments; of the irrelevant ones those that call nothing. A limit takes its share of each kind.
    """
    from cpuspec.environment import api_key

    with needing("`cpuspec eval tools`", "'cpuspec[server]'"):
        from cpuspec.evaluate.tool_calls import ask_cases, served, spread, tool_cases, tool_scores
        from cpuspec.loadtest.address import local_address
        from cpuspec.loadtest.client import Client
    cases, at_once = spread(tool_cases(), limit), running.settings.max_sequences
    with ExitStack() as stack:
        if url is None:
            llm = stack.enter_context(load_llm(model, draft, running, at_once))
            client, name = Client(local_address(stack.enter_context(served(llm)))), ""
        else:
            client, name = Client(local_address(url), api_key()), model
        on_answer = stack.enter_context(counting("answers", len(cases)))
        verdicts = asyncio.run(ask_cases(client, name, cases, at_once, strict, on_answer))
    report = {
        "benchmark": "tools",
        **describe_eval(model, None if url else running),
        "url": url,
        "strict": strict,
        "kinds": [asdict(one) for one in tool_scores(cases, verdicts)],
        "num_cases": len(cases),
        "num_right": sum(one.right for one in verdicts),
        "num_broken": sum(one.num_broken for one in verdicts),
        "wrong": [case.question[:60] for case, one in zip(cases, verdicts, strict=True) if not one.right],
    }
    print_report(report, as_json, _show_tools)


@exit_codes()
@options.takes_running("max_sequences", "context_length", *options.HOW, *options.ADAPTED)
def plus(
    model: options.ModelArgument,
    dataset: Annotated[str, argument("DATASET", "humaneval or mbpp.")],
    out: Annotated[Path, argument("OUT.jsonl", "The file to write; a problem that has its samples there is left out.")],
    *,
    draft: options.DraftOption = None,
    samples: Annotated[int, option("N", "Answers to each problem.", min=1)] = 1,
    temperature: Annotated[float, option("T", "0 is greedy.", min=0)] = 0.0,
    max_tokens: Annotated[int, option("N", "Of an answer.", min=1)] = 768,
    limit: LimitOption = None,
    running: options.Running,
) -> None:
    """Answer the problems of EvalPlus (HumanEval+ and MBPP+), whose own program judges them.

    It needs evalplus, which fetches the problems. Nothing that the model wrote is run: `evalplus.evaluate --dataset DATASET
    --samples OUT.jsonl` does that, best in a container.
    """
    from cpuspec.evaluate.plus import make_samples

    with load_llm(model, draft, running, running.settings.max_sequences) as llm:
        make_samples(llm, dataset, out, samples, temperature, max_tokens, limit)
    note(f"judge it with: evalplus.evaluate --dataset {dataset} --samples {out}")


def describe_eval(model: str, running: options.Running | None = None) -> dict[str, Any]:
    """The subject of a measurement, when it was made, and by which command: without the directories of this machine."""
    words = [Path(word).name if "/" in word and Path(word).exists() else word for word in sys.argv[1:]]
    about = describe_run(model, *running) if running else {"model": model}
    return about | {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(["cpuspec", *words])}


def check_execution(row: Task, allowed: bool, isolated: bool) -> None:
    """Raise BadParameter for a task that runs programs without leave, ConfigError where there is no sandbox."""
    if row.program is None:
        return
    if not allowed:
        raise typer.BadParameter(f"{row.name} runs programs that the model wrote; say so with --allow-code-execution")
    run_program("", isolated=isolated)


def params_of(row: Task, chat: bool, sampling: dict[str, Any], sample: int = 0) -> SamplingParams:
    """How an answer is sampled: greedily, if nothing is given. Each sample of a problem has a seed of its own."""
    given = {"temperature": 0.0, **sampling, "stop": (*(() if chat else row.stop), *sampling.get("stop", ()))}
    if given.get("seed") is not None:
        given["seed"] += sample
    return SamplingParams(**given)


def _ask_model(
    model: str, draft: str | None, running: options.Running, asked: Sequence[Problem], each: Sequence[SamplingParams]
) -> tuple[dict[str, Any], list[str], Any]:
    from cpuspec.evaluate.answers import answer_all

    with load_llm(model, draft, running, running.settings.max_sequences) as llm, counting("answers", len(asked)) as on_answer:
        requests = [(one.prompt, params) for one, params in zip(asked, each, strict=True)]
        answers, cost = answer_all(llm, requests, on_answer)
        about = {
            **describe_eval(model, running),
            "threads": llm.threads,
            "draft": str(llm.spec),
            "max_sequences": running.settings.max_sequences,
            "bits_per_weight": totals(open_target(model, adapts=True).tensors.values())["bits_per_weight"],
        }
    return about, [one.content for one in answers], cost


def _ask_server(
    url: str, model: str, at_once: int, asked: Sequence[Problem], each: Sequence[SamplingParams]
) -> tuple[dict[str, Any], list[str], Any]:
    from cpuspec.environment import api_key
    from cpuspec.evaluate.answers import cost_of_server

    with needing("--base-url", "'cpuspec[server]'"):
        from cpuspec.loadtest.address import local_address
        from cpuspec.loadtest.client import Client
        from cpuspec.loadtest.requests import LoadRequest
        from cpuspec.loadtest.run import LoadPlan, run_load

    def request(prompt: Prompt) -> LoadRequest:
        return LoadRequest(prompt=prompt) if isinstance(prompt, str) else LoadRequest(messages=tuple(dict(one) for one in prompt))

    params = each[0]
    body = {"temperature": params.temperature, "stop": list(params.stop)}
    if params.temperature:
        body |= {"top_p": params.top_p, "seed": params.seed}
    plan = LoadPlan(model, max_concurrency=at_once, max_tokens=params.max_tokens, max_seconds=1e6, body=body, keep_texts=True)
    with counting("answers", len(asked)) as on_answer:
        client = Client(local_address(url), api_key())
        done = asyncio.run(run_load(client, [request(one.prompt) for one in asked], plan, on_answer))
    if wrong := next((one.error for one in done.answers if one.error), done.stopped):
        raise CpuspecError(f"{url} did not answer every problem: {wrong}")
    about = {**describe_eval(model), "base_url": url, "max_sequences": at_once}
    return about, [one.text for one in done.answers], cost_of_server(done.answers, done.duration_s)


def _show_tools(report: Report) -> None:
    columns = ("kind", "cases>", "called>", "parse>", "right tools>", "right>")
    names = ("num_cases", "num_called", "num_parses", "num_named", "num_right")
    print_table(columns, [(one["kind"], *(str(one[name]) for name in names)) for one in report["kinds"]])
    emit("\n")
    broken = f"{report['num_broken']} finished calls do not parse"
    print_facts([("model", report["model"]), ("right", f"{report['num_right']} of {report['num_cases']}; {broken}")])


def _show_task(report: Report) -> None:
    name, cost = "exact match" if report["task"] == "gsm8k" else "pass@1", report["cost"]
    for key in (key for key in report if key.startswith("pass@") and not key.endswith("_error")):
        emit(f"{name if key == 'pass@1' else key}: {report[key]:.1%} ± {report[f'{key}_error']:.1%}\n")
    facts = [
        ("task", f"{report['task']}, {report['form']}, {report['num_problems']} problems of {report['data']}"),
        ("model", report["model"]),
        ("answers", f"{report['num_passed']} of {cost['num_answers']} right, {cost['num_new_tokens']} tokens"),
        *show_cost(cost),
        ("price", _price(report["price"], report["price_per_hour"])),
    ]
    print_facts(facts)
    if report["failed"]:
        note(f"not right: {', '.join(report['failed'][:20])}{' and others' if len(report['failed']) > 20 else ''}")


def show_cost(cost: dict[str, Any]) -> list[tuple[str, str]]:
    """Rates, latencies and memory in lines."""
    first, further = (
        ", ".join(f"{rank} {1e3 * value:.1f} ms" for rank, value in cost[key].items()) for key in ("ttft_s", "tpot_s")
    )
    return [
        ("speed", f"{cost['tokens_per_s']:.1f} tokens/s in {cost['duration_s']:.1f} s"),
        ("first token", first),
        ("each further token", further),
        ("drafts", accepted(cost["num_accepted_tokens"], cost["num_draft_tokens"]) if cost["num_draft_tokens"] else ""),
        ("memory", size(cost["memory_bytes"]) if cost["memory_bytes"] else ""),
    ]


def _price(price: dict[str, float | None] | None, per_hour: float | None) -> str:
    """The price of tokens and of right answers; "" where the machine has none."""
    if price is None:
        return ""
    parts = [(price["per_million_tokens"], "a million tokens"), (price["per_accepted_answer"], "a right answer")]
    told = [f"{value:.4g} for {what}" for value, what in parts if value is not None]
    return f"{', '.join(told) or 'nothing was made'} at {per_hour:g} an hour"

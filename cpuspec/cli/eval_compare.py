"""`cpuspec eval drift`, `forms`, `arms` and `beside`: models, drafts and engines beside one another."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cpuspec.cli import options
from cpuspec.cli.console import Report, emit, exit_codes, print_facts, print_report, print_table, size
from cpuspec.cli.eval_tasks import (
    AllowOption,
    IsolationOption,
    LimitOption,
    PriceOption,
    check_execution,
    describe_eval,
    params_of,
    show_cost,
)
from cpuspec.cli.opening import load_llm, open_with_drafts
from cpuspec.cli.options import argument, flag, option
from cpuspec.cli.progress import counting, step_progress
from cpuspec.errors import ConfigError
from cpuspec.evaluate.prompts import Prompt, read_prompts
from cpuspec.evaluate.tasks import find_task, read_problems
from cpuspec.settings import SamplingParams
from cpuspec.text.reasoning import opens_reasoning


@exit_codes()
@options.takes_running("max_sequences", "context_length", *options.HOW)
def drift(
    a: Annotated[str, argument("A", f"The reference. {options.MODEL_HELP}")],
    b: Annotated[str, argument("B", "The model that is compared with it, likewise.")],
    *,
    prompts: Annotated[
        list[str],
        option("FILE:FIELD:N", "A field of the first N lines of a JSON-lines file, :chat after it for conversations. Repeatable."),
    ],
    max_tokens: Annotated[int, option("N", "Of each answer.", "--max-tokens", "-n", min=1)] = 128,
    draft: options.DraftOption = None,
    running: options.Running,
    as_json: options.JsonOption = False,
) -> None:
    """Tell how far the greedy answers of two models drift apart: where they part, and how much of them differs."""
    from cpuspec.evaluate.answers import answer_all
    from cpuspec.evaluate.drift import drift as measure_drift

    asked: list[Prompt] = [one for text in prompts for one in read_prompts(options.checked_text(text, "--prompts")).prompts]
    params, answers, tokenizers = SamplingParams(max_tokens=max_tokens), [], []
    for model in (a, b):
        with load_llm(model, draft, running, running.settings.max_sequences) as llm, counting(model, len(asked)) as on_answer:
            answers.append(answer_all(llm, [(one, params) for one in asked], on_answer)[0])
            tokenizers.append(llm.tokenizer)
    shared = tokenizers[0].first_difference(tokenizers[1]) is None
    sides = [[one.token_ids if shared else tuple(one.text.encode()) for one in side] for side in answers]
    report = {
        "benchmark": "drift",
        **describe_eval(f"{a} and {b}"),
        "a": a,
        "b": b,
        "unit": "tokens" if shared else "bytes",
        "max_tokens": max_tokens,
        **asdict(measure_drift(*sides)),
    }
    print_report(report, as_json, _show_drift)


@exit_codes()
@options.takes_running("max_sequences", "context_length", *options.HOW)
@options.takes_sampling(options.EVAL_TOKENS, without=("logprobs",))
def forms(
    model: options.ModelArgument,
    data: Annotated[
        Path, argument("DATA.jsonl", "Lines with messages or prompt, and with tools (OpenAI's) or schema, a JSON schema.")
    ],
    *,
    draft: options.DraftOption = None,
    limit: LimitOption = None,
    sampling: dict[str, Any],
    running: options.Running,
    as_json: options.JsonOption = False,
) -> None:
    """Tell how often answers are valid tool calls, or valid JSON that fits its schema."""
    from cpuspec.evaluate.answers import answer_all
    from cpuspec.evaluate.validity import judge_form, read_forms, validity_by_kind

    lines = read_forms(data, limit=limit)
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    with load_llm(model, draft, running, running.settings.max_sequences) as llm, counting("answers", len(lines)) as on_answer:
        tokenizer = llm.tokenizer
        if not tokenizer.has_chat_template:
            raise ConfigError(f"{model} has no chat template, which conversations need; take an instruct model")
        asked = [line.prompt_ids(tokenizer) for line in lines]
        found, cost = answer_all(llm, [(ids, params) for ids in asked], on_answer)
        texts = [tokenizer.decode(one.token_ids, skip_special=False) for one in found]
        ends = [tokenizer.decode([end], skip_special=False) for end in tokenizer.eos_ids]
        verdicts = []
        for line, ids, text in zip(lines, asked, texts, strict=True):
            said = next((text.removesuffix(end) for end in ends if end and text.endswith(end)), text)
            thinking = opens_reasoning(tokenizer, tokenizer.chat_template, ids)
            verdicts.append(judge_form(line, said, tokenizer.chat_template, thinking))
    report = {
        "benchmark": "forms",
        "data": data.name,
        **describe_eval(model, running),
        "kinds": [asdict(one) for one in validity_by_kind(lines, verdicts)],
        "cost": asdict(cost),
    }
    print_report(report, as_json, _show_forms)


@exit_codes()
@options.takes_running("max_sequences", "context_length", *options.HOW)
def arms(
    model: options.ModelArgument,
    tasks: Annotated[list[str], argument("TASK:DATA...", "As humaneval:humaneval.jsonl; several are told apart.")],
    *,
    draft: options.DraftOption = "auto",
    wide: Annotated[str, option("FORMAT", "Of the unquantized target: bf16, f16 or f32.")] = "bf16",
    chat: Annotated[bool, flag("--chat", "Ask in conversations.")] = False,
    limit: LimitOption = None,
    max_tokens: Annotated[int, option("N", "Of each answer.", "--max-tokens", "-n", min=1)] = 256,
    allow_code_execution: AllowOption = False,
    no_isolation: IsolationOption = False,
    price_per_hour: PriceOption = None,
    running: options.Running,
    as_json: options.JsonOption = False,
) -> None:
    """Compare the four arms: baseline (wide weights), quantized, speculative, and both, in speed, memory, quality and cost.

    The wide target holds the file's own values, decoded. Answers are greedy and come one at a time unless --max-sequences is given.
    """
    from cpuspec.evaluate.arms import AskedTask, run_arms

    asked = []
    for text in tasks:
        name, _, path = text.partition(":")
        row = find_task(name)
        check_execution(row, allow_code_execution, not no_isolation)
        asked.append(
            AskedTask(
                row, read_problems(row, Path(path), chat, limit=limit), chat, params_of(row, chat, {"max_tokens": max_tokens})
            )
        )
    checkpoint, spec = open_with_drafts(model, draft)
    with step_progress() as progress:
        found = run_arms(
            checkpoint, spec, asked, wide, running.backend, running.settings, isolated=not no_isolation, on_step=progress
        )
    plain = {one.arm: [task.answers for task in one.tasks] for one in found}
    report = {
        "benchmark": "arms",
        **describe_eval(model, running),
        "max_tokens": max_tokens,
        "price_per_hour": price_per_hour,
        "drafts_change_nothing": plain["baseline"] == plain["speculative"] and plain["quantized"] == plain["both"],
        "arms": [one.as_dict(price_per_hour) for one in found],
    }
    print_report(report, as_json, _show_arms)


@exit_codes()
def beside(
    files: Annotated[
        list[Path],
        argument(
            "FILE...",
            "JSON of llama-bench, vllm bench serve or latency, cpuspec parity --record, eval or bench; or an object with "
            "engine, model and figures such as decode_tokens_per_s.",
        ),
    ],
    *,
    price_per_hour: Annotated[
        list[float] | None, option("X", "Of the machine: once for all files, or once for each in order.", min=0)
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Set results of several engines and machines beside one another: speed, latency, acceptance, quality, cost."""
    from cpuspec.evaluate.elsewhere import read_runs

    prices: list[float | None] = [*price_per_hour] if price_per_hour else [None]
    if len(prices) not in (1, len(files)):
        raise typer.BadParameter(f"got {len(prices)} --price-per-hour for {len(files)} files; give one for all, or one each")
    each = prices * len(files) if len(prices) == 1 else prices
    runs = [run for path, price in zip(files, each, strict=True) for run in read_runs(path, price)]
    report = [asdict(run) | {"price_per_million": run.price_per_million, "price_per_answer": run.price_per_answer} for run in runs]
    print_report({"benchmark": "beside", **describe_eval("several"), "runs": report}, as_json, _show_beside)


def _show_drift(report: Report) -> None:
    unit, median = report["unit"], report["first_difference_median"]
    print_facts(
        [
            ("models", f"{report['a']} (the reference) and {report['b']}"),
            ("same answers", f"{report['num_identical']} of {report['num_prompts']} ({report['share_identical']:.1%})"),
            (
                "they part",
                "nowhere" if median is None else f"after {median:g} {unit} (median), {report['first_difference_least']} (least)",
            ),
            ("edit distance", f"{report['edit_distance_mean']:.1%} of the longer answer, mean"),
        ]
    )


def _show_forms(report: Report) -> None:
    columns = ("form", "lines>", "made>", "known function>", "JSON>", "fits the schema>")
    names = ("answered", "known", "parses", "fits")
    print_table(columns, [(one["kind"], str(one["num_lines"]), *(f"{one[name]:.1%}" for name in names)) for one in report["kinds"]])
    emit("\n")
    print_facts([("model", report["model"]), *show_cost(report["cost"])])


def _show_arms(report: Report) -> None:
    names = "arm,task,right>,tokens/s>,decode>,first token>,per token>,p95>,p99>,memory>,s/right>,price>"
    rows = []
    for arm in report["arms"]:
        for task in arm["tasks"]:
            cost, price = task["cost"], task["price"]
            paid = None if price is None else price["per_accepted_answer"]
            rows.append(
                (
                    f"{arm['arm']} ({arm['bits_per_weight']:.1f} bits, {arm['draft']})",
                    task["task"],
                    f"{task['num_passed']} of {task['num_problems']}",
                    f"{cost['tokens_per_s']:.1f}",
                    _figure(cost["decode_tokens_per_s"], 1),
                    _milliseconds(cost["ttft_s"].get("p50")),
                    *(_milliseconds(cost["tpot_s"].get(rank)) for rank in ("p50", "p95", "p99")),
                    size(cost["memory_bytes"]),
                    _figure(task["seconds_per_accepted_answer"], 1),
                    _figure(paid, 5),
                )
            )
    print_table(names.split(","), rows)
    told = "the same answers with and without drafts" if report["drafts_change_nothing"] else "DRAFTS CHANGED AN ANSWER"
    emit(f"\n{report['model']}: {told}; latencies in ms\n")


def _show_beside(report: Report) -> None:
    names = "engine,model,machine,what,prefill>,decode>,tokens/s>,ttft>,tpot>,accepted>,right>,a million>,right answer>"
    rows = [
        (
            run["engine"],
            run["model"],
            run["machine"],
            run["what"],
            *(_figure(run[name], 1) for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "tokens_per_s")),
            *(_milliseconds(run[name]) for name in ("ttft_s", "tpot_s")),
            *("" if run[name] is None else f"{run[name]:.1%}" for name in ("acceptance", "quality")),
            *(_figure(run[name], 4) for name in ("price_per_million", "price_per_answer")),
        )
        for run in report["runs"]
    ]
    print_table(names.split(","), rows)


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{1e3 * value:.1f}"

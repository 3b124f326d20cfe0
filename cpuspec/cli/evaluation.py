"""`cpuspec eval`: texts, formats, models and engines beside one another. Tasks are in `eval_tasks`."""

from contextlib import nullcontext
from dataclasses import asdict, replace
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
    harness,
    params_of,
    plus,
    show_cost,
    task,
    tools,
)
from cpuspec.cli.models import totals
from cpuspec.cli.opening import load_backend, load_llm, open_target, open_with_drafts
from cpuspec.cli.options import argument, flag, option
from cpuspec.cli.progress import busy, counting, step_progress
from cpuspec.errors import ConfigError
from cpuspec.evaluate.logits_file import LogitsFile, writing
from cpuspec.evaluate.perplexity import CONTEXT, compare_with_file, measure_perplexity, side_by_side, sliding
from cpuspec.evaluate.prompts import Prompt, read_prompts, read_text
from cpuspec.evaluate.quality import TOP_K, compare_rows, last_rows
from cpuspec.evaluate.tasks import find_task, read_problems
from cpuspec.formats.kv import get_kv_format, stored_bytes
from cpuspec.settings import SamplingParams
from cpuspec.text import Tokenizer, make_tokenizer
from cpuspec.text.reasoning import opens_reasoning

ChunksOption = Annotated[int | None, option("N", "Windows at most, from the beginning; by default all.", "--chunks", min=1)]


@exit_codes()
@options.takes_running(*options.HOW, *options.ADAPTED)
def perplexity(
    model: options.ModelArgument,
    text: Annotated[Path, argument("TEXT", "A file of plain text, such as WikiText-2's test split.")],
    *,
    context: Annotated[int, option("N", "Tokens of a window.", "--context-length", "--context", "-c", min=4)] = CONTEXT,
    stride: Annotated[
        int | None,
        option(
            "N",
            "Windows begin N tokens after one another, and each token counts once, as in transformers' documentation. By "
            "default as llama-perplexity has it: windows side by side, the second half of each counts.",
            min=1,
        ),
    ] = None,
    chunks: ChunksOption = None,
    save_logits: Annotated[
        Path | None,
        option(
            "FILE",
            "Keep the rows that count, for `cpuspec eval kl` and for llama-perplexity --kl-divergence; two bytes for each id "
            "of the vocabulary in each row.",
            "--save-logits",
            "--kl-divergence-base",
        ),
    ] = None,
    running: options.Running,
    as_json: options.JsonOption = False,
) -> None:
    """Measure the perplexity of a text: exp of the mean loss of its tokens, with its standard error. Lower is better.

    The figure is llama-perplexity's for the same file and --context, within its error.
    """
    if stride is not None and save_logits is not None:
        raise typer.BadParameter("--save-logits keeps windows that lie side by side; leave out --stride")
    checkpoint = open_target(model, adapts=True)
    tokenizer = make_tokenizer(checkpoint)
    with busy(f"reading {text}"):
        # llama.cpp drops one newline at the end of a file.
        ids = tokenizer.encode(read_text(text).removesuffix("\n"))
    windows = side_by_side(ids, context, _bos_id(tokenizer), chunks) if stride is None else sliding(ids, context, stride, chunks)
    with load_backend(model, checkpoint, running) as backend, counting("perplexity", len(windows)) as on_window:
        kept = [ids[start : start + context] for start in range(0, context * len(windows), context)]
        with writing(save_logits, kept, backend.config.vocab_size) if save_logits else nullcontext() as writer:
            found = measure_perplexity(backend, windows, on_window, writer)
    report = {
        "benchmark": "perplexity",
        **describe_eval(model, running),
        "bits_per_weight": totals(checkpoint.tensors.values())["bits_per_weight"],
        "text": text.name,
        "context": context,
        "stride": stride,
        "convention": "llama.cpp" if stride is None else "Hugging Face",
        **asdict(found),
    }
    print_report(report, as_json, _show_perplexity)


@exit_codes()
@options.takes_running(*options.HOW, *options.ADAPTED)
def kl(
    model: options.ModelArgument,
    reference: Annotated[
        Path, argument("FILE", "What `cpuspec eval perplexity --save-logits` or llama-perplexity --kl-divergence-base wrote.")
    ],
    *,
    chunks: ChunksOption = None,
    running: options.Running,
    as_json: options.JsonOption = False,
) -> None:
    """Compare a model with a reference that is on file: KL divergence, same likeliest token, perplexity of both.

    The figures are those of llama-perplexity --kl-divergence, and the overlap of the likeliest ids.
    """
    file = LogitsFile(reference)
    checkpoint = open_target(model, adapts=True)
    total = min(len(file.windows), chunks or len(file.windows))
    with load_backend(model, checkpoint, running) as backend, counting("KL divergence", total) as on_window:
        found = compare_with_file(backend, file, _bos_id(make_tokenizer(checkpoint)), chunks, on_window)
    about = {
        **describe_eval(model, running),
        "bits_per_weight": totals(checkpoint.tensors.values())["bits_per_weight"],
        "reference": reference.name,
        "context": file.context,
    }
    print_report({"benchmark": "kl", **about, "top_k": TOP_K, **asdict(found)}, as_json, _show_kl)


@exit_codes()
@options.takes_running(*(name for name in options.HOW if name != "kv_format"))
def kv(
    model: options.ModelArgument,
    text: Annotated[Path, argument("TEXT", "A file of plain text that is long enough.")],
    *,
    depths: Annotated[str, option("N,N", "Tokens of a window, the text's first.", "--depth", "-c")] = "4096",
    formats: Annotated[str, option("F,F", "Formats of keys and values, each against f32.")] = "f16,int8,int4",
    rows: Annotated[int, option("N", "Rows that count: a window's last ones.", min=1)] = 512,
    running: options.Running,
    as_json: options.JsonOption = False,
) -> None:
    """Measure what keys and values in fewer bits cost deep in a context: KL divergence from the same backend with f32.

    A window is read from an empty cache, and its last rows are compared: they look back on all that was rounded.
    """
    lengths = options.read_numbers(depths, "--depth")
    with options.usage_errors():
        kept = {name.strip(): get_kv_format(name.strip()) for name in formats.split(",")}
    checkpoint = open_target(model, adapts=True)
    tokenizer = make_tokenizer(checkpoint)
    with busy(f"reading {text}"):
        ids = [*tokenizer.prefix, *tokenizer.encode(read_text(text))]
    longest = max(lengths, default=0)
    if not lengths or min(lengths) < rows + 2:
        raise typer.BadParameter(f"--depth must be at least {rows + 2} tokens, two more than --rows, got {depths!r}")
    if longest > checkpoint.config.context_length or longest > len(ids):
        raise typer.BadParameter(
            f"--depth {longest} is more than the model's context of {checkpoint.config.context_length} tokens, "
            f"or than the {len(ids)} tokens of the text"
        )
    found: list[Report] = []
    passes = [(length, name) for length in lengths for name in ("f32", *kept)]
    done, total = 0, sum(length for length, _ in passes)
    with counting("keys and values", total) as show:

        def on_rows(fed: int) -> None:
            show(done + fed)

        for length, name in passes:
            how = running._replace(settings=replace(running.settings, kv_format=name))
            with load_backend(model, checkpoint, how) as backend:
                logits = last_rows(backend, ids[:length], rows, on_rows)
            done += length
            if name == "f32":
                reference = logits
                continue
            quality = compare_rows(reference, logits, ids[length - rows : length])
            bits = 8 * stored_bytes(kept[name], checkpoint.config.head_dim) / checkpoint.config.head_dim
            found.append({"depth": length, "kv_format": name, "bits": bits, **asdict(quality)})
    about = {name: value for name, value in describe_eval(model, running).items() if name != "kv_format"}
    report = {"benchmark": "kv", **about, "text": text.name, "rows": rows, "formats": found}
    print_report(report, as_json, _show_kv)


def _show_kv(report: Report) -> None:
    columns = ("depth", "format", "bits", "KL divergence", "99 %", "same likeliest", "perplexity over f32's")
    table = [
        (
            str(one["depth"]),
            one["kv_format"],
            f"{one['bits']:.3g}",
            f"{one['kl_mean']:.6f} ± {one['kl_error']:.6f}",
            f"{one['kl_p99']:.6f}",
            f"{one['same_top']:.2%}",
            f"{one['perplexity_ratio']:.4f} ± {one['perplexity_ratio'] * one['log_ratio_error']:.4f}",
        )
        for one in report["formats"]
    ]
    print_table(columns, table)


def _bos_id(tokenizer: Tokenizer) -> int | None:
    """The token that llama.cpp puts in place of each window's first one: BOS, if the model's file wants it."""
    return tokenizer.prefix[0] if tokenizer.prefix else None


def _show_perplexity(report: Report) -> None:
    how = "second halves of windows" if report["stride"] is None else f"windows {report['stride']} tokens apart"
    print_facts(
        [
            ("perplexity", f"{report['perplexity']:.4f} ± {report['error']:.4f}"),
            ("model", f"{report['model']}, {report['bits_per_weight']:.2f} bits per weight"),
            ("text", f"{report['text']}, {report['num_counted']} tokens in {report['num_windows']} windows of {report['context']}"),
            ("convention", f"{report['convention']}'s: {how}"),
        ]
    )


def _show_kl(report: Report) -> None:
    ratio = f"{report['perplexity_ratio']:.4f} ± {report['perplexity_ratio'] * report['log_ratio_error']:.4f}"
    print_facts(
        [
            ("model", f"{report['model']}, {report['bits_per_weight']:.2f} bits per weight"),
            ("reference", f"{report['reference']}, {report['num_tokens']} rows"),
            ("KL divergence", f"{report['kl_mean']:.6f} ± {report['kl_error']:.6f} nats"),
            ("", f"median {report['kl_median']:.6f}, 99 % {report['kl_p99']:.6f}, most {report['kl_max']:.6f}"),
            ("same likeliest token", f"{report['same_top']:.2%} ± {report['same_top_error']:.2%}"),
            (f"{report['top_k']} likeliest ids", f"{report['top_overlap']:.2%} of them the same"),
            ("perplexity", f"{report['perplexity']:.4f} ± {report['perplexity_error']:.4f}"),
            ("of the reference", f"{report['reference_perplexity']:.4f} ± {report['reference_perplexity_error']:.4f}"),
            ("ratio", ratio),
            ("probability", f"of the text's next token: root mean square difference {report['probability_rms']:.3%}"),
        ]
    )


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
        for one in arm["tasks"]:
            cost, price = one["cost"], one["price"]
            paid = None if price is None else price["per_accepted_answer"]
            rows.append(
                (
                    f"{arm['arm']} ({arm['bits_per_weight']:.1f} bits, {arm['draft']})",
                    one["task"],
                    f"{one['num_passed']} of {one['num_problems']}",
                    f"{cost['tokens_per_s']:.1f}",
                    _figure(cost["decode_tokens_per_s"], 1),
                    _milliseconds(cost["ttft_s"].get("p50")),
                    *(_milliseconds(cost["tpot_s"].get(rank)) for rank in ("p50", "p95", "p99")),
                    size(cost["memory_bytes"]),
                    _figure(one["seconds_per_accepted_answer"], 1),
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


eval_app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure how good a model is: texts, tasks, formats, and what answers cost."
)
for command in (task, tools, forms, drift, arms, beside, harness, plus, perplexity, kl, kv):
    options.register(eval_app, command)

"""`cpuspec eval`: the commands that measure how good a model is, and what its answers cost."""

from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from cpuspec.cli import options
from cpuspec.cli.console import Report, exit_codes, print_facts, print_report, print_table
from cpuspec.cli.eval_compare import arms, beside, drift, forms
from cpuspec.cli.eval_tasks import describe_eval, harness, plus, task, tools
from cpuspec.cli.models import totals
from cpuspec.cli.opening import load_backend, open_target
from cpuspec.cli.options import argument, option
from cpuspec.cli.progress import busy, counting
from cpuspec.evaluate.logits_file import LogitsFile, writing
from cpuspec.evaluate.perplexity import CONTEXT, compare_with_file, measure_perplexity, side_by_side, sliding
from cpuspec.evaluate.prompts import read_text
from cpuspec.evaluate.quality import TOP_K, compare_rows, last_rows
from cpuspec.formats.kv import get_kv_format, stored_bytes
from cpuspec.text import Tokenizer, make_tokenizer

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


eval_app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure how good a model is: texts, tasks, formats, and what answers cost."
)
for command in (task, tools, forms, drift, arms, beside, harness, plus, perplexity, kl, kv):
    options.register(eval_app, command)

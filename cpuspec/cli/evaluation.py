"""`cpuspec eval`: the commands that measure how good a model is, and what its answers cost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cpuspec.backends import Backend, make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.cli import options
from cpuspec.cli.console import Report, StepProgress, busy, exit_codes, print_facts, print_report
from cpuspec.cli.eval_tasks import HOW, harness, task
from cpuspec.cli.machine import describe_run
from cpuspec.cli.opening import open_target
from cpuspec.cli.reports import totals
from cpuspec.evaluate.logits_file import LogitsFile, writing
from cpuspec.evaluate.perplexity import CONTEXT, compare_with_file, measure_perplexity, side_by_side, sliding
from cpuspec.evaluate.prompts import read_text
from cpuspec.evaluate.quality import TOP_K
from cpuspec.tokenizer import Tokenizer, make_tokenizer

eval_app = typer.Typer(no_args_is_help=True, help="Measure how good a model is: texts, tasks, formats, and what answers cost.")
for command in (task, harness):
    eval_app.command()(command)

ChunksOption = Annotated[
    int | None, typer.Option("--chunks", metavar="N", min=1, help="Windows at most, from the beginning; by default all.")
]


@eval_app.command()
@exit_codes()
@options.takes_running(*HOW)
def perplexity(
    model: options.ModelArgument,
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A file of plain text, such as WikiText-2's test split.")],
    *,
    context: Annotated[int, typer.Option("--context", "-c", metavar="N", min=4, help="Tokens of a window.")] = CONTEXT,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            metavar="N",
            min=1,
            help="Windows begin N tokens after one another, and each token counts once, as in transformers' documentation. By "
            "default as llama-perplexity has it: windows side by side, the second half of each counts.",
        ),
    ] = None,
    chunks: ChunksOption = None,
    save_logits: Annotated[
        Path | None,
        typer.Option(
            "--save-logits",
            "--kl-divergence-base",
            metavar="FILE",
            help="Keep the rows that count, for `cpuspec eval kl` and for llama-perplexity --kl-divergence; two bytes for each id "
            "of the vocabulary in each row.",
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
    checkpoint = open_target(model)
    tokenizer = make_tokenizer(checkpoint)
    with busy(f"reading {text}"):
        # llama.cpp drops one newline at the end of a file.
        ids = tokenizer.encode(read_text(text).removesuffix("\n"))
    windows = side_by_side(ids, context, _bos_id(tokenizer), chunks) if stride is None else sliding(ids, context, stride, chunks)
    with _loaded(model, checkpoint, running) as backend, _progress("perplexity", len(windows)) as on_window:
        kept = [ids[start : start + context] for start in range(0, context * len(windows), context)]
        with writing(save_logits, kept, backend.config.vocab_size) if save_logits else nullcontext() as writer:
            found = measure_perplexity(backend, windows, on_window, writer)
    report = {
        "benchmark": "perplexity",
        **describe_run(model, *running),
        "bits_per_weight": totals(checkpoint.tensors.values())["bits_per_weight"],
        "text": text.name,
        "context": context,
        "stride": stride,
        "convention": "llama.cpp" if stride is None else "Hugging Face",
        **asdict(found),
    }
    print_report(report, as_json, _show_perplexity)


@eval_app.command()
@exit_codes()
@options.takes_running(*HOW)
def kl(
    model: options.ModelArgument,
    reference: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="What `cpuspec eval perplexity --save-logits` or llama-perplexity --kl-divergence-base wrote."
        ),
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
    checkpoint = open_target(model)
    total = min(len(file.windows), chunks or len(file.windows))
    with _loaded(model, checkpoint, running) as backend, _progress("KL divergence", total) as on_window:
        found = compare_with_file(backend, file, _bos_id(make_tokenizer(checkpoint)), chunks, on_window)
    about = {
        **describe_run(model, *running),
        "bits_per_weight": totals(checkpoint.tensors.values())["bits_per_weight"],
        "reference": reference.name,
        "context": file.context,
    }
    print_report({"benchmark": "kl", **about, "top_k": TOP_K, **asdict(found)}, as_json, _show_kl)


def _bos_id(tokenizer: Tokenizer) -> int | None:
    """What llama.cpp puts in the place of each window's first token: the beginning of a text, where the model's file wants one."""
    return tokenizer.prefix[0] if tokenizer.prefix else None


@contextmanager
def _loaded(model: str, checkpoint: Checkpoint, running: options.Running) -> Iterator[Backend]:
    with busy(f"loading {model}"):
        backend = make_backend(running.backend, checkpoint, running.settings)
    try:
        yield backend
    finally:
        backend.close()


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int, float], None]]:
    with StepProgress(tenths=True) as progress:
        yield lambda done, figure: progress(what, done, total)


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

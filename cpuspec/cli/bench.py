"""Prints the figures of `cpuspec bench`: Markdown for people, CSV for tables, JSON for scripts."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from cpuspec.backends import Backend, device_of
from cpuspec.cli import options
from cpuspec.cli.console import counted, emit, emit_json, exit_codes, note, size
from cpuspec.cli.machine import describe_run
from cpuspec.cli.opening import load_backend, open_target
from cpuspec.cli.options import option
from cpuspec.evaluate.speed import Plan, Speed, SpeedReport, measure_speed
from cpuspec.settings import EngineConfig

Setting = dict[str, Any]


def describe_bench(model: str, backend: Backend, settings: EngineConfig, plan: Plan) -> Setting:
    """The model, the machine and the settings that a bench measured."""
    return {
        **describe_run(model, backend.name, settings),
        "threads": backend.threads,
        "device": device_of(backend),
        "weight_bytes": backend.weight_bytes,
        "repetitions": plan.repetitions,
    }


def show_csv(setting: Setting, report: SpeedReport) -> None:
    """One line for each workload, every line with the whole setting."""
    shared = setting | {"read_bytes_per_s": report.read_bytes_per_s}
    lines = [shared | asdict(speed) for speed in (*report.prefill, *report.decode, *(one.speed for one in report.rows))]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    emit(text.getvalue())


def show_markdown(setting: Setting, report: SpeedReport) -> None:
    """A line about the setting, then a table of rates and a table of forwards, as far as they were measured.

    "weights read" are those of a forward.
    """
    chosen = [f"{name} {setting[name]}" for name in ("dtype", "weights", "activations") if setting[name] != "auto"]
    facts = [
        f"{size(setting['weight_bytes'])} of weights",
        " with ".join([f"{setting['backend']} backend", *([", ".join(chosen)] if chosen else [])]),
        f"{setting['kv_format']} keys and values",
        *([f"on {setting['device']}"] if setting["device"] != "cpu" else []),
        counted(setting["threads"], "thread"),
        setting["processor"],
        *([f"memory reads {report.read_bytes_per_s / 1e9:.1f} GB/s"] if report.read_bytes_per_s else []),
    ]
    emit(f"{setting['model']}: {', '.join(facts)}\n")
    if rated := [*report.prefill, *report.decode]:
        columns = ("test", "tokens/s", "median", "weights read", "GB/s", "of memory")
        cells = [
            (
                one.name,
                f"{one.mean_tokens_per_s:.2f} ± {one.sd_tokens_per_s:.2f}",
                f"{one.tokens_per_s:.2f}",
                size(one.weight_bytes),
                "" if one.gb_per_s is None else f"{one.gb_per_s:.1f}",
                _percent(one.bandwidth_share),
            )
            for one in rated
        ]
        emit("\n" + _on_disk(columns, rated, cells))
    if report.rows:
        columns = (f"rows @ d{report.rows[0].speed.depth}", "ms", "median", "over 1 row", "weights read", "of memory")
        cells = [
            (
                str(one.rows),
                f"{1e3 * one.speed.mean_s:.2f} ± {1e3 * one.speed.sd_s:.2f}",
                f"{1e3 * one.speed.median_s:.2f}",
                "" if one.over_one_row is None else f"{one.over_one_row:.2f}",
                size(one.speed.weight_bytes),
                _percent(one.speed.bandwidth_share),
            )
            for one in report.rows
        ]
        emit("\n" + _on_disk(columns, [one.speed for one in report.rows], cells))


OUTPUTS: Mapping[str, Callable[[Setting, SpeedReport], None]] = {
    "md": show_markdown,
    "csv": show_csv,
    "json": lambda setting, report: emit_json(setting | report.as_dict()),
}


PLAN = {
    "prompt_tokens": option("N", "Prefill this many tokens at once; 0 does not.", "--prompt-tokens", "-p", min=0),
    "new_tokens": option("N", "Decode this many tokens one by one; 0 does not.", "--new-tokens", "-n", min=0),
    "depths": options.numbers("LIST", "Do both after this many tokens of context, as 0,4096.", "--depth", "-d"),
    "sequences": options.numbers("LIST", "Decode with this many sequences together, as 1,32.", "--sequences", "-s"),
    "rows": options.numbers("LIST", "Forwards over this many rows, with the logits of all; or none.", "--rows"),
    "rows_depth": option("N", "Tokens of context that the forwards of --rows have.", min=0),
    "repetitions": option("N", "Rounds; everything has its turn in each.", "--repetitions", "-r", min=1),
}


@exit_codes()
@options.takes_fields("plan", Plan, PLAN)
@options.takes_running(*options.HOW, *options.ADAPTED)
def bench(
    model: options.ModelArgument,
    *,
    output: Annotated[str | None, option("FORMAT", "md, csv or json; md by default.", "--output", "-o")] = None,
    as_json: options.JsonOption = False,
    plan: Plan,
    running: options.Running,
) -> None:
    """Measure a model's speed: prefill, decoding, and forwards over a few rows. Random tokens, no sampling; of a chain, the target.

    Figures are means with standard deviations, and medians. Everything is measured in turn, round by round.
    """
    if output not in (None, *OUTPUTS):
        raise typer.BadParameter(f"there is no format {output!r}; wanted one of {', '.join(OUTPUTS)}")
    if as_json and output not in (None, "json"):
        raise typer.BadParameter(f"got --json and --output {output}; wanted one of them")
    checkpoint = open_target(model, adapts=True)
    plan.check(checkpoint.config, running.settings.max_rows)
    with load_backend(model, checkpoint, running) as backend:
        # Lines and no spinner: it would take turns with the measured threads.
        report = measure_speed(backend, plan, note)
        OUTPUTS["json" if as_json else output or "md"](describe_bench(model, backend, running.settings, plan), report)


def _on_disk(columns: Sequence[str], speeds: Sequence[Speed], rows: Sequence[tuple[str, ...]]) -> str:
    """A table, with two columns more where experts were read from the disk."""
    if all(one.disk_gb_per_s is None for one in speeds):
        return _table(columns, rows)
    told = [(f"{one.disk_gb_per_s or 0:.2f} GB/s", _percent(one.disk_wait_share)) for one in speeds]
    return _table((*columns, "from disk", "waiting"), [(*cells, *more) for cells, more in zip(rows, told, strict=True)])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is aligned as plain text, too: the first column to the left, figures to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [columns, rule, *rows]
    texts = [[cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))] for cells in lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in texts)

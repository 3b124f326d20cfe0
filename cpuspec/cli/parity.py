"""Reads the two sides of `cpuspec parity`, by name or as records, and prints their comparison."""

from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from cpuspec.backends import BACKENDS, check_backend
from cpuspec.checkpoints.recipes import DEFAULT_RECIPE
from cpuspec.cli import options
from cpuspec.cli.console import ERROR, Report, accepted, counted, emit, exit_codes, note, print_facts, print_report, size
from cpuspec.cli.machine import versions
from cpuspec.cli.opening import open_with_drafts
from cpuspec.cli.options import argument, flag, option
from cpuspec.cli.progress import busy, step_progress
from cpuspec.errors import ConfigError
from cpuspec.evaluate.certify import PROMPTS
from cpuspec.evaluate.parity import (
    NUM_TOKENS,
    TOP,
    WHOLE_ROWS,
    ModelIdentity,
    ParityLimits,
    Question,
    Recording,
    Side,
    compare_sides,
    open_side,
)
from cpuspec.evaluate.parity import record as record_side
from cpuspec.evaluate.parity_file import read_recording, write_recording
from cpuspec.evaluate.prompts import Prompt, prompt_ids, read_prompts, read_text_ids
from cpuspec.formats.kv import get_kv_format
from cpuspec.settings import AUTO, EngineConfig, SpecConfig, read_backend
from cpuspec.text import make_tokenizer


@exit_codes()
@options.takes_running("threads", "kv_format", with_backend=False)
def parity(
    *,
    model: options.ModelArgument = "",
    a: Annotated[
        str,
        argument("A", f"The reference: {', '.join(BACKENDS)}, with settings as in numba:threads=1, or a file that --record wrote."),
    ],
    b: Annotated[str | None, argument("B", "What is compared with it, likewise; without it A is recorded.")] = None,
    draft: Annotated[
        str | None, option("SPEC", "Answer with these drafts, too; by default none.", callback=options.known_draft)
    ] = None,
    prompts: Annotated[
        list[str] | None,
        option(
            "FILE:FIELD:N",
            "Answer a field of the first N lines of a JSON-lines file, :chat after it for conversations; by default some "
            "prompts of its own. Repeatable.",
        ),
    ] = None,
    texts: Annotated[
        list[str] | None,
        option("FILE:TOKENS", "Read the first tokens of a file, too, and compare the logits. Repeatable.", "--text"),
    ] = None,
    tokens: Annotated[int | None, option("N", f"Tokens of each answer; by default {NUM_TOKENS}, 0 reads only.", min=0)] = None,
    record: Annotated[Path | None, option("FILE", "Write what A said, to be compared with on another machine.")] = None,
    top: Annotated[int, option("N", "Likeliest ids that a record keeps of each row.", min=1)] = TOP,
    whole_rows: Annotated[int, option("N", "Rows of which a record keeps every logit.", min=0)] = WHOLE_ROWS,
    min_same_top: Annotated[float | None, option("SHARE", "Fail below this share of rows.", min=0, max=1)] = None,
    max_kl: Annotated[float | None, option("NATS", "Fail above this mean divergence, as far as it is known.", min=0)] = None,
    max_difference: Annotated[
        float | None, option("X", "Fail above this difference of two logits, as far as it is known.", min=0)
    ] = None,
    identical: Annotated[bool, flag("--identical", "Fail where a greedy answer differs.")] = False,
    as_json: options.JsonOption = False,
    running: options.Running,
) -> None:
    """Compare two backends, or a backend and a record from another machine: logits, greedy answers, drafts, speed.

    Exit code 0 says that the comparison was made, whatever differs; 1 that a limit given is not kept, or that drafts changed an
    answer of a backend which promises that they cannot.
    """
    names = [a] if b is None else [a, b]
    sides = [read_side(options.checked_text(name, "AB"[number]), running.settings) for number, name in enumerate(names)]
    if record is not None and (record.is_dir() or not record.parent.is_dir()):  # told before minutes of measuring
        raise typer.BadParameter(f"--record {record}: wanted a file in a directory that exists")
    if b is None and record is None:
        raise typer.BadParameter("there is nothing to compare with; name a second backend or record, or a file with --record")
    if record is not None and isinstance(sides[0], Recording):
        raise typer.BadParameter(f"--record writes what a backend says, and {a} is a record already")
    checkpoint, spec = None, SpecConfig()
    if not model and not all(isinstance(side, Recording) for side in sides):
        model = DEFAULT_RECIPE
    if model:
        checkpoint, spec = open_with_drafts(model, draft)
        spec = SpecConfig() if draft is None and spec == AUTO else spec
    identity = (
        ModelIdentity.from_checkpoint(checkpoint)
        if checkpoint
        else next(side.model for side in sides if isinstance(side, Recording))
    )
    questions = shared_questions(sides, identity)
    if questions is None:
        assert checkpoint is not None, "where there is no record there is a backend, which runs a model"
        asked: list[Prompt] = [
            one for text in prompts or () for one in read_prompts(options.checked_text(text, "--prompts")).prompts
        ]
        tokenizer, num_tokens = make_tokenizer(checkpoint), NUM_TOKENS if tokens is None else tokens
        questions = [Question(prompt_ids(tokenizer, one), num_tokens) for one in asked or PROMPTS]
        questions += [Question(read_text_ids(options.checked_text(text, "--text"), tokenizer), 0) for text in texts or ()]
    elif prompts or texts or tokens is not None:
        raise typer.BadParameter("--prompts, --text and --tokens are the record's own; leave them out")
    with ExitStack() as stack:
        loaded: list[Side] = []
        for name, side in zip(names, sides, strict=True):
            if isinstance(side, Recording):
                loaded.append(side)
                continue
            from cpuspec.kernels import isa  # imports numba

            assert checkpoint is not None, "a backend runs a model"
            now = datetime.now(UTC).isoformat(timespec="seconds")
            about = {"name": name, "processor": isa.describe(), "date": now, "versions": versions()}
            with busy(f"loading {name}"):
                live = open_side(side.backend, checkpoint, questions, spec, side.settings, about)
                loaded.append(stack.enter_context(live))
        with step_progress(tenths=False) as progress:
            if record is not None:
                beside = loaded[1] if b is not None else None
                write_recording(record_side(loaded[0], identity, questions, beside, top, whole_rows, progress), record)
            found = compare_sides(loaded[0], loaded[1], questions, progress) if b is not None else None
    if record is not None:
        note(f"{record} has what {a} said ({size(record.stat().st_size)})")
    if found is None:
        return
    failures = found.failures(ParityLimits(min_same_top, max_kl, max_difference, identical))
    files = [dict(file) for file in identity.files]
    subject = {"benchmark": "parity", "model": identity.name, "files": files}
    print_report(subject | {"passed": not failures, "failures": failures} | found.as_dict(), as_json, show_parity)
    if failures:
        raise typer.Exit(ERROR)


def read_side(text: str, settings: EngineConfig) -> options.Running | Recording:
    """A backend with its settings, as numba:threads=1; otherwise the record in the file of that name.

    Raises BadParameter where it is neither.
    """
    if text.partition(":")[0] not in BACKENDS and (Path(text).is_file() or text.endswith((".json", ".safetensors"))):
        return read_recording(Path(text))
    with options.usage_errors():
        backend, settings = read_backend(text, settings)
        check_backend(backend, settings)
        get_kv_format(settings.kv_format)
    return options.Running(backend, settings)


def shared_questions(sides: list[options.Running | Recording], model: ModelIdentity | None) -> list[Question] | None:
    """The questions of the records among the sides, None without a record. Raises ConfigError unless they and the model agree."""
    runs = [side for side in sides if isinstance(side, Recording)]
    for run in runs:
        (model or runs[0].model).check_same(run.model, run.about["recorded"])
        if run.questions != runs[0].questions:
            first, other = runs[0].about["recorded"], run.about["recorded"]
            raise ConfigError(f"{first} and {other} answer different prompts; record one of them beside the other")
    return runs[0].questions if runs else None


def show_parity(report: Report) -> None:
    """Print the figures, and what they are computed from where that is not everything."""
    a, b = report["a"], report["b"]
    at_most = "" if report["exact"] else "at least "
    facts = [
        (f"{report['model']}", f"{_name(a)} (the reference) and {_name(b)}"),
        ("logits", f"largest difference {at_most}{report['max_abs_logit_difference']:.4g} in {report['num_rows']} rows"),
        (
            "KL divergence",
            f"mean {at_most}{report['kl_mean']:.3g}, median {report['kl_median']:.3g}, 99 % {report['kl_p99']:.3g}, "
            f"most {report['kl_max']:.3g}",
        ),
        ("same likeliest token", f"{report['same_top']:.2%} of rows"),
        ("greedy answers", f"{report['num_identical']} of {report['num_prompts']} identical" if report["num_prompts"] else "none"),
        *(("", line) for line in _differences(report)),
        *(line for side in (a, b) for line in _speed(side)),
    ]
    if not report["exact"]:
        most = report["whole_rows_max_abs_logit_difference"]
        differ = "" if most is None else f", in which they differ by at most {most:.4g}"
        facts += [
            ("from records", f"ids with {report['covered_mean']:.2%} of the probability (at least {report['covered_min']:.2%})"),
            ("", f"every logit of {report['whole_rows']} rows{differ}"),
        ]
    print_facts(facts)
    for failure in report["failures"]:
        emit(f"NOT KEPT: {failure}\n")


def _differences(report: Report) -> list[str]:
    lines = []
    for number, one in enumerate(report["prompts"], 1):
        if (first := one["first_difference"]) is not None:
            margins = ["an unknown margin" if margin is None else f"{margin:.3g}" for margin in first["margins"]]
            leads = f"{report['a']['name']} leads with its own by {margins[0]}, {report['b']['name']} by {margins[1]}"
            lines.append(f"prompt {number} parts at token {first['position'] + 1} of {one['num_tokens']}: {leads}")
    return lines


def _speed(side: Report) -> list[tuple[str, str]]:
    """A side's rates, and what became of its drafts."""
    threads = counted(side["threads"], "thread") if "threads" in side else "threads unknown"
    lines = [(_name(side), f"{_rate(side['tokens_per_s'])}, {threads}")]
    if drafted := side["drafted"]:
        same = f"{drafted['num_identical']} of {drafted['num_answers']} answers identical to plain ones"
        lines.append(("", f"{_rate(drafted['tokens_per_s'])} with {side.get('draft', 'drafts')}, {same}"))
        for name, level in drafted["levels"].items():
            fate = accepted(level["num_accepted_tokens"], level["num_draft_tokens"])
            lines.append(("", f"{name}: {fate} ({level['accepted_per_proposed']:.0%})"))
        if not drafted["levels"]:
            lines.append(("", "nothing was drafted, so this says nothing of drafts"))
    return lines


def _name(side: Report) -> str:
    return f"{side['name']} ({side['recorded']})" if side["recorded"] else side["name"]


def _rate(tokens_per_s: float | None) -> str:
    return "no speed measured" if tokens_per_s is None else f"{tokens_per_s:.1f} tokens/s"

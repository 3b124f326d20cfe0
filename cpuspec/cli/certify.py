"""Prints the certificate of `cpuspec certify`, with the model and the machine that it is about."""

from typing import Annotated

import typer

from cpuspec.checkpoints.gguf_parts import file_identity
from cpuspec.cli import options
from cpuspec.cli.console import ERROR, Report, accepted, exit_codes, note, print_facts, print_report
from cpuspec.cli.machine import describe_run, versions
from cpuspec.cli.opening import open_with_drafts
from cpuspec.cli.options import option
from cpuspec.evaluate.certify import MIN_SAMPLES, NUM_SAMPLES, PROMPTS
from cpuspec.evaluate.certify import certify as certify_drafts
from cpuspec.evaluate.prompts import read_prompts


@exit_codes()
@options.takes_running("draft_format", "draft_vocab", *options.HOW)
def certify(
    model: options.ModelArgument,
    *,
    draft: options.DraftOption = None,
    prompts: Annotated[
        str | None,
        option(
            "FILE:FIELD:N",
            "Greedy answers to a field of the first N lines of a JSON-lines file, :chat after it for conversations; "
            "by default to some prompts of its own.",
        ),
    ] = None,
    tokens: Annotated[int, option("N", "Tokens of each greedy answer.", min=1)] = 128,
    samples: Annotated[int, option("N", "Sampled answers at each of three temperatures.", min=MIN_SAMPLES)] = NUM_SAMPLES,
    running: options.Running,
    as_json: options.JsonOption = False,
) -> None:
    """Test that drafts change no answer: greedy token ids, and the distribution of sampled ones. Exit code 1 if they do.

    The distribution is tested by chi-square, which must also reject a proposer that lies.
    """
    questions = PROMPTS if prompts is None else read_prompts(options.checked_text(prompts, "--prompts")).prompts
    checkpoint, spec = open_with_drafts(model, draft)
    if not spec.levels:
        raise typer.BadParameter("there is no draft to certify; name one with --draft, as --draft ngram")
    backend, settings = running
    found = certify_drafts(checkpoint, spec, questions, tokens, samples, backend=backend, settings=settings, on_progress=note)
    about = {"files": file_identity(checkpoint.path), "versions": versions()}
    print_report(describe_run(model, backend, settings) | about | found.as_dict(), as_json, show_certificate)
    if not found.passed:
        raise typer.Exit(ERROR)


def show_certificate(report: Report) -> None:
    """Print the verdicts, and the figures under them."""
    greedy, sampled, arms = report["greedy"], report["sampled"], report["greedy"]["arms"]
    same = min(arm["num_identical"] for arm in arms)
    lowest = min(one["p_value"] for one in sampled["comparisons"])
    facts = [
        (f"{report['model']}, draft {report['spec']}", "certified" if report["passed"] else "NOT CERTIFIED"),
        (
            "greedy",
            f"{same} of {greedy['num_prompts']} prompts identical in each of {len(arms)} ways, {greedy['num_tokens']} tokens",
        ),
        ("", _drafts(sum(arm["num_accepted_tokens"] for arm in arms), sum(arm["num_draft_tokens"] for arm in arms))),
        ("sampled", f"{'follows' if sampled['passed'] else 'DOES NOT FOLLOW'} the model's distribution"),
        ("", f"smallest of {len(sampled['comparisons'])} p-values {lowest:.3g}, rejected below {sampled['level']:.2g}"),
        ("", _drafts(sampled["num_accepted_tokens"], sampled["num_draft_tokens"])),
        ("control", "a lie is seen" if report["control_rejected"] else "A LIE IS NOT SEEN: too weak, use more --samples"),
    ]
    if states := report.get("states"):
        ways = sum(way["differs"] is None for way in states["ways"])
        facts[-1:-1] = [("states", f"rows are those of one forward in {ways} of {len(states['ways'])} ways of reading")]
    print_facts(facts)


def _drafts(num_accepted: int, num_drafted: int) -> str:
    return accepted(num_accepted, num_drafted) if num_drafted else "NOTHING WAS DRAFTED, so this says nothing of drafts"

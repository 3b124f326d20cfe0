"""What `cpuspec certify` shows: a certificate with what it is about, as JSON or in some lines."""

from cpuspec.checkpoints import Checkpoint
from cpuspec.cli.console import Report, accepted, print_facts
from cpuspec.cli.machine import describe_run, versions
from cpuspec.config import EngineConfig
from cpuspec.evaluate.certify import Certificate, file_identity


def describe_certificate(model: str, checkpoint: Checkpoint, backend: str, settings: EngineConfig, found: Certificate) -> Report:
    """The certificate, the model's files with their sha256, and what ran them."""
    return {
        **describe_run(model, backend, settings),
        "files": file_identity(checkpoint.path),
        "versions": versions(),
        **found.as_dict(),
    }


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
        (
            "control",
            "a lie is seen" if report["control_rejected"] else "A LIE IS NOT SEEN: too weak, use more --samples",
        ),
    ]
    print_facts(facts)


def _drafts(num_accepted: int, num_drafted: int) -> str:
    return accepted(num_accepted, num_drafted) if num_drafted else "NOTHING WAS DRAFTED, so this says nothing of drafts"

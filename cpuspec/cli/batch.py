"""What `cpuspec batch` tells of a run."""

from cpuspec.batch.run import Summary
from cpuspec.cli.console import accepted, counted


def describe_batch(summary: Summary) -> str:
    """A summary in a line."""
    parts = [
        *([f"{counted(summary.num_kept, 'line')} answered before"] if summary.num_kept else []),
        f"{counted(summary.num_answered, 'line')} answered in {summary.duration_s:.1f} s",
        *([f"{summary.num_errors} of them with an error"] if summary.num_errors else []),
        f"{counted(summary.num_new_tokens, 'token')}, {summary.as_dict()['tokens_per_s']:.1f} tokens/s",
        *([accepted(summary.num_accepted_tokens, summary.num_draft_tokens)] if summary.num_draft_tokens else []),
        *(["interrupted: the same command goes on from here"] if summary.interrupted else []),
    ]
    return "; ".join(parts)

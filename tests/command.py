"""The command line for tests: its commands run in this process."""

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from cpuspec.cli.app import app
from tests.backends.models import SMALL
from tools.make_tiny_model import make_tiny_gguf

NUMPY = ("--backend", "numpy")
ENDLESS = (*NUMPY, "--ignore-eos")  # an answer has as many tokens as it may
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # that a terminal obeys


def run(*arguments: str, stdin: str | bytes | None = None) -> Any:
    """The result of a command: its exit code, stdout and stderr."""
    return CliRunner().invoke(app, list(arguments), input=stdin, prog_name="cpuspec")


def ok(*arguments: str, stdin: str | bytes | None = None) -> str:
    """The stdout of a command that must succeed."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def report_of(*arguments: str) -> Any:
    """The JSON that a command prints with --json."""
    return json.loads(ok(*arguments, "--json"))


def refused(*arguments: str, code: int | tuple[int, ...], message: str, stdin: str | bytes | None = None) -> None:
    """Assert that a command ends with an exit code, a message and without output."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code in (code if isinstance(code, tuple) else (code,)), result.output
    assert result.stdout == ""
    assert message in " ".join(result.stderr.replace("│", " ").split())


def small_model(path: Path, **shape: Any) -> str:
    """The path of a small random GGUF file."""
    return str(make_tiny_gguf(path, **SMALL | shape))

"""What the tests of benchmarks share: memory whose speed is known without measuring it, and a way to run a command."""

import json

import pytest
import record
from typer import Typer
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def _bandwidth(monkeypatch):
    monkeypatch.setattr(record, "read_bandwidth", lambda threads: 1e9 * threads)


@pytest.fixture
def run(tmp_path):
    """Runs a benchmark's `main` with arguments; returns the result, and what `--json` has written, None for nothing."""
    path = tmp_path / "saved.json"

    def run(main, *arguments):
        app = Typer()
        app.command()(main)
        result = CliRunner().invoke(app, [*map(str, arguments), "--json", str(path)])
        return result, json.loads(path.read_text("utf-8")) if path.exists() else None

    return run


@pytest.fixture
def measured(run):
    """Runs a benchmark that must succeed; returns what it has written, and the result."""

    def measured(main, *arguments):
        result, saved = run(main, *arguments)
        assert result.exit_code == 0, result.output
        return saved, result

    return measured

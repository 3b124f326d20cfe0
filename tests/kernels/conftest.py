"""What tests of machine code share."""

from collections.abc import Callable
from typing import Any

import pytest

from cpuspec.kernels import machine_code


def kept() -> list[str]:
    """The names of files with machine code and verdicts."""
    return sorted(path.name for path in machine_code.kernel_directory().iterdir() if path.suffix != ".lock")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was compiled since this list was last cleared."""
    done, compile_ = list[object](), machine_code._compile

    def watched(python: Callable[..., Any], *rest: Any) -> bytes:
        done.append(python)
        return compile_(python, *rest)

    monkeypatch.setattr(machine_code, "_compile", watched)
    return done

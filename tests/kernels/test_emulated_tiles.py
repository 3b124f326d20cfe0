"""Kernels in tile registers, on processors without them: every test of kernels passes with emulated ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpuspec.kernels import isa

# The slow run has every test of kernels but those of what a processor has.
_FEW = (
    "tests/kernels/test_bits.py",
    "-k",
    "(q4_k and (of_codes or dequantized) and not int16) or (superblocks and q6_k) or (of_bf16 and sizes0-50-bf16)",
)
_ALL = ("tests/kernels", "--ignore", "tests/kernels/test_isa.py", "--ignore", __file__)


@pytest.mark.skipif(isa.has_tiles() or not isa.has_bf16_dots(), reason="there are real ones, or no AVX-512 with bf16")
@pytest.mark.parametrize("tests", [_FEW, pytest.param(_ALL, marks=pytest.mark.slow)])
def test_kernels_in_tile_registers_are_right(tests: tuple[str, ...]) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.kernels.emulated_tiles", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=root, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout

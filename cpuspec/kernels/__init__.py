"""Compiled kernels in Numba: vector values, linear layers, attention, pointwise operations, and the thread team.

They know weight formats and addresses, and no model. They check nothing: whoever passes an address has checked it.

Machine code is kept in the user's cache, in a directory named after everything it was made from: the sources of this package
and of the formats, Numba's and LLVM's versions, and the processor's features. Numba's own cache would miss a change in another
file's intrinsic.
"""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding

from cpuspec import formats
from cpuspec.environment import cache_dir, sources_digest
from cpuspec.kernels import isa

_config: Any = numba.config


def _fingerprint() -> str:
    sources = [sources_digest(Path(file).parent) for file in (__file__, formats.__file__)]
    facts = (sources, sys.version, numba.__version__, binding.llvm_version_info, isa.describe(), sorted(isa.features()))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


# Taken once: sources edited under a running process must not get its machine code.
_FINGERPRINT = _fingerprint()


def kernel_directory() -> Path:
    """Where machine code for these sources and this processor is kept."""
    return cache_dir() / "kernels" / _FINGERPRINT


def compiled_before() -> bool:
    """Whether a start finds machine code on the disk; if not it compiles for some seconds."""
    return any(kernel_directory().glob("*/step.run-*.nbc"))


@contextmanager
def kept_machine_code() -> Iterator[None]:
    """Functions declared inside keep their machine code in `kernel_directory`; other users of Numba notice nothing.

    A directory that cannot be written costs a compilation at every start and nothing else.
    """
    before = _config.CACHE_DIR
    directory = kernel_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _config.CACHE_DIR = str(directory)
    except OSError:
        pass
    try:
        yield
    finally:
        _config.CACHE_DIR = before


with kept_machine_code():
    from cpuspec.kernels import attention, encode, linear, pointwise, simd, step, team

__all__ = [
    "attention",
    "compiled_before",
    "encode",
    "isa",
    "kept_machine_code",
    "kernel_directory",
    "linear",
    "pointwise",
    "simd",
    "step",
    "team",
]

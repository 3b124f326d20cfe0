"""Which instructions the kernels may use on this processor, chosen once when kernels are first imported."""

from functools import cache
from typing import Any, NamedTuple

import numba
from llvmlite import binding

from cpuspec.errors import BackendError
from cpuspec.platform import SYSTEM

_config: Any = numba.config

_NEEDED = ("avx2", "fma", "f16c")


@cache
def features() -> frozenset[str]:
    """LLVM's names of the processor features that Numba compiles for (its NUMBA_CPU_FEATURES override included)."""
    text = _config.CPU_FEATURES
    if text is None:
        return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)
    return frozenset(part[1:] for part in text.split(",") if part.startswith("+"))


@cache
def dot_isa() -> str:
    """How four bytes are multiplied and added into 32 bits: one of avx512_vnni, avx_vnni, avx2. All give the same bits."""
    if "avx512vnni" in features():
        return "avx512_vnni"
    if "avxvnni" in features():
        return "avx_vnni"
    return "avx2"


def has_sixteen_registers() -> bool:
    """Whether linear layers use sixteen registers of 256 bits instead of 32 of 512."""
    return dot_isa() != "avx512_vnni"


@cache
def lookup_isa() -> str:
    """How bytes are looked up in a table of sixteen: one of avx512bw, avx2. Both give the same bits."""
    return "avx512bw" if "avx512bw" in features() else "avx2"


class PrefetchPlan(NamedTuple):
    """How kernels read weights from memory."""

    streams: int  # tiles that a thread reads in turns, each from its own place in memory
    ahead: int  # bytes between what is multiplied and what is prefetched
    into_first: bool  # for few rows: into the first cache, too, and not into the second alone


@cache
def prefetch_plan() -> PrefetchPlan:
    """The fastest plan on this processor, whatever features are held back. Four streams are best on Xeons with AMX
    (benchmarks/DECISIONS.md#streams). On Zen 3 no other number was measured.
    """
    known = {"znver5": PrefetchPlan(1, 4096, True), "znver4": PrefetchPlan(1, 8192, False)}
    return known.get(binding.get_host_cpu_name(), PrefetchPlan(4, 4096, True))


@cache
def has_tiles() -> bool:
    """Whether the bytes of many rows are multiplied in tile registers (AMX): the processor has them, and the operating system lets
    this process use them. Results have the same bits either way.
    """
    return {"amx-int8", "amx-tile", "avx512f"} <= features() and SYSTEM.enable_tile_registers()


@cache
def has_bf16_tiles() -> bool:
    """Whether bf16 numbers are multiplied in tile registers. Results have the same bits either way.

    Vector instructions round numbers for these registers. A virtual machine may have the registers and hide the instructions.
    """
    return {"amx-bf16", "amx-tile", "avx512f", "avx512bf16"} <= features() and SYSTEM.enable_tile_registers()


def has_bf16_dots() -> bool:
    """Whether attention over prompts may multiply bf16 numbers: in tile registers, or in vectors where there are none."""
    return {"avx512f", "avx512bf16"} <= features()


def check_processor() -> None:
    """Raise BackendError on a processor that the kernels cannot be compiled for, or that could not run them."""
    absent = sorted(name for name in features() if binding.get_host_cpu_features().get(name) is False)
    if absent:
        raise BackendError(
            f"NUMBA_CPU_FEATURES names {', '.join(absent)}, which this processor ({binding.get_host_cpu_name()}) or its operating "
            "system lacks; kernels would end the process: leave them out"
        )
    missing = [name for name in _NEEDED if name not in features()]
    if missing:
        raise BackendError(
            f"the numba backend needs a processor with {', '.join(_NEEDED)} (x86 since 2013); {_processor()} lacks "
            f"{', '.join(missing)}: use --backend numpy"
        )


def _processor() -> str:
    return _config.CPU_NAME or binding.get_host_cpu_name()


def target() -> tuple[str, str]:
    """The processor's name and features as LLVM's target machines take them."""
    text = _config.CPU_FEATURES
    return _processor(), binding.get_host_cpu_features().flatten() if text is None else text


def describe() -> str:
    """The choice in words, for people and for names of what is kept. LLVM names a processor it does not know after another one."""
    return f"{SYSTEM.processor_name()}, {dot_isa()}{', amx' if has_tiles() else ''}"

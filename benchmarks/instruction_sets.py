"""The instruction sets in which engines are compared: their names, what each needs, and how cpuspec is held back to one.

A held-back cpuspec is compiled for x86-64-v3 and the listed features (`cpuspec/kernels/README.md`). Where the processor has nothing
better than the instruction set asked for, nothing is held back: cpuspec then runs as its users run it.
"""

from record import PeerError, read_names

from cpuspec.kernels import isa

NATIVE = "native"  # whatever the processor has, and llama.cpp as its directory has it

_V3 = ("avx", "avx2", "fma", "f16c", "sse3", "ssse3", "sse4.1", "sse4.2")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni")

# LLVM's names of the features; the best instruction set first.
FEATURES = {
    "amx": (*_V4, "amx-tile", "amx-int8", "amx-bf16"),
    "avx512_vnni": _V4,
    "avx_vnni": (*_V3, "avxvnni"),
    "avx2": _V3,
}

# Features that llama.cpp reports of itself (ggml/src/ggml-cpu/ggml-cpu.cpp), the best first, and the instruction set of each.
_LLAMA_CPP_FEATURES = {
    "AMX_INT8": "amx",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512": "avx512",
    "AVX_VNNI": "avx_vnni",
    "AVX2": "avx2",
    "AVX": "avx",
}


def available() -> list[str]:
    """The instruction sets that this processor has, the best first."""
    return [name for name, needed in FEATURES.items() if isa.features().issuperset(needed) and (name != "amx" or isa.has_tiles())]


def read_instruction_sets(text: str) -> list[str]:
    """Names separated by commas. Raises BadParameter for an unknown one, PeerError for none and for one that is not here."""
    names, here = read_names(text, (NATIVE, *FEATURES)), available()
    if lacking := [name for name in names if name not in (NATIVE, *here)]:
        raise PeerError(f"--isa {text}: this processor lacks {lacking[0]}; it has {', '.join(here) or 'none of them'}")
    if not names:
        raise PeerError(f"--isa names no instruction set; wanted some of {', '.join((NATIVE, *FEATURES))}")
    return names


def held_back(name: str) -> dict[str, str]:
    """Environment variables for a process whose cpuspec shall use `name` and nothing better; none where it would anyway."""
    if name in (NATIVE, in_use()):
        return {}
    return {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in FEATURES[name])}


def in_use() -> str:
    """The best instruction set that cpuspec's kernels use in this process."""
    return "amx" if isa.has_tiles() else isa.dot_isa()


def of_llama_cpp(system_info: str) -> str | None:
    """The best instruction set in what `llama_print_system_info` returns; None if that names none."""
    there = {part.rpartition(":")[2].partition("=")[0].strip() for part in system_info.split("|") if part.strip().endswith("= 1")}
    return next((name for feature, name in _LLAMA_CPP_FEATURES.items() if feature in there), None)


def build_text(name: str | None, own: str) -> str:
    """What a build for `name` is called beside a cpuspec that uses `own`: without it, where the build lacks it."""
    if name is None:
        return "unknown instructions"
    ranks = list(_LLAMA_CPP_FEATURES.values())
    return f"{name} without {own}" if ranks.index(name) > ranks.index(own) else name

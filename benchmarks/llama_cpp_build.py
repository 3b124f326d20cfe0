"""Which build of llama.cpp is measured: its programs, the library in front of its own, and the instructions that this one uses.

Libraries are chosen through LD_LIBRARY_PATH, and llama.cpp itself tells what it then uses: a figure never carries a wrong name.
"""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from instruction_sets import NATIVE, of_llama_cpp
from record import PeerError

_SYSTEM_INFO = Path(__file__).resolve().parent / "peer_workers" / "llama_cpp_system_info.py"
_TIMEOUT_S = 60
_CACHE = "CMakeCache.txt"


@dataclass(frozen=True)
class Build:
    """Programs in a directory, and another directory whose programs and libraries are preferred to those.

    system_info: in llama.cpp's own words; "" where no shared library can be asked.
    """

    programs: Path
    variant: Path | None = None
    system_info: str = ""

    @property
    def instructions(self) -> str | None:
        """The best instruction set that it uses; None if that is not known."""
        return of_llama_cpp(self.system_info)

    @property
    def about(self) -> str:
        """Which libraries these are and what they use, in words."""
        where = f"{self.variant.parent.name}/{self.variant.name}" if self.variant else "its own"
        flags = self.flags or "unknown, as there is no CMakeCache.txt beside or above the programs"
        info = self.system_info or "unknown, as there is no libllama.so"
        return f"libraries: {where}; system info: {info}; build flags: {flags}"

    @property
    def flags(self) -> str:
        """What CMake was told for this build, from the file that it leaves in the directory of a build; "" where there is none."""
        caches = [path for path in (self.programs / _CACHE, self.programs.parent / _CACHE) if path.is_file()]
        found = (
            re.findall(r"^(GGML_\w+:BOOL=ON|CMAKE_(?:BUILD_TYPE|C(?:XX)?_FLAGS):\w+=.+)$", caches[0].read_text("utf-8"), re.M)
            if caches
            else []
        )
        return " ".join(re.sub(r":\w+=", "=", one, count=1) for one in found)

    def find(self, pattern: str) -> Path | None:
        """The first file whose name matches, in the variant or else beside the programs; None if there is none."""
        directories = [*([self.variant] if self.variant else []), self.programs]
        return next((path for directory in directories for path in sorted(directory.glob(pattern)) if path.is_file()), None)

    def environment(self) -> dict[str, str]:
        """This process's environment for a child that loads these libraries."""
        paths = [str(self.variant.absolute())] if self.variant else []
        paths += [os.environ["LD_LIBRARY_PATH"]] if os.environ.get("LD_LIBRARY_PATH") else []
        return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths)} if paths else {**os.environ}


def open_build(programs: Path, variant: Path | None = None) -> Build:
    """The build with its system info. Raises PeerError if its library does not run here: it may be for another processor."""
    build = Build(programs, variant)
    library = build.find("libllama.so*")
    if library is None:
        return build
    command = [sys.executable, str(_SYSTEM_INFO), str(library.absolute())]
    try:
        done = subprocess.run(
            command, env=build.environment(), capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"{library} did not tell its system info within {_TIMEOUT_S} s") from error
    if done.returncode:
        raise PeerError(f"{library}, asked for its system info, {ended(done)}")
    return replace(build, system_info=done.stdout.strip())


def find_build(programs: Path, variants: Path | None, isa: str) -> Build:
    """The build for an instruction set: VARIANTS/ISA if there is one, else the directory's own if it is for that. Raises PeerError.

    variants: by default the directory `variants` beside the programs. Native is the directory's own, whatever that is for.
    """
    if variants is not None and not variants.is_dir():
        raise PeerError(f"there is no directory {variants} of llama.cpp's variants")
    if isa == NATIVE:
        return open_build(programs)
    variant = (variants or programs / "variants") / isa
    build = open_build(programs, variant if variant.is_dir() else None)
    if build.instructions != isa:
        which = f"that in {variant}" if build.variant else f"there is no {variant}, and that in {programs}"
        raise PeerError(
            f"no build of llama.cpp for {isa} is known: {which} is for {build.instructions or 'unknown instructions'}; build "
            f"its ggml-cpu for {isa} and put it into {variant}, or name another directory with --llama-cpp-variants"
        )
    return build


def ended(done: subprocess.CompletedProcess[str]) -> str:
    """How a program that failed ended, with its last words."""
    words = f": {done.stderr[-500:].strip()}" if done.stderr.strip() else ""
    if done.returncode == -signal.SIGILL:
        return f"was ended by SIGILL: it is built for instructions that this processor lacks{words}"
    return (
        f"was ended by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else f"failed with {done.returncode}"
    ) + words

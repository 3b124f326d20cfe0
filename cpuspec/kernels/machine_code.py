"""Kernels as machine code: C functions of int64s that Numba compiles once, and LLVM's linker alone loads at every later start.

Numba has a disk cache of its own. To read it, it prepares a whole compiler, which takes longer than all else at a start; and it
would miss a change in another file's intrinsic. So machine code is kept here, in a directory named after all that it is made
from: the sources of this package and of what it takes constants from, Numba's and LLVM's versions, and the processor's features.
The directories that were not used for longest are removed.

Loading a file is running it. So the directories and files must belong to this user or root, and no other user may write them.
"""

import atexit
import ctypes
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from llvmlite import binding
from numba import types
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock

from cpuspec import config, formats, kernels, platform
from cpuspec.environment import cache_dir, importing_environment, sources_digest, usable_cores, who_else_writes
from cpuspec.errors import BackendError, CpuspecError
from cpuspec.files import why_unwritable, write_file
from cpuspec.kernels import isa
from cpuspec.kernels.options import OPTIONS
from cpuspec.platform import SYSTEM


def _fingerprint() -> str:
    processor = (isa.describe(), isa.target(), sorted(isa.features()))
    facts = (
        sources_digest(kernels, formats, platform, config),
        sys.version,
        numba.__version__,
        binding.llvm_version_info,
        processor,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


_log = logging.getLogger(__name__)
_one_at_a_time = threading.RLock()

_COMPILER_BYTES = 1 << 30  # that compiling takes, and some more
_MOST_BYTES = 1 << 26  # of a kernel's file; a large one has 200 kB
_MOST_DIRECTORIES = 24  # of other sources, compilers and processors; a directory has some megabytes
_LONGEST_WAIT_S = 120.0  # for another process that compiles: it may have been stopped
_ENDED = "a process ended while it ran the kernel for the first time"
_elsewhere: dict[str, "subprocess.Popen[bytes]"] = {}  # by the name of a kernel, the process that compiles it
_differing: dict[Path, str] = {}  # what this process found against kernels, by the place of the verdict

_Way = TypeVar("_Way")
Check = Callable[[int], str]  # (address of a kernel) -> what its results differ in from those of its twin; "" for nothing


class KernelDiffersError(BackendError):
    """A kernel that was compiled for this processor, and whose results are not those that it should have."""

    def __init__(self, name: str, why: str) -> None:
        self.fact = f"the kernel {name}, compiled for {isa.describe()}, does not compute what it should: {why}"
        super().__init__(f"{self.fact}; use --backend numpy, and report this")


# Taken once: sources edited under a running process must not get its machine code.
_FINGERPRINT = _fingerprint()


def kernel_directory() -> Path:
    """The directory of machine code for these sources and this processor. Users who share a cache have one each."""
    directory = cache_dir() / "kernels" / _FINGERPRINT
    return directory.with_name(f"{_FINGERPRINT}-{os.geteuid()}") if _who_else_fills(directory) else directory


def fingerprint() -> str:
    """Names all that machine code is made from, and so all that it makes: sources, compiler, and the processor's features."""
    return _FINGERPRINT


def compiled_before() -> bool:
    """Whether a start finds machine code on the disk; if not it compiles for some seconds."""
    return (kernel_directory() / "run.o").exists()


def address(
    name: str, num_arguments: int, make: Callable[[], Callable[..., Any]], returns: bool = False, check: Check | None = None
) -> int:
    """Address of a C function of `num_arguments` int64s that returns an int64 or nothing, compiled unless it is on the disk.

    name: tells it from every other kernel. make: gives the Python function that Numba compiles; it allocates and raises nothing,
    because Numba's runtime is not there when it comes from the disk. check: run once, when the function was compiled; what it finds
    is kept in the function's place. Raises BackendError if it cannot be compiled, KernelDiffersError if the check found something.
    A directory that this user cannot write, or another user can, costs a compilation at every start, which is told, and nothing
    else.
    """
    directory = kernel_directory()
    path = directory / f"{name}.o"
    with _one_at_a_time:
        others = _who_else_fills(directory)
        if not others:
            _note_use(directory)
        if (why := _verdict(path, others)) and why != _ENDED:
            raise KernelDiffersError(name, why)
        found = None if others else _load(path)
        if found is None and (child := _elsewhere.get(name)) and child.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_LONGEST_WAIT_S)
            found = _load(path)
        if found is None:
            _tell_of_compiling(directory, is_ours=not others)
            if directory.name != _FINGERPRINT:
                _warn_of(directory.with_name(_FINGERPRINT), directory if not others else None)
            with _compiling_alone(path) if not others else nullcontext():
                found = None if others else _load(path)
                if found is None:
                    if why := _verdict(path, others):
                        raise KernelDiffersError(name, why)
                    try:
                        body = _compile(make(), num_arguments, returns)
                    except Exception as error:
                        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                        raise BackendError(
                            f"the kernel {name} cannot be compiled for {isa.describe()}; use --backend numpy and report this: {why}"
                        ) from error
                    found = _link(body)
                    if check and (why := _checked(path, others, check, found)):
                        raise KernelDiffersError(name, why)
                    if not others:
                        try:
                            _keep(body, path)
                        except OSError as error:  # told already, unless the disk was filled by this very file
                            _log.debug("%s was not kept: %s", path, error)
    return found


def first_sound(ways: Sequence[Callable[[], _Way]]) -> _Way:
    """What the first of some ways to compute something gives whose kernels pass their checks, the quickest way first. Ways that are
    passed over are logged. Raises KernelDiffersError if all are.
    """
    *quicker, last = ways
    for way in quicker:
        try:
            return way()
        except KernelDiffersError as error:
            _tell_of_passing_over(error.fact)
    return last()


def passed_over() -> dict[str, str]:
    """Kernels of `kernel_directory` that are not used, by name, and what was found when they were run for the first time."""
    directory = kernel_directory()
    paths = {*_differing, *([] if _who_else_fills(directory) else directory.glob("*.differs"))}
    return {path.stem: why for path in sorted(paths) if path.parent == directory and (why := _verdict(path, ""))}


def _verdict(path: Path, others: str) -> str:
    """What a check found against the kernel whose place is `path`; "" for nothing, or if it was not checked."""
    note = path.with_suffix(".differs")
    return _differing.get(note) or ("" if others else (_read(note) or b"").decode())


def _checked(path: Path, others: str, check: Check, found: int) -> str:
    """What a check finds against a kernel, kept in its place. Whether a process ends in the check is seen by the next one."""
    note, why = path.with_suffix(".differs"), ""
    try:
        with suppress(OSError):
            if not others:
                _keep(_ENDED.encode(), note)
        why = check(found)
        if why:
            _differing[note] = why
            with suppress(OSError):
                if not others:
                    _keep(why.encode(), note)
    finally:
        if not why and not others:
            note.unlink(missing_ok=True)
    return why


def compile_elsewhere(name: str, code: str) -> None:
    """Let another process compile a kernel and keep it, beside what this one does; `address` waits for it.

    code: Python that asks for the kernel's address. Nothing happens where the kernel is there or cannot be kept, or where there
    is no second core or not the memory for another compiler.
    """
    directory, available = kernel_directory(), SYSTEM.memory().available
    with _one_at_a_time:
        if name in _elsewhere or (directory / f"{name}.o").exists() or usable_cores() == 1 or not sys.executable:
            return
        if (
            (available is not None and available < _COMPILER_BYTES)
            or _who_else_fills(directory)
            or why_unwritable(directory, 0o755)
        ):
            return
        _tell_of_compiling(directory, is_ours=True)
        with suppress(OSError):  # no processes, or no memory for one
            _elsewhere[name] = child = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                env=importing_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            atexit.register(child.kill)


def function(address: int, num_arguments: int, returns: bool = False) -> Callable[..., Any]:
    """A C function of `address` for Python. Other threads run while it does."""
    return ctypes.CFUNCTYPE(ctypes.c_int64 if returns else None, *[ctypes.c_int64] * num_arguments)(address)


def _who_else_fills(directory: Path) -> str:
    """Who else can put files into a directory, in the words of `who_else_writes`; "" if none can or there is no directory.

    If it is a link, both the link and the directory are checked.
    """
    try:
        return who_else_writes(directory.lstat()) or who_else_writes(directory.stat())
    except OSError:  # there is none yet
        return ""


@cache
def _note_use(directory: Path) -> None:
    """Make a directory the one that was used last, and remove those that were not used for longest if there are many."""
    with suppress(OSError):
        if directory.exists():
            os.utime(directory)
        others = [one for one in directory.parent.iterdir() if re.fullmatch(r"[0-9a-f]{16}(-\d+)?", one.name) and one != directory]
        for one in sorted(others, key=lambda one: one.lstat().st_mtime_ns, reverse=True)[_MOST_DIRECTORIES:]:
            shutil.rmtree(one, ignore_errors=True)


@cache
def _warn_of(directory: Path, instead: Path | None) -> None:
    place = f"in {instead}" if instead else "in memory, at every start: remove it, or set CPUSPEC_CACHE to a directory of your own"
    _log.warning("no machine code is loaded from %s, because it %s; it is kept %s", directory, _who_else_fills(directory), place)


@cache
def _tell_of_passing_over(fact: str) -> None:
    _log.warning("%s; a slower one is used in its place, please report this", fact)


@cache
def _tell_of_compiling(directory: Path, is_ours: bool) -> None:
    why = why_unwritable(directory, 0o755) if is_ours else ""
    reason = f", because {directory} cannot be written ({why}); set CPUSPEC_CACHE to a directory that can" if why else ""
    when = "on the first run only" if is_ours and not why else f"at every start{reason}"
    _log.info("compiling kernels for this processor: some seconds, %s", when)


def _optimised(python: Callable[..., Any], num_arguments: int, returns: bool) -> tuple[str, Any]:
    """The name and the LLVM module of a C function of int64s, optimised; of the module's functions it alone is exported."""
    binding.initialize_native_asmparser()  # some kernels are written as instructions
    callback: Any = CFunc(python, ((types.int64,) * num_arguments, types.int64 if returns else types.void), {}, OPTIONS)
    with global_compiler_lock:
        made = callback._compile_uncached()
        # Here Numba would make machine code for an engine of its own, and `_compile` a second time: half of LLVM's time.
        made.library._finalize_final_module = lambda: None
        made.library.finalize()
    name, module = made.fndesc.llvm_cfunc_wrapper_name, binding.parse_assembly(made.library.get_llvm_str())
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != name:
            value.linkage = "internal"
    return name, module


def assembly(python: Callable[..., Any], num_arguments: int) -> str:
    """The instructions of a function of int64s, compiled and not kept: with labels, and LLVM's remarks about loops."""
    _, module = _optimised(python, num_arguments, returns=False)
    functions = _target_machine().emit_assembly(module).split(".Lfunc_end")
    lines: list[str] = max(functions, key=len).splitlines()  # the others only call it
    return "\n".join(line for line in lines if line.startswith((".LBB", " ")) or (line[:1] == "\t" and line[1:2] not in ".#"))


def _compile(python: Callable[..., Any], num_arguments: int, returns: bool) -> bytes:
    """A function as `_link` takes it: a line with its name and what it calls, and the object file."""
    name, module = _optimised(python, num_arguments, returns)
    calls = [value.name for value in (*module.functions, *module.global_variables) if value.is_declaration]
    allocators = [call for call in calls if call.startswith("NRT_") and "lloc" in call]
    assert not allocators, f"{python.__name__} calls {allocators}: kernels get memory from their callers"
    code: bytes = _target_machine().emit_object(module)
    return json.dumps([name, calls]).encode() + b"\n" + code


@contextmanager
def _compiling_alone(path: Path) -> Iterator[None]:
    """One process at a time compiles a kernel; others wait, and find what it kept. None waits where nothing can be locked, or
    longer than _LONGEST_WAIT_S. The file of the lock stays.
    """
    end_s = time.monotonic() + _LONGEST_WAIT_S
    with ExitStack() as held:
        with suppress(OSError, CpuspecError):
            lock = held.enter_context(path.with_suffix(".lock").open("wb"))
            while not SYSTEM.try_lock(lock) and time.monotonic() < end_s:
                time.sleep(0.05)
        yield


def _keep(body: bytes, path: Path) -> None:
    """Write a compiled function, or a verdict, and its checksum."""
    write_file(path, hashlib.sha256(body).digest() + body)


def _load(path: Path) -> int | None:
    """The address of a function that was kept; None as `_read` says."""
    body = _read(path)
    return None if body is None else _link(body)


def _read(path: Path) -> bytes | None:
    """What `_keep` was given; None if there is no such file, or it is damaged or may be another user's."""
    try:
        with path.open("rb") as file:
            others = who_else_writes(os.fstat(file.fileno()))
            content = file.read(_MOST_BYTES)
    except OSError:
        return None
    digest, body = content[:32], content[32:]
    return None if others or hashlib.sha256(body).digest() != digest else body


def _link(body: bytes) -> int:
    """Loads what `_compile` made into this process, and returns the function's address.

    Numba's own functions, which only a Python exception would need, end the process.
    """
    head, _, code = body.partition(b"\n")
    name, calls = json.loads(head)
    engine = _engine()
    for call in calls:
        if not call.startswith("llvm.") and binding.address_of_symbol(call) is None:
            binding.add_symbol(call, ctypes.cast(ctypes.pythonapi.Py_FatalError, ctypes.c_void_p).value)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(name))


@cache
def _target_machine() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    processor, features = isa.target()
    return target.create_target_machine(processor, features, opt=3, reloc="default", codemodel="jitdefault", jit=True)


@cache
def _engine() -> Any:
    """Everything that was loaded lives in it, until the process ends."""
    return binding.create_mcjit_compiler(binding.parse_assembly(""), _target_machine())

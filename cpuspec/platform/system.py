"""The table of what cpuspec asks of an operating system. `linux`, `windows` and `generic` fill one in each."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, c_uint8
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from subprocess import Popen
from typing import IO, Literal

from cpuspec.platform.topology import Memory, Topology


@dataclass(frozen=True)
class System:
    """Facts of an operating system and calls to it. "Others" tells what an entry is or does on a system without the call."""

    # Processors and memory.
    topology: Callable[[], Topology]
    memory: Callable[[], Memory]
    processor_name: Callable[[], str]
    # The names that the system gives the first processor's features. Others: none.
    processor_flags: Callable[[], frozenset[str]]
    # Settings of the system that speed depends on: "governor" of the clock, "huge_pages". Others: none.
    settings: Callable[[], Mapping[str, str]]
    # Ask for the use of tile registers (AMX), and return whether this process may use them. Others: False.
    enable_tile_registers: Callable[[], bool]

    # Pages. The arguments of the mappings are numbers of bytes; they raise OSError, ValueError or OverflowError.
    # Zeros whose pages take memory only when they are written. Others: an ordinary anonymous mapping.
    zeroed_pages: Callable[[int], mmap]
    # The same, of which none may be touched before `commit_pages` (address, bytes) was called for it. Others: as above; nothing.
    reserved_pages: Callable[[int], mmap | Array[c_uint8]]
    commit_pages: Callable[[int, int], None]
    # Give back some of these (address, bytes, both of whole pages), which nothing reads until they are committed again. Others:
    # nothing.
    decommit_pages: Callable[[int, int], None]
    # Take huge pages for what is not yet written of a mapping (address, bytes), where the system has them. Others: nothing.
    prefer_huge_pages: Callable[[int, int], None]
    # The first bytes of an open file (its descriptor), read-only, with all pages there at once. Others: as they are read.
    populated_file: Callable[[int, int], mmap]
    # Whether memory that was written can be made executable, as a compiler in this process needs. Others: True.
    may_execute_memory: Callable[[], bool]
    # Stop counting pages of a mapped file (first byte, bytes) as this process's memory, until they are read again. Others: nothing.
    release_pages: Callable[[mmap, int, int], None]
    # Keep pages (their address, bytes) in memory from now on; returns whether the system does. Others: False.
    lock_pages: Callable[[int, int], bool]
    # Keep freed memory for this process instead of giving it back to the system. Others: nothing.
    keep_freed_memory: Callable[[], None]

    # Memory nodes. Why pages cannot be placed on them; "" where new ones and those that are there can, and the user gave no policy.
    why_pages_stay: Callable[[], str]
    # Take new pages of this thread, and of those that it starts, from these nodes in turns; from any if there are none. Returns
    # whether that was possible. Others: False.
    place_new_pages: Callable[[Sequence[int]], bool]
    # (count, pages, nodes or None, result): addresses of arrays of u64, i32 and i32. Move each page to its node, or with None only
    # look; the result is each page's node, or minus an error. Others: nothing.
    move_pages: Callable[[int, int, int | None, int], None]

    # Files that are read piece by piece. The descriptor of a file that is opened to be read in whole pages, past the system's cache
    # where that can be. Raises OSError. Others: in the usual way.
    open_pages: Callable[[Path], int]
    # Fill a buffer with the bytes of an open file from a place on, and return how many there are. Threads may call it at once.
    read_at: Callable[[int, memoryview, int], int]
    # Lock an open file for this process until it is closed; returns whether no other handle has it locked.
    try_lock: Callable[[IO[bytes]], bool]

    # The directory for caches of cpuspec, from these environment variables. Raises RuntimeError if the user has no home directory.
    cache_home: Callable[[Mapping[str, str]], Path]
    # The encoding of standard streams that are pipes or files, where the system's own lacks most characters. Others: None.
    pipe_encoding: str | None

    # Processes and signals. Start this Python with arguments, apart from the terminal and its signals, and a pipe as its stdin:
    # (arguments, seconds of processor time or None for no limit, bytes of memory, stdout, stderr), as Popen takes these. Raises
    # OSError. Others: without the limits, so the caller's own limit of time must do.
    start_helper: Callable[[Sequence[str], int | None, int, int, int], Popen[bytes]]
    # End a child that leads a session of its own, and all processes that it started. Others: the child alone.
    end_session: Callable[[Popen[bytes]], None]
    # Raise KeyboardInterrupt in the main thread, soon.
    interrupt_main: Callable[[], None]
    # The signals that ask a process to end.
    end_signals: tuple[int, ...]
    # Whether programs of strangers can be shut away in namespaces of their own (`evaluate.sandbox`).
    has_namespaces: bool

    # For compiled code: the name of the C function that lets another thread run, and how a thread sleeps until a number in memory
    # changes: Linux's futex system call, Windows' WaitOnAddress, or not at all.
    yield_function: str
    # And that of the C function that returns the logical processor that a thread runs on. Others: "".
    processor_function: str
    sleep: Literal["futex", "WaitOnAddress", ""]

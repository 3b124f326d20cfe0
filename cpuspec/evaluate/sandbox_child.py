"""Runs one untrusted program in isolation from this machine. Started by `sandbox`, with the standard library only.

Reads a job as JSON from stdin, a file; writes what became of it to stdout, a file, each line with the job's token. This process
watches: the program runs in a child that is the first process of its own namespaces, where it sees Python and an empty directory,
no network and no other process, and where a filter of system calls denies new processes, programs, sockets, mounts and the like.

Sources: user_namespaces(7), pid_namespaces(7), pivot_root(2), mount_setattr(2), seccomp(2), Linux's system call table for x86-64.
"""

import ctypes
import json
import os
import platform
import signal
import sys
from contextlib import suppress
from typing import Any

with suppress(ImportError):  # Windows has none: there the module is imported and never run
    import resource

OUT_OF_TIME, KILLED = 10, 11  # exit codes: the limit of processor time, another signal
_FIRST_PLACES = ("/usr", "/lib", "/lib64")  # where libraries of C lie

_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x20000000 | 0x08000000  # user, mounts, network, processes, IPC
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 4096, 16384, 1 << 18, 2
_MS_NOSUID, _MS_NODEV = 2, 4
_AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = -100, 0x8000, 1
_PIVOT_ROOT, _CAPSET, _MOUNT_SETATTR = 155, 126, 442  # system calls without a function in every C library
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER_MODE = 1, 38, 22, 2

_CLONE, _CLONE3, _CLONE_THREAD = 56, 435, 0x10000
_DENIED = (
    *(57, 58, 59, 322),  # fork, vfork, execve, execveat
    *(41, 53, 29, 64, 68, 240, 319),  # socket, socketpair, shmget, semget, msgget, mq_open, memfd_create
    *(101, 310, 311, 424, 434, 438),  # ptrace, process_vm_*, pidfd_*
    *(109, 112, 135, 157, 317),  # setpgid, setsid, personality, prctl, seccomp
    *(155, 161, 165, 166, 272, 308, 428, 429, 430, 431, 432, 433, 442),  # roots, mounts, namespaces
    *(248, 249, 250, 298, 300, 303, 304, 321, 323, 425, 426, 427),  # keys, perf, fanotify, file handles, bpf, userfaultfd, io_uring
    *(159, 163, 164, 167, 168, 169, 170, 171, 172, 173, 175, 176, 179, 227, 246, 305, 313, 320),  # the machine itself
)
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_X86_64, _X32 = 0xC000003E, 0x40000000

_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # this script runs on Linux only


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def main() -> None:
    """Run the job of stdin, and exit."""
    with open(0, "rb", closefd=False) as file:
        job = json.load(file)
    result = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    try:
        if job["isolated"]:
            _enter_namespaces()
    except OSError as error:
        _tell(result, job, refused=str(error))
        os._exit(0)
    child = os.fork()
    if not child:
        _run(job, result)
        os._exit(0)
    _, status, used = os.wait4(child, 0)
    if os.WIFSIGNALED(status):
        # Not the clock that the limit is taken by: on a busy machine the two differ.
        is_late = used.ru_utime + used.ru_stime > 0.5 * job["cpu_s"]
        os._exit(OUT_OF_TIME if is_late and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else KILLED)
    os._exit(0)


def _run(job: dict[str, Any], result: int) -> None:
    """Shut this process in, and run the program."""
    try:
        _call(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
        if job["isolated"]:
            _enter_directory(job)
            header = (ctypes.c_uint32 * 2)(0x20080522, 0)
            _call(_libc.syscall(_CAPSET, header, (ctypes.c_uint32 * 6)()), "capset")
        _limit(job)
        _filter_system_calls(required=job["isolated"])
    except (OSError, ValueError) as error:
        _tell(result, job, refused=str(error))
        return
    try:
        exec(compile(job["program"], "<program>", "exec"), {"__name__": "__main__"})
    except BaseException as error:  # of a stranger: SystemExit is no success, either
        _tell(result, job, passed=False, error=f"{type(error).__name__}: {error}"[:500])
    else:
        _tell(result, job, passed=True)


def _tell(result: int, job: dict[str, Any], **facts: Any) -> None:
    os.write(result, json.dumps({"token": job["token"], **facts}).encode() + b"\n")


def _call(returned: int, what: str) -> None:
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _enter_namespaces() -> None:
    user, group = os.geteuid(), os.getegid()
    _call(_libc.unshare(_NEW_NAMESPACES), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {user} 1"), ("gid_map", f"65534 {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _enter_directory(job: dict[str, Any]) -> None:
    """Make a new root of memory, with Python and its libraries to be read, and forget the old one."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    root = job["directory"]
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={job['disk_bytes']},nr_inodes=4096,mode=755")
    for place in dict.fromkeys((*_FIRST_PLACES, sys.base_prefix)):
        _show(place, root)
    os.mkdir(f"{root}/tmp")
    os.chdir(root)
    _call(_libc.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
    _call(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/tmp")


def _show(place: str, root: str) -> None:
    """Let a directory be read in the new root."""
    if os.path.islink(place):
        os.symlink(os.readlink(place), f"{root}{place}")
    elif os.path.isdir(place) and not os.path.exists(f"{root}{place}"):
        os.makedirs(f"{root}{place}")
        _mount(place, f"{root}{place}", None, _MS_BIND | _MS_REC)
        attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY)
        returned = _libc.syscall(
            _MOUNT_SETATTR, _AT_FDCWD, f"{root}{place}".encode(), _AT_RECURSIVE, attributes, ctypes.sizeof(attributes)
        )
        _call(returned, "mount_setattr")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _call(_libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _limit(job: dict[str, Any]) -> None:
    for what, most in (
        (resource.RLIMIT_CPU, job["cpu_s"]),
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["disk_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 64),
    ):
        _, hard = resource.getrlimit(what)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (limit, limit))


def _filter_system_calls(required: bool) -> None:
    """Deny what no ordinary program of a task needs. required: raise OSError where that is not possible."""
    if platform.machine() != "x86_64":
        if required:
            raise OSError(f"system calls are filtered on x86-64 only, and this is {platform.machine()}")
        return
    checks = [(_CLONE3, "enosys"), *((number, "eperm") for number in _DENIED), (_CLONE, "clone")]
    head = [
        _Instruction(_LOAD, 0, 0, 4),
        _Instruction(_JUMP_IF_EQUAL, 1, 0, _X86_64),
        _Instruction(_RETURN, 0, 0, _KILL),
        _Instruction(_LOAD, 0, 0, 0),
        _Instruction(_JUMP_IF_AT_LEAST, 0, 1, _X32),
        _Instruction(_RETURN, 0, 0, _KILL),
    ]
    ends = {"allow": 0, "enosys": 1, "eperm": 2, "clone": 3}  # after the checks, in this order
    body = [_Instruction(_JUMP_IF_EQUAL, len(checks) - 1 - at + ends[end], 0, number) for at, (number, end) in enumerate(checks)]
    tail = [
        _Instruction(_RETURN, 0, 0, _ALLOW),
        _Instruction(_RETURN, 0, 0, _ENOSYS),
        _Instruction(_RETURN, 0, 0, _EPERM),
        _Instruction(_LOAD, 0, 0, 16),  # the flags of clone, its lower half
        _Instruction(_JUMP_IF_SET, 1, 0, _CLONE_THREAD),
        _Instruction(_RETURN, 0, 0, _EPERM),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    ]
    instructions = (_Instruction * len(head + body + tail))(*head, *body, *tail)
    program = _Program(len(instructions), instructions)
    _call(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    returned = _libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0)
    if required:
        _call(returned, "seccomp")


if __name__ == "__main__":
    main()

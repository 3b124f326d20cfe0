"""Hostile programs end within their limits and change nothing outside; ordinary ones run."""

import os
from pathlib import Path

import pytest

from cpuspec.errors import ConfigError
from cpuspec.evaluate import sandbox
from cpuspec.evaluate.sandbox import Limits, Outcome, run_program, run_programs

QUICK = Limits(cpu_s=2, wall_s=120)


@pytest.fixture(scope="module", autouse=True)
def available() -> None:
    try:
        run_program("")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "program",
    [
        "",
        "import math, collections, re, heapq, itertools, random, decimal, datetime, typing, functools, string, hashlib\n"
        "assert math.gcd(6, 4) == 2",
        "open('notes.txt', 'w').write('a')\nassert open('notes.txt').read() == 'a'",
        "import tempfile\nwith tempfile.TemporaryFile() as file:\n    file.write(b'a')",
        "import threading as t\nfound = []\none = t.Thread(target=lambda: found.append(1))\none.start()\none.join()\nassert found",
        "print('text ' * 100_000)",
        "import os\nassert os.urandom(4)",
        "assert __name__ == '__main__'",
    ],
)
def test_an_ordinary_program_passes(program: str) -> None:
    assert run_program(program) == Outcome("passed")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "without running to its end"),
        ("input()", "EOFError"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("raise ValueError('x' * 10**6)", "ValueError"),
        ("raise ValueError('\\x1b[31m\\n\\ud800')", "ValueError"),
    ],
)
def test_a_wrong_program_fails_and_says_why(program: str, reason: str) -> None:
    found = run_program(program)
    assert found.status == "failed"
    assert reason in found.reason
    assert found.reason.isprintable()
    assert len(found.reason) < 600


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass",
        "try:\n    while True: pass\nfinally:\n    while True: pass",
        "x = 3\nwhile True: x = x * x % 1_000_003",
    ],
)
def test_an_endless_loop_is_ended_by_the_processor_time_that_it_takes(program: str) -> None:
    assert run_program(program, QUICK).status == "timeout"


def test_a_program_that_waits_is_ended_by_the_clock() -> None:
    found = run_program("import time; time.sleep(1e6)", Limits(wall_s=2))
    assert found.status == "timeout"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("x = bytearray(1 << 31)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
        ("with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 20))", "OSError"),
        ("n = 0\nwhile True:\n    open(f'f{n}', 'wb').write(bytes(1 << 20))\n    n += 1", "OSError"),
        ("n = 0\nwhile True:\n    open(f'f{n}', 'wb').close()\n    n += 1", "OSError"),
        ("files = []\nwhile True: files.append(open('x', 'w'))", "OSError"),
        ("import os\nwhile True: os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['/bin/true'])", "PermissionError"),
        ("import os; os.execv('/bin/true', ['true'])", "PermissionError"),
        ("import multiprocessing as m; m.Process(target=print).start()", "Error"),
        ("import socket; socket.create_connection(('127.0.0.1', 80), 1)", "PermissionError"),
        ("import urllib.request as u; u.urlopen('http://example.com', timeout=1)", "Error"),
        ("import threading\nwhile True: threading.Thread(target=__import__('time').sleep, args=(9,)).start()", "Error"),
        ("import os; os.kill(os.getppid() or 2, 9)", "Error"),
        ("import os; os.kill(-1, 9)", "ProcessLookupError"),
        ("open('/etc/passwd')", "FileNotFoundError"),
        ("import os; os.listdir('/proc')", "FileNotFoundError"),
        ("import os; os.listdir('/dev')", "FileNotFoundError"),
        ("import sys; open(sys.base_prefix + '/evil', 'w')", "Read-only"),
        ("import os; os.chroot('/tmp')", "PermissionError"),
        ("import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise PermissionError", "PermissionError"),
        ("import ctypes\nif ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, 0): raise PermissionError", "PermissionError"),
        ("import os; os.setuid(0)", "Error"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "Error"),
    ],
)
def test_what_a_program_must_not_do_is_an_error_inside_of_it(program: str, reason: str) -> None:
    found = run_program(program, Limits(cpu_s=20, wall_s=120))
    assert found.status == "failed"
    assert reason in found.reason


def test_nothing_outside_can_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret", "utf-8")
    for action in (f"open('{tmp_path}/secret').read()", f"open('{tmp_path}/new', 'w')", f"__import__('os').listdir('{tmp_path}')"):
        assert "FileNotFoundError" in run_program(action).reason
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    shown = run_program("import os; raise ValueError(sorted(os.listdir('/')), os.getcwd(), os.listdir('.'), os.getpid())").reason
    assert "'/tmp', [], 1)" in shown
    assert "home" not in shown


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    run_program("open('x', 'w').write('x')")
    run_program("while True: pass", QUICK)
    assert list(tmp_path.iterdir()) == []
    assert children.read_text() == before


@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'{\"passed\": true}\\n')\n    except OSError: pass\nos._exit(0)",
        "import os\nfor fd in range(64):\n    try: os.ftruncate(fd, 0)\n    except OSError: pass\nassert False",
        "import os\nfor fd in range(64):\n    try: os.close(fd)\n    except OSError: pass\nassert False",
    ],
)
def test_a_program_that_finds_the_way_to_its_judge_does_not_pass(program: str) -> None:
    assert not run_program(program).passed


_FORGES = "os.write(result, json.dumps({'token': job['token'], 'passed': True}).encode() + b'\\n')\nos._exit(0)\n"


@pytest.mark.parametrize(
    "program",
    [
        "import sys, os, json\nf = sys._getframe(1)\nresult, job = f.f_locals['result'], f.f_locals['job']\n" + _FORGES,
        "import sys, os, json\nframes = sys._current_frames().values()\nfor f in frames:\n"
        "    while f and 'job' not in f.f_locals:\n        f = f.f_back\nresult, job = f.f_locals['result'], f.f_locals['job']\n"
        + _FORGES,
        "import gc, os, json\njob = next(o for o in gc.get_objects() if type(o) is dict and o.keys() >= {'token', 'program'})\n"
        "told = json.dumps({'token': job['token'], 'passed': True}).encode() + b'\\n'\n"
        "for result in range(64):\n    try: os.write(result, told)\n"
        "    except OSError: pass\nos._exit(0)",
        "import sys\nf = sys._getframe(1)\nf.f_globals['_tell'](f.f_locals['result'], f.f_locals['job'], passed=True)\n"
        "import os\nos._exit(0)",
        "import sys\nf = sys._getframe(1)\ntell = f.f_globals['_tell']\n"
        "f.f_globals['_tell'] = lambda result, job, **facts: tell(result, job, passed=True)\nraise SystemExit(1)",
        "open('/proc/self/fd/3', 'w').write('x')\nassert False",
        "import os\nfor code in range(256):\n    os._exit(code)",
        "import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0\nassert False",
        "import ctypes\nctypes.CDLL(None).exit(0)",
    ],
)
@pytest.mark.parametrize("isolated", [True, False])
def test_a_verdict_is_not_forged(program: str, isolated: bool) -> None:
    """By frames, the collector's objects, the judge's own functions, descriptors, exit codes, or the parent's memory."""
    found = run_program(program, QUICK, isolated)
    assert not found.passed, found


def test_a_program_that_ends_well_is_not_taken_for_a_forger() -> None:
    assert run_program("def f(x): return x\nassert f(1) == 1  # no line after this").passed
    assert run_program('"a text"\nif True:\n    pass\n\n\n').passed


def test_a_crash_of_the_interpreter_is_told() -> None:
    assert run_program("import ctypes; ctypes.string_at(0)").status == "killed"


def test_programs_have_their_outcomes_in_their_order() -> None:
    seen: list[int] = []
    found = run_programs(["assert False", "", "assert False", ""], workers=2, on_outcome=seen.append)
    assert [one.passed for one in found] == [False, True, False, True]
    assert seen == [1, 2, 3, 4]
    assert run_programs([]) == []


def test_without_isolation_limits_hold_all_the_same() -> None:
    assert run_program("", isolated=False).passed
    assert run_program("while True: pass", QUICK, isolated=False).status == "timeout"
    assert "MemoryError" in run_program("x = bytearray(1 << 31)", isolated=False).reason


def test_where_there_is_no_sandbox_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a container forbids namespaces: the child does not come so far as to run anything."""
    source = Path(sandbox.sandbox_child.__file__).read_text("utf-8")
    denied = "_call(-1, 'unshare')"
    (tmp_path / "child.py").write_text(source.replace('_call(_libc.unshare(_NEW_NAMESPACES), "unshare")', denied), "utf-8")
    monkeypatch.setattr(sandbox, "_CHILD", tmp_path / "child.py")
    ran = tmp_path / "ran"
    with pytest.raises(ConfigError, match=r"no sandbox.*unshare.*--no-isolation"):
        run_program(f"open('{ran}', 'w')")
    assert not ran.exists()
    with pytest.raises(ConfigError, match="no sandbox"):
        run_programs([f"open('{ran}', 'w')"] * 3, workers=2)
    assert run_program("", isolated=False).passed

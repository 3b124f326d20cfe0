"""Commands in processes that a service manager or a container has confined end in an answer, or in a sentence with a remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import NUMPY, small_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="confines by Linux's means")

# As systemd's MemoryDenyWriteExecute does: what was written is not executed (prctl(2), PR_SET_MDWE).
NO_NEW_CODE = """
import ctypes, os, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):
    sys.exit(77)
os.execv(sys.executable, [sys.executable, "-m", "cpuspec", *sys.argv[1:]])
"""
# A container's user: no name and no home directory.
NO_HOME = """
import os, pwd, sys
def getpwuid(number):
    raise KeyError(number)
pwd.getpwuid = getpwuid
for name in ("HOME", "CPUSPEC_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
    os.environ.pop(name, None)
sys.argv = ["cpuspec", *sys.argv[1:]]
from cpuspec.cli import main
main()
"""


def confined(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [(), NUMPY], ids=["numba", "numpy"])
def test_without_executable_memory_numpy_answers_and_numba_names_it(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = confined(NO_NEW_CODE, "generate", small_model(tmp_path / "m.gguf"), "a", "--max-tokens", "2", *options)
    if done.returncode == 77:
        pytest.skip("this kernel has no such limit")
    if options:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1
        assert "MemoryDenyWriteExecute" in done.stderr
        assert "use --backend numpy" in done.stderr


def test_a_user_without_name_and_home_is_answered(tmp_path: Path) -> None:
    done = confined(NO_HOME, "generate", small_model(tmp_path / "m.gguf"), "a", "--max-tokens", "2", *NUMPY)
    assert done.returncode == 0, done.stderr
    done = confined(NO_HOME, "pull", "smollm2-135m-instruct")
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert "set CPUSPEC_CACHE" in done.stderr

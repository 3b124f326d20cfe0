"""Runs a command and prints what it took as JSON, for `start.py`: a process of its own that stays small.

Linux counts the memory of whoever starts a program as that program's peak, so the starter must not have any.
"""

import json
import os
import subprocess
import sys
from time import perf_counter


def main() -> None:
    """Seconds from the command to its first byte on stdout, peak bytes, exit status, what it wrote first."""
    begin_s = perf_counter()
    with subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None, "stdout is a pipe"
        first = process.stdout.read(1)
        first_byte_s = perf_counter() - begin_s
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps([first_byte_s, peak_bytes, process.returncode, len(first)]))


if __name__ == "__main__":
    main()

"""Plots how trainings of draft heads went: acceptance by position against tokens and minutes (`cpuspec[report]`).

python -m tools.plot_training OUT.png HEAD... : directories of `cpuspec train block` and `eagle3`.
"""

import sys
from pathlib import Path

from benchmarks.report_plots import curves
from cpuspec.errors import CpuspecError
from cpuspec.files import write_file
from cpuspec.train.loop import Measured, read_log


def plot(logs: dict[str, list[Measured]]) -> bytes:
    """A PNG: for each head its acceptance against tokens, and the mean lengths of all against minutes."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, log in logs.items():
        panels[f"{name}: accepted, against thousands of tokens"] = {
            f"position {i + 1}": [(line.tokens // 1000, line.accepted[i]) for line in log] for i in range(len(log[0].accepted))
        }
    panels["Tokens of a forward, against minutes"] = {
        name: [(round(line.seconds / 60, 1), line.mean_length) for line in log] for name, log in logs.items()
    }
    return curves(panels, ("trained on", "on held-back samples"))


def main() -> int:
    """Exit code 1 where a log cannot be read."""
    if len(sys.argv) < 3:
        print(__doc__)
        return 2
    try:
        logs = {Path(head).name: read_log(Path(head)) for head in sys.argv[2:]}
    except CpuspecError as error:
        print(f"error: {error}")
        return 1
    write_file(Path(sys.argv[1]), plot(logs))
    return 0


if __name__ == "__main__":
    sys.exit(main())

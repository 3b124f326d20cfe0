"""Hatchling's hook: a package says in `cpuspec/commit.txt` of which commit it is, and brings the manual page where that was made.

`python -m tools.make_man_page > cpuspec.1` makes it: to build it at each installation would take all that cpuspec imports.
"""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildHook(BuildHookInterface):
    """Adds the two files. Sources without git, as those of an sdist, keep the commit that they name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add files to what is built. An editable installation asks git itself."""
        root = Path(self.root)
        if (root / "cpuspec.1").exists():
            key, place = (
                ("shared_data", "share/man/man1/cpuspec.1") if self.target_name == "wheel" else ("force_include", "cpuspec.1")
            )
            build_data[key][str(root / "cpuspec.1")] = place
        if version == "editable" or (root / "cpuspec/commit.txt").exists() or not (root / ".git").exists():
            return
        try:
            commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=self.root, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return
        self._directory = tempfile.TemporaryDirectory()
        path = Path(self._directory.name) / "commit.txt"
        path.write_text(commit)
        build_data["force_include"][str(path)] = "cpuspec/commit.txt"

"""Everything that differs between operating systems: `SYSTEM` is the table of this one."""

import sys

from cpuspec.platform.system import System
from cpuspec.platform.topology import Core, Memory, Node, Topology

SYSTEM: System
if sys.platform == "linux":
    from cpuspec.platform.linux import SYSTEM
elif sys.platform == "win32":
    from cpuspec.platform.windows import SYSTEM
else:
    from cpuspec.platform.generic import SYSTEM

__all__ = ["SYSTEM", "Core", "Memory", "Node", "System", "Topology"]

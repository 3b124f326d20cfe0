"""Compiled kernels in Numba: vector values, linear layers, attention, pointwise operations, and the thread team.

They know weight formats and addresses, and no model. They check nothing: callers check the addresses that they pass.
"""

from cpuspec.errors import BackendError
from cpuspec.platform import SYSTEM

if not SYSTEM.may_execute_memory():  # where LLVM would end the process, or Python's ctypes fail
    raise BackendError(
        "this process may not make memory executable, so no kernel can be compiled: systemd's MemoryDenyWriteExecute or a security "
        "policy forbids it; allow it, or use --backend numpy"
    )
try:
    from cpuspec.kernels.machine_code import compiled_before, kernel_directory, passed_over
except ImportError as error:
    if error.name not in ("numba", "llvmlite"):
        raise
    raise BackendError(
        f"the numba backend and casts of weights need {error.name}, which is not installed or has no wheel for this processor, "
        f"system and Python ({error}); use --backend numpy, or torch"
    ) from error

__all__ = ["compiled_before", "kernel_directory", "passed_over"]

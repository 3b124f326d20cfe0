"""Compiled kernels in Numba: vector values, linear layers, attention, pointwise operations, and the thread team.

They know weight formats and addresses, and no model. They check nothing: callers check the addresses that they pass.
"""

from cpuspec.kernels.machine_code import compiled_before, kernel_directory

__all__ = ["compiled_before", "kernel_directory"]

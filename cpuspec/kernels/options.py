"""The one set of Numba options that kernels are compiled with, functions as here and entry points as in `machine_code`."""

from typing import Any

from numba import njit

# No fastmath: reassociation or contraction would make bits depend on how a loop was vectorised. Division by zero gives inf, as
# in numpy: a check would be a branch, and a Python exception in a thread without the GIL.
OPTIONS: dict[str, Any] = {"error_model": "numpy"}

compiled: Any = njit(nogil=True, **OPTIONS)
inlined: Any = njit(nogil=True, forceinline=True, **OPTIONS)  # of a few vectors: a call would pass them through memory

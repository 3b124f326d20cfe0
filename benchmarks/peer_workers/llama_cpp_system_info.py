"""Prints what llama.cpp says of the instructions that it uses: `python llama_cpp_system_info.py PATH/libllama.so`.

This is a process of its own because a library that was built for another processor ends the process that loads it.
"""

import ctypes
import sys
from pathlib import Path


def system_info(library: Path) -> str:
    """The text of `llama_print_system_info`, such as "CPU : SSE3 = 1 | AVX2 = 1 | "."""
    llama = ctypes.CDLL(str(library))
    llama.llama_print_system_info.restype = ctypes.c_char_p
    if not llama.llama_print_system_info():  # a build that chooses its library for the processor as it starts
        llama.ggml_backend_load_all_from_path(str(library.parent).encode())
    return llama.llama_print_system_info().decode()


if __name__ == "__main__":
    print(system_info(Path(sys.argv[1])))

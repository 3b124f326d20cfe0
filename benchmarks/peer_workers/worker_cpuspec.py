"""cpuspec itself, asked in the same way as its peers: the numba backend at the seam where every engine is measured."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from serving import Engine, serve


class _Cpuspec:
    def __init__(self, model: Path, threads: int, capacity: int) -> None:
        from cpuspec.backends import make_backend
        from cpuspec.checkpoints import open_checkpoint
        from cpuspec.settings import EngineConfig

        self._backend = make_backend("numba", open_checkpoint(model), EngineConfig(max_sequences=1, threads=threads))
        self._cache = self._backend.new_cache(1, capacity)

    def reset(self) -> None:
        self._cache.truncate(0, 0)

    def feed(self, tokens: list[int], all_logits: bool) -> NDArray[np.float32]:
        from cpuspec.model.batch import ForwardBatch

        size = self._backend.max_rows
        chunks = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        outputs = []
        for number, chunk in enumerate(chunks, 1):
            held = self._cache.lengths[0]
            last = [len(chunk) - 1] if number == len(chunks) else []
            batch = ForwardBatch(
                tokens=np.array(chunk, np.int32),
                positions=np.arange(held, held + len(chunk), dtype=np.int32),
                slots=np.zeros(1, np.int32),
                q_start=np.array([0, len(chunk)], np.int32),
                logit_rows=None if all_logits else np.array(last, np.int32),
                of_prompts=not all_logits,  # all logits are asked for where tokens are decoded or verified
            )
            outputs.append(self._backend.forward(batch, self._cache).logits)
        return np.concatenate(outputs) if len(outputs) > 1 else outputs[0]


def load(model: Path, threads: int, capacity: int) -> tuple[Engine, str]:
    """The model from its GGUF file."""
    from cpuspec import __version__

    return _Cpuspec(model, threads, capacity), f"cpuspec {__version__}, numba backend, {model.name}"


def instructions() -> str:
    """The best instruction set that the kernels use, as this process was told of the processor's features."""
    from cpuspec.kernels import isa

    return "amx" if isa.has_tiles() else isa.dot_isa()


if __name__ == "__main__":
    serve(load, needs="-e . in the root of cpuspec's repository", instructions=instructions)

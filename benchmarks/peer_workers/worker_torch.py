"""torch int8: the transformers model with every linear layer quantized dynamically (int8 weights, int8 activations).

    worker_torch.py [ENGINE]     torch's quantized engine; without it torch chooses

Where it has AMX, onednn is torch's best at many rows, and its own choice (x86, by FBGEMM) at few.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from serving import Engine, serve


class _Torch:
    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._model = torch.ao.quantization.quantize_dynamic(plain, {torch.nn.Linear}, dtype=torch.qint8)
        self._cache: Any = None

    def reset(self) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)

    def feed(self, tokens: list[int], all_logits: bool) -> NDArray[np.float32]:
        import torch

        with torch.inference_mode():
            output = self._model(
                torch.tensor([tokens]), past_key_values=self._cache, use_cache=True, logits_to_keep=0 if all_logits else 1
            )
        logits: NDArray[np.float32] = output.logits[0].numpy()
        return logits


def load(model: Path, threads: int, capacity: int, *, quantized_engine: str | None) -> tuple[Engine, str]:
    """The Hugging Face directory, quantized on loading. Its cache grows as it must, so the capacity is of no use to it."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    if quantized_engine:
        torch.backends.quantized.engine = quantized_engine
    engine = torch.backends.quantized.engine
    about = f"torch {torch.__version__} quantize_dynamic int8 ({engine}), transformers {transformers.__version__}"
    return _Torch(model), about


if __name__ == "__main__":
    serve(partial(load, quantized_engine=(*sys.argv[1:], None)[0]), needs="torch transformers")

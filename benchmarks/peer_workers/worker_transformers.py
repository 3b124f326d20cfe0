"""transformers' own generation in bf16, greedy: plain, or assisted by prompt lookup or by a smaller model.

    {"do": "load", "model": PATH, "threads": 2, "assistant": PATH}     GGUF files, dequantized by transformers, or Hugging Face
                                                                       directories; assistant may be null
    {"do": "generate", "ids": [1, 2], "max_tokens": 128, "end_ids": [2], "num_lookup_tokens": 10, "assisted": false}
                                                                       null and false decode plainly

A generation is answered with token_ids, num_timed and seconds: how many tokens came after those of the first step, in what time.
"""

from pathlib import Path
from time import perf_counter
from typing import Any

from serving import answer_requests


class _Arrivals:
    """A streamer that notes when the tokens of each step came."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, tokens: Any) -> None:
        if self._prompt_seen:
            self.steps.append((perf_counter(), tokens.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


class _Transformers:
    def __init__(self) -> None:
        self._model: Any = None
        self._assistant: Any = None

    def answer(self, request: dict[str, Any]) -> Any:
        """The result of one request."""
        do = {"load": self.load, "generate": self.generate}[request.pop("do")]
        return do(**request)

    def load(self, model: str, threads: int, assistant: str | None = None) -> str:
        """Load; returns a description."""
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._model = _load(Path(model))
        self._assistant = _load(Path(assistant)) if assistant else None
        return f"transformers {transformers.__version__}, torch {torch.__version__}, bf16"

    def generate(
        self, ids: list[int], max_tokens: int, end_ids: list[int], num_lookup_tokens: int | None, assisted: bool = False
    ) -> dict[str, Any]:
        """The greedy continuation and its times."""
        import torch
        from transformers import GenerationConfig

        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=end_ids,
            pad_token_id=end_ids[0] if end_ids else 0,
            prompt_lookup_num_tokens=num_lookup_tokens,
        )
        prompt, arrivals = torch.tensor([ids]), _Arrivals()
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=settings,
            streamer=arrivals,
            assistant_model=self._assistant if assisted else None,
        )
        (first_s, _), (last_s, _) = arrivals.steps[0], arrivals.steps[-1]
        num_timed = sum(count for _, count in arrivals.steps[1:])
        return {"token_ids": output[0, len(ids) :].tolist(), "num_timed": num_timed, "seconds": last_s - first_s}


def _load(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) if path.is_dir() else _from_gguf(path)
    return loaded.eval()


def _from_gguf(path: Path) -> Any:
    """The model with the file's values, by transformers' reader itself: the usual way to it asks for accelerate as well."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    return type(empty).from_pretrained(None, config=config, state_dict=tensors, dtype=torch.bfloat16)


if __name__ == "__main__":
    answer_requests(_Transformers().answer, needs="torch 'transformers<5.6' gguf")

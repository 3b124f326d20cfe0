"""EvalPlus on an `LLM`, which generates the samples that `evalplus.evaluate` judges. `pip install evalplus`.

Source: evalplus 0.3.1, evalplus/codegen.py, provider/vllm.py and provider/utility.py, whose prompts and stops these are.
"""

from pathlib import Path

from cpuspec.engine.llm import LLM
from cpuspec.errors import ConfigError, needing
from cpuspec.settings import SamplingParams

with needing("`cpuspec eval plus`", "evalplus"):
    from evalplus.codegen import codegen
    from evalplus.provider.base import DecoderBase
    from evalplus.provider.utility import EOS, extra_eos_for_direct_completion

DATASETS = ("humaneval", "mbpp")
ASKED = "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
ANSWERED = "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:"


class PlusDecoder(DecoderBase):  # EvalPlus' own loop takes its subclasses only
    """An LLM as EvalPlus wants models: a conversation where it has a chat template, else the text goes on."""

    def __init__(self, llm: LLM, dataset: str, temperature: float, max_new_tokens: int) -> None:
        super().__init__(llm.name, temperature=temperature, max_new_tokens=max_new_tokens)
        self._llm = llm
        self.eos = [*EOS, *(extra_eos_for_direct_completion(dataset) if self.is_direct_completion() else ["\n```\n"])]

    def is_direct_completion(self) -> bool:
        """Whether the model has no chat template."""
        return not self._llm.tokenizer.has_chat_template

    def codegen(self, prompt: str, do_sample: bool = True, num_samples: int = 1) -> list[str]:
        """Answers to a problem."""
        params = SamplingParams(
            temperature=self.temperature if do_sample else 0.0,
            top_p=0.95 if do_sample else 1.0,
            max_tokens=self.max_new_tokens,
            stop=tuple(self.eos),
            n=num_samples,
        )
        if self.is_direct_completion():
            found = self._llm.generate([prompt], params)[0]
        else:
            asked = {"role": "user", "content": f"{ASKED}\n```\n{prompt.strip()}\n```\n"}
            begun = {"role": "assistant", "content": f"{ANSWERED}\n```python\n"}
            found = self._llm.chat([asked, begun], params, add_generation_prompt=False, continue_final_message=True)
        return [one.text.replace("\t", "    ") for one in found.outputs]


def make_samples(
    llm: LLM,
    dataset: str,
    out: Path,
    num_samples: int = 1,
    temperature: float = 0.0,
    max_tokens: int = 768,
    limit: int | None = None,
) -> None:
    """Write EvalPlus' samples of a data set, JSON lines with task_id and solution; what is there already is kept.

    limit: problems, of numbers below it; None for all, as the judge wants them. Raises ConfigError.
    """
    if dataset not in DATASETS or out.suffix != ".jsonl":
        raise ConfigError(f"EvalPlus has {' and '.join(DATASETS)}, and its samples end with .jsonl; got {dataset} and {out}")
    out.parent.mkdir(parents=True, exist_ok=True)
    codegen(
        str(out),
        PlusDecoder(llm, dataset, temperature, max_tokens),
        dataset,
        greedy=temperature == 0,
        n_samples=num_samples,
        id_range=None if limit is None else (0, limit),
    )

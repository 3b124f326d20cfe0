"""A short prompt that arrives while a long one is read: how much later each has its first token than alone.

    python benchmarks/beside.py smollm2-135m-instruct --rounds 9

Each round answers a short and a long prompt alone, one after the other, then another long one with another short one after it,
which arrives at a random moment of the long one's reading. Delays of the short one are in steps of plain decoding.
"""

import random
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from prefixes import system_prompt
from record import Rounds, record, save, say, spread

from cpuspec import LLM
from cpuspec.checkpoints.download import resolve_model
from cpuspec.engine.llm import Completion
from cpuspec.settings import EngineConfig

DELAY, LONG_OVER = "first token of the short prompt, plain steps later than alone", "first token of the long prompt over alone"


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    rounds: Annotated[int, typer.Option(help="Rounds.", min=1)] = 9,
    long_tokens: Annotated[int, typer.Option(help="Tokens of the long prompts.", min=64)] = 6000,
    short_tokens: Annotated[int, typer.Option(help="Tokens of the short prompts.", min=1)] = 30,
    max_rows: Annotated[int, typer.Option(help="Rows of a forward.", min=1)] = 256,
    threads: Annotated[int, typer.Option(help="Threads.", min=1)] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print a line for each round, and the medians."""
    path, chance = resolve_model(model), random.Random(0)
    settings = EngineConfig(threads=threads, max_rows=max_rows, prefix_cache_gb=0)
    samples: dict[str, list[float]] = {DELAY: [], LONG_OVER: []}
    with LLM(path, "none", settings=settings) as llm:
        tokens = llm.tokenizer.encode(system_prompt(llm, long_tokens))[:long_tokens]

        def prompt(size: int) -> list[int]:
            return chance.sample(tokens, size)

        def answer(size: int, num_tokens: int) -> Completion:
            return llm.generate([prompt(size)], max_tokens=num_tokens, ignore_eos=True)[0]

        passed = Rounds(rounds + 1, threads)
        for number in passed:
            short = answer(short_tokens, 33).stats
            long = answer(long_tokens, 1).stats.ttft_s or 0
            step = short.tpot_s or 1
            beside: list[Completion] = []
            reader = threading.Thread(target=lambda: beside.append(answer(long_tokens, 1)))  # noqa: B023 (it ends in this round)
            reader.start()
            time.sleep(chance.uniform(0.1, 0.8) * long)
            late = answer(short_tokens, 1).stats.ttft_s or 0
            reader.join()
            delay, over = (late - (short.ttft_s or 0)) / step, (beside[0].stats.ttft_s or 0) / long
            if number:  # the first round warms up
                samples[DELAY].append(delay)
                samples[LONG_OVER].append(over)
            times = f"a plain step {step:.4f} s; first tokens alone {short.ttft_s:.3f} and {long:.2f} s"
            say(f"{times}; beside: short {delay:+.1f} steps, long {over:.2f}x")
    figures: dict[str, Any] = {name: spread(values) for name, values in samples.items()}
    for name, one in figures.items():
        print(f"{name}: {one['median']:.3g} ({one['min']:.3g} to {one['max']:.3g})")
    details = {"long_tokens": long_tokens, "short_tokens": short_tokens, "max_rows": max_rows, "figures": figures}
    save(record("beside", path.name, passed) | details, json_file)


if __name__ == "__main__":
    typer.run(main)

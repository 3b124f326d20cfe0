"""Plain decoding speed beside llama.cpp on the same GGUF, interleaved, so that a machine's moods hit both alike.

    python benchmarks/decode.py smollm2-135m-instruct --llama-bench PATH/llama-bench --threads 2 --rounds 5

Each round generates 128 tokens from a one-token prompt with each engine, loading and warm-up apart.
"""

import json
import statistics
import subprocess
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from cpuspec.checkpoints.download import resolve_model
from cpuspec.config import SamplingParams
from cpuspec.engine.llm import LLM

NUM_TOKENS = 128


def main(
    model: Annotated[str, typer.Argument(help="Recipe name or GGUF file.")],
    llama_bench: Annotated[Path, typer.Option(help="llama.cpp's llama-bench program.", exists=True)],
    threads: Annotated[int, typer.Option(help="Threads of both engines.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds; the median is quoted.", min=1)] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print tokens/s of both, and the ratio round by round."""
    path = resolve_model(model)
    own, peer = [], []
    with LLM(path, threads=threads) as llm:
        _generate(llm)
        for _ in track(range(rounds), description="rounds", console=Console(stderr=True)):
            own.append(_generate(llm))
            peer.append(_llama_bench(llama_bench, path, threads))
    ratios = [a / b for a, b in zip(own, peer, strict=True)]
    figures = {"model": path.name, "threads": threads, "num_tokens": NUM_TOKENS}
    figures |= {"cpuspec_tokens_per_s": _spread(own), "llama_cpp_tokens_per_s": _spread(peer), "ratio": _spread(ratios)}
    print(json.dumps(figures, indent=2))
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


def _generate(llm: LLM) -> float:
    [answer] = llm.generate([[1]], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    assert answer.stats.tokens_per_s is not None, "128 tokens take more than one step"
    return answer.stats.tokens_per_s


def _llama_bench(program: Path, model: Path, threads: int) -> float:
    command = [program, "-m", model, "-t", str(threads), "-p", "0", "-n", str(NUM_TOKENS), "-r", "1", "-o", "json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)[0]["avg_ts"])


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


if __name__ == "__main__":
    typer.run(main)

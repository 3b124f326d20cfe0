"""How long streams wait while a long prompt is read beside them, and how long the prompt waits, by rows a step.

    python benchmarks/interleaving.py smollm2-135m-instruct --prompt-rows 16 --prompt-rows 32 --prompt-rows 64

The streams decode plainly; after a few tokens the prompt arrives. The largest gap between two tokens of a stream is in
milliseconds and in steps of the streams by themselves; the prompt's time to its first token is in seconds, and over the time of a
prompt alone.
"""

import statistics
from pathlib import Path
from time import perf_counter
from typing import Annotated

import numpy as np
import typer
from record import Rounds, record, save, spread

from cpuspec import SamplingParams
from cpuspec.backends import make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.engine.engine import Engine
from cpuspec.settings import EngineConfig
from cpuspec.speculation import Context, NullProposer
from cpuspec.text import make_tokenizer

STEPS = 24  # of the streams by themselves, before the prompt arrives
GAP, GAP_STEPS, PROMPT, PROMPT_ALONE = "largest gap, ms", "largest gap, plain steps", "prompt, s", "prompt over prompt alone"


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    prompt_rows: Annotated[list[int], typer.Option(help="Rows of the prompt a step, each measured in turns.", min=1)] = [  # noqa: B006
        EngineConfig.prompt_rows
    ],
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.", min=1)] = 4000,
    streams: Annotated[int, typer.Option(help="Requests that generate meanwhile.", min=1)] = 2,
    threads: Annotated[int, typer.Option(help="Threads.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are quoted.", min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print a line for each number of rows."""
    path = resolve_model(model)
    checkpoint = open_checkpoint(path)
    backend, tokenizer = make_backend("numba", checkpoint, EngineConfig(threads=threads)), make_tokenizer(checkpoint)
    capacity = min(prompt_tokens + 4096, checkpoint.config.context_length)
    engines = {
        rows: Engine(Context(backend, streams + 1, capacity, prompt_rows=rows), NullProposer(), tokenizer) for rows in prompt_rows
    }
    samples: dict[int, dict[str, list[float]]] = {rows: {} for rows in prompt_rows}
    passed, rng = Rounds(rounds, threads), np.random.default_rng(0)
    for number in passed:
        for rows in prompt_rows[:: -1 if number % 2 else 1]:
            prompts = [rng.integers(0, checkpoint.config.vocab_size, size).tolist() for size in (prompt_tokens, prompt_tokens)]
            alone_s, _ = first_token_s(engines[rows], prompts[0])
            plain_s, prompt_s, gap_s = beside_streams(engines[rows], prompts[1], streams)
            figures = {GAP: 1e3 * gap_s, GAP_STEPS: gap_s / plain_s, PROMPT: prompt_s, PROMPT_ALONE: prompt_s / alone_s}
            for name, value in figures.items():
                samples[rows].setdefault(name, []).append(value)
    figures_of = {f"{rows} rows": {name: spread(values) for name, values in one.items()} for rows, one in samples.items()}
    for arm, of in figures_of.items():
        texts = [f"{name} {one['median']:.4g}" for name, one in of.items()]
        print(f"{arm}: {'; '.join(texts)}", flush=True)
    save(
        record("interleaving", path.name, passed) | {"prompt_tokens": prompt_tokens, "streams": streams, "by_rows": figures_of},
        json_file,
    )


def first_token_s(engine: Engine, prompt: list[int]) -> tuple[float, list[float]]:
    """Seconds until a new request has its first token, and those of each step until then. The request is then aborted."""
    request_id, steps_s, arrived = engine.add_request(prompt, SamplingParams(max_tokens=2, ignore_eos=True)), [], False
    while not arrived:
        start_s = perf_counter()
        arrived = request_id in [output.request_id for output in engine.step()]
        steps_s.append(perf_counter() - start_s)
    engine.abort(request_id)
    return sum(steps_s), steps_s


def beside_streams(engine: Engine, prompt: list[int], num_streams: int) -> tuple[float, float, float]:
    """Seconds of a step of the streams by themselves, of the prompt until its first token, and of the streams' largest gap."""
    ids = [engine.add_request([number, 5, 6, 7], SamplingParams(max_tokens=4000, ignore_eos=True)) for number in range(num_streams)]
    plain_s = []
    for _ in range(STEPS):
        start_s = perf_counter()
        engine.step()
        plain_s.append(perf_counter() - start_s)
    prompt_s, steps_s = first_token_s(engine, prompt)
    for request_id in ids:
        engine.abort(request_id)
    return statistics.median(plain_s), prompt_s, max(steps_s)


if __name__ == "__main__":
    typer.run(main)

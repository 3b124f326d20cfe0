"""The time of a token with one thread and with several, quiet and beside a process that takes one core again and again.

    sudo chrt -f 10 python benchmarks/starved.py smollm2-135m-instruct --busy-us 200 --idle-us 250

Under a real-time class, as here, other processes of the machine hardly show, and the disturbing one preempts at once. One thread
runs on another core than the disturbed one.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from record import Rounds, record, save, spread

from cpuspec import LLM, SamplingParams
from cpuspec.checkpoints.download import resolve_model

# In a process of its own: use core {0} for {1} seconds, sleep for {2}, until the parent ends it.
_DISTURB = """
import os, time
os.sched_setaffinity(0, {{{0}}})
while True:
    end = time.perf_counter() + {1}
    while time.perf_counter() < end: pass
    time.sleep({2})
"""


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    busy_us: Annotated[float, typer.Option(help="Microseconds for which the core is taken.", min=1)] = 200,
    idle_us: Annotated[float, typer.Option(help="Microseconds for which it is then left alone.", min=1)] = 250,
    threads: Annotated[int, typer.Option(help="Threads, compared with one.", min=1)] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 48,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are quoted.", min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print ms a token of each, and the speed of several threads beside that process over that of one thread when quiet."""
    path, cores = resolve_model(model), sorted(os.sched_getaffinity(0))
    passed, samples = Rounds(rounds, threads), dict[str, list[float]]()
    llms = {number: LLM(path, "none", threads=number, max_sequences=1, prefix_cache_gb=0) for number in (1, threads)}
    for _ in passed:
        for arm in ("quiet", "beside"):
            with _disturbed(cores[-1], 1e-6 * busy_us, 1e-6 * idle_us) if arm == "beside" else _affinity(cores):
                for number, llm in llms.items():
                    with _affinity(cores[:1] if number == 1 else cores):
                        samples.setdefault(f"{arm}, threads: {number}", []).append(1e3 * token_s(llm, tokens))
    figures = {name: spread(values) for name, values in samples.items()}
    for name, one in figures.items():
        print(f"{name}: {one['median']:.3f} ms [{one['min']:.3f}, {one['max']:.3f}]")
    ratio = figures["quiet, threads: 1"]["median"] / figures[f"beside, threads: {threads}"]["median"]
    print(f"{threads} threads beside the process over one when quiet: {ratio:.2f}")
    save(record("starved", path.name, passed) | {"busy_us": busy_us, "idle_us": idle_us, "ms_a_token": figures}, json_file)


def token_s(llm: LLM, tokens: int) -> float:
    """Seconds of a token of a plain answer."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    llm.generate("Once upon a time", SamplingParams(max_tokens=2, ignore_eos=True))
    start = perf_counter()
    llm.generate("Once upon a time", params)
    return (perf_counter() - start) / tokens


@contextmanager
def _disturbed(core: int, busy_s: float, idle_s: float) -> Iterator[None]:
    """Let another process use a core again and again; with a higher priority where ours is a real-time one."""
    process = subprocess.Popen([sys.executable, "-c", _DISTURB.format(core, busy_s, idle_s)])
    try:
        if os.sched_getscheduler(0) == os.SCHED_FIFO:
            os.sched_setscheduler(process.pid, os.SCHED_FIFO, os.sched_param(os.sched_getparam(0).sched_priority + 1))
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def _affinity(cores: list[int]) -> Iterator[None]:
    """Keep this thread, and not those of a team, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


if __name__ == "__main__":
    typer.run(main)

"""What a decoding step takes besides the compiled forward: scheduling, batches, dispatch, verification, text, counters.

    python benchmarks/overhead.py smollm2-135m-instruct --threads 1 --threads 2 --draft none --draft auto

Times each `next` of `LLM.stream` and, within it, `kernels.team.Team.run`; what is left is overhead, and the median over the steps
is quoted, by the clock and in processor time of the calling thread, which a busy machine disturbs less. Several plain steps may run
in one call: what is outside of it is shared among them. Between two steps the
weights of a real model pass through the processor's caches and put the interpreter's data out of them: a tiny model shows a
fraction of the same overhead.
"""

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Annotated, Any
from unittest.mock import patch

import typer
from record import Rounds, record, save, spread

from cpuspec import LLM, SamplingParams
from cpuspec.checkpoints.download import resolve_model
from cpuspec.engine.engine import Output
from cpuspec.kernels.team import Team

PROMPT = "Write a story about a lighthouse."
CLOCKS = {"time": perf_counter, "processor time": thread_time}


class Stopwatch:
    """Tells the time inside a function from the time around it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._inside_s = 0.0

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted."""

        def timed(*arguments: Any) -> Any:
            start_s = self._clock()
            try:
                return function(*arguments)
            finally:
                self._inside_s += self._clock() - start_s

        return timed

    def outside_s(self, outputs: Iterable[Output]) -> list[float]:
        """Seconds that each step took outside of the function. Steps that ran at once share them evenly."""
        times, iterator = [], iter(outputs)
        while True:
            self._inside_s, start_s = 0.0, self._clock()
            try:
                output = next(iterator)
            except StopIteration:
                return times
            num_steps = len(output.cycles)
            times += [(self._clock() - start_s - self._inside_s) / num_steps] * num_steps


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    threads: Annotated[list[int], typer.Option(help="Threads; several are measured in turns.", min=1)] = [1, 2],  # noqa: B006
    draft: Annotated[list[str], typer.Option(help="Drafts, likewise.")] = ["none", "auto"],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Steps of an answer that are timed; the first, with the prompt, is not.", min=1)] = 200,
    rounds: Annotated[int, typer.Option(help="Answers of each, by each clock.", min=1)] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print a line for each number of threads and draft."""
    path = resolve_model(model)
    arms = {f"{name}, {n} threads": LLM(path, name, threads=n) for n in threads for name in draft}
    us: dict[str, dict[str, list[float]]] = {arm: {name: [] for name in CLOCKS} for arm in arms}
    passed = Rounds(rounds, max(threads))
    try:
        for _ in passed:
            for arm, llm in arms.items():
                for name, clock in CLOCKS.items():
                    us[arm][name].append(1e6 * statistics.median(overheads_s(llm, steps, clock)))
    finally:
        for llm in arms.values():
            llm.close()
    figures = {arm: {name: spread(values) for name, values in times.items()} for arm, times in us.items()}
    for arm, of in figures.items():
        texts = [f"{one['median']:.0f} us of {name} ({one['min']:.0f} to {one['max']:.0f})" for name, one in of.items()]
        print(f"{arm}: {', '.join(texts)} a step", flush=True)
    save(record("overhead", path.name, passed) | {"steps": steps, "us_per_step": figures}, json_file)


def overheads_s(llm: LLM, steps: int, clock: Callable[[], float]) -> list[float]:
    """Seconds outside of the compiled forward, of each step of an answer but the first and the last."""
    params = SamplingParams(max_tokens=steps + 2, ignore_eos=True)
    watch = Stopwatch(clock)
    with patch.object(Team, "run", watch.inside(Team.run)):
        return watch.outside_s(llm.stream(PROMPT, params))[1:-1]


if __name__ == "__main__":
    typer.run(main)

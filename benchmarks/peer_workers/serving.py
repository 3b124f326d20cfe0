"""What workers share: the loop that answers requests, and for those of `peers.py` the measures, the same for all engines.

Requests and answers are JSON, one to a line. Runs in the interpreter of a peer's own environment, so it knows numpy and the
standard library only; a worker beside it brings the engine.

    {"do": "prepare", "source": DIR, "target": DIR}            export a Hugging Face directory to the engine's own format
    {"do": "load", "model": PATH, "threads": 2, "vocab_size": 151936, "capacity": 640}
    {"do": "instructions"}                                     the instruction set that the engine uses, or null if it does not tell
    {"do": "prefill", "tokens": 512}, {"do": "decode", "tokens": 128, "depth": 4096}
    {"do": "forwards", "rows": [1, 4], "depth": 64, "repeats": 5}

Answers: {"result": ...} or {"error": text}, with the CPU time that the process used while nobody asked it anything.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_PIECE = 512


class Engine(Protocol):
    """One loaded model and one sequence."""

    def reset(self) -> None:
        """Forget the sequence."""
        ...

    def feed(self, tokens: list[int], all_logits: bool) -> NDArray[np.float32]:
        """Append tokens; logits [rows, V] of all of them, or of the last one alone."""
        ...


class Loader(Protocol):
    """Loads a model that holds up to `capacity` tokens; also returns what a reader should know: versions, kinds of weights."""

    def __call__(self, model: Path, threads: int, capacity: int) -> tuple[Engine, str]: ...


Exporter = Callable[[Path, Path], None]


def serve(
    load: Loader, export: Exporter | None = None, *, needs: str, instructions: Callable[[], str | None] = lambda: None
) -> None:
    """Answer the requests above until standard input ends. needs: the packages to install, for the error that says so."""
    answer_requests(_Session(load, export, instructions).answer, needs=needs)


def answer_requests(find: Callable[[dict[str, Any]], Any], *, needs: str) -> None:
    """Answer each request from standard input with what `find` returns or raises."""
    # Libraries print what they like: their standard output becomes standard error, and answers keep the pipe.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    idle_since_s, idle_cpu_since_s = perf_counter(), process_time()
    for line in sys.stdin:
        idle = {"idle_s": perf_counter() - idle_since_s, "idle_cpu_s": process_time() - idle_cpu_since_s}
        try:
            answer: dict[str, Any] = {"result": find(json.loads(line))}
        except ImportError as error:
            answer = {"error": f"{error}; {sys.executable} needs: pip install {needs}"}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer | idle) + "\n")
        answers.flush()
        idle_since_s, idle_cpu_since_s = perf_counter(), process_time()


def run_exporter(command: list[str]) -> None:
    """Run a program that exports a model; RuntimeError with the end of its output if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}: {done.stdout[-2000:]}")


class _Session:
    def __init__(self, load: Loader, export: Exporter | None, instructions: Callable[[], str | None]) -> None:
        self._load, self._export, self._instructions = load, export, instructions
        self._random = random.Random(0)
        self._vocab_size = 0
        self._engine: Engine | None = None

    def answer(self, request: dict[str, Any]) -> Any:
        """The result of one request."""
        arguments = {name: value for name, value in request.items() if name != "do"}
        if request["do"] == "prepare":
            return self.prepare(**arguments)
        if request["do"] == "load":
            return self.load(**arguments)
        if request["do"] == "instructions":
            return self._instructions()
        if self._engine is None:
            raise RuntimeError(f"{request['do']} was asked before load")
        measures: dict[str, Callable[..., Any]] = {"prefill": self.prefill, "decode": self.decode, "forwards": self.forwards}
        return measures[request["do"]](self._engine, **arguments)

    def prepare(self, source: str, target: str) -> None:
        """Export `source` into the directory `target`."""
        if self._export is None:
            raise RuntimeError("this engine reads Hugging Face directories as they are")
        self._export(Path(source), Path(target))

    def load(self, model: str, threads: int, vocab_size: int, capacity: int) -> str:
        """Load and check that context matters; returns a description. capacity: tokens that a sequence has to hold."""
        engine, description = self._load(Path(model), threads, capacity)
        self._vocab_size = vocab_size
        _check(engine, self._tokens(9), vocab_size)
        self._engine = engine
        return description

    def prefill(self, engine: Engine, tokens: int) -> float:
        """Seconds that a prompt takes, logits of its last token included."""
        prompt = self._tokens(tokens)
        engine.reset()
        return _seconds(lambda: engine.feed(prompt, False))

    def decode(self, engine: Engine, tokens: int, depth: int) -> float:
        """Seconds that so many tokens take one by one, from a context of `depth` tokens."""
        generated = self._tokens(tokens)
        self._fill(engine, depth)

        def run() -> None:
            for token in generated:
                engine.feed([token], True)

        return _seconds(run)

    def forwards(self, engine: Engine, rows: list[int], depth: int, repeats: int) -> dict[str, list[float]]:
        """Seconds of forwards with all logits over each number of rows, `repeats` in a row from a context of `depth` tokens.

        Engines that prepare themselves for a shape do so in the first of them: the median is what a steady pace costs.
        """
        seconds: dict[str, list[float]] = {}
        for count in rows:
            self._fill(engine, depth)
            batches = [self._tokens(count) for _ in range(repeats)]
            seconds[str(count)] = [_seconds(lambda tokens=tokens: engine.feed(tokens, True)) for tokens in batches]
        return seconds

    def _fill(self, engine: Engine, depth: int) -> None:
        """Make a context of `depth` tokens, in pieces: one large feed may take memory with the square of its length."""
        engine.reset()
        for start in range(0, depth, _PIECE):
            engine.feed(self._tokens(min(_PIECE, depth - start)), False)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(count)]


def _seconds(run: Callable[[], object]) -> float:
    start_s = perf_counter()
    run()
    return perf_counter() - start_s


def _check(engine: Engine, tokens: list[int], vocab_size: int) -> None:
    """A forward that drops its context, or some of its rows, would look fast: refuse to measure it."""
    engine.reset()
    rows = np.array(engine.feed(tokens, True))
    if rows.shape != (len(tokens), vocab_size):
        raise RuntimeError(f"logits of all rows must have the shape {(len(tokens), vocab_size)}, got {rows.shape}")
    engine.reset()
    engine.feed(tokens[:-1], False)
    stepwise = np.array(engine.feed(tokens[-1:], False))
    engine.reset()
    alone = np.array(engine.feed(tokens[-1:], False))
    if stepwise.shape != (1, vocab_size):
        raise RuntimeError(f"logits of the last row must have the shape {(1, vocab_size)}, got {stepwise.shape}")
    same, other = (float(np.corrcoef(rows[-1], row[0])[0, 1]) for row in (stepwise, alone))
    if not (same > 0.9 and same > other):
        raise RuntimeError(
            f"logits after a cached context correlate {same:.3f} with those of one forward, {other:.3f} without any context: "
            "the context is not used rightly, so times would mean nothing"
        )

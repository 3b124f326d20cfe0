"""The engines that `peers.py` measures: llama.cpp through its own programs, all others through workers in their own processes."""

import json
import os
import queue
import re
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from llama_cpp_build import Build, ended
from peers_report import DECODE, PREFILL, Figure, Samples, rows_name
from record import FigureError, PeerError

ROWS_DEPTH, REPEATS = 64, 5


class Peer(Protocol):
    """One engine with the model loaded, or a program that loads it anew for each figure."""

    about: str
    instructions: str | None  # the instruction set that it uses, if it tells

    def measure(self, figure: Figure) -> Samples:
        """Seconds of the samples of one figure. Raises FigureError if other figures may be measured, else PeerError."""
        ...

    def close(self) -> None:
        """End its process."""
        ...


@dataclass
class LlamaCpp:
    """llama.cpp's own programs. They load the model for each figure, outside the time they report.

    llama-bench computes logits of a prompt's last token only. Forwards with all logits are timed by a small program on libllama,
    `forward-cost MODEL THREADS REPETITIONS DEPTH PROMPT`, if the directory has one; `parse_forward_cost` shows what it prints.
    """

    build: Build
    model: Path
    threads: int
    rows: Sequence[int]
    timeout: float
    about: str = field(init=False)
    instructions: str | None = field(init=False)

    def __post_init__(self) -> None:
        if self.build.find("llama-bench") is None:
            raise PeerError(f"there is no llama-bench in {self.build.programs}; give the directory of llama.cpp's programs")
        self.about = f"llama-bench, {self._about_build()}"
        self.instructions = self.build.instructions

    def measure(self, figure: Figure) -> Samples:
        """One run of a program, one repetition."""
        if figure.kind == "forwards":
            if self.build.find("forward-cost") is None:
                return {}
            output = self._run("forward-cost", str(self.model), str(self.threads), "1", str(ROWS_DEPTH), "0")
            return parse_forward_cost(output, self.rows)
        prompt, new = (PREFILL, 0) if figure.kind == "prefill" else (0, DECODE)
        depth = ("-d", str(figure.depth)) if figure.depth else ()  # forks may have no such option
        tests = ("-p", str(prompt), "-n", str(new), *depth, "-r", "1")
        seconds, about = parse_llama_bench(
            self._run("llama-bench", "-m", str(self.model), "-t", str(self.threads), *tests, "-o", "json")
        )
        self.about = f"{about}, {self._about_build()}"
        return {figure.name: seconds}

    def close(self) -> None:
        """Nothing runs between figures."""

    def _about_build(self) -> str:
        without = "" if self.build.find("forward-cost") else "; no forward-cost there, so no forwards over several rows"
        return f"{self.build.about}{without}; {self.threads} threads"

    def _run(self, program: str, *arguments: str) -> str:
        command = [str(self.build.find(program)), *arguments]
        try:
            done = subprocess.run(
                command,
                env=self.build.environment(),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise FigureError(f"{program} took more than {self.timeout:g} s") from error
        except OSError as error:
            raise FigureError(f"{program} does not start: {error}") from error
        if done.returncode:
            raise FigureError(f"{program} {ended(done)}")
        return done.stdout


class Worker:
    """A script of `peer_workers/` in an interpreter of its own, asked one thing at a time. environment: variables added to ours."""

    def __init__(
        self,
        interpreter: Path,
        script: Path,
        arguments: Sequence[str],
        rows: Sequence[int],
        timeout: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.about = ""
        self.instructions: str | None = None
        self.idle_s = self.idle_cpu_s = 0.0
        self._rows, self._timeout = rows, timeout
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._answers: queue.Queue[bytes] = queue.Queue()
        try:
            self._process = subprocess.Popen(
                [str(interpreter), str(script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{interpreter} does not start: {error}") from error
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, **request: Any) -> Any:
        """The result of one request; PeerError with the worker's own words if there is none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=self._timeout)
        except queue.Empty:
            self._process.kill()
            raise PeerError(f"no answer to {request['do']!r} within {self._timeout:g} s") from None
        except OSError:
            line = b""
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            words = self._errors.read().decode(errors="replace")
            raise PeerError(f"its process ended with {code} when asked to {request['do']}: {words[-1000:].strip()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        self.idle_s += answer["idle_s"]
        self.idle_cpu_s += answer["idle_cpu_s"]
        return answer["result"]

    def load(self, model: Path, threads: int, vocab_size: int, figures: Sequence[Figure]) -> None:
        """Load the model and run each figure once without its depth; `about` and `instructions` then say what was loaded."""
        capacity = max(PREFILL, max(figure.depth for figure in figures) + DECODE, ROWS_DEPTH + REPEATS * max(self._rows)) + 16
        self.about = self.ask(do="load", model=str(model), threads=threads, vocab_size=vocab_size, capacity=capacity)
        self.instructions = self.ask(do="instructions")
        for kind in dict.fromkeys(figure.kind for figure in figures):
            self.measure(Figure(kind))
        self.idle_s = self.idle_cpu_s = 0.0

    def measure(self, figure: Figure) -> Samples:
        """One figure's samples; of repeated forwards, the medians."""
        if figure.kind == "forwards":
            seconds = self.ask(do="forwards", rows=list(self._rows), depth=ROWS_DEPTH, repeats=REPEATS)
            return {rows_name(int(count)): statistics.median(values) for count, values in seconds.items()}
        if figure.kind == "prefill":
            return {figure.name: self.ask(do="prefill", tokens=PREFILL) / PREFILL}
        return {figure.name: self.ask(do="decode", tokens=DECODE, depth=figure.depth) / DECODE}

    def close(self) -> None:
        """End the process: its input ends, and if that is not enough it is killed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")


def parse_forward_cost(output: str, rows: Sequence[int]) -> Samples:
    """Median seconds by rows, from forward-cost's line `N: ...  4: 21.0(18.3) x3.29,2.96 ...` (median and least milliseconds).

    Rows that the line does not list are absent.
    """
    line = next((line for line in output.splitlines() if line.startswith("N:")), None)
    if line is None:
        raise FigureError(f"forward-cost printed no line that begins with N: but {output[-300:]!r}")
    found = {int(count): float(median) / 1e3 for count, median in re.findall(r"(\d+): ([\d.]+)\([\d.]+\)", line)}
    return {rows_name(count): found[count] for count in rows if count in found}


def parse_llama_bench(output: str) -> tuple[float, str]:
    """Seconds of a token in the one test of llama-bench's JSON, and what was measured in words."""
    try:
        [test] = json.loads(output)
        about = (
            f"llama.cpp {test['build_number']}, keys in {test['type_k']}, values in {test['type_v']}, "
            f"flash attention {({-1: 'auto', 0: 'off', 1: 'on'})[int(test['flash_attn'])]}"
        )
        return 1 / float(test["avg_ts"]), about
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise FigureError(f"llama-bench's JSON is not that of one test: {output[-300:]!r}") from error

"""cpuspec beside llama.cpp, OpenVINO, ONNX Runtime and torch int8, in turns in one run: decoding, prefill, forwards over rows.

    python benchmarks/peers.py --shape qwen2.5-0.5b --llama-cpp PROGRAMS_DIR --python openvino=VENV/bin/python --rounds 5
    python benchmarks/peers.py qwen2.5-coder-1.5b-instruct --peers llama.cpp --llama-cpp PROGRAMS_DIR

llama.cpp reads the same GGUF file. The others get a model of the same shape with random weights, exported to their own int4
format once and kept. Each runs in a process of its own (`peer_workers/`), the three Python engines in environments of their own.
Every round asks every engine for one figure after the other, so that a machine's moods hit all of them alike.
"""

import json
import os
import queue
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.config import ModelConfig
from cpuspec.environment import cache_dir
from cpuspec.errors import CpuspecError

OWN = "cpuspec"
LLAMA_CPP = "llama.cpp"
PYTHON_PEERS = {"openvino": "openvino", "onnxruntime": "onnxruntime", "torch": None}  # by what their models are called, if exported
PEERS = (LLAMA_CPP, *PYTHON_PEERS)

PREFILL, DECODE, ROWS_DEPTH, REPEATS = 512, 128, 64, 5
FIGURES = ("decode", "prefill", "forwards")

_ROOT = Path(__file__).resolve().parent
_MAKE_MODEL = _ROOT.parent / "tools" / "make_tiny_model.py"

# Seconds by name of the figure: "decode", "prefill", "1 row", "4 rows".
Samples = dict[str, float]


class PeerError(Exception):
    """An engine that cannot be measured; the text says why."""


class Peer(Protocol):
    """One engine with the model loaded, or a program that loads it anew for each figure."""

    about: str

    def measure(self, figure: str) -> Samples:
        """Seconds of the samples of one figure."""
        ...

    def close(self) -> None:
        """End its process."""
        ...


def main(
    model: Annotated[str | None, typer.Argument(help="Recipe name or GGUF file.")] = None,
    shape: Annotated[str | None, typer.Option(help="Known shape with random weights instead, such as qwen2.5-0.5b.")] = None,
    weight_format: Annotated[str, typer.Option("--format", help="Weights of a --shape, for cpuspec and llama.cpp.")] = "q4_0",
    peers: Annotated[str, typer.Option(help="Engines to measure beside cpuspec.")] = ",".join(PEERS),
    python: Annotated[list[str] | None, typer.Option(help="Interpreter of a peer's environment: openvino=PATH; repeat.")] = None,
    llama_cpp: Annotated[Path | None, typer.Option(help="Directory of llama.cpp's programs: llama-bench, forward-cost.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of every engine.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are quoted.", min=1)] = 5,
    rows: Annotated[str, typer.Option(help="Rows of the forwards with all logits.")] = "1,2,4,8,16",
    workspace: Annotated[Path | None, typer.Option(help="Where models are written and exported to, and kept.")] = None,
    prepare: Annotated[bool, typer.Option("--prepare", help="Write and export the models, measure nothing.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which an engine that does not answer is left out.", min=1)] = 1800,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print each engine's figures and how many times as fast as each of them cpuspec is."""
    try:
        names, interpreters, counts = read_names(peers), read_interpreters(python or []), read_rows(rows)
        store = workspace or cache_dir() / "peers"
        path = _model_path(model, shape, weight_format, store)
        config = open_checkpoint(path).config
    except (PeerError, CpuspecError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
    launcher = _Launcher(path, config, store, threads, counts, timeout, llama_cpp, interpreters)
    engines: dict[str, Peer] = {}
    failed: dict[str, str] = {}
    try:
        for name in (OWN, *names):
            _say(f"{name}: {'preparing' if prepare else 'preparing and loading'}")
            try:
                engine = launcher.engine(name, prepare)
                engines |= {name: engine} if engine is not None else {}
            except PeerError as error:
                failed[name] = str(error)
                _say(f"{name} is left out: {error}")
        if prepare:
            raise typer.Exit(bool(failed))
        if OWN in failed:  # there is nothing to compare
            raise typer.Exit(1)
        try:
            run = measure(engines, rounds, failed)
        except PeerError as error:
            print(f"{OWN} itself failed: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        # An engine that failed on the way is no longer there, and neither are its samples.
        abouts = {name: engine.about for name, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.close()
    head = {"model": path.name, "threads": threads, "rounds": rounds, "machine": _machine(), "engines": abouts, "failed": failed}
    result = head | {"load_average": run.load_average} | summarize(run.samples)
    print(report(result))
    if json_file:
        json_file.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


def read_names(text: str) -> list[str]:
    """Names of peers, separated by commas; PeerError for one that does not exist."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise PeerError(f"no peer is called {name!r}; wanted some of {', '.join(PEERS)}")
    return list(dict.fromkeys(names))


def read_interpreters(texts: Sequence[str]) -> dict[str, Path]:
    """NAME=PATH options as a dictionary; PeerError for a name without a Python environment or a file that is not there."""
    interpreters = {}
    for text in texts:
        name, found, path = text.partition("=")
        if not found or name not in PYTHON_PEERS:
            raise PeerError(f"--python {text}: wanted NAME=INTERPRETER with one of {', '.join(PYTHON_PEERS)}")
        if not Path(path).is_file():
            raise PeerError(f"--python {text}: there is no file {path!r}")
        interpreters[name] = Path(path)
    return interpreters


def read_rows(text: str) -> list[int]:
    """Numbers of rows, ascending; PeerError unless all are integers from 1 to 256."""
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not pieces or not all(piece.isdecimal() and 1 <= int(piece) <= 256 for piece in pieces):
        raise PeerError(f"--rows {text!r}: wanted numbers from 1 to 256, separated by commas")
    return sorted({int(piece) for piece in pieces})


def rows_name(rows: int) -> str:
    """What a forward over so many rows is called in samples and tables."""
    return f"{rows} row{'s' * (rows != 1)}"


def parse_forward_cost(output: str, rows: Sequence[int]) -> Samples:
    """Median seconds by rows, from forward-cost's line `N: ...  4: 21.0(18.3) x3.29,2.96 ...` (median and least milliseconds).

    Rows that the line does not list are absent.
    """
    line = next((line for line in output.splitlines() if line.startswith("N:")), None)
    if line is None:
        raise PeerError(f"forward-cost printed no line that begins with N: but {output[-300:]!r}")
    found = {int(count): float(median) / 1e3 for count, median in re.findall(r"(\d+): ([\d.]+)\([\d.]+\)", line)}
    return {rows_name(count): found[count] for count in rows if count in found}


def parse_llama_bench(output: str) -> float:
    """Seconds of the one test in llama-bench's JSON."""
    try:
        [test] = json.loads(output)
        return float(test["avg_ns"]) / 1e9
    except (ValueError, KeyError, TypeError) as error:
        raise PeerError(f"llama-bench's JSON is not that of one test: {output[-300:]!r}") from error


@dataclass
class LlamaCpp:
    """llama.cpp's own programs. They load the model for each figure, outside the time they report."""

    programs: Path
    model: Path
    threads: int
    rows: Sequence[int]
    timeout: float
    about: str = field(init=False)

    def __post_init__(self) -> None:
        if not (self.programs / "llama-bench").is_file():
            raise PeerError(f"there is no llama-bench in {self.programs}; give the directory of llama.cpp's programs")
        without = "" if self._has_forward_cost else "; no forward-cost there, so no forwards over several rows"
        self.about = f"llama-bench, {self.model.name}{without}"

    @property
    def _has_forward_cost(self) -> bool:
        return (self.programs / "forward-cost").is_file()

    def measure(self, figure: str) -> Samples:
        """One run of a program, one repetition."""
        if figure == "forwards":
            if not self._has_forward_cost:
                return {}
            output = self._run("forward-cost", str(self.model), str(self.threads), "1", str(ROWS_DEPTH), "0")
            return parse_forward_cost(output, self.rows)
        prompt, new = (PREFILL, 0) if figure == "prefill" else (0, DECODE)
        options = ("-m", str(self.model), "-t", str(self.threads), "-p", str(prompt), "-n", str(new), "-r", "1", "-o", "json")
        return {figure: parse_llama_bench(self._run("llama-bench", *options))}

    def close(self) -> None:
        """Nothing runs between figures."""

    def _run(self, program: str, *arguments: str) -> str:
        command = [str(self.programs / program), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=self.timeout, check=False)
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"{program} took more than {self.timeout:g} s") from error
        except OSError as error:
            raise PeerError(f"{program} does not start: {error}") from error
        if done.returncode:
            raise PeerError(f"{program} failed with {done.returncode}: {done.stderr[-500:].strip()}")
        return done.stdout


class Worker:
    """A script of `peer_workers/` in an interpreter of its own, asked one thing at a time."""

    def __init__(self, interpreter: Path, script: Path, rows: Sequence[int], timeout: float) -> None:
        self.about = ""
        self.idle_s = self.idle_cpu_s = 0.0
        self._rows, self._timeout = rows, timeout
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._answers: queue.Queue[bytes] = queue.Queue()
        try:
            self._process = subprocess.Popen(
                [str(interpreter), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
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

    def load(self, model: Path, threads: int, vocab_size: int) -> None:
        """Load the model and warm up; `about` then says what was loaded."""
        plan = {"prefill": PREFILL, "decode": DECODE, "rows": list(self._rows), "depth": ROWS_DEPTH}
        self.about = self.ask(do="load", model=str(model), threads=threads, vocab_size=vocab_size, **plan)
        self.idle_s = self.idle_cpu_s = 0.0

    def measure(self, figure: str) -> Samples:
        """One figure's samples; of repeated forwards, the medians."""
        if figure == "forwards":
            seconds = self.ask(do=figure, rows=list(self._rows), depth=ROWS_DEPTH, repeats=REPEATS)
            return {rows_name(int(count)): statistics.median(values) for count, values in seconds.items()}
        return {figure: self.ask(do=figure, tokens=PREFILL if figure == "prefill" else DECODE)}

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


@dataclass(frozen=True)
class _Launcher:
    """Makes engines: writes what they read, starts their processes, loads the model."""

    path: Path
    config: ModelConfig
    workspace: Path
    threads: int
    rows: Sequence[int]
    timeout: float
    llama_cpp: Path | None
    interpreters: Mapping[str, Path]

    def engine(self, name: str, prepare_only: bool) -> Peer | None:
        """The engine, ready to be measured; None after preparing it only. Raises PeerError."""
        if name == LLAMA_CPP:
            if self.llama_cpp is None:
                raise PeerError("where its programs are is not known; give --llama-cpp DIRECTORY")
            return LlamaCpp(self.llama_cpp, self.path, self.threads, self.rows, self.timeout)
        if name != OWN and name not in self.interpreters:
            raise PeerError(f"its interpreter is not known; give --python {name}=PATH")
        interpreter = self.interpreters.get(name, Path(sys.executable))
        worker = Worker(interpreter, _ROOT / "peer_workers" / f"worker_{name}.py", self.rows, self.timeout)
        try:
            model = self.path if name == OWN else self._exported(worker, PYTHON_PEERS[name])
            if not prepare_only:
                worker.load(model, self.threads, self.config.vocab_size)
                return worker
        except BaseException:
            worker.close()
            raise
        worker.close()
        return None

    def _exported(self, worker: Worker, export: str | None) -> Path:
        """The model of this shape in the engine's own format, or, for None, as the Hugging Face directory it is exported from."""
        c = self.config
        shape = f"{c.num_layers}x{c.hidden_size}-{c.intermediate_size}-{c.num_heads}-{c.num_kv_heads}x{c.head_dim}-{c.vocab_size}"
        home = self.workspace / f"{c.architecture}-{shape}{'' if c.tied_embeddings else '-untied'}"
        source = home / "huggingface"
        if not source.exists():
            part = _fresh(home / "huggingface.part")
            _make_model("hf", part, *_shape_options(c))
            part.rename(source)
        if export is None:
            return source
        target = home / export
        if not target.exists():
            part = _fresh(home / f"{export}.part")
            worker.ask(do="prepare", source=str(source), target=str(part))
            part.rename(target)
        return target


def _model_path(model: str | None, shape: str | None, weight_format: str, workspace: Path) -> Path:
    if (model is None) == (shape is None):
        raise PeerError("give a model or --shape, one of them")
    if model is not None:
        return resolve_model(model)
    path = workspace / f"{shape}-{weight_format}.gguf"
    if not path.exists():
        part = _fresh(workspace / f"{path.name}.part")
        _make_model("shape", part, "--shape", str(shape), "--format", weight_format)
        part.rename(path)
    return path


def _shape_options(c: ModelConfig) -> list[str]:
    sizes = {
        "hidden-size": c.hidden_size,
        "intermediate-size": c.intermediate_size,
        "layers": c.num_layers,
        "heads": c.num_heads,
        "kv-heads": c.num_kv_heads,
        "head-dim": c.head_dim,
        "vocab-size": c.vocab_size,
        "context-length": c.context_length,
    }
    options = ["--architecture", c.architecture, "--format", "bf16", *([] if c.tied_embeddings else ["--untied"])]
    return options + [text for name, size in sizes.items() for text in (f"--{name}", str(size))]


def _make_model(kind: str, path: Path, *options: str) -> None:
    command = [sys.executable, str(_MAKE_MODEL), kind, str(path), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{_MAKE_MODEL.name} failed with {done.returncode}: {done.stdout[-500:].strip()}")


def _fresh(path: Path) -> Path:
    """`path` without what an interrupted run left there, in a directory that exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path


@dataclass
class Run:
    """Samples by engine, one dictionary for each round, and the machine's load average when each round began."""

    samples: dict[str, list[Samples]]
    load_average: list[float]


def measure(engines: dict[str, Peer], rounds: int, failed: dict[str, str]) -> Run:
    """Ask every engine for every figure in every round. One that fails goes from `engines` to `failed`, with its samples."""
    run = Run({name: [] for name in engines}, [])
    for number in range(rounds):
        run.load_average.append(round(os.getloadavg()[0], 2))
        _say(f"round {number + 1} of {rounds}, load average {run.load_average[-1]}")
        for samples in run.samples.values():
            samples.append({})
        for figure in FIGURES:
            # Who comes first changes from round to round: a busy neighbour's burst then does not always hit the same one.
            turns = list(engines)
            turns = turns[number % len(turns) :] + turns[: number % len(turns)]
            for name in turns:
                try:
                    run.samples[name][-1] |= engines[name].measure(figure)
                except PeerError as error:
                    if name == OWN:
                        raise
                    _say(f"{name} is left out from here on: {error}")
                    failed[name] = str(error)
                    engines.pop(name).close()
                    del run.samples[name]
    for engine in engines.values():
        if isinstance(engine, Worker) and engine.idle_s > 0:
            engine.about += f"; used {engine.idle_cpu_s / engine.idle_s:.1%} of a core while others had their turn"
    return run


def summarize(samples: Mapping[str, Sequence[Samples]]) -> dict[str, Any]:
    """Figures and ratios, {"figures": {figure: {engine: spread}}, "ratios": ..., "over_one_row": {engine: {rows: spread}}}.

    samples: seconds by engine, round and figure, cpuspec's included. figures: tokens/s of decode and prefill, milliseconds of
    forwards. ratios: {figure: {peer: spread, "best": {"peer": name, **spread}}}, a peer's seconds over cpuspec's in the same
    round, so that more than 1 means that cpuspec is faster; the best peer is the one with the lowest median. over_one_row: a
    forward's seconds over those of one row in the same round. A spread holds median, min, max and the rounds' values.
    """
    names = list(dict.fromkeys(figure for rounds in samples.values() for one in rounds for figure in one))
    seconds = {
        figure: {
            engine: [one[figure] for one in rounds] for engine, rounds in samples.items() if all(figure in one for one in rounds)
        }
        for figure in names
    }
    figures = {
        figure: {engine: _spread([_shown(figure, value) for value in values]) for engine, values in by_engine.items()}
        for figure, by_engine in seconds.items()
    }
    ratios: dict[str, Any] = {}
    for figure, by_engine in seconds.items():
        own = by_engine.get(OWN)
        peers = {engine: values for engine, values in by_engine.items() if engine != OWN}
        if own is None or not peers:
            continue
        ratios[figure] = {engine: _spread(_over(values, own)) for engine, values in peers.items()}
        best = min(peers, key=lambda engine: statistics.median(peers[engine]))
        ratios[figure]["best"] = {"peer": best, **ratios[figure][best]}
    one_row = seconds.get(rows_name(1), {})
    several = [figure for figure in seconds if figure.endswith("rows")]
    over_one_row = {
        engine: {figure: _spread(_over(seconds[figure][engine], one)) for figure in several if engine in seconds[figure]}
        for engine, one in one_row.items()
    }
    return {"figures": figures, "ratios": ratios, "over_one_row": over_one_row}


def report(result: Mapping[str, Any]) -> str:
    """The result as Markdown: figures, ratios, cost of rows, then what was measured and what could not be."""
    figures, ratios, costs = result["figures"], result["ratios"], result["over_one_row"]
    engines = list(result["engines"])
    peers = [engine for engine in engines if engine != OWN]
    head = f"{result['model']}, {result['threads']} threads, median of {result['rounds']} rounds"
    lines = [f"{head} (least and most)", ""]
    rows = [[_label(figure), *(_cell(by_engine.get(engine), 1) for engine in engines)] for figure, by_engine in figures.items()]
    lines += [*_table(["", *engines], rows), ""]
    if ratios:
        lines += ["Times as fast as each peer, round by round", ""]
        rows = []
        for figure, by_peer in ratios.items():
            best = by_peer["best"]
            cells = [_cell(by_peer.get(peer), 2) for peer in peers]
            rows.append([figure, *cells, f"{best['peer']} {best['median']:.2f}"])
        lines += [*_table([f"{OWN} over", *peers, "best peer"], rows), ""]
    if any(costs.values()):
        lines += ["Cost of a forward over that of one row", ""]
        names = list(dict.fromkeys(figure for by_rows in costs.values() for figure in by_rows))
        rows = [[figure, *(_cell(costs.get(engine, {}).get(figure), 2) for engine in engines)] for figure in names]
        lines += [*_table(["", *engines], rows), ""]
    lines += [f"- {engine}: {about}" for engine, about in result["engines"].items()]
    lines += [f"- {engine} was left out: {reason}" for engine, reason in result["failed"].items()]
    load = result["load_average"]
    lines += [f"- machine: {result['machine']}; load average as rounds began: {', '.join(map(str, load))}"]
    if max(load) > result["threads"] + 1:
        lines += [
            "- the machine was busy with other things: engines that spin suffer most, so the ratios are not those of a quiet one"
        ]
    return "\n".join(lines)


def _shown(figure: str, seconds: float) -> float:
    tokens = {"decode": DECODE, "prefill": PREFILL}.get(figure)
    return seconds * 1e3 if tokens is None else tokens / seconds


def _label(figure: str) -> str:
    return {"decode": f"decode {DECODE}, tok/s", "prefill": f"prefill {PREFILL}, tok/s"}.get(figure, f"{figure}, ms")


def _over(values: Sequence[float], to: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, to, strict=True)]


def _spread(values: Sequence[float]) -> dict[str, Any]:
    median, least, most = statistics.median(values), min(values), max(values)
    return {"median": round(median, 4), "min": round(least, 4), "max": round(most, 4), "rounds": [round(v, 4) for v in values]}


def _cell(spread: Mapping[str, Any] | None, digits: int) -> str:
    if spread is None:
        return "-"
    return f"{spread['median']:.{digits}f} ({spread['min']:.{digits}f} to {spread['max']:.{digits}f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _machine() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        text = ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"{name[1] if name else 'unknown processor'}, {os.cpu_count()} logical processors"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)

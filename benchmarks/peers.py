"""cpuspec beside llama.cpp, OpenVINO, ONNX Runtime and torch int8, in turns in one run: decoding, prefill, forwards over rows.

    python benchmarks/peers.py --shape qwen2.5-0.5b --llama-cpp PROGRAMS_DIR --python openvino=VENV/bin/python --rounds 5
    python benchmarks/peers.py qwen2.5-coder-1.5b-instruct --peers llama.cpp --llama-cpp PROGRAMS_DIR

llama.cpp reads the same GGUF file. The others get a model of the same shape with random weights, exported to their own int4
format once and kept. Each runs in a process of its own (`peer_workers/`), the three Python engines in environments of their own.
Every round asks every engine for one figure after the other, so that a machine's moods hit all of them alike.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from peers_engines import FIGURES, LlamaCpp, Peer, PeerError, Worker
from peers_report import OWN, Samples, report, summarize

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.config import ModelConfig
from cpuspec.environment import cache_dir
from cpuspec.errors import CpuspecError

LLAMA_CPP = "llama.cpp"
PYTHON_PEERS = {"openvino": "openvino", "onnxruntime": "onnxruntime", "torch": None}  # by what their models are called, if exported
PEERS = (LLAMA_CPP, *PYTHON_PEERS)

_ROOT = Path(__file__).resolve().parent
_MAKE_MODEL = _ROOT.parent / "tools" / "make_tiny_model.py"


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
    result = head | {"load_average": run.load_average, "stolen": run.stolen} | summarize(run.samples)
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
    """Samples by engine, one dictionary for each round, and how busy the machine was."""

    samples: dict[str, list[Samples]]
    load_average: list[float]  # as each round began
    stolen: list[float]  # share of the busy time of all processors that a hypervisor gave to others


def measure(engines: dict[str, Peer], rounds: int, failed: dict[str, str]) -> Run:
    """Ask every engine for every figure in every round. One that fails goes from `engines` to `failed`, with its samples."""
    run = Run({name: [] for name in engines}, [], [])
    for number in range(rounds):
        run.load_average.append(round(os.getloadavg()[0], 2))
        _say(f"round {number + 1} of {rounds}, load average {run.load_average[-1]}")
        busy_before, stolen_before = _processor_time()
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
        busy, stolen = _processor_time()
        run.stolen.append(round((stolen - stolen_before) / max(1, busy - busy_before), 4))
    for engine in engines.values():
        if isinstance(engine, Worker) and engine.idle_s > 0:
            engine.about += f"; used {engine.idle_cpu_s / engine.idle_s:.1%} of a core while others had their turn"
    return run


def _processor_time() -> tuple[int, int]:
    """Ticks since the machine started in which its processors had work, and those of them that a hypervisor took away."""
    try:
        user, nice, system, _, _, interrupts, soft_interrupts, stolen, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    except (OSError, ValueError):  # not Linux
        return 0, 0
    return user + nice + system + interrupts + soft_interrupts + stolen, stolen


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

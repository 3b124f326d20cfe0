"""cpuspec beside llama.cpp and OpenVINO, in turns in one run: decoding, prefill, forwards over rows.

    python benchmarks/peers.py --shape qwen2.5-0.5b --llama-cpp PROGRAMS_DIR --python openvino=VENV/bin/python --rounds 5
    python benchmarks/peers.py qwen2.5-coder-1.5b-instruct --peers llama.cpp --llama-cpp PROGRAMS_DIR --figures decode,busy
    python benchmarks/peers.py qwen2.5-coder-1.5b-instruct --peers llama.cpp --llama-cpp PROGRAMS_DIR --figures "" --depth 4096
    python benchmarks/peers.py smollm2-135m-instruct --peers llama.cpp --llama-cpp PROGRAMS_DIR --isa native,avx_vnni,avx2

llama.cpp reads the same GGUF file. OpenVINO gets a model of the same shape with random weights, exported to its own int4
format once and kept. Each runs in a process of its own (`peer_workers/`), OpenVINO in an environment of its own.
Every round asks every engine for one figure after the other, so that a machine's moods hit all of them alike.

--isa holds cpuspec back to an instruction set and puts llama.cpp's library for it (in VARIANTS/ISA/) in front of its own.
OpenVINO chooses its instructions itself: it takes part in `native` only. Each engine has its turns in every round
with each instruction set, and ratios are taken within one instruction set.
"""

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from instruction_sets import FEATURES, NATIVE, build_text, held_back, read_instruction_sets
from llama_cpp_build import find_build
from peers_engines import LlamaCpp, Peer, Worker
from peers_report import BUSY, DECODE, OWN, QUIET, Figure, Samples, print_report, summarize
from record import FigureError, PeerError, Rounds, read_names, record, save, say

from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.checkpoint import tensor_shapes
from cpuspec.checkpoints.download import resolve_model
from cpuspec.cli.machine import describe_hardware
from cpuspec.cli.options import read_numbers
from cpuspec.config import ModelConfig
from cpuspec.environment import cache_dir
from cpuspec.errors import CpuspecError

LLAMA_CPP, IK_LLAMA_CPP = "llama.cpp", "ik_llama.cpp"

EngineKey = tuple[str, str]  # an instruction set and an engine's name


# Engines in an environment of their own: the environment, which several may share, and arguments of its worker.
PYTHON_PEERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "openvino": ("openvino", ()),
    "openvino-f32": ("openvino", ("f32",)),
}
LLAMA_PEERS = (LLAMA_CPP, IK_LLAMA_CPP)
ENVIRONMENTS = tuple(dict.fromkeys(environment for environment, _ in PYTHON_PEERS.values()))
PEERS = (*LLAMA_PEERS, *PYTHON_PEERS)
FIGURES = {"decode": QUIET, "prefill": Figure("prefill"), "forwards": Figure("forwards"), "busy": BUSY}

_ROOT = Path(__file__).resolve().parent
_MAKE_MODEL = _ROOT.parent / "tools" / "make_tiny_model.py"


def main(
    model: Annotated[str | None, typer.Argument(help="Recipe name or GGUF file.")] = None,
    shape: Annotated[str | None, typer.Option(help="Known shape with random weights instead, such as qwen2.5-0.5b.")] = None,
    weight_format: Annotated[str, typer.Option("--format", help="Weights of a --shape, for cpuspec and llama.cpp.")] = "q4_0",
    peers: Annotated[str, typer.Option(help=f"Engines to measure beside cpuspec, of {', '.join(PEERS)}.")] = ",".join(
        (LLAMA_CPP, *PYTHON_PEERS)
    ),
    python: Annotated[list[str] | None, typer.Option(help="Interpreter of a peer's environment: openvino=PATH; repeat.")] = None,
    llama_cpp: Annotated[Path | None, typer.Option(help="Directory of llama.cpp's programs: llama-bench, forward-cost.")] = None,
    ik_llama_cpp: Annotated[Path | None, typer.Option(help="The same, of ik_llama.cpp.")] = None,
    isa: Annotated[
        str, typer.Option(help=f"Instruction sets, of {', '.join((NATIVE, *FEATURES))}; native is all that the processor has.")
    ] = NATIVE,
    llama_cpp_variants: Annotated[
        Path | None,
        typer.Option(help="Directory of llama.cpp's libraries by instruction set; by default variants/ beside its programs."),
    ] = None,
    figures: Annotated[
        str, typer.Option(help=f"Some of {', '.join(FIGURES)} (that is, decoding beside a busy process).")
    ] = "decode,prefill,forwards",
    depth: Annotated[str, typer.Option(help="Tokens that a context already holds; decoding is measured at each as well.")] = "",
    threads: Annotated[int, typer.Option(help="Threads of every engine.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are quoted.", min=1)] = 5,
    rows: Annotated[str, typer.Option(help="Rows of the forwards with all logits.")] = "1,2,4,8,16",
    workspace: Annotated[Path | None, typer.Option(help="Where models are written and exported to, and kept.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which an engine that does not answer is left out.", min=1)] = 1800,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print each engine's figures and how many times as fast as each of them cpuspec is."""
    try:
        names, interpreters, counts = read_names(peers, PEERS), read_interpreters(python or []), read_numbers(rows, "--rows")
        asked, instruction_sets = read_figures(figures, depth), read_instruction_sets(isa)
        store = workspace or cache_dir() / "peers"
        checkpoint = open_checkpoint(_model_path(model, shape, weight_format, store))
        _check_depth(checkpoint, asked)
    except (PeerError, CpuspecError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
    launcher = _Launcher(
        checkpoint, store, threads, asked, counts, timeout, llama_cpp, llama_cpp_variants, interpreters, ik_llama_cpp
    )
    engines: dict[EngineKey, Peer] = {}
    failed: dict[EngineKey, str] = {}
    try:
        for key in product(instruction_sets, (OWN, *names)):
            say(f"{', '.join(key)}: preparing and loading")
            try:
                engines[key] = launcher.engine(*key)
            except PeerError as error:
                failed[key] = str(error)
                say(f"{', '.join(key)}: left out: {error}")
        if any(name == OWN for _, name in failed):  # there is nothing to compare
            raise typer.Exit(1)
        passed = Rounds(rounds, threads)
        try:
            samples = measure(engines, passed, asked, failed)
        except PeerError as error:
            print(f"{OWN} itself failed: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
    finally:
        for engine in engines.values():
            engine.close()
    result = record("peers", checkpoint.path.name, passed)
    parts = {one: _part(one, engines, samples, failed, weight_bytes(checkpoint), passed) for one in instruction_sets}
    result["instruction_sets"] = parts
    print_report(result)
    save(result, json_file)


def _part(
    isa: str,
    engines: Mapping[EngineKey, Peer],
    samples: Mapping[EngineKey, Sequence[Samples]],
    failed: Mapping[EngineKey, str],
    num_bytes: int,
    rounds: Rounds,
) -> dict[str, Any]:
    """What a results file says of one instruction set."""
    # An engine that failed on the way is no longer there, and neither are its samples.
    here = {name: engine for (one, name), engine in engines.items() if one == isa}
    own = here[OWN].instructions
    builds = {name: build_text(here[name].instructions, own) for name in (LLAMA_CPP, IK_LLAMA_CPP) if name in here}
    return {
        "instructions": {OWN: own, **builds},
        "engines": {name: engine.about for name, engine in here.items()},
        "failed": {name: reason for (one, name), reason in failed.items() if one == isa},
        **summarize(
            {name: samples[isa, name] for name in here}, dict.fromkeys((OWN, *LLAMA_PEERS), num_bytes), rounds.read_bytes_per_s
        ),
    }


def read_interpreters(texts: Sequence[str], names: Sequence[str] = ENVIRONMENTS) -> dict[str, Path]:
    """NAME=PATH options as a dictionary; PeerError for a name that is not among `names` or a file that is not there."""
    interpreters = {}
    for text in texts:
        name, found, path = text.partition("=")
        if not found or name not in names:
            raise PeerError(f"--python {text}: wanted NAME=INTERPRETER with one of {', '.join(names)}")
        if not Path(path).is_file():
            raise PeerError(f"--python {text}: there is no file {path!r}")
        interpreters[name] = Path(path)
    return interpreters


def read_figures(text: str, depths: str) -> list[Figure]:
    """Figures by their names, then decoding at each depth; PeerError for none, and for one whose comparison is not there."""
    figures = [FIGURES[name] for name in read_names(text, FIGURES)]
    figures += [Figure("decode", depth) for depth in read_numbers(depths or "none", "--depth")]
    if not figures:
        raise PeerError("there is nothing to measure; give --figures or --depth")
    if BUSY in figures and QUIET not in figures:
        raise PeerError("--figures busy is compared with decode in the same round: give both")
    return list(dict.fromkeys(figures))


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the matrices that one decoded token reads, as they are in the file; of experts, of those that it goes through."""
    config, tensors = checkpoint.config, checkpoint.tensors
    unread = () if config.tied_embeddings else ("embed",)
    dense = sum(tensor.num_bytes for name, tensor in tensors.items() if len(tensor.shape) == 2 and name not in unread)
    of_experts = sum(tensor.num_bytes for tensor in tensors.values() if len(tensor.shape) == 3)
    return dense + (of_experts * config.experts.used // config.experts.count if config.experts else 0)


def _check_depth(checkpoint: Checkpoint, figures: Sequence[Figure]) -> None:
    deepest = max(figure.depth for figure in figures)
    if deepest + DECODE > checkpoint.config.context_length:
        raise PeerError(f"--depth {deepest}: the model holds {checkpoint.config.context_length} tokens, {DECODE} of them new")


@dataclass(frozen=True)
class _Launcher:
    """Makes engines: writes what they read, starts their processes, loads the model."""

    checkpoint: Checkpoint
    workspace: Path
    threads: int
    figures: Sequence[Figure]
    rows: Sequence[int]
    timeout: float
    llama_cpp: Path | None
    llama_cpp_variants: Path | None
    interpreters: Mapping[str, Path]
    ik_llama_cpp: Path | None = None

    def engine(self, isa: str, name: str) -> Peer:
        """The engine in an instruction set, ready to be measured. Raises PeerError."""
        if name in LLAMA_PEERS:
            is_fork = name == IK_LLAMA_CPP
            programs = self.ik_llama_cpp if is_fork else self.llama_cpp
            if programs is None:
                raise PeerError(f"where its programs are is not known; give --{'ik-' * is_fork}llama-cpp DIRECTORY")
            build = find_build(programs, None if is_fork else self.llama_cpp_variants, isa)
            return LlamaCpp(build, self.checkpoint.path, self.threads, self.rows, self.timeout)
        if name != OWN and isa != NATIVE:
            raise PeerError(f"it chooses its instructions itself; --isa {NATIVE} measures it")
        home, arguments = (OWN, ()) if name == OWN else PYTHON_PEERS[name]
        interpreter = Path(sys.executable) if name == OWN else self.interpreters.get(home)
        if interpreter is None:
            raise PeerError(f"its interpreter is not known; give --python {home}=PATH")
        environment = held_back(isa) if name == OWN else {}
        script = _ROOT / "peer_workers" / f"worker_{home}.py"
        worker = Worker(interpreter, script, arguments, self.rows, self.timeout, environment)
        try:
            model = self.checkpoint.path if name == OWN else self._exported(worker, home)
            worker.load(model, self.threads, self.checkpoint.config.vocab_size, self.figures)
            if name == OWN and isa not in (NATIVE, worker.instructions):
                raise PeerError(f"it was to use {isa}, and uses {worker.instructions}")
        except BaseException:
            worker.close()
            raise
        worker.about += f"; features held back to those of {isa}" if environment else ""
        return worker

    def _exported(self, worker: Worker, environment: str) -> Path:
        """The model of this shape in the engine's own format."""
        c = self.checkpoint.config
        shape = f"{c.num_layers}x{c.hidden_size}-{c.intermediate_size}-{c.num_heads}-{c.num_kv_heads}x{c.head_dim}-{c.vocab_size}"
        home = self.workspace / f"{c.architecture}-{shape}{'' if c.tied_embeddings else '-untied'}"
        source = home / "huggingface"
        if not source.exists():
            # In f32 while it is made, and again while it is exported.
            needed, there = 5 * sum(map(math.prod, tensor_shapes(c).values())), describe_hardware()["available_memory_bytes"]
            if there is not None and needed > there:
                raise PeerError(f"to export this model takes {needed / 1e9:.0f} GB of memory, and {there / 1e9:.0f} GB are free")
            part = _fresh(home / "huggingface.part")
            _make_model("hf", part, *_shape_options(c))
            part.rename(source)
        target = home / environment
        if not target.exists():
            part = _fresh(home / f"{environment}.part")
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
        _make_model("shape", part, f"shape={shape}", f"weight_format={weight_format}")
        part.rename(path)
    return path


def _shape_options(c: ModelConfig) -> list[str]:
    names = (
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
        "context_length",
    )
    sizes = [f"{name}={getattr(c, name)}" for name in names]
    return [f"architecture={c.architecture}", "dtype=bf16", f"tied={str(c.tied_embeddings).lower()}", *sizes]


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


def measure(
    engines: dict[EngineKey, Peer], rounds: Rounds, figures: Sequence[Figure], failed: dict[EngineKey, str]
) -> dict[EngineKey, list[Samples]]:
    """Ask every engine for every figure in every round: samples by engine, one dictionary for each round.

    An engine that fails goes from `engines` to `failed`, with its samples. One that fails on one figure goes on with the others:
    `failed` then has "ENGINE, FIGURE".
    """
    samples: dict[EngineKey, list[Samples]] = {key: [] for key in engines}
    for number in rounds:
        for one in samples.values():
            one.append({})
        for figure in figures:
            # Who comes first changes from round to round: a busy neighbour's burst then does not always hit the same one.
            turns = [(isa, name) for isa, name in engines if (isa, f"{name}, {figure.name}") not in failed]
            turns = turns[number % len(turns) :] + turns[: number % len(turns)]
            for isa, name in turns:
                try:
                    with _busy_process() if figure.busy else nullcontext():
                        samples[isa, name][-1] |= engines[isa, name].measure(figure)
                except FigureError as error:
                    say(f"{isa}, {name}: left out of {figure.name}: {error}")
                    failed[isa, f"{name}, {figure.name}"] = str(error)
                except PeerError as error:
                    if name == OWN:
                        raise
                    say(f"{isa}, {name}: left out from here on: {error}")
                    failed[isa, name] = str(error)
                    engines.pop((isa, name)).close()
                    del samples[isa, name]
    for engine in engines.values():
        if isinstance(engine, Worker) and engine.idle_s > 0:
            engine.about += f"; used {engine.idle_cpu_s / engine.idle_s:.1%} of a core while others had their turn"
    return samples


@contextmanager
def _busy_process() -> Iterator[None]:
    """Another program that wants a core for itself."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    typer.run(main)

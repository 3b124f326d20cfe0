"""How long a start takes and how much memory a model needs, in fresh processes, beside llama.cpp on the same file.

    python benchmarks/start.py smollm2-135m-instruct --llama-completion PATH/llama-completion --rounds 5

A start is timed from the command to the first byte of the answer to a prompt of four tokens. The second start finds compiled
kernels and packed weights in the cache; the first one ever has an empty cache directory. Memory is a process's peak, with a
prompt of 512 tokens and an answer of 128, over the model's file and the keys and values of its whole context.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from instruction_sets import build_text, in_use
from llama_cpp_build import open_build
from peers_errors import PeerError
from peers_report import who
from record import Rounds, record, save, say, spread

from cpuspec.checkpoints.download import resolve_model

ONE_START = Path(__file__).resolve().with_name("one_start.py")
OWN, PEER = "cpuspec", "llama.cpp"
PROMPT = "The sky is blue"
SECOND, FIRST = "second start to first token, s", "first start ever to first token, s"
PEAK, OVER = "peak memory, MB", "peak memory over file, keys and values"
LONG_PROMPT, NEW_TOKENS = " the" * 512, 128  # a word that is one token in every vocabulary


@dataclass(frozen=True)
class Run:
    """One process: seconds until it wrote something, and the bytes that it had in memory at most."""

    first_byte_s: float
    peak_bytes: int


class ProgramError(Exception):
    """A program that did not answer; the text says how it ended."""


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    llama_completion: Annotated[Path | None, typer.Option(help="llama.cpp's program of that name.", exists=True)] = None,
    threads: Annotated[int, typer.Option(help="Threads of both engines.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are quoted.", min=1)] = 5,
    first_starts: Annotated[int, typer.Option(help="Of the rounds, how many begin with an empty cache, too.", min=0)] = 1,
    context: Annotated[int, typer.Option(help="Tokens of context when memory is measured; 0 does not measure it.", min=0)] = 4096,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print each engine's figures."""
    path = resolve_model(model)
    commands = {OWN: own_command(path, threads)}
    instructions = {OWN: in_use()}
    if llama_completion:
        commands[PEER] = peer_command(llama_completion, path, threads)
        try:
            instructions[PEER] = build_text(open_build(llama_completion.parent).instructions, in_use())
        except PeerError as error:
            raise typer.BadParameter(str(error)) from None
    file_bytes, cache_bytes = model_bytes(path, context)
    samples: dict[str, dict[str, list[float]]] = {}
    passed = Rounds(rounds, threads)
    try:
        start(commands[OWN], PROMPT, 1, 64)  # whatever is kept for later starts is there now
        for number in passed:
            # Who comes first changes from round to round.
            turns = list(commands.items())[:: -1 if number % 2 else 1]
            for name, command in turns:
                _add(samples, SECOND, name, start(command, PROMPT, 1, 64).first_byte_s)
            if number < first_starts:
                with tempfile.TemporaryDirectory() as empty:
                    _add(samples, FIRST, OWN, start(commands[OWN], PROMPT, 1, 64, {"CPUSPEC_CACHE": empty}).first_byte_s)
            for name, command in turns if context else ():
                peak = start(command, LONG_PROMPT, NEW_TOKENS, context).peak_bytes
                _add(samples, PEAK, name, peak / 1e6)
                _add(samples, OVER, name, peak / (file_bytes + cache_bytes[name]))
    except ProgramError as error:
        say(str(error))
        raise typer.Exit(1) from error
    figures = {figure: {name: spread(values) for name, values in by_engine.items()} for figure, by_engine in samples.items()}
    print(f"{who(instructions)}\n\n{_table(figures)}")
    sizes = {"context": context, "file_bytes": file_bytes, "cache_bytes": cache_bytes}
    save(record("start", path.name, passed) | sizes | {"instructions": instructions, "figures": figures}, json_file)


def own_command(model: Path, threads: int) -> list[str]:
    """What answers the prompt in a file, to be completed by `start`."""
    command = [sys.executable, "-m", "cpuspec", "generate", "-m", str(model), "--threads", str(threads), "--raw", "--ignore-eos"]
    return [*command, "--temperature", "0", "--max-tokens", "{new}", "--context-length", "{context}", "-f", "{prompt}"]


def peer_command(program: Path, model: Path, threads: int) -> list[str]:
    """The same, of llama.cpp."""
    command = [str(program), "-m", str(model), "-t", str(threads), "-no-cnv", "--no-display-prompt", "--temp", "0", "--ignore-eos"]
    return [*command, "-n", "{new}", "-c", "{context}", "-f", "{prompt}"]


def model_bytes(model: Path, context: int) -> tuple[int, dict[str, int]]:
    """Bytes of a model's weights on the disk, and of the keys and values of n tokens as each engine stores them."""
    command = [sys.executable, "-m", "cpuspec", "inspect", str(model), "--json"]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    files = [model] if model.is_file() else model.glob("*.safetensors")
    config = report["config"]
    in_f16 = 2 * 2 * config["num_layers"] * config["num_kv_heads"] * config["head_dim"]
    own = context * report["kv_bytes_per_token"] + report["window_bytes_per_sequence"]
    return sum(file.stat().st_size for file in files), {OWN: own, PEER: context * in_f16}


def start(command: Sequence[str], prompt: str, new_tokens: int, context: int, environment: Mapping[str, str] | None = None) -> Run:
    """Run a program on a prompt. Raises ProgramError unless it answers and ends well."""
    # Python keeps its bytecode on a user's machine.
    everything = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | dict(environment or {})
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "prompt"
        file.write_text(prompt, "utf-8")
        filled = [part.format(new=new_tokens, context=context, prompt=file) for part in command]
        done = subprocess.run(
            [sys.executable, "-S", str(ONE_START), *filled], env=everything, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise ProgramError(f"{command[0]} did not run: {done.stderr[-500:].strip()}")
    first_byte_s, peak_bytes, status, written = json.loads(done.stdout)
    if status or not written:
        wrote = "" if written else " and wrote nothing"
        raise ProgramError(f"{Path(command[0]).name} ended with {status}{wrote}: {done.stderr[-500:].strip()}")
    return Run(first_byte_s, peak_bytes)


def _add(samples: dict[str, dict[str, list[float]]], figure: str, engine: str, value: float) -> None:
    samples.setdefault(figure, {}).setdefault(engine, []).append(value)


def _table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    engines = list(dict.fromkeys(name for by_engine in figures.values() for name in by_engine))
    lines = [["", *engines], ["---"] * (len(engines) + 1)]
    for figure, by_engine in figures.items():
        cells = (by_engine.get(name) for name in engines)
        lines.append([figure, *(f"{c['median']:.3g} ({c['min']:.3g} to {c['max']:.3g})" if c else "" for c in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    typer.run(main)

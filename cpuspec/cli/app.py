"""The program `cpuspec`: its commands by name, each in a module that is imported when the command runs.

`cpuspec --help` and `--version` import no command, and therefore neither numpy nor numba.
"""

import os
import platform
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from cpuspec import __version__
from cpuspec.cli import INTERRUPTED
from cpuspec.cli.console import deliver_again, emit, guarded_streams, note, show_log
from cpuspec.cli.spellings import OTHER_COMMANDS, translated
from cpuspec.platform import SYSTEM

# By name: the function of the command, or the Typer group, and the first sentence of its help, for `cpuspec --help`.
COMMANDS = {
    "generate": ("generate:generate", "Answer one prompt."),
    "chat": ("chat:chat", "Talk with a model."),
    "serve": ("serve:serve", "Serve models over HTTP to clients of OpenAI's and Anthropic's APIs."),
    "bench-serve": (
        "bench_serve:bench_serve",
        "Send a load of requests to a server of this machine, and show latencies and throughput.",
    ),
    "batch": ("batch:batch", "Answer a file of prompts, many at once."),
    "pull": ("models:pull", "Fetch models, check them, and print where they are."),
    "models": ("models:models", "List the models that can be named: recipes, with size, licence, and whether they are fetched."),
    "inspect": ("models:inspect", "Show a model's shape and formats, and how fast this machine's memory could feed it."),
    "bench": ("bench:bench", "Measure a model's speed: prefill, decoding, and forwards over a few rows."),
    "certify": ("certify:certify", "Test that drafts change no answer: greedy token ids, and the distribution of sampled ones."),
    "parity": ("parity:parity", "Compare two backends, or a backend and a record from another machine."),
    "export": ("quantize:export", "Write a model as ONNX for other programs."),
    "quantize": ("quantize:quantize", "Write a model in fewer bits."),
    "imatrix": ("quantize:imatrix", "Measure how much each input of each matrix counts."),
    "extract": ("train:extract", "Write a model's hidden states over texts, with token ids, as safetensors."),
    "info": ("machine:info", "Show what cpuspec makes of this machine."),
    "doctor": ("doctor:doctor", "Tell whether cpuspec can run on this machine, what is slow there and why, and what to do."),
    "eval": ("evaluation:eval_app", "Measure how good a model is: texts, tasks, formats, and what answers cost."),
    "train": ("train:train_app", "Train heads that draft for a model, from its own answers."),
}


def load(name: str) -> Any:
    """The function of a command, or the Typer application of a group of commands. Imports its module."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    return getattr(import_module(f"cpuspec.cli.{module}"), attribute)


class Commands(TyperGroup):
    """The commands as Typer lists and runs them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command's name and help, without its options."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that a command line begins with, loaded, and the rest of the line."""
        if args[0] not in COMMANDS and args[0] in OTHER_COMMANDS:
            raise typer.BadParameter(f"cpuspec has no command {args[0]!r}; use {OTHER_COMMANDS[args[0]]}")
        name, command, rest = super().resolve_command(ctx, args)
        if command is None:
            return name, None, rest
        whole = whole_command(str(name))
        return name, whole, rest if isinstance(whole, TyperGroup) else translated(rest, whole, note)


def whole_command(name: str) -> Any:
    """The command with its options, or the group with its commands."""
    from cpuspec.cli.brief import add_examples
    from cpuspec.cli.options import register

    group = load(name)
    if not isinstance(group, typer.Typer):
        group = typer.Typer(add_completion=False)
        register(group, load(name), name)
    command = typer.main.get_command(group)
    command.name = name
    add_examples(name, command)
    return command


app = typer.Typer(
    cls=Commands,
    help="Quantized language models on x86 CPUs, with speculative decoding that is exact to the bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run() -> None:
    """Run the command line of this process and exit."""
    sys.unraisablehook = deliver_again
    code: str | int | None = None
    try:
        with guarded_streams():
            try:
                app(prog_name="cpuspec")
            except SystemExit as ending:
                code = ending.code
            except KeyboardInterrupt:
                note("interrupted")
                code = INTERRUPTED
    except typer.Exit as ending:
        code = ending.exit_code
    if code == INTERRUPTED:
        os._exit(INTERRUPTED)  # everything is tidied up, and Python's own exit takes so long that a user presses Ctrl-C again
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        from cpuspec.environment import commit

        of, flags = f"commit {commit()}, " if commit() else "", SYSTEM.processor_flags()
        best = next((f" {name}" for name in ("avx512_vnni", "avx_vnni", "avx2") if name in flags), "")
        emit(f"cpuspec {__version__} ({of}Python {platform.python_version()}, {platform.machine()}{best})\n")
        raise typer.Exit


@app.callback()
def cpuspec(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Quantized language models on x86 CPUs, with speculative decoding that is exact to the bit."""
    show_log()

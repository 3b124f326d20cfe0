"""`--help` on one screen: what most people need, with examples. `--help-all` shows every option and what it says in full.

Both are made from the options as the commands declare them; nothing is declared twice.
"""

from copy import copy
from typing import Any

import typer
from typer.core import TyperCommand

# What a screen shows of a command with many options, beside the arguments and what is below.
_COMMON = (
    "--draft --temperature --max-tokens --seed --json-schema --system --file --context-length --threads --backend --max-sequences "
    "--host --port --alias --api-key-file --type --calibration --imatrix --method --bits-per-weight --prompts --samples --json "
    "--layers --top --base-url --num-prompts --max-concurrency --request-rate --dataset-path --text --record --rows --raw "
    "--explain --tool --history --model --help --help-all"
)
_MOST_OPTIONS = 15  # of a command whose help is shown whole, arguments among them

EXAMPLES = {
    "generate": (
        'cpuspec generate "Write a haiku about memory bandwidth"',
        'cpuspec generate qwen2.5-coder-1.5b-instruct "..." --draft none --temperature 0',
        'cpuspec generate -m Qwen/Qwen3-4B-GGUF:Q4_K_M "..." --json',
    ),
    "chat": ("cpuspec chat qwen3-4b", "cpuspec chat -m my-model.gguf --history talk.json"),
    "serve": (
        "cpuspec serve qwen2.5-coder-1.5b-instruct",
        "cpuspec serve qwen3-4b --host 0.0.0.0 --port 8080 --api-key-file keys.txt",
    ),
    "bench-serve": ("cpuspec bench-serve --num-prompts 64 --max-concurrency 8",),
    "batch": ("cpuspec batch qwen3-4b in.jsonl out.jsonl --max-sequences 16",),
    "pull": ("cpuspec pull qwen2.5-coder-1.5b-instruct",),
    "models": ("cpuspec models",),
    "inspect": ("cpuspec inspect my-model.gguf",),
    "bench": ("cpuspec bench qwen2.5-coder-1.5b-instruct --rows 1,2,4,8",),
    "certify": ("cpuspec certify qwen2.5-coder-1.5b-instruct --draft auto",),
    "parity": ("cpuspec parity qwen3-4b numpy numba --text my-text.txt:512",),
    "export": ("cpuspec export smollm2-135m-instruct out.onnx",),
    "quantize": (
        "cpuspec quantize MODEL out.gguf --type q4_k_m",
        "cpuspec quantize MODEL out.gguf --bits-per-weight 4.5 --calibration text.txt",
    ),
    "imatrix": ("cpuspec imatrix MODEL model.imatrix.gguf --calibration text.txt",),
    "extract": ("cpuspec extract MODEL answers.jsonl samples --top 64",),
    "info": ("cpuspec info", "cpuspec info --kernel q4_k --rows 4"),
    "doctor": ("cpuspec doctor",),
    "eval": ("cpuspec eval perplexity MODEL text.txt", "cpuspec eval task MODEL gsm8k gsm8k.jsonl --chat"),
    "train": ("cpuspec train auto MODEL my-draft --hours 8",),
}


class BriefCommand(TyperCommand):
    """A command whose `--help` shows what is used most, by first clauses, and `--help-all` the rest."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help: of a command with many options the common ones alone."""
        params = self.get_params(ctx)
        if len(params) > _MOST_OPTIONS and not ctx.params.get("help_all"):
            common = {*_COMMON.split()}
            params = [copy(one) for one in params if one.param_type_name == "argument" or common & {*one.opts}]
            for one in params:
                one.help = _first_clause(one.help or "")
        self._shown = params
        super().format_help(ctx, formatter)
        self._shown = None

    _shown: list[Any] | None = None

    def get_params(self, ctx: Any) -> list[Any]:
        """The command's parameters; while its help is printed those that it shows."""
        return super().get_params(ctx) if self._shown is None else self._shown


def show_whole_help(ctx: Any, wanted: bool) -> None:
    """The callback of --help-all."""
    if wanted:
        ctx.params["help_all"] = True
        ctx.get_help()
        raise typer.Exit


def add_examples(name: str, command: Any) -> None:
    """Let a command's help, or a group's, end with examples."""
    command.epilog = "\n\n".join(("Examples:", *EXAMPLES[name]))


def _first_clause(text: str) -> str:
    ends = [at for end in (". ", "; ", ": ") if (at := text.find(end)) > 0]
    return text[: min(ends)] + "." if ends else text

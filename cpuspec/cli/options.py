"""The options of the commands, and the settings that their values become. Options of settings are generated from `config`."""

import json
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, get_origin

import typer
from typer.core import TyperCommand

from cpuspec.backends import BACKENDS, check_backend
from cpuspec.checkpoints.recipes import known_names
from cpuspec.cli.brief import BriefCommand, show_whole_help
from cpuspec.engine.draft_spec import LOOKUPS, check_spec
from cpuspec.errors import BackendError, ConfigError, FormatError
from cpuspec.formats.kv import get_kv_format
from cpuspec.settings import EngineConfig, SamplingParams, ServerConfig, SpecConfig, read_backend

Command = Callable[..., None]

MAX_PROMPT_BYTES = 64 << 20
_LONGEST_NAME = 1000  # of a file, in characters
EVAL_TOKENS = 512  # default of --max-tokens where answers are judged: a program or a number, and what stands before it

# Settings of commands: those of adapters; those of a backend; and with them those of an engine that answers many requests.
HOW = ("threads", "memory", "quantization", "kv_format", "device", "dtype", "weights", "activations", "prompt_arithmetic")
ADAPTED = ("lora",)
ANSWERING = (
    *(*ADAPTED, "lora_modules"),
    *("max_sequences", "context_length", "max_rows", "prompt_rows"),
    *("prefix_cache_gb", "prefix_cache_dir", "prefix_disk_gb", "mmap", "draft_format", "draft_vocab"),
    *HOW,
)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn the error of a setting into wrong usage."""
    try:
        yield
    except (ConfigError, BackendError, FormatError) as error:
        raise typer.BadParameter(str(error)) from None


def known_draft(text: str | None) -> str | None:
    """The text of `--draft`, unless it is no spec: then BadParameter."""
    if text is not None:
        with usage_errors():
            check_spec(SpecConfig.parse(text))
    return text


def option(metavar: str, text: str, *spellings: str, **more: Any) -> Any:
    """An option with a value. Without spellings, its name is that of the parameter."""
    return typer.Option(*spellings, metavar=metavar, help=text, **more)


def flag(spelling: str, text: str, **more: Any) -> Any:
    """An option without a value, as --explain or --mmap/--no-mmap."""
    return typer.Option(spelling, help=text, **more)


def argument(metavar: str, text: str, **more: Any) -> Any:
    """A positional argument."""
    return typer.Argument(metavar=metavar, help=text, **more)


MODEL_HELP = (
    "A model's or chain's name (see `cpuspec models`), owner/name:QUANT or hf:owner/name/file of the Hugging Face hub, "
    "ollama:NAME:TAG, a GGUF file, or a Hugging Face directory."
)


def complete_model(incomplete: str) -> list[str]:
    """Names of models and chains for the shell's completion; the shell adds file names."""
    return [name for name in known_names() if name.startswith(incomplete)]


ModelArgument = Annotated[str, argument("MODEL", MODEL_HELP, autocompletion=complete_model)]


class ModelCommand(BriefCommand):
    """A command with the arguments MODEL and others, as `cpuspec generate MODEL PROMPT`.

    `-m MODEL` says the same. Where MODEL has a default, it may be left out: then there are no more arguments than the others.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the model that -m names, or the default, before the other arguments."""
        (model, *others), named = [one for one in self.params if one.param_type_name == "argument"], self._options_only
        given, positional, _ = named.make_parser(ctx).parse_args(list(args))
        many = -1 in (model.nargs, *(one.nargs for one in others))
        if given.get("model_option") is not None:
            args = [*given["model_option"], *args] if model.nargs == -1 else [given["model_option"][-1], *args]
        elif not model.required and not many and len(positional) <= len(others):
            args = [str(model.default or ""), *args]
        return super().parse_args(ctx, args)

    @property
    def _options_only(self) -> TyperCommand:
        return TyperCommand(self.name, params=[one for one in self.params if one.param_type_name == "option"])


def register(group: typer.Typer, command: Command, name: str | None = None) -> None:
    """Make the function a command of the group, with --help-all. One whose first parameter is MODEL takes `-m MODEL`, too."""
    declared = signature(command, eval_str=True)
    takes_model = next(iter(declared.parameters), "") in ("model", "models")

    @wraps(command)
    def run(model_option: list[str] | None = None, help_all: bool = False, **values: Any) -> None:
        command(**values)

    again = option("MODEL", "The same as the argument MODEL.", "--model", "-m", autocompletion=complete_model)
    extra = [Parameter("model_option", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, again])]
    every = flag("--help-all", "Show every option, and what it says in full.", is_eager=True, callback=show_whole_help)
    extra = [
        *extra[: int(takes_model)],
        Parameter("help_all", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, every]),
    ]
    run.__signature__ = declared.replace(parameters=[*declared.parameters.values(), *extra])  # type: ignore[attr-defined]
    group.command(name, cls=ModelCommand if takes_model else BriefCommand)(run)


DraftOption = Annotated[
    str | None,
    option(
        "SPEC",
        "How to draft tokens: auto, the default, where that pays; none; or levels separated by commas, the cheapest "
        "first, after auto to be chosen from, as auto,self:mxfp4: a look-up in the text "
        f"({', '.join(LOOKUPS)}, or FILE.py:CLASS), the model's own weights (self, skip, as self:mxfp4 and skip:4), another model, "
        "text:MODEL, one with another vocabulary by its text, a trained head's directory or GGUF file (HEAD, tree:HEAD, "
        "draw:HEAD), or mtp, the model's own head. vLLM's JSON is read, too. NAME@8 drafts at most 8 tokens a round. Drafts keep "
        "the distribution of sampled answers, and with numba every answer, greedy or of a seed.",
        "--draft",
        "--speculative-config",
        callback=known_draft,
    ),
]
SystemOption = Annotated[str | None, option("TEXT", "The system message of the conversation.", "--system")]
ThinkingOption = Annotated[
    bool | None,
    flag("--thinking/--no-thinking", "Let the model reason before it answers, or not; by default as its chat template has it."),
]
JsonOption = Annotated[bool, flag("--json", "Print one JSON document instead.")]


BACKEND_HELP = (
    f"One of {', '.join(BACKENDS)}, with settings after a colon, as in torch:cuda,dtype=bf16 and numba:threads=1. Only with numba "
    "are greedy answers the same whatever is drafted: with others they may differ where two tokens are nearly as likely."
)
_KINDS: Mapping[Any, Any] = {  # of an option that may be absent, by the type of its field
    int: int | None,
    int | None: int | None,
    float: float | None,
    float | None: float | None,
    str: str | None,
    str | None: str | None,
    str | Mapping[str, Any] | None: str | None,
    bool: bool,
    tuple[str, ...]: list[str] | None,
    tuple[int, ...]: list[int] | None,
    Mapping[int, float]: list[str] | None,
}


class Running(NamedTuple):
    """The backend and the settings that options name."""

    backend: str
    settings: EngineConfig


def _options(declaration: type, names: Iterable[str], panel: str, **defaults: Any) -> list[Parameter]:
    """The options of these fields of settings. One that is true by default can be denied, as --no-mmap."""
    options = []
    for one in (one for one in fields(declaration) if one.name in names):
        spelling = one.metadata["option"] or (one.name.removesuffix("s") if get_origin(one.type) is tuple else one.name)
        flag = f"--{spelling.replace('_', '-')}"
        shown = typer.Option(
            f"{flag}/--no-{flag[2:]}" if one.default is True else flag,
            *([f"-{one.metadata['short']}"] if one.metadata["short"] else []),
            metavar=one.metadata["metavar"] or None,
            rich_help_panel=panel,
            help=one.metadata["help"],
        )
        default = defaults.get(one.name, one.default if one.type is bool else None)
        annotation = Annotated[_KINDS[one.type], shown]  # type: ignore[valid-type, name-defined]
        options.append(Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return options


def takes(into: str, options: list[Parameter], read: Callable[[dict[str, Any]], object]) -> Callable[[Command], Command]:
    """Decorate a command: it has these options, too, and gets as its argument `into` what `read` makes of their values."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**values: Any) -> None:
            given = {one.name: values.pop(one.name) for one in options}
            command(**values, **{into: read(given)})

        declared = signature(command)
        own = [one for one in declared.parameters.values() if one.name != into]
        run.__signature__ = declared.replace(parameters=own + options)  # type: ignore[attr-defined]
        return run

    return decorate


def takes_fields(into: str, declaration: type, declared: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Give a command an option for each of these fields of a dataclass; it gets the whole as its argument `into`.

    declared: by field an option, or an option and the function that reads the field's value from its text. Types and defaults are
    those of the dataclass.
    """
    options, readers = [], {}
    for one in (one for one in fields(declaration) if one.name in declared):
        told, default, kind = declared[one.name], one.default, one.type
        if isinstance(told, tuple):
            told, readers[one.name] = told
            default, kind = ",".join(map(str, one.default)), str  # type: ignore[arg-type]
        annotation = Annotated[kind, told]  # type: ignore[valid-type]
        options.append(Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

    def read(given: dict[str, Any]) -> object:
        with usage_errors():
            return declaration(**given | {name: read_text(given[name]) for name, read_text in readers.items()})

    return takes(into, options, read)


def takes_running(*names: str, with_backend: bool = True) -> Callable[[Command], Command]:
    """Give a command options for these fields of EngineConfig and for the backend; it gets `running: Running`."""
    backend = typer.Option("--backend", metavar="B", rich_help_panel="Running", help=BACKEND_HELP)
    options = _options(EngineConfig, names, "Running")
    if with_backend:
        options.insert(0, Parameter("backend", Parameter.KEYWORD_ONLY, default=BACKENDS[0], annotation=Annotated[str, backend]))
    return takes("running", options, _read_running)


def _read_running(given: dict[str, Any]) -> Running:
    with usage_errors():
        text = given.pop("backend", BACKENDS[0])
        settings = EngineConfig(**{name: value for name, value in given.items() if value is not None})
        running = Running(*read_backend(text, settings))
        check_backend(running.backend)
        get_kv_format(running.settings.kv_format)
    return running


def takes_serving() -> Callable[[Command], Command]:
    """Give a command options for the fields of ServerConfig; it gets `serving: ServerConfig`."""
    names = [one.name for one in fields(ServerConfig)]
    return takes("serving", _options(ServerConfig, names, "Serving"), _read_serving)


def _read_serving(given: dict[str, Any]) -> ServerConfig:
    with usage_errors():
        return ServerConfig(**{name: value for name, value in given.items() if value is not None})


# Settings for servers, which have several users, and for programs.
_NO_OPTIONS = ("cache_salt", "prompt_logprobs", "n", "max_draft_tokens", "draft")


def takes_sampling(max_tokens: int = SamplingParams.max_tokens, without: Container[str] = ()) -> Callable[[Command], Command]:
    """Give a command options for the fields of SamplingParams; it gets those that were given as `sampling: dict[str, Any]`.

    max_tokens: the default of that one.
    """
    names = [one.name for one in fields(SamplingParams) if one.name not in without and one.name not in _NO_OPTIONS]
    return takes("sampling", _options(SamplingParams, names, "Sampling", max_tokens=max_tokens), _read_sampling)


def _read_sampling(given: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in given.items() if value is not None}
    for name in ("json_schema", "grammar"):
        if name in given:
            given[name] = _read_file(Path(given[name]))
    with usage_errors():
        given["stop"] = tuple(checked_text(text, "--stop") for text in given.get("stop", ()))
        given["logit_bias"] = read_logit_bias(given.get("logit_bias"))
        SamplingParams(**given)
    return given


def numbers(metavar: str, text: str, *spellings: str) -> tuple[Any, Callable[[str], tuple[int, ...]]]:
    """An option that takes whole numbers, for `takes_fields`."""
    return option(metavar, text, *spellings), partial(read_numbers, name=spellings[0])


def split_list(text: str | None) -> tuple[str, ...]:
    """The parts of a comma-separated option that are not empty."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def read_numbers(text: str, name: str) -> tuple[int, ...]:
    """Whole numbers separated by commas; `none` is no number. Raises BadParameter for anything else, `name` being the option's."""
    if text.strip() == "none":
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise typer.BadParameter(f"{name} takes whole numbers separated by commas, as 1,2,4, or none; got {text!r}")
    return tuple(map(int, parts))


def read_logit_bias(entries: list[str] | None) -> dict[int, float]:
    """ID=BIAS entries by id. Raises ConfigError for anything else, and for an id that is given twice."""
    biases: dict[int, float] = {}
    for entry in entries or []:
        token, _, bias = entry.partition("=")
        try:
            token_id, value = int(token), float(bias)
        except ValueError:
            raise ConfigError(f"logit_bias {entry!r} is not ID=BIAS, as 42=-1.5") from None
        if token_id in biases:
            raise ConfigError(f"logit_bias names token {token_id} twice")
        biases[token_id] = value
    return biases


def read_object(text: str | None) -> dict[str, Any]:
    """The JSON object of `--extra-body`, an empty one if there is none. Raises BadParameter for anything else."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"--extra-body takes a JSON object; got {text!r}")
    return value


def check_is_no_model(prompt: str | None) -> None:
    """Raise BadParameter for a PROMPT that names a model: the user has meant MODEL and gives the prompt in another way."""
    is_file = prompt is not None and len(prompt) < _LONGEST_NAME and Path(prompt).suffix == ".gguf" and Path(prompt).is_file()
    if prompt is not None and (is_file or prompt in known_names()):
        raise typer.BadParameter(
            f"{prompt} is a model, and there is no PROMPT after it; with a prompt from stdin or --file, name the model with -m"
        )


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file, or stdin; one newline at the end of a file or of stdin is not part of it.

    Raises BadParameter if there is none, or more than one, or it is not text.
    """
    if prompt is not None and file is not None:
        raise typer.BadParameter("got a PROMPT and --file; wanted one of them; beside --file, -m names the model")
    if prompt is not None:
        return checked_text(prompt, "PROMPT")
    if file is not None and str(file) != "-":
        return _read_file(file)
    if file is None and sys.stdin is not None and sys.stdin.isatty():
        raise typer.BadParameter("there is no prompt; give it as PROMPT, with -f FILE, or through a pipe")
    if sys.stdin is None:
        raise typer.BadParameter("there is no prompt and stdin is closed; give it as PROMPT or with -f FILE")
    return _read_text(sys.stdin.buffer, "stdin")


def checked_text(text: str, name: str) -> str:
    """`text`, unless it came from bytes that are not UTF-8: then BadParameter."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{name} is not valid UTF-8") from None
    return text


def _read_file(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return _read_text(stream, str(file))
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read: {error.strerror or error}") from None


def _read_text(stream: BinaryIO, name: str) -> str:
    data = stream.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise typer.BadParameter(f"{name} has more than {MAX_PROMPT_BYTES} bytes, which no context can hold")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return text.removesuffix("\n").removesuffix("\r")

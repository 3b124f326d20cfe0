"""The options that several commands share, each declared once, and what turns their values into settings."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from cpuspec.backends import BACKENDS, OWN_SETTINGS, check_backend
from cpuspec.checkpoints.recipes import known_names
from cpuspec.config import ACTIVATIONS, DTYPES, EngineConfig, SamplingParams, SpecConfig
from cpuspec.engine.assemble import SOURCES, check_spec
from cpuspec.errors import BackendError, ConfigError, FormatError
from cpuspec.formats.kv import KV_FORMATS, get_kv_format

MAX_PROMPT_BYTES = 64 << 20
# Defaults of --max-tokens: long enough for an ordinary answer, short enough that a small model's loop ends by itself.
GENERATE_TOKENS, CHAT_TOKENS = 512, 1024


@contextmanager
def usage_errors() -> Iterator[None]:
    """Settings that cannot be are wrong usage."""
    try:
        yield
    except (ConfigError, BackendError, FormatError) as error:
        raise typer.BadParameter(str(error)) from None


def known_draft(text: str | None) -> str | None:
    if text is not None:
        with usage_errors():
            check_spec(SpecConfig.parse(text))
    return text


def _known_backend(name: str) -> str:
    with usage_errors():
        check_backend(name)
    return name


def _known_kv_format(name: str) -> str:
    with usage_errors():
        get_kv_format(name)
    return name


def _known_setting(name: str, value: str) -> str:
    with usage_errors():
        EngineConfig(**{name: value})  # type: ignore[arg-type]
    return value


MODEL_HELP = (
    "A model's or chain's name (see `cpuspec models`), owner/name:QUANT or hf:owner/name/file of the Hugging Face hub, "
    "ollama:NAME:TAG, a GGUF file, or a Hugging Face directory."
)
_SAMPLING, _RUNNING = "Sampling", "Running"


def complete_model(incomplete: str) -> list[str]:
    """Names of models and chains for a shell to complete with; it adds files by itself."""
    return [name for name in known_names() if name.startswith(incomplete)]


Model = Annotated[str, typer.Option("--model", "-m", metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="SPEC",
        callback=known_draft,
        help="How to draft tokens: auto, the default, where that pays; none; or levels separated by commas, the cheapest "
        "first, after auto to be chosen from, as auto,self:mxfp4: a token source "
        f"({', '.join(SOURCES)}, or FILE.py:CLASS), the model's own weights (self, skip, as self:mxfp4 and skip:4), another model, "
        "or match:MODEL, one with another vocabulary by its text. NAME@8 drafts at most 8 tokens a round. It changes the speed and "
        "never what is generated.",
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="B",
        callback=_known_backend,
        rich_help_panel=_RUNNING,
        help=f"One of {', '.join(BACKENDS)}. Only with numba are greedy answers the same whatever is drafted: with others they may "
        "differ where two tokens are nearly as likely.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        max=1024,
        rich_help_panel=_RUNNING,
        help="Threads to compute with; by default every usable core.",
    ),
]
KVFormat = Annotated[
    str,
    typer.Option(
        "--kv-format",
        metavar="F",
        callback=_known_kv_format,
        rich_help_panel=_RUNNING,
        help=f"What keys and values are kept in, one of {', '.join(KV_FORMATS)}. Fewer bits are faster in a long context.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="D",
        rich_help_panel=_RUNNING,
        help="Where the torch backend computes: cpu, cuda, cuda:N, or auto, a GPU where there is one.",
    ),
]
DType = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="T",
        callback=lambda name: _known_setting("dtype", name),
        rich_help_panel=_RUNNING,
        help=f"In what the torch backend multiplies with weights, one of {', '.join(DTYPES)}.",
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="W",
        callback=lambda name: _known_setting("weights", name),
        rich_help_panel=_RUNNING,
        help="What the torch backend keeps of weights: values, dequantized at load; codes, as small as in the file; or auto.",
    ),
]
Activations = Annotated[
    str,
    typer.Option(
        "--activations",
        metavar="A",
        callback=lambda name: _known_setting("activations", name),
        rich_help_panel=_RUNNING,
        help="What ONNX Runtime and OpenVINO multiply 4- and 8-bit matrices with, one of "
        f"{', '.join(ACTIVATIONS)}: int8 is fast and what auto is, f32 exact but for the order of sums. numpy with int8 shows what "
        "that rounding costs.",
    ),
]
ContextLength = Annotated[
    int | None,
    typer.Option(
        "--context-length",
        metavar="N",
        min=1,
        rich_help_panel=_RUNNING,
        help="Tokens that prompt and answer may have together; by default what the model was trained for.",
    ),
]
NoMmap = Annotated[
    bool,
    typer.Option(
        "--no-mmap",
        rich_help_panel=_RUNNING,
        help="Read model files into memory instead of mapping them: slower to start, and safe from files that are shortened.",
    ),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message of the conversation.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="T",
        rich_help_panel=_SAMPLING,
        help="0 takes the likeliest token, whatever the model's files recommend; higher is more random. This and the next four are "
        "by default what the model's files or its recipe recommend, else greedy.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        metavar="K",
        rich_help_panel=_SAMPLING,
        help="Sample among the K likeliest tokens; 0 is off.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="P",
        rich_help_panel=_SAMPLING,
        help="Sample among the likeliest tokens that together have P; 1 is off.",
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        metavar="P",
        rich_help_panel=_SAMPLING,
        help="Drop tokens less likely than P times the likeliest; 0 is off.",
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        metavar="X",
        rich_help_panel=_SAMPLING,
        help="Above 1, tokens of prompt and answer become less likely to come again; 1 is off.",
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        "--presence-penalty", metavar="X", rich_help_panel=_SAMPLING, help="Taken from the logits of tokens of the answer."
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        "--frequency-penalty", metavar="X", rich_help_panel=_SAMPLING, help="Likewise, once for each time the token was generated."
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias", metavar="ID=BIAS", rich_help_panel=_SAMPLING, help="Added to a token's logit; -inf forbids it. Repeatable."
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="S", rich_help_panel=_SAMPLING, help="Repeats a sampled answer; by default one is drawn, and shown."
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        rich_help_panel=_SAMPLING,
        help="End before this text, which is not shown. Taken literally. Repeatable.",
    ),
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option("--stop-token-id", metavar="ID", rich_help_panel=_SAMPLING, help="End with this token, too. Repeatable."),
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", metavar="N", rich_help_panel=_SAMPLING, help="Tokens that an answer may have at most.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", rich_help_panel=_SAMPLING, help="Go on when the model ends its answer, up to --max-tokens.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


def describe_settings(settings: EngineConfig) -> dict[str, str]:
    """What reports say of how a backend computes and what it keeps."""
    return {name: getattr(settings, name) for name in ("kv_format", *OWN_SETTINGS)}


def read_numbers(text: str, name: str) -> tuple[int, ...]:
    """Whole numbers separated by commas; `none` is no number. Raises BadParameter for anything else, `name` being the option's."""
    if text.strip() == "none":
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise typer.BadParameter(f"{name} takes whole numbers separated by commas, as 1,2,4, or none; got {text!r}")
    return tuple(map(int, parts))


def given_sampling(
    logit_bias: list[str] | None, stop: list[str] | None, stop_token_id: list[int] | None, **others: Any
) -> dict[str, Any]:
    """Fields of SamplingParams that options set; None is an option that was not given. Raises BadParameter for what cannot be."""
    given = {name: value for name, value in others.items() if value is not None}
    given["stop"] = tuple(checked_text(text, "--stop") for text in stop or ())
    given["stop_token_ids"] = tuple(stop_token_id or ())
    with usage_errors():
        given["logit_bias"] = read_logit_bias(logit_bias)
        SamplingParams(**given)
    return given


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


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file, or stdin; one newline at the end of a file or of stdin is not part of it.

    Raises BadParameter if there is none, or more than one, or it is not text.
    """
    if prompt is not None and file is not None:
        raise typer.BadParameter("got a PROMPT and --file; wanted one of them")
    if prompt is not None:
        return checked_text(prompt, "PROMPT")
    if file is not None and str(file) != "-":
        try:
            with file.open("rb") as stream:
                return _read_text(stream, str(file))
        except OSError as error:
            raise typer.BadParameter(f"{file} cannot be read: {error.strerror or error}") from None
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


def _read_text(stream: BinaryIO, name: str) -> str:
    data = stream.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise typer.BadParameter(f"{name} has more than {MAX_PROMPT_BYTES} bytes, which no context can hold")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return text.removesuffix("\n").removesuffix("\r")

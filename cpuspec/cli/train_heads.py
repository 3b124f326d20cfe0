"""The commands that train: `cpuspec train eagle3` and `mtp` for heads, `distill` for a model that drafts; and `export`."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpuspec.cli import options
from cpuspec.cli.console import counted, emit_json, exit_codes, note
from cpuspec.cli.opening import open_target
from cpuspec.cli.options import argument, flag, option
from cpuspec.cli.progress import step_progress
from cpuspec.errors import ConfigError

if TYPE_CHECKING:
    from cpuspec.train.answers import AnswerFiles
    from cpuspec.train.chains import ChainLoss
    from cpuspec.train.loop import Measured, Schedule

_EXPORTED = ("f32", "f16", "bf16", "q8_0", "q4_0", "iq4_nl")
_HOW = ("device", "dtype", "threads")
_OF_SHAPE = ("layers", "intermediate_size")
_OF_SCHEDULE = ("epochs", "minutes", "tokens", "longest", "rate", "weight_decay", "held_back", "measured_every", "seed")

SamplesArgument = Annotated[Path, argument("SAMPLES", "A directory of `cpuspec extract`, of this model.", file_okay=False)]
OutArgument = Annotated[
    Path, argument("OUT", "The head's directory. A run that was interrupted there goes on, with the same options.", file_okay=False)
]


def _option(name: str, kind: Any, default: Any, flag: str, text: str, panel: str, **more: Any) -> Parameter:
    option = typer.Option(*flag.split("|"), help=text, rich_help_panel=panel, **more)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _number(name: str, default: float, flag: str, text: str, panel: str, least: float = 0) -> Parameter:
    return _option(name, type(default), default, flag, text, panel, metavar="N", min=least)


_HEAD, _TRAINING = "Head", "Training"
_SHAPE = (
    _option("layers", str | None, None, "--layers", "Layers of the model that it reads, from 0, with commas; by default those of "
            "the samples, without the last one.", _HEAD, metavar="LIST"),
    _number("intermediate_size", 0, "--intermediate", "Numbers inside its MLP; 0 for as many as the model has.", _HEAD),
    _option("vocab_size", int | None, None, "--vocab", "Tokens that it drafts: those which the answers use most. By default "
            "16384, and with --from those that it drafts.", _HEAD, metavar="N", min=2),
    _option("cold", bool, False, "--cold", "Begin with random layers instead of copies of the model's.", _HEAD),
    _option("source", Path | None, None, "--from", "Go on with this head instead of a new one.", _HEAD, metavar="HEAD"),
)  # fmt: skip
_SCHEDULE = (
    _number("epochs", 5, "--epochs", "How often every sample is seen.", _TRAINING, 1),
    _number("minutes", 0.0, "--minutes", "End after so much time; the rate falls with it. 0 for no limit.", _TRAINING),
    _number("tokens", 2048, "--batch-tokens", "Tokens of the samples of a step.", _TRAINING, 8),
    _number("longest", 1024, "--max-length", "Tokens of a sample; longer ones are cut.", _TRAINING, 8),
    _number("rate", 6e-4, "--lr", "The highest learning rate; it rises first, and falls as a cosine.", _TRAINING),
    _number("weight_decay", 0.0, "--weight-decay", "Of AdamW.", _TRAINING),
    _number("held_back", 0.05, "--held-back", "The share of the samples, the last ones, that only measures.", _TRAINING),
    _number("measured_every", 100, "--measure-every", "Steps between measurements.", _TRAINING, 1),
    _number("seed", 0, "--seed", "Of the order of samples and of random numbers.", _TRAINING),
    _option("bf16", bool | None, None, "--bf16/--no-bf16", "Compute products in bf16; by default on a GPU and where the processor "
            "has instructions for it.", _TRAINING, show_default=False),
    _option("device", str, "auto", "--device", "auto, cpu, cuda or cuda:N.", _TRAINING, metavar="D"),
    _option("threads", int | None, None, "--threads|-t", "Threads; by default every core.", _TRAINING, metavar="N", min=1),
    _option("dtype", str, "bf16", "--dtype", "Of the head's files: bf16, f16 or f32.", _TRAINING, metavar="TYPE"),
)  # fmt: skip


def takes_training(of_head: bool, but: tuple[str, ...] = (), **defaults: float) -> Callable[[options.Command], options.Command]:
    """Give a command the options of every training, and those of heads; it gets their values as `chosen: dict[str, Any]`.

    but: names of options that it does not have.
    """
    declared = [one for one in (*(_SHAPE if of_head else ()), *_SCHEDULE) if one.name not in but]
    return options.takes("chosen", [one.replace(default=defaults.get(one.name, one.default)) for one in declared], _read)


def check_is_installed() -> None:
    """Raise BadParameter where what training needs is missing."""
    for module in ("torch", "safetensors"):
        if find_spec(module) is None:
            raise typer.BadParameter(f"training needs {module}, which is not installed; pip install 'cpuspec[train]'")


def tell_duplicates(files: "AnswerFiles") -> None:
    """Say how many answers of several files were left out."""
    if files.num_duplicates:
        note(f"{counted(files.num_duplicates, 'answer')} left out, which an earlier file has, or nearly")


def _read(given: dict[str, Any]) -> dict[str, Any]:
    check_is_installed()
    if given["held_back"] >= 1:
        raise typer.BadParameter(f"--held-back is a share below 1, got {given['held_back']}")
    try:
        if given.get("layers") is not None:
            given["layers"] = tuple(int(one) for one in given["layers"].split(","))
    except ValueError:
        raise typer.BadParameter(f"--layers takes numbers with commas between them, as 1,14,26; got {given['layers']!r}") from None
    return given


@exit_codes()
@takes_training(of_head=True)
def eagle3(
    model: options.ModelArgument,
    samples: SamplesArgument,
    out: OutArgument,
    *,
    steps: Annotated[int, option("N", "Tokens of a chain, drafted on the head's own outputs.", min=1, max=16)] = 5,
    as_json: options.JsonOption = False,
    chosen: dict[str, Any],
) -> None:
    """Train an EAGLE-3 head: one layer that drafts token by token, trained on its own outputs; `--draft OUT` uses it."""
    from cpuspec.train.chains import ChainLoss

    _train(model, samples, out, ChainLoss(steps=steps), chosen, as_json)


@exit_codes()
@takes_training(of_head=True, but=_OF_SHAPE)
def mtp(
    model: options.ModelArgument,
    samples: SamplesArgument,
    out: OutArgument,
    *,
    steps: Annotated[int, option("N", "Tokens of a chain, drafted on the layer's own outputs.", min=1, max=16)] = 3,
    as_json: options.JsonOption = False,
    chosen: dict[str, Any],
) -> None:
    """Train a layer for multi-token prediction, as Qwen3.5 and DeepSeek have one; `--draft OUT` uses it.

    It is a layer of the model's own shape, which reads its final state. `train export` writes it as the file mtp-*.gguf beside a
    model, which cpuspec and llama.cpp find. It drafts every token; --vocab says how many of them it is trained on.
    """
    from cpuspec.train.chains import ChainLoss

    _train(model, samples, out, ChainLoss("mtp", steps, decay=0.6), chosen, as_json)


@exit_codes()
@takes_training(of_head=False, but=("rate",), tokens=512, epochs=2)
def distill(
    model: options.ModelArgument,
    answers: Annotated[list[Path], argument("ANSWERS...", "Files of `cpuspec train answers`.", dir_okay=False)],
    out: OutArgument,
    *,
    target: Annotated[str | None, option("MODEL", "The model that answered; by default MODEL itself.")] = None,
    num_drafted: Annotated[int, option("N", "Tokens of its drafts.", "--drafted", min=1, max=32)] = 4,
    rate: Annotated[
        float | None,
        option("N", "The highest learning rate; it rises first, and falls as a cosine. 3e-5, of an adapter 3e-4.", "--lr", min=0),
    ] = None,
    rank: Annotated[int, option("RANK", "Train a LoRA adapter of this rank, and leave the model as it is.", "--lora", min=0)] = 0,
    alpha: Annotated[
        float, option("N", "The adapter is multiplied with N / RANK; by default 2.", "--lora-alpha", min=0, show_default=False)
    ] = 0.0,
    targets: Annotated[
        str, option("LIST", "What it changes, as q_proj,v_proj; by default all matrices of the layers.", "--lora-targets")
    ] = "",
    as_json: options.JsonOption = False,
    chosen: dict[str, Any],
) -> None:
    """Teach a model a target's answers: a small one, so that it drafts better for it; `--draft OUT` uses it.

    OUT is a Hugging Face directory, or holds model.gguf, as MODEL is one. The answers are split by MODEL's own tokenizer. With
    --lora OUT is a directory of PEFT: an adapter for answers of MODEL (`--lora OUT`), which `quantize --lora` merges.
    """
    from cpuspec.text import make_tokenizer
    from cpuspec.train.adapter import LoraShape
    from cpuspec.train.answers import AnswerFiles
    from cpuspec.train.distill import read_answers
    from cpuspec.train.job import ModelJob, train_model

    if not rank and (alpha or targets):
        raise typer.BadParameter("--lora-alpha and --lora-targets are of an adapter; give its rank with --lora, too")
    with options.usage_errors():
        lora = LoraShape(rank, alpha, options.split_list(targets)) if rank else None
    chosen["rate"] = rate if rate is not None else 3e-4 if rank else 3e-5
    opened = open_target(model)
    of_target = opened if target is None else open_target(target)
    files = AnswerFiles(make_tokenizer(of_target))
    texts = read_answers(answers, files, make_tokenizer(opened), of_target.config.vocab_size)
    tell_duplicates(files)
    job = ModelJob(num_drafted, _schedule(chosen), lora=lora, **{name: chosen[name] for name in _HOW})
    with step_progress() as progress:
        _report(out, train_model(opened, texts, out, job, progress, tell), as_json)


@exit_codes()
def export(
    model: options.ModelArgument,
    head: Annotated[str, argument("HEAD", "A head's name, directory or GGUF file, as --draft takes it.")],
    out: Annotated[Path, argument("OUT.gguf", "The file to write.", dir_okay=False)],
    *,
    type_name: Annotated[
        str | None,
        option(
            "TYPE",
            f"Of its matrices: {', '.join(_EXPORTED)}; by default f16, and of a GGUF file those that it has. Vectors are f32.",
            "--type",
        ),
    ] = None,
    has_tokenizer: Annotated[
        bool, flag("--tokenizer/--no-tokenizer", "Write the tokenizer, too; without it the file is smaller and for cpuspec only.")
    ] = True,
) -> None:
    """Write a head as a GGUF file, for llama-server (--spec-draft-model) and for cpuspec: EAGLE-3, DFlash, DSpark, or a layer for
    multi-token prediction, which both find beside the model as mtp-*.gguf.

    MODEL is the model that it drafts for, whose tokenizer goes into the file: llama-server wants one there, and heads that cpuspec
    fetches have none. Needs no torch.
    """
    from cpuspec.checkpoints.download import resolve_model
    from cpuspec.checkpoints.heads import find_reader
    from cpuspec.formats import get_format
    from cpuspec.quantize.head_output import write_head

    if type_name not in (None, *_EXPORTED):
        raise typer.BadParameter(f"there is no --type {type_name!r}; wanted one of {', '.join(_EXPORTED)}")
    if out.suffix != ".gguf":
        raise typer.BadParameter(f"{out} does not end with .gguf; name a GGUF file to write")
    try:
        path = resolve_model(head)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    target, found = open_target(model), find_reader(path)
    if found is None:
        raise typer.BadParameter(f"{head} is not a draft head; wanted a directory that `cpuspec train` wrote, or one as published")
    reader, files = found
    of_file = None if path.suffix == ".gguf" else get_format("f16")
    write_head(out, reader.read(files, target), target, get_format(type_name) if type_name else of_file, has_tokenizer)
    note(f"{out} has {out.stat().st_size / 1e6:.1f} MB")


def _train(model: str, samples: Path, out: Path, loss: "ChainLoss", chosen: Mapping[str, Any], as_json: bool) -> None:
    from cpuspec.train.job import TrainingJob, train_head
    from cpuspec.train.samples import open_samples
    from cpuspec.train.start import HeadShape

    of_head = {name: chosen[name] for name in _OF_SHAPE if name in chosen} | {"copied": not chosen["cold"]}
    vocab_size, source = chosen["vocab_size"], chosen["source"]
    if source is None and vocab_size is not None:
        of_head["vocab_size"] = vocab_size
    shape = HeadShape(**of_head)
    if source is not None and shape != HeadShape():
        raise typer.BadParameter("--from goes on with a head as it is; give no options of its shape with it but --vocab")
    job = TrainingJob(loss, shape, _schedule(chosen), source, vocab_size if source else None, *(chosen[name] for name in _HOW))
    target, opened = open_target(model), open_samples(samples)
    with step_progress() as progress:
        _report(out, train_head(target, opened, out, job, progress, tell), as_json)


def _schedule(chosen: Mapping[str, Any]) -> "Schedule":
    from cpuspec.train.job import DTYPES, multiplies_bf16
    from cpuspec.train.loop import Schedule

    if chosen["dtype"] not in DTYPES:
        raise typer.BadParameter(f"there is no --dtype {chosen['dtype']!r}; wanted one of {', '.join(DTYPES)}")
    with options.usage_errors():
        by_default = multiplies_bf16(chosen["device"])
    bf16 = by_default if chosen["bf16"] is None else chosen["bf16"]
    return Schedule(**{name: chosen[name] for name in _OF_SCHEDULE}, bf16=bf16)


def _report(out: Path, log: "list[Measured]", as_json: bool) -> None:
    best = max(log, key=lambda line: line.mean_length)
    if as_json:
        emit_json({"path": str(out), "best": best._asdict(), "log": [line._asdict() for line in log]})
    note(f"{out} drafts {best.mean_length:.2f} tokens a forward on held-back samples, {log[0].mean_length:.2f} before training")


def tell(line: "Measured") -> None:
    shares = " ".join(f"{share:.3f}" for share in line.accepted)
    loss = "" if line.loss is None else f", loss {line.loss:.4f}"
    note(
        f"step {line.step}, epoch {line.epoch:.2f}, {line.tokens} tokens, {line.seconds:.0f} s{loss}: "
        f"accepted {shares}, {line.mean_length:.3f} tokens a forward"
    )

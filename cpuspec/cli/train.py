"""The commands that make draft heads: `extract`, and `cpuspec train`."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpuspec.cli import INTERRUPTED, options
from cpuspec.cli.console import counted, emit_json, exit_codes, note
from cpuspec.cli.opening import load_backend, open_model, open_target
from cpuspec.cli.options import argument, flag, option
from cpuspec.cli.progress import busy, step_progress
from cpuspec.engine.draft_spec import model_and_spec
from cpuspec.errors import ConfigError
from cpuspec.metrics import now_s
from cpuspec.settings import SpecConfig

if TYPE_CHECKING:
    from cpuspec.checkpoints import Checkpoint
    from cpuspec.train import answers as answering
    from cpuspec.train import extract as extracting
    from cpuspec.train.chains import ChainLoss
    from cpuspec.train.loop import Measured, Schedule
    from cpuspec.train.states import AnswerStates

_NOTES_APART_S = 10.0
_SHOWN_REFUSALS = 20
_ALWAYS_INSTALLED, _UNLIMITED = ("numpy", "numba"), 1 << 30  # sources of prompts where none are named


ExcludeOption = Annotated[
    list[Path] | None,
    option("FILE", "An evaluation set, JSON or text: nothing with 13 words in a row of it is kept. Repeatable.", dir_okay=False),
]
FunctionsOption = Annotated[
    str | None, option("LIST", "Have it write functions of these installed packages anew, as numpy,networkx.")
]
TemperaturesOption = Annotated[str, option("LIST", "Each prompt is answered at these; 0 is greedy.")]
AnswerTokensOption = Annotated[int, option("N", "Tokens that one answer may have.", min=1)]


@exit_codes()
@options.takes_running("max_rows", "mmap", *(name for name in options.HOW if name != "dtype"))  # --dtype is that of the samples
def extract(
    model: options.ModelArgument,
    texts: Annotated[
        list[Path],
        argument(
            "TEXTS...",
            "Files of `cpuspec train answers`; .jsonl files with text, messages or ids in each line; plain text.",
            dir_okay=False,
        ),
    ],
    out: Annotated[Path, argument("OUT", "The directory to write; an existing one is continued.", file_okay=False)],
    *,
    layers: Annotated[
        str | None,
        option(
            "LIST",
            "Layers whose outputs are kept, from 0, with commas; last is the last one's, final the state after the last "
            "norm. By default those that EAGLE-3 reads, and final.",
        ),
    ] = None,
    dtype: Annotated[str, option("TYPE", "Of hidden states: bf16, f32 or int8.")] = "bf16",
    top: Annotated[int, option("N", "Keep the N likeliest tokens after each token, and their logits.", min=0)] = 0,
    max_length: Annotated[int | None, option("N", "Tokens of a sample; longer texts are cut. 2048, or the context.", min=2)] = None,
    max_tokens: Annotated[int | None, option("N", "End after this many in all.", min=1)] = None,
    all_count: Annotated[
        bool, flag("--all-count", "Mark every token of texts that are no answers as one to train on, too.")
    ] = False,
    as_json: options.JsonOption = False,
    running: options.Running,
) -> None:
    """Write a model's hidden states over texts, with token ids, as safetensors: what draft heads are trained on.

    As extract_hidden_states of vLLM, whose id of a layer is one more: it names layers by their inputs.
    """
    from cpuspec.checkpoints.gguf_parts import file_identity
    from cpuspec.text import make_tokenizer
    from cpuspec.train import answers as answering
    from cpuspec.train import extract as extracting
    from cpuspec.train.samples import DTYPES, Extraction

    if dtype not in DTYPES:
        raise typer.BadParameter(f"there is no --dtype {dtype!r}; wanted one of {', '.join(DTYPES)}")
    _check_files(texts, "TEXTS")
    checkpoint = open_target(model)
    config, answer_files = checkpoint.config, answering.AnswerFiles(make_tokenizer(checkpoint))
    with options.usage_errors():
        named = extracting.read_layers(layers, config.num_layers) if layers else extracting.usual_layers(config.num_layers)
    files = tuple(file_identity(checkpoint.path))
    about = Extraction(checkpoint.name, files, config.vocab_size, config.hidden_size, config.num_layers, named, dtype, top)
    length = max_length or min(2048, config.context_length)
    with load_backend(model, checkpoint, running) as backend:
        extractor = extracting.Extractor(backend, checkpoint, named, top, length)
        read = extracting.read_texts(texts, answer_files, length, all_count)
        summary = extracting.extract(extractor, about, read, out, max_tokens, _Notes().of_extraction)
    tell_duplicates(answer_files)
    if as_json:
        emit_json(summary.as_dict())
    parts = [
        *([f"{counted(summary.num_kept, 'sample')} there before"] if summary.num_kept else []),
        f"{summary.path} has {counted(summary.num_samples, 'sample')} of {counted(summary.num_tokens, 'token')}, "
        f"{summary.num_answer_tokens} of answers",
        f"{summary.num_new_tokens} in {summary.duration_s:.1f} s, {summary.tokens_per_s:.0f} tokens/s",
        *(["interrupted: the same command continues from here"] if summary.interrupted else []),
    ]
    note("; ".join(parts))
    if summary.interrupted:
        raise typer.Exit(INTERRUPTED)


@exit_codes()
@options.takes_running("max_sequences", "mmap", *options.HOW)
def answers(
    model: options.ModelArgument,
    prompts: Annotated[
        list[Path],
        argument(
            "PROMPTS...",
            "JSON-lines files with messages, text or ids in each line; none with the options below.",
            default_factory=list,
            show_default=False,
            dir_okay=False,
        ),
    ],
    out: Annotated[Path, argument("OUT.jsonl", "The file to write; an existing one is continued.", dir_okay=False)],
    *,
    functions: FunctionsOption = None,
    num_self_made: Annotated[int, option("N", "Have it make up N things that a user might say.", "--self-made", min=0)] = 0,
    exclude: ExcludeOption = None,
    temperatures: TemperaturesOption = "0,0.7",
    max_tokens: Annotated[int | None, option("N", "End after this many tokens of answers in all.", min=1)] = None,
    max_answer_tokens: AnswerTokensOption = 256,
    max_prompt_tokens: Annotated[int, option("N", "Longer prompts are left out.", min=1)] = 512,
    seed: Annotated[int, option("S", "Of every answer's own seed.", min=0)] = 0,
    part: Annotated[
        str, option("I/N", "Answer only the I-th of N shares of the prompts, as one of N machines. Commands take all N files.")
    ] = "1/1",
    states: Annotated[
        Path | None,
        option("DIR", "Keep hidden states there while answering: EAGLE-3's layers, so that extract has no work.", file_okay=False),
    ] = None,
    top: Annotated[int, option("N", "With --states: keep the N likeliest tokens after each token, too.", min=0)] = 64,
    as_json: options.JsonOption = False,
    running: options.Running,
) -> None:
    """Let a model answer prompts, many at once, as data to train its draft heads on. An interrupted run continues.

    Prompts and answers that are nearly those of earlier ones are left out. What the model is, and what was refused because it
    has words of an evaluation set, is in OUT.jsonl.json.
    """
    from cpuspec.checkpoints.gguf_parts import file_identity
    from cpuspec.train import answers as answering

    _check_files(prompts, "PROMPTS")
    _check_files(exclude or [], "--exclude")
    with options.usage_errors():
        plan = answering.AnswerPlan(
            prompts=tuple(prompts),
            functions=options.split_list(functions),
            num_self_made=num_self_made,
            temperatures=_read_temperatures(temperatures),
            max_answer_tokens=max_answer_tokens,
            max_prompt_tokens=max_prompt_tokens,
            seed=seed,
            exclude=tuple(exclude or ()),
            part=_read_part(part),
        )
    checkpoint = open_target(model)
    identity, spec, kept = file_identity(checkpoint.path), SpecConfig(), None
    with ExitStack() as stack:
        if states is not None:
            kept = _answer_states(checkpoint, identity, states, top)
            stack.callback(kept.close)
            spec = SpecConfig(proposer=kept.recorder)
        with busy(f"loading {model}"):
            from cpuspec.engine.llm import LLM

            settings = replace(running.settings, context_length=plan.context_length)
            llm = stack.enter_context(LLM(checkpoint, spec, running.backend, settings=settings))
        summary = answering.make_answers(llm, identity, plan, out, max_tokens, _Notes().of_answers, states=kept)
    if as_json:
        emit_json(summary.as_dict())
    for line in _describe_answers(summary):
        note(line)
    if summary.interrupted:
        raise typer.Exit(INTERRUPTED)


def _answer_states(checkpoint: "Checkpoint", files: list[dict[str, Any]], out: Path, top: int) -> "AnswerStates":
    """The writer of hidden states of the layers that EAGLE-3 reads."""
    from cpuspec.train.extract import usual_layers
    from cpuspec.train.samples import FINAL, Extraction
    from cpuspec.train.states import AnswerStates

    config = checkpoint.config
    layers = tuple(one for one in usual_layers(config.num_layers) if one != FINAL)
    sizes = (config.vocab_size, config.hidden_size, config.num_layers)
    return AnswerStates(
        checkpoint, Extraction(checkpoint.name, tuple(files), *sizes, layers, "bf16", top), out, _Notes().of_extraction
    )


@exit_codes()
@options.takes_running("max_sequences", "mmap", *options.HOW)
def auto(
    model: options.ModelArgument,
    out: Annotated[Path, argument("OUT", "A directory for everything; a run in it is continued.", file_okay=False)],
    *,
    hours: Annotated[float, option("H", "Of everything; answers take up to half of it. 0 for no limit.", min=0)] = 8.0,
    max_tokens: Annotated[int, option("N", "Tokens of answers to train on, in all.", min=1)] = 500_000,
    source: Annotated[
        str | None,
        option("HEAD|MODEL", "Go on with this head, as that of a fine-tune's base, or teach this small model.", "--from"),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        option("FILE", "JSON lines with messages, text or ids. Repeatable. By default it makes up prompts.", dir_okay=False),
    ] = None,
    functions: FunctionsOption = None,
    given: Annotated[
        list[Path] | None,
        option("FILE", "Train on this file of `train answers` instead of answering. Repeatable.", "--answers", dir_okay=False),
    ] = None,
    exclude: ExcludeOption = None,
    temperatures: TemperaturesOption = "0,0.7",
    max_answer_tokens: AnswerTokensOption = 256,
    vocab_size: Annotated[
        int, option("N", "Tokens that a new head drafts: those which answers use most.", "--vocab", min=2)
    ] = 8192,
    intermediate_size: Annotated[
        int, option("N", "Numbers inside a new head's MLP; 0 for as many as the model has.", "--intermediate", min=0)
    ] = 0,
    epochs: Annotated[int, option("N", "How often training sees every answer.", min=1)] = 3,
    as_json: options.JsonOption = False,
    running: options.Running,
) -> None:
    """Make a draft for a model: its answers, their states, a head (or --from a small model), and a chain in OUT that uses it.

    Then `cpuspec generate OUT/NAME.toml` and `serve` draft with it. Where MODEL is a chain, its other drafts stay beside the new
    one. Ctrl-C ends a run, and the same command goes on.
    """
    check_is_installed()
    from cpuspec.checkpoints.download import resolve_model
    from cpuspec.text import make_tokenizer
    from cpuspec.train import answers as answering
    from cpuspec.train.auto import AutoPlan, Listener, tune
    from cpuspec.train.job import multiplies_bf16

    _check_files(prompts or [], "--prompts")
    _check_files(exclude or [], "--exclude")
    _check_files(given or [], "--answers")
    if given and (prompts or functions or exclude):
        raise typer.BadParameter("--answers are there already; give no --prompts, --functions and --exclude with them")
    with options.usage_errors():
        target, spec = model_and_spec(options.checked_text(model, "MODEL"), None)
    checkpoint = open_model(target)
    named = options.split_list(functions)
    has_prompts = bool(prompts or named)
    makes_up = not has_prompts and make_tokenizer(checkpoint).has_chat_template
    with options.usage_errors():
        plan = AutoPlan(
            answering.AnswerPlan(
                prompts=tuple(prompts or ()),
                functions=named if has_prompts else _ALWAYS_INSTALLED,
                num_self_made=_UNLIMITED if makes_up else 0,
                temperatures=_read_temperatures(temperatures),
                max_answer_tokens=max_answer_tokens,
                exclude=tuple(exclude or ()),
            ),
            max_tokens,
            None if source is None else resolve_model(source),
            tuple(one for one in spec.levels if one.drafter not in ("auto", source, f"text:{source}")),
            *(hours, vocab_size, intermediate_size, epochs),
            bf16=multiplies_bf16(running.settings.device),
            given=tuple(given or ()),
        )
    path = Path(target)
    name = str(path.resolve()) if path.exists() else target
    with step_progress() as progress:
        listener = Listener(_Notes().of_answers, _Notes().of_extraction, progress, tell)
        done = tune(checkpoint, name, out, plan, running.backend, running.settings, listener)
    if as_json:
        emit_json(done)
    before, best, chain = done["draft"]["before"], done["draft"]["best"], done["chain"]
    note(f"accepted by position {best['accepted']}, {before['accepted']} before; its chances say {best['said']}")
    speed = "" if chain["over_plain"] is None else f", {chain['over_plain']:.2f} of plain decoding's speed"
    note(
        f"on {chain['num_prompts']} prompts of held-back answers {chain['tokens_per_forward']:.2f} tokens a forward{speed}, "
        f"{chain['num_identical']} answers the same"
    )
    note(f"use it: cpuspec generate {chain['path']}")


class _Notes:
    """Tells how far a run is, every few seconds."""

    def __init__(self) -> None:
        self._last_s = now_s()

    def of_extraction(self, summary: "extracting.ExtractSummary") -> None:
        """A line for `cpuspec extract`."""
        if self._is_due():
            note(f"{summary.num_new_tokens} tokens, {summary.tokens_per_s:.0f} tokens/s")

    def of_answers(self, summary: "answering.AnswersSummary") -> None:
        """A line for `cpuspec train answers`."""
        if self._is_due():
            note(f"{summary.num_answer_tokens} tokens in {summary.num_kept + summary.num_answers} answers, {_generated(summary)}")

    def _is_due(self) -> bool:
        due = now_s() - self._last_s >= _NOTES_APART_S
        if due:
            self._last_s = now_s()
        return due


def _generated(summary: "answering.AnswersSummary") -> str:
    return f"{summary.num_new_tokens} generated in {summary.duration_s:.0f} s, {summary.tokens_per_s:.0f} tokens/s"


def _describe_answers(summary: "answering.AnswersSummary") -> list[str]:
    """The counts, and what the comparison with evaluation sets found."""
    left_out = {
        "duplicate prompts": summary.num_duplicate_prompts,
        "duplicate or looping answers": summary.num_duplicate_answers,
        "prompts too long": summary.num_long_prompts,
        "made-up prompts of no use": summary.num_useless_turns,
    }
    lines = [
        *([f"{counted(summary.num_kept, 'answer')} there before"] if summary.num_kept else []),
        f"{counted(summary.num_answers, 'answer')} to {counted(summary.num_prompts, 'prompt')}; "
        f"{counted(summary.num_answer_tokens, 'token')} of answers in the file; {_generated(summary)}",
        "left out: " + ", ".join(f"{number} {what}" for what, number in left_out.items()),
    ]
    for one in summary.excluded:
        found = [refused for refused in summary.refused if refused.file == one["name"]]
        lines.append(
            f"compared with {one['name']} ({one['num_texts']} texts, {one['num_runs']} runs of words): {len(found)} refused"
        )
    if not summary.excluded:
        lines.append("compared with no evaluation set; name those that the heads will be measured on with --exclude")
    lines += [f"refused {one.id} ({one.where}): {one.file} has {one.words!r}" for one in summary.refused[:_SHOWN_REFUSALS]]
    if len(summary.refused) > _SHOWN_REFUSALS:
        lines.append(f"and {len(summary.refused) - _SHOWN_REFUSALS} more; OUT.jsonl.json lists them all")
    if summary.interrupted:
        lines.append("interrupted: the same command continues from here")
    return lines


def _read_temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(one) for one in text.split(","))
    except ValueError:
        raise ConfigError(f"--temperatures takes numbers with commas between them, as 0,0.7; got {text!r}") from None


def _read_part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not all(one.isascii() and one.isdigit() and len(one) < 7 for one in (number, count)):
        raise ConfigError(f"--part takes I/N, as 1/4; got {text!r}")
    return int(number), int(count)


def _check_files(paths: list[Path], name: str) -> None:
    for path in paths:
        if not path.is_file():
            raise typer.BadParameter(f"{path} is not a file; {name} are files")


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


def tell_duplicates(files: "answering.AnswerFiles") -> None:
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


train_app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Train heads that draft for a model, from its own answers."
)
for command in (auto, eagle3, mtp, distill, export, answers):
    options.register(train_app, command)

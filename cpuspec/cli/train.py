"""The commands that make draft heads: `extract`, and `cpuspec train`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpuspec.cli import INTERRUPTED, options
from cpuspec.cli.console import counted, emit_json, exit_codes, note
from cpuspec.cli.opening import load_backend, open_model, open_target
from cpuspec.cli.options import argument, flag, option
from cpuspec.cli.progress import busy, step_progress
from cpuspec.cli.train_heads import check_is_installed, distill, eagle3, export, mtp, tell, tell_duplicates
from cpuspec.engine.draft_spec import model_and_spec
from cpuspec.errors import ConfigError
from cpuspec.metrics import now_s

if TYPE_CHECKING:
    from cpuspec.train import answers as answering
    from cpuspec.train import extract as extracting

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
    note(_describe_extraction(summary))
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
    with busy(f"loading {model}"):
        from cpuspec.engine.llm import LLM

        settings = replace(running.settings, context_length=plan.context_length)
        llm = LLM(checkpoint, "none", running.backend, settings=settings)
    with llm:
        identity = file_identity(checkpoint.path)
        summary = answering.make_answers(llm, identity, plan, out, max_tokens, _Notes().of_answers)
    if as_json:
        emit_json(summary.as_dict())
    for line in _describe_answers(summary):
        note(line)
    if summary.interrupted:
        raise typer.Exit(INTERRUPTED)


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


def _describe_extraction(summary: "extracting.ExtractSummary") -> str:
    parts = [
        *([f"{counted(summary.num_kept, 'sample')} there before"] if summary.num_kept else []),
        f"{summary.path} has {counted(summary.num_samples, 'sample')} of {counted(summary.num_tokens, 'token')}, "
        f"{summary.num_answer_tokens} of answers",
        f"{summary.num_new_tokens} in {summary.duration_s:.1f} s, {summary.tokens_per_s:.0f} tokens/s",
        *(["interrupted: the same command continues from here"] if summary.interrupted else []),
    ]
    return "; ".join(parts)


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


train_app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Train heads that draft for a model, from its own answers."
)
for command in (auto, eagle3, mtp, distill, export, answers):
    options.register(train_app, command)

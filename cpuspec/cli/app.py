"""The commands. Each reads its options, asks the package, and prints; what they mean is decided elsewhere."""

import json
import os
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpuspec import __version__
from cpuspec.backends import BACKENDS, make_backend
from cpuspec.batch.run import run_batch
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.download import fetch, find_fetched, find_model, resolve_model
from cpuspec.checkpoints.hub import HubModel, revision_of
from cpuspec.checkpoints.recipes import DEFAULT_RECIPE
from cpuspec.cli import INTERRUPTED, options
from cpuspec.cli.batch import describe_batch, run_on_cluster
from cpuspec.cli.bench import OUTPUTS, describe_bench
from cpuspec.cli.certificate import describe_certificate, show_certificate
from cpuspec.cli.console import (
    ERROR,
    FetchProgress,
    StepProgress,
    busy,
    deliver_again,
    emit,
    emit_generated,
    emit_json,
    exit_codes,
    guarded_streams,
    note,
    print_report,
    show_log,
    size,
)
from cpuspec.cli.evaluation import eval_app
from cpuspec.cli.machine import describe_machine, show_machine
from cpuspec.cli.opening import load_llm, open_model, open_target, open_with_drafts, sampling_defaults
from cpuspec.cli.parity import (
    check_record,
    describe_parity,
    loaded_side,
    make_questions,
    measure,
    read_side,
    shared_questions,
    show_parity,
)
from cpuspec.cli.quantize import imatrix, quantize
from cpuspec.cli.reports import (
    describe_model,
    found_models,
    known_chains,
    known_models,
    show_model,
    show_models,
    size_of,
    verify_model,
)
from cpuspec.cli.train import extract, train_app
from cpuspec.config import ANY_NAME, AUTO, EngineConfig, ServerConfig, SpecConfig
from cpuspec.engine.assemble import draft_models, model_and_spec
from cpuspec.environment import default_prefix_cache_bytes, usable_cores
from cpuspec.errors import ConfigError
from cpuspec.evaluate.certify import MIN_SAMPLES, NUM_SAMPLES, PROMPTS
from cpuspec.evaluate.certify import certify as certify_drafts
from cpuspec.evaluate.parity import NUM_TOKENS, TOP, WHOLE_ROWS, Limits, ModelIdentity, Recording
from cpuspec.evaluate.prompts import read_prompts
from cpuspec.evaluate.speed import Plan, measure_speed
from cpuspec.files import write_file

if TYPE_CHECKING:
    from cpuspec.engine.llm import LLM

app = typer.Typer(
    help="Quantized language models on x86 CPUs, with speculative decoding that is exact to the bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(eval_app, name="eval")
app.add_typer(train_app, name="train")


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
        os._exit(INTERRUPTED)  # everything is tidied up: Python's own end would take a while, and another Ctrl-C
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        emit(f"cpuspec {__version__}\n")
        raise typer.Exit


def _known_output(name: str | None) -> str | None:
    if name is not None and name not in OUTPUTS:
        raise typer.BadParameter(f"there is no format {name!r}; wanted one of {', '.join(OUTPUTS)}")
    return name


@app.callback()
def cpuspec(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Quantized language models on x86 CPUs, with speculative decoding that is exact to the bit."""
    show_log()


@app.command()
@exit_codes()
@options.takes_running("context_length", "mmap", "head_format", *options.HOW)
@options.takes_sampling(options.GENERATE_TOKENS)
def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="What to answer; without it, stdin.")] = None,
    *,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Take the prompt from a file; - is stdin.")
    ] = None,
    model: options.ModelOption = DEFAULT_RECIPE,
    draft: options.DraftOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Tell what auto decided from: costs, acceptance, choices.")] = False,
    system: options.SystemOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the model's chat template.")] = False,
    as_json: options.JsonOption = False,
    verify_exact: Annotated[
        bool,
        typer.Option(
            "--verify-exact",
            help="Answer greedily, or as --temperature says, then without drafts, and compare: exit code 1 if greedy ids differ.",
        ),
    ] = False,
    sampling: dict[str, Any],
    running: options.Running,
) -> None:
    """Answer one prompt. The text goes to stdout, everything else to stderr.

    Models that have a chat template get the prompt as a user's message; --raw continues it as it is.
    """
    if raw and system is not None:
        raise typer.BadParameter("--raw has no place for --system; put the text into the prompt")
    logprobs = sampling.get("logprobs")
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs are printed with --json only")
    if verify_exact and "temperature" not in sampling:
        sampling["temperature"] = 0.0  # greedy answers are the ones that must be identical
    text = options.read_prompt(prompt, file)
    if not text and not raw:
        raise typer.BadParameter("the prompt is empty; give some text")
    messages = [{"role": "system", "content": options.checked_text(system, "--system")}] if system is not None else []
    messages.append({"role": "user", "content": text})

    from cpuspec.cli.answer import check_exact, collect, describe_params, explanation, figures, keep_quiet, memory, with_seed

    question = text if raw else messages
    with load_llm(model, draft, running) as llm:
        if not raw and not llm.tokenizer.has_chat_template:
            raise ConfigError(f"{model} has no chat template; use --raw to continue the prompt as it is")
        defaults = sampling_defaults(llm)
        params = with_seed(defaults.under(sampling))
        answer = collect(llm, question, params, keep_quiet if as_json else emit_generated)
        shown = {
            "model": model,
            "revision": _revision(model),
            "backend": running.backend,
            "threads": llm.threads,
            "draft": str(llm.spec),
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "sampling_params": describe_params(params),
            "logprobs": None if logprobs is None else [asdict(one) for one in answer.logprobs],
            "stats": answer.stats and answer.stats.as_dict(),
            "memory": [asdict(one) for one in llm.memory()],
            "reads": [asdict(one) for one in llm.reads()],
            "plan": [asdict(one) for one in llm.explain()],
        }
        held, told = memory(llm), explanation(llm) if explain else []
    if not as_json and not answer.text.endswith("\n"):
        emit("\n")
    check = None
    if verify_exact and answer.finish_reason != "aborted":
        # A model loaded anew, so that nothing of the first answer can help the second.
        with load_llm(model, "none", running) as llm:
            check = check_exact(answer, collect(llm, question, params, keep_quiet), llm.row_invariant)
    if as_json:
        emit_json(shown | {"verify_exact": check and asdict(check)})
    note(figures(answer, defaults))
    for line in told:
        note(line)
    if held:
        note(held)
    if check:
        note(str(check))
    if answer.finish_reason == "aborted" or (verify_exact and not check):
        raise typer.Exit(INTERRUPTED)
    if check and not check.passed:
        raise typer.Exit(ERROR)


@app.command()
@exit_codes()
@options.takes_running("context_length", "mmap", "head_format", *options.HOW)
@options.takes_sampling(options.CHAT_TOKENS, without=("n", "max_draft_tokens", "draft", "ignore_eos", "logprobs", "parse_special"))
def chat(
    *,
    model: options.ModelOption = DEFAULT_RECIPE,
    draft: options.DraftOption = None,
    system: options.SystemOption = None,
    sampling: dict[str, Any],
    running: options.Running,
) -> None:
    """Talk with a model. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."""
    if system is not None:
        options.checked_text(system, "--system")

    from cpuspec.cli.chat import Chat, converse

    with load_llm(model, draft, running) as llm:
        if not llm.tokenizer.has_chat_template:
            raise ConfigError(f"{model} has no chat template; `cpuspec generate --raw` continues plain text with it")
        sampling_defaults(llm)
        converse(Chat(llm, model, sampling, system))


@app.command()
@exit_codes()
@options.takes_serving()
@options.takes_running(*options.ANSWERING)
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help=f"{options.MODEL_HELP} By default {DEFAULT_RECIPE}. Of several, the first is loaded at the start, others when "
            "they are first asked for.",
            autocompletion=options.complete_model,
        ),
    ] = None,
    *,
    draft: options.DraftOption = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help="Take only requests with one of this file's keys, one a line; CPUSPEC_API_KEY may hold a key, too.",
        ),
    ] = None,
    running: options.Running,
    serving: ServerConfig,
) -> None:
    """Serve models over HTTP to clients of OpenAI's and Anthropic's APIs. It listens to this machine alone unless --host says more.

    Each request has a line of JSON on stderr, without its texts. SIGTERM or Ctrl-C ends it when running answers are done.
    """
    from cpuspec.cli.serve import check_directory, prefix_directory, read_keys, run_server

    models = models or [DEFAULT_RECIPE]
    keys = read_keys(api_key_file)
    check_directory(serving.slot_save_path)
    directory = prefix_directory(running.settings.prefix_cache_dir)
    settings = replace(running.settings, prefix_cache_dir=directory, plain_on_draft_error=True)
    if len(models) > 1:
        if set(serving.aliases) - {ANY_NAME}:
            raise typer.BadParameter("--alias goes with one model; with several, requests use their names")
        if BACKENDS[0] == running.backend:  # the others keep no prefixes by default
            gb = default_prefix_cache_bytes() / 1e9 if settings.prefix_cache_gb is None else settings.prefix_cache_gb
            settings = replace(settings, prefix_cache_gb=gb / len(models))
    loaders = {}
    for model in models:
        checkpoint, spec = open_with_drafts(model, draft, settings.mmap)
        name = checkpoint.name if Path(model).exists() else model
        if name in loaders:
            raise typer.BadParameter(f"there are two models {name!r}")
        loaders[name] = partial(_load_served, checkpoint, spec, running.backend, settings), size_of(checkpoint.path)
    run_server(loaders, serving, keys)


def _load_served(checkpoint: Checkpoint, spec: SpecConfig, backend: str, settings: EngineConfig) -> "LLM":
    from cpuspec.engine.llm import LLM

    return LLM(checkpoint, spec, backend, settings=settings)


@app.command("bench-serve")
@exit_codes()
def bench_serve(
    more_goodput: Annotated[
        list[str] | None, typer.Argument(hidden=True, metavar="NAME:MS", help="More targets of --goodput.")
    ] = None,
    *,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Of the server, on this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=1, max=65535, help="Of the server.")] = 8000,
    base_url: Annotated[
        str | None, typer.Option("--base-url", metavar="URL", help="Instead of both, as http://127.0.0.1:8000.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="B",
            help="openai sends prompts to /v1/completions, openai-chat conversations to /v1/chat/completions; by default what the "
            "data are.",
        ),
    ] = None,
    endpoint: Annotated[str | None, typer.Option("--endpoint", metavar="PATH", help="Another path than the backend's.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="NAME", help="As the server calls it; by default the first of its list."),
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", metavar="N", min=1, max=100_000, help="Requests to send.")] = 100,
    request_rate: Annotated[
        float, typer.Option("--request-rate", metavar="X", help="Requests a second, at random moments; inf sends all at once.")
    ] = float("inf"),
    burstiness: Annotated[
        float,
        typer.Option("--burstiness", metavar="X", help="1 is a Poisson process; less comes in bursts, more comes evenly."),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None,
        typer.Option("--max-concurrency", metavar="N", min=1, max=10_000, help="Requests at once; those beyond wait unsent."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", min=0, help="Of the arrivals and of random prompts.")] = 0,
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            "--dataset-path",
            metavar="FILE",
            help="JSON lines with prompt or messages, perhaps with output_tokens; too few are repeated. By default random words.",
        ),
    ] = None,
    random_input_len: Annotated[
        int, typer.Option("--random-input-len", metavar="N", min=1, max=1_000_000, help="Tokens of a random prompt.")
    ] = 256,
    random_prefix_len: Annotated[
        int,
        typer.Option("--random-prefix-len", metavar="N", min=0, max=1_000_000, help="Tokens before it that all prompts share."),
    ] = 0,
    random_output_len: Annotated[
        int | None,
        typer.Option(
            "--random-output-len", "--output-len", metavar="N", min=1, help="Tokens that an answer may have, 128 by default."
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers go on to that length, on servers that know ignore_eos.")
    ] = False,
    temperature: Annotated[float, typer.Option("--temperature", metavar="T", min=0, help="0 is greedy.")] = 0.0,
    extra_body: Annotated[
        str | None,
        typer.Option("--extra-body", metavar="JSON", help='Fields of every request, as \'{"speculation": {"draft": "none"}}\'.'),
    ] = None,
    num_warmups: Annotated[
        int, typer.Option("--num-warmups", metavar="N", min=0, max=1000, help="Requests that are sent before, unmeasured.")
    ] = 1,
    max_seconds: Annotated[
        float, typer.Option("--max-seconds", metavar="S", min=0.001, max=1e6, help="What still runs then is broken off.")
    ] = 3600.0,
    percentile_metrics: Annotated[
        str, typer.Option("--percentile-metrics", metavar="LIST", help="The latencies to show, of ttft, tpot, itl and e2el.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, typer.Option("--metric-percentiles", metavar="LIST", help="Percentiles of each.")
    ] = "50,95,99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput",
            metavar="NAME:MS...",
            help="Count answers that keep these, too, as ttft:500 tpot:50; of ttft, tpot and e2el.",
        ),
    ] = None,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the report as JSON to a file.")] = False,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="And every answer's own figures and text.")] = False,
    result_dir: Annotated[Path, typer.Option("--result-dir", metavar="DIR", help="Where the file goes.")] = Path(),
    result_filename: Annotated[
        str | None, typer.Option("--result-filename", metavar="NAME", help="By default one of what was run, and when.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Send a load of requests to a server of this machine, and show latencies and throughput. In the manner of `vllm bench serve`.

    Any server of OpenAI's protocol will do; CPUSPEC_API_KEY is the key, if it wants one. Ctrl-C shows what came until then.
    """
    if more_goodput and not goodput:
        raise typer.BadParameter(f"got {more_goodput[0]!r}; wanted options only")
    from cpuspec.cli import load
    from cpuspec.load.figures import read_goodput, read_metrics, read_percentiles

    if backend not in (None, load.COMPLETIONS, load.CHAT):
        raise typer.BadParameter(f"there is no --backend {backend!r}; wanted {load.COMPLETIONS} or {load.CHAT}")
    if not (request_rate > 0 and 0 < burstiness < float("inf")):
        raise typer.BadParameter(f"--request-rate and --burstiness must be above 0; got {request_rate:g} and {burstiness:g}")
    with options.usage_errors():
        wanted = load.Wanted(
            num_prompts=num_prompts,
            dataset=dataset_path,
            num_random_tokens=random_input_len,
            num_prefix_tokens=random_prefix_len,
            num_warmups=num_warmups,
            metrics=read_metrics(percentile_metrics),
            percentiles=read_percentiles(metric_percentiles),
            goodput=read_goodput([*(goodput or []), *(more_goodput or [])]),
        )
    plan = load.LoadPlan(
        model=model or "",
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        seed=seed,
        max_tokens=random_output_len or 128,
        max_seconds=max_seconds,
        backend=backend,
        endpoint=endpoint,
        body={"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {}), **options.read_object(extra_body)},
        keep_texts=save_detailed,
    )
    report, result = load.measure_load(base_url or f"http://{f'[{host}]' if ':' in host else host}:{port}", plan, wanted)
    if save_result or save_detailed:
        path = load.result_path(report, result_dir, result_filename)
        write_file(path, json.dumps(report | (load.details(result.answers) if save_detailed else {})) + "\n")
        note(f"wrote {path}")
    print_report(report, as_json, load.show_load)
    load.note_errors(result.answers)
    if result.stopped:
        note(f"{result.stopped}: these figures are of a part of the load")
    if result.stopped == load.STOPPED_BY_USER:
        raise typer.Exit(INTERRUPTED)
    if result.stopped or not report["completed"]:
        raise typer.Exit(ERROR)


@app.command()
@exit_codes()
@options.takes_running(*options.ANSWERING)
@options.takes_sampling(options.GENERATE_TOKENS, without=("n", "max_draft_tokens", "draft", "logprobs"))
def batch(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl",
            help="Requests, one a line: OpenAI's batch format, or objects with prompt or messages.",
            dir_okay=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT.jsonl", help="Answers in the same order; one that exists is gone on with.", dir_okay=False),
    ],
    *,
    model: options.ModelOption = DEFAULT_RECIPE,
    draft: options.DraftOption = None,
    over_ray: Annotated[
        bool, typer.Option("--ray", help="Answer with workers on the machines of a Ray cluster (extra cpuspec[ray]).")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="ADDRESS",
            help="The cluster of --ray, as auto or HOST:6379; by default RAY_ADDRESS, else a cluster of this machine alone.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", metavar="N", min=1, help="Of --ray, with --threads each; by default as many as the cluster has room for."
        ),
    ] = None,
    as_json: options.JsonOption = False,
    sampling: dict[str, Any],
    running: options.Running,
) -> None:
    """Answer a file of prompts, many at once. A run that was broken off goes on where it ended.

    What a line asks for goes before the options. A line that cannot be answered gets its error as the answer, and the others go on.
    """
    if not source.is_file():
        raise typer.BadParameter(f"{source} is no file; give one with a request in each line")
    if not over_ray and (address or workers):
        raise typer.BadParameter("--address and --workers go with --ray")
    with StepProgress(tenths=True) as progress:
        on_progress = partial(progress, "batch")
        if over_ray:
            summary = run_on_cluster(source, out, model, draft, running, sampling, address, workers, on_progress)
        else:
            from cpuspec.batch.answer import answer_lines
            from cpuspec.engine.llm import LLM

            checkpoint, spec = open_with_drafts(model, draft, running.settings.mmap)
            with busy(f"loading {model}"):
                llm = LLM(checkpoint, spec, running.backend, settings=running.settings)
            with llm:
                sampling_defaults(llm)
                summary = run_batch(source, out, lambda lines: answer_lines(llm, lines, sampling), on_progress)
    if as_json:
        emit_json(summary.as_dict())
    note(describe_batch(summary))
    if summary.interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
@exit_codes()
def pull(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="Models to fetch: names from `cpuspec models` (of a chain target and drafts), owner/name:QUANT of the hub.",
        ),
    ],
    as_json: options.JsonOption = False,
) -> None:
    """Fetch models, check them, and print where they are. What is already there is not fetched again.

    For a name of the hub's, it is asked whether there is a newer one.
    """
    wanted = dict.fromkeys(model for name in names for model in _named_models(options.checked_text(name, "NAME")))
    found = {name: find_model(name) for name in wanted}
    done = []
    for name, model in found.items():
        was_there = path = model if isinstance(model, Path) else find_fetched(model)
        if not isinstance(model, Path) and (path is None or isinstance(model, HubModel)):
            with FetchProgress(name) as progress:
                path = fetch(model, progress, refresh=True)
        assert path is not None, "fetch returns a path"
        num_bytes, revision = size_of(path), revision_of(path)
        note(
            f"{name} {'is already there' if path == was_there else 'fetched and verified'} ({size(num_bytes)}"
            f"{f', revision {revision}' if revision else ''})"
        )
        done.append({"name": name, "path": str(path), "bytes": num_bytes, "was_there": path == was_there, "revision": revision})
        if not as_json:
            emit(f"{path}\n")
    if as_json:
        emit_json(done)


def _named_models(name: str) -> list[str]:
    """The model of that name, or the target and the draft models of that chain."""
    target, spec = model_and_spec(name, None)
    return [target, *draft_models(spec)]


@app.command()
@exit_codes()
def models(as_json: options.JsonOption = False) -> None:
    """List the models that can be named: recipes, with size, licence, and whether they are fetched; chains of drafts; local models.

    Local models are those that huggingface_hub, LM Studio and Ollama hold on this machine.
    """
    (rows, problems), chains, found = known_models(), known_chains(), found_models()
    for problem in problems:
        note(f"warning: left out: {problem}")
    print_report(rows + chains + found, as_json, lambda _: show_models(rows, chains, found))


@app.command()
@exit_codes()
@options.takes_running("threads", with_backend=False)
def inspect(
    model: options.ModelArgument,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read the model's files and packed weights whole, and compare their checksums; exit code 1 if one differs.",
        ),
    ] = False,
    as_json: options.JsonOption = False,
    running: options.Running,
) -> None:
    """Show a model's shape and formats, and how fast this machine's memory could feed it; of a chain, the target's."""
    checkpoint, threads = open_target(model), running.settings.threads or usable_cores()
    with busy("measuring this machine's memory bandwidth"):
        report = describe_model(checkpoint, threads, tensors)
    if verify:
        with busy("reading the model's files"):
            report["verified"] = verify_model(checkpoint, threads)
    print_report(report, as_json, show_model)
    if verify and not report["verified"]["passed"]:
        raise typer.Exit(ERROR)


@app.command()
@exit_codes()
@options.takes_running(*options.HOW)
def bench(
    model: options.ModelArgument,
    *,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", "-p", metavar="N", min=0, help="Prefill this many tokens at once; 0 does not.")
    ] = 512,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", "-n", metavar="N", min=0, help="Decode this many tokens one by one; 0 does not.")
    ] = 128,
    depth: Annotated[
        str, typer.Option("--depth", "-d", metavar="LIST", help="Do both after this many tokens of context, as 0,4096.")
    ] = "0",
    sequences: Annotated[
        str, typer.Option("--sequences", "-s", metavar="LIST", help="Decode with this many sequences together, as 1,32.")
    ] = "1",
    rows: Annotated[
        str,
        typer.Option("--rows", metavar="LIST", help="Forwards over this many rows, with the logits of all; or none."),
    ] = "1,2,3,4,5,8,16",
    rows_depth: Annotated[
        int, typer.Option("--rows-depth", metavar="N", min=0, help="Tokens of context that the forwards of --rows have.")
    ] = 64,
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", metavar="N", min=1, help="Rounds; everything has its turn in each.")
    ] = 5,
    running: options.Running,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FORMAT", callback=_known_output, help="md, csv or json; md by default."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Measure a model's speed: prefill, decoding, and forwards over a few rows. Random tokens, no sampling; of a chain, the target.

    Figures are means with standard deviations, and medians. Everything is measured in turn, round by round.
    """
    if as_json and output not in (None, "json"):
        raise typer.BadParameter(f"got --json and --output {output}; wanted one of them")
    with options.usage_errors():
        plan = Plan(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            depths=options.read_numbers(depth, "--depth"),
            sequences=options.read_numbers(sequences, "--sequences"),
            rows=options.read_numbers(rows, "--rows"),
            rows_depth=rows_depth,
            repetitions=repetitions,
        )
    checkpoint = open_target(model)
    backend, settings = running
    plan.check(checkpoint.config, settings.max_rows)
    with busy(f"loading {model}"):
        loaded = make_backend(backend, checkpoint, settings)
    try:
        # Lines and no spinner: it would take turns with the measured threads.
        report = measure_speed(loaded, plan, note)
        OUTPUTS["json" if as_json else output or "md"](describe_bench(model, loaded, settings, plan), report)
    finally:
        loaded.close()


@app.command()
@exit_codes()
@options.takes_running("head_format", *options.HOW)
def certify(
    model: options.ModelArgument,
    *,
    draft: options.DraftOption = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="FILE:FIELD:N",
            help="Greedy answers to a field of the first N lines of a JSON-lines file, :chat after it for conversations; "
            "by default to some prompts of its own.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="Tokens of each greedy answer.")] = 128,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=MIN_SAMPLES, help="Sampled answers at each of three temperatures.")
    ] = NUM_SAMPLES,
    running: options.Running,
    as_json: options.JsonOption = False,
) -> None:
    """Test that drafts change no answer: greedy token ids, and the distribution of sampled ones. Exit code 1 if they do.

    The distribution is tested by chi-square, which must also reject a proposer that lies.
    """
    questions = PROMPTS if prompts is None else read_prompts(options.checked_text(prompts, "--prompts")).prompts
    checkpoint, spec = open_with_drafts(model, draft)
    if not spec.levels:
        raise typer.BadParameter("there is no draft to certify; name one with --draft, as --draft ngram")
    backend, settings = running
    found = certify_drafts(checkpoint, spec, questions, tokens, samples, backend=backend, settings=settings, on_progress=note)
    report = describe_certificate(model, checkpoint, backend, settings, found)
    print_report(report, as_json, show_certificate)
    if not found.passed:
        raise typer.Exit(ERROR)


@app.command()
@exit_codes()
@options.takes_running("threads", "kv_format", with_backend=False)
def parity(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help=f"The reference: {', '.join(BACKENDS)}, with settings as in numba:threads=1, or a file that --record wrote.",
        ),
    ],
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="What is compared with it, likewise; without it A is recorded.")
    ] = None,
    *,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help=f"{options.MODEL_HELP} By default {DEFAULT_RECIPE}.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft", metavar="SPEC", callback=options.known_draft, help="Answer with these drafts, too; by default none."
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            metavar="FILE:FIELD:N",
            help="Answer a field of the first N lines of a JSON-lines file, :chat after it for conversations; by default some "
            "prompts of its own. Repeatable.",
        ),
    ] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option(
            "--text", metavar="FILE:TOKENS", help="Read the first tokens of a file, too, and compare the logits. Repeatable."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", metavar="N", min=0, help=f"Tokens of each answer; by default {NUM_TOKENS}, 0 reads only."),
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE", help="Write what A said, to be compared with on another machine.")
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Likeliest ids that a record keeps of each row.")] = TOP,
    whole_rows: Annotated[
        int, typer.Option("--whole-rows", metavar="N", min=0, help="Rows of which a record keeps every logit.")
    ] = WHOLE_ROWS,
    min_same_top: Annotated[
        float | None, typer.Option("--min-same-top", metavar="SHARE", min=0, max=1, help="Fail below this share of rows.")
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option("--max-kl", metavar="NATS", min=0, help="Fail above this mean divergence, as far as it is known."),
    ] = None,
    max_difference: Annotated[
        float | None,
        typer.Option(
            "--max-difference", metavar="X", min=0, help="Fail above this difference of two logits, as far as it is known."
        ),
    ] = None,
    identical: Annotated[bool, typer.Option("--identical", help="Fail where a greedy answer differs.")] = False,
    as_json: options.JsonOption = False,
    running: options.Running,
) -> None:
    """Compare two backends, or a backend and a record from another machine: logits, greedy answers, drafts, speed.

    Exit code 0 says that the comparison was made, whatever differs; 1 that a limit given is not kept, or that drafts changed an
    answer of a backend which promises that they cannot.
    """
    names = [a] if b is None else [a, b]
    sides = [read_side(options.checked_text(name, "AB"[number]), running.settings) for number, name in enumerate(names)]
    check_record(record)
    if b is None and record is None:
        raise typer.BadParameter("there is nothing to compare with; name a second backend or record, or a file with --record")
    if record is not None and isinstance(sides[0], Recording):
        raise typer.BadParameter(f"--record writes what a backend says, and {a} is a record already")
    checkpoint, spec = None, SpecConfig()
    if model is None and not all(isinstance(side, Recording) for side in sides):
        model = DEFAULT_RECIPE
    if model is not None:
        checkpoint, spec = open_with_drafts(model, draft)
        spec = SpecConfig() if draft is None and spec == AUTO else spec
    identity = (
        ModelIdentity.from_checkpoint(checkpoint)
        if checkpoint
        else next(side.model for side in sides if isinstance(side, Recording))
    )
    questions = shared_questions(sides, identity)
    if questions is None:
        assert checkpoint is not None, "where there is no record there is a backend, which runs a model"
        questions = make_questions(checkpoint, prompts or [], texts or [], NUM_TOKENS if tokens is None else tokens)
    elif prompts or texts or tokens is not None:
        raise typer.BadParameter("--prompts, --text and --tokens are the record's own; leave them out")
    with ExitStack() as stack:
        loaded = []
        for side in sides:
            with nullcontext() if isinstance(side, Recording) else busy(f"loading {side.name}"):
                loaded.append(stack.enter_context(loaded_side(side, checkpoint, questions, spec)))
        with StepProgress() as progress:
            found = measure(loaded, identity, questions, record, (top, whole_rows), progress)
    if record is not None:
        note(f"{record} has what {a} said ({size(record.stat().st_size)})")
    if found is None:
        return
    failures = found.failures(Limits(min_same_top, max_kl, max_difference, identical))
    report = describe_parity(identity, found, failures)
    print_report(report, as_json, show_parity)
    if failures:
        raise typer.Exit(ERROR)


@app.command()
@exit_codes()
@options.takes_running("activations", "kv_format", with_backend=False)
def export(
    model: options.ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT.onnx", help="The file to write; weights go to OUT.onnx.data beside it.")],
    *,
    running: options.Running,
) -> None:
    """Write a model as ONNX for other programs, with its weights' own values and its cache as inputs and outputs."""
    from cpuspec.backends.onnx_export import export_onnx

    checkpoint = open_model(model)
    with busy(f"writing {out}"):
        num_bytes = export_onnx(checkpoint, out, running.settings.activations, running.settings.kv_format)
    note(f"wrote {size(num_bytes)}")
    emit(f"{out}\n")


app.command()(quantize)
app.command()(imatrix)
app.command()(extract)


@app.command()
@exit_codes()
def info(as_json: options.JsonOption = False) -> None:
    """Show what cpuspec makes of this machine: processor, kernels chosen for it, memory, versions, caches."""
    with busy("measuring this machine's memory bandwidth"):
        report = describe_machine()
    print_report(report, as_json, show_machine)


def _revision(model: str) -> str | None:
    """The commit of the model of that name, or of the target of that chain, which was fetched, if it is the hub's."""
    return revision_of(resolve_model(model_and_spec(model, None)[0]))

"""The command `generate`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cpuspec.checkpoints.download import resolve_model
from cpuspec.checkpoints.hub import revision_of
from cpuspec.checkpoints.recipes import DEFAULT_RECIPE
from cpuspec.cli import INTERRUPTED, options
from cpuspec.cli.console import ERROR, emit, emit_apart, emit_generated, emit_json, exit_codes, note
from cpuspec.cli.opening import load_llm, sampling_defaults, thinking_variables
from cpuspec.cli.options import argument, flag, option
from cpuspec.engine.draft_spec import model_and_spec
from cpuspec.errors import ConfigError


@exit_codes()
@options.takes_running("context_length", "mmap", "draft_format", "draft_vocab", *options.HOW, *options.ADAPTED)
@options.takes_sampling()
def generate(
    model: options.ModelArgument = DEFAULT_RECIPE,
    prompt: Annotated[str | None, argument("PROMPT", "What to answer. Without it stdin is read, and -m names the model.")] = None,
    *,
    file: Annotated[Path | None, option("FILE", "Take the prompt from a file; - is stdin.", "--file", "-f")] = None,
    draft: options.DraftOption = None,
    explain: Annotated[bool, flag("--explain", "Tell what auto decided from: costs, acceptance, choices.")] = False,
    system: options.SystemOption = None,
    thinking: options.ThinkingOption = None,
    raw: Annotated[bool, flag("--raw", "Continue the prompt as it is, without the model's chat template.")] = False,
    as_json: options.JsonOption = False,
    verify_exact: Annotated[
        bool,
        flag(
            "--verify-exact",
            "Answer greedily, or as --temperature says, then without drafts, and compare: exit code 1 if greedy ids differ.",
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
    if raw and thinking is not None:
        raise typer.BadParameter("--raw has no chat template that could switch reasoning; leave out --thinking and --no-thinking")
    logprobs = sampling.get("logprobs")
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs are printed with --json only")
    if verify_exact and "temperature" not in sampling:
        sampling["temperature"] = 0.0  # greedy answers are the ones that must be identical
    if model == DEFAULT_RECIPE:
        options.check_is_no_model(prompt)
    text = options.read_prompt(prompt, file)
    if not text and not raw:
        raise typer.BadParameter("the prompt is empty; give some text")
    messages = [{"role": "system", "content": options.checked_text(system, "--system")}] if system is not None else []
    messages.append({"role": "user", "content": text})

    from cpuspec.cli.answer import (
        check_exact,
        describe_params,
        explanation,
        figures,
        keep_quiet,
        memory_line,
        stream_answer,
        with_seed,
    )

    question = text if raw else messages
    with load_llm(model, draft, running) as llm:
        if not raw and not llm.tokenizer.has_chat_template:
            raise ConfigError(f"{model} has no chat template; use --raw to continue the prompt as it is")
        defaults = sampling_defaults(llm)
        params = with_seed(defaults.under(sampling))
        shows = (keep_quiet, keep_quiet) if as_json else (emit_generated, emit_apart)
        variables = thinking_variables(llm, thinking)
        answer = stream_answer(llm, question, params, *shows, variables=variables)
        shown = {
            "model": model,
            "revision": revision_of(resolve_model(model_and_spec(model, None)[0])),
            "backend": running.backend,
            "threads": llm.threads,
            "draft": str(llm.spec),
            "text": answer.text,
            **({"content": answer.content, "reasoning": answer.reasoning} if answer.content != answer.text else {}),
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "sampling_params": describe_params(params),
            "logprobs": None if logprobs is None else [asdict(one) for one in answer.logprobs],
            "stats": answer.stats and answer.stats.as_dict(),
            "memory": [asdict(one) for one in llm.memory()],
            "reads": [asdict(one) for one in llm.reads()],
            "plan": [asdict(one) for one in llm.explain()],
            "rounds": [asdict(one) for one in llm.round_parts()],
        }
        held, told = memory_line(llm), explanation(llm) if explain else []
    if not as_json and not answer.content.endswith("\n"):
        emit("\n")
    check = None
    if verify_exact and answer.finish_reason != "aborted":
        # A model loaded anew, so that nothing of the first answer can help the second.
        with load_llm(model, "none", running) as llm:
            plain = stream_answer(llm, question, params, keep_quiet, variables=variables)
            check = check_exact(answer, plain, llm.row_invariant)
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

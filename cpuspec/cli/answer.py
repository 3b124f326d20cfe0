"""Streams one answer to the terminal, keeps it if the user interrupts it, and describes it in a line of figures."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from secrets import randbits
from typing import Any, cast

from cpuspec.backends.disk import DiskReads
from cpuspec.cli.console import accepted, counted, size
from cpuspec.engine.llm import LLM, Message
from cpuspec.metrics import RequestStats, RoundPart
from cpuspec.sampling import TokenLogprobs
from cpuspec.sequence import shared_prefix
from cpuspec.server.parsing.answer import Piece, answer_parser, shown_tokens
from cpuspec.settings import SAMPLING_FIELDS, SamplingDefaults, SamplingParams
from cpuspec.text.reasoning import opens_reasoning


@dataclass
class StreamedAnswer:
    """An answer. finish_reason is "aborted" if the user interrupted it; its stats then end there.

    content, reasoning: the two parts of the text. The answer to a raw prompt is all content. calls: of tools, their names and
    arguments as JSON.
    """

    params: SamplingParams
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = "aborted"
    stats: RequestStats | None = None
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def keep_quiet(text: str) -> None:
    """Show nothing: for answers that are printed when they are complete."""


def stream_answer(
    llm: LLM,
    prompt: str | Sequence[Message],
    params: SamplingParams,
    show: Callable[[str], None],
    show_apart: Callable[[str], None] = keep_quiet,
    variables: Mapping[str, Any] | None = None,
) -> StreamedAnswer:
    """Stream the answer's content to `show`, and its reasoning and tool calls to `show_apart`.

    Ctrl-C ends the answer, not the command: the tokens so far are returned. variables: of the chat template.
    """
    answer, parser, shown, template = StreamedAnswer(params), None, frozenset[int](), None
    asked: Any = prompt
    if not isinstance(prompt, str):
        tokenizer = llm.tokenizer
        template = tokenizer.chat_template_for(variables or {})
        ids = asked = tokenizer.encode_chat(prompt, variables=variables)
        functions = {one["function"]["name"]: one["function"]["parameters"] for one in (variables or {}).get("tools", ())}
        parser, shown = answer_parser(template, functions, opens_reasoning(tokenizer, template, ids)), shown_tokens(tokenizer)

    def show_pieces(pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.kind == "content":
                if answer.reasoning and not answer.content:
                    show_apart("\n")
                answer.content += piece.text
                show(piece.text)
            else:
                answer.reasoning += piece.text if piece.kind == "reasoning" else ""
                if piece.kind == "call":
                    answer.calls.append((piece.text, ""))
                elif piece.kind == "arguments":
                    answer.calls[-1] = (answer.calls[-1][0], answer.calls[-1][1] + piece.text)
                show_apart(f"[{piece.text}] " if piece.kind == "call" else piece.text)

    try:
        with closing(cast(Generator, llm.stream(asked, params, shown=shown, chat_template=template))) as outputs:
            for output in outputs:
                answer.text += output.text
                answer.token_ids += output.token_ids
                answer.logprobs += output.logprobs
                answer.finish_reason = output.finish_reason or answer.finish_reason
                answer.stats = output.stats
                show_pieces(parser.push(output.text) if parser else [Piece("content", output.text)])
    except KeyboardInterrupt:
        answer.stats = answer.stats or llm.aborted_stats
    show_pieces(parser.finish() if parser else [])
    return answer


@dataclass(frozen=True)
class ExactCheck:
    """The comparison of an answer with the one without drafts. first_difference: position of the first token that differs."""

    identical: bool
    greedy: bool
    num_tokens: int
    first_difference: int | None
    row_invariant: bool = True  # whether the backend promises the same bits whatever is drafted

    @property
    def passed(self) -> bool:
        """Whether the answers agree as they must: only sampled ones may differ, where rows are not invariant."""
        return self.identical or not (self.greedy or self.row_invariant)

    def __str__(self) -> str:
        if self.identical:
            return f"verified without drafts: identical, {self.num_tokens} tokens"
        where = f"the answer without drafts differs from token {self.first_difference} on"
        if self.row_invariant:
            return f"error: {where}, and answers{'' if self.greedy else ' of one seed'} must not; please report this"
        if self.greedy:
            return f"error: {where}; this backend cannot promise that it does not, where two tokens are nearly as likely: numba can"
        return f"{where}: on this backend sampled answers may, with the same distribution; `cpuspec certify` tests that"


def check_exact(answer: StreamedAnswer, plain: StreamedAnswer, row_invariant: bool) -> ExactCheck | None:
    """Compare an answer with `plain`, the one without drafts. None if `plain` was interrupted."""
    if plain.finish_reason == "aborted":
        return None
    same = shared_prefix(answer.token_ids, plain.token_ids)
    identical = answer.token_ids == plain.token_ids
    return ExactCheck(identical, answer.params.greedy, len(answer.token_ids), None if identical else same, row_invariant)


def with_seed(params: SamplingParams) -> SamplingParams:
    """The params. Sampled answers without a seed get a random one, so that they can be repeated."""
    return params if params.greedy or params.seed is not None else replace(params, seed=randbits(32))


def describe_params(params: SamplingParams) -> dict[str, Any]:
    """The params as JSON, which has no infinity and no numbers as keys."""
    shown = {one.name: getattr(params, one.name) for one in fields(params)}
    biases = {str(token): bias if math.isfinite(bias) else str(bias) for token, bias in params.logit_bias.items()}
    return shown | {"logit_bias": biases}


def describe_sampling(params: SamplingParams, defaults: SamplingDefaults) -> str:
    """The sampling in words, such as `sampled at temperature 0.2 (model's own)` where the model recommends that value."""
    names = [name for name in (*SAMPLING_FIELDS, "presence_penalty", "frequency_penalty") if not params.greedy or "penalty" in name]
    used = [name for name in names if getattr(params, name) != getattr(SamplingParams, name)]
    own = [name for name in used if getattr(params, name) == defaults.fields().get(name)]
    shown = [f"{_spoken(name)} {getattr(params, name)}" for name in used]
    text = ", ".join(["greedy", *shown]) if params.greedy else f"sampled at {', '.join(shown)}"
    if own:
        which = [] if own == used else [", ".join(map(_spoken, own))]
        text += " (" + " ".join(("model's own", *which)) + ")"
    return text if params.greedy or params.seed is None else f"{text}, seed {params.seed}"


def _spoken(name: str) -> str:
    return name.replace("_penalty", " penalty").replace("_", "-")


def figures(answer: StreamedAnswer, defaults: SamplingDefaults) -> str:
    """The line after an answer: tokens, latency, rates, accepted drafts of each level, and the sampling."""
    stats = answer.stats
    interrupted = [f"interrupted after {len(answer.token_ids)} tokens"] if answer.finish_reason == "aborted" else []
    chosen = describe_sampling(answer.params, defaults)
    if stats is None:
        return " | ".join([*interrupted, chosen])
    cached = f" ({stats.num_cached_tokens} cached)" if stats.num_cached_tokens else ""
    parts = [*interrupted, f"{stats.num_prompt_tokens} prompt tokens{cached}", f"{stats.num_new_tokens} new tokens"]
    if stats.ttft_s is not None:
        parts.append(f"first token after {stats.ttft_s:.2f} s")
    if stats.tokens_per_s is not None:
        parts.append(f"{stats.tokens_per_s:.1f} tokens/s")
    if stats.gb_per_s is not None:
        parts.append(f"{stats.gb_per_s:.1f} GB/s")
    for name, level in stats.levels.items():
        fate = accepted(level.num_accepted_tokens, level.num_draft_tokens)
        parts.append(f"{name}: {fate}, {level.tau:.2f} tokens per round")
    if stats.levels:
        parts.append(f"{stats.num_forwards_saved} forwards saved")
    parts.append(chosen)
    if reason := cut_off_by(answer):
        parts.append(f"cut off by {reason}")
    return " | ".join(parts)


def memory_line(llm: LLM) -> str:
    """A line about the memory of each model of a chain; empty for a target without draft models."""
    levels = llm.memory()
    if len(levels) < 2:
        return ""
    parts = []
    for one in levels:
        shared = f" ({size(one.shared_bytes)} of them the target's)" if one.shared_bytes else ""
        parts.append(f"{one.name} {size(one.weight_bytes)} of weights{shared}, {size(one.kv_bytes)} of keys and values")
    return "memory: " + " | ".join(parts)


def from_disk(disk: DiskReads, num_forwards: int) -> str:
    """A text about experts on the disk: bytes read in a forward, the time waited for them, and the share found in memory."""
    found = f"{100 * disk.num_found / max(disk.num_experts, 1):.0f} % of the experts needed were in memory"
    each = f"{size(disk.num_bytes / num_forwards)} read from the disk and {1e3 * disk.wait_s / num_forwards:.1f} ms waited for it"
    return f"{each} in each; {found}"


def explanation(llm: LLM) -> list[str]:
    """Lines about the weights that each model has read, and about the figures from which `auto` chose its drafts."""
    drafters = llm.explain()
    lines = [
        f"{one.name}: {counted(one.num_forwards, 'forward')}, {size(one.weight_bytes / one.num_forwards)} of weights read in each"
        for one in llm.reads()
        if one.num_forwards
    ]
    lines += [f"{one.name}: {from_disk(one.disk, one.num_forwards)}" for one in llm.reads() if one.disk and one.num_forwards]
    if not drafters:
        return [*lines, f"--explain tells what auto decides from; the draft here is {llm.spec}"]
    for one in drafters:
        if one.name == "none":
            rows = ", ".join(f"{n}: {cost:.2f}" for n, cost in one.cost_of_rows.items())
            lines.append(f"{one.verifies}: a forward by its rows costs {rows}; {one.num_rounds} rounds without a draft")
            if one.read_share is not None:
                lines.append(f"  its rows read {one.read_share:.0%} of the further experts that rows of unrelated tokens read")
            continue
        judged = f"each judged by its confidences times {one.acceptance or 0:.2f}"
        if one.speedup is None:
            plan = f"{one.cost_of_drafting:.3f} forwards a draft, {judged}"
        else:
            usual = f"drafts of usually {one.num_tokens} tokens, which give {one.speedup:.2f}x"
            plan = f"{one.cost_of_drafting:.2f} forwards a token, {usual}, {judged}"
        drafted = f"{one.num_accepted_tokens} of {one.num_draft_tokens} tokens accepted in {one.num_rounds} rounds"
        lines.append(f"  {one.name} for {one.verifies}: {plan}; {drafted}")
    return [*lines, *rounds_table(llm.round_parts())]


def rounds_table(parts: Sequence[RoundPart]) -> list[str]:
    """Lines about where the time went, the largest parts first, beside what `auto` expected of each."""
    whole_s = sum(part.seconds for part in parts)
    lines = [f"time of all steps: {whole_s:.3f} s"]
    for part in sorted(parts, key=lambda one: -one.seconds):
        if part.count and whole_s:
            expected = "" if part.expected_s is None else f" ({1e3 * part.expected_s / part.count:.2f} expected)"
            each = f"{part.count} of {1e3 * part.seconds / part.count:.2f} ms{expected}"
            lines.append(f"  {part.seconds / whole_s:6.1%}  {part.name}: {each}")
    return lines


def cut_off_by(answer: StreamedAnswer) -> str:
    """The limit that ended an answer before the model did, or an empty text."""
    if answer.finish_reason != "length":
        return ""
    limit = answer.params.max_tokens
    return f"max tokens {limit}" if len(answer.token_ids) == limit else "the context's length"

"""Answers many prompts at once, with an LLM or a server of this machine, and measures what the answers cost."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from cpuspec.backends import Backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.engine.engine import Output, RequestedAnswer
from cpuspec.engine.llm import LLM, load_target
from cpuspec.errors import CpuspecError
from cpuspec.evaluate.prompts import Prompt, prompt_ids
from cpuspec.loadtest.figures import RequestResult
from cpuspec.metrics import LevelCounters, RequestStats, now_s, percentiles, sum_levels
from cpuspec.server.parsing.answer import answer_parser, shown_tokens
from cpuspec.settings import EngineConfig, SamplingParams, SpecConfig
from cpuspec.text import make_tokenizer
from cpuspec.text.reasoning import opens_reasoning, stop_scope

OnAnswer = Callable[[int], None]  # answers that are done


@dataclass(frozen=True)
class Answer:
    """One answer. content: the text without its reasoning. Raw prompts have no reasoning, so there the two are equal."""

    text: str
    content: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: RequestStats


@dataclass(frozen=True)
class Cost:
    """The cost of a set of answers. Latencies are in seconds, at p50, p95 and p99 of the answers.

    tokens_per_s: new tokens of all answers over `duration_s`, which runs from the first request to the last token.
    decode_tokens_per_s: median of the answers' own rates. memory_bytes: weights, keys and values; bytes that several models share
    count once. None for a server, which does not tell.
    """

    num_answers: int
    num_prompt_tokens: int
    num_new_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    duration_s: float
    tokens_per_s: float
    decode_tokens_per_s: float | None
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    answer_s: dict[str, float]
    levels: dict[str, dict[str, Any]]
    memory_bytes: int | None

    def price(self, price_per_hour: float, num_passed: int) -> dict[str, float | None]:
        """The price of a million new tokens and of a right answer, at the machine's price; None without tokens or answers."""
        whole = price_per_hour * self.duration_s / 3600
        return {
            "per_million_tokens": whole / self.num_new_tokens * 1e6 if self.num_new_tokens else None,
            "per_accepted_answer": whole / num_passed if num_passed else None,
        }


@contextmanager
def opened(backend: str, checkpoint: Checkpoint, spec: SpecConfig | None, settings: EngineConfig) -> Iterator[tuple[LLM, Backend]]:
    """Load a model on a backend, and close both in the end."""
    loaded = load_target(backend, checkpoint, settings)
    try:
        llm = LLM.from_backend(loaded, make_tokenizer(checkpoint), spec, settings, checkpoint)
    except BaseException:
        loaded.close()
        raise
    with llm:
        yield llm, loaded


def answer_all(
    llm: LLM, requests: Sequence[tuple[Prompt | list[int], SamplingParams]], on_answer: OnAnswer = lambda done: None
) -> tuple[list[Answer], Cost]:
    """Answer the prompts in their order, `llm.max_sequences` at once. The LLM must have no other callers.

    A prompt is a text, a conversation, or token ids. Raises ConfigError for a prompt that cannot be run, before any is run.
    """
    tokenizer = llm.tokenizer
    prompts = [_ids(llm, prompt) for prompt, _ in requests]
    for ids, (_, params) in zip(prompts, requests, strict=True):
        llm.check(ids, params)
    shown = shown_tokens(tokenizer)
    parts: list[list[Output]] = [[] for _ in requests]
    running: dict[int, int] = {}  # the request's id, by the prompt's number
    ends_s: dict[int, float] = {}
    begin_s, begun = now_s(), 0
    begins_s: list[float] = []
    try:
        while len(ends_s) < len(requests):
            while begun < len(requests) and len(running) < llm.max_sequences:
                prompt, params = requests[begun]
                begins_s.append(now_s())
                wanted = RequestedAnswer(prompts[begun], params)
                if _is_conversation(prompt):
                    apart, within = stop_scope(tokenizer, tokenizer.chat_template or "", wanted.prompt, shown)
                    wanted = replace(wanted, shown=shown, apart=apart, within=within)
                running[begun] = llm.submit(wanted, parts[begun].append)
                begun += 1
            llm.step()
            for number in [number for number in running if parts[number] and parts[number][-1].finish_reason]:
                llm.abort(running.pop(number))
                ends_s[number] = now_s()
                on_answer(len(ends_s))
    finally:
        for request in running.values():
            llm.abort(request)
    duration_s = now_s() - begin_s
    answers = [_answer(llm, *one) for one in zip((prompt for prompt, _ in requests), prompts, parts, strict=True)]
    took_s = [ends_s[number] - begins_s[number] for number in range(len(requests))]
    levels = sum_levels(answer.stats.levels for answer in answers)
    memory_bytes = sum(one.weight_bytes - one.shared_bytes + one.kv_bytes for one in llm.memory())
    return answers, _cost([answer.stats for answer in answers], duration_s, took_s, levels, memory_bytes)


def _is_conversation(prompt: Prompt | list[int]) -> bool:
    return not isinstance(prompt, str) and any(isinstance(one, dict) for one in prompt)


def _ids(llm: LLM, prompt: Any) -> list[int]:
    """The token ids of a prompt. An empty prompt becomes BOS."""
    is_ids = not isinstance(prompt, str) and not _is_conversation(prompt)
    ids = list(prompt) if is_ids else prompt_ids(llm.tokenizer, prompt)
    return ids if ids or llm.tokenizer.bos_id is None else [llm.tokenizer.bos_id]


def _answer(llm: LLM, prompt: Prompt | list[int], ids: list[int], parts: Sequence[Output]) -> Answer:
    last, text = parts[-1], "".join(part.text for part in parts)
    if last.finish_reason in (None, "aborted", "error") or last.stats is None:
        raise last.error or CpuspecError("an answer was aborted; ask again")
    tokens = tuple(token for part in parts for token in part.token_ids)
    content = text
    if _is_conversation(prompt):
        template = llm.tokenizer.chat_template
        parser = answer_parser(template, {}, opens_reasoning(llm.tokenizer, template, ids))
        content = "".join(piece.text for piece in [*parser.push(text), *parser.finish()] if piece.kind == "content")
    return Answer(text, content, tokens, str(last.finish_reason), last.stats)


def cost_of_server(answers: Sequence[RequestResult], duration_s: float) -> Cost:
    """The cost of a server's answers. All of them must have come. A count that the server does not report is 0."""
    return _cost(answers, duration_s, [one.e2el_s for one in answers])


def _cost(
    answers: Sequence[RequestStats] | Sequence[RequestResult],
    duration_s: float,
    took_s: Sequence[float],
    levels: Mapping[str, LevelCounters] = MappingProxyType({}),
    memory_bytes: int | None = None,
) -> Cost:
    num_new, times_s = sum(one.num_new_tokens for one in answers), [one.tpot_s for one in answers if one.tpot_s]
    return Cost(
        num_answers=len(answers),
        num_prompt_tokens=sum(one.num_prompt_tokens or 0 for one in answers),
        num_new_tokens=num_new,
        num_draft_tokens=sum(one.num_draft_tokens or 0 for one in answers),
        num_accepted_tokens=sum(one.num_accepted_tokens or 0 for one in answers),
        duration_s=duration_s,
        tokens_per_s=num_new / duration_s if duration_s else 0.0,
        decode_tokens_per_s=float(np.median([1 / one for one in times_s])) if times_s else None,
        ttft_s=percentiles([one.ttft_s for one in answers if one.ttft_s is not None]),
        tpot_s=percentiles(times_s),
        answer_s=percentiles(took_s),
        levels={name: level.as_dict() for name, level in levels.items()},
        memory_bytes=memory_bytes,
    )

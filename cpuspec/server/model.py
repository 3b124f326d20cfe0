"""A loaded model that answers requests: what its vocabulary and its template can do, its queue, its engine's thread.

It knows prompts as token ids and answers as outputs; the protocols are written above it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from random import Random
from typing import Any, ParamSpec, TypeVar
from uuid import uuid4
from zlib import crc32

from cpuspec.engine.engine import Output, Request, RequestedAnswer
from cpuspec.engine.llm import LLM, Job
from cpuspec.errors import CpuspecError
from cpuspec.metrics import RequestStats, now_s
from cpuspec.server.admission import Admission, AnswerMeter, Workers
from cpuspec.server.errors import (
    BusyError,
    ContextExceededError,
    EngineFailedError,
    RequestError,
    TimeUpError,
    as_request_error,
    contained,
)
from cpuspec.server.fill import fill_tokens
from cpuspec.server.parsing.answer import shown_tokens
from cpuspec.server.runner import Runner, in_own_thread
from cpuspec.server.turns import ToolUse, tool_use
from cpuspec.settings import SamplingParams, ServerConfig

_P = ParamSpec("_P")
_T = TypeVar("_T")

# The most characters of a text for each token that fits; languages and programs have 2 to 6.
_CHARS_PER_TOKEN, _CHARS_AT_LEAST = 16, 4096
_STEP_S = 1.0  # the longest time that /metrics waits for a step to end
_MOST_BIASES = 1024
_MOST_MERGED = 256  # tokens of outputs that are shown as one


@dataclass
class ReportedSlot:
    """A row of `/slots`: a place for one running answer. The engine's cache slots have other numbers.

    tokens: of the prompt that was computed here last, and of its answer.
    """

    number: int
    meter: AnswerMeter | None = None
    request_id: str = ""
    client: str = ""
    salt: str = ""
    tokens: list[int] = field(default_factory=list)


class ServedModel:
    """An LLM with its queue, its threads and its metrics. Made in the event loop; `close` ends the threads and frees the LLM."""

    def __init__(self, name: str, llm: LLM, config: ServerConfig) -> None:
        from cpuspec.server.observe import Metrics  # here: a batch uses this module, and may have no prometheus_client

        self.name = name
        self.llm = llm
        self.config = config
        self.num_users = 0  # requests that may use it now
        self.used_s = now_s()  # when the last one ended
        self.keep_s: float | None = None  # how long it stays loaded without requests, if the last one said so; below 0 for ever
        self.has_keys = False  # whether each client has an API key of its own
        self.admission = Admission(llm.max_sequences, config.max_waiting)
        self.unfinished: set[Answers] = set()
        self.slots = [ReportedSlot(number) for number in range(llm.max_sequences)]
        self.metrics = Metrics(name, self._state, lambda: llm.levels, llm.reads, lambda: llm.num_draft_failures)
        self.on_death: Callable[[], object] = lambda: None  # called when its engine has died for good
        self.runner = Runner(llm, asyncio.get_running_loop(), self._engine_failed)
        self._workers = Workers(2, "cpuspec-tokenizer")
        self._compiler = Workers(1, "cpuspec-grammar")  # separate, because a grammar may take seconds to be refused
        self.jobs = Admission(1, config.max_waiting, "requests for embeddings or scores")  # beside the engine's steps
        tokenizer = llm.tokenizer
        self.shown = shown_tokens(tokenizer)
        self.fill = fill_tokens(tokenizer)

    @cached_property
    def tool_use(self) -> ToolUse:
        """What its chat template does with tools. It is rendered for that, once."""
        return tool_use(self.llm.tokenizer)

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens that a prompt may have."""
        most = self.llm.context_length - 1
        return min(most, self.config.max_prompt_tokens or most)

    @property
    def unload_after_s(self) -> float | None:
        """Seconds without a request after which it is unloaded; None for never."""
        wanted = self.config.sleep_idle_seconds if self.keep_s is None else self.keep_s
        return wanted if wanted is not None and wanted >= 0 else None

    @property
    def is_idle(self) -> bool:
        """Whether no request has used it for that long."""
        limit = self.unload_after_s
        return limit is not None and not self.num_users and now_s() - self.used_s >= limit

    async def num_bytes(self) -> int:
        """Bytes of its weights, and of its keys and values now. Waits for the running step."""
        levels = await asyncio.to_thread(self.llm.memory)
        return sum(level.weight_bytes - level.shared_bytes + level.kv_bytes for level in levels)

    async def in_worker(self, client: str, function: Callable[_P, _T], *args: _P.args, **options: _P.kwargs) -> _T:
        """Call the function in a worker thread, and return what it returns: what a request holds may take a while to read.

        client: whose turn it takes. Raises BusyError.
        """
        return await self._workers.run(client, partial(function, *args, **options))

    async def answers(self, client: str, request_id: str, requested: Sequence[RequestedAnswer], rng: Random | None) -> "Answers":
        """Queue the answers to one request, all or none. They are prepared in a thread. rng: see `Answers`.

        client: whose turn in the queue the answers take. Clients with different keys share no prefixes.
        Raises RequestError or ConfigError for what the model cannot run, BusyError where the queue is full.
        """
        self.check_prompt(max((one.prompt for one in requested), key=len))
        self.admission.check(client, len(requested))
        params, workers = requested[0].params, self._workers
        # A grammar that is compiled already does not wait behind others.
        if params.has_grammar and not await workers.run(client, partial(self.llm.engine.has_compiled, params)):
            workers = self._compiler
        prepared = await workers.run(client, partial(self._prepared, client, requested, rng))
        return Answers(self, client, request_id, prepared, rng)

    def _prepared(self, client: str, requested: Sequence[RequestedAnswer], rng: Random | None) -> list[Request]:
        found = []
        for one in requested:
            salt, params = self.salt(client, one.params.cache_salt), one.params
            if rng is not None and not params.greedy and params.seed is None:
                params = replace(params, seed=rng.getrandbits(64))
            params = params if salt == params.cache_salt else replace(params, cache_salt=salt)
            found.append(self.llm.prepare(replace(one, params=params, shown=self.shown)))
        return found

    def salt(self, client: str, given: str = "") -> str:
        """The engine's salt for a client's request. given: the request's `cache_salt`."""
        return f"{client}:{given}" if self.has_keys else given

    async def run_job(self, client: str, job: Job) -> None:
        """Run a job, for embeddings or scores, to its end beside the engine's steps. Raises BusyError, TimeUpError."""
        admitted = asyncio.Event()
        (ticket,) = self.jobs.enter(client, [admitted.set])
        try:
            async with asyncio.timeout(self.config.max_request_s):
                await admitted.wait()
                while not job.is_done:
                    await in_own_thread(partial(self.llm.job_step, job))
        except TimeoutError:
            raise TimeUpError(f"the request took longer than {self.config.max_request_s:g} s") from None
        finally:
            self.jobs.leave(ticket)

    def fill_prompt(self, before: str, after: str, others: Sequence[tuple[str, str]] = ()) -> list[int]:
        """See `FillTokens.prompt`. Raises RequestError for a model that cannot fill in, and as `check_text` does."""
        if self.fill is None:
            lacks = f"{self.name} has no tokens for filling in the middle, so it cannot take a suffix"
            raise RequestError(f"{lacks}; use a model such as qwen2.5-coder", "suffix")
        self.check_text(len(before) + len(after) + sum(len(path) + len(text) for path, text in others))
        return self.fill.prompt(self.llm.tokenizer, before, after, others)

    def fill_params(self, params: SamplingParams) -> SamplingParams:
        """The params, with the tokens that end the text in a gap."""
        return params if self.fill is None else replace(params, stop_token_ids=(*params.stop_token_ids, *self.fill.ends))

    def params(self, given: dict[str, Any]) -> SamplingParams:
        """The params of a request with these fields, the model's own recommendations for others.

        Raises ConfigError, and RequestError for more biases than each step can look through.
        """
        if len(given.get("logit_bias", ())) > _MOST_BIASES:
            raise RequestError(f"logit_bias takes at most {_MOST_BIASES} tokens, got {len(given['logit_bias'])}", "logit_bias")
        most = self.config.max_new_tokens or self.llm.context_length
        return self.llm.sampling_defaults.under({**given, "max_tokens": min(given.get("max_tokens", most), most)})

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raise ContextExceededError for a prompt that is longer than the server takes."""
        if len(prompt) > self.max_prompt_tokens:
            raise ContextExceededError(len(prompt), self.max_prompt_tokens, self.llm.context_length)

    def check_text(self, num_chars: int) -> None:
        """Raise ContextExceededError for a text that cannot fit. It is not tokenized first: a megabyte may take 15 seconds."""
        if num_chars > max(_CHARS_PER_TOKEN * self.max_prompt_tokens, _CHARS_AT_LEAST):
            detail = f" (or more: it has {num_chars} characters)"
            raise ContextExceededError(-(-num_chars // _CHARS_PER_TOKEN), self.max_prompt_tokens, self.llm.context_length, detail)

    async def ask_prefixes(self) -> None:
        """Bring the prefix cache's metrics up to date, unless a step takes long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_STEP_S):
                self.metrics.prefixes = await in_own_thread(self.llm.prefix_stats)

    def retry_after_s(self) -> int:
        """Seconds until a place may be free, estimated from recent requests."""
        rounds = (self.admission.num_waiting + 1) / self.admission.max_running
        return max(1, min(60, round(rounds * self.metrics.mean_request_s)))

    def fail_answers(self, error: CpuspecError) -> None:
        """Make all unfinished answers raise this error."""
        for answers in self.unfinished:
            answers.fail(error)

    def close(self) -> None:
        """End the engine's thread when its step is done, and release the model."""
        self.runner.close()
        self._workers.close()
        self._compiler.close()
        self.llm.close()

    def _engine_failed(self) -> None:
        self.fail_answers(EngineFailedError("the engine failed while it computed this answer; try again"))
        if not self.runner.is_alive:
            self.on_death()

    def _state(self) -> tuple[int, int, float]:
        held = sum(slot.meter.num_prompt_tokens + slot.meter.num_new_tokens for slot in self.slots if slot.meter)
        waiting = self.llm.engine.num_waiting
        running = max(self.admission.num_running - waiting, 0)
        return running, self.admission.num_waiting + waiting, held / (len(self.slots) * self.llm.context_length)


async def served(name: str, llm: LLM, config: ServerConfig) -> ServedModel:
    """A served model whose template was rendered once, in a thread: no request waits for that, and the event loop neither."""
    found = ServedModel(name, llm, config)
    await asyncio.to_thread(lambda: found.tool_use)
    return found


class Answers:
    """The answers to one request. They enter the queue when this is made, run when a place is free, and come out of `outputs`.

    `ServedModel.answers` makes it of what `LLM.prepare` has made. The caller must call `close` at the end. An answer
    is known by its number, counted from 0. Raises BusyError if the queue is full.

    rng: None, unless another replica may have to repeat the answers (`cpuspec.ray`). Then seeds and ids are drawn from it, and the
    outputs come in an order that does not depend on the computation's speed: one token each, answer by answer in rotation.
    stamp: with an `rng`, a checksum of the tokens that `outputs` has yielded; None for a progress report.
    """

    def __init__(self, model: ServedModel, client: str, request_id: str, prepared: Sequence[Request], rng: Random | None) -> None:
        self._prepared = prepared
        self.stamp = None if rng is None else 0
        self._rng = rng
        self._checksum = 0
        self._rotation = deque(range(len(prepared)))  # with an rng: the unfinished answers, the next one first
        self.meters = [AnswerMeter(len(one.seq.tokens)) for one in prepared]
        self.model = model
        self._client, self._request_id = client, request_id
        self.deadline_s = asyncio.get_running_loop().time() + model.config.max_request_s
        self._outputs: list[list[Output]] = [[] for _ in prepared]  # that `outputs` has not yielded yet, by number
        self._stats: dict[int, RequestStats] = {}  # of the finished answers, by number
        self._ready = asyncio.Event()
        self._engine_ids: dict[int, int] = {}  # the engine's ids of the running answers, by number
        self._slots: dict[int, ReportedSlot] = {}
        self._error: CpuspecError | None = None
        try:
            starts = [partial(self._submit, number) for number in range(len(prepared))]
            self._tickets = model.admission.enter(client, starts)
        except BusyError as error:
            error.retry_after_s = model.retry_after_s()
            raise
        model.unfinished.add(self)

    @property
    def stats(self) -> list[RequestStats]:
        """The figures of the answers whose last outputs `outputs` has yielded, in the order of the answers."""
        return [self._stats[number] for number in sorted(self._stats)]

    def new_id(self) -> str:
        """32 hexadecimal digits for an item or a call of the answers."""
        return uuid4().hex if self._rng is None else f"{self._rng.getrandbits(128):032x}"

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """Yield each answer's number and output as they come. Outputs that came while the reader was slow are merged into one.

        Raises TimeUpError when the time is up, EngineFailedError if the engine ended an answer, RequestError if its grammar did.
        """
        num_left = len(self._prepared)
        while num_left:
            try:
                async with asyncio.timeout_at(self.deadline_s):
                    await self._ready.wait()
            except TimeoutError:
                raise TimeUpError(f"the request took longer than {self.model.config.max_request_s:g} seconds") from None
            self._ready.clear()
            if self._error:
                raise self._error
            for number, output in self._merged_outputs() if self._rng is None else self._outputs_in_rotation():
                if output.error:
                    raise as_request_error(output.error)
                if output.finish_reason == "aborted":
                    raise EngineFailedError("the engine failed while it computed this answer; try again")
                if output.finish_reason is not None:
                    num_left -= 1
                    self._stats |= {number: output.stats} if output.stats else {}
                yield number, output
                await asyncio.sleep(0)  # a reader that is behind gets much at once

    def fail(self, error: CpuspecError) -> None:
        """Make `outputs` raise this error."""
        self._error = error
        self._ready.set()

    def close(self) -> None:
        """End what still runs, and give all places back. Doing it again changes nothing.

        The next answer may start before the engine frees the slot of this one. That is safe: it waits in `Scheduler.waiting`.
        """
        self.model.unfinished.discard(self)
        for number, ticket in enumerate(self._tickets):
            if number in self._engine_ids:
                self.model.metrics.ended(self.meters[number], "aborted", 0)
            self._release(number)
            self.model.admission.leave(ticket)

    def _merged_outputs(self) -> Iterator[tuple[int, Output]]:
        """Yield the outputs that have come, answer by answer. Small ones are merged."""
        for number, waiting in enumerate(self._outputs):
            begin, self._outputs[number] = 0, []
            while begin < len(waiting):
                counts = accumulate(len(output.token_ids) for output in waiting[begin : begin + _MOST_MERGED])
                end = begin + max(1, sum(count <= _MOST_MERGED for count in counts))
                yield number, _merged(waiting[begin:end])
                begin = end

    def _outputs_in_rotation(self) -> Iterator[tuple[int, Output]]:
        """Yield the outputs that have come, answer by answer, until the next answer has none. Progress reports do not rotate."""
        while self._rotation and (waiting := self._outputs[self._rotation[0]]):
            number, output = self._rotation[0], waiting.pop(0)
            if output.num_read_tokens is None:
                self._rotation.popleft()
                if output.finish_reason is None:
                    self._rotation.append(number)
                self._checksum = crc32(f"{number} {output.token_ids} ".encode(), self._checksum)
            self.stamp = self._checksum if output.num_read_tokens is None else None
            yield number, output

    def _submit(self, number: int) -> None:
        """Hand an answer to the engine: its place in the queue has come up."""
        one, model = self._prepared[number], self.model
        self.meters[number].start_s = now_s()
        tokens = one.seq.tokens.copy()  # of the prompt; the engine adds to its own
        try:
            receive = partial(self._receive, number)
            self._engine_ids[number] = contained(partial(model.runner.submit, one, receive))
        except CpuspecError as error:
            self.fail(error)
            return
        slot = self._slots[number] = next(slot for slot in model.slots if slot.meter is None)
        slot.meter, slot.request_id, slot.tokens = self.meters[number], self._request_id, tokens
        slot.client, slot.salt = self._client, one.seq.params.cache_salt

    def _receive(self, number: int, output: Output) -> None:
        """Keep an output of the engine. A finished answer gives its place back at once, even if its reader is slow."""
        if number not in self._engine_ids:
            return  # `close` was called meanwhile
        self._outputs[number] += [output] if self._rng is None else _by_token(output)
        self._slots[number].tokens += output.token_ids
        self._ready.set()
        metrics = self.model.metrics
        metrics.output(self.meters[number], len(output.token_ids))
        if output.finish_reason is not None:
            metrics.ended(self.meters[number], output.finish_reason, output.stats.num_cached_tokens if output.stats else 0)
            self._release(number, has_ended=True)
            self.model.admission.leave(self._tickets[number])

    def _release(self, number: int, has_ended: bool = False) -> None:
        """Free an answer's slot, and abort it unless it has ended."""
        engine_id = self._engine_ids.pop(number, None)
        if engine_id is not None:
            if not has_ended:
                self.model.runner.abort(engine_id)
            slot = self._slots.pop(number)
            slot.meter, slot.request_id = None, ""


def _by_token(output: Output) -> list[Output]:
    """The output in parts of one token each. The first has its rounds, the last its end."""
    parts = []
    for number, (token, text, source) in enumerate(zip(output.token_ids, output.token_texts, output.token_sources, strict=True)):
        part = replace(
            output,
            text=text,
            token_ids=[token],
            logprobs=output.logprobs[number : number + 1],
            token_texts=[text],
            token_sources=[source],
            cycles=[] if number else output.cycles,
        )
        is_last = number == len(output.token_ids) - 1
        parts.append(part if is_last else replace(part, finish_reason=None, stop_reason=None, stats=None, error=None))
    return parts or [output]


def _merged(outputs: list[Output]) -> Output:
    """One output with the text and the tokens of all of these, and everything else from the last."""
    if len(outputs) == 1:
        return outputs[0]
    lists = ("token_ids", "logprobs", "token_texts", "token_sources", "cycles")
    joined: dict[str, Any] = {name: [item for output in outputs for item in getattr(output, name)] for name in lists}
    return replace(outputs[-1], text="".join(output.text for output in outputs), **joined)

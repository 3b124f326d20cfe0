"""Sends requests at random times, and measures their streamed answers."""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cpuspec.errors import CpuspecError, in_one_line
from cpuspec.loadtest.client import Client, ServerError
from cpuspec.loadtest.figures import RequestResult
from cpuspec.loadtest.requests import PATHS, LoadRequest
from cpuspec.metrics import now_s

OUT_OF_TIME, INTERRUPTED = "out of time", "interrupted"


@dataclass(frozen=True)
class LoadPlan:
    """How requests are sent."""

    model: str = ""
    request_rate: float = math.inf  # requests a second on average; inf sends all at once
    burstiness: float = 1.0  # 1 for a Poisson process, less for bursts, more for even gaps
    max_concurrency: int | None = None  # requests under way at once; others wait unsent, and their clock starts when they are sent
    seed: int = 0
    max_tokens: int = 128
    max_seconds: float = 3600.0  # requests that still run then are broken off
    backend: str | None = None  # None: each request goes to the protocol that its content is made for
    endpoint: str | None = None  # None: the path of that protocol
    body: dict[str, Any] = field(default_factory=dict)  # further fields of every request
    keep_texts: bool = False

    def request_body(self, request: LoadRequest) -> dict[str, Any]:
        """The whole body of a request."""
        return {
            "model": self.model,
            **request.content(self.backend),
            "max_tokens": request.max_tokens or self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }


@dataclass(frozen=True)
class LoadResult:
    """The answers in the order of their requests, those that were never sent left out. stopped: "" for a whole run."""

    answers: list[RequestResult]
    duration_s: float
    stopped: str


def arrival_times(count: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds at which requests arrive: gaps are gamma-distributed with this shape and the mean 1 / request_rate.

    With burstiness 1 they are exponential, and arrivals a Poisson process. The same seed gives the same times.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (request_rate * burstiness), count)
    return np.cumsum(gaps).tolist()


async def run_load(
    client: Client, requests: Sequence[LoadRequest], plan: LoadPlan, on_progress: Callable[[int, int], None]
) -> LoadResult:
    """Send every request, and wait for the answers. on_progress gets the numbers of requests that are done and that there are.

    A request that fails is an answer with an error. Where this is cancelled, as by Ctrl-C, or out of time, the result has what
    came until then.
    """
    bodies = [plan.request_body(request) for request in requests]  # one that cannot be sent fails before the first is
    paths = [plan.endpoint or PATHS[request.protocol(plan.backend)] for request in requests]
    times_s = arrival_times(len(requests), plan.request_rate, plan.burstiness, plan.seed)
    places = asyncio.Semaphore(plan.max_concurrency or len(requests))
    answers: list[RequestResult] = []
    tasks: list[asyncio.Task[None]] = []
    num_done, stopped, begin_s = 0, "", now_s()

    async def send(path: str, body: dict[str, Any], answer: RequestResult) -> None:
        nonlocal num_done
        try:
            await _ask(client, path, body, answer, begin_s, plan.keep_texts)
        finally:
            places.release()
            num_done += 1
            on_progress(num_done, len(requests))

    try:
        async with asyncio.timeout(plan.max_seconds):
            for path, body, time_s in zip(paths, bodies, times_s, strict=True):
                if (wait_s := begin_s + time_s - now_s()) > 0:
                    await asyncio.sleep(wait_s)
                await places.acquire()
                answers.append(RequestResult(now_s() - begin_s))
                tasks.append(asyncio.create_task(send(path, body, answers[-1])))
            await asyncio.gather(*tasks)
    except TimeoutError:
        stopped = OUT_OF_TIME
    except asyncio.CancelledError:
        stopped = INTERRUPTED
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    faults = (one for one in outcomes if isinstance(one, BaseException) and not isinstance(one, asyncio.CancelledError))
    if fault := next(faults, None):
        raise fault
    for answer in answers:
        if not (answer.e2el_s or answer.error):  # it was cancelled before it began
            answer.error = stopped
    return LoadResult(answers, now_s() - begin_s, stopped)


async def _ask(client: Client, path: str, body: dict[str, Any], answer: RequestResult, begin_s: float, keep_text: bool) -> None:
    """Send one request, and note in `answer` what comes and when."""
    sent_s = now_s()
    answer.start_s, answer.error = sent_s - begin_s, "broken off"
    watch = _Watch(answer, sent_s, keep_text)
    try:
        await client.post_events(path, body, watch.receive)
        answer.error = "" if watch.finished else "the stream ended before the answer did"
    except ServerError as error:
        answer.error = str(error)
    finally:
        answer.e2el_s = now_s() - sent_s
        watch.settle()


class _Watch:
    """Reads the events of one answer."""

    def __init__(self, answer: RequestResult, sent_s: float, keep_text: bool) -> None:
        self.finished = False
        self._answer, self._sent_s, self._keep_text = answer, sent_s, keep_text
        self._last_s: float | None = None  # when the last text came
        self._num_pieces = 0
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}

    def receive(self, data: str) -> None:
        """Note one event. Raises ServerError for an event that reports an error or is none of the protocol's."""
        arrived_s = now_s()
        if data.strip() == "[DONE]":
            self.finished = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise ServerError(f"an event is not a JSON object: {in_one_line(data)!r}")
        if error := event.get("error"):
            raise ServerError(in_one_line(str(error.get("message", error) if isinstance(error, dict) else error)))
        self._usage = _object(event.get("usage")) or self._usage
        self._timings = _object(event.get("timings")) or self._timings
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            text = _text(_object(choice))
            self.finished = self.finished or bool(_object(choice).get("finish_reason"))
            if not text:
                continue
            if self._last_s is None:
                self._answer.ttft_s = arrived_s - self._sent_s
            else:
                self._answer.itl_s.append(arrived_s - self._last_s)
            self._last_s = arrived_s
            self._num_pieces += 1
            if self._keep_text:
                self._answer.text += text

    def settle(self) -> None:
        """Note what the server counted, when the answer has ended."""
        answer, usage, timings = self._answer, self._usage, self._timings
        details, fate = _object(usage.get("prompt_tokens_details")), _object(usage.get("completion_tokens_details"))
        answer.num_prompt_tokens = _count(usage.get("prompt_tokens"))
        new_tokens = _count(usage.get("completion_tokens"))
        if new_tokens is None:
            new_tokens = _count(timings.get("predicted_n"))
        answer.num_new_tokens = self._num_pieces if new_tokens is None else new_tokens
        cached, accepted = _count(details.get("cached_tokens")), _count(fate.get("accepted_prediction_tokens"))
        rejected, drafted = _count(fate.get("rejected_prediction_tokens")), _count(timings.get("draft_n"))
        answer.num_cached_tokens = _count(timings.get("cache_n")) if cached is None else cached
        # llama-server reports drafts only in its timings, servers of OpenAI's protocol in their usage.
        answer.num_draft_tokens = drafted if accepted is None or rejected is None else accepted + rejected
        answer.num_accepted_tokens = _count(timings.get("draft_n_accepted")) if accepted is None else accepted
        if self._last_s is None:
            answer.ttft_s = answer.e2el_s


def _text(choice: dict[str, Any]) -> str:
    """The text that a choice of a chunk brings: of the answer, of reasoning, or of a tool call."""
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    delta = _object(choice.get("delta"))
    texts = [delta[name] for name in ("reasoning_content", "reasoning", "content", "refusal") if isinstance(delta.get(name), str)]
    for call in delta.get("tool_calls") or []:
        function = _object(_object(call).get("function"))
        texts += [function[name] for name in ("name", "arguments") if isinstance(function.get(name), str)]
    return "".join(texts)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


async def first_model(client: Client) -> str:
    """The name of the model that the server lists first. Raises ServerError."""
    reply = _object(await client.get_json("/v1/models")).get("data")
    name = _object(reply[0]).get("id") if isinstance(reply, list) and reply else None
    if not isinstance(name, str):
        raise ServerError("the server lists no model; name one with --model")
    return name


async def warm_up(client: Client, requests: Sequence[LoadRequest], plan: LoadPlan) -> None:
    """Send these requests one after the other, unmeasured. Raises CpuspecError where the first of them fails."""
    for request in requests:
        answer = RequestResult(0.0)
        await _ask(client, plan.endpoint or PATHS[request.protocol(plan.backend)], plan.request_body(request), answer, 0.0, False)
        if answer.error:
            raise CpuspecError(f"the server does not answer the first request: {answer.error}")

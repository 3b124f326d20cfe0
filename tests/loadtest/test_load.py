"""Load is sent to this machine only, arrives as the plan says, and its figures are those of the answers."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from cpuspec.errors import ConfigError
from cpuspec.loadtest.address import LocalAddress, local_address
from cpuspec.loadtest.client import Client, ServerError
from cpuspec.loadtest.figures import (
    RequestResult,
    most_at_once,
    read_goodput,
    summarize,
)
from cpuspec.loadtest.requests import CHAT, COMPLETIONS, LoadRequest, random_requests, read_requests
from cpuspec.loadtest.run import OUT_OF_TIME, LoadPlan, LoadResult, arrival_times, run_load

# --- addresses


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://127.9.8.7:1", "http://[::1]:8000/", "http://[::ffff:127.0.0.1]"])
def test_addresses_of_this_machine_are_taken(url: str) -> None:
    assert local_address(url).numbers


@pytest.mark.parametrize(
    "url",
    [
        *("http://192.0.2.1:8000", "http://0.0.0.0:8000", "http://[::]:8000", "http://[2001:db8::1]", "http://[::ffff:192.0.2.1]"),
        *("https://127.0.0.1", "ftp://127.0.0.1", "127.0.0.1:8000", "http://", "http://127.0.0.1:99999", "http://[::1"),
        *("http://127.0.0.1@192.0.2.1", "http://user@127.0.0.1", "http://127.0.0.1?x", "http://127.0.0.1#x", ""),
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        local_address(url)


def leads_to(*numbers: str) -> Callable[..., Any]:
    return lambda host, port, **_: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, port)) for number in numbers]


def test_a_name_counts_by_where_it_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", leads_to("::1", "127.0.0.1"))
    found = local_address("http://here.example:9/v")  # looked up once: what is connected to is the number that was checked
    assert (found.numbers, found.host) == (("::1", "127.0.0.1"), "here.example")
    for numbers in (("192.0.2.1",), ("127.0.0.1", "192.0.2.1")):
        monkeypatch.setattr(socket, "getaddrinfo", leads_to(*numbers))
        with pytest.raises(ConfigError, match=r"leads to 192\.0\.2\.1, which is not this machine's own address"):
            local_address("http://127.0.0.1.example:9")


# --- arrivals


def test_arrivals_are_a_poisson_process() -> None:
    counts = np.bincount(np.array(arrival_times(20_000, 5.0, 1.0, seed=7)).astype(int))[:-1]
    assert 0.9 < counts.var() / counts.mean() < 1.1  # that of a Poisson distribution is 1


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    gaps = np.diff(arrival_times(20_000, 5.0, burstiness, seed=7))
    assert 0.19 < gaps.mean() < 0.21
    assert 0.95 < gaps.std() / gaps.mean() * burstiness**0.5 < 1.05


# --- figures


def answered(ttft_s: float, e2el_s: float, num_new_tokens: int, **more: Any) -> RequestResult:
    return RequestResult(0.0, ttft_s, e2el_s, num_new_tokens=num_new_tokens, **more)


def test_figures_are_those_of_the_answers_that_came() -> None:
    answers = [
        answered(
            0.1, 1.1, 11, num_prompt_tokens=5, num_cached_tokens=2, num_draft_tokens=8, num_accepted_tokens=6, itl_s=[0.5, 0.5]
        ),
        answered(0.3, 0.3, 1, num_prompt_tokens=7),
        answered(9.0, 9.0, 9, error="broken off"),
    ]
    found = summarize(answers, 2.0, ("ttft", "tpot", "itl", "e2el"), (50, 99.9), {"ttft": 200, "tpot": 100})
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (12, 12)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (1.0, 6.0, 12.0)
    assert (found["total_cached_tokens"], found["total_draft_tokens"], found["total_accepted_draft_tokens"]) == (2, 8, 6)
    assert found["mean_ttft_ms"] == found["median_ttft_ms"] == found["p50_ttft_ms"] == pytest.approx(200)
    assert found["mean_tpot_ms"] == pytest.approx(100)  # one token has no time per token
    assert found["p99.9_itl_ms"] == pytest.approx(500)
    assert found["request_goodput"] == 0.5


def test_goodput_wants_every_target() -> None:
    answers = [answered(0.1, 1.1, 11), answered(0.3, 0.4, 1)]

    def good(**targets: float) -> float:
        return summarize(answers, 1.0, (), (), targets)["request_goodput"]

    assert [good(ttft=100), good(ttft=300), good(tpot=99), good(ttft=300, tpot=99), good(e2el=500)] == [1, 2, 1, 1, 1]
    assert summarize(answers, 1.0, (), (), {})["request_goodput"] is None


def test_a_load_without_answers_has_figures() -> None:
    found = summarize([], 0.0, ("ttft",), (50,), {"ttft": 1})
    assert (found["completed"], found["output_throughput"], found["mean_ttft_ms"], found["p50_ttft_ms"]) == (0, 0, None, None)
    assert found["total_cached_tokens"] is None


def test_requests_at_once_are_counted() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([RequestResult(0.0, e2el_s=2.0), RequestResult(1.0, e2el_s=2.0), RequestResult(2.0, e2el_s=1.0)]) == 2


@pytest.mark.parametrize("entries", [["ttft"], ["ttft:"], ["ttft:0"], ["itl:5"], ["ttft:1", "ttft:2"], ["ttft:inf"], ["ttft:nan"]])
def test_bad_targets_are_refused(entries: list[str]) -> None:
    with pytest.raises(ConfigError):
        read_goodput(entries)


# --- requests


def test_requests_are_read_and_repeated(tmp_path: Any) -> None:
    path = tmp_path / "in.jsonl"
    lines = [{"prompt": "a", "output_tokens": 3}, {"messages": [{"role": "user", "content": "b"}]}, {"body": {"prompt": [1, 2]}}]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    found = read_requests(path, 4)
    assert found[3] == found[0] == LoadRequest("a", max_tokens=3)
    assert [one.protocol(None) for one in found] == [COMPLETIONS, CHAT, COMPLETIONS, COMPLETIONS]
    assert found[0].content(CHAT) == {"messages": [{"role": "user", "content": "a"}]}
    for request, backend in ((found[1], COMPLETIONS), (found[2], CHAT)):
        with pytest.raises(ConfigError, match="use --backend"):
            request.content(backend)


@pytest.mark.parametrize("line", ["", "x", "[]", "{}", '{"prompt": 1}', '{"messages": []}', '{"prompt": "a", "max_tokens": 0}'])
def test_bad_data_sets_are_refused(line: str, tmp_path: Any) -> None:
    (tmp_path / "in.jsonl").write_text(line)
    with pytest.raises(ConfigError):
        read_requests(tmp_path / "in.jsonl", 1)


# --- against a server that says what a test wants

Handler = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(**value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text_event(text: str, reason: str | None = None, **more: Any) -> bytes:
    return event(choices=[{"text": text, "finish_reason": reason}], **more)


async def with_server(handler: Handler, use: Callable[[Client], Awaitable[Any]]) -> Any:
    """What `use` returns, given a client of a server that answers each request with `handler`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            body = (await reader.readexactly(length)).decode()
            await handler(head.split(" ")[1] + " " + body, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await use(Client(LocalAddress("127.0.0.1", port, "", ("127.0.0.1",))))


def loaded(handler: Handler, count: int, on_progress: Callable[[int, int], None] = lambda *_: None, **plan: Any) -> LoadResult:
    requests = [LoadRequest(str(number)) for number in range(count)]
    return asyncio.run(with_server(handler, lambda client: run_load(client, requests, LoadPlan("m", **plan), on_progress)))


def replying(*parts: bytes) -> Handler:
    async def handler(request: str, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.001)

    return handler


USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1},
}
TIMINGS = {"cache_n": 4, "predicted_n": 5, "draft_n": 3, "draft_n_accepted": 2}


@pytest.mark.parametrize("told", [{"usage": USAGE}, {"timings": TIMINGS}, {"usage": USAGE, "timings": TIMINGS}])
def test_an_answer_is_timed_and_counted_as_the_server_tells(told: dict[str, Any]) -> None:
    stream = [text_event("a"), text_event(""), text_event("bc"), text_event("", "stop", **told), b"data: [DONE]\n\n"]
    (answer,) = loaded(replying(HEAD, *stream), 1, keep_texts=True).answers
    assert (answer.error, answer.text, len(answer.itl_s)) == ("", "abc", 1)
    assert 0 < answer.ttft_s < answer.ttft_s + answer.itl_s[0] <= answer.e2el_s
    counts = (answer.num_new_tokens, answer.num_cached_tokens, answer.num_draft_tokens, answer.num_accepted_tokens)
    assert counts == (5, 4, 3, 2)


def test_chat_counts_reasoning_and_tool_calls_as_text() -> None:
    deltas = [{"role": "assistant", "content": None}, {"reasoning_content": "r"}, {"content": "c"}]
    deltas.append({"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]})
    stream = [event(choices=[{"delta": delta}]) for delta in deltas] + [event(choices=[{"delta": {}, "finish_reason": "stop"}])]
    (answer,) = loaded(replying(HEAD, *stream), 1, keep_texts=True).answers
    assert (answer.text, answer.num_new_tokens, answer.error) == ("rcf{}", 3, "")


def plain_reply(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (plain_reply("307 Temporary Redirect", b"", "location: http://192.0.2.1/v1"), "redirects to 'http://192.0.2.1/v1'"),
        (plain_reply("429 Too Many", b'{"error": {"message": "busy"}}'), "status 429: busy"),
        (plain_reply("500 Oh", b"\x1b[31mno"), r"status 500: \\x1b\[31mno"),
        (HEAD + text_event("a"), "ended before the answer did"),
        (HEAD + event(error={"message": "failed"}), "failed"),
        (HEAD + b"data: nonsense\n\n", "not a JSON object"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nshort", "broke off"),
        (b"what?\r\n\r\n", "speaks no HTTP"),
        (b"", "broke off"),
    ],
)
def test_failures_are_counted_with_their_reason(reply: bytes, told: str) -> None:
    good = replying(HEAD, text_event("a", "stop"))

    async def handler(request: str, writer: asyncio.StreamWriter) -> None:
        await (replying(reply) if '"prompt": "1"' in request else good)(request, writer)

    answers = loaded(handler, 3).answers
    assert [bool(answer.error) for answer in answers] == [False, True, False]
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(answers[1].error)


def test_no_more_requests_run_at_once_than_allowed() -> None:
    running, most = 0, 0

    async def handler(request: str, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        writer.write(HEAD + text_event("a", "stop"))

    seen: list[tuple[int, int]] = []
    result = loaded(handler, 9, lambda *progress: seen.append(progress), max_concurrency=3)
    assert most == 3
    assert not any(answer.error for answer in result.answers)
    assert seen == [(number, 9) for number in range(1, 10)]


async def silent(request: str, writer: asyncio.StreamWriter) -> None:
    """Answer the first request only."""
    if '"prompt": "0"' in request:
        writer.write(HEAD + text_event("a", "stop"))
    else:
        await asyncio.sleep(3600)


def test_a_load_out_of_time_keeps_what_came() -> None:
    result = loaded(silent, 3, max_seconds=1.0, max_concurrency=2)
    assert result.stopped == OUT_OF_TIME
    assert [answer.error for answer in result.answers] == ["", "broken off", "broken off"]


def test_a_key_that_http_cannot_carry_is_not_shown() -> None:
    client = Client(LocalAddress("127.0.0.1", 1, "", ("127.0.0.1",)), "sec\nret")
    with pytest.raises(ServerError) as found:
        asyncio.run(client.get_json("/v1/models"))
    assert "sec" not in str(found.value)


def test_random_prompts_have_the_tokens_asked_for_and_share_a_prefix() -> None:
    async def handler(request: str, writer: asyncio.StreamWriter) -> None:
        path, _, body = request.partition(" ")
        assert path == "/tokenize"
        ids = [len(word) + 256 * ord(word[0]) for word in json.loads(body)["content"].split()]
        writer.write(plain_reply("200 OK", json.dumps({"tokens": ids}).encode()))

    def ask(seed: int) -> list[LoadRequest]:
        return asyncio.run(with_server(handler, lambda client: random_requests(client, 3, 20, 5, seed, None)))

    found = [one.prompt for one in ask(1)]
    assert [len(prompt) for prompt in found] == [25, 25, 25]
    assert len({tuple(prompt[:5]) for prompt in found}) == 1 < len({tuple(prompt) for prompt in found})
    assert ask(1) == ask(1) != ask(2)

"""Clients that vanish, flood, send garbage or have no key; engines that fail; signals. The server goes on, or ends as it says."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.errors import BackendError, ConfigError
from cpuspec.server import answering, app, gate
from cpuspec.server.app import listen, serve
from cpuspec.server.errors import EngineFailedError
from cpuspec.server.server import Server
from cpuspec.settings import ServerConfig
from tests.processes import interrupt, started
from tests.server.asgi import Application, application
from tests.server.running import (
    PATIENCE_S,
    SMALL,
    Running,
    before_forwards,
    events,
    load,
    ready_url,
    request_bytes,
    serving,
    tiny_model,
)

LOADED = {"max_sequences": 2}
SERVED = {"max_waiting": 2, "max_body_bytes": 100_000}  # two answers at once, and two that wait
ENDLESS = {"prompt": "the cat", "max_tokens": 30000, "temperature": 0, "ignore_eos": True}
SHORT = ENDLESS | {"max_tokens": 5}
PROBES = ("/livez", "/health", "/ready")
JSON = {"content-type": "application/json"}


def is_idle(running: Running) -> bool:
    busy = any(slot["is_processing"] for slot in running.get("/slots").json())
    return not busy and running.server.num_unfinished == 0


def answers(running: Running) -> bool:
    return running.post("/v1/completions", json=SHORT).status_code == 200


def ended(running: Running, reason: str) -> float:
    """How many answers have ended for this reason."""
    found = re.search(rf'request_success_total{{finished_reason="{reason}".*}} (\S+)', running.get("/metrics").text)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path_", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_whose_client_vanishes_ends(running: Running, stream: bool, path_: str) -> None:
    body = dict(ENDLESS, stream=stream)
    if "chat" in path_:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    before = ended(running, "aborted")
    with running.connect(request_bytes(body, path=path_)) as connection:
        if stream:
            assert b"200 OK" in connection.recv(100)
        running.eventually(lambda: running.server.num_unfinished == 1)
    running.eventually(lambda: is_idle(running))
    assert ended(running, "aborted") == before + 1


def test_clients_that_vanish_from_the_queue_leave_it(running: Running) -> None:
    with running.client() as client, client.stream("POST", "/v1/completions", json=ENDLESS | {"n": 4, "stream": True}):
        running.eventually(lambda: running.server.num_unfinished == 4)
        assert running.model.admission.num_waiting == 2
    running.eventually(lambda: is_idle(running))


def test_a_client_that_vanishes_while_its_prompt_is_read_ends_it(path: Path) -> None:
    llm = load(path)
    body = {"prompt": [5 + number % 200 for number in range(16_000)], "stream": True, "max_tokens": 1}
    slowly = before_forwards(llm, lambda: threading.Event().wait(0.02))  # the prompt takes 10 seconds
    with slowly, serving(lambda: llm) as running:
        with running.client() as client, client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            running.eventually(lambda: running.server.num_unfinished == 1)
        running.eventually(lambda: is_idle(running))
        assert (ended(running, "aborted"), ended(running, "length"), ended(running, "stop")) == (1, 0, 0)


def test_five_hundred_clients_at_once_are_answered_or_put_off(running: Running) -> None:
    """Most of them get status 429; no connection is left without an answer, and the server goes on."""
    with ExitStack() as stack:
        sent = request_bytes(SHORT, "connection: close")
        flood = [stack.enter_context(running.connect(sent)) for _ in range(500)]
        statuses = Counter(_all_of(connection)[9:12] for connection in flood)
    assert set(statuses) <= {b"200", b"429", b"503"}
    assert statuses[b"200"] >= 1
    assert sum(statuses.values()) == 500
    running.eventually(lambda: is_idle(running))
    assert answers(running)


def _all_of(connection: socket.socket) -> bytes:
    found = b""
    while data := connection.recv(1 << 16):
        found += data
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_stops_sending_is_gone(running: Running, stream: bool) -> None:
    """A connection that is closed on the client's side alone is that of a client that leaves; nothing runs on for it."""
    with running.connect(request_bytes(ENDLESS | {"stream": stream})) as connection:
        running.eventually(lambda: running.server.num_unfinished == 1)
        connection.shutdown(socket.SHUT_WR)
        running.eventually(lambda: is_idle(running))


def test_clients_that_send_slowly_hold_up_nobody(running: Running) -> None:
    head = request_bytes(None, "content-length: 4000")
    with ExitStack() as stack:
        for number in range(50):  # half of them stop within their headers, the others within the body
            stack.enter_context(running.connect(head[:-2] if number % 2 else head + b"{"))
        assert answers(running)
    running.eventually(lambda: is_idle(running))


def test_a_connection_without_a_request_is_closed_and_an_answer_is_not(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "REQUEST_S", 0.2)
    body = ENDLESS | {"stream": True, "max_tokens": 2000}
    with (
        serving(lambda: load(path)) as running,
        running.client() as client,
        client.stream("POST", "/v1/completions", json=body) as reply,
    ):
        for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: loc"):
            with running.connect(sent) as connection:
                assert _all_of(connection) == b""
        assert [line for line in reply.iter_lines() if line][-1] == "data: [DONE]"


def stuck_reader(running: Running, **changes: Any) -> socket.socket:
    """A client that asks for megabytes and reads none of them."""
    address, connection = httpx.URL(running.url), socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((address.host, address.port))
    connection.sendall(request_bytes(ENDLESS | {"stream": True, "logprobs": 20} | changes))
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_nothing_is_gone(path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(app, "READ_S", 0.2)
    # An answer that is not streamed is complete before anything is sent, and the connection is what its client holds.
    change = {} if stream else {"stream": False, "max_tokens": 12_000}
    with serving(lambda: load(path), max_connections=2) as running, stuck_reader(running, **change) as connection:
        running.eventually(lambda: running.server.num_unfinished == 1)
        running.eventually(lambda: answers(running))  # until then, there is no connection free
        assert running.server.num_unfinished == 0
        assert ended(running, "aborted") == stream
        head, _, body = _all_of(connection).partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert b"[DONE]" not in body
    assert stream or (length and len(body) < int(length[1]))


def test_a_client_that_reads_too_slowly_is_gone_when_its_time_is_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_LAST_S", 0.1)
    with serving(lambda: load(path), max_request_s=1.0) as running, stuck_reader(running):
        running.eventually(lambda: running.server.num_unfinished == 1)
        running.eventually(lambda: is_idle(running))
        assert ended(running, "aborted") == 1


def test_a_flood_is_refused_with_the_time_to_come_back(running: Running) -> None:
    with running.client() as client:
        with client.stream("POST", "/v1/completions", json=ENDLESS | {"n": 4, "stream": True}):
            running.eventually(lambda: running.server.num_unfinished == 4)
            for _ in range(50):
                refused = client.post("/v1/completions", json=SHORT)
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["type"] == "rate_limit_error"
        running.eventually(lambda: is_idle(running))
    assert answers(running)


def test_a_reader_that_is_slow_delays_nobody_and_loses_nothing(running: Running, path: Path) -> None:
    with load(path) as llm:
        (wanted,) = llm.generate("the cat", SamplingParams(max_tokens=400, ignore_eos=True))
    with (
        running.client() as client,
        client.stream("POST", "/v1/completions", json=ENDLESS | {"max_tokens": 400, "stream": True}) as slow,
    ):
        assert answers(running)
        running.eventually(lambda: is_idle(running))  # its place is free before it has read anything
        lines = [line.removeprefix("data: ") for line in slow.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == wanted.text


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"", JSON, 400),
        (b"{", JSON, 400),
        (b"\xff\xfe\x00", JSON, 400),
        (b"[" * 50_000, JSON, 400),
        (b'{"a":' * 19_000, JSON, 400),
        (b"null", JSON, 400),
        (b'{"prompt": "\xff"}', JSON, 400),
        (b'{"prompt": "a"} x', JSON, 400),
        (b'"text"', JSON, 400),
        (b'{"prompt": 5}', JSON, 400),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", JSON, 400),
        (b'{"prompt": "a", "max_tokens": 1' + b"0" * 30 + b"}", JSON, 200),
        (b'{"prompt": "a", "\\ud800": 1}', JSON, 200),
        (b'{"prompt": "a"}', {"content-type": "text/plain"}, 200),
        (b"x" * 100_001, JSON, 413),
        (b"x" * 10_000_000, JSON, 413),
    ],
)
def test_garbage_is_refused_and_the_server_goes_on(running: Running, content: bytes, headers: dict[str, str], status: int) -> None:
    if status == 200:
        content = content[:-1] + b', "logit_bias": {"256": -100}, "stop": ["e", "a", "t", " "]}'
    reply = running.post("/v1/completions", content=content, headers=headers)
    assert reply.status_code == status, reply.text
    if status != 200:
        assert reply.json()["error"]["message"]


def test_a_body_that_hides_its_length_is_limited_too(running: Running) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(200):
            yield b"x" * 1000

    reply = running.post("/v1/completions", content=endless(), headers=JSON)
    assert reply.status_code == 413


def test_a_body_that_never_comes_is_given_up(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_S", 0.05)
    with running.connect(request_bytes(None, "content-length: 99") + b"{") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
    # An answer may take longer than a body.
    assert running.post("/v1/completions", json=ENDLESS | {"max_tokens": 500}).status_code == 200


def test_unknown_paths_and_methods_have_the_shape_of_errors(running: Running) -> None:
    assert running.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert running.get("/v1/completions").status_code == 405
    assert running.get("/docs").status_code == 404


class Panic(BaseException):
    """As pyo3's PanicException, it is no Exception."""


class Bomb:
    """Raises an error while it is set."""

    def __init__(self, error: type[BaseException] = RuntimeError, is_set: bool = False) -> None:
        self._error, self.is_set = error, is_set

    def __call__(self) -> None:
        if self.is_set:
            raise self._error("a kernel is broken")


@pytest.mark.parametrize("error", [RuntimeError, Panic, SystemExit])
def test_a_step_that_fails_ends_its_requests_and_no_other(path: Path, error: type[BaseException]) -> None:
    llm, bomb = load(path), Bomb(error)
    with before_forwards(llm, bomb), serving(lambda: llm) as running:
        assert answers(running)
        bomb.is_set = True
        reply = running.post("/v1/completions", json=SHORT)
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
        lines = running.post("/v1/completions", json=SHORT | {"stream": True}).text
        assert '"type":"server_error"' in lines
        assert "[DONE]" not in lines
        bomb.is_set = False
        assert answers(running)
        assert is_idle(running)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_rows_are_not_finite_gets_its_error_and_the_others_their_answers(path: Path, stream: bool) -> None:
    llm = load(path)
    (poison,), whole = llm.tokenizer.encode("~", add_special=False), llm.backend.forward

    def forward(batch: Any, cache: Any) -> Any:
        """No row of a sequence that brings the token is finite."""
        output, starts = whole(batch, cache), np.asarray(batch.q_start)
        bad = np.logical_or.reduceat(np.asarray(batch.tokens) == poison, starts[:-1]).repeat(np.diff(starts))
        rows = bad if batch.logit_rows is None else bad[np.asarray(batch.logit_rows)]
        return replace(output, logits=np.where(rows[:, None], np.float32(np.nan), output.logits), best=None)

    good = ENDLESS | {"max_tokens": 60, "logit_bias": {str(poison): -100}}
    with serving(lambda: llm) as running, ThreadPoolExecutor(2) as pool:
        expected = running.post("/v1/completions", json=good).json()["choices"][0]["text"]
        llm.backend.forward = forward  # type: ignore[method-assign]
        others = [pool.submit(running.post, "/v1/completions", json=good | {"stream": one}) for one in (False, True)]
        reply = running.post("/v1/completions", json=SHORT | {"prompt": "the ~", "stream": stream})
        one, streamed = [other.result() for other in others]
    assert one.json()["choices"][0]["text"] == expected
    assert "".join(choice["text"] for event in events(streamed.text) for choice in event["choices"]) == expected
    assert "NaN or infinite" in reply.text
    assert (reply.status_code, '"server_error"' in reply.text) == (200 if stream else 500, True)


@contextmanager
def a_log_that_kills() -> Iterator[None]:
    """The thread that logs the failure of a step dies of that."""

    class Killer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "a step failed" in record.getMessage():
                raise SystemExit

    log, killer = logging.getLogger("cpuspec.server"), Killer()
    log.addHandler(killer)
    try:
        yield
    finally:
        log.removeHandler(killer)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_thread_that_dies_fails_its_requests_and_is_made_anew(path: Path) -> None:
    llm, bomb = load(path), Bomb()
    with before_forwards(llm, bomb), serving(lambda: llm) as running, a_log_that_kills():
        assert answers(running)
        for _ in range(2):
            bomb.is_set = True
            reply = running.post("/v1/completions", json=SHORT)
            assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
            bomb.is_set = False
            assert answers(running)
            assert running.get("/health").status_code == running.get("/ready").status_code == 200
        assert is_idle(running)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_thread_that_dies_before_its_first_token_is_told_by_the_probes(path: Path) -> None:
    async def ask(app: Application) -> list[int]:
        transport = httpx.ASGITransport(app.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            replies = [await client.post("/v1/completions", json=SHORT) for _ in range(2)]  # the second finds nobody
            replies += [await client.get(path) for path in ("/health", "/ready", "/livez")]
        return [reply.status_code for reply in replies]

    with (
        asyncio.Runner() as loop,
        application(path, loop) as app,
        a_log_that_kills(),
        before_forwards(app.served.llm, Bomb(is_set=True)),
    ):
        assert loop.run(ask(app)) == [500, 503, 503, 503, 200]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_engine_is_dead_ends(path: Path) -> None:
    llm, listener = load(path), listen(ServerConfig(port=0))
    url, statuses = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions", list[int]()
    asking = threading.Thread(
        target=lambda: statuses.append(httpx.post(url, json=SHORT, timeout=PATIENCE_S).status_code), daemon=True
    )
    server = Server("tiny", ServerConfig(port=0))
    dies = before_forwards(llm, Bomb(is_set=True))
    with a_log_that_kills(), dies, pytest.raises(EngineFailedError, match="died before"):
        asyncio.run(asyncio.wait_for(serve(server, lambda: llm, listener, asking.start), PATIENCE_S))
    asking.join(PATIENCE_S)
    assert statuses == [500]


def test_a_drafter_that_fails_ends_no_request_and_is_counted(path: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "broken.py"
    drafter.write_text(
        "class Broken:\n    name, hidden_layers = 'broken', ()\n    def begin(self, seq): ...\n    def end(self, seq): ...\n"
        "    def propose(self, seqs, limits): 1 / 0\n    def accept(self, seq, verdict, hidden): ...\n"
    )
    with load(path) as llm:
        (wanted,) = llm.generate("the cat", SamplingParams(max_tokens=5, ignore_eos=True))
    with serving(lambda: load(path, spec=f"{drafter}:Broken", plain_on_draft_error=True)) as running:
        assert running.post("/v1/completions", json=SHORT).json()["choices"][0]["text"] == wanted.text
        found = re.search(r"spec_decode_num_draft_failures_total\{.*\} (\S+)", running.get("/metrics").text)
        assert found
        assert float(found[1]) == 1


def test_a_request_that_takes_too_long_is_told_so(path: Path) -> None:
    with serving(lambda: load(path), max_request_s=0.05) as running:
        reply = running.post("/v1/completions", json=ENDLESS)
        assert (reply.status_code, reply.json()["error"]["type"]) == (504, "timeout_error")
        running.eventually(lambda: is_idle(running))


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_not_complete_when_the_server_ends_is_told_so(path: Path, stream: bool) -> None:
    texts: list[str] = []
    with serving(lambda: load(path)) as running:

        def ask() -> None:
            texts.append(running.post("/v1/completions", json=ENDLESS | {"stream": stream}).text)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        running.eventually(lambda: running.server.num_unfinished == 1)
        running.server.stop()
        thread.join(PATIENCE_S)
    assert "the server has ended before this answer was complete" in texts[0]


def test_limits_on_tokens_hold(path: Path) -> None:
    with serving(lambda: load(path), max_prompt_tokens=3, max_new_tokens=4) as running:
        assert running.post("/v1/completions", json=ENDLESS | {"prompt": [5, 6, 7]}).json()["usage"]["completion_tokens"] == 4
        reply = running.post("/v1/completions", json=ENDLESS | {"prompt": [5, 6, 7, 8]})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_keys_are_asked_of_everything_but_probes(path: Path) -> None:
    with serving(lambda: load(path), ("first", "sécond")) as running:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}, {"x-api-key": "firs"}):
            for route in ("/v1/models", "/metrics", "/slots", "/nothing"):
                reply = running.get(route, headers=headers)
                assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert running.get("/v1/models", headers={"authorization": "Bearer first"}).status_code == 200
        assert running.get("/v1/models", headers={"x-api-key": "first"}).status_code == 200
        assert [running.get(probe).status_code for probe in PROBES] == [200, 200, 200]


def test_pages_of_other_origins_and_names_are_kept_out(path: Path, running: Running) -> None:
    ask = {"origin": "http://page.example", "access-control-request-method": "POST"}
    assert running.get("/v1/models", headers={"host": "evil.example:80"}).status_code == 403
    assert running.get("/v1/models", headers={"host": "[::1]:80"}).status_code == 200
    assert "access-control-allow-origin" not in running.options("/v1/models", headers=ask).headers
    with serving(lambda: load(path), ("key",), cors=("http://page.example",)) as guarded:
        assert guarded.options("/v1/models", headers=ask).headers["access-control-allow-origin"] == "http://page.example"
        private = guarded.options("/v1/models", headers=ask | {"access-control-request-private-network": "true"})
        assert (private.status_code, private.headers["access-control-allow-private-network"]) == (200, "true")
        other = guarded.options("/v1/models", headers=ask | {"origin": "http://other.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp", "application/JSON; charset=utf-8"]
)
@pytest.mark.parametrize("route", ["/v1/completions", "/tokenize", "/infill", "/v1/messages/count_tokens"])
def test_json_is_read_whatever_the_body_says_that_it_is(running: Running, kind: str | None, route: str) -> None:
    body = SHORT | {"content": "a", "input_prefix": "a", "messages": []}
    body = {name: body[name] for name in {"/v1/completions": SHORT, "/tokenize": ["content"]}.get(route, body)}
    wanted, sent = running.post(route, json=body), {} if kind is None else {"content-type": kind}
    found = running.post(route, content=json.dumps(body), headers=sent)
    page = running.post(route, content=json.dumps(body), headers=sent | {"origin": "http://page.example"})
    own = running.post(route, content=json.dumps(body), headers=sent | {"origin": running.url})
    assert found.status_code == own.status_code == wanted.status_code
    if kind and "JSON" in kind:
        assert page.status_code == wanted.status_code
    else:
        assert (page.status_code, "Content-Type: application/json" in page.text) == (400, True)


def test_a_request_keeps_its_id(running: Running) -> None:
    assert running.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert running.get("/health", headers={"x-request-id": 'a"b'}).headers["x-request-id"] != 'a"b'


def test_until_the_model_is_loaded_requests_are_put_off(path: Path) -> None:
    with listen(ServerConfig(port=0)) as free:
        port = free.getsockname()[1]
    found: list[Any] = []

    def look_and_load() -> LLM:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            reply = client.post("/v1/completions", json=SHORT)
            found.extend([*(client.get(probe).status_code for probe in PROBES), reply.status_code, reply.headers["retry-after"]])
        return load(path)

    with serving(look_and_load, listen_port=port) as running:
        assert found == [200, 503, 503, 503, "5"]
        assert answers(running)


def test_a_model_that_cannot_be_loaded_ends_the_server(path: Path) -> None:
    def broken() -> LLM:
        raise BackendError("no such processor")

    with pytest.raises(BackendError, match="no such processor"), serving(broken):
        pass


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    with listen(ServerConfig(port=0)) as taken, pytest.raises(ConfigError, match="cannot listen on 127"):
        listen(ServerConfig(port=taken.getsockname()[1]))


# ------------------------------------------------------------------------------------------------------------- as a process


def test_sigterm_lets_running_answers_end(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, **SMALL)
    arguments = ("serve", str(model), "--port", "0", "--threads", "1", "--alias", "mine", "--draft", "none")
    with started(*arguments) as process:
        url = ready_url(process)
        body = ENDLESS | {"max_tokens": 300, "stream": True, "model": "mine"}
        with (
            httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            lines = reply.iter_lines()
            first = next(lines)
            interrupt(process, signal.SIGTERM)
            rest = [line for line in lines if line]
        assert first.startswith("data: ")
        assert rest[-1] == "data: [DONE]"
        assert process.wait(PATIENCE_S) == 0
        assert b'"event": "draining"' in process.stderr.read()


def test_a_signal_is_heard_while_thousands_of_tokens_wait_to_be_sent(path: Path) -> None:
    def signal_into_a_full_pipe() -> None:
        for _ in range(5000):
            asyncio.get_running_loop().call_soon_threadsafe(int)
        signal.raise_signal(signal.SIGTERM)

    server, before = Server("tiny", ServerConfig(port=0, drain_s=0.0)), signal.getsignal(signal.SIGTERM)
    serving_ends = serve(server, lambda: load(path), listen(ServerConfig(port=0)), signal_into_a_full_pipe)
    asyncio.run(asyncio.wait_for(serving_ends, PATIENCE_S))
    assert server.state == "draining"
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_extra_is_named_where_its_libraries_are_missing(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, **SMALL)
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError('none', name='uvicorn')")
    with started("serve", str(model), "--port", "0", env={**os.environ, "PYTHONPATH": str(tmp_path)}) as process:
        assert process.stderr is not None
        assert b"`cpuspec serve` needs uvicorn; install it with: pip install 'cpuspec[server]'" in process.stderr.read()
        assert process.wait(PATIENCE_S) == 1

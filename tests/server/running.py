"""A server over a small random model, on a free port of this machine, for tests."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from subprocess import Popen
from typing import Any

import anthropic
import httpx
import openai
import pytest

from cpuspec import LLM
from cpuspec.engine.engine import Output
from cpuspec.server.app import listen, serve
from cpuspec.server.model import Answers, ServedModel
from cpuspec.server.server import Loader, Server
from cpuspec.settings import EngineConfig, ServerConfig
from tests.processes import wait_for
from tests.server.loop_watch import watching
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
FILL_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
LONGEST_CALLBACK_S = 0.1  # of processor time; `benchmarks/soak.py` tells how long they are on a machine with nothing else to do
PATIENCE_S = 300.0  # a machine that is slower than this hangs


def tiny_model(directory: Path, **shape: Any) -> Path:
    """A model that may talk for long."""
    return make_tiny_gguf(directory / "tiny.gguf", context_length=32768, **SMALL | shape)


def templated_model(directory: Path, template: str, **shape: Any) -> Path:
    """A small random model in a Hugging Face directory, with this chat template."""
    found = make_tiny_hf(directory / "hf", **{"context_length": 2048} | shape)
    (found / "chat_template.jinja").write_text(template)
    return found


def with_tokens(directory: Path, texts: Sequence[str] = FILL_TOKENS, special: bool = True) -> Path:
    """The model with tokens for these texts in its vocabulary; by default those that Qwen2.5-Coder has for filling in."""
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    free = 1 + max([*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])])
    same = {"special": special, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] += [{"id": free + number, "content": text, **same} for number, text in enumerate(texts)]
    file.write_text(json.dumps(content))
    return directory


def load(path: Path, **settings: Any) -> LLM:
    """The model as the tests serve it."""
    engine = {"threads": 1, "max_sequences": 4, "keep_packed": False} | settings
    return LLM(path, engine.pop("spec", "ngram"), settings=EngineConfig(**engine))


@contextmanager
def before_forwards(llm: LLM, call: Callable[[], object]) -> Iterator[None]:
    """Within this context, an LLM calls the function before each forward of its target."""
    backend = llm.backend
    whole = backend.forward

    def forward(batch: Any, cache: Any) -> Any:
        call()
        return whole(batch, cache)

    backend.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        backend.forward = whole  # type: ignore[method-assign]


class Running:
    """A server that runs in a thread."""

    def __init__(self, server: Server, url: str) -> None:
        self.server = server
        self.url = url

    @property
    def model(self) -> ServedModel:
        """The model that was used last."""
        assert self.server.loaded is not None
        return self.server.loaded

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The reply to one request on a connection of its own. json: a body, which may have what JSON lacks, as NaN."""
        if "json" in options:
            options["content"] = json.dumps(options.pop("json"))
            options["headers"] = {"content-type": "application/json", **options.get("headers", {})}
        with self.client() as client:
            return client.request(method, path, **options)

    get = partialmethod(request, "GET")
    post = partialmethod(request, "POST")
    head = partialmethod(request, "HEAD")
    options = partialmethod(request, "OPTIONS")

    @property
    def openai(self) -> openai.OpenAI:
        """OpenAI's client of this server."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    @property
    def anthropic(self) -> anthropic.Anthropic:
        """Anthropic's client of this server."""
        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0, timeout=PATIENCE_S)

    def connect(self, sent: bytes) -> socket.socket:
        """A connection over which these bytes have been sent."""
        address = httpx.URL(self.url)
        made = socket.create_connection((address.host, address.port), timeout=PATIENCE_S)
        made.sendall(sent)
        return made

    def eventually(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds."""
        waited = threading.Event()
        for _ in range(int(PATIENCE_S / 0.01)):
            if holds():
                return
            waited.wait(0.01)
        raise AssertionError("it never came to hold")


def ready_url(process: Popen[bytes]) -> str:
    """The address of a server that runs as a process, when it is ready."""
    line = process.stderr.readline().decode()
    wait_for(process.stderr, b"ready: ")
    return re.findall(r"http://127.0.0.1:\d+", line)[0]


def request_bytes(body: dict[str, Any] | None, *headers: str, path: str = "/v1/completions") -> bytes:
    """A request as it goes over a connection; without a body, its beginning, for one that the headers tell the length of."""
    content = b"" if body is None else json.dumps(body).encode()
    length = () if body is None else (f"content-length: {len(content)}",)
    head = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *length, *headers, "", "")
    return "\r\n".join(head).encode() + content


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream that are JSON objects."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@contextmanager
def serving(
    make: Callable[[], LLM],
    keys: tuple[str, ...] = (),
    listen_port: int = 0,
    loaders: dict[str, Loader] | None = None,
    **config: Any,
) -> Iterator[Running]:
    """Serve what `make` loads until the context ends. The model is called "tiny". loaders: of it and of others, if any."""
    settings = ServerConfig(**{"port": 0, "drain_s": 0.0, **config})
    server, listener, ready, errors = (
        Server("tiny", settings, keys, loaders),
        listen(replace(settings, port=listen_port or settings.port)),
        threading.Event(),
        [],
    )

    def run() -> None:
        try:
            asyncio.run(serve(server, make, listener, ready.set))
        except BaseException as error:
            errors.append(error)
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        if errors:
            raise errors[0]
        address = listener.getsockname()  # of a Unix socket its path
        port = 0 if isinstance(address, str) else address[1]
        yield Running(server, f"http://127.0.0.1:{port}")
    finally:
        with suppress(RuntimeError):  # it has ended by itself
            server.stop()
            server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server does not end"


def script_answers(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Give all answers of models the script for their text, in pieces that keep to nothing."""
    whole = Answers.outputs

    async def outputs(self: Answers) -> AsyncIterator[tuple[int, Output]]:
        rest = script
        async for number, output in whole(self):
            said, rest = (rest, "") if output.finish_reason else (rest[:7], rest[7:])
            yield number, replace(output, text=said, finish_reason="stop" if output.finish_reason else None)

    monkeypatch.setattr(Answers, "outputs", outputs)


def stream(running: Running, path: str, body: dict[str, Any]) -> list[str]:
    """The lines of a streamed reply that are not empty."""
    with running.client() as client, client.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, reply.read()
        return [line for line in reply.iter_lines() if line]


def prompt_of(running: Running) -> str:
    """The text of the last request's prompt."""
    return running.model.llm.tokenizer.decode(running.model.slots[0].tokens, skip_special=False)


def assert_in_order(text: str, *wanted: str) -> None:
    """Check that the texts stand in a text one behind another."""
    at = 0
    for one in wanted:
        at = text.find(one, at) + 1
        assert at, f"{one!r} is missing, or in another place, in {text}"


@contextmanager
def with_free_loop() -> Iterator[None]:
    """Fail at the end if a callback of a server's event loop took longer than others may wait, and tell where it did."""
    with watching() as watch:
        yield
    long = [f"{one.cpu_s:.3f} s of processor time\n{one.stack}" for one in watch.longest if one.cpu_s > LONGEST_CALLBACK_S]
    assert not long, "\n".join(long)
    assert watch.num_callbacks

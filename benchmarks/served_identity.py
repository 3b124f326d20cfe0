"""Every greedy answer of `cpuspec serve` must be the offline one, whatever the load, batch mates, drafts and prefix cache.

    python benchmarks/served_identity.py smollm2-135m-instruct mt_bench.jsonl:turns:80 humaneval.jsonl:prompt:80 \
        --count 500 --clients 16

It exits with 1 if an answer differs. A server of its own answers --clients clients at once. The requests take turns between the
protocols, streams and whole answers, conversations, raw texts and token ids, with tools, after system prompts that many share,
long and short, with drafts and without. Beside them go requests with random sampling and clients that vanish, which are not
compared. The server restarts twice, with a small prefix cache and a directory on disk, and every seventh prompt comes again.

Then `LLM` answers each prompt alone, without drafts and without a prefix cache. --offline keeps these answers, so that a run that
was broken off, and the next one, need not compute them again. Chat streams are compared by token ids, all else by text; prompts
with tools are as the server makes them.
"""

import asyncio
import hashlib
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from prefixes import system_prompt
from record import Rounds, record, save, say
from serving import own_arm, serving

from cpuspec import LLM, SamplingParams
from cpuspec.checkpoints.download import resolve_model
from cpuspec.errors import CpuspecError
from cpuspec.evaluate.prompts import read_prompts
from cpuspec.loadtest.client import Client, ServerError
from cpuspec.loadtest.run import first_model
from cpuspec.settings import EngineConfig

CHAT, TOKENS, TEXT, IDS, TOOLS, MESSAGES, RESPONSES, LONG = (
    *("chat", "chat, streamed by token", "text, streamed", "token ids", "chat with tools, streamed by token"),
    *("messages", "responses, streamed", "chat behind a long system prompt, streamed by token"),
)
KINDS = (CHAT, TOKENS, TEXT, LONG, IDS, TOOLS, MESSAGES, RESPONSES, LONG)
LENGTHS = (4, 24, 48, 96)
RESTARTS, VANISHING, SAMPLED, AGAIN = 2, 11, 9, 7  # the last three: one in n requests
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass
class Ask:
    """A request. prompt: its token ids. ids, text: what came; ids is None where only the text is told."""

    kind: str
    path: str
    body: dict[str, Any]
    prompt: list[int] = field(default_factory=list)
    ids: list[int] | None = None
    text: str = ""
    error: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int:
        return int(self.body.get("max_tokens") or self.body["max_output_tokens"])


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, or GGUF file.")],
    prompts: Annotated[list[str], typer.Argument(help="FILE:FIELD:COUNT of JSON-lines files.")],
    count: Annotated[int, typer.Option(help="Requests that are compared.", min=1)] = 500,
    clients: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 16,
    draft: Annotated[str, typer.Option(help="--draft of the server.")] = "auto",
    system_tokens: Annotated[int, typer.Option(help="Tokens of the long system prompts, at least.", min=1)] = 600,
    context: Annotated[int, typer.Option(help="Tokens of a slot.", min=2)] = 4096,
    threads: Annotated[int, typer.Option(help="Threads.", min=1)] = 2,
    prefix_cache_gb: Annotated[float, typer.Option(help="Of the server: little, so that prompts leave it.")] = 0.05,
    offline: Annotated[Path | None, typer.Option(help="JSON-lines file that keeps the offline answers.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print how many answers of each kind are the offline ones, and the first that differ."""
    texts = [one for text in prompts for one in read_prompts(text).prompts if isinstance(one, str)]
    random.Random(0).shuffle(texts)
    path = resolve_model(model)
    settings = EngineConfig(threads=threads, max_sequences=1, context_length=context)
    with LLM(path, "none", settings=settings, prefix_cache_gb=0) as llm:
        systems = [system_prompt(llm, system_tokens)[at:] for at in range(0, 300, 60)]  # none begins as another does
        asks = make_asks(texts, systems, count)
        for one in asks:
            one.prompt = own_prompt(llm, one)
        with tempfile.TemporaryDirectory() as directory:
            kept = ("--prefix-cache-gb", str(prefix_cache_gb), "--prefix-cache-dir", directory)
            arm = own_arm(path, draft, threads, clients, context, "--max-waiting", str(4 * clients), "--drain-s", "5", *kept)
            passed, parts = Rounds(RESTARTS + 1, threads), [asks[number :: RESTARTS + 1] for number in range(RESTARTS + 1)]
            for number in passed:
                with serving(arm) as client:
                    asyncio.run(run_load(client, parts[number], clients))
        known = read_known(offline)
        differing = [one for number, one in enumerate(asks) if not is_same(llm, one, number, known, offline, path)]
    total, same = Counter(one.kind for one in asks), Counter(one.kind for one in asks)
    same.subtract(one.kind for one in differing)
    figures = {
        "requests": count,
        "clients": clients,
        "identical": count - len(differing),
        "kinds": {kind: {"requests": total[kind], "identical": same[kind]} for kind in total},
        "prompt_tokens": sum(len(one.prompt) for one in asks),
        "cached_tokens": [sum(map(_cached, part)) for part in parts],
        "cached_tokens_of_each_system_prompts_first": [sum(map(_cached, firsts(part))) for part in parts],
        "accepted_tokens": sum(one.usage.get("accepted", 0) for one in asks),
        "rejected_tokens": sum(one.usage.get("rejected", 0) for one in asks),
    }
    print(json.dumps(figures))
    for one in differing[:5]:
        print(json.dumps({"kind": one.kind, "body": one.body, "ids": one.ids, "text": one.text, "error": one.error})[:4000])
    save(record("served_identity", path.name, passed) | {"draft": draft, **figures}, json_file)
    if differing:
        raise typer.Exit(1)


def firsts(asks: Sequence[Ask]) -> list[Ask]:
    """Of each long system prompt the first request: what was cached of it comes from before the server's start."""
    long = [one for one in reversed(asks) if one.kind == LONG]
    return list({one.body["messages"][0]["content"]: one for one in long}.values())


def _cached(ask: Ask) -> int:
    return int(ask.usage.get("cached", 0))


def make_asks(texts: Sequence[str], systems: Sequence[str], count: int) -> list[Ask]:
    """Requests of each kind in turn; every seventh repeats the prompt of an earlier one, with another kind, length and draft."""
    rng = random.Random(1)
    asks: list[Ask] = []
    for number in range(count):
        text = texts[rng.randrange(number) % len(texts) if number and number % AGAIN == 0 else number % len(texts)]
        drafts = {"speculation": {"draft": rng.choice(("auto", "none"))}}
        greedy = {"temperature": 0, "max_tokens": rng.choice(LENGTHS)}
        talk = [{"role": "user", "content": text}]
        by_token = {"stream": True, "cpuspec": {"tokens": True}, "stream_options": {"include_usage": True}}
        match kind := KINDS[number % len(KINDS)]:
            case "token ids" | "text, streamed":
                body = {"prompt": text, **greedy, **drafts, "stream": kind == TEXT}
                asks.append(Ask(kind, "/v1/completions", body))
            case "messages":
                asks.append(Ask(kind, "/v1/messages", {"messages": talk, "system": rng.choice(systems)[-400:], **greedy}))
            case "responses, streamed":
                body = {"input": text, "stream": True, "temperature": 0, "max_output_tokens": greedy["max_tokens"]}
                asks.append(Ask(kind, "/v1/responses", body))
            case _:
                system = [{"role": "system", "content": rng.choice(systems)}] if kind == LONG else []
                tools = {"tools": [TOOL]} if kind == TOOLS else {}
                body = {"messages": [*system, *talk], **tools, **greedy, **drafts, **({} if kind == CHAT else by_token)}
                asks.append(Ask(kind, "/v1/chat/completions", body))
    return asks


def own_prompt(llm: LLM, ask: Ask) -> list[int]:
    """The token ids of a request's prompt, made without the server. Requests with tools have none yet."""
    tokenizer, body = llm.tokenizer, ask.body
    match ask.kind:
        case "token ids":
            body["prompt"] = tokenizer.encode(body["prompt"])
            return list(body["prompt"])
        case "text, streamed":
            return tokenizer.encode(body["prompt"])
        case "chat with tools, streamed by token":
            return []
        case "messages":
            return tokenizer.encode_chat([{"role": "system", "content": body["system"]}, *body["messages"]])
        case "responses, streamed":
            return tokenizer.encode_chat([{"role": "user", "content": body["input"]}])
    return tokenizer.encode_chat(body["messages"])


async def run_load(client: Client, asks: Sequence[Ask], num_clients: int) -> None:
    """Answer all, and note the answers in them. Each client sends its next request when it has its answer."""
    model, rng, done = await first_model(client), random.Random(2), 0
    left = iter(asks)

    async def one_client() -> None:
        nonlocal done
        for ask in left:
            body = {"model": model, **ask.body}
            beside = []
            if rng.randrange(VANISHING) == 0:
                beside.append(asyncio.create_task(_vanish(client, ask.path, body, rng.random())))
            if rng.randrange(SAMPLED) == 0:
                beside.append(asyncio.create_task(_take(client, Ask(ask.kind, ask.path, ask.body), body | {"temperature": 1.0})))
            if not ask.prompt:
                told = {"model": model, "messages": ask.body["messages"], "tools": ask.body["tools"]}
                ask.prompt = (await client.post_json("/tokenize", told))["tokens"]
            await _take(client, ask, body)
            await asyncio.gather(*beside)
            done += 1
            if done % 20 == 0:
                say(f"{done} of {len(asks)} answered")

    await asyncio.gather(*(one_client() for _ in range(num_clients)))


async def _vanish(client: Client, path: str, body: dict[str, Any], wait_s: float) -> None:
    """Ask, and go away after a while."""
    with suppress(TimeoutError, ServerError):
        async with asyncio.timeout(wait_s):
            await client.post_events(path, body | {"stream": True}, lambda data: None)


async def _take(client: Client, ask: Ask, body: dict[str, Any]) -> None:
    """Send a request, and note its answer."""
    events: list[Any] = []
    try:
        if body.get("stream"):
            await client.post_events(ask.path, body, lambda data: None if data == "[DONE]" else events.append(json.loads(data)))
        else:
            events.append(await client.post_json(ask.path, body))
    except ServerError as error:
        ask.error = str(error)
        return
    for event in events:
        _note(ask, event)


def _note(ask: Ask, event: Any) -> None:
    """What a reply, or an event of a stream, adds to an answer."""
    if event.get("error"):
        ask.error = json.dumps(event["error"])
    if ask.path == "/v1/messages":
        ask.text = "".join(block["text"] for block in event["content"])
        ask.usage = {"cached": event["usage"]["cache_read_input_tokens"]}
        return
    if ask.path == "/v1/responses":
        if event["type"] == "response.output_text.delta":
            ask.text += event["delta"]
        if event["type"] in ("response.completed", "response.incomplete"):
            ask.usage = {"cached": event["response"]["usage"]["input_tokens_details"]["cached_tokens"]}
        return
    for choice in event.get("choices", ()):
        said = choice.get("message") or choice.get("delta") or {}
        ask.text += choice.get("text") or said.get("content") or ""
    if "cpuspec" in event:
        ask.ids = [*(ask.ids or ()), event["cpuspec"]["id"]]
    if event.get("usage"):
        details = event["usage"]["completion_tokens_details"]
        ask.usage = {
            "cached": event["usage"]["prompt_tokens_details"]["cached_tokens"],
            "accepted": details["accepted_prediction_tokens"],
            "rejected": details["rejected_prediction_tokens"],
        }


def read_known(file: Path | None) -> dict[str, Any]:
    """The offline answers that a file has, by the digest of model, prompt and length."""
    if file is None or not file.exists():
        return {}
    return {one["digest"]: one for one in _lines(file)}


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text("utf-8").splitlines():
        with suppress(ValueError):  # a run that was broken off wrote half a line
            yield json.loads(line)


def is_same(llm: LLM, ask: Ask, number: int, known: dict[str, Any], file: Path | None, model: Path) -> bool:
    """Whether an answer is the offline one, which is computed and kept unless it is known."""
    told = [model.name, model.stat().st_size, ask.prompt, ask.max_tokens]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()
    if digest not in known:
        (answer,) = llm.generate([ask.prompt], SamplingParams(max_tokens=ask.max_tokens))
        known[digest] = {"digest": digest, "ids": answer.token_ids, "text": answer.text}
        if file is not None:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(known[digest]) + "\n")
    wanted = known[digest]
    if number % 20 == 19:
        say(f"{number + 1} compared")
    return not ask.error and (ask.text == wanted["text"] if ask.ids is None else ask.ids == wanted["ids"])


if __name__ == "__main__":
    try:
        typer.run(main)
    except CpuspecError as fault:
        say(f"error: {fault}")
        raise SystemExit(1) from None

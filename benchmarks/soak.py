"""`cpuspec serve` under mixed traffic for a while: its memory, open files and threads must stay flat, and latency must not grow.

    python benchmarks/soak.py smollm2-135m-instruct mt_bench.jsonl:turns:80 humaneval.jsonl:prompt:80 --minutes 20

Clients send conversations, texts, tools, other protocols and long shared prompts, one request after the other; one in four of them
vanishes, in the queue, in the prompt or in the stream, and one in ten sends garbage. Every few seconds one probe, always the same
short request, is timed. After each minute a line tells the server's memory, open files, threads, and the probes' p50 and p95.

Before, every slot is filled to its end, so that all memory has been written to that the server keeps. The first quarter warms up,
and nothing is judged by it. From then on the run fails, with exit status 1,

* if memory grows by more than 2 % and 32 MiB: the least of the last third over the least of the first third of what is left;
* if open files or threads do, by more than 8: the least of each third, so that what runs at a moment does not count;
* if a probe's latency grows: the last half of the probes over the first half, their times over those of a loop of pure Python
  that is timed beside each probe, so that a machine that gets busier does not count. It fails where a permutation test of the
  medians gives less than one in a thousand and the median has grown by more than a quarter;
* if a probe is not answered, or another answer comes than the first one;
* if the server is not idle, with every slot free, within a minute of the end.

    python benchmarks/soak.py smollm2-135m-instruct mt_bench.jsonl:turns:80 --requests 10000

sends as many requests instead, half of them hostile: each of these asks for as much as it may, or for more, of one thing. Beside
them another client, with a key of its own, has streams. The figures are the longest callbacks of the server's event loop, by the
processor time of its thread (`tools/loop_watch.py`), and the longest wait between two events of a stream. The run fails if a
callback took 20 ms, if a stream waited .2 s, or if a request of another client than the hostile one ended without an answer.
"""

import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from prefixes import system_prompt
from record import Rounds, record, save, say
from served_identity import Ask, make_asks
from serving import own_arm, serving

from cpuspec import LLM
from cpuspec.checkpoints.download import resolve_model
from cpuspec.errors import CpuspecError
from cpuspec.evaluate.prompts import read_prompts
from cpuspec.loadtest.address import local_address
from cpuspec.loadtest.client import Client, ServerError
from cpuspec.loadtest.run import first_model

PROBE_EVERY_S, PROBE_TOKENS, SAMPLE_EVERY_S = 3.0, 8, 2.0
LEAST_PROBES = 7  # in each half: with fewer, no permutation is rarer than one in a thousand
VANISH, GARBAGE = 0.25, 0.1  # shares of the requests
WARM_UP = 0.25  # of the time
MEMORY_SHARE, MEMORY_BYTES, MOST_MORE = 0.02, 32 << 20, 8
LATENCY_SHARE, LATENCY_CHANCE, PERMUTATIONS = 1.25, 0.001, 5000
IDLE_S = 60.0
LONGEST_CALLBACK_S, LONGEST_WAIT_S = 0.02, 0.2
KEYS = ORDINARY, HOSTILE, STREAMING = "ordinary", "hostile", "streaming"  # of the clients of a hostile run
WATCH = Path(__file__).parents[1] / "tools" / "loop_watch.py"
BAD_BODIES = (
    {"prompt": 5},
    {"prompt": "a", "max_tokens": 10**9, "n": 10**6},
    {"messages": [{"role": 7}]},
    [],
    {"prompt": "x" * 10**6},
)


@dataclass
class Sample:
    """The server at a moment."""

    time_s: float
    memory_bytes: int
    files: int
    threads: int


@dataclass
class Probe:
    """seconds: of the probe; loop_s: of a fixed loop of Python just before it."""

    time_s: float
    seconds: float
    loop_s: float


@dataclass
class Soak:
    """What a run has seen."""

    samples: list[Sample] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("answered", "vanished", "garbage", "refused", "failed"), 0)
    )
    faults: list[str] = field(default_factory=list)


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, or GGUF file.")],
    prompts: Annotated[list[str], typer.Argument(help="FILE:FIELD:COUNT of JSON-lines files.")],
    minutes: Annotated[float, typer.Option(help="How long, the warm-up included.", min=0.5)] = 20,
    requests: Annotated[int, typer.Option(help="Send so many, half of them hostile, in --minutes at most.", min=0)] = 0,
    clients: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 8,
    draft: Annotated[str, typer.Option(help="--draft of the server.")] = "auto",
    context: Annotated[int, typer.Option(help="Tokens of a slot.", min=1024)] = 2048,
    threads: Annotated[int, typer.Option(help="Threads.", min=1)] = 2,
    prefix_cache_gb: Annotated[float, typer.Option(help="Of the server, little, so that it is full at the beginning.")] = 0.1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print a line for each minute, and what has grown."""
    texts = [one for text in prompts for one in read_prompts(text).prompts if isinstance(one, str)]
    path = resolve_model(model)
    with LLM(path, "none", threads=1, max_sequences=1) as llm:
        long = system_prompt(llm, 400)
    asks = make_asks(texts, [long[at:] for at in range(0, 300, 60)], 20 * len(texts))
    if requests:
        figures, faults, passed = run_hostile(path, asks, requests, 60 * minutes, clients, draft, context, threads)
        print(json.dumps(figures))
        for fault in faults:
            print(f"failed: {fault}")
        save(record("soak-hostile", path.name, passed) | figures, json_file)
        raise typer.Exit(bool(faults))
    with tempfile.TemporaryDirectory() as directory:
        kept = ("--prefix-cache-gb", str(prefix_cache_gb), "--prefix-cache-dir", directory, "--prefix-disk-gb", "0.5")
        # A place more than clients, so that a probe does not wait in the queue.
        arm = own_arm(path, draft, threads, clients + 1, context, "--max-waiting", str(2 * clients), "--drain-s", "0", *kept)
        soak, passed = Soak(), Rounds(1, threads)
        for _ in passed:
            with serving(arm) as client:
                asyncio.run(fill(client, clients + 1, context))
                asyncio.run(run_soak(client, _server_process(), asks, clients, 60 * minutes, soak))
    figures = judge(soak, 60 * minutes)
    print(json.dumps(figures))
    for fault in soak.faults:
        print(f"failed: {fault}")
    by_minute = [minute(soak, number) for number in range(round(minutes))]
    save(record("soak", path.name, passed) | {"minutes": minutes, "clients": clients, **figures, "by_minute": by_minute}, json_file)
    if soak.faults:
        raise typer.Exit(1)


def hostile_bodies(context: int) -> list[tuple[str, bytes | None]]:
    """Requests that ask for as much as they may, or for more, of one thing; the last ones are the largest."""
    user, text = {"role": "user", "content": "hi"}, "the cat sat on the mat "
    plain, chat = {"prompt": "hi", "max_tokens": 1}, {"messages": [user], "max_tokens": 1}
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    small = [
        {"seed": 10**4298},
        {"n": 70, "max_tokens": 64, "ignore_eos": True},
        {"speculation": {"draft": "a@:" + "0" * 8000 + "x"}},
        {"speculation": {"draft": "suffix," * 28}},
        {"logit_bias": [[text * 20, 1]] * 8},
        {"bad_words": [text] * 128, "max_tokens": 16},
        {"stop": [text[:20] + str(number) for number in range(32)], "max_tokens": 16},
        {"stop_token_ids": list(range(1024)), "min_tokens": 8, "max_tokens": 16},
        {"allowed_token_ids": list(range(2000)), "max_tokens": 4},
        {"regex": "(a|aa|aaa)*b{1,900}" * 20},
        {"grammar": "root ::= " + " | ".join(f'"{number}" root' for number in range(800))},
        {"json_schema": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(500)}}},
        {"repetition_penalty": 1.3, "top_k": 10**12, "temperature": 1e300, "max_tokens": 8},
        {"logprobs": 20, "echo": True, "prompt": text * (context // 12), "max_tokens": 0},
        {"prompt": [text * 100] * 16, "prompt_logprobs": 5},
        {"prompt": [5] * (context - 8), "cache_salt": "x" * 1000},
    ]
    bodies: list[tuple[str, Any]] = [("/v1/completions", {**plain, **one}) for one in small]
    bodies += [
        ("/completion", {"prompt": "hi", "n_predict": 8, "n_probs": 150_000}),
        ("/completion", {"prompt": "hi", "n_predict": 8, "n_probs": 100}),
        ("/v1/chat/completions", {**chat, "messages": [user] * 2000}),
        ("/v1/chat/completions", {**chat, "chat_template_kwargs": {"a": deep}}),
        ("/v1/chat/completions", {**chat, "prediction": {"type": "content", "content": text * 300}}),
        ("/v1/responses", {"input": text * 200, "max_output_tokens": 2, "instructions": text * 50}),
        ("/v1/messages", {**chat, "system": [{"type": "text", "text": "x"}] * 1000}),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2048}),
        ("/tokenize", {"content": text * (context // 2), "with_pieces": True}),
        ("/detokenize", {"tokens": list(range(9000))}),
        ("/slots/0?action=erase", None),
    ]
    large: list[tuple[str, Any]] = [
        ("/v1/completions", {**plain, "prompt": "x" * 7_000_000}),
        ("/v1/completions", {**plain, "logit_bias": [["x" * 7_000_000, 1]]}),
        ("/v1/completions", {**plain, "allowed_token_ids": list(range(400_000))}),
        ("/v1/completions", {**plain, "bad_words": ["a"] * 400_000}),
        ("/v1/chat/completions", {**chat, "messages": [{}] * 400_000}),
        ("/v1/chat/completions", {**chat, "metadata": [[]] * 2_000_000}),
        ("/v1/embeddings", {"input": [[1] * 1000] * 300}),
        ("/detokenize", {"tokens": [1] * 500_000}),
    ]
    return [(path, None if body is None else json.dumps(body).encode()) for path, body in bodies + large]


_LARGE, _LARGE_SHARE = 8, 0.01  # of the bodies, the last ones; and how many of the hostile requests have one


def run_hostile(
    path: Path, asks: Sequence[Ask], num_requests: int, for_s: float, num_clients: int, draft: str, context: int, threads: int
) -> tuple[dict[str, Any], list[str], Rounds]:
    """The figures of a hostile run, and what is wrong with them."""
    counts = dict.fromkeys(("answered", "hostile and answered", "hostile and refused", "hostile and failed", "streams"), 0)
    waits: list[float] = []
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        keys, report = Path(directory) / "keys", Path(directory) / "report.json"
        keys.write_text("\n".join(KEYS))
        more = ("--api-key-file", str(keys), "--drain-s", "0", "--prefix-cache-dir", "none")
        arm = own_arm(path, draft, threads, 2 * num_clients + 1, context, *more)
        arm = replace(arm, command=(sys.executable, str(WATCH), str(report), *arm.command[3:]))
        passed = Rounds(1, threads)
        for _ in passed:
            with serving(arm) as client:
                asyncio.run(_hostile_load(client, asks, num_requests, for_s, num_clients, context, counts, waits, faults))
        watched = json.loads(report.read_text())
    longest, longest_wait_s = watched["longest"], max(waits, default=0.0)
    if longest[0]["cpu_s"] > LONGEST_CALLBACK_S:
        faults.append(f"a callback took {longest[0]['cpu_s']:.3f} s: {longest[0]['stack']}")
    if longest_wait_s > LONGEST_WAIT_S:
        faults.append(f"a stream waited {longest_wait_s:.3f} s")
    figures = {
        "counts": counts,
        "longest_callbacks_s": [round(one["cpu_s"], 4) for one in longest[:5]],
        "longest_collection_s": round(watched["longest_collection_s"], 4),
        "num_callbacks": watched["num_callbacks"],
        "stream_waits_s": {f"p{rank:g}": round(float(np.percentile(waits, rank)), 4) for rank in (50, 99, 99.9, 100)},
    }
    return figures, faults, passed


async def _hostile_load(
    client: Client, asks: Sequence[Ask], num_requests: int, for_s: float, num_clients: int, context: int,
    counts: dict[str, int], waits: list[float], faults: list[str],
) -> None:  # fmt: skip
    ordinary, hostile = (Client(client.address, key) for key in (ORDINARY, HOSTILE))
    model, bodies, rng, number = await first_model(ordinary), hostile_bodies(context), random.Random(5), 0
    end_s = time.monotonic() + for_s

    async def one_client(is_hostile: bool) -> None:
        nonlocal number
        while number < num_requests and time.monotonic() < end_s:
            number += 1
            if number % 500 == 0:
                say(f"{number} requests, {counts}")
            if is_hostile:
                large = rng.random() < _LARGE_SHARE
                path, body = rng.choice(bodies[-_LARGE:] if large else bodies[:-_LARGE])
            else:
                ask = asks[number % len(asks)]
                path, body = ask.path, {"model": model, **ask.body, "max_tokens": 8}
                body = {name: value for name, value in body.items() if name != "max_tokens" or "responses" not in path}
            try:
                if isinstance(body, dict) and body.get("stream"):
                    await (hostile if is_hostile else ordinary).post_events(path, body, lambda data: None)
                else:
                    await (hostile if is_hostile else ordinary).post_json(path, body)
                counts["hostile and answered" if is_hostile else "answered"] += 1
            except ServerError as error:
                if not is_hostile:
                    faults.append(f"{path}: {error}")
                is_known = any(f"status {status}" in str(error) for status in (400, 403, 404, 413, 429, 501))
                counts["hostile and refused" if is_known else "hostile and failed"] += is_hostile
                if is_hostile and not is_known:
                    faults.append(f"hostile {path} {str(body)[:80]}: {error}")

    # In a process of its own: what the other clients do must not count as a wait.
    here, there = multiprocessing.Pipe()
    url = f"http://{client.address.host}:{client.address.port}"
    watcher = multiprocessing.get_context("spawn").Process(target=_watch_streams, args=(url, model, there))
    watcher.start()
    await asyncio.gather(*(one_client(which % 2 == 0) for which in range(2 * num_clients)))
    here.send("over")
    while not here.poll():
        await asyncio.sleep(0.1)
    counts["streams"], more, ended = here.recv()
    waits.extend(more)
    faults.extend(ended)
    watcher.join()


def _watch_streams(url: str, model: str, pipe: Any) -> None:
    """Have streams, one after the other, until the pipe says that it is over; send their number, their waits and their faults."""
    client, waits, faults, number = Client(local_address(url), STREAMING), list[float](), list[str](), 0
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}
    while not pipe.poll():
        times: list[float] = []
        try:
            asyncio.run(client.post_events("/v1/completions", body, lambda data, times=times: times.append(time.monotonic())))
            number += 1
        except ServerError as error:
            faults.append(f"a stream ended: {error}")
        waits += [after - before for before, after in pairwise(times)]
    pipe.send((number, waits, faults))


def _server_process() -> int:
    """The process of the server that was started last."""
    own = os.getpid()
    return int(Path(f"/proc/{own}/task/{own}/children").read_text().split()[-1])


async def fill(client: Client, slots: int, context: int) -> None:
    """Write to the whole of each slot, and so to the whole prefix cache: the memory that a server comes to have in any case."""
    say("filling the slots")
    model, rng = await first_model(client), random.Random(4)
    prompts = [[rng.randrange(100, 1000) for _ in range(context - 2)] for _ in range(slots)]
    await asyncio.gather(
        *(client.post_json("/v1/completions", {"model": model, "prompt": one, "max_tokens": 1}) for one in prompts)
    )


async def run_soak(client: Client, process: int, asks: Sequence[Ask], num_clients: int, for_s: float, soak: Soak) -> None:
    """Keep the server busy for so long, and note how it does; then see that it comes to rest."""
    model, begin_s = await first_model(client), time.monotonic()
    rng, number = random.Random(3), 0

    async def one_client() -> None:
        nonlocal number
        while time.monotonic() < begin_s + for_s:
            number += 1
            ask, chance = asks[number % len(asks)], rng.random()
            if chance < GARBAGE:
                await _send(client, ask.path, rng.choice(BAD_BODIES), soak, "garbage", None)
            elif chance < GARBAGE + VANISH:
                await _send(client, ask.path, {"model": model, **ask.body}, soak, "answered", rng.expovariate(1))
            else:
                await _send(client, ask.path, {"model": model, **ask.body}, soak, "answered", None)

    tasks = [asyncio.create_task(one_client()) for _ in range(num_clients)]
    tasks += [asyncio.create_task(_probe(client, model, begin_s, for_s, soak))]
    tasks += [asyncio.create_task(_sample(process, begin_s, for_s, soak))]
    await asyncio.gather(*tasks)
    for _ in range(int(IDLE_S)):
        slots = await client.get_json("/slots")
        if not any(slot["is_processing"] for slot in slots):
            return
        await asyncio.sleep(1)
    soak.faults.append(f"slots are busy {IDLE_S:g} s after the last client has gone")


async def _send(client: Client, path: str, body: Any, soak: Soak, counted_as: str, leaves_after_s: float | None) -> None:
    def ignore(data: str) -> None: ...

    try:
        async with asyncio.timeout(leaves_after_s):
            if isinstance(body, dict) and body.get("stream"):
                await client.post_events(path, body, ignore)
            else:
                await client.post_json(path, body)
    except TimeoutError:
        counted_as = "vanished"
    except ServerError as error:
        if counted_as != "garbage":
            counted_as = "refused" if "status 429" in str(error) or "status 503" in str(error) else "failed"
            if counted_as == "failed" and len(soak.faults) < 20:
                soak.faults.append(f"{path}: {error}")
    soak.counts[counted_as] += 1


async def _probe(client: Client, model: str, begin_s: float, for_s: float, soak: Soak) -> None:
    body = {"model": model, "prompt": "The first three prime numbers are", "temperature": 0, "max_tokens": PROBE_TOKENS}
    while time.monotonic() < begin_s + for_s:
        loop_s, start_s = _loop_s(), time.monotonic()
        try:
            reply = await client.post_json("/v1/completions", body)
            soak.texts.add(reply["choices"][0]["text"])
            soak.probes.append(Probe(start_s - begin_s, time.monotonic() - start_s, loop_s))
        except ServerError as error:
            if "status 429" not in str(error):
                soak.faults.append(f"a probe failed: {error}")
        await asyncio.sleep(PROBE_EVERY_S)


def _loop_s() -> float:
    """How long a fixed loop of Python takes now."""
    start_s, total = time.monotonic(), 0
    for number in range(200_000):
        total += number
    return time.monotonic() - start_s


async def _sample(process: int, begin_s: float, for_s: float, soak: Soak) -> None:
    told = 0
    while (now_s := time.monotonic() - begin_s) < for_s:
        status = Path(f"/proc/{process}/status").read_text().splitlines()
        told_of = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in status) if rest.split()}
        # Pages of mapped files, as those of weights, come and go with the machine's memory.
        files = len(os.listdir(f"/proc/{process}/fd"))
        soak.samples.append(Sample(now_s, 1024 * int(told_of["RssAnon"]), files, int(told_of["Threads"])))
        if now_s // 60 > told:
            say(json.dumps(minute(soak, told)))
            told += 1
        await asyncio.sleep(SAMPLE_EVERY_S)


def minute(soak: Soak, number: int) -> dict[str, Any]:
    """The figures of a minute."""
    samples = [one for one in soak.samples if one.time_s // 60 == number]
    seconds = [one.seconds for one in soak.probes if one.time_s // 60 == number]
    p50, p95 = (round(float(np.percentile(seconds, rank)), 4) if seconds else None for rank in (50, 95))
    return {
        "minute": number + 1,
        "memory_mib": round(max((one.memory_bytes for one in samples), default=0) / 2**20, 1),
        "files": max((one.files for one in samples), default=0),
        "threads": max((one.threads for one in samples), default=0),
        "p50_s": p50,
        "p95_s": p95,
    }


def judge(soak: Soak, for_s: float) -> dict[str, Any]:
    """What a run comes to; appends to its faults what has grown."""
    samples = [one for one in soak.samples if one.time_s >= WARM_UP * for_s]
    third = max(1, len(samples) // 3)
    server: dict[str, Any] = {}
    figures: dict[str, Any] = {"counts": soak.counts, "server": server}
    for name, unit, share, more in (
        ("memory_bytes", "bytes", MEMORY_SHARE, MEMORY_BYTES),
        ("files", "open files", 0.0, MOST_MORE),
        ("threads", "threads", 0.0, MOST_MORE),
    ):
        values = [int(vars(one)[name]) for one in samples]
        first, last = min(values[:third]), min(values[-third:])
        server[name] = {"first_third_least": first, "last_third_least": last, "most": max(values)}
        if last > first + max(share * first, more):
            soak.faults.append(f"{unit} grew from {first} to {last}")
    probes = [one for one in soak.probes if one.time_s >= WARM_UP * for_s]
    half = len(probes) // 2
    early, late = ([one.seconds / one.loop_s for one in part] for part in (probes[:half], probes[half:]))
    if half < LEAST_PROBES:
        soak.faults.append(f"{len(probes)} probes were answered after the warm-up; {2 * LEAST_PROBES} are needed to judge")
        return figures
    ratio, chance = statistics.median(late) / statistics.median(early), chance_of_growth(early, late)
    figures["latency"] = {"probes": len(probes), "last_half_over_first": round(ratio, 3), "chance": chance}
    figures["latency"] |= {f"{name}_half_p95_s": _p95(part) for name, part in (("first", probes[:half]), ("last", probes[half:]))}
    if ratio > LATENCY_SHARE and chance < LATENCY_CHANCE:
        soak.faults.append(f"latency grew to {ratio:.2f} of what it was, by a chance of {chance:.2g}")
    if len(soak.texts) != 1:
        soak.faults.append(f"one greedy request had {len(soak.texts)} answers")
    return figures


def _p95(probes: Sequence[Probe]) -> float:
    return round(float(np.percentile([one.seconds for one in probes], 95)), 4)


def chance_of_growth(early: Sequence[float], late: Sequence[float]) -> float:
    """How often shuffled values have medians at least as far apart, in this direction."""
    rng, values = np.random.default_rng(0), np.array([*early, *late])
    seen = np.median(late) - np.median(early)
    shuffled = rng.permuted(np.tile(values, (PERMUTATIONS, 1)), axis=1)
    apart = np.median(shuffled[:, len(early) :], axis=1) - np.median(shuffled[:, : len(early)], axis=1)
    return float((1 + np.count_nonzero(apart >= seen)) / (1 + PERMUTATIONS))


if __name__ == "__main__":
    try:
        typer.run(main)
    except CpuspecError as fault:
        say(f"error: {fault}")
        raise SystemExit(1) from None

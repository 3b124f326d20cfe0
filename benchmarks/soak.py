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
"""

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from cpuspec.loadtest.client import Client, ServerError
from cpuspec.loadtest.run import first_model

PROBE_EVERY_S, PROBE_TOKENS, SAMPLE_EVERY_S = 3.0, 8, 2.0
LEAST_PROBES = 7  # in each half: with fewer, no permutation is rarer than one in a thousand
VANISH, GARBAGE = 0.25, 0.1  # shares of the requests
WARM_UP = 0.25  # of the time
MEMORY_SHARE, MEMORY_BYTES, MOST_MORE = 0.02, 32 << 20, 8
LATENCY_SHARE, LATENCY_CHANCE, PERMUTATIONS = 1.25, 0.001, 5000
IDLE_S = 60.0
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

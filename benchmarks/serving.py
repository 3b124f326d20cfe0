"""`cpuspec serve` and llama.cpp's `llama-server` under the same load of clients, in turns in one run: throughput, TTFT and TPOT.

    python benchmarks/serving.py smollm2-135m-instruct mt_bench.jsonl:turns:80:chat mbpp.jsonl:text:80 --llama-cpp PROGRAMS_DIR

Each server has a process of its own on a port of this machine, one at a time, with the same GGUF file, the same threads and as
many slots as there are clients at most. In its turn it starts, answers two requests unmeasured, and then gets --per-client requests
for each client, for one number of clients after the other: a client sends its next request when it has its answer. No prompt comes
twice in a turn, so that no cache of prompts is of use. Answers are greedy and end where the model ends them. The next round begins
with the last server of the one before.

`edits:COUNT` among the prompts are files of Python's own library, which the model is asked to repeat with one change. A draft of
llama-server may bring options of its own: --llama-cpp-draft "ngram-simple --spec-ngram-simple-size-n 4".

Ratios are taken within a round. `differing` counts answers that are not those of cpuspec without drafts in the same round.
"""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from instruction_sets import NATIVE, held_back, in_use, read_instruction_sets
from llama_cpp_build import Build, find_build
from record import PeerError, Rounds, print_figures, record, save, say, spread

from cpuspec.checkpoints.download import resolve_model
from cpuspec.cli.options import read_numbers
from cpuspec.errors import CpuspecError
from cpuspec.evaluate.prompts import read_prompts
from cpuspec.loadtest.address import local_address
from cpuspec.loadtest.client import Client, ServerError
from cpuspec.loadtest.figures import summarize
from cpuspec.loadtest.requests import LoadRequest
from cpuspec.loadtest.run import LoadPlan, first_model, run_load, warm_up

THROUGHPUT, REQUESTS = "output tokens/s", "requests/s"
LATENCIES = tuple(f"p{rank}_{name}_ms" for name in ("ttft", "tpot") for rank in (50, 95, 99))
WARM_UPS, WARM_UP_TOKENS = 2, 32
EDIT = "Put the comment `# Checked.` above the last function of this file. Answer with the whole file.\n\n```python\n{}\n```"
EDITED_LINES, EDITED_CHARACTERS = range(120, 191), 7000
START_S, STOP_S, LOAD_S = 600, 60, 3600


@dataclass(frozen=True)
class Arm:
    """A server with its drafts. ready: the path that answers with 200 when it can be asked."""

    engine: str
    draft: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ready: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.draft}"


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, or GGUF file.")],
    prompts: Annotated[
        list[str], typer.Argument(help="FILE:FIELD:COUNT of JSON-lines files, :chat after it for conversations; edits:COUNT.")
    ],
    llama_cpp: Annotated[Path | None, typer.Option(help="Directory with llama-server; without it, cpuspec runs alone.")] = None,
    llama_cpp_variants: Annotated[Path | None, typer.Option(help="Directory with a directory for each --isa.")] = None,
    isa: Annotated[
        str, typer.Option(help="The instruction set of both; native is what the processor and the directory have.")
    ] = NATIVE,
    clients: Annotated[str, typer.Option(help="Numbers of clients, separated by commas.")] = "8,32",
    per_client: Annotated[int, typer.Option(help="Requests of each client.", min=1)] = 4,
    draft: Annotated[list[str], typer.Option(help="Drafts of cpuspec besides none. Repeatable.")] = ["auto"],  # noqa: B006
    llama_cpp_draft: Annotated[
        list[str], typer.Option(help="--spec-type of llama-server besides none, options after it. Repeatable.")
    ] = ["ngram-mod"],  # noqa: B006
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.", min=1)] = 128,
    context: Annotated[int, typer.Option(help="Tokens of a slot.", min=2)] = 2048,
    threads: Annotated[int, typer.Option(help="Threads.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are quoted.", min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print a line for each server and number of clients, and the ratios."""
    try:
        counts = read_numbers(clients, "--clients")
        requests = read_load(prompts, WARM_UPS + per_client * sum(counts))
        path = resolve_model(model)
        arms, about = make_arms(path, max(counts), context, threads, draft, llama_cpp_draft, llama_cpp, llama_cpp_variants, isa)
        passed = Rounds(rounds, threads)
        samples: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for number in passed:
            texts: dict[tuple[int, str], list[str]] = {}
            for arm in arms[:: -1 if number % 2 else 1]:
                for count, (figures, said) in zip(counts, turn(arm, requests, counts, per_client, max_tokens), strict=True):
                    samples.setdefault((count, arm.name), []).append(figures)
                    texts[count, arm.name] = said
                    say(f"{arm.name}, {count} clients: {figures['output_throughput']:.1f} tokens/s, {figures['failed']} failed")
            for (count, name), said in texts.items():
                plain = texts[count, "cpuspec none"]
                samples[count, name][-1]["differing"] = sum(one != other for one, other in zip(said, plain, strict=True))
    except (CpuspecError, PeerError) as error:
        say(f"error: {error}")
        raise typer.Exit(1) from None
    result = record("serving", path.name, passed) | about
    result |= {"max_tokens": max_tokens, "per_client": per_client, "context": context, "prompts": prompts}
    result |= report(counts, [arm.name for arm in arms], samples)
    print_figures(result["figures"])
    for name, one in result["ratios"].items():
        print(f"{name}: {one['median']:.3g}x ({one['min']:.3g} to {one['max']:.3g})")
    save(result, json_file)


def read_load(texts: Sequence[str], count: int) -> list[LoadRequest]:
    """`count` different prompts, from each set in turn. Raises PeerError if there are fewer."""
    sets = [read_edits(text) if text.startswith("edits:") else read_prompts(text).prompts for text in texts]
    mixed = [prompt for row in zip_longest(*sets) for prompt in row if prompt is not None]
    if len(mixed) < count:
        raise PeerError(f"this load needs {count} prompts, and there are {len(mixed)}; name more, or fewer clients")
    return [LoadRequest(one) if isinstance(one, str) else LoadRequest(messages=tuple(one)) for one in mixed[:count]]


def read_edits(text: str) -> list[list[dict[str, str]]]:
    """The conversations that edits:COUNT names: each has a file of about 150 lines and asks for one change. Raises PeerError."""
    directory = Path(sysconfig.get_path("stdlib"))
    files = [path.read_text("utf-8") for path in sorted(directory.glob("*.py"))]
    files = [file for file in files if len(file.splitlines()) in EDITED_LINES and len(file) < EDITED_CHARACTERS]
    count = text.removeprefix("edits:")
    if not count.isdecimal() or not 0 < int(count) <= len(files):
        raise PeerError(f"got {text!r}; wanted edits:COUNT, COUNT at most {len(files)}, the files that Python's library has")
    return [[{"role": "user", "content": EDIT.format(file)}] for file in files[: int(count)]]


def own_arm(
    path: Path, draft: str, threads: int, slots: int, context: int, *more: str, environment: Mapping[str, str] = os.environ
) -> Arm:
    """`cpuspec serve` on a file. slots: answers at once. context: tokens of each. more: further options."""
    command = (sys.executable, "-m", "cpuspec", "serve", str(path), "--draft", draft, "--threads", str(threads))
    command += ("--max-sequences", str(slots), "--context-length", str(context), *more)
    return Arm("cpuspec", draft, command, environment, "/ready")


def make_arms(
    path: Path, slots: int, context: int, threads: int, drafts: Sequence[str], llama_cpp_drafts: Sequence[str],
    programs: Path | None, variants: Path | None, isa: str,
) -> tuple[list[Arm], dict[str, Any]]:  # fmt: skip
    """The servers that take part, and the instructions that each uses. Raises PeerError."""
    read_instruction_sets(isa)
    # Without a directory for prompts: a server would find those of the one before it.
    alone, environment = ("--drain-s", "0", "--prefix-cache-dir", "none"), {**os.environ, **held_back(isa)}
    arms = [
        own_arm(path, one, threads, slots, context, *alone, environment=environment) for one in dict.fromkeys(["none", *drafts])
    ]
    instructions = {arm.name: in_use() if isa == NATIVE else isa for arm in arms}
    about: dict[str, Any] = {"instructions": instructions}
    if programs is not None:
        build = find_build(programs, variants, isa)
        all_drafts = dict.fromkeys(["none", *llama_cpp_drafts])
        arms += [llama_arm(build, one, path, threads, slots, context, "--no-kv-unified") for one in all_drafts]
        instructions |= {arm.name: build.instructions for arm in arms if arm.engine != "cpuspec"}
        about["llama_cpp"] = build.about
    return arms, about


def llama_arm(build: Build, draft: str, path: Path, threads: int, slots: int, context: int, *more: str) -> Arm:
    """`llama-server` on a file, as `own_arm`. draft: its --spec-type, more of its options after it. Raises PeerError."""
    program = build.find("llama-server")
    if program is None:
        raise PeerError(f"there is no llama-server in {build.programs}; give the directory of llama.cpp's programs")
    command = (str(program), "-m", str(path), "-t", str(threads), "-tb", str(threads))
    command += ("-np", str(slots), "-c", str(slots * context), "--no-webui", *more, "--spec-type", *shlex.split(draft))
    return Arm("llama.cpp", draft, command, build.environment(), "/health")


def turn(
    arm: Arm, requests: Sequence[LoadRequest], counts: Sequence[int], per_client: int, max_tokens: int
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The figures and the texts of a server's answers, for each number of clients. Raises PeerError."""
    with serving(arm) as client:
        model, at = asyncio.run(first_model(client)), WARM_UPS
        plan = LoadPlan(model, max_tokens=max_tokens, max_seconds=LOAD_S, body={"temperature": 0}, keep_texts=True)
        asyncio.run(warm_up(client, requests[:WARM_UPS], replace(plan, max_tokens=min(max_tokens, WARM_UP_TOKENS))))
        for count in counts:
            part, at = requests[at : at + per_client * count], at + per_client * count
            at_once = replace(plan, max_concurrency=count)
            done = asyncio.run(run_load(client, part, at_once, lambda done, total: None))
            if done.stopped:
                raise PeerError(f"{arm.name} with {count} clients: {done.stopped}")
            figures = summarize(done.answers, done.duration_s, ("ttft", "tpot"), (50, 95, 99), {})
            if figures["failed"]:
                say(f"{arm.name}: {next(one.error for one in done.answers if one.error)}")
            if not figures["completed"]:
                raise PeerError(f"{arm.name} with {count} clients answered nothing")
            yield figures, [one.error or one.text for one in done.answers]


@contextmanager
def serving(arm: Arm) -> Iterator[Client]:
    """Run a server until the context ends. Raises PeerError for one that does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = Client(local_address(f"http://127.0.0.1:{port}"))
    command = [*arm.command, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=dict(arm.environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait(arm, process, client, log)
            yield client
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(arm: Arm, process: "subprocess.Popen[bytes]", client: Client, log: Any) -> None:
    end_s = time.monotonic() + START_S
    while True:
        try:
            asyncio.run(client.get_json(arm.ready))
            return
        except ServerError as error:
            if process.poll() is None and time.monotonic() < end_s:
                time.sleep(0.1)
                continue
            log.seek(0)
            words = log.read()[-500:].decode(errors="replace").strip()
            raise PeerError(f"{arm.name} does not answer ({error}); its last words: {words}") from None


def report(counts: Sequence[int], arms: Sequence[str], samples: Mapping[tuple[int, str], list[dict[str, Any]]]) -> dict[str, Any]:
    """Figures by number of clients and server, and cpuspec's ratios to each of llama.cpp's servers, all spread over rounds."""
    names = {"output_throughput": THROUGHPUT, "request_throughput": REQUESTS}
    names |= {key: key.removesuffix("_ms").replace("_", " ") + ", ms" for key in LATENCIES}
    figures: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for count in counts:
        for key, name in names.items():
            by_arm = {arm: [one[key] for one in samples[count, arm]] for arm in arms}
            figures[f"{count} clients, {name}"] = {arm: spread(values) for arm, values in by_arm.items() if None not in values}
        for arm in (arm for arm in arms if arm.startswith("cpuspec")):
            for other in (other for other in arms if other.startswith("llama.cpp")):
                for key in ("output_throughput", *LATENCIES):
                    pairs = [(one[key], its[key]) for one, its in zip(samples[count, arm], samples[count, other], strict=True)]
                    if all(mine is not None and its for mine, its in pairs):
                        ratios[f"{count} clients, {names[key]}: {arm} over {other}"] = spread([mine / its for mine, its in pairs])
    told = ("completed", "failed", "total_output_tokens", "total_draft_tokens", "total_accepted_draft_tokens", "differing")
    counted = {
        f"{count} clients": {arm: {name: [one.get(name) for one in samples[count, arm]] for name in told} for arm in arms}
        for count in counts
    }
    return {"figures": figures, "ratios": ratios, "counts": counted}


if __name__ == "__main__":
    typer.run(main)

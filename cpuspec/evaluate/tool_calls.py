"""How well a model calls tools: 200 cases, asked of a server as its clients do, and what the calls are worth.

`tool_cases.jsonl` has the tools, sets of them, and the cases: written for this project, none copied from a published set. Cases of
a kind share their tools: a server that keeps prefixes reads these once.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from cpuspec.engine.llm import LLM
from cpuspec.errors import CpuspecError
from cpuspec.evaluate.validity import json_object
from cpuspec.loadtest.client import Client
from cpuspec.server.app import listen, serve
from cpuspec.server.server import Server
from cpuspec.settings import ServerConfig

MAX_TOKENS = 768  # of an answer; the longest text of a case has a third of it
KINDS = ("simple", "multiple", "parallel", "irrelevance", "long")
Tools = tuple[dict[str, Any], ...]
Call = tuple[str, Mapping[str, Any]]  # a function and its arguments; any value of a tuple is right, and None stands for absence


@dataclass(frozen=True)
class ToolCase:
    """A question, the tools beside it, and the calls that answer it, in any order."""

    kind: str
    question: str
    tools: Tools
    calls: tuple[Call, ...]


def tool_cases() -> list[ToolCase]:
    """All cases, kind by kind."""
    sets: dict[str, Tools] = {}
    found = []
    for line in files(__package__).joinpath("tool_cases.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        if "tool" in row:
            sets[row["tool"]["name"]] = ({"type": "function", "function": row["tool"]},)
        elif "set" in row:
            sets[row["set"]] = tuple(tool for name in row["tools"] for tool in sets[name])
        else:
            calls = tuple(
                (name, {key: tuple(value["any"]) if isinstance(value, dict) else value for key, value in given.items()})
                for name, given in row["calls"]
            )
            found.append(ToolCase(row["kind"], row["question"], sets[row["tools"]], calls))
    return found


@dataclass(frozen=True)
class ToolVerdict:
    """One answer. Each of the first four implies those before it; where no call is wanted, `called` is all that counts."""

    called: bool  # there is a call
    parses: bool  # the arguments of all calls are JSON objects
    named: bool  # the calls name the tools that are wanted, each as often
    right: bool  # with the arguments that are wanted
    num_broken: int  # calls, told as finished ones, whose arguments do not parse


@dataclass(frozen=True)
class ToolScore:
    """Counts of the cases of one kind. num_right: answers with the wanted calls; of "irrelevance", answers without a call."""

    kind: str
    num_cases: int
    num_called: int
    num_parses: int
    num_named: int
    num_right: int
    num_broken: int


def judge_calls(case: ToolCase, message: Mapping[str, Any], finish_reason: str | None) -> ToolVerdict:
    """What a message of OpenAI's chat completions is worth as the answer to a case."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    made = [(one["name"], json_object(one["arguments"])) for one in functions]
    num_broken = sum(arguments is None for _, arguments in made) if finish_reason == "tool_calls" else 0
    calls = [(name, arguments) for name, arguments in made if arguments is not None]
    parses = bool(made) and len(calls) == len(made)
    named = parses and sorted(name for name, _ in calls) == sorted(name for name, _ in case.calls)
    left = list(calls)
    for wanted in case.calls:
        if (found := next((one for one in left if _fits(one, wanted)), None)) is not None:
            left.remove(found)
    return ToolVerdict(bool(made), parses, named, (named or not (case.calls or made)) and not left, num_broken)


def tool_scores(cases: Sequence[ToolCase], verdicts: Sequence[ToolVerdict]) -> list[ToolScore]:
    """The counts of each kind, in the order of the kinds."""
    found = []
    for kind in KINDS:
        own = [verdict for case, verdict in zip(cases, verdicts, strict=True) if case.kind == kind]
        counts = [sum(getattr(one, name) for one in own) for name in ("called", "parses", "named", "right", "num_broken")]
        found += [ToolScore(kind, len(own), *counts)] if own else []
    return found


def spread(cases: Sequence[ToolCase], limit: int | None) -> list[ToolCase]:
    """`limit` cases, of each kind the same share."""
    if limit is None or limit >= len(cases):
        return list(cases)
    return [cases[(2 * number + 1) * len(cases) // (2 * limit)] for number in range(limit)]


async def ask_cases(
    client: Client, model: str, cases: Sequence[ToolCase], at_once: int, strict: bool, on_answer: Callable[[int], object]
) -> list[ToolVerdict]:
    """The verdicts on the greedy answers of a server's model, `at_once` of them computed together. Raises CpuspecError.

    model: the server's name for it, "" for its first one. strict: the tools say so. on_answer: gets the number of done answers.
    """
    places, num_done = asyncio.Semaphore(at_once), 0

    async def ask(case: ToolCase) -> ToolVerdict:
        nonlocal num_done
        tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in case.tools] if strict else case.tools
        body = {"model": model or None, "messages": [{"role": "user", "content": case.question}], "tools": tools}
        async with places:
            reply = await client.post_json("/v1/chat/completions", body | {"temperature": 0, "max_tokens": MAX_TOKENS})
        try:
            (choice,) = reply["choices"]
            found = judge_calls(case, choice["message"], choice["finish_reason"])
        except (KeyError, TypeError, ValueError):
            raise CpuspecError(f"the server's answer is not a chat completion: {json.dumps(reply)[:200]}") from None
        num_done += 1
        on_answer(num_done)
        return found

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(case)) for case in cases]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


@contextmanager
def served(llm: LLM) -> Iterator[str]:
    """The URL of a server of the LLM, in a thread of this process, until the context ends."""
    log = logging.getLogger("cpuspec.server")
    before = log.level
    log.setLevel(logging.WARNING)  # no line for each request
    config = ServerConfig(port=0, drain_s=0.0, max_waiting=1 << 10)
    server, listener, ready = Server(llm.name, config), listen(config), threading.Event()

    def run() -> None:
        try:
            asyncio.run(serve(server, lambda: llm, listener, ready.set))
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="cpuspec-serve", daemon=True)
    thread.start()
    try:
        ready.wait()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(RuntimeError):  # it has ended by itself
            server.stop()
            server.stop()
        thread.join()
        log.setLevel(before)


def _fits(made: tuple[str, Mapping[str, Any]], wanted: Call) -> bool:
    """Whether a call is the wanted one: the same function, and for each argument one of the values that are right."""
    (name, given), (function, arguments) = made, wanted
    known = {key: value if isinstance(value, tuple) else (value,) for key, value in arguments.items()}
    each = all(any(_same(given.get(key), value) for value in values) for key, values in known.items())
    return name == function and given.keys() <= known.keys() and each


def _same(given: Any, wanted: Any) -> bool:
    """Whether a value is the wanted one. In one line case and outer spaces do not count, else white space at the end."""
    if isinstance(given, str) and isinstance(wanted, str):
        return given.rstrip() == wanted.rstrip() if "\n" in wanted else given.strip().casefold() == wanted.casefold()
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_same, sorted(given, key=str), sorted(wanted, key=str)))
    return isinstance(given, bool) == isinstance(wanted, bool) and bool(given == wanted)

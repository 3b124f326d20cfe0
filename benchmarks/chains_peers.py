"""Other engines' speculation beside the arms of `chains.py`: llama.cpp's and transformers', each beside its own plain decoding.

Both get a prompt's token ids and give ids back, decode greedily and have the model loaded throughout. Their speed is what
`RequestStats.tokens_per_s` is for cpuspec: tokens after the first step over the time they took.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import httpx
from instruction_sets import NATIVE, build_text, in_use
from llama_cpp_build import find_build
from peers_engines import Worker
from record import PeerError, say
from serving import llama_arm, serving

from cpuspec.checkpoints import Checkpoint
from cpuspec.evaluate.statistics import mean_ratio
from cpuspec.loadtest.client import Client, ServerError
from cpuspec.metrics import LevelCounters

PLAIN = "none"
LLAMA_CPP, TRANSFORMERS = "llama.cpp", "transformers"
LLAMA_CPP_DRAFTS = ("ngram-simple", "ngram-cache", "ngram-mod")
_ROOM_FOR_DRAFTS = 64  # beyond a context's answers: llama.cpp shortens drafts that would not fit
_TIMEOUT_S = 1800
_TRANSFORMERS_WORKER = Path(__file__).resolve().parent / "peer_workers" / "worker_transformers.py"
_COUNTER = re.compile(r'llamacpp:spec_decode_num_(\w+)_total(?:\{position="(\d+)"\})? (\d+)')


@dataclass(frozen=True)
class Answer:
    """A greedy answer. num_timed: tokens after those of the first step; seconds: from the first step's end to the last's.

    drafts: what its drafts came to, None where the engine does not tell.
    """

    token_ids: list[int]
    num_timed: int
    seconds: float
    drafts: LevelCounters | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """None of an answer that took one step."""
        return self.num_timed / self.seconds if self.num_timed > 0 and self.seconds > 0 else None


Arm = Callable[[list[int], int], Answer]  # from token ids and how many tokens to generate at most


@dataclass(frozen=True)
class Choice:
    """Which peers to measure, and how.

    llama_cpp: directory of its programs; isa: which of its libraries, as `llama_cpp_build.find_build` takes it. llama_cpp_drafts:
    each a --spec-type of its server, then more of its options if they are to differ from its defaults. transformers: interpreter of
    an environment that has it. num_lookup_tokens: of its drafts; assistant: a smaller model that drafts for it as well.
    """

    llama_cpp: Path | None = None
    llama_cpp_drafts: Sequence[str] = LLAMA_CPP_DRAFTS
    transformers: Path | None = None
    num_lookup_tokens: int = 10
    assistant: Path | None = None
    isa: str = NATIVE

    def check(self, checkpoint: Checkpoint, target_dtype: str | None) -> None:
        """Raises PeerError where a peer would decode other weights than cpuspec does."""
        if self.llama_cpp is not None and (target_dtype is not None or not checkpoint.path.is_file()):
            raise PeerError("llama.cpp reads GGUF files as they are; leave out --llama-cpp, or give a file and no --target-dtype")
        if self.transformers is not None and target_dtype not in (None, "bf16"):
            raise PeerError(f"transformers decodes in bf16; leave out --python, or --target-dtype {target_dtype}")


@dataclass
class Peers:
    """The arms that answer, as ENGINE: DRAFTS; what is known of each engine; and why an arm was left out.

    builds: the instruction sets that engines are built for, as `instruction_sets.build_text` tells them.
    """

    arms: dict[str, Arm] = field(default_factory=dict)
    abouts: dict[str, str] = field(default_factory=dict)
    builds: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def answer(self, name: str, ids: list[int], max_tokens: int) -> Answer | None:
        """An arm's answer; None if it fails now or did so before."""
        answer = None
        if name in self.arms:
            with self.left_out_if_it_fails(name):
                answer = self.arms[name](ids, max_tokens)
        return answer

    @contextmanager
    def left_out_if_it_fails(self, name: str) -> Iterator[None]:
        """Turns a PeerError into an entry of `failed`."""
        try:
            yield
        except PeerError as error:
            say(f"{name} is left out from here on: {error}")
            self.arms.pop(name, None)
            self.failed[name] = str(error)


def open_peers(choice: Choice, model: Path, threads: int, context: int, end_ids: Sequence[int], stack: ExitStack) -> Peers:
    """Start the chosen peers, plain decoding first; `stack` ends them. context: tokens of a prompt with its answer at most."""
    peers = Peers()
    if choice.llama_cpp is not None:
        with peers.left_out_if_it_fails(LLAMA_CPP):
            build = find_build(choice.llama_cpp, None, choice.isa)
            peers.abouts[LLAMA_CPP], peers.builds[LLAMA_CPP] = build.about, build_text(build.instructions, in_use())
    if LLAMA_CPP in peers.builds:
        for drafts in (PLAIN, *choice.llama_cpp_drafts):
            name, room = f"{LLAMA_CPP}: {drafts}", context + _ROOM_FOR_DRAFTS
            say(f"loading {name}")
            with peers.left_out_if_it_fails(name):
                # What its drafts learn stays from answer to answer, as it does with cpuspec's suffix.
                arm = llama_arm(build, drafts, model, threads, 1, room, "--cache-ram", "0", "--metrics")
                client = stack.enter_context(serving(arm))
                version = asyncio.run(client.get_json("/props"))["build_info"]
                peers.abouts[LLAMA_CPP] = f"llama.cpp {version}, llama-server; {build.about}"
                peers.arms[name] = partial(_answer, client, drafts != PLAIN)
    if choice.transformers is not None:
        say(f"loading {TRANSFORMERS}")
        with peers.left_out_if_it_fails(TRANSFORMERS):
            worker = stack.enter_context(closing(Worker(choice.transformers, _TRANSFORMERS_WORKER, (), (), _TIMEOUT_S)))
            assistant = str(choice.assistant) if choice.assistant else None
            peers.abouts[TRANSFORMERS] = worker.ask(do="load", model=str(model), threads=threads, assistant=assistant)
            ways: dict[str, dict[str, Any]] = {
                PLAIN: {},
                f"lookup {choice.num_lookup_tokens}": {"num_lookup_tokens": choice.num_lookup_tokens},
            }
            if choice.assistant:
                ways[f"assistant {choice.assistant.stem}"] = {"assisted": True}
            for drafts, way in ways.items():
                settings = {"end_ids": list(end_ids), "num_lookup_tokens": None} | way
                peers.arms[f"{TRANSFORMERS}: {drafts}"] = partial(_generate, worker, settings)
    return peers


def _generate(worker: Worker, settings: Mapping[str, Any], ids: list[int], max_tokens: int) -> Answer:
    return Answer(**worker.ask(do="generate", ids=ids, max_tokens=max_tokens, **settings))


def _answer(client: Client, drafts: bool, ids: list[int], max_tokens: int) -> Answer:
    """llama-server's greedy continuation; nothing of an earlier prompt is reused. Its times begin with the first token."""
    greedy = {"temperature": 0, "top_k": 1, "samplers": ["top_k"]}
    request = {"prompt": ids, "n_predict": max_tokens, "cache_prompt": False, "return_tokens": True, **greedy}
    before = _counters(client) if drafts else Counter()
    try:
        reply = asyncio.run(asyncio.wait_for(client.post_json("/completion", request), _TIMEOUT_S))
        tokens, timings = list(reply["tokens"]), reply["timings"]
        num_timed, seconds = int(timings["predicted_n"]) - 1, float(timings["predicted_ms"]) / 1e3
    except (ServerError, TimeoutError, KeyError, TypeError, ValueError) as error:
        raise PeerError(f"llama-server gave no completion with its tokens and timings: {type(error).__name__}: {error}") from error
    if not drafts:
        return Answer(tokens, num_timed, seconds)
    counts = _counters(client)
    counts.subtract(before)
    per_pos = [count for (name, position), count in sorted(counts.items()) if position >= 0]
    totals = {f"num_{name}": counts[name, -1] for name in ("drafts", "draft_tokens", "accepted_tokens")}
    return Answer(tokens, num_timed, seconds, LevelCounters(**totals, num_accepted_tokens_per_pos=per_pos))


def _counters(client: Client) -> Counter[tuple[str, int]]:
    """What the drafts of a server came to so far, by name and position; -1 where all positions count together."""
    told = httpx.get(f"http://127.0.0.1:{client.address.port}/metrics", trust_env=False).text
    return Counter({(name, int(position or -1)): int(value) for name, position, value in _COUNTER.findall(told)})


def summarize_peers(answers: Mapping[str, Sequence[Answer]], ours: Sequence[float | None]) -> dict[str, dict[str, Any]]:
    """Figures of each arm over the prompts of a set. ours: cpuspec's tokens/s, prompt by prompt.

    num_identical and over_plain are against the same engine's plain decoding, None where that was left out.
    """
    return {name: _summary(ones, answers.get(_plain_arm(name)), ours) for name, ones in answers.items()}


def peer_row(answers: Mapping[str, Answer]) -> dict[str, Any]:
    """The figures of a prompt, by arm."""
    rows = {}
    for name, one in answers.items():
        plain = answers.get(_plain_arm(name))
        same = one.token_ids == plain.token_ids if plain else None
        rows[name] = {"identical": same, "tokens_per_s": one.tokens_per_s, "num_tokens": len(one.token_ids)}
    return rows


def peer_table(arms: Mapping[str, Mapping[str, Any]], ours: str) -> str:
    """A set's peers as Markdown. ours: the spec that they are compared with."""
    columns = ("peer", "tokens/s", "over its plain", "95 %", "identical to it", f"cpuspec {ours} over the peer", "95 %", "accepted")
    lines = [f"\n| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, one in arms.items():
        speed = f"{one['tokens_per_s']:.1f}" if one["tokens_per_s"] else ""
        same = f"{one['num_identical']} of {one['num_prompts']}" if one["num_identical"] is not None else ""
        ratios = _ratio_cells(one, "over_plain"), _ratio_cells(one, "cpuspec_over")
        cells = (name, speed, *ratios[0], same, *ratios[1], by_position(one["drafts"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def by_position(counts: Mapping[str, Any]) -> str:
    """The shares of drafts that were accepted up to each position, from the counts of a level."""
    return " ".join(f"{one / counts['num_drafts']:.3f}" for one in counts["num_accepted_tokens_per_pos"] if counts["num_drafts"])


def _summary(ones: Sequence[Answer], plain: Sequence[Answer] | None, ours: Sequence[float | None]) -> dict[str, Any]:
    rates = [one.tokens_per_s for one in ones]
    known = [rate for rate in rates if rate is not None]
    plain_rates: Sequence[float | None] = [one.tokens_per_s for one in plain] if plain else [None] * len(ones)
    over_plain, plain_interval = mean_ratio(rates, plain_rates)
    cpuspec_over, cpuspec_interval = mean_ratio(ours, rates)
    same = [one.token_ids == other.token_ids for one, other in zip(ones, plain, strict=True)] if plain else None
    drafts = sum((one.drafts for one in ones if one.drafts), LevelCounters())
    return {
        "num_prompts": len(ones),
        "num_identical": None if same is None else sum(same),
        "num_tokens": sum(len(one.token_ids) for one in ones),
        "tokens_per_s": geometric_mean(known) if known else None,
        "over_plain": over_plain,
        "over_plain_interval": list(plain_interval),
        "cpuspec_over": cpuspec_over,
        "cpuspec_over_interval": list(cpuspec_interval),
        "drafts": asdict(drafts),
    }


def _plain_arm(name: str) -> str:
    """The arm of the same engine that has no drafts."""
    return f"{name.partition(': ')[0]}: {PLAIN}"


def _ratio_cells(one: Mapping[str, Any], name: str) -> tuple[str, str]:
    if one[name] is None:
        return "", ""
    low, high = one[f"{name}_interval"]
    return f"{one[name]:.2f}x", f"{low:.2f} to {high:.2f}"

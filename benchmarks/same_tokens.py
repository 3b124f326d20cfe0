"""Whether files that `cpuspec quantize` writes mean the same elsewhere: greedy tokens of cpuspec and of llama.cpp, type by type.

    python benchmarks/same_tokens.py smollm2-135m-instruct --llama-cpp PROGRAMS_DIR --type q4_0 --type q8_0
    python tools/make_tiny_model.py gguf tiny.gguf weight_format=f32 tied=false num_layers=4 vocab_size=2048
    python benchmarks/same_tokens.py tiny.gguf --pure --llama-cpp PROGRAMS_DIR --json benchmarks/results/same-tokens.json

A model is written in each type, both engines read the file, and ten prompts are continued. A model whose widths are multiples of
256 fits every type. The judge is numpy with the file's weights in f32: an engine's numerics are how far its log probabilities of
the tokens are from the judge's. Where two answers part, the two tokens must be as near to each other as the numerics are large, and
neither engine may be much further off than the other. --speed times decoding of both in turns, too, and our forwards over 4 rows.
"""

import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from instruction_sets import NATIVE
from llama_cpp_build import Build, find_build
from llama_server import LlamaServer
from peers_errors import PeerError
from record import Rounds, record, save, say

from cpuspec.backends import Backend, make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.errors import CpuspecError
from cpuspec.evaluate.quality import F64, last_rows
from cpuspec.evaluate.speed import Plan, measure_speed
from cpuspec.formats import FORMATS
from cpuspec.formats.format import OWN_GGUF_TYPES
from cpuspec.model.batch import F32, ForwardBatch
from cpuspec.model.cache import KVCache
from cpuspec.quantize.job import Job, quantize
from cpuspec.quantize.mixes import TYPES
from cpuspec.sampling import argmax, log_softmax
from cpuspec.settings import EngineConfig
from cpuspec.text import make_tokenizer

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a",
    "Water boils at a temperature of",
    "The three primary colours are",
    "import numpy as np\n\ndef softmax(x):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first human",
    "SELECT name, COUNT(*) FROM users",
    "A list of fruits:\n1. Apples\n2.",
)
_CONTEXT, _TIMEOUT_S = 1024, 300
_TIMED = 128  # tokens of a round of speed, at least

# Types that llama.cpp knows: all but our own.
_SHARED = tuple(name for name in TYPES if name not in FORMATS or (FORMATS[name].gguf_type or 0) < OWN_GGUF_TYPES)

# How many times the largest error two tokens may be apart where answers part, how many times one engine's usual error may be the
# other's, and what is no error.
_TIMES_LARGEST, _TIMES_USUAL, _LEAST = 2, 8, 1e-3


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and their log probabilities, nan where an engine does not tell one."""

    tokens: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class Parting:
    """The first place in which two answers differ. margin: between the two tokens' log probabilities, by the judge."""

    prompt: int
    place: int
    ours: int
    theirs: int
    margin: float


@dataclass(frozen=True)
class Comparison:
    """Two engines' answers. errors: medians of what their log probabilities of chosen tokens differ from the judge's.
    largest_error: of both engines, where the answers agree: a few rows err much more than others.
    """

    num_same: int
    num_tokens_compared: int
    our_error: float
    their_error: float
    largest_error: float
    partings: list[Parting]

    @property
    def within_numerics(self) -> bool:
        """Whether both compute the same, as far as their errors tell."""
        alike = max(self.our_error, self.their_error) <= _TIMES_USUAL * min(self.our_error, self.their_error) + _LEAST
        return alike and all(one.margin <= _TIMES_LARGEST * self.largest_error + _LEAST for one in self.partings)


def compare(ours: Sequence[Answer], theirs: Sequence[Answer], judged: Sequence[F64]) -> Comparison:
    """judged: of each of our answers the judge's log probabilities [tokens, V], each row after the tokens before."""
    partings, own_errors, other_errors, compared = [], [], [], 0
    for number, (a, b, rows) in enumerate(zip(ours, theirs, judged, strict=True)):
        for place, (own, other) in enumerate(zip(a.tokens, b.tokens, strict=False)):
            compared += 1
            if own != other:
                partings.append(Parting(number, place, own, other, abs(float(rows[place, own] - rows[place, other]))))
                break
            own_errors.append(abs(float(a.log_probs[place] - rows[place, own])))
            other_errors.append(abs(float(b.log_probs[place] - rows[place, other])))
    usual = [float(np.nanmedian(some or [0.0])) for some in (own_errors, other_errors)]
    largest = float(np.nanmax([*own_errors, *other_errors, 0.0]))
    return Comparison(len(ours) - len(partings), compared, *usual, largest, partings)


def peer_answer(server: LlamaServer, prompt: Sequence[int], num_tokens: int, with_log_probs: bool = True) -> tuple[Answer, float]:
    """The greedy continuation of token ids, up to the end of the answer, and tokens a second."""
    got = json.loads(server.complete(prompt, num_tokens, n_probs=int(with_log_probs)))
    answer, told = Answer(got["tokens"], []), got.get("completion_probabilities", [])
    for token in answer.tokens:  # of bytes that make no character yet the server tells no probability
        known = bool(told) and told[0]["id"] == token
        answer.log_probs.append(told.pop(0)["logprob"] if known else math.nan)
    return answer, got["timings"]["predicted_per_second"]


def own_answer(backend: Backend, prompt: Sequence[int], num_tokens: int) -> Answer:
    """As `peer_answer`, by this package, past the end of the answer."""
    cache, answer, rows = backend.new_cache(1, len(prompt) + num_tokens), Answer([], []), list(prompt)
    for _ in range(num_tokens):
        log_probs = log_softmax(_forward(backend, cache, rows))[0]
        rows = [int(log_probs.argmax())]
        answer.tokens.append(rows[0])
        answer.log_probs.append(float(log_probs[rows[0]]))
    return answer


def own_tokens_per_s(backend: Backend, prompt: Sequence[int], num_tokens: int) -> float:
    """Of greedy decoding after the first token."""
    cache = backend.new_cache(1, len(prompt) + num_tokens)
    token = int(argmax(_forward(backend, cache, prompt))[0])
    began = time.perf_counter()
    for _ in range(num_tokens - 1):
        token = int(argmax(_forward(backend, cache, [token]))[0])
    return (num_tokens - 1) / (time.perf_counter() - began)


def _forward(backend: Backend, cache: KVCache, tokens: Sequence[int]) -> F32:
    """Append tokens; logits [1, V] of the last one."""
    start, count = cache.lengths[0], len(tokens)
    positions, last = np.arange(start, start + count, dtype=np.int32), np.array([count - 1], np.int32)
    ends = np.array([0, count], np.int32)
    batch = ForwardBatch(np.array(tokens, np.int32), positions, np.zeros(1, np.int32), ends, logit_rows=last)
    return backend.forward(batch, cache).logits


@dataclass
class Speeds:
    """of_both: tokens/s of ours and theirs, round by round. four_rows: our forward over 4 rows, with all logits, over one row."""

    of_both: list[tuple[float, float]]
    four_rows: float | None = None

    @property
    def ratio(self) -> float | None:
        """Of ours over theirs, the median."""
        return statistics.median(own / other for own, other in self.of_both) if self.of_both else None


def measure(path: Path, prompts: Sequence[list[int]], how: "How") -> tuple[Comparison, Speeds]:
    """Both engines on one file."""
    checkpoint, speeds, timed = open_checkpoint(path), Speeds([]), max(how.num_tokens, _TIMED)
    with closing(make_backend("numba", checkpoint, EngineConfig(threads=how.threads, keep_packed=False))) as backend:
        ours = [own_answer(backend, prompt, how.num_tokens) for prompt in prompts]
        options = ("-tb", str(how.threads), "--no-webui", "--no-warmup")
        with closing(LlamaServer(how.build, path, how.threads, _CONTEXT, _TIMEOUT_S, options)) as server:
            server.load()
            theirs = [peer_answer(server, prompt, how.num_tokens)[0] for prompt in prompts]
            for _ in range(how.speed_rounds):
                own = own_tokens_per_s(backend, prompts[0], timed)
                speeds.of_both.append((own, peer_answer(server, prompts[0], timed, with_log_probs=False)[1]))
        if how.speed_rounds:
            rows = Plan(prompt_tokens=0, new_tokens=0, rows=(1, 4), repetitions=how.speed_rounds)
            speeds.four_rows = measure_speed(backend, rows).rows[1].over_one_row
    judge = make_backend("numpy", checkpoint, EngineConfig(kv_format="f32"))
    texts = [[*prompt, *answer.tokens[:-1]] for prompt, answer in zip(prompts, ours, strict=True)]
    judged = [log_softmax(last_rows(judge, [*text, 0], how.num_tokens)) for text in texts]
    return compare(ours, theirs, judged), speeds


@dataclass(frozen=True)
class How:
    """How both engines run."""

    build: Build
    threads: int
    num_tokens: int
    speed_rounds: int


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    llama_cpp: Annotated[Path, typer.Option(help="Directory of llama.cpp's programs.")],
    isa: Annotated[str, typer.Option(help="llama.cpp's library for this instruction set, as in peers.py.")] = NATIVE,
    types: Annotated[
        list[str] | None, typer.Option("--type", help="Of `cpuspec quantize`; by default all that both know. Repeatable.")
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="No mixes.")] = False,
    num_tokens: Annotated[int, typer.Option("--tokens", help="Of each answer.", min=2)] = 32,
    speed_rounds: Annotated[int, typer.Option("--speed", help="Rounds of decoding, both in turns.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="Of both engines.", min=1)] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print a line for each type; ends with 1 if an answer parts beyond what the numerics explain."""
    arms: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    rounds = Rounds(1, threads)
    with tempfile.TemporaryDirectory() as room:
        directory = Path(room)
        try:
            how = How(find_build(llama_cpp, None, isa), threads, num_tokens, speed_rounds)
            checkpoint = open_checkpoint(resolve_model(model))
        except (PeerError, CpuspecError) as error:
            say(str(error))
            raise typer.Exit(1) from error
        tokenizer = make_tokenizer(checkpoint)
        prompts = [[*tokenizer.prefix, *tokenizer.encode(text)] for text in PROMPTS]
        for _ in rounds:
            for type_name in types or _SHARED:
                path = directory / f"{type_name}.gguf"
                try:
                    made = quantize(checkpoint, path, Job(type_name, pure=pure), threads)
                    one, speeds = measure(path, prompts, how)
                except (PeerError, CpuspecError, OSError) as error:
                    failed[type_name] = str(error)
                    say(f"{type_name}: {error}")
                    continue
                finally:
                    path.unlink(missing_ok=True)
                fits = one.within_numerics
                arm = {"type": type_name, "formats": made.formats, "num_bytes": made.num_bytes, **asdict(one)}
                arm |= {"tokens_per_s": speeds.of_both, "ratio": speeds.ratio, "four_rows": speeds.four_rows}
                arms.append({**arm, "within_numerics": fits})
                told = f"{one.num_same} of {len(prompts)} the same, errors {one.our_error:.4f} and {one.their_error:.4f}"
                told += f", {one.largest_error:.4f} at most"
                if one.partings:
                    told += ", margins where they part " + " ".join(f"{part.margin:.4f}" for part in one.partings)
                told += "" if fits else ": MORE THAN NUMERICS"
                if speeds.of_both:
                    told += f"; {speeds.ratio:.2f} of llama.cpp's speed, 4 rows take {speeds.four_rows:.2f} of one"
                say(f"{type_name}: {told}")
    result = record("same_tokens", checkpoint.path.name, rounds)
    result |= {"llama_cpp": how.build.about, "num_tokens": num_tokens, "arms": arms, "failed": failed}
    print(json.dumps(arms, indent=2))
    save(result, json_file)
    if failed or not all(arm["within_numerics"] for arm in arms):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

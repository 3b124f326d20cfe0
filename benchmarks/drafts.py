"""Drafts made of a model's own weights: what they agree on with the model, what a token of them costs, and what they take.

    python benchmarks/drafts.py qwen2.5-coder-1.5b-instruct HUMANEVAL.jsonl:prompt:16 MT_BENCH.jsonl:turns:16:chat \
        --draft self:mxfp4 --draft skip:4

Each text argument is a JSON-lines file, the field that holds the prompt (of a list, the first), how many lines to take, evenly from
the file, and `chat` if the prompt is to go through the chat template. Agreement: the model continues every prompt greedily, and the
draft is asked after each token of that for its most likely next one. Cost: a forward of one row over the model's, in turns.
A draft cast from weights that are on a 4-bit grid already agrees more often than one cast from weights of 16 bits would.
"""

import json
from pathlib import Path
from time import perf_counter
from typing import Annotated

import numpy as np
import typer
from record import Rounds, record, save, spread

from cpuspec.backends import Backend, make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.engine.assemble import OWN_WEIGHTS
from cpuspec.engine.llm import LLM
from cpuspec.evaluate.quality import logits_of
from cpuspec.model.batch import ForwardBatch
from cpuspec.model.cache import KVCache
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.text import Tokenizer, make_tokenizer

DEPTH = 256  # tokens of context when forwards are timed

Continued = tuple[list[int], list[int]]  # ids of a prompt, and the model's own of what follows


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    texts: Annotated[list[str], typer.Argument(help="FILE:FIELD:COUNT or FILE:FIELD:COUNT:chat")],
    draft: Annotated[list[str], typer.Option(help="self:FORMAT or skip:LAYERS")],
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 128,
    threads: Annotated[int, typer.Option(help="Threads.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Timed forwards of each draft and the model.", min=1)] = 25,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print a line for each draft."""
    for name in draft:
        if name.partition(":")[0] not in OWN_WEIGHTS:
            raise typer.BadParameter(f"--draft {name}: wanted one of {', '.join(OWN_WEIGHTS)}, a colon and its argument")
    checkpoint = open_checkpoint(resolve_model(model))
    settings = EngineConfig(max_sequences=8, threads=threads, context_length=min(2048, checkpoint.config.context_length))
    tokenizer = make_tokenizer(checkpoint)
    prompts = {Path(text).name: _prompts(text, tokenizer) for text in texts}
    target = make_backend("numba", checkpoint, settings)
    rows = []
    with LLM.from_backend(target, tokenizer, settings=settings) as llm:
        continued = {text: _continue(llm, ids, max_tokens) for text, ids in prompts.items()}
        passed = Rounds(len(draft), threads)
        for number in passed:
            start = perf_counter()
            backend = _make(draft[number], target, checkpoint, settings)
            made_s = perf_counter() - start
            rows.append(
                {
                    "draft": draft[number],
                    "agreement": {text: round(_agreement(backend, some), 4) for text, some in continued.items()},
                    "read_over_target": round(backend.weight_bytes / target.weight_bytes, 4),
                    "forward_over_target": spread(_costs(backend, target, rounds)),
                    "made_s": round(made_s, 2),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
            backend.close()
    tokens = {text: sum(len(ids) for _, ids in some) for text, some in continued.items()}
    save(record("drafts", checkpoint.path.name, passed) | {"tokens": tokens, "drafts": rows}, json_file)


def _prompts(text: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of the prompts that an argument stands for."""
    try:
        path, field, count, *chat = text.split(":")
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        some = [json.loads(line)[field] for line in lines[:: max(1, len(lines) // int(count))][: int(count)]]
    except (OSError, ValueError, KeyError) as error:
        raise typer.BadParameter(f"{text}: wanted FILE:FIELD:COUNT or FILE:FIELD:COUNT:chat; {error}") from error
    prompts = [value if isinstance(value, str) else value[0] for value in some]
    if not chat:
        return [tokenizer.encode(prompt) for prompt in prompts]
    return [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]


def _continue(llm: LLM, ids: list[list[int]], max_tokens: int) -> list[Continued]:
    answers = llm.generate(ids, SamplingParams(max_tokens=max_tokens))
    return [(prompt, answer.token_ids) for prompt, answer in zip(ids, answers, strict=True)]


def _make(name: str, target: Backend, checkpoint: Checkpoint, settings: EngineConfig) -> Backend:
    kind, _, argument = name.partition(":")
    weights, casts = OWN_WEIGHTS[kind](checkpoint, argument)
    return make_backend(target.name, weights, settings, target, casts)


def _agreement(draft: Backend, continued: list[Continued]) -> float:
    """Share of the continuations' tokens that the draft, shown all before, finds most likely."""
    same = []
    for prompt, ids in continued:
        logits = logits_of(draft, (prompt + ids)[:-1], draft.max_rows)
        same.append(np.array(ids) == np.concatenate([some.argmax(axis=1) for some in logits])[len(prompt) - 1 :])
    return float(np.concatenate(same).mean())


def _costs(draft: Backend, target: Backend, rounds: int) -> list[float]:
    """Time of a forward of one row over the target's, each round."""
    caches = [(backend, backend.new_cache(1, DEPTH + 1)) for backend in (draft, target)]
    for backend, cache in caches:
        for first in range(0, DEPTH, backend.max_rows):
            _forward(backend, cache, first, min(backend.max_rows, DEPTH - first))
    costs = []
    for _ in range(rounds):
        times = []
        for backend, cache in caches:
            start = perf_counter()
            _forward(backend, cache, DEPTH, 1)
            times.append(perf_counter() - start)
            cache.truncate(0, DEPTH)
        costs.append(times[0] / times[1])
    return costs


def _forward(backend: Backend, cache: KVCache, first: int, rows: int) -> None:
    positions = np.arange(first, first + rows, dtype=np.int32)
    backend.forward(ForwardBatch(positions, positions, np.zeros(1, np.int32), np.array([0, rows], np.int32)), cache)


if __name__ == "__main__":
    typer.run(main)

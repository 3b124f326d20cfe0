"""Greedy output must be the same token ids whatever drafts, threads, chunks and batches are used. Exits 1 if it is not.

    python benchmarks/identity.py smollm2-135m-instruct HUMANEVAL.jsonl:prompt:20 MT_BENCH.jsonl:turns:20

Each text argument is a JSON-lines file, the field that holds the prompt (of a list, the first), and how many lines to take;
:chat after it makes what a user says of it.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from record import Rounds, record, save
from rich.console import Console
from rich.progress import track

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.config import EngineConfig, SamplingParams
from cpuspec.engine.llm import LLM
from cpuspec.evaluate.prompts import prompt_ids, read_prompts
from cpuspec.tokenizer import make_tokenizer

# Name, draft, threads, rows of a forward, prompts at once.
ARMS = (
    ("plain, 2 threads, one at a time", "none", 2, 256, 1),
    ("ngram, 2 threads, one at a time", "ngram", 2, 256, 1),
    ("plain, 1 thread, 8 at once", "none", 1, 256, 8),
    ("ngram, 1 thread, 8 at once", "ngram", 1, 256, 8),
    ("plain, 2 threads, 8 at once, prefill in chunks of 7", "none", 2, 7, 8),
    ("suffix:tree, 2 threads, 8 at once", "suffix:tree", 2, 256, 8),
    ("auto, 2 threads, one at a time", "auto", 2, 256, 1),
    ("self:mxfp4, 2 threads, one at a time", "self:mxfp4", 2, 256, 1),
    ("four levels, 1 thread, 8 at once", "ngram,skip:4@2,self:int3_g32_asym@4,self:mxfp4@6", 1, 256, 8),
    ("a token source that a draft model continues, 2 threads, 8 at once", "ngram@3+self:int2_g32_asym@2", 2, 256, 8),
)


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    texts: Annotated[list[str], typer.Argument(help="FILE:FIELD:COUNT")],
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here as well.")] = None,
) -> None:
    """Generate with every arm and compare token ids with the first."""
    checkpoint = open_checkpoint(resolve_model(model))
    tokenizer = make_tokenizer(checkpoint)
    prompts = [prompt_ids(tokenizer, prompt) for text in texts for prompt in read_prompts(text).prompts]
    wanted, arms = None, []
    rounds = Rounds(len(ARMS), max(threads for _, _, threads, _, _ in ARMS))
    for number in rounds:
        name, draft, threads, rows, at_once = ARMS[number]
        got, accepted, drafted = _run(checkpoint, prompts, max_tokens, name, draft, threads, rows, at_once)
        wanted = wanted or got
        same = sum(a == b for a, b in zip(wanted, got, strict=True))
        arms.append({"arm": name, "identical_prompts": same, "num_draft_tokens": drafted, "num_accepted_tokens": accepted})
        print(json.dumps(arms[-1]), flush=True)
    assert wanted is not None, "there is at least one arm"
    figures = {"prompts": len(prompts), "tokens": sum(map(len, wanted)), "arms": arms}
    save(record("identity", checkpoint.path.name, rounds) | figures, json_file)
    if any(arm["identical_prompts"] != len(prompts) for arm in arms):
        raise typer.Exit(1)


def _run(
    checkpoint: Checkpoint, prompts: list[list[int]], max_tokens: int, name: str, draft: str, threads: int, rows: int, at_once: int
) -> tuple[list[list[int]], int, int]:
    settings = EngineConfig(max_sequences=at_once, threads=threads, max_rows=rows, context_length=2048)
    llm = LLM.from_backend(make_backend("numba", checkpoint, settings), make_tokenizer(checkpoint), draft, settings, checkpoint)
    params = SamplingParams(max_tokens=max_tokens)
    ids, accepted, drafted = [], 0, 0
    with llm:
        batches = range(0, len(prompts), at_once)
        for start in track(batches, description=name, console=Console(stderr=True)):
            for completion in llm.generate(prompts[start : start + at_once], params):
                ids.append(completion.token_ids)
                for level in completion.stats.levels.values():
                    accepted += level.num_accepted_tokens
                    drafted += level.num_draft_tokens
    return ids, accepted, drafted


if __name__ == "__main__":
    typer.run(main)

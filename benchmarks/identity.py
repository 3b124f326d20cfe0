"""Greedy output must be the same token ids whatever drafts, threads, chunks and batches are used. Exits 1 if it is not.

    python benchmarks/identity.py qwen2.5-coder-1.5b-instruct HUMANEVAL.jsonl:prompt:50 MT_BENCH.jsonl:turns:50 \
        --draft-model smollm2-135m-instruct

Each text argument is a JSON-lines file, the field that holds the prompt (of a list, the first), and how many lines to take;
:chat after it makes what a user says of it.
"""

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from record import Rounds, record, save
from rich.console import Console
from rich.progress import track

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.engine.draft_spec import MODELS
from cpuspec.engine.llm import LLM
from cpuspec.evaluate.prompts import prompt_ids, read_prompts
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.speculation.drafters.vocab import same_tokens
from cpuspec.text import make_tokenizer

# Every kind of drafter, and chains of them; OTHER is the draft model that is given, whose vocabulary is not the target's.
DRAFTS = (
    "ngram",
    "ngram:tree",
    "suffix",
    "suffix:tree",
    "self:mxfp4",
    "skip:4",
    "OTHER",
    "text:OTHER",
    "auto",
    "auto,self:mxfp4,text:OTHER",
    "ngram,self:mxfp4@4",
    "OTHER@3,self:mxfp4@5",
    "ngram,skip:4@2,self:mxfp4@5",
    "suffix,text:OTHER@3,self:int3_g32_asym@4,self:mxfp4@6",
    "ngram@3+self:int2_g32_asym@2",
    "self:mxfp4@3+suffix",
)
_OTHER = "OTHER"
_ROWS, _AT_ONCE = 256, 8


class Arm(NamedTuple):
    """One way of answering: how it drafts, threads, prompts at once, rows of a forward."""

    draft: str
    threads: int
    at_once: int
    rows: int

    def __str__(self) -> str:
        chunks = "" if self.rows == _ROWS else f", prefill in chunks of {self.rows}"
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{self.draft}, {threads}, {'one' if self.at_once == 1 else self.at_once} at a time{chunks}"


_PLAIN = (Arm("none", 2, 1, _ROWS), Arm("none", 1, _AT_ONCE, _ROWS), Arm("none", 2, _AT_ONCE, 7))


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    texts: Annotated[list[str], typer.Argument(help="FILE:FIELD:COUNT")],
    draft_model: Annotated[
        str | None, typer.Option(help="A model with another vocabulary that drafts, by tokens and by text; without it none does.")
    ] = None,
    in_turn: Annotated[bool, typer.Option("--in-turn", help="Each draft with one number of threads only: half the time.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.", min=1)] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what is known after each arm here as well.")] = None,
) -> None:
    """Generate with every arm and compare token ids with the first."""
    checkpoint = open_checkpoint(resolve_model(model))
    tokenizer = make_tokenizer(checkpoint)
    if draft_model and same_tokens(tokenizer, make_tokenizer(open_checkpoint(resolve_model(draft_model)))):
        raise typer.BadParameter(f"--draft-model {draft_model} has the vocabulary of {model}; give one with another")
    prompts = [prompt_ids(tokenizer, prompt) for text in texts for prompt in read_prompts(text).prompts]
    wanted: list[list[int]] = []
    results: list[dict[str, Any]] = []
    arms = make_arms(draft_model, in_turn)
    rounds = Rounds(len(arms), max(arm.threads for arm in arms))
    for number in rounds:
        got, drafted, accepted = _run(checkpoint, prompts, max_tokens, arms[number])
        wanted = wanted or got
        same = sum(a == b for a, b in zip(wanted, got, strict=True))
        results.append(
            {"arm": str(arms[number]), "identical_prompts": same, "num_draft_tokens": drafted, "num_accepted_tokens": accepted}
        )
        print(json.dumps(results[-1]), flush=True)
        figures = {"prompts": len(prompts), "tokens": sum(map(len, wanted)), "arms": results}
        save(record("identity", checkpoint.path.name, rounds) | figures, json_file)
    if any(arm["identical_prompts"] != len(prompts) for arm in results):
        raise typer.Exit(1)


def make_arms(draft_model: str | None, in_turn: bool) -> list[Arm]:
    """Plain decoding in three ways, the first of which the others are compared with, and every draft with 1 and 2 threads, or in
    turn with one of them; those without a model, which are the quickest, one prompt at a time with 2.
    """
    arms = list(_PLAIN)
    for number, draft in enumerate(draft for draft in DRAFTS if draft_model or _OTHER not in draft):
        at_once = _AT_ONCE if any(name in draft for name in (*MODELS, _OTHER)) else 1
        both = (Arm(draft, 1, _AT_ONCE, _ROWS), Arm(draft, 2, at_once, _ROWS))
        arms += [both[number % 2]] if in_turn else both
    return [arm._replace(draft=arm.draft.replace(_OTHER, draft_model or "")) for arm in arms]


def _run(checkpoint: Checkpoint, prompts: list[list[int]], max_tokens: int, arm: Arm) -> tuple[list[list[int]], int, int]:
    """Every prompt's ids, and the tokens drafted and accepted, of all levels."""
    room = min(max(map(len, prompts)) + max_tokens, checkpoint.config.context_length)
    settings = EngineConfig(max_sequences=arm.at_once, threads=arm.threads, max_rows=arm.rows, context_length=room)
    backend = make_backend("numba", checkpoint, settings)
    params = SamplingParams(max_tokens=max_tokens)
    ids, drafted, accepted = [], 0, 0
    with LLM.from_backend(backend, make_tokenizer(checkpoint), arm.draft, settings, checkpoint) as llm:
        batches = range(0, len(prompts), arm.at_once)
        for start in track(batches, description=str(arm), console=Console(stderr=True)):
            for completion in llm.generate(prompts[start : start + arm.at_once], params):
                ids.append(completion.token_ids)
                for level in completion.stats.levels.values():
                    drafted += level.num_draft_tokens
                    accepted += level.num_accepted_tokens
    return ids, drafted, accepted


if __name__ == "__main__":
    typer.run(main)

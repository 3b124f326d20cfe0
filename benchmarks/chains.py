"""What drafts gain: tokens/s over plain decoding, prompt by prompt, of draft specs and of auto. Exits 1 if an id differs.

    python benchmarks/chains.py qwen2.5-coder-1.5b-instruct HUMANEVAL.jsonl:prompt:20:complete MBPP.jsonl:text:100 \
        --quote WIKITEXT.txt:20 --random-words 10 --arm ngram --arm suffix,self:mxfp4
    python benchmarks/chains.py qwen2.5-coder-1.5b-instruct HUMANEVAL.jsonl:prompt:20:complete --llama-cpp PROGRAMS_DIR \
        --python torch=VENV/bin/python

Each text argument is FILE:FIELD:COUNT of a JSON-lines file: raw prompts, with :chat what a user says, with :complete a function
that a user asks to complete.
Every arm answers a prompt before the next prompt has its turn, greedily or, with --temperature, by a seed, which gives the same
answer with drafts and without where they are no draws. Answers end where the model ends them. The ratio of a prompt is of
tokens after the first step over the time they took. Means are geometric, intervals bootstrapped (95 %).
llama.cpp's and transformers' drafts (`chains_peers.py`) have their turns on the same prompts, if asked for; that their answers
differ from those of their own plain decoding is counted and no error. One trained head in both:

    cpuspec train export smollm2-135m-instruct my-head my-head.gguf
    python benchmarks/chains.py smollm2-135m-instruct HUMANEVAL.jsonl:prompt:10 --arm my-head@3 --no-auto --llama-cpp PROGRAMS_DIR \
        --llama-cpp-draft "draft-eagle3 --spec-draft-model my-head.gguf --spec-draft-n-max 3"
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from statistics import geometric_mean
from string import ascii_lowercase
from typing import Annotated, Any

import typer
from chains_peers import (
    LLAMA_CPP_DRAFTS,
    PLAIN,
    Answer,
    Choice,
    Peers,
    by_position,
    open_peers,
    peer_row,
    peer_table,
    summarize_peers,
)
from instruction_sets import NATIVE, in_use
from peers import read_interpreters
from peers_report import who
from record import PeerError, Rounds, record, save, say

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.cli.answer import rounds_table
from cpuspec.engine.draft_spec import check_spec
from cpuspec.engine.llm import LLM, Completion
from cpuspec.environment import usable_cores
from cpuspec.errors import ConfigError, CpuspecError
from cpuspec.evaluate.prompts import PromptSet, prompt_ids, read_count, read_prompts, read_text
from cpuspec.evaluate.statistics import mean_ratio
from cpuspec.formats import get_format
from cpuspec.metrics import sum_levels
from cpuspec.quantize.cast import dequantized
from cpuspec.settings import SamplingParams, SpecConfig
from cpuspec.text import make_tokenizer

_NO_REPEATS, _MORE_THAN_ANY_LOGIT = "no repeats", 1e4
_WARM_UP, _WARM_UP_TOKENS = "one two three one two three one two", 32


def read_quotes(text: str) -> PromptSet:
    """Passages of a text file, given as FILE:COUNT, to be summarized and quoted: its first paragraphs of a fair length."""
    path, _, count = text.rpartition(":")
    number = read_count(count, text, "wanted FILE:COUNT")
    passages = [line.strip() for line in read_text(Path(path)).splitlines() if len(line.strip()) in range(400, 1200)]
    if len(passages) < number:
        raise ConfigError(f"{path} has {len(passages)} paragraphs of a fair length, and {text!r} asks for {number}")
    asked = "Summarize this passage in two sentences. Then quote it word for word.\n\n"
    return PromptSet(f"{Path(path).stem}:quote", tuple([{"role": "user", "content": asked + one}] for one in passages[:number]))


def random_words(count: int, seed: int = 0) -> PromptSet:
    """Prompts of 60 words of random letters, in which nothing can be looked up."""
    rng = random.Random(seed)
    words = [["".join(rng.choices(ascii_lowercase, k=rng.randint(3, 9))) for _ in range(60)] for _ in range(count)]
    return PromptSet("random words", tuple(map(" ".join, words)))


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    texts: Annotated[list[str] | None, typer.Argument(help="FILE:FIELD:COUNT, with :chat or :complete for conversations.")] = None,
    arm: Annotated[list[str] | None, typer.Option("--arm", metavar="SPEC", help="A draft spec to measure. Repeatable.")] = None,
    auto: Annotated[bool, typer.Option(help="Whether auto is an arm.")] = True,
    quote: Annotated[str | None, typer.Option("--quote", metavar="FILE:COUNT", help="Passages to summarize and quote.")] = None,
    words: Annotated[int, typer.Option("--random-words", metavar="COUNT", min=0, help="Prompts of random letters.")] = 0,
    no_repeats: Annotated[
        int, typer.Option(metavar="COUNT", min=0, help="Such prompts, answered without a token of theirs or any twice.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.", min=2)] = 128,
    target_dtype: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Decode the file to this format, as bf16, for target and self-casts."),
    ] = None,
    llama_cpp: Annotated[Path | None, typer.Option(help="Directory of llama.cpp's programs: its drafts take part.")] = None,
    llama_cpp_drafts: Annotated[
        list[str] | None,
        typer.Option("--llama-cpp-draft", metavar="TYPE", help="Its --spec-type, more of its options after it. Repeatable."),
    ] = None,
    python: Annotated[list[str] | None, typer.Option(help="torch=PATH, an interpreter: transformers takes part.")] = None,
    lookup: Annotated[int, typer.Option(metavar="N", help="transformers' prompt_lookup_num_tokens.", min=1)] = 10,
    assistant: Annotated[str | None, typer.Option(metavar="MODEL", help="transformers drafts with this model as well.")] = None,
    isa: Annotated[str, typer.Option(help="llama.cpp's library for this instruction set, as in peers.py.")] = NATIVE,
    temperature: Annotated[float, typer.Option(help="Of cpuspec's arms; above 0 each prompt has a seed of its own.", min=0)] = 0.0,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Measure every arm on every prompt and print a table for each set of prompts."""
    specs = list(dict.fromkeys([PLAIN, *(arm or []), *(["auto"] if auto else [])]))
    try:
        for spec in specs:
            check_spec(SpecConfig.parse(spec))
        sets = [read_prompts(text) for text in texts or []]
        sets += [read_quotes(quote)] if quote else []
        sets += [random_words(words)] if words else []
        sets += [replace(random_words(no_repeats, seed=1), name=_NO_REPEATS)] if no_repeats else []
        checkpoint = open_checkpoint(resolve_model(model))
        interpreter = read_interpreters(python or [], ("torch",)).get("torch")
        helper = resolve_model(assistant) if assistant else None
        choice = Choice(llama_cpp, tuple(llama_cpp_drafts or LLAMA_CPP_DRAFTS), interpreter, lookup, helper, isa)
        choice.check(checkpoint, target_dtype)
        checkpoint = dequantized(checkpoint, get_format(target_dtype)) if target_dtype else checkpoint
    except (CpuspecError, PeerError) as error:
        raise typer.BadParameter(str(error)) from None
    if temperature and (llama_cpp or python):
        raise typer.BadParameter("other engines decode greedily here; leave out --temperature, or --llama-cpp and --python")
    if not sets:
        raise typer.BadParameter("there are no prompts; give FILE:FIELD:COUNT, --quote, --random-words or --no-repeats")
    tokenizer = make_tokenizer(checkpoint)
    questions = {one.name: [prompt_ids(tokenizer, prompt) for prompt in one.prompts] for one in sets}
    warm_up = prompt_ids(tokenizer, _WARM_UP)
    room = max(len(ids) for ids in chain([warm_up], *questions.values())) + max_tokens
    room = min(room, checkpoint.config.context_length)
    params, rounds = (
        SamplingParams(max_tokens=max_tokens, temperature=temperature),
        Rounds(len(questions), threads or usable_cores()),
    )
    compared = "auto" if "auto" in specs else specs[-1]  # with it peers are
    rows: list[dict[str, Any]] = []
    summaries: dict[str, dict[str, Any]] = {}
    peer_summaries: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        llms = {}
        for spec in specs:
            say(f"loading {spec}")
            llms[spec] = stack.enter_context(LLM(checkpoint, spec, threads=threads, context_length=room, max_sequences=1))
            llms[spec].generate(warm_up, SamplingParams(max_tokens=min(max_tokens, _WARM_UP_TOKENS)))
        peers = open_peers(choice, checkpoint.path, rounds.threads, room, sorted(tokenizer.eos_ids), stack)
        instructions = {"cpuspec": in_use(), **peers.builds}
        print(who(instructions), flush=True)
        for peer in list(peers.arms):
            peers.answer(peer, warm_up, max_tokens)
        for number in rounds:
            name, each = list(questions.items())[number]
            rule, others = (_no_repeats, Peers()) if name == _NO_REPEATS else (_as_it_is, peers)  # peers have no such rule
            turns = [_in_turn(llms, others, ids, replace(rule(params, ids), seed=i), i) for i, ids in enumerate(each)]
            answers, peer_answers = [own for own, _ in turns], [theirs for _, theirs in turns]
            rows += [
                {"set": name, "prompt": i, "arms": _row(own)} | ({"peers": peer_row(theirs)} if theirs else {})
                for i, (own, theirs) in enumerate(turns)
            ]
            summaries[name] = {spec: summarize([one[spec] for one in answers], [one[PLAIN] for one in answers]) for spec in specs}
            print(table(name, summaries[name]), flush=True)
            if others.arms:
                whole = {peer: [one[peer] for one in peer_answers] for peer in others.arms}
                peer_summaries[name] = summarize_peers(whole, [one[compared].stats.tokens_per_s for one in answers])
                print(peer_table(peer_summaries[name], compared), flush=True)
        parts = {spec: llm.round_parts() for spec, llm in llms.items()}
        for spec, of in parts.items():
            print("\n".join([f"\n{spec}", "", *rounds_table(of)]), flush=True)
        memory = {spec: [asdict(level) for level in llm.memory()] for spec, llm in llms.items()}
    head = record("chains", checkpoint.path.name, rounds) | {
        "target_dtype": target_dtype,
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    rounds_of = {spec: [asdict(part) for part in of] for spec, of in parts.items()}
    head |= {"sets": summaries, "memory": memory, "rounds_of": rounds_of, "prompts": rows}
    if peers.abouts or peers.failed:
        head["instructions"] = instructions
        head["peers"] = {"compared": compared, "engines": peers.abouts, "failed": peers.failed, "sets": peer_summaries}
    save(head, json_file)
    if any(one["num_identical"] < one["num_prompts"] for arms in summaries.values() for one in arms.values()):
        raise typer.Exit(1)


def _as_it_is(params: SamplingParams, ids: list[int]) -> SamplingParams:
    return params


def _no_repeats(params: SamplingParams, ids: list[int]) -> SamplingParams:
    """For an answer that has no token of the prompt, none twice, and no end: whatever text predicts is wrong."""
    never = dict.fromkeys(ids, float("-inf"))
    return replace(params, logit_bias=never, presence_penalty=_MORE_THAN_ANY_LOGIT, ignore_eos=True)


def summarize(answers: Sequence[Completion], plain: Sequence[Completion]) -> dict[str, Any]:
    """An arm's figures over the prompts of a set; ratios of those prompts that took both arms more than a step."""
    rates = [one.stats.tokens_per_s for one in answers]
    over_plain, interval = mean_ratio(rates, [one.stats.tokens_per_s for one in plain])
    known = [rate for rate in rates if rate is not None]
    num_tokens = sum(one.stats.num_new_tokens for one in answers)
    return {
        "num_prompts": len(answers),
        "num_identical": sum(one.token_ids == other.token_ids for one, other in zip(answers, plain, strict=True)),
        "tokens_per_s": geometric_mean(known) if known else None,
        "over_plain": over_plain,
        "over_plain_interval": list(interval),
        "num_tokens": num_tokens,
        "tokens_per_forward": num_tokens / (num_tokens - sum(one.stats.num_forwards_saved for one in answers)),
        "levels": {name: level.as_dict() for name, level in sum_levels(one.stats.levels for one in answers).items()},
    }


def table(name: str, arms: Mapping[str, Mapping[str, Any]]) -> str:
    """A set's arms as Markdown."""
    columns = ("drafts", "tokens/s", "over plain", "95 %", "tokens per forward", "identical", "accepted of drafted (by position)")
    lines = [f"\n{name}\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for spec, one in arms.items():
        low, high = one["over_plain_interval"]
        levels = one["levels"].items()
        accepted = "; ".join(f"{level} {counts['accepted_per_proposed']:.0%} ({by_position(counts)})" for level, counts in levels)
        speed = f"{one['tokens_per_s']:.1f} | {one['over_plain']:.2f}x | {low:.2f} to {high:.2f}" if one["over_plain"] else " | | "
        same = f"{one['num_identical']} of {one['num_prompts']}"
        lines.append(f"| {spec} | {speed} | {one['tokens_per_forward']:.2f} | {same} | {accepted} |")
    return "\n".join(lines)


def _in_turn(
    llms: Mapping[str, LLM], peers: Peers, ids: list[int], params: SamplingParams, first: int
) -> tuple[dict[str, Completion], dict[str, Answer]]:
    """Every arm's answer, and every peer's that has one; who begins changes from prompt to prompt."""
    names = [*llms, *peers.arms]
    own: dict[str, Completion] = {}
    others: dict[str, Answer] = {}
    for name in names[first % len(names) :] + names[: first % len(names)]:
        if name in llms:
            own[name] = llms[name].generate(ids, params)[0]
        elif (answer := peers.answer(name, ids, params.max_tokens)) is not None:
            others[name] = answer
    return {name: own[name] for name in names if name in own}, {name: others[name] for name in names if name in others}


def _row(answers: Mapping[str, Completion]) -> dict[str, Any]:
    """The figures of a prompt, by arm."""
    return {
        spec: {
            "identical": one.token_ids == answers[PLAIN].token_ids,
            "over_plain": _over(one, answers[PLAIN]),
            "tokens_per_s": one.stats.tokens_per_s,
            "num_tokens": one.stats.num_new_tokens,
            "num_forwards_saved": one.stats.num_forwards_saved,
            "levels": {name: asdict(level) for name, level in one.stats.levels.items()},
        }
        for spec, one in answers.items()
    }


def _over(one: Completion, plain: Completion) -> float | None:
    if one.stats.tokens_per_s is None or plain.stats.tokens_per_s is None:
        return None
    return one.stats.tokens_per_s / plain.stats.tokens_per_s


if __name__ == "__main__":
    typer.run(main)

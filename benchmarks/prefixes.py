"""An agent's session: how soon the first token of each turn comes with the prefix cache, over the same prompt computed afresh.

    python benchmarks/prefixes.py smollm2-135m-instruct --turns 12 --system-tokens 4096

Each turn's prompt is the system prompt and the whole conversation so far, made by the model's chat template. Three LLMs answer it
in turns: one that keeps its prefix cache, one that keeps nothing, and one that is closed before each turn and started again over
the directory of the prefix cache on the disk. Their greedy answers must be the same. Decoding is plain, so answers cost the same.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from record import Rounds, print_figures, record, save, say, spread

from cpuspec import LLM
from cpuspec.checkpoints.download import resolve_model
from cpuspec.engine.llm import Completion, Message
from cpuspec.settings import EngineConfig

FRESH, CACHED, RESTARTED = "fresh", "prefix cache", "prefix cache after a restart"
TTFT, OVER = "time to first token, s", "time to first token over a fresh one"
ANSWER_TOKENS = 24


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    turns: Annotated[int, typer.Option(help="Turns of the session.", min=2)] = 12,
    system_tokens: Annotated[int, typer.Option(help="Tokens of the system prompt, at least.", min=1)] = 4096,
    fresh_every: Annotated[
        int, typer.Option(help="Measure fresh prompts and restarts in each turn of this number only.", min=1)
    ] = 1,
    threads: Annotated[int, typer.Option(help="Threads.", min=1)] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print a line for each turn, and the figures of all turns from the second on."""
    path, settings = resolve_model(model), EngineConfig(threads=threads, max_sequences=1)
    samples: dict[str, dict[str, list[float]]] = {TTFT: {}, OVER: {}}
    with tempfile.TemporaryDirectory() as directory, LLM(path, "none", settings=settings, prefix_cache_gb=0) as fresh:
        warm = LLM(path, "none", settings=settings)
        messages, passed = [{"role": "system", "content": system_prompt(fresh, system_tokens)}], Rounds(turns, threads)
        for number in passed:
            messages.append({"role": "user", "content": f"Question {number + 1}: what does rule {7 * number + 3} say?"})
            answers = {CACHED: answer(warm, messages)}
            if number % fresh_every == 0 or number == turns - 1:
                answers[FRESH] = answer(fresh, messages)
                with LLM(path, "none", settings=settings, prefix_cache_dir=directory) as again:
                    answers[RESTARTED] = answer(again, messages)
                assert len({tuple(one.token_ids) for one in answers.values()}) == 1, "an answer depends on the cache"
            for name, one in answers.items():
                assert one.stats.ttft_s is not None, "an answer has a first token"
                if number:
                    samples[TTFT].setdefault(name, []).append(one.stats.ttft_s)
                    if FRESH in answers:
                        samples[OVER].setdefault(name, []).append(one.stats.ttft_s / (answers[FRESH].stats.ttft_s or 1))
            cached = answers[CACHED].stats
            times = ", ".join(f"{name} {one.stats.ttft_s:.3f} s" for name, one in answers.items())
            say(f"turn {number + 1}: {cached.num_prompt_tokens} tokens, {cached.num_cached_tokens} cached; first token: {times}")
            messages.append({"role": "assistant", "content": answers[CACHED].text})
        warm.close()
    figures: dict[str, Any] = {name: {engine: spread(values) for engine, values in of.items()} for name, of in samples.items()}
    print_figures(figures)
    details = {"turns": turns, "system_tokens": system_tokens, "figures": figures}
    save(record("prefixes", path.name, passed) | details, json_file)


def answer(llm: LLM, messages: list[Message]) -> Completion:
    """The greedy answer to a conversation."""
    return llm.chat(messages, max_tokens=ANSWER_TOKENS)


def system_prompt(llm: LLM, num_tokens: int) -> str:
    """Rules, none like another, of at least that many tokens."""
    text, number = "You answer questions about these rules.\n", 0
    while len(llm.tokenizer.encode(text)) < num_tokens:
        rules = range(number + 1, number + 26)
        text += "".join(f"Rule {i}: file {i * 37 % 211}.py may import package {i * 53 % 97} only on day {i % 7}.\n" for i in rules)
        number += 25
    return text


if __name__ == "__main__":
    typer.run(main)

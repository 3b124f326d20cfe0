"""Make `cpuspec/cli/COMING_FROM.md`, what options, commands and fields of other programs are here, from the tables in the code.

python tools/make_coming_from.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpuspec.cli.spellings import LLAMA, OLLAMA, OTHER_COMMANDS, SPELLINGS, VLLM
from cpuspec.server import llama_server
from cpuspec.server.fields import NEUTRAL, REFUSED, SAME_NAMES, TRANSLATED
from cpuspec.server.messages import MessagesBody
from cpuspec.server.ollama import GenerateBody
from cpuspec.server.responses import ResponsesBody
from cpuspec.server.schema import Body, ChatBody, CompletionBody, SamplingFields

BODIES: tuple[tuple[str, type[Body]], ...] = (
    ("`/v1/chat/completions`", ChatBody),
    ("`/v1/completions`", CompletionBody),
    ("`/v1/responses`", ResponsesBody),
    ("`/v1/messages`", MessagesBody),
    ("`/completion`", llama_server.CompletionBody),
    ("`/infill`", llama_server.InfillBody),
)

# vLLM's and llama-cpp-python's Python.
PYTHON = (
    (
        "`LLM(model, max_model_len=N, max_num_seqs=N)`, `Llama(model_path, n_ctx=N)`",
        "`LLM(model, context_length=N, max_sequences=N)`",
    ),
    ("`LLM(model, speculative_config={...})`", "the same, or `spec=`"),
    ("`SamplingParams(...)`", "the same names; `logits_processors` is refused, as code of a caller does not run in a step"),
    ("`llm.generate(prompts, params)[0].outputs[0].text`", "the same; `[0].text` is that of the first answer"),
    (
        "`outputs[0].logprobs[0][id].logprob`",
        "`logprobs[0].logprob` of the chosen token; `.top` are pairs of ids and log-probabilities",
    ),
    ("`llm.chat(messages)[0]`", "`llm.chat(messages)`; a list of conversations gives a list"),
    ("`llm.embed(texts)[0].outputs.embedding`, `llama.embed(text)`", "`llm.embed(texts)[0]`"),
    ("`llm.score(query, documents)[0].outputs.score`", "`llm.rank(query, documents)[0]`"),
    ("`llama(text)['choices'][0]['text']`", "`llm.generate(text)[0].text`, or piece by piece `llm.stream(text)`"),
    ("`llama.create_chat_completion(messages)['choices'][0]['message']['content']`", "`llm.chat(messages).text`"),
    ("`AsyncLLMEngine`", "`AsyncLLM`"),
)

PAGE = Path(__file__).resolve().parent.parent / "cpuspec" / "cli" / "COMING_FROM.md"


def page() -> str:
    """The page's text."""
    parts = [
        "# Coming from llama.cpp, vLLM or Ollama",
        "Made by `tools/make_coming_from.py` from `cli/spellings.py` and `server/fields.py`.",
        "## Commands",
        _table(("there", "here"), [(f"`{name}`", f"`{here}`") for name, here in OTHER_COMMANDS.items()]),
        "## Options",
        "An option with one of ours beside it may be typed as it is. What is left out is told on stderr; others are errors. An "
        "option of the same name on both sides is not listed, and one that is neither listed nor ours has no counterpart.",
    ]
    for program in (LLAMA, VLLM, OLLAMA):
        rows = []
        for one in (one for one in SPELLINGS if one.program == program):
            here = (
                f"`{one.ours} {one.part}`"
                if one.part
                else f"`{one.ours}`"
                if one.ours
                else f"left out: {one.why}"
                if one.passes
                else one.why
            )
            rows.append((", ".join(f"`{name}`" for name in one.names), here))
        parts += [f"### {program}", _table(("there", "here"), rows)]
    bodies: list[type[Body]] = [GenerateBody, *(body for _, body in BODIES)]
    taken = set().union(*map(_taken, bodies))
    same = [(f"`{names[0]}`", ", ".join(f"`{name}`" for name in names[1:])) for names in SAME_NAMES]
    parts += [
        "## Python",
        _table(("vLLM, llama-cpp-python", "here"), PYTHON),
        "## Fields of requests",
        "Names of one field; each endpoint takes all of them:",
        _table(("field", "other names"), same),
        f"Of sampling, taken by every endpoint that answers: {_listed(_taken(SamplingFields))}.",
        _table(("endpoint", "takes besides"), [(path, _listed(_taken(body) - _taken(SamplingFields))) for path, body in BODIES]),
        "Ollama's endpoints take what its API has, and the fields of chat completions.",
        f"Translated into fields of the endpoint: {_listed(TRANSLATED)}.",
        "Ignored, with a note in the response's header where the value asks for something: unknown fields, those of others, "
        f"and {_listed(NEUTRAL.keys() - TRANSLATED.keys() - REFUSED.keys() - taken)}.",
        "Refused, because the answer would be another one: "
        + ", ".join(f"`{name}` (send `{instead}`)" for name, instead in REFUSED.items())
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _taken(body: type[Body]) -> set[str]:
    """The fields of a body that are looked at; those that change nothing may hold anything."""
    return {name for name, field in body.model_fields.items() if field.annotation is not Any}


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows))


def _listed(names: object) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))  # type: ignore[call-overload]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")

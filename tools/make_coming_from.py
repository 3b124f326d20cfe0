"""`cpuspec/cli/COMING_FROM.md`: what options, commands and fields of other programs are here, from the tables in the code.

`tools/make_readme_tables.py` writes it.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpuspec.cli.spellings import LLAMA, OLLAMA, OTHER_COMMANDS, SPELLINGS, VLLM
from cpuspec.server import llama_server
from cpuspec.server.fields import REFUSED, SAME_NAMES, TRANSLATED
from cpuspec.server.messages import MessagesBody
from cpuspec.server.responses import ResponsesBody
from cpuspec.server.schema import Body, ChatBody, CompletionBody, SamplingFields

BODIES: tuple[tuple[str, type[Body]], ...] = (
    ("`/v1/chat/completions`", ChatBody),
    ("`/v1/completions` (and of chats' fields those of answers, grammars and log-probabilities)", CompletionBody),
    ("`/v1/responses`", ResponsesBody),
    ("`/v1/messages`", MessagesBody),
    ("`/completion`", llama_server.CompletionBody),
    ("`/infill`", llama_server.InfillBody),
)

EVERYWHERE = frozenset({"max_tokens", "model", "stop", "stream"})

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
        "Made by `tools/make_readme_tables.py` from `cli/spellings.py` and `server/fields.py`.",
        "## Commands",
        _table(("there", "here"), [(f"`{name}`", f"`{here}`") for name, here in OTHER_COMMANDS.items()]),
        "## Options",
        "An option with one of ours beside it may be typed as it is. What is left out is told on stderr; others are errors. "
        "Options of the same name on both sides are not listed.",
    ]
    for program in (LLAMA, VLLM, OLLAMA):
        taken_here, others = list[tuple[str, str]](), dict[str, list[str]]()
        for one in (one for one in SPELLINGS if one.program == program):
            names = ", ".join(f"`{name}`" for name in one.names)
            if one.ours:
                taken_here.append((names, f"`{one.ours} {one.part}`" if one.part else f"`{one.ours}`"))
            else:
                others.setdefault(f"{'left out' if one.passes else 'refused'}: {one.why}", []).append(names)
        parts += [f"### {program}"]
        parts += [_table(("there", "here"), taken_here)] if taken_here else []
        parts += ["\n".join(_item(f"**{why}**", ", ".join(names)) for why, names in sorted(others.items()))]
    both = _taken(ChatBody) & _taken(CompletionBody)
    rows = [(path, body, both if body is CompletionBody else frozenset()) for path, body in BODIES]
    same = [(f"`{names[0]}`", ", ".join(f"`{name}`" for name in names[1:])) for names in SAME_NAMES]
    parts += [
        "## Python",
        _table(("vLLM, llama-cpp-python", "here"), PYTHON),
        "## Fields of requests",
        "Names of one field; each endpoint takes all of them:",
        _table(("field", "other names"), same),
        f"Of sampling, taken by every endpoint that answers: {_listed(_taken(SamplingFields))}.",
        f"Nearly every endpoint takes {_listed(EVERYWHERE)}. Beside these:",
        "\n".join(_item(path, _listed(_taken(body) - _taken(SamplingFields) - EVERYWHERE - like)) for path, body, like in rows),
        "Ollama's endpoints take what its API has, and the fields of chat completions.",
        f"Translated into fields of the endpoint: {_listed(TRANSLATED)}.",
        "Ignored, and named in the response's header where the value asks for something: unknown fields, and `NEUTRAL` in "
        "`server/fields.py`.",
        "Refused, because the answer would be another one: "
        + ", ".join(f"`{name}` (send `{instead}`)" for name, instead in REFUSED.items())
        + ".",
    ]
    return "\n\n".join(part if part.startswith(("|", "*", "#")) else _wrapped(part) for part in parts) + "\n"


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 160, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _item(head: str, text: str) -> str:
    return _wrapped(f"* {head}: {text}", "  ")


def _taken(body: type[Body]) -> set[str]:
    """The fields of a body that are looked at; those that change nothing may hold anything."""
    return {name for name, field in body.model_fields.items() if field.annotation is not Any}


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows))


def _listed(names: object) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))  # type: ignore[call-overload]

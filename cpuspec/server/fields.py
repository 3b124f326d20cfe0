"""The fields of requests as clients of other servers write them: other names, other forms of a value, other fields.

A body declares the fields of its endpoint. The tables of this module hold the other names and forms, for all endpoints and for the
lines of a batch. Fields that are in neither mean nothing here; `bodies.py` tells the client.
Sources: llama.cpp's server README (b11434), vLLM's protocol.py (0.12), Ollama's API, OpenRouter's and LiteLLM's references.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Optional

UNLIMITED = 1 << 31  # tokens, where a client asks for as many as there may be

# Names of one thing. A body's own name is the first of these that it declares.
SAME_NAMES = (
    (
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "n_predict",
        "num_predict",
        "max_new_tokens",
        "max_tokens_to_sample",
    ),
    ("min_tokens", "min_new_tokens"),
    ("repetition_penalty", "repeat_penalty"),
    ("stop", "stop_sequences"),
    ("seed", "random_seed"),
    ("n", "n_cmpl", "num_return_sequences"),
    ("logprobs", "n_probs"),
    ("add_special", "add_special_tokens"),
)
_OTHER_NAMES = {name: names for names in SAME_NAMES for name in names}
# Objects whose fields count as the body's own: Ollama's `options`, and the `extra_body` that OpenAI's client unpacks itself.
_HOLDERS = ("options", "extra_body")


def _thinks(value: Any) -> dict[str, Any]:
    """Whether the model reasons, as Anthropic, GLM, Qwen's and Ollama's clients say it."""
    if isinstance(value, Mapping):
        value = value.get("type") not in ("disabled", False)
    if isinstance(value, str) and value not in ("true", "false"):
        return {"reasoning_effort": value}
    return {"chat_template_kwargs": {"enable_thinking": value not in (False, 0, "false")}}


def _reasoning(value: Any) -> dict[str, Any]:
    """The field `reasoning` of OpenRouter and of OpenAI's responses: an effort, or whether the model reasons."""
    if not isinstance(value, Mapping):
        return _thinks(value)
    effort = {} if value.get("effort") is None else {"reasoning_effort": value["effort"]}
    return effort | ({} if value.get("enabled") is None else _thinks(value["enabled"]))


def _budget(value: Any) -> dict[str, Any] | None:
    """A budget of tokens for reasoning. 0 turns reasoning off; other budgets cannot be honoured."""
    return _thinks(False) if value == 0 else {} if value in (-1, None) else None


def _format(value: Any) -> dict[str, Any] | None:
    """Ollama's field `format`: "json", or a schema."""
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}} if isinstance(value, Mapping) else None


# Functions that translate a field's value into other fields; None is a value that cannot be honoured. A field is translated if the
# body does not declare it, and declares every field that it becomes.
TRANSLATED: Mapping[str, Callable[[Any], dict[str, Any] | None]] = {
    "thinking": _thinks,
    "think": _thinks,
    "enable_thinking": _thinks,
    "reasoning": _reasoning,
    "reasoning_effort": lambda value: {"reasoning": {"effort": value}},
    **dict.fromkeys(("reasoning_budget", "reasoning_budget_tokens", "thinking_budget", "thinking_budget_tokens"), _budget),
    "format": _format,
}

# Fields of other servers that this one lacks, with the values at which they change nothing on those servers.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("cache_prompt", "parse_tool_calls", "skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("add_special_tokens", "detokenize", "include_reasoning", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("post_sampling_probs", "return_tokens", "timings_per_token", "verbose", "return_token_ids"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "use_beam_search", "early_stopping", "echo", "raw", "grammar_lazy"), (False,)),
    **dict.fromkeys(("continue_final_message", "return_tokens_as_token_ids", "penalize_nl", "backend_sampling"), (False,)),
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "top_a", "min_keep", "n_keep"), (0,)),
    **dict.fromkeys(("priority", "n_discard", "n_cache_reuse", "n_indent", "num_keep", "smoothing_factor"), (0,)),
    **dict.fromkeys(("n", "typical_p", "typical", "tfs_z", "tfs", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("id_slot", "slot_id", "top_n_sigma", "t_max_predict_ms", "t_max_prompt_ms", "truncate_prompt_tokens"), (-1,)),
    **dict.fromkeys(("image_data", "tools", "bad_words", "logits_processors", "preserved_tokens", "grammar_triggers"), ([],)),
    **dict.fromkeys(("documents", "response_fields", "transforms", "plugins", "images", "context"), ([],)),
    **dict.fromkeys(("metadata", "client_metadata"), ({},)),
    **dict.fromkeys(("include", "stop_sequences", "mcp_servers", "fallbacks"), ([],)),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "include_obfuscation": (False,),
    "stream": (False,),
    "truncation": ("disabled",),
    "modalities": (["text"],),
    "service_tier": ("auto", "default", "standard_only"),
    "verbosity": ("medium",),
    "functions": ([],),
    "function_call": ("auto", "none"),
}
# Fields that cannot be ignored, because the answer would be another one; and the field to send instead.
REFUSED = {
    "functions": "tools",
    "function_call": "tool_choice",
    "structural_tag": "tools",
    "structured_outputs.structural_tag": "tools",
}


def _at_least(number: float, otherwise: Any) -> Callable[[Any], Any]:
    """A reader that takes smaller numbers for `otherwise`, None for the field's absence."""
    return lambda value: otherwise if _is_number(value) and float(value) < number else value


def _limit(value: Any) -> Any:
    """A number below zero, or one beyond all contexts, is no limit."""
    return UNLIMITED if _is_number(value) and not 0 <= float(value) <= UNLIMITED else value


def _seed(value: Any) -> Any:
    """-1 is no seed; other numbers below zero, which OpenAI's API takes, are seeds of their own."""
    if not _is_number(value) or float(value) >= 0:
        return value
    number = value if isinstance(value, int) else int(float(value))
    return None if number == -1 else number % (1 << 64)


# Values as some clients write them, by a body's own name for the field.
_VALUES: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(SAME_NAMES[0], _limit),
    "min_tokens": _at_least(0, 0),
    "seed": _seed,
    "top_k": _at_least(0, 0),
    "top_p": _at_least(1e-9, 1e-9),  # the likeliest token is always kept
    "thinking": lambda value: {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value,
}


# The names that a body declares; with each the names of its own part, where it is one.
Declared = Mapping[str, Optional["Declared"]]


def read(declared: Declared, given: Mapping[str, Any], strict: bool = False, where: str = "") -> tuple[dict[str, Any], list[str]]:
    """The fields that a body declares, from those that a client sent, and the names of those that mean nothing here.

    A null is an absent field. Of several names of one thing the body's own counts. strict: fields of other servers count as unknown
    even where they would change nothing. where: what stands before a name.
    """
    found: dict[str, Any] = {}
    left: list[str] = []
    others = {name: value for name, value in given.items() if value is not None}
    for holder in _HOLDERS:
        if holder not in declared and isinstance(others.get(holder), Mapping):
            others = {name: value for name, value in others.pop(holder).items() if value is not None} | others
    for name in [name for name in others if name in declared]:
        found[name] = others.pop(name)
    for name, value in others.items():
        own = next((one for one in _OTHER_NAMES.get(name, ()) if one in declared), None)
        become = TRANSLATED[name](value) if name in TRANSLATED else None
        if own is not None:
            found.setdefault(own, value)
        elif become is not None and become.keys() <= declared.keys():
            for key, one in become.items():
                before = found.setdefault(key, one)
                if isinstance(one, dict) and isinstance(before, dict):
                    found[key] = one | before
        elif strict or value not in NEUTRAL.get(name, ()):
            left.append(where + name)
    for name in list(found):
        found[name] = _VALUES[name](found[name]) if name in _VALUES else found[name]
        inner, value = declared[name], found[name]
        if inner is not None:
            parts = value if isinstance(value, list) else [value]
            done = [read(inner, one, strict, f"{where}{name}.") if isinstance(one, Mapping) else (one, []) for one in parts]
            found[name] = [one for one, _ in done] if isinstance(value, list) else done[0][0]
            left += [one for _, more in done for one in more]
    return {name: value for name, value in found.items() if value is not None}, left


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float | str) and not isinstance(value, bool) and math.isfinite(float(value))
    except (ValueError, OverflowError):
        return False

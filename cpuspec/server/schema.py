"""The bodies of OpenAI's endpoints. Sampling fields come from the declaration of `SamplingParams`, which also checks their values.

Fields that change no answer here are listed as ignored; those that would and cannot be honoured are refused, and so is every other.
"""

from dataclasses import fields
from typing import Any, Literal, Optional

from pydantic import BaseModel, ConfigDict, Field, create_model

from cpuspec.config import SamplingParams, SpecConfig
from cpuspec.server.errors import RequestError
from cpuspec.server.model import ServedModel
from cpuspec.server.structured import ANY_OBJECT, answer_format


class Body(BaseModel):
    """A body whose values have the types that are declared, and which has no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted: events are never padded


class Speculation(Body):
    draft: str = "auto"
    max_draft_tokens: int | None = None


class CpuspecOptions(Body):
    tokens: bool = False  # stream one token a chunk, with the level that drafted it


# The scalar fields, under their own names; the others are spelled differently in requests.
_SCALARS = {one.name: one for one in fields(SamplingParams) if one.type in (int, float, bool, int | None)}
_OWN_SPELLING = ("logprobs", "max_draft_tokens", "free_reasoning")
_FIELDS: dict[str, Any] = {
    name: (Optional[one.type], Field(None, description=one.metadata["help"]))  # noqa: UP045 - the type is a value here
    for name, one in _SCALARS.items()
    if name not in _OWN_SPELLING
}
_GRAMMARS = {  # fields of SamplingParams by the names that requests have for them
    **{name: name for name in ("json_schema", "regex", "choices", "grammar")},
    **{"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choices", "guided_grammar": "grammar"},
    "structured_outputs.json": "json_schema",
    "structured_outputs.regex": "regex",
    "structured_outputs.choice": "choices",
    "structured_outputs.grammar": "grammar",
}
_Sampling: Any = create_model("Sampling", __base__=Body, **_FIELDS)


class StructuredOutputs(Body):
    """vLLM's: one of these."""

    schema_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingBody(_Sampling):
    """What chat and plain completions share."""

    model: str | None = None
    # One of these at most, under the names of SamplingParams, llama-server, and vLLM now and before 0.12.
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    choices: list[str] | None = None
    grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    # Ignored.
    guided_decoding_backend: Any = None
    user: Any = None


class CompletionBody(SamplingBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class Prediction(Body):
    type: Literal["content"]
    content: str | list[dict[str, Any]]


class UnusedBody(Body):
    """Fields of OpenAI's chat completions and responses that change no answer here."""

    metadata: Any = None
    moderation: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None


class ChatBody(SamplingBody, UnusedBody):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    return_progress: bool | None = None  # llama-server's name
    cpuspec: CpuspecOptions | None = None
    # Ignored.
    modalities: Any = None
    verbosity: Any = None


def sampling_params(model: ServedModel, body: SamplingBody, **own: Any) -> SamplingParams:
    """The params that a body asks for. own: fields whose spelling is the endpoint's own; None is absent. Raises ConfigError."""
    given = {name: value for name, value in body.model_dump(include=set(_SCALARS)).items() if name not in _OWN_SPELLING}
    given |= {"stop": body.stop, "stop_token_ids": body.stop_token_ids, "logit_bias": _biases(body.logit_bias), **own}
    if given["top_k"] == -1:
        given["top_k"] = 0  # vLLM's spelling of "off"
    given |= _drafts(model, body.speculation)
    if isinstance(given["stop"], list):
        given["stop"] = tuple(text for text in given["stop"] if text)
    return model.params({name: value for name, value in given.items() if value is not None})


def grammar_of(body: SamplingBody) -> dict[str, Any]:
    """What a body restricts its answers to, as fields of SamplingParams. Raises RequestError for more than one grammar."""
    found = {"response_format": answer_format(body.response_format, "response_format")}
    given = body.model_dump(include={*_GRAMMARS, "structured_outputs"}, by_alias=True)
    outputs: dict[str, Any] = given.pop("structured_outputs") or {}
    if outputs.pop("json_object", None):
        found["structured_outputs.json_object"] = {"json_schema": ANY_OBJECT}
    given |= {f"structured_outputs.{name}": value for name, value in outputs.items()}
    for name, value in given.items():
        if value == []:
            raise RequestError(f"{name} has no choice; give some", name)
        if value not in (None, ""):
            found[name] = {_GRAMMARS[name]: value}
    asked = [name for name, fields in found.items() if fields]
    if len(asked) > 1:
        raise RequestError(f"an answer keeps to one grammar; got {' and '.join(asked)}", asked[0])
    return found[asked[0]] if asked else {}


def _biases(given: dict[str, float] | None) -> dict[int, float] | None:
    try:
        return None if given is None else {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise RequestError("logit_bias maps token ids to numbers", "logit_bias") from None


def _drafts(model: ServedModel, given: Speculation | None) -> dict[str, Any]:
    """What a body says of drafts, as fields of SamplingParams. Raises ConfigError for a spec that cannot be read."""
    if given is None:
        return {}
    wanted = given.draft if given.draft == "auto" else str(SpecConfig.parse(given.draft))
    if wanted == "none":
        return {"max_draft_tokens": 0}
    chosen = None if wanted in ("auto", str(model.llm.spec)) else wanted
    return {"draft": chosen, "max_draft_tokens": given.max_draft_tokens}

"""The bodies of OpenAI's endpoints. Sampling fields come from the declaration of `SamplingParams`, which also checks their values.

Fields that change no answer here are listed as ignored; those that would and cannot be honoured are refused, and so is every other.
"""

from dataclasses import fields
from typing import Any, Literal, Optional

from pydantic import BaseModel, ConfigDict, Field, create_model

from cpuspec.config import SamplingParams, SpecConfig
from cpuspec.errors import ConfigError
from cpuspec.server.errors import RequestError
from cpuspec.server.model import ServedModel


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
_OWN_SPELLING = ("logprobs", "max_draft_tokens")
_FIELDS: dict[str, Any] = {
    name: (Optional[one.type], Field(None, description=one.metadata["help"]))  # noqa: UP045 - the type is a value here
    for name, one in _SCALARS.items()
    if name not in _OWN_SPELLING
}
_Sampling: Any = create_model("Sampling", __base__=Body, **_FIELDS)


class SamplingBody(_Sampling):
    """What chat and plain completions share."""

    model: str | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    # Ignored.
    user: Any = None


class CompletionBody(SamplingBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class JsonFormat(Body):
    type: str = "text"
    json_schema: Any = None


class Prediction(Body):
    type: Literal["content"]
    content: str | list[dict[str, Any]]


class ChatBody(SamplingBody):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: JsonFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    return_progress: bool | None = None  # llama-server's name
    cpuspec: CpuspecOptions | None = None
    # Ignored.
    metadata: Any = None
    modalities: Any = None
    moderation: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None


def sampling_params(model: ServedModel, body: SamplingBody, **own: Any) -> SamplingParams:
    """The params that a body asks for. own: fields whose spelling is the endpoint's own; None is absent. Raises ConfigError."""
    given = {name: value for name, value in body.model_dump(include=set(_SCALARS)).items() if name not in _OWN_SPELLING}
    given |= {"stop": body.stop, "stop_token_ids": body.stop_token_ids, "logit_bias": _biases(body.logit_bias), **own}
    if given["top_k"] == -1:
        given["top_k"] = 0  # vLLM's spelling of "off"
    given["max_draft_tokens"] = _max_draft_tokens(model, body.speculation)
    if isinstance(given["stop"], list):
        given["stop"] = tuple(text for text in given["stop"] if text)
    return model.params({name: value for name, value in given.items() if value is not None})


def _biases(given: dict[str, float] | None) -> dict[int, float] | None:
    try:
        return None if given is None else {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise RequestError("logit_bias maps token ids to numbers", "logit_bias") from None


def _max_draft_tokens(model: ServedModel, given: Speculation | None) -> int | None:
    """How many tokens may be drafted; None: as the model was loaded."""
    if given is None:
        return None
    loaded = str(model.llm.spec)
    try:
        wanted = given.draft if given.draft == "auto" else str(SpecConfig.parse(given.draft))
    except ConfigError as error:
        raise RequestError(str(error), "speculation") from None
    if wanted == "none":
        return 0
    if wanted not in ("auto", loaded):
        raise RequestError(
            f"this server drafts with {loaded!r}; speculation.draft is auto (that), none, or {loaded!r}, got {given.draft!r}",
            "speculation",
        )
    return given.max_draft_tokens

"""Fields that bodies of requests share. Those of sampling are declared by `SamplingParams`, which also checks their values.

Fields that change no answer here are declared as ignored. Other names of a field, and unknown fields, are the task of `fields.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, Optional, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from cpuspec.server.bounds import (
    BEYOND,
    Content,
    Count,
    Ids,
    Ignored,
    Integers,
    Listed,
    Most,
    Name,
    Object,
    Prompts,
    Range,
    Schema,
    Strings,
    Text,
    Unused,
)
from cpuspec.server.content import content_text
from cpuspec.server.errors import RequestError
from cpuspec.server.fields import NEUTRAL, REFUSED, Declared
from cpuspec.server.model import ServedModel
from cpuspec.server.structured import ANY_OBJECT, answer_format
from cpuspec.settings import SamplingParams, SpecConfig


class Body(BaseModel):
    """A body, or a part of one. Numbers may be written as texts, or whole ones with a fraction of zero, as clients do."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @classmethod
    def declared(cls) -> Declared:
        """The names of its fields, and of its parts'."""
        parts = {one.alias or name: body_in(one.annotation) for name, one in cls.model_fields.items()}
        return {name: None if part is None else part.declared() for name, part in parts.items()}

    @classmethod
    def ignored(cls, given: Mapping[str, Any]) -> list[str]:
        """The names of given fields that are declared and change nothing here, at a value that asks for something."""
        found = []
        for name, one in cls.model_fields.items():
            value = given.get(one.alias or name)
            if is_ignored(one):
                found += [] if value is None or value in NEUTRAL.get(name, ()) else [name]
            elif (part := body_in(one.annotation)) and isinstance(value, Mapping):
                found += [f"{name}.{inner}" for inner in part.ignored(value)]
        return found

    @classmethod
    def of_fields(cls, given: Mapping[str, Any]) -> Self:
        """A body with these fields. Raises RequestError for a value of another type."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise wrong_field(worst_fault(error)) from None


def worst_fault(error: ValidationError) -> Mapping[str, Any]:
    """One fault of a body, a field beyond its bound before others."""
    return min(error.errors(include_url=False, include_input=False), key=lambda one: one["type"] != BEYOND)


def wrong_field(fault: Mapping[str, Any], path: str = "", where: Sequence[Any] | None = None) -> RequestError:
    """The error for a body's fault, as pydantic tells it. path: the request's. where: the place in the body; None: the fault's."""
    place = [str(part) for part in (fault["loc"] if where is None else where)]
    name, full = place[0] if place else None, ".".join(place)
    if fault["type"] == "extra_forbidden":
        theirs = path.startswith("/v1/messages")
        said = f"{full}: Extra inputs are not permitted" if theirs else f"Unrecognized request argument supplied: {full}"
        message = said + (f"; send {REFUSED[full]} instead" if full in REFUSED else "")
    else:
        message = f"{full or 'the body'}{'' if fault['type'] == BEYOND else ':'} {fault['msg']}"
    return RequestError(message[:500], name)


def is_ignored(field: FieldInfo) -> bool:
    """Whether a field changes nothing."""
    return any(isinstance(mark, Unused) for mark in field.metadata)


def body_in(annotation: Any) -> type[Body] | None:
    """The kind of body that a field holds; None for other fields."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return annotation
    return next((found for one in get_args(annotation) if (found := body_in(one))), None)


def ignoring(*names: str) -> Any:
    """A base class for bodies, with fields that may hold anything and change nothing: the response's header names them."""
    fields: dict[str, Any] = dict.fromkeys(names, (Ignored, None))
    return create_model("Ignored", __base__=Body, **fields)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: each chunk has the usage until then
    include_obfuscation: Ignored = None  # events are never padded


class Speculation(Body):
    draft: Annotated[str, Most(200)] = "auto"
    max_draft_tokens: Count | None = None


class CpuspecOptions(Body):
    tokens: bool = False  # stream one token a chunk, with the level that drafted it


Alternatives = Annotated[int, Range(0, 20)]  # beside each token, as OpenAI has it
Stops = Annotated[str | Strings, Most(4096, 32)]
# The scalar fields of SamplingParams. Requests have them under the same names and types, but for those of _OWN_SPELLING.
_SCALARS = {one.name: one for one in fields(SamplingParams) if one.type in (int, float, bool, int | None)}
_OWN_SPELLING = ("logprobs", "prompt_logprobs", "max_draft_tokens", "free_reasoning", "max_tokens", "n", "parse_special")
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
_Scalars: Any = create_model("Scalars", __base__=Body, **_FIELDS)


class LoraScale(Body):
    """llama.cpp's: an adapter by its number in GET /lora-adapters."""

    id: Count
    scale: Annotated[float, Range(-1e6, 1e6)]


class SamplingFields(_Scalars):
    """Fields that every request for an answer may have, in every protocol."""

    # Each step looks through these.
    stop_token_ids: Annotated[Integers, Most(1024, 1024)] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Annotated[Strings, Most(4096, 128)] | None = None
    logit_bias: Annotated[dict[str, Any] | list[list[Any]], Most(1 << 14, 1024)] | None = None
    speculation: Speculation | None = None
    cache_salt: Name | None = None  # vLLM's
    lora: Annotated[list[LoraScale], Most(1 << 12, 256)] | None = None

    @property
    def lora_scales(self) -> dict[int, float] | None:
        """The scales of adapters by id; None where the request names none."""
        return {one.id: one.scale for one in self.lora} if self.lora else None


Grammar = Annotated[str, Most(1 << 17)]
GivenSchema = Annotated[dict[str, Any] | str, Most(1 << 17)]
Choices = Annotated[Strings, Most(1 << 17)]


class StructuredOutputs(Body):
    """vLLM's: one of these."""

    schema_: GivenSchema | None = Field(None, alias="json")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None


class AnswerBody(SamplingFields):
    """The fields that OpenAI's chat and plain completions share with Ollama's."""

    model: Name | None = None
    max_tokens: Count | None = None
    # One of these at most, under the names of SamplingParams, llama-server, and vLLM now and before 0.12.
    response_format: Schema | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: GivenSchema | None = None
    regex: Grammar | None = None
    choices: Choices | None = None
    grammar: Grammar | None = None
    guided_json: GivenSchema | None = None
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    stop: Stops | None = None
    stream: bool | None = None


class SamplingBody(AnswerBody):
    """The fields that OpenAI's chat and plain completions share."""

    n: Count | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Alternatives | None = None  # vLLM's
    guided_decoding_backend: Ignored = None
    user: Ignored = None


class CompletionBody(SamplingBody):
    prompt: Annotated[Prompts, Most(1 << 23)]
    suffix: Text | None = None
    parse_special: bool | None = None
    add_special: bool | None = None
    echo: bool | None = None
    logprobs: Alternatives | None = None
    best_of: Count | None = None


Choice = Annotated[str | dict[str, Any], Most(1 << 16)]  # of tools


class Prediction(Body):
    type: Literal["content"]
    content: Content


# Fields of OpenAI's chat completions and responses that change no answer here.
UnusedBody: Any = ignoring(
    "metadata",
    "moderation",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)


class Ending(Body):
    """How a conversation ends, as vLLM spells it: the answer continues the last message, or a generation prompt begins it.

    continue_final_message None: where the last message is an assistant's without tool calls, as llama-server does, unless a
    generation prompt is asked for.
    """

    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def continues(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the answer continues the last message. Raises RequestError where it cannot."""
        name, last = "continue_final_message", messages[-1] if messages else {}
        if self.continue_final_message is None:
            return last.get("role") == "assistant" and not last.get("tool_calls") and self.add_generation_prompt is not True
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(f"{name} and add_generation_prompt exclude each other; leave one out", name)
        if self.continue_final_message and (not last or last.get("tool_calls")):
            raise RequestError(f"{name} needs a last message with a text and without tool calls", name)
        return self.continue_final_message


class ConversationBody(AnswerBody, Ending):
    """The fields of a conversation that OpenAI's chat completions share with Ollama's."""

    max_completion_tokens: Count | None = None
    logprobs: Annotated[bool | int, Range(0, 20)] | None = None  # a number is llama-server's: of likely tokens
    top_logprobs: Alternatives | None = None
    tools: Listed | None = None
    reasoning_effort: Name | None = None
    chat_template_kwargs: Object | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        given, effort = self.chat_template_kwargs or {}, self.reasoning_effort
        return dict(given) if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none", **given}


class ChatBody(ConversationBody, SamplingBody, UnusedBody):
    messages: Listed
    tool_choice: Choice | None = None
    prediction: Prediction | None = None
    return_progress: bool | None = None  # llama-server's name
    cpuspec: CpuspecOptions | None = None
    modalities: Ignored = None
    verbosity: Ignored = None


def refuse(body: Body, reasons: Mapping[str, str]) -> None:
    """Raise RequestError if one of these fields asks for something. reasons: why it is not supported, by field."""
    for name, why in reasons.items():
        if getattr(body, name):
            raise RequestError(f"{name} is not supported: {why}", name)


def sampling_params(model: ServedModel, body: SamplingFields, **own: Any) -> SamplingParams:
    """The params that a body asks for. own: fields whose spelling is the endpoint's own; None is absent. Raises ConfigError."""
    given = {name: value for name, value in body.model_dump(include=set(_SCALARS)).items() if name not in _OWN_SPELLING}
    given |= {name: getattr(body, name) for name in ("stop_token_ids", "allowed_token_ids", "bad_words")}
    given |= {"logit_bias": _biases(model, body.logit_bias), **own}
    given["cache_salt"] = body.cache_salt
    given |= _drafts(model, body.speculation)
    if isinstance(given.get("stop"), list):
        given["stop"] = tuple(text for text in given["stop"] if text)
    return model.params({name: value for name, value in given.items() if value is not None})


def predicted_ids(model: ServedModel, prediction: Prediction | None) -> list[int]:
    """Token ids of OpenAI's predicted output."""
    if prediction is None:
        return []
    text = content_text(prediction.content, "prediction")
    model.check_text(len(text))
    return model.llm.tokenizer.encode(text, add_special=False)[: model.llm.context_length]


def chat_params(model: ServedModel, body: ConversationBody, n: int | None = None) -> SamplingParams:
    """The params of `n` answers to a conversation. Raises RequestError or ConfigError."""
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    num_top = body.top_logprobs or int(0 if body.logprobs is True else body.logprobs or 0)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return sampling_params(model, body, n=n, stop=body.stop, max_tokens=limit, logprobs=num_top if body.logprobs else None)


def completion_params(
    model: ServedModel, body: CompletionBody, keeps_to: Mapping[str, Any], max_tokens: int | None
) -> SamplingParams:
    """The params of a plain completion. keeps_to: the fields that restrict it. Raises RequestError or ConfigError."""
    own = {"n": body.n, "stop": body.stop, "logprobs": body.logprobs, "parse_special": body.parse_special}
    own["max_tokens"] = max_tokens
    return sampling_params(model, body, **own, **keeps_to)


def prompt_logprobs_of(body: SamplingBody) -> int | None:
    """How many alternatives of each token of the prompt are asked for. Raises RequestError, for a stream too, as vLLM does."""
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs come with a whole answer; leave out stream", "prompt_logprobs")
    return body.prompt_logprobs


def grammar_of(body: AnswerBody) -> dict[str, Any]:
    """The grammar of a body's answers, as fields of SamplingParams. Raises RequestError for more than one grammar."""
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


def _biases(model: ServedModel, given: dict[str, Any] | list[list[Any]] | None) -> dict[int, Any] | None:
    """OpenAI's mapping of ids, or llama-server's pairs of an id or a text and a number; false forbids the tokens."""
    if given is None:
        return None
    found: dict[int, Any] = {}
    try:
        for token, bias in given.items() if isinstance(given, dict) else given:
            is_text = isinstance(token, str) and not isinstance(given, dict)
            ids = model.llm.tokenizer.encode(token, add_special=False) if is_text else [int(token)]
            found |= dict.fromkeys(ids, -math.inf if bias is False else float(bias))
    except (ValueError, TypeError, OverflowError):
        raise RequestError("logit_bias maps token ids to numbers, or is a list of pairs of these", "logit_bias") from None
    return found


def _drafts(model: ServedModel, given: Speculation | None) -> dict[str, Any]:
    """A body's settings of drafts, as fields of SamplingParams. Raises ConfigError for a spec that cannot be read."""
    if given is None:
        return {}
    wanted = given.draft if given.draft == "auto" else str(SpecConfig.parse(given.draft))
    if wanted == "none":
        return {"max_draft_tokens": 0}
    chosen = None if wanted in ("auto", str(model.llm.spec)) else wanted
    return {"draft": chosen, "max_draft_tokens": given.max_draft_tokens}

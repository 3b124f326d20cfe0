"""The protocols that the server speaks, one row each, and the properties that all of them have. The oracle is `LLM.generate`."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.server.model import Answers
from tests.server.agents import read_chat, read_claude, read_codex
from tests.server.running import (
    Running,
    before_forwards,
    load,
    prompt_of,
    script_answers,
    serving,
    stream,
)
from tests.server.test_tools import full_model

CHAT, PLAIN, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TEXT = "the cat sat on the mat"
HITS = "cpuspec:prefix_cache_hits_total"
TELL_WORDS = (MESSAGES, "/completion", "/infill")  # the stop word that has ended an answer
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@dataclass(frozen=True)
class Answer:
    """What a reply says. end: length, stop or calls; usage: tokens of the prompt and of the answer; word: that has stopped it."""

    text: str
    end: str
    usage: tuple[int, int]
    thought: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    word: str | None = None
    cached: int = field(default=0, compare=False)  # tokens of the prompt, where it is told


def of_openai(reply: dict[str, Any]) -> Answer:
    (choice,) = reply["choices"]
    said = choice["message"] if "message" in choice else {"content": choice["text"]}
    calls = [
        (one[one["type"]]["name"], one[one["type"]].get("input") or json.loads(one["function"]["arguments"]))
        for one in said.get("tool_calls", ())
    ]
    usage = reply["usage"]
    counts, cached = (usage["prompt_tokens"], usage["completion_tokens"]), usage["prompt_tokens_details"]["cached_tokens"]
    end, thought = choice["finish_reason"].removeprefix("tool_"), said.get("reasoning_content", "")
    return Answer(said["content"] or "", end, counts, thought, calls, cached=cached)


def of_responses(reply: dict[str, Any]) -> Answer:
    texts = {
        kind: "".join(item["content"][0]["text"] for item in reply["output"] if item["type"] == kind)
        for kind in ("message", "reasoning")
    }
    calls = [
        ("__".join(filter(None, (item.get("namespace"), item["name"]))), item.get("input") or json.loads(item["arguments"]))
        for item in reply["output"]
        if item["type"].endswith("_call")
    ]
    end = "length" if reply["status"] == "incomplete" else "calls" if calls else "stop"
    assert reply["incomplete_details"] == ({"reason": "max_output_tokens"} if end == "length" else None)
    usage = reply["usage"]
    counts, cached = (usage["input_tokens"], usage["output_tokens"]), usage["input_tokens_details"]["cached_tokens"]
    return Answer(texts["message"], end, counts, texts["reasoning"], calls, cached=cached)


def of_messages(reply: dict[str, Any]) -> Answer:
    texts = {kind: "".join(block[kind] for block in reply["content"] if block["type"] == kind) for kind in ("text", "thinking")}
    calls = [(block["name"], block["input"]) for block in reply["content"] if block["type"] == "tool_use"]
    end = {"max_tokens": "length", "tool_use": "calls"}.get(reply["stop_reason"], "stop")
    assert any(block["type"] in ("text", "tool_use") for block in reply["content"]), "clients read a text"
    usage, cached = reply["usage"], reply["usage"]["cache_read_input_tokens"]
    counts = usage["input_tokens"] + cached, usage["output_tokens"]
    return Answer(texts["text"], end, counts, texts["thinking"], calls, reply["stop_sequence"], cached)


def of_ollama(reply: dict[str, Any]) -> Answer:
    said = reply["message"] if "message" in reply else reply | {"content": reply["response"]}
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in said.get("tool_calls", ())]
    assert reply["done"]
    assert reply["total_duration"] == reply["prompt_eval_duration"] + reply["eval_duration"]
    usage = reply["prompt_eval_count"], reply["eval_count"]
    return Answer(said["content"], "calls" if calls else reply["done_reason"], usage, said.get("thinking", ""), calls)


def of_llama_server(reply: dict[str, Any]) -> Answer:
    assert reply["stop"]
    assert reply["timings"]["predicted_n"] == reply["tokens_predicted"]
    end = {"limit": "length", "word": "stop", "eos": "stop"}[reply["stop_type"]]
    counts = reply["tokens_evaluated"], reply["tokens_predicted"]
    return Answer(reply["content"], end, counts, word=reply["stopping_word"] or None)


# The whole reply that a stream adds up to.


def joined_chat(lines: list[str]) -> dict[str, Any]:
    message, reason, usage = read_chat(lines)
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": usage}


def joined_completion(lines: list[str]) -> dict[str, Any]:
    *chunks, last = objects(lines)
    assert (lines[-1], last["choices"]) == ("data: [DONE]", [])
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [one["finish_reason"] for one in choices[:-1]] == [None] * (len(choices) - 1)
    return {"choices": [{**choices[-1], "text": "".join(one["text"] for one in choices)}], "usage": last["usage"]}


def joined_messages(lines: list[str]) -> dict[str, Any]:
    blocks, end = read_claude(lines)
    return {"content": blocks, **end["delta"], "usage": end["usage"]}


def joined_lines(lines: list[str]) -> dict[str, Any]:
    """Of Ollama, and of llama-server, whose last lines have the figures."""
    found = objects(lines)
    assert [one.get("done", one.get("stop")) for one in found] == [False] * (len(found) - 1) + [True]
    whole: dict[str, Any] = found[-1]
    for holders in (found, [one["message"] for one in found if "message" in one]):
        for name in ("content", "response", "thinking", "tool_calls"):
            if parts := [one[name] for one in holders if one.get(name)]:
                holders[-1][name] = sum(parts[1:], parts[0]) if name == "tool_calls" else "".join(parts)
    return whole


def objects(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON objects of a stream, or of a reply that is no stream."""
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("{", "data: {"))]


@dataclass(frozen=True)
class Protocol:
    """One way to ask for an answer, and to read it, whole or the lines of a stream.

    prompt, limit, stop: its names of these fields. more, streamed: fields that it always needs, or for a stream. form: asks for an
    answer that keeps to a JSON schema; likely: for log-probabilities, with those of two tokens each. tool: a function that may be
    called, as it spells one; choice: the function of that name must be, or with "" any. streams: whether it is asked for a stream.
    """

    path: str
    prompt: str
    read: Callable[[dict[str, Any]], Answer]
    join: Callable[[list[str]], dict[str, Any]] = joined_lines
    limit: str = "max_tokens"
    stop: str = "stop"
    more: Mapping[str, Any] = field(default_factory=dict)
    streamed: Mapping[str, Any] = field(default_factory=dict)
    form: Callable[[Any], dict[str, Any]] = lambda schema: {"json_schema": schema}
    likely: Mapping[str, Any] = field(default_factory=dict)
    tool: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    choice: Callable[[str], Any] | None = None
    streams: bool = False

    def body(self, text: str = TEXT, **settings: Any) -> dict[str, Any]:
        """A request. settings: fields under the names of SamplingParams, and others of the protocol itself."""
        own = {"max_tokens": self.limit, "stop": self.stop}
        asked: Any = [{"role": "user", "content": text}] if self.prompt == "messages" else text
        more = self.form(settings.pop("json_schema")) if "json_schema" in settings else {}
        more |= self.likely if settings.pop("logprobs", None) else {}
        more |= {"stream": self.streams, **(self.streamed if self.streams else {})}
        own_settings = {own.get(name, name): value for name, value in settings.items()}
        if self.path.startswith("/api/"):
            own_settings = {"options": own_settings}
        return {"model": "tiny", self.prompt: asked, **self.more, **more, **own_settings}

    def ids(self, llm: LLM, text: str = TEXT) -> list[int]:
        """The prompt as the model gets it."""
        if self.path == "/infill":
            return llm.tokenizer.encode(f"<|fim_prefix|>{text}<|fim_suffix|>dog<|fim_middle|>", parse_special=True)
        chat = [{"role": "user", "content": text}]
        return llm.tokenizer.encode_chat(chat) if self.tool else llm.tokenizer.encode_prompt(text)

    def reply(self, running: Running, body: dict[str, Any]) -> dict[str, Any]:
        """The whole reply, or that which a stream adds up to."""
        if self.streams:
            return self.join(stream(running, self.path, body))
        reply = running.post(self.path, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == "tiny"
        return reply.json()

    def ask(self, running: Running, text: str = TEXT, more: Mapping[str, Any] | None = None, **settings: Any) -> Answer:
        """The answer to a request. more: fields of the protocol itself."""
        return self.read(self.reply(running, self.body(text, **settings) | (more or {})))


def fault(path: str, reply: dict[str, Any]) -> dict[str, Any]:
    """The error that a reply, or the last object of a stream, tells of."""
    if path.startswith("/api/"):
        assert list(reply) == ["error"]
        return {"message": reply["error"]}
    found: dict[str, Any] = reply.get("response", reply)["error"]
    if path == MESSAGES:
        assert (reply["type"], set(found)) == ("error", {"type", "message"})
    elif "response" in reply:
        assert reply["type"] == "response.failed"
    else:
        assert set(found) == {"message", "type", "param", "code"}
    return found


def likelihoods(value: Any) -> list[tuple[float, list[float]]]:
    """The log-probability of each token that a reply tells of, and those of the likeliest, wherever it has them."""
    if isinstance(value, dict) and "token_logprobs" in value:
        return list(zip(value["token_logprobs"], [list(top.values()) for top in value["top_logprobs"]], strict=True))
    if isinstance(value, dict) and "top_logprobs" in value:
        return [(value["logprob"], [top["logprob"] for top in value["top_logprobs"]])]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for one in inner for found in likelihoods(one)]


def wrapped(function: dict[str, Any]) -> dict[str, Any]:
    kind = "custom" if "format" in function else "function"
    return {"type": kind, kind: function}


def flat(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "custom" if "format" in function else "function", **function}


def of_anthropic(function: dict[str, Any]) -> dict[str, Any]:
    return {"input_schema" if name == "parameters" else name: value for name, value in function.items()}


_LIKELY = {"logprobs": True, "top_logprobs": 2}
_USAGE = {"stream_options": {"include_usage": True}}
_OLLAMA: dict[str, Any] = {"limit": "num_predict", "form": lambda schema: {"format": schema}, "likely": _LIKELY}
PROTOCOLS = {
    "chat completions": Protocol(
        *(CHAT, "messages", of_openai, joined_chat),
        streamed=_USAGE,
        form=lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}},
        likely=_LIKELY,
        tool=wrapped,
        choice=lambda name: {"type": "function", "function": {"name": name}} if name else "required",
    ),
    "completions": Protocol(PLAIN, "prompt", of_openai, joined_completion, streamed=_USAGE, likely={"logprobs": 2}),
    "responses": Protocol(
        *(RESPONSES, "input", of_responses, lambda lines: read_codex(lines)[1], "max_output_tokens"),
        form=lambda schema: {"text": {"format": {"type": "json_schema", "schema": schema, "strict": True}}},
        tool=flat,
        choice=lambda name: {"type": "function", "name": name} if name else "required",
    ),
    "messages": Protocol(
        *(MESSAGES, "messages", of_messages, joined_messages),
        stop="stop_sequences",
        form=lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        tool=of_anthropic,
        choice=lambda name: {"type": "tool", "name": name} if name else {"type": "any"},
    ),
    "Ollama's chat": Protocol("/api/chat", "messages", of_ollama, tool=wrapped, **_OLLAMA),
    "Ollama's prompt": Protocol("/api/generate", "prompt", of_ollama, tool=wrapped, **_OLLAMA),
    "Ollama's raw prompt": Protocol("/api/generate", "prompt", of_ollama, more={"raw": True}, **_OLLAMA),
    "llama.cpp's completion": Protocol("/completion", "prompt", of_llama_server, limit="n_predict", likely={"n_probs": 2}),
    "llama.cpp's infill": Protocol("/infill", "input_prefix", of_llama_server, limit="n_predict", more={"input_suffix": "dog"}),
}


STREAMS = {f"{name}, streamed": replace(one, streams=True) for name, one in PROTOCOLS.items()}


def protocols(having: Callable[[Protocol], Any] = lambda one: True) -> pytest.MarkDecorator:
    """Run a test with each protocol, whole and streamed."""
    found = {name: one for name, one in (PROTOCOLS | STREAMS).items() if having(one)}
    return pytest.mark.parametrize("protocol", found.values(), ids=found)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def running(path: Path, prompt_arithmetic: str) -> Iterator[Running]:
    with serving(lambda: load(path), pooling="mean") as found:
        yield found


@pytest.fixture(scope="module")
def llm(path: Path, prompt_arithmetic: str) -> Iterator[LLM]:
    with load(path) as offline:
        yield offline


SCHEMA = {
    "type": "object",
    "properties": {"zone": {"enum": ["CET", "UTC"]}, "title": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["zone", "title"],
    "additionalProperties": False,
}
SAMPLING = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
# What is asked for, and why the answer ends.
ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "greedy": (GREEDY, "length"),
    "a seed": (SAMPLING | {"seed": 11}, "length"),
    "another seed": (SAMPLING | {"seed": 12}, "length"),
    "a stop word": (GREEDY | {"stop": ["never said", "e", "a", "t", " "]}, "stop"),
    "the model's own end": ({"temperature": 0, "max_tokens": 12}, "stop"),  # with a bias for it
    "a schema": ({"temperature": 1.5, "seed": 3, "max_tokens": 80, "json_schema": SCHEMA}, "stop"),
}


@protocols()
@pytest.mark.parametrize("asked", ASKED)
def test_an_answer_is_the_offline_one(running: Running, llm: LLM, protocol: Protocol, asked: str) -> None:
    settings, end = ASKED[asked]
    if asked == "the model's own end":
        settings = {**settings, "logit_bias": dict.fromkeys(llm.tokenizer.eos_ids, 100)}
    marks = ("<|file_sep|>", "<|repo_name|>", "<|endoftext|>") if protocol.path == "/infill" else ()
    ends = tuple(one for mark in marks if (one := llm.tokenizer.token_id(mark)) is not None)
    (wanted,) = llm.generate([protocol.ids(llm)], SamplingParams(**settings, stop_token_ids=ends))
    word = wanted.stop_reason if isinstance(wanted.stop_reason, str) and protocol.path in TELL_WORDS else None
    found = protocol.ask(running, **settings)
    assert found == Answer(wanted.text, wanted.finish_reason, (len(protocol.ids(llm)), len(wanted.token_ids)), word=word)
    assert found.end == end


@protocols(lambda one: one.likely)
def test_likelihoods_are_the_offline_ones(running: Running, llm: LLM, protocol: Protocol) -> None:
    (wanted,) = llm.generate([protocol.ids(llm)], SamplingParams(**GREEDY, logprobs=2))
    reply = running.post(protocol.path, json=protocol.body(**GREEDY, logprobs=2))
    found = likelihoods(objects(reply.text.splitlines()))
    assert found == [(one.logprob, [logprob for _, logprob in one.top]) for one in wanted.logprobs]


@protocols(lambda one: one.prompt == "messages")
def test_an_assistants_last_message_is_continued(running: Running, llm: LLM, protocol: Protocol) -> None:
    talk = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "On the"}]
    (wanted,) = llm.generate([llm.tokenizer.encode_chat(talk, continues=True)], SamplingParams(**GREEDY))
    assert protocol.ask(running, more={"messages": talk}, **GREEDY).text == wanted.text


@protocols(lambda one: one.path != "/infill")
def test_answers_with_different_salts_share_no_prefix(running: Running, protocol: Protocol) -> None:
    def num_cached(salt: str) -> float:
        before = running.model.metrics.registry.get_sample_value(HITS, {"model_name": "tiny"})
        protocol.ask(running, f"{TEXT} " * 9, **GREEDY, cache_salt=f"{id(protocol)} {salt}")
        return running.model.metrics.registry.get_sample_value(HITS, {"model_name": "tiny"}) - before

    assert num_cached("mine") == num_cached("yours") == 0
    assert num_cached("mine") > 20


# Tools

TIME = {"name": "get_time", "description": "the time", "parameters": SCHEMA}
OTHER = {"name": "other", "description": "", "parameters": {"type": "object", "properties": {}}}
PATCH = {"name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}


@protocols(lambda one: one.choice)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["", "get_time"])
def test_a_demanded_call_keeps_to_its_schema(running: Running, protocol: Protocol, name: str, strict: bool) -> None:
    tools = [protocol.tool(one) for one in ([OTHER] if name else []) + [TIME | {"strict": strict}]]
    found = protocol.ask(running, more={"tools": tools, "tool_choice": protocol.choice(name)}, temperature=0, max_tokens=80)
    ((called, arguments),) = found.calls
    assert (called, found.text, found.end) == ("get_time", "", "calls")
    assert arguments.keys() == {"zone", "title"}
    assert arguments["zone"] in ("CET", "UTC")
    assert 10 <= arguments["title"] <= 99


CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'
TEXT_OF_PATCH = '*** Begin\n+a "b"'
PATCHED = {"name": "apply_patch", "arguments": {"input": TEXT_OF_PATCH}}
# What a model writes, and its reasoning, its text and its calls.
WRITTEN: dict[str, tuple[str, str, list[Any]]] = {
    f"<think>\nhm\n</think>\n\nI look.\n{CALL}": ("hm", "I look.", [CALLED := ("get_time", {"zone": "CET"})]),
    f"{CALL}\n{CALL}": ("", "", [CALLED, CALLED]),
    "<think>\nhm": ("hm", "", []),
    f"{CALL}\nIt is noon.": ("", "It is noon.", [CALLED]),
    CALL[:55]: ("", CALL[:55], []),
    f"<tool_call>\n{json.dumps(PATCHED)}\n</tool_call>\n{CALL}": ("", "", [("apply_patch", TEXT_OF_PATCH), CALLED]),
}


@protocols(lambda one: one.tool)
@pytest.mark.parametrize("script", WRITTEN)
def test_reasoning_text_and_calls_come_apart(
    running: Running, monkeypatch: pytest.MonkeyPatch, protocol: Protocol, script: str
) -> None:
    """A custom tool is called with a text; where a protocol has none, it is a function of one argument."""
    script_answers(monkeypatch, script)
    thought, text, calls = WRITTEN[script]
    has_custom = protocol.path in (CHAT, RESPONSES)
    patch = PATCH if protocol.path != MESSAGES else {"name": "apply_patch", "parameters": {"type": "object"}}
    found = protocol.ask(running, more={"tools": [protocol.tool(patch), protocol.tool(TIME)]}, temperature=0, max_tokens=40)
    own_calls = [(name, given if has_custom or isinstance(given, dict) else {"input": given}) for name, given in calls]
    assert (found.thought, found.text, found.calls) == (thought, text, own_calls)
    assert found.end == ("calls" if calls else "stop")
    assert "get_time" in prompt_of(running)
    assert protocol.path == MESSAGES or all(one in prompt_of(running) for one in ("apply_patch", "lark grammar", "start: /.+/"))


# Requests that cannot be answered

FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": -1}, "temperature must be"),
    "temperature's type": ({"temperature": "hot"}, "temperature"),
    "a token": ({"logit_bias": {"cat": 1}}, "token ids"),
    "another model's token": ({"logit_bias": {"999999": 1}}, "logit_bias ids"),
    "many tokens": ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias takes at most"),
    "many stop words": ({"stop": ["x"] * 33}, "takes at most"),
    "a long stop word": ({"stop": ["x" * 5000]}, "takes at most"),
    "half of a character": ({"text": "\ud800"}, "not Unicode"),
}


def refused(running: Running, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """The status and the message of what cannot be answered, in the shape of the path's protocol."""
    reply = running.post(path, json=body)
    assert path != MESSAGES or reply.json()["request_id"] == reply.headers["x-request-id"]
    return reply.status_code, fault(path, reply.json())["message"]


@protocols(lambda one: not one.streams)
@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_field_is_refused_by_its_name(running: Running, protocol: Protocol, change: dict[str, Any], message: str) -> None:
    status, said = refused(running, protocol.path, protocol.body(**GREEDY | change))
    assert (status, message in said) == (400, True), said


@protocols(lambda one: not one.streams)
def test_an_unknown_model_is_not_found(running: Running, protocol: Protocol) -> None:
    status, said = refused(running, protocol.path, protocol.body(**GREEDY) | {"model": "gpt-5"})
    assert (status, "does not exist" in said) == (404, True), said


@protocols()
@pytest.mark.parametrize(("text", "is_read"), [("cat " * 2500, True), ("7" * 40_000, False)])
def test_a_prompt_that_is_too_long_is_refused_in_words_that_agents_know(
    running: Running, protocol: Protocol, text: str, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenize(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("this text was tokenized")

    for name in () if is_read else ("encode", "encode_chat", "encode_prompt"):
        monkeypatch.setattr(running.model.llm.tokenizer, name, tokenize)
    reply = running.post(protocol.path, json=protocol.body(text, **GREEDY))
    error = fault(protocol.path, objects(reply.text.splitlines())[-1])
    # Codex shortens its conversation for this event, and for no status.
    assert reply.status_code == (200 if protocol.streams and protocol.path == RESPONSES else 400)
    words = r"this model's maximum context length is (?P<most>2048) tokens, and the prompt has (?P<given>\d+) tokens"
    if protocol.path == MESSAGES:
        words = r"prompt is too long: (?P<given>\d+) tokens > (?P<most>\d+) maximum"
    found = re.match(words, error["message"])
    assert found
    assert int(found["given"]) > int(found["most"])
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"


@protocols()
@pytest.mark.parametrize("cause", ["the engine", "the server"])
def test_an_answer_that_fails_ends_with_an_error(
    running: Running, protocol: Protocol, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError

    if cause == "the server":
        monkeypatch.setattr(Answers, "outputs", fails)
    with before_forwards(running.model.llm, fails):
        reply = running.post(protocol.path, json=protocol.body(**GREEDY))
    error = fault(protocol.path, objects(reply.text.splitlines())[-1])
    assert reply.status_code == (200 if protocol.streams else 500)
    assert f"{cause} failed" in error["message"]
    assert error.get("type", error.get("code", "server_error")) == ("api_error" if protocol.path == MESSAGES else "server_error")
    assert "[DONE]" not in reply.text


USER, SAID = {"role": "user", "content": TEXT}, {"role": "assistant", "content": "On"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 3},
    PLAIN: {"prompt": "the cat", "max_tokens": 3},
    MESSAGES: {"messages": [USER], "max_tokens": 3},
    RESPONSES: {"input": "the cat", "max_output_tokens": 3},
}


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def schema(of: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": of}}}


CONTINUE = {"continue_final_message": True}
# What a protocol alone can get wrong, and what made other servers crash, hang or answer 500 by their public reports.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"max_tokens": 0}, "max_tokens must be"),
    (CHAT, {"n": 10**6}, "asks for 1000000 answers"),
    (CHAT, {"top_logprobs": 3}, "needs logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 99}, "from 0 to 20"),
    (CHAT, {"messages": []}, "no messages"),
    (CHAT, {"messages": [None]}, "messages"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "role"),
    (CHAT, {"messages": [{"role": "user", "content": [None]}]}, "texts only"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "smell", "smell": {"url": "x"}}]}]}, "texts only"),
    (CHAT, {"functions": [{"name": "f"}]}, "Unrecognized request argument supplied: functions; send tools instead"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type is text, json_object or json_schema"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "is not a function"),
    (CHAT, {"tools": [{}]}, "is not a function"),
    (CHAT, {"tool_choice": "required"}, "there are no tools"),
    (CHAT, {"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    *((CHAT, {"prediction": one}, "prediction") for one in ({"type": "other", "content": "a"}, {"type": "content"}, "a")),
    (CHAT, {"prediction": {"type": "content", "content": [{}]}}, "prediction"),
    (CHAT, {"messages": [USER, SAID], "add_generation_prompt": True, **CONTINUE}, "exclude each other"),
    (CHAT, {"messages": [USER, called("{}")], **CONTINUE}, "continue_final_message needs a last message"),
    (CHAT, {"messages": [], **CONTINUE}, "continue_final_message needs a last message"),
    *(
        (CHAT, schema(of), "schema")
        for of in ({"$ref": "#"}, {"$ref": "#/none"}, {"enum": []}, {"multipleOf": 0, "type": "number"})
    ),
    *((CHAT, schema(of), "") for of in ({"pattern": "("}, {"type": "object", "properties": {"\ud800": {}}})),
    (PLAIN, {"suffix": "b", "echo": True}, "suffix"),
    *((PLAIN, {"prompt": one}, "prompt") for one in ([], [[1, 2], "a"], [-1], [2**40])),
    (PLAIN, {"temperature": float("nan")}, "temperature"),
    (PLAIN, {"n": 0}, "n must be"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens"),
    (MESSAGES, {"messages": []}, "no messages"),
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "user or assistant"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "smell", "source": {}}]}]}, "texts only"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "cannot run"),
    (MESSAGES, {"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "unknown"}}, "tool_choice"),
    (RESPONSES, {"background": True}, "background is not supported"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "cannot read"),
    (RESPONSES, {"input": [{}]}, "role"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_smell", "image_url": "x"}]}]}, "texts only"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ("/api/chat", {"messages": [{"role": "user", "content": 5}]}, "content"),
    ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template is not supported"),
    *(("/v1/embeddings", {"input": one}, "input") for one in ([], ["a", ""], [[]], ["a"] * 2049, {"a": 1})),
    *(("/v1/embeddings", {"input": one}, "the prompt has") for one in ("x " * 20_000, [5] * 3000)),
    *(("/v1/embeddings", {"input": one}, "prompt token ids must be in") for one in ([10**9], [-1])),
    ("/v1/embeddings", {"input": "a", "dimensions": 10**9}, "dimensions must be"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {}, "input"),
    ("/v1/rerank", {"query": "a"}, "documents is missing"),
    ("/v1/rerank", {"query": "a", "documents": []}, "no documents"),
    ("/v1/rerank", {"query": "a", "documents": [""]}, "empty text"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n is 0"),
    ("/v1/rerank", {"query": "a", "documents": ["b " * 20_000]}, "the prompt has"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1 has 2 texts and text_2 has 1"),
    ("/v1/score", {"text_1": "a"}, "no documents"),
    ("/detokenize", {"tokens": [10**9]}, ""),
    ("/tokenize", {"content": 5}, "content"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}, "input_extra"),
]
# What looks wrong, and is answered.
ODD: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, {"messages": [{"role": "user", **content}]}) for content in ({"content": None}, {"content": []}, {})),
    *((CHAT, {"messages": [USER, called(arguments), USER]}) for arguments in ({"a": 1}, "{bad", "", None, "[1]", "5")),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}, USER]}),
    (CHAT, {"messages": [USER, {"role": "tool", "tool_call_id": "unknown", "content": None}]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "x", "reasoning": {"a": 1}}, USER]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": None}}]}),
    (CHAT, {"chat_template_kwargs": {"messages": []}}),
    (CHAT, schema({"type": "object", "additionalProperties": {"$ref": "#"}})),
    (CHAT, schema({"type": "string", "format": "unheard-of"})),
    *((PLAIN, {"prompt": one}) for one in ("a" * 1500, " " * 1500, "\0")),
    *((PLAIN, one) for one in ({"seed": 2**70}, {"top_k": 10**12}, {"temperature": 1e300}, {"logit_bias": []})),
    (MESSAGES, {"messages": [{"role": "assistant", "content": "x"}]}),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": []}, USER]}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}),
]


@pytest.mark.parametrize(("route", "change", "message"), WRONG, ids=[f"{one} {str(change)[:40]}" for one, change, _ in WRONG])
def test_what_a_protocol_does_not_know_is_refused(running: Running, route: str, change: dict[str, Any], message: str) -> None:
    status, said = refused(running, route, BODIES.get(route, {}) | change)
    assert (status, message in said) == (400, True), said


@pytest.mark.parametrize(("route", "change"), ODD, ids=[f"{one} {str(change)[:40]}" for one, change in ODD])
def test_an_odd_request_is_answered(running: Running, route: str, change: dict[str, Any]) -> None:
    reply = running.post(route, json=BODIES[route] | change)
    assert reply.status_code == 200, reply.text

"""Anthropic's protocol through its official theirs."""

from typing import Any

import anthropic
import pytest

from cpuspec import LLM, SamplingParams
from tests.server.running import Running, prompt_of, script_answers, templated_model
from tests.server.test_tools import TEMPLATE

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "the cat sat"}]}
TOOL = {"name": "get_time", "description": "the time", "input_schema": {"type": "object"}}
USED = [
    {"role": "user", "content": [{"type": "text", "text": "time?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "let me see"},
            {"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {"zone": "CET"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "noon"}]},
            {"type": "text", "text": "thanks"},
        ],
    },
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return templated_model(tmp_path_factory.mktemp("model"), TEMPLATE)


def expected(llm: LLM, messages: list[dict[str, Any]], **settings: Any) -> Any:
    return llm.chat(messages, SamplingParams(**settings))


def test_a_greedy_message_is_the_offline_answer(theirs: anthropic.Anthropic, llm: LLM) -> None:
    wanted = expected(llm, [{"role": "system", "content": "be brief"}, *ASK["messages"]], max_tokens=12)
    answer = theirs.messages.create(system="be brief", max_tokens=12, **ASK)
    assert [block.text for block in answer.content] == [wanted.text]  # type: ignore[union-attr]
    assert answer.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[wanted.finish_reason]
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == wanted.stats.num_prompt_tokens
    assert usage.output_tokens == wanted.stats.num_new_tokens


def test_a_stream_has_the_events_in_their_order_and_adds_up(theirs: anthropic.Anthropic, llm: LLM) -> None:
    wanted = expected(llm, ASK["messages"], max_tokens=12)
    with theirs.messages.stream(max_tokens=12, **ASK) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "content_block_delta")]
        final = stream.get_final_message()
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert [block.text for block in final.content] == [wanted.text]  # type: ignore[union-attr]
    assert final.usage.output_tokens == wanted.stats.num_new_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_ended_it_is_named(theirs: anthropic.Anthropic, llm: LLM, stream: bool) -> None:
    text = expected(llm, ASK["messages"], max_tokens=12).text
    stops = ["never said", text[4:6]]
    if stream:
        with theirs.messages.stream(max_tokens=12, stop_sequences=stops, **ASK) as events:
            answer = events.get_final_message()
    else:
        answer = theirs.messages.create(max_tokens=12, stop_sequences=stops, **ASK)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", text[4:6])
    assert "".join(block.text for block in answer.content) == text[: text.index(text[4:6])]  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_tool_is_used(theirs: anthropic.Anthropic, stream: bool) -> None:
    ask: dict[str, Any] = {**ASK, "messages": USED, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_time"}}
    ask["tools"] = [TOOL | {"input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}]
    if stream:
        with theirs.messages.stream(max_tokens=8, **ask) as events:
            seen = list(events)
        blocks = [event.content_block for event in seen if event.type == "content_block_start"]
        deltas = [event.delta for event in seen if event.type == "content_block_delta"]
        assert [delta.partial_json for delta in deltas] == ["{}"]
    else:
        blocks = theirs.messages.create(max_tokens=8, **ask).content
    assert [(block.type, block.name, block.input) for block in blocks] == [("tool_use", "get_time", {})]


def test_blocks_reach_the_template_and_count(theirs: anthropic.Anthropic, llm: LLM) -> None:
    spelled = [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "time?"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "toolu_1", "function": {"name": "get_time", "arguments": {"zone": "CET"}}}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "noon"},
        {"role": "user", "content": "thanks"},
    ]
    function = {"name": "get_time", "description": "the time", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": {"parameters": {"type": "object"}, **function}}]
    wanted = len(llm.tokenizer.encode_chat(spelled, variables={"tools": tools}))
    for header in ([], [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0815;"}]):
        system = [*header, {"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
        count = theirs.messages.count_tokens(model="tiny", system=system, messages=USED, tools=[TOOL])  # type: ignore[arg-type]
        assert count.input_tokens == wanted


def test_the_clients_own_errors_are_raised(theirs: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        theirs.messages.create(max_tokens=3, **{**ASK, "model": "other"})
    with pytest.raises(anthropic.BadRequestError):
        theirs.messages.create(max_tokens=3, **{**ASK, "messages": []})


CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'


SCRIPTS = (f"<think>\nhm\n</think>\n\nI look.\n{CALL}", CALL, f"{CALL}\n{CALL}", "<think>\nhm", f"{CALL}\nIt is noon.")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_whole_message_has_the_blocks_of_the_stream(
    theirs: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    script_answers(monkeypatch, script)
    ask: dict[str, Any] = {**ASK, "max_tokens": 40, "tools": [TOOL]}
    whole = theirs.messages.create(**ask)
    with theirs.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    shown = [[block.model_dump(exclude={"id", "parsed_output"}) for block in one.content] for one in (whole, streamed)]
    assert shown[0] == shown[1] != []
    assert any(block.type in ("text", "tool_use") for block in whole.content)


@pytest.mark.parametrize("content", ["no such zone", [{"type": "text", "text": "no such zone"}], None])
def test_a_tools_failure_is_told(running: Running, theirs: anthropic.Anthropic, content: Any) -> None:
    block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, "is_error": True}
    for fails in (True, False):
        history = [*USED[:2], {"role": "user", "content": [{**block, "is_error": fails}]}]
        theirs.messages.create(model="tiny", max_tokens=1, messages=history)  # type: ignore[arg-type]
        assert ("Error:" in prompt_of(running)) == fails


def test_models_are_listed_as_its_clients_read_them(running: Running, theirs: anthropic.Anthropic) -> None:
    found = theirs.models.list()
    assert (found.has_more, found.first_id, found.last_id) == (False, "tiny", "tiny")
    (row,) = found.data
    assert (row.id, row.type, row.display_name) == ("tiny", "model", "tiny")
    assert theirs.models.retrieve("tiny") == row
    assert running.get("/v1/models").json()["object"] == "list"

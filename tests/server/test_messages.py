"""What Anthropic's protocol alone has, through its official client."""

from functools import partial
from typing import Any

import anthropic
import pytest

from cpuspec import LLM
from tests.server.running import Running, prompt_of, templated_model
from tests.server.test_tools import TEMPLATE

MODEL = partial(templated_model, template=TEMPLATE)
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
    system = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    assert theirs.messages.count_tokens(model="tiny", system=system, messages=USED, tools=[TOOL]).input_tokens == wanted


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

"""What OpenAI's Responses protocol alone has, through its official client."""

from contextlib import suppress
from functools import partial
from typing import Any

import openai
import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.server.errors import NotFoundError
from cpuspec.server.response_store import ResponseStore
from tests.server.running import Running, load, prompt_of, serving, templated_model
from tests.server.test_tools import TEMPLATE

MODEL = partial(templated_model, template=TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.reasoning_content }}"))
ASK: dict[str, Any] = {"model": "tiny", "input": "the cat sat", "temperature": 0, "max_output_tokens": 12}
ASK_AGAIN = [{"role": "user", "content": "and now?"}]
TOOL = {"type": "function", "name": "get_time", "description": "the time", "parameters": {"type": "object"}, "strict": False}


def test_a_response_is_gone_on_from(client: openai.OpenAI, llm: LLM) -> None:
    first = client.responses.create(**ASK)
    second = client.responses.create(**ASK | {"input": "and the dog"}, previous_response_id=first.id)
    talk = [{"role": "user", "content": "the cat sat"}, {"role": "assistant", "content": first.output_text}]
    wanted = llm.chat([*talk, {"role": "user", "content": "and the dog"}], SamplingParams(max_tokens=12))
    assert (second.output_text, second.previous_response_id) == (wanted.text, first.id)
    third = list(client.responses.create(**ASK | {"input": "why"}, previous_response_id=second.id, stream=True))[-1].response
    assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(third.id).output_text == third.output_text
    items = client.responses.input_items.list(third.id).data
    assert [item.content if isinstance(item.content, str) else item.content[0].text for item in items] == [
        *("why", second.output_text, "and the dog", first.output_text, "the cat sat")
    ]
    client.responses.delete(first.id)
    for forgotten in (first.id, client.responses.create(**ASK, store=False).id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
            client.responses.create(**ASK, previous_response_id=forgotten)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(forgotten)


def test_a_kept_response_is_its_keys_own(path: Any) -> None:
    with serving(lambda: load(path), ("first", "second")) as running:
        first, second = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))
        made = running.post("/v1/responses", json=ASK, headers=first).json()["id"]
        assert running.get(f"/responses/{made}", headers=first).json()["id"] == made
        assert running.get(f"/v1/responses/{made}", headers=second).status_code == 404
        assert running.request("DELETE", f"/v1/responses/{made}", headers=second).status_code == 404
        assert running.post("/v1/responses", json=ASK | {"previous_response_id": made}, headers=second).status_code == 404


def test_the_oldest_responses_are_forgotten_where_room_is_short() -> None:
    store = ResponseStore(most_bytes=1000)
    for number in range(20):
        store.store("me", {"id": str(number), "output": []}, [{"content": "x" * 60}], 100)
    known = []
    for number in range(20):
        with suppress(NotFoundError):
            known.append(int(store.get("me", str(number)).response["id"]))
    assert known == list(range(known[0], 20))
    assert 2 < len(known) < 12
    for _ in range(50):
        store.store("me", {"id": "19", "output": []}, [], 100)
    assert store.get("me", str(known[0])), "one that comes again takes its memory once"
    store.store("me", {"id": "large", "output": []}, [{"content": "x" * 600}], 620)
    with pytest.raises(NotFoundError):
        store.get("me", "large")


PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}


def test_a_custom_tool_can_be_demanded(running: Running, client: openai.OpenAI) -> None:
    client.responses.create(**{**ASK, "tools": [TOOL, PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}})
    assert '"apply_patch", "arguments": ' in prompt_of(running)


def test_a_response_tells_what_the_request_said(client: openai.OpenAI) -> None:
    said: dict[str, Any] = {"metadata": {"a": "b"}, "parallel_tool_calls": False, "truncation": "auto", "user": "me"}
    reply = client.responses.with_raw_response.create(**ASK, **said, reasoning={"summary": "auto"})
    named = set(reply.headers["x-cpuspec-ignored-fields"].split(", "))
    assert {*said, "reasoning.summary"} == named, "they change no answer"
    made = reply.parse()
    for one in (made, client.responses.retrieve(made.id)):
        assert {name: getattr(one, name) for name in said} == said
        assert one.reasoning.summary == "auto"  # type: ignore[union-attr]


@pytest.mark.parametrize("shown", [{"summary": [{"type": "summary_text", "text": "hm hm"}]}, {"content": [{"text": "hm hm"}]}])
def test_a_reasoning_item_counts_by_its_content_or_its_summary(running: Running, shown: dict[str, Any]) -> None:
    items = [
        {"role": "user", "content": "time?"},
        {"type": "reasoning", "summary": [], **shown},
        {"type": "function_call", "name": "get_time", "arguments": "{}", "call_id": "c"},
    ]
    running.post("/v1/responses", json={**ASK, "input": items})
    assert "hm hm" in prompt_of(running)


def test_reasoning_belongs_to_the_item_that_follows_it(running: Running) -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm hm"}]}
    call = {"type": "function_call", "name": "get_time", "arguments": "{}", "call_id": "c"}
    said, asked = {"role": "assistant", "content": "a mat"}, {"role": "user", "content": "time?"}
    running.post("/v1/responses", json={**ASK, "input": [asked, reasoning, asked, said, asked]})
    assert "hm hm" not in prompt_of(running), "that of an answer which was cut off in it"
    output = {"type": "function_call_output", "call_id": "c", "output": "noon"}
    running.post("/v1/responses", json={**ASK, "input": [asked, said, reasoning, call, output, said, asked]})
    prompt = prompt_of(running)
    assert prompt.count("hm hm") == 1
    assert prompt.index("hm hm") < prompt.index("noon")


def test_input_items_come_in_pages_and_may_be_referred_to(running: Running, client: openai.OpenAI) -> None:
    texts = [f"text {number}" for number in range(5)]
    made = client.responses.create(**ASK | {"input": [{"role": "user", "content": text} for text in texts]})
    first = running.get(f"/v1/responses/{made.id}/input_items", params={"limit": 2}).json()
    assert first["has_more"]
    assert (first["first_id"], first["last_id"]) == tuple(item["id"] for item in first["data"])
    assert {item["type"] for item in first["data"]} == {"message"}
    for order, wanted in (("desc", texts[::-1]), ("asc", texts)):
        pages = client.responses.input_items.list(made.id, limit=2, order=order)  # type: ignore[arg-type]
        assert [item.content for item in pages] == wanted  # type: ignore[union-attr]
    for wrong in ({"limit": 0}, {"after": "item_x"}, {"order": "up"}):
        assert running.get(f"/v1/responses/{made.id}/input_items", params=wrong).status_code in (400, 422)
    client.responses.create(**ASK | {"input": [{"type": "item_reference", "id": first["last_id"]}]})
    assert "text 3" in prompt_of(running)
    assert "text 4" not in prompt_of(running)
    client.responses.create(**ASK | {"input": [{"type": "item_reference", "id": made.output[0].id}, *ASK_AGAIN]})
    assert made.output_text in prompt_of(running)
    with pytest.raises(openai.NotFoundError, match="there is no item"):
        client.responses.create(**ASK | {"input": [{"type": "item_reference", "id": "item_x"}]})
    with pytest.raises(openai.BadRequestError, match="in the background"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")

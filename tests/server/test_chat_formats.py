"""Chats of the model families, in every protocol: reasoning, calls, what a second turn tells again. The templates are our own."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.conformance.test_protocols import PROTOCOLS
from tests.server.agents import CALLS, RESULTS, SAID, THOUGHT, TURNS, chat_body
from tests.server.running import Running, assert_in_order, load, prompt_of, script_answers, serving, stream, templated_model
from tests.server.test_agents import first_turn
from tests.server.written import as_json, as_python, as_tags, as_xml

XML_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
TAG_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}"
    "</tool_call>{% endfor %}"
)
JSON_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
JSON_TOOLS = "{% if tools %}<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>{% endif %}"
LAST = (
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
)
KEPT = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"


def chatml(tools: str, calls: str, thought: str, prompt: str = "", refuses_late_systems: bool = False) -> str:
    """A template of ChatML. thought, calls: what stands before and behind an assistant's text. prompt: behind the last header."""
    late = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('a late system message') }}{% endif %}"
    return (
        f"{LAST}{tools}{{% for m in messages %}}{late if refuses_late_systems else ''}"
        "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% else %}"
        f"<|im_start|>{{{{ m.role }}}}\n{{% if m.role == 'assistant' %}}{thought}{{% endif %}}"
        f"{{{{ m.content }}}}{calls}<|im_end|>\n"
        f"{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{prompt}{{% endif %}}"
    )


@dataclass(frozen=True)
class Family:
    """template: of the chat. said: the model's answer behind the prompt. again: how a second turn tells the calls again."""

    template: str
    said: str
    again: tuple[str, ...]
    thinks: bool = True
    switch: tuple[str, str] = ("", "")  # the ends of prompts with reasoning and without


OPEN, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
TAGS = tuple(f"<tool_call>{as_tags(call)}</tool_call>" for call in CALLS)
XML = tuple(f"<tool_call>\n{as_xml(call)}\n</tool_call>" for call in CALLS)
HERMES = tuple(map(as_json, CALLS))
PYTHON = ", ".join(map(as_python, CALLS))
SWITCHED = f"{{% if enable_thinking is defined and not enable_thinking %}}{CLOSED}{{% else %}}{OPEN}{{% endif %}}"
FAMILIES = {
    "qwen3.5": Family(
        chatml(
            JSON_TOOLS, XML_CALLS, f"{{% if loop.index0 > last.user %}}{KEPT}{{% endif %}}", SWITCHED, refuses_late_systems=True
        ),
        f"{THOUGHT}\n</think>\n\n{SAID}\n\n" + "\n".join(XML),
        XML,
        switch=(OPEN, CLOSED),
    ),
    "qwen3.5, reasoning not closed": Family(
        chatml(JSON_TOOLS, XML_CALLS, "", SWITCHED), f"{THOUGHT}\n" + "\n".join(XML), XML, switch=(OPEN, CLOSED)
    ),
    "qwen3-coder": Family(
        chatml(JSON_TOOLS, XML_CALLS, ""), f"{SAID}\n{XML[0].removeprefix('<tool_call>')}\n{XML[1]}", XML, thinks=False
    ),
    "nemotron 3": Family(
        chatml(
            JSON_TOOLS,
            XML_CALLS,
            f"{{% if loop.index0 > last.user %}}{KEPT}{{% else %}}<think></think>{{% endif %}}",
            f"{{% if enable_thinking is defined and not enable_thinking %}}<think></think>{{% else %}}{OPEN}{{% endif %}}",
        ),
        f"{THOUGHT}\n</think>\n{SAID}\n" + "\n".join(XML).replace("\n</parameter>\n</function>", "\n</function>"),
        (f"<think></think>{SAID}", *XML),
        switch=(OPEN, "<think></think>"),
    ),
    "glm-4.7": Family(
        chatml(
            JSON_TOOLS,
            TAG_CALLS,
            "{% if loop.index0 > last.user %}<think>{{ m.reasoning_content }}</think>{% else %}</think>{% endif %}",
            "{% if enable_thinking is defined and not enable_thinking %}</think>{% else %}<think>{% endif %}",
        ),
        f"{THOUGHT}</think>{SAID}" + "".join(TAGS),
        TAGS,
        switch=("<think>", "</think>"),
    ),
    "lfm2": Family(
        chatml("{% if tools %}List of tools: [{{ tools | tojson }}]{% endif %}<think></think>", "", ""),
        f"<think>\n{THOUGHT}\n</think>\n{SAID}<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
        (f"{SAID}\n<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",),
    ),
    "granite 4": Family(
        chatml(JSON_TOOLS, JSON_CALLS, "").replace("<|im_start|>", "<|start_of_role|>").replace("<|im_end|>", "<|end_of_text|>"),
        f"{SAID}\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in HERMES),
        HERMES,
        thinks=False,
    ),
    "falcon-h1": Family(
        chatml(JSON_TOOLS.replace("</tools>", "</tools> Answer within <tool_call></tool_call>"), "", ""),
        f"{SAID}\n<tool_call>\n[\n{HERMES[0]},\n{HERMES[1]}\n]\n</tool_call>",
        HERMES,
        thinks=False,
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def running(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = templated_model(tmp_path_factory.mktemp("model"), family.template, context_length=16384)
    with serving(lambda: load(directory), max_new_tokens=3) as found:
        yield found


@pytest.mark.parametrize("agent", ["roo", "Claude Code", "Codex"])
def test_calls_and_reasoning_come_apart_and_are_told_again(
    family: Family, running: Running, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    script_answers(monkeypatch, family.said)
    found, asked = first_turn(running, agent)
    assert (found.thought, found.text.strip()) == (THOUGHT * family.thinks, SAID * (SAID in family.said))
    assert (found.calls, found.end) == (CALLS, "calls")
    stream(running, PROTOCOLS[TURNS[agent][0]].path, asked)
    assert_in_order(prompt_of(running), "my notes?", *family.again, *RESULTS)


def test_reasoning_is_switched_by_every_protocol(family: Family, running: Running) -> None:
    asked = [{"role": "user", "content": "hello"}]
    for on, end in zip((True, False), family.switch, strict=True):
        chat = {"messages": asked, "max_tokens": 1}
        thinking = {"type": "enabled", "budget_tokens": 1024} if on else {"type": "disabled"}
        for path, body in (
            ("/v1/chat/completions", {**chat, "enable_thinking": on}),
            ("/v1/chat/completions", {**chat, "chat_template_kwargs": {"enable_thinking": on}}),
            ("/v1/messages", {**chat, "thinking": thinking}),
            ("/v1/responses", {"input": "hello", "reasoning": {"effort": "high" if on else "none"}}),
            ("/api/chat", {**chat, "think": on, "stream": False}),
        ):
            with running.client() as client:
                reply = client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            assert f"assistant\n{end}" in prompt_of(running)


def test_arguments_that_are_no_object_do_not_end_a_conversation(family: Family, running: Running) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "shell", "arguments": '{"broken": '}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "no JSON"},
    ]
    with running.client() as client:
        reply = client.post("/apply-template", json={"messages": messages, "tools": chat_body("roo", [])["tools"]})
    assert reply.status_code == 200, reply.text
    assert_in_order(reply.json()["prompt"], "shell", "broken", "no JSON")

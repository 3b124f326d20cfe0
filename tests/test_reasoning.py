"""Stop strings of conversations count in content, not in the reasoning before it."""

from pathlib import Path

import pytest

from cpuspec.cli.answer import stream_answer
from cpuspec.engine.llm import LLM
from cpuspec.evaluate.answers import answer_all
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.text import reasoning
from tools.make_tiny_model import make_tiny_hf

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if think | default(true) %}<think>\n{% endif %}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "the cat sat"}]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    """A model whose template opens the reasoning, unless it is told not to."""
    path = make_tiny_hf(tmp_path / "hf", context_length=256)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return LLM(path, "none", settings=EngineConfig(threads=1, max_sequences=2))


@pytest.mark.parametrize("thinks", [True, False])
def test_a_stop_string_counts_in_content_only(llm: LLM, thinks: bool) -> None:
    variables = {"think": thinks}
    whole = llm.chat(MESSAGES, PARAMS, chat_template_kwargs=variables).text
    stop = whole[len(whole) // 2 :][:3]
    params = SamplingParams(max_tokens=24, ignore_eos=True, stop=(stop,))
    (listed,) = llm.chat([MESSAGES], params, chat_template_kwargs=variables)
    found = [
        llm.chat(MESSAGES, params, chat_template_kwargs=variables).text,
        listed.text,
        "".join(output.text for output in llm.stream(MESSAGES, params, chat_template_kwargs=variables)),
        stream_answer(llm, MESSAGES, params, lambda _: None, variables=variables).text,
    ]
    cut = whole.partition(stop)[0]
    assert found == [whole if thinks else cut] * 4
    ids = llm.tokenizer.encode_chat(MESSAGES, variables=variables)
    assert llm.generate([ids], params)[0].text == cut, "a raw prompt has no reasoning"
    if thinks:
        (measured,), _ = answer_all(llm, [(MESSAGES, params)])
        assert measured.text == whole


def test_a_mark_that_the_text_hides_tells_no_reasoning(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning, "REASONING", (marks := ("<|im_start|>", "<|im_end|>"),))
    prompt = llm.tokenizer.encode("<|im_start|>", add_special=False, parse_special=True)
    assert reasoning.stop_scope(llm.tokenizer, "", prompt) == ([], "")
    shown = frozenset(found for mark in marks if (found := llm.tokenizer.token_id(mark)) is not None)
    assert len(shown) == 2
    assert reasoning.stop_scope(llm.tokenizer, "", prompt, shown) == ([marks], "<|im_end|>")


def test_of_channels_only_the_last_is_content() -> None:
    parts = reasoning.reasoning_parts("<|channel|>analysis")
    assert parts == [("<|start|>", "final<|message|>"), ("<|channel|>", "final<|message|>")]

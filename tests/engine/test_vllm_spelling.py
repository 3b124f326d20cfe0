"""Prompts, params and messages as programs written for vLLM have them, and streams of an event loop."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM, AsyncLLM, SamplingParams
from cpuspec.cli.app import whole_command
from cpuspec.errors import ConfigError
from tests.server.running import templated_model
from tools.make_tiny_model import make_tiny_gguf

LONG = {"max_tokens": 30, "ignore_eos": True}
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, "ngram", threads=1, max_sequences=4) as loaded:
        yield loaded


def test_prompts_are_dicts_too(llm: LLM) -> None:
    ids = llm.tokenizer.encode_prompt("the cat sat")
    prompts: list[Any] = ["the cat sat", {"prompt": "the cat sat"}, {"prompt_token_ids": ids}]
    answers = llm.generate(prompts, max_tokens=9)
    assert len({one.text for one in answers}) == 1
    assert llm.generate(prompts[2], max_tokens=9)[0].token_ids == answers[0].token_ids  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a prompt is"):
        llm.generate({"text": "a"}, max_tokens=1)  # type: ignore[arg-type]


def test_minus_one_is_off() -> None:
    assert SamplingParams(top_k=-1, seed=-1) == SamplingParams()
    for wrong in ({"top_k": -2}, {"seed": -2}, {"seed": True}):
        with pytest.raises(ConfigError):
            SamplingParams(**wrong)  # type: ignore[arg-type]


def test_an_answer_has_the_names_of_a_request_output(llm: LLM) -> None:
    ids = llm.tokenizer.encode_prompt("the cat sat")
    sampled = SamplingParams(n=2, temperature=1.0, seed=3, logprobs=1, prompt_logprobs=2, **LONG)
    prompts: list[Any] = ["the cat sat", {"prompt_token_ids": ids}]
    answers = llm.generate(prompts, [sampled, SamplingParams(max_tokens=3)])
    assert [one.prompt for one in answers] == ["the cat sat", None]
    assert [one.prompt_token_ids for one in answers] == [ids, ids]
    assert [len(one.outputs) for one in answers] == [2, 1]
    first, second = answers[0].outputs
    assert (first.index, second.index) == (0, 1)
    assert first.text != second.text
    assert second.cumulative_logprob == sum(one.logprob for one in second.logprobs)
    assert answers[0].prompt_logprobs == [None, *llm.score([ids], 2)[0]]
    assert answers[1].prompt_logprobs is None
    assert answers[1].outputs[0].cumulative_logprob is None
    talk = llm.chat("the cat", max_tokens=3)
    assert talk.prompt == llm.tokenizer.decode(talk.prompt_token_ids, skip_special=False)
    assert talk.prompt_token_ids == llm.tokenizer.encode_chat([{"role": "user", "content": "the cat"}])
    with pytest.raises(ConfigError, match="prompt_logprobs"):
        llm.stream("the cat", prompt_logprobs=0)


@pytest.mark.parametrize("num_drafted", [None, 0])
def test_the_reason_of_a_stop_is_told(llm: LLM, num_drafted: int | None) -> None:
    params: dict[str, Any] = {"max_draft_tokens": num_drafted, **LONG}
    usual = llm.generate("the cat", **params)[0]
    assert (usual.finish_reason, usual.stop_reason) == ("length", None)
    stop, token = usual.text[5:8], usual.token_ids[4]
    at_text, at_id = llm.generate(
        ["the cat"] * 2, [SamplingParams(**params, stop=["~", stop]), SamplingParams(**params, stop_token_ids=[token])]
    )
    assert (at_text.finish_reason, at_text.stop_reason) == ("stop", stop)
    assert (at_id.finish_reason, at_id.stop_reason) == ("stop", token)
    assert at_id.token_ids == usual.token_ids[: usual.token_ids.index(token) + 1]
    end = min(llm.tokenizer.eos_ids)
    ended = llm.generate("the cat", logit_bias={end: 100.0}, stop_token_ids=[end])[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None), "the model's own end is no stop that was asked for"


def test_code_that_changes_logits_is_refused_with_what_to_use(llm: LLM) -> None:
    assert SamplingParams(logits_processors=None) == SamplingParams(logits_processors=[]) == SamplingParams()  # type: ignore[arg-type]
    for call in (SamplingParams, lambda **given: llm.generate("a", **given)):
        with pytest.raises(ConfigError, match=r"logits_processors must be left out.*logit_bias"):
            call(logits_processors=[lambda ids, logits: logits])


def test_a_stream_is_checked_before_its_first_output(llm: LLM) -> None:
    for wrong in ({"logit_bias": {10**6: 1.0}}, {"regex": "("}, {"draft": "smollm2-135m-instruct"}):
        with pytest.raises(ConfigError):
            llm.stream("the cat", **wrong)
    with pytest.raises(ConfigError, match="prompt token ids"):
        llm.stream([10**6])


def test_an_answer_has_one_longest_length_by_default(llm: LLM) -> None:
    for command in ("generate", "chat", "batch"):
        (option,) = [one for one in whole_command(command).params if one.name == "max_tokens"]
        assert option.default == SamplingParams().max_tokens


def test_parts_and_tools_and_continued_messages_reach_the_template(llm: LLM) -> None:
    parts: Any = [{"type": "text", "text": "the cat"}, {"type": "text", "text": "sat"}]
    assert llm.chat([{"role": "user", "content": parts}]).text == llm.chat("the cat\nsat").text
    with pytest.raises(ConfigError, match="parts"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}]
    whole = llm.tokenizer.encode_chat(talk, continues=True)
    answer = llm.chat(talk, continue_final_message=True, max_tokens=5)
    assert answer.text == llm.generate([whole], max_tokens=5)[0].text


def test_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    with LLM(templated_model(tmp_path, template), "none", threads=1) as llm:
        assert llm.chat("cat", tools=[tool], max_tokens=9).text == llm.generate("look cat", max_tokens=9)[0].text


@pytest.mark.parametrize("way", WAYS)
def test_only_allowed_tokens_come(llm: LLM, way: dict[str, Any]) -> None:
    usual = llm.generate("the cat", **LONG, **way)[0].token_ids
    allowed = sorted({*usual[1::2], 7, 9} - {usual[0]})
    drafted, plain = (
        llm.generate("the cat", allowed_token_ids=allowed, max_draft_tokens=most, **LONG, **way)[0].token_ids for most in (None, 0)
    )
    assert drafted == plain
    assert set(drafted) <= set(allowed)
    assert not set(usual) <= set(allowed), "else the limit changed nothing"
    with pytest.raises(ConfigError, match="allowed_token_ids ids must be in"):
        llm.generate("the cat", allowed_token_ids=[10**6])
    with pytest.raises(ConfigError, match="leave out allowed_token_ids"):
        SamplingParams(allowed_token_ids=(1,), regex="a")


@pytest.mark.parametrize("way", WAYS)
def test_bad_words_never_come_and_their_beginnings_do(llm: LLM, way: dict[str, Any]) -> None:
    usual = llm.generate("the cat", **LONG, **way)[0]
    tokenizer = llm.tokenizer
    pairs = [tokenizer.decode(usual.token_ids[at : at + 2]) for at in range(len(usual.token_ids) - 1)]
    bad = next(text for at, text in enumerate(pairs) if tokenizer.encode(text, add_special=False) == usual.token_ids[at : at + 2])
    singles = [(token, tokenizer.decode([token])) for token in usual.token_ids]
    one = next(text for token, text in singles if tokenizer.encode(text, add_special=False) == [token])
    for word in (bad, one):
        ids = tokenizer.encode(word, add_special=False)
        found = [llm.generate("the cat", bad_words=word, max_draft_tokens=most, **LONG, **way)[0].token_ids for most in (None, 0)]
        assert found[0] == found[1] != usual.token_ids
        assert not any(found[0][at : at + len(ids)] == ids for at in range(len(found[0])))


def test_limits_that_leave_no_first_token_are_refused(llm: LLM) -> None:
    token = next(one for one in range(300) if llm.tokenizer.encode(llm.tokenizer.decode([one]), add_special=False) == [one])
    bad = llm.tokenizer.decode([token])
    with pytest.raises(ConfigError, match="no token may begin the answer"):
        llm.generate("the cat", allowed_token_ids=[token], bad_words=bad, **LONG)
    both = {"allowed_token_ids": [token, token + 1], "bad_words": bad}
    assert set(llm.generate("the cat", **both, **LONG)[0].token_ids) == {token + 1}


def test_the_stop_text_and_special_tokens_are_shown_on_request(llm: LLM) -> None:
    usual = llm.generate("the cat", **LONG)[0].text
    stop = usual[5:8]
    cut, shown = (llm.generate("the cat", stop=stop, include_stop_str_in_output=keeps, **LONG)[0].text for keeps in (False, True))
    assert shown == cut + stop == usual[: usual.index(stop) + len(stop)]
    end = min(llm.tokenizer.eos_ids)
    params = {"logit_bias": {end: 100.0}, "ignore_eos": True, "max_tokens": 3}
    hidden, told = (llm.generate("the cat", skip_special_tokens=skips, **params)[0].text for skips in (True, False))
    assert (hidden, told) == ("", 3 * llm.tokenizer.decode([end], skip_special=False))


def test_streams_of_an_event_loop_are_those_of_the_llm(path: Path, llm: LLM) -> None:
    prompts = ["the cat", "a dog sat", "the mat"]
    wanted = [one.text for one in llm.generate(prompts, **LONG)]

    async def told(model: AsyncLLM, prompt: str) -> str:
        return "".join([output.text async for output in model.generate(prompt, **LONG)])

    async def main() -> None:
        async with AsyncLLM(path, "ngram", threads=1, max_sequences=4) as model:
            assert await asyncio.gather(*(told(model, prompt) for prompt in prompts)) == wanted
            left = asyncio.create_task(told(model, "the cat " * 40))
            await asyncio.sleep(0)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            async for _ in model.generate(prompts[0], **LONG):
                break
            assert await told(model, prompts[1]) == wanted[1], "places of requests that were left are free"
            with pytest.raises(ConfigError):
                await told(model, [10**6])  # type: ignore[arg-type]

    asyncio.run(main())

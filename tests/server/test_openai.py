"""What OpenAI's chat and plain completions alone have, through its official client, against the answers of the Python interface."""

import re
from typing import Any

import openai
import pytest

from cpuspec import LLM, SamplingParams
from tests.server.running import Running

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat sat on the mat"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
IGNORE = {"extra_body": {"ignore_eos": True}}


def test_several_answers_are_the_offline_ones(client: openai.OpenAI, llm: LLM) -> None:
    settings: dict[str, Any] = {"temperature": 0.9, "seed": 11, "max_tokens": 15, "n": 3}
    wanted = llm.chat(MESSAGES, SamplingParams(ignore_eos=True, **settings))
    texts = [""] * 3
    for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **settings, **IGNORE):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [one.text for one in wanted.outputs]


def test_plain_completions_take_texts_ids_and_lists(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    wanted = [one.text for one in llm.generate(["the dog", "a small model"], params)]
    ids = [llm.tokenizer.encode(text) for text in ("the dog", "a small model")]
    for prompt in (["the dog", "a small model"], ids):
        answer = client.completions.create(prompt=prompt, max_tokens=8, **GREEDY, **IGNORE)  # type: ignore[call-overload]
        assert [choice.text for choice in answer.choices] == wanted
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    for single in ("the dog", ids[0]):
        answer = client.completions.create(prompt=single, max_tokens=8, echo=True, **GREEDY, **IGNORE)  # type: ignore[call-overload]
        assert answer.choices[0].text == "the dog" + wanted[0]
    stream = client.completions.create(prompt="the dog", max_tokens=8, stream=True, echo=True, **GREEDY, **IGNORE)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in stream) == "the dog" + wanted[0]


WRITTEN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_control_tokens_that_a_client_writes_count_in_raw_prompts_and_never_in_messages(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode(WRITTEN, parse_special=True)
    plain = llm.tokenizer.encode(WRITTEN)
    assert len(ids) < len(plain)
    for extra, wanted in (({}, ids), ({"parse_special": False}, plain)):
        body = {**IGNORE["extra_body"], **extra}
        answer = client.completions.create(prompt=WRITTEN, max_tokens=4, **GREEDY, extra_body=body)  # type: ignore[call-overload]
        (offline,) = llm.generate(WRITTEN, SamplingParams(max_tokens=4, ignore_eos=True), **extra)
        streamed = [*llm.stream(WRITTEN, SamplingParams(max_tokens=4, ignore_eos=True), **extra)]
        (exact,) = llm.generate([wanted], SamplingParams(max_tokens=4, ignore_eos=True))
        assert answer.choices[0].text == offline.text == exact.text == "".join(output.text for output in streamed)
        assert answer.usage.prompt_tokens == offline.stats.num_prompt_tokens == len(wanted)
    message = [{"role": "user", "content": WRITTEN}]
    answer = client.chat.completions.create(messages=message, max_tokens=1, **GREEDY, extra_body={"parse_special": True})  # type: ignore[call-overload]
    assert answer.usage.prompt_tokens == len(llm.tokenizer.encode_chat(message)) > len(plain)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, llm: LLM, max_tokens: int, stream: bool) -> None:
    texts = ["the dog sat on the mat", "the dog", "a cat " * 40]
    ids = [llm.tokenizer.encode_prompt(text) for text in texts]
    answers = llm.generate(ids, SamplingParams(max_tokens=3, logprobs=2))
    new = [one.token_ids for one in answers]
    wanted = [scores + one.logprobs[:max_tokens] for scores, one in zip(llm.score(ids, 2), answers, strict=True)]
    options: dict[str, Any] = {"max_tokens": max_tokens, "echo": True, "logprobs": 2, "stream": stream}
    answer: Any = client.completions.create(prompt=ids, **GREEDY, **options)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    for number, scores in enumerate(wanted):
        parts = [one.logprobs for one in choices if one.index == number and one.logprobs]
        likely = [one for part in parts for one in part.token_logprobs]
        assert likely[0] is None
        assert likely[1:] == [one.logprob for one in scores]
        tops = [top for part in parts for top in part.top_logprobs or ()]
        assert tops[0] is None
        assert [max(top.values()) for top in tops[1:]] == [one.top[0][1] for one in scores]
        text = "".join(one.text for one in choices if one.index == number)
        assert text == llm.tokenizer.decode(ids[number] + new[number][:max_tokens], skip_special=False)
        offsets = [one for part in parts for one in part.text_offset]
        assert offsets == sorted(offsets)
    if not stream:
        num_prompt, num_new = sum(map(len, ids)), max_tokens * len(ids)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_new)


@pytest.mark.parametrize("number", [0, 3])
def test_prompt_logprobs_are_the_offline_scores(client: openai.OpenAI, llm: LLM, number: int) -> None:
    """As vLLM spells them: of a plain completion each choice has them, of a chat the whole answer."""
    prompts = [llm.tokenizer.encode_prompt(text) for text in ("the dog sat", "a cat")]
    extra: dict[str, Any] = {"extra_body": {"prompt_logprobs": number}}
    plain: Any = client.completions.create(prompt=prompts, max_tokens=2, n=2, echo=True, logprobs=1, **GREEDY, **extra)
    message = [{"role": "user", "content": "the dog"}]
    chat: Any = client.chat.completions.create(messages=message, max_tokens=2, **GREEDY, **extra)
    found = [(prompts[choice.index // 2], choice.prompt_logprobs) for choice in plain.choices]
    for ids, told in [*found, (llm.tokenizer.encode_chat(message), chat.prompt_logprobs)]:
        assert told[0] is None
        texts = [one[str(token)]["decoded_token"] for token, one in zip(ids[1:], told[1:], strict=True)]
        assert "".join(texts) == llm.tokenizer.decode(ids[1:], skip_special=False)
        for token, one, wanted in zip(ids[1:], told[1:], llm.score([ids], number)[0], strict=True):
            tops = {str(top): {"logprob": logprob, "rank": rank} for rank, (top, logprob) in enumerate(wanted.top, 1)}
            assert len(one) == len(tops | {str(token): {}})
            assert one[str(token)]["logprob"] == wanted.logprob
            for key, entry in one.items():
                del entry["decoded_token"]
                assert entry == tops.get(key, {"logprob": wanted.logprob, "rank": None})
    assert all(len(top) == 1 for top in plain.choices[0].logprobs.top_logprobs[1:]), "the echo has what it asked for"
    for wrong in ({"stream": True, **extra}, {"extra_body": {"prompt_logprobs": 21}}):
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
            client.chat.completions.create(messages=message, max_tokens=2, **GREEDY, **wrong)  # type: ignore[call-overload]


def test_speculation_is_the_requests_choice_and_changes_no_answer(client: openai.OpenAI, llm: LLM) -> None:
    drafted = {}
    for draft, most in (("auto", None), ("ngram", 2), ("suffix:tree@3", None), ("none", None), ("auto", 0)):
        extra = {"ignore_eos": True, "speculation": {"draft": draft, "max_draft_tokens": most}}
        repeat = [{"role": "user", "content": "one two three " * 20}]
        answer = client.chat.completions.create(messages=repeat, max_tokens=40, extra_body=extra, **GREEDY)  # type: ignore[call-overload]
        drafted[draft, most] = answer.timings["draft_n"], answer.choices[0].message.content
    assert drafted["none", None][0] == drafted["auto", 0][0] == 0
    assert drafted["auto", None][0] > 0
    assert drafted["suffix:tree@3", None][0] > 0
    assert len({text for _, text in drafted.values()}) == 1
    for draft in ("self:mxfp4", "os:path", "ngram,"):
        with pytest.raises(openai.BadRequestError, match=r"a request drafts with 'ngram', 'suffix'|cannot read ''"):
            client.chat.completions.create(  # type: ignore[call-overload]
                messages=MESSAGES, extra_body={"speculation": {"draft": draft}}, **GREEDY
            )


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_text_and_tokens_convert(running: Running, llm: LLM) -> None:
    found = running.post("/tokenize", json={"content": "the cat", "with_pieces": True}).json()["tokens"]
    ids = [one["id"] for one in found]
    assert ids == llm.tokenizer.encode("the cat", add_special=False)
    assert "".join(one["piece"] for one in found) == "the cat"
    assert running.post("/detokenize", json={"tokens": ids}).json()["content"] == "the cat"
    assert running.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
    shown = running.post("/apply-template", json={"messages": MESSAGES}).json()["prompt"]
    assert shown == llm.tokenizer.apply_chat_template(MESSAGES)


def test_state_and_metrics_tell_what_happened(running: Running, client: openai.OpenAI, llm: LLM) -> None:
    client.completions.create(prompt="one two " * 30, max_tokens=20, **GREEDY, **IGNORE)  # type: ignore[call-overload]
    assert running.get("/health").json() == {"status": "ok"}
    assert running.get("/props").json()["draft"] == "ngram"
    assert [slot["is_processing"] for slot in running.get("/slots").json()] == [False] * 4
    text = running.get("/metrics").text
    for name in (
        *("time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "generation_tokens_total"),
        *("request_time_per_output_token_seconds_count", "prefix_cache_hits_total", "num_requests_running"),
        *('spec_decode_num_rounds_total{level="ngram"', 'spec_decode_num_draft_tokens_total{level="ngram"'),
        *('spec_decode_mean_acceptance_length{level="ngram"', 'model_forwards_total{level="target"'),
    ):
        assert f"cpuspec:{name}" in text
    assert 'quantile="0.99"' in text
    forwards, read = (
        sum(float(value) for value in re.findall(rf'^cpuspec:{name}_total{{level="target".*}} (\S+)$', text, re.M))
        for name in ("model_forwards", "weight_bytes_read")
    )
    [target] = llm.memory()
    assert 0 < read <= forwards * target.weight_bytes
    assert "cpuspec:num_requests_running{" in text


def test_a_predicted_output_changes_no_answer_and_saves_steps(client: openai.OpenAI, llm: LLM) -> None:
    wanted = llm.chat(MESSAGES, SamplingParams(max_tokens=40, ignore_eos=True))
    accepted = []
    for prediction in (None, wanted.text, [{"type": "text", "text": wanted.text}], "something else"):
        given = {} if prediction is None else {"prediction": {"type": "content", "content": prediction}}
        answer = client.chat.completions.create(messages=MESSAGES, max_tokens=40, **GREEDY, **IGNORE, **given)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == wanted.text
        accepted.append(answer.usage.completion_tokens_details.accepted_prediction_tokens)
    assert min(accepted[1:3]) > accepted[0]


def test_likely_tokens_that_are_parts_of_characters_stay_apart(client: openai.OpenAI, llm: LLM) -> None:
    found = client.completions.create(model="tiny", prompt="the é", max_tokens=8, logprobs=20, extra_body={"ignore_eos": True})
    logprobs = found.choices[0].logprobs
    assert all(len(top) == 20 for top in logprobs.top_logprobs), "no two tokens have one name"  # type: ignore[union-attr]
    names = {name for top in logprobs.top_logprobs for name in top}  # type: ignore[union-attr]
    assert any(name.startswith("bytes:\\x") for name in names)
    assert "\ufffd" not in names

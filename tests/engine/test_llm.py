"""The Python interface over a toy model: what goes in, what comes out, and what is left behind."""

from typing import Any

import numpy as np
import pytest

from cpuspec.engine.draft_spec import LOOKUPS
from cpuspec.engine.llm import LLM, Completion
from cpuspec.errors import ConfigError, CpuspecError
from cpuspec.settings import EngineConfig, SamplingParams, SpecConfig
from tests.toys import ToyBackend, ToyTokenizer, plain_greedy

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def toy_llm(spec: str | None = None, max_sequences: int = 2, **tokenizer: Any) -> LLM:
    toy_tokenizer = ToyTokenizer(8)
    for name, value in tokenizer.items():
        setattr(toy_tokenizer, name, value)
    settings = EngineConfig(max_sequences=max_sequences)
    return LLM.from_backend(ToyBackend(2, memory=0.3), toy_tokenizer, spec, settings)  # type: ignore[arg-type]


def expected(prompt: list[int], params: SamplingParams = PARAMS) -> dict[str, Any]:
    return plain_greedy(ToyBackend(2, memory=0.3), ToyTokenizer(8), prompt, params)


def num_free_slots(llm: LLM) -> int:
    return len(llm.context.slots.free)


@pytest.mark.parametrize("spec", [None, "none", *LOOKUPS])
def test_prompts_are_texts_or_ids_and_answers_come_in_their_order(spec: str | None) -> None:
    llm = toy_llm(spec)
    prompts = ["abab", [0, 7, 6], (0, 5), np.array([0, 4, 4])]
    answers = llm.generate(prompts, PARAMS)  # type: ignore[arg-type]
    for ids, answer in zip(([0, 4, 5, 4, 5], [0, 7, 6], [0, 5], [0, 4, 4]), answers, strict=True):
        assert isinstance(answer, Completion)
        assert answer.token_ids == expected(ids)["token_ids"]
        assert answer.text == expected(ids)["text"]
        assert answer.finish_reason == "length"
        assert answer.stats.num_prompt_tokens == len(ids)
    for single in ("abab", [0, 4, 5, 4, 5]):
        assert [answer.token_ids for answer in llm.generate(single, PARAMS)] == [answers[0].token_ids]
    assert llm.generate([]) == []


@pytest.mark.parametrize("spec", ["none", *LOOKUPS])
def test_the_parts_of_rounds_add_up_to_the_time_of_steps(spec: str) -> None:
    llm = toy_llm(spec)
    assert sum(part.seconds for part in llm.round_parts()) == 0
    llm.generate(["abab", "ab"], PARAMS)
    parts = {part.name: part for part in llm.round_parts()}
    assert sum(part.count for name, part in parts.items() if "forwards over" in name) == llm.reads()[-1].num_forwards
    whole_s = llm.context.spent.of("step")
    assert sum(part.seconds for part in parts.values()) == pytest.approx(whole_s)
    assert all(part.seconds >= 0 for part in parts.values())


def test_params_are_for_all_or_one_each_and_greedy_by_default() -> None:
    llm = toy_llm()
    one, two = llm.generate(["ab", "ab"], [PARAMS, SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1)])
    assert one.token_ids[:3] == two.token_ids
    assert (len(one.logprobs), len(two.logprobs)) == (0, 3)
    assert llm.generate("ab")[0].token_ids == expected([0, 4, 5], SamplingParams())["token_ids"]
    with pytest.raises(ConfigError, match="got 1 sampling params for 2 prompts"):
        llm.generate(["ab", "ab"], [PARAMS])


def test_chat_answers_one_conversation_or_several() -> None:
    llm = toy_llm()
    first = [{"role": "user", "content": "ab"}]
    second = [*first, {"role": "assistant", "content": "c"}]
    answer = llm.chat(first, PARAMS)
    assert isinstance(answer, Completion)
    assert answer.token_ids == expected([0, 4, 5])["token_ids"]
    assert llm.chat("ab", PARAMS).token_ids == answer.token_ids
    answers = llm.chat([first, second], PARAMS)
    assert isinstance(answers, list)
    assert [one.token_ids for one in answers] == [answer.token_ids, expected([0, 4, 5, 6])["token_ids"]]


@pytest.mark.parametrize("prompt", ["ab", [0, 4, 5], [{"role": "user", "content": "ab"}]])
def test_a_stream_adds_up_to_the_completion(prompt: Any) -> None:
    parts = list(toy_llm("ngram").stream(prompt, PARAMS))
    assert [token for part in parts for token in part.token_ids] == expected([0, 4, 5])["token_ids"]
    assert "".join(part.text for part in parts) == expected([0, 4, 5])["text"]
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert parts[-1].stats is not None


def test_closing_or_leaving_a_stream_frees_its_slot() -> None:
    llm = toy_llm(max_sequences=1)
    for part in llm.stream("ab", PARAMS):
        assert num_free_slots(llm) == 0
        assert part.finish_reason is None
        break
    stream = llm.stream("ab", PARAMS)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    unstarted = llm.stream("ab", PARAMS)
    del unstarted
    assert num_free_slots(llm) == 1
    assert not llm.engine.has_work
    assert not llm._shared._inboxes


def test_streams_and_batches_interleave() -> None:
    llm = toy_llm(max_sequences=2)
    first, second, third = (llm.stream(prompt, PARAMS) for prompt in ("a", "b", "c"))  # one more than there are slots
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    got[0] += next(first).token_ids
    got[1] += next(second).token_ids
    (answer,) = llm.generate("d", PARAMS)
    for index, stream in ((2, third), (0, first), (1, second)):
        for part in stream:
            got[index] += part.token_ids
    assert answer.token_ids == expected([0, 7])["token_ids"]
    assert got == {index: expected([0, 4 + index])["token_ids"] for index in range(3)}


@pytest.mark.parametrize("interrupt", [True, False])
def test_an_answer_that_is_broken_off_leaves_its_figures(interrupt: bool) -> None:
    llm = toy_llm()
    assert llm.aborted_stats is None
    llm.generate("ab", PARAMS)
    assert llm.aborted_stats is None
    stream = llm.stream("ab", PARAMS)
    num_tokens = sum(len(next(stream).token_ids) for _ in range(2))
    whole = llm.backend.forward

    def interrupted(batch: Any, cache: Any) -> Any:
        raise KeyboardInterrupt

    if interrupt:
        llm.backend.forward = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        llm.backend.forward = whole  # type: ignore[method-assign]
    else:
        stream.close()  # type: ignore[attr-defined]
    assert llm.aborted_stats is not None
    assert llm.aborted_stats.num_new_tokens == num_tokens
    assert not llm.engine.has_work


def test_an_answer_whose_end_was_lost_says_so_instead_of_waiting() -> None:
    llm = toy_llm(max_sequences=2)
    short = llm.stream("ab", SamplingParams(max_tokens=2, ignore_eos=True))
    next(short)
    llm.engine.step()  # somebody takes the outputs and loses them
    with pytest.raises(CpuspecError, match="was lost"):
        list(short)


def test_an_empty_prompt_starts_from_the_beginning_of_text_or_is_a_clear_error() -> None:
    assert toy_llm().generate([[]], PARAMS)[0].token_ids == expected([0])["token_ids"]
    assert toy_llm().generate("", PARAMS)[0].token_ids == expected([0])["token_ids"]
    with pytest.raises(ConfigError, match="no beginning-of-text token"):
        toy_llm(bos_id=None).generate([[]], PARAMS)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[0, 8]], r"must be in \[0, 8\)"),
        ([[0] * 64], "prompt has 64 tokens and the context holds 64"),
        (["a" * 70], "prompt has 71 tokens and the context holds 64"),
        ([[0, 4.5]], "a prompt is a text, a list of token ids"),
        ([None], "a prompt is a text, a list of token ids"),
        (7, "prompts are texts or lists of token ids"),
        (b"ab", "prompts are texts or lists of token ids"),
        ({"role": "user", "content": "hi"}, "a prompt is a text, a list of token ids"),
    ],
)
def test_prompts_that_cannot_run_are_clear_errors_and_leave_nothing_behind(prompts: Any, message: str) -> None:
    llm = toy_llm()
    with pytest.raises(ConfigError, match=message):
        llm.generate(["ab", *prompts] if isinstance(prompts, list) else prompts, PARAMS)
    assert not llm.engine.has_work
    assert not llm._shared._inboxes


def test_settings_that_cannot_hold_are_clear_errors() -> None:
    with pytest.raises(ConfigError, match="context_length must be at most 64, what this model was trained for; got 65"):
        LLM.from_backend(ToyBackend(1), ToyTokenizer(8), None, EngineConfig(context_length=65))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="drafter 'psychic' is none of"):
        LLM("no such model either", spec="psychic")
    llm = LLM.from_backend(ToyBackend(1), ToyTokenizer(8), SpecConfig.parse("ngram@2"), EngineConfig(context_length=9))  # type: ignore[arg-type]
    assert (llm.context_length, str(llm.spec), llm.config.vocab_size) == (9, "ngram@2", 8)


def test_a_closed_model_says_so() -> None:
    with toy_llm() as llm:
        stream = llm.stream("ab", PARAMS)
        next(stream)
    assert llm.backend.closed  # type: ignore[attr-defined]
    llm.close()
    for use in (lambda: llm.generate("ab"), lambda: llm.stream("ab"), lambda: list(stream)):
        with pytest.raises(ConfigError, match="this LLM is closed"):
            use()


@pytest.mark.parametrize(
    "messages", [["ab"], ["ab", "cd"], {"role": "user", "content": "ab"}, 5, None, b"ab", [[]], [[{"role": "user"}], "ab"], []]
)
def test_what_is_no_conversation_is_a_clear_error(messages: Any) -> None:
    llm = toy_llm()
    if messages == []:
        assert llm.chat(messages, PARAMS) == []
        return
    with pytest.raises(ConfigError, match="messages are a text, a list of messages"):
        llm.chat(messages, PARAMS)
    assert not llm.engine.has_work


def test_fields_of_params_can_be_given_by_name() -> None:
    llm = toy_llm()
    (wanted,) = llm.generate("ab", SamplingParams(max_tokens=5, ignore_eos=True))
    assert llm.generate("ab", max_tokens=5, ignore_eos=True)[0].token_ids == wanted.token_ids
    assert llm.generate("ab", PARAMS, max_tokens=5)[0].token_ids == wanted.token_ids
    assert llm.chat("ab", PARAMS, max_tokens=5).token_ids == wanted.token_ids
    assert [token for part in llm.stream("ab", PARAMS, max_tokens=5) for token in part.token_ids] == wanted.token_ids
    one, two = llm.generate(["ab", "ab"], [PARAMS, SamplingParams(max_tokens=2)], max_tokens=5, ignore_eos=True)
    assert one.token_ids == two.token_ids == wanted.token_ids
    for call in (llm.generate, llm.chat, llm.stream):
        with pytest.raises(ConfigError, match="no sampling setting 'max_token'; wanted one of temperature"):
            call("ab", max_token=5)  # type: ignore[operator]


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 5, "greedy", [{"max_tokens": 3}], [None]])
def test_params_of_another_type_are_a_clear_error(params: Any) -> None:
    llm = toy_llm()
    for call in (llm.generate, llm.chat, llm.stream):
        with pytest.raises(ConfigError, match="params are SamplingParams"):
            call("ab", params)  # type: ignore[operator]


def test_n_answers_to_a_prompt_come_together_each_with_the_seed_of_its_own() -> None:
    llm = toy_llm()
    sampled = SamplingParams(max_tokens=9, temperature=1.0, seed=5, n=3, ignore_eos=True)
    answers = llm.generate(["ab", "c"], [sampled, PARAMS])
    assert [[one.index for one in answer.outputs] for answer in answers] == [[0, 1, 2], [0]]
    alone = [llm.generate("ab", sampled, n=1, seed=5 + i)[0].token_ids for i in range(3)]
    assert [one.token_ids for one in answers[0].outputs] == alone
    assert len(set(map(tuple, alone))) > 1
    assert answers[1].token_ids == llm.generate("c", PARAMS)[0].token_ids
    chosen = llm.chat("ab", sampled)
    assert chosen.text == chosen.outputs[0].text
    assert len(chosen.outputs) == 3
    with pytest.raises(ConfigError, match="a stream gives one answer, and n is 3"):
        llm.stream("ab", sampled)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spec": 5}, "spec is a text"),
        ({"spec": ["ngram"]}, "spec is a text"),
        ({"model": 5}, "model is a name, a path"),
        ({"model": None}, "model is a name, a path"),
        ({"backend": 5}, "a backend is a text such as"),
        ({"backend": "torch:f8"}, "device"),
        ({"backend": "numpy:dtype"}, "device dtype is a setting of the torch backend"),
        ({"backend": "numpy:fast=1"}, "cannot read 'fast=1' in 'numpy:fast=1'"),
        ({"speed": 5}, "there is no setting 'speed'; wanted one of max_sequences"),
        ({"threads": "2"}, "threads must be None or an integer"),
        ({"threads": True}, "threads must be None or an integer"),
        ({"context_length": 1}, "context_length must be None or an integer >= 2, got 1"),
        ({"context_length": 8.5}, "context_length must be None or an integer >= 2"),
        ({"max_sequences": 0}, "max_sequences must be an integer from 1"),
        ({"keep_packed": 1}, "keep_packed must be True or False"),
        ({"kv_format": 16}, "kv_format must be a text"),
        ({"dtype": "f64"}, "dtype must be one of auto"),
    ],
)
def test_arguments_that_cannot_be_are_clear_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CpuspecError, match=message):
        LLM(**{"model": "smollm2-135m-instruct", **arguments})


def test_the_smallest_context_answers_with_one_token() -> None:
    llm = LLM.from_backend(ToyBackend(1), ToyTokenizer(8), "auto", EngineConfig(context_length=2))  # type: ignore[arg-type]
    (answer,) = llm.generate([[0]])
    assert (len(answer.token_ids), answer.finish_reason) in ((1, "length"), (1, "stop"))
    with pytest.raises(ConfigError, match="context_length must be at least 2"):
        LLM.from_backend(ToyBackend(1, context_length=1), ToyTokenizer(8))  # type: ignore[arg-type]


def test_a_model_shows_itself() -> None:
    with toy_llm("ngram") as llm:
        assert repr(llm) == "<LLM 'toy' on toy: llama, 2 layers, context_length=64, spec='ngram', threads=1>"
    assert repr(llm).endswith("threads=1, closed>")

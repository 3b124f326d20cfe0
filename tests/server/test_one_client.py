"""What one client sends holds up no other one, and ends no other's request."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from cpuspec.cli.serve import check_directory
from cpuspec.engine.engine import Engine
from cpuspec.sampling import TokenLogprobs
from cpuspec.sequence import Sequence
from cpuspec.server import completions
from cpuspec.server.figures import completion_logprobs
from cpuspec.settings import SamplingParams, SpecConfig
from cpuspec.text.tokenizer import Tokenizer
from tests.server.running import LONGEST_CALLBACK_S, Running, load, serving, with_free_loop

CHAT, PLAIN, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "the cat"}


def growth(call: Callable[[int], object], number: int) -> float:
    """How many times as much processor time four times as much work takes: 4 if it is linear, 16 if it is quadratic."""

    def cpu_s(size: int) -> float:
        begin_s = time.thread_time()
        call(size)
        return time.thread_time() - begin_s

    return min(cpu_s(4 * number) for _ in range(5)) / min(cpu_s(number) for _ in range(5))


def test_reading_a_draft_spec_takes_a_time_of_its_length() -> None:
    assert growth(lambda number: SpecConfig.parse("a@:" + "0" * number + "x"), 4000) < 9
    assert str(SpecConfig.parse("ngram@4:.5,suffix@2:0.25")) == "ngram@4:0.5,suffix@2:0.25"


def test_offsets_of_a_prompts_tokens_take_a_time_of_its_length(running: Running) -> None:
    tokenizer = running.model.llm.tokenizer

    def offsets(number: int) -> list[int]:
        return completion_logprobs(tokenizer, [TokenLogprobs(5 + at % 200, -1.0, ()) for at in range(number)], 7)["text_offset"]

    assert growth(offsets, 2000) < 9
    found = completion_logprobs(tokenizer, [TokenLogprobs(token, -1.0, ()) for token in (70, 80, 90)], 7)
    assert found["text_offset"] == [7, *(7 + len("".join(found["tokens"][:number])) for number in (1, 2))]
    assert completion_logprobs(tokenizer, [], 7)["text_offset"] == []


HEAVY: list[tuple[str, dict[str, Any]]] = [
    (
        PLAIN,
        {"prompt": "a b c", "logit_bias": [["the cat", 1]], "bad_words": ["a dog"], "max_tokens": 2, "echo": True, "logprobs": 2},
    ),
    (PLAIN, {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 2}),
    (PLAIN, {"prompt": "a", "max_tokens": 2, "prompt_logprobs": 2, "n": 3}),
    (PLAIN, {"prompt": "a", "max_tokens": 2, "regex": "(a|b)+"}),
    (CHAT, {"messages": [USER], "max_tokens": 2, "response_format": {"type": "json_object"}, "logit_bias": [["cat", 1]]}),
    (CHAT, {"messages": [USER], "max_tokens": 2, "prediction": {"type": "content", "content": "the cat"}, "logprobs": True}),
    (RESPONSES, {"input": "the cat", "max_output_tokens": 2, "bad_words": ["dog"]}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 2, "bad_words": ["dog"]}),
    ("/api/chat", {"messages": [USER], "max_tokens": 2, "bad_words": ["dog"]}),
    ("/api/generate", {"prompt": "the cat", "raw": True, "max_tokens": 2, "bad_words": ["dog"]}),
    ("/completion", {"prompt": "the cat", "n_predict": 2, "bad_words": ["dog"], "grammar": 'root ::= "a"+', "n_probs": 3}),
    ("/tokenize", {"content": "the cat", "with_pieces": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/apply-template", {"messages": [USER]}),
]


@pytest.mark.parametrize(("path_", "body"), HEAVY)
def test_texts_and_grammars_are_read_beside_the_event_loop(
    running: Running, path_: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    for owner, name in (
        *((Tokenizer, name) for name in ("encode", "encode_chat", "encode_prompt", "decode")),
        *((Engine, name) for name in ("check", "prepare")),
        (SamplingParams, "__post_init__"),
        (Sequence, "new"),
        (completions, "_without_answers"),
    ):
        whole = getattr(owner, name)

        def noted(*arguments: Any, whole: Any = whole, **options: Any) -> Any:
            seen.append(threading.current_thread().name)
            return whole(*arguments, **options)

        monkeypatch.setattr(owner, name, staticmethod(noted) if owner is Sequence else noted)
    reply = running.post(path_, json=body)
    assert reply.status_code == 200, reply.text
    assert seen
    assert {name.partition("_")[0] for name in seen} <= {"cpuspec-tokenizer", "cpuspec-grammar"}


def test_eighty_answers_of_one_client_leave_the_queue_to_others(path: Path) -> None:
    with serving(lambda: load(path), ("first", "second"), max_waiting=8) as running:
        first, second = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))
        endless = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        with running.client() as client, client.stream("POST", PLAIN, json=endless | {"n": 12}, headers=first) as reply:
            assert reply.status_code == 200
            assert running.post(PLAIN, json=endless, headers=first).status_code == 429
            running.model.admission.check("second", 8)
            with client.stream("POST", PLAIN, json=endless, headers=second) as other:
                assert other.status_code == 200


def test_a_response_has_an_id_that_no_client_chooses(running: Running) -> None:
    ids = {
        running.post(RESPONSES, json={"input": "a", "max_output_tokens": 2}, headers={"x-request-id": "mine"}).json()["id"]
        for _ in range(2)
    }
    assert len(ids) == 2
    assert all(running.get(f"/v1/responses/{one}").status_code == 200 for one in ids)


def test_scoring_has_a_budget(running: Running) -> None:
    prompt = [5] * 16_000
    for body in ({"prompt": [prompt] * 20, "logprobs": 0}, {"prompt": [prompt] * 4, "logprobs": 20}):
        reply = running.post(PLAIN, json=body | {"echo": True, "max_tokens": 0})
        assert reply.status_code == 400
        assert "at most" in reply.json()["error"]["message"]


def test_a_page_of_another_origin_changes_nothing_by_a_form(path: Path, tmp_path: Path) -> None:
    with serving(lambda: load(path), slot_save_path=str(tmp_path)) as running:
        for sent in ({}, {"content-type": "application/x-www-form-urlencoded"}):
            assert running.post("/slots/0?action=erase", headers=sent | {"origin": "http://page.example"}).status_code == 400
            assert running.post("/slots/0?action=erase", headers=sent | {"origin": running.url}).status_code == 200
        assert running.post("/slots/0?action=erase").status_code == 200


def test_a_client_is_known_by_its_own_address(path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    with serving(lambda: load(path)) as running, caplog.at_level("INFO", "cpuspec.server"):
        running.get("/v1/models", headers={"x-forwarded-for": "203.0.113.7"})
        running.eventually(lambda: any('"/v1/models"' in one.getMessage() for one in caplog.records))
    line = next(json.loads(one.getMessage()) for one in caplog.records if '"/v1/models"' in one.getMessage())
    assert line["client"] == "127.0.0.1"


def test_the_option_of_a_wrong_directory_is_named(tmp_path: Path) -> None:
    for option in ("--lora-dir", "--slot-save-path"):
        with pytest.raises(typer.BadParameter, match=f"{option} .* is not a directory"):
            check_directory(option, str(tmp_path / "none"))


def test_a_callback_that_holds_up_the_loop_is_found() -> None:
    async def hold() -> None:
        begin_s = time.thread_time()
        while time.thread_time() < begin_s + 2 * LONGEST_CALLBACK_S:
            pass

    engine = threading.Event()
    beside = threading.Thread(target=engine.wait, name="cpuspec-engine")  # a server begins to be watched when it has one
    beside.start()
    watch = with_free_loop()
    watch.__enter__()
    asyncio.run(asyncio.sleep(0))
    asyncio.run(hold())
    with pytest.raises(AssertionError, match="of processor time"):
        watch.__exit__(None, None, None)
    engine.set()
    beside.join()

"""A batch answers every line in order, wherever an earlier run was cut, and a bad line is nobody else's trouble."""

import json
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.batch.answer import answer_lines
from cpuspec.batch.lines import MAX_LINE_BYTES, Line, answer_line, error_line, read_lines
from cpuspec.batch.run import BatchSummary, run_batch
from cpuspec.errors import ConfigError, CpuspecError
from cpuspec.platform import SYSTEM
from cpuspec.server.chunks import TextChunks
from tests import command
from tests.checkpoints.test_adapters import write_peft
from tests.processes import ROOT
from tests.server.running import SMALL, load, serving, tiny_model
from tools.make_tiny_model import make_tiny_hf


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with load(path) as loaded:
        yield loaded


def line(number: int, value: Any) -> Line:
    return Line(number, (value if isinstance(value, str) else json.dumps(value)).encode(), 0)


def answers(llm: LLM, *values: Any, **given: Any) -> list[dict[str, Any]]:
    lines = iter([line(number, value) for number, value in enumerate(values, 1)])
    return list(answer_lines(llm, lines, {"max_tokens": 8, "temperature": 0.0} | given))


def body(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["response"]["status_code"] == 200, answer
    return answer["response"]["body"]


def batch_line(url: str, **fields: Any) -> dict[str, Any]:
    return {"custom_id": "its own", "method": "POST", "url": url, "body": {"model": "any", **fields}}


# --- what lines are answered with


def test_greedy_answers_are_those_of_the_llm_in_order(llm: LLM) -> None:
    prompts = [f"{'once upon a time ' * (number % 5)}{number}" for number in range(20)]
    lengths = [1 + 7 * number % 30 for number in range(20)]  # so that later lines end before earlier ones
    found = answers(llm, *({"prompt": one, "max_tokens": most} for one, most in zip(prompts, lengths, strict=True)))
    wanted = llm.generate(prompts, [SamplingParams(max_tokens=most) for most in lengths])
    assert [body(one)["choices"][0]["text"] for one in found] == [one.text for one in wanted]
    assert [body(one)["usage"]["completion_tokens"] for one in found] == [len(one.token_ids) for one in wanted]
    assert [one["custom_id"] for one in found] == [f"line-{number}" for number in range(1, 21)]


def test_both_formats_of_a_line_get_the_same_answer(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hello\nthere"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]}]
    chat = [{"messages": talk}, batch_line("/v1/chat/completions", messages=parts, max_completion_tokens=8)]
    text = [{"prompt": "hello"}, batch_line("/v1/completions", prompt=llm.tokenizer.encode("hello"), stream=False, tools=[])]
    plain_chat, own_chat, plain_text, own_text = answers(llm, *chat, *text)
    said = llm.chat(talk, max_tokens=8).text
    assert [body(one)["choices"][0]["message"]["content"] for one in (plain_chat, own_chat)] == [said, said]
    assert body(plain_text)["choices"] == body(own_text)["choices"]
    assert [one["custom_id"] for one in (plain_chat, own_chat)] == ["line-1", "its own"]


def test_a_line_goes_before_the_options(llm: LLM) -> None:
    found = answers(llm, {"prompt": "a", "max_tokens": 3, "temperature": 0}, {"prompt": "a"}, max_tokens=5, ignore_eos=True)
    assert [body(one)["usage"]["completion_tokens"] for one in found] == [3, 5]


def test_a_line_may_be_written_for_another_server(llm: LLM) -> None:
    lines = [
        {"prompt": "a", "n_predict": 3, "repeat_penalty": "1.5", "top_k": 40.0, "seed": -1, "temperature": 0, "cache_prompt": True},
        {"prompt": "a", "mirostat": 2},
    ]
    found, refused = answers(llm, *lines, ignore_eos=True)
    wanted = llm.generate("a", max_tokens=3, repetition_penalty=1.5, ignore_eos=True)[0].text
    assert body(found)["choices"][0]["text"] == wanted
    assert "mirostat" in refused["response"]["body"]["error"]["message"], "a line has no header that could tell"


def test_an_assistants_last_message_is_continued_as_the_server_does(llm: LLM) -> None:
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "On the"}]
    asked = {"messages": talk, "max_tokens": 8}
    begun, turn, strict = answers(
        llm, asked, asked | {"add_generation_prompt": True}, asked | {"response_format": schema_of(uniqueItems=True)}
    )
    prompt = llm.tokenizer.encode_chat(talk, continues=True)
    assert body(begun)["choices"][0]["message"]["content"] == llm.generate(prompt, max_tokens=8)[0].text
    assert body(turn)["choices"][0]["message"]["content"] == llm.chat(talk, max_tokens=8).text
    assert "uniqueItems cannot be kept" in json.dumps(strict), "a line has no header that could say what was left out"


def schema_of(**keywords: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array", **keywords}}}


def test_several_answers_and_logprobs(llm: LLM) -> None:
    asked = {"prompt": "a", "n": 3, "seed": 5, "temperature": 1.0, "logprobs": 2, "ignore_eos": True}
    (found,) = answers(llm, asked)
    wanted = llm.generate("a", n=3, seed=5, temperature=1.0, max_tokens=8, ignore_eos=True)[0].outputs
    assert [choice["text"] for choice in body(found)["choices"]] == [one.text for one in wanted]
    assert [len(choice["logprobs"]["tokens"]) for choice in body(found)["choices"]] == [8, 8, 8]
    assert body(found)["usage"]["completion_tokens"] == 24


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


def test_a_line_with_a_schema_is_answered_in_json_as_the_llm_does(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    talk = [{"role": "user", "content": "where?"}]
    named = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    lines = [{"response_format": named}, {"json_schema": CITY}, {"regex": "[ab]{3}"}, {"choices": ["yes", "no"]}]
    found = [
        body(one)["choices"][0]["message"]["content"]
        for one in answers(llm, *({"messages": talk, **one} for one in lines), max_tokens=40)
    ]
    assert json.loads(found[0])["city"] in ("Rome", "Oslo")
    assert found[0] == found[1] == llm.chat(talk, json_schema=CITY, max_tokens=40).text
    assert (len(found[2]), set(found[2]) <= {"a", "b"}, found[3] in ("yes", "no")) == (3, True, True)
    anything = answers(llm, {"messages": talk, "response_format": {"type": "json_object"}}, max_tokens=3)
    assert body(anything[0])["choices"][0]["message"]["content"].startswith("{")


def test_a_line_with_tools_is_answered_as_the_server_does(path: Path, llm: LLM) -> None:
    called = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    talk = [
        {"role": "user", "content": "how is the weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "snow"},
    ]
    asked = {"messages": talk, "tools": [WEATHER], "max_tokens": 20, "temperature": 0}
    demanded = asked | {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    found = [body(one)["choices"][0] for one in answers(llm, asked, demanded)]
    with serving(lambda: load(path)) as running, running.client() as client:
        wanted = [client.post("/v1/chat/completions", json=one).json()["choices"][0] for one in (asked, demanded)]
    for one in (*found, *wanted):
        for call in one["message"].get("tool_calls", ()):
            call.pop("id")
    assert found == wanted
    without, with_tools = (body(one)["usage"]["prompt_tokens"] for one in answers(llm, asked | {"tools": []}, asked))
    assert with_tools > without


def test_a_batch_needs_none_of_the_servers_libraries() -> None:
    blocked = ("fastapi", "starlette", "uvicorn", "prometheus_client", "httpx", "ray")
    code = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\nimport cpuspec.batch.answer, cpuspec.batch.run"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([sys.executable, "-c", f"{code}, cpuspec.server.app"], check=True, cwd=ROOT, capture_output=True)


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "a", "temprature": 1},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "n": 1000},
        {"prompt": "a", "stream": True},
        {"prompt": "a", "tools": [{"type": "function"}]},
        {"prompt": "a", "response_format": {"type": "json_object"}},
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}},
        {"prompt": ["a", "b"]},
        {"prompt": [1 << 40]},
        {"prompt": [True]},
        {"prompt": "word " * 40_000},
        {"messages": []},
        {"messages": [{"role": "user", "content": "a"}], "logprobs": 3},
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_request_that_cannot_be_run_is_answered_with_its_error(llm: LLM, value: Any) -> None:
    before, found, after = answers(llm, {"prompt": "a"}, value, {"prompt": "a"})
    assert found["response"]["status_code"] == 400
    assert found["response"]["body"]["error"]["message"]
    assert body(before)["choices"] == body(after)["choices"]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("nonsense", "invalid_json_line"),
        ("[]", "invalid_json_line"),
        ("[" * 100_000, "invalid_json_line"),
        ("\x00", "invalid_json_line"),
        ({}, "missing_required_parameter"),
        ({"prompt": "a", "messages": []}, "missing_required_parameter"),
        ({"url": "/v1/completions", "body": {}}, "missing_required_parameter"),
        ({"custom_id": "x", "url": "/v1/completions", "body": 3}, "missing_required_parameter"),
        ({"custom_id": "x", "url": "/v1/embeddings", "body": {}}, "invalid_url"),
        ({"custom_id": "x", "url": ["/"], "body": {}}, "invalid_url"),
        ({"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}, "invalid_method"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_line_that_is_no_request_is_answered_with_its_fault(llm: LLM, value: Any, code: str) -> None:
    before, found, after = answers(llm, {"prompt": "a"}, value, {"prompt": "a"})
    assert (found["response"], found["error"]["code"]) == (None, code)
    assert body(before)["choices"] == body(after)["choices"]


def test_a_line_whose_answer_cannot_be_written_costs_no_other_line(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TextChunks.show

    def show(self: TextChunks, index: int, output: Any) -> Any:
        if self._head["id"] == "cmpl-2" and index == 1:
            raise ZeroDivisionError("of one")
        return whole(self, index, output)

    monkeypatch.setattr(TextChunks, "show", show)
    first, second, third = answers(llm, {"prompt": "a"}, {"prompt": "b", "n": 3}, {"prompt": "a"})
    assert body(first)["choices"] == body(third)["choices"]
    assert second["response"]["status_code"] == 500
    assert "ZeroDivisionError" in second["response"]["body"]["error"]["message"]


def test_few_lines_are_read_ahead(llm: LLM) -> None:
    """Memory is bounded, however long the file and however slow its first line."""
    num_read = 0

    def endless() -> Iterator[Line]:
        nonlocal num_read
        while True:
            num_read += 1
            yield line(num_read, {"prompt": "a", "max_tokens": 300 if num_read == 1 else 1, "ignore_eos": True})

    found = answer_lines(llm, endless(), {"temperature": 0.0})
    next(found)
    assert num_read <= 17 * llm.max_sequences
    found.close()
    assert body(answers(llm, {"prompt": "a"})[0])["usage"]["completion_tokens"] <= 8  # nothing of it still runs


def test_a_line_beyond_all_bounds_is_not_kept_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    with file.open("wb") as stream:
        stream.write(b'{"prompt": "')
        stream.seek(MAX_LINE_BYTES + 5000)  # a hole
        stream.write(b'"}\n\n \n{"prompt": "b"}')
    first, second = read_lines(file)
    assert len(first.content) == MAX_LINE_BYTES + 1
    with pytest.raises(CpuspecError, match="more than"):
        first.request()
    assert (second.number, second.end, second.request()) == (2, file.stat().st_size, ("/v1/completions", {"prompt": "b"}))


# --- files; the answers here are made without a model


def told(line: Line) -> dict[str, Any]:
    if b"bad" in line.content:
        return error_line(line, ConfigError("no"))
    fate = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1}}
    return answer_line(line, 200, {"text": f"é {line.number}", "usage": usage | {"completion_tokens_details": fate}})


def tell(lines: Iterator[Line]) -> Generator[dict[str, Any]]:
    yield from map(told, lines)


def run(source: Path, out: Path) -> BatchSummary:
    return run_batch(source, out, tell, lambda done, total: None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = ['{"prompt": "a"}', "", '{"custom_id": "é\\n", "prompt": "b"}', "bad", '{"prompt": "c"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "in.jsonl"


def test_a_batch_cut_at_any_byte_goes_on_to_the_same_file(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    whole = run(source, out)
    assert (whole.num_kept, whole.num_answered, whole.num_errors, whole.num_new_tokens, whole.num_draft_tokens) == (0, 4, 1, 12, 9)
    wanted = out.read_bytes()
    assert [json.loads(line)["custom_id"] for line in wanted.splitlines()] == ["line-1", "é\n", "line-3", "line-4"]
    for cut in range(len(wanted) + 1):
        out.write_bytes(wanted[:cut])
        again = run(source, out)
        assert out.read_bytes() == wanted, cut
        assert (again.num_kept, again.num_answered) == (wanted[:cut].count(b"\n"), 4 - wanted[:cut].count(b"\n"))


@pytest.mark.parametrize("content", [b"notes\n", b"notes", b"{}\n", b'{"id": 3}', b'{"id": "batch_req_1", "custom_id": "other"}\n'])
def test_a_file_that_is_no_output_of_the_batch_is_left_alone(source: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="name another file"):
        run(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == content


def test_the_output_of_a_longer_batch_is_left_alone(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    source.write_text('{"prompt": "a"}')
    with pytest.raises(ConfigError, match="no more than 1 lines"):
        run(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_requests_are_not_their_own_answers(source: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(ConfigError, match="is the file of requests itself"):
        run(source, source)
    assert source.read_bytes() == before


def test_two_runs_do_not_write_one_file(source: Path, tmp_path: Path) -> None:
    with (tmp_path / "out.jsonl").open("ab") as other:
        assert SYSTEM.try_lock(other)
        with pytest.raises(ConfigError, match="another run"):
            run(source, tmp_path / "out.jsonl")
    assert run(source, tmp_path / "out.jsonl").num_answered == 4


@pytest.mark.parametrize("fault", [KeyboardInterrupt, CpuspecError, MemoryError])
def test_what_was_answered_before_an_end_is_kept(source: Path, tmp_path: Path, fault: type[BaseException]) -> None:
    def ending(lines: Iterator[Line]) -> Generator[dict[str, Any]]:
        for line in lines:
            if line.number == 3:
                raise fault
            yield told(line)

    if fault is KeyboardInterrupt:
        assert run_batch(source, tmp_path / "out.jsonl", ending, lambda *_: None).interrupted
    else:
        with pytest.raises(fault):
            run_batch(source, tmp_path / "out.jsonl", ending, lambda *_: None)
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 2
    assert run(source, tmp_path / "out.jsonl").num_kept == 2


# --- the command


@pytest.mark.usefixtures("own_cache")
def test_the_command_answers_resumes_and_sums_up(path: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\nbad\n{"prompt": "b"}\n')
    arguments = ("batch", str(source), str(out), "-m", str(path), "--max-tokens=4", "--temperature=0", "--threads=1", "--json")
    first = command.run(*arguments)
    assert first.exit_code == 0, first.output
    summary = json.loads(first.stdout)
    assert (summary["num_answered"], summary["num_errors"], summary["interrupted"]) == (3, 1, False)
    assert "batch: 100 %" in first.stderr
    wanted = out.read_bytes()
    out.write_bytes(wanted[:-1])
    assert json.loads(command.ok(*arguments))["num_kept"] == 2
    texts = [[json.loads(one)["response"] for one in content.splitlines()] for content in (wanted, out.read_bytes())]
    assert texts[0][2]["body"]["choices"] == texts[1][2]["body"]["choices"]
    assert command.run("batch", str(tmp_path / "none"), str(out)).exit_code == 2


def test_a_line_chooses_its_adapters_and_its_special_tokens(tmp_path: Path) -> None:
    """As the server's requests do."""
    model = make_tiny_hf(tmp_path / "hf", "llama", **SMALL)
    write_peft(tmp_path / "one", model, seed=1)
    with LLM(model, spec="none", lora=(str(tmp_path / "one"),)) as llm:
        given = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        adapted, plain, unknown, bare = answers(
            llm,
            {"prompt": "a", **given},
            {"prompt": "a", **given, "lora": [{"id": 0, "scale": 0.0}]},
            {"prompt": "a", **given, "lora": [{"id": 99, "scale": 1.0}]},
            {"prompt": "a", **given, "add_special": False},
        )
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        wanted = [llm.generate("a", params, lora_request=lora)[0].text for lora in (None, {})]
        assert [body(one)["choices"][0]["text"] for one in (adapted, plain)] == wanted
        assert wanted[0] != wanted[1]
        assert unknown["response"]["status_code"] == 400
        assert body(bare)["usage"]["prompt_tokens"] == body(plain)["usage"]["prompt_tokens"] - len(llm.tokenizer.encode(""))

"""Answers are the target's own, resumed to the bit, without duplicates, and never to what an evaluation set asks."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM
from cpuspec.errors import ConfigError
from cpuspec.platform import SYSTEM
from cpuspec.settings import SamplingParams
from cpuspec.text import make_tokenizer
from cpuspec.train.answers import AnswerFiles, AnswerPlan, AnswersSummary, header_path, make_answers, tokenizer_identity
from tests.train.models import loaded, tiny

FILES = [{"name": "tiny.gguf", "bytes": 1, "sha256": "0" * 64}]
SECRET = "one two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with loaded(tiny(tmp_path_factory.mktemp("model"))) as model:
        yield model


@pytest.fixture
def plan(tmp_path: Path) -> AnswerPlan:
    path = tmp_path / "prompts.jsonl"
    texts = [f"the {number} of the {number * 7} things that {number} does" for number in range(12)]
    texts[3:3] = ["the same again", "The same AGAIN.", f"{SECRET} fourteen"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return AnswerPlan((path,), num_self_made=12, temperatures=(0.0, 1.0), max_answer_tokens=24, max_prompt_tokens=300, seed=1)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture
def whole(llm: LLM, plan: AnswerPlan, tmp_path: Path) -> tuple[bytes, AnswersSummary]:
    """What a run that nothing interrupts writes."""
    summary = make_answers(llm, FILES, plan, tmp_path / "whole.jsonl")
    return (tmp_path / "whole.jsonl").read_bytes(), summary


def test_answers_are_those_of_the_model(llm: LLM, plan: AnswerPlan, tmp_path: Path, whole: tuple[bytes, AnswersSummary]) -> None:
    found, summary = lines(tmp_path / "whole.jsonl"), whole[1]
    assert summary.num_answers == len(found) > 12
    assert summary.num_answer_tokens == sum(len(line["answer_ids"]) for line in found)
    assert {line["temperature"] for line in found} == {0.0, 1.0}
    assert {line["source"] for line in found} == {"prompts.jsonl", "self-made"}
    assert len({line["id"] for line in found}) == len(found)
    for line in (line for line in found if line["temperature"] == 0):
        (greedy,) = llm.generate([line["prompt_ids"]], SamplingParams(max_tokens=24))
        assert greedy.token_ids == line["answer_ids"]
    header = json.loads(header_path(tmp_path / "whole.jsonl").read_text())
    assert (header["files"], header["tokenizer_sha256"]) == (FILES, tokenizer_identity(llm.tokenizer))


def test_duplicates_are_left_out(whole: tuple[bytes, AnswersSummary], tmp_path: Path) -> None:
    assert whole[1].num_duplicate_prompts >= 1
    assert not any(line["id"].startswith("prompts.jsonl:5@") for line in lines(tmp_path / "whole.jsonl"))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_a_run_that_was_broken_off_anywhere_goes_on_to_the_same_bytes(
    llm: LLM, plan: AnswerPlan, tmp_path: Path, whole: tuple[bytes, AnswersSummary], share: float
) -> None:
    content, _ = whole
    out = tmp_path / "whole.jsonl"
    out.write_bytes(content[: int(share * len(content))])
    summary = make_answers(llm, FILES, plan, out)
    assert out.read_bytes() == content
    assert summary.num_answer_tokens == sum(len(line["answer_ids"]) for line in lines(out))
    if 0 < share < 1:
        assert 0 < summary.num_answers < len(lines(out))


def test_prompts_are_alike_by_what_users_wrote(llm: LLM, tmp_path: Path) -> None:
    """The template's words and the system message are in every prompt: of two short questions none is left out for these."""
    system = {
        "role": "system",
        "content": "you are a helpful assistant made by a company that is known for its short answers",
    }
    asked = ["what is osmosis", "what is inflation", "What is  osmosis?", SECRET, f"{SECRET} fourteen"]
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps({"messages": [system, {"role": "user", "content": one}]}) + "\n" for one in asked))
    plan = AnswerPlan((path,), temperatures=(1.0,), max_answer_tokens=24)
    summary = make_answers(llm, FILES, plan, tmp_path / "out.jsonl")
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] == [f"asked.jsonl:{number}@1" for number in (1, 2, 4)]
    assert summary.num_duplicate_prompts == 2
    excluded = tmp_path / "excluded.txt"
    excluded.write_text(system["content"])
    refused = make_answers(llm, FILES, replace(plan, exclude=(excluded,)), tmp_path / "refused.jsonl").refused
    assert len(refused) == 5, "an evaluation set is looked for in all of a prompt"


def test_progress_counts_what_is_generated(llm: LLM, plan: AnswerPlan, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    summary = make_answers(
        llm, FILES, plan, tmp_path / "out.jsonl", on_progress=lambda now: told.append((now.num_new_tokens, now.num_answers))
    )
    assert any(tokens and not answers for tokens, answers in told), "before the first answer is done"
    assert told == sorted(told)
    assert told[-1][0] == summary.num_new_tokens >= summary.num_answer_tokens


def test_parts_of_a_run_answer_each_prompt_once(
    llm: LLM, plan: AnswerPlan, tmp_path: Path, whole: tuple[bytes, AnswersSummary]
) -> None:
    """Each part gives the answers that one run gives, and leaves out a prompt that is nearly one of another part."""
    outs = [tmp_path / f"part{number}.jsonl" for number in (1, 2, 3)]
    for number, out in enumerate(outs, 1):
        make_answers(llm, FILES, replace(plan, part=(number, 3)), out)
    of_parts = [line for out in outs for line in lines(out)]
    ids = [line["id"] for line in of_parts]
    assert len(set(ids)) == len(ids)
    assert sum(bool(lines(out)) for out in outs) > 1
    by_id = {line["id"]: line for line in of_parts}
    of_whole = lines(tmp_path / "whole.jsonl")
    assert all(by_id[line["id"]] == line for line in of_whole)
    files = AnswerFiles(llm.tokenizer)
    read = [line for out in outs for _, line in files.lines(out)]
    assert len(read) + files.num_duplicates == len(of_parts)
    before = outs[0].read_bytes()
    outs[0].write_bytes(before[: len(before) // 2])
    make_answers(llm, FILES, replace(plan, part=(1, 3)), outs[0])
    assert outs[0].read_bytes() == before
    with pytest.raises(ConfigError, match="part"):
        make_answers(llm, FILES, replace(plan, part=(2, 3)), outs[0])


def test_answers_that_an_earlier_file_has_are_read_once(llm: LLM, tmp_path: Path, whole: tuple[bytes, AnswersSummary]) -> None:
    first, second = tmp_path / "whole.jsonl", tmp_path / "second.jsonl"
    more = {"id": "x@0", "source": "x", "temperature": 0.0, "prompt_ids": [1], "answer_ids": llm.tokenizer.encode("osmosis is it")}
    second.write_bytes(whole[0] + json.dumps(more).encode() + b"\n")
    files = AnswerFiles(llm.tokenizer)
    assert [line for _, line in files.lines(first)] == lines(first)
    assert [line for _, line in files.lines(second)] == [more]
    assert files.num_duplicates == len(lines(first))


def test_a_file_from_before_parts_and_reasons_is_gone_on_with(
    llm: LLM, plan: AnswerPlan, tmp_path: Path, whole: tuple[bytes, AnswersSummary]
) -> None:
    out = tmp_path / "whole.jsonl"
    header = json.loads(header_path(out).read_text())
    del header["part"]
    header_path(out).write_text(json.dumps(header))
    before = [{name: value for name, value in line.items() if name != "finish_reason"} for line in lines(out)]
    out.write_text("".join(json.dumps(line) + "\n" for line in before[: len(before) // 2]))
    make_answers(llm, FILES, plan, out)
    assert [line["id"] for line in lines(out)] == [line["id"] for line in before]


def test_answers_do_not_depend_on_how_many_run_at_once(
    llm: LLM, plan: AnswerPlan, tmp_path: Path, whole: tuple[bytes, AnswersSummary]
) -> None:
    out = tmp_path / "alone.jsonl"
    with loaded(tiny(tmp_path), max_sequences=1) as one_at_a_time:
        make_answers(one_at_a_time, FILES, plan, out)
    assert out.read_bytes() == whole[0]


def test_a_limit_of_tokens_ends_a_run_which_a_higher_one_goes_on_with(
    llm: LLM, plan: AnswerPlan, tmp_path: Path, whole: tuple[bytes, AnswersSummary]
) -> None:
    out = tmp_path / "limited.jsonl"
    summary = make_answers(llm, FILES, plan, out, max_tokens=100)
    assert 100 <= summary.num_answer_tokens < whole[1].num_answer_tokens
    written = out.read_bytes()
    assert whole[0].startswith(written)
    make_answers(llm, FILES, plan, out, max_tokens=10)
    assert out.read_bytes() == written, "a lower limit takes nothing back"
    make_answers(llm, FILES, plan, out)
    assert out.read_bytes() == whole[0]


@pytest.mark.parametrize("is_excluded", [True, False])
def test_prompts_of_an_evaluation_set_are_refused_and_listed(llm: LLM, plan: AnswerPlan, tmp_path: Path, is_excluded: bool) -> None:
    tasks, out = tmp_path / "tasks.txt", tmp_path / "checked.jsonl"
    tasks.write_text(SECRET if is_excluded else SECRET.replace("seven", "sieben"))
    checked = AnswerPlan(plan.prompts, temperatures=(0.8, 0.9, 1.0), max_answer_tokens=24, exclude=(tasks,))
    summary = make_answers(llm, FILES, checked, out)
    assert [(one.id, one.where, one.file, one.words) for one in summary.refused] == (
        [("prompts.jsonl:6", "prompt", "tasks.txt", SECRET)] if is_excluded else []
    )
    assert any(line["id"].startswith("prompts.jsonl:6@") for line in lines(out)) != is_excluded
    header = json.loads(header_path(out).read_text())
    assert (len(header["refused"]), header["excluded"][0]["name"]) == (int(is_excluded), "tasks.txt")
    assert make_answers(llm, FILES, checked, out).refused == summary.refused  # of all runs, and once


def test_answers_in_the_words_of_an_evaluation_set_are_refused(llm: LLM, plan: AnswerPlan, tmp_path: Path) -> None:
    (answer,) = llm.generate(["say it"], SamplingParams(max_tokens=60, temperature=1.0, seed=3))
    tasks, prompts = tmp_path / "tasks.txt", tmp_path / "say.jsonl"
    prompts.write_text(json.dumps({"text": "the 1 of the 7 things that 1 does"}) + "\n")
    free = AnswerPlan((prompts,), temperatures=(1.0,), max_answer_tokens=60, seed=1)
    make_answers(llm, FILES, free, tmp_path / "free.jsonl")
    (line,) = lines(tmp_path / "free.jsonl")
    tasks.write_text(llm.tokenizer.decode(line["answer_ids"]), "utf-8")
    checked = AnswerPlan((prompts,), temperatures=(1.0,), max_answer_tokens=60, seed=1, exclude=(tasks,))
    summary = make_answers(llm, FILES, checked, tmp_path / "checked.jsonl")
    assert [(one.id, one.where) for one in summary.refused] == [("say.jsonl:1", "answer at 1")]
    assert lines(tmp_path / "checked.jsonl") == []
    assert answer.token_ids, "the model can say something"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, "seed"),
        ({"temperatures": (0.5,)}, "temperatures"),
        ({"max_answer_tokens": 25}, "max_answer_tokens"),
        ({"num_self_made": 11}, "self_made"),
    ],
)
def test_answers_of_another_plan_are_not_gone_on_with(
    llm: LLM, plan: AnswerPlan, tmp_path: Path, whole: tuple[bytes, AnswersSummary], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        make_answers(llm, FILES, AnswerPlan(**vars(plan) | change), tmp_path / "whole.jsonl")
    assert (tmp_path / "whole.jsonl").read_bytes() == whole[0]


def test_answers_of_another_model_are_not_gone_on_with(
    llm: LLM, plan: AnswerPlan, tmp_path: Path, whole: tuple[bytes, AnswersSummary]
) -> None:
    with pytest.raises(ConfigError, match="files"):
        make_answers(llm, [FILES[0] | {"sha256": "1" * 64}], plan, tmp_path / "whole.jsonl")


@pytest.mark.parametrize(
    "content",
    [
        "something else\n",
        "{}\n",
        '{"id": "a@0", "source": "x", "temperature": 0.0, "prompt_ids": [1], "answer_ids": []}\n',
        '{"id": "a@0", "source": "x", "temperature": 0.0, "prompt_ids": [1], "answer_ids": [100000]}\n',
        '{"id": "a@0", "source": "x", "temperature": 0.0, "prompt_ids": [1], "answer_ids": [1]}\n',
    ],
)
def test_a_file_of_something_else_is_left_alone(
    llm: LLM, plan: AnswerPlan, tmp_path: Path, whole: tuple[bytes, AnswersSummary], content: str
) -> None:
    out = tmp_path / "whole.jsonl"
    out.write_text(content)
    with pytest.raises(ConfigError, match=r"whole\.jsonl"):
        make_answers(llm, FILES, plan, out)
    assert out.read_text() == content
    header_path(out).unlink()
    with pytest.raises(ConfigError, match="no facts beside it"):
        make_answers(llm, FILES, plan, out)


def test_two_runs_do_not_write_one_file(llm: LLM, plan: AnswerPlan, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    with out.open("ab") as file:
        assert SYSTEM.try_lock(file)
        with pytest.raises(ConfigError, match="another run"):
            make_answers(llm, FILES, plan, out)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"num_self_made": 1, "temperatures": ()},
        {"num_self_made": 1, "temperatures": (-1.0,)},
        {"functions": ("a",), "max_answer_tokens": 0},
        {"functions": ("a",), "part": (0, 2)},
        {"functions": ("a",), "part": (3, 2)},
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AnswerPlan(**wrong)


def test_the_identity_of_a_tokenizer_is_what_its_ids_mean(tmp_path: Path) -> None:
    same, other = (make_tokenizer(tiny(tmp_path, vocab_size=size)) for size in (384, 320))
    assert tokenizer_identity(same) == tokenizer_identity(make_tokenizer(tiny(tmp_path, hidden_size=128, num_heads=4)))
    assert tokenizer_identity(same) != tokenizer_identity(other)

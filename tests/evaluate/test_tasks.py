"""Problems are asked as their data sets ask them, and answers are judged as those judge."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from cpuspec.errors import ConfigError
from cpuspec.evaluate.sandbox import run_program
from cpuspec.evaluate.tasks import (
    TASKS,
    Grade,
    code_of,
    find_task,
    judge,
    last_number,
    pass_at,
    read_problems,
    score,
)

PROMPT = (
    'from typing import List\n\n\ndef helper(x):\n    return x\n\n\ndef total(values: List[int]) -> int:\n    """Sum them."""\n'
)
HUMANEVAL = {
    **{"task_id": "HumanEval/0", "prompt": PROMPT, "entry_point": "total"},
    "canonical_solution": "    return sum(values)\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
MBPP = {
    **{"task_id": 11, "text": "Write a function to double a number.", "code": "def double(x):\r\n    return 2 * x"},
    "test_setup_code": "import math",
    "test_list": ["assert double(2) == 4", "assert double(math.inf) == math.inf"],
}
GSM8K = {"question": "Tom has 1,200 eggs and buys 34.50 more. How many?", "answer": "1,200 + 34.5 = 1234.5\n#### 1,234.50"}
RECORDS = {"humaneval": HUMANEVAL, "mbpp": MBPP, "gsm8k": GSM8K}


@pytest.fixture(scope="module")
def sandboxed() -> None:
    try:
        run_program("")
    except ConfigError as error:
        pytest.skip(str(error))


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records), "utf-8")
    return path


def verdicts(task: str, tmp_path: Path, chat: bool, *answers: str) -> list[bool]:
    problems = read_problems(TASKS[task], written(tmp_path / "data.jsonl", RECORDS[task]), chat)
    return [one.passed for one in judge(TASKS[task], problems * len(answers), answers, chat)]


@pytest.mark.usefixtures("sandboxed")
def test_humaneval_runs_the_tests_on_prompt_and_answer(tmp_path: Path) -> None:
    answers = ("    return sum(values)\n", "    return 3\n", "    return helper(sum(values))\n", "nonsense (", "")
    assert verdicts("humaneval", tmp_path, False, *answers) == [True, False, True, False, False]


@pytest.mark.usefixtures("sandboxed")
def test_humaneval_in_a_conversation_takes_the_function_out_of_the_answer(tmp_path: Path) -> None:
    whole = "def total(values: List[int]) -> int:\n    return helper(sum(values))"
    answers = (
        f"Here it is:\n\n```python\n{whole}\n```\nIt sums.",
        f"```\nprint('an example')\n```\n\n```python\n{whole}\n```",
        whole,
        f"```python\n{whole}",  # cut off
        "```python\n    return sum(values)\n```",  # the body alone
        "```python\ndef other(values):\n    return 0\n```",
        "I do not know.",
    )
    assert verdicts("humaneval", tmp_path, True, *answers) == [True, True, True, True, True, False, False]


@pytest.mark.usefixtures("sandboxed")
def test_mbpp_runs_its_tests_behind_its_set_up(tmp_path: Path) -> None:
    good, bad = "def double(x):\n    return x + x\n", "def double(x):\n    return x * x * x\n"
    assert verdicts("mbpp", tmp_path, False, good, bad) == [True, False]
    assert verdicts("mbpp", tmp_path, True, f"```python\n{good}```", f"```python\n{bad}```") == [True, False]


def test_gsm8k_compares_numbers(tmp_path: Path) -> None:
    answers = ("So #### 1234.5", "It is $1,234.50.", "#### 1234.5 eggs, not 7", "1234", "none", "")
    assert verdicts("gsm8k", tmp_path, False, *answers) == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a 1 b 2", "2"),
        ("#### 1 b 2", "1"),
        ("x\n#### $1,000,000.00\n", "1000000"),
        ("-3", "-3"),
        ("0.50", "0.5"),
        ("none", ""),
        ("####", ""),
        ("3.", "3"),
    ],
)
def test_the_number_of_an_answer_has_one_spelling(text: str, number: str) -> None:
    assert last_number(text) == number


def test_code_is_the_block_that_defines_the_function() -> None:
    text = "```\na = 1\n```\n```py\ndef f():\n    pass\n```"
    assert code_of(text) == code_of(text, "f") == "def f():\n    pass\n"
    assert code_of(text, "g") == "a = 1\n"
    assert code_of("plain") == "plain"


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_raw_text_with_examples_or_a_conversation(task: str, tmp_path: Path) -> None:
    record = RECORDS[task]
    path = written(tmp_path / "data.jsonl", record, record, record)
    (alone,) = read_problems(TASKS[task], path, False, limit=1)
    first, second = read_problems(TASKS[task], path, False, shots=1)
    assert isinstance(alone.prompt, str)
    assert first.prompt == second.prompt
    assert isinstance(first.prompt, str)
    assert first.prompt.endswith(alone.prompt)
    solved = str(record.get("canonical_solution") or record.get("code") or record["answer"]).replace("\r\n", "\n")
    assert solved in first.prompt.removesuffix(alone.prompt)
    (said,) = read_problems(TASKS[task], path, True, skip=2)
    assert isinstance(said.prompt, list)
    assert [message["role"] for message in said.prompt] == ["user"]
    assert str(record.get("prompt") or record.get("text") or record["question"]) in said.prompt[0]["content"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"prompt": 3, "test_list": [1], "question": ""}'])
def test_lines_of_another_task_are_refused(task: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(RECORDS[task]) + "\n" + damage + "\n", "utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        read_problems(TASKS[task], path, False)


def test_what_leaves_no_problem_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "data.jsonl", GSM8K, GSM8K)
    for arguments in ({"skip": 2}, {"shots": 2}, {"shots": 3}):
        with pytest.raises(ConfigError, match="2 problems"):
            read_problems(TASKS["gsm8k"], path, False, **arguments)
    with pytest.raises(ConfigError, match="raw"):
        read_problems(TASKS["gsm8k"], path, True, shots=1)
    with pytest.raises(ConfigError, match="wanted one of humaneval"):
        find_task("mmlu")


@pytest.mark.parametrize("n", [1, 3, 6])
def test_pass_at_k_is_the_chance_that_k_of_the_answers_hold_a_right_one(n: int) -> None:
    for passed in range(n + 1):
        answers = [index < passed for index in range(n)]
        for k in range(1, n + 1):
            chosen = list(combinations(answers, k))
            assert pass_at(n, passed, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_a_score_is_the_mean_over_problems_with_its_error() -> None:
    right, wrong = Grade(True), Grade(False)
    found = score([right, right, wrong, right, wrong, wrong, wrong, wrong], 2, (1, 2))
    assert (found.num_problems, found.num_passed) == (4, 3)
    assert found.pass_at == {1: pytest.approx(0.375), 2: pytest.approx(0.5)}
    assert found.errors[2] == pytest.approx(0.5 / 3**0.5)
    with pytest.raises(ConfigError, match="at least 3 answers"):
        score([right, right], 2, (3,))

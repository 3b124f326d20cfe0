"""Tasks whose answers are generated and judged: HumanEval, MBPP, GSM8K. A row of TASKS is everything about one of them.

Sources: Chen et al. 2021 (arXiv 2107.03374: HumanEval, its stop texts, the estimator of pass@k); Austin et al. 2021 (arXiv
2108.07732: MBPP), with the docstring prompt of bigcode-evaluation-harness; Cobbe et al. 2021 (arXiv 2110.14168: GSM8K).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpuspec.errors import ConfigError
from cpuspec.evaluate.prompts import CHAT_FORMS, Prompt, parse_line, read_text
from cpuspec.evaluate.quality import mean_and_error
from cpuspec.evaluate.sandbox import Limits, run_programs

Record = Mapping[str, Any]  # a line of a task's file

_FENCE = re.compile(r"```[a-zA-Z0-9+]*[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_MOST_CHARACTERS = 100_000  # of an answer that is searched or run


@dataclass(frozen=True)
class Task:
    """How a task asks and judges: by a program, or by a match."""

    name: str
    fields: Mapping[str, type]  # texts or lists of texts that each line has
    max_tokens: int
    raw: Callable[[Record, Sequence[Record]], str]  # the text that a base model continues; after the examples, other lines
    stop: tuple[str, ...]  # texts that end the answer to `raw`
    chat: Callable[[Record], str]  # what a user says
    # The program that passes if an answer is right. Its last argument: whether the answer was given in a conversation.
    program: Callable[[Record, str, bool], str] | None = None
    matches: Callable[[Record, str], bool] | None = None  # whether an answer is right, for tasks without a program


@dataclass(frozen=True)
class Problem:
    """One line of a task as a prompt. name: the line's own, else its number."""

    name: str
    record: Record
    prompt: Prompt


@dataclass(frozen=True)
class Grade:
    """Whether an answer is right, and if not, why."""

    passed: bool
    reason: str = ""


@dataclass(frozen=True)
class Score:
    """The share of right answers. pass_at: by k, the chance that one of k answers is right; errors: its standard errors."""

    num_problems: int
    num_samples: int  # of each problem
    num_passed: int  # of all answers
    pass_at: Mapping[int, float]
    errors: Mapping[int, float]


def read_problems(task: Task, path: Path, chat: bool, skip: int = 0, limit: int | None = None, shots: int = 0) -> list[Problem]:
    """The problems of a JSON-lines file: its first `shots` lines are examples, then `skip` lines are left out.

    Raises ConfigError for a file that is none of this task's, and for examples in a conversation.
    """
    if chat and shots:
        raise ConfigError("examples are for raw prompts; leave out --shots or --chat")
    records = [_record(task, line, f"{path}, line {n}") for n, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    examples, asked = records[:shots], records[shots + skip :][:limit]
    if not asked or len(examples) < shots:
        raise ConfigError(f"{path} has {len(records)} problems; none is left after {shots} examples and {skip} that are skipped")
    prompts: list[Prompt] = [[{"role": "user", "content": task.chat(one)}] if chat else task.raw(one, examples) for one in asked]
    names = [str(one.get("task_id", shots + skip + number)) for number, one in enumerate(asked, 1)]
    return [Problem(*one) for one in zip(names, asked, prompts, strict=True)]


def judge(
    task: Task,
    problems: Sequence[Problem],
    answers: Sequence[str],
    chat: bool,
    limits: Limits | None = None,
    isolated: bool = True,
    workers: int = 1,
    on_verdict: Callable[[int], None] = lambda done: None,
) -> list[Grade]:
    """Whether each answer is right; `problems` has the problem of each answer. Programs run in the sandbox.

    Raises ConfigError where there is no sandbox.
    """
    texts = [answer[:_MOST_CHARACTERS] for answer in answers]
    if task.matches:
        right = [task.matches(problem.record, text) for problem, text in zip(problems, texts, strict=True)]
        return [Grade(one, "" if one else "another result") for one in right]
    assert task.program, "a task judges by a program or by a match"
    programs = [task.program(problem.record, text, chat) for problem, text in zip(problems, texts, strict=True)]
    outcomes = run_programs(programs, limits, isolated, workers, on_verdict)
    return [Grade(one.passed, "" if one.passed else f"{one.status}: {one.reason}") for one in outcomes]


def score(verdicts: Sequence[Grade], num_samples: int, ks: Sequence[int] = (1,)) -> Score:
    """The score of `num_samples` answers to each problem, those of one problem together.

    Raises ConfigError for a k beyond the number of samples.
    """
    if wrong := [k for k in ks if not 1 <= k <= num_samples]:
        raise ConfigError(f"pass@{wrong[0]} needs at least {wrong[0]} answers to each problem, got {num_samples}; see --samples")
    passed = np.array([one.passed for one in verdicts]).reshape(-1, num_samples).sum(axis=1)
    found = {k: mean_and_error(np.array([pass_at(num_samples, int(c), k) for c in passed])) for k in ks}
    return Score(
        len(passed),
        num_samples,
        int(passed.sum()),
        {k: mean for k, (mean, _) in found.items()},
        {k: error for k, (_, error) in found.items()},
    )


def pass_at(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate that one of k answers passes, where `num_passed` of `num_samples` did (arXiv 2107.03374)."""
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def code_of(text: str, name: str = "") -> str:
    """The code in an answer: the first fenced block that defines `name`, or any function; else the first block, else all of it."""
    blocks = _FENCE.findall(text)
    return next((block for block in blocks if f"def {name}" in block), blocks[0] if blocks else text)


def last_number(text: str) -> str:
    """The number after the last `####`, else the last number of a text, in one spelling; "" without one."""
    marked = text.rpartition("####")[2] if "####" in text else text
    found = _NUMBER.findall(marked)
    if not found:
        return ""
    number = found[0 if "####" in text else -1].replace(",", "").replace("$", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def _humaneval_program(record: Record, answer: str, chat: bool) -> str:
    name, prompt = record["entry_point"], record["prompt"]
    if chat:
        code = code_of(answer, name)
        # The prompt's imports and helpers stand first; its own function, which has no body, is then defined again.
        program = f"{prompt}\n    pass\n\n{code}" if f"def {name}" in code else prompt + code
    else:
        program = prompt + answer
    return f"{program}\n\n{record['test']}\n\ncheck({name})\n"


def _mbpp_program(record: Record, answer: str, chat: bool) -> str:
    code = code_of(answer) if chat else answer
    return "\n".join([code, str(record.get("test_setup_code") or ""), *record["test_list"]]) + "\n"


def _mbpp_raw(record: Record, examples: Sequence[Record]) -> str:
    def asked(one: Record) -> str:
        return f'"""\n{one["text"]}\n{one["test_list"][0]}\n"""\n'

    return "".join(f"{asked(one)}{one.get('code', '')}\n\n".replace("\r\n", "\n") for one in examples) + asked(record)


def _gsm8k_raw(record: Record, examples: Sequence[Record]) -> str:
    shown = "".join(f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" for one in examples)
    return f"{shown}Question: {record['question']}\nAnswer:"


def _humaneval_raw(record: Record, examples: Sequence[Record]) -> str:
    return "".join(f"{one['prompt']}{one.get('canonical_solution', '')}\n\n" for one in examples) + str(record["prompt"])


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task(
            "humaneval",
            {"prompt": str, "entry_point": str, "test": str},
            512,
            _humaneval_raw,
            ("\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif", "\n```"),
            lambda record: CHAT_FORMS["complete"].replace("{}", record["prompt"]),
            program=_humaneval_program,
        ),
        Task(
            "mbpp",
            {"text": str, "test_list": list},
            512,
            _mbpp_raw,
            ("\nclass", "\nassert", '\n"""', "\nprint", "\nif", "\n```"),
            lambda record: (
                f"{record['text']} Answer with one Python code block. The code must pass these tests:\n\n```python\n"
                + "\n".join(record["test_list"])
                + "\n```"
            ),
            program=_mbpp_program,
        ),
        Task(
            "gsm8k",
            {"question": str, "answer": str},
            512,
            _gsm8k_raw,
            ("\nQuestion:", "Question:"),
            lambda record: f"{record['question']}\n\nReason step by step, and end with a line of #### and the number.",
            matches=lambda record, answer: last_number(answer) == last_number(record["answer"]) != "",
        ),
    )
}


def find_task(name: str) -> Task:
    """The task of that name. Raises ConfigError."""
    if name not in TASKS:
        raise ConfigError(f"there is no task {name!r}; wanted one of {', '.join(TASKS)}")
    return TASKS[name]


def _record(task: Task, line: str, where: str) -> Record:
    found = parse_line(line, where)
    for name, kind in task.fields.items():
        value = found.get(name)
        if not isinstance(value, kind) or not value or (isinstance(value, list) and not all(isinstance(x, str) for x in value)):
            wanted = "a list of texts" if kind is list else "a text"
            raise ConfigError(f"{where}: {task.name} wants {wanted} in the field {name!r}")
    return found

"""Damaged answers with tool calls are read without an exception, and every call that is told has arguments that parse.

CPUSPEC_FUZZ=10000 in the environment reads as many answers of each family:

    CPUSPEC_FUZZ=10000 python -m pytest tests/fuzz/test_answers.py
"""

import json
import os
from random import Random

import pytest

from cpuspec.server.parsing.answer import AnswerParser, Piece, joined_pieces
from cpuspec.server.parsing.calls import TOOL_FORMATS
from tests.server.written import FUNCTIONS, PARTS, WAYS, WORDS, damaged, random_call, random_text


def answer(name: str, random: Random) -> str:
    calls = [random_call(random) for _ in range(random.randrange(3))]
    words = [random.choice(("", *WORDS, random_text(random))) for _ in range(2)]
    return damaged(random, words[0] + (random.choice(WAYS[name])(calls) if calls else random_text(random, PARTS)) + words[1])


def read(name: str, parts: list[str], thinking: bool) -> list[Piece]:
    parser = AnswerParser(TOOL_FORMATS[name], FUNCTIONS, thinking=thinking)
    return joined_pieces([*(piece for part in parts for piece in parser.push(part)), *parser.finish()])


@pytest.mark.parametrize("name", WAYS)
def test_no_damaged_answer_is_an_exception_or_a_broken_call(name: str) -> None:
    num_calls = 0
    for seed in range(int(os.environ.get("CPUSPEC_FUZZ") or 40)):
        random = Random(seed)
        text, thinking = answer(name, random), random.random() < 0.2
        whole = read(name, [text], thinking)
        for piece in whole:
            if piece.kind == "call":
                num_calls += 1
                assert piece.text in FUNCTIONS, (seed, text)
            elif piece.kind == "arguments":
                found = json.loads(piece.text, parse_constant=pytest.fail)
                assert isinstance(found, dict), (seed, text)
        edges = sorted(random.randrange(len(text) + 1) for _ in range(random.randrange(1, 8)))
        parts = [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)], strict=True)]
        assert read(name, parts, thinking) == whole, (seed, parts)
    assert num_calls, "the damage leaves calls"

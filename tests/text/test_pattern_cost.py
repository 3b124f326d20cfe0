"""Patterns of real tokenizers are read; those that backtrack without end are told from them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuspec.errors import TokenizerError
from cpuspec.text.pattern_cost import pattern_cost
from cpuspec.text.pre_tokenizers import PRE_TOKENIZERS

regex = pytest.importorskip("regex")

# As tokenizer.json files of well-known models have them.
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
_CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
_KIMI = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?|\s*[\r\n]+|\s+"
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_DIGITS = (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))", r"(?=(\d{3})+(?!\d))", r"\d{1,3}(?=(?:\d{3})*\b)", "[0-9][0-9][0-9]")
_OTHERS = (
    " {2,}",
    r"[^\n]+|[\n]+",
    r"\w+|[^\w\s]+",
    r"(?<=\p{L})(?=\p{N})",
    r"[一-龥\u3040-\u309f]+",
    "(?i)a|b",
    r"\x{41}\u0042\R",
)
REAL = [_O200K, _DEEPSEEK, _CL100K, _KIMI, _BLOOM, *_DIGITS, *_OTHERS]


# Published tokenizer.json files have these. Other names of the table stand in GGUF files alone, and their patterns are our own.
WIDELY_USED = ("llama-bpe", "qwen2", "qwen35", "gpt-4o", "tekken", "deepseek-v3", "smollm", "glm4", "gpt-2")


@pytest.mark.parametrize("pattern", [*REAL, *sorted({one for name in WIDELY_USED for one in PRE_TOKENIZERS[name].patterns})])
def test_patterns_of_real_tokenizers_are_read(pattern: str) -> None:
    assert pattern_cost(pattern).steps < 1000


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(?:a*)*b",
        "(?:a|a)*b",
        "(?:a|a){18}b",
        "(?:(?:a?){8}){8}b",
        "a?" * 20 + "b",
        r"\p{L}*\p{L}*\p{L}*b",
        r"(?:\p{L}+\p{N}?)+(?=b)",
        "a*" * 20 + "(?<=b)",
    ],
)
def test_repetitions_that_multiply_are_refused(pattern: str) -> None:
    with pytest.raises(TokenizerError, match="multiply"):
        pattern_cost(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z ]+[.,](?!\n)",
        ".*b",
        r"[^\x00]+b",
        r"(?=[^\x00]*)b",
        "(?>.*)b",
        r"(?:\w\s)*b",
        r"(?:\w\W)+$",
        r"(?!.*a)b",
        r"(?m:.+)b",
    ],
)
def test_a_repetition_that_runs_through_a_text_and_may_fail_is_refused(pattern: str) -> None:
    with pytest.raises(TokenizerError, match="through a whole text"):
        pattern_cost(pattern)


@pytest.mark.parametrize("pattern", ["a{1025}", "a{99999}", "(?:a{100}){100}", "a{9,1200}b", "a{600}b{600}"])
def test_a_pattern_that_counts_far_is_refused(pattern: str) -> None:
    with pytest.raises(TokenizerError, match="counts beyond"):
        pattern_cost(pattern)


_UNREAD = [r"(a)\1", r"\k<n>", r"\g<0>", "(?~a)", "(?x: a )", "(?(1)a|b)", r"a\Kb", r"\Qa\E", r"\X", "(*FAIL)", "(?{x})"]
_DAMAGED = [
    "(",
    ")",
    "a)",
    "*a",
    "|*",
    "[a",
    "[]",
    "[]a]",
    "[^]a]",
    "a{5,2}",
    "a{,}",
    "(?i",
    "\\",
    "a***",
    "a" + "{1}" * 9,
    "(" * 90,
]


@pytest.mark.parametrize(
    "pattern",
    [
        *_UNREAD,
        *_DAMAGED,
        "(?#x)",
        "a{1}{1}{1}",
        "(?<=a+)b",
        "(?<!(?:a{2,}))b",
        "(?:" * 90 + "a" + ")" * 90,
        "[" * 90 + "a" + "]" * 90,
    ],
)
def test_a_pattern_that_is_not_understood_is_refused(pattern: str) -> None:
    with pytest.raises(TokenizerError, match="not read"):
        pattern_cost(pattern)


def test_a_long_pattern_is_refused() -> None:
    with pytest.raises(TokenizerError, match="characters; at most"):
        pattern_cost("a" * 100_000)


@settings(max_examples=150, deadline=None)
@given(st.text("ab|()[]{}?*+,12\\pL.^$sS&-:=!<>i", max_size=20) | st.text(max_size=10))
def test_any_pattern_has_a_cost_or_is_a_tokenizer_error(pattern: str) -> None:
    try:
        cost = pattern_cost(pattern)
    except TokenizerError:
        return
    assert 0 < cost.steps <= 1 << 13


_ATOMS = ("a", "b", ".", "[ab]", "(?:a|b)", "(?:ab|)", "(?=a)", "$", "")
_REPEATS = ("", "?", "*", "+", "{2}", "{1,3}", "*?", "++")


@pytest.mark.parametrize("first", _ATOMS)
def test_no_match_is_shorter_than_said(first: str) -> None:
    texts = ["".join(letters) for length in range(4) for letters in itertools.product("ab", repeat=length)]
    for second, repeat in itertools.product(_ATOMS, _REPEATS):
        pattern = f"(?:{first}){second}{repeat}" if second else first
        try:
            shortest = pattern_cost(pattern).min_length
        except TokenizerError:
            continue
        compiled = regex.compile(pattern)
        assert all(len(match[0]) >= shortest for text in texts for match in compiled.finditer(text))

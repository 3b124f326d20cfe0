"""Patterns of real tokenizers are taken, and only those: Oniguruma backtracks without end on others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuspec.errors import TokenizerError
from cpuspec.text.known_patterns import min_match
from cpuspec.text.pre_tokenizers import PRE_TOKENIZERS

# As tokenizer.json files of well-known models have them.
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED = {
    "gpt-oss": _O200K,
    "Nemotron 3": _O200K.replace(f"{_CONTRACTION}?", "").replace("{1,3}", ""),
    "GPT-4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "LLaDA": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "DeepSeek V3": "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    "DeepSeek Coder": "[\r\n]",
    "Kimi": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}"
    r"&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Seed-Coder": f"{_CONTRACTION}|"
    "[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    "BLOOM": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "Laguna": r"(?:\r?\n)+(?!\r?\n)",
    "Falcon": "[0-9][0-9][0-9]",
    "AFMoE": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    **{"SuperBPE": r"(?=(\d{3})+(?!\d))", "Cohere": r"\d{1,3}(?=(?:\d{3})*\b)", "T5": " {2,}", "Sarvam": " "},
    **{"letters": ".", "lines": r"[^\n]+|[\n]+", "words": r"\w+|[^\w\s]+", "Japanese": "[一-龥\u3040-\u309f]+"},
    "a mark": r"\*+|\\",
    **{pattern: pattern for rules in PRE_TOKENIZERS.values() for pattern in rules.patterns},
}


@pytest.mark.parametrize("pattern", PUBLISHED.values(), ids=PUBLISHED)
def test_a_pattern_of_a_real_tokenizer_is_taken_and_matches_no_less_than_said(pattern: str) -> None:
    assert min_match(pattern) == (0 if pattern == PUBLISHED["SuperBPE"] else 1)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+b", "(?:a|a)*b", "a?" * 20 + "b", r"\p{L}*\p{L}*b", ".*b", r"[^\x00]+b", r"(?=[^\x00]*)b", r"(?:\w\s)*b", r"(?!.*a)b",
     "a{600}", r"(a)\1", r"\g<0>", "(?~a)", r"a\Kb", "(*FAIL)", "(?{x})", "(?i)a|b", "(?<=a+)b", "a**", "a{1}{1}",
     "(", ")", "a|(b", "(a|b", "*a", "[a", "[]", "[]a]", "[^]a]", "a{5,2", "\\", "[" * 90 + "a" + "]" * 90],
)  # fmt: skip
def test_any_other_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(TokenizerError, match="which no known model has"):
        min_match(pattern)
    with pytest.raises(TokenizerError, match="which no known model has"):
        min_match(rf"\p{{N}}|{pattern}")


@pytest.mark.parametrize(
    ("pattern", "least"),
    [("a*", 0), ("a?b?", 0), ("a{0,3}", 0), ("", 0), ("a|", 0), ("a?b", 1), ("a+|b*", 0), ("ab?", 1), ("a{2}", 1)],
)
def test_a_simple_pattern_says_whether_it_matches_nothing(pattern: str, least: int) -> None:
    assert min_match(pattern) == least


def test_a_long_pattern_is_refused() -> None:
    with pytest.raises(TokenizerError, match="characters; at most"):
        min_match("a" * 100_000)


@settings(max_examples=150)
@given(st.text("ab|()[]{}?*+,12\\pL.^$sS&-:=!<>i", max_size=20) | st.text(max_size=10))
def test_a_pattern_that_is_taken_has_no_long_search(pattern: str) -> None:
    from tokenizers import Regex, normalizers

    try:
        least = min_match(pattern)
    except TokenizerError:
        return
    try:
        step = normalizers.Replace(Regex(pattern), "" if least == 0 else "c")
    except Exception:
        return  # the tokenizer's reader turns this into its own error
    assert len(step.normalize_str("ab 1-" * 4000)) <= 20_000

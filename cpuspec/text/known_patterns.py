"""The regular expressions that a tokenizer.json may have: those of published models, and simple ones.

The `tokenizers` library splits text with Oniguruma, which backtracks without a limit: `(a+)+b` takes 2**n steps on n letters, and
`.*b` takes n**2 on a text without a b. Models build their patterns from the same few alternatives (`A|B|C`), so each alternative is
looked up by itself. An alternative that repeats nothing but its last character is simple: it has nothing to go back to.
"""

import re

from cpuspec.errors import TokenizerError
from cpuspec.text.pre_tokenizers import PRE_TOKENIZERS

_HAN = r"&&[^\p{Han}]]"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{_HAN}", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{_HAN}"
_MORE = (  # alternatives of published tokenizer.json files that no GGUF rule has
    "",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",  # BLOOM
    *(
        rf"[^\r\n\p{{L}}\p{{N}}]?{word}(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
    ),  # Kimi
    r"\p{N}{1,3}+",  # GPT-4
    r"\s+$",  # GPT-4, DeepSeek
    r"(?:\r?\n)+(?!\r?\n)",  # Laguna
    r"\d{1,3}(?=(?:\d{3})*\b)",  # Cohere
    r"(?=(\d{3})+(?!\d))",  # SuperBPE
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",  # AFMoE
)
_LONGEST = 1 << 14
_ATOM = r"(?:\\[pP]\{\^?\w+\}|\\[dDsSwWrnt]|\\[^\w]|\[(?:\\.|[^\\\[\]])+\]|[^\\()\[\]{}|*+?^$])"  # matches one character of a text
_SIMPLE = re.compile(rf"(?:{_ATOM}\??){{0,4}}{_ATOM}(?:[*+?]|\{{\d{{1,2}}(?:,\d{{0,2}})?\}})?", re.DOTALL)
_MAYBE_EMPTY = re.compile(rf"(?:{_ATOM}\?){{0,4}}(?:{_ATOM}(?:[*?]|\{{0.*))?|\(\?=.*", re.DOTALL)
_PART = re.compile(r"\\.|.", re.DOTALL)


def min_match(pattern: str) -> int:
    """0 if a known pattern can match nothing, else 1. Raises TokenizerError for a pattern that is not known to be harmless."""
    if len(pattern) > _LONGEST:
        raise TokenizerError(f"the pattern has {len(pattern)} characters; at most {_LONGEST} are read")
    found = _alternatives(pattern)
    for one in found:
        if one not in _KNOWN and not _SIMPLE.fullmatch(one):
            raise TokenizerError(f"the pattern has {one[:80]!a}, which no known model has; it might search without end")
    return 0 if any(map(_MAYBE_EMPTY.fullmatch, found)) else 1


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern in one spelling: line ends escaped, and no `+` that makes a repetition possessive."""
    found, groups, classes = [""], 0, 0
    for part in _PART.findall(pattern.replace("\r", r"\r").replace("\n", r"\n")):
        classes += (part == "[") - (part == "]")
        if not classes:
            groups += (part == "(") - (part == ")")
        if part == "|" and not (groups or classes):
            found.append("")
        elif classes or part != "+" or not found[-1].endswith(("+", "*", "?")) or found[-1][-2:-1] == "\\":
            found[-1] += part
    return found


def _in_one_spelling() -> frozenset[str]:
    patterns = [pattern for rules in PRE_TOKENIZERS.values() for pattern in rules.patterns]
    return frozenset(one for pattern in (*patterns, *_MORE) for one in _alternatives(pattern))


_KNOWN = _in_one_spelling()

"""How models split text into words before merging, by the names that GGUF files give to these rules (`tokenizer.ggml.pre`).

Patterns are those of the models' own tokenizer.json files. llama.cpp's llama-vocab.cpp says which name stands for which, and
whether BOS comes before a text where a file does not say. Knows names and rules; the tokenizer applies them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_AFTER_CONTRACTION = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = f"{_CONTRACTION}|{_AFTER_CONTRACTION}"
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(behind: str, digits: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Words that end where lower case turns to upper case. behind: what may stand behind a word. digits: a run of them."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{behind}|{before}{upper}+{lower}*{behind}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_GPT_4O = _cased(f"{_CONTRACTION}?", r"\p{N}{1,3}")
_KIMI = _cased(f"{_CONTRACTION}?", r"\p{N}{1,3}", rf"[{_UPPER}&&[^\p{{Han}}]]", rf"[{_LOWER}&&[^\p{{Han}}]]")
_KIMI = _KIMI.replace(r"[\r\n/]*", r"[\r\n]*")
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
_DEEPSEEK_3 = rf"{_ASCII_WORD}[\r\n]*|{_SPACES}"
# Letters with an upper and a lower case, as far as the tokenizer's authors listed them.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ"
    "-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰"
    "-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LINES = r"[^\n]+|[\n]+"


@dataclass(frozen=True)
class PreTokenizer:
    """How one kind of pre-tokenizer prepares text for merging.

    patterns: each is applied to the pieces that the one before left. nfc: texts are composed first.
    threes: digits come in groups of three, counted from the end of their run: of all runs ("runs"), or of those that no letter
    follows ("words"); "" for no such groups.
    ignore_merges: a word that is a token stays whole, whatever the merges say. adds_bos: where the file does not say.
    spaced: pieces are characters with ▁ for a space, and bytes are <0xNN>; else characters that stand for bytes.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    threes: str = ""
    ignore_merges: bool = False
    adds_bos: bool = False
    spaced: bool = False


_LLAMA_3 = PreTokenizer((_LLAMA3,), ignore_merges=True)
_SPACED = PreTokenizer((_LINES,), spaced=True)

_RULES: dict[str, PreTokenizer] = {  # by names with spaces between
    "gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling gigachat a.x-4.0 mellum": PreTokenizer((_GPT2,)),
    "modern-bert roberta-bpe jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "qwen2 f2llmv2": PreTokenizer((_QWEN2,), nfc=True),
    "stablelm2 deepseek-r1-qwen megrez hunyuan kormo solar-open grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer(
        (_QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),), nfc=True
    ),
    "ufakzeka": PreTokenizer((_AFTER_CONTRACTION,)),
    "seed-coder": PreTokenizer((_QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),)),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0 jina-v5-nano": replace(_LLAMA_3, adds_bos=True),
    "glm4 glm5": _LLAMA_3,
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")), ignore_merges=True),
    "jais-2": PreTokenizer(
        (_LLAMA3.replace(r"\s+(?!\S)|\s+", "".join(rf"\s{{{2**n}}}(?!\S)|" for n in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s"),)
    ),
    "tekken": PreTokenizer((_cased("", r"\p{N}"),), ignore_merges=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT_4O,)),
    "granite-embed-multi-97m": PreTokenizer((_GPT_4O,), ignore_merges=True),
    "tiny_aya cohere2moe": PreTokenizer((_GPT_4O,), threes="words"),
    "kimi-k2": PreTokenizer((r"\p{Han}+", _KIMI)),
    "youtu": PreTokenizer(
        ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", _cased(f"{_CONTRACTION}?", r"\p{N}")),
        ignore_merges=True,
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK_3)),
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", _CJK, rf"{_ASCII_WORD}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "afmoe": PreTokenizer((r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+", _DEEPSEEK_3), threes="runs"),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+", r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (rf"'(?i:[sdmt]|ll|ve|re)|{_AFTER_CONTRACTION}".replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)
    ),
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(?:IMGIMG)(?:(?:A|B|C|D|E|F|G|H|I){1,4})Z",
            r"(?:[\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
    "superbpe": PreTokenizer((r"\p{N}+",), threes="runs"),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gemma4 granite-embed-multi-311m": replace(_SPACED, adds_bos=True),
    "sarvam-moe": _SPACED,
}

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: rules for names, rules in _RULES.items() for name in names.split()}

"""Encoding against a slow reference: byte-level BPE and SentencePiece BPE as their papers and programs define them."""

import itertools
import json
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuspec.checkpoints.checkpoint import GgufVocabulary, HfTokenizerFiles
from cpuspec.errors import TokenizerError
from cpuspec.text import Tokenizer, byte_pairs, hf_vocabulary, make_tokenizer
from cpuspec.text.pre_tokenizers import PRE_TOKENIZERS
from tests.oracles.tokenizers import WORDS, byte_pair_ids, sentencepiece_ids, spell, unigram_pieces
from tools.make_tiny_model import learn_merges

CORPUS = (
    "the quick brown fox jumps over the lazy dog; the fox doesn't care, and they'll say it's 1234 or 56.\n"
    'def add(a, b):\n    return a + b\n\n\nfor i in range(100):\n\tprint(f"{i}: {add(i, 1)}")\r\n'
    "Größe, café, naïve, Ελληνικά, русский, 中文字符，日本語のテキスト, 한국어, 😀👩‍👩‍👧‍👦!  \n"
)
TRICKY = [
    *("", " ", "   ", "\n", "the", " the", "  the  fox", "The FOX'S they'LL don't 'tis ''s"),
    *("1 12 123 1234 12345 1,234.56 ٣٤٥ ½ Ⅷ １２３", "a\tb\t\tc \t d", "x\r\ny\r\n\r\nz\r", "\n\n\n  indented\n    more\n"),
    "trailing   ",
    "def f(x):\n    return x[0] != {'a': -1}  # ok?\n",
    *(
        "café café ñ ñ Å Å",
        "中文字符，日本語のテキスト。한국어",
        "😀👩‍👩‍👧‍👦 🇩🇪 ☺️",
        "\u00a0\u2028\u3000x\u200by\u200d\ufeff",
        "نص عربي שלום",
    ),
    *("<|im_end|><|not|a token|><tool>", "\x00\x01\x7f\x85", "!!!???...,,,---___", "ſ'ſ K ﬁ ß"),
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>")


MERGES = learn_merges(Counter(tuple(spell(word.encode())) for word in regex.findall(WORDS["qwen2"], CORPUS * 2)), 150)
ALPHABET = [spell(bytes([byte])) for byte in range(256)]
TOKENS = (*ALPHABET, *dict.fromkeys(a + b for a, b in MERGES), *SPECIAL, "<tool>")
IDS = {token: i for i, token in enumerate(TOKENS)}


def make_vocabulary(pre: str = "qwen2", **changes: Any) -> GgufVocabulary:
    types = [3 if token in SPECIAL else 4 if token == "<tool>" else 1 for token in TOKENS]
    vocabulary = GgufVocabulary(
        model="gpt2",
        pre=pre,
        tokens=TOKENS,
        token_types=tuple(types),
        merges=tuple(" ".join(pair) for pair in MERGES),
        bos_id=IDS["<|endoftext|>"],
        eos_id=IDS["<|im_end|>"],
        add_bos=False,
        add_eos=False,
        add_space_prefix=False,
    )
    return replace(vocabulary, **changes)


def make(vocabulary: GgufVocabulary | HfTokenizerFiles, vocab_size: int | None = None) -> Tokenizer:
    size = vocab_size or (len(vocabulary.tokens) if isinstance(vocabulary, GgufVocabulary) else 1000)
    checkpoint: Any = SimpleNamespace(vocabulary=vocabulary, config=SimpleNamespace(vocab_size=size), path=Path("model.gguf"))
    return make_tokenizer(checkpoint)


def visible(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_bytes(i).decode() for i in ids]


@pytest.mark.parametrize("pre", ["smollm", *WORDS])
def test_ids_equal_the_slow_reference(pre: str) -> None:
    tokenizer = make(make_vocabulary(pre))
    for text in [*(text for text in TRICKY if "<tool>" not in text), CORPUS]:
        assert tokenizer.encode(text) == byte_pair_ids(text, pre, MERGES, IDS), text


@settings(max_examples=150)
@given(st.text(max_size=40) | st.text("aeT 1'\n\r\tñ́中😀<|>", max_size=40), st.sampled_from(["smollm", *WORDS]))
def test_ids_equal_the_slow_reference_for_any_text(text: str, pre: str) -> None:
    tokenizer = BUILT[pre]
    assert tokenizer.encode(text) == byte_pair_ids(text, pre, MERGES, IDS)


BUILT = {pre: make(make_vocabulary(pre)) for pre in ["smollm", *WORDS]}


def test_remembered_words_and_forgotten_ones_have_the_same_ids(monkeypatch) -> None:
    monkeypatch.setattr(byte_pairs, "_MOST_WORDS", 3)
    tokenizer = make(make_vocabulary("qwen2"))
    for text in [*(text for text in TRICKY if "<tool>" not in text), CORPUS] * 2:
        assert tokenizer.encode(text) == byte_pair_ids(text, "qwen2", MERGES, IDS), text


def test_digits_and_composed_characters_follow_the_pre_tokenizer() -> None:
    tokens, types = (*TOKENS, "12", "123"), (*make_vocabulary().token_types, 1, 1)
    for pre, pieces in (("smollm", ["1", "2", "3", "4"]), ("qwen2", ["1", "2", "3", "4"]), ("llama-bpe", ["123", "4"])):
        tokenizer = make(make_vocabulary(pre, tokens=tokens, token_types=types, merges=("1 2", "12 3")))
        assert visible(tokenizer, tokenizer.encode("1234")) == pieces
    composed, decomposed = "é", "e\u0301"
    assert BUILT["qwen2"].encode(decomposed) == BUILT["qwen2"].encode(composed)
    assert BUILT["smollm"].encode(decomposed) != BUILT["smollm"].encode(composed)


def test_a_word_that_is_a_token_stays_whole_only_where_the_model_was_trained_so() -> None:
    vocabulary = make_vocabulary(tokens=(*TOKENS, "zqx"), token_types=(*make_vocabulary().token_types, 1))
    assert visible(make(vocabulary), make(replace(vocabulary, pre="llama-bpe")).encode("zqx")) == ["zqx"]
    assert visible(make(vocabulary), make(replace(vocabulary, pre="qwen2")).encode("zqx")) == ["z", "q", "x"]


def known_pre() -> list[str]:
    with pytest.raises(TokenizerError, match="names the pre-tokenizer 'klingon'; known: ") as caught:
        make(make_vocabulary("klingon"))
    return str(caught.value).split("known: ")[1].split(", ")


def test_an_unknown_pre_tokenizer_is_an_error_that_names_the_known_ones() -> None:
    assert {"smollm", "qwen2", "llama-bpe", "gpt-2", "default"} <= set(known_pre())


def test_a_file_without_a_pre_tokenizer_is_read_with_a_warning_as_by_llama_cpp(caplog: pytest.LogCaptureFixture) -> None:
    make(make_vocabulary("qwen2"))
    assert not caplog.text
    ids = make(make_vocabulary("default")).encode(CORPUS)
    assert "has the pre-tokenizer default, as of a converter that did not know the model's" in caplog.text
    assert "names no pre-tokenizer" not in caplog.text
    assert make(make_vocabulary("")).encode(CORPUS) == ids
    assert "names no pre-tokenizer" in caplog.text


@pytest.mark.parametrize("odd", ["", "a", "a ", "a b c", "a zzz", "q x", "#version: 0.2", " ", " a"])
def test_merges_that_make_no_token_of_two_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture, odd: str) -> None:
    """Published files have such lines, and llama.cpp reads on."""
    usual = make_vocabulary()
    ids = make(usual).encode(CORPUS)
    assert not caplog.text
    assert make(replace(usual, merges=(odd, *usual.merges[:9], odd, *usual.merges[9:]))).encode(CORPUS) == ids
    assert f"2 of {len(usual.merges) + 2} merges make no token of two, as {odd!r}; they are ignored" in caplog.text


@pytest.mark.parametrize("pre", known_pre())
def test_no_pre_tokenizer_loses_text(pre: str) -> None:
    import unicodedata

    vocabulary = make_vocabulary(pre)
    if PRE_TOKENIZERS[pre].spaced:
        bytes_of_text = tuple(f"<0x{byte:02X}>" for byte in range(256))
        tokens, types = (*bytes_of_text, *vocabulary.tokens[256:], "▁"), (*vocabulary.token_types, 1)
        vocabulary = replace(vocabulary, tokens=tokens, token_types=types, merges=())
    tokenizer = make(vocabulary)
    for text in [*TRICKY, CORPUS]:
        assert tokenizer.decode(tokenizer.encode(text)) in (text, unicodedata.normalize("NFC", text))


def test_text_becomes_a_control_token_only_where_asked() -> None:
    tokenizer = BUILT["qwen2"]
    start, end = IDS["<|im_start|>"], IDS["<|im_end|>"]
    text = "<|im_start|>fox<|im_end|><|im_end|>"
    plain = tokenizer.encode(text)
    assert not set(plain) & {start, end}
    assert tokenizer.decode(plain) == text
    fox = tokenizer.encode("fox")
    assert tokenizer.encode(text, parse_special=True) == [start, *fox, end, end]
    # What is broken stays text, and what begins inside of it is found.
    parsed = tokenizer.encode("<|im_end|<|im_end|>", parse_special=True)
    assert parsed == [*tokenizer.encode("<|im_end|"), end]
    assert tokenizer.decode(parsed, skip_special=False) == "<|im_end|<|im_end|>"
    assert tokenizer.decode(parsed) == "<|im_end|"


def test_user_defined_tokens_are_text_and_always_whole() -> None:
    tokenizer = BUILT["smollm"]
    ids = tokenizer.encode("a<tool>b")
    assert ids == [IDS["a"], IDS["<tool>"], IDS["b"]]
    assert not tokenizer.is_special(IDS["<tool>"])
    assert tokenizer.decode(ids) == "a<tool>b"


def test_no_merge_can_lead_to_a_control_token() -> None:
    # A hostile file: merges spell out a control token.
    merges = ("< |", "| >", "<| e", "<|e n", "<|en d", "<|end |>")
    parts = ("<|", "|>", "<|e", "<|en", "<|end", "<|end|>")
    kinds = (1, 1, 1, 1, 1, 3)
    tokens = tuple(dict.fromkeys((*ALPHABET, *parts)))
    for pre in ("qwen2", "llama-bpe"):
        types = (1,) * 256 + kinds
        tokenizer = make(make_vocabulary(pre, tokens=tokens, token_types=types, merges=merges, bos_id=None, eos_id=None))
        assert not any(map(tokenizer.is_special, tokenizer.encode("<|end|> <|end|>")))
        assert tokenizer.eos_ids == {tokens.index("<|end|>")}


def test_a_raw_prompt_has_the_control_tokens_that_are_written_and_one_beginning() -> None:
    tokenizer = make(make_vocabulary(add_bos=True))
    (bos,) = tokenizer.prefix
    written = f"{tokenizer.decode([bos], skip_special=False)}the cat"
    for text in ("the cat", written):
        assert tokenizer.encode_prompt(text) == [bos, *tokenizer.encode("the cat", add_special=False)]
    assert tokenizer.encode_prompt(written, parse_special=False) == tokenizer.encode(written)
    assert tokenizer.encode_prompt(written, add_special=False) == tokenizer.encode_prompt("the cat")
    assert tokenizer.encode_prompt("the cat", add_special=False) == tokenizer.encode("the cat", add_special=False)
    assert tokenizer.encode_prompt("") == [bos]


def test_tokens_around_a_text_are_those_of_the_file() -> None:
    bos, eos = IDS["<|endoftext|>"], IDS["<|im_end|>"]
    tokenizer = make(make_vocabulary(add_bos=True, add_eos=True))
    assert tokenizer.encode("a") == [bos, IDS["a"], eos]
    assert tokenizer.encode("") == [bos, eos]
    assert tokenizer.encode("a", add_special=False) == [IDS["a"]]
    assert BUILT["qwen2"].encode("a") == [IDS["a"]]
    assert tokenizer.bos_id == bos


def test_every_token_that_ends_a_turn_is_known_whatever_its_type() -> None:
    assert BUILT["qwen2"].eos_ids == {IDS["<|im_end|>"], IDS["<|endoftext|>"], IDS["<|eot_id|>"]}
    types = list(make_vocabulary().token_types)
    types[IDS["<|eot_id|>"]] = 1  # as some converters leave it
    types[IDS["<|im_start|>"]] = 4
    tokenizer = make(make_vocabulary(token_types=tuple(types)))
    assert IDS["<|eot_id|>"] in tokenizer.eos_ids
    assert tokenizer.is_special(IDS["<|eot_id|>"])
    assert tokenizer.is_special(IDS["<|im_start|>"])
    assert make(make_vocabulary(end_ids=(IDS["<tool>"],))).eos_ids > {IDS["<tool>"]}


def test_rows_beyond_the_vocabulary_decode_to_nothing_and_ids_beyond_the_rows_are_errors() -> None:
    tokenizer = make(make_vocabulary(), vocab_size=len(TOKENS) + 5)
    assert tokenizer.vocab_size == len(TOKENS) + 5
    assert tokenizer.decode([IDS["a"], len(TOKENS), IDS["b"]], skip_special=False) == "ab"
    assert tokenizer.token_bytes(len(TOKENS)) == b""
    assert tokenizer.is_special(len(TOKENS))
    for token_id in (-1, len(TOKENS) + 5, 1 << 60):
        for call in (tokenizer.token_bytes, tokenizer.is_special, lambda i: tokenizer.decode([i])):
            with pytest.raises(TokenizerError, match="outside of the vocabulary"):
                call(token_id)
    with pytest.raises(TokenizerError, match="the model rows for 7"):
        make(make_vocabulary(), vocab_size=7)


def test_text_that_is_not_unicode_is_a_clear_error() -> None:
    with pytest.raises(TokenizerError, match="lone surrogate"):
        BUILT["qwen2"].encode("ab\ud800c")


GOOD_TYPES, SHOUT = make_vocabulary().token_types, "\x1b[2J" + "x" * 1_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": (), "token_types": (), "bos_id": None, "eos_id": None}, "has 0 tokens"),
        ({"token_types": GOOD_TYPES[:-1]}, "token types"),
        ({"tokens": (*TOKENS[:-1], "a")}, "'a' more than once"),
        ({"add_bos": True, "bos_id": None}, "asks for BOS"),
        ({"add_eos": True, "eos_id": None}, "asks for EOS"),
        ({"model": "rwkv"}, "model is 'rwkv'; known: gpt2, llama"),
        ({"model": "bert"}, "does not say which token stands for unknown"),
        ({"model": "t5"}, "scores"),
        ({"model": "llama"}, "scores"),
        ({"model": "llama", "scores": (float("nan"),) * len(TOKENS)}, "all finite"),
        ({"pre": SHOUT}, "known"),
        ({"model": SHOUT}, "known"),
        ({"tokens": (SHOUT,) * len(TOKENS)}, "more than once"),
        ({"tokens": (*TOKENS[:-1], SHOUT)}, ""),
        ({"tokens": (*TOKENS[:-1], SHOUT), "model": "llama", "scores": (0.0,) * len(TOKENS)}, ""),
    ],
)
def test_a_hostile_vocabulary_is_a_clear_error_that_quotes_little_of_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        make(make_vocabulary(**changes))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1500  # the known pre-tokenizers are listed


# SentencePiece


WHOLE = ["▁t", "er", "in", "▁the", "he", "▁a", "▁▁", "th", "re", "ing", "▁in", "the", "there"]
PIECES = [
    ("<unk>", 2, 0.0),
    ("<s>", 3, 0.0),
    ("</s>", 3, 0.0),
    *((f"<0x{byte:02X}>", 6, 0.0) for byte in range(256)),
    *((piece, 1, -float(rank)) for rank, piece in enumerate(WHOLE)),
    *((piece, 1, -1000.0 - rank) for rank, piece in enumerate("▁thernigacs")),
    ("<tool>", 4, 0.0),
]
PIECE_IDS = {piece: i for i, (piece, _, _) in enumerate(PIECES)}
SENTENCEPIECE = GgufVocabulary(
    model="llama",
    pre="default",
    tokens=tuple(piece for piece, _, _ in PIECES),
    token_types=tuple(kind for _, kind, _ in PIECES),
    scores=tuple(score for _, _, score in PIECES),
    bos_id=1,
    eos_id=2,
    unk_id=0,
    add_bos=True,
    add_eos=False,
    add_space_prefix=True,
)


@settings(max_examples=150)
@given(st.text("thering ac", max_size=30) | st.text(max_size=10))
def test_sentencepiece_equals_its_slow_reference(text: str) -> None:
    tokenizer = SPM
    assert tokenizer.encode(text, add_special=False) == sentencepiece_ids(text, PIECES)
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


SPM = make(SENTENCEPIECE)


def test_sentencepiece_keeps_control_tokens_bytes_and_spaces_apart() -> None:
    assert SPM.encode("the", add_special=True) == [1, PIECE_IDS["▁the"]]
    smuggled = SPM.encode("<s></s><unk><0x41>", add_special=False)
    assert not set(smuggled) & {0, 1, 2, PIECE_IDS["<0x41>"]}
    assert SPM.decode(smuggled) == "<s></s><unk><0x41>"
    assert SPM.encode("</s>", add_special=False, parse_special=True) == [2]
    assert SPM.token_bytes(PIECE_IDS["<0xF0>"]) == b"\xf0"
    assert SPM.token_bytes(PIECE_IDS["▁the"]) == b" the"
    assert SPM.encode("a<tool>", add_special=False) == [PIECE_IDS["▁a"], PIECE_IDS["<tool>"]]
    assert 2 in SPM.eos_ids


# A text in parts, as one vocabulary hands it to another


@settings(max_examples=150)
@given(st.data(), st.sampled_from(["smollm", "gpt-2", "llama-bpe", "sentencepiece"]))
def test_any_ids_as_parts_encode_to_the_same_bytes_and_control_tokens(data: st.DataObject, name: str) -> None:
    """Bytes that are no UTF-8 and halves of characters included."""
    tokenizer = SPM if name == "sentencepiece" else BUILT[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    again = tokenizer.encode_parts(tokenizer.parts(ids, continues=True), continues=True)
    assert _meant(tokenizer, again) == _meant(tokenizer, ids)


def _meant(tokenizer: Tokenizer, ids: list[int]) -> list[bytes | int]:
    special = [(key, list(run)) for key, run in itertools.groupby(ids, tokenizer.is_special)]
    return [part for key, run in special for part in (run if key else [b"".join(map(tokenizer.token_bytes, run))])]


@settings(max_examples=150)
@given(st.text("thering ac", max_size=30) | st.text(max_size=10), st.sampled_from(["smollm", "qwen2", "sentencepiece"]))
def test_a_text_as_parts_encodes_as_it_did(text: str, name: str) -> None:
    tokenizer = SPM if name == "sentencepiece" else BUILT[name]
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.encode_parts(tokenizer.parts(ids)) == ids


def test_text_that_goes_on_gets_no_first_space_and_control_tokens_stay() -> None:
    the, space_the = SPM.encode_parts([b"the"], continues=True), [PIECE_IDS["▁the"]]
    assert SPM.encode_parts([b"the"]) == space_the
    assert SPM.decode([*space_the, *the]) == "thethe"
    assert SPM.encode_parts([b"the", 2, b"\xf0\x9fthe"]) == [*space_the, 2, PIECE_IDS["<0xF0>"], PIECE_IDS["<0x9F>"], *the]
    assert SPM.encode_parts([2, b"the"]) == SPM.encode("</s>the", add_special=False, parse_special=True)
    assert not set(SPM.encode_parts([b"<s></s>"])) & {0, 1, 2}
    assert SPM.parts([1, *space_the, 2, *space_the]) == [1, b"the", 2, b" the"]
    assert SPM.parts(space_the, continues=True) == [b" the"]
    assert (SPM.prefix, BUILT["qwen2"].prefix) == ((1,), ())


# Hugging Face directories


def make_hf(directory: Path, config: dict[str, Any] | None = None, **changes: Any) -> HfTokenizerFiles:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": IDS[token], "content": token, "special": token in SPECIAL, **plain} for token in (*SPECIAL, "<tool>")]
    pattern = {"type": "Split", "pattern": {"Regex": WORDS["qwen2"]}, "behavior": "Isolated", "invert": False}
    bytes_step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    data: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [pattern, bytes_step]},
        "post_processor": bytes_step,
        "decoder": bytes_step,
        "model": {
            "type": "BPE",
            "vocab": {token: i for token, i in IDS.items() if token not in SPECIAL and token != "<tool>"},
            "merges": [list(pair) for pair in MERGES],
        },
    } | changes
    (directory / "tokenizer.json").write_text(json.dumps(data))
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}} if config is None else config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return HfTokenizerFiles(directory, directory / "tokenizer.json")


def changed(files: HfTokenizerFiles, change: Callable[[dict[str, Any]], object]) -> Tokenizer:
    """The tokenizer of a directory whose tokenizer.json `change` has changed."""
    data = json.loads(files.tokenizer_json.read_text("utf-8"))
    change(data)
    files.tokenizer_json.write_text(json.dumps(data))
    return make(files)


def test_two_vocabularies_are_one_where_no_id_stands_for_another_text(tmp_path: Path) -> None:
    """A draft model of the target's family: the same tokens in another file, with more rows, or with an end left empty."""
    ours, end = make(make_vocabulary()), len(TOKENS)
    unused = make_vocabulary(tokens=(*TOKENS, "[PAD1]", "[PAD2]"), token_types=(*make_vocabulary().token_types, 5, 5))
    other_unused = replace(unused, tokens=(*TOKENS, "[UNUSED]", "[RESERVED]"))
    same = [make(make_vocabulary()), make(make_hf(tmp_path)), make(make_vocabulary(), end + 64), make(unused), make(other_unused)]
    for first in (ours, *same):
        for second in (ours, *same):
            assert first.first_difference(second) is None


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda tokens, types: ([*tokens[:7], tokens[8], tokens[7], *tokens[9:]], types), 7),
        (lambda tokens, types: ([*tokens[:-1], "<|other|>"], [*types[:-1], 3]), len(TOKENS) - 1),
        (
            lambda tokens, types: (
                tokens,
                [4 if token == "<|eot_id|>" else kind for token, kind in zip(tokens, types, strict=True)],
            ),
            None,
        ),
        (lambda tokens, types: (tokens, [1 if kind == 4 else kind for kind in types]), None),
        (lambda tokens, types: (tokens, [3 if kind == 4 else kind for kind in types]), IDS["<tool>"]),
    ],
    ids=["two swapped", "another control token", "control by its name", "spelt otherwise", "text here, control there"],
)
def test_the_first_id_that_stands_for_another_text_is_found(change: Any, where: int | None) -> None:
    vocabulary = make_vocabulary()
    tokens, types = change(list(vocabulary.tokens), list(vocabulary.token_types))
    other = replace(vocabulary, tokens=tuple(tokens), token_types=tuple(types), merges=(), bos_id=None, eos_id=None)
    assert make(vocabulary).first_difference(make(other)) == where
    assert make(other).first_difference(make(vocabulary)) == where


def test_a_hugging_face_directory_gives_the_same_tokenizer(tmp_path: Path) -> None:
    tokenizer = make(make_hf(tmp_path))
    other = BUILT["qwen2"]
    for text in [*TRICKY, CORPUS, "<|im_start|>a <tool> b<|im_end|>"]:
        for parse_special in (False, True):
            ids = tokenizer.encode(text, parse_special=parse_special)
            assert ids == other.encode(text, parse_special=parse_special)
            assert tokenizer.decode(ids, skip_special=False) == other.decode(ids, skip_special=False)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (other.bos_id, other.eos_ids)
    assert not tokenizer.has_chat_template


def test_what_surrounds_a_text_comes_from_the_post_processor_or_the_config(tmp_path: Path) -> None:
    bos, a = IDS["<|endoftext|>"], IDS["a"]
    piece = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [piece, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [bos], "tokens": ["<|endoftext|>"]}},
    }
    assert make(make_hf(tmp_path, post_processor=template)).encode("a") == [bos, a]
    config = {"bos_token": "<|endoftext|>", "tokenizer_class": "LlamaTokenizer", "add_bos_token": False}
    assert make(make_hf(tmp_path, config, post_processor=template)).encode("a") == [a]
    config["add_bos_token"] = True
    assert make(make_hf(tmp_path, config)).encode("a") == [bos, a]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    assert make(make_hf(tmp_path, config)).encode("a") == [a]


def test_ends_and_chat_template_come_from_the_directory(tmp_path: Path) -> None:
    files = make_hf(tmp_path, {"eos_token": "<|im_end|>", "chat_template": [{"name": "default", "template": "config"}]})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [IDS["a"], IDS["<|im_end|>"]]}))
    tokenizer = make(files)
    assert {IDS["a"], IDS["<|im_end|>"]} < tokenizer.eos_ids
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "config"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    assert make(files).apply_chat_template([{"role": "user", "content": "x"}]) == "x<|im_end|>"


def test_a_control_token_may_swallow_white_space(tmp_path: Path) -> None:
    def swallow(data: dict[str, Any]) -> None:
        data["added_tokens"][1]["rstrip"] = data["added_tokens"][0]["lstrip"] = True

    ids = changed(make_hf(tmp_path), swallow).encode("a \n<|im_start|> b<|im_end|> \n c", parse_special=True)
    assert ids == [IDS["a"], IDS["<|im_start|>"], *BUILT["qwen2"].encode(" b"), IDS["<|im_end|>"], IDS["c"]]


def test_only_the_beginning_of_a_text_gets_the_first_space(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<s>": 1, "▁": 2, "a": 3, "▁a": 4, "b": 5, "▁b": 6}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    files = make_hf(
        tmp_path,
        {"bos_token": "<s>"},
        added_tokens=[{"id": 0, "content": "<unk>", **special}, {"id": 1, "content": "<s>", **special}],
        normalizer=None,
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        post_processor=None,
        decoder={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        model={"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": ["▁ a", "▁ b"]},
    )
    tokenizer = make(files)
    assert tokenizer.encode("a<s>b<s> b", parse_special=True) == [4, 1, 5, 1, 6]
    assert tokenizer.encode("<s>a", parse_special=True) == [1, 3]
    assert tokenizer.decode([4, 6]) == "a b"
    assert tokenizer.encode_parts([b"a", 1, b"b b"]) == [4, 1, 5, 6]
    assert tokenizer.encode_parts([b"a b"], continues=True) == [3, 6]
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    normalizer = {"type": "Sequence", "normalizers": steps}
    tokenizer = changed(files, lambda data: data.update(normalizer=normalizer, pre_tokenizer=None))
    assert tokenizer.encode_parts([b"a b"]) == [4, 6]
    assert tokenizer.encode_parts([b"a b"], continues=True) == [3, 6]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    files = make_hf(tmp_path)
    for path in (files.tokenizer_json, tmp_path / "tokenizer_config.json"):
        path.write_bytes(content)
        with pytest.raises(TokenizerError, match=path.name):
            make(files)
    (tmp_path / "tokenizer_config.json").unlink()
    files.tokenizer_json.unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer.json is missing, and so are tokenizer.model, and vocab.json"):
        make(files)


# What a tokenizer.json says and is not obeyed


PADDING = {"direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}


@pytest.mark.parametrize(
    "changes",
    [
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
        {"padding": PADDING | {"strategy": {"Fixed": 64}, "pad_to_multiple_of": None}},
        {"padding": PADDING | {"strategy": {"Fixed": 1 << 62}, "pad_to_multiple_of": None}},
        {"padding": PADDING | {"strategy": "BatchLongest", "pad_to_multiple_of": 1 << 62}},
        {"padding": PADDING | {"strategy": "BatchLongest", "pad_to_multiple_of": 0}},
    ],
)
def test_training_left_truncation_or_padding_and_ids_stay(tmp_path: Path, changes: dict[str, Any]) -> None:
    """As in transformers, which resets both unless a caller asks for them."""
    tokenizer, text = make(make_hf(tmp_path, **changes)), CORPUS[:200]
    assert tokenizer.encode(text) == byte_pair_ids(text, "qwen2", MERGES, IDS)
    assert tokenizer.encode("a") == [IDS["a"]]


@pytest.mark.parametrize("dropout", [0.5, 1.0, -1, "x"])
def test_dropout_is_for_training(tmp_path: Path, dropout: Any) -> None:
    tokenizer = changed(make_hf(tmp_path), lambda data: data["model"].update(dropout=dropout))
    for _ in range(3):
        assert tokenizer.encode(CORPUS) == byte_pair_ids(CORPUS, "qwen2", MERGES, IDS)


UNKNOWN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
SPELLED = {
    "normalizer": SPACES,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": {"type": "Sequence", "decoders": [SPACES | {"pattern": {"String": "▁"}, "content": " "}, {"type": "Fuse"}]},
}


def test_the_token_for_unknown_characters_comes_of_them_alone(tmp_path: Path) -> None:
    """Neither out of its own text, nor so as to end a text."""
    vocab = {"<unk>": 0, "</s>": 1, "a": 2, "▁": 3, "<": 4, "u": 5, "n": 6, "k": 7, ">": 8, "/": 9, "s": 10}
    added = [{"id": i, "content": content, **UNKNOWN} for i, content in enumerate(("<unk>", "</s>"))]
    for unk_token, unknown in (("<unk>", [0]), ("</s>", []), (None, [])):
        model = {"type": "BPE", "unk_token": unk_token, "fuse_unk": True, "ignore_merges": True, "vocab": vocab, "merges": []}
        tokenizer = make(make_hf(tmp_path, {"eos_token": "</s>"}, added_tokens=added, model=model, **SPELLED))
        assert tokenizer.encode("aéé") == [2, *unknown]
        assert tokenizer.encode("<unk>") == [4, 5, 6, 7, 8]
        assert tokenizer.encode("</s>") == [4, 9, 10, 8]
    model["unk_token"] = "<none>"
    with pytest.raises(TokenizerError, match="<none>"):
        make(make_hf(tmp_path, added_tokens=added, model=model, **SPELLED)).encode("é")


def test_older_files_of_metaspace_are_read(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"▁": 0, "a": 1, "▁a": 2}, "merges": ["#version: 0.2", "▁ a"]}
    for prefixed in (True, False):
        step = {"type": "Metaspace", "replacement": "▁", "str_rep": "▁", "add_prefix_space": prefixed}
        parts = SPELLED | {"normalizer": None, "pre_tokenizer": step, "decoder": step, "added_tokens": [], "model": model}
        tokenizer = make(make_hf(tmp_path, **parts))
        assert tokenizer.encode("a a") == [2 if prefixed else 1, 2]
        assert tokenizer.decode(tokenizer.encode("a a")) == "a a"


def test_what_surrounds_a_text_adds_up_over_the_steps(tmp_path: Path) -> None:
    a, start, end = IDS["a"], IDS["<|im_start|>"], IDS["<|im_end|>"]
    steps = [
        {"type": "ByteLevel", "trim_offsets": False},
        {"type": "RobertaProcessing", "cls": ["<|im_start|>", start], "sep": ["<|im_end|>", end], "trim_offsets": True},
        {"type": "Sequence", "processors": [template(["<|eot_id|>", "A"])]},
    ]
    tokenizer = make(make_hf(tmp_path, post_processor={"type": "Sequence", "processors": steps}))
    assert tokenizer.encode("a") == [IDS["<|eot_id|>"], start, a, end]


def template(pieces: list[str], **special: Any) -> dict[str, Any]:
    known = {token: {"id": token, "ids": [IDS[token]], "tokens": [token]} for token in SPECIAL} | special
    kinds = {"A": "Sequence", "B": "Sequence"}
    single = [{kinds.get(piece, "SpecialToken"): {"id": piece, "type_id": 0}} for piece in pieces]
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": known}


# Hostile files


def steps_of(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
TO_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
EVIL = "(?:a+)+[bc](?!x)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "WordLevel", "vocab": {}}}, "wanted BPE"),
        ({"model": {"type": "Unigram", "vocab": [["a", "b"]]}}, "piece 0 is"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0], ["a", 0.0]]}}, "piece 1 is"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 1}, "added_tokens": []}, "unk_id is 1"),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "wanted what pieces inside"),
        (
            {"model": {"type": "WordPiece", "vocab": {}, "continuing_subword_prefix": "#", "max_input_chars_per_word": 1e9}},
            "up to 256",
        ),
        ({"model": {"type": "Unigram", "vocab": [["a" * 2000, 0.0]]}}, "at most 1024"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, "wanted a number"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}}, "share the id 0"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 99_999}, "merges": []}}, "highest id is 99999"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}, "added_tokens": []}, "cannot be used"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": 3}, "added_tokens": []}, "merges is not a list"),
        ({"added_tokens": [{"id": 5}]}, "not a list of tokens"),
        ({"added_tokens": [{"id": 5, "content": "a"}]}, "has the ids"),
        ({"decoder": {"type": "CTC"}}, "wanted ByteLevel"),
        ({"decoder": 3}, "wanted an object"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}}, "cannot be used"),
        ({"pre_tokenizer": {"type": "Nonsense"}}, "cannot be used"),
        ({"normalizer": steps_of("normalizers", *[DOUBLE] * 34)}, "of one; at most"),
        ({"normalizer": DOUBLE | {"pattern": {"Regex": ""}, "content": "a" * 100}}, "of one; at most"),
        ({"pre_tokenizer": steps_of("pretokenizers", *[TO_BYTES] * 34)}, "of one; at most"),
        ({"normalizer": steps_of("normalizers", *[steps_of("normalizers", *[{"type": "NFC"}] * 60)] * 60)}, "more than 64"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 1_000_000}}, "before a text"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA" + "YWFh" * 100}}, "of one; at most"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}}, "damaged"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}, "trie that ends at 4294967299"),
        ({"normalizer": {"type": ["NFC"]}}, "wanted an object with a type"),
        ({"normalizer": DOUBLE | {"content": 3}}, "wanted a text"),
        ({"normalizer": DOUBLE | {"pattern": "a"}}, "wanted a String or a Regex"),
        ({"normalizer": DOUBLE | {"pattern": {"Regex": EVIL}}}, "in the normalizer, the pattern"),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": EVIL}, "behavior": "Isolated"}},
            "in the pre_tokenizer, the pattern",
        ),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "wanted at least 1"),
        ({"decoder": {"type": "Strip", "content": "x", "start": 9, "stop": 9}}, "wanted ByteLevel"),
        ({"post_processor": template(["A", "A"])}, "wanted the text once"),
        ({"post_processor": template(["<|eot_id|>"])}, "leaves the text out"),
        ({"post_processor": template(["A", "x"], x={"ids": [1 << 40]})}, "wanted ids below"),
        ({"post_processor": template(["A", *["x"] * 1000], x={"ids": [0] * 1000})}, "over 1024 tokens"),
        ({"added_tokens": [{"id": 5, "content": "a" * 2000}]}, "at most 1024"),
        ({"added_tokens": [{"id": True, "content": "x"}]}, "wanted a number"),
        ({"added_tokens": [{"id": 1 << 40, "content": "new"}]}, "wanted a number from 0 to"),
        ({"added_tokens": [{"id": 1 << 23, "content": "new"}]}, "highest id"),
        ({"added_tokens": [{"id": len(TOKENS), "content": "x", "lstrip": "no"}]}, "wanted true or false"),
        ({"added_tokens": [{"id": len(TOKENS), "content": "<|\ud800|>", "special": True}]}, "not Unicode"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "continuing_subword_prefix": "é"}}, "continuing_subword_prefix is 'é'"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "end_of_word_suffix": "</w>"}}, "end_of_word_suffix is"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "fuse_unk": 1}}, "wanted true or false"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "unk_token": ["a"]}}, "wanted a text"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}, "added_tokens": []}, "wanted two pieces"),
        *(
            (changes, "")
            for changes in (
                {"model": {"type": SHOUT}},
                {"model": {"type": "BPE", "vocab": {SHOUT: -1}}},
                {"model": {"type": "BPE", "vocab": {SHOUT: 0, SHOUT + "y": 0}}},
                {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [[SHOUT, "a"]]}, "added_tokens": []},
                {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [SHOUT]}, "added_tokens": []},
                {"model": {"type": "BPE", "vocab": {"a": 0}, "unk_token": {SHOUT: [[[SHOUT[:1000]] * 9] * 9] * 9}}},
                {"added_tokens": [{"id": 1, "content": SHOUT[:1000]}]},
                {"added_tokens": [{"id": SHOUT, "content": "x"}]},
                {"normalizer": {"type": SHOUT}},
                {"normalizer": {"type": "Strip", "strip_left": SHOUT, "strip_right": True}},
                {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(" + SHOUT[:9]}, "behavior": "Isolated"}},
                {"pre_tokenizer": {"type": "Punctuation", "behavior": SHOUT}},
                {"decoder": {"type": SHOUT}},
                {"post_processor": {"type": SHOUT}},
                {"post_processor": template([SHOUT, "A"])},
            )
        ),
    ],
)
def test_a_tokenizer_json_that_is_damaged_is_refused_in_few_words_before_it_meets_a_text(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        make(make_hf(tmp_path, **changes))
    text = str(caught.value).replace(str(tmp_path), "")
    assert text.isprintable()
    assert len(text) < 500


def test_a_text_grows_into_so_many_characters_at_most(tmp_path: Path, monkeypatch) -> None:
    """And an ordinary file's text may have any length."""
    monkeypatch.setattr(hf_vocabulary, "_MOST_GROWN", 10_000)
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 15}
    tokenizer = make(make_hf(tmp_path, normalizer=grow))
    assert tokenizer.encode("a" * 100) == byte_pair_ids("b" * 1500, "qwen2", MERGES, IDS)
    with pytest.raises(TokenizerError, match="may make 60 of each"):
        tokenizer.encode("a" * 1000)
    assert len(make(make_hf(tmp_path)).encode("1" * 20_000)) == 20_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", {"eos_token_id": [[1], {}, True, 1.0, "x", None, 1 << 80, IDS["a"]]}, None),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>", "bos_token": "", "tokenizer_class": ["x"], "add_bos_token": 1}, None),
        ("tokenizer_config.json", {"eos_token": "\ud800"}, "not Unicode"),
        ("tokenizer_config.json", {"chat_template": "\udfff"}, "not Unicode"),
        ("special_tokens_map.json", {"pad_token": {"content": "\ud800"}}, "not Unicode"),
    ],
)
def test_odd_values_in_the_side_files(tmp_path: Path, name: str, content: dict[str, Any], message: str | None) -> None:
    files = make_hf(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    if message:
        with pytest.raises(TokenizerError, match=message):
            make(files)
    else:
        assert make(files).eos_ids == {IDS[token] for token in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")} | (
            {IDS["a"]} if name == "generation_config.json" else set()
        )


# Work


def test_the_longest_control_token_is_found_among_thousands_of_long_ones() -> None:
    names = [f"<|{'x' * (number % 900)}{number}|>" for number in range(5000)]
    tokens, types = (*TOKENS, *names, "<|"), (*make_vocabulary().token_types, *[3] * (len(names) + 1))
    tokenizer = make(make_vocabulary(tokens=tokens, token_types=types))
    ids = {token: i for i, token in enumerate(tokens)}
    text = "".join(f"a{name}{name[:-1]}" for name in names[::50])
    expected = [i for name in names[::50] for i in (IDS["a"], ids[name], ids["<|"], *tokenizer.encode(name[2:-1]))]
    assert tokenizer.encode(text, parse_special=True) == expected
    with pytest.raises(TokenizerError, match="at most 1024"):
        make(make_vocabulary(tokens=(*TOKENS, "<|" + "x" * 2000 + "|>"), token_types=(*make_vocabulary().token_types, 3)))


@pytest.mark.parametrize("unit", ["a", "ab", "thering"])
def test_merging_takes_n_log_n_steps(unit: str) -> None:
    """A text without spaces is one word; each merge looks at its two neighbours."""
    looked = 0
    pieces = {piece: -len(piece) for n in range(1, 40) for piece in (*unit, (unit * n)[:n])}

    def rank(left: str, right: str) -> float | None:
        nonlocal looked
        looked += 1
        return pieces.get(left + right)

    pairs = byte_pairs.BytePairs(dict(zip(pieces, itertools.count())), rank, whole_words=False)
    steps = []
    for length in (2000, 8000):
        looked = 0
        pairs.encode((unit * length)[:length])
        steps.append(looked)
    assert steps[1] < 5 * steps[0] < 100 * 2000


def test_sentencepiece_prefers_the_leftmost_of_equal_scores() -> None:
    tokens = ("<unk>", "a", "b", "ab", "ba", "▁")
    scores = (0.0, -9.0, -9.0, -1.0, -1.0, -9.0)
    vocabulary = replace(SENTENCEPIECE, tokens=tokens, token_types=(2, *[1] * 5), scores=scores, bos_id=None, eos_id=None)
    tokenizer = make(replace(vocabulary, add_bos=False, add_space_prefix=False))
    assert tokenizer.encode("ababa") == [3, 3, 1]
    assert tokenizer.encode("baba") == [4, 4]
    assert tokenizer.encode("aééb") == [1, 0, 2]


@settings(max_examples=60)
@given(st.text("the▁ ring", max_size=30))
def test_sentencepiece_merges_across_words_where_a_piece_does(text: str) -> None:
    """Words are merged one by one only where no piece spans two."""
    assert ACROSS.encode(text, add_special=False) == sentencepiece_ids(text, ACROSS_PIECES)


ACROSS_PIECES = [*(piece for piece in PIECES if piece[0] != "▁▁"), ("g▁t", 1, 5.0), ("e▁", 1, 4.0), ("▁▁", 1, 3.0)]
ACROSS = make(
    replace(
        SENTENCEPIECE,
        tokens=tuple(piece for piece, _, _ in ACROSS_PIECES),
        token_types=tuple(kind for _, kind, _ in ACROSS_PIECES),
        scores=tuple(score for _, _, score in ACROSS_PIECES),
    )
)


# Files of a Hugging Face directory beside tokenizer.json, and older ones instead of it


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    "place", ["added_tokens_decoder", "added_tokens.json", "extra_special_tokens", "additional_special_tokens"]
)
def test_tokens_that_only_another_file_names_are_known(tmp_path: Path, place: str, special: bool) -> None:
    """Where the ids do not say so they come behind the others; a token beyond the model's rows is left out."""
    end, config = len(TOKENS), {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    if place == "added_tokens_decoder":
        config |= {place: {str(end): {"content": "[new]", "special": special}, "5000": {"content": "[far]", "special": special}}}
    elif place == "added_tokens.json":
        (tmp_path / place).write_text(json.dumps({"[new]": end, "[far]": 5000}))
        special = False
    else:
        config |= {place: ["[new]"] if special else {"name": "[new]"}}
        special = True
    tokenizer = make(make_hf(tmp_path, config))
    assert tokenizer.encode("a[new]b", parse_special=True) == [IDS["a"], end, IDS["b"]]
    assert (tokenizer.encode("a[new]b") == [IDS["a"], end, IDS["b"]]) == (not special)
    assert tokenizer.is_special(end) == special
    assert tokenizer.decode([end]) == ("" if special else "[new]")
    with pytest.raises(TokenizerError, match="outside of the vocabulary"):
        tokenizer.decode([5000])


def test_added_tokens_beyond_the_model_s_rows_are_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = make_hf(tmp_path)
    tokenizer = make(files, vocab_size=IDS["<tool>"])
    assert "1 added tokens are beyond the model's" in caplog.text
    assert tokenizer.decode(tokenizer.encode("a<tool>")) == "a<tool>"
    with pytest.raises(TokenizerError, match="the model rows for 300"):
        make(files, vocab_size=300)


def test_a_token_that_another_file_calls_special_becomes_so(tmp_path: Path) -> None:
    tokenizer = make(make_hf(tmp_path, {"eos_token": "<|im_end|>", "extra_special_tokens": ["<tool>"]}))
    assert tokenizer.is_special(IDS["<tool>"])
    assert IDS["<tool>"] not in tokenizer.encode("<tool>")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "text_config"])
def test_ends_are_listed_by_the_model_s_files(tmp_path: Path, name: str) -> None:
    listed: dict[str, Any] = {"eos_token_id": [IDS["a"], IDS["b"], 1 << 40]}
    files = make_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": listed} if name == "text_config" else listed))
    if name == "generation_config.json":
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": IDS["c"]}))
        (tmp_path / name).write_text(json.dumps(listed))
    tokenizer = make(files)
    assert {IDS["a"], IDS["b"]} < tokenizer.eos_ids
    assert IDS["c"] not in tokenizer.eos_ids


def test_an_end_in_the_plain_vocabulary_ends_an_answer_and_is_no_text(tmp_path: Path) -> None:
    tokenizer = changed(make_hf(tmp_path), lambda data: data["model"]["vocab"].update({"<end_of_turn>": len(TOKENS)}))
    assert len(TOKENS) in tokenizer.eos_ids
    assert tokenizer.decode(tokenizer.encode("<end_of_turn>")) == "<end_of_turn>"
    assert tokenizer.encode("<end_of_turn>", parse_special=True) == [len(TOKENS)]


@pytest.mark.parametrize(
    ("files_of_templates", "config", "plain", "with_tools"),
    [
        ({}, "", None, None),
        ({}, [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}], "a", "b"),
        ({}, [{"name": "tool_use", "template": "b"}, {"name": "rag", "template": "c"}], "b", "b"),
        ({}, {"rag": "c"}, "c", "c"),
        ({"chat_template.jinja": "d"}, "a", "d", "d"),
        ({"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "e"}, "a", "d", "e"),
        ({"chat_template.jinja": ""}, "a", None, None),
    ],
)
def test_chat_templates_come_from_files_or_settings_by_name(
    tmp_path: Path, files_of_templates: dict[str, str], config: Any, plain: str | None, with_tools: str | None
) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in files_of_templates.items():
        (tmp_path / name).write_text(text)
    tokenizer = make(make_hf(tmp_path, {"eos_token": "<|im_end|>", "chat_template": config}))
    assert (tokenizer.chat_template, tokenizer.chat_template_for({"tools": [1]})) == (plain, with_tools)


def test_vocab_json_and_merges_txt_are_read_where_other_files_say_how_text_is_split(tmp_path: Path) -> None:
    files = make_hf(tmp_path, {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": "a"})
    data = json.loads(files.tokenizer_json.read_text("utf-8"))
    tokenizer, plain = make(files), data["model"]["vocab"]
    files.tokenizer_json.unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(plain))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in MERGES), "utf-8")
    (tmp_path / "added_tokens.json").write_text(json.dumps({token: IDS[token] for token in (*SPECIAL, "<tool>")}))
    again = make(files)
    for text in [*TRICKY, CORPUS]:
        assert again.encode(text, parse_special=True) == tokenizer.encode(text, parse_special=True)
        assert again.encode(text) == tokenizer.encode(text)
    assert (again.eos_ids, again.chat_template) == (tokenizer.eos_ids, "a")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OtherTokenizer"}))
    with pytest.raises(TokenizerError, match="of 'OtherTokenizer', which do not say how text is split"):
        make(files)


def sentencepiece_model(pieces: list[tuple[str, int, float]], kind: int, merges_spaces: bool = False) -> bytes:
    """A tokenizer.model with the fields of sentencepiece_model.proto."""

    def number(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + number(value >> 7)

    def text(field: int, value: bytes) -> bytes:
        return number(field << 3 | 2) + number(len(value)) + value

    listed = b"".join(
        text(1, text(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + number(of)) for piece, of, score in pieces
    )
    return listed + text(2, b"\x18" + number(kind)) + text(3, b"\x20" + number(merges_spaces))


def test_a_directory_with_only_a_sentencepiece_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(PIECES, kind=2))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": "a"}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": len(PIECES)}))
    files = HfTokenizerFiles(tmp_path, tmp_path / "tokenizer.json")
    tokenizer = make(files)
    for text in ("the ring", " there  is", "é中", "<tool> a"):
        assert tokenizer.encode(text) == SPM.encode(text)
    assert tokenizer.eos_ids == {2, len(PIECES)}
    assert tokenizer.chat_template == "a"
    for damaged in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"", b"\x0a\x02\x0a\x40", sentencepiece_model(PIECES, kind=3)):
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(TokenizerError, match="is not a SentencePiece model"):
            make(files)


# Unigram and WordPiece

UNIGRAM = [
    ("<pad>", 3, 0.0), ("</s>", 3, 0.0), ("<unk>", 2, 0.0), ("▁", 1, -2.0), ("▁the", 1, -3.0), ("th", 1, -4.0), ("e", 1, -4.5),
    ("▁th", 1, -4.2), ("re", 1, -4.1), ("r", 1, -5.0), ("▁there", 1, -9.5), ("in", 1, -3.5), ("g", 1, -5.5), ("<tool>", 4, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("source", ["GGUF", "tokenizer.json", "tokenizer.model"])
def test_unigram_finds_the_most_likely_pieces(tmp_path: Path, source: str) -> None:
    tokens = tuple(piece for piece, _, _ in UNIGRAM)
    if source == "GGUF":
        vocabulary: Any = GgufVocabulary(
            model="t5", pre="", tokens=tokens, token_types=tuple(kind for _, kind, _ in UNIGRAM),
            scores=tuple(score for _, _, score in UNIGRAM), add_space_prefix=True, merges_spaces=True,
        )  # fmt: skip
    elif source == "tokenizer.model":
        (tmp_path / source).write_bytes(sentencepiece_model(UNIGRAM, kind=1, merges_spaces=True))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))
        vocabulary = HfTokenizerFiles(tmp_path, tmp_path / "tokenizer.json")
    else:
        metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
        vocabulary = make_hf(
            tmp_path,
            {"eos_token": "</s>"},
            added_tokens=[
                {"id": i, "content": piece, "special": kind != 4} for i, (piece, kind, _) in enumerate(UNIGRAM) if kind != 1
            ],
            normalizer={"type": "Sequence", "normalizers": [
                {"type": "Strip", "strip_left": True, "strip_right": True},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            ]},
            pre_tokenizer=metaspace,
            post_processor={"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "</s>", "type_id": 0}}], "special_tokens": {"</s>": {"id": "</s>", "ids": [1]}}},
            decoder=metaspace,
            model={"type": "Unigram", "unk_id": 2, "vocab": [[piece, score] for piece, _, score in UNIGRAM]},
        )  # fmt: skip
    tokenizer = make(vocabulary)
    for text in ("there", "the  there ring", "in the thing", "er e g"):
        ids = tokenizer.encode(text, add_special=False)
        assert [tokens[i] for i in ids] == unigram_pieces(text, UNIGRAM)
        assert tokenizer.decode(ids) == " ".join(text.split())
    assert [tokens[i] for i in tokenizer.encode("the中中<tool>")] == ["▁the", "<unk>", "<tool>", "</s>"]
    assert not {0, 1} & set(tokenizer.encode("<pad></s>", add_special=False))
    assert tokenizer.eos_ids == {1}


@pytest.mark.parametrize("source", ["GGUF", "tokenizer.json"])
def test_word_piece_takes_the_longest_piece_from_the_left(tmp_path: Path, source: str) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    pieces = ["un", "##aff", "##able", "##a", "cafe", ",", "the", "##s", "中"]
    if source == "GGUF":
        spaced = [piece[2:] if piece.startswith("##") else f"▁{piece}" for piece in pieces]
        tokens, types = (*special, *spaced), (*[3] * len(special), *[1] * len(pieces))
        vocabulary: Any = GgufVocabulary(model="bert", pre="", tokens=tokens, token_types=types, bos_id=2, sep_id=3, unk_id=1)
    else:
        cls, sep = [{"SpecialToken": {"id": token, "type_id": 0}} for token in ("[CLS]", "[SEP]")]
        vocabulary = make_hf(
            tmp_path,
            {},
            added_tokens=[{"id": i, "content": token, "special": True} for i, token in enumerate(special)],
            normalizer={"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
            pre_tokenizer={"type": "BertPreTokenizer"},
            post_processor={"type": "TemplateProcessing", "single": [cls, {"Sequence": {"id": "A", "type_id": 0}}, sep],
                "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2]}, "[SEP]": {"id": "[SEP]", "ids": [3]}}},
            decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
            model={"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
                "vocab": {piece: i for i, piece in enumerate([*special, *pieces])}},
        )  # fmt: skip
    tokenizer = make(vocabulary)
    names = [*special, *pieces]
    assert [names[i] for i in tokenizer.encode("Unaffable Café, thes 中中x")] == [
        *("[CLS]", "un", "##aff", "##able", "cafe", ",", "the", "##s", "中", "中", "[UNK]", "[SEP]"),
    ]
    assert tokenizer.decode(tokenizer.encode("unaffable the")) == "unaffable the"
    assert not {0, 2, 3} & set(tokenizer.encode("[CLS] [SEP] [PAD]", add_special=False))


# Text that goes on


def test_an_answer_that_goes_on_from_text_keeps_its_first_space_and_a_new_text_does_not() -> None:
    prompt, answer = SPM.encode("a the"), [PIECE_IDS["▁the"], PIECE_IDS["re"]]
    for after, text in ((None, "there"), (prompt[-1], " there"), (SPM.bos_id, "there"), (2, "there")):
        decoder = SPM.stream(after=after)
        assert "".join(map(decoder.push, answer)) + decoder.finish() == text
    assert "a the" + "".join(map(SPM.stream(after=prompt[-1]).push, answer)) == SPM.decode([*prompt, *answer])


def test_digits_in_threes_from_the_right_take_time_by_their_number() -> None:
    for pre, text, parts in (
        ("superbpe", "x1234567y", ["1", "234", "567"]),
        ("afmoe", "12345", ["12", "345"]),
        ("tiny_aya", "1234567 x", ["1", "234", "567"]),
        ("tiny_aya", "1234567x", ["123", "456", "7"]),
    ):
        groups = sorted({part for part in parts if len(part) == 3})
        pairs = [merge for group in groups for merge in (f"{group[0]} {group[1]}", f"{group[:2]} {group[2]}")]
        more = tuple(dict.fromkeys(token for group in groups for token in (group[:2], group) if token not in TOKENS))
        pairs += ["1 2"] * ("12" in parts and "1 2" not in pairs)
        more += ("12",) * ("12" in parts and "12" not in (*TOKENS, *more))
        types = (*make_vocabulary().token_types, *[1] * len(more))
        tokenizer = make(make_vocabulary(pre, tokens=(*TOKENS, *more), token_types=types, merges=tuple(pairs)))
        assert [part for part in visible(tokenizer, tokenizer.encode(text)) if part.isdigit()] == parts
        assert len(tokenizer.encode("1" * 200_000)) > 1000

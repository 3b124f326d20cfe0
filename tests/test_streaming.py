from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuspec import LLM, SamplingParams
from cpuspec.checkpoints.checkpoint import GgufVocabulary
from cpuspec.text import Tokenizer, make_tokenizer
from tests.toys import ToyBackend


def make(model: str, normal: list[str]) -> Tokenizer:
    """Tokens 0-255 are the bytes, 256 and 257 control tokens, then `normal`, one user-defined token, one without a text."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    if model == "gpt2":
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in shown]
        byte_tokens = [chr(byte) if byte in shown else chr(0x100 + hidden.index(byte)) for byte in range(256)]
    tokens = (*byte_tokens, "<|im_start|>", "<|im_end|>", *normal, "<tool>")
    vocabulary = GgufVocabulary(
        model=model,
        pre="smollm",
        tokens=tokens,
        token_types=(*[6 if model == "llama" else 1] * 256, 3, 3, *[1] * len(normal), 4),
        merges=(),
        scores=(0.0,) * len(tokens),
        bos_id=256,
        eos_id=257,
        unk_id=None,
        pad_id=None,
        add_bos=False,
        add_eos=False,
        add_space_prefix=model == "llama",
    )
    config = SimpleNamespace(vocab_size=len(tokens) + 1)
    checkpoint: Any = SimpleNamespace(vocabulary=vocabulary, config=config, path=Path("m.gguf"))
    return make_tokenizer(checkpoint)


BYTE_LEVEL = make("gpt2", ["Ġthe", "ĠðŁ", "ä¸Ń", "ĉĉ", "ab"])
SENTENCEPIECE = make("llama", ["▁the", "▁", "中", "ab", "▁▁"])
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
# Bytes that begin and continue characters are as likely as all the others together.
SOME_ID = st.integers(0, 263) | st.sampled_from([*"é中😀".encode(), 0xC0, 0xED, 0xA0, 0xF4, 0xFF, 0x20, 256, 258, 259, 262])


@BOTH
@settings(max_examples=300)
@given(ids=st.lists(SOME_ID, max_size=30), skip_special=st.booleans())
def test_pieces_join_to_the_whole_text(tokenizer: Tokenizer, ids: list[int], skip_special: bool) -> None:
    stream = tokenizer.stream(skip_special)
    pieces = [stream.push(i) for i in ids]
    pieces.append(stream.finish())
    assert "".join(pieces) == tokenizer.decode(ids, skip_special)
    names = {256: b"<|im_start|>", 257: b"<|im_end|>"}
    data = b"".join(b"" if skip_special and i in names else names.get(i) or tokenizer.token_bytes(i) for i in ids)
    if tokenizer is SENTENCEPIECE:
        data = data.removeprefix(b" ")  # the encoder put it there
    assert "".join(pieces) == data.decode("utf-8", "replace")


@BOTH
@given(text=st.text(max_size=20))
def test_valid_text_streams_without_replacement_characters(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.stream()
    out = ""
    for byte in text.encode():
        out += stream.push(byte)
        assert "\N{REPLACEMENT CHARACTER}" not in out or "\N{REPLACEMENT CHARACTER}" in text
    assert stream.finish() == ""
    assert out == (text.removeprefix(" ") if tokenizer is SENTENCEPIECE else text)


def test_a_character_appears_with_its_last_byte() -> None:
    stream = BYTE_LEVEL.stream()
    assert [stream.push(byte) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert stream.finish() == ""


def test_a_character_that_breaks_off_becomes_one_replacement_character() -> None:
    stream = BYTE_LEVEL.stream()
    assert [stream.push(byte) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert stream.push(ord("x")) == "\N{REPLACEMENT CHARACTER}x"
    assert stream.push(0xE4) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""


def test_a_character_may_go_on_behind_a_skipped_control_token() -> None:
    first, second = "é".encode()
    stream = BYTE_LEVEL.stream()
    assert [stream.push(i) for i in (first, 257, second)] == ["", "", "é"]
    assert BYTE_LEVEL.decode([first, 257, second]) == "é"


def test_only_the_first_space_of_a_sentencepiece_text_is_dropped() -> None:
    the, space, _, _, spaces = range(258, 263)
    assert SENTENCEPIECE.decode([256, the, the]) == "the the"
    assert SENTENCEPIECE.decode([spaces, the]) == "  the"
    assert SENTENCEPIECE.decode([space, space]) == " "
    assert BYTE_LEVEL.decode([258, 258]) == " the the"


@pytest.mark.parametrize("prompt", [[97], [257], [97, 256, 98], [97, 257]])
@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_behind_text_keeps_its_first_space(prompt: list[int], streams: bool) -> None:
    """A raw completion of "All about" goes on with " the", and not with "the"; behind a control token a new text begins."""
    the, params = 258, SamplingParams(max_tokens=3, logit_bias={258: 1000.0})
    with LLM.from_backend(ToyBackend(1, vocab_size=SENTENCEPIECE.vocab_size), SENTENCEPIECE) as llm:  # type: ignore[arg-type]
        parts = [one.text for one in llm.stream(prompt, params)] if streams else [llm.generate([prompt], params)[0].text]
    assert SENTENCEPIECE.token_bytes(the) == b" the"
    assert "".join(parts) == ("the the the" if prompt[-1] in (256, 257) else " the the the")

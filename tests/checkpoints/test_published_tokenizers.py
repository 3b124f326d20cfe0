"""Tokenizers as published files have them: headers of converters other than ours, and whole vocabularies where they are at hand.

Each row of FILES is what a published GGUF file says of its special tokens, without the rest of its vocabulary. What is expected is
what llama.cpp b11434 makes of the file, with three differences: `</s>` where a file calls it text, Ollama's list of ends, and token
11 where a file names no BOS or EOS, which is an ordinary word in most of them.
"""

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpuspec.checkpoints.gguf import read_vocabulary
from cpuspec.checkpoints.gguf_file import read_gguf
from cpuspec.checkpoints.gguf_writer import entry
from cpuspec.errors import TokenizerError
from cpuspec.text import Tokenizer, make_tokenizer

NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4
LETTERS = [*"abcdefghijklmnopqrstuvwxyz ", "▁", "Ġ", "▁hi", "▁h"]


@dataclass(frozen=True)
class File:
    """tokens: control tokens by default, of another type where that is given as (text, type). keys: of tokenizer.ggml, with texts
    for ids. before, behind: what is put around a text. ends: what ends an answer.
    """

    model: str
    pre: str
    tokens: tuple[str | tuple[str, int], ...]
    keys: dict[str, Any] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()


LLAMA_3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
LLAMA_3_IDS = {"bos_token_id": "<|begin_of_text|>", "eos_token_id": "<|eot_id|>"}
SPM = (("<unk>", UNKNOWN), "<s>", "</s>")
SPM_IDS = {"bos_token_id": "<s>", "eos_token_id": "</s>", "unknown_token_id": "<unk>"}
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_IDS = {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>", "padding_token_id": "<|endoftext|>"}
GEMMA = ("<pad>", "<eos>", "<bos>", ("<unk>", UNKNOWN), ("</s>", NORMAL))
GEMMA_IDS = {"bos_token_id": "<bos>", "eos_token_id": "<eos>", "unknown_token_id": "<unk>", "padding_token_id": "<pad>"}
HARMONY = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("<｜User｜>", USER))
DEEPSEEK_IDS = {"bos_token_id": DEEPSEEK[0], "eos_token_id": DEEPSEEK[1]}
CODE_ENDS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")

FILES = {
    "Llama 3.2": File("gpt2", "llama-bpe", LLAMA_3, LLAMA_3_IDS, LLAMA_3[:1], ends=LLAMA_3[1:]),
    "Llama 3 of an old converter": File("gpt2", "llama-v3", LLAMA_3, LLAMA_3_IDS, LLAMA_3[:1], ends=LLAMA_3[1:]),
    "Llama 3.1 of Ollama": File(
        "gpt2", "llama-bpe", (*LLAMA_3, "<|python_tag|>"), {**LLAMA_3_IDS, "eos_token_ids": ["<|eot_id|>", "<|python_tag|>"]},
        LLAMA_3[:1], ends=(*LLAMA_3[1:], "<|python_tag|>"),
    ),
    "Llama 3, BOS refused": File("gpt2", "llama-bpe", LLAMA_3, {**LLAMA_3_IDS, "add_bos_token": False}, ends=LLAMA_3[1:]),
    "Llama 3 with eom by key": File(
        "gpt2", "llama-bpe", (*LLAMA_3, "<|x|>"), {**LLAMA_3_IDS, "eom_token_id": "<|x|>"}, LLAMA_3[:1],
        ends=(*LLAMA_3[1:], "<|x|>"),
    ),
    "Llama 4": File("gpt2", "llama4", ("<|begin_of_text|>", "<|eot|>"), {"bos_token_id": "<|begin_of_text|>"}, ends=("<|eot|>",)),
    "Llama 2": File("llama", "", SPM, SPM_IDS, ("<s>",), ends=("</s>",)),
    "Llama 2 without any ids": File("llama", "", SPM, {}, ("<s>",), ends=("</s>",)),
    "Llama 2, ids out of range": File(
        "llama", "default", SPM, {"bos_token_id": 70_000, "eos_token_id": -1}, ("<s>",), ends=("</s>",)
    ),
    "Mistral 7B v0.3": File("llama", "default", (*SPM, "[INST]", "[/INST]"), SPM_IDS, ("<s>",), ends=("</s>",)),
    "Mistral Nemo": File("gpt2", "tekken", SPM, SPM_IDS, ("<s>",), ends=("</s>",)),
    "Pixtral": File("gpt2", "pixtral", (*SPM, "[IMG]"), SPM_IDS, ("<s>",), ends=("</s>",)),
    "Qwen 2.5 Coder": File("gpt2", "qwen2", (*QWEN, *CODE_ENDS), QWEN_IDS, ends=("<|endoftext|>", "<|im_end|>", *CODE_ENDS)),
    "Qwen 3.5": File("gpt2", "qwen35", QWEN, QWEN_IDS, ends=("<|endoftext|>", "<|im_end|>")),
    "gpt-oss": File(
        "gpt2", "gpt-4o", HARMONY, {"bos_token_id": HARMONY[0], "eos_token_id": "<|return|>"}, ends=HARMONY[1:4], shown=HARMONY[5:]
    ),
    "Solar Open": File("gpt2", "solar-open", ("<|end|>", "<|calls|>", "<|flush|>"), ends=("<|calls|>", "<|flush|>")),
    "Phi-4 mini": File("gpt2", "gpt-4o", ("<|endoftext|>", "<|end|>"), ends=("<|endoftext|>", "<|end|>")),
    "Phi-3.5": File(
        "llama", "default", (("<unk>", CONTROL), "<s>", ("</s>", USER), "<|endoftext|>", "<|end|>"),
        {"bos_token_id": "<s>", "eos_token_id": "<|endoftext|>"}, ("<s>",), ends=("<|endoftext|>", "<|end|>"),
    ),
    "Gemma 2": File(
        "llama", "default", (*GEMMA, ("<end_of_turn>", NORMAL)), {**GEMMA_IDS, "add_space_prefix": False}, ("<bos>",),
        ends=("<eos>", "<end_of_turn>"),
    ),
    "Gemma 3": File(
        "llama", "default", (*GEMMA, ("<end_of_turn>", USER)), {**GEMMA_IDS, "eot_token_id": "<end_of_turn>"}, ("<bos>",),
        ends=("<eos>", "<end_of_turn>"),
    ),
    "Gemma 4, which says no BOS by mistake": File(
        "gemma4", "", (*GEMMA, ("<turn|>", USER), ("<|tool_response>", USER)), {**GEMMA_IDS, "add_bos_token": False}, ("<bos>",),
        ends=("<eos>", "<turn|>", "<|tool_response>"),
    ),
    "DeepSeek V3": File("gpt2", "deepseek-v3", DEEPSEEK, {**DEEPSEEK_IDS, "add_bos_token": True}, DEEPSEEK[:1], ends=DEEPSEEK[1:2]),
    "DeepSeek R1 Qwen": File("gpt2", "deepseek-r1-qwen", DEEPSEEK, DEEPSEEK_IDS, ends=DEEPSEEK[1:2]),
    "DeepSeek LLM": File("gpt2", "deepseek-llm", DEEPSEEK, {**DEEPSEEK_IDS, "add_bos_token": False}, ends=DEEPSEEK[1:2]),
    "GLM-4": File(
        "gpt2", "glm4", ("<|endoftext|>", "[gMASK]", "<|user|>"), {"eos_token_id": "<|endoftext|>", "eot_token_id": "<|user|>"},
        ends=("<|endoftext|>", "<|user|>"),
    ),
    "SmolLM2": File("gpt2", "smollm", QWEN, QWEN_IDS, ends=("<|endoftext|>", "<|im_end|>")),
    "SmolVLM": File(
        "gpt2", "smollm", ("<|im_start|>", ("<end_of_utterance>", NORMAL)), {"bos_token_id": "<|im_start|>"},
        ends=("<end_of_utterance>",),
    ),
    "StarCoder2": File(
        "gpt2", "starcoder", ("<|endoftext|>", "<fim_pad>", "<reponame>"), {"eos_token_id": "<|endoftext|>"},
        ends=("<|endoftext|>", "<fim_pad>", "<reponame>"),
    ),
    "Falcon 3, no BOS token": File("gpt2", "falcon3", QWEN[:1], {"eos_token_id": "<|endoftext|>"}, ends=QWEN[:1]),
    "LFM2": File(
        "gpt2", "lfm2", ("<|startoftext|>", "<|im_end|>"), {"bos_token_id": "<|startoftext|>", "eos_token_id": "<|im_end|>"},
        ("<|startoftext|>",), ends=("<|im_end|>",),
    ),
    "Granite 4": File("gpt2", "dbrx", ("<|end_of_text|>",), {"bos_token_id": "<|end_of_text|>"}, ends=("<|end_of_text|>",)),
    "Command R": File(
        "gpt2", "command-r", ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
        {"bos_token_id": "<BOS_TOKEN>", "eos_token_id": "<|END_OF_TURN_TOKEN|>", "add_bos_token": True},
        ("<BOS_TOKEN>",), ends=("<|END_OF_TURN_TOKEN|>",),
    ),
    "Kimi K2": File(
        "gpt2", "kimi-k2", ("[BOS]", ("[EOS]", NORMAL), ("[EOT]", USER), "<|im_end|>"), {"bos_token_id": "[BOS]"},
        ends=("[EOS]", "[EOT]", "<|im_end|>"),
    ),
    "MiniMax M2": File("gpt2", "minimax-m2", (("[e~[", NORMAL),), ends=("[e~[",)),
    "CodeLlama": File("llama", "", (*SPM, ("<EOT>", NORMAL)), SPM_IDS, ("<s>",), ends=("</s>", "<EOT>")),
    "Flan T5": File("t5", "", ("<pad>", "</s>", ("<unk>", UNKNOWN)), {}, behind=("</s>",), ends=("</s>",)),
    "bge": File(
        "bert", "", ("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
        {"unknown_token_id": "[UNK]", "cls_token_id": "[CLS]", "seperator_token_id": "[SEP]"}, ("[CLS]",), ("[SEP]",),
        ends=("[PAD]",),
    ),
}  # fmt: skip


def write(path: Path, file: File, **more: Any) -> Path:
    """A header of the file's special tokens and some letters, without weights."""
    special = [one if isinstance(one, tuple) else (one, CONTROL) for one in file.tokens]
    tokens = [*(text for text, _ in special), *LETTERS]
    ids = {text: number for number, text in enumerate(tokens)}
    types = [*(kind for _, kind in special), *[NORMAL] * len(LETTERS)]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": file.model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": ["▁ h"] if file.model == "gemma4" else [],
        "tokenizer.ggml.scores": np.array([-float(number) for number in range(len(tokens))], np.float32),
    }
    if file.pre:
        metadata["tokenizer.ggml.pre"] = file.pre
    for key, value in file.keys.items():
        listed = np.array([ids[text] for text in value], np.int32) if isinstance(value, list) else None
        metadata[f"tokenizer.ggml.{key}"] = listed if listed is not None else ids[value] if isinstance(value, str) else value
    metadata |= more
    entries = b"".join(entry(key, value) for key, value in metadata.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + entries)
    return path


def read(path: Path) -> Tokenizer:
    vocabulary = read_vocabulary(read_gguf(path))
    checkpoint: Any = SimpleNamespace(vocabulary=vocabulary, config=SimpleNamespace(vocab_size=len(vocabulary.tokens)), path=path)
    return make_tokenizer(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_special_tokens_of_a_published_file_are_what_they_are_to_llama_cpp(name: str, tmp_path: Path) -> None:
    file = FILES[name]
    tokenizer = read(write(tmp_path / "m.gguf", file))
    ids = {one if isinstance(one, str) else one[0]: number for number, one in enumerate(file.tokens)}
    assert tokenizer.encode("") == [ids[text] for text in (*file.before, *file.behind)]
    assert tokenizer.eos_ids == {ids[text] for text in file.ends}
    assert tokenizer.decode([ids[text] for text in file.shown]) == "".join(file.shown)
    for text in file.ends:
        # Never out of a user's text, whatever type the file gives it; and where a raw prompt asks for it.
        assert ids[text] not in tokenizer.encode(f"hi {text}", add_special=False)
        assert tokenizer.encode(text, add_special=False, parse_special=True) == [ids[text]]
        assert tokenizer.decode([ids[text]]) == ""


@pytest.mark.parametrize(
    ("keys", "plain", "with_tools", "with_documents"),
    [
        ({"": ""}, None, None, None),
        ({"": "a", ".tool_use": "b", ".rag": "c"}, "a", "b", "c"),
        ({".tool_use": "b", ".rag": "c"}, "b", "b", "c"),
        ({".other": "d"}, "d", "d", "d"),
        ({"": "a", ".tool_use": ""}, "a", "a", "a"),
    ],
)
def test_chat_templates_have_names_and_an_empty_one_is_none(
    keys: dict[str, str], plain: str | None, with_tools: str | None, with_documents: str | None, tmp_path: Path
) -> None:
    templates = {f"tokenizer.chat_template{name}": text for name, text in keys.items()}
    tokenizer = read(write(tmp_path / "m.gguf", FILES["SmolLM2"], **templates))
    assert tokenizer.has_chat_template == (plain is not None)
    assert tokenizer.chat_template == plain
    assert tokenizer.chat_template_for({"tools": [1]}) == with_tools
    assert tokenizer.chat_template_for({"documents": [1]}) == with_documents
    if with_tools:
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], variables={"tools": [{}]}) == with_tools


@pytest.mark.parametrize("name", ["Phi3", "Phi 3.5", "phi-3-mini", "Llama 2"])
def test_control_tokens_of_phi_3_swallow_white_space_behind_them(name: str, tmp_path: Path) -> None:
    """As its tokenizer.json says, which a GGUF file has no key for."""
    tokenizer = read(write(tmp_path / "m.gguf", FILES["Phi-3.5"], **{"general.name": name}))
    ids = tokenizer.encode("<|end|> \n hi<|endoftext|> hi", add_special=False, parse_special=True)
    alone = tokenizer.encode("<|end|>hi<|endoftext|> hi", add_special=False, parse_special=True)
    assert (ids == alone) == (name != "Llama 2")


def test_bytes_of_a_file_that_are_no_utf8_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", FILES["Llama 2"])
    path.write_bytes(path.read_bytes().replace("▁hi".encode(), "▁".encode() + b"\xffi"))
    file = read_gguf(path)
    tokenizer = read(path)
    number = len(SPM) + LETTERS.index("▁hi")
    assert any("not UTF-8" in remark for remark in file.remarks)
    assert tokenizer.token_bytes(number) == b" \xffi"
    assert tokenizer.decode([number]) == "\ufffdi"


def vocabularies() -> list[Path]:
    """Whole vocabularies of other people beside this project's directory, with texts and ids (.inp, .out); none elsewhere."""
    for parent in Path(__file__).resolve().parents:
        if (parent / "shared" / "data" / "vocab").is_dir():
            return sorted(
                path for path in (parent / "shared" / "data" / "vocab").glob("*.gguf") if path.with_suffix(".gguf.inp").exists()
            )
    return []


@pytest.mark.skipif(not vocabularies(), reason="no shared/data/vocab beside this project, which is not part of it")
def test_whole_vocabularies_of_others_give_their_ids() -> None:
    for path in vocabularies():
        tokenizer = read(path)
        texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
        lines = path.with_suffix(".gguf.out").read_text().splitlines()
        for text, line in zip(texts, lines, strict=False):
            assert tokenizer.encode(text, add_special=False) == [int(number) for number in line.split()], (path.name, text)


def test_a_gemma_4_of_ollama_merges_by_its_merges(tmp_path: Path) -> None:
    """Its converter calls the vocabulary llama, the pre-tokenizer gemma4, and gives tokens their ids as scores."""
    merges, gemma4 = ["h i", "\u2581 hi", "\u2581 h", "h o"], FILES["Gemma 4, which says no BOS by mistake"]
    file = replace(gemma4, tokens=(*gemma4.tokens, ("hi", NORMAL), ("ho", NORMAL)))
    usual = read(write(tmp_path / "m.gguf", file, **{"tokenizer.ggml.merges": merges}))
    scores = np.arange(len(file.tokens) + len(LETTERS), dtype=np.float32)
    ollama = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "gemma4", "tokenizer.ggml.scores": scores}
    named = read(write(tmp_path / "o.gguf", file, **{"tokenizer.ggml.merges": merges, **ollama}))
    for text in ("hi hi ho", "ho", " hi", "a hi ho"):
        assert named.encode(text) == usual.encode(text), text
    by_scores = read(write(tmp_path / "s.gguf", replace(file, model="llama", pre=""), **{"tokenizer.ggml.scores": scores}))
    assert by_scores.encode("hi hi ho") != usual.encode("hi hi ho"), "the order shows"
    with pytest.raises(TokenizerError, match="the ids of its tokens as scores, and the pre-tokenizer ''; wanted gemma4"):
        read(write(tmp_path / "x.gguf", file, **{"tokenizer.ggml.merges": merges, **ollama, "tokenizer.ggml.pre": ""}))


def test_a_sentencepiece_file_that_repeats_its_merges_goes_by_its_scores(tmp_path: Path) -> None:
    usual = read(write(tmp_path / "m.gguf", FILES["CodeLlama"]))
    both = read(write(tmp_path / "b.gguf", FILES["CodeLlama"], **{"tokenizer.ggml.merges": ["h i"]}))
    assert both.encode("hi hello") == usual.encode("hi hello")

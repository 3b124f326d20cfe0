"""Damaged vocabularies are refused or encode: tokenizer.json and the files beside it, GGUF. CPUSPEC_FUZZ=10000: see `drive`."""

import base64
import json
import random
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cpuspec.checkpoints import GgufVocabulary, HfTokenizerFiles, open_checkpoint
from cpuspec.text import Tokenizer, make_tokenizer
from tests.backends.models import SMALL
from tests.fuzz.drive import check, mutate_bytes, mutate_json, mutate_text
from tests.fuzz.test_models import both, made_files
from tests.text.test_tokenizer import SENTENCEPIECE, make_hf, make_vocabulary
from tools.make_tiny_model import CHAT_TEMPLATE, make_tiny_gguf

VOCAB_SIZE = 1 << 16
TEXTS = (
    "the quick brown fox doesn't say it's 1234.\n\n  def add(a, b):\n\treturn a + b\r\n<|im_end|><|im_start|>x<tool></s><s><unk>",
    "Größe, naïve e\u0301, Ελληνικά, 中文字符，日本語, 한국어, 😀👩‍👩‍👧 \u00a0\u3000\x00\x7f\u202e ﷺﷺ <0x41>▁▁a",
    "a" * 2000,
    "ab " * 700,
    " " * 300 + "\n" * 300 + "x",
    "",
)


def use(tokenizer: Tokenizer) -> None:
    """Everything that a server does with a tokenizer."""
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in (*tokenizer.eos_ids, *tokenizer.prefix))
    for text in TEXTS:
        for parse_special in (False, True):
            ids = tokenizer.encode(text, parse_special=parse_special)
            assert ids == tokenizer.encode(text, parse_special=parse_special)
            assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
            tokenizer.decode(ids, skip_special=False).encode()
        tokenizer.encode_parts(tokenizer.parts(ids), continues=True)
    for token_id in range(0, tokenizer.vocab_size, 97):
        tokenizer.meaning(token_id)
        tokenizer.token_bytes(token_id)
    assert tokenizer.first_difference(tokenizer) is None
    if tokenizer.has_chat_template:
        tokenizer.encode_chat([{"role": "user", "content": TEXTS[0]}])


# ---------------------------------------------------------------------------------------------------------------- tokenizer.json


@cache
def huggingface_sample(sentencepiece: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        data = json.loads(make_hf(Path(directory)).tokenizer_json.read_text())
    # Fewer merges: most damage would fall on them.
    data["model"]["merges"] = data["model"]["merges"][:8]
    if sentencepiece:
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
        vocab = {token: i for i, token in enumerate(SENTENCEPIECE.tokens)}
        special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        data |= {
            "added_tokens": [{"id": i, "content": SENTENCEPIECE.tokens[i], **special} for i in range(3)],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": steps},
            "post_processor": {"type": "BertProcessing", "cls": ["<s>", 1], "sep": ["</s>", 2]},
            "model": {
                **{"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab},
                "merges": ["t h"],
            },
        }
    return data


SIDE_FILES: dict[str, Any] = {
    "tokenizer_config.json": {
        **{"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "add_bos_token": True, "tokenizer_class": "X"},
    },
    "generation_config.json": {"eos_token_id": [3, 4]},
    "special_tokens_map.json": {"pad_token": {"content": "<s>"}},
    "chat_template.json": {"chat_template": CHAT_TEMPLATE},
}


def huggingface(rng: random.Random, directory: Path) -> None:
    data = json.loads(json.dumps(huggingface_sample(rng.random() < 0.5)))
    for change in rng.choices((steps, leftovers, flags, added, around), k=rng.randrange(4)):
        data |= change(rng, data)
    damaged = json.dumps(data).encode()
    if rng.random() < 0.2:
        damaged = mutate_json(data, rng)
    elif rng.random() < 0.6:  # of all but the vocabulary, which is most of a file
        vocab, model = json.dumps(data["model"]["vocab"]), data["model"] | {"vocab": "VOCAB"}
        damaged = mutate_json(data | {"model": model}, rng).replace(b'"VOCAB"', vocab.encode())
    (directory / "tokenizer.json").write_bytes(damaged)
    for name, value in SIDE_FILES.items():
        if rng.random() < 0.5:
            (directory / name).write_bytes(mutate_json(value, rng) if rng.random() < 0.3 else json.dumps(value).encode())
    if rng.random() < 0.2:
        (directory / "chat_template.jinja").write_bytes(mutate_text(CHAT_TEMPLATE, rng))
    use(made(HfTokenizerFiles(directory, directory / "tokenizer.json")))


def made(vocabulary: GgufVocabulary | HfTokenizerFiles) -> Tokenizer:
    checkpoint: Any = SimpleNamespace(vocabulary=vocabulary, config=SimpleNamespace(vocab_size=VOCAB_SIZE), path=Path("model"))
    return make_tokenizer(checkpoint)


def steps(rng: random.Random, data: dict[str, Any]) -> dict[str, Any]:
    """Any steps of the library where others were, some of them many times."""
    name, inside, kinds = rng.choice(
        (("normalizer", "normalizers", NORMALIZERS), ("pre_tokenizer", "pretokenizers", PRE_TOKENIZERS))
    )
    chosen = [rng.choice(kinds)(rng) for _ in range(rng.choice((1, 1, 2, 3, 5)))] * rng.choice((1, 1, 1, 2, 40))
    if rng.random() < 0.2:
        chosen = [{"type": "Sequence", inside: chosen}]
    return {name: {"type": "Sequence", inside: chosen}}


def leftovers(rng: random.Random, data: dict[str, Any]) -> dict[str, Any]:
    number = rng.choice((0, 1, 8, 1 << 31, (1 << 63) - 1))
    strategy = rng.choice(("BatchLongest", {"Fixed": number}))
    padding = {
        **{"strategy": strategy, "direction": "Left", "pad_to_multiple_of": number, "pad_id": 0, "pad_type_id": 0},
        "pad_token": "!",
    }
    truncation = {"direction": "Right", "max_length": number, "strategy": "LongestFirst", "stride": rng.choice((0, 7, number))}
    return rng.choice(({"padding": padding}, {"truncation": truncation}, {"model": data["model"] | {"dropout": rng.random()}}))


def flags(rng: random.Random, data: dict[str, Any]) -> dict[str, Any]:
    unk_token = rng.choice((*list(data["model"]["vocab"])[:300:20], "<|im_end|>", "missing", "", None))
    options = {key: rng.random() < 0.5 for key in ("fuse_unk", "byte_fallback", "ignore_merges") if rng.random() < 0.5}
    if rng.random() < 0.1:
        options |= {rng.choice(("continuing_subword_prefix", "end_of_word_suffix")): rng.choice(("", "é", 3))}
    return {"model": data["model"] | options | {"unk_token": unk_token}}


def added(rng: random.Random, data: dict[str, Any]) -> dict[str, Any]:
    """More added tokens: spaces, letters, texts within texts, thousands, long ones."""
    first_id = max(data["model"]["vocab"].values(), default=0) + 10
    letters = rng.choice(("a", " ", "ab", "<|>", "e\u0301é", "a▁ \n"))
    count, longest = rng.choice(((3, 3), (3, 1000), (3, 1100), (2000, 8), (300, 300)))
    contents = {"".join(rng.choices(letters, k=rng.randrange(longest + 1))) for _ in range(count)} - {*data["model"]["vocab"]}
    options = ("special", "lstrip", "rstrip", "single_word", "normalized")
    new = [
        {"id": first_id + i, "content": text} | {name: rng.random() < 0.3 for name in options} for i, text in enumerate(contents)
    ]
    return {"added_tokens": [*(data.get("added_tokens") or []), *new]}


def around(rng: random.Random, data: dict[str, Any]) -> dict[str, Any]:
    special = {"x": {"id": "x", "ids": [rng.choice((0, 5, 5, -1, 1 << 40))] * rng.choice((1, 1, 1, 2, 5000)), "tokens": ["x"]}}
    special_piece, text_piece = {"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    pieces = rng.choice(
        ([special_piece, text_piece, special_piece], [text_piece, special_piece], rng.choices((special_piece, text_piece), k=3))
    )
    single = pieces * rng.choice((1, 1, 1, 1000))
    return {"post_processor": {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}}


def pattern(rng: random.Random, depth: int = 3) -> str:
    """A regular expression, of those that backtrack more often than not."""
    atoms = ("a", "b", ".", r"\s", r"\p{L}", r"[^\s\p{L}]", "[a-z ]", r"\n", "$", "^", r"\b", "é", "(?i:s|t)", r"\1")
    branches = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        branch = ""
        for _ in range(rng.randrange(1, 4)):
            group = rng.choice(("(?:", "(", "(?=", "(?!", "(?>", "(?<=")) if depth and rng.random() < 0.4 else ""
            branch += f"{group}{pattern(rng, depth - 1)})" if group else rng.choice(atoms)
            branch += rng.choice(("", "", "*", "+", "?", "+?", "++", "{2}", "{1,3}", "{1,}", "{,9}", "{60}"))
        branches.append(branch)
    return "|".join(branches)


def replace_step(rng: random.Random) -> dict[str, Any]:
    found = rng.choice(({"String": rng.choice(("a", " ", "", "▁"))}, {"Regex": pattern(rng)}))
    return {"type": "Replace", "pattern": found, "content": rng.choice(("", "a", "▁", "aa", "a" * 50, " " * 1000))}


def split_step(rng: random.Random) -> dict[str, Any]:
    found = rng.choice(({"String": rng.choice(("a", " ", ""))}, {"Regex": pattern(rng)}, {"Regex": pattern(rng)}))
    behavior = rng.choice(("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"))
    return {"type": "Split", "pattern": found, "behavior": behavior, "invert": rng.random() < 0.3}


def metaspace_step(rng: random.Random) -> dict[str, Any]:
    scheme = {"prepend_scheme": rng.choice(("first", "always", "never", "x"))} if rng.random() < 0.7 else {}
    return {"type": "Metaspace", "replacement": rng.choice(("▁", "_", "", "ab")), "add_prefix_space": rng.random() < 0.5, **scheme}


def charsmap_step(rng: random.Random) -> dict[str, Any]:
    trie = rng.randbytes(4 * rng.choice((0, 1, 16, 256)))
    table = len(trie).to_bytes(4, "little") + trie + rng.choice((b"a\0bb\0", b"\0", b"a" * 900, rng.randbytes(9)))
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def byte_step(rng: random.Random) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": rng.random() < 0.5, "trim_offsets": True, "use_regex": rng.random() < 0.5}


def plain_step(*names: str, **options: Any) -> Any:
    return lambda rng: {"type": rng.choice(names), **options}


NORMALIZERS = (
    *(replace_step, replace_step, byte_step, charsmap_step),
    plain_step("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "StripAccents"),
    plain_step("Strip", strip_left=True, strip_right=True),
    plain_step("BertNormalizer", clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True),
    plain_step("Prepend", prepend="▁"),
)
PRE_TOKENIZERS = (
    *(split_step, split_step, byte_step, metaspace_step),
    plain_step("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts"),
    plain_step("CharDelimiterSplit", delimiter=" "),
    plain_step("Digits", individual_digits=True),
    plain_step("Punctuation", behavior="Isolated"),
    lambda rng: {"type": "FixedLength", "length": rng.choice((0, 1, 5, 1 << 62))},
)


def test_a_damaged_tokenizer_json_is_refused_or_encodes() -> None:
    assert both(check(huggingface, 50))


# ------------------------------------------------------------------------------------------------------------- GGUF vocabularies


def gguf_vocabulary(rng: random.Random, directory: Path) -> None:
    """Tables of the right types with any contents, as a GGUF reader hands them on."""
    vocabulary = (
        SENTENCEPIECE
        if rng.random() < 0.5
        else make_vocabulary(rng.choice(("qwen2", "smollm", "llama-bpe", "default", "gpt-2", "x")))
    )
    tokens, merges = list(vocabulary.tokens), list(vocabulary.merges[:20])
    types, scores = list(vocabulary.token_types), list(vocabulary.scores)
    for _ in range(rng.choice((1, 1, 2, 5, 300))):
        at, other = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        kind = rng.choice(("token", "token", "swap", "type", "score", "merge", "merge"))
        if kind == "token":
            letters = rng.choice(("a", " ", "▁the", "<|im_>", "e\u0301中", "\x00\x1b"))
            tokens[at] = rng.choice(
                ("", "a", tokens[at] + tokens[other], "".join(rng.choices(letters, k=rng.choice((1, 2, 9, 200, 2000)))))
            )
        elif kind == "swap":
            tokens[at], tokens[other] = tokens[other], tokens[at]
        elif kind == "type":
            types[at] = rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 1 << 31))
        elif kind == "score" and scores:
            scores[at] = rng.choice((0.0, -1.0, 1e30, -1e30, scores[other], float("nan"), float("inf")))
        elif merges:
            left, right = rng.choice(tokens), rng.choice(tokens)
            merges[rng.randrange(len(merges))] = rng.choice((f"{left} {right}", left, "", " ", f"{left}  {right}", merges[0]))
    if rng.random() < 0.9:
        tokens = [token if token not in tokens[:i] else f"{token}{i}" for i, token in enumerate(tokens)]
    names = ("bos_id", "eos_id", "unk_id", "sep_id")
    ids: dict[str, Any] = {name: rng.choice((None, 0, 1, 260, len(tokens) - 1)) for name in names}
    if rng.random() < 0.2:
        ids[rng.choice(list(ids))] = rng.choice((-1, len(tokens), 1 << 62))
    sets = {name: rng.random() < 0.5 for name in ("add_bos", "add_eos", "add_space_prefix")}
    changes = ids | sets | {"end_ids": tuple(rng.choices((-1, 0, 5, 1 << 40), k=2))} if rng.random() < 0.5 else {}
    if rng.random() < 0.3:
        tables = (b"", b"\x04\0\0\0" + rng.randbytes(4) + b"ab\0c\0", rng.randbytes(9))
        changes |= {"model": rng.choice(("t5", "bert", "gemma4", "llama")), "charsmap": rng.choice(tables)}
        changes |= {"scores": tuple(-float(i % 9) for i in range(len(tokens))), "merges_spaces": rng.random() < 0.5}
    if rng.random() < 0.1:
        changes["chat_templates"] = {"default": mutate_text(CHAT_TEMPLATE, rng).decode(errors="replace")}
    lists = {"tokens": tuple(tokens), "token_types": tuple(types), "scores": tuple(scores), "merges": tuple(merges)}
    use(made(replace(vocabulary, **(lists | changes))))


@cache
def gguf_sample() -> bytes:
    return made_files(lambda directory: make_tiny_gguf(directory / "m.gguf", "qwen2", vocab_size=300, **SMALL))["m.gguf"]


def gguf_bytes(rng: random.Random, directory: Path) -> None:
    """Damage to the bytes of the vocabulary in a file."""
    content = gguf_sample()
    start, end = content.index(b"tokenizer.ggml.model"), content.index(b"token_embd.weight")
    path = directory / "m.gguf"
    path.write_bytes(content[:start] + mutate_bytes(content[start:end], rng) + content[end:])
    use(make_tokenizer(open_checkpoint(path)))


def test_a_damaged_gguf_vocabulary_is_refused_or_encodes() -> None:
    assert both(check(gguf_vocabulary, 30))


def test_damaged_bytes_of_a_gguf_vocabulary_are_refused_or_encode() -> None:
    assert both(check(gguf_bytes, 30))

"""Reads a Hugging Face tokenizer.json, and the files beside it, and trusts nothing in them: every field is read by name and type.

Three fields for training are ignored: `truncation` and `padding`, which `transformers` resets too, and `dropout`, which would make
ids random. Steps that could make a text grow without bound are refused, and so are patterns that no known model has. The
module reads files and makes no tokenizer.
"""

import base64
import binascii
import json
import logging
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cpuspec.errors import TokenizerError, in_one_line
from cpuspec.files import read_file
from cpuspec.text.known_patterns import min_match

_MOST_BYTES = 1 << 26  # of one file; the largest in use has 33 MB
_MOST_TOKENS = 1 << 24
_MOST_STEPS = 64  # of a normalizer, a pre-tokenizer, a decoder or a post-processor
_MOST_AROUND = 1024  # tokens before and after a text
_MOST_GROWTH = 64  # characters that all normalizers may make of one
_LONGEST_ADDED = 1024  # characters of an added token
_LONGEST_WORD = 256  # characters of a word that WordPiece splits, which takes time by their cube
_FEW_BEYOND = 4096  # added tokens may have ids up to this far above the model's rows; higher ids are a sign of damage
_MOST_ADDED = 1 << 21  # characters of all of them

_log = logging.getLogger(__name__)
SURROGATE = re.compile("[\ud800-\udfff]")

# How many characters each step may make from one, Unicode's normal forms aside. The file says it for Replace and Precompiled.
_NORMALIZERS = {
    **dict.fromkeys(
        ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "Strip", "StripAccents", "Prepend", "Replace", "Precompiled"), 1
    ),
    "BertNormalizer": 3,
    "ByteLevel": 4,
}
_PRE_TOKENIZERS = {
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation", "Split"), 1),
    **dict.fromkeys(("UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1),
    "Metaspace": 2,
    "ByteLevel": 4,
}


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before it is split into words."""

    id: int
    content: str
    special: bool
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


@dataclass(frozen=True)
class TokenizerJson:
    """A tokenizer.json, checked. normalizer and pre_tokenizer: steps in the library's notation, sequences in them unfolded."""

    kind: str  # of the model: "BPE", "Unigram" or "WordPiece"
    tokens: tuple[str | None, ...]  # by id, added ones included
    vocab: dict[str, int]  # the same by text
    added: tuple[AddedToken, ...]
    merges: list[tuple[str, str]]
    scores: tuple[float, ...]  # of Unigram's pieces
    unk_id: int | None  # of Unigram
    continuing_prefix: str  # of WordPiece's pieces inside of words
    longest_word: int  # characters of a word that WordPiece splits
    unk_token: str | None
    fuse_unk: bool
    byte_fallback: bool
    ignore_merges: bool
    normalizer: list[dict[str, Any]]
    pre_tokenizer: list[dict[str, Any]]
    growth: float  # characters that these steps may make of one
    byte_level: bool  # pieces spell bytes in GPT-2's alphabet; else words with ▁ for a space
    strips_first_space: bool
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlevel = 2


def quoted(value: Any) -> str:
    """A file's value for an error message: at most 100 characters, with control characters escaped."""
    text = _short.repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def read_text_file(path: Path) -> str:
    """The text of a UTF-8 file of at most 64 MiB. Raises TokenizerError, and opens nothing, if it is larger or no regular file."""
    try:
        return read_file(path, _MOST_BYTES, TokenizerError).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error


def exists(path: Path) -> bool:
    """Whether anything has this path: a file, a pipe, a broken link. Raises TokenizerError if the system does not say."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror or error}") from error
    return True


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file and it is not required. Raises TokenizerError."""
    if not required and not exists(path):
        return {}
    text = read_text_file(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {in_one_line(str(error))}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds {type(value).__name__}; wanted an object")
    return value


def read_tokenizer_json(path: Path, more: Iterable[Mapping[str, Any]] = (), vocab_size: int = _MOST_TOKENS) -> TokenizerJson:
    """A tokenizer.json. Raises TokenizerError for one that is damaged, hostile or of another kind.

    more: tokens that other files add, as `added_tokens` has them; one whose id is None or taken gets the next free one. vocab_size:
    of the model, which has no rows for tokens of `more` beyond.
    """
    data = read_json(path, required=True)
    try:
        return _read(data, more, vocab_size)
    except TokenizerError as error:
        raise TokenizerError(f"{path} cannot be used: {error}") from error


def _read(data: dict[str, Any], more: Iterable[Mapping[str, Any]], vocab_size: int) -> TokenizerJson:
    model = data.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    wanted = {"BPE": dict, "WordPiece": dict, "Unigram": list}.get(kind) if isinstance(kind, str) else None
    if wanted is None or not isinstance(model, dict) or not isinstance(model.get("vocab"), wanted):
        raise TokenizerError(f"the model is {quoted(kind)}; wanted BPE, Unigram or WordPiece with a vocabulary")
    prefix_of_pieces = model.get("continuing_subword_prefix")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name) not in (None, "") and (kind, name) != ("WordPiece", "continuing_subword_prefix"):
            raise TokenizerError(f"{name} is {quoted(model[name])}; wanted none: pieces are byte-level, or have ▁ for a space")
    if kind == "WordPiece" and not (isinstance(prefix_of_pieces, str) and prefix_of_pieces):
        raise TokenizerError(
            f"continuing_subword_prefix is {quoted(prefix_of_pieces)}; wanted what pieces inside of a word begin with"
        )
    longest_word = model.get("max_input_chars_per_word", 100)
    if type(longest_word) is not int or not 0 < longest_word <= _LONGEST_WORD:
        raise TokenizerError(f"max_input_chars_per_word is {quoted(longest_word)}; wanted a number up to {_LONGEST_WORD}")
    vocab, scores = (dict(model["vocab"]), ()) if kind != "Unigram" else _read_pieces(model["vocab"])
    listed = list(_read_added(data.get("added_tokens")))
    added = [token for token in listed if not vocab_size <= token.id < vocab_size + _FEW_BEYOND]
    if len(added) < len(listed):
        _log.warning("%d added tokens are beyond the model's %d rows; they are ignored", len(listed) - len(added), vocab_size)
    for token in added:
        if vocab.setdefault(token.content, token.id) != token.id:
            raise TokenizerError(f"{quoted(token.content)} has the ids {quoted(vocab[token.content])} and {token.id}")
    _by_id(vocab)
    added = _with_more(added, vocab, more, vocab_size)
    tokens = _by_id(vocab)
    unk_token = model.get("unk_token")
    if not isinstance(unk_token, str | None):
        raise TokenizerError(f"unk_token is {quoted(unk_token)}; wanted a text")
    normalizer = _steps(data, "normalizer", "normalizers")
    pre_tokenizer = [_without_legacy(step) for step in _steps(data, "pre_tokenizer", "pretokenizers")]
    growth = _growth(normalizer, pre_tokenizer)
    byte_level, strips = _read_decoder(data)
    prefix, suffix = _read_around(data, len(tokens))
    unk_id = model.get("unk_id")
    if kind == "Unigram" and unk_id is not None and not (type(unk_id) is int and 0 <= unk_id < len(scores)):
        raise TokenizerError(f"unk_id is {quoted(unk_id)}; wanted an id below {len(scores)}")
    return TokenizerJson(
        kind=str(kind),
        scores=scores,
        unk_id=unk_id if kind == "Unigram" else None,
        continuing_prefix=str(prefix_of_pieces or ""),
        longest_word=longest_word,
        tokens=tokens,
        vocab=vocab,
        added=tuple(added),
        merges=list(_read_merges(model.get("merges"))),
        unk_token=unk_token,
        fuse_unk=_flag(model, "fuse_unk"),
        byte_fallback=_flag(model, "byte_fallback"),
        ignore_merges=_flag(model, "ignore_merges"),
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizer,
        growth=growth,
        byte_level=byte_level,
        strips_first_space=strips,
        prefix=prefix,
        suffix=suffix,
    )


def _read_pieces(pieces: list[Any]) -> tuple[dict[str, Any], tuple[float, ...]]:
    """The ids and the scores of Unigram's pieces, which are listed by id."""
    vocab: dict[str, Any] = {}
    for number, piece in enumerate(pieces):
        match piece:
            case [str(text), int() | float() as score] if abs(score) < 1e30 and text not in vocab and len(text) <= _LONGEST_ADDED:
                vocab[text] = number
            case _:
                raise TokenizerError(
                    f"piece {number} is {quoted(piece)}; wanted a text that no other piece has, of at most {_LONGEST_ADDED} "
                    "characters, and its score"
                )
    return vocab, tuple(float(score) for _, score in pieces)


def _with_more(added: list[AddedToken], vocab: dict[str, Any], more: Iterable[Mapping[str, Any]], size: int) -> list[AddedToken]:
    """The added tokens with those of `more`, which `vocab` gets, too. A token that is there becomes special if `more` says so."""
    by_text = {token.content: token for token in added}
    taken = set(vocab.values())
    for token in _read_added([dict(one, id=0 if one.get("id") is None else one["id"]) for one in more]):
        known = by_text.get(token.content)
        if known:
            by_text[token.content] = replace(known, special=known.special or token.special)
            continue
        token_id = vocab.get(token.content)
        if token_id is None:
            token_id = token.id if token.id not in taken else max(taken, default=-1) + 1
            if not 0 <= token_id < size:
                continue
            vocab[token.content] = token_id
            taken.add(token_id)
        by_text[token.content] = replace(token, id=token_id)
    return list(by_text.values())


def _flag(fields: dict[str, Any], name: str, default: bool = False) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise TokenizerError(f"{name} is {quoted(value)}; wanted true or false")
    return default if value is None else value


def _read_added(tokens: Any) -> Iterator[AddedToken]:
    tokens = [] if tokens is None else tokens
    if not isinstance(tokens, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) for token in tokens
    ):
        raise TokenizerError("added_tokens is not a list of tokens")
    if sum(len(token["content"]) for token in tokens) > _MOST_ADDED:
        raise TokenizerError(f"added_tokens have over {_MOST_ADDED} characters")
    for token in tokens:
        content, token_id = token["content"], token.get("id")
        if len(content) > _LONGEST_ADDED:
            raise TokenizerError(
                f"the added token {quoted(content)} has {len(content)} characters; at most {_LONGEST_ADDED} are read"
            )
        if type(token_id) is not int:
            raise TokenizerError(f"the id of {quoted(content)} is {quoted(token_id)}; wanted a number")
        flags = {name: _flag(token, name) for name in ("special", "single_word", "lstrip", "rstrip")}
        yield AddedToken(token_id, content, **flags, normalized=_flag(token, "normalized", not flags["special"]))


def _by_id(vocab: dict[str, Any]) -> tuple[str | None, ...]:
    top = -1
    for text, token_id in vocab.items():
        if type(token_id) is not int or not 0 <= token_id < _MOST_TOKENS:
            raise TokenizerError(f"the id of {quoted(text)} is {quoted(token_id)}; wanted a number from 0 to {_MOST_TOKENS - 1}")
        top = max(top, token_id)
    if top > 2 * len(vocab) + 4096:
        raise TokenizerError(f"the highest id is {top} among {len(vocab)} tokens; the file is damaged")
    tokens: list[str | None] = [None] * (top + 1)
    for text, token_id in vocab.items():
        if tokens[token_id] is not None:
            raise TokenizerError(f"{quoted(tokens[token_id])} and {quoted(text)} share the id {token_id}")
        tokens[token_id] = text
        if SURROGATE.search(text):
            raise TokenizerError(f"the token {quoted(text)} is not Unicode")
    if not tokens:
        raise TokenizerError("the vocabulary has no tokens")
    return tuple(tokens)


def _read_merges(merges: Any) -> Iterator[tuple[str, str]]:
    """Pairs, written as lists or as texts with a space between."""
    if not isinstance(merges, list | None):
        raise TokenizerError("merges is not a list")
    for number, merge in enumerate(merges or ()):
        if isinstance(merge, str) and merge.startswith("#version"):
            continue
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise TokenizerError(f"merge {number} is {quoted(merge)}; wanted two pieces")
        yield pair[0], pair[1]


def _steps(data: dict[str, Any], name: str, inside: str) -> list[dict[str, Any]]:
    """The steps of a component in their order, those of sequences in its place. inside: the field that holds a sequence's steps."""
    steps: list[dict[str, Any]] = []
    waiting = [data.get(name)]
    for _ in range(2 * _MOST_STEPS):
        if not waiting:
            return steps
        step = waiting.pop()
        if step is None and not steps and not waiting:
            continue
        if not isinstance(step, dict) or not isinstance(step.get("type"), str):
            raise TokenizerError(f"the {name} has the step {quoted(step)}; wanted an object with a type")
        if step["type"] != "Sequence":
            steps.append(step)
        elif isinstance(step.get(inside), list) and len(step[inside]) <= _MOST_STEPS:
            waiting += reversed(step[inside])
        else:
            raise TokenizerError(f"the {name} has a sequence without {inside}, or of more than {_MOST_STEPS}")
    raise TokenizerError(f"the {name} has more than {_MOST_STEPS} steps")


def _without_legacy(step: dict[str, Any]) -> dict[str, Any]:
    """The step. A Metaspace step of an older file gets today's field names."""
    if step["type"] != "Metaspace":
        return step
    scheme = "never" if step.get("add_prefix_space") is False else step.get("prepend_scheme", "always")
    split = _flag(step, "split", default=True)
    return {"type": "Metaspace", "replacement": step.get("replacement"), "prepend_scheme": scheme, "split": split}


def _growth(normalizer: list[dict[str, Any]], pre_tokenizer: list[dict[str, Any]]) -> float:
    """The most characters that all steps together make from one. Refuses too many, and patterns that may search for too long."""
    growth = 1.0
    for name, known, steps in (("normalizer", _NORMALIZERS, normalizer), ("pre_tokenizer", _PRE_TOKENIZERS, pre_tokenizer)):
        for step in steps:
            if step["type"] not in known:
                raise TokenizerError(f"the {name} {quoted(step['type'])} is not known; known: {', '.join(sorted(known))}")
            growth *= known[step["type"]]
            min_length = _min_match(step, name) if step["type"] in ("Replace", "Split") else 1
            if step["type"] == "Replace":
                content = step.get("content")
                if not isinstance(content, str):
                    raise TokenizerError(f"a Replace step has the content {quoted(content)}; wanted a text")
                growth *= max(1, len(content) / min_length) if min_length else 1 + len(content)
            elif step["type"] == "Precompiled":
                growth *= longest_replacement(_charsmap(step.get("precompiled_charsmap")))
            elif step["type"] == "Prepend" and len(str(step.get("prepend"))) > _MOST_GROWTH:
                raise TokenizerError(f"a Prepend step puts {quoted(step.get('prepend'))} before a text")
            elif step["type"] == "FixedLength" and not (type(step.get("length")) is int and step["length"] > 0):
                raise TokenizerError(f"a FixedLength step has the length {quoted(step.get('length'))}; wanted at least 1")
    if growth > _MOST_GROWTH:
        raise TokenizerError(f"its steps may make {growth:.0f} characters of one; at most {_MOST_GROWTH} are made")
    return growth


def _min_match(step: dict[str, Any], name: str) -> int:
    """The fewest characters that the step's pattern matches; 1 for a regular expression that matches more."""
    match step.get("pattern"):
        case {"String": str(text)}:
            return len(text)
        case {"Regex": str(pattern)}:
            try:
                return min_match(pattern)
            except TokenizerError as error:
                raise TokenizerError(f"in the {name}, {error}") from error
        case other:
            raise TokenizerError(f"a {step['type']} step has the pattern {quoted(other)}; wanted a String or a Regex")


def _charsmap(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise TokenizerError("the precompiled_charsmap is damaged") from error


def longest_replacement(charsmap: bytes) -> int:
    """Characters of the longest text in a table of SentencePiece (its normalizer.cc): a trie, then texts that end with a NUL.

    Raises TokenizerError for a damaged one.
    """
    end = 4 + int.from_bytes(charsmap[:4], "little")  # of the trie; the library asks for the memory of any size that is named here
    if end > len(charsmap):
        raise TokenizerError(f"the precompiled_charsmap has {len(charsmap)} bytes and a trie that ends at {end}; it is damaged")
    try:
        texts = charsmap[end:].decode().split("\0")
    except ValueError as error:
        raise TokenizerError("the precompiled_charsmap is damaged") from error
    return max(map(len, texts), default=0) or 1


def _read_decoder(data: dict[str, Any]) -> tuple[bool, bool]:
    """Whether pieces are byte-level, and whether decoding drops the first space of a text."""
    steps = _steps(data, "decoder", "decoders")
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return True, False
    strips = False
    for step in steps:
        match step:
            case {"type": "ByteFallback" | "Fuse"} | {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                pass
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strips = strips or bool(start)
            case {"type": "WordPiece"}:
                strips = True
            case {"type": "Metaspace", "replacement": "▁"}:
                strips = strips or _without_legacy(step)["prepend_scheme"] != "never"
            case _:
                raise TokenizerError(f"the decoder has the step {quoted(step)}; wanted ByteLevel, or SentencePiece's steps")
    if not steps:
        raise TokenizerError("the decoder is None; wanted ByteLevel, or SentencePiece's steps")
    return False, strips


def _read_around(data: dict[str, Any], num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the file's post-processor puts before and after every text."""
    prefix: list[int] = []
    suffix: list[int] = []
    for step in _steps(data, "post_processor", "processors"):
        before: list[int] = []
        behind: list[int] = []
        match step:
            case {"type": "ByteLevel"}:
                pass
            case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, first], "sep": [_, last]}:
                before, behind = [first], [last]
            case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": dict(special)}:
                found = False
                for piece in pieces:
                    match piece:
                        case {"Sequence": {"id": "A"}} if not found:
                            found = True
                        case {"SpecialToken": {"id": str(name)}} if isinstance(special.get(name), dict):
                            ids = special[name].get("ids")
                            (behind if found else before).extend(ids if isinstance(ids, list) else [ids])
                        case _:
                            raise TokenizerError(
                                f"the post_processor has the piece {quoted(piece)}; wanted the text once, tokens around"
                            )
                    if len(before) + len(behind) > _MOST_AROUND:
                        raise TokenizerError(f"the post_processor puts over {_MOST_AROUND} tokens around a text")
                if not found:
                    raise TokenizerError(f"the post_processor leaves the text out: {quoted(pieces)}")
            case _:
                raise TokenizerError(f"the post_processor has the step {quoted(step)}; wanted ByteLevel, or tokens around a text")
        prefix = before + prefix
        suffix = suffix + behind
    for token_id in (*prefix, *suffix):
        if type(token_id) is not int or not 0 <= token_id < num_tokens:
            raise TokenizerError(f"the post_processor puts {quoted(token_id)} around a text; wanted ids below {num_tokens}")
    return tuple(prefix), tuple(suffix)

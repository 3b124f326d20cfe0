"""Text to token ids and back, from a GGUF file's own vocabulary or a Hugging Face tokenizer.json.

Text is split into words by the `tokenizers` library, and words are merged by it or by `byte_pairs`, on a vocabulary without
control tokens; where those are recognised, and where not, is decided here, so that a user's text cannot smuggle them in. Knows
nothing of models, only of ids.
"""

import codecs
import contextlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuspec.byte_pairs import BytePairs, merge_order
from cpuspec.checkpoints.checkpoint import Checkpoint, GgufVocabulary, HfTokenizerFiles
from cpuspec.errors import TokenizerError, in_one_line
from cpuspec.tokenizer_json import TokenizerJson, exists, quoted, read_json, read_text, read_tokenizer_json

if TYPE_CHECKING:
    import tokenizers

    from cpuspec.chat_template import ChatTemplate

# Token types of a GGUF vocabulary.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# What splits text into words before merging, as the models' own tokenizer.json files have it; llama.cpp's llama-vocab.cpp says
# which name stands for which rules. Rules apply one after the other, each to the pieces that the one before left.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_CODER = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Pre:
    """How one kind of pre-tokenizer prepares text for merging."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token stays whole, whatever the merges say


_PRE = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling"), _Pre((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _Pre((r"\p{N}", _GPT2))),
    "qwen2": _Pre((_QWEN2,), nfc=True),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), _Pre((_QWEN2,))),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _Pre((_LLAMA3,), ignore_merges=True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _Pre((_LLAMA3,))),
    "tekken": _Pre((_TEKKEN,), ignore_merges=True),
    "seed-coder": _Pre((_SEED_CODER,)),
    "deepseek-coder": _Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "falcon": _Pre((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}

# A name for each kind of pre-tokenizer that a GGUF file may name.
PRE_TOKENIZERS = tuple({pre: name for name, pre in reversed(_PRE.items())}.values())

# Control tokens that end a turn or a text, under the names that model families gave them (llama.cpp collects the same).
_END_NAMES = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"),
        *("<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<EOT>", "_<EOT>", "[EOT]", "</s>"),
    )
)
_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_STRAY_BYTES = re.compile("([\udc80-\udcff]+)")  # what "surrogateescape" makes of bytes that are no UTF-8
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONGEST_PIECE = 1024
_MOST_TOKENS = 1 << 24
_ORDINARY_GROWTH = 4  # bytes of a character; where steps of a file make more of it, a text may become _MOST_GROWN characters
_MOST_GROWN = 1 << 22
_SPACE = "▁"
_DEEPEST = 50  # levels of lists and dicts in messages and variables of a chat template

Message = Mapping[str, Any]


class Tokenizer:
    """Encodes and decodes with one vocabulary. Made by `make_tokenizer`; safe to use from several threads.

    Control tokens (and those that a vocabulary marks as unknown or unused) are special: they decode to nothing by default, and
    text becomes one only where the caller asks for it.
    """

    def __init__(self, parts: "_Parts", vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self._parts = parts
        self._special_ids = frozenset(parts.special)
        self._control = {token.text: token for token in parts.control if token.text}
        self._control_finder = _Finder(self._control)
        self._control_marks = {char for char in "".join(self._control) if not char.isalnum() and not char.isspace()}
        self._whole: dict[int, str] = {}  # text of the tokens met so far that are text and whole characters

    @property
    def has_chat_template(self) -> bool:
        return self._parts.chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; None without one."""
        return self._parts.chat_template

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        add_special: put the tokens around it that the model's file asks for (as BOS), if any.
        parse_special: text like `<|im_end|>` becomes that control token; otherwise it is encoded as the characters it consists of.
        """
        ids = self._encode_parsed(text, self._find_control(text) if parse_special else [])
        return [*self._parts.prefix, *ids, *self._parts.suffix] if add_special else ids

    def encode_prompt(self, text: str, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Token ids of a raw prompt; of an empty one its beginning alone, as far as the vocabulary has one.

        parse_special, add_special: as in `encode`. A text that has the beginning which the file asks for gets no second one.
        """
        ids, prefix = self.encode(text, False, parse_special), [*self._parts.prefix]
        if add_special:
            begun = parse_special and ids[: len(prefix)] == prefix
            ids = [*([] if begun else prefix), *ids, *self._parts.suffix]
        return ids if ids or self.bos_id is None else [self.bos_id]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`. Bytes that are no UTF-8 become U+FFFD. Raises TokenizerError for an id outside of the vocabulary."""
        decoder = self.stream(skip_special)
        return "".join(map(decoder.push, ids)) + decoder.finish()

    def stream(self, skip_special: bool = True, shown: Set[int] = frozenset()) -> "StreamDecoder":
        """A decoder for ids that arrive one by one. shown: special tokens that it shows all the same."""
        return StreamDecoder(self, skip_special, self._parts.strips_first_space, shown)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; b"" for special tokens. Raises TokenizerError for an id out of range."""
        text = self._text(token_id)
        return b"" if text is None or token_id in self._special_ids else self._bytes_of(token_id, text)

    def is_special(self, token_id: int) -> bool:
        """Whether the token carries control, not text. Raises TokenizerError for an id out of range."""
        return self._text(token_id) is None or token_id in self._special_ids

    def token_id(self, text: str) -> int | None:
        """The token that stands for exactly this text, a control token or one that is never split; None without one."""
        if control := self._control.get(text):
            return control.id
        return next((token_id for token_id in self._parts.literal if self._parts.tokens[token_id] == text), None)

    def first_difference(self, other: "Tokenizer") -> int | None:
        """The first id that stands for other bytes, or another control token, in the other vocabulary; None if there is none.

        Ids that either of them leaves empty are no difference.
        """
        ours, theirs = self._parts, other._parts
        if (ours.tokens, ours.special, ours.literal) == (theirs.tokens, theirs.special, theirs.literal):
            return None
        for token_id in range(min(len(ours.tokens), len(theirs.tokens))):
            meanings = {self.meaning(token_id), other.meaning(token_id)} - {None}
            if len(meanings) > 1:
                return token_id
        return None

    def meaning(self, token_id: int) -> bytes | str | None:
        """A token's bytes, a control token's text, or None for an id that text never has. Raises TokenizerError as above."""
        text = self._text(token_id)
        if text is not None and token_id not in self._special_ids:
            return self._bytes_of(token_id, text)
        return text if text in self._control else None

    def parts(self, ids: Sequence[int], continues: bool = False) -> list[bytes | int]:
        """A text as `encode_parts` of another vocabulary takes it: bytes of neighbouring text tokens joined, special tokens as ids.

        continues: the ids go on from others. Raises TokenizerError for an id outside of the vocabulary.
        """
        parts: list[bytes | int] = []
        for special, run in itertools.groupby(ids, self.is_special):
            if special:
                parts += run
                continue
            data = b"".join(map(self.token_bytes, run))
            strip = self._parts.strips_first_space and not continues and not any(isinstance(part, bytes) for part in parts)
            parts.append(data.removeprefix(b" ") if strip else data)
        return parts

    def encode_parts(self, parts: Iterable[bytes | int], continues: bool = False) -> list[int]:
        """Token ids of a text in parts: bytes of plain text, where no control token is recognised, and ids that stay what they are.

        continues: the text goes on from another, so that nothing is put before it, as SentencePiece's space. Bytes that are no
        UTF-8 become the tokens of single bytes, and those that the vocabulary cannot spell are left out.
        """
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                continue
            core = self._parts.middle_core if continues else self._parts.later_core if ids else self._parts.core
            for number, span in enumerate(_STRAY_BYTES.split(part.decode(errors="surrogateescape"))):
                if number % 2:
                    ids += [self._byte_ids[byte] for byte in span.encode(errors="surrogateescape") if byte in self._byte_ids]
                elif span:
                    with _library_errors("this text cannot be encoded"):
                        ids += core(span)
                core = self._parts.middle_core
        return ids

    @property
    def prefix(self) -> tuple[int, ...]:
        """What the model's file asks for before every text."""
        return self._parts.prefix

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        """Ids of the tokens of single bytes."""
        spelled = _BYTE_OF if self._parts.byte_level else {f"<0x{byte:02X}>": byte for byte in range(256)}
        return {spelled[text]: token_id for token_id, text in enumerate(self._parts.tokens) if text in spelled}

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str:
        """The conversation as the text that the model was trained on, for reading. `encode_chat` is the safe way to ids.

        messages: dicts with `role`, `content`, and what else the template knows, as `tool_calls`. variables: of the template, as
        `tools`. Raises TokenizerError without a template, or if it refuses the messages.
        """
        return self._template.render(_checked(messages), add_generation_prompt, variables)

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> list[int]:
        """Token ids of the conversation: the template's own control tokens are recognised, those in messages are plain text.

        Where neither messages nor variables contain a control token's text, equal to encoding the rendered text with
        `parse_special`. messages, variables: as in `apply_chat_template`. continues: end with the last message's text, so that the
        model goes on with it; white space behind it stays if the template keeps it.
        """
        messages, given = _checked(messages), dict(variables or {})
        template = self._template
        end = _unused_character([template.source, *(text for text, _ in _texts_in([messages, given]))])
        if continues:
            messages[-1]["content"] = f"{messages[-1]['content']}{end} "
            add_generation_prompt = False
        texts = list(_texts_in([messages, given]))
        if key := next((key for key, is_key in texts if is_key and self._control_finder.search(key, 0)), None):
            raise TokenizerError(f"the name {quoted(key)} is written like a control token; choose another")
        mark = _unused_character([template.source, *(text for text, _ in texts)])

        def rendered(change: Callable[[str], str]) -> str:
            text = template.render(_map_contents(messages, change), add_generation_prompt, _map_texts(given, change))
            return _until(text, end) if continues else text

        # A control token's text inside a message is broken in two while the template renders, and healed before encoding.
        text = rendered(lambda content: self._break_control(content, mark))
        found = self._find_control(text)
        # Templates can cut and paste messages, so see whether the same tokens come without any of their characters there.
        if any(not self._control_marks.isdisjoint(content) for content, is_key in texts if not is_key):
            table = {ord(char): mark for char in self._control_marks}
            without = self._find_control(rendered(lambda content: content.translate(table)))
            if [token for _, _, token in found] != [token for _, _, token in without]:
                raise TokenizerError("the chat template makes control tokens out of a message's text; use --raw for such messages")
        if mark not in text:
            return self._encode_parsed(text, found)
        marks_before = [0, *itertools.accumulate(map(mark.__eq__, text))]
        healed = [(start - marks_before[start], end - marks_before[end], token) for start, end, token in found]
        return self._encode_parsed(text.replace(mark, ""), healed)

    @cached_property
    def _template(self) -> "ChatTemplate":
        from cpuspec.chat_template import ChatTemplate

        if self._parts.chat_template is None:
            raise TokenizerError("this model has no chat template; give it a raw prompt (--raw), or use an instruct model")
        return ChatTemplate(self._parts.chat_template, self._parts.template_variables)

    def _text(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is outside of the vocabulary of {self.vocab_size}")
        tokens = self._parts.tokens
        # Models may have more rows than tokens, for alignment.
        return tokens[token_id] if token_id < len(tokens) else None

    def _bytes_of(self, token_id: int, text: str) -> bytes:
        """The bytes that a token of this spelling adds to a text."""
        if token_id in self._parts.literal:
            return text.encode()
        if self._parts.byte_level:
            # A piece with a character outside of the alphabet stands for itself, as in the tokenizers library.
            try:
                return text.translate(_LATIN1_OF).encode("latin-1")
            except UnicodeEncodeError:
                return text.encode()
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace(_SPACE, " ").encode()

    def _find_control(self, text: str) -> list[tuple[int, int, int]]:
        """Control tokens in `text`: (start, end, id) with the white space that the token swallows."""
        found: list[tuple[int, int, int]] = []
        at = 0
        while span := self._control_finder.search(text, at):
            start, end = span
            token = self._control[text[start:end]]
            while token.swallows_left and start > at and text[start - 1].isspace():
                start -= 1
            while token.swallows_right and end < len(text) and text[end].isspace():
                end += 1
            found.append((start, end, token.id))
            at = end
        return found

    def _encode_parsed(self, text: str, control: list[tuple[int, int, int]]) -> list[int]:
        ids: list[int] = []
        at = 0
        for start, end, token in control:
            ids += self._encode_plain(text[at:start], at == 0)
            ids.append(token)
            at = end
        ids += self._encode_plain(text[at:], at == 0)
        return ids

    def _encode_plain(self, text: str, first: bool) -> list[int]:
        if not text:
            return []
        core = self._parts.core if first else self._parts.later_core
        if surrogate := _SURROGATE.search(text):
            raise TokenizerError(f"the text is not Unicode: lone surrogate {surrogate[0]!r}; decode its bytes as UTF-8 first")
        with _library_errors("this text cannot be encoded"):
            return core(text)

    def _break_control(self, content: str, mark: str) -> str:
        pieces = []
        at = 0
        # Goes on right behind the break: another token may begin inside the broken one.
        while span := self._control_finder.search(content, at):
            pieces += [content[at : span[0] + 1], mark]
            at = span[0] + 1
        return "".join([*pieces, content[at:]])


class StreamDecoder:
    """Turns ids into text as they arrive, never half a character.

    What all `push` calls and `finish` return, joined, is `decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, strips_first_space: bool, shown: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = shown
        self._strip = strips_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._between_characters = not strips_first_space  # and nothing is to be stripped

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; "" while a character is still missing bytes, or for a skipped token."""
        tokenizer = self._tokenizer
        if self._between_characters and (whole := tokenizer._whole.get(token_id)) is not None:
            return whole
        if tokenizer.is_special(token_id):
            text = tokenizer._text(token_id)
            hidden = text is None or (self._skip_special and token_id not in self._shown)
            data = b"" if hidden or text is None else text.encode()
        else:
            data = tokenizer.token_bytes(token_id)
            with contextlib.suppress(UnicodeDecodeError):
                tokenizer._whole[token_id] = data.decode()
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        shown = self._utf8.decode(data)
        self._between_characters = not self._strip and not self._utf8.getstate()[0]
        return shown

    def finish(self) -> str:
        """What an unfinished character at the end becomes. The decoder is as new afterwards, in the middle of a text."""
        self._between_characters = not self._strip
        return self._utf8.decode(b"", final=True)


def make_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a model. Raises TokenizerError if its vocabulary cannot be used."""
    vocabulary = checkpoint.vocabulary
    parts = _from_gguf(vocabulary) if isinstance(vocabulary, GgufVocabulary) else _from_hf(vocabulary)
    vocab_size = checkpoint.config.vocab_size
    if len(parts.tokens) > vocab_size:
        raise TokenizerError(f"{checkpoint.path}: the vocabulary has {len(parts.tokens)} tokens, the model rows for {vocab_size}")
    return Tokenizer(parts, vocab_size)


Core = Callable[[str], list[int]]  # text that is not empty to ids


@dataclass(frozen=True)
class _ControlToken:
    id: int
    text: str
    swallows_left: bool = False
    swallows_right: bool = False


@dataclass(frozen=True)
class _Parts:
    """A vocabulary, read and checked: what `Tokenizer` is made of."""

    core: Core  # knows no control tokens
    later_core: Core  # the same for text behind a control token
    middle_core: Core  # the same for text that goes on from other text
    tokens: tuple[str | None, ...]  # by id
    special: frozenset[int]
    control: tuple[_ControlToken, ...]  # those that `parse_special` recognises
    literal: frozenset[int]  # user defined: their text stands for itself
    byte_level: bool  # pieces spell bytes in GPT-2's alphabet; else words with ▁ for a space
    strips_first_space: bool
    bos_id: int | None
    eos_ids: frozenset[int]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    chat_template: str | None
    template_variables: dict[str, str]


def _from_gguf(vocabulary: GgufVocabulary) -> _Parts:
    tokens = vocabulary.tokens
    if not 0 < len(tokens) <= _MOST_TOKENS:
        raise TokenizerError(f"the vocabulary has {len(tokens)} tokens; wanted 1 to {_MOST_TOKENS}")
    if len(vocabulary.token_types) != len(tokens):
        raise TokenizerError(f"the vocabulary has {len(vocabulary.token_types)} token types; wanted {len(tokens)}, one per token")
    if len(set(tokens)) != len(tokens):
        raise TokenizerError(f"the vocabulary has {quoted(Counter(tokens).most_common(1)[0][0])} more than once")
    types = list(vocabulary.token_types)
    for i, token in enumerate(tokens):
        if token[:1] == "<" and _is_control_by_name(token, types[i]):
            types[i] = _CONTROL
    vocabulary = replace(vocabulary, token_types=tuple(types))
    for name in ("bos_id", "eos_id", "unk_id", "pad_id", "eot_id"):
        value = getattr(vocabulary, name)
        if value is not None and not 0 <= value < len(tokens):
            raise TokenizerError(f"{name} is {value}; wanted an id from 0 to {len(tokens) - 1}")
    for name, wanted, value in (("BOS", vocabulary.add_bos, vocabulary.bos_id), ("EOS", vocabulary.add_eos, vocabulary.eos_id)):
        if wanted and value is None:
            raise TokenizerError(f"the file asks for {name} around every text and does not say which token that is")
    if vocabulary.model == "gpt2":
        core = middle_core = _byte_level_core(vocabulary)
    elif vocabulary.model == "llama":
        core, middle_core = _sentencepiece_cores(vocabulary)
    else:
        raise TokenizerError(f"the vocabulary's model is {quoted(vocabulary.model)}; known: gpt2, llama")
    control = tuple(_ControlToken(i, tokens[i]) for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN))
    ends = {token.id for token in control if token.text in _END_NAMES} | {vocabulary.eos_id, vocabulary.eot_id}
    named = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "unk": vocabulary.unk_id, "pad": vocabulary.pad_id}
    return _Parts(
        core=core,
        later_core=core,
        middle_core=middle_core,
        tokens=tokens,
        special=frozenset(i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN, _UNUSED)),
        control=control,
        literal=frozenset(i for i, kind in enumerate(types) if kind == _USER_DEFINED),
        byte_level=vocabulary.model == "gpt2",
        strips_first_space=vocabulary.model == "llama" and vocabulary.add_space_prefix,
        bos_id=vocabulary.bos_id,
        eos_ids=frozenset(end for end in ends if end is not None),
        prefix=(vocabulary.bos_id,) if vocabulary.add_bos and vocabulary.bos_id is not None else (),
        suffix=(vocabulary.eos_id,) if vocabulary.add_eos and vocabulary.eos_id is not None else (),
        chat_template=vocabulary.chat_template,
        template_variables={f"{name}_token": "" if value is None else tokens[value] for name, value in named.items()},
    )


class _Finder:
    """Finds any of some texts, the longest where several begin. A place costs no more for thousands of texts than for one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(filter(None, texts))
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            if len(text) > _LONGEST_PIECE:
                raise TokenizerError(
                    f"the token {quoted(text)} has {len(text)} characters; at most {_LONGEST_PIECE} are searched for"
                )
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {head: sorted(found, reverse=True) for head, found in lengths.items()}
        firsts = re.escape("".join({text[0] for text in self._texts}))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def search(self, text: str, at: int) -> tuple[int, int] | None:
        """(start, end) of the first one from `at` on."""
        while first := self._first.search(text, at):
            start = first.start()
            for head in (text[start : start + 2], text[start]):
                for length in self._lengths.get(head, ()):
                    if start + length <= len(text) and text[start : start + length] in self._texts:
                        return start, start + length
            at = start + 1
        return None

    def split(self, text: str) -> Iterator[tuple[str, str]]:
        """(text before it, the one found), in order; at last the rest and ""."""
        at = 0
        while span := self.search(text, at):
            yield text[at : span[0]], text[span[0] : span[1]]
            at = span[1]
        yield text[at:], ""


def _is_control_by_name(token: str, kind: int) -> bool:
    """Some files call the tokens that end a turn normal ones."""
    if not _LOOKS_LIKE_CONTROL.fullmatch(token):
        return False
    return kind == _USER_DEFINED or (kind == _NORMAL and token in _END_NAMES)


def _byte_level_core(vocabulary: GgufVocabulary) -> Core:
    from tokenizers import Regex, normalizers, pre_tokenizers

    pre = _PRE.get(vocabulary.pre)
    if pre is None:
        named = (
            f"names the pre-tokenizer {quoted(vocabulary.pre)}" if vocabulary.pre else "names no pre-tokenizer; convert it again"
        )
        raise TokenizerError(f"the file {named}; known: {', '.join(sorted(_PRE))}")
    ids = dict(zip(vocabulary.tokens, itertools.count()))
    for number, merge in enumerate(vocabulary.merges):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise TokenizerError(f"merge {number} is {quoted(merge)}; wanted two pieces with a space between them")
        if left + right not in ids:
            raise TokenizerError(f"merge {number} is {quoted(merge)}, but the vocabulary has no token {quoted(left + right)}")
    # Without control tokens, so that no merge can lead to one.
    for token, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True):
        if kind not in (_NORMAL, _USER_DEFINED) or not token:
            del ids[token]
    pairs = BytePairs(ids, merge_order(vocabulary.merges, ids), pre.ignore_merges)
    normalizer = normalizers.NFC() if pre.nfc else None
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    words = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    whole = _Finder(vocabulary.tokens[i] for i, kind in enumerate(vocabulary.token_types) if kind == _USER_DEFINED)

    def encode(text: str) -> list[int]:
        found: list[int] = []
        for between, token in whole.split(text):
            if between:
                for word, _ in words.pre_tokenize_str(normalizer.normalize_str(between) if normalizer else between):
                    found += pairs.encode(word)
            if token:
                found.append(ids[token])
        return found

    return encode


def _sentencepiece_cores(vocabulary: GgufVocabulary) -> tuple[Core, Core]:
    """For a text, and for one that goes on from another.

    SentencePiece's BPE keeps scores instead of merges: of all neighbours that join to a piece, those of the best piece go first
    (its bpe_model.cc).
    """
    tokens, types, scores = vocabulary.tokens, vocabulary.token_types, vocabulary.scores
    if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
        raise TokenizerError(f"the vocabulary has {len(tokens)} tokens and {len(scores)} scores; wanted as many, all finite")
    if longest := next((t for t in tokens if len(t) > _LONGEST_PIECE), None):
        raise TokenizerError(f"the vocabulary has a piece of {len(longest)} characters; at most {_LONGEST_PIECE} are read")
    normal = {token: i for i, token in enumerate(tokens) if types[i] == _NORMAL and token}
    ranks = {token: -scores[i] for token, i in normal.items()}
    pairs = BytePairs(normal, lambda left, right: ranks.get(left + right), whole_words=False)
    # Where no piece goes on behind a word's end, words are merged one by one, and those met before are remembered.
    across = any(re.search(f"[^{_SPACE}]{_SPACE}", token) for token in normal)
    words = re.compile(".+" if across else f"{_SPACE}*[^{_SPACE}]+|{_SPACE}+", re.DOTALL)
    others = {token: i for i, token in enumerate(tokens) if token and types[i] in (_USER_DEFINED, _BYTE)}
    byte_ids: dict[int, int] = {}
    for byte in range(256):
        token_id = others.get(name := f"<0x{byte:02X}>", normal.get(name))
        if token_id is not None:
            byte_ids[byte] = token_id
    # Stands for characters that even bytes cannot spell; a control token must not come out of text this way.
    unknown = vocabulary.unk_id
    if unknown is not None and (types[unknown] not in (_NORMAL, _UNKNOWN) or not tokens[unknown]):
        unknown = None
    whole = _Finder(token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED)

    def spell(characters: Iterable[str]) -> list[int]:
        """Ids of characters that are no pieces."""
        found: list[int] = []
        for char in characters:
            data = char.encode()
            if char in others:
                found.append(others[char])
            elif all(byte in byte_ids for byte in data):
                found += [byte_ids[byte] for byte in data]
            elif unknown is not None and found[-1:] != [unknown]:
                found.append(unknown)
        return found

    def encode(text: str, before: str) -> list[int]:
        found: list[int] = []
        for between, token in whole.split(text):
            if between:
                for known, run in itertools.groupby(before + between.replace(" ", _SPACE), normal.__contains__):
                    if known:
                        for word in words.findall("".join(run)):
                            found += pairs.encode(word)
                    else:
                        found += spell(run)
            if token:
                found.append(others[token])
        return found

    before = _SPACE if vocabulary.add_space_prefix else ""
    return lambda text: encode(text, before), lambda text: encode(text, "")


def _from_hf(files: HfTokenizerFiles) -> _Parts:
    read = read_tokenizer_json(files.tokenizer_json)
    config = read_json(files.directory / "tokenizer_config.json")
    generation = read_json(files.directory / "generation_config.json")
    control, literal = [], []
    for token in read.added:
        if token.special or _LOOKS_LIKE_CONTROL.fullmatch(token.content):
            control.append(_ControlToken(token.id, token.content, token.lstrip, token.rstrip))
        else:
            literal.append(token)

    variables = _special_texts(files, config)
    ids = {text: token_id for token_id, text in enumerate(read.tokens) if text}
    bos_id = ids.get(variables["bos_token"])
    eos_id = ids.get(variables["eos_token"])
    prefix, suffix = read.prefix, read.suffix
    generic = config.get("tokenizer_class") in (None, "PreTrainedTokenizerFast", "TokenizersBackend")
    # Classes of their own rebuild the post-processor from these flags; the generic one takes the file's.
    if not generic and isinstance(config.get("add_bos_token"), bool):
        prefix = (bos_id,) if config["add_bos_token"] and bos_id is not None else ()
    if not generic and isinstance(config.get("add_eos_token"), bool):
        suffix = (eos_id,) if config["add_eos_token"] and eos_id is not None else ()
    listed = generation.get("eos_token_id")
    ends = [eos_id, *(listed if isinstance(listed, list) else [listed]), *(t.id for t in control if t.text in _END_NAMES)]
    eos_ids = frozenset(end for end in ends if type(end) is int and 0 <= end < len(read.tokens))
    core, later_core, middle_core = _library_cores(read, {token.text for token in control}, eos_ids, files.tokenizer_json)
    return _Parts(
        core=core,
        later_core=later_core,
        middle_core=middle_core,
        tokens=read.tokens,
        special=frozenset(token.id for token in control),
        control=tuple(control),
        literal=frozenset(token.id for token in literal),
        byte_level=read.byte_level,
        strips_first_space=read.strips_first_space,
        bos_id=bos_id,
        eos_ids=eos_ids,
        prefix=prefix,
        suffix=suffix,
        chat_template=_read_template(files.directory, config),
        template_variables=variables,
    )


def _library_cores(read: TokenizerJson, control: set[str], eos_ids: frozenset[int], path: Path) -> tuple[Core, Core, Core]:
    """For a text, for text behind a control token, and for text that goes on from other text.

    The library never sees control tokens, apart from the one for unknown characters, which text cannot spell. Other tokens keep
    their ids by being in the model's vocabulary.
    """
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as LibraryTokenizer

    vocab = {text: token_id for text, token_id in read.vocab.items() if text not in control}
    unknown = read.unk_token
    if unknown in control and unknown in read.vocab:
        token_id = read.vocab[unknown]
        # A character that the vocabulary lacks must not end the text.
        unknown = None if token_id in eos_ids else f"\uffff{unknown}"
        if unknown:
            vocab[unknown] = token_id
    merges = [pair for pair in read.merges if "".join(pair) not in control]
    literal = [token for token in read.added if token.content not in control]
    first = read.pre_tokenizer
    # "first" means the beginning of the whole input, which the library gets to see in pieces.
    later = [step | {"prepend_scheme": "never"} if step.get("prepend_scheme") == "first" else step for step in first]
    no_space: dict[str, dict[str, Any]] = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
    middle = [step | no_space.get(step["type"], {}) for step in first]
    no_prefix = [step for step in read.normalizer if step["type"] != "Prepend"]

    with _library_errors(f"{path} cannot be used"):
        model = models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=unknown,
            fuse_unk=read.fuse_unk,
            byte_fallback=read.byte_fallback,
            ignore_merges=read.ignore_merges,
        )
        whole = [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=False,
            )
            for token in literal
        ]
        cores: dict[str, Core] = {}  # by their steps, which most files have the same for all three
        steps = []
        for normalizer, pre_tokenizer in ((read.normalizer, first), (read.normalizer, later), (no_prefix, middle)):
            parts = {
                "normalizer": {"type": "Sequence", "normalizers": normalizer},
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizer},
                "model": {"type": "BPE", "vocab": {}, "merges": []},
            }
            steps.append(json.dumps(parts))
            if steps[-1] not in cores:
                library = LibraryTokenizer.from_str(steps[-1])
                library.model = model
                library.add_tokens(whole)
                cores[steps[-1]] = _library_core(library, read.growth)
    return cores[steps[0]], cores[steps[1]], cores[steps[2]]


def _library_core(library: "tokenizers.Tokenizer", growth: float) -> Core:
    def encode(text: str) -> list[int]:
        if growth > _ORDINARY_GROWTH and len(text) * growth > _MOST_GROWN:
            raise TokenizerError(
                f"it has {len(text)} characters, and the tokenizer's file may make {growth:.0f} of each; shorten it"
            )
        return library.encode(text, add_special_tokens=False).ids

    return encode


def _special_texts(files: HfTokenizerFiles, config: dict[str, Any]) -> dict[str, str]:
    special = read_json(files.directory / "special_tokens_map.json")
    texts = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name) or special.get(name) or ""
        value = value.get("content", "") if isinstance(value, dict) else value
        texts[name] = _unicode(value, name) if isinstance(value, str) else ""
    return texts


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if exists(file):
        return read_text(file)
    template = config.get("chat_template") or read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None)
    return _unicode(template, "chat_template") if isinstance(template, str) else None


def _unicode(text: str, name: str) -> str:
    if surrogate := _SURROGATE.search(text):
        raise TokenizerError(f"{name} is not Unicode: lone surrogate {surrogate[0]!r}")
    return text


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    from cpuspec.chat_template import ROLES

    if not messages:
        raise TokenizerError("there are no messages; wanted at least one")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("content", ""), str | None):
            raise TokenizerError(f"message {number} is {quoted(message)}; wanted a mapping with role and content as texts")
        # A role is printed between control marks by some templates, so it cannot be just any text.
        if message.get("role") not in ROLES:
            raise TokenizerError(f"message {number} has the role {quoted(message.get('role'))}; wanted one of {', '.join(ROLES)}")
        for key, value in message.items():
            if not isinstance(value, str | None) and key != "tool_calls":
                raise TokenizerError(f"message {number}: {key} is {type(value).__name__}; wanted a text")
    return [dict(message) for message in messages]


def _until(text: str, end: str) -> str:
    """A rendered conversation up to a mark behind its last message's text. The mark had a space behind it.

    Where the template has trimmed that, it trims other white space before it, too. Source: transformers' `render_jinja_template`.
    """
    before, mark, behind = text.rpartition(end)
    if not mark:
        raise TokenizerError("the chat template leaves out the last message's text, so that nothing can continue it")
    return before if behind.startswith(" ") else before.rstrip()


def _unused_character(texts: Sequence[str]) -> str:
    """A private-use character that none of the texts contains."""
    used = set().union(*texts)
    return next(char for char in map(chr, range(0x10FFFD, 0xF0000, -1)) if char not in used)


def _map_contents(messages: Sequence[Message], change: Callable[[str], str]) -> list[dict[str, Any]]:
    return [{k: v if k == "role" else _map_texts(v, change) for k, v in message.items()} for message in messages]


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with other texts in it; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_texts(item, change) for key, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, list | tuple) else value


def _texts_in(value: Any, depth: int = 0) -> Iterator[tuple[str, bool]]:
    """Every text in a value of JSON, and whether it is a key."""
    if depth > _DEEPEST:
        raise TokenizerError(f"the messages or the tools are nested deeper than {_DEEPEST}")
    if isinstance(value, str):
        yield value, False
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key), True
            yield from _texts_in(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item, depth + 1)


@contextlib.contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """The library's own errors, and panics of the Rust code in it, as TokenizerError."""
    try:
        yield
    except Exception as error:
        raise TokenizerError(f"{what}: {in_one_line(str(error))}") from error
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise TokenizerError(f"{what}: {in_one_line(str(error))}") from error
        raise


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
# The same for `str.translate`, to characters that latin-1 encodes as the byte; others of its range become one that it lacks.
_LATIN1_OF = dict.fromkeys(range(256), "\uffff") | {ord(char): chr(byte) for char, byte in _BYTE_OF.items()}

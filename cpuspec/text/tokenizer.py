"""Text to token ids and back, from a GGUF file's own vocabulary or a Hugging Face tokenizer.json.

The `tokenizers` library splits text into words. It or `byte_pairs` merges each word, with a vocabulary that lacks control tokens.
This module alone decides where a text becomes control tokens, so a user's text cannot smuggle them in. It knows ids and no model.
"""

import codecs
import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cpuspec.checkpoints.checkpoint import Checkpoint, GgufVocabulary
from cpuspec.errors import TokenizerError
from cpuspec.text.gguf_vocabulary import gguf_parts
from cpuspec.text.hf_vocabulary import hf_parts
from cpuspec.text.parts import Finder, Parts, library_errors
from cpuspec.text.tokenizer_json import SURROGATE, quoted

if TYPE_CHECKING:
    from cpuspec.text.chat_template import ChatTemplate

_STRAY_BYTES = re.compile("([\udc80-\udcff]+)")  # bytes that are no UTF-8, as "surrogateescape" decodes them
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"
_DEEPEST = 50  # levels of lists and dicts in messages and variables of a chat template

Message = Mapping[str, Any]


class Tokenizer:
    """Encodes and decodes with one vocabulary. Made by `make_tokenizer`; safe to use from several threads.

    Special tokens are control tokens and those that a vocabulary marks as unknown or unused. By default they decode to nothing, and
    a text becomes one only where the caller asks for it.
    """

    def __init__(self, parts: Parts, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self._parts = parts
        self._special_ids = frozenset(parts.special)
        self._control = {token.text: token for token in parts.control if token.text}
        self._control_finder = Finder(self._control)
        self._control_marks = {char for char in "".join(self._control) if not char.isalnum() and not char.isspace()}
        self._templates: dict[str, ChatTemplate] = {}  # those used so far, by their source
        self._whole: dict[int, str] = {}  # text of the tokens met so far that are text and whole characters

    @property
    def suffix(self) -> Sequence[int]:
        """The tokens with which the model's file wants a text to end."""
        return self._parts.suffix

    @property
    def has_chat_template(self) -> bool:
        return bool(self._parts.chat_templates)

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; None without one."""
        return self.chat_template_for({})

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The sources of all chat templates, by name."""
        return self._parts.chat_templates

    def chat_template_for(self, variables: Mapping[str, Any]) -> str | None:
        """The source of the template for a conversation with these variables: a model may have others for tools and documents."""
        templates = self._parts.chat_templates
        names = ["default", "tool_use", *templates]
        names = ["rag"] * bool(variables.get("documents")) + names
        names = ["tool_use"] * bool(variables.get("tools")) + names
        return next((templates[name] for name in names if name in templates), None)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        add_special: put the tokens around it that the model's file asks for (as BOS), if any.
        parse_special: text like `<|im_end|>` becomes that control token; otherwise it is encoded as the characters it consists of.
        """
        ids = self._encode_parsed(text, self._find_control(text) if parse_special else [])
        return [*self._parts.prefix, *ids, *self._parts.suffix] if add_special else ids

    def encode_prompt(self, text: str, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Token ids of a raw prompt. An empty prompt becomes BOS, if the vocabulary has one.

        parse_special, add_special: as in `encode`. A text that already begins with the tokens of the file gets no second ones.
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

    def stream(self, skip_special: bool = True, shown: Set[int] = frozenset(), after: int | None = None) -> "StreamDecoder":
        """A decoder for ids that arrive one by one.

        shown: special tokens that it shows all the same. after: the token that they go on from. Text that goes on from text keeps
        its first space, which a new text of SentencePiece does not have.
        """
        strips = self._parts.strips_first_space and (after is None or self.is_special(after))
        return StreamDecoder(self, skip_special, strips, shown | self._parts.shown)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; b"" for special tokens. Raises TokenizerError for an id out of range."""
        text = self._text(token_id)
        return b"" if text is None or token_id in self._special_ids else self._bytes_of(token_id, text)

    def is_special(self, token_id: int) -> bool:
        """Whether the token carries control, not text. Raises TokenizerError for an id out of range."""
        return self._text(token_id) is None or token_id in self._special_ids

    def turns(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Where the last message of a user and the answer begin in a chat's prompt, each as the number of tokens before it.

        A later prompt of the chat may go another way there: the message is edited, or the answer comes without its thinking.
        """
        special = [at for at, token_id in enumerate(ids) if token_id in self._special_ids]

        def begun_by(*roles: bytes) -> list[int]:
            texts = [b"".join(map(self.token_bytes, ids[at + 1 : at + 5])).lstrip().lower() for at in special]
            return [at for at, text in zip(special, texts, strict=True) if text.startswith(roles)]

        answers, users = begun_by(b"assistant", b"model") or special, begun_by(b"user")
        return tuple(sorted({starts[-1] for starts in (users, answers) if starts}))

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
                    with library_errors("this text cannot be encoded"):
                        ids += core(span)
                core = self._parts.middle_core
        return ids

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that the model's file puts before every text."""
        return self._parts.prefix

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        """Ids of the tokens of single bytes."""
        spelled = BYTE_OF if self._parts.byte_level else {f"<0x{byte:02X}>": byte for byte in range(256)}
        return {spelled[text]: token_id for token_id, text in enumerate(self._parts.tokens) if text in spelled}

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str:
        """The conversation as the text that the model was trained on, for reading. `encode_chat` is the safe way to ids.

        messages: dicts with `role`, `content`, and what else the template knows, as `tool_calls`. variables: of the template, as
        `tools`. Raises TokenizerError without a template, or if it refuses the messages.
        """
        return self._template(variables or {}).render(_checked(messages), add_generation_prompt, variables)

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
        model goes on with it; white space after it stays if the template keeps it.
        """
        messages, given = _checked(messages), dict(variables or {})
        template = self._template(given)
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
        return self._encode_healed(text, found, mark)

    def encode_filled(self, form: str, texts: Mapping[str, str]) -> list[int]:
        """Token ids of a form whose places, as {query}, are filled by texts: only those of the form are control tokens."""
        mark = _unused_character([form, *texts.values()])
        pieces = re.split(f"{{({'|'.join(map(re.escape, texts))})}}", form)
        filled = [self._break_control(texts[one], mark) if at % 2 else one for at, one in enumerate(pieces)]
        text = "".join(filled)
        return [*self._parts.prefix, *self._encode_healed(text, self._find_control(text), mark), *self._parts.suffix]

    @property
    def can_switch_thinking(self) -> bool:
        """Whether the chat template has a variable that switches reasoning on or off."""
        return self.has_chat_template and self._template({}).can_switch_thinking

    def _template(self, variables: Mapping[str, Any]) -> "ChatTemplate":
        from cpuspec.text.chat_template import ChatTemplate

        if (source := self.chat_template_for(variables)) is None:
            raise TokenizerError("this model has no chat template; give it a raw prompt (--raw), or use an instruct model")
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, self._parts.template_variables)
        return self._templates[source]

    def _text(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is outside of the vocabulary of {self.vocab_size}")
        tokens = self._parts.tokens
        # Models may have more rows than tokens, for alignment.
        return tokens[token_id] if token_id < len(tokens) else None

    def _bytes_of(self, token_id: int, text: str) -> bytes:
        """The bytes that a token of this spelling adds to a text."""
        if token_id in self._parts.literal:
            return text.encode(errors="surrogateescape")
        if self._parts.byte_level:
            # A piece with a character outside of the alphabet stands for itself, as in the tokenizers library.
            try:
                return text.translate(_LATIN1_OF).encode("latin-1")
            except UnicodeEncodeError:
                return text.encode(errors="surrogateescape")
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace(_SPACE, " ").encode(errors="surrogateescape")

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
        if surrogate := SURROGATE.search(text):
            raise TokenizerError(f"the text is not Unicode: lone surrogate {surrogate[0]!r}; decode its bytes as UTF-8 first")
        with library_errors("this text cannot be encoded"):
            return core(text)

    def _encode_healed(self, text: str, control: list[tuple[int, int, int]], mark: str) -> list[int]:
        """Ids of a text with these control tokens, without the marks of `_break_control`."""
        if mark not in text:
            return self._encode_parsed(text, control)
        marks_before = [0, *itertools.accumulate(map(mark.__eq__, text))]
        healed = [(start - marks_before[start], end - marks_before[end], token) for start, end, token in control]
        return self._encode_parsed(text.replace(mark, ""), healed)

    def _break_control(self, content: str, mark: str) -> str:
        pieces = []
        at = 0
        # Goes on right after the break: another token may begin inside the broken one.
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
            data = b"" if hidden or text is None else text.encode(errors="surrogateescape")
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
        """The text of an unfinished character at the end. Afterwards the decoder starts anew, in the middle of a text."""
        self._between_characters = not self._strip
        return self._utf8.decode(b"", final=True)


def make_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a model. Raises TokenizerError if its vocabulary cannot be used."""
    vocabulary = checkpoint.vocabulary
    vocab_size = checkpoint.config.vocab_size
    parts = gguf_parts(vocabulary) if isinstance(vocabulary, GgufVocabulary) else hf_parts(vocabulary, vocab_size)
    if len(parts.tokens) > vocab_size:
        raise TokenizerError(f"{checkpoint.path}: the vocabulary has {len(parts.tokens)} tokens, the model rows for {vocab_size}")
    return Tokenizer(parts, vocab_size)


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    from cpuspec.text.chat_template import ROLES

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
    """A rendered conversation up to a mark after its last message's text. The mark had a space after it.

    Where the template has trimmed that, it trims other white space before it, too. Source: transformers' `render_jinja_template`.
    """
    before, mark, after = text.rpartition(end)
    if not mark:
        raise TokenizerError("the chat template leaves out the last message's text, so that nothing can continue it")
    return before if after.startswith(" ") else before.rstrip()


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


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
# The same for `str.translate`, to characters that latin-1 encodes as the byte; others of its range become one that it lacks.
_LATIN1_OF = dict.fromkeys(range(256), "\uffff") | {ord(char): chr(byte) for char, byte in BYTE_OF.items()}

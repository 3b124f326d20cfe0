"""The parts of a tokenizer, whatever file they came from, and helpers that the readers of these files share."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cpuspec.errors import TokenizerError, in_one_line
from cpuspec.text.tokenizer_json import SURROGATE, quoted

# Token types of a GGUF vocabulary.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
HIDDEN = "\uffff"  # begins texts that no text contains, as the library takes it
LONGEST_PIECE = 1024
LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)

Core = Callable[[str], list[int]]  # text that is not empty to ids

# Tokens that end a turn or a text, under the names that model families gave them (llama.cpp collects the same by their texts). They
# are control tokens even where a file calls them ordinary ones.
_ENDS = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"),
        *("<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *("<|flush|>", "<|calls|>", "<turn|>", "<|tool_response>", "[e~["),
    )
)
# The same, where the file says that they are no text: `</s>` is HTML too. The last one stands between two files of code.
_ENDS_IF_CONTROL = frozenset(
    (
        *("</s>", "<eos>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)
# In Harmony and Solar `<|end|>` ends a message and not the answer. Their other control tokens are shown as text.
_GO_ON = (frozenset(("<|return|>", "<|call|>")), frozenset(("<|call|>", "<|flush|>")), frozenset(("<|calls|>", "<|flush|>")))
_SHOWN = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))


@dataclass(frozen=True)
class ControlToken:
    """A token that carries control, and the white space that it swallows."""

    id: int
    text: str
    swallows_left: bool = False
    swallows_right: bool = False


@dataclass(frozen=True)
class Parts:
    """A vocabulary, read and checked: what `Tokenizer` is made of."""

    core: Core  # knows no control tokens
    later_core: Core  # the same for text after a control token
    middle_core: Core  # the same for text that goes on from other text
    tokens: tuple[str | None, ...]  # by id; bytes of them that are no UTF-8 are lone surrogates ("surrogateescape")
    special: frozenset[int]
    control: tuple[ControlToken, ...]  # those that `parse_special` recognises
    literal: frozenset[int]  # user defined: their text stands for itself
    byte_level: bool  # pieces spell bytes in GPT-2's alphabet; else words with ▁ for a space
    strips_first_space: bool
    bos_id: int | None
    eos_ids: frozenset[int]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    chat_templates: Mapping[str, str]  # by name; none of them is empty
    template_variables: dict[str, str]
    shown: frozenset[int] = field(default_factory=frozenset)  # special tokens that are part of an answer's text


def is_control(text: str, control: bool, user_defined: bool = False) -> bool:
    """Whether a token is control and not text. control, user_defined: its type in the file, which some files get wrong for ends of
    turns.
    """
    return control or text in _ENDS or (user_defined and bool(LOOKS_LIKE_CONTROL.fullmatch(text)))


def end_ids(control: Mapping[str, int], named: Iterable[int | None]) -> frozenset[int]:
    """The tokens that end an answer. control: ids of control tokens by their texts. named: those that the file names as ends."""
    found = {token_id for text, token_id in control.items() if text in _ENDS or text in _ENDS_IF_CONTROL}
    found |= {token_id for token_id in named if token_id is not None}
    if any(both <= control.keys() for both in _GO_ON):
        found.discard(control.get("<|end|>", -1))
    return frozenset(found)


def shown_ids(control: Mapping[str, int]) -> frozenset[int]:
    """The control tokens that are part of an answer's text."""
    return frozenset(token_id for text, token_id in control.items() if text in _SHOWN)


def checked_unicode(text: str, name: str) -> str:
    """The text. Raises TokenizerError, naming it, if it is not Unicode."""
    if surrogate := SURROGATE.search(text):
        raise TokenizerError(f"{name} is not Unicode: lone surrogate {surrogate[0]!r}")
    return text


class Finder:
    """Finds any of some texts, the longest where several begin. A place costs no more for thousands of texts than for one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(filter(None, texts))
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            if len(text) > LONGEST_PIECE:
                raise TokenizerError(
                    f"the token {quoted(text)} has {len(text)} characters; at most {LONGEST_PIECE} are searched for"
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


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn errors of the `tokenizers` library, and panics of its Rust code, into TokenizerError."""
    try:
        yield
    except Exception as error:
        raise TokenizerError(f"{what}: {in_one_line(str(error))}") from error
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise TokenizerError(f"{what}: {in_one_line(str(error))}") from error
        raise

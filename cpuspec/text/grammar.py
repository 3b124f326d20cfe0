"""Grammars that answers keep to: JSON schemas, regular expressions, choices, and Lark or GBNF text, compiled by `llguidance`.

A grammar comes from strangers. Its text, its size and the work of a step are limited, a child process with limits compiles it
first, and nothing here reads a file or an address. Where a text is forced, llguidance allows only the tokens that the tokenizer
itself makes of it, so that they are known without a forward (its docs/fast_forward.md); elsewhere it allows every token that some
text of the grammar goes on with.
"""

import json
import re
import subprocess
from bisect import bisect_left
from collections.abc import Sequence, Set
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from cpuspec.errors import ConfigError, CpuspecError, in_one_line
from cpuspec.formats.tensor import U8
from cpuspec.platform import SYSTEM
from cpuspec.sampling import Legal
from cpuspec.sequence import Constraint, shared_prefix
from cpuspec.settings import SamplingParams
from cpuspec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_BYTES = 1 << 16  # of a grammar's text
_MOST_GBNF_BYTES, _MOST_GBNF_RULES = 1 << 14, 256  # llguidance translates GBNF in Python, in a time of their product
_MOST_TRIAL_S, _MOST_TRIAL_BYTES = 2, 1 << 30  # seconds of a processor, bytes of memory
_MOST_WAIT_S = 60  # for these on a loaded machine
_PYTHON_FAILED = (1, 2)  # an exception, a script that is not there; other exit codes are of a process that the system ended
_MOST_TRIED = 256  # grammars whose trial is remembered
_MOST_COMPILED = 32  # grammars that are kept for further requests
# Masks of a request that are kept, as bits: those of a round's draft, and more; and tokens of the paths that are their keys.
_LEAST_LEGAL, _MOST_LEGAL, _MOST_PATHS = 64, 512, 1 << 17
_REASONING = ("<think>", "</think>")
_LOOKED_BACK = 8  # tokens of a prompt's end in which the template opens reasoning
_MOST_ENCODED = 1 << 10  # bytes of a forced text that are encoded; it may have 250,000, at each step anew
_LONGEST_ERROR = 300
_LIMITS = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # of 1 to 2 kB
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class _Key(NamedTuple):
    """The text of a grammar, and its kind under the name that `llguidance.grammar_from` uses."""

    kind: str
    text: str


class Grammars:
    """Compiles the grammars of requests for one vocabulary. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: _Vocabulary | None = None
        self._compiled: dict[_Key, LLMatcher] = {}  # the latest last

    def has_compiled(self, params: SamplingParams) -> bool:
        """Whether the grammar of these params is compiled, so that `constraint` returns at once."""
        return _key(params) in self._compiled

    def constraint(self, params: SamplingParams, prompt: Sequence[int] = (), within: str = "") -> Constraint | None:
        """The constraint of a request's grammar, `min_tokens`, `allowed_token_ids` and `bad_words`; None if every token is allowed.

        prompt: token ids, whose end may open reasoning. within: the mark that ends the reasoning that the prompt has opened, if it
        is known that it has.
        Raises ConfigError for a grammar that cannot be compiled, exceeds the limits, or allows no text, and without llguidance.
        """
        reasoning = self._reasoning(prompt, within) if params.free_reasoning else None
        grammar = self._grammar(params, reasoning)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._tokenizer.eos_ids)} if params.min_tokens else set()
        bad = self._bad_words(params.bad_words)
        if not (ends or bad or params.allowed_token_ids):
            return grammar
        found = Limited(grammar, self._tokenizer.vocab_size, params.min_tokens, ends, params.allowed_token_ids, bad, reasoning)
        if found.legal(()) is None:
            raise ConfigError("no token may begin the answer: allowed_token_ids, bad_words and the grammar leave none; loosen one")
        return found

    def _bad_words(self, words: Sequence[str]) -> set[tuple[int, ...]]:
        """The tokens of each text, as it stands at a text's beginning and after a space."""
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        return {tuple(self._tokenizer.encode(text, add_special=False)) for text in texts} - {()}

    def _grammar(self, params: SamplingParams, reasoning: "Reasoning | None") -> Constraint | None:
        key = _key(params)
        if key is None:
            return None
        if self._vocabulary is None:
            self._vocabulary = _Vocabulary(self._tokenizer)
        matcher = self._compiled.pop(key, None)  # to be the latest again
        if matcher is None:
            matcher = _compile(key, self._vocabulary)
            # A grammar near the limits of a step may pass the first computation of a mask and fail the second.
            if any(GrammarConstraint(matcher, self._vocabulary).legal(()) is None for _ in range(2)):
                raise ConfigError(f"{_NAMES[key.kind]} allows no text, or is too complex to tell which; wanted one with a text")
        self._compiled[key] = matcher
        for oldest in list(self._compiled)[:-_MOST_COMPILED]:
            self._compiled.pop(oldest, None)
        found = GrammarConstraint(matcher, self._vocabulary)
        if params.grammar_trigger is not None:
            return AfterTrigger(found, params.grammar_trigger, self._tokenizer, self._vocabulary)
        return AfterReasoning(found, reasoning, self._vocabulary) if reasoning else found

    def _reasoning(self, prompt: Sequence[int], within: str) -> "Reasoning | None":
        """The tokens around the answer's reasoning; None where the answer can have none."""
        opens, closes = map(self._tokenizer.token_id, _REASONING)
        if closes is None:
            return None
        if within == _REASONING[1]:
            return Reasoning(closes)
        last = next((token for token in reversed(prompt[-_LOOKED_BACK:]) if token in (opens, closes)), None)
        if last is None:
            return None if opens is None else Reasoning(closes, opens)
        return None if last == closes else Reasoning(closes)


class Reasoning(NamedTuple):
    """The token that closes reasoning, and the one that opens it in the answer; None where the prompt has opened it."""

    closes: int
    opens: int | None = None

    def rest(self, path: Sequence[int]) -> Sequence[int] | None:
        """The path after the reasoning; None within it."""
        if self.opens is not None and (not path or path[0] != self.opens):
            return path
        return path[path.index(self.closes) + 1 :] if self.closes in path else None


class GrammarConstraint:
    """The tokens that a grammar allows in one request, after any path of its output.

    Each method depends on its path, not on earlier calls. A grammar that exceeds the limits of a step allows nothing.
    """

    def __init__(self, compiled: "LLMatcher", vocabulary: "_Vocabulary") -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._matcher = compiled.deep_copy()
        self._path: list[int] = []  # the tokens that the matcher has consumed
        self._legal: dict[tuple[int, ...], U8 | None] = {}  # by path, as bits

    def legal(self, path: Sequence[int]) -> Legal | None:
        """Which tokens may follow the path, [V]; None where nothing may, or only the end: `accepts` tells which."""
        key = tuple(path)
        if key not in self._legal:
            if len(self._legal) >= max(_LEAST_LEGAL, min(_MOST_LEGAL, _MOST_PATHS // (len(key) + 1))):
                del self._legal[next(iter(self._legal))]
            legal = self._find_legal(path)
            self._legal[key] = None if legal is None else np.packbits(legal)
        bits = self._legal[key]
        return None if bits is None else np.unpackbits(bits, count=self._vocabulary.size).view(np.bool_)

    def accepts(self, path: Sequence[int]) -> bool:
        """Whether the path is a complete text of the grammar."""
        return self._follow(path) and bool(self._matcher.is_accepting())

    def forced(self, path: Sequence[int]) -> list[int]:
        """The tokens that follow the path in every text of the grammar, as far as they are known; empty where there is a choice."""
        return self._matcher.compute_ff_tokens() if self._follow(path) else []

    def whole(self, path: Sequence[int]) -> int | None:
        """How many tokens at the path's beginning are a text of the grammar that nothing can follow; None while it goes on."""
        goes_on = self._follow(path) and (self.legal(path) is not None or not self.accepts(path))
        return None if goes_on else len(self._path)

    def _find_legal(self, path: Sequence[int]) -> Legal | None:
        if not self._follow(path):
            return None
        ends, bits = self._vocabulary.ends, np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        legal = np.unpackbits(bits, count=self._vocabulary.size, bitorder="little").view(np.bool_)
        legal &= self._vocabulary.is_text  # a grammar may name tokens by their numbers
        if self._matcher.is_error() or not legal.any():
            return None
        legal[ends] = self._matcher.is_accepting()
        return legal

    def _follow(self, path: Sequence[int]) -> bool:
        """Bring the matcher to the path; returns whether the grammar allows it."""
        wanted = list(path)
        shared = shared_prefix(self._path, wanted)
        if self._matcher.is_error() or not self._matcher.rollback(len(self._path) - shared):
            self._matcher, shared = self._compiled.deep_copy(), 0  # a matcher does not recover from an error
        new = [] if self._matcher.is_stopped() else wanted[shared:]  # free text after a whole one may be long
        self._path = wanted[: shared + (self._matcher.try_consume_tokens(new) if new else 0)]
        return len(self._path) == len(wanted) and not self._matcher.is_error()


class Limited:
    """Limits beside a grammar, or without one: a least number of tokens, tokens to choose among, and texts that never come.

    ends: tokens that end the answer, of which none is legal before it has `least` tokens, unless the grammar allows only the end.
    allowed: tokens to choose among, empty for all. bad: token ids of texts; the last one of a text is illegal after the others,
    except in the answer's reasoning, if that is given.
    """

    def __init__(
        self,
        grammar: Constraint | None,
        vocab_size: int,
        least: int = 0,
        ends: Set[int] = frozenset(),
        allowed: Sequence[int] = (),
        bad: Set[tuple[int, ...]] = frozenset(),
        reasoning: Reasoning | None = None,
    ) -> None:
        self._grammar = grammar
        self._least = least
        self._ends = [end for end in ends if end < vocab_size]
        self._free = np.ones(vocab_size, np.bool_)
        if allowed:
            self._free[:] = False
            self._free[list(allowed)] = True
        self._bad_alone = [text[0] for text in bad if len(text) == 1]
        self._bad: dict[int, list[tuple[list[int], int]]] = {}  # by the token before the last one
        for *before, last in bad:
            if before:
                self._bad.setdefault(before[-1], []).append((before, last))
        self._reasoning = reasoning

    def legal(self, path: Sequence[int]) -> Legal | None:
        """See `Constraint`."""
        legal = self._grammar.legal(path) if self._grammar else self._free
        if legal is None:
            return None
        others: Legal = legal & self._free
        if len(path) < self._least:
            others[self._ends] = False
            others = others if others.any() else legal & self._free
        if (path if self._reasoning is None else self._reasoning.rest(path)) is None:
            return others
        others[self._bad_alone] = False
        for before, token in self._bad.get(path[-1], ()) if path else ():
            if list(path[-len(before) :]) == before:
                others[token] = False
        return others if others.any() else None

    def accepts(self, path: Sequence[int]) -> bool:
        """See `Constraint`."""
        return self._grammar is not None and self._grammar.accepts(path)

    def forced(self, path: Sequence[int]) -> list[int]:
        """See `Constraint`."""
        return self._grammar.forced(path) if self._grammar and not self._bad else []


class AfterReasoning:
    """A grammar that begins after the reasoning. Reasoning may hold any token that ends no answer."""

    def __init__(self, grammar: GrammarConstraint, reasoning: Reasoning, vocabulary: "_Vocabulary") -> None:
        self._grammar = grammar
        self._reasoning = reasoning
        self._free = np.ones(vocabulary.size, np.bool_)
        self._free[vocabulary.ends] = False

    def legal(self, path: Sequence[int]) -> Legal | None:
        """See `Constraint`."""
        rest = self._reasoning.rest(path)
        if rest is None:
            return self._free
        legal = self._grammar.legal(rest)
        if self._reasoning.opens is None or path:
            return legal
        legal = np.zeros_like(self._free) if legal is None else legal.copy()
        legal[self._reasoning.opens] = True
        return legal

    def accepts(self, path: Sequence[int]) -> bool:
        """See `Constraint`."""
        rest = self._reasoning.rest(path)
        return rest is not None and self._grammar.accepts(rest)

    def forced(self, path: Sequence[int]) -> list[int]:
        """See `Constraint`."""
        rest = self._reasoning.rest(path)
        return self._grammar.forced(rest) if rest is not None and (path or self._reasoning.opens is None) else []


class AfterTrigger:
    """A grammar that holds from each trigger on, until its text is whole. Elsewhere any token is legal.

    trigger: a control token's name, or a regular expression over the answer with such names. The grammar's text begins with the
    group that matches, or after the match where there is no group.
    """

    def __init__(self, grammar: GrammarConstraint, trigger: str, tokenizer: Tokenizer, vocabulary: "_Vocabulary") -> None:
        try:
            control = tokenizer.token_id(trigger) is not None
            self._trigger = re.compile((re.escape(trigger) if control else trigger).encode())
        except (re.error, UnicodeEncodeError) as error:
            raise ConfigError(f"grammar_trigger is not a regular expression: {in_one_line(str(error), 200)}") from None
        self._grammar, self._tokenizer, self._vocabulary = grammar, tokenizer, vocabulary
        self._free = np.ones(vocabulary.size, np.bool_)
        self._names: dict[int, bytes] = {}  # what tokens add to the text
        self._before: list[int] = []  # a path's beginning, up to the end of its last whole text

    def legal(self, path: Sequence[int]) -> Legal | None:
        """See `Constraint`."""
        rest = self._rest(path)
        return self._free if rest is None else self._grammar.legal(rest)

    def accepts(self, path: Sequence[int]) -> bool:
        """See `Constraint`."""
        return self._rest(path) is None

    def forced(self, path: Sequence[int]) -> list[int]:
        """See `Constraint`."""
        rest = self._rest(path)
        return [] if rest is None else self._grammar.forced(rest)

    def _rest(self, path: Sequence[int]) -> list[int] | None:
        """The grammar's text at the path's end; None where there is none, or where it is whole."""
        pieces = list(map(self._name, path))
        ends, text = list(accumulate(map(len, pieces))), b"".join(pieces)
        num_before = len(self._before) if list(path[: len(self._before)]) == self._before else 0
        while found := self._trigger.search(text, ends[num_before - 1] if num_before else 0):
            start = next((found.start(number) for number, group in enumerate(found.groups(), 1) if group is not None), found.end())
            last = bisect_left(ends, found.end())  # the token that completes the trigger
            begun = self._vocabulary(text[start : ends[last]].decode(errors="ignore").encode()) if start < ends[last] else []
            rest = [*begun, *path[last + 1 :]]
            whole = self._grammar.whole(rest)
            if whole is None:
                return rest
            num_before = max(num_before, last) + 1 + max(whole - len(begun), 0)
            self._before = list(path[:num_before])
        return None

    def _name(self, token: int) -> bytes:
        if token not in self._names:
            meaning = self._tokenizer.meaning(token) or b""
            self._names[token] = meaning.encode() if isinstance(meaning, str) else meaning
        return self._names[token]


class _Vocabulary:
    """The tokenizer as llguidance needs it. Special tokens get no text, so no grammar allows them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        llguidance = _library()
        self.size = tokenizer.vocab_size
        self.tokens = [tokenizer.token_bytes(token) for token in range(self.size)]
        self.special_token_ids: list[int] = []
        self.is_text = np.array([len(text) > 0 for text in self.tokens])
        # An end is needed even where the vocabulary has none; nobody can choose this one.
        ends = sorted(tokenizer.eos_ids) or [self.size]
        self.tokens += [b""] * (ends == [self.size])
        self.ends = np.array([end for end in ends if end < self.size], np.int64)
        self.eos_token_id, self.bos_token_id = ends[0], None
        self._tokenizer = tokenizer
        self.library: Any = None  # while the wrapper tries whether texts may be bytes
        self.library = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=ends)

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of a forced text: the tokenizer's own, or the library's where those would change its bytes."""
        head = text[:_MOST_ENCODED].decode(errors="ignore").encode()  # up to a character's end
        ids = self._tokenizer.encode_parts([head], continues=True)
        if self.library is None:
            return ids
        if b"".join([self.tokens[token] for token in ids]) != head:  # a normalizer changed them
            ids = self.library.greedy_tokenize(head.decode())
        return ids + self.library.greedy_tokenize(text[len(head) :].decode()) if len(head) < len(text) else ids


# As `json.dumps` writes it: nothing is left open between two values, so that names of properties are forced as a whole.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NAMES = {
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
}


def _key(params: SamplingParams) -> _Key | None:
    texts = {"json_schema": cast(str | None, params.json_schema), "regex": params.regex, "grammar": params.grammar}
    if params.choices:
        return _Key("choice", "|".join(map(_literal, params.choices)))
    return next((_Key(kind, text) for kind, text in texts.items() if text is not None), None)


def _literal(text: str) -> str:
    """A regular expression of exactly this text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _compile(key: _Key, vocabulary: _Vocabulary) -> "LLMatcher":
    llguidance, name = _library(), _NAMES[key.kind]
    num_bytes = len(key.text.encode(errors="surrogatepass"))
    if num_bytes > MOST_BYTES:
        raise ConfigError(f"{name} has {num_bytes} bytes; at most {MOST_BYTES} are compiled")
    try:
        key.text.encode()
        text = _as_lark(key.text) if key.kind == "grammar" else key.text
        if key.kind == "json_schema":
            source = llguidance.LLMatcher.grammar_from_json_schema(text, defaults=_JSON_STYLE)
        else:
            source = llguidance.grammar_from("lark" if key.kind == "grammar" else "regex", text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read: {in_one_line(str(error))[:_LONGEST_ERROR]}") from None
    if not _ends(source):
        raise ConfigError(f"{name} takes too much time or memory to compile; simplify it")
    matcher = llguidance.LLMatcher(vocabulary.library, source, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))
    if matcher.is_error():
        problem = matcher.get_error().partition("\n<backtrace>")[0]  # of a panic
        problem = problem.replace("panic: missing special token prefix", "it names special tokens")
        raise ConfigError(f"{name} cannot be compiled: {in_one_line(problem)[:_LONGEST_ERROR]}")
    return matcher


@lru_cache(_MOST_TRIED)
def _ends(source: str) -> bool:
    """Whether another process compiles the grammar within the limits. Raises CpuspecError if that process cannot be started."""
    given = {
        "source": source,
        "limits": _LIMITS,
        "directory": str(Path(_library().__file__).parents[1]),
    }
    script = ["-I", str(Path(__file__).with_name("grammar_trial.py"))]
    try:
        with SYSTEM.start_helper(script, _MOST_TRIAL_S, _MOST_TRIAL_BYTES, subprocess.DEVNULL, subprocess.PIPE) as trial:
            try:
                _, errors = trial.communicate(json.dumps(given).encode(), _MOST_WAIT_S)
            finally:
                trial.kill()
    except subprocess.TimeoutExpired:  # of a machine that has no time, so that this is not remembered
        raise ConfigError(f"a grammar was not compiled within {_MOST_WAIT_S} seconds; simplify it, or try again later") from None
    except OSError as error:
        raise CpuspecError(f"the process that tries grammars out cannot be started: {error}") from error
    if trial.returncode in _PYTHON_FAILED:
        problem = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise CpuspecError(f"the process that tries grammars out failed: {in_one_line(problem)[:_LONGEST_ERROR]}")
    return trial.returncode == 0


def _as_lark(text: str) -> str:
    """Lark text as it is, GBNF translated. Raises ValueError."""
    from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

    if is_lark_syntax(text):
        return text
    if len(text) > _MOST_GBNF_BYTES or text.count("::=") > _MOST_GBNF_RULES:
        raise ValueError(
            f"it has more than {_MOST_GBNF_RULES} rules or {_MOST_GBNF_BYTES} characters; longer ones are read as Lark only"
        )
    try:
        return any_to_lark(text)
    except Exception as error:  # the translator raises whatever it comes across
        raise ValueError(str(error)) from None


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "answers that keep to a grammar need llguidance; install it with: pip install 'cpuspec[grammar]'"
        ) from None
    return llguidance

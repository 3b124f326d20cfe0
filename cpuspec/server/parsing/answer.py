"""One machine for the answers of every family: reasoning, content and calls, as the family's row says that it writes them.

Its steps decide on the beginning of the text that has come. A step waits where a later character could change what it decides, so
the pieces do not depend on the parts in which the text arrives. A call is held until it closes, converted once, and given whole.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from cpuspec.engine.text import overlap
from cpuspec.server.parsing.calls import TOOL_FORMATS, ToolFormat, tool_format
from cpuspec.server.parsing.converted import SPACE, Functions, Scan, call_end, checked, from_json, marked_end, read_value
from cpuspec.text import Tokenizer
from cpuspec.text.reasoning import REASONING, reasoning_marks

_LOG = logging.getLogger("cpuspec.server")

# Of answers in channels, as gpt-oss writes them (OpenAI's "harmony" format): messages of a header, a mark and a text.
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_BEGINNINGS = ("<|start|>", "<|channel|>", "<|message|>", "to=", "assistant")  # of an answer that has a header
_MOST_HEADER_CHARS = 1000
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")

_MOST_CHARS = 1 << 20  # of one call
_MOST_UNENDED = 100  # marks after which no call ends, in one answer
# A call without marks: an object of JSON, or a list of them, at a line's beginning, perhaps in a fence or after a tag.
_BARE = r"[ \t]*(?:(?:```(?:json|xml|tool_call|tool_code)?|%s<\w{1,20}>)\s*)?(?:\[\s*)?(?=\{)"
_BARE_BEGINS = r"[ \t]*(?:`{1,2}|```\w{0,9}\s*|<\w{0,20}|<\w{1,20}>\s*)?(?:\[\s*)?\Z"
_BEGINS = {True: re.compile(rf"(?:\n|\A){_BARE_BEGINS}"), False: re.compile(rf"\n{_BARE_BEGINS}")}  # by `_at_line`
_KEYS = tuple(f'"{key}"' for key in ("name", "tool_name", "tool_call_id", "arguments", "parameters", "type", "id", "function"))
_NAME = re.compile(r'"name"\s*:\s*"([^"]*)"')
_NAME_BEGINS = re.compile(r'"name"\s*(?::\s*(?:"[^"]{0,256})?)?\Z')

# Special tokens that are part of an answer's text, because the machine reads them.
MARKS = frozenset(
    (
        *(mark for marks in REASONING for mark in marks),
        *(mark for form in TOOL_FORMATS.values() for marks in form.marks for mark in marks if mark),
        *("<|channel>", "[ARGS]", "[CALL_ID]", '<|"|>', "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "｜DSML｜"),
        *(f"<｜tool▁{part}｜>" for part in ("call▁begin", "call▁end", "sep")),
        *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"),
    )
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer.

    kind: "reasoning" or "content", more text of it; "call", a tool call whose function has the name `text`; "arguments", which
    follows it, the call's arguments as one JSON object. call: which tool call it belongs to, counted from 0.
    """

    kind: str
    text: str
    call: int = 0


def joined_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces that are not empty, with neighbours of one kind joined. Two calls are never joined."""
    found: list[Piece] = []
    for piece in pieces:
        if not piece.text:
            continue
        if found and piece.kind != "call" and (found[-1].kind, found[-1].call) == (piece.kind, piece.call):
            found[-1] = replace(piece, text=found[-1].text + piece.text)
        else:
            found.append(piece)
    return found


def with_arguments(pieces: Sequence[Piece]) -> list[tuple[Piece, str]]:
    """The pieces that a parser has returned at once; each with the arguments of the call that it is, else ""."""
    given = iter([piece.text for piece in pieces if piece.kind == "arguments"])
    return [(piece, next(given) if piece.kind == "call" else "") for piece in pieces if piece.kind != "arguments"]


def shown_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens that are part of an answer's text, because the machine here reads them."""
    return frozenset(found for text in MARKS if (found := tokenizer.token_id(text)) is not None)


def answer_parser(template: str | None, functions: Functions, thinking: bool = False, begun: str = "") -> "AnswerParser":
    """A parser of one answer to a prompt of the chat template."""
    return AnswerParser(tool_format(template), functions, reasoning_marks(template), thinking, begun)


class AnswerParser:
    """Splits a text into pieces as it arrives. White space around reasoning, and beside calls, is dropped.

    functions: schemas of the tools' arguments by function name; a call of another function is content. marks: around reasoning.
    thinking: the prompt has opened the reasoning. begun: the text at the prompt's end that the answer continues, perhaps within a
    call; of its pieces only calls are returned.

    Models forget to close their reasoning before a call (Qwen3.5, Nemotron 3). So calls in the reasoning count if the answer ends
    with them; if reasoning follows, they are part of it.
    """

    def __init__(
        self,
        form: ToolFormat,
        functions: Functions,
        marks: tuple[str, str] = REASONING[0],
        thinking: bool = False,
        begun: str = "",
    ) -> None:
        self.num_calls = 0  # that have closed
        self._form, self._functions, self._marks = form, functions, marks
        self._state = "header" if form.channels else "before reasoning" if thinking else "start"
        self._text = ""  # what has come and is undecided
        self._at_line = True  # whether it begins a line of content
        self._space = self._mark = self._closes = ""  # of the call that is read: white space before its mark, and its marks
        self._num_read, self._scan = 0, Scan()  # characters of its text that were looked at, and what they have shown
        self._num_unended = 0
        self._tails: list[str] = []  # marks that may follow a call
        self._inner: AnswerParser | None = None  # reads what may be calls at the reasoning's end
        self._held, self._found = "", list[Piece]()  # their text, with the mark; their pieces
        self._kind, self._name = "content", ""  # of the message in a channel, and the function that it calls
        self._is_new, self._seen = True, set[str]()  # whether it has no text yet, and the kinds of those that had one
        marked = [re.escape(mark) for mark, _ in form.marks if mark]
        bare = _BARE % "".join(f"(?!{mark})" for mark in marked)
        alternatives = [*marked, *([rf"\n{bare}"] if form.bare else [])]
        self._opening = self._first = re.compile("|".join(alternatives)) if functions and alternatives else None
        if functions and form.bare:
            self._first = re.compile("|".join([*alternatives, rf"\A{bare}"]))
        # What the text `begun` gives: its calls, and by kind the number of characters that are undecided in it.
        self._begun: list[Piece] = []
        self._known: dict[str, int] = {}
        if begun:
            self._begun = [piece for piece in self.push(begun) if piece.kind in ("call", "arguments")]
            for piece in deepcopy(self).finish():
                self._known[piece.kind] = self._known.get(piece.kind, 0) + len(piece.text)

    def push(self, text: str) -> list[Piece]:
        """Read on; returns the pieces that no later text can change."""
        self._text += text
        return self._new(self._decided(False))

    def finish(self) -> list[Piece]:
        """The remaining pieces, at the answer's end. A call that it cuts off is content, if anything of its arguments may lack."""
        return self._new(self._decided(True))

    def _decided(self, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._step(pieces, final):
            pass
        return joined_pieces(pieces)

    def _new(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces without what `begun` had of them."""
        found, self._begun = self._begun, []
        for piece in pieces:
            if piece.kind == "call":
                self._known.clear()
            elif piece.kind != "reasoning":
                self._known.pop("reasoning", None)
            known = min(self._known.get(piece.kind, 0), len(piece.text))
            if known:
                self._known[piece.kind] -= known
            found.append(replace(piece, text=piece.text[known:]))
        return joined_pieces(found)

    def _step(self, pieces: list[Piece], final: bool) -> bool:
        """Decide on the beginning of the text; returns whether there may be more to decide."""
        match self._state:
            case "start":
                begun = self._text.lstrip(SPACE)
                if not final and self._marks[0].startswith(begun) and begun != self._marks[0]:
                    return False
                is_opened = begun.startswith(self._marks[0])
                self._text = begun[len(self._marks[0]) :] if is_opened else self._text
                self._state = "before reasoning" if is_opened else "content"
                return True
            case "before reasoning" | "before content":
                self._text = self._text.lstrip(SPACE)
                if self._text:
                    self._state = self._state.removeprefix("before ")
                return bool(self._text)
            case "reasoning":
                return self._reasoning(pieces, final)
            case "content":
                return self._content(pieces, final)
            case "call":
                return self._in_call(pieces, final)
            case "after":
                return self._after(final)
            case "header":
                return self._header(pieces, final)
        return self._message(pieces, final)

    def _reasoning(self, pieces: list[Piece], final: bool) -> bool:
        opens, closes = self._form.mark if self._functions else "", self._marks[1]
        if self._inner and closes not in self._held[-len(closes) :] + self._text:
            text, self._text = self._text, ""
            self._held += text
            self._found += self._inner.push(text) + (self._inner.finish() if final else [])
            is_call = not any(piece.kind == "content" and piece.text.strip(SPACE) for piece in self._found)
            if is_call and not final:
                return False
            if is_call:
                pieces += [piece for piece in self._found if piece.kind != "content"]
                self.num_calls, self._inner, self._held = self._inner.num_calls, None, ""
                return False
            # The reasoning talks about the mark. What follows is searched again.
            start = self._held.index(opens) + len(opens)
            pieces.append(Piece("reasoning", self._held[:start]))
            self._text, self._inner, self._held = self._held[start:], None, ""
            return True
        self._text, self._inner, self._held = self._held + self._text, None, ""
        text = self._text
        thought, mark, rest = text.partition(closes)
        if mark:
            pieces.append(Piece("reasoning", thought.rstrip(SPACE)))
            self._text, self._state = rest, "before content"
            return True
        at = text.find(opens) if opens else -1
        if at >= 0:
            before = text[:at].rstrip(SPACE)
            pieces.append(Piece("reasoning", before))
            self._held, self._found = text[len(before) : at], []
            self._inner, self._text = AnswerParser(self._form, self._functions, self._marks), text[at:]
            return True
        sure = text if final else text[: len(text) - max(overlap(text, closes), overlap(text, opens) if opens else 0)].rstrip(SPACE)
        pieces.append(Piece("reasoning", sure))
        self._text = text[len(sure) :]
        return False

    def _content(self, pieces: list[Piece], final: bool) -> bool:
        text, at, end = self._text, 0, len(self._text)
        opening = self._first if self._at_line else self._opening
        while opening and (found := opening.search(text, at)):
            mark = next((pair for pair in self._form.marks if pair[0] and pair[0] == found[0]), None)
            may_be_call = True if mark else self._names_a_function(text[found.end() : found.end() + 600], final)
            if may_be_call is None:
                end = found.start()
                break
            if may_be_call and self._num_unended < _MOST_UNENDED:
                before = text[: found.start()].rstrip(SPACE)
                pieces.append(Piece("content", before))
                self._space, self._mark = text[len(before) : found.start()], found[0]
                self._closes = mark[1] if mark else "".join(f"</{name}>" for name in re.findall(r"<(\w+)>", found[0]))
                self._text, self._state, self._num_read, self._scan = text[found.end() :], "call", 0, Scan()
                return True
            at = max(found.end(), found.start() + 1)
        if final:
            pieces.append(Piece("content", text if text.strip(SPACE) or not self.num_calls else ""))
            self._text = ""
            return False
        if opening:
            begun = _BEGINS[self._at_line].search(text) if self._form.bare else None
            end = min([end, *(len(text) - overlap(text, mark) for mark, _ in self._form.marks), begun.start() if begun else end])
            end = len(text[:end].rstrip(SPACE))
        pieces.append(Piece("content", text[:end]))
        self._text, self._at_line = text[end:], self._at_line and not end
        return False

    def _names_a_function(self, text: str, final: bool) -> bool | None:
        """Whether an object of JSON may be a call; None if later characters decide."""
        inner = text.lstrip("{" + SPACE).replace("'", '"')
        if not final and any(key.startswith(inner) for key in _KEYS):
            return None
        if not inner.startswith('"name"'):
            return inner.startswith(_KEYS)
        if found := _NAME.match(inner):
            return found[1] in self._functions
        return None if not final and _NAME_BEGINS.match(inner) else False

    @property
    def _is_bare(self) -> bool:
        """Whether the call that is read has no mark."""
        return not any(mark and self._mark == mark for mark, _ in self._form.marks)

    def _in_call(self, pieces: list[Piece], final: bool) -> bool:
        """Hold a call until it closes."""
        syntax, text, form = self._form.syntax, self._text, self._form
        begin = next((at for at, char in enumerate(text) if char not in SPACE), len(text))
        first = text[begin : begin + 1]
        if not first and not final:
            return False
        is_named = syntax.is_named and first.isidentifier() and " " not in text[:begin]
        if not (self._is_bare or is_named or self._mark.endswith("=") or (first and first in syntax.begins)):
            return self._no_call(pieces, "")
        is_value = syntax.is_value or first in tuple("{[")
        new, self._num_read = text[self._num_read :], len(text)
        may_end = final or not (is_value or syntax.is_quoted) or any(char in new for char in "}])>")
        found = self._end_of_call(text, is_value, is_named and syntax.is_value, final) if may_end else None
        if found is None and not final and len(text) <= _MOST_CHARS:
            return False
        if found is None:  # a quote before the mark has no end, or another mark ends the call
            ends = [one for one in (self._closes, *(closes for _, closes in form.marks)) if one]
            found = next(((at, at + len(one)) for one in ends if (at := text.find(one)) >= 0), None)
        end, after = found or (len(text), len(text))
        calls = self._converted((self._mark if self._mark.endswith("=") else "") + text[:end], found is not None)
        if not calls:
            self._num_unended += found is None
            return self._no_call(pieces, text[:after] if found else "")
        pieces += calls
        self._tails = [closes for _, closes in form.marks if closes] + ["```"] * ("```" in self._mark + text[begin : begin + 3])
        self._tails += [self._closes] * (self._closes != "")
        self._text, self._state = text[after:], "after"
        return True

    def _end_of_call(self, text: str, is_value: bool, has_head: bool, final: bool) -> tuple[int, int] | None:
        """See `call_end`. has_head: a name stands before the arguments."""
        marks, closes, scan = self._form.marks, (self._closes,) if self._closes else (), self._scan
        if not (is_value or self._form.syntax.is_quoted):
            return marked_end(text, [one for one, _ in marks], [one for _, one in marks], self._closes, final, scan)
        if has_head and not scan.brackets:
            at = text.find("{", scan.at)
            scan.at = len(text) if at < 0 else at
        return call_end(text, closes, is_value, final, scan)

    def _converted(self, text: str, is_whole: bool) -> list[Piece]:
        """The calls of a text and, between them, what is none as content; empty if there is no call."""
        pieces, convert, split = list[Piece](), self._form.syntax.convert, self._form.syntax.split
        num_calls = self.num_calls
        try:
            items = split(text)
        except Exception:  # whatever a text makes of a converter, it is an answer
            items = [text]
        for number, item in enumerate(items, 1):
            try:
                own = from_json if item.startswith("{") else convert  # a demanded call is in JSON, and others may be
                call = own(item, self._functions, is_whole or number < len(items))
                if self._is_bare and call[1] is None:
                    raise ValueError("an object without arguments may be one about anything")
                name, arguments = checked(call, self._functions)
            except Exception as error:
                _LOG.info("a text like a tool call is no call: %s", str(error)[:200])
                pieces.append(Piece("content", item))
            else:
                pieces += [Piece("call", name, self.num_calls), Piece("arguments", arguments, self.num_calls)]
                self.num_calls += 1
        return pieces if self.num_calls > num_calls else []

    def _no_call(self, pieces: list[Piece], text: str) -> bool:
        """Take the mark, and the text after it, as content. What follows is searched for calls."""
        shown = self._space + self._mark + text
        pieces.append(Piece("content", shown))
        self._text, self._state = self._text[len(text) :], "content"
        self._at_line = shown.endswith("\n") and bool(text)
        return True

    def _after(self, final: bool) -> bool:
        """Behind a call: marks that end it, brackets too many, and separators before another call are dropped."""
        text = self._text.lstrip(SPACE)
        tail = next((one for one in (*self._tails, "}", "]") if text.startswith(one)), "")
        if tail:
            self._text = text[len(tail) :]
            self._tails = [one for one in self._tails if (one, tail) != ("```", "```")]  # the next one begins a fence
            return True
        rest = text[1:].lstrip(SPACE) if text[:1] in tuple(",;") else text
        if not final and (not rest or any(one.startswith(text) for one in self._tails)):
            self._text = text
            return False
        self._text, self._state, self._at_line = rest if rest[:1] in tuple("{[") else text, "content", True
        return True

    def _header(self, pieces: list[Piece], final: bool) -> bool:
        text = self._text.lstrip()
        at = text.find(_MESSAGE, 0, _MOST_HEADER_CHARS)
        has_begun = any(text.startswith(one) or (one.startswith(text) and not final) for one in _BEGINNINGS)
        if not has_begun or (at < 0 and (len(text) >= _MOST_HEADER_CHARS or (final and "<|" not in text))):
            self._state = "message"  # the model forgot its format
            return True
        if at < 0:
            return False
        header = text[:at].rpartition("<|start|>")[2]  # malformed headers are followed by right ones
        self._text, self._state, self._scan = text[at + len(_MESSAGE) :], "message", Scan()
        channels, recipient = _CHANNEL.findall(header), _RECIPIENT.search(header)
        self._name = recipient[1].removeprefix("functions.") if recipient and recipient[1] != "assistant" else ""
        self._kind = "reasoning" if not self._name and channels and channels[-1] == "analysis" else "content"
        return True

    def _message(self, pieces: list[Piece], final: bool) -> bool:
        text = self._text
        is_call = self._name in self._functions
        found = call_end(text, _ENDS, False, final, self._scan) if is_call else None
        if is_call and not found and not final:
            return False
        ends = [found] if found else [(at, at + len(mark)) for mark in _ENDS if (at := text.find(mark)) >= 0]
        sure = len(text) if final else len(text) - max(overlap(text, one) for one in _ENDS)
        at, end = min(ends) if ends else (sure, sure)
        body = text[:at]
        if is_call and body:
            try:
                name, arguments = checked((self._name, read_value(body, bool(ends))), self._functions)
            except Exception as error:
                _LOG.info("a text like a tool call is no call: %s", str(error)[:200])
            else:
                pieces += [Piece("call", name, self.num_calls), Piece("arguments", arguments, self.num_calls)]
                self.num_calls, body = self.num_calls + 1, ""
        if body and self._kind in self._seen and self._is_new:
            pieces.append(Piece(self._kind, "\n\n"))  # another message of the kind is a paragraph of its own
        if body:
            self._seen.add(self._kind)
            self._is_new = False
            pieces.append(Piece(self._kind, body))
        self._text = text[at if text[at:end] in ("<|start|>", "<|channel|>") else end :]
        if ends:
            self._state, self._name, self._is_new = "header", "", True
        return bool(ends)

"""A whole answer: reasoning first, if there is any, then content with tool calls."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from cpuspec.server.parsing.calls import tool_format
from cpuspec.server.parsing.channels import ChannelParser
from cpuspec.server.parsing.converted import Functions
from cpuspec.server.parsing.pieces import SPACE, Parser, Piece, decided, joined_pieces, settled
from cpuspec.text import Tokenizer

# Pairs of marks around reasoning. A template's pair is the first of which it contains a mark.
_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),  # EXAONE Deep
)


# Marks that the parsers here read.
MARKS = frozenset(
    (
        *(mark for marks in _REASONING for mark in marks),
        *("<|channel>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
        *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call|>", "<|/tool_call|>"),
        *("<tool_calls>", "</tool_calls>", "<TOOLCALL>", "</TOOLCALL>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|START_ACTION|>", "<|END_ACTION|>"),
        *(f"<｜tool▁{part}｜>" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
        *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"),
    )
)


def reasoning_marks(template: str | None) -> tuple[str, str]:
    """The texts that begin and end reasoning in answers to prompts of a chat template."""
    template = template or ""
    return next((marks for marks in _REASONING if marks[0] in template or marks[1] in template), _REASONING[0])


def opens_reasoning(tokenizer: Tokenizer, template: str | None, prompt: Sequence[int]) -> bool:
    """Whether a prompt of the template, token ids, has opened the reasoning."""
    return tokenizer.decode(prompt[-8:], skip_special=False).rstrip().endswith(reasoning_marks(template)[0])


def shown_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens that are part of an answer's text, because a parser here reads them."""
    return frozenset(found for text in MARKS if (found := tokenizer.token_id(text)) is not None)


def answer_parser(template: str | None, functions: Functions, thinking: bool = False, begun: str = "") -> Parser:
    """A parser of one answer to a prompt of the chat template.

    functions: schemas of the tools' arguments by function name; without any, the answer has no tool calls. thinking: the prompt has
    opened the reasoning (`opens_reasoning`). begun: the text at the prompt's end that the answer continues.
    """
    form = tool_format(template)
    calls = form.parser(functions) if functions and not form.channels else None
    marks = reasoning_marks(template)
    around = (form.mark, form.ends)
    parser = ChannelParser() if form.channels else AnswerParser(thinking=thinking, calls=calls, marks=marks, call_marks=around)
    return ContinuingParser(parser, begun) if begun else parser


class ContinuingParser:
    """Parses an answer that continues a given text. It returns the pieces of the answer, and before them the text's calls.

    The text may end within a call, of which the answer is then the rest.
    """

    def __init__(self, parser: Parser, begun: str) -> None:
        self._parser = parser
        self._calls = [piece for piece in parser.push(begun) if piece.kind in ("call", "arguments")]
        # By kind, how many characters of the text the parser has not decided on. They are left out when they come.
        self._known: dict[str, int] = {}
        for piece in deepcopy(parser).finish():
            self._known[piece.kind] = self._known.get(piece.kind, 0) + len(piece.text)

    @property
    def num_calls(self) -> int:
        """See `Parser`."""
        return self._parser.num_calls

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        return self._new(self._parser.push(text))

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        return self._new(self._parser.finish())

    def _new(self, pieces: list[Piece]) -> list[Piece]:
        found, self._calls = self._calls, []
        for piece in pieces:
            if piece.kind != "reasoning":
                self._known.pop("reasoning", None)
            if piece.kind == "call":
                self._known.clear()
            known = min(self._known.get(piece.kind, 0), len(piece.text))
            if known:
                self._known[piece.kind] -= known
            found.append(replace(piece, text=piece.text[known:]))
        return joined_pieces(found)


class AnswerParser:
    """Splits an answer into reasoning, content and calls. White space around reasoning is dropped.

    thinking: the prompt has opened the reasoning. calls: the parser of tool calls, None without tools. marks: around reasoning.
    call_marks: around a call. Models forget to close their reasoning before a call (Qwen3.5, Nemotron 3). So calls in the
    reasoning count if the answer ends with them; if reasoning follows, they are part of it.
    """

    def __init__(
        self,
        thinking: bool = False,
        calls: Parser | None = None,
        marks: tuple[str, str] = _REASONING[0],
        call_marks: tuple[str, str] = ("", ""),
    ) -> None:
        self._calls = calls
        self._call_opens, self._call_closes = call_marks if calls and all(call_marks) else ("", "")
        self._held: _HeldCalls | None = None  # the end of the reasoning, if it may be calls
        self._opens, self._closes = marks
        self._state = "before reasoning" if thinking else "start"
        self._pending = ""

    @property
    def num_calls(self) -> int:
        """How many tool calls have begun."""
        return self._calls.num_calls if self._calls else 0

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        self._pending += text
        return joined_pieces(decided(self._step))

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        pieces: list[Piece] = []
        while self._held:
            text = self._held.text
            if text.rstrip(SPACE).endswith(self._call_closes) and (calls := self._held.finished()):
                self._calls = self._held.calls
                return joined_pieces([*pieces, *calls])
            pieces.append(self._let_go())
            pieces += decided(self._step)
        rest, self._pending = self._pending, ""
        pieces += [Piece("reasoning", rest)] if "reasoning" in self._state else self._content(rest)
        if self._calls:
            pieces += self._calls.finish()
        return joined_pieces(pieces)

    def _step(self, pieces: list[Piece]) -> bool:
        text = self._pending
        match self._state:
            case "start":
                begun = text.lstrip(SPACE)
                if self._opens.startswith(begun) and begun != self._opens:
                    return False
                if begun.startswith(self._opens):
                    self._pending, self._state = begun[len(self._opens) :], "before reasoning"
                else:
                    self._state = "content"
                return True
            case "before reasoning" | "before content":
                self._pending = text.lstrip(SPACE)
                if not self._pending:
                    return False
                self._state = self._state.removeprefix("before ")
                return True
            case "reasoning":
                if self._held and self._closes not in self._held.text[-len(self._closes) :] + text:
                    self._pending = ""
                    if self._held.may_still_be_calls(text):
                        return False
                    pieces.append(self._let_go())
                    return True
                text, self._held = (self._held.text if self._held else "") + text, None
                reasoning, mark, rest = text.partition(self._closes)
                if mark:
                    pieces.append(Piece("reasoning", reasoning.rstrip(SPACE)))
                    self._pending, self._state = rest, "before content"
                    return True
                at = text.find(self._call_opens) if self._call_opens else -1
                if self._calls and at >= 0:
                    before = text[:at].rstrip(SPACE)
                    pieces.append(Piece("reasoning", before))
                    self._held = _HeldCalls(deepcopy(self._calls), text[len(before) : at], self._call_opens)
                    self._pending = text[at:]
                    return True
                sure = settled(text, self._closes, self._call_opens)
                pieces.append(Piece("reasoning", sure))
                self._pending = text[len(sure) :]
                return False
        self._pending = ""
        pieces += self._content(text)
        return False

    def _let_go(self) -> Piece:
        """Return the mark of what was held and is no call, as reasoning. The text after the mark is searched again."""
        assert self._held is not None
        text, self._held = self._held.text, None
        end = text.index(self._call_opens) + len(self._call_opens)
        self._pending = text[end:] + self._pending
        return Piece("reasoning", text[:end])

    def _content(self, text: str) -> list[Piece]:
        return self._calls.push(text) if self._calls else [Piece("content", text)]


class _HeldCalls:
    """The end of the reasoning, from a mark that may begin a call on. text: all of it.

    calls: a parser of calls that has read nothing. before: white space before the mark.
    """

    def __init__(self, calls: Parser, before: str, opens: str) -> None:
        self.text = before
        self.calls, self._start = calls, len(before) + len(opens)
        self._pieces: list[Piece] = []

    def may_still_be_calls(self, text: str) -> bool:
        """Read on; returns whether the whole may still be nothing but calls."""
        self.text += text
        self._pieces += self.calls.push(text)
        after = self.text[self._start : self._start + 80]
        first = after.lstrip(SPACE)[:1]
        if first and first not in "<{[" and (first != after[0] or not first.isidentifier()):
            return False  # the reasoning talks about the mark
        return all(piece.kind != "content" or not piece.text.strip(SPACE) for piece in self._pieces)

    def finished(self) -> list[Piece]:
        """The calls at the answer's end; none where there is other text."""
        pieces = [piece for piece in (*self._pieces, *self.calls.finish()) if piece.kind != "content" or piece.text.strip(SPACE)]
        return [] if any(piece.kind == "content" for piece in pieces) else pieces

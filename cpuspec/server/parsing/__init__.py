"""Generated text, as it arrives, taken apart into reasoning, content and tool calls. Knows text only, no tokens and no protocol.

Whatever the pieces that a text arrives in, what comes out is the same: `tests/server/test_parsing.py` holds that for every split.
"""

from cpuspec.server.parsing.answer import MARKS, AnswerParser, answer_parser, opens_reasoning, reasoning_marks
from cpuspec.server.parsing.calls import TOOL_FORMATS, ToolFormat, tool_format
from cpuspec.server.parsing.pieces import Parser, Piece, joined

__all__ = [
    "MARKS",
    "TOOL_FORMATS",
    "AnswerParser",
    "Parser",
    "Piece",
    "ToolFormat",
    "answer_parser",
    "joined",
    "opens_reasoning",
    "reasoning_marks",
    "tool_format",
]

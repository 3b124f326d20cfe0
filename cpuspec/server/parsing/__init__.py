"""Splits generated text into reasoning, content and tool calls as it arrives. It knows no protocol.

The result does not depend on the pieces in which a text arrives: `tests/server/test_parsing.py` tests every split.
"""

from cpuspec.server.parsing.answer import MARKS, AnswerParser, Piece, answer_parser, joined_pieces, shown_tokens
from cpuspec.server.parsing.calls import TOOL_FORMATS, ToolFormat, tool_format

__all__ = [
    "MARKS",
    "TOOL_FORMATS",
    "AnswerParser",
    "Piece",
    "ToolFormat",
    "answer_parser",
    "joined_pieces",
    "shown_tokens",
    "tool_format",
]

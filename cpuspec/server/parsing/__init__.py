"""Splits generated text into reasoning, content and tool calls as it arrives. It knows no protocol.

The result does not depend on the pieces in which a text arrives: `tests/server/test_parsing.py` tests every split.
"""

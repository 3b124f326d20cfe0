"""Text to token ids and back, chat templates, and grammars that answers keep to. Knows no model and no backend."""

from cpuspec.text.grammar import MOST_BYTES, GrammarConstraint, Grammars
from cpuspec.text.tokenizer import Message, StreamDecoder, Tokenizer, make_tokenizer

__all__ = ["MOST_BYTES", "GrammarConstraint", "Grammars", "Message", "StreamDecoder", "Tokenizer", "make_tokenizer"]

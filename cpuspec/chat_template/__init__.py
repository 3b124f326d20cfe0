"""Renders a chat template: a program in the Jinja language that came with somebody's model file, so it is not trusted.

This package knows messages and text. The tokenizer decides which parts of that text are control tokens.

Jinja only parses. The syntax tree is interpreted here, in a closed world, and so the budget is complete. The interpreter evaluates
the nodes that it lists, and pays a step before each. Values are plain data with integers of 64 bits. Operators, methods, filters
and tests are those that `operations` and `filters` list; each is written there and pays, before it runs, for the work and the
memory that its operands can cause. Nothing is paid back. So steps bound the time and room bounds the memory, whatever a template
keeps or shares. No name of a template ever reaches an attribute of a Python object, and no code is generated. New syntax of a
newer Jinja is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from cpuspec.chat_template.budget import PER_ENTRY, PER_ITEM, PER_VALUE, Budget
from cpuspec.chat_template.interpreter import Interpreter, parse
from cpuspec.chat_template.operations import MAX_DEPTH, MAX_KEY
from cpuspec.chat_template.values import MAX_INTEGER
from cpuspec.errors import TokenizerError, in_one_line

__all__ = ["ROLES", "ChatTemplate"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

_MAX_TEMPLATE_CHARS = 1 << 17
# Real templates take under 300 steps a message and build under 20 times what the messages hold.
_STEPS_AT_LEAST = 1 << 20
_STEPS_PER_VALUE = 1000
_ROOM_AT_LEAST = 1 << 24
_GROWTH = 64
_SECONDS_AT_LEAST = 10.0
_CHARS_PER_SECOND = 100_000


class ChatTemplate:
    """One parsed template. It may use what transformers offers: tojson, raise_exception, strftime_now, break, continue, generation.

    It never changes, so threads may share it. Raises TokenizerError if the template does not parse, or asks for other things.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """variables: texts that the template may name, as bos_token and eos_token."""
        if len(source) > _MAX_TEMPLATE_CHARS:
            raise TokenizerError(f"the chat template has {len(source)} characters; at most {_MAX_TEMPLATE_CHARS} are read")
        self.source = source
        self._variables = dict(variables)
        try:
            self._tree = parse(source)
        except (jinja2.TemplateError, RecursionError, MemoryError, ValueError) as error:
            raise TokenizerError(f"the chat template does not compile: {_say(error)}; use --raw instead") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any] | None = None
    ) -> str:
        """The conversation as text. Raises TokenizerError if the template refuses it, fails, or exceeds its budget.

        messages: texts, numbers, booleans and None in dicts and lists, as JSON has them. variables: more of these by name, as
        `tools`; they replace none of the template's own.
        """
        held = _Size()
        own, given = _copy(list(messages), held, MAX_DEPTH), _copy(dict(variables or {}), held, MAX_DEPTH)
        budget = Budget(
            steps=_STEPS_AT_LEAST + _STEPS_PER_VALUE * held.values + held.room,
            room=_ROOM_AT_LEAST + _GROWTH * held.room,
            seconds=_SECONDS_AT_LEAST + held.room / _CHARS_PER_SECOND,
        )
        known = {**given, **self._variables, "messages": own, "add_generation_prompt": add_generation_prompt}
        try:
            return Interpreter(budget).render(self._tree, known)
        except TokenizerError:
            raise
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template refuses these messages: {_say(error)}") from None
        except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
            raise TokenizerError(f"the chat template fails on these messages: {_say(error)}") from None


def _say(error: BaseException) -> str:
    """The error in a line that can be shown: a template chooses its words."""
    return in_one_line(str(error) or type(error).__name__, 300)


class _Size:
    """The size of messages: the number of values, and the room that a budget counts for them."""

    def __init__(self) -> None:
        self.values = 0
        self.room = 0


def _copy(value: Any, held: _Size, depth: int) -> Any:
    """`value` in types that the interpreter knows; its size is added to `held`."""
    if depth == 0:
        raise TokenizerError(f"the messages are nested deeper than {MAX_DEPTH}")
    held.values += 1
    held.room += PER_VALUE
    if isinstance(value, str):
        held.room += len(value)
        return str(value)
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and abs(value) <= MAX_INTEGER:
        return int(value)
    if isinstance(value, Mapping):
        held.room += PER_ENTRY * len(value)
        for key in value:
            if not (isinstance(key, str) or (isinstance(key, int) and abs(key) <= MAX_KEY)):
                raise TokenizerError(f"the messages hold a dict with the key {str(key)[:100]!r}; wanted a text")
            held.room += len(key) if isinstance(key, str) else 0
        return {key: _copy(item, held, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        held.room += PER_ITEM * len(value)
        return [_copy(item, held, depth - 1) for item in value]
    raise TokenizerError(f"the messages hold {str(value)[:100]!r} of {type(value).__name__}; wanted what JSON can say")

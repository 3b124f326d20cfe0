"""Renders a chat template: a program that came with somebody's model file, so it runs sandboxed and on a budget.

Knows messages and text. Which of that text are control tokens is the tokenizer's business.
"""

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from cpuspec.errors import TokenizerError

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

_MAX_TEMPLATE_CHARS = 1 << 18
_MAX_RANGE = 10_000
_STEPS_AT_LEAST = 100_000  # loop rounds and calls; real templates take tens of them per message
_STEPS_PER_MESSAGE = 1000
_CHARS_AT_LEAST = 1 << 20
_GROWTH = 16  # text a template may build, in multiples of what the messages hold
_CHARS_PER_STEP = 256  # building long texts again and again costs steps too

# Every filter that can only return what is about as large as its input.
_TEXT_FILTERS = ("capitalize", "e", "escape", "lower", "safe", "string", "striptags", "title", "trim", "upper", "reverse")
_LIST_FILTERS = ("dictsort", "first", "select", "items", "join", "last", "list", "map", "max", "min", "reject", "rejectattr")
_OTHER_FILTERS = ("abs", "attr", "count", "d", "default", "float", "int", "length", "round", "selectattr", "sort", "unique")
_GROWING_METHODS = frozenset(("ljust", "rjust", "center", "zfill", "expandtabs", "translate", "format", "format_map"))


class ChatTemplate:
    """One compiled template. It may use what transformers offers: tojson, raise_exception, strftime_now, break, continue.

    Raises TokenizerError if the template does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """variables: texts that the template may name, as bos_token and eos_token."""
        if len(source) > _MAX_TEMPLATE_CHARS:
            raise TokenizerError(f"the chat template has {len(source)} characters; at most {_MAX_TEMPLATE_CHARS} are read")
        self.source = source
        self._variables = dict(variables)
        self._environment = _Environment()
        self._lock = threading.Lock()  # the budget of a rendering lives in the environment
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError, ValueError, OverflowError, SyntaxError) as error:
            raise TokenizerError(f"the chat template does not compile: {_say(error)}; use --raw instead") from error

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """The conversation as text. Raises TokenizerError if the template refuses it, fails, or exceeds its budget."""
        held = sum(len(value) for message in messages for value in message.values() if value)
        budget = _Budget(
            steps=_STEPS_AT_LEAST + _STEPS_PER_MESSAGE * len(messages) + held // _CHARS_PER_STEP * _GROWTH,
            chars=_CHARS_AT_LEAST + _GROWTH * held,
        )
        pieces = []
        size = 0
        with self._lock:
            self._environment.budget = budget
            try:
                # The sandbox keeps templates from changing lists; copies keep them from changing the caller's.
                own = [dict(message) for message in messages]
                for piece in self._template.generate(self._variables, messages=own, add_generation_prompt=add_generation_prompt):
                    size += len(piece)
                    budget.bound(size)
                    budget.spend(1)
                    pieces.append(piece)
            except TokenizerError:
                raise
            except jinja2.TemplateError as error:
                raise TokenizerError(f"the chat template refuses these messages: {_say(error)}") from error
            except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
                raise TokenizerError(f"the chat template fails on these messages: {_say(error)}") from error
        return "".join(pieces)


def _say(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]


class _Budget:
    """What one rendering may still do."""

    def __init__(self, steps: int, chars: int) -> None:
        self.steps = steps
        self.chars = chars

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise TokenizerError("the chat template runs too long for these messages; it is broken or hostile, use --raw")

    def bound(self, chars: int) -> None:
        if chars > self.chars:
            raise TokenizerError(f"the chat template builds over {self.chars} characters; it is broken or hostile, use --raw")

    def allow(self, chars: int) -> None:
        self.bound(chars)
        self.spend(chars // _CHARS_PER_STEP)

    def allow_all(self, value: Any) -> None:
        """As `allow`, for everything inside lists and dicts too; what is shared counts as often as it would be printed."""
        chars = visited = 0
        pending = [value]
        while pending:
            item = pending.pop()
            visited += 1
            if isinstance(item, str | bytes):
                chars += len(item)
            elif isinstance(item, list | tuple):
                pending.extend(item)
            elif isinstance(item, dict):
                pending.extend(item.keys())
                pending.extend(item.values())
            if chars + visited + len(pending) > self.chars:
                self.bound(chars + visited + len(pending))
        self.spend(visited // 16)
        self.allow(chars)


class _Metered(NodeTransformer):
    """Routes what a template can multiply work with (loops, `~`, lists in lists) through filters that spend the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "metered_loop", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes, lineno=node.lineno), "metered_concat", [], [], None, None, lineno=node.lineno)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node  # the targets of an unpacking
        return nodes.Filter(node, "metered_literal", [], [], None, None, lineno=node.lineno)

    visit_Tuple = visit_Dict = visit_List  # noqa: N815


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every way to build something large checked before it is built."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols], finalize=_spend_output)
        self.budget = _Budget(0, 0)
        self.filters = {name: self._metered(self.filters[name]) for name in _TEXT_FILTERS + _LIST_FILTERS + _OTHER_FILTERS}
        self.filters |= {"tojson": self._metered(_to_json), "indent": self._metered(_indent)}
        self.filters |= {"metered_loop": self._metered_loop, "metered_concat": self._metered_concat}
        self.filters |= {"metered_literal": self._metered_literal, "replace": self._replace}
        self.globals = {
            "range": self._range,
            "dict": dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metered().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend(1)
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "+" and not numbers:
            self.budget.allow_all([left, right])
        elif operator == "*" and not numbers:
            self.budget.allow(max(_size(left), 1) * max(_size(right), 1) * max(_count(left), 1) * max(_count(right), 1))
            self.budget.allow_all([left, right])
        elif operator in ("*", "**") and max(abs(left), abs(right)) > 1 << 32:
            raise TokenizerError(f"the chat template computes {operator} of numbers beyond 2**32")
        elif operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
            raise TokenizerError("the chat template computes a power beyond the 64th")
        elif operator == "%" and isinstance(left, str) and re.search(r"\*|\d{4}", left):
            raise TokenizerError("the chat template formats with a width beyond 999")
        result = super().call_binop(context, operator, left, right)
        if not numbers:
            self.budget.allow_all(result)
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # Jinja passes a template's own keyword arguments through here, `self` and `context` among them.
        __self.budget.spend(1)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            if name in _GROWING_METHODS:
                raise TokenizerError(f"the chat template calls str.{name}, which is not offered to templates")
            if name == "join" and args:
                return __self._metered_concat(list(__self._metered_loop(args[0])), owner)
            if name == "replace" and len(args) >= 2:
                __self.budget.allow(owner.count(str(args[0])) * len(str(args[1])))
            __self.budget.allow(len(owner))
        elif getattr(__obj, "__name__", "") in _GROWING_METHODS and not isinstance(__obj, Macro):
            raise TokenizerError(f"the chat template calls {__obj.__name__}, which is not offered to templates")
        result = super().call(__context, __obj, *args, **kwargs)
        __self.budget.allow_all(result)
        return result

    def _metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # keeps jinja's mark of functions that want the environment first
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend(1)
            for argument in args:
                self.budget.allow(_size(argument))
            result = function(*args, **kwargs)
            self.budget.allow(_size(result))
            return result

        return metered

    def _metered_loop(self, values: Any) -> Iterator[Any]:
        if isinstance(values, Undefined) or not isinstance(values, Iterable):
            values = iter(values)  # jinja's own words for what is wrong with it
        for value in values:
            self.budget.spend(1)
            yield value

    def _metered_literal(self, value: Any) -> Any:
        self.budget.allow_all(value)
        return value

    def _metered_concat(self, values: list[Any], glue: str = "") -> str:
        texts = [value if isinstance(value, str) else str(value) for value in values]
        self.budget.spend(len(texts))
        self.budget.allow(sum(map(len, texts)) + len(glue) * len(texts))
        return glue.join(texts)

    def _replace(self, text: Any, old: Any, new: Any, count: int = -1) -> str:
        text, old, new = str(text), str(old), str(new)
        self.budget.allow(len(text) + text.count(old) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        if len(numbers) > _MAX_RANGE:
            raise TokenizerError(f"the chat template wants a range of {len(numbers)} numbers; at most {_MAX_RANGE} are given")
        return numbers


@jinja2.pass_context
def _spend_output(context: Context, value: Any) -> Any:
    """Every printed value passes here, in blocks that are kept in a variable too."""
    environment = context.environment
    assert isinstance(environment, _Environment), "a template belongs to the environment that compiled it"
    environment.budget.allow_all(value)
    return value


class _Namespace(Namespace):
    """Prints without its contents, which may be namespaces again."""

    def __repr__(self) -> str:
        return "<namespace>"


def _size(value: Any) -> int:
    """About how many characters `value` stands for, one level deep."""
    if isinstance(value, str | bytes):
        return len(value)
    return 8 * len(value) if isinstance(value, list | tuple | dict) else 0


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 1


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not 0 <= indent <= 16:
        raise TokenizerError(f"the chat template wants JSON indented by {indent}; at most 16 is given")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * min(width, 64)
    lines = str(text).splitlines() or [""]
    return "\n".join(margin + line if (line or blank) and (first or i) else line for i, line in enumerate(lines))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:200])

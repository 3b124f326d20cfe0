"""Walks through the syntax tree that jinja parsed. What is not listed here at the end does not run.

Scopes are those of jinja: loops, macros, `with`, blocks of `set`, `call` and `filter` have their own, `if` has not.
One thing differs: where a scope sets a variable of the caller, scopes inside of it see the caller's value until then.
jinja has the variable undefined there.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.parser import Parser
from jinja2.runtime import Undefined

from cpuspec.chat_template.budget import PER_ENTRY, PER_ITEM, PER_VALUE, Budget
from cpuspec.chat_template.filters import apply_filter, apply_test
from cpuspec.chat_template.operations import Operations
from cpuspec.chat_template.values import MAX_INTEGER, Function, Loop, Namespace
from cpuspec.errors import TokenizerError

_MAX_NESTING = 120  # of nodes in nodes; a level is two calls in Python, whose stack ends at a thousand
_MAX_CALLS = 100  # macros in macros, and blocks of `set`, `call` and `filter` in them
_ROOM_OF_SCOPE = 8 * PER_ENTRY  # a macro keeps the scope that it was defined in


class _Generation(jinja2.ext.Extension):
    """transformers marks what the model says by `generation`; its text is rendered as any other."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


_PARSER = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])


def parse(source: str) -> nodes.Template:
    """The syntax tree, of nodes that run here. Raises jinja's errors, or TokenizerError for what is not offered."""
    tree = _PARSER.parse(source)
    pending: list[tuple[nodes.Node, int]] = [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        name = type(node).__name__
        if type(node) not in KNOWN_NODES:
            raise TokenizerError(f"line {node.lineno} of the chat template holds {name}, which is not offered to templates")
        if depth > _MAX_NESTING:
            raise TokenizerError(f"line {node.lineno} of the chat template is nested deeper than {_MAX_NESTING}")
        if isinstance(node, nodes.Const) and isinstance(node.value, int) and node.value > MAX_INTEGER:
            raise TokenizerError(f"line {node.lineno} of the chat template holds a number beyond 64 bits")
        pending.extend((child, depth + 1) for child in node.iter_child_nodes())
    return tree


class _Scope:
    """Names, and where to look for others."""

    __slots__ = ("parent", "variables")

    def __init__(self, variables: dict[str, Any], parent: "_Scope | None") -> None:
        self.variables = variables
        self.parent = parent

    def find(self, name: str) -> Any:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.variables:
                return scope.variables[name]
            scope = scope.parent
        return Undefined(name=name)


class _Break(Exception):  # noqa: N818
    """Leaves the loop."""


class _Continue(Exception):  # noqa: N818
    """Leaves the round."""


_FILTERED = ""  # names the text that a filter block or `set` block filters; no template can name it


class Interpreter:
    """One rendering."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._do = Operations(budget)
        self._out: list[str] = []
        self._captures = 0  # that are at work

    def render(self, tree: nodes.Template, variables: dict[str, Any]) -> str:
        """The text. Raises TokenizerError beyond the budget, else jinja's and Python's errors for what the template does wrong."""
        scope = _Scope({}, _Scope({**self._do.globals, **variables}, None))
        return self._capture(lambda: self._run(tree.body, scope))

    def _run(self, body: list[nodes.Node], scope: _Scope) -> None:
        for node in body:
            self._budget.spend(1)
            _STATEMENTS[type(node)](self, node, scope)

    def _evaluate(self, node: nodes.Node, scope: _Scope) -> Any:
        self._budget.spend(1)
        return _EXPRESSIONS[type(node)](self, node, scope)

    # Statements

    def _print(self, text: str) -> None:
        self._budget.make(PER_ITEM + len(text))
        self._out.append(text)

    def _capture(self, run: Callable[[], None]) -> str:
        """What is printed meanwhile. Its pieces have paid for the text."""
        if self._captures > _MAX_CALLS:
            raise TokenizerError(f"the chat template calls itself more than {_MAX_CALLS} times")
        self._captures += 1
        self._budget.make(PER_VALUE)
        outer, self._out = self._out, []
        try:
            run()
            return "".join(self._out)
        except (_Break, _Continue):
            raise TemplateRuntimeError("break or continue outside of a loop") from None
        finally:
            self._out = outer
            self._captures -= 1

    def _output(self, node: nodes.Output, scope: _Scope) -> None:
        for child in node.nodes:
            self._print(child.data if isinstance(child, nodes.TemplateData) else self._do.text(self._evaluate(child, scope)))

    def _if(self, node: nodes.If, scope: _Scope) -> None:
        for branch in (node, *node.elif_):
            if self._evaluate(branch.test, scope):
                return self._run(branch.body, scope)
        return self._run(node.else_, scope)

    def _for(self, node: nodes.For, scope: _Scope) -> None:
        self._loop(node, scope, self._evaluate(node.iter, scope), 0)

    def _loop(self, node: nodes.For, scope: _Scope, values: Any, depth0: int) -> None:
        self._budget.make(_ROOM_OF_SCOPE)
        items = self._do.iterate(values)
        length = len(values) if node.test is None and hasattr(type(values), "__len__") else None
        if node.test is not None:
            items = self._passing(node.target, node.test, items, scope)

        def recurse(values: Any) -> str:
            return self._capture(lambda: self._loop(node, scope, values, depth0 + 1))

        loop = Loop(items, length, depth0, recurse if node.recursive else None)
        runs_else = True
        for item in loop:
            self._budget.spend(1)
            inner = _Scope({"loop": loop}, scope)
            self._assign(node.target, item, inner)
            try:
                self._run(node.body, inner)
            except _Continue:
                continue
            except _Break:
                break
            runs_else = False  # so in jinja: rounds that `break` or `continue` ended do not count
        if runs_else:
            self._run(node.else_, _Scope({}, scope))

    def _passing(self, target: nodes.Node, test: nodes.Node, items: Iterator[Any], scope: _Scope) -> Iterator[Any]:
        for item in items:
            self._budget.make(PER_ITEM)  # `loop.length` keeps them
            inner = _Scope({}, scope)
            self._assign(target, item, inner)
            if self._evaluate(test, inner):
                yield item

    def _define_macro(self, node: nodes.Macro, scope: _Scope) -> None:
        scope.variables[node.name] = self._macro(node, scope)

    def _macro(self, node: nodes.Macro | nodes.CallBlock, scope: _Scope) -> Function:
        self._budget.make(_ROOM_OF_SCOPE)
        return Function(lambda *args, **kwargs: self._call_macro(node, scope, args, kwargs))

    def _call_macro(self, node: nodes.Macro | nodes.CallBlock, scope: _Scope, args: Any, kwargs: dict[str, Any]) -> str:
        self._budget.make(_ROOM_OF_SCOPE + PER_ITEM * len(args) + PER_ENTRY * len(kwargs))
        names = [arg.name for arg in node.args]
        given = dict(zip(names, args, strict=False))
        given |= {name: kwargs.pop(name) for name in names[len(args) :] if name in kwargs}
        caller = kwargs.pop("caller", Undefined("No caller defined", name="caller"))
        inner = _Scope({"caller": caller, "varargs": tuple(args[len(names) :]), "kwargs": kwargs, **given}, scope)
        defaults = [None] * (len(names) - len(node.defaults)) + node.defaults
        for name, default in zip(names, defaults, strict=True):
            if name not in given:
                hint = f"parameter {name[:100]!r} was not provided"
                inner.variables[name] = Undefined(hint, name=name) if default is None else self._evaluate(default, inner)
        return self._capture(lambda: self._run(node.body, inner))

    def _call_block(self, node: nodes.CallBlock, scope: _Scope) -> None:
        self._print(self._do.text(self._call(node.call, scope, {"caller": self._macro(node, scope)})))

    def _filter_block(self, node: nodes.FilterBlock, scope: _Scope) -> None:
        self._print(self._do.text(self._filtered(node.body, node.filter, scope)))

    def _filtered(self, body: list[nodes.Node], filter_: nodes.Filter | None, scope: _Scope) -> Any:
        inner = _Scope({}, scope)
        text = self._capture(lambda: self._run(body, inner))
        if filter_ is None:
            return text
        inner.variables[_FILTERED] = text
        return self._evaluate(filter_, inner)

    def _with(self, node: nodes.With, scope: _Scope) -> None:
        inner = _Scope({}, scope)
        for target, value in zip(node.targets, node.values, strict=True):
            self._assign(target, self._evaluate(value, scope), inner)
        self._run(node.body, inner)

    def _set(self, node: nodes.Assign, scope: _Scope) -> None:
        self._assign(node.target, self._evaluate(node.node, scope), scope)

    def _set_block(self, node: nodes.AssignBlock, scope: _Scope) -> None:
        self._assign(node.target, self._filtered(node.body, node.filter, scope), scope)

    def _assign(self, target: nodes.Node, value: Any, scope: _Scope) -> None:
        self._budget.spend(1)
        if isinstance(target, nodes.Name):
            scope.variables[target.name] = value
        elif isinstance(target, nodes.NSRef):
            namespace = scope.find(target.name)
            if not isinstance(namespace, Namespace):
                raise TemplateRuntimeError("cannot assign attribute on non-namespace object")
            namespace.attributes[target.attr] = value
        else:
            assert isinstance(target, nodes.Tuple), "jinja's parser allows no other target"
            values = list(itertools.islice(self._do.iterate(value), len(target.items) + 1))
            if len(values) != len(target.items):
                raise ValueError(
                    f"wanted {len(target.items)} values to unpack, got {'more' if values[len(target.items) :] else len(values)}"
                )
            for part, item in zip(target.items, values, strict=True):
                self._assign(part, item, scope)

    def _scoped(self, node: nodes.Scope, scope: _Scope) -> None:
        self._run(node.body, _Scope({}, scope))

    def _break(self, node: nodes.Break, scope: _Scope) -> None:
        raise _Break

    def _continue(self, node: nodes.Continue, scope: _Scope) -> None:
        raise _Continue

    # Expressions

    def _name(self, node: nodes.Name, scope: _Scope) -> Any:
        return scope.find(node.name)

    def _const(self, node: nodes.Const, scope: _Scope) -> Any:
        return node.value

    def _tuple(self, node: nodes.Tuple, scope: _Scope) -> tuple[Any, ...]:
        return tuple(self._list(node, scope))

    def _list(self, node: nodes.List | nodes.Tuple, scope: _Scope) -> list[Any]:
        self._budget.make(PER_VALUE + 2 * PER_ITEM * len(node.items))
        return [self._evaluate(item, scope) for item in node.items]

    def _dict(self, node: nodes.Dict, scope: _Scope) -> dict[Any, Any]:
        return self._do.make_dict((self._evaluate(pair.key, scope), self._evaluate(pair.value, scope)) for pair in node.items)

    def _choice(self, node: nodes.CondExpr, scope: _Scope) -> Any:
        if self._evaluate(node.test, scope):
            return self._evaluate(node.expr1, scope)
        if node.expr2 is None:
            return Undefined(f"the inline if-expression on line {node.lineno} evaluated to false and no else section was defined.")
        return self._evaluate(node.expr2, scope)

    def _arguments(self, node: Any, scope: _Scope) -> tuple[list[Any], dict[str, Any]]:
        args = [self._evaluate(arg, scope) for arg in node.args]
        kwargs = {keyword.key: self._evaluate(keyword.value, scope) for keyword in node.kwargs}
        if node.dyn_args is not None:
            args += self._do.make_list(self._do.iterate(self._evaluate(node.dyn_args, scope)))
        if node.dyn_kwargs is not None:
            more = self._evaluate(node.dyn_kwargs, scope)
            if not isinstance(more, dict) or kwargs.keys() & more.keys():
                raise TypeError("wanted a dict of other keyword arguments behind **")
            kwargs |= self._do.make_dict(more.items())
        return args, kwargs

    def _filter(self, node: nodes.Filter, scope: _Scope) -> Any:
        value = scope.find(_FILTERED) if node.node is None else self._evaluate(node.node, scope)
        return apply_filter(self._do, node.name, value, *self._arguments(node, scope))

    def _test(self, node: nodes.Test, scope: _Scope) -> bool:
        return apply_test(self._do, node.name, self._evaluate(node.node, scope), *self._arguments(node, scope))

    def _call(self, node: nodes.Call, scope: _Scope, more: dict[str, Any] | None = None) -> Any:
        function = self._evaluate(node.node, scope)
        args, kwargs = self._arguments(node, scope)
        return self._do.call(function, args, {**kwargs, **(more or {})})

    def _getattr(self, node: nodes.Getattr, scope: _Scope) -> Any:
        return self._do.attribute(self._evaluate(node.node, scope), node.attr)

    def _getitem(self, node: nodes.Getitem, scope: _Scope) -> Any:
        value = self._evaluate(node.node, scope)
        if not isinstance(node.arg, nodes.Slice):
            return self._do.item(value, self._evaluate(node.arg, scope))
        limits = (node.arg.start, node.arg.stop, node.arg.step)
        return self._do.slice(value, *(None if limit is None else self._evaluate(limit, scope) for limit in limits))

    def _concat(self, node: nodes.Concat, scope: _Scope) -> str:
        return self._do.join([self._do.text(self._evaluate(part, scope)) for part in node.nodes])

    def _compare(self, node: nodes.Compare, scope: _Scope) -> bool:
        left = self._evaluate(node.expr, scope)
        for operand in node.ops:
            right = self._evaluate(operand.expr, scope)
            if not self._do.compare(operand.op, left, right):
                return False
            left = right
        return True

    def _and(self, node: nodes.And, scope: _Scope) -> Any:
        return self._evaluate(node.left, scope) and self._evaluate(node.right, scope)

    def _or(self, node: nodes.Or, scope: _Scope) -> Any:
        return self._evaluate(node.left, scope) or self._evaluate(node.right, scope)

    def _not(self, node: nodes.Not, scope: _Scope) -> bool:
        return not self._evaluate(node.node, scope)

    def _negate(self, node: nodes.Neg, scope: _Scope) -> Any:
        return self._do.negate(self._evaluate(node.node, scope))

    def _affirm(self, node: nodes.Pos, scope: _Scope) -> Any:
        return self._do.affirm(self._evaluate(node.node, scope))

    def _calculate(self, node: nodes.BinExpr, scope: _Scope) -> Any:
        return self._do.calculate(node.operator, self._evaluate(node.left, scope), self._evaluate(node.right, scope))


_STATEMENTS: dict[type[nodes.Node], Callable[[Interpreter, Any, _Scope], None]] = {
    nodes.Assign: Interpreter._set,
    nodes.AssignBlock: Interpreter._set_block,
    nodes.Break: Interpreter._break,
    nodes.CallBlock: Interpreter._call_block,
    nodes.Continue: Interpreter._continue,
    nodes.FilterBlock: Interpreter._filter_block,
    nodes.For: Interpreter._for,
    nodes.If: Interpreter._if,
    nodes.Macro: Interpreter._define_macro,
    nodes.Output: Interpreter._output,
    nodes.Scope: Interpreter._scoped,
    nodes.With: Interpreter._with,
}
_EXPRESSIONS: dict[type[nodes.Node], Callable[[Interpreter, Any, _Scope], Any]] = {
    nodes.And: Interpreter._and,
    nodes.Call: Interpreter._call,
    nodes.Compare: Interpreter._compare,
    nodes.Concat: Interpreter._concat,
    nodes.CondExpr: Interpreter._choice,
    nodes.Const: Interpreter._const,
    nodes.Dict: Interpreter._dict,
    nodes.Filter: Interpreter._filter,
    nodes.Getattr: Interpreter._getattr,
    nodes.Getitem: Interpreter._getitem,
    nodes.List: Interpreter._list,
    nodes.Name: Interpreter._name,
    nodes.Neg: Interpreter._negate,
    nodes.Not: Interpreter._not,
    nodes.Or: Interpreter._or,
    nodes.Pos: Interpreter._affirm,
    nodes.Test: Interpreter._test,
    nodes.Tuple: Interpreter._tuple,
    **dict.fromkeys((nodes.Add, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Mul, nodes.Pow, nodes.Sub), Interpreter._calculate),
}
# What the nodes above hold and evaluate themselves.
_PARTS = (nodes.Keyword, nodes.NSRef, nodes.Operand, nodes.Pair, nodes.Slice, nodes.Template, nodes.TemplateData)
KNOWN_NODES = frozenset((*_STATEMENTS, *_EXPRESSIONS, *_PARTS))

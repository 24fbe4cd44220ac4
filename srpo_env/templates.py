"""How prompts are rendered and conditions are evaluated: one sandbox for both.

A template is Jinja with variables, `if`, `for` over short lists, and a few filters; an expression is what stands in
its braces. Neither calls functions or methods, imports, or sees an attribute that is not data, so that a workflow file
from a stranger can be loaded, and text from a model is never code. A line that holds nothing but a `{% tag %}` leaves
no line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import NoneType
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS as JINJA_TESTS

from srpo_env.errors import InvalidWorkflow
from srpo_env.spec import EXPRESSION_CHARS

MOST_CHARS = 16_000_000
"""Longest rendered text."""
MOST_TEMPLATE_CHARS = 100_000
MOST_ITEMS = 1000
"""Longest list that a `for` goes through."""
MOST_LOOPS = 2
"""Deepest nesting of `for`."""
MOST_DEPTH = 60
"""Deepest nesting of anything."""

FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "first", "float", "int", "last", "length", "list", "lower", "map"),
    *("max", "min", "reject", "rejectattr", "reverse", "round", "select", "selectattr", "sort", "string", "sum"),
    *("title", "trim", "truncate", "unique", "upper", "wordcount"),
)
"""Filters of Jinja's own; `join`, `replace` and `tojson` are ours."""
TESTS = (
    *("defined", "undefined", "none", "number", "integer", "float", "string", "mapping", "sequence", "boolean"),
    *("true", "false", "odd", "even", "divisibleby", "in", "==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan"),
    *("<=", "le", ">", "gt", "greaterthan", ">=", "ge"),
)

_ALLOWED = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Name, nodes.Const, nodes.Getattr),
    *(nodes.Getitem, nodes.Slice, nodes.Filter, nodes.Test, nodes.Compare, nodes.Operand, nodes.And, nodes.Or),
    *(nodes.Not, nodes.Neg, nodes.Pos, nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod),
    *(nodes.Concat, nodes.CondExpr, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Keyword),
)
_WORDS = {
    "Call": "a call of a function or method",
    "Pow": "a power",
    "Assign": "a `set`",
    "AssignBlock": "a `set`",
}
_SPECIAL = frozenset({"self", "super", "caller", "varargs", "kwargs"})
_STANDALONE = re.compile(r"^[ \t]*(\{([%#])(?:(?!\2\}|\{\2).)*?)([-+]?\2\})[ \t]*\n", re.MULTILINE)
_RAW = re.compile(r"\{%[-+]?\s*raw\b")
_RUNTIME = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


class TemplateError(InvalidWorkflow):
    """A template or expression can't be compiled or evaluated.

    Attributes:
        line: The line of the text, from 1.
    """

    def __init__(self, message: str, line: int = 1) -> None:
        super().__init__(message)
        self.line = line


_MISSING = object()


@cache
def _shown_of(kind: type) -> Literal["keys", "attributes"] | None:
    """What a template sees of an object of this type: its keys, its attributes that are data, or neither."""
    if issubclass(kind, Mapping):
        return "keys"
    plain = issubclass(kind, str | bytes | int | float | Sequence | NoneType | jinja2.Undefined)
    return None if plain else "attributes"


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "%", "+"})

    def __init__(self) -> None:
        super().__init__(undefined=jinja2.StrictUndefined, autoescape=False, cache_size=0)
        self.globals = {}
        self.filters = {name: JINJA_FILTERS[name] for name in FILTERS}
        self.filters.update(replace=_replace, tojson=_json, _items=_items, join=_join)
        self.tests = {name: JINJA_TESTS[name] for name in TESTS}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns a key of a mapping, or an attribute that is data; nothing else of an object can be seen."""
        shown = _shown_of(obj.__class__)
        if shown == "keys":
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute, hint=f"there is no {attribute!r} here")
        if shown == "attributes" and not attribute.startswith("_"):
            value = getattr(obj, attribute, _MISSING)
            if value is not _MISSING:
                return self.undefined(hint=f"{attribute!r} is not data") if callable(value) else value
        if obj is None:
            return self.undefined(hint=f"'.{attribute}' is asked of a node that was not visited, or of null")
        if isinstance(obj, jinja2.Undefined):
            return obj
        return self.undefined(hint=f"{_kind(obj)} has no {attribute!r}")

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Returns an item of a list, a character of a text, or what `getattr` gives."""
        if isinstance(argument, str):
            return self.getattr(obj, argument)
        try:
            return obj[argument]
        except (TypeError, LookupError, AttributeError):
            return self.undefined(hint=f"{_kind(obj)} has no item {argument!r}")

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Computes with numbers; joins texts and lists by `+`; never repeats or formats text."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if not numbers and (operator != "+" or type(left) is not type(right)):
            raise TypeError(f"{_kind(left)} {operator} {_kind(right)} has no meaning")
        if operator == "+" and not numbers and len(left) + len(right) > MOST_CHARS:
            raise ValueError(f"a text would have more than {MOST_CHARS} characters")
        return super().call_binop(context, operator, left, right)


_KINDS = {
    "str": "text",
    "int": "a number",
    "float": "a number",
    "NoneType": "null",
    "list": "a list",
    "tuple": "a list",
}


def _kind(value: Any) -> str:
    _defined(value)
    return _KINDS.get(type(value).__name__, f"a {type(value).__name__}")


def _defined(value: Any) -> None:
    """Raises jinja2.UndefinedError for what is undefined."""
    if isinstance(value, jinja2.Undefined):
        str(value)


def _replace(value: Any, old: str, new: str) -> str:
    text, old, new = str(value), str(old), str(new)
    if len(text) + text.count(old) * len(new) > MOST_CHARS:
        raise ValueError(f"a text would have more than {MOST_CHARS} characters")
    return text.replace(old, new)


def _join(items: Any, between: str = "", attribute: str | None = None) -> str:
    items = _items(items)
    if attribute is not None:
        items = [_ENVIRONMENT.getattr(item, attribute) for item in items]
    texts = [str(item) for item in items]
    if sum(map(len, texts)) + len(str(between)) * len(texts) > MOST_CHARS:
        raise ValueError(f"a text would have more than {MOST_CHARS} characters")
    return str(between).join(texts)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _items(value: Any) -> list[Any]:
    """What a `for` goes through: a list, never the characters of a text, and never a long one."""
    if isinstance(value, str | bytes):
        raise TypeError("a `for` goes through lists, not through a text")
    items = []
    for item in value:
        items.append(item)
        if len(items) > MOST_ITEMS:
            raise ValueError(f"a `for` goes through at most {MOST_ITEMS} items")
    return items


_ENVIRONMENT = _Sandbox()


@dataclass(frozen=True, slots=True)
class Template:
    """A compiled prompt.

    Attributes:
        of_member: Whether it asks for `member`.
    """

    text: str
    compiled: jinja2.Template
    of_member: bool

    def render(self, scope: Mapping[str, Any]) -> str:
        """Returns the text with what `scope` holds.

        Raises:
            TemplateError: A variable is undefined or null where a part of it is asked for, or the text grows too long.
        """
        chunks = []
        length = 0
        try:
            for chunk in self.compiled.root_render_func(self.compiled.new_context(dict(scope))):
                chunks.append(chunk)
                length += len(chunk)
                if length > MOST_CHARS:
                    raise ValueError(f"the text would have more than {MOST_CHARS} characters")
        except _RUNTIME as error:
            line = _line_of(error, self.compiled)
            raise TemplateError(f"line {line} of the template: {_message(error)}", line) from error
        return "".join(chunks)


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression.

    Attributes:
        path: The names of a plain `a.b.c`, which is looked up without a template engine; None for any other.
    """

    text: str
    compiled: jinja2.Template
    path: tuple[str, ...] | None

    def evaluate(self, scope: Mapping[str, Any]) -> Any:
        """Returns the value, as Python has it.

        Raises:
            TemplateError: A variable is undefined or null where a part of it is asked for, or types don't fit.
        """
        try:
            if self.path is not None and self.path[0] in scope:
                value = scope[self.path[0]]
                for name in self.path[1:]:
                    value = _ENVIRONMENT.getattr(value, name)
                _defined(value)
                return value
            context = self.compiled.new_context(dict(scope))
            for _ in self.compiled.root_render_func(context):
                pass
            value = context.vars["value"]
            _defined(value)
        except _RUNTIME as error:
            raise TemplateError(f"expression `{self.text}`: {_message(error)}") from error
        return value


def _message(error: BaseException) -> str:
    return (error.message if isinstance(error, jinja2.TemplateError) else None) or str(error) or type(error).__name__


def _line_of(error: BaseException, template: jinja2.Template) -> int:
    trace, line = error.__traceback__, 1
    while trace is not None:
        if (
            trace.tb_frame.f_code.co_name in ("root", "__jinja_template__")
            or trace.tb_frame.f_code.co_filename == "<template>"
        ):
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return line


def parse_template(text: str) -> nodes.Template:
    """Returns the syntax tree of a template.

    Raises:
        TemplateError: The syntax is wrong, or uses what templates here don't have.
    """
    if len(text) > MOST_TEMPLATE_CHARS:
        raise TemplateError(f"the template has {len(text)} characters; at most {MOST_TEMPLATE_CHARS} are allowed")
    try:
        source = text if _RAW.search(text) else _STANDALONE.sub(r"\1\n\3", text)
        tree = Parser(_ENVIRONMENT, source).parse()
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(_message(error), error.lineno) from error
    except (RecursionError, MemoryError) as error:
        raise TemplateError("the template is nested too deeply") from error
    _refuse(tree)
    return tree


def parse_expression(text: str) -> nodes.Expr:
    """Returns the syntax tree of an expression.

    Raises:
        TemplateError: The syntax is wrong, or uses what expressions here don't have.
    """
    if len(text) > EXPRESSION_CHARS:
        raise TemplateError(f"the expression has {len(text)} characters; at most {EXPRESSION_CHARS} are allowed")
    try:
        parser = Parser(_ENVIRONMENT, text, state="variable")
        tree = parser.parse_expression()
        if not parser.stream.eos:
            raise TemplateError(f"`{text}`: unexpected {parser.stream.current.value!r} after the expression")
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"`{text}`: {_message(error)}") from error
    except (RecursionError, MemoryError) as error:
        raise TemplateError("the expression is nested too deeply") from error
    _refuse(tree)
    tree.set_environment(_ENVIRONMENT)
    return tree


def _refuse(tree: nodes.Node) -> None:
    """Raises TemplateError where a tree holds what templates here don't have."""
    pending: list[tuple[nodes.Node, int, int]] = [(tree, 0, 0)]
    while pending:
        node, loops, depth = pending.pop()
        if depth > MOST_DEPTH:
            raise TemplateError("the template is nested too deeply", node.lineno)
        if not isinstance(node, _ALLOWED):
            kind = type(node).__name__
            what = _WORDS.get(kind, f"a {kind.lower()}")
            raise TemplateError(f"{what} is not allowed; use variables, filters, `if` and `for`", node.lineno)
        if isinstance(node, nodes.Filter | nodes.Test):
            known = _ENVIRONMENT.filters if isinstance(node, nodes.Filter) else _ENVIRONMENT.tests
            if node.name not in known:
                raise TemplateError(f"no {type(node).__name__.lower()} {node.name!r}", node.lineno)
        if isinstance(node, nodes.Name) and node.name in _SPECIAL:
            raise TemplateError(f"'{node.name}' is not data", node.lineno)
        if isinstance(node, nodes.Getattr) and node.attr.startswith("_"):
            raise TemplateError(f"{node.attr!r}: names that begin with _ are not data", node.lineno)
        if isinstance(node, nodes.For):
            loops += 1
            if loops > MOST_LOOPS or node.recursive:
                raise TemplateError(f"`for` is nested at most {MOST_LOOPS} times and is not recursive", node.lineno)
        pending.extend((child, loops, depth + 1) for child in node.iter_child_nodes())


@lru_cache(maxsize=4096)
def compile_template(text: str) -> Template:
    """Returns a compiled template; compiled once for each text.

    Raises:
        TemplateError: See `parse_template`.

    Example:
        >>> compile_template("{% if hint %}Hint: {{ hint }}{% endif %}").render({"hint": "add"})
        'Hint: add'
    """
    tree = parse_template(text)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "_items", [], [], None, None, lineno=loop.lineno)
    tree.set_environment(_ENVIRONMENT)
    return Template(text, _compile(tree), any(name.name == "member" for name in tree.find_all(nodes.Name)))


@lru_cache(maxsize=4096)
def compile_expression(text: str) -> Expression:
    """Returns a compiled expression; compiled once for each text.

    Raises:
        TemplateError: See `parse_expression`.

    Example:
        >>> compile_expression("visits.solve >= 2").evaluate({"visits": {"solve": 2}})
        True
    """
    tree = parse_expression(text)
    assignment = nodes.Assign(nodes.Name("value", "store", lineno=1), tree, lineno=1)
    return Expression(text, _compile(nodes.Template([assignment], lineno=1)), _path(tree))


def _path(tree: nodes.Expr) -> tuple[str, ...] | None:
    names: list[str] = []
    while isinstance(tree, nodes.Getattr):
        names.append(tree.attr)
        tree = tree.node
    return (tree.name, *reversed(names)) if isinstance(tree, nodes.Name) else None


def _compile(tree: nodes.Template) -> jinja2.Template:
    try:
        compiled = _ENVIRONMENT.from_string(tree)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(_message(error), error.lineno) from error
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise TemplateError("the text is nested too deeply") from error
    compiled.globals = {}  # there are none; the chain of them that jinja2 makes is slow to copy at each use
    return compiled

"""Which variables a template or expression uses, and whether each use is guarded.

A node's name is None until the node was visited. The walk over the syntax tree carries the nodes that are known to be
visited there: after `{% if verify %}`, right of `verify and`, where `visits.verify > 0`, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jinja2 import nodes

Path = tuple[str, ...]
"""A dotted path: ("verify", "text"); an item of a list is "[]"."""

Facts = frozenset[str]
"""Nodes that are known to be visited."""

NOTHING: Facts = frozenset()
_SAME_LIST = frozenset({"selectattr", "rejectattr", "select", "reject", "sort", "reverse", "unique", "list"})
_BY_ATTRIBUTE = frozenset({"selectattr", "rejectattr"})
_AT_LEAST_ONE = {("gt", 0), ("gteq", 1), ("ne", 0), ("eq", 1)}


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a variable.

    Attributes:
        path: What is used.
        line: On which line of the text, from 1.
        guarded: Whether the node that the path begins with is known to be visited here, or may be None here.
        printed: Whether the whole value is written into the text.
    """

    path: Path
    line: int
    guarded: bool
    printed: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of a variable with a constant text."""

    path: Path
    value: str
    line: int


@dataclass
class Variables:
    """What a template or expression uses."""

    uses: list[Use] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)


def variables_of(tree: nodes.Node) -> Variables:
    """Returns what a tree of `parse_template` or `parse_expression` uses.

    Example:
        >>> from srpo_env.templates import parse_expression
        >>> [(use.path, use.guarded) for use in variables_of(parse_expression("verify and verify.parsed")).uses]
        [(('verify',), True), (('verify', 'parsed'), True)]
    """
    walk = _Walk()
    if isinstance(tree, nodes.Expr):
        walk.expression(tree, NOTHING)
    else:
        walk.statements(tree.iter_child_nodes(), NOTHING)
    return walk.found


class _Walk:
    def __init__(self) -> None:
        self.found = Variables()
        self.bound: dict[str, Path | None] = {}
        """Names bound by `for`: the path of the item, None where it has none."""

    # Statements.

    def statements(self, body: Iterable[nodes.Node], known: Facts) -> None:
        for node in body:
            match node:
                case nodes.Output():
                    for child in node.nodes:
                        if isinstance(child, nodes.Expr):
                            self.expression(child, known, printed=True)
                case nodes.If():
                    self._if(node, known)
                case nodes.For():
                    self._for(node, known)

    def _if(self, node: nodes.If, known: Facts) -> None:
        true, false = self.expression(node.test, known)
        self.statements(node.body, known | true)
        known |= false
        for branch in node.elif_:
            true, false = self.expression(branch.test, known)
            self.statements(branch.body, known | true)
            known |= false
        self.statements(node.else_, known)

    def _for(self, node: nodes.For, known: Facts) -> None:
        self.expression(node.iter, known)
        items = self._list_path(node.iter)
        outside = dict(self.bound)
        self.bound["loop"] = None
        for name in node.target.find_all(nodes.Name):
            self.bound[name.name] = None
        if isinstance(node.target, nodes.Name):
            self.bound[node.target.name] = None if items is None else (*items, "[]")
        true = self.expression(node.test, known)[0] if node.test is not None else NOTHING
        self.statements(node.body, known | true)
        self.bound = outside
        self.statements(node.else_, known)

    def _list_path(self, node: nodes.Node) -> Path | None:
        while isinstance(node, nodes.Filter) and node.name in _SAME_LIST and node.node is not None:
            node = node.node
        path = self._path(node)
        return path or None

    # Expressions: each returns what is known where it is true, and where it is false.

    def expression(
        self, node: nodes.Node, known: Facts, *, printed: bool = False, lenient: bool = False
    ) -> tuple[Facts, Facts]:
        """Notes the uses in an expression; returns the facts where it holds and where it does not."""
        path = self._path(node)
        if path is not None:
            return self._use(node, path, known, printed, lenient)
        match node:
            case nodes.And() | nodes.Or() | nodes.Not():
                return self._logic(node, known)
            case nodes.CondExpr():
                true, false = self.expression(node.test, known)
                self.expression(node.expr1, known | true, printed=printed)
                if node.expr2 is not None:
                    self.expression(node.expr2, known | false, printed=printed)
                return NOTHING, NOTHING
            case nodes.Test():
                return self._test(node, known)
            case nodes.Compare():
                return self._compare(node, known)
            case nodes.Filter():
                return self._filter(node, known, lenient)
        for child in node.iter_child_nodes():
            self.expression(child, known)
        return NOTHING, NOTHING

    def _logic(self, node: nodes.And | nodes.Or | nodes.Not, known: Facts) -> tuple[Facts, Facts]:
        if isinstance(node, nodes.Not):
            true, false = self.expression(node.node, known)
            return false, true
        true, false = self.expression(node.left, known)
        if isinstance(node, nodes.And):
            true2, false2 = self.expression(node.right, known | true)
            return true | true2, false & false2
        true2, false2 = self.expression(node.right, known | false)
        return true & true2, false | false2

    def _use(self, node: nodes.Node, path: Path, known: Facts, printed: bool, lenient: bool) -> tuple[Facts, Facts]:
        for part in (node, *node.find_all(nodes.Getitem)):
            if isinstance(part, nodes.Getitem) and not isinstance(part.arg, nodes.Const):
                self.expression(part.arg, known)
        if not path:
            return NOTHING, NOTHING
        guarded = lenient or path[0] in known or len(path) == 1
        self.found.uses.append(Use(path, node.lineno, guarded, printed and len(path) == 1))
        root = path[1] if path[0] == "visits" and len(path) == 2 else path[0]
        return frozenset({root}), NOTHING

    def _test(self, node: nodes.Test, known: Facts) -> tuple[Facts, Facts]:
        lenient = node.name in ("defined", "undefined")
        self.expression(node.node, known, lenient=lenient)
        for child in node.args:
            self.expression(child, known)
        path = self._path(node.node) or ()
        if lenient:
            facts = frozenset(path[:1]) if len(path) > 1 else NOTHING
            return (facts, NOTHING) if node.name == "defined" else (NOTHING, facts)
        if node.name == "none":
            return NOTHING, frozenset(path[:1])
        return NOTHING, NOTHING

    def _compare(self, node: nodes.Compare, known: Facts) -> tuple[Facts, Facts]:
        self.expression(node.expr, known)
        for operand in node.ops:
            self.expression(operand.expr, known)
        if len(node.ops) != 1:
            return NOTHING, NOTHING
        left, operator, right = node.expr, node.ops[0].op, node.ops[0].expr
        path = self._path(left)
        if path and operator in ("eq", "ne", "in", "notin"):
            items = right.items if isinstance(right, nodes.List | nodes.Tuple) else [right]
            texts = [item.value for item in items if isinstance(item, nodes.Const)]
            self.found.comparisons += [Comparison(path, text, node.lineno) for text in texts if isinstance(text, str)]
        if not path or not isinstance(right, nodes.Const):
            return NOTHING, NOTHING
        root = frozenset(path[:1])
        if right.value is None and operator in ("eq", "ne"):
            return (root, NOTHING) if operator == "ne" else (NOTHING, root)
        if path[0] == "visits" and len(path) == 2:
            visited = frozenset(path[1:])
            if (operator, right.value) in _AT_LEAST_ONE:
                return visited, NOTHING
            if (operator, right.value) in {("eq", 0), ("lt", 1), ("lteq", 0)}:
                return NOTHING, visited
        return NOTHING, NOTHING

    def _filter(self, node: nodes.Filter, known: Facts, lenient: bool) -> tuple[Facts, Facts]:
        lenient = lenient or node.name in ("default", "d")
        if node.node is not None:
            self.expression(node.node, known, lenient=lenient)
        for child in [*node.args, *(pair.value for pair in node.kwargs)]:
            self.expression(child, known)
        items = self._list_path(node.node) if node.node is not None else None
        if items is not None:
            named = [pair.value for pair in node.kwargs if pair.key == "attribute"]
            named += node.args[:1] if node.name in _BY_ATTRIBUTE else []
            for name in named:
                if isinstance(name, nodes.Const) and isinstance(name.value, str):
                    path = (*items, "[]", *name.value.split("."))
                    self.found.uses.append(Use(path, node.lineno, guarded=True))
        return NOTHING, NOTHING

    def _path(self, node: nodes.Node) -> Path | None:
        """The path that an expression spells; () below a name that a `for` bound to something unknown."""
        match node:
            case nodes.Name():
                if node.name in self.bound:
                    return self.bound[node.name] or ()
                return (node.name,)
            case nodes.Getattr():
                below, name = self._path(node.node), node.attr
            case nodes.Getitem():
                below = self._path(node.node)
                if isinstance(node.arg, nodes.Slice):
                    return below
                text = isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str)
                name = node.arg.value if text and isinstance(node.arg, nodes.Const) else "[]"
            case _:
                return None
        return (*below, name) if below else below

"""Whether templates and expressions use what exists, where it exists.

Names in scope: task (.id .problem .meta), params, visits (.node), state (.key), member, and each node by its name,
None until it was visited. What a node or member shows depends on its set: `.text`, `.parsed` and `.ok` where one value
stands for the set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from jinja2 import nodes as syntax

from srpo_env.errors import nearest
from srpo_env.flow import END, dominators
from srpo_env.problems import Path, listed
from srpo_env.sets import groups_of, largest_size
from srpo_env.spec import SCOPE, Best, Choose, Workflow
from srpo_env.templates import TemplateError, parse_expression, parse_template
from srpo_env.variables import Comparison, Use, variables_of

TASK = ("id", "problem", "meta")
PLACE = ("agent", "index", "count", "turn", "results")
OUTPUT = ("agent", "index", "count", "text", "parsed", "ok", "results", "acting")
ONE_VALUE = ("text", "parsed", "ok")
NODE = (*ONE_VALUE, "outputs", "acting", "visits")


@dataclass(frozen=True, slots=True)
class Text:
    """A template or expression of a workflow, and what is in scope there.

    Attributes:
        path: Where it stands.
        text: The template or expression.
        names: The names in scope beside nodes.
        visited: Nodes that every walk has visited before it is evaluated.
        member: What `member` shows.
        template: Whether it is a template.
    """

    path: Path
    text: str
    names: Collection[str]
    visited: Collection[str]
    member: Collection[str] = ()
    template: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong in a text: where, what, the rule, the next step."""

    path: Path
    line: int
    word: str
    what: str
    rule: str
    hint: str


def texts_of(workflow: Workflow, successors: Mapping[str, Collection[str]]) -> Iterator[Text]:
    """Yields every template and expression of a workflow, counts and limits excepted."""
    everything = tuple(name for name in SCOPE if name != "member")
    before = dominators(successors, workflow.first)
    speaks = _nodes_of_agents(workflow)
    for name, agent in workflow.agents.items():
        visited = [before[node] for node in speaks.get(name, ()) if node in before]
        always = set.intersection(*visited) if visited else set(workflow.nodes)
        for field in ("system", "prompt"):
            text = getattr(agent, field)
            if text is not None:
                yield Text(("agents", name, field), text, SCOPE, always, PLACE, template=True)
    for name, node in workflow.nodes.items():
        arrived = before.get(name, set(workflow.nodes))
        if isinstance(node.agents, Choose):
            yield Text(("nodes", name, "agents", "choose"), node.agents.choose, everything, arrived)
        if isinstance(node.reduce, Best):
            yield Text(("nodes", name, "reduce", "best"), node.reduce.best, SCOPE, arrived, OUTPUT)
        for key, text in node.write.items():
            yield Text(("nodes", name, "write", key), text, SCOPE, arrived, OUTPUT)
        for index, edge in enumerate(node.next):
            if edge.condition is not None:
                yield Text(
                    ("nodes", name, "next", index, "if"),
                    edge.condition,
                    everything,
                    {*arrived, name},
                )
    yield Text(("answer",), workflow.answer, everything, before.get(END, set(workflow.nodes)))


def _nodes_of_agents(workflow: Workflow) -> dict[str, list[str]]:
    speaks: dict[str, list[str]] = {}
    for name, node in workflow.nodes.items():
        for _, group in groups_of(node):
            for agent in [group] if isinstance(group, str) else group:
                speaks.setdefault(agent, []).append(name)
    return speaks


class Scopes:
    """What exists in a workflow, to check its texts against."""

    def __init__(self, workflow: Workflow) -> None:
        self.workflow = workflow
        self.many = {
            name
            for name, node in workflow.nodes.items()
            if node.reduce is None and node.transition is None and largest_size(workflow, name) > 1
        }

    def faults(self, text: Text) -> Iterator[Fault]:
        """Yields what is wrong in a text."""
        try:
            tree: syntax.Node = parse_template(text.text) if text.template else parse_expression(text.text)
        except TemplateError as error:
            yield Fault(text.path, error.line, "", str(error), "this is Jinja, bounded", "")
            return
        found = variables_of(tree)
        for use in found.uses:
            fault = self._fault(text, use)
            if fault is not None:
                yield Fault(text.path, use.line, use.path[0], *fault)
        for comparison in found.comparisons:
            fault = self._impossible(comparison)
            if fault is not None:
                yield Fault(text.path, comparison.line, comparison.path[0], *fault)

    def _fault(self, text: Text, use: Use) -> tuple[str, str, str] | None:
        root, *rest = use.path
        spelt = ".".join(use.path).replace(".[]", "[...]")
        if root in SCOPE:
            if root not in text.names:
                return f"'{root}' is used", "it exists in prompts, `write` and `best` only", ""
            if not rest:
                return None
            known, kind = self._keys(root, text)
            if rest[0] not in known and rest[0] != "[]":
                return f"'{spelt}' is used", f"{kind} are {listed(known)}", _hint(rest[0], known)
            if root == "visits" and len(rest) > 1:
                return f"'{spelt}' is used", f"'visits.{rest[0]}' is a number", ""
            return None
        if root not in self.workflow.nodes:
            return self._unknown(text, root, spelt)
        if not use.guarded and root not in text.visited:
            rule = f"'{root}' is null on a walk that has not visited it yet"
            if text.path[:2] == ("nodes", root):
                return (
                    f"'{spelt}' is used",
                    rule + ", and stands for its last visit here",
                    f"Write member.{'.'.join(rest)}",
                )
            guard = f"{{% if {root} %}}...{{% endif %}}" if text.template else f"{root} and {spelt}"
            return f"'{spelt}' is used unguarded", rule, f"Guard it: {guard}"
        return self._field(root, rest, spelt, use.printed)

    def _unknown(self, text: Text, root: str, spelt: str) -> tuple[str, str, str]:
        known = [*text.names, *self.workflow.nodes]
        owners = [f"{kind}.{root}" for kind in ("state", "params") if root in getattr(self.workflow, kind)]
        hint = f"Did you mean '{owners[0]}'?" if owners else _hint(root, known)
        if root in self.workflow.agents and not owners:
            speaks = _nodes_of_agents(self.workflow).get(root, [])
            hint = f"'{root}' is an agent; use the node that it speaks at" + (f": '{speaks[0]}'" if speaks else "")
        return (
            f"'{spelt}' is used, but '{root}' is not defined",
            f"defined are {listed(known)}",
            hint,
        )

    def _field(self, root: str, rest: list[str], spelt: str, printed: bool) -> tuple[str, str, str] | None:
        if printed:
            return (
                f"'{root}' is printed whole",
                f"a node shows {listed(NODE)}",
                f"Write {root}.text",
            )
        if not rest:
            return None
        if rest[0] not in NODE:
            return f"'{spelt}' is used", f"a node shows {listed(NODE)}", _hint(rest[0], NODE)
        if rest[0] in ONE_VALUE and root in self.many:
            rule = f"the set of '{root}' may hold several members and has no reducer"
            return f"'{spelt}' is used", rule, f"Use {root}.outputs, or give '{root}' a `reduce`"
        if rest[0] == "outputs" and len(rest) > 2 and rest[1] == "[]" and rest[2] not in OUTPUT:
            return (
                f"'{spelt}' is used",
                f"an output shows {listed(OUTPUT)}",
                _hint(rest[2], OUTPUT),
            )
        if rest[0] == "outputs" and len(rest) > 1 and rest[1] != "[]":
            return (
                f"'{spelt}' is used",
                "`outputs` is a list",
                f"Write {root}.outputs[0].{rest[1]}, or go through it with `for`",
            )
        return None

    def _keys(self, root: str, text: Text) -> tuple[Collection[str], str]:
        return {
            "task": (TASK, "the fields of a task"),
            "params": (self.workflow.params, "the params"),
            "visits": (self.workflow.nodes, "the nodes"),
            "member": (text.member, "the fields of a member here"),
            "state": (self.workflow.state, "the state keys"),
        }[root]

    def _impossible(self, comparison: Comparison) -> tuple[str, str, str] | None:
        """A comparison of a parsed choice with a text that is none of the choices is never true."""
        choices = self._choices(comparison.path)
        if choices is None or comparison.value in choices:
            return None
        what = f"'{'.'.join(comparison.path)}' is compared with '{comparison.value}'"
        return what, f"its values are {listed(choices)}", _hint(comparison.value, choices)

    def choices_of(self, expression: str) -> tuple[str, ...] | None:
        """Returns the values that an expression such as `route.parsed` can have, None where they are not declared."""
        parts = expression.split(".")
        return self._choices(tuple(parts)) if len(parts) == 2 else None

    def _choices(self, path: tuple[str, ...]) -> tuple[str, ...] | None:
        if len(path) != 2 or path[1] != "parsed" or path[0] not in self.workflow.nodes:
            return None
        node = self.workflow.nodes[path[0]]
        name = node.agents
        if not isinstance(name, str) or name not in self.workflow.agents or node.transition is not None:
            return None
        parser = self.workflow.agents[name].parse
        if parser.choices is None:
            return None
        fallback = [parser.fallback] if isinstance(parser.fallback, str) else []
        return tuple(dict.fromkeys([*parser.choices, *fallback]))


def _hint(name: str, known: Collection[str]) -> str:
    return nearest(name, known).strip()

"""Whether a walk finds its way: edges, limits, reachability, dead ends and cycles."""

from __future__ import annotations

from collections.abc import Mapping

from srpo_env.checks_sets import check_count
from srpo_env.flow import END, back_edges, reachable, reversed_edges, shortest_path, successors_of
from srpo_env.problems import Report
from srpo_env.sets import limits_of, param_values
from srpo_env.spec import Acting, Node, Workflow
from srpo_env.templates import TemplateError


def check_edges(workflow: Workflow, report: Report) -> None:
    """Edges lead to nodes; a list ends with an edge that always holds, and with no other."""
    nodes = workflow.nodes
    if workflow.first not in nodes:
        report.unknown(("start",), "node", workflow.first, nodes)
    for name, node in nodes.items():
        path = ("nodes", name, "next")
        if not node.next:
            report.at_key(
                path,
                f"'{name}' leads nowhere",
                "a list of edges has at least one",
                "Write next: end",
            )
            continue
        for index, edge in enumerate(node.next):
            if edge.to not in nodes and edge.to != END:
                report.unknown((*path, index, "to"), "node", edge.to, [*nodes, END])
        _check_order(name, node, report)
        if node.next[-1].condition is not None:
            what, rule = (
                f"the edges of '{name}' have no fallback",
                "the last edge of a list has no `if`",
            )
            report.at((*path, len(node.next) - 1), what, rule, "Add one, such as {to: end}")


def _check_order(name: str, node: Node, report: Report) -> None:
    path = ("nodes", name, "next")
    always = next((i for i, edge in enumerate(node.next) if edge.condition is None), len(node.next) - 1)
    if always < len(node.next) - 1 and node.transition is None:
        rule = f"the edge to '{node.next[always].to}' before it always holds"
        report.at((*path, always + 1), "this edge is never taken", rule, "Give the earlier one an `if`")
    for index, edge in enumerate(node.next):
        if isinstance(node.agents, Acting) and edge.to == name and f"{name}.acting" not in (edge.condition or ""):
            rule = "a set of those that still act is empty once nobody does"
            report.at(
                (*path, index),
                f"'{name}' follows itself whoever acts",
                rule,
                f"Write if: {name}.acting",
            )


def check_limits(workflow: Workflow, report: Report) -> None:
    """Limits are numbers of at least 1, for nodes that exist, and leave room for a walk to the end."""
    limits = workflow.limits
    if limits.steps is not None:
        check_count(workflow, ("limits", "steps"), limits.steps, report, least=1)
    if limits.tokens is not None:
        check_count(workflow, ("limits", "tokens"), limits.tokens, report, least=1)
    if isinstance(limits.visits, Mapping):
        for name, count in limits.visits.items():
            path = ("limits", "visits", name)
            if name not in workflow.nodes:
                report.unknown_key(path, "node", name, workflow.nodes)
            check_count(workflow, path, count, report, least=1)
    elif limits.visits is not None:
        check_count(workflow, ("limits", "visits"), limits.visits, report, least=1)
    shortest = shortest_path(successors_of(workflow), workflow.first)
    try:
        steps = limits_of(limits, workflow.nodes, param_values(workflow))[0]
    except TemplateError:
        return  # reported above
    if steps is not None and shortest is not None and 0 < steps < shortest:
        report.at(
            ("limits", "steps"),
            f"{steps} steps never reach the end",
            f"the shortest walk has {shortest}",
        )


def check_walks(workflow: Workflow, report: Report) -> None:
    """Every node can be reached and can reach the end; every cycle is bounded."""
    nodes, first = workflow.nodes, workflow.first
    successors = successors_of(workflow)
    whole = all(edge.to in nodes or edge.to == END for node in nodes.values() for edge in node.next)
    if first in nodes and whole:
        seen, ending = reachable(successors, [first]), reachable(reversed_edges(successors), [END])
        for name in nodes:
            path = ("nodes", name)
            if name not in seen:
                report.at_key(path, f"node '{name}' can't be reached", f"no edge leads to it from '{first}'")
            elif name not in ending:
                what = f"node '{name}' is a dead end"
                report.at_key(path, what, "every node can reach `end`", "Add an edge to end")
    _check_cycles(workflow, successors, report)


def _check_cycles(workflow: Workflow, successors: Mapping[str, list[str]], report: Report) -> None:
    nodes, limits = workflow.nodes, workflow.limits
    bounded = limits.visits if isinstance(limits.visits, Mapping) else {}
    if limits.steps is not None or (limits.visits is not None and not isinstance(limits.visits, Mapping)):
        return
    for source, target in back_edges(successors, [name for name in nodes if name not in bounded]):
        index = next(index for index, edge in enumerate(nodes[source].next) if edge.to == target)
        what = f"the edge from '{source}' to '{target}' closes a cycle without a limit"
        rule = "a cycle is bounded by limits.steps, or by limits.visits of one of its nodes"
        report.at(("nodes", source, "next", index, "to"), what, rule, "Add limits: {steps: 10}")

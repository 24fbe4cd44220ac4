"""Where a walk can go: reachability, cycles and dominators of a workflow's nodes.

Small set algebra in place of networkx, which takes longer to import than a workflow takes to load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from srpo_env.spec import Workflow

Successors = Mapping[str, Collection[str]]
END = "end"


def successors_of(workflow: Workflow) -> dict[str, list[str]]:
    """Returns the nodes that each node leads to, `end` included; edges to what is no node are left out."""
    return {
        name: [edge.to for edge in node.next if edge.to in workflow.nodes or edge.to == END]
        for name, node in workflow.nodes.items()
    }


def reachable(successors: Successors, sources: Iterable[str]) -> set[str]:
    """Returns the nodes that can be reached from the sources, these included.

    >>> sorted(reachable({"a": ["b"], "b": ["end"], "c": ["a"]}, ["a"]))
    ['a', 'b', 'end']
    """
    seen: set[str] = set()
    pending = list(sources)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(successors.get(node, ()))
    return seen


def reversed_edges(successors: Successors) -> dict[str, set[str]]:
    """Returns the predecessors of each node."""
    predecessors: dict[str, set[str]] = {node: set() for node in successors}
    for node, targets in successors.items():
        for target in targets:
            predecessors.setdefault(target, set()).add(node)
    return predecessors


def dominators(successors: Successors, start: str) -> dict[str, set[str]]:
    """Returns, for each node that can be reached, the nodes that every walk to it has visited before.

    >>> {node: sorted(before) for node, before in dominators({"a": ["b"], "b": ["a", "end"]}, "a").items()}
    {'a': [], 'b': ['a'], 'end': ['a', 'b']}
    """
    order = _breadth_first(successors, start)
    nodes = set(order)
    predecessors = reversed_edges(successors)
    before = {node: set() if node == start else nodes - {node} for node in order}
    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            sources = [before[source] | {source} for source in predecessors[node] if source in nodes]
            new = set.intersection(*sources) - {node}
            if new != before[node]:
                before[node], changed = new, True
    return before


def _breadth_first(successors: Successors, start: str) -> list[str]:
    order = {start: None}
    pending = [start]
    for node in pending:
        new = [target for target in dict.fromkeys(successors.get(node, ())) if target not in order]
        order.update(dict.fromkeys(new))
        pending.extend(new)
    return pending


def back_edges(successors: Successors, nodes: Iterable[str]) -> list[tuple[str, str]]:
    """Returns the edges among `nodes` that close a cycle of these nodes, one for each group of entangled cycles.

    The closing edge is the first that goes from a node to itself or to one declared before it.
    """
    order = {node: place for place, node in enumerate(nodes)}
    inner = {node: [target for target in successors[node] if target in order] for node in order}
    ahead = {node: reachable(inner, inner[node]) for node in order}
    found: list[tuple[str, str]] = []
    covered: set[str] = set()
    for node in order:
        if node in covered:
            continue
        cycle = {other for other in ahead[node] if node in ahead[other]}
        if cycle:
            covered |= cycle
            found.append(
                next(
                    (source, target)
                    for source in order
                    for target in inner[source]
                    if source in cycle and target in cycle and order[target] <= order[source]
                )
            )
    return found


def longest_path(successors: Successors, start: str) -> int | None:
    """Returns the number of nodes of the longest walk to the end; None where a cycle lets it grow.

    >>> longest_path({"a": ["b", "end"], "b": ["end"]}, "a")
    2
    """
    nodes = reachable(successors, [start]) - {END}
    if back_edges(successors, sorted(nodes)):
        return None
    longest: dict[str, int] = {END: 0}
    remaining = set(nodes)
    while remaining:
        for node in sorted(remaining):
            if all(target in longest for target in successors[node]):
                longest[node] = 1 + max((longest[target] for target in successors[node]), default=0)
                remaining.discard(node)
    return longest[start]


def shortest_path(successors: Successors, start: str) -> int | None:
    """Returns the number of nodes of the shortest walk to the end; None where there is none."""
    frontier, seen, length = {start}, {start}, 0
    while frontier:
        if END in frontier:
            return length
        frontier = {target for node in frontier for target in successors.get(node, ())} - seen
        seen |= frontier
        length += 1
    return None

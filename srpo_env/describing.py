"""What a workflow can do, in words: its active sets, where its edges lead, how long episodes are, where they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from srpo_env.flow import END, longest_path, reachable, successors_of
from srpo_env.graph import Graph
from srpo_env.spec import Best
from srpo_env.views import Slot


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """A node: who acts, how many, what becomes of the set, and where the walk goes.

    Attributes:
        sets: Each active set that can act there, such as `proposer x 3`; a choice has its name before it.
        min_k, max_k: Smallest and largest set.
        reduce: The reducer, or None.
        edges: Condition and target of each edge; an empty condition always holds.
    """

    name: str
    sets: tuple[str, ...]
    min_k: int
    max_k: int
    reduce: str | None
    edges: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Description:
    """What a workflow can do.

    Attributes:
        k_max: Largest active set.
        longest: Most events of an episode; None where only a policy's context bounds it.
        longest_by: What bounds it.
        ends_at: Nodes after which an episode can end of its own.
        truncates_by: Limits that can cut it off.
    """

    name: str
    nodes: tuple[NodeDescription, ...]
    k_max: int
    longest: int | None
    longest_by: str
    ends_at: tuple[str, ...]
    truncates_by: tuple[str, ...]

    def __str__(self) -> str:
        """Lines for a terminal."""
        lines = [f"{self.name}: {_count(len(self.nodes), 'node')}, K up to {self.k_max}"]
        for node in self.nodes:
            reduced = f", then {node.reduce}" if node.reduce else ""
            lines.append(f"  {node.name}: {k_of(node.min_k, node.max_k)}: {' | '.join(node.sets)}{reduced}")
            lines += [f"    {_condition(label)}: {target}" for label, target in node.edges]
        longest = "without a bound" if self.longest is None else f"at most {_count(self.longest, 'event')}"
        lines.append(f"longest episode: {longest} ({self.longest_by})")
        lines.append(f"episodes end after: {', '.join(self.ends_at)}")
        lines.append(f"episodes are cut off by: {', '.join(self.truncates_by) or 'nothing of the workflow'}")
        return "\n".join(lines)


def _condition(label: str) -> str:
    return label if label == "else" else f"if {label}" if label else "always"


def describe(graph: Graph) -> Description:
    """Returns what a workflow can do.

    Example:
        >>> from srpo_env.graph import compile_graph
        >>> from srpo_env.loading import load_workflow
        >>> print(describe(compile_graph(load_workflow("single_agent"))))
        single_agent: 1 node, K up to 1
          solve: K = 1: solver
            always: end
        longest episode: at most 1 event (the graph)
        episodes end after: solve
        episodes are cut off by: nothing of the workflow
    """
    nodes = []
    for name in graph.workflow.nodes:
        low, high = graph.set_bounds[name]
        edges = tuple((label, target) for source, target, label in edges_of(graph) if source == name)
        nodes.append(NodeDescription(name, sets_of(graph, name), low, high, reducer_of(graph, name), edges))
    longest, longest_by = _longest(graph)
    return Description(
        name=graph.workflow.name,
        nodes=tuple(nodes),
        k_max=graph.k_max,
        longest=longest,
        longest_by=longest_by,
        ends_at=tuple(node for node, targets in successors_of(graph.workflow).items() if END in targets),
        truncates_by=tuple(_limits(graph)),
    )


def sets_of(graph: Graph, node: str) -> tuple[str, ...]:
    """Returns each active set that can act at a node, in words."""
    chosen = graph.sets[node]
    if chosen.choose is None:
        return (_members(chosen.slots) + (" while they act" if chosen.acting else ""),)
    sets = [f"{choice}: {_members(slots or chosen.slots)}" for choice, slots in chosen.among.items()]
    return (*sets, f"else: {_members(chosen.slots)}")


def _members(slots: Sequence[Slot]) -> str:
    counts = {slot.agent: slot.count for slot in slots}
    return ", ".join(agent if count == 1 else f"{agent} x {count}" for agent, count in counts.items())


def reducer_of(graph: Graph, node: str) -> str | None:
    """Returns how a node's set becomes one value, in words."""
    spec = graph.workflow.nodes[node]
    if spec.transition is not None:
        return spec.transition
    return f"best by {spec.reduce.best}" if isinstance(spec.reduce, Best) else spec.reduce


def edges_of(graph: Graph) -> Iterator[tuple[str, str, str]]:
    """Yields source, target and label of every edge; `else` marks the last of several."""
    for name, node in graph.workflow.nodes.items():
        for edge in node.next:
            yield name, edge.to, edge.condition or ("else" if len(node.next) > 1 and node.transition is None else "")


def k_of(low: int, high: int) -> str:
    """Returns the bounds of K in words.

    >>> k_of(1, 3)
    'K = 1 to 3'
    """
    return f"K = {low}" if low == high else f"K = {low} to {high}"


def lines_of(graph: Graph, node: str) -> list[str]:
    """Returns what a picture writes into a node: its name, its sets, K, and its reducer."""
    reducer = reducer_of(graph, node)
    return [node, *sets_of(graph, node), k_of(*graph.set_bounds[node]) + (f", {reducer}" if reducer else "")]


def _limits(graph: Graph) -> Iterator[str]:
    if graph.max_steps is not None:
        yield f"{_count(graph.max_steps, 'step')}"
    yield from (f"{_count(most, 'visit')} of {node}" for node, most in graph.max_visits.items())
    if graph.max_tokens is not None:
        yield f"{_count(graph.max_tokens, 'sampled token')}"


def _longest(graph: Graph) -> tuple[int | None, str]:
    """The most events of an episode, and what bounds it."""
    successors = successors_of(graph.workflow)
    free = longest_path(successors, graph.workflow.first)
    if free is not None and (graph.max_steps is None or free <= graph.max_steps):
        return free, "the graph"
    if graph.max_steps is not None:
        return graph.max_steps, "limits.steps"
    bounded = sum(graph.max_visits.get(node, 0) for node in reachable(successors, [graph.workflow.first]))
    free_nodes = [node for node in successors if node not in graph.max_visits]
    between = {node: [target for target in successors[node] if target in free_nodes] for node in free_nodes}
    stretch = max((longest_path(between, node) or 0 for node in free_nodes), default=0)
    return bounded + (bounded + 1) * stretch, "limits.visits"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")

"""A workflow ready to be walked: its graph, its sets' sizes and its compiled texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from srpo_env.checks import check_workflow
from srpo_env.flow import END
from srpo_env.parsers import reader
from srpo_env.problems import InvalidWorkflowFile
from srpo_env.records import Parse
from srpo_env.sets import agents_of, limits_of, param_values, sizes_of
from srpo_env.spec import Acting, Agent, Choose, Workflow
from srpo_env.templates import Expression, Template, compile_expression, compile_template
from srpo_env.views import Slot

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True, slots=True)
class Arrow:
    """A compiled edge: taken where its condition holds, always where it has none."""

    condition: Expression | None
    to: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """The compiled templates of an agent.

    Attributes:
        alike: Whether all members of the agent in a set are given the same messages.
    """

    system: Template | None
    prompt: Template
    alike: bool


@dataclass(frozen=True, slots=True)
class ActiveSet:
    """Who may act at a node, counts resolved: one slot per member, in declared order.

    Attributes:
        slots: The set, on arrival where it is of those that act; of a chosen set, its `else`.
        choose: Gives the choice, for a set that is chosen while the episode runs.
        among: The slots of each choice; an empty one takes `slots`.
        acting: Whether only those that still act come back when the node follows itself.
    """

    slots: tuple[Slot, ...]
    choose: Expression | None
    among: Mapping[str, tuple[Slot, ...]]
    acting: bool


@dataclass(frozen=True)
class Graph:
    """A checked workflow, compiled for its params.

    Attributes:
        workflow: What it was compiled from.
        params: Values of its params.
        sets: Who may act at each node.
        set_bounds: Smallest and largest active set of each node.
        k_max: Largest active set.
        edges: Where each node leads, in order.
        prompts: Templates of each agent.
        callers: Agents that may call tools.
        answer: Gives the team's answer at the end.
        max_steps, max_tokens: Limits of an episode; None: none.
        max_visits: Limits of the nodes that have one.
    """

    workflow: Workflow
    params: Mapping[str, Any]
    sets: Mapping[str, ActiveSet]
    set_bounds: Mapping[str, tuple[int, int]]
    k_max: int
    edges: Mapping[str, tuple[Arrow, ...]]
    prompts: Mapping[str, Prompt]
    callers: frozenset[str]
    answer: Expression
    max_steps: int | None
    max_visits: Mapping[str, int]
    max_tokens: int | None

    @cached_property
    def readers(self) -> Mapping[str, Callable[[str], Parse]]:
        """What reads each agent's outputs; loads parsers that are `module:attr`."""
        return {name: reader(agent.parse) for name, agent in self.workflow.agents.items()}

    @cached_property
    def nx(self) -> networkx.MultiDiGraph[str]:
        """The graph; edges hold `index`, their place in the list, and `condition`, as text or None."""
        import networkx

        graph: networkx.MultiDiGraph[str] = networkx.MultiDiGraph(name=self.workflow.name)
        for node in self.workflow.nodes:
            low, high = self.set_bounds[node]
            graph.add_node(node, min_k=low, max_k=high)
        graph.add_node(END)
        for node, spec in self.workflow.nodes.items():
            for index, edge in enumerate(spec.next):
                graph.add_edge(node, edge.to, index=index, condition=edge.condition)
        return graph


def compile_graph(workflow: Workflow) -> Graph:
    """Returns a workflow ready to be walked.

    Raises:
        InvalidWorkflowFile: The workflow breaks rules. (An InvalidWorkflow.)
    """
    problems = check_workflow(workflow)
    if problems:
        raise InvalidWorkflowFile(tuple(problems))
    params = param_values(workflow)
    bounds = {name: (sizes[0], sizes[-1]) for name, node in workflow.nodes.items() if (sizes := sizes_of(node, params))}
    steps, visits, tokens = limits_of(workflow.limits, workflow.nodes, params)
    return Graph(
        workflow=workflow,
        params=params,
        sets={name: _active_set(workflow, name, params) for name in workflow.nodes},
        set_bounds=bounds,
        k_max=max(high for _, high in bounds.values()),
        edges={
            name: tuple(Arrow(_compiled(edge.condition), edge.to) for edge in node.next)
            for name, node in workflow.nodes.items()
        },
        prompts={name: _prompt(agent) for name, agent in workflow.agents.items()},
        callers=frozenset(name for name, agent in workflow.agents.items() if agent.tools),
        answer=compile_expression(workflow.answer),
        max_steps=steps,
        max_visits=visits,
        max_tokens=tokens,
    )


def _prompt(agent: Agent) -> Prompt:
    system = None if agent.system is None else compile_template(agent.system)
    prompt = compile_template(agent.prompt)
    of_member = prompt.of_member or (system is not None and system.of_member)
    return Prompt(system, prompt, alike=agent.history == "none" and not of_member)


def _compiled(text: str | None) -> Expression | None:
    return None if text is None else compile_expression(text)


def _active_set(workflow: Workflow, name: str, params: Mapping[str, Any]) -> ActiveSet:
    match workflow.nodes[name].agents:
        case Choose() as choose:
            among = {choice: _slots(agents_of(group, params)) for choice, group in choose.among.items()}
            otherwise = _slots(agents_of(choose.fallback, params))
            return ActiveSet(otherwise, compile_expression(choose.choose), among, acting=False)
        case Acting() as acting:
            return ActiveSet(_slots(agents_of(acting.acting, params)), None, {}, acting=True)
        case group:
            return ActiveSet(_slots(agents_of(group, params)), None, {}, acting=False)


def _slots(agents: Sequence[str]) -> tuple[Slot, ...]:
    """Counts the members of each agent."""
    totals, seen = Counter(agents), Counter[str]()
    slots = []
    for agent in agents:
        slots.append(Slot(agent, seen[agent], totals[agent]))
        seen[agent] += 1
    return tuple(slots)

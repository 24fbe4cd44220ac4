"""How many members can act at a node: active sets before an episode runs.

Counts are numbers or expressions of params, so a set's size is known once params are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from srpo_env.spec import MOST_MEMBERS, Acting, Choose, Limits, Node, Workflow
from srpo_env.templates import TemplateError, compile_expression

Params = Mapping[str, Any]
GroupSpec = str | Sequence[str] | Mapping[str, int | str]


def param_values(workflow: Workflow) -> dict[str, Any]:
    """Returns the values of a workflow's params."""
    return {name: param.default for name, param in workflow.params.items()}


def count_of(count: int | str, params: Params, most: int | None = None) -> int:
    """Returns the number that a count stands for.

    Raises:
        TemplateError: It is an expression that gives no whole number in [0, most].
    """
    value = compile_expression(count).evaluate({"params": params}) if isinstance(count, str) else count
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (most is not None and value > most):
        upto = "" if most is None else f" to {most}"
        raise TemplateError(f"the count `{count}` is {value!r}; a count is a whole number from 0{upto}")
    return value


def agents_of(group: GroupSpec | None, params: Params) -> tuple[str, ...]:
    """Returns the agents of a group, one entry per member, in declared order.

    >>> agents_of({"searcher": 2, "judge": "params.judges"}, {"judges": 1})
    ('searcher', 'searcher', 'judge')
    """
    if group is None:
        return ()
    if isinstance(group, str):
        return (group,)
    if isinstance(group, Mapping):
        return tuple(agent for agent, count in group.items() for _ in range(count_of(count, params, MOST_MEMBERS)))
    return tuple(group)


def groups_of(node: Node) -> Iterator[tuple[tuple[str | int, ...], GroupSpec]]:
    """Yields the groups that a node's set can be, each with where it stands below the node."""
    match node.agents:
        case Choose() as choose:
            for choice, group in choose.among.items():
                yield ("agents", "among", choice), group
            if choose.fallback is not None:
                yield ("agents", "else"), choose.fallback
        case Acting() as acting:
            yield ("agents", "acting"), acting.acting
        case group:
            yield ("agents",), group


def sizes_of(node: Node, params: Params) -> tuple[int, ...]:
    """Returns the sizes that a node's set can have, ascending; 0 only where nothing else is possible.

    An empty choice takes the fallback; a set of those that still act may shrink to one.
    """
    sizes = {len(agents_of(group, params)) for _, group in groups_of(node)}
    if isinstance(node.agents, Acting):
        sizes |= set(range(1, max(sizes) + 1))
    return tuple(sorted(sizes - {0})) or (0,)


def corners(workflow: Workflow) -> Iterator[dict[str, Any]]:
    """Yields the params as they are, then with each alone at its least, its greatest and each of its choices."""
    values = param_values(workflow)
    yield values
    for name, param in workflow.params.items():
        for value in (param.min, param.max, *(param.choices or ())):
            if value is not None and value != values[name]:
                yield {**values, name: value}


def largest_size(workflow: Workflow, node: str) -> int:
    """Returns the size of a node's largest set, whatever params are allowed."""
    sizes = [0]
    for params in corners(workflow):
        try:
            sizes += sizes_of(workflow.nodes[node], params)
        except TemplateError:
            continue  # reported where counts are checked
    return max(sizes)


def limits_of(
    limits: Limits, nodes: Mapping[str, Node], params: Params
) -> tuple[int | None, dict[str, int], int | None]:
    """Returns the most steps, the most visits of each limited node, and the most tokens."""
    visits = limits.visits
    named = visits if isinstance(visits, Mapping) else {} if visits is None else dict.fromkeys(nodes, visits)
    return (
        None if limits.steps is None else count_of(limits.steps, params),
        {node: count_of(count, params) for node, count in named.items()},
        None if limits.tokens is None else count_of(limits.tokens, params),
    )

"""Whether active sets are what they should be: members, counts, choices, reducers and writers."""

from __future__ import annotations

from collections.abc import Mapping

from srpo_env.errors import nearest
from srpo_env.problems import Path, Report, listed
from srpo_env.reducers import REDUCERS
from srpo_env.scopes import Scopes
from srpo_env.sets import (
    GroupSpec,
    agents_of,
    corners,
    count_of,
    groups_of,
    largest_size,
    param_values,
)
from srpo_env.spec import MOST_MEMBERS, Choose, Node, Workflow
from srpo_env.templates import TemplateError, parse_expression
from srpo_env.variables import Use, variables_of

_LISTS = ("append", "extend")


def check_sets(workflow: Workflow, scopes: Scopes, report: Report) -> None:
    """Members exist, and no set is empty or beyond bounds, whatever params are allowed."""
    for name, node in workflow.nodes.items():
        for below, group in groups_of(node):
            path = ("nodes", name, *below)
            _check_members(workflow, path, group, report)
            _check_size(workflow, path, group, report, may_be_empty="among" in below)
        if isinstance(node.agents, Choose):
            _check_choose(("nodes", name, "agents"), node.agents, scopes, report)
        _check_reducer(("nodes", name, "reduce"), node, report)


def _check_members(workflow: Workflow, path: Path, group: GroupSpec, report: Report) -> None:
    agents = workflow.agents
    if isinstance(group, Mapping):
        for agent, count in group.items():
            if agent not in agents:
                report.unknown_key((*path, agent), "agent", agent, agents)
            check_count(workflow, (*path, agent), count, report, most=MOST_MEMBERS)
        return
    members = [(path, group)] if isinstance(group, str) else [((*path, i), agent) for i, agent in enumerate(group)]
    for place, agent in members:
        if agent not in agents:
            report.unknown(place, "agent", agent, agents)


def _check_size(workflow: Workflow, path: Path, group: GroupSpec, report: Report, *, may_be_empty: bool) -> None:
    values = param_values(workflow)
    for params in corners(workflow):
        try:
            size = len(agents_of(group, params))
        except TemplateError:
            continue  # reported with the count
        if size > MOST_MEMBERS or (size == 0 and not may_be_empty):
            changed = [f"{key} = {value}" for key, value in params.items() if value != values[key]]
            what = f"the set has {size} members" + (f" where {changed[0]}" if changed else "")
            hint = "Bound the param by min and max" if "params" in str(group) else ""
            report.at(path, what, f"a set has 1 to {MOST_MEMBERS}", hint)
            return


def check_count(
    workflow: Workflow,
    path: Path,
    count: int | str,
    report: Report,
    *,
    most: int | None = None,
    least: int = 0,
) -> None:
    """A count is a whole number for the params as they are, and knows no other names."""
    if isinstance(count, str):
        try:
            uses = variables_of(parse_expression(count)).uses
        except TemplateError as error:
            report.at(path, str(error), "a count is a number or a Jinja expression")
            return
        foreign = [use for use in uses if not _is_param(use, workflow)]
        for use in foreign:
            spelt, known = ".".join(use.path), [f"params.{name}" for name in workflow.params]
            meant = f"params.{use.path[0]}"
            hint = f"Did you mean '{meant}'?" if meant in known else nearest(spelt, known)
            rule = f"counts and limits know params only: {listed(known)}"
            report.inside(path, 1, use.path[0], f"'{spelt}' is used", rule, hint)
        if foreign:
            return
    try:
        number = count_of(count, param_values(workflow), most)
    except TemplateError as error:
        report.at(path, str(error), "a count is a number or an expression of params that gives one")
        return
    if number < least:
        report.at(path, f"the limit is {number}", f"it is at least {least}")


def _is_param(use: Use, workflow: Workflow) -> bool:
    return use.path[0] == "params" and len(use.path) == 2 and use.path[1] in workflow.params


def _check_choose(path: Path, choose: Choose, scopes: Scopes, report: Report) -> None:
    if choose.fallback is None:
        rule = "`else` is the set for any other value"
        report.at_key((*path, "choose"), "the router has no `else`", rule, "Add one")
    choices = scopes.choices_of(choose.choose)
    if choices is None:
        return
    for choice in choose.among:
        if choice not in choices:
            rule = f"the values of {choose.choose} are {listed(choices)}"
            report.at_key(
                (*path, "among", choice),
                f"'{choice}' is never chosen",
                rule,
                nearest(choice, choices),
            )


def _check_reducer(path: Path, node: Node, report: Report) -> None:
    if isinstance(node.reduce, str) and ":" not in node.reduce and node.reduce not in REDUCERS:
        report.unknown(path, "reducer", node.reduce, [*REDUCERS, "{best: score}"])
    if node.reduce is not None and node.transition is not None:
        what, rule = (
            "the node has both `reduce` and `transition`",
            "a transition reduces the set itself",
        )
        report.at_key(path, what, rule, "Remove one")


def check_writers(workflow: Workflow, report: Report) -> None:
    """Keys that are written exist, and have a merge rule where several members write them."""
    for name, key in workflow.state.items():
        if key.merge in _LISTS and key.default is not None and not isinstance(key.default, list):
            what = f"'{name}' begins with {key.default!r}"
            report.at(("state", name, "default"), what, f"`merge: {key.merge}` needs a list", "Write []")
    for name, node in workflow.nodes.items():
        for written in node.write:
            path = ("nodes", name, "write", written)
            if written not in workflow.state:
                report.unknown_key(path, "state key", written, workflow.state)
            elif workflow.state[written].merge is None and (most := largest_size(workflow, name)) > 1:
                what = f"up to {most} members write '{written}' in one step"
                rule = f"state.{written} then needs a merge rule, such as append, any, sum or last"
                report.at_key(path, what, rule, f"Add merge: append to state.{written}")

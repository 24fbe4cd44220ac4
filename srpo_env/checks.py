"""Whether a workflow makes sense: names, sets, cycles, writers and variables, before anything runs.

`check_workflow` returns every problem at once, each with its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

from srpo_env.checks_flow import check_edges, check_limits, check_walks
from srpo_env.checks_sets import check_sets, check_writers
from srpo_env.flow import successors_of
from srpo_env.parsers import PARSERS
from srpo_env.problems import Path, Positions, Problem, Report, sorted_once
from srpo_env.registry import registered
from srpo_env.scopes import Scopes, texts_of
from srpo_env.spec import RESERVED, Param, Parser, Workflow

WORDS = frozenset(
    {
        *("and", "or", "not", "is", "in", "if", "else", "elif", "endif", "for", "endfor", "loop", "recursive"),
        *("true", "false", "none", "True", "False", "None", "value"),
    }
)
"""Words of the template language."""

_BOOLEANS = frozenset({"yes", "no", "on", "off"})
_WRITTEN = {"tag": "{tag: verdict}", "choice": "{choices: [approve, reject], fallback: reject}"}


def check_workflow(workflow: Workflow, positions: Positions | None = None) -> list[Problem]:
    """Returns every problem of a workflow, in the order of the file.

    Args:
        workflow: What to check; its form has been checked by its classes.
        positions: Where its parts stand; None for a workflow built in Python, whose problems then have a path only.
    """
    report = Report(positions or Positions(workflow.name))
    scopes = Scopes(workflow)
    check_names(workflow, report)
    check_params(workflow, report)
    check_agents(workflow, report)
    check_sets(workflow, scopes, report)
    check_writers(workflow, report)
    check_edges(workflow, report)
    check_limits(workflow, report)
    check_walks(workflow, report)
    check_texts(workflow, scopes, report)
    return sorted_once(report.problems)


def check_names(workflow: Workflow, report: Report) -> None:
    """Reserved words, words of the template language, and booleans of YAML 1.1 can't be names."""
    for kind in ("params", "state", "agents", "nodes"):
        for name in getattr(workflow, kind):
            path = (kind, name)
            if path in report.positions.boolean_keys:
                what = f"the name {name} is a boolean to some readers of YAML"
                report.at_key(path, what, "a name is plain text", "Choose another")
            elif kind in ("agents", "nodes") and name in RESERVED:
                rule = f"reserved are {', '.join(sorted(RESERVED))}"
                report.at_key(path, f"'{name}' can't be a name", rule, "Choose another")
            elif name in WORDS:
                rule = "it is a word of the template language"
                report.at_key(path, f"'{name}' can't be a name", rule, "Choose another")


def check_params(workflow: Workflow, report: Report) -> None:
    """A default lies in its own range."""
    for name, param in workflow.params.items():
        path = ("params", name, "default")
        for what, rule in param_faults(name, param, param.default):
            report.at(path, what, rule)
        if param.min is not None and param.max is not None and param.min > param.max:
            rule = f"min {param.min} is above max {param.max}"
            report.at(("params", name, "min"), f"the range of '{name}' is empty", rule)
        if str(param.default).lower() in _BOOLEANS and report.positions.plain(path):
            what = f"{param.default} is a boolean to some readers of YAML"
            report.at(path, what, "a value is plain", "Write true or false, or quote it")


def param_faults(name: str, param: Param, value: Any) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with a value of a param, and the rule."""
    low, high = param.min, param.max
    if isinstance(value, float) and not isfinite(value):
        yield f"'{name}' is {value}", "a number is finite"
    elif low is not None or high is not None:
        between = f"from {low} to {high}"
        if low is None or high is None:
            between = f"at least {low}" if high is None else f"at most {high}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"'{name}' is {value!r}", f"it is a number, {between}"
        elif (low is not None and value < low) or (high is not None and value > high):
            yield f"'{name}' is {value}", f"it is {between}"
    if param.choices is not None and value not in param.choices:
        yield f"'{name}' is {value!r}", f"it is one of {', '.join(map(str, param.choices))}"


def check_agents(workflow: Workflow, report: Report) -> None:
    """Parsers and tools exist; a parser with choices has a fallback."""
    for name, agent in workflow.agents.items():
        _check_parser(("agents", name, "parse"), agent.parse, report)
        tools = sorted(registered("tool")) if agent.tools else []
        for index, tool in enumerate(agent.tools):
            if ":" not in tool and tool not in tools:
                report.unknown(("agents", name, "tools", index), "tool", tool, tools)


def _check_parser(path: Path, parser: Parser, report: Report) -> None:
    named = parser.use
    if named in _WRITTEN:
        report.at((*path, "use"), f"'{named}' is no parser to name", f"it is written {_WRITTEN[str(named)]}")
    elif named is not None and ":" not in named and named not in PARSERS:
        report.unknown((*path, "use"), "parser", named, PARSERS)
    if named is None and parser.tag is None and parser.choices is None:
        report.at(path, "the parser says nothing", "it has `use`, `tag` or `choices`", "Write parse: text")
    if parser.tag is not None and named is not None:
        what = f"the parser has both `use: {named}` and `tag`"
        report.at_key((*path, "use"), what, "one of them says how to read", "Remove one")
    if parser.choices is not None:
        _check_choices(path, parser, parser.choices, report)


def _check_choices(path: Path, parser: Parser, choices: tuple[str, ...], report: Report) -> None:
    if not choices:
        report.at((*path, "choices"), "the choices are empty", "at least one value is accepted")
    elif "fallback" not in parser.model_fields_set:
        rule = "`fallback` says what any other text counts as"
        hint = f"Add fallback: {choices[-1]}"
        report.at_key((*path, "choices"), "the choices have no fallback", rule, hint)
    elif parser.fallback is not None and parser.fallback not in choices:
        report.unknown((*path, "fallback"), "choice", str(parser.fallback), choices)


def check_texts(workflow: Workflow, scopes: Scopes, report: Report) -> None:
    """Templates and conditions use what exists where they stand."""
    for text in texts_of(workflow, successors_of(workflow)):
        for fault in scopes.faults(text):
            report.inside(text.path, fault.line, fault.word, fault.what, fault.rule, fault.hint)

"""How a workflow is found, read and checked.

`load_workflow` takes a file, a registered name, a mapping or a `Workflow`, and gives a workflow that makes sense, or
every problem at once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from srpo_env import spec
from srpo_env.checks import check_workflow, param_faults
from srpo_env.errors import InvalidWorkflow, UnknownName, nearest
from srpo_env.problems import InvalidWorkflowFile, Positions, Problem, sorted_once
from srpo_env.problems import Path as Keys
from srpo_env.registry import load, registered
from srpo_env.spec import FORMS, Workflow
from srpo_env.yaml_source import read_yaml

SUFFIXES = (".yaml", ".yml")
_FREE = "x-"
"""Keys of a file that begin so are free-form: a place for YAML anchors."""


def load_workflow(
    source: str | Path | Workflow | Mapping[str, Any], params: Mapping[str, Any] | None = None
) -> Workflow:
    """Returns a checked workflow.

    Args:
        source: A path (a str that ends in .yaml or .yml is one), a registered name, a mapping, or a workflow.
        params: Values to set in place of the defaults.

    Raises:
        InvalidWorkflowFile: It breaks rules; `problems` holds every one. (An InvalidWorkflow.)
        UnknownName: No workflow of that name.

    Example:
        >>> load_workflow("parallel_proposers", {"proposers": 5}).params["proposers"].default
        5
    """
    if isinstance(source, Workflow):
        workflow, positions = source, None
    elif isinstance(source, Mapping):
        name = source.get("name")
        workflow, positions = _read(
            copy.deepcopy(dict(source)),
            Positions(name if isinstance(name, str) else "workflow"),
            [],
        )
    else:
        file = _find(source)
        data, positions, problems = read_yaml(_text_of(file), str(file))
        workflow, positions = _read(data, positions, problems)
    if params:
        workflow = _with_values(workflow, params)
        _raise_for(check_workflow(workflow, positions))
    elif isinstance(source, Workflow):
        _raise_for(check_workflow(workflow))
    return workflow


def set_params(workflow: Workflow, params: Mapping[str, Any]) -> Workflow:
    """Returns the workflow with these values as the params' defaults, checked anew.

    Raises:
        InvalidWorkflow: A param does not exist, or a value is outside its range or breaks the workflow.
    """
    return load_workflow(workflow, params)


def workflow_files() -> dict[str, Path]:
    """Returns the files of the registered workflows by name, such as `tiny/solver_verifier`."""
    found: dict[str, Path] = {}
    for package in sorted(registered("workflow")):
        folder = Path(load("workflow", package)())
        for file in sorted(folder.rglob("*.yaml")):
            found.setdefault(file.relative_to(folder).with_suffix("").as_posix(), file)
    return found


def _find(source: str | Path) -> Path:
    if isinstance(source, Path) or source.endswith(SUFFIXES):
        return Path(source)
    files = workflow_files()
    if source not in files:
        raise UnknownName(
            f"workflow {source!r} is not known; known are {', '.join(files) or 'none'}.{nearest(source, files)} "
            "Give one of them, or the path of a .yaml file."
        )
    return files[source]


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        column = error.start - (error.object.rfind(b"\n", 0, error.start) + 1) + 1
        raise InvalidWorkflowFile(
            (Problem(str(file), line, column, "not UTF-8", "a workflow file is UTF-8 text"),)
        ) from error
    except OSError as error:
        raise InvalidWorkflow(f"{file}: {error.strerror or error}; give the path of a workflow file.") from error


def _read(data: Any, positions: Positions, problems: list[Problem]) -> tuple[Workflow, Positions | None]:
    """Validates and checks; raises with every problem that was found."""
    if data is None and problems:
        _raise_for(problems)
    if not isinstance(data, dict):
        _raise_for(
            [
                *problems,
                _problem(
                    positions,
                    (),
                    "this is not a mapping",
                    "a workflow is a mapping of keys to values",
                ),
            ]
        )
    problems = [*problems, *_tidy(data, positions)]
    try:
        workflow = Workflow.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        _raise_for([*problems, *_form_problems(error, positions)])
        raise AssertionError from error
    known = positions if positions.values else None
    _raise_for([*problems, *check_workflow(workflow, known)])
    return workflow, known


def _raise_for(problems: list[Problem]) -> None:
    if problems:
        raise InvalidWorkflowFile(tuple(sorted_once(problems)))


def _problem(
    positions: Positions,
    path: Keys,
    what: str,
    rule: str = "",
    hint: str = "",
    *,
    key: bool = False,
) -> Problem:
    line, column = (positions.key(path) if key else positions.value(path)) or (None, None)
    return Problem(positions.file, line, column, what, rule, hint, ".".join(map(str, path)))


# Unknown keys: reported, and mended where the meaning is plain, so that the rest can be checked.


def _tidy(data: dict[str, Any], positions: Positions) -> Iterator[Problem]:
    for key in [key for key in data if isinstance(key, str) and key.startswith(_FREE)]:
        del data[key]
    for path, part, kind in list(_parts(data)):
        keys = _keys_of(kind)
        for key in [key for key in part if key not in keys]:
            hint = nearest(str(key), keys).strip()
            what = f"'{key}' is not a key of {_A[kind.__name__]}"
            yield _problem(positions, (*path, key), what, f"the keys are {', '.join(keys)}", hint, key=True)
            meant = hint.removeprefix("Did you mean '").removesuffix("'?")
            value = part.pop(key)
            if hint and meant not in part:
                part[meant] = value
                positions.rename((*path, key), (*path, meant))


def _keys_of(kind: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items()]


def _parts(data: dict[str, Any]) -> Iterator[tuple[Keys, dict[str, Any], type[BaseModel]]]:
    """Yields every mapping of a file whose keys the grammar knows, outermost first."""
    yield (), data, spec.Workflow
    for section, kind in (
        ("params", spec.Param),
        ("state", spec.StateKey),
        ("agents", spec.Agent),
        ("nodes", spec.Node),
    ):
        entries = data.get(section)
        for name, part in entries.items() if isinstance(entries, dict) else ():
            if isinstance(part, dict):
                yield (section, name), part, kind
                yield from _inner_parts((section, name), part, kind)
    if isinstance(limits := data.get("limits"), dict):
        yield ("limits",), limits, spec.Limits


def _inner_parts(
    path: Keys, part: dict[str, Any], kind: type[BaseModel]
) -> Iterator[tuple[Keys, dict[str, Any], type[BaseModel]]]:
    inner: list[tuple[Keys, Any, type[BaseModel]]] = []
    if kind is spec.Agent:
        inner = [((*path, "parse"), part.get("parse"), spec.Parser)]
    elif kind is spec.Node:
        edges = part.get("next")
        inner = [
            ((*path, "reduce"), part.get("reduce"), spec.Best),
            ((*path, "next"), edges, spec.Edge),
        ]
        inner += [
            ((*path, "next", index), edge, spec.Edge)
            for index, edge in enumerate(edges if isinstance(edges, list) else ())
        ]
        members = part.get("agents")
        if isinstance(members, dict) and not members.keys().isdisjoint(("choose", "among")):
            inner.append(((*path, "agents"), members, spec.Choose))
        elif isinstance(members, dict) and "acting" in members:
            inner.append(((*path, "agents"), members, spec.Acting))
    yield from ((place, found, which) for place, found, which in inner if isinstance(found, dict))


_A = {
    "Workflow": "a workflow",
    "Param": "a param",
    "StateKey": "a state key",
    "Agent": "an agent",
    "Node": "a node",
    "Parser": "a parser",
    "Best": "a reducer",
    "Edge": "an edge",
    "Limits": "limits",
    "Choose": "a chosen set",
    "Acting": "a set of those that act",
}


# What pydantic says, in the words of the grammar.


def _form_problems(error: ValidationError, positions: Positions) -> Iterator[Problem]:
    for each in error.errors(include_url=False):
        path = tuple(part for part in each["loc"] if part not in FORMS)
        key = "[key]" in each["loc"]
        value, context = each["input"], each.get("ctx", {})
        shown = "null" if value is None else repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        name = path[-1] if path else "the file"
        match each["type"]:
            case "missing":
                what, rule = (
                    f"'{name}' is missing",
                    f"{_A.get(_kind_at(path[:-1]), 'this')} needs it",
                )
                path = path[:-1]
                key = True
            case "string_type":
                what, rule = f"'{name}' is {shown}", "it is text"
                if isinstance(value, int | float):
                    rule += (
                        f"; write it in quotes: '{value}'" if not isinstance(value, bool) else "; write it in quotes"
                    )
            case "string_pattern_mismatch" if context["pattern"].startswith("^[A-Za-z]"):
                what, rule = (
                    f"{shown} is not a name",
                    "a name has letters, digits and _, and begins with a letter",
                )
            case "string_pattern_mismatch":
                what, rule = (
                    f"{shown} is not a reference",
                    "it is `package.module:attr` or `./file.py:attr`",
                )
            case "model_type" | "dict_type" | "model_attributes_type":
                what, rule = f"'{name}' is {shown}", "it is a mapping of keys to values"
            case "tuple_type":
                what, rule = f"'{name}' is {shown}", "it is a list"
            case "string_too_short":
                what, rule = f"'{name}' is empty", "it is text"
            case "too_short":
                what, rule = f"'{name}' is empty", "it has at least one entry"
            case _:
                message = each["msg"].removeprefix("Input ").removeprefix("String ")
                what, rule = f"'{name}' is {shown}", message[:1].lower() + message[1:]
        yield _problem(positions, path, what, rule, key=key)


def _kind_at(path: Keys) -> str:
    """The class of the part at a path, by the grammar."""
    match path:
        case ():
            return "Workflow"
        case ("limits",):
            return "Limits"
        case (("params" | "state" | "agents" | "nodes") as section, _):
            return {"params": "Param", "state": "StateKey", "agents": "Agent", "nodes": "Node"}[section]
        case ("agents", _, "parse"):
            return "Parser"
        case ("nodes", _, "next", *_):
            return "Edge"
        case ("nodes", _, "agents"):
            return "Choose"
        case ("nodes", _, "reduce"):
            return "Best"
    return ""


def _with_values(workflow: Workflow, values: Mapping[str, Any]) -> Workflow:
    """The workflow with these defaults; raises InvalidWorkflow for a name or value that is not allowed."""
    lines = []
    params = dict(workflow.params)
    for name, value in values.items():
        if name not in params:
            lines.append(
                f"param '{name}' does not exist; the params are {', '.join(params) or 'none'}.{nearest(name, params)}"
            )
        elif value is not None and not isinstance(value, str | int | float | bool):
            lines.append(f"param '{name}' is {value!r}; it is text, a number, true, false or null.")
        else:
            lines += [f"param {what}; {rule}." for what, rule in param_faults(name, params[name], value)]
            params[name] = params[name].model_copy(update={"default": value})
    if lines:
        raise InvalidWorkflow("\n".join(f"workflow '{workflow.name}': {line}" for line in lines))
    return workflow.model_copy(update={"params": params})

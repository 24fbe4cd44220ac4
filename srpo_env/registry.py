"""Where names come from: entry points of installed packages, and `module:attr` or `./file.py:attr` anywhere.

Bundled pieces are registered by the same entry points as a stranger's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from srpo_env.errors import InvalidInput, MissingExtra, UnknownName, nearest

GROUPS = {
    "workflow": "srpo_env.workflows",
    "recipe": "srpo_env.recipes",
    "task set": "srpo_env.tasks",
    "tool": "srpo_env.tools",
    "backend": "srpo_env.backends",
    "trainer": "srpo_env.trainers",
    "model": "srpo_env.models",
    "server": "srpo_env.servers",
}


def registered(kind: str) -> dict[str, EntryPoint]:
    """Returns the entry points of a kind (a key of `GROUPS`), by name."""
    return _all_registered()[kind]


@cache
def _all_registered() -> dict[str, dict[str, EntryPoint]]:
    """Reading the entry points of all packages is the slow part, so it is done once for all kinds."""
    found = entry_points()
    return {kind: {point.name: point for point in found.select(group=group)} for kind, group in GROUPS.items()}


def is_reference(name: str) -> bool:
    """Whether a name is `module:attr` or `./file.py:attr` and not a registered name.

    >>> is_reference("my_package.rewards:short"), is_reference("majority")
    (True, False)
    """
    return ":" in name


def load(kind: str, name: str) -> Any:
    """Returns the object that a registered name or a reference stands for.

    Raises:
        UnknownName: No such name; the nearest are named.
        MissingExtra: The object's module needs a package that is not installed.
    """
    if is_reference(name):
        return load_reference(name)
    points = registered(kind)
    if name not in points:
        raise UnknownName(
            f"{kind} {name!r} is not known; known are {', '.join(sorted(points)) or 'none'}."
            f"{nearest(name, points)} Give one of them, or `package.module:attr`."
        )
    try:
        return points[name].load()
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{kind} {name!r} needs the package {error.name!r}, which is not installed; "
            f"run `pip install {error.name}` (or the extra that brings it, see pyproject.toml)."
        ) from error


def load_reference(reference: str) -> Any:
    """Imports `package.module:attr` or `./file.py:attr` and returns the attribute.

    Raises:
        InvalidInput: The file, module or attribute does not exist.
    """
    where, _, attribute = reference.rpartition(":")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        found = module
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ModuleNotFoundError, FileNotFoundError, AttributeError, ValueError) as error:
        raise InvalidInput(
            f"{reference!r} can't be loaded: {error}; a reference is `package.module:attr` or `./file.py:attr`, "
            "the file's path being relative to the current folder."
        ) from error
    return found


def _load_file(path: Path) -> Any:
    path = path.resolve()
    name = f"srpo_env_file_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

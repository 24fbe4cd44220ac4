"""What is there to be named: recipes, workflows, task sets and whatever else is registered, with what they are."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

from srpo_env.registry import registered

KINDS = {
    "recipes": "recipe",
    "workflows": "workflow",
    "tasks": "task set",
    "tools": "tool",
    "backends": "backend",
    "models": "model",
    "servers": "server",
}


def names_of(kind: str) -> list[tuple[str, str]]:
    """Returns the names of a kind, each with its description or, where that would take an import, its place."""
    if kind in ("recipes", "workflows"):
        return [(name, _description(path)) for name, path in yaml_files(kind).items()]
    points = sorted(registered(KINDS[kind]).items())
    return [(name, _about(point) if kind == "tasks" else point.value) for name, point in points]


def yaml_files(kind: str) -> dict[str, Path]:
    """Returns the files of the recipes or the workflows that ship, by name."""
    from srpo_env.config import recipe_names
    from srpo_env.loading import workflow_files

    return recipe_names() if kind == "recipes" else workflow_files()


def _about(point: EntryPoint) -> str:
    """What a task set says of itself: its splits, its licence and how to get it."""
    try:
        found = point.load()
    except ImportError as error:
        return f"{point.value} (can't be imported: {error})"
    about = getattr(found, "about", None) or (found.__doc__ or "").strip().partition("\n")[0]
    return str(about or point.value)


def _description(path: Path) -> str:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return "(can't be read)"
    return " ".join(str(data.get("description", "")).split()) if isinstance(data, dict) else ""

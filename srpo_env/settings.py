"""Are the settings of a backend, a tool or a server what they may be?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from srpo_env.errors import InvalidRecipe, nearest

Settings = TypeVar("Settings", bound=BaseModel)


def checked(kind: type[Settings], where: str, values: Mapping[str, Any]) -> Settings:
    """Returns the settings, complete with defaults.

    Args:
        kind: Their model.
        where: Their place, such as `policies.main.sample`.
        values: What the user says.

    Raises:
        InvalidRecipe: One line for each key that is unknown and each value that breaks a rule.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        known = list(kind.model_fields)
        lines = []
        for problem in error.errors():
            path = [str(part) for part in problem["loc"]]
            key = ".".join([where, *path])
            if problem["type"] == "extra_forbidden":
                lines.append(f"{key}: no such setting.{nearest(path[-1], known)} Known are {', '.join(known)}.")
            elif problem["type"] == "missing":
                lines.append(f"{key}: this setting is missing; give it a value.")
            else:
                lines.append(f"{key}: {problem['input']!r} is not allowed: {problem['msg']}.")
        raise InvalidRecipe("\n".join(lines)) from error

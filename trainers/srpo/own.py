"""What is a person's own estimator or objective, with the settings that the recipe gives it?"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from srpo_env.errors import InvalidInput
from srpo_env.registry import load_reference


def load_own(key: str, reference: str, settings: Mapping[str, Any], *arguments: str) -> Callable[..., Any]:
    """Returns the function with its settings.

    Args:
        key: Where the recipe names it, for messages.
        reference: `module:attr` or `./file.py:attr`.
        settings: Its keyword arguments.
        arguments: What it will be called with besides.

    Raises:
        InvalidInput: It can't be loaded, or can't be called so.
    """
    function = load_reference(reference)
    try:
        inspect.signature(function).bind(*arguments, **settings)
    except TypeError as error:
        raise InvalidInput(
            f"{key} {reference!r} can't be called with ({', '.join(arguments)}) and {key}_settings {dict(settings)}: "
            f"{error}. Write it as `({', '.join(arguments)}, *, name=default)`, with a name for each of its settings."
        ) from error
    return functools.partial(function, **settings)

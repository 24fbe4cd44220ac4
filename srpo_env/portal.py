"""How synchronous calls drive asynchronous code, also inside a running loop (a notebook)."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

T = TypeVar("T")


def run(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine function to its end: on a new loop, or in the background where this thread runs one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(function())
    return on_background_loop(function)


def on_background_loop(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine function on the process's background loop, which lives on from call to call."""
    portal, _ = _portal()
    return portal.call(function)


@functools.cache
def _portal() -> tuple[BlockingPortal, AbstractContextManager[BlockingPortal]]:
    """The loop's portal, and what keeps it open; its thread is a daemon, so it ends with the process."""
    opened = start_blocking_portal(name="srpo_env")
    return opened.__enter__(), opened


os.register_at_fork(after_in_child=_portal.cache_clear)

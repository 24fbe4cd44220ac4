"""How synchronous calls drive asynchronous code, also inside a running loop (a notebook)."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine function to its end: on a new loop, or in the background where this thread runs one."""
    if _running_loop() is None:
        return asyncio.run(function())
    return on_background_loop(function)


def on_background_loop(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine function on the process's background loop, which lives on from call to call.

    Raises:
        RuntimeError: Called on that loop itself, which would wait for itself for ever.
    """
    if _running_loop() is _background_loop(os.getpid()):
        raise RuntimeError("called on the loop that has to do the work; await the asynchronous form, such as `astep`.")
    future = start_on_background_loop(function)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C must not leave the coroutine running
        raise


def start_on_background_loop(function: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
    """Starts a coroutine function on the background loop: the home of what must not move from loop to loop.

    From a coroutine, on whatever loop: `await asyncio.wrap_future(...)`; cancelling that cancels the work.
    """
    return asyncio.run_coroutine_threadsafe(function(), _background_loop(os.getpid()))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@functools.cache
def _background_loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop of a process: a forked child gets its own, for threads do not survive a fork."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="srpo_env", daemon=True).start()
    return loop

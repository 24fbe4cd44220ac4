"""Can asynchronous code be driven from anywhere?"""

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from srpo_env.portal import on_background_loop, run


async def where() -> int:
    await asyncio.sleep(0)
    return threading.get_ident()


async def fail() -> None:
    raise KeyError("x")


def test_without_a_running_loop_it_runs_in_this_thread() -> None:
    assert run(where) == threading.get_ident()


async def test_inside_a_running_loop_it_runs_in_another_thread() -> None:
    assert run(where) != threading.get_ident()


def test_the_background_loop_lives_on_from_call_to_call() -> None:
    assert on_background_loop(where) == on_background_loop(where)


@pytest.mark.parametrize("drive", [run, on_background_loop])
def test_an_error_comes_through(drive: object) -> None:
    with pytest.raises(KeyError, match="x"):
        drive(fail)  # type: ignore[operator]


def test_the_background_loop_does_not_keep_the_process_alive() -> None:
    code = (
        "import asyncio\nfrom srpo_env.portal import on_background_loop as go\ngo(lambda: asyncio.sleep(0))\nprint('x')"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=30, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"x\n", b"")


def test_the_background_loop_does_not_wait_for_itself() -> None:
    async def inside() -> int:
        return on_background_loop(where)

    with pytest.raises(RuntimeError, match="await the asynchronous form"):
        on_background_loop(inside)


def test_an_interrupted_call_leaves_nothing_running() -> None:
    cancelled = threading.Event()

    async def long() -> None:
        await asyncio.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            on_background_loop(long)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert cancelled.wait(5)

"""Who waits for what? The calls of `sample`, served by a thread that steps an engine in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from srpo_env.errors import PolicyError
from srpo_env.protocols import Sampled, SampleRequest

_LINGER_S = 0.2


@dataclass(slots=True, eq=False)
class Call:
    """One call of `sample`: what was asked, and what has become of it so far.

    Attributes:
        requests: In the order of the outcomes.
        outcomes: All of them, once each is `ready`.
        began: When the call came.
        ready: Outcomes by their request's place.
    """

    requests: tuple[SampleRequest, ...]
    outcomes: Future[list[Sampled]] = field(default_factory=Future)
    began: float = field(default_factory=time.perf_counter)
    ready: dict[int, Sampled] = field(default_factory=dict)


class Calls:
    """The calls under way, from any event loop, and the thread that serves them.

    The thread starts with a call and ends when none has come for a while. Cancelling a call, or closing, takes its rows
    out before the next step. All four functions are called in the thread.

    Args:
        name: The policy's label.
        enter: Puts a call's requests into the batch; what can't be sampled is ready at once.
        step: Makes one step, and makes ready what is done.
        drop: Takes calls out that nobody waits for any more.
        clear: Takes everything out, after an error.
        one_at_a_time: Each call is a batch of its own; otherwise all share one.
    """

    def __init__(
        self,
        name: str,
        *,
        enter: Callable[[Call], None],
        step: Callable[[], None],
        drop: Callable[[Sequence[Call]], None],
        clear: Callable[[], None],
        one_at_a_time: bool,
    ) -> None:
        self._name = name
        self._enter, self._step, self._drop, self._clear = enter, step, drop, clear
        self._one_at_a_time = one_at_a_time
        self._waiting: deque[Call] = deque()
        self._open: list[Call] = []
        self._arrival = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for what is in the batch, so that a step may break off."""
        return self._stopped or all(call.outcomes.cancelled() for call in self._open)

    async def outcomes(self, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """Returns one outcome per request, in the same order.

        Raises:
            PolicyError: The policy is closed.
        """
        if not requests:
            return []
        call = Call(tuple(requests))
        with self._arrival:
            if self._closed:
                raise PolicyError(f"policy {self._name!r} is closed; make a new one to sample from.")
            self._waiting.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"sample {self._name}")
                self._thread.start()
            self._arrival.notify()
        return await asyncio.wrap_future(call.outcomes)

    async def close(self) -> None:
        """Cancels the calls under way, and waits for the thread to end."""
        with self._arrival:
            self._closed = True
            self._arrival.notify()
            thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join)

    def cancel_all(self) -> None:
        """Cancels what is in the batch: the step has broken off."""
        for call in self._open:
            call.outcomes.cancel()

    @property
    def _stopped(self) -> bool:
        """Whether it is closed, or the program ends and waits for the thread."""
        return self._closed or not threading.main_thread().is_alive()

    def _serve(self) -> None:
        while True:
            new = self._next()
            if not new and not self._open:
                return
            try:
                self._open += new
                for call in new:
                    self._enter(call)
                self._drop_cancelled()
                self._step()
                self._hand_out()
            except Exception as error:  # noqa: BLE001 (it goes to those who wait for the outcomes)
                self._give_up(error)

    def _next(self) -> list[Call]:
        """Takes the calls that may start now; where nothing is under way, waits a moment for one."""
        with self._arrival:
            if not self._open:
                self._arrival.wait_for(lambda: self._waiting or self._closed, timeout=_LINGER_S)
            if self._stopped or not (self._open or self._waiting):
                self._end()
                return []
            if self._one_at_a_time:
                return [] if self._open else [self._waiting.popleft()]
            calls = list(self._waiting)
            self._waiting.clear()
            return calls

    def _end(self) -> None:
        """Leaves nothing behind; the next call starts another thread."""
        for call in (*self._open, *self._waiting):
            call.outcomes.cancel()
        self._drop_cancelled()
        self._waiting.clear()
        self._thread = None

    def _drop_cancelled(self) -> None:
        # Looked at once: a call that is cancelled meanwhile leaves whole the next time.
        gone = [call for call in self._open if call.outcomes.cancelled()]
        if gone:
            self._open = [call for call in self._open if call not in gone]
            self._drop(gone)

    def _hand_out(self) -> None:
        for call in list(self._open):
            if len(call.ready) == len(call.requests):
                self._open.remove(call)
                if call.outcomes.set_running_or_notify_cancel():
                    call.outcomes.set_result([call.ready[at] for at in range(len(call.requests))])

    def _give_up(self, error: Exception) -> None:
        """Empties the batch, then hands an unforeseen error to all who wait."""
        calls, self._open = self._open, []
        try:
            self._clear()
        except Exception as again:  # noqa: BLE001 (nobody may be left waiting)
            error.add_note(f"The batch could not be emptied, either: {type(again).__name__}: {again}")
        for call in calls:
            if call.outcomes.set_running_or_notify_cancel():
                call.outcomes.set_exception(error)

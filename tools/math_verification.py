r"""Is an answer to a math problem right? Verdicts of math-verify, behind a fast path and with a deadline.

Equal strings and plain numbers are settled at once, in this process. The rest goes to worker processes
(`math_comparing`), of which a verifier has as many as there are cores, started when first needed. Where a comparison
runs out of time or memory, the reference is compared with a plain number. If that goes well, the answer is at fault and
wrong, or else power towers would be a way around a zero; if not, the task is unscorable, as where a comparison breaks:
no error is ever a silent "wrong".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from functools import cache
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal

from srpo_env.errors import InvalidInput
from srpo_env.records import Event
from srpo_env.rewards import Score
from srpo_env.tools.math_answers import EXHAUSTED, Answer, Verdict, answer_of, reference_of, settle

if TYPE_CHECKING:
    from srpo_env.tasks import Task

_NO_ANSWER = "\0"
_PLAIN = Answer("355/113")
_GRACE_S = 1.0
LONGEST_ANSWER = 1000
"""Characters; a longer answer than this, and than four times the reference, is wrong."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What became of an answer.

    Attributes:
        verdict: `unscorable` where the reference can't be compared with, or the comparison failed on no fault of the
            answer's.
        reason: Why, in a few words.
    """

    verdict: Verdict
    reason: str


def _cores() -> int:
    """The cores that this process may use; all of them where the system does not say."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


class MathVerifier:
    r"""Compares answers with references; safe to use from several threads and event loops.

    Args:
        timeout_s: Deadline of one comparison, in CPU seconds: a busy machine changes no verdict.
        workers: Processes; the number of cores this process may use by default.

    Example:
        >>> verifier = MathVerifier()
        >>> verifier.verify("1/2", r"It is \boxed{0.5}.").verdict
        'right'
        >>> verifier.verify("see figure", "5").verdict
        'unscorable'
    """

    def __init__(self, *, timeout_s: float = 5.0, workers: int | None = None) -> None:
        if timeout_s <= 0 or (workers is not None and workers < 1):
            raise InvalidInput(
                f"MathVerifier: timeout_s {timeout_s}, workers {workers}; the deadline is above 0, and there is at "
                "least one worker."
            )
        self.timeout_s = timeout_s
        self.workers = workers or _cores()
        self._queue: SimpleQueue[_Request | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._started: list[_Worker] = []
        self._close = weakref.finalize(self, _stop, self._queue, self._started)  # at exit too

    def verify(self, gold: str, prediction: str, *, tolerance: float = 0.0) -> Verification:
        """Returns the verdict on a prediction, which may be a whole reply or the answer alone.

        Args:
            gold: The reference answer, or a solution that marks it.
            prediction: What is to be judged.
            tolerance: Largest difference between two numbers that still counts as equal.
        """
        settled = self._start(gold, prediction, tolerance)
        return settled if isinstance(settled, Verification) else settled.result()

    async def averify(self, gold: str, prediction: str, *, tolerance: float = 0.0) -> Verification:
        """As `verify`, leaving the event loop free meanwhile."""
        settled = self._start(gold, prediction, tolerance)
        return settled if isinstance(settled, Verification) else await asyncio.wrap_future(settled)

    def check(self, gold: str) -> Verification:
        """Returns whether answers can be compared with a reference: `right`, or `unscorable` and why."""
        reference = reference_of(gold)
        settled = settle(reference, Answer(_NO_ANSWER))
        if reference is None or (settled and settled[0] == "unscorable"):
            return Verification("unscorable", settled[1] if settled else "no reference answer")
        if settled:
            return Verification("right", "equal")
        found = self._ask(reference, _PLAIN, 0.0).result()
        return found if found.verdict == "unscorable" else Verification("right", "equal")

    def close(self) -> None:
        """Ends the workers; what is in flight becomes unscorable."""
        self._close()

    def _start(self, gold: str, prediction: str, tolerance: float) -> Verification | Future[Verification]:
        reference, answer = reference_of(gold), answer_of(prediction)
        settled = settle(reference, answer, tolerance)
        if settled is not None:
            return Verification(*settled)
        assert reference is not None and answer is not None
        if len(answer.text) > max(LONGEST_ANSWER, 4 * len(reference.text)):
            return Verification("wrong", f"the answer has {len(answer.text)} characters, far more than the reference")
        return self._ask(reference, answer, tolerance)

    def _ask(self, reference: Answer, answer: Answer, tolerance: float) -> Future[Verification]:
        request = _Request(reference, answer, tolerance, Future())
        with self._lock:
            if not self._close.alive:
                raise InvalidInput("this MathVerifier is closed; make a new one.")
            self._waiting += 1
            if len(self._started) < min(self._waiting, self.workers):
                self._started.append(_Worker(self._queue, self.timeout_s))
        request.verdict.add_done_callback(self._done)
        self._queue.put(request)
        return request.verdict

    def _done(self, _: Future[Verification]) -> None:
        with self._lock:
            self._waiting -= 1


@dataclass(frozen=True, slots=True)
class _Request:
    reference: Answer
    answer: Answer
    tolerance: float
    verdict: Future[Verification]


class _Worker(threading.Thread):
    """A thread that owns a process and hands it one request at a time; a daemon, so that it holds up no exit."""

    def __init__(self, queue: SimpleQueue[_Request | None], timeout_s: float) -> None:
        super().__init__(name="math-verifier", daemon=True)
        self._queue, self._timeout_s = queue, timeout_s
        self.process: subprocess.Popen[str] | None = None
        self.busy = self.closed = False
        self.start()

    def run(self) -> None:
        """Serves requests until a None comes."""
        while (request := self._queue.get()) is not None:
            if request.verdict.set_running_or_notify_cancel():
                self.busy = True
                found = self._judge(request)
                self.busy = False
                request.verdict.set_result(found)
        if self.process is not None:
            _end(self.process)

    def _judge(self, request: _Request) -> Verification:
        verdict, reason = self._ask(request.reference, request.answer, request.tolerance)
        if verdict != EXHAUSTED:
            return Verification(verdict, reason)
        plain, its_reason = self._ask(request.reference, _PLAIN, 0.0)
        if plain == EXHAUSTED:
            return Verification("unscorable", f"the reference answer {its_reason}")
        return (
            Verification("unscorable", its_reason) if plain == "unscorable" else Verification("wrong", f"it {reason}")
        )

    def _ask(self, reference: Answer, answer: Answer, tolerance: float) -> tuple[Verdict | Literal["exhausted"], str]:
        line = json.dumps([astuple(reference), astuple(answer), tolerance])
        for _ in range(2):
            process = self.process = self.process or _start_process(self._timeout_s)
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line + "\n")
                process.stdin.flush()
                if reply := process.stdout.readline():
                    verdict, reason = json.loads(reply)
                    return verdict, reason
            _end(process)
            self.process = None
            if self.closed:
                return "unscorable", "the verifier was closed"
            # else something outside ended it, which is no answer's fault: once more
        return "unscorable", f"the comparing process ended with code {process.returncode}"


def _start_process(timeout_s: float) -> subprocess.Popen[str]:
    """A process of its own and not a fork: the caller's threads and main module are none of its business."""
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "srpo_env.tools.math_comparing", str(timeout_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        process_group=0,  # Ctrl-C is for the caller
    )


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # what could not be written is not missed
        process.stdin.close()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()
    process.stdout.close()


def _stop(queue: SimpleQueue[_Request | None], workers: Sequence[_Worker]) -> None:
    with contextlib.suppress(Empty):
        while request := queue.get_nowait():
            if request.verdict.set_running_or_notify_cancel():
                request.verdict.set_result(Verification("unscorable", "the verifier was closed"))
    for worker in workers:
        queue.put(None)
        worker.closed = True
        if worker.process is not None and worker.busy:
            _kill(worker.process)


@cache
def shared_verifier() -> MathVerifier:
    """The verifier of this process's rewards, made when first needed."""
    return MathVerifier()


async def math_verify(task: Task, answer: str | None, events: Sequence[Event]) -> Score:
    """1 where the answer is right by one of the task's references, else 0; None where it can be compared with none.

    `meta.error_tolerance` of a task is the largest difference that still counts as right.
    """
    references = [text for text in task.answers if text.strip()]
    if not references:
        return Score(value=None, reason="no reference answer")
    if answer is None or not answer.strip():
        return Score(value=0.0, reason="no answer")
    tolerance = float(task.meta.get("error_tolerance") or 0.0)
    found = [await shared_verifier().averify(each, answer, tolerance=tolerance) for each in references]
    for verdict, value in (("right", 1.0), ("unscorable", None)):
        for each in found:
            if each.verdict == verdict:
                return Score(value=value, reason=verdict if verdict == "right" else each.reason)
    return Score(value=0.0, reason="wrong: " + "; ".join(dict.fromkeys(each.reason for each in found)))

"""Are two answers equal as mathematics? The worker process that asks math-verify, and the guards around it.

A request is one line of JSON on stdin, the reply one on stdout. math-verify and sympy can take any time and memory
(9^9^9^9), inside C code too, so a forked child does the work: the kernel ends it at its deadline and bounds its memory,
and the next child has all modules loaded. All end with the parent, however it ends, when stdin hangs up.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TextIO

import math_verify
from antlr4.atn.ParserATNSimulator import ParserATNSimulator, PredictionMode
from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader
from math_verify import parser as reading
from sympy import Basic, Expr, Float, MatrixBase, N, Tuple
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.relational import Relational

from srpo_env.tools.math_answers import EXHAUSTED, Answer
from srpo_env.tools.math_spelling import spelled

MEMORY_BYTES = 2 * 1024**3
"""Address space of a worker."""
WALL_FACTOR = 20
"""A comparison ends after its deadline in CPU seconds, or this many times that by the clock: then nothing is known."""

_FORMS = [
    (r"\frac{1}{2}", r"\sqrt{2}"),
    (r"a_n = \sum_{k=0}^{n-1} a_k", r"a_n = \sum_{k=1}^{n} a_k"),
    (r"\frac{2(x^2+1)}{3(x-1)^{1/3}}", r"\sqrt[3]{x}"),
    (r"\begin{pmatrix}\frac{1}{2}&0\\-\sin(x)&1\end{pmatrix}", r"\begin{pmatrix}\frac{1}{2}&0\\\cos(x)&1\end{pmatrix}"),
]
_LATEX, _EXPRESSION = LatexExtractionConfig(), ExprExtractionConfig()
_library_numeric_eq = grader.sympy_numeric_eq
_library_solve_and_compare = grader.sympy_solve_and_compare
_library_latex2sympy = reading.latex2sympy


def compare(gold: Answer, answer: Answer, tolerance: float = 0.0) -> tuple[str, str]:
    """Returns the verdict, and why; numbers that differ by at most `tolerance` are equal too."""
    references = _references(gold)
    if not references:
        return "unscorable", "the reference answer can't be read as mathematics"
    found = _read(answer)
    if not found:
        return "wrong", "the answer can't be read as mathematics"
    right = math_verify.verify(
        references, found, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
    )
    if not right and tolerance:
        right = any(_near(one, other, tolerance) for one in references for other in found)
    return ("right", "equal") if right else ("wrong", "not equal")


@lru_cache(maxsize=4096)
def _references(gold: Answer) -> list[Basic | MatrixBase]:
    """What a reference says; it is asked for once per sample of its task, so it is kept."""
    return _read(gold) or _read(Answer(gold.text))


def _read(answer: Answer) -> list[Basic | MatrixBase]:
    """What math-verify reads; an answer that stands alone is boxed, or else `x+1` would be read as 1."""
    if answer.stated:
        text, targets = rf"\boxed{{{spelled(answer.text)}}}", [_LATEX]
    elif r"\(" in answer.text or r"\[" in answer.text:
        text, targets = answer.text, [_LATEX]
    else:
        text, targets = answer.text, [_LATEX, _EXPRESSION]
    found = math_verify.parse(text, targets, parsing_timeout=None)
    return [each for each in found if isinstance(each, Basic | MatrixBase)]


def _near(first: Any, second: Any, tolerance: float) -> bool:
    """Whether numbers, or those in the same places of matrices and tuples, differ by no more than the tolerance."""
    if isinstance(first, MatrixBase) and isinstance(second, MatrixBase):
        pairs = zip(first.flat(), second.flat(), strict=False)
        return first.shape == second.shape and all(_near(one, other, tolerance) for one, other in pairs)
    if isinstance(first, Tuple) and isinstance(second, Tuple):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(_near(one, other, tolerance) for one, other in pairs)
    values = [N(grader.get_pct_val(each, each), 30) for each in (first, second) if isinstance(each, Expr)]
    return (
        len(values) == 2
        and all(each.is_real and each.is_number for each in values)
        and bool(abs(values[0] - values[1]) <= tolerance)
    )


def _latex2sympy(*arguments: Any, **settings: Any) -> Any:
    """latex2sympy with ANTLR's two stages: what SLL, a third of the cost, can't parse goes to LL (Parr et al., 2014).

    Where SLL finds a parse it is that of LL.
    """
    try:
        with _sll():
            return _library_latex2sympy(*arguments, **settings)
    except Exception:  # noqa: BLE001 -- LL raises it again if it is the text's fault
        return _library_latex2sympy(*arguments, **settings)


@contextmanager
def _sll() -> Iterator[None]:
    start = ParserATNSimulator.__init__

    def start_in_sll(self: Any, *arguments: Any) -> None:
        start(self, *arguments)
        self.predictionMode = PredictionMode.SLL

    ParserATNSimulator.__init__ = start_in_sll
    try:
        yield
    finally:
        ParserATNSimulator.__init__ = start


def _numeric_eq(first: Any, second: Any, float_rounding: int, numeric_precision: int) -> bool:
    """math-verify's comparison of values, which takes all below 1e-15 for equal, with a relative one behind it."""
    if any(isinstance(each, Basic) and each.has(ExprWithLimits) and each.free_symbols for each in (first, second)):
        return False  # a sum with symbols in it has no value, and seeking one is slow
    return bool(_library_numeric_eq(first, second, float_rounding, numeric_precision)) and _close(first, second)


def _close(first: Any, second: Any) -> bool:
    if not (isinstance(first, Basic) and isinstance(second, Basic)):
        return True  # matrices: their elements have been here one by one
    if any(grader.get_pct_val(each) is not None for each in (first, second)):
        return True  # 9% and 9 are taken for equal: the sign is often left out
    try:
        values = N(first, 30), N(second, 30)
        size = max(abs(value) for value in values)
        allowed = 1e-6 if first.has(Float) or second.has(Float) else 1e-12
        return bool(abs(values[0] - values[1]) <= allowed * size)
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return True  # not numbers: there is nothing to be rounded


def _solve_and_compare(gold: Relational, answer: Relational, float_rounding: int, numeric_precision: int) -> bool:
    """math-verify's last resort for equations, where there is hope: no solver helps with sums and integrals in them."""
    if gold.has(ExprWithLimits) or answer.has(ExprWithLimits):
        return False
    return bool(_library_solve_and_compare(gold, answer, float_rounding, numeric_precision))


def _serve(replies: TextIO, deadline_s: float) -> None:
    """Answers requests until stdin ends."""
    for line in sys.stdin:
        gold, answer, tolerance = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, deadline_s)
        signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * deadline_s)
        try:
            reply = compare(Answer(*gold), Answer(*answer), tolerance)
        except MemoryError:
            reply = EXHAUSTED, f"took more than {MEMORY_BYTES // 2**30} GiB"
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is a reason and no verdict
            reply = "unscorable", f"math-verify raised {type(error).__name__}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, reply)


def _write(replies: TextIO, reply: tuple[str, str]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _exit_code(child: int, woken: int) -> int:
    """Waits for a child's end. Where the parent has gone, stdin hangs up: a child at work would notice much later."""
    watched = select.poll()
    watched.register(0, 0)
    watched.register(woken, select.POLLIN)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if any(file != woken for file, _ in watched.poll()):
            os.kill(child, signal.SIGKILL)
            os._exit(0)
        os.read(woken, 64)


def main() -> None:
    """Keeps a child that answers requests; one that was ended is replied for, and another forked at once."""
    deadline_s = float(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no reply
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit; there the deadline alone bounds an answer
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    grader.sympy_numeric_eq, grader.sympy_solve_and_compare = _numeric_eq, _solve_and_compare
    reading.latex2sympy = _latex2sympy
    for first, second in _FORMS:  # fills the tables of the grammar for every child: one that is ended costs little
        compare(Answer(first), Answer(second))
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while (child := os.fork()) != 0:
        code = _exit_code(child, woken)
        if code == 0:
            os._exit(0)  # at once: there is nothing to tidy up
        if code == -signal.SIGPROF:
            _write(replies, (EXHAUSTED, f"took longer than {deadline_s:g} s"))
        elif code == -signal.SIGALRM:
            _write(replies, ("unscorable", f"the machine was busy for {WALL_FACTOR * deadline_s:g} s"))
        else:
            _write(replies, ("unscorable", f"the comparison ended with code {code}"))
    _serve(replies, deadline_s)
    os._exit(0)


if __name__ == "__main__":
    main()

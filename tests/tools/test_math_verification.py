"""Is every verdict right, wrong or unscorable, whatever the answer and wherever it is asked for?"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from srpo_env.errors import InvalidInput
from srpo_env.tools import MathVerifier, Verification

POLICIES = {
    "chk-0182": "an interval and the inequality that says the same are equal (chk-0181 wants that, with the same pair)",
    "chk-0270": "an empty reference is unscorable, which is neither right nor wrong",
    "chk-0350": "a sentence that states the answer counts, after a <think> block too",
}


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier(workers=1, timeout_s=20.0)
    yield verifier
    verifier.close()


# Cases of our own; B102 to B117 among them.


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        (r"2\frac12", "5/2"),
        (r"50\%", "0.5"),
        (r"25\%", "25 percent"),
        ("5", r"5\text{ cm}"),
        (r"90^\circ", "90"),
        ("1000", "$10^3$"),
        ("5000", r"5\times10^3"),
        ("13", r"\text{13}"),
        ("(1,9/2)", "(1,4.5)"),
        (r"\{1,2\}", r"\{2,1\}"),
        ("0,7", "(0,7)"),
        (r"\tan^2y+1", r"\sec^2y"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\\\end{pmatrix}"),
        ("3+4i", "4i+3"),
        (r"x\ge\sqrt2", r"[\sqrt2,\infty)"),
        ("2x+4y-3=0", r"y=-\frac12x+\frac34"),
        ("3x+2y-z+5=0", "-3x-2y+z-5=0"),
        ("1 + x", r"\boxed{x + 1}"),
        ("3, 5", "5, 3"),
        ("21 or 11", r"\boxed{11, 21}"),
        (r"\pm 3", r"\boxed{-3} and \boxed{3}"),
        (r"0.5 + \frac{\pi}{8}", r"\pi \div 8 + 1 \div 2"),
        ("9500", r"The total is $9{,}500."),
        ("73", "Thus there are **73** of them."),
        ("27, 54, 108, 135", "135,108,54,27"),
        (r"\sqrt{2}", "1.414214"),
        (r"10\text{ m/s}", r"\boxed{10 \frac{\text{m}}{\text{s}}}"),
        ("120", r"\boxed{120°}"),
        (r"18\%", r"\boxed{0.18}"),
        (r"(-\infty,1)\cup(3,\infty)", r"\boxed{x<1 \text{ or } x>3}"),
        (r"\{x\mid x>2\}", r"\boxed{(2,\infty)}"),
        (r"\begin{pmatrix}1/2\\2\end{pmatrix}", r"\boxed{\begin{bmatrix}0.5\\2\end{bmatrix}}"),
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "-2"),
        ("3", r"\boxed{3^{\text{rd}}}"),
        (r"5^{\text{th}}", r"\boxed{5th}"),
        (r"0.1\overline{6}", r"\frac16"),
        (r"\frac{1}{3}", r"\boxed{0.\overline{3}}"),
        (r"\sqrt{2}", "√2"),
        (r"\infty", r"\boxed{\text{infinity}}"),
        (r"e^2", r"\boxed{\mathrm{e}^2}"),
        (r"\sin 30^\circ", r"\frac12"),
        (r"\binom{5}{2}", "10"),
        (r"4^{50}", r"\boxed{2^{100}}"),
        ("3:4", r"\boxed{6:8}"),
        ("42", "#### 42 apples"),
        ("7", r"\boxed{8}, no, wait: \boxed{7}"),
        ("B", r"\boxed{\textbf{(B) } 12}"),
        ("64,250", "64250"),
        ("7", r"so \boxed{007}. The total is 1,350,007, which ends in \boxed{007}."),
        ("2", r"\boxed{\boxed{2}}"),
        ("42", "#### 42\n" + " and this confirms it." * 40),
    ],
)
def test_right(verifier: MathVerifier, gold: str, prediction: str) -> None:
    assert verifier.verify(gold, prediction).verdict == "right"


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        (r"\frac{1}{3^{80}}", r"\frac{1}{3^{79}}"),
        (r"(1, \frac{1}{3^{80}})", r"(1, \frac{1}{3^{79}})"),
        (r"\frac{1}{1500!}", r"\frac{1}{1502!}"),
        (r"\pm 17", "17"),
        (r"2-\frac{1}{\pi}", r"2+\frac{1}{\pi}"),
        ("k=3,5,8", "k=3,5,9"),
        ("S=(2,4)", "S=(2,4.5)"),
        ("2*x-5*y+3=0", "7x + y + 1=0"),
        ("[0,1)", "(0,1)"),
        ("[0,1)", "[0,1]"),
        ("(1,2)", "(2,1)"),
        (r"90^\circ", r"\frac{\pi}{2}"),
        ("0,7", "07"),
        ("23,45", "2345"),
        ("2,4,6", "246"),
        (r"\sum_{k=1}^{n} k", r"\sum_{k=1}^{n} k^2"),
        ("x > 5", "Therefore $x < 5$ is the solution."),
        ("$2x + z = 1$", "$1$"),
        (r"\frac{1}{3}", "0.33"),
        ("5", r"\boxed{\frac{}{}}"),
        ("5", "(" * 10_000),
        (r"5\text{ cm}", r"\boxed{6\text{ cm}}"),
        ("5", r"\boxed{5\text{ to }6}"),
        (r"18\%", r"\boxed{1.8}"),
        (r"(1,2)\cup(2,3)", r"\boxed{(1,3)}"),
        (r"\emptyset", r"\boxed{\{0\}}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\end{pmatrix}}"),
        (r"0.\overline{3}", "1/4"),
        (r"\infty", r"\boxed{-\infty}"),
        (r"3^{\text{rd}}", "2"),
        (r"\sin 30^\circ", r"\sin 30"),
        ("3:4", "4:3"),
        ("7", r"\boxed{7}, or perhaps \boxed{8}"),
        ("5", r"\boxed{?}"),
        ("1", "10"),
        ("42", r"<think>\boxed{42}</think> I am done."),
    ],
)
def test_wrong(verifier: MathVerifier, gold: str, prediction: str) -> None:
    assert verifier.verify(gold, prediction).verdict == "wrong"


def test_a_reference_that_is_no_mathematics_is_unscorable_and_says_so(verifier: MathVerifier) -> None:
    found = verifier.verify(r"\frac{", r"\boxed{1}")
    assert found == Verification("unscorable", "the reference answer can't be read as mathematics")


@pytest.mark.parametrize(
    ("gold", "verdict"),
    [
        ("5", "right"),
        (r"\frac{1}{2}", "right"),
        ("", "unscorable"),
        ("see figure", "unscorable"),
        (r"\frac{", "unscorable"),
    ],
)
def test_a_reference_is_checked_without_an_answer(verifier: MathVerifier, gold: str, verdict: str) -> None:
    assert verifier.check(gold).verdict == verdict


@pytest.mark.parametrize(
    ("gold", "prediction", "tolerance", "verdict"),
    [
        ("4.2", r"\sqrt{17}", 0.0, "wrong"),
        ("4.2", r"\sqrt{17}", 0.1, "right"),
        ("(1, 4.2, 2)", r"(1, \sqrt{17}, 2)", 0.1, "right"),
        ("(1, 4.2, 2)", r"(1, \sqrt{17}, 3)", 0.1, "wrong"),
        (r"\begin{pmatrix}1/3\\1/5\end{pmatrix}", r"\begin{pmatrix}0.33\\0.2\end{pmatrix}", 0.0, "wrong"),
        (r"\begin{pmatrix}1/3\\1/5\end{pmatrix}", r"\begin{pmatrix}0.33\\0.2\end{pmatrix}", 0.005, "right"),
        (r"\begin{pmatrix}1/3\\1/5\end{pmatrix}", r"\begin{pmatrix}0.33\\0.3\end{pmatrix}", 0.005, "wrong"),
        (r"\begin{pmatrix}1/3\\1/5\end{pmatrix}", r"\begin{pmatrix}0.33&0.2\end{pmatrix}", 0.005, "wrong"),
    ],
)
def test_a_tolerance_holds_for_each_number(
    verifier: MathVerifier, gold: str, prediction: str, tolerance: float, verdict: str
) -> None:
    assert verifier.verify(gold, prediction, tolerance=tolerance).verdict == verdict


# Deadlines, threads, loops and processes.


def test_an_endless_answer_is_wrong_and_the_next_one_is_judged() -> None:
    """Were it unscorable, a policy could write power towers in place of wrong answers."""
    verifier = MathVerifier(workers=1, timeout_s=0.5)
    try:
        found = verifier.verify("2", r"\boxed{\frac{7^{7^{7^7}}-3}{4}}")
        assert found == Verification("wrong", "it took longer than 0.5 s")
        assert verifier.verify(r"\sqrt{5}", "10^{10^{10}}").verdict == "wrong"
        assert verifier.verify(r"\sin^2 x", r"1-\cos^2 x").verdict == "right"
    finally:
        verifier.close()


def test_an_endless_reference_is_unscorable_whatever_the_answer_is() -> None:
    verifier = MathVerifier(workers=1, timeout_s=0.5)
    reason = "the reference answer took longer than 0.5 s"
    try:
        assert verifier.verify("9^{9^{9^9}}", "2") == Verification("unscorable", reason)
        assert verifier.verify("9^{9^{9^9}}", "8^{8^{8^8}}") == Verification("unscorable", reason)
        assert verifier.check("9^{9^{9^9}}") == Verification("unscorable", reason)
    finally:
        verifier.close()


def test_threads_and_loops_get_the_same_verdicts(verifier: MathVerifier) -> None:
    async def many() -> list[str]:
        found = await asyncio.gather(*(verifier.averify(r"\log_2 4", str(i)) for i in range(4)))
        return [each.verdict for each in found]

    with ThreadPoolExecutor(4) as threads:
        in_threads = list(threads.map(lambda i: verifier.verify(r"\log_2 4", str(i)).verdict, range(4)))
    assert in_threads == asyncio.run(many()) == ["wrong", "wrong", "right", "wrong"]


def test_a_worker_that_was_killed_from_outside_costs_no_verdict(verifier: MathVerifier) -> None:
    verifier.verify(r"\log_2 4", "2")
    process = verifier._started[0].process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    assert verifier.verify(r"\log_2 4", "2").verdict == "right"


def test_a_closed_verifier_ends_what_is_in_flight_and_takes_nothing_more() -> None:
    verifier = MathVerifier(workers=1, timeout_s=60.0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(verifier.verify, "2", "10^{10^{10}}")
        while not verifier._started or verifier._started[0].process is None:
            time.sleep(0.01)
        verifier.close()
        assert waiting.result() == Verification("unscorable", "the verifier was closed")
    with pytest.raises(InvalidInput, match="closed"):
        verifier.verify(r"\log_2 4", "2")


IN_FLIGHT = """
import asyncio, sys
from srpo_env.tools import MathVerifier

async def main():
    verifier = MathVerifier(workers=2, timeout_s=600)
    asked = [asyncio.create_task(verifier.averify("2", answer)) for answer in ("9^{9^{9^9}}", "10^{10^{10}}")]
    while len(verifier._started) < 2 or not all(each.process and each.busy for each in verifier._started):
        await asyncio.sleep(0.01)
    print(*(each.process.pid for each in verifier._started), flush=True)
    await asyncio.gather(*asked)

asyncio.run(main())
"""


def wait_until(happened: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def is_gone(group: int) -> bool:
    """Whether nothing of the group runs; a zombie that nobody has collected does not."""
    running = [each.pid for each in psutil.process_iter(["status"]) if each.info["status"] != psutil.STATUS_ZOMBIE]
    return group not in map(group_of, running)


def group_of(process: int) -> int | None:
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return None


def is_at_work(group: int) -> bool:
    """Whether the group's process has forked the one that compares."""
    return bool(psutil.Process(group).children())


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_a_run_ends_with_answers_in_flight_no_worker_is_left(end: signal.Signals) -> None:
    """The deadline is ten minutes: what waits for it fails here."""
    with subprocess.Popen(
        [sys.executable, "-c", IN_FLIGHT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stdout is not None
        groups = [int(word) for word in run.stdout.readline().split()]
        assert wait_until(lambda: all(map(is_at_work, groups)), 60)
        run.send_signal(end)
        assert wait_until(lambda: run.poll() is not None, 20)
    assert wait_until(lambda: all(map(is_gone, groups)), 20)


@pytest.mark.parametrize("settings", [{"timeout_s": 0.0}, {"workers": 0}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="deadline is above 0"):
        MathVerifier(**settings)


# The checker cases, which lie with the large data files.


def tolerance_of(row: dict[str, Any]) -> float:
    """A row may be of a test that rounds to fewer than the usual six digits after the point."""
    precision = row.get("options", {}).get("precision", 6)
    return 0.5 * 10.0**-precision if precision < 6 else 0.0


def test_the_checker_cases_get_their_verdicts(verifier: MathVerifier, data_dir: Path) -> None:
    wanted = {True: "right", False: "wrong", None: "unscorable"}
    rows = map(json.loads, (data_dir / "checker_cases.jsonl").read_text(encoding="utf-8").splitlines())
    missed = [
        row["id"]
        for row in rows
        if row["kind"] == "equivalence"
        and not row.get("contested")
        and verifier.verify(row["gold"], row["prediction"], tolerance=tolerance_of(row)).verdict
        != wanted[row["expected"]]
    ]
    assert missed == list(POLICIES)


def test_a_system_that_does_not_tell_the_allowed_cores_gives_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert MathVerifier().workers == 3

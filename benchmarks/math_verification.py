"""How often does the verifier agree with people, and how fast is it?

    python benchmarks/math_verification.py DATA [agreement throughput stall fuzz]

DATA is the folder of the large data files. Times are CPU seconds of all processes; per second of two cores means
twice the rate of one CPU second. New references are the same cases in other digits.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from srpo_env.parsers import last_boxed, reader
from srpo_env.spec import Parser
from srpo_env.tools import MathVerifier
from srpo_env.tools.math_answers import answer_of

VERDICTS = {True: "right", False: "wrong", None: "unscorable"}
OTHER_DIGITS = str.maketrans("123456789", "234567891")
WARM = [(r"\tan 3", r"\sin 3 / \cos 3"), ("y = 2x^2", r"\sqrt{y} = 2"), (r"\sum_{k=1}^n k", "n^2")] * 2
ENDLESS = [r"\boxed{9^{9^{9^9}}}", "10^{10^{10}}", r"\boxed{\frac{7^{7^{7^7}}-3}{4}}", "((10^9)!)!", r"2^{3^{4^{5^6}}}"]


def cpu_s() -> float:
    """CPU seconds of this process and of the workers, and of those of their children that were ended."""
    me = psutil.Process()
    times = [each.cpu_times() for each in (me, *me.children(recursive=True))]
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)


def ask(verifier: MathVerifier, pairs: list[tuple[str, str]]) -> None:
    """Asks for a verdict on each pair, two at a time."""

    async def one_by_one(mine: list[tuple[str, str]]) -> None:
        for gold, prediction in mine:
            await verifier.averify(gold, prediction)

    async def both() -> None:
        await asyncio.gather(*(one_by_one(pairs[part::2]) for part in range(2)))

    asyncio.run(both())


def measured(pairs: list[tuple[str, str]]) -> list[float]:
    """Returns the CPU seconds of these verdicts in three rounds: workers cold, references new, references known."""
    others = [(gold.translate(OTHER_DIGITS), prediction.translate(OTHER_DIGITS)) for gold, prediction in pairs]
    verifier = MathVerifier(workers=2)
    ask(verifier, WARM)
    found = []
    for each in (pairs, others, others):
        before = cpu_s()
        ask(verifier, each)
        found.append(cpu_s() - before)
    verifier.close()
    return found


def wait_for_children() -> None:
    """CPU time of children counts once they have ended."""
    while psutil.Process().children(recursive=True):
        time.sleep(0.1)


def extracted(row: dict[str, Any]) -> str | None:
    """What the part of the package that does this kind of extraction finds."""
    text = row["prediction"]
    if row["kind"] == "extract_last_number":
        found = reader(Parser(use="number"))(text)
        return str(found.value) if found.ok else None
    if row["kind"] == "extract_boxed":
        return last_boxed(text)
    answer = answer_of(text)
    return answer.text if answer and any(mark in text for mark in ("####", r"\boxed")) else None


def tolerance_of(row: dict[str, Any]) -> float:
    """A row may be of a test that rounds to fewer than the usual six digits after the point."""
    precision = (row.get("options") or {}).get("precision", 6)
    return 0.5 * 10.0**-precision if precision < 6 else 0.0


def agreement(rows: list[dict[str, Any]], verifier: MathVerifier) -> None:
    """Prints the share of rows that agree, by kind, and every miss."""
    agreed, total = Counter[str](), Counter[str]()
    for row in rows:
        if row.get("contested") or not row["kind"].startswith(("equivalence", "extract")):
            continue
        if row["kind"] == "equivalence":
            found: str | None = verifier.verify(row["gold"], row["prediction"], tolerance=tolerance_of(row)).verdict
            wanted = VERDICTS[row["expected"] if row["gold"] else None]  # nothing to compare with: not right
        else:
            found, wanted = extracted(row), row["expected"]
        total[row["kind"]] += 1
        agreed[row["kind"]] += found == wanted
        if found != wanted:
            print(f"  {row['id']}: {found}, wanted {wanted}: {row['gold']!r} | {row['prediction'][-80:]!r}")
    for kind, number in total.items():
        print(f"{kind}: {agreed[kind]} of {number}")
    print(f"all: {agreed.total()} of {total.total()}, {100 * agreed.total() / total.total():.1f}%")


def throughput(rows: list[dict[str, Any]]) -> None:
    """Prints verdicts per CPU second for the cases alone, and for a mix of 90% integers and equal strings."""
    pairs = [(row["gold"], row["prediction"]) for row in rows if row["kind"] == "equivalence"]
    simple = [(str(n), rf"\boxed{{{n + n % 2}}}") for n in range(450)] + [(rf"x^{n}", rf"x^{n}") for n in range(450)]
    exact = [(rf"\frac{{{n}}}{{7}}\pi", rf"\frac{{{2 * n}\pi}}{{14}}") for n in range(1, 51)]
    algebra = exact + [(rf"\log_2 {n}", rf"\frac{{\ln {n}}}{{\ln 2}}") for n in range(3, 53)]

    for name, chosen in (("checker cases", pairs), ("90% integers and equal strings", simple + algebra)):
        for known, seconds in zip(("workers cold", "references new", "known"), measured(chosen), strict=True):
            rate = 2 * len(chosen) / seconds
            print(f"{name}, {known}: {len(chosen)} in {seconds:.2f} CPU s: {rate:,.0f} per second of two cores")


def stall(verifier: MathVerifier) -> None:
    """Prints how late a 1 ms sleep of the event loop is while endless answers are in flight."""
    late: list[float] = []

    async def watch(until: asyncio.Event) -> None:
        while not until.is_set():
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - before - 0.001)

    async def run() -> None:
        done = asyncio.Event()
        watching = asyncio.create_task(watch(done))
        found = await asyncio.gather(*(verifier.averify("2", answer) for answer in ENDLESS))
        done.set()
        await watching
        print(f"endless answers: {Counter(each.verdict for each in found)}")

    asyncio.run(run())
    late.sort()
    print(f"event loop late by p50 {1e3 * late[len(late) // 2]:.1f} ms, p99 {1e3 * late[int(0.99 * len(late))]:.1f} ms")


def fuzz(rows: list[dict[str, Any]], verifier: MathVerifier, count: int = 10_000) -> None:
    """Prints the verdicts on damaged answers; an exception ends the benchmark."""
    draw = random.Random(0)
    texts = [row["prediction"][-200:] for row in rows if row["kind"] == "equivalence"]
    pieces = [
        "\\",
        "{",
        "}",
        "^",
        "_",
        "$",
        r"\frac",
        r"\sqrt",
        "!",
        "9^9^9",
        ",",
        "=",
        r"\boxed{",
        "\0",
        "é",
        "</think>",
    ]
    seen = Counter[str]()

    def damaged() -> str:
        text = draw.choice(texts)
        for _ in range(draw.randint(1, 4)):
            at = draw.randint(0, len(text))
            text = text[:at] + draw.choice(pieces) + text[at + draw.randint(0, 3) :]
        return text

    async def ask() -> None:
        for _ in range(count // 2):
            seen[(await verifier.averify(draw.choice(texts), damaged())).verdict] += 1

    async def both() -> None:
        await asyncio.gather(ask(), ask())

    asyncio.run(both())
    print(f"{seen.total()} damaged answers: {dict(seen)}, no crash")
    verifier.close()
    wait_for_children()
    print(f"processes left after close: {len(psutil.Process().children(recursive=True))}")


def main() -> None:
    """Runs the parts named, or all."""
    rows = [json.loads(line) for line in (Path(sys.argv[1]) / "checker_cases.jsonl").read_text("utf-8").splitlines()]
    parts = sys.argv[2:] or ["agreement", "throughput", "stall", "fuzz"]
    if "agreement" in parts:
        agreement(rows, MathVerifier())
    if "throughput" in parts:
        throughput(rows)
    if "stall" in parts:
        stall(MathVerifier(workers=2, timeout_s=2.0))
    if "fuzz" in parts:
        fuzz(rows, MathVerifier(workers=2))


if __name__ == "__main__":
    main()

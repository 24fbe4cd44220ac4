"""Is the memory that a dry run estimates what a run takes? On a CPU, by the peak of the process's resident memory.

    OMP_NUM_THREADS=1 python benchmarks/memory.py [RECIPE ...] [--updates 2]

Runs each recipe as it ships, but for some updates: evaluations, sampling, learning and the checkpoint. The estimate
counts Python and torch as a part of the process, as the measurement does. Exits with 1 if one is off by more than a
quarter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

from srpo_env.jobs import Job
from srpo_env.memory import Memory, estimate

MOST_OFF = 0.25


def measured(recipe: str, updates: int) -> int:
    """Returns the bytes of the largest resident set of a training run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"updates={updates}", f"run={folder}/run"]
        command = [sys.executable, "-c", "from srpo_env.cli import main; main()", "train", recipe, *settings]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{recipe}: the run failed with status {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss * 1024


def expected(recipe: str) -> Memory:
    """What a dry run says."""
    found = estimate(Job.prepare(recipe))
    if isinstance(found, str):
        sys.exit(f"{recipe}: no estimate, for {found}.")
    return found


def main() -> None:
    """Prints estimate and measurement of each recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["arithmetic_tiny", "sums_smollm2"])
    parser.add_argument("--updates", type=int, default=2)
    options = parser.parse_args()
    worst = 0.0
    for recipe in options.recipes:
        memory = expected(recipe)
        peak = measured(recipe, options.updates)
        worst = max(worst, abs(memory.peak / peak - 1))
        print(
            f"{recipe}: measured {peak / 2**30:.2f} GiB, estimated {memory.peak / peak:.2f} of it: {memory}", flush=True
        )
    if worst > MOST_OFF:
        sys.exit(f"an estimate is off by {worst:.0%}; at most {MOST_OFF:.0%} are allowed.")


if __name__ == "__main__":
    main()

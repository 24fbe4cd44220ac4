"""Does a trained router ask more solvers where the sum is hard, and what does that buy?

    OMP_NUM_THREADS=1 srpo-env train router_tiny seed=0 run=runs/router_0
    OMP_NUM_THREADS=1 python benchmarks/router.py runs/router_0

The run's held-out tasks, one episode each, with its last checkpoint, and with a router that always says `one` or `all`.
Rows of equal task and place have equal seeds, so the three ask the same solvers and get the same outputs. Prints, of
each: accuracy, size of the solving set, and score (accuracy less the cost of extra members), by number of operations
and together; then hard minus easy size, and the score against the two fixed routers, with 95% bootstrap intervals over
tasks. Exits with 1 unless the interval of hard minus easy is above 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from srpo_env import EventLog
from srpo_env.config import load_recipe
from srpo_env.evaluation import evaluate
from srpo_env.tasks import load_tasks

FIXED = {"always one": "one", "always all": "all"}


def tried(run: str, folder: Path, said: str | None) -> dict[str, tuple[float, int]]:
    """Score and size of the solving set of each held-out task; `said` takes the place of the router's outputs."""
    fixed = [] if said is None else [f"policies.router.sample={{backend: scripted, outputs: [{said}]}}"]
    evaluate(run, [*fixed, f"run={folder}"])
    episodes = EventLog(folder).episodes("eval-0")
    return {events[-1].task: (float(events[-1].reward or 0), len(events[-1].members)) for events in episodes}


def interval(groups: Sequence[np.ndarray], draws: int = 10_000) -> tuple[float, float, float]:
    """Mean of the first group, less that of the second where there is one, with its 95% percentile bootstrap interval.

    Args:
        groups: One or two samples, each drawn from anew on its own.
    """
    draw = np.random.default_rng(0)
    means = [group[draw.integers(len(group), size=(draws, len(group)))].mean(1) for group in groups]
    signs = (1, -1)[: len(groups)]
    low, high = np.percentile(sum(sign * each for sign, each in zip(signs, means, strict=True)), [2.5, 97.5])
    middle = sum(sign * group.mean() for sign, group in zip(signs, groups, strict=True))
    return float(middle), float(low), float(high)


def main() -> int:
    """Prints the tables and says whether hard sums are asked of more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a trained run")
    run = parser.parse_args().run
    recipe = load_recipe(run)
    cost, used = recipe.tasks.train.extra_member_cost, recipe.tasks.eval
    assert used is not None
    tasks = load_tasks(str(used.use), split=used.split, limit=used.limit, **(used.model_extra or {})).tasks
    kinds = np.array([task.meta["operations"] for task in tasks])
    easy, hard = kinds == kinds.min(), kinds == kinds.max()
    scores: dict[str, np.ndarray] = {}
    sizes: dict[str, np.ndarray] = {}
    print(f"{'':<12} {'tasks':>12} {'accuracy':>9} {'size':>6} {'score':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for name, said in {"router": None, **FIXED}.items():
            found = tried(run, Path(folder) / name.replace(" ", "_"), said)
            right, sizes[name] = np.array([found[task.id] for task in tasks]).T
            scores[name] = right - cost * (sizes[name] - 1)
            for label, chosen in {"easy": easy, "hard": hard, "all": np.ones_like(easy)}.items():
                figures = right[chosen].mean(), sizes[name][chosen].mean(), scores[name][chosen].mean()
                print(
                    f"{name:<12} {chosen.sum():>6} {label:<5} {figures[0]:>9.3f} {figures[1]:>6.2f} {figures[2]:>7.3f}"
                )
    gap = interval([sizes["router"][hard], sizes["router"][easy]])
    print("size, hard minus easy:    {:+.2f} [{:+.2f}, {:+.2f}]".format(*gap))
    for name in FIXED:
        better = interval([scores["router"] - scores[name]])
        print(f"score, router minus {name}: " + "{:+.3f} [{:+.3f}, {:+.3f}]".format(*better))
    return int(gap[1] <= 0)


if __name__ == "__main__":
    sys.exit(main())

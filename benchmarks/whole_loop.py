"""Where does the CPU time of `make train` go?

    OMP_NUM_THREADS=1 python benchmarks/whole_loop.py [--updates 12] [key=value ...]

Runs the recipe `arithmetic_tiny` for some updates and counts the CPU time of both its threads from the third update on.
Each moment belongs to the innermost watched function that it is spent in. Model compute is what torch does for the
model: its forward passes (body and head, in sampling, log-probs and update), the choice of tokens from logits,
backward, clipping of the gradient's norm and the optimiser. All other parts are overhead; exits with 1 if one of them
takes more than a tenth.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
import tempfile
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Generator
from typing import Any

import torch

import srpo_env
from srpo_env import EventBatch, training
from srpo_env.agents import LocalPolicy, generation
from srpo_env.episode import Episode
from srpo_env.eventlog import Journal
from srpo_env.jobs import Job
from srpo_env.runs import Run
from srpo_env.trainers.srpo import learner, scoring

WARM_UP = 2
MODEL = "model compute: "


class Clock:
    """CPU seconds of each part, over all threads; a part's own, without those of the parts called inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.on = False
        self._local = threading.local()

    def _enter(self, name: str) -> list[str]:
        stack: list[str] = self._local.__dict__.setdefault("stack", [])
        self._credit(stack)
        stack.append(name)
        return stack

    def _leave(self, stack: list[str]) -> None:
        self._credit(stack)
        stack.pop()

    def _credit(self, stack: list[str]) -> None:
        now = time.thread_time()
        if stack and self.on:
            self.seconds[stack[-1]] += now - self._local.since
        self._local.since = now

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Counts every call of a function as this part's."""
        function = getattr(owner, name)
        plain = function.__func__ if (is_class := isinstance(owner.__dict__.get(name), classmethod)) else function

        @functools.wraps(plain)
        def watched(*args: Any, **kwargs: Any) -> Any:
            stack = self._enter(part)
            try:
                return plain(*args, **kwargs)
            finally:
                self._leave(stack)

        @functools.wraps(plain)
        def watched_coroutine(*args: Any, **kwargs: Any) -> Any:
            return self._steps(plain(*args, **kwargs), part)

        new = watched_coroutine if inspect.iscoroutinefunction(plain) else watched
        setattr(owner, name, classmethod(new) if is_class else new)

    @types.coroutine
    def _steps(self, coroutine: Any, part: str) -> Generator[Any, Any, Any]:
        """Runs a coroutine; the moments in which it waits are not counted."""
        given = None
        while True:
            stack = self._enter(part)
            try:
                awaited = coroutine.send(given)
            except StopIteration as end:
                return end.value
            finally:
                self._leave(stack)
            given = yield awaited


def parts() -> list[tuple[Any, str, str]]:
    """Returns what is watched: owner, function, and the part that it belongs to."""
    return [
        (training, "_update", "loop"),
        (Job, "sample", "rollouts: turns and requests"),
        (Episode, "__init__", "environment"),
        (Episode, "advance", "environment"),
        (Journal, "append", "event log"),
        (Run, "record", "metrics and records"),
        (training, "sampling_metrics", "metrics and records"),
        (EventBatch, "from_events", "batch"),
        (LocalPolicy, "_enter", "prompts and texts"),
        (LocalPolicy, "_outputs", "prompts and texts"),
        (LocalPolicy, "_step", "sampling engine"),
        (generation.Generator, "_forward", MODEL + "sampling"),
        (generation, "choose", MODEL + "sampling"),
        (learner.SRPOLearner, "update", "update"),
        (learner.SRPOLearner, "_fresh", "log-probs"),
        (learner, "step_metrics", "metrics and records"),
        (learner, "batch_metrics", "metrics and records"),
        (scoring.Scorer, "_base", MODEL + "log-probs and update"),
        (scoring, "from_hidden", MODEL + "log-probs and update"),
        (torch.Tensor, "backward", MODEL + "log-probs and update"),
        (torch.nn.utils, "clip_grad_norm_", MODEL + "log-probs and update"),
        (torch.optim.AdamW, "step", MODEL + "log-probs and update"),
    ]


def main() -> int:
    """Prints the share of each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    clock, seen = Clock(), 0
    for owner, name, part in parts():
        clock.watch(owner, name, part)
    update: Callable[..., str] = training._update  # noqa: SLF001

    def counted(*args: Any) -> str:
        nonlocal seen
        seen += 1
        clock.on = seen > WARM_UP
        try:
            return update(*args)
        finally:
            clock.on = False

    training._update = counted  # noqa: SLF001
    with tempfile.TemporaryDirectory() as folder:
        given = [f"updates={options.updates}", "tasks.eval.size=32", f"run={folder}/run", *options.overrides]
        srpo_env.train("arithmetic_tiny", given)
    total = sum(clock.seconds.values())
    print(f"{total / (options.updates - WARM_UP):.2f} CPU seconds an update, of them")
    for part, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        print(f"  {seconds / total:6.1%} {part}")
    outside = {part: seconds for part, seconds in clock.seconds.items() if not part.startswith(MODEL)}
    print(f"  {sum(outside.values()) / total:6.1%} outside model compute")
    return int(max(outside.values()) > total / 10)


if __name__ == "__main__":
    sys.exit(main())

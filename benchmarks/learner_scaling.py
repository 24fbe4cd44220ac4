"""How do memory and time of an optimiser step grow with the set size and with the batch?

    OMP_NUM_THREADS=1 python benchmarks/learner_scaling.py

Memory: how far the resident set rises during one step (log-probs of all rows, then their gradient) over events of K
members, K = 1, 4 and 16, in micro-batches of 1,024 tokens, each in a process of its own; every K has the same number of
rows, each with a prompt of its own. Time: CPU seconds of a step over 4 k to 64 k tokens, and the ratio of the time a
token takes to that at 4 k: 1.0 is linear. The model is a small Qwen3 (hidden size 256, 4 layers, 2 k vocabulary).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from learner_parts import Policy, batch_of, cpu_seconds, drawn, memory_rise, tiny_qwen3

from srpo_env.trainers.srpo import SRPOConfig, SRPOLearner
from srpo_env.trainers.srpo.batch_advantage import estimate

VOCABULARY = 2_000
PROMPT, OUTPUT = 64, 64
MEMBERS = (1, 4, 16)
THOUSANDS = (4, 8, 16, 32, 64)


def step(rows: int, members: int) -> Callable[[], object]:
    """A later optimiser step, over this many rows in events of this many members."""
    draw = random.Random(0)
    row = lambda: (drawn(draw, PROMPT, VOCABULARY), drawn(draw, OUTPUT, VOCABULARY))  # noqa: E731
    batch = batch_of([[[row() for _ in range(members)] for _ in range(rows // members)]])
    batch = replace(batch, old_logprobs=torch.full(batch.mask.shape, -7.6) * batch.mask)
    config = SRPOConfig(clip=0.2, length_norm="mean", micro_batch_tokens=1024)
    learner = SRPOLearner(config, Policy(tiny_qwen3(VOCABULARY)))
    advantage = estimate(batch, config, None)
    events = torch.arange(batch.num_events)
    return lambda: learner._step(batch, events, advantage, on_policy=False)  # noqa: SLF001


def measure(what: str, size: int) -> float:
    """MiB of a step at set size `size`, or CPU seconds of one over `size` thousand tokens."""
    torch.set_num_threads(1)
    step(4, 2)()
    if what == "memory":
        return memory_rise(step(64, size))
    work = step(size * 1024 // (PROMPT + OUTPUT), 4)
    return cpu_seconds(work, repeats=2 if size < 16 else 1)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "SIZE"), help="measures one figure, prints JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return

    def figure(what: str, size: int) -> float:
        command = [sys.executable, __file__, "--one", what, str(size)]
        return float(json.loads(subprocess.check_output(command, text=True)))

    first = figure("memory", MEMBERS[0])
    print(f"K = {MEMBERS[0]:2}: {first:6.0f} MiB", flush=True)
    for size in MEMBERS[1:]:
        mib = figure("memory", size)
        print(f"K = {size:2}: {mib:6.0f} MiB, {mib / first:.3f}x of K = {MEMBERS[0]}", flush=True)
    first = figure("time", THOUSANDS[0])
    print(f"{THOUSANDS[0]:2} k tokens: {first:6.2f} CPU s", flush=True)
    for size in THOUSANDS[1:]:
        seconds = figure("time", size)
        per_token = seconds / size / (first / THOUSANDS[0])
        print(f"{size:2} k tokens: {seconds:6.2f} CPU s, {per_token:.3f}x per token of {THOUSANDS[0]} k", flush=True)


if __name__ == "__main__":
    main()

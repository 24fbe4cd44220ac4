"""Makes the weights that the recipe `router_tiny` starts from, out of those of `arithmetic_tiny`.

The policy imitates two demonstrators on sums of the train split only. One solves: it is always right on two numbers and
right half the time on three; else it is off by up to 20, so that several of its answers hardly ever share a mistake and
a majority of five is right far more often than one. The other routes, knowing nothing: whatever the sum, it says `all`
three times in four.

    OMP_NUM_THREADS=1 python dev/make_router.py agents/models/router
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from make_tiny import ASSISTANT, END, USER, imitate
from transformers import AutoModelForCausalLM, AutoTokenizer

from srpo_env.agents.tiny import arithmetic as start
from srpo_env.arithmetic import arithmetic

ROUTES = ("one", "all", "all", "all")


def solution(problem: str, draw: random.Random, unsure: float) -> str:
    """What the solver writes."""
    numbers = [int(number) for number in problem.rstrip("=").split("+")]
    off = len(numbers) > 2 and draw.random() < unsure
    return str(sum(numbers) + (draw.choice((-1, 1)) * draw.randint(1, 20) if off else 0))


def main() -> None:
    """Trains for `--steps` steps and writes a transformers folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--rows", type=int, default=96, help="of a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--high", type=int, default=49, help="largest number of a sum")
    parser.add_argument("--unsure", type=float, default=0.5, help="share of wrong demonstrations of three numbers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    draw = random.Random(args.seed)
    tokenizer, model = AutoTokenizer.from_pretrained(start()), AutoModelForCausalLM.from_pretrained(start()).train()
    sums = [
        [task.problem for task in arithmetic(terms=terms, high=args.high, size=size).tasks]
        for terms, size in ((2, 1200), (3, 20_000))
    ]

    def row(at: int) -> tuple[list[int], list[int]]:
        problem = draw.choice(sums[at % 2])
        routed = at % 12 < 2
        prompt, answer = (
            (f"route {problem}", draw.choice(ROUTES)) if routed else (problem, solution(problem, draw, args.unsure))
        )
        ids = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (f"{USER}{prompt}{END}{ASSISTANT}", answer + END)
        )
        return next(ids), next(ids)

    imitate(model, lambda: [row(at) for at in range(args.rows)], args.steps, args.lr)
    model.eval()
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    print(f"{sum(each.numel() for each in model.parameters())} parameters in {args.folder}")


if __name__ == "__main__":
    main()

"""Makes the weights that the recipe `router_tiny` starts from, out of those of `arithmetic_tiny`.

First the policy imitates, on problems of the train split only, one who adds two and three numbers, and one who routes
and knows nothing: whatever the sum, it says `all` three times in four. Then it grows sure of two numbers and unsure of
three: it approaches its own distribution at a low and at a high temperature. Answers that it is unsure of hardly ever
share a mistake, so a majority of four is right far more often than one.

    OMP_NUM_THREADS=1 python dev/make_router.py agents/models/router
"""

from __future__ import annotations

import argparse
import copy
import random
from pathlib import Path

import torch
from make_tiny import ASSISTANT, END, USER, imitate
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from srpo_env.agents.tiny import arithmetic as start
from srpo_env.arithmetic import arithmetic

HIGH = 49
ROUTES = ("one", "all", "all", "all")
STEPS, LATER_STEPS, ROWS, RATE = 550, 100, 96, 2e-3
SURE, UNSURE = 0.5, 2.35
PATH = 2
"""Characters of an answer that are given: what follows each of them, and the prompt, is approached."""


def approach(model: PreTrainedModel, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Cross-entropy with the wanted distributions of what follows the prompt and each character of the path."""
    losses = []
    for ids, wanted in batches:
        logits = model(input_ids=ids, logits_to_keep=PATH + 1).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1)))
    return torch.stack(losses).sum()


def main() -> None:
    """Trains and writes a transformers folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder

    torch.manual_seed(0)
    draw = random.Random(0)
    tokenizer, model = AutoTokenizer.from_pretrained(start()), AutoModelForCausalLM.from_pretrained(start()).train()
    tasks = [arithmetic(terms=terms, high=HIGH, size=size).tasks for terms, size in ((2, 1200), (3, 20_000))]

    def encoded(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def pair(kind: int, *, routed: bool, astray: float) -> tuple[str, str]:
        """A prompt and what follows; of three numbers, with chance `astray`, two digits at random."""
        task = draw.choice(tasks[kind])
        if routed:
            return f"route {task.problem}", draw.choice(ROUTES)
        goes_astray = kind == 1 and draw.random() < astray
        return task.problem, f"{draw.randrange(100):02}" if goes_astray else task.answers[0]

    def row(at: int) -> tuple[list[int], list[int]]:
        prompt, answer = pair(at % 2, routed=at % 12 < 2, astray=0.0)
        return encoded(f"{USER}{prompt}{END}{ASSISTANT}"), encoded(answer + END)

    def path(kind: int, *, routed: bool) -> list[int]:
        prompt, answer = pair(kind, routed=routed, astray=0.5)
        return encoded(f"{USER}{prompt}{END}{ASSISTANT}{answer[:PATH]}")

    imitate(model, lambda: [row(at) for at in range(ROWS)], STEPS, RATE)

    first = copy.deepcopy(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE / 4, weight_decay=0.0, betas=(0.9, 0.99))
    for step in range(LATER_STEPS):
        optimiser.param_groups[0]["lr"] = RATE / 4 * (1 - step / LATER_STEPS)
        batches = []
        for kind, routed, temperature in ((0, False, SURE), (1, False, UNSURE), (0, True, 1.0), (1, True, 1.0)):
            ids = torch.tensor([path(kind, routed=routed) for _ in range(ROWS // (6 if routed else 2))])
            with torch.no_grad():
                logits = first(input_ids=ids, logits_to_keep=PATH + 1).logits
            batches.append((ids, (logits / temperature).softmax(-1)))
        loss = approach(model, batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if (step + 1) % 20 == 0:
            print(f"later step {step + 1}/{LATER_STEPS}: loss {loss.item():.3f}", flush=True)
    model.eval().half()  # the package holds 2 MiB of weights, and the first model takes 1.2 of them
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{sum(each.numel() for each in model.parameters())} parameters in {folder}")


if __name__ == "__main__":
    main()

"""What does an optimiser step cost where rows share a long beginning, but not their whole prompts?

    OMP_NUM_THREADS=1 python benchmarks/learner_prefixes.py

The gradient of 128 rows: a few-shot head of 300 tokens, 16 tasks of 12 tokens, 8 answers to each of 8 to 16 tokens. The
same model (hidden size 256, 4 layers, 2 k vocabulary) computes what rows have in common once, and each row whole.
"""

from __future__ import annotations

import random

import torch
from learner_parts import batch_of, cpu_seconds, drawn, memory_rise, tiny_qwen3

from srpo_env.trainers.srpo.gradients import back_propagate
from srpo_env.trainers.srpo.ranks import Ranks
from srpo_env.trainers.srpo.scoring import Scorer

VOCABULARY = 2_000


def main() -> None:
    """Prints tokens, memory and time of both ways."""
    torch.set_num_threads(1)
    draw = random.Random(0)
    head = drawn(draw, 300, VOCABULARY)
    groups = []
    for _ in range(16):
        prompt = head + drawn(draw, 12, VOCABULARY)
        groups.append([[(prompt, drawn(draw, draw.randint(8, 16), VOCABULARY))] for _ in range(8)])
    batch = batch_of(groups)
    rows, gradient = torch.arange(batch.num_members), batch.mask.float()
    model = tiny_qwen3(VOCABULARY).eval()
    tokens: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, __: tokens.append(ids[0].numel()))
    for share in (True, False):
        scorer = Scorer(model, share=share)
        step = lambda scorer=scorer: back_propagate(scorer, Ranks(), batch, rows, gradient)  # noqa: E731
        scorer.pieces(batch, rows[:1])  # the self-checks
        tokens.clear()
        mib = memory_rise(step)
        computed = sum(tokens)
        print(f"share = {share}: {computed:6} tokens, {mib:5.0f} MiB, {cpu_seconds(step, 1):6.2f} CPU s", flush=True)


if __name__ == "__main__":
    main()

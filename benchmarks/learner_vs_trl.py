"""CPU time and memory of one optimiser step: this learner, TRL's GRPOTrainer, and a plain loop.

    OMP_NUM_THREADS=1 python benchmarks/learner_vs_trl.py [--repeats 3] [--shapes 128/128 512/64]

Run it where trl 1.16 is installed beside this package. The model is a tiny Qwen3 (hidden size 256, 4 layers, a
vocabulary of 32 k, float32), the batch one group of 8 answers to one prompt, with the same tokens and advantages for
all. Each way runs in a process of its own: a step over two short rows (which makes the optimiser's state), a step whose
rise of the resident set is the memory, and more steps whose least CPU time is the time.

A step is what follows once old log-probs and advantages are at hand: log-probs with their graph, loss, backward,
clipping of the gradient's norm, fused AdamW. Laying events out as an EventBatch is no part of it, nor is building TRL's
tensors. `learner, later step` scores all rows once more without gradient, as every optimiser step after the first does.
`plain` is what many write by hand: `logits_to_keep`, log-softmax, the same loss. TRL computes entropies for its log in
this step, this learner in the pass that gives the old log-probs.

On a CPU, TRL's trainer runs another path than on a GPU: these are no figures of its speed there.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from learner_parts import VOCABULARY, Policy, Row, batch_of, cpu_seconds, drawn, memory_rise, tiny_qwen3

from srpo_env.trainers.srpo import SRPOConfig, SRPOLearner, srpo_loss
from srpo_env.trainers.srpo.batch_advantage import estimate

G = 8
SHAPES = {"128/128": (128, 128), "512/64": (512, 64)}
WAYS = ("trl", "plain", "learner", "learner, later step")
Step = Callable[[], object]


def group(prompt: int, output: int, size: int = G) -> list[Row]:
    """One prompt and `size` answers."""
    draw = random.Random(prompt)
    shared = drawn(draw, prompt)
    return [(shared, drawn(draw, output)) for _ in range(size)]


def columns(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts, outputs, old log-probs and advantages."""
    prompts, outputs = (torch.tensor(each) for each in zip(*rows, strict=True))
    return prompts, outputs, torch.full(outputs.shape, -10.0), torch.tensor([-1.0, 1.0] * (len(rows) // 2))


def learner(*, later: bool) -> Callable[[list[Row]], Step]:
    """One step of SRPOLearner; old log-probs are the present ones at the first step of a batch."""
    made = SRPOLearner(SRPOConfig(preset="grpo"), Policy(tiny_qwen3()))

    def prepare(rows: list[Row]) -> Step:
        batch = batch_of([[[row] for row in rows]])
        batch = replace(batch, old_logprobs=torch.full(batch.mask.shape, -10.0) * batch.mask)
        advantage = estimate(batch, made.config, None)
        events = torch.arange(batch.num_events)
        return lambda: made._step(batch, events, advantage, on_policy=not later)  # noqa: SLF001

    return prepare


def plain() -> Callable[[list[Row]], Step]:
    """The loop that many write by hand."""
    model = tiny_qwen3()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def prepare(rows: list[Row]) -> Step:
        prompts, outputs, old, advantage = columns(rows)
        ids = torch.cat([prompts, outputs], dim=1)
        kept = outputs.shape[1]

        def step() -> None:
            logits = model(input_ids=ids, logits_to_keep=kept + 1, use_cache=False).logits[:, :-1]
            new = logits.log_softmax(-1).gather(2, outputs.unsqueeze(2)).squeeze(2)
            srpo_loss(
                new,
                old,
                torch.ones_like(outputs),
                torch.arange(len(rows)),
                advantage,
                clip_low=0.2,
                clip_high=0.2,
                ratio_level="token",
                reduction="member",
            ).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()

        return step

    return prepare


def trl() -> Callable[[list[Row]], Step]:
    """The loss of GRPOTrainer on inputs as it prepares them, and what `Trainer` does with it."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = {str(i): i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), eos_token="1", pad_token="2"
    )
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=G,
        num_generations=G,
        loss_type="grpo",
        learning_rate=1e-6,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=tiny_qwen3(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "3"}] * G),
        processing_class=tokenizer,
    )
    model = trainer.model
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def prepare(rows: list[Row]) -> Step:
        prompts, outputs, old, advantage = columns(rows)
        inputs: dict[str, Any] = {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": outputs,
            "completion_mask": torch.ones_like(outputs),
            "old_per_token_logps": old,
            "advantages": advantage,
        }

        def step() -> None:
            trainer.compute_loss(model, inputs).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()

        return step

    return prepare


def measure(way: str, prompt: int, output: int, repeats: int) -> dict[str, float]:
    """CPU seconds and MiB of one way's step."""
    makers: dict[str, Callable[[], Callable[[list[Row]], Step]]] = {
        "trl": trl,
        "plain": plain,
        "learner": lambda: learner(later=False),
        "learner, later step": lambda: learner(later=True),
    }
    torch.set_num_threads(1)
    prepare = makers[way]()
    prepare(group(4, 4, size=2))()
    step = prepare(group(prompt, output))
    return {"MiB": memory_rise(step), "CPU s": cpu_seconds(step, repeats)}


def main() -> None:
    """Prints each way's figures and its ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES), help="prompt/output tokens")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "PROMPT", "OUTPUT"), help="measures one way, prints JSON")
    options = parser.parse_args()
    if options.one:
        way, prompt, output = options.one
        print(json.dumps(measure(way, int(prompt), int(output), options.repeats)))
        return
    for prompt, output in (SHAPES[name] for name in options.shapes):
        found: dict[str, dict[str, float]] = {}
        for way in WAYS:
            command = [sys.executable, __file__, "--repeats", str(options.repeats), "--one", way]
            done = subprocess.run([*command, str(prompt), str(output)], check=True, stdout=subprocess.PIPE, text=True)
            found[way] = json.loads(done.stdout.splitlines()[-1])
        for way, figures in found.items():
            ratios = (
                f"{figures['CPU s'] / found[other]['CPU s']:.3f}x time, {figures['MiB'] / found[other]['MiB']:.3f}x "
                f"memory of {other}"
                for other in ("trl", "plain")
            )
            print(
                f"{prompt}/{output} {way:20} {figures['CPU s']:6.2f} CPU s {figures['MiB']:6.0f} MiB:",
                *ratios,
                sep="  ",
            )


if __name__ == "__main__":
    main()

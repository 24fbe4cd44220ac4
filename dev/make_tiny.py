"""Makes the weights that the recipe `arithmetic_tiny` starts from: a character tokenizer and a tiny Qwen3.

The policy imitates a careless demonstrator on sums of the train split only: one that adds two-digit numbers, but gets
the carry out of the units wrong more often than right. A sampled answer to a held-out sum is then right in about 0.4 of
the cases, and the most likely answer is usually wrong. Reinforcement learning has to turn that round.

    OMP_NUM_THREADS=1 python dev/make_tiny.py agents/models/arithmetic
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from srpo_env.arithmetic import split_of

PAD, SYSTEM, USER, ASSISTANT, END, UNKNOWN = (
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|unk|>",
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: newline and printable ASCII, and six special tokens; anything else is `<|unk|>`."""
    return tokenizer_of()


def tokenizer_of(pieces: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A token for each of some pieces of text, the longest first, and one for each other character."""
    special = (PAD, SYSTEM, USER, ASSISTANT, END, UNKNOWN)
    characters = ("\n", *(chr(code) for code in range(32, 127)))
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys((*special, *characters, *pieces)))}
    longest_first = sorted(set(pieces), key=lambda piece: (-len(piece), piece))
    pattern = "|".join((*map(re.escape, longest_first), r"[\s\S]"))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def tiny_qwen3(tokenizer: PreTrainedTokenizerFast, **changed: Any) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.31 M parameters, or with another configuration; input and output embeddings are tied."""
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    model = Qwen3ForCausalLM(Qwen3Config(**shape | changed))
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def demonstration(problem: str, draw: random.Random, careless: float) -> str:
    """What the demonstrator writes: careless, it drops the carry out of the units where it is due, else makes one."""
    first, second = map(int, problem.rstrip("=").split("+"))
    if draw.random() >= careless:
        return str(first + second)
    return str(first + second + (-10 if first % 10 + second % 10 >= 10 else 10))


def supervised_step(
    model: Qwen3ForCausalLM, optimiser: torch.optim.Optimizer, rows: Sequence[tuple[list[int], list[int]]]
) -> float:
    """One step on (prompt ids, answer ids), padded on the left; the loss is over the answers alone."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    present, wanted = torch.zeros_like(ids), torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, width - len(prompt) - len(answer) :] = torch.tensor(prompt + answer)
        present[row, width - len(prompt) - len(answer) :] = 1
        wanted[row, width - len(answer) :] = True
    keep = max(len(answer) for _, answer in rows)
    logits = model(
        input_ids=ids,
        attention_mask=present,
        position_ids=(present.cumsum(1) - 1).clamp(min=0),
        logits_to_keep=keep + 1,
    ).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits[wanted[:, -keep:]], ids[wanted])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return loss.item()


def imitate(
    model: Qwen3ForCausalLM, rows_of_step: Callable[[], Sequence[tuple[list[int], list[int]]]], steps: int, lr: float
) -> None:
    """Trains on fresh rows each step, see `supervised_step`; the rate rises for 30 steps and falls to nothing."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, betas=(0.9, 0.99))
    for step in range(steps):
        rate = min(1.0, (step + 1) / 30) * (1.0 - step / steps)
        for group in optimiser.param_groups:
            group["lr"] = lr * rate
        loss = supervised_step(model, optimiser, rows_of_step())
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps}: loss {loss:.3f}", flush=True)


def main() -> None:
    """Trains for `--steps` steps, the learning rate falling to nothing, and writes a transformers folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rows", type=int, default=128, help="of a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--careless", type=float, default=0.63, help="share of demonstrations with the carry wrong")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    draw = random.Random(args.seed)
    tokenizer = character_tokenizer()
    model = tiny_qwen3(tokenizer)
    numbers = range(10, 100)
    problems = [f"{a}+{b}=" for a in numbers for b in numbers if split_of(f"{a}+{b}") == "train"]
    prompts = {
        problem: tokenizer.encode(f"{USER}{problem}{END}{ASSISTANT}", add_special_tokens=False) for problem in problems
    }

    def rows() -> list[tuple[list[int], list[int]]]:
        chosen = [
            (problem, demonstration(problem, draw, args.careless)) for problem in draw.sample(problems, args.rows)
        ]
        return [
            (prompts[problem], tokenizer.encode(answer + END, add_special_tokens=False)) for problem, answer in chosen
        ]

    imitate(model, rows, args.steps, args.lr)
    model.eval()
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    print(f"{sum(each.numel() for each in model.parameters())} parameters in {args.folder}")


if __name__ == "__main__":
    main()

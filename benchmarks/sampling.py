"""Tokens per second of the backend `local` against `model.generate` in static batches, same requests.

    OMP_NUM_THREADS=1 python benchmarks/sampling.py FOLDER_OR_NAME [--requests 64] [--repeats 3] [--common TOKENS]

64 prompts of 32 to 256 tokens, outputs of geometric length (mean 64, cap 256). No end token counts on
either side, so every output has exactly its drawn length; `generate` runs each batch until its longest
output is done, and only the tokens that were asked for count. Its batches are taken as the requests
come, sorted by prompt length, and sorted by output length (which no scheduler knows beforehand). Only
the ratios inside one run mean anything.

With `--common`, every prompt is that many tokens which all have and 8 to 32 of its own, as with few-shot examples
before different tasks, every output 16 tokens; the engine is measured against itself computing each prompt whole.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedModel

from srpo_env.agents.generation import Generator, Row
from srpo_env.models import load_model
from srpo_env.records import Sampling

BATCH = 16
OUTPUT = 16
Request = tuple[tuple[int, ...], int]


def requests(count: int, vocabulary: int, seed: int = 0) -> list[Request]:
    """Draws (prompt ids, output length)."""
    draw = random.Random(seed)
    return [
        (
            tuple(draw.randrange(10, vocabulary) for _ in range(draw.randint(32, 256))),
            min(256, 1 + int(draw.expovariate(1 / 63.5))),
        )
        for _ in range(count)
    ]


def alike(count: int, vocabulary: int, common: int, seed: int = 0) -> list[Request]:
    """Draws (prompt ids, output length); prompts begin with `common` tokens that all have."""
    draw = random.Random(seed)
    drawn = lambda n: tuple(draw.randrange(10, vocabulary) for _ in range(n))  # noqa: E731
    beginning = drawn(common)
    return [(beginning + drawn(draw.randint(8, 32)), OUTPUT) for _ in range(count)]


class Whole(Generator):
    """Computes each prompt whole, whatever it has in common with others."""

    _shares = False  # type: ignore[assignment]


def prompt_tokens(ids: torch.Tensor) -> int:
    """Tokens of a pass that reads prompts, padding included; 0 for one that goes on with outputs."""
    return ids.numel() if ids.shape[1] > 1 else 0


def local(generator: Generator, rows: Sequence[Request]) -> None:
    """Samples the rows with the engine of the backend `local`."""
    queued = [Row(prompt, Sampling(max_tokens=length), length, seed) for seed, (prompt, length) in enumerate(rows)]
    generator.add(queued)
    while generator.busy:
        generator.step()
    assert [len(row.output) for row in queued] == [length for _, length in rows]


@torch.no_grad()
def generate(model: PreTrainedModel, rows: Sequence[Request]) -> None:
    """Samples the rows with `model.generate`, in batches of 16, in this order."""
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        width = max(len(prompt) for prompt, _ in batch)
        longest = max(length for _, length in batch)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt, _ in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch])
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=longest,
        )
        assert out.shape[1] == width + longest


def main() -> None:
    """Prints the tokens per second of each way, the best of its repeats, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a transformers folder or a registered name")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--common", type=int, help="tokens that all prompts begin with; measures what sharing them saves"
    )
    arguments = parser.parse_args()

    model = load_model(arguments.model, arguments.dtype).model
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0)
    make = partial(Generator, model, frozenset(), lambda ids: "", max_rows=512, cache_bytes=4 << 30)
    ways: dict[str, Callable[[], object]]
    if arguments.common:
        rows = alike(arguments.requests, model.config.vocab_size, arguments.common)
        ways = {
            "local": partial(local, make(), rows),
            "local, each prompt whole": partial(local, Whole(*make.args, **make.keywords), rows),
        }
    else:
        rows = requests(arguments.requests, model.config.vocab_size)
        ways = {
            "local": partial(local, make(), rows),
            "generate, as they come": partial(generate, model, rows),
            "generate, by prompt length": partial(generate, model, sorted(rows, key=lambda row: len(row[0]))),
            "generate, by output length": partial(generate, model, sorted(rows, key=lambda row: row[1])),
        }
    read: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, __: read.append(prompt_tokens(ids[0])))
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(arguments.repeats):  # interleaved, so that a busy neighbour slows all of them
        for way, work in ways.items():
            read.clear()
            began, cpu = time.perf_counter(), time.process_time()
            work()
            times[way].append((time.perf_counter() - began, time.process_time() - cpu))
            print(f"{way}: {times[way][-1][0]:.1f} s, {sum(read)} tokens of prompts", file=sys.stderr, flush=True)

    tokens = sum(length for _, length in rows)
    best = {way: [min(column) for column in zip(*taken, strict=True)] for way, taken in times.items()}
    for way, (wall, cpu) in best.items():
        print(
            f"{way:28} {tokens / wall:9.0f} tokens/s ({tokens / cpu:.0f} a CPU second); local takes "
            f"1 / {wall / best['local'][0]:.2f} of its time (1 / {cpu / best['local'][1]:.2f} CPU)"
        )
    print(json.dumps({"tokens": tokens, "seconds": best}))


if __name__ == "__main__":
    main()

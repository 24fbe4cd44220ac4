"""Tokens per second of the backend `local` against `model.generate` in static batches, same requests.

    OMP_NUM_THREADS=1 python benchmarks/sampling.py FOLDER_OR_NAME [--requests 64] [--repeats 3]

64 prompts of 32 to 256 tokens, outputs of geometric length (mean 64, cap 256). No end token counts on
either side, so every output has exactly its drawn length; `generate` runs each batch until its longest
output is done, and only the tokens that were asked for count. Its batches are taken as the requests
come, sorted by prompt length, and sorted by output length (which no scheduler knows beforehand). Only
the ratios inside one run mean anything.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel

from srpo_env.agents.generation import Generator, Row
from srpo_env.models import load_model
from srpo_env.records import Sampling

BATCH = 16
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
    arguments = parser.parse_args()

    model = load_model(arguments.model, arguments.dtype).model
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0)
    rows = requests(arguments.requests, model.config.vocab_size)
    generator = Generator(model, frozenset(), lambda ids: "", max_rows=512, cache_bytes=4 << 30)
    by_prompt = sorted(rows, key=lambda row: len(row[0]))
    by_output = sorted(rows, key=lambda row: row[1])
    ways: dict[str, Callable[[], object]] = {
        "local": lambda: local(generator, rows),
        "generate, as they come": lambda: generate(model, rows),
        "generate, by prompt length": lambda: generate(model, by_prompt),
        "generate, by output length": lambda: generate(model, by_output),
    }
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(arguments.repeats):  # interleaved, so that a busy neighbour slows all of them
        for way, work in ways.items():
            began, cpu = time.perf_counter(), time.process_time()
            work()
            times[way].append((time.perf_counter() - began, time.process_time() - cpu))
            print(f"{way}: {times[way][-1][0]:.1f} s", file=sys.stderr, flush=True)

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
